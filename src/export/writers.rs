//! One composed module in the language of a target.
//!
//! WGSL is the composer's text. SPIR-V, MSL, HLSL and GLSL are naga's, without checks of indices and without zeroed
//! workgroup memory: kernels stay within buffers whose sizes fit their work lists, and store before they load. An index
//! that a wrong work list leads out of a buffer is undefined behaviour there.

use std::fmt;
use std::str::FromStr;

use naga::back::{glsl, hlsl, msl, spv};
use naga::compact::{KeepUnused, compact};
use naga::proc::BoundsCheckPolicies;
use naga::valid::ModuleInfo;
use naga::{AddressSpace, ResourceBinding, ShaderStage, StorageAccess};
use serde::{Deserialize, Serialize};

use super::manifest::BindingKind;
use super::reflect;
use crate::error::{Error, Result};
use crate::shader::{self, Composer};

/// The register in which HLSL reads the numbers of workgroups of a dispatch, a constant buffer of three u32.
pub const HLSL_GRID_REGISTER: u32 = 1;

/// The slot of MSL's struct of buffer sizes: declared wherever arrays have no length, and read by nothing here.
pub(crate) const MSL_SIZES_SLOT: u8 = 30;

/// What shaders are written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExportTarget {
    /// WGSL for naga, as wgpu compiles it: without the line `enable subgroups;`, which it refuses.
    Wgsl,
    /// The standard's WGSL, for browsers.
    WgslBrowser,
    /// SPIR-V 1.3, for Vulkan 1.1.
    Spirv,
    /// Metal Shading Language 2.4.
    Msl,
    /// HLSL of shader model 6.0, or 6.2 where 16-bit arithmetic is used.
    Hlsl,
    /// GLSL 4.50 of a compute shader.
    Glsl,
}

impl ExportTarget {
    /// All of them.
    pub const ALL: [ExportTarget; 6] = [
        ExportTarget::Wgsl,
        ExportTarget::WgslBrowser,
        ExportTarget::Spirv,
        ExportTarget::Msl,
        ExportTarget::Hlsl,
        ExportTarget::Glsl,
    ];

    /// The name on the command line and in manifests.
    pub fn name(self) -> &'static str {
        match self {
            ExportTarget::Wgsl => "wgsl",
            ExportTarget::WgslBrowser => "wgsl-browser",
            ExportTarget::Spirv => "spirv",
            ExportTarget::Msl => "msl",
            ExportTarget::Hlsl => "hlsl",
            ExportTarget::Glsl => "glsl",
        }
    }

    /// The ending of file names.
    pub fn ending(self) -> &'static str {
        match self {
            ExportTarget::Wgsl | ExportTarget::WgslBrowser => "wgsl",
            ExportTarget::Spirv => "spv",
            ExportTarget::Msl => "metal",
            ExportTarget::Hlsl => "hlsl",
            ExportTarget::Glsl => "comp",
        }
    }

    /// The language with its version.
    pub fn language(self) -> &'static str {
        match self {
            ExportTarget::Wgsl | ExportTarget::WgslBrowser => "WGSL",
            ExportTarget::Spirv => "SPIR-V 1.3",
            ExportTarget::Msl => "MSL 2.4",
            ExportTarget::Hlsl => "HLSL, shader model 6.0 (6.2 with shader-f16)",
            ExportTarget::Glsl => "GLSL 4.50",
        }
    }

    /// Whether the files are WGSL, whose compiler adds the checks that the standard asks for.
    pub fn is_wgsl(self) -> bool {
        matches!(self, ExportTarget::Wgsl | ExportTarget::WgslBrowser)
    }

    /// The composer's text for this target. What naga rewrites starts from the text that naga takes.
    pub(crate) fn dialect(self) -> shader::Target {
        match self {
            ExportTarget::WgslBrowser => shader::Target::Standard,
            _ => shader::Target::Naga,
        }
    }

    /// Where a host of this target puts a buffer, if the target says it otherwise than by group and binding.
    pub(crate) fn slot(self, kind: BindingKind, binding: u32) -> Option<String> {
        match self {
            ExportTarget::Wgsl | ExportTarget::WgslBrowser | ExportTarget::Spirv => None,
            ExportTarget::Msl => Some(format!("buffer({binding})")),
            ExportTarget::Hlsl => {
                let letter = match kind {
                    BindingKind::Uniform => 'b',
                    BindingKind::Read => 't',
                    BindingKind::ReadWrite => 'u',
                };
                Some(format!("register({letter}{binding})"))
            }
            ExportTarget::Glsl => Some(format!("binding = {binding}")),
        }
    }
}

