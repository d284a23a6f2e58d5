//! The command as its users meet it: exit codes, messages, and which stream carries what.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn kvpack(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvpack"));
    command.args(arguments).stdin(Stdio::null());
    // Without it some Vulkan drivers write lines of their own on standard error.
    command.env("XDG_RUNTIME_DIR", std::env::temp_dir());
    // What this user's adapter was tuned to is no business of the tests.
    command.env("KVPACK_TUNING", "");
    command
}

fn run(arguments: &[&str]) -> Output {
    kvpack(arguments).output().unwrap()
}

/// The same where no Vulkan driver can be found.
fn run_without_gpu(arguments: &[&str]) -> Output {
    kvpack(arguments)
        .env("VK_DRIVER_FILES", "/nowhere")
        .env("VK_ICD_FILENAMES", "/nowhere")
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Ends with the code, says `error: ` once on standard error with all of the words, and prints nothing else.
fn fails(output: &Output, code: i32, words: &[&str]) {
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert_eq!(message.matches("error: ").count(), 1, "{message}");
    for word in words {
        assert!(message.contains(word), "`{word}` is not in: {message}");
    }
    assert_eq!(text(&output.stdout), "");
}

/// The quickest measurement there is.
const QUICK: [&str; 5] = ["drift", "--device", "cpu", "--pairs", "f16"];

fn quick(more: &[&str]) -> Output {
    run(&[&QUICK, more].concat())
}

fn path_in(folder: &Path, name: &str) -> String {
    folder.join(name).to_str().unwrap().to_owned()
}

#[test]
fn wrong_arguments_are_usage_errors_that_name_the_value_and_the_choices() {
    for (arguments, words) in [
        (
            &["drift", "--pairs", "int3"][..],
            &["int3", "--pairs", "fp8", "int4c(G)"][..],
        ),
        (
            &["drift", "--pairs", "f16,int4c(7)"],
            &["int4c(7)", "8, 16, 32, 64"],
        ),
        (&["drift", "--pairs", "f16/"], &["f16"]),
        (&["validate", "--pairs", "q4_0"], &["q4_0", "int4"]),
        (
            &["validate", "--kernel", "quantise"],
            &["quantise", "quantize", "attention_split"],
        ),
        (&["drift", "--convention", "real"], &["real", "packed, published"]),
        (&["drift", "--mode", "chunks"], &["chunks", "prefill, decode"]),
        (&["drift", "--device", "tpu"], &["tpu", "gpu", "cpu", "auto"]),
        (&["drift", "--backend", "cuda"], &["cuda", "vulkan, metal"]),
        (
            &["drift", "--outlier", "0"],
            &["--outlier", "finite number above 0"],
        ),
        (&["drift", "--outlier", "-4"], &["-4", "finite number above 0"]),
        (&["drift", "--outlier", "inf"], &["inf", "finite number above 0"]),
        (&["drift", "--outlier", "NaN"], &["NaN", "finite number above 0"]),
        (
            &["drift", "--outlier", "-inf"],
            &["--outlier", "-inf", "finite number above 0"],
        ),
        (
            &["drift", "--outlier=-NaN"],
            &["--outlier", "-NaN", "finite number above 0"],
        ),
        (
            &["drift", "--window", "-1"],
            &["--window", "-1", "from 0 to 4096"],
        ),
        (
            &["drift", "--window", "1e99"],
            &["--window", "1e99", "from 0 to 4096"],
        ),
        (
            &["drift", "--window", "-x"],
            &["--window", "-x", "from 0 to 4096"],
        ),
        (&["drift", "--window", "4097"], &["4097", "4096"]),
        (&["drift", "--adapter", ""], &["--adapter", "empty"]),
        (&["validate", "--adapter", " "], &["--adapter", "empty"]),
        (&["drift", "--what"], &["--what"]),
        (&["bench", "--pairs", "int3"], &["int3", "--pairs", "fp8"]),
        (&["bench", "encode"], &["encode", "decode", "append", "prefill"]),
        (&["bench", "--like", "gpt-5"], &["gpt-5", "llama-3-8b"]),
        (
            &["bench", "--like", "llama-3-8b", "--head-dim", "64"],
            &["--like", "--head-dim"],
        ),
        (&["bench", "--context", "0"], &["--context", "0"]),
        (&["tune", "append"], &["append", "decode", "prefill"]),
        (&["tune", "--dry-run", "--file", "x"], &["--dry-run", "--file"]),
        (&["tune", "--seconds", "nan"], &["--seconds", "nan"]),
        (&["tune"], &["KVPACK_TUNING", "--file"]),
        (&["bench", "--batch", "0"], &["--batch", "0"]),
        (
            &["bench", "--seconds", "0"],
            &["--seconds", "finite number above 0"],
        ),
        (
            &["bench", "--memory", "inf"],
            &["--memory", "finite number above 0"],
        ),
        (&["bench", "--cache-size", "0"], &["--cache-size", "0"]),
        (&["bench", "--tokens", "4"], &["--tokens 4", "prefill"]),
        (
            &["bench", "--baseline", "/missing.json"],
            &["/missing.json", "kvpack bench --json"],
        ),
        (&["bench", "--plot", "b.pdf"], &["b.pdf", ".svg or .png"]),
        (&["quantise"], &["quantise"]),
        (
            &["drift", "--convention", "published", "--mode", "decode"],
            &["published", "decode", "--mode prefill"],
        ),
        (
            &["drift", "--device", "cpu", "--adapter", "x"],
            &["--adapter x", "cpu"],
        ),
        (
            &["drift", "--device", "cpu", "--backend", "vulkan"],
            &["--backend vulkan"],
        ),
    ] {
        fails(&run(arguments), 2, words);
    }
    assert_eq!(run(&[]).status.code(), Some(2));
}

#[test]
fn an_unknown_adapter_is_a_usage_error_and_a_missing_one_a_failure() {
    let name = "no adapter has this name";
    // Where there is no adapter at all, that is what is wrong, and no argument.
    let (code, words) = if run(&["info", "--json", "-"]).stdout == b"[]\n" {
        (1, "adapter")
    } else {
        (2, name)
    };
    for subcommand in ["drift", "validate", "bench"] {
        fails(&run(&[subcommand, "--adapter", name]), code, &[words]);
    }
    fails(
        &run_without_gpu(&["drift", "--device", "gpu", "--pairs", "f16"]),
        1,
        &["adapter"],
    );
    fails(&run_without_gpu(&["validate"]), 1, &["adapter"]);
    // No CPU stands in for an adapter here.
    fails(&run_without_gpu(&["bench"]), 1, &["adapter"]);
}

#[test]
fn without_an_adapter_auto_takes_the_cpu_and_says_so() {
    let output = run_without_gpu(&["drift", "--pairs", "f16"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stderr).contains("CPU reference"));
    assert!(text(&output.stdout).contains("| f16 "));

    let output = run_without_gpu(&["info", "--json", "-"]);
    assert_eq!(
        (output.status.code(), text(&output.stdout).as_str()),
        (Some(0), "[]\n")
    );
    assert!(text(&output.stderr).contains("no GPU adapter"));
}

#[test]
fn files_that_cannot_be_written_are_refused_before_the_work() {
    let folder = tempfile::tempdir().unwrap();
    let a_file = path_in(folder.path(), "file");
    std::fs::write(&a_file, "old").unwrap();
    for (option, path, reason) in [
        (
            "--json",
            path_in(folder.path(), "missing/rows.json"),
            "does not exist",
        ),
        (
            "--csv",
            folder.path().to_str().unwrap().to_owned(),
            "it is a folder",
        ),
        (
            "--plot",
            path_in(folder.path(), "missing/drift.svg"),
            "does not exist",
        ),
        ("--plot", path_in(folder.path(), "drift.pdf"), ".svg or .png"),
        ("--plot", "-".to_owned(), ".svg or .png"),
        ("--json", String::new(), "empty"),
        ("--json", format!("{a_file}/rows.json"), "folder"),
        ("--json", path_in(folder.path(), "new.json/"), "names a folder"),
        (
            "--csv",
            path_in(folder.path(), &"n".repeat(300)),
            "no file can have this name",
        ),
    ] {
        fails(&quick(&[option, &path]), 2, &[&path, reason]);
    }
    let twice = quick(&["--json", &a_file, "--csv", &a_file]);
    fails(&twice, 2, &["--json", "--csv", "its own file"]);
    // One bad file among good ones: none is written.
    let good = path_in(folder.path(), "rows.json");
    fails(
        &quick(&["--json", &good, "--csv", "/missing/rows.csv"]),
        2,
        &["/missing"],
    );
    assert!(!Path::new(&good).exists());
    assert_eq!(std::fs::read(&a_file).unwrap(), b"old");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    fails(
        &run(&["validate", "--json", "/missing/rows.json"]),
        2,
        &["/missing"],
    );
    fails(&run(&["info", "--json", "/missing/rows.json"]), 2, &["/missing"]);
}

#[test]
fn a_dash_is_standard_output_alone() {
    let output = quick(&["--json", "-"]);
    assert_eq!(output.status.code(), Some(0));
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&rows[0]["pair"], &rows[0]["predictions"]),
        (&"f16".into(), &128.into())
    );

    let output = quick(&["--csv", "-"]);
    let lines: Vec<String> = text(&output.stdout).lines().map(str::to_owned).collect();
    assert!(
        lines.len() == 2 && lines[0].starts_with("pair,bits_per_number,") && lines[1].starts_with("f16,16")
    );

    fails(
        &quick(&["--json", "-", "--csv", "-"]),
        2,
        &["--json -", "--csv -"],
    );
}

