//! Variants of the attention kernel that were measured to be the fastest, by shape; and the file that keeps them from
//! run to run (feature `tuning`), by adapter and driver. `kvpack tune` writes it.
//!
//! Nothing is read unless it is asked for: [`Gpu::tuned`](crate::gpu::Gpu::tuned) reads the user's file,
//! [`Gpu::with_tuning`](crate::gpu::Gpu::with_tuning) takes any.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::pages::PageLayout;
use crate::spec::{Pair, Side};
use crate::variant::Variant;

/// What a measurement holds for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shape {
    /// The formats of the pages that a kernel reads.
    pub pair: Pair,
    /// Query heads of a KV head.
    pub ratio: u32,
    /// Channels of a key.
    pub k_head_dim: u32,
    /// Channels of a value.
    pub v_head_dim: u32,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// More than one query token of a sequence.
    pub prefill: bool,
}

impl Shape {
    /// The shape of a kernel over such pages.
    pub fn new([k, v]: [&PageLayout; 2], ratio: u32, prefill: bool) -> Shape {
        Shape {
            pair: Pair { k: k.side, v: v.side },
            ratio,
            k_head_dim: k.head_dim,
            v_head_dim: v.head_dim,
            page_tokens: k.tokens,
            prefill,
        }
    }

    /// Pages of this shape: with two KV heads, which no variant depends on.
    fn pages(&self) -> Result<[PageLayout; 2]> {
        let page = |side: Side, head_dim| PageLayout::new(side, 2, head_dim, self.page_tokens);
        Ok([
            page(self.pair.k, self.k_head_dim)?,
            page(self.pair.v, self.v_head_dim)?,
        ])
    }
}

/// The variants to take in place of [`Variant::new`]'s.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tuning {
    variants: BTreeMap<Shape, Variant>,
}

impl Tuning {
    /// Takes a variant for a shape, in place of an earlier one.
    ///
    /// # Errors
    /// Those of [`PageLayout::new`] for a shape that cannot be, and of [`Variant::check`].
    pub fn insert(&mut self, shape: Shape, variant: Variant) -> Result<()> {
        let [k, v] = shape.pages()?;
        variant.check([&k, &v])?;
        self.variants.insert(shape, variant);
        Ok(())
    }

    /// The variant for a shape.
    pub fn get(&self, shape: &Shape) -> Option<Variant> {
        self.variants.get(shape).copied()
    }

    /// Shapes that have one.
    pub fn len(&self) -> usize {
        self.variants.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.variants.is_empty()
    }
}

