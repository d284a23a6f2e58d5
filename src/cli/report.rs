//! `kvpack report`: a measured run as a page.

use std::path::{Path, PathBuf};

use kvpack::drift::{Device, DriftOptions, DriftRow, KeyRope, Mode, TrainedDrift, TrainedDriftOptions};
use kvpack::recording::{Recording, layouts_study, tiny_study, trained_study};
use kvpack::report::csv;
use kvpack::report::page::{BenchData, Data, Report, Table, html};
use kvpack::spec::{Pair, TABLE};

use super::device::{AdapterArgs, Kind, is_software, positive, window};
use super::drift::TEXT;
use super::model::{WeightArgs, read_ids, read_text};
use super::output::{Outputs, Progress, print, tell};
use super::{Failure, input, usage};

/// What was asked.
#[derive(clap::Args)]
#[command(after_long_help = "\
The page stands alone: no network, no other file. It holds its data as JSON in the element `script#data`, which --json writes
alone: how it was measured (measured), the rows of `kvpack drift` (table), sentences (formats), recorded rows, words of the
pages, scales and predictions (recordings), keys under outliers (outliers), layers, bench, and numbers in base64 (arrays).
Every field is described in src/report/page/schema.md and in the documentation of kvpack::report::page.

Examples:
  kvpack report
  kvpack report --pairs f16,int4,'int4c(8)/int4',int2 --mode decode --out decode.html
  kvpack bench --json bench.json; kvpack report --bench bench.json
  kvpack report --model model.gguf --text story.txt --pairs int8,int4,int4c/int4")]
pub struct Args {
    /// The page, an HTML file; - is standard output [default: report.html, unless only --json or --csv is given]
    #[arg(long, value_name = "FILE")]
    out: Option<String>,
    /// Cache formats, K/V or one name for both: f16,int4c(32)/int4 [default: the eight of the published table]
    #[arg(long, value_name = "PAIR", value_delimiter = ',', default_values = TABLE, hide_default_value = true)]
    pairs: Vec<Pair>,
    /// prefill: the prompt at once; decode: token by token through the streaming cache
    #[arg(long, value_name = "NAME", default_value = "prefill")]
    mode: Mode,
    /// Channel 3 of each head of K times this and of q divided by it: an outlier that full precision does not see
    #[arg(long, value_name = "S", default_value = "1", value_parser = positive, allow_hyphen_values = true, conflicts_with = "model")]
    outlier: f64,
    /// Recent tokens that stay in f16
    #[arg(long, value_name = "R", default_value = "0", value_parser = window, allow_hyphen_values = true)]
    window: u32,
    /// Show a trained model instead of the tiny one: a GGUF file or a Hugging Face folder, Llama architecture
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// With --model: the text to run [default: a story of 765 tokens of SmolLM2]
    #[arg(long, value_name = "FILE", requires = "model", conflicts_with = "tokens")]
    text: Option<PathBuf>,
    /// With --model: token ids to run in place of a text
    #[arg(long, value_name = "FILE", requires = "model")]
    tokens: Option<PathBuf>,
    /// With --model: only the first N tokens
    #[arg(long, value_name = "N", requires = "model", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    /// With --model: keys enter the cache after RoPE (post), or before it and are rotated as they are read (pre)
    #[arg(long, value_name = "WHEN", default_value = "post", requires = "model")]
    k_rope: KeyRope,
    #[command(flatten)]
    weights: WeightArgs,
    /// Show times and bandwidths too: a file that `kvpack bench --json` wrote
    #[arg(long, value_name = "FILE")]
    bench: Option<PathBuf>,
    /// Where to run
    #[arg(long, value_enum, default_value_t = Kind::Auto)]
    device: Kind,
    #[command(flatten)]
    adapter: AdapterArgs,
    /// Write the page's data alone as JSON; - is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
    /// Write the rows of the table as CSV; - is standard output
    #[arg(long, value_name = "FILE")]
    csv: Option<String>,
}

/// The table of either kind of model.
enum Rows {
    Tiny(Vec<DriftRow>),
    Trained(TrainedDrift),
}

