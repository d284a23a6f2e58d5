//! Every shader that the composer can make, through two compilers and by reflection: naga with its writers for the
//! back ends of wgpu, Tint for browsers, WebGPU's default limits, and the host's structs and lists of bindings.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use kvpack::Error;
use kvpack::bench::roof;
use kvpack::gpu::{Access, Binding};
use kvpack::kernels::attention_split::AttentionSplit;
use kvpack::kernels::{
    self, FloatType, Listed, amax, attention_merge, attention_split, dequantize, quantize, tensor_scale,
};
use kvpack::model::kernels as model_kernels;
use kvpack::pages::PageLayout;
use kvpack::shader::{Composer, Target};
use kvpack::spec::Side;
use kvpack::variant::Variant;
use kvpack::work::{Merge, SlotRun, TableEntry, WorkItem};
use naga::back::{hlsl, msl, spv, wgsl};
use naga::compact::{KeepUnused, compact};
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy, Layouter};
use naga::valid::{Capabilities, ModuleInfo, ShaderStages, SubgroupOperationSet, ValidationFlags, Validator};
use naga::{AddressSpace, ArraySize, StorageAccess, TypeInner};

use crate::common;

/// KV heads, head_dim, query heads of a KV head. A usual shape, one with padded head words and an odd ratio, the
/// largest, and the smallest.
const SHAPES: [[u32; 3]; 4] = [[2, 64, 4], [2, 40, 3], [1, 256, 16], [2, 8, 1]];

/// Tokens of a page: the least that every group divides.
const PAGE_TOKENS: u32 = 128;

/// Of the attention modules at the second and later shapes, one in this many goes through the slow checks. The first
/// shape has every K side with every V side; at the others this stride still meets every side on both sides and in both
/// tilings, which is all that a shape can change. Validation and reflection take every module of every shape.
const SAMPLE: usize = 7;

/// One composed module.
struct Composed {
    /// Unique; a file name.
    name: String,
    kernel: &'static Listed,
    naga: String,
    standard: String,
    /// Goes through the slow checks too: naga's writers and Tint.
    slow: bool,
}

fn listed() -> impl Iterator<Item = &'static Listed> {
    static ALL: [&[Listed]; 3] = [&kernels::ALL, &model_kernels::ALL, &roof::ALL];
    ALL.into_iter().flatten()
}

/// All modules: the transformer's kernels, those of the read roof, and those of the cache at every shape.
fn all() -> &'static [Composed] {
    static MODULES: OnceLock<Vec<Composed>> = OnceLock::new();
    MODULES.get_or_init(|| {
        let mut composers: Vec<_> = model_kernels::catalogue()
            .into_iter()
            .chain(roof::catalogue())
            .map(|(n, c)| (n, c, true))
            .collect();
        for (number, [kv_heads, head_dim, ratio]) in SHAPES.into_iter().enumerate() {
            let some = kernels::catalogue(kv_heads, head_dim, ratio, PAGE_TOKENS).unwrap();
            composers.extend(some.into_iter().enumerate().map(|(i, (name, composer))| {
                let slow = number == 0 || !name.starts_with("attention_split") || i % SAMPLE == 0;
                (
                    format!("{name}__{kv_heads}x{head_dim}_ratio{ratio}"),
                    composer,
                    slow,
                )
            }));
        }
        let modules: Vec<_> = composers
            .into_iter()
            .map(|(name, composer, slow)| {
                let kernel = listed()
                    .filter(|k| name.starts_with(k.name))
                    .max_by_key(|k| k.name.len());
                Composed {
                    kernel: kernel.unwrap_or_else(|| panic!("{name} begins with no kernel's name")),
                    naga: composer.compose(Target::Naga).unwrap(),
                    standard: composer.compose(Target::Standard).unwrap(),
                    name,
                    slow,
                }
            })
            .collect();
        let names: BTreeSet<_> = modules.iter().map(|m| &m.name).collect();
        assert_eq!(names.len(), modules.len(), "names of the catalogue repeat");
        modules
    })
}

/// Runs `check` on every item over all cores and fails with the first complaints.
pub fn each<T: Sync>(
    items: &[T],
    name: impl Fn(&T) -> &str + Sync,
    check: impl Fn(&T) -> Result<(), String> + Sync,
) {
    assert!(!items.is_empty());
    let next = AtomicUsize::new(0);
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(e) = check(item) {
                        failures.lock().unwrap().push(format!("{}: {e}", name(item)));
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    let shown = failures
        .iter()
        .take(5)
        .fold(String::new(), |all, failure| all + failure + "\n");
    assert!(
        failures.is_empty(),
        "{} of {} failed; the first:\n{shown}",
        failures.len(),
        items.len()
    );
}

/// The modules that go through the slow checks.
fn sample() -> Vec<&'static Composed> {
    all().iter().filter(|m| m.slow).collect()
}

// ---- naga --------------------------------------------------------------------------------------------------------

