//! The paged KV cache on the GPU: sequences grow by steps; a step appends rows of K and V and attends with q.
//!
//! ```text
//! let step = cache.step(&[(sequence, new_tokens), ...])?;   // planned once for all layers
//! for layer in 0..layers {
//!     step.append(&mut pass, layer, &k, &v)?;               // records; rows are `[token][head][channel]`
//!     step.attend(&mut pass, layer, &q, &output, &options)?; // sees the tokens just appended
//! }
//! step.commit()?;                                           // dropping the step instead takes it back
//! ```
//!
//! Tokens of per-channel sides wait in f16 pages until their group is full, tokens of a recent window until they leave
//! it; attention reads them there, at the slots they will have when packed.

mod plan;

pub use plan::{
    AttentionPlan, Book, BytesInUse, CacheSpec, Geometry, K, PagesInUse, SegmentKind, SequenceId, SidePlan,
    StepPlan, TensorScales, V,
};

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::error::Result;
use crate::formats::Element;
use crate::gpu::Gpu;
use crate::kernels::amax::{self, Amax};
use crate::kernels::attention_merge::{AttentionMerge, check_sinks};
use crate::kernels::attention_split::{self, AttentionSplit, Tiling};
use crate::kernels::quantize::{self, Quantize, Source};
use crate::kernels::quantize_group::QuantizeGroup;
use crate::kernels::tensor_scale::{self, TensorScale};
use crate::kernels::{FloatType, Outputs, RowStrides, Rows};
use crate::options::{AttentionOptions, Reach};
use crate::pages::{PageLayout, heads_ratio};
use crate::scales::ScaleLayout;
use crate::work::{SlotRun, Status};

/// How waiting tokens of a side become packed.
#[derive(Debug)]
enum Pack {
    Rows(Quantize),
    Groups(QuantizeGroup),
}

/// What packs new rows into one kind of pages, by the type of the rows; each is built when it is first needed.
#[derive(Debug)]
struct PackRows {
    page: PageLayout,
    kernels: [OnceLock<Quantize>; 2],
}

impl PackRows {
    fn new(page: PageLayout) -> PackRows {
        let kernels = Default::default();
        PackRows { page, kernels }
    }

    fn kernel(&self, gpu: &Gpu, float: FloatType) -> Result<&Quantize> {
        built(&self.kernels[float as usize], || {
            Quantize::plan(gpu, &self.page, &float.into())
        })
    }
}

/// What a place holds, built where it holds nothing yet.
fn built<T>(place: &OnceLock<T>, build: impl FnOnce() -> Result<T>) -> Result<&T> {
    if let Some(there) = place.get() {
        return Ok(there);
    }
    let new = build()?;
    Ok(place.get_or_init(|| new))
}

/// The kernels of one side.
#[derive(Debug)]
struct SideKernels {
    direct: Option<PackRows>,
    wait: Option<PackRows>,
    pack: Option<Pack>,
    /// Makes the per-tensor scale from a step's rows, where it comes from there.
    scale_from_rows: Option<TensorScale>,
}

/// The pools of one layer.
#[derive(Debug)]
struct Pools {
    packed: [wgpu::Buffer; 2],
    waiting: [Option<wgpu::Buffer>; 2],
}

/// A paged KV cache on a GPU.
#[derive(Debug)]
pub struct KvCache {
    gpu: Gpu,
    book: Book,
    layers: Vec<Pools>,
    sides: [SideKernels; 2],
    tilings: [Tiling; 2],
    /// By the type of the queries and [`SegmentKind::index`], each built when it is first needed: a step that only
    /// appends compiles none.
    attention: [[OnceLock<AttentionSplit>; 8]; 2],
    /// By the type of the outputs.
    merge: [OnceLock<AttentionMerge>; 2],
    /// By the type of the rows.
    amax: [OnceLock<Amax>; 2],
    tensor_scale: TensorScale,
    /// Largest magnitudes of the step at hand, where scales come from its rows.
    largest: wgpu::Buffer,
    /// Largest magnitudes seen by [`Step::calibrate`].
    observed: wgpu::Buffer,
    tensor_scales: wgpu::Buffer,
    status: wgpu::Buffer,
    partials: Option<Partials>,
}

