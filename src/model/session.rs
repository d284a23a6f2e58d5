//! A model on either device: weights that are placed once, and sessions, each with a cache of its own.

use std::sync::Arc;

use super::{Config, GpuModel, GpuWeights, Model, ReferenceModel, Trace};
use crate::cache::{Book, CacheSpec, HeldPage, SequenceId, by_page};
use crate::error::Result;
use crate::gpu::Gpu;
use crate::work::Status;

/// Tokens of a prompt that are computed at a time, at most: a multiple of every token group, so that what is packed does
/// not depend on it.
const CHUNK: u32 = 128;

/// A model on a device.
#[derive(Debug)]
pub enum Placed {
    /// On the CPU reference, in f64.
    Cpu(Box<Model>),
    /// On a GPU or a software adapter, in f32.
    Gpu(Arc<GpuWeights>),
}

impl Placed {
    /// The shape.
    pub fn config(&self) -> &Config {
        match self {
            Placed::Cpu(model) => &model.config,
            Placed::Gpu(weights) => weights.config(),
        }
    }

    /// Tokens of a prompt to give to [`Session::logits`] at a time: up to 128, fewer where the logits of so many would
    /// not fit one binding.
    pub fn chunk(&self) -> u32 {
        let Placed::Gpu(weights) = self else { return CHUNK };
        let limits = weights.gpu().device().limits();
        let bound = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
        let fits = bound / (u64::from(self.config().vocabulary.max(1)) * 4);
        let fits = fits.clamp(1, u64::from(CHUNK)) as u32;
        1 << fits.ilog2()
    }

    /// A session with an empty cache. Where `calibrates` is set, [`Session::calibrated`] has scales for the rows that it met.
    ///
    /// # Errors
    /// As [`GpuModel::on`] and [`ReferenceModel::new`].
    pub fn session(&self, spec: CacheSpec, calibrates: bool) -> Result<Session<'_>> {
        Ok(match self {
            Placed::Cpu(model) => Session::Cpu(Box::new(ReferenceModel::new(model, spec)?)),
            Placed::Gpu(weights) => Session::Gpu(Box::new(GpuModel::on(weights, spec, calibrates)?)),
        })
    }

    /// The device, where it is a GPU.
    pub fn gpu(&self) -> Option<&Gpu> {
        match self {
            Placed::Cpu(_) => None,
            Placed::Gpu(weights) => Some(weights.gpu()),
        }
    }
}

/// A model with a cache, on either device.
#[derive(Debug)]
pub enum Session<'m> {
    /// On the CPU reference.
    Cpu(Box<ReferenceModel<'m>>),
    /// On a GPU.
    Gpu(Box<GpuModel>),
}

impl Session<'_> {
    /// The books of the cache.
    pub fn book(&self) -> &Book {
        match self {
            Session::Cpu(model) => model.cache().book(),
            Session::Gpu(model) => model.cache().book(),
        }
    }

    /// Opens an empty sequence.
    pub fn open(&mut self) -> SequenceId {
        match self {
            Session::Cpu(model) => model.open(),
            Session::Gpu(model) => model.open(),
        }
    }

    /// Frees a sequence.
    ///
    /// # Errors
    /// [`crate::Error::UnknownSequence`].
    pub fn free(&mut self, id: SequenceId) -> Result<()> {
        match self {
            Session::Cpu(model) => model.free(id),
            Session::Gpu(model) => model.free(id),
        }
    }

    /// Appends tokens to a sequence: their logits, `[token][vocabulary]`.
    ///
    /// # Errors
    /// As [`ReferenceModel::logits`] and [`GpuModel::logits`].
    pub fn logits(&mut self, id: SequenceId, ids: &[u32]) -> Result<Vec<f64>> {
        match self {
            Session::Cpu(model) => model.logits(id, ids),
            Session::Gpu(model) => model.logits(id, ids),
        }
    }

    /// As [`Session::logits`]; `trace` is told of each layer's rows.
    ///
    /// # Errors
    /// As [`Session::logits`], and those of `trace`.
    pub fn logits_traced(&mut self, id: SequenceId, ids: &[u32], trace: Trace<'_>) -> Result<Vec<f64>> {
        match self {
            Session::Cpu(model) => model.logits_traced(id, ids, trace),
            Session::Gpu(model) => model.logits_traced(id, ids, trace),
        }
    }

    /// The pages of a sequence on one side of a layer with their live words, in the order of [`Book::held_pages`].
    ///
    /// # Errors
    /// As [`Book::held_pages_of`]; [`crate::Error::Device`].
    pub fn pages(&self, id: SequenceId, layer: u32, side: usize) -> Result<Vec<(HeldPage, Vec<u32>)>> {
        let words = match self {
            Session::Cpu(model) => model.cache().live_words(id, layer, side)?,
            Session::Gpu(model) => model.gpu().block_on(model.cache().live_words(id, layer, side)?)?,
        };
        Ok(by_page(self.book().held_pages_of(id, layer, side)?, &words))
    }

    /// Per-tensor scales by the rows so far, `[layer][K, V]`.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    pub fn calibrated(&mut self) -> Result<Vec<[f32; 2]>> {
        match self {
            Session::Cpu(model) => Ok(model.calibrated()),
            Session::Gpu(model) => model.gpu().block_on(model.cache().calibrated()?),
        }
    }

    /// What packing met so far.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    pub fn status(&self) -> Result<Status> {
        match self {
            Session::Cpu(model) => Ok(model.cache().status()),
            Session::Gpu(model) => model.gpu().block_on(model.cache().status()?),
        }
    }

    /// Bytes of all pages that were made.
    pub fn allocated_bytes(&self) -> u64 {
        match self {
            Session::Cpu(model) => model.cache().book().allocated_bytes(),
            Session::Gpu(model) => model.cache().allocated_bytes(),
        }
    }
}
