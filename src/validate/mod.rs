//! Every kernel on one adapter against the CPU reference.

/// One line of the validation report: a kernel with a format.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct ValidateRow {
    /// The kernel.
    pub kernel: String,
    /// The side or pair, or the shape for kernels without one.
    pub format: String,
    /// Inputs compared.
    pub cases: u64,
    /// Words or values whose bits differ; only 0 passes.
    pub bit_mismatches: u64,
    /// Largest error of a sum as a share of its bound; at most 1 passes. None where bits are compared.
    pub worst_share_of_bound: Option<f64>,
    /// Largest absolute error of a sum.
    pub max_error: Option<f64>,
    /// Its bound at that place.
    pub bound: Option<f64>,
    /// Wall time in milliseconds.
    pub milliseconds: f64,
    /// Whether everything held.
    pub passed: bool,
    /// What failed first, in words; empty where all passed.
    pub detail: String,
    /// The adapter's name and driver.
    pub adapter: String,
}

pub(crate) mod attention;
pub(crate) mod formulas;
mod pages;
mod transformer;

pub use attention::{Comparison, Fixture, Outputs, SLACK, SequenceInput, poison};
pub use pages::{PageCheck, nasty_rows};

use std::time::Instant;

use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::kernels::FloatType;
use crate::options::AttentionOptions;
use crate::pages::PageLayout;
use crate::spec::{Pair, Side, TABLE};
use crate::{kernels, model};

/// What to validate.
#[derive(Debug, Clone, Default)]
pub struct ValidateFilter {
    /// Names of kernels; empty for all.
    pub kernels: Vec<String>,
    /// Pairs; empty for the pairs of the drift table, f32, every group length, and mixtures with f16 as they occur while
    /// tokens wait.
    pub pairs: Vec<Pair>,
}

/// The kernels that can be named.
pub fn kernel_names() -> Vec<&'static str> {
    kernels::ALL
        .iter()
        .chain(&model::kernels::ALL)
        .map(|kernel| kernel.name)
        .collect()
}

/// The pairs that are validated where none is named.
fn default_pairs() -> Result<Vec<Pair>> {
    let mut pairs: Vec<Pair> = TABLE.iter().map(|name| name.parse()).collect::<Result<_>>()?;
    pairs.extend(Side::all().into_iter().map(Pair::same));
    for name in ["f16/int4", "int4c/f16", "fp4/int2", "int8/fp8"] {
        pairs.push(name.parse()?);
    }
    let mut seen = Vec::new();
    pairs.retain(|pair| {
        !seen.contains(pair) && {
            seen.push(*pair);
            true
        }
    });
    Ok(pairs)
}

/// Runs the kernels on an adapter and compares them with the CPU reference. `report` hears each row as it is finished.
///
/// # Errors
/// [`Error::Usage`] for an unknown kernel; what shaders and the device report. A mismatch is no error but a row that did
/// not pass.
pub fn run(
    gpu: &Gpu,
    filter: &ValidateFilter,
    report: &mut dyn FnMut(&ValidateRow),
) -> Result<Vec<ValidateRow>> {
    let names = kernel_names();
    if let Some(unknown) = filter.kernels.iter().find(|name| !names.contains(&name.as_str())) {
        return Err(Error::Usage {
            asked: format!("kernel `{unknown}`"),
            reason: "there is no such kernel".to_owned(),
            advice: format!("choose from {}", names.join(", ")),
        });
    }
    let pairs = if filter.pairs.is_empty() {
        default_pairs()?
    } else {
        filter.pairs.clone()
    };
    let mut sides: Vec<Side> = pairs.iter().flat_map(|pair| [pair.k, pair.v]).collect();
    sides.sort();
    sides.dedup();
    let mut rows = Vec::new();
    for name in names {
        if !filter.kernels.is_empty() && !filter.kernels.iter().any(|wanted| wanted == name) {
            continue;
        }
        let mut add = |format: &str, started: Instant, outcome: Outcome| {
            let row = outcome.row(name, format, started, gpu);
            report(&row);
            rows.push(row);
        };
        match name {
            "quantize" | "quantize_group" | "dequantize" => {
                for &side in sides.iter().filter(|side| pages::applies(name, **side)) {
                    let started = Instant::now();
                    add(&side.to_string(), started, pages::check(gpu, name, side)?);
                }
            }
            "attention_split" => {
                for &pair in &pairs {
                    let started = Instant::now();
                    add(&pair.to_string(), started, attention_outcome(gpu, pair)?);
                }
                // Options change nothing about formats: the first pair and the last stand for all.
                let mut with_options: Vec<_> = pairs.first().into_iter().chain(pairs.last()).collect();
                with_options.dedup();
                for &pair in with_options {
                    let started = Instant::now();
                    let format = format!("{pair}, options");
                    add(&format, started, options_outcome(gpu, pair)?);
                }
            }
            "attention_merge" => {
                let started = Instant::now();
                add("-", started, merge_outcome(gpu)?);
            }
            "amax" | "tensor_scale" => {
                let started = Instant::now();
                add("-", started, pages::check_calibration(gpu, name)?);
            }
            _ => {
                let started = Instant::now();
                add("-", started, transformer::check(gpu, name)?);
            }
        }
    }
    Ok(rows)
}

