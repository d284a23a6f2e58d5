//! The shape of a model of the Llama architecture.

use crate::rope::{RopePairing, RopeScaling};

/// The shape of a model of the Llama architecture.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaConfig {
    /// Tokens that exist.
    pub vocabulary: u32,
    /// Longest sequence.
    pub context: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Channels of a head; not always hidden / q_heads.
    pub head_dim: u32,
    /// Blocks, each with a cache layer.
    pub layers: u32,
    /// Width of the feed-forward part.
    pub feed_forward: u32,
    /// Epsilon of the RMS norms.
    pub norm_epsilon: f64,
    /// Base of RoPE's frequencies.
    pub rope_theta: f64,
    /// Channels turned together.
    pub rope_pairing: RopePairing,
    /// Scaling of the frequencies.
    pub rope_scaling: RopeScaling,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// Token ids that end a text.
    pub end_of_text: Vec<u32>,
}
