//! The exported shaders as browsers run them: under Dawn for Node on two software drivers, and in Chromium through the
//! page of `tools/web`. Golden vectors by the written page layout alone, with numpy.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

use crate::common;

/// Exit codes of the scripts: an npm package is missing; so is a driver or a browser.
const NO_PACKAGE: i32 = 3;
const NO_DRIVER: i32 = 4;

/// Where Debian's Chromium has SwiftShader.
const INSTALLED_SWIFTSHADER: &str = "/usr/lib/chromium/vk_swiftshader_icd.json";

/// An export in the build's folder for tests, made by the command.
fn exported(name: &str, options: &[&str]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let run = Command::new(env!("CARGO_BIN_EXE_kvpack"))
        .args(["shaders", "export", "--to", "wgsl-browser", "--vectors", "--out"])
        .arg(&folder)
        .args(options)
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    folder
}

/// All kernels, the eight pairs, portable. Small: software drivers run it three times.
fn portable() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| exported("export-portable", &["--page-tokens", "32"]))
}

fn manifest(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("manifest.json")).unwrap()).unwrap()
}

/// Whether tests may be skipped that find no driver.
fn may_skip() -> bool {
    std::env::var_os("KVPACK_ALLOW_NO_GPU").is_some_and(|v| v == "1")
}

/// A script's exit code and output; None where it lacks a driver and may be skipped, which is said.
fn run(command: &mut Command) -> Option<(i32, String)> {
    let program = command.get_program().to_string_lossy().into_owned();
    let run = command
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|e| panic!("{program} cannot be started ({e}). Run: eval \"$(tools/setup.sh)\""));
    let text = String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr);
    let code = run.status.code().unwrap_or(-1);
    assert_ne!(code, NO_PACKAGE, "{text}");
    if code == NO_DRIVER {
        let advice = "or set KVPACK_ALLOW_NO_GPU=1 to skip the GPU tests";
        assert!(may_skip(), "{text}\n{advice}");
        let reason = text.lines().find(|line| line.contains(".mjs: ")).unwrap_or(&text);
        common::say(&format!("kvpack: skipped a test of browsers: {reason}"));
        return None;
    }
    Some((code, text))
}

/// `tools/browser/run.mjs` on a folder, on the driver that the machine has.
fn dawn(folder: &Path) -> Option<(i32, String)> {
    dawn_with(folder, &[])
}

fn dawn_with(folder: &Path, options: &[&str]) -> Option<(i32, String)> {
    run(Command::new("node")
        .arg(common::path("tools/browser/run.mjs"))
        .arg(folder)
        .args(options))
}

/// The same on SwiftShader.
fn dawn_on_swiftshader(folder: &Path) -> Option<(i32, String)> {
    let given = std::env::var_os("KVPACK_SWIFTSHADER_ICD").map(PathBuf::from);
    let icd = given.unwrap_or_else(|| PathBuf::from(INSTALLED_SWIFTSHADER));
    if !icd.exists() {
        let advice = "Run: eval \"$(tools/setup.sh)\"; or set KVPACK_ALLOW_NO_GPU=1 to skip the GPU tests";
        assert!(may_skip(), "SwiftShader is not at hand. {advice}");
        common::say("kvpack: skipped a test of browsers: no SwiftShader");
        return None;
    }
    run(Command::new("node")
        .arg(common::path("tools/browser/run.mjs"))
        .arg(folder)
        .arg("--unzeroed")
        .env("VK_DRIVER_FILES", &icd)
        .env("VK_ICD_FILENAMES", &icd))
}

/// Every module compiled, every case ran, nothing failed; `left_out` modules and cases need what the driver lacks: all cases
/// then, so that nothing was compared, which is no pass.
fn assert_all_ran(folder: &Path, (code, text): (i32, String), left_out: usize) {
    let manifest = manifest(folder);
    let modules = manifest["modules"].as_array().unwrap();
    let cases = manifest["vectors"].as_array().unwrap();
    assert!(!modules.is_empty() && !cases.is_empty());
    let shown: Vec<_> = text.lines().filter(|line| !line.starts_with("ok ")).collect();
    let shown = shown.join("\n");
    assert_eq!(code, i32::from(left_out > 0), "{shown}");
    assert_eq!(text.contains("nothing was compared"), left_out > 0, "{shown}");
    let last = text.lines().find(|line| line.contains(" modules, ")).unwrap();
    let (first, end) = (
        format!("{} modules, ", modules.len()),
        format!(" 0 failed, {left_out} left out"),
    );
    assert!(last.starts_with(&first) && last.ends_with(&end), "{shown}");
    for case in cases {
        let name = case["case"].as_str().unwrap();
        let line = format!(" {name}: ");
        assert!(text.contains(&line), "{name} did not run");
    }
    common::say(&format!(
        "kvpack: Dawn, {}: {last}",
        text.lines().next().unwrap_or_default()
    ));
}

