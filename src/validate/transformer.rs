//! The transformer's other kernels against f64.

use super::{Comparison, Outcome, Random};
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
                    let row = |id: &u32| &y[(id * columns) as usize..((id + 1) * columns) as usize];
                    let wanted: Vec<f64> = ids.iter().flat_map(row).map(|&v| rounded(v, float)).collect();
                    // Copies. A driver may flush halves below 2^-14.
                    let flushed = if float == FloatType::F16 { 6.2e-5 } else { 0.0 };
                    let bound = |w: f64| if w.abs() < flushed { flushed } else { 0.0 };
                    outcome.add(compare(&got, &wanted, bound), &what);
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
                let wanted: Vec<f64> = wide(&x)
                    .chunks(columns as usize)
                    .flat_map(|row| {
                        let n = row.len() as f64;
                        let mean = row.iter().sum::<f64>() / n;
                        let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
                        row.iter()
                            .map(move |v| (v - mean) / (variance + EPSILON).sqrt())
                            .collect::<Vec<_>>()
                    })
                    .collect();
                // Two sums of `columns` terms, a square root and a division that may be 2.5 ulp off.
                outcome.add(compare(&got, &wanted, |w| 2e-6 * (1.0 + w.abs())), &what);
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
                let wanted: Vec<f64> = wide(&x)
                    .chunks(columns as usize)
                    .flat_map(|row| {
                        let mean = row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64;
                        row.iter()
                            .zip(wide(&gain))
                            .map(move |(v, g)| v / (mean + EPSILON).sqrt() * g)
                            .collect::<Vec<_>>()
                    })
                    .collect();
                // A sum of `columns` terms, a square root and a division that may be 2.5 ulp off, a product.
                outcome.add(compare(&got, &wanted, |w| 2e-6 * (1.0 + w.abs())), &what);
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
                    let terms = |index: usize| {
                        let (row, o) = (index as u32 / outputs, index as u32 % outputs);
                        (0..columns)
                            .map(|i| {
                                f64::from(x[(row * columns + i) as usize])
                                    * rounded(weight[(o * columns + i) as usize], float)
                            })
                            .collect::<Vec<_>>()
                    };
                    let wanted: Vec<f64> = (0..got.len()).map(|i| terms(i).iter().sum()).collect();
                    // Rounding of each term and of each partial sum, relative to the sum of magnitudes.
                    let ulp = f64::from(columns / 4 + 6) * 6e-8;
                    let flushed = if float == FloatType::F16 { 6.2e-5 } else { 0.0 };
                    let bounds: Vec<f64> = (0..got.len())
                        .map(|i| ulp * terms(i).iter().map(|t| t.abs()).sum::<f64>())
                        .collect();
                    let mut bounds = bounds.into_iter();
                    let bound = |_| bounds.next().unwrap_or(0.0) + flushed * 1e-3;
                    outcome.add(compare(&got, &wanted, bound), &what);
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
                    let wanted: Vec<f64> = (0..count)
                        .map(|i| {
                            let (row, channel) = (i / columns, i % columns);
                            table.turned(first_position + row / heads, channel, |c| head(row, c))
                        })
                        .collect();
                    // Two products and their sum.
                    outcome.add(compare(&got, &wanted, |_| 1e-6), &what);
                }
            }
            "activation" => {
                let got = run(count, &|pass, output| {
                    kernels.activation(gpu, pass, [&x_buffer, output], count)
                })?;
                let root = (2.0 / std::f64::consts::PI).sqrt();
                let gelu = |v: &f64| 0.5 * v * (1.0 + (root * (v + 0.044715 * v.powi(3))).tanh());
                let wanted: Vec<f64> = wide(&x).iter().map(gelu).collect();
                // WGSL allows tanh an absolute error of 1e-5; times |x| / 2 that is at most 3e-5 for |x| <= 6.
                outcome.add(compare(&got, &wanted, |w| 3e-5 + 1e-6 * w.abs()), &what);
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
                let gated = |(g, u): (f64, f64)| g / (1.0 + (-g).exp()) * u;
                let wanted: Vec<f64> = wide(&gate).into_iter().zip(wide(&x)).map(gated).collect();
                // WGSL allows exp 3 + 2 |x| ulp, and the division 2.5.
                outcome.add(compare(&got, &wanted, |w| 1e-6 + 3e-6 * w.abs()), &what);
            }
            "residual" => {
                let y_buffer = gpu.upload("y", &y)?;
                let got = run(count, &|pass, output| {
                    kernels.residual(gpu, pass, [&x_buffer, &y_buffer, output], count)
                })?;
                let wanted: Vec<f64> = wide(&x).iter().zip(wide(&y)).map(|(a, b)| a + b).collect();
                // One rounded sum.
                outcome.add(compare(&got, &wanted, |w| 1.2e-7 * w.abs()), &what);
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
    let columns = columns as usize;
    let rows = values.len() / columns;
    let quads = (0..columns / 4).flat_map(|quad| (0..rows).map(move |row| row * columns + 4 * quad));
    let values = quads.flat_map(|at| &values[at..at + 4]);
    match float {
        FloatType::F32 => gpu.upload("weight", &values.copied().collect::<Vec<f32>>()),
        FloatType::F16 => {
            let halves = values.map(|&v| half::f16::from_f32(v).to_bits());
            gpu.upload("weight", &halves.collect::<Vec<u16>>())
        }
    }
}

fn rounded(value: f32, float: FloatType) -> f64 {
    match float {
        FloatType::F32 => value.into(),
        FloatType::F16 => half::f16::from_f32(value).into(),
    }
}

fn compare(got: &[f64], wanted: &[f64], mut bound: impl FnMut(f64) -> f64) -> Comparison {
    let mut comparison = Comparison::default();
    for (a, b) in got.iter().zip(wanted) {
        comparison.judge((a - b).abs(), bound(*b));
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
        assert_eq!(compare(&[1.0, 2.0], &[1.0, 2.0], |_| 1e-9).failures, 0);
        assert_eq!(compare(&[1.0, 2.1], &[1.0, 2.0], |_| 0.05).failures, 1);
        assert_eq!(compare(&[f64::NAN, 2.0], &[1.0, 2.0], |_| 1.0).failures, 1);
        assert_eq!(compare(&[1.0], &[f64::NAN], |_| 1.0).failures, 1);
        assert_eq!(compare(&[1.0], &[1.0, 2.0], |_| 1.0).failures, 1);
    }
}
