//! Cases as folders: `case.json` and a `.npy` file an array.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;

use super::{Case, NumberType, Rule, SCHEMA, VERSION};
use crate::error::{Error, Result};
use crate::npy;

/// The most numbers of all buffers, and of an array: cases are small.
const MAX_NUMBERS: u64 = 1 << 26;
/// The file that says what the others are.
const CASE: &str = "case.json";
/// The longest `case.json`.
const MAX_JSON: u64 = 1 << 24;

/// Writes a case into a folder, which is made.
///
/// # Errors
/// What the file system says.
pub fn write(case: &Case, folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let array = |file: &str, descr: &str, shape: &[u32], data: &[u8]| -> io::Result<()> {
        let mut out = BufWriter::new(File::create(folder.join(file))?);
        npy::write(&mut out, descr, shape, data)?;
        out.flush()
    };
    for buffer in &case.buffers {
        let Some(file) = &buffer.file else { continue };
        let bytes: &[u8] = bytemuck::cast_slice(&buffer.words);
        let numbers: u32 = buffer.shape.iter().product();
        let used = (numbers * buffer.kind.bytes()) as usize;
        array(
            file,
            buffer.kind.descr(),
            &buffer.shape,
            &bytes[..used.min(bytes.len())],
        )?;
    }
    for expect in &case.expect {
        let shape = case
            .buffer(&expect.buffer)
            .map_or(&[][..], |buffer| &buffer.shape);
        match &expect.rule {
            Rule::Bits {
                file,
                mask,
                words,
                counted,
            } => {
                array(file, "<u4", shape, bytemuck::cast_slice(words))?;
                if let Some(mask) = mask {
                    array(mask, "<u4", shape, bytemuck::cast_slice(counted))?;
                }
            }
            Rule::Bound {
                file,
                bound,
                numbers,
                bounds,
            } => {
                array(file, "<f8", shape, bytemuck::cast_slice(numbers))?;
                array(bound, "<f8", shape, bytemuck::cast_slice(bounds))?;
            }
        }
    }
    let json = serde_json::to_vec_pretty(case).map_err(io::Error::other)?;
    fs::write(folder.join(CASE), json)
}

/// Reads a case from its folder.
///
/// # Errors
/// [`Error::Usage`] names the file and says what is wrong with it.
pub fn read(folder: &Path) -> Result<Case> {
    let path = folder.join(CASE);
    let refuse = |reason: String| Error::Usage {
        asked: format!("golden vectors in `{}`", folder.display()),
        reason,
        advice: "name the folder of one case, below vectors/ of an export with --vectors".to_owned(),
    };
    let open = |error: io::Error| refuse(format!("case.json cannot be read: {error}"));
    let file = File::open(&path).map_err(open)?;
    let mut text = String::new();
    file.take(MAX_JSON + 1).read_to_string(&mut text).map_err(open)?;
    if text.len() as u64 > MAX_JSON {
        return Err(refuse(format!("case.json has more than {MAX_JSON} bytes")));
    }
    let mut case: Case =
        serde_json::from_str(&text).map_err(|error| refuse(format!("case.json is no case: {error}")))?;
    if case.schema != SCHEMA || case.version != VERSION {
        return Err(refuse(format!(
            "case.json is {} version {}; this version reads {SCHEMA} version {VERSION}",
            case.schema, case.version
        )));
    }
    check_words(&case).map_err(refuse)?;
    let (mut names, mut left) = (BTreeSet::new(), MAX_NUMBERS);
    for buffer in &mut case.buffers {
        let name = buffer.name.clone();
        let refuse = |reason: String| refuse(format!("buffer `{name}`: {reason}"));
        if !names.insert(buffer.name.clone()) {
            return Err(refuse("stands twice".to_owned()));
        }
        let numbers = buffer
            .shape
            .iter()
            .try_fold(1_u64, |n, &extent| n.checked_mul(extent.into()))
            .filter(|&n| n <= left)
            .ok_or_else(|| refuse(format!("its shape {:?} is too large", buffer.shape)))?;
        left -= numbers;
        let words = (numbers * u64::from(buffer.kind.bytes())).div_ceil(4) as usize;
        buffer.words = match (&buffer.file, &buffer.fill) {
            (Some(file), None) => {
                let bytes = array(folder, file, buffer.kind.descr(), &buffer.shape).map_err(refuse)?;
                words_of(&bytes)
            }
            (None, Some(fill)) => {
                let digits = fill.strip_prefix("0x").unwrap_or("none");
                let fill = u32::from_str_radix(digits, 16)
                    .map_err(|_| refuse(format!("fill `{fill}` is no word such as 0xffffffff")))?;
                vec![fill; words]
            }
            _ => return Err(refuse("it has either a file or a fill".to_owned())),
        };
    }
    for step in &case.steps {
        if let Some(unknown) = step.bindings.values().find(|name| !names.contains(*name)) {
            return Err(refuse(format!(
                "step {}: there is no buffer `{unknown}`",
                step.module
            )));
        }
    }
    let shapes: Vec<_> = case
        .buffers
        .iter()
        .map(|b| (b.name.clone(), b.kind, b.shape.clone()))
        .collect();
    let mut expected = BTreeSet::new();
    for expect in &mut case.expect {
        let name = expect.name.clone();
        let refuse = |reason: String| refuse(format!("expected `{name}`: {reason}"));
        if !expected.insert(name.clone()) {
            return Err(refuse("stands twice".to_owned()));
        }
        let found = shapes.iter().find(|(buffer, ..)| *buffer == expect.buffer);
        let (_, kind, shape) =
            found.ok_or_else(|| refuse(format!("there is no buffer `{}`", expect.buffer)))?;
        match &mut expect.rule {
            Rule::Bits {
                file,
                mask,
                words,
                counted,
            } => {
                if *kind == NumberType::F16 {
                    return Err(refuse("words of an f16 buffer".to_owned()));
                }
                *words = words_of(&array(folder, file, "<u4", shape).map_err(&refuse)?);
                if let Some(mask) = mask {
                    *counted = words_of(&array(folder, mask, "<u4", shape).map_err(&refuse)?);
                }
            }
            Rule::Bound {
                file,
                bound,
                numbers,
                bounds,
            } => {
                if *kind == NumberType::U32 {
                    return Err(refuse("bounds for integers".to_owned()));
                }
                *numbers = floats_of(&array(folder, file, "<f8", shape).map_err(&refuse)?);
                *bounds = floats_of(&array(folder, bound, "<f8", shape).map_err(&refuse)?);
                let sound = |bound: &f64| bound.is_finite() && *bound >= 0.0;
                if !bounds.iter().all(sound) || numbers.iter().any(|x| x.is_nan()) {
                    return Err(refuse(
                        "a bound is no number from 0 on, or NaN is expected".to_owned(),
                    ));
                }
            }
        }
    }
    Ok(case)
}