impl Args {
    /// Measures and records, then writes the page.
    pub fn run(self) -> Result<(), Failure> {
        let out = match (&self.out, &self.json, &self.csv) {
            (None, None, None) => Some("report.html".to_owned()),
            (out, ..) => out.clone(),
        };
        let outputs = Outputs::check(&[
            ("--out", out.as_deref()),
            ("--json", self.json.as_deref()),
            ("--csv", self.csv.as_deref()),
        ])?;
        let read = [
            ("--bench", self.bench.as_deref()),
            ("--model", self.model.as_deref()),
            ("--text", self.text.as_deref()),
            ("--tokens", self.tokens.as_deref()),
        ];
        outputs.keep(&read, &[])?;
        let bench = self.bench.as_deref().map(read_bench).transpose()?;
        let (device, remark) = self.adapter.device(self.device)?;
        if let Some(remark) = remark {
            tell(&remark);
        }
        let measured = match &self.model {
            Some(path) => self.trained(path, &device)?,
            None => self.tiny(&device)?,
        };
        let progress = Progress::new();
        let layouts = layouts_study(&device, &mut |done, of, what| progress.show(done, of, what));
        progress.finish();
        let (layouts, outliers) = layouts?;
        let report = Report {
            table: match &measured.0 {
                Rows::Tiny(rows) => Table::Tiny(rows),
                Rows::Trained(drift) => Table::Trained(drift),
            },
            recording: &measured.1,
            layouts: &layouts,
            outliers: &outliers,
            bench,
            software: is_software(&device),
            commit: option_env!("KVPACK_COMMIT").filter(|commit| !commit.is_empty()),
        };
        let data = Data::of(&report);
        let written = [
            outputs.write("--out", || Ok(html(&data)?.into_bytes())),
            outputs.write("--json", || Ok((data.to_json()? + "\n").into_bytes())),
            outputs.write("--csv", || match &measured.0 {
                Rows::Tiny(rows) => csv::to_bytes(rows),
                Rows::Trained(drift) => csv::to_bytes(&drift.rows),
            }),
        ];
        written.into_iter().collect::<Result<(), Failure>>()?;
        match out {
            Some(out) if !outputs.take_stdout() => print(&format!("{out}: open it in a browser\n")),
            _ => Ok(()),
        }
    }

    fn tiny(&self, device: &Device) -> Result<(Rows, Recording), Failure> {
        let options = DriftOptions {
            pairs: self.pairs.clone(),
            convention: Default::default(),
            mode: self.mode,
            outlier: self.outlier,
            window: self.window,
        };
        let progress = Progress::new();
        let study = tiny_study(device, &options, &mut |done, of, what| {
            progress.show(done, of, what)
        });
        progress.finish();
        let study = study?;
        let rows = study.rows.into_iter().next().unwrap_or_default();
        Ok((Rows::Tiny(rows), study.recording))
    }

    fn trained(&self, path: &Path, device: &Device) -> Result<(Rows, Recording), Failure> {
        let ids = self
            .tokens
            .as_ref()
            .map(|file| read_ids("--tokens", file))
            .transpose()?;
        let text = match &self.text {
            Some(file) => read_text("--text", file)?,
            None => TEXT.to_owned(),
        };
        let loaded = self.weights.load(path, device, ids.is_none())?;
        let mut ids = match (ids, &loaded.tokenizer) {
            (Some(ids), _) => ids,
            (None, Some(tokenizer)) => tokenizer.encode(&text)?,
            (None, None) => Vec::new(),
        };
        if let Some(limit) = self.limit {
            ids.truncate(limit as usize);
        }
        let options = TrainedDriftOptions {
            pairs: self.pairs.clone(),
            k_rope: self.k_rope,
            mode: self.mode,
            window: self.window,
            per_layer: true,
            kv_scales: loaded.kv_scales,
        };
        // Ids without a text of their own, as special tokens, go by their number.
        let text_of = |id: u32| {
            let text = loaded.tokenizer.as_ref().map(|tokenizer| tokenizer.label(id));
            text.filter(|text| !text.is_empty())
                .unwrap_or_else(|| format!("#{id}"))
        };
        let name = path
            .file_name()
            .map_or_else(|| path.to_string_lossy(), |name| name.to_string_lossy());
        let progress = Progress::new();
        let study = trained_study(
            device,
            (&name, &loaded.model),
            &ids,
            &options,
            &text_of,
            &mut |done, of, what| progress.show(done, of, what),
        );
        progress.finish();
        let (drift, recording) = study?;
        Ok((Rows::Trained(drift), recording))
    }
}

fn read_bench(path: &Path) -> Result<BenchData, Failure> {
    let name = path.display().to_string();
    let bytes = input::read(path, input::MAX_BENCH).map_err(|error| {
        let advice = "name a file that `kvpack bench --json` wrote";
        usage(format!("benchmark `{name}`"), error.to_string(), advice)
    })?;
    Ok(BenchData::parse(&name, &bytes)?)
}
