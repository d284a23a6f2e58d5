//! Valid model files with bytes changed: each is read or refused, without a panic and without memory beyond the file's
//! size.
//!
//! KVPACK_MUTATIONS=N makes N cases of each kind of file, KVPACK_MUTATION_SEED=N others than the usual ones.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use kvpack::analyze::dump::{Axes, Dump};
use kvpack::checkpoint::{Checkpoint, Tensors};
use kvpack::spec::Side;
use kvpack::validate::Random;

use crate::allocations::largest;
use crate::model_files::{self as files, Field, GgufFile};

fn number(variable: &str, usual: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{variable}={text} is no number")),
        Err(_) => usual,
    }
}

/// One to four changes: bits, bytes, words of eight that are extreme, parts cut, doubled, moved or filled.
fn mutate(random: &mut Random, bytes: &mut Vec<u8>) {
    const WORDS: [u64; 9] = [
        0,
        1,
        0x7f,
        0xffff,
        1 << 31,
        1 << 32,
        i64::MAX as u64,
        u64::MAX - 7,
        u64::MAX,
    ];
    for _ in 0..=random.below(4) {
        if bytes.len() < 16 {
            return;
        }
        // Headers are where files are believed: half of the changes go to the first 2 KiB.
        let within = if random.below(2) == 0 {
            bytes.len().min(2048)
        } else {
            bytes.len()
        };
        let at = random.below(within as u32 - 8) as usize;
        let length = (random.below(40) as usize + 1).min(bytes.len() - at);
        match random.below(8) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.below(256) as u8,
            2 => bytes[at..at + 8].copy_from_slice(&WORDS[random.below(9) as usize].to_le_bytes()),
            3 => bytes[at..at + 4].copy_from_slice(&(random.below(64)).to_le_bytes()),
            4 => bytes.truncate(at),
            5 => drop(bytes.drain(at..at + length)),
            6 => {
                let part = bytes[at..at + length].to_vec();
                bytes.splice(at..at, part);
            }
            _ => bytes[at..at + length].fill(random.below(256) as u8),
        }
    }
}

/// What a case makes of the files: an answer or an error, and the largest request for memory on the way.
type Asked = (kvpack::Result<()>, usize);

/// Everything that can be asked of a checkpoint, and the largest request for memory on the way. The tokenizer's is left
/// out: it has caches and compiled expressions of its own size, whatever the file.
fn ask(path: &Path) -> Asked {
    let (read, most) = largest(|| {
        let mut checkpoint = Checkpoint::open(path)?;
        let names: Vec<_> = checkpoint.config.tensors().map(|(name, _)| name).collect();
        for name in names {
            checkpoint.read(&name)?;
        }
        checkpoint.kv_scales()?;
        Ok(checkpoint)
    });
    let asked = read.and_then(|mut checkpoint| {
        let tokenizer = checkpoint.tokenizer()?;
        let ids = tokenizer.encode("abc cab <end>")?;
        tokenizer.decode(&ids).map(drop)
    });
    (asked, most)
}

/// Cases of one file: `write` puts the mutated bytes where they belong. Returns how many were read without an error.
fn cases(name: &str, seed: u64, valid: &[u8], write: &dyn Fn(&[u8]), ask: &dyn Fn() -> Asked) -> u64 {
    let count = number("KVPACK_MUTATIONS", 1000);
    let seed = number("KVPACK_MUTATION_SEED", seed);
    write(valid);
    ask().0.unwrap_or_else(|error| panic!("{name}: {error}"));
    let mut fine = 0;
    for case in 0..count {
        let mut random = Random::new(seed + case);
        let mut bytes = valid.to_vec();
        mutate(&mut random, &mut bytes);
        write(&bytes);
        let seed = seed + case;
        let (outcome, most) =
            catch_unwind(AssertUnwindSafe(ask)).unwrap_or_else(|_| panic!("{name}, seed {seed}: a panic"));
        match outcome {
            Ok(()) => fine += 1,
            Err(error) => {
                let said = error.to_string();
                assert!(
                    [
                        "model `",
                        "configuration `",
                        "safetensors file `",
                        "array file `",
                        "K and V of `",
                        "tensor `",
                        " = "
                    ]
                    .iter()
                    .any(|asked| said.contains(asked)),
                    "{name}, seed {seed}: {said}"
                );
            }
        }
        // Buffers of the reader are 8 KiB, a block's numbers at most 8 times its bytes, lists of strings 3 times theirs
        // and twice that as they grow.
        let bound = 16 * 1024 + 8 * bytes.len();
        assert!(
            most <= bound,
            "{name}, seed {seed}: a request of {most} bytes for a file of {}",
            bytes.len()
        );
    }
    fine
}

