//! Codes and scales of every format, bit by bit: the CPU reference against the GPU, on random rows, ties, every f16
//! value, special numbers, ragged runs and poisoned memory. `portable` is the part that is repeated on other drivers.

use std::ops::Range;

use kvpack::Result;
use kvpack::formats::{self, Element};
use kvpack::gpu::Gpu;
use kvpack::kernels::amax::{self, Amax};
use kvpack::kernels::dequantize::Dequantize;
use kvpack::kernels::quantize::{Buffers, Quantize, Source};
use kvpack::kernels::quantize_group::QuantizeGroup;
use kvpack::kernels::tensor_scale::{self, TensorScale};
use kvpack::kernels::{FloatType, RowStrides};
use kvpack::pages::PageLayout;
use kvpack::reference;
use kvpack::scales::{BLOCK_CHANNELS, GROUPS, SCALE_TYPES, ScaleLayout, ScaleType};
use kvpack::spec::Side;
use kvpack::work::{SlotRun, Status, slot_runs};

use crate::common::{gpu, say};

// ---- the harness: a job runs on the CPU and on the GPU, and every word of the results is compared ----------------

/// Words after the end of every output buffer, which no kernel may touch.
const GUARD: usize = 64;

/// What memory holds before a kernel writes it: a NaN in every second word.
pub fn poison(words: usize) -> Vec<u32> {
    (0..words)
        .map(|i| if i % 2 == 0 { 0xdead_beef } else { 0x7fc0_0001 })
        .collect()
}

/// Where the numbers to pack come from. All are bits, so that NaN keep their payloads.
pub enum Rows {
    /// f32 rows.
    F32(Vec<u32>, RowStrides),
    /// binary16 rows, two numbers a word.
    F16(Vec<u32>, RowStrides),
    /// Rows that wait in pages.
    Pages(PageLayout, Vec<u32>),
}

/// One dispatch of `quantize`, or of `quantize_group` for a per-channel side.
pub struct Job {
    pub layout: PageLayout,
    pub rows: Rows,
    pub runs: Vec<SlotRun>,
    /// The scale of a per-tensor side.
    pub tensor_scale: f32,
    /// Pages of the pool.
    pub pages: u32,
}

/// What a job gave.
pub struct Packed {
    /// The whole pool and the guard words behind it.
    pub words: Vec<u32>,
    pub status: Status,
}

impl Job {
    /// The number for slot `run.slot + i`.
    fn number(&self, run: &SlotRun, i: u32, head: u32, channel: u32) -> f32 {
        let at = |s: &RowStrides| (s.offset + (run.source + i) * s.row + head * s.head + channel) as usize;
        match &self.rows {
            Rows::F32(words, strides) => f32::from_bits(words[at(strides)]),
            Rows::F16(words, strides) => {
                let at = at(strides);
                half::f16::from_bits((words[at / 2] >> (16 * (at % 2))) as u16).to_f32()
            }
            Rows::Pages(layout, words) => {
                let first = run.source as usize * layout.words as usize;
                layout.number(
                    &words[first..][..layout.words as usize],
                    run.slot + i,
                    head,
                    channel,
                    1.0,
                )
            }
        }
    }

    /// Tokens that are packed.
    pub fn tokens(&self) -> u32 {
        self.runs.iter().map(|run| run.count).sum()
    }

    fn pool_words(&self) -> usize {
        self.pages as usize * self.layout.words as usize
    }

    /// Slots of a run that the kernel writes: of a group all, of which the last `count` are packed.
    fn written(&self, run: &SlotRun) -> Range<u32> {
        run.slot..run.slot + run.count.max(self.layout.side.layout.token_group())
    }

    /// The packed slots as runs for `dequantize`, rows in the order of the runs.
    pub fn read_runs(&self) -> Vec<SlotRun> {
        let (mut out, mut row) = (Vec::new(), 0);
        for run in &self.runs {
            let end = self.written(run).end;
            let first = end - run.count;
            slot_runs(run.page, first, end, |slot| row + slot - first, &mut out);
            row += run.count;
        }
        out
    }

    /// Packs by the reference, a thread a share of the pages. Words that a kernel owns are written whole, so the
    /// padding at the ends of live heads is zero.
    pub fn on_cpu(&self) -> Packed {
        let mut words = poison(self.pool_words() + GUARD);
        let page_words = self.layout.words as usize;
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(8);
        let share = (self.pages as usize).div_ceil(threads).max(1);
        let pool = &mut words[..self.pages as usize * page_words];
        let parts: Vec<Status> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..)
                .zip(pool.chunks_mut(share * page_words))
                .map(|(k, pages)| scope.spawn(move || self.pack_share(k * share as u32, pages)))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let status = Status {
            non_finite: parts.iter().map(|s| s.non_finite).sum(),
            saturated: parts.iter().map(|s| s.saturated).sum(),
        };
        Packed { words, status }
    }

    /// Packs the pages from `first` on.
    fn pack_share(&self, first: u32, pages: &mut [u32]) -> Status {
        let layout = &self.layout;
        let here = first..first + pages.len() as u32 / layout.words;
        let runs: Vec<_> = self
            .runs
            .iter()
            .filter(|run| here.contains(&run.page))
            .map(|run| SlotRun {
                page: run.page - first,
                ..*run
            })
            .collect();
        let mut status = Status::default();
        let source = |run: &SlotRun, i: u32, head: u32, channel: u32| self.number(run, i, head, channel);
        if layout.side.layout.token_group() > 1 {
            reference::quantize_group(layout, &runs, source, pages, &mut status);
        } else {
            reference::quantize(layout, &runs, source, self.tensor_scale, pages, &mut status);
        }
        let used = layout.head_dim * layout.side.element.bits() % 32;
        if used != 0 {
            for run in &runs {
                for head in 1..=layout.heads {
                    let word =
                        run.page * layout.words + (head * layout.head_words - 1) * layout.tokens + run.slot;
                    pages[word as usize..][..self.written(run).len()]
                        .iter_mut()
                        .for_each(|w| *w &= u32::MAX >> (32 - used));
                }
            }
        }
        status
    }

    /// Packs on the GPU and unpacks again: the pool, and the bits of the rows with the guard words behind them.
    pub fn on_gpu(&self, gpu: &Gpu) -> Result<(Packed, Vec<u32>)> {
        let layout = &self.layout;
        let (source, words, strides) = match &self.rows {
            Rows::F32(words, strides) => (Source::F32, words, *strides),
            Rows::F16(words, strides) => (Source::F16, words, *strides),
            Rows::Pages(from, words) => (Source::Pages(*from), words, RowStrides::dense(layout)),
        };
        let reads = self.read_runs();
        let row_words = (self.tokens() * layout.heads * layout.head_dim) as usize;
        let source_buffer = gpu.upload("source", words)?;
        let runs = gpu.upload("runs", &self.runs)?;
        let read_runs = gpu.upload("runs to read", &reads)?;
        // The scale of this side is not the first one.
        let tensor_scales = gpu.upload("tensor scales", &[f32::NAN, self.tensor_scale])?;
        let pages = gpu.upload("pages", &poison(self.pool_words() + GUARD))?;
        let mut fresh = poison(2 + GUARD);
        fresh[..2].fill(0);
        let status = gpu.upload("status", &fresh)?;
        let rows = gpu.upload("rows", &poison(row_words + GUARD))?;
        let buffers = Buffers {
            source: &source_buffer,
            runs: &runs,
            tensor_scales: &tensor_scales,
            pages: &pages,
            status: &status,
        };
        let unpack = Dequantize::plan(gpu, layout)?;
        let count = self.runs.len() as u32;
        gpu.submit("quantize", |encoder| {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            match (&self.rows, layout.side.layout.token_group()) {
                (_, 1) => {
                    let kernel = Quantize::plan(gpu, layout, &source)?;
                    kernel.encode(gpu, &mut pass, &buffers, count, strides, 1)?;
                }
                (Rows::Pages(from, _), _) => {
                    QuantizeGroup::plan(gpu, layout, from)?.encode(gpu, &mut pass, &buffers, count)?;
                }
                _ => panic!("rows of a per-channel side wait in pages"),
            }
            unpack.encode(
                gpu,
                &mut pass,
                [&pages, &read_runs, &tensor_scales, &rows],
                reads.len() as u32,
                1,
            )
        })?;
        let words = gpu.read("pages", &pages, self.pool_words() + GUARD)?;
        let after: Vec<u32> = gpu.read("status", &status, 2 + GUARD)?;
        assert_eq!(
            after[2..],
            fresh[2..],
            "{}: words behind the status were written",
            layout.side
        );
        let rows = gpu.read("rows", &rows, row_words + GUARD)?;
        Ok((
            Packed {
                words,
                status: Status {
                    non_finite: after[0],
                    saturated: after[1],
                },
            },
            rows,
        ))
    }

    /// The reference's rows for [`Job::read_runs`], as bits.
    pub fn unpacked_on_cpu(&self, packed: &Packed) -> Vec<u32> {
        let row_len = (self.layout.heads * self.layout.head_dim) as usize;
        let mut rows = vec![0.0_f32; self.tokens() as usize * row_len];
        let reads = self.read_runs();
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(8);
        let share = reads.len().div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            let mut rest = rows.as_mut_slice();
            for part in reads.chunks(share) {
                let first = part[0].source;
                let tokens: u32 = part.iter().map(|run| run.count).sum();
                let (mine, others) = rest.split_at_mut(tokens as usize * row_len);
                rest = others;
                scope.spawn(move || {
                    let runs: Vec<_> = part
                        .iter()
                        .map(|r| SlotRun {
                            source: r.source - first,
                            ..*r
                        })
                        .collect();
                    let pool = &packed.words[..self.pool_words()];
                    reference::dequantize(&self.layout, &runs, self.tensor_scale, pool, mine);
                });
            }
        });
        rows.iter().map(|x| x.to_bits()).collect()
    }

    /// Where a word of the pool is, in words.
    fn place(&self, word: usize, bit: u32) -> String {
        let (layout, pool) = (&self.layout, self.pool_words());
        if word >= pool {
            return format!("guard word {}", word - pool);
        }
        let (page, word) = (word as u32 / layout.words, word as u32 % layout.words);
        let what = if word < layout.heads * layout.head_words * layout.tokens {
            let (row_word, slot) = (word / layout.tokens, word % layout.tokens);
            let channel = row_word % layout.head_words * layout.side.element.per_word()
                + bit / layout.side.element.bits();
            format!(
                "code of slot {slot}, head {}, channel {channel}",
                row_word / layout.head_words
            )
        } else if word < layout.scale_offset {
            "padding".to_owned()
        } else {
            let element = ((word - layout.scale_offset) * 32 + bit) / layout.side.scale.bits();
            let row = layout.heads * layout.head_dim;
            match layout.side.layout {
                _ if element >= layout.scale_elements => "padding".to_owned(),
                ScaleLayout::PerChannel { .. } => format!(
                    "scale of group {}, head {}, channel {}",
                    element / row,
                    element % row / layout.head_dim,
                    element % layout.head_dim
                ),
                _ => format!(
                    "scale of slot {}, unit {}",
                    element % layout.tokens,
                    element / layout.tokens
                ),
            }
        };
        format!("{} page {page}, word {word}, bit {bit}: {what}", layout.side)
    }

    /// Every word of the pool and its guard, the counters, and the unpacked rows with their guard.
    pub fn compare(&self, expected: &Packed, rows: &[u32], got: &Packed, got_rows: &[u32]) -> Outcome {
        let mut outcome = Outcome::default();
        outcome.words(&expected.words, &got.words, |word, bit| self.place(word, bit));
        outcome.status(&self.layout.side.to_string(), expected.status, got.status);
        let guarded = [rows, &poison(rows.len() + GUARD)[rows.len()..]].concat();
        outcome.words(&guarded, got_rows, |word, bit| {
            let (row_len, side) = (
                (self.layout.heads * self.layout.head_dim) as usize,
                self.layout.side,
            );
            if word >= rows.len() {
                return format!("{side} unpacked: guard word {}", word - rows.len());
            }
            let (head_dim, c) = (self.layout.head_dim as usize, word % row_len);
            let (row, head, channel) = (word / row_len, c / head_dim, c % head_dim);
            format!("{side} unpacked row {row}, head {head}, channel {channel}, bit {bit}")
        });
        outcome
    }

    /// Runs on both and compares.
    pub fn check(&self, gpu: &Gpu) -> Outcome {
        let expected = self.on_cpu();
        let rows = self.unpacked_on_cpu(&expected);
        let (got, got_rows) = self.on_gpu(gpu).unwrap();
        self.compare(&expected, &rows, &got, &got_rows)
    }
}

