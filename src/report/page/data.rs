//! The data of the page, as JSON. `schema.md` describes every field.

use std::collections::{BTreeMap, HashMap};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::Value;

use super::bench::BenchData;
use super::sentences;
use crate::drift::{DriftRow, LayerDriftRow, TrainedDrift};
use crate::pages::PageLayout;
use crate::recording::{OutlierRow, RecordedPrompt, RecordedRun, Recording, StoredSide};
use crate::scales::ScaleLayout;

/// The version of the data.
pub const SCHEMA: u32 = 1;

/// Flips of one prompt that are listed, those of the surest predictions.
const LISTED_FLIPS: usize = 40;

/// What was measured, of either kind of model.
#[derive(Debug, Clone, Copy)]
pub enum Table<'a> {
    /// The tiny model.
    Tiny(&'a [DriftRow]),
    /// A trained model on a text.
    Trained(&'a TrainedDrift),
}

/// All that a page is made of.
#[derive(Debug, Clone)]
pub struct Report<'a> {
    /// The table.
    pub table: Table<'a>,
    /// The recording of the table's runs.
    pub recording: &'a Recording,
    /// The recording of the two layouts of K's scales under outliers, on the tiny model.
    pub layouts: &'a Recording,
    /// What they cost.
    pub outliers: &'a [OutlierRow],
    /// A benchmark.
    pub bench: Option<BenchData>,
    /// Whether the adapter is a software driver.
    pub software: bool,
    /// The commit of this program, where its build was told.
    pub commit: Option<&'a str>,
}

/// The JSON of a page. `schema.md` beside this file describes it.
#[derive(Debug, Clone, Serialize)]
pub struct Data {
    schema: u32,
    generator: Generator,
    measured: Measured,
    table: Vec<Value>,
    formats: Vec<Format>,
    layers: Vec<LayerDriftRow>,
    recordings: [RecordingData; 2],
    outliers: Vec<OutlierRow>,
    bench: Option<BenchData>,
    arrays: Vec<Array>,
}

#[derive(Debug, Clone, Serialize)]
struct Generator {
    name: &'static str,
    version: &'static str,
    commit: Option<String>,
}

#[derive(Debug, Clone, Serialize)]
struct Measured {
    model: String,
    trained: bool,
    device: String,
    adapter: String,
    software: bool,
    convention: String,
    mode: String,
    window: u32,
    outlier: f64,
    keys: Option<String>,
    tensor_scales: String,
    prompts: usize,
    tokens: u64,
}

#[derive(Debug, Clone, Serialize)]
struct Format {
    pair: String,
    sentences: Vec<String>,
}

#[derive(Debug, Clone, Serialize)]
struct Array {
    #[serde(rename = "type")]
    kind: &'static str,
    data: String,
}

#[derive(Debug, Clone, Serialize)]
struct RecordingData {
    model: String,
    layers: u32,
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    vocabulary: u32,
    shown_layers: Vec<u32>,
    shown_heads: Vec<u32>,
    texts: BTreeMap<u32, String>,
    prompts: Vec<PromptData>,
    takes: Vec<TakeData>,
}

#[derive(Debug, Clone, Serialize)]
struct PromptData {
    ids: Vec<u32>,
    shown: Vec<u32>,
}

#[derive(Debug, Clone, Serialize)]
struct TakeData {
    outlier: f64,
    runs: Vec<RunData>,
}

#[derive(Debug, Clone, Serialize)]
struct RunData {
    pair: Option<String>,
    k: Option<SideData>,
    v: Option<SideData>,
    tensor_scales: Vec<[f32; 2]>,
    prompts: Vec<RunPrompt>,
}

/// How a side is stored, as much as reading it takes.
#[derive(Debug, Clone, Serialize)]
struct SideData {
    name: String,
    element: &'static str,
    bits: u32,
    layout: &'static str,
    group: u32,
    scale_type: Option<&'static str>,
    page_tokens: u32,
    head_words: u32,
    scale_offset: u32,
    page_words: u32,
    waits: bool,
}

#[derive(Debug, Clone, Serialize)]
struct RunPrompt {
    error: usize,
    power: usize,
    top: usize,
    top_ids: usize,
    top_logits: usize,
    log_sum_exp: usize,
    kept_logit: usize,
    changed: usize,
    flips: Vec<FlipData>,
    layers: Vec<LayerData>,
}

#[derive(Debug, Clone, Serialize)]
struct FlipData {
    position: u32,
    from: u32,
    to: u32,
    reference_margin: f64,
    margin: f64,
}

#[derive(Debug, Clone, Serialize)]
struct LayerData {
    k: StoredData,
    v: StoredData,
}

