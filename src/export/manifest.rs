//! `manifest.json` of an export: what each module binds, how its uniform is packed, how it is dispatched and what it needs.
//! Written from the composed text; read with every field checked, since a manifest may come from anywhere.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::dispatch::{Counts, Dispatch};
use super::geometry::Geometry;
use super::modules::Shape;
use super::writers::ExportTarget;
use crate::error::{Error, Result};
use crate::kernels::FloatType;
use crate::pages::heads_ratio;
use crate::spec::{Pair, Side};
use crate::variant::Arithmetic;

/// What `schema` says.
pub const SCHEMA: &str = "kvpack.shaders";
/// The version that is written and read.
pub const VERSION: u32 = 1;
/// The file's name in its folder.
pub const FILE: &str = "manifest.json";

/// The largest file that is read: manifests take some kilobytes a module.
const MOST_BYTES: u64 = 64 << 20;
/// The largest shader file that is read.
const MOST_SHADER_BYTES: u64 = 16 << 20;
/// The most entries of any list.
const MOST_ENTRIES: usize = 4096;
/// The largest uniform: WebGPU's default limit of a uniform binding.
const MOST_PARAMS_BYTES: u32 = 65_536;
/// WebGPU's default limit of buffers that a kernel binds.
pub(crate) const STORAGE_BUFFERS: u32 = 8;

/// The whole file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`SCHEMA`].
    pub schema: String,
    /// [`VERSION`].
    pub version: u32,
    /// Who wrote it, with a version.
    pub generator: String,
    /// What the shaders are written in.
    pub target: ExportTarget,
    /// What the writer of that language did.
    pub code: Code,
    /// The shape of the cache.
    pub shape: Shape,
    /// The types of the numbers in a caller's buffers.
    pub types: Types,
    /// The pairs.
    pub pairs: Vec<String>,
    /// The modules, a file each.
    pub modules: Vec<ModuleEntry>,
    /// The cases, where there are golden vectors.
    pub vectors: Vec<VectorEntry>,
}

/// The types of the numbers in a caller's buffers: `f32` or `f16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Types {
    /// Of new rows of K and V.
    pub rows: FloatType,
    /// Of queries.
    pub queries: FloatType,
    /// Of outputs.
    pub outputs: FloatType,
}

/// What a host must know of the code beside its bindings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Code {
    /// The language with its version.
    pub language: String,
    /// What happens to indices beyond the end of a buffer.
    pub bounds_checks: String,
    /// What workgroup memory holds at first.
    pub workgroup_memory: String,
}

impl Code {
    /// Of a target.
    pub fn of(target: ExportTarget) -> Code {
        let checks = match target.is_wgsl() {
            true => "by the compiler of the WGSL; the kernels need none where work lists fit the buffers",
            false => "none; the kernels need none where work lists fit the buffers",
        };
        let memory = match target.is_wgsl() {
            true => {
                "zeroed by the compiler of the WGSL; the kernels store before they load, so it may be switched off"
            }
            false => "not zeroed; the kernels store before they load",
        };
        Code {
            language: target.language().to_owned(),
            bounds_checks: checks.to_owned(),
            workgroup_memory: memory.to_owned(),
        }
    }
}

