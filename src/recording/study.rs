//! Whole studies: a measurement and its recording together.

use std::collections::{BTreeMap, BTreeSet};

use super::{Loss, RecordedRun, Recorder, Shown};
use crate::drift::{Device, DriftOptions, DriftRow, run_watched};
#[cfg(feature = "models")]
use crate::drift::{TrainedDrift, TrainedDriftOptions, run_trained_watched};
use crate::error::Result;
use crate::model::{ALPHABET, Config, PROMPTS, Placed, encode, tiny};
use crate::spec::Pair;

/// Outlier factors at which the two layouts of K's scales are compared.
pub const OUTLIERS: [f64; 7] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];

/// Of these, the factors at which every pair is recorded.
pub const RECORDED_OUTLIERS: [f64; 3] = [1.0, 8.0, 64.0];

/// Pairs that differ only in how keys share their scales: a scale a token and head, a scale a channel and group of tokens.
pub const LAYOUTS: [[&str; 2]; 2] = [["int4", "int4c/int4"], ["int8", "int8c/int8"]];

/// The runs of a model at one outlier factor.
#[derive(Debug, Clone, PartialEq)]
pub struct Take {
    /// Channel 3 of each head of K times this, of q divided by it.
    pub outlier: f64,
    /// The run with the f32 cache, then one a pair.
    pub runs: Vec<RecordedRun>,
}

/// A model's recorded runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Recording {
    /// The model's name.
    pub model: String,
    /// Its shape.
    pub config: Config,
    /// What is shown.
    pub shown: Shown,
    /// Token ids of the prompts.
    pub prompts: Vec<Vec<u32>>,
    /// The text of every token that occurs.
    pub texts: BTreeMap<u32, String>,
    /// The runs by outlier factor, the factor of the table first. At factors that are not recorded in full, the first prompt
    /// of the pairs of [`LAYOUTS`].
    pub takes: Vec<Take>,
}

impl Recording {
    fn new(
        model: String,
        config: &Config,
        shown: Shown,
        prompts: Vec<Vec<u32>>,
        takes: Vec<Take>,
        text: &dyn Fn(u32) -> String,
    ) -> Recording {
        let mut ids: BTreeSet<u32> = prompts.iter().flatten().copied().collect();
        for prompt in takes.iter().flat_map(|take| &take.runs).flat_map(|run| &run.prompts) {
            ids.extend(&prompt.predictions.ids);
            ids.extend(prompt.flips.iter().flat_map(|flip| [flip.from, flip.to]));
        }
        Recording {
            model,
            config: config.clone(),
            shown,
            prompts,
            texts: ids.into_iter().map(|id| (id, text(id))).collect(),
            takes,
        }
    }
}

/// One pair of [`LAYOUTS`] at one outlier factor.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct OutlierRow {
    /// The outlier factor.
    pub outlier: f64,
    /// The pair's name.
    pub pair: String,
    /// sqrt(sum (ref - q)^2 / sum ref^2).
    pub logit_drift: f64,
    /// Predictions whose argmax is unchanged.
    pub top1: u64,
    /// Predictions in all.
    pub predictions: u64,
    /// Mean of KL(softmax ref || softmax q), in nats.
    pub mean_kl: f64,
    /// Share of the keys that were not 0 and read back as 0.
    pub k_zeroed: f64,
    /// Relative L2 error of the keys.
    pub k_error: f64,
}

/// The tiny model: its table, its recording, and the two layouts under outliers.
#[derive(Debug, Clone, PartialEq)]
pub struct TinyStudy {
    /// The drift table of the pairs that were asked for.
    pub rows: Vec<DriftRow>,
    /// The recorded runs.
    pub recording: Recording,
    /// The pairs of [`LAYOUTS`] at every factor of [`OUTLIERS`] and that of the options, in rising order.
    pub outliers: Vec<OutlierRow>,
}

/// The pairs of [`LAYOUTS`].
fn layouts() -> Vec<Pair> {
    LAYOUTS.iter().flatten().filter_map(|name| name.parse().ok()).collect()
}

