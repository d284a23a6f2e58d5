//! One step, recorded: appends and attention of every layer, then a commit.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use super::plan::{AttentionPlan, Runs, Segment, StepPlan};
use super::spec::{K, V};
use super::{KvCache, Pack, Partials, built};
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::kernels::amax::{self, Amax};
use crate::kernels::attention_merge::check_sinks;
use crate::kernels::{Outputs, RowStrides, Rows};
use crate::kernels::{attention_split, quantize, tensor_scale};
use crate::options::{AttentionOptions, Reach};

/// Uploaded runs, by the buffers that they come from and go to, and their number.
type RunLists = Vec<([u32; 2], wgpu::Buffer, u32)>;

/// What one round writes on one side.
#[derive(Debug)]
struct RoundLists {
    direct: RunLists,
    wait: RunLists,
    pack: RunLists,
}

/// The buffers of one step in the layers of one class.
#[derive(Debug)]
struct ClassLists {
    /// K and V.
    rounds: [Vec<RoundLists>; 2],
    table: wgpu::Buffer,
    /// By how far queries see: layers may differ. Each is made when it is first needed.
    attention: Mutex<BTreeMap<Reach, Arc<AttentionLists>>>,
}

/// The buffers of one step.
#[derive(Debug)]
pub(super) struct Lists(Vec<ClassLists>);

impl Lists {
    pub(super) fn new(gpu: &Gpu, plan: &StepPlan) -> Result<Lists> {
        let runs = |what: &str, runs: &Runs| -> Result<RunLists> {
            let runs = runs.iter().filter(|(_, runs)| !runs.is_empty());
            runs.map(|(&buffers, runs)| Ok((buffers, gpu.upload(what, runs)?, runs.len() as u32)))
                .collect()
        };
        let mut classes = Vec::new();
        for class in &plan.classes {
            let side = |s: usize| -> Result<Vec<RoundLists>> {
                let rounds = class.rounds[s].iter();
                rounds
                    .map(|round| {
                        Ok(RoundLists {
                            direct: runs("direct runs", &round.direct)?,
                            wait: runs("waiting runs", &round.wait)?,
                            pack: runs("pack runs", &round.pack)?,
                        })
                    })
                    .collect()
            };
            classes.push(ClassLists {
                rounds: [side(K)?, side(V)?],
                table: gpu.upload("page table", &class.table)?,
                attention: Mutex::default(),
            });
        }
        Ok(Lists(classes))
    }
}

/// The buffers of attention with one reach.
#[derive(Debug)]
struct AttentionLists {
    waves: Vec<WaveLists>,
    partials: Partials,
}

#[derive(Debug)]
struct WaveLists {
    /// Work items and their number, by dispatch.
    items: Vec<(Segment, wgpu::Buffer, u32)>,
    merges: wgpu::Buffer,
    /// Query tokens.
    tokens: u32,
}

impl AttentionLists {
    fn new(cache: &KvCache, plan: &AttentionPlan) -> Result<AttentionLists> {
        let waves = plan.waves.iter().map(|wave| {
            let items = wave.segments.iter().map(|(&segment, items)| {
                let buffer = cache.gpu.upload("work items", items)?;
                Ok((segment, buffer, items.len() as u32))
            });
            Ok(WaveLists {
                items: items.collect::<Result<_>>()?,
                merges: cache.gpu.upload("merges", &wave.merges)?,
                tokens: wave.merges.len() as u32,
            })
        });
        Ok(AttentionLists {
            waves: waves.collect::<Result<_>>()?,
            partials: cache.partials(plan.partials())?,
        })
    }
}

/// A planned step. Commands are recorded layer by layer, then the step is committed; dropped, it is taken back, even
/// where its commands have been submitted.
#[derive(Debug)]
pub struct Step<'a> {
    cache: &'a mut KvCache,
    plan: Option<StepPlan>,
    lists: Lists,
    /// Layers whose append has been recorded.
    appended: Mutex<BTreeSet<u32>>,
}

