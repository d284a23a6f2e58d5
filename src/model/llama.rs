//! Models of the Llama architecture from checkpoints: every tensor checked before the first is read, then read one at a
//! time.

use std::collections::BTreeMap;

use super::weights::{GpuWeights, Weight};
use super::{Block, Config, Matrix, Model, Norm, Weights};
use crate::checkpoint::{LlamaConfig, Tensors};
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::kernels::FloatType;
use crate::rope::Rope;

/// Who is told of loading: (bytes done, of, the tensor).
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64, &str);

impl From<&LlamaConfig> for Config {
    fn from(c: &LlamaConfig) -> Config {
        Config {
            vocabulary: c.vocabulary,
            positions: c.context,
            d_model: c.hidden,
            q_heads: c.q_heads,
            kv_heads: c.kv_heads,
            head_dim: c.head_dim,
            blocks: c.layers,
            d_ff: c.feed_forward,
            norm: Norm::Rms,
            epsilon: c.norm_epsilon,
            rope: Some(Rope {
                theta: c.rope_theta,
                pairing: c.rope_pairing,
                scaling: c.rope_scaling.clone(),
            }),
        }
    }
}

const EMBEDDING: &str = "model.embed_tokens.weight";
const GAIN: &str = "model.norm.weight";
const HEAD: &str = "lm_head.weight";

fn of_layer(layer: u32, name: &str) -> String {
    format!("model.layers.{layer}.{name}.weight")
}

/// Every tensor's name with rows and columns: one row for a vector of gains.
fn shapes(config: &LlamaConfig) -> Vec<(String, [u32; 2])> {
    let fits = |extent: u64| u32::try_from(extent).unwrap_or(u32::MAX);
    let rows_and_columns = |shape: Vec<u64>| match shape[..] {
        [rows, columns] => [fits(rows), fits(columns)],
        _ => [1, fits(shape.iter().product())],
    };
    let tensors = config.tensors();
    tensors
        .map(|(name, shape)| (name, rows_and_columns(shape)))
        .collect()
}

/// Refuses a checkpoint that lacks a tensor or has one of another shape, and shapes that no kernel takes.
fn check(config: &LlamaConfig, tensors: &dyn Tensors) -> Result<()> {
    for (what, value) in [
        ("hidden size", config.hidden),
        ("feed-forward size", config.feed_forward),
    ] {
        if value == 0 || !value.is_multiple_of(4) {
            return Err(Error::Shape {
                what,
                value: u64::from(value),
                limit: "matrix products take four numbers at a time: a multiple of 4".to_owned(),
                advice: "check the model's configuration".to_owned(),
            });
        }
    }
    for (name, wanted) in config.tensors() {
        let reason = match tensors.shape(&name) {
            Some(found) if found == wanted => continue,
            Some(found) => format!("it is {found:?}, and by the configuration it would be {wanted:?}"),
            None => "the checkpoint lacks it".to_owned(),
        };
        return Err(Error::Usage {
            asked: format!("tensor `{name}`"),
            reason,
            advice: "check that the files and the configuration are of one model".to_owned(),
        });
    }
    Ok(())
}

/// Numbers of all weights.
fn numbers(config: &LlamaConfig) -> u64 {
    let count = |[rows, columns]: [u32; 2]| u64::from(rows) * u64::from(columns);
    shapes(config).iter().map(|(_, shape)| count(*shape)).sum()
}

/// Reads every tensor, in `form`.
fn load<T>(
    config: &LlamaConfig,
    tensors: &mut dyn Tensors,
    progress: Progress<'_>,
    mut form: impl FnMut(&str, [u32; 2], Vec<f32>) -> Result<T>,
) -> Result<Weights<T>> {
    check(config, tensors)?;
    let (of, mut done) = (numbers(config) * 4, 0);
    let mut all = BTreeMap::new();
    for (name, [rows, columns]) in shapes(config) {
        progress(done, of, &name);
        let values = tensors.read(&name)?;
        let numbers = values.len() as u64;
        if numbers != u64::from(rows) * u64::from(columns) {
            return Err(Error::Usage {
                asked: format!("tensor `{name}`"),
                reason: format!("{numbers} numbers were read of a shape {rows} x {columns}"),
                advice: "check the file".to_owned(),
            });
        }
        let formed = form(&name, [rows, columns], values)?;
        done += numbers * 4;
        all.insert(name, formed);
    }
    progress(done, of, "loaded");
    let mut take = |name: &str| {
        all.remove(name).ok_or_else(|| Error::Usage {
            asked: format!("tensor `{name}`"),
            reason: "it was not read".to_owned(),
            advice: "check the file".to_owned(),
        })
    };
    let blocks = (0..config.layers).map(|layer| {
        let mut of = |name: &str| take(&of_layer(layer, name));
        Ok(Block {
            attention_gain: Some(of("input_layernorm")?),
            q: of("self_attn.q_proj")?,
            k: of("self_attn.k_proj")?,
            v: of("self_attn.v_proj")?,
            o: of("self_attn.o_proj")?,
            feed_forward_gain: Some(of("post_attention_layernorm")?),
            gate: Some(of("mlp.gate_proj")?),
            up: of("mlp.up_proj")?,
            down: of("mlp.down_proj")?,
        })
    });
    let blocks = blocks.collect::<Result<_>>()?;
    Ok(Weights {
        blocks,
        embedding: take(EMBEDDING)?,
        positions: None,
        gain: Some(take(GAIN)?),
        head: (!config.tied).then(|| take(HEAD)).transpose()?,
    })
}

/// A model in memory, for the CPU reference: 8 bytes a weight.
///
/// # Errors
/// [`Error::Usage`] for a tensor that is missing, of another shape or unreadable; [`Error::Shape`] for sizes that no
/// kernel takes.
pub fn model(config: &LlamaConfig, tensors: &mut dyn Tensors, progress: Progress<'_>) -> Result<Model> {
    let weights = load(config, tensors, progress, |_, [rows, columns], values| {
        Ok(Matrix {
            rows,
            columns,
            values: values.into_iter().map(f64::from).collect(),
        })
    })?;
    Ok(Model {
        config: config.into(),
        weights,
    })
}

/// A model on a device, read and uploaded tensor by tensor; weights of type `float`, gains of f32.
///
/// # Errors
/// As [`model`]; [`Error::Limit`] where the device's memory cannot hold it, before anything is read; [`Error::Usage`] for
/// a weight beyond the range of f16 where it is to be one.
pub fn upload(
    gpu: &Gpu,
    config: &LlamaConfig,
    tensors: &mut dyn Tensors,
    float: FloatType,
    progress: Progress<'_>,
) -> Result<GpuWeights> {
    check(config, tensors)?;
    let mut reserved = GpuWeights::reserve(gpu, &shapes(config), float)?;
    let weights = load(config, tensors, progress, |name, _, values| -> Result<Weight> {
        let weight = reserved.remove(name).ok_or_else(|| Error::Usage {
            asked: format!("tensor `{name}`"),
            reason: "no memory was reserved for it".to_owned(),
            advice: "check the file".to_owned(),
        })?;
        weight.write(gpu, name, &values)?;
        Ok(weight)
    })?;
    GpuWeights::new(gpu, config.into(), weights)
}
