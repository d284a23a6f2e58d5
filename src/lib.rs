//! Quantised, paged KV caches for transformers on any GPU.
#![deny(missing_docs, unsafe_code)]

pub mod error;
pub mod formats;
pub mod pages;
pub mod scales;
pub mod shader;
pub mod spec;

pub use error::{Error, Result};
pub use wgpu;
