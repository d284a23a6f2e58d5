//! Drift of a trained model on a text: the same figures as the tiny model's, and the perplexity of the text.

use std::time::Instant;

use super::damage::log_sum_exp;
use super::layers::{LayerDriftRow, Layers};
use super::{Comparison, Device, Done, Mode, Seen, Watch, finite, no_non_finite};
use crate::cache::{BytesInUse, CacheSpec, LayerSpec, TensorScales};
use crate::error::{Error, Result};
use crate::model::{Config, LayerRows, Placed};
use crate::spec::{Pair, Side};
use crate::work::Status;

named_choice!(KeyRope, "k-rope", Post = "post", Pre = "pre");

/// Whether keys enter the cache before or after RoPE.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeyRope {
    /// After: how engines store them.
    #[default]
    Post,
    /// Before: attention rotates them as it reads them.
    Pre,
}

/// What to measure.
#[derive(Debug, Clone)]
pub struct TrainedDriftOptions {
    /// The pairs, in the order of the report.
    pub pairs: Vec<Pair>,
    /// Whether keys enter the cache before or after RoPE.
    pub k_rope: KeyRope,
    /// How the text enters the cache.
    pub mode: Mode,
    /// Recent tokens R of K and of V that stay in f16.
    pub window: u32,
    /// Whether to measure each layer by itself too.
    pub per_layer: bool,
    /// Per-tensor scales that the checkpoint brings, `[layer][K, V]`; None: calibrated on the f32 run.
    pub kv_scales: Option<Vec<[f32; 2]>>,
}

/// One row of a trained model's drift table.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct TrainedDriftRow {
    /// The pair's name; `f32` is the run that the others are compared with.
    pub pair: String,
    /// `post` or `pre`: whether keys enter the cache after or before RoPE.
    pub k_rope: String,
    /// True cost of one number in bits, scales included.
    pub bits_per_number: f64,
    /// The same as a share of 16 bits.
    pub percent_of_f16: f64,
    /// sqrt(sum (ref - q)^2 / sum ref^2), pooled over positions and vocabulary.
    pub logit_drift: f64,
    /// The same after each logit row's own mean is taken off both: softmax does not see that offset.
    pub logit_drift_centred: f64,
    /// Mean of KL(softmax ref || softmax q), in nats.
    pub mean_kl: f64,
    /// Predictions whose argmax is unchanged.
    pub top1: u64,
    /// Predictions in all.
    pub predictions: u64,
    /// Largest |ref - q|.
    pub max_abs_diff: f64,
    /// exp of the mean of -ln p(next token), over the text; NaN for a text of one token.
    pub perplexity: f64,
    /// Where per-tensor scales come from: `calibrated` on the f32 run of this text, or the `checkpoint`.
    pub tensor_scales: String,
    /// Inputs that saturated or had their scale clamped while they were packed.
    pub saturated: u64,
    /// Bytes of all pages in use at the end of the text, all layers, K and V: the sum of the three parts that follow.
    pub cache_bytes: u64,
    /// Of these, codes: packed tokens' and waiting tokens', unused slots too.
    pub code_bytes: u64,
    /// Of these, scales, unused slots too.
    pub scale_bytes: u64,
    /// Of these, padding at the ends of head words and planes.
    pub padding_bytes: u64,
    /// Bytes of all pages that the cache made.
    pub allocated_bytes: u64,
    /// `prefill` or `decode`.
    pub mode: String,
    /// Recent window R.
    pub window: u32,
    /// Tokens of the text.
    pub tokens: u64,
    /// Time of the forward passes, compilation of kernels included.
    pub seconds: f64,
    /// Tokens by that time.
    pub tokens_per_second: f64,
    /// `gpu` or `cpu`.
    pub device: String,
    /// The adapter's name and driver, or the CPU reference.
    pub adapter: String,
}

/// What was measured.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct TrainedDrift {
    /// The run with the f32 cache, then a row a pair.
    pub rows: Vec<TrainedDriftRow>,
    /// A row a pair and layer, where layers were asked for.
    pub layers: Vec<LayerDriftRow>,
}

