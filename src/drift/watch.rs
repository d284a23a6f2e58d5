//! Watching a measurement: what each call of the model computed, and the cache at the end of each prompt.

use crate::cache::SequenceId;
use crate::error::Result;
use crate::model::{LayerRows, Session};
use crate::spec::Pair;

/// What one call of the model gave.
#[derive(Debug)]
pub struct Seen<'a> {
    /// How the cache is stored; none in the run with the f32 cache that all others are compared with.
    pub pair: Option<Pair>,
    /// The prompt, from 0.
    pub prompt: usize,
    /// Position of the first of the tokens.
    pub first_position: u32,
    /// The tokens.
    pub ids: &'a [u32],
    /// Their logits with the f32 cache, `[token][vocabulary]`.
    pub reference: &'a [f64],
    /// Their logits in this run.
    pub logits: &'a [f64],
    /// What each layer computed for them.
    pub layers: &'a [LayerRows],
}

/// The end of a prompt: its pages are still there.
#[derive(Debug)]
pub struct Done<'a, 'm> {
    /// How the cache is stored; none in the run with the f32 cache.
    pub pair: Option<Pair>,
    /// The prompt, from 0.
    pub prompt: usize,
    /// The model with its cache.
    pub session: &'a Session<'m>,
    /// The prompt's sequence.
    pub sequence: SequenceId,
}

/// Who watches a measurement: every call of the run with the f32 cache, then those of each pair.
pub trait Watch {
    /// A call is done.
    ///
    /// # Errors
    /// Whatever ends the measurement.
    fn seen(&mut self, seen: &Seen<'_>) -> Result<()>;

    /// A prompt is done.
    ///
    /// # Errors
    /// Whatever ends the measurement.
    fn done(&mut self, done: &Done<'_, '_>) -> Result<()>;
}
