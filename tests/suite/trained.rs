//! The trained model of `tests/data/smol_expected.json`, brought by `tools/fetch_model.sh`. `KVPACK_MODEL` is its path, which
//! `tools/test.sh` sets; without it these tests are skipped, and say so. The ignored one measures every row of the file on the
//! whole text, which takes minutes.

use std::path::PathBuf;
use std::sync::Arc;

use kvpack::checkpoint::{Checkpoint, Tokenizer};
use kvpack::drift::{Device, KeyRope, Mode, TrainedDrift, TrainedDriftOptions, TrainedDriftRow, run_trained};
use kvpack::generate::{GenerateOptions, generate};
use kvpack::gpu::Gpu;
use kvpack::kernels::FloatType;
use kvpack::model::{self, Placed};
use serde_json::Value;

use crate::common::{gpu, json, path, say};

fn model_path(test: &str) -> Option<PathBuf> {
    let path = std::env::var_os("KVPACK_MODEL").map(PathBuf::from);
    if path.is_none() {
        say(&format!("kvpack: skipped {test}: KVPACK_MODEL names no model"));
    }
    path
}

fn load(gpu: &Gpu, path: &std::path::Path) -> (Placed, Tokenizer, Vec<u32>) {
    let mut checkpoint = Checkpoint::open(path).unwrap();
    let tokenizer = checkpoint.tokenizer().unwrap();
    let config = checkpoint.config.clone();
    let mut bytes = (0, 0);
    let weights = model::upload(
        gpu,
        &config,
        &mut checkpoint,
        FloatType::F32,
        &mut |done, of, _| bytes = (done, of),
    );
    assert!(bytes.0 == bytes.1 && bytes.0 > 0);
    (
        Placed::Gpu(Arc::new(weights.unwrap())),
        tokenizer,
        config.end_of_text,
    )
}

fn measure(gpu: &Gpu, model: &Placed, ids: &[u32], pairs: &[&str], k_rope: KeyRope) -> TrainedDrift {
    let options = TrainedDriftOptions {
        pairs: pairs.iter().map(|pair| pair.parse().unwrap()).collect(),
        k_rope,
        mode: Mode::Prefill,
        window: 0,
        per_layer: false,
        kv_scales: None,
    };
    run_trained(&Device::Gpu(gpu.clone()), model, ids, &options, &mut |_, _, _| {}).unwrap()
}

#[test]
fn one_pair_on_64_tokens_has_the_figures_of_an_independent_reference() {
    let test = "one_pair_on_64_tokens_has_the_figures_of_an_independent_reference";
    let (Some(file), Some(gpu)) = (model_path(test), gpu(test)) else {
        return;
    };
    let (model, tokenizer, _) = load(gpu, &file);
    let text = std::fs::read_to_string(path("tests/data/text.txt")).unwrap();
    let ids = tokenizer.encode(&text).unwrap();
    assert_eq!(ids.len() as u64, json("tests/data/smol_expected.json")["tokens"]);
    let drift = measure(gpu, &model, &ids[..64], &["int8"], KeyRope::Post);
    // numpy in f64 on the dequantised weights, with the same rounding of K and V: perplexity 52.55884 with the f32 cache;
    // int8: perplexity 52.3108, drift 0.01508, centred 0.013235, mean KL 0.000712, 64 of 64. Codes flip between devices: on
    // the whole text drift has a deviation of 2.4 %, centred 0.8 %, KL 2.3 %; 64 tokens pool fewer.
    let [f32, int8] = &drift.rows[..] else {
        panic!("{drift:?}")
    };
    let near = |value: f64, expected: f64, share: f64| (value / expected - 1.0).abs() <= share;
    assert!(near(f32.perplexity, 52.55884, 1e-5), "{f32:?}");
    assert!(near(int8.perplexity, 52.3108, 5e-3), "{int8:?}");
    assert!(near(int8.logit_drift, 0.01508, 0.35), "{int8:?}");
    assert!(near(int8.logit_drift_centred, 0.013235, 0.15), "{int8:?}");
    assert!(near(int8.mean_kl, 0.000712, 0.35), "{int8:?}");
    assert!(int8.top1 >= 62, "{int8:?}");
}

