//! How fast the packed cache is on an adapter: decode, append and prefill beside f16 and beside the read roof.
//!
//! Decode reads the pages of many layers, one after the other, so that a pass over all of them reads at least
//! [`CACHE_FACTOR`] times the last cache; times are of one layer. Outputs are compared with f64 before anything is timed,
//! compilation and the first passes are in no sample, and bytes come from the work that was planned ([`bytes`]).
//! Whatever seems faster than the fastest plain read of the same run is marked as not believed.

pub mod bytes;
pub mod check;
pub mod roof;
pub mod timer;
pub mod tune;
pub mod workload;

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::gpu::{AdapterSummary, Gpu};
use crate::spec::{Pair, Side};
use crate::variant::Arithmetic;
use bytes::Bytes;
use roof::{Roof, RoofRow};
use timer::{Clock, LEAST_SAMPLES, Samples, Timer, WARM_UPS};
use workload::Workload;

/// The version of what is written as JSON.
pub const SCHEMA: u32 = 1;

/// A pass reads so many times the last cache where it is to come from memory.
pub const CACHE_FACTOR: u64 = 4;

/// The bytes of a pass that no cache of this size holds a good part of.
pub fn out_of_cache(cache_bytes: u64) -> u64 {
    cache_bytes.saturating_mul(CACHE_FACTOR)
}

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "cli", serde(rename_all = "lowercase"))]
pub enum Work {
    /// Attention of one new token a sequence.
    Decode,
    /// Quantising new tokens into pages.
    Append,
    /// Attention of many new tokens a sequence, through packed pages.
    Prefill,
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Work::Decode => "decode",
            Work::Append => "append",
            Work::Prefill => "prefill",
        })
    }
}

/// Heads of a model's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Query heads.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Channels of a head.
    pub head_dim: u32,
}

/// Models whose shape can be asked for by name: query heads, KV heads, channels.
pub const MODELS: [(&str, Shape); 7] = [
    ("llama-2-7b", shape(32, 32, 128)),
    ("llama-3-8b", shape(32, 8, 128)),
    ("llama-3-70b", shape(64, 8, 128)),
    ("mistral-7b", shape(32, 8, 128)),
    ("qwen2.5-7b", shape(28, 4, 128)),
    ("phi-3-mini", shape(32, 32, 96)),
    ("gemma-2-9b", shape(16, 8, 256)),
];

const fn shape(q_heads: u32, kv_heads: u32, head_dim: u32) -> Shape {
    Shape {
        q_heads,
        kv_heads,
        head_dim,
    }
}

impl FromStr for Shape {
    type Err = Error;

    /// The shape of a model in [`MODELS`].
    fn from_str(text: &str) -> Result<Shape> {
        let known = MODELS.iter().find(|(name, _)| *name == text);
        known.map(|&(_, shape)| shape).ok_or_else(|| Error::Usage {
            asked: format!("model `{text}`"),
            reason: "its shape is not known here".to_owned(),
            advice: format!(
                "choose one of {}, or give heads and channels",
                MODELS.map(|(name, _)| name).join(", ")
            ),
        })
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape {
            q_heads,
            kv_heads,
            head_dim,
        } = self;
        write!(f, "{q_heads} query heads, {kv_heads} KV heads of {head_dim}")
    }
}

/// One thing to time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// What is timed.
    pub work: Work,
    /// How the cache is stored.
    pub pair: Pair,
    /// The model's heads.
    pub shape: Shape,
    /// Sequences.
    pub batch: u32,
    /// Tokens of each sequence at the end of the step.
    pub context: u32,
    /// Of these, tokens that the step adds: 1 for decode.
    pub new_tokens: u32,
}

/// What bounds a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Assumed bytes of the last cache of the device.
    pub cache_bytes: u64,
    /// Bytes that the pages may take, and the buffers of the roof.
    pub memory: u64,
}

