//! Attention on made-up sequences: the same pages, page table and queries for the GPU, the CPU reference and a plain f32
//! attention whose error sets the bound.

use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::kernels::attention_merge::AttentionMerge;
use crate::kernels::attention_split::{AttentionSplit, Buffers};
use crate::kernels::{FloatType, Rows};
use crate::options::AttentionOptions;
use crate::pages::{PageLayout, heads_ratio};
use crate::reference::{self, AttentionShape, Partials};
use crate::variant::{Arithmetic, Variant};
use crate::work::{Merge, SlotRun, Status, TableEntry, WorkItem, slot_runs};

use super::Random;

/// What attention in f32 may be off by beside its plain error, as a share of the largest value: exp is up to 26 ulp off on
/// software drivers.
pub const SLACK: f64 = 4e-6;

/// One sequence: its rows and the queries that attend to them.
#[derive(Debug, Clone, Default)]
pub struct SequenceInput {
    /// Keys, `[token][head][channel]`.
    pub k: Vec<f32>,
    /// Values, `[token][head][channel]`.
    pub v: Vec<f32>,
    /// Queries, `[token][query head][channel]`: the last tokens of the sequence, or any number where it is empty.
    pub q: Vec<f32>,
}

/// Sequences in packed pages, with everything that attention reads.
#[derive(Debug, Clone)]
pub struct Fixture {
    /// Geometry of K pages.
    pub k: PageLayout,
    /// Geometry of V pages.
    pub v: PageLayout,
    /// Query heads.
    pub q_heads: u32,
    /// Mask, soft cap, scale and sinks; the default at first.
    pub options: AttentionOptions<Vec<f32>>,
    /// The type in which the GPU reads queries. f16 rounds them for all alike.
    pub q_float: FloatType,
    /// The type in which the GPU writes outputs.
    pub output_float: FloatType,
    /// Words of the K pool; dead slots are poisoned.
    pub k_pages: Vec<u32>,
    /// Words of the V pool; dead slots are poisoned.
    pub v_pages: Vec<u32>,
    /// Per-tensor scales of K and V.
    pub tensor_scales: [f32; 2],
    /// Work items, page table, merges.
    pub items: Vec<WorkItem>,
    /// The page table.
    pub table: Vec<TableEntry>,
    /// One entry a query token.
    pub merges: Vec<Merge>,
    /// Partials in all.
    pub partials: u32,
    /// Queries of all sequences, `[token][query head][channel]`.
    pub q: Vec<f32>,
    /// Query tokens of one work item.
    pub token_tile: u32,
    /// How the kernel runs: None for what the adapter gets without a measurement.
    pub variant: Option<Variant>,
}

/// What attention gave.
#[derive(Debug, Clone, Default)]
pub struct Outputs {
    /// `[token][query head][channel]`.
    pub output: Vec<f64>,
    /// `[token][query head]`.
    pub lse: Vec<f64>,
}

/// How outputs compare with the reference.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Comparison {
    /// Numbers compared.
    pub cases: u64,
    /// Largest error.
    pub max_error: f64,
    /// Its bound.
    pub bound: f64,
    /// Numbers beyond the bound, or not finite.
    pub failures: u64,
}

impl Default for Comparison {
    /// Nothing compared.
    fn default() -> Comparison {
        Comparison {
            cases: 0,
            max_error: 0.0,
            bound: f64::MIN_POSITIVE,
            failures: 0,
        }
    }
}

impl Comparison {
    /// The largest error as a share of its bound.
    pub fn share(&self) -> f64 {
        self.max_error / self.bound
    }

    /// Takes one number in: it fails beyond its bound, and where it is NaN.
    pub fn judge(&mut self, error: f64, bound: f64) {
        let bound = bound.max(f64::MIN_POSITIVE);
        let failures = u64::from(!(error <= bound));
        self.join(Comparison {
            cases: 1,
            max_error: error,
            bound,
            failures,
        });
    }