/// Unpacks a pool on the GPU: the bits of `rows` rows.
pub fn unpack_on_gpu(gpu: &Gpu, layout: &PageLayout, pool: &[u32], runs: &[SlotRun], scale: f32) -> Vec<u32> {
    let rows: u32 = runs.iter().map(|run| run.count).sum();
    let row_words = (rows * layout.heads * layout.head_dim) as usize;
    let pages = gpu.upload("pages", pool).unwrap();
    let list = gpu.upload("runs", runs).unwrap();
    let scales = gpu.upload("tensor scales", &[scale]).unwrap();
    let out = gpu.upload("rows", &poison(row_words)).unwrap();
    gpu.submit("dequantize", |encoder| {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        let kernel = Dequantize::plan(gpu, layout)?;
        kernel.encode(
            gpu,
            &mut pass,
            [&pages, &list, &scales, &out],
            runs.len() as u32,
            0,
        )
    })
    .unwrap();
    gpu.read("rows", &out, row_words).unwrap()
}

/// The result of a comparison.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Words or items compared.
    pub compared: u64,
    /// Those that differ.
    pub mismatches: u64,
    /// The first one in words.
    pub first: Option<String>,
}

impl Outcome {
    /// One item; `place` gets its lowest differing bit.
    pub fn item(&mut self, expected: u32, got: u32, place: impl FnOnce(u32) -> String) {
        self.compared += 1;
        if expected != got {
            self.mismatches += 1;
            self.first.get_or_insert_with(|| {
                format!(
                    "{}: expected {expected:08x}, got {got:08x}",
                    place((expected ^ got).trailing_zeros())
                )
            });
        }
    }

    /// Two lists of items; `place` gets an index and its lowest differing bit.
    pub fn words(&mut self, expected: &[u32], got: &[u32], place: impl Fn(usize, u32) -> String) {
        self.item(expected.len() as u32, got.len() as u32, |_| {
            "number of items".to_owned()
        });
        for (i, (&e, &g)) in expected.iter().zip(got).enumerate() {
            self.item(e, g, |bit| place(i, bit));
        }
    }

    /// The counters.
    pub fn status(&mut self, what: &str, expected: Status, got: Status) {
        self.item(expected.non_finite, got.non_finite, |_| {
            format!("{what}: count of non-finite inputs")
        });
        self.item(expected.saturated, got.saturated, |_| {
            format!("{what}: count of saturations")
        });
    }

    pub fn join(&mut self, other: Outcome) {
        self.compared += other.compared;
        self.mismatches += other.mismatches;
        self.first = self.first.take().or(other.first);
    }

    /// Fails unless something was compared and all of it is equal.
    #[track_caller]
    pub fn pass(&self) {
        assert!(self.compared > 0, "nothing was compared");
        assert!(
            self.mismatches == 0,
            "{} of {} items differ; the first: {}",
            self.mismatches,
            self.compared,
            self.first.as_deref().unwrap_or_default()
        );
    }
}

// ---- numbers -----------------------------------------------------------------------------------------------------

/// splitmix64.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u32) -> u32 {
        (((self.next() >> 32) * u64::from(n)) >> 32) as u32
    }

    /// An integer of a range.
    fn within(&mut self, range: Range<i32>) -> i32 {
        range.start + self.below((range.end - range.start) as u32) as i32
    }

    fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u32) as usize]
    }

    /// ± a number of binary exponent `e`.
    fn real(&mut self, e: i32) -> f32 {
        let bits = self.next();
        let exponent = (e.clamp(-126, 127) + 127) as u32;
        f32::from_bits(((bits >> 32) as u32 & 0x807f_ffff) | (exponent << 23))
    }

    /// ± a number whose binary exponent lies in a range.
    fn real_within(&mut self, exponents: Range<i32>) -> f32 {
        let e = self.within(exponents);
        self.real(e)
    }

    /// A number of (-1, 1).
    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as i32 as f32 / 8_388_608.0 - 1.0
    }

    fn sign(&mut self) -> f32 {
        if self.below(2) == 0 { 1.0 } else { -1.0 }
    }
}

/// 2^e.
pub fn power(e: i32) -> f32 {
    f32::from_bits(((e.clamp(-126, 127) + 127) as u32) << 23)
}

/// Neither zero nor normal, and what lies at the edges.
const SPECIALS: [u32; 20] = [
    0,
    0x8000_0000,
    1,
    0x8000_0001,
    0x007f_ffff,
    0x807f_ffff,
    0x0080_0000,
    0x8080_0000,
    0x7f7f_ffff,
    0xff7f_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_0000,
    0xffc0_0000,
    0x7f80_0001,
    0xff80_0001,
    0x7fff_ffff,
    0xffff_ffff,
    0x7fa5_5a5a,
    0x3f80_0000,
];

/// Largest magnitudes at which scales under- and overflow.
const EDGES: [f32; 16] = [
    1e-7,
    1e-6,
    3e-6,
    7.6e-6,
    1e-38,
    6.3e-38,
    1e-30,
    3e-28,
    3e38,
    70_000.0,
    65_520.0,
    500_000.0,
    458_640.0,
    8_321_040.0,
    3_000.0,
    2_784.001,
];

/// Halves of the steps of an element, under scale 1: its codes and midpoints, up to twice the largest.
fn half_step(rng: &mut Rng, element: Element) -> f32 {
    let info = element.info();
    if !info.float {
        return rng.within(-4 * info.max as i32..4 * info.max as i32 + 1) as f32 / 2.0;
    }
    match element {
        Element::E4m3 | Element::E2m1 => {
            let top = if element == Element::E4m3 { 0x7e } else { 7 };
            let code = rng.below(top + 1);
            let (here, below) = (element.decode(code), element.decode(code.max(1) - 1));
            // Above the largest code lies the midpoint to the one that does not exist.
            let above = if code == top {
                2.0 * here - below
            } else {
                element.decode(code + 1)
            };
            rng.sign()
                * if rng.below(2) == 0 {
                    here
                } else {
                    (here + above) / 2.0
                }
        }
        _ => {
            let e = rng.within(-30..17);
            let tie = rng.real(e).to_bits() & !0x1fff | 0x1000;
            if e < -14 {
                rng.sign() * rng.below(2048) as f32 * power(-25)
            } else {
                f32::from_bits(tie)
            }
        }
    }
}

/// One group of numbers that share a scale, as bits. `exponents` bounds the magnitudes; `given` is a per-tensor scale.
fn fill(rng: &mut Rng, numbers: &mut [u32], element: Element, exponents: &Range<i32>, given: Option<f32>) {
    let largest = if element.info().plain {
        1.0
    } else {
        element.info().max
    };
    // A scale of few bits, so that its multiples are exact.
    let scale = given.unwrap_or_else(|| {
        let mask = rng.pick(&[0_u32, 0x0070_0000, 0x007f_e000]);
        let low = exponents.start.max(-80) + 8;
        let high = (exponents.end - 9).min(100).max(low + 1);
        f32::from_bits(power(rng.within(low..high)).to_bits() | (rng.next() as u32 & mask))
    });
    let around = scale.to_bits() as i32 >> 23;
    let base = match given {
        Some(_) => rng.within(around - 127 - 4..around - 127 + 12),
        None => rng.within(-6..7),
    };
    let kind = rng.below(20);
    let (top, spread) = (rng.within(exponents.clone()), rng.within(1..16));
    let edge = rng.pick(&EDGES);
    let constant = rng.real(base).to_bits();
    for x in numbers.iter_mut() {
        *x = match kind {
            0..=5 => (rng.uniform() * power(base)).to_bits(),
            6 | 7 => rng
                .real_within((top - spread).max(exponents.start)..top + 1)
                .to_bits(),
            8 => rng.real_within(exponents.clone()).to_bits(),
            9 => (rng.uniform() * power(base - spread)).to_bits(),
            10 | 11 => (half_step(rng, element) * scale).to_bits(),
            12 => {
                let bits = (half_step(rng, element) * scale).to_bits();
                if bits & 0x7fff_ffff == 0 {
                    bits
                } else {
                    bits.wrapping_add_signed(rng.within(-1..2))
                }
            }
            13 => rng.pick(&SPECIALS),
            14 if rng.below(3) == 0 => rng.pick(&SPECIALS),
            14 => rng.real(base).to_bits(),
            15 => constant ^ ((rng.next() as u32) & 0x8000_0000),
            16 => (rng.uniform() * edge).to_bits(),
            17 if rng.below(8) > 0 => rng.next() as u32 & 0x8000_0000,
            17 => rng.real(base).to_bits(),
            18 => rng.next() as u32 & 0x807f_ffff,
            _ => rng.real_within((top - 2).max(exponents.start)..top + 1).to_bits(),
        };
    }
    let one = rng.below(numbers.len() as u32) as usize;
    match kind {
        // An outlier.
        9 => numbers[one] = (rng.sign() * power(base)).to_bits(),
        // The number that makes `scale` the group's scale. Without it, whatever comes.
        10..=12 if rng.below(8) > 0 => numbers[one] = (rng.sign() * largest * scale).to_bits(),
        16 => numbers[one] = (rng.sign() * edge).to_bits(),
        _ => {}
    }
    if (10..=12).contains(&kind) && given.is_none() && !element.info().plain && rng.below(4) > 0 {
        // None above it either.
        let limit = (largest * scale).to_bits();
        for x in numbers.iter_mut().filter(|x| **x & 0x7fff_ffff > limit) {
            *x = *x & 0x8000_0000 | limit;
        }
    }
}

