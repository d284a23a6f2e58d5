//! `kvpack shaders`: files in every language through the checkers that these machines have, manifests against naga and
//! the host's structs, the folder in the repository, wrong manifests.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kvpack::Error;
use kvpack::export::manifest::{BindingKind, FieldType, Manifest, ModuleEntry};
use kvpack::export::writers::ExportTarget;
use kvpack::export::{Choice, Export, Module, Phase, Shape, Tweaks, kernel_names};
use kvpack::kernels::attention_merge::AttentionMerge;
use kvpack::kernels::attention_split::AttentionSplit;
use kvpack::kernels::dequantize::Dequantize;
use kvpack::kernels::quantize::{Quantize, Source};
use kvpack::kernels::quantize_group::QuantizeGroup;
use kvpack::kernels::{FloatType, WG_SIZE};
use kvpack::pages::PageLayout;
use kvpack::spec::{Pair, Side, TABLE};
use kvpack::variant::{Arithmetic, Reduction};
use kvpack::work::{SlotRun, Status};
use serde_json::{Value, json};

use crate::common;
use crate::shaders::{each, params_of, tint};

/// What the standalone folder is made of.
const STANDALONE: [&str; 7] = [
    "quantize",
    "quantize_group",
    "dequantize",
    "attention_split",
    "attention_merge",
    "amax",
    "tensor_scale",
];

fn choice(pairs: Vec<Pair>, [kv_heads, q_heads, k_head_dim, v_head_dim, page_tokens]: [u32; 5]) -> Choice {
    Choice {
        shape: Shape {
            kv_heads,
            q_heads,
            k_head_dim,
            v_head_dim,
            page_tokens,
        },
        pairs,
        kernels: Vec::new(),
        phases: vec![Phase::Decode, Phase::Prefill],
        rows: FloatType::F32,
        queries: FloatType::F32,
        outputs: FloatType::F32,
        tweaks: Tweaks::default(),
    }
}

fn table() -> Vec<Pair> {
    TABLE.iter().map(|name| name.parse().unwrap()).collect()
}

/// The defaults of the command, every side at an odd shape, and the variants and types that need more.
fn choices() -> Vec<Choice> {
    let few: Vec<Pair> = ["int4", "fp4", "fp8", "int4c/int4"]
        .map(|name| name.parse().unwrap())
        .into();
    let attention = |tweaks: Tweaks, queries| Choice {
        kernels: vec!["attention_split".to_owned()],
        queries,
        tweaks,
        ..choice(few.clone(), [1, 4, 64, 64, 64])
    };
    let every = Side::all().into_iter().map(Pair::same).collect();
    vec![
        choice(table(), [2, 8, 64, 64, 64]),
        Choice {
            rows: FloatType::F16,
            outputs: FloatType::F16,
            phases: vec![Phase::Prefill],
            ..choice(every, [2, 6, 48, 16, 128])
        },
        attention(
            Tweaks {
                reduction: Some(Reduction::Subgroup),
                arithmetic: Some(Arithmetic::F16),
                ..Tweaks::default()
            },
            FloatType::F16,
        ),
        attention(
            Tweaks {
                arithmetic: Some(Arithmetic::Packed),
                ..Tweaks::default()
            },
            FloatType::F32,
        ),
    ]
}

fn export(choice: &Choice, target: ExportTarget) -> kvpack::Result<Export> {
    Export::compose(choice, target, None, &mut |_, _, _| ())
}

/// The files of all choices in one language, each with its entry, in a folder that lives as long as the first part.
fn written(target: ExportTarget) -> (tempfile::TempDir, Vec<(PathBuf, ModuleEntry)>) {
    let folder = tempfile::tempdir().unwrap();
    let mut all = Vec::new();
    for (number, choice) in choices().iter().enumerate() {
        let choice = match target {
            // GLSL has no 16-bit arithmetic.
            ExportTarget::Glsl if choice.tweaks.arithmetic == Some(Arithmetic::F16) => &Choice {
                tweaks: Tweaks {
                    arithmetic: None,
                    ..choice.tweaks
                },
                ..choice.clone()
            },
            _ => choice,
        };
        let export = export(choice, target).unwrap();
        for ((name, bytes), entry) in export.files.iter().zip(export.manifest.modules) {
            let path = folder.path().join(format!("{number}-{name}"));
            fs::write(&path, bytes).unwrap();
            all.push((path, entry));
        }
    }
    (folder, all)
}

