//! Drift: what a cache format costs in the logits of a live transformer, and what it saves in memory.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::spec::Pair;

/// How scales and groups are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Convention {
    /// What a real cache stores: f16 scales, groups of G tokens packed from f16 rows.
    #[default]
    Packed,
    /// What the published table measured: f32 scales, per-channel groups over the whole prompt read from f32 rows, the
    /// FP8 scale taken from each prompt. Prefill only.
    Published,
}

/// How the prompt enters the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// The whole prompt is appended, then attended.
    #[default]
    Prefill,
    /// Token by token through the streaming cache: append one, attend, the next.
    Decode,
}

macro_rules! named_choice {
    ($type:ident, $what:literal, $($variant:ident = $name:literal),+) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($type::$variant => $name),+ })
            }
        }
        impl FromStr for $type {
            type Err = Error;
            fn from_str(text: &str) -> Result<Self> {
                match text {
                    $($name => Ok($type::$variant),)+
                    _ => Err(Error::Usage {
                        asked: format!(concat!($what, " `{}`"), text),
                        reason: "there is no such choice".to_owned(),
                        advice: format!("choose one of {}", [$($name),+].join(", ")),
                    }),
                }
            }
        }
    };
}
named_choice!(Convention, "convention", Packed = "packed", Published = "published");
named_choice!(Mode, "mode", Prefill = "prefill", Decode = "decode");

/// What to measure.
#[derive(Debug, Clone)]
pub struct DriftOptions {
    /// The pairs, in the order of the report.
    pub pairs: Vec<Pair>,
    /// How scales and groups are made.
    pub convention: Convention,
    /// How the prompt enters the cache.
    pub mode: Mode,
    /// Channel 3 of each head of K times this, of q divided by it.
    pub outlier: f64,
    /// Recent tokens R of K and of V that stay in f16.
    pub window: u32,
}

/// One row of the drift table.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct DriftRow {
    /// The pair's name.
    pub pair: String,
    /// True cost of one number in bits, scales included.
    pub bits_per_number: f64,
    /// The same as a share of 16 bits.
    pub percent_of_f16: f64,
    /// sqrt(sum (ref - q)^2 / sum ref^2), pooled over prompts, positions and vocabulary.
    pub logit_drift: f64,
    /// The same after each logit row's own mean is taken off both.
    pub logit_drift_centred: f64,
    /// Predictions whose argmax is unchanged.
    pub top1: u64,
    /// Predictions in all.
    pub predictions: u64,
    /// Mean of KL(softmax ref || softmax q), in nats.
    pub mean_kl: f64,
    /// Largest |ref - q|.
    pub max_abs_diff: f64,
    /// NaN and infinite logits of reference and run; a row with any carries no figures and is an error.
    pub non_finite_logits: u64,
    /// Inputs that saturated or had their scale clamped while they were packed, over all prompts.
    pub saturated: u64,
    /// Bytes of all pages that one prompt took at its end, scales and padding included, all layers, K and V.
    pub cache_bytes: u64,
    /// `packed` or `published`.
    pub convention: String,
    /// `prefill` or `decode`.
    pub mode: String,
    /// Recent window R.
    pub window: u32,
    /// Outlier factor.
    pub outlier: f64,
    /// `gpu` or `cpu`.
    pub device: String,
    /// The adapter's name and driver, or the CPU reference.
    pub adapter: String,
}
