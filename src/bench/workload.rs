//! What is timed: a cache filled on the GPU, and one pass of attention or appends over all of its layers.

use super::bytes::{Bytes, append_bytes, attention_bytes, live_bytes};
use super::check::{Place, compare};
use super::timer::{Samples, Timer};
use super::{Case, Sizes, Work, out_of_cache};
use crate::cache::plan::SegmentKind;
use crate::cache::{CacheSpec, K, KvCache, LayerSpec, MAX_LAYERS, SequenceId, Step, TensorScales, V};
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::kernels::Rows;
use crate::options::{AttentionOptions, Reach};
use crate::pages::heads_ratio;
use crate::reference::tensor_scale;
use crate::tuning;
use crate::validate::Random;
use crate::variant::Variant;

/// Tokens that are appended at a time while a cache is filled.
const FILL_TOKENS: u32 = 2048;
/// Random numbers, repeated from there on. A prime: no two rows are alike within a page.
const NUMBERS: usize = 1_000_003;
/// Elements by which the rows of different steps and layers are apart in their buffer.
const SHIFTS: u32 = 4096;

/// Seeded normal numbers; the same for every pair.
fn numbers(seed: u64, count: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    let some: Vec<f32> = (0..NUMBERS.min(count as usize))
        .map(|_| random.normal())
        .collect();
    some.into_iter().cycle().take(count as usize).collect()
}

/// A filled cache with everything that one pass reads and writes.
#[derive(Debug)]
pub struct Workload {
    gpu: Gpu,
    case: Case,
    cache: KvCache,
    requests: Vec<(SequenceId, u32)>,
    rows: [wgpu::Buffer; 2],
    q: wgpu::Buffer,
    output: wgpu::Buffer,
    tensor_scales: [f32; 2],
    bytes: Bytes,
    variant: Variant,
}

impl Workload {
    /// Makes and fills the cache: as many layers as it takes to read 4 times the assumed cache in a pass, within the
    /// memory. Then compares some outputs with f64 attention over the same pages.
    ///
    /// # Errors
    /// [`Error::Shape`] for a case that does not fit its pair or the kernels, [`Error::Usage`] for one whose layer takes more
    /// than the memory, [`Error::Mismatch`] where outputs are wrong, [`Error::Shader`], [`Error::Device`].
    pub fn new(gpu: &Gpu, case: &Case, sizes: &Sizes) -> Result<Workload> {
        let spec = sized(case, sizes)?;
        let layers = spec.layers.len();
        let row = u64::from(spec.kv_heads) * u64::from(spec.k_head_dim);
        let new = u64::from(case.batch) * u64::from(case.new_tokens);
        let tokens = new.max(u64::from(FILL_TOKENS.min(case.context)));
        let elements = tokens * row + u64::from(SHIFTS);
        let rows = [numbers(1, elements), numbers(2, elements)];
        let amax = |rows: &[f32]| rows.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
        let sides = [case.pair.k, case.pair.v];
        let tensor_scales = [K, V].map(|s| tensor_scale(sides[s].element, amax(&rows[s])));
        let spec = CacheSpec {
            tensor_scales: TensorScales::Given(vec![tensor_scales; layers]),
            ..spec
        };
        let queries = new * u64::from(spec.q_heads) * u64::from(spec.k_head_dim);
        let mut cache = KvCache::new(gpu, spec)?;
        let variant = cache.variant(0, packed(case.new_tokens > 1))?;
        let requests = (0..case.batch).map(|_| (cache.open(), case.new_tokens)).collect();
        let mut workload = Workload {
            gpu: gpu.clone(),
            case: *case,
            cache,
            requests,
            rows: [gpu.upload("k", &rows[K])?, gpu.upload("v", &rows[V])?],
            q: gpu.upload("q", &numbers(3, queries))?,
            output: gpu.zeros("output", queries * 4)?,
            tensor_scales,
            bytes: Bytes::default(),
            variant,
        };
        workload.fill()?;
        workload.check()?;
        Ok(workload)
    }

    /// Layers of the cache.
    pub fn layers(&self) -> u32 {
        self.cache.book().spec().layers.len() as u32
    }

    /// Bytes that one layer of a pass moves.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// How often a pass reads the pages: more than once where the query heads of a KV head take several workgroups.
    pub fn times_read(&self) -> u32 {
        let spec = self.cache.book().spec();
        (spec.q_heads / spec.kv_heads).div_ceil(self.variant.head_tile)
    }

