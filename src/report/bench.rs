//! The benchmark's report: table, notes, advice in plain words, JSON, and what moved against an earlier run.

use std::io;

use serde::{Deserialize, Serialize};

use super::table::{digits, plain, right_aligned};
use super::{csv, json, never_packed};
use crate::bench::roof::RoofRow;
use crate::bench::timer::Clock;
use crate::bench::{BenchHeader, BenchReport, BenchRow, LeftOut, SCHEMA, Work};
use crate::drift::DriftRow;
use crate::error::{Error, Result};

#[derive(Serialize)]
struct Document<'a> {
    schema: u32,
    header: &'a BenchHeader,
    roofs: &'a [RoofRow],
    rows: Vec<RowWithSamples<'a>>,
    left_out: &'a [LeftOut],
}

#[derive(Serialize)]
struct RowWithSamples<'a> {
    #[serde(flatten)]
    row: &'a BenchRow,
    samples: &'a [f64],
}

/// One object: schema version, header, roofs, rows with every sample, and what was left out.
pub fn to_json(report: &BenchReport) -> io::Result<Vec<u8>> {
    let rows = report.rows.iter().map(|row| RowWithSamples {
        row,
        samples: &row.samples,
    });
    json::pretty(&Document {
        schema: SCHEMA,
        header: &report.header,
        roofs: &report.roofs,
        rows: rows.collect(),
        left_out: &report.left_out,
    })
}

/// A line a row, without samples.
pub fn to_csv(report: &BenchReport) -> io::Result<Vec<u8>> {
    csv::to_bytes(&report.rows)
}

/// What an earlier run's JSON says, as far as it is compared with.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Baseline {
    schema: u32,
    header: BaselineHeader,
    rows: Vec<BaselineRow>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
struct BaselineHeader {
    adapter: String,
    driver: String,
    timing: String,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
struct BaselineRow {
    work: Work,
    pair: String,
    context: u32,
    batch: u32,
    new_tokens: u32,
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    seconds: f64,
    seconds_low: f64,
    seconds_high: f64,
}

impl Baseline {
    /// Reads an earlier run's JSON; `name` is what an error calls it.
    ///
    /// # Errors
    /// [`Error::Usage`] for anything else.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Baseline> {
        let refuse = |reason: String| Error::Usage {
            asked: format!("baseline `{name}`"),
            reason,
            advice: "name a file that `kvpack bench --json` of this version wrote".to_owned(),
        };
        let baseline: Baseline = serde_json::from_slice(bytes).map_err(|e| refuse(e.to_string()))?;
        if baseline.schema != SCHEMA {
            return Err(refuse(format!(
                "its schema is {}, this is {SCHEMA}",
                baseline.schema
            )));
        }
        Ok(baseline)
    }

    /// How a row's time compares, in words: only what lies beyond the spread of both has moved.
    fn moved(&self, row: &BenchRow) -> String {
        let same = |old: &&BaselineRow| {
            (old.work, &old.pair, old.context, old.batch) == (row.work, &row.pair, row.context, row.batch)
                && (old.new_tokens, old.q_heads, old.kv_heads, old.head_dim)
                    == (row.new_tokens, row.q_heads, row.kv_heads, row.head_dim)
        };
        let Some(old) = self.rows.iter().find(same) else {
            return "new".to_owned();
        };
        let factor = row.seconds / old.seconds;
        if row.seconds_low > old.seconds_high {
            format!("SLOWER x{factor:.2}")
        } else if row.seconds_high < old.seconds_low {
            format!("faster x{:.2}", 1.0 / factor)
        } else {
            "same".to_owned()
        }
    }

    fn notes(&self, header: &BenchHeader) -> Vec<String> {
        let mut notes = vec![
            "baseline: what lies beyond the spread of both runs has moved; the rest is the same.".to_owned(),
        ];
        for (what, old, new) in [
            ("adapter", &self.header.adapter, &header.adapter),
            ("driver", &self.header.driver, &header.driver),
            ("timing", &self.header.timing, &header.timing),
        ] {
            if old != new {
                notes.push(format!("The baseline has another {what}: {old}."));
            }
        }
        notes
    }
}

/// The whole report as text: header, roofs, table, notes, and the lines of `advice`.
pub fn text(report: &BenchReport, baseline: Option<&Baseline>, advice: &[String]) -> String {
    let mut text = header(&report.header);
    if !report.roofs.is_empty() {
        text += &format!("\n{}", roofs(report));
    }
    text += &format!("\n{}\n", rows(report, baseline));
    let mut notes = notes(report);
    notes.extend(baseline.map(|b| b.notes(&report.header)).unwrap_or_default());
    for line in notes.iter().chain(advice) {
        text += &format!("- {line}\n");
    }
    text
}

