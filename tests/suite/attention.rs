//! Attention on the GPU against the CPU reference, within twice the error of a plain f32 attention.

use half::f16;
use kvpack::cache::{CacheSpec, KvCache};
use kvpack::formats::ALL;
use kvpack::kernels::attention_merge::AttentionMerge;
use kvpack::kernels::{self, FloatType, Rows};
use kvpack::options::{AttentionOptions, Reach};
use kvpack::pages::PageLayout;
use kvpack::reference::ReferenceCache;
use kvpack::scales::{SCALE_TYPES, ScaleLayout, ScaleType};
use kvpack::spec::{Pair, Side};
use kvpack::validate::{
    Comparison, Fixture, Outputs, PageCheck, Random, SequenceInput, nasty_rows, random_sequences,
};
use kvpack::variant::{Arithmetic, Reduction, Variant};
use kvpack::work::{Merge, TableEntry, WorkItem};

use crate::common;

/// Lengths around a page of `p` tokens, and one over several pages.
fn lengths(p: u32) -> [u32; 6] {
    [0, 1, p - 1, p, p + 1, 300]
}

fn pages(pair: Pair, heads: u32, head_dim: u32, tokens: u32) -> [PageLayout; 2] {
    [pair.k, pair.v].map(|side| PageLayout::new(side, heads, head_dim, tokens).unwrap())
}

/// Runs one ragged batch and demands the bound; the worst share of it is returned.
fn check_pair(
    pages: [PageLayout; 2],
    ratio: u32,
    lengths: &[u32],
    queries: u32,
    prefill: bool,
    test: &str,
) -> Option<f64> {
    let gpu = common::gpu(test)?;
    let q_heads = pages[0].heads * ratio;
    let sequences = random_sequences(&pages, q_heads, lengths, queries);
    let fixture = Fixture::new(pages, q_heads, &sequences, 2 * pages[0].tokens, prefill).unwrap();
    let comparison = fixture.compare(&fixture.gpu(gpu).unwrap(), &fixture.reference());
    assert!(comparison.cases > 0);
    assert_eq!(
        comparison.failures, 0,
        "{} / {}, ratio {ratio}, prefill {prefill}: {comparison:?}",
        pages[0].side, pages[1].side
    );
    Some(comparison.max_error / comparison.bound)
}

/// The sides that stand for all: one group length for the per-channel ones.
fn sides() -> Vec<Side> {
    [
        "f32", "f16", "fp8", "int8", "int4", "int2", "fp4", "int8c", "int4c", "int2c",
    ]
    .map(|name| name.parse().unwrap())
    .into()
}

/// The variant that drivers compile fastest; [`defaults_of`] has those that adapters get.
fn quick(layout: &[PageLayout; 2], ratio: u32) -> Variant {
    Variant {
        workgroup: 64,
        slot_quads: 1,
        channel_quads: 2,
        ..Variant::new([&layout[0], &layout[1]], ratio, false, false)
    }
}

fn check_variant(layout: [PageLayout; 2], ratio: u32, lengths: &[u32], variant: Variant, test: &str) {
    let Some(gpu) = common::gpu(test) else { return };
    let q_heads = 2 * ratio;
    let sequences = random_sequences(&layout, q_heads, lengths, 1);
    let mut fixture = Fixture::new(layout, q_heads, &sequences, 64, false).unwrap();
    fixture.variant = Some(variant);
    let comparison = fixture.compare(&fixture.gpu(gpu).unwrap(), &fixture.reference());
    assert!(comparison.cases > 0);
    let [k, v] = layout.map(|page| page.side);
    assert_eq!(
        comparison.failures, 0,
        "{k} / {v}, ratio {ratio}, {variant}: {comparison:?}"
    );
}

fn every_pair(ratio: u32, test: &str) {
    for k in sides() {
        for v in sides() {
            let layout = pages(Pair { k, v }, 2, 8, 32);
            check_variant(layout, ratio, &lengths(32), quick(&layout, ratio), test);
        }
    }
}

/// Each side as K and as V, twice, with other partners.
fn some_pairs(ratio: u32, test: &str) {
    let sides = sides();
    for shift in [0, ratio as usize] {
        for (at, &k) in sides.iter().enumerate() {
            let v = sides[(at + shift) % sides.len()];
            let layout = pages(Pair { k, v }, 2, 8, 32);
            check_variant(layout, ratio, &lengths(32), quick(&layout, ratio), test);
        }
    }
}

/// Each side as K and as V, with what software adapters or GPUs run by default for heads of 64.
fn defaults_of(software: bool, test: &str) {
    let sides = sides();
    for (at, &k) in sides.iter().enumerate() {
        let v = sides[(at + 3) % sides.len()];
        let layout = pages(Pair { k, v }, 2, 64, 32);
        let variant = Variant::new([&layout[0], &layout[1]], 4, false, software);
        check_variant(layout, 4, &lengths(32), variant, test);
    }
}

#[test]
fn every_side_with_the_default_of_software_adapters() {
    defaults_of(true, "every_side_with_the_default_of_software_adapters");
}

#[test]
fn every_side_with_the_default_of_gpus() {
    defaults_of(false, "every_side_with_the_default_of_gpus");
}

#[test]
fn every_pair_of_sides_at_head_ratio_1() {
    every_pair(1, "every_pair_of_sides_at_head_ratio_1");
}

#[test]
#[ignore = "minutes of compiling: every pair of sides at the other head ratios"]
fn every_pair_of_sides_at_head_ratios_3_4_and_8() {
    for ratio in [3, 4, 8] {
        every_pair(ratio, "every_pair_of_sides_at_head_ratios_3_4_and_8");
    }
}

#[test]
fn every_side_at_head_ratio_3() {
    some_pairs(3, "every_side_at_head_ratio_3");
}

#[test]
fn every_side_at_head_ratio_4() {
    some_pairs(4, "every_side_at_head_ratio_4");
}

#[test]
fn every_side_at_head_ratio_8() {
    some_pairs(8, "every_side_at_head_ratio_8");
}

/// Variants that differ in how work is cut.
fn cuts(base: Variant) -> Vec<Variant> {
    let mut all = Vec::new();
    for slot_quads in [1, 2, 4] {
        for channel_quads in [2, 4] {
            all.push(Variant {
                slot_quads,
                channel_quads,
                ..base
            });
        }
    }
    for workgroup in [8, 16, 128, 256] {
        all.push(Variant {
            workgroup,
            slot_quads: 1,
            ..base
        });
    }
    all.push(Variant { head_tile: 1, ..base });
    for (arithmetic, slot_quads) in [
        (Arithmetic::F16, 4),
        (Arithmetic::Packed, 1),
        (Arithmetic::Packed, 4),
    ] {
        all.push(Variant {
            arithmetic,
            slot_quads,
            ..base
        });
    }
    all
}

/// Variants that differ in what numbers are made of.
fn kinds(base: Variant) -> Vec<Variant> {
    let mut all = vec![Variant {
        reduction: Reduction::Subgroup,
        ..base
    }];
    for arithmetic in [Arithmetic::F16, Arithmetic::Packed] {
        all.push(Variant {
            arithmetic,
            slot_quads: 2,
            channel_quads: 2,
            ..base
        });
    }
    all
}