/// Runs one of Debian's shader tools; a missing one is a failure with the command that mends it.
fn tool(name: &str, package: &str, arguments: &[&str], file: &Path) -> Result<(), String> {
    let run = Command::new(name).args(arguments).arg(file).output().unwrap_or_else(|e| {
        panic!("{name} cannot be started ({e}); it checks exported shaders. Run: apt-get install -y {package}")
    });
    match run.status.success() {
        true => Ok(()),
        false => Err(said(&run).chars().take(600).collect()),
    }
}

fn said(run: &Output) -> String {
    String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr)
}

fn named(item: &(PathBuf, ModuleEntry)) -> &str {
    item.0
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
}

// ---- languages ---------------------------------------------------------------------------------------------------

fn spirv_val(file: &Path) -> Result<(), String> {
    tool("spirv-val", "spirv-tools", &["--target-env", "vulkan1.1"], file)
}

#[test]
fn spirv_passes_spirv_val() {
    let (folder, all) = written(ExportTarget::Spirv);
    each(&all, named, |(path, _)| spirv_val(path));
    common::say(&format!("kvpack: {} modules through spirv-val", all.len()));
    // A word of the code that is another is found.
    let mut bytes = fs::read(&all[0].0).unwrap();
    let middle = bytes.len() / 8 * 4;
    bytes[middle..middle + 4].fill(0xff);
    let broken = folder.path().join("broken.spv");
    fs::write(&broken, bytes).unwrap();
    spirv_val(&broken).unwrap_err();
}

/// By OpenGL's rules all in one process, but for subgroups, an extension that glslang knows for Vulkan only; by Vulkan's, with
/// code, those and the modules of the first choice.
#[test]
fn glsl_passes_glslang() {
    let (folder, all) = written(ExportTarget::Glsl);
    let plain: Vec<&str> = all
        .iter()
        .filter(|(_, entry)| entry.features.is_empty())
        .map(|(path, _)| path.to_str().unwrap())
        .collect();
    let glslang =
        |arguments: &[&str], file: &Path| tool("glslangValidator", "glslang-tools", arguments, file);
    let (last, others) = plain.split_last().unwrap();
    glslang(others, Path::new(last)).unwrap();
    let some: Vec<_> = all
        .iter()
        .filter(|item| named(item).starts_with("0-") || !item.1.features.is_empty())
        .collect();
    assert!(
        some.len() > 55 && plain.len() > 150,
        "{} of {}",
        some.len(),
        plain.len()
    );
    each(
        &some,
        |item| named(item),
        |(path, _)| glslang(&["-V", "--target-env", "vulkan1.1", "-o", "/dev/null"], path),
    );
    let broken = folder.path().join("broken.comp");
    let text = fs::read_to_string(&all[0].0).unwrap();
    fs::write(&broken, text.replacen("uint ", "uvec2 ", 1)).unwrap();
    glslang(&[], &broken).unwrap_err();
}

/// glslang reads HLSL too, but for one form that DXC takes: `(uint4[4])0` for zeros. It is spelled out here, and 16-bit
/// types, which are of shader model 6.2, are left out.
#[test]
fn hlsl_passes_glslang_with_zeros_spelled_out() {
    let (_folder, all) = written(ExportTarget::Hlsl);
    let all: Vec<_> = all
        .into_iter()
        .filter(|(_, entry)| entry.features.is_empty())
        .collect();
    each(&all, named, |(path, entry)| {
        let text = fs::read_to_string(path).unwrap();
        fs::write(path, zeros_spelled_out(&text)).unwrap();
        let arguments = [
            "-D",
            "-V",
            "-S",
            "comp",
            "-e",
            &entry.entry_point,
            "--target-env",
            "vulkan1.1",
            "--auto-map-bindings",
            "-o",
            "/dev/null",
        ];
        tool("glslangValidator", "glslang-tools", &arguments, path)
    });
    assert!(all.len() > 50, "{}", all.len());
}