fn header(header: &BenchHeader) -> String {
    let kind = if header.software {
        "software driver: it runs on the CPU, and no GPU is measured"
    } else {
        &header.device_type
    };
    let mib = |bytes: u64| bytes >> 20;
    format!(
        "adapter   {} ({kind})\ndriver    {}, {}\nfeatures  {}\nmodel     {}; {} sequence{}\ntiming    {}\n\
         cache     {} MiB assumed ({}); pages take at most {} MiB\nwarm-up   {}\nsamples   {}\n",
        header.adapter,
        header.backend,
        header.driver,
        match header.features.is_empty() {
            true => "none".to_owned(),
            false => header.features.join(", "),
        },
        header.shape,
        header.batch,
        if header.batch == 1 { "" } else { "s" },
        header.timing,
        mib(header.cache_bytes),
        header.cache_source,
        mib(header.memory_bytes),
        header.warm_up,
        header.samples,
    )
}

/// What bandwidth is called: that of a CPU is never a GPU's.
fn gb_per_s(header: &BenchHeader) -> &'static str {
    if header.software { "CPU GB/s" } else { "GB/s" }
}

fn roofs(report: &BenchReport) -> String {
    let mut table = plain(&["read roof", "MiB", "ms", "spread", gb_per_s(&report.header)]);
    for roof in &report.roofs {
        table.add_row([
            roof.kernel.clone(),
            (roof.bytes >> 20).to_string(),
            digits(roof.seconds[1] * 1e3),
            spread(roof.seconds[0], roof.seconds[2]),
            format!("{:.1}", roof.gb_per_s),
        ]);
    }
    right_aligned(&mut table, 1..5);
    table.trim_fmt() + "\n"
}

/// A spread in milliseconds.
fn spread(low: f64, high: f64) -> String {
    format!("{}..{}", digits(low * 1e3), digits(high * 1e3))
}

fn rows(report: &BenchReport, baseline: Option<&Baseline>) -> String {
    let work = report.rows.first().map_or(Work::Decode, |row| row.work);
    let moves = match work {
        Work::Append => "bytes written",
        _ => "bytes read",
    };
    let mut head = vec![
        "pair",
        "context",
        "layers",
        "ms/layer",
        "spread",
        moves,
        "scales",
        "tables",
        gb_per_s(&report.header),
        "% of roof",
        "tokens/s",
        "vs f16",
        "mark",
    ];
    if baseline.is_some() {
        head.push("baseline");
    }
    let mut table = plain(&head);
    for row in &report.rows {
        let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        let mut cells = vec![
            row.pair.clone(),
            row.context.to_string(),
            row.layers.to_string(),
            digits(row.seconds * 1e3),
            spread(row.seconds_low, row.seconds_high),
            row.code_bytes.to_string(),
            row.scale_bytes.to_string(),
            row.table_bytes.to_string(),
            digits(row.gb_per_s),
            or_dash(row.percent_of_roof.map(|percent| format!("{percent:.1}"))),
            digits(row.tokens_per_s),
            or_dash(row.speed_up.map(|factor| format!("x{factor:.2}"))),
            mark(row).to_owned(),
        ];
        cells.extend(baseline.map(|baseline| baseline.moved(row)));
        table.add_row(cells);
    }
    right_aligned(&mut table, 1..12);
    table.trim_fmt()
}

fn mark(row: &BenchRow) -> &'static str {
    match (row.above_roof, row.cache_resident && row.work == Work::Decode) {
        (true, _) => "ERROR: above the roof, not believed",
        (false, true) => "cache-resident",
        (false, false) => "",
    }
}