fn check_variants(
    sides: &[(&str, &str)],
    shape: (u32, u32, u32),
    prefill: bool,
    list: fn(Variant) -> Vec<Variant>,
    test: &str,
) {
    let Some(gpu) = common::gpu(test) else { return };
    let (ratio, head_dim, tokens) = shape;
    let (mut ran, mut missing) = (0, 0);
    for &(k, v) in sides {
        let pair = Pair {
            k: k.parse().unwrap(),
            v: v.parse().unwrap(),
        };
        let layout = pages(pair, 2, head_dim, tokens);
        let queries = if prefill { 5 } else { 1 };
        // One token: the LSE is its score.
        let sequences = random_sequences(&layout, 2 * ratio, &[queries, tokens + 1, 300], queries);
        let mut fixture = Fixture::new(layout, 2 * ratio, &sequences, 2 * tokens, prefill).unwrap();
        let base = Variant::new([&layout[0], &layout[1]], ratio, prefill, true);
        for variant in list(base) {
            let same = variant.arithmetic.for_side(layout[0].side) == variant.arithmetic;
            if variant.check([&layout[0], &layout[1]]).is_err() || !same {
                continue;
            }
            if !gpu.device().features().contains(variant.features()) {
                missing += 1;
                continue;
            }
            fixture.variant = Some(variant);
            let comparison = fixture.compare(&fixture.gpu(gpu).unwrap(), &fixture.reference());
            assert!(comparison.cases > 0);
            assert_eq!(comparison.failures, 0, "{k}/{v}, {variant}: {comparison:?}");
            ran += 1;
        }
    }
    println!("{test}: {ran} variants ran, {missing} need features that the adapter lacks");
    assert!(ran > 0);
}

#[test]
fn every_cut_of_the_work_gives_the_same() {
    let test = "every_cut_of_the_work_gives_the_same";
    check_variants(&[("int4", "int4")], (2, 48, 32), false, cuts, test);
    check_variants(&[("f16", "int2c")], (1, 24, 32), true, cuts, test);
}

#[test]
fn every_arithmetic_and_reduction_stays_in_its_bound() {
    let test = "every_arithmetic_and_reduction_stays_in_its_bound";
    let sides = [
        ("f16", "f16"),
        ("fp8", "fp8"),
        ("int8", "int8"),
        ("int4", "int4"),
        ("int2", "int2"),
        ("fp4", "fp4"),
    ];
    check_variants(&sides, (2, 48, 32), false, kinds, test);
    // Heads that are no whole blocks of 16 channels.
    check_variants(
        &[("int2", "int8"), ("int8", "int4")],
        (1, 40, 32),
        true,
        kinds,
        test,
    );
}

#[test]
fn every_side_in_prefill_with_causal_queries() {
    for side in Side::all() {
        let tokens = side.layout.token_group().max(32);
        let lengths = [1, 7, tokens - 1, tokens, tokens + 1, 300];
        let test = "every_side_in_prefill_with_causal_queries";
        check_pair(
            pages(Pair::same(side), 2, 40, tokens),
            1,
            &lengths,
            37,
            true,
            test,
        );
    }
}

/// Every quantised element with every scale layout and type, named or not.
fn combinations() -> Vec<Side> {
    let layouts = [
        ScaleLayout::PerToken,
        ScaleLayout::PerBlock,
        ScaleLayout::PerTensor,
        ScaleLayout::PerChannel { group: 8 },
        ScaleLayout::PerChannel { group: 32 },
    ];
    let mut all = Vec::new();
    for element in ALL.into_iter().filter(|element| !element.info().plain) {
        for layout in layouts {
            for scale in SCALE_TYPES {
                if layout != ScaleLayout::PerTensor || scale == ScaleType::F32 {
                    all.push(Side {
                        element,
                        layout,
                        scale,
                    });
                }
            }
        }
    }
    all
}

#[test]
fn every_element_with_every_scale_layout_and_type() {
    let Some(gpu) = common::gpu("every_element_with_every_scale_layout_and_type") else {
        return;
    };
    let sides = combinations();
    assert_eq!(sides.len(), 5 * (4 * 3 + 1));
    for (i, &side) in sides.iter().enumerate() {
        let page = PageLayout::new(side, 2, 16, 32).unwrap();
        let rows = nasty_rows(64, 32, i as u64);
        let check = PageCheck {
            page,
            rows: &rows,
            tensor_scale: 0.0371,
        };
        assert_eq!(check.pack(gpu).unwrap(), Vec::<String>::new(), "packing {side}");
        assert_eq!(
            check.dequantize(gpu).unwrap(),
            Vec::<String>::new(),
            "unpacking {side}"
        );
        // Attention reads one of them as K and another as V.
        let pair = Pair {
            k: side,
            v: sides[(i * 7 + 3) % sides.len()],
        };
        let test = "every_element_with_every_scale_layout_and_type";
        let layout = pages(pair, 2, 16, 32);
        check_variant(layout, 1, &[1, 31, 33, 100], quick(&layout, 1), test);
    }
}

#[test]
fn head_dims_and_ratios_up_to_the_limits() {
    let shapes = [
        (1, 256, 1),
        (1, 256, 16),
        (2, 192, 5),
        (1, 80, 7),
        (3, 96, 2),
        (1, 112, 6),
        (2, 128, 12),
    ];
    for (heads, head_dim, ratio) in shapes {
        let pair = "int4c/int8".parse().unwrap();
        let test = "head_dims_and_ratios_up_to_the_limits";
        check_pair(
            pages(pair, heads, head_dim, 32),
            ratio,
            &lengths(32),
            1,
            false,
            test,
        );
    }
}

#[test]
fn k_and_v_head_dims_may_differ() {
    for (k_dim, v_dim) in [(192, 128), (8, 64), (64, 8)] {
        let k = PageLayout::new("int8".parse().unwrap(), 2, k_dim, 64).unwrap();
        let v = PageLayout::new("int4".parse().unwrap(), 2, v_dim, 64).unwrap();
        check_pair([k, v], 2, &lengths(64), 3, true, "k_and_v_head_dims_may_differ");
    }
}

#[test]
fn pages_from_8_to_512_tokens() {
    for tokens in [8, 24, 40, 512] {
        check_pair(
            pages("int4/fp8".parse().unwrap(), 2, 16, tokens),
            2,
            &[1, 5, 100, 700],
            1,
            false,
            "pages",
        );
    }
}

#[test]
fn a_wrong_answer_or_nan_is_beyond_the_bound() {
    let layout = pages("int8".parse().unwrap(), 1, 16, 32);
    let sequences = random_sequences(&layout, 1, &[40], 1);
    let fixture = Fixture::new(layout, 1, &sequences, 32, false).unwrap();
    let right = fixture.reference();
    assert_eq!(fixture.compare(&right, &right).failures, 0);
    for wrong in [f64::NAN, right.output[3] + 1e-3] {
        let mut bad = right.clone();
        bad.output[3] = wrong;
        assert_eq!(fixture.compare(&bad, &right).failures, 1);
    }
    let mut bad = right.clone();
    bad.output[3] = f64::NAN;
    assert_eq!(
        fixture.compare(&right, &bad).failures,
        1,
        "the reference's own NaN fails too"
    );
    assert_eq!(
        fixture.compare(&bad, &bad).failures,
        1,
        "NaN on both sides is no agreement"
    );
    let mut bad = right.clone();
    bad.lse[0] = f64::INFINITY;
    assert_eq!(fixture.compare(&bad, &right).failures, 1);
}