/// Rows [token][head][channel] of whole groups, as bits.
fn random_rows(
    rng: &mut Rng,
    layout: &PageLayout,
    tokens: u32,
    exponents: &Range<i32>,
    given: Option<f32>,
) -> Vec<u32> {
    let row_len = (layout.heads * layout.head_dim) as usize;
    let mut rows = vec![0; tokens as usize * row_len];
    let element = layout.side.element;
    match layout.side.layout {
        ScaleLayout::PerChannel { group } => {
            let mut column = vec![0; group as usize];
            for group_rows in rows.chunks_mut(group as usize * row_len) {
                for c in 0..row_len {
                    fill(rng, &mut column, element, exponents, given);
                    for (row, &x) in group_rows.chunks_mut(row_len).zip(&column) {
                        row[c] = x;
                    }
                }
            }
        }
        axis => {
            let unit = if axis == ScaleLayout::PerBlock {
                BLOCK_CHANNELS
            } else {
                layout.head_dim
            };
            rows.chunks_mut(unit as usize)
                .for_each(|numbers| fill(rng, numbers, element, exponents, given));
        }
    }
    rows
}

/// Bits of f32 as binary16, two to a word.
fn halves(rows: &[u32]) -> Vec<u32> {
    let half = |x: u32| u32::from(half::f16::from_f32(f32::from_bits(x)).to_bits());
    rows.chunks(2)
        .map(|pair| half(pair[0]) | pair.get(1).map_or(0, |&x| half(x)) << 16)
        .collect()
}

/// Whole pages in which rows of f32 bits wait, token t in page t / P.
fn waiting_pages(layout: &PageLayout, waiting: Side, rows: &[u32]) -> (PageLayout, Vec<u32>) {
    let from = PageLayout::new(waiting, layout.heads, layout.head_dim, layout.tokens).unwrap();
    let row_len = (layout.heads * layout.head_dim) as usize;
    let tokens = (rows.len() / row_len) as u32;
    let pages = tokens.div_ceil(layout.tokens);
    if waiting == Side::F32 {
        // Bits as they are: `quantize` would count subnormals as zero.
        let mut words = poison((pages * from.words) as usize);
        for (i, &x) in rows.iter().enumerate() {
            let (token, c) = ((i / row_len) as u32, (i % row_len) as u32);
            let (word, _) = from.code_at(token % from.tokens, c / from.head_dim, c % from.head_dim);
            words[(token / from.tokens * from.words + word) as usize] = x;
        }
        return (from, words);
    }
    let mut runs = Vec::new();
    for page in 0..pages {
        let first = page * from.tokens;
        slot_runs(
            page,
            0,
            from.tokens.min(tokens - first),
            |slot| first + slot,
            &mut runs,
        );
    }
    let rows = Rows::F32(rows.to_vec(), RowStrides::dense(&from));
    let mut packed = Job {
        layout: from,
        rows,
        runs,
        tensor_scale: 1.0,
        pages,
    }
    .on_cpu();
    packed.words.truncate((pages * from.words) as usize);
    (from, packed.words)
}

/// How rows reach the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum From {
    F32,
    F16,
    PagesF16,
    PagesF32,
}

/// A job that packs `rows` (whole pages of them; for a per-channel side every group, for the others every token), save
/// those that `live` leaves out: it gets a page and returns its live slots.
fn job(
    layout: PageLayout,
    rows: &[u32],
    from: From,
    tensor_scale: f32,
    mut live: impl FnMut(u32) -> Range<u32>,
) -> Job {
    let row_len = layout.heads * layout.head_dim;
    let tokens = rows.len() as u32 / row_len;
    let pages = tokens.div_ceil(layout.tokens);
    let group = layout.side.layout.token_group();
    let dense = RowStrides::dense(&layout);
    let rows = match from {
        From::F32 => Rows::F32(rows.to_vec(), dense),
        From::F16 => Rows::F16(halves(rows), dense),
        From::PagesF16 | From::PagesF32 => {
            let side = if from == From::PagesF16 {
                Side::F16
            } else {
                Side::F32
            };
            let (layout, words) = waiting_pages(&layout, side, rows);
            Rows::Pages(layout, words)
        }
    };
    let mut runs = Vec::new();
    for source in 0..pages {
        // Pages are filled in another order than they wait.
        let page = pages - 1 - source;
        let slots = live(source);
        let last = slots.end.min(tokens - source * layout.tokens);
        let row = |slot| {
            if matches!(rows, Rows::Pages(..)) {
                source
            } else {
                source * layout.tokens + slot
            }
        };
        if group == 1 {
            slot_runs(page, slots.start, last, row, &mut runs);
        } else {
            for j in slots.start.div_ceil(group)..last / group {
                runs.push(SlotRun {
                    page,
                    slot: j * group,
                    count: group,
                    source,
                });
            }
        }
    }
    Job {
        layout,
        rows,
        runs,
        tensor_scale,
        pages,
    }
}

/// Every named side.
fn all_sides() -> Vec<Side> {
    Side::all()
}

/// `Side::all()` and the same sides with every other scale type.
fn sides_and_scale_types() -> Vec<Side> {
    let mut sides = all_sides();
    for side in all_sides() {
        for scale in SCALE_TYPES {
            let other = side.with_scale_type(scale);
            if !sides.contains(&other) {
                sides.push(other);
            }
        }
    }
    sides
}

/// A per-tensor side of any element: its scale is given, so any pair of number and scale can be had.
pub fn given(element: Element) -> Side {
    Side {
        element,
        layout: ScaleLayout::PerTensor,
        scale: ScaleType::F32,
    }
}

/// KV heads, head_dim, tokens of a page (rounded up to the side's group), rows of a million.
const SHAPES: [(u32, u32, u32, u32); 8] = [
    (2, 8, 64, 620_000),
    (1, 16, 32, 150_000),
    (2, 40, 24, 100_000),
    (1, 64, 64, 50_000),
    (1, 80, 16, 40_000),
    (2, 96, 40, 20_000),
    (3, 128, 64, 10_000),
    (1, 256, 8, 10_000),
];

/// Scales of per-tensor sides, one a batch.
const GIVEN: [f32; 8] = [
    1.0,
    0.0123,
    8.077_936e-28,
    3.323_07e35,
    0.125,
    1.000_000_1,
    5.96e-8,
    0.0,
];

/// Random rows of one side in some shapes: `per_million` of their rows, in batches of several sources.
fn random_side(
    gpu: &Gpu,
    side: Side,
    shapes: &[(u32, u32, u32, u32)],
    per_million: f64,
    seed: u64,
) -> (Outcome, u64) {
    let mut rng = Rng(seed);
    let (mut outcome, mut rows, mut batch) = (Outcome::default(), 0_u64, seed as usize);
    for &(heads, head_dim, tokens, wanted) in shapes {
        let group = side.layout.token_group();
        let layout = PageLayout::new(side, heads, head_dim, tokens.next_multiple_of(group)).unwrap();
        let most = (1_500_000 / (heads * head_dim)).max(layout.tokens);
        let mut left = (f64::from(wanted) * per_million).ceil() as u32;
        while left > 0 {
            let pages = (left.min(most) * 9 / 8).div_ceil(layout.tokens) + 1;
            let from = match (batch % 8, group > 1) {
                (3, false) | (2 | 5, true) => From::PagesF32,
                (4, false) => From::F16,
                (6, false) | (_, true) => From::PagesF16,
                _ => From::F32,
            };
            let exponents = if matches!(from, From::F16 | From::PagesF16) {
                -26..17
            } else {
                -121..121
            };
            let scale = GIVEN[batch % GIVEN.len()];
            let given = (side.layout == ScaleLayout::PerTensor).then_some(scale);
            let numbers = random_rows(&mut rng, &layout, pages * layout.tokens, &exponents, given);
            let job = job(layout, &numbers, from, scale, |_| match rng.below(8) {
                0 => {
                    let first = rng.below(layout.tokens);
                    first..first + 1 + rng.below(layout.tokens - first)
                }
                _ => 0..layout.tokens,
            });
            outcome.join(job.check(gpu));
            rows += u64::from(job.tokens());
            left = left.saturating_sub(job.tokens());
            batch += 1;
        }
    }
    (outcome, rows)
}

/// A million rows of the sides of one name, in all: per-channel sides share them over their groups. A quarter again
/// with f32 scales, a twentieth with the third scale type.
fn random_format(test: &str, name: &str, seed: u64) {
    let Some(gpu) = gpu(test) else { return };
    let base: Side = name.parse().unwrap();
    let sides: Vec<Side> = match base.layout {
        ScaleLayout::PerChannel { .. } => GROUPS
            .map(|group| Side {
                layout: ScaleLayout::PerChannel { group },
                ..base
            })
            .to_vec(),
        _ => vec![base],
    };
    let share = 1.0 / sides.len() as f64;
    let start = std::time::Instant::now();
    let (mut outcome, mut rows) = (Outcome::default(), 0);
    for (k, &side) in (0..).zip(&sides) {
        for scale in SCALE_TYPES {
            let other = side.with_scale_type(scale);
            let part = match scale {
                _ if scale == base.scale => 1.0,
                _ if other == side => continue,
                ScaleType::F32 => 0.2,
                _ => 0.05,
            };
            // The other scale types take turns with the shapes: each is a pipeline to compile.
            let turn = if part == 1.0 { 1 } else { 4 };
            let shapes: Vec<_> = SHAPES.into_iter().skip(k as usize % turn).step_by(turn).collect();
            let seed = seed + 100 * k + u64::from(scale.bits());
            let (found, packed) = random_side(gpu, other, &shapes, share * part, seed);
            outcome.join(found);
            rows += if scale == base.scale { packed } else { 0 };
        }
    }
    say(&format!(
        "kvpack: {name}: {rows} random rows, {:.1} s",
        start.elapsed().as_secs_f64()
    ));
    outcome.pass();
    assert!(rows >= 1_000_000, "{rows}");
}

