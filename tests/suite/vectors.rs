//! Golden vectors: cases run on the adapter and judged; a wrong kernel, a wrong bit and a foreign result are found.

use std::collections::BTreeMap;

use kvpack::export::cases::Case;
use kvpack::export::writers::ExportTarget;
use kvpack::export::{Choice, Export, Phase, Runnable, Runner, Shape, Tweaks};
use kvpack::kernels::FloatType;
use kvpack::spec::TABLE;

use crate::common;

fn choice(pairs: &[&str]) -> Choice {
    Choice {
        shape: Shape {
            kv_heads: 2,
            q_heads: 6,
            k_head_dim: 40,
            v_head_dim: 40,
            page_tokens: 64,
        },
        pairs: pairs.iter().map(|name| name.parse().unwrap()).collect(),
        kernels: Vec::new(),
        phases: vec![Phase::Decode, Phase::Prefill],
        rows: FloatType::F32,
        queries: FloatType::F32,
        outputs: FloatType::F32,
        tweaks: Tweaks::default(),
    }
}

/// The modules of an export as text for this adapter.
fn runnables(export: &Export) -> BTreeMap<String, Runnable> {
    let entries = export.manifest.modules.iter().zip(&export.files);
    entries
        .map(|(entry, (file, bytes))| {
            let text = String::from_utf8(bytes.clone()).unwrap();
            (entry.name.clone(), Runnable::new(entry, text, file.clone()))
        })
        .collect()
}

/// What a case's judges say of a run on the adapter.
fn complaints(runner: &mut Runner<'_>, case: &Case, modules: &BTreeMap<String, Runnable>) -> Vec<String> {
    let found = runner.run(case, modules).unwrap();
    let verdicts = case
        .expect
        .iter()
        .map(|expect| case.judge(expect, &found[&expect.buffer]).unwrap());
    verdicts
        .filter(|verdict| !verdict.passed())
        .map(|verdict| format!("{} {}: {}", case.case, verdict.name, verdict.first))
        .collect()
}

#[test]
fn every_case_holds_on_this_adapter() {
    let Some(gpu) = common::gpu("every_case_holds_on_this_adapter") else {
        return;
    };
    let export = Export::compose(&choice(&TABLE), ExportTarget::Wgsl, Some(117), &mut |_, _, _| {}).unwrap();
    let modules = runnables(&export);
    let (mut found, mut runner) = (Vec::new(), Runner::new(&gpu));
    for case in &export.cases {
        found.extend(complaints(&mut runner, case, &modules));
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
