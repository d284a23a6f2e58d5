//! The paged KV cache on the GPU, for engines that own a `wgpu::Device`: sequences grow by steps, fork, shrink, are
//! saved and restored; each layer is stored in a format of its own.
//!
//! ```
//! use kvpack::cache::{CacheSpec, KvCache};
//! use kvpack::gpu::{Gpu, Selection};
//! use kvpack::options::AttentionOptions;
//!
//! # fn main() -> kvpack::Result<()> {
//! // An engine hands in its own device: Gpu::from_device(device, queue).
//! let gpu = Gpu::open(&Selection::default());
//! # if gpu.is_err() && std::env::var_os("KVPACK_ALLOW_NO_GPU").is_some() { return Ok(()) }
//! let gpu = gpu?;
//! // 2 layers, 4 query heads, 2 KV heads of 64 channels; keys per channel, values per token; 16 MiB of pages.
//! let spec = CacheSpec::new(2, 4, 2, 64, "int4c/int4".parse()?, 16 << 20);
//! let mut cache = KvCache::new(&gpu, spec)?;
//! let sequence = cache.open();
//!
//! // A prompt of 40 tokens: rows are [token][head][channel]. An engine's come from its own kernels.
//! let (k, v, q) = (vec![0.5_f32; 40 * 2 * 64], vec![2.0_f32; 40 * 2 * 64], vec![1.0_f32; 40 * 4 * 64]);
//! let [k, v, q] = [gpu.upload("k", &k)?, gpu.upload("v", &v)?, gpu.upload("q", &q)?];
//! let output = gpu.zeros("output", 40 * 4 * 64 * 4)?;
//!
//! let mut encoder = gpu.device().create_command_encoder(&Default::default());
//! let step = cache.step(&[(sequence, 40)])?; // planned once for all layers; any number of sequences
//! for layer in 0..2 {
//!     step.append(&mut encoder, layer, &k, &v)?;
//!     step.attend(&mut encoder, layer, &q, &output, &AttentionOptions::default())?;
//! }
//! step.commit()?; // dropping the step instead takes it back
//! gpu.queue().submit([encoder.finish()]);
//!
//! assert_eq!(cache.book().len(sequence)?, 40);
//! let output: Vec<f32> = gpu.read("output", &output, 40 * 4 * 64)?;
//! assert!(output.iter().all(|x| (x - 2.0).abs() < 1e-3));
//! let status = gpu.block_on(cache.status()?)?; // a future: it never blocks by itself
//! assert_eq!((status.non_finite, status.saturated), (0, 0));
//! # Ok(())
//! # }
//! ```
//!
//! # Sequences are segments of pages
//!
//! A page holds the tokens [p P, (p + 1) P) of one sequence, for one layer and one side (K or V), all KV heads
//! ([`crate::pages`] has the words). Each side of a sequence has up to three segments, in the order of its tokens:
//!
//! ```text
//!            0        S                                       b                   length
//!   tokens   | sinks  |  packed                               |  waiting          |
//!   K int4c  | f16    |  int4c | int4c | int4c | int4c | int4c|  f16: open group, |
//!            |        |  one scale a channel and group of G   |  recent window R  |
//!   V int4   | f16    |  int4, a scale a token and head  ............. (R = 0) ... |
//!            |________|_______________________________________|___________________|
//!   pages    [  page 0 f16  ]                             [ page b/P f16 ][  ...  ]
//!            [  page 0 int4c  ][  page 1 int4c  ] ...     [ page b/P int4c  ]
//! ```
//!
//! - *Sink tokens*: the first S tokens stay in full precision for good. Their codes are 0 and no scale covers them.
//! - *Packed*: tokens below the boundary b, the largest multiple of G (1 unless the side is per channel) not above
//!   length - R when a step commits. A group is packed once and its codes never change.
//! - *Waiting*: tokens from b on, in f16 pages at the slots that they will have when packed. They are the reserve that
//!   [`KvCache::truncate`] can always take back.
//!
//! The same rows, appended in any steps, end in the same bytes. Attention runs over the common refinement of both sides'
//! segments, cut into splits at fixed tokens: a sequence attended in a batch gives the bits that it gives alone (unless
//! its pages lie in several buffers: splits end there).
//!
//! # Lifecycle
//!
//! ```text
//!   open ──> step ──> append, attend: each layer ──> commit ──> step ... ──> free
//!              │                                       │
//!              └── dropped: as if it had not been      ├── fork: a second sequence on the same pages
//!                                                      ├── truncate: fewer tokens
//!                                                      └── save: bytes ──> restore, here or in another cache
//! ```
//!
//! - A step plans the pages and work of all its sequences, all or nothing: a full cache is an error
//!   ([`Error::CacheFull`]) that names what is missing, and changes nothing.
//! - A fork holds the pages of its first tokens together with the original. Whoever appends copies the open pages (those
//!   that its tokens end in) first; full pages are never written again.
//! - Pages that a step, a truncation or a free gives back serve later steps. So steps are submitted in the order in
//!   which they were recorded, and before [`KvCache::restore`], which writes at once.
//! - A sliding window ([`AttentionOptions::window`](crate::options::AttentionOptions::window)) spares work, not memory: its
//!   layers keep every token.
//! - A commit is the books' alone: an encoder that is thrown away after it leaves pages without rows.
//! - [`SequenceId`]s are never used again; one that was freed, or is of another cache, is an error.
//!
//! # Memory
//!
//! [`CacheSpec::budget`] bounds the bytes of all pages. It is cut, by [`Geometry`], into packed pages (as many for every
//! layer and side) and pages in full precision (what [`CacheSpec::sequences`] need for sinks, open groups and windows,
//! and what long steps pass through). Pools are made in buffers when they are first needed, no larger than the device
//! binds, by [`CacheSpec::growth`] at a time. [`Book::pools`], [`Book::bytes_in_use`] and [`Book::room`] say what is
//! used and what fits; [`Geometry::costs`] what tokens and sequences take.
//!
//! # Saved sequences
//!
//! Bytes of [`KvCache::save`]. All numbers are little-endian:
//!
//! ```text
//! "kvpackSQ"                                     8 bytes
//! version                                        u32, 1
//! kv_heads, k_head_dim, v_head_dim, page_tokens  u32 each
//! the side in which tokens wait                  text
//! layers                                         u32
//! for each layer: K side, V side                 text each
//!                 windows of K and V             u32 each
//!                 sink tokens of K and V         u32 each
//!                 per-tensor scales of K and V   f32 each; 0 where the side has none
//!                 boundaries of K and V          u32 each
//! tokens                                         u32
//! pages, by layer, K before V, packed before full precision, in token order; dead slots and padding are 0
//! CRC-32 (IEEE) of all that                      u32
//!
//! text: its length in bytes as u32, then UTF-8
//! ```

