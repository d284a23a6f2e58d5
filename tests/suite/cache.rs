//! The paged cache: the same bytes however rows arrive, on both devices; books that stay right when a step fails.

use kvpack::cache::{Book, CacheSpec, K, KvCache, LayerSpec, SequenceId, TensorScales, V};
use kvpack::formats::Element;
use kvpack::gpu::{Gpu, Selection};
use kvpack::kernels::{FloatType, Outputs};
use kvpack::options::AttentionOptions;
use kvpack::reference::ReferenceCache;
use kvpack::scales::{ScaleLayout, ScaleType};
use kvpack::spec::{Pair, Side};
use kvpack::{Error, Result};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::common::gpu;

const KV_HEADS: u32 = 2;
/// 24 channels: 2-bit heads have padding, and blocks of 16 span heads.
const HEAD_DIMS: [u32; 2] = [24, 8];

fn spec(pair: Pair, window: [u32; 2], pages: u32) -> CacheSpec {
    let layer = LayerSpec {
        window,
        ..LayerSpec::new(pair)
    };
    spec_of(layer, pages)
}

fn spec_of(layer: LayerSpec, pages: u32) -> CacheSpec {
    CacheSpec {
        v_head_dim: HEAD_DIMS[V],
        layers: vec![layer],
        sequences: 4,
        tensor_scales: TensorScales::Given(vec![[0.01, 0.02]]),
        ..CacheSpec::new(1, 3 * KV_HEADS, KV_HEADS, HEAD_DIMS[K], layer.pair, 0)
    }
    .with_pages(pages)
    .unwrap()
}

/// Pages in use of K and V, packed or in full precision.
fn used(book: &Book, waiting: bool) -> [u32; 2] {
    [K, V].map(|side| {
        let pools = book
            .pools()
            .filter(|pool| pool.id.side == side && pool.id.waiting == waiting);
        pools.map(|pool| pool.used).sum()
    })
}

fn row_numbers(side: usize) -> usize {
    (KV_HEADS * HEAD_DIMS[side]) as usize
}

/// A number that depends on its place alone (SplitMix64).
fn hash(seed: u64, place: u64) -> u64 {
    let mut z = seed.wrapping_add(place.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A number in [-1, 1).
fn unit(seed: u64, place: u64) -> f32 {
    (hash(seed, place) >> 40) as f32 / 8_388_608.0 - 1.0
}

/// What the rows of a sequence are like.
#[derive(Debug, Clone, Copy)]
enum Rows {
    /// Around 1.
    Plain,
    /// Magnitudes from 2^-12 to 2^11, and every seventh row or so zero, subnormal, constant, huge, or with NaN or Inf.
    Wild,
}

/// The row of one token, [head][channel].
fn row(rows: Rows, seed: u64, side: usize, token: u32) -> Vec<f32> {
    let seed = hash(seed, u64::from(token) * 2 + side as u64);
    let numbers = 0..row_numbers(side) as u64;
    let Rows::Wild = rows else {
        return numbers.map(|c| 2.0 * unit(seed, c)).collect();
    };
    let scale = ((hash(seed, 1000) % 24) as f32 - 12.0).exp2();
    let mut row: Vec<f32> = numbers.map(|c| scale * unit(seed, c)).collect();
    let at = (hash(seed, 1001) % row.len() as u64) as usize;
    match hash(seed, 1002) % 50 {
        0 => row.fill(0.0),
        1 => row.iter_mut().for_each(|x| *x *= 1e-40),
        2 => row.fill(-0.375),
        3 => row[at] = 3e38,
        4 => row[at] = f32::NAN,
        5 => row[at] = f32::INFINITY,
        6 => {
            row[at] = f32::NEG_INFINITY;
            row[0] = f32::NAN;
        }
        7 => row.iter_mut().for_each(|x| *x *= 1e-7),
        _ => {}
    }
    row
}

/// Rows of one side for the tokens of a step: the new tokens of each sequence, in order.
fn step_rows(rows: Rows, side: usize, parts: &[(u64, std::ops::Range<u32>)]) -> Vec<f32> {
    parts
        .iter()
        .flat_map(|(seed, tokens)| tokens.clone().flat_map(|t| row(rows, *seed, side, t)))
        .collect()
}

/// The two caches, driven alike.
trait Cache {
    fn open(&mut self) -> SequenceId;
    fn len(&self, id: SequenceId) -> u32;
    /// Plans a step, appends to every layer, commits.
    fn append(&mut self, requests: &[(SequenceId, u32)], k: &[f32], v: &[f32]) -> Result<()>;

    /// Appends the next tokens of some sequences whose rows come from a seed.
    fn grow(&mut self, rows: Rows, parts: &[(SequenceId, u64, u32)]) {
        let requests: Vec<_> = parts.iter().map(|&(id, _, new)| (id, new)).collect();
        let ranges: Vec<_> = parts
            .iter()
            .map(|&(id, seed, new)| (seed, self.len(id)..self.len(id) + new))
            .collect();
        let [k, v] = [K, V].map(|side| step_rows(rows, side, &ranges));
        self.append(&requests, &k, &v).unwrap();
    }
}

impl Cache for ReferenceCache {
    fn open(&mut self) -> SequenceId {
        self.book_mut().open()
    }

    fn len(&self, id: SequenceId) -> u32 {
        self.book().len(id).unwrap()
    }

    fn append(&mut self, requests: &[(SequenceId, u32)], k: &[f32], v: &[f32]) -> Result<()> {
        let plan = self.book_mut().plan(requests, 1)?;
        for layer in 0..self.book().spec().layers.len() as u32 {
            ReferenceCache::append(self, &plan, layer, k, v).unwrap();
        }
        self.book_mut().commit(plan).unwrap();
        Ok(())
    }
}

struct OnGpu<'a> {
    gpu: &'a Gpu,
    cache: KvCache,
}

impl OnGpu<'_> {
    fn new(gpu: &Gpu, spec: CacheSpec) -> OnGpu<'_> {
        OnGpu {
            gpu,
            cache: KvCache::new(gpu, spec).unwrap(),
        }
    }
}