/// Measures and records the tiny model. `progress` hears (done, of, what).
///
/// # Errors
/// As [`run_watched`].
pub fn tiny_study(
    device: &Device,
    options: &DriftOptions,
    progress: &mut dyn FnMut(u64, u64, &str),
) -> Result<TinyStudy> {
    let mut factors: Vec<f64> = OUTLIERS.into_iter().filter(|&factor| factor != options.outlier).collect();
    factors.insert(0, options.outlier);
    let story = layouts();
    let mut all = options.pairs.clone();
    all.extend(story.iter().filter(|pair| !options.pairs.contains(pair)));
    let prompts = PROMPTS.iter().map(|prompt| encode(prompt)).collect::<Result<Vec<_>>>()?;
    let lengths: Vec<u32> = prompts.iter().map(|ids| ids.len() as u32).collect();
    let pairs_of = |number: usize, factor: f64| match number == 0 || RECORDED_OUTLIERS.contains(&factor) {
        true => &all,
        false => &story,
    };
    let runs_of = |number: usize, factor: f64| (pairs_of(number, factor).len() + 1) * prompts.len();
    let of: usize = factors.iter().enumerate().map(|(i, &factor)| runs_of(i, factor)).sum();
    let (mut rows, mut takes, mut outliers, mut before) = (Vec::new(), Vec::new(), Vec::new(), 0);
    let mut shape = None;
    for (number, &factor) in factors.iter().enumerate() {
        let pairs = pairs_of(number, factor);
        let options = DriftOptions {
            pairs: pairs.clone(),
            outlier: factor,
            ..options.clone()
        };
        let model = device.place(tiny(factor))?;
        let shown = Shown::of(model.config(), &lengths);
        let mut recorder = Recorder::new(&model, shown);
        let measured = run_watched(device, &model, &options, Some(&mut recorder), &mut |done, _, what| {
            progress(before + done, of as u64, &format!("outlier {factor}: {what}"));
        })?;
        before += runs_of(number, factor) as u64;
        let (shown, mut runs) = recorder.into_parts();
        for (row, run) in measured.iter().zip(runs.iter().skip(1)) {
            if run.pair.is_some_and(|pair| story.contains(&pair)) {
                outliers.push(outlier_row(row, run));
            }
        }
        if number == 0 {
            rows = measured;
        }
        if number > 0 && !RECORDED_OUTLIERS.contains(&factor) {
            runs.iter_mut().for_each(|run| run.prompts.truncate(1));
        }
        takes.push(Take {
            outlier: factor,
            runs,
        });
        shape = Some((model.config().clone(), shown));
    }
    rows.truncate(options.pairs.len());
    outliers.sort_by(|a, b| a.outlier.total_cmp(&b.outlier));
    let (config, shown) = match shape {
        Some(shape) => shape,
        None => (tiny(1.0).config, Shown::of(&tiny(1.0).config, &lengths)),
    };
    let text = |id: u32| {
        let letter = ALPHABET.chars().nth(id as usize);
        letter.map_or_else(String::new, String::from)
    };
    let name = "tiny model".to_owned();
    Ok(TinyStudy {
        rows,
        recording: Recording::new(name, &config, shown, prompts, takes, &text),
        outliers,
    })
}

fn outlier_row(row: &DriftRow, run: &RecordedRun) -> OutlierRow {
    let keys = run.prompts.iter().flat_map(|prompt| &prompt.layers).map(|sides| &sides[0]);
    let loss = keys.flat_map(|side| &side.losses).fold(Loss::default(), |sum, loss| sum.plus(*loss));
    OutlierRow {
        outlier: row.outlier,
        pair: row.pair.clone(),
        logit_drift: row.logit_drift,
        top1: row.top1,
        predictions: row.predictions,
        mean_kl: row.mean_kl,
        k_zeroed: loss.zeroed_share(),
        k_error: loss.relative_error(),
    }
}

/// Measures and records a trained model on a text. `text` gives the text of a token id.
///
/// # Errors
/// As [`run_trained_watched`].
#[cfg(feature = "models")]
pub fn trained_study(
    device: &Device,
    (name, model): (&str, &Placed),
    ids: &[u32],
    options: &TrainedDriftOptions,
    text: &dyn Fn(u32) -> String,
    progress: &mut dyn FnMut(u64, u64, &str),
) -> Result<(TrainedDrift, Recording)> {
    let shown = Shown::of(model.config(), &[ids.len() as u32]);
    let mut recorder = Recorder::new(model, shown);
    let drift = run_trained_watched(device, model, ids, options, &mut recorder, progress)?;
    let (shown, runs) = recorder.into_parts();
    let takes = vec![Take { outlier: 1.0, runs }];
    let prompts = vec![ids.to_vec()];
    let recording = Recording::new(name.to_owned(), model.config(), shown, prompts, takes, text);
    Ok((drift, recording))
}