fn parse(text: &str) -> Result<(naga::Module, ModuleInfo), String> {
    let module = naga::front::wgsl::parse_str(text).map_err(|e| e.emit_to_string(text))?;
    // What a module does not name it must not need.
    let mut capabilities = Capabilities::default();
    capabilities.set(Capabilities::SHADER_FLOAT16, text.contains("enable f16;"));
    capabilities.set(
        Capabilities::SHADER_FLOAT16_IN_FLOAT32,
        text.contains("unpack2x16float"),
    );
    capabilities.set(Capabilities::SUBGROUP, text.contains("@builtin(subgroup_id)"));
    let info = Validator::new(ValidationFlags::all(), capabilities)
        .subgroup_stages(ShaderStages::COMPUTE)
        .subgroup_operations(SubgroupOperationSet::all())
        .validate(&module)
        .map_err(|e| e.emit_to_string(text))?;
    Ok((module, info))
}

/// Through the writers of all back ends, with the checks that wgpu asks for where a device has no robust access.
fn write(module: &naga::Module, info: &ModuleInfo) -> Result<(), String> {
    let restrict = BoundsCheckPolicy::Restrict;
    let policies = BoundsCheckPolicies {
        index: restrict,
        buffer: restrict,
        ..Default::default()
    };
    let options = spv::Options {
        lang_version: (1, 3),
        bounds_check_policies: policies,
        ..Default::default()
    };
    let words = spv::write_vec(module, info, &options, None).map_err(|e| format!("SPIR-V: {e}"))?;
    if words.first() != Some(&0x0723_0203) {
        return Err("SPIR-V: no magic number".to_owned());
    }
    let options = msl::Options {
        lang_version: (2, 4),
        bounds_check_policies: policies,
        ..Default::default()
    };
    msl::write_string(module, info, &options, &msl::PipelineOptions::default())
        .map_err(|e| format!("MSL: {e}"))?;
    // f16 is of shader model 6.2.
    let options = hlsl::Options {
        shader_model: hlsl::ShaderModel::V6_2,
        ..Default::default()
    };
    hlsl::Writer::new(&mut String::new(), &options, &hlsl::PipelineOptions::default())
        .write(module, info, None)
        .map_err(|e| format!("HLSL: {e}"))?;
    let text =
        wgsl::write_string(module, info, wgsl::WriterFlags::empty()).map_err(|e| format!("WGSL: {e}"))?;
    // naga writes no directives.
    let halves = module.types.iter().any(|(_, of)| matches!(of.inner, TypeInner::Scalar(s) | TypeInner::Vector { scalar: s, .. } if s == naga::Scalar::F16));
    let directive = if halves { "enable f16;\n" } else { "" };
    parse(&format!("{directive}{text}"))
        .map(|_| ())
        .map_err(|e| format!("WGSL written by naga does not validate: {e}"))
}

#[test]
fn modules_pass_the_writers_of_naga() {
    let modules = sample();
    each(
        &modules,
        |m| &m.name,
        |m| {
            let (module, info) = parse(&m.naga)?;
            write(&module, &info)
        },
    );
    common::say(&format!(
        "kvpack: {} shader modules through naga's four writers",
        modules.len()
    ));
}

#[test]
fn the_sample_of_other_shapes_has_every_side_on_both_sides() {
    let [_, head_dim, ratio] = SHAPES[1];
    let (mut k_sides, mut v_sides) = (BTreeSet::new(), BTreeSet::new());
    let shape = format!("x{head_dim}_ratio{ratio}");
    for m in all()
        .iter()
        .filter(|m| m.slow && m.kernel.name == "attention_split" && m.name.ends_with(&shape))
    {
        let tile = if m.name.contains("_prefill__") {
            "prefill"
        } else {
            "decode"
        };
        // What makes a side: its codes, its layout and its group.
        let side = |prefix: &str| -> String {
            let is = |line: &&str| {
                let starts =
                    |name: &str| line.starts_with(&format!("const {}_{name}:", prefix.to_uppercase()));
                starts("BITS") || starts("GROUP") || line.starts_with(&format!("fn {prefix}_decode4"))
            };
            let scales = m
                .naga
                .lines()
                .filter(|line| line.ends_with(&format!(" for {prefix}")));
            m.naga.lines().filter(is).chain(scales).chain([tile]).collect()
        };
        k_sides.insert(side("k"));
        v_sides.insert(side("v"));
    }
    let all = 2 * Side::all().len();
    assert_eq!((k_sides.len(), v_sides.len()), (all, all));
}

// ---- limits, bindings and structs --------------------------------------------------------------------------------

