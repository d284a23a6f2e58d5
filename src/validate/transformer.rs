//! The transformer's other kernels against f64.

use super::{Comparison, Outcome, Random, formulas};
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::kernels::FloatType;
use crate::model::EPSILON;
use crate::model::kernels::{EmbedParams, MatmulParams, ModelKernels, NormParams, RopeParams};
use crate::rope::{Rope, RopePairing, RopeScaling};

/// Rows and columns of the checks.
const SHAPES: [(u32, u32); 4] = [(1, 4), (3, 16), (33, 64), (5, 300)];

/// Checks one kernel of the transformer at several shapes.
pub(super) fn check(gpu: &Gpu, kernel: &str) -> Result<Outcome> {
    let kernels = ModelKernels::plan(gpu)?;
    let mut outcome = Outcome::default();
    for (rows, columns) in SHAPES {
        let mut random = Random::new(u64::from(rows * columns));
        let mut numbers = |count: u32| -> Vec<f32> { (0..count).map(|_| random.normal()).collect() };
        let (x, y) = (numbers(rows * columns), numbers(rows * columns));
        let count = rows * columns;
        let x_buffer = gpu.upload("x", &x)?;
        let wide = |v: &[f32]| -> Vec<f64> { v.iter().map(|&v| f64::from(v)).collect() };
        let run = |outputs: u32,
                   record: &dyn Fn(&mut wgpu::ComputePass<'_>, &wgpu::Buffer) -> Result<()>|
         -> Result<Vec<f64>> {
            let output = gpu.upload("output", &vec![f32::NAN; outputs as usize])?;
            gpu.submit(kernel, |encoder| {
                record(&mut encoder.begin_compute_pass(&Default::default()), &output)
            })?;
            Ok(wide(&gpu.read("output", &output, outputs as usize)?))
        };
        let what = format!("{rows} x {columns}");
        match kernel {
            "embed" => {
                // The table in two parts, in both types; ids of both parts.
                let ids: Vec<u32> = (0..rows).map(|i| (i * 7) % rows).collect();
                let ids_buffer = gpu.upload("ids", &ids)?;
                for float in [FloatType::F32, FloatType::F16] {
                    let got = run(count, &|pass, output| {
                        for (first_row, end) in [(0, rows / 2), (rows / 2, rows)] {
                            let part = &y[(first_row * columns) as usize..(end * columns) as usize];
                            let part = upload_weight(gpu, part, columns, float)?;
                            let params = EmbedParams {
                                tokens: rows,
                                columns,
                                first_row,
                                rows: end - first_row,
                            };
                            kernels.embed(gpu, pass, [&ids_buffer, &part, output], params, float)?;
                        }
                        Ok(())
                    })?;
                    let wanted = formulas::embed(&ids, &y, columns as usize, float);
                    outcome.add(compare(&got, &wanted), &what);
                }
            }
            "norm" => {
                let params = NormParams {
                    rows,
                    columns,
                    epsilon: EPSILON as f32,
                };
                let got = run(count, &|pass, output| {
                    kernels.norm(gpu, pass, [&x_buffer, output], params)
                })?;
                let wanted = formulas::norm(&x, columns as usize, None);
                outcome.add(compare(&got, &wanted), &what);
            }
            "rms_norm" => {
                let params = NormParams {
                    rows,
                    columns,
                    epsilon: EPSILON as f32,
                };
                let gain = numbers(columns);
                let gain_buffer = gpu.upload("gain", &gain)?;
                let got = run(count, &|pass, output| {
                    kernels.rms_norm(gpu, pass, [&x_buffer, &gain_buffer, output], params)
                })?;
                let wanted = formulas::norm(&x, columns as usize, Some(&gain));
                outcome.add(compare(&got, &wanted), &what);
            }
            "matmul" | "matvec" => {
                // Two parts of the outputs; the second begins off a tile.
                let (outputs, split) = (45, 9);
                let weight = numbers(columns * outputs);
                for float in [FloatType::F32, FloatType::F16] {
                    let got = run(rows * outputs, &|pass, output| {
                        for (first_column, end) in [(0, split), (split, outputs)] {
                            let part = &weight[(first_column * columns) as usize..(end * columns) as usize];
                            let part = upload_weight(gpu, part, columns, float)?;
                            let params = MatmulParams {
                                rows,
                                inner: columns,
                                columns: end - first_column,
                                first_column,
                                output_columns: outputs,
                            };
                            let buffers = [&x_buffer, &part, output];
                            match kernel {
                                "matmul" => kernels.matmul(gpu, pass, buffers, params, float)?,
                                _ => kernels.matvec(gpu, pass, buffers, params, float)?,
                            }
                        }
                        Ok(())
                    })?;
                    let wanted = formulas::product(&x, &weight, columns as usize, float);
                    outcome.add(compare(&got, &wanted), &what);
                }
            }
            "rope" => {
                // One row is one head here, of a quarter of the tokens' heads.
                let (heads, head_dim) = (if rows % 3 == 0 { 3 } else { 1 }, columns);
                for pairing in [RopePairing::Halves, RopePairing::Neighbours] {
                    let rope = Rope {
                        theta: 10_000.0,
                        pairing,
                        scaling: RopeScaling::None,
                    };
                    let first_position = 5;
                    let table = rope.table(head_dim, first_position + rows);
                    let turns = gpu.upload("turns", &table.turns)?;
                    let params = RopeParams {
                        tokens: rows / heads,
                        heads,
                        head_dim,
                        first_position,
                        halves: u32::from(pairing == RopePairing::Halves),
                    };
                    let got = run(count, &|pass, output| {
                        kernels.rope(gpu, pass, [&x_buffer, &turns, output], params)
                    })?;
                    let head = |row: u32, c: u32| f64::from(x[(row * columns + c) as usize]);
                    // Two products and their sum.
                    let wanted: Vec<[f64; 2]> = (0..count)
                        .map(|i| {
                            let (row, channel) = (i / columns, i % columns);
                            table.turned(first_position + row / heads, channel, |c| head(row, c))
                        })
                        .map(|w| [w, 1e-6])
                        .collect();
                    outcome.add(compare(&got, &wanted), &what);
                }
            }
            "activation" => {
                let got = run(count, &|pass, output| {
                    kernels.activation(gpu, pass, [&x_buffer, output], count)
                })?;
                outcome.add(compare(&got, &formulas::activation(&x)), &what);
            }
            "swiglu" => {
                // Gates far out too: there the exponential leaves f32.
                let gate: Vec<f32> = y
                    .iter()
                    .zip(0..)
                    .map(|(v, i)| if i % 7 == 0 { v * 1e3 } else { *v })
                    .collect();
                let gate_buffer = gpu.upload("gate", &gate)?;
                let got = run(count, &|pass, output| {
                    kernels.swiglu(gpu, pass, [&gate_buffer, &x_buffer, output], count)
                })?;
                outcome.add(compare(&got, &formulas::swiglu(&gate, &x)), &what);
            }
            "residual" => {
                let y_buffer = gpu.upload("y", &y)?;
                let got = run(count, &|pass, output| {
                    kernels.residual(gpu, pass, [&x_buffer, &y_buffer, output], count)
                })?;
                outcome.add(compare(&got, &formulas::residual(&x, &y)), &what);
            }
            _ => {
                return Err(Error::Usage {
                    asked: format!("kernel `{kernel}`"),
                    reason: "it has no check".to_owned(),
                    advice: "add one to validate::transformer".to_owned(),
                });
            }
        }
    }
    Ok(outcome)
}

/// A weight as the kernels read it, `[column quad][row][4]`.
fn upload_weight(gpu: &Gpu, values: &[f32], columns: u32, float: FloatType) -> Result<wgpu::Buffer> {
    let values = formulas::by_quads(values, columns as usize);
    match float {
        FloatType::F32 => gpu.upload("weight", &values),
        FloatType::F16 => {
            let halves = values.iter().map(|&v| half::f16::from_f32(v).to_bits());
            gpu.upload("weight", &halves.collect::<Vec<u16>>())
        }
    }
}

fn compare(got: &[f64], wanted: &[[f64; 2]]) -> Comparison {
    let mut comparison = Comparison::default();
    for (a, [b, bound]) in got.iter().zip(wanted) {
        comparison.judge((a - b).abs(), *bound);
    }
    if got.len() != wanted.len() {
        comparison.failures += 1;
    }
    comparison
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_the_bound_and_nan_fail() {
        let failures = |got: &[f64], wanted: &[[f64; 2]]| compare(got, wanted).failures;
        assert_eq!(failures(&[1.0, 2.0], &[[1.0, 1e-9], [2.0, 1e-9]]), 0);
        assert_eq!(failures(&[1.0, 2.1], &[[1.0, 0.05], [2.0, 0.05]]), 1);
        assert_eq!(failures(&[f64::NAN, 2.0], &[[1.0, 1.0], [2.0, 1.0]]), 1);
        assert_eq!(failures(&[1.0], &[[f64::NAN, 1.0]]), 1);
        assert_eq!(failures(&[1.0], &[[1.0, 1.0], [2.0, 1.0]]), 1);
    }
}