    /// Takes another comparison in.
    pub fn join(&mut self, other: Comparison) {
        self.cases += other.cases;
        self.failures += other.failures;
        // A NaN is the worst of all and stays.
        if !self.share().is_nan() && !(other.share() <= self.share()) {
            (self.max_error, self.bound) = (other.max_error, other.bound);
        }
    }
}

impl Fixture {
    /// Packs sequences into pages in shuffled order, with the reference, poisons dead slots, and plans attention with
    /// splits of `split_tokens` (a multiple of the page).
    ///
    /// # Errors
    /// [`Error::Shape`] for a head ratio that does not fit, or splits that are not whole pages.
    pub fn new(
        [k, v]: [PageLayout; 2],
        q_heads: u32,
        sequences: &[SequenceInput],
        split_tokens: u32,
        prefill: bool,
    ) -> Result<Fixture> {
        let ratio = heads_ratio(q_heads, k.heads)?;
        if split_tokens == 0 || !split_tokens.is_multiple_of(k.tokens) {
            return Err(Error::Shape {
                what: "split_tokens",
                value: u64::from(split_tokens),
                limit: format!("a split is whole pages of {} tokens", k.tokens),
                advice: "use a multiple of the page".to_owned(),
            });
        }
        // What both kinds of adapters can take.
        let token_tile = [false, true]
            .map(|software| Variant::new([&k, &v], ratio, prefill, software).token_tile)
            .into_iter()
            .fold(u32::MAX, u32::min);
        let row = |page: &PageLayout| (page.heads * page.head_dim) as usize;
        let lengths: Vec<u32> = sequences.iter().map(|s| (s.k.len() / row(&k)) as u32).collect();
        let count: u32 = lengths.iter().map(|len| len.div_ceil(k.tokens)).sum::<u32>() + 1;
        let mut random = Random::new(u64::from(count));
        let mut orders = [0, 1].map(|_| random.permutation(count));
        let pools = [&k, &v].map(|page| vec![0xffff_ffff_u32; (page.words * count) as usize]);
        let mut fixture = Fixture {
            k,
            v,
            q_heads,
            options: AttentionOptions::default(),
            q_float: FloatType::F32,
            output_float: FloatType::F32,
            k_pages: Vec::new(),
            v_pages: Vec::new(),
            tensor_scales: [0.0; 2],
            items: Vec::new(),
            table: Vec::new(),
            merges: Vec::new(),
            partials: 0,
            q: sequences.iter().flat_map(|s| s.q.iter().copied()).collect(),
            token_tile,
            variant: None,
        };
        let [mut k_pages, mut v_pages] = pools;
        let all = |pick: fn(&SequenceInput) -> &Vec<f32>| {
            reference::amax(sequences.iter().flat_map(|s| pick(s).iter().copied()), 0.0)
        };
        fixture.tensor_scales = [(k, all(|s| &s.k)), (v, all(|s| &s.v))]
            .map(|(page, amax)| reference::tensor_scale(page.side.element, amax));
        for (sequence, &len) in sequences.iter().zip(&lengths) {
            let pages = len.div_ceil(k.tokens);
            let [k_ids, v_ids] = [0, 1].map(|s| orders[s].split_off(orders[s].len() - pages as usize));
            pack(&k, &k_ids, &sequence.k, fixture.tensor_scales[0], &mut k_pages);
            pack(&v, &v_ids, &sequence.v, fixture.tensor_scales[1], &mut v_pages);
            let queries = (sequence.q.len() / (q_heads * k.head_dim) as usize) as u32;
            fixture.plan(&k_ids, &v_ids, len, queries, split_tokens);
        }
        (fixture.k_pages, fixture.v_pages) = (k_pages, v_pages);
        Ok(fixture)
    }

