//! `kvpack tune`: the fastest variant of the attention kernel for a shape on an adapter, kept for later runs.

use std::fs;
use std::path::PathBuf;

use clap::ValueEnum;
use kvpack::bench::tune::{TuneOptions, tune};
use kvpack::bench::{self, Shape, Sizes, Work};
use kvpack::report::output::replace_file;
use kvpack::report::tune::{entry, text, to_json};
use kvpack::spec::{Pair, TABLE};
use kvpack::tuning::{TuningFile, VARIABLE, user_file};

use super::device::{AdapterArgs, positive};
use super::output::{Outputs, Progress, print, tell};
use super::{Failure, usage};

/// What to tune.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Kind {
    /// Attention of one new token a sequence
    Decode,
    /// Attention of many new tokens a sequence
    Prefill,
}

/// What was asked.
#[derive(clap::Args)]
pub struct Args {
    /// What to tune
    #[arg(value_enum, value_name = "WORK", default_value_t = Kind::Decode)]
    work: Kind,
    /// Cache formats, K/V or one name for both [default: the eight of the drift table]
    #[arg(long, value_name = "PAIR", value_delimiter = ',', default_values = TABLE, hide_default_value = true)]
    pairs: Vec<Pair>,
    /// Tokens of a sequence at the end of a step [default: 4096 for decode, 512 for prefill]
    #[arg(long, value_name = "N", value_parser = count())]
    context: Option<u32>,
    /// New tokens of a step of prefill
    #[arg(long, value_name = "N", default_value = "512", value_parser = count())]
    tokens: u32,
    /// Sequences
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=65536))]
    batch: u32,
    /// Heads of a model, as `kvpack bench` knows them
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["q_heads", "kv_heads", "head_dim"])]
    like: Option<Shape>,
    /// Query heads
    #[arg(long, value_name = "N", default_value = "32", value_parser = count())]
    q_heads: u32,
    /// KV heads
    #[arg(long, value_name = "N", default_value = "8", value_parser = count())]
    kv_heads: u32,
    /// Channels of a head
    #[arg(long, value_name = "N", default_value = "128", value_parser = count())]
    head_dim: u32,
    /// Seconds of samples for each variant, about; at least 5 samples
    #[arg(long, value_name = "S", default_value = "0.3", value_parser = positive)]
    seconds: f64,
    /// Memory that a cache may take [default: 1 for software drivers, 4 for GPUs]
    #[arg(long, value_name = "GiB", value_parser = positive)]
    memory: Option<f64>,
    /// Try scores in f16 and in packed 8-bit integers too: less exact than f32, by more than `kvpack validate` allows f32
    #[arg(long)]
    approximate: bool,
    #[command(flatten)]
    adapter: AdapterArgs,
    /// The file that keeps what was found [default: KVPACK_TUNING, or kvpack/tuning.json in the user's configuration]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Keep nothing
    #[arg(long, conflicts_with = "file")]
    dry_run: bool,
    /// Write every variant that was tried as JSON; - is standard output, in place of the table
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
}

fn count() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..)
}

impl Args {
    /// Measures, prints, and keeps the findings.
    pub fn run(self) -> Result<(), Failure> {
        let outputs = Outputs::check(&[("--json", self.json.as_deref())])?;
        let path = match self.dry_run {
            true => None,
            false => Some(self.file.or_else(user_file).ok_or_else(|| {
                usage(
                    "to keep what is found",
                    format!("{VARIABLE} is empty, or this system has no folder for configurations"),
                    "give --file, or --dry-run",
                )
            })?),
        };
        // What cannot be read or written is found out before minutes of work.
        let mut kept = match &path {
            Some(path) => {
                if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
                    fs::create_dir_all(folder).map_err(|error| Failure::Write {
                        to: format!("`{}`", folder.display()),
                        error,
                    })?;
                }
                TuningFile::read(path)?
            }
            None => TuningFile::default(),
        };
        let gpu = self.adapter.open()?;
        let adapter = gpu.summary();
        let (assumed, _) = bench::assumed_cache(adapter);
        let work = match self.work {
            Kind::Decode => Work::Decode,
            Kind::Prefill => Work::Prefill,
        };
        let options = TuneOptions {
            work,
            pairs: self.pairs,
            shape: self.like.unwrap_or(Shape {
                q_heads: self.q_heads,
                kv_heads: self.kv_heads,
                head_dim: self.head_dim,
            }),
            batch: self.batch,
            context: self
                .context
                .unwrap_or(if work == Work::Decode { 4096 } else { 512 }),
            new_tokens: self.tokens,
            sizes: Sizes {
                cache_bytes: assumed,
                memory: self
                    .memory
                    .map(|gib| (gib * (1_u64 << 30) as f64) as u64)
                    .unwrap_or(bench::default_memory(adapter)),
            },
            seconds: self.seconds,
            approximate: self.approximate,
        };
        let progress = Progress::new();
        let report = tune(&gpu, &options, &mut |done, of, what| {
            progress.show(done, of, what)
        });
        progress.finish();
        let report = report?;
        let shown = match outputs.take_stdout() {
            true => Ok(()),
            false => print(&text(adapter, &options, &report)),
        };
        let written = outputs.write("--json", || to_json(adapter, &options, &report));
        let stored = path.map_or(Ok(()), |path| {
            for row in &report.rows {
                kept.insert(&adapter.on(), entry(row, &options));
            }
            replace_file(&path, |file| file.write_all(kept.text().as_bytes())).map_err(|error| {
                Failure::Write {
                    to: format!("`{}`", path.display()),
                    error,
                }
            })?;
            tell(&format!("kept in {}", path.display()));
            Ok(())
        });
        [shown, written, stored].into_iter().collect()
    }
}
