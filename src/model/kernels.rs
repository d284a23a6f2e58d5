//! The kernels that the transformer needs besides attention: plain f32, `shaders/model/<name>.wgsl`. Their CPU
//! reference is the f64 backend.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use crate::error::Result;
use crate::gpu::{Access, Gpu, Kernel, binding, fold};
use crate::kernels::{FloatType, Listed, groups_for};
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

/// `embed`: rows of a table.
pub const EMBED: Listed = listed!("embed", "ids" Read, "weight" Read, "output" Write);
/// `norm`: layer norm without gain or bias.
pub const NORM: Listed = listed!("norm", "x" Read, "output" Write);
/// `rms_norm`: RMS norm with a gain.
pub const RMS_NORM: Listed = listed!("rms_norm", "x" Read, "gain" Read, "output" Write);
/// `matmul`: many rows times a weight.
pub const MATMUL: Listed = listed!("matmul", "x" Read, "weight" Read, "output" Write);
/// `matvec`: few rows times a weight.
pub const MATVEC: Listed = listed!("matvec", "x" Read, "weight" Read, "output" Write);
/// `rope`: heads turned by their positions.
pub const ROPE: Listed = listed!("rope", "x" Read, "turns" Read, "output" Write);
/// `activation`: GELU, tanh form.
pub const ACTIVATION: Listed = listed!("activation", "x" Read, "output" Write);
/// `swiglu`: a gated activation.
pub const SWIGLU: Listed = listed!("swiglu", "gate" Read, "up" Read, "output" Write);
/// `residual`: the sum of two tensors.
pub const RESIDUAL: Listed = listed!("residual", "x" Read, "y" Read, "output" Write);

/// All of them.
pub const ALL: [Listed; 9] = [
    EMBED, NORM, RMS_NORM, MATMUL, MATVEC, ROPE, ACTIVATION, SWIGLU, RESIDUAL,
];

/// Rows and columns of a workgroup of `matmul`, and columns of one of `matvec`.
pub(crate) const TILE: u64 = 32;

/// Up to so many rows `matvec` is used: `matmul` would compute most of its 32 rows for nothing.
const FEW_ROWS: u32 = 4;

/// Uniform of `embed`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct EmbedParams {
    /// Tokens.
    pub tokens: u32,
    /// Columns of the table, a multiple of 4.
    pub columns: u32,
    /// First row of the part of the table.
    pub first_row: u32,
    /// Its rows.
    pub rows: u32,
}

/// Uniform of `norm` and `rms_norm`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct NormParams {
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub columns: u32,
    /// Added to the variance, or to the mean square.
    pub epsilon: f32,
}

/// Uniform of `matmul` and `matvec`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct MatmulParams {
    /// Rows of x.
    pub rows: u32,
    /// Columns of x, a multiple of 4.
    pub inner: u32,
    /// Outputs of this part of the weight.
    pub columns: u32,
    /// The first of them.
    pub first_column: u32,
    /// Columns of the output: outputs of all parts.
    pub output_columns: u32,
}

/// Uniform of `rope`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct RopeParams {
    /// Tokens.
    pub tokens: u32,
    /// Heads.
    pub heads: u32,
    /// Channels of a head.
    pub head_dim: u32,
    /// Position of token 0.
    pub first_position: u32,
    /// 1 where channel i turns with i + head_dim / 2, 0 where 2 i turns with 2 i + 1.
    pub halves: u32,
}

/// Uniform of `activation`, `swiglu` and `residual`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct NumbersParams {
    /// Numbers.
    pub numbers: u32,
}

/// The composed kernels, with weights of both types: what the shader tests compile.
pub fn catalogue() -> Vec<(String, Composer)> {
    let mut all = Vec::new();
    for kernel in &ALL {
        if weighted(kernel) {
            for float in [FloatType::F32, FloatType::F16] {
                let name = format!("{}_{float:?}", kernel.name).to_lowercase();
                all.push((name, with_weight(kernel, float)));
            }
        } else {
            all.push((kernel.name.to_owned(), plain(kernel)));
        }
    }
    all
}

fn weighted(kernel: &Listed) -> bool {
    kernel.bindings.iter().any(|binding| binding.name == "weight")
}

fn plain(kernel: &Listed) -> Composer {
    Composer::new(kernel.name, kernel.wgsl)
}

fn with_weight(kernel: &Listed, float: FloatType) -> Composer {
    let mut composer = plain(kernel);
    match float {
        FloatType::F32 => composer.part(
            "parts/weight_f32",
            include_str!("../../shaders/parts/weight_f32.wgsl"),
        ),
        FloatType::F16 => composer.part(
            "parts/weight_f16",
            include_str!("../../shaders/parts/weight_f16.wgsl"),
        ),
    };
    composer
}

/// The planned kernels; those with weights by the weights' type.
#[derive(Debug)]
pub struct ModelKernels {
    embed: [Arc<Kernel>; 2],
    norm: Arc<Kernel>,
    rms_norm: Arc<Kernel>,
    matmul: [Arc<Kernel>; 2],
    matvec: [Arc<Kernel>; 2],
    rope: Arc<Kernel>,
    activation: Arc<Kernel>,
    swiglu: Arc<Kernel>,
    residual: Arc<Kernel>,
}