/// `(float4[2])0` as the call of a function that makes it.
fn zeros_spelled_out(text: &str) -> String {
    let mut makers = BTreeSet::new();
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("])0") {
        let open = rest[..at].rfind('(').unwrap();
        let (of, count) = rest[open + 1..at].split_once('[').unwrap();
        let zeros = vec![format!("({of})0"); count.parse().unwrap()].join(", ");
        let name = format!("zeros_{count}_{of}");
        makers.insert(format!(
            "typedef {of} {name}_t[{count}];\n{name}_t {name}() {{ {of} z[{count}] = {{ {zeros} }}; return z; }}\n"
        ));
        out += &format!("{}{name}()", &rest[..open]);
        rest = &rest[at + 3..];
    }
    makers.into_iter().collect::<String>() + &out + rest
}

/// No Metal compiler runs here: what is checked is that the function is there and takes the buffers of the manifest.
#[test]
fn msl_and_hlsl_bind_what_the_manifest_says() {
    for target in [ExportTarget::Msl, ExportTarget::Hlsl, ExportTarget::Glsl] {
        let (_folder, all) = written(target);
        each(&all, named, |(path, entry)| {
            let text = fs::read_to_string(path).unwrap();
            let start = match target {
                ExportTarget::Msl => format!("kernel void {}(", entry.entry_point),
                _ => format!("void {}(", entry.entry_point),
            };
            if text.matches(&start).count() != 1 {
                return Err(format!("{start} does not stand once"));
            }
            for binding in &entry.bindings {
                let slot = binding.slot.as_deref().ok_or("no slot")?;
                // `buffer(3)` in MSL's double brackets, `register(t3)`, `binding = 3)`: each ends there.
                let stands = text.contains(&match target {
                    ExportTarget::Glsl => format!("{slot})"),
                    _ => slot.to_owned(),
                });
                if stands != binding.used {
                    return Err(format!("{}: {slot}, used: {}", binding.name, binding.used));
                }
            }
            for extra in &entry.extra_bindings {
                let runtime = text.contains("_mslBufferSizes& _buffer_sizes [[");
                if !text.contains(&extra.slot) && (target != ExportTarget::Msl || runtime) {
                    return Err(format!("no {}", extra.slot));
                }
            }
            Ok(())
        });
    }
}

#[test]
fn dev_14_float_to_integer_keeps_naga_s_clamp_in_msl() {
    // Scores in packed integers round queries: the one conversion that a large quotient could lead out of range.
    let export = export(&choices()[3], ExportTarget::Msl).unwrap();
    let packed = export
        .files
        .iter()
        .find(|(name, _)| name.contains("int4-int4-decode-packed"))
        .unwrap();
    let text = std::str::from_utf8(&packed.1).unwrap();
    assert!(
        text.contains("naga_f2i32") || text.contains("metal::clamp("),
        "{text}"
    );
}

#[test]
fn glsl_refuses_16_bit_arithmetic_by_name() {
    let refused = export(&choices()[2], ExportTarget::Glsl).unwrap_err();
    assert!(
        matches!(&refused, Error::Usage { asked, .. } if asked.contains("attention_split") && asked.contains("shader-f16")),
        "{refused}"
    );
}

#[test]
fn browser_files_compile_in_tint() {
    let (folder, all) = written(ExportTarget::WgslBrowser);
    let (code, text) = tint(&[folder.path(), &common::path("shaders/standalone")]);
    let last = text.lines().last().unwrap_or_default();
    assert_eq!(code, 0, "{}", text.chars().take(2000).collect::<String>());
    let standalone = Manifest::read(&common::path("shaders/standalone"))
        .unwrap()
        .modules
        .len();
    assert_eq!(last, format!("{} shaders, 0 failed", all.len() + standalone));
}

// ---- manifests ---------------------------------------------------------------------------------------------------

