//! The shape of a Llama from a `config.json` and from the fields of a GGUF file.

use std::path::Path;

use serde_json::{Map, Value};

use super::gguf::{Field, Gguf};
use super::llama::LlamaConfig;
use super::read_whole;
use crate::capacity::config::Config;
use crate::error::Result;
use crate::rope::{RopePairing, RopeScaling};

/// What transformers takes where a file is silent.
const THETA: f64 = 10_000.0;

impl LlamaConfig {
    /// The shape from the `config.json` of a Hugging Face folder, and the ids that end a text also from its
    /// `generation_config.json`, if there is one.
    ///
    /// # Errors
    /// [`crate::Error::Usage`] with the field's name for what is missing or wrong, and for models of another
    /// architecture.
    pub fn from_folder(folder: &Path) -> Result<LlamaConfig> {
        let config = Config::read(&folder.join("config.json"))?;
        only_llama(&config)?;
        let needed = |field: &str| {
            config
                .number(field)?
                .ok_or_else(|| config.refuse(format!("it has no {field}")))
        };
        let q_heads = needed("num_attention_heads")?;
        let (rope_theta, rope_scaling) = rope(&config)?;
        let mut llama = LlamaConfig {
            vocabulary: needed("vocab_size")?,
            context: config.number("max_position_embeddings")?.unwrap_or(2048),
            hidden: needed("hidden_size")?,
            q_heads,
            kv_heads: config.number("num_key_value_heads")?.unwrap_or(q_heads),
            head_dim: config
                .head_dim()?
                .ok_or_else(|| config.refuse("it has no head_dim".to_owned()))?,
            layers: needed("num_hidden_layers")?,
            feed_forward: needed("intermediate_size")?,
            norm_epsilon: positive(&config, "rms_norm_eps", config.value("rms_norm_eps"))?.unwrap_or(1e-6),
            rope_theta,
            rope_pairing: RopePairing::Halves,
            rope_scaling,
            tied: flag(&config, "tie_word_embeddings")?,
            end_of_text: Vec::new(),
        };
        llama.end_of_text = ids(&config, config.value("eos_token_id"))?;
        let generation = folder.join("generation_config.json");
        if generation.exists() {
            let generation: Value = serde_json::from_slice(&read_whole(&generation)?)
                .map_err(|error| config.refuse(format!("`{}` is no JSON: {error}", generation.display())))?;
            for id in ids(
                &config,
                generation.get("eos_token_id").filter(|value| !value.is_null()),
            )? {
                if !llama.end_of_text.contains(&id) {
                    llama.end_of_text.push(id);
                }
            }
        }
        llama.check().map_err(|reason| config.refuse(reason))?;
        Ok(llama)
    }

