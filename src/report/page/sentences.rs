//! What happened to a format, in plain words, from the run's own numbers.

use crate::drift::{DriftRow, TrainedDriftRow};
use crate::formats::Element;
use crate::pages::PageLayout;
use crate::recording::{Flip, Loss, NEVER, RecordedRun, Recording, StoredSide};
use crate::report::table::{digits, trimmed};
use crate::scales::{BLOCK_CHANNELS, ScaleLayout};

/// The figures of a table's row that are put into words.
#[derive(Debug, Clone)]
pub(super) struct Figures {
    pub pair: String,
    bits: f64,
    percent: f64,
    drift: f64,
    top1: u64,
    predictions: u64,
}

impl From<&DriftRow> for Figures {
    fn from(row: &DriftRow) -> Figures {
        Figures {
            pair: row.pair.clone(),
            bits: row.bits_per_number,
            percent: row.percent_of_f16,
            drift: row.logit_drift,
            top1: row.top1,
            predictions: row.predictions,
        }
    }
}

impl From<&TrainedDriftRow> for Figures {
    fn from(row: &TrainedDriftRow) -> Figures {
        Figures {
            pair: row.pair.clone(),
            bits: row.bits_per_number,
            percent: row.percent_of_f16,
            drift: row.logit_drift,
            top1: row.top1,
            predictions: row.predictions,
        }
    }
}

/// Two or three sentences on a format: how it stores, what packing lost and where, which predictions changed.
pub(super) fn of(figures: &Figures, run: &RecordedRun, recording: &Recording) -> Vec<String> {
    let mut sentences = vec![stores(figures, run)];
    sentences.extend(lost(run, recording));
    sentences.push(changed(figures, run, recording));
    sentences
}

fn sides(run: &RecordedRun) -> impl Iterator<Item = &[StoredSide; 2]> {
    run.prompts.iter().flat_map(|prompt| &prompt.layers)
}

fn stores(figures: &Figures, run: &RecordedRun) -> String {
    let [bits, percent] = [trimmed(figures.bits, 4), trimmed(figures.percent, 1)];
    let cost = format!("{bits} bits a number, {percent}{PERCENT} of FP16");
    let Some([k, v]) = sides(run).next() else {
        return format!("{cost}.");
    };
    let [k, v] = [&k.packed, &v.packed];
    if k.side == v.side {
        format!(
            "Keys and values are {}: {cost}.",
            stored_as(k, "one scale for the keys and one for the values of a layer")
        )
    } else {
        let [k, v] = [(k, "keys"), (v, "values")]
            .map(|(page, name)| stored_as(page, &format!("one scale for all {name} of a layer")));
        format!("Keys are {k}; values are {v}: {cost}.")
    }
}

/// How a side is stored; `per_tensor` says of what a per-tensor scale is.
fn stored_as(page: &PageLayout, per_tensor: &str) -> String {
    let element = match page.side.element {
        Element::F32 => return "32-bit floats, as computed".to_owned(),
        Element::F16 => return "16-bit floats, half of what they were computed in".to_owned(),
        Element::E4m3 => "8-bit floats (E4M3)",
        Element::E2m1 => "4-bit floats (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives)",
        Element::Int8 => "whole numbers from \u{2212}127 to 127",
        Element::Int4 => "whole numbers from \u{2212}7 to 7",
        Element::Int2 => "\u{2212}1, 0 or 1",
    };
    let scale = match page.side.layout {
        ScaleLayout::None => String::new(),
        ScaleLayout::PerTensor => per_tensor.to_owned(),
        ScaleLayout::PerToken => "a scale for each token and head".to_owned(),
        ScaleLayout::PerBlock => format!("a scale for every {BLOCK_CHANNELS} channels of a token"),
        ScaleLayout::PerChannel { group } => format!("a scale for each channel over {group} tokens"),
    };
    format!("{element}, with {scale}")
}

/// The sign on the line of its number.
const PERCENT: &str = "\u{a0}%";

/// A share as a percentage that is never rounded to 0 or 100 unless it is that.
fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent == 0.0 {
        format!("0{PERCENT}")
    } else if percent < 0.1 {
        format!("less than 0.1{PERCENT}")
    } else if percent < 9.95 {
        format!("{percent:.1}{PERCENT}")
    } else if percent < 99.5 || percent == 100.0 {
        format!("{percent:.0}{PERCENT}")
    } else {
        format!("{percent:.2}{PERCENT}")
    }
}

