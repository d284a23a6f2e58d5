//! One array of floats of a `.npy` file.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use crate::checkpoint::blocks::BlockType;
use crate::checkpoint::{PIECE, finite, reserve};
use crate::error::{Error, Result};
use crate::npy;

/// An open file.
#[derive(Debug)]
pub struct Npy {
    path: PathBuf,
    file: File,
    kind: BlockType,
    shape: Vec<u64>,
    data: u64,
}

impl Npy {
    /// Opens a file and checks its header against its length.
    ///
    /// # Errors
    /// [`Error::Usage`] that says what is wrong: no such file, another type than f32, f16 and bf16, an order that is not
    /// row-major, too few or too many bytes.
    pub fn open(path: &Path) -> Result<Npy> {
        let (file, header) = npy::open(path).map_err(|reason| refuse(path, reason))?;
        let kind = match header.descr.as_str() {
            "<f4" => BlockType::F32,
            "<f2" => BlockType::F16,
            // What numpy calls the type of ml_dtypes, which it does not know.
            "<V2" | "|V2" | "bfloat16" => BlockType::Bf16,
            descr => {
                return Err(refuse(
                    path,
                    format!("its numbers are '{descr}'; types that are read: <f4, <f2 and V2 (bfloat16)"),
                ));
            }
        };
        if header.needed(kind.bytes()) != Some(header.bytes) {
            return Err(refuse(path, header.unfit()));
        }
        Ok(Npy {
            path: path.to_owned(),
            file,
            kind,
            shape: header.shape,
            data: header.data,
        })
    }

    /// The array's shape, outermost dimension first.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// All numbers; `name` is what an error calls the array.
    ///
    /// # Errors
    /// [`Error::Usage`] where they cannot be read or are not finite.
    pub fn read(&mut self, name: &str) -> Result<Vec<f32>> {
        let path = &self.path;
        let failed = |error| refuse(path, format!("it cannot be read: {error}"));
        self.file.seek(SeekFrom::Start(self.data)).map_err(failed)?;
        let numbers = self.shape.iter().product::<u64>();
        let mut values = reserve(name, numbers).map_err(|reason| refuse(path, reason))?;
        let mut left = numbers * self.kind.bytes();
        let mut buffer = vec![0; left.min(PIECE) as usize];
        while left > 0 {
            let part = &mut buffer[..left.min(PIECE) as usize];
            self.file.read_exact(part).map_err(failed)?;
            self.kind.dequantize(part, &mut values);
            left -= part.len() as u64;
        }
        finite(name, &values).map_err(|reason| refuse(path, reason))?;
        Ok(values)
    }
}

