//! What each format costs in the numbers of K and V tensors that come from elsewhere, without a model.
//!
//! A tensor is read as a cache of that side would keep it: packed into pages by the CPU reference, which defines every
//! bit, and read back. Sides with token groups first round each row to f16; a last group that is not full stays in
//! f16, as it does in the cache. A per-tensor scale is amax / 448 of the tensor itself.

#[cfg(feature = "models")]
pub mod dump;
#[cfg(feature = "models")]
mod npy;

use crate::error::{Error, Result};
use crate::formats::Element;
use crate::pages::PageLayout;
use crate::reference::{amax, dequantize, quantize, quantize_group, tensor_scale};
use crate::scales::ScaleLayout;
use crate::spec::{Pair, Side};
use crate::work::{SlotRun, Status, slot_runs};

/// K or V.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub enum Which {
    /// Keys.
    K,
    /// Values.
    V,
}

/// The rows of one layer and side.
#[derive(Debug, Clone, Copy)]
pub struct KvRows<'a> {
    /// KV heads.
    pub heads: u32,
    /// Channels of a head.
    pub head_dim: u32,
    /// `[token][head][channel]`, finite.
    pub numbers: &'a [f32],
}

/// One format on one layer and side.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct AnalyzeRow {
    /// The tensor's name in its file.
    pub tensor: String,
    /// The layer, where the name or a leading axis tells.
    pub layer: Option<u32>,
    /// K or V, where the name tells.
    pub which: Option<Which>,
    /// The format's name.
    pub side: String,
    /// True cost of one number in bits, scales included.
    pub bits_per_number: f64,
    /// Euclidean norm of the error over that of the numbers; 0 where all numbers are 0.
    pub relative_l2: f64,
    /// Largest magnitude of a difference.
    pub largest_error: f64,
    /// Euclidean norm of the numbers: with it, figures of several rows can be pooled.
    pub l2_norm: f64,
    /// Largest magnitude of the channel where it is largest.
    pub largest_channel_amax: f64,
    /// The median over all channels (of all heads) of each one's largest magnitude.
    pub median_channel_amax: f64,
    /// The first over the second: how far the worst channel stands out. None where the median is 0.
    pub outlier_ratio: Option<f64>,
    /// Bytes of all pages in use, unused slots, padding and the f16 page of an open group too.
    pub cache_bytes: u64,
    /// Numbers that saturated and scales that were clamped.
    pub saturated: u32,
    /// Tokens.
    pub tokens: u32,
    /// Of these, packed; the rest waits in f16 for its group to fill.
    pub packed_tokens: u32,
    /// KV heads.
    pub heads: u32,
    /// Channels of a head.
    pub head_dim: u32,
}

/// What a tensor is called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    /// Its name in the file.
    pub tensor: String,
    /// Its layer, if known.
    pub layer: Option<u32>,
    /// K or V, if known.
    pub which: Option<Which>,
}

/// Measures one format on one tensor.
///
/// # Errors
/// [`Error::Shape`] for a shape that the format cannot hold, [`Error::Usage`] without numbers or with some that are not
/// finite, named by tensor and index.
pub fn measure(label: &Label, rows: KvRows, side: Side) -> Result<AnalyzeRow> {
    let page_tokens = Pair::same(side).default_page_tokens();
    let page = PageLayout::new(side, rows.heads, rows.head_dim, page_tokens)?;
    let row = (rows.heads * rows.head_dim) as usize;
    let refuse = |reason: String| Error::Usage {
        asked: format!("tensor `{}`", label.tensor),
        reason,
        advice: "give [tokens, heads, head_dim] finite numbers".to_owned(),
    };
    let tokens = match u32::try_from(rows.numbers.len() / row) {
        Ok(tokens) if tokens > 0 && rows.numbers.len().is_multiple_of(row) => tokens,
        _ => {
            return Err(refuse(format!(
                "{} numbers are no rows of {row}",
                rows.numbers.len()
            )));
        }
    };
    if let Some(i) = rows.numbers.iter().position(|x| !x.is_finite()) {
        return Err(refuse(format!("{} at index {i}", rows.numbers[i])));
    }
    let (read, packed_tokens, saturated) = pack(&page, rows.numbers, tokens);
    let (mut error, mut norm, mut largest) = (0.0_f64, 0.0_f64, 0.0_f64);
    for (&x, &y) in rows.numbers.iter().zip(&read) {
        let difference = f64::from(x) - f64::from(y);
        error += difference * difference;
        norm += f64::from(x) * f64::from(x);
        largest = largest.max(difference.abs());
    }
    let channels = channel_amax(rows.numbers, row);
    let largest_channel = channels.last().copied().unwrap_or(0.0);
    let median = (channels[(row - 1) / 2] + channels[row / 2]) / 2.0;
    let open_page = PageLayout::new(Side::F16, rows.heads, rows.head_dim, page_tokens)?;
    let pages = u64::from(packed_tokens.div_ceil(page_tokens));
    let open_pages = u64::from(tokens > packed_tokens);
    Ok(AnalyzeRow {
        tensor: label.tensor.clone(),
        layer: label.layer,
        which: label.which,
        side: side.to_string(),
        bits_per_number: side.bits_per_number(rows.head_dim),
        relative_l2: if norm > 0.0 { (error / norm).sqrt() } else { 0.0 },
        largest_error: largest,
        l2_norm: norm.sqrt(),
        largest_channel_amax: largest_channel,
        median_channel_amax: median,
        outlier_ratio: (median > 0.0).then(|| largest_channel / median),
        cache_bytes: 4 * (pages * u64::from(page.words) + open_pages * u64::from(open_page.words)),
        saturated,
        tokens,
        packed_tokens,
        heads: rows.heads,
        head_dim: rows.head_dim,
    })
}