/// Partial buffers, kept from step to step and grown when a step needs more.
#[derive(Debug, Clone)]
struct Partials {
    capacity: u32,
    o: wgpu::Buffer,
    ml: wgpu::Buffer,
}

impl KvCache {
    /// An empty cache.
    ///
    /// # Errors
    /// As [`CacheSpec::geometry`]; [`crate::Error::Limit`] where a pool is larger than the adapter can bind,
    /// [`crate::Error::Shader`] and [`crate::Error::Device`] where the driver refuses.
    pub fn new(gpu: &Gpu, spec: CacheSpec) -> Result<KvCache> {
        let book = Book::new(spec)?;
        let (spec, geometry) = (book.spec(), book.geometry());
        let pool = |what: &str, page: &PageLayout| gpu.zeros(what, page.bytes() * u64::from(spec.pages));
        let mut layers = Vec::new();
        for _ in 0..spec.layers {
            let waiting = |s: usize| {
                geometry.waiting[s]
                    .map(|page| pool("pages of waiting tokens", &page))
                    .transpose()
            };
            layers.push(Pools {
                packed: [
                    pool("K pages", &geometry.packed[K])?,
                    pool("V pages", &geometry.packed[V])?,
                ],
                waiting: [waiting(K)?, waiting(V)?],
            });
        }
        let side = |s: usize| -> Result<SideKernels> {
            let page = &geometry.packed[s];
            let from_rows =
                page.side.layout == ScaleLayout::PerTensor && spec.tensor_scales == TensorScales::FromRows;
            let scale_from_rows = match from_rows {
                true => Some(TensorScale::plan(gpu, page.side.element)?),
                false => None,
            };
            Ok(match &geometry.waiting[s] {
                None => SideKernels {
                    direct: Some(PackRows::new(*page)),
                    wait: None,
                    pack: None,
                    scale_from_rows,
                },
                Some(waiting) => SideKernels {
                    direct: None,
                    wait: Some(PackRows::new(*waiting)),
                    pack: Some(if page.side.layout.token_group() > 1 {
                        Pack::Groups(QuantizeGroup::plan(gpu, page, waiting)?)
                    } else {
                        Pack::Rows(Quantize::plan(gpu, page, &Source::Pages(*waiting))?)
                    }),
                    scale_from_rows,
                },
            })
        };
        let sides = [side(K)?, side(V)?];
        let ratio = heads_ratio(spec.q_heads, spec.kv_heads)?;
        let tilings = [false, true].map(|prefill| Tiling::new(&geometry.packed[K], ratio, prefill));
        let mut scales = vec![[0.0_f32; 2]; spec.layers as usize];
        if let TensorScales::Given(given) = &spec.tensor_scales {
            scales[..given.len()].copy_from_slice(given);
        }
        let numbers = u64::from(spec.layers) * 2 * 4;
        Ok(KvCache {
            amax: Default::default(),
            tensor_scale: TensorScale::plan(gpu, Element::E4m3)?,
            largest: gpu.zeros("largest magnitudes", numbers)?,
            observed: gpu.zeros("observed magnitudes", numbers)?,
            tensor_scales: gpu.upload("per-tensor scales", &scales)?,
            status: gpu.zeros("append status", 8)?,
            gpu: gpu.clone(),
            layers,
            sides,
            tilings,
            attention: Default::default(),
            merge: Default::default(),
            partials: None,
            book,
        })
    }

    /// The books: spec, geometry, lengths, pages and bytes in use.
    pub fn book(&self) -> &Book {
        &self.book
    }

    /// Opens an empty sequence.
    pub fn open(&mut self) -> SequenceId {
        self.book.open()
    }

