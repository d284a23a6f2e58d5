//! Damaged and foreign model files: each is refused with the name of the field or tensor.

use std::fs;
use std::path::Path;

use kvpack::checkpoint::Checkpoint;
use kvpack::checkpoint::safetensors::SafetensorsFile;
use serde_json::{Value, json};

use crate::checkpoint::{open_folder, open_gguf, refused};
use crate::model_files::{self as files, Field, GgufFile, Tensor};

fn without(name: &str, tensors: Vec<Tensor>) -> Vec<Tensor> {
    tensors.into_iter().filter(|tensor| tensor.0 != name).collect()
}

/// A file changed by a function, and the words that its error must have.
type Hostile<'a> = (&'a dyn Fn(&mut GgufFile), &'a str);

#[test]
fn hostile_gguf_files_are_refused_by_name() {
    let array = |kind: u32, count: u64| {
        let mut value = kind.to_le_bytes().to_vec();
        value.extend(count.to_le_bytes());
        Field::Raw(9, value)
    };
    let cases: &[Hostile] = &[
        (
            &|file| file.magic = *b"GGML",
            "does not start with the letters GGUF",
        ),
        (&|file| file.version = 1, "GGUF version 1"),
        (&|file| file.version = 4, "GGUF version 4"),
        (&|file| file.version = 3 << 24, "big-endian"),
        (
            &|file| file.counts = Some([u64::MAX, 16]),
            "of 18446744073709551615 takes",
        ),
        (
            &|file| file.counts = Some([20, 1 << 60]),
            " of 1152921504606846976 takes",
        ),
        (
            &|file| file.set("x", array(5, u64::MAX)),
            "field `x` takes 18446744073709551615 bytes",
        ),
        (&|file| file.set("x", array(8, u64::MAX)), "field `x`"),
        (
            &|file| file.set("x", array(9, 2)),
            "field `x` is an array of values of unknown type 9",
        ),
        (
            &|file| file.set("x", array(13, 2)),
            "field `x` is an array of values of unknown type 13",
        ),
        (
            &|file| file.set("x", Field::Raw(77, vec![])),
            "field `x` has the unknown type 77",
        ),
        (
            &|file| file.set("x", Field::Raw(8, u64::MAX.to_le_bytes().to_vec())),
            "field `x` takes 18446744073709551615 bytes",
        ),
        (
            &|file| {
                file.set(
                    "x",
                    Field::Raw(8, [&2_u64.to_le_bytes()[..], &[0xff, 0xfe]].concat()),
                )
            },
            "field `x` is no UTF-8",
        ),
        (
            &|file| file.fields.push(("llama.block_count".to_owned(), Field::U32(2))),
            "field `llama.block_count` is there twice",
        ),
        (
            &|file| file.set("general.alignment", Field::U32(0)),
            "`general.alignment` is Integer(0)",
        ),
        (
            &|file| file.set("general.alignment", Field::U32(24)),
            "has offset 512, no multiple of 24",
        ),
        (
            &|file| file.remove("general.architecture"),
            "no field `general.architecture`",
        ),
        (
            &|file| file.set("general.architecture", Field::Text("qwen2".to_owned())),
            "architecture is `qwen2`; only `llama`",
        ),
        (
            &|file| file.remove("llama.block_count"),
            "no field `llama.block_count`",
        ),
        (
            &|file| file.set("llama.block_count", Field::F32(2.0)),
            "`llama.block_count` is no whole number",
        ),
        (
            &|file| file.set("llama.block_count", Field::U32(0)),
            "its layers is 0",
        ),
        (
            &|file| file.set("llama.block_count", Field::U32(u32::MAX)),
            "`blk.2.attn_norm.weight` is missing",
        ),
        (
            &|file| file.set("llama.attention.head_count", Field::U32(0)),
            "`llama.attention.head_count` 0",
        ),
        (
            &|file| file.set("llama.attention.head_count_kv", Field::U32(3)),
            "2 query heads are no multiple of 3",
        ),
        (
            &|file| file.set("llama.attention.head_count_kv", Field::U32(0)),
            "its KV heads is 0",
        ),
        (
            &|file| file.set("llama.feed_forward_length", Field::U32(u32::MAX)),
            "ffn_gate.weight` has shape [12, 8]",
        ),
        (
            &|file| file.set("llama.rope.freq_base", Field::F32(f32::NAN)),
            "`llama.rope.freq_base` is no finite",
        ),
        (
            &|file| file.set("llama.rope.dimension_count", Field::U32(2)),
            "`llama.rope.dimension_count` is 2",
        ),
        (
            &|file| file.set("llama.expert_count", Field::U32(8)),
            "`llama.expert_count` is 8",
        ),
        (
            &|file| file.set("split.count", Field::U32(2)),
            "`split.count` is 2",
        ),
        (
            &|file| file.set("llama.vocab_size", Field::U32(7)),
            "has 6 rows, but field `llama.vocab_size` makes it 7",
        ),
        (
            &|file| file.set("tokenizer.ggml.tokens", Field::Texts(vec!["a".to_owned()])),
            "`token_embd.weight` has 6 rows, but field `tokenizer.ggml.tokens` makes it 1",
        ),
        (
            &|file| file.set("tokenizer.ggml.tokens", Field::Texts(vec!["a".to_owned(); 6])),
            "`tokenizer.ggml.tokens` has the same token at 0 and 1",
        ),
        (
            &|file| file.set("tokenizer.ggml.tokens", Field::I32s(vec![1; 6])),
            "`tokenizer.ggml.tokens` is no array",
        ),
        (
            &|file| file.remove("tokenizer.ggml.merges"),
            "no field `tokenizer.ggml.merges`",
        ),
        (
            &|file| file.set("tokenizer.ggml.merges", Field::Texts(vec!["ab".to_owned()])),
            "`tokenizer.ggml.merges` has no pair at 0",
        ),
        (
            &|file| file.set("tokenizer.ggml.merges", Field::Texts(vec!["a x".to_owned()])),
            "its tokenizer is wrong",
        ),
        (
            &|file| file.set("tokenizer.ggml.model", Field::Text("t5".to_owned())),
            "`tokenizer.ggml.model` is `t5`",
        ),
        (
            &|file| file.set("tokenizer.ggml.pre", Field::Text("qwen2".to_owned())),
            "`tokenizer.ggml.pre` is `qwen2`",
        ),
        (
            &|file| file.set("tokenizer.ggml.add_bos_token", Field::Bool(true)),
            "`tokenizer.ggml.bos_token_id`",
        ),
        (
            &|file| {
                file.set("tokenizer.ggml.add_bos_token", Field::Bool(true));
                file.set("tokenizer.ggml.bos_token_id", Field::U32(6));
            },
            "ids up to 6, but tensor `token_embd.weight` has 6 rows",
        ),
        (
            &|file| file.set("tokenizer.ggml.eos_token_id", Field::U32(6)),
            "token 6, which ends a text",
        ),
        (
            &|file| {
                file.tensors
                    .retain(|tensor| tensor.name != "blk.1.ffn_down.weight")
            },
            "tensor `blk.1.ffn_down.weight` is missing",
        ),
        (
            &|file| file.tensors.retain(|tensor| tensor.name != "token_embd.weight"),
            "`token_embd.weight` is missing",
        ),
        (
            &|file| file.tensor("blk.1.attn_k.weight").name = "blk.0.attn_k.weight".to_owned(),
            "tensor `blk.0.attn_k.weight` is there twice",
        ),
        (
            &|file| file.tensor("blk.1.attn_k.weight").kind = 13,
            "`blk.1.attn_k.weight` is stored as Q5_K",
        ),
        (
            &|file| file.tensor("blk.1.attn_k.weight").kind = 999,
            "is stored as type number 999",
        ),
        (
            &|file| file.tensor("blk.1.attn_k.weight").kind = 2,
            "rows of 8 numbers, no multiple of the 32 of a Q4_0",
        ),
        (
            &|file| file.tensor("blk.1.attn_k.weight").dimensions = vec![1 << 33, 1 << 33],
            "tensor `blk.1.attn_k.weight` of shape [8589934592, 8589934592] has more numbers than can be counted",
        ),
        (
            &|file| file.tensor("blk.1.attn_k.weight").dimensions = vec![1 << 40],
            "tensor `blk.1.attn_k.weight` of 4398046511104 bytes",
        ),
        (
            &|file| file.tensor("blk.1.attn_k.weight").dimensions = vec![1; 5],
            "has 5 dimensions",
        ),
        (
            &|file| file.tensor("blk.1.attn_k.weight").dimensions.reverse(),
            "has shape [8, 4], expected [4, 8]",
        ),
        (
            &|file| file.tensor("blk.1.attn_k.weight").offset = Some(u64::MAX - 31),
            "`blk.1.attn_k.weight` of 128 bytes",
        ),
        (
            &|file| file.tensor("blk.1.attn_k.weight").offset = Some(1 << 40),
            "ends beyond the file's",
        ),
        (
            &|file| file.tensor("blk.1.attn_k.weight").offset = Some(4),
            "has offset 4, no multiple of 32",
        ),
        (
            &|file| file.tensor("blk.1.attn_k.weight").offset = Some(0),
            "tensors `blk.1.attn_k.weight` and `token_embd.weight` overlap",
        ),
        (
            &|file| file.tensor("blk.1.attn_k.weight").bytes[20..24].copy_from_slice(&f32::NAN.to_le_bytes()),
            "tensor `blk.1.attn_k.weight` has 1 NaN or infinite numbers, the first, NaN, at index 5",
        ),
        (
            &|file| file.tensor("output_norm.weight").bytes.fill(0xff),
            "tensor `output_norm.weight` has 8 NaN",
        ),
        (
            &|file| {
                let mut bias = file.tensor("output_norm.weight").clone();
                bias.name = "blk.0.attn_q.bias".to_owned();
                file.tensors.push(bias);
            },
            "tensor `blk.0.attn_q.bias`: models with biases",
        ),
    ];
    for (change, words) in cases {
        let mut file = GgufFile::new();
        change(&mut file);
        let said = refused(open_gguf(&file.bytes()));
        assert!(said.contains(words), "expected {words}: {said}");
        assert!(said.contains("model `"), "{said}");
    }
}

