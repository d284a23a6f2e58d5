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
use crate::rope::RopePairing;
use crate::scales::{SCALE_TYPES, ScaleType};
use crate::shader::Composer;
use crate::spec::Side;
use crate::variant::{Arithmetic, Reduction, Variant};
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

/// The type of the numbers in a caller's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(
    feature = "export",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "lowercase")
)]
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

/// Rows of keys, values or queries in a caller's buffer, `[token][head][channel]`. A buffer alone holds f32 rows from its
/// start on.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// The buffer.
    pub buffer: &'a wgpu::Buffer,
    /// The type of its numbers.
    pub float: FloatType,
    /// Elements before the first number.
    pub offset: u32,
    /// Elements from a token to the next and from a head to the next; None: rows lie close together.
    pub strides: Option<[u32; 2]>,
}

impl<'a> From<&'a wgpu::Buffer> for Rows<'a> {
    fn from(buffer: &'a wgpu::Buffer) -> Rows<'a> {
        Rows {
            buffer,
            float: FloatType::F32,
            offset: 0,
            strides: None,
        }
    }
}

impl<'a> Rows<'a> {
    /// Rows of binary16 from the buffer's start on.
    pub fn f16(buffer: &'a wgpu::Buffer) -> Rows<'a> {
        Rows {
            float: FloatType::F16,
            ..Rows::from(buffer)
        }
    }

    /// The same, the first number at element `offset`.
    pub fn at(self, offset: u32) -> Rows<'a> {
        Rows { offset, ..self }
    }

    /// The same, with elements from a token to the next and from a head to the next. Any numbers will do:
    /// `[head][token][channel]` rows have `head_dim` and `tokens * head_dim`, and a stride of 0 repeats a row.
    pub fn strides(self, token: u32, head: u32) -> Rows<'a> {
        let strides = Some([token, head]);
        Rows { strides, ..self }
    }

    /// Where the numbers of rows of `heads` x `head_dim` lie. Meant for rows that [`Rows::check`] allows.
    pub fn row_strides(&self, heads: u32, head_dim: u32) -> RowStrides {
        let [row, head] = self.wide_strides(heads, head_dim).map(|stride| stride as u32);
        RowStrides {
            offset: self.offset,
            row,
            head,
        }
    }

    fn wide_strides(&self, heads: u32, head_dim: u32) -> [u64; 2] {
        match self.strides {
            Some(strides) => strides.map(u64::from),
            None => [u64::from(heads) * u64::from(head_dim), u64::from(head_dim)],
        }
    }

    /// Refuses rows that kernels cannot read; `what` is what an error calls their size, for example `k bytes`.
    ///
    /// # Errors
    /// [`Error::Usage`] for a buffer without the usage STORAGE, [`Error::Shape`] for one that is too small,
    /// [`Error::Limit`] where the index of the last element does not fit 32 bits.
    pub fn check(&self, what: &'static str, tokens: u32, heads: u32, head_dim: u32) -> Result<()> {
        let [token, head] = self.wide_strides(heads, head_dim);
        let mut elements = 0_u64;
        if tokens > 0 && heads > 0 && head_dim > 0 {
            let last = [(tokens, token), (heads, head), (head_dim, 1)]
                .map(|(count, stride)| u64::from(count - 1).saturating_mul(stride));
            elements = last
                .into_iter()
                .fold(u64::from(self.offset) + 1, u64::saturating_add);
        }
        if elements > 1 << 32 {
            return Err(Error::Limit {
                what: format!("{} (elements; kernels number them in 32 bits)", name_of(what)),
                needed: elements,
                allowed: 1 << 32,
                advice: "pass fewer rows, closer together".to_owned(),
            });
        }
        // Two halves are read as one word.
        let bytes = (elements * u64::from(self.float.bytes())).next_multiple_of(4);
        check_bytes(what, self.buffer, bytes)
    }
}

/// Where attention writes: outputs `[token][query head][channel]` that lie close together from the buffer's start on. A
/// buffer alone takes f32 and no LSE.
#[derive(Debug, Clone, Copy)]
pub struct Outputs<'a> {
    /// The buffer of the outputs.
    pub buffer: &'a wgpu::Buffer,
    /// The type of its numbers.
    pub float: FloatType,
    /// Where the LSE (the natural log of the sum of exp(score), scaled and capped as the options say) is wanted: f32,
    /// `[token][query head]`; negative infinity for a query that sees no position, unless there are sinks.
    pub lse: Option<&'a wgpu::Buffer>,
}

impl<'a> From<&'a wgpu::Buffer> for Outputs<'a> {
    fn from(buffer: &'a wgpu::Buffer) -> Outputs<'a> {
        Outputs {
            buffer,
            float: FloatType::F32,
            lse: None,
        }
    }
}

