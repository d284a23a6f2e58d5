//! `tensor_scale`: per-tensor scales from the magnitudes that `amax` found.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::{Listed, groups_for};
use crate::error::{Error, Result};
use crate::formats::Element;
use crate::gpu::{Access, Binding, Gpu, Kernel, binding};
use crate::scales::ScaleType;
use crate::shader::Composer;

/// The uniform.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    /// First place.
    pub first: u32,
    /// Places.
    pub slots: u32,
}

/// Group 0.
pub const BINDINGS: &[Binding] = &[
    binding("params", Access::Uniform),
    binding("largest", Access::Write),
    binding("tensor_scales", Access::Write),
];

/// In the list of kernels.
pub const LISTED: Listed = Listed {
    name: "tensor_scale",
    wgsl: include_str!("../../shaders/tensor_scale.wgsl"),
    bindings: BINDINGS,
};

/// The planned kernel.
#[derive(Debug)]
pub struct TensorScale {
    kernel: Arc<Kernel>,
}

/// Parts and constants.
pub fn composer(element: Element) -> Composer {
    let mut composer = Composer::new(LISTED.name, LISTED.wgsl);
    composer
        .part("scales/stored_f32", ScaleType::F32.wgsl())
        .rounds_small_floats()
        .largest(element);
    composer
}

impl TensorScale {
    /// Builds the kernel for codes of `element`.
    ///
    /// # Errors
    /// [`Error::Usage`] for f16 and f32, which have no scale; [`Error::Shader`] where the driver refuses it.
    pub fn plan(gpu: &Gpu, element: Element) -> Result<TensorScale> {
        if element.info().plain {
            return Err(Error::Usage {
                asked: format!("a per-tensor scale for {}", element.info().name),
                reason: "it is stored without a scale".to_owned(),
                advice: "choose a quantised element".to_owned(),
            });
        }
        Ok(TensorScale {
            kernel: gpu.kernel(LISTED.name, BINDINGS, &composer(element))?,
        })
    }

    /// Records one dispatch over the places of `params`; the magnitudes start again from 0.
    ///
    /// # Errors
    /// [`crate::Error::Limit`] for more places than one dispatch can hold.
    pub fn encode(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        [largest, tensor_scales]: [&wgpu::Buffer; 2],
        params: Params,
    ) -> Result<()> {
        let groups = groups_for(LISTED.name, u64::from(params.slots))?;
        self.kernel.encode(
            gpu,
            pass,
            &[&gpu.uniform(&params), largest, tensor_scales],
            groups,
        );
        Ok(())
    }
}