    /// The shape from the fields of a GGUF file.
    ///
    /// # Errors
    /// As [`LlamaConfig::from_folder`].
    pub(super) fn from_gguf(file: &mut Gguf) -> Result<LlamaConfig> {
        match file.field("general.architecture") {
            Some(Field::Text(name)) if name == "llama" => {}
            Some(Field::Text(name)) => {
                return Err(file.refuse(format!("its architecture is `{name}`; only `llama` is known")));
            }
            _ => return Err(file.refuse("it has no field `general.architecture`")),
        }
        for (field, expected) in [
            ("split.count", 1),
            ("llama.expert_count", 0),
            ("llama.attention.sliding_window", 0),
        ] {
            let value = integer(file, field)?;
            if value.is_some_and(|value| value != expected && value != 0) {
                return Err(file.refuse(format!(
                    "field `{field}` is {}: such models are not read",
                    value.unwrap_or(0)
                )));
            }
        }
        let needed = |field: &str| {
            integer(file, field)?.ok_or_else(|| file.refuse(format!("it has no field `{field}`")))
        };
        let (hidden, q_heads) = (
            needed("llama.embedding_length")?,
            needed("llama.attention.head_count")?,
        );
        let head_dim = match integer(file, "llama.attention.key_length")? {
            Some(head_dim) => head_dim,
            None if q_heads > 0 && hidden.is_multiple_of(q_heads) => hidden / q_heads,
            None => {
                return Err(file.refuse(format!(
                    "it has no field `llama.attention.key_length`, and `llama.embedding_length` {hidden} is no multiple \
                     of `llama.attention.head_count` {q_heads}"
                )));
            }
        };
        for field in ["llama.attention.value_length", "llama.rope.dimension_count"] {
            if let Some(value) = integer(file, field)?
                && value != head_dim
            {
                return Err(file.refuse(format!(
                    "field `{field}` is {value} where a key head has {head_dim} channels: such models are not read"
                )));
            }
        }
        let epsilon = "llama.attention.layer_norm_rms_epsilon";
        let vocabulary = match file.shape("token_embd.weight") {
            Some(&[rows, _]) => u32::try_from(rows).unwrap_or(0),
            _ => return Err(file.refuse("tensor `token_embd.weight` is missing or no matrix")),
        };
        for (what, count) in [
            (
                "llama.vocab_size",
                integer(file, "llama.vocab_size")?.map(u64::from),
            ),
            (
                "tokenizer.ggml.tokens",
                match file.field("tokenizer.ggml.tokens") {
                    Some(Field::Array(array)) => Some(array.count),
                    _ => None,
                },
            ),
        ] {
            if let Some(count) = count
                && count != u64::from(vocabulary)
            {
                return Err(file.refuse(format!(
                    "tensor `token_embd.weight` has {vocabulary} rows, but field `{what}` makes it {count} tokens"
                )));
            }
        }
        let mut llama = LlamaConfig {
            vocabulary,
            context: needed("llama.context_length")?,
            hidden,
            q_heads,
            kv_heads: integer(file, "llama.attention.head_count_kv")?.unwrap_or(q_heads),
            head_dim,
            layers: needed("llama.block_count")?,
            feed_forward: needed("llama.feed_forward_length")?,
            norm_epsilon: float(file, epsilon)?
                .ok_or_else(|| file.refuse(format!("it has no field `{epsilon}`")))?,
            rope_theta: float(file, "llama.rope.freq_base")?.unwrap_or(THETA),
            rope_pairing: RopePairing::Neighbours,
            rope_scaling: gguf_scaling(file)?,
            tied: file.shape("output.weight").is_none(),
            end_of_text: Vec::new(),
        };
        for field in ["eos", "eot", "eom"] {
            if let Some(id) = integer(file, &format!("tokenizer.ggml.{field}_token_id"))?
                && !llama.end_of_text.contains(&id)
            {
                llama.end_of_text.push(id);
            }
        }
        llama.check().map_err(|reason| file.refuse(reason))?;
        if let Some(shape) = file.shape(DIVISORS) {
            let expected = [u64::from(head_dim / 2)];
            if *shape != expected {
                return Err(file.refuse(format!(
                    "tensor `{DIVISORS}` has shape {shape:?}, expected {expected:?}"
                )));
            }
            let divisors = file.read(DIVISORS)?;
            if let Some(i) = divisors.iter().position(|&divisor| !(divisor > 0.0)) {
                return Err(file.refuse(format!(
                    "tensor `{DIVISORS}` has {} at {i}: divisors must be above 0",
                    divisors[i]
                )));
            }
            llama.rope_scaling = RopeScaling::Divisors(divisors);
        }
        Ok(llama)
    }

