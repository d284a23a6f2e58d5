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

/// A script's exit code and output; None where it lacks a driver and KVPACK_ALLOW_NO_GPU=1: then the test is skipped, and
/// says so.
fn run(test: &str, command: &mut Command) -> Option<(i32, String)> {
    let program = command.get_program().to_string_lossy().into_owned();
    let run = command
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|e| panic!("{program} cannot be started ({e}). Run: eval \"$(tools/setup.sh)\""));
    let text = String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr);
    let code = run.status.code().unwrap_or(-1);
    assert_ne!(code, NO_PACKAGE, "{text}");
    if code == NO_DRIVER {
        let allowed = std::env::var_os("KVPACK_ALLOW_NO_GPU").is_some_and(|v| v == "1");
        assert!(allowed, "{text}\nor set KVPACK_ALLOW_NO_GPU=1 to skip the GPU tests");
        common::say(&format!("kvpack: skipped {test}: no driver or browser"));
        return None;
    }
    Some((code, text))
}

/// `tools/browser/run.mjs` on a folder.
fn dawn(folder: &Path, options: &[&str]) -> Command {
    let mut command = Command::new("node");
    command
        .arg(common::path("tools/browser/run.mjs"))
        .arg(folder)
        .args(options);
    command
}

/// The same on SwiftShader; None where it is not at hand, as KVPACK_ALLOW_NO_GPU=1 allows.
fn dawn_on_swiftshader(test: &str, folder: &Path) -> Option<Command> {
    let given = std::env::var_os("KVPACK_SWIFTSHADER_ICD").map(PathBuf::from);
    let found = given.or_else(|| {
        let installed = PathBuf::from(INSTALLED_SWIFTSHADER);
        installed.exists().then_some(installed)
    });
    let Some(icd) = found else {
        let allowed = std::env::var_os("KVPACK_ALLOW_NO_GPU").is_some_and(|v| v == "1");
        assert!(
            allowed,
            "SwiftShader is not at hand. Run: eval \"$(tools/setup.sh)\", or apt-get install -y --no-install-recommends \
             chromium; or set KVPACK_ALLOW_NO_GPU=1 to skip the GPU tests"
        );
        common::say(&format!("kvpack: skipped {test}: no SwiftShader"));
        return None;
    };
    let mut command = dawn(folder, &["--unzeroed"]);
    command.env("VK_DRIVER_FILES", &icd).env("VK_ICD_FILENAMES", &icd);
    Some(command)
}

/// Every module compiled, every case ran, nothing failed; `left_out` modules and cases need what the driver lacks.
fn assert_all_ran(folder: &Path, (code, text): (i32, String), left_out: usize) {
    let manifest = manifest(folder);
    let modules = manifest["modules"].as_array().unwrap();
    let cases = manifest["vectors"].as_array().unwrap();
    assert!(!modules.is_empty() && !cases.is_empty());
    let shown: String = text
        .lines()
        .filter(|line| !line.starts_with("ok "))
        .map(|line| format!("{line}\n"))
        .collect();
    assert_eq!(code, 0, "{shown}");
    let last = text.lines().find(|line| line.contains(" modules, ")).unwrap();
    assert!(
        last.starts_with(&format!("{} modules, ", modules.len()))
            && last.ends_with(&format!(" 0 failed, {left_out} left out")),
        "{shown}"
    );
    for case in cases {
        let name = case["case"].as_str().unwrap();
        let line = format!(" {name}: ");
        assert!(text.lines().any(|l| l.contains(&line)), "{name} did not run");
    }
    common::say(&format!("kvpack: Dawn: {last}"));
}

#[test]
fn dawn_runs_every_case_on_the_machines_driver() {
    let folder = portable();
    let Some(result) = run("dawn_runs_every_case", &mut dawn(folder, &[])) else { return };
    assert_all_ran(folder, result, 0);
}

#[test]
fn dawn_runs_every_case_on_swiftshader() {
    let folder = portable();
    let test = "dawn_runs_every_case_on_swiftshader";
    let Some(mut command) = dawn_on_swiftshader(test, folder) else { return };
    let Some(result) = run(test, &mut command) else { return };
    assert_all_ran(folder, result, 0);
}

#[test]
fn variants_with_features_run_where_the_adapter_has_them() {
    let options = ["--pairs", "int8,int4/int4c", "--kernel", "attention_split", "--page-tokens", "32"];
    let variant = ["--reduction", "subgroup", "--arithmetic", "f16"];
    let folder = exported("export-features", &[&options[..], &variant].concat());
    let portable = |m: &Value| m["portable"].as_bool().unwrap();
    let needing = manifest(&folder)["modules"].as_array().unwrap().iter().filter(|m| !portable(m)).count();
    assert!(needing > 0);
    if let Some(result) = run("variants_with_features", &mut dawn(&folder, &[])) {
        // A driver without f16 leaves the same out everywhere.
        let left_out = if result.1.contains("lacks shader-f16") { needing + cases(&folder) } else { 0 };
        assert_all_ran(&folder, result, left_out);
    }
    let test = "variants_with_features_run_on_swiftshader";
    let Some(mut command) = dawn_on_swiftshader(test, &folder) else { return };
    let Some(result) = run(test, &mut command) else { return };
    // It has subgroups and no f16.
    assert_all_ran(&folder, result, needing + cases(&folder));
}

