//! The model on the CPU reference, in f64. Rows enter the cache as f32.

use super::{Backend, Config, EPSILON, Matrix, Model, Weights, forward};
use crate::cache::plan::StepPlan;
use crate::cache::{CacheSpec, SequenceId};
use crate::error::Result;
use crate::options::AttentionOptions;
use crate::reference::ReferenceCache;

/// The model with a cache.
#[derive(Debug)]
pub struct ReferenceModel {
    config: Config,
    weights: Weights<Matrix>,
    cache: ReferenceCache,
}

impl ReferenceModel {
    /// The model with an empty cache.
    ///
    /// # Errors
    /// As [`CacheSpec::geometry`].
    pub fn new(model: &Model, spec: CacheSpec) -> Result<ReferenceModel> {
        let cache = ReferenceCache::new(spec)?;
        Ok(ReferenceModel {
            config: model.config,
            weights: model.weights.clone(),
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
        self.logits_with(id, ids, &mut |_, _| {})
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
        let first_position = self.cache.book().len(id)?;
        self.config.check(ids, first_position)?;
        let plan = self.cache.book_mut().plan(&[(id, ids.len() as u32)], 1)?;
        let mut run = Run {
            config: self.config,
            cache: &mut self.cache,
            plan: &plan,
            rows,
        };
        let logits = forward(&mut run, &self.weights, ids, first_position);
        // Where the pass failed, the next plan takes this one back.
        let values = logits?.values;
        self.cache.book_mut().commit(plan)?;
        Ok(values)
    }
}

struct Run<'a> {
    config: Config,
    cache: &'a mut ReferenceCache,
    plan: &'a StepPlan,
    rows: &'a mut dyn FnMut(u32, [&mut [f64]; 2]),
}

impl Backend for Run<'_> {
    type Tensor = Matrix;

    fn embed(&mut self, ids: &[u32], first_position: u32, weights: &Weights<Matrix>) -> Result<Matrix> {
        let columns = self.config.d_model;
        let row = |m: &Matrix, row: u32| {
            let start = (row * columns) as usize;
            m.values[start..start + columns as usize].to_vec()
        };
        let values = (first_position..)
            .zip(ids)
            .flat_map(|(position, &id)| {
                let (token, place) = (row(&weights.embedding, id), row(&weights.positions, position));
                token
                    .into_iter()
                    .zip(place)
                    .map(|(t, p)| t + p)
                    .collect::<Vec<_>>()
            })
            .collect();
        Ok(Matrix {
            rows: ids.len() as u32,
            columns,
            values,
        })
    }

    fn norm(&mut self, x: &Matrix) -> Result<Matrix> {
        let values = x
            .values
            .chunks(x.columns as usize)
            .flat_map(|row| {
                let count = row.len() as f64;
                let mean = row.iter().sum::<f64>() / count;
                let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / count;
                row.iter()
                    .map(move |v| (v - mean) / (variance + EPSILON).sqrt())
                    .collect::<Vec<_>>()
            })
            .collect();
        Ok(Matrix { values, ..*x })
    }

    fn matmul(&mut self, x: &Matrix, weight: &Matrix) -> Result<Matrix> {
        Ok(product(x, weight.columns, |i, column| {
            weight.values[(i * weight.columns + column) as usize]
        }))
    }

    fn matmul_transposed(&mut self, x: &Matrix, weight: &Matrix) -> Result<Matrix> {
        Ok(product(x, weight.rows, |i, column| {
            weight.values[(column * weight.columns + i) as usize]
        }))
    }

    fn activation(&mut self, x: &Matrix) -> Result<Matrix> {
        let root = (2.0 / std::f64::consts::PI).sqrt();
        let gelu = |v: &f64| 0.5 * v * (1.0 + (root * (v + 0.044715 * v.powi(3))).tanh());
        Ok(Matrix {
            values: x.values.iter().map(gelu).collect(),
            ..*x
        })
    }

    fn residual(&mut self, x: &Matrix, y: &Matrix) -> Result<Matrix> {
        Ok(Matrix {
            values: x.values.iter().zip(&y.values).map(|(a, b)| a + b).collect(),
            ..*x
        })
    }

    fn attention(&mut self, layer: u32, q: &Matrix, k: &Matrix, v: &Matrix) -> Result<Matrix> {
        let (mut k, mut v) = (k.values.clone(), v.values.clone());
        (self.rows)(layer, [&mut k, &mut v]);
        let rounded = |rows: Vec<f64>| rows.into_iter().map(|x| x as f32).collect::<Vec<_>>();
        self.cache.append(self.plan, layer, &rounded(k), &rounded(v))?;
        let options = AttentionOptions::default();
        let (values, _) = self.cache.attend(self.plan, layer, &q.values, &options)?;
        Ok(Matrix { values, ..*q })
    }
}

fn product(x: &Matrix, columns: u32, weight: impl Fn(u32, u32) -> f64) -> Matrix {
    let values = x
        .values
        .chunks(x.columns as usize)
        .flat_map(|row| {
            (0..columns)
                .map(|column| (0..).zip(row).map(|(i, v)| v * weight(i, column)).sum())
                .collect::<Vec<f64>>()
        })
        .collect();
    Matrix {
        rows: x.rows,
        columns,
        values,
    }
}
