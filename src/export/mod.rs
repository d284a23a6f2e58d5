//! Shaders that other engines can lift: composed modules in several languages, a manifest, golden vectors.

mod modules;

pub use modules::{Choice, Counts, Dispatch, Factor, Module, Phase, Shape, Tweaks, kernel_names, others};
