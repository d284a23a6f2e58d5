//! `attention_merge`: partials into outputs and LSE.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::Listed;
use crate::error::Result;
use crate::gpu::{Access, Binding, Gpu, Kernel, binding, fold};
use crate::shader::Composer;

/// The uniform.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    /// Query tokens x query heads.
    pub rows: u32,
    /// Query heads.
    pub q_heads: u32,
}

/// Group 0.
pub const BINDINGS: &[Binding] = &[
    binding("params", Access::Uniform),
    binding("merges", Access::Read),
    binding("partial_o", Access::Read),
    binding("partial_ml", Access::Read),
    binding("output", Access::Write),
    binding("lse", Access::Write),
];

/// In the list of kernels.
pub const LISTED: Listed = Listed {
    name: "attention_merge",
    wgsl: include_str!("../../shaders/attention_merge.wgsl"),
    bindings: BINDINGS,
};

/// The planned kernel.
#[derive(Debug)]
pub struct AttentionMerge {
    kernel: Arc<Kernel>,
    q_heads: u32,
}

/// Parts and constants.
pub fn composer(v_head_dim: u32) -> Composer {
    let mut composer = Composer::new(LISTED.name, LISTED.wgsl);
    composer.set("V_QUADS", v_head_dim / 4);
    composer
}

impl AttentionMerge {
    /// Builds the kernel.
    ///
    /// # Errors
    /// [`crate::Error::Shader`] where the driver refuses it.
    pub fn plan(gpu: &Gpu, q_heads: u32, v_head_dim: u32) -> Result<AttentionMerge> {
        let kernel = gpu.kernel(LISTED.name, BINDINGS, &composer(v_head_dim))?;
        Ok(AttentionMerge { kernel, q_heads })
    }

    /// Records one dispatch over `tokens` query tokens: [`crate::work::Merge`]s, both partial buffers, the output
    /// ([token, query head, channel]) and the LSE.
    ///
    /// # Errors
    /// [`crate::Error::Limit`] for more rows than one dispatch can hold.
    pub fn encode(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        [merges, partial_o, partial_ml, output, lse]: [&wgpu::Buffer; 5],
        tokens: u32,
    ) -> Result<()> {
        let rows = u64::from(tokens) * u64::from(self.q_heads);
        let [x, y] = fold(LISTED.name, rows)?;
        let params = gpu.uniform(&Params {
            rows: rows as u32,
            q_heads: self.q_heads,
        });
        self.kernel.encode(
            gpu,
            pass,
            &[&params, merges, partial_o, partial_ml, output, lse],
            [x, y, 1],
        );
        Ok(())
    }
}
