//! Trained models from files: the shape, the tensors by name, the tokenizer.
//!
//! Files are hostile until shown otherwise: what they claim is held against the bytes that are there before anything is
//! allocated for it, and an error names the field or the tensor.

pub mod blocks;
mod config;
mod folder;
pub mod gguf;
mod kv_scales;
mod llama;
mod names;
pub mod safetensors;
mod tokenizer;

pub use crate::rope::{RopePairing, RopeScaling};
pub use llama::LlamaConfig;
pub use tokenizer::Tokenizer;

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use folder::Folder;
use gguf::Gguf;

/// The tensors of a checkpoint, read one at a time. Names are those of the Hugging Face Llama layout
/// (`model.layers.0.self_attn.q_proj.weight`), whatever the file calls them.
pub trait Tensors {
    /// The tensor's shape, outermost dimension first (a projection: `[out, in]`); none where the file lacks it.
    fn shape(&self, name: &str) -> Option<Vec<u64>>;

    /// The tensor's values as f32, row-major.
    ///
    /// # Errors
    /// [`crate::Error::Usage`] with the tensor's name where it is missing, cannot be read or has values that are not finite.
    fn read(&mut self, name: &str) -> Result<Vec<f32>>;
}

/// A model of the Llama architecture in a GGUF file or a Hugging Face folder. Opening reads headers alone.
#[derive(Debug)]
pub struct Checkpoint {
    /// The shape, held against the tensors' shapes.
    pub config: LlamaConfig,
    path: PathBuf,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Gguf(Gguf),
    Folder(Folder),
}

impl Checkpoint {
    /// Opens a `.gguf` file, or a folder with `config.json`, `*.safetensors` and `tokenizer.json`.
    ///
    /// # Errors
    /// [`Error::Usage`] with the name of the field or tensor that is missing or wrong, and for another architecture.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        let (source, config) = if path.is_dir() {
            let config = LlamaConfig::from_folder(path)?;
            (Source::Folder(Folder::open(path)?), config)
        } else {
            let mut file = Gguf::open(path)?;
            let config = LlamaConfig::from_gguf(&mut file)?;
            (Source::Gguf(file), config)
        };
        let checkpoint = Checkpoint {
            config,
            path: path.to_owned(),
            source,
        };
        checkpoint.check()?;
        Ok(checkpoint)
    }

    /// That every tensor is there with its shape, and none that the forward pass would leave out.
    fn check(&self) -> Result<()> {
        for (name, expected) in self.config.tensors() {
            match self.shape(&name) {
                Some(shape) if shape == expected => {}
                Some(shape) => {
                    return Err(self.refuse(format!(
                        "tensor `{}` has shape {shape:?}, expected {expected:?}",
                        self.stored_name(&name)
                    )));
                }
                None => return Err(self.refuse(format!("tensor `{}` is missing", self.stored_name(&name)))),
            }
        }
        if let Some(bias) = self.stored_names().find(|name| name.ends_with(".bias")) {
            return Err(self.refuse(format!("tensor `{bias}`: models with biases are not read")));
        }
        Ok(())
    }

    fn refuse(&self, reason: String) -> Error {
        refuse(&self.path, reason)
    }

    fn stored_names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        match &self.source {
            Source::Gguf(file) => Box::new(file.names()),
            Source::Folder(folder) => Box::new(folder.names()),
        }
    }

    /// What the file calls a tensor.
    fn stored_name(&self, name: &str) -> String {
        match self.source {
            Source::Gguf(_) => names::gguf(name),
            Source::Folder(_) => name.to_owned(),
        }
    }

    /// The tokenizer, from `tokenizer.json` or built from the vocabulary and the merges of a GGUF file.
    ///
    /// # Errors
    /// [`Error::Usage`] for a tokenizer that is missing, of an unknown kind, wrong, or has ids beyond the vocabulary.
    pub fn tokenizer(&mut self) -> Result<Tokenizer> {
        let tokenizer = match &mut self.source {
            Source::Gguf(file) => Tokenizer::from_gguf(file)?,
            Source::Folder(_) => Tokenizer::from_json(&self.path.join("tokenizer.json"))?,
        };
        if tokenizer.size() > self.config.vocabulary {
            return Err(self.refuse(format!(
                "its tokenizer has ids up to {}, but tensor `{}` has {} rows",
                tokenizer.size() - 1,
                self.stored_name("model.embed_tokens.weight"),
                self.config.vocabulary
            )));
        }
        Ok(tokenizer)
    }
}

impl Tensors for Checkpoint {
    fn shape(&self, name: &str) -> Option<Vec<u64>> {
        match &self.source {
            Source::Gguf(file) => file.shape(&names::gguf(name)).map(<[u64]>::to_vec),
            Source::Folder(folder) => folder.shape(name),
        }
    }

    fn read(&mut self, name: &str) -> Result<Vec<f32>> {
        match &mut self.source {
            Source::Gguf(file) => file.read(&names::gguf(name)),
            Source::Folder(folder) => folder.read(name),
        }
    }
}

/// Bytes of a tensor that are in memory beside its numbers.
pub(crate) const PIECE: u64 = 1 << 20;

fn refuse(path: &Path, reason: impl Into<String>) -> Error {
    Error::Usage {
        asked: format!("model `{}`", path.display()),
        reason: reason.into(),
        advice:
            "give a GGUF file, or a folder with config.json, *.safetensors and tokenizer.json, of the Llama \
                 architecture, complete as it was published"
                .to_owned(),
    }
}

/// Room for a tensor's numbers, whose bytes are known to be in the file, or the reason why there is none.
pub(crate) fn reserve(name: &str, numbers: u64) -> std::result::Result<Vec<f32>, String> {
    let mut values = Vec::new();
    let room = usize::try_from(numbers).map_err(|error| error.to_string());
    room.and_then(|numbers| {
        values
            .try_reserve_exact(numbers)
            .map_err(|error| error.to_string())
    })
    .map_err(|error| format!("tensor `{name}` of {numbers} numbers: {error}"))?;
    Ok(values)
}

/// The reason to refuse a tensor with numbers that are not finite.
pub(crate) fn finite(name: &str, values: &[f32]) -> std::result::Result<(), String> {
    let Some(first) = values.iter().position(|value| !value.is_finite()) else {
        return Ok(());
    };
    let count = values.iter().filter(|value| !value.is_finite()).count();
    Err(format!(
        "tensor `{name}` has {count} NaN or infinite numbers, the first, {}, at index {first}",
        values[first]
    ))
}

/// A small file as bytes: the index of weights, for example.
fn read_whole(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| refuse(path, format!("it cannot be read: {error}")))
}