#[test]
fn truncated_files_are_refused_at_every_length() {
    let bytes = GgufFile::new().bytes();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    // Less the padding at the end, which belongs to no tensor.
    let whole = bytes.len() - 32 + files::HIDDEN as usize * files::FEED_FORWARD as usize * 4 % 32;
    for length in (0..whole.min(bytes.len() - 1)).step_by(7) {
        fs::write(&path, &bytes[..length]).unwrap();
        let said = Checkpoint::open(&path).unwrap_err().to_string();
        let words = ["takes", "ends beyond", "does not start", "GGUF"];
        assert!(words.iter().any(|word| said.contains(word)), "{length}: {said}");
    }
    files::write_folder(folder.path(), &files::config(true), "F32", &files::tensors(true));
    let weights = folder.path().join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    for length in (0..bytes.len()).step_by(7) {
        fs::write(&weights, &bytes[..length]).unwrap();
        let said = Checkpoint::open(folder.path()).unwrap_err().to_string();
        let words = ["ends at byte", "header would take", "it has"];
        assert!(words.iter().any(|word| said.contains(word)), "{length}: {said}");
    }
}

#[test]
fn hostile_configurations_are_refused_by_field() {
    for (field, value, words) in [
        (
            "model_type",
            json!("gemma2"),
            "the architecture `gemma2`; only `llama` is known",
        ),
        ("model_type", Value::Null, "no model_type"),
        (
            "text_config",
            json!({"model_type": "llama"}),
            "it has a text_config",
        ),
        (
            "vocab_size",
            json!(7),
            "`model.embed_tokens.weight` has shape [6, 8], expected [7, 8]",
        ),
        ("vocab_size", Value::Null, "it has no vocab_size"),
        ("hidden_size", json!(-8), "hidden_size is -8"),
        (
            "num_hidden_layers",
            json!(4_000_000_000_u32),
            "`model.layers.2.input_layernorm.weight` is missing",
        ),
        (
            "num_key_value_heads",
            json!(3),
            "2 query heads are no multiple of 3 KV heads",
        ),
        ("head_dim", json!(3), "head_dim 3 is odd"),
        (
            "rms_norm_eps",
            json!(0),
            "rms_norm_eps is 0 and no finite number above 0",
        ),
        ("rope_theta", json!("x"), "rope_theta is \"x\" and no finite"),
        (
            "tie_word_embeddings",
            json!(1),
            "tie_word_embeddings is neither true nor false",
        ),
        ("attention_bias", json!(true), "attention_bias is true"),
        ("mlp_bias", json!(true), "mlp_bias is true"),
        ("hidden_act", json!("gelu"), "hidden_act is gelu"),
        (
            "partial_rotary_factor",
            json!(0.5),
            "partial_rotary_factor is not 1",
        ),
        ("eos_token_id", json!("5"), "eos_token_id is neither"),
        ("eos_token_id", json!(6), "token 6, which ends a text"),
    ] {
        let mut config = files::config(true);
        config[field] = value;
        let said = refused(open_folder(&config, &files::tensors(true)));
        assert!(said.contains(words), "expected {words}: {said}");
    }
}

