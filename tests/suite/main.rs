//! All integration tests in one binary.

mod common;
mod shaders;
mod structure;
