//! Golden vectors: cases hold on the adapter, read back from their folders, and judge shaders and results of others.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use kvpack::export::cases::{self, Case, Rule};
use kvpack::export::writers::ExportTarget;
use kvpack::export::{Choice, Export, Phase, Runnable, Runner, Shape};
use kvpack::kernels::FloatType;
use kvpack::spec::TABLE;
use kvpack::variant::{Arithmetic, Reduction};

use crate::common;

fn choice(pairs: &[&str]) -> Choice {
    let shape = Shape {
        kv_heads: 2,
        q_heads: 6,
        k_head_dim: 40,
        v_head_dim: 40,
        page_tokens: 64,
    };
    Choice::new(shape, pairs.iter().map(|name| name.parse().unwrap()).collect())
}

fn export(choice: &Choice, tokens: u32) -> Export {
    Export::compose(choice, ExportTarget::Wgsl, Some(tokens), &mut |_, _, _| {}).unwrap()
}

/// The modules of an export as they run here.
fn runnables(export: &Export) -> BTreeMap<String, Runnable> {
    let entries = export.manifest.modules.iter().zip(&export.files);
    entries
        .map(|(entry, (file, bytes))| {
            let text = String::from_utf8(bytes.clone()).unwrap();
            (entry.name.clone(), Runnable::new(entry, text, file.clone()))
        })
        .collect()
}

/// What the judges of every case have against a run on the adapter.
fn complaints(gpu: &kvpack::gpu::Gpu, export: &Export) -> Vec<String> {
    let (modules, mut runner) = (runnables(export), Runner::new(gpu));
    let mut found = Vec::new();
    for case in &export.cases {
        let ran = runner.run(case, &modules).unwrap();
        assert_eq!(ran.overrun, [""; 0], "{}", case.case);
        for expect in &case.expect {
            let verdict = case.judge(expect, &ran.buffers[&expect.buffer]).unwrap();
            if !verdict.passed() {
                found.push(format!("{} {}: {}", case.case, verdict.name, verdict.first));
            }
        }
    }
    found
}