/// The numbers as the cache gives them back, the tokens that were packed, and how many numbers and scales saturated.
fn pack(page: &PageLayout, numbers: &[f32], tokens: u32) -> (Vec<f32>, u32, u32) {
    let group = page.side.layout.token_group();
    let packed = tokens / group * group;
    let row = (page.heads * page.head_dim) as usize;
    let mut pool = vec![0; packed.div_ceil(page.tokens) as usize * page.words as usize];
    let mut status = Status::default();
    let mut runs = Vec::new();
    for number in 0..packed.div_ceil(page.tokens) {
        let first = number * page.tokens;
        let last = page.tokens.min(packed - first);
        slot_runs(number, 0, last, |slot| first + slot, &mut runs);
    }
    let at = |run: &SlotRun, i: u32, head: u32, channel: u32| {
        let token = (run.page * page.tokens + run.slot + i) as usize;
        token * row + (head * page.head_dim + channel) as usize
    };
    let mut read;
    if group > 1 {
        // Every row is f16 first; those of the open group stay so.
        let rounded = numbers.iter().map(|&x| {
            let encoded = Element::F16.encode(x, 1.0);
            status.saturated += u32::from(encoded.saturated);
            Element::F16.decode(encoded.code)
        });
        read = rounded.collect::<Vec<_>>();
        let groups: Vec<_> = (0..packed / group)
            .map(|j| SlotRun {
                page: j * group / page.tokens,
                slot: j * group % page.tokens,
                count: group,
                source: 0,
            })
            .collect();
        let source = |run: &SlotRun, i, head, channel| read[at(run, i, head, channel)];
        quantize_group(page, &groups, source, &mut pool, &mut status);
        dequantize(page, &runs, 1.0, &pool, &mut read);
    } else {
        let scale = match page.side.layout {
            ScaleLayout::PerTensor => tensor_scale(page.side.element, amax(numbers.iter().copied(), 0.0)),
            _ => 1.0,
        };
        read = vec![0.0; numbers.len()];
        let source = |run: &SlotRun, i, head, channel| numbers[at(run, i, head, channel)];
        quantize(page, &runs, source, scale, &mut pool, &mut status);
        dequantize(page, &runs, scale, &pool, &mut read);
    }
    (read, packed, status.saturated)
}