#[test]
fn manifests_agree_with_the_hosts_structs_and_lists() {
    let mut kernels = BTreeSet::new();
    for choice in choices() {
        let modules = choice.modules().unwrap();
        let export = export(&choice, ExportTarget::Wgsl).unwrap();
        assert_eq!(modules.len(), export.manifest.modules.len());
        for (module, entry) in modules.iter().zip(&export.manifest.modules) {
            kernels.insert(entry.kernel.clone());
            let host = params_of(&entry.kernel);
            let fields: Vec<_> = entry
                .params
                .fields
                .iter()
                .map(|f| (f.name.as_str(), f.offset as usize))
                .collect();
            assert_eq!(fields, host.members, "{}", entry.name);
            assert_eq!(entry.params.size as usize, host.size, "{}", entry.name);
            let bindings: Vec<_> = entry
                .bindings
                .iter()
                .map(|b| (b.binding, b.name.as_str()))
                .collect();
            let listed: Vec<_> = (0..).zip(module.bindings.iter().map(|b| b.name)).collect();
            assert_eq!(bindings, listed, "{}", entry.name);
            for binding in &entry.bindings {
                let said = binding.kind == BindingKind::Uniform || binding.shape.starts_with('[');
                assert!(said && !binding.of.is_empty(), "{}: {binding:?}", entry.name);
            }
            let structs = entry.structs.iter().flat_map(|s| &s.fields);
            for field in entry.params.fields.iter().chain(structs) {
                assert!(
                    !field.what.is_empty(),
                    "{}: nothing says what {} is",
                    entry.name,
                    field.name
                );
            }
            let scales = entry.params.fields.iter().filter(|f| f.of == FieldType::F32);
            assert!(scales.count() <= 2, "{}", entry.name);
            if let Some(variant) = module.variant {
                let bytes = variant.workgroup_bytes(&module.pages[0].1);
                assert_eq!(u64::from(entry.workgroup_bytes), bytes, "{}", entry.name);
                assert_eq!(entry.structs[0].name, "Item");
                assert_eq!(
                    entry.structs[0].size as usize,
                    size_of::<kvpack::work::WorkItem>()
                );
            }
            let needs = module.variant.is_some_and(|v| !v.features().is_empty());
            assert_eq!(entry.portable, !needs, "{}", entry.name);
            assert_eq!(entry.features.is_empty(), !needs, "{}", entry.name);
        }
    }
    let all: BTreeSet<_> = kernel_names().into_iter().map(str::to_owned).collect();
    assert_eq!(kernels, all);
}

#[test]
fn a_manifest_reads_back_as_it_was_written() {
    for target in ExportTarget::ALL {
        let folder = tempfile::tempdir().unwrap();
        let mut choice = choices().remove(0);
        choice.pairs.truncate(1);
        let export = export(&choice, target).unwrap();
        export.write(folder.path()).unwrap();
        let read = Manifest::read(folder.path()).unwrap();
        assert_eq!(read, export.manifest);
        for module in &read.modules {
            let bytes = read.shader(folder.path(), module).unwrap();
            assert!(export.files.contains(&(module.file.clone(), bytes)));
        }
        // A file without the entry point, and one that is not there.
        let module = &read.modules[0];
        fs::write(folder.path().join(&module.file), "fn other() {}").unwrap();
        let refused = read.shader(folder.path(), module).unwrap_err().to_string();
        assert!(
            refused.contains(&module.file) && refused.contains("no entry point"),
            "{refused}"
        );
        fs::remove_file(folder.path().join(&module.file)).unwrap();
        read.shader(folder.path(), module).unwrap_err();
    }
}

