//! `kvpack bench`: how fast the packed cache is on an adapter, beside f16 and the read roof.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::ValueEnum;
use kvpack::bench::{self, BenchOptions, BenchReport, Shape, Sizes, Work};
use kvpack::drift::{self, Convention, Device, DriftOptions, DriftRow, Mode};
use kvpack::report::bench::{Baseline, advice, text, to_csv, to_json};
use kvpack::report::bench_plot::bench_plot;
use kvpack::report::output::replace_file;
use kvpack::report::plot::Picture;
use kvpack::spec::{Pair, TABLE};

use super::device::{AdapterArgs, positive};
use super::output::{Outputs, Progress, print, tell};
use super::{Failure, input, usage};

/// What to time.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Kind {
    /// Attention of one new token a sequence
    Decode,
    /// Quantising new tokens into pages
    Append,
    /// Attention of many new tokens a sequence, through packed pages
    Prefill,
}

/// What was asked.
#[derive(clap::Args)]
pub struct Args {
    /// What to time
    #[arg(value_enum, value_name = "WORK", default_value_t = Kind::Decode)]
    work: Kind,
    /// Cache formats, K/V or one name for both [default: the eight of the drift table]
    #[arg(long, value_name = "PAIR", value_delimiter = ',', default_values = TABLE, hide_default_value = true)]
    pairs: Vec<Pair>,
    /// Tokens of a sequence at the end of a step [default: 4096,32768 for decode, else 512]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = count())]
    context: Vec<u32>,
    /// New tokens of a step; append and prefill only [default: 512, at most the context]
    #[arg(long, value_name = "N", value_parser = count())]
    tokens: Option<u32>,
    /// Sequences
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=65536))]
    batch: u32,
    /// Heads of a model: llama-2-7b, llama-3-8b, llama-3-70b, mistral-7b, qwen2.5-7b, phi-3-mini, gemma-2-9b
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
    /// Seconds of samples for each row, about; at least 5 samples
    #[arg(long, value_name = "S", default_value = "1", value_parser = positive)]
    seconds: f64,
    /// Assumed last-level cache [default: the CPU's for software drivers, 64 for GPUs]
    #[arg(long, value_name = "MiB", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    cache_size: Option<u64>,
    /// Memory that a cache may take [default: 1 for software drivers, 4 for GPUs]
    #[arg(long, value_name = "GiB", value_parser = positive)]
    memory: Option<f64>,
    /// No advice, which takes the drift table's second on the CPU
    #[arg(long)]
    no_advice: bool,
    #[command(flatten)]
    adapter: AdapterArgs,
    /// Compare with an earlier --json, and mark what moved beyond the spread
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// Write header, roofs and rows with every sample as JSON; - is standard output, in place of the table
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
    /// Write the rows as CSV; - is standard output, in place of the table
    #[arg(long, value_name = "FILE")]
    csv: Option<String>,
    /// Draw time against context, and bandwidth beside the roof, into a .svg or .png file
    #[arg(long, value_name = "FILE")]
    plot: Option<String>,
    /// Write table and JSON to DIR/<adapter>/<date>-<work>.txt and .json
    #[arg(long, value_name = "DIR")]
    record: Option<PathBuf>,
}

fn count() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..)
}

impl Args {
    /// Measures, then prints and writes.
    pub fn run(self) -> Result<(), Failure> {
        let work = match self.work {
            Kind::Decode => Work::Decode,
            Kind::Append => Work::Append,
            Kind::Prefill => Work::Prefill,
        };
        if let (Work::Decode, Some(tokens)) = (work, self.tokens) {
            let reason = "a step of decode adds one token to each sequence";
            return Err(usage(
                format!("bench decode --tokens {tokens}"),
                reason,
                "leave --tokens out, or bench prefill",
            ));
        }
        let picture = self
            .plot
            .as_ref()
            .map(|file| Picture::of(Path::new(file)))
            .transpose()?;
        let outputs = Outputs::check(&[
            ("--json", self.json.as_deref()),
            ("--csv", self.csv.as_deref()),
            ("--plot", self.plot.as_deref()),
        ])?;
        let baseline = self.baseline.as_deref().map(read_baseline).transpose()?;
        if let Some(folder) = &self.record {
            std::fs::create_dir_all(folder).map_err(|error| {
                let asked = format!("--record {}", folder.display());
                usage(asked, error.to_string(), "name a folder that you may write")
            })?;
        }
        let gpu = self.adapter.open()?;
        let adapter = gpu.summary();
        let (assumed, source) = bench::assumed_cache(adapter);
        let memory = self
            .memory
            .map(|gib| (gib * (1_u64 << 30) as f64) as u64)
            .unwrap_or(bench::default_memory(adapter));
        let contexts = match (self.context.is_empty(), work) {
            (false, _) => self.context,
            (true, Work::Decode) => vec![4096, 32_768],
            (true, _) => vec![512],
        };
        let options = BenchOptions {
            work,
            pairs: self.pairs,
            contexts,
            batch: self.batch,
            new_tokens: self.tokens.unwrap_or(512),
            shape: self.like.unwrap_or(Shape {
                q_heads: self.q_heads,
                kv_heads: self.kv_heads,
                head_dim: self.head_dim,
            }),
            sizes: Sizes {
                cache_bytes: self.cache_size.map_or(assumed, |mib| mib << 20),
                memory,
            },
            cache_source: match self.cache_size {
                Some(_) => "given".to_owned(),
                None => source,
            },
            seconds: self.seconds,
        };
        let progress = Progress::new();
        let report = bench::run(&gpu, &options, &mut |done, of, what| {
            progress.show(done, of, what)
        });
        progress.finish();
        let report = report?;
        let drawn = picture.map(|picture| bench_plot(&report, picture)).transpose()?;
        let advice = match self.no_advice {
            true => Vec::new(),
            false => advice(&report, &drift_rows(&report)),
        };
        let text = text(&report, baseline.as_ref(), &advice);
        let shown = match outputs.take_stdout() {
            true => Ok(()),
            false => print(&text),
        };
        let recorded = match &self.record {
            Some(folder) => record(folder, &report, &text),
            None => Ok(()),
        };
        // One report that fails does not keep back the others.
        let written = [
            shown,
            outputs.write("--json", || to_json(&report)),
            outputs.write("--csv", || to_csv(&report)),
            outputs.write("--plot", || {
                drawn.ok_or_else(|| io::Error::other("nothing was drawn"))
            }),
            recorded,
        ];
        written.into_iter().collect::<Result<(), Failure>>()?;
        match report.rows.iter().filter(|row| row.above_roof).count() {
            0 => Ok(()),
            rows => Err(Failure::Checks(format!(
                "{rows} of {} rows are above the roof: not believed",
                report.rows.len()
            ))),
        }
    }
}