/// What to time.
#[derive(Debug, Clone)]
pub struct BenchOptions {
    /// What is timed.
    pub work: Work,
    /// The pairs, in the order of the report.
    pub pairs: Vec<Pair>,
    /// Tokens of a sequence at the end of a step, in the order of the report.
    pub contexts: Vec<u32>,
    /// Sequences.
    pub batch: u32,
    /// New tokens of a step, at most the context; not looked at by decode.
    pub new_tokens: u32,
    /// The model's heads.
    pub shape: Shape,
    /// Sizes of cache and memory.
    pub sizes: Sizes,
    /// Where the size of the cache is from, in words.
    pub cache_source: String,
    /// Seconds of samples for each row, about.
    pub seconds: f64,
}

/// How and where it was measured.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct BenchHeader {
    /// The adapter's name.
    pub adapter: String,
    /// `DiscreteGpu`, `IntegratedGpu`, `VirtualGpu`, `Cpu` or `Other`.
    pub device_type: String,
    /// Runs on the CPU: not a GPU.
    pub software: bool,
    /// The driver's name and version.
    pub driver: String,
    /// The graphics interface.
    pub backend: String,
    /// Features that matter to kernels.
    pub features: Vec<String>,
    /// The model's heads.
    pub shape: String,
    /// Sequences.
    pub batch: u32,
    /// The clock that was tried first, and what it spans.
    pub timing: String,
    /// Assumed bytes of the last cache.
    pub cache_bytes: u64,
    /// Where that is from.
    pub cache_source: String,
    /// Bytes that pages may take.
    pub memory_bytes: u64,
    /// What comes before the first sample.
    pub warm_up: String,
    /// How many samples, and what is said of them.
    pub samples: String,
}

/// One measured row. Times and bytes are of one layer and step.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct BenchRow {
    /// What was timed.
    pub work: Work,
    /// The pair's name.
    pub pair: String,
    /// Tokens of each sequence at the end of the step.
    pub context: u32,
    /// Sequences.
    pub batch: u32,
    /// New tokens of each sequence.
    pub new_tokens: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Channels of a head.
    pub head_dim: u32,
    /// Layers of the cache, all of which a pass goes over.
    pub layers: u32,
    /// Seconds: the median of the samples.
    pub seconds: f64,
    /// Their lower quartile.
    pub seconds_low: f64,
    /// Their upper quartile.
    pub seconds_high: f64,
    /// Bytes of codes: read, or written by an append.
    pub code_bytes: u64,
    /// Bytes of scales: read, or written by an append.
    pub scale_bytes: u64,
    /// Bytes of work lists and page tables.
    pub table_bytes: u64,
    /// Bytes of queries, outputs and partials; of the rows of an append.
    pub other_bytes: u64,
    /// How often the pages are read in a step; the bytes above count each time.
    pub times_read: u32,
    /// 10^9 bytes of codes and scales a second, by the median.
    pub gb_per_s: f64,
    /// New tokens a second through this one layer.
    pub tokens_per_s: f64,
    /// `gb_per_s` as a share of the read roof; none for rows that did not come from memory or are not believed, and
    /// for work that is not bound by reading.
    pub percent_of_roof: Option<f64>,
    /// The time of f16 over this one's; none where f16 was not measured.
    pub speed_up: Option<f64>,
    /// A pass touches less than [`CACHE_FACTOR`] times the assumed cache: parts of it may not have come from memory.
    pub cache_resident: bool,
    /// Faster than the fastest plain read, beyond the spread of both: not believed.
    pub above_roof: bool,
    /// What it was timed with.
    pub clock: Clock,
    /// Why the device's timestamps were not believed; else empty.
    pub note: String,
    /// Wall seconds of the passes over all layers before the first sample; in no sample.
    pub warm_up_seconds: f64,
    /// How attention ran, in words; empty for appends.
    pub variant: String,
    /// Whether scores were made of less than f32.
    pub approximate: bool,
    /// Whether that was measured by `kvpack tune`, and not what holds without.
    pub tuned: bool,
    /// The adapter's name and driver.
    pub adapter: String,
    /// Every sample, seconds of one layer, in the order in which they were taken.
    #[cfg_attr(feature = "cli", serde(skip))]
    pub samples: Vec<f64>,
}