#[test]
fn every_report_comes_from_one_run_and_a_pipe_gets_no_progress_and_no_colour() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name| path_in(folder.path(), name);
    let (json, csv, plot) = (path("rows.json"), path("rows.csv"), path("drift.svg"));
    std::fs::write(&json, "old").unwrap();
    let output = quick(&["--json", &json, "--csv", &csv, "--plot", &plot]);
    assert_eq!(
        (output.status.code(), text(&output.stderr).as_str()),
        (Some(0), "")
    );
    let table = text(&output.stdout);
    assert!(
        table.contains("| f16 ") && table.contains("/128") && !table.contains('\u{1b}'),
        "{table}"
    );
    let rows: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(rows.as_array().unwrap().len(), 1);
    assert!(std::fs::read_to_string(&csv).unwrap().contains("\nf16,"));
    assert!(std::fs::read_to_string(&plot).unwrap().contains("<svg"));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
}

#[test]
fn a_closed_pipe_is_no_error() {
    for arguments in [
        &QUICK[..],
        &[&QUICK[..], &["--json", "-"]].concat(),
        &["--help"],
        &["info"],
    ] {
        let mut child = kvpack(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let mut message = String::new();
        child.stderr.take().unwrap().read_to_string(&mut message).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0), "{arguments:?}: {message}");
        assert!(
            !message.contains("panicked") && !message.contains("error"),
            "{message}"
        );
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_a_failure_that_names_the_file() {
    let output = quick(&["--json", "/dev/full"]);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(
        message.contains("error: `/dev/full` could not be written"),
        "{message}"
    );
    assert!(
        text(&output.stdout).contains("| f16 "),
        "the table is not lost with the file"
    );

    let folder = tempfile::tempdir().unwrap();
    let json = path_in(folder.path(), "rows.json");
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = kvpack(&[&QUICK[..], &["--json", &json]].concat());
    assert_eq!(
        command
            .stdout(full)
            .stderr(Stdio::null())
            .status()
            .unwrap()
            .code(),
        Some(1)
    );
    assert!(
        std::fs::read_to_string(&json).unwrap().contains("f16"),
        "nor the file with the table"
    );
}

#[test]
fn two_reports_never_go_to_one_file_by_any_name() {
    let folder = tempfile::tempdir().unwrap();
    let there = |arguments: &[&str]| {
        kvpack(&[&QUICK, arguments].concat())
            .current_dir(folder.path())
            .output()
            .unwrap()
    };
    std::fs::write(folder.path().join("old.json"), "old").unwrap();
    std::fs::hard_link(folder.path().join("old.json"), folder.path().join("hard.csv")).unwrap();
    let absolute = path_in(folder.path(), "a.json");
    let mut same = vec![
        ("a.json", "./a.json"),
        ("a.json", &absolute),
        ("old.json", "hard.csv"),
    ];
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("a.json", folder.path().join("link.csv")).unwrap();
        std::os::unix::fs::symlink("old.json", folder.path().join("old.csv")).unwrap();
        same.extend([("a.json", "link.csv"), ("old.json", "old.csv")]);
    }
    for (json, csv) in same {
        let words = [&format!("--json {json}"), &format!("--csv {csv}"), "its own file"];
        fails(&there(&["--json", json, "--csv", csv]), 2, &words);
    }
    assert!(!Path::new(&absolute).exists());
    assert_eq!(std::fs::read(folder.path().join("old.json")).unwrap(), b"old");
}

