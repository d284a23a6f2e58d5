//! The data of a report's page: every number of it, recomputed by the CPU reference and compared bit for bit.

use std::collections::BTreeSet;
use std::process::Command;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kvpack::cache::{CacheSpec, K, TensorScales, V};
use kvpack::drift::{Convention, Device, DriftOptions, Mode, cache_spec};
use kvpack::model::{PROMPTS, encode, tiny};
use kvpack::pages::PageLayout;
use kvpack::recording::{LAYOUTS, OUTLIERS, layouts_study, tiny_study};
use kvpack::reference::ReferenceCache;
use kvpack::report::page::{BenchData, Data, Report, SCHEMA_TEXT, Table, html};
use kvpack::scales::ScaleLayout;
use kvpack::spec::{Pair, TABLE};
use serde_json::Value;

use crate::common::{gpu, path};

/// Every scale layout, one and several groups, sides that wait on either side, and no scale.
const PAIRS: [&str; 7] = [
    "f16",
    "fp8",
    "int8",
    "fp4",
    "int4c(8)/int4",
    "int2c/int2",
    "int8/int4c(16)",
];

fn options(pairs: &[&str], mode: Mode, window: u32) -> DriftOptions {
    DriftOptions {
        pairs: pairs.iter().map(|pair| pair.parse().unwrap()).collect(),
        convention: Convention::Packed,
        mode,
        outlier: 1.0,
        window,
    }
}

/// How the command measures where nothing is said.
pub fn tiny_options() -> DriftOptions {
    options(&TABLE, Mode::Prefill, 0)
}

/// The data of the tiny model, as the command makes it.
fn data(device: &Device, options: &DriftOptions, bench: Option<BenchData>) -> Data {
    let study = tiny_study(device, options, &mut |_, _, _| {}).unwrap();
    let (layouts, outliers) = layouts_study(device, &mut |_, _, _| {}).unwrap();
    Data::of(&Report {
        table: Table::Tiny(&study.rows[0]),
        recording: &study.recording,
        layouts: &layouts,
        outliers: &outliers,
        bench,
        software: false,
        commit: None,
    })
}

fn json(data: &Data) -> Value {
    serde_json::from_str(&data.to_json().unwrap()).unwrap()
}

/// The bytes of an array that a field names.
fn bytes(data: &Value, field: &Value) -> Vec<u8> {
    let array = &data["arrays"][field.as_u64().unwrap() as usize];
    STANDARD.decode(array["data"].as_str().unwrap()).unwrap()
}

fn u32s(data: &Value, field: &Value) -> Vec<u32> {
    let width = match data["arrays"][field.as_u64().unwrap() as usize]["type"]
        .as_str()
        .unwrap()
    {
        "u8" => 1,
        "u16" => 2,
        "u32" | "f32" => 4,
        other => panic!("{other}"),
    };
    let word = |chunk: &[u8]| (0..).zip(chunk).map(|(i, &b)| u32::from(b) << (8 * i)).sum();
    bytes(data, field).chunks(width).map(word).collect()
}

pub fn f32s(data: &Value, field: &Value) -> Vec<f32> {
    u32s(data, field).into_iter().map(f32::from_bits).collect()
}

fn f64s(data: &Value, field: &Value) -> Vec<f64> {
    let chunks = bytes(data, field);
    let chunks = chunks.chunks(8);
    chunks
        .map(|chunk| f64::from_le_bytes(chunk.try_into().unwrap()))
        .collect()
}

/// What the reference has of the rows of one layer and prompt after they came one by one, all of them and all heads.
pub struct Expected {
    words: Vec<u32>,
    scales: Vec<u32>,
    waiting: Vec<u32>,
    packed_at: Vec<u32>,
    /// The words of the last packed page: of short prompts, of the only one.
    pub packed_page: Vec<u32>,
    pub layout: PageLayout,
    /// Read back at the end, `[token][head][channel]`.
    pub read: Vec<f32>,
}

