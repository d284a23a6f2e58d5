//! Scales of K and V that a checkpoint brings for an FP8 cache.

use super::{Checkpoint, Tensors};
use crate::error::Result;
use crate::scales::GIVEN_SCALE;

impl Checkpoint {
    /// The scales of K and V of every layer, `[layer][K, V]`: what
    /// [`TensorScales::Given`](crate::cache::TensorScales::Given) takes in place of calibrated ones. A stored number is
    /// code x scale. None where the checkpoint has none.
    ///
    /// Read are `model.layers.N.self_attn.` followed by `k_scale`, `k_proj.k_scale`, `attn.k_scale` or
    /// `k_proj.output_scale`, the same for v, and `kv_scale` for both.
    ///
    /// # Errors
    /// [`crate::Error::Usage`] with the tensor's name for one that is not a single number, that the codes cannot use
    /// (NaN, infinite, zero, negative or beyond the range of per-tensor scales), or that is missing where others are there.
    pub fn kv_scales(&mut self) -> Result<Option<Vec<[f32; 2]>>> {
        let mut scales = Vec::new();
        let mut missing = None;
        for layer in 0..self.config.layers {
            let mut sides = [0.0; 2];
            for (scale, side) in sides.iter_mut().zip(["k", "v"]) {
                match self.kv_scale(layer, side)? {
                    Some(value) => *scale = value,
                    None => missing = missing.or(Some((layer, side))),
                }
            }
            scales.push(sides);
        }
        let Some((layer, side)) = missing else {
            return Ok(Some(scales));
        };
        if scales.iter().flatten().any(|&scale| scale != 0.0) {
            return Err(self.refuse(format!(
                "tensor `model.layers.{layer}.self_attn.{side}_scale` is missing, while other layers or sides have theirs"
            )));
        }
        Ok(None)
    }

    fn kv_scale(&mut self, layer: u32, side: &str) -> Result<Option<f32>> {
        let names = [
            format!("{side}_scale"),
            format!("{side}_proj.{side}_scale"),
            format!("attn.{side}_scale"),
            format!("{side}_proj.output_scale"),
            "kv_scale".to_owned(),
        ];
        let mut found = names
            .iter()
            .map(|name| format!("model.layers.{layer}.self_attn.{name}"));
        let Some(name) = found.find(|name| self.shape(name).is_some()) else {
            return Ok(None);
        };
        let shape = self.shape(&name).unwrap_or_default();
        if shape.iter().any(|&extent| extent != 1) {
            return Err(self.refuse(format!(
                "tensor `{name}` has shape {shape:?}: a scale of K or V is one number for the whole layer"
            )));
        }
        let value = self.read(&name)?[0];
        if !GIVEN_SCALE.contains(&f64::from(value)) {
            return Err(self.refuse(format!(
                "tensor `{name}` is {value}: a scale of K or V must be finite and lie in [2^-90, 2^118]"
            )));
        }
        Ok(Some(value))
    }
}
