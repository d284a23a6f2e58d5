//! What a cache holds and what a step does to it, in integers: page tables, boundaries, work lists. No GPU: the GPU
//! cache and the CPU reference carry out the same plans.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};
use crate::options::Reach;
use crate::pages::PageLayout;
use crate::scales::{GIVEN_SCALE, ScaleLayout};
use crate::spec::{Pair, Side};
use crate::work::{Merge, SlotRun, TableEntry, WorkItem, slot_runs};

/// The most partials of one step.
const MAX_PARTIALS: u64 = 1 << 31;

/// Index of K in pairs of sides.
pub const K: usize = 0;
/// Index of V in pairs of sides.
pub const V: usize = 1;

/// Where per-tensor scales come from.
#[derive(Debug, Clone, PartialEq)]
pub enum TensorScales {
    /// Fixed when the cache is made: `[layer][K, V]`, calibrated or given.
    Given(Vec<[f32; 2]>),
    /// From the rows of each step, before they are packed. A step is refused while the cache holds tokens, since they
    /// would be read under the new scale.
    FromRows,
}

/// The shape and format of a cache.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheSpec {
    /// Layers of the model.
    pub layers: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Channels of a key head.
    pub k_head_dim: u32,
    /// Channels of a value head.
    pub v_head_dim: u32,
    /// How K and V are stored.
    pub pair: Pair,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Recent tokens R of K and of V that stay in full precision.
    pub window: [u32; 2],
    /// The format in which tokens wait to be packed: f16; f32 only for the published convention.
    pub waiting: Side,
    /// Pages of each pool: of packed pages, and of pages in which tokens wait.
    pub pages: u32,
    /// Per-tensor scales; not looked at by sides without them.
    pub tensor_scales: TensorScales,
}

/// The page geometries of a cache.
#[derive(Debug, Clone, Copy)]
pub struct Geometry {
    /// Packed pages of K and V.
    pub packed: [PageLayout; 2],
    /// Pages in which tokens of K and V wait to be packed, where they do.
    pub waiting: [Option<PageLayout>; 2],
}

impl Geometry {
    /// The pages of a side's tokens, packed or (where they do) waiting.
    pub fn page(&self, side: usize, waits: bool) -> PageLayout {
        match (waits, self.waiting[side]) {
            (true, Some(page)) => page,
            _ => self.packed[side],
        }
    }
}

impl CacheSpec {
    /// Checks the spec.
    ///
    /// # Errors
    /// [`Error::Shape`] and [`Error::TensorScale`], each naming the value and the rule.
    pub fn geometry(&self) -> Result<Geometry> {
        let shape = |what, value: u32, limit: &str| {
            Err(Error::Shape {
                what,
                value: u64::from(value),
                limit: limit.to_owned(),
                advice: "check the cache's spec".to_owned(),
            })
        };
        if self.layers == 0 || self.layers > 1024 {
            return shape("layers", self.layers, "1 to 1024 layers");
        }
        if self.pages == 0 || self.pages > 1 << 24 {
            return shape("pages", self.pages, "1 to 2^24 pages a pool");
        }
        if ![Side::F16, Side::F32].contains(&self.waiting) {
            return shape(
                "waiting bits",
                self.waiting.element.bits(),
                "tokens wait as f16 (or f32)",
            );
        }
        crate::pages::heads_ratio(self.q_heads, self.kv_heads.max(1))?;
        let dims = [self.k_head_dim, self.v_head_dim];
        let sides = [self.pair.k, self.pair.v];
        let page = |side, s: usize| PageLayout::new(side, self.kv_heads, dims[s], self.page_tokens);
        let waits = |s: usize| {
            sides[s]
                .waits(self.window[s])
                .then(|| page(self.waiting, s))
                .transpose()
        };
        if let TensorScales::Given(scales) = &self.tensor_scales {
            self.check_scales(scales)?;
        }
        let pool = |page: PageLayout| -> Result<PageLayout> {
            let words = u64::from(self.pages) * u64::from(page.words);
            if words <= u64::from(u32::MAX) {
                return Ok(page);
            }
            Err(Error::Limit {
                what: "a pool (words; kernels number them in 32 bits)".to_owned(),
                needed: words,
                allowed: u64::from(u32::MAX),
                advice: "ask for fewer pages, or a format with fewer bits".to_owned(),
            })
        };
        Ok(Geometry {
            packed: [pool(page(sides[K], K)?)?, pool(page(sides[V], V)?)?],
            waiting: [waits(K)?.map(pool).transpose()?, waits(V)?.map(pool).transpose()?],
        })
    }

