//! What a composed text says of itself: naga's view of bindings, structs and sizes, and the words of its comments.

use std::collections::BTreeMap;

use naga::proc::Layouter;
use naga::valid::{Capabilities, ModuleInfo, ShaderStages, SubgroupOperationSet, ValidationFlags, Validator};
use naga::{AddressSpace, Expression, Handle, Literal, ScalarKind, StorageAccess, Type, TypeInner};

use super::dispatch::Counts;
use super::geometry::Geometry;
use super::manifest::{
    BindingEntry, BindingKind, ConstantEntry, ConstantValue, CountsEntry, DispatchEntry, ExtraBinding,
    FieldEntry, FieldType, Limits, ModuleEntry, NamedStruct, STORAGE_BUFFERS, StructEntry,
};
use super::modules::Module;
use super::writers::{ExportTarget, HLSL_GRID_REGISTER, MSL_SIZES_SLOT, Written, write};
use crate::error::{Error, Result};
use crate::shader::Target;
use crate::variant::{WORKGROUP_BYTES, WORKGROUP_INVOCATIONS};

/// The name of the uniform's struct in every kernel.
const PARAMS: &str = "Params";

fn refused(kernel: &str, message: impl Into<String>) -> Error {
    Error::Shader {
        kernel: kernel.to_owned(),
        message: message.into(),
    }
}

/// Parses and validates a text in naga's dialect.
pub(crate) fn parse(kernel: &str, text: &str) -> Result<(naga::Module, ModuleInfo)> {
    let module = naga::front::wgsl::parse_str(text)
        .map_err(|error| refused(kernel, error.emit_to_string_with_path(text, kernel)))?;
    let info = validate(kernel, text, &module)?;
    Ok((module, info))
}

/// Validates a module; `text` is what it came from.
pub(crate) fn validate(kernel: &str, text: &str, module: &naga::Module) -> Result<ModuleInfo> {
    let capabilities =
        Capabilities::SHADER_FLOAT16 | Capabilities::SHADER_FLOAT16_IN_FLOAT32 | Capabilities::SUBGROUP;
    Validator::new(ValidationFlags::all(), capabilities)
        .subgroup_stages(ShaderStages::COMPUTE)
        .subgroup_operations(SubgroupOperationSet::all())
        .validate(module)
        .map_err(|error| refused(kernel, error.emit_to_string_with_path(text, kernel)))
}

/// WebGPU's names of the features that the standard's text enables.
pub(crate) fn features(text: &str) -> Vec<&'static str> {
    let enabled = |name: &str| text.lines().any(|line| line == format!("enable {name};"));
    [("f16", "shader-f16"), ("subgroups", "subgroups")]
        .into_iter()
        .filter(|(name, _)| enabled(name))
        .map(|(_, feature)| feature)
        .collect()
}

/// A module's entry in a manifest, and its file.
///
/// # Errors
/// [`Error::Shader`] for a text that does not compose, compile or say what a manifest needs; those of [`write`].
pub(crate) fn entry(module: &Module, target: ExportTarget) -> Result<(ModuleEntry, Written)> {
    let kernel = module.kernel;
    let text = module.composer.compose(Target::Naga)?;
    let (parsed, info) = parse(kernel, &text)?;
    let written = write(kernel, &module.composer, target)?;
    let words = Words::of(&text);
    let [ref entry] = parsed.entry_points[..] else {
        return Err(refused(kernel, "it has not one entry point"));
    };

    let bindings = bindings(kernel, &parsed, &info, &words, target)?;
    let (params, structs) = structs(kernel, &parsed, &words)?;
    let workgroup_bytes = workgroup_bytes(kernel, &parsed)?;
    let limits = Limits {
        max_storage_buffers_per_shader_stage: bindings
            .iter()
            .filter(|binding| binding.kind != BindingKind::Uniform)
            .count() as u32,
        max_compute_workgroup_storage_size: workgroup_bytes,
        max_compute_invocations_per_workgroup: entry.workgroup_size.iter().product(),
    };
    let features = features(&module.composer.compose(Target::Standard)?);
    let portable = features.is_empty()
        && limits.max_storage_buffers_per_shader_stage <= STORAGE_BUFFERS
        && workgroup_bytes <= WORKGROUP_BYTES
        && limits.max_compute_invocations_per_workgroup <= WORKGROUP_INVOCATIONS;
    let extra_bindings = match target {
        ExportTarget::Hlsl => vec![ExtraBinding {
            slot: format!("register(b{HLSL_GRID_REGISTER})"),
            what: "workgroups of the dispatch in x, y and z, three u32".to_owned(),
        }],
        ExportTarget::Msl => vec![ExtraBinding {
            slot: format!("buffer({MSL_SIZES_SLOT})"),
            what: "declared, and read by nothing: bind any buffer, or none".to_owned(),
        }],
        _ => Vec::new(),
    };
    let described = ModuleEntry {
        name: module.name.clone(),
        kernel: kernel.to_owned(),
        file: format!("{}.{}", module.name, target.ending()),
        entry_point: written.entry_point.clone(),
        what: module.what.clone(),
        workgroup_size: entry.workgroup_size,
        workgroup_bytes,
        portable,
        features: features.into_iter().map(str::to_owned).collect(),
        limits,
        bindings,
        extra_bindings,
        arithmetic: module.variant.map(|variant| variant.arithmetic),
        params,
        structs,
        constants: constants(&parsed, &words),
        dispatch: DispatchEntry {
            counts: match module.dispatch.counts {
                Counts::Invocations => CountsEntry::Invocations,
                Counts::Workgroups => CountsEntry::Workgroups,
            },
            formula: module.dispatch.formula(),
            z: module.dispatch.z,
        },
        pages: module
            .pages
            .iter()
            .map(|(prefix, page)| ((*prefix).to_owned(), Geometry::from(page)))
            .collect(),
    };
    Ok((described, written))
}