    /// How attention runs.
    pub fn variant(&self) -> Variant {
        self.variant
    }

    fn fill(&mut self) -> Result<()> {
        let before = self.case.context - self.case.new_tokens;
        let mut shift = 0;
        for number in 0..self.requests.len() {
            let id = self.requests[number].0;
            for first in (0..before).step_by(FILL_TOKENS as usize) {
                let step = self.cache.step(&[(id, FILL_TOKENS.min(before - first))])?;
                shift += 1;
                append(&self.gpu, &step, &self.rows, shift)?;
                step.commit()?;
            }
        }
        let status = self.gpu.block_on(self.cache.status()?)?;
        match status.non_finite {
            0 => Ok(()),
            count => Err(Error::NonFiniteRows {
                pair: self.case.pair.to_string(),
                count: u64::from(count),
            }),
        }
    }

    /// Attention of some layers, sequences and heads against f64 over the same pages.
    fn check(&mut self) -> Result<()> {
        let (layers, times, case) = (self.layers(), self.times_read(), self.case);
        let arithmetic = self.variant.arithmetic.for_side(case.pair.k);
        let Workload {
            gpu,
            cache,
            requests,
            rows,
            q,
            output,
            ..
        } = self;
        let step = cache.step(requests)?;
        append(gpu, &step, rows, 0)?;
        let spec = step.cache().book().spec();
        let dim = spec.k_head_dim as usize;
        let last = step.tokens().saturating_sub(1);
        // The last tokens of the first and of the last sequence: they see the most.
        let first = case.new_tokens - 1;
        let (heads, ratio) = (spec.q_heads, spec.q_heads / spec.kv_heads);
        let places = [
            (0, first, 0),
            (layers / 2, last, heads / 2),
            (layers - 1, last, heads - ratio),
        ];
        for (layer, row, head) in places {
            let place = Place { layer, row, head };
            gpu.submit("attention", |encoder| {
                step.attend(encoder, layer, &*q, &*output, &AttentionOptions::default())
            })?;
            let at = (u64::from(row) * u64::from(heads) + u64::from(head)) * dim as u64 * 4;
            let range = at..at + dim as u64 * 4;
            let read = gpu.read_back("outputs", &[(&*q, range.clone()), (&*output, range)])?;
            let words: Vec<f32> = gpu.block_on(read)?.into_iter().map(f32::from_bits).collect();
            let compared = compare(
                gpu,
                &step,
                place,
                words.split_at(dim),
                self.tensor_scales,
                arithmetic,
            )?;
            if compared.failures > 0 || compared.cases == 0 {
                return Err(Error::Mismatch {
                    what: format!("{} attention, layer {layer}, query head {head}", case.pair),
                    error: compared.max_error,
                    bound: compared.bound,
                });
            }
        }
        let Some(plan) = step.plan() else { return Ok(()) };
        let class = &step.cache().book().geometry().classes[0];
        self.bytes = match case.work {
            Work::Append => append_bytes(class, plan, 0),
            Work::Decode | Work::Prefill => {
                let attention = plan.attention(0, Reach::default())?;
                attention_bytes(class, &plan.classes[0].table, &attention, (heads, times))
            }
        };
        Ok(())
    }

    /// What the measurement of this workload holds for.
    pub fn tuned_shape(&self) -> tuning::Shape {
        let spec = self.cache.book().spec();
        let [k, v] = &self.cache.book().geometry().classes[0].packed;
        tuning::Shape::new([k, v], spec.q_heads / spec.kv_heads, self.case.new_tokens > 1)
    }

    /// Whether a variant can serve this workload.
    pub fn fits(&self, variant: Variant) -> bool {
        let [k, v] = &self.cache.book().geometry().classes[0].packed;
        variant.check([k, v]).is_ok()
    }

    /// Runs attention by another variant from now on, once its outputs are right.
    ///
    /// # Errors
    /// Those of [`Variant::check`]; [`Error::Mismatch`] where outputs are wrong, [`Error::Shader`], [`Error::Device`].
    pub fn set_variant(&mut self, variant: Variant) -> Result<()> {
        let prefill = self.case.new_tokens > 1;
        self.cache.force_variant(0, prefill, variant);
        self.variant = self.cache.variant(0, packed(prefill))?;
        self.check()
    }

