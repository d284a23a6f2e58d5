//! The cache on the CPU: the same plans, carried out by the reference functions.

use super::{
    AttentionShape, Partials, amax, attention_merge, attention_split, quantize, quantize_group, tensor_scale,
};
use crate::cache::{Book, CacheSpec, K, SequenceId, StepPlan, TensorScales, V};
use crate::error::{Error, Result};
use crate::formats::Element;
use crate::options::{AttentionOptions, Reach};
use crate::pages::PageLayout;
use crate::scales::ScaleLayout;
use crate::work::{SlotRun, Status};

/// Words of one layer's pools.
#[derive(Debug)]
struct Pools {
    packed: [Vec<u32>; 2],
    waiting: [Vec<u32>; 2],
}

/// A cache in CPU memory that defines every bit of the GPU's.
#[derive(Debug)]
pub struct ReferenceCache {
    book: Book,
    layers: Vec<Pools>,
    tensor_scales: Vec<[f32; 2]>,
    largest: Vec<[f32; 2]>,
    status: Status,
}

impl ReferenceCache {
    /// An empty cache.
    ///
    /// # Errors
    /// As [`CacheSpec::geometry`].
    pub fn new(spec: CacheSpec) -> Result<ReferenceCache> {
        let book = Book::new(spec)?;
        let (spec, geometry) = (book.spec(), book.geometry());
        let pool = |page: &PageLayout| vec![0; page.words as usize * spec.pages as usize];
        let layers = (0..spec.layers)
            .map(|_| Pools {
                packed: [pool(&geometry.packed[K]), pool(&geometry.packed[V])],
                waiting: geometry
                    .waiting
                    .map(|page| page.as_ref().map_or_else(Vec::new, pool)),
            })
            .collect();
        let tensor_scales = match &spec.tensor_scales {
            TensorScales::Given(scales) if !scales.is_empty() => scales.clone(),
            _ => vec![[0.0; 2]; spec.layers as usize],
        };
        let largest = vec![[0.0; 2]; spec.layers as usize];
        Ok(ReferenceCache {
            book,
            layers,
            tensor_scales,
            largest,
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

    /// Words of a layer's pool.
    pub fn pool(&self, layer: u32, side: usize, waiting: bool) -> &[u32] {
        let pools = &self.layers[layer as usize];
        if waiting {
            &pools.waiting[side]
        } else {
            &pools.packed[side]
        }
    }

    /// The same words, to poison what attention must not read.
    pub fn pool_mut(&mut self, layer: u32, side: usize, waiting: bool) -> &mut Vec<u32> {
        let pools = &mut self.layers[layer as usize];
        if waiting {
            &mut pools.waiting[side]
        } else {
            &mut pools.packed[side]
        }
    }

    /// Appends the step's rows, `[token][head][channel]`, to a layer.
    ///
    /// # Errors
    /// [`Error::Shape`] for a layer that does not exist or rows that are too few.
    pub fn append(&mut self, plan: &StepPlan, layer: u32, k: &[f32], v: &[f32]) -> Result<()> {
        self.book.check_layer(layer)?;
        for (s, rows) in [k, v].into_iter().enumerate() {
            let page = self.book.geometry().packed[s];
            check_len(
                ["k numbers", "v numbers"][s],
                rows.len(),
                plan.tokens,
                page.heads * page.head_dim,
            )?;
        }
        for (s, rows) in [k, v].into_iter().enumerate() {
            self.append_side(plan, layer as usize, s, rows);
        }
        Ok(())
    }

    fn append_side(&mut self, plan: &StepPlan, layer: usize, s: usize, rows: &[f32]) {
        let page = self.book.geometry().packed[s];
        let status = &mut self.status;
        let Pools { packed, waiting } = &mut self.layers[layer];
        let largest = amax(rows.iter().copied(), self.largest[layer][s]);
        self.largest[layer][s] = largest;
        if page.side.layout == ScaleLayout::PerTensor
            && self.book.spec().tensor_scales == TensorScales::FromRows
        {
            self.tensor_scales[layer][s] = tensor_scale(page.side.element, largest);
            self.largest[layer][s] = 0.0;
        }
        let scale = self.tensor_scales[layer][s];
        let row = |run: &SlotRun, i: u32, head: u32, channel: u32| {
            rows[(((run.source + i) * page.heads + head) * page.head_dim + channel) as usize]
        };
        quantize(&page, &plan.sides[s].direct, row, scale, &mut packed[s], status);
        let Some(from) = self.book.geometry().waiting[s] else {
            return;
        };
        quantize(&from, &plan.sides[s].wait, row, 1.0, &mut waiting[s], status);
        let waited = |run: &SlotRun, i: u32, head: u32, channel: u32| {
            let words = &waiting[s][run.source as usize * from.words as usize..][..from.words as usize];
            from.number(words, run.slot + i, head, channel, 1.0)
        };
        if page.side.layout.token_group() > 1 {
            quantize_group(&page, &plan.sides[s].pack, waited, &mut packed[s], status);
        } else {
            quantize(&page, &plan.sides[s].pack, waited, scale, &mut packed[s], status);
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
        self.book.check_layer(layer)?;
        let (spec, geometry) = (self.book.spec(), self.book.geometry());
        check_len("q numbers", q.len(), plan.tokens, spec.q_heads * spec.k_head_dim)?;
        if let Some(few) = options.sinks.filter(|sinks| sinks.len() < spec.q_heads as usize) {
            return Err(Error::Shape {
                what: "sinks",
                value: few.len() as u64,
                limit: format!("there are {} query heads", spec.q_heads),
                advice: "give one for each query head".to_owned(),
            });
        }
        let made;
        let work = if options.reach() == Reach::default() {
            &plan.attention
        } else {
            made = plan.attention_within(options.reach())?;
            &made
        };
        let mut partials = Partials::new(work.partials as usize, spec.v_head_dim);
        for (kind, items) in &work.segments {
            let (k, v) = (geometry.page(K, kind.k_waits), geometry.page(V, kind.v_waits));
            let [k_pages, v_pages] =
                [(K, kind.k_waits), (V, kind.v_waits)].map(|(s, waits)| self.pool(layer, s, waits));
            let [k_tensor_scale, v_tensor_scale] = self.tensor_scales[layer as usize];
            let shape = AttentionShape {
                k,
                v,
                q_heads: spec.q_heads,
                options: *options,
                k_tensor_scale,
                v_tensor_scale,
            };
            attention_split(&shape, items, &plan.table, q, k_pages, v_pages, &mut partials);
        }
        let rows = plan.tokens as usize * spec.q_heads as usize;
        let (mut output, mut lse) = (vec![0.0; rows * spec.v_head_dim as usize], vec![0.0; rows]);
        attention_merge(
            &work.merges,
            spec.q_heads,
            spec.v_head_dim,
            options.sinks,
            &partials,
            &mut output,
            &mut lse,
        );
        Ok((output, lse))
    }

    /// The live words of a sequence's packed and waiting pages, in order, for comparison: dead slots read as zero.
    ///
    /// # Errors
    /// [`crate::Error::UnknownSequence`], [`Error::Shape`] for a layer or side that does not exist.
    pub fn live_words(&self, id: SequenceId, layer: u32, side: usize) -> Result<Vec<u32>> {
        self.book.check_layer(layer)?;
        self.book
            .live_words(id, side, |waiting| self.pool(layer, side, waiting).to_vec())
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