/// Measures every pair on a text of token ids against the same model with an f32 cache, in one window. `progress` hears
/// (tokens done, of, what).
///
/// The logits of the f32 run stay in main memory meanwhile: 4 bytes for each token and entry of the vocabulary.
///
/// # Errors
/// [`Error::Usage`] for a text or options that make no sense, [`Error::Shape`] for a pair that does not fit the model and
/// for a text beyond the model's context, [`Error::NonFinite`] where a result is not a number, and what the device reports.
pub fn run_trained(
    device: &Device,
    model: &Placed,
    ids: &[u32],
    options: &TrainedDriftOptions,
    progress: &mut dyn FnMut(u64, u64, &str),
) -> Result<TrainedDrift> {
    check(model.config(), ids, options, 2)?;
    run_all(device, model, ids, options, None, progress)
}

/// As [`run_trained`]; `watch` sees every call, and the text may be a single token, which leaves the perplexity NaN.
///
/// # Errors
/// As [`run_trained`], and those of `watch`.
pub fn run_trained_watched(
    device: &Device,
    model: &Placed,
    ids: &[u32],
    options: &TrainedDriftOptions,
    watch: &mut dyn Watch,
    progress: &mut dyn FnMut(u64, u64, &str),
) -> Result<TrainedDrift> {
    check(model.config(), ids, options, 1)?;
    run_all(device, model, ids, options, Some(watch), progress)
}

fn run_all(
    device: &Device,
    model: &Placed,
    ids: &[u32],
    options: &TrainedDriftOptions,
    mut watch: Option<&mut dyn Watch>,
    progress: &mut dyn FnMut(u64, u64, &str),
) -> Result<TrainedDrift> {
    for &pair in &options.pairs {
        cache_spec(model.config(), pair, ids.len(), options, &[])?.geometry()?;
    }
    let how = (options.mode, watch.is_some());
    let runs = options.pairs.len() as u64 + 1 + u64::from(options.per_layer);
    let (mut done, of) = (0, runs * ids.len() as u64);
    let mut tick = |what: &str, tokens: usize| {
        done += tokens as u64;
        progress(done, of, what);
    };
    tick("f32 reference", 0);
    let f32 = Pair::same(Side::F32);
    let mut kept: Vec<f32> = Vec::new();
    let spec = cache_spec(model.config(), f32, ids.len(), options, &[])?;
    let reference = measure(model, None, spec, ids, how, &mut |event| {
        if let Event::Step(step) = &event {
            kept.extend(step.logits.iter().map(|&v| v as f32));
            tick("f32 reference", step.ids.len());
        }
        tell(&mut watch, &event, None)
    })?;
    let scales = options.kv_scales.as_ref().unwrap_or(&reference.calibrated);
    let vocabulary = model.config().vocabulary as usize;
    let mut rows = Vec::new();
    for pair in std::iter::once(f32).chain(options.pairs.iter().copied()) {
        let name = pair.to_string();
        let mut comparison = Comparison::default();
        let again;
        let run = if rows.is_empty() {
            // The reference beside itself, for its perplexity.
            for row in kept.chunks(vocabulary) {
                let row: Vec<f64> = row.iter().map(|&v| v.into()).collect();
                comparison.add(&row, &row);
            }
            &reference
        } else {
            let spec = cache_spec(model.config(), pair, ids.len(), options, scales)?;
            let mut rest = &kept[..];
            again = measure(model, Some(pair), spec, ids, how, &mut |event| {
                let Event::Step(step) = &event else {
                    return tell(&mut watch, &event, None);
                };
                let (right, after) = rest.split_at(step.logits.len().min(rest.len()));
                let right: Vec<f64> = right.iter().map(|&v| v.into()).collect();
                for (r, q) in right.chunks(vocabulary).zip(step.logits.chunks(vocabulary)) {
                    comparison.add(r, q);
                }
                rest = after;
                tick(&name, step.ids.len());
                tell(&mut watch, &event, Some(&right))
            })?;
            &again
        };
        let damage = comparison.damage();
        let bits_per_number = pair.bits_per_number(model.config().head_dim, model.config().head_dim);
        rows.push(TrainedDriftRow {
            pair: name,
            k_rope: options.k_rope.to_string(),
            bits_per_number,
            percent_of_f16: bits_per_number / 16.0 * 100.0,
            logit_drift: damage.drift,
            logit_drift_centred: damage.centred,
            mean_kl: damage.mean_kl,
            top1: damage.top1,
            predictions: damage.predictions,
            max_abs_diff: damage.max_abs_diff,
            perplexity: run.perplexity,
            tensor_scales: match options.kv_scales {
                Some(_) => "checkpoint",
                None => "calibrated",
            }
            .to_owned(),
            saturated: u64::from(run.status.saturated),
            cache_bytes: run.bytes.total(),
            code_bytes: run.bytes.codes,
            scale_bytes: run.bytes.scales,
            padding_bytes: run.bytes.padding,
            allocated_bytes: run.allocated_bytes,
            mode: options.mode.to_string(),
            window: options.window,
            tokens: ids.len() as u64,
            seconds: run.seconds,
            tokens_per_second: ids.len() as f64 / run.seconds,
            device: device.name().to_owned(),
            adapter: device.adapter(),
        });
    }
    drop(kept);
    let layers = match options.per_layer {
        false => Vec::new(),
        true => {
            let specs = options.pairs.iter().map(|&pair| {
                Ok((
                    pair,
                    cache_spec(model.config(), pair, ids.len(), options, scales)?,
                ))
            });
            let post = TrainedDriftOptions {
                k_rope: KeyRope::Post,
                ..options.clone()
            };
            let spec = cache_spec(model.config(), f32, ids.len(), &post, &[])?;
            let mut layers = Layers::new(model, specs.collect::<Result<_>>()?)?;
            let mut session = model.session(spec, false)?;
            let sequence = session.open();
            for chunk in ids.chunks(chunk(model, options.mode)) {
                let mut traced = Vec::new();
                session.logits_traced(sequence, chunk, &mut |rows| {
                    traced.push(rows);
                    Ok(())
                })?;
                layers.add(chunk.len() as u32, &traced)?;
                tick("layers", chunk.len());
            }
            layers.rows()?
        }
    };
    Ok(TrainedDrift { rows, layers })
}

