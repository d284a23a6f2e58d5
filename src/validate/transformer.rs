//! The transformer's other kernels against f64.

use super::{Comparison, Outcome, Random};
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::model::EPSILON;
use crate::model::kernels::{EmbedParams, MatmulParams, ModelKernels, NormParams};

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
                let ids: Vec<u32> = (0..rows).map(|i| (i * 7) % rows).collect();
                let [ids_buffer, table] = [gpu.upload("ids", &ids)?, gpu.upload("table", &y)?];
                let params = EmbedParams {
                    tokens: rows,
                    columns,
                    first_position: 0,
                };
                let got = run(count, &|pass, output| {
                    kernels.embed(gpu, pass, [&ids_buffer, &table, &x_buffer, output], params)
                })?;
                let wanted: Vec<f64> = (0..count as usize)
                    .map(|i| {
                        let row = ids[i / columns as usize] * columns;
                        f64::from(y[row as usize + i % columns as usize]) + f64::from(x[i])
                    })
                    .collect();
                // One rounded sum.
                outcome.add(compare(&got, &wanted, |w| 1.2e-7 * w.abs()), &what);
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
            "matmul" => {
                let outputs = 9;
                let weight = numbers(columns * outputs);
                let weight_buffer = gpu.upload("weight", &weight)?;
                let params = MatmulParams {
                    rows,
                    inner: columns,
                    columns: outputs,
                };
                for transposed in [false, true] {
                    let got = run(rows * outputs, &|pass, output| {
                        kernels.matmul(gpu, pass, [&x_buffer, &weight_buffer, output], params, transposed)
                    })?;
                    let at = |i: u32, o: u32| {
                        if transposed {
                            o * columns + i
                        } else {
                            i * outputs + o
                        }
                    };
                    let terms = |index: usize| {
                        let (row, o) = (index as u32 / outputs, index as u32 % outputs);
                        (0..columns)
                            .map(|i| {
                                f64::from(x[(row * columns + i) as usize])
                                    * f64::from(weight[at(i, o) as usize])
                            })
                            .collect::<Vec<_>>()
                    };
                    let wanted: Vec<f64> = (0..got.len()).map(|i| terms(i).iter().sum()).collect();
                    // Rounding of each term and of each partial sum, relative to the sum of magnitudes.
                    let ulp = f64::from(columns / 4 + 4) * 6e-8;
                    let bounds: Vec<f64> = (0..got.len())
                        .map(|i| ulp * terms(i).iter().map(|t| t.abs()).sum::<f64>())
                        .collect();
                    let mut bounds = bounds.into_iter();
                    outcome.add(compare(&got, &wanted, |_| bounds.next().unwrap_or(0.0)), &what);
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