/// One f32 sequence, answered by the reference and, where there is one, by the GPU.
fn answers(
    heads: u32,
    head_dim: u32,
    tokens: u32,
    ratio: u32,
    sequence: SequenceInput,
    scale: f32,
    test: &str,
) -> Vec<Outputs> {
    let layout = pages(Pair::same(Side::F32), heads, head_dim, tokens);
    let mut fixture = Fixture::new(layout, heads * ratio, &[sequence], tokens, false).unwrap();
    fixture.options.scale = Some(scale);
    both(&fixture, test)
}

/// The reference's answer and, where there is a GPU, its.
fn both(fixture: &Fixture, test: &str) -> Vec<Outputs> {
    let mut answers = vec![fixture.reference()];
    answers.extend(common::gpu(test).map(|gpu| fixture.gpu(gpu).unwrap()));
    answers
}

/// One head of 8 channels: keys whose scores are as given under a scale of 1, and values the same in every channel.
fn scored(scores: &[f32], values: &[f32]) -> SequenceInput {
    let mut q = vec![0.0; 8];
    q[0] = 1.0;
    SequenceInput {
        k: scores
            .iter()
            .flat_map(|&s| [s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
            .collect(),
        v: values.iter().flat_map(|&v| [v; 8]).collect(),
        q,
    }
}

/// The pages that most of the cases below share, so that few kernels are compiled.
fn small_pages() -> [PageLayout; 2] {
    pages(Pair::same(Side::F32), 1, 8, 8)
}

fn scored_fixture(scores: &[f32], values: &[f32], options: AttentionOptions<Vec<f32>>) -> Fixture {
    let mut fixture = Fixture::new(small_pages(), 1, &[scored(scores, values)], 8, false).unwrap();
    fixture.options = options;
    fixture.options.scale.get_or_insert(1.0);
    fixture
}

#[test]
fn num_16_products_beyond_the_range_of_f16() {
    // q.K is 73728 for the first token and -73728 for the second: f16 would give Inf - Inf.
    let k = [vec![24.0; 128], vec![-24.0; 128]].concat();
    let v = [vec![1.0; 128], vec![2.0; 128]].concat();
    let sequence = SequenceInput {
        k,
        v,
        q: vec![24.0; 128],
    };
    for answer in answers(1, 128, 8, 1, sequence, 1.0, "num_16") {
        assert!(
            answer.output.iter().all(|&x| x == 1.0),
            "{:?}",
            &answer.output[..4]
        );
    }
}

#[test]
fn num_18_the_lowest_f32_is_a_score_like_any_other() {
    // Two keys whose scores are both the lowest f32: equal weights.
    let mut k = vec![0.0; 16];
    (k[0], k[8]) = (f32::MIN, f32::MIN);
    let v = [vec![1.0; 8], vec![3.0; 8]].concat();
    let mut q = vec![0.0; 8];
    q[0] = 1.0;
    for answer in answers(1, 8, 8, 1, SequenceInput { k, v, q }, 1.0, "num_18") {
        assert!(answer.output.iter().all(|&x| x == 2.0), "{:?}", answer.output);
    }
}

#[test]
fn msk_03_a_score_of_minus_60000_is_no_mask() {
    let mut k = vec![0.0; 8];
    k[0] = -60_000.0;
    let mut q = vec![0.0; 8];
    q[0] = 1.0;
    let sequence = SequenceInput {
        k,
        v: vec![3.0; 8],
        q,
    };
    for answer in answers(1, 8, 8, 1, sequence, 1.0, "msk_03") {
        assert!(answer.output.iter().all(|&x| x == 3.0));
    }
}

#[test]
fn shp_04_upper_half_of_the_head_counts() {
    // q and K are zero in dims 0..63; scores are 0 and 50.
    let mut k = vec![0.0; 256];
    k[128 + 64] = 50.0;
    let mut q = vec![0.0; 128];
    q[64] = 1.0;
    let v = [vec![0.0; 128], vec![1.0; 128]].concat();
    for answer in answers(1, 128, 8, 1, SequenceInput { k, v, q }, 1.0, "shp_04") {
        assert!(answer.output.iter().all(|&x| (x - 1.0).abs() < 1e-6));
    }
}

#[test]
fn shp_06_query_head_reads_kv_head_of_its_group() {
    for (q_heads, kv_heads) in [
        (15, 5),
        (25, 5),
        (28, 4),
        (8, 8),
        (16, 2),
        // Head tiles of unequal size; other tests have the ratios 2, 4, 6, 12 and 16.
        (11, 1),
        (15, 1),
    ] {
        let row: Vec<f32> = (0..kv_heads).flat_map(|head| vec![head as f32; 8]).collect();
        let sequence = SequenceInput {
            k: row.clone(),
            v: row,
            q: vec![0.0; q_heads as usize * 8],
        };
        for answer in answers(kv_heads, 8, 8, q_heads / kv_heads, sequence, 1.0, "shp_06") {
            for (i, row) in answer.output.chunks(8).enumerate() {
                let wanted = f64::from(i as u32 / (q_heads / kv_heads));
                assert!(
                    row.iter().all(|&x| x == wanted),
                    "query head {i} of {q_heads}/{kv_heads}: {row:?}"
                );
            }
        }
    }
}

#[test]
fn shp_12_dead_slots_hold_nan_and_are_never_used() {
    // Every fixture poisons dead slots with codes and scales of all ones: NaN for f16, f32 and FP8.
    for name in ["f32", "f16", "fp8", "int8", "fp4", "int4c(8)"] {
        let layout = pages(name.parse().unwrap(), 2, 8, 16);
        // 6 is exact in every format but the f16 scales of INT8 and INT4.
        let rows = vec![6.0; 13 * 16];
        let sequence = SequenceInput {
            k: rows.clone(),
            v: rows,
            q: vec![0.5; 16],
        };
        let fixture = Fixture::new(layout, 2, &[sequence], 16, false).unwrap();
        let mut answers = vec![fixture.reference()];
        answers.extend(common::gpu("shp_12").map(|gpu| fixture.gpu(gpu).unwrap()));
        for answer in answers {
            assert!(
                answer.output.iter().all(|&x| (x - 6.0).abs() < 6e-3),
                "{name}: {:?}",
                answer.output
            );
        }
    }
}

#[test]
fn lng_08_no_remainder_is_dropped_and_empty_splits_are_harmless() {
    // 1000 tokens, scores 0 but for the last, 20; values 0 but for the last, 1.
    let mut k = vec![0.0; 8000];
    k[7992] = 20.0;
    let mut v = vec![0.0; 8000];
    v[7992..].fill(1.0);
    let mut q = vec![0.0; 8];
    q[0] = 1.0;
    for answer in answers(1, 8, 8, 1, SequenceInput { k, v, q }, 1.0, "lng_08") {
        assert!(
            answer.output.iter().all(|&x| (x - 0.999_997_941).abs() < 1e-6),
            "{:?}",
            answer.output
        );
    }
}

#[test]
fn shp_10_an_empty_row_gives_zeros_and_minus_infinity() {
    let sequence = SequenceInput {
        q: vec![1.0; 8],
        ..SequenceInput::default()
    };
    for answer in answers(1, 8, 8, 1, sequence, 1.0, "shp_10") {
        assert_eq!(answer.output, vec![0.0; 8]);
        assert_eq!(answer.lse, [f64::NEG_INFINITY]);
    }
}

#[test]
fn ben_12_nan_and_overflow_in_attention_are_seen_and_never_pass() {
    let layout = pages("fp8".parse().unwrap(), 1, 8, 8);
    let rows: Vec<f32> = (0..20 * 8).map(|i| 1.0 + (i % 5) as f32).collect();
    let good = SequenceInput {
        k: rows.clone(),
        v: rows,
        q: vec![0.5; 8],
    };
    let fixture = |sequence: SequenceInput| Fixture::new(layout, 1, &[sequence], 8, false).unwrap();
    let fails = |name: &str, fixture: &Fixture| {
        let reference = fixture.reference();
        let mut answers = vec![("reference", reference.clone())];
        answers.extend(common::gpu("ben_12").map(|gpu| ("GPU", fixture.gpu(gpu).unwrap())));
        for (who, answer) in answers {
            let nan = answer.output.iter().filter(|x| x.is_nan()).count();
            assert!(nan > 0, "{name}: the {who} hides it: {:?}", answer.output);
            assert!(fixture.compare(&answer, &reference).failures > 0, "{name}: {who}");
        }
    };
    // scl_13: a NaN code (7F) written into a live slot of K, then of V.
    let code = |slot: u32, channel: u32| {
        let (word, bit) = layout[0].code_at(slot, 0, channel);
        (word as usize, 0x7f_u32 << bit)
    };
    let mut bad = fixture(good.clone());
    let (word, ones) = code(3, 2);
    let page = bad.table[1].k_page as usize * layout[0].words as usize;
    bad.k_pages[page + word] |= ones;
    fails("NaN code in K", &bad);
    bad.options.softcap = Some(5.0);
    fails("NaN code in K under a soft cap", &bad);
    let mut bad = fixture(good.clone());
    let page = bad.table[1].v_page as usize * layout[1].words as usize;
    bad.v_pages[page + word] |= ones;
    fails("NaN code in V", &bad);
    for q in [f32::NAN, f32::INFINITY] {
        fails(
            "q",
            &fixture(SequenceInput {
                q: vec![q; 8],
                ..good.clone()
            }),
        );
    }
    // Scores beyond f32: the GPU's answer is not the reference's, and that is seen.
    if let Some(gpu) = common::gpu("ben_12") {
        let bad = fixture(SequenceInput {
            q: vec![3e38; 8],
            ..good
        });
        assert!(bad.compare(&bad.gpu(gpu).unwrap(), &bad.reference()).failures > 0);
    }
}

#[test]
fn a_nan_stays_the_worst_of_a_comparison() {
    let mut comparison = Comparison::default();
    for error in [f64::NAN, 0.1, 0.05] {
        comparison.judge(error, 1.0);
    }
    assert!(comparison.share().is_nan());
    assert_eq!((comparison.cases, comparison.failures), (3, 1));
}

#[test]
fn splits_are_whole_pages() {
    let layout = pages("int8".parse().unwrap(), 1, 8, 16);
    for split in [0, 8, 24] {
        let error = Fixture::new(layout, 1, &[SequenceInput::default()], split, false).unwrap_err();
        assert!(error.to_string().contains("split_tokens"), "{error}");
    }
}

#[test]
fn shp_03_no_channel_is_dropped_at_the_largest_head_dim() {
    for head_dim in [264, 320, 512, 576] {
        let refused = PageLayout::new(Side::F32, 1, head_dim, 8).unwrap_err();
        assert!(refused.to_string().contains("head_dim"), "{refused}");
    }
    let mut v = vec![0.0; 256];
    v[200] = 1.0;
    let sequence = SequenceInput {
        k: vec![0.5; 256],
        q: vec![1.0; 256],
        v: v.clone(),
    };
    for answer in answers(1, 256, 8, 1, sequence, 1.0, "shp_03") {
        let wanted: Vec<f64> = v.iter().map(|&x| f64::from(x)).collect();
        assert_eq!(answer.output, wanted);
    }
}

#[test]
fn shp_07_ratio_16_at_head_dim_256_equals_16_heads() {
    let pair: Pair = "int4c/int8".parse().unwrap();
    let one = pages(pair, 1, 256, 32);
    let sequences = random_sequences(&one, 16, &[0, 1, 33], 1);
    // The same rows in 16 KV heads, each with one query head.
    let heads: Vec<_> = sequences
        .iter()
        .map(|s| {
            let repeat = |rows: &[f32]| rows.chunks(256).flat_map(|row| row.repeat(16)).collect();
            SequenceInput {
                k: repeat(&s.k),
                v: repeat(&s.v),
                q: s.q.clone(),
            }
        })
        .collect();
    let shared = Fixture::new(one, 16, &sequences, 64, false).unwrap();
    let apart = Fixture::new(pages(pair, 16, 256, 32), 16, &heads, 64, false).unwrap();
    let wanted = apart.reference();
    for answer in both(&shared, "shp_07") {
        assert_eq!(shared.compare(&answer, &wanted).failures, 0);
    }
    if let Some(gpu) = common::gpu("shp_07") {
        assert_eq!(apart.compare(&apart.gpu(gpu).unwrap(), &wanted).failures, 0);
    }
}

#[test]
fn shp_09_lengths_around_a_page_of_16() {
    let layout = pages(Pair::same(Side::F32), 1, 8, 16);
    let lengths = [1, 15, 16, 17, 31, 32, 33];
    let sequences = lengths.map(|len: u32| {
        let values: Vec<f32> = (0..len).map(|t| t as f32).collect();
        scored(&vec![0.0; len as usize], &values)
    });
    let fixture = Fixture::new(layout, 1, &sequences, 16, false).unwrap();
    for answer in both(&fixture, "shp_09") {
        for (len, row) in lengths.iter().zip(answer.output.chunks(8)) {
            let mean = f64::from(len - 1) / 2.0;
            assert!(
                row.iter().all(|x| (x - mean).abs() <= 1e-6 * mean),
                "{len} tokens: {row:?}"
            );
        }
    }
    // A cache counts its tokens itself; rows that disagree with the count are refused.
    let Some(gpu) = common::gpu("shp_09") else { return };
    let mut cache = KvCache::new(gpu, small_spec(2)).unwrap();
    let id = cache.open();
    let step = cache.step(&[(id, 17)]).unwrap();
    let [few, enough] = [16, 17].map(|rows| gpu.upload("rows", &vec![0.0_f32; rows * 16]).unwrap());
    gpu.submit("shp_09", |encoder| {
        for [k, v] in [[&few, &enough], [&enough, &few]] {
            let refused = step.append(encoder, 0, k, v).unwrap_err();
            assert!(refused.to_string().contains("1088 bytes"), "{refused}");
        }
        for [q, output] in [[&few, &enough], [&enough, &few]] {
            let options = AttentionOptions::default();
            let refused = step.attend(encoder, 0, q, output, &options).unwrap_err();
            assert!(refused.to_string().contains("1088 bytes"), "{refused}");
        }
        Ok(())
    })
    .unwrap();
}

/// A cache of f32 pages of 16 tokens, two heads of 8 channels.
fn small_spec(pages: u32) -> CacheSpec {
    CacheSpec {
        page_tokens: 16,
        ..CacheSpec::new(1, 2, 2, 8, Pair::same(Side::F32), 0)
    }
    .with_pages(pages)
    .unwrap()
}

/// Runs sequences together and each alone: the rows must have the same bits.
fn together_as_alone(sequences: &[SequenceInput], test: &str) -> Vec<Outputs> {
    let layout = pages(Pair::same(Side::F32), 2, 8, 16);
    let run = |some: &[SequenceInput]| {
        let fixture = Fixture::new(layout, 2, some, 32, false).unwrap();
        both(&fixture, test)
    };
    let all = run(sequences);
    for (place, sequence) in sequences.iter().enumerate() {
        for (all, alone) in all.iter().zip(run(std::slice::from_ref(sequence))) {
            assert_eq!(all.output[place * 16..][..16], alone.output, "sequence {place}");
            assert_eq!(all.lse[place * 2..][..2], alone.lse, "sequence {place}");
        }
    }
    all
}

#[test]
fn shp_10_an_empty_row_among_others_changes_none() {
    let layout = pages(Pair::same(Side::F32), 2, 8, 16);
    let sequences = random_sequences(&layout, 2, &[0, 1, 16, 17], 1);
    for answer in together_as_alone(&sequences, "shp_10") {
        assert_eq!(answer.output[..16], [0.0; 16]);
        assert_eq!(answer.lse[..2], [f64::NEG_INFINITY; 2]);
    }
}

#[test]
fn shp_11_two_equal_sequences_of_one_token() {
    let layout = pages(Pair::same(Side::F32), 2, 8, 16);
    let one = random_sequences(&layout, 2, &[1], 1).remove(0);
    let sequences = [one.clone(), one];
    for answer in together_as_alone(&sequences, "shp_11") {
        assert_eq!(answer.output[..16], answer.output[16..]);
        assert!(answer.output.iter().all(|&x| x != 0.0));
    }
}

#[test]
fn shp_14_rows_do_not_depend_on_the_batch_or_its_order() {
    let layout = pages(Pair::same(Side::F32), 2, 8, 16);
    let sequences = random_sequences(&layout, 2, &[1, 17, 300], 1);
    for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
        together_as_alone(&order.map(|i| sequences[i].clone()), "shp_14");
    }
}

// ---- masks, soft cap, sinks --------------------------------------------------------------------------------------

/// Attention over f32 rows in f64, from the definition; outputs and LSE of one sequence, its queries at its end.
fn from_the_definition(
    [k, v]: [&PageLayout; 2],
    q_heads: u32,
    sequence: &SequenceInput,
    options: &AttentionOptions<Vec<f32>>,
) -> Outputs {
    let (k_dim, v_dim) = (k.head_dim as usize, v.head_dim as usize);
    let (q_heads, kv_heads) = (q_heads as usize, k.heads as usize);
    let len = sequence.k.len() / (kv_heads * k_dim);
    let queries = sequence.q.len() / (q_heads * k_dim);
    let scale = options.scale.map_or(1.0 / (k_dim as f64).sqrt(), f64::from);
    let mut outputs = Outputs::default();
    for query in 0..queries {
        for head in 0..q_heads {
            let q = &sequence.q[(query * q_heads + head) * k_dim..][..k_dim];
            let at = |token: usize, dim: usize| (token * kv_heads + head / (q_heads / kv_heads)) * dim;
            let mut weights = Vec::new();
            for token in 0..len {
                // How many positions the query is ahead of the token; fewer than 0 where it is behind.
                let ahead = (len - queries + query) as i64 - token as i64;
                if options.causal && ahead < 0 || options.window.is_some_and(|w| ahead >= i64::from(w)) {
                    continue;
                }
                let key = &sequence.k[at(token, k_dim)..][..k_dim];
                let dot: f64 = q
                    .iter()
                    .zip(key)
                    .map(|(&a, &b)| f64::from(a) * f64::from(b))
                    .sum();
                let score = match options.softcap.map(f64::from) {
                    Some(cap) => cap * (dot * scale / cap).tanh(),
                    None => dot * scale,
                };
                weights.push((token, score.exp()));
            }
            let sink = options
                .sinks
                .as_ref()
                .map_or(0.0, |sinks| f64::from(sinks[head]).exp());
            let sum = sink + weights.iter().map(|(_, weight)| weight).sum::<f64>();
            outputs.lse.push(sum.ln());
            outputs.output.extend((0..v_dim).map(|c| {
                let value = |token: usize| f64::from(sequence.v[at(token, v_dim) + c]);
                let weighted: f64 = weights.iter().map(|&(token, weight)| weight * value(token)).sum();
                if sum == 0.0 { 0.0 } else { weighted / sum }
            }));
        }
    }
    outputs
}

fn is_close(got: &Outputs, wanted: &Outputs, tolerance: f64, what: &str) {
    let numbers = got.output.iter().chain(&got.lse);
    for (i, (a, b)) in numbers.zip(wanted.output.iter().chain(&wanted.lse)).enumerate() {
        assert!(
            a == b || (a - b).abs() <= tolerance * (1.0 + b.abs()),
            "{what}, number {i}: {a} for {b}"
        );
    }
    assert_eq!(got.output.len(), wanted.output.len());
    assert_eq!(got.lse.len(), wanted.lse.len());
}

/// Options of every kind, apart and together. The windows are smaller than a page of 8, a page, and beyond a split.
fn kinds_of_options(q_heads: u32) -> Vec<AttentionOptions<Vec<f32>>> {
    let plain = AttentionOptions::default;
    let mut all = vec![plain()];
    for window in [1, 3, 7, 8, 9, 20, 1000, u32::MAX] {
        all.push(AttentionOptions {
            window: Some(window),
            ..plain()
        });
    }
    for (causal, window) in [(false, None), (false, Some(1)), (false, Some(11))] {
        all.push(AttentionOptions {
            causal,
            window,
            ..plain()
        });
    }
    for softcap in [0.5, 5.0, 50.0] {
        all.push(AttentionOptions {
            softcap: Some(softcap),
            ..plain()
        });
    }
    for scale in [-0.25, 0.0, 1.0] {
        all.push(AttentionOptions {
            scale: Some(scale),
            ..plain()
        });
    }
    let sinks: Vec<f32> = (0..q_heads).map(|head| head as f32 * 2.0 - 5.0).collect();
    all.push(AttentionOptions {
        sinks: Some(sinks.clone()),
        ..plain()
    });
    all.push(AttentionOptions {
        causal: true,
        window: Some(12),
        softcap: Some(10.0),
        scale: Some(0.7),
        sinks: Some(sinks),
    });
    all
}

#[test]
fn options_against_the_definition_in_decode_and_prefill() {
    let layout = pages(Pair::same(Side::F32), 2, 8, 8);
    let lengths = [0, 1, 7, 8, 9, 40];
    for (queries, prefill) in [(1, false), (9, true)] {
        let sequences = random_sequences(&layout, 6, &lengths, queries);
        let mut fixture = Fixture::new(layout, 6, &sequences, 16, prefill).unwrap();
        for options in kinds_of_options(6) {
            let what = format!("prefill {prefill}, {options:?}");
            let mut wanted = Outputs::default();
            for sequence in &sequences {
                let one = from_the_definition([&layout[0], &layout[1]], 6, sequence, &options);
                wanted.output.extend(one.output);
                wanted.lse.extend(one.lse);
            }
            fixture.options = options;
            is_close(&fixture.reference(), &wanted, 1e-12, &what);
            let Some(gpu) = common::gpu("options") else {
                continue;
            };
            let comparison = fixture.compare(&fixture.gpu(gpu).unwrap(), &wanted);
            assert_eq!(comparison.failures, 0, "{what}: {comparison:?}");
        }
    }
}

#[test]
fn options_with_packed_pages_and_f16() {
    let test = "options_with_packed_pages_and_f16";
    let Some(gpu) = common::gpu(test) else { return };
    let layout = pages("int4c/fp4".parse().unwrap(), 2, 16, 32);
    let sequences = random_sequences(&layout, 6, &[0, 1, 31, 33, 200], 3);
    let mut fixture = Fixture::new(layout, 6, &sequences, 64, false).unwrap();
    (fixture.q_float, fixture.output_float) = (FloatType::F16, FloatType::F16);
    for options in kinds_of_options(6) {
        fixture.options = options;
        let comparison = fixture.compare(&fixture.gpu(gpu).unwrap(), &fixture.reference());
        assert_eq!(comparison.failures, 0, "{:?}: {comparison:?}", fixture.options);
    }
    // The comparator sees a wrong window.
    fixture.options.window = Some(5);
    let got = fixture.gpu(gpu).unwrap();
    fixture.options.window = Some(6);
    assert!(fixture.compare(&got, &fixture.reference()).failures > 0);
}

#[test]
fn msk_01_a_row_without_a_key_gives_zeros() {
    // A query so far ahead that its window holds no key.
    let options = AttentionOptions {
        window: Some(8),
        ..AttentionOptions::default()
    };
    let mut outside = scored_fixture(&[1.0; 20], &[1.0; 20], options);
    for item in &mut outside.items {
        item.query_position = 27;
    }
    // Pages of which no slot is live.
    let mut padding = scored_fixture(&[1.0; 20], &[1.0; 20], AttentionOptions::default());
    for entry in &mut padding.table {
        entry.last = entry.first;
    }
    for fixture in [&outside, &padding] {
        for answer in both(fixture, "msk_01") {
            assert_eq!(answer.output, [0.0; 8]);
            assert_eq!(answer.lse, [f64::NEG_INFINITY]);
        }
    }
    // One position nearer, and the last key is seen.
    for item in &mut outside.items {
        item.query_position = 26;
    }
    for answer in both(&outside, "msk_01") {
        assert_eq!(answer.output, [1.0; 8]);
    }
}

#[test]
fn msk_04_the_first_tile_is_masked_by_the_window() {
    let values: Vec<f32> = (0..700).map(|t| t as f32).collect();
    let options = AttentionOptions {
        window: Some(61),
        ..AttentionOptions::default()
    };
    for split in [512, 704, 8] {
        let sequence = scored(&[0.0; 700], &values);
        let mut fixture = Fixture::new(small_pages(), 1, &[sequence], split, false).unwrap();
        fixture.options = options.clone();
        // Positions 515 to 575.
        for item in &mut fixture.items {
            item.query_position = 575;
        }
        for answer in both(&fixture, "msk_04") {
            assert!(
                answer.output.iter().all(|x| (x - 545.0).abs() < 1e-3),
                "{:?}",
                answer.output
            );
        }
    }
}

#[test]
fn msk_06_the_soft_cap_is_applied() {
    let softcap = |cap: Option<f32>| AttentionOptions {
        softcap: cap,
        ..AttentionOptions::default()
    };
    for (scores, cap, wanted) in [
        ([100.0, 90.0], Some(50.0), 0.7029),
        ([100.0, 90.0], None, 0.999_95),
        // Arguments of tanh that overflow exp: both scores are at the cap.
        ([1e30, 3e38], Some(50.0), 0.5),
        ([-1e30, -3e38], Some(1e-3), 0.5),
        ([1e30, -1e30], Some(50.0), 1.0),
        ([100.0, 90.0], Some(1e30), 0.999_95),
    ] {
        let fixture = scored_fixture(&scores, &[1.0, 0.0], softcap(cap));
        for answer in both(&fixture, "msk_06") {
            assert!(
                answer.output.iter().all(|x| (x - wanted).abs() < 5e-5),
                "{scores:?}, cap {cap:?}: {:?}",
                answer.output
            );
        }
    }
}

/// Divides a fixture's one page of `live` tokens and one query into splits of equal length; the last ones may be empty.
fn divide(fixture: &mut Fixture, live: u32, splits: u32) {
    let (entry, item) = (fixture.table[0], fixture.items[0]);
    let each = live.div_ceil(splits);
    let slot = |split: u32| (split * each).min(live);
    fixture.table = (0..splits)
        .map(|split| TableEntry {
            first: slot(split),
            last: slot(split + 1),
            ..entry
        })
        .collect();
    fixture.items = (0..splits)
        .map(|split| WorkItem {
            table: split,
            partial: split * fixture.q_heads,
            ..item
        })
        .collect();
    fixture.merges[0].count = splits;
    fixture.partials = splits * fixture.q_heads;
}

#[test]
fn msk_08_a_sink_counts_once_in_any_number_of_splits() {
    let options = AttentionOptions {
        sinks: Some(vec![0.0]),
        ..AttentionOptions::default()
    };
    for splits in [1, 2, 4, 7] {
        let mut fixture = scored_fixture(&[0.0; 4], &[1.0; 4], options.clone());
        divide(&mut fixture, 4, splits);
        for answer in both(&fixture, "msk_08") {
            assert!(
                answer.output.iter().all(|x| (x - 0.8).abs() < 1e-6),
                "{splits} splits: {:?}",
                answer.output
            );
            assert!((answer.lse[0] - 5.0_f64.ln()).abs() < 1e-6);
        }
    }
}

#[test]
fn msk_09_sinks_without_keys_are_neither_scaled_nor_capped() {
    let sinks = |sink: f32| AttentionOptions {
        sinks: Some(vec![sink]),
        softcap: Some(0.5),
        ..AttentionOptions::default()
    };
    // No key: zeros, and the sink is all that the LSE has.
    for sink in [0.0, 2.0, -80.0] {
        let mut fixture = scored_fixture(&[], &[], sinks(sink));
        for answer in both(&fixture, "msk_09") {
            assert_eq!(answer.output, [0.0; 8]);
            assert!((answer.lse[0] - f64::from(sink)).abs() < 1e-6 * (1.0 + f64::from(sink.abs())));
        }
        // Nor with splits that are empty.
        fixture = scored_fixture(&[1.0; 4], &[1.0; 4], sinks(sink));
        divide(&mut fixture, 0, 3);
        for answer in both(&fixture, "msk_09") {
            assert_eq!(answer.output, [0.0; 8]);
        }
    }
    // Four scores of 0 and a sink of ln 3, under the usual scale of d = 64.
    let layout = pages(Pair::same(Side::F32), 1, 64, 8);
    let sequence = SequenceInput {
        k: vec![0.0; 256],
        v: vec![1.0; 256],
        q: vec![1.0; 64],
    };
    let mut fixture = Fixture::new(layout, 1, &[sequence], 8, false).unwrap();
    fixture.options = sinks(3.0_f32.ln());
    for answer in both(&fixture, "msk_09") {
        assert!(
            answer.output.iter().all(|x| (x - 4.0 / 7.0).abs() < 1e-6),
            "{:?}",
            answer.output
        );
        assert!((answer.lse[0] - 7.0_f64.ln()).abs() < 1e-6);
    }
}

// ---- f16 ---------------------------------------------------------------------------------------------------------

#[test]
fn outputs_in_f16_are_the_f32_outputs_rounded_once() {
    let Some(gpu) = common::gpu("outputs_in_f16_are_the_f32_outputs_rounded_once") else {
        return;
    };
    let mut random = Random::new(16);
    // Ties, both sides of them, subnormals of f16, the largest, what rounds beyond it, and any f32 that is normal.
    let mut numbers = vec![
        0.0,
        -0.0,
        1.0,
        1.0 + 2.0_f32.powi(-11),
        (1.0 + 2.0_f32.powi(-11)).next_up(),
        (1.0 + 2.0_f32.powi(-11)).next_down(),
        1.0 + 3.0 * 2.0_f32.powi(-11),
        65504.0,
        65519.996,
        65520.0,
        -65520.0,
        1e30,
        2.0_f32.powi(-25),
        2.0_f32.powi(-25).next_up(),
        3.0 * 2.0_f32.powi(-25),
        -(2.0_f32.powi(-14)).next_down(),
        f32::INFINITY,
        f32::NAN,
    ];
    numbers.extend((0..4078).map(|_| {
        let bits = random.bits() as u32;
        f32::from_bits(bits & 0x87ff_ffff | (96 + random.below(48)) << 23)
    }));
    let rows = numbers.len() as u32 / 8;
    let merges: Vec<_> = (0..rows)
        .map(|row| Merge {
            first: row,
            stride: 1,
            count: 1,
            row,
        })
        .collect();
    let merges = gpu.upload("merges", &merges).unwrap();
    let partial_o = gpu.upload("partials", &numbers).unwrap();
    let partial_ml = gpu
        .upload("partial sums", &[0.0_f32, 1.0].repeat(rows as usize))
        .unwrap();
    let run = |float: FloatType| {
        let merge = AttentionMerge::plan(gpu, 1, 8, float).unwrap();
        let output = gpu.zeros("output", numbers.len() as u64 * 4).unwrap();
        gpu.submit("merge", |encoder| {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            let buffers = [&merges, &partial_o, &partial_ml, &output];
            merge.encode(gpu, &mut pass, buffers, None, None, rows)
        })
        .unwrap();
        output
    };
    let wide: Vec<f32> = gpu.read("f32", &run(FloatType::F32), numbers.len()).unwrap();
    let narrow: Vec<f16> = gpu
        .read::<u16>("f16", &run(FloatType::F16), numbers.len())
        .unwrap()
        .into_iter()
        .map(f16::from_bits)
        .collect();
    for (x, h) in wide.iter().zip(narrow) {
        let wanted = f16::from_f32(*x);
        assert!(
            h.to_bits() == wanted.to_bits() || h.is_nan() && x.is_nan(),
            "{x:e}: {h:?} for {wanted:?}"
        );
    }
    assert_eq!(
        (wide[3], wide[11]),
        (numbers[3], numbers[11]),
        "the merge changed nothing"
    );

    // And of a whole attention.
    let layout = pages("int8".parse().unwrap(), 2, 16, 32);
    let sequences = random_sequences(&layout, 2, &[0, 1, 40, 100], 1);
    let mut fixture = Fixture::new(layout, 2, &sequences, 32, false).unwrap();
    let wide = fixture.gpu(gpu).unwrap();
    fixture.output_float = FloatType::F16;
    let narrow = fixture.gpu(gpu).unwrap();
    let rounded: Vec<_> = wide
        .output
        .iter()
        .map(|&x| f16::from_f32(x as f32).to_f64())
        .collect();
    assert_eq!(narrow.output, rounded);
    assert_eq!(narrow.lse, wide.lse);
}

#[test]
fn queries_in_f16_are_read_as_they_are() {
    let Some(gpu) = common::gpu("queries_in_f16_are_read_as_they_are") else {
        return;
    };
    let layout = pages("int8".parse().unwrap(), 2, 16, 32);
    let sequences = random_sequences(&layout, 2, &[1, 40, 100], 1);
    let mut fixture = Fixture::new(layout, 2, &sequences, 32, false).unwrap();
    // Numbers of f16, subnormal ones among them.
    for (i, x) in fixture.q.iter_mut().enumerate() {
        *x = f16::from_f32(if i % 5 == 0 { *x * 1e-5 } else { *x }).to_f32();
    }
    let wide = fixture.gpu(gpu).unwrap();
    fixture.q_float = FloatType::F16;
    let narrow = fixture.gpu(gpu).unwrap();
    assert_eq!((wide.output, wide.lse), (narrow.output, narrow.lse));
}

// ---- the cache ---------------------------------------------------------------------------------------------------

#[test]
fn a_cache_skips_splits_outside_the_window() {
    let spec = small_spec(64);
    let layout = pages(spec.layers[0].pair, 2, 8, 16);
    let sequence = &random_sequences(&layout, 2, &[701], 701)[0];
    let mut reference = ReferenceCache::new(spec.clone()).unwrap();
    let id = reference.book_mut().open();
    let gpu = common::gpu("a_cache_skips_splits_outside_the_window");
    let mut cache = gpu.map(|gpu| KvCache::new(gpu, spec.clone()).unwrap());
    let our = cache.as_mut().map(|cache| cache.open());
    let mut done = 0;
    // Splits of 512 tokens: two in the end. Prefill, then one token.
    for new in [700, 1] {
        let rows = |all: &[f32]| all[done * 16..(done + new) * 16].to_vec();
        let (k, v, q) = (rows(&sequence.k), rows(&sequence.v), rows(&sequence.q));
        done += new;
        let seen = SequenceInput {
            k: sequence.k[..done * 16].to_vec(),
            v: sequence.v[..done * 16].to_vec(),
            q: q.clone(),
        };
        let plan = reference.book_mut().plan(&[(id, new as u32)], 1).unwrap();
        reference.append(&plan, 0, &k, &v).unwrap();
        let items = |options: &AttentionOptions<Vec<f32>>| {
            let waves = plan.attention(0, options.reach()).unwrap().waves;
            assert_eq!(waves.iter().map(|wave| wave.merges.len()).sum::<usize>(), new);
            let segments = waves.iter().flat_map(|wave| wave.segments.values());
            segments.map(Vec::len).sum::<usize>()
        };
        let numbers = |window, causal| AttentionOptions {
            window,
            causal,
            sinks: Some(vec![1.0, -1.0]),
            ..AttentionOptions::default()
        };
        let step = cache
            .as_mut()
            .zip(our)
            .map(|(cache, our)| cache.step(&[(our, new as u32)]).unwrap());
        let buffers = gpu.map(|gpu| [&k, &v, &q].map(|rows| gpu.upload("rows", rows).unwrap()));
        if let (Some(gpu), Some(step), Some([k, v, _])) = (gpu, &step, &buffers) {
            gpu.submit("append", |encoder| step.append(encoder, 0, k, v))
                .unwrap();
        }
        // Work items: (of the prefill, of the one token).
        for (window, causal, wanted) in [
            (None, true, (700 + 188, 2)),
            (Some(1), true, (700, 1)),
            (Some(30), true, (700 + 29, 1)),
            // The last token still sees position 511 through a window of 190.
            (Some(190), true, (700 + 188, 2)),
            (Some(189), true, (700 + 188, 1)),
            (Some(600), true, (700 + 188, 2)),
            (None, false, (1400, 2)),
            (Some(30), false, (700 + 512 + 29, 1)),
        ] {
            let options = numbers(window, causal);
            let what = format!("{new} tokens, {options:?}");
            assert_eq!(
                items(&options),
                if new == 1 { wanted.1 } else { wanted.0 },
                "{what}"
            );
            let wanted = from_the_definition([&layout[0], &layout[1]], 2, &seen, &options);
            let q: Vec<f64> = q.iter().map(|&x| f64::from(x)).collect();
            let (output, lse) = reference
                .attend(&plan, 0, &q, &options.map_sinks(Vec::as_slice))
                .unwrap();
            is_close(&Outputs { output, lse }, &wanted, 1e-12, &what);
            let (Some(gpu), Some(step), Some([_, _, q])) = (gpu, &step, &buffers) else {
                continue;
            };
            let sinks = gpu.upload("sinks", options.sinks.as_ref().unwrap()).unwrap();
            let [output, lse] = [16, 2].map(|row| gpu.upload("output", &vec![f32::NAN; new * row]).unwrap());
            gpu.submit("attend", |encoder| {
                let outputs = kernels::Outputs::from(&output).with_lse(&lse);
                step.attend(encoder, 0, q, outputs, &options.map_sinks(|_| &sinks))
            })
            .unwrap();
            let read = |buffer, count| -> Vec<f64> {
                let numbers: Vec<f32> = gpu.read("numbers", buffer, count).unwrap();
                numbers.into_iter().map(f64::from).collect()
            };
            let got = Outputs {
                output: read(&output, new * 16),
                lse: read(&lse, new * 2),
            };
            // Scores up to 40 in f32, and exp of a software driver.
            is_close(&got, &wanted, 3e-5, &what);
        }
        reference.book_mut().commit(plan).unwrap();
        if let Some(step) = step {
            step.commit().unwrap();
        }
    }
}

#[test]
fn a_step_takes_f16_and_refuses_what_makes_no_sense() {
    let Some(gpu) = common::gpu("a_step_takes_f16_and_refuses_what_makes_no_sense") else {
        return;
    };
    let mut cache = KvCache::new(gpu, small_spec(2)).unwrap();
    let id = cache.open();
    let step = cache.step(&[(id, 1)]).unwrap();
    let rows: Vec<f32> = (0..16).map(|i| i as f32 * 0.25 - 2.0).collect();
    let kv = gpu.upload("rows", &rows).unwrap();
    let halves: Vec<u16> = rows.iter().map(|&x| f16::from_f32(x).to_bits()).collect();
    let q = gpu.upload("q", &halves).unwrap();
    let few = gpu.upload("q", &halves[..8]).unwrap();
    let output = gpu.zeros("output", 32).unwrap();
    let one_sink = gpu.device().create_buffer(&kvpack::wgpu::BufferDescriptor {
        label: None,
        size: 4,
        usage: kvpack::wgpu::BufferUsages::STORAGE,
        mapped_at_creation: false,
    });
    let plain = AttentionOptions::<&kvpack::wgpu::Buffer>::default();
    gpu.submit("f16", |encoder| {
        step.append(encoder, 0, &kv, &kv)?;
        for (options, part) in [
            (
                AttentionOptions {
                    window: Some(0),
                    ..plain
                },
                "window of 0",
            ),
            (
                AttentionOptions {
                    softcap: Some(0.0),
                    ..plain
                },
                "soft cap",
            ),
            (
                AttentionOptions {
                    softcap: Some(f32::NAN),
                    ..plain
                },
                "soft cap",
            ),
            (
                AttentionOptions {
                    scale: Some(f32::INFINITY),
                    ..plain
                },
                "scale",
            ),
            (
                AttentionOptions {
                    sinks: Some(&one_sink),
                    ..plain
                },
                "8 bytes",
            ),
        ] {
            let refused = step
                .attend(
                    encoder,
                    0,
                    Rows::f16(&q),
                    kernels::Outputs::f16(&output),
                    &options,
                )
                .unwrap_err();
            assert!(refused.to_string().contains(part), "{refused}");
        }
        for (q, output, part) in [
            (Rows::f16(&few), kernels::Outputs::f16(&output), "q bytes"),
            (Rows::from(&q), kernels::Outputs::f16(&output), "q bytes"),
            (Rows::f16(&q), kernels::Outputs::from(&output), "output bytes"),
        ] {
            let refused = step.attend(encoder, 0, q, output, &plain).unwrap_err();
            assert!(refused.to_string().contains(part), "{refused}");
        }
        step.attend(encoder, 0, Rows::f16(&q), kernels::Outputs::f16(&output), &plain)
    })
    .unwrap();
    step.commit().unwrap();
    // One token: its own value.
    assert_eq!(gpu.read::<u16>("output", &output, 16).unwrap(), halves);

    // The reference refuses the same.
    let mut reference = ReferenceCache::new(small_spec(2)).unwrap();
    let id = reference.book_mut().open();
    let plan = reference.book_mut().plan(&[(id, 1)], 1).unwrap();
    let none = AttentionOptions::<&[f32]>::default();
    for options in [
        AttentionOptions {
            window: Some(0),
            ..none
        },
        AttentionOptions {
            sinks: Some(&[1.0][..]),
            ..none
        },
    ] {
        assert!(reference.attend(&plan, 0, &[0.0; 16], &options).is_err());
    }
    assert_eq!(none.reach(), Reach::default());
}

#[test]
fn mod_12_scales_of_k_and_v_that_are_swapped_fail() {
    let Some(gpu) = common::gpu("mod_12_scales_of_k_and_v_that_are_swapped_fail") else {
        return;
    };
    let pages = pages("fp8".parse().unwrap(), 2, 16, 64);
    let sequences = random_sequences(&pages, 4, &[70, 3], 2);
    let mut fixture = Fixture::new(pages, 4, &sequences, 128, false).unwrap();
    fixture.tensor_scales = [0.5, 2.0];
    let reference = fixture.reference();
    let right = fixture.compare(&fixture.gpu(gpu).unwrap(), &reference);
    assert!(right.cases > 0 && right.failures == 0, "{right:?}");
    // The same codes read with one side's scale on the other.
    let swapped = Fixture {
        tensor_scales: [2.0, 0.5],
        ..fixture.clone()
    };
    let wrong = fixture.compare(&swapped.gpu(gpu).unwrap(), &reference);
    assert!(wrong.failures * 2 > wrong.cases, "{wrong:?}");
}