pub fn expected(spec: &CacheSpec, layer: u32, rows: [&[f32]; 2]) -> [Expected; 2] {
    let mut cache = ReferenceCache::new(spec.clone()).unwrap();
    let sequence = cache.book_mut().open();
    let row = (spec.kv_heads * spec.k_head_dim) as usize;
    let tokens = rows[K].len() / row;
    let waits = cache.book().geometry().class(layer).unwrap().waits;
    let mut waiting = [K, V].map(|s| vec![0; if waits[s] { tokens * row / 2 } else { 0 }]);
    let mut packed_at = [vec![0; tokens], vec![0; tokens]];
    for token in 0..tokens {
        let plan = cache.book_mut().plan(&[(sequence, 1)], 1).unwrap();
        let [k, v] = rows.map(|rows| &rows[token * row..][..row]);
        cache.append(&plan, layer, k, v).unwrap();
        cache.book_mut().commit(plan).unwrap();
        let boundaries = cache.book().boundaries(sequence, layer).unwrap();
        for s in [K, V] {
            for at in &mut packed_at[s][..boundaries[s] as usize] {
                *at = if *at == 0 { token as u32 + 1 } else { *at };
            }
            let pages = cache.book().held_pages_of(sequence, layer, s).unwrap();
            let words = cache.live_words(sequence, layer, s).unwrap();
            let mut rest = &words[..];
            for page in pages {
                let (words, after) = rest.split_at(page.layout.words as usize);
                rest = after;
                if !page.pool.waiting || !waits[s] {
                    continue;
                }
                // Pages are those of the first 64 tokens: a slot is a token.
                for slot in page.live.iter().cloned().flatten() {
                    for head in 0..page.layout.heads {
                        for w in 0..page.layout.head_words {
                            let word = words
                                [((head * page.layout.head_words + w) * page.layout.tokens + slot) as usize];
                            waiting[s]
                                [((slot * page.layout.heads + head) * page.layout.head_words + w) as usize] =
                                word;
                        }
                    }
                }
            }
        }
    }
    let mut waiting = waiting.into_iter();
    let mut packed_at = packed_at.into_iter();
    [K, V].map(|s| {
        let pages = cache.book().held_pages_of(sequence, layer, s).unwrap();
        let words = cache.live_words(sequence, layer, s).unwrap();
        let scale = match &spec.tensor_scales {
            TensorScales::Given(scales) if !scales.is_empty() => scales[layer as usize][s],
            _ => 1.0,
        };
        let layout = cache.book().geometry().class(layer).unwrap().packed[s];
        let (heads, d) = (layout.heads, layout.head_dim);
        let mut found = Expected {
            words: vec![0; tokens * (heads * layout.head_words) as usize],
            scales: Vec::new(),
            waiting: waiting.next().unwrap(),
            packed_at: packed_at.next().unwrap(),
            packed_page: vec![0; layout.words as usize],
            layout,
            read: vec![0.0; tokens * row],
        };
        let mut rest = &words[..];
        for page in pages {
            let (words, after) = rest.split_at(page.layout.words as usize);
            rest = after;
            for slot in page.live.iter().cloned().flatten() {
                for head in 0..heads {
                    for channel in 0..d {
                        let place = ((slot * heads + head) * d + channel) as usize;
                        found.read[place] = page.layout.number(words, slot, head, channel, scale);
                    }
                    for w in 0..layout.head_words {
                        if !page.pool.waiting {
                            let place = ((slot * heads + head) * layout.head_words + w) as usize;
                            found.words[place] =
                                words[((head * layout.head_words + w) * layout.tokens + slot) as usize];
                        }
                    }
                }
            }
            if !page.pool.waiting {
                found.packed_page = words.to_vec();
            }
        }
        let packed_page = found.packed_page.clone();
        let bits = |slot: u32, head: u32, channel: u32| {
            let (word, bit) = layout.scale_at(slot, head, channel).unwrap();
            (packed_page[word as usize] >> bit) & (u32::MAX >> (32 - layout.side.scale.bits()))
        };
        let tokens = tokens as u32;
        match layout.side.layout {
            ScaleLayout::None | ScaleLayout::PerTensor => {}
            ScaleLayout::PerToken => {
                found.scales = (0..tokens)
                    .flat_map(|t| (0..heads).map(move |h| bits_of(t, h, 0)))
                    .map(|[t, h, c]| bits(t, h, c))
                    .collect();
            }
            ScaleLayout::PerBlock => {
                let blocks = heads * d / 16;
                found.scales = (0..tokens)
                    .flat_map(|t| (0..blocks).map(move |b| bits_of(t, b * 16 / d, b * 16 % d)))
                    .map(|[t, h, c]| bits(t, h, c))
                    .collect();
            }
            ScaleLayout::PerChannel { group } => {
                found.scales = (0..tokens.div_ceil(group))
                    .flat_map(|g| (0..heads * d).map(move |c| bits_of(g * group, c / d, c % d)))
                    .map(|[t, h, c]| bits(t, h, c))
                    .collect();
            }
            other => panic!("{other:?}"),
        }
        found
    })
}