fn notes(report: &BenchReport) -> Vec<String> {
    let rows = &report.rows;
    let any = |fits: &dyn Fn(&BenchRow) -> bool| rows.iter().any(fits);
    let work = rows.first().map_or(Work::Decode, |row| row.work);
    let moved = match work {
        Work::Decode => "read",
        Work::Append => "written",
        Work::Prefill => "read, by every tile of queries again",
    };
    let mut notes = vec![format!(
        "Times and bytes are of one layer and step. Bytes: codes {moved}, then scales and work lists apart; {} counts \
         codes and scales.",
        gb_per_s(&report.header)
    )];
    if let Some(row) = rows.iter().find(|row| row.work != Work::Decode) {
        notes.push(format!(
            "{} of {} new tokens a sequence; tokens/s go through this one layer.",
            row.work, row.new_tokens
        ));
    }
    if let Some(best) = report.roofs.first() {
        notes.push(format!(
            "Read roof: {}, {:.1} {}, the best of {} kernels in this run.",
            best.kernel,
            best.gb_per_s,
            gb_per_s(&report.header),
            report.roofs.len()
        ));
        if best.cache_resident {
            notes.push(
                "The roof's buffers fit the memory allowed, not 4 times the cache: no share of it is given."
                    .to_owned(),
            );
        }
    }
    if work == Work::Decode && any(&|row| row.cache_resident) {
        notes.push(
            "cache-resident: a pass over all layers reads less than 4 times the assumed cache, so these are no figures \
             of memory; allow more --memory, more --batch or --context."
                .to_owned(),
        );
    }
    if any(&|row| row.above_roof) {
        notes.push(
            "above the roof: not believed; the cache may be larger than assumed (--cache-size).".to_owned(),
        );
    }
    if let Some(row) = rows.iter().find(|row| row.times_read > 1) {
        notes.push(format!(
            "Pages are read {} times, since their query heads take as many workgroups; a cache may serve all but the first.",
            row.times_read
        ));
    }
    let tuned: Vec<&str> = rows
        .iter()
        .filter(|row| row.tuned)
        .map(|row| row.pair.as_str())
        .collect();
    if !tuned.is_empty() {
        notes.push(format!(
            "Run by what `kvpack tune` found here: {}.",
            tuned.join(", ")
        ));
    }
    if any(&|row| row.approximate) {
        notes.push("Some of these score in f16 or packed integers, less exact than f32.".to_owned());
    }
    for row in rows.iter().filter(|row| !row.note.is_empty()) {
        notes.push(format!("{}, {} tokens: {}.", row.pair, row.context, row.note));
    }
    let clocks = |clock: Clock| any(&|row| row.clock == clock);
    if clocks(Clock::Timestamps) && clocks(Clock::WallClock) {
        notes.push("Rows of two clocks: compare with care.".to_owned());
    }
    if any(&|row| row.speed_up.is_none()) {
        notes.push("f16 was not measured: nothing is compared with it.".to_owned());
    }
    for left in &report.left_out {
        notes.push(format!(
            "Left out: {}, {} tokens: {}.",
            left.pair, left.context, left.reason
        ));
    }
    notes
}