/// A case without a row.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct LeftOut {
    /// The pair's name.
    pub pair: String,
    /// Tokens of a sequence.
    pub context: u32,
    /// Why.
    pub reason: String,
}

/// All that a run measured.
#[derive(Debug, Clone, PartialEq)]
pub struct BenchReport {
    /// How and where.
    pub header: BenchHeader,
    /// The read kernels, the fastest first; empty where nothing is compared with them.
    pub roofs: Vec<RoofRow>,
    /// By context, then in the order of the pairs.
    pub rows: Vec<BenchRow>,
    /// Cases that do not fit their pair, the kernels or the memory.
    pub left_out: Vec<LeftOut>,
}

/// The size that is assumed of an adapter's last cache, in bytes, and where it is from.
pub fn assumed_cache(adapter: &AdapterSummary) -> (u64, String) {
    if adapter.software {
        match cpu_cache(Path::new("/sys/devices/system/cpu/cpu0/cache")) {
            Some(bytes) => (bytes, "the CPU's, as the system tells".to_owned()),
            None => (32 << 20, "assumed for CPUs".to_owned()),
        }
    } else {
        (64 << 20, "assumed for GPUs".to_owned())
    }
}

/// The largest cache in a folder as Linux describes them.
fn cpu_cache(folder: &Path) -> Option<u64> {
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let sizes = entries.filter_map(|entry| {
        let text = std::fs::read_to_string(entry.path().join("size")).ok()?;
        let text = text.trim();
        let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
        let shift = match unit {
            "K" => 10,
            "M" => 20,
            _ => return None,
        };
        digits.parse::<u64>().ok()?.checked_mul(1 << shift)
    });
    sizes.max().filter(|&bytes| bytes > 0)
}

/// The memory that a cache may take where nothing is said: 1 GiB on software drivers, 4 GiB on GPUs.
pub fn default_memory(adapter: &AdapterSummary) -> u64 {
    if adapter.software { 1 << 30 } else { 4 << 30 }
}

/// Times every pair at every context. `progress` hears (done, of, what).
///
/// # Errors
/// [`Error::Usage`] for options that make no sense and where no case is left, [`Error::Mismatch`] where the adapter
/// computes wrong, what shaders and the device report. A case that does not fit is left out, with its reason.
pub fn run(
    gpu: &Gpu,
    options: &BenchOptions,
    progress: &mut dyn FnMut(u64, u64, &str),
) -> Result<BenchReport> {
    check(options)?;
    let timer = Timer::new(gpu)?;
    let decodes = options.work == Work::Decode;
    let kernels = if decodes { roof::catalogue().len() } else { 0 };
    let of = (kernels + options.pairs.len() * options.contexts.len()) as u64;
    let mut done = 0;
    let mut tick = |what: &str| {
        done += 1;
        progress(done, of, what);
    };
    let roofs = if decodes {
        roofs(gpu, options, &timer, &mut tick)?
    } else {
        Vec::new()
    };
    let (mut rows, mut left_out): (Vec<BenchRow>, Vec<LeftOut>) = (Vec::new(), Vec::new());
    for &context in &options.contexts {
        let first = rows.len();
        for &pair in &options.pairs {
            let case = Case {
                work: options.work,
                pair,
                shape: options.shape,
                batch: options.batch,
                context,
                new_tokens: if decodes {
                    1
                } else {
                    options.new_tokens.min(context)
                },
            };
            match row(gpu, &case, options, &timer, roofs.first()) {
                Ok(row) => rows.push(row),
                Err(
                    e @ (Error::Shape { .. }
                    | Error::Usage { .. }
                    | Error::Limit { .. }
                    | Error::Budget { .. }
                    | Error::CacheFull { .. }),
                ) => left_out.push(LeftOut {
                    pair: pair.to_string(),
                    context,
                    reason: e.to_string(),
                }),
                Err(e) => return Err(e),
            }
            tick(&format!("{pair}, {context} tokens"));
        }
        let f16 = Pair::same(Side::F16).to_string();
        let base = rows[first..].iter().find(|row| row.pair == f16);
        let base = base.map(|row| row.seconds);
        for row in &mut rows[first..] {
            row.speed_up = base.map(|base| base / row.seconds);
        }
    }
    if let (true, Some(first)) = (rows.is_empty(), left_out.first()) {
        return Err(Error::Usage {
            asked: format!("{} of {} pairs", options.work, options.pairs.len()),
            reason: format!(
                "no case is left; {} at {} tokens: {}",
                first.pair, first.context, first.reason
            ),
            advice: "choose other pairs or sizes".to_owned(),
        });
    }
    Ok(BenchReport {
        header: header(gpu, options, &timer),
        roofs,
        rows,
        left_out,
    })
}

