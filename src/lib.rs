//! Quantised, paged KV caches for transformers on any GPU: WGSL kernels, a CPU reference that defines every bit, and a
//! live transformer that shows what each format costs.
//!
//! The modules, in the order in which data flows:
//!
//! | module | what it is |
//! |---|---|
//! | [`options`] | what attention may be asked for: window, soft cap, scale, sinks |
//! | [`rope`] | rotary positions: pairings, scalings, the table of turns |
//! | [`formats`] | element formats: what one stored number is; the registry |
//! | [`scales`] | which numbers share a scale, and how it is stored |
//! | [`spec`] | a side (K or V) = element + scale layout + scale type; a pair = both; names |
//! | [`pages`] | page geometry in integers |
//! | [`variant`] | ways to run the attention kernel, and which to take |
//! | [`tuning`] | variants that were measured, kept by adapter and driver |
//! | [`work`] | work lists that kernels and reference read alike |
//! | [`shader`] | the composer that joins WGSL parts into a kernel |
//! | [`gpu`] | adapters, device, pipelines, buffers |
//! | [`kernels`] | GPU kernels, a file each, paired with `shaders/<name>.wgsl` |
//! | [`reference`](mod@reference) | the same kernels on the CPU: the shortest correct programs |
//! | [`cache`] | sequences of pages: plan a step, append, attend, commit |
//! | [`capacity`] | what the cache of a model takes in memory, and what fits a budget; computed |
//! | `checkpoint` | trained models from files: shape, tensors, tokenizer (feature `models`) |
//! | [`model`] | the tiny transformer and models of the Llama architecture, one forward pass over either backend |
//! | [`analyze`] | what each format costs in the numbers of given K and V tensors |
//! | [`drift`] | what a format costs in logits |
//! | [`recording`] | what a run computed and stored, token by token |
//! | `generate` | text from a trained model, token by token (feature `models`) |
//! | [`validate`] | every kernel on an adapter against the reference |
//! | [`bench`](mod@bench) | how fast decode, append and prefill are, beside the read roof |
//! | `export` | composed shaders for other engines, with golden vectors (feature `export`) |
//!
//! Packing a row and reading it back, on the CPU:
//!
//! ```
//! use kvpack::pages::PageLayout;
//! use kvpack::reference::{dequantize, quantize};
//! use kvpack::work::{SlotRun, Status};
//!
//! # fn main() -> kvpack::Result<()> {
//! // One KV head of 8 channels, INT4 with an f16 scale for each token, pages of 8 tokens.
//! let page = PageLayout::new("int4".parse()?, 1, 8, 8)?;
//! let row = [7.0_f32, -6.0, 2.0, 3.0, -2.0, 0.4, 0.6, 0.0];
//!
//! let mut pool = vec![0; page.words as usize];
//! let mut status = Status::default();
//! let run = SlotRun { page: 0, slot: 3, count: 1, source: 0 };
//! let source = |_: &SlotRun, _, _, channel: u32| row[channel as usize];
//! quantize(&page, &[run], source, 1.0, &mut pool, &mut status);
//! // Word 0 of slot 3: the lowest channel in the lowest bits, two's complement.
//! assert_eq!(pool[3], 0x010e_32a7);
//! // The scale is f16(7 / 7) = 1.
//! assert_eq!(page.scale_at(3, 0, 0), Some((page.scale_offset + 1, 16)));
//!
//! let mut rows = [0.0; 8];
//! dequantize(&page, &[run], 1.0, &pool, &mut rows);
//! assert_eq!(rows, [7.0, -6.0, 2.0, 3.0, -2.0, 0.0, 1.0, 0.0]);
//! # Ok(())
//! # }
//! ```
#![deny(missing_docs, unsafe_code)]

pub mod analyze;
pub mod bench;
pub mod cache;
pub mod capacity;
#[cfg(feature = "models")]
pub mod checkpoint;
pub mod drift;
pub mod error;
#[cfg(feature = "export")]
pub mod export;
pub mod formats;
#[cfg(feature = "models")]
pub mod generate;
pub mod gpu;
pub mod kernels;
pub mod model;
#[cfg(any(feature = "models", feature = "export"))]
mod npy;
pub mod options;
pub mod pages;
pub mod recording;
pub mod reference;
#[cfg(feature = "cli")]
pub mod report;
pub mod rope;
pub mod scales;
pub mod shader;
pub mod spec;
pub mod tuning;
pub mod validate;
pub mod variant;
pub mod work;

pub use error::{Error, Result};
/// The wgpu whose devices, buffers and encoders this crate takes: use it, or the same version.
pub use wgpu;
