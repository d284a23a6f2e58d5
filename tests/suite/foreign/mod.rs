//! Another engine: it has the folder that `kvpack shaders export --vectors` wrote, and nothing else of kvpack. One host is
//! raw wgpu on WGSL, the other plain Vulkan on SPIR-V.

mod folder;
mod vulkan;
mod webgpu;

use std::path::Path;
use std::process::Command;

use crate::common;
use folder::{Case, Folder};

/// Few query heads: software drivers compile larger tiles for seconds.
const SMALL: [&str; 6] = ["--group", "2", "--head-dim", "32", "--kv-heads", "2"];

/// Runs the command that a user would; the folder is `out` below `root`.
fn export(root: &Path, target: &str, more: &[&str]) -> Folder {
    let out = root.join(target);
    let run = Command::new(env!("CARGO_BIN_EXE_kvpack"))
        .args(["shaders", "export", "--vectors", "--to", target, "--out"])
        .arg(&out)
        .args(more)
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    Folder::open(&out)
}

/// Runs cases and fails with all that is wrong.
fn judge(folder: &Folder, cases: &[Case], run: impl Fn(&Case) -> folder::Buffers) {
    assert!(!cases.is_empty());
    let mut wrong = Vec::new();
    for case in cases {
        let found = run(case);
        wrong.extend(case.complaints(&found));
    }
    assert!(
        wrong.is_empty(),
        "{} of {} cases of {}:\n{}",
        wrong.len(),
        cases.len(),
        folder.target(),
        wrong.join("\n")
    );
}

/// On a device with WebGPU's default limits and no feature. The whole set again on every other driver at hand.
#[test]
fn every_export_marked_portable_runs_in_raw_wgpu_at_default_limits() {
    if common::gpu("foreign wgpu").is_none() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let folder = export(root.path(), "wgsl", &SMALL);
    let host = webgpu::Host::new(wgpu::Features::empty(), wgpu::Limits::default()).unwrap();
    let cases: Vec<Case> = folder.cases().collect();
    let mut run: Vec<&str> = cases.iter().flat_map(Case::modules).collect();
    run.sort_unstable();
    run.dedup();
    let portable: Vec<&str> = folder.modules(|module| module["portable"] == true).collect();
    assert!(portable.len() > 50, "{}", portable.len());
    for module in portable {
        assert!(run.contains(&module), "no case runs {module}");
    }
    judge(&folder, &cases, |case| host.run(&folder, case));
    common::say(&format!(
        "kvpack: raw wgpu reproduced {} cases of {} modules on {}",
        cases.len(),
        run.len(),
        host.name()
    ));
}

/// Other shapes, types and variants: what a device with features can run.
#[test]
fn other_shapes_types_and_variants_run_in_raw_wgpu() {
    if common::gpu("foreign variants").is_none() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let wide = [
        "--pairs",
        "int4c(8)/int8",
        "--kv-heads",
        "1",
        "--group",
        "3",
        "--head-dim",
        "40",
        "--v-head-dim",
        "24",
        "--page-tokens",
        "16",
        "--rows",
        "f16",
        "--queries",
        "f16",
        "--outputs",
        "f16",
    ];
    let features = [
        "--pairs",
        "int4",
        "--reduction",
        "subgroup",
        "--arithmetic",
        "f16",
        "--kernel",
        "attention_split",
    ];
    let packed = [
        "--pairs",
        "int2,fp4",
        "--arithmetic",
        "packed",
        "--kernel",
        "attention_split",
    ];
    for (more, wanted) in [
        (&wide[..], wgpu::Features::empty()),
        (&features, wgpu::Features::SUBGROUP | wgpu::Features::SHADER_F16),
        (&packed, wgpu::Features::empty()),
    ] {
        let folder = export(root.path(), "wgsl", more);
        let needs = folder.modules(|module| module["portable"] == false).count() > 0;
        assert_eq!(needs, !wanted.is_empty(), "{more:?}");
        let Some(host) = webgpu::Host::new(wanted, wgpu::Limits::default()) else {
            common::say(
                "kvpack: skipped the variants that need features: the adapter has not both subgroups and shader-f16",
            );
            continue;
        };
        let cases: Vec<Case> = folder.cases().collect();
        judge(&folder, &cases, |case| host.run(&folder, case));
    }
}

/// Every kernel, and the attention of one pair a phase. Again on every other driver at hand.
#[test]
fn portable_spirv_runs_in_plain_vulkan() {
    if common::gpu("foreign Vulkan").is_none() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let folder = export(root.path(), "spirv", &SMALL);
    let host = vulkan::Host::new();
    let attention = ["attention-int4c-int4-decode", "attention-fp8-fp8-prefill"];
    let cases: Vec<Case> = folder
        .cases()
        .filter(|case| !case.name().starts_with("attention-") || attention.contains(&case.name()))
        .collect();
    assert!(cases.iter().any(|case| case.name() == "pages-int4"));
    judge(&folder, &cases, |case| host.run(&folder, case));
    common::say(&format!(
        "kvpack: plain Vulkan reproduced {} cases from SPIR-V on {}",
        cases.len(),
        host.name()
    ));
}

/// What this engine judges by, it must be able to refuse by.
#[test]
fn the_foreign_judge_finds_a_wrong_bit_a_large_error_and_a_nan() {
    let root = tempfile::tempdir().unwrap();
    let folder = export(root.path(), "wgsl", &["--pairs", "int4", "--phase", "decode"]);
    let case = folder
        .cases()
        .find(|case| case.name() == "attention-int4-int4-decode")
        .unwrap();
    let right = case.expected();
    assert_eq!(case.complaints(&right), [""; 0]);
    let wrong = |buffer: &str, change: &dyn Fn(&mut Vec<u32>)| {
        let mut found = right.clone();
        change(found.get_mut(buffer).unwrap());
        let complaints = case.complaints(&found);
        assert!(
            complaints.len() == 1 && complaints[0].contains(buffer),
            "{complaints:?}"
        );
    };
    wrong("k_rows", &|words| words[17] ^= 1);
    wrong("output", &|words| words[3] = f32::NAN.to_bits());
    wrong("output", &|words| {
        words[3] = (f32::from_bits(words[3]) + 0.1).to_bits()
    });
    // A bit that the mask leaves out may be anything.
    case.leave_out("k_pages", 5);
    let mut found = right.clone();
    found.get_mut("k_pages").unwrap()[5] ^= u32::MAX;
    assert_eq!(case.complaints(&found), [""; 0]);
    wrong("k_pages", &|words| words[6] ^= 1 << 31);
}