/// The formula of each module, against what the crate's own planned kernels dispatch.
#[test]
fn dispatch_formulas_count_what_the_planner_dispatches() {
    let Some(gpu) = common::gpu("dispatch formulas") else {
        return;
    };
    let choice = choice(table(), [2, 6, 64, 32, 64]);
    let (shape, page) = (choice.shape, |side: Side, value| {
        choice.shape.page(side, value).unwrap()
    });
    let by_formula = |module: &Module, field: &str, count: u32| {
        let value = |name: &str| match name {
            _ if name == field => Some(count),
            _ => None,
        };
        module
            .dispatch
            .workgroups(module.kernel, WG_SIZE, value)
            .map_err(|e| e.to_string())
    };
    let counts = [1, 7, 32, 4095, 65_536, 3_000_001, u32::MAX];
    let mut sides: Vec<Side> = table().iter().flat_map(|pair| [pair.k, pair.v]).collect();
    sides.sort_unstable();
    sides.dedup();
    let waiting = page(Side::F16, false);
    for side in sides {
        let page = page(side, false);
        let read = Dequantize::plan(gpu, &page).unwrap();
        let group = side.layout.token_group() > 1;
        let packed = (!group).then(|| Quantize::plan(gpu, &page, &Source::F32).unwrap());
        let grouped = group.then(|| QuantizeGroup::plan(gpu, &page, &waiting).unwrap());
        for runs in counts {
            let said = |groups: kvpack::Result<[u32; 3]>| groups.map_err(|e| e.to_string());
            assert_eq!(
                by_formula(&choice.dequantize(&page), "runs", runs),
                said(read.workgroups(runs)),
                "{side}"
            );
            if let Some(kernel) = &packed {
                assert_eq!(
                    by_formula(&choice.quantize(&page), "runs", runs),
                    said(kernel.workgroups(runs)),
                    "{side}"
                );
            }
            if let Some(kernel) = &grouped {
                let module = choice.quantize_group(&page, &waiting);
                assert_eq!(
                    by_formula(&module, "runs", runs),
                    said(kernel.workgroups(runs)),
                    "{side}"
                );
            }
        }
    }
    // Three query heads of each KV head, in tiles of two: two columns of workgroups.
    let tiled = Choice {
        tweaks: Tweaks {
            head_tile: Some(2),
            ..Tweaks::default()
        },
        ..choice.clone()
    };
    let (k, v) = (page(Side::F16, false), page(Side::F16, true));
    let module = tiled.attention_split(&k, &v, Phase::Decode).unwrap();
    let variant = module.variant.unwrap();
    let split = AttentionSplit::plan(gpu, &k, &v, shape.q_heads, variant, FloatType::F32).unwrap();
    let merge = AttentionMerge::plan(gpu, shape.q_heads, shape.v_head_dim, FloatType::F32).unwrap();
    for count in [1, 12, 65_535, 65_536, 1_000_000] {
        assert_eq!(
            by_formula(&module, "items", count).unwrap(),
            split.workgroups(count).unwrap()
        );
        assert_eq!(split.workgroups(count).unwrap()[2], 4);
        let rows = by_formula(&choice.attention_merge(), "rows", count * shape.q_heads).unwrap();
        assert_eq!(rows, merge.workgroups(count).unwrap());
    }
}

#[test]
fn the_worked_example_of_the_readme_is_right() {
    let text = fs::read_to_string(common::path("shaders/README.md")).unwrap();
    let page = PageLayout::new("int4".parse().unwrap(), 1, 8, 8).unwrap();
    assert_eq!((page.head_words, page.scale_offset, page.words), (1, 8, 12));
    let pack = |rows: [[f32; 8]; 2]| {
        let mut pool = vec![0; page.words as usize];
        let runs = [(3, 0), (4, 1)].map(|(slot, source)| SlotRun {
            page: 0,
            slot,
            count: 1,
            source,
        });
        let source = |run: &SlotRun, _, _, channel: u32| rows[run.source as usize][channel as usize];
        kvpack::reference::quantize(&page, &runs, source, 1.0, &mut pool, &mut Status::default());
        pool
    };
    let mut large = [0.0; 8];
    large[0] = 14.0;
    let k = pack([[7.0, -6.0, 2.0, 3.0, -2.0, 0.4, 0.6, 0.0], large]);
    assert_eq!(
        (k[3], k[4], k[9] >> 16, k[10] & 0xffff),
        (0x010e_32a7, 7, 0x3c00, 0x4000)
    );
    let (mut first, mut second) = ([0.0; 8], [0.0; 8]);
    (first[0], second[1]) = (7.0, 14.0);
    let v = pack([first, second]);
    assert_eq!(
        (v[3], v[4], v[9] >> 16, v[10] & 0xffff),
        (7, 0x70, 0x3c00, 0x4000)
    );
    let scale = 1.0 / 8.0_f64.sqrt();
    let scores = [7.0 * scale, 14.0 * scale];
    let weight = (scores[0] - scores[1]).exp();
    let sum = 1.0 + weight;
    for number in [
        scale,
        scores[0],
        scores[1],
        weight,
        sum,
        7.0 * weight / sum,
        14.0 / sum,
        scores[1] + sum.ln(),
    ] {
        assert!(
            text.contains(&format!("{number:.5}")),
            "shaders/README.md does not say {number:.5}"
        );
    }
    for word in [k[3], k[4], v[4]] {
        assert!(
            text.contains(&format!("{word:#010x}")),
            "shaders/README.md does not say {word:#010x}"
        );
    }
}