impl OnGpu<'_> {
    fn live_words(&self, id: SequenceId, side: usize) -> Vec<u32> {
        let words = self.cache.live_words(id, 0, side).unwrap();
        self.gpu.block_on(words).unwrap()
    }

    fn status(&self) -> kvpack::work::Status {
        self.gpu.block_on(self.cache.status().unwrap()).unwrap()
    }
}

impl Cache for OnGpu<'_> {
    fn open(&mut self) -> SequenceId {
        self.cache.open()
    }

    fn len(&self, id: SequenceId) -> u32 {
        self.cache.book().len(id).unwrap()
    }

    fn append(&mut self, requests: &[(SequenceId, u32)], k: &[f32], v: &[f32]) -> Result<()> {
        let (k, v) = (self.gpu.upload("k", k)?, self.gpu.upload("v", v)?);
        let layers = self.cache.book().spec().layers.len() as u32;
        let step = self.cache.step(requests)?;
        self.gpu.submit("append", |encoder| {
            (0..layers).try_for_each(|layer| step.append(encoder, layer, &k, &v))
        })?;
        step.commit().unwrap();
        Ok(())
    }
}

#[test]
fn chunks_do_not_change_the_bytes_on_the_reference() {
    let mut cases = 0;
    for side in Side::all() {
        let windows = || prop_oneof![Just(0_u32), Just(8), Just(5)];
        let sinks = || prop_oneof![2 => Just(0_u32), 1 => Just(4), 1 => Just(37)];
        let strategy = (
            [windows(), windows()],
            [sinks(), sinks()],
            1_u32..300,
            proptest::collection::vec(1_u32..80, 0..12),
            proptest::bool::weighted(0.2),
            any::<u64>(),
        );
        let config = ProptestConfig {
            cases: 24,
            failure_persistence: None,
            ..ProptestConfig::default()
        };
        let seed = proptest::test_runner::RngSeed::Fixed(7);
        let mut runner = TestRunner::new(ProptestConfig {
            rng_seed: seed,
            ..config
        });
        type Case = ([u32; 2], [u32; 2], u32, Vec<u32>, bool, u64);
        let run = |(window, sink_tokens, len, cuts, one_by_one, seed): Case| {
            cases += 1;
            // Two sequences in one cache: the second grows in the same steps and must change nothing.
            let layer = LayerSpec {
                window,
                sink_tokens,
                ..LayerSpec::new(Pair::same(side))
            };
            let spec = spec_of(layer, 8);
            let mut chunked = ReferenceCache::new(spec.clone()).unwrap();
            let (a, b) = (Cache::open(&mut chunked), Cache::open(&mut chunked));
            let mut cuts = if one_by_one { vec![1; len as usize] } else { cuts }.into_iter();
            while chunked.len(a) < len {
                let left = len - chunked.len(a);
                let new = cuts.next().unwrap_or(left).min(left);
                let other = new.div_ceil(2);
                chunked.grow(Rows::Wild, &[(b, seed ^ 1, other), (a, seed, new)]);
            }
            let mut counts = kvpack::work::Status::default();
            for (id, seed, len) in [(a, seed, len), (b, seed ^ 1, chunked.len(b))] {
                let mut once = ReferenceCache::new(spec.clone()).unwrap();
                let other = Cache::open(&mut once);
                once.grow(Rows::Wild, &[(other, seed, len)]);
                for s in [K, V] {
                    let [one, many] = [(&once, other), (&chunked, id)].map(|(cache, id)| {
                        (
                            cache.book().boundaries(id, 0).unwrap(),
                            cache.live_words(id, 0, s).unwrap(),
                        )
                    });
                    prop_assert_eq!(one.0, many.0);
                    prop_assert!(one.1 == many.1, "{layer:?}, {len} tokens, side {s}");
                }
                counts.non_finite += once.status().non_finite;
                counts.saturated += once.status().saturated;
            }
            prop_assert_eq!(counts, chunked.status());
            Ok(())
        };
        // The closure counts, and TestRunner asks for Fn.
        let run = std::cell::RefCell::new(run);
        runner.run(&strategy, |case| (run.borrow_mut())(case)).unwrap();
    }
    assert!(cases >= 500, "{cases}");
}

