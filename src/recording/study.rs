//! Whole studies: a measurement and its recording together.

use std::collections::{BTreeMap, BTreeSet};

use super::{Loss, RecordedRun, Recorder, Shown};
use crate::drift::{Device, DriftOptions, DriftRow, Mode, run_watched};
#[cfg(feature = "models")]
use crate::drift::{TrainedDrift, TrainedDriftOptions, run_trained_watched};
use crate::error::Result;
#[cfg(feature = "models")]
use crate::model::Placed;
use crate::model::{ALPHABET, Config, PROMPTS, encode, tiny};

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
    /// The runs by outlier factor, the factor of the table first.
    pub takes: Vec<Take>,
}

impl Recording {
    fn new(
        model: &str,
        config: &Config,
        shown: Shown,
        prompts: Vec<Vec<u32>>,
        takes: Vec<Take>,
        text: &dyn Fn(u32) -> String,
    ) -> Recording {
        let mut ids: BTreeSet<u32> = prompts.iter().flatten().copied().collect();
        for prompt in takes
            .iter()
            .flat_map(|take| &take.runs)
            .flat_map(|run| &run.prompts)
        {
            ids.extend(&prompt.predictions.ids);
            ids.extend(prompt.flips.iter().flat_map(|flip| [flip.from, flip.to]));
        }
        Recording {
            model: model.to_owned(),
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

/// What the tiny model's runs at some outlier factors gave.
#[derive(Debug, Clone, PartialEq)]
pub struct TinyStudy {
    /// The drift rows, in the order of the factors.
    pub rows: Vec<Vec<DriftRow>>,
    /// The recorded runs.
    pub recording: Recording,
}

/// Measures and records the tiny model at the outlier factor of the options and those of [`RECORDED_OUTLIERS`].
/// `progress` hears (done, of, what).
///
/// # Errors
/// As [`run_watched`].
pub fn tiny_study(
    device: &Device,
    options: &DriftOptions,
    progress: &mut dyn FnMut(u64, u64, &str),
) -> Result<TinyStudy> {
    let others = RECORDED_OUTLIERS
        .into_iter()
        .filter(|&factor| factor != options.outlier);
    let factors: Vec<f64> = std::iter::once(options.outlier).chain(others).collect();
    record(device, options, &factors, progress)
}

/// Measures and records the pairs of [`LAYOUTS`] at the factors of [`OUTLIERS`], each prompt at once; the recording has the
/// first prompt. A row a factor and pair. `progress` hears (done, of, what).
///
/// # Errors
/// As [`run_watched`].
pub fn layouts_study(
    device: &Device,
    progress: &mut dyn FnMut(u64, u64, &str),
) -> Result<(Recording, Vec<OutlierRow>)> {
    let options = DriftOptions {
        pairs: LAYOUTS
            .iter()
            .flatten()
            .map(|name| name.parse())
            .collect::<Result<_>>()?,
        convention: Default::default(),
        mode: Mode::Prefill,
        outlier: 1.0,
        window: 0,
    };
    let mut study = record(device, &options, &OUTLIERS, progress)?;
    let mut outliers = Vec::new();
    for (rows, take) in study.rows.iter().zip(&study.recording.takes) {
        let runs = take.runs.iter().skip(1);
        outliers.extend(rows.iter().zip(runs).map(|(row, run)| outlier_row(row, run)));
    }
    study.recording.prompts.truncate(1);
    study.recording.shown.tokens.truncate(1);
    for run in study.recording.takes.iter_mut().flat_map(|take| &mut take.runs) {
        run.prompts.truncate(1);
    }
    Ok((study.recording, outliers))
}

fn record(
    device: &Device,
    options: &DriftOptions,
    factors: &[f64],
    progress: &mut dyn FnMut(u64, u64, &str),
) -> Result<TinyStudy> {
    let prompts = PROMPTS
        .iter()
        .map(|prompt| encode(prompt))
        .collect::<Result<Vec<_>>>()?;
    let lengths: Vec<u32> = prompts.iter().map(|ids| ids.len() as u32).collect();
    let config = tiny(options.outlier).config;
    let shown = Shown::of(&config, &lengths);
    let (mut rows, mut takes) = (Vec::new(), Vec::new());
    for (number, &outlier) in (0_u64..).zip(factors) {
        let options = DriftOptions {
            outlier,
            ..options.clone()
        };
        let model = device.place(tiny(outlier))?;
        let mut recorder = Recorder::new(&model, shown.clone());
        let count = factors.len() as u64;
        let measured = run_watched(
            device,
            &model,
            &options,
            Some(&mut recorder),
            &mut |done, of, what| {
                progress(
                    number * of + done,
                    count * of,
                    &format!("outlier {outlier}: {what}"),
                );
            },
        )?;
        rows.push(measured);
        takes.push(Take {
            outlier,
            runs: recorder.into_runs(),
        });
    }
    let text = |id: u32| {
        let letter = ALPHABET.chars().nth(id as usize);
        letter.map_or_else(String::new, String::from)
    };
    Ok(TinyStudy {
        rows,
        recording: Recording::new("tiny model", &config, shown, prompts, takes, &text),
    })
}

fn outlier_row(row: &DriftRow, run: &RecordedRun) -> OutlierRow {
    let keys = run
        .prompts
        .iter()
        .flat_map(|prompt| &prompt.layers)
        .map(|sides| &sides[0]);
    let loss = keys
        .flat_map(|side| &side.losses)
        .fold(Loss::default(), |sum, loss| sum.plus(*loss));
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
    let mut recorder = Recorder::new(model, shown.clone());
    let drift = run_trained_watched(device, model, ids, options, &mut recorder, progress)?;
    let takes = vec![Take {
        outlier: 1.0,
        runs: recorder.into_runs(),
    }];
    let prompts = vec![ids.to_vec()];
    let recording = Recording::new(name, model.config(), shown, prompts, takes, text);
    Ok((drift, recording))
}