    fn plan(&mut self, k_ids: &[u32], v_ids: &[u32], len: u32, queries: u32, split_tokens: u32) {
        let page = self.k.tokens;
        let first_query = self.merges.len() as u32;
        let first_position = len.saturating_sub(queries);
        for first in (0..queries).step_by(self.token_tile as usize) {
            let tile = self.token_tile.min(queries - first);
            let (base, stride) = (self.partials, tile * self.q_heads);
            let mut count = 0;
            for start in (0..len).step_by(split_tokens as usize) {
                let end = (start + split_tokens).min(len);
                let table = self.table.len() as u32;
                for place in start / page..end.div_ceil(page) {
                    self.table.push(TableEntry {
                        k_page: k_ids[place as usize],
                        v_page: v_ids[place as usize],
                        first: 0,
                        last: (end - place * page).min(page),
                    });
                }
                self.items.push(WorkItem {
                    table,
                    pages: self.table.len() as u32 - table,
                    position: start,
                    query: first_query + first,
                    queries: tile,
                    query_position: first_position + first,
                    partial: base + count * stride,
                });
                count += 1;
            }
            self.partials += count * stride;
            for t in 0..tile {
                let row = first_query + first + t;
                self.merges.push(Merge {
                    first: base + t * self.q_heads,
                    stride,
                    count,
                    row,
                });
            }
        }
    }

    /// What scores are computed in.
    fn arithmetic(&self) -> Arithmetic {
        self.variant.map_or(Arithmetic::F32, |variant| {
            variant.arithmetic.for_side(self.k.side)
        })
    }

    /// The queries as attention reads them.
    fn queries(&self) -> Vec<f32> {
        let rounded = |&x: &f32| match self.q_float {
            FloatType::F32 => x,
            FloatType::F16 => half::f16::from_f32(x).to_f32(),
        };
        let q: Vec<f32> = self.q.iter().map(rounded).collect();
        let rows = q.chunks(self.k.head_dim as usize);
        rows.flat_map(|row| self.arithmetic().round_query(row)).collect()
    }

    /// The CPU reference's answer, in f64.
    pub fn reference(&self) -> Outputs {
        let shape = AttentionShape {
            k: self.k,
            v: self.v,
            q_heads: self.q_heads,
            options: self.options.map_sinks(Vec::as_slice),
            k_tensor_scale: self.tensor_scales[0],
            v_tensor_scale: self.tensor_scales[1],
            key_rotation: None,
        };
        let q: Vec<f64> = self.queries().into_iter().map(f64::from).collect();
        let mut partials = Partials::new(self.partials as usize, self.v.head_dim);
        reference::attention_split(
            &shape,
            &self.items,
            &self.table,
            &q,
            &self.k_pages,
            &self.v_pages,
            &mut partials,
        );
        let rows = self.merges.len() * self.q_heads as usize;
        let mut outputs = Outputs {
            output: vec![0.0; rows * self.v.head_dim as usize],
            lse: vec![0.0; rows],
        };
        reference::attention_merge(
            &self.merges,
            self.q_heads,
            self.v.head_dim,
            shape.options.sinks,
            &partials,
            &mut outputs.output,
            &mut outputs.lse,
        );
        outputs
    }

