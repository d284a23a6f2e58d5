//! Checkpoints from files: what is read, what is refused and with which name.

use std::fs;
use std::ops::{Deref, DerefMut};
use std::path::Path;

use kvpack::capacity::{self, CapacityOptions, ModelShape};
use kvpack::checkpoint::safetensors::SafetensorsFile;
use kvpack::checkpoint::{Checkpoint, LlamaConfig, RopePairing, RopeScaling, Tensors};
use kvpack::pages::PageLayout;
use kvpack::reference;
use kvpack::work::{SlotRun, Status};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::common;
use crate::model_files::{self as files, Field, GgufFile, Tensor};

/// A checkpoint whose files are there as long as it is.
struct Opened(Checkpoint, #[allow(dead_code)] TempDir);

impl Deref for Opened {
    type Target = Checkpoint;

    fn deref(&self) -> &Checkpoint {
        &self.0
    }
}

impl DerefMut for Opened {
    fn deref_mut(&mut self) -> &mut Checkpoint {
        &mut self.0
    }
}

/// Opens a GGUF file with these bytes.
fn open_gguf(bytes: &[u8]) -> kvpack::Result<Opened> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    Ok(Opened(Checkpoint::open(&path)?, folder))
}

/// Opens the folder of the small model with another configuration and other tensors.
fn open_folder(config: &Value, tensors: &[Tensor]) -> kvpack::Result<Opened> {
    let folder = tempfile::tempdir().unwrap();
    files::write_folder(folder.path(), config, "F32", tensors);
    Ok(Opened(Checkpoint::open(folder.path())?, folder))
}

/// The error of opening and then reading everything.
fn refused(opened: kvpack::Result<impl DerefMut<Target = Checkpoint>>) -> String {
    let all = opened.and_then(|mut checkpoint| {
        let names: Vec<_> = checkpoint.config.tensors().map(|(name, _)| name).collect();
        for name in names {
            checkpoint.read(&name)?;
        }
        checkpoint.tokenizer()?;
        checkpoint.kv_scales()
    });
    all.unwrap_err().to_string()
}

fn without(name: &str, tensors: Vec<Tensor>) -> Vec<Tensor> {
    tensors.into_iter().filter(|tensor| tensor.0 != name).collect()
}

// ---- what is read -------------------------------------------------------------------------------------------------

#[test]
fn a_gguf_file_and_a_folder_of_one_model_agree() {
    let mut gguf = open_gguf(&GgufFile::new().bytes()).unwrap();
    let mut folder = open_folder(&files::config(true), &files::tensors(true)).unwrap();
    let expected = LlamaConfig {
        vocabulary: 6,
        context: 64,
        hidden: 8,
        q_heads: 2,
        kv_heads: 1,
        head_dim: 4,
        layers: 2,
        feed_forward: 12,
        norm_epsilon: 1e-5,
        rope_theta: 500.0,
        rope_pairing: RopePairing::Halves,
        rope_scaling: RopeScaling::None,
        tied: true,
        end_of_text: vec![5],
    };
    assert_eq!(folder.config, expected);
    let expected = LlamaConfig {
        rope_pairing: RopePairing::Neighbours,
        norm_epsilon: f64::from(1e-5_f32),
        ..expected
    };
    assert_eq!(gguf.config, expected);
    let mut read = 0;
    for (name, shape, numbers) in files::tensors(true) {
        for checkpoint in [&mut gguf.0, &mut folder.0] {
            assert_eq!(checkpoint.shape(&name), Some(shape.clone()), "{name}");
            assert_eq!(checkpoint.read(&name).unwrap(), numbers, "{name}");
        }
        read += 1;
    }
    assert_eq!(gguf.config.tensors().count(), read);
    for checkpoint in [&mut gguf.0, &mut folder.0] {
        let tokenizer = checkpoint.tokenizer().unwrap();
        assert_eq!(tokenizer.encode("ab ca<end>b").unwrap(), [4, 3, 2, 0, 5, 1]);
        assert_eq!(tokenizer.decode(&[4, 3, 2, 5, 1]).unwrap(), "ab cb");
        assert_eq!(tokenizer.size(), 6);
        assert_eq!(checkpoint.kv_scales().unwrap(), None);
        let said = checkpoint.read("model.layers.2.mlp.up_proj.weight").unwrap_err();
        assert!(said.to_string().contains("is missing"), "{said}");
    }
}

