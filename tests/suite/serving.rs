//! Serving: caches of several buffers, batches, long contexts, and the life of sequences, on both devices.

use std::ops::Range;
use std::process::Command;

use half::f16;
use kvpack::cache::plan::StepPlan;
use kvpack::cache::{Book, CacheSpec, K, KvCache, LayerSpec, SequenceId, TensorScales, V};
use kvpack::gpu::{Gpu, Selection, fold};
use kvpack::kernels::RowStrides;
use kvpack::kernels::quantize::{self, Quantize, Source};
use kvpack::options::{AttentionOptions, Reach};
use kvpack::pages::PageLayout;
use kvpack::reference::{self, ReferenceCache};
use kvpack::validate::Random;
use kvpack::work::{SlotRun, Status};
use kvpack::{Error, Result};

use crate::common::{gpu, say};

/// A cache of one layer, two KV heads and four query heads, in one buffer a pool.
fn spec(pair: &str, head_dim: u32, pages: u32) -> CacheSpec {
    windowed(pair, head_dim, 0, pages)
}

/// The same, whose last `window` tokens stay in full precision.
fn windowed(pair: &str, head_dim: u32, window: u32, pages: u32) -> CacheSpec {
    let pair = pair.parse().unwrap();
    let layer = LayerSpec {
        window: [window; 2],
        ..LayerSpec::new(pair)
    };
    CacheSpec {
        layers: vec![layer],
        sequences: 4,
        tensor_scales: TensorScales::Given(vec![[0.01; 2]]),
        ..CacheSpec::new(1, 4, 2, head_dim, pair, 0)
    }
    .with_pages(pages)
    .unwrap()
}

/// A number in [-1, 1) that depends on its place alone.
fn unit(seed: u64, place: u64) -> f32 {
    let mut z = (seed << 40)
        .wrapping_add(place)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((z ^ (z >> 32)) as u32 >> 8) as f32 / 8_388_608.0 - 1.0
}

/// A row by side, sequence and token.
type Row<'a> = &'a dyn Fn(usize, usize, u32) -> Vec<f32>;

/// Rows in [-1, 1) of `numbers` each.
fn plain(numbers: u32) -> impl Fn(usize, usize, u32) -> Vec<f32> {
    move |side, sequence, token| {
        let seed = (sequence * 2 + side) as u64;
        let numbers = 0..u64::from(numbers);
        numbers.map(|c| unit(seed, u64::from(token) << 16 | c)).collect()
    }
}

fn queries(numbers: usize) -> Vec<f32> {
    (0..numbers as u64).map(|i| 3.0 * unit(77, i)).collect()
}

/// One step of a cache on the GPU: append and, where there are queries, attend.
fn step(
    gpu: &Gpu,
    cache: &mut KvCache,
    requests: &[(SequenceId, u32)],
    [k, v, q]: [&[f32]; 3],
) -> Result<Vec<f32>> {
    let [k, v] = [k, v].map(|rows| gpu.upload("rows", rows).unwrap());
    let queries = gpu.upload("q", q)?;
    let numbers = q.len() / cache.book().spec().k_head_dim as usize * cache.book().spec().v_head_dim as usize;
    let output = gpu.zeros("output", numbers as u64 * 4)?;
    let step = cache.step(requests)?;
    gpu.submit("a step", |encoder| {
        step.append(encoder, 0, &k, &v)?;
        match numbers {
            0 => Ok(()),
            _ => step.attend(encoder, 0, &queries, &output, &AttentionOptions::default()),
        }
    })?;
    step.commit()?;
    gpu.read("output", &output, numbers)
}

/// The GPU's cache and the reference's, driven alike. Sequences are numbered as they are opened.
struct Twins<'a> {
    gpu: &'a Gpu,
    cache: KvCache,
    reference: ReferenceCache,
    ids: Vec<[SequenceId; 2]>,
}

impl Twins<'_> {
    fn new(gpu: &Gpu, spec: CacheSpec, sequences: usize) -> Twins<'_> {
        let mut twins = Twins {
            gpu,
            cache: KvCache::new(gpu, spec.clone()).unwrap(),
            reference: ReferenceCache::new(spec).unwrap(),
            ids: Vec::new(),
        };
        (0..sequences).for_each(|_| twins.open());
        twins
    }

    fn open(&mut self) {
        self.ids
            .push([self.cache.open(), self.reference.book_mut().open()]);
    }

    fn len(&self, sequence: usize) -> u32 {
        let [ours, theirs] = self.ids[sequence];
        let len = self.cache.book().len(ours).unwrap();
        assert_eq!(len, self.reference.book().len(theirs).unwrap());
        len
    }

    fn boundaries(&self, sequence: usize) -> [u32; 2] {
        self.cache.book().boundaries(self.ids[sequence][0], 0).unwrap()
    }

    /// Appends new tokens of some sequences, and attends with random queries: outputs of both, within the bound.
    fn step(&mut self, new: &[(usize, u32)], row: Row<'_>, attends: bool) -> Vec<f32> {
        let [k, v] = [K, V].map(|side| {
            let parts = new.iter().map(|&(s, new)| (s, self.len(s)..self.len(s) + new));
            let rows = parts.flat_map(|(s, tokens)| tokens.flat_map(move |t| row(side, s, t)));
            rows.collect::<Vec<f32>>()
        });
        let spec = self.reference.book().spec();
        let tokens: u32 = new.iter().map(|&(_, new)| new).sum();
        let numbers = if attends {
            tokens * spec.q_heads * spec.k_head_dim
        } else {
            0
        };
        let q = queries(numbers as usize);
        let requests = |which: usize| new.iter().map(move |&(s, new)| (s, new, which));
        let of = |ids: &[[SequenceId; 2]], which| -> Vec<_> {
            requests(which)
                .map(|(s, new, which)| (ids[s][which], new))
                .collect()
        };
        let ours = of(&self.ids, 0);
        let output = step(self.gpu, &mut self.cache, &ours, [&k, &v, &q]).unwrap();
        let plan = self.reference.book_mut().plan(&of(&self.ids, 1), 1).unwrap();
        self.reference.append(&plan, 0, &k, &v).unwrap();
        if attends {
            let q: Vec<f64> = q.into_iter().map(f64::from).collect();
            let options = AttentionOptions::default();
            let (expected, _) = self.reference.attend(&plan, 0, &q, &options).unwrap();
            let largest = v.iter().fold(1.0_f32, |m, x| m.max(x.abs()));
            for (i, (&x, &y)) in output.iter().zip(&expected).enumerate() {
                // Scores up to 20 in f32, and exp of a software driver.
                let off = (f64::from(x) - y).abs();
                assert!(off <= 1e-5 * f64::from(largest), "output {i}: {x} for {y}");
            }
        }
        self.reference.book_mut().commit(plan).unwrap();
        output
    }

    fn append(&mut self, new: &[(usize, u32)], row: Row<'_>) {
        self.step(new, row, false);
    }

    fn truncate(&mut self, sequence: usize, len: u32) -> Result<()> {
        let [ours, theirs] = self.ids[sequence];
        let said = self.cache.truncate(ours, len);
        let other = self.reference.book_mut().truncate(theirs, len);
        assert_eq!(said.is_ok(), other.is_ok());
        said
    }

    /// The live words of a sequence, which both caches must agree on.
    fn words(&self, sequence: usize, side: usize) -> Vec<u32> {
        let [ours, theirs] = self.ids[sequence];
        let words = self
            .gpu
            .block_on(self.cache.live_words(ours, 0, side).unwrap())
            .unwrap();
        let other = self.reference.live_words(theirs, 0, side).unwrap();
        assert!(words == other, "sequence {sequence}, side {side}: words differ");
        words
    }

    /// The numbers of a sequence's tokens as they are read.
    fn numbers(&self, sequence: usize, side: usize) -> Vec<Vec<f32>> {
        let words = self.words(sequence, side);
        let mut rest = &words[..];
        let mut rows = Vec::new();
        let held = self.cache.book().held_pages_of(self.ids[sequence][0], 0, side);
        for page in held.unwrap() {
            let (words, after) = rest.split_at(page.layout.words as usize);
            let layout = page.layout;
            let channels = layout.heads * layout.head_dim;
            let number =
                |slot: u32, c: u32| layout.number(words, slot, c / layout.head_dim, c % layout.head_dim, 1.0);
            let live = page.live[1].clone();
            rows.extend(live.map(|slot| (0..channels).map(|c| number(slot, c)).collect()));
            rest = after;
        }
        assert_eq!(rows.len() as u32, self.len(sequence));
        rows
    }
}