fn check(config: &Config, ids: &[u32], options: &TrainedDriftOptions, least: usize) -> Result<()> {
    let refuse = |asked: String, reason: &str, advice: &str| {
        Err(Error::Usage {
            asked,
            reason: reason.to_owned(),
            advice: advice.to_owned(),
        })
    };
    if options.pairs.is_empty() {
        let advice = "name at least one pair";
        return refuse("no pairs".to_owned(), "there is nothing to measure", advice);
    }
    if ids.len() < least {
        let asked = format!("a text of {} tokens", ids.len());
        let reason = match least {
            1 => "there is nothing to run",
            _ => "perplexity needs a token and a next one",
        };
        return refuse(asked, reason, "give a longer text");
    }
    if options.k_rope == KeyRope::Pre && config.rope.is_none() {
        let reason = "this model does not rotate keys";
        return refuse("keys before RoPE".to_owned(), reason, "leave --k-rope out");
    }
    if options.window > super::MAX_WINDOW {
        let reason = format!("at most {} tokens stay recent", super::MAX_WINDOW);
        return refuse(
            format!("window {}", options.window),
            &reason,
            "use a smaller window",
        );
    }
    if let Some(scales) = &options.kv_scales
        && scales.len() != config.blocks as usize
    {
        let asked = format!("per-tensor scales of {} layers", scales.len());
        let reason = format!("the model has {}", config.blocks);
        return refuse(asked, &reason, "give a pair of scales for each layer");
    }
    config.check(ids, 0)
}

fn chunk(model: &Placed, mode: Mode) -> usize {
    match mode {
        Mode::Prefill => model.chunk() as usize,
        Mode::Decode => 1,
    }
}

