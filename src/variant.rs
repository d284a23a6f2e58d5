//! Variants of the attention kernel: the same result, other work for the device. Which is fastest differs from adapter
//! to adapter; `kvpack tune` measures, and [`Variant::new`] is what holds without a measurement.

use std::fmt;

use crate::error::{Error, Result};
use crate::formats::Element;
use crate::pages::PageLayout;
use crate::spec::Side;

/// Workgroup memory that WebGPU guarantees, in bytes.
pub const WORKGROUP_BYTES: u32 = 16_384;
/// Invocations of a workgroup that WebGPU guarantees.
pub const WORKGROUP_INVOCATIONS: u32 = 256;
/// Rows (query heads x query tokens) of a workgroup: more of them spill registers.
const MAX_ROWS: u32 = 8;
/// Rows of a prefill workgroup with several query tokens: software drivers need seconds to compile larger tiles.
const PREFILL_ROWS: u32 = 4;
/// The smallest subgroup that WebGPU knows.
const MIN_SUBGROUP: u32 = 4;
/// Invocations that share a row in `parts/reduce_workgroup`.
const REDUCERS: u32 = 8;

/// How a workgroup finds one number of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "tuning",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
pub enum Reduction {
    /// Through workgroup memory.
    Workgroup,
    /// Within subgroups first; takes [`wgpu::Features::SUBGROUP`].
    Subgroup,
}

/// What scores are computed in. Values are always summed in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    any(feature = "tuning", feature = "export"),
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
pub enum Arithmetic {
    /// Codes decoded to f32: what the reference's bounds are made for.
    F32,
    /// Queries and codes in f16, four products summed in f16, the rest in f32; takes [`wgpu::Features::SHADER_F16`]. Less
    /// exact.
    F16,
    /// Queries rounded to 8-bit integers, products of packed integers. Less exact.
    Packed,
}

impl Arithmetic {
    /// What a side's keys can be scored in: this, or f32 where its codes or scales do not allow it. Scales of channels
    /// multiply queries, which would have to be rounded anew for each group.
    pub fn for_side(self, side: Side) -> Arithmetic {
        let integers = matches!(
            side.element,
            Element::Int8 | Element::Int4 | Element::Int2 | Element::E2m1
        );
        let by_channel = side.layout.token_group() > 1;
        match self {
            Arithmetic::Packed if by_channel || !integers => Arithmetic::F32,
            Arithmetic::F16 if by_channel || side.element == Element::F32 => Arithmetic::F32,
            other => other,
        }
    }

    /// What a row of queries is in this arithmetic, as far as the contract says: packed integers are q / u rounded to the
    /// nearest, u = max|q| / 127. Conversions to f16 may round either way, so their error is left to
    /// [`Arithmetic::score_error`].
    pub fn round_query(self, q: &[f32]) -> Vec<f32> {
        let largest = q.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
        let unit = largest / 127.0;
        match self {
            Arithmetic::Packed if largest > 0.0 => {
                q.iter().map(|x| (x / unit).round_ties_even() * unit).collect()
            }
            _ => q.to_vec(),
        }
    }

    /// A bound of what the product of a rounded query and a key may be off by beyond f32, before the factor of the scores.
    /// f16: each of a query's conversion and four operations loses up to 2^-10. Packed: a query next to a tie may become
    /// the other integer, where the device's division is not exact.
    pub fn score_error(self, q: &[f32], k: &[f32]) -> f64 {
        let size = |x: &f32| f64::from(x.abs());
        let largest = |row: &[f32]| row.iter().map(size).fold(0.0, f64::max);
        match self {
            Arithmetic::F32 => 0.0,
            Arithmetic::F16 => {
                let products: f64 = q.iter().zip(k).map(|(a, b)| size(a) * size(b)).sum();
                // Below the least normal f16, steps stay the same.
                let small = k.iter().map(size).sum::<f64>() * 4.0 * largest(q) * 2.0_f64.powi(-24);
                products * 5.0 * 2.0_f64.powi(-10) + small
            }
            Arithmetic::Packed => largest(q) / 127.0 * largest(k),
        }
    }
}

