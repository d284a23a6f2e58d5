//! Small checkpoints, written byte by byte: GGUF files and Hugging Face folders of one Llama.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

/// A tensor: its name, its shape with the outermost dimension first, its numbers.
pub type Tensor = (String, Vec<u64>, Vec<f32>);

/// The shape of the small model: 2 layers, 2 query heads and 1 KV head of 4 channels, a vocabulary of 6.
pub const HIDDEN: u64 = 8;
pub const HEAD_DIM: u64 = 4;
pub const Q_HEADS: u64 = 2;
pub const LAYERS: u64 = 2;
pub const FEED_FORWARD: u64 = 12;

/// Tokens whose ids are their places; the last two are a merge and a special token.
pub const TOKENS: [&str; 6] = ["a", "b", "c", "Ġ", "ab", "<end>"];

/// The tensors by their Hugging Face names; numbers count up from 0 in steps of 1/64, which every type holds.
pub fn tensors(tied: bool) -> Vec<Tensor> {
    let mut list: Vec<(String, Vec<u64>)> = vec![
        (
            "model.embed_tokens.weight".to_owned(),
            vec![TOKENS.len() as u64, HIDDEN],
        ),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    if !tied {
        list.push(("lm_head.weight".to_owned(), vec![TOKENS.len() as u64, HIDDEN]));
    }
    for layer in 0..LAYERS {
        for (part, shape) in [
            ("input_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![Q_HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.k_proj", vec![HEAD_DIM, HIDDEN]),
            ("self_attn.v_proj", vec![HEAD_DIM, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, Q_HEADS * HEAD_DIM]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("mlp.gate_proj", vec![FEED_FORWARD, HIDDEN]),
            ("mlp.up_proj", vec![FEED_FORWARD, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, FEED_FORWARD]),
        ] {
            list.push((format!("model.layers.{layer}.{part}.weight"), shape));
        }
    }
    let mut count = 0.0;
    list.into_iter()
        .map(|(name, shape)| {
            let numbers = (0..shape.iter().product()).map(|_| {
                count = (count + 1.0_f32) % 64.0;
                count / 64.0
            });
            let numbers = numbers.collect();
            (name, shape, numbers)
        })
        .collect()
}

/// The name of a tensor in GGUF files.
pub fn gguf_name(name: &str) -> String {
    let parts = [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers.", "blk."),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    parts
        .iter()
        .fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
}

// ---- GGUF ---------------------------------------------------------------------------------------------------------

/// A value of a GGUF field.
#[derive(Clone)]
pub enum Field {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    /// Type and bytes as they stand.
    Raw(u32, Vec<u8>),
}

/// A tensor of a GGUF file: name, dimensions with the innermost first, type, offset where it is not the next free one,
/// bytes.
#[derive(Clone)]
pub struct GgufTensor {
    pub name: String,
    pub dimensions: Vec<u64>,
    pub kind: u32,
    pub offset: Option<u64>,
    pub bytes: Vec<u8>,
}

/// A GGUF file before it is bytes.
#[derive(Clone)]
pub struct GgufFile {
    pub magic: [u8; 4],
    pub version: u32,
    pub fields: Vec<(String, Field)>,
    pub tensors: Vec<GgufTensor>,
    /// Claimed numbers of tensors and fields, where they are not the true ones.
    pub counts: Option<[u64; 2]>,
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

impl GgufFile {
    /// The small model in f32, tied, with a byte-level BPE tokenizer.
    pub fn new() -> GgufFile {
        let number = |name: &str, value: u64| (format!("llama.{name}"), Field::U32(value as u32));
        let tokenizer = |name: &str, value| (format!("tokenizer.ggml.{name}"), value);
        let fields = vec![
            ("general.architecture".to_owned(), Field::Text("llama".to_owned())),
            number("block_count", LAYERS),
            number("context_length", 64),
            number("embedding_length", HIDDEN),
            number("feed_forward_length", FEED_FORWARD),
            number("attention.head_count", Q_HEADS),
            number("attention.head_count_kv", 1),
            (
                "llama.attention.layer_norm_rms_epsilon".to_owned(),
                Field::F32(1e-5),
            ),
            ("llama.rope.freq_base".to_owned(), Field::F32(500.0)),
            tokenizer("model", Field::Text("gpt2".to_owned())),
            tokenizer("pre", Field::Text("gpt-2".to_owned())),
            tokenizer("tokens", Field::Texts(TOKENS.map(str::to_owned).to_vec())),
            tokenizer("token_type", Field::I32s(vec![1, 1, 1, 1, 1, 3])),
            tokenizer("merges", Field::Texts(vec!["a b".to_owned()])),
            tokenizer("eos_token_id", Field::U32(5)),
            tokenizer("add_bos_token", Field::Bool(false)),
        ];
        let tensors = tensors(true).into_iter().map(|(name, mut dimensions, numbers)| {
            dimensions.reverse();
            GgufTensor {
                name: gguf_name(&name),
                dimensions,
                kind: 0,
                offset: None,
                bytes: numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
            }
        });
        GgufFile {
            magic: *b"GGUF",
            version: 3,
            fields,
            tensors: tensors.collect(),
            counts: None,
        }
    }

    /// Sets a field, new or there already.
    pub fn set(&mut self, name: &str, value: Field) {
        self.fields.retain(|(known, _)| known != name);
        self.fields.push((name.to_owned(), value));
    }

    /// Takes a field away, which must be there.
    pub fn remove(&mut self, name: &str) {
        let before = self.fields.len();
        self.fields.retain(|(known, _)| known != name);
        assert_eq!(self.fields.len() + 1, before, "{name}");
    }

    /// A tensor by its name in the file.
    pub fn tensor(&mut self, name: &str) -> &mut GgufTensor {
        self.tensors
            .iter_mut()
            .find(|tensor| tensor.name == name)
            .unwrap_or_else(|| panic!("{name}"))
    }

    /// The file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.magic.to_vec();
        bytes.extend(self.version.to_le_bytes());
        for count in self
            .counts
            .unwrap_or([self.tensors.len() as u64, self.fields.len() as u64])
        {
            bytes.extend(count.to_le_bytes());
        }
        for (name, value) in &self.fields {
            text(&mut bytes, name);
            match value {
                Field::U32(value) => bytes.extend([4_u32, *value].iter().flat_map(|word| word.to_le_bytes())),
                Field::F32(value) => {
                    bytes.extend([6, value.to_bits()].iter().flat_map(|word| word.to_le_bytes()));
                }
                Field::Bool(value) => {
                    bytes.extend(7_u32.to_le_bytes());
                    bytes.push(u8::from(*value));
                }
                Field::Text(value) => {
                    bytes.extend(8_u32.to_le_bytes());
                    text(&mut bytes, value);
                }
                Field::Texts(values) => {
                    bytes.extend([9_u32, 8].iter().flat_map(|word| word.to_le_bytes()));
                    bytes.extend((values.len() as u64).to_le_bytes());
                    values.iter().for_each(|value| text(&mut bytes, value));
                }
                Field::I32s(values) => {
                    bytes.extend([9_u32, 5].iter().flat_map(|word| word.to_le_bytes()));
                    bytes.extend((values.len() as u64).to_le_bytes());
                    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
                }
                Field::Raw(kind, value) => {
                    bytes.extend(kind.to_le_bytes());
                    bytes.extend(value);
                }
            }
        }
        let mut data: Vec<u8> = Vec::new();
        for tensor in &self.tensors {
            text(&mut bytes, &tensor.name);
            bytes.extend((tensor.dimensions.len() as u32).to_le_bytes());
            bytes.extend(tensor.dimensions.iter().flat_map(|extent| extent.to_le_bytes()));
            bytes.extend(tensor.kind.to_le_bytes());
            bytes.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(data);
        bytes
    }
}

// ---- safetensors --------------------------------------------------------------------------------------------------

/// A safetensors file of tensors given by name, type, shape and bytes.
pub fn safetensors(tensors: &[(&str, &str, &[u64], Vec<u8>)]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, kind, shape, bytes) in tensors {
        let start = data.len();
        data.extend(bytes);
        let info = json!({"dtype": kind, "shape": shape, "data_offsets": [start, data.len()]});
        header.insert((*name).to_owned(), info);
    }
    with_header(&Value::Object(header).to_string(), &data)
}

/// A safetensors file with this header.
pub fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

/// Numbers as the bytes of a safetensors type.
pub fn stored(kind: &str, numbers: &[f32]) -> Vec<u8> {
    match kind {
        "F32" => numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
        "F16" => numbers
            .iter()
            .flat_map(|&number| half::f16::from_f32(number).to_le_bytes())
            .collect(),
        "BF16" => numbers
            .iter()
            .flat_map(|&number| half::bf16::from_f32(number).to_le_bytes())
            .collect(),
        other => panic!("{other}"),
    }
}

/// Tensors as a safetensors file of one type.
pub fn all_stored(kind: &str, tensors: &[Tensor]) -> Vec<u8> {
    let list: Vec<_> = tensors
        .iter()
        .map(|(name, shape, numbers)| (name.as_str(), kind, &shape[..], stored(kind, numbers)))
        .collect();
    safetensors(&list)
}

/// The config.json of the small model.
pub fn config(tied: bool) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": TOKENS.len(),
        "max_position_embeddings": 64,
        "hidden_size": HIDDEN,
        "num_attention_heads": Q_HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": LAYERS,
        "intermediate_size": FEED_FORWARD,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "tie_word_embeddings": tied,
        "eos_token_id": 5,
    })
}

/// The tokenizer.json of the small model.
pub fn tokenizer() -> Value {
    let vocabulary: serde_json::Map<_, _> = (0..)
        .zip(&TOKENS[..5])
        .map(|(id, token)| ((*token).to_owned(), json!(id)))
        .collect();
    json!({
        "version": "1.0",
        "added_tokens": [{"id": 5, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": ["a b"]},
    })
}

/// Writes the folder of the small model, in one file, with the tensors given.
pub fn write_folder(folder: &Path, config: &Value, kind: &str, tensors: &[Tensor]) {
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    fs::write(folder.join("tokenizer.json"), tokenizer().to_string()).unwrap();
    fs::write(folder.join("model.safetensors"), all_stored(kind, tensors)).unwrap();
}