/// WebGPU's default limits. naga 30 and wgpu 30 check neither workgroup memory nor a computed workgroup size.
fn fits_default_limits(module: &naga::Module) -> Result<(), String> {
    let at_most = |what: &str, value: u32, limit: u32| {
        if value > limit {
            Err(format!("{what}: {value}, the limit is {limit}"))
        } else {
            Ok(())
        }
    };
    let [ref entry] = module.entry_points[..] else {
        return Err(format!("{} entry points, not one", module.entry_points.len()));
    };
    if entry.workgroup_size_overrides.is_some() || !module.overrides.is_empty() {
        return Err("override constants".to_owned());
    }
    at_most("invocations", entry.workgroup_size.iter().product(), 256)?;
    at_most("workgroup bytes", workgroup_bytes(module), 16_384)?;
    let count = |space: fn(&AddressSpace) -> bool| {
        module
            .global_variables
            .iter()
            .filter(|(_, v)| space(&v.space))
            .count() as u32
    };
    at_most(
        "storage buffers",
        count(|s| matches!(s, AddressSpace::Storage { .. })),
        8,
    )?;
    match count(|s| *s == AddressSpace::Uniform) {
        1 => Ok(()),
        n => Err(format!("uniform buffers: {n}, not one")),
    }
}

fn workgroup_bytes(module: &naga::Module) -> u32 {
    let mut layouts = Layouter::default();
    layouts.update(module.to_ctx()).unwrap();
    let shared = module
        .global_variables
        .iter()
        .filter(|(_, v)| v.space == AddressSpace::WorkGroup);
    shared.map(|(_, v)| layouts[v.ty].size.next_multiple_of(16)).sum()
}

fn entry_is_the_kernels(module: &naga::Module, kernel: &Listed) -> Result<(), String> {
    let entry = &module.entry_points[0];
    if entry.name != kernel.name {
        return Err(format!("the entry point is {}", entry.name));
    }
    let size = module
        .constants
        .iter()
        .find(|(_, c)| c.name.as_deref() == Some("WG_SIZE"));
    let size = size.map(|(_, c)| &module.global_expressions[c.init]);
    let Some(naga::Expression::Literal(naga::Literal::U32(size))) = size else {
        return Err(format!("WG_SIZE is {size:?}"));
    };
    // Hosts count workgroups by this number; attention and the kernels of the read roof come with their own.
    let own = kernel.name == "attention_split" || roof::ALL.iter().any(|k| k.name == kernel.name);
    if entry.workgroup_size != [*size, 1, 1] || !(*size == kernels::WG_SIZE || own) {
        return Err(format!(
            "workgroup size {:?}, WG_SIZE = {size}",
            entry.workgroup_size
        ));
    }
    Ok(())
}

fn bindings_are(module: &naga::Module, expected: &[Binding]) -> Result<(), String> {
    let mut found = BTreeMap::new();
    for (_, variable) in module.global_variables.iter() {
        let Some(at) = variable.binding else { continue };
        let access = match variable.space {
            AddressSpace::Uniform => "uniform",
            AddressSpace::Storage { access } if access == StorageAccess::LOAD => "read",
            AddressSpace::Storage { access } if access == StorageAccess::LOAD | StorageAccess::STORE => {
                "write"
            }
            space => return Err(format!("{space:?}")),
        };
        found.insert(
            (at.group, at.binding),
            format!("{} {access}", variable.name.as_deref().unwrap_or("")),
        );
    }
    let expected: BTreeMap<_, _> = (0..)
        .zip(expected)
        .map(|(number, b)| {
            let access = match b.access {
                Access::Uniform => "uniform",
                Access::Read => "read",
                Access::Write => "write",
            };
            ((0, number), format!("{} {access}", b.name))
        })
        .collect();
    if found == expected {
        Ok(())
    } else {
        Err(format!("bindings {found:?}, in the host's list {expected:?}"))
    }
}