/// Steps of two sequences: their new tokens.
const CHUNKINGS: [&[[u32; 2]]; 3] = [
    &[[200, 70]],
    &[[1, 0], [2, 3], [61, 1], [1, 1], [64, 60], [7, 1], [64, 4]],
    &[[130, 33], [5, 5], [1, 31], [1, 0], [31, 1], [32, 0]],
];

#[test]
fn gpu_pages_are_those_of_the_reference_for_every_side_window_and_chunking() {
    let Some(gpu) = gpu("gpu_pages_are_those_of_the_reference_for_every_side_window_and_chunking") else {
        return;
    };
    for side in Side::all() {
        for (window, sink_tokens) in [([0, 8], [0; 2]), ([5, 0], [3, 20])] {
            let layer = LayerSpec {
                window,
                sink_tokens,
                ..LayerSpec::new(Pair::same(side))
            };
            let mut all = Vec::new();
            for chunking in CHUNKINGS {
                let what = format!("{layer:?}, {chunking:?}");
                let spec = spec_of(layer, 8);
                let mut reference = ReferenceCache::new(spec.clone()).unwrap();
                let mut gpu = OnGpu::new(gpu, spec);
                let ids = [Cache::open(&mut reference), Cache::open(&mut reference)];
                let ours = [gpu.open(), gpu.open()];
                for new in chunking {
                    let parts = |ids: [SequenceId; 2]| [(ids[0], 1, new[0]), (ids[1], 2, new[1])];
                    reference.grow(Rows::Wild, &parts(ids));
                    gpu.grow(Rows::Wild, &parts(ours));
                }
                assert_eq!([reference.len(ids[0]), reference.len(ids[1])], [200, 70]);
                let status = gpu.status();
                assert_eq!(status, reference.status(), "{what}");
                // f32 keeps what it is given.
                assert!(
                    side == Side::F32 || (status.non_finite > 0 && status.saturated > 0),
                    "{what}: {status:?}"
                );
                let mut bytes = Vec::new();
                for (our, id) in ours.into_iter().zip(ids) {
                    for s in [K, V] {
                        let (ours, theirs) =
                            (gpu.live_words(our, s), reference.live_words(id, 0, s).unwrap());
                        assert!(ours == theirs, "{what}: pages of {} differ", ["K", "V"][s]);
                        bytes.push(ours);
                    }
                }
                all.push(bytes);
            }
            assert!(
                all.iter().all(|bytes| *bytes == all[0]),
                "{side}: the bytes depend on the chunks"
            );
        }
    }
}

