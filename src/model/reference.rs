//! A model on the CPU reference, in f64. Rows enter the cache as f32.

use super::{Backend, Config, LayerRows, Matrix, Model, Norm, Trace, Weights, forward};
use crate::cache::plan::StepPlan;
use crate::cache::{CacheSpec, SequenceId};
use crate::error::Result;
use crate::options::AttentionOptions;
use crate::reference::ReferenceCache;
use crate::rope::RopeTable;

/// A model with a cache. The cache's spec says whether keys are stored before or after rotation.
#[derive(Debug)]
pub struct ReferenceModel<'m> {
    config: &'m Config,
    weights: &'m Weights<Matrix>,
    cache: ReferenceCache,
    turns: Option<RopeTable>,
}

impl<'m> ReferenceModel<'m> {
    /// The model with an empty cache.
    ///
    /// # Errors
    /// As [`CacheSpec::geometry`].
    pub fn new(model: &'m Model, spec: CacheSpec) -> Result<ReferenceModel<'m>> {
        let cache = ReferenceCache::new(spec)?;
        let config = &model.config;
        let turns = config.rope.as_ref().map(|rope| {
            let book = cache.book();
            let tokens = u64::from(book.spec().pages(book.geometry())?) * u64::from(book.spec().page_tokens);
            let positions = u64::from(config.positions).min(tokens) as u32;
            Ok(rope.table(config.head_dim, positions))
        });
        Ok(ReferenceModel {
            config,
            weights: &model.weights,
            turns: turns.transpose()?,
            cache,
        })
    }

    /// The cache.
    pub fn cache(&self) -> &ReferenceCache {
        &self.cache
    }

    /// Per-tensor scales calibrated on what was appended so far.
    pub fn calibrated(&mut self) -> Vec<[f32; 2]> {
        self.cache.calibrated()
    }

    /// Opens an empty sequence.
    pub fn open(&mut self) -> SequenceId {
        self.cache.book_mut().open()
    }

    /// Frees a sequence.
    ///
    /// # Errors
    /// [`crate::Error::UnknownSequence`].
    pub fn free(&mut self, id: SequenceId) -> Result<()> {
        self.cache.book_mut().free(id)
    }

    /// Appends tokens to a sequence: their logits, `[token][vocabulary]`.
    ///
    /// # Errors
    /// As [`crate::cache::Book::plan`]; [`crate::Error::Shape`] for ids or positions that the model lacks.
    pub fn logits(&mut self, id: SequenceId, ids: &[u32]) -> Result<Vec<f64>> {
        self.run(id, ids, &mut |_, _| {}, None)
    }

    /// As [`ReferenceModel::logits`]; `rows` sees each layer's new rows of K and V, `[token][head][channel]`, before they
    /// are rounded to f32 and appended, and may change them: what another device's rounding would do can be tried.
    ///
    /// # Errors
    /// As [`crate::cache::Book::plan`]; [`crate::Error::Shape`] for ids or positions that the model lacks.
    pub fn logits_with(
        &mut self,
        id: SequenceId,
        ids: &[u32],
        rows: &mut dyn FnMut(u32, [&mut [f64]; 2]),
    ) -> Result<Vec<f64>> {
        self.run(id, ids, rows, None)
    }

    /// As [`ReferenceModel::logits`]; `trace` is told of each layer's rows.
    ///
    /// # Errors
    /// As [`ReferenceModel::logits`], and those of `trace`.
    pub fn logits_traced(&mut self, id: SequenceId, ids: &[u32], trace: Trace<'_>) -> Result<Vec<f64>> {
        self.run(id, ids, &mut |_, _| {}, Some(trace))
    }

    fn run(
        &mut self,
        id: SequenceId,
        ids: &[u32],
        rows: &mut dyn FnMut(u32, [&mut [f64]; 2]),
        trace: Option<Trace<'_>>,
    ) -> Result<Vec<f64>> {
        let first_position = self.cache.book().len(id)?;
        self.config.check(ids, first_position)?;
        let plan = self.cache.book_mut().plan(&[(id, ids.len() as u32)], 1)?;
        let mut run = Run {
            config: self.config,
            turns: self.turns.as_ref(),
            first_position,
            cache: &mut self.cache,
            plan: &plan,
            rows,
            trace,
        };
        let logits = forward(&mut run, self.weights, ids, first_position);
        // Where the pass failed, the next plan takes this one back.
        let values = logits?.values;
        self.cache.book_mut().commit(plan)?;
        Ok(values)
    }
}

struct Run<'a, 't> {
    config: &'a Config,
    turns: Option<&'a RopeTable>,
    first_position: u32,
    cache: &'a mut ReferenceCache,
    plan: &'a StepPlan,
    rows: &'a mut dyn FnMut(u32, [&mut [f64]; 2]),
    trace: Option<Trace<'t>>,
}

impl Run<'_, '_> {
    fn rotated(&self, x: &Matrix) -> Option<Matrix> {
        let table = self.turns?;
        let heads = x.values.chunks(table.head_dim as usize);
        let per_row = (x.columns / table.head_dim).max(1);
        let values = (0..).zip(heads).flat_map(|(i, head)| {
            let position = self.first_position + i / per_row;
            (0..table.head_dim).map(move |c| table.turned(position, c, |c| head[c as usize]))
        });
        Some(Matrix {
            values: values.collect(),
            ..*x
        })
    }
}

impl Backend for Run<'_, '_> {
    type Tensor = Matrix;
    type Weight = Matrix;

