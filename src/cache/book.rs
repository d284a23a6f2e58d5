//! The books of a cache, in integers: sequences, pages and who shares them. No GPU: the GPU cache and the CPU reference
//! carry out the same plans.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::plan::{Attended, ClassPlan, StepPlan};
use super::planner::{Pending, Planner, rounds};
use super::pool::{BytesInUse, Pool, PoolId, PoolState};
use super::saved;
use super::sequence::{HeldPage, Sequence, SequenceId, SideState, cut, held, is_waiting};
use super::spec::{CacheSpec, Class, Geometry, K, MAX_TOKENS, V};
use crate::error::{Error, Result};

/// A number that nothing else in this process has.
fn serial() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The books of a cache.
#[derive(Debug)]
pub struct Book {
    spec: CacheSpec,
    geometry: Geometry,
    pages: u32,
    pools: BTreeMap<PoolId, Pool>,
    sequences: BTreeMap<SequenceId, Sequence>,
    pending: Option<Pending>,
}

impl Book {
    /// Books for an empty cache whose buffers hold at most `limit` bytes each; without a limit each pool is one buffer.
    ///
    /// # Errors
    /// As [`CacheSpec::geometry`] and [`CacheSpec::pages`]; [`Error::Limit`] for pages that no buffer can hold.
    pub fn new(spec: CacheSpec, limit: Option<u64>) -> Result<Book> {
        let geometry = spec.geometry()?;
        let pages = spec.pages(&geometry)?;
        let mut pools = BTreeMap::new();
        // What the cache grows by at a time, as a share of all that the budget buys.
        let step = spec.growth as f64 / geometry.bytes(u64::from(pages)) as f64;
        for (c, class) in geometry.classes.iter().enumerate() {
            for (side, waiting) in [(K, false), (K, true), (V, false), (V, true)] {
                // At most 2^28 packed pages, or 2^16 sequences of 24,578 in full precision.
                let capacity = geometry.capacity(class, side, waiting, u64::from(pages)) as u32;
                if capacity == 0 {
                    continue;
                }
                let layout = class.page(side, waiting);
                let id = PoolId {
                    class: c,
                    side,
                    waiting,
                };
                pools.insert(id, Pool::new(layout, capacity, limit, step)?);
            }
        }
        Ok(Book {
            spec,
            geometry,
            pages,
            pools,
            sequences: BTreeMap::new(),
            pending: None,
        })
    }

    /// The spec.
    pub fn spec(&self) -> &CacheSpec {
        &self.spec
    }

    /// The page geometries.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Packed pages that the budget buys, in each pool.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Opens an empty sequence.
    pub fn open(&mut self) -> SequenceId {
        let sides = vec![Default::default(); self.geometry.classes.len()];
        self.insert(Sequence { len: 0, sides })
    }

    fn insert(&mut self, sequence: Sequence) -> SequenceId {
        let id = SequenceId(serial());
        self.sequences.insert(id, sequence);
        id
    }

