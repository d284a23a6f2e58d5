//! GPU kernels: a file a kernel, of the same name as its WGSL file, its entry point and its CPU reference.
//!
//! Each has `Params` (the uniform), `BINDINGS`, `composer` (parts and constants), `plan` (limits checked, pipeline
//! built) and `encode` (records one dispatch).

pub mod amax;
pub mod attention_merge;
pub mod attention_split;
pub mod dequantize;
pub mod quantize;
pub mod quantize_group;
pub mod tensor_scale;

use crate::formats::Element;
use crate::gpu::{Binding, fold};
use crate::pages::PageLayout;
use crate::scales::{SCALE_TYPES, ScaleType};
use crate::shader::Composer;
use crate::spec::Side;
use crate::{Error, Result};

/// A kernel as lists and tests see it.
#[derive(Debug, Clone, Copy)]
pub struct Listed {
    /// The name: file, entry point, reference function.
    pub name: &'static str,
    /// Its WGSL file's text.
    pub wgsl: &'static str,
    /// Its bindings, in order.
    pub bindings: &'static [Binding],
}

/// Every cache kernel. `crate::model::kernels::ALL` lists those that only the transformer needs.
pub const ALL: [Listed; 7] = [
    quantize::LISTED,
    quantize_group::LISTED,
    dequantize::LISTED,
    attention_split::LISTED,
    attention_merge::LISTED,
    amax::LISTED,
    tensor_scale::LISTED,
];

/// Invocations of a workgroup where a kernel's file says nothing else.
pub const WG_SIZE: u32 = 64;

/// Workgroups for a number of invocations, folded.
pub(crate) fn groups_for(kernel: &str, invocations: u64) -> Result<[u32; 3]> {
    let [x, y] = fold(kernel, invocations.div_ceil(u64::from(WG_SIZE)))?;
    // Kernels number their invocations in 32 bits, those beyond the end of the work too.
    let numbered = u64::from(x) * u64::from(y) * u64::from(WG_SIZE);
    if numbered > 1 << 32 {
        return Err(Error::Limit {
            what: format!("`{kernel}` (invocations)"),
            needed: numbered,
            allowed: 1 << 32,
            advice: "split the work into several calls".to_owned(),
        });
    }
    Ok([x, y, 1])
}

/// The type of numbers that attention reads as queries, or writes as outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FloatType {
    /// binary32.
    #[default]
    F32,
    /// binary16, two to a word.
    F16,
}

impl FloatType {
    /// Bytes of a number.
    pub fn bytes(self) -> u32 {
        match self {
            FloatType::F32 => 4,
            FloatType::F16 => 2,
        }
    }
}

/// A buffer of queries or outputs, `[token][head][channel]`. A buffer alone holds f32.
#[derive(Debug, Clone, Copy)]
pub struct Floats<'a> {
    /// The buffer.
    pub buffer: &'a wgpu::Buffer,
    /// The type of its numbers.
    pub float: FloatType,
}

impl<'a> Floats<'a> {
    /// A buffer of binary16.
    pub fn f16(buffer: &'a wgpu::Buffer) -> Floats<'a> {
        let float = FloatType::F16;
        Floats { buffer, float }
    }
}

impl<'a> From<&'a wgpu::Buffer> for Floats<'a> {
    fn from(buffer: &'a wgpu::Buffer) -> Floats<'a> {
        let float = FloatType::F32;
        Floats { buffer, float }
    }
}

/// Where a row's numbers lie in the source buffer of `quantize`, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowStrides {
    /// First element of row 0.
    pub offset: u32,
    /// From a token to the next.
    pub row: u32,
    /// From a head to the next.
    pub head: u32,
}

impl RowStrides {
    /// Rows that lie close together, `[token][head][channel]`.
    pub fn dense(page: &PageLayout) -> RowStrides {
        RowStrides {
            offset: 0,
            row: page.heads * page.head_dim,
            head: page.head_dim,
        }
    }
}

