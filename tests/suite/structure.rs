//! The shape of the project: folders, names that must agree, the order of modules, and the field cases that it owns.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use kvpack::bench::roof;
use kvpack::kernels::{self, Listed};
use kvpack::model::kernels as model_kernels;

use crate::common;

/// The files below a folder whose names end with `ending`, as paths from it with `/`, sorted.
fn files(folder: &str, ending: &str) -> Vec<String> {
    fn walk(root: &Path, folder: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(root, &path, found);
            } else {
                let parts: Vec<_> = path
                    .strip_prefix(root)
                    .unwrap()
                    .iter()
                    .map(|p| p.to_str().unwrap())
                    .collect();
                found.push(parts.join("/"));
            }
        }
    }
    let mut found = Vec::new();
    walk(&common::path(folder), &common::path(folder), &mut found);
    found.retain(|file| file.ends_with(ending));
    found.sort();
    found
}

fn read(file: &str) -> String {
    fs::read_to_string(common::path(file)).unwrap_or_else(|e| panic!("{file}: {e}"))
}

/// Rust text without line comments, the contents of string and character literals, and `#[cfg(test)]` items.
fn plain_code(text: &str) -> String {
    let mut code = String::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let raw = rest.strip_prefix("r\"").map(|r| (r, "\""));
        let raw = raw.or_else(|| rest.strip_prefix("r#\"").map(|r| (r, "\"#")));
        if rest.starts_with("//") {
            rest = rest.find('\n').map_or("", |end| &rest[end..]);
        } else if let (Some((inside, end)), false) =
            (raw, code.ends_with(|c: char| c.is_alphanumeric() || c == '_'))
        {
            code.push_str("\"\"");
            rest = inside.split_once(end).map_or("", |(_, after)| after);
        } else if c == '"' {
            code.push_str("\"\"");
            let mut escaped = false;
            let end = rest[1..].find(|c| {
                let ends = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            });
            rest = end.map_or("", |end| &rest[end + 2..]);
        } else if c == '\'' && rest[1..].starts_with('\\') {
            rest = rest[3..].find('\'').map_or("", |end| &rest[end + 4..]);
        } else if c == '\'' && rest.chars().nth(2) == Some('\'') {
            rest = &rest[2 + rest.chars().nth(1).map_or(0, char::len_utf8)..];
        } else {
            code.push(c);
            rest = &rest[c.len_utf8()..];
        }
    }
    without_tests(&code)
}

/// Leaves out the item after each `#[cfg(test)]`: to its `;`, or to the end of its braces.
fn without_tests(code: &str) -> String {
    let Some((before, item)) = code.split_once("#[cfg(test)]") else {
        return code.to_owned();
    };
    let mut depth = 0_u32;
    let end = item.find(|c| {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0 && (c == '}' || c == ';')
    });
    before.to_owned() + &without_tests(end.map_or("", |end| &item[end + 1..]))
}

#[test]
fn plain_code_has_no_comments_strings_or_tests() {
    let text = "let a = \"panic!\"; // panic!\nlet b = '\"'; let c = '\\''; f(\"\\\"panic!\");\nlet d = r#\"panic! \"\"#;\n\
                #[cfg(test)]\nmod tests {\n    fn f() { panic!() }\n}\n#[cfg(test)]\nuse panic!;\nfn g<'a>() { keep!() }\n";
    let code = plain_code(text);
    assert!(!code.contains("panic!") && code.contains("keep!"), "{code}");
}

// ---- names -------------------------------------------------------------------------------------------------------

/// File names of a folder itself, without ending, less some.
fn stems(folder: &str, ending: &str, less: &[&str]) -> BTreeSet<String> {
    files(folder, ending)
        .iter()
        .filter_map(|file| file.strip_suffix(ending))
        .filter(|stem| !stem.contains('/') && !less.contains(stem))
        .map(str::to_owned)
        .collect()
}

fn names(list: &[Listed]) -> BTreeSet<String> {
    list.iter().map(|kernel| kernel.name.to_owned()).collect()
}

