//! `kvpack::validate::run` from its start to its end, and what its judgement rests on.

use std::collections::BTreeSet;

use kvpack::pages::PageLayout;
use kvpack::validate::{
    Comparison, Fixture, PageCheck, ValidateFilter, kernel_names, nasty_rows, random_sequences, run,
};

use crate::common;

#[test]
fn every_kernel_is_run_and_passes() {
    let Some(gpu) = common::gpu("every_kernel_is_run_and_passes") else {
        return;
    };
    // Groups, a plane of scales per token, one scale for all: every kernel has work.
    let filter = ValidateFilter {
        kernels: Vec::new(),
        pairs: vec!["int4c(8)/int4".parse().unwrap(), "fp8".parse().unwrap()],
    };
    let mut heard = Vec::new();
    let rows = run(gpu, &filter, &mut |row| heard.push(row.clone())).unwrap();
    assert_eq!(heard, rows);
    for row in &rows {
        assert!(row.passed && row.cases > 0 && row.bit_mismatches == 0, "{row:?}");
        assert!(row.detail.is_empty(), "{row:?}");
        assert!(
            row.worst_share_of_bound.is_none_or(|share| share <= 1.0),
            "{row:?}"
        );
        assert_eq!(row.adapter, gpu.summary().title());
    }
    let ran: BTreeSet<&str> = rows.iter().map(|row| row.kernel.as_str()).collect();
    assert_eq!(ran, kernel_names().into_iter().collect());
    for (kernel, format) in [
        ("quantize_group", "int4c(8)"),
        ("quantize", "int4"),
        ("dequantize", "fp8"),
        ("attention_split", "int4c(8)/int4"),
    ] {
        let found = rows
            .iter()
            .any(|row| row.kernel == kernel && row.format == format);
        assert!(found, "{kernel} {format}");
    }
}

#[test]
fn only_what_is_named_is_run_and_what_does_not_exist_is_refused() {
    let Some(gpu) = common::gpu("only_what_is_named_is_run_and_what_does_not_exist_is_refused") else {
        return;
    };
    let rows = |kernels: &[&str], pairs: &[&str]| {
        let filter = ValidateFilter {
            kernels: kernels.iter().map(|&kernel| kernel.to_owned()).collect(),
            pairs: pairs.iter().map(|pair| pair.parse().unwrap()).collect(),
        };
        run(gpu, &filter, &mut |_| ())
    };
    let named = rows(&["residual", "amax"], &[]).unwrap();
    let names: Vec<_> = named.iter().map(|row| row.kernel.as_str()).collect();
    assert_eq!(names, ["amax", "residual"]);
    assert!(rows(&["quantize_group"], &["f16"]).unwrap().is_empty());
    let message = rows(&["quantise"], &[]).unwrap_err().to_string();
    assert!(
        message.contains("quantise") && message.contains("quantize_group"),
        "{message}"
    );
}

/// What makes a row pass: no word that differs and no sum beyond its bound. Each is made to see a fault here, on results
/// of the adapter itself.
#[test]
fn a_fault_in_the_adapters_results_is_seen() {
    let Some(gpu) = common::gpu("a_fault_in_the_adapters_results_is_seen") else {
        return;
    };
    let page = PageLayout::new("int8".parse().unwrap(), 2, 8, 64).unwrap();
    let rows = nasty_rows(64, 16, 1);
    let check = PageCheck {
        page,
        rows: &rows,
        tensor_scale: 1.0,
    };
    assert!(check.pack(gpu).unwrap().is_empty());
    let (packed, _) = check.gpu(gpu).unwrap();
    let (wanted, _) = check.reference().unwrap();
    assert_eq!(packed.len(), wanted.len());
    // The same rows with one number that is not the same.
    let mut other = rows.clone();
    other[0] = 100.0;
    let (wrong, _) = PageCheck {
        rows: &other,
        ..check
    }
    .gpu(gpu)
    .unwrap();
    assert_ne!(wrong, wanted);

    let pages = [page, page];
    let sequences = random_sequences(&pages, 2, &[9], 1);
    let fixture = Fixture::new(pages, 2, &sequences, 64, false).unwrap();
    let reference = fixture.reference();
    let got = fixture.gpu(gpu).unwrap();
    assert_eq!(fixture.compare(&got, &reference).failures, 0);
    for fault in [1e-2, f64::NAN] {
        let mut got = got.clone();
        got.output[3] += fault;
        let comparison = fixture.compare(&got, &reference);
        assert!(
            comparison.failures == 1 && !(comparison.share() <= 1.0),
            "{comparison:?}"
        );
        // A good result beside it does not hide it.
        let mut all = Comparison::default();
        all.join(comparison);
        all.join(fixture.compare(&fixture.gpu(gpu).unwrap(), &reference));
        assert_eq!(all.failures, 1, "{all:?}");
    }
}
