//! Live transformers over either backend: a tiny model generated from its recipe, and models of the Llama architecture from
//! files. One forward pass serves both.
//!
//! The model talks to attention only through a cache: its backend appends the new keys and values and lets
//! the new queries attend.

mod gpu;
pub mod kernels;
#[cfg(feature = "models")]
mod llama;
mod reference;
mod scratch;
mod session;
mod tiny;
mod weights;

pub use gpu::GpuModel;
#[cfg(feature = "models")]
pub use llama::{Progress, model, upload};
pub use reference::ReferenceModel;
pub use session::{Placed, Session};
pub use tiny::{ALPHABET, PROMPTS, encode, tiny};
pub use weights::GpuWeights;

use crate::error::{Error, Result};
use crate::rope::Rope;

/// How rows are normalised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norm {
    /// Layer norm, (x - mean) / sqrt(variance + epsilon), without gain or bias.
    Layer,
    /// RMS norm, x / sqrt(mean of x^2 + epsilon) times a gain for each channel.
    Rms,
}

/// The shape of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Tokens that exist.
    pub vocabulary: u32,
    /// Longest sequence.
    pub positions: u32,
    /// Width of the residual stream.
    pub d_model: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Channels of a head.
    pub head_dim: u32,
    /// Blocks, each with a cache layer.
    pub blocks: u32,
    /// Width of the feed-forward part.
    pub d_ff: u32,
    /// How rows are normalised.
    pub norm: Norm,
    /// Epsilon of the norms.
    pub epsilon: f64,
    /// How queries and keys are turned by their positions; none where positions are added to the embedding.
    pub rope: Option<Rope>,
}

/// Epsilon of the tiny model's layer norms.
pub const EPSILON: f64 = 1e-5;

impl Config {
    /// Refuses ids outside the vocabulary and positions beyond the last.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub(crate) fn check(&self, ids: &[u32], first_position: u32) -> Result<()> {
        let refuse = |what, value: u64, limit: String, advice: &str| {
            Err(Error::Shape {
                what,
                value,
                limit,
                advice: advice.to_owned(),
            })
        };
        if let Some(&id) = ids.iter().find(|&&id| id >= self.vocabulary) {
            let limit = format!("the vocabulary has {} tokens", self.vocabulary);
            return refuse(
                "token id",
                u64::from(id),
                limit,
                "encode text with the model's own alphabet",
            );
        }
        let end = u64::from(first_position) + ids.len() as u64;
        if end > u64::from(self.positions) {
            let limit = format!("the model has {} positions", self.positions);
            return refuse("sequence length", end, limit, "use a shorter text");
        }
        Ok(())
    }
}

/// A matrix of weights, row-major.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// Rows: outputs of a projection, tokens or positions of a table, 1 for gains.
    pub rows: u32,
    /// Columns: inputs of a projection.
    pub columns: u32,
    /// `[row][column]`.
    pub values: Vec<f64>,
}

/// The weights of one block, as matrices or as a backend's tensors. Projections are `[out][in]`.
#[derive(Debug, Clone)]
pub struct Block<T> {
    /// Gain of the norm before attention, `[1][d_model]`; none where the norm has none.
    pub attention_gain: Option<T>,
    /// Query projection, `[q_heads x head_dim][d_model]`.
    pub q: T,
    /// Key projection, `[kv_heads x head_dim][d_model]`.
    pub k: T,
    /// Value projection.
    pub v: T,
    /// Output projection, `[d_model][q_heads x head_dim]`.
    pub o: T,
    /// Gain of the norm before the feed-forward part.
    pub feed_forward_gain: Option<T>,
    /// Feed-forward gate, `[d_ff][d_model]`: SwiGLU where there is one, GELU where there is none.
    pub gate: Option<T>,
    /// Feed-forward, in.
    pub up: T,
    /// Feed-forward, out, `[d_model][d_ff]`.
    pub down: T,
}

/// The weights of a model, as matrices or as a backend's tensors.
#[derive(Debug, Clone)]
pub struct Weights<T> {
    /// `[vocabulary][d_model]`.
    pub embedding: T,
    /// `[position][d_model]`, added to the embedding; none where positions are rotated.
    pub positions: Option<T>,
    /// The blocks.
    pub blocks: Vec<Block<T>>,
    /// Gain of the last norm.
    pub gain: Option<T>,
    /// The head, `[vocabulary][d_model]`; none where it is the embedding.
    pub head: Option<T>,
}