#[derive(Debug, Clone, Serialize)]
struct StoredData {
    rows: usize,
    words: usize,
    scales: usize,
    groups: Vec<u32>,
    waiting: usize,
    packed_at: usize,
}

/// Typed arrays in base64, each once however often it is named.
#[derive(Debug, Default)]
struct Arrays {
    known: HashMap<(&'static str, Vec<u8>), usize>,
    list: Vec<Array>,
}

impl Arrays {
    fn add(&mut self, kind: &'static str, bytes: Vec<u8>) -> usize {
        if let Some(&place) = self.known.get(&(kind, bytes.clone())) {
            return place;
        }
        self.list.push(Array {
            kind,
            data: STANDARD.encode(&bytes),
        });
        self.known.insert((kind, bytes), self.list.len() - 1);
        self.list.len() - 1
    }

    fn f32(&mut self, values: &[f32]) -> usize {
        self.add("f32", values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    fn f64(&mut self, values: &[f64]) -> usize {
        self.add("f64", values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    fn u32(&mut self, values: &[u32]) -> usize {
        self.add("u32", values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// Values below 2^bits in as few bytes.
    fn narrow(&mut self, values: &[u32], bits: u32) -> usize {
        match bits {
            8 => self.add("u8", values.iter().map(|&v| v as u8).collect()),
            16 => self.add(
                "u16",
                values.iter().flat_map(|&v| (v as u16).to_le_bytes()).collect(),
            ),
            _ => self.u32(values),
        }
    }
}

impl Data {
    /// The data of a report.
    pub fn of(report: &Report<'_>) -> Data {
        let mut arrays = Arrays::default();
        let [recording, layouts] =
            [report.recording, report.layouts].map(|recording| recorded(recording, &mut arrays));
        let (table, layers) = match report.table {
            Table::Tiny(rows) => (values(rows), Vec::new()),
            Table::Trained(drift) => (values(&drift.rows), drift.layers.clone()),
        };
        Data {
            schema: SCHEMA,
            generator: Generator {
                name: "kvpack",
                version: env!("CARGO_PKG_VERSION"),
                commit: report.commit.map(str::to_owned),
            },
            measured: measured(report),
            formats: formats(report),
            table,
            layers,
            recordings: [recording, layouts],
            outliers: report.outliers.to_vec(),
            bench: report.bench.clone(),
            arrays: arrays.list,
        }
    }

    /// As JSON on one line. No `<` and no line separators of Unicode occur in it: between script tags it ends nowhere early.
    pub fn to_json(&self) -> std::io::Result<String> {
        let json = serde_json::to_string(self)?;
        Ok(json
            .replace('<', "\\u003c")
            .replace('\u{2028}', "\\u2028")
            .replace('\u{2029}', "\\u2029"))
    }
}

fn values<T: Serialize>(rows: &[T]) -> Vec<Value> {
    rows.iter()
        .filter_map(|row| serde_json::to_value(row).ok())
        .collect()
}

fn measured(report: &Report<'_>) -> Measured {
    let recording = report.recording;
    let tokens: usize = recording.prompts.iter().map(Vec::len).sum();
    let base = Measured {
        model: recording.model.clone(),
        trained: false,
        device: String::new(),
        adapter: String::new(),
        software: report.software,
        convention: "packed".to_owned(),
        mode: String::new(),
        window: 0,
        outlier: 1.0,
        keys: None,
        tensor_scales: "calibrated".to_owned(),
        prompts: recording.prompts.len(),
        tokens: tokens as u64,
    };
    match report.table {
        Table::Tiny(rows) => rows.first().map_or(base.clone(), |row| Measured {
            device: row.device.clone(),
            adapter: row.adapter.clone(),
            convention: row.convention.clone(),
            mode: row.mode.clone(),
            window: row.window,
            outlier: row.outlier,
            ..base
        }),
        Table::Trained(drift) => drift.rows.first().map_or(base.clone(), |row| Measured {
            trained: true,
            device: row.device.clone(),
            adapter: row.adapter.clone(),
            mode: row.mode.clone(),
            window: row.window,
            keys: Some(row.k_rope.clone()),
            tensor_scales: row.tensor_scales.clone(),
            ..base
        }),
    }
}

/// The pairs of the table with what happened to them in words.
fn formats(report: &Report<'_>) -> Vec<Format> {
    let recording = report.recording;
    let runs = recording.takes.first().map_or(&[][..], |take| &take.runs);
    let run = |pair: &str| {
        let named = |run: &&RecordedRun| run.pair.is_some_and(|own| own.to_string() == pair);
        runs.iter().find(named)
    };
    let rows: Vec<sentences::Figures> = match report.table {
        Table::Tiny(rows) => rows.iter().map(sentences::Figures::from).collect(),
        // Without the reference.
        Table::Trained(drift) => drift.rows.iter().skip(1).map(sentences::Figures::from).collect(),
    };
    rows.iter()
        .map(|row| Format {
            pair: row.pair.clone(),
            sentences: run(&row.pair).map_or_else(Vec::new, |run| sentences::of(row, run, recording)),
        })
        .collect()
}

fn recorded(recording: &Recording, arrays: &mut Arrays) -> RecordingData {
    let config = &recording.config;
    let prompts = recording.prompts.iter().zip(&recording.shown.tokens);
    RecordingData {
        model: recording.model.clone(),
        layers: config.blocks,
        q_heads: config.q_heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        vocabulary: config.vocabulary,
        shown_layers: recording.shown.layers.clone(),
        shown_heads: recording.shown.heads.clone(),
        texts: recording.texts.clone(),
        prompts: prompts
            .map(|(ids, shown)| PromptData {
                ids: ids.clone(),
                shown: shown.clone(),
            })
            .collect(),
        takes: recording
            .takes
            .iter()
            .map(|take| TakeData {
                outlier: take.outlier,
                runs: take
                    .runs
                    .iter()
                    .map(|run| run_data(run, config.vocabulary, arrays))
                    .collect(),
            })
            .collect(),
    }
}

fn run_data(run: &RecordedRun, vocabulary: u32, arrays: &mut Arrays) -> RunData {
    let sides = run.prompts.iter().flat_map(|prompt| &prompt.layers).next();
    let side = |s: usize| {
        let stored = sides.map(|sides| &sides[s]);
        stored.map(|stored| side_data(&stored.packed, stored.waits.is_some()))
    };
    RunData {
        pair: run.pair.map(|pair| pair.to_string()),
        k: side(0),
        v: side(1),
        tensor_scales: run.tensor_scales.clone(),
        prompts: run
            .prompts
            .iter()
            .map(|prompt| run_prompt(prompt, vocabulary, arrays))
            .collect(),
    }
}

fn side_data(page: &PageLayout, waits: bool) -> SideData {
    let info = page.side.element.info();
    SideData {
        name: page.side.to_string(),
        element: info.name,
        bits: info.bits,
        layout: page.side.layout.name(),
        group: page.side.layout.token_group(),
        scale_type: match page.side.layout {
            ScaleLayout::None => None,
            ScaleLayout::PerTensor => Some("f32"),
            _ => Some(page.side.scale.name()),
        },
        page_tokens: page.tokens,
        head_words: page.head_words,
        scale_offset: page.scale_offset,
        page_words: page.words,
        waits,
    }
}

fn run_prompt(prompt: &RecordedPrompt, vocabulary: u32, arrays: &mut Arrays) -> RunPrompt {
    let mut flips = prompt.flips.clone();
    flips.sort_by(|a, b| b.reference_margin.total_cmp(&a.reference_margin));
    let predictions = &prompt.predictions;
    let id_bits = match vocabulary {
        0..=0x100 => 8,
        0x101..=0x1_0000 => 16,
        _ => 32,
    };
    RunPrompt {
        error: arrays.f64(&prompt.error),
        power: arrays.f64(&prompt.power),
        top: predictions.ids.len() / predictions.log_sum_exp.len().max(1),
        top_ids: arrays.narrow(&predictions.ids, id_bits),
        top_logits: arrays.f32(&predictions.logits),
        log_sum_exp: arrays.f64(&predictions.log_sum_exp),
        kept_logit: arrays.f32(&predictions.kept_logit),
        changed: flips.len(),
        flips: flips
            .iter()
            .take(LISTED_FLIPS)
            .map(|flip| FlipData {
                position: flip.position,
                from: flip.from,
                to: flip.to,
                reference_margin: flip.reference_margin,
                margin: flip.margin,
            })
            .collect(),
        layers: prompt
            .layers
            .iter()
            .map(|[k, v]| LayerData {
                k: stored(k, arrays),
                v: stored(v, arrays),
            })
            .collect(),
    }
}

fn stored(side: &StoredSide, arrays: &mut Arrays) -> StoredData {
    StoredData {
        rows: arrays.f32(&side.rows),
        words: arrays.u32(&side.words),
        scales: arrays.narrow(&side.scales, side.packed.side.scale.bits()),
        groups: side.groups.clone(),
        waiting: arrays.u32(&side.waiting),
        packed_at: arrays.u32(&side.packed_at),
    }
}