mod book;
pub mod plan;
mod planner;
mod pool;
mod saved;
mod sequence;
mod spec;
mod step;

pub use book::Book;
pub use pool::{BytesInUse, PoolId, PoolState};
pub(crate) use sequence::by_page;
pub use sequence::{HeldPage, SequenceId};
pub use spec::{
    CacheSpec, Class, Costs, Geometry, K, LayerSpec, MAX_LAYERS, MAX_SEQUENCES, MAX_TOKENS, MAX_WAITING,
    TensorScales, V,
};
pub use step::Step;

use plan::SegmentKind;

use std::future::Future;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::error::{Error, Result};
use crate::formats::Element;
use crate::gpu::Gpu;
use crate::kernels::FloatType;
use crate::kernels::amax::Amax;
use crate::kernels::attention_merge::AttentionMerge;
use crate::kernels::attention_split::AttentionSplit;
use crate::kernels::quantize::{Quantize, Source};
use crate::kernels::quantize_group::QuantizeGroup;
use crate::kernels::tensor_scale::{self, TensorScale};
use crate::pages::{PageLayout, heads_ratio};
use crate::scales::ScaleLayout;
use crate::tuning::Shape;
use crate::variant::Variant;
use crate::work::Status;

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

/// The kernels that write one side of a class.
#[derive(Debug)]
struct SideKernels {
    direct: Option<PackRows>,
    wait: Option<PackRows>,
    pack: Option<Pack>,
    /// Makes the per-tensor scale from a step's rows, where it comes from there.
    scale_from_rows: Option<TensorScale>,
}

