//! All integration tests in one binary.

mod bits;
mod common;
mod golden;
mod shaders;
mod structure;
