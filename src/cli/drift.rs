//! `kvpack drift`: the table, its files and its picture.

use std::io;
use std::path::{Path, PathBuf};

use kvpack::drift::{Convention, Device, DriftOptions, KeyRope, Mode, TrainedDriftOptions, run_trained};
use kvpack::report::plot::{Picture, drift_plot};
use kvpack::report::{csv, json, table, trained};
use kvpack::spec::{Pair, TABLE};

use super::Failure;
use super::device::{AdapterArgs, Kind, is_software, positive, window};
use super::model::{WeightArgs, read_ids, read_text};
use super::output::{Outputs, Progress, print, tell};

/// What was asked.
#[derive(clap::Args)]
pub struct Args {
    /// Cache formats, K/V or one name for both: f16,int4c(32)/int4 [default: the eight of the published table]
    #[arg(long, value_name = "PAIR", value_delimiter = ',', default_values = TABLE, hide_default_value = true)]
    pairs: Vec<Pair>,
    /// packed: what a real cache stores; published: f32 scales and whole-prompt groups, as the published table
    #[arg(long, value_name = "NAME", default_value = "packed", conflicts_with = "model")]
    convention: Convention,
    /// prefill: the prompt at once; decode: token by token through the streaming cache
    #[arg(long, value_name = "NAME", default_value = "prefill")]
    mode: Mode,
    /// Channel 3 of each head of K times this and of q divided by it: an outlier that full precision does not see
    #[arg(long, value_name = "S", default_value = "1", value_parser = positive, allow_hyphen_values = true, conflicts_with = "model")]
    outlier: f64,
    /// Recent tokens that stay in f16
    #[arg(long, value_name = "R", default_value = "0", value_parser = window, allow_hyphen_values = true)]
    window: u32,
    /// Measure a trained model instead of the tiny one: a GGUF file or a Hugging Face folder, Llama architecture
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// With --model: the text to run [default: a story of 765 tokens of SmolLM2]
    #[arg(long, value_name = "FILE", requires = "model", conflicts_with = "tokens")]
    text: Option<PathBuf>,
    /// With --model: token ids to run in place of a text
    #[arg(long, value_name = "FILE", requires = "model")]
    tokens: Option<PathBuf>,
    /// With --model: only the first N tokens
    #[arg(long, value_name = "N", requires = "model", value_parser = clap::value_parser!(u32).range(2..))]
    limit: Option<u32>,
    /// With --model: measure each layer by itself too
    #[arg(long, requires = "model")]
    per_layer: bool,
    /// With --model: keys enter the cache after RoPE (post), or before it and are rotated as they are read (pre)
    #[arg(long, value_name = "WHEN", default_value = "post", requires = "model")]
    k_rope: KeyRope,
    #[command(flatten)]
    weights: WeightArgs,
    /// Where to run
    #[arg(long, value_enum, default_value_t = Kind::Auto)]
    device: Kind,
    #[command(flatten)]
    adapter: AdapterArgs,
    /// Write the rows as JSON; - is standard output, in place of the table
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
    /// Write the rows as CSV, with --per-layer those of the layers; - is standard output, in place of the table
    #[arg(long, value_name = "FILE")]
    csv: Option<String>,
    /// Draw memory against drift, or with --per-layer a heat map of layers and formats, into a .svg or .png file
    #[arg(long, value_name = "FILE")]
    plot: Option<String>,
}

impl Args {
    /// Measures, then prints and writes.
    pub fn run(self) -> Result<(), Failure> {
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
        let read = [
            ("--model", self.model.as_deref()),
            ("--text", self.text.as_deref()),
            ("--tokens", self.tokens.as_deref()),
        ];
        outputs.keep(&read, &[])?;
        let (device, remark) = self.adapter.device(self.device)?;
        if let Some(remark) = remark {
            tell(&remark);
        }
        if let Some(path) = self.model.clone() {
            return self.trained(&path, &device, picture, &outputs);
        }
        let options = DriftOptions {
            pairs: self.pairs,
            convention: self.convention,
            mode: self.mode,
            outlier: self.outlier,
            window: self.window,
        };
        let progress = Progress::new();
        let rows = kvpack::drift::run(&device, &options, &mut |done, of, what| {
            progress.show(done, of, what)
        });
        progress.finish();
        let rows = rows?;
        let drawn = picture.map(|picture| drift_plot(&rows, picture)).transpose()?;

        let shown = if outputs.take_stdout() {
            Ok(())
        } else {
            print(&table::drift(&rows, is_software(&device)))
        };
        // One report that fails does not keep back the others.
        let written = [
            shown,
            outputs.write("--json", || json::to_bytes(&rows)),
            outputs.write("--csv", || csv::to_bytes(&rows)),
            outputs.write("--plot", || {
                drawn.ok_or_else(|| io::Error::other("nothing was drawn"))
            }),
        ];
        written.into_iter().collect()
    }

    fn trained(
        self,
        path: &Path,
        device: &Device,
        picture: Option<Picture>,
        outputs: &Outputs,
    ) -> Result<(), Failure> {
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
            pairs: self.pairs,
            k_rope: self.k_rope,
            mode: self.mode,
            window: self.window,
            per_layer: self.per_layer,
            kv_scales: loaded.kv_scales,
        };
        let progress = Progress::new();
        let drift = run_trained(device, &loaded.model, &ids, &options, &mut |done, of, what| {
            progress.show(done, of, what);
        });
        progress.finish();
        let drift = drift?;
        let name = path
            .file_name()
            .map_or_else(|| path.to_string_lossy(), |name| name.to_string_lossy());
        let drawn = picture
            .map(|picture| match self.per_layer {
                true => trained::layer_plot(&drift, &name, picture),
                false => trained::drift_plot(&drift, &name, picture),
            })
            .transpose()?;
        let shown = if outputs.take_stdout() {
            Ok(())
        } else {
            print(&trained::trained_drift(&drift, &name, is_software(device)))
        };
        let written = [
            shown,
            outputs.write("--json", || json::to_bytes(&drift)),
            outputs.write("--csv", || match self.per_layer {
                true => csv::to_bytes(&drift.layers),
                false => csv::to_bytes(&drift.rows),
            }),
            outputs.write("--plot", || {
                drawn.ok_or_else(|| io::Error::other("nothing was drawn"))
            }),
        ];
        written.into_iter().collect()
    }
}

/// The text of the expected figures.
pub(super) const TEXT: &str = include_str!("../../tests/data/text.txt");
