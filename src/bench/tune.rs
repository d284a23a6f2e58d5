//! Which variant of the attention kernel is the fastest on an adapter.
//!
//! One number after the other: how the work is cut, then the reduction, then, where it is allowed, the arithmetic. Each
//! variant's outputs are compared with f64 before it is timed. At the end the best and the variant without a measurement
//! are timed in turns, and the best counts only where it is faster beyond the spread.

use super::timer::{Timer, quartiles};
use super::workload::Workload;
use super::{Case, Shape, Sizes, Work};
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::pages::heads_ratio;
use crate::spec::Pair;
use crate::tuning;
use crate::variant::{Arithmetic, Reduction, Variant};

/// What to measure.
#[derive(Debug, Clone)]
pub struct TuneOptions {
    /// Decode or prefill.
    pub work: Work,
    /// Cache formats.
    pub pairs: Vec<Pair>,
    /// The model's heads.
    pub shape: Shape,
    /// Sequences.
    pub batch: u32,
    /// Tokens of a sequence.
    pub context: u32,
    /// New tokens of a step of prefill.
    pub new_tokens: u32,
    /// Memory and cache.
    pub sizes: Sizes,
    /// Seconds of samples for each variant.
    pub seconds: f64,
    /// Variants with less exact scores too.
    pub approximate: bool,
}

/// One variant that was tried.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct Trial {
    /// The variant.
    pub variant: Variant,
    /// Lower quartile, median and upper quartile of the seconds of one layer; none where the driver refused it.
    pub seconds: Option<[f64; 3]>,
    /// Why it was refused.
    pub refused: String,
}

/// What was found for a pair.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct TuneRow {
    /// The pair's name.
    pub pair: String,
    /// What the finding holds for.
    #[cfg_attr(feature = "cli", serde(skip))]
    pub shape: tuning::Shape,
    /// The variant without a measurement.
    pub default: Variant,
    /// Its seconds of one layer, timed in turns with the best: lower quartile, median, upper quartile.
    pub default_seconds: [f64; 3],
    /// The variant to take: the default, unless another one is faster beyond the spread.
    pub best: Variant,
    /// Its seconds.
    pub best_seconds: [f64; 3],
    /// All that was tried.
    pub trials: Vec<Trial>,
}

/// What [`tune`] found.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct TuneReport {
    /// By pair, in the order of the options.
    pub rows: Vec<TuneRow>,
    /// Pairs that do not fit the shape or the memory, with the reason.
    pub left_out: Vec<(String, String)>,
}

/// Finds the fastest variant for each pair. `progress` hears (done, of, what).
///
/// # Errors
/// [`Error::Usage`] for work that is not attention and where no pair is left, [`Error::Mismatch`] where the adapter computes
/// wrong, what shaders and the device report.
pub fn tune(
    gpu: &Gpu,
    options: &TuneOptions,
    progress: &mut dyn FnMut(u64, u64, &str),
) -> Result<TuneReport> {
    if options.work == Work::Append {
        return Err(Error::Usage {
            asked: "tuning of append".to_owned(),
            reason: "only attention has variants".to_owned(),
            advice: "tune decode or prefill".to_owned(),
        });
    }
    // Nothing that was measured before decides what is the default.
    let gpu = &gpu.clone().with_tuning(tuning::Tuning::default());
    let timer = Timer::new(gpu)?;
    let mut report = TuneReport {
        rows: Vec::new(),
        left_out: Vec::new(),
    };
    let of = options.pairs.len() as u64;
    for (done, &pair) in (0..).zip(&options.pairs) {
        let mut tell = |what: &str| progress(done, of, &format!("{pair}: {what}"));
        match row(gpu, &timer, pair, options, &mut tell) {
            Ok(row) => report.rows.push(row),
            Err(
                e @ (Error::Shape { .. }
                | Error::Usage { .. }
                | Error::Limit { .. }
                | Error::Budget { .. }
                | Error::CacheFull { .. }),
            ) => {
                report.left_out.push((pair.to_string(), e.to_string()));
            }
            Err(e) => return Err(e),
        }
        progress(done + 1, of, &pair.to_string());
    }
    match report.left_out.first() {
        Some((pair, reason)) if report.rows.is_empty() => Err(Error::Usage {
            asked: format!("tuning of {of} pairs"),
            reason: format!("no pair is left; {pair}: {reason}"),
            advice: "choose other pairs or sizes".to_owned(),
        }),
        _ => Ok(report),
    }
}

