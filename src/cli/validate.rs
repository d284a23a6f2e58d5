//! `kvpack validate`: every kernel against the CPU reference.

use kvpack::report::{json, table};
use kvpack::spec::Pair;
use kvpack::validate::{ValidateFilter, ValidateRow};

use super::device::{AdapterArgs, kernel};
use super::output::{Outputs, Progress, print, tell};
use super::{Failure, usage};

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
        let mut printed = Ok(());
        // The lines are the progress; a bar stands in for them where standard output belongs to the JSON.
        let progress = Progress::new();
        let mut done = 0;
        let rows = kvpack::validate::run(&gpu, &filter, &mut |row| {
            done += 1;
            if !lines {
                progress.show(done, done, &format!("{} {}", row.kernel, row.format));
                return;
            }
            if done == 1 {
                printed = print(&table::validate_head());
            }
            if printed.is_ok() {
                printed = print(&table::validate_line(row));
            }
        });
        progress.finish();
        let rows = rows?;
        let idle = without_a_check(&filter, &rows);
        // Before anything is written: there is nothing to report.
        if rows.is_empty() {
            return Err(nothing(&filter));
        }
        if lines && printed.is_ok() {
            printed = print(&table::validate_summary(&rows));
        }
        for kernel in idle {
            tell(&format!(
                "no check of {kernel} fits these pairs: it was not validated"
            ));
        }
        // Rows that did not pass are written like all others: they are what one looks for.
        let written = outputs.write("--json", || json::to_bytes(&rows));
        judge(&rows)?;
        printed.and(written)
    }
}

/// The kernels that were named and have no row.
fn without_a_check<'a>(filter: &'a ValidateFilter, rows: &[ValidateRow]) -> Vec<&'a str> {
    let idle = |kernel: &&str| rows.iter().all(|row| row.kernel != *kernel);
    filter.kernels.iter().map(String::as_str).filter(idle).collect()
}

fn nothing(filter: &ValidateFilter) -> Failure {
    let pairs: Vec<_> = filter.pairs.iter().map(Pair::to_string).collect();
    let asked = format!(
        "--kernel {} with --pairs {}",
        filter.kernels.join(" --kernel "),
        pairs.join(",")
    );
    usage(
        asked,
        "no check fits, so there is nothing to validate",
        "quantize_group takes per-channel formats such as int4c, quantize takes the others; or leave --pairs out",
    )
}

/// Any row that did not pass is a failure of the whole.
fn judge(rows: &[ValidateRow]) -> Result<(), Failure> {
    let failed = rows.iter().filter(|row| !row.passed).count();
    if failed > 0 {
        return Err(Failure::Checks(format!(
            "{failed} of {} checks failed",
            rows.len()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(kernel: &str, passed: bool) -> ValidateRow {
        ValidateRow {
            kernel: kernel.to_owned(),
            format: "-".to_owned(),
            cases: 1,
            bit_mismatches: u64::from(!passed),
            worst_share_of_bound: None,
            max_error: None,
            bound: None,
            milliseconds: 1.0,
            passed,
            detail: String::new(),
            adapter: String::new(),
        }
    }

    #[test]
    fn one_failed_check_fails_the_whole() {
        judge(&[row("amax", true), row("norm", true)]).unwrap();
        let failure = judge(&[row("amax", true), row("norm", false)]).unwrap_err();
        assert!(matches!(&failure, Failure::Checks(message) if message == "1 of 2 checks failed"));
    }

    #[test]
    fn kernels_that_were_named_and_not_checked_are_found() {
        let filter = ValidateFilter {
            kernels: vec!["amax".to_owned(), "quantize_group".to_owned()],
            pairs: vec!["f16".parse().unwrap()],
        };
        assert_eq!(without_a_check(&filter, &[row("amax", true)]), ["quantize_group"]);
        let message = nothing(&filter).to_string();
        assert!(
            message.contains("--kernel amax --kernel quantize_group with --pairs f16"),
            "{message}"
        );
    }
}
