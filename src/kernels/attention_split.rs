//! `attention_split`: attention over ranges of pages, straight from the packed words, into partials.
//!
//! # What it costs
//!
//! For a token of one KV head, M query heads (rows of a workgroup), d channels of b bits on K and on V:
//!
//! | | K | V |
//! |---|---|---|
//! | bytes of codes | d b / 8 | d b / 8 |
//! | bytes of scales | 2 per token; 2 d / G per channel; d / 16 per block | the same |
//! | multiply-adds | d M | d M |
//! | decodings, once for all M | d | d |
//! | loads of packed words | d b / 32 | d b / 32 |
//! | loads from workgroup memory | d M / 8: a quad of q serves 8 slots | d M / 8: four probabilities serve 8 channels |
//!
//! A decoding is two shifts and a conversion for integers, about seven integer operations for FP4, eight for FP8 and f16.
//! Scales of tokens and blocks multiply sums; those of channels multiply q, once for four slots.
//!
//! On a GPU with enough arithmetic the bytes are the floor. A software driver gathers every 32-bit word of every lane by
//! itself, from memory and from workgroup memory alike, so there the floor is the loads, b / 32 + M / 8 for a number: with
//! M = 1 they are as 2.5 : 1.5 : 1 for f16, int8 and int4 (measured 2.1 : 1.3 : 1 on llvmpipe), with M = 4 as
//! 1.6 : 1.2 : 1 (measured 1.5 : 1.1 : 1); see `benches/record`.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::{FloatType, Listed, RowStrides, WG_SIZE};
use crate::error::{Error, Result};
use crate::gpu::{Access, Binding, Gpu, Kernel, binding, fold};
use crate::options::AttentionOptions;
use crate::pages::{PageLayout, heads_ratio};
use crate::rope::RopePairing;
use crate::shader::Composer;

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

/// Workgroup memory that WebGPU guarantees, in bytes.
const WORKGROUP_BYTES: u32 = 16_384;
/// Rows (query heads x query tokens) of a workgroup: more of them spill registers.
const MAX_ROWS: u32 = 8;

/// Rows of a prefill workgroup with several query tokens: software drivers need seconds to compile larger tiles.
const PREFILL_ROWS: u32 = 4;

/// How the queries of a step are tiled over workgroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// Query heads of one workgroup.
    pub head_tile: u32,
    /// Query tokens of one workgroup.
    pub token_tile: u32,
    /// Runs of four neighbouring slots that an invocation scores at a time: 1, or 2 where workgroup memory allows.
    pub slot_quads: u32,
}

impl Tiling {
    /// The largest tile that fits workgroup memory and registers. K and V are then read once for all query heads of a
    /// KV head wherever their number is at most 8 (7 from head_dim 184 on, 6 at 256).
    pub fn new(k: &PageLayout, ratio: u32, prefill: bool) -> Tiling {
        let rows = |slot_quads| (WORKGROUP_BYTES / row_bytes(k.head_dim, slot_quads)).min(MAX_ROWS);
        // One read of K and V for all query heads goes before two runs of slots.
        let slot_quads = if ratio <= rows(2) { 2 } else { 1 };
        let rows = rows(slot_quads);
        // Even tiles: 12 heads are 6 + 6 rather than 8 + 4.
        let head_tile = ratio.div_ceil(ratio.div_ceil(rows));
        let token_tile = if prefill {
            (PREFILL_ROWS / head_tile).clamp(1, rows / head_tile)
        } else {
            1
        };
        Tiling {
            head_tile,
            token_tile,
            slot_quads,
        }
    }

    /// Workgroup memory of the kernel, in bytes: each of its arrays takes a multiple of 16.
    pub fn workgroup_bytes(self, k: &PageLayout) -> u32 {
        let rows = self.head_tile * self.token_tile;
        rows * (k.head_dim * 4 + WG_SIZE * (self.slot_quads * 16 + 4) + 8 * 4)
            + 2 * (rows * 4).next_multiple_of(16)
    }

