//! The shape of a model of the Llama architecture.

use crate::capacity::ModelShape;
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

impl LlamaConfig {
    /// The tensor of the head, `[vocabulary, hidden]`: that of the embedding where they are tied, whether or not a file has
    /// another one.
    pub fn head(&self) -> &'static str {
        if self.tied {
            "model.embed_tokens.weight"
        } else {
            "lm_head.weight"
        }
    }

    /// What the model asks of its cache.
    pub fn cache_shape(&self) -> ModelShape {
        ModelShape {
            layers: self.layers,
            q_heads: self.q_heads,
            kv_heads: self.kv_heads,
            k_head_dim: self.head_dim,
            v_head_dim: self.head_dim,
        }
    }

    /// The tensors of this shape: name, and shape with the outermost dimension first. Head, embedding and last norm come
    /// first, then those of each block.
    pub fn tensors(&self) -> impl Iterator<Item = (String, Vec<u64>)> + use<'_> {
        let of = |extents: &[u32]| -> Vec<u64> { extents.iter().map(|&extent| extent.into()).collect() };
        let whole = [
            ("model.embed_tokens", of(&[self.vocabulary, self.hidden])),
            ("model.norm", of(&[self.hidden])),
            ("lm_head", of(&[self.vocabulary, self.hidden])),
        ];
        let whole = whole.into_iter().take(if self.tied { 2 } else { 3 });
        let q = u64::from(self.q_heads) * u64::from(self.head_dim);
        let kv = u64::from(self.kv_heads) * u64::from(self.head_dim);
        let (hidden, feed_forward) = (u64::from(self.hidden), u64::from(self.feed_forward));
        let blocks = (0..self.layers).flat_map(move |layer| {
            [
                ("input_layernorm", vec![hidden]),
                ("self_attn.q_proj", vec![q, hidden]),
                ("self_attn.k_proj", vec![kv, hidden]),
                ("self_attn.v_proj", vec![kv, hidden]),
                ("self_attn.o_proj", vec![hidden, q]),
                ("post_attention_layernorm", vec![hidden]),
                ("mlp.gate_proj", vec![feed_forward, hidden]),
                ("mlp.up_proj", vec![feed_forward, hidden]),
                ("mlp.down_proj", vec![hidden, feed_forward]),
            ]
            .map(|(part, shape)| (format!("model.layers.{layer}.{part}.weight"), shape))
        });
        whole
            .map(|(part, shape)| (format!("{part}.weight"), shape))
            .chain(blocks)
    }
}
