//! A cache on either device that takes rows which a model computed in another run.

use crate::cache::{Book, CacheSpec, HeldPage, KvCache, SequenceId, by_page};
use crate::error::Result;
use crate::gpu::Gpu;
#[cfg(feature = "models")]
use crate::model::LayerRows;
use crate::model::Placed;
#[cfg(feature = "models")]
use crate::options::AttentionOptions;
use crate::reference::ReferenceCache;

enum Cache<'m> {
    Cpu(Box<ReferenceCache>),
    Gpu(&'m Gpu, Box<KvCache>),
}

/// A cache with one sequence.
pub(crate) struct Shadow<'m> {
    cache: Cache<'m>,
    sequence: SequenceId,
}

/// The new rows of one layer, `[token][head][channel]`.
pub(crate) struct NewRows<'a> {
    pub layer: u32,
    pub k: &'a [f32],
    pub v: &'a [f32],
}

impl<'m> Shadow<'m> {
    /// An empty cache on the device of a model.
    pub fn new(model: &'m Placed, spec: CacheSpec) -> Result<Shadow<'m>> {
        let (cache, sequence) = match model.gpu() {
            None => {
                let mut cache = ReferenceCache::new(spec)?;
                let sequence = cache.book_mut().open();
                (Cache::Cpu(Box::new(cache)), sequence)
            }
            Some(gpu) => {
                let mut cache = KvCache::new(gpu, spec)?;
                let sequence = cache.open();
                (Cache::Gpu(gpu, Box::new(cache)), sequence)
            }
        };
        Ok(Shadow { cache, sequence })
    }

    /// The books of the cache.
    pub fn book(&self) -> &Book {
        match &self.cache {
            Cache::Cpu(cache) => cache.book(),
            Cache::Gpu(_, cache) => cache.book(),
        }
    }

    /// The pages of a layer's side, with their live words.
    pub fn pages(&self, layer: u32, side: usize) -> Result<Vec<(HeldPage, Vec<u32>)>> {
        let words = match &self.cache {
            Cache::Cpu(cache) => cache.live_words(self.sequence, layer, side)?,
            Cache::Gpu(gpu, cache) => gpu.block_on(cache.live_words(self.sequence, layer, side)?)?,
        };
        Ok(by_page(
            self.book().held_pages_of(self.sequence, layer, side)?,
            &words,
        ))
    }

    /// Appends rows to some layers, one step for all.
    pub fn append(&mut self, tokens: u32, layers: &[NewRows<'_>]) -> Result<()> {
        let requests = [(self.sequence, tokens)];
        match &mut self.cache {
            Cache::Cpu(cache) => {
                let plan = cache.book_mut().plan(&requests, 1)?;
                for rows in layers {
                    cache.append(&plan, rows.layer, rows.k, rows.v)?;
                }
                cache.book_mut().commit(plan)
            }
            Cache::Gpu(gpu, cache) => {
                let step = cache.step(&requests)?;
                for rows in layers {
                    let [k, v] = [gpu.upload("k", rows.k)?, gpu.upload("v", rows.v)?];
                    gpu.submit("an append", |encoder| step.append(encoder, rows.layer, &k, &v))?;
                }
                step.commit()
            }
        }
    }

    #[cfg(feature = "models")]
    /// Appends rows to every layer and attends with the queries that came with them: the outputs by layer.
    pub fn attend(&mut self, tokens: u32, layers: &[LayerRows], pre: bool) -> Result<Vec<Vec<f32>>> {
        let options = AttentionOptions::default();
        let keys = |rows: &LayerRows| match pre {
            true => rows.k_before_rope.clone(),
            false => rows.k.clone(),
        };
        let requests = [(self.sequence, tokens)];
        let mut outputs = Vec::new();
        match &mut self.cache {
            Cache::Gpu(gpu, cache) => {
                let step = cache.step(&requests)?;
                for rows in layers {
                    let [k, v, q] = [
                        gpu.upload("k", &keys(rows))?,
                        gpu.upload("v", &rows.v)?,
                        gpu.upload("q", &rows.q)?,
                    ];
                    let numbers = rows.output.len();
                    let output = gpu.zeros("outputs", numbers as u64 * 4)?;
                    gpu.submit("a layer's attention", |encoder| {
                        step.append(encoder, rows.layer, &k, &v)?;
                        step.attend(encoder, rows.layer, &q, &output, &options)
                    })?;
                    outputs.push(gpu.read("outputs", &output, numbers)?);
                }
                step.commit()?;
            }
            Cache::Cpu(cache) => {
                let options = AttentionOptions::default();
                let plan = cache.book_mut().plan(&requests, 1)?;
                for rows in layers {
                    cache.append(&plan, rows.layer, &keys(rows), &rows.v)?;
                    let q: Vec<f64> = rows.q.iter().map(|&v| v.into()).collect();
                    let (output, _) = cache.attend(&plan, rows.layer, &q, &options)?;
                    outputs.push(output.into_iter().map(|v| v as f32).collect());
                }
                cache.book_mut().commit(plan)?;
            }
        }
        Ok(outputs)
    }
}
