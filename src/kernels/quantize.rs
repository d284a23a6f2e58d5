//! `quantize`: new rows into packed pages, for sides whose scale belongs to one token (or to none).

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::{FloatType, Listed, RowStrides, groups_for};
use crate::error::{Error, Result};
use crate::gpu::{Access, Binding, Gpu, Kernel, binding};
use crate::pages::PageLayout;
use crate::scales::{BLOCK_CHANNELS, ScaleLayout};
use crate::shader::Composer;

/// The uniform.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    /// Runs in the list.
    pub runs: u32,
    /// First element of row 0.
    pub row_offset: u32,
    /// Elements from a token to the next.
    pub row_stride: u32,
    /// Elements from a head to the next.
    pub head_stride: u32,
    /// Place of this side's per-tensor scale.
    pub side_tensor: u32,
}

/// Group 0.
pub const BINDINGS: &[Binding] = &[
    binding("params", Access::Uniform),
    binding("source", Access::Read),
    binding("runs", Access::Read),
    binding("tensor_scales", Access::Read),
    binding("pages", Access::Write),
    binding("status", Access::Write),
];

/// In the list of kernels.
pub const LISTED: Listed = Listed {
    name: "quantize",
    wgsl: include_str!("../../shaders/quantize.wgsl"),
    bindings: BINDINGS,
};

/// Where rows come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// f32 rows.
    F32,
    /// binary16 rows, two numbers a word.
    F16,
    /// Pages in which rows wait, f16 (or f32).
    Pages(PageLayout),
}

impl From<FloatType> for Source {
    fn from(float: FloatType) -> Source {
        match float {
            FloatType::F32 => Source::F32,
            FloatType::F16 => Source::F16,
        }
    }
}

impl Source {
    /// Adds the part that reads such rows.
    pub(super) fn compose(&self, composer: &mut Composer) {
        match self {
            Source::F32 => {
                composer.part(
                    "parts/rows_f32",
                    include_str!("../../shaders/parts/rows_f32.wgsl"),
                );
            }
            Source::F16 => {
                composer.part(
                    "parts/rows_f16",
                    include_str!("../../shaders/parts/rows_f16.wgsl"),
                );
                composer.widens_f16();
            }
            Source::Pages(page) => {
                composer.part(
                    "parts/rows_paged",
                    include_str!("../../shaders/parts/rows_paged.wgsl"),
                );
                composer.geometry("src", page).widens_f16();
            }
        }
    }
}

/// The buffers of one dispatch.
#[derive(Debug, Clone, Copy)]
pub struct Buffers<'a> {
    /// Rows, or pages.
    pub source: &'a wgpu::Buffer,
    /// [`crate::work::SlotRun`]s.
    pub runs: &'a wgpu::Buffer,
    /// f32 per-tensor scales, [layer, side].
    pub tensor_scales: &'a wgpu::Buffer,
    /// The pool.
    pub pages: &'a wgpu::Buffer,
    /// A [`crate::work::Status`].
    pub status: &'a wgpu::Buffer,
}

/// The planned kernel.
#[derive(Debug)]
pub struct Quantize {
    kernel: Arc<Kernel>,
    units: u32,
}

/// Units of a row, channels and words of a unit.
fn units(page: &PageLayout) -> (u32, u32, u32) {
    match page.side.layout {
        ScaleLayout::PerBlock => {
            let words = BLOCK_CHANNELS * page.side.element.bits() / 32;
            (page.heads * page.head_dim / BLOCK_CHANNELS, BLOCK_CHANNELS, words)
        }
        _ => (page.heads, page.head_dim, page.head_words),
    }
}

/// Parts and constants.
pub fn composer(page: &PageLayout, source: &Source) -> Composer {
    let (units, channels, words) = units(page);
    let mut composer = Composer::new(LISTED.name, LISTED.wgsl);
    source.compose(&mut composer);
    composer
        .writes_side(page)
        .largest(page.side.element)
        .set("UNITS", units)
        .set("UNIT_CHANNELS", channels)
        .set("UNIT_WORDS", words)
        .set("OWN_SCALE", page.side.layout.has_plane());
    let given = match page.side.layout {
        ScaleLayout::PerTensor => "tensor_scales[params.side_tensor]",
        _ => "1.0",
    };
    composer.glue(format!("fn given_scale() -> f32 {{ return {given}; }}"));
    composer
}

pub(super) fn refuse(kernel: &str, page: &PageLayout, reason: &str, advice: &str) -> Error {
    Error::Usage {
        asked: format!("`{kernel}` for `{}`", page.side),
        reason: reason.to_owned(),
        advice: advice.to_owned(),
    }
}

/// Refuses pages in which rows cannot wait for `page`.
pub(super) fn check_waiting(kernel: &str, page: &PageLayout, waiting: &PageLayout) -> Result<()> {
    let shape = |p: &PageLayout| (p.heads, p.head_dim, p.tokens);
    if waiting.side.element.info().plain && shape(waiting) == shape(page) {
        return Ok(());
    }
    Err(refuse(
        kernel,
        page,
        "rows wait in f16 or f32 pages of the same shape",
        "give such pages as the source",
    ))
}

impl Quantize {
    /// Builds the kernel for one page geometry and source.
    ///
    /// # Errors
    /// [`Error::Usage`] for a per-channel side (`quantize_group` packs those) or pages in which rows cannot wait;
    /// [`Error::Shader`] where the driver refuses it.
    pub fn plan(gpu: &Gpu, page: &PageLayout, source: &Source) -> Result<Quantize> {
        if page.side.layout.token_group() > 1 {
            return Err(refuse(
                LISTED.name,
                page,
                "its tokens are packed in groups",
                "use quantize_group",
            ));
        }
        if let Source::Pages(waiting) = source {
            check_waiting(LISTED.name, page, waiting)?;
        }
        let kernel = gpu.kernel(LISTED.name, BINDINGS, &composer(page, source))?;
        Ok(Quantize {
            kernel,
            units: units(page).0,
        })
    }

    /// Workgroups of a dispatch over `runs` runs.
    ///
    /// # Errors
    /// [`crate::Error::Limit`] for more runs than one dispatch can hold.
    pub fn workgroups(&self, runs: u32) -> Result<[u32; 3]> {
        groups_for(LISTED.name, u64::from(runs) * u64::from(self.units))
    }

    /// Records one dispatch over `runs` runs; `tensor` is the place of this side's per-tensor scale.
    ///
    /// # Errors
    /// [`crate::Error::Limit`] for more runs than one dispatch can hold.
    pub fn encode(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        buffers: &Buffers<'_>,
        runs: u32,
        rows: RowStrides,
        tensor: u32,
    ) -> Result<()> {
        let groups = self.workgroups(runs)?;
        let params = gpu.uniform(&Params {
            runs,
            row_offset: rows.offset,
            row_stride: rows.row,
            head_stride: rows.head,
            side_tensor: tensor,
        });
        let b = buffers;
        self.kernel.encode(
            gpu,
            pass,
            &[&params, b.source, b.runs, b.tensor_scales, b.pages, b.status],
            groups,
        );
        Ok(())
    }
}