fn row(
    gpu: &Gpu,
    timer: &Timer,
    pair: Pair,
    options: &TuneOptions,
    tell: &mut dyn FnMut(&str),
) -> Result<TuneRow> {
    let decodes = options.work == Work::Decode;
    let case = Case {
        work: options.work,
        pair,
        shape: options.shape,
        batch: options.batch,
        context: options.context,
        new_tokens: if decodes {
            1
        } else {
            options.new_tokens.min(options.context)
        },
    };
    let ratio = heads_ratio(options.shape.q_heads, options.shape.kv_heads)?;
    let mut workload = Workload::new(gpu, &case, &options.sizes)?;
    let layers = f64::from(workload.layers());
    let default = workload.variant();
    let mut trials: Vec<Trial> = Vec::new();
    let mut best = default;
    for stage in STAGES {
        for variant in stage(best, ratio) {
            let wanted = options.approximate || variant.arithmetic == Arithmetic::F32;
            let falls_back = variant.arithmetic.for_side(pair.k) != variant.arithmetic;
            let has = gpu.device().features().contains(variant.features());
            let new = trials.iter().all(|trial| trial.variant != variant);
            if !wanted || falls_back || !has || !new || !workload.fits(variant) {
                continue;
            }
            tell(&variant.to_string());
            let measured = workload
                .set_variant(variant)
                .and_then(|()| workload.measure(timer, options.seconds));
            let trial = match measured {
                Ok(samples) => Trial {
                    variant,
                    seconds: Some(samples.quartiles().map(|seconds| seconds / layers)),
                    refused: String::new(),
                },
                Err(Error::Shader { message, .. }) => Trial {
                    variant,
                    seconds: None,
                    refused: message,
                },
                Err(e) => return Err(e),
            };
            trials.push(trial);
            best = fastest(&trials).unwrap_or(default);
        }
    }
    let mut times = [Vec::new(), Vec::new()];
    if best != default {
        tell("the best and the default in turns");
        for _ in 0..TURNS {
            for (variant, times) in [default, best].into_iter().zip(&mut times) {
                workload.set_variant(variant)?;
                let samples = workload.measure(timer, options.seconds / f64::from(TURNS))?;
                times.extend(samples.seconds.iter().map(|seconds| seconds / layers));
            }
        }
    }
    let of_default = trials.iter().find(|trial| trial.variant == default);
    let [default_seconds, best_seconds] = match times.iter().any(Vec::is_empty) {
        false => times.map(|times| quartiles(&times)),
        true => {
            [of_default
                .and_then(|trial| trial.seconds)
                .unwrap_or([f64::NAN; 3]); 2]
        }
    };
    // Faster in its median by more than the noise, and beyond the spread.
    let faster = best_seconds[1] < 0.98 * default_seconds[1] && best_seconds[1] < default_seconds[0];
    let (best, best_seconds) = match faster {
        true => (best, best_seconds),
        false => (default, default_seconds),
    };
    Ok(TuneRow {
        pair: pair.to_string(),
        shape: workload.tuned_shape(),
        default,
        default_seconds,
        best,
        best_seconds,
        trials,
    })
}

/// Turns of the last comparison.
const TURNS: u32 = 4;

fn fastest(trials: &[Trial]) -> Option<Variant> {
    let timed = trials
        .iter()
        .filter_map(|trial| Some((trial.seconds?[1], trial.variant)));
    timed
        .min_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, variant)| variant)
}

/// Variants to try from the best so far; it is among them.
type Stage = fn(Variant, u32) -> Vec<Variant>;

const STAGES: [Stage; 5] = [cuts, heads, channels, reductions, arithmetics];

/// Invocations and slots of each.
fn cuts(from: Variant, _: u32) -> Vec<Variant> {
    let mut all = vec![from];
    // Tiles of 256 to 1024 tokens: smaller ones wait at barriers, larger ones leave no memory for several workgroups.
    for (workgroup, slot_quads) in [
        (32, 2),
        (32, 4),
        (64, 1),
        (64, 2),
        (64, 4),
        (128, 1),
        (128, 2),
        (256, 1),
    ] {
        all.push(Variant {
            workgroup,
            slot_quads,
            ..from
        });
    }
    all
}

/// Query heads of a workgroup, and query tokens in prefill.
fn heads(from: Variant, ratio: u32) -> Vec<Variant> {
    let parts = [1, 2, 4].into_iter().filter(|parts| *parts <= ratio);
    parts
        .map(|parts| Variant {
            head_tile: ratio.div_ceil(parts),
            ..from
        })
        .collect()
}

fn channels(from: Variant, _: u32) -> Vec<Variant> {
    [2, 4]
        .map(|channel_quads| Variant {
            channel_quads,
            ..from
        })
        .into()
}

fn reductions(from: Variant, _: u32) -> Vec<Variant> {
    [Reduction::Workgroup, Reduction::Subgroup]
        .map(|reduction| Variant { reduction, ..from })
        .into()
}

fn arithmetics(from: Variant, _: u32) -> Vec<Variant> {
    [Arithmetic::F32, Arithmetic::F16, Arithmetic::Packed]
        .map(|arithmetic| Variant { arithmetic, ..from })
        .into()
}
