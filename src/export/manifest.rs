//! `manifest.json` of an export: what each module binds, how its uniform is packed, how it is dispatched and what it needs.
//! Written from the composed text; [`Manifest::read`] takes one from anywhere.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::dispatch::{Counts, Dispatch};
use super::geometry::Geometry;
use super::modules::Shape;
use super::writers::ExportTarget;
use crate::error::{Error, Result};
use crate::kernels::FloatType;
use crate::variant::Arithmetic;

/// What `schema` says.
pub const SCHEMA: &str = "kvpack.shaders";
/// The version that is written and read.
pub const VERSION: u32 = 1;
/// The file's name in its folder.
pub const FILE: &str = "manifest.json";

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
    Number(f32),
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

    /// The module of a name.
    pub fn module(&self, name: &str) -> Option<&ModuleEntry> {
        self.modules.iter().find(|module| module.name == name)
    }
}

impl ModuleEntry {
    /// The uniform's binding. Every checked manifest has one.
    pub fn uniform(&self) -> Option<&BindingEntry> {
        self.bindings.iter().find(|b| b.kind == BindingKind::Uniform)
    }
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
