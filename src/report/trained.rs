//! Drift of a trained model as tables.

use super::heat_map::{HeatMap, Panel, heat_map};
use super::plot::{Picture, Spot, Spots};
use super::table::{digits, plain, right_aligned, trimmed};
use crate::drift::{LayerDriftRow, TrainedDrift, TrainedDriftRow};
use crate::error::Result;
use crate::scales::ScaleLayout;
use crate::spec::Pair;

/// The drift table of a trained model with a line on what was measured above it and notes below; then the layers.
pub fn trained_drift(drift: &TrainedDrift, model: &str, software: bool) -> String {
    let Some(first) = drift.rows.first() else {
        return String::new();
    };
    let mut table = plain(&[
        "pair",
        "bits",
        "% of FP16",
        "logit drift",
        "centred",
        "mean KL",
        "top-1",
        "perplexity",
        "max diff",
        "cache bytes",
        "tokens/s",
    ]);
    for row in &drift.rows {
        table.add_row([
            row.pair.clone(),
            trimmed(row.bits_per_number, 4),
            format!("{:.1}", row.percent_of_f16),
            digits(row.logit_drift),
            digits(row.logit_drift_centred),
            digits(row.mean_kl),
            format!("{}/{}", row.top1, row.predictions),
            format!("{:.3}", row.perplexity),
            digits(row.max_abs_diff),
            row.cache_bytes.to_string(),
            format!("{:.1}", row.tokens_per_second),
        ]);
    }
    right_aligned(&mut table, 1..11);
    let keys = match first.k_rope.as_str() {
        "pre" => "keys before RoPE, rotated as they are read",
        _ => "keys after RoPE",
    };
    let (tokens, mode, window) = (first.tokens, &first.mode, first.window);
    let mut text = format!("{model}: {tokens} tokens in one window, {mode}, {keys}, window {window}; ");
    text += &format!("{}: {}\n\n", first.device, first.adapter);
    text += &table.trim_fmt();
    text += "\n\n";
    for note in notes(&drift.rows, software) {
        text += &format!("- {note}\n");
    }
    if !drift.layers.is_empty() {
        text += "\n";
        text += &layers(&drift.layers);
    }
    text
}

fn notes(rows: &[TrainedDriftRow], software: bool) -> Vec<String> {
    let pairs: Vec<Pair> = rows.iter().filter_map(|row| row.pair.parse().ok()).collect();
    let mut notes = vec![
        "f32 is the run that the others are compared with.".to_owned(),
        "centred: drift after each row's mean is taken off both, since softmax does not see it; plain drift does."
            .to_owned(),
        "perplexity: of the text's own next tokens.".to_owned(),
        "bits: true cost of one number, scales included; cache bytes: whole pages at the end of the text.".to_owned(),
        "tokens/s: forward passes with the logits of every token, kernels' compilation included.".to_owned(),
    ];
    if pairs.iter().any(|pair| {
        [pair.k, pair.v]
            .iter()
            .any(|s| s.layout == ScaleLayout::PerTensor)
    }) {
        notes.push(match rows.first().map(|row| row.tensor_scales.as_str()) {
            Some("checkpoint") => "fp8 scales are those of the checkpoint.".to_owned(),
            _ => "fp8 scales are calibrated on the f32 run of this text (amax / 448 per layer and side)."
                .to_owned(),
        });
    }
    for row in rows.iter().filter(|row| row.saturated > 0) {
        let what = "inputs saturated or had their scale clamped";
        notes.push(format!("{}: {} {what}.", row.pair, row.saturated));
    }
    if software {
        notes.push("This adapter is a software driver: it computes on the CPU.".to_owned());
    }
    notes
}

