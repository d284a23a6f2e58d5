//! `kvpack shaders`, and the folder that is kept in the repository.

use super::*;

fn kvpack(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvpack"))
        .args(arguments)
        .output()
        .unwrap()
}

#[test]
fn the_folder_of_standalone_shaders_is_what_the_command_writes() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("standalone");
    let mut arguments = vec!["shaders", "export", "--to", "wgsl-browser"];
    STANDALONE
        .iter()
        .for_each(|kernel| arguments.extend(["--kernel", kernel]));
    let mend = format!(
        "cargo run --release -- {} --out shaders/standalone",
        arguments.join(" ")
    );
    arguments.extend(["--out", out.to_str().unwrap()]);
    let run = kvpack(&arguments);
    assert!(run.status.success(), "{}", said(&run));
    let names = |folder: &Path| -> BTreeSet<String> {
        let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("shaders/standalone: {e}; run {mend}"));
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    };
    let kept = common::path("shaders/standalone");
    assert_eq!(names(&kept), names(&out), "run {mend}");
    for name in names(&out) {
        let same = fs::read(kept.join(&name)).unwrap() == fs::read(out.join(&name)).unwrap();
        assert!(same, "shaders/standalone/{name} is another; run {mend}");
    }
    let manifest = Manifest::read(&kept).unwrap();
    assert_eq!(manifest.pairs, TABLE);
    assert!(manifest.modules.iter().all(|module| module.portable));
}

#[test]
fn the_command_exports_and_refuses() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let out = out.to_str().unwrap();
    let issue = [
        "shaders",
        "export",
        "--kernel",
        "attention_split",
        "--pair",
        "int4c/int4",
        "--head-dim",
        "128",
        "--group",
        "4",
        "--to",
        "wgsl",
        "--out",
        out,
    ];
    let run = kvpack(&issue);
    assert!(run.status.success(), "{}", said(&run));
    let manifest = Manifest::read(Path::new(out)).unwrap();
    // Packed, and with keys that wait in f16 for their group; decode and prefill.
    let names: Vec<_> = manifest
        .modules
        .iter()
        .map(|module| module.name.as_str())
        .collect();
    assert_eq!(
        names,
        [
            "attention_split-f16-int4-decode",
            "attention_split-f16-int4-prefill",
            "attention_split-int4c-int4-decode",
            "attention_split-int4c-int4-prefill"
        ]
    );
    assert_eq!((manifest.shape.k_head_dim, manifest.shape.q_heads), (128, 8));
    // Again, in another language: the whole folder is another.
    let spirv = [&issue[..10], &["--to", "spirv", "--out", out]].concat();
    assert!(kvpack(&spirv).status.success());
    assert!(
        !Path::new(out)
            .join("attention_split-int4c-int4-decode.wgsl")
            .exists()
    );
    fs::write(Path::new(out).join("notes.txt"), "mine").unwrap();
    let before = fs::read_dir(out).unwrap().count();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let inside = file.join("out");
    for (arguments, code, words) in [
        (&["--to", "wgsl", "--out", out][..], 2, "notes.txt"),
        (&["--to", "cuda", "--out", "x"], 2, "choose of wgsl"),
        (&["--to", "wgsl"], 2, "--out"),
        (
            &["--to", "wgsl", "--out", "x", "--kernel", "flash"],
            2,
            "there is no such kernel",
        ),
        (
            &["--to", "wgsl", "--out", "x", "--pairs", "int5"],
            2,
            "unknown cache format",
        ),
        (
            &["--to", "wgsl", "--out", "x", "--head-dim", "12"],
            2,
            "head_dim = 12",
        ),
        (&["--to", "wgsl", "--out", "x", "--group", "17"], 2, "17"),
        (
            &["--to", "wgsl", "--out", "x", "--q-heads", "7", "--kv-heads", "2"],
            2,
            "7",
        ),
        (
            &["--to", "wgsl", "--out", "x", "--workgroup", "7"],
            2,
            "workgroup = 7",
        ),
        (
            &[
                "--to",
                "wgsl",
                "--out",
                "x",
                "--pairs",
                "int8",
                "--kernel",
                "quantize_group",
            ],
            2,
            "none of them takes it",
        ),
        (
            &["--to", "glsl", "--out", "x", "--arithmetic", "f16"],
            2,
            "16-bit arithmetic",
        ),
        (
            &["--to", "wgsl", "--out", "x", "--vectors-tokens", "5"],
            2,
            "--vectors",
        ),
        (&["--to", "wgsl", "--out", "/proc/kvpack"], 2, "/proc"),
        (&["--to", "wgsl", "--out", inside.to_str().unwrap()], 2, "file"),
    ] {
        let run = kvpack(&[&["shaders", "export"], arguments].concat());
        assert_eq!(run.status.code(), Some(code), "{arguments:?}: {}", said(&run));
        assert!(said(&run).contains(words), "{arguments:?}: {}", said(&run));
    }
    assert!(!Path::new("x").exists());
    assert_eq!(fs::read_dir(out).unwrap().count(), before);
}