/// The kernels of one class.
#[derive(Debug)]
struct ClassKernels {
    sides: [SideKernels; 2],
    /// By the type of the queries and [`SegmentKind::index`], each built when it is first needed: a step that only
    /// appends compiles none.
    attention: [[OnceLock<AttentionSplit>; 8]; 2],
    /// Variants that are being measured, of decode and of prefill.
    forced: [Option<Variant>; 2],
}

/// The buffers of one layer: K and V, packed and in full precision.
type LayerPools = [[Vec<wgpu::Buffer>; 2]; 2];

/// Partial buffers, kept from step to step and grown when a step needs more.
#[derive(Debug, Clone)]
struct Partials {
    capacity: u32,
    o: wgpu::Buffer,
    ml: wgpu::Buffer,
}

/// A paged KV cache on a GPU.
///
/// Commands are recorded into the caller's encoders and submitted by the caller, in the order in which they were
/// recorded: a page that one step frees is used by later ones. Several steps may go into one encoder.
///
/// Kernels are compiled when a step first needs them, on the thread that records it; [`KvCache::prepare`] does so before.
/// Futures ask the device each time they are polled; [`Gpu::block_on`] waits without spinning.
#[derive(Debug)]
pub struct KvCache {
    gpu: Gpu,
    book: Book,
    layers: Vec<LayerPools>,
    classes: Vec<ClassKernels>,
    /// Query tokens of one workgroup in prefill, whatever the formats.
    token_tile: u32,
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
    partials: Mutex<Option<Partials>>,
    /// A page on its way from one place of a buffer to another.
    scratch: OnceLock<wgpu::Buffer>,
}

/// What a device must offer for a cache, for `wgpu::DeviceDescriptor`. An engine with needs of its own joins them:
/// `features | own`, `limits.or_better_values_from(&own)`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Requirements {
    /// Features.
    pub features: wgpu::Features,
    /// Limits: WebGPU's defaults, and buffers as large as the adapter binds and the cache can use.
    pub limits: wgpu::Limits,
}

impl CacheSpec {
    /// What to ask of an adapter before the device exists.
    ///
    /// # Errors
    /// As [`Book::new`]; [`Error::Limit`] for an adapter below WebGPU's defaults where kernels need them.
    pub fn requirements(&self, adapter: &wgpu::Adapter) -> Result<Requirements> {
        let (allowed, defaults) = (adapter.limits(), wgpu::Limits::default());
        for (what, needed, has) in [
            (
                "storage buffers of a shader stage",
                defaults.max_storage_buffers_per_shader_stage,
                allowed.max_storage_buffers_per_shader_stage,
            ),
            (
                "bytes of workgroup memory",
                defaults.max_compute_workgroup_storage_size,
                allowed.max_compute_workgroup_storage_size,
            ),
            (
                "invocations of a workgroup",
                defaults.max_compute_invocations_per_workgroup,
                allowed.max_compute_invocations_per_workgroup,
            ),
            (
                "workgroups of a dimension",
                defaults.max_compute_workgroups_per_dimension,
                allowed.max_compute_workgroups_per_dimension,
            ),
        ] {
            if has < needed {
                return Err(Error::Limit {
                    what: format!("a cache ({what})"),
                    needed: u64::from(needed),
                    allowed: u64::from(has),
                    advice: "use an adapter with at least WebGPU's default limits".to_owned(),
                });
            }
        }
        let limit = buffer_limit(&allowed);
        let book = Book::new(self.clone(), Some(limit))?;
        let largest = book
            .pools()
            .map(|pool| u64::from(pool.per_buffer) * pool.layout.bytes())
            .max();
        let bytes = largest.unwrap_or(0).min(limit);
        Ok(Requirements {
            features: wgpu::Features::empty(),
            limits: wgpu::Limits {
                max_buffer_size: bytes.max(defaults.max_buffer_size.min(allowed.max_buffer_size)),
                max_storage_buffer_binding_size: bytes.max(
                    defaults
                        .max_storage_buffer_binding_size
                        .min(allowed.max_storage_buffer_binding_size),
                ),
                ..defaults
            },
        })
    }
}

