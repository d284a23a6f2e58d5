//! `quantize_group`: closes token groups of a per-channel side from the pages in which their rows wait.

use std::sync::Arc;

use super::quantize::{Buffers, Params, Source, check_waiting, refuse};
use super::{Listed, groups_for};
use crate::error::Result;
use crate::gpu::{Access, Binding, Gpu, Kernel, binding};
use crate::pages::PageLayout;
use crate::shader::Composer;

/// Group 0.
pub const BINDINGS: &[Binding] = &[
    binding("params", Access::Uniform),
    binding("source", Access::Read),
    binding("runs", Access::Read),
    binding("pages", Access::Write),
    binding("status", Access::Write),
];

/// In the list of kernels.
pub const LISTED: Listed = Listed {
    name: "quantize_group",
    wgsl: include_str!("../../shaders/quantize_group.wgsl"),
    bindings: BINDINGS,
};

/// The planned kernel.
#[derive(Debug)]
pub struct QuantizeGroup {
    kernel: Arc<Kernel>,
    columns: u32,
}

/// Parts and constants; rows wait in pages of geometry `waiting`.
pub fn composer(page: &PageLayout, waiting: &PageLayout) -> Composer {
    let mut composer = Composer::new(LISTED.name, LISTED.wgsl);
    Source::Pages(*waiting).compose(&mut composer);
    composer.writes_side(page).largest(page.side.element);
    composer
}

impl QuantizeGroup {
    /// Builds the kernel for one page geometry.
    ///
    /// # Errors
    /// [`crate::Error::Usage`] for a side that is not per channel or pages in which rows cannot wait;
    /// [`crate::Error::Shader`] where the driver refuses it.
    pub fn plan(gpu: &Gpu, page: &PageLayout, waiting: &PageLayout) -> Result<QuantizeGroup> {
        if page.side.layout.token_group() == 1 {
            return Err(refuse(
                LISTED.name,
                page,
                "its tokens stand alone",
                "use quantize",
            ));
        }
        check_waiting(LISTED.name, page, waiting)?;
        let kernel = gpu.kernel(LISTED.name, BINDINGS, &composer(page, waiting))?;
        Ok(QuantizeGroup {
            kernel,
            columns: page.heads * page.head_words,
        })
    }

    /// Workgroups of a dispatch over `runs` groups.
    ///
    /// # Errors
    /// [`crate::Error::Limit`] for more groups than one dispatch can hold.
    pub fn workgroups(&self, runs: u32) -> Result<[u32; 3]> {
        groups_for(LISTED.name, u64::from(runs) * u64::from(self.columns))
    }

    /// Records one dispatch over `runs` groups, of which each packs its last `count` slots. `buffers.source` holds the
    /// pages in which rows wait.
    ///
    /// # Errors
    /// [`crate::Error::Limit`] for more groups than one dispatch can hold.
    pub fn encode(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        buffers: &Buffers<'_>,
        runs: u32,
    ) -> Result<()> {
        let groups = self.workgroups(runs)?;
        let params = gpu.uniform(&Params {
            runs,
            row_offset: 0,
            row_stride: 0,
            head_stride: 0,
            side_tensor: 0,
        });
        let b = buffers;
        self.kernel
            .encode(gpu, pass, &[&params, b.source, b.runs, b.pages, b.status], groups);
        Ok(())
    }
}