#[test]
fn sharded_folders_are_read_by_their_index() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = files::tensors(false);
    files::write_folder(folder.path(), &files::config(false), "F32", &tensors);
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let (one, two) = tensors.split_at(7);
    fs::write(
        folder.path().join("a.safetensors"),
        files::all_stored("BF16", one),
    )
    .unwrap();
    fs::write(folder.path().join("b.safetensors"), files::all_stored("F16", two)).unwrap();
    let without_index = Checkpoint::open(folder.path()).unwrap_err().to_string();
    assert!(
        without_index.contains("2 safetensors files and no"),
        "{without_index}"
    );

    let index = |shard: &dyn Fn(usize) -> &'static str| {
        let map: serde_json::Map<_, _> = tensors
            .iter()
            .enumerate()
            .map(|(i, tensor)| (tensor.0.clone(), json!(shard(i))))
            .collect();
        let text = json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string();
        fs::write(folder.path().join("model.safetensors.index.json"), text).unwrap();
        Checkpoint::open(folder.path())
    };
    let by_place = |i| if i < 7 { "a.safetensors" } else { "b.safetensors" };
    let mut checkpoint = index(&by_place).unwrap();
    for (name, _, numbers) in &tensors {
        assert_eq!(checkpoint.read(name).unwrap(), *numbers, "{name}");
    }
    let at = |wrong: usize, file: &'static str| {
        refused(index(&move |i| if i == wrong { file } else { by_place(i) }).map(Box::new))
    };
    let name = &tensors[9].0;
    let said = at(9, "a.safetensors");
    assert!(
        said.contains(&format!("`{name}` is not in `a.safetensors`")),
        "{said}"
    );
    for outside in ["../b.safetensors", "/b.safetensors", ".."] {
        let said = at(9, outside);
        assert!(
            said.contains(name) && said.contains("no file of this folder"),
            "{said}"
        );
    }
    let said = at(9, "c.safetensors");
    assert!(
        said.contains("c.safetensors") && said.contains("cannot be read"),
        "{said}"
    );
}

#[test]
fn rope_scaling_is_read_from_both_kinds_of_files() {
    let with = |field: &str, value: Value| {
        let mut config = files::config(true);
        config[field] = value;
        open_folder(&config, &files::tensors(true)).map(|opened| opened.0.config)
    };
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };
    let fields = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4,
        "original_max_position_embeddings": 8192, "rope_theta": 7.0});
    assert_eq!(with("rope_scaling", fields.clone()).unwrap().rope_scaling, llama3);
    let newer = with("rope_parameters", fields).unwrap();
    assert_eq!((newer.rope_scaling, newer.rope_theta), (llama3, 7.0));
    let linear = with("rope_scaling", json!({"type": "linear", "factor": 2})).unwrap();
    assert_eq!(linear.rope_scaling, RopeScaling::Linear { factor: 2.0 });
    for (fields, words) in [
        (
            json!({"type": "yarn", "factor": 2}),
            "rope_scaling.rope_type is yarn",
        ),
        (json!({"type": "linear"}), "no rope_scaling.factor"),
        (json!({"type": "linear", "factor": 0}), "rope_scaling.factor is 0"),
        (json!(3), "rope_scaling is no object"),
        (
            json!({"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
                "original_max_position_embeddings": 8192}),
            "low_freq_factor 4 is not below",
        ),
    ] {
        let said = with("rope_scaling", fields).unwrap_err().to_string();
        assert!(said.contains(words), "{said}");
    }

    let mut file = GgufFile::new();
    file.set("llama.rope.scaling.type", Field::Text("linear".to_owned()));
    file.set("llama.rope.scaling.factor", Field::F32(4.0));
    let config = open_gguf(&file.bytes()).unwrap().0.config;
    assert_eq!(config.rope_scaling, RopeScaling::Linear { factor: 4.0 });
    file.set("llama.rope.scaling.type", Field::Text("yarn".to_owned()));
    let said = refused(open_gguf(&file.bytes()));
    assert!(said.contains("`llama.rope.scaling.type` is `yarn`"), "{said}");

    let mut file = GgufFile::new();
    let mut divisors = file.tensor("output_norm.weight").clone();
    divisors.name = "rope_freqs.weight".to_owned();
    divisors.dimensions = vec![2];
    divisors.bytes = [1.0_f32, 8.0]
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect();
    file.tensors.push(divisors);
    let config = open_gguf(&file.bytes()).unwrap().0.config;
    assert_eq!(config.rope_scaling, RopeScaling::Divisors(vec![1.0, 8.0]));
    file.tensor("rope_freqs.weight").bytes[..4].fill(0);
    let said = refused(open_gguf(&file.bytes()));
    assert!(said.contains("`rope_freqs.weight` has 0 at 0"), "{said}");
}

