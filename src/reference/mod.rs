//! The CPU reference: one function per kernel, of the same name. The shortest correct programs, sums in f64; they read
//! and write packed pages through [`crate::pages`] and are no port of the shaders.

mod amax;
mod attention_merge;
mod attention_split;
mod cache;
mod dequantize;
mod quantize;
mod quantize_group;
mod tensor_scale;

pub use amax::amax;
pub use attention_merge::attention_merge;
pub use attention_split::{AttentionShape, Partials, attention_split};
pub use cache::ReferenceCache;
pub use dequantize::dequantize;
pub use quantize::quantize;
pub use quantize_group::quantize_group;
pub use tensor_scale::tensor_scale;

use crate::formats::{Encoded, flush};
use crate::work::Status;

/// Writes `bits` bits of `value` at a word and bit, leaving the word's other bits.
fn put(page: &mut [u32], (word, bit): (u32, u32), bits: u32, value: u32) {
    let mask = (u32::MAX >> (32 - bits)) << bit;
    let word = &mut page[word as usize];
    *word = *word & !mask | value << bit;
}

/// |x| as it enters a group's amax: finite values only, subnormals as 0.
fn finite_magnitude(x: f32) -> f32 {
    if x.is_finite() { flush(x).abs() } else { 0.0 }
}

fn count(status: &mut Status, encoded: Encoded) {
    status.non_finite += u32::from(encoded.non_finite);
    status.saturated += u32::from(encoded.saturated);
}
