//! `amax`: the largest finite magnitude of rows, for calibration.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::quantize::Source;
use super::{FloatType, Listed, groups_for};
use crate::error::Result;
use crate::gpu::{Access, Binding, Gpu, Kernel, binding};
use crate::shader::Composer;

/// The uniform.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    /// Rows.
    pub tokens: u32,
    /// Heads of a row.
    pub heads: u32,
    /// Numbers of a head.
    pub head_dim: u32,
    /// First element of row 0.
    pub row_offset: u32,
    /// Elements from a token to the next.
    pub row_stride: u32,
    /// Elements from a head to the next.
    pub head_stride: u32,
    /// Place of the result.
    pub slot: u32,
}

/// Group 0.
pub const BINDINGS: &[Binding] = &[
    binding("params", Access::Uniform),
    binding("source", Access::Read),
    binding("largest", Access::Write),
];

/// In the list of kernels.
pub const LISTED: Listed = Listed {
    name: "amax",
    wgsl: include_str!("../../shaders/amax.wgsl"),
    bindings: BINDINGS,
};

/// Numbers of one invocation, of one head.
pub(crate) const PER_INVOCATION: u32 = 16;

/// The planned kernel.
#[derive(Debug)]
pub struct Amax {
    kernel: Arc<Kernel>,
}

/// Parts and constants for rows of type `float`.
pub fn composer(float: FloatType) -> Composer {
    let mut composer = Composer::new(LISTED.name, LISTED.wgsl);
    Source::from(float).compose(&mut composer);
    composer.set("PER_INVOCATION", PER_INVOCATION);
    composer
}

impl Amax {
    /// Builds the kernel for rows of type `float`.
    ///
    /// # Errors
    /// [`crate::Error::Shader`] where the driver refuses it.
    pub fn plan(gpu: &Gpu, float: FloatType) -> Result<Amax> {
        Ok(Amax {
            kernel: gpu.kernel(LISTED.name, BINDINGS, &composer(float))?,
        })
    }

    /// Records one dispatch: the largest magnitude of the rows in `source` joins `largest[slot]`.
    ///
    /// # Errors
    /// [`crate::Error::Limit`] for more rows than one dispatch can hold.
    pub fn encode(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        [source, largest]: [&wgpu::Buffer; 2],
        params: Params,
    ) -> Result<()> {
        let parts = u64::from(params.heads) * u64::from(params.head_dim.div_ceil(PER_INVOCATION));
        let groups = groups_for(LISTED.name, u64::from(params.tokens).saturating_mul(parts))?;
        self.kernel
            .encode(gpu, pass, &[&gpu.uniform(&params), source, largest], groups);
        Ok(())
    }
}