fn check(options: &BenchOptions) -> Result<()> {
    let refuse = |asked: String, reason: &str| {
        Err(Error::Usage {
            asked,
            reason: reason.to_owned(),
            advice: "see kvpack bench --help".to_owned(),
        })
    };
    if options.pairs.is_empty() || options.contexts.is_empty() {
        return refuse("no pairs or no contexts".to_owned(), "there is nothing to time");
    }
    if let Some(&context) = options.contexts.iter().find(|&&context| context == 0) {
        return refuse(format!("a context of {context} tokens"), "it is at least 1");
    }
    if !(1..=1 << 16).contains(&options.batch) {
        return refuse(
            format!("a batch of {}", options.batch),
            "it is 1 to 65536 sequences",
        );
    }
    if options.new_tokens == 0 {
        return refuse("steps of 0 new tokens".to_owned(), "a step has at least 1");
    }
    if !(options.seconds.is_finite() && options.seconds > 0.0) {
        let asked = format!("{} seconds a row", options.seconds);
        return refuse(asked, "it is a finite number above 0");
    }
    if options.sizes.cache_bytes == 0 || options.sizes.memory == 0 {
        return refuse("a cache or memory of 0 bytes".to_owned(), "both are above 0");
    }
    Ok(())
}

/// The read kernels, the fastest first.
fn roofs(
    gpu: &Gpu,
    options: &BenchOptions,
    timer: &Timer,
    tick: &mut dyn FnMut(&str),
) -> Result<Vec<RoofRow>> {
    let Sizes { cache_bytes, memory } = options.sizes;
    let roof = Roof::new(gpu, out_of_cache(cache_bytes).min(memory))?;
    let mut rows = roof.measure(timer, cache_bytes, options.seconds / 2.0, tick)?;
    rows.sort_by(|a, b| b.gb_per_s.total_cmp(&a.gb_per_s));
    Ok(rows)
}

fn row(
    gpu: &Gpu,
    case: &Case,
    options: &BenchOptions,
    timer: &Timer,
    roof: Option<&RoofRow>,
) -> Result<BenchRow> {
    let mut workload = Workload::new(gpu, case, &options.sizes)?;
    let samples = workload.measure(timer, options.seconds)?;
    let (layers, bytes, times_read) = (workload.layers(), workload.bytes(), workload.times_read());
    let touched = bytes.cache() / u64::from(times_read) * u64::from(layers);
    let resident = touched < out_of_cache(options.sizes.cache_bytes);
    let attends = case.work != Work::Append;
    let variant = workload.variant();
    let row = BenchRow {
        times_read,
        variant: if attends {
            variant.to_string()
        } else {
            String::new()
        },
        approximate: attends && variant.arithmetic.for_side(case.pair.k) != Arithmetic::F32,
        tuned: attends && gpu.tuning().get(&workload.tuned_shape()) == Some(variant),
        adapter: gpu.summary().title(),
        ..BenchRow::new(case, layers, bytes, samples)
    };
    Ok(row.judged(resident, roof))
}