#[test]
fn mutated_gguf_files_are_read_or_refused() {
    let mut file = GgufFile::new();
    file.set("x", Field::Texts(vec![String::new(); 40]));
    // A tensor of each quantised type, beside those of the model.
    for (kind, numbers, bytes) in [
        (2, 32, 18),
        (3, 32, 20),
        (6, 32, 22),
        (8, 32, 34),
        (12, 256, 144),
        (14, 256, 210),
    ] {
        let mut tensor = file.tensors[0].clone();
        tensor.name = format!("type{kind}");
        tensor.dimensions = vec![numbers];
        tensor.kind = kind;
        tensor.bytes = vec![0; bytes];
        file.tensors.push(tensor);
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let fine = cases(
        "GGUF",
        1,
        &file.bytes(),
        &|bytes| fs::write(&path, bytes).unwrap(),
        &|| ask(&path),
    );
    assert!(fine > 0, "no case was read: the changes are too coarse");
}

#[test]
fn mutated_folders_are_read_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = files::tensors(true);
    for layer in 0..2 {
        for side in ["k", "v"] {
            tensors.push((
                format!("model.layers.{layer}.self_attn.{side}_scale"),
                vec![],
                vec![0.5],
            ));
        }
    }
    files::write_folder(folder.path(), &files::config(true), "F32", &tensors);
    for (seed, file) in [
        (2, "model.safetensors"),
        (3, "config.json"),
        (4, "tokenizer.json"),
    ] {
        let path = folder.path().join(file);
        let valid = fs::read(&path).unwrap();
        let fine = cases(
            file,
            seed << 32,
            &valid,
            &|bytes| fs::write(&path, bytes).unwrap(),
            &|| ask(folder.path()),
        );
        assert!(fine > 0, "{file}: no case was read");
        fs::write(&path, valid).unwrap();
    }
}

#[test]
fn mutated_dumps_are_read_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let numbers: Vec<f32> = (0..10 * 2 * 16).map(|i| i as f32 - 100.0).collect();
    let rows = files::stored("F16", &numbers);
    let safetensors = files::safetensors(&[
        ("layers.0.k", "F16", &[10, 2, 16], rows.clone()),
        ("layers.0.v", "F16", &[2, 5, 2, 16], rows.clone()),
    ]);
    let header = "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 5, 2, 16), }\n";
    let mut npy = b"\x93NUMPY\x01\x00".to_vec();
    npy.extend((header.len() as u16).to_le_bytes());
    npy.extend(header.as_bytes());
    npy.extend(rows);
    let sides: Vec<Side> = ["fp8", "int4", "int4c(8)", "fp4"]
        .map(|side| side.parse().unwrap())
        .to_vec();
    for (seed, file, valid) in [(5, "x.safetensors", safetensors), (6, "x.npy", npy)] {
        let path = folder.path().join(file);
        let fine = cases(
            file,
            seed << 32,
            &valid,
            &|bytes| fs::write(&path, bytes).unwrap(),
            &|| {
                let (dump, most) = largest(|| Dump::open(&path, Axes::TokensFirst, &[]));
                let rows = dump.and_then(|mut dump| dump.analyze(&sides, &mut |_, _, _| {}));
                (rows.map(drop), most)
            },
        );
        assert!(fine > 0, "{file}: no case was read");
    }
}