/// The first file in the folder of a case that belongs to no case as it was written.
pub(crate) fn strange(folder: &Path) -> io::Result<Option<String>> {
    let mut known = BTreeSet::from([CASE.to_owned()]);
    let text = fs::read(folder.join(CASE)).unwrap_or_default();
    let Ok(case) = serde_json::from_slice::<Case>(&text) else {
        return Ok(Some(CASE.to_owned()));
    };
    known.extend(case.buffers.into_iter().filter_map(|buffer| buffer.file));
    for expect in case.expect {
        match expect.rule {
            Rule::Bits { file, mask, .. } => known.extend([Some(file), mask].into_iter().flatten()),
            Rule::Bound { file, bound, .. } => known.extend([file, bound]),
        }
    }
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !known.contains(&name) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Refuses what must not reach a terminal or a file name as it is.
fn check_words(case: &Case) -> std::result::Result<(), String> {
    let name = |text: &str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        !text.is_empty() && text.len() <= 128 && text.chars().all(plain)
    };
    let buffers = case.buffers.iter().map(|buffer| &buffer.name);
    let expected = case
        .expect
        .iter()
        .flat_map(|expect| [&expect.name, &expect.buffer]);
    let steps = case.steps.iter().map(|step| &step.module);
    let mut names = std::iter::once(&case.case)
        .chain(buffers)
        .chain(expected)
        .chain(steps);
    if let Some(name) = names.find(|text| !name(text)) {
        return Err(format!(
            "{name:?} is no name: letters, digits, _ - and ., at most 128"
        ));
    }
    let axes = case
        .buffers
        .iter()
        .flat_map(|buffer| [&buffer.axes, &buffer.what]);
    let mut words = axes.chain([&case.what]).chain(&case.pair).chain(&case.phase);
    match words.find(|text| text.chars().any(char::is_control)) {
        Some(text) => Err(format!("{text:?} has control characters")),
        None => Ok(()),
    }
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    let word = |chunk: &[u8]| {
        let mut four = [0; 4];
        four[..chunk.len()].copy_from_slice(chunk);
        u32::from_le_bytes(four)
    };
    bytes.chunks(4).map(word).collect()
}

fn floats_of(bytes: &[u8]) -> Vec<f64> {
    let (eights, _) = bytes.as_chunks::<8>();
    eights.iter().map(|&eight| f64::from_le_bytes(eight)).collect()
}

/// The data of a file of the folder, which must have this type and shape.
fn array(folder: &Path, file: &str, descr: &str, shape: &[u32]) -> std::result::Result<Vec<u8>, String> {
    if file.is_empty() || file.contains(['/', '\\', ':']) || file.starts_with('.') {
        return Err(format!("`{file}` is no plain file name"));
    }
    let failed = |reason: String| format!("`{file}`: {reason}");
    let (mut opened, header) = npy::open(&folder.join(file)).map_err(failed)?;
    let wanted: Vec<u64> = shape.iter().map(|&extent| extent.into()).collect();
    if header.descr != descr || header.shape != wanted {
        return Err(failed(format!(
            "it holds {} of shape {:?}, not {descr} of shape {wanted:?}",
            header.descr, header.shape
        )));
    }
    let size = match descr {
        "<f8" => 8,
        "<f2" => 2,
        _ => 4,
    };
    if header.needed(size) != Some(header.bytes) || header.bytes > MAX_NUMBERS * 8 {
        return Err(failed(header.unfit()));
    }
    let mut bytes = vec![0; header.bytes as usize];
    opened
        .read_exact(&mut bytes)
        .map_err(|error| failed(format!("it cannot be read: {error}")))?;
    Ok(bytes)
}
