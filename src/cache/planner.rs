//! The planner: turns a step's requests into pages to take, rows to write and pages to give back.

use std::collections::{BTreeMap, BTreeSet};

use super::plan::{CopiedPage, SidePlan};
use super::pool::{Pool, PoolId};
use super::sequence::{Sequence, SequenceId, SideState, is_waiting};
use super::spec::{Geometry, K, V};
use crate::work::{SlotRun, slot_runs};

/// What a planned step will change, until it is committed or taken back.
#[derive(Debug, Default)]
pub(super) struct Pending {
    pub serial: u64,
    pub after: Vec<(SequenceId, Sequence)>,
    pub taken: BTreeSet<(PoolId, u32)>,
    pub released: Vec<(PoolId, u32)>,
}

/// A part of a sequence's new tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chunk {
    request: usize,
    /// New tokens of the request before these.
    before: u32,
    count: u32,
    /// Row of the first.
    first_row: u32,
}

/// The new tokens of a step in rounds of at most so many.
pub(super) fn rounds(requests: &[(SequenceId, u32)], most: u32) -> Vec<Vec<Chunk>> {
    let mut rounds = vec![Vec::new()];
    let (mut room, mut first_row) = (most, 0);
    for (request, &(_, new)) in requests.iter().enumerate() {
        let mut before = 0;
        while before < new {
            if room == 0 {
                rounds.push(Vec::new());
                room = most;
            }
            let count = room.min(new - before);
            if let Some(round) = rounds.last_mut() {
                round.push(Chunk {
                    request,
                    before,
                    count,
                    first_row,
                });
            }
            before += count;
            first_row += count;
            room -= count;
        }
    }
    rounds
}

/// Turns requests into writes.
pub(super) struct Planner<'a> {
    pub geometry: &'a Geometry,
    pub pools: &'a mut BTreeMap<PoolId, Pool>,
    pub pending: Pending,
    pub rounds: Vec<Vec<Chunk>>,
}