#[test]
fn greedy_text_of_the_f32_cache_is_the_references() {
    let test = "greedy_text_of_the_f32_cache_is_the_references";
    let (Some(file), Some(gpu)) = (model_path(test), gpu(test)) else {
        return;
    };
    let (model, tokenizer, end_of_text) = load(gpu, &file);
    let numbers = |value: &Value| -> Vec<u32> {
        let numbers = value.as_array().unwrap().iter();
        numbers.map(|id| id.as_u64().unwrap() as u32).collect()
    };
    for case in json("tests/data/smol_expected.json")["greedy_f32_cache"]
        .as_array()
        .unwrap()
    {
        let prompt = tokenizer.encode(case["prompt"].as_str().unwrap()).unwrap();
        assert_eq!(prompt, numbers(&case["prompt_ids"]));
        let expected = numbers(&case["continuation_ids"]);
        let options = GenerateOptions {
            pair: "f32".parse().unwrap(),
            window: 0,
            max_tokens: expected.len() as u32,
            temperature: 0.0,
            seed: 0,
            kv_scales: None,
            end_of_text: end_of_text.clone(),
        };
        let generated = generate(&model, &prompt, &options, &mut |_| Ok(true)).unwrap();
        assert_eq!(generated.ids, expected, "{}", case["prompt"]);
        assert_eq!(tokenizer.decode(&generated.ids).unwrap(), case["text"]);
    }
}

/// What of a row is outside the file's figures.
fn outside(row: &TrainedDriftRow, expected: &Value) -> Vec<String> {
    let mut found = Vec::new();
    if expected["broken"] == true {
        if row.top1 >= 200 || row.perplexity <= 200.0 {
            found.push(format!("is not broken: {row:?}"));
        }
        return found;
    }
    for (field, value) in [
        ("logit_drift", row.logit_drift),
        ("logit_drift_centred", row.logit_drift_centred),
        ("mean_kl", row.mean_kl),
        ("top1", row.top1 as f64),
        ("perplexity", row.perplexity),
    ] {
        let [middle, tolerance] = [0, 1].map(|i| expected[field][i].as_f64().unwrap());
        let inside = (value - middle).abs() <= tolerance;
        say(&format!(
            "{} {}-RoPE {field}: {value:.6}, expected {middle:.6} +- {tolerance:.6}",
            row.pair, row.k_rope
        ));
        if !inside {
            found.push(format!(
                "{} {}-RoPE {field}: {value} is not {middle} +- {tolerance}",
                row.pair, row.k_rope
            ));
        }
    }
    found
}

#[test]
#[ignore = "minutes: every row on the whole text; one pair on 64 tokens is measured in every run"]
fn every_row_of_the_file_within_its_tolerance() {
    let test = "every_row_of_the_file_within_its_tolerance";
    let (Some(file), Some(gpu)) = (model_path(test), gpu(test)) else {
        panic!("{test} was asked for, and there is no model or no adapter");
    };
    let (model, tokenizer, _) = load(gpu, &file);
    let data = json("tests/data/smol_expected.json");
    let text = std::fs::read_to_string(path("tests/data/text.txt")).unwrap();
    let ids = tokenizer.encode(&text).unwrap();
    let rows = data["rows"].as_object().unwrap();
    let mut found = Vec::new();
    for k_rope in [KeyRope::Post, KeyRope::Pre] {
        let suffix = match k_rope {
            KeyRope::Post => "",
            KeyRope::Pre => " pre-RoPE",
        };
        let of_this = rows.iter().filter(|(_, row)| row["k_rope"] == k_rope.to_string());
        let pairs: Vec<&str> = of_this
            .map(|(name, _)| name.strip_suffix(suffix).unwrap())
            .collect();
        let drift = measure(gpu, &model, &ids, &pairs, k_rope);
        let perplexity = data["reference"]["perplexity_f32_cache"].as_f64().unwrap();
        let f32 = &drift.rows[0];
        if !((f32.perplexity / perplexity - 1.0).abs() <= 1e-5) {
            found.push(format!("f32 perplexity {} is not {perplexity}", f32.perplexity));
        }
        for (row, pair) in drift.rows[1..].iter().zip(&pairs) {
            found.extend(outside(row, &rows[&format!("{pair}{suffix}")]));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