fn bits_of(token: u32, head: u32, channel: u32) -> [u32; 3] {
    [token, head, channel]
}

/// The spec of a run as it says itself: its pair and its per-tensor scales.
pub fn spec_of(options: &DriftOptions, pair: Pair, run: &Value) -> CacheSpec {
    let scales: Vec<[f32; 2]> = serde_json::from_value(run["tensor_scales"].clone()).unwrap();
    cache_spec(&tiny(1.0).config, pair, options, &scales).unwrap()
}

/// Compares all that the data says of stored numbers with the reference; how many numbers that were.
fn compare(data: &Value, options: &DriftOptions) -> usize {
    let mut compared = 0;
    for recording in data["recordings"].as_array().unwrap() {
        for run in recording["takes"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|take| take["runs"].as_array().unwrap())
        {
            let Some(name) = run["pair"].as_str() else {
                continue;
            };
            let pair: Pair = name.parse().unwrap();
            // The layouts are measured without a window.
            let window = if recording == &data["recordings"][0] {
                options.window
            } else {
                0
            };
            let options = DriftOptions {
                window,
                ..options.clone()
            };
            let spec = spec_of(&options, pair, run);
            for prompt in run["prompts"].as_array().unwrap() {
                for (layer, sides) in (0..).zip(prompt["layers"].as_array().unwrap()) {
                    let rows = ["k", "v"].map(|side| f32s(data, &sides[side]["rows"]));
                    let expected = expected(&spec, layer, [&rows[K], &rows[V]]);
                    for (s, side) in ["k", "v"].into_iter().enumerate() {
                        let what = format!("{name}, layer {layer}, {side}");
                        let (found, right) = (&sides[side], &expected[s]);
                        assert_eq!(u32s(data, &found["words"]), right.words, "{what}: words");
                        assert_eq!(u32s(data, &found["scales"]), right.scales, "{what}: scales");
                        assert_eq!(
                            u32s(data, &found["packed_at"]),
                            right.packed_at,
                            "{what}: packed_at"
                        );
                        // A row that was packed in the step in which it came was never seen to wait; the reference looks after
                        // every step too.
                        assert_eq!(u32s(data, &found["waiting"]), right.waiting, "{what}: waiting");
                        compared += right.read.len();
                    }
                }
            }
        }
    }
    compared
}

#[test]
fn every_code_word_and_scale_is_that_of_the_reference() {
    for (mode, window) in [(Mode::Prefill, 0), (Mode::Decode, 3)] {
        let options = options(&PAIRS, mode, window);
        let json = json(&data(&Device::Cpu, &options, None));
        let compared = compare(&json, &options);
        // 3 factors x 7 pairs x 4 prompts, and 7 factors x 4 pairs x 1 prompt, of 2048 numbers each.
        assert_eq!(compared, (3 * 7 * 4 + 7 * 4) * 2048);
    }
}

