//! The shape of a model from a Hugging Face `config.json`.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::ModelShape;
use crate::error::{Error, Result};

/// The most bytes that are read: real ones have a few thousand.
const MAX_BYTES: u64 = 1 << 20;

/// A model's configuration. Only the fields that are asked for must be right.
#[derive(Debug, Clone)]
pub struct Config {
    file: PathBuf,
    /// Where the fields are: empty, or `text_config.`.
    prefix: &'static str,
    fields: Map<String, Value>,
}

/// What is given by hand, and comes before the configuration.
#[derive(Debug, Clone, Copy, Default)]
pub struct Given {
    /// Layers.
    pub layers: Option<u32>,
    /// KV heads.
    pub kv_heads: Option<u32>,
    /// Channels of a head of K or V for which none are given.
    pub head_dim: Option<u32>,
    /// Channels of a key head.
    pub k_head_dim: Option<u32>,
    /// Channels of a value head.
    pub v_head_dim: Option<u32>,
}

impl Config {
    /// Reads a file. Models of text and more keep the fields of the text model under `text_config`.
    ///
    /// # Errors
    /// [`Error::Usage`] with the file's name for one that cannot be read, is longer than 1 MiB or no JSON object, and for a
    /// model that caches something else than keys and values.
    pub fn read(file: &Path) -> Result<Config> {
        let mut bytes = Vec::new();
        let read = File::open(file).and_then(|opened| opened.take(MAX_BYTES + 1).read_to_end(&mut bytes));
        let mut config = Config {
            file: file.to_owned(),
            prefix: "",
            fields: Map::new(),
        };
        match read {
            Err(error) => return Err(config.refuse(format!("it cannot be read: {error}"))),
            Ok(length) if length as u64 > MAX_BYTES => {
                return Err(config.refuse("it is longer than 1 MiB".to_owned()));
            }
            Ok(_) => {}
        }
        config.fields = match serde_json::from_slice(&bytes) {
            Ok(Value::Object(fields)) => fields,
            Ok(_) => return Err(config.refuse("it is no JSON object".to_owned())),
            Err(error) => return Err(config.refuse(format!("it is no JSON: {error}"))),
        };
        if let Some(Value::Object(fields)) = config.fields.remove("text_config") {
            config.prefix = "text_config.";
            config.fields = fields;
        }
        if config.number("kv_lora_rank")?.is_some() {
            return Err(
                config.refuse("the model caches latents (MLA) in place of keys and values".to_owned())
            );
        }
        Ok(config)
    }

    /// Whether the fields are those of the text part of a model of text and more.
    #[cfg(feature = "models")]
    pub(crate) fn is_nested(&self) -> bool {
        !self.prefix.is_empty()
    }

    /// A field of any type; none where it is absent or null.
    #[cfg(feature = "models")]
    pub(crate) fn value(&self, field: &str) -> Option<&Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    /// An error about this file.
    pub(crate) fn refuse(&self, reason: String) -> Error {
        Error::Usage {
            asked: format!("configuration `{}`", self.file.display()),
            reason,
            advice: "name the config.json of a model; `kvpack plan` also takes its shape by options"
                .to_owned(),
        }
    }

    /// A field; none where it is absent or null.
    pub(crate) fn number(&self, field: &str) -> Result<Option<u32>> {
        let value = match self.fields.get(field) {
            None | Some(Value::Null) => return Ok(None),
            Some(value) => value,
        };
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        match number {
            Some(number) if number > 0 => Ok(Some(number)),
            _ => {
                // A list may be as long as the file.
                let shown: String = value.to_string().chars().take(40).collect();
                let name = format!("{}{field}", self.prefix);
                Err(self.refuse(format!(
                    "{name} is {shown} and no whole number from 1 to {}",
                    u32::MAX
                )))
            }
        }
    }

