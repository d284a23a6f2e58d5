//! A model on the GPU, in f32: from token ids to logits without a read-back in between.

use std::sync::Arc;

use super::kernels::{EmbedParams, MatmulParams, NormParams, RopeParams};
use super::scratch::{Scratch, Tensor};
use super::weights::{GpuWeights, Weight};
use super::{Backend, LayerRows, Model, Trace, forward};
use crate::cache::{CacheSpec, KvCache, SequenceId, Step};
use crate::error::Result;
use crate::gpu::Gpu;
use crate::options::AttentionOptions;
use crate::rope::RopePairing;

/// A model with a cache. The cache's spec says whether keys are stored before or after rotation.
#[derive(Debug)]
pub struct GpuModel {
    model: Arc<GpuWeights>,
    cache: KvCache,
    /// `[position][frequency]` (cos, sin).
    turns: Option<wgpu::Buffer>,
    scratch: Scratch,
    calibrates: bool,
}

impl GpuModel {
    /// A model in memory, uploaded, with an empty cache. Where `calibrates` is set, the largest magnitudes of all rows that
    /// enter the cache are kept for [`KvCache::calibrated`].
    ///
    /// # Errors
    /// As [`GpuWeights::of`] and [`KvCache::new`].
    pub fn new(gpu: &Gpu, model: &Model, spec: CacheSpec, calibrates: bool) -> Result<GpuModel> {
        GpuModel::on(&Arc::new(GpuWeights::of(gpu, model)?), spec, calibrates)
    }

    /// As [`GpuModel::new`] on weights that are there already.
    ///
    /// # Errors
    /// As [`KvCache::new`].
    pub fn on(model: &Arc<GpuWeights>, spec: CacheSpec, calibrates: bool) -> Result<GpuModel> {
        let cache = KvCache::new(&model.gpu, spec)?;
        let config = &model.config;
        let turns = config.rope.as_ref().map(|rope| {
            let book = cache.book();
            let tokens = u64::from(book.spec().pages(book.geometry())?) * u64::from(book.spec().page_tokens);
            let positions = u64::from(config.positions).min(tokens) as u32;
            model
                .gpu
                .upload("rotations", &rope.table(config.head_dim, positions).turns)
        });
        Ok(GpuModel {
            turns: turns.transpose()?,
            model: model.clone(),
            cache,
            scratch: Scratch::default(),
            calibrates,
        })
    }

    /// The device.
    pub fn gpu(&self) -> &Gpu {
        &self.model.gpu
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

    /// Appends tokens to a sequence: their logits, `[token][vocabulary]`. A submission a block; only the logits come back.
    ///
    /// # Errors
    /// As [`KvCache::step`]; [`crate::Error::Shape`] for ids or positions that the model lacks; [`crate::Error::Limit`] for
    /// logits beyond one binding; [`crate::Error::Device`] where the device fails.
    pub fn logits(&mut self, id: SequenceId, ids: &[u32]) -> Result<Vec<f64>> {
        self.run(id, ids, None)
    }

    /// As [`GpuModel::logits`]; `trace` is told of each layer's rows.
    ///
    /// # Errors
    /// As [`GpuModel::logits`], and those of `trace`.
    pub fn logits_traced(&mut self, id: SequenceId, ids: &[u32], trace: Trace<'_>) -> Result<Vec<f64>> {
        self.run(id, ids, Some(trace))
    }

    fn run(&mut self, id: SequenceId, ids: &[u32], trace: Option<Trace<'_>>) -> Result<Vec<f64>> {
        let first_position = self.cache.book().len(id)?;
        let model = &*self.model;
        let gpu = &model.gpu;
        model.config.check(ids, first_position)?;
        let keys_turn = self.cache.book().spec().key_rotation.is_none();
        let step = self.cache.step(&[(id, ids.len() as u32)])?;
        let mut run = Run {
            model,
            turns: self.turns.as_ref(),
            keys_turn,
            first_position,
            step: &step,
            scratch: &self.scratch,
            encoder: None,
            calibrates: self.calibrates,
            traced: trace.is_some().then(Vec::new),
        };
        let logits = gpu.checked("the forward pass", || {
            let logits = forward(&mut run, &model.weights, ids, first_position)?;
            run.block_done()?;
            Ok(logits)
        })??;
        let traced = run.traced.take();
        let values: Vec<f32> = gpu.read("logits", &logits.buffer, logits.numbers() as usize)?;
        if let (Some(trace), Some(traced)) = (trace, traced) {
            for (layer, rows) in (0..).zip(traced) {
                let read = |t: &Tensor| gpu.read::<f32>("rows", &t.buffer, t.numbers() as usize);
                trace(LayerRows {
                    layer,
                    q: read(&rows.q)?,
                    k_before_rope: read(&rows.k_before_rope)?,
                    k: read(rows.k.as_ref().unwrap_or(&rows.k_before_rope))?,
                    v: read(&rows.v)?,
                    output: read(&rows.output)?,
                })?;
            }
        }
        step.commit()?;
        drop(logits);
        self.scratch.keep_for(ids.len() as u32);
        Ok(values.into_iter().map(f64::from).collect())
    }
}

/// Tensors of a layer that a trace waits for.
#[derive(Debug)]
struct Traced {
    q: Tensor,
    k_before_rope: Tensor,
    k: Option<Tensor>,
    v: Tensor,
    output: Tensor,
}

struct Run<'a> {
    model: &'a GpuWeights,
    turns: Option<&'a wgpu::Buffer>,
    /// Whether keys are rotated before they enter the cache.
    keys_turn: bool,
    first_position: u32,
    step: &'a Step<'a>,
    scratch: &'a Scratch,
    /// Commands since the last submission.
    encoder: Option<wgpu::CommandEncoder>,
    calibrates: bool,
    traced: Option<Vec<Traced>>,
}

