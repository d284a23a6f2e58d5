//! Trained models on the command line: which files, how weights are kept, and loading with a bar.

use std::path::Path;

use clap::{Args, ValueEnum};
use kvpack::checkpoint::{Checkpoint, Tokenizer};
use kvpack::drift::Device;
use kvpack::kernels::FloatType;
use kvpack::model::{self, Placed};

use super::output::Progress;
use super::{Failure, input, usage};

/// How weights are kept on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Weights {
    /// Half the memory; rounded once
    F16,
    /// As they are computed from the file
    F32,
}

/// Which model.
#[derive(Debug, Clone, Args)]
pub struct WeightArgs {
    /// How the model's weights are kept on a GPU
    #[arg(long, value_enum, value_name = "TYPE", default_value_t = Weights::F32)]
    weights: Weights,
}

/// A model that is ready to run.
pub struct Loaded {
    /// On its device.
    pub model: Placed,
    /// Its tokenizer; none where only token ids are needed and the files have none.
    pub tokenizer: Option<Tokenizer>,
    /// Token ids that end a text.
    pub end_of_text: Vec<u32>,
    /// Per-tensor scales that it brings.
    pub kv_scales: Option<Vec<[f32; 2]>>,
}

impl WeightArgs {
    /// Opens a GGUF file or a folder, and places the model on a device.
    pub fn load(&self, path: &Path, device: &Device, needs_tokenizer: bool) -> Result<Loaded, Failure> {
        let mut checkpoint = Checkpoint::open(path)?;
        let tokenizer = match needs_tokenizer {
            true => Some(checkpoint.tokenizer()?),
            false => None,
        };
        let kv_scales = checkpoint.kv_scales()?;
        let config = checkpoint.config.clone();
        let bar = Progress::new();
        let mut progress = |done: u64, of: u64, what: &str| bar.show(done >> 20, of >> 20, what);
        let model = match device {
            Device::Cpu => model::model(&config, &mut checkpoint, &mut progress)
                .map(|model| Placed::Cpu(Box::new(model))),
            Device::Gpu(gpu) => {
                let float = match self.weights {
                    Weights::F16 => FloatType::F16,
                    Weights::F32 => FloatType::F32,
                };
                model::upload(gpu, &config, &mut checkpoint, float, &mut progress)
                    .map(|weights| Placed::Gpu(weights.into()))
            }
        };
        bar.finish();
        Ok(Loaded {
            model: model?,
            tokenizer,
            end_of_text: config.end_of_text,
            kv_scales,
        })
    }
}

/// MiB of a text, or of token ids, at most: far more than any context holds.
const MAX_TEXT: u64 = 16;

/// The contents of a text file.
pub fn read_text(option: &str, path: &Path) -> Result<String, Failure> {
    let refuse = |reason: String| {
        usage(
            format!("{option} {}", path.display()),
            format!("it cannot be read: {reason}"),
            format!("give a text file in UTF-8 of at most {MAX_TEXT} MiB"),
        )
    };
    let bytes = input::read(path, MAX_TEXT).map_err(|error| refuse(error.to_string()))?;
    String::from_utf8(bytes).map_err(|error| refuse(error.utf8_error().to_string()))
}

/// Token ids from a file: numbers with spaces, line ends, commas or brackets between them.
pub fn read_ids(option: &str, path: &Path) -> Result<Vec<u32>, Failure> {
    let text = read_text(option, path)?;
    let parts = text.split(|c: char| c.is_whitespace() || ",[]".contains(c));
    parts
        .filter(|part| !part.is_empty())
        .map(|part| {
            part.parse().map_err(|_| {
                usage(
                    format!("{option} {}", path.display()),
                    format!("`{part}` is no token id"),
                    "give whole numbers with spaces or commas between them",
                )
            })
        })
        .collect()
}