impl<'a> Step<'a> {
    pub(super) fn new(cache: &'a mut KvCache, plan: StepPlan, lists: Lists) -> Step<'a> {
        Step {
            cache,
            plan: Some(plan),
            lists,
            appended: Mutex::default(),
        }
    }
}

impl Step<'_> {
    /// The cache, for reading.
    pub fn cache(&self) -> &KvCache {
        self.cache
    }

    /// What the step does, in integers. None only while it ends.
    pub fn plan(&self) -> Option<&StepPlan> {
        self.plan.as_ref()
    }

    /// Rows of k, v and q: new tokens of all sequences, in the order of the requests.
    pub fn tokens(&self) -> u32 {
        self.plan.as_ref().map_or(0, |plan| plan.tokens)
    }

    /// Records the append of rows to a layer: each side a buffer of f32, or [`Rows`] of either type with an offset and
    /// strides. f16 rows give the bits that the same numbers give as f32.
    ///
    /// Rows of k are [`Step::tokens`] x kv_heads x k_head_dim, of v x v_head_dim. Keys are stored as they come and positions
    /// are not encoded here: rotate k (and q) first, by positions that begin at the length that the sequence had before.
    ///
    /// # Errors
    /// [`Error::Shape`] for a layer that does not exist; [`Error::Usage`] for one that this step has appended to already;
    /// those of [`Rows::check`]; [`Error::Limit`]; [`Error::Shader`] where the driver refuses a kernel; [`Error::Device`]
    /// where the device does, as for a buffer that was destroyed: then the encoder cannot be finished.
    pub fn append<'b>(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        layer: u32,
        k: impl Into<Rows<'b>>,
        v: impl Into<Rows<'b>>,
    ) -> Result<()> {
        let Some(plan) = &self.plan else { return Ok(()) };
        let sides = [k.into(), v.into()];
        self.check_rows(layer, sides)?;
        let mut appended = self.appended.lock().unwrap_or_else(PoisonError::into_inner);
        if appended.contains(&layer) {
            return Err(Error::Usage {
                asked: format!("to append to layer {layer}"),
                reason: "this step has done so already".to_owned(),
                advice: "append to each layer once a step".to_owned(),
            });
        }
        self.cache.gpu.checked("an append", || {
            self.copy_pages(plan, encoder, layer)?;
            let mut pass = encoder.begin_compute_pass(&Default::default());
            let mut sides = sides.into_iter().enumerate();
            sides.try_for_each(|(s, rows)| self.append_side(plan, &mut pass, layer, s, rows))
        })??;
        appended.insert(layer);
        Ok(())
    }

    /// Pages that other sequences hold too, before this step writes to them. Through a scratch buffer: WebGPU copies
    /// nothing within one.
    fn copy_pages(&self, plan: &StepPlan, encoder: &mut wgpu::CommandEncoder, layer: u32) -> Result<()> {
        let cache = &*self.cache;
        let class = cache.book.geometry().class_index(layer)?;
        for copy in &plan.classes[class].copies {
            let page = cache.book.geometry().classes[class].page(copy.side, copy.waiting);
            let buffer = |number| cache.buffer(layer, copy.side, copy.waiting, number);
            let scratch = cache.scratch()?;
            let bytes = page.bytes();
            let at = |page: u32| u64::from(page) * bytes;
            encoder.copy_buffer_to_buffer(buffer(copy.from.0)?, at(copy.from.1), scratch, 0, bytes);
            encoder.copy_buffer_to_buffer(scratch, 0, buffer(copy.to.0)?, at(copy.to.1), bytes);
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
        let cache = &*self.cache;
        let gpu = &cache.gpu;
        let class = cache.book.geometry().class_index(layer)?;
        let page = cache.book.geometry().classes[class].packed[s];
        let kernels = &cache.classes[class].sides[s];
        let tensor = layer * 2 + s as u32;
        if let Some(kernel) = &kernels.scale_from_rows {
            self.largest_of(plan, pass, layer, (s, rows), &cache.largest)?;
            let params = tensor_scale::Params {
                first: tensor,
                slots: 1,
            };
            kernel.encode(gpu, pass, [&cache.largest, &cache.tensor_scales], params)?;
        }
        let (strides, dense) = (
            rows.row_strides(page.heads, page.head_dim),
            RowStrides::dense(&page),
        );
        let buffer = |waiting, number| cache.buffer(layer, s, waiting, number);
        let buffers = |source, runs, pages| quantize::Buffers {
            source,
            runs,
            tensor_scales: &cache.tensor_scales,
            pages,
            status: &cache.status,
        };
        for round in &self.lists.0[class].rounds[s] {
            for (kernel, lists, waiting) in [
                (&kernels.direct, &round.direct, false),
                (&kernels.wait, &round.wait, true),
            ] {
                let Some(kernel) = kernel else { continue };
                for ([_, to], runs, count) in lists {
                    let b = buffers(rows.buffer, runs, buffer(waiting, *to)?);
                    kernel
                        .kernel(gpu, rows.float)?
                        .encode(gpu, pass, &b, *count, strides, tensor)?;
                }
            }
            for ([from, to], runs, count) in &round.pack {
                let b = buffers(buffer(true, *from)?, runs, buffer(false, *to)?);
                match &kernels.pack {
                    Some(Pack::Rows(kernel)) => kernel.encode(gpu, pass, &b, *count, dense, tensor)?,
                    Some(Pack::Groups(kernel)) => kernel.encode(gpu, pass, &b, *count)?,
                    None => {}
                }
            }
        }
        Ok(())
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
        let page = cache.book.geometry().class(layer)?.packed[s];
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
    /// [`Error::Shape`] for a layer that does not exist; those of [`Rows::check`]; [`Error::Limit`]; [`Error::Shader`];
    /// [`Error::Device`] as [`Step::append`].
    pub fn calibrate<'b>(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        layer: u32,
        k: impl Into<Rows<'b>>,
        v: impl Into<Rows<'b>>,
    ) -> Result<()> {
        let Some(plan) = &self.plan else { return Ok(()) };
        let (k, v) = (k.into(), v.into());
        self.check_rows(layer, [k, v])?;
        self.cache.gpu.checked("a calibration", || {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            self.largest_of(plan, &mut pass, layer, (K, k), &self.cache.observed)?;
            self.largest_of(plan, &mut pass, layer, (V, v), &self.cache.observed)
        })?
    }

    /// Records attention of a layer: queries, a buffer of f32 or [`Rows`] whose offset and strides are multiples of 4
    /// elements, into a buffer of f32 or [`Outputs`], with the LSE where it is asked for. Layers may differ in their
    /// options.
    ///
    /// Rows of q are [`Step::tokens`] x q_heads x k_head_dim, of outputs x v_head_dim. Each query attends to its own
    /// sequence, with the tokens of this step in it: the newest as they are stored, so packed where they do not wait.
    ///
    /// # Errors
    /// Those of [`AttentionOptions::check`], [`Rows::check`] and [`Outputs::check`]; [`Error::Shape`] for a layer that does
    /// not exist; [`Error::Usage`] before the layer's append, for queries at other offsets, and for outputs over the
    /// queries; [`Error::Limit`]; [`Error::Shader`] where the driver refuses a kernel; [`Error::Device`] as [`Step::append`].
    pub fn attend<'b>(
        &self,
        encoder: &mut wgpu::CommandEncoder,
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
        let class = cache.book.geometry().class_index(layer)?;
        q.check("q bytes", plan.tokens, spec.q_heads, spec.k_head_dim)?;
        output.check(plan.tokens, spec.q_heads, spec.v_head_dim)?;
        let read = [Some(q.buffer), options.sinks].into_iter().flatten();
        let written = [Some(output.buffer), output.lse].into_iter().flatten();
        for buffer in read.clone().chain(written.clone()) {
            self.check_bound(buffer)?;
        }
        if read
            .clone()
            .any(|read| written.clone().any(|written| read == written))
        {
            return Err(Error::Usage {
                asked: "outputs over the queries or the sinks".to_owned(),
                reason: "a kernel reads the one and writes the other at once".to_owned(),
                advice: "pass a buffer of its own for the outputs, and for the LSE".to_owned(),
            });
        }
        let appended = self.appended.lock().unwrap_or_else(PoisonError::into_inner);
        if plan.tokens > 0 && !appended.contains(&layer) {
            return Err(Error::Usage {
                asked: format!("attention of layer {layer}"),
                reason: "this step has not appended to it, and a query sees its own token".to_owned(),
                advice: "append first".to_owned(),
            });
        }
        drop(appended);
        let lists = self.attention_lists(plan, class, options.reach())?;
        let partials = &lists.partials;
        cache.gpu.checked("an attention", || {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            for wave in &lists.waves {
                for (Segment { kind, buffers }, items, count) in &wave.items {
                    let buffers = attention_split::Buffers {
                        items,
                        page_table: &self.lists.0[class].table,
                        q: q.buffer,
                        q_rows: q.row_strides(spec.q_heads, spec.k_head_dim),
                        k_pages: cache.buffer(layer, K, kind.k_waits, buffers[K])?,
                        v_pages: cache.buffer(layer, V, kind.v_waits, buffers[V])?,
                        tensor_scales: &cache.tensor_scales,
                        k_turns: cache.layers.len() as u32 * 2,
                        partial_o: &partials.o,
                        partial_ml: &partials.ml,
                    };
                    let tensor = [layer * 2, layer * 2 + 1];
                    cache
                        .attention(class, *kind, q.float)?
                        .encode(&cache.gpu, &mut pass, &buffers, *count, options, tensor)?;
                }
                let merge = [&wave.merges, &partials.o, &partials.ml, output.buffer];
                cache.merge(output.float)?.encode(
                    &cache.gpu,
                    &mut pass,
                    merge,
                    output.lse,
                    options.sinks,
                    wave.tokens,
                )?;
            }
            Ok(())
        })?
    }

    fn attention_lists(&self, plan: &StepPlan, class: usize, reach: Reach) -> Result<Arc<AttentionLists>> {
        let mut made = self.lists.0[class]
            .attention
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(lists) = made.get(&reach) {
            return Ok(lists.clone());
        }
        let lists = Arc::new(AttentionLists::new(self.cache, &plan.attention(class, reach)?)?);
        made.insert(reach, lists.clone());
        Ok(lists)
    }

    /// Refuses a layer that the cache lacks, and rows of k and v that kernels cannot read.
    fn check_rows(&self, layer: u32, sides: [Rows<'_>; 2]) -> Result<()> {
        let class = self.cache.book.geometry().class(layer)?;
        for (s, rows) in sides.into_iter().enumerate() {
            let (what, page) = (["k bytes", "v bytes"][s], class.packed[s]);
            rows.check(what, self.tokens(), page.heads, page.head_dim)?;
            self.check_bound(rows.buffer)?;
        }
        Ok(())
    }

    /// Refuses a buffer that the device cannot bind whole.
    fn check_bound(&self, buffer: &wgpu::Buffer) -> Result<()> {
        let allowed = super::buffer_limit(&self.cache.gpu.device().limits());
        if buffer.size() <= allowed && buffer.size().is_multiple_of(4) {
            return Ok(());
        }
        Err(Error::Limit {
            what: "a caller's buffer (bytes, in words of 4)".to_owned(),
            needed: buffer.size(),
            allowed,
            advice: "pass a smaller buffer, or make the device with a larger maxStorageBufferBindingSize"
                .to_owned(),
        })
    }

    /// Makes the step part of the cache.
    ///
    /// # Errors
    /// [`Error::Usage`] where a layer was not appended to: its pages would hold nothing. Then the step is taken back.
    pub fn commit(mut self) -> Result<()> {
        let Some(plan) = self.plan.take() else {
            return Ok(());
        };
        let appended = std::mem::take(self.appended.get_mut().unwrap_or_else(PoisonError::into_inner));
        let missing = (0..self.cache.layers.len() as u32).find(|layer| !appended.contains(layer));
        if let Some(layer) = missing.filter(|_| plan.tokens > 0) {
            self.cache.book.abandon(plan);
            return Err(Error::Usage {
                asked: "the commit of a step".to_owned(),
                reason: format!("layer {layer} was not appended to"),
                advice: "record an append for every layer, then commit; the step has been taken back"
                    .to_owned(),
            });
        }
        self.cache.book.commit(plan)
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if let Some(plan) = self.plan.take() {
            self.cache.book.abandon(plan);
        }
    }
}