/// The largest buffer that can be bound whole.
fn buffer_limit(limits: &wgpu::Limits) -> u64 {
    limits.max_storage_buffer_binding_size.min(limits.max_buffer_size)
}

impl KvCache {
    /// An empty cache on a device. It takes no memory for pages until sequences grow.
    ///
    /// # Errors
    /// As [`Book::new`]; [`Error::Shader`] and [`Error::Device`] where the driver refuses.
    pub fn new(gpu: &Gpu, spec: CacheSpec) -> Result<KvCache> {
        let limit = buffer_limit(&gpu.device().limits());
        let book = Book::new(spec, Some(limit))?;
        let (spec, geometry) = (book.spec(), book.geometry());
        let classes = geometry.classes.iter();
        let classes = classes
            .map(|class| {
                Ok(ClassKernels {
                    sides: [
                        side_kernels(gpu, spec, class, K)?,
                        side_kernels(gpu, spec, class, V)?,
                    ],
                    attention: Default::default(),
                    forced: [None; 2],
                })
            })
            .collect::<Result<Vec<_>>>()?;
        // What fits the workgroup memory of every kernel.
        let mut token_tile = u32::MAX;
        for (class, kind) in geometry
            .classes
            .iter()
            .flat_map(|class| SegmentKind::all().map(move |kind| (class, kind)))
        {
            let pages = [class.page(K, kind.k_waits), class.page(V, kind.v_waits)];
            token_tile = token_tile.min(variant_on(gpu, [&pages[K], &pages[V]], spec, true)?.token_tile);
        }
        let layers = spec.layers.len();
        let mut scales = vec![[0.0_f32; 2]; layers];
        if let TensorScales::Given(given) = &spec.tensor_scales {
            scales[..given.len()].copy_from_slice(given);
        }
        if let Some(table) = &spec.key_rotation {
            scales.extend(&table.turns);
        }
        let numbers = layers as u64 * 2 * 4;
        Ok(KvCache {
            amax: Default::default(),
            tensor_scale: TensorScale::plan(gpu, Element::E4m3)?,
            largest: gpu.zeros("largest magnitudes", numbers)?,
            observed: gpu.zeros("observed magnitudes", numbers)?,
            tensor_scales: gpu.upload("per-tensor scales", scales.as_flattened())?,
            status: gpu.zeros("append status", 8)?,
            gpu: gpu.clone(),
            layers: vec![LayerPools::default(); layers],
            classes,
            token_tile,
            merge: Default::default(),
            partials: Mutex::default(),
            scratch: OnceLock::new(),
            book,
        })
    }

    /// The books: spec, geometry, lengths, pages and bytes in use, room.
    pub fn book(&self) -> &Book {
        &self.book
    }

    /// Opens an empty sequence.
    pub fn open(&mut self) -> SequenceId {
        self.book.open()
    }

    /// A new sequence of the first `len` tokens of another, as [`Book::fork`].
    ///
    /// # Errors
    /// As [`Book::fork`].
    pub fn fork(&mut self, id: SequenceId, len: u32) -> Result<SequenceId> {
        self.book.fork(id, len)
    }