/// A small manifest as JSON.
fn small() -> Value {
    let mut choice = choices().remove(0);
    choice.pairs = vec!["int4".parse().unwrap()];
    choice.kernels = vec!["quantize".to_owned(), "attention_merge".to_owned()];
    let export = export(&choice, ExportTarget::Wgsl).unwrap();
    let mut value = serde_json::to_value(&export.manifest).unwrap();
    value["vectors"] = json!([{"case": "c", "folder": "vectors/c", "modules": ["quantize-int4"]}]);
    value
}

#[test]
fn wrong_manifests_are_refused_with_file_and_place() {
    let read = |value: &Value| Manifest::parse("m.json", value.to_string().as_bytes());
    let good = small();
    read(&good).unwrap();
    let changed = |pointer: &str, to: Value| {
        let mut value = good.clone();
        *value.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = to;
        value
    };
    for (pointer, to, words) in [
        ("/schema", json!("kvpack.case"), "schema is `kvpack.case`"),
        ("/schema", json!(null), "schema is none"),
        ("/version", json!(2), "version 2"),
        ("/version", json!(-1), "version is not 1"),
        ("/version", json!("1"), "version is not 1"),
        ("/target", json!("cuda"), "unknown variant `cuda`"),
        ("/shape/q_heads", json!(7), "shape: "),
        ("/shape/kv_heads", json!(4294967296_u64), "4294967296"),
        ("/pairs/0", json!("int5"), "pairs[0]: unknown cache format `int5`"),
        ("/modules/0/name", json!("a b"), "modules[0].name"),
        (
            "/modules/0/name",
            json!("attention_merge-f32"),
            "modules: two have the name",
        ),
        ("/modules/0/file", json!("../../etc/passwd"), "modules[0].file"),
        ("/modules/0/file", json!("/etc/passwd"), "modules[0].file"),
        ("/modules/0/file", json!("a\\b"), "modules[0].file"),
        ("/modules/0/file", json!(""), "modules[0].file"),
        ("/modules/0/entry_point", json!(""), "modules[0].entry_point"),
        ("/modules/0/entry_point", json!("a b"), "modules[0].entry_point"),
        (
            "/modules/0/workgroup_size",
            json!([0, 1, 1]),
            "modules[0].workgroup_size",
        ),
        (
            "/modules/0/workgroup_size",
            json!([65536, 65536, 2]),
            "modules[0].workgroup_size",
        ),
        ("/modules/0/workgroup_size", json!([64, 1]), "invalid length 2"),
        (
            "/modules/0/workgroup_bytes",
            json!(4294967295_u32),
            "modules[0].workgroup_bytes",
        ),
        (
            "/modules/0/bindings/1/name",
            json!("runs"),
            "two have the bindings.name",
        ),
        (
            "/modules/0/bindings/1/binding",
            json!(2),
            "two have the group and binding",
        ),
        (
            "/modules/0/bindings/1/binding",
            json!(100000),
            "modules[0].bindings[1]",
        ),
        (
            "/modules/0/bindings/0/kind",
            json!("read"),
            "exactly one is a uniform",
        ),
        (
            "/modules/0/bindings/0/kind",
            json!("write"),
            "unknown variant `write`",
        ),
        ("/modules/0/params/size", json!(18), "modules[0].params"),
        (
            "/modules/0/params/size",
            json!(4294967292_u32),
            "modules[0].params",
        ),
        ("/modules/0/params/fields", json!([]), "modules[0].params"),
        (
            "/modules/0/params/fields/1/offset",
            json!(0),
            "modules[0].params.fields[1].offset",
        ),
        (
            "/modules/0/params/fields/1/offset",
            json!(4294967292_u32),
            "modules[0].params.fields[1].offset",
        ),
        (
            "/modules/0/params/fields/1/name",
            json!("runs"),
            "two have the fields.name",
        ),
        (
            "/modules/0/params/fields/0/type",
            json!("f64"),
            "unknown variant `f64`",
        ),
        (
            "/modules/0/dispatch/formula",
            json!("params.runs + 1"),
            "modules[0].dispatch.formula",
        ),
        (
            "/modules/0/dispatch/formula",
            json!("params.other"),
            "params.other is no u32 field",
        ),
        ("/modules/0/dispatch/z", json!(0), "modules[0].dispatch.z"),
        (
            "/modules/0/pages/side/page_words",
            json!(7),
            "modules[0].pages.side",
        ),
        ("/modules/0/pages/side/heads", json!(0), "modules[0].pages.side"),
        (
            "/modules/0/limits/maxStorageBuffersPerShaderStage",
            json!(9),
            "modules[0].portable",
        ),
        ("/vectors/0/folder", json!("vectors/../.."), "vectors[0].folder"),
        ("/vectors/0/folder", json!("/tmp"), "vectors[0].folder"),
        ("/vectors/0/folder", json!("C:\\x"), "vectors[0].folder"),
        ("/vectors/0/modules", json!(["other"]), "`other` is no module"),
    ] {
        let refused = read(&changed(pointer, to.clone())).expect_err(pointer);
        let Error::Manifest { file, .. } = &refused else {
            panic!("{refused}")
        };
        assert!(file.starts_with("m.json"), "{refused}");
        assert!(refused.to_string().contains(words), "{pointer} = {to}: {refused}");
    }
    // Fields that are missing, and fields that nobody knows, in every object: nothing is guessed, nothing is dropped.
    fn objects(value: &Value, at: String, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                found.push(at.clone());
                fields
                    .iter()
                    .for_each(|(name, value)| objects(value, format!("{at}/{name}"), found));
            }
            Value::Array(items) => {
                items
                    .iter()
                    .enumerate()
                    .for_each(|(i, value)| objects(value, format!("{at}/{i}"), found));
            }
            _ => {}
        }
    }
    let mut all = Vec::new();
    objects(&good, String::new(), &mut all);
    assert!(all.len() > 50);
    for at in all {
        if at.ends_with("/pages") {
            continue; // its names are those of the shader
        }
        let mut value = good.clone();
        value.pointer_mut(&at).unwrap()["surprise"] = json!(1);
        let refused = read(&value).expect_err(&at).to_string();
        assert!(
            refused.contains("unknown field `surprise`") && refused.starts_with("m.json:1:"),
            "{refused}"
        );
        let names: Vec<String> = good
            .pointer(&at)
            .unwrap()
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect();
        for name in names {
            let mut value = good.clone();
            value
                .pointer_mut(&at)
                .unwrap()
                .as_object_mut()
                .unwrap()
                .remove(&name);
            read(&value).expect_err(&format!("{at}/{name}"));
        }
    }
}

#[test]
fn texts_that_are_no_json_are_refused_with_line_and_column() {
    let parse = |bytes: &[u8]| Manifest::parse("m.json", bytes).unwrap_err().to_string();
    assert!(parse(b"{\n  \"schema\": oops\n}").starts_with("m.json:2:13: "));
    assert!(parse(b"").starts_with("m.json:1:0: "));
    assert!(parse(&[b'['; 100_000]).starts_with("m.json:1:"));
    parse(b"[]");
    parse(b"\xff\xfe");
    parse(b"{\"schema\": \"kvpack.shaders\", \"version\": 1e400}");
    let good = small().to_string();
    for end in (0..good.len()).step_by(97) {
        parse(&good.as_bytes()[..end]);
    }
    let folder = tempfile::tempdir().unwrap();
    for path in [
        folder.path().to_owned(),
        folder.path().join("none.json"),
        PathBuf::from("/dev/zero"),
    ] {
        let refused = Manifest::read(&path).unwrap_err();
        assert!(matches!(refused, Error::Manifest { .. }), "{refused}");
    }
}

// ---- the command -------------------------------------------------------------------------------------------------

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
