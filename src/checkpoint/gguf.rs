//! The container of GGUF files, versions 2 and 3: fields by name, tensors by name.
//!
//! Counts and lengths in a file are claims: each is held against the bytes that are left before anything is allocated
//! for it. Arrays stay in the file until they are asked for.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::blocks::BlockType;
use super::{PIECE, finite, refuse, reserve};
use crate::error::Result;

/// A field of the header.
#[derive(Debug, Clone, PartialEq)]
pub enum Field {
    /// A whole number of any width.
    Integer(i128),
    /// A number of 32 or 64 bits.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// UTF-8.
    Text(String),
    /// Values that are still in the file.
    Array(Array),
}

/// Where the values of an array lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Array {
    kind: u32,
    /// Values.
    pub count: u64,
    at: u64,
}

#[derive(Debug)]
struct Info {
    kind: BlockType,
    /// Outermost first: the file has them innermost first.
    shape: Vec<u64>,
    numbers: u64,
    at: u64,
    bytes: u64,
}

/// An open file.
#[derive(Debug)]
pub struct Gguf {
    input: Input,
    fields: BTreeMap<String, Field>,
    tensors: BTreeMap<String, Info>,
}

const STRING: u32 = 8;
const ARRAY: u32 = 9;

impl Gguf {
    /// Opens a file and checks all of its header: types, ranges and overlaps.
    ///
    /// # Errors
    /// [`crate::Error::Usage`] with the name of the field or tensor that is wrong.
    pub fn open(path: &Path) -> Result<Gguf> {
        let mut input = Input::open(path)?;
        let magic = input.number(4, "the magic")?;
        if magic as u32 != u32::from_le_bytes(*b"GGUF") {
            return Err(input.refuse("it is no GGUF file: it does not start with the letters GGUF"));
        }
        match input.number(4, "the version")? {
            2 | 3 => {}
            other if other as u32 & 0xffff == 0 => {
                return Err(input.refuse("its numbers are big-endian, which is not read"));
            }
            other => {
                return Err(input.refuse(format!("it has GGUF version {other}; versions 2 and 3 are read")));
            }
        }
        let tensors = input.number(8, "the number of tensors")?;
        let fields = input.number(8, "the number of fields")?;
        let mut file = Gguf {
            input,
            fields: BTreeMap::new(),
            tensors: BTreeMap::new(),
        };
        for i in 0..fields {
            let name = file.input.string(&format!("the name of field {i} of {fields}"))?;
            let field = file.input.field(&name)?;
            if file.fields.insert(name.clone(), field).is_some() {
                return Err(file.refuse(format!("field `{name}` is there twice")));
            }
        }
        for i in 0..tensors {
            let name = file
                .input
                .string(&format!("the name of tensor {i} of {tensors}"))?;
            let info = file.input.info(&name)?;
            if file.tensors.insert(name.clone(), info).is_some() {
                return Err(file.refuse(format!("tensor `{name}` is there twice")));
            }
        }
        file.place()?;
        Ok(file)
    }

    /// Turns offsets within the data into offsets within the file, and checks them.
    fn place(&mut self) -> Result<()> {
        let alignment = match self.fields.get("general.alignment") {
            None => 32,
            Some(Field::Integer(alignment @ 1..=0x10_0000)) => *alignment as u64,
            Some(other) => {
                return Err(self.refuse(format!(
                    "field `general.alignment` is {other:?} and no whole number from 1 to 2^20"
                )));
            }
        };
        let data = self.input.at.next_multiple_of(alignment);
        let length = self.input.length;
        let mut ranges = Vec::new();
        for (name, info) in &mut self.tensors {
            let place = info
                .at
                .checked_add(data)
                .and_then(|at| Some((at, at.checked_add(info.bytes)?)));
            match place {
                Some((at, end)) if end <= length => {
                    if !info.at.is_multiple_of(alignment) {
                        return Err(refuse(
                            &self.input.path,
                            format!(
                                "tensor `{name}` has offset {}, no multiple of {alignment}",
                                info.at
                            ),
                        ));
                    }
                    info.at = at;
                    ranges.push((at, end, name));
                }
                _ => {
                    return Err(refuse(
                        &self.input.path,
                        format!(
                            "tensor `{name}` of {} bytes at offset {} of the data, which start at byte {data}, ends \
                             beyond the file's {length} bytes",
                            info.bytes, info.at
                        ),
                    ));
                }
            }
        }
        ranges.sort_unstable();
        // Tensors without numbers lie nowhere.
        ranges.retain(|(at, end, _)| end > at);
        for pair in ranges.windows(2) {
            if pair[1].0 < pair[0].1 {
                let reason = format!("tensors `{}` and `{}` overlap", pair[0].2, pair[1].2);
                return Err(refuse(&self.input.path, reason));
            }
        }
        Ok(())
    }