// ---- several buffers ---------------------------------------------------------------------------------------------

#[test]
fn more_than_128_mib_of_each_side_in_one_sequence() {
    let Some(gpu) = gpu("more_than_128_mib_of_each_side_in_one_sequence") else {
        return;
    };
    let (heads, dim, tokens) = (8_u32, 128_u32, 80_000_u32);
    let whole = CacheSpec {
        sequences: 1,
        ..CacheSpec::new(1, heads, heads, dim, "f16".parse().unwrap(), 0)
    };
    let whole = whole.with_pages(tokens / 64).unwrap();
    // At most 85 % of a pool in a buffer: two on any adapter, and where a binding ends at 128 MiB, one of that size.
    let growth = whole.budget / 100 * 85;
    let mut cache = KvCache::new(gpu, CacheSpec { growth, ..whole }).unwrap();
    let id = cache.open();
    let number = |side: usize, token: u32, c: u32| {
        let x = unit(side as u64, u64::from(token) << 16 | u64::from(c));
        // Values lean on their position: a page that is left out, or read twice, moves the mean.
        if side == V {
            0.5 * x + token as f32 / tokens as f32
        } else {
            x
        }
    };
    let row_numbers = heads * dim;
    for first in (0..tokens).step_by(8000) {
        let rows = |side| -> Vec<f32> {
            let tokens = first..(first + 8000).min(tokens - 1);
            tokens
                .flat_map(|t| (0..row_numbers).map(move |c| number(side, t, c)))
                .collect()
        };
        let (k, v) = (rows(K), rows(V));
        let new = k.len() as u32 / row_numbers;
        step(gpu, &mut cache, &[(id, new)], [&k, &v, &[]]).unwrap();
    }
    let last = |side| -> Vec<f32> { (0..row_numbers).map(|c| number(side, tokens - 1, c)).collect() };
    let q = queries(row_numbers as usize);
    let output = step(gpu, &mut cache, &[(id, 1)], [&last(K), &last(V), &q]).unwrap();
    assert_eq!(cache.book().len(id).unwrap(), tokens);
    for pool in cache.book().pools() {
        let bytes = u64::from(pool.used) * pool.layout.bytes();
        assert!(bytes > 1 << 27 && pool.buffers >= 2, "{pool:?}");
    }
    assert_eq!(cache.allocated_bytes(), cache.book().spec().budget);
    for head in [0, 3, 7] {
        let channels = head * dim..(head + 1) * dim;
        let stored = |side, token, c| f64::from(f16::from_f32(number(side, token, c)));
        let score = |token| {
            let dot = channels
                .clone()
                .map(|c| f64::from(q[c as usize]) * stored(K, token, c));
            dot.sum::<f64>() / f64::from(dim).sqrt()
        };
        let scores: Vec<f64> = (0..tokens).map(score).collect();
        let most = scores.iter().copied().fold(f64::MIN, f64::max);
        let (mut sum, mut sums) = (0.0, vec![0.0; dim as usize]);
        for (token, score) in (0..).zip(&scores) {
            let p = (score - most).exp();
            sum += p;
            for (o, c) in sums.iter_mut().zip(channels.clone()) {
                *o += p * stored(V, token, c);
            }
        }
        for (o, c) in sums.iter().zip(channels) {
            let (x, y) = (f64::from(output[c as usize]), o / sum);
            assert!((x - y).abs() <= 1e-5 * 1.5, "channel {c}: {x} for {y}");
        }
    }
}

#[test]
fn ragged_sequences_over_several_buffers_are_those_of_the_reference() {
    let Some(gpu) = gpu("ragged_sequences_over_several_buffers_are_those_of_the_reference") else {
        return;
    };
    let whole = windowed("int4c(32)/int8", 32, 40, 24);
    let growth = whole.budget / 6;
    let mut twins = Twins::new(gpu, CacheSpec { growth, ..whole }, 3);
    let row = plain(64);
    // Turn by turn: the pages of a sequence lie in all buffers. Then decode, prefill, and both.
    for new in [[300, 90, 20], [200, 5, 7], [100, 100, 1], [64, 64, 64]] {
        twins.append(&[(0, new[0]), (1, new[1]), (2, new[2])], &row);
    }
    for new in [[1, 1, 1], [1, 1, 1], [40, 33, 70], [1, 20, 1], [1, 1, 1]] {
        let parts: Vec<_> = new.into_iter().enumerate().collect();
        twins.step(&parts, &row, true);
    }
    let pools = twins.cache.book().pools().filter(|pool| !pool.id.waiting);
    for pool in pools {
        assert!(pool.buffers >= 4, "{pool:?}");
    }
    for (s, side) in (0..3).flat_map(|s| [(s, K), (s, V)]) {
        twins.words(s, side);
    }
}