    fn embed(&mut self, ids: &[u32], table: &Matrix) -> Result<Matrix> {
        let columns = table.columns as usize;
        let rows = ids
            .iter()
            .map(|&id| &table.values[id as usize * columns..][..columns]);
        Ok(Matrix {
            rows: ids.len() as u32,
            columns: table.columns,
            values: rows.flatten().copied().collect(),
        })
    }

    fn norm(&mut self, x: &Matrix, gain: Option<&Matrix>) -> Result<Matrix> {
        let epsilon = self.config.epsilon;
        let normed = |row: &[f64]| -> Vec<f64> {
            let count = row.len() as f64;
            let mean = match self.config.norm {
                Norm::Layer => row.iter().sum::<f64>() / count,
                Norm::Rms => 0.0,
            };
            let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / count;
            let deviation = (variance + epsilon).sqrt();
            let gains = |c: usize| gain.map_or(1.0, |gain| gain.values[c]);
            let rows = row.iter().enumerate();
            rows.map(|(c, v)| (v - mean) / deviation * gains(c)).collect()
        };
        let values = x.values.chunks(x.columns as usize).flat_map(normed).collect();
        Ok(Matrix { values, ..*x })
    }

    fn matmul(&mut self, x: &Matrix, weight: &Matrix) -> Result<Matrix> {
        let columns = x.columns as usize;
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let rows = x.values.chunks(columns);
        let values = rows.flat_map(|row| weight.values.chunks(columns).map(move |w| dot(row, w)));
        Ok(Matrix {
            rows: x.rows,
            columns: weight.rows,
            values: values.collect(),
        })
    }

    fn gelu(&mut self, x: &Matrix) -> Result<Matrix> {
        let root = (2.0 / std::f64::consts::PI).sqrt();
        let gelu = |v: &f64| 0.5 * v * (1.0 + (root * (v + 0.044715 * v.powi(3))).tanh());
        Ok(Matrix {
            values: x.values.iter().map(gelu).collect(),
            ..*x
        })
    }

    fn swiglu(&mut self, gate: &Matrix, up: &Matrix) -> Result<Matrix> {
        let pairs = gate.values.iter().zip(&up.values);
        Ok(Matrix {
            values: pairs.map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect(),
            ..*up
        })
    }

    fn residual(&mut self, x: &Matrix, y: &Matrix) -> Result<Matrix> {
        Ok(Matrix {
            values: x.values.iter().zip(&y.values).map(|(a, b)| a + b).collect(),
            ..*x
        })
    }

    fn attention(&mut self, layer: u32, q: Matrix, k: Matrix, v: Matrix) -> Result<Matrix> {
        let q = self.rotated(&q).unwrap_or(q);
        let keys_turn = self.cache.book().spec().key_rotation.is_none();
        let turned = keys_turn.then(|| self.rotated(&k)).flatten();
        let mut stored = turned.unwrap_or_else(|| k.clone()).values;
        let mut v = v.values;
        (self.rows)(layer, [&mut stored, &mut v]);
        let rounded = |rows: &[f64]| rows.iter().map(|&x| x as f32).collect::<Vec<_>>();
        let (stored, v) = (rounded(&stored), rounded(&v));
        self.cache.append(self.plan, layer, &stored, &v)?;
        let options = AttentionOptions::default();
        let (values, _) = self.cache.attend(self.plan, layer, &q.values, &options)?;
        if let Some(trace) = &mut self.trace {
            trace(LayerRows {
                layer,
                q: rounded(&q.values),
                k_before_rope: rounded(&k.values),
                k: stored,
                v,
                output: rounded(&values),
            })?;
        }
        Ok(Matrix { values, ..q })
    }

    fn block_done(&mut self) -> Result<()> {
        Ok(())
    }
}
