//! What one step does, in integers: pages to copy, rows to write, and the work of attention. No GPU: the GPU cache and
//! the CPU reference carry out the same plans.

use std::collections::BTreeMap;

use super::planner::page_ranges;
use super::sequence::SideState;
use super::spec::{CacheSpec, Class, K, V};
use crate::error::{Error, Result};
use crate::options::Reach;
use crate::work::{Merge, SlotRun, TableEntry, WorkItem};

/// The most partials that are kept at a time, in bytes of their weighted sums.
const WAVE_BYTES: u32 = 1 << 26;

/// The most work items of the attention of one step: their list must fit a binding.
const MAX_ITEMS: u64 = 1 << 22;

/// The most partials of one tile of queries.
const MAX_PARTIALS: u64 = 1 << 31;

/// Rows to write, by the buffers that they come from (0 where they are new) and go to. Pages are numbered in their
/// buffers.
pub type Runs = BTreeMap<[u32; 2], Vec<SlotRun>>;

/// What one round of a step writes on one side.
#[derive(Debug, Clone, Default)]
pub struct SidePlan {
    /// New rows straight into packed pages.
    pub direct: Runs,
    /// New rows into pages in full precision.
    pub wait: Runs,
    /// Waiting tokens into packed pages; after `wait`.
    pub pack: Runs,
}

/// A page that a sequence copies before it writes to it, since others hold it too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopiedPage {
    /// K or V.
    pub side: usize,
    /// A page in full precision.
    pub waiting: bool,
    /// Its buffer, and its number there.
    pub from: (u32, u32),
    /// The copy's buffer, and its number there.
    pub to: (u32, u32),
}

/// Which kernel serves a work item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentKind {
    /// K of these tokens is in full precision.
    pub k_waits: bool,
    /// V of these tokens is in full precision.
    pub v_waits: bool,
    /// More than one query token of a sequence.
    pub prefill: bool,
}

impl SegmentKind {
    /// All of them.
    pub fn all() -> impl Iterator<Item = SegmentKind> {
        (0..8).map(|bits| SegmentKind {
            k_waits: bits & 1 != 0,
            v_waits: bits & 2 != 0,
            prefill: bits & 4 != 0,
        })
    }

    /// A number below 8 of its own.
    pub fn index(self) -> usize {
        usize::from(self.k_waits) | usize::from(self.v_waits) << 1 | usize::from(self.prefill) << 2
    }
}

/// Work items of one dispatch: one kernel, one buffer of K and one of V.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Segment {
    /// The kernel.
    pub kind: SegmentKind,
    /// The buffers of K and V.
    pub buffers: [u32; 2],
}

/// Everything that one step does.
#[derive(Debug)]
pub struct StepPlan {
    /// By class: layers stored alike do the same.
    pub classes: Vec<ClassPlan>,
    /// New tokens of all sequences: rows of k, v and q.
    pub tokens: u32,
    pub(super) serial: u64,
    /// Query tokens of one workgroup in prefill.
    token_tile: u32,
    q_heads: u32,
    /// Partials that are kept at a time.
    most: u32,
}

/// What one step does in the layers of one class.
#[derive(Debug, Default)]
pub struct ClassPlan {
    /// Pages to copy before anything is written.
    pub copies: Vec<CopiedPage>,
    /// What is written, K and V, in rounds: each may use pages again that the one before has emptied.
    pub rounds: [Vec<SidePlan>; 2],
    /// The page table that work items point into. Pages are numbered in their buffers.
    pub table: Vec<TableEntry>,
    attended: Vec<(Attended, Vec<Piece>)>,
}

/// The attention of one step, for every layer of a class with the same reach: waves, one after the other, which use the
/// same partials.
#[derive(Debug, Clone, Default)]
pub struct AttentionPlan {
    /// The waves.
    pub waves: Vec<Wave>,
}

/// Work whose partials are kept at the same time.
#[derive(Debug, Clone, Default)]
pub struct Wave {
    /// Work items, by dispatch.
    pub segments: BTreeMap<Segment, Vec<WorkItem>>,
    /// One entry a query token.
    pub merges: Vec<Merge>,
    /// Partials in all.
    pub partials: u32,
}

/// The new tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attended {
    pub new: u32,
    pub first_row: u32,
    pub first_position: u32,
}

/// One split of a sequence: what queries attend to, in token order.
#[derive(Debug, Clone, Copy)]
struct Piece {
    segment: Segment,
    /// First token and end.
    tokens: [u32; 2],
    table: u32,
    pages: u32,
    position: u32,
}

impl StepPlan {
    pub(super) fn new(tokens: u32, serial: u64, token_tile: u32, spec: &CacheSpec) -> StepPlan {
        StepPlan {
            classes: Vec::new(),
            tokens,
            serial,
            token_tile: token_tile.max(1),
            q_heads: spec.q_heads,
            most: WAVE_BYTES / 4 / spec.v_head_dim,
        }
    }

    /// The work of attention in layers of a class whose queries reach so far: splits times tiles of query tokens, less
    /// those in which no query sees a token.
    ///
    /// # Errors
    /// [`Error::Shape`] for a class that the cache lacks; [`Error::Limit`] for a context that takes more than 2^31 partials,
    /// and for a step of more than 2^22 work items.
    pub fn attention(&self, class: usize, reach: Reach) -> Result<AttentionPlan> {
        let mut plan = AttentionPlan::default();
        let mut items = 0;
        let Some(class) = self.classes.get(class) else {
            return Err(Error::Shape {
                what: "class of layers",
                value: class as u64,
                limit: format!("the cache has {}, counted from 0", self.classes.len()),
                advice: "ask Geometry::class_of".to_owned(),
            });
        };
        for (sequence, pieces) in &class.attended {
            self.tiles(*sequence, pieces, reach, &mut items, &mut plan)?;
        }
        Ok(plan)
    }