/// The largest magnitude of each channel of each head, sorted.
fn channel_amax(numbers: &[f32], row: usize) -> Vec<f64> {
    let mut channels = vec![0.0_f64; row];
    for numbers in numbers.chunks_exact(row) {
        for (channel, &x) in channels.iter_mut().zip(numbers) {
            *channel = channel.max(f64::from(x).abs());
        }
    }
    channels.sort_by(f64::total_cmp);
    channels
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label() -> Label {
        Label {
            tensor: "layers.3.k".to_owned(),
            layer: Some(3),
            which: Some(Which::K),
        }
    }

    fn measured(numbers: &[f32], heads: u32, side: &str) -> AnalyzeRow {
        let rows = KvRows {
            heads,
            head_dim: 8,
            numbers,
        };
        measure(&label(), rows, side.parse().unwrap()).unwrap()
    }

    #[test]
    fn figures_of_a_row_worked_out_by_hand() {
        // The row of the crate's first page: int4, scale 1, errors 0.4 at one number and 0.4 at another.
        let numbers = [7.0, -6.0, 2.0, 3.0, -2.0, 0.4, 0.6, 0.0];
        let row = measured(&numbers, 1, "int4");
        let norm: f64 = numbers.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let error = 2.0 * f64::from(0.4_f32) * f64::from(0.4_f32);
        assert!((row.relative_l2 - (error / norm).sqrt()).abs() < 1e-7, "{row:?}");
        assert_eq!(
            row.largest_error,
            f64::from(0.4_f32).max(1.0 - f64::from(0.6_f32))
        );
        assert_eq!(row.l2_norm, norm.sqrt());
        assert_eq!((row.largest_channel_amax, row.median_channel_amax), (7.0, 2.0));
        assert_eq!(row.outlier_ratio, Some(3.5));
        assert_eq!(row.bits_per_number, 6.0);
        // A page of 64 slots: a word of codes and half a word of scale each.
        assert_eq!(row.cache_bytes, 64 * 4 + 64 * 2);
        assert_eq!((row.tokens, row.packed_tokens, row.saturated), (1, 1, 0));
    }

    #[test]
    fn an_open_group_stays_in_f16_and_only_full_groups_are_packed() {
        // 20 tokens in groups of 8: two are full. Channel 5 is a thousand times the others.
        let numbers: Vec<f32> = (0..20 * 16)
            .map(|i| {
                let x = ((i * 37) % 101) as f32 / 101.0 - 0.5;
                if i % 8 == 5 { x * 1000.0 } else { x }
            })
            .collect();
        let by_channel = measured(&numbers, 2, "int4c(8)");
        assert_eq!((by_channel.tokens, by_channel.packed_tokens), (20, 16));
        let f16_page = 64 * 16 * 2;
        // Codes of two heads, and eight groups of 16 f16 scales; then the page of the open group.
        assert_eq!(by_channel.cache_bytes, 64 * 8 + 8 * 16 * 2 + f16_page);
        // A per-token scale that one channel fills makes all others 0; per channel each has its own.
        let by_token = measured(&numbers, 2, "int4");
        let (read, packed, _) = {
            let page = PageLayout::new("int4c(8)".parse().unwrap(), 2, 8, 64).unwrap();
            pack(&page, &numbers, 20)
        };
        assert_eq!(packed, 16);
        for (i, (&x, &y)) in numbers.iter().zip(&read).enumerate() {
            let f16 = Element::F16.decode(Element::F16.encode(x, 1.0).code);
            if i >= 16 * 16 {
                assert_eq!(y.to_bits(), f16.to_bits(), "{i}");
            } else {
                // Half a step of the group's scale.
                let channel = i % 16;
                let group = i / 128;
                let most = (0..8).map(|t| numbers[(group * 8 + t) * 16 + channel].abs());
                let most = most.fold(0.0, f32::max);
                assert!((x - y).abs() <= most / 7.0 * 0.5 + most * 1e-3, "{i}: {x} {y}");
            }
        }
        let small = |side: &str| {
            let page = PageLayout::new(side.parse().unwrap(), 2, 8, 64).unwrap();
            let read = pack(&page, &numbers, 20).0;
            (0..numbers.len())
                .filter(|i| i % 8 != 5)
                .map(|i| (numbers[i] - read[i]).abs())
                .fold(0.0, f32::max)
        };
        assert!(small("int4") > 0.4 && small("int4c(8)") < 0.1);
        assert!(by_token.outlier_ratio.unwrap() > 500.0);

        // Too few tokens for a group: everything is f16, and that is said.
        let open = measured(&numbers[..7 * 16], 2, "int4c(8)");
        assert_eq!((open.packed_tokens, open.cache_bytes), (0, f16_page));
        assert_eq!(
            open.relative_l2,
            measured(&numbers[..7 * 16], 2, "f16").relative_l2
        );
    }

    #[test]
    fn pages_follow_each_other() {
        // More tokens than a page, each with its own numbers, on every side.
        let numbers: Vec<f32> = (0..150 * 16).map(|i| 1.0 + (i / 16) as f32).collect();
        for side in Side::all() {
            let row = measured(&numbers, 2, &side.to_string());
            let bound = match side.element {
                Element::Int2 if side.layout.token_group() > 1 => 0.45,
                Element::Int4 if side.layout.token_group() > 1 => 0.08,
                Element::E2m1 | Element::E4m3 => 0.1,
                _ => 0.01,
            };
            assert!(row.relative_l2 <= bound, "{side}: {}", row.relative_l2);
            assert_eq!(
                row.packed_tokens,
                150 / side.layout.token_group() * side.layout.token_group()
            );
        }
        assert_eq!(measured(&numbers, 2, "f32").relative_l2, 0.0);
    }

    #[test]
    fn zeros_and_saturation() {
        let zero = measured(&[0.0; 16], 2, "int8");
        assert_eq!((zero.relative_l2, zero.outlier_ratio), (0.0, None));
        let mut numbers = [1.0; 16];
        numbers[3] = 1e6;
        let row = measured(&numbers, 2, "f16");
        assert_eq!((row.saturated, row.largest_error), (1, 1e6 - 65504.0));
    }

    #[test]
    fn what_no_page_holds_is_refused() {
        let said = |numbers: &[f32], head_dim, side: &str| {
            let rows = KvRows {
                heads: 1,
                head_dim,
                numbers,
            };
            measure(&label(), rows, side.parse().unwrap())
                .unwrap_err()
                .to_string()
        };
        assert!(said(&[0.0; 12], 12, "int4").contains("head_dim = 12"));
        assert!(said(&[0.0; 8], 8, "fp4").contains("blocks of 16 channels"));
        assert!(said(&[], 8, "int4").contains("0 numbers are no rows of 8"));
        assert!(said(&[0.0; 9], 8, "int4").contains("9 numbers are no rows of 8"));
        let mut numbers = [0.0; 16];
        numbers[11] = f32::NAN;
        let nan = said(&numbers, 8, "int4");
        assert!(
            nan.contains("`layers.3.k`") && nan.contains("NaN at index 11"),
            "{nan}"
        );
    }
}
