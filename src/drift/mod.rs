//! Drift: what a cache format costs in the logits of a live transformer, and what it saves in memory.

macro_rules! named_choice {
    ($type:ident, $what:literal, $($variant:ident = $name:literal),+) => {
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self { $($type::$variant => $name),+ })
            }
        }
        impl std::str::FromStr for $type {
            type Err = crate::Error;
            fn from_str(text: &str) -> crate::Result<Self> {
                match text {
                    $($name => Ok($type::$variant),)+
                    _ => Err(crate::Error::Usage {
                        asked: format!(concat!($what, " `{}`"), text),
                        reason: "there is no such choice".to_owned(),
                        advice: format!("choose one of {}", [$($name),+].join(", ")),
                    }),
                }
            }
        }
    };
}

mod damage;
#[cfg(feature = "models")]
mod layers;
pub(crate) mod shadow;
#[cfg(feature = "models")]
mod trained;
mod watch;

pub(crate) use damage::log_sum_exp;
pub use damage::{Comparison, Damage, damage};
#[cfg(feature = "models")]
pub use layers::LayerDriftRow;
#[cfg(feature = "models")]
pub use trained::{
    KeyRope, TrainedDrift, TrainedDriftOptions, TrainedDriftRow, run_trained, run_trained_watched,
};
pub use watch::{Done, Seen, Watch};

use std::sync::Arc;

use crate::cache::{BytesInUse, CacheSpec, LayerSpec, TensorScales};
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::model::{Config, GpuWeights, Model, PROMPTS, Placed, encode, tiny};
use crate::scales::{ScaleLayout, ScaleType};
use crate::spec::{Pair, Side};
use crate::work::Status;

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

named_choice!(
    Convention,
    "convention",
    Packed = "packed",
    Published = "published"
);
named_choice!(Mode, "mode", Prefill = "prefill", Decode = "decode");

/// The largest recent window of a drift run.
pub const MAX_WINDOW: u32 = 4096;

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
    /// Inputs that saturated or had their scale clamped while they were packed, over all prompts.
    pub saturated: u64,
    /// Bytes of all pages in use at the end of one prompt, all layers, K and V: the sum of the three parts that follow.
    pub cache_bytes: u64,
    /// Of these, codes: packed tokens' and waiting tokens', unused slots too.
    pub code_bytes: u64,
    /// Of these, scales, unused slots too.
    pub scale_bytes: u64,
    /// Of these, padding at the ends of head words and planes.
    pub padding_bytes: u64,
    /// Bytes of all pages that the cache made, in use or not: those in which tokens wait to be packed too.
    pub allocated_bytes: u64,
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

/// What runs the model.
#[derive(Debug, Clone)]
pub enum Device {
    /// The CPU reference, in f64.
    Cpu,
    /// A GPU (or a software adapter), in f32.
    Gpu(Gpu),
}

impl Device {
    fn name(&self) -> &'static str {
        match self {
            Device::Cpu => "cpu",
            Device::Gpu(_) => "gpu",
        }
    }

    /// A model in memory, on this device.
    ///
    /// # Errors
    /// As [`GpuWeights::of`].
    pub fn place(&self, model: Model) -> Result<Placed> {
        Ok(match self {
            Device::Cpu => Placed::Cpu(Box::new(model)),
            Device::Gpu(gpu) => Placed::Gpu(Arc::new(GpuWeights::of(gpu, &model)?)),
        })
    }

    fn adapter(&self) -> String {
        match self {
            Device::Cpu => "CPU reference (f64)".to_owned(),
            Device::Gpu(gpu) => gpu.summary().title(),
        }
    }
}

/// Measures every pair of the options against the f32 cache. `progress` hears (done, of, what) as prompts finish.
///
/// # Errors
/// [`Error::Usage`] for options that contradict each other, [`Error::Shape`] for a pair that does not fit the model,
/// [`Error::NonFinite`] where a result is not a number, and what the device reports.
pub fn run(
    device: &Device,
    options: &DriftOptions,
    progress: &mut dyn FnMut(u64, u64, &str),
) -> Result<Vec<DriftRow>> {
    let model = device.place(tiny(options.outlier))?;
    run_watched(device, &model, options, None, progress)
}