impl<T> Weights<T> {
    /// The same weights in another form.
    pub(crate) fn map<U>(&self, mut form: impl FnMut(&T) -> Result<U>) -> Result<Weights<U>> {
        let some = |form: &mut dyn FnMut(&T) -> Result<U>, t: &Option<T>| t.as_ref().map(form).transpose();
        let form: &mut dyn FnMut(&T) -> Result<U> = &mut form;
        Ok(Weights {
            embedding: form(&self.embedding)?,
            positions: some(form, &self.positions)?,
            blocks: self
                .blocks
                .iter()
                .map(|b| {
                    Ok(Block {
                        attention_gain: some(form, &b.attention_gain)?,
                        q: form(&b.q)?,
                        k: form(&b.k)?,
                        v: form(&b.v)?,
                        o: form(&b.o)?,
                        feed_forward_gain: some(form, &b.feed_forward_gain)?,
                        gate: some(form, &b.gate)?,
                        up: form(&b.up)?,
                        down: form(&b.down)?,
                    })
                })
                .collect::<Result<_>>()?,
            gain: some(form, &self.gain)?,
            head: some(form, &self.head)?,
        })
    }
}

/// A model: shape and weights.
#[derive(Debug, Clone)]
pub struct Model {
    /// The shape.
    pub config: Config,
    /// The weights.
    pub weights: Weights<Matrix>,
}

/// What one layer computed for the new tokens of one call: rows `[token][head][channel]`.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerRows {
    /// The layer.
    pub layer: u32,
    /// Queries as attention takes them.
    pub q: Vec<f32>,
    /// Keys before rotation.
    pub k_before_rope: Vec<f32>,
    /// Keys as the cache takes them.
    pub k: Vec<f32>,
    /// Values.
    pub v: Vec<f32>,
    /// What attention gave.
    pub output: Vec<f32>,
}

/// Who is told of the rows of each layer.
pub type Trace<'a> = &'a mut dyn FnMut(LayerRows) -> Result<()>;

/// The operations of the forward pass. Tensors are `[token][column]`.
pub(crate) trait Backend {
    type Tensor;
    type Weight;
    /// Rows of a table.
    fn embed(&mut self, ids: &[u32], table: &Self::Weight) -> Result<Self::Tensor>;
    /// The model's norm.
    fn norm(&mut self, x: &Self::Tensor, gain: Option<&Self::Weight>) -> Result<Self::Tensor>;
    /// x times a weight `[out][in]`.
    fn matmul(&mut self, x: &Self::Tensor, weight: &Self::Weight) -> Result<Self::Tensor>;
    /// GELU, tanh form.
    fn gelu(&mut self, x: &Self::Tensor) -> Result<Self::Tensor>;
    /// up x gate / (1 + exp(-gate)).
    fn swiglu(&mut self, gate: &Self::Tensor, up: &Self::Tensor) -> Result<Self::Tensor>;
    /// x + y.
    fn residual(&mut self, x: &Self::Tensor, y: &Self::Tensor) -> Result<Self::Tensor>;
    /// Turns q and k by their positions where the model rotates (k only where the cache keeps turned keys), appends k and v
    /// to the cache, then attends with q.
    fn attention(
        &mut self,
        layer: u32,
        q: Self::Tensor,
        k: Self::Tensor,
        v: Self::Tensor,
    ) -> Result<Self::Tensor>;
    /// A block is complete.
    fn block_done(&mut self) -> Result<()>;
}

/// The forward pass: logits `[token][vocabulary]` of the new tokens.
///
/// Pre-norm blocks: x += Attn(N(x)); x += W2 f(W1 N(x)); logits = N(x) H^T, where f is GELU or, with a gate, SwiGLU.
pub(crate) fn forward<B: Backend>(
    backend: &mut B,
    weights: &Weights<B::Weight>,
    ids: &[u32],
    first_position: u32,
) -> Result<B::Tensor> {
    let mut x = backend.embed(ids, &weights.embedding)?;
    if let Some(positions) = &weights.positions {
        let places: Vec<u32> = (first_position..).take(ids.len()).collect();
        let places = backend.embed(&places, positions)?;
        x = backend.residual(&x, &places)?;
    }
    for (layer, block) in (0..).zip(&weights.blocks) {
        let h = backend.norm(&x, block.attention_gain.as_ref())?;
        let (q, k) = (backend.matmul(&h, &block.q)?, backend.matmul(&h, &block.k)?);
        let v = backend.matmul(&h, &block.v)?;
        let attended = backend.attention(layer, q, k, v)?;
        let projected = backend.matmul(&attended, &block.o)?;
        x = backend.residual(&x, &projected)?;
        let h = backend.norm(&x, block.feed_forward_gain.as_ref())?;
        let up = backend.matmul(&h, &block.up)?;
        let h = match &block.gate {
            Some(gate) => {
                let gate = backend.matmul(&h, gate)?;
                backend.swiglu(&gate, &up)?
            }
            None => backend.gelu(&up)?,
        };
        let h = backend.matmul(&h, &block.down)?;
        x = backend.residual(&x, &h)?;
        backend.block_done()?;
    }
    let h = backend.norm(&x, weights.gain.as_ref())?;
    backend.matmul(&h, weights.head.as_ref().unwrap_or(&weights.embedding))
}
