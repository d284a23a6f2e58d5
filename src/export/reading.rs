//! Reading manifests: every field is checked, since a file may come from anywhere. Errors name the file and the place in it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use super::manifest::{
    BindingKind, FILE, FieldEntry, FieldType, Manifest, ModuleEntry, SCHEMA, STORAGE_BUFFERS, VERSION,
};
use crate::error::{Error, Result};
use crate::pages::heads_ratio;
use crate::spec::{Pair, Side};

/// The largest file that is read: manifests take some kilobytes a module.
const MOST_BYTES: u64 = 64 << 20;
/// The largest shader file that is read.
const MOST_SHADER_BYTES: u64 = 16 << 20;
/// The most entries of any list.
const MOST_ENTRIES: usize = 4096;
/// The largest uniform: WebGPU's default limit of a uniform binding.
const MOST_PARAMS_BYTES: u32 = 65_536;

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
