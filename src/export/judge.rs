//! Judges the buffers of a case: bits, or numbers within their bounds.

use std::path::Path;

use super::cases::{Case, CaseBuffer, Expect, NumberType, Rule, Sequence};
use super::geometry::place;
use crate::error::{Error, Result};
use crate::npy;
use crate::validate::Comparison;

/// What was found of one expectation.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// The expectation's name.
    pub name: String,
    /// The kernels that it judges.
    pub kernels: Vec<String>,
    /// Numbers or words compared.
    pub cases: u64,
    /// Words whose bits differ.
    pub bit_mismatches: u64,
    /// Errors against bounds, where there are bounds.
    pub sums: Option<Comparison>,
    /// Where the first mismatch is, what was expected there and what was found; empty where there is none.
    pub first: String,
}

impl Verdict {
    /// Nothing compared is no pass.
    pub fn passed(&self) -> bool {
        self.cases > 0 && self.first.is_empty()
    }
}

impl Case {
    /// Judges the words that a buffer holds after all steps.
    ///
    /// # Errors
    /// [`Error::Usage`] where the case has no such buffer, or it has another size.
    pub fn judge(&self, expect: &Expect, words: &[u32]) -> Result<Verdict> {
        let buffer = self
            .buffer(&expect.buffer)
            .filter(|buffer| buffer.words.len() == words.len());
        let buffer = buffer.ok_or_else(|| Error::Usage {
            asked: format!("buffer `{}` of {} words", expect.buffer, words.len()),
            reason: "the case has none of this name and size".to_owned(),
            advice: "pass what the buffer of the case holds after its steps".to_owned(),
        })?;
        let mut verdict = self.verdict(expect);
        match &expect.rule {
            Rule::Bits {
                words: wanted,
                counted,
                ..
            } => {
                let counts = |i: usize| counted.get(i).is_none_or(|&mask| mask != 0);
                verdict.cases = (0..wanted.len()).filter(|&i| counts(i)).count() as u64;
                for (i, (&wanted, &got)) in wanted.iter().zip(words).enumerate() {
                    let differ = (wanted ^ got) & counted.get(i).copied().unwrap_or(u32::MAX);
                    if differ == 0 {
                        continue;
                    }
                    verdict.bit_mismatches += 1;
                    if verdict.first.is_empty() {
                        verdict.first = format!(
                            "{}: {wanted:08x} expected, {got:08x} found",
                            self.place(buffer, i as u64, differ)
                        );
                    }
                }
            }
            Rule::Bound { .. } => {
                let got: Vec<f64> = match buffer.kind {
                    NumberType::F16 => {
                        let half = |bits: u32| f64::from(half::f16::from_bits(bits as u16).to_f32());
                        words
                            .iter()
                            .flat_map(|&word| [half(word), half(word >> 16)])
                            .collect()
                    }
                    _ => words
                        .iter()
                        .map(|&word| f64::from(f32::from_bits(word)))
                        .collect(),
                };
                self.within(expect, buffer, &got, |_| 0.0, &mut verdict);
            }
        }
        Ok(verdict)
    }

