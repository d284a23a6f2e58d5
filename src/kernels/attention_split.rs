//! `attention_split`: attention over ranges of pages, straight from the packed words, into partials.
//!
//! # What it costs
//!
//! For a token of one KV head, M query heads (rows of a workgroup), d channels of b bits on K and on V, and a variant with S
//! slot quads and C channel quads an invocation:
//!
//! | | K | V |
//! |---|---|---|
//! | bytes of codes | d b / 8 | d b / 8 |
//! | bytes of scales | 2 per token; 2 d / G per channel; d / 16 per block | the same |
//! | multiply-adds | d M | d M |
//! | decodings, once for all M | d | d |
//! | loads of packed words | d b / 32 | d b / 32 |
//! | loads from workgroup memory | d M / (4 S): a quad of q serves 4 S slots | d M / (4 C): four probabilities serve 4 C channels |
//!
//! A decoding is two shifts and a conversion for integers, about seven integer operations for FP4, eight for FP8 and f16.
//! Scales of tokens and blocks multiply sums; those of channels multiply q, once for 4 S slots, and are loaded once for as
//! many: d / (8 S) words a token.
//!
//! On a GPU with enough arithmetic the bytes are the floor. A software driver gathers every 32-bit word of every lane by
//! itself, from memory and from workgroup memory alike, so there the floor is the loads, b / 32 + M / 16 for a number with
//! S = C = 4; see `benches/record`. Per-channel K adds 1 / 32 of a load for a number there, and none of the loads of slot
//! scales.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::{FloatType, Listed, RowStrides};
use crate::error::{Error, Result};
use crate::gpu::{Access, Binding, Gpu, Kernel, binding, fold};
use crate::options::AttentionOptions;
use crate::pages::{PageLayout, heads_ratio};
use crate::rope::RopePairing;
use crate::shader::Composer;
use crate::variant::{Arithmetic, Reduction, Variant};

/// The uniform.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    /// Work items in the list.
    pub items: u32,
    /// Query heads.
    pub q_heads: u32,
    /// Factor of the scores.
    pub scale: f32,
    /// Place of K's per-tensor scale.
    pub k_tensor: u32,
    /// Place of V's per-tensor scale.
    pub v_tensor: u32,
    /// Positions before its own that a query sees.
    pub back: u32,
    /// Positions after its own that a query sees.
    pub ahead: u32,
    /// Soft cap of the scores; 0 for none.
    pub softcap: f32,
    /// First channel quad of the queries.
    pub q_offset: u32,
    /// Channel quads from a query token to the next.
    pub q_row: u32,
    /// Channel quads from a query head to the next.
    pub q_head: u32,
    /// Place of the first turn of keys among the per-tensor scales.
    pub k_turns: u32,
}

/// Group 0.
pub const BINDINGS: &[Binding] = &[
    binding("params", Access::Uniform),
    binding("items", Access::Read),
    binding("page_table", Access::Read),
    binding("q", Access::Read),
    binding("k_pages", Access::Read),
    binding("v_pages", Access::Read),
    binding("tensor_scales", Access::Read),
    binding("partial_o", Access::Write),
    binding("partial_ml", Access::Write),
];

/// In the list of kernels.
pub const LISTED: Listed = Listed {
    name: "attention_split",
    wgsl: include_str!("../../shaders/attention_split.wgsl"),
    bindings: BINDINGS,
};

const SCORES_DECODED: &str = include_str!("../../shaders/parts/scores_decoded.wgsl");
const SCORES_TURNED: &str = include_str!("../../shaders/parts/scores_turned.wgsl");
const LARGEST_QUERY: &str = include_str!("../../shaders/parts/largest_query.wgsl");