    /// An error about this file.
    pub fn refuse(&self, reason: impl Into<String>) -> crate::Error {
        self.input.refuse(reason)
    }

    /// A field of the header.
    pub fn field(&self, name: &str) -> Option<&Field> {
        self.fields.get(name)
    }

    /// Names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// A tensor's shape, outermost dimension first.
    pub fn shape(&self, name: &str) -> Option<&[u64]> {
        self.tensors.get(name).map(|info| &info.shape[..])
    }

    /// The strings of an array; none where there is no such field.
    ///
    /// # Errors
    /// [`crate::Error::Usage`] with the field's name for other types and bytes that are not UTF-8.
    pub fn strings(&mut self, name: &str) -> Result<Option<Vec<String>>> {
        let Some(array) = self.array(name, |kind| kind == STRING, "strings")? else {
            return Ok(None);
        };
        let mut values = Vec::new();
        for _ in 0..array.count {
            values.push(self.input.string(name)?);
        }
        Ok(Some(values))
    }

    /// The whole numbers of an array; none where there is no such field.
    ///
    /// # Errors
    /// [`crate::Error::Usage`] with the field's name for other types.
    pub fn integers(&mut self, name: &str) -> Result<Option<Vec<i64>>> {
        let is_integer = |kind| matches!(kind, 0..=5 | 10 | 11);
        let Some(array) = self.array(name, is_integer, "whole numbers")? else {
            return Ok(None);
        };
        let mut values = Vec::new();
        for _ in 0..array.count {
            match self.input.scalar(array.kind, name)? {
                Field::Integer(value) => values.push(value as i64),
                other => return Err(self.refuse(format!("field `{name}` has the value {other:?}"))),
            }
        }
        Ok(Some(values))
    }

    /// Goes to the first value of an array.
    fn array(&mut self, name: &str, fits: impl Fn(u32) -> bool, what: &str) -> Result<Option<Array>> {
        match self.fields.get(name) {
            None => Ok(None),
            Some(&Field::Array(array)) if fits(array.kind) => {
                self.input.seek(array.at)?;
                Ok(Some(array))
            }
            Some(_) => Err(self.refuse(format!("field `{name}` is no array of {what}"))),
        }
    }

    /// A tensor's numbers.
    ///
    /// # Errors
    /// [`crate::Error::Usage`] with the tensor's name where it is missing, cannot be read or has numbers that are not
    /// finite.
    pub fn read(&mut self, name: &str) -> Result<Vec<f32>> {
        let path = &self.input.path;
        let info = self
            .tensors
            .get(name)
            .ok_or_else(|| refuse(path, format!("tensor `{name}` is missing")))?;
        let mut values = reserve(name, info.numbers).map_err(|reason| refuse(path, reason))?;
        let failed = |error| refuse(path, format!("tensor `{name}` cannot be read: {error}"));
        self.input.reader.seek(SeekFrom::Start(info.at)).map_err(failed)?;
        let piece = PIECE / info.kind.bytes() * info.kind.bytes();
        let mut buffer = vec![0; piece.min(info.bytes) as usize];
        let mut left = info.bytes;
        while left > 0 {
            let part = &mut buffer[..left.min(piece) as usize];
            self.input.reader.read_exact(part).map_err(failed)?;
            info.kind.dequantize(part, &mut values);
            left -= part.len() as u64;
        }
        finite(name, &values).map_err(|reason| refuse(path, reason))?;
        Ok(values)
    }
}

/// The file's bytes in order, with what is left of them.
#[derive(Debug)]
struct Input {
    path: PathBuf,
    reader: BufReader<File>,
    at: u64,
    length: u64,
}

impl Input {
    fn open(path: &Path) -> Result<Input> {
        let failed = |error| refuse(path, format!("it cannot be read: {error}"));
        let file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        Ok(Input {
            path: path.to_owned(),
            reader: BufReader::new(file),
            at: 0,
            length,
        })
    }

    fn refuse(&self, reason: impl Into<String>) -> crate::Error {
        refuse(&self.path, reason)
    }

    /// Errors unless so many bytes are left.
    fn left(&self, bytes: u64, what: &str) -> Result<()> {
        let left = self.length - self.at;
        if bytes > left {
            return Err(self.refuse(format!(
                "{what} takes {bytes} bytes, but the file ends {left} bytes on: it is truncated or damaged"
            )));
        }
        Ok(())
    }

    fn bytes(&mut self, buffer: &mut [u8], what: &str) -> Result<()> {
        self.left(buffer.len() as u64, what)?;
        let read = self.reader.read_exact(buffer);
        read.map_err(|error| self.refuse(format!("{what} cannot be read: {error}")))?;
        self.at += buffer.len() as u64;
        Ok(())
    }