#[test]
fn dawn_runs_every_case_on_the_driver_of_the_machine() {
    if let Some(result) = dawn(portable()) {
        assert_all_ran(portable(), result, 0);
    }
}

#[test]
fn dawn_runs_every_case_on_swiftshader() {
    if let Some(result) = dawn_on_swiftshader(portable()) {
        assert_all_ran(portable(), result, 0);
    }
}

/// Two pairs, with per-channel scales on both sides.
const FEW: [&str; 6] = [
    "--kernel",
    "attention_split",
    "--pairs",
    "int8c/int4,int4/int4c",
    "--page-tokens",
    "32",
];

#[test]
fn reductions_in_subgroups_run_with_eight_and_with_four_lanes() {
    let folder = exported(
        "export-subgroups",
        &[&FEW[..], &["--reduction", "subgroup"]].concat(),
    );
    assert!(needing_features(&folder) > 0);
    for result in [dawn(&folder), dawn_on_swiftshader(&folder)]
        .into_iter()
        .flatten()
    {
        // Any driver of these tests has subgroups; a GPU may be without.
        if !result.1.contains("lacks subgroups") {
            assert_all_ran(&folder, result, 0);
        }
    }
}

#[test]
fn half_precision_runs_where_the_adapter_has_it_and_is_left_out_by_name_elsewhere() {
    let variant = [
        "--arithmetic",
        "f16",
        "--rows",
        "f16",
        "--queries",
        "f16",
        "--outputs",
        "f16",
    ];
    let options = [
        "--kernel",
        "attention_split",
        "--pairs",
        "int8,int4/int4c",
        "--page-tokens",
        "32",
    ];
    let folder = exported("export-f16", &[&options[..], &variant].concat());
    let all = needing_features(&folder) + manifest(&folder)["vectors"].as_array().unwrap().len();
    assert!(needing_features(&folder) > 0);
    for result in [dawn(&folder), dawn_on_swiftshader(&folder)]
        .into_iter()
        .flatten()
    {
        let lacks = result.1.contains("this adapter lacks shader-f16");
        assert_all_ran(&folder, result, if lacks { all } else { 0 });
    }
}

fn needing_features(folder: &Path) -> usize {
    let manifest = manifest(folder);
    let modules = manifest["modules"].as_array().unwrap();
    modules
        .iter()
        .filter(|module| module["portable"] == false)
        .count()
}

/// A copy of a folder with the case of a pair alone, and the modules that it runs.
fn one_case(folder: &Path, name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    let mut manifest = manifest(folder);
    let vectors = manifest["vectors"].as_array_mut().unwrap();
    vectors.retain(|entry| entry["case"] == name);
    let [entry] = &vectors[..] else {
        panic!("no case {name}")
    };
    let (used, vectors) = (
        entry["modules"].clone(),
        entry["folder"].as_str().unwrap().to_owned(),
    );
    let modules = manifest["modules"].as_array_mut().unwrap();
    modules.retain(|module| used.as_array().unwrap().contains(&module["name"]));
    for module in modules {
        let file = module["file"].as_str().unwrap();
        fs::copy(folder.join(file), copy.path().join(file)).unwrap();
    }
    fs::create_dir_all(copy.path().join(&vectors)).unwrap();
    for file in fs::read_dir(folder.join(&vectors)).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), copy.path().join(&vectors).join(file.file_name())).unwrap();
    }
    fs::write(copy.path().join("manifest.json"), manifest.to_string()).unwrap();
    copy
}

/// Changes a file.
fn change(file: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(file).unwrap();
    change(&mut bytes);
    fs::write(file, bytes).unwrap();
}

const CASE: &str = "attention-int4c-int4-decode";