impl Planner<'_> {
    fn take(&mut self, id: PoolId) -> u32 {
        // A side takes pages only from pools that it has.
        let Some(pool) = self.pools.get_mut(&id) else {
            return u32::MAX;
        };
        let page = pool.take();
        self.pending.taken.insert((id, page));
        page
    }

    /// Gives every sequence that grows pages of its own where it would write to shared ones: the open ones, in which
    /// its tokens end.
    pub fn copy_shared(
        &mut self,
        class: usize,
        requests: &[(SequenceId, u32)],
        after: &mut [Sequence],
        copies: &mut Vec<CopiedPage>,
    ) {
        let page_tokens = self.geometry.page_tokens;
        let open = |token: u32| (!token.is_multiple_of(page_tokens)).then_some(token / page_tokens);
        let spec = &self.geometry.classes[class];
        for (sequence, &(_, new)) in after.iter_mut().zip(requests) {
            let len = sequence.len;
            for side in [K, V] {
                let state = &mut sequence.sides[class][side];
                let packs = spec.boundary(side, state.boundary, len + new) > state.boundary;
                let packed = open(state.boundary).filter(|_| packs);
                let packed = packed.and_then(|place| state.packed.get_mut(place as usize));
                let waits = new > 0 && (spec.waits[side] || len < spec.sink_tokens[side]);
                let waiting = open(len).filter(|_| waits);
                let waiting = waiting.and_then(|place| state.waiting.get_mut(&place));
                for (page, waiting) in [(packed, false), (waiting, true)] {
                    let id = PoolId { class, side, waiting };
                    let Some(page) = page else { continue };
                    if self.pools[&id].holders[*page as usize] > 1 {
                        let to = self.take(id);
                        let pool = &self.pools[&id];
                        copies.push(CopiedPage {
                            side,
                            waiting,
                            from: pool.locate(*page),
                            to: pool.locate(to),
                        });
                        self.pending.released.push((id, *page));
                        *page = to;
                    }
                }
            }
        }
    }

    /// The writes of one side, in rounds.
    pub fn side(&mut self, class: usize, side: usize, after: &mut [Sequence]) -> Vec<SidePlan> {
        let mut plans = Vec::new();
        for round in self.rounds.clone() {
            let mut writes = SidePlan::default();
            let mut emptied = Vec::new();
            for part in round {
                let sequence = &mut after[part.request];
                let old = sequence.len + part.before;
                let chunk = NewTokens {
                    old,
                    len: old + part.count,
                    first_row: part.first_row,
                };
                let state = &mut sequence.sides[class][side];
                self.chunk(
                    PoolId {
                        class,
                        side,
                        waiting: false,
                    },
                    state,
                    chunk,
                    &mut writes,
                );
                self.empty(class, side, state, chunk.len, &mut emptied);
            }
            // A page taken and emptied within this step serves its next round: the waits of a round come before its packs.
            for (id, page) in emptied {
                if self.pending.taken.remove(&(id, page)) {
                    if let Some(pool) = self.pools.get_mut(&id) {
                        pool.release(page);
                    }
                } else {
                    self.pending.released.push((id, page));
                }
            }
            plans.push(writes);
        }
        plans
    }

    fn chunk(&mut self, id: PoolId, state: &mut SideState, new: NewTokens, writes: &mut SidePlan) {
        let class = &self.geometry.classes[id.class];
        let page_tokens = self.geometry.page_tokens;
        let (waits, sinks) = (class.waits[id.side], class.sink_tokens[id.side]);
        let group = class.packed[id.side].side.layout.token_group();
        let row = |token: u32| new.first_row + (token - new.old);
        let waiting_id = PoolId { waiting: true, ..id };
        // Rows that stay in full precision, for a while or for good.
        let full = if waits {
            new.len
        } else {
            sinks.clamp(new.old, new.len)
        };
        for (place, first, last) in page_ranges(new.old, full, page_tokens) {
            let page = match state.waiting.get(&place) {
                Some(&page) => page,
                None => {
                    let page = self.take(waiting_id);
                    state.waiting.insert(place, page);
                    page
                }
            };
            let (buffer, page) = self.locate(waiting_id, page);
            let runs = writes.wait.entry([0, buffer]).or_default();
            slot_runs(page, first, last, |slot| row(place * page_tokens + slot), runs);
        }
        let boundary = class.boundary(id.side, state.boundary, new.len);
        while state.packed.len() < boundary.div_ceil(page_tokens) as usize {
            let page = self.take(id);
            state.packed.push(page);
        }
        if !waits {
            for (place, first, last) in page_ranges(full, new.len, page_tokens) {
                let (buffer, page) = self.locate(id, state.packed[place as usize]);
                let runs = writes.direct.entry([0, buffer]).or_default();
                slot_runs(page, first, last, |slot| row(place * page_tokens + slot), runs);
            }
        } else if group == 1 {
            for (place, first, last) in page_ranges(state.boundary.max(sinks), boundary, page_tokens) {
                let (buffers, page, from) = self.pack(id, state, place);
                slot_runs(
                    page,
                    first,
                    last,
                    |_| from,
                    writes.pack.entry(buffers).or_default(),
                );
            }
        } else {
            for (place, first, last) in page_ranges(state.boundary, boundary, page_tokens) {
                let (buffers, page, source) = self.pack(id, state, place);
                let runs = (first..last).step_by(group as usize).map(|slot| SlotRun {
                    page,
                    slot,
                    // Sink tokens stay out of the group.
                    count: (place * page_tokens + slot + group)
                        .saturating_sub(sinks)
                        .min(group),
                    source,
                });
                let groups = writes.pack.entry(buffers).or_default();
                groups.extend(runs.filter(|run| run.count > 0));
            }
        }
        state.boundary = boundary;
    }

    /// Where the tokens of a page are packed from and to: buffers, page, and the page in which they wait.
    fn pack(&self, id: PoolId, state: &SideState, place: u32) -> ([u32; 2], u32, u32) {
        let (to, page) = self.locate(id, state.packed[place as usize]);
        let (from, source) = self.locate(PoolId { waiting: true, ..id }, state.waiting[&place]);
        ([from, to], page, source)
    }

    fn locate(&self, id: PoolId, page: u32) -> (u32, u32) {
        self.pools.get(&id).map_or((0, page), |pool| pool.locate(page))
    }

    /// Drops pages in full precision whose tokens are all packed.
    fn empty(
        &self,
        class: usize,
        side: usize,
        state: &mut SideState,
        len: u32,
        emptied: &mut Vec<(PoolId, u32)>,
    ) {
        let (page_tokens, sinks) = (
            self.geometry.page_tokens,
            self.geometry.classes[class].sink_tokens[side],
        );
        let boundary = state.boundary;
        let id = PoolId {
            class,
            side,
            waiting: true,
        };
        state.waiting.retain(|&place, page| {
            let kept = is_waiting(place, page_tokens, sinks, boundary, len);
            if !kept {
                emptied.push((id, *page));
            }
            kept
        });
    }
}

/// New tokens of a sequence: [old, len), the first in row `first_row`.
#[derive(Debug, Clone, Copy)]
struct NewTokens {
    old: u32,
    len: u32,
    first_row: u32,
}

/// The pages that hold tokens [start, end): (place in the sequence, first slot, end of slots).
pub(super) fn page_ranges(start: u32, end: u32, page_tokens: u32) -> impl Iterator<Item = (u32, u32, u32)> {
    let places = if start < end {
        start / page_tokens..end.div_ceil(page_tokens)
    } else {
        0..0
    };
    places.map(move |place| {
        let begin = place * page_tokens;
        (place, start.saturating_sub(begin), (end - begin).min(page_tokens))
    })
}