#[test]
fn every_code_word_and_scale_of_an_adapter_is_that_of_the_reference() {
    let Some(gpu) = gpu("every_code_word_and_scale_of_an_adapter_is_that_of_the_reference") else {
        return;
    };
    for (pairs, mode, window) in [
        (&PAIRS[..], Mode::Prefill, 0),
        (&["int4c(8)/int4"], Mode::Decode, 5),
    ] {
        let options = options(pairs, mode, window);
        let json = json(&data(&Device::Gpu(gpu.clone()), &options, None));
        assert!(compare(&json, &options) >= 80_000);
    }
}

#[test]
fn a_changed_word_is_found() {
    let options = options(&["int4"], Mode::Prefill, 0);
    let mut json = json(&data(&Device::Cpu, &options, None));
    let place = &json["recordings"][0]["takes"][0]["runs"][1]["prompts"][2]["layers"][1]["v"]["words"];
    let place = place.as_u64().unwrap() as usize;
    let mut words = STANDARD
        .decode(json["arrays"][place]["data"].as_str().unwrap())
        .unwrap();
    words[37] ^= 1;
    json["arrays"][place]["data"] = STANDARD.encode(words).into();
    let found = std::panic::catch_unwind(|| compare(&json, &options));
    assert!(found.is_err());
}

/// Rows, predictions, flips and the running drift, from the model itself.
#[test]
fn rows_predictions_and_drift_are_those_of_the_model() {
    let options = options(&["int4c(8)/int4", "int2"], Mode::Prefill, 0);
    let json = json(&data(&Device::Cpu, &options, None));
    let placed = Device::Cpu.place(tiny(1.0)).unwrap();
    let take = &json["recordings"][0]["takes"][0];
    let reference = take["runs"][0]["prompts"].as_array().unwrap();
    assert!(take["runs"][0]["pair"].is_null() && reference[0]["layers"].as_array().unwrap().is_empty());
    for (number, &pair) in options.pairs.iter().enumerate() {
        let run = &take["runs"][number + 1];
        assert_eq!(run["pair"], pair.to_string());
        let mut session = placed.session(spec_of(&options, pair, run), false).unwrap();
        let (mut error, mut power, mut changed) = (0.0, 0.0, 0);
        for (p, text) in PROMPTS.iter().enumerate() {
            let sequence = session.open();
            let mut layers = Vec::new();
            let logits = session
                .logits_traced(sequence, &encode(text).unwrap(), &mut |rows| {
                    layers.push(rows);
                    Ok(())
                })
                .unwrap();
            let prompt = &run["prompts"][p];
            for (rows, sides) in layers.iter().zip(prompt["layers"].as_array().unwrap()) {
                assert_eq!(f32s(&json, &sides["k"]["rows"]), rows.k);
                assert_eq!(f32s(&json, &sides["v"]["rows"]), rows.v);
            }
            let [ids, reference_ids] = [prompt, &reference[p]].map(|prompt| u32s(&json, &prompt["top_ids"]));
            let top_logits = f32s(&json, &prompt["top_logits"]);
            let sums = f64s(&json, &prompt["log_sum_exp"]);
            let kept = f32s(&json, &prompt["kept_logit"]);
            let mut flipped = Vec::new();
            for (t, row) in logits.chunks(64).enumerate() {
                let mut order: Vec<usize> = (0..64).collect();
                order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
                for i in 0..4 {
                    assert_eq!(ids[t * 4 + i] as usize, order[i]);
                    assert_eq!(top_logits[t * 4 + i], row[order[i]] as f32);
                }
                // Another order of summing: 64 numbers of f64.
                let sum = row.iter().map(|x| x.exp()).sum::<f64>().ln();
                assert!((sums[t] - sum).abs() <= 1e-12, "{} {sum}", sums[t]);
                let expected = reference_ids[t * 4] as usize;
                assert_eq!(kept[t], row[expected] as f32);
                if expected != order[0] {
                    flipped.push((
                        t as u64,
                        expected as u64,
                        order[0] as u64,
                        row[order[0]] - row[expected],
                    ));
                }
            }
            let mut listed: Vec<_> = prompt["flips"]
                .as_array()
                .unwrap()
                .iter()
                .map(|flip| {
                    let id = |field: &str| flip[field].as_u64().unwrap();
                    (
                        id("position"),
                        id("from"),
                        id("to"),
                        flip["margin"].as_f64().unwrap(),
                    )
                })
                .collect();
            listed.sort_by_key(|flip| flip.0);
            assert_eq!(listed.len(), flipped.len());
            for (a, b) in listed.iter().zip(&flipped) {
                // serde_json reads some f64 an ulp away from what it wrote.
                assert!(
                    (a.0, a.1, a.2) == (b.0, b.1, b.2) && (a.3 - b.3).abs() <= 1e-15,
                    "{a:?} {b:?}"
                );
            }
            changed += prompt["changed"].as_u64().unwrap();
            error += f64s(&json, &prompt["error"]).iter().sum::<f64>();
            power += f64s(&json, &prompt["power"]).iter().sum::<f64>();
            session.free(sequence).unwrap();
        }
        let row = &json["table"][number];
        assert_eq!(changed, 128 - row["top1"].as_u64().unwrap());
        let drift = row["logit_drift"].as_f64().unwrap();
        // Summed by token first: f64.
        assert!(
            ((error / power).sqrt() - drift).abs() <= 1e-12 * drift,
            "{pair}: {drift}"
        );
    }
}