/// As [`run`], on the tiny model of the options' outlier factor that was placed already; `watch` sees every call.
///
/// # Errors
/// As [`run`], and those of `watch`.
pub fn run_watched(
    device: &Device,
    model: &Placed,
    options: &DriftOptions,
    mut watch: Option<&mut dyn Watch>,
    progress: &mut dyn FnMut(u64, u64, &str),
) -> Result<Vec<DriftRow>> {
    check(options)?;
    let prompts = PROMPTS
        .iter()
        .map(|prompt| encode(prompt))
        .collect::<Result<Vec<_>>>()?;
    // Every pair is checked before the first long run.
    for &pair in &options.pairs {
        cache_spec(model.config(), pair, options, &[])?.geometry()?;
    }
    let of = (options.pairs.len() as u64 + 1) * prompts.len() as u64;
    let mut done = 0;
    let mut tick = |what: &str| {
        done += 1;
        progress(done, of, what);
    };
    let f32 = cache_spec(model.config(), Pair::same(Side::F32), options, &[])?;
    let reference = {
        let spec = Spec {
            pair: None,
            cache: f32,
        };
        let mut tick = || tick("f32 reference");
        measure(
            model,
            spec,
            &prompts,
            options.mode,
            None,
            watch.as_deref_mut(),
            &mut tick,
        )?
    };
    finite("the logits of the f32 reference", &reference.logits)?;
    let mut rows = Vec::new();
    for &pair in &options.pairs {
        let name = pair.to_string();
        let spec = Spec {
            pair: Some(pair),
            cache: cache_spec(model.config(), pair, options, &reference.calibrated)?,
        };
        let run = {
            let (right, watch) = (Some(&reference.logits[..]), watch.as_deref_mut());
            let mut tick = || tick(&name);
            measure(model, spec, &prompts, options.mode, right, watch, &mut tick)?
        };
        finite(&format!("the logits of `{name}`"), &run.logits)?;
        let damage = damage(&reference.logits, &run.logits, model.config().vocabulary as usize);
        let bits_per_number = pair.bits_per_number(model.config().head_dim, model.config().head_dim);
        rows.push(DriftRow {
            pair: name,
            bits_per_number,
            percent_of_f16: bits_per_number / 16.0 * 100.0,
            logit_drift: damage.drift,
            logit_drift_centred: damage.centred,
            top1: damage.top1,
            predictions: damage.predictions,
            mean_kl: damage.mean_kl,
            max_abs_diff: damage.max_abs_diff,
            saturated: u64::from(run.status.saturated),
            cache_bytes: run.bytes.total(),
            code_bytes: run.bytes.codes,
            scale_bytes: run.bytes.scales,
            padding_bytes: run.bytes.padding,
            allocated_bytes: run.allocated_bytes,
            convention: options.convention.to_string(),
            mode: options.mode.to_string(),
            window: options.window,
            outlier: options.outlier,
            device: device.name().to_owned(),
            adapter: device.adapter(),
        });
    }
    Ok(rows)
}

fn check(options: &DriftOptions) -> Result<()> {
    let refuse = |asked: String, reason: &str, advice: &str| {
        Err(Error::Usage {
            asked,
            reason: reason.to_owned(),
            advice: advice.to_owned(),
        })
    };
    if options.pairs.is_empty() {
        return refuse(
            "no pairs".to_owned(),
            "there is nothing to measure",
            "name at least one pair",
        );
    }
    if !(options.outlier.is_finite() && options.outlier > 0.0) {
        let asked = format!("outlier factor {}", options.outlier);
        return refuse(
            asked,
            "it must be finite and above 0",
            "use 1 for none, 8 or 32 for outliers as models have them",
        );
    }
    if options.convention == Convention::Published {
        if options.mode == Mode::Decode {
            let reason = "its groups span the whole prompt, which cannot be streamed";
            return refuse(
                "convention published with mode decode".to_owned(),
                reason,
                "use --mode prefill",
            );
        }
        if options.window > 0 {
            let reason = "it has no recent window";
            return refuse(
                format!("convention published with window {}", options.window),
                reason,
                "use --window 0",
            );
        }
    }
    if options.window > MAX_WINDOW {
        return refuse(
            format!("window {}", options.window),
            &format!("at most {MAX_WINDOW} tokens stay recent"),
            "use a smaller window",
        );
    }
    Ok(())
}