    /// Frees a sequence and its pages.
    ///
    /// # Errors
    /// [`crate::Error::UnknownSequence`].
    pub fn free(&mut self, id: SequenceId) -> Result<()> {
        self.book.free(id)
    }

    /// Bytes of all pool buffers, whether their pages are in use or not.
    pub fn allocated_bytes(&self) -> u64 {
        let pools = self
            .layers
            .iter()
            .flat_map(|l| l.packed.iter().chain(l.waiting.iter().flatten()));
        pools.map(wgpu::Buffer::size).sum()
    }

    /// Plans a step of new tokens for some sequences, for all layers alike. All or nothing.
    ///
    /// # Errors
    /// As [`Book::plan`]; [`crate::Error::Limit`] and [`crate::Error::Device`] where buffers cannot be made.
    pub fn step(&mut self, requests: &[(SequenceId, u32)]) -> Result<Step<'_>> {
        let plan = self.book.plan(requests, self.tilings[1].token_tile)?;
        match self.prepare(&plan) {
            Ok(lists) => Ok(Step {
                cache: self,
                plan: Some(plan),
                lists,
            }),
            Err(e) => {
                self.book.abandon(plan);
                Err(e)
            }
        }
    }

    fn prepare(&mut self, plan: &StepPlan) -> Result<Lists> {
        if self
            .partials
            .as_ref()
            .is_none_or(|p| p.capacity < plan.attention.partials)
        {
            self.partials = Some(self.new_partials(plan.attention.partials)?);
        }
        let attention = Arc::new(self.attention_lists(&plan.attention)?);
        let runs = |what: &str, runs: &[SlotRun]| self.gpu.upload(what, runs);
        let writes = |s: usize| -> Result<[wgpu::Buffer; 3]> {
            let side = &plan.sides[s];
            Ok([
                runs("direct runs", &side.direct)?,
                runs("waiting runs", &side.wait)?,
                runs("pack runs", &side.pack)?,
            ])
        };
        Ok(Lists {
            writes: [writes(K)?, writes(V)?],
            table: self.gpu.upload("page table", &plan.table)?,
            attention: Mutex::new(BTreeMap::from([(Reach::default(), attention)])),
        })
    }

    fn new_partials(&self, needed: u32) -> Result<Partials> {
        // With room to spare, so that decoding does not allocate at every step; at most 2^31.
        let capacity = needed.next_power_of_two().max(64);
        let o_bytes = u64::from(capacity) * u64::from(self.book.spec().v_head_dim) * 4;
        Ok(Partials {
            capacity,
            o: self.gpu.zeros("attention partials", o_bytes)?,
            ml: self
                .gpu
                .zeros("attention partial sums", u64::from(capacity) * 8)?,
        })
    }

    fn attention_lists(&self, work: &AttentionPlan) -> Result<AttentionLists> {
        let mut items = BTreeMap::new();
        for (kind, list) in &work.segments {
            let buffer = self.gpu.upload("work items", list)?;
            items.insert(*kind, (buffer, list.len() as u32));
        }
        let partials = match &self.partials {
            Some(kept) if kept.capacity >= work.partials => kept.clone(),
            _ => self.new_partials(work.partials)?,
        };
        Ok(AttentionLists {
            items,
            merges: self.gpu.upload("merges", &work.merges)?,
            partials,
        })
    }

    fn merge(&self, output: FloatType) -> Result<&AttentionMerge> {
        let spec = self.book.spec();
        built(&self.merge[output as usize], || {
            AttentionMerge::plan(&self.gpu, spec.q_heads, spec.v_head_dim, output)
        })
    }

    fn attention(&self, kind: SegmentKind, q: FloatType) -> Result<&AttentionSplit> {
        let geometry = self.book.geometry();
        let (k, v) = (geometry.page(K, kind.k_waits), geometry.page(V, kind.v_waits));
        let tiling = self.tilings[usize::from(kind.prefill)];
        built(&self.attention[q as usize][kind.index()], || {
            AttentionSplit::plan(&self.gpu, &k, &v, self.book.spec().q_heads, tiling, q)
        })
    }

    /// What packing met so far. Waits for the queue.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    pub fn status(&self) -> Result<Status> {
        Ok(self.gpu.read("append status", &self.status, 1)?[0])
    }

    /// Per-tensor scales of FP8 by the largest magnitudes of [`Step::calibrate`] so far, `[layer][K, V]`; the magnitudes
    /// start again from 0. Waits for the queue.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    pub fn calibrated(&self) -> Result<Vec<[f32; 2]>> {
        let slots = self.book.spec().layers * 2;
        let scales = self.gpu.zeros("calibrated scales", u64::from(slots) * 4)?;
        self.gpu.submit("calibration", |encoder| {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            let params = tensor_scale::Params { first: 0, slots };
            self.tensor_scale
                .encode(&self.gpu, &mut pass, [&self.observed, &scales], params)
        })?;
        self.gpu.read("calibrated scales", &scales, slots as usize / 2)
    }

    /// The live words of a sequence's pages on one side, in order: dead slots read as zero. Waits for the queue.
    ///
    /// # Errors
    /// [`crate::Error::UnknownSequence`], [`crate::Error::Shape`] for a layer or side that does not exist,
    /// [`crate::Error::Device`].
    pub fn live_words(&self, id: SequenceId, layer: u32, side: usize) -> Result<Vec<u32>> {
        self.book.check_layer(layer)?;
        let read = |waiting: bool| -> Result<Vec<u32>> {
            match self.pool(layer, side, waiting) {
                Some(buffer) => self.gpu.read("pages", buffer, buffer.size() as usize / 4),
                None => Ok(Vec::new()),
            }
        };
        let pools = [read(false)?, read(true)?];
        self.book
            .live_words(id, side, |waiting| pools[usize::from(waiting)].clone())
    }

    /// A layer's pool of packed pages, or of pages in which tokens wait (where there is one).
    pub fn pool(&self, layer: u32, side: usize, waiting: bool) -> Option<&wgpu::Buffer> {
        let pools = self.layers.get(layer as usize)?;
        if waiting {
            pools.waiting.get(side)?.as_ref()
        } else {
            pools.packed.get(side)
        }
    }
}