/// One way to run the attention kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "tuning", derive(serde::Serialize, serde::Deserialize))]
pub struct Variant {
    /// Invocations of a workgroup.
    pub workgroup: u32,
    /// Query heads of one workgroup.
    pub head_tile: u32,
    /// Query tokens of one workgroup.
    pub token_tile: u32,
    /// Neighbouring runs of four slots that an invocation scores at a time: 1, 2 or 4.
    pub slot_quads: u32,
    /// Channel quads that an invocation sums at a time: 2 or 4.
    pub channel_quads: u32,
    /// How one number of a row is found over a workgroup.
    pub reduction: Reduction,
    /// What scores are computed in.
    pub arithmetic: Arithmetic,
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tokens = 4 * self.slot_quads;
        write!(
            f,
            "{} invocations, {} heads x {} queries, {tokens} tokens and {} channels each, {:?} reduction, {:?} scores",
            self.workgroup,
            self.head_tile,
            self.token_tile,
            4 * self.channel_quads,
            self.reduction,
            self.arithmetic
        )
    }
}

impl Variant {
    /// What holds without a measurement: one read of K and V for all query heads of a KV head wherever their number is at
    /// most 8 and workgroup memory allows. `software` adapters run few invocations with much work each, since they gather
    /// each word by itself; on GPUs more invocations hide the latency of memory.
    pub fn new(pages: [&PageLayout; 2], ratio: u32, prefill: bool, software: bool) -> Variant {
        // From the largest tile to the smallest.
        // A software driver compiles four runs of slots twice as long as two, longest where heads are small and loops
        // unrolled: it pays for decode of large heads.
        let large = !prefill && pages[0].head_dim >= 64;
        let preferred: &[(u32, u32)] = match (software, large) {
            (true, true) => &[(32, 4), (32, 2), (32, 1)],
            (true, false) => &[(32, 2), (32, 1)],
            (false, _) => &[(64, 2), (64, 1)],
        };
        // The words of more channels of 16 bits take more registers than they save loads of probabilities.
        let wide =
            software && large && pages[1].head_dim.is_multiple_of(16) && pages[1].side.element.bits() < 16;
        let with = |&(workgroup, slot_quads): &(u32, u32)| {
            let slot_quads = most_slot_quads(pages).min(slot_quads);
            let mut variant = Variant {
                workgroup,
                head_tile: 1,
                token_tile: 1,
                slot_quads,
                channel_quads: if wide { 4 } else { 2 },
                reduction: Reduction::Workgroup,
                arithmetic: Arithmetic::F32,
            };
            let fits = |&rows: &u32| {
                let variant = Variant {
                    head_tile: rows,
                    ..variant
                };
                variant.workgroup_bytes(pages[0]) <= u64::from(WORKGROUP_BYTES)
            };
            let rows = (1..=MAX_ROWS).rev().find(fits).unwrap_or(1);
            // Even tiles: 12 heads are 6 + 6 rather than 8 + 4.
            variant.head_tile = ratio.div_ceil(ratio.div_ceil(rows));
            if prefill {
                variant.token_tile = (PREFILL_ROWS / variant.head_tile).clamp(1, rows / variant.head_tile);
            }
            variant
        };
        let mut variants = preferred.iter().map(with);
        let smallest = with(&preferred[preferred.len() - 1]);
        variants
            .find(|v| v.head_tile >= ratio.min(MAX_ROWS))
            .unwrap_or(smallest)
    }

    /// Features that the device must have.
    pub fn features(self) -> wgpu::Features {
        let mut features = wgpu::Features::empty();
        features.set(wgpu::Features::SUBGROUP, self.reduction == Reduction::Subgroup);
        features.set(wgpu::Features::SHADER_F16, self.arithmetic == Arithmetic::F16);
        features
    }

    /// Query heads x query tokens.
    pub fn rows(self) -> u32 {
        self.head_tile.saturating_mul(self.token_tile)
    }

    /// Workgroup memory of the kernel, in bytes: each of its arrays takes a multiple of 16.
    pub fn workgroup_bytes(self, k: &PageLayout) -> u64 {
        let rows = u64::from(self.rows());
        let of = |numbers: u64| (numbers * 4).next_multiple_of(16);
        let head_dim = u64::from(k.head_dim);
        let (workgroup, tile) = (
            u64::from(self.workgroup),
            u64::from(self.workgroup) * u64::from(self.slot_quads),
        );
        let queries = match self.arithmetic.for_side(k.side) {
            Arithmetic::F32 => of(rows * head_dim),
            Arithmetic::F16 => of(rows * head_dim / 2) + of(rows),
            // The rounded queries, their sums over blocks of 16 channels and their scales.
            Arithmetic::Packed => of(rows * head_dim / 4) + of(rows * head_dim.div_ceil(16)) + of(rows),
        };
        let reduction = match self.reduction {
            Reduction::Workgroup => of(rows * workgroup) + of(rows * u64::from(REDUCERS)),
            Reduction::Subgroup => of(rows * workgroup / u64::from(MIN_SUBGROUP)),
        };
        // The tile; the largest score, what sums shrink by, and the result of a reduction.
        queries + reduction + rows * tile * 16 + 3 * of(rows)
    }