/// A struct as the host lays it out.
pub struct HostStruct {
    pub size: usize,
    pub members: Vec<(&'static str, usize)>,
}

macro_rules! host_struct {
    ($type:ty: $($member:ident)+) => {
        HostStruct {
            size: size_of::<$type>(),
            members: vec![$((stringify!($member), offset_of!($type, $member))),+],
        }
    };
}

pub fn params_of(kernel: &str) -> HostStruct {
    match kernel {
        "amax" => {
            host_struct!(amax::Params: tokens heads head_dim row_offset row_stride head_stride slot)
        }
        "attention_merge" => host_struct!(attention_merge::Params: rows q_heads sinks lse),
        "attention_split" => {
            host_struct!(attention_split::Params: items q_heads scale k_tensor v_tensor back ahead softcap
                q_offset q_row q_head k_turns)
        }
        "dequantize" => host_struct!(dequantize::Params: runs side_tensor),
        "quantize" | "quantize_group" => {
            host_struct!(quantize::Params: runs row_offset row_stride head_stride side_tensor)
        }
        "tensor_scale" => host_struct!(tensor_scale::Params: first slots),
        "embed" => host_struct!(model_kernels::EmbedParams: tokens columns first_row rows),
        "norm" | "rms_norm" => host_struct!(model_kernels::NormParams: rows columns epsilon),
        "matmul" | "matvec" => {
            host_struct!(model_kernels::MatmulParams: rows inner columns first_column output_columns)
        }
        "rope" => {
            host_struct!(model_kernels::RopeParams: tokens heads head_dim first_position halves)
        }
        "read_stride" | "read_four" | "read_block" => host_struct!(roof::Params: vectors),
        "activation" | "swiglu" | "residual" => host_struct!(model_kernels::NumbersParams: numbers),
        other => panic!("say here which host struct is the uniform of {other}"),
    }
}

fn struct_is(module: &naga::Module, name: &str, host: &HostStruct) -> Result<(), String> {
    let found = module
        .types
        .iter()
        .find(|(_, ty)| ty.name.as_deref() == Some(name));
    let Some((
        _,
        naga::Type {
            inner: TypeInner::Struct { members, span },
            ..
        },
    )) = found
    else {
        return Err(format!("no struct {name}"));
    };
    let members: Vec<_> = members
        .iter()
        .map(|m| (m.name.as_deref().unwrap_or_default(), m.offset as usize))
        .collect();
    if members == host.members && *span as usize == host.size {
        return Ok(());
    }
    Err(format!(
        "struct {name}: {members:?}, {span} bytes; on the host {:?}, {} bytes",
        host.members, host.size
    ))
}

/// The distance between elements of a storage array.
fn stride_is(module: &naga::Module, variable: &str, bytes: usize) -> Result<(), String> {
    let found = module
        .global_variables
        .iter()
        .find(|(_, v)| v.name.as_deref() == Some(variable));
    let Some((_, found)) = found else { return Ok(()) };
    match module.types[found.ty].inner {
        TypeInner::Array {
            size: ArraySize::Dynamic,
            stride,
            ..
        } if stride as usize == bytes => Ok(()),
        ref other => Err(format!(
            "{variable}: {other:?}; on the host {bytes} bytes an element"
        )),
    }
}

#[test]
fn every_module_validates_and_fits_default_limits_and_the_hosts_lists() {
    let item = host_struct!(WorkItem: table pages position query queries query_position partial);
    each(
        all(),
        |m| &m.name,
        |m| {
            let (module, _) = parse(&m.naga)?;
            fits_default_limits(&module)?;
            entry_is_the_kernels(&module, m.kernel)?;
            bindings_are(&module, m.kernel.bindings)?;
            struct_is(&module, "Params", &params_of(m.kernel.name))?;
            if m.kernel.name == "attention_split" {
                struct_is(&module, "Item", &item)?;
            }
            stride_is(&module, "items", size_of::<WorkItem>())?;
            stride_is(&module, "page_table", size_of::<TableEntry>())?;
            stride_is(&module, "merges", size_of::<Merge>())?;
            stride_is(&module, "runs", size_of::<SlotRun>())
        },
    );
    common::say(&format!(
        "kvpack: {} shader modules validated and reflected",
        all().len()
    ));
}

/// The members of four-word list entries are read as x, y, z, w.
#[test]
fn list_entries_have_the_order_that_shaders_read() {
    let order = |host: HostStruct| host.members.iter().map(|(_, at)| *at).collect::<Vec<_>>();
    assert_eq!(
        order(host_struct!(SlotRun: page slot count source)),
        [0, 4, 8, 12]
    );
    assert_eq!(
        order(host_struct!(TableEntry: k_page v_page first last)),
        [0, 4, 8, 12]
    );
    assert_eq!(order(host_struct!(Merge: first stride count row)), [0, 4, 8, 12]);
    assert_eq!(
        order(host_struct!(kvpack::work::Status: non_finite saturated)),
        [0, 4]
    );
}

/// A good module with something added or changed.
fn small_module(globals: &str, body: &str) -> String {
    format!(
        "const WG_SIZE: u32 = 64u;\nstruct Params {{ numbers: u32 }}\n\
         @group(0) @binding(0) var<uniform> params: Params;\n\
         @group(0) @binding(1) var<storage, read> x: array<u32>;\n\
         @group(0) @binding(2) var<storage, read_write> output: array<u32>;\n{globals}\n\
         @compute @workgroup_size(WG_SIZE)\nfn activation(@builtin(local_invocation_index) i: u32) {{\n\
         if (i < params.numbers) {{ output[i] = x[i]; }}\n{body}\n}}\n"
    )
}

#[test]
fn the_reflection_checks_can_fail() {
    let judge = |text: &str| -> Result<(), String> {
        let (module, _) = parse(text)?;
        fits_default_limits(&module)?;
        entry_is_the_kernels(&module, &model_kernels::ACTIVATION)?;
        bindings_are(&module, model_kernels::ACTIVATION.bindings)?;
        stride_is(&module, "x", 4)?;
        struct_is(&module, "Params", &params_of("activation"))
    };
    let good = small_module("", "");
    judge(&good).unwrap();
    let wrong = |from: &str, to: &str, part: &str| {
        assert!(good.contains(from), "{from}");
        let message = judge(&good.replace(from, to)).unwrap_err();
        assert!(message.contains(part), "{part}: {message}");
    };
    wrong("fn activation", "fn other", "entry point is other");
    wrong(
        "workgroup_size(WG_SIZE)",
        "workgroup_size(32)",
        "workgroup size [32, 1, 1]",
    );
    wrong("u32 = 64u", "u32 = 128u", "workgroup size [128, 1, 1]");
    wrong("u32 = 64u", "u32 = 512u", "invocations: 512");
    wrong("const WG_SIZE: u32 =", "override WG_SIZE: u32 =", "override");
    wrong("@binding(1)", "@binding(3)", "bindings");
    wrong("storage, read>", "storage, read_write>", "bindings");
    wrong("> x: array", "> y: array", "no definition");
    wrong("numbers: u32", "a: u32, numbers: u32", "struct Params");
    wrong("numbers: u32", "numbers: u32, b: u32", "struct Params");
    assert!(
        stride_is(&parse(&good).unwrap().0, "x", 8)
            .unwrap_err()
            .contains("8 bytes")
    );
    let more: String = (3..10).fold(String::new(), |mut all, i| {
        let _ = writeln!(
            all,
            "@group(0) @binding({i}) var<storage, read> b{i}: array<u32>;"
        );
        all
    });
    assert!(
        judge(&small_module(&more, ""))
            .unwrap_err()
            .contains("storage buffers: 9")
    );
    let uniform = "@group(0) @binding(3) var<uniform> second: Params;";
    assert!(
        judge(&small_module(uniform, ""))
            .unwrap_err()
            .contains("uniform buffers: 2")
    );
}

// ---- Tint --------------------------------------------------------------------------------------------------------

/// Runs `tools/browser/tint.mjs`; exit code and output. A missing node is a failure: browsers' compiler refuses what naga
/// lets pass.
fn tint_with(script: &Path, arguments: &[&Path]) -> (i32, String) {
    let run = Command::new("node").arg(script).args(arguments).output().unwrap_or_else(|e| {
        panic!("node cannot be started ({e}); it compiles the shaders with Tint. Run: apt-get install -y nodejs npm")
    });
    let text = String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr);
    (run.status.code().unwrap_or(-1), text)
}