#[test]
fn a_plan_names_every_buffer_that_a_sequence_lies_in() {
    let whole = spec("int4", 32, 24);
    let growth = whole.budget / 6;
    let mut book = Book::new(CacheSpec { growth, ..whole }, Some(1 << 27)).unwrap();
    let id = book.open();
    let plan = book.plan(&[(id, 24 * 64)], 1).unwrap();
    for side in [K, V] {
        let runs = plan.classes[0].rounds[side]
            .iter()
            .flat_map(|round| &round.direct);
        let to: std::collections::BTreeSet<_> = runs.map(|(buffers, _)| buffers[1]).collect();
        assert_eq!(to.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    }
    let attention = plan.attention(0, Reach::default()).unwrap();
    let segments = attention.waves.iter().flat_map(|wave| wave.segments.keys());
    let buffers: std::collections::BTreeSet<_> = segments.map(|segment| segment.buffers).collect();
    assert_eq!(
        buffers.into_iter().collect::<Vec<_>>(),
        [0, 1, 2, 3, 4, 5].map(|b| [b; 2])
    );
}

// ---- batches -----------------------------------------------------------------------------------------------------

const LENGTHS: [u32; 12] = [0, 1, 63, 64, 65, 127, 128, 129, 1000, 5000, 700, 31];

/// Output bits and live words of sequences after a step with all their histories, and one with their new tokens.
fn served(gpu: &Gpu, pair: &str, sequences: &[(usize, u32, u32)]) -> Vec<[Vec<u32>; 3]> {
    let dim = 32;
    let pages = sequences
        .iter()
        .map(|&(_, old, new)| (old + new).div_ceil(64))
        .sum();
    let sequences_of = CacheSpec {
        sequences: sequences.len() as u32,
        ..spec(pair, dim, 1)
    };
    let mut cache = KvCache::new(gpu, sequences_of.with_pages(1.max(pages)).unwrap()).unwrap();
    let ids: Vec<_> = sequences.iter().map(|_| cache.open()).collect();
    let row = plain(2 * dim);
    let rows = |side, tokens: &dyn Fn(u32, u32) -> Range<u32>| -> Vec<f32> {
        let parts = sequences.iter().map(|&(s, old, new)| (s, tokens(old, new)));
        parts
            .flat_map(|(s, tokens)| tokens.map(move |t| (s, t)))
            .flat_map(|(s, t)| row(side, s, t))
            .collect()
    };
    let requests = |new: &dyn Fn(u32, u32) -> u32| -> Vec<_> {
        let parts = ids.iter().zip(sequences);
        parts
            .map(|(&id, &(_, old, tokens))| (id, new(old, tokens)))
            .collect()
    };
    let history = |side| rows(side, &|old, _| 0..old);
    let new = |side| rows(side, &|old, new| old..old + new);
    // A query is the token's, wherever it stands in the batch.
    let q: Vec<f32> = sequences
        .iter()
        .flat_map(|&(s, old, new)| (old..old + new).map(move |t| (s, t)))
        .flat_map(|(s, t)| {
            (0..4 * u64::from(dim)).map(move |c| 3.0 * unit(200 + s as u64, u64::from(t) << 16 | c))
        })
        .collect();
    step(
        gpu,
        &mut cache,
        &requests(&|old, _| old),
        [&history(K), &history(V), &[]],
    )
    .unwrap();
    let output = step(gpu, &mut cache, &requests(&|_, new| new), [&new(K), &new(V), &q]).unwrap();
    assert!(cache.book().pools().all(|pool| pool.buffers <= 1));
    let mut rest = &output[..];
    let words = |id, side| gpu.block_on(cache.live_words(id, 0, side).unwrap()).unwrap();
    let parts = ids.iter().zip(sequences);
    let parts = parts.map(|(&id, &(_, _, new))| {
        let (own, after) = rest.split_at((new * 4 * dim) as usize);
        rest = after;
        let bits = own.iter().map(|x| x.to_bits()).collect();
        [bits, words(id, K), words(id, V)]
    });
    parts.collect()
}

#[test]
fn shp_14_twelve_sequences_in_one_attend_equal_twelve_alone() {
    let Some(gpu) = gpu("shp_14_twelve_sequences_in_one_attend_equal_twelve_alone") else {
        return;
    };
    // New tokens of the mixed batch: prefill from nothing, prefill of some, decode.
    let mixed: [u32; 12] = [0, 1, 1, 64, 20, 1, 2, 1, 37, 1, 100, 31];
    for pair in ["int4c/int4", "f16"] {
        for news in [LENGTHS.map(|len| len.min(1)), mixed] {
            let sequences: Vec<_> = (0..)
                .zip(LENGTHS.into_iter().zip(news))
                .map(|(s, (len, new))| (s, len - new, new))
                .collect();
            let alone: Vec<_> = sequences
                .iter()
                .flat_map(|&one| served(gpu, pair, &[one]))
                .collect();
            // 5 has no factor in common with 12: every sequence moves, the longest to the front.
            for order in [
                [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
                std::array::from_fn(|i| (9 + 5 * i) % 12),
            ] {
                let batch = served(gpu, pair, &order.map(|i| sequences[i]));
                for (i, got) in order.into_iter().zip(&batch) {
                    let what = format!("{pair}, {} tokens, {} new", LENGTHS[i], news[i]);
                    assert!(got[1..] == alone[i][1..], "{what}: words");
                    assert!(got[0] == alone[i][0], "{what}: output bits");
                    assert!(
                        got[0].iter().all(|&bits| f32::from_bits(bits).is_finite()),
                        "{what}"
                    );
                }
            }
        }
    }
}

// ---- long contexts -----------------------------------------------------------------------------------------------

/// Checks a plan's attention against what it must be for sequences of `lens` tokens after `new` ones: every token of a
/// sequence once for each tile of its queries, no work item beyond a split, partials without gaps. Its work items.
fn check_attention(plan: &StepPlan, spec: &CacheSpec, lens: &[(u32, u32)], token_tile: u32) -> usize {
    let attention = plan
        .attention(
            0,
            Reach {
                back: u32::MAX,
                ahead: u32::MAX,
            },
        )
        .unwrap();
    let tiles = |new: u32| if new > 1 { new.div_ceil(token_tile) } else { new };
    let mut tokens = 0_u64;
    let mut items = 0;
    // Partials of 64 MiB at a time, unless one tile needs more.
    let most = (1 << 24) / spec.v_head_dim;
    for wave in &attention.waves {
        assert!(wave.partials <= most || wave.merges.len() as u32 <= token_tile);
        let mut ranges = Vec::new();
        for item in wave.segments.values().flatten() {
            assert!(item.pages * spec.page_tokens <= spec.split_tokens());
            ranges.push(item.partial..item.partial + item.queries * spec.q_heads);
            let entries = item.table as usize..(item.table + item.pages) as usize;
            for entry in &plan.classes[0].table[entries] {
                tokens += u64::from(entry.last - entry.first);
            }
        }
        items += ranges.len();
        ranges.sort_by_key(|range| range.start);
        let ends = ranges.iter().fold(0, |end, range| {
            assert_eq!(range.start, end);
            range.end
        });
        assert_eq!(ends, wave.partials);
        for merge in &wave.merges {
            assert!(merge.first + merge.stride * (merge.count - 1) + spec.q_heads <= wave.partials);
        }
    }
    let wanted = lens
        .iter()
        .map(|&(len, new)| u64::from(len) * u64::from(tiles(new)));
    assert_eq!(tokens, wanted.sum::<u64>());
    items
}

#[test]
fn one_sequence_a_thousand_times_longer_than_the_others() {
    let spec = CacheSpec::new(1, 32, 8, 128, "int4".parse().unwrap(), 0);
    let spec = spec.with_pages(5000).unwrap();
    for (limit, cuts) in [(None, 0), (Some(1 << 27), 1)] {
        let mut book = Book::new(spec.clone(), limit).unwrap();
        let ids: Vec<_> = (0..8).map(|_| book.open()).collect();
        let lens = [300_000, 300, 300, 299, 301, 1, 300, 300];
        let requests: Vec<_> = ids.iter().copied().zip(lens).collect();
        let plan = book.plan(&requests, 1).unwrap();
        book.commit(plan).unwrap();
        let requests: Vec<_> = ids.iter().map(|&id| (id, 1)).collect();
        let plan = book.plan(&requests, 1).unwrap();
        let items = check_attention(&plan, &spec, &lens.map(|len| (len + 1, 1)), 1);
        // 586 splits of 512 for the long one, one for each other, and one more where its first buffer ends within a split.
        assert_eq!(items, 586 + 7 + cuts);
    }
}

#[test]
fn a_long_sequence_among_short_ones_is_that_of_the_reference() {
    let Some(gpu) = gpu("a_long_sequence_among_short_ones_is_that_of_the_reference") else {
        return;
    };
    let mut twins = Twins::new(gpu, spec("int8/int4c", 8, 800), 4);
    let row = plain(16);
    twins.append(&[(0, 49_999), (1, 49), (2, 50), (3, 0)], &row);
    twins.step(&[(0, 1), (1, 1), (2, 1), (3, 1)], &row, true);
    assert_eq!([0, 1, 2, 3].map(|s| twins.len(s)), [50_000, 50, 51, 1]);
}

#[test]
fn lng_07_contexts_beyond_a_million_tokens_are_planned_in_bounds() {
    // 128 layers of 8 heads x 128 in INT4 within 2^45 bytes.
    let spec = CacheSpec::new(128, 32, 8, 128, "int4".parse().unwrap(), 1 << 45);
    let mut book = Book::new(spec.clone(), Some(1 << 27)).unwrap();
    let pages = u64::from(book.pages());
    assert!(book.geometry().bytes(pages) <= 1 << 45 && pages * 64 > 200_000_000);
    let (id, short) = (book.open(), book.open());
    let mut len = 0;
    for new in [1, 262_143, 262_144, 262_144, 262_144, 3_000_000] {
        let plan = book.plan(&[(id, new), (short, 1)], 1).unwrap();
        // Every run lies in its buffer.
        for (&[_, to], runs) in plan.classes[0].rounds[K].iter().flat_map(|round| &round.direct) {
            let pool = book.pools().next().unwrap();
            let pages = (book.buffer_bytes(pool.id, to) / pool.layout.bytes()) as u32;
            assert!(runs.iter().all(|run| run.page < pages));
        }
        book.commit(plan).unwrap();
        len += new;
    }
    assert_eq!(len, 4_048_576);
    let buffers = book.pools().next().unwrap().buffers;
    assert_eq!(buffers, (len.div_ceil(64) + 1).div_ceil(3971));
    // Decode: as many work items as splits, and one more at most where a buffer ends.
    let plan = book.plan(&[(id, 1), (short, 1)], 1).unwrap();
    let items = check_attention(&plan, &spec, &[(len + 1, 1), (7, 1)], 1) as u32;
    let splits = (len + 1).div_ceil(512) + 1;
    assert!((splits..splits + buffers).contains(&items), "{items}");
    book.abandon(plan);
    // Prefill of a chunk: tiles times splits, in waves; more workgroups than a dispatch has on one axis.
    let plan = book.plan(&[(id, 40), (short, 1)], 2).unwrap();
    let items = check_attention(&plan, &spec, &[(len + 40, 40), (7, 1)], 2);
    assert!(items > 20 * 7907, "{items}");
    let [x, y] = fold("items", items as u64).unwrap();
    assert!(x <= 65_535 && y > 1 && x as usize * y as usize >= items);
    // A step that the budget has no room for is refused at once.
    let started = std::time::Instant::now();
    let error = book.plan(&[(id, 1 << 30)], 1).unwrap_err();
    assert!(matches!(error, Error::CacheFull { .. }), "{error}");
    assert!(started.elapsed().as_secs() < 2);
}

#[test]
fn lng_07_page_times_words_stays_below_32_bits_in_every_buffer() {
    // Pages of 2^20 words: page 2066 begins beyond 2^31, page 4096 would at 2^32.
    let wide = CacheSpec {
        sequences: 1,
        ..CacheSpec::new(1, 64, 64, 256, "f32".parse().unwrap(), 0)
    };
    let wide = wide.with_pages(9000).unwrap();
    let words = wide.geometry().unwrap().classes[0].packed[K].words;
    assert_eq!(words, 1 << 20);
    for (limit, per_buffer) in [(1 << 40, 4095), (1 << 27, 32), (1 << 22, 1)] {
        let mut book = Book::new(wide.clone(), Some(limit)).unwrap();
        let pool = book.pools().next().unwrap();
        assert_eq!(pool.per_buffer, per_buffer);
        assert!(u64::from(per_buffer) * u64::from(words) <= u64::from(u32::MAX));
        let last = 9000_u32.div_ceil(per_buffer) - 1;
        assert_eq!(
            book.buffer_bytes(pool.id, last),
            u64::from(9000 - last * per_buffer) << 22
        );
        let id = book.open();
        let plan = book.plan(&[(id, 9000 * 64)], 1).unwrap();
        for side in [K, V] {
            let rounds = plan.classes[0].rounds[side].iter();
            let runs = rounds.flat_map(|round| &round.direct);
            let mut tokens = 0;
            for (&[_, to], runs) in runs {
                assert!(to <= last && runs.iter().all(|run| run.page < per_buffer));
                tokens += runs.iter().map(|run| run.count).sum::<u32>();
            }
            assert_eq!(tokens, 9000 * 64);
        }
        let table = &plan.classes[0].table;
        assert!(
            table
                .iter()
                .all(|e| e.k_page < per_buffer && e.v_page < per_buffer)
        );
        assert_eq!(table[2066].k_page, 2066 % per_buffer);
        book.commit(plan).unwrap();
        let held = book.held_pages_of(id, 0, K).unwrap();
        for page in [2066, 4095, 4096, 8999] {
            let place = book.locate(&held[page]);
            let page = page as u32;
            assert_eq!(place, (page / per_buffer, page % per_buffer));
        }
    }
}

#[test]
fn lng_01_runs_beyond_65535_workgroups_are_all_packed() {
    let Some(gpu) = gpu("lng_01_runs_beyond_65535_workgroups_are_all_packed") else {
        return;
    };
    // 64 heads: a workgroup a run, and no padding, which may hold anything. Rows come again every 1000 runs.
    let page = PageLayout::new("int4".parse().unwrap(), 64, 8, 4096).unwrap();
    let rows: Vec<f32> = (0..1000 * 512).map(|i| unit(1, i)).collect();
    let source = gpu.upload("rows", &rows).unwrap();
    let runs: Vec<SlotRun> = (0..65_537)
        .map(|run| SlotRun {
            page: run / 1024,
            slot: run % 1024 * 4,
            count: 1,
            source: run % 1000,
        })
        .collect();
    let kernel = Quantize::plan(gpu, &page, &Source::F32).unwrap();
    let guard = 0xa5a5_a5a5_u32;
    // 65 pages hold 65,537 runs: what they leave is a guard.
    let untouched = vec![guard; 65 * page.words as usize];
    let mut expected = untouched.clone();
    let number = |run: &SlotRun, i: u32, head: u32, channel: u32| {
        rows[((run.source + i) * 512 + head * 8 + channel) as usize]
    };
    reference::quantize(&page, &runs, number, 1.0, &mut expected, &mut Status::default());
    let [scales, status] =
        [("scales", 4), ("status", 8)].map(|(what, bytes)| gpu.zeros(what, bytes).unwrap());
    let pages = gpu.upload("pages", &untouched).unwrap();
    for count in [65_535, 65_536, 65_537_u32] {
        let list = gpu.upload("runs", &runs[..count as usize]).unwrap();
        let buffers = quantize::Buffers {
            source: &source,
            runs: &list,
            tensor_scales: &scales,
            pages: &pages,
            status: &status,
        };
        gpu.submit("quantize", |encoder| {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            kernel.encode(gpu, &mut pass, &buffers, count, RowStrides::dense(&page), 0)
        })
        .unwrap();
        // The last two pages at each count: what is beyond the end is as it was.
        let mut wanted = untouched.clone();
        let own = count as usize - 63 * 1024;
        let tail = &runs[63 * 1024..][..own];
        reference::quantize(&page, tail, number, 1.0, &mut wanted, &mut Status::default());
        let from = page.range(63).start;
        let read = gpu
            .read_back("tail", &[(&pages, from as u64 * 4..untouched.len() as u64 * 4)])
            .unwrap();
        assert!(
            gpu.block_on(read).unwrap() == wanted[from..],
            "{count} runs: tail"
        );
    }
    assert!(gpu.read::<u32>("pages", &pages, expected.len()).unwrap() == expected);
}

#[test]
fn lng_01_rows_beyond_65535_are_all_merged() {
    let Some(gpu) = gpu("lng_01_rows_beyond_65535_are_all_merged") else {
        return;
    };
    // A workgroup of the merge is a query head of a token. Keys are 0 and values the position: means.
    for (q_heads, tokens) in [(16, 4095), (16, 4096), (16, 4097_u32)] {
        let layer = CacheSpec {
            sequences: 1,
            ..CacheSpec::new(1, q_heads, 1, 8, "f32".parse().unwrap(), 0)
        };
        let mut cache = KvCache::new(gpu, layer.with_pages(tokens.div_ceil(64)).unwrap()).unwrap();
        let id = cache.open();
        let numbers = (tokens * q_heads * 8) as usize;
        let zeros = gpu.zeros("zeros", numbers as u64 * 4).unwrap();
        let v: Vec<f32> = (0..tokens).flat_map(|t| [t as f32; 8]).collect();
        let v = gpu.upload("v", &v).unwrap();
        let output = gpu.upload("output", &vec![-1.0_f32; numbers + 1024]).unwrap();
        let step = cache.step(&[(id, tokens)]).unwrap();
        // A window keeps the work small; it sees 16 tokens.
        let options = AttentionOptions {
            window: Some(16),
            ..AttentionOptions::default()
        };
        gpu.submit("prefill", |encoder| {
            step.append(encoder, 0, &zeros, &v)?;
            step.attend(encoder, 0, &zeros, &output, &options)
        })
        .unwrap();
        step.commit().unwrap();
        let output: Vec<f32> = gpu.read("output", &output, numbers + 1024).unwrap();
        let (rows, beyond) = output.split_at(numbers);
        assert!(beyond.iter().all(|&x| x == -1.0), "{q_heads} x {tokens}");
        for (i, row) in rows.chunks(8).enumerate() {
            let token = (i / q_heads as usize) as f32;
            let mean = (token + (token - 15.0).max(0.0)) / 2.0;
            assert!(
                row.iter().all(|x| (x - mean).abs() <= 1e-5 * mean.max(1.0)),
                "{q_heads} x {tokens}, row {i}: {row:?} for {mean}"
            );
        }
    }
}

#[test]
fn lng_08_no_remainder_of_a_cache_is_dropped() {
    let Some(gpu) = gpu("lng_08_no_remainder_of_a_cache_is_dropped") else {
        return;
    };
    // Scores 0 but for the last, 20; values 0 but for the last, 1. Two splits and pages of 1000 tokens; one of 2.
    let options = AttentionOptions {
        scale: Some(1.0),
        ..AttentionOptions::default()
    };
    for (tokens, wanted) in [(1000_u32, 0.999_997_941), (2, 0.999_999_998)] {
        for pair in ["f16", "int4c/int4"] {
            let mut cache = KvCache::new(gpu, spec(pair, 32, 16)).unwrap();
            let id = cache.open();
            let last = |value: f32, channels: usize| {
                let mut rows = vec![0.0; tokens as usize * 64];
                rows[(tokens as usize - 1) * 64..]
                    .chunks_mut(32)
                    .for_each(|head| head[..channels].fill(value));
                rows
            };
            let mut q = vec![0.0; 4 * 32];
            q.iter_mut().step_by(32).for_each(|x| *x = 1.0);
            let [k, v] = [last(20.0, 1), last(1.0, 32)];
            let [old, new] = [0..tokens as usize - 1, tokens as usize - 1..tokens as usize];
            let rows = |all: &[f32], of: Range<usize>| all[of.start * 64..of.end * 64].to_vec();
            let history = [&rows(&k, old.clone())[..], &rows(&v, old), &[]];
            step(gpu, &mut cache, &[(id, tokens - 1)], history).unwrap();
            let buffers =
                [rows(&k, new.clone()), rows(&v, new), q].map(|rows| gpu.upload("rows", &rows).unwrap());
            let output = gpu.zeros("output", 4 * 32 * 4).unwrap();
            let step = cache.step(&[(id, 1)]).unwrap();
            gpu.submit("decode", |encoder| {
                step.append(encoder, 0, &buffers[0], &buffers[1])?;
                step.attend(encoder, 0, &buffers[2], &output, &options)
            })
            .unwrap();
            step.commit().unwrap();
            let output: Vec<f32> = gpu.read("output", &output, 4 * 32).unwrap();
            // A step of INT4 scales is 2^-11 of what it stands for.
            let tolerance = if pair == "f16" { 1e-6 } else { 1e-3 };
            assert!(
                output.iter().all(|&x| (f64::from(x) - wanted).abs() < tolerance),
                "{pair}, {tokens} tokens: {output:?}"
            );
        }
    }
}

// ---- shapes ------------------------------------------------------------------------------------------------------

#[test]
fn shp_01_a_head_dim_works_or_is_refused_by_name_before_any_gpu() {
    let shape = |pair: &str, kv_heads, head_dim| {
        CacheSpec {
            tensor_scales: TensorScales::FromRows,
            ..CacheSpec::new(1, kv_heads, kv_heads, head_dim, pair.parse().unwrap(), 0)
        }
        .geometry()
    };
    // Groups are of tokens: no group of channels is ever short.
    for pair in [
        "int4c(32)",
        "int4c(64)",
        "int2c(64)/int8c(32)",
        "int4",
        "fp8",
        "f16",
    ] {
        for head_dim in [80, 96] {
            shape(pair, 2, head_dim).unwrap();
        }
        let said = shape(pair, 2, 100).unwrap_err().to_string();
        assert!(
            said.contains("head_dim = 100") && said.contains("multiple of 8"),
            "{said}"
        );
    }
    // Blocks of FP4 take 16 channels and may span heads.
    for (kv_heads, head_dim) in [(2, 8), (2, 24), (1, 80), (4, 24)] {
        shape("fp4", kv_heads, head_dim).unwrap();
    }
    for (kv_heads, head_dim) in [(1, 8), (1, 24), (3, 24)] {
        let said = shape("fp4", kv_heads, head_dim).unwrap_err().to_string();
        let rule = format!("here it is {kv_heads} x {head_dim}");
        assert!(
            said.contains(&format!("head_dim = {head_dim}")) && said.contains(&rule),
            "{said}"
        );
    }
}

#[test]
fn shp_01_head_dims_of_80_and_96_and_short_blocks() {
    let Some(gpu) = gpu("shp_01_head_dims_of_80_and_96_and_short_blocks") else {
        return;
    };
    // Decode alone where prefill would only take long to compile.
    for (pair, dim, prefill) in [
        ("int4c(32)/int4", 80, true),
        ("int2c(64)/fp8", 96, false),
        ("fp4", 24, false),
        ("fp4", 8, false),
    ] {
        let mut twins = Twins::new(gpu, spec(pair, dim, 6), 2);
        let row = plain(2 * dim);
        twins.step(&[(0, 70), (1, 63)], &row, prefill);
        twins.step(&[(0, 1), (1, 1)], &row, true);
        for (s, side) in [(0, K), (0, V), (1, K), (1, V)] {
            twins.words(s, side);
        }
    }
}

#[test]
fn shp_15_requests_that_name_no_open_sequence_once_are_refused() {
    let Some(gpu) = gpu("shp_15_requests_that_name_no_open_sequence_once_are_refused") else {
        return;
    };
    let mut cache = KvCache::new(gpu, spec("int8", 8, 4)).unwrap();
    let mut other = KvCache::new(gpu, spec("int8", 8, 4)).unwrap();
    let (a, freed, foreign) = (cache.open(), cache.open(), other.open());
    let row = [0.5_f32; 16 * 3];
    step(gpu, &mut cache, &[(a, 2), (freed, 1)], [&row, &row, &[]]).unwrap();
    cache.free(freed).unwrap();
    let state = |cache: &KvCache| {
        let pools: Vec<_> = cache.book().pools().collect();
        (cache.book().len(a).unwrap(), pools)
    };
    let before = state(&cache);
    for bad in [freed, foreign] {
        for requests in [&[(bad, 1)][..], &[(a, 1), (bad, 1)], &[(bad, 0)]] {
            let error = cache.step(requests).unwrap_err();
            assert!(matches!(error, Error::UnknownSequence(_)), "{error}");
        }
        let unknown = |result: Result<()>| assert!(matches!(result, Err(Error::UnknownSequence(_))));
        unknown(cache.truncate(bad, 0));
        unknown(cache.fork(bad, 0).map(drop));
        unknown(cache.free(bad));
        unknown(cache.save(bad).map(drop));
        unknown(cache.live_words(bad, 0, K).map(drop));
    }
    for requests in [&[(a, 1), (a, 1)][..], &[(a, 0), (a, 0)]] {
        let error = cache.step(requests).unwrap_err();
        assert!(error.to_string().contains("twice"), "{error}");
    }
    assert_eq!(state(&cache), before);
    step(gpu, &mut cache, &[(a, 1)], [&row, &row, &[]]).unwrap();
}

/// Bytes with the checksum that they should have.
fn sealed(content: &[u8]) -> Vec<u8> {
    let mut bytes = content.to_vec();
    bytes.extend(crc32fast::hash(content).to_le_bytes());
    bytes
}

#[test]
fn shp_15_hostile_bytes_name_no_page_beyond_a_pool() {
    let row = plain(16);
    for (pair, window) in [("int4c/int8", 0), ("int8/int2c", 40), ("f16", 0)] {
        let spec = windowed(pair, 8, window, 8);
        let mut cache = ReferenceCache::new(spec.clone()).unwrap();
        let id = cache.book_mut().open();
        let rows = |side| -> Vec<f32> { (0..150).flat_map(|t| row(side, 0, t)).collect() };
        let plan = cache.book_mut().plan(&[(id, 150)], 1).unwrap();
        cache.append(&plan, 0, &rows(K), &rows(V)).unwrap();
        cache.book_mut().commit(plan).unwrap();
        let good = cache.save(id).unwrap();
        let held = cache.book().held_pages(id).unwrap();
        let words: usize = held.iter().map(|page| page.layout.words as usize).sum();
        // The last fields of the head: boundaries of K and V, tokens.
        let content = &good[..good.len() - 4];
        let head = content.len() - words * 4;
        let with = |at: usize, value: u32| {
            let mut content = content.to_vec();
            content[at..at + 4].copy_from_slice(&value.to_le_bytes());
            sealed(&content)
        };
        let at = |at: usize| u32::from_le_bytes(content[at..at + 4].try_into().unwrap());
        assert_eq!(at(head - 4), 150);
        assert_eq!(
            [at(head - 12), at(head - 8)],
            cache.book().boundaries(id, 0).unwrap()
        );
        let mut bad = vec![
            Vec::new(),
            vec![0; 3],
            sealed(&[]),
            sealed(b"kvpackSQ"),
            sealed(&content[..head]),
            sealed(&content[..content.len() - 4]),
            sealed(&content[..content.len() - 1]),
            sealed(&[content, &[0; 4]].concat()),
            sealed(&[content, &[0; 1]].concat()),
            good[..good.len() - 1].to_vec(),
            // The checksum of other bytes.
            [content, &[0; 4]].concat(),
        ];
        bad.extend((0..head).map(|end| sealed(&content[..end])));
        // Magic, version, heads, head dims, page length, length of a text.
        bad.extend((0..8).map(|i| with(i * 4, at(i * 4) ^ 1)));
        for place in [12, 16, 20, 24, 28, head - 12, head - 8, head - 4] {
            bad.extend(
                [1, 33, 65, 151, 400, 513, 1 << 31, (1 << 31) + 1, u32::MAX].map(|value| with(place, value)),
            );
        }
        // Layers: after the text of the waiting side.
        let layers = 28 + 4 + at(28) as usize;
        assert_eq!(at(layers), 1);
        bad.extend([0, 2, u32::MAX].map(|value| with(layers, value)));
        let state = |cache: &ReferenceCache| {
            let pools: Vec<_> = cache.book().pools().collect();
            (cache.book().sequences().collect::<Vec<_>>(), pools)
        };
        let before = state(&cache);
        let device = gpu("shp_15_hostile_bytes");
        let mut on_gpu = device.map(|gpu| KvCache::new(gpu, spec.clone()).unwrap());
        for (i, bytes) in bad.iter().enumerate() {
            let error = cache.restore(bytes).unwrap_err();
            assert!(matches!(error, Error::Restore { .. }), "{pair}, {i}: {error}");
            if let Some(cache) = &mut on_gpu {
                let error = cache.restore(bytes).unwrap_err();
                assert!(matches!(error, Error::Restore { .. }), "{pair}, {i}: {error}");
                assert_eq!(
                    (cache.allocated_bytes(), cache.book().sequences().count()),
                    (0, 0)
                );
            }
        }
        assert_eq!(state(&cache), before, "{pair}");
        // Any head with a right checksum: refused, or a sequence as good as another.
        let mut random = Random::new(15);
        for _ in 0..3000 {
            let mut content = content.to_vec();
            for _ in 0..=random.below(2) {
                content[random.below(head as u32) as usize] = random.below(256) as u8;
            }
            if let Ok(id) = cache.restore(&sealed(&content)) {
                let len = cache.book().len(id).unwrap();
                assert!(len.div_ceil(64) == 3, "{pair}: {len}");
                cache.live_words(id, 0, K).unwrap();
                cache.book_mut().free(id).unwrap();
            }
        }
        assert_eq!(state(&cache).0, before.0);
        let restored = cache.restore(&good).unwrap();
        assert!(cache.save(restored).unwrap() == good, "{pair}");
        if let (Some(gpu), Some(mut cache)) = (device, on_gpu) {
            let restored = cache.restore(&good).unwrap();
            let saved = gpu.block_on(cache.save(restored).unwrap()).unwrap();
            assert!(saved == good, "{pair}");
        }
    }
}

#[test]
fn shp_17_a_sequence_of_large_numbers_does_not_touch_anothers_scales() {
    let Some(gpu) = gpu("shp_17_a_sequence_of_large_numbers_does_not_touch_anothers_scales") else {
        return;
    };
    let mut twins = Twins::new(gpu, spec("int4c", 8, 6), 2);
    let row = |_: usize, sequence: usize, _: u32| vec![[1.0, 1000.0][sequence]; 16];
    // Turn by turn, then in the same steps.
    for _ in 0..20 {
        twins.append(&[(0, 1)], &row);
        twins.append(&[(1, 1)], &row);
    }
    for _ in 0..25 {
        twins.append(&[(1, 1), (0, 1)], &row);
    }
    for (sequence, value) in [(0, 1.0_f32), (1, 1000.0)] {
        assert_eq!(twins.boundaries(sequence), [32; 2]);
        for side in [K, V] {
            for number in twins.numbers(sequence, side).concat() {
                // The scale is value / 7, rounded to f16; the code is 7.
                assert!((number - value).abs() <= value / 2048.0, "{number} for {value}");
            }
        }
    }
}

// ---- the life of a sequence --------------------------------------------------------------------------------------

#[test]
fn str_01_open_tokens_and_the_window_are_exact() {
    let Some(gpu) = gpu("str_01_open_tokens_and_the_window_are_exact") else {
        return;
    };
    for (window, packed) in [(0, 192), (32, 160)] {
        let mut twins = Twins::new(gpu, windowed("int2c(32)/int2c(32)", 8, window, 4), 1);
        let row = plain(16);
        twins.append(&[(0, 32)], &row);
        for _ in 0..168 {
            twins.append(&[(0, 1)], &row);
        }
        assert_eq!((twins.len(0), twins.boundaries(0)), (200, [packed; 2]));
        for side in [K, V] {
            for (token, got) in (0..).zip(twins.numbers(0, side)) {
                let given = row(side, 0, token);
                let stored: Vec<f32> = given.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
                assert_eq!(got == stored, token >= packed, "window {window}, token {token}");
            }
        }
    }
}

#[test]
fn str_03_chunks_do_not_change_words_or_scales_portable() {
    let Some(gpu) = gpu("str_03_chunks_do_not_change_words_or_scales_portable") else {
        return;
    };
    let row = plain(16);
    for pair in ["int4c(32)/int4", "int2c(8)/fp4"] {
        let chunkings = [vec![40], vec![1; 40], vec![7, 33], vec![32, 8]];
        let words = chunkings.map(|chunks| {
            let mut twins = Twins::new(gpu, spec(pair, 8, 2), 1);
            for new in chunks {
                twins.append(&[(0, new)], &row);
            }
            [K, V].map(|side| twins.words(0, side))
        });
        assert!(words.iter().all(|other| *other == words[0]), "{pair}");
    }
}

#[test]
fn str_05_outliers_that_were_truncated_leave_no_trace() {
    let Some(gpu) = gpu("str_05_outliers_that_were_truncated_leave_no_trace") else {
        return;
    };
    let calm = plain(16);
    let wild = |side: usize, sequence: usize, token: u32| match token {
        30 => vec![1000.0; 16],
        31 => vec![-1000.0; 16],
        _ => calm(side, sequence, token),
    };
    for pair in ["int4c(32)", "int4c(32)/int4", "int4"] {
        // Packed with the outliers: a per-channel side refuses, and names a length that works.
        let mut twins = Twins::new(gpu, spec(pair, 8, 2), 1);
        twins.append(&[(0, 40)], &wild);
        let before = [K, V].map(|side| twins.words(0, side));
        match (twins.truncate(0, 30), pair) {
            (Ok(()), "int4") => assert_eq!(twins.len(0), 30),
            (Err(e), _) if pair != "int4" => {
                let said = e.to_string();
                assert!(said.contains("nearest length that works is 32 "), "{said}");
                assert_eq!([K, V].map(|side| twins.words(0, side)), before);
                twins.truncate(0, 32).unwrap();
            }
            (result, _) => panic!("{pair}: {result:?}"),
        }
        // A window of 32 keeps all of them in full precision.
        let spec = windowed(pair, 8, 32, 2);
        let mut fresh = Twins::new(gpu, spec.clone(), 1);
        // As long before: what is packed stays packed.
        fresh.append(&[(0, 40)], &calm);
        fresh.truncate(0, 30).unwrap();
        let mut twins = Twins::new(gpu, spec, 1);
        twins.append(&[(0, 40)], &wild);
        let mut outputs = Vec::new();
        for _ in 0..2 {
            twins.truncate(0, 30).unwrap();
            for side in [K, V] {
                assert!(twins.words(0, side) == fresh.words(0, side), "{pair}");
            }
            outputs.push(twins.step(&[(0, 10)], &calm, true));
        }
        outputs.push(fresh.step(&[(0, 10)], &calm, true));
        let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(
            outputs.iter().all(|output| bits(output) == bits(&outputs[2])),
            "{pair}"
        );
        assert!(
            outputs[0].iter().all(|x| x.abs() <= 1.0),
            "{pair}: an outlier was seen"
        );
        for side in [K, V] {
            assert!(twins.words(0, side) == fresh.words(0, side), "{pair}");
        }
    }
}

#[test]
fn str_06_lengths_agree_everywhere_after_a_truncation_portable() {
    let Some(gpu) = gpu("str_06_lengths_agree_everywhere_after_a_truncation_portable") else {
        return;
    };
    let row = plain(16);
    let state = |twins: &Twins<'_>| {
        let book = twins.cache.book();
        let used: Vec<_> = book.pools().map(|pool| (pool.id, pool.used)).collect();
        let held = book.held_pages(twins.ids[0][0]).unwrap().len();
        (
            (twins.len(0), twins.boundaries(0), held, used),
            book.bytes_in_use(),
            [K, V].map(|side| twins.words(0, side)),
        )
    };
    for (pair, lengths) in [("int8/int4", &[17][..]), ("int4c(32)/int8", &[32, 0, 64])] {
        let mut fresh = Twins::new(gpu, spec(pair, 8, 4), 1);
        fresh.append(&[(0, 44)], &row);
        for &len in lengths {
            let mut twins = Twins::new(gpu, spec(pair, 8, 4), 1);
            twins.append(&[(0, 253)], &row);
            if pair != "int8/int4" {
                let said = twins.truncate(0, 17).unwrap_err().to_string();
                assert!(said.contains("works is 32 "), "{said}");
                assert_eq!(twins.len(0), 253);
            }
            twins.truncate(0, len).unwrap();
            if len > 44 {
                twins.truncate(0, 32).unwrap();
            }
            let len = twins.len(0);
            let [ours, theirs] = twins.ids[0];
            for book in [twins.cache.book(), twins.reference.book()] {
                let id = if std::ptr::eq(book, twins.cache.book()) {
                    ours
                } else {
                    theirs
                };
                assert_eq!(book.len(id).unwrap(), len);
                assert!(book.held_pages(id).unwrap().len() <= 2);
            }
            twins.append(&[(0, 44 - len)], &row);
            assert_eq!(state(&twins), state(&fresh), "{pair}, {len}");
            let outputs = [&mut twins, &mut fresh].map(|twins| {
                let output = twins.step(&[(0, 1)], &row, true);
                let truncated = twins.truncate(0, 44);
                truncated.unwrap();
                output
            });
            assert_eq!(outputs[0], outputs[1], "{pair}, {len}");
        }
    }
}

#[test]
fn str_08_rows_of_a_new_position_are_appended_and_never_shifted() {
    let Some(gpu) = gpu("str_08_rows_of_a_new_position_are_appended_and_never_shifted") else {
        return;
    };
    // Keys are stored as they are given, positions and all: there is no shift in place, which would rotate codes that
    // are rounded already. Who moves tokens truncates and appends the rows rotated anew: nothing of the old ones stays.
    let rotated = |side: usize, token: u32, position: u32| {
        let row = plain(16)(side, 0, token);
        let (sin, cos) = (position as f32 * 0.7).sin_cos();
        let turn = |pair: &[f32]| [pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos];
        if side == V {
            row
        } else {
            row.chunks(2).flat_map(turn).collect()
        }
    };
    let placed = |side: usize, _: usize, token: u32| rotated(side, token, token);
    // Tokens from 27 on come to stand at 10 and after.
    let moved = |side: usize, _: usize, position: u32| {
        rotated(
            side,
            if position < 10 { position } else { position + 17 },
            position,
        )
    };
    for (pair, window) in [("int8/int4", 0), ("int4c", 64)] {
        let spec = windowed(pair, 8, window, 3);
        let mut twins = Twins::new(gpu, spec.clone(), 1);
        twins.append(&[(0, 70)], &placed);
        twins.truncate(0, 10).unwrap();
        twins.append(&[(0, 43)], &moved);
        let mut fresh = Twins::new(gpu, spec, 1);
        fresh.append(&[(0, 53)], &moved);
        for side in [K, V] {
            assert!(twins.words(0, side) == fresh.words(0, side), "{pair}");
        }
        let save = |twins: &Twins<'_>| {
            let saved = twins.cache.save(twins.ids[0][0]).unwrap();
            twins.gpu.block_on(saved).unwrap()
        };
        assert!(save(&twins) == save(&fresh), "{pair}");
    }
}