    fn skip(&mut self, bytes: u64, what: &str) -> Result<()> {
        self.left(bytes, what)?;
        // Within a file's length, which fits.
        let skipped = self.reader.seek_relative(bytes as i64);
        skipped.map_err(|error| self.refuse(format!("{what} cannot be read: {error}")))?;
        self.at += bytes;
        Ok(())
    }

    fn seek(&mut self, at: u64) -> Result<()> {
        let moved = self.reader.seek(SeekFrom::Start(at));
        moved.map_err(|error| self.refuse(format!("it cannot be read: {error}")))?;
        self.at = at;
        Ok(())
    }

    /// An unsigned little-endian number of so many bytes, at most 8.
    fn number(&mut self, bytes: usize, what: &str) -> Result<u64> {
        let mut buffer = [0; 8];
        self.bytes(&mut buffer[..bytes], what)?;
        Ok(u64::from_le_bytes(buffer))
    }

    fn string(&mut self, what: &str) -> Result<String> {
        let length = self.number(8, what)?;
        self.left(length, what)?;
        let mut bytes = vec![0; length as usize];
        self.bytes(&mut bytes, what)?;
        String::from_utf8(bytes).map_err(|_| self.refuse(format!("{what} is no UTF-8")))
    }

    fn field(&mut self, name: &str) -> Result<Field> {
        let what = format!("field `{name}`");
        let kind = self.number(4, &what)? as u32;
        if kind != ARRAY {
            return self.scalar(kind, name);
        }
        let kind = self.number(4, &what)? as u32;
        let count = self.number(8, &what)?;
        let at = self.at;
        match width(kind) {
            _ if kind == STRING => {
                for _ in 0..count {
                    let length = self.number(8, &what)?;
                    self.skip(length, &what)?;
                }
            }
            Some(width) => self.skip(count.saturating_mul(width), &what)?,
            None => {
                return Err(self.refuse(format!("{what} is an array of values of unknown type {kind}")));
            }
        }
        Ok(Field::Array(Array { kind, count, at }))
    }

    fn scalar(&mut self, kind: u32, name: &str) -> Result<Field> {
        let what = format!("field `{name}`");
        if kind == STRING {
            return Ok(Field::Text(self.string(&what)?));
        }
        let Some(width) = width(kind) else {
            return Err(self.refuse(format!("{what} has the unknown type {kind}")));
        };
        let bits = self.number(width as usize, &what)?;
        Ok(match kind {
            0 | 2 | 4 | 10 => Field::Integer(bits.into()),
            1 => Field::Integer((bits as i8).into()),
            3 => Field::Integer((bits as i16).into()),
            5 => Field::Integer((bits as i32).into()),
            11 => Field::Integer((bits as i64).into()),
            6 => Field::Float(f32::from_bits(bits as u32).into()),
            12 => Field::Float(f64::from_bits(bits)),
            _ => Field::Bool(bits != 0),
        })
    }

    fn info(&mut self, name: &str) -> Result<Info> {
        let what = format!("tensor `{name}`");
        let dimensions = self.number(4, &what)?;
        if dimensions > 4 {
            return Err(self.refuse(format!("{what} has {dimensions} dimensions; the most is 4")));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            shape.push(self.number(8, &what)?);
        }
        let kind = self.number(4, &what)? as u32;
        let kind = BlockType::from_number(kind).map_err(|unknown| {
            let known: Vec<_> = BlockType::ALL.iter().map(|known| known.2).collect();
            self.refuse(format!(
                "{what} is stored as {unknown}; types that are read: {}",
                known.join(", ")
            ))
        })?;
        let at = self.number(8, &what)?;
        let innermost = shape.first().copied().unwrap_or(1);
        if !innermost.is_multiple_of(kind.numbers()) {
            return Err(self.refuse(format!(
                "{what} has rows of {innermost} numbers, no multiple of the {} of a {} block",
                kind.numbers(),
                kind.name()
            )));
        }
        let numbers = shape
            .iter()
            .try_fold(1_u64, |product, &extent| product.checked_mul(extent));
        let bytes = numbers.and_then(|numbers| (numbers / kind.numbers()).checked_mul(kind.bytes()));
        let Some((numbers, bytes)) = numbers.zip(bytes) else {
            return Err(self.refuse(format!(
                "{what} of shape {shape:?} has more numbers than can be counted"
            )));
        };
        shape.reverse();
        Ok(Info {
            kind,
            shape,
            numbers,
            at,
            bytes,
        })
    }
}

/// Bytes of a value whose width is fixed.
fn width(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}