macro_rules! random_formats {
    ($($test:ident $name:literal $seed:literal)*) => {
        $(
            #[test]
            fn $test() {
                random_format(stringify!($test), $name, $seed);
            }
        )*
    };
}

random_formats! {
    random_rows_f32 "f32" 1000
    random_rows_f16 "f16" 2000
    random_rows_fp8 "fp8" 3000
    random_rows_int8 "int8" 4000
    random_rows_int4 "int4" 5000
    random_rows_int2 "int2" 6000
    random_rows_fp4 "fp4" 7000
    random_rows_int8c "int8c" 8000
    random_rows_int4c "int4c" 9000
    random_rows_int2c "int2c" 10000
}

// ---- ties, f16 values, special numbers ---------------------------------------------------------------------------

/// Scales that ties are built for: powers of two, all sorts of mantissas, and the ends of each type's range.
fn tie_scales(side: Side, rng: &mut Rng) -> Vec<f32> {
    let mut scales: Vec<f32> = match side.scale {
        _ if !side.layout.has_plane() => GIVEN[..7].to_vec(),
        ScaleType::E4m3 => (1..0x7f).map(|code| Element::E4m3.decode(code)).collect(),
        ScaleType::F16 => (0..60)
            .map(|k| Element::F16.decode([1, 2, 3, 0x3ff, 0x400, 0x3c00, 0x7bff][k % 7]))
            .collect(),
        _ => [-90, -60, -20, 0, 20, 100].map(power).to_vec(),
    };
    for _ in 0..120 {
        scales.push(match side.scale {
            // 16 bits at most: the largest magnitude, scale x 127, is then exact.
            ScaleType::F32 => f32::from_bits(rng.real_within(-89..100).to_bits() & 0x7fff_ff00),
            scale => scale.decode(1 + rng.below(if scale == ScaleType::F16 { 0x7bff } else { 0x7e })),
        });
    }
    scales
}

/// Every code and every midpoint of an element with its neighbours, under scale 1, up to the edge of saturation.
fn steps(element: Element) -> Vec<f64> {
    let info = element.info();
    match element {
        Element::F32 | Element::F16 => (0..200)
            .map(|k| f64::from(2 * k + 1) * 2.0_f64.powi(k % 40 - 25))
            .collect(),
        Element::E4m3 | Element::E2m1 => {
            let top = if element == Element::E4m3 { 0x7e } else { 7 };
            let value = |code: u32| f64::from(element.decode(code));
            (0..top)
                .flat_map(|c| [value(c), (value(c) + value(c + 1)) / 2.0])
                .chain([value(top), 1.5 * value(top) - 0.5 * value(top - 1)])
                .collect()
        }
        _ => (0..=2 * info.max as u32 + 2)
            .map(|k| f64::from(k) / 2.0)
            .collect(),
    }
}

/// Groups of `unit` numbers that hold every tie of a side under each scale, with the f32 below and above it, both
/// signs. The largest magnitude of a group makes the scale, so what saturates stands in groups of its own.
fn tie_groups(side: Side, unit: usize, rng: &mut Rng) -> Vec<u32> {
    let info = side.element.info();
    let mut out = Vec::new();
    for scale in tie_scales(side, rng) {
        let largest = f64::from(info.max) * f64::from(scale);
        let fits = side.layout.has_plane();
        let mut numbers = Vec::new();
        for step in steps(side.element) {
            let tie = (step * f64::from(scale)) as f32;
            for bits in [tie.to_bits().saturating_sub(1), tie.to_bits(), tie.to_bits() + 1] {
                if !fits || f64::from(f32::from_bits(bits)) <= largest {
                    numbers.push(bits | rng.next() as u32 & 0x8000_0000);
                }
            }
        }
        for part in numbers.chunks(unit - 1) {
            let mut group = part.to_vec();
            group.resize(unit - 1, 0);
            group.insert(
                rng.below(unit as u32) as usize,
                (rng.sign() * largest as f32).to_bits(),
            );
            out.extend(group);
        }
    }
    out
}

/// Rows that consist of given groups, filled up with zeros to whole pages.
fn rows_of_groups(layout: &PageLayout, groups: &[u32]) -> Vec<u32> {
    let row_len = (layout.heads * layout.head_dim) as usize;
    let page = layout.tokens as usize * row_len;
    let mut rows = vec![0; groups.len().next_multiple_of(page)];
    match layout.side.layout {
        ScaleLayout::PerChannel { group } => {
            let group = group as usize;
            for (i, &x) in groups.iter().enumerate() {
                let (column, token) = (i / group, i % group);
                rows[(column / row_len * group + token) * row_len + column % row_len] = x;
            }
        }
        _ => rows[..groups.len()].copy_from_slice(groups),
    }
    rows
}

/// Numbers of a group of a layout.
fn unit(layout: &PageLayout) -> usize {
    match layout.side.layout {
        ScaleLayout::PerChannel { group } => group as usize,
        ScaleLayout::PerBlock => BLOCK_CHANNELS as usize,
        _ => layout.head_dim as usize,
    }
}

fn small_layout(side: Side, heads: u32, head_dim: u32) -> PageLayout {
    PageLayout::new(
        side,
        heads,
        head_dim,
        16_u32.next_multiple_of(side.layout.token_group()),
    )
    .unwrap()
}

fn from_f32(side: Side) -> From {
    if side.layout.token_group() > 1 {
        From::PagesF32
    } else {
        From::F32
    }
}

/// Packs and compares whole pages of rows.
fn check_rows(gpu: &Gpu, layout: PageLayout, rows: &[u32], from: From, tensor_scale: f32) -> Outcome {
    job(layout, rows, from, tensor_scale, |_| 0..layout.tokens).check(gpu)
}

fn ties(gpu: &Gpu, sides: &[Side]) -> Outcome {
    let mut outcome = Outcome::default();
    for &side in sides {
        let layout = small_layout(side, 2, 16);
        let mut rng = Rng(77);
        let given = (side.layout == ScaleLayout::PerTensor).then(|| tie_scales(side, &mut rng));
        match given {
            Some(scales) => {
                // One scale a dispatch; what saturates is there as well.
                for scale in scales.into_iter().step_by(3) {
                    let ties = steps(side.element).into_iter().flat_map(|step| {
                        let bits = (step * f64::from(scale)) as f32;
                        [bits.next_down(), bits, bits.next_up()].map(|x| [x.to_bits(), (-x).to_bits()])
                    });
                    let rows = rows_of_groups(&layout, &ties.flatten().collect::<Vec<u32>>());
                    outcome.join(check_rows(gpu, layout, &rows, From::F32, scale));
                }
            }
            None => {
                let rows = rows_of_groups(&layout, &tie_groups(side, unit(&layout), &mut rng));
                outcome.join(check_rows(gpu, layout, &rows, from_f32(side), 1.0));
            }
        }
    }
    outcome
}

/// Every f16 value, in three arrangements: as it comes, shuffled, and each alone with its group.
fn all_f16_values(gpu: &Gpu, side: Side) -> Outcome {
    let mut outcome = Outcome::default();
    let layout = small_layout(side, 2, 8);
    let value = |code: u32| half::f16::from_bits(code as u16).to_f32().to_bits();
    let in_order: Vec<u32> = (0..0x1_0000).map(value).collect();
    let mut shuffled = in_order.clone();
    let mut rng = Rng(5);
    for i in (1..shuffled.len()).rev() {
        shuffled.swap(i, rng.below(i as u32 + 1) as usize);
    }
    let stride = if unit(&layout) > 16 { 16 } else { 1 };
    let alone: Vec<u32> = (0..0x1_0000)
        .step_by(stride)
        .flat_map(|code| vec![value(code); unit(&layout)])
        .collect();
    let scale = 0.0123;
    for groups in [in_order, shuffled, alone] {
        let rows = rows_of_groups(&layout, &groups);
        let group = side.layout.token_group();
        for from in if group > 1 {
            [From::PagesF32, From::PagesF16]
        } else {
            [From::F32, From::F16]
        } {
            outcome.join(check_rows(gpu, layout, &rows, from, scale));
        }
    }
    outcome
}

/// Groups of special numbers: zeros, constants, NaN, infinities, subnormals, and each of them among ordinary ones.
fn special_groups(element: Element, unit: usize) -> Vec<u32> {
    let mut rng = Rng(31);
    let mut out = Vec::new();
    for special in SPECIALS {
        out.extend(vec![special; unit]);
        for place in [0, unit - 1] {
            let mut group: Vec<u32> = (0..unit).map(|_| rng.uniform().to_bits()).collect();
            group[place] = special;
            out.extend(group);
        }
        out.extend((0..unit).map(|i| if i % 2 == 0 { special } else { rng.pick(&SPECIALS) }));
    }
    for edge in EDGES
        .into_iter()
        .chain([0.7, 1.0, element.info().max, 65504.0, 65519.996, 1.2e38, f32::MAX])
    {
        out.extend((0..unit).map(|i| {
            if i % 2 == 0 {
                edge.to_bits()
            } else {
                (-edge).to_bits()
            }
        }));
        out.extend((0..unit).map(|i| if i == 1 { edge.to_bits() } else { 0x8000_0000 }));
        out.extend((0..unit).map(|i| if i == 2 { edge } else { edge * rng.uniform() }.to_bits()));
    }
    out
}

