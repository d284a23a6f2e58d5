//! Golden vectors: cases, each a list of dispatches over named buffers with what the CPU reference expects of them. The
//! types are those of `case.json`; nothing in them is special to a kernel.

mod files;
mod other;
mod pages;
mod pair;
mod side_rows;
mod twist;

pub(crate) use files::strange;
pub use files::{read, write};

use serde::{Deserialize, Serialize};

use super::geometry::Geometry;
use super::modules::{Choice, Module, Phase};
use crate::error::Result;
use crate::pages::PageLayout;
use crate::spec::Side;
use twist::Twist;

/// What `schema` of a case says.
pub const SCHEMA: &str = "kvpack.case";
/// The version of the schema.
pub const VERSION: u32 = 1;
/// What words hold that a kernel is to write: recognisable, and NaN as f32.
pub const POISON: u32 = 0xffff_ffff;

/// The type of a buffer's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NumberType {
    /// Unsigned integers of 32 bits.
    U32,
    /// binary32.
    F32,
    /// binary16, two to a word.
    F16,
}

impl NumberType {
    /// Bytes of a number.
    pub fn bytes(self) -> u32 {
        match self {
            NumberType::U32 | NumberType::F32 => 4,
            NumberType::F16 => 2,
        }
    }

    /// As NumPy spells it.
    pub fn descr(self) -> &'static str {
        match self {
            NumberType::U32 => "<u4",
            NumberType::F32 => "<f4",
            NumberType::F16 => "<f2",
        }
    }
}

/// A buffer of a case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaseBuffer {
    /// Its name, unique in the case.
    pub name: String,
    /// The type of its numbers.
    #[serde(rename = "type")]
    pub kind: NumberType,
    /// Its shape, outermost dimension first.
    pub shape: Vec<u32>,
    /// What the dimensions are, for example `[token, head, channel]`.
    pub axes: String,
    /// The file of what it holds at first.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub file: Option<String>,
    /// What each of its words holds at first where there is no file, for example `0xffffffff`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub fill: Option<String>,
    /// The geometry of its pages, where it holds pages.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub geometry: Option<Geometry>,
    /// What it is.
    pub what: String,
    /// What it holds at first.
    #[serde(skip)]
    pub words: Vec<u32>,
}

/// A value of a uniform's field.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Param {
    /// An integer.
    U32(u32),
    /// A float.
    F32(f32),
}

impl Param {
    /// The bits of an integer, for a field of type u32.
    pub fn as_u32(self) -> Option<u32> {
        match self {
            Param::U32(value) => Some(value),
            Param::F32(_) => None,
        }
    }

    /// The value as a float: JSON has 1 for 1.0.
    pub fn as_f32(self) -> f32 {
        match self {
            Param::U32(value) => value as f32,
            Param::F32(value) => value,
        }
    }
}

/// One dispatch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// The module's name in the manifest.
    pub module: String,
    /// Workgroups in x, y and z.
    pub workgroups: [u32; 3],
    /// Values of the uniform's fields.
    pub params: std::collections::BTreeMap<String, Param>,
    /// The buffer of each binding but `params`.
    pub bindings: std::collections::BTreeMap<String, String>,
}

/// How a buffer is judged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rule", rename_all = "lowercase", deny_unknown_fields)]
pub enum Rule {
    /// Bit for bit.
    Bits {
        /// The file of what is expected.
        file: String,
        /// The file of the bits that count; all where there is none.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        mask: Option<String>,
        /// What is expected.
        #[serde(skip)]
        words: Vec<u32>,
        /// The bits that count.
        #[serde(skip)]
        counted: Vec<u32>,
    },
    /// Each number within its bound.
    Bound {
        /// The file of what is expected, in f64.
        file: String,
        /// The file of the bounds, in f64.
        bound: String,
        /// What is expected.
        #[serde(skip)]
        numbers: Vec<f64>,
        /// The bounds.
        #[serde(skip)]
        bounds: Vec<f64>,
    },
}

/// What is expected of a buffer after all steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Expect {
    /// Its name, unique in the case.
    pub name: String,
    /// The buffer.
    pub buffer: String,
    /// How it is judged.
    #[serde(flatten)]
    pub rule: Rule,
    /// The kernels that it judges.
    pub kernels: Vec<String>,
    /// What it is.
    pub what: String,
}

