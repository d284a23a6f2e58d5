//! Work lists: what kernels and the CPU reference read alike. Plain data, uploaded as it stands.

use bytemuck::{Pod, Zeroable};

/// Up to four neighbouring tokens on their way into one aligned run of four slots of a page (or out of it, for
/// `dequantize`). For `quantize_group` a whole token group: its last `count` slots are packed, those before them hold
/// sink tokens that are kept elsewhere in full precision, and their codes are 0.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct SlotRun {
    /// The page in its pool.
    pub page: u32,
    /// First slot; of the group, for `quantize_group`.
    pub slot: u32,
    /// Slots, 1 to 4; the run does not cross a multiple of 4. For `quantize_group` at most the group's length.
    pub count: u32,
    /// Row of the first slot, or the page in which the rows wait (at the same slots).
    pub source: u32,
}

/// Cuts tokens [first, last) of one page into aligned runs; `source` gives a slot's row, or the waiting page.
pub fn slot_runs(page: u32, first: u32, last: u32, source: impl Fn(u32) -> u32, out: &mut Vec<SlotRun>) {
    let mut slot = first;
    while slot < last {
        let end = (slot / 4 * 4 + 4).min(last);
        out.push(SlotRun {
            page,
            slot,
            count: end - slot,
            source: source(slot),
        });
        slot = end;
    }
}

/// One page of a work item: where K and V of its tokens are, and which slots are live.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct TableEntry {
    /// Page in the K pool.
    pub k_page: u32,
    /// Page in the V pool.
    pub v_page: u32,
    /// First live slot.
    pub first: u32,
    /// End of the live slots.
    pub last: u32,
}

/// One range of neighbouring pages of a sequence with the query tokens that attend to it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct WorkItem {
    /// First entry in the page table.
    pub table: u32,
    /// Pages; their tokens are neighbours.
    pub pages: u32,
    /// Position of slot 0 of the first page.
    pub position: u32,
    /// First query token: its row in q.
    pub query: u32,
    /// Query tokens.
    pub queries: u32,
    /// Position of the first query token; how far a query sees from its own is the attention's option.
    pub query_position: u32,
    /// First partial; they are [query token, query head].
    pub partial: u32,
}

/// The partials of one query token, in token order: `count` of them, `stride` apart, each over all query heads.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Merge {
    /// First partial.
    pub first: u32,
    /// Distance to the next.
    pub stride: u32,
    /// How many.
    pub count: u32,
    /// Output row.
    pub row: u32,
}

/// What packing met, counted since the cache was made: the sticky append status. Counts wrap at 2^32.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
pub struct Status {
    /// Inputs that were NaN or infinite.
    pub non_finite: u32,
    /// Finite inputs that round beyond the largest code, and scales that were clamped.
    pub saturated: u32,
}
