//! Packing and unpacking: bits against the reference.

use super::{Outcome, Random};
use crate::error::Result;
use crate::formats::Element;
use crate::gpu::Gpu;
use crate::kernels::amax::{self, Amax};
use crate::kernels::dequantize::Dequantize;
use crate::kernels::quantize::{Buffers, Quantize, Source};
use crate::kernels::quantize_group::QuantizeGroup;
use crate::kernels::tensor_scale::{self, TensorScale};
use crate::kernels::{FloatType, RowStrides};
use crate::pages::PageLayout;
use crate::reference;
use crate::spec::Side;
use crate::work::{SlotRun, Status, slot_runs};

/// What untouched words hold before a run.
const POISON: u32 = 0xdead_beef;

/// Whether a kernel serves a side.
pub(super) fn applies(kernel: &str, side: Side) -> bool {
    match kernel {
        "quantize" => side.layout.token_group() == 1,
        "quantize_group" => side.layout.token_group() > 1,
        _ => true,
    }
}

/// Checks one page kernel for one side at several shapes, with rows as bad as they come.
pub(super) fn check(gpu: &Gpu, kernel: &str, side: Side) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let tokens = 64.max(side.layout.token_group());
    for (heads, head_dim) in [(2, 8), (2, 40), (4, 128)] {
        let page = PageLayout::new(side, heads, head_dim, tokens)?;
        let count = 2 * tokens - if side.layout.token_group() > 1 { 0 } else { 3 };
        let rows = nasty_rows(count, heads * head_dim, u64::from(head_dim));
        let check = PageCheck {
            page,
            rows: &rows,
            tensor_scale: 0.0123,
        };
        let (found, cases) = match kernel {
            "dequantize" => (check.dequantize(gpu)?, rows.len()),
            _ => (check.pack(gpu)?, rows.len()),
        };
        outcome.cases += cases as u64;
        outcome.bit_mismatches += found.len() as u64;
        if let (Some(first), true) = (found.first(), outcome.detail.is_empty()) {
            outcome.detail = format!("{heads} heads of {head_dim}: {first}");
        }
    }
    Ok(outcome)
}

/// Rows for one page geometry, to be packed by the GPU and by the reference.
#[derive(Debug, Clone, Copy)]
pub struct PageCheck<'a> {
    /// The geometry.
    pub page: PageLayout,
    /// `[token][head][channel]`; for per-channel sides whole groups.
    pub rows: &'a [f32],
    /// The per-tensor scale, where the side has one.
    pub tensor_scale: f32,
}

