//! Text from a trained model, token by token, through a cache of any format.

use std::time::Instant;

use crate::cache::{CacheSpec, LayerSpec, TensorScales};
use crate::error::{Error, Result};
use crate::model::{Placed, Session};
use crate::scales::ScaleLayout;
use crate::spec::{Pair, Side};

/// How the next token is chosen, and when to stop.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// How the cache stores K and V.
    pub pair: Pair,
    /// Recent tokens R of K and of V that stay in f16.
    pub window: u32,
    /// The most new tokens.
    pub max_tokens: u32,
    /// 0: the most probable token. Above: drawn from softmax(logits / temperature).
    pub temperature: f64,
    /// Where the drawing begins: the same seed draws the same tokens.
    pub seed: u64,
    /// Per-tensor scales that the checkpoint brings, `[layer][K, V]`; None: calibrated on the prompt.
    pub kv_scales: Option<Vec<[f32; 2]>>,
    /// Token ids that end the text; they are not part of it.
    pub end_of_text: Vec<u32>,
}

/// What came out.
#[derive(Debug, Clone, PartialEq)]
pub struct Generated {
    /// The new tokens.
    pub ids: Vec<u32>,
    /// Whether the model ended the text.
    pub ended: bool,
    /// Time of the prompt, in seconds, compilation of kernels included.
    pub prompt_seconds: f64,
    /// Time of the new tokens after the first, which the prompt gives.
    pub decode_seconds: f64,
    /// Tokens in the cache at the end: all but the last.
    pub cached_tokens: u32,
    /// Bytes of all pages in use at the end, all layers, K and V.
    pub cache_bytes: u64,
}

/// Continues a prompt. `each` takes every new token as it comes, and says whether to go on.
///
/// Per-tensor scales (`fp8`) that the options do not give are calibrated on the prompt, which is run once more for that.
///
/// # Errors
/// [`Error::Usage`] for an empty prompt, a temperature below 0 and rows that no scale fits; [`Error::Shape`] for a prompt
/// beyond the model's context or ids that it lacks; [`Error::NonFinite`]; what the device reports.
pub fn generate(
    model: &Placed,
    prompt: &[u32],
    options: &GenerateOptions,
    each: &mut dyn FnMut(u32) -> Result<bool>,
) -> Result<Generated> {
    let refuse = |asked: String, reason: &str, advice: &str| {
        Err(Error::Usage {
            asked,
            reason: reason.to_owned(),
            advice: advice.to_owned(),
        })
    };
    if prompt.is_empty() {
        let reason = "there is no token whose next one could be asked for";
        return refuse("an empty prompt".to_owned(), reason, "give a text");
    }
    // Written so that NaN is refused.
    if !(options.temperature >= 0.0 && options.temperature.is_finite()) {
        let asked = format!("temperature {}", options.temperature);
        return refuse(asked, "it is 0 or more", "use 0 for the most probable token");
    }
    model.config().check(prompt, 0)?;
    let per_tensor = |side: Side| side.layout == ScaleLayout::PerTensor;
    let calibrated = match (
        per_tensor(options.pair.k) || per_tensor(options.pair.v),
        &options.kv_scales,
    ) {
        (false, _) => Vec::new(),
        (true, Some(scales)) => scales.clone(),
        (true, None) => {
            let mut session = model.session(
                cache_spec(model, Pair::same(Side::F32), prompt, options, &[])?,
                true,
            )?;
            run_prompt(model, &mut session, prompt)?;
            session.calibrated()?
        }
    };
    let spec = cache_spec(model, options.pair, prompt, options, &calibrated)?;
    let mut session = model.session(spec, false)?;
    let mut random = fastrand::Rng::with_seed(options.seed);
    let start = Instant::now();
    let (sequence, mut logits) = run_prompt(model, &mut session, prompt)?;
    let prompt_seconds = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let room = model.config().positions - prompt.len() as u32;
    let most = options.max_tokens.min(room.saturating_add(1));
    let (mut ids, mut ended) = (Vec::new(), false);
    while (ids.len() as u32) < most {
        let next = choose(&logits, options.temperature, &mut random)?;
        if options.end_of_text.contains(&next) {
            ended = true;
            break;
        }
        ids.push(next);
        if !each(next)? || ids.len() as u32 == most {
            break;
        }
        logits = session.logits(sequence, &[next])?;
    }
    let status = session.status()?;
    if status.non_finite > 0 {
        return Err(Error::NonFiniteRows {
            pair: options.pair.to_string(),
            count: u64::from(status.non_finite),
        });
    }
    Ok(Generated {
        ids,
        ended,
        prompt_seconds,
        decode_seconds: start.elapsed().as_secs_f64(),
        cached_tokens: session.book().len(sequence)?,
        cache_bytes: session.book().bytes_in_use().total(),
    })
}