#[test]
fn keys_under_outliers_are_measured_at_every_factor() {
    let json = json(&data(&Device::Cpu, &options(&["f16"], Mode::Decode, 0), None));
    let rows = json["outliers"].as_array().unwrap();
    assert_eq!(rows.len(), OUTLIERS.len() * 4);
    let figure = |pair: &str, outlier: f64, field: &str| {
        let row = rows
            .iter()
            .find(|row| row["pair"] == pair && row["outlier"] == outlier)
            .unwrap();
        row[field].as_f64().unwrap()
    };
    for [token, channel] in LAYOUTS {
        // By token: ever worse. By channel: powers of 2 move scales and nothing else.
        assert!(figure(token, 64.0, "logit_drift") > 4.0 * figure(token, 1.0, "logit_drift"));
        assert!(figure(token, 64.0, "k_zeroed") > 2.0 * figure(token, 1.0, "k_zeroed"));
        let at_one = figure(channel, 1.0, "logit_drift");
        for outlier in OUTLIERS {
            assert!(
                (figure(channel, outlier, "logit_drift") - at_one).abs() <= 1e-9 * at_one,
                "{channel} {outlier}"
            );
            assert_eq!(
                figure(channel, outlier, "k_zeroed"),
                figure(channel, 1.0, "k_zeroed")
            );
        }
    }
    // As the command measures them, whatever the mode of the table is.
    let options = DriftOptions {
        outlier: 16.0,
        ..options(&["int4"], Mode::Prefill, 0)
    };
    let row = &kvpack::drift::run(&Device::Cpu, &options, &mut |_, _, _| {}).unwrap()[0];
    assert_eq!(figure("int4", 16.0, "logit_drift"), row.logit_drift);
}

