//! Shaders that other engines can lift: composed modules in several languages, a manifest, golden vectors.

pub mod cases;
mod geometry;
mod judge;
mod modules;
mod run;

pub use geometry::{Geometry, place};
pub use judge::Verdict;
pub use modules::{Choice, Counts, Dispatch, Factor, Module, Phase, Shape, Tweaks, kernel_names, others};
pub use run::{Runnable, run};