// ---- steps that go wrong -----------------------------------------------------------------------------------------

#[test]
fn a_step_without_an_append_of_every_layer_is_taken_back() {
    let Some(gpu) = gpu("a_step_without_an_append_of_every_layer_is_taken_back") else {
        return;
    };
    let one = spec("int4c(32)/int4", 8, 4);
    let two = CacheSpec {
        layers: vec![one.layers[0]; 2],
        tensor_scales: TensorScales::Given(Vec::new()),
        ..one
    };
    let mut cache = KvCache::new(gpu, two.with_pages(4).unwrap()).unwrap();
    let id = cache.open();
    let row = plain(16);
    let rows = |tokens: Range<u32>| {
        [K, V].map(|side| {
            let rows: Vec<f32> = tokens.clone().flat_map(|t| row(side, 0, t)).collect();
            gpu.upload("rows", &rows).unwrap()
        })
    };
    let [k, v] = rows(0..40);
    let state = |cache: &KvCache| {
        let pools: Vec<_> = cache
            .book()
            .pools()
            .map(|pool| (pool.id, pool.used, pool.free))
            .collect();
        (cache.book().len(id).unwrap(), pools)
    };
    let before = state(&cache);
    for layers in [&[][..], &[0], &[1]] {
        let step = cache.step(&[(id, 40)]).unwrap();
        gpu.submit("append", |encoder| {
            layers
                .iter()
                .try_for_each(|&layer| step.append(encoder, layer, &k, &v))
        })
        .unwrap();
        let error = step.commit().unwrap_err();
        let missing = format!("layer {} was not appended to", u32::from(layers == [0]));
        assert!(
            matches!(error, Error::Usage { .. }) && error.to_string().contains(&missing),
            "{error}"
        );
        assert_eq!(state(&cache), before);
    }
    // A layer takes the rows of a step once; the second try changes nothing.
    let step = cache.step(&[(id, 40)]).unwrap();
    gpu.submit("append", |encoder| {
        for layer in [0, 1] {
            step.append(encoder, layer, &k, &v)?;
            let error = step.append(encoder, layer, &v, &k).unwrap_err();
            assert!(matches!(error, Error::Usage { .. }), "{error}");
        }
        Ok(())
    })
    .unwrap();
    step.commit().unwrap();
    assert_eq!(cache.book().len(id).unwrap(), 40);
    // A step without tokens needs no append.
    cache.step(&[(id, 0)]).unwrap().commit().unwrap();
    cache.step(&[]).unwrap().commit().unwrap();
    let mut fresh = Twins::new(gpu, spec("int4c(32)/int4", 8, 4), 1);
    fresh.append(&[(0, 40)], &row);
    for (layer, side) in [(0, K), (0, V), (1, K), (1, V)] {
        let words = gpu.block_on(cache.live_words(id, layer, side).unwrap()).unwrap();
        assert!(words == fresh.words(0, side), "layer {layer}, side {side}");
    }
}