impl<'a> Outputs<'a> {
    /// Outputs of binary16, rounded once; beyond 65504 they become infinities.
    pub fn f16(buffer: &'a wgpu::Buffer) -> Outputs<'a> {
        Outputs {
            float: FloatType::F16,
            ..Outputs::from(buffer)
        }
    }

    /// The same, with the LSE.
    pub fn with_lse(self, lse: &'a wgpu::Buffer) -> Outputs<'a> {
        let lse = Some(lse);
        Outputs { lse, ..self }
    }

    /// Refuses buffers that kernels cannot write.
    ///
    /// # Errors
    /// [`Error::Usage`] for a buffer without the usage STORAGE and for one buffer in both places, [`Error::Shape`] for one
    /// that is too small.
    pub fn check(&self, tokens: u32, q_heads: u32, v_head_dim: u32) -> Result<()> {
        let rows = u64::from(tokens) * u64::from(q_heads);
        let row_bytes = u64::from(v_head_dim) * u64::from(self.float.bytes());
        check_bytes("output bytes", self.buffer, rows.saturating_mul(row_bytes))?;
        let Some(lse) = self.lse else { return Ok(()) };
        if lse == self.buffer {
            return Err(Error::Usage {
                asked: "outputs and LSE in one buffer".to_owned(),
                reason: "a kernel writes both at once".to_owned(),
                advice: "pass a buffer of its own for the LSE".to_owned(),
            });
        }
        check_bytes("lse bytes", lse, rows.saturating_mul(4))
    }
}

/// What rows are called whose size is called `what`.
fn name_of(what: &str) -> &str {
    what.trim_end_matches(" bytes")
}

/// Refuses a buffer that kernels cannot bind, or that holds less than a step reads or writes.
fn check_bytes(what: &'static str, buffer: &wgpu::Buffer, needed: u64) -> Result<()> {
    if !buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
        return Err(Error::Usage {
            asked: format!("a buffer for {}", name_of(what)),
            reason: "it was made without the usage STORAGE".to_owned(),
            advice: "create it with wgpu::BufferUsages::STORAGE".to_owned(),
        });
    }
    if buffer.size() >= needed {
        return Ok(());
    }
    Err(Error::Shape {
        what,
        value: buffer.size(),
        limit: format!("the rows of this step take {needed} bytes"),
        advice: "pass a buffer with a row for each new token".to_owned(),
    })
}

/// Where the numbers of rows lie in their buffer, in elements.
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
    let mut all = vec![("tensor_scale".to_owned(), tensor_scale::composer(Element::E4m3))];
    let mut add = |name: String, composer| {
        let plain: String = name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
            .collect();
        all.push((plain, composer));
    };
    for float in [FloatType::F32, FloatType::F16] {
        add(format!("amax {float:?} rows"), amax::composer(float));
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
                // Of mixed pairs, GPUs' alone: sides and adapters are independent of each other.
                let adapters = [(false, ""), (true, " software")];
                let adapters = adapters
                    .into_iter()
                    .filter(|(software, _)| !software || k.side == v.side);
                for (software, adapter) in adapters {
                    let variant = Variant::new([&k, &v], ratio, prefill, software);
                    let name = format!("attention_split {} {} {tile}{adapter}", k.side, v.side);
                    add(
                        name,
                        attention_split::composer(&k, &v, ratio, variant, FloatType::F32),
                    );
                }
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
            let variant = Variant::new([k, v], ratio, true, false);
            add(
                format!("attention_split {} {}", k.side, v.side),
                attention_split::composer(k, v, ratio, variant, FloatType::F32),
            );
        }
    }
    for page in others {
        let variant = Variant::new([&page, &page], ratio, true, false);
        add(
            format!("attention_split {}", page.side),
            attention_split::composer(&page, &page, ratio, variant, FloatType::F32),
        );
    }
    for page in pages(named.clone())? {
        for pairing in [RopePairing::Halves, RopePairing::Neighbours] {
            let variant = Variant::new([&page, &page], ratio, true, false);
            add(
                format!("attention_split {} keys turned by {pairing:?}", page.side),
                attention_split::turning_composer(&page, &page, ratio, variant, FloatType::F32, pairing),
            );
        }
    }
    for page in pages(named)? {
        let variant = Variant::new([&page, &page], ratio, false, false);
        for other in [
            Variant {
                reduction: Reduction::Subgroup,
                ..variant
            },
            Variant {
                arithmetic: Arithmetic::F16,
                ..variant
            },
            Variant {
                arithmetic: Arithmetic::Packed,
                ..variant
            },
        ] {
            if other.arithmetic.for_side(page.side) == other.arithmetic {
                add(
                    format!(
                        "attention_split {} {:?} {:?}",
                        page.side, other.reduction, other.arithmetic
                    ),
                    attention_split::composer(&page, &page, ratio, other, FloatType::F32),
                );
            }
        }
        add(
            format!("attention_split {} f16 queries", page.side),
            attention_split::composer(&page, &page, ratio, variant, FloatType::F16),
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
