//! Tables as plain text: pipes and dashes, so that a terminal, a log and a Markdown page show the same.

use comfy_table::{CellAlignment, Table, presets};

use super::{Unpacked, never_packed};
use crate::capacity::CapacityRow;
use crate::drift::DriftRow;
use crate::formats::Element;
use crate::gpu::AdapterSummary;
use crate::scales::{ScaleLayout, ScaleType};
use crate::spec::{Pair, Side};
use crate::validate::ValidateRow;

/// The drift table with a line on what was measured above it and notes on the figures below.
pub fn drift(rows: &[DriftRow], software: bool) -> String {
    let mut table = plain(&[
        "pair",
        "bits",
        "% of FP16",
        "logit drift",
        "centred",
        "top-1",
        "mean KL",
        "max diff",
        "cache bytes",
        "allocated",
    ]);
    for row in rows {
        table.add_row([
            row.pair.clone(),
            trimmed(row.bits_per_number, 4),
            format!("{:.1}", row.percent_of_f16),
            digits(row.logit_drift),
            digits(row.logit_drift_centred),
            format!("{}/{}", row.top1, row.predictions),
            digits(row.mean_kl),
            digits(row.max_abs_diff),
            row.cache_bytes.to_string(),
            row.allocated_bytes.to_string(),
        ]);
    }
    right_aligned(&mut table, 1..10);
    let mut text = String::new();
    if let Some(row) = rows.first() {
        text += &format!(
            "Convention {}, {}, window {}, outlier {}; ",
            row.convention,
            row.mode,
            row.window,
            super::factor(row.outlier)
        );
        text += &format!("{}: {}\n\n", row.device, row.adapter);
    }
    text += &table.trim_fmt();
    text.push('\n');
    let notes = notes(rows, software);
    if !notes.is_empty() {
        text.push('\n');
    }
    for note in notes {
        text += &format!("- {note}\n");
    }
    text
}