#[test]
fn every_case_of_the_eight_pairs_holds_on_this_adapter() {
    let Some(gpu) = common::gpu("every_case_of_the_eight_pairs_holds_on_this_adapter") else {
        return;
    };
    let export = export(&choice(&TABLE), 117);
    assert_eq!(export.cases.len(), 16 + 4 + 8 + 16);
    let found = complaints(gpu, &export);
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn cases_in_half_precision_and_of_unequal_heads_hold_on_this_adapter() {
    let Some(gpu) = common::gpu("cases_in_half_precision_and_of_unequal_heads") else {
        return;
    };
    // Both sides wait, to different boundaries; a per-tensor side beside one with blocks; heads of unequal size.
    let mut mixed = choice(&["int8c(16)/int4c(64)", "fp8/fp4"]);
    mixed.kernels = ["quantize", "attention_split"].map(str::to_owned).to_vec();
    mixed.shape.v_head_dim = 24;
    mixed.phases = vec![Phase::Decode];
    (mixed.rows, mixed.queries, mixed.outputs) = (FloatType::F16, FloatType::F16, FloatType::F16);
    let export = export(&mixed, 200);
    let names: Vec<_> = export.cases.iter().map(|case| case.case.as_str()).collect();
    assert!(names.contains(&"pages-int4c64-d24"), "{names:?}");
    let found = complaints(gpu, &export);
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn cases_of_variants_that_need_features_hold_on_this_adapter() {
    let Some(gpu) = common::gpu("cases_of_variants_that_need_features") else {
        return;
    };
    for (reduction, arithmetic, pair) in [
        (Reduction::Subgroup, Arithmetic::F32, "int4"),
        (Reduction::Workgroup, Arithmetic::F16, "fp8"),
        (Reduction::Workgroup, Arithmetic::Packed, "int8"),
    ] {
        let mut choice = choice(&[pair]);
        choice.kernels = vec!["attention_split".to_owned()];
        choice.phases = vec![Phase::Decode];
        choice.tweaks.reduction = Some(reduction);
        choice.tweaks.arithmetic = Some(arithmetic);
        let export = export(&choice, 70);
        let split = export
            .manifest
            .modules
            .iter()
            .find(|m| m.kernel == "attention_split")
            .unwrap();
        let needed = match (reduction, arithmetic) {
            (Reduction::Subgroup, _) => "subgroups",
            (_, Arithmetic::F16) => "shader-f16",
            _ => "",
        };
        assert_eq!(split.features.join(" "), needed, "{}", split.name);
        let has = |feature: &str| gpu.summary().features.iter().any(|f| f == feature);
        if !needed.is_empty() && !has(needed) {
            common::say(&format!(
                "kvpack: {} is left out: the adapter lacks {needed}",
                split.name
            ));
            continue;
        }
        let found = complaints(gpu, &export);
        assert!(found.is_empty(), "{}", found.join("\n"));
    }
}

/// One case without a GPU.
fn one_case() -> Case {
    cases::of_pair(
        &choice(&["int4c/int4"]),
        "int4c/int4".parse().unwrap(),
        Phase::Prefill,
        117,
    )
    .unwrap()
}

#[test]
fn the_reference_passes_its_own_judges_and_one_bit_does_not() {
    let case = one_case();
    for expect in &case.expect {
        let buffer = case.buffer(&expect.buffer).unwrap();
        let good: Vec<u32> = match &expect.rule {
            Rule::Bits { words, .. } => words.clone(),
            Rule::Bound { numbers, .. } => numbers.iter().map(|&x| (x as f32).to_bits()).collect(),
        };
        assert!(case.judge(expect, &good).unwrap().passed(), "{}", expect.name);
        // What the buffer holds before the first step is no answer.
        assert!(!case.judge(expect, &buffer.words).unwrap().passed() || expect.name == "status");
        assert!(case.judge(expect, &good[1..]).is_err());
        let mut bad = good.clone();
        let at = bad.len() / 2;
        bad[at] ^= 1 << 20;
        let verdict = case.judge(expect, &bad).unwrap();
        let counted = match &expect.rule {
            Rule::Bits { counted, .. } => counted.get(at).is_none_or(|mask| mask & 1 << 20 != 0),
            Rule::Bound { .. } => true,
        };
        assert_eq!(verdict.passed(), !counted, "{}: {}", expect.name, verdict.first);
        bad[at] = f32::NAN.to_bits();
        if matches!(expect.rule, Rule::Bound { .. }) {
            assert!(
                !case.judge(expect, &bad).unwrap().passed(),
                "NaN passes {}",
                expect.name
            );
        }
    }
}

#[test]
fn a_wrong_bit_is_named_by_page_word_token_and_channel() {
    let case = one_case();
    let expect = case.expectation("k_pages").unwrap();
    let Rule::Bits { words, .. } = &expect.rule else {
        panic!("bits")
    };
    let page = case
        .buffer("k_pages")
        .unwrap()
        .geometry
        .as_ref()
        .unwrap()
        .layout()
        .unwrap();
    // Token 70 is slot 6 of the second page of the first sequence.
    let id = case.sequences[0].k_pages[1];
    let (word, bit) = page.code_at(6, 1, 11);
    let mut bad = words.clone();
    bad[(id * page.words + word) as usize] ^= 1 << bit;
    let first = case.judge(expect, &bad).unwrap().first;
    let place =
        format!("k_pages: page {id}, word {word}, token 70 of sequence 0, head 1, channel 11, code: ");
    assert!(first.starts_with(&place), "{first}");
    let found = bad[(id * page.words + word) as usize];
    assert!(
        first.ends_with(&format!("{:08x} expected, {found:08x} found", found ^ (1 << bit))),
        "{first}"
    );
    let (word, bit) = page.scale_at(6, 1, 11).unwrap();
    let mut bad = words.clone();
    bad[(id * page.words + word) as usize] ^= 1 << bit;
    let first = case.judge(expect, &bad).unwrap().first;
    assert!(
        first.contains("tokens 64 to 95 of sequence 0, head 1, channel 11, scale: "),
        "{first}"
    );
}

#[test]
fn folders_read_back_and_are_the_same_each_time() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
    let mut f16 = choice(&["int4c/int4"]);
    (f16.rows, f16.queries, f16.outputs) = (FloatType::F16, FloatType::F16, FloatType::F16);
    let pair = "int4c/int4".parse().unwrap();
    for case in [one_case(), cases::of_pair(&f16, pair, Phase::Decode, 9).unwrap()] {
        for path in [&a, &b] {
            let _ = fs::remove_dir_all(path);
            cases::write(&case, path).unwrap();
        }
        assert_eq!(cases::read(&a).unwrap(), case);
        let mut names: Vec<_> = fs::read_dir(&a)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        assert!(names.len() > 20);
        for name in names {
            assert!(
                fs::read(a.join(&name)).unwrap() == fs::read(b.join(&name)).unwrap(),
                "{name:?}"
            );
        }
    }
}

#[test]
fn hostile_cases_are_refused_with_file_and_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("case");
    let write = || {
        let _ = fs::remove_dir_all(&path);
        cases::write(&one_case(), &path).unwrap();
        fs::read_to_string(path.join("case.json")).unwrap()
    };
    let good = write();
    for (from, to, words) in [
        ("kvpack.case", "other.case", "is other.case version 1"),
        ("\"version\": 1", "\"version\": 2", "version 2"),
        ("\"what\"", "\"whatever\"", "case.json is no case"),
        ("\"k.npy\"", "\"../k.npy\"", "no plain file name"),
        ("\"k.npy\"", "\"/etc/passwd\"", "no plain file name"),
        ("\"k.npy\"", "\"gone.npy\"", "it cannot be read"),
        ("\"k.npy\"", "\"v_runs.npy\"", "it holds <u4 of shape"),
        ("\"name\": \"k_runs\"", "\"name\": \"v_runs\"", "stands twice"),
        ("\"fill\": \"0xffffffff\"", "\"fill\": \"many\"", "is no word"),
        (
            "\"fill\": \"0xffffffff\"",
            "\"fill\": \"0x123456789\"",
            "is no word",
        ),
        (
            "\"source\": \"k\"",
            "\"source\": \"nothing\"",
            "there is no buffer `nothing`",
        ),
        (
            "\"buffer\": \"output\"",
            "\"buffer\": \"nothing\"",
            "there is no buffer `nothing`",
        ),
        (
            "\"rule\": \"bound\"",
            "\"rule\": \"bits\"",
            "case.json is no case",
        ),
        (
            "\"buffer\": \"lse\"",
            "\"buffer\": \"status\"",
            "bounds for integers",
        ),
        ("122,", "4294967295,", "is too large"),
        ("{", "[", "case.json is no case"),
    ] {
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good, "{from}");
        fs::write(path.join("case.json"), &bad).unwrap();
        let said = cases::read(&path).unwrap_err().to_string();
        assert!(said.contains(words), "expected {words}: {said}");
    }
    for length in [0, 1, good.len() / 2, good.len() - 2] {
        fs::write(path.join("case.json"), &good[..length]).unwrap();
        assert!(cases::read(&path).is_err(), "{length}");
    }
    write();
    for file in [
        "k.npy",
        "k_pages.expected.npy",
        "k_pages.mask.npy",
        "lse.bound.npy",
    ] {
        let bytes = fs::read(path.join(file)).unwrap();
        fs::write(path.join(file), &bytes[..bytes.len() - 4]).unwrap();
        let said = cases::read(&path).unwrap_err().to_string();
        assert!(
            said.contains(file) && said.contains("truncated or damaged"),
            "{said}"
        );
        fs::write(path.join(file), &bytes).unwrap();
    }
    assert!(cases::read(&path).is_ok());
    assert!(
        cases::read(folder.path())
            .unwrap_err()
            .to_string()
            .contains("case.json cannot be read")
    );
}