    fn check_scales(&self, scales: &[[f32; 2]]) -> Result<()> {
        let sides = [self.pair.k, self.pair.v];
        let used = |s: usize| sides[s].layout == ScaleLayout::PerTensor;
        if (used(K) || used(V) || !scales.is_empty()) && scales.len() != self.layers as usize {
            return Err(Error::Shape {
                what: "per-tensor scales (layers)",
                value: scales.len() as u64,
                limit: format!("one pair of scales for each of the {} layers", self.layers),
                advice: "calibrate on your data".to_owned(),
            });
        }
        for (layer, pair) in scales.iter().enumerate() {
            for (s, &value) in pair.iter().enumerate() {
                // Written so that NaN is refused.
                if used(s) && !GIVEN_SCALE.contains(&f64::from(value)) {
                    let what = format!("layer {layer}, {}", ["K", "V"][s]);
                    return Err(Error::TensorScale {
                        what,
                        value: f64::from(value),
                    });
                }
            }
        }
        Ok(())
    }

    /// Tokens of one split: pages of one work item at most. A function of the shape alone, so that a sequence gives the
    /// same bits in every batch.
    pub fn split_tokens(&self) -> u32 {
        (512 / self.page_tokens).max(1) * self.page_tokens
    }
}

/// A sequence of a cache: counted from 1 as they are opened, never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(u64);

/// One side of a sequence: tokens below the boundary are packed, the rest wait.
#[derive(Debug, Clone, Default)]
struct SideState {
    boundary: u32,
    /// Packed pages, by their place in the sequence.
    packed: Vec<u32>,
    /// Pages in which tokens wait, by their place in the sequence.
    waiting: BTreeMap<u32, u32>,
}

#[derive(Debug, Clone, Default)]
struct Sequence {
    len: u32,
    sides: [SideState; 2],
}

/// What a step writes on one side.
#[derive(Debug, Clone, Default)]
pub struct SidePlan {
    /// New rows straight into packed pages.
    pub direct: Vec<SlotRun>,
    /// New rows into pages in which they wait.
    pub wait: Vec<SlotRun>,
    /// Waiting tokens into packed pages; after `wait`.
    pub pack: Vec<SlotRun>,
}

/// Which kernel serves a work item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentKind {
    /// K of these tokens waits in full precision.
    pub k_waits: bool,
    /// V of these tokens waits in full precision.
    pub v_waits: bool,
    /// More than one query token of a sequence.
    pub prefill: bool,
}

impl SegmentKind {
    /// A number below 8 of its own.
    pub fn index(self) -> usize {
        usize::from(self.k_waits) | usize::from(self.v_waits) << 1 | usize::from(self.prefill) << 2
    }
}

/// Everything that one step does, for every layer alike.
#[derive(Debug, Default)]
pub struct StepPlan {
    /// What is written, K and V.
    pub sides: [SidePlan; 2],
    /// The page table that work items point into.
    pub table: Vec<TableEntry>,
    /// New tokens of all sequences: rows of k, v and q.
    pub tokens: u32,
    /// The work of causal attention without a window.
    pub attention: AttentionPlan,
    /// Query tokens of one workgroup in prefill.
    token_tile: u32,
    q_heads: u32,
    attended: Vec<Attended>,
    serial: u64,
}

/// The attention of one step, for every layer with the same reach.
#[derive(Debug, Clone, Default)]
pub struct AttentionPlan {
    /// Work items, by kernel.
    pub segments: BTreeMap<SegmentKind, Vec<WorkItem>>,
    /// One entry a query token.
    pub merges: Vec<Merge>,
    /// Partials in all.
    pub partials: u32,
}

/// The new tokens of one sequence and what they attend to, in token order.
#[derive(Debug, Clone)]
struct Attended {
    pieces: Vec<Piece>,
    new: u32,
    first_row: u32,
    first_position: u32,
}