impl BenchRow {
    /// The figures that follow from the samples of passes over so many layers.
    fn new(case: &Case, layers: u32, bytes: Bytes, samples: Samples) -> BenchRow {
        let layer = |seconds: f64| seconds / f64::from(layers);
        let [seconds_low, seconds, seconds_high] = samples.quartiles().map(layer);
        let tokens = f64::from(case.batch) * f64::from(case.new_tokens);
        BenchRow {
            work: case.work,
            pair: case.pair.to_string(),
            context: case.context,
            batch: case.batch,
            new_tokens: case.new_tokens,
            q_heads: case.shape.q_heads,
            kv_heads: case.shape.kv_heads,
            head_dim: case.shape.head_dim,
            layers,
            seconds,
            seconds_low,
            seconds_high,
            code_bytes: bytes.codes,
            scale_bytes: bytes.scales,
            table_bytes: bytes.tables,
            other_bytes: bytes.other,
            times_read: 1,
            gb_per_s: bytes.cache() as f64 / seconds / 1e9,
            tokens_per_s: tokens / seconds,
            percent_of_roof: None,
            speed_up: None,
            cache_resident: false,
            above_roof: false,
            clock: samples.clock,
            note: samples.note,
            warm_up_seconds: samples.warm_up,
            variant: String::new(),
            approximate: false,
            tuned: false,
            adapter: String::new(),
            samples: samples.seconds.into_iter().map(layer).collect(),
        }
    }

    /// The same beside the roof: marked where it cannot be believed, and with a share of it only where it can.
    pub fn judged(mut self, cache_resident: bool, roof: Option<&RoofRow>) -> BenchRow {
        self.cache_resident = cache_resident;
        let Some(roof) = roof else { return self };
        let lowest = (self.code_bytes + self.scale_bytes) as f64 / self.seconds_high / 1e9;
        // Written so that a NaN is not believed.
        self.above_roof = !(lowest <= roof.highest_gb_per_s());
        let believed = !self.above_roof && !cache_resident && !roof.cache_resident;
        self.percent_of_roof = believed.then(|| self.gb_per_s / roof.gb_per_s * 100.0);
        self
    }
}