fn bindings(
    kernel: &str,
    module: &naga::Module,
    info: &ModuleInfo,
    words: &Words<'_>,
    target: ExportTarget,
) -> Result<Vec<BindingEntry>> {
    let used = info.get_entry_point(0);
    let mut found = Vec::new();
    for (handle, variable) in module.global_variables.iter() {
        let Some(at) = variable.binding else { continue };
        let kind = match variable.space {
            AddressSpace::Uniform => BindingKind::Uniform,
            AddressSpace::Storage { access } if access.contains(StorageAccess::STORE) => {
                BindingKind::ReadWrite
            }
            _ => BindingKind::Read,
        };
        let name = variable.name.clone().unwrap_or_default();
        let (of, shape) = words
            .bindings
            .get(name.as_str())
            .ok_or_else(|| refused(kernel, format!("no line declares the binding {name}")))?;
        found.push(BindingEntry {
            group: at.group,
            binding: at.binding,
            slot: target.slot(kind, at.binding),
            used: !used[handle].is_empty(),
            of: (*of).to_owned(),
            shape: (*shape).to_owned(),
            name,
            kind,
        });
    }
    found.sort_by_key(|binding| (binding.group, binding.binding));
    Ok(found)
}

/// The uniform's struct, and those that are elements of buffers.
fn structs(
    kernel: &str,
    module: &naga::Module,
    words: &Words<'_>,
) -> Result<(StructEntry, Vec<NamedStruct>)> {
    let mut params = None;
    let mut others = Vec::new();
    for (_, variable) in module.global_variables.iter() {
        if variable.binding.is_none() {
            continue;
        }
        let of = match module.types[variable.ty].inner {
            TypeInner::Array { base, .. } => base,
            _ => variable.ty,
        };
        let TypeInner::Struct { span, .. } = module.types[of].inner else {
            continue;
        };
        let name = module.types[of].name.clone().unwrap_or_default();
        let fields = fields(kernel, module, of, words)?;
        if name == PARAMS {
            params = Some(StructEntry { size: span, fields });
        } else {
            others.push(NamedStruct {
                name,
                size: span,
                fields,
            });
        }
    }
    let params = params.ok_or_else(|| refused(kernel, format!("no uniform is a struct {PARAMS}")))?;
    Ok((params, others))
}

fn fields(
    kernel: &str,
    module: &naga::Module,
    of: Handle<Type>,
    words: &Words<'_>,
) -> Result<Vec<FieldEntry>> {
    let TypeInner::Struct { members, .. } = &module.types[of].inner else {
        return Ok(Vec::new());
    };
    let owner = module.types[of].name.as_deref().unwrap_or_default();
    members
        .iter()
        .map(|member| {
            let name = member.name.as_deref().unwrap_or_default();
            let of = match module.types[member.ty].inner {
                TypeInner::Scalar(scalar) if scalar.width == 4 => match scalar.kind {
                    ScalarKind::Uint => FieldType::U32,
                    ScalarKind::Sint => FieldType::I32,
                    ScalarKind::Float => FieldType::F32,
                    _ => return Err(refused(kernel, format!("{owner}.{name} is no number"))),
                },
                _ => return Err(refused(kernel, format!("{owner}.{name} is no number of 32 bits"))),
            };
            let what = words.fields.get(&(owner, name)).copied().unwrap_or_default();
            Ok(FieldEntry {
                name: name.to_owned(),
                of,
                offset: member.offset,
                what: what.to_owned(),
            })
        })
        .collect()
}

