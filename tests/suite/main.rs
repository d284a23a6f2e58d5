//! All integration tests in one binary.

mod allocations;
mod attention;
mod bench;
mod bits;
mod cache;
mod checkpoint;
mod common;
mod device;
mod drift;
mod example;
mod golden;
mod hostile_models;
mod lifecycle;
mod llama;
mod model_files;
mod mutations;
mod report_data;
mod report_page;
mod rows;
mod serving;
mod shaders;
mod structure;
mod trained;
mod validate;