fn refuse(path: &Path, reason: impl Into<String>) -> Error {
    Error::Usage {
        asked: format!("array file `{}`", path.display()),
        reason: reason.into(),
        advice: "write it with numpy.save(file, numpy.ascontiguousarray(x, dtype=numpy.float32))".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(version: u8, header: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = b"\x93NUMPY".to_vec();
        bytes.extend([version, 0]);
        match version {
            1 => bytes.extend((header.len() as u16).to_le_bytes()),
            _ => bytes.extend((header.len() as u32).to_le_bytes()),
        }
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        bytes
    }

    fn read(bytes: &[u8]) -> std::result::Result<(Vec<u64>, Vec<f32>), String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("k.npy");
        std::fs::write(&path, bytes).unwrap();
        let mut npy = Npy::open(&path).map_err(|error| error.to_string())?;
        let values = npy.read("k").map_err(|error| error.to_string())?;
        Ok((npy.shape().to_vec(), values))
    }

    #[test]
    fn arrays_of_each_type_and_version_are_read() {
        let f4 = [1.5_f32.to_le_bytes(), (-2.0_f32).to_le_bytes()].concat();
        for version in [1, 2, 3] {
            // As numpy writes it, and without its spaces and last commas.
            for header in [
                "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2, 1), }          \n",
                "{\"shape\":(1,2,1),\"fortran_order\":False,\"descr\":\"<f4\"}",
            ] {
                assert_eq!(
                    read(&file(version, header, &f4)),
                    Ok((vec![1, 2, 1], vec![1.5, -2.0]))
                );
            }
        }
        let header = |descr: &str, shape: &str| {
            format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n")
        };
        let f2 = half::f16::from_f32(0.1).to_le_bytes();
        let value = half::f16::from_f32(0.1).to_f32();
        assert_eq!(
            read(&file(1, &header("<f2", "(1,)"), &f2)),
            Ok((vec![1], vec![value]))
        );
        assert_eq!(
            read(&file(1, &header("<f2", "()"), &f2)),
            Ok((vec![], vec![value]))
        );
        assert_eq!(
            read(&file(1, &header("<V2", "(1,)"), &[0x80, 0x3f])),
            Ok((vec![1], vec![1.0]))
        );
        assert_eq!(
            read(&file(1, &header("<f4", "(0, 3)"), &[])),
            Ok((vec![0, 3], vec![]))
        );
    }

    #[test]
    fn hostile_arrays_are_refused_with_the_reason() {
        let good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1), }\n";
        let data = [0; 8];
        assert!(read(&file(1, good, &data)).is_ok());
        for (from, to, words) in [
            ("<f4", ">f4", "its numbers are '>f4'"),
            ("<f4", "<f8", "its numbers are '<f8'"),
            ("'<f4'", "[('x', '<f4')]", "its header is no"),
            ("False", "True", "fortran_order is True"),
            ("(2, 1)", "(2, -1)", "its shape is (2, -1)"),
            ("(2, 1)", "(2, 1", "its header is no"),
            ("(2, 1)", "2", "its shape is 2"),
            ("(2, 1)", "(3, 1)", "shape [3, 1] does not fit the 8 bytes"),
            ("(2, 1)", "(1, 1)", "shape [1, 1] does not fit the 8 bytes"),
            ("(2, 1)", "(18446744073709551615, 2)", "does not fit"),
            ("(2, 1)", "(4611686018427387904, 4, 0)", "does not fit"),
            ("(2, 1)", "(99999999999999999999, 2)", "its shape is (9999"),
            ("'shape'", "'form'", "its header is no"),
            ("'shape'", "'descr'", "has descr twice"),
            ("'shape': (2, 1), ", "", "its header is no"),
            ("{", "", "its header is no"),
        ] {
            let header = good.replace(from, to);
            assert_ne!(header, good);
            let said = read(&file(1, &header, &data)).unwrap_err();
            assert!(
                said.contains(words) && said.contains("k.npy"),
                "expected {words}: {said}"
            );
        }
        let nan = [1.0_f32.to_le_bytes(), f32::NAN.to_le_bytes()].concat();
        let said = read(&file(1, good, &nan)).unwrap_err();
        assert!(
            said.contains("tensor `k` has 1 NaN or infinite numbers, the first, NaN, at index 1"),
            "{said}"
        );
        for (bytes, words) in [
            (vec![], "no .npy file"),
            (b"\x93NUMPY".to_vec(), "no .npy file"),
            (b"PK\x03\x04 and more of it".to_vec(), "no .npy file"),
            (file(9, good, &data), "it has version 9"),
            (
                [&b"\x93NUMPY\x02\x00"[..], &u32::MAX.to_le_bytes()].concat(),
                "header would take 4294967295 bytes",
            ),
            (
                [&b"\x93NUMPY\x01\x00"[..], &[0xff, 0xff, 1, 2]].concat(),
                "header would take 65535 bytes",
            ),
            (file(1, "\u{e9}", &data), "its header is no"),
        ] {
            let said = read(&bytes).unwrap_err();
            assert!(said.contains(words), "expected {words}: {said}");
        }
        let whole = file(1, good, &data);
        for length in 0..whole.len() {
            assert!(read(&whole[..length]).is_err(), "{length}");
        }
    }
}