    /// Frees a sequence; pages that no other shares serve later steps. A planned step is taken back first.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn free(&mut self, id: SequenceId) -> Result<()> {
        self.take_back();
        let sequence = self.sequences.remove(&id).ok_or(Error::UnknownSequence(id.0))?;
        self.release(held(&sequence));
        Ok(())
    }

    fn release(&mut self, pages: impl IntoIterator<Item = (PoolId, u32)>) {
        for (id, page) in pages {
            if let Some(pool) = self.pools.get_mut(&id) {
                pool.release(page);
            }
        }
    }

    /// A new sequence of the first `len` tokens of another. Both share its pages; who writes to a shared page later
    /// copies it first. A planned step is taken back first.
    ///
    /// # Errors
    /// As [`Book::truncate`].
    pub fn fork(&mut self, id: SequenceId, len: u32) -> Result<SequenceId> {
        self.take_back();
        let sequence = self.shortened(id, len, "a fork")?;
        for (id, page) in held(&sequence) {
            if let Some(pool) = self.pools.get_mut(&id) {
                pool.hold(page);
            }
        }
        Ok(self.insert(sequence))
    }

    /// Drops all tokens of a sequence but the first `len`. A planned step is taken back first.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Usage`] for more tokens than there are, and where the end would lie within a
    /// group that a per-channel side has packed: nothing is ever packed again silently. It names the nearest length
    /// that works; recent windows make it so for the last tokens. Then nothing has changed.
    pub fn truncate(&mut self, id: SequenceId, len: u32) -> Result<()> {
        self.take_back();
        let shorter = self.shortened(id, len, "a truncation")?;
        let kept: BTreeSet<_> = held(&shorter).collect();
        if let Some(longer) = self.sequences.insert(id, shorter) {
            self.release(held(&longer).filter(|page| !kept.contains(page)));
        }
        Ok(())
    }

    /// The length nearest to `len` to which a sequence can be truncated, or at which it can be forked.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn nearest_cut(&self, id: SequenceId, len: u32) -> Result<u32> {
        let sequence = self.sequence(id)?;
        Ok(self.nearest(sequence, len.min(sequence.len)))
    }

    fn nearest(&self, sequence: &Sequence, len: u32) -> u32 {
        let works = |len: &u32| {
            self.sides(sequence)
                .all(|(class, s, state)| cut(class, s, state, *len).is_some())
        };
        // The empty sequence and the whole one always work.
        let below = (0..=len).rev().find(works).unwrap_or(0);
        let above = (len..=sequence.len).find(works).unwrap_or(sequence.len);
        if above - len < len - below { above } else { below }
    }

    fn shortened(&self, id: SequenceId, len: u32, what: &str) -> Result<Sequence> {
        let sequence = self.sequence(id)?;
        let refuse = |reason: String, advice: String| Error::Usage {
            asked: format!("{what} of sequence {id} to {len} tokens"),
            reason,
            advice,
        };
        if len > sequence.len {
            let held = format!("it has {}", sequence.len);
            return Err(refuse(held, "ask for at most that many".to_owned()));
        }
        let nearest = self.nearest(sequence, len);
        if nearest != len {
            return Err(refuse(
                "the end would lie within a packed group of a per-channel side".to_owned(),
                format!(
                    "the nearest length that works is {nearest} (a recent window keeps the last tokens removable)"
                ),
            ));
        }
        let mut shorter = sequence.clone();
        shorter.len = len;
        for (class, sides) in self.geometry.classes.iter().zip(&mut shorter.sides) {
            for (s, state) in sides.iter_mut().enumerate() {
                let boundary = cut(class, s, state, len).unwrap_or(len);
                state.boundary = boundary;
                state
                    .packed
                    .truncate(boundary.div_ceil(self.geometry.page_tokens) as usize);
                let sinks = class.sink_tokens[s];
                let page_tokens = self.geometry.page_tokens;
                state
                    .waiting
                    .retain(|&place, _| is_waiting(place, page_tokens, sinks, boundary, len));
            }
        }
        Ok(shorter)
    }

    fn sides<'a>(
        &'a self,
        sequence: &'a Sequence,
    ) -> impl Iterator<Item = (&'a Class, usize, &'a SideState)> {
        let classes = self.geometry.classes.iter().zip(&sequence.sides);
        classes.flat_map(|(class, sides)| [K, V].map(|s| (class, s, &sides[s])))
    }

    /// A sequence of `len` tokens packed up to the boundaries, `[class][K, V]`, on pages of its own whose words are still
    /// to be written.
    ///
    /// # Errors
    /// [`Error::CacheFull`], and [`Error::Restore`] for a state that no sequence of this cache can be in.
    pub(super) fn adopt(&mut self, len: u32, boundaries: &[[u32; 2]]) -> Result<SequenceId> {
        self.take_back();
        let page_tokens = self.geometry.page_tokens;
        let mut sides = Vec::new();
        for (class, boundaries) in self.geometry.classes.iter().zip(boundaries) {
            for (s, &boundary) in boundaries.iter().enumerate() {
                let group = class.packed[s].side.layout.token_group();
                let least = class.boundary(s, 0, len);
                if boundary < least || boundary > len || !boundary.is_multiple_of(group) {
                    return Err(Error::Restore {
                        reason: format!("{boundary} of {len} tokens are packed, which this cache never does"),
                    });
                }
            }
            sides.push([K, V].map(|s| {
                let sinks = class.sink_tokens[s];
                let places = 0..len.div_ceil(page_tokens);
                let waiting = places
                    .filter(|&place| {
                        class.waiting[s].is_some()
                            && is_waiting(place, page_tokens, sinks, boundaries[s], len)
                    })
                    .map(|place| (place, u32::MAX));
                SideState {
                    boundary: boundaries[s],
                    packed: vec![u32::MAX; boundaries[s].div_ceil(page_tokens) as usize],
                    waiting: waiting.collect(),
                }
            }));
        }
        let mut sequence = Sequence { len, sides };
        // All or nothing: what is missing is known before the first page is taken.
        let mut needed: BTreeMap<PoolId, u64> = BTreeMap::new();
        for (pool, _) in held(&sequence) {
            *needed.entry(pool).or_default() += 1;
        }
        for (pool, needed) in needed {
            self.check_free(pool, needed)?;
        }
        for (class, sides) in sequence.sides.iter_mut().enumerate() {
            for (side, state) in sides.iter_mut().enumerate() {
                let mut take = |waiting: bool| {
                    let id = PoolId { class, side, waiting };
                    self.pools.get_mut(&id).map_or(u32::MAX, Pool::take)
                };
                state.packed.iter_mut().for_each(|page| *page = take(false));
                state.waiting.values_mut().for_each(|page| *page = take(true));
            }
        }
        Ok(self.insert(sequence))
    }

    /// A sequence as bytes, given the live words of its pages in the order of [`Book::held_pages`].
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Usage`] where per-tensor scales come from rows.
    pub fn save(&self, id: SequenceId, words: &[u32]) -> Result<Vec<u8>> {
        Ok(saved::finish(saved::head(self, id)?, words))
    }

    /// A new sequence for saved bytes, and the words to write to its pages, in the order of [`Book::held_pages`]. All or
    /// nothing.
    ///
    /// # Errors
    /// [`Error::Restore`], [`Error::CacheFull`], [`Error::Usage`] where per-tensor scales come from rows.
    pub fn restore(&mut self, bytes: &[u8]) -> Result<(SequenceId, Vec<u32>)> {
        saved::decode(self, bytes)
    }

    fn check_free(&self, id: PoolId, needed: u64) -> Result<()> {
        let free = u64::from(self.pools.get(&id).map_or(0, Pool::unused));
        if needed <= free {
            return Ok(());
        }
        Err(self.full(id, needed - free, free))
    }

    fn full(&self, id: PoolId, missing: u64, free: u64) -> Error {
        let kind = if id.waiting { "full-precision" } else { "packed" };
        let class = &self.geometry.classes[id.class];
        let layers = match self.geometry.classes.len() {
            1 => String::new(),
            _ => format!(" (layers as {})", class.spec.pair),
        };
        Error::CacheFull {
            what: format!("{kind} {}{layers}", ["K", "V"][id.side]),
            missing,
            free,
            // More tokens take more packed pages; more sequences take more in full precision.
            advice: match id.waiting {
                true => "free a sequence, or raise the sequences and the budget of the cache's spec",
                false => "free or truncate a sequence, or raise the budget",
            },
        }
    }

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn len(&self, id: SequenceId) -> Result<u32> {
        Ok(self.sequence(id)?.len)
    }

    /// The open sequences, in the order in which they were opened.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> + '_ {
        self.sequences.keys().copied()
    }

    /// Tokens of a sequence's K and V that are packed in a layer: sink tokens below the boundary are not.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::Shape`] for a layer that the cache lacks.
    pub fn boundaries(&self, id: SequenceId, layer: u32) -> Result<[u32; 2]> {
        let sides = &self.sequence(id)?.sides[self.geometry.class_index(layer)?];
        Ok([sides[K].boundary, sides[V].boundary])
    }

    pub(super) fn sequence(&self, id: SequenceId) -> Result<&Sequence> {
        self.sequences.get(&id).ok_or(Error::UnknownSequence(id.0))
    }

    /// The pages of a sequence: by layer, K before V, packed ones before others, in the order of their tokens.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn held_pages(&self, id: SequenceId) -> Result<Vec<HeldPage>> {
        let sequence = self.sequence(id)?;
        let page_tokens = self.geometry.page_tokens;
        let slots = |place: u32, tokens: Range<u32>| {
            let slot = |token: u32| token.saturating_sub(place * page_tokens).min(page_tokens);
            slot(tokens.start)..slot(tokens.end).max(slot(tokens.start))
        };
        let mut pages = Vec::new();
        for (layer, &c) in (0..).zip(&self.geometry.class_of) {
            let class = &self.geometry.classes[c];
            for (side, state) in sequence.sides[c].iter().enumerate() {
                let sinks = class.sink_tokens[side].min(sequence.len);
                let mut add = |waiting: bool, place: u32, page: u32, live: [Range<u32>; 2]| {
                    pages.push(HeldPage {
                        layer,
                        pool: PoolId {
                            class: c,
                            side,
                            waiting,
                        },
                        page,
                        layout: class.page(side, waiting),
                        live: live.map(|tokens| slots(place, tokens)),
                    });
                };
                for (place, &page) in (0..).zip(&state.packed) {
                    add(false, place, page, [0..0, sinks..state.boundary]);
                }
                for (&place, &page) in &state.waiting {
                    add(
                        true,
                        place,
                        page,
                        [0..sinks, state.boundary.max(sinks)..sequence.len],
                    );
                }
            }
        }
        Ok(pages)
    }

    /// Those of [`Book::held_pages`] that are of one side of a layer.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::Shape`] for a layer or side that does not exist.
    pub fn held_pages_of(&self, id: SequenceId, layer: u32, side: usize) -> Result<Vec<HeldPage>> {
        self.geometry.class(layer)?;
        if side > V {
            return Err(Error::Shape {
                what: "side",
                value: side as u64,
                limit: "K is 0 and V is 1".to_owned(),
                advice: "use the constants K and V".to_owned(),
            });
        }
        let mut held = self.held_pages(id)?;
        held.retain(|page| page.layer == layer && page.pool.side == side);
        Ok(held)
    }

    /// Every pool.
    pub fn pools(&self) -> impl Iterator<Item = PoolState> + '_ {
        self.pools.iter().map(|(&id, pool)| PoolState {
            id,
            layout: pool.layout,
            layers: self.geometry.classes[id.class].layers.len() as u32,
            used: pool.used(),
            free: pool.unused(),
            per_buffer: pool.per_buffer,
            made: pool.fresh.min(pool.capacity),
            buffers: pool.fresh.min(pool.capacity).div_ceil(pool.per_buffer),
        })
    }

    /// Bytes of the buffers that hold the pages used so far.
    pub fn allocated_bytes(&self) -> u64 {
        let pools = self.pools().map(|pool| {
            let buffers = (0..pool.buffers).map(|number| self.buffer_bytes(pool.id, number));
            buffers.sum::<u64>() * u64::from(pool.layers)
        });
        pools.sum()
    }

    /// Bytes of a buffer of a pool: the last one may be smaller. 0 for a buffer that the pool never has.
    pub fn buffer_bytes(&self, id: PoolId, number: u32) -> u64 {
        let bytes = self.pools.get(&id).map(|pool| {
            let before = number.saturating_mul(pool.per_buffer);
            let pages = pool.capacity.saturating_sub(before).min(pool.per_buffer);
            u64::from(pages) * pool.layout.bytes()
        });
        bytes.unwrap_or(0)
    }

    /// The buffer of a page that a sequence holds, and the page's number in it.
    pub fn locate(&self, held: &HeldPage) -> (u32, u32) {
        let pool = self.pools.get(&held.pool);
        pool.map_or((0, held.page), |pool| pool.locate(held.page))
    }

    /// Bytes of the pages in use, all layers, those in full precision too. Shared pages count once.
    pub fn bytes_in_use(&self) -> BytesInUse {
        let mut bytes = BytesInUse::default();
        for pool in self.pools() {
            bytes.add(&pool.layout, u64::from(pool.used) * u64::from(pool.layers));
        }
        bytes
    }

    /// Bytes of the pages that freeing a sequence gives back: those that no other shares.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn bytes_freed_by(&self, id: SequenceId) -> Result<BytesInUse> {
        let mut bytes = BytesInUse::default();
        for (id, page) in held(self.sequence(id)?) {
            let Some(pool) = self.pools.get(&id) else { continue };
            if pool.holders[page as usize] == 1 {
                bytes.add(&pool.layout, self.geometry.classes[id.class].layers.len() as u64);
            }
        }
        Ok(bytes)
    }

    /// Tokens for which one more sequence is sure to find pages now, by whatever steps it grows. Never too much, often too
    /// little: 0 once fewer waiting pages are free than one sequence may need at worst, as with more sequences open than
    /// [`CacheSpec::sequences`]. Whether one certain step fits, `KvCache::step` tells for sure:
    /// dropped, it gives its pages back, though buffers that were made for them stay.
    pub fn room(&self) -> u64 {
        let tokens = |pool: PoolState| match pool.id.waiting {
            false => u64::from(pool.free) * u64::from(self.geometry.page_tokens),
            true if pool.free >= self.geometry.waiting_pages(pool.id) => u64::from(MAX_TOKENS),
            // Each place of a sequence has one page in full precision at most: a short one needs fewer.
            true => u64::from(pool.free) * u64::from(self.geometry.page_tokens),
        };
        self.pools()
            .map(tokens)
            .min()
            .unwrap_or(0)
            .min(u64::from(MAX_TOKENS))
    }

    /// Plans a step: `new` tokens for each sequence, appended, then attended by themselves as queries. `token_tile` is
    /// the number of query tokens of one workgroup in prefill. All or nothing: on error nothing has changed. A step that
    /// was planned before and not committed is taken back.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::CacheFull`], [`Error::Usage`] for a sequence named twice or grown beyond 2^31
    /// tokens.
    pub fn plan(&mut self, requests: &[(SequenceId, u32)], token_tile: u32) -> Result<StepPlan> {
        self.take_back();
        let (sequences, tokens) = self.check_requests(requests)?;
        let mut planner = Planner {
            geometry: &self.geometry,
            pools: &mut self.pools,
            pending: Pending {
                serial: serial(),
                ..Pending::default()
            },
            rounds: rounds(requests, self.geometry.round_tokens()),
        };
        let mut plan = StepPlan::new(tokens, planner.pending.serial, token_tile, &self.spec);
        let mut after = sequences;
        for class in 0..self.geometry.classes.len() {
            let mut class_plan = ClassPlan::default();
            planner.copy_shared(class, requests, &mut after, &mut class_plan.copies);
            for side in [K, V] {
                class_plan.rounds[side] = planner.side(class, side, &mut after);
            }
            plan.classes.push(class_plan);
        }
        for (sequence, &(_, new)) in after.iter_mut().zip(requests) {
            sequence.len += new;
        }
        let mut pending = planner.pending;
        let ids = requests.iter().map(|&(id, _)| id);
        pending.after = ids.zip(after).collect();
        let full = self.pools.iter().find(|(_, pool)| pool.fresh > pool.capacity);
        let full = full.map(|(&id, pool)| (id, u64::from(pool.fresh - pool.capacity)));
        self.pending = Some(pending);
        if let Some((id, missing)) = full {
            self.take_back();
            let free = u64::from(self.pools.get(&id).map_or(0, Pool::unused));
            return Err(self.full(id, missing, free));
        }
        self.plan_attention(requests, &mut plan);
        Ok(plan)
    }

    /// The sequences of a step as they are, and the number of new tokens. Packed pages are counted here, before any list
    /// grows: a step far beyond the cache is refused at once.
    fn check_requests(&self, requests: &[(SequenceId, u32)]) -> Result<(Vec<Sequence>, u32)> {
        let mut sequences = Vec::new();
        let mut named = BTreeSet::new();
        let mut tokens = 0_u64;
        let mut needed: BTreeMap<PoolId, u64> = BTreeMap::new();
        for &(id, new) in requests {
            let refuse = |reason: &str, advice: &str| Error::Usage {
                asked: format!("a step of {new} new tokens for sequence {id}"),
                reason: reason.to_owned(),
                advice: advice.to_owned(),
            };
            let sequence = self.sequence(id)?;
            if !named.insert(id) {
                return Err(refuse(
                    "the sequence is named twice in one step",
                    "name each sequence once",
                ));
            }
            if new > 0 && self.spec.scales_from_rows() && self.sequences.values().any(|held| held.len > 0) {
                return Err(refuse(
                    "per-tensor scales come from the rows of one step, and the cache already holds tokens under others",
                    "free its sequences first, or give calibrated scales",
                ));
            }
            let len = u64::from(sequence.len) + u64::from(new);
            tokens += u64::from(new);
            if len > u64::from(self.spec.most_tokens()) && self.spec.key_rotation.is_some() {
                return Err(refuse(
                    &format!("keys are rotated for {} positions", self.spec.most_tokens()),
                    "give CacheSpec::key_rotation more positions",
                ));
            }
            if len.max(tokens) > u64::from(MAX_TOKENS) {
                return Err(refuse(
                    "a sequence or step holds at most 2^31 tokens",
                    "split the work",
                ));
            }
            for (class, sides) in sequence.sides.iter().enumerate() {
                for (side, state) in sides.iter().enumerate() {
                    let spec = &self.geometry.classes[class];
                    let boundary = spec.boundary(side, state.boundary, len as u32);
                    let pages = boundary.div_ceil(self.geometry.page_tokens) as usize;
                    let id = PoolId {
                        class,
                        side,
                        waiting: false,
                    };
                    *needed.entry(id).or_default() += pages.saturating_sub(state.packed.len()) as u64;
                }
            }
            sequences.push(sequence.clone());
        }
        for (id, needed) in needed {
            self.check_free(id, needed)?;
        }
        Ok((sequences, tokens as u32))
    }

    /// The splits of each sequence that its new tokens attend to.
    fn plan_attention(&self, requests: &[(SequenceId, u32)], plan: &mut StepPlan) {
        let Some(pending) = &self.pending else { return };
        for (c, class) in self.geometry.classes.iter().enumerate() {
            let pools = [K, V].map(|side| {
                [false, true].map(|waiting| {
                    let id = PoolId {
                        class: c,
                        side,
                        waiting,
                    };
                    self.pools.get(&id).map_or(1, |pool| pool.per_buffer)
                })
            });
            let mut first_row = 0;
            for ((_, sequence), &(_, new)) in pending.after.iter().zip(requests) {
                let attended = Attended {
                    new,
                    first_row,
                    first_position: sequence.len - new,
                };
                let split = self.spec.split_tokens();
                plan.classes[c].attend(class, &sequence.sides[c], sequence.len, split, pools, attended);
                first_row += new;
            }
        }
    }

    /// Makes a planned step part of the cache. Pages that it frees serve later steps.
    ///
    /// # Errors
    /// [`Error::Usage`] for a plan that is not this cache's last one, or was taken back; then nothing changes.
    pub fn commit(&mut self, plan: StepPlan) -> Result<()> {
        match self.pending.take() {
            Some(pending) if pending.serial == plan.serial => {
                self.sequences.extend(pending.after);
                self.release(pending.released);
                Ok(())
            }
            other => {
                self.pending = other;
                Err(Error::Usage {
                    asked: "the commit of a step".to_owned(),
                    reason: "it was planned by another cache, or was taken back by a later plan or a change of a sequence"
                        .to_owned(),
                    advice: "plan the step again".to_owned(),
                })
            }
        }
    }

    /// Takes a planned step back, if it still waits for its commit.
    pub fn abandon(&mut self, plan: StepPlan) {
        let waits = |pending: &Pending| pending.serial == plan.serial;
        if self.pending.as_ref().is_some_and(waits) {
            self.take_back();
        }
    }

    /// Frees a sequence whose pages could not be made or written: they are as if it had not been.
    pub(super) fn forget(&mut self, id: SequenceId) -> Result<()> {
        self.free(id)?;
        self.pools.values_mut().for_each(Pool::trim);
        Ok(())
    }

    fn take_back(&mut self) {
        if let Some(pending) = self.pending.take() {
            self.release(pending.taken);
            self.pools.values_mut().for_each(Pool::trim);
        }
    }
}