pub fn tint(arguments: &[&Path]) -> (i32, String) {
    let (code, text) = tint_with(&common::path("tools/browser/tint.mjs"), arguments);
    assert_ne!(code, 3, "{text}");
    (code, text)
}

/// Tint's words about one module; empty where it accepts it.
fn tint_complaints(text: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("module.wgsl"), text).unwrap();
    match tint(&[folder.path()]) {
        (0, _) => String::new(),
        (_, output) => output,
    }
}

#[test]
fn modules_compile_in_tint() {
    // A folder for each of two processes: a second core halves the time.
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let modules = sample();
    for (i, m) in modules.iter().enumerate() {
        fs::write(
            folders[i % 2].path().join(format!("{}.wgsl", m.name)),
            &m.standard,
        )
        .unwrap();
    }
    let results: Vec<_> = std::thread::scope(|scope| {
        let runs: Vec<_> = folders
            .iter()
            .map(|folder| scope.spawn(|| tint(&[folder.path()])))
            .collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    let mut accepted = 0;
    for (code, text) in results {
        let last = text.lines().last().unwrap_or_default();
        let shown: String = text.chars().take(2000).collect();
        assert_eq!(code, 0, "{shown}\n{last}");
        accepted += last
            .strip_suffix(" shaders, 0 failed")
            .and_then(|n| n.parse::<usize>().ok())
            .expect(last);
    }
    assert_eq!(accepted, modules.len(), "Tint saw other files");
    common::say(&format!("kvpack: {accepted} shader modules through Tint"));
}

#[test]
fn the_tint_check_can_fail() {
    let (code, text) = tint(&[Path::new("--self-test")]);
    assert_eq!(code, 0, "{text}");
    // Without its package it fails and says what helps.
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("tint.mjs");
    fs::copy(common::path("tools/browser/tint.mjs"), &script).unwrap();
    fs::write(folder.path().join("module.wgsl"), small_module("", "")).unwrap();
    let (code, text) = tint_with(&script, &[folder.path()]);
    assert!(code == 3 && text.contains("npm ci --prefix"), "{code}: {text}");
}

// ---- field cases -------------------------------------------------------------------------------------------------

#[test]
fn dev_01_a_barrier_in_non_uniform_flow_is_refused_by_tint_only() {
    let text = small_module("", "if (i < 32u) { output[i] = 1u; workgroupBarrier(); }");
    parse(&text).expect("naga lets it pass: the reason for a second compiler");
    let words = tint_complaints(&text);
    assert!(words.contains("uniform control flow"), "{words}");
    assert_eq!(tint_complaints(&small_module("", "workgroupBarrier();")), "");
}

#[test]
fn dev_02_a_subgroup_call_in_non_uniform_flow_is_refused_by_tint() {
    let text = |body: &str| format!("enable subgroups;\n{}", small_module("", body));
    let words = tint_complaints(&text("if (i < 5u) { output[i] = subgroupAdd(i); }"));
    assert!(words.contains("uniform control flow"), "{words}");
    assert_eq!(
        tint_complaints(&text(
            "let sum = subgroupAdd(i); if (i < 5u) { output[i] = sum; }"
        )),
        ""
    );
    // One source cannot serve both compilers, so the composer writes the line for one of them.
    let mut composer = Composer::new("k", "enable subgroups;\nfn k() {}\n");
    composer.part("p", "fn p() {}\n");
    assert!(
        composer
            .compose(Target::Standard)
            .unwrap()
            .starts_with("enable subgroups;\n")
    );
    assert!(!composer.compose(Target::Naga).unwrap().contains("enable"));
    assert!(
        parse(&composer.compose(Target::Standard).unwrap())
            .unwrap_err()
            .contains("subgroups")
    );
}

#[test]
fn dev_04_an_undefined_identifier_is_an_error_with_the_compilers_words() {
    let text = small_module("", "output[i] = nonsense;");
    assert!(parse(&text).unwrap_err().contains("nonsense"));
    assert!(tint_complaints(&text).contains("nonsense"));
    // Infinity is no constant expression: naga lets the bit pattern pass, Tint does not.
    let infinite = small_module("", "output[i] = u32(bitcast<f32>(0xff800000u));");
    assert!(
        tint_complaints(&infinite).contains("value -inf"),
        "{}",
        tint_complaints(&infinite)
    );
    let Some(gpu) = common::gpu("dev_04") else { return };
    let composer = Composer::new("activation", &text);
    let error = gpu
        .kernel("activation", model_kernels::ACTIVATION.bindings, &composer)
        .unwrap_err();
    let Error::Shader { kernel, message } = &error else {
        panic!("{error}")
    };
    assert!(kernel == "activation" && message.contains("nonsense"), "{error}");
    // The device still works, and so does the same kernel once it is right.
    let composer = Composer::new("activation", &small_module("", ""));
    gpu.kernel("activation", model_kernels::ACTIVATION.bindings, &composer)
        .unwrap();
}

#[test]
fn dev_06_workgroup_memory_above_the_default_limit() {
    // K and V tiles of 16 x 256 f32: 32 KiB.
    let text = small_module(
        "var<workgroup> k: array<f32, 4096>;\nvar<workgroup> v: array<f32, 4096>;",
        "k[i] = 0.0; v[i] = 0.0; workgroupBarrier(); output[i] = u32(k[63u - i] + v[63u - i]);",
    );
    let (module, _) = parse(&text).expect("naga does not count workgroup memory");
    assert!(
        fits_default_limits(&module)
            .unwrap_err()
            .contains("workgroup bytes: 32768")
    );
    assert!(tint_complaints(&text).contains("16384"));

    // The host chooses tiles that fit, for every shape that it serves; what it counts is what the module has.
    let page = |head_dim| PageLayout::new(Side::F16, 1, head_dim, 8).unwrap();
    let shapes: Vec<_> = (8..=256)
        .step_by(8)
        .flat_map(|head_dim| {
            (1..=16).map(move |ratio| (head_dim, ratio, format!("head_dim {head_dim}, ratio {ratio}")))
        })
        .collect();
    each(
        &shapes,
        |(_, _, name)| name,
        |&(head_dim, ratio, _)| {
            let k = page(head_dim);
            for (prefill, software) in [(false, false), (true, false), (false, true), (true, true)] {
                let variant = Variant::new([&k, &k], ratio, prefill, software);
                variant.check([&k, &k]).map_err(|e| e.to_string())?;
                let text = attention_split::composer(&k, &k, ratio, variant, FloatType::F32)
                    .compose(Target::Naga)
                    .unwrap();
                let (module, _) = parse(&text)?;
                fits_default_limits(&module)?;
                if u64::from(workgroup_bytes(&module)) != variant.workgroup_bytes(&k) {
                    return Err(format!(
                        "{} bytes, the host counts {}",
                        workgroup_bytes(&module),
                        variant.workgroup_bytes(&k)
                    ));
                }
            }
            Ok(())
        },
    );

    // A tile chosen by hand is refused before any pipeline is built.
    let Some(gpu) = common::gpu("dev_06") else { return };
    let k = page(256);
    let refused = AttentionSplit::plan(
        gpu,
        &k,
        &k,
        16,
        Variant {
            head_tile: 16,
            ..Variant::new([&k, &k], 16, false, false)
        },
        FloatType::F32,
    )
    .unwrap_err();
    assert!(
        matches!(refused, Error::Limit { allowed: 16_384, .. }),
        "{refused}"
    );
    AttentionSplit::plan(
        gpu,
        &k,
        &k,
        16,
        Variant::new([&k, &k], 16, false, false),
        FloatType::F32,
    )
    .unwrap();
}

#[test]
fn dev_15_a_constant_that_makes_an_array_empty_is_refused_by_name() {
    let k = PageLayout::new(Side::F16, 1, 64, 64).unwrap();
    let good = Variant::new([&k, &k], 4, false, false);
    for (name, variant) in [
        ("HEAD_TILE", Variant { head_tile: 0, ..good }),
        (
            "TOKEN_TILE",
            Variant {
                token_tile: 0,
                ..good
            },
        ),
        (
            "SLOT_QUADS",
            Variant {
                slot_quads: 0,
                ..good
            },
        ),
    ] {
        // By the host,
        let refused = variant.check([&k, &k]).unwrap_err();
        assert!(matches!(refused, Error::Shape { value: 0, .. }), "{refused}");
        assert!(refused.to_string().contains(&name.to_lowercase()), "{refused}");
        // and by the compiler where the host did not look.
        let composer = attention_split::composer(&k, &k, 4, variant, FloatType::F32);
        let words = parse(&composer.compose(Target::Naga).unwrap()).unwrap_err();
        assert!(words.contains(name), "{words}");
        let Some(gpu) = common::gpu("dev_15") else { return };
        let bindings = attention_split::BINDINGS;
        let refused = gpu.kernel("attention_split", bindings, &composer).unwrap_err();
        assert!(
            matches!(&refused, Error::Shader { message, .. } if message.contains(name)),
            "{refused}"
        );
    }
}

// ---- the files ---------------------------------------------------------------------------------------------------

/// The shader files, as paths from `shaders/` without `.wgsl`, with their text.
fn files() -> BTreeMap<String, String> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.ends_with("shaders/standalone") {
                // Composed of the others.
            } else if path.is_dir() {
                walk(&path, found)
            } else {
                found.push(path)
            }
        }
    }
    let root = common::path("shaders");
    let mut found = Vec::new();
    walk(&root, &mut found);
    let files: BTreeMap<_, _> = found
        .iter()
        .filter(|path| path.extension().is_some_and(|e| e == "wgsl"))
        .map(|path| {
            let name = path.strip_prefix(&root).unwrap().with_extension("");
            let name: Vec<_> = name
                .components()
                .map(|part| part.as_os_str().to_str().unwrap())
                .collect();
            (name.join("/"), fs::read_to_string(path).unwrap())
        })
        .collect();
    assert!(files.len() > 20);
    files
}