/// The buffers of one dispatch.
#[derive(Debug, Clone, Copy)]
pub struct Buffers<'a> {
    /// [`crate::work::WorkItem`]s.
    pub items: &'a wgpu::Buffer,
    /// [`crate::work::TableEntry`]s.
    pub page_table: &'a wgpu::Buffer,
    /// Queries of the kernel's type.
    pub q: &'a wgpu::Buffer,
    /// Where they lie: multiples of 4 elements.
    pub q_rows: RowStrides,
    /// K pool.
    pub k_pages: &'a wgpu::Buffer,
    /// V pool.
    pub v_pages: &'a wgpu::Buffer,
    /// f32 per-tensor scales; behind them the turns of keys that are stored before RoPE.
    pub tensor_scales: &'a wgpu::Buffer,
    /// Place of the first turn.
    pub k_turns: u32,
    /// Weighted sums.
    pub partial_o: &'a wgpu::Buffer,
    /// (m, l) of each partial.
    pub partial_ml: &'a wgpu::Buffer,
}

/// The planned kernel.
#[derive(Debug)]
pub struct AttentionSplit {
    kernel: Arc<Kernel>,
    columns: u32,
    q_heads: u32,
    k_head_dim: u32,
}

/// Parts and constants for `ratio` query heads a KV head and queries of type `q`.
pub fn composer(k: &PageLayout, v: &PageLayout, ratio: u32, variant: Variant, q: FloatType) -> Composer {
    composed([k, v], ratio, variant, q, None)
}

/// The same for keys that are stored before RoPE: they are turned as they are read, in f32 whatever the variant says.
pub fn turning_composer(
    k: &PageLayout,
    v: &PageLayout,
    ratio: u32,
    variant: Variant,
    q: FloatType,
    pairing: RopePairing,
) -> Composer {
    composed([k, v], ratio, variant, q, Some(pairing))
}

fn composed(
    [k, v]: [&PageLayout; 2],
    ratio: u32,
    variant: Variant,
    q: FloatType,
    pairing: Option<RopePairing>,
) -> Composer {
    let mut composer = Composer::new(LISTED.name, LISTED.wgsl);
    composer
        .reads_side("k", k)
        .reads_side("v", v)
        .set("WG_SIZE", variant.workgroup)
        .set("RATIO", ratio)
        .set("HEAD_TILE", variant.head_tile)
        .set("TOKEN_TILE", variant.token_tile)
        .set("SLOT_QUADS", variant.slot_quads)
        .set("OUT", variant.channel_quads);
    match variant.reduction {
        Reduction::Workgroup => composer.part(
            "parts/reduce_workgroup",
            include_str!("../../shaders/parts/reduce_workgroup.wgsl"),
        ),
        Reduction::Subgroup => composer.part(
            "parts/reduce_subgroup",
            include_str!("../../shaders/parts/reduce_subgroup.wgsl"),
        ),
    };
    let numbers_f32 = include_str!("../../shaders/parts/numbers_f32.wgsl");
    match variant.arithmetic.for_side(k.side) {
        _ if pairing.is_some() => composer
            .part("parts/numbers_f32", numbers_f32)
            .part("parts/scores_turned", SCORES_TURNED)
            .set("K_HALVES", pairing == Some(RopePairing::Halves)),
        Arithmetic::F32 => composer
            .part("parts/numbers_f32", numbers_f32)
            .part("parts/scores_decoded", SCORES_DECODED),
        Arithmetic::F16 => composer
            .part(
                "parts/numbers_f16",
                include_str!("../../shaders/parts/numbers_f16.wgsl"),
            )
            .part("parts/largest_query", LARGEST_QUERY)
            .part("parts/scores_decoded", SCORES_DECODED)
            .halves("k", k.side.element),
        Arithmetic::Packed => composer
            .part(
                "parts/scores_packed",
                include_str!("../../shaders/parts/scores_packed.wgsl"),
            )
            .part("parts/largest_query", LARGEST_QUERY)
            .packed_bytes("k", k.side.element),
    };
    match q {
        FloatType::F32 => composer.part("parts/q_f32", include_str!("../../shaders/parts/q_f32.wgsl")),
        FloatType::F16 => composer
            .part("parts/q_f16", include_str!("../../shaders/parts/q_f16.wgsl"))
            .widens_f16(),
    };
    composer
}