/// One sequence of a case: for reports and people.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sequence {
    /// Tokens.
    pub tokens: u32,
    /// Query tokens, the last ones.
    pub queries: u32,
    /// Its first row in the buffers of rows.
    pub first_row: u32,
    /// Its first row in the queries.
    pub first_query: u32,
    /// Pages of K.
    pub k_pages: Vec<u32>,
    /// Pages of V.
    pub v_pages: Vec<u32>,
    /// f16 pages in which tokens of K wait.
    pub k_waiting: Vec<u32>,
    /// f16 pages in which tokens of V wait.
    pub v_waiting: Vec<u32>,
    /// Tokens of K that are packed.
    pub k_packed: u32,
    /// Tokens of V that are packed.
    pub v_packed: u32,
}

/// A case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// [`SCHEMA`].
    pub schema: String,
    /// [`VERSION`].
    pub version: u32,
    /// Its name, which is a folder name too.
    pub case: String,
    /// The pair, for example `int4c/int4`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pair: Option<String>,
    /// `decode` or `prefill`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub phase: Option<String>,
    /// What it shows.
    pub what: String,
    /// Where the data of its files begins, in bytes.
    pub data_offset: u32,
    /// Its buffers.
    pub buffers: Vec<CaseBuffer>,
    /// Its sequences.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub sequences: Vec<Sequence>,
    /// Its dispatches, in order: each sees what the earlier ones wrote.
    pub steps: Vec<Step>,
    /// What is expected of the buffers.
    pub expect: Vec<Expect>,
}

impl Case {
    fn new(case: String, what: impl Into<String>) -> Case {
        Case {
            schema: SCHEMA.to_owned(),
            version: VERSION,
            case,
            pair: None,
            phase: None,
            what: what.into(),
            data_offset: crate::npy::DATA_OFFSET as u32,
            buffers: Vec::new(),
            sequences: Vec::new(),
            steps: Vec::new(),
            expect: Vec::new(),
        }
    }

    /// The buffer of a name.
    pub fn buffer(&self, name: &str) -> Option<&CaseBuffer> {
        self.buffers.iter().find(|buffer| buffer.name == name)
    }

    /// The modules that it runs, each once.
    pub fn modules(&self) -> Vec<String> {
        let mut names = Vec::new();
        for step in &self.steps {
            if !names.contains(&step.module) {
                names.push(step.module.clone());
            }
        }
        names
    }

    /// Adds a buffer that holds `words` at first.
    fn data(&mut self, name: &str, kind: NumberType, shape: &[u32], axes: &str, what: &str, words: Vec<u32>) {
        self.buffers.push(CaseBuffer {
            name: name.to_owned(),
            kind,
            shape: shape.to_vec(),
            axes: axes.to_owned(),
            file: Some(format!("{name}.npy")),
            fill: None,
            geometry: None,
            what: what.to_owned(),
            words,
        });
    }

    /// Adds a buffer whose words all hold `fill` at first.
    fn filled(&mut self, name: &str, kind: NumberType, shape: &[u32], axes: &str, what: &str, fill: u32) {
        let bytes = shape.iter().product::<u32>() * kind.bytes();
        self.data(
            name,
            kind,
            shape,
            axes,
            what,
            vec![fill; bytes.div_ceil(4) as usize],
        );
        if let Some(buffer) = self.buffers.last_mut() {
            buffer.file = None;
            buffer.fill = Some(format!("{fill:#010x}"));
        }
    }

    /// Adds a pool of pages, of which one is not used.
    fn pages(&mut self, name: &str, page: &PageLayout, count: u32) {
        let what = format!("pages of {}, one of them unused", page.side);
        let shape = [count, page.words];
        self.filled(name, NumberType::U32, &shape, "[page, word]", &what, POISON);
        if let Some(buffer) = self.buffers.last_mut() {
            buffer.geometry = Some(Geometry::from(page));
        }
    }

    /// Adds a dispatch of `module`.
    fn step(&mut self, module: &Module, params: &[(&str, Param)], bindings: &[(&str, &str)]) -> Result<()> {
        let value = |name: &str| {
            let found = params.iter().find(|(field, _)| *field == name);
            found.and_then(|(_, value)| value.as_u32())
        };
        let workgroup = module.variant.map_or(crate::kernels::WG_SIZE, |v| v.workgroup);
        self.steps.push(Step {
            module: module.name.clone(),
            workgroups: module.dispatch.workgroups(module.kernel, workgroup, value)?,
            params: params
                .iter()
                .map(|(name, value)| ((*name).to_owned(), *value))
                .collect(),
            bindings: bindings
                .iter()
                .map(|(name, buffer)| ((*name).to_owned(), (*buffer).to_owned()))
                .collect(),
        });
        Ok(())
    }

