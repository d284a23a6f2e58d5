//! Checkpoints from files: what is read, and the field cases of files. What is refused is in `hostile_models`.

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
pub struct Opened(Checkpoint, #[allow(dead_code)] TempDir);

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
pub fn open_gguf(bytes: &[u8]) -> kvpack::Result<Opened> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    Ok(Opened(Checkpoint::open(&path)?, folder))
}

/// Opens the folder of the small model with another configuration and other tensors.
pub fn open_folder(config: &Value, tensors: &[Tensor]) -> kvpack::Result<Opened> {
    let folder = tempfile::tempdir().unwrap();
    files::write_folder(folder.path(), config, "F32", tensors);
    Ok(Opened(Checkpoint::open(folder.path())?, folder))
}

/// The error of opening and then reading everything.
pub fn refused(opened: kvpack::Result<impl DerefMut<Target = Checkpoint>>) -> String {
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
