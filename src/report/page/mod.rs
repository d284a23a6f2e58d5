//! The page: one self-contained HTML file of a recorded measurement, for people to watch and to share. Its sources are
//! the files beside this one; nothing is loaded from anywhere.
//!
//! The data is JSON inside the page:
#![doc = include_str!("schema.md")]

mod bench;
mod data;
mod sentences;

use std::io;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};

pub use bench::BenchData;
pub use data::{Data, Report, SCHEMA, Table};

/// What the data's fields mean.
pub const SCHEMA_TEXT: &str = include_str!("schema.md");

const HTML: &str = include_str!("page.html");
const CSS: &str = include_str!("page.css");

/// The scripts, in the order in which they are joined.
const SCRIPTS: [&str; 11] = [
    include_str!("dom.js"),
    include_str!("data.js"),
    include_str!("heat.js"),
    include_str!("overview.js"),
    include_str!("inspector.js"),
    include_str!("predictions.js"),
    include_str!("player.js"),
    include_str!("layouts.js"),
    include_str!("bench.js"),
    include_str!("layers.js"),
    include_str!("main.js"),
];

/// The whole page. Its policy lets the browser load nothing and run only the page's own script.
///
/// # Errors
/// Where the data cannot be written as JSON.
pub fn html(data: &Data) -> io::Result<String> {
    let script = format!("'use strict';\n{}", SCRIPTS.concat());
    let hash = |text: &str| format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text)));
    let policy = format!(
        "default-src 'none'; script-src {}; style-src {}; base-uri 'none'; form-action 'none'",
        hash(&script),
        hash(CSS)
    );
    let mut page = String::new();
    let mut rest = HTML;
    for (mark, text) in [
        ("{{policy}}", policy.as_str()),
        ("{{style}}", CSS),
        ("{{data}}", &data.to_json()?),
        ("{{script}}", &script),
    ] {
        let (before, after) = rest
            .split_once(mark)
            .ok_or_else(|| io::Error::other(format!("the page has no place for {mark}")))?;
        page += before;
        page += text;
        rest = after;
    }
    Ok(page + rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drift::{Convention, Device, DriftOptions, Mode};
    use crate::recording::{layouts_study, tiny_study};

    #[test]
    fn every_mark_is_filled_and_the_policy_names_the_scripts_own_hash() {
        let options = DriftOptions {
            pairs: vec!["int4c(8)/int4".parse().unwrap()],
            convention: Convention::Packed,
            mode: Mode::Decode,
            outlier: 1.0,
            window: 0,
        };
        let study = tiny_study(&Device::Cpu, &options, &mut |_, _, _| {}).unwrap();
        let (layouts, outliers) = layouts_study(&Device::Cpu, &mut |_, _, _| {}).unwrap();
        let data = Data::of(&Report {
            table: Table::Tiny(&study.rows[0]),
            recording: &study.recording,
            layouts: &layouts,
            outliers: &outliers,
            bench: None,
            software: false,
            commit: Some("abc"),
        });
        let page = html(&data).unwrap();
        assert!(!page.contains("{{"));
        for (open, close, directive) in [
            ("<script>", "</script>", "script-src"),
            ("<style>", "</style>", "style-src"),
        ] {
            let (_, rest) = page.split_once(open).unwrap();
            let (inside, _) = rest.split_once(close).unwrap();
            let hash = STANDARD.encode(Sha256::digest(inside));
            assert!(
                page.contains(&format!("{directive} 'sha256-{hash}'")),
                "{directive}"
            );
        }
        assert!(!page.contains("unsafe-inline"));
        // Nothing is named that lies elsewhere but the name of SVG.
        let page = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!page.contains("http:") && !page.contains("https:"));
    }
}