/// One split of a sequence.
#[derive(Debug, Clone, Copy)]
struct Piece {
    kind: SegmentKind,
    /// First token and end.
    tokens: [u32; 2],
    table: u32,
    pages: u32,
    position: u32,
}

impl StepPlan {
    /// The work of attention whose queries reach so far: splits times tiles of query tokens, less those in which no
    /// query sees a token.
    ///
    /// # Errors
    /// [`Error::Limit`] for more partials than one step may have.
    pub fn attention_within(&self, reach: Reach) -> Result<AttentionPlan> {
        let mut plan = AttentionPlan::default();
        for sequence in &self.attended {
            self.tiles(sequence, reach, &mut plan)?;
        }
        Ok(plan)
    }

    fn tiles(&self, sequence: &Attended, reach: Reach, plan: &mut AttentionPlan) -> Result<()> {
        let tile = if sequence.new > 1 { self.token_tile } else { 1 };
        for first in (0..sequence.new).step_by(tile as usize) {
            let queries = tile.min(sequence.new - first);
            let query_position = sequence.first_position + first;
            let own = [query_position, query_position + queries - 1];
            let seen = sequence
                .pieces
                .iter()
                .filter(|piece| reach.meets(own, piece.tokens));
            let base = plan.partials;
            // Checked before any number of a partial is formed: each fits 32 bits then.
            let most =
                u64::from(base) + seen.clone().count() as u64 * u64::from(queries) * u64::from(self.q_heads);
            if most > MAX_PARTIALS {
                return Err(Error::Limit {
                    what: "attention partials of one step".to_owned(),
                    needed: most,
                    allowed: MAX_PARTIALS,
                    advice: "split the prompt into chunks".to_owned(),
                });
            }
            let stride = queries * self.q_heads;
            let mut count = 0;
            for piece in seen {
                plan.segments.entry(piece.kind).or_default().push(WorkItem {
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
            plan.partials = base + count * stride;
            let merges = (0..queries).map(|t| Merge {
                first: base + t * self.q_heads,
                stride,
                count,
                row: sequence.first_row + first + t,
            });
            plan.merges.extend(merges);
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Packed,
    Waiting,
}

/// Free pages of K and V, packed and waiting.
#[derive(Debug)]
struct Pools([[Vec<u32>; 2]; 2]);

impl Pools {
    fn of(&mut self, side: usize, kind: Kind) -> &mut Vec<u32> {
        &mut self.0[side][usize::from(kind == Kind::Waiting)]
    }
}

/// Pages in use, K and V.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PagesInUse {
    /// Packed pages of K and V, of one layer.
    pub packed: [u32; 2],
    /// Pages of K and V in which tokens wait, of one layer.
    pub waiting: [u32; 2],
}

/// The books of a cache: sequences, page tables, free pages.
#[derive(Debug)]
pub struct Book {
    spec: CacheSpec,
    geometry: Geometry,
    pools: Pools,
    sequences: BTreeMap<SequenceId, Sequence>,
    opened: u64,
    pending: Option<Pending>,
}

/// What a planned step will change, until it is committed or taken back.
#[derive(Debug, Default)]
struct Pending {
    serial: u64,
    after: Vec<(SequenceId, Sequence)>,
    taken: Vec<(usize, Kind, u32)>,
    freed: Vec<(usize, Kind, u32)>,
}

/// A number that no other plan of this process has, so that those of another cache are told apart.
fn serial() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Pages in use by their parts, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BytesInUse {
    /// Codes, of packed and of waiting tokens, unused slots too.
    pub codes: u64,
    /// Scales, unused slots too.
    pub scales: u64,
    /// Ends of head words and of planes.
    pub padding: u64,
}

impl BytesInUse {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.codes + self.scales + self.padding
    }
}

impl Book {
    /// Books for an empty cache.
    ///
    /// # Errors
    /// As [`CacheSpec::geometry`].
    pub fn new(spec: CacheSpec) -> Result<Book> {
        let geometry = spec.geometry()?;
        let all: Vec<u32> = (0..spec.pages).rev().collect();
        let pools = Pools([[all.clone(), all.clone()], [all.clone(), all]]);
        Ok(Book {
            spec,
            geometry,
            pools,
            sequences: BTreeMap::new(),
            opened: 0,
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

    /// Opens an empty sequence.
    pub fn open(&mut self) -> SequenceId {
        self.opened += 1;
        let id = SequenceId(self.opened);
        self.sequences.insert(id, Sequence::default());
        id
    }

    /// Frees a sequence and its pages. A planned step is taken back first.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn free(&mut self, id: SequenceId) -> Result<()> {
        self.take_back();
        let sequence = self.sequences.remove(&id).ok_or(Error::UnknownSequence(id.0))?;
        for (s, side) in sequence.sides.into_iter().enumerate() {
            self.pools.of(s, Kind::Packed).extend(side.packed);
            self.pools.of(s, Kind::Waiting).extend(side.waiting.into_values());
        }
        Ok(())
    }

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn len(&self, id: SequenceId) -> Result<u32> {
        Ok(self.sequence(id)?.len)
    }

    /// Tokens of a sequence's K and V that are packed.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn boundaries(&self, id: SequenceId) -> Result<[u32; 2]> {
        let sequence = self.sequence(id)?;
        Ok([sequence.sides[K].boundary, sequence.sides[V].boundary])
    }

    /// The packed pages of a sequence's side, by their place in the sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::Shape`] for a side that is neither K nor V.
    pub fn packed_pages(&self, id: SequenceId, side: usize) -> Result<&[u32]> {
        Ok(&self.side(id, side)?.packed)
    }

    /// The pages in which tokens of a sequence's side wait, by their place in the sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::Shape`] for a side that is neither K nor V.
    pub fn waiting_pages(&self, id: SequenceId, side: usize) -> Result<&BTreeMap<u32, u32>> {
        Ok(&self.side(id, side)?.waiting)
    }

    /// Pages in use by all sequences.
    pub fn pages_in_use(&self) -> PagesInUse {
        let mut used = PagesInUse::default();
        for sequence in self.sequences.values() {
            for (s, side) in sequence.sides.iter().enumerate() {
                used.packed[s] += side.packed.len() as u32;
                used.waiting[s] += side.waiting.len() as u32;
            }
        }
        used
    }

    /// Bytes of the pages in use, all layers, those in which tokens wait too.
    pub fn bytes_in_use(&self) -> BytesInUse {
        let used = self.pages_in_use();
        let mut bytes = BytesInUse::default();
        let mut add = |page: &PageLayout, pages: u32| {
            let pages = u64::from(pages) * u64::from(self.spec.layers);
            bytes.scales += pages * page.scale_bytes();
            bytes.padding += pages * page.padding_bytes();
            bytes.codes += pages * (page.bytes() - page.scale_bytes() - page.padding_bytes());
        };
        for s in [K, V] {
            add(&self.geometry.packed[s], used.packed[s]);
            if let Some(waiting) = &self.geometry.waiting[s] {
                add(waiting, used.waiting[s]);
            }
        }
        bytes
    }

    /// Bytes of all pages that the cache makes, in use or not: all layers, K and V, packed and waiting.
    pub fn allocated_bytes(&self) -> u64 {
        let Geometry { packed, waiting } = &self.geometry;
        let pages = packed
            .iter()
            .chain(waiting.iter().flatten())
            .map(PageLayout::bytes)
            .sum::<u64>();
        pages * u64::from(self.spec.pages) * u64::from(self.spec.layers)
    }

    /// The live words of a sequence's side, in order: packed pages up to the boundary, then waiting ones from it on.
    /// `pool` gives a pool's words, of packed pages or of those in which tokens wait.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::Shape`] for a side that is neither K nor V.
    pub fn live_words(
        &self,
        id: SequenceId,
        side: usize,
        pool: impl Fn(bool) -> Vec<u32>,
    ) -> Result<Vec<u32>> {
        let (len, boundary) = (self.len(id)?, self.side(id, side)?.boundary);
        let mut words = Vec::new();
        let mut add = |layout: &PageLayout, pool: &[u32], place: u32, page: u32, from: u32, to: u32| {
            let start = place * layout.tokens;
            let slot = |token: u32| token.saturating_sub(start).min(layout.tokens);
            words.extend(layout.live_words(&pool[layout.range(page)], slot(from), slot(to)));
        };
        let packed = pool(false);
        for (place, &page) in (0..).zip(self.packed_pages(id, side)?) {
            add(&self.geometry.packed[side], &packed, place, page, 0, boundary);
        }
        if let Some(layout) = &self.geometry.waiting[side] {
            let waiting = pool(true);
            for (&place, &page) in self.waiting_pages(id, side)? {
                add(layout, &waiting, place, page, boundary, len);
            }
        }
        Ok(words)
    }

    /// Whether a side's per-tensor scale changes with each step.
    fn scales_from_rows(&self) -> bool {
        let per_tensor = |side: Side| side.layout == ScaleLayout::PerTensor;
        self.spec.tensor_scales == TensorScales::FromRows
            && (per_tensor(self.spec.pair.k) || per_tensor(self.spec.pair.v))
    }

    fn side(&self, id: SequenceId, side: usize) -> Result<&SideState> {
        self.sequence(id)?.sides.get(side).ok_or_else(|| Error::Shape {
            what: "side",
            value: side as u64,
            limit: "K is 0 and V is 1".to_owned(),
            advice: "use the constants K and V".to_owned(),
        })
    }

    /// Refuses a layer that the cache lacks.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn check_layer(&self, layer: u32) -> Result<()> {
        if layer < self.spec.layers {
            return Ok(());
        }
        Err(Error::Shape {
            what: "layer",
            value: u64::from(layer),
            limit: format!("the cache has {} layers, counted from 0", self.spec.layers),
            advice: "check the model's configuration".to_owned(),
        })
    }

    fn sequence(&self, id: SequenceId) -> Result<&Sequence> {
        self.sequences.get(&id).ok_or(Error::UnknownSequence(id.0))
    }

    /// Plans a step: `new` tokens for each sequence, appended, then attended by themselves as queries. `token_tile` is
    /// the number of query tokens of one workgroup in prefill. All or nothing: on error nothing has changed. A step that
    /// was planned before and not committed is taken back.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::CacheFull`], [`Error::Limit`] for more partials than one step may have,
    /// [`Error::Usage`] for a sequence named twice or grown beyond 2^31 tokens.
    pub fn plan(&mut self, requests: &[(SequenceId, u32)], token_tile: u32) -> Result<StepPlan> {
        self.take_back();
        let mut plan = StepPlan {
            serial: serial(),
            token_tile: token_tile.max(1),
            q_heads: self.spec.q_heads,
            ..StepPlan::default()
        };
        let mut pending = Pending {
            serial: plan.serial,
            ..Pending::default()
        };
        let mut missing = [[0_u64; 2]; 2];
        let planned = self.plan_all(requests, &mut plan, &mut pending, &mut missing);
        self.pending = Some(pending);
        let full = (0..2)
            .flat_map(|s| [(s, Kind::Packed), (s, Kind::Waiting)])
            .map(|(s, kind)| (s, kind, missing[s][usize::from(kind == Kind::Waiting)]))
            .find(|&(_, _, missing)| missing > 0);
        if planned.is_ok() && full.is_none() {
            return Ok(plan);
        }
        self.take_back();
        planned?;
        match full {
            Some((s, kind, missing)) => {
                let what = match (s, kind) {
                    (K, Kind::Packed) => "packed K",
                    (_, Kind::Packed) => "packed V",
                    (K, Kind::Waiting) => "waiting K",
                    (_, Kind::Waiting) => "waiting V",
                };
                let free = self.pools.of(s, kind).len() as u64;
                Err(Error::CacheFull { what, missing, free })
            }
            None => Ok(StepPlan::default()),
        }
    }

    fn plan_all(
        &mut self,
        requests: &[(SequenceId, u32)],
        plan: &mut StepPlan,
        pending: &mut Pending,
        missing: &mut [[u64; 2]; 2],
    ) -> Result<()> {
        for (i, &(id, new)) in requests.iter().enumerate() {
            let refuse = |reason: &str, advice: &str| Error::Usage {
                asked: format!("a step of {new} tokens for sequence {}", id.0),
                reason: reason.to_owned(),
                advice: advice.to_owned(),
            };
            if requests[..i].iter().any(|r| r.0 == id) {
                return Err(refuse(
                    "the sequence is named twice in one step",
                    "name each sequence once",
                ));
            }
            let mut sequence = self.sequence(id)?.clone();
            if self.scales_from_rows() && self.sequences.values().any(|held| held.len > 0) {
                return Err(refuse(
                    "per-tensor scales come from the rows of one step, and the cache already holds tokens under others",
                    "free its sequences first, or give calibrated scales",
                ));
            }
            let first_row = plan.tokens;
            let len = u64::from(sequence.len) + u64::from(new);
            let tokens = u64::from(plan.tokens) + u64::from(new);
            if len > 1 << 31 || tokens > 1 << 31 {
                return Err(refuse(
                    "a sequence or step holds at most 2^31 tokens",
                    "split the work",
                ));
            }
            for s in [K, V] {
                self.plan_side(
                    s,
                    &mut sequence,
                    new,
                    (first_row, &mut plan.sides[s]),
                    pending,
                    &mut missing[s],
                );
            }
            sequence.len = len as u32;
            plan.tokens = tokens as u32;
            if missing.iter().flatten().all(|&m| m == 0) {
                self.plan_attention(&sequence, new, first_row, plan);
            }
            pending.after.push((id, sequence));
        }
        if missing.iter().flatten().all(|&m| m == 0) {
            plan.attention = plan.attention_within(Reach::default())?;
        }
        Ok(())
    }

    /// The writes of one side of one sequence.
    fn plan_side(
        &mut self,
        s: usize,
        sequence: &mut Sequence,
        new: u32,
        (first_row, writes): (u32, &mut SidePlan),
        pending: &mut Pending,
        missing: &mut [u64; 2],
    ) {
        let page_tokens = self.spec.page_tokens;
        let old = sequence.len;
        let len = old + new;
        let state = &mut sequence.sides[s];
        let waits = self.geometry.waiting[s].is_some();
        // The pages that the new tokens need, before any list grows: a step far beyond the cache is refused at once.
        let held = if waits {
            state
                .waiting
                .keys()
                .last()
                .map_or(old / page_tokens, |place| place + 1)
        } else {
            state.packed.len() as u32
        };
        let kind = if waits { Kind::Waiting } else { Kind::Packed };
        let needed = len.div_ceil(page_tokens).saturating_sub(held);
        let short = u64::from(needed).saturating_sub(self.pools.of(s, kind).len() as u64);
        if short > 0 {
            missing[usize::from(waits)] += short;
            return;
        }
        let Pending { taken, freed, .. } = pending;
        let mut take = |pools: &mut Pools, kind: Kind| match pools.of(s, kind).pop() {
            Some(page) => {
                taken.push((s, kind, page));
                page
            }
            None => {
                missing[usize::from(kind == Kind::Waiting)] += 1;
                u32::MAX
            }
        };
        let packed_to = |state: &mut SideState, end: u32, take: &mut dyn FnMut(Kind) -> u32| {
            while state.packed.len() < end.div_ceil(page_tokens) as usize {
                state.packed.push(take(Kind::Packed));
            }
        };
        if self.geometry.waiting[s].is_none() {
            packed_to(state, len, &mut |kind| take(&mut self.pools, kind));
            for (place, first, last) in page_ranges(old, len, page_tokens) {
                let start = place * page_tokens;
                let row = |slot| first_row + (start + slot - old);
                slot_runs(state.packed[place as usize], first, last, row, &mut writes.direct);
            }
            state.boundary = len;
            return;
        }
        for (place, first, last) in page_ranges(old, len, page_tokens) {
            let page = *state
                .waiting
                .entry(place)
                .or_insert_with(|| take(&mut self.pools, Kind::Waiting));
            let start = place * page_tokens;
            slot_runs(
                page,
                first,
                last,
                |slot| first_row + (start + slot - old),
                &mut writes.wait,
            );
        }
        let side = [self.spec.pair.k, self.spec.pair.v][s];
        let group = side.layout.token_group();
        let boundary = (len.saturating_sub(self.spec.window[s]) / group * group).max(state.boundary);
        packed_to(state, boundary, &mut |kind| take(&mut self.pools, kind));
        for (place, first, last) in page_ranges(state.boundary, boundary, page_tokens) {
            let (page, from) = (state.packed[place as usize], state.waiting[&place]);
            if group == 1 {
                slot_runs(page, first, last, |_| from, &mut writes.pack);
            } else {
                let groups = (first..last).step_by(group as usize);
                writes.pack.extend(groups.map(|slot| SlotRun {
                    page,
                    slot,
                    count: group,
                    source: from,
                }));
            }
        }
        state.boundary = boundary;
        // A page whose tokens are all packed holds nothing that is still read.
        let emptied: Vec<u32> = state
            .waiting
            .keys()
            .copied()
            .filter(|place| ((place + 1) * page_tokens).min(len) <= boundary)
            .collect();
        freed.extend(
            emptied
                .iter()
                .filter_map(|place| Some((s, Kind::Waiting, state.waiting.remove(place)?))),
        );
    }

    /// The splits of one sequence, which its new tokens attend to: ranges by format, cut at fixed positions.
    fn plan_attention(&self, sequence: &Sequence, new: u32, first_row: u32, plan: &mut StepPlan) {
        let (page_tokens, split) = (self.spec.page_tokens, self.spec.split_tokens());
        let [k, v] = &sequence.sides;
        let mut pieces = Vec::new();
        let cuts = [
            0,
            k.boundary.min(v.boundary),
            k.boundary.max(v.boundary),
            sequence.len,
        ];
        for range in cuts.windows(2) {
            let mut start = range[0];
            while start < range[1] {
                let end = ((start / split + 1) * split).min(range[1]);
                let kind = SegmentKind {
                    k_waits: start >= k.boundary,
                    v_waits: start >= v.boundary,
                    prefill: new > 1,
                };
                let table = plan.table.len() as u32;
                for (place, first, last) in page_ranges(start, end, page_tokens) {
                    let page = |side: &SideState, waits: bool| {
                        if waits {
                            side.waiting[&place]
                        } else {
                            side.packed[place as usize]
                        }
                    };
                    let (k_page, v_page) = (page(k, kind.k_waits), page(v, kind.v_waits));
                    plan.table.push(TableEntry {
                        k_page,
                        v_page,
                        first,
                        last,
                    });
                }
                let pages = plan.table.len() as u32 - table;
                pieces.push(Piece {
                    kind,
                    tokens: [start, end],
                    table,
                    pages,
                    position: start / page_tokens * page_tokens,
                });
                start = end;
            }
        }
        plan.attended.push(Attended {
            pieces,
            new,
            first_row,
            first_position: sequence.len - new,
        });
    }

    /// Makes a planned step part of the cache. Pages that it frees serve later steps.
    ///
    /// # Errors
    /// [`Error::Usage`] for a plan that is not this cache's last one, or was taken back; then nothing changes.
    pub fn commit(&mut self, plan: StepPlan) -> Result<()> {
        match self.pending.take() {
            Some(pending) if pending.serial == plan.serial => {
                self.sequences.extend(pending.after);
                for (s, kind, page) in pending.freed {
                    self.pools.of(s, kind).push(page);
                }
                Ok(())
            }
            other => {
                self.pending = other;
                Err(Error::Usage {
                    asked: "the commit of a step".to_owned(),
                    reason: "it was planned by another cache, or was taken back by a later plan or a freed sequence"
                        .to_owned(),
                    advice: "plan the step again".to_owned(),
                })
            }
        }
    }

    /// Takes a planned step back, if it still waits for its commit.
    pub fn abandon(&mut self, plan: StepPlan) {
        if self
            .pending
            .as_ref()
            .is_some_and(|pending| pending.serial == plan.serial)
        {
            self.take_back();
        }
    }

    fn take_back(&mut self) {
        if let Some(pending) = self.pending.take() {
            for (s, kind, page) in pending.taken.into_iter().rev() {
                self.pools.of(s, kind).push(page);
            }
        }
    }
}

/// The pages that hold tokens [start, end): (place in the sequence, first slot, end of slots).
fn page_ranges(start: u32, end: u32, page_tokens: u32) -> impl Iterator<Item = (u32, u32, u32)> {
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