    /// The GPU's answer. The output buffer is filled with NaN before.
    ///
    /// # Errors
    /// What the kernels and the device report.
    pub fn gpu(&self, gpu: &Gpu) -> Result<Outputs> {
        let ratio = heads_ratio(self.q_heads, self.k.heads)?;
        let variant = self.variant.unwrap_or_else(|| {
            Variant::new(
                [&self.k, &self.v],
                ratio,
                self.token_tile > 1,
                gpu.summary().software,
            )
        });
        let variant = Variant {
            token_tile: self.token_tile,
            ..variant
        };
        let split = AttentionSplit::plan(gpu, &self.k, &self.v, self.q_heads, variant, self.q_float)?;
        let merge = AttentionMerge::plan(gpu, self.q_heads, self.v.head_dim, self.output_float)?;
        let rows = self.merges.len() * self.q_heads as usize;
        let numbers = rows * self.v.head_dim as usize;
        let nan = |count: usize| vec![f32::NAN; count];
        let partials = self.partials as usize;
        let [items, table] = [
            gpu.upload("work items", &self.items)?,
            gpu.upload("page table", &self.table)?,
        ];
        let merges = gpu.upload("merges", &self.merges)?;
        let q = match self.q_float {
            FloatType::F32 => gpu.upload("q", &self.q)?,
            FloatType::F16 => {
                let bits = self.q.iter().map(|&x| half::f16::from_f32(x).to_bits());
                gpu.upload("q", &bits.collect::<Vec<u16>>())?
            }
        };
        let sinks = self.options.sinks.as_ref();
        let sinks = sinks.map(|sinks| gpu.upload("sinks", sinks)).transpose()?;
        let [k, v] = [
            gpu.upload("K pages", &self.k_pages)?,
            gpu.upload("V pages", &self.v_pages)?,
        ];
        let tensor_scales = gpu.upload("per-tensor scales", &self.tensor_scales)?;
        let partial_o = gpu.upload("partials", &nan(partials * self.v.head_dim as usize))?;
        let partial_ml = gpu.upload("partial sums", &nan(partials * 2))?;
        let [output, lse] = [
            gpu.upload("output", &nan(numbers))?,
            gpu.upload("lse", &nan(rows))?,
        ];
        gpu.submit("attention", |encoder| {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            let buffers = Buffers {
                items: &items,
                page_table: &table,
                q: &q,
                q_rows: Rows::from(&q).row_strides(self.q_heads, self.k.head_dim),
                k_pages: &k,
                v_pages: &v,
                tensor_scales: &tensor_scales,
                k_turns: 0,
                partial_o: &partial_o,
                partial_ml: &partial_ml,
            };
            split.encode(
                gpu,
                &mut pass,
                &buffers,
                self.items.len() as u32,
                &self.options,
                [0, 1],
            )?;
            let buffers = [&merges, &partial_o, &partial_ml, &output];
            let tokens = self.merges.len() as u32;
            merge.encode(gpu, &mut pass, buffers, Some(&lse), sinks.as_ref(), tokens)
        })?;
        let read = |what: &str, buffer: &wgpu::Buffer, count: usize| -> Result<Vec<f64>> {
            Ok(gpu
                .read::<f32>(what, buffer, count)?
                .into_iter()
                .map(f64::from)
                .collect())
        };
        let output = match self.output_float {
            FloatType::F32 => read("output", &output, numbers)?,
            FloatType::F16 => {
                let bits = gpu.read::<u16>("output", &output, numbers)?;
                let value = |bits| f64::from(half::f16::from_bits(bits).to_f32());
                bits.into_iter().map(value).collect()
            }
        };
        Ok(Outputs {
            output,
            lse: read("lse", &lse, rows)?,
        })
    }

    /// Compares with the reference. The bound of each query row is twice the error of a plain f32 attention over the same
    /// dequantised values plus 4e-6 x max|V|: exp is up to 26 ulp off on software drivers. The LSE may be off by as
    /// much relative to 1 + its magnitude. A soft cap leaves scores of up to its size, each with an error of some ulp, which
    /// moves every weight by as much; f16 outputs are rounded once more. Variants in other arithmetic than f32 may be off by
    /// [`Arithmetic::score_error`] in each score, and are compared with queries as they round them. NaN fails.
    pub fn compare(&self, got: &Outputs, reference: &Outputs) -> Comparison {
        let v_dim = self.v.head_dim as usize;
        let queries = self.queries();
        let mut comparison = Comparison::default();
        for row in 0..got.lse.len() {
            let plain = self.plain_f32(row, &queries);
            let wanted = &reference.output[row * v_dim..][..v_dim];
            let bound = plain.bound(wanted);
            for (a, b) in got.output[row * v_dim..].iter().zip(wanted) {
                let rounding = output_rounding(self.output_float, *b);
                comparison.judge((a - b).abs(), bound + rounding);
            }
            let (a, b) = (got.lse[row], reference.lse[row]);
            if a == b {
                comparison.judge(0.0, 1.0);
            } else {
                comparison.judge((a - b).abs(), plain.lse_bound(b));
            }
        }
        comparison
    }