    /// Judges an array that any other program made: the numbers of a buffer, in f16, f32 or f64, or their bits as u32 where
    /// bits are compared. Where it holds fewer bits than the buffer, one rounding to its type is allowed.
    ///
    /// # Errors
    /// [`Error::Usage`] for a file that is no array of this shape and a type of these.
    pub fn judge_file(&self, expect: &Expect, path: &Path) -> Result<Verdict> {
        let refuse = |reason: String| {
            Error::Usage {
            asked: format!("result `{}` as `{}` of case {}", path.display(), expect.name, self.case),
            reason,
            advice: "write it with numpy.save(file, numpy.ascontiguousarray(x, dtype=numpy.float32)), or name another \
                     array with --expect"
                .to_owned(),
        }
        };
        let no_buffer = || refuse(format!("the case has no buffer `{}`", expect.buffer));
        let buffer = self.buffer(&expect.buffer).ok_or_else(no_buffer)?;
        let (mut file, header) = npy::open(path).map_err(refuse)?;
        let wanted: Vec<u64> = buffer.shape.iter().map(|&extent| extent.into()).collect();
        if header.shape != wanted {
            return Err(refuse(format!(
                "it has shape {:?}, not {wanted:?} {}",
                header.shape, buffer.axes
            )));
        }
        let integers = buffer.kind == NumberType::U32;
        let words = matches!(expect.rule, Rule::Bits { .. });
        let size = match header.descr.as_str() {
            "<u4" | "<i4" if words => 4,
            "<f2" if !integers => 2,
            "<f4" if !integers => 4,
            "<f8" if !integers => 8,
            descr => {
                let types = match (integers, words) {
                    (true, _) => "<u4",
                    (false, true) => "<f2, <f4, <f8 and <u4, the bits of f32",
                    (false, false) => "<f2, <f4 and <f8",
                };
                return Err(refuse(format!(
                    "its numbers are '{descr}'; types that are read here: {types}"
                )));
            }
        };
        if header.needed(size) != Some(header.bytes) {
            return Err(refuse(header.unfit()));
        }
        let mut bytes = vec![0; header.bytes as usize];
        std::io::Read::read_exact(&mut file, &mut bytes)
            .map_err(|error| refuse(format!("it cannot be read: {error}")))?;
        if header.descr.ends_with("4") && !header.descr.contains('f') {
            let (fours, _) = bytes.as_chunks::<4>();
            let words: Vec<u32> = fours.iter().map(|&four| u32::from_le_bytes(four)).collect();
            return self.judge(expect, &words);
        }
        let got: Vec<f64> = match size {
            2 => {
                let (twos, _) = bytes.as_chunks::<2>();
                twos.iter()
                    .map(|&two| f64::from(half::f16::from_le_bytes(two).to_f32()))
                    .collect()
            }
            4 => {
                let (fours, _) = bytes.as_chunks::<4>();
                fours
                    .iter()
                    .map(|&four| f64::from(f32::from_le_bytes(four)))
                    .collect()
            }
            _ => {
                let (eights, _) = bytes.as_chunks::<8>();
                eights.iter().map(|&eight| f64::from_le_bytes(eight)).collect()
            }
        };
        let rounding = |x: f64| match size {
            2 => (x.abs() * 2.0_f64.powi(-11)).max(2.0_f64.powi(-25)),
            4 => x.abs() * 2.0_f64.powi(-24),
            _ => 0.0,
        };
        let mut verdict = self.verdict(expect);
        match &expect.rule {
            Rule::Bits { words, .. } => {
                // Dequantised rows: every number is known exactly. Zero has no sign here.
                verdict.cases = words.len() as u64;
                for (i, (&word, &got)) in words.iter().zip(&got).enumerate() {
                    let wanted = f32::from_bits(word);
                    let as_stored = match size {
                        2 => f64::from(half::f16::from_f32(wanted).to_f32()),
                        _ => f64::from(wanted),
                    };
                    if got == as_stored || got.is_nan() && wanted.is_nan() {
                        continue;
                    }
                    verdict.bit_mismatches += 1;
                    if verdict.first.is_empty() {
                        verdict.first = format!(
                            "{}: {wanted:?} ({word:08x}) expected, {got:?} ({:08x}) found",
                            self.place(buffer, i as u64, u32::MAX),
                            (got as f32).to_bits()
                        );
                    }
                }
            }
            Rule::Bound { .. } => self.within(expect, buffer, &got, rounding, &mut verdict),
        }
        Ok(verdict)
    }

    /// What is expected under a name.
    ///
    /// # Errors
    /// [`Error::Usage`] with the names that there are.
    pub fn expectation(&self, name: &str) -> Result<&Expect> {
        self.expect
            .iter()
            .find(|expect| expect.name == name)
            .ok_or_else(|| Error::Usage {
                asked: format!("`{name}` of case {}", self.case),
                reason: "nothing of this name is expected".to_owned(),
                advice: format!("choose from {}", self.expected()),
            })
    }

    /// What is expected that has the shape of the array in a file.
    ///
    /// # Errors
    /// [`Error::Usage`] for a file that is no array, and where nothing or more than one fits.
    pub fn expectation_for(&self, path: &Path) -> Result<&Expect> {
        let refuse = |reason: String| Error::Usage {
            asked: format!("result `{}` for case {}", path.display(), self.case),
            reason,
            advice: format!("these are expected, and --expect names one: {}", self.expected()),
        };
        let (_, header) = npy::open(path).map_err(|reason| Error::Usage {
            asked: format!("result `{}`", path.display()),
            reason,
            advice: "write it with numpy.save(file, numpy.ascontiguousarray(x, dtype=numpy.float32))"
                .to_owned(),
        })?;
        let same = |expect: &&Expect| {
            let buffer = self.buffer(&expect.buffer);
            buffer.is_some_and(|buffer| {
                buffer
                    .shape
                    .iter()
                    .map(|&n| u64::from(n))
                    .eq(header.shape.iter().copied())
            })
        };
        let fitting: Vec<&Expect> = self.expect.iter().filter(same).collect();
        match fitting.as_slice() {
            [only] => Ok(only),
            [] => Err(refuse(format!(
                "nothing that is expected has shape {:?}",
                header.shape
            ))),
            _ => Err(refuse(format!(
                "several that are expected have shape {:?}",
                header.shape
            ))),
        }
    }