#[test]
fn every_end_of_text_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = files::config(true);
    config["eos_token_id"] = json!([5, 1]);
    files::write_folder(folder.path(), &config, "F32", &files::tensors(true));
    let generation = folder.path().join("generation_config.json");
    fs::write(&generation, r#"{"eos_token_id": [1, 2]}"#).unwrap();
    assert_eq!(
        Checkpoint::open(folder.path()).unwrap().config.end_of_text,
        [5, 1, 2]
    );
    fs::write(&generation, r#"{"eos_token_id": 6}"#).unwrap();
    let said = Checkpoint::open(folder.path()).unwrap_err().to_string();
    assert!(
        said.contains("token 6, which ends a text, is beyond the vocabulary of 6"),
        "{said}"
    );

    let mut file = GgufFile::new();
    file.set("tokenizer.ggml.eot_token_id", Field::U32(2));
    assert_eq!(open_gguf(&file.bytes()).unwrap().config.end_of_text, [5, 2]);
}

#[test]
fn words_are_cut_as_the_file_says() {
    let ids = |pre: &str, text: &str| {
        let mut file = GgufFile::new();
        let tokens = ["1", "2", "12", "121", "1212", "Ġ"].map(str::to_owned).to_vec();
        file.set("tokenizer.ggml.tokens", Field::Texts(tokens));
        let merges = ["1 2", "12 12", "12 1"].map(str::to_owned).to_vec();
        file.set("tokenizer.ggml.merges", Field::Texts(merges));
        file.set("tokenizer.ggml.pre", Field::Text(pre.to_owned()));
        file.set("tokenizer.ggml.token_type", Field::I32s(vec![1; 6]));
        open_gguf(&file.bytes())
            .unwrap()
            .tokenizer()
            .unwrap()
            .encode(text)
            .unwrap()
    };
    // Numbers whole, digit by digit, and by threes.
    assert_eq!(ids("gpt-2", "1212"), [4]);
    assert_eq!(ids("smollm", "1212"), [0, 1, 0, 1]);
    assert_eq!(ids("llama-bpe", "1212"), [3, 1]);

    // Files of llama-bpe take a word that is a token as it is, merged or not, and start with a token of their own.
    let mut file = GgufFile::new();
    file.set("tokenizer.ggml.merges", Field::Texts(vec![]));
    file.set("tokenizer.ggml.bos_token_id", Field::U32(5));
    let mut ids = |pre: &str, bos: Option<bool>| {
        file.set("tokenizer.ggml.pre", Field::Text(pre.to_owned()));
        file.remove("tokenizer.ggml.add_bos_token");
        file.fields
            .extend(bos.map(|bos| ("tokenizer.ggml.add_bos_token".to_owned(), Field::Bool(bos))));
        let ids = open_gguf(&file.bytes())
            .unwrap()
            .tokenizer()
            .unwrap()
            .encode("ab")
            .unwrap();
        file.set("tokenizer.ggml.add_bos_token", Field::Bool(false));
        ids
    };
    assert_eq!(ids("llama-bpe", None), [5, 4]);
    assert_eq!(ids("llama-bpe", Some(false)), [4]);
    assert_eq!(ids("gpt-2", None), [0, 1]);
    assert_eq!(ids("gpt-2", Some(true)), [5, 0, 1]);
}

/// The model of `tools/fetch_model.sh`, where `KVPACK_MODEL` names it.
#[test]
fn the_trained_model_gives_the_expected_token_ids() {
    let Some(path) = std::env::var_os("KVPACK_MODEL") else {
        common::say(
            "kvpack: skipped the_trained_model_gives_the_expected_token_ids: KVPACK_MODEL names no model",
        );
        return;
    };
    let tokenizer = Checkpoint::open(Path::new(&path)).unwrap().tokenizer().unwrap();
    let expected = common::json("tests/data/smol_expected.json");
    let text = fs::read_to_string(common::path("tests/data/text.txt")).unwrap();
    let ids = tokenizer.encode(&text).unwrap();
    assert_eq!(ids.len(), 765);
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let sum: String = Sha256::digest(&bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(expected["token_ids_sha256"], sum.as_str());
    assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    for case in expected["greedy_f32_cache"].as_array().unwrap() {
        let prompt = tokenizer.encode(case["prompt"].as_str().unwrap()).unwrap();
        assert_eq!(case["prompt_ids"], json!(prompt));
        let continuation: Vec<u32> = serde_json::from_value(case["continuation_ids"].clone()).unwrap();
        assert_eq!(case["text"], tokenizer.decode(&continuation).unwrap().as_str());
    }
}

// ---- field cases --------------------------------------------------------------------------------------------------

#[test]
fn mod_01_a_tied_head_is_the_embedding() {
    // hidden x embedding, by hand.
    let logits = |checkpoint: &mut Checkpoint| {
        let head = checkpoint.read(checkpoint.config.head()).unwrap();
        let h = [1.0_f32, 0.0, -2.0, 0.0, 0.0, 0.0, 0.5, 0.0];
        head.chunks(8)
            .map(|row| row.iter().zip(h).map(|(weight, h)| weight * h).sum())
            .collect::<Vec<f32>>()
    };
    let embedding = &files::tensors(true)[0].2;
    let expected: Vec<f32> = embedding
        .chunks(8)
        .map(|row| row[0] - 2.0 * row[2] + 0.5 * row[6])
        .collect();
    assert!(expected[0] != expected[5]);
    let mut gguf = open_gguf(&GgufFile::new().bytes()).unwrap();
    let mut folder = open_folder(&files::config(true), &files::tensors(true)).unwrap();
    // A head that is there all the same is not used.
    let mut both = open_folder(&files::config(true), &files::tensors(false)).unwrap();
    for checkpoint in [&mut gguf.0, &mut folder.0, &mut both.0] {
        assert!(checkpoint.config.tied);
        assert_eq!(logits(checkpoint), expected);
    }
    // The other branch: an untied model has a head of its own, and needs it.
    let mut untied = open_folder(&files::config(false), &files::tensors(false)).unwrap();
    assert!(!untied.config.tied);
    assert_eq!(
        untied.0.read(untied.0.config.head()).unwrap(),
        files::tensors(false)[2].2
    );
    assert_ne!(logits(&mut untied), expected);
    let said = refused(open_folder(&files::config(false), &files::tensors(true)));
    assert!(said.contains("tensor `lm_head.weight` is missing"), "{said}");
    let mut with_head = GgufFile::new();
    let mut head = with_head.tensor("token_embd.weight").clone();
    head.name = "output.weight".to_owned();
    head.bytes.fill(0);
    with_head.tensors.push(head);
    let mut untied = open_gguf(&with_head.bytes()).unwrap();
    assert!(!untied.config.tied);
    assert_eq!(logits(&mut untied), [0.0; 6]);
}

#[test]
fn mod_03_head_dim_need_not_be_hidden_over_heads() {
    let mut config = files::config(true);
    for (field, value) in [
        ("hidden_size", 2560),
        ("num_attention_heads", 32),
        ("num_key_value_heads", 8),
        ("head_dim", 128),
        ("num_hidden_layers", 1),
        ("intermediate_size", 8),
    ] {
        config[field] = json!(value);
    }
    let shapes: [(&str, &[u64]); 11] = [
        ("model.embed_tokens", &[6, 2560]),
        ("model.norm", &[2560]),
        ("model.layers.0.input_layernorm", &[2560]),
        ("model.layers.0.self_attn.q_proj", &[4096, 2560]),
        ("model.layers.0.self_attn.k_proj", &[1024, 2560]),
        ("model.layers.0.self_attn.v_proj", &[1024, 2560]),
        ("model.layers.0.self_attn.o_proj", &[2560, 4096]),
        ("model.layers.0.post_attention_layernorm", &[2560]),
        ("model.layers.0.mlp.gate_proj", &[8, 2560]),
        ("model.layers.0.mlp.up_proj", &[8, 2560]),
        ("model.layers.0.mlp.down_proj", &[2560, 8]),
    ];
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in shapes {
        let start = end;
        end += shape.iter().product::<u64>() * 2;
        header.insert(
            format!("{name}.weight"),
            json!({"dtype": "F16", "shape": shape, "data_offsets": [start, end]}),
        );
    }
    let header = Value::Object(header).to_string();
    let folder = tempfile::tempdir().unwrap();
    let weights = folder.path().join("model.safetensors");
    fs::write(&weights, files::with_header(&header, &[])).unwrap();
    // Zeros that take no room on the disk.
    let file = fs::File::options().write(true).open(&weights).unwrap();
    file.set_len(8 + header.len() as u64 + end).unwrap();
    let open = |config: &Value| {
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        Checkpoint::open(folder.path())
    };
    let mut checkpoint = open(&config).unwrap();
    assert_eq!(checkpoint.config.head_dim, 128);
    let q = "model.layers.0.self_attn.q_proj.weight";
    assert_eq!(checkpoint.shape(q), Some(vec![4096, 2560]));
    assert_eq!(checkpoint.read(q).unwrap().len(), 4096 * 2560);
    // The cache is sized by 128: K and V, 8 heads, 2 bytes.
    let shape = checkpoint.config.cache_shape();
    assert_eq!(
        shape,
        ModelShape {
            layers: 1,
            q_heads: 32,
            kv_heads: 8,
            k_head_dim: 128,
            v_head_dim: 128
        }
    );
    let capacity = capacity::run(&CapacityOptions {
        shape,
        pairs: vec!["f16".parse().unwrap()],
        context: 64,
        batch: 1,
        window: 0,
        sink_tokens: 0,
        page_tokens: None,
        budget: None,
    })
    .unwrap();
    assert_eq!(capacity.rows[0].bytes_per_token, f64::from(2 * 8 * 128 * 2));
    // Taken as 2560 / 32 = 80, the tensors do not fit, and that is said.
    config["head_dim"] = Value::Null;
    let said = open(&config).unwrap_err().to_string();
    assert!(
        said.contains(q) && said.contains("[4096, 2560], expected [2560, 2560]"),
        "{said}"
    );

    let mut file = GgufFile::new();
    file.set("llama.attention.key_length", Field::U32(6));
    let said = refused(open_gguf(&file.bytes()));
    assert!(
        said.contains("`blk.0.attn_q.weight` has shape [8, 8], expected [12, 8]"),
        "{said}"
    );
    file.set("llama.attention.key_length", Field::U32(4));
    file.set("llama.attention.value_length", Field::U32(8));
    let said = refused(open_gguf(&file.bytes()));
    assert!(said.contains("`llama.attention.value_length` is 8"), "{said}");
}

#[test]
fn mod_09_tensors_need_no_alignment() {
    let numbers = [1.5_f32, -2.25, 3e-39, f32::MAX];
    let mut data: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    data.extend(half::f16::from_f32(0.1).to_le_bytes());
    let mut header = json!({
        "numbers": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "empty": {"dtype": "F16", "shape": [0], "data_offsets": [16, 16]},
        "half": {"dtype": "F16", "shape": [], "data_offsets": [16, 18]},
    })
    .to_string();
    // The data start at byte 8 + 0xa766, no multiple of 4.
    header += &" ".repeat(0xa766 - header.len());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("odd.safetensors");
    fs::write(&path, files::with_header(&header, &data)).unwrap();
    let mut file = SafetensorsFile::open(&path).unwrap();
    assert_eq!(file.read("numbers").unwrap(), numbers);
    assert_eq!(file.read("empty").unwrap(), [0.0; 0]);
    assert_eq!(file.read("half").unwrap(), [half::f16::from_f32(0.1).to_f32()]);
    assert_eq!(file.shape("half"), Some(vec![]));
    assert_eq!(file.names().collect::<Vec<_>>(), ["empty", "half", "numbers"]);
}

/// The small model with these scales beside its tensors, each by the name after `self_attn.`.
fn with_scales(scales: &[(u32, &str, &[f32])]) -> kvpack::Result<Opened> {
    let mut tensors = files::tensors(true);
    for (layer, name, values) in scales {
        let shape = if values.len() == 1 {
            vec![]
        } else {
            vec![values.len() as u64]
        };
        let name = format!("model.layers.{layer}.self_attn.{name}");
        tensors.push((name, shape, values.to_vec()));
    }
    open_folder(&files::config(true), &tensors)
}

#[test]
fn mod_10_stored_scales_are_checked_and_used() {
    let mut given = with_scales(&[
        (0, "k_scale", &[0.5]),
        (0, "v_scale", &[2.0]),
        (1, "k_proj.k_scale", &[0.25]),
        (1, "attn.v_scale", &[0.125]),
    ])
    .unwrap();
    let scales = given.kv_scales().unwrap().unwrap();
    assert_eq!(scales, [[0.5, 2.0], [0.25, 0.125]]);
    let mut both = with_scales(&[(0, "kv_scale", &[0.5]), (1, "kv_scale", &[2.0])]).unwrap();
    assert_eq!(both.kv_scales().unwrap().unwrap(), [[0.5; 2], [2.0; 2]]);

    // 0.5 is what the codes are made with: 3 / 0.5 = 6 is E4M3 0x4c, and reads back as 3.
    let page = PageLayout::new("fp8".parse().unwrap(), 1, 8, 8).unwrap();
    let run = SlotRun {
        page: 0,
        slot: 0,
        count: 1,
        source: 0,
    };
    let pack = |scale: f32| {
        let mut pool = vec![0; page.words as usize];
        let mut status = Status::default();
        reference::quantize(
            &page,
            &[run],
            |_: &SlotRun, _, _, _| 3.0,
            scale,
            &mut pool,
            &mut status,
        );
        pool[0]
    };
    assert_eq!(pack(scales[0][0]), 0x4c4c_4c4c);
    assert_ne!(pack(1.0), 0x4c4c_4c4c, "a scale that is ignored would be seen");

    for (values, words) in [
        (&[f32::NAN][..], "the first, NaN, at index 0"),
        (&[f32::INFINITY], "the first, inf, at index 0"),
        (&[0.0], "is 0: a scale"),
        (&[-0.5], "is -0.5: a scale"),
        (&[1e-30], "must be finite and lie in [2^-90, 2^118]"),
        (&[0.5, 0.5], "has shape [2]: a scale of K or V is one number"),
        (&[], "has shape [0]"),
    ] {
        for name in ["k_scale", "v_scale", "k_proj.k_scale", "v_proj.output_scale"] {
            let said = refused(with_scales(&[(1, name, values)]));
            let tensor = format!("tensor `model.layers.1.self_attn.{name}`");
            assert!(said.contains(&tensor) && said.contains(words), "{said}");
        }
    }
    let said = refused(with_scales(&[
        (0, "k_scale", &[0.5]),
        (0, "v_scale", &[0.5]),
        (1, "k_scale", &[0.5]),
    ]));
    assert!(
        said.contains("`model.layers.1.self_attn.v_scale` is missing"),
        "{said}"
    );
}

// ---- what is refused ----------------------------------------------------------------------------------------------

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