    /// Drops all tokens of a sequence but the first `len`, as [`Book::truncate`].
    ///
    /// # Errors
    /// As [`Book::truncate`].
    pub fn truncate(&mut self, id: SequenceId, len: u32) -> Result<()> {
        self.book.truncate(id, len)
    }

    /// Frees a sequence; pages that no other shares serve later steps.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn free(&mut self, id: SequenceId) -> Result<()> {
        self.book.free(id)
    }

    /// Bytes of all page buffers made so far, whether their pages are in use or not. The budget bounds them.
    pub fn allocated_bytes(&self) -> u64 {
        let buffers = self.layers.iter().flatten().flatten().flatten();
        buffers.map(wgpu::Buffer::size).sum()
    }

    /// Bytes of the buffers that attention and copies work in; the budget does not count them.
    pub fn work_bytes(&self) -> u64 {
        let partials = self.partials.lock().unwrap_or_else(PoisonError::into_inner);
        let partials = partials.as_ref().map_or(0, |p| p.o.size() + p.ml.size());
        partials + self.scratch.get().map_or(0, wgpu::Buffer::size)
    }

    /// Plans a step for all layers alike: a number of new tokens for each of some sequences, each named once. Rows of k, v
    /// and q then hold all new tokens, those of the first request first. All or nothing. A step without any tokens is
    /// allowed and needs no appends.
    ///
    /// # Errors
    /// As [`Book::plan`]; [`Error::Limit`] and [`Error::Device`] where buffers cannot be made.
    pub fn step(&mut self, requests: &[(SequenceId, u32)]) -> Result<Step<'_>> {
        let plan = self.book.plan(requests, self.token_tile)?;
        match self.grow().and_then(|()| step::Lists::new(&self.gpu, &plan)) {
            Ok(lists) => Ok(Step::new(self, plan, lists)),
            Err(e) => {
                self.book.abandon(plan);
                Err(e)
            }
        }
    }

    /// Builds every kernel that steps with rows, queries and outputs of such types may need. Without it each is built when
    /// it is first needed, which takes some drivers seconds.
    ///
    /// # Errors
    /// [`Error::Shader`] and [`Error::Device`] where the driver refuses.
    pub fn prepare(&self, rows: FloatType, queries: FloatType, outputs: FloatType) -> Result<()> {
        self.merge(outputs)?;
        for (c, class) in self.classes.iter().enumerate() {
            for kernels in class
                .sides
                .iter()
                .flat_map(|side| [&side.direct, &side.wait])
                .flatten()
            {
                kernels.kernel(&self.gpu, rows)?;
            }
            let waiting = self.book.geometry().classes[c].waiting;
            for kind in SegmentKind::all() {
                let exists = |side: usize, waits: bool| !waits || waiting[side].is_some();
                if exists(K, kind.k_waits) && exists(V, kind.v_waits) {
                    self.attention(c, kind, queries)?;
                }
            }
        }
        Ok(())
    }

    /// Makes the buffers of all pages that are in use now, or will be by the step at hand. All or nothing: where memory
    /// runs out, what was made goes back.
    fn grow(&mut self) -> Result<()> {
        let mut made = Vec::new();
        for pool in self.book.pools() {
            let PoolId { class, side, waiting } = pool.id;
            for &layer in &self.book.geometry().classes[class].layers {
                let place = (layer as usize, side, usize::from(waiting));
                let buffers = self.layers[place.0][place.1][place.2].len() as u32;
                for number in buffers..pool.buffers {
                    let bytes = self.book.buffer_bytes(pool.id, number);
                    made.push((place, self.gpu.zeros("pages", bytes)?));
                }
            }
        }
        for ((layer, side, waiting), buffer) in made {
            self.layers[layer][side][waiting].push(buffer);
        }
        Ok(())
    }

    fn partials(&self, needed: u32) -> Result<Partials> {
        let mut kept = self.partials.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(partials) = kept.as_ref().filter(|partials| partials.capacity >= needed) {
            return Ok(partials.clone());
        }
        // With room to spare, so that decoding does not allocate at every step, where the device can bind it; at most 2^31.
        let o_bytes = |capacity: u32| u64::from(capacity) * u64::from(self.book.spec().v_head_dim) * 4;
        let spare = needed.next_power_of_two().max(64);
        let binds = o_bytes(spare) <= buffer_limit(&self.gpu.device().limits());
        let capacity = if binds { spare } else { needed };
        let made = Partials {
            capacity,
            o: self.gpu.zeros("attention partials", o_bytes(capacity))?,
            ml: self
                .gpu
                .zeros("attention partial sums", u64::from(capacity) * 8)?,
        };
        Ok(kept.insert(made).clone())
    }

    fn scratch(&self) -> Result<&wgpu::Buffer> {
        built(&self.scratch, || {
            let largest = self.book.pools().map(|pool| pool.layout.bytes()).max();
            self.gpu.zeros("a page on its way", largest.unwrap_or(0))
        })
    }

    fn merge(&self, output: FloatType) -> Result<&AttentionMerge> {
        let spec = self.book.spec();
        built(&self.merge[output as usize], || {
            AttentionMerge::plan(&self.gpu, spec.q_heads, spec.v_head_dim, output)
        })
    }

    /// How attention runs over the layers of a class ([`Geometry::classes`]: layers stored alike) and tokens of a kind.
    ///
    /// # Errors
    /// [`Error::Shape`] for a class that does not exist.
    pub fn variant(&self, class: usize, kind: SegmentKind) -> Result<Variant> {
        let (spec, geometry) = (self.book.spec(), self.book.geometry());
        let Some(pages) = geometry.classes.get(class) else {
            return Err(Error::Shape {
                what: "class",
                value: class as u64,
                limit: format!(
                    "the layers of this cache are of {} classes",
                    geometry.classes.len()
                ),
                advice: "a class is a place in Geometry::classes".to_owned(),
            });
        };
        let pages = [pages.page(K, kind.k_waits), pages.page(V, kind.v_waits)];
        let forced = self.classes[class].forced[usize::from(kind.prefill)];
        let mut variant = match forced.filter(|_| !kind.k_waits && !kind.v_waits) {
            Some(variant) => variant,
            None => variant_on(&self.gpu, [&pages[K], &pages[V]], spec, kind.prefill)?,
        };
        if kind.prefill {
            // Work items are cut for all formats alike.
            variant.token_tile = self.token_tile;
        }
        Ok(variant)
    }

    /// Makes packed pages of a class run by a variant, for measurements.
    pub(crate) fn force_variant(&mut self, class: usize, prefill: bool, variant: Variant) {
        let kernels = &mut self.classes[class];
        kernels.forced[usize::from(prefill)] = Some(variant);
        kernels.attention = Default::default();
    }

    fn attention(&self, class: usize, kind: SegmentKind, q: FloatType) -> Result<&AttentionSplit> {
        let geometry = &self.book.geometry().classes[class];
        let (k, v) = (geometry.page(K, kind.k_waits), geometry.page(V, kind.v_waits));
        built(&self.classes[class].attention[q as usize][kind.index()], || {
            let variant = self.variant(class, kind)?;
            let spec = self.book.spec();
            let pairing = spec.key_rotation.as_ref().map(|table| table.pairing);
            AttentionSplit::plan_turning(&self.gpu, &k, &v, spec.q_heads, variant, (q, pairing))
        })
    }

    /// What packing met so far, as of all that was submitted before this call: a future that does not block.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn status(&self) -> Result<impl Future<Output = Result<Status>> + use<>> {
        let read = self.gpu.read_back("append status", &[(&self.status, 0..8)])?;
        Ok(async {
            let words = read.await?;
            Ok(Status {
                non_finite: words[0],
                saturated: words[1],
            })
        })
    }

    /// Per-tensor scales of FP8 by the largest magnitudes of [`Step::calibrate`] so far, `[layer][K, V]`; the magnitudes
    /// start again from 0. A future that does not block.
    ///
    /// Any cache with the same layers and heads can calibrate, one of f16 for instance: give the scales to the spec of
    /// another as [`TensorScales::Given`]. A side that met no rows, or only zeros, has a scale of 0, which no spec takes.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn calibrated(&self) -> Result<impl Future<Output = Result<Vec<[f32; 2]>>> + use<>> {
        let slots = self.layers.len() as u32 * 2;
        let scales = self.gpu.zeros("calibrated scales", u64::from(slots) * 4)?;
        self.gpu.submit("calibration", |encoder| {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            let params = tensor_scale::Params { first: 0, slots };
            self.tensor_scale
                .encode(&self.gpu, &mut pass, [&self.observed, &scales], params)
        })?;
        let read = self
            .gpu
            .read_back("calibrated scales", &[(&scales, 0..u64::from(slots) * 4)])?;
        Ok(async {
            let words = read.await?;
            let pairs = words.chunks_exact(2);
            Ok(pairs.map(|pair| [pair[0], pair[1]].map(f32::from_bits)).collect())
        })
    }

    /// The live words of a sequence's pages on one side of a layer, in the order of [`Book::held_pages`]: dead slots read
    /// as zero. A future that does not block.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::Shape`] for a layer or side that does not exist, [`Error::Device`].
    pub fn live_words(
        &self,
        id: SequenceId,
        layer: u32,
        side: usize,
    ) -> Result<impl Future<Output = Result<Vec<u32>>> + use<>> {
        self.words_of(self.book.held_pages_of(id, layer, side)?)
    }

    fn words_of(&self, held: Vec<HeldPage>) -> Result<impl Future<Output = Result<Vec<u32>>> + use<>> {
        let mut ranges = Vec::new();
        for page in &held {
            let (buffer, number) = self.locate(page)?;
            let bytes = page.layout.bytes();
            ranges.push((buffer, u64::from(number) * bytes..u64::from(number + 1) * bytes));
        }
        let read = self.gpu.read_back("pages", &ranges)?;
        Ok(async move {
            let words = read.await?;
            let mut rest = &words[..];
            let mut live = Vec::with_capacity(words.len());
            for page in &held {
                let (words, after) = rest.split_at(page.layout.words as usize);
                live.extend(page.live_words(words));
                rest = after;
            }
            Ok(live)
        })
    }

    fn locate(&self, page: &HeldPage) -> Result<(&wgpu::Buffer, u32)> {
        let (buffer, number) = self.book.locate(page);
        Ok((
            self.buffer(page.layer, page.pool.side, page.pool.waiting, buffer)?,
            number,
        ))
    }

    /// A buffer of a layer's pages, packed or in full precision.
    ///
    /// # Errors
    /// [`Error::Shape`] for a layer, side or buffer that does not exist.
    pub fn buffer(&self, layer: u32, side: usize, waiting: bool, number: u32) -> Result<&wgpu::Buffer> {
        let pools = self.layers.get(layer as usize);
        let buffers = pools.and_then(|pools| Some(&pools.get(side)?[usize::from(waiting)]));
        let buffer = buffers.and_then(|buffers| buffers.get(number as usize));
        buffer.ok_or_else(|| Error::Shape {
            what: "buffer of pages",
            value: u64::from(number),
            limit: format!(
                "layer {layer}, side {side} has {} such buffers now",
                buffers.map_or(0, Vec::len)
            ),
            advice: "ask Book::pools for the buffers that exist".to_owned(),
        })
    }

    /// A sequence as bytes, with a version and a checksum, as of all that was submitted before this call: a future that
    /// does not block. `restore` takes the bytes, in this cache or another with the same layers, KV heads, head dimensions,
    /// page length and per-tensor scales; query heads, sequences, budget and growth may differ. They do not name the model.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Usage`] where per-tensor scales come from rows; [`Error::Device`].
    pub fn save(&self, id: SequenceId) -> Result<impl Future<Output = Result<Vec<u8>>> + use<>> {
        let head = saved::head(&self.book, id)?;
        let words = self.words_of(self.book.held_pages(id)?)?;
        Ok(async move { Ok(saved::finish(head, &words.await?)) })
    }

    /// A new sequence from saved bytes. All or nothing. Its pages are written before the next submission: submit what has
    /// been recorded first, since it may still read them.
    ///
    /// # Errors
    /// [`Error::Restore`] for bytes that are damaged or from a cache of another spec; [`Error::CacheFull`];
    /// [`Error::Usage`] as [`KvCache::save`]; [`Error::Device`].
    pub fn restore(&mut self, bytes: &[u8]) -> Result<SequenceId> {
        let (id, words) = self.book.restore(bytes)?;
        let written = self.grow().and_then(|()| self.write(id, &words));
        if let Err(e) = written {
            self.book.forget(id)?;
            return Err(e);
        }
        Ok(id)
    }

    fn write(&self, id: SequenceId, words: &[u32]) -> Result<()> {
        let mut rest = words;
        let mut writes = Vec::new();
        for page in self.book.held_pages(id)? {
            let (words, after) = rest.split_at(page.layout.words as usize);
            let (buffer, number) = self.locate(&page)?;
            writes.push((buffer, u64::from(number) * page.layout.bytes(), words));
            rest = after;
        }
        let during = "restoring a sequence";
        let written = self.gpu.checked(during, || {
            writes.into_iter().try_for_each(|(buffer, offset, words)| {
                let bytes: &[u8] = bytemuck::cast_slice(words);
                let size = wgpu::BufferSize::new(bytes.len() as u64)?;
                let mut view = self.gpu.queue().write_buffer_with(buffer, offset, size)?;
                view.slice(..).copy_from_slice(bytes);
                Some(())
            })
        })?;
        // A lost device says nothing, and gives no room for the words.
        written.ok_or_else(|| Error::Device {
            during: during.to_owned(),
            message: "the device was lost".to_owned(),
        })
    }
}