    /// What must hold between the numbers, whatever the file.
    fn check(&self) -> std::result::Result<(), String> {
        let counts = [
            ("vocabulary", self.vocabulary),
            ("context", self.context),
            ("hidden size", self.hidden),
            ("query heads", self.q_heads),
            ("KV heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("layers", self.layers),
            ("feed-forward size", self.feed_forward),
        ];
        if let Some((what, _)) = counts.iter().find(|(_, count)| *count == 0) {
            return Err(format!("its {what} is 0"));
        }
        if !self.q_heads.is_multiple_of(self.kv_heads) {
            return Err(format!(
                "{} query heads are no multiple of {} KV heads",
                self.q_heads, self.kv_heads
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("head_dim {} is odd: RoPE turns pairs", self.head_dim));
        }
        if let Some(id) = self.end_of_text.iter().find(|&&id| id >= self.vocabulary) {
            return Err(format!(
                "token {id}, which ends a text, is beyond the vocabulary of {}",
                self.vocabulary
            ));
        }
        Ok(())
    }
}

/// The tensor of RoPE's divisors in GGUF files.
const DIVISORS: &str = "rope_freqs.weight";

fn integer(file: &Gguf, name: &str) -> Result<Option<u32>> {
    let number = match file.field(name) {
        None => return Ok(None),
        Some(Field::Integer(number)) => u32::try_from(*number).ok(),
        Some(_) => None,
    };
    let wrong = || {
        file.refuse(format!(
            "field `{name}` is no whole number from 0 to {}",
            u32::MAX
        ))
    };
    number.map(Some).ok_or_else(wrong)
}

fn float(file: &Gguf, name: &str) -> Result<Option<f64>> {
    match file.field(name) {
        None => Ok(None),
        Some(Field::Float(value)) if *value > 0.0 && value.is_finite() => Ok(Some(*value)),
        Some(_) => Err(file.refuse(format!("field `{name}` is no finite number above 0"))),
    }
}

fn gguf_scaling(file: &Gguf) -> Result<RopeScaling> {
    let name = "llama.rope.scaling.type";
    match file.field(name) {
        None => Ok(RopeScaling::None),
        Some(Field::Text(kind)) if kind == "none" => Ok(RopeScaling::None),
        Some(Field::Text(kind)) if kind == "linear" => {
            let factor = "llama.rope.scaling.factor";
            let missing = || file.refuse(format!("it has no field `{factor}`"));
            Ok(RopeScaling::Linear {
                factor: float(file, factor)?.ok_or_else(missing)?,
            })
        }
        Some(Field::Text(kind)) => Err(file.refuse(format!(
            "field `{name}` is `{kind}`; known are none and linear, and llama3 by the tensor `{DIVISORS}`"
        ))),
        Some(_) => Err(file.refuse(format!("field `{name}` is no text"))),
    }
}

/// Refuses what the forward pass of a plain Llama does not compute.
fn only_llama(config: &Config) -> Result<()> {
    if config.is_nested() {
        return Err(config.refuse("it has a text_config: models of text and more are not read".to_owned()));
    }
    let kind = config.value("model_type").and_then(Value::as_str);
    if kind != Some("llama") {
        let shown = kind.map_or("no model_type".to_owned(), |kind| {
            format!("the architecture `{}`", short(kind))
        });
        return Err(config.refuse(format!("it has {shown}; only `llama` is known")));
    }
    for field in ["attention_bias", "mlp_bias"] {
        if flag(config, field)? {
            return Err(config.refuse(format!("{field} is true: such models are not read")));
        }
    }
    match config.value("hidden_act").map(Value::as_str) {
        None | Some(Some("silu" | "swish")) => {}
        Some(other) => {
            return Err(config.refuse(format!(
                "hidden_act is {}; only silu is known",
                short(other.unwrap_or("no text"))
            )));
        }
    }
    match config.value("partial_rotary_factor").map(Value::as_f64) {
        None | Some(Some(1.0)) => Ok(()),
        Some(_) => Err(config.refuse("partial_rotary_factor is not 1: such models are not read".to_owned())),
    }
}

/// Theta and scaling: at the top with `rope_scaling`, or both within `rope_parameters`.
fn rope(config: &Config) -> Result<(f64, RopeScaling)> {
    let object = |field: &str| match config.value(field) {
        None => Ok(None),
        Some(Value::Object(object)) => Ok(Some(object)),
        Some(_) => Err(config.refuse(format!("{field} is no object"))),
    };
    let (name, fields) = match object("rope_parameters")? {
        Some(fields) => ("rope_parameters", Some(fields)),
        None => ("rope_scaling", object("rope_scaling")?),
    };
    let inner = fields.and_then(|fields| fields.get("rope_theta"));
    let theta = positive(config, "rope_theta", inner.or_else(|| config.value("rope_theta")))?;
    let scaling = match fields {
        None => RopeScaling::None,
        Some(fields) => scaling(config, name, fields)?,
    };
    Ok((theta.unwrap_or(THETA), scaling))
}

fn scaling(config: &Config, name: &str, fields: &Map<String, Value>) -> Result<RopeScaling> {
    let kind = fields.get("rope_type").or_else(|| fields.get("type"));
    let needed = |field: &str| {
        let full = format!("{name}.{field}");
        positive(config, &full, fields.get(field))?.ok_or_else(|| config.refuse(format!("it has no {full}")))
    };
    match kind.map(Value::as_str) {
        None | Some(Some("default")) => Ok(RopeScaling::None),
        Some(Some("linear")) => Ok(RopeScaling::Linear {
            factor: needed("factor")?,
        }),
        Some(Some("llama3")) => {
            let context = needed("original_max_position_embeddings")?;
            if context.fract() != 0.0 || context > u32::MAX.into() {
                return Err(config.refuse(format!(
                    "{name}.original_max_position_embeddings is {context} and no number of positions"
                )));
            }
            let (low, high) = (needed("low_freq_factor")?, needed("high_freq_factor")?);
            if !(low < high) {
                return Err(config.refuse(format!(
                    "{name}.low_freq_factor {low} is not below {name}.high_freq_factor {high}"
                )));
            }
            Ok(RopeScaling::Llama3 {
                factor: needed("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context: context as u32,
            })
        }
        Some(other) => Err(config.refuse(format!(
            "{name}.rope_type is {}; known are default, linear and llama3",
            short(other.unwrap_or("no text"))
        ))),
    }
}

fn positive(config: &Config, name: &str, value: Option<&Value>) -> Result<Option<f64>> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_f64() {
            Some(number) if number > 0.0 && number.is_finite() => Ok(Some(number)),
            _ => Err(config.refuse(format!(
                "{name} is {} and no finite number above 0",
                short(&value.to_string())
            ))),
        },
    }
}

fn flag(config: &Config, name: &str) -> Result<bool> {
    match config.value(name) {
        None => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(_) => Err(config.refuse(format!("{name} is neither true nor false"))),
    }
}

/// One token id or several.
fn ids(config: &Config, value: Option<&Value>) -> Result<Vec<u32>> {
    let Some(value) = value else { return Ok(Vec::new()) };
    let list = match value {
        Value::Array(list) => &list[..],
        one => std::slice::from_ref(one),
    };
    list.iter()
        .map(|id| {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| {
                config.refuse("eos_token_id is neither a token id nor a list of them".to_owned())
            })
        })
        .collect()
}

/// As much of a text as an error needs: a field may be as long as its file.
fn short(text: &str) -> String {
    text.chars().take(40).collect()
}