fn specials(gpu: &Gpu, sides: &[Side]) -> Outcome {
    let mut outcome = Outcome::default();
    for &side in sides {
        let layout = small_layout(side, 2, 8);
        let rows = rows_of_groups(&layout, &special_groups(side.element, unit(&layout)));
        let scales: &[f32] = if side.layout == ScaleLayout::PerTensor {
            &GIVEN
        } else {
            &[1.0]
        };
        for &scale in scales {
            outcome.join(check_rows(gpu, layout, &rows, from_f32(side), scale));
        }
        let others = if side.layout.token_group() > 1 {
            From::PagesF16
        } else {
            From::F16
        };
        outcome.join(check_rows(gpu, layout, &rows, others, 1.0));
    }
    outcome
}

/// Runs of every length at every place of a quad, one after the other into the same poisoned page, and alone into
/// pages of their own: neighbours keep their codes and their halves of scale words.
fn partial_runs(gpu: &Gpu, sides: &[Side]) -> Outcome {
    let mut outcome = Outcome::default();
    for &side in sides.iter().filter(|side| side.layout.token_group() == 1) {
        for (heads, head_dim) in [(2, 8), (2, 40)] {
            let layout = PageLayout::new(side, heads, head_dim, 8).unwrap();
            let places: Vec<(u32, u32)> = (0..8)
                .flat_map(|slot| (1..=4 - slot % 4).map(move |count| (slot, count)))
                .collect();
            let row_len = heads * head_dim;
            let mut rng = Rng(9);
            let tokens: u32 = places.iter().map(|(_, count)| count).sum();
            let numbers: Vec<u32> = (0..tokens * row_len).map(|_| rng.uniform().to_bits()).collect();
            let mut runs = Vec::new();
            for (page, &(slot, count)) in (0..).zip(&places) {
                runs.push(SlotRun {
                    page,
                    slot,
                    count,
                    source: runs.iter().map(|r: &SlotRun| r.count).sum(),
                });
            }
            let pages = places.len() as u32;
            let rows = Rows::F32(numbers, RowStrides::dense(&layout));
            outcome.join(
                Job {
                    layout,
                    rows,
                    runs,
                    tensor_scale: 0.01,
                    pages,
                }
                .check(gpu),
            );
        }
    }
    outcome
}

/// K inside a fused row of queries, keys and values: offset, row stride and head stride of their own, f32 and f16.
fn strided_rows(gpu: &Gpu, sides: &[Side]) -> Outcome {
    let mut outcome = Outcome::default();
    for &side in sides.iter().filter(|side| side.layout.token_group() == 1) {
        let layout = PageLayout::new(side, 2, 40, 16).unwrap();
        let mut rng = Rng(13);
        let tokens = 21;
        // [q0 k0 v0 q1 k1 v1] with some numbers between the rows; the second one begins at an odd element.
        for strides in [
            RowStrides {
                offset: 3 + 40,
                row: 6 * 40 + 5,
                head: 3 * 40,
            },
            RowStrides {
                offset: 4 * 40 + 1,
                row: 6 * 40,
                head: 41,
            },
            RowStrides {
                offset: 0,
                row: 40,
                head: tokens * 40,
            },
        ] {
            let len = strides.offset + strides.row * tokens + strides.head + 40;
            let numbers: Vec<u32> = (0..len).map(|_| rng.uniform().to_bits()).collect();
            for half in [false, true] {
                let rows = if half {
                    Rows::F16(halves(&numbers), strides)
                } else {
                    Rows::F32(numbers.clone(), strides)
                };
                let mut runs = Vec::new();
                slot_runs(1, 2, 16, |slot| slot - 2, &mut runs);
                slot_runs(0, 0, 7, |slot| slot + 14, &mut runs);
                outcome.join(
                    Job {
                        layout,
                        rows,
                        runs,
                        tensor_scale: 0.01,
                        pages: 2,
                    }
                    .check(gpu),
                );
            }
        }
    }
    outcome
}

/// Groups that begin with sink tokens, from none to all but one: NaN, infinities and the largest numbers wait in the
/// slots of the sinks.
fn groups_with_sinks(gpu: &Gpu, sides: &[Side]) -> Outcome {
    let mut outcome = Outcome::default();
    for &side in sides.iter().filter(|side| side.layout.token_group() > 1) {
        let group = side.layout.token_group();
        for (head_dim, from) in [(8, From::PagesF32), (40, From::PagesF16)] {
            let layout = PageLayout::new(side, 2, head_dim, 2 * group).unwrap();
            let row_len = 2 * head_dim;
            let counts = [group, group - 1, group / 2 + 1, 4, 1, 0];
            let mut rng = Rng(u64::from(group + head_dim));
            let mut rows = Vec::new();
            let mut without = Vec::new();
            for count in counts {
                for slot in 0..group * row_len {
                    let bits = rng.real_within(-12..12).to_bits();
                    let sink = slot / row_len < group - count;
                    let worst = [f32::NAN, f32::INFINITY, -f32::INFINITY, 6e4].map(f32::to_bits);
                    rows.push(if sink { rng.pick(&worst) } else { bits });
                    without.push(if sink { 0 } else { bits });
                }
            }
            let make = |rows: &[u32]| job(layout, rows, from, 1.0, |_| 0..layout.tokens);
            let (mut sinks, zeros) = (make(&rows), make(&without));
            for run in &mut sinks.runs {
                run.count = counts[(run.source * 2 + run.slot / group) as usize];
            }
            outcome.join(sinks.check(gpu));
            // A sink counts for as much as a row of zeros.
            let (expected, got) = (zeros.on_cpu(), sinks.on_cpu());
            outcome.words(&expected.words, &got.words, |word, bit| sinks.place(word, bit));
            outcome.status("sinks as zeros", expected.status, got.status);
        }
    }
    outcome
}

#[test]
fn groups_that_begin_with_sinks() {
    let Some(gpu) = gpu("sinks") else { return };
    groups_with_sinks(gpu, &sides_and_scale_types()).pass();
}

#[test]
fn ties_of_every_side_and_scale_type() {
    let Some(gpu) = gpu("ties") else { return };
    let sides = sides_and_scale_types();
    ties(gpu, &sides).pass();
    // Elements that no named side gives a per-tensor scale.
    ties(gpu, &formats::ALL.map(given)[2..]).pass();
}

#[test]
fn every_f16_value_as_input() {
    let Some(gpu) = gpu("f16 values") else { return };
    for side in Side::all() {
        all_f16_values(gpu, side).pass();
    }
}

#[test]
fn special_numbers_of_every_side_and_scale_type() {
    let Some(gpu) = gpu("special numbers") else { return };
    specials(gpu, &sides_and_scale_types()).pass();
}

#[test]
fn partial_runs_keep_their_neighbours() {
    let Some(gpu) = gpu("partial runs") else { return };
    partial_runs(gpu, &sides_and_scale_types()).pass();
}

#[test]
fn rows_with_strides() {
    let Some(gpu) = gpu("strides") else { return };
    strided_rows(gpu, &Side::all()).pass();
}

#[test]
fn one_flipped_bit_is_reported_with_its_place() {
    let side: Side = "int4".parse().unwrap();
    let layout = PageLayout::new(side, 2, 16, 8).unwrap();
    let rows: Vec<u32> = (0..16 * 32).map(|i| (i as f32).to_bits()).collect();
    let job = job(layout, &rows, From::F32, 1.0, |_| 0..7);
    let expected = job.on_cpu();
    let unpacked = job.unpacked_on_cpu(&expected);
    let guarded = [
        unpacked.as_slice(),
        &poison(unpacked.len() + GUARD)[unpacked.len()..],
    ]
    .concat();
    let compare = |words: Vec<u32>, status: Status, rows: &[u32]| {
        job.compare(&expected, &unpacked, &Packed { words, status }, rows)
    };
    assert_eq!(
        compare(expected.words.clone(), expected.status, &guarded).mismatches,
        0
    );
    // Head 1, word 1 of the head, slot 5 of page 1; the scales of slots 6 and 7; a dead slot; a guard word.
    let page = layout.words as usize;
    let code = page + 3 * 8 + 5;
    let scale = page + layout.scale_offset as usize + 3;
    let cases = [
        (
            code,
            9,
            "page 1, word 29, bit 9: code of slot 5, head 1, channel 10",
        ),
        (scale, 3, "scale of slot 6, unit 0"),
        (scale, 19, "scale of slot 7, unit 0"),
        (page + 7, 0, "code of slot 7, head 0, channel 0"),
        (2 * page + 1, 31, "guard word 1"),
    ];
    for (word, bit, place) in cases {
        let mut words = expected.words.clone();
        words[word] ^= 1 << bit;
        let outcome = compare(words, expected.status, &guarded);
        assert_eq!(outcome.mismatches, 1);
        let first = outcome.first.clone().unwrap();
        assert!(first.contains(place), "{first}");
        assert!(std::panic::catch_unwind(|| outcome.pass()).is_err());
    }
    let miscounted = Status {
        saturated: expected.status.saturated + 1,
        ..expected.status
    };
    assert_eq!(
        compare(expected.words.clone(), miscounted, &guarded).mismatches,
        1
    );
    for word in [40, guarded.len() - 1] {
        let mut rows = guarded.clone();
        rows[word] ^= 1;
        assert_eq!(
            compare(expected.words.clone(), expected.status, &rows).mismatches,
            1
        );
    }
    assert!(std::panic::catch_unwind(|| Outcome::default().pass()).is_err());
}

// ---- amax and tensor_scale ---------------------------------------------------------------------------------------

/// The largest magnitude of `tokens` rows of `heads` x `head_dim` joins what its place holds; other places stay.
fn amax_of_rows(
    gpu: &Gpu,
    rows: &Rows,
    [tokens, heads, head_dim]: [u32; 3],
    so_far: f32,
) -> Result<Vec<u32>> {
    let (float, words, strides) = match rows {
        Rows::F32(words, strides) => (FloatType::F32, words, strides),
        Rows::F16(words, strides) => (FloatType::F16, words, strides),
        Rows::Pages(..) => panic!("amax reads rows"),
    };
    let source = gpu.upload("source", words)?;
    let mut places = poison(3 + GUARD);
    places[1] = so_far.to_bits();
    let largest = gpu.upload("largest", &places)?;
    let params = amax::Params {
        tokens,
        heads,
        head_dim,
        row_offset: strides.offset,
        row_stride: strides.row,
        head_stride: strides.head,
        slot: 1,
    };
    gpu.submit("amax", |encoder| {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        Amax::plan(gpu, float)?.encode(gpu, &mut pass, [&source, &largest], params)
    })?;
    gpu.read("largest", &largest, 3 + GUARD)
}

