//! What a format does to each layer by itself: the rows of the f32 run are packed, and its queries attend to what was
//! packed. No layer sees the errors of those before it, so the figures tell where a format hurts.

use crate::analyze::{self, KvRows, Label, Which};
use crate::cache::{CacheSpec, K, TensorScales, V};
use crate::error::Result;
use crate::model::{LayerRows, Placed};
use crate::spec::{Pair, Side};

use super::shadow::Shadow;

/// One layer of one pair. Errors are relative L2, of what the cache gives to what the f32 run has.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct LayerDriftRow {
    /// The pair's name.
    pub pair: String,
    /// The layer, from 0.
    pub layer: u32,
    /// Error of the stored keys.
    pub k_error: f64,
    /// Error of the stored values.
    pub v_error: f64,
    /// Error of what attention gives.
    pub attention_error: f64,
    /// Largest channel amax over median channel amax of the keys before RoPE: how far the outliers stand out. None where
    /// the median is 0.
    pub k_outlier_before_rope: Option<f64>,
    /// The same after RoPE.
    pub k_outlier_after_rope: Option<f64>,
}

/// Sums of squares: of the errors and of what is right.
#[derive(Debug, Clone, Copy, Default)]
struct Squares {
    error: f64,
    power: f64,
}

impl Squares {
    fn add(&mut self, right: &[f32], found: &[f32]) {
        for (&a, &b) in right.iter().zip(found) {
            let (a, b) = (f64::from(a), f64::from(b));
            self.error += (a - b).powi(2);
            self.power += a.powi(2);
        }
    }

    /// 0 where nothing is wrong, even beside zeros.
    fn relative(self) -> f64 {
        match self.error == 0.0 {
            true => 0.0,
            false => (self.error / self.power).sqrt(),
        }
    }
}

struct Shadowed<'m> {
    pair: Pair,
    /// Whether it stores keys before RoPE.
    pre: bool,
    cache: Shadow<'m>,
    scales: Vec<[f32; 2]>,
    /// By layer.
    attention: Vec<Squares>,
}

/// What the rows of one layer are.
#[derive(Default)]
struct Kept {
    before: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

/// The measurement, fed chunk by chunk.
pub(super) struct Layers<'m> {
    heads: [u32; 2],
    shadows: Vec<Shadowed<'m>>,
    kept: Vec<Kept>,
}

impl<'m> Layers<'m> {
    pub fn new(model: &'m Placed, specs: Vec<(Pair, CacheSpec)>) -> Result<Layers<'m>> {
        let config = model.config();
        let blocks = config.blocks as usize;
        let shadow = |(pair, spec): (Pair, CacheSpec)| {
            let scales = match &spec.tensor_scales {
                TensorScales::Given(scales) => scales.clone(),
                TensorScales::FromRows => Vec::new(),
            };
            let pre = spec.key_rotation.is_some();
            Ok(Shadowed {
                pair,
                pre,
                cache: Shadow::new(model, spec)?,
                scales,
                attention: vec![Squares::default(); blocks],
            })
        };
        Ok(Layers {
            heads: [config.kv_heads, config.head_dim],
            shadows: specs.into_iter().map(shadow).collect::<Result<_>>()?,
            kept: (0..blocks).map(|_| Kept::default()).collect(),
        })
    }

    /// The rows of all layers for the next tokens.
    pub fn add(&mut self, tokens: u32, layers: &[LayerRows]) -> Result<()> {
        for (kept, rows) in self.kept.iter_mut().zip(layers) {
            kept.before.extend(&rows.k_before_rope);
            kept.k.extend(&rows.k);
            kept.v.extend(&rows.v);
        }
        for shadow in &mut self.shadows {
            let outputs = shadow.cache.attend(tokens, layers, shadow.pre)?;
            for ((squares, rows), output) in shadow.attention.iter_mut().zip(layers).zip(&outputs) {
                squares.add(&rows.output, output);
            }
        }
        Ok(())
    }

    /// A row a pair and layer.
    pub fn rows(&self) -> Result<Vec<LayerDriftRow>> {
        let mut rows = Vec::new();
        for shadow in &self.shadows {
            for ((layer, kept), attention) in (0..).zip(&self.kept).zip(&shadow.attention) {
                let error = |side: usize, right: &[f32]| -> Result<f64> {
                    let mut squares = Squares::default();
                    squares.add(right, &shadow.stored(layer, side)?);
                    Ok(squares.relative())
                };
                let keys = if shadow.pre { &kept.before } else { &kept.k };
                rows.push(LayerDriftRow {
                    pair: shadow.pair.to_string(),
                    layer,
                    k_error: error(K, keys)?,
                    v_error: error(V, &kept.v)?,
                    attention_error: attention.relative(),
                    k_outlier_before_rope: self.outlier(layer, &kept.before)?,
                    k_outlier_after_rope: self.outlier(layer, &kept.k)?,
                });
            }
        }
        Ok(rows)
    }

    fn outlier(&self, layer: u32, keys: &[f32]) -> Result<Option<f64>> {
        let [heads, head_dim] = self.heads;
        let label = Label {
            tensor: format!("keys of layer {layer}"),
            layer: Some(layer),
            which: Some(Which::K),
        };
        let rows = KvRows {
            heads,
            head_dim,
            numbers: keys,
        };
        Ok(analyze::measure(&label, rows, Side::F32)?.outlier_ratio)
    }
}

impl Shadowed<'_> {
    /// What the cache holds of a layer's side, `[token][head][channel]`.
    fn stored(&self, layer: u32, side: usize) -> Result<Vec<f32>> {
        let scale = self.scales.get(layer as usize).map_or(1.0, |pair| pair[side]);
        let mut numbers = Vec::new();
        // Packed pages come first, then those of waiting tokens: the order of the tokens, as there are no sinks.
        for (page, words) in self.cache.pages(layer, side)? {
            let layout = page.layout;
            for slot in page.live.iter().cloned().flatten() {
                for head in 0..layout.heads {
                    numbers.extend((0..layout.head_dim).map(|c| layout.number(&words, slot, head, c, scale)));
                }
            }
        }
        Ok(numbers)
    }
}
