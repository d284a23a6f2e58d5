//! The header of `.npy` files (NumPy's format, versions 1 to 3), and a writer. Our own: the crates for it bring a parser
//! generator, and believe the length of the header.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// The longest header that is read: real ones have 64 to a few hundred bytes.
const MAX_HEADER: u64 = 1 << 16;

/// Where the data of files that [`write`] wrote begins.
#[cfg(feature = "export")]
pub const DATA_OFFSET: usize = 128;

/// What a file holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The type of a number as NumPy spells it, for example `<f4`.
    pub descr: String,
    /// Outermost dimension first.
    pub shape: Vec<u64>,
    /// Where the data begins.
    pub data: u64,
    /// Bytes of the data.
    pub bytes: u64,
}

impl Header {
    /// Bytes that the shape takes with so many a number; None beyond 64 bits.
    pub fn needed(&self, bytes: u64) -> Option<u64> {
        self.shape
            .iter()
            .try_fold(bytes, |bytes, &extent| bytes.checked_mul(extent))
    }

    /// What is wrong where the shape does not take the file's bytes.
    pub fn unfit(&self) -> String {
        format!(
            "shape {:?} does not fit the {} bytes after its header: it is truncated or damaged",
            self.shape, self.bytes
        )
    }
}

/// Opens a file and reads its header; the file stands at its data. The error says what is wrong.
pub fn open(path: &Path) -> Result<(File, Header), String> {
    let failed = |error: io::Error| format!("it cannot be read: {error}");
    let found = std::fs::metadata(path).map_err(failed)?;
    if !found.is_file() {
        return Err("it is no regular file".to_owned());
    }
    let mut file = File::open(path).map_err(failed)?;
    let length = found.len();
    let mut start = [0; 12];
    let known = length.min(12) as usize;
    file.read_exact(&mut start[..known]).map_err(failed)?;
    if start[..6] != *b"\x93NUMPY" || known < 12 {
        return Err("it is no .npy file".to_owned());
    }
    let (data, header_length) = match start[6] {
        1 => (10, u64::from(u16::from_le_bytes([start[8], start[9]]))),
        2 | 3 => (
            12,
            u64::from(u32::from_le_bytes([start[8], start[9], start[10], start[11]])),
        ),
        other => return Err(format!("it has version {other}; 1 to 3 are read")),
    };
    if header_length > MAX_HEADER.min(length.saturating_sub(data)) {
        return Err(format!(
            "its header would take {header_length} bytes of a file of {length}"
        ));
    }
    file.seek(SeekFrom::Start(data)).map_err(failed)?;
    let mut header = vec![0; header_length as usize];
    file.read_exact(&mut header).map_err(failed)?;
    let header = String::from_utf8(header).map_err(|_| "its header is no text".to_owned())?;
    let (descr, shape) = parse(&header)?;
    let data = data + header_length;
    let header = Header {
        descr,
        shape,
        data,
        bytes: length - data,
    };
    Ok((file, header))
}

/// Writes an array, row-major; its data begins at byte [`DATA_OFFSET`].
#[cfg(feature = "export")]
pub fn write(to: &mut impl io::Write, descr: &str, shape: &[u32], data: &[u8]) -> io::Result<()> {
    let mut list: Vec<String> = shape.iter().map(u32::to_string).collect();
    if list.len() == 1 {
        list.push(String::new());
    }
    let list = list.join(", ");
    let header = format!(
        "{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}",
        list.trim_end()
    );
    // Version 1: ten bytes before the header, which ends with a line break.
    let room = DATA_OFFSET - 11;
    to.write_all(b"\x93NUMPY\x01\x00")?;
    to.write_all(&((room + 1) as u16).to_le_bytes())?;
    to.write_all(format!("{header:room$}\n").as_bytes())?;
    to.write_all(data)
}

/// Type, as NumPy spells it, and shape of a header: a Python dict of `descr`, `fortran_order` and `shape`, in any order.
fn parse(header: &str) -> std::result::Result<(String, Vec<u64>), String> {
    let wrong = || {
        format!(
            "its header is no {{'descr', 'fortran_order', 'shape'}}: {}",
            short(header)
        )
    };
    let inner = header
        .trim()
        .strip_prefix('{')
        .and_then(|rest| rest.strip_suffix('}'));
    let mut rest = inner.ok_or_else(wrong)?.trim();
    let (mut descr, mut order, mut shape) = (None, None, None);
    while !rest.is_empty() {
        let (key, after) = quoted(rest).ok_or_else(wrong)?;
        let value = after
            .trim_start()
            .strip_prefix(':')
            .ok_or_else(wrong)?
            .trim_start();
        let end = if value.starts_with('(') {
            value.find(')').ok_or_else(wrong)? + 1
        } else {
            value.find(',').unwrap_or(value.len())
        };
        let (text, after) = value.split_at(end);
        let slot = match key {
            "descr" => &mut descr,
            "fortran_order" => &mut order,
            "shape" => &mut shape,
            _ => return Err(wrong()),
        };
        if slot.replace(text.trim()).is_some() {
            return Err(format!("its header has {key} twice"));
        }
        rest = after.trim_start();
        rest = rest.strip_prefix(',').unwrap_or(rest).trim_start();
    }
    let (Some(descr), Some(order), Some(shape)) = (descr, order, shape) else {
        return Err(wrong());
    };
    let Some((descr, "")) = quoted(descr) else {
        return Err(format!(
            "its numbers are {}, which is no single type",
            short(descr)
        ));
    };
    if order != "False" {
        return Err(format!(
            "fortran_order is {}: the numbers are not row-major",
            short(order)
        ));
    }
    let list = shape
        .strip_prefix('(')
        .and_then(|rest| rest.strip_suffix(')'))
        .ok_or_else(|| format!("its shape is {}", short(shape)))?;
    let list = list.trim().strip_suffix(',').unwrap_or(list.trim());
    let extents = list.split(',').filter(|_| !list.is_empty());
    let extents = extents.map(|extent| extent.trim().parse::<u64>());
    let shape = extents
        .collect::<std::result::Result<_, _>>()
        .map_err(|_| format!("its shape is {}", short(shape)))?;
    Ok((descr.to_owned(), shape))
}

/// The text in quotes at the start, and what follows.
fn quoted(text: &str) -> Option<(&str, &str)> {
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    text[1..].split_once(quote)
}

fn short(text: &str) -> String {
    text.chars().take(60).collect()
}

#[cfg(test)]
#[cfg(feature = "export")]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_reads_back() {
        for (shape, text) in [
            (vec![2, 3], "(2, 3)"),
            (vec![6], "(6,)"),
            (vec![1, 2, 3], "(1, 2, 3)"),
        ] {
            let mut bytes = Vec::new();
            write(&mut bytes, "<u2", &shape, &[7; 12]).unwrap();
            assert_eq!((bytes.len(), bytes[127]), (DATA_OFFSET + 12, b'\n'));
            assert!(String::from_utf8_lossy(&bytes).contains(&format!("'shape': {text}, }}")));
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("a.npy");
            std::fs::write(&path, &bytes).unwrap();
            let (_, header) = open(&path).unwrap();
            assert_eq!((header.descr.as_str(), header.data), ("<u2", 128));
            assert_eq!(
                header.shape,
                shape.iter().map(|&n| u64::from(n)).collect::<Vec<_>>()
            );
            assert_eq!(header.needed(2), Some(header.bytes));
        }
    }
}