/// What a check found, before it becomes a row.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outcome {
    cases: u64,
    bit_mismatches: u64,
    sums: Option<Comparison>,
    detail: String,
}

impl Outcome {
    fn add(&mut self, comparison: Comparison, what: &str) {
        self.cases += comparison.cases;
        if comparison.failures > 0 && self.detail.is_empty() {
            self.detail = format!(
                "{what}: {} of {} numbers beyond their bound, the worst off by {:.3e} of {:.3e}",
                comparison.failures, comparison.cases, comparison.max_error, comparison.bound
            );
        }
        self.sums.get_or_insert_default().join(comparison);
    }

    /// Nothing compared is no pass.
    fn passed(&self) -> bool {
        self.cases > 0 && self.bit_mismatches == 0 && self.sums.is_none_or(|sums| sums.failures == 0)
    }

    fn row(self, kernel: &str, format: &str, started: Instant, gpu: &Gpu) -> ValidateRow {
        ValidateRow {
            kernel: kernel.to_owned(),
            format: format.to_owned(),
            cases: self.cases,
            bit_mismatches: self.bit_mismatches,
            worst_share_of_bound: self.sums.map(|s| s.share()),
            max_error: self.sums.map(|s| s.max_error),
            bound: self.sums.map(|s| s.bound),
            milliseconds: started.elapsed().as_secs_f64() * 1e3,
            passed: self.passed(),
            detail: self.detail,
            adapter: gpu.summary().title(),
        }
    }
}

/// Attention of one pair: decode and prefill, head ratios 1 and 4, lengths around a page.
fn attention_outcome(gpu: &Gpu, pair: Pair) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let tokens = pair.default_page_tokens();
    for (heads, head_dim, ratio, prefill) in [(2, 64, 4, false), (2, 40, 1, true)] {
        let pages = [
            PageLayout::new(pair.k, heads, head_dim, tokens)?,
            PageLayout::new(pair.v, heads, head_dim, tokens)?,
        ];
        let lengths = [0, 1, tokens - 1, tokens, tokens + 1, 300];
        let sequences = random_sequences(&pages, heads * ratio, &lengths, if prefill { 5 } else { 1 });
        let fixture = Fixture::new(pages, heads * ratio, &sequences, 2 * tokens, prefill)?;
        let comparison = fixture.compare(&fixture.gpu(gpu)?, &fixture.reference());
        outcome.add(
            comparison,
            &format!("{heads} heads of {head_dim}, ratio {ratio}, prefill {prefill}"),
        );
    }
    Ok(outcome)
}