impl fmt::Display for ExportTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ExportTarget {
    type Err = Error;

    fn from_str(text: &str) -> Result<ExportTarget> {
        let known = ExportTarget::ALL.into_iter().find(|target| target.name() == text);
        known.ok_or_else(|| Error::Usage {
            asked: format!("target `{text}`"),
            reason: "shaders are not written in it".to_owned(),
            advice: format!(
                "choose of {}",
                ExportTarget::ALL.map(ExportTarget::name).join(", ")
            ),
        })
    }
}

/// A module in the language of its target.
#[derive(Debug, Clone)]
pub struct Written {
    /// The file's bytes.
    pub bytes: Vec<u8>,
    /// The entry point's name in it.
    pub entry_point: String,
}

/// Writes a module.
///
/// # Errors
/// [`Error::Usage`] where the target has no word for a feature of the module, [`Error::Shader`] for one that does not
/// compose or compile.
pub fn write(kernel: &str, composer: &Composer, target: ExportTarget) -> Result<Written> {
    let text = composer.compose(target.dialect())?;
    if target.is_wgsl() {
        return Ok(Written {
            bytes: text.into_bytes(),
            entry_point: kernel.to_owned(),
        });
    }
    if target == ExportTarget::Glsl && reflect::features(&text).contains(&"shader-f16") {
        return Err(Error::Usage {
            asked: format!("`{kernel}` with shader-f16 as GLSL"),
            reason: "GLSL is written without 16-bit arithmetic".to_owned(),
            advice: "leave --arithmetic f16 out, or export another target".to_owned(),
        });
    }
    let (mut module, _) = reflect::parse(kernel, &text)?;
    // What the entry point does not reach is no business of the reader.
    compact(&mut module, KeepUnused::No);
    let info = reflect::validate(kernel, &text, &module)?;
    let refused = |message: String| Error::Shader {
        kernel: kernel.to_owned(),
        message: format!("as {}: {message}", target.language()),
    };
    let written = match target {
        ExportTarget::Msl => to_msl(&module, &info),
        ExportTarget::Hlsl => to_hlsl(&module, &info, reflect::features(&text).contains(&"shader-f16")),
        ExportTarget::Glsl => to_glsl(kernel, &module, &info),
        _ => to_spirv(kernel, &module, &info),
    };
    written.map_err(refused)
}

/// The bindings with what the module does to them.
fn resources(module: &naga::Module) -> impl Iterator<Item = (ResourceBinding, bool)> {
    module.global_variables.iter().filter_map(|(_, variable)| {
        let mutable = matches!(variable.space, AddressSpace::Storage { access } if access.contains(StorageAccess::STORE));
        variable.binding.map(|binding| (binding, mutable))
    })
}

/// The name that a writer gave the only entry point.
fn only_name<E: fmt::Display>(
    names: Vec<std::result::Result<String, E>>,
) -> std::result::Result<String, String> {
    match names.into_iter().next() {
        Some(Ok(name)) => Ok(name),
        Some(Err(error)) => Err(error.to_string()),
        None => Err("no entry point".to_owned()),
    }
}

fn to_spirv(kernel: &str, module: &naga::Module, info: &ModuleInfo) -> std::result::Result<Written, String> {
    let options = spv::Options {
        lang_version: (1, 3),
        flags: spv::WriterFlags::empty(),
        fake_missing_bindings: false,
        binding_map: resources(module)
            .map(|(at, _)| {
                let info = spv::BindingInfo {
                    descriptor_set: at.group,
                    binding: at.binding,
                    binding_array_size: None,
                };
                (at, info)
            })
            .collect(),
        bounds_check_policies: BoundsCheckPolicies::default(),
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: false,
        ..spv::Options::default()
    };
    let pipeline = spv::PipelineOptions {
        shader_stage: ShaderStage::Compute,
        entry_point: kernel.to_owned(),
    };
    let words = spv::write_vec(module, info, &options, Some(&pipeline)).map_err(|error| error.to_string())?;
    Ok(Written {
        bytes: words.into_iter().flat_map(u32::to_le_bytes).collect(),
        entry_point: kernel.to_owned(),
    })
}

