//! The export as JSON and bytes: nothing here knows what kvpack is.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Words by the name of their buffer.
pub type Buffers = BTreeMap<String, Vec<u32>>;

/// The folder.
pub struct Folder {
    root: PathBuf,
    manifest: Value,
}

/// One case.
pub struct Case {
    folder: PathBuf,
    json: Value,
}

/// A dispatch, with all that a host must know of it.
pub struct Step<'a> {
    pub module: &'a Value,
    pub workgroups: [u32; 3],
    /// The uniform's bytes.
    pub params: Vec<u8>,
    /// Number, kind and buffer of each binding; the uniform has none.
    pub bindings: Vec<(u32, &'a str, Option<&'a str>)>,
}

fn json(path: &Path) -> Value {
    let bytes = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text"))
}

fn number(value: &Value) -> u32 {
    let found = value.as_u64().and_then(|n| u32::try_from(n).ok());
    found.unwrap_or_else(|| panic!("{value} is no u32"))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap_or_else(|| panic!("{value} is no list"))
}

impl Folder {
    pub fn open(root: &Path) -> Folder {
        let manifest = json(&root.join("manifest.json"));
        assert_eq!(manifest["schema"], "kvpack.shaders");
        assert_eq!(manifest["version"], 1);
        Folder {
            root: root.to_owned(),
            manifest,
        }
    }

    pub fn target(&self) -> &str {
        text(&self.manifest["target"])
    }

    /// The names of the modules of which something holds.
    pub fn modules(&self, which: impl Fn(&Value) -> bool) -> impl Iterator<Item = &str> {
        let modules = list(&self.manifest["modules"]).iter();
        modules
            .filter(move |module| which(module))
            .map(|module| text(&module["name"]))
    }

    pub fn shader(&self, module: &Value) -> Vec<u8> {
        fs::read(self.root.join(text(&module["file"]))).unwrap()
    }

    pub fn cases(&self) -> impl Iterator<Item = Case> {
        list(&self.manifest["vectors"]).iter().map(|entry| {
            let folder = self.root.join(text(&entry["folder"]));
            let json = json(&folder.join("case.json"));
            assert_eq!(json["schema"], "kvpack.case");
            assert_eq!(json["version"], 1);
            Case { folder, json }
        })
    }

    /// The dispatches of a case.
    pub fn steps<'a>(&'a self, case: &'a Case) -> impl Iterator<Item = Step<'a>> {
        list(&case.json["steps"]).iter().map(move |step| {
            let find = |module: &&Value| module["name"] == step["module"];
            let module = list(&self.manifest["modules"]).iter().find(find);
            let module = module.unwrap_or_else(|| panic!("no module {}", step["module"]));
            let workgroups = dispatch(module, &step["params"]);
            let given: Vec<u32> = list(&step["workgroups"]).iter().map(number).collect();
            assert_eq!(given, workgroups, "{}", step["module"]);
            let bindings = list(&module["bindings"]).iter().map(|binding| {
                assert_eq!(binding["group"], 0);
                let buffer = &step["bindings"][text(&binding["name"])];
                (
                    number(&binding["binding"]),
                    text(&binding["kind"]),
                    buffer.as_str(),
                )
            });
            Step {
                module,
                workgroups,
                params: pack(&module["params"], &step["params"]),
                bindings: bindings.collect(),
            }
        })
    }
}