/// How attention runs on an adapter.
fn variant_on(gpu: &Gpu, pages: [&PageLayout; 2], spec: &CacheSpec, prefill: bool) -> Result<Variant> {
    let ratio = heads_ratio(spec.q_heads, spec.kv_heads)?;
    let tuned = gpu.tuning().get(&Shape::new(pages, ratio, prefill));
    let tuned = tuned.filter(|variant| gpu.device().features().contains(variant.features()));
    Ok(tuned.unwrap_or_else(|| Variant::new(pages, ratio, prefill, gpu.summary().software)))
}

fn side_kernels(gpu: &Gpu, spec: &CacheSpec, class: &Class, s: usize) -> Result<SideKernels> {
    let page = &class.packed[s];
    let waits = class.waits[s];
    let from_rows =
        page.side.layout == ScaleLayout::PerTensor && spec.tensor_scales == TensorScales::FromRows;
    let pack = |waiting| -> Result<Pack> {
        Ok(match page.side.layout.token_group() {
            1 => Pack::Rows(Quantize::plan(gpu, page, &Source::Pages(waiting))?),
            _ => Pack::Groups(QuantizeGroup::plan(gpu, page, &waiting)?),
        })
    };
    Ok(SideKernels {
        direct: (!waits).then(|| PackRows::new(*page)),
        wait: class.waiting[s].map(PackRows::new),
        pack: class.waiting[s].filter(|_| waits).map(pack).transpose()?,
        scale_from_rows: match from_rows {
            true => Some(TensorScale::plan(gpu, page.side.element)?),
            false => None,
        },
    })
}