fn read_baseline(path: &Path) -> Result<Baseline, Failure> {
    let name = path.display().to_string();
    let bytes = input::read(path, input::MAX_BENCH).map_err(|error| {
        let advice = "name a file that `kvpack bench --json` wrote";
        usage(format!("baseline `{name}`"), error.to_string(), advice)
    })?;
    Ok(Baseline::parse(&name, &bytes)?)
}

/// The drift of the measured pairs on the CPU reference; a pair that the tiny model cannot hold has none.
fn drift_rows(report: &BenchReport) -> Vec<DriftRow> {
    let mut pairs: Vec<Pair> = report
        .rows
        .iter()
        .filter_map(|row| row.pair.parse().ok())
        .collect();
    pairs.sort();
    pairs.dedup();
    let of = |pair: Pair| {
        let options = DriftOptions {
            pairs: vec![pair],
            convention: Convention::Packed,
            mode: Mode::Prefill,
            outlier: 1.0,
            window: 0,
        };
        drift::run(&Device::Cpu, &options, &mut |_, _, _| ()).ok()
    };
    pairs.into_iter().filter_map(of).flatten().collect()
}

/// Writes table and JSON into a folder of the adapter, under today's date.
fn record(folder: &Path, report: &BenchReport, text: &str) -> Result<(), Failure> {
    let adapter: String = report
        .header
        .adapter
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() {
                c.to_ascii_lowercase()
            } else {
                '-'
            }
        })
        .collect();
    let folder = folder.join(adapter.trim_matches('-'));
    let work = report.rows.first().map_or(Work::Decode, |row| row.work);
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH);
    let stem = format!("{}-{work}", date(seconds.map_or(0, |elapsed| elapsed.as_secs())));
    for (ending, bytes) in [("txt", Ok(text.as_bytes().to_vec())), ("json", to_json(report))] {
        let path = folder.join(format!("{stem}.{ending}"));
        std::fs::create_dir_all(&folder)
            .and(bytes)
            .and_then(|bytes| replace_file(&path, |file| file.write_all(&bytes)))
            .map_err(|error| Failure::Write {
                to: format!("`{}`", path.display()),
                error,
            })?;
        tell(&format!("recorded: {}", path.display()));
    }
    Ok(())
}

/// The UTC date of so many seconds since 1970, as YYYY-MM-DD.
fn date(seconds: u64) -> String {
    // Years that begin in March: the leap day is the last of its year.
    let days = seconds / 86_400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, shifted) = (
        day - (153 * month + 2) / 5 + 1,
        if month < 10 { month + 3 } else { month - 9 },
    );
    format!(
        "{:04}-{shifted:02}-{day:02}",
        era * 400 + year + u64::from(shifted <= 2)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (4_107_542_399, "2100-02-28"),
            (4_107_542_400, "2100-03-01"),
            (1_767_225_599, "2025-12-31"),
        ] {
            assert_eq!(date(seconds), text);
        }
    }

    #[test]
    fn the_help_names_every_model() {
        use clap::CommandFactory;
        use kvpack::bench::MODELS;
        let mut command = super::super::Cli::command();
        let help = command
            .find_subcommand_mut("bench")
            .unwrap()
            .render_long_help()
            .to_string();
        for (name, _) in MODELS {
            assert!(help.contains(name), "{name}");
        }
    }
}
