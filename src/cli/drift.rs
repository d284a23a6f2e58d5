//! `kvpack drift`: the table, its files and its picture.

use std::io;
use std::path::Path;

use kvpack::drift::{Convention, DriftOptions, Mode};
use kvpack::report::plot::{Picture, drift_plot};
use kvpack::report::{csv, json, table};
use kvpack::spec::{Pair, TABLE};

use super::Failure;
use super::device::{AdapterArgs, Kind, is_software, positive, window};
use super::output::{Outputs, Progress, print, tell};

/// What was asked.
#[derive(clap::Args)]
pub struct Args {
    /// Cache formats, K/V or one name for both: f16,int4c(32)/int4 [default: the eight of the published table]
    #[arg(long, value_name = "PAIR", value_delimiter = ',', default_values = TABLE, hide_default_value = true)]
    pairs: Vec<Pair>,
    /// packed: what a real cache stores; published: f32 scales and whole-prompt groups, as the published table
    #[arg(long, value_name = "NAME", default_value = "packed")]
    convention: Convention,
    /// prefill: the prompt at once; decode: token by token through the streaming cache
    #[arg(long, value_name = "NAME", default_value = "prefill")]
    mode: Mode,
    /// Channel 3 of each head of K times this and of q divided by it: an outlier that full precision does not see
    #[arg(long, value_name = "S", default_value = "1", value_parser = positive, allow_hyphen_values = true)]
    outlier: f64,
    /// Recent tokens that stay in f16
    #[arg(long, value_name = "R", default_value = "0", value_parser = window, allow_hyphen_values = true)]
    window: u32,
    /// Where to run
    #[arg(long, value_enum, default_value_t = Kind::Auto)]
    device: Kind,
    #[command(flatten)]
    adapter: AdapterArgs,
    /// Write the rows as JSON; - is standard output, in place of the table
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
    /// Write the rows as CSV; - is standard output, in place of the table
    #[arg(long, value_name = "FILE")]
    csv: Option<String>,
    /// Draw memory against drift into a .svg or .png file
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
        let (device, remark) = self.adapter.device(self.device)?;
        if let Some(remark) = remark {
            tell(&remark);
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
}