impl PageCheck<'_> {
    fn tokens(&self) -> u32 {
        (self.rows.len() / (self.page.heads * self.page.head_dim) as usize) as u32
    }

    /// The pages in shuffled order, and the runs that pack all tokens into them.
    fn runs(&self) -> (u32, Vec<SlotRun>) {
        let pages = self.tokens().div_ceil(self.page.tokens);
        let order = Random::new(7).permutation(pages);
        let mut runs = Vec::new();
        for (place, &id) in (0..).zip(&order) {
            let start = place * self.page.tokens;
            let live = (self.tokens() - start).min(self.page.tokens);
            slot_runs(id, 0, live, |slot| start + slot, &mut runs);
        }
        (pages, runs)
    }

    /// The pages in which the rows wait for a per-channel side, as the reference packs them: f16, same page ids.
    fn waiting(&self, pages: u32, runs: &[SlotRun]) -> Result<(PageLayout, Vec<u32>)> {
        let page = PageLayout::new(Side::F16, self.page.heads, self.page.head_dim, self.page.tokens)?;
        let mut words = vec![0; (page.words * pages) as usize];
        let (mut status, row) = (Status::default(), self.row());
        reference::quantize(&page, runs, row, 1.0, &mut words, &mut status);
        Ok((page, words))
    }

    fn row(&self) -> impl Fn(&SlotRun, u32, u32, u32) -> f32 {
        let Self { page, rows, .. } = *self;
        move |run, i, head, channel| {
            rows[(((run.source + i) * page.heads + head) * page.head_dim + channel) as usize]
        }
    }

    /// The group runs of a per-channel side: each group waits in the page of the same id.
    fn groups(&self, runs: &[SlotRun]) -> Vec<SlotRun> {
        let group = self.page.side.layout.token_group();
        let starts = runs.iter().filter(|run| run.slot % group == 0);
        starts
            .map(|run| SlotRun {
                count: group,
                source: run.page,
                ..*run
            })
            .collect()
    }

    /// The pool and the status as the reference packs them; untouched words keep their poison.
    pub fn reference(&self) -> Result<(Vec<u32>, Status)> {
        let (pages, runs) = self.runs();
        let mut pool = vec![POISON; (self.page.words * pages) as usize];
        let mut status = Status::default();
        if self.page.side.layout.token_group() > 1 {
            let (from, words) = self.waiting(pages, &runs)?;
            let number = |run: &SlotRun, i: u32, head: u32, channel: u32| {
                let at = (run.source * from.words) as usize;
                from.number(
                    &words[at..at + from.words as usize],
                    run.slot + i,
                    head,
                    channel,
                    1.0,
                )
            };
            reference::quantize_group(&self.page, &self.groups(&runs), number, &mut pool, &mut status);
        } else {
            reference::quantize(
                &self.page,
                &runs,
                self.row(),
                self.tensor_scale,
                &mut pool,
                &mut status,
            );
        }
        Ok((pool, status))
    }

    /// The same from the GPU.
    ///
    /// # Errors
    /// What the kernels and the device report.
    pub fn gpu(&self, gpu: &Gpu) -> Result<(Vec<u32>, Status)> {
        let (pages, runs) = self.runs();
        let words = (self.page.words * pages) as usize;
        // A page of guard words behind the pool.
        let pool = gpu.upload("pages", &vec![POISON; words + self.page.words as usize])?;
        let status = gpu.zeros("status", 8)?;
        let tensor_scales = gpu.upload("per-tensor scales", &[self.tensor_scale])?;
        let grouped = self.page.side.layout.token_group() > 1;
        let (source, runs) = if grouped {
            let (_, words) = self.waiting(pages, &runs)?;
            (gpu.upload("waiting pages", &words)?, self.groups(&runs))
        } else {
            (gpu.upload("rows", self.rows)?, runs)
        };
        let run_list = gpu.upload("runs", &runs)?;
        let buffers = Buffers {
            source: &source,
            runs: &run_list,
            tensor_scales: &tensor_scales,
            pages: &pool,
            status: &status,
        };
        let count = runs.len() as u32;
        if grouped {
            let waiting = PageLayout::new(Side::F16, self.page.heads, self.page.head_dim, self.page.tokens)?;
            let kernel = QuantizeGroup::plan(gpu, &self.page, &waiting)?;
            gpu.submit("quantize_group", |encoder| {
                kernel.encode(
                    gpu,
                    &mut encoder.begin_compute_pass(&Default::default()),
                    &buffers,
                    count,
                )
            })?;
        } else {
            let kernel = Quantize::plan(gpu, &self.page, &Source::F32)?;
            gpu.submit("quantize", |encoder| {
                let mut pass = encoder.begin_compute_pass(&Default::default());
                kernel.encode(gpu, &mut pass, &buffers, count, RowStrides::dense(&self.page), 0)
            })?;
        }
        let mut pool = gpu.read("pages", &pool, words + self.page.words as usize)?;
        // Guard words that changed are kept, so that the comparison of lengths shows them.
        let guard = pool.split_off(words);
        if guard.iter().any(|&word| word != POISON) {
            pool.extend(guard);
        }
        Ok((pool, gpu.read("status", &status, 1)?[0]))
    }

    /// Packs on both sides: what differs, in words; empty where all is equal.
    ///
    /// # Errors
    /// What the kernels and the device report.
    pub fn pack(&self, gpu: &Gpu) -> Result<Vec<String>> {
        let (mut wanted, wanted_status) = self.reference()?;
        let (mut got, status) = self.gpu(gpu)?;
        // Padding is read as zero: what a kernel leaves in the bits that belong to no number is its own affair.
        let used = self
            .page
            .live_words(&vec![u32::MAX; self.page.words as usize], 0, self.page.tokens);
        for words in [&mut wanted, &mut got] {
            words
                .iter_mut()
                .zip(used.iter().cycle())
                .for_each(|(word, used)| *word &= used);
        }
        let mut found = mismatches(&wanted, &got, |i| {
            format!(
                "page {}, word {}",
                i as u32 / self.page.words,
                i as u32 % self.page.words
            )
        });
        if status != wanted_status {
            found.push(format!("status: {wanted_status:?} expected, {status:?} found"));
        }
        Ok(found)
    }

    /// Unpacks the reference's pages on both sides: what differs.
    ///
    /// # Errors
    /// What the kernels and the device report.
    pub fn dequantize(&self, gpu: &Gpu) -> Result<Vec<String>> {
        let (pool, _) = self.reference()?;
        let (_, runs) = self.runs();
        let mut wanted = vec![0.0; self.rows.len()];
        reference::dequantize(&self.page, &runs, self.tensor_scale, &pool, &mut wanted);
        let kernel = Dequantize::plan(gpu, &self.page)?;
        let [pages, list] = [gpu.upload("pages", &pool)?, gpu.upload("runs", &runs)?];
        let tensor_scales = gpu.upload("per-tensor scales", &[self.tensor_scale])?;
        let rows = gpu.upload("rows", &vec![POISON; self.rows.len()])?;
        gpu.submit("dequantize", |encoder| {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            kernel.encode(
                gpu,
                &mut pass,
                [&pages, &list, &tensor_scales, &rows],
                runs.len() as u32,
                0,
            )
        })?;
        let got: Vec<u32> = gpu.read("rows", &rows, self.rows.len())?;
        let wanted: Vec<u32> = wanted.into_iter().map(f32::to_bits).collect();
        Ok(mismatches(&wanted, &got, |i| format!("number {i}")))
    }
}