    /// Plain attention of one query row in f32, over the dequantised values.
    fn plain_f32(&self, row: usize, queries: &[f32]) -> Plain {
        let (token, head) = (row / self.q_heads as usize, row as u32 % self.q_heads);
        let kv_head = head / (self.q_heads / self.k.heads);
        let k_dim = self.k.head_dim as usize;
        let q = &queries[row * k_dim..][..k_dim];
        let options = &self.options;
        let words = |pages: &[u32], id: u32, page: &PageLayout| {
            let at = (id * page.words) as usize;
            pages[at..at + page.words as usize].to_vec()
        };
        let mut seen = Vec::new();
        for item in &self.items {
            let tokens = item.query as usize..(item.query + item.queries) as usize;
            if !tokens.contains(&token) {
                continue;
            }
            let own = item.query_position + (token as u32 - item.query);
            for i in 0..item.pages {
                let entry = self.table[(item.table + i) as usize];
                let k_page = words(&self.k_pages, entry.k_page, &self.k);
                let v_page = words(&self.v_pages, entry.v_page, &self.v);
                for slot in entry.first..entry.last {
                    let at = item.position + i * self.k.tokens + slot;
                    let early = options.window.is_some_and(|w| at.saturating_add(w) <= own);
                    if early || options.causal && at > own {
                        continue;
                    }
                    let k = |c| self.k.number(&k_page, slot, kv_head, c, self.tensor_scales[0]);
                    let key: Vec<f32> = (0..self.k.head_dim).map(k).collect();
                    let v = |c| self.v.number(&v_page, slot, kv_head, c, self.tensor_scales[1]);
                    let value: Vec<f32> = (0..self.v.head_dim).map(v).collect();
                    seen.push((key, value));
                }
            }
        }
        let sink = options.sinks.as_ref().map(|sinks| sinks[head as usize]);
        Plain::new(q, &seen, (options, sink), (self.arithmetic(), self.v.head_dim))
    }
}

/// Plain attention of one query row in f32.
pub(crate) struct Plain {
    output: Vec<f32>,
    /// Largest magnitude of the values.
    max_v: f64,
    /// What any score may be off by beyond f32.
    score_error: f64,
    /// The same, by a soft cap.
    cap_error: f64,
}

impl Plain {
    /// Attention of a row of queries over the keys and values that it sees, with the sink of its head, scored in
    /// `arithmetic`, into `v_head_dim` channels.
    pub(crate) fn new<S>(
        q: &[f32],
        seen: &[(Vec<f32>, Vec<f32>)],
        (options, sink): (&AttentionOptions<S>, Option<f32>),
        (arithmetic, v_head_dim): (Arithmetic, u32),
    ) -> Plain {
        let scale = options.score_scale(q.len() as u32) as f32;
        let capped = |score: f32| options.softcap.map_or(score, |cap| cap * (score / cap).tanh());
        let (mut scores, mut max_v, mut score_error) = (Vec::new(), 0.0_f64, 0.0_f64);
        for (key, value) in seen {
            let dot = q.iter().zip(key).map(|(x, k)| x * k).sum::<f32>();
            let error = arithmetic.score_error(q, key) * f64::from(scale);
            score_error = score_error.max(error);
            scores.push(capped(dot * scale));
            max_v = value.iter().fold(max_v, |m, x| m.max(f64::from(x.abs())));
        }
        let m = scores.iter().fold(sink.unwrap_or(f32::MIN), |m, &s| m.max(s));
        let p: Vec<f32> = scores.iter().map(|s| (s - m).exp()).collect();
        let l: f32 = p.iter().sum::<f32>() + sink.map_or(0.0, |sink| (sink - m).exp());
        let sum = |c: usize| p.iter().zip(seen).map(|(p, (_, v))| p * v[c]).sum::<f32>();
        let output = |c| if l == 0.0 { 0.0 } else { sum(c) / l };
        Plain {
            output: (0..v_head_dim as usize).map(output).collect(),
            max_v,
            score_error,
            cap_error: f64::from(options.softcap.unwrap_or(0.0)) * 1e-6,
        }
    }