#[test]
fn dawn_finds_a_flipped_bit_a_changed_output_and_a_broken_shader() {
    let vectors = format!("vectors/{CASE}");
    let whole = one_case(portable(), CASE);
    let spoilt = one_case(portable(), CASE);
    let Some((code, text)) = dawn(whole.path()) else {
        return;
    };
    assert_eq!(code, 0, "{text}");

    // Slot 9, head 1, channel 21 of the first page of the first sequence: 8 codes of 4 bits a word, 8 words a head of 64.
    let case: Value =
        serde_json::from_slice(&fs::read(spoilt.path().join(&vectors).join("case.json")).unwrap()).unwrap();
    let buffers = case["buffers"].as_array().unwrap();
    let geometry = &buffers.iter().find(|b| b["name"] == "k_pages").unwrap()["geometry"];
    let number = |name: &str| geometry[name].as_u64().unwrap() as usize;
    let page = case["sequences"][0]["k_pages"][0].as_u64().unwrap() as usize;
    let word = (number("head_words") + 21 / 8) * number("page_tokens") + 9;
    let at = 128 + 4 * (page * number("page_words") + word) + 21 % 8 / 2;
    let pages = spoilt.path().join(&vectors).join("k_pages.expected.npy");
    change(&pages, |bytes| bytes[at] ^= 0x10);
    let output = spoilt.path().join(&vectors).join("output.expected.npy");
    change(&output, |bytes| {
        let end = bytes.len();
        bytes[end - 8..].copy_from_slice(&1e3_f64.to_le_bytes());
    });
    let (code, text) = dawn(spoilt.path()).unwrap();
    assert_eq!(code, 1, "{text}");
    let line = |name: &str| {
        text.lines()
            .find(|l| l.starts_with(&format!("FAILED  {CASE}: {name}: ")))
            .expect(&text)
    };
    assert!(line("k_pages").contains(": 1 of "), "{text}");
    let place = format!("page {page}, word {word}, slot 9, head 1, channel 21, code: expected 0x");
    assert!(
        line("k_pages").contains(&place) && line("k_pages").contains("differing bits 0x00100000"),
        "{text}"
    );
    assert!(
        line("output").contains("token 1, query head 7, channel 63: expected 1000, found "),
        "{text}"
    );
    assert_eq!(
        text.lines().filter(|l| l.starts_with("FAILED ")).count(),
        2,
        "{text}"
    );

    let shader = whole.path().join("attention_merge-f32.wgsl");
    let source = fs::read_to_string(&shader).unwrap();
    let line = source.trim_end().lines().count() + 1;
    let broken = format!("{}\nfn broken() {{ nonsense(); }}\n", source.trim_end());
    fs::write(&shader, broken).unwrap();
    let (code, text) = dawn(whole.path()).unwrap();
    assert_eq!(code, 1, "{text}");
    let words = format!("attention_merge-f32.wgsl:{line}:");
    assert!(text.contains(&words) && text.contains("nonsense"), "{text}");
    assert!(
        text.contains(&format!("{CASE}: not run: attention_merge-f32 did not compile")),
        "{text}"
    );
}