// ---- the command -------------------------------------------------------------------------------------------------

fn kvpack(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvpack"));
    command.args(arguments).env("KVPACK_TUNING", "");
    command.output().unwrap()
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn saved(folder: &Path, name: &str, descr: &str, shape: &str, data: &[u8]) -> String {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    let path = folder.join(name);
    fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_result_of_any_program_is_judged_without_an_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("case");
    let case = one_case();
    cases::write(&case, &path).unwrap();
    let vectors = path.to_str().unwrap();
    let judge = |result: &str, more: &[&str]| {
        let output = kvpack(&[&["validate", "--vectors", vectors, "--result", result], more].concat());
        (output.status.code(), told(&output))
    };
    let Rule::Bound { numbers, .. } = &case.expectation("output").unwrap().rule else {
        panic!("bound")
    };
    let shape = "(10, 6, 40)";
    let f8: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    let f4: Vec<u8> = numbers.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect();
    let f2: Vec<u8> = numbers
        .iter()
        .flat_map(|&x| half::f16::from_f64(x).to_le_bytes())
        .collect();
    for (descr, data) in [("<f8", &f8), ("<f4", &f4), ("<f2", &f2)] {
        let result = saved(folder.path(), "o.npy", descr, shape, data);
        let (code, said) = judge(&result, &[]);
        assert!(
            code == Some(0) && said.contains("1 checks passed, 0 failed; 2400 cases"),
            "{said}"
        );
        assert!(
            said.contains("as output of attention-int4c-int4-prefill"),
            "{said}"
        );
    }
    let mut bad = f4.clone();
    let at = (7 * 6 + 2) * 40 + 5;
    bad[at * 4..at * 4 + 4].copy_from_slice(&((numbers[at] + 1e-3) as f32).to_le_bytes());
    let result = saved(folder.path(), "bad.npy", "<f4", shape, &bad);
    let (code, said) = judge(&result, &[]);
    let place = "output: query token 7, query head 2, channel 5: ";
    assert!(
        code == Some(1) && said.contains(place) && said.contains("FAIL"),
        "{said}"
    );
    let zeros = saved(folder.path(), "zeros.npy", "<f4", shape, &vec![0; f4.len()]);
    assert_eq!(judge(&zeros, &[]).0, Some(1));

    // Rows read back: K and V have one shape, so that the name must be said. The sign of zero does not count.
    let Rule::Bits { words, .. } = &case.expectation("k_rows").unwrap().rule else {
        panic!("bits")
    };
    let rows: Vec<u8> = words
        .iter()
        .map(|&word| if word << 1 == 0 { word ^ 1 << 31 } else { word })
        .flat_map(u32::to_le_bytes)
        .collect();
    let rows = saved(folder.path(), "rows.npy", "<f4", "(122, 2, 40)", &rows);
    let (code, said) = judge(&rows, &[]);
    assert!(
        code == Some(2) && said.contains("several") && said.contains("k_rows [122, 2, 40]"),
        "{said}"
    );
    assert_eq!(judge(&rows, &["--expect", "k_rows"]).0, Some(0));
    // What the case itself expects passes, as bits too.
    let own = path.join("k_rows.expected.npy");
    assert_eq!(judge(own.to_str().unwrap(), &["--expect", "k_rows"]).0, Some(0));
    let (code, said) = judge(&rows, &["--expect", "v_rows"]);
    assert!(
        code == Some(1) && said.contains("v_rows: token 0, head 0, channel 0: "),
        "{said}"
    );

    for (result, more, words) in [
        (rows.as_str(), &["--expect", "sums"][..], "nothing of this name"),
        (
            &rows,
            &["--expect", "output"],
            "it has shape [122, 2, 40], not [10, 6, 40]",
        ),
        ("/nowhere.npy", &[], "it cannot be read"),
        (
            &saved(folder.path(), "i.npy", "<i8", shape, &f8),
            &[],
            "its numbers are '<i8'",
        ),
        (
            &saved(folder.path(), "t.npy", "<f8", shape, &f4),
            &[],
            "truncated or damaged",
        ),
        (
            &saved(folder.path(), "s.npy", "<f4", "(3,)", &f4[..12]),
            &[],
            "nothing that is expected",
        ),
        (&zeros, &["--case", "other"], "leave --case out"),
    ] {
        let (code, said) = judge(result, more);
        assert!(
            matches!(code, Some(1 | 2)) && said.contains(words),
            "expected {words}: {said}"
        );
    }
    let output = kvpack(&["validate", "--vectors", vectors]);
    assert!(output.status.code() == Some(2) && told(&output).contains("--result"));
}

#[test]
fn a_shader_of_another_hand_is_judged_in_the_place_of_a_module() {
    if common::gpu("a_shader_of_another_hand").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    let out = path.to_str().unwrap();
    let arguments = [
        "shaders",
        "export",
        "--kernel",
        "quantize",
        "--kernel",
        "attention_split",
    ];
    let more = [
        "--pairs",
        "int4",
        "--head-dim",
        "32",
        "--to",
        "wgsl-browser",
        "--out",
        out,
    ];
    let output = kvpack(&[&arguments[..], &more].concat());
    assert_eq!(output.status.code(), Some(0), "{}", told(&output));
    let mine = |name: &str, text: &str| {
        let file = folder.path().join(name);
        fs::write(&file, text).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let judge = |file: &str, more: &[&str]| {
        let output = kvpack(&[&["validate", "--wgsl", file, "--manifest", out], more].concat());
        (output.status.code(), told(&output))
    };
    let quantize = fs::read_to_string(path.join("quantize-int4.wgsl")).unwrap();
    let (code, said) = judge(&mine("mine.wgsl", &quantize), &[]);
    assert!(
        code == Some(0) && said.contains("mine.wgsl in the place of quantize-int4"),
        "{said}"
    );
    assert!(said.contains("10 checks passed, 0 failed"), "{said}");

    // The line that browsers demand and naga refuses is no fault.
    let enabled = format!("enable subgroups;\n{quantize}");
    assert_eq!(judge(&mine("mine.wgsl", &enabled), &[]).0, Some(0));

    // A code that is rounded otherwise is found, with its place and both words.
    let wrong = quantize.replace("LARGEST_ODD: u32 = 7u", "LARGEST_ODD: u32 = 5u");
    assert_ne!(wrong, quantize);
    let (code, said) = judge(&mine("mine.wgsl", &wrong), &[]);
    assert!(
        code == Some(1) && said.contains("0 checks passed, 10 failed"),
        "{said}"
    );
    let place =
        said.contains("of sequence 0, head 0, channel") || said.contains("of sequence 1, head 0, channel");
    assert!(
        place && said.contains(" expected, ") && said.contains("k_pages: page "),
        "{said}"
    );
    // And so is a kernel that does nothing.
    let idle = quantize.replace("if (index >= params.runs * UNITS)", "if (true)");
    assert_ne!(idle, quantize);
    assert_eq!(judge(&mine("mine.wgsl", &idle), &[]).0, Some(1));

    // What works only where a dispatch is small, a run full, or a list ends with its buffer is found too.
    for (from, to) in [
        ("(group.y * grid.x + group.x)", "group.x"),
        ("i < run.z", "i < 4u"),
        ("params.runs * UNITS", "4294967295u"),
    ] {
        let narrow = quantize.replace(from, to);
        assert_ne!(narrow, quantize, "{from}");
        let (code, said) = judge(&mine("mine.wgsl", &narrow), &[]);
        assert!(code == Some(1) && said.contains("FAIL"), "{from}: {said}");
    }

    let broken = quantize.replace("let unit = index", "let unit = nonsense + index");
    let line = broken.lines().position(|line| line.contains("nonsense")).unwrap() + 1;
    let (code, said) = judge(&mine("broken.wgsl", &broken), &[]);
    assert!(
        code == Some(1) && said.contains(&format!("broken.wgsl:{line}:")),
        "{said}"
    );
    assert!(said.contains("nonsense"), "{said}");
    let (code, said) = judge(
        &mine("none.wgsl", &quantize.replace("fn quantize(", "fn other(")),
        &[],
    );
    assert!(
        code == Some(1) && said.contains("its entry points are other"),
        "{said}"
    );
    let (code, said) = judge(&mine("empty.wgsl", ""), &[]);
    assert!(
        code == Some(1) && said.contains("it has no entry point"),
        "{said}"
    );
    assert!(matches!(judge(&mine("bytes.wgsl", "\u{0}\u{1}"), &[]).0, Some(1)));
    let (code, said) = judge("/nowhere.wgsl", &[]);
    assert!(code == Some(2) && said.contains("it cannot be read"), "{said}");

    // Two modules have this entry point: the file's name or --module says which.
    let split = fs::read_to_string(path.join("attention_split-int4-int4-decode.wgsl")).unwrap();
    let split = mine("split.wgsl", &split);
    let (code, said) = judge(&split, &[]);
    assert!(
        code == Some(2) && said.contains("--module: attention_split-int4-int4-decode, "),
        "{said}"
    );
    let (code, said) = judge(&split, &["--module", "attention_split-int4-int4-decode"]);
    assert!(
        code == Some(0) && said.contains("15 checks passed, 0 failed"),
        "{said}"
    );
    let (code, said) = judge(&split, &["--module", "other"]);
    assert!(
        code == Some(2) && said.contains("choose from quantize-int4"),
        "{said}"
    );
    let (code, said) = judge(&split, &["--module", "quantize-int4"]);
    assert!(
        code == Some(1) && said.contains("the manifest wants quantize"),
        "{said}"
    );

    let manifest = mine("manifest.json", "{\"schema\": \"other\"}");
    let output = kvpack(&["validate", "--wgsl", &split, "--manifest", &manifest]);
    assert!(output.status.code() == Some(1) && told(&output).contains("its schema is `other`"));
    let output = kvpack(&["validate", "--wgsl", &split]);
    assert!(output.status.code() == Some(2) && told(&output).contains("--manifest"));
}

#[test]
fn shaders_that_only_work_on_the_simplest_case_are_found() {
    if common::gpu("shaders_that_only_work_on_the_simplest_case").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    let out = path.to_str().unwrap();
    let output = kvpack(&[
        "shaders",
        "export",
        "--pairs",
        "int8",
        "--head-dim",
        "32",
        "--to",
        "wgsl",
        "--out",
        out,
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", told(&output));
    let mutants = [
        (
            "attention_merge-f32",
            "has_sink = params.sinks != 0u",
            "has_sink = false",
        ),
        ("attention_merge-f32", "&& params.lse != 0u", ""),
        (
            "attention_merge-f32",
            "let out_row = merge.w * params.q_heads + head",
            "let out_row = row",
        ),
        (
            "attention_merge-f32",
            "m = select(max(m, ml.x), m, bitcast<u32>(ml.y) == 0u);",
            "m = 0.0;",
        ),
        (
            "attention_split-int8-int8-decode",
            "slots >= vec4<u32>(entry.z)",
            "slots >= vec4<u32>(0u)",
        ),
        (
            "attention_split-int8-int8-decode",
            "let first = own - min(params.back, own);",
            "let first = 0u;",
        ),
        (
            "attention_split-int8-int8-decode",
            "params.q_offset + (item.query",
            "(item.query",
        ),
        ("quantize-int8", "params.row_offset", "0u"),
        ("rope", "params.halves == 1u", "true"),
        ("matmul-f32", "params.output_columns", "params.columns"),
    ];
    for (module, from, to) in mutants {
        let text = fs::read_to_string(path.join(format!("{module}.wgsl"))).unwrap();
        let spoilt = text.replace(from, to);
        assert_ne!(spoilt, text, "{module}: {from}");
        let file = folder.path().join("mine.wgsl");
        fs::write(&file, spoilt).unwrap();
        let arguments = [
            "validate",
            "--wgsl",
            file.to_str().unwrap(),
            "--manifest",
            out,
            "--module",
            module,
        ];
        let output = kvpack(&arguments);
        let said = told(&output);
        assert!(
            output.status.code() == Some(1) && said.contains("FAIL"),
            "{module}, {from}: {said}"
        );
    }
}

#[test]
fn hostile_shaders_and_places_are_refused_before_anything_runs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    let out = path.to_str().unwrap();
    let arguments = [
        "shaders", "export", "--kernel", "quantize", "--pairs", "int8", "--to", "wgsl", "--out", out,
    ];
    assert_eq!(kvpack(&arguments).status.code(), Some(0));
    let good = fs::read_to_string(path.join("quantize-int8.wgsl")).unwrap();
    let file = folder.path().join("mine.wgsl");
    let mine = file.to_str().unwrap();
    let judge = |text: &str, more: &[&str]| {
        fs::write(&file, text).unwrap();
        let output = kvpack(&[&["validate", "--wgsl", mine, "--manifest", out], more].concat());
        (output.status.code(), told(&output))
    };
    let (code, said) = judge(
        &good.replace("const WG_SIZE: u32 = 64u", "const WG_SIZE: u32 = 32u"),
        &[],
    );
    assert!(
        code == Some(1) && said.contains("its workgroup is [32, 1, 1]"),
        "{said}"
    );
    // A deep expression is refused or runs; it does not end the process.
    let deep = format!(
        "{good}\nfn deep() -> i32 {{ return {}1; }}\n",
        "1+".repeat(20_000)
    );
    assert!(matches!(judge(&deep, &[]).0, Some(0 | 1)));
    let (code, said) = judge(&" ".repeat(600 << 10), &[]);
    assert!(
        code == Some(2) && said.contains("at most 524288 are read"),
        "{said}"
    );
    // No report takes the place of what is read.
    for more in [
        ["--json", mine],
        ["--json", path.join("manifest.json").to_str().unwrap()],
    ] {
        let (code, said) = judge(&good, &more);
        assert!(
            code == Some(2) && said.contains("would take the place of what is read"),
            "{said}"
        );
        assert_eq!(fs::read_to_string(&file).unwrap(), good);
    }
    if common::gpu("hostile_shaders").is_none() {
        return;
    }
    let large = format!("{good}\nvar<workgroup> much: array<u32, 100000000>;\n");
    let (code, said) = judge(&large, &[]);
    assert!(
        code == Some(1) && said.contains("bytes of workgroup memory"),
        "{said}"
    );
}

#[test]
fn judges_take_nothing_for_granted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("case");
    let mut case = one_case();
    // Infinities must be met as they are, and a mask of nothing compares nothing.
    for expect in &mut case.expect {
        match &mut expect.rule {
            Rule::Bound { numbers, .. } => numbers[0] = f64::INFINITY,
            Rule::Bits { counted, .. } => counted.iter_mut().for_each(|mask| *mask = 0),
        }
    }
    let expect = case.expectation("lse").unwrap().clone();
    let words = vec![0; case.buffer("lse").unwrap().words.len()];
    assert!(!case.judge(&expect, &words).unwrap().passed());
    let expect = case.expectation("k_pages").unwrap().clone();
    let Rule::Bits { words, .. } = &expect.rule else {
        panic!("bits")
    };
    let verdict = case.judge(&expect, words).unwrap();
    assert!(verdict.cases == 0 && !verdict.passed());

    // Bounds that let everything pass, words that a terminal would obey, and buffers of all memory are refused.
    type Spoil = fn(&mut Case);
    let spoilt: [(Spoil, &str); 4] = [
        (|case| case.what = "\u{1b}[2J".to_owned(), "control characters"),
        (|case| case.case = "a/b".to_owned(), "is no name"),
        (
            |case| {
                for buffer in case.buffers.iter_mut().filter(|buffer| buffer.fill.is_some()) {
                    buffer.shape = vec![1 << 24];
                }
            },
            "is too large",
        ),
        (
            |case| {
                for expect in &mut case.expect {
                    if let Rule::Bound { bounds, .. } = &mut expect.rule {
                        bounds[0] = f64::INFINITY;
                    }
                }
            },
            "a bound is no number",
        ),
    ];
    for (spoil, words) in spoilt {
        let mut case = one_case();
        spoil(&mut case);
        let _ = fs::remove_dir_all(&path);
        cases::write(&case, &path).unwrap();
        let said = cases::read(&path).unwrap_err().to_string();
        assert!(
            said.contains(words) && !said.contains('\u{1b}'),
            "expected {words}: {said}"
        );
    }
}

#[test]
fn an_export_takes_the_place_of_an_export_and_of_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    let out = path.to_str().unwrap();
    let arguments = [
        "shaders",
        "export",
        "--kernel",
        "residual",
        "--vectors",
        "--to",
        "wgsl",
        "--out",
        out,
    ];
    assert_eq!(kvpack(&arguments).status.code(), Some(0));
    assert_eq!(kvpack(&arguments).status.code(), Some(0));
    for name in [
        "vectors/residual/my_output.npy",
        "vectors/notes.txt",
        "thesis.txt",
    ] {
        fs::write(path.join(name), "mine").unwrap();
        let output = kvpack(&arguments);
        assert!(
            output.status.code() == Some(2) && told(&output).contains(name),
            "{}",
            told(&output)
        );
        assert_eq!(fs::read_to_string(path.join(name)).unwrap(), "mine");
        fs::remove_file(path.join(name)).unwrap();
    }
    assert_eq!(kvpack(&arguments).status.code(), Some(0));
}
