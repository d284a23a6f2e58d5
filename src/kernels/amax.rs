//! `amax`: the largest finite magnitude of f32 rows, for calibration.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::{Listed, groups_for};
use crate::error::Result;
use crate::gpu::{Access, Binding, Gpu, Kernel, binding};
use crate::shader::Composer;

/// The uniform.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    /// Numbers to look at.
    pub numbers: u32,
    /// First of them in the source.
    pub offset: u32,
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

/// Numbers of one invocation.
const PER_INVOCATION: u32 = 16;

/// The planned kernel.
#[derive(Debug)]
pub struct Amax {
    kernel: Arc<Kernel>,
}

/// Parts and constants.
pub fn composer() -> Composer {
    let mut composer = Composer::new(LISTED.name, LISTED.wgsl);
    composer.set("PER_INVOCATION", PER_INVOCATION);
    composer
}

impl Amax {
    /// Builds the kernel.
    ///
    /// # Errors
    /// [`crate::Error::Shader`] where the driver refuses it.
    pub fn plan(gpu: &Gpu) -> Result<Amax> {
        Ok(Amax {
            kernel: gpu.kernel(LISTED.name, BINDINGS, &composer())?,
        })
    }

    /// Records one dispatch: the largest magnitude of `numbers` f32 from `offset` on joins `largest[slot]`.
    ///
    /// # Errors
    /// [`crate::Error::Limit`] for more numbers than one dispatch can hold.
    pub fn encode(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        [source, largest]: [&wgpu::Buffer; 2],
        params: Params,
    ) -> Result<()> {
        let groups = groups_for(LISTED.name, u64::from(params.numbers.div_ceil(PER_INVOCATION)))?;
        self.kernel
            .encode(gpu, pass, &[&gpu.uniform(&params), source, largest], groups);
        Ok(())
    }
}
