//! Shaders that other engines can lift: composed modules in several languages, a manifest, golden vectors.
//!
//! [`Choice`] says which modules, [`Export::compose`] makes their files and the manifest, [`Destination::replace`] puts
//! them in place of a folder.

mod folder;
pub mod manifest;
mod modules;
mod readme;
mod reflect;
pub mod writers;

use std::fs;
use std::io;
use std::path::Path;

pub use folder::Destination;
pub use modules::{Choice, Counts, Dispatch, Factor, Module, Phase, Shape, Tweaks, kernel_names, others};

use crate::error::Result;
use manifest::{Code, FILE, Manifest, SCHEMA, VERSION};
use writers::ExportTarget;

/// The name of the page that a stranger reads first.
const README: &str = "README.md";

/// The files of an export, in memory.
#[derive(Debug, Clone)]
pub struct Export {
    /// What `manifest.json` will say. Cases of golden vectors are added by whoever writes them.
    pub manifest: Manifest,
    /// Name and bytes of each shader.
    pub files: Vec<(String, Vec<u8>)>,
}

impl Export {
    /// Composes and writes every module of a choice in the language of a target; `progress` is told how many are done, of
    /// how many, and which is next.
    ///
    /// # Errors
    /// Those of [`Choice::modules`] and [`writers::write`].
    pub fn compose(
        choice: &Choice,
        target: ExportTarget,
        progress: &mut dyn FnMut(u64, u64, &str),
    ) -> Result<Export> {
        let modules = choice.modules()?;
        let mut entries = Vec::with_capacity(modules.len());
        let mut files = Vec::with_capacity(modules.len());
        for (done, module) in modules.iter().enumerate() {
            progress(done as u64, modules.len() as u64, &module.name);
            let (entry, written) = reflect::entry(module, target)?;
            files.push((entry.file.clone(), written.bytes));
            entries.push(entry);
        }
        let manifest = Manifest {
            schema: SCHEMA.to_owned(),
            version: VERSION,
            generator: concat!("kvpack ", env!("CARGO_PKG_VERSION")).to_owned(),
            target,
            code: Code::of(target),
            shape: choice.shape,
            pairs: choice.pairs.iter().map(ToString::to_string).collect(),
            modules: entries,
            vectors: Vec::new(),
        };
        Ok(Export { manifest, files })
    }

    /// Writes shaders, manifest and README into an empty folder.
    ///
    /// # Errors
    /// The system's words.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        for (name, bytes) in &self.files {
            fs::write(folder.join(name), bytes)?;
        }
        let manifest = self.manifest.to_bytes().map_err(io::Error::other)?;
        fs::write(folder.join(README), readme::text(&self.manifest))?;
        fs::write(folder.join(FILE), manifest)
    }
}
