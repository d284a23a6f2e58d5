//! Bytes that a step moves, by formula, from the work that it planned. Codes and scales of live tokens only: unused slots
//! and padding are no useful bytes.

use crate::cache::plan::{AttentionPlan, SidePlan, StepPlan};
use crate::cache::{Class, K, V};
use crate::kernels::FloatType;
use crate::pages::PageLayout;
use crate::scales::{BLOCK_CHANNELS, ScaleLayout};
use crate::work::{Merge, TableEntry, WorkItem};

/// Bytes of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bytes {
    /// Codes of K and V.
    pub codes: u64,
    /// Scales of K and V.
    pub scales: u64,
    /// Work lists: page table, work items, merges.
    pub tables: u64,
    /// The rest: queries read, outputs written, partials written and read; of an append, its rows.
    pub other: u64,
}

impl Bytes {
    /// Codes and scales: what the figures of bandwidth count.
    pub fn cache(&self) -> u64 {
        self.codes + self.scales
    }
}

/// Codes and scales of the slots [`first`, `last`) of a page, all heads: (codes, scales) in bytes. A token group counts
/// once, whole, as soon as one of its slots does.
pub fn live_bytes(page: &PageLayout, first: u32, last: u32) -> (u64, u64) {
    let [tokens, heads, dim] = [last - first, page.heads, page.head_dim].map(u64::from);
    let codes = tokens * heads * u64::from(page.head_words) * 4;
    let elements = match page.side.layout {
        ScaleLayout::None | ScaleLayout::PerTensor => 0,
        ScaleLayout::PerToken => tokens * heads,
        ScaleLayout::PerBlock => tokens * heads * dim / u64::from(BLOCK_CHANNELS),
        ScaleLayout::PerChannel { group } => u64::from(last.div_ceil(group) - first / group) * heads * dim,
    };
    (codes, elements * u64::from(page.side.scale.bits()) / 8)
}

/// What attention of one layer reads, from its plan. `times` is how often the workgroups of one work item read its pages:
/// query heads of a KV head by those of a workgroup, rounded up.
pub fn attention_bytes(
    class: &Class,
    table: &[TableEntry],
    plan: &AttentionPlan,
    (q_heads, times): (u32, u32),
) -> Bytes {
    let mut bytes = Bytes::default();
    let [k_dim, v_dim] = [K, V].map(|s| u64::from(class.packed[s].head_dim));
    let q_heads = u64::from(q_heads);
    bytes.tables = size_of_val(table) as u64;
    for wave in &plan.waves {
        for (segment, items) in &wave.segments {
            let pages = [
                class.page(K, segment.kind.k_waits),
                class.page(V, segment.kind.v_waits),
            ];
            bytes.tables += (items.len() * size_of::<WorkItem>()) as u64;
            for item in items {
                let entries = item.table as usize..(item.table + item.pages) as usize;
                for entry in &table[entries] {
                    for page in &pages {
                        let (codes, scales) = live_bytes(page, entry.first, entry.last);
                        bytes.codes += codes * u64::from(times);
                        bytes.scales += scales * u64::from(times);
                    }
                }
            }
        }
        bytes.tables += (wave.merges.len() * size_of::<Merge>()) as u64;
        let float = u64::from(FloatType::F32.bytes());
        // A partial is a sum of v_dim numbers, a largest score and a sum: written once, read once.
        bytes.other += u64::from(wave.partials) * (v_dim + 2) * float * 2;
        bytes.other += wave.merges.len() as u64 * q_heads * (k_dim + v_dim) * float;
    }
    bytes
}

