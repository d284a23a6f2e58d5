//! The paged KV cache on the GPU: sequences grow by steps; a step appends rows of K and V and attends with q.
//!
//! ```text
//! let step = cache.step(&[(sequence, new_tokens), ...])?;      // planned once for all layers
//! for layer in 0..layers {
//!     step.append(&mut encoder, layer, &k, &v)?;               // records; rows are `[token][head][channel]`
//!     step.attend(&mut encoder, layer, &q, &output, &options)?; // sees the tokens just appended
//! }
//! step.commit()?;                                              // dropping the step instead takes it back
//! ```

mod book;
mod plan;
mod saved;
mod spec;
mod step;

pub use book::{Book, BytesInUse, HeldPage, PoolId, PoolState, SequenceId};
pub use plan::{AttentionPlan, ClassPlan, CopiedPage, Runs, Segment, SegmentKind, SidePlan, StepPlan, Wave};
pub use spec::{CacheSpec, Class, Costs, Geometry, K, LayerSpec, TensorScales, V};
pub use step::Step;

use std::future::Future;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::error::{Error, Result};
use crate::formats::Element;
use crate::gpu::Gpu;
use crate::kernels::FloatType;
use crate::kernels::amax::Amax;
use crate::kernels::attention_merge::AttentionMerge;
use crate::kernels::attention_split::{AttentionSplit, Tiling};
use crate::kernels::quantize::{Quantize, Source};
use crate::kernels::quantize_group::QuantizeGroup;
use crate::kernels::tensor_scale::{self, TensorScale};
use crate::pages::heads_ratio;
use crate::scales::ScaleLayout;
use crate::work::Status;

/// How waiting tokens of a side become packed.
#[derive(Debug)]
enum Pack {
    Rows(Quantize),
    Groups(QuantizeGroup),
}

