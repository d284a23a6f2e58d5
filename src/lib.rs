//! Quantised, paged KV caches for transformers on any GPU.
#![deny(missing_docs, unsafe_code)]

pub mod cache;
pub mod drift;
pub mod error;
pub mod formats;
pub mod gpu;
pub mod kernels;
pub mod model;
pub mod pages;
pub mod reference;
#[cfg(feature = "cli")]
pub mod report;
pub mod scales;
pub mod shader;
pub mod spec;
pub mod validate;
pub mod work;

pub use error::{Error, Result};
pub use wgpu;