fn header(gpu: &Gpu, options: &BenchOptions, timer: &Timer) -> BenchHeader {
    let adapter = gpu.summary();
    let timing = match timer.clock() {
        Clock::Timestamps => "timestamps of the device around each pass",
        Clock::WallClock => "wall clock, from the submission until the queue is done",
    };
    BenchHeader {
        adapter: adapter.label.clone(),
        device_type: adapter.device_type.clone(),
        software: adapter.software,
        driver: format!("{} {}", adapter.driver, adapter.driver_info)
            .trim()
            .to_owned(),
        backend: adapter.backend.clone(),
        features: adapter.features.clone(),
        shape: options.shape.to_string(),
        batch: options.batch,
        timing: timing.to_owned(),
        cache_bytes: options.sizes.cache_bytes,
        cache_source: options.cache_source.clone(),
        memory_bytes: options.sizes.memory,
        warm_up: format!("{WARM_UPS} passes and all compilation, in no sample"),
        samples: format!(
            "at least {LEAST_SAMPLES} a row, for about {} s; median, and lower to upper quartile as spread",
            options.seconds
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(seconds: &[f64]) -> Samples {
        Samples {
            seconds: seconds.to_vec(),
            clock: Clock::Timestamps,
            note: String::new(),
            repeats: 1,
            warm_up: 1.0,
        }
    }

    /// A row of 10^9 bytes a layer, two layers.
    fn row(seconds: &[f64]) -> BenchRow {
        let case = Case {
            work: Work::Decode,
            pair: "int4".parse().unwrap(),
            shape: "llama-3-8b".parse().unwrap(),
            batch: 1,
            context: 4096,
            new_tokens: 1,
        };
        let bytes = Bytes {
            codes: 900_000_000,
            scales: 100_000_000,
            ..Bytes::default()
        };
        BenchRow::new(&case, 2, bytes, samples(seconds))
    }

    fn roof(gb_per_s: f64) -> RoofRow {
        let seconds = 1.0 / gb_per_s;
        RoofRow {
            kernel: "read_stride, 64 invocations".to_owned(),
            bytes: 1_000_000_000,
            cache_resident: false,
            seconds: [seconds * 0.9, seconds, seconds * 1.1],
            gb_per_s,
            clock: Clock::Timestamps,
            samples: vec![seconds],
        }
    }

    #[test]
    fn a_row_is_of_one_layer_and_figures_follow_from_the_median() {
        let row = row(&[0.5, 0.2, 0.4, 0.3, 0.6]);
        assert_eq!(
            (row.seconds_low, row.seconds, row.seconds_high),
            (0.15, 0.2, 0.25)
        );
        assert_eq!((row.gb_per_s, row.tokens_per_s), (5.0, 5.0));
        assert_eq!(row.samples, [0.25, 0.1, 0.2, 0.15, 0.3]);
    }

    #[test]
    fn ben_01_what_is_above_the_roof_or_from_the_cache_has_no_share_of_it() {
        let times = [0.5, 0.2, 0.4, 0.3, 0.6];
        let fine = row(&times).judged(false, Some(&roof(10.0)));
        assert!(fine.percent_of_roof == Some(50.0) && !fine.above_roof && !fine.cache_resident);
        let resident = row(&times).judged(true, Some(&roof(10.0)));
        assert!(resident.percent_of_roof.is_none() && resident.cache_resident && !resident.above_roof);
        // 4 to 6.7 GB/s in its spread; roofs of 3.9 / 0.9 and 3.5 / 0.9 at their best.
        let within = row(&times).judged(false, Some(&roof(3.9)));
        assert!(!within.above_roof && within.percent_of_roof.is_some());
        let above = row(&times).judged(false, Some(&roof(3.5)));
        assert!(above.above_roof && above.percent_of_roof.is_none());
        let both = row(&times).judged(true, Some(&roof(3.5)));
        assert!(both.above_roof && both.cache_resident);
        let cached = RoofRow {
            cache_resident: true,
            ..roof(10.0)
        };
        assert_eq!(row(&times).judged(false, Some(&cached)).percent_of_roof, None);
    }

    #[test]
    fn the_largest_cache_that_the_system_tells_counts() {
        let folder = std::env::temp_dir().join(format!("kvpack-caches-{}", std::process::id()));
        for (index, size) in ["32K\n", "1024K\n", "32M\n", "odd", "K"].iter().enumerate() {
            let path = folder.join(format!("index{index}"));
            std::fs::create_dir_all(&path).unwrap();
            std::fs::write(path.join("size"), size).unwrap();
        }
        assert_eq!(cpu_cache(&folder), Some(32 << 20));
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(cpu_cache(&folder), None);
    }

    #[test]
    fn models_are_known_by_name() {
        let shape: Shape = "llama-3-8b".parse().unwrap();
        assert_eq!((shape.q_heads, shape.kv_heads, shape.head_dim), (32, 8, 128));
        let message = "gpt-5".parse::<Shape>().unwrap_err().to_string();
        assert!(
            message.contains("gpt-5") && message.contains("llama-3-8b"),
            "{message}"
        );
        for (name, shape) in MODELS {
            crate::pages::heads_ratio(shape.q_heads, shape.kv_heads).expect(name);
        }
    }
}