/// One module.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModuleEntry {
    /// Its name: letters, digits, `_` and `-`.
    pub name: String,
    /// The kernel.
    pub kernel: String,
    /// The file, beside the manifest.
    pub file: String,
    /// The entry point's name in the file.
    pub entry_point: String,
    /// What it does.
    pub what: String,
    /// Invocations of a workgroup in x, y, z.
    pub workgroup_size: [u32; 3],
    /// Workgroup memory as WebGPU counts it: each variable takes a multiple of 16 bytes.
    pub workgroup_bytes: u32,
    /// Whether it runs within WebGPU's default limits and without features.
    pub portable: bool,
    /// WebGPU's names of the features that it needs.
    pub features: Vec<String>,
    /// What it takes of some limits.
    pub limits: Limits,
    /// The buffers.
    pub bindings: Vec<BindingEntry>,
    /// Buffers that the target adds to those of the kernel.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_bindings: Vec<ExtraBinding>,
    /// What scores are computed in, of attention: `f32`, `f16` or `packed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arithmetic: Option<Arithmetic>,
    /// The uniform of the binding `params`.
    pub params: StructEntry,
    /// Other structs that buffers hold, by name.
    pub structs: Vec<NamedStruct>,
    /// The constants that the text is composed with, and those that follow from them.
    pub constants: Vec<ConstantEntry>,
    /// How many workgroups.
    pub dispatch: DispatchEntry,
    /// The pages that it reads or writes, by the prefix of their names: `side`, `src`, `k`, `v`.
    pub pages: BTreeMap<String, Geometry>,
}

/// What a module takes of the limits that WebGPU knows by these names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Limits {
    /// Storage buffers.
    pub max_storage_buffers_per_shader_stage: u32,
    /// Bytes of workgroup memory.
    pub max_compute_workgroup_storage_size: u32,
    /// Invocations of a workgroup.
    pub max_compute_invocations_per_workgroup: u32,
}

/// How a kernel uses a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BindingKind {
    /// A uniform.
    Uniform,
    /// Storage that is read.
    Read,
    /// Storage that is read and written.
    ReadWrite,
}

/// One buffer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BindingEntry {
    /// The bind group; the descriptor set.
    pub group: u32,
    /// The number in it.
    pub binding: u32,
    /// The name in the WGSL.
    pub name: String,
    /// How it is used.
    pub kind: BindingKind,
    /// The type in the WGSL.
    #[serde(rename = "type")]
    pub of: String,
    /// What its dimensions are.
    pub shape: String,
    /// Whether this module touches it. One that it does not touch is in no layout that a compiler derives by itself.
    pub used: bool,
    /// Where the target's own text puts it: `buffer(3)`, `register(t3)`, `binding = 3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<String>,
}

/// A buffer that is not the kernel's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtraBinding {
    /// Where the target's text puts it.
    pub slot: String,
    /// What it holds.
    pub what: String,
}

/// A struct as it lies in memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StructEntry {
    /// Its bytes.
    pub size: u32,
    /// Its fields.
    pub fields: Vec<FieldEntry>,
}

/// A struct with its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamedStruct {
    /// Its name in the types of bindings.
    pub name: String,
    /// Its bytes, also from one to the next in an array.
    pub size: u32,
    /// Its fields.
    pub fields: Vec<FieldEntry>,
}

/// A type of a field: four bytes each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FieldType {
    /// An unsigned integer.
    U32,
    /// A signed integer.
    I32,
    /// binary32.
    F32,
}

/// One field of a struct.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FieldEntry {
    /// Its name.
    pub name: String,
    /// Its type.
    #[serde(rename = "type")]
    pub of: FieldType,
    /// Bytes before it.
    pub offset: u32,
    /// What it means.
    pub what: String,
}

/// A constant of the text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConstantEntry {
    /// Its name.
    pub name: String,
    /// Its type in WGSL.
    #[serde(rename = "type")]
    pub of: String,
    /// Its value.
    pub value: ConstantValue,
    /// What it means.
    pub what: String,
}

/// The value of a constant.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ConstantValue {
    /// A truth value.
    Bool(bool),
    /// An integer.
    Integer(i64),
    /// Any other number.
    Number(f64),
}

impl ConstantValue {
    /// The value of a constant of type u32.
    pub fn as_u32(self) -> Option<u32> {
        match self {
            ConstantValue::Integer(value) => u32::try_from(value).ok(),
            _ => None,
        }
    }
}

/// What a formula counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CountsEntry {
    /// Invocations: workgroups are this by `workgroup_size[0]`, rounded up.
    Invocations,
    /// Workgroups.
    Workgroups,
}