#[cfg(feature = "tuning")]
mod file {
    use std::fs::File;
    use std::io::{ErrorKind, Read};
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Serialize};

    use super::{Shape, Tuning};
    use crate::error::{Error, Result};
    use crate::variant::Variant;

    /// The environment variable that names the file; empty for none.
    pub const VARIABLE: &str = "KVPACK_TUNING";
    /// The version of the file that is written and read.
    const VERSION: u32 = 1;
    /// The most bytes that are read.
    const MAX_BYTES: u64 = 16 << 20;

    /// The adapter that measurements were made on.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    pub struct On {
        /// The name that the driver gives.
        pub adapter: String,
        /// The graphics interface.
        pub backend: String,
        /// Name and version of the driver.
        pub driver: String,
    }

    /// One measurement.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    pub struct Entry {
        /// The pair's name.
        pub pair: String,
        /// Query heads of a KV head.
        pub ratio: u32,
        /// Channels of a key.
        pub k_head_dim: u32,
        /// Channels of a value.
        pub v_head_dim: u32,
        /// Tokens of a page.
        pub page_tokens: u32,
        /// More than one query token of a sequence.
        pub prefill: bool,
        /// The fastest variant.
        pub variant: Variant,
        /// Its median time for one layer.
        pub seconds: f64,
        /// That of the variant without a measurement, in the same run.
        pub default_seconds: f64,
        /// Tokens of a sequence at which it was measured.
        pub context: u32,
        /// Sequences.
        pub batch: u32,
    }

    impl Entry {
        /// What it holds for.
        ///
        /// # Errors
        /// [`Error::UnknownFormat`] for the pair's name.
        pub fn shape(&self) -> Result<Shape> {
            Ok(Shape {
                pair: self.pair.parse()?,
                ratio: self.ratio,
                k_head_dim: self.k_head_dim,
                v_head_dim: self.v_head_dim,
                page_tokens: self.page_tokens,
                prefill: self.prefill,
            })
        }
    }

    /// The measurements of one adapter.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    struct Adapter {
        on: On,
        entries: Vec<Entry>,
    }

    /// The whole file.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    pub struct TuningFile {
        version: u32,
        adapters: Vec<Adapter>,
    }

    impl Default for TuningFile {
        fn default() -> TuningFile {
            TuningFile {
                version: VERSION,
                adapters: Vec::new(),
            }
        }
    }

    /// Where the user's file is: what `KVPACK_TUNING` names, or `kvpack/tuning.json` in the user's folder for
    /// configurations. None where the variable is empty or the system has no such folder.
    pub fn user_file() -> Option<PathBuf> {
        match std::env::var_os(VARIABLE) {
            Some(path) if path.is_empty() => None,
            Some(path) => Some(path.into()),
            None => dirs::config_dir().map(|folder| folder.join("kvpack").join("tuning.json")),
        }
    }

    impl TuningFile {
        /// Reads a file; one that does not exist holds nothing.
        ///
        /// # Errors
        /// [`Error::Usage`] with the file's name where it cannot be read, is no tuning of this version, or holds a shape or a
        /// variant that cannot be.
        pub fn read(path: &Path) -> Result<TuningFile> {
            let refuse = |reason: String| Error::Usage {
                asked: format!("the tuning in `{}`", path.display()),
                reason,
                advice: format!(
                    "run `kvpack tune` after deleting the file, or set {VARIABLE} to nothing to do without"
                ),
            };
            let opened = match File::open(path) {
                Ok(file) => file,
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(TuningFile::default()),
                Err(error) => return Err(refuse(format!("it cannot be read: {error}"))),
            };
            let mut bytes = Vec::new();
            let read = opened.take(MAX_BYTES + 1).read_to_end(&mut bytes);
            match read {
                Err(error) => return Err(refuse(format!("it cannot be read: {error}"))),
                Ok(length) if length as u64 > MAX_BYTES => {
                    return Err(refuse("it is longer than 16 MiB".to_owned()));
                }
                Ok(_) => {}
            }
            let file: TuningFile = serde_json::from_slice(&bytes)
                .map_err(|error| refuse(format!("it is no tuning of this version: {error}")))?;
            if file.version != VERSION {
                return Err(refuse(format!("its version is {}, not {VERSION}", file.version)));
            }
            for adapter in &file.adapters {
                file.tuning(&adapter.on)
                    .map_err(|error| refuse(format!("an entry of {}: {error}", adapter.on.adapter)))?;
            }
            Ok(file)
        }

        /// What holds on an adapter.
        ///
        /// # Errors
        /// Those of [`Entry::shape`] and [`Tuning::insert`].
        pub fn tuning(&self, on: &On) -> Result<Tuning> {
            let mut tuning = Tuning::default();
            for adapter in self.adapters.iter().filter(|adapter| adapter.on == *on) {
                for entry in &adapter.entries {
                    tuning.insert(entry.shape()?, entry.variant)?;
                }
            }
            Ok(tuning)
        }

        /// Takes a measurement in, in place of an earlier one of the same shape.
        pub fn insert(&mut self, on: &On, entry: Entry) {
            let place = self.adapters.iter().position(|adapter| adapter.on == *on);
            let place = place.unwrap_or_else(|| {
                self.adapters.push(Adapter {
                    on: on.clone(),
                    entries: Vec::new(),
                });
                self.adapters.len() - 1
            });
            let entries = &mut self.adapters[place].entries;
            let same = |other: &Entry| {
                let shape = |e: &Entry| {
                    (
                        e.pair.clone(),
                        e.ratio,
                        e.k_head_dim,
                        e.v_head_dim,
                        e.page_tokens,
                        e.prefill,
                    )
                };
                shape(other) == shape(&entry)
            };
            entries.retain(|other| !same(other));
            entries.push(entry);
        }

        /// The file's text.
        pub fn text(&self) -> String {
            // Numbers and strings alone: nothing in it can fail.
            serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
        }
    }
}

#[cfg(feature = "tuning")]
pub use file::{Entry, On, TuningFile, VARIABLE, user_file};