#[cfg(unix)]
#[test]
fn a_link_to_a_file_that_is_not_there_yet_makes_it() {
    let folder = tempfile::tempdir().unwrap();
    let link = path_in(folder.path(), "link.json");
    std::os::unix::fs::symlink("target.json", &link).unwrap();
    let output = quick(&["--json", &link]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    let written = std::fs::read_to_string(folder.path().join("target.json")).unwrap();
    assert!(written.contains("\"f16\""), "{written}");
}

#[cfg(unix)]
#[test]
fn the_names_of_standard_output_mean_the_same_as_a_dash() {
    let folder = tempfile::tempdir().unwrap();
    let path = path_in(folder.path(), "t.txt");
    let redirected = |arguments: &[&str]| {
        let output = kvpack(&[&QUICK, arguments].concat())
            .stdout(std::fs::File::create(&path).unwrap())
            .output()
            .unwrap();
        (output, std::fs::read_to_string(&path).unwrap())
    };
    let (_, wanted) = redirected(&["--csv", "-"]);
    assert!(
        wanted.starts_with("pair,") && wanted.lines().count() == 2,
        "{wanted}"
    );
    let mut names = vec!["/dev/stdout", "/dev/fd/1"];
    if cfg!(target_os = "linux") {
        names.push("/proc/self/fd/1");
    }
    for name in names {
        let (output, got) = redirected(&["--csv", name]);
        assert_eq!(
            (output.status.code(), got.as_str()),
            (Some(0), wanted.as_str()),
            "{name}"
        );
        fails(&quick(&["--csv", name, "--json", "-"]), 2, &[name, "--json -"]);
    }
    // The table and the rows would end in one file, and one of them be lost.
    let (output, got) = redirected(&["--csv", &path]);
    fails(
        &output,
        2,
        &[&format!("--csv {path}"), "standard output goes to the same file"],
    );
    assert_eq!(got, "");
}

/// Whether there is an adapter; none is a failure unless it is allowed.
fn has_adapter() -> bool {
    let has = run(&["info", "--json", "-"]).stdout != b"[]\n";
    let allowed = std::env::var_os("KVPACK_ALLOW_NO_GPU").is_some_and(|value| value == "1");
    assert!(
        has || allowed,
        "no GPU adapter; set KVPACK_ALLOW_NO_GPU=1 to skip what needs one"
    );
    has
}

/// The quickest benchmark there is.
const QUICK_BENCH: [&str; 9] = [
    "--q-heads",
    "4",
    "--kv-heads",
    "2",
    "--head-dim",
    "32",
    "--seconds",
    "0.01",
    "--memory=0.01",
];

fn bench(more: &[&str]) -> Output {
    run(&[&["bench"], more, &QUICK_BENCH].concat())
}

#[test]
fn bench_writes_every_report_and_compares_with_an_earlier_run() {
    if !has_adapter() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name| path_in(folder.path(), name);
    let (json, csv, plot, record) = (path("b.json"), path("b.csv"), path("b.svg"), path("record"));
    let case = ["--pairs", "int8", "--context", "256"];
    let files = [
        "--json", &json, "--csv", &csv, "--plot", &plot, "--record", &record,
    ];
    let output = bench(&[&case[..], &files].concat());
    // So small a cache may be read faster than memory: then that is said.
    let code = output.status.code();
    let message = text(&output.stderr);
    assert!(code == Some(0) || message.contains("above the roof"), "{message}");
    let table = text(&output.stdout);
    for words in [
        "adapter ",
        "timing ",
        "cache ",
        "warm-up ",
        "samples ",
        "read_stride",
        "| int8 ",
        "f16 was not measured",
        "drift 0.0019",
    ] {
        assert!(table.contains(words), "`{words}` is not in: {table}");
    }
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(report["schema"], 1);
    assert_eq!(report["roofs"].as_array().unwrap().len(), 4);
    let row = &report["rows"][0];
    assert_eq!((&row["work"], &row["pair"]), (&"decode".into(), &"int8".into()));
    // K and V, 2 heads: 32 codes of a byte and a scale of two.
    assert_eq!(
        (&row["code_bytes"], &row["scale_bytes"]),
        (&(256 * 128).into(), &(256 * 8).into())
    );
    assert!(row["samples"].as_array().unwrap().len() >= 5);
    assert!(
        std::fs::read_to_string(&csv)
            .unwrap()
            .contains("\ndecode,int8,256,")
    );
    assert!(std::fs::read_to_string(&plot).unwrap().contains("<svg"));
    let adapter = std::fs::read_dir(&record).unwrap().next().unwrap().unwrap();
    assert_eq!(std::fs::read_dir(adapter.path()).unwrap().count(), 2);

    let output = bench(&[&case[..], &["--baseline", &json, "--no-advice"]].concat());
    let table = text(&output.stdout);
    assert!(
        table.contains("| baseline ") && ["same", "SLOWER x", "faster x"].iter().any(|m| table.contains(m)),
        "{table}"
    );
    fails(&bench(&["--baseline", &csv]), 2, &[&csv, "kvpack bench --json"]);
}

#[test]
fn bench_times_appends_and_prefill_and_says_what_is_left_out() {
    if !has_adapter() {
        return;
    }
    for work in ["append", "prefill"] {
        let output = bench(&[work, "--pairs", "f16,int4", "--tokens", "32", "--context", "64"]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let table = text(&output.stdout);
        let words = [
            format!("{work} of 32 new tokens"),
            "| int4 ".to_owned(),
            "x1.00".to_owned(),
        ];
        assert!(
            words.iter().all(|w| table.contains(w)) && !table.contains("read_stride"),
            "{table}"
        );
    }
    let output = bench(&[
        "append",
        "--pairs",
        "int4,int4c(128)",
        "--tokens",
        "8",
        "--context",
        "1000000",
    ]);
    fails(&output, 2, &["no case is left", "memory allowed"]);
}

#[test]
fn validate_runs_the_kernels_that_are_named_and_refuses_when_none_fits() {
    if !has_adapter() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let json = path_in(folder.path(), "rows.json");
    let output = run(&[
        "validate", "--kernel", "amax", "--kernel", "residual", "--json", &json,
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    for words in ["| amax ", "| residual ", "2 checks passed, 0 failed"] {
        assert!(shown.contains(words), "{words} is not in: {shown}");
    }
    let rows: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(
        (&rows[0]["kernel"], &rows[1]["passed"]),
        (&"amax".into(), &true.into())
    );
    assert_eq!(rows.as_array().unwrap().len(), 2);

    let before = std::fs::read(&json).unwrap();
    let none = [
        "validate",
        "--kernel",
        "quantize_group",
        "--pairs",
        "f16,int4/int8",
    ];
    let words = [
        "--kernel quantize_group",
        "--pairs f16,int4/int8",
        "nothing to validate",
    ];
    fails(&run(&none), 2, &words);
    fails(&run(&[&none[..], &["--json", &json]].concat()), 2, &words);
    assert_eq!(std::fs::read(&json).unwrap(), before);

    let some = run(&[
        "validate",
        "--kernel",
        "amax",
        "--kernel",
        "quantize_group",
        "--pairs",
        "f16",
    ]);
    assert_eq!(some.status.code(), Some(0));
    let message = text(&some.stderr);
    assert!(message.contains("no check of quantize_group fits"), "{message}");
}

#[test]
fn the_table_and_the_rows_say_what_was_used_and_what_was_made() {
    let output = quick(&["--json", "-", "--window", "8"]);
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let bytes = |field: &str| rows[0][field].as_u64().expect(field);
    let parts = bytes("code_bytes") + bytes("scale_bytes") + bytes("padding_bytes");
    assert_eq!(parts, bytes("cache_bytes"));
    assert!(bytes("allocated_bytes") >= bytes("cache_bytes"));
    let table = text(&quick(&["--window", "8"]).stdout);
    for words in [
        "cache bytes | allocated |",
        "- allocated: ",
        "Window 8 changes nothing",
    ] {
        assert!(table.contains(words), "{words} is not in: {table}");
    }
}

/// Llama 3 8B.
const LLAMA: [&str; 7] = ["plan", "--layers", "32", "--kv-heads", "8", "--head-dim", "128"];

fn plan(more: &[&str]) -> Output {
    run_without_gpu(&[&LLAMA, more].concat())
}

#[test]
fn a_plan_tells_what_a_model_takes_and_what_fits_without_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let csv = path_in(folder.path(), "rows.csv");
    let output = plan(&["--budget", "8GiB", "--csv", &csv]);
    assert_eq!(
        (output.status.code(), text(&output.stderr).as_str()),
        (Some(0), "")
    );
    let table = text(&output.stdout);
    for words in [
        "32 layers, 8 KV heads of 128; context 32768, batch 1; pages of 64 tokens, window 0",
        "computed, not measured",
        "| f16        |     16 |      131072 |",
        "| int8       |  8.125 |       66560 |         65536 + 1024 + 0 |",
        "Within 8 GiB (8589934592 bytes):",
    ] {
        assert!(table.contains(words), "{words} is not in: {table}");
    }
    let rows = std::fs::read_to_string(&csv).unwrap();
    assert!(rows.starts_with("pair,bits_per_number,bytes_per_token,") && rows.lines().count() == 9);
    assert!(rows.contains("\nint4,4.125,33792.0,"), "{rows}");

    let output = plan(&["--budget", "8GiB", "--json", "-", "--pairs", "f16,int4"]);
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    for (row, bytes, longest, batch) in [(0, 131_072, 65536, 2), (1, 33792, 254_144, 7)] {
        let field = |name: &str| rows[row][name].as_u64().expect(name);
        assert_eq!(field("total_bytes"), 32768 * bytes);
        assert_eq!(
            (field("longest_context"), field("largest_batch")),
            (longest, batch)
        );
    }
    let output = plan(&["--json", "-", "--pairs", "f16"]);
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(rows[0]["longest_context"].is_null());

    let table = text(&plan(&["--budget", "1MiB"]).stdout);
    assert!(
        table.contains("- f16: the budget holds less than a page for each sequence"),
        "{table}"
    );
}

#[test]
fn the_plan_of_the_readme_is_what_the_command_prints() {
    let table = text(&plan(&["--batch", "4", "--budget", "24GiB"]).stdout);
    let readme = include_str!("../README.md").replace("\r\n", "\n");
    assert!(
        readme.contains(&format!("<!-- plan -->\n{table}<!-- /plan -->\n")),
        "{table}"
    );
}

#[test]
fn a_plan_reads_a_configuration_and_leaves_out_what_does_not_fit() {
    let folder = tempfile::tempdir().unwrap();
    let config = path_in(folder.path(), "config.json");
    std::fs::write(
        &config,
        r#"{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 32}"#,
    )
    .unwrap();
    let output = run(&["plan", "--config", &config, "--layers", "3", "--batch", "2"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).starts_with("3 layers, 1 KV head of 8; context 32768, batch 2;"));
    let message = text(&output.stderr);
    assert!(
        message.starts_with("fp4 is left out: ") && message.lines().count() == 1,
        "{message}"
    );

    let wrong = &["plan", "--config", &config, "--head-dim", "100"];
    fails(&run(wrong), 2, &["head_dim = 100"]);
    std::fs::write(&config, "{}").unwrap();
    fails(
        &run(&["plan", "--config", &config]),
        2,
        &[&config, "num_hidden_layers"],
    );
    std::fs::write(&config, "").unwrap();
    fails(&run(&["plan", "--config", &config]), 2, &[&config, "no JSON"]);
    for (missing, words) in [("/missing/config.json", "cannot be read"), ("", "--config")] {
        fails(&run(&["plan", "--config", missing]), 2, &[words]);
    }
}

#[test]
fn a_plan_that_cannot_be_is_refused_by_name() {
    fails(&run(&["plan"]), 2, &["--layers", "--config"]);
    for (arguments, words) in [
        (&["--context", "0"][..], &["--context", "0 is not in 1.."][..]),
        (&["--context", "-1"], &["--context", "-1 is not in 1.."]),
        (&["--context", "NaN"], &["--context", "NaN"]),
        (&["--context", "3000000000"], &["context = 3000000000"]),
        (&["--batch", "100000"], &["sequences = 100000", "65536"]),
        (
            &["--batch", "65536", "--context", "1000000000"],
            &["65536 sequences of 1000000000 tokens"],
        ),
        (&["--batch", "1e5"], &["--batch", "1e5"]),
        (&["--window", "65537"], &["window = 65537", "65536"]),
        (&["--sink-tokens", "-4"], &["--sink-tokens", "-4 is not in 0.."]),
        (&["--page-tokens", "60"], &["page_tokens = 60"]),
        (&["--k-head-dim", "12"], &["head_dim = 12"]),
        (&["--pairs", "int3"], &["int3", "--pairs"]),
        (&["--budget", "8G"], &["--budget", "`G` is no unit", "8GiB"]),
        (&["--budget", "-8GiB"], &["--budget", "-8GiB", "digit"]),
        (&["--budget", "99999999999GiB"], &["--budget", "2^64 - 1"]),
        (&["--json", "/missing/rows.json"], &["/missing"]),
        (&["--json", "-", "--csv", "-"], &["--json -", "--csv -"]),
    ] {
        fails(&plan(arguments), 2, words);
    }
}

#[test]
fn the_tuner_keeps_what_it_found_and_other_commands_use_it() {
    if !has_adapter() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = path_in(folder.path(), "kept/tuning.json");
    let shape = ["--q-heads", "2", "--kv-heads", "1", "--head-dim", "16"];
    let small = ["--context", "64", "--memory", "0.001", "--seconds", "0.001"];
    let with_file = |arguments: &[&str]| {
        let all = [arguments, &shape, &small, &["--pairs", "int8"]].concat();
        kvpack(&all).env("KVPACK_TUNING", &file).output().unwrap()
    };
    // A file that is something else is refused before any work, and stays.
    std::fs::create_dir(folder.path().join("kept")).unwrap();
    std::fs::write(&file, "[1, 2]").unwrap();
    fails(&with_file(&["tune"]), 2, &["tuning.json", "deleting the file"]);
    fails(&with_file(&["bench", "--no-advice"]), 2, &["tuning.json"]);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "[1, 2]");
    std::fs::remove_dir_all(folder.path().join("kept")).unwrap();

    let dry = with_file(&["tune", "--dry-run"]);
    assert!(dry.status.success(), "{}", text(&dry.stderr));
    assert!(text(&dry.stdout).contains("| int8 |") && !Path::new(&file).exists());
    let done = with_file(&["tune", "--json", "-"]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(report["rows"][0]["pair"], "int8");
    assert!(report["rows"][0]["trials"].as_array().unwrap().len() > 5);
    let kept: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(kept["adapters"][0]["entries"][0]["pair"], "int8");

    // Used where it holds, and not where it is not wanted.
    let tuned = |arguments: &[&str]| {
        let output = with_file(&[&["bench", "--no-advice", "--json", "-"], arguments].concat());
        assert!(
            matches!(output.status.code(), Some(0 | 1)),
            "{}",
            text(&output.stderr)
        );
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        report["rows"][0]["tuned"].clone()
    };
    assert_eq!(tuned(&[]), true);
    assert_eq!(tuned(&["--no-tuning"]), false);
}

/// A .npy file of f32 numbers.
fn write_npy(file: &Path, shape: &str, numbers: &[f32]) {
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    std::fs::write(file, bytes).unwrap();
}

#[test]
fn analyze_measures_the_tensors_of_a_file_without_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("past_keys.npy");
    // Two layers of 40 tokens, 2 heads of 8; channel 5 of layer 1 stands out.
    let numbers: Vec<f32> = (0..2 * 40 * 16)
        .map(|i| {
            let x = ((i * 37) % 101) as f32 / 101.0 - 0.5;
            if i >= 640 && i % 8 == 5 { x * 100.0 } else { x }
        })
        .collect();
    write_npy(&file, "(2, 40, 2, 8)", &numbers);
    let path = file.to_str().unwrap();
    let [json, csv, plot] = ["rows.json", "rows.csv", "map.svg"].map(|name| path_in(folder.path(), name));
    let output = run_without_gpu(&["analyze", path, "--json", &json, "--csv", &csv, "--plot", &plot]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "", "a pipe gets no progress");
    let table = text(&output.stdout);
    assert!(
        table.contains("40 x 2 x 8") && table.contains("int4c has 32 of 40 tokens packed"),
        "{table}"
    );
    let rows: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 2 * 8);
    let figure = |layer: u64, side: &str, field: &str| {
        let row = rows
            .iter()
            .find(|row| row["layer"] == layer && row["side"] == side)
            .unwrap();
        assert_eq!(
            (&row["which"], &row["tensor"]),
            (&"K".into(), &"past_keys".into())
        );
        row[field].as_f64().unwrap()
    };
    assert!(figure(0, "int4", "outlier_ratio") < 1.2 && figure(1, "int4", "outlier_ratio") > 80.0);
    // The outlier's own error counts most, and it has the same codes in both; the others are lost per token alone.
    assert!(figure(0, "int4", "relative_l2") < 0.1 && figure(0, "int4c", "relative_l2") < 0.1);
    assert_eq!(figure(1, "int4c", "packed_tokens"), 32.0);
    assert_eq!(std::fs::read_to_string(&csv).unwrap().lines().count(), 1 + 16);
    let map = std::fs::read_to_string(&plot).unwrap();
    assert!(map.contains("relative L2 error, log scale") && map.contains("K, a row a layer"));

    // Heads first: the same numbers in another order give the same figures.
    let turned: Vec<f32> = (0..2 * 40 * 16)
        .map(|i| {
            let (layer, head, token, channel) = (i / 640, i / 320 % 2, i / 8 % 40, i % 8);
            numbers[layer * 640 + token * 16 + head * 8 + channel]
        })
        .collect();
    write_npy(&file, "(2, 2, 40, 8)", &turned);
    let again = run(&["analyze", path, "--heads-first", "--json", "-"]);
    assert_eq!(again.stdout, std::fs::read(&json).unwrap());
}

#[test]
fn analyze_refuses_what_is_no_dump_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("k.npy");
    let path = file.to_str().unwrap();
    let plot = path_in(folder.path(), "map.png");
    let refused = |arguments: &[&str], words: &[&str]| {
        fails(&run(&[&["analyze"], arguments].concat()), 2, words);
        assert!(!Path::new(&plot).exists(), "nothing half written");
    };
    let mut numbers = [0.5; 64];
    numbers[37] = f32::NAN;
    write_npy(&file, "(4, 2, 8)", &numbers);
    refused(&[path, "--plot", &plot], &["tensor `k`", "NaN, at index 37"]);
    write_npy(&file, "(8, 8)", &[0.5; 64]);
    refused(&[path], &["tensor `k` has shape [8, 8]", "three axes"]);
    write_npy(&file, "(4, 1, 12)", &[0.5; 48]);
    refused(&[path], &["head_dim = 12", "multiple of 8"]);
    write_npy(&file, "(4, 2, 8)", &[0.5; 63]);
    refused(&[path], &["k.npy", "truncated or damaged"]);
    write_npy(&file, "(4, 2, 8)", &[0.5; 64]);
    refused(&[path, "--tensor", "v"], &["no tensor `v`", "it has 1: k"]);
    refused(&[path, "--sides", "int3"], &["int3", "int4c(G)"]);
    refused(&[path, "--plot", "map.jpg"], &["map.jpg", ".svg or .png"]);
    refused(
        &[&path_in(folder.path(), "k.pt")],
        &["k.pt", "neither .safetensors nor .npy"],
    );
    refused(
        &[&path_in(folder.path(), "no.npy")],
        &["no.npy", "cannot be read"],
    );
    // A format that a shape has no room for is left out, and said.
    write_npy(&file, "(4, 1, 8)", &[0.5; 32]);
    let output = run(&["analyze", path, "--sides", "fp4,int8"]);
    assert!(output.status.success());
    assert!(
        text(&output.stderr).contains("fp4 is left out of k: "),
        "{}",
        text(&output.stderr)
    );
    refused(&[path, "--sides", "fp4"], &["blocks of 16 channels"]);
}