/// How many workgroups: those of the formula folded into x and y, each at most 65,535, and z as given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DispatchEntry {
    /// What the formula counts.
    pub counts: CountsEntry,
    /// A product of numbers, fields of the uniform and such divided and rounded up: `params.runs * ceil(params.n / 4)`.
    pub formula: String,
    /// Workgroups in z.
    pub z: u32,
}

impl DispatchEntry {
    /// The dispatch, taken apart; None where the formula is none.
    pub fn parse(&self) -> Option<Dispatch> {
        let counts = match self.counts {
            CountsEntry::Invocations => Counts::Invocations,
            CountsEntry::Workgroups => Counts::Workgroups,
        };
        Dispatch::parse(counts, &self.formula, self.z)
    }
}

/// A case of golden vectors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VectorEntry {
    /// Its name: letters, digits, `_` and `-`.
    pub case: String,
    /// Its folder, relative to the manifest.
    pub folder: String,
    /// The pair, where it is the case of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pair: Option<String>,
    /// `decode` or `prefill`, where it is the case of a pair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// The modules that it dispatches.
    pub modules: Vec<String>,
}

/// What every version of the file has.
#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    schema: Option<String>,
    #[serde(default)]
    version: Option<serde_json::Value>,
}

/// A reason with the place in the document, such as `modules[3].file`.
struct Fault(String, String);

type Checked = std::result::Result<(), Fault>;

fn fault(place: impl Into<String>, reason: impl Into<String>) -> Fault {
    Fault(place.into(), reason.into())
}

/// Fails unless the condition holds.
fn need(holds: bool, place: impl Into<String>, reason: impl Into<String>) -> Checked {
    if holds { Ok(()) } else { Err(fault(place, reason)) }
}