/// The buffers of one step.
#[derive(Debug)]
struct Lists {
    /// Per side: direct, wait, pack.
    writes: [[wgpu::Buffer; 3]; 2],
    table: wgpu::Buffer,
    /// By how far queries see: layers may differ. Each is made when it is first needed, the causal one with the step.
    attention: Mutex<BTreeMap<Reach, Arc<AttentionLists>>>,
}

/// The buffers of attention with one reach.
#[derive(Debug)]
struct AttentionLists {
    /// Work items and their number, by kernel.
    items: BTreeMap<SegmentKind, (wgpu::Buffer, u32)>,
    merges: wgpu::Buffer,
    /// The cache's own, where they are enough.
    partials: Partials,
}

/// A planned step. Commands are recorded layer by layer, then the step is committed; dropped, it is taken back.
#[derive(Debug)]
pub struct Step<'a> {
    cache: &'a mut KvCache,
    plan: Option<StepPlan>,
    lists: Lists,
}

impl Step<'_> {
    /// Rows of k, v and q: new tokens of all sequences, in the order of the requests.
    pub fn tokens(&self) -> u32 {
        self.plan.as_ref().map_or(0, |plan| plan.tokens)
    }

    /// Records the append of rows to a layer: each side a buffer of f32, or [`Rows`] of either type with an offset and
    /// strides. f16 rows give the bits that the same numbers give as f32.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] for a layer that does not exist; those of [`Rows::check`]; [`crate::Error::Limit`];
    /// [`crate::Error::Shader`] where the driver refuses a kernel.
    pub fn append<'b>(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        layer: u32,
        k: impl Into<Rows<'b>>,
        v: impl Into<Rows<'b>>,
    ) -> Result<()> {
        let Some(plan) = &self.plan else { return Ok(()) };
        let sides = [k.into(), v.into()];
        self.check_rows(layer, sides)?;
        for (s, rows) in sides.into_iter().enumerate() {
            self.append_side(plan, pass, layer, s, rows)?;
        }
        Ok(())
    }

    fn append_side(
        &self,
        plan: &StepPlan,
        pass: &mut wgpu::ComputePass<'_>,
        layer: u32,
        s: usize,
        rows: Rows<'_>,
    ) -> Result<()> {
        let KvCache {
            gpu,
            book,
            layers,
            sides,
            tensor_scales,
            status,
            ..
        } = &*self.cache;
        let page = book.geometry().packed[s];
        let pools = &layers[layer as usize];
        let tensor = layer * 2 + s as u32;
        let kernels = &sides[s];
        if let Some(kernel) = &kernels.scale_from_rows {
            self.largest_of(plan, pass, layer, (s, rows), &self.cache.largest)?;
            let params = tensor_scale::Params {
                first: tensor,
                slots: 1,
            };
            kernel.encode(gpu, pass, [&self.cache.largest, tensor_scales], params)?;
        }
        let [direct, wait, pack] = &self.lists.writes[s];
        let writes = &plan.sides[s];
        let strides = rows.row_strides(page.heads, page.head_dim);
        let buffers = |source, runs, pages| quantize::Buffers {
            source,
            runs,
            tensor_scales,
            pages,
            status,
        };
        if let Some(kernel) = &kernels.direct {
            let b = buffers(rows.buffer, direct, &pools.packed[s]);
            let kernel = kernel.kernel(gpu, rows.float)?;
            kernel.encode(gpu, pass, &b, writes.direct.len() as u32, strides, tensor)?;
        }
        let Some(waiting) = &pools.waiting[s] else {
            return Ok(());
        };
        if let Some(kernel) = &kernels.wait {
            let b = buffers(rows.buffer, wait, waiting);
            let kernel = kernel.kernel(gpu, rows.float)?;
            kernel.encode(gpu, pass, &b, writes.wait.len() as u32, strides, tensor)?;
        }
        let b = buffers(waiting, pack, &pools.packed[s]);
        match &kernels.pack {
            Some(Pack::Rows(kernel)) => {
                let dense = RowStrides::dense(&page);
                kernel.encode(gpu, pass, &b, writes.pack.len() as u32, dense, tensor)
            }
            Some(Pack::Groups(kernel)) => kernel.encode(gpu, pass, &b, writes.pack.len() as u32),
            None => Ok(()),
        }
    }

    fn largest_of(
        &self,
        plan: &StepPlan,
        pass: &mut wgpu::ComputePass<'_>,
        layer: u32,
        (s, rows): (usize, Rows<'_>),
        largest: &wgpu::Buffer,
    ) -> Result<()> {
        let cache = &*self.cache;
        let page = cache.book.geometry().packed[s];
        let strides = rows.row_strides(page.heads, page.head_dim);
        let params = amax::Params {
            tokens: plan.tokens,
            heads: page.heads,
            head_dim: page.head_dim,
            row_offset: strides.offset,
            row_stride: strides.row,
            head_stride: strides.head,
            slot: layer * 2 + s as u32,
        };
        let kernel = built(&cache.amax[rows.float as usize], || {
            Amax::plan(&cache.gpu, rows.float)
        })?;
        kernel.encode(&cache.gpu, pass, [rows.buffer, largest], params)
    }

    /// Records the calibration of per-tensor scales on a layer's rows: their largest magnitude is remembered for
    /// [`KvCache::calibrated`].
    ///
    /// # Errors
    /// As [`Step::append`].
    pub fn calibrate<'b>(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        layer: u32,
        k: impl Into<Rows<'b>>,
        v: impl Into<Rows<'b>>,
    ) -> Result<()> {
        let Some(plan) = &self.plan else { return Ok(()) };
        let (k, v) = (k.into(), v.into());
        self.check_rows(layer, [k, v])?;
        self.largest_of(plan, pass, layer, (K, k), &self.cache.observed)?;
        self.largest_of(plan, pass, layer, (V, v), &self.cache.observed)
    }

    /// Records attention of a layer: queries, a buffer of f32 or [`Rows`] whose offset and strides are multiples of 4
    /// elements, into a buffer of f32 or [`Outputs`], with the LSE where it is asked for. Layers may differ in their
    /// options.
    ///
    /// # Errors
    /// Those of [`AttentionOptions::check`], [`Rows::check`] and [`Outputs::check`]; [`crate::Error::Shape`] for a layer
    /// that does not exist; [`crate::Error::Usage`] for queries at other offsets; [`crate::Error::Limit`];
    /// [`crate::Error::Shader`] where the driver refuses a kernel.
    pub fn attend<'b>(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        layer: u32,
        q: impl Into<Rows<'b>>,
        output: impl Into<Outputs<'b>>,
        options: &AttentionOptions<&wgpu::Buffer>,
    ) -> Result<()> {
        let Some(plan) = &self.plan else { return Ok(()) };
        let (q, output) = (q.into(), output.into());
        let cache = &*self.cache;
        let spec = cache.book.spec();
        options.check()?;
        check_sinks(options.sinks, spec.q_heads)?;
        cache.book.check_layer(layer)?;
        q.check("q bytes", plan.tokens, spec.q_heads, spec.k_head_dim)?;
        output.check(plan.tokens, spec.q_heads, spec.v_head_dim)?;
        let lists = self.attention_lists(plan, options.reach())?;
        let partials = &lists.partials;
        let pools = &cache.layers[layer as usize];
        for (kind, (items, count)) in &lists.items {
            let side = |s: usize, waits: bool| match (waits, &pools.waiting[s]) {
                (true, Some(pages)) => pages,
                _ => &pools.packed[s],
            };
            let buffers = attention_split::Buffers {
                items,
                page_table: &self.lists.table,
                q: q.buffer,
                q_rows: q.row_strides(spec.q_heads, spec.k_head_dim),
                k_pages: side(K, kind.k_waits),
                v_pages: side(V, kind.v_waits),
                tensor_scales: &cache.tensor_scales,
                partial_o: &partials.o,
                partial_ml: &partials.ml,
            };
            let tensor = [layer * 2, layer * 2 + 1];
            cache
                .attention(*kind, q.float)?
                .encode(&cache.gpu, pass, &buffers, *count, options, tensor)?;
        }
        let merge = [&lists.merges, &partials.o, &partials.ml, output.buffer];
        cache
            .merge(output.float)?
            .encode(&cache.gpu, pass, merge, output.lse, options.sinks, plan.tokens)
    }

    fn attention_lists(&self, plan: &StepPlan, reach: Reach) -> Result<Arc<AttentionLists>> {
        let mut made = self
            .lists
            .attention
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(lists) = made.get(&reach) {
            return Ok(lists.clone());
        }
        let lists = Arc::new(self.cache.attention_lists(&plan.attention_within(reach)?)?);
        made.insert(reach, lists.clone());
        Ok(lists)
    }

    /// Refuses a layer that the cache lacks, and rows of K and V that kernels cannot read.
    fn check_rows(&self, layer: u32, sides: [Rows<'_>; 2]) -> Result<()> {
        self.cache.book.check_layer(layer)?;
        for (s, rows) in sides.into_iter().enumerate() {
            let page = self.cache.book.geometry().packed[s];
            let what = ["k bytes", "v bytes"][s];
            rows.check(what, self.tokens(), page.heads, page.head_dim)?;
        }
        Ok(())
    }

    /// Makes the step part of the cache.
    ///
    /// # Errors
    /// As [`Book::commit`]; not while the step has held its cache, as it does.
    pub fn commit(mut self) -> Result<()> {
        match self.plan.take() {
            Some(plan) => self.cache.book.commit(plan),
            None => Ok(()),
        }
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if let Some(plan) = self.plan.take() {
            self.cache.book.abandon(plan);
        }
    }
}