/// A Hugging Face folder of a small model: 1 layer, 2 query heads over 1 KV head of 8, 12 words.
fn write_model(folder: &Path) -> String {
    let shapes = [
        ("model.embed_tokens", vec![12_u64, 16]),
        ("model.norm", vec![16]),
        ("model.layers.0.input_layernorm", vec![16]),
        ("model.layers.0.self_attn.q_proj", vec![16, 16]),
        ("model.layers.0.self_attn.k_proj", vec![8, 16]),
        ("model.layers.0.self_attn.v_proj", vec![8, 16]),
        ("model.layers.0.self_attn.o_proj", vec![16, 16]),
        ("model.layers.0.post_attention_layernorm", vec![16]),
        ("model.layers.0.mlp.gate_proj", vec![24, 16]),
        ("model.layers.0.mlp.up_proj", vec![24, 16]),
        ("model.layers.0.mlp.down_proj", vec![16, 24]),
    ];
    let (mut header, mut bytes) = (Vec::new(), Vec::new());
    let mut state = 7_u32;
    for (name, shape) in shapes {
        let begin = bytes.len();
        for _ in 0..shape.iter().product() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = (state >> 8) as f32 / (1 << 23) as f32 - 1.0;
            bytes.extend(value.to_le_bytes());
        }
        let end = bytes.len();
        header.push(format!(
            r#""{name}.weight":{{"dtype":"F32","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#
        ));
    }
    let header = format!("{{{}}}", header.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(bytes);
    std::fs::write(folder.join("model.safetensors"), file).unwrap();
    let config = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 12, "hidden_size": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "intermediate_size": 24,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": true,
        "hidden_act": "silu", "eos_token_id": 11}"#;
    std::fs::write(folder.join("config.json"), config).unwrap();
    let words: Vec<_> = (0..12)
        .map(|i| format!(r#""{}":{i}"#, char::from(b'a' + i)))
        .collect();
    let tokenizer = format!(
        r#"{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {{"type": "Whitespace"}}, "post_processor": null, "decoder": null,
        "model": {{"type": "WordLevel", "vocab": {{{}}}, "unk_token": "a"}}}}"#,
        words.join(",")
    );
    std::fs::write(folder.join("tokenizer.json"), tokenizer).unwrap();
    folder.to_str().unwrap().to_owned()
}

