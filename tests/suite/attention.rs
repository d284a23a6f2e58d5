//! Attention on the GPU against the CPU reference, within twice the error of a plain f32 attention.

use kvpack::formats::ALL;
use kvpack::pages::PageLayout;
use kvpack::scales::{SCALE_TYPES, ScaleLayout, ScaleType};
use kvpack::spec::{Pair, Side};
use kvpack::validate::{
    Comparison, Fixture, Outputs, PageCheck, SequenceInput, nasty_rows, random_sequences,
};

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

fn every_pair(ratio: u32, test: &str) {
    for k in sides() {
        for v in sides() {
            check_pair(
                pages(Pair { k, v }, 2, 8, 32),
                ratio,
                &lengths(32),
                1,
                false,
                test,
            );
        }
    }
}

#[test]
fn every_pair_of_sides_at_head_ratio_1() {
    every_pair(1, "every_pair_of_sides_at_head_ratio_1");
}

#[test]
fn every_pair_of_sides_at_head_ratio_3() {
    every_pair(3, "every_pair_of_sides_at_head_ratio_3");
}

#[test]
fn every_pair_of_sides_at_head_ratio_4() {
    every_pair(4, "every_pair_of_sides_at_head_ratio_4");
}

#[test]
fn every_pair_of_sides_at_head_ratio_8() {
    every_pair(8, "every_pair_of_sides_at_head_ratio_8");
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
        check_pair(pages(pair, 2, 16, 32), 1, &[1, 31, 33, 100], 1, false, test);
    }
}

#[test]
fn head_dims_and_ratios_up_to_the_limits() {
    let shapes = [
        (1, 256, 1),
        (1, 256, 16),
        (2, 16, 5),
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
    fixture.scale = scale;
    let mut answers = vec![fixture.reference()];
    answers.extend(common::gpu(test).map(|gpu| fixture.gpu(gpu).unwrap()));
    answers
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
    for (q_heads, kv_heads) in [(15, 5), (25, 5), (28, 4), (8, 8), (16, 2)] {
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
