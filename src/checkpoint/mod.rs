//! Trained models from files: the shape, the tensors by name, the tokenizer.

mod llama;

pub use crate::rope::{RopePairing, RopeScaling};
pub use llama::LlamaConfig;

use crate::error::Result;

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
