//! Attention of one query head on the GPU against f64, over the very pages that are timed.

use crate::cache::{K, Step, V};
use crate::error::Result;
use crate::gpu::Gpu;
use crate::options::{AttentionOptions, Reach};
use crate::validate::{Comparison, SLACK};
use crate::variant::Arithmetic;
use crate::work::{TableEntry, WorkItem};

/// Which output is looked at: a layer, the row of a query token in the step, a query head.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// The layer.
    pub layer: u32,
    /// Row of the step's new tokens.
    pub row: u32,
    /// Query head.
    pub head: u32,
}

/// Keys and values of one KV head as they are read back, in token order, `[token][channel]`.
#[derive(Debug, Default)]
struct Seen {
    k: Vec<f32>,
    v: Vec<f32>,
}

/// Compares an output `[channel]` of a step with f64 attention of the query `q` over the dequantised pages; per-tensor
/// scales are those of the layer. The bound is that of `kvpack validate`: twice the error of a plain f32 attention over the
/// same numbers plus 4e-6 of the largest value. Scores in other arithmetic may be off by its [`Arithmetic::score_error`]
/// more; to first order that moves an output by the mean distance of the values from it, each weighted by its score's error;
/// twice that is allowed. NaN fails.
///
/// # Errors
/// [`crate::Error::Device`] where pages cannot be read.
pub fn compare(
    gpu: &Gpu,
    step: &Step<'_>,
    place: Place,
    (q, output): (&[f32], &[f32]),
    tensor_scales: [f32; 2],
    arithmetic: Arithmetic,
) -> Result<Comparison> {
    let seen = read(gpu, step, place, tensor_scales)?;
    let q = &arithmetic.round_query(q)[..];
    let (wanted, plain) = (seen.exact(q, output.len()), seen.plain(q, output.len()));
    let plain_error = wanted
        .iter()
        .zip(&plain)
        .map(|(a, b)| (a - f64::from(*b)).abs())
        .fold(0.0, f64::max);
    let largest = seen.v.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    let bound = 2.0 * plain_error + SLACK * f64::from(largest);
    let mut comparison = Comparison::default();
    let moved = seen.moved(q, &wanted, arithmetic);
    for ((a, b), moved) in output.iter().zip(&wanted).zip(moved) {
        comparison.judge((f64::from(*a) - b).abs(), bound + 2.0 * moved);
    }
    Ok(comparison)
}

macro_rules! attention {
    ($name:ident, $float:ty, $what:literal) => {
        #[doc = $what]
        fn $name(&self, q: &[f32], v_dim: usize) -> Vec<$float> {
            let scale = AttentionOptions::<()>::default().score_scale(q.len() as u32) as $float;
            let score = |key: &[f32]| {
                let products = q
                    .iter()
                    .zip(key)
                    .map(|(a, b)| <$float>::from(*a) * <$float>::from(*b));
                products.sum::<$float>() * scale
            };
            let scores: Vec<$float> = self.k.chunks_exact(q.len()).map(score).collect();
            let m = scores.iter().fold(<$float>::MIN, |m, s| m.max(*s));
            let mut sums = vec![0.0; v_dim];
            let mut l = 0.0;
            for (score, values) in scores.iter().zip(self.v.chunks_exact(v_dim)) {
                let p = (score - m).exp();
                l += p;
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum += p * <$float>::from(*value);
                }
            }
            sums.into_iter().map(|sum| sum / l).collect()
        }
    };
}

impl Seen {
    attention!(exact, f64, "Attention of a query in f64.");
    attention!(plain, f32, "The same in f32, one after the other.");

    /// By how much errors of the scores move each output, to first order: sum of p x error x |v - output|.
    fn moved(&self, q: &[f32], output: &[f64], arithmetic: Arithmetic) -> Vec<f64> {
        if arithmetic == Arithmetic::F32 {
            return vec![0.0; output.len()];
        }
        let scale = AttentionOptions::<()>::default().score_scale(q.len() as u32);
        let keys = || self.k.chunks_exact(q.len());
        let dot = |key: &[f32]| {
            q.iter()
                .zip(key)
                .map(|(a, b)| f64::from(*a) * f64::from(*b))
                .sum::<f64>()
        };
        let scores: Vec<f64> = keys().map(|key| dot(key) * scale).collect();
        let m = scores.iter().fold(f64::MIN, |m, s| m.max(*s));
        let l: f64 = scores.iter().map(|s| (s - m).exp()).sum();
        let mut moved = vec![0.0; output.len()];
        for ((score, key), values) in scores.iter().zip(keys()).zip(self.v.chunks_exact(output.len())) {
            let weight = (score - m).exp() / l * arithmetic.score_error(q, key) * scale;
            for ((moved, value), output) in moved.iter_mut().zip(values).zip(output) {
                *moved += weight * (f64::from(*value) - output).abs();
            }
        }
        moved
    }
}

/// The pages of what a query sees, dequantised.
fn read(gpu: &Gpu, step: &Step<'_>, place: Place, tensor_scales: [f32; 2]) -> Result<Seen> {
    let mut seen = Seen::default();
    let Some(plan) = step.plan() else { return Ok(seen) };
    let cache = step.cache();
    let spec = cache.book().spec();
    let index = cache.book().geometry().class_index(place.layer)?;
    let (class, table) = (
        &cache.book().geometry().classes[index],
        &plan.classes[index].table,
    );
    let kv_head = place.head / (spec.q_heads / spec.kv_heads);
    let attention = plan.attention(index, Reach::default())?;
    let segments = attention.waves.iter().flat_map(|wave| &wave.segments);
    let mut items: Vec<_> = segments
        .flat_map(|(segment, items)| items.iter().map(move |item| (segment, item)))
        .filter(|(_, item)| (item.query..item.query + item.queries).contains(&place.row))
        .collect();
    items.sort_by_key(|(_, item)| (item.position, item.table));
    for (segment, item) in items {
        let entries = &table[item.table as usize..(item.table + item.pages) as usize];
        let waits = [segment.kind.k_waits, segment.kind.v_waits];
        for (s, into) in [(K, &mut seen.k), (V, &mut seen.v)] {
            let page = class.page(s, waits[s]);
            let buffer = cache.buffer(place.layer, s, waits[s], segment.buffers[s])?;
            let ranges = entries.iter().map(|entry| {
                let number = u64::from([entry.k_page, entry.v_page][s]);
                (buffer, number * page.bytes()..(number + 1) * page.bytes())
            });
            let words = gpu.read_back("pages", &ranges.collect::<Vec<_>>())?;
            let words = gpu.block_on(words)?;
            for (slot, number) in tokens(item, entries, page.tokens, place.row) {
                let words = &words[number * page.words as usize..][..page.words as usize];
                let channels = 0..page.head_dim;
                into.extend(channels.map(|c| page.number(words, slot, kv_head, c, tensor_scales[s])));
            }
        }
    }
    Ok(seen)
}

/// The tokens of an item that a query sees: (slot, number of the entry).
fn tokens(
    item: &WorkItem,
    entries: &[TableEntry],
    page_tokens: u32,
    row: u32,
) -> impl Iterator<Item = (u32, usize)> {
    let own = item.query_position + (row - item.query);
    let position = item.position;
    entries.iter().enumerate().flat_map(move |(number, entry)| {
        let begin = position + number as u32 * page_tokens;
        let seen = (entry.first..entry.last).filter(move |slot| begin + slot <= own);
        seen.map(move |slot| (slot, number))
    })
}