fn cases(folder: &Path) -> usize {
    manifest(folder)["vectors"].as_array().unwrap().len()
}

/// A copy of a folder with the case of a pair alone, and the modules that it runs.
fn one_case(folder: &Path, name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    let mut manifest = manifest(folder);
    let vectors = manifest["vectors"].as_array_mut().unwrap();
    vectors.retain(|entry| entry["case"] == name);
    let [entry] = &vectors[..] else { panic!("no case {name}") };
    let (used, vectors) = (entry["modules"].clone(), entry["folder"].as_str().unwrap().to_owned());
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
    let test = "dawn_finds_what_is_spoilt";
    let vectors = format!("vectors/{CASE}");
    let whole = one_case(portable(), CASE);
    let spoilt = one_case(portable(), CASE);
    let Some((code, text)) = run(test, &mut dawn(whole.path(), &[])) else { return };
    assert_eq!(code, 0, "{text}");

    // Slot 9, head 1, channel 21 of the first page of the first sequence: 8 codes of 4 bits a word, 8 words a head of 64.
    let case: Value = serde_json::from_slice(&fs::read(spoilt.path().join(&vectors).join("case.json")).unwrap()).unwrap();
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
    let (code, text) = run(test, &mut dawn(spoilt.path(), &[])).unwrap();
    assert_eq!(code, 1, "{text}");
    let place = format!("1 of ");
    let line = |name: &str| text.lines().find(|l| l.starts_with(&format!("FAILED  {CASE}: {name}: "))).expect(&text);
    assert!(line("k_pages").contains(&place), "{text}");
    let place = format!("page {page}, word {word}, slot 9, head 1, channel 21, code: expected 0x");
    assert!(line("k_pages").contains(&place) && line("k_pages").contains("differing bits 0x00100000"), "{text}");
    assert!(line("output").contains("token 1, query head 7, channel 63: expected 1000, found "), "{text}");
    assert_eq!(text.lines().filter(|l| l.starts_with("FAILED ")).count(), 2, "{text}");

    let shader = whole.path().join("attention_merge-f32.wgsl");
    let source = fs::read_to_string(&shader).unwrap();
    let line = source.lines().count() + 1;
    fs::write(&shader, source + "\nfn broken() { nonsense(); }\n").unwrap();
    let (code, text) = run(test, &mut dawn(whole.path(), &[])).unwrap();
    assert_eq!(code, 1, "{text}");
    let words = format!("attention_merge-f32.wgsl:{line}:");
    assert!(text.contains(&words) && text.contains("nonsense"), "{text}");
    assert!(text.contains(&format!("{CASE}: not run: attention_merge-f32 did not compile")), "{text}");
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
        let (code, text) = run("dawn_refuses", &mut dawn(folder.path(), &[])).unwrap();
        assert!(code == 2 && text.contains(words), "{code}: {text}");
    }
}

#[test]
fn the_page_runs_every_case_in_chromium() {
    let mut command = Command::new("node");
    command.arg(common::path("tools/browser/page_test.mjs")).arg(portable());
    let Some((code, text)) = run("the_page_runs_every_case_in_chromium", &mut command) else { return };
    assert!(code == 0 && text.contains(" tests, 0 failed"), "{text}");
    common::say(&format!("kvpack: Chromium:\n{text}"));
}

#[test]
fn golden_vectors_decode_with_numpy_by_the_written_layout() {
    let decode = |folder: &Path| {
        let python = std::env::var("KVPACK_PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let mut command = Command::new(python);
        command.arg(common::path("tools/decode_pages.py")).arg(folder);
        let (code, text) = run("decode_pages", &mut command).unwrap();
        assert!(
            !text.contains("ModuleNotFoundError"),
            "{text}\nRun: eval \"$(tools/setup.sh)\", or python3 -m pip install -r tools/requirements.txt"
        );
        (code, text)
    };
    let (code, text) = decode(portable());
    let last = text.lines().last().unwrap_or_default().to_owned();
    assert!(code == 0 && last.ends_with(" rows decoded, 0 wrong"), "{text}");
    common::say(&format!("kvpack: decode_pages.py: {last}"));

    // Every element and layout of scales of the eight pairs was among them.
    let copy = one_case(portable(), CASE);
    let rows = copy.path().join(format!("vectors/{CASE}/k_rows.expected.npy"));
    change(&rows, |bytes| *bytes.last_mut().unwrap() ^= 0x80);
    let (code, text) = decode(copy.path());
    assert!(code == 1 && text.contains("head 1, channel 63"), "{text}");
}