    /// Expects words of a buffer, bit for bit; where `counted` is empty all bits count.
    fn bits(&mut self, buffer: &str, kernels: &[&str], what: &str, words: Vec<u32>, counted: Vec<u32>) {
        self.expect.push(Expect {
            name: buffer.to_owned(),
            buffer: buffer.to_owned(),
            rule: Rule::Bits {
                file: format!("{buffer}.expected.npy"),
                mask: (!counted.is_empty()).then(|| format!("{buffer}.mask.npy")),
                words,
                counted,
            },
            kernels: kernels.iter().map(|&kernel| kernel.to_owned()).collect(),
            what: what.to_owned(),
        });
    }

    /// Expects numbers of a buffer, each `[expected, bound]`.
    fn bound(&mut self, buffer: &str, kernels: &[&str], what: &str, numbers: &[[f64; 2]]) {
        self.expect.push(Expect {
            name: buffer.to_owned(),
            buffer: buffer.to_owned(),
            rule: Rule::Bound {
                file: format!("{buffer}.expected.npy"),
                bound: format!("{buffer}.bound.npy"),
                numbers: numbers.iter().map(|number| number[0]).collect(),
                bounds: numbers.iter().map(|number| number[1]).collect(),
            },
            kernels: kernels.iter().map(|&kernel| kernel.to_owned()).collect(),
            what: what.to_owned(),
        });
    }
}

/// Tokens of the longer sequence of a case where none are asked for: a page, and a part of a second that ends within a
/// group of tokens.
pub fn default_tokens(page_tokens: u32) -> u32 {
    page_tokens + page_tokens * 3 / 4 + 5
}

/// All cases of what was chosen: for each pair and phase, for each side, and for each kernel that takes no pages. `tokens`
/// are those of the longer of two sequences.
///
/// # Errors
/// What does not fit the shape.
pub fn all(choice: &Choice, tokens: u32) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for &pair in &choice.pairs {
        for &phase in &choice.phases {
            cases.push(pair::case(choice, pair, phase, tokens)?);
        }
    }
    // Options change nothing about formats: the first pair and the last stand for all.
    let mut ends: Vec<_> = choice
        .pairs
        .first()
        .into_iter()
        .chain(choice.pairs.last())
        .collect();
    ends.dedup();
    for &pair in ends {
        cases.extend(with_options(choice, pair, tokens)?);
    }
    let mut sides: Vec<(Side, bool)> = Vec::new();
    for pair in &choice.pairs {
        sides.extend([(pair.k, false), (pair.v, true)]);
    }
    let same = choice.shape.k_head_dim == choice.shape.v_head_dim;
    for (place, &(side, value)) in sides.iter().enumerate() {
        let known = |&(s, v): &(Side, bool)| s == side && (same || v == value);
        if !sides[..place].iter().any(known) {
            cases.push(pages::case(choice, side, value)?);
        }
    }
    for module in super::modules::others() {
        cases.push(other::case(&module)?);
    }
    // A case whose kernels were not all chosen still needs them all; one that judges none of them is left out.
    cases.retain(|case| {
        let judged = |kernel: &String| choice.wants(kernel);
        case.expect.iter().any(|expect| expect.kernels.iter().any(judged))
    });
    Ok(cases)
}

/// The case of one pair and phase.
///
/// # Errors
/// What does not fit the shape.
pub fn of_pair(choice: &Choice, pair: crate::spec::Pair, phase: Phase, tokens: u32) -> Result<Case> {
    pair::case(choice, pair, phase, tokens)
}

/// Cases of one pair with every option of attention, and at the edges of what it takes; those of the chosen phases.
///
/// # Errors
/// What does not fit the shape.
pub fn with_options(choice: &Choice, pair: crate::spec::Pair, tokens: u32) -> Result<Vec<Case>> {
    let shape = &choice.shape;
    [Twist::options(shape.q_heads, shape.page_tokens), Twist::edges()]
        .iter()
        .filter(|twist| choice.phases.contains(&twist.phase()))
        .map(|twist| pair::twisted(choice, pair, twist.phase(), tokens, twist))
        .collect()
}

/// The case of one side: rows as bad as they come.
///
/// # Errors
/// What does not fit the shape.
pub fn of_side(choice: &Choice, side: Side, value: bool) -> Result<Case> {
    pages::case(choice, side, value)
}

/// The case of a module that takes no pages.
///
/// # Errors
/// What the dispatch cannot hold.
pub fn of_module(module: &Module) -> Result<Case> {
    other::case(module)
}