impl ModelKernels {
    /// Builds them.
    ///
    /// # Errors
    /// [`crate::Error::Shader`] where the driver refuses one.
    pub fn plan(gpu: &Gpu) -> Result<ModelKernels> {
        let build = |kernel: &Listed| gpu.kernel(kernel.name, kernel.bindings, &plain(kernel));
        let both = |kernel: &Listed| -> Result<[Arc<Kernel>; 2]> {
            let one = |float| gpu.kernel(kernel.name, kernel.bindings, &with_weight(kernel, float));
            Ok([one(FloatType::F32)?, one(FloatType::F16)?])
        };
        Ok(ModelKernels {
            embed: both(&EMBED)?,
            norm: build(&NORM)?,
            rms_norm: build(&RMS_NORM)?,
            matmul: both(&MATMUL)?,
            matvec: both(&MATVEC)?,
            rope: build(&ROPE)?,
            activation: build(&ACTIVATION)?,
            swiglu: build(&SWIGLU)?,
            residual: build(&RESIDUAL)?,
        })
    }

    /// Records `embed`: ids, table (as weights of type `float` lie), output.
    ///
    /// # Errors
    /// [`crate::Error::Limit`].
    pub fn embed(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        [ids, table, output]: [&wgpu::Buffer; 3],
        params: EmbedParams,
        float: FloatType,
    ) -> Result<()> {
        let quads = u64::from(params.tokens) * u64::from(params.columns / 4);
        let groups = groups_for(EMBED.name, quads)?;
        let buffers = [&gpu.uniform(&params), ids, table, output];
        self.embed[float as usize].encode(gpu, pass, &buffers, groups);
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
        let buffers = [&gpu.uniform(&params), x, output];
        self.norm.encode(gpu, pass, &buffers, [groups_x, groups_y, 1]);
        Ok(())
    }

    /// Records `rms_norm`: x, gain, output.
    ///
    /// # Errors
    /// [`crate::Error::Limit`].
    pub fn rms_norm(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        [x, gain, output]: [&wgpu::Buffer; 3],
        params: NormParams,
    ) -> Result<()> {
        let [groups_x, groups_y] = fold(RMS_NORM.name, u64::from(params.rows))?;
        let buffers = [&gpu.uniform(&params), x, gain, output];
        self.rms_norm.encode(gpu, pass, &buffers, [groups_x, groups_y, 1]);
        Ok(())
    }

    /// Records a product, `matvec` for few rows and `matmul` for more: x, weight (`[inner quad][output][4]`, of type
    /// `float`), output.
    ///
    /// # Errors
    /// [`crate::Error::Limit`].
    pub fn product(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        buffers: [&wgpu::Buffer; 3],
        params: MatmulParams,
        float: FloatType,
    ) -> Result<()> {
        match params.rows <= FEW_ROWS {
            true => self.matvec(gpu, pass, buffers, params, float),
            false => self.matmul(gpu, pass, buffers, params, float),
        }
    }

    /// Records `matmul`: x, weight, output.
    ///
    /// # Errors
    /// [`crate::Error::Limit`].
    pub fn matmul(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        [x, weight, output]: [&wgpu::Buffer; 3],
        params: MatmulParams,
        float: FloatType,
    ) -> Result<()> {
        let tiles = u64::from(params.rows).div_ceil(TILE) * u64::from(params.columns).div_ceil(TILE);
        let [groups_x, groups_y] = fold(MATMUL.name, tiles)?;
        let buffers = [&gpu.uniform(&params), x, weight, output];
        self.matmul[float as usize].encode(gpu, pass, &buffers, [groups_x, groups_y, 1]);
        Ok(())
    }

    /// Records `matvec`: x, weight, output.
    ///
    /// # Errors
    /// [`crate::Error::Limit`].
    pub fn matvec(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        [x, weight, output]: [&wgpu::Buffer; 3],
        params: MatmulParams,
        float: FloatType,
    ) -> Result<()> {
        let tiles = u64::from(params.rows) * u64::from(params.columns).div_ceil(TILE);
        let [groups_x, groups_y] = fold(MATVEC.name, tiles)?;
        let buffers = [&gpu.uniform(&params), x, weight, output];
        self.matvec[float as usize].encode(gpu, pass, &buffers, [groups_x, groups_y, 1]);
        Ok(())
    }

    /// Records `rope`: x, turns, output.
    ///
    /// # Errors
    /// [`crate::Error::Limit`].
    pub fn rope(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        [x, turns, output]: [&wgpu::Buffer; 3],
        params: RopeParams,
    ) -> Result<()> {
        let heads = u64::from(params.tokens) * u64::from(params.heads);
        let groups = groups_for(ROPE.name, heads * u64::from(params.head_dim / 2))?;
        let buffers = [&gpu.uniform(&params), x, turns, output];
        self.rope.encode(gpu, pass, &buffers, groups);
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
        let buffers = [&gpu.uniform(&NumbersParams { numbers }), x, output];
        self.activation.encode(gpu, pass, &buffers, groups);
        Ok(())
    }

    /// Records `swiglu`: gate, up, output.
    ///
    /// # Errors
    /// [`crate::Error::Limit`].
    pub fn swiglu(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        [gate, up, output]: [&wgpu::Buffer; 3],
        numbers: u32,
    ) -> Result<()> {
        let groups = groups_for(SWIGLU.name, u64::from(numbers))?;
        let buffers = [&gpu.uniform(&NumbersParams { numbers }), gate, up, output];
        self.swiglu.encode(gpu, pass, &buffers, groups);
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
        let buffers = [&gpu.uniform(&NumbersParams { numbers }), x, y, output];
        self.residual.encode(gpu, pass, &buffers, groups);
        Ok(())
    }
}