    /// The names of what is expected, with shapes.
    fn expected(&self) -> String {
        let shape = |expect: &Expect| {
            self.buffer(&expect.buffer)
                .map_or(&[][..], |buffer| &buffer.shape)
        };
        let names = self
            .expect
            .iter()
            .map(|expect| format!("{} {:?}", expect.name, shape(expect)));
        names.collect::<Vec<_>>().join(", ")
    }

    fn verdict(&self, expect: &Expect) -> Verdict {
        Verdict {
            name: expect.name.clone(),
            kernels: expect.kernels.clone(),
            cases: 0,
            bit_mismatches: 0,
            sums: None,
            first: String::new(),
        }
    }

    fn within(
        &self,
        expect: &Expect,
        buffer: &CaseBuffer,
        got: &[f64],
        rounding: impl Fn(f64) -> f64,
        verdict: &mut Verdict,
    ) {
        let Rule::Bound { numbers, bounds, .. } = &expect.rule else {
            return;
        };
        let mut sums = Comparison::default();
        for (i, ((&wanted, &bound), &got)) in numbers.iter().zip(bounds).zip(got).enumerate() {
            let (error, bound) = if got == wanted {
                (0.0, f64::MIN_POSITIVE)
            } else if wanted.is_infinite() {
                (f64::INFINITY, f64::MIN_POSITIVE)
            } else {
                ((got - wanted).abs(), bound + rounding(wanted))
            };
            let before = sums.failures;
            sums.judge(error, bound);
            if sums.failures > before && verdict.first.is_empty() {
                verdict.first = format!(
                    "{}: {wanted:.9} ({:08x}) expected, {got:.9} ({:08x}) found, off by {error:.3e} of {bound:.3e}",
                    self.place(buffer, i as u64, u32::MAX),
                    (wanted as f32).to_bits(),
                    (got as f32).to_bits()
                );
            }
        }
        verdict.cases = sums.cases;
        verdict.sums = Some(sums);
    }

    /// Where number `index` of a buffer is, in words. In pages: the page, whose token it is, and what the lowest of `bits`
    /// holds.
    fn place(&self, buffer: &CaseBuffer, index: u64, bits: u32) -> String {
        let geometry = buffer
            .geometry
            .as_ref()
            .and_then(|geometry| geometry.layout().ok());
        if let Some(page) = geometry {
            let (id, word) = (
                (index / u64::from(page.words)) as u32,
                (index % u64::from(page.words)) as u32,
            );
            let owner = self.owner(&buffer.name, id, page.tokens);
            return format!(
                "{}: page {id}, word {word}, {}",
                buffer.name,
                place(&page, owner, word, bits)
            );
        }
        let mut left = index;
        let mut places = Vec::new();
        for &extent in buffer.shape.iter().rev() {
            let extent = u64::from(extent).max(1);
            places.push((left % extent).to_string());
            left /= extent;
        }
        places.reverse();
        let inner = buffer.axes.trim_matches(['[', ']']);
        let axes: Vec<&str> = inner.splitn(places.len(), ',').map(str::trim).collect();
        let named = axes
            .iter()
            .zip(&places)
            .map(|(axis, place)| format!("{axis} {place}"));
        format!("{}: {}", buffer.name, named.collect::<Vec<_>>().join(", "))
    }

    /// The sequence whose tokens a page holds, and the first of them.
    fn owner(&self, buffer: &str, id: u32, page_tokens: u32) -> Option<(usize, u32)> {
        let pages = |sequence: &Sequence| match buffer {
            "k_pages" => sequence.k_pages.clone(),
            "v_pages" => sequence.v_pages.clone(),
            "k_waiting" => sequence.k_waiting.clone(),
            "v_waiting" => sequence.v_waiting.clone(),
            _ => Vec::new(),
        };
        self.sequences.iter().enumerate().find_map(|(number, sequence)| {
            let place = pages(sequence).iter().position(|page| *page == id)?;
            Some((number, place as u32 * page_tokens))
        })
    }
}