/// The same of part of a buffer of f32.
fn amax_of(gpu: &Gpu, numbers: &[u32], part: Range<u32>, so_far: f32) -> Vec<u32> {
    let strides = RowStrides {
        offset: part.start,
        row: 0,
        head: 0,
    };
    let rows = Rows::F32(numbers.to_vec(), strides);
    amax_of_rows(gpu, &rows, [1, 1, part.end - part.start], so_far).unwrap()
}

/// One number of a kind that amax meets, by its place.
fn number_for_amax(rng: &mut Rng, place: usize) -> u32 {
    match place {
        _ if place % 5 == 4 => rng.pick(&SPECIALS[..8]),
        _ if place % 9 == 8 => rng.pick(&SPECIALS[10..19]),
        _ => rng.real_within(-20..20).to_bits(),
    }
}

fn amax_sizes(gpu: &Gpu, sizes: &[u32]) -> Outcome {
    let mut outcome = Outcome::default();
    let mut rng = Rng(3);
    for &size in sizes {
        for (offset, so_far) in [(0, 0.0), (7, 0.4), (1, 1e30)] {
            // The largest ones stand before and behind the part; NaN, infinities and subnormals do not count.
            let mut numbers = vec![f32::MAX.to_bits(); (offset + size + 40) as usize];
            let part = &mut numbers[offset as usize..][..size as usize];
            for (i, x) in part.iter_mut().enumerate() {
                *x = number_for_amax(&mut rng, i);
            }
            let expected = reference::amax(part.iter().map(|&x| f32::from_bits(x)), so_far);
            let mut places = poison(3 + GUARD);
            places[1] = expected.to_bits();
            let got = amax_of(gpu, &numbers, offset..offset + size, so_far);
            outcome.words(&places, &got, |i, bit| {
                format!("amax of {size} numbers: place {i}, bit {bit}")
            });
        }
    }
    outcome
}

/// Rows among larger numbers that do not belong to them, f32 and f16: behind an odd offset, in fused rows, head by head.
fn amax_layouts(gpu: &Gpu, shapes: &[[u32; 3]]) -> Outcome {
    let mut outcome = Outcome::default();
    let mut rng = Rng(31);
    for &[tokens, heads, head_dim] in shapes {
        let strides = |offset, row, head| RowStrides { offset, row, head };
        for strides in [
            strides(0, heads * head_dim, head_dim),
            strides(7, heads * head_dim + 1, head_dim),
            strides(2 * head_dim, 6 * heads * head_dim, 3 * head_dim),
            strides(1, head_dim, tokens * head_dim),
        ] {
            for half in [false, true] {
                let last =
                    strides.offset + (tokens - 1) * strides.row + (heads - 1) * strides.head + head_dim;
                let outside = if half { 65504.0 } else { f32::MAX };
                let mut numbers = vec![outside.to_bits(); last as usize + 2];
                let mut all = Vec::new();
                for token in 0..tokens {
                    for head in 0..heads {
                        let first = strides.offset + token * strides.row + head * strides.head;
                        for x in &mut numbers[first as usize..][..head_dim as usize] {
                            let bits = number_for_amax(&mut rng, all.len());
                            // Smaller than what lies between the rows as halves too.
                            *x = if half {
                                (f32::from_bits(bits) * 0.01).to_bits()
                            } else {
                                bits
                            };
                            all.push(*x);
                        }
                    }
                }
                let rows = if half {
                    Rows::F16(halves(&numbers), strides)
                } else {
                    Rows::F32(numbers, strides)
                };
                let seen = |&bits: &u32| match half {
                    true => half::f16::from_f32(f32::from_bits(bits)).to_f32(),
                    false => f32::from_bits(bits),
                };
                let mut places = poison(3 + GUARD);
                places[1] = reference::amax(all.iter().map(seen), 0.0).to_bits();
                let got = amax_of_rows(gpu, &rows, [tokens, heads, head_dim], 0.0).unwrap();
                outcome.words(&places, &got, |i, bit| {
                    format!("amax of {tokens} x {heads} x {head_dim}, {strides:?}, f16 {half}: place {i}, bit {bit}")
                });
            }
        }
    }
    outcome
}

#[test]
fn amax_of_many_sizes() {
    let Some(gpu) = gpu("amax") else { return };
    amax_sizes(gpu, &[0, 1, 15, 16, 17, 1023, 1024, 1025, 1_000_003]).pass();
}

#[test]
fn amax_of_rows_in_any_layout() {
    let Some(gpu) = gpu("amax layouts") else { return };
    amax_layouts(gpu, &[[1, 1, 8], [5, 3, 40], [1, 8, 256], [700, 2, 24]]).pass();
}

#[test]
fn amax_refuses_more_numbers_than_a_dispatch_can_hold() {
    let Some(gpu) = gpu("amax limit") else { return };
    // One row over and over: the buffer is small whatever the number of tokens.
    let strides = RowStrides {
        offset: 0,
        row: 0,
        head: 0,
    };
    let rows = Rows::F32(vec![0; 16], strides);
    let refused = amax_of_rows(gpu, &rows, [u32::MAX, 8, 16], 0.0).unwrap_err();
    assert!(matches!(refused, kvpack::Error::Limit { .. }), "{refused}");
}

/// `tensor_scale` on the GPU: the scales of a list of magnitudes, bits, with their neighbours on either side.
pub fn tensor_scales(gpu: &Gpu, element: Element, largest: &[u32]) -> Vec<u32> {
    let mut places = poison(2 + largest.len() + GUARD);
    places[2..][..largest.len()].copy_from_slice(largest);
    let source = gpu.upload("largest", &places).unwrap();
    let blank = poison(places.len());
    let scales = gpu.upload("tensor scales", &blank).unwrap();
    let params = tensor_scale::Params {
        first: 2,
        slots: largest.len() as u32,
    };
    gpu.submit("tensor_scale", |encoder| {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        TensorScale::plan(gpu, element)?.encode(gpu, &mut pass, [&source, &scales], params)
    })
    .unwrap();
    // The magnitudes start again from 0; what stands around them is left alone.
    places[2..][..largest.len()].fill(0);
    let after: Vec<u32> = gpu.read("largest", &source, places.len()).unwrap();
    assert_eq!(after, places);
    let after: Vec<u32> = gpu.read("tensor scales", &scales, places.len()).unwrap();
    let (mine, behind) = after[2..].split_at(largest.len());
    assert_eq!((&after[..2], behind), (&blank[..2], &blank[2 + largest.len()..]));
    mine.to_vec()
}

fn tensor_scale_sizes(gpu: &Gpu, sizes: &[usize]) -> Outcome {
    let mut outcome = Outcome::default();
    let mut rng = Rng(4);
    for element in formats::ALL.into_iter().filter(|element| !element.info().plain) {
        for &size in sizes {
            let largest: Vec<u32> = (0..size)
                .map(|i| match i % 4 {
                    0 => rng.real_within(-126..128).to_bits() & 0x7fff_ffff,
                    1 => (power(-90) * element.info().max)
                        .to_bits()
                        .wrapping_add_signed(rng.within(-3..4)),
                    2 => [0, 0x0080_0000, 0x7f7f_ffff][i % 3],
                    _ => rng.real_within(-20..20).to_bits() & 0x7fff_ffff,
                })
                .collect();
            let expected: Vec<u32> = largest
                .iter()
                .map(|&a| reference::tensor_scale(element, f32::from_bits(a)).to_bits())
                .collect();
            let got = tensor_scales(gpu, element, &largest);
            outcome.words(&expected, &got, |i, bit| {
                format!(
                    "scale of {} for {:08x}, bit {bit}",
                    element.info().name,
                    largest[i]
                )
            });
        }
    }
    outcome
}

#[test]
fn tensor_scale_of_many_magnitudes() {
    let Some(gpu) = gpu("tensor_scale") else { return };
    tensor_scale_sizes(gpu, &[0, 1, 15, 16, 17, 1_000_003]).pass();
}

// ---- cases of the field, on the CPU and on the GPU ---------------------------------------------------------------

/// Some numbers, packed and unpacked on one device.
struct Case {
    device: &'static str,
    layout: PageLayout,
    /// One page.
    words: Vec<u32>,
    status: (u32, u32),
    /// Unpacked, in the order of the numbers.
    values: Vec<f32>,
}

impl Case {
    /// The code of number `i` of the rows.
    fn code(&self, i: usize) -> u32 {
        let row_len = self.layout.heads * self.layout.head_dim;
        let (slot, c) = (i as u32 / row_len, i as u32 % row_len);
        let (word, bit) = self
            .layout
            .code_at(slot, c / self.layout.head_dim, c % self.layout.head_dim);
        self.words[word as usize] >> bit & u32::MAX >> (32 - self.layout.side.element.bits())
    }

    /// The first codes.
    fn codes(&self, count: usize) -> Vec<u32> {
        (0..count).map(|i| self.code(i)).collect()
    }

    /// The first codes of an integer format.
    fn integers(&self, count: usize) -> Vec<i32> {
        self.codes(count)
            .iter()
            .map(|&code| self.layout.side.element.decode(code) as i32)
            .collect()
    }

    /// The scale bits of a token's first group.
    fn scale(&self, slot: u32) -> u32 {
        let (word, bit) = self.layout.scale_at(slot, 0, 0).unwrap();
        self.words[word as usize] >> bit & u32::MAX >> (32 - self.layout.side.scale.bits())
    }
}

/// Packs numbers into one page of 16 tokens (or a token group), zeros behind them, on the CPU and, where there is one,
/// on the GPU, whose words must be the same.
fn both(test: &str, side: Side, head_dim: u32, numbers: &[f32], scale: f32) -> Vec<Case> {
    let layout = small_layout(side, 1, head_dim);
    let mut rows = vec![0; (layout.tokens * head_dim) as usize];
    for (row, x) in rows.iter_mut().zip(numbers) {
        *row = x.to_bits();
    }
    let from = if side.layout.token_group() > 1 {
        From::PagesF16
    } else {
        From::F32
    };
    let job = job(layout, &rows, from, scale, |_| 0..layout.tokens);
    let case = |device, packed: &Packed, rows: &[u32]| Case {
        device,
        layout,
        words: packed.words.clone(),
        status: (packed.status.non_finite, packed.status.saturated),
        values: rows
            .iter()
            .map(|&x| f32::from_bits(x))
            .take(numbers.len())
            .collect(),
    };
    let cpu = job.on_cpu();
    let cpu_rows = job.unpacked_on_cpu(&cpu);
    let mut cases = vec![case("CPU", &cpu, &cpu_rows)];
    if let Some(gpu) = gpu(test) {
        let (got, got_rows) = job.on_gpu(gpu).unwrap();
        job.compare(&cpu, &cpu_rows, &got, &got_rows).pass();
        cases.push(case("GPU", &got, &got_rows));
    }
    cases
}