#[test]
fn drift_measures_a_model_from_files_and_writes_every_report() {
    let folder = tempfile::tempdir().unwrap();
    let model = write_model(folder.path());
    let ids = path_in(folder.path(), "ids.json");
    std::fs::write(&ids, "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1,\n 3, 5 7 9]").unwrap();
    let [json, csv, svg] = ["a.json", "a.csv", "a.svg"].map(|name| path_in(folder.path(), name));
    let base = [
        "drift",
        "--device",
        "cpu",
        "--model",
        &model,
        "--pairs",
        "int8,int4",
    ];
    let files = ["--json", &json, "--csv", &csv, "--plot", &svg];
    let output = run(&[&base[..], &["--tokens", &ids, "--per-layer"], &files].concat());
    assert_eq!(
        (output.status.code(), text(&output.stderr)),
        (Some(0), String::new())
    );
    let table = text(&output.stdout);
    for words in [
        "15 tokens in one window",
        "| f32 ",
        "perplexity",
        "attention error",
        "tokens/s",
    ] {
        assert!(table.contains(words), "`{words}` is not in: {table}");
    }
    let read = |file: &str| std::fs::read_to_string(file).unwrap();
    let report: serde_json::Value = serde_json::from_str(&read(&json)).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!((rows.len(), rows[2]["tokens"].as_u64()), (3, Some(15)));
    assert_eq!(report["layers"].as_array().unwrap().len(), 2);
    assert!(read(&csv).starts_with("pair,layer,k_error"));
    assert!(read(&svg).contains("Error of each layer by itself"));
    // A text through the tokenizer, cut; the table's own rows and picture.
    let words = path_in(folder.path(), "words.txt");
    std::fs::write(&words, "b c d e f g h i j k").unwrap();
    let output = run(&[
        &base[..],
        &["--text", &words, "--limit", "8", "--k-rope", "pre"],
        &files,
    ]
    .concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("8 tokens in one window, prefill, keys before RoPE"));
    assert!(read(&csv).starts_with("pair,k_rope,bits_per_number"));
    assert!(read(&svg).contains("Centred logit drift against memory"));
}