#[test]
fn a_device_lost_between_steps_gives_errors_and_no_panic() {
    if gpu("a_device_lost_between_steps_gives_errors_and_no_panic").is_none() {
        return;
    }
    // A device of its own: the shared one must live on.
    let gpu = &Gpu::open(&Selection::default()).unwrap();
    let mut cache = KvCache::new(gpu, spec("int4c(32)/int4", 8, 8)).unwrap();
    let (a, b) = (cache.open(), cache.open());
    let row = plain(16);
    let rows = |side| -> Vec<f32> { (0..40).flat_map(|t| row(side, 0, t)).collect() };
    let (k, v, q) = (rows(K), rows(V), queries(40 * 32));
    for _ in 0..3 {
        step(gpu, &mut cache, &[(a, 30), (b, 10)], [&k, &v, &q]).unwrap();
    }
    let saved = gpu.block_on(cache.save(a).unwrap()).unwrap();
    let [k_rows, v_rows, q_rows] = [&k, &v, &q].map(|rows| gpu.upload("rows", rows).unwrap());
    let output = gpu.zeros("output", 40 * 32 * 4).unwrap();
    // Lost while a step is recorded, and bytes are on their way.
    let on_the_way = cache.save(a).unwrap();
    let planned = cache.step(&[(a, 30), (b, 10)]).unwrap();
    gpu.device().destroy();
    let device_error = |what: &str, result: Result<()>| {
        assert!(matches!(result, Err(Error::Device { .. })), "{what}: {result:?}");
    };
    let recorded = gpu.submit("a step", |encoder| {
        planned.append(encoder, 0, &k_rows, &v_rows)?;
        planned.attend(encoder, 0, &q_rows, &output, &AttentionOptions::default())
    });
    device_error("a recorded step", recorded);
    drop(planned);
    // What was submitted before may arrive or not; it never panics.
    if let Ok(bytes) = gpu.block_on(on_the_way) {
        assert!(bytes == saved);
    }
    assert_eq!([a, b].map(|id| cache.book().len(id).unwrap()), [90, 30]);
    device_error("a step", cache.step(&[(a, 1)]).map(drop));
    device_error(
        "save",
        cache.save(a).and_then(|save| gpu.block_on(save)).map(drop),
    );
    device_error(
        "status",
        cache.status().and_then(|status| gpu.block_on(status)).map(drop),
    );
    let words = cache.live_words(a, 0, K).and_then(|words| gpu.block_on(words));
    device_error("words", words.map(drop));
    let scales = cache.calibrated().and_then(|scales| gpu.block_on(scales));
    device_error("scales", scales.map(drop));
    device_error("restore", cache.restore(&saved).map(drop));
    assert_eq!(cache.book().sequences().count(), 2);
    // The books need no device.
    cache.truncate(a, 64).unwrap();
    let fork = cache.fork(a, 32).unwrap();
    [a, b, fork].into_iter().for_each(|id| cache.free(id).unwrap());
    assert!(cache.book().pools().all(|pool| pool.used == 0));
    // A new device takes the saved bytes.
    let gpu = &Gpu::open(&Selection::default()).unwrap();
    let mut cache = KvCache::new(gpu, spec("int4c(32)/int4", 8, 8)).unwrap();
    let restored = cache.restore(&saved).unwrap();
    assert!(gpu.block_on(cache.save(restored).unwrap()).unwrap() == saved);
}