#[test]
fn dawn_refuses_folders_that_are_none() {
    let folder = tempfile::tempdir().unwrap();
    for (manifest, words) in [
        (None, "no manifest.json"),
        (Some("{}"), "no file of kvpack"),
        (Some(r#"{"schema": "kvpack.shaders", "version": 9}"#), "version 9"),
    ] {
        if let Some(text) = manifest {
            fs::write(folder.path().join("manifest.json"), text).unwrap();
        }
        let (code, text) = dawn(folder.path()).unwrap();
        assert!(code == 2 && text.contains(words), "{code}: {text}");
    }
}

/// Changes the manifest of a folder.
fn change_manifest(folder: &Path, change: impl FnOnce(&mut Value)) {
    let mut manifest = manifest(folder);
    change(&mut manifest);
    fs::write(folder.join("manifest.json"), manifest.to_string()).unwrap();
}

#[test]
fn a_run_of_dawn_that_compares_nothing_is_no_pass() {
    for (fields, lacking, words) in [
        (&["vectors"][..], false, "the export has no cases"),
        (&["vectors", "modules"], false, "the export has no modules"),
        (&[], true, "every case needs what this adapter lacks"),
    ] {
        let folder = one_case(portable(), CASE);
        change_manifest(folder.path(), |manifest| {
            for field in fields {
                manifest[field] = Value::Array(Vec::new());
            }
            for module in manifest["modules"].as_array_mut().unwrap() {
                if lacking {
                    module["portable"] = false.into();
                    module["features"] = vec!["nope"].into();
                }
            }
        });
        let Some((code, text)) = dawn(folder.path()) else {
            return;
        };
        let told = format!("nothing was compared, which is no pass: {words}");
        assert!(code == 1 && text.contains(&told), "{code}: {text}");
    }
}

#[test]
fn dawn_opens_plain_names_alone_and_prints_no_control_characters() {
    for file in [
        "../x.wgsl",
        "%2e%2e/x.wgsl",
        "..%2fx.wgsl",
        "/x.wgsl",
        "./x.wgsl",
        "a//x.wgsl",
        "..\\x.wgsl",
    ] {
        let folder = one_case(portable(), CASE);
        change_manifest(folder.path(), |manifest| {
            manifest["modules"][0]["file"] = file.into()
        });
        let (code, text) = dawn(folder.path()).unwrap();
        let words = "modules[0].file: a path within the folder";
        assert!(code == 2 && text.contains(words), "{file}: {code}: {text}");
    }
    // Names, and words of the compiler.
    let folder = one_case(portable(), CASE);
    let name = "\u{1b}[2J\nok      forged\u{202e}\u{9b}";
    change_manifest(folder.path(), |manifest| {
        for module in manifest["modules"].as_array_mut().unwrap() {
            module["entry_point"] = name.into();
        }
        manifest["modules"][0]["name"] = name.into();
        manifest["vectors"][0]["case"] = name.into();
    });
    let Some((code, text)) = dawn(folder.path()) else {
        return;
    };
    assert!(code == 1 && text.contains("\\u{1b}[2J"), "{code}: {text}");
    assert!(!text.lines().any(|line| line.starts_with("ok ")), "{text}");
    assert!(!text.contains(['\u{1b}', '\u{202e}', '\u{9b}']), "{text:?}");
}

#[test]
fn dawn_asks_before_its_work_whether_the_results_can_be_written() {
    let folder = one_case(portable(), CASE);
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    for path in [at("missing/x.json"), at("vectors"), at("manifest.json/x.json")] {
        let (code, text) = dawn_with(folder.path(), &["--json", &path]).unwrap();
        assert!(
            code == 2 && text.lines().count() == 1 && text.starts_with("run.mjs: --json "),
            "{code}: {text}"
        );
    }
    let Some((code, text)) = dawn_with(folder.path(), &["--json", &at("x.json")]) else {
        return;
    };
    assert_eq!(code, 0, "{text}");
    let results: Value = serde_json::from_slice(&fs::read(at("x.json")).unwrap()).unwrap();
    assert_eq!(results["cases"][0]["case"], CASE);
    #[cfg(unix)]
    {
        // A link stays one.
        std::os::unix::fs::symlink(at("y.json"), at("link.json")).unwrap();
        assert_eq!(
            dawn_with(folder.path(), &["--json", &at("link.json")]).unwrap().0,
            0
        );
        assert!(fs::read_link(at("link.json")).is_ok());
        assert_eq!(fs::read(at("y.json")).unwrap()[..1], *b"{");
    }
    if cfg!(target_os = "linux") {
        let (code, text) = dawn_with(folder.path(), &["--json", "/dev/full"]).unwrap();
        assert!(
            code == 1 && text.contains("run.mjs: --json /dev/full: ENOSPC"),
            "{code}: {text}"
        );
        assert!(!text.contains("    at "), "{text}");
    }
}

#[test]
fn the_page_runs_every_case_in_chromium() {
    let script = common::path("tools/browser/page_test.mjs");
    let Some((code, text)) = run(Command::new("node").arg(script).arg(portable())) else {
        return;
    };
    assert!(code == 0 && text.contains(" tests, 0 failed"), "{text}");
    common::say(&format!("kvpack: Chromium:\n{text}"));
}

#[test]
fn golden_vectors_decode_with_numpy_by_the_written_layout() {
    let decode = |folder: &Path| common::python("tools/decode_pages.py", folder);
    let (code, text) = decode(portable());
    let last = text.lines().last().unwrap_or_default().to_owned();
    assert!(code == 0 && last.ends_with(" rows decoded, 0 wrong"), "{text}");
    common::say(&format!("kvpack: decode_pages.py: {last}"));

    let copy = one_case(portable(), CASE);
    let rows = copy.path().join(format!("vectors/{CASE}/k_rows.expected.npy"));
    change(&rows, |bytes| *bytes.last_mut().unwrap() ^= 0x80);
    let (code, text) = decode(copy.path());
    assert!(code == 1 && text.contains("head 1, channel 63"), "{text}");

    // What cannot be read fails by the name of its case, in one line.
    let case = copy.path().join(format!("vectors/{CASE}/case.json"));
    let whole = fs::read_to_string(&case).unwrap();
    let outside = whole.replace("\"k_rows.expected.npy\"", "\"../k_rows.expected.npy\"");
    let flat = whole.replace("\"page_tokens\": 32", "\"page_tokens\": 0");
    let missing = whole.replace("\"k_rows.expected.npy\"", "\"none.npy\"");
    for (bytes, words) in [
        (&b"\xff\0"[..], "UnicodeDecodeError"),
        (&b"["[..], "JSONDecodeError"),
        ("[".repeat(100_000).as_bytes(), "RecursionError"),
        (
            outside.as_bytes(),
            "'../k_rows.expected.npy' is no plain file name",
        ),
        (flat.as_bytes(), "the layout gives"),
        (missing.as_bytes(), "none.npy"),
    ] {
        assert_ne!(bytes, whole.as_bytes(), "{words}");
        fs::write(&case, bytes).unwrap();
        let (code, text) = decode(copy.path());
        let told = format!("FAILED  {CASE}: cannot be read: ");
        assert!(code == 1 && text.lines().count() == 2, "{code}: {text}");
        assert!(text.starts_with(&told) && text.contains(words), "{text}");
    }
}