#[test]
fn attention_crosses_the_boundary_between_packed_and_waiting_tokens() {
    let Some(gpu) = gpu("attention_crosses_the_boundary_between_packed_and_waiting_tokens") else {
        return;
    };
    for window in [0, 8] {
        let pair: Pair = "int4c(16)/int8".parse().unwrap();
        let spec = CacheSpec {
            page_tokens: 32,
            ..spec(pair, [window; 2], 12)
        }
        .with_pages(12)
        .unwrap();
        let (q_row, o_row) = (
            (spec.q_heads * HEAD_DIMS[K]) as usize,
            (spec.q_heads * HEAD_DIMS[V]) as usize,
        );
        let mut reference = ReferenceCache::new(spec.clone()).unwrap();
        let mut cache = KvCache::new(gpu, spec.clone()).unwrap();
        let ids = [(); 3].map(|()| Cache::open(&mut reference));
        let ours = [(); 3].map(|()| cache.open());
        // Prefill, decode, decode of some, and both in one step.
        let mut steps = vec![[70, 33, 1], [1, 1, 1], [1, 0, 1], [5, 1, 40]];
        steps.extend([[1; 3]; 18]);
        steps.push([30, 2, 7]);
        for (number, new) in steps.iter().enumerate() {
            let requests: Vec<_> = ids.into_iter().zip(*new).collect();
            let ranges: Vec<_> = (1..)
                .zip(&requests)
                .map(|(seed, &(id, new))| (seed, reference.len(id)..reference.len(id) + new))
                .collect();
            let [k, v] = [K, V].map(|side| step_rows(Rows::Plain, side, &ranges));
            let tokens = new.iter().sum::<u32>() as usize;
            let q: Vec<f32> = (0..(tokens * q_row) as u64)
                .map(|i| 3.0 * unit(number as u64, i))
                .collect();

            let buffers = [&k, &v, &q].map(|rows| gpu.upload("rows", rows).unwrap());
            let output = gpu.zeros("output", (tokens * o_row * 4) as u64).unwrap();
            let lse_rows = tokens * spec.q_heads as usize;
            let lse = gpu.zeros("lse", lse_rows as u64 * 4).unwrap();
            let outputs = Outputs::from(&output).with_lse(&lse);
            let our_requests: Vec<_> = ours.into_iter().zip(*new).collect();
            let step = cache.step(&our_requests).unwrap();
            gpu.submit("attention", |encoder| {
                step.append(encoder, 0, &buffers[0], &buffers[1])?;
                step.attend(encoder, 0, &buffers[2], outputs, &AttentionOptions::default())
            })
            .unwrap();
            let lse: Vec<f32> = gpu.read("lse", &lse, lse_rows).unwrap();
            step.commit().unwrap();
            let output: Vec<f32> = gpu.read("output", &output, tokens * o_row).unwrap();

            let plan = reference.book_mut().plan(&requests, 1).unwrap();
            ReferenceCache::append(&mut reference, &plan, 0, &k, &v).unwrap();
            let q: Vec<f64> = q.into_iter().map(f64::from).collect();
            let (expected, expected_lse) = reference
                .attend(&plan, 0, &q, &AttentionOptions::default())
                .unwrap();
            let waves = plan
                .attention(0, AttentionOptions::<()>::default().reach())
                .unwrap()
                .waves;
            let kinds = waves
                .iter()
                .flat_map(|wave| wave.segments.keys().map(|segment| segment.kind));
            let waits = (
                kinds.clone().any(|kind| kind.k_waits),
                kinds.clone().any(|kind| kind.v_waits),
            );
            reference.book_mut().commit(plan).unwrap();
            if window > 0 {
                assert_eq!(waits, (true, true));
            }
            // max |V| is below 2; scores up to 60 in f32 and exp of a software driver make 1e-5 of it.
            for (i, (&x, &y)) in output.iter().zip(&expected).enumerate() {
                let off = (f64::from(x) - y).abs();
                assert!(
                    off <= 1e-5 * 2.0,
                    "window {window}, step {number}, output {i}: {x} for {y}"
                );
            }
            for (i, (&x, &y)) in lse.iter().zip(&expected_lse).enumerate() {
                let off = (f64::from(x) - y).abs();
                assert!(
                    off <= 1e-5 * y.abs().max(1.0),
                    "window {window}, step {number}, LSE {i}: {x} for {y}"
                );
            }
        }
        for (place, s) in (0..3).flat_map(|place| [(place, K), (place, V)]) {
            let words = cache.live_words(ours[place], 0, s).unwrap();
            assert_eq!(
                gpu.block_on(words).unwrap(),
                reference.live_words(ids[place], 0, s).unwrap()
            );
        }
    }
}

/// What the books say of some sequences.
fn books(cache: &ReferenceCache, ids: &[SequenceId]) -> impl PartialEq + std::fmt::Debug + use<> {
    let book = cache.book();
    let one = |&id: &SequenceId| {
        let pages: Vec<_> = book
            .held_pages(id)
            .unwrap()
            .into_iter()
            .map(|held| (held.pool, held.page))
            .collect();
        (book.len(id).unwrap(), book.boundaries(id, 0).unwrap(), pages)
    };
    let used = [false, true].map(|waiting| used(book, waiting));
    (used, book.bytes_in_use(), ids.iter().map(one).collect::<Vec<_>>())
}

#[test]
fn a_full_cache_says_what_is_missing_and_changes_nothing() {
    for (pair, window, pool) in [
        ("int4", 0, "packed K"),
        ("int4c/int4", 0, "packed V"),
        ("f16/int4", 100, "packed K"),
        ("int4c", 100, "full-precision K"),
    ] {
        let small = CacheSpec {
            sequences: 1,
            ..spec(pair.parse().unwrap(), [window; 2], 3)
        };
        let small = small.with_pages(3).unwrap();
        let mut cache = ReferenceCache::new(small.clone()).unwrap();
        let (a, b) = (Cache::open(&mut cache), Cache::open(&mut cache));
        cache.grow(Rows::Plain, &[(a, 1, 70)]);
        let before = books(&cache, &[a, b]);
        let words = [K, V].map(|s| cache.live_words(a, 0, s).unwrap());
        // Sequence a has room for 58 tokens more; b then needs two pages and one is free.
        let error = cache.book_mut().plan(&[(a, 58), (b, 65)], 1).unwrap_err();
        let said = error.to_string();
        assert!(
            matches!(
                error,
                Error::CacheFull {
                    missing: 1,
                    free: 1,
                    ..
                }
            ),
            "{pair}: {said}"
        );
        assert!(
            said.contains(&format!("{pool}: 2 pages are needed, 1 are free, 1 are missing")),
            "{pair}: {said}"
        );
        assert_eq!(books(&cache, &[a, b]), before, "{pair}");
        assert_eq!(
            [K, V].map(|s| cache.live_words(a, 0, s).unwrap()),
            words,
            "{pair}"
        );
        // A smaller step works, and gives the bytes it always gives.
        cache.grow(Rows::Plain, &[(a, 1, 58), (b, 2, 60)]);
        let mut other = ReferenceCache::new(small).unwrap();
        let id = Cache::open(&mut other);
        other.grow(Rows::Plain, &[(id, 1, 128)]);
        for s in [K, V] {
            assert_eq!(
                cache.live_words(a, 0, s).unwrap(),
                other.live_words(id, 0, s).unwrap(),
                "{pair}"
            );
        }
    }
}

