//! The live transformer: a tiny model generated from its recipe, and one forward pass over either backend.
//!
//! The model talks to attention only through a cache: its backend appends the new keys and values and lets
//! the new queries attend.

mod gpu;
pub mod kernels;
mod reference;
mod tiny;

pub use gpu::GpuModel;
pub use reference::ReferenceModel;
pub use tiny::{ALPHABET, PROMPTS, encode, tiny};

use crate::error::{Error, Result};

/// The shape of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Tokens that exist.
    pub vocabulary: u32,
    /// Longest sequence.
    pub positions: u32,
    /// Width of the residual stream.
    pub d_model: u32,
    /// Attention heads; as many for keys and values.
    pub heads: u32,
    /// Channels of a head.
    pub head_dim: u32,
    /// Blocks, each with a cache layer.
    pub blocks: u32,
    /// Width of the feed-forward part.
    pub d_ff: u32,
}

/// Epsilon of the layer norms.
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
    /// Rows: inputs.
    pub rows: u32,
    /// Columns: outputs.
    pub columns: u32,
    /// `[row][column]`.
    pub values: Vec<f64>,
}

/// The weights of one block, as matrices or as a backend's tensors.
#[derive(Debug, Clone)]
pub struct Block<T> {
    /// Query projection, `[d_model][heads x head_dim]`.
    pub q: T,
    /// Key projection.
    pub k: T,
    /// Value projection.
    pub v: T,
    /// Output projection.
    pub o: T,
    /// Feed-forward, in.
    pub up: T,
    /// Feed-forward, out.
    pub down: T,
}

/// The weights of a model, as matrices or as a backend's tensors.
#[derive(Debug, Clone)]
pub struct Weights<T> {
    /// `[vocabulary][d_model]`; also the head.
    pub embedding: T,
    /// `[position][d_model]`, added to the embedding.
    pub positions: T,
    /// The blocks.
    pub blocks: Vec<Block<T>>,
}

impl<T> Weights<T> {
    /// The same weights in another form.
    pub(crate) fn map<U>(&self, mut form: impl FnMut(&T) -> Result<U>) -> Result<Weights<U>> {
        Ok(Weights {
            embedding: form(&self.embedding)?,
            positions: form(&self.positions)?,
            blocks: self
                .blocks
                .iter()
                .map(|b| {
                    Ok(Block {
                        q: form(&b.q)?,
                        k: form(&b.k)?,
                        v: form(&b.v)?,
                        o: form(&b.o)?,
                        up: form(&b.up)?,
                        down: form(&b.down)?,
                    })
                })
                .collect::<Result<_>>()?,
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

/// The operations of the forward pass. Tensors are `[token][column]`.
pub(crate) trait Backend {
    type Tensor;
    /// Embeddings of `ids` plus those of their positions.
    fn embed(
        &mut self,
        ids: &[u32],
        first_position: u32,
        weights: &Weights<Self::Tensor>,
    ) -> Result<Self::Tensor>;
    /// Layer norm without gain or bias.
    fn norm(&mut self, x: &Self::Tensor) -> Result<Self::Tensor>;
    /// x times a weight `[in][out]`.
    fn matmul(&mut self, x: &Self::Tensor, weight: &Self::Tensor) -> Result<Self::Tensor>;
    /// x times a weight `[out][in]`.
    fn matmul_transposed(&mut self, x: &Self::Tensor, weight: &Self::Tensor) -> Result<Self::Tensor>;
    /// GELU, tanh form.
    fn activation(&mut self, x: &Self::Tensor) -> Result<Self::Tensor>;
    /// x + y.
    fn residual(&mut self, x: &Self::Tensor, y: &Self::Tensor) -> Result<Self::Tensor>;
    /// Appends k and v to the cache, then attends with q.
    fn attention(
        &mut self,
        layer: u32,
        q: &Self::Tensor,
        k: &Self::Tensor,
        v: &Self::Tensor,
    ) -> Result<Self::Tensor>;
}

/// The forward pass: logits `[token][vocabulary]` of the new tokens.
///
/// Pre-norm blocks: x += Attn(LN(x)); x += W2 gelu(W1 LN(x)); logits = LN(x) E^T.
pub(crate) fn forward<B: Backend>(
    backend: &mut B,
    weights: &Weights<B::Tensor>,
    ids: &[u32],
    first_position: u32,
) -> Result<B::Tensor> {
    let mut x = backend.embed(ids, first_position, weights)?;
    for (layer, block) in (0..).zip(&weights.blocks) {
        let h = backend.norm(&x)?;
        let (q, k) = (backend.matmul(&h, &block.q)?, backend.matmul(&h, &block.k)?);
        let v = backend.matmul(&h, &block.v)?;
        let attended = backend.attention(layer, &q, &k, &v)?;
        let projected = backend.matmul(&attended, &block.o)?;
        x = backend.residual(&x, &projected)?;
        let h = backend.norm(&x)?;
        let h = backend.matmul(&h, &block.up)?;
        let h = backend.activation(&h)?;
        let h = backend.matmul(&h, &block.down)?;
        x = backend.residual(&x, &h)?;
    }
    let h = backend.norm(&x)?;
    backend.matmul_transposed(&h, &weights.embedding)
}
