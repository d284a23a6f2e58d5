//! Buffers of activations, used again: a forward pass makes hundreds of tensors, and few live at a time.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Result;
use crate::gpu::Gpu;

/// Buffers that no tensor holds. Commands run in the order in which they were recorded, so a buffer may go to the next
/// tensor as soon as the last command that names it is recorded.
#[derive(Debug, Clone, Default)]
pub(super) struct Scratch {
    free: Arc<Mutex<Vec<wgpu::Buffer>>>,
    tokens: Arc<AtomicU32>,
}

impl Scratch {
    fn free(&self) -> std::sync::MutexGuard<'_, Vec<wgpu::Buffer>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A tensor of any contents.
    pub fn tensor(&self, gpu: &Gpu, rows: u32, columns: u32) -> Result<Tensor> {
        let bytes = (u64::from(rows) * u64::from(columns) * 4).max(16);
        let mut free = self.free();
        let fits = free.iter().position(|buffer| buffer.size() == bytes);
        let buffer = match fits {
            Some(at) => free.swap_remove(at),
            None => gpu.zeros("activations", bytes)?,
        };
        Ok(Tensor {
            rows,
            columns,
            buffer,
            home: self.clone(),
        })
    }

    /// Keeps the free buffers only where the last step had as many tokens: others have other sizes.
    pub fn keep_for(&self, tokens: u32) {
        if self.tokens.swap(tokens, Ordering::Relaxed) != tokens {
            self.free().clear();
        }
    }
}

/// A tensor in a buffer of f32, `[row][column]`; dropped, its buffer serves others.
#[derive(Debug)]
pub(super) struct Tensor {
    pub rows: u32,
    pub columns: u32,
    pub buffer: wgpu::Buffer,
    home: Scratch,
}

impl Tensor {
    /// Numbers in it.
    pub fn numbers(&self) -> u32 {
        self.rows * self.columns
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        self.home.free().push(self.buffer.clone());
    }
}