/// What an append writes to one layer, from its plan: codes and scales of packed pages and of those in full precision
/// that tokens pass through. The rows that it reads are `other`, at f32.
pub fn append_bytes(class: &Class, plan: &StepPlan, index: usize) -> Bytes {
    let mut bytes = Bytes::default();
    for side in [K, V] {
        let packed = class.page(side, false);
        let row = u64::from(packed.heads) * u64::from(packed.head_dim);
        bytes.other += u64::from(plan.tokens) * row * u64::from(FloatType::F32.bytes());
        for SidePlan { direct, wait, pack } in &plan.classes[index].rounds[side] {
            let lists = [(direct, packed), (wait, class.page(side, true)), (pack, packed)];
            for (runs, page) in lists {
                for run in runs.values().flatten() {
                    // A group is written whole.
                    let group = page.side.layout.token_group();
                    let first = run.slot / group * group;
                    let end = (run.slot + run.count).next_multiple_of(group);
                    let (codes, scales) = live_bytes(&page, first, end);
                    bytes.codes += codes;
                    bytes.scales += scales;
                    bytes.tables += size_of_val(run) as u64;
                }
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{Book, CacheSpec, TensorScales};
    use crate::options::Reach;
    use crate::variant::Variant;

    /// The work of a decode step of some sequences, planned with the books alone, and the formula's bytes.
    fn decode(pair: &str, q_heads: u32, batch: u32, context: u32) -> Bytes {
        let spec = CacheSpec {
            sequences: batch,
            tensor_scales: TensorScales::Given(vec![[1.0; 2]]),
            ..CacheSpec::new(1, q_heads, 8, 128, pair.parse().unwrap(), 0)
        };
        let pages = batch * context.div_ceil(spec.page_tokens);
        let mut book = Book::new(spec.with_pages(pages).unwrap(), None).unwrap();
        let ids: Vec<_> = (0..batch).map(|_| book.open()).collect();
        let step = |book: &mut Book, new: u32| {
            let requests: Vec<_> = ids.iter().map(|&id| (id, new)).collect();
            book.plan(&requests, 1).unwrap()
        };
        let plan = step(&mut book, context - 1);
        book.commit(plan).unwrap();
        let plan = step(&mut book, 1);
        let class = &book.geometry().classes[0];
        let [k, v] = &class.packed;
        let tile = Variant::new([k, v], q_heads / 8, false, false).head_tile;
        let attention = plan.attention(0, Reach::default()).unwrap();
        let times = (q_heads / 8).div_ceil(tile);
        attention_bytes(class, &plan.classes[0].table, &attention, (q_heads, times))
    }

    #[test]
    fn ben_03_bytes_of_a_step_count_k_and_v_and_their_scales() {
        for (pair, codes, scales) in [
            ("f16", 4096, 0),
            ("fp8", 2048, 0),
            ("int8", 2048, 32),
            ("int4", 1024, 32),
            ("int2", 512, 32),
            ("fp4", 1024, 128),
            // Scales of K per channel and 32 tokens: 1024 x 2 bytes / 32; those of V per token and head.
            ("int4c/int4", 1024, 64 + 16),
        ] {
            let (batch, context) = (3, 4096);
            let bytes = decode(pair, 32, batch, context);
            let tokens = u64::from(batch * context);
            assert_eq!(
                (bytes.codes, bytes.scales),
                (tokens * codes, tokens * scales),
                "{pair}"
            );
            // One table entry of 16 bytes a page, an item of 28 a split of 512 tokens, a merge of 16 a query.
            assert_eq!(bytes.tables, 3 * (64 * 16 + 8 * 28 + 16), "{pair}");
            let partials = 3 * 8 * 32 * 130 * 4 * 2;
            assert_eq!(bytes.other, partials + 3 * 32 * 2 * 128 * 4, "{pair}");
        }
    }

    #[test]
    fn pages_count_as_often_as_they_are_read_and_waiting_tokens_at_full_precision() {
        // 16 query heads a KV head do not fit one workgroup: the pages are read twice.
        let (once, twice) = (decode("int8", 64, 1, 512), decode("int8", 128, 1, 512));
        assert_eq!((2 * once.codes, 2 * once.scales), (twice.codes, twice.scales));
        // 40 tokens in groups of 32: 8 of them wait as f16, on both sides.
        let bytes = decode("int4c", 8, 1, 40);
        assert_eq!(bytes.codes, 32 * 1024 + 8 * 4096);
        assert_eq!(bytes.scales, 2 * 1024 * 2);
    }

    #[test]
    fn an_append_writes_each_token_once_and_waiting_ones_twice() {
        let written = |pair: &str, tokens: u32| {
            let spec = CacheSpec::new(1, 8, 8, 128, pair.parse().unwrap(), 0);
            let mut book = Book::new(spec.with_pages(8).unwrap(), None).unwrap();
            let id = book.open();
            let plan = book.plan(&[(id, tokens)], 1).unwrap();
            append_bytes(&book.geometry().classes[0], &plan, 0)
        };
        let int4 = written("int4", 100);
        assert_eq!((int4.codes, int4.scales), (100 * 1024, 100 * 32));
        assert_eq!(int4.other, 100 * 2 * 1024 * 4);
        let grouped = written("int4c", 100);
        assert_eq!(
            (grouped.codes, grouped.scales),
            (100 * 4096 + 96 * 1024, 3 * 2 * 1024 * 2)
        );
    }
}