#[test]
fn generate_writes_text_compares_and_counts() {
    let folder = tempfile::tempdir().unwrap();
    let model = write_model(folder.path());
    let base = [
        "generate",
        "--device",
        "cpu",
        "--model",
        &model,
        "--max-tokens",
        "6",
    ];
    let run_with = |more: &[&str]| run(&[&base[..], more].concat());
    let plain = run_with(&["--kv", "f32", "b c d"]);
    assert_eq!(
        (plain.status.code(), text(&plain.stderr)),
        (Some(0), String::new())
    );
    assert!(text(&plain.stdout).starts_with("b c d"));
    let same = run_with(&["--kv", "f32", "--compare", "--stats", "b c d"]);
    assert!(
        text(&same.stdout).contains("f32 and f32: the same "),
        "{}",
        text(&same.stdout)
    );
    assert_eq!(text(&same.stderr).matches("prompt 3 tokens").count(), 2);
    assert!(text(&same.stderr).contains(" bytes for "));
    let broken = run_with(&["--kv", "int2", "--compare", "b c d e f g h"]);
    assert!(text(&broken.stdout).contains("int2 and f32: the same "));
    let drawn = |seed: &str| text(&run_with(&["--temperature", "3", "--seed", seed, "b c d"]).stdout);
    assert_eq!(drawn("1"), drawn("1"));
    assert!(["2", "3", "4"].iter().any(|seed| drawn(seed) != drawn("1")));
}

