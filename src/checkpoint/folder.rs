//! The weights of a Hugging Face folder: one safetensors file, or several with an index.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::safetensors::SafetensorsFile;
use super::{read_whole, refuse};
use crate::error::Result;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Which file has which tensor.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    files: Vec<SafetensorsFile>,
    /// The number in `files` of each tensor.
    tensors: BTreeMap<String, usize>,
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Folder {
    /// Opens all weights of a folder.
    ///
    /// # Errors
    /// [`crate::Error::Usage`] where there are none, a file of the index is missing or a tensor is not where the index
    /// says.
    pub fn open(path: &Path) -> Result<Folder> {
        let mut folder = Folder {
            path: path.to_owned(),
            files: Vec::new(),
            tensors: BTreeMap::new(),
        };
        let index = path.join(INDEX);
        if index.exists() {
            folder.open_indexed(&index)?;
        } else {
            folder.files.push(SafetensorsFile::open(&single(path)?)?);
            folder.tensors = folder.files[0].names().map(|name| (name.to_owned(), 0)).collect();
        }
        Ok(folder)
    }

    fn open_indexed(&mut self, index: &Path) -> Result<()> {
        let map: Index = serde_json::from_slice(&read_whole(index)?)
            .map_err(|error| refuse(index, format!("it is no index of weights: {error}")))?;
        let mut numbers = BTreeMap::new();
        for (tensor, file) in map.weight_map {
            let number = match numbers.get(&file) {
                Some(&number) => number,
                None => {
                    // A name with a folder in it would read from anywhere.
                    let name = Path::new(&file);
                    if name.file_name() != Some(name.as_os_str()) {
                        return Err(refuse(
                            index,
                            format!(
                                "tensor `{tensor}` would lie in `{file}`, which is no file of this folder"
                            ),
                        ));
                    }
                    self.files.push(SafetensorsFile::open(&self.path.join(&file))?);
                    numbers.insert(file.clone(), self.files.len() - 1);
                    self.files.len() - 1
                }
            };
            if self.files[number].shape(&tensor).is_none() {
                return Err(refuse(
                    index,
                    format!("tensor `{tensor}` is not in `{file}`, where the index has it"),
                ));
            }
            self.tensors.insert(tensor, number);
        }
        Ok(())
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// A tensor's shape, outermost dimension first.
    pub fn shape(&self, name: &str) -> Option<Vec<u64>> {
        self.files[*self.tensors.get(name)?].shape(name)
    }

    /// A tensor's numbers.
    ///
    /// # Errors
    /// As [`SafetensorsFile::read`].
    pub fn read(&mut self, name: &str) -> Result<Vec<f32>> {
        let number = *self
            .tensors
            .get(name)
            .ok_or_else(|| refuse(&self.path, format!("tensor `{name}` is missing")))?;
        self.files[number].read(name)
    }
}

/// The one safetensors file of a folder without an index.
fn single(path: &Path) -> Result<PathBuf> {
    let usual = path.join(SINGLE);
    if usual.exists() {
        return Ok(usual);
    }
    let failed = |error| refuse(path, format!("it cannot be read: {error}"));
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        let file = entry.map_err(failed)?.path();
        if file.extension().is_some_and(|ending| ending == "safetensors") {
            found.push(file);
        }
    }
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => Err(refuse(path, format!("it has no {SINGLE} and no {INDEX}"))),
        several => Err(refuse(
            path,
            format!("it has {several} safetensors files and no {INDEX} that says which tensor is where"),
        )),
    }
}
