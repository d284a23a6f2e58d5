//! The tuner's report: what was found for each pair, as a table, JSON, and entries of the file that keeps it.

use std::io;

use serde::Serialize;

use super::json;
use super::table::{digits, plain, right_aligned};
use crate::bench::tune::{TuneOptions, TuneReport, TuneRow};
use crate::gpu::AdapterSummary;
use crate::tuning::Entry;
use crate::variant::{Arithmetic, Variant};

/// The version of what is written as JSON.
pub const SCHEMA: u32 = 1;

#[derive(Serialize)]
struct Document<'a> {
    schema: u32,
    adapter: &'a AdapterSummary,
    shape: String,
    work: String,
    context: u32,
    batch: u32,
    #[serde(flatten)]
    report: &'a TuneReport,
}

/// One object: adapter, shape, and each pair with every variant that was tried.
pub fn to_json(adapter: &AdapterSummary, options: &TuneOptions, report: &TuneReport) -> io::Result<Vec<u8>> {
    json::pretty(&Document {
        schema: SCHEMA,
        adapter,
        shape: options.shape.to_string(),
        work: options.work.to_string(),
        context: options.context,
        batch: options.batch,
        report,
    })
}

/// What the file keeps of a row.
pub fn entry(row: &TuneRow, options: &TuneOptions) -> Entry {
    Entry {
        pair: row.pair.clone(),
        ratio: row.shape.ratio,
        k_head_dim: row.shape.k_head_dim,
        v_head_dim: row.shape.v_head_dim,
        page_tokens: row.shape.page_tokens,
        prefill: row.shape.prefill,
        variant: row.best,
        seconds: row.best_seconds[1],
        default_seconds: row.default_seconds[1],
        context: options.context,
        batch: options.batch,
    }
}

/// The table, and what to make of it.
pub fn text(adapter: &AdapterSummary, options: &TuneOptions, report: &TuneReport) -> String {
    let mut text = format!(
        "adapter  {}\nmodel    {}; {} of {} tokens, batch {}\n\n",
        adapter.title(),
        options.shape,
        options.work,
        options.context,
        options.batch
    );
    let mut table = plain(&[
        "pair",
        "default ms",
        "best ms",
        "spread",
        "faster",
        "tried",
        "variant",
    ]);
    for row in &report.rows {
        let [low, best, high] = row.best_seconds.map(|seconds| seconds * 1e3);
        table.add_row([
            row.pair.clone(),
            digits(row.default_seconds[1] * 1e3),
            digits(best),
            format!("{}..{}", digits(low), digits(high)),
            match row.best == row.default {
                true => "-".to_owned(),
                false => format!("x{:.2}", row.default_seconds[1] / row.best_seconds[1]),
            },
            row.trials.len().to_string(),
            match row.best == row.default {
                true => "default".to_owned(),
                false => difference(row.default, row.best),
            },
        ]);
    }
    right_aligned(&mut table, 1..6);
    text += &table.trim_fmt();
    text += "\n- Times are medians for one layer; a variant counts as faster only beyond the spread of the default.\n";
    if report
        .rows
        .iter()
        .any(|row| row.best.arithmetic != Arithmetic::F32)
    {
        text += "- Scores in f16 or packed integers are less exact: `kvpack validate` and `kvpack drift` with this tuning show by \
                 how much.\n";
    }
    for row in &report.rows {
        let refused = row.trials.iter().filter(|trial| !trial.refused.is_empty());
        for trial in refused {
            text += &format!("- {}: the driver refused {}.\n", row.pair, trial.variant);
        }
    }
    for (pair, reason) in &report.left_out {
        text += &format!("- Left out: {pair}: {reason}.\n");
    }
    text
}

