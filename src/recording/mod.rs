//! Recordings: what a run computed and what its cache stored, token by token, for people to look at.
//!
//! A [`Recorder`] watches a measurement of [`drift`](crate::drift). Rows are those that the model computed on its device;
//! codes and scales are read from the pages of its cache. How rows wait for their group is seen in a second cache
//! of the same kind on the same device, to which the same rows are appended token by token: the bytes that they end in do
//! not depend on how they arrive.

mod logits;
mod recorder;
mod stored;
mod study;

pub use logits::{Flip, Predictions, TOP};
pub use recorder::Recorder;
pub use stored::{Loss, NEVER, StoredSide};
#[cfg(feature = "models")]
pub use study::trained_study;
pub use study::{
    LAYOUTS, OUTLIERS, OutlierRow, RECORDED_OUTLIERS, Recording, Take, TinyStudy, layouts_study, tiny_study,
};

use crate::model::Config;
use crate::spec::Pair;

/// What is kept of a model's rows: numbers beyond these would make a page of megabytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// Layers.
    pub layers: Vec<u32>,
    /// KV heads.
    pub heads: Vec<u32>,
    /// Tokens of each prompt.
    pub tokens: Vec<Vec<u32>>,
}

/// The most layers and KV heads where not all are shown.
const SAMPLED: [u32; 2] = [3, 2];

/// The most tokens of a prompt that are shown: more columns could not be told apart.
const SHOWN_TOKENS: u32 = 128;

/// The most numbers of K and V of one run, about: 256 KiB.
const SHOWN_NUMBERS: u32 = 1 << 16;

impl Shown {
    /// Everything, where the model is small and the prompts of so many tokens are short; else a sample: layers and heads
    /// evenly spaced, with the first and the last, and as many tokens as fit, half at the beginning and half at the end of each
    /// prompt.
    pub fn of(config: &Config, prompts: &[u32]) -> Shown {
        let all = |count: u32| (0..count).collect::<Vec<_>>();
        let count = prompts.len().max(1) as u32;
        // Whole eights at either end, so that short groups are seen whole.
        let fits = |layers: u32, heads: u32| {
            let row = u64::from(layers) * u64::from(heads) * u64::from(2 * config.head_dim * count);
            (u64::from(SHOWN_NUMBERS) / row.max(1) / 16 * 16).clamp(16, u64::from(SHOWN_TOKENS)) as u32
        };
        let longest = prompts.iter().copied().max().unwrap_or(0);
        let whole = fits(config.blocks, config.kv_heads);
        let (layers, heads) = match longest.min(SHOWN_TOKENS) <= whole {
            true => (all(config.blocks), all(config.kv_heads)),
            false => (
                spaced(config.blocks, SAMPLED[0]),
                spaced(config.kv_heads, SAMPLED[1]),
            ),
        };
        let most = fits(layers.len() as u32, heads.len() as u32);
        let ends = |count: u32| match count <= most {
            true => all(count),
            false => (0..most / 2).chain(count - most / 2..count).collect(),
        };
        Shown {
            layers,
            heads,
            tokens: prompts.iter().map(|&count| ends(count)).collect(),
        }
    }
}

/// At most so many of 0..count, evenly spaced, with the first and the last.
fn spaced(count: u32, most: u32) -> Vec<u32> {
    if count <= most {
        return (0..count).collect();
    }
    (0..most).map(|i| i * (count - 1) / (most - 1).max(1)).collect()
}

/// One run of all prompts through one kind of cache.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordedRun {
    /// How the cache is stored; none for the f32 cache that all others are compared with.
    pub pair: Option<Pair>,
    /// Per-tensor scales, `[layer][K, V]`; empty where there are none.
    pub tensor_scales: Vec<[f32; 2]>,
    /// The prompts.
    pub prompts: Vec<RecordedPrompt>,
}

/// One prompt of a run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RecordedPrompt {
    /// Sum of (ref - q)^2 over the vocabulary, of every token.
    pub error: Vec<f64>,
    /// Sum of ref^2 over the vocabulary, of every token.
    pub power: Vec<f64>,
    /// The most likely next tokens after each shown token.
    pub predictions: Predictions,
    /// Predictions whose argmax is not that of the f32 cache, of every token.
    pub flips: Vec<Flip>,
    /// K and V of each shown layer; empty for the f32 cache.
    pub layers: Vec<[StoredSide; 2]>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tiny;

    #[test]
    fn small_models_are_shown_whole_and_large_ones_by_their_ends() {
        let mut config = tiny(1.0).config;
        let shown = Shown::of(&config, &[32; 4]);
        assert_eq!((shown.layers.len(), shown.heads.len()), (2, 2));
        assert!(shown.tokens.iter().all(|tokens| tokens.len() == 32));

        (config.blocks, config.kv_heads, config.head_dim) = (30, 3, 64);
        let shown = Shown::of(&config, &[2000]);
        assert_eq!(
            (&shown.layers[..], &shown.heads[..]),
            (&[0, 14, 29][..], &[0, 2][..])
        );
        assert_eq!(shown.tokens[0].len(), 80);
        assert_eq!((shown.tokens[0][39], shown.tokens[0][40]), (39, 1960));
        assert_eq!(shown.tokens[0].len() % 16, 0);
        let shown = Shown::of(&config, &[1]);
        assert_eq!((shown.layers.len(), &shown.tokens[..]), (30, &[vec![0]][..]));
        assert_eq!(Shown::of(&config, &[]).tokens.len(), 0);
        // A small model and a long text: all layers, the ends of the text.
        (config.blocks, config.kv_heads, config.head_dim) = (2, 1, 8);
        let shown = Shown::of(&config, &[2000]);
        assert_eq!(
            (shown.layers.len(), shown.tokens[0].len(), shown.tokens[0][64]),
            (2, 128, 1936)
        );
        // Wide heads: at least 16 tokens, whatever they take.
        (config.kv_heads, config.head_dim) = (64, 256);
        assert!(Shown::of(&config, &[2000]).tokens[0].len() >= 16);
    }
}