#[test]
fn growth_beyond_the_memory_is_an_error_and_the_cache_goes_on() {
    // A GPU's memory is shared with other tests and programs, and llvmpipe does not say when it runs out. SwiftShader
    // does, in a process of its own with little room.
    let Some(driver) = std::env::var_os("KVPACK_SWIFTSHADER_ICD").filter(|_| cfg!(target_os = "linux"))
    else {
        say("kvpack: skipped growth_beyond_the_memory: KVPACK_SWIFTSHADER_ICD names no driver");
        return;
    };
    let ran = Command::new("sh")
        .args(["-c", "ulimit -v 2500000 && exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args(["serving::in_a_process_with_little_room", "--exact", "--ignored"])
        .env("VK_DRIVER_FILES", &driver)
        .env("VK_ICD_FILENAMES", &driver)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success() && said.contains("1 passed"), "{ran:?}");
}

#[test]
#[ignore = "another test runs it with a limit on memory"]
fn in_a_process_with_little_room() {
    let Some(gpu) = gpu("in_a_process_with_little_room") else {
        return;
    };
    // Far beyond any machine: a cache takes memory as it grows, here by 64 MiB a pool.
    let spec = CacheSpec::new(1, 8, 8, 128, "f16".parse().unwrap(), 1 << 45);
    let mut cache = KvCache::new(
        gpu,
        CacheSpec {
            growth: 1 << 27,
            ..spec
        },
    )
    .unwrap();
    let id = cache.open();
    let rows: Vec<f32> = (0..4).flat_map(|t| plain(1024)(K, 0, t)).collect();
    step(gpu, &mut cache, &[(id, 3)], [&rows, &rows, &[]]).unwrap();
    let state = |cache: &KvCache| {
        let used: Vec<_> = cache.book().pools().map(|pool| pool.used).collect();
        (cache.book().len(id).unwrap(), used, cache.allocated_bytes())
    };
    let before = state(&cache);
    assert_eq!(before, (3, vec![1, 1], 1 << 27));
    for _ in 0..2 {
        // 4 GB.
        let error = cache.step(&[(id, 1_000_000)]).unwrap_err();
        assert!(matches!(error, Error::Device { .. }), "{error}");
        assert_eq!(state(&cache), before);
    }
    step(
        gpu,
        &mut cache,
        &[(id, 1)],
        [&rows[3 * 1024..], &rows[3 * 1024..], &[]],
    )
    .unwrap();
    // A sequence that finds no room when it is restored leaves nothing behind: a step that needs no page goes on.
    let saved = gpu.block_on(cache.save(id).unwrap()).unwrap();
    let per_buffer = cache.book().pools().next().unwrap().per_buffer;
    let other = cache.open();
    let step_of_all = cache.step(&[(other, (per_buffer - 1) * 64)]).unwrap();
    let row = gpu.upload("row", &rows[..1024]).unwrap();
    let same = kvpack::kernels::Rows::from(&row).strides(0, 128);
    gpu.submit("append", |encoder| step_of_all.append(encoder, 0, same, same))
        .unwrap();
    step_of_all.commit().unwrap();
    let mut ballast = Vec::new();
    while let Ok(buffer) = gpu.zeros("ballast", 1 << 25) {
        ballast.push(buffer);
    }
    ballast.pop();
    let error = cache.restore(&saved).unwrap_err();
    assert!(matches!(error, Error::Device { .. }), "{error}");
    assert!(cache.book().pools().all(|pool| pool.made == per_buffer));
    drop(cache.step(&[(id, 1)]).unwrap());
    drop(ballast);
    let words = gpu.block_on(cache.live_words(id, 0, V).unwrap()).unwrap();
    let page = cache.book().geometry().classes[0].packed[V];
    for (i, &x) in (0..).zip(&rows) {
        let got = page.number(&words, i / 1024, i % 1024 / 128, i % 128, 1.0);
        assert_eq!(got, f16::from_f32(x).to_f32());
    }
}