fn notes(rows: &[DriftRow], software: bool) -> Vec<String> {
    let pairs: Vec<Pair> = rows.iter().filter_map(|row| row.pair.parse().ok()).collect();
    let any = |fits: &dyn Fn(Side) -> bool| pairs.iter().any(|pair| fits(pair.k) || fits(pair.v));
    let published = rows.iter().any(|row| row.convention == "published");
    let pair = |name: &str| rows.iter().any(|row| row.pair == name);
    let mut notes = vec![
        "bits: true cost of one number, scales included.".to_owned(),
        "cache bytes: whole pages in use at the end of one prompt, unused slots and padding too.".to_owned(),
        "allocated: all pages that were made, those in which tokens waited too.".to_owned(),
    ];
    let cheaper: Vec<_> = [("int4c/int4", "5.25", "6"), ("int2c/int2", "3.25", "4")]
        .into_iter()
        .filter(|&(name, _, _)| pair(name))
        .map(|(name, cost, printed)| format!("{name} {cost} (not {printed})"))
        .collect();
    if !cheaper.is_empty() {
        let pairs = cheaper.join(", ");
        notes.push(format!(
            "Per-channel scales cost less than the published table printed: {pairs}."
        ));
    }
    if any(&|side| side.element == Element::Int2) {
        notes.push("int2 is ternary: its codes are -1, 0 and 1.".to_owned());
    }
    if any(&|side| side.layout == ScaleLayout::PerTensor) {
        let how = if published {
            "taken from each prompt"
        } else {
            "calibrated on the f32 run of these prompts"
        };
        notes.push(format!("fp8 scales are {how} (amax / 448 per layer and side)."));
    }
    if published && any(&|side| side.scale == ScaleType::F16 && side.layout.has_plane()) {
        let what = "the scales of int8, int4 and int2 as f32";
        notes.push(format!(
            "Convention published stores {what}: bits counts 16 bits of each, cache bytes 32."
        ));
    }
    if let Some(row) = rows.iter().find(|row| row.window > 0) {
        let window = row.window;
        notes.push(if any(&|side| side.waits(window)) {
            let counted = "bits leaves them out, cache bytes counts them";
            format!("The last {window} tokens of what is quantised stay in f16: {counted}.")
        } else {
            format!("Window {window} changes nothing here: f16 and f32 have none.")
        });
    }
    for row in rows {
        for Unpacked { side, group, prompt } in never_packed(row) {
            let how = match row.window {
                0 => format!("a prompt of {prompt} tokens has no full group of {group}"),
                window if window >= prompt => {
                    format!("the window of {window} tokens covers the whole prompt of {prompt}")
                }
                window => {
                    let left = prompt - window;
                    format!("outside the window are {left} tokens, no full group of {group}")
                }
            };
            notes.push(format!("{}: {side} stayed in full precision: {how}.", row.pair));
        }
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

/// The memory of a model's cache by format, and below it what fits the budget, if one was given.
pub fn capacity(rows: &[CapacityRow]) -> String {
    let Some(first) = rows.first() else {
        return String::new();
    };
    let mut table = plain(&[
        "pair",
        "bits",
        "bytes/token",
        "codes + scales + padding",
        "a sequence",
        "staging",
        "total",
        "% of FP16",
    ]);
    for row in rows {
        let parts = [row.page_code_bytes, row.page_scale_bytes, row.page_padding_bytes];
        let parts = parts.map(|bytes| trimmed(bytes as f64 / f64::from(row.page_tokens), 2));
        table.add_row([
            row.pair.clone(),
            trimmed(row.bits_per_number, 4),
            trimmed(row.bytes_per_token, 2),
            parts.join(" + "),
            size(row.sequence_bytes),
            size(row.staging_bytes),
            size(row.total_bytes),
            format!("{:.1}", row.percent_of_f16),
        ]);
    }
    right_aligned(&mut table, 1..8);
    let (k, v) = (first.k_head_dim, first.v_head_dim);
    let head_dim = if k == v {
        k.to_string()
    } else {
        format!("{k} (K) and {v} (V)")
    };
    let (context, batch) = (first.context, first.batch);
    let mut text = format!(
        "{}, {} of {head_dim}; context {context}, batch {batch}; pages of {} tokens, window {}, sink tokens {}; computed, not \
         measured\n\n{}\n",
        counted(first.layers, "layer"),
        counted(first.kv_heads, "KV head"),
        page_tokens(rows),
        first.window,
        first.sink_tokens,
        table.trim_fmt()
    );
    if let Some(budget) = first.budget_bytes {
        text += &format!(
            "\nWithin {} ({budget} bytes):\n\n{}\n",
            size(budget),
            fitting(rows).trim_fmt()
        );
    }
    text.push('\n');
    for note in capacity_notes(rows) {
        text += &format!("- {note}\n");
    }
    text
}

fn counted(count: u32, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Tokens of a page, which some pairs have more of than others.
fn page_tokens(rows: &[CapacityRow]) -> String {
    let tokens = || rows.iter().map(|row| row.page_tokens);
    match (tokens().min(), tokens().max()) {
        (Some(least), Some(most)) if least < most => format!("{least} to {most}"),
        (least, _) => least.unwrap_or(0).to_string(),
    }
}

fn fitting(rows: &[CapacityRow]) -> Table {
    let (context, batch) = rows.first().map_or((0, 0), |row| (row.context, row.batch));
    let mut table = plain(&[
        "pair",
        &format!("longest context at batch {batch}"),
        &format!("largest batch at context {context}"),
    ]);
    for row in rows {
        let cells = [row.longest_context, row.largest_batch].map(|n| n.unwrap_or(0).to_string());
        table.add_row([vec![row.pair.clone()], cells.to_vec()].concat());
    }
    right_aligned(&mut table, 1..3);
    table
}

fn capacity_notes(rows: &[CapacityRow]) -> Vec<String> {
    let mut notes = vec![
        "bits: true cost of one number, scales included.".to_owned(),
        "bytes/token: packed pages of all layers, K and V; every layer keeps every token.".to_owned(),
        "total: the budget that serves the batch at this context: whole packed pages, and those in f16 beside them."
            .to_owned(),
    ];
    if rows.iter().any(|row| row.sequence_bytes + row.staging_bytes > 0) {
        let what =
            "f16 pages of a sequence's waiting and sink tokens, at most; staging: once for all sequences";
        notes.push(format!("a sequence: {what}."));
    }
    for row in rows.iter().filter(|row| row.longest_context == Some(0)) {
        notes.push(format!(
            "{}: the budget holds less than a page for each sequence.",
            row.pair
        ));
    }
    notes
}

/// The widths of the validation report's columns: its lines are printed one by one as kernels finish.
const VALIDATE: [usize; 7] = [20, 24, 9, 10, 23, 9, 6];

/// The head of the validation report.
pub fn validate_head() -> String {
    let names = [
        "kernel",
        "format",
        "cases",
        "mismatches",
        "error / bound",
        "ms",
        "result",
    ];
    let dashes: Vec<_> = VALIDATE.iter().map(|&width| "-".repeat(width)).collect();
    line(&names.map(str::to_owned)) + &format!("|-{}-|\n", dashes.join("-|-"))
}

/// A line of the validation report, and below it what failed.
pub fn validate_line(row: &ValidateRow) -> String {
    let error = match (row.max_error, row.bound) {
        (Some(error), Some(bound)) => format!("{error:.2e} / {bound:.2e}"),
        _ => "bits".to_owned(),
    };
    let mut text = line(&[
        row.kernel.clone(),
        row.format.clone(),
        row.cases.to_string(),
        row.bit_mismatches.to_string(),
        error,
        format!("{:.1}", row.milliseconds),
        if row.passed { "pass" } else { "FAIL" }.to_owned(),
    ]);
    if !row.passed && !row.detail.is_empty() {
        text += &format!("  FAIL {} {}: {}\n", row.kernel, row.format, row.detail);
    }
    text
}

/// The last line of the validation report.
pub fn validate_summary(rows: &[ValidateRow]) -> String {
    let failed = rows.iter().filter(|row| !row.passed).count();
    let cases: u64 = rows.iter().map(|row| row.cases).sum();
    let adapter = rows.first().map_or("", |row| row.adapter.as_str());
    let passed = rows.len() - failed;
    format!("{passed} checks passed, {failed} failed; {cases} cases in all; adapter: {adapter}\n")
}

fn line(cells: &[String; 7]) -> String {
    let padded: Vec<_> = cells
        .iter()
        .zip(VALIDATE)
        .enumerate()
        .map(|(i, (cell, width))| {
            if (2..6).contains(&i) {
                format!("{cell:>width$}")
            } else {
                format!("{cell:<width$}")
            }
        })
        .collect();
    format!("| {} |\n", padded.join(" | "))
}

/// The adapters, and below them what each allows and offers.
pub fn adapters(adapters: &[AdapterSummary]) -> String {
    let mut table = plain(&["#", "name", "type", "backend", "driver"]);
    for adapter in adapters {
        let kind = if adapter.software {
            "software (runs on the CPU)"
        } else {
            kind(&adapter.device_type)
        };
        let driver = format!("{} {}", adapter.driver, adapter.driver_info);
        table.add_row([
            adapter.index.to_string(),
            adapter.label.clone(),
            kind.to_owned(),
            adapter.backend.clone(),
            driver.trim().to_owned(),
        ]);
    }
    let mut text = table.trim_fmt() + "\n";
    for adapter in adapters {
        text += &format!("\n{}: {}\n", adapter.index, adapter.label);
        let widest = adapter
            .limits
            .iter()
            .map(|(name, _)| name.len())
            .max()
            .unwrap_or(0);
        text += "  limits\n";
        for (name, value) in &adapter.limits {
            text += &format!("    {name:<widest$}  {value}\n");
        }
        let features = if adapter.features.is_empty() {
            "none".to_owned()
        } else {
            adapter.features.join(", ")
        };
        text += &format!("  features\n    {features}\n");
    }
    text
}

fn kind(device_type: &str) -> &str {
    match device_type {
        "DiscreteGpu" => "discrete GPU",
        "IntegratedGpu" => "integrated GPU",
        "VirtualGpu" => "virtual GPU",
        "Cpu" => "CPU",
        _ => "other",
    }
}

pub(super) fn plain(header: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::ASCII_MARKDOWN)
        .set_header(header.to_vec());
    table
}

pub(super) fn right_aligned(table: &mut Table, columns: std::ops::Range<usize>) {
    for index in columns {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

/// Four significant digits without trailing zeros, as the published table prints them: 0.000106, 0.01259, 0.0417.
pub fn digits(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    let rounded = format!("{value:.3e}");
    let exponent = rounded
        .split_once('e')
        .and_then(|(_, exponent)| exponent.parse::<i32>().ok());
    match exponent {
        Some(exponent @ -5..4) => trimmed(value, (3 - exponent) as usize),
        _ => rounded,
    }
}

/// Bytes in the largest binary unit of which there is one, with four significant digits.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = bytes.checked_ilog2().unwrap_or(0) / 10;
    let value = bytes as f64 / 1024_f64.powi(power as i32);
    format!("{} {}", digits(value), UNITS[power as usize])
}

/// At most so many digits after the point, without trailing zeros.
pub(super) fn trimmed(value: f64, most: usize) -> String {
    let text = format!("{value:.most$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::examples;

    #[test]
    fn digits_are_those_of_the_published_table() {
        for (value, printed) in [
            (0.000106, "0.000106"),
            (0.0125899, "0.01259"),
            (0.00202619, "0.002026"),
            (0.0450404, "0.04504"),
            (0.0438311, "0.04383"),
            (0.0417008, "0.0417"),
            (0.266672, "0.2667"),
            (0.274407, "0.2744"),
            (0.0, "0"),
            (1.0, "1"),
            (0.99996, "1"),
            (0.0099999, "0.01"),
            (12.3456, "12.35"),
            (1234.5, "1234"),
            (123456.0, "1.235e5"),
            (1.23456e-7, "1.235e-7"),
            (0.0000123456, "0.00001235"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(digits(value), printed);
        }
    }

    #[test]
    fn ben_09_the_table_shows_true_costs_and_says_where_they_differ() {
        let text = drift(&examples::published(), true);
        let row = |pair: &str| {
            let line = text
                .lines()
                .find(|line| line.starts_with(&format!("| {pair} ")))
                .expect(pair);
            line.split('|')
                .map(|cell| cell.trim().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(row("int4c/int4")[2..5], ["5.25", "32.8", "0.0417"]);
        assert_eq!(row("int4")[2..5], ["6", "37.5", "0.04383"]);
        assert_eq!(row("fp4")[2..5], ["4.5", "28.1", "0.04504"]);
        assert_eq!(row("f16")[6], "127/128");
        assert!(text.contains("int4c/int4 5.25 (not 6), int2c/int2 3.25 (not 4)"));
        for note in [
            "ternary",
            "int4 and int2 as f32",
            "fp8 scales are taken from each prompt",
            "software driver",
        ] {
            assert!(text.contains(note), "{note}");
        }
        assert!(
            text.is_ascii() && text.lines().all(|line| line.len() <= 120),
            "{text}"
        );
    }

    #[test]
    fn notes_are_only_those_that_apply() {
        let mut rows = vec![examples::row("f16", 16.0, 1e-4)];
        assert_eq!(notes(&rows, false).len(), ALWAYS);
        rows[0].saturated = 7;
        assert!(notes(&rows, false)[ALWAYS].contains("f16: 7 inputs"));
    }

    /// The notes that every table has.
    const ALWAYS: usize = 3;

    /// The notes on rows of these pairs beyond those.
    fn notes_on(pairs: &[&str], convention: &str, window: u32) -> Vec<String> {
        let rows: Vec<_> = pairs
            .iter()
            .map(|pair| DriftRow {
                convention: convention.to_owned(),
                window,
                ..examples::row(pair, 4.0, 1e-4)
            })
            .collect();
        notes(&rows, false).split_off(ALWAYS)
    }

    #[test]
    fn a_window_is_said_to_hold_only_what_it_holds() {
        let only = |pairs: &[&str], window, said: &[&str]| {
            let notes = notes_on(pairs, "packed", window);
            assert_eq!(notes.len(), said.len(), "{notes:?}");
            for (note, said) in notes.iter().zip(said) {
                assert!(note.contains(said), "{note}");
            }
        };
        only(&["f32"], 8, &["Window 8 changes nothing here"]);
        only(&["f16", "f32"], 8, &["Window 8 changes nothing here"]);
        only(
            &["f16", "int8"],
            8,
            &["The last 8 tokens of what is quantised stay in f16"],
        );
        only(&["f16/int4"], 8, &["The last 8 tokens of what is quantised"]);
        only(
            &["int4c(64)/int4"],
            0,
            &["int4c(64)/int4: K stayed in full precision: a prompt of 32 tokens has no full group of 64"],
        );
        only(
            &["int4"],
            40,
            &[
                "The last 40 tokens",
                "K stayed in full precision: the window of 40 tokens covers the whole prompt of 32",
                "V stayed in full precision: the window of 40",
            ],
        );
        only(
            &["int4c(16)/int4"],
            20,
            &[
                "The last 20",
                "K stayed in full precision: outside the window are 12 tokens, no full group of 16",
            ],
        );
    }

    #[test]
    fn the_note_on_f32_scales_is_on_pairs_whose_scales_became_f32() {
        assert_eq!(notes_on(&["f16", "fp4", "f32"], "published", 0), [""; 0]);
        assert_eq!(notes_on(&["int8"], "packed", 0), [""; 0]);
        for pair in ["int8", "f16/int4c"] {
            let notes = notes_on(&[pair], "published", 0);
            assert!(
                notes.len() == 1 && notes[0].contains("as f32: bits counts 16"),
                "{notes:?}"
            );
        }
    }

    #[test]
    fn the_origin_of_fp8_scales_is_said() {
        for (convention, origin) in [
            (
                "packed",
                "fp8 scales are calibrated on the f32 run of these prompts (amax / 448",
            ),
            ("published", "fp8 scales are taken from each prompt (amax / 448"),
        ] {
            let notes = notes_on(&["f16/fp8"], convention, 0);
            assert!(notes.len() == 1 && notes[0].starts_with(origin), "{notes:?}");
        }
    }

    #[test]
    fn a_factor_of_many_digits_is_short() {
        for (outlier, printed) in [
            (1.0, "outlier 1;"),
            (32.5, "outlier 32.5;"),
            (1e-320, "outlier 1e-320;"),
        ] {
            let row = DriftRow {
                outlier,
                ..examples::row("f16", 16.0, 1e-4)
            };
            let text = drift(&[row], false);
            assert!(text.contains(printed), "{text}");
        }
    }

    #[test]
    fn sizes_have_four_digits_and_a_unit() {
        for (bytes, printed) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1 << 20, "1 MiB"),
            (4_362_076_160, "4.062 GiB"),
            ((1 << 40) - 1, "1024 GiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(size(bytes), printed);
        }
    }

    #[test]
    fn a_plan_says_what_it_is_for_and_the_budget_only_where_there_is_one() {
        let text = capacity(&[examples::capacity(None)]);
        for words in [
            "1 layer, 8 KV heads of 192 (K) and 128 (V); context 100, batch 2; pages of 64 tokens",
            "computed, not measured",
            " 4096 + 0.5 + 0 |",
            " 1.25 MiB |",
        ] {
            assert!(text.contains(words), "{words} is not in: {text}");
        }
        assert!(
            !text.contains("Within") && !text.contains("a sequence:"),
            "{text}"
        );
        let mut rows = [examples::capacity(Some(0)), examples::capacity(Some(256))];
        rows[0].sequence_bytes = 1;
        rows[1].page_tokens = 128;
        let text = capacity(&rows);
        for words in [
            "pages of 64 to 128 tokens",
            "Within 1 KiB (1024 bytes):",
            "longest context at batch 2 | largest batch at context 100",
            "- a sequence: ",
            "- int4: the budget holds less than a page for each sequence.",
        ] {
            assert!(text.contains(words), "{words} is not in: {text}");
        }
        assert_eq!(text.matches("less than a page").count(), 1);
        assert_eq!(capacity(&[]), "");
    }

    #[test]
    fn a_failed_check_is_seen() {
        let row = |passed: bool, max_error: Option<f64>| ValidateRow {
            kernel: "attention_split".to_owned(),
            format: "int4c(32)/int4".to_owned(),
            cases: 1_000_000,
            bit_mismatches: 0,
            worst_share_of_bound: max_error,
            max_error,
            bound: max_error.map(|_| 1e-5),
            milliseconds: 12.345,
            passed,
            detail: if passed {
                String::new()
            } else {
                "case 3, head 1".to_owned()
            },
            adapter: "a GPU".to_owned(),
        };
        let rows = [row(true, None), row(false, Some(f64::NAN))];
        let (pass, fail) = (validate_line(&rows[0]), validate_line(&rows[1]));
        assert!(
            pass.contains("pass") && !pass.contains("FAIL") && pass.contains("| 12.3")
                || pass.contains(" 12.3")
        );
        assert!(fail.contains("| FAIL") && fail.contains("NaN / 1.00e-5") && fail.contains("case 3, head 1"));
        let lengths: Vec<_> = (validate_head() + &pass).lines().map(str::len).collect();
        assert!(lengths.iter().all(|&length| length == lengths[0]), "{lengths:?}");
        assert!(
            validate_summary(&rows)
                .starts_with("1 checks passed, 1 failed; 2000000 cases in all; adapter: a GPU")
        );
    }

    #[test]
    fn adapters_show_type_driver_limits_and_features_and_software_is_named_as_such() {
        let gpu = examples::adapter();
        let software = AdapterSummary {
            index: 2,
            software: true,
            device_type: "Cpu".to_owned(),
            ..gpu.clone()
        };
        let text = adapters(&[gpu, software]);
        for words in [
            "| 1 | A GPU #2 | integrated GPU",
            "software (runs on the CPU)",
            "a driver 1.2.3",
            "shader-f16, subgroups",
        ] {
            assert!(text.contains(words), "{words} is not in: {text}");
        }
        assert!(
            text.contains("maxBufferSize                    1099511627776"),
            "{text}"
        );
    }
}
