//! `kvpack plan`: what a model's cache takes, as a table and files.

use std::path::PathBuf;

use clap::value_parser;
use kvpack::capacity::config::{Config, Given};
use kvpack::capacity::{self, CapacityOptions, parse_bytes};
use kvpack::report::{csv, json, table};
use kvpack::spec::{Pair, TABLE};

use super::Failure;
use super::output::{Outputs, print, tell};

/// What was asked.
#[derive(clap::Args)]
pub struct Args {
    /// Hugging Face config.json of the model; the options for its shape come before it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Layers
    #[arg(long, value_name = "L", value_parser = value_parser!(u32).range(1..), allow_hyphen_values = true)]
    layers: Option<u32>,
    /// KV heads
    #[arg(long, value_name = "H", value_parser = value_parser!(u32).range(1..), allow_hyphen_values = true)]
    kv_heads: Option<u32>,
    /// Channels of a head
    #[arg(long, value_name = "D", value_parser = value_parser!(u32).range(1..), allow_hyphen_values = true)]
    head_dim: Option<u32>,
    /// Channels of a key head [default: --head-dim]
    #[arg(long, value_name = "D", value_parser = value_parser!(u32).range(1..), allow_hyphen_values = true)]
    k_head_dim: Option<u32>,
    /// Channels of a value head [default: --head-dim]
    #[arg(long, value_name = "D", value_parser = value_parser!(u32).range(1..), allow_hyphen_values = true)]
    v_head_dim: Option<u32>,
    /// Tokens of each sequence
    #[arg(long, value_name = "N", default_value = "32768", value_parser = value_parser!(u32).range(1..), allow_hyphen_values = true)]
    context: u32,
    /// Sequences
    #[arg(long, value_name = "B", default_value = "1", value_parser = value_parser!(u32).range(1..), allow_hyphen_values = true)]
    batch: u32,
    /// Cache formats, K/V or one name for both: f16,int4c(32)/int4 [default: the eight of the drift table]
    #[arg(long, value_name = "PAIR", value_delimiter = ',', default_values = TABLE, hide_default_value = true)]
    pairs: Vec<Pair>,
    /// Memory for all pages, as 8GiB, 512MiB, 8GB or bytes: says the longest context and the largest batch that fit
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, allow_hyphen_values = true)]
    budget: Option<u64>,
    /// Recent tokens that stay in f16
    #[arg(long, value_name = "R", default_value = "0", allow_hyphen_values = true)]
    window: u32,
    /// First tokens of a sequence that stay in f16
    #[arg(long, value_name = "S", default_value = "0", allow_hyphen_values = true)]
    sink_tokens: u32,
    /// Tokens of a page [default: 64, or the longest group of the pair]
    #[arg(long, value_name = "P", allow_hyphen_values = true)]
    page_tokens: Option<u32>,
    /// Write the rows as JSON, in bytes; - is standard output, in place of the table
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
    /// Write the rows as CSV, in bytes; - is standard output, in place of the table
    #[arg(long, value_name = "FILE")]
    csv: Option<String>,
}

impl Args {
    /// Computes, then prints and writes.
    pub fn run(self) -> Result<(), Failure> {
        let outputs = Outputs::check(&[("--json", self.json.as_deref()), ("--csv", self.csv.as_deref())])?;
        outputs.keep(&[("--config", self.config.as_deref())], &[])?;
        let config = self.config.as_deref().map(Config::read).transpose()?;
        let given = Given {
            layers: self.layers,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            k_head_dim: self.k_head_dim,
            v_head_dim: self.v_head_dim,
        };
        let options = CapacityOptions {
            shape: given.shape(config.as_ref())?,
            pairs: self.pairs,
            context: self.context,
            batch: self.batch,
            window: self.window,
            sink_tokens: self.sink_tokens,
            page_tokens: self.page_tokens,
            budget: self.budget,
        };
        let capacity = capacity::run(&options)?;
        for (pair, reason) in &capacity.left_out {
            tell(&format!("{pair} is left out: {reason}"));
        }
        let rows = capacity.rows;
        let shown = if outputs.take_stdout() {
            Ok(())
        } else {
            print(&table::capacity(&rows))
        };
        // One report that fails does not keep back the others.
        let written = [
            shown,
            outputs.write("--json", || json::to_bytes(&rows)),
            outputs.write("--csv", || csv::to_bytes(&rows)),
        ];
        written.into_iter().collect()
    }
}