/// The cache of one run. `calibrated` holds per-tensor scales from the f32 run, `[layer][K, V]`.
fn cache_spec(
    config: &Config,
    pair: Pair,
    tokens: usize,
    options: &TrainedDriftOptions,
    calibrated: &[[f32; 2]],
) -> Result<CacheSpec> {
    let page_tokens = pair.default_page_tokens();
    let pages = (tokens as u32).div_ceil(page_tokens);
    let layer = LayerSpec {
        window: [options.window; 2],
        ..LayerSpec::new(pair)
    };
    let rotation = |rope: &crate::rope::Rope| rope.table(config.head_dim, pages * page_tokens);
    CacheSpec {
        layers: vec![layer; config.blocks as usize],
        sequences: 1,
        tensor_scales: match calibrated {
            [] => TensorScales::FromRows,
            scales => TensorScales::Given(scales.to_vec()),
        },
        key_rotation: match options.k_rope {
            KeyRope::Post => None,
            KeyRope::Pre => config.rope.as_ref().map(rotation),
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
    .with_pages(pages)
}

/// What one run of the text gave besides its logits.
struct Run {
    perplexity: f64,
    calibrated: Vec<[f32; 2]>,
    status: Status,
    bytes: BytesInUse,
    allocated_bytes: u64,
    seconds: f64,
}

/// What a run comes to.
enum Event<'a, 'm> {
    Step(Step<'a>),
    Done(Done<'a, 'm>),
}

/// One call of the model.
struct Step<'a> {
    pair: Option<Pair>,
    first_position: u32,
    ids: &'a [u32],
    logits: &'a [f64],
    layers: &'a [LayerRows],
}

/// Tells who watches, if anyone does. `right` has the logits of the f32 run; none in that run itself.
fn tell(watch: &mut Option<&mut dyn Watch>, event: &Event<'_, '_>, right: Option<&[f64]>) -> Result<()> {
    let Some(watch) = watch else { return Ok(()) };
    match event {
        Event::Done(done) => watch.done(done),
        Event::Step(step) => watch.seen(&Seen {
            pair: step.pair,
            prompt: 0,
            first_position: step.first_position,
            ids: step.ids,
            reference: right.unwrap_or(step.logits),
            logits: step.logits,
            layers: step.layers,
        }),
    }
}

/// Runs the text, with rows of the layers where `traced`; `each` is told of every call and of the end. `pair` is none for the
/// reference.
fn measure(
    model: &Placed,
    pair: Option<Pair>,
    spec: CacheSpec,
    ids: &[u32],
    (mode, traced): (Mode, bool),
    each: &mut dyn FnMut(Event<'_, '_>) -> Result<()>,
) -> Result<Run> {
    let named = spec.layers[0].pair;
    let vocabulary = model.config().vocabulary as usize;
    let mut session = model.session(spec, named == Pair::same(Side::F32))?;
    let sequence = session.open();
    let (mut seconds, mut surprise) = (0.0, 0.0);
    let mut next = ids.iter().skip(1);
    let mut first_position = 0;
    for ids in ids.chunks(chunk(model, mode)) {
        let start = Instant::now();
        let mut layers = Vec::new();
        let logits = match traced {
            false => session.logits(sequence, ids)?,
            true => session.logits_traced(sequence, ids, &mut |rows| {
                layers.push(rows);
                Ok(())
            })?,
        };
        seconds += start.elapsed().as_secs_f64();
        finite(&format!("the logits of `{named}`"), &logits)?;
        for (row, &next) in logits.chunks(vocabulary).zip(next.by_ref()) {
            surprise += log_sum_exp(row) - row[next as usize];
        }
        each(Event::Step(Step {
            pair,
            first_position,
            ids,
            logits: &logits,
            layers: &layers,
        }))?;
        first_position += ids.len() as u32;
    }
    each(Event::Done(Done {
        pair,
        prompt: 0,
        session: &session,
        sequence,
    }))?;
    let status = session.status()?;
    no_non_finite(status, named)?;
    Ok(Run {
        perplexity: (surprise / (ids.len() - 1) as f64).exp(),
        calibrated: session.calibrated()?,
        status,
        bytes: session.book().bytes_in_use(),
        allocated_bytes: session.allocated_bytes(),
        seconds,
    })
}