fn to_msl(module: &naga::Module, info: &ModuleInfo) -> std::result::Result<Written, String> {
    let mut slots = msl::EntryPointResources {
        sizes_buffer: Some(MSL_SIZES_SLOT),
        ..msl::EntryPointResources::default()
    };
    for (at, mutable) in resources(module) {
        let slot = u8::try_from(at.binding).map_err(|_| format!("binding {} is no slot", at.binding))?;
        slots.resources.insert(
            at,
            msl::BindTarget {
                buffer: Some(slot),
                mutable,
                ..msl::BindTarget::default()
            },
        );
    }
    let entries = module.entry_points.iter();
    let options = msl::Options {
        lang_version: (2, 4),
        per_entry_point_map: entries.map(|entry| (entry.name.clone(), slots.clone())).collect(),
        fake_missing_bindings: false,
        bounds_check_policies: BoundsCheckPolicies::default(),
        zero_initialize_workgroup_memory: false,
        force_loop_bounding: false,
        ..msl::Options::default()
    };
    let (text, translated) = msl::write_string(module, info, &options, &msl::PipelineOptions::default())
        .map_err(|error| error.to_string())?;
    if text.contains("_buffer_sizes.") {
        return Err("arrayLength would need the sizes of buffers beside them".to_owned());
    }
    Ok(Written {
        bytes: text.into_bytes(),
        entry_point: only_name(translated.entry_point_names)?,
    })
}

fn to_hlsl(module: &naga::Module, info: &ModuleInfo, halves: bool) -> std::result::Result<Written, String> {
    let target = |register| hlsl::BindTarget {
        register,
        ..hlsl::BindTarget::default()
    };
    let options = hlsl::Options {
        shader_model: match halves {
            true => hlsl::ShaderModel::V6_2,
            false => hlsl::ShaderModel::V6_0,
        },
        binding_map: resources(module)
            .map(|(at, _)| (at, target(at.binding)))
            .collect(),
        fake_missing_bindings: false,
        special_constants_binding: Some(target(HLSL_GRID_REGISTER)),
        zero_initialize_workgroup_memory: false,
        restrict_indexing: false,
        force_loop_bounding: false,
        ..hlsl::Options::default()
    };
    let mut text = String::new();
    let reflected = hlsl::Writer::new(&mut text, &options, &hlsl::PipelineOptions::default())
        .write(module, info, None)
        .map_err(|error| error.to_string())?;
    Ok(Written {
        bytes: text.into_bytes(),
        entry_point: only_name(reflected.entry_point_names)?,
    })
}

fn to_glsl(kernel: &str, module: &naga::Module, info: &ModuleInfo) -> std::result::Result<Written, String> {
    let mut binding_map = glsl::BindingMap::default();
    for (at, _) in resources(module) {
        let slot = u8::try_from(at.binding).map_err(|_| format!("binding {} is no slot", at.binding))?;
        binding_map.insert(at, slot);
    }
    let options = glsl::Options {
        version: glsl::Version::Desktop(450),
        writer_flags: glsl::WriterFlags::empty(),
        binding_map,
        zero_initialize_workgroup_memory: false,
    };
    let pipeline = glsl::PipelineOptions {
        shader_stage: ShaderStage::Compute,
        entry_point: kernel.to_owned(),
        multiview: None,
    };
    let mut text = String::new();
    glsl::Writer::new(
        &mut text,
        module,
        info,
        &options,
        &pipeline,
        BoundsCheckPolicies::default(),
    )
    .and_then(|mut writer| writer.write())
    .map_err(|error| error.to_string())?;
    Ok(Written {
        bytes: text.into_bytes(),
        entry_point: "main".to_owned(),
    })
}