#[test]
fn a_small_cache_has_room_for_what_fits_it() {
    // Fewer pages than long steps go through, and than a window asks for before and after a step.
    for (window, pages) in [(0, 4), (0, 11), (4096, 100)] {
        let mut spec = CacheSpec::new(1, 2, 2, 16, "int4c/int4".parse().unwrap(), 0);
        spec.sequences = 1;
        spec.layers[0].window = [window; 2];
        let mut book = Book::new(spec.with_pages(pages).unwrap(), None).unwrap();
        let room = book.room();
        assert_eq!(room, u64::from(pages) * 64);
        // At once, and token by token.
        let id = book.open();
        let plan = book.plan(&[(id, room as u32)], 1).unwrap();
        book.abandon(plan);
        for _ in 0..room {
            let plan = book.plan(&[(id, 1)], 1).unwrap();
            book.commit(plan).unwrap();
        }
    }
}

#[test]
fn sequences_that_do_not_exist_or_come_twice_are_refused() {
    let mut cache = ReferenceCache::new(spec("int8".parse().unwrap(), [0; 2], 4)).unwrap();
    let (a, b) = (Cache::open(&mut cache), Cache::open(&mut cache));
    cache.grow(Rows::Plain, &[(a, 1, 10), (b, 2, 20)]);
    cache.book_mut().free(b).unwrap();
    let before = books(&cache, &[a]);
    for requests in [&[(b, 1)][..], &[(a, 1), (b, 1)]] {
        let error = cache.book_mut().plan(requests, 1).unwrap_err();
        assert!(matches!(error, Error::UnknownSequence(_)), "{error}");
    }
    assert!(matches!(cache.book_mut().free(b), Err(Error::UnknownSequence(_))));
    assert!(matches!(cache.book().len(b), Err(Error::UnknownSequence(_))));
    assert!(matches!(
        cache.live_words(b, 0, K),
        Err(Error::UnknownSequence(_))
    ));
    let error = cache.book_mut().plan(&[(a, 60), (a, 1)], 1).unwrap_err();
    assert!(
        matches!(error, Error::Usage { .. }) && error.to_string().contains("twice"),
        "{error}"
    );
    let error = cache.book_mut().plan(&[(a, u32::MAX)], 1).unwrap_err();
    assert!(
        matches!(error, Error::Usage { .. }) && error.to_string().contains("2^31"),
        "{error}"
    );
    assert_eq!(books(&cache, &[a]), before);
    // An id is not used again.
    assert_ne!(Cache::open(&mut cache), b);
}

#[test]
fn a_dropped_step_is_taken_back() {
    let Some(gpu) = gpu("a_dropped_step_is_taken_back") else {
        return;
    };
    for (pair, window) in [("int4c(8)/int2", 0), ("int8", 5)] {
        let spec = spec(pair.parse().unwrap(), [window; 2], 3);
        let mut reference = ReferenceCache::new(spec.clone()).unwrap();
        let id = Cache::open(&mut reference);
        let mut gpu = OnGpu::new(gpu, spec);
        let our = gpu.open();
        reference.grow(Rows::Plain, &[(id, 1, 50)]);
        gpu.grow(Rows::Plain, &[(our, 1, 50)]);
        let pages = |gpu: &OnGpu<'_>| [false, true].map(|waiting| used(gpu.cache.book(), waiting));
        let before = pages(&gpu);
        // The rows even reach the pages before the step is dropped.
        let [k, v] = [K, V].map(|side| step_rows(Rows::Plain, side, &[(99, 0..100)]));
        let (k, v) = (gpu.gpu.upload("k", &k).unwrap(), gpu.gpu.upload("v", &v).unwrap());
        let step = gpu.cache.step(&[(our, 100)]).unwrap();
        gpu.gpu
            .submit("append", |encoder| step.append(encoder, 0, &k, &v))
            .unwrap();
        drop(step);
        assert_eq!((gpu.len(our), pages(&gpu)), (50, before), "{pair}");
        // To the last slot of the three pages: none was lost.
        for new in [0, 3, 60, 79] {
            reference.grow(Rows::Plain, &[(id, 1, new)]);
            gpu.grow(Rows::Plain, &[(our, 1, new)]);
            for s in [K, V] {
                let (ours, theirs) = (gpu.live_words(our, s), reference.live_words(id, 0, s).unwrap());
                assert!(ours == theirs, "{pair}, {} tokens, side {s}", gpu.len(our));
            }
        }
        assert_eq!(gpu.status(), reference.status(), "{pair}");
    }
}