/// The cache of one run. `calibrated` holds per-tensor scales from the f32 run, `[layer][K, V]`.
///
/// # Errors
/// [`Error::Usage`] for a pair that the convention does not have.
pub fn cache_spec(
    config: &Config,
    pair: Pair,
    options: &DriftOptions,
    calibrated: &[[f32; 2]],
) -> Result<CacheSpec> {
    let published = options.convention == Convention::Published;
    let side = |side: Side| -> Result<Side> {
        match side.layout {
            ScaleLayout::PerChannel { group } if published && group != config.positions => {
                Err(Error::Usage {
                    asked: format!("`{side}` in convention published"),
                    reason: format!("there a group is the whole prompt of {} tokens", config.positions),
                    advice: format!("name it with G = {}", config.positions),
                })
            }
            _ if published && side.scale == ScaleType::F16 => Ok(side.with_scale_type(ScaleType::F32)),
            _ => Ok(side),
        }
    };
    let pair = Pair {
        k: side(pair.k)?,
        v: side(pair.v)?,
    };
    let page_tokens = pair.default_page_tokens();
    let layer = LayerSpec {
        window: [options.window; 2],
        ..LayerSpec::new(pair)
    };
    CacheSpec {
        layers: vec![layer; config.blocks as usize],
        page_tokens,
        waiting: if published { Side::F32 } else { Side::F16 },
        sequences: 1,
        tensor_scales: if published || calibrated.is_empty() {
            TensorScales::FromRows
        } else {
            TensorScales::Given(calibrated.to_vec())
        },
        ..CacheSpec::new(
            config.blocks,
            config.q_heads,
            config.kv_heads,
            config.head_dim,
            pair,
            0,
        )
    }
    .with_pages(config.positions.div_ceil(page_tokens))
}

/// What one run of all prompts gave.
struct Run {
    /// `[prompt][position][vocabulary]`.
    logits: Vec<f64>,
    calibrated: Vec<[f32; 2]>,
    status: Status,
    bytes: BytesInUse,
    allocated_bytes: u64,
}

/// What a run stores, and how.
struct Spec {
    /// None for the reference.
    pair: Option<Pair>,
    cache: CacheSpec,
}

/// Runs the prompts, one sequence each. `reference` has the logits of the f32 run; none in that run itself.
fn measure(
    model: &Placed,
    spec: Spec,
    prompts: &[Vec<u32>],
    mode: Mode,
    reference: Option<&[f64]>,
    mut watch: Option<&mut (dyn Watch + '_)>,
    tick: &mut dyn FnMut(),
) -> Result<Run> {
    let (pair, named) = (spec.pair, spec.cache.layers[0].pair);
    let mut logits: Vec<f64> = Vec::new();
    let mut bytes = BytesInUse::default();
    let mut session = model.session(spec.cache, pair.is_none() || named == Pair::same(Side::F32))?;
    for (number, prompt) in prompts.iter().enumerate() {
        let sequence = session.open();
        let chunk = match mode {
            Mode::Prefill => prompt.len(),
            Mode::Decode => 1,
        };
        for (at, ids) in prompt.chunks(chunk).enumerate() {
            let Some(watch) = &mut watch else {
                logits.extend(session.logits(sequence, ids)?);
                continue;
            };
            let mut layers = Vec::new();
            let new = session.logits_traced(sequence, ids, &mut |rows| {
                layers.push(rows);
                Ok(())
            })?;
            let right = reference.and_then(|all| all.get(logits.len()..logits.len() + new.len()));
            watch.seen(&Seen {
                pair,
                prompt: number,
                first_position: (at * chunk) as u32,
                ids,
                reference: right.unwrap_or(&new),
                logits: &new,
                layers: &layers,
            })?;
            logits.extend(new);
        }
        if let Some(watch) = &mut watch {
            watch.done(&Done {
                pair,
                prompt: number,
                session: &session,
                sequence,
            })?;
        }
        bytes = session.book().bytes_in_use();
        session.free(sequence)?;
        tick();
    }
    let status = session.status()?;
    no_non_finite(status, named)?;
    Ok(Run {
        logits,
        calibrated: session.calibrated()?,
        status,
        bytes,
        allocated_bytes: session.allocated_bytes(),
    })
}

/// Refuses rows that were not numbers.
fn no_non_finite(status: Status, pair: Pair) -> Result<()> {
    if status.non_finite > 0 {
        return Err(Error::NonFiniteRows {
            pair: pair.to_string(),
            count: u64::from(status.non_finite),
        });
    }
    Ok(())
}

/// Checks that all of `what` are numbers.
///
/// # Errors
/// [`Error::NonFinite`] with their counts.
pub fn finite(what: &str, values: &[f64]) -> Result<()> {
    let nan = values.iter().filter(|v| v.is_nan()).count() as u64;
    let infinite = values.iter().filter(|v| v.is_infinite()).count() as u64;
    if nan + infinite == 0 {
        Ok(())
    } else {
        Err(Error::NonFinite {
            what: what.to_owned(),
            nan,
            infinite,
        })
    }
}
