//! The kernels that the transformer needs besides attention: plain f32, `shaders/model/<name>.wgsl`. Their CPU
//! reference is the f64 backend.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use crate::error::Result;
use crate::gpu::{Access, Gpu, Kernel, binding, fold};
use crate::kernels::{Listed, groups_for};
use crate::shader::Composer;

macro_rules! listed {
    ($name:literal, $($binding:literal $access:ident),+) => {
        Listed {
            name: $name,
            wgsl: include_str!(concat!("../../shaders/model/", $name, ".wgsl")),
            bindings: &[binding("params", Access::Uniform), $(binding($binding, Access::$access)),+],
        }
    };
}

/// `embed`: token embeddings plus those of their positions.
pub const EMBED: Listed = listed!("embed", "ids" Read, "table" Read, "positions" Read, "output" Write);
/// `norm`: layer norm without gain or bias.
pub const NORM: Listed = listed!("norm", "x" Read, "output" Write);
/// `matmul`: rows times a weight.
pub const MATMUL: Listed = listed!("matmul", "x" Read, "weight" Read, "output" Write);
/// `activation`: GELU, tanh form.
pub const ACTIVATION: Listed = listed!("activation", "x" Read, "output" Write);
/// `residual`: the sum of two tensors.
pub const RESIDUAL: Listed = listed!("residual", "x" Read, "y" Read, "output" Write);

/// All of them.
pub const ALL: [Listed; 5] = [EMBED, NORM, MATMUL, ACTIVATION, RESIDUAL];

/// Uniform of `embed`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct EmbedParams {
    /// Tokens.
    pub tokens: u32,
    /// d_model.
    pub columns: u32,
    /// Position of token 0.
    pub first_position: u32,
}

/// Uniform of `norm`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct NormParams {
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub columns: u32,
    /// Added to the variance.
    pub epsilon: f32,
}

/// Uniform of `matmul`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct MatmulParams {
    /// Rows of x.
    pub rows: u32,
    /// Columns of x.
    pub inner: u32,
    /// Columns of the output.
    pub columns: u32,
}

/// Uniform of `activation` and `residual`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct NumbersParams {
    /// Numbers.
    pub numbers: u32,
}

/// The composed kernels, `matmul` in both forms: what the shader tests compile.
pub fn catalogue() -> Vec<(String, Composer)> {
    let mut all: Vec<_> = ALL
        .iter()
        .filter(|k| k.name != MATMUL.name)
        .map(|k| (k.name.to_owned(), plain(k)))
        .collect();
    all.push(("matmul".to_owned(), matmul(false)));
    all.push(("matmul_transposed".to_owned(), matmul(true)));
    all
}

fn plain(kernel: &Listed) -> Composer {
    Composer::new(kernel.name, kernel.wgsl)
}

fn matmul(transposed: bool) -> Composer {
    let mut composer = plain(&MATMUL);
    composer.set("TRANSPOSED", transposed);
    composer
}

/// The planned kernels.
#[derive(Debug)]
pub struct ModelKernels {
    embed: Arc<Kernel>,
    norm: Arc<Kernel>,
    matmul: [Arc<Kernel>; 2],
    activation: Arc<Kernel>,
    residual: Arc<Kernel>,
}

impl ModelKernels {
    /// Builds them.
    ///
    /// # Errors
    /// [`crate::Error::Shader`] where the driver refuses one.
    pub fn plan(gpu: &Gpu) -> Result<ModelKernels> {
        let build = |kernel: &Listed, composer: &Composer| gpu.kernel(kernel.name, kernel.bindings, composer);
        Ok(ModelKernels {
            embed: build(&EMBED, &plain(&EMBED))?,
            norm: build(&NORM, &plain(&NORM))?,
            matmul: [build(&MATMUL, &matmul(false))?, build(&MATMUL, &matmul(true))?],
            activation: build(&ACTIVATION, &plain(&ACTIVATION))?,
            residual: build(&RESIDUAL, &plain(&RESIDUAL))?,
        })
    }

    /// Records `embed`: ids, table, positions, output.
    ///
    /// # Errors
    /// [`crate::Error::Limit`].
    pub fn embed(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        [ids, table, positions, output]: [&wgpu::Buffer; 4],
        params: EmbedParams,
    ) -> Result<()> {
        let groups = groups_for(EMBED.name, u64::from(params.tokens) * u64::from(params.columns))?;
        self.embed.encode(
            gpu,
            pass,
            &[&gpu.uniform(&params), ids, table, positions, output],
            groups,
        );
        Ok(())
    }

    /// Records `norm`: x, output.
    ///
    /// # Errors
    /// [`crate::Error::Limit`].
    pub fn norm(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        [x, output]: [&wgpu::Buffer; 2],
        params: NormParams,
    ) -> Result<()> {
        let [groups_x, groups_y] = fold(NORM.name, u64::from(params.rows))?;
        self.norm.encode(
            gpu,
            pass,
            &[&gpu.uniform(&params), x, output],
            [groups_x, groups_y, 1],
        );
        Ok(())
    }

    /// Records `matmul`: x, weight (`[in][out]`, or `[out][in]` where `transposed`), output.
    ///
    /// # Errors
    /// [`crate::Error::Limit`].
    pub fn matmul(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        [x, weight, output]: [&wgpu::Buffer; 3],
        params: MatmulParams,
        transposed: bool,
    ) -> Result<()> {
        let groups = groups_for(MATMUL.name, u64::from(params.rows) * u64::from(params.columns))?;
        let kernel = &self.matmul[usize::from(transposed)];
        kernel.encode(gpu, pass, &[&gpu.uniform(&params), x, weight, output], groups);
        Ok(())
    }

    /// Records `activation`: x, output.
    ///
    /// # Errors
    /// [`crate::Error::Limit`].
    pub fn activation(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        [x, output]: [&wgpu::Buffer; 2],
        numbers: u32,
    ) -> Result<()> {
        let groups = groups_for(ACTIVATION.name, u64::from(numbers))?;
        self.activation.encode(
            gpu,
            pass,
            &[&gpu.uniform(&NumbersParams { numbers }), x, output],
            groups,
        );
        Ok(())
    }

    /// Records `residual`: x, y, output.
    ///
    /// # Errors
    /// [`crate::Error::Limit`].
    pub fn residual(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        [x, y, output]: [&wgpu::Buffer; 3],
        numbers: u32,
    ) -> Result<()> {
        let groups = groups_for(RESIDUAL.name, u64::from(numbers))?;
        self.residual.encode(
            gpu,
            pass,
            &[&gpu.uniform(&NumbersParams { numbers }), x, y, output],
            groups,
        );
        Ok(())
    }
}