impl Run<'_> {
    fn tensor(&self, rows: u32, columns: u32) -> Result<Tensor> {
        self.scratch.tensor(&self.model.gpu, rows, columns)
    }

    fn encoder(&mut self) -> &mut wgpu::CommandEncoder {
        let device = self.model.gpu.device();
        self.encoder
            .get_or_insert_with(|| device.create_command_encoder(&Default::default()))
    }

    fn rotated(&mut self, x: &Tensor, heads: u32) -> Result<Option<Tensor>> {
        let (model, config) = (self.model, &self.model.config);
        let (Some(rope), Some(turns)) = (&config.rope, self.turns) else {
            return Ok(None);
        };
        let output = self.tensor(x.rows, x.columns)?;
        let params = RopeParams {
            tokens: x.rows,
            heads,
            head_dim: config.head_dim,
            first_position: self.first_position,
            halves: u32::from(rope.pairing == RopePairing::Halves),
        };
        let buffers = [&x.buffer, turns, &output.buffer];
        let mut pass = self.encoder().begin_compute_pass(&Default::default());
        model.kernels.rope(&model.gpu, &mut pass, buffers, params)?;
        drop(pass);
        Ok(Some(output))
    }
}

impl Backend for Run<'_> {
    type Tensor = Tensor;
    type Weight = Weight;

    fn embed(&mut self, ids: &[u32], table: &Weight) -> Result<Tensor> {
        let model = self.model;
        let output = self.tensor(ids.len() as u32, table.columns)?;
        let ids = model.gpu.upload("token ids", ids)?;
        for part in &table.parts {
            let params = EmbedParams {
                tokens: output.rows,
                columns: output.columns,
                first_row: part.first,
                rows: part.rows,
            };
            let buffers = [&ids, &part.buffer, &output.buffer];
            let mut pass = self.encoder().begin_compute_pass(&Default::default());
            model
                .kernels
                .embed(&model.gpu, &mut pass, buffers, params, table.float)?;
        }
        Ok(output)
    }

    fn norm(&mut self, x: &Tensor, gain: Option<&Weight>) -> Result<Tensor> {
        let model = self.model;
        let output = self.tensor(x.rows, x.columns)?;
        let params = NormParams {
            rows: x.rows,
            columns: x.columns,
            epsilon: model.config.epsilon as f32,
        };
        let gain = gain.and_then(|gain| gain.parts.first()).map(|part| &part.buffer);
        let mut pass = self.encoder().begin_compute_pass(&Default::default());
        match gain {
            Some(gain) => {
                let buffers = [&x.buffer, gain, &output.buffer];
                model.kernels.rms_norm(&model.gpu, &mut pass, buffers, params)?;
            }
            None => model
                .kernels
                .norm(&model.gpu, &mut pass, [&x.buffer, &output.buffer], params)?,
        }
        drop(pass);
        Ok(output)
    }

    fn matmul(&mut self, x: &Tensor, weight: &Weight) -> Result<Tensor> {
        let model = self.model;
        let output = self.tensor(x.rows, weight.rows)?;
        for part in &weight.parts {
            let params = MatmulParams {
                rows: x.rows,
                inner: x.columns,
                columns: part.rows,
                first_column: part.first,
                output_columns: weight.rows,
            };
            let buffers = [&x.buffer, &part.buffer, &output.buffer];
            let mut pass = self.encoder().begin_compute_pass(&Default::default());
            model
                .kernels
                .product(&model.gpu, &mut pass, buffers, params, weight.float)?;
        }
        Ok(output)
    }

    fn gelu(&mut self, x: &Tensor) -> Result<Tensor> {
        let model = self.model;
        let output = self.tensor(x.rows, x.columns)?;
        let buffers = [&x.buffer, &output.buffer];
        let mut pass = self.encoder().begin_compute_pass(&Default::default());
        model
            .kernels
            .activation(&model.gpu, &mut pass, buffers, x.numbers())?;
        drop(pass);
        Ok(output)
    }

    fn swiglu(&mut self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        let model = self.model;
        let output = self.tensor(up.rows, up.columns)?;
        let buffers = [&gate.buffer, &up.buffer, &output.buffer];
        let mut pass = self.encoder().begin_compute_pass(&Default::default());
        model
            .kernels
            .swiglu(&model.gpu, &mut pass, buffers, up.numbers())?;
        drop(pass);
        Ok(output)
    }

    fn residual(&mut self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        let model = self.model;
        let output = self.tensor(x.rows, x.columns)?;
        let buffers = [&x.buffer, &y.buffer, &output.buffer];
        let mut pass = self.encoder().begin_compute_pass(&Default::default());
        model
            .kernels
            .residual(&model.gpu, &mut pass, buffers, x.numbers())?;
        drop(pass);
        Ok(output)
    }

    fn attention(&mut self, layer: u32, q: Tensor, k: Tensor, v: Tensor) -> Result<Tensor> {
        let config = &self.model.config;
        let q = self.rotated(&q, config.q_heads)?.unwrap_or(q);
        let turned = match self.keys_turn {
            true => self.rotated(&k, config.kv_heads)?,
            false => None,
        };
        let stored = &turned.as_ref().unwrap_or(&k).buffer;
        let output = self.tensor(q.rows, q.columns)?;
        let (step, calibrates) = (self.step, self.calibrates);
        let encoder = self.encoder();
        if calibrates {
            step.calibrate(encoder, layer, stored, &v.buffer)?;
        }
        step.append(encoder, layer, stored, &v.buffer)?;
        let options = AttentionOptions::default();
        step.attend(encoder, layer, &q.buffer, &output.buffer, &options)?;
        let Some(traced) = &mut self.traced else {
            return Ok(output);
        };
        // The trace keeps its tensors until the logits are there; the pass goes on with a copy.
        let copy = self
            .scratch
            .tensor(&self.model.gpu, output.rows, output.columns)?;
        traced.push(Traced {
            q,
            k_before_rope: k,
            k: turned,
            v,
            output,
        });
        if let Some(rows) = self.traced.as_ref().and_then(|traced| traced.last()) {
            let (from, bytes) = (rows.output.buffer.clone(), copy.buffer.size());
            self.encoder()
                .copy_buffer_to_buffer(&from, 0, &copy.buffer, 0, bytes);
        }
        Ok(copy)
    }

    /// Submits: no submission is longer than a block, since some drivers give up on long ones.
    fn block_done(&mut self) -> Result<()> {
        if let Some(encoder) = self.encoder.take() {
            self.model.gpu.queue().submit([encoder.finish()]);
        }
        Ok(())
    }
}
