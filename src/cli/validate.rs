//! `kvpack validate`: every kernel against the CPU reference.

use kvpack::report::{json, table};
use kvpack::spec::Pair;
use kvpack::validate::ValidateFilter;

use super::Failure;
use super::device::{AdapterArgs, kernel};
use super::output::{Outputs, Progress, print};

/// What was asked.
#[derive(clap::Args)]
pub struct Args {
    /// Only this kernel; may be repeated [default: all]
    #[arg(long = "kernel", value_name = "KERNEL", value_parser = kernel)]
    kernels: Vec<String>,
    /// Only these cache formats, K/V or one name for both [default: all]
    #[arg(long, value_name = "PAIR", value_delimiter = ',')]
    pairs: Vec<Pair>,
    #[command(flatten)]
    adapter: AdapterArgs,
    /// Write the rows as JSON; - is standard output, in place of the lines
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
}

impl Args {
    /// Runs the checks, a line as each is done.
    pub fn run(self) -> Result<(), Failure> {
        let outputs = Outputs::check(&[("--json", self.json.as_deref())])?;
        let gpu = self.adapter.open()?;
        let filter = ValidateFilter {
            kernels: self.kernels,
            pairs: self.pairs,
        };
        let lines = !outputs.take_stdout();
        let mut printed = if lines {
            print(&table::validate_head())
        } else {
            Ok(())
        };
        // The lines are the progress; a bar stands in for them where standard output belongs to the JSON.
        let progress = Progress::new();
        let mut done = 0;
        let rows = kvpack::validate::run(&gpu, &filter, &mut |row| {
            done += 1;
            if !lines {
                progress.show(done, done, &format!("{} {}", row.kernel, row.format));
            } else if printed.is_ok() {
                printed = print(&table::validate_line(row));
            }
        });
        progress.finish();
        let rows = rows?;
        if lines && !rows.is_empty() && printed.is_ok() {
            printed = print(&table::validate_summary(&rows));
        }
        let written = outputs.write("--json", || json::to_bytes(&rows));
        let failed = rows.iter().filter(|row| !row.passed).count();
        if failed > 0 {
            return Err(Failure::Checks(format!(
                "{failed} of {} checks failed",
                rows.len()
            )));
        }
        if rows.is_empty() {
            return Err(Failure::Checks(
                "no check fits these kernels and pairs, so nothing was validated".to_owned(),
            ));
        }
        printed.and(written)
    }
}