#[test]
fn str_09_a_page_used_again_keeps_nothing_of_its_last_sequence() {
    let Some(gpu) = gpu("str_09_a_page_used_again_keeps_nothing_of_its_last_sequence") else {
        return;
    };
    let constant = |value: f32, tokens: usize| [K, V].map(|s| vec![value; tokens * row_numbers(s)]);
    let spec = spec("int8".parse().unwrap(), [0; 2], 1);
    let mut gpu = OnGpu::new(gpu, spec.clone());
    let mut reference = ReferenceCache::new(spec).unwrap();
    let scale = |cache: &dyn Fn(usize) -> Vec<u32>, page: kvpack::pages::PageLayout, s: usize| {
        let (word, bit) = page.scale_at(0, 0, 0).unwrap();
        (cache(s)[word as usize] >> bit) & 0xffff
    };
    for (value, tokens) in [(1000.0_f32, 64), (0.01, 2)] {
        let [k, v] = constant(value, tokens);
        let (a, b) = (gpu.open(), Cache::open(&mut reference));
        gpu.append(&[(a, tokens as u32)], &k, &v).unwrap();
        Cache::append(&mut reference, &[(b, tokens as u32)], &k, &v).unwrap();
        let expected = ScaleType::F16.from_amax(value, 127.0).bits;
        for s in [K, V] {
            let page = reference.book().geometry().classes[0].packed[s];
            assert_eq!(scale(&|s| gpu.live_words(a, s), page, s), expected);
            assert_eq!(
                scale(&|s| reference.live_words(b, 0, s).unwrap(), page, s),
                expected
            );
        }
        gpu.cache.free(a).unwrap();
        reference.book_mut().free(b).unwrap();
        assert_eq!(used(gpu.cache.book(), false), [0; 2]);
    }
    // 0.01 / 127 = 7.87e-5 = 1321.06 x 2^-24.
    assert_eq!(ScaleType::F16.from_amax(0.01, 127.0).bits, 0x0400 + 1321 - 1024);
    // Freed pages come back, again and again: the pool has one.
    for _ in 0..50 {
        let id = Cache::open(&mut reference);
        reference.grow(Rows::Plain, &[(id, 1, 64)]);
        assert!(matches!(
            reference.book_mut().plan(&[(id, 1)], 1),
            Err(Error::CacheFull { .. })
        ));
        reference.book_mut().free(id).unwrap();
    }
}

#[test]
fn str_09_a_given_scale_clips_later_rows_and_counts_them() {
    let Some(gpu) = gpu("str_09_a_given_scale_clips_later_rows_and_counts_them") else {
        return;
    };
    let scale = 1.0_f32 / 448.0;
    let tensor_scales = TensorScales::Given(vec![[scale; 2]]);
    let spec = CacheSpec {
        tensor_scales,
        ..spec("fp8".parse().unwrap(), [0; 2], 1)
    };
    let mut gpu = OnGpu::new(gpu, spec.clone());
    let mut reference = ReferenceCache::new(spec).unwrap();
    let (our, id) = (gpu.open(), Cache::open(&mut reference));
    for (value, tokens) in [(1.0_f32, 13_u32), (1000.0, 1)] {
        let [k, v] = [K, V].map(|s| vec![value; tokens as usize * row_numbers(s)]);
        gpu.append(&[(our, tokens)], &k, &v).unwrap();
        Cache::append(&mut reference, &[(id, tokens)], &k, &v).unwrap();
    }
    let clipped = (row_numbers(K) + row_numbers(V)) as u32;
    let status = gpu.status();
    assert_eq!((status.non_finite, status.saturated), (0, clipped));
    assert_eq!(status, reference.status());
    for s in [K, V] {
        let words = gpu.live_words(our, s);
        assert_eq!(words, reference.live_words(id, 0, s).unwrap());
        let page = reference.book().geometry().classes[0].packed[s];
        for slot in [0, 12, 13] {
            assert_eq!(
                page.number(&words, slot, 1, 3, scale),
                448.0 * scale,
                "slot {slot}"
            );
        }
    }
}

#[test]
fn pages_of_waiting_tokens_come_back_when_their_groups_close() {
    // Two waiting pages serve a sequence of any length that grows in small steps.
    let mut cache = ReferenceCache::new(spec("int4c/int4c".parse().unwrap(), [5; 2], 40)).unwrap();
    let id = Cache::open(&mut cache);
    let mut most = 0;
    while cache.len(id) < 2000 {
        cache.grow(Rows::Plain, &[(id, 1, 7)]);
        most = most.max(used(cache.book(), true)[K]);
        assert_eq!(
            used(cache.book(), false)[K],
            (cache.book().boundaries(id, 0).unwrap()[K]).div_ceil(64)
        );
    }
    assert!(most <= 2, "{most}");
    // Freed in the middle of a group and of the window, they come back too.
    let mut cache = ReferenceCache::new(spec("int4c".parse().unwrap(), [5; 2], 2)).unwrap();
    for _ in 0..5 {
        let id = Cache::open(&mut cache);
        cache.grow(Rows::Plain, &[(id, 1, 75)]);
        assert_eq!(used(cache.book(), true), [1; 2]);
        cache.book_mut().free(id).unwrap();
    }
}

