//! What a page shows of a benchmark: the JSON of `kvpack bench`, checked.

use serde::{Deserialize, Serialize};

use crate::bench::{SCHEMA, Work};
use crate::error::{Error, Result};
use crate::spec::Pair;

/// Rows that a page shows at most: more than every pair at four contexts.
const MAX_ROWS: usize = 1000;
/// Plain reads at most; `kvpack bench` times a few.
const MAX_ROOFS: usize = 100;
/// Letters of a text at most. Names of adapters and drivers have some hundred.
const MAX_LETTERS: usize = 1000;

/// A benchmark, as far as it is shown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchData {
    schema: u32,
    header: Header,
    roofs: Vec<Roof>,
    rows: Vec<Row>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Header {
    adapter: String,
    driver: String,
    backend: String,
    software: bool,
    shape: String,
    batch: u32,
    timing: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Roof {
    kernel: String,
    gb_per_s: f64,
    cache_resident: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Row {
    work: Work,
    pair: String,
    context: u32,
    batch: u32,
    new_tokens: u32,
    seconds: f64,
    seconds_low: f64,
    seconds_high: f64,
    gb_per_s: f64,
    percent_of_roof: Option<f64>,
    speed_up: Option<f64>,
    cache_resident: bool,
    above_roof: bool,
}

impl BenchData {
    /// Reads the JSON of `kvpack bench --json`; `name` is what an error calls it.
    ///
    /// # Errors
    /// [`Error::Usage`] for anything else, for another version of it, for more rows or longer texts than a page shows, for names
    /// that are no pair, and for times that no clock gives.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<BenchData> {
        let refuse = |reason: String| Error::Usage {
            asked: format!("benchmark `{name}`"),
            reason,
            advice: "name a file that `kvpack bench --json` of this version wrote".to_owned(),
        };
        let data: BenchData = serde_json::from_slice(bytes).map_err(|e| refuse(e.to_string()))?;
        if data.schema != SCHEMA {
            return Err(refuse(format!("its schema is {}, this is {SCHEMA}", data.schema)));
        }
        if data.rows.is_empty() {
            return Err(refuse("it has no rows".to_owned()));
        }
        if data.rows.len() > MAX_ROWS || data.roofs.len() > MAX_ROOFS {
            let (rows, roofs) = (data.rows.len(), data.roofs.len());
            return Err(refuse(format!(
                "it has {rows} rows and {roofs} roofs; a page shows at most {MAX_ROWS} and {MAX_ROOFS}"
            )));
        }
        let Header {
            adapter,
            driver,
            backend,
            shape,
            timing,
            ..
        } = &data.header;
        let texts = [adapter, driver, backend, shape, timing].into_iter();
        let long = texts
            .chain(data.roofs.iter().map(|roof| &roof.kernel))
            .find(|text| text.chars().count() > MAX_LETTERS);
        if let Some(text) = long {
            let start: String = text.chars().take(20).collect();
            return Err(refuse(format!(
                "the text that begins with {start:?} has more than {MAX_LETTERS} letters"
            )));
        }
        for row in &data.rows {
            if row.pair.parse::<Pair>().is_err() {
                let start: String = row.pair.chars().take(40).collect();
                return Err(refuse(format!("a row has {start:?} as its pair")));
            }
            let ordered = 0.0 < row.seconds_low
                && row.seconds_low <= row.seconds
                && row.seconds <= row.seconds_high
                && row.seconds_high.is_finite();
            if !ordered || !(row.gb_per_s >= 0.0) {
                let (pair, context) = (&row.pair, row.context);
                return Err(refuse(format!(
                    "the times of {pair} at {context} tokens are no quartiles above 0"
                )));
            }
        }
        if let Some(roof) = data.roofs.iter().find(|roof| !(roof.gb_per_s > 0.0)) {
            return Err(refuse(format!("the roof of `{}` is not above 0", roof.kernel)));
        }
        Ok(data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{bench, examples};

    #[test]
    fn the_json_of_the_benchmark_is_read_and_other_files_are_refused() {
        let bytes = bench::to_json(&examples::bench()).unwrap();
        let data = BenchData::parse("b.json", &bytes).unwrap();
        assert_eq!((data.rows.len(), data.roofs.len()), (5, 1));
        assert_eq!((data.rows[2].seconds, data.rows[2].pair.as_str()), (4e-4, "int4"));

        let text = String::from_utf8(bytes).unwrap();
        for (from, to, reason) in [
            ("{", "[", "expected"),
            ("\"schema\": 1", "\"schema\": 2", "schema is 2"),
            ("\"seconds\": 0.001,", "\"seconds\": 0.5,", "quartiles"),
            ("\"seconds_low\": 0.0009", "\"seconds_low\": -1", "quartiles"),
            ("\"gb_per_s\": 2.684", "\"gb_per_s\": 0", "roof"),
            ("\"pair\": \"f16\"", "\"pear\": \"f16\"", "pair"),
            ("\"pair\": \"f16\"", "\"pair\": 16", "string"),
        ] {
            assert!(text.contains(from), "{from}");
            let error = BenchData::parse("b.json", text.replacen(from, to, 1).as_bytes()).unwrap_err();
            assert!(matches!(error, Error::Usage { .. }));
            let message = error.to_string();
            assert!(
                message.contains("b.json") && message.contains(reason),
                "{message}"
            );
        }
        for (count, from, reason) in [
            (MAX_ROWS, "rows", "a page shows at most 1000 and 100"),
            (MAX_ROOFS, "roofs", "a page shows at most 1000 and 100"),
        ] {
            let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
            let items = json[from].as_array_mut().unwrap();
            let of = |items: usize, first: &serde_json::Value| vec![first.clone(); items];
            *items = of(count, &items[0]);
            BenchData::parse("x", json.to_string().as_bytes()).unwrap();
            let items = json[from].as_array_mut().unwrap();
            *items = of(count + 1, &items[0]);
            let error = BenchData::parse("x", json.to_string().as_bytes()).unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
        }
        for (at, value, reason) in [
            (
                "/header/adapter",
                "a".repeat(MAX_LETTERS + 1),
                "more than 1000 letters",
            ),
            (
                "/roofs/0/kernel",
                "a".repeat(MAX_LETTERS + 1),
                "more than 1000 letters",
            ),
            (
                "/rows/1/pair",
                "int4\u{1b}[31m\u{202e}".to_owned(),
                r#""int4\u{1b}[31m\u{202e}""#,
            ),
            ("/rows/1/pair", "a".repeat(5_000_000), r#"aaa" as its pair"#),
        ] {
            let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
            *json.pointer_mut(at).unwrap() = value.into();
            let error = BenchData::parse("x", json.to_string().as_bytes())
                .unwrap_err()
                .to_string();
            assert!(error.contains(reason) && error.len() < 300, "{error}");
        }
        for other in ["", "[]", "{}", "null", "\u{0}"] {
            assert!(BenchData::parse("x", other.as_bytes()).is_err(), "{other}");
        }
        let mut empty = examples::bench();
        empty.rows.clear();
        let bytes = bench::to_json(&empty).unwrap();
        assert!(
            BenchData::parse("x", &bytes)
                .unwrap_err()
                .to_string()
                .contains("no rows")
        );
    }
}