    fn tiles(
        &self,
        sequence: Attended,
        pieces: &[Piece],
        reach: Reach,
        items: &mut u64,
        plan: &mut AttentionPlan,
    ) -> Result<()> {
        let tile = if sequence.new > 1 { self.token_tile } else { 1 };
        for first in (0..sequence.new).step_by(tile as usize) {
            let queries = tile.min(sequence.new - first);
            let query_position = sequence.first_position + first;
            let own = [query_position, query_position + queries - 1];
            let seen = pieces.iter().filter(|piece| reach.meets(own, piece.tokens));
            let stride = queries * self.q_heads;
            // Checked before any number of a partial is formed: each fits 32 bits then.
            let pieces = seen.clone().count() as u64;
            *items += pieces;
            if *items > MAX_ITEMS {
                return Err(Error::Limit {
                    what: "the attention of one step (work items so far)".to_owned(),
                    needed: *items,
                    allowed: MAX_ITEMS,
                    advice: "split the prompts into steps of fewer tokens".to_owned(),
                });
            }
            let needed = pieces * u64::from(stride);
            if needed > MAX_PARTIALS {
                return Err(Error::Limit {
                    what: "the attention partials of a few queries".to_owned(),
                    needed,
                    allowed: MAX_PARTIALS,
                    advice: "attend with a sliding window, or to a shorter context".to_owned(),
                });
            }
            let fits = |wave: &Wave| u64::from(wave.partials) + needed <= u64::from(self.most);
            if !plan.waves.last().is_some_and(fits) {
                plan.waves.push(Wave::default());
            }
            let Some(wave) = plan.waves.last_mut() else {
                continue;
            };
            let base = wave.partials;
            let mut count = 0;
            for piece in seen {
                wave.segments.entry(piece.segment).or_default().push(WorkItem {
                    table: piece.table,
                    pages: piece.pages,
                    position: piece.position,
                    query: sequence.first_row + first,
                    queries,
                    query_position,
                    partial: base + count * stride,
                });
                count += 1;
            }
            wave.partials = base + count * stride;
            let merges = (0..queries).map(|t| Merge {
                first: base + t * self.q_heads,
                stride,
                count,
                row: sequence.first_row + first + t,
            });
            wave.merges.extend(merges);
        }
        Ok(())
    }
}

impl AttentionPlan {
    /// The most partials of one wave.
    pub fn partials(&self) -> u32 {
        self.waves.iter().map(|wave| wave.partials).max().unwrap_or(0)
    }
}

impl ClassPlan {
    /// Adds a sequence of `len` tokens to what is attended to: ranges by format, cut at fixed positions, and where a
    /// buffer ends. `per_buffer` are the pages of a buffer, `[K, V][packed, waiting]`.
    pub(super) fn attend(
        &mut self,
        class: &Class,
        sides: &[SideState; 2],
        len: u32,
        split: u32,
        per_buffer: [[u32; 2]; 2],
        attended: Attended,
    ) {
        if attended.new == 0 {
            return;
        }
        let page_tokens = class.packed[K].tokens;
        let mut pieces = Vec::new();
        let mut cuts = vec![0, len];
        for (s, state) in sides.iter().enumerate() {
            cuts.extend([class.sink_tokens[s], state.boundary].map(|cut| cut.min(len)));
        }
        cuts.sort_unstable();
        cuts.dedup();
        for range in cuts.windows(2) {
            let mut start = range[0];
            let waits = |s: usize| start < class.sink_tokens[s] || start >= sides[s].boundary;
            let kind = SegmentKind {
                k_waits: waits(K),
                v_waits: waits(V),
                prefill: attended.new > 1,
            };
            while start < range[1] {
                let end = ((start / split + 1) * split).min(range[1]);
                for (place, first, last) in page_ranges(start, end, page_tokens) {
                    let page = |s: usize, waits: bool| {
                        let state = &sides[s];
                        let page = match waits {
                            true => state.waiting[&place],
                            false => state.packed[place as usize],
                        };
                        let per_buffer = per_buffer[s][usize::from(waits)];
                        (page / per_buffer, page % per_buffer)
                    };
                    let (k, v) = (page(K, kind.k_waits), page(V, kind.v_waits));
                    let segment = Segment {
                        kind,
                        buffers: [k.0, v.0],
                    };
                    let begin = place * page_tokens;
                    let entry = self.table.len() as u32;
                    self.table.push(TableEntry {
                        k_page: k.1,
                        v_page: v.1,
                        first,
                        last,
                    });
                    match pieces.last_mut() {
                        Some(Piece {
                            segment: known,
                            tokens,
                            pages,
                            ..
                        }) if *known == segment && tokens[1] == begin + first && tokens[1] > start => {
                            tokens[1] = begin + last;
                            *pages += 1;
                        }
                        _ => pieces.push(Piece {
                            segment,
                            tokens: [begin + first, begin + last],
                            table: entry,
                            pages: 1,
                            position: begin,
                        }),
                    }
                }
                start = end;
            }
        }
        self.attended.push((attended, pieces));
    }
}