/// Runs the prompt chunk by chunk: its sequence, and the logits after its last token.
fn run_prompt(
    model: &Placed,
    session: &mut Session<'_>,
    prompt: &[u32],
) -> Result<(crate::cache::SequenceId, Vec<f64>)> {
    let sequence = session.open();
    let mut last = Vec::new();
    for chunk in prompt.chunks(model.chunk() as usize) {
        last = session.logits(sequence, chunk)?;
    }
    let row = last.len() - last.len().min(model.config().vocabulary as usize);
    Ok((sequence, last.split_off(row)))
}

/// The next token.
fn choose(logits: &[f64], temperature: f64, random: &mut fastrand::Rng) -> Result<u32> {
    let nan = logits.iter().filter(|v| v.is_nan()).count() as u64;
    let infinite = logits.iter().filter(|v| v.is_infinite()).count() as u64;
    if nan + infinite > 0 {
        return Err(Error::NonFinite {
            what: "the logits of the next token".to_owned(),
            nan,
            infinite,
        });
    }
    let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
    if temperature == 0.0 {
        return Ok(best as u32);
    }
    let weights = logits.iter().map(|v| ((v - logits[best]) / temperature).exp());
    let weights: Vec<f64> = weights.collect();
    let mut left = random.f64() * weights.iter().sum::<f64>();
    for (id, weight) in (0..).zip(&weights) {
        left -= weight;
        if left < 0.0 {
            return Ok(id);
        }
    }
    Ok(best as u32)
}

fn cache_spec(
    model: &Placed,
    pair: Pair,
    prompt: &[u32],
    options: &GenerateOptions,
    calibrated: &[[f32; 2]],
) -> Result<CacheSpec> {
    let config = model.config();
    let tokens = (prompt.len() as u64 + u64::from(options.max_tokens)).min(config.positions.into());
    let page_tokens = pair.default_page_tokens();
    let layer = LayerSpec {
        window: [options.window; 2],
        ..LayerSpec::new(pair)
    };
    CacheSpec {
        layers: vec![layer; config.blocks as usize],
        sequences: 1,
        tensor_scales: TensorScales::Given(calibrated.to_vec()),
        ..CacheSpec::new(
            config.blocks,
            config.q_heads,
            config.kv_heads,
            config.head_dim,
            pair,
            0,
        )
    }
    .with_pages((tokens as u32).div_ceil(page_tokens).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_drawn_as_often_as_softmax_says() {
        let logits = [0.0, 2.0_f64.ln(), 5.0_f64.ln()];
        let mut random = fastrand::Rng::with_seed(1);
        assert_eq!(choose(&logits, 0.0, &mut random).unwrap(), 2);
        let mut counts = [0; 3];
        for _ in 0..8000 {
            counts[choose(&logits, 1.0, &mut random).unwrap() as usize] += 1;
        }
        // 1000, 2000 and 5000, each within five standard deviations.
        for (count, expected) in counts.into_iter().zip([1000_i32, 2000, 5000]) {
            assert!((count - expected).abs() < 230, "{counts:?}");
        }
        // Near 0 only the best is left; the first of equals wins.
        assert_eq!(choose(&logits, 1e-3, &mut random).unwrap(), 2);
        assert_eq!(choose(&[1.0, 1.0], 0.0, &mut random).unwrap(), 0);
        let said = choose(&[0.0, f64::NAN], 1.0, &mut random).unwrap_err();
        assert!(said.to_string().contains("1 NaN"));
    }
}