impl Manifest {
    /// The file's bytes: a line for each innermost list or object, a line feed at its end.
    ///
    /// # Errors
    /// [`Error::Manifest`] where a number is none of JSON's.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let pretty = serde_json::to_string_pretty(self).map_err(|error| Error::Manifest {
            file: FILE.to_owned(),
            reason: error.to_string(),
        })?;
        Ok(a_line_each(&pretty).into_bytes())
    }

    /// Reads a manifest from a file, or from the folder that holds it.
    ///
    /// # Errors
    /// [`Error::Manifest`] with the file and the place in it for what is no manifest of this version, or contradicts itself.
    pub fn read(path: &Path) -> Result<Manifest> {
        let path = match path.is_dir() {
            true => path.join(FILE),
            false => path.to_owned(),
        };
        let file = path.display().to_string();
        let bytes = read_at_most(&path, MOST_BYTES)?;
        Manifest::parse(&file, &bytes)
    }

    /// Reads a manifest from bytes; `file` is what errors call it.
    ///
    /// # Errors
    /// As [`Manifest::read`].
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Manifest> {
        let refuse = |reason: String| Error::Manifest {
            file: file.to_owned(),
            reason,
        };
        let json = |error: serde_json::Error| Error::Manifest {
            file: format!("{file}:{}:{}", error.line(), error.column()),
            reason: without_place(&error.to_string()),
        };
        let head: Head = serde_json::from_slice(bytes).map_err(json)?;
        if head.schema.as_deref() != Some(SCHEMA) {
            let found = head
                .schema
                .map_or("none".to_owned(), |schema| format!("`{schema}`"));
            return Err(refuse(format!("its schema is {found}, not `{SCHEMA}`")));
        }
        match head.version.as_ref().and_then(serde_json::Value::as_u64) {
            Some(version) if version == u64::from(VERSION) => {}
            Some(version) if version > u64::from(VERSION) => {
                return Err(refuse(format!(
                    "it is of version {version}, and this kvpack reads version {VERSION}; use a newer one"
                )));
            }
            _ => return Err(refuse(format!("its version is not {VERSION}"))),
        }
        let manifest: Manifest = serde_json::from_slice(bytes).map_err(json)?;
        manifest
            .check()
            .map_err(|Fault(place, reason)| refuse(format!("{place}: {reason}")))?;
        Ok(manifest)
    }

    /// The module of a name.
    pub fn module(&self, name: &str) -> Option<&ModuleEntry> {
        self.modules.iter().find(|module| module.name == name)
    }

    /// The bytes of a module's file in the manifest's folder.
    ///
    /// # Errors
    /// [`Error::Manifest`] where it cannot be read or has no such entry point.
    pub fn shader(&self, folder: &Path, module: &ModuleEntry) -> Result<Vec<u8>> {
        let path = folder.join(&module.file);
        let bytes = read_at_most(&path, MOST_SHADER_BYTES)?;
        // In SPIR-V too names stand as text, in words of little-endian bytes.
        let name = module.entry_point.as_bytes();
        if !bytes.windows(name.len()).any(|window| window == name) {
            return Err(Error::Manifest {
                file: path.display().to_string(),
                reason: format!("it has no entry point `{}`", module.entry_point),
            });
        }
        Ok(bytes)
    }

    /// Everything that holds of a manifest beyond its types.
    fn check(&self) -> Checked {
        let lists = [
            ("pairs", self.pairs.len()),
            ("modules", self.modules.len()),
            ("vectors", self.vectors.len()),
        ];
        for (name, length) in lists {
            need(
                length <= MOST_ENTRIES,
                name,
                format!("{length} entries; at most {MOST_ENTRIES}"),
            )?;
        }
        let shape = self.shape;
        let fits = heads_ratio(shape.q_heads, shape.kv_heads)
            .and_then(|_| shape.page(Side::F16, false))
            .and_then(|_| shape.page(Side::F16, true));
        fits.map_err(|error| fault("shape", error.to_string()))?;
        for (i, pair) in self.pairs.iter().enumerate() {
            let parsed = pair.parse::<Pair>();
            parsed.map_err(|error| fault(format!("pairs[{i}]"), error.to_string()))?;
        }
        unique("modules", self.modules.iter().map(|m| m.name.as_str()), "name")?;
        unique("modules", self.modules.iter().map(|m| m.file.as_str()), "file")?;
        unique("vectors", self.vectors.iter().map(|v| v.case.as_str()), "case")?;
        unique(
            "vectors",
            self.vectors.iter().map(|v| v.folder.as_str()),
            "folder",
        )?;
        for (i, module) in self.modules.iter().enumerate() {
            module.check(&format!("modules[{i}]"))?;
        }
        for (i, case) in self.vectors.iter().enumerate() {
            let place = format!("vectors[{i}]");
            need(is_name(&case.case), format!("{place}.case"), NAME_RULE)?;
            need(is_inside(&case.folder), format!("{place}.folder"), FOLDER_RULE)?;
            for name in &case.modules {
                let known = self.module(name).is_some();
                need(
                    known,
                    format!("{place}.modules"),
                    format!("`{name}` is no module of this manifest"),
                )?;
            }
        }
        Ok(())
    }
}

const NAME_RULE: &str = "a name has letters, digits, _ and -, at most 128";
const FILE_RULE: &str = "it must be a plain file name beside the manifest";
const FOLDER_RULE: &str = "it must be a folder below the manifest's, without `..`";

impl ModuleEntry {
    /// The uniform's binding. Every checked manifest has one.
    pub fn uniform(&self) -> Option<&BindingEntry> {
        self.bindings.iter().find(|b| b.kind == BindingKind::Uniform)
    }