#[test]
fn models_and_their_options_that_cannot_be_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let model = write_model(folder.path());
    let bad = path_in(folder.path(), "bad.txt");
    std::fs::write(&bad, "1 2 three").unwrap();
    let huge = path_in(folder.path(), "huge.txt");
    let made = std::fs::File::create(&huge).unwrap();
    made.set_len((16 << 20) + 1).unwrap();
    let drift = ["drift", "--device", "cpu", "--pairs", "int8", "--model", &model];
    let generate = ["generate", "--device", "cpu", "--model", &model];
    for (arguments, words) in [
        (vec!["drift", "--text", "a.txt"], vec!["--model"]),
        (vec!["drift", "--per-layer"], vec!["--model"]),
        (
            vec!["drift", "--model", "/nowhere/a.gguf"],
            vec!["/nowhere/a.gguf"],
        ),
        (
            [&drift[..], &["--tokens", &bad]].concat(),
            vec!["bad.txt", "`three`"],
        ),
        (
            [&drift[..], &["--text", "/nowhere/a.txt"]].concat(),
            vec!["/nowhere/a.txt"],
        ),
        (
            [&drift[..], &["--text", path_in(folder.path(), "").as_str()]].concat(),
            vec!["no regular file"],
        ),
        (
            [&drift[..], &["--text", &huge]].concat(),
            vec!["huge.txt", "longer than 16 MiB"],
        ),
        (
            [&drift[..], &["--tokens", &huge]].concat(),
            vec!["huge.txt", "longer than 16 MiB"],
        ),
        (
            [&drift[..], &["--outlier", "8"]].concat(),
            vec!["--outlier", "--model"],
        ),
        ([&drift[..], &["--limit", "1"]].concat(), vec!["--limit", "1"]),
        (
            [&drift[..], &["--k-rope", "half"]].concat(),
            vec!["half", "post, pre"],
        ),
        (
            [&generate[..], &["--temperature", "-1", "b"]].concat(),
            vec!["-1", "0 or more"],
        ),
        ([&generate[..], &["--kv", "int3", "b"]].concat(), vec!["int3"]),
        ([&generate[..], &[""]].concat(), vec!["an empty prompt"]),
        (
            [&generate[..], &["--max-tokens", "0", "b"]].concat(),
            vec!["--max-tokens"],
        ),
    ] {
        fails(&run(&arguments), 2, &words);
    }
    // A file that goes wrong on the way.
    let weights = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&weights, bytes).unwrap();
    let output = run(&[&generate[..], &["b"]].concat());
    fails(&output, 2, &["down_proj", "NaN"]);
}