/// Every place where two lists of words differ.
fn mismatches(wanted: &[u32], got: &[u32], place: impl Fn(usize) -> String) -> Vec<String> {
    let mut found: Vec<String> = (0..)
        .zip(wanted.iter().zip(got))
        .filter(|(_, (a, b))| a != b)
        .map(|(i, (a, b))| format!("{}: {a:08x} expected, {b:08x} found", place(i)))
        .collect();
    if wanted.len() != got.len() {
        found.push(format!("{} words expected, {} found", wanted.len(), got.len()));
    }
    found
}

/// `count` rows of `row` numbers: several magnitudes, an outlier channel, half steps (ties), constants, zeros of both
/// signs, subnormals, NaN and infinities, scales that under- and overflow.
pub fn nasty_rows(count: u32, row: u32, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    let mut rows = Vec::with_capacity((count * row) as usize);
    for token in 0..count {
        let kind = token % 16;
        let exponent = random.below(240) as i32 - 120;
        for channel in 0..row {
            let x = random.normal();
            rows.push(match kind {
                0..=4 => x * if channel % 8 == 3 { 30.0 } else { 1.0 },
                5 => x * 2.0_f32.powi(exponent),
                // Half steps of a scale of 1: ties for every integer element.
                6 => (x * 40.0).round() * 0.5,
                7 => 0.7,
                8 => [0.0, -0.0][channel as usize % 2],
                9 => f32::from_bits(random.bits() as u32 & 0x807f_ffff),
                10 => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, x][random.below(4) as usize],
                11 => x * 1e-7,
                12 => x * 1e38,
                13 => x * 70_000.0,
                // Multiples of a quarter: ties of E2M1 and E4M3.
                14 => (x * 16.0).round() * 0.25,
                _ => f32::from_bits(random.bits() as u32),
            });
        }
    }
    rows
}

/// Checks `amax` or `tensor_scale`: bits against the reference.
pub(super) fn check_calibration(gpu: &Gpu, kernel: &str) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let element = Element::E4m3;
    for numbers in [1, 15, 16, 17, 1025, 70_000] {
        let rows = nasty_rows(numbers, 1, u64::from(numbers));
        let source = gpu.upload("rows", &rows)?;
        let [largest, scales] = [gpu.zeros("largest", 8)?, gpu.zeros("scales", 8)?];
        let amax = Amax::plan(gpu, FloatType::F32)?;
        let scale = TensorScale::plan(gpu, element)?;
        let run = |both: bool| {
            gpu.submit("calibration", |encoder| {
                let mut pass = encoder.begin_compute_pass(&Default::default());
                amax.encode(
                    gpu,
                    &mut pass,
                    [&source, &largest],
                    amax::Params {
                        tokens: 1,
                        heads: 1,
                        head_dim: numbers,
                        row_offset: 0,
                        row_stride: numbers,
                        head_stride: numbers,
                        slot: 1,
                    },
                )?;
                let params = tensor_scale::Params { first: 0, slots: 2 };
                if both {
                    scale.encode(gpu, &mut pass, [&largest, &scales], params)
                } else {
                    Ok(())
                }
            })
        };
        let wanted = reference::amax(rows.iter().copied(), 0.0);
        let (wanted, got): (f32, Vec<f32>) = if kernel == "amax" {
            run(false)?;
            (wanted, gpu.read("largest", &largest, 2)?)
        } else {
            run(true)?;
            (
                reference::tensor_scale(element, wanted),
                gpu.read("scales", &scales, 2)?,
            )
        };
        let found = mismatches(
            &[0, wanted.to_bits()],
            &[got[0].to_bits(), got[1].to_bits()],
            |i| format!("{numbers} numbers, place {i}"),
        );
        outcome.cases += u64::from(numbers);
        outcome.bit_mismatches += found.len() as u64;
        outcome.detail = found.first().cloned().unwrap_or(outcome.detail);
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_flipped_bit_is_found() {
        let wanted = [1, 2, 3];
        assert!(mismatches(&wanted, &wanted, |i| i.to_string()).is_empty());
        assert_eq!(
            mismatches(&wanted, &[1, 2 ^ 0x8000_0000, 3], |i| i.to_string()).len(),
            1
        );
        assert_eq!(mismatches(&wanted, &[1, 2], |i| i.to_string()).len(), 1);
    }
}