    fn check(&self, place: &str) -> Checked {
        let at = |field: &str| format!("{place}.{field}");
        need(is_name(&self.name), at("name"), NAME_RULE)?;
        need(is_name(&self.kernel), at("kernel"), NAME_RULE)?;
        need(is_file(&self.file), at("file"), FILE_RULE)?;
        need(
            is_identifier(&self.entry_point),
            at("entry_point"),
            "it is no function's name",
        )?;
        let invocations = self
            .workgroup_size
            .iter()
            .try_fold(1_u32, |all, &n| all.checked_mul(n));
        need(
            matches!(invocations, Some(1..=1024)),
            at("workgroup_size"),
            "a workgroup has 1 to 1024 invocations",
        )?;
        let bytes = self.workgroup_bytes;
        need(
            bytes <= 1 << 20,
            at("workgroup_bytes"),
            format!("{bytes} bytes are more than any device has"),
        )?;
        let lists = [
            self.features.len(),
            self.bindings.len(),
            self.structs.len(),
            self.constants.len(),
            self.pages.len(),
        ];
        need(
            lists.iter().all(|&n| n <= MOST_ENTRIES),
            place,
            format!("a list has more than {MOST_ENTRIES} entries"),
        )?;
        unique(
            place,
            self.bindings.iter().map(|b| b.name.as_str()),
            "bindings.name",
        )?;
        let slots: Vec<_> = self.bindings.iter().map(|b| (b.group, b.binding)).collect();
        unique(place, slots.iter().copied(), "group and binding")?;
        for (i, binding) in self.bindings.iter().enumerate() {
            let inside = binding.group < 4 && binding.binding < 1000 && is_identifier(&binding.name);
            need(
                inside,
                format!("{place}.bindings[{i}]"),
                "group below 4, binding below 1000, an identifier as the name",
            )?;
        }
        let uniforms = self.bindings.iter().filter(|b| b.kind == BindingKind::Uniform);
        need(uniforms.count() == 1, at("bindings"), "exactly one is a uniform")?;
        check_struct(&at("params"), self.params.size, &self.params.fields)?;
        unique(
            place,
            self.structs.iter().map(|s| s.name.as_str()),
            "structs.name",
        )?;
        for (i, of) in self.structs.iter().enumerate() {
            check_struct(&format!("{place}.structs[{i}]"), of.size, &of.fields)?;
        }
        unique(
            place,
            self.constants.iter().map(|c| c.name.as_str()),
            "constants.name",
        )?;
        self.check_dispatch(place)?;
        for (prefix, pages) in &self.pages {
            let layout = pages.layout();
            layout.map_err(|error| fault(format!("{place}.pages.{prefix}"), error.to_string()))?;
        }
        let own = self.limits;
        let portable = self.features.is_empty()
            && own.max_storage_buffers_per_shader_stage <= STORAGE_BUFFERS
            && own.max_compute_workgroup_storage_size <= crate::variant::WORKGROUP_BYTES
            && own.max_compute_invocations_per_workgroup <= crate::variant::WORKGROUP_INVOCATIONS;
        need(
            !self.portable || portable,
            at("portable"),
            "it needs a feature or more than WebGPU's default limits",
        )
    }

    fn check_dispatch(&self, place: &str) -> Checked {
        let at = format!("{place}.dispatch");
        let parsed = self
            .dispatch
            .parse()
            .ok_or_else(|| fault(format!("{at}.formula"), "it is no product of numbers and fields"))?;
        need(
            (1..=65_535).contains(&self.dispatch.z),
            format!("{at}.z"),
            "z is from 1 to 65535",
        )?;
        for factor in &parsed.factors {
            let Err(name) = &factor.of else { continue };
            let field = self.params.fields.iter().find(|field| field.name == *name);
            need(
                field.is_some_and(|field| field.of == FieldType::U32),
                format!("{at}.formula"),
                format!("params.{name} is no u32 field of params"),
            )?;
        }
        Ok(())
    }
}

fn check_struct(place: &str, size: u32, fields: &[FieldEntry]) -> Checked {
    need(
        size <= MOST_PARAMS_BYTES && size.is_multiple_of(4) && !fields.is_empty(),
        place,
        format!("a struct has fields, and a multiple of 4 bytes, at most {MOST_PARAMS_BYTES}"),
    )?;
    unique(place, fields.iter().map(|f| f.name.as_str()), "fields.name")?;
    let mut free = 0;
    for (i, field) in fields.iter().enumerate() {
        let inside = field.offset >= free && field.offset.is_multiple_of(4) && field.offset < size;
        need(
            inside,
            format!("{place}.fields[{i}].offset"),
            format!("fields lie one behind the other in {size} bytes, four bytes each"),
        )?;
        free = field.offset + 4;
    }
    Ok(())
}