/// The uniform's bytes: each value at its field's offset.
fn pack(layout: &Value, values: &Value) -> Vec<u8> {
    let size = number(&layout["size"]).next_multiple_of(16) as usize;
    let mut bytes = vec![0; size];
    for field in list(&layout["fields"]) {
        let value = &values[text(&field["name"])];
        let word = match text(&field["type"]) {
            "f32" => (value.as_f64().unwrap() as f32).to_bits(),
            _ => number(value),
        };
        let offset = number(&field["offset"]) as usize;
        bytes[offset..offset + 4].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Workgroups by the manifest's formula, folded.
fn dispatch(module: &Value, params: &Value) -> [u32; 3] {
    let rule = &module["dispatch"];
    let value = |term: &str| -> u64 {
        match term.trim().strip_prefix("params.") {
            Some(field) => number(&params[field]).into(),
            None => term.trim().parse().unwrap(),
        }
    };
    let factor = |term: &str| match term.trim().strip_prefix("ceil(") {
        Some(inside) => {
            let (of, by) = inside.strip_suffix(')').unwrap().split_once('/').unwrap();
            value(of).div_ceil(value(by))
        }
        None => value(term),
    };
    let mut count: u64 = text(&rule["formula"]).split('*').map(factor).product();
    if rule["counts"] == "invocations" {
        count = count.div_ceil(number(&module["workgroup_size"][0]).into());
    }
    let y = count.div_ceil(65_535).max(1);
    [count.div_ceil(y) as u32, y as u32, number(&rule["z"])]
}

impl Case {
    pub fn name(&self) -> &str {
        text(&self.json["case"])
    }

    pub fn modules(&self) -> impl Iterator<Item = &str> {
        list(&self.json["steps"]).iter().map(|step| text(&step["module"]))
    }

    /// The bytes of an array behind its header.
    fn bytes(&self, file: &str) -> Vec<u8> {
        let bytes = fs::read(self.folder.join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
        assert!(bytes.starts_with(b"\x93NUMPY\x01\x00"), "{file}");
        bytes[number(&self.json["data_offset"]) as usize..].to_vec()
    }

    fn words(&self, file: &str) -> Vec<u32> {
        let mut bytes = self.bytes(file);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let word = |four: &[u8]| u32::from_le_bytes(four.try_into().unwrap());
        bytes.chunks_exact(4).map(word).collect()
    }

    fn doubles(&self, file: &str) -> Vec<f64> {
        let double = |eight: &[u8]| f64::from_le_bytes(eight.try_into().unwrap());
        self.bytes(file).chunks_exact(8).map(double).collect()
    }

    /// What every buffer holds at first.
    pub fn buffers(&self) -> Buffers {
        let buffers = list(&self.json["buffers"]).iter().map(|buffer| {
            let bytes = if buffer["type"] == "f16" { 2 } else { 4 };
            let numbers: u32 = list(&buffer["shape"]).iter().map(number).product();
            let words = (numbers * bytes).div_ceil(4) as usize;
            let content = match buffer["file"].as_str() {
                Some(file) => self.words(file),
                None => {
                    let fill = text(&buffer["fill"]).strip_prefix("0x").unwrap();
                    vec![u32::from_str_radix(fill, 16).unwrap(); words]
                }
            };
            assert_eq!(content.len(), words, "{buffer}");
            (text(&buffer["name"]).to_owned(), content)
        });
        buffers.collect()
    }

    fn kind(&self, buffer: &str) -> &str {
        let buffers = list(&self.json["buffers"]).iter();
        let mut found = buffers.filter(|found| found["name"] == buffer);
        text(&found.next().unwrap_or_else(|| panic!("no buffer {buffer}"))["type"])
    }

    /// What is wrong with the buffers that the steps left.
    pub fn complaints(&self, found: &Buffers) -> Vec<String> {
        let mut all = Vec::new();
        for expect in list(&self.json["expect"]) {
            let buffer = text(&expect["buffer"]);
            let got = &found[buffer];
            let wrong = if expect["rule"] == "bits" {
                let want = self.words(text(&expect["file"]));
                assert_eq!(want.len(), got.len(), "{buffer}");
                let mask = expect["mask"].as_str().map(|file| self.words(file));
                let differs = |&i: &usize| (want[i] ^ got[i]) & mask.as_ref().map_or(u32::MAX, |m| m[i]) != 0;
                let count = (0..want.len()).filter(differs).count();
                (0..want.len()).find(differs).map(|i| {
                    format!(
                        "{count} words; word {i} is {:#010x}, not {:#010x}",
                        got[i], want[i]
                    )
                })
            } else {
                let want = self.doubles(text(&expect["file"]));
                let bound = self.doubles(text(&expect["bound"]));
                let got = numbers(got, self.kind(buffer));
                assert!(got.len() >= want.len() && want.len() == bound.len(), "{buffer}");
                let near = |i: usize| {
                    (got[i] - want[i]).abs() <= bound[i] || (want[i].is_infinite() && got[i] == want[i])
                };
                let far: Vec<usize> = (0..want.len()).filter(|&i| !near(i)).collect();
                far.first().map(|&i| {
                    format!(
                        "{} of {} numbers; {i} is {}, not {} within {:e}",
                        far.len(),
                        want.len(),
                        got[i],
                        want[i],
                        bound[i]
                    )
                })
            };
            all.extend(wrong.map(|wrong| format!("{}, {buffer}: {wrong}", self.name())));
        }
        all
    }

    /// The buffers as they should be.
    pub fn expected(&self) -> Buffers {
        let expected = list(&self.json["expect"]).iter().map(|expect| {
            let words = match text(&expect["rule"]) {
                "bits" => self.words(text(&expect["file"])),
                _ => {
                    let doubles = self.doubles(text(&expect["file"]));
                    doubles.iter().map(|x| (*x as f32).to_bits()).collect()
                }
            };
            (text(&expect["buffer"]).to_owned(), words)
        });
        expected.collect()
    }

    /// Makes a word of a buffer one that does not count.
    pub fn leave_out(&self, buffer: &str, word: usize) {
        let expect = list(&self.json["expect"])
            .iter()
            .find(|e| e["buffer"] == buffer)
            .unwrap();
        let path = self.folder.join(text(&expect["mask"]));
        let mut bytes = fs::read(&path).unwrap();
        let at = number(&self.json["data_offset"]) as usize + 4 * word;
        bytes[at..at + 4].fill(0);
        fs::write(path, bytes).unwrap();
    }
}

/// The numbers of a buffer's words.
fn numbers(words: &[u32], kind: &str) -> Vec<f64> {
    match kind {
        "f16" => {
            let halves = words.iter().flat_map(|word| [*word as u16, (*word >> 16) as u16]);
            halves.map(half).collect()
        }
        "f32" => words
            .iter()
            .map(|word| f64::from(f32::from_bits(*word)))
            .collect(),
        _ => words.iter().map(|word| f64::from(*word)).collect(),
    }
}

/// The value of a binary16.
fn half(bits: u16) -> f64 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    sign * match exponent {
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        0 => fraction * 2.0_f64.powi(-24),
        _ => (1024.0 + fraction) * 2.0_f64.powi(exponent - 25),
    }
}