#[test]
fn the_list_of_kernels_equals_files_entry_points_and_reference_functions() {
    let listed = names(&kernels::ALL);
    assert_eq!(listed.len(), kernels::ALL.len(), "a name twice");
    assert_eq!(listed, stems("shaders", ".wgsl", &[]));
    assert_eq!(listed, stems("src/kernels", ".rs", &["mod"]));
    // The reference of the streaming cache is no kernel.
    assert_eq!(listed, stems("src/reference", ".rs", &["mod", "cache"]));
    assert_eq!(names(&model_kernels::ALL), stems("shaders/model", ".wgsl", &[]));
    assert_eq!(names(&roof::ALL), stems("shaders/bench", ".wgsl", &[]));
    for kernel in kernels::ALL.iter().chain(&model_kernels::ALL).chain(&roof::ALL) {
        let entry = kernel
            .wgsl
            .split_once("@compute @workgroup_size(WG_SIZE)\nfn ")
            .expect(kernel.name)
            .1;
        assert_eq!(entry.split_once('(').unwrap().0, kernel.name);
    }
    let exported = read("src/reference/mod.rs");
    for name in listed {
        let function = format!("pub fn {name}(");
        assert!(
            read(&format!("src/reference/{name}.rs")).contains(&function),
            "src/reference/{name}.rs: no {function}"
        );
        let export = exported
            .lines()
            .find(|line| line.starts_with(&format!("pub use {name}::")));
        assert!(
            export.is_some_and(|line| line.contains(&name)),
            "src/reference/mod.rs does not export {name}"
        );
        let host = read(&format!("src/kernels/{name}.rs"));
        for part in [
            "pub const BINDINGS:",
            "pub const LISTED:",
            "pub fn composer(",
            "pub fn plan(",
            "pub fn encode(",
        ] {
            assert!(host.contains(part), "src/kernels/{name}.rs: no {part}");
        }
    }
}

#[test]
fn every_shader_file_is_built_in() {
    // That an included file exists is the compiler's business; that a file is included is not.
    let sources: String = files("src", ".rs")
        .iter()
        .map(|file| read(&format!("src/{file}")))
        .collect();
    for file in files("shaders", ".wgsl") {
        // What is composed of the others is there to be lifted.
        let lifted = file.starts_with("standalone/");
        let included =
            sources.contains(&format!("shaders/{file}\")")) || file.starts_with("model/") || lifted;
        assert!(included, "shaders/{file} is in no include_str!");
    }
}

#[test]
fn the_top_level_is_a_fixed_set() {
    const FIXED: [&str; 15] = [
        ".ci",
        ".gitignore",
        "CHANGELOG.md",
        "Cargo.lock",
        "Cargo.toml",
        "LICENSE-APACHE",
        "LICENSE-MIT",
        "README.md",
        "benches",
        "examples",
        "rustfmt.toml",
        "shaders",
        "src",
        "tests",
        "tools",
    ];
    let listing = Command::new("git")
        .args(["ls-files"])
        .current_dir(common::path(""))
        .output();
    let top: BTreeSet<String> = match listing {
        Ok(output) if output.status.success() && !output.stdout.is_empty() => {
            String::from_utf8(output.stdout)
                .unwrap()
                .lines()
                .map(|file| file.split('/').next().unwrap_or_default().to_owned())
                .collect()
        }
        // An unpacked archive: no git, nothing that git ignores but the build.
        _ => fs::read_dir(common::path(""))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != "target")
            .collect(),
    };
    assert!(top.contains("Cargo.toml"));
    let stray: Vec<_> = top
        .iter()
        .filter(|name| !FIXED.contains(&name.as_str()))
        .collect();
    assert!(stray.is_empty(), "the top level is fixed; found {stray:?}");
}

// ---- modules -----------------------------------------------------------------------------------------------------

/// The library's modules in levels; a module names only modules of levels above its own line. Data flows the same way:
/// shapes and formats, then pages, then kernels and the cache, then what measures them.
const LEVELS: &[&[&str]] = &[
    &["error", "npy", "work"],
    &["formats", "options", "rope"],
    &["scales"],
    &["spec"],
    &["pages"],
    &["shader", "variant"],
    &["tuning"],
    &["gpu"],
    &["kernels"],
    &["cache"],
    &["capacity", "reference"],
    &["checkpoint"],
    &["model"],
    &["analyze"],
    &["drift", "generate", "validate"],
    &["bench", "recording"],
    &["export"],
    &["report"],
];

/// Modules that know nothing of a GPU: numbers, names, geometry, lists of work.
const NO_GPU: [&str; 8] = [
    "error", "formats", "options", "pages", "rope", "scales", "spec", "work",
];

/// The paths after `crate::` in a module's code, with groups opened: `crate::{a::B, c}` gives `a` and `c`.
fn crate_paths(code: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for after in code.split("crate::").skip(1) {
        let group = after
            .strip_prefix('{')
            .map(|inner| inner.split_once('}').map_or(inner, |(inside, _)| inside));
        let parts: Vec<_> = group.map_or(vec![after], |inside| inside.split(',').collect());
        for part in parts {
            let part = part.trim_start();
            found.push(
                &part[..part
                    .find(|c: char| !(c.is_alphanumeric() || c == '_'))
                    .unwrap_or(part.len())],
            );
        }
    }
    found
}

