//! `attention_merge`: partials into outputs and LSE.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::{FloatType, Listed};
use crate::error::{Error, Result};
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
    /// 1 where there are sinks.
    pub sinks: u32,
    /// 1 where the LSE is asked for.
    pub lse: u32,
}

/// Group 0.
pub const BINDINGS: &[Binding] = &[
    binding("params", Access::Uniform),
    binding("merges", Access::Read),
    binding("partial_o", Access::Read),
    binding("partial_ml", Access::Read),
    binding("output", Access::Write),
    binding("lse", Access::Write),
    binding("sinks", Access::Read),
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
    /// Bound, and never written, where no LSE is asked for: a buffer that is written must stand in one binding only.
    no_lse: wgpu::Buffer,
}

/// Parts and constants for outputs of type `output`.
pub fn composer(v_head_dim: u32, output: FloatType) -> Composer {
    let mut composer = Composer::new(LISTED.name, LISTED.wgsl);
    composer.set("V_QUADS", v_head_dim / 4);
    match output {
        FloatType::F32 => composer.part(
            "parts/output_f32",
            include_str!("../../shaders/parts/output_f32.wgsl"),
        ),
        FloatType::F16 => composer
            .part(
                "parts/output_f16",
                include_str!("../../shaders/parts/output_f16.wgsl"),
            )
            .rounds_small_floats(),
    };
    composer
}

impl AttentionMerge {
    /// Builds the kernel for outputs of type `output`.
    ///
    /// # Errors
    /// [`crate::Error::Shader`] and [`crate::Error::Device`] where the driver refuses.
    pub fn plan(gpu: &Gpu, q_heads: u32, v_head_dim: u32, output: FloatType) -> Result<AttentionMerge> {
        Ok(AttentionMerge {
            kernel: gpu.kernel(LISTED.name, BINDINGS, &composer(v_head_dim, output))?,
            q_heads,
            no_lse: gpu.zeros("no LSE", 4)?,
        })
    }

    /// Workgroups of a dispatch over `tokens` query tokens.
    ///
    /// # Errors
    /// [`Error::Limit`] for more rows than one dispatch can hold.
    pub fn workgroups(&self, tokens: u32) -> Result<[u32; 3]> {
        let [x, y] = fold(LISTED.name, u64::from(tokens) * u64::from(self.q_heads))?;
        Ok([x, y, 1])
    }

    /// Records one dispatch over `tokens` query tokens: [`crate::work::Merge`]s, both partial buffers and the output
    /// ([token, query head, channel]); the LSE ([token, query head] f32) where it is asked for, and f32 sinks, one for
    /// each query head, where there are.
    ///
    /// # Errors
    /// [`Error::Limit`] for more rows than one dispatch can hold, [`Error::Shape`] for too few sinks.
    pub fn encode(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        [merges, partial_o, partial_ml, output]: [&wgpu::Buffer; 4],
        lse: Option<&wgpu::Buffer>,
        sinks: Option<&wgpu::Buffer>,
        tokens: u32,
    ) -> Result<()> {
        check_sinks(sinks, self.q_heads)?;
        let rows = u64::from(tokens) * u64::from(self.q_heads);
        let groups = self.workgroups(tokens)?;
        let params = gpu.uniform(&Params {
            rows: rows as u32,
            q_heads: self.q_heads,
            sinks: u32::from(sinks.is_some()),
            lse: u32::from(lse.is_some()),
        });
        let lse = lse.unwrap_or(&self.no_lse);
        // Some buffer must be bound where there are no sinks.
        let sinks = sinks.unwrap_or(merges);
        self.kernel.encode(
            gpu,
            pass,
            &[&params, merges, partial_o, partial_ml, output, lse, sinks],
            groups,
        );
        Ok(())
    }
}

/// Refuses a buffer with fewer sinks than query heads, or one that the kernel cannot bind.
pub(crate) fn check_sinks(sinks: Option<&wgpu::Buffer>, q_heads: u32) -> Result<()> {
    let Some(sinks) = sinks else { return Ok(()) };
    if !sinks.usage().contains(wgpu::BufferUsages::STORAGE) {
        return Err(Error::Usage {
            asked: "a buffer for sinks".to_owned(),
            reason: "it was made without the usage STORAGE".to_owned(),
            advice: "create it with wgpu::BufferUsages::STORAGE".to_owned(),
        });
    }
    if sinks.size() >= u64::from(q_heads) * 4 {
        return Ok(());
    }
    Err(Error::Shape {
        what: "sinks bytes",
        value: sinks.size(),
        limit: format!("the {q_heads} query heads take {} bytes", u64::from(q_heads) * 4),
        advice: "pass a buffer with one f32 for each query head".to_owned(),
    })
}