#[test]
fn the_sentences_say_what_was_measured() {
    let pairs = ["f32", "fp8", "int4", "int2c/int2", "int4c(64)"];
    let json = json(&data(&Device::Cpu, &options(&pairs, Mode::Prefill, 0), None));
    for (number, format) in json["formats"].as_array().unwrap().iter().enumerate() {
        let text: Vec<&str> = format["sentences"]
            .as_array()
            .unwrap()
            .iter()
            .map(|s| s.as_str().unwrap())
            .collect();
        let text = text.join(" ");
        let row = &json["table"][number];
        let changed = 128 - row["top1"].as_u64().unwrap();
        let words = match changed {
            0 => "All 128 predictions are those of the full-precision cache".to_owned(),
            n => format!("{n} of 128 predictions changed"),
        };
        assert!(text.contains(&words), "{text}");
        let options = options(&pairs, Mode::Prefill, 0);
        let run = &json["recordings"][0]["takes"][0]["runs"][number + 1];
        let spec = spec_of(&options, options.pairs[number], run);
        let mut counts = [[0_u32; 2]; 2];
        for prompt in run["prompts"].as_array().unwrap() {
            for (layer, sides) in (0..).zip(prompt["layers"].as_array().unwrap()) {
                let rows = ["k", "v"].map(|side| f32s(&json, &sides[side]["rows"]));
                let expected = expected(&spec, layer, [&rows[K], &rows[V]]);
                for s in [K, V] {
                    for (x, y) in rows[s].iter().zip(&expected[s].read).filter(|(x, _)| **x != 0.0) {
                        counts[s][0] += u32::from(*x != 0.0);
                        counts[s][1] += u32::from(*y == 0.0);
                    }
                }
            }
        }
        for (s, name) in [(K, "keys"), (V, "values")] {
            let share = f64::from(counts[s][1]) / f64::from(counts[s][0]) * 100.0;
            match counts[s][1] {
                0 => assert!(!text.contains("vanish"), "{text}"),
                _ if share < 9.95 => assert!(
                    text.contains(&format!("{share:.1}\u{a0}% of the {name}")),
                    "{share} {text}"
                ),
                _ => assert!(
                    text.contains(&format!("{share:.0}\u{a0}% of the {name}")),
                    "{share} {text}"
                ),
            }
        }
        let never =
            text.contains("The keys were never packed") && text.contains("The values were never packed");
        assert_eq!(never, format["pair"] == "int4c(64)", "{text}");
        // Numbers stand with their sign, spaces in quoted texts show, and fp8 has two scales a layer.
        assert!(!text.contains(" %"), "{text}");
        let quoted = text
            .split('\u{201c}')
            .skip(1)
            .map(|rest| rest.split('\u{201d}').next().unwrap());
        for quoted in quoted {
            assert!(!quoted.contains(' '), "{quoted:?}");
        }
        assert_eq!(
            text.contains("one scale for the keys and one for the values of a layer"),
            format["pair"] == "fp8",
            "{text}"
        );
        assert_eq!(
            text.contains("Nothing is lost"),
            format["pair"] == "f32",
            "{text}"
        );
    }
}

// ---- the schema ------------------------------------------------------------------------------------------------------

/// The paths of all values that are no objects or lists, as the schema writes them.
fn paths(value: &Value, at: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                let open = ["table[]", "layers[]", "bench", "recordings[].texts"].contains(&at)
                    || at.starts_with("bench.");
                let name = if open { "*" } else { name };
                let below = if at.is_empty() {
                    name.to_owned()
                } else {
                    format!("{at}.{name}")
                };
                if open {
                    found.insert(below);
                } else {
                    paths(field, &below, found);
                }
            }
        }
        Value::Array(list) => {
            for item in list {
                // A list of numbers or pairs is one field.
                match item {
                    Value::Object(_) => paths(item, &format!("{at}[]"), found),
                    _ => {
                        found.insert(format!("{at}[]"));
                    }
                }
            }
        }
        _ => {
            found.insert(at.to_owned());
        }
    }
}

#[test]
fn the_schema_names_every_field_and_no_other() {
    let bench = kvpack_bench();
    let bench = BenchData::parse("example", &bench).unwrap();
    let mut found = BTreeSet::new();
    paths(
        &json(&data(
            &Device::Cpu,
            &options(&PAIRS, Mode::Prefill, 0),
            Some(bench),
        )),
        "",
        &mut found,
    );
    // Both sides have the fields of K.
    let found: BTreeSet<String> = found
        .into_iter()
        .map(|path| {
            path.replace("layers[].v.", "layers[].k.")
                .replace("runs[].v.", "runs[].k.")
        })
        .collect();
    let mut named: BTreeSet<String> = SCHEMA_TEXT
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|word| word.contains('.') || *word == "schema")
        .filter(|word| !word.contains(' ') && !word.contains("::"))
        .map(str::to_owned)
        .collect();
    for container in [
        "recordings[].takes[].runs[].prompts[]",
        "recordings[].takes[].runs[].prompts[].layers[].k",
        "recordings[].takes[].runs[].prompts[].layers[].v",
    ] {
        assert!(named.remove(container), "{container}");
    }
    // Null for the f32 cache, and the heading of their fields.
    for side in ["recordings[].takes[].runs[].k", "recordings[].takes[].runs[].v"] {
        assert!(found.contains(side) && named.contains(side), "{side}");
    }
    // Only a trained model has these.
    assert!(named.remove("layers[].*"));
    let missing: Vec<_> = found.difference(&named).collect();
    let idle: Vec<_> = named.difference(&found).collect();
    assert!(missing.is_empty(), "not in schema.md: {missing:#?}");
    assert!(idle.is_empty(), "in schema.md, and in no data: {idle:#?}");
}

