//! The cache on the CPU: the same plans, carried out by the reference functions.

use std::collections::BTreeMap;

use super::{
    AttentionShape, Partials, amax, attention_merge, attention_split, quantize, quantize_group, tensor_scale,
};
use crate::cache::plan::{Runs, StepPlan};
use crate::cache::{Book, CacheSpec, HeldPage, K, PoolId, SequenceId, TensorScales, V};
use crate::error::{Error, Result};
use crate::formats::Element;
use crate::options::AttentionOptions;
use crate::scales::ScaleLayout;
use crate::work::{SlotRun, Status};

/// A cache in CPU memory that defines every bit of the GPU's.
#[derive(Debug)]
pub struct ReferenceCache {
    book: Book,
    /// Words of each layer's pools: one buffer each, as long as the pages used so far.
    pools: BTreeMap<(u32, PoolId), Vec<u32>>,
    tensor_scales: Vec<[f32; 2]>,
    largest: Vec<[f32; 2]>,
    status: Status,
}

/// The runs of a plan whose pools are one buffer each.
fn all(runs: &Runs) -> &[SlotRun] {
    runs.get(&[0, 0]).map_or(&[], Vec::as_slice)
}

impl ReferenceCache {
    /// An empty cache.
    ///
    /// # Errors
    /// As [`Book::new`].
    pub fn new(spec: CacheSpec) -> Result<ReferenceCache> {
        let book = Book::new(spec, None)?;
        let layers = book.spec().layers.len();
        let tensor_scales = match &book.spec().tensor_scales {
            TensorScales::Given(scales) if !scales.is_empty() => scales.clone(),
            _ => vec![[0.0; 2]; layers],
        };
        Ok(ReferenceCache {
            book,
            pools: BTreeMap::new(),
            tensor_scales,
            largest: vec![[0.0; 2]; layers],
            status: Status::default(),
        })
    }

    /// The books.
    pub fn book(&self) -> &Book {
        &self.book
    }

    /// The books, to open and free sequences and plan steps.
    pub fn book_mut(&mut self) -> &mut Book {
        &mut self.book
    }

    /// What packing met so far.
    pub fn status(&self) -> Status {
        self.status
    }

    /// Per-tensor scales of FP8 by the largest magnitudes appended so far, `[layer][K, V]`; the magnitudes start again from 0.
    pub fn calibrated(&mut self) -> Vec<[f32; 2]> {
        let largest = self.largest.iter_mut().map(std::mem::take);
        largest
            .map(|pair| pair.map(|amax| tensor_scale(Element::E4m3, amax)))
            .collect()
    }

    /// Words of a layer's pool, packed or in full precision, to look at or to poison what attention must not read: as many
    /// pages as have been used so far.
    ///
    /// # Errors
    /// [`Error::Shape`] for a layer that does not exist.
    pub fn pool_mut(&mut self, layer: u32, side: usize, waiting: bool) -> Result<&mut Vec<u32>> {
        let class = self.book.geometry().class_index(layer)?;
        let id = PoolId { class, side, waiting };
        let made = self.book.pools().find(|pool| pool.id == id);
        let words = made.map_or(0, |pool| pool.made as usize * pool.layout.words as usize);
        let pool = self.pools.entry((layer, id)).or_default();
        if pool.len() < words {
            pool.resize(words, 0);
        }
        Ok(pool)
    }

    fn pool(&self, layer: u32, class: usize, side: usize, waiting: bool) -> &[u32] {
        let id = PoolId { class, side, waiting };
        self.pools.get(&(layer, id)).map_or(&[], Vec::as_slice)
    }

    /// Appends the step's rows, `[token][head][channel]`, to a layer.
    ///
    /// # Errors
    /// [`Error::Shape`] for a layer that does not exist or rows that are too few.
    pub fn append(&mut self, plan: &StepPlan, layer: u32, k: &[f32], v: &[f32]) -> Result<()> {
        let class = self.book.geometry().class_index(layer)?;
        for (s, rows) in [k, v].into_iter().enumerate() {
            let page = self.book.geometry().classes[class].packed[s];
            check_len(
                ["k numbers", "v numbers"][s],
                rows.len(),
                plan.tokens,
                page.heads * page.head_dim,
            )?;
        }
        for (s, rows) in [k, v].into_iter().enumerate() {
            self.pool_mut(layer, s, false)?;
            self.pool_mut(layer, s, true)?;
            self.append_side(plan, layer, class, s, rows);
        }
        Ok(())
    }

    fn append_side(&mut self, plan: &StepPlan, layer: u32, class: usize, s: usize, rows: &[f32]) {
        let geometry = &self.book.geometry().classes[class];
        let page = geometry.packed[s];
        let status = &mut self.status;
        let [mut packed, mut waiting] = [false, true].map(|waiting| {
            let id = PoolId {
                class,
                side: s,
                waiting,
            };
            self.pools.remove(&(layer, id)).unwrap_or_default()
        });
        for copy in plan.classes[class].copies.iter().filter(|copy| copy.side == s) {
            let (pool, page) = match copy.waiting {
                true => (&mut waiting, geometry.page(s, true)),
                false => (&mut packed, page),
            };
            pool.copy_within(page.range(copy.from.1), page.range(copy.to.1).start);
        }
        let number = layer as usize;
        let largest = amax(rows.iter().copied(), self.largest[number][s]);
        self.largest[number][s] = largest;
        if page.side.layout == ScaleLayout::PerTensor
            && self.book.spec().tensor_scales == TensorScales::FromRows
        {
            self.tensor_scales[number][s] = tensor_scale(page.side.element, largest);
            self.largest[number][s] = 0.0;
        }
        let scale = self.tensor_scales[number][s];
        let row = |run: &SlotRun, i: u32, head: u32, channel: u32| {
            rows[(((run.source + i) * page.heads + head) * page.head_dim + channel) as usize]
        };
        for round in &plan.classes[class].rounds[s] {
            quantize(&page, all(&round.direct), row, scale, &mut packed, status);
            let Some(from) = geometry.waiting[s] else { continue };
            quantize(&from, all(&round.wait), row, 1.0, &mut waiting, status);
            let waited = |run: &SlotRun, i: u32, head: u32, channel: u32| {
                from.number(&waiting[from.range(run.source)], run.slot + i, head, channel, 1.0)
            };
            if page.side.layout.token_group() > 1 {
                quantize_group(&page, all(&round.pack), waited, &mut packed, status);
            } else {
                quantize(&page, all(&round.pack), waited, scale, &mut packed, status);
            }
        }
        for (words, waiting) in [(packed, false), (waiting, true)] {
            let id = PoolId {
                class,
                side: s,
                waiting,
            };
            self.pools.insert((layer, id), words);
        }
    }