/// Attention of one pair with every option at once, and some apart: f16 queries and outputs, sliding windows shorter than
/// a page and longer than a split, soft cap, sinks, scale, not causal.
fn options_outcome(gpu: &Gpu, pair: Pair) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let (heads, ratio, tokens) = (2, 3, pair.default_page_tokens());
    let pages = [
        PageLayout::new(pair.k, heads, 40, tokens)?,
        PageLayout::new(pair.v, heads, 40, tokens)?,
    ];
    let lengths = [0, 1, tokens + 1, 300];
    let sequences = random_sequences(&pages, heads * ratio, &lengths, 5);
    let mut fixture = Fixture::new(pages, heads * ratio, &sequences, 2 * tokens, false)?;
    let sinks: Vec<f32> = (0..heads * ratio).map(|head| head as f32 - 2.0).collect();
    let all = AttentionOptions {
        causal: true,
        window: Some(7),
        softcap: Some(20.0),
        scale: Some(0.3),
        sinks: Some(sinks),
    };
    let windowed = AttentionOptions {
        window: Some(2 * tokens + 3),
        ..AttentionOptions::default()
    };
    let open = AttentionOptions {
        causal: false,
        ..AttentionOptions::default()
    };
    for (options, float) in [
        (all, FloatType::F16),
        (windowed, FloatType::F16),
        (open, FloatType::F32),
    ] {
        let what = format!("{float:?}, {options:?}");
        (fixture.q_float, fixture.output_float, fixture.options) = (float, float, options);
        outcome.add(fixture.compare(&fixture.gpu(gpu)?, &fixture.reference()), &what);
    }
    Ok(outcome)
}

/// Many partials per row, some empty: `attention_merge` with a split a page.
fn merge_outcome(gpu: &Gpu) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let pages = [
        PageLayout::new(Side::F32, 1, 64, 8)?,
        PageLayout::new(Side::F32, 1, 64, 8)?,
    ];
    let sequences = random_sequences(&pages, 2, &[0, 1, 8, 9, 700], 3);
    let fixture = Fixture::new(pages, 2, &sequences, 8, true)?;
    outcome.add(
        fixture.compare(&fixture.gpu(gpu)?, &fixture.reference()),
        "splits of 8 tokens",
    );
    Ok(outcome)
}

/// Sequences of the given lengths with normal rows, an outlier channel in K, and `queries` queries each (fewer where the
/// sequence is shorter; an empty sequence has one query, which sees nothing).
pub fn random_sequences(
    pages: &[PageLayout; 2],
    q_heads: u32,
    lengths: &[u32],
    queries: u32,
) -> Vec<SequenceInput> {
    let mut random = Random::new(u64::from(q_heads) << 32 | u64::from(pages[0].head_dim));
    lengths
        .iter()
        .map(|&len| {
            let mut rows = |page: &PageLayout, outlier: f32| -> Vec<f32> {
                let row = page.heads * page.head_dim;
                (0..len * row)
                    .map(|i| random.normal() * if i % page.head_dim == 3 { outlier } else { 1.0 })
                    .collect()
            };
            let (k, v) = (rows(&pages[0], 8.0), rows(&pages[1], 1.0));
            let count = queries.min(len.max(1)) * q_heads * pages[0].head_dim;
            SequenceInput {
                k,
                v,
                q: (0..count).map(|_| random.normal()).collect(),
            }
        })
        .collect()
}

/// Seeded random numbers (splitmix64): the same on every machine.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A generator.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A whole number below `end`.
    pub fn below(&mut self, end: u32) -> u32 {
        (((self.bits() >> 32) * u64::from(end)) >> 32) as u32
    }

    /// Roughly normal: a sum of twelve uniforms less 6.
    pub fn normal(&mut self) -> f32 {
        (0..12)
            .map(|_| (self.bits() >> 40) as f32 / (1 << 24) as f32)
            .sum::<f32>()
            - 6.0
    }

    /// The numbers below `count` in random order.
    pub fn permutation(&mut self, count: u32) -> Vec<u32> {
        let mut order: Vec<u32> = (0..count).collect();
        for i in (1..count).rev() {
            order.swap(i as usize, self.below(i + 1) as usize);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mismatch_a_failure_and_nothing_compared_do_not_pass() {
        let good = Outcome {
            cases: 5,
            ..Outcome::default()
        };
        assert!(good.passed());
        assert!(!Outcome::default().passed());
        assert!(
            !Outcome {
                bit_mismatches: 1,
                ..good.clone()
            }
            .passed()
        );
        let mut sums = good;
        sums.add(
            Comparison {
                cases: 1,
                max_error: 0.5,
                bound: 1.0,
                failures: 0,
            },
            "within",
        );
        assert!(sums.passed());
        sums.add(
            Comparison {
                cases: 1,
                max_error: f64::NAN,
                bound: 1.0,
                failures: 1,
            },
            "NaN",
        );
        assert!(!sums.passed() && sums.detail.starts_with("NaN"));
    }
}