fn without_comment(line: &str) -> &str {
    line.split_once("//").map_or(line, |(code, _)| code)
}

/// What our own rules say against a file, beyond what compilers say.
fn breaches(name: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    if !text.starts_with("// ") {
        found.push("the first line does not say what the file is".to_owned());
    }
    for (number, line) in (1..).zip(text.lines()) {
        let code = without_comment(line);
        let mut breach = |what: &str| found.push(format!("line {number}: {what}: {line}"));
        let words: Vec<_> = code
            .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
            .collect();
        for word in &words {
            match *word {
                "override" => breach("shapes are `const`: override constants cannot size arrays everywhere"),
                "enable" | "requires" if !["parts/reduce_subgroup", "parts/numbers_f16"].contains(&name) => {
                    breach("a feature that not every device has")
                }
                "f16" if name != "parts/numbers_f16" => breach("16-bit arithmetic"),
                "inf" | "nan" | "infinity" => breach("WGSL has no such constant"),
                "ptr" => breach("naga refuses pointers to storage and workgroup memory as parameters"),
                _ if word.starts_with("subgroup") && name != "parts/reduce_subgroup" => {
                    breach("subgroup built-ins belong into parts/reduce_subgroup");
                }
                _ => {}
            }
        }
        if code.contains("/*") {
            breach("block comment");
        }
        let from_bits = code
            .split("bitcast<")
            .skip(1)
            .filter_map(|rest| rest.split_once(">(").map(|(_, of)| of));
        if from_bits
            .into_iter()
            .any(|of| of.starts_with("0x") || of.starts_with("vec4<u32>(0x"))
        {
            breach("a constant made from bits may be NaN or infinite, which browsers refuse");
        }
        if code.contains("@workgroup_size(") && !code.contains("@workgroup_size(WG_SIZE)") {
            breach("the workgroup size is not WG_SIZE");
        }
        if code.starts_with("const ") && !(code.contains(": ") && code.contains(" = ") && code.contains(';'))
        {
            breach("a constant that the composer cannot set: `const NAME: type = value;`");
        }
        if code.contains("var<storage") {
            if !line.starts_with("@group(0) @binding(") {
                breach("bindings are in group 0, a line each");
            }
            if !line.contains("; // [") {
                breach("the binding's shape is missing: `; // [page, word]`");
            }
        }
    }
    found
}

