//! `dequantize`: pages back into f32 rows, for checks and for export.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::{Listed, groups_for};
use crate::error::Result;
use crate::gpu::{Access, Binding, Gpu, Kernel, binding};
use crate::pages::PageLayout;
use crate::shader::Composer;

/// The uniform.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    /// Runs in the list.
    pub runs: u32,
    /// Place of this side's per-tensor scale.
    pub side_tensor: u32,
}

/// Group 0.
pub const BINDINGS: &[Binding] = &[
    binding("params", Access::Uniform),
    binding("side_pages", Access::Read),
    binding("runs", Access::Read),
    binding("tensor_scales", Access::Read),
    binding("rows", Access::Write),
];

/// In the list of kernels.
pub const LISTED: Listed = Listed {
    name: "dequantize",
    wgsl: include_str!("../../shaders/dequantize.wgsl"),
    bindings: BINDINGS,
};

/// The planned kernel.
#[derive(Debug)]
pub struct Dequantize {
    kernel: Arc<Kernel>,
    units: u32,
}

/// Parts and constants.
pub fn composer(page: &PageLayout) -> Composer {
    let mut composer = Composer::new(LISTED.name, LISTED.wgsl);
    composer.reads_side("side", page);
    composer
}

impl Dequantize {
    /// Builds the kernel for one page geometry.
    ///
    /// # Errors
    /// [`crate::Error::Shader`] where the driver refuses it.
    pub fn plan(gpu: &Gpu, page: &PageLayout) -> Result<Dequantize> {
        let kernel = gpu.kernel(LISTED.name, BINDINGS, &composer(page))?;
        Ok(Dequantize {
            kernel,
            units: page.heads * page.head_dim / 4,
        })
    }

    /// Workgroups of a dispatch over `runs` runs.
    ///
    /// # Errors
    /// [`crate::Error::Limit`] for more runs than one dispatch can hold.
    pub fn workgroups(&self, runs: u32) -> Result<[u32; 3]> {
        groups_for(LISTED.name, u64::from(runs) * u64::from(self.units))
    }

    /// Records one dispatch: `pages`, `runs` (a run's source is its first row), `tensor_scales`, and the rows written.
    ///
    /// # Errors
    /// [`crate::Error::Limit`] for more runs than one dispatch can hold.
    pub fn encode(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        [pages, runs, tensor_scales, rows]: [&wgpu::Buffer; 4],
        count: u32,
        tensor: u32,
    ) -> Result<()> {
        let groups = self.workgroups(count)?;
        let params = gpu.uniform(&Params {
            runs: count,
            side_tensor: tensor,
        });
        self.kernel
            .encode(gpu, pass, &[&params, pages, runs, tensor_scales, rows], groups);
        Ok(())
    }
}