fn named(side: &str) -> Side {
    side.parse().unwrap()
}

#[test]
fn num_01_e2m1_midpoints_go_to_the_even_code() {
    let midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    let both_signs = [midpoints, midpoints.map(|x: f32| -x)].concat();
    let codes = [0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14];
    // The scale is given; then it comes from a 6 in the block.
    for case in both("num_01", given(Element::E2m1), 16, &both_signs, 1.0) {
        assert_eq!(
            (case.codes(14), case.status),
            (codes.to_vec(), (0, 0)),
            "{}",
            case.device
        );
    }
    for case in both("num_01", named("fp4"), 16, &[both_signs, vec![6.0]].concat(), 1.0) {
        assert_eq!(
            (case.codes(14), case.scale(0)),
            (codes.to_vec(), 0x38),
            "{}",
            case.device
        );
    }
}

#[test]
fn num_02_e2m1_just_above_a_midpoint_goes_up() {
    for case in both(
        "num_02",
        given(Element::E2m1),
        8,
        &[0.25000006, 5.0000005, 6.5, 7.0],
        1.0,
    ) {
        assert_eq!(
            (case.codes(4), case.status),
            (vec![1, 7, 7, 7], (0, 1)),
            "{}",
            case.device
        );
    }
}

#[test]
fn num_03_every_code_survives_decode_and_encode() {
    for element in formats::ALL.into_iter().filter(|element| element.bits() <= 16) {
        let (bits, info) = (element.bits(), element.info());
        let written = |code: &u32| {
            let value = element.decode(*code);
            value.is_finite() && (info.float || value.abs() <= info.max)
        };
        let side = if element == Element::F16 {
            Side::F16
        } else {
            given(element)
        };
        for codes in (0..1_u32 << bits).filter(written).collect::<Vec<_>>().chunks(256) {
            let values: Vec<f32> = codes.iter().map(|&code| element.decode(code)).collect();
            for case in both("num_03", side, 16, &values, 1.0) {
                assert_eq!(
                    case.codes(codes.len()),
                    codes,
                    "{} on the {}",
                    info.name,
                    case.device
                );
                let same = case
                    .values
                    .iter()
                    .zip(&values)
                    .all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(
                    same && case.status == (0, 0),
                    "{} on the {}",
                    info.name,
                    case.device
                );
            }
        }
    }
}

#[test]
fn num_05_e4m3_overflow_saturates_and_is_counted() {
    let numbers = [
        464.0,
        465.0,
        1000.0,
        -1000.0,
        f32::INFINITY,
        f32::NAN,
        f32::NEG_INFINITY,
    ];
    for case in both("num_05", given(Element::E4m3), 8, &numbers, 1.0) {
        // NaN is written as +0; 7F is a matter of decoding only.
        assert_eq!(
            case.codes(7),
            [0x7e, 0x7e, 0x7e, 0xfe, 0x7e, 0, 0xfe],
            "{}",
            case.device
        );
        assert_eq!(case.status, (3, 3), "{}", case.device);
    }
}

#[test]
fn num_07_e4m3_subnormals_are_multiples_of_2_to_minus_9() {
    let values: Vec<f32> = (1..8).map(|m| m as f32 * 0.001953125).collect();
    for case in both("num_07", named("fp8"), 8, &values, 1.0) {
        assert_eq!(
            (case.codes(7), &case.values),
            ((1..8).collect(), &values),
            "{}",
            case.device
        );
    }
    // As scales of blocks.
    let mut blocks = vec![0.0; 7 * 16];
    for (block, &value) in blocks.chunks_mut(16).zip(&values) {
        block[3] = 6.0 * value;
        block[5] = value;
    }
    for case in both("num_07", named("fp4"), 16, &blocks, 1.0) {
        assert_eq!(
            (0..7).map(|slot| case.scale(slot)).collect::<Vec<_>>(),
            (1..8).collect::<Vec<_>>()
        );
        assert_eq!(case.values, blocks, "{}", case.device);
    }
}

#[test]
fn num_09_quotients_beside_a_half_are_decided_exactly() {
    let numbers = [0x4040_0000, 0x3c41_8307, 0x3da9_52a5, 0x3e7d_fbf9].map(f32::from_bits);
    for case in both("num_09", named("int8"), 8, &numbers, 1.0) {
        assert_eq!(case.codes(4), [127, 1, 4, 11], "{}", case.device);
    }
    for case in both(
        "num_09",
        named("int8").with_scale_type(ScaleType::F32),
        8,
        &numbers,
        1.0,
    ) {
        assert_eq!(
            (case.codes(4), case.scale(0)),
            (vec![127, 1, 3, 11], 0x3cc1_8306),
            "{}",
            case.device
        );
    }
}