#[test]
fn shader_files_keep_the_rules() {
    let found: Vec<_> = files()
        .iter()
        .flat_map(|(name, text)| {
            breaches(name, text)
                .into_iter()
                .map(move |b| format!("{name}: {b}"))
        })
        .collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn the_rules_for_shader_files_can_be_broken() {
    let bad = [
        "override N: u32 = 1u;",
        "enable f16;",
        "enable subgroups;",
        "var h: f16;",
        "let s = subgroupAdd(1u);",
        "fn f(p: ptr<storage, array<u32>>) {}",
        "let x = bitcast<f32>(0xff800000u);",
        "let x = bitcast<vec4<f32>>(vec4<u32>(0x7fc00000u));",
        "@compute @workgroup_size(64)",
        "@compute @workgroup_size(WG_SIZE, 2)",
        "const N = 4u;",
        "@group(0) @binding(1) var<storage, read> x: array<u32>;",
        "@group(1) @binding(1) var<storage, read> x: array<u32>; // [number]",
        "/* const N: u32 = 4u; */",
        "let x = inf;",
    ];
    for line in bad {
        assert!(
            !breaches("parts/p", &format!("// What.\n{line}\n")).is_empty(),
            "{line}"
        );
    }
    assert!(!breaches("parts/p", "fn p() {}\n").is_empty());
    let good = "// What.\n@group(0) @binding(1) var<storage, read> x: array<u32>; // [number], no f16 here\n\
                const N: u32 = 4u; // not an override\n@compute @workgroup_size(WG_SIZE)\n";
    assert_eq!(breaches("parts/p", good), [""; 0]);
    let subgroups = "// What.\nenable subgroups;\nfn p() { let s = subgroupAdd(1u); }\n";
    assert_eq!(breaches("parts/reduce_subgroup", subgroups), [""; 0]);
}

/// The files whose text a composed module has, by the composer's headings.
fn files_of(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter_map(|line| line.strip_prefix("// ======== "))
        .map(|heading| {
            let file = heading.split_once(" for ").map_or(heading, |(file, _)| file);
            file.strip_suffix(" encoder").unwrap_or(file)
        })
}

#[test]
fn no_shader_file_and_no_function_is_dead() {
    let used = Mutex::new(BTreeSet::new());
    let called = Mutex::new(BTreeSet::new());
    each(
        &sample(),
        |m| &m.name,
        |m| {
            let (mut module, _) = parse(&m.naga)?;
            // What remains is what the entry point reaches.
            compact(&mut module, KeepUnused::No);
            let names = module.functions.iter().filter_map(|(_, f)| f.name.clone());
            called
                .lock()
                .unwrap()
                .extend(names.chain([module.entry_points[0].name.clone()]));
            used.lock().unwrap().extend(files_of(&m.naga).map(str::to_owned));
            Ok(())
        },
    );
    let (used, called) = (used.into_inner().unwrap(), called.into_inner().unwrap());
    for (name, text) in files() {
        let short = name
            .strip_prefix("model/")
            .or(name.strip_prefix("bench/"))
            .unwrap_or(&name);
        assert!(
            used.contains(short),
            "no module is composed from shaders/{name}.wgsl"
        );
        for function in text
            .lines()
            .filter_map(|line| line.strip_prefix("fn ")?.split_once('('))
            .map(|(name, _)| name)
        {
            let copies = match function.strip_prefix("side_") {
                Some(rest) => ["side", "k", "v"]
                    .map(|prefix| format!("{prefix}_{rest}"))
                    .to_vec(),
                None => vec![function.to_owned()],
            };
            assert!(
                copies.iter().any(|copy| called.contains(copy)),
                "shaders/{name}.wgsl: nothing calls {function}"
            );
        }
    }
    for file in used {
        let known = files();
        let folders = ["", "model/", "bench/"];
        let known = |file: &str| {
            folders
                .iter()
                .any(|folder| known.contains_key(&format!("{folder}{file}")))
        };
        assert!(
            known(&file) || file == "the names that the kernel calls",
            "a heading names no file: {file}"
        );
    }
}

#[test]
fn the_readme_of_the_shaders_lists_kernels_bindings_and_files() {
    let readme = fs::read_to_string(common::path("shaders/README.md")).unwrap();
    let plain: String = readme.split_whitespace().collect::<Vec<_>>().join(" ");
    for kernel in listed() {
        // `| `name` | `params` `source` ... |`
        let bindings: Vec<_> = kernel.bindings.iter().map(|b| format!("`{}`", b.name)).collect();
        let row = format!("| `{}` | {} |", kernel.name, bindings.join(" "));
        assert!(
            plain.contains(&row),
            "shaders/README.md has no row that begins with {row}"
        );
    }
    for name in files().into_keys() {
        let (folder, file) = name.rsplit_once('/').unwrap_or(("", &name));
        assert!(
            plain.contains(&format!("`{file}`")),
            "shaders/README.md does not name {folder}/{file}.wgsl"
        );
    }
}
