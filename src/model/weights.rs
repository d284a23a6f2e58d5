//! Weights on a device: in buffers that it can bind, laid out for the products.

#[cfg(feature = "models")]
use std::collections::BTreeMap;

use half::f16;

use super::kernels::ModelKernels;
use super::{Config, Matrix, Model, Weights};
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::kernels::FloatType;

/// A matrix `[row][column]` as `[column quad][row][4]`: neighbouring invocations take neighbouring rows. Rows are split
/// over as many buffers as the device's bindings ask for.
#[derive(Debug)]
pub(super) struct Weight {
    pub rows: u32,
    pub columns: u32,
    pub float: FloatType,
    pub parts: Vec<Part>,
}

/// Some rows of a weight.
#[derive(Debug)]
pub(super) struct Part {
    pub first: u32,
    pub rows: u32,
    pub buffer: wgpu::Buffer,
}

impl Weight {
    /// Room for a matrix whose columns are a multiple of 4.
    fn reserve(gpu: &Gpu, name: &str, [rows, columns]: [u32; 2], float: FloatType) -> Result<Weight> {
        let row_bytes = u64::from(columns) * u64::from(float.bytes());
        let limits = gpu.device().limits();
        let bound = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
        let most = (bound / row_bytes.max(1)).clamp(1, u64::from(u32::MAX)) as u32;
        // Even parts.
        let share = rows.div_ceil(rows.div_ceil(most).max(1)).max(1);
        let mut parts = Vec::new();
        for first in (0..rows).step_by(share as usize) {
            let rows = share.min(rows - first);
            let buffer = gpu.zeros(name, u64::from(rows) * row_bytes)?;
            parts.push(Part { first, rows, buffer });
        }
        Ok(Weight {
            rows,
            columns,
            float,
            parts,
        })
    }

    /// Writes the matrix, row-major, rounded to the weight's type.
    pub fn write(&self, gpu: &Gpu, name: &str, values: &[f32]) -> Result<()> {
        let columns = self.columns as usize;
        for part in &self.parts {
            let rows = part.rows as usize;
            let values = &values[part.first as usize * columns..][..rows * columns];
            let quads = (0..columns / 4).flat_map(|quad| (0..rows).map(move |row| row * columns + 4 * quad));
            let quads = quads.map(|at| &values[at..at + 4]);
            let words: Vec<u32> = match self.float {
                FloatType::F32 => quads.flatten().map(|v| v.to_bits()).collect(),
                FloatType::F16 => {
                    let halves: Vec<f16> = quads.flatten().map(|&v| f16::from_f32(v)).collect();
                    if halves.iter().any(|h| !h.is_finite()) {
                        return Err(Error::Usage {
                            asked: format!("tensor `{name}` in f16"),
                            reason: "a weight is above 65504".to_owned(),
                            advice: "keep the weights in f32".to_owned(),
                        });
                    }
                    let word =
                        |pair: &[f16]| u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16;
                    halves.chunks_exact(2).map(word).collect()
                }
            };
            let during = format!("uploading `{name}`");
            let written = gpu.checked(&during, || {
                let bytes: &[u8] = bytemuck::cast_slice(&words);
                let size = wgpu::BufferSize::new(bytes.len() as u64)?;
                let mut view = gpu.queue().write_buffer_with(&part.buffer, 0, size)?;
                view.slice(..).copy_from_slice(bytes);
                Some(())
            })?;
            written.ok_or_else(|| Error::Device {
                during: during.clone(),
                message: "the device was lost".to_owned(),
            })?;
            // Staging memory goes back before the next tensor.
            gpu.queue().submit([]);
            let _ = gpu.device().poll(wgpu::PollType::wait_indefinitely());
        }
        Ok(())
    }
}

/// A model's weights and kernels on a device. Models with caches share them.
#[derive(Debug)]
pub struct GpuWeights {
    pub(super) gpu: Gpu,
    pub(super) config: Config,
    pub(super) weights: Weights<Weight>,
    pub(super) kernels: ModelKernels,
}

impl GpuWeights {
    pub(super) fn new(gpu: &Gpu, config: Config, weights: Weights<Weight>) -> Result<GpuWeights> {
        Ok(GpuWeights {
            gpu: gpu.clone(),
            config,
            weights,
            kernels: ModelKernels::plan(gpu)?,
        })
    }

    /// Uploads a model in memory, in f32.
    ///
    /// # Errors
    /// [`Error::Limit`] and [`Error::Device`] where the device cannot hold it; [`Error::Shader`].
    pub fn of(gpu: &Gpu, model: &Model) -> Result<GpuWeights> {
        let weights = model.weights.map(|m: &Matrix| {
            let values: Vec<f32> = m.values.iter().map(|&v| v as f32).collect();
            let weight = Weight::reserve(gpu, "weights", [m.rows, m.columns], FloatType::F32)?;
            weight.write(gpu, "weights", &values)?;
            Ok(weight)
        })?;
        GpuWeights::new(gpu, model.config.clone(), weights)
    }

    /// Room for named tensors of rows and columns: all of it before the first is read, or none.
    #[cfg(feature = "models")]
    pub(super) fn reserve(
        gpu: &Gpu,
        tensors: &[(String, [u32; 2])],
        float: FloatType,
    ) -> Result<BTreeMap<String, Weight>> {
        // Gains stay in f32.
        let float_of = |rows: u32| if rows == 1 { FloatType::F32 } else { float };
        let bytes = |&(_, [rows, columns]): &(String, [u32; 2])| {
            u64::from(rows) * u64::from(columns) * u64::from(float_of(rows).bytes())
        };
        let needed: u64 = tensors.iter().map(bytes).sum();
        let limit = |allowed| Error::Limit {
            what: format!("the weights of the model as {float:?} (bytes)"),
            needed,
            allowed,
            advice: match float {
                FloatType::F32 => "keep them in f16, or use an adapter with more memory",
                FloatType::F16 => "use an adapter with more memory, or a smaller model",
            }
            .to_owned(),
        };
        if let Some(allowed) = gpu.free_memory().filter(|&free| free < needed) {
            return Err(limit(allowed));
        }
        let mut reserved = BTreeMap::new();
        let mut held = 0;
        for tensor in tensors {
            let (name, shape) = tensor;
            let weight = Weight::reserve(gpu, name, *shape, float_of(shape[0])).map_err(|e| match e {
                // Memory ran out: what it gave until then is what it has.
                Error::Device { .. } => limit(held),
                other => other,
            })?;
            held += bytes(tensor);
            reserved.insert(name.clone(), weight);
        }
        Ok(reserved)
    }

    /// The device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The shape.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        let mut bytes = 0;
        let _ = self.weights.map(|weight| {
            bytes += weight.parts.iter().map(|part| part.buffer.size()).sum::<u64>();
            Ok(())
        });
        bytes
    }
}