    /// Channels of a head: given, or the share of a head in a row of the model.
    pub(crate) fn head_dim(&self) -> Result<Option<u32>> {
        if let Some(head_dim) = self.number("head_dim")? {
            return Ok(Some(head_dim));
        }
        let (hidden, heads) = (self.number("hidden_size")?, self.number("num_attention_heads")?);
        match hidden.zip(heads) {
            None => Ok(None),
            Some((hidden, heads)) if hidden.is_multiple_of(heads) => Ok(Some(hidden / heads)),
            Some((hidden, heads)) => Err(self.refuse(format!(
                "it has no head_dim, and hidden_size {hidden} is no multiple of num_attention_heads {heads}"
            ))),
        }
    }
}

impl Given {
    /// The whole shape, the rest from a configuration.
    ///
    /// # Errors
    /// [`Error::Usage`] that names what is missing or wrong, and in which file.
    pub fn shape(self, config: Option<&Config>) -> Result<ModelShape> {
        let from = |field: &dyn Fn(&Config) -> Result<Option<u32>>| config.map_or(Ok(None), field);
        let missing = |option: &str, fields: &str| match config {
            Some(config) => config.refuse(format!(
                "it has no {}{fields}, and there is no {option}",
                config.prefix
            )),
            None => Error::Usage {
                asked: "a plan".to_owned(),
                reason: format!("there is no {option}"),
                advice: format!("give it, or a --config with {fields}"),
            },
        };
        let layers = match self.layers {
            Some(layers) => Some(layers),
            None => from(&|config| config.number("num_hidden_layers"))?,
        };
        let q_heads = || from(&|config| config.number("num_attention_heads"));
        let (q_heads, kv_heads) = match self.kv_heads {
            // Query heads by the same hand: memory asks nothing more of them.
            Some(heads) => (Some(heads), Some(heads)),
            None => (q_heads()?, from(&|config| config.number("num_key_value_heads"))?),
        };
        let kv_heads = kv_heads.or(q_heads);
        let head_dim = |own: Option<u32>| match own.or(self.head_dim) {
            Some(head_dim) => Ok(Some(head_dim)),
            None => from(&Config::head_dim),
        };
        let (k_head_dim, v_head_dim) = (head_dim(self.k_head_dim)?, head_dim(self.v_head_dim)?);
        let layers = layers.ok_or_else(|| missing("--layers", "num_hidden_layers"))?;
        let kv_heads = kv_heads.ok_or_else(|| missing("--kv-heads", "num_key_value_heads"))?;
        let no_head_dim = || missing("--head-dim", "head_dim");
        Ok(ModelShape {
            layers,
            q_heads: q_heads.unwrap_or(kv_heads),
            kv_heads,
            k_head_dim: k_head_dim.ok_or_else(no_head_dim)?,
            v_head_dim: v_head_dim.ok_or_else(no_head_dim)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shape that a file with this text gives, or the message, which names the file.
    fn shape(text: impl AsRef<[u8]>, given: Given) -> std::result::Result<[u32; 5], String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.json");
        std::fs::write(&file, text).unwrap();
        let shape = Config::read(&file).and_then(|config| given.shape(Some(&config)));
        let shape = shape.map_err(|error| {
            let said = error.to_string();
            assert!(said.contains(&format!("`{}`", file.display())), "{said}");
            said
        })?;
        Ok([
            shape.layers,
            shape.q_heads,
            shape.kv_heads,
            shape.k_head_dim,
            shape.v_head_dim,
        ])
    }

    const LLAMA: &str = r#"{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_size": 4096, "torch_dtype": "bfloat16"}"#;

    #[test]
    fn fields_have_the_defaults_that_models_rely_on() {
        let nothing = Given::default();
        assert_eq!(shape(LLAMA, nothing), Ok([32, 32, 8, 128, 128]));
        let heads = LLAMA.replace(
            "\"num_key_value_heads\": 8",
            "\"num_key_value_heads\": null, \"head_dim\": null",
        );
        assert_eq!(shape(heads, nothing), Ok([32, 32, 32, 128, 128]));
        let head_dim = LLAMA.replace("4096", "5120, \"head_dim\": 96");
        assert_eq!(shape(head_dim, nothing), Ok([32, 32, 8, 96, 96]));
        let nested = format!("{{\"hidden_size\": 7, \"text_config\": {LLAMA}}}");
        assert_eq!(shape(nested, nothing), Ok([32, 32, 8, 128, 128]));
    }

    #[test]
    fn what_is_given_comes_first_and_hides_what_is_missing_or_wrong() {
        let some = Given {
            layers: Some(3),
            k_head_dim: Some(192),
            ..Given::default()
        };
        assert_eq!(shape(LLAMA, some), Ok([3, 32, 8, 192, 128]));
        let all = Given {
            kv_heads: Some(5),
            head_dim: Some(64),
            ..some
        };
        assert_eq!(
            shape(r#"{"head_dim": "x", "num_attention_heads": -1}"#, all),
            Ok([3, 5, 5, 192, 64])
        );
    }

    #[test]
    fn missing_and_wrong_fields_are_named() {
        for (from, to, words) in [
            (
                "\"num_hidden_layers\": 32,",
                "",
                "no num_hidden_layers, and there is no --layers",
            ),
            (
                "num_hidden_layers\": 32",
                "num_hidden_layers\": -32",
                "num_hidden_layers is -32",
            ),
            (
                "num_hidden_layers\": 32",
                "num_hidden_layers\": 0",
                "num_hidden_layers is 0",
            ),
            (
                "num_hidden_layers\": 32",
                "num_hidden_layers\": 32.0",
                "num_hidden_layers is 32.0",
            ),
            (
                "num_hidden_layers\": 32",
                "num_hidden_layers\": 5000000000",
                "is 5000000000",
            ),
            (
                "num_hidden_layers\": 32",
                "num_hidden_layers\": \"32\"",
                "is \"32\" and no whole number",
            ),
            (
                "num_hidden_layers\": 32",
                "num_hidden_layers\": 1e999",
                "it is no JSON: number out of range",
            ),
            (
                "num_hidden_layers\": 32",
                "num_hidden_layers\": NaN",
                "it is no JSON",
            ),
            (
                "\"num_key_value_heads\": 8",
                "\"num_key_value_heads\": [8]",
                "num_key_value_heads is [8]",
            ),
            (
                "4096",
                "4095",
                "hidden_size 4095 is no multiple of num_attention_heads 32",
            ),
            (
                "\"hidden_size\": 4096,",
                "",
                "no head_dim, and there is no --head-dim",
            ),
            (
                "\"hidden_size\"",
                "\"kv_lora_rank\": 512, \"hidden_size\"",
                "latents (MLA)",
            ),
        ] {
            let text = LLAMA.replace(from, to);
            assert_ne!(text, LLAMA);
            let said = shape(text, Given::default()).unwrap_err();
            assert!(said.contains(words), "{said}");
        }
        let said = shape("{\"text_config\": {\"head_dim\": []}}", Given::default()).unwrap_err();
        assert!(said.contains("text_config.head_dim is []"), "{said}");
        let said = Given::default().shape(None).unwrap_err().to_string();
        assert!(
            said.contains("there is no --layers") && said.contains("num_hidden_layers"),
            "{said}"
        );
    }

    #[test]
    fn what_is_no_configuration_is_refused() {
        for (text, words) in [
            (&b""[..], "it is no JSON: EOF"),
            (b"[]", "no JSON object"),
            (b"{\"num_hidden_layers\": 32", "it is no JSON: EOF"),
            (b"\xff\xfe{}", "it is no JSON"),
            (&[b'['; 100_000], "it is no JSON: recursion limit"),
            (&[b' '; (1 << 20) + 1], "longer than 1 MiB"),
        ] {
            let said = shape(text, Given::default()).unwrap_err();
            assert!(said.contains(words), "{said}");
        }
        let folder = tempfile::tempdir().unwrap();
        for file in [
            folder.path().to_owned(),
            folder.path().join("missing"),
            PathBuf::new(),
        ] {
            let said = Config::read(&file).unwrap_err().to_string();
            assert!(
                said.contains(&format!("`{}`: it cannot be read", file.display())),
                "{said}"
            );
        }
    }
}