/// The scalar constants, with the values that naga computes.
fn constants(module: &naga::Module, words: &Words<'_>) -> Vec<ConstantEntry> {
    let value = |init| match module.global_expressions[init] {
        Expression::Literal(Literal::U32(n)) => Some(ConstantValue::Integer(i64::from(n))),
        Expression::Literal(Literal::I32(n)) => Some(ConstantValue::Integer(i64::from(n))),
        Expression::Literal(Literal::F32(n)) => Some(ConstantValue::Number(n)),
        Expression::Literal(Literal::Bool(b)) => Some(ConstantValue::Bool(b)),
        _ => None,
    };
    module
        .constants
        .iter()
        .filter_map(|(_, constant)| {
            let name = constant.name.clone()?;
            let (of, what) = words.constants.get(name.as_str())?;
            Some(ConstantEntry {
                value: value(constant.init)?,
                of: (*of).to_owned(),
                what: (*what).to_owned(),
                name,
            })
        })
        .collect()
}

/// Workgroup memory as WebGPU counts it.
pub(crate) fn workgroup_bytes(kernel: &str, module: &naga::Module) -> Result<u32> {
    let mut layouts = Layouter::default();
    layouts
        .update(module.to_ctx())
        .map_err(|error| refused(kernel, error.to_string()))?;
    let shared = module
        .global_variables
        .iter()
        .filter(|(_, variable)| variable.space == AddressSpace::WorkGroup);
    // An array of another's shader may be of any size.
    Ok(shared
        .map(|(_, variable)| layouts[variable.ty].size)
        .fold(0, |sum: u32, size| {
            sum.saturating_add(size).saturating_add(15) / 16 * 16
        }))
}

/// Types and comments of a text, line by line: kernels keep a declaration a line.
#[derive(Debug, Default)]
struct Words<'a> {
    /// Type and comment of bindings.
    bindings: BTreeMap<&'a str, (&'a str, &'a str)>,
    /// Comments of fields, by struct and field.
    fields: BTreeMap<(&'a str, &'a str), &'a str>,
    /// Type and comment of constants.
    constants: BTreeMap<&'a str, (&'a str, &'a str)>,
}

impl<'a> Words<'a> {
    fn of(text: &'a str) -> Words<'a> {
        let mut words = Words::default();
        let mut owner = None;
        for line in text.lines() {
            let (code, comment) = line.split_once("//").unwrap_or((line, ""));
            let (code, comment) = (code.trim(), comment.trim());
            if let Some(name) = code.strip_prefix("struct ") {
                owner = Some(name.trim_end_matches('{').trim());
            } else if code == "}" {
                owner = None;
            } else if let (Some(owner), Some((name, _))) = (owner, code.split_once(": ")) {
                words.fields.insert((owner, name), comment);
            } else if let Some((name, rest)) =
                code.strip_prefix("const ").and_then(|rest| rest.split_once(": "))
            {
                let of = rest.split_once(" = ").map_or(rest, |(of, _)| of);
                words.constants.insert(name, (of, comment));
            } else if let Some((_, declared)) = code
                .strip_prefix("@group(")
                .and_then(|rest| rest.split_once("var<"))
                .and_then(|(_, rest)| rest.split_once("> "))
                && let Some((name, of)) = declared.split_once(": ")
            {
                words.bindings.insert(name, (of.trim_end_matches(';'), comment));
            }
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_the_declarations() {
        let text = "const A: u32 = 4u; // how many\nconst B: f32 = 1.0;\nstruct Params {\n    n: u32, // numbers\n    m: u32,\n}\n\
                    @group(0) @binding(2) var<storage, read_write> x: array<vec4<u32>>; // [page, word]\n\
                    fn f() { let y: u32 = 1u; }\n";
        let words = Words::of(text);
        assert_eq!(words.constants["A"], ("u32", "how many"));
        assert_eq!(words.constants["B"], ("f32", ""));
        assert_eq!(words.fields[&("Params", "n")], "numbers");
        assert_eq!(words.fields[&("Params", "m")], "");
        assert_eq!(words.bindings["x"], ("array<vec4<u32>>", "[page, word]"));
        assert_eq!(words.bindings.len(), 1);
    }

    #[test]
    fn features_are_the_enabled_ones() {
        assert_eq!(features("// enable f16;\nfn f() {}\n"), [""; 0]);
        assert_eq!(
            features("enable f16;\nenable subgroups;\n"),
            ["shader-f16", "subgroups"]
        );
    }
}
