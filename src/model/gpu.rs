//! The model on the GPU, in f32: from token ids to logits without a read-back in between.

use super::kernels::{EmbedParams, MatmulParams, ModelKernels, NormParams};
use super::{Backend, Config, EPSILON, Matrix, Model, Weights, forward};
use crate::cache::{CacheSpec, KvCache, SequenceId, Step};
use crate::error::Result;
use crate::gpu::Gpu;
use crate::options::AttentionOptions;

/// A tensor in a buffer of f32, `[row][column]`.
#[derive(Debug)]
struct Tensor {
    rows: u32,
    columns: u32,
    buffer: wgpu::Buffer,
}

/// The model with a cache.
#[derive(Debug)]
pub struct GpuModel {
    gpu: Gpu,
    config: Config,
    weights: Weights<Tensor>,
    kernels: ModelKernels,
    cache: KvCache,
    calibrates: bool,
}

impl GpuModel {
    /// The model with an empty cache. Where `calibrates` is set, the largest magnitudes of all rows that enter the
    /// cache are kept for [`KvCache::calibrated`].
    ///
    /// # Errors
    /// As [`KvCache::new`].
    pub fn new(gpu: &Gpu, model: &Model, spec: CacheSpec, calibrates: bool) -> Result<GpuModel> {
        let weights = model.weights.map(|m: &Matrix| {
            let values: Vec<f32> = m.values.iter().map(|&v| v as f32).collect();
            Ok(Tensor {
                rows: m.rows,
                columns: m.columns,
                buffer: gpu.upload("weights", &values)?,
            })
        })?;
        let (kernels, cache) = (ModelKernels::plan(gpu)?, KvCache::new(gpu, spec)?);
        Ok(GpuModel {
            gpu: gpu.clone(),
            config: model.config,
            weights,
            kernels,
            cache,
            calibrates,
        })
    }

    /// The cache.
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// Opens an empty sequence.
    pub fn open(&mut self) -> SequenceId {
        self.cache.open()
    }

    /// Frees a sequence.
    ///
    /// # Errors
    /// [`crate::Error::UnknownSequence`].
    pub fn free(&mut self, id: SequenceId) -> Result<()> {
        self.cache.free(id)
    }

    /// Appends tokens to a sequence: their logits, `[token][vocabulary]`. One submission; only the logits come back.
    ///
    /// # Errors
    /// As [`KvCache::step`]; [`crate::Error::Shape`] for ids or positions that the model lacks; [`crate::Error::Device`]
    /// where the device fails.
    pub fn logits(&mut self, id: SequenceId, ids: &[u32]) -> Result<Vec<f64>> {
        let first_position = self.cache.book().len(id)?;
        self.config.check(ids, first_position)?;
        let GpuModel {
            gpu,
            config,
            weights,
            kernels,
            cache,
            calibrates,
        } = self;
        let step = cache.step(&[(id, ids.len() as u32)])?;
        let logits = gpu.submit("the forward pass", |encoder| {
            let mut run = Run {
                gpu,
                config: *config,
                kernels,
                step: &step,
                encoder,
                calibrates: *calibrates,
            };
            forward(&mut run, weights, ids, first_position)
        })?;
        let values: Vec<f32> = gpu.read("logits", &logits.buffer, (logits.rows * logits.columns) as usize)?;
        step.commit()?;
        Ok(values.into_iter().map(f64::from).collect())
    }
}

struct Run<'a> {
    gpu: &'a Gpu,
    config: Config,
    kernels: &'a ModelKernels,
    step: &'a Step<'a>,
    encoder: &'a mut wgpu::CommandEncoder,
    calibrates: bool,
}

impl Run<'_> {
    fn tensor(&self, rows: u32, columns: u32) -> Result<Tensor> {
        let buffer = self
            .gpu
            .zeros("activations", u64::from(rows) * u64::from(columns) * 4)?;
        Ok(Tensor {
            rows,
            columns,
            buffer,
        })
    }

    fn product(&mut self, x: &Tensor, weight: &Tensor, columns: u32, transposed: bool) -> Result<Tensor> {
        let output = self.tensor(x.rows, columns)?;
        let params = MatmulParams {
            rows: x.rows,
            inner: x.columns,
            columns,
        };
        let buffers = [&x.buffer, &weight.buffer, &output.buffer];
        self.kernels.matmul(
            self.gpu,
            &mut self.encoder.begin_compute_pass(&Default::default()),
            buffers,
            params,
            transposed,
        )?;
        Ok(output)
    }
}

impl Backend for Run<'_> {
    type Tensor = Tensor;

    fn embed(&mut self, ids: &[u32], first_position: u32, weights: &Weights<Tensor>) -> Result<Tensor> {
        let output = self.tensor(ids.len() as u32, self.config.d_model)?;
        let params = EmbedParams {
            tokens: output.rows,
            columns: output.columns,
            first_position,
        };
        let ids = self.gpu.upload("token ids", ids)?;
        let buffers = [
            &ids,
            &weights.embedding.buffer,
            &weights.positions.buffer,
            &output.buffer,
        ];
        self.kernels.embed(
            self.gpu,
            &mut self.encoder.begin_compute_pass(&Default::default()),
            buffers,
            params,
        )?;
        Ok(output)
    }

    fn norm(&mut self, x: &Tensor) -> Result<Tensor> {
        let output = self.tensor(x.rows, x.columns)?;
        let params = NormParams {
            rows: x.rows,
            columns: x.columns,
            epsilon: EPSILON as f32,
        };
        self.kernels.norm(
            self.gpu,
            &mut self.encoder.begin_compute_pass(&Default::default()),
            [&x.buffer, &output.buffer],
            params,
        )?;
        Ok(output)
    }

    fn matmul(&mut self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        self.product(x, weight, weight.columns, false)
    }

    fn matmul_transposed(&mut self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        self.product(x, weight, weight.rows, true)
    }

    fn activation(&mut self, x: &Tensor) -> Result<Tensor> {
        let output = self.tensor(x.rows, x.columns)?;
        self.kernels.activation(
            self.gpu,
            &mut self.encoder.begin_compute_pass(&Default::default()),
            [&x.buffer, &output.buffer],
            x.rows * x.columns,
        )?;
        Ok(output)
    }

    fn residual(&mut self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        let output = self.tensor(x.rows, x.columns)?;
        let buffers = [&x.buffer, &y.buffer, &output.buffer];
        self.kernels.residual(
            self.gpu,
            &mut self.encoder.begin_compute_pass(&Default::default()),
            buffers,
            x.rows * x.columns,
        )?;
        Ok(output)
    }

    fn attention(&mut self, layer: u32, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let output = self.tensor(q.rows, q.columns)?;
        if self.calibrates {
            self.step.calibrate(self.encoder, layer, &k.buffer, &v.buffer)?;
        }
        self.step.append(self.encoder, layer, &k.buffer, &v.buffer)?;
        let options = AttentionOptions::default();
        self.step
            .attend(self.encoder, layer, &q.buffer, &output.buffer, &options)?;
        Ok(output)
    }
}