    /// Attends with the step's queries, `[token][query head][channel]`: outputs of the same shape, and the LSE.
    ///
    /// # Errors
    /// Those of [`AttentionOptions::check`]; [`Error::Shape`] for a layer that does not exist, and for queries or
    /// sinks that are too few; [`Error::Limit`].
    pub fn attend(
        &self,
        plan: &StepPlan,
        layer: u32,
        q: &[f64],
        options: &AttentionOptions<&[f32]>,
    ) -> Result<(Vec<f64>, Vec<f64>)> {
        options.check()?;
        let class = self.book.geometry().class_index(layer)?;
        let (spec, geometry) = (self.book.spec(), &self.book.geometry().classes[class]);
        check_len("q numbers", q.len(), plan.tokens, spec.q_heads * spec.k_head_dim)?;
        if let Some(few) = options.sinks.filter(|sinks| sinks.len() < spec.q_heads as usize) {
            return Err(Error::Shape {
                what: "sinks",
                value: few.len() as u64,
                limit: format!("there are {} query heads", spec.q_heads),
                advice: "give one for each query head".to_owned(),
            });
        }
        let rows = plan.tokens as usize * spec.q_heads as usize;
        let (mut output, mut lse) = (vec![0.0; rows * spec.v_head_dim as usize], vec![0.0; rows]);
        for wave in plan.attention(class, options.reach())?.waves {
            let mut partials = Partials::new(wave.partials as usize, spec.v_head_dim);
            for (segment, items) in &wave.segments {
                let waits = [segment.kind.k_waits, segment.kind.v_waits];
                let [k_tensor_scale, v_tensor_scale] = self.tensor_scales[layer as usize];
                let shape = AttentionShape {
                    k: geometry.page(K, waits[K]),
                    v: geometry.page(V, waits[V]),
                    q_heads: spec.q_heads,
                    options: *options,
                    k_tensor_scale,
                    v_tensor_scale,
                    key_rotation: spec.key_rotation.as_ref(),
                };
                let [k_pages, v_pages] = [K, V].map(|s| self.pool(layer, class, s, waits[s]));
                let table = &plan.classes[class].table;
                attention_split(&shape, items, table, q, k_pages, v_pages, &mut partials);
            }
            attention_merge(
                &wave.merges,
                spec.q_heads,
                spec.v_head_dim,
                options.sinks,
                &partials,
                &mut output,
                &mut lse,
            );
        }
        Ok((output, lse))
    }

    /// The live words of a sequence's pages on one side of a layer, in the order of [`Book::held_pages`], for comparison:
    /// dead slots read as zero.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::Shape`] for a layer or side that does not exist.
    pub fn live_words(&self, id: SequenceId, layer: u32, side: usize) -> Result<Vec<u32>> {
        Ok(self.words_of(&self.book.held_pages_of(id, layer, side)?))
    }

    fn words_of(&self, held: &[HeldPage]) -> Vec<u32> {
        let words = held.iter().flat_map(|page| {
            let pool = self.pool(page.layer, page.pool.class, page.pool.side, page.pool.waiting);
            // Pages of a plan that was committed without its append were never made: they hold nothing.
            let words = pool.get(page.layout.range(page.page));
            words.map_or_else(
                || vec![0; page.layout.words as usize],
                |words| page.live_words(words),
            )
        });
        words.collect()
    }

    /// A sequence as bytes: those of [`crate::cache::KvCache::save`].
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Usage`] where per-tensor scales come from rows.
    pub fn save(&self, id: SequenceId) -> Result<Vec<u8>> {
        self.book.save(id, &self.words_of(&self.book.held_pages(id)?))
    }

    /// A new sequence from saved bytes. All or nothing.
    ///
    /// # Errors
    /// As [`crate::cache::KvCache::restore`].
    pub fn restore(&mut self, bytes: &[u8]) -> Result<SequenceId> {
        let (id, words) = self.book.restore(bytes)?;
        let mut rest = &words[..];
        for page in self.book.held_pages(id)? {
            let (words, after) = rest.split_at(page.layout.words as usize);
            let pool = self.pool_mut(page.layer, page.pool.side, page.pool.waiting)?;
            pool[page.layout.range(page.page)].copy_from_slice(words);
            rest = after;
        }
        Ok(id)
    }
}

/// Refuses fewer numbers than a step has.
fn check_len(what: &'static str, len: usize, tokens: u32, row: u32) -> Result<()> {
    let needed = u64::from(tokens) * u64::from(row);
    if len as u64 >= needed {
        return Ok(());
    }
    Err(Error::Shape {
        what,
        value: len as u64,
        limit: format!("{tokens} new tokens have {needed}"),
        advice: "pass a row for each new token".to_owned(),
    })
}