/// Every kernel composed for every side, every pair of sides, every row source and scale type, at one shape: what the
/// shader tests compile. Each entry has a name that is a file name too.
///
/// # Errors
/// [`Error::Shape`] where a side does not fit the shape.
pub fn catalogue(kv_heads: u32, head_dim: u32, ratio: u32, tokens: u32) -> Result<Vec<(String, Composer)>> {
    let pages = |sides: Vec<Side>| -> Result<Vec<PageLayout>> {
        sides
            .into_iter()
            .map(|side| PageLayout::new(side, kv_heads, head_dim, tokens))
            .collect()
    };
    let named = Side::all();
    // The published convention's sides, and the scale types that no name has yet.
    let others: Vec<Side> = SCALE_TYPES
        .into_iter()
        .flat_map(|scale| named.iter().map(move |side| side.with_scale_type(scale)))
        .filter(|side| !named.contains(side))
        .collect();
    let waiting = pages(vec![Side::F16, Side::F32])?;
    let mut all = vec![
        ("amax".to_owned(), amax::composer()),
        ("tensor_scale".to_owned(), tensor_scale::composer(Element::E4m3)),
    ];
    let mut add = |name: String, composer| {
        let plain: String = name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
            .collect();
        all.push((plain, composer));
    };
    for float in [FloatType::F32, FloatType::F16] {
        add(
            format!("attention_merge {float:?} output"),
            attention_merge::composer(head_dim, float),
        );
    }
    for page in pages(named.iter().chain(&others).copied().collect())? {
        let side = page.side;
        add(format!("dequantize {side}"), dequantize::composer(&page));
        if side.layout.token_group() > 1 {
            for from in &waiting {
                add(
                    format!("quantize_group {side} from {}", from.side),
                    quantize_group::composer(&page, from),
                );
            }
            continue;
        }
        add(
            format!("quantize {side} f32 rows"),
            quantize::composer(&page, &quantize::Source::F32),
        );
        add(
            format!("quantize {side} f16 rows"),
            quantize::composer(&page, &quantize::Source::F16),
        );
        for from in &waiting {
            let source = quantize::Source::Pages(*from);
            add(
                format!("quantize {side} from {}", from.side),
                quantize::composer(&page, &source),
            );
        }
    }
    for k in pages(named.clone())? {
        for v in pages(named.clone())? {
            for (tile, prefill) in [("decode", false), ("prefill", true)] {
                let tiling = attention_split::Tiling::new(&k, ratio, prefill);
                let name = format!("attention_split {} {} {tile}", k.side, v.side);
                add(
                    name,
                    attention_split::composer(&k, &v, ratio, tiling, FloatType::F32),
                );
            }
        }
    }
    // The published convention mixes sides: K per channel, V per token, all with f32 scales.
    let published = others.iter().filter(|side| side.scale == ScaleType::F32).copied();
    let (published, others) = (pages(published.collect())?, pages(others)?);
    for (k, v) in published
        .iter()
        .flat_map(|k| published.iter().map(move |v| (k, v)))
    {
        if k.side != v.side && k.side.element == v.side.element {
            let tiling = attention_split::Tiling::new(k, ratio, true);
            add(
                format!("attention_split {} {}", k.side, v.side),
                attention_split::composer(k, v, ratio, tiling, FloatType::F32),
            );
        }
    }
    for page in others {
        let tiling = attention_split::Tiling::new(&page, ratio, true);
        add(
            format!("attention_split {}", page.side),
            attention_split::composer(&page, &page, ratio, tiling, FloatType::F32),
        );
    }
    for page in pages(named)? {
        let tiling = attention_split::Tiling::new(&page, ratio, false);
        add(
            format!("attention_split {} f16 queries", page.side),
            attention_split::composer(&page, &page, ratio, tiling, FloatType::F16),
        );
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invocation_numbers_fit_32_bits() {
        assert_eq!(groups_for("k", 0).unwrap(), [0, 0, 1]);
        assert_eq!(groups_for("k", 65).unwrap(), [2, 1, 1]);
        for invocations in [1 << 30, (1 << 32) - 70_000] {
            let [x, y, _] = groups_for("k", invocations).unwrap();
            let numbered = u64::from(x) * u64::from(y) * u64::from(WG_SIZE);
            assert!(numbered >= invocations && numbered <= 1 << 32);
        }
        // Folded into rows, these would need numbers above 2^32, which wrap to work that is done already.
        for invocations in [u64::from(u32::MAX), 1 << 33, 1 << 50] {
            assert!(groups_for("k", invocations).is_err());
        }
    }
}