/// The Python of an export's README does what it says: its code blocks, run in the folder.
#[test]
fn the_readme_of_an_export_packs_and_judges() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("out");
    let arguments = [
        "shaders",
        "export",
        "--to",
        "glsl",
        "--vectors",
        "--kernel",
        "attention_split",
        "--pair",
        "int4",
    ];
    let more = [
        "--phase",
        "decode",
        "--outputs",
        "f16",
        "--out",
        out.to_str().unwrap(),
    ];
    let run = kvpack(&[&arguments[..], &more[..]].concat());
    assert!(run.status.success(), "{}", said(&run));
    let readme = fs::read_to_string(out.join("README.md")).unwrap();
    let code: String = readme
        .split("```python\n")
        .skip(1)
        .map(|block| block.split("```").next().unwrap())
        .collect();
    let script = format!(
        "import os, sys\nos.chdir(sys.argv[1])\n{code}\n\
         step = next(s for s in case['steps'] if s['module'] == module['name'])\n\
         packed = pack(step['params'])\n\
         assert len(packed) == 32 and packed[:4] == step['params']['runs'].to_bytes(4, 'little'), packed\n\
         for expect in case['expect']:\n\
         \x20   want = load(expect['file'])\n\
         \x20   got = want.copy() if expect['rule'] == 'bits' else want.astype(types[expect['buffer']])\n\
         \x20   assert judge(expect, got.view('<u4')), expect\n\
         \x20   got.reshape(-1).view('<u2')[-1] ^= 0x7fff\n\
         \x20   assert not judge(expect, got.view('<u4')), expect\n\
         print(len(case['expect']), 'judged')\n"
    );
    let file = root.path().join("readme.py");
    fs::write(&file, script).unwrap();
    let (code, text) = common::python(file.to_str().unwrap(), &out);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains(" judged"), "{text}");
}

#[test]
fn the_list_has_a_line_for_each_module() {
    let run = kvpack(&["shaders", "list"]);
    let text = said(&run);
    assert!(run.status.success(), "{text}");
    for kernel in kernel_names() {
        assert!(
            text.lines().any(|line| line.starts_with(&format!("| {kernel}"))),
            "{kernel}"
        );
    }
    let run = kvpack(&[
        "shaders",
        "list",
        "--pairs",
        "int8",
        "--reduction",
        "subgroup",
        "--json",
        "-",
    ]);
    let rows: Value = serde_json::from_slice(&run.stdout).unwrap();
    let find = |name: &str| {
        rows.as_array()
            .unwrap()
            .iter()
            .find(|row| row["module"] == name)
            .unwrap()
    };
    let row = find("attention_split-int8-int8-decode-subgroup");
    assert_eq!(
        (&row["portable"], &row["needs"]),
        (&json!(false), &json!("subgroups"))
    );
    assert_eq!(find("quantize-int8")["portable"], true);
    let run = kvpack(&["shaders", "list", "--csv", "-"]);
    let csv = String::from_utf8(run.stdout).unwrap();
    assert!(csv.starts_with("module,kernel,bindings,"), "{csv}");
}