#[test]
fn num_10_halves_go_to_the_even_integer() {
    let numbers = [0.5, 1.5, 2.5, -0.5, -2.5, 126.5, 127.0];
    for side in [given(Element::Int8), named("int8"), named("int8c(8)")] {
        let rows: Vec<f32> = match side.layout.token_group() {
            1 => numbers.to_vec(),
            // A channel of eight tokens.
            _ => numbers
                .iter()
                .flat_map(|&x| [x, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
                .collect(),
        };
        let step = rows.len() / numbers.len();
        for case in both("num_10", side, 8, &rows, 1.0) {
            let codes: Vec<i32> = case.integers(rows.len()).into_iter().step_by(step).collect();
            assert_eq!(codes, [0, 2, 2, 0, -2, 126, 127], "{side} on the {}", case.device);
        }
    }
}

#[test]
fn num_12_nibbles_do_not_borrow_from_each_other() {
    for case in both("num_12", given(Element::Int4), 8, &[-6.0, 2.0, 3.0, -2.0], 1.0) {
        assert_eq!(case.words[0], 0xe32a, "{}", case.device);
        assert_eq!(case.values, [-6.0, 2.0, 3.0, -2.0], "{}", case.device);
    }
}

#[test]
fn num_14_low_channels_stand_in_low_bits() {
    for side in [given(Element::Int4), named("int4")] {
        let numbers = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 0.0];
        for case in both("num_14", side, 8, &numbers, 1.0) {
            assert_eq!(case.words[0], 0x0765_4321, "{}", case.device);
            assert_eq!(case.values, numbers, "{}", case.device);
        }
    }
}

#[test]
fn num_15_signs_do_not_spill_into_neighbours() {
    for case in both("num_15", given(Element::Int4), 8, &[-1.0, 1.0, -1.0, 1.0], 1.0) {
        assert_eq!(case.words[0], 0x1f1f, "{}", case.device);
    }
    for case in both("num_15", given(Element::Int8), 8, &[-1.0, 1.0], 1.0) {
        assert_eq!(case.words[0], 0x01ff, "{}", case.device);
    }
    for case in both("num_15", given(Element::Int2), 8, &[-1.0, 1.0, -1.0], 1.0) {
        assert_eq!(case.words[0], 0b11_01_11, "{}", case.device);
    }
}

#[test]
fn num_19_rounding_to_f16_as_elements_and_as_scales() {
    let numbers = [
        1.0 + power(-11),
        (1.0 + power(-11)).next_up(),
        65519.996,
        65520.0,
        power(-25),
        3.0 * power(-25),
    ];
    let halves = [0x3c00, 0x3c01, 0x7bff, 0x7bff, 0, 2];
    for case in both("num_19", Side::F16, 8, &numbers, 1.0) {
        assert_eq!(
            (case.codes(6), case.status),
            (halves.to_vec(), (0, 1)),
            "{}",
            case.device
        );
    }
    // INT2 divides by 1: the scale is the largest magnitude.
    let rows: Vec<f32> = numbers
        .iter()
        .flat_map(|&x| [x, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
        .collect();
    for case in both("num_19", named("int2"), 8, &rows, 1.0) {
        let scales: Vec<u32> = (0..6).map(|slot| case.scale(slot)).collect();
        assert_eq!(
            (scales, case.status),
            (halves.to_vec(), (0, 1)),
            "{}",
            case.device
        );
    }
}

#[test]
fn scl_01_groups_of_zeros() {
    let sides = ["fp4", "int8", "int4", "int2", "int8c(8)", "int4c", "int2c(128)"];
    for side in sides.map(named) {
        let zeros: Vec<f32> = (0..16).map(|i| if i % 3 == 2 { -0.0 } else { 0.0 }).collect();
        for case in both("scl_01", side, 16, &zeros, 1.0) {
            // FP4 keeps the sign of zero.
            let expected = |i: &usize| {
                if side.element == Element::E2m1 && i % 3 == 2 {
                    8
                } else {
                    0
                }
            };
            assert_eq!(
                case.codes(16),
                (0..16).map(|i| expected(&i)).collect::<Vec<_>>(),
                "{side}"
            );
            assert_eq!(
                case.scale(0),
                u32::from(side.element == Element::E2m1),
                "{side} on the {}",
                case.device
            );
            assert!(
                case.values.iter().all(|&x| x == 0.0),
                "{side} on the {}",
                case.device
            );
        }
    }
}

#[test]
fn scl_03_scales_of_fp4_clamp_and_never_become_nan() {
    let mut blocks = [0.0; 32];
    (blocks[0], blocks[16]) = (3000.0, 2688.0);
    for case in both("scl_03", named("fp4"), 16, &blocks, 1.0) {
        assert_eq!([case.scale(0), case.scale(1)], [0x7e, 0x7e], "{}", case.device);
        assert_eq!(
            [case.values[0], case.values[16]],
            [2688.0, 2688.0],
            "{}",
            case.device
        );
        assert_eq!(case.status, (0, 1), "{}", case.device);
    }
}

#[test]
fn scl_04_f16_scales_that_underflow_make_zeros() {
    let mut rows = [0.0; 16];
    (rows[0], rows[1], rows[8], rows[9]) = (1e-6, -5e-7, 3e-6, -3e-6);
    for case in both("scl_04", named("int8"), 8, &rows, 1.0) {
        assert_eq!([case.scale(0), case.scale(1)], [0, 0], "{}", case.device);
        assert!(
            case.values.iter().all(|&x| x == 0.0) && case.status == (0, 0),
            "{}",
            case.device
        );
    }
}

#[test]
fn scl_06_a_constant_channel() {
    for side in ["int8c", "int4c", "int2c"].map(named) {
        for case in both("scl_06", side, 8, &[0.7; 32 * 8], 1.0) {
            let scale = side.scale.decode(case.scale(0));
            assert!(scale.is_finite() && scale > 0.0, "{side} on the {}", case.device);
            assert!(
                case.values.iter().all(|x| (x - 0.7).abs() < 0.7 * power(-10)),
                "{side}: {:?}",
                case.values[0]
            );
        }
    }
}

#[test]
fn scl_08_tiny_amax_of_fp8() {
    let row = [6.3e-38, 0.0, -6.3e-38, 0.0];
    let scale = reference::tensor_scale(Element::E4m3, reference::amax(row, 0.0));
    assert_eq!(scale, 0.0);
    if let Some(gpu) = gpu("scl_08") {
        let largest = amax_of(gpu, &row.map(f32::to_bits), 0..4, 0.0)[1];
        assert_eq!(
            (largest, tensor_scales(gpu, Element::E4m3, &[largest])),
            (6.3e-38_f32.to_bits(), vec![0])
        );
    }
    // Under that scale and under the least one that can be given.
    for scale in [scale, power(-90)] {
        for case in both("scl_08", named("fp8"), 8, &row, scale) {
            assert_eq!(
                (case.codes(4), case.status),
                (vec![0, 0, 0x80, 0], (0, 0)),
                "{}",
                case.device
            );
            assert!(case.values.iter().all(|&x| x == 0.0), "{}", case.device);
        }
    }
}

#[test]
fn scl_10_f16_scales_that_overflow_are_clamped_and_counted() {
    for (side, amax, value, saturated) in [
        ("int4", 500_000.0, 7.0 * 65504.0, 2),
        ("int2", 70_000.0, 65504.0, 1),
        ("int2", 1e30, 65504.0, 2),
    ] {
        for case in both("scl_10", named(side), 8, &[amax, 1.0], 1.0) {
            assert_eq!(case.scale(0), 0x7bff, "{side} on the {}", case.device);
            assert_eq!(case.values, [value, 0.0], "{side} on the {}", case.device);
            assert_eq!(case.status, (0, saturated), "{side} on the {}", case.device);
        }
    }
}

#[test]
fn scl_11_nan_and_infinity_stay_out_of_the_scale() {
    let numbers = [
        1.0,
        f32::NAN,
        -2.0,
        0.5,
        f32::INFINITY,
        f32::NEG_INFINITY,
        -f32::NAN,
        1.0,
    ];
    for (side, codes) in [
        ("int8", vec![64, 0, 0x81, 32, 0x7f, 0x81, 0, 64]),
        ("int4", vec![4, 0, 9, 2, 7, 9, 0, 4]),
        ("int2", vec![0, 0, 3, 0, 1, 3, 0, 0]),
    ] {
        let side = named(side);
        for case in both("scl_11", side, 8, &numbers, 1.0) {
            assert_eq!(
                case.scale(0),
                side.scale.from_amax(2.0, side.element.info().max).bits,
                "{side}"
            );
            assert_eq!(
                (case.codes(8), case.status),
                (codes.clone(), (4, 0)),
                "{side} on the {}",
                case.device
            );
        }
    }
}

#[test]
fn scl_13_nan_codes_decode_to_nan_and_are_never_written() {
    let layout = small_layout(named("fp8"), 1, 8);
    let mut pool = vec![0x3830_2820; layout.words as usize];
    pool[5] = 0xff30_7f20;
    let mut runs = Vec::new();
    slot_runs(0, 0, 16, |slot| slot, &mut runs);
    let check = |rows: &[u32], device: &str| {
        let is_nan: Vec<usize> = rows
            .iter()
            .enumerate()
            .filter(|(_, x)| f32::from_bits(**x).is_nan())
            .map(|(i, _)| i)
            .collect();
        // Slot 5, channels 1 and 3; nothing beside them.
        assert_eq!(is_nan, [5 * 8 + 1, 5 * 8 + 3], "{device}");
    };
    let mut rows = vec![0.0; 16 * 8];
    reference::dequantize(&layout, &runs, 1.0, &pool, &mut rows);
    check(&rows.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), "CPU");
    if let Some(gpu) = gpu("scl_13") {
        check(&unpack_on_gpu(gpu, &layout, &pool, &runs, 1.0), "GPU");
    }
    let all: Vec<f32> = (0..0x1_0000)
        .map(|code| half::f16::from_bits(code as u16).to_f32())
        .collect();
    for part in all.chunks(256) {
        for case in both("scl_13", named("fp8"), 16, part, 0.37) {
            assert!(
                case.codes(256).iter().all(|code| code & 0x7f != 0x7f),
                "{}",
                case.device
            );
        }
    }
}

#[test]
fn scl_14_an_outlier_costs_integers_their_neighbours_and_e4m3_nothing() {
    let mut numbers = [1.0; 32];
    numbers[0] = 100.0;
    let exact = ScaleType::F32;
    let value = |side: Side, scale: f32| {
        let cases = both("scl_14", side, 32, &numbers, scale);
        assert!(
            cases
                .iter()
                .all(|case| case.values[1..].iter().all(|&x| x == case.values[1]))
        );
        cases[0].values[1]
    };
    let int8 = value(named("int8").with_scale_type(exact), 1.0);
    let fp8 = value(named("fp8"), reference::tensor_scale(Element::E4m3, 100.0));
    let int4 = value(named("int4").with_scale_type(exact), 1.0);
    assert!(
        (int8 - 0.7874).abs() < 1e-4 && (fp8 - 1.00446).abs() < 1e-5 && int4 == 0.0,
        "{int8} {fp8} {int4}"
    );
}

#[test]
fn dev_14_quotients_beyond_every_integer_are_clamped() {
    for (element, limit) in [
        (Element::Int8, 127.0),
        (Element::Int4, 7.0),
        (Element::Int2, 1.0),
        (Element::E4m3, 448.0),
    ] {
        for (large, scale) in [(3e9, 1.0), (3e38, 1e-20), (1e-10, power(-90))] {
            for case in both("dev_14", given(element), 8, &[large, -large], scale) {
                let codes = case
                    .codes(2)
                    .into_iter()
                    .map(|code| element.decode(code))
                    .collect::<Vec<_>>();
                assert_eq!(
                    (codes, case.status),
                    (vec![limit, -limit], (0, 2)),
                    "{element:?} on the {}",
                    case.device
                );
            }
        }
    }
}

#[test]
fn dev_09_buffers_are_padded_to_words_and_pools_are_bound_whole() {
    let Some(gpu) = gpu("dev_09") else { return };
    let payload: Vec<u8> = (1..=35).collect();
    let buffer = gpu.upload("payload", &payload).unwrap();
    assert_eq!(buffer.size(), 36);
    assert_eq!(gpu.read::<u8>("payload", &buffer, 35).unwrap(), payload);
    assert_eq!(gpu.zeros("zeros", 35).unwrap().size(), 36);
    assert_eq!(gpu.zeros("nothing", 0).unwrap().size(), 16);
    // A copy of the padded payload before a guard word.
    let guarded = gpu.upload("guarded", &poison(10)).unwrap();
    gpu.submit("copy", |encoder| {
        encoder.copy_buffer_to_buffer(&buffer, 0, &guarded, 0, buffer.size());
        Ok(())
    })
    .unwrap();
    assert_eq!(
        gpu.read::<u32>("guarded", &guarded, 10).unwrap()[9],
        poison(10)[9]
    );
    // A page of 640 bytes begins at no multiple of 256; only the page that is packed changes.
    let layout = PageLayout::new(named("int4c(16)"), 1, 16, 64).unwrap();
    assert_eq!(layout.bytes(), 640);
    let rows: Vec<u32> = (0..5 * 64 * 16).map(|i| (i as f32).sin().to_bits()).collect();
    for page in 0..5 {
        check_page(gpu, layout, &rows, page);
    }
}

/// Packs one page of a pool and compares all of it.
fn check_page(gpu: &Gpu, layout: PageLayout, rows: &[u32], page: u32) {
    let job = job(layout, rows, From::PagesF16, 1.0, |source| {
        if source == page { 0..layout.tokens } else { 0..0 }
    });
    job.check(gpu).pass();
}

// ---- a part for other drivers ------------------------------------------------------------------------------------

mod portable {
    use super::*;

    #[test]
    fn random_rows() {
        let Some(gpu) = gpu("portable random rows") else {
            return;
        };
        for (k, side) in (0..).zip(Side::all()) {
            let (outcome, rows) = random_side(gpu, side, &SHAPES[2..3], 0.004, 50 + k);
            outcome.pass();
            assert!(rows >= 400);
        }
    }

    #[test]
    fn ties_and_special_numbers() {
        let Some(gpu) = gpu("portable ties") else { return };
        let sides =
            ["f16", "fp8", "int8", "int4", "int2", "fp4", "int4c(8)"].map(|name| name.parse().unwrap());
        let f32_scales: [Side; 2] =
            [sides[2], sides[6]].map(|side: Side| side.with_scale_type(ScaleType::F32));
        for sides in [&sides[..], &f32_scales] {
            ties(gpu, sides).pass();
            specials(gpu, sides).pass();
        }
    }

    #[test]
    fn every_f16_value() {
        let Some(gpu) = gpu("portable f16 values") else {
            return;
        };
        all_f16_values(gpu, Side::F16).pass();
    }

    #[test]
    fn partial_runs_and_strides() {
        let Some(gpu) = gpu("portable runs") else { return };
        let sides = ["f16", "int4", "int2", "fp4"].map(|name| name.parse().unwrap());
        partial_runs(gpu, &sides).pass();
        strided_rows(gpu, &sides[1..2]).pass();
    }

    #[test]
    fn groups_with_sinks_of_some_sides() {
        let Some(gpu) = gpu("portable sinks") else { return };
        groups_with_sinks(gpu, &["int4c(8)", "int2c(16)"].map(|name| name.parse().unwrap())).pass();
    }

    #[test]
    fn amax_and_tensor_scale() {
        let Some(gpu) = gpu("portable amax") else { return };
        amax_sizes(gpu, &[0, 17, 1025]).pass();
        amax_layouts(gpu, &[[5, 3, 40]]).pass();
        tensor_scale_sizes(gpu, &[17, 1000]).pass();
    }
}