#[test]
fn hostile_safetensors_files_are_refused_by_tensor() {
    let numbers = || files::stored("F32", &[1.0, 2.0]);
    let entry = |kind: &str, shape: Value, offsets: [u64; 2]| json!({"dtype": kind, "shape": shape, "data_offsets": offsets});
    let two = |a: Value, b: Value| files::with_header(&json!({"a": a, "b": b}).to_string(), &[0; 16]);
    let good = || entry("F32", json!([2]), [0, 8]);
    for (bytes, words) in [
        (vec![1, 2, 3], "it has 3 bytes"),
        (files::with_header("", &[]), "its header is wrong"),
        (
            u64::MAX.to_le_bytes().to_vec(),
            "header would take 18446744073709551615 bytes, but 0 follow",
        ),
        (files::with_header("[]", &[]), "an object of tensors"),
        (files::with_header("{\"a\": 3}", &[]), "tensor `a`: "),
        (
            two(good(), entry("Q4", json!([2]), [8, 16])),
            "tensor `b`: unknown variant `Q4`",
        ),
        (
            two(good(), entry("F32", json!([-2]), [8, 16])),
            "tensor `b`: invalid value",
        ),
        (
            two(good(), entry("F32", json!([2]), [8, 24])),
            "tensor `b` ends at byte 24 of the data, which have 16",
        ),
        (
            two(good(), entry("F32", json!([2]), [16, 8])),
            "tensor `b` of type F32 and shape [2]",
        ),
        (
            two(good(), entry("F32", json!([3]), [8, 16])),
            "tensor `b` of type F32 and shape [3]",
        ),
        (
            two(good(), entry("F32", json!([1_u64 << 62, 16]), [8, 16])),
            "tensor `b` of type F32 and shape",
        ),
        (
            two(good(), entry("F32", json!([3]), [4, 16])),
            "overlap or leave gaps",
        ),
        (
            two(good(), entry("F32", json!([1]), [12, 16])),
            "overlap or leave gaps",
        ),
        (
            two(good(), entry("F32", json!([1]), [8, 12])),
            "take 12 bytes, but 16 are there",
        ),
        (
            files::with_header(
                "{\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}",
                &[],
            ),
            "tensor `a` is there twice",
        ),
        (
            files::safetensors(&[("a", "I32", &[2], numbers())]),
            "tensor `a` is stored as I32",
        ),
        (
            files::safetensors(&[("a", "F8_E4M3", &[8], numbers())]),
            "tensor `a` is stored as F8_E4M3",
        ),
        (
            files::safetensors(&[("a", "F32", &[2], files::stored("F32", &[1.0, f32::INFINITY]))]),
            "tensor `a` has 1 NaN or infinite numbers, the first, inf, at index 1",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        fs::write(&path, bytes).unwrap();
        let said = SafetensorsFile::open(&path)
            .and_then(|mut file| file.read("a"))
            .unwrap_err()
            .to_string();
        assert!(said.contains(words), "expected {words}: {said}");
    }
    let tensors = without("model.layers.1.mlp.up_proj.weight", files::tensors(true));
    let said = refused(open_folder(&files::config(true), &tensors));
    assert!(
        said.contains("tensor `model.layers.1.mlp.up_proj.weight` is missing"),
        "{said}"
    );
    let mut tensors = files::tensors(true);
    tensors.push((
        "model.layers.0.self_attn.q_proj.bias".to_owned(),
        vec![1],
        vec![0.0],
    ));
    let said = refused(open_folder(&files::config(true), &tensors));
    assert!(
        said.contains("`model.layers.0.self_attn.q_proj.bias`: models with biases"),
        "{said}"
    );
}

#[test]
fn folders_that_are_no_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let open = |path: &Path| Checkpoint::open(path).unwrap_err().to_string();
    let said = open(folder.path());
    assert!(
        said.contains("config.json") && said.contains("cannot be read"),
        "{said}"
    );
    fs::write(folder.path().join("config.json"), files::config(true).to_string()).unwrap();
    let said = open(folder.path());
    assert!(
        said.contains("no model.safetensors and no model.safetensors.index.json"),
        "{said}"
    );
    let said = open(&folder.path().join("missing.gguf"));
    assert!(said.contains("missing.gguf`: it cannot be read"), "{said}");
    files::write_folder(folder.path(), &files::config(true), "F32", &files::tensors(true));
    let tokenizer = folder.path().join("tokenizer.json");
    for text in ["", "{}", "[1]", "{\"model\": 3}"] {
        fs::write(&tokenizer, text).unwrap();
        let said = Checkpoint::open(folder.path())
            .unwrap()
            .tokenizer()
            .unwrap_err()
            .to_string();
        assert!(said.contains("tokenizer.json`: it is no tokenizer"), "{said}");
    }
    let mut large = files::tokenizer();
    large["added_tokens"][0]["id"] = json!(6);
    fs::write(&tokenizer, large.to_string()).unwrap();
    let said = Checkpoint::open(folder.path()).unwrap().tokenizer();
    // Added tokens take the ids after the vocabulary: one more than the embedding has.
    large["model"]["vocab"]["zz"] = json!(5);
    fs::write(&tokenizer, large.to_string()).unwrap();
    let larger = Checkpoint::open(folder.path())
        .unwrap()
        .tokenizer()
        .unwrap_err()
        .to_string();
    assert!(said.is_ok() || said.unwrap_err().to_string().contains("has 6 rows"));
    assert!(
        larger.contains("ids up to 6, but tensor `model.embed_tokens.weight` has 6 rows"),
        "{larger}"
    );
}