/// Refuses what stands twice.
fn unique<T: Ord + std::fmt::Debug>(place: &str, items: impl Iterator<Item = T>, what: &str) -> Checked {
    let mut seen = BTreeSet::new();
    for item in items {
        let text = format!("{item:?}");
        need(seen.insert(item), place, format!("two have the {what} {text}"))?;
    }
    Ok(())
}

fn is_name(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    (1..=128).contains(&text.len()) && text.chars().all(plain)
}

fn is_identifier(text: &str) -> bool {
    is_name(text) && !text.contains('-') && !text.starts_with(|c: char| c.is_ascii_digit())
}

/// A plain file name on every system.
fn is_file(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    (1..=160).contains(&text.len())
        && text.chars().all(plain)
        && !text.starts_with('.')
        && !text.ends_with('.')
}

/// A relative path that stays below its root, on every system.
fn is_inside(text: &str) -> bool {
    let normal = |part: Component<'_>| matches!(part, Component::Normal(_));
    text.len() <= 512
        && !text.is_empty()
        && text.split('/').all(is_file)
        && Path::new(text).components().all(normal)
}

/// Pretty JSON with each list and object that holds no other on one line.
fn a_line_each(pretty: &str) -> String {
    let mut text = String::with_capacity(pretty.len());
    // Lines since the last opening bracket, which may turn out to be the innermost.
    let mut open: Vec<&str> = Vec::new();
    // Strings hold no line feeds, so what ends or begins a line is a bracket of the document.
    for line in pretty.lines() {
        let closes = line.trim_start().starts_with(['}', ']']);
        if line.ends_with(['{', '[']) {
            open.iter().for_each(|line| text.extend([*line, "\n"]));
            open = vec![line];
        } else if closes && !open.is_empty() {
            text += open[0];
            text += &open[1..]
                .iter()
                .map(|line| line.trim())
                .collect::<Vec<_>>()
                .join(" ");
            text.extend([line.trim(), "\n"]);
            open.clear();
        } else if open.is_empty() {
            text.extend([line, "\n"]);
        } else {
            open.push(line);
        }
    }
    text
}

/// A file's bytes, unless it is too long for what it should be.
fn read_at_most(path: &PathBuf, most: u64) -> Result<Vec<u8>> {
    let refuse = |reason: String| Error::Manifest {
        file: path.display().to_string(),
        reason,
    };
    let found = fs::metadata(path).map_err(|error| refuse(error.to_string()))?;
    if !found.is_file() {
        return Err(refuse("it is no file".to_owned()));
    }
    if found.len() > most {
        return Err(refuse(format!(
            "it has {} bytes; at most {most} are read",
            found.len()
        )));
    }
    fs::read(path).map_err(|error| refuse(error.to_string()))
}

/// serde_json's message without the place at its end, which stands in front already.
fn without_place(message: &str) -> String {
    message
        .rsplit_once(" at line ")
        .map_or(message, |(reason, _)| reason)
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn innermost_lists_and_objects_take_a_line() {
        let value =
            serde_json::json!({"a": [1, 2], "b": {"c": {"d": "x {", "e": []}, "f": [[1], "]"]}, "g": 3});
        let text = a_line_each(&serde_json::to_string_pretty(&value).unwrap());
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
        let expected = "{\n  \"a\": [1, 2],\n  \"b\": {\n    \"c\": {\"d\": \"x {\", \"e\": []},\n    \"f\": [\n      [1],\n      \"]\"\n    ]\n  },\n  \"g\": 3\n}\n";
        assert_eq!(text, expected);
    }
}