/// The kernels that write one side of a class.
#[derive(Debug)]
struct SideKernels {
    direct: Option<Quantize>,
    wait: Option<Quantize>,
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
/// recorded: a page that one step frees is used by later ones.
#[derive(Debug)]
pub struct KvCache {
    gpu: Gpu,
    book: Book,
    layers: Vec<LayerPools>,
    classes: Vec<ClassKernels>,
    tilings: [Tiling; 2],
    /// By the type of the outputs.
    merge: [OnceLock<AttentionMerge>; 2],
    amax: Amax,
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

/// What a device must offer for a cache, for `wgpu::DeviceDescriptor`.
#[derive(Debug, Clone, PartialEq)]
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
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let ratio = heads_ratio(spec.q_heads, spec.kv_heads)?;
        // Classes differ in formats; tiles depend on heads and channels alone.
        let tilings =
            [false, true].map(|prefill| Tiling::new(&geometry.classes[0].packed[K], ratio, prefill));
        let layers = spec.layers.len();
        let mut scales = vec![[0.0_f32; 2]; layers];
        if let TensorScales::Given(given) = &spec.tensor_scales {
            scales[..given.len()].copy_from_slice(given);
        }
        let numbers = layers as u64 * 2 * 4;
        Ok(KvCache {
            amax: Amax::plan(gpu)?,
            tensor_scale: TensorScale::plan(gpu, Element::E4m3)?,
            largest: gpu.zeros("largest magnitudes", numbers)?,
            observed: gpu.zeros("observed magnitudes", numbers)?,
            tensor_scales: gpu.upload("per-tensor scales", &scales)?,
            status: gpu.zeros("append status", 8)?,
            gpu: gpu.clone(),
            layers: vec![LayerPools::default(); layers],
            classes,
            tilings,
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

    /// Plans a step of new tokens for some sequences, for all layers alike. All or nothing.
    ///
    /// # Errors
    /// As [`Book::plan`]; [`Error::Limit`] and [`Error::Device`] where buffers cannot be made.
    pub fn step(&mut self, requests: &[(SequenceId, u32)]) -> Result<Step<'_>> {
        let plan = self.book.plan(requests, self.tilings[1].token_tile)?;
        match self.grow().and_then(|()| step::Lists::new(&self.gpu, &plan)) {
            Ok(lists) => Ok(Step::new(self, plan, lists)),
            Err(e) => {
                self.book.abandon(plan);
                Err(e)
            }
        }
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
        // With room to spare, so that decoding does not allocate at every step; at most 2^31.
        let capacity = needed.next_power_of_two().max(64);
        let o_bytes = u64::from(capacity) * u64::from(self.book.spec().v_head_dim) * 4;
        let made = Partials {
            capacity,
            o: self.gpu.zeros("attention partials", o_bytes)?,
            ml: self
                .gpu
                .zeros("attention partial sums", u64::from(capacity) * 8)?,
        };
        Ok(kept.insert(made).clone())
    }

    fn scratch(&self) -> Result<&wgpu::Buffer> {
        if let Some(buffer) = self.scratch.get() {
            return Ok(buffer);
        }
        let largest = self
            .book
            .pools()
            .map(|pool| pool.layout.bytes())
            .max()
            .unwrap_or(0);
        let made = self.gpu.zeros("a page on its way", largest)?;
        Ok(self.scratch.get_or_init(|| made))
    }

    fn merge(&self, output: FloatType) -> Result<&AttentionMerge> {
        let slot = &self.merge[output as usize];
        if let Some(kernel) = slot.get() {
            return Ok(kernel);
        }
        let spec = self.book.spec();
        let kernel = AttentionMerge::plan(&self.gpu, spec.q_heads, spec.v_head_dim, output)?;
        Ok(slot.get_or_init(|| kernel))
    }

    fn attention(&self, class: usize, kind: SegmentKind, q: FloatType) -> Result<&AttentionSplit> {
        let slot = &self.classes[class].attention[q as usize][kind.index()];
        if let Some(kernel) = slot.get() {
            return Ok(kernel);
        }
        let geometry = &self.book.geometry().classes[class];
        let (k, v) = (geometry.page(K, kind.k_waits), geometry.page(V, kind.v_waits));
        let tiling = self.tilings[usize::from(kind.prefill)];
        let kernel = AttentionSplit::plan(&self.gpu, &k, &v, self.book.spec().q_heads, tiling, q)?;
        Ok(slot.get_or_init(|| kernel))
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
        let (buffer, number) = self.book.locate(page.pool, page.page);
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
    /// does not block. `restore` takes the bytes, in this cache or another of the same spec.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Usage`] where per-tensor scales come from rows; [`Error::Device`].
    pub fn save(&self, id: SequenceId) -> Result<impl Future<Output = Result<Vec<u8>>> + use<>> {
        let head = saved::head(&self.book, id)?;
        let words = self.words_of(self.book.held_pages(id)?)?;
        Ok(async move { Ok(saved::finish(head, &words.await?)) })
    }

    /// A new sequence from saved bytes; the pages are written before the next submission. All or nothing.
    ///
    /// # Errors
    /// [`Error::Restore`] for bytes that are damaged or from a cache of another spec; [`Error::CacheFull`];
    /// [`Error::Usage`] as [`KvCache::save`]; [`Error::Device`].
    pub fn restore(&mut self, bytes: &[u8]) -> Result<SequenceId> {
        let (id, words) = self.book.restore(bytes)?;
        let written = self.grow().and_then(|()| self.write(id, &words));
        if let Err(e) = written {
            self.book.free(id)?;
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
        direct: match waits {
            true => None,
            false => Some(Quantize::plan(gpu, page, &Source::F32)?),
        },
        wait: match &class.waiting[s] {
            None => None,
            Some(waiting) => Some(Quantize::plan(gpu, waiting, &Source::F32)?),
        },
        pack: class.waiting[s].filter(|_| waits).map(pack).transpose()?,
        scale_from_rows: match from_rows {
            true => Some(TensorScale::plan(gpu, page.side.element)?),
            false => None,
        },
    })
}