    /// Checks a variant that did not come from [`Variant::new`]; wgpu does not count workgroup memory.
    ///
    /// # Errors
    /// [`Error::Shape`] for a number that the kernel does not know or that does not fit the pages, [`Error::Limit`] for more
    /// invocations or workgroup memory than WebGPU guarantees.
    pub fn check(self, pages: [&PageLayout; 2]) -> Result<()> {
        const ADVICE: &str = "let Variant::new or `kvpack tune` choose";
        let refuse = |what, value: u32, limit: String| {
            Err(Error::Shape {
                what,
                value: u64::from(value),
                limit,
                advice: ADVICE.to_owned(),
            })
        };
        let units = pages[1].head_dim / 4 / self.channel_quads.max(1);
        if !self.workgroup.is_multiple_of(REDUCERS) || self.workgroup == 0 {
            return refuse(
                "workgroup",
                self.workgroup,
                format!("it must be a multiple of {REDUCERS}"),
            );
        }
        for (what, value) in [("head_tile", self.head_tile), ("token_tile", self.token_tile)] {
            if value == 0 || value > self.workgroup || self.rows() > self.workgroup {
                let limit = format!(
                    "a workgroup takes 1 to {} query heads x query tokens",
                    self.workgroup
                );
                return refuse(what, value, limit);
            }
        }
        if ![1, 2, 4].contains(&self.slot_quads) || self.slot_quads > most_slot_quads(pages) {
            let most = most_slot_quads(pages);
            return refuse(
                "slot_quads",
                self.slot_quads,
                format!("1, 2 or 4, and at most {most} with these pages"),
            );
        }
        if ![2, 4].contains(&self.channel_quads) || !pages[1].head_dim.is_multiple_of(4 * self.channel_quads)
        {
            let limit = format!(
                "2 or 4, a divisor of the {} channel quads of a value",
                pages[1].head_dim / 4
            );
            return refuse("channel_quads", self.channel_quads, limit);
        }
        if units > self.workgroup {
            let limit = format!("each of {units} parts of a value takes an invocation");
            return refuse("workgroup", self.workgroup, limit);
        }
        for (what, needed, allowed) in [
            (
                "invocations of a workgroup",
                u64::from(self.workgroup),
                WORKGROUP_INVOCATIONS,
            ),
            (
                "bytes of workgroup memory",
                self.workgroup_bytes(pages[0]),
                WORKGROUP_BYTES,
            ),
        ] {
            if needed > u64::from(allowed) {
                return Err(Error::Limit {
                    what: format!("`attention_split` ({what})"),
                    needed,
                    allowed: u64::from(allowed),
                    advice: ADVICE.to_owned(),
                });
            }
        }
        Ok(())
    }
}

/// The most runs of four slots that lie in one page and share K's channel scales.
fn most_slot_quads(pages: [&PageLayout; 2]) -> u32 {
    let group = pages[0].side.layout.token_group();
    let slots = if group > 1 { group } else { pages[0].tokens };
    [4, 2, 1]
        .into_iter()
        .find(|quads| slots.is_multiple_of(4 * quads) && pages[0].tokens.is_multiple_of(4 * quads))
        .unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_fit_workgroup_memory_and_are_even() {
        for head_dim in (8..=256).step_by(8) {
            let k = PageLayout::new(Side::F16, 2, head_dim, 64).unwrap();
            for ratio in 1..=16 {
                for (prefill, software) in [(false, false), (true, false), (false, true), (true, true)] {
                    let v = Variant::new([&k, &k], ratio, prefill, software);
                    assert!(v.check([&k, &k]).is_ok(), "{head_dim} {ratio} {v}");
                    assert!(v.rows() <= MAX_ROWS);
                    assert!(v.head_tile >= 1 && v.head_tile <= ratio);
                    if ratio <= if head_dim == 256 { 6 } else { 7 } {
                        assert_eq!(v.head_tile, ratio, "K and V are read once");
                    }
                }
            }
        }
    }

    #[test]
    fn slots_of_an_invocation_stay_in_their_page_and_group() {
        let quads = |name: &str, tokens| {
            let k = PageLayout::new(name.parse().unwrap(), 1, 64, tokens).unwrap();
            Variant::new([&k, &k], 1, false, true).slot_quads
        };
        assert_eq!(
            [quads("int4", 64), quads("int4", 24), quads("int4", 8)],
            [4, 2, 2]
        );
        assert_eq!([quads("int4c(8)", 64), quads("int4c(16)", 64)], [2, 4]);
    }
}