/// What a variant has other than another one.
fn difference(from: Variant, to: Variant) -> String {
    let numbers = [
        ("invocations", from.workgroup, to.workgroup),
        ("heads", from.head_tile, to.head_tile),
        ("queries", from.token_tile, to.token_tile),
        ("tokens each", 4 * from.slot_quads, 4 * to.slot_quads),
        ("channels each", 4 * from.channel_quads, 4 * to.channel_quads),
    ];
    let mut parts: Vec<String> = numbers
        .into_iter()
        .filter(|(_, from, to)| from != to)
        .map(|(what, _, to)| format!("{to} {what}"))
        .collect();
    if from.reduction != to.reduction {
        parts.push(format!("{:?} reduction", to.reduction).to_lowercase());
    }
    if from.arithmetic != to.arithmetic {
        parts.push(format!("{:?} scores", to.arithmetic).to_lowercase());
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tune::Trial;
    use crate::bench::{Sizes, Work};
    use crate::pages::PageLayout;
    use crate::tuning::{On, Shape, TuningFile};
    use crate::variant::Reduction;

    fn report() -> (TuneOptions, TuneReport) {
        let page = PageLayout::new("int4".parse().unwrap(), 8, 128, 64).unwrap();
        let default = Variant::new([&page, &page], 4, false, true);
        let best = Variant {
            workgroup: 64,
            slot_quads: 2,
            reduction: Reduction::Subgroup,
            ..default
        };
        let refused = Variant {
            head_tile: 1,
            ..default
        };
        let row = TuneRow {
            pair: "int4".to_owned(),
            shape: Shape::new([&page, &page], 4, false),
            default,
            default_seconds: [0.9e-3, 1.0e-3, 1.1e-3],
            best,
            best_seconds: [0.7e-3, 0.8e-3, 0.85e-3],
            trials: vec![
                Trial {
                    variant: best,
                    seconds: Some([0.7e-3, 0.8e-3, 0.85e-3]),
                    refused: String::new(),
                },
                Trial {
                    variant: refused,
                    seconds: None,
                    refused: "no".to_owned(),
                },
            ],
        };
        let options = TuneOptions {
            work: Work::Decode,
            pairs: vec!["int4".parse().unwrap()],
            shape: "llama-3-8b".parse().unwrap(),
            batch: 1,
            context: 4096,
            new_tokens: 1,
            sizes: Sizes {
                cache_bytes: 1,
                memory: 1,
            },
            seconds: 0.1,
            approximate: false,
        };
        let report = TuneReport {
            rows: vec![row],
            left_out: vec![("fp4".to_owned(), "why".to_owned())],
        };
        (options, report)
    }

    fn adapter() -> AdapterSummary {
        AdapterSummary {
            index: 0,
            name: "some".to_owned(),
            label: "some".to_owned(),
            device_type: "Cpu".to_owned(),
            software: true,
            backend: "vulkan".to_owned(),
            driver: "driver".to_owned(),
            driver_info: "1".to_owned(),
            limits: Vec::new(),
            features: Vec::new(),
        }
    }

    #[test]
    fn the_text_says_what_differs_what_was_refused_and_what_was_left_out() {
        let (options, report) = report();
        let text = text(&adapter(), &options, &report);
        for words in [
            "| int4 |",
            "x1.25",
            "64 invocations, 8 tokens each, subgroup reduction",
            "the driver refused",
            "Left out: fp4: why.",
        ] {
            assert!(text.contains(words), "{words} in\n{text}");
        }
        assert!(!text.contains("less exact"));
    }

    #[test]
    fn what_is_kept_comes_back_on_the_same_driver_alone() {
        let (options, report) = report();
        let on = adapter().on();
        let mut file = TuningFile::default();
        file.insert(&on, entry(&report.rows[0], &options));
        // The same shape again, and another one.
        let mut other = entry(&report.rows[0], &options);
        file.insert(&on, other.clone());
        other.pair = "int8".to_owned();
        file.insert(&on, other);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tuning.json");
        assert!(
            TuningFile::read(&path).unwrap().tuning(&on).unwrap().is_empty(),
            "no file yet"
        );
        std::fs::write(&path, file.text()).unwrap();
        let read = TuningFile::read(&path).unwrap();
        assert_eq!(read, file);
        let tuning = read.tuning(&on).unwrap();
        assert_eq!(tuning.len(), 2);
        assert_eq!(tuning.get(&report.rows[0].shape), Some(report.rows[0].best));
        let newer = On {
            driver: "driver 2".to_owned(),
            ..on
        };
        assert!(read.tuning(&newer).unwrap().is_empty());

        // What is no such file, or holds what cannot be, is refused with its name.
        let text = file.text();
        for bad in [
            String::new(),
            text[..text.len() / 2].to_owned(),
            text.replace("\"version\": 1", "\"version\": 2"),
            text.replace("\"workgroup\": 64", "\"workgroup\": 0"),
            text.replace("\"workgroup\": 64", "\"workgroup\": 4294967295"),
            text.replace("\"slot_quads\": 2", "\"slot_quads\": 3"),
            text.replace("\"head_tile\": 4", "\"head_tile\": 4000000000"),
            text.replace("\"pair\": \"int4\"", "\"pair\": \"int5\""),
            text.replace("\"k_head_dim\": 128", "\"k_head_dim\": 7"),
            text.replace("\"subgroup\"", "\"magic\""),
        ] {
            assert_ne!(bad, text);
            std::fs::write(&path, bad).unwrap();
            let refused = TuningFile::read(&path).unwrap_err().to_string();
            assert!(
                refused.contains("tuning.json") && refused.contains("kvpack tune"),
                "{refused}"
            );
        }
    }
}