    /// Takes into account that large scores are off by more: each product and partial sum is rounded relative to the sum of
    /// magnitudes.
    #[cfg(feature = "export")]
    pub(crate) fn large_scores(&mut self, q: &[f32], seen: &[(Vec<f32>, Vec<f32>)], scale: f64) {
        let size = |key: &[f32]| -> f64 {
            let products = q.iter().zip(key).map(|(a, b)| f64::from((a * b).abs()));
            products.sum::<f64>() * scale
        };
        let largest = seen.iter().map(|(key, _)| size(key)).fold(0.0, f64::max);
        self.score_error += largest * (q.len() as f64 / 4.0 + 6.0) * 6e-8;
    }

    /// What each number of an output in f32 may be off by from `wanted`, the reference's row: see [`Fixture::compare`].
    pub(crate) fn bound(&self, wanted: &[f64]) -> f64 {
        let plain_error = wanted
            .iter()
            .zip(&self.output)
            .map(|(a, &b)| (a - f64::from(b)).abs())
            .fold(0.0, f64::max);
        // Weights move by no more than exp(2 x the scores' error) - 1, and outputs lie between the values.
        let moved = (2.0 * self.score_error).exp_m1() * 2.0;
        2.0 * plain_error + (SLACK + self.cap_error + moved) * self.max_v
    }

    /// What an LSE may be off by from `wanted`.
    pub(crate) fn lse_bound(&self, wanted: f64) -> f64 {
        SLACK * (1.0 + wanted.abs()) + self.cap_error + self.score_error
    }
}

/// What rounding to the type of outputs adds to a bound.
pub(crate) fn output_rounding(float: FloatType, wanted: f64) -> f64 {
    match float {
        FloatType::F32 => 0.0,
        FloatType::F16 => (wanted.abs() * 2.0_f64.powi(-11)).max(2.0_f64.powi(-25)),
    }
}

/// Packs a sequence's rows into its pages and poisons the dead slots of the last one: codes of all ones, NaN scales.
fn pack(page: &PageLayout, ids: &[u32], rows: &[f32], tensor_scale: f32, pool: &mut [u32]) {
    let row = (page.heads * page.head_dim) as usize;
    let len = (rows.len() / row) as u32;
    let group = page.side.layout.token_group();
    let mut status = Status::default();
    for (place, &id) in (0..).zip(ids) {
        let start = place * page.tokens;
        let live = (len - start).min(page.tokens);
        // Tokens that do not exist count as 0 in a group that the end of the sequence cuts.
        let number = |run: &SlotRun, i: u32, head: u32, channel: u32| {
            let at = (start + run.slot + i) as usize * row + (head * page.head_dim + channel) as usize;
            rows.get(at).copied().unwrap_or(0.0)
        };
        let mut runs = Vec::new();
        if group > 1 {
            let groups = (0..live).step_by(group as usize);
            runs.extend(groups.map(|slot| SlotRun {
                page: id,
                slot,
                count: group,
                source: 0,
            }));
            reference::quantize_group(page, &runs, number, pool, &mut status);
        } else {
            slot_runs(id, 0, live, |slot| slot, &mut runs);
            reference::quantize(page, &runs, number, tensor_scale, pool, &mut status);
        }
        let words = &mut pool[(id * page.words) as usize..][..page.words as usize];
        poison(page, words, live);
    }
}

/// Fills the dead slots of a page, from `live` on, with ones: the largest or NaN codes, NaN scales.
pub fn poison(page: &PageLayout, words: &mut [u32], live: u32) {
    let alive = {
        let ones = vec![u32::MAX; page.words as usize];
        page.live_words(&ones, 0, live)
    };
    for (word, mask) in words.iter_mut().zip(alive) {
        *word |= !mask;
    }
}
