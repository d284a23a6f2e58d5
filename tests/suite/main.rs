//! All integration tests in one binary.

mod attention;
mod bench;
mod bits;
mod cache;
mod common;
mod device;
mod drift;
mod example;
mod golden;
mod lifecycle;
mod llama;
mod rows;
mod serving;
mod shaders;
mod structure;
mod trained;
mod validate;