    /// Hands `with` what records one pass over all layers, any number of times. The step of a pass is never committed.
    ///
    /// # Errors
    /// Those of [`KvCache::step`] and [`Step::append`].
    pub fn timed<T>(
        &mut self,
        with: impl FnOnce(&mut dyn FnMut(&mut wgpu::CommandEncoder) -> Result<()>) -> T,
    ) -> Result<T> {
        let layers = self.layers();
        let Workload {
            gpu,
            case,
            cache,
            requests,
            rows,
            q,
            output,
            ..
        } = self;
        if case.work == Work::Append {
            // A step appends once to a layer: each pass is a step of its own.
            return Ok(with(&mut |encoder| {
                let step = cache.step(requests)?;
                (0..layers).try_for_each(|layer| step.append(encoder, layer, &rows[K], &rows[V]))
            }));
        }
        let step = cache.step(requests)?;
        append(gpu, &step, rows, 0)?;
        let options = AttentionOptions::default();
        Ok(with(&mut |encoder| {
            (0..layers).try_for_each(|layer| step.attend(encoder, layer, &*q, &*output, &options))
        }))
    }

    /// Times passes for about so many seconds. Samples are of all layers.
    ///
    /// # Errors
    /// As [`Workload::timed`] and [`Timer::sample`].
    pub fn measure(&mut self, timer: &Timer, seconds: f64) -> Result<Samples> {
        self.timed(|record| timer.sample(seconds, record))?
    }
}

/// The cache of a case: layers by its bytes, pages for its tokens.
fn sized(case: &Case, sizes: &Sizes) -> Result<CacheSpec> {
    let shape = case.shape;
    let one = CacheSpec::new(1, shape.q_heads, shape.kv_heads, shape.head_dim, case.pair, 0);
    let one = CacheSpec {
        sequences: case.batch,
        // Known when the rows are.
        tensor_scales: TensorScales::FromRows,
        ..one
    };
    let geometry = one.geometry()?;
    heads_ratio(shape.q_heads, shape.kv_heads)?;
    let pages = u64::from(case.batch) * u64::from(case.context.div_ceil(one.page_tokens));
    let layer = geometry.bytes(pages);
    let allowed = sizes.memory / layer.max(1);
    if allowed == 0 || pages > u64::from(u32::MAX) {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        return Err(Error::Usage {
            asked: format!("{} sequences of {} tokens", case.batch, case.context),
            reason: format!(
                "one layer takes {} MiB, more than the {} MiB of memory allowed",
                mib(layer),
                mib(sizes.memory)
            ),
            advice: "allow more memory, or measure fewer tokens".to_owned(),
        });
    }
    let touched = match case.work {
        Work::Decode | Work::Prefill => case.context,
        Work::Append => case.new_tokens,
    };
    let packed = geometry.classes[0].packed.iter();
    let bytes: u64 = packed
        .map(|page| {
            let (codes, scales) = live_bytes(page, 0, touched);
            u64::from(case.batch) * (codes + scales)
        })
        .sum();
    let wanted = match case.work {
        // Its time is arithmetic, for any number of layers.
        Work::Prefill => 1,
        Work::Decode | Work::Append => out_of_cache(sizes.cache_bytes).div_ceil(bytes.max(1)),
    };
    let layers = wanted.min(allowed).clamp(1, u64::from(MAX_LAYERS));
    let spec = CacheSpec {
        layers: vec![LayerSpec::new(case.pair); layers as usize],
        ..one
    };
    spec.with_pages(pages as u32)
}

/// Tokens that are packed on both sides.
fn packed(prefill: bool) -> SegmentKind {
    SegmentKind {
        k_waits: false,
        v_waits: false,
        prefill,
    }
}

/// Appends random rows to all layers; `shift` tells steps apart.
fn append(gpu: &Gpu, step: &Step<'_>, rows: &[wgpu::Buffer; 2], shift: u32) -> Result<()> {
    let layers = step.cache().book().spec().layers.len() as u32;
    gpu.submit("appending", |encoder| {
        (0..layers).try_for_each(|layer| {
            let at = (shift.wrapping_mul(37) + layer * 5) % SHIFTS;
            let [k, v] = [K, V].map(|s| Rows::from(&rows[s]).at(at));
            step.append(encoder, layer, k, v)
        })
    })
}