impl AttentionSplit {
    /// Builds the kernel for one pair of page geometries and queries of type `q`.
    ///
    /// # Errors
    /// [`Error::Shape`] for a head ratio outside 1..=16 or pages of different length, those of [`Variant::check`], and
    /// [`Error::Shader`] where the driver refuses the kernel.
    pub fn plan(
        gpu: &Gpu,
        k: &PageLayout,
        v: &PageLayout,
        q_heads: u32,
        variant: Variant,
        q: FloatType,
    ) -> Result<AttentionSplit> {
        AttentionSplit::plan_turning(gpu, k, v, q_heads, variant, (q, None))
    }

    /// The same, for keys that are turned as they are read where a pairing is given.
    ///
    /// # Errors
    /// As [`AttentionSplit::plan`].
    pub fn plan_turning(
        gpu: &Gpu,
        k: &PageLayout,
        v: &PageLayout,
        q_heads: u32,
        variant: Variant,
        (q, pairing): (FloatType, Option<RopePairing>),
    ) -> Result<AttentionSplit> {
        let ratio = heads_ratio(q_heads, k.heads)?;
        variant.check([k, v])?;
        if k.tokens != v.tokens || k.heads != v.heads {
            return Err(Error::Shape {
                what: "V page_tokens",
                value: u64::from(v.tokens),
                limit: format!(
                    "K pages hold {} tokens of {} heads; V pages must too",
                    k.tokens, k.heads
                ),
                advice: "use one page length and one number of KV heads for both sides".to_owned(),
            });
        }
        let kernel = gpu.kernel(
            LISTED.name,
            BINDINGS,
            &composed([k, v], ratio, variant, q, pairing),
        )?;
        Ok(AttentionSplit {
            kernel,
            columns: k.heads * ratio.div_ceil(variant.head_tile),
            q_heads,
            k_head_dim: k.head_dim,
        })
    }

    /// Workgroups of a dispatch over `items` work items.
    ///
    /// # Errors
    /// [`Error::Limit`] for more items than one dispatch can hold.
    pub fn workgroups(&self, items: u32) -> Result<[u32; 3]> {
        let [x, y] = fold(LISTED.name, u64::from(items))?;
        Ok([x, y, self.columns])
    }

    /// Records one dispatch over `items` work items; `tensor` are the places of K's and V's per-tensor scales.
    /// Sinks are the merge's business.
    ///
    /// # Errors
    /// [`Error::Limit`] for more items than one dispatch can hold, [`Error::Usage`] for queries whose offset or strides
    /// are no multiples of 4 elements; those of [`AttentionOptions::check`].
    pub fn encode(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        buffers: &Buffers<'_>,
        items: u32,
        options: &AttentionOptions<impl Sized>,
        tensor: [u32; 2],
    ) -> Result<()> {
        options.check()?;
        let [q_offset, q_row, q_head] = quads(buffers.q_rows)?;
        let groups = self.workgroups(items)?;
        let [k_tensor, v_tensor] = tensor;
        let reach = options.reach();
        let params = gpu.uniform(&Params {
            items,
            q_heads: self.q_heads,
            scale: options.score_scale(self.k_head_dim) as f32,
            k_tensor,
            v_tensor,
            back: reach.back,
            ahead: reach.ahead,
            softcap: options.softcap.unwrap_or(0.0),
            q_offset,
            q_row,
            q_head,
            k_turns: buffers.k_turns,
        });
        let b = buffers;
        let bound = [
            &params,
            b.items,
            b.page_table,
            b.q,
            b.k_pages,
            b.v_pages,
            b.tensor_scales,
            b.partial_o,
            b.partial_ml,
        ];
        self.kernel.encode(gpu, pass, &bound, groups);
        Ok(())
    }
}

/// Offset and strides of queries in channel quads, as the kernel loads them.
fn quads(rows: RowStrides) -> Result<[u32; 3]> {
    let named = [
        ("an offset", rows.offset),
        ("a token stride", rows.row),
        ("a head stride", rows.head),
    ];
    for (name, elements) in named {
        if !elements.is_multiple_of(4) {
            return Err(Error::Usage {
                asked: format!("queries with {name} of {elements} elements"),
                reason: "attention reads them four channels at a time".to_owned(),
                advice: "use offsets and strides that are multiples of 4".to_owned(),
            });
        }
    }
    Ok(named.map(|(_, elements)| elements / 4))
}
