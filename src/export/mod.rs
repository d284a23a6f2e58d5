//! Shaders that other engines can lift: composed modules in several languages, a manifest, golden vectors.
//!
//! [`Choice`] says which modules, [`Export::compose`] makes their files, the manifest and the vectors,
//! [`Destination::replace`] puts them in place of a folder.

pub mod cases;
mod check;
mod dispatch;
mod folder;
mod geometry;
mod harden;
mod judge;
pub mod manifest;
mod modules;
mod reading;
mod readme;
mod reflect;
mod run;
pub mod writers;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

pub use check::{Candidate, candidate, check};
pub use dispatch::{Counts, Dispatch, Factor};
pub use folder::Destination;
pub use geometry::{Geometry, place};
pub use judge::Verdict;
pub use modules::{Choice, Module, Phase, Shape, Tweaks, kernel_names, others};
pub use run::{Ran, Runnable, Runner};

use crate::error::Result;
use cases::Case;
use manifest::{Code, FILE, Manifest, SCHEMA, Types, VERSION, VectorEntry};
use writers::ExportTarget;

/// The name of the page that a stranger reads first.
const README: &str = "README.md";

/// The folder of the golden vectors.
const VECTORS: &str = "vectors";

/// An export in memory.
#[derive(Debug, Clone)]
pub struct Export {
    /// What `manifest.json` will say.
    pub manifest: Manifest,
    /// Name and bytes of each shader.
    pub files: Vec<(String, Vec<u8>)>,
    /// The golden vectors.
    pub cases: Vec<Case>,
}

impl Export {
    /// Composes and writes every module of a choice in the language of a target, with golden vectors where a number of
    /// tokens is given; then modules that their cases run come too, chosen or not. `progress` is told how many modules are
    /// done, of how many, and which is next.
    ///
    /// # Errors
    /// Those of [`Choice::modules`], [`writers::write`] and [`cases::all`].
    pub fn compose(
        choice: &Choice,
        target: ExportTarget,
        vectors: Option<u32>,
        progress: &mut dyn FnMut(u64, u64, &str),
    ) -> Result<Export> {
        let mut modules = choice.modules()?;
        let cases = match vectors {
            Some(tokens) => cases::all(choice, tokens)?,
            None => Vec::new(),
        };
        let needed: BTreeSet<String> = cases.iter().flat_map(Case::modules).collect();
        let every = Choice {
            kernels: Vec::new(),
            ..choice.clone()
        };
        let chosen: BTreeSet<String> = modules.iter().map(|module| module.name.clone()).collect();
        if !needed.is_subset(&chosen) {
            modules = every.modules()?;
            modules.retain(|module| chosen.contains(&module.name) || needed.contains(&module.name));
        }
        let mut entries = Vec::with_capacity(modules.len());
        let mut files = Vec::with_capacity(modules.len());
        for (done, module) in modules.iter().enumerate() {
            progress(done as u64, modules.len() as u64, &module.name);
            let (entry, written) = reflect::entry(module, target)?;
            files.push((entry.file.clone(), written.bytes));
            entries.push(entry);
        }
        let vectors = cases.iter().map(|case| VectorEntry {
            case: case.case.clone(),
            folder: format!("{VECTORS}/{}", case.case),
            pair: case.pair.clone(),
            phase: case.phase.clone(),
            modules: case.modules(),
        });
        let manifest = Manifest {
            schema: SCHEMA.to_owned(),
            version: VERSION,
            generator: concat!("kvpack ", env!("CARGO_PKG_VERSION")).to_owned(),
            target,
            code: Code::of(target),
            shape: choice.shape,
            types: Types {
                rows: choice.rows,
                queries: choice.queries,
                outputs: choice.outputs,
            },
            pairs: choice.pairs.iter().map(ToString::to_string).collect(),
            modules: entries,
            vectors: vectors.collect(),
        };
        Ok(Export {
            manifest,
            files,
            cases,
        })
    }

    /// Writes shaders, vectors, manifest and README into an empty folder.
    ///
    /// # Errors
    /// The system's words.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        for (name, bytes) in &self.files {
            fs::write(folder.join(name), bytes)?;
        }
        for (case, entry) in self.cases.iter().zip(&self.manifest.vectors) {
            cases::write(case, &folder.join(&entry.folder))?;
        }
        let manifest = self.manifest.to_bytes().map_err(io::Error::other)?;
        fs::write(folder.join(README), readme::text(&self.manifest))?;
        fs::write(folder.join(FILE), manifest)
    }
}