    /// Checks a tile that did not come from [`Tiling::new`]; wgpu does not count workgroup memory.
    ///
    /// # Errors
    /// [`Error::Shape`] for an empty tile, [`Error::Limit`] for one beyond the workgroup memory that WebGPU guarantees.
    pub fn check(self, k: &PageLayout) -> Result<()> {
        for (what, value) in [("head_tile", self.head_tile), ("token_tile", self.token_tile)] {
            if value == 0 || value > WG_SIZE {
                return Err(Error::Shape {
                    what,
                    value: u64::from(value),
                    limit: format!("a workgroup takes 1 to {WG_SIZE} query heads and tokens"),
                    advice: "let Tiling::new choose the tile".to_owned(),
                });
            }
        }
        if ![1, 2].contains(&self.slot_quads) {
            return Err(Error::Shape {
                what: "slot_quads",
                value: u64::from(self.slot_quads),
                limit: "an invocation scores 1 or 2 runs of slots at a time".to_owned(),
                advice: "let Tiling::new choose the tile".to_owned(),
            });
        }
        let needed = self.workgroup_bytes(k);
        if needed > WORKGROUP_BYTES {
            return Err(Error::Limit {
                what: format!("`{}` (bytes of workgroup memory)", LISTED.name),
                needed: u64::from(needed),
                allowed: u64::from(WORKGROUP_BYTES),
                advice: "let Tiling::new choose the tile".to_owned(),
            });
        }
        Ok(())
    }
}

/// An upper bound of one row's workgroup memory.
const fn row_bytes(head_dim: u32, slot_quads: u32) -> u32 {
    head_dim * 4 + WG_SIZE * (slot_quads * 16 + 4) + 8 * 4 + 2 * 16
}

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
pub fn composer(k: &PageLayout, v: &PageLayout, ratio: u32, tiling: Tiling, q: FloatType) -> Composer {
    let mut composer = base(k, v, ratio, tiling, q);
    composer.part(
        "parts/k_stored",
        include_str!("../../shaders/parts/k_stored.wgsl"),
    );
    composer
}

/// The same for keys that are stored before RoPE: they are turned as they are read.
pub fn turning_composer(
    k: &PageLayout,
    v: &PageLayout,
    ratio: u32,
    tiling: Tiling,
    q: FloatType,
    pairing: RopePairing,
) -> Composer {
    let mut composer = base(k, v, ratio, tiling, q);
    composer
        .part(
            "parts/k_turned",
            include_str!("../../shaders/parts/k_turned.wgsl"),
        )
        .set("K_HALVES", pairing == RopePairing::Halves);
    composer
}

fn base(k: &PageLayout, v: &PageLayout, ratio: u32, tiling: Tiling, q: FloatType) -> Composer {
    let mut composer = Composer::new(LISTED.name, LISTED.wgsl);
    composer
        .reads_side("k", k)
        .reads_side("v", v)
        .set("RATIO", ratio)
        .set("HEAD_TILE", tiling.head_tile)
        .set("TOKEN_TILE", tiling.token_tile)
        .set("SLOT_QUADS", tiling.slot_quads);
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
    /// [`Error::Shape`] for a head ratio outside 1..=16 or pages of different length, those of [`Tiling::check`], and
    /// [`Error::Shader`] where the driver refuses the kernel.
    pub fn plan(
        gpu: &Gpu,
        k: &PageLayout,
        v: &PageLayout,
        q_heads: u32,
        tiling: Tiling,
        q: FloatType,
    ) -> Result<AttentionSplit> {
        AttentionSplit::plan_turning(gpu, k, v, q_heads, tiling, (q, None))
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
        tiling: Tiling,
        (q, pairing): (FloatType, Option<RopePairing>),
    ) -> Result<AttentionSplit> {
        let ratio = heads_ratio(q_heads, k.heads)?;
        tiling.check(k)?;
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
        let composer = match pairing {
            None => composer(k, v, ratio, tiling, q),
            Some(pairing) => turning_composer(k, v, ratio, tiling, q, pairing),
        };
        let kernel = gpu.kernel(LISTED.name, BINDINGS, &composer)?;
        Ok(AttentionSplit {
            kernel,
            columns: k.heads * ratio.div_ceil(tiling.head_tile),
            q_heads,
            k_head_dim: k.head_dim,
        })
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
        let [x, y] = fold(LISTED.name, u64::from(items))?;
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
        self.kernel.encode(gpu, pass, &bound, [x, y, self.columns]);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Side;

    #[test]
    fn tiles_fit_workgroup_memory_and_are_even() {
        for head_dim in (8..=256).step_by(8) {
            let k = PageLayout::new(Side::F16, 2, head_dim, 64).unwrap();
            for ratio in 1..=16 {
                for prefill in [false, true] {
                    let t = Tiling::new(&k, ratio, prefill);
                    let rows = t.head_tile * t.token_tile;
                    assert!(t.workgroup_bytes(&k) <= WORKGROUP_BYTES && rows <= MAX_ROWS);
                    assert!(t.check(&k).is_ok());
                    assert!(t.head_tile >= 1 && t.head_tile <= ratio);
                    if ratio <= if head_dim == 256 { 6 } else { 7 } {
                        assert_eq!(t.head_tile, ratio, "K and V are read once");
                    }
                }
            }
        }
    }
}