#[test]
fn specs_that_do_not_fit_are_refused_by_name() {
    let good = spec("int8".parse().unwrap(), [0; 2], 4);
    let cases = [
        (
            CacheSpec {
                layers: Vec::new(),
                ..good.clone()
            },
            "layers = 0",
        ),
        (
            CacheSpec {
                layers: vec![good.layers[0]; 1025],
                ..good.clone()
            },
            "layers = 1025",
        ),
        (
            CacheSpec {
                sequences: 0,
                ..good.clone()
            },
            "sequences = 0",
        ),
        (
            CacheSpec {
                q_heads: 0,
                ..good.clone()
            },
            "q_heads = 0",
        ),
        (
            CacheSpec {
                q_heads: 17 * KV_HEADS,
                ..good.clone()
            },
            "q_heads = 34",
        ),
        (
            CacheSpec {
                q_heads: 5,
                ..good.clone()
            },
            "q_heads = 5",
        ),
        (
            CacheSpec {
                kv_heads: 0,
                q_heads: 4,
                ..good.clone()
            },
            "kv_heads = 0",
        ),
        (
            CacheSpec {
                k_head_dim: 12,
                ..good.clone()
            },
            "head_dim = 12",
        ),
        (
            CacheSpec {
                v_head_dim: 264,
                ..good.clone()
            },
            "head_dim = 264",
        ),
        (
            CacheSpec {
                page_tokens: 0,
                ..good.clone()
            },
            "page_tokens = 0",
        ),
        (
            CacheSpec {
                page_tokens: 32,
                layers: vec![LayerSpec::new("int4c(64)/int4".parse().unwrap())],
                ..good.clone()
            },
            "G = 64",
        ),
    ];
    for (spec, part) in cases {
        let error = ReferenceCache::new(spec).unwrap_err();
        assert!(
            matches!(error, Error::Shape { .. }) && error.to_string().contains(part),
            "{part}: {error}"
        );
    }
    let waiting = "int8".parse().unwrap();
    let error = ReferenceCache::new(CacheSpec { waiting, ..good }).unwrap_err();
    assert!(error.to_string().contains("wait as `int8`"), "{error}");
}

#[test]
fn scl_15_tensor_scales_out_of_range_are_refused_by_layer_and_side() {
    let given = |pair: &str, scales: Vec<[f32; 2]>| {
        let good = spec(pair.parse().unwrap(), [0; 2], 1);
        CacheSpec {
            layers: vec![good.layers[0]; 2],
            tensor_scales: TensorScales::Given(scales),
            ..good
        }
        .geometry()
        .map(|_| ())
    };
    // What is in range as f64 is not always so as the f32 that a cache holds.
    let [underflow, overflow] = ["1e-50", "1e300"].map(|text| text.parse::<f32>().unwrap());
    for bad in [
        underflow,
        overflow,
        0.0,
        -1.0,
        f32::NAN,
        f32::NEG_INFINITY,
        1e-28,
        4e35,
    ] {
        for (layer, side) in [(0, K), (0, V), (1, K), (1, V)] {
            let mut scales = vec![[0.01; 2]; 2];
            scales[layer][side] = bad;
            let error = given("fp8", scales.clone()).unwrap_err();
            let place = format!("layer {layer}, {}", ["K", "V"][side]);
            let said = error.to_string();
            assert!(matches!(error, Error::TensorScale { .. }), "{bad}: {said}");
            assert!(said.contains(&place) && said.contains("2^-90"), "{bad}: {said}");
            // A side without per-tensor scales does not look at its place.
            let other = if side == K { "int8/fp8" } else { "fp8/int8" };
            assert!(given(other, scales).is_ok(), "{other}");
        }
    }
    for wrong in [0, 1, 3] {
        let error = given("fp8", vec![[0.01; 2]; wrong]).unwrap_err();
        let said = error.to_string();
        assert!(
            matches!(error, Error::Shape { .. }) && said.contains("each of the 2 layers"),
            "{wrong}: {said}"
        );
    }
    assert!(given("int8", Vec::new()).is_ok(), "nobody reads them");
    for good in [2.0_f32.powi(-90), 2.0_f32.powi(118), 1.0] {
        assert!(given("fp8", vec![[good; 2]; 2]).is_ok(), "{good}");
    }
}