/// Errors of each layer by itself, a row a pair and layer.
fn layers(rows: &[LayerDriftRow]) -> String {
    let mut table = plain(&[
        "pair",
        "layer",
        "K error",
        "V error",
        "attention error",
        "K outlier before RoPE",
        "after",
    ]);
    for row in rows {
        table.add_row([
            row.pair.clone(),
            row.layer.to_string(),
            digits(row.k_error),
            digits(row.v_error),
            digits(row.attention_error),
            outlier(row.k_outlier_before_rope),
            outlier(row.k_outlier_after_rope),
        ]);
    }
    right_aligned(&mut table, 1..7);
    let mut text = table.trim_fmt();
    text += "\n\n- errors: relative L2 in each layer by itself, on the rows of the f32 run.\n";
    text += "- K outlier: largest channel amax over the median one.\n";
    text
}

fn outlier(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"))
}

/// Errors by layer and pair: K, V and attention side by side.
///
/// # Errors
/// As [`heat_map`].
pub fn layer_plot(drift: &TrainedDrift, model: &str, picture: Picture) -> Result<Vec<u8>> {
    let mut pairs: Vec<&str> = Vec::new();
    for row in &drift.layers {
        if !pairs.contains(&row.pair.as_str()) {
            pairs.push(&row.pair);
        }
    }
    let layers = drift.layers.iter().map(|row| row.layer + 1).max().unwrap_or(0);
    let panel = |title: &str, figure: &dyn Fn(&LayerDriftRow) -> f64| Panel {
        title: title.to_owned(),
        rows: (0..layers).map(|layer| layer.to_string()).collect(),
        columns: pairs.iter().map(|pair| (*pair).to_owned()).collect(),
        cells: (0..layers)
            .map(|layer| {
                let row = |pair: &&str| drift.layers.iter().find(|r| r.layer == layer && r.pair == **pair);
                pairs.iter().map(|pair| row(pair).map(figure)).collect()
            })
            .collect(),
    };
    let (tokens, device) = drift.rows.first().map_or((0, String::new()), |row| {
        (row.tokens, format!("{}: {}", row.device, row.adapter))
    });
    let keys = drift.rows.first().map_or("post", |row| row.k_rope.as_str());
    let map = HeatMap {
        title: format!("Error of each layer by itself, {model}"),
        notes: [format!("{tokens} tokens, keys {keys}-RoPE"), device],
        figure: "relative L2 error".to_owned(),
        panels: vec![
            panel("K", &|row| row.k_error),
            panel("V", &|row| row.v_error),
            panel("attention", &|row| row.attention_error),
        ],
    };
    heat_map(&map, picture)
}

/// Memory against centred drift, a point a pair.
///
/// # Errors
/// As [`super::plot::drift_plot`].
pub fn drift_plot(drift: &TrainedDrift, model: &str, picture: Picture) -> Result<Vec<u8>> {
    // Without the reference, whose drift is 0.
    let rows = drift.rows.get(1..).unwrap_or(&[]);
    let spot = |row: &TrainedDriftRow| {
        let pair: Option<Pair> = row.pair.parse().ok();
        let sides = pair.map_or(Vec::new(), |pair| vec![("K", pair.k), ("V", pair.v)]);
        let left = row.tokens.saturating_sub(row.window.into());
        let waits = sides
            .into_iter()
            .filter(|(_, side)| side.waits(row.window) && left < u64::from(side.layout.token_group().max(1)));
        Spot {
            pair: row.pair.clone(),
            bits: row.bits_per_number,
            drift: row.logit_drift_centred,
            unpacked: waits.map(|(name, _)| name).collect(),
        }
    };
    let first = rows.first();
    let picture_of = Spots {
        title: "Centred logit drift against memory".to_owned(),
        settings: first.map_or("no pairs".to_owned(), |row| {
            format!(
                "{model} \u{b7} {} tokens \u{b7} {} \u{b7} keys {}-RoPE",
                row.tokens, row.mode, row.k_rope
            )
        }),
        device: first.map_or(String::new(), |row| format!("{}: {}", row.device, row.adapter)),
        spots: rows.iter().map(spot).collect(),
    };
    picture_of.drawn(picture)
}