/// What packing did to small numbers, and where most.
fn lost(run: &RecordedRun, recording: &Recording) -> Vec<String> {
    let shown = &recording.shown;
    let mut by_place: Vec<([usize; 3], Loss)> = Vec::new();
    for prompt in &run.prompts {
        for (l, layer) in prompt.layers.iter().enumerate() {
            for (s, side) in layer.iter().enumerate() {
                for (h, &loss) in side.losses.iter().enumerate() {
                    match by_place.iter_mut().find(|(place, _)| *place == [s, l, h]) {
                        Some((_, sum)) => *sum = sum.plus(loss),
                        None => by_place.push(([s, l, h], loss)),
                    }
                }
            }
        }
    }
    let total = |s: usize| {
        let of_side = by_place.iter().filter(|(place, _)| place[0] == s);
        of_side.fold(Loss::default(), |sum, (_, loss)| sum.plus(*loss))
    };
    let names = ["keys", "values"];
    let (packed, waiting): (Vec<usize>, Vec<usize>) = (0..2).partition(|&s| total(s).numbers > 0);
    let mut sentences = Vec::new();
    let shares: Vec<_> = packed
        .iter()
        .map(|&s| (s, total(s)))
        .filter(|(_, t)| t.zeroed > 0)
        .collect();
    let errors: Vec<_> = packed
        .iter()
        .map(|&s| format!("{} by {}", names[s], percent(total(s).relative_error())))
        .collect();
    let of_rows = match recording.prompts.iter().map(Vec::len).sum::<usize>()
        > shown.tokens.iter().map(Vec::len).sum::<usize>()
    {
        true => ", of the rows shown here",
        false => "",
    };
    if !packed.is_empty() && packed.iter().all(|&s| total(s).error == 0.0) {
        sentences.push(format!(
            "Nothing is lost: what is read back is what was computed{of_rows}."
        ));
    } else if shares.is_empty() && !packed.is_empty() {
        sentences.push(format!(
            "No number that was not 0 became 0; what is read back is off by little: {}{of_rows}.",
            errors.join(", ")
        ));
    } else if !shares.is_empty() {
        let parts: Vec<_> = shares
            .iter()
            .map(|(s, loss)| format!("{} of the {}", percent(loss.zeroed_share()), names[*s]))
            .collect();
        let worst = by_place
            .iter()
            .max_by(|a, b| a.1.zeroed_share().total_cmp(&b.1.zeroed_share()));
        let place = worst.map_or(String::new(), |([s, l, h], loss)| {
            let (layer, head) = (shown.layers[*l], shown.heads[*h]);
            format!(
                "; the {} of layer {layer}, head {head} lost most, {}",
                names[*s],
                percent(loss.zeroed_share())
            )
        });
        let most = shares
            .iter()
            .map(|(_, loss)| loss.zeroed_share())
            .fold(0.0, f64::max);
        let how = match most {
            ..0.02 => "A few small numbers vanish",
            ..0.3 => "Small numbers vanish",
            _ => "Many numbers vanish",
        };
        sentences.push(format!(
            "{how}: {} that were not 0 read back as 0{of_rows}{place}.",
            parts.join(" and ")
        ));
    }
    for s in waiting {
        let never = sides(run).all(|layer| layer[s].packed_at.iter().all(|&at| at == NEVER));
        if never && !packed.is_empty() || packed.is_empty() {
            sentences.push(format!(
                "The {} were never packed: no group of theirs was full, so they stayed in 16 bits.",
                names[s]
            ));
        }
    }
    sentences
}

/// Which predictions changed, and by what margin.
fn changed(figures: &Figures, run: &RecordedRun, recording: &Recording) -> String {
    let (changed, of) = (
        figures.predictions - figures.top1.min(figures.predictions),
        figures.predictions,
    );
    let drift = match figures.drift == 0.0 {
        true => "logits do not drift".to_owned(),
        false => format!("logits drift by {}", percent(figures.drift)),
    };
    let flips = run.prompts.iter().enumerate();
    let flips = flips.flat_map(|(p, prompt)| prompt.flips.iter().map(move |flip| (p, flip)));
    let widest = flips.max_by(|a, b| a.1.reference_margin.total_cmp(&b.1.reference_margin));
    let Some((prompt, flip)) = widest else {
        return match of {
            1 => format!("The one prediction is that of the full-precision cache; {drift}."),
            _ => format!("All {of} predictions are those of the full-precision cache; {drift}."),
        };
    };
    let Flip {
        position,
        from,
        to,
        reference_margin,
        margin,
    } = *flip;
    // Spaces as the player shows them.
    let text = |id: u32| {
        let text = recording.texts.get(&id).map_or("", String::as_str);
        text.replace(' ', "\u{2423}")
    };
    let before: String = recording.prompts[prompt]
        .iter()
        .take(position as usize + 1)
        .map(|&id| text(id))
        .collect();
    let before: Vec<char> = before.chars().collect();
    let tail: String = before[before.len().saturating_sub(16)..].iter().collect();
    let cut = if before.len() > 16 { "\u{2026}" } else { "" };
    let [from, to] = [from, to].map(text);
    format!(
        "{changed} of {of} predictions changed; {drift}. {} \u{201c}{cut}{tail}\u{201d} the full-precision cache prefers \u{201c}{from}\u{201d} to \
         \u{201c}{to}\u{201d} by {} logits, this format \u{201c}{to}\u{201d} by {}.",
        if changed == 1 {
            "After"
        } else {
            "The change with the largest margin: after"
        },
        digits(reference_margin),
        digits(margin)
    )
}