#[test]
fn lng_09_decoding_allocates_nothing_that_stays() {
    if gpu("lng_09_decoding_allocates_nothing_that_stays").is_none() {
        return;
    }
    // A device of its own: what other tests allocate must not count.
    let gpu = &Gpu::open(&Selection::default()).unwrap();
    let mut cache = KvCache::new(gpu, spec("int8".parse().unwrap(), [0; 2], 4)).unwrap();
    let id = cache.open();
    let mut pools = None;
    let (mut reserved, mut most) = (None, 0);
    let rows = [row_numbers(K), row_numbers(V), 6 * HEAD_DIMS[K] as usize];
    let rows = rows.map(|numbers| gpu.upload("rows", &vec![0.5_f32; numbers]).unwrap());
    let output = gpu.zeros("output", u64::from(6 * HEAD_DIMS[V]) * 4).unwrap();
    for step in 0..200 {
        let planned = cache.step(&[(id, 1)]).unwrap();
        gpu.submit("decode", |encoder| {
            planned.append(encoder, 0, &rows[0], &rows[1])?;
            planned.attend(encoder, 0, &rows[2], &output, &AttentionOptions::default())
        })
        .unwrap();
        planned.commit().unwrap();
        // Waits, so that what the step used is given back.
        gpu.read::<f32>("output", &output, 1).unwrap();
        let bytes = (cache.allocated_bytes(), cache.work_bytes());
        assert_eq!(bytes, *pools.get_or_insert(bytes));
        if let Some(report) = gpu.device().generate_allocator_report() {
            most = most.max(report.total_allocated_bytes);
            if step == 100 {
                reserved = Some((report.total_reserved_bytes, most));
            }
        }
    }
    let report = gpu.device().generate_allocator_report();
    let now = report.map(|report| (report.total_reserved_bytes, most));
    assert!(
        now.is_some() || gpu.summary().backend != "vulkan",
        "no report of the allocator"
    );
    assert_eq!(
        reserved, now,
        "bytes (reserved, most in use) after 100 and 200 steps"
    );
}

#[test]
fn per_tensor_scales_from_rows_are_those_of_the_sides_own_element() {
    let Some(gpu) = gpu("per_tensor_scales_from_rows_are_those_of_the_sides_own_element") else {
        return;
    };
    for element in [Element::E4m3, Element::Int8, Element::E2m1] {
        let side = Side {
            element,
            layout: ScaleLayout::PerTensor,
            scale: ScaleType::F32,
        };
        let spec = CacheSpec {
            tensor_scales: TensorScales::FromRows,
            ..spec(Pair::same(side), [0; 2], 2)
        };
        let mut reference = ReferenceCache::new(spec.clone()).unwrap();
        let mut gpu = OnGpu::new(gpu, spec);
        let (our, id) = (gpu.open(), Cache::open(&mut reference));
        reference.grow(Rows::Plain, &[(id, 1, 50)]);
        gpu.grow(Rows::Plain, &[(our, 1, 50)]);
        for s in [K, V] {
            let (ours, theirs) = (gpu.live_words(our, s), reference.live_words(id, 0, s).unwrap());
            assert!(ours == theirs, "{element:?}, side {s}");
        }
        // The largest number takes the largest code: nothing saturates and nothing is left unused.
        assert_eq!(gpu.status().saturated, 0, "{element:?}");
    }
}

#[test]
fn what_a_cut_and_a_free_will_do_is_told_before() {
    let mut cache = ReferenceCache::new(spec("int4c/int4".parse().unwrap(), [0; 2], 8)).unwrap();
    let id = Cache::open(&mut cache);
    cache.grow(Rows::Plain, &[(id, 1, 100)]);
    let book = cache.book_mut();
    // K is packed up to 96, in groups of 32.
    for (wanted, nearest) in [
        (100, 100),
        (98, 98),
        (95, 96),
        (79, 64),
        (70, 64),
        (10, 0),
        (1000, 100),
    ] {
        assert_eq!(book.nearest_cut(id, wanted).unwrap(), nearest, "{wanted}");
        book.fork(id, nearest)
            .map(|fork| book.free(fork))
            .unwrap()
            .unwrap();
        let refused = wanted != nearest && book.truncate(id, wanted).is_err();
        assert!(wanted == nearest || refused, "{wanted}");
    }
    let fork = book.fork(id, 64).unwrap();
    assert_eq!(book.bytes_freed_by(fork).unwrap().total(), 0);
    cache.grow(Rows::Plain, &[(fork, 2, 30)]);
    let book = cache.book_mut();
    for id in [fork, id] {
        let (before, told) = (book.bytes_in_use(), book.bytes_freed_by(id).unwrap());
        assert!(told.total() > 0);
        book.free(id).unwrap();
        assert_eq!(before.total() - book.bytes_in_use().total(), told.total());
        assert!(book.bytes_freed_by(id).is_err() && book.nearest_cut(id, 0).is_err());
    }
    assert_eq!(book.bytes_in_use().total(), 0);
}

#[test]
fn kernels_can_be_built_before_they_are_needed() {
    let Some(gpu) = gpu("kernels_can_be_built_before_they_are_needed") else {
        return;
    };
    let cache = KvCache::new(gpu, spec("f16".parse().unwrap(), [0; 2], 1)).unwrap();
    for float in [FloatType::F32, FloatType::F16] {
        cache.prepare(float, float, float).unwrap();
    }
}