/// What a file of module `module` says against the order.
fn disorder(module: &str, code: &str) -> Vec<String> {
    let level = |name: &str| LEVELS.iter().position(|names| names.contains(&name));
    let Some(own) = level(module) else {
        return vec![format!("module {module} has no level")];
    };
    let mut found = Vec::new();
    for path in crate_paths(code) {
        // The crate re-exports its error.
        let named = if path == "Error" || path == "Result" {
            "error"
        } else {
            path
        };
        match level(named) {
            None => found.push(format!("crate::{path} is no module with a level")),
            Some(other) if named != module && other >= own => found.push(format!("{module} names {named}")),
            Some(_) => {}
        }
    }
    if NO_GPU.contains(&module) && code.contains("wgpu") {
        found.push(format!("{module} names wgpu"));
    }
    found
}

/// The files of the library, with the module each belongs to.
fn library() -> impl Iterator<Item = (String, String)> {
    files("src", ".rs")
        .into_iter()
        .filter(|file| !file.starts_with("cli/") && file != "main.rs" && file != "lib.rs")
        .map(|file| {
            let module = file.split(['/', '.']).next().unwrap_or_default().to_owned();
            (module, file)
        })
}

#[test]
fn modules_name_only_what_comes_before_them() {
    let mut found = Vec::new();
    let mut seen = BTreeSet::new();
    for (module, file) in library() {
        let code = plain_code(&read(&format!("src/{file}")));
        found.extend(
            disorder(&module, &code)
                .into_iter()
                .map(|what| format!("src/{file}: {what}")),
        );
        if module == "model" && (code.contains("kernels::attention") || code.contains("kernels::quantize")) {
            found.push(format!(
                "src/{file}: the model reaches attention only through the cache"
            ));
        }
        if module == "reference"
            && ["gpu", "kernels", "shader"]
                .iter()
                .any(|m| crate_paths(&code).contains(m))
        {
            found.push(format!(
                "src/{file}: the reference shares nothing with what it judges"
            ));
        }
        seen.insert(module);
    }
    let listed: BTreeSet<_> = LEVELS
        .iter()
        .flat_map(|names| names.iter().map(|name| (*name).to_owned()))
        .collect();
    assert_eq!(
        seen, listed,
        "modules without a level, or levels without a module"
    );
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn the_order_of_modules_can_be_broken() {
    assert_eq!(
        disorder(
            "pages",
            "use crate::spec::Side;\nuse crate::{Error, formats::Element};"
        ),
        [""; 0]
    );
    assert_eq!(
        disorder("kernels", "use crate::kernels::amax; wgpu::Buffer"),
        [""; 0]
    );
    for (module, code) in [
        ("pages", "use crate::gpu::Gpu;"),
        ("formats", "use crate::{error::Error, scales::ScaleType};"),
        ("spec", "fn f(b: &wgpu::Buffer) {}"),
        ("drift", "use crate::validate::ValidateRow;"),
        ("cache", "fn f() { crate::model::run() }"),
        ("pages", "use crate::nowhere::Thing;"),
        ("nowhere", ""),
    ] {
        assert!(!disorder(module, code).is_empty(), "{module}: {code}");
    }
}

/// Clippy's lints for these need attributes in the library and a run of clippy; this test needs neither, and holds the
/// line for everyone who runs the tests. A user's input never ends the program, and only the command prints.
#[test]
fn the_library_never_prints_and_never_panics_by_name() {
    let mut found = Vec::new();
    for (_, file) in library().chain([(String::new(), "lib.rs".to_owned())]) {
        found.extend(
            abrupt(&plain_code(&read(&format!("src/{file}"))))
                .iter()
                .map(|what| format!("src/{file}: {what}")),
        );
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

fn abrupt(code: &str) -> Vec<&'static str> {
    const NEVER: [&str; 12] = [
        "println!",
        "eprintln!",
        "print!",
        "eprint!",
        "dbg!",
        "panic!",
        "todo!",
        "unimplemented!",
        "unreachable!",
        ".unwrap()",
        ".expect(",
        "process::exit",
    ];
    NEVER.into_iter().filter(|what| code.contains(what)).collect()
}

#[test]
fn the_search_for_panics_can_find_one() {
    assert_eq!(
        abrupt(&plain_code(
            "fn f() { x.unwrap_or(1); } // .unwrap()\n/// panic!\nlet s = \"todo!\";"
        )),
        [""; 0]
    );
    assert_eq!(
        abrupt(&plain_code("fn f() { x.unwrap(); println!(\"{}\", y) }")),
        ["println!", ".unwrap()"]
    );
}

// ---- field cases -------------------------------------------------------------------------------------------------

/// Faults that other projects shipped, which this one tests itself against: numbers (NUM), scales (SCL), shapes, pages and
/// batches (SHP), masks, soft cap and sinks (MSK), long contexts (LNG), the life of sequences (STR), devices and shader
/// languages (DEV), honest figures (BEN), models (MOD). Tests carry the id in their names: `fn num_01_...`.
///
/// All ids of NUM and SCL apply. Three that could be thought to wait for later work:
/// SCL-06 is about an *inverse* scale, which is never stored here: a constant per-channel group shows that.
/// SCL-14 ranks formats under one outlier: the CPU reference and the command's figures show the ranking already.
/// SCL-15 is about scales from outside: a cache takes per-tensor ones.
const OWNED: [&str; 79] = [
    // Rounding, saturation, decoding and packing of codes; sums in f32.
    "NUM-01", "NUM-02", "NUM-03", "NUM-05", "NUM-07", "NUM-09", "NUM-10", "NUM-12", "NUM-14", "NUM-15",
    "NUM-16", "NUM-18", "NUM-19",
    // Zero, constant and outlier groups; NaN and infinities; scales beyond their type.
    "SCL-01", "SCL-03", "SCL-04", "SCL-06", "SCL-08", "SCL-10", "SCL-11", "SCL-13", "SCL-14", "SCL-15",
    // Head dims and ratios up to the limits, page boundaries, empty rows, dead slots, ragged batches.
    "SHP-01", "SHP-03", "SHP-04", "SHP-06", "SHP-07", "SHP-09", "SHP-10", "SHP-11", "SHP-12", "SHP-14",
    "SHP-15", "SHP-17", // Rows and tiles without a key, low scores, soft cap, sinks.
    "MSK-01", "MSK-03", "MSK-04", "MSK-06", "MSK-08", "MSK-09",
    // Uniformity, compiler errors, limits, alignment, lost devices, out-of-range reads and conversions.
    "DEV-01", "DEV-02", "DEV-04", "DEV-06", "DEV-07", "DEV-09", "DEV-10", "DEV-12", "DEV-14", "DEV-15",
    // Folded dispatches, buffers and addresses up to their limits, remainders of splits, memory that stays the same.
    "LNG-01", "LNG-03", "LNG-05", "LNG-07", "LNG-08", "LNG-09",
    // Open tokens, chunks, truncation, positions, pages used again.
    "STR-01", "STR-03", "STR-05", "STR-06", "STR-08", "STR-09",
    // Cache-resident rows, bytes counted, the queue waited for, warm-up apart, timestamps that stand still; scales counted
    // in bits, buffers counted in bytes, comparators that NaN does not pass.
    "BEN-01", "BEN-03", "BEN-04", "BEN-05", "BEN-07", "BEN-09", "BEN-11", "BEN-12",
    // Tied heads, head_dim of its own, rotation in prefill and decode, pairings, unaligned tensors, stored scales.
    "MOD-01", "MOD-03", "MOD-05", "MOD-07", "MOD-08", "MOD-09", "MOD-10", "MOD-12",
];

/// The names of test functions in Rust text: those after a `#[test]`, other attributes in between.
fn test_names(text: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let mut test = false;
    for line in text.lines().map(str::trim) {
        if line == "#[test]" {
            test = true;
        } else if let Some(rest) = line.strip_prefix("fn ").filter(|_| test) {
            names.push(rest.split_once('(').map_or(rest, |(name, _)| name));
            test = false;
        } else if !line.starts_with("#[") && !line.starts_with("//") {
            test = false;
        }
    }
    names
}

fn without_a_test<'a>(owned: &[&'a str], names: &[String]) -> Vec<&'a str> {
    let has = |id: &str| {
        let start = id.to_lowercase().replace('-', "_");
        names.iter().any(|name| {
            name.strip_prefix(&start)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
        })
    };
    owned.iter().copied().filter(|id| !has(id)).collect()
}

#[test]
fn every_owned_field_case_has_a_test() {
    let mut names = Vec::new();
    for folder in ["src", "tests"] {
        for file in files(folder, ".rs") {
            names.extend(
                test_names(&read(&format!("{folder}/{file}")))
                    .into_iter()
                    .map(str::to_owned),
            );
        }
    }
    let missing = without_a_test(&OWNED, &names);
    assert!(
        missing.is_empty(),
        "field cases without a test: {}",
        missing.join(" ")
    );
}

#[test]
fn a_field_case_without_a_test_is_found() {
    let text = "    #[test]\n    // why\n    #[ignore]\n    fn num_01_ties() {}\nfn num_02_helper() {}\n#[test]\nfn num_03() {}\n";
    assert_eq!(test_names(text), ["num_01_ties", "num_03"]);
    let names: Vec<_> = test_names(text).into_iter().map(str::to_owned).collect();
    assert_eq!(
        without_a_test(&["NUM-01", "NUM-02", "NUM-03", "NUM-0"], &names),
        ["NUM-02", "NUM-0"]
    );
}
