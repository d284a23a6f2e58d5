//! `kvpack analyze`: what each format costs in the numbers of a file, as tables, files and a picture.

use std::io;
use std::path::{Path, PathBuf};

use kvpack::analyze::dump::{Axes, Dump};
use kvpack::report::heat_map::heat_map;
use kvpack::report::plot::Picture;
use kvpack::report::{analyze, csv, json};
use kvpack::spec::Side;

use super::Failure;
use super::output::{Outputs, Progress, print, tell};

/// What was asked.
#[derive(clap::Args)]
#[command(after_help = "\
A tensor is [tokens, heads, head_dim] numbers of f32, f16 or bf16, or [layers, tokens, heads, head_dim]. Whether it is K \
or V, and of which layer, is taken from its name (for .npy the file's): layers.3.k, past_key_values.3.value, key_cache_3.

Every format is tried on every tensor. Per-channel formats pack whole groups of tokens; a last group that is not full \
stays in f16, as it does in the cache.

Examples:
  kvpack analyze dump.safetensors --plot dump.svg
  kvpack analyze k_layer3.npy --sides int4,int4c(16),int4c(64) --json -
  kvpack analyze cache.safetensors --heads-first --tensor past_key_values.0.key")]
pub struct Args {
    /// K and V tensors, .safetensors or .npy
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Formats of one side: int8,int4c(16) [default: f16,fp8,int8,fp4,int4,int4c,int2,int2c]
    #[arg(long, value_name = "SIDE", value_delimiter = ',', hide_default_value = true,
          default_values = ["f16", "fp8", "int8", "fp4", "int4", "int4c", "int2", "int2c"])]
    sides: Vec<Side>,
    /// Only the tensor of this name; may be given several times [default: all]
    #[arg(long, value_name = "NAME")]
    tensor: Vec<String>,
    /// Tensors are [heads, tokens, head_dim], with an axis of layers, or a batch of one, before them or not
    #[arg(long)]
    heads_first: bool,
    /// Write the rows as JSON; - is standard output, in place of the tables
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
    /// Write the rows as CSV; - is standard output, in place of the tables
    #[arg(long, value_name = "FILE")]
    csv: Option<String>,
    /// Draw a heat map, layers by formats, into a .svg or .png file
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
        outputs.keep(&[("the file", Some(&self.file))], &[])?;
        let axes = if self.heads_first {
            Axes::HeadsFirst
        } else {
            Axes::TokensFirst
        };
        let mut sides = Vec::new();
        for side in self.sides {
            if !sides.contains(&side) {
                sides.push(side);
            }
        }
        let mut dump = Dump::open(&self.file, axes, &self.tensor)?;
        let progress = Progress::new();
        let analysis = dump.analyze(&sides, &mut |done, of, what| progress.show(done, of, what));
        progress.finish();
        let analysis = analysis?;
        for (tensor, side, reason) in &analysis.left_out {
            tell(&format!("{side} is left out of {tensor}: {reason}"));
        }
        let rows = analysis.rows;
        let file = self.file.display().to_string();
        let drawn = picture
            .map(|picture| heat_map(&analyze::picture(&rows, &file), picture))
            .transpose()?;
        let shown = if outputs.take_stdout() {
            Ok(())
        } else {
            print(&analyze::table(&rows))
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
}