/// A benchmark's JSON.
pub fn kvpack_bench() -> Vec<u8> {
    br#"{"schema": 1, "header": {"adapter": "A GPU <b>", "driver": "d 1.2", "backend": "vulkan", "software": false,
        "shape": "32 query heads, 8 KV heads of 128", "batch": 1, "timing": "timestamps"},
        "roofs": [{"kernel": "read_four", "gb_per_s": 100.0, "cache_resident": false}],
        "rows": [
          {"work": "decode", "pair": "f16", "context": 4096, "batch": 1, "new_tokens": 1, "seconds": 2e-4, "seconds_low": 1.9e-4,
           "seconds_high": 2.2e-4, "gb_per_s": 84.0, "percent_of_roof": 84.0, "speed_up": 1.0, "cache_resident": false, "above_roof": false},
          {"work": "decode", "pair": "int4", "context": 4096, "batch": 1, "new_tokens": 1, "seconds": 7e-5, "seconds_low": 6.8e-5,
           "seconds_high": 7.1e-5, "gb_per_s": 62.0, "percent_of_roof": 62.0, "speed_up": 2.86, "cache_resident": true, "above_roof": false},
          {"work": "decode", "pair": "int2", "context": 32768, "batch": 1, "new_tokens": 1, "seconds": 3e-4, "seconds_low": 3e-4,
           "seconds_high": 3e-4, "gb_per_s": 120.0, "percent_of_roof": null, "speed_up": null, "cache_resident": false, "above_roof": true}],
        "left_out": []}"#
        .to_vec()
}

// ---- the file --------------------------------------------------------------------------------------------------------

/// The command, in a folder.
pub fn report(folder: &std::path::Path, arguments: &[&str]) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvpack"));
    command.current_dir(folder).arg("report").args(arguments);
    command
        .env("XDG_RUNTIME_DIR", std::env::temp_dir())
        .env("KVPACK_TUNING", "");
    command.output().unwrap()
}

