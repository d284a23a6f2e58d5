//! One safetensors file: tensors by name, read one at a time.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::blocks::BlockType;
use super::{PIECE, finite, reserve};
use crate::error::{Error, Result};

/// The longest header that the format allows.
const MAX_HEADER: u64 = 100_000_000;

/// An open file.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    file: File,
    /// Where offset 0 of the tensors lies.
    data: u64,
    tensors: BTreeMap<String, TensorInfo>,
}

impl SafetensorsFile {
    /// Opens a file and checks its header: ranges, overlaps and sizes.
    ///
    /// # Errors
    /// [`crate::Error::Usage`] with the name of the tensor that is wrong.
    pub fn open(path: &Path) -> Result<SafetensorsFile> {
        let failed = |error| refuse(path, format!("it cannot be read: {error}"));
        let mut file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        if length < 8 {
            return Err(refuse(
                path,
                format!("it is no safetensors file: it has {length} bytes"),
            ));
        }
        let mut header = [0; 8];
        file.read_exact(&mut header).map_err(failed)?;
        let header_length = u64::from_le_bytes(header);
        if header_length > MAX_HEADER.min(length - 8) {
            return Err(refuse(
                path,
                format!(
                    "its header would take {header_length} bytes, but {} follow and the format allows {MAX_HEADER}: \
                     the file is truncated or no safetensors file",
                    length - 8
                ),
            ));
        }
        let mut header = vec![0; header_length as usize];
        file.read_exact(&mut header).map_err(failed)?;
        let header: Header = serde_json::from_slice(&header)
            .map_err(|error| refuse(path, format!("its header is wrong: {error}")))?;
        let data = 8 + header_length;
        let opened = SafetensorsFile {
            path: path.to_owned(),
            file,
            data,
            tensors: header.0,
        };
        opened.check(length - data)?;
        Ok(opened)
    }

    /// That each tensor has the bytes of its shape, and that all of them fill the data without a gap or an overlap.
    fn check(&self, length: u64) -> Result<()> {
        for (name, info) in &self.tensors {
            let (start, end) = info.data_offsets;
            let bits = info
                .shape
                .iter()
                .try_fold(info.dtype.bitsize(), |bits, &extent| bits.checked_mul(extent));
            let bytes = end.checked_sub(start);
            if end as u64 > length {
                return Err(refuse(
                    &self.path,
                    format!(
                        "tensor `{name}` ends at byte {end} of the data, which have {length}: the file is truncated or \
                         damaged"
                    ),
                ));
            }
            if bytes.and_then(|bytes| bytes.checked_mul(8)) != bits {
                return Err(refuse(
                    &self.path,
                    format!(
                        "tensor `{name}` of type {} and shape {:?} does not fit its bytes {start} to {end}",
                        info.dtype, info.shape
                    ),
                ));
            }
        }
        let mut sorted: Vec<_> = self.tensors.clone().into_iter().collect();
        sorted.sort_by_key(|(_, info)| info.data_offsets);
        let metadata = Metadata::new(None, sorted)
            .map_err(|error| refuse(&self.path, format!("its tensors overlap or leave gaps: {error}")))?;
        if metadata.data_len() as u64 != length {
            return Err(refuse(
                &self.path,
                format!(
                    "its tensors take {} bytes, but {length} are there",
                    metadata.data_len()
                ),
            ));
        }
        Ok(())
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// A tensor's shape, outermost dimension first.
    pub fn shape(&self, name: &str) -> Option<Vec<u64>> {
        let info = self.tensors.get(name)?;
        Some(info.shape.iter().map(|&extent| extent as u64).collect())
    }

    /// The name of a tensor's type, `BF16` for example.
    pub fn type_name(&self, name: &str) -> Option<String> {
        Some(self.tensors.get(name)?.dtype.to_string())
    }

    /// A tensor's numbers, by copy: nothing in a file need be aligned.
    ///
    /// # Errors
    /// [`crate::Error::Usage`] with the tensor's name where it is missing, is of another type than F32, F16 and BF16,
    /// cannot be read or has numbers that are not finite.
    pub fn read(&mut self, name: &str) -> Result<Vec<f32>> {
        let path = &self.path;
        let info = self
            .tensors
            .get(name)
            .ok_or_else(|| refuse(path, format!("tensor `{name}` is missing")))?;
        let kind = match info.dtype {
            Dtype::F32 => BlockType::F32,
            Dtype::F16 => BlockType::F16,
            Dtype::BF16 => BlockType::Bf16,
            other => {
                return Err(refuse(
                    path,
                    format!("tensor `{name}` is stored as {other}; types that are read: F32, F16, BF16"),
                ));
            }
        };
        let (start, end) = info.data_offsets;
        let mut left = (end - start) as u64;
        let mut values = reserve(name, left / kind.bytes()).map_err(|reason| refuse(path, reason))?;
        let failed = |error| refuse(path, format!("tensor `{name}` cannot be read: {error}"));
        self.file
            .seek(SeekFrom::Start(self.data + start as u64))
            .map_err(failed)?;
        let mut buffer = vec![0; left.min(PIECE) as usize];
        while left > 0 {
            let part = &mut buffer[..left.min(PIECE) as usize];
            self.file.read_exact(part).map_err(failed)?;
            kind.dequantize(part, &mut values);
            left -= part.len() as u64;
        }
        finite(name, &values).map_err(|reason| refuse(path, reason))?;
        Ok(values)
    }
}

fn refuse(path: &Path, reason: impl Into<String>) -> Error {
    Error::Usage {
        asked: format!("safetensors file `{}`", path.display()),
        reason: reason.into(),
        advice: "give it whole, with tensors of finite F32, F16 or BF16 numbers".to_owned(),
    }
}

/// The header's tensors. Read entry by entry, so that an error names the tensor.
struct Header(BTreeMap<String, TensorInfo>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Header, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> std::result::Result<Header, M::Error> {
                let mut tensors = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let info: TensorInfo = map
                        .next_value()
                        .map_err(|error| M::Error::custom(format!("tensor `{name}`: {error}")))?;
                    if tensors.contains_key(&name) {
                        return Err(M::Error::custom(format!("tensor `{name}` is there twice")));
                    }
                    tensors.insert(name, info);
                }
                Ok(Header(tensors))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