/// What the rows and the drift table say together: which pair is fastest at the longest context, what it costs in drift,
/// which pairs are worth it and which are not. `drift` are rows of the tiny model; pairs without one are not judged by it.
pub fn advice(report: &BenchReport, drift: &[DriftRow]) -> Vec<String> {
    let Some(context) = report.rows.iter().map(|row| row.context).max() else {
        return Vec::new();
    };
    let mut rows: Vec<&BenchRow> = report
        .rows
        .iter()
        .filter(|row| row.context == context && !row.above_roof)
        .collect();
    rows.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let Some(fastest) = rows.first() else {
        return vec!["No row is believed: no advice.".to_owned()];
    };
    let drift_of = |row: &BenchRow| {
        let found = drift
            .iter()
            .find(|d| d.pair == row.pair && never_packed(d).is_empty());
        found.map(|d| d.logit_drift)
    };
    let said = |row: &BenchRow| {
        let speed = row
            .speed_up
            .map_or(String::new(), |factor| format!("{factor:.2} times f16"));
        match drift_of(row) {
            Some(drift) if speed.is_empty() => format!("drift {}", digits(drift)),
            Some(drift) => format!("{speed}, drift {}", digits(drift)),
            None => speed,
        }
    };
    let mut lines = vec![format!(
        "Fastest {} here at {context} tokens: {} ({}).",
        fastest.work,
        fastest.pair,
        said(fastest)
    )];
    // Another is faster beyond the spread of both, and no less exact.
    let beaten = |row: &BenchRow| {
        rows.iter().find(|other| {
            let faster = other.seconds_high < row.seconds_low;
            let exact = matches!((drift_of(other), drift_of(row)), (Some(a), Some(b)) if a <= b);
            faster && exact
        })
    };
    let judged: Vec<_> = rows.iter().filter(|row| drift_of(row).is_some()).collect();
    let mut pays: Vec<_> = judged.iter().filter(|row| beaten(row).is_none()).collect();
    pays.sort_by(|a, b| {
        drift_of(a)
            .partial_cmp(&drift_of(b))
            .unwrap_or(std::cmp::Ordering::Equal)
    });
    if judged.len() > 1 {
        let pays: Vec<_> = pays
            .iter()
            .map(|row| format!("{} ({})", row.pair, said(row)))
            .collect();
        lines.push(format!("From exact to fast: {}.", pays.join("; ")));
        let not: Vec<_> = judged
            .iter()
            .filter_map(|row| {
                Some(format!(
                    "{} ({} is faster and no less exact)",
                    row.pair,
                    beaten(row)?.pair
                ))
            })
            .collect();
        if !not.is_empty() {
            lines.push(format!("Does not pay in speed here: {}.", not.join("; ")));
        }
    }
    if !judged.is_empty() {
        lines.push(
            "drift: logit drift of the tiny model, as `kvpack drift --device cpu` measures it.".to_owned(),
        );
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::examples;

    fn report() -> BenchReport {
        examples::bench()
    }

    #[test]
    fn the_table_shows_marks_and_withholds_what_is_not_believed() {
        let text = text(&report(), None, &advice(&report(), &examples::published()));
        let row = |pair: &str| {
            let line = text.lines().find(|line| line.starts_with(&format!("| {pair} ")));
            line.expect(pair).split('|').map(str::trim).collect::<Vec<_>>()
        };
        assert_eq!(row("f16")[12], "x1.00");
        assert_eq!((row("int4")[10], row("int4")[13]), ("40.0", ""));
        assert_eq!((row("int8")[10], row("int8")[13]), ("-", "cache-resident"));
        assert_eq!(
            (row("int2")[10], row("int2")[13]),
            ("-", "ERROR: above the roof, not believed")
        );
        for words in [
            "Fastest decode here at 4096 tokens: int4 (2.50 times f16, drift 0.04383).",
            "Does not pay in speed here: fp4 (int4 is faster and no less exact)",
            "Left out: fp8, 4096 tokens: why.",
            "read_four, 256 invocations",
            "not believed",
            "timing    ",
            "warm-up   ",
        ] {
            assert!(text.contains(words), "`{words}` is not in:\n{text}");
        }
        assert!(
            text.is_ascii() && !text.contains("inf") && !text.contains("NaN"),
            "{text}"
        );
    }

    #[test]
    fn a_software_drivers_bandwidth_is_that_of_a_cpu() {
        let mut report = report();
        let gpu = text(&report, None, &[]);
        assert!(!gpu.contains("CPU"), "{gpu}");
        report.header.software = true;
        let text = text(&report, None, &[]);
        assert!(
            text.contains("CPU GB/s") && text.contains("no GPU is measured"),
            "{text}"
        );
        assert!(!text.contains("| GB/s"), "{text}");
    }

    #[test]
    fn json_holds_every_sample_and_reads_back_as_a_baseline() {
        let report = report();
        let bytes = to_json(&report).unwrap();
        let parsed: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(parsed["schema"], SCHEMA);
        assert_eq!(parsed["header"]["adapter"], "A GPU #2");
        assert_eq!(parsed["rows"][0]["samples"].as_array().unwrap().len(), 5);
        assert_eq!(parsed["roofs"][0]["kernel"], "read_four, 256 invocations");
        let baseline = Baseline::parse("old.json", &bytes).unwrap();
        assert!(report.rows.iter().all(|row| baseline.moved(row) == "same"));
        let scaled = |factor: f64| BenchRow {
            seconds: report.rows[0].seconds * factor,
            seconds_low: report.rows[0].seconds_low * factor,
            seconds_high: report.rows[0].seconds_high * factor,
            ..report.rows[0].clone()
        };
        assert_eq!(baseline.moved(&scaled(2.0)), "SLOWER x2.00");
        assert_eq!(baseline.moved(&scaled(0.5)), "faster x2.00");
        assert_eq!(baseline.moved(&scaled(1.05)), "same");
        let other = BenchRow {
            context: 1,
            ..scaled(1.0)
        };
        assert_eq!(baseline.moved(&other), "new");
        let mut moved = report.clone();
        moved.rows[0] = scaled(2.0);
        moved.header.driver = "another".to_owned();
        let text = text(&moved, Some(&baseline), &[]);
        assert!(
            text.contains("SLOWER x2.00") && text.contains("The baseline has another driver"),
            "{text}"
        );
    }

    #[test]
    fn what_is_no_baseline_is_refused_by_name() {
        let newer = br#"{"schema": 99, "header": {"adapter": "", "driver": "", "timing": ""}, "rows": []}"#;
        for bytes in [&b"[]"[..], b"{", b"", newer] {
            let message = Baseline::parse("old.json", bytes).unwrap_err().to_string();
            assert!(
                message.contains("old.json") && message.contains("kvpack bench --json"),
                "{message}"
            );
        }
    }

    #[test]
    fn csv_has_a_line_a_row() {
        let text = String::from_utf8(to_csv(&report()).unwrap()).unwrap();
        assert!(
            text.starts_with("work,pair,context,") && text.lines().count() == 6,
            "{text}"
        );
        assert!(text.contains("\ndecode,f16,4096,"), "{text}");
    }
}