/// The data inside a page.
pub fn data_of(page: &str) -> Value {
    let (_, rest) = page
        .split_once(r#"<script type="application/json" id="data">"#)
        .unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn the_page_of_the_command_holds_the_same_numbers_and_is_below_2_mb() {
    let folder = tempfile::tempdir().unwrap();
    let output = report(
        folder.path(),
        &[
            "--device",
            "cpu",
            "--json",
            "data.json",
            "--csv",
            "rows.csv",
            "--out",
            "page.html",
        ],
    );
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(page.len() < 2_000_000, "{} bytes", page.len());
    let json = data_of(&page);
    let alone: Value =
        serde_json::from_slice(&std::fs::read(folder.path().join("data.json")).unwrap()).unwrap();
    assert_eq!(json, alone);
    assert_eq!(json["formats"].as_array().unwrap().len(), TABLE.len());
    for format in json["formats"].as_array().unwrap() {
        assert!(
            (2..=4).contains(&format["sentences"].as_array().unwrap().len()),
            "{format}"
        );
    }
    let options = tiny_options();
    assert!(compare(&json, &options) > 200_000);
    let rows = kvpack::drift::run(&Device::Cpu, &options, &mut |_, _, _| {}).unwrap();
    // Through text too: serde_json reads some f64 an ulp away from what it wrote.
    let rows: Value = serde_json::from_str(&serde_json::to_string(&rows).unwrap()).unwrap();
    assert_eq!(json["table"], rows);
    let csv = std::fs::read_to_string(folder.path().join("rows.csv")).unwrap();
    assert!(
        csv.starts_with("pair,bits_per_number") && csv.lines().count() == 9,
        "{csv}"
    );
}

#[test]
fn the_sources_of_the_page_are_joined_whole() {
    let page = html(&data(&Device::Cpu, &options(&["int4"], Mode::Prefill, 0), None)).unwrap();
    let folder = path("src/report/page");
    for entry in std::fs::read_dir(folder).unwrap() {
        let file = entry.unwrap().path();
        if file
            .extension()
            .is_some_and(|ending| ending == "js" || ending == "css")
        {
            assert!(
                page.contains(&std::fs::read_to_string(&file).unwrap()),
                "{}",
                file.display()
            );
        }
    }
}

#[test]
fn what_cannot_be_is_refused_before_the_work_and_nothing_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &[u8]| std::fs::write(folder.path().join(name), text).unwrap();
    write("drift.json", b"[{\"pair\": \"int4\"}]");
    write("half.json", &kvpack_bench()[..300]);
    write(
        "other.json",
        String::from_utf8(kvpack_bench())
            .unwrap()
            .replace("\"schema\": 1", "\"schema\": 9")
            .as_bytes(),
    );
    let forged = String::from_utf8(kvpack_bench()).unwrap();
    write(
        "forged.json",
        forged.replace("\"int4\"", "\"int4\u{202e}\"").as_bytes(),
    );
    let huge = std::fs::File::create(folder.path().join("huge.json")).unwrap();
    huge.set_len((64 << 20) + 1).unwrap();
    for (arguments, words) in [
        (
            &["--bench", "drift.json"][..],
            &["drift.json", "kvpack bench --json"][..],
        ),
        (&["--bench", "half.json"], &["half.json", "kvpack bench --json"]),
        (&["--bench", "other.json"], &["schema is 9"]),
        (&["--bench", "missing.json"], &["missing.json"]),
        (&["--bench", "."], &["benchmark `.`", "no regular file"]),
        (&["--bench", "huge.json"], &["huge.json", "longer than 64 MiB"]),
        (
            &["--bench", "forged.json"],
            &["forged.json", r#""int4\u{202e}" as its pair"#],
        ),
        #[cfg(unix)]
        (
            &["--bench", "/dev/zero"],
            &["benchmark `/dev/zero`", "no regular file"],
        ),
        (
            &["--out", "missing/page.html"],
            &["missing/page.html", "does not exist"],
        ),
        (&["--out", "-", "--json", "-"], &["--out -", "--json -"]),
        (
            &["--out", "x.html", "--csv", "./x.html"],
            &["x.html", "one place"],
        ),
        (&["--pairs", "int3"], &["int3", "int4"]),
        (&["--outlier", "0"], &["--outlier"]),
        (&["--text", "drift.json"], &["--model"]),
        (&["--outlier", "2", "--model", "x"], &["--outlier", "--model"]),
        (&["--model", "missing.gguf"], &["missing.gguf"]),
        (&["--window", "4097"], &["4096"]),
    ] {
        let output = report(folder.path(), &[&["--device", "cpu"], arguments].concat());
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        for word in words {
            assert!(
                message.contains(word),
                "{arguments:?}: `{word}` is not in {message}"
            );
        }
        assert!(output.stdout.is_empty());
    }
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        5,
        "something was written"
    );
    // Only what is asked for: the data alone makes no page.
    let output = report(
        folder.path(),
        &["--device", "cpu", "--pairs", "f16", "--json", "-"],
    );
    assert!(output.status.success());
    let data: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(data["formats"][0]["pair"], "f16");
    assert!(!folder.path().join("report.html").exists());
    let output = report(folder.path(), &["--device", "cpu", "--pairs", "f16"]);
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "report.html: open it in a browser\n"
    );
    assert!(folder.path().join("report.html").exists());
}
