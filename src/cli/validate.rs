//! `kvpack validate`: every kernel against the CPU reference; another's shader, or the result of any program, against
//! golden vectors.

use std::path::{Path, PathBuf};

use kvpack::export::manifest::Manifest;
use kvpack::export::{self, cases};
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
    #[arg(long = "kernel", value_name = "KERNEL", value_parser = kernel, conflicts_with_all = ["wgsl", "vectors"])]
    kernels: Vec<String>,
    /// Only these cache formats, K/V or one name for both [default: all]
    #[arg(long, value_name = "PAIR", value_delimiter = ',', conflicts_with_all = ["wgsl", "vectors"])]
    pairs: Vec<Pair>,
    /// Your own shader, in the place of a module of --manifest
    #[arg(long, value_name = "FILE", requires = "manifest", conflicts_with = "vectors")]
    wgsl: Option<PathBuf>,
    /// manifest.json of an export, or its folder: bindings, uniform and dispatch of your shader
    #[arg(long, value_name = "FILE", requires = "wgsl")]
    manifest: Option<PathBuf>,
    /// The module whose place your shader takes [default: by its file's name or its entry point]
    #[arg(long, value_name = "MODULE", requires = "wgsl")]
    module: Option<String>,
    /// Golden vectors that --result is judged by: the folder of a case, or an export with --case; no adapter is asked
    #[arg(long, value_name = "DIR", requires = "result")]
    vectors: Option<PathBuf>,
    /// What any program made of a case's inputs, as .npy: attention output, LSE, rows read back
    #[arg(long, value_name = "FILE", requires = "vectors")]
    result: Option<PathBuf>,
    /// The case of an export
    #[arg(long, value_name = "CASE", requires = "vectors")]
    case: Option<String>,
    /// What the result is, for example output, lse, k_rows [default: the only one of its shape]
    #[arg(long, value_name = "NAME", requires = "vectors")]
    expect: Option<String>,
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
        let read = [
            ("--wgsl", self.wgsl.as_deref()),
            ("--result", self.result.as_deref()),
        ];
        let folders = [
            ("--manifest", self.manifest.as_deref()),
            ("--vectors", self.vectors.as_deref()),
        ];
        outputs.keep(&read, &folders)?;
        if let (Some(folder), Some(result)) = (&self.vectors, &self.result) {
            if let Some(given) = self.adapter.given() {
                let reason = "a result is judged without an adapter";
                return Err(usage(
                    format!("--vectors with {given}"),
                    reason,
                    "leave one of the two out",
                ));
            }
            return self.judge_result(&outputs, folder, result);
        }
        if let (Some(wgsl), Some(manifest)) = (&self.wgsl, &self.manifest) {
            return self.judge_shader(&outputs, wgsl, manifest);
        }
        let gpu = self.adapter.open()?;
        let filter = ValidateFilter {
            kernels: self.kernels,
            pairs: self.pairs,
        };
        let (rows, printed) = show(&outputs, |report| kvpack::validate::run(&gpu, &filter, report))?;
        let idle = without_a_check(&filter, &rows);
        // Before anything is written: there is nothing to report.
        if rows.is_empty() {
            return Err(nothing(&filter));
        }
        for kernel in idle {
            tell(&format!(
                "no check of {kernel} fits these pairs: it was not validated"
            ));
        }
        finish(&outputs, &rows, printed)
    }

    /// Runs another's shader through the cases of a module.
    fn judge_shader(&self, outputs: &Outputs, wgsl: &Path, manifest: &Path) -> Result<(), Failure> {
        let file = wgsl.display().to_string();
        let text = shader_text(wgsl)?;
        if !manifest.exists() {
            let asked = format!("--manifest {}", manifest.display());
            return Err(usage(
                asked,
                "there is no such file",
                "name the manifest.json of an export, or its folder",
            ));
        }
        let manifest = Manifest::read(manifest)?;
        // Compilers go down into expressions: a deep one takes a stack larger than a process has.
        let (rows, printed, place) = std::thread::scope(|scope| {
            let work = || {
                let candidate = export::candidate(&manifest, &file, &text, self.module.as_deref())?;
                let gpu = self.adapter.open()?;
                let place = candidate.entry.name.clone();
                if !outputs.take_stdout() {
                    print(&format!("{file} in the place of {place}\n"))?;
                }
                let (rows, printed) = show(outputs, |report| {
                    export::check(&gpu, &manifest, &candidate, report)
                })?;
                Ok::<_, Failure>((rows, printed, place))
            };
            let deep = std::thread::Builder::new().stack_size(STACK);
            let failed = |reason: &str| Failure::Checks(format!("{file} was not judged: {reason}"));
            let thread = deep.spawn_scoped(scope, work);
            let thread = thread.map_err(|error| failed(&error.to_string()))?;
            thread.join().map_err(|_| failed("the compiler gave up"))?
        })?;
        if rows.is_empty() {
            let message = format!("no case dispatches {place}: nothing was compared");
            return Err(Failure::Checks(message));
        }
        finish(outputs, &rows, printed)
    }

    /// Judges an array by golden vectors.
    fn judge_result(&self, outputs: &Outputs, folder: &Path, result: &Path) -> Result<(), Failure> {
        let case = match &self.case {
            Some(name) => {
                if folder.join("case.json").exists() {
                    let asked = format!("--vectors {} --case {name}", folder.display());
                    return Err(usage(asked, "the folder is that of one case", "leave --case out"));
                }
                let manifest = Manifest::read(folder)?;
                let entry = manifest.vectors.iter().find(|entry| entry.case == *name);
                let entry = entry.ok_or_else(|| {
                    let known: Vec<_> = manifest.vectors.iter().map(|entry| entry.case.as_str()).collect();
                    let advice = match known.is_empty() {
                        true => "export with --vectors".to_owned(),
                        false => format!("choose from {}", known.join(", ")),
                    };
                    usage(format!("--case {name}"), "the export has no such case", advice)
                })?;
                let folder = if folder.is_dir() {
                    folder
                } else {
                    folder.parent().unwrap_or(folder)
                };
                cases::read(&folder.join(&entry.folder))?
            }
            None => cases::read(folder)?,
        };
        let expect = match &self.expect {
            Some(name) => case.expectation(name)?,
            None => case.expectation_for(result)?,
        };
        let started = std::time::Instant::now();
        let verdict = case.judge_file(expect, result)?;
        let row = ValidateRow {
            kernel: expect.name.clone(),
            format: case.pair.clone().unwrap_or_else(|| "-".to_owned()),
            cases: verdict.cases,
            bit_mismatches: verdict.bit_mismatches,
            worst_share_of_bound: verdict.sums.map(|sums| sums.share()),
            max_error: verdict.sums.map(|sums| sums.max_error),
            bound: verdict.sums.map(|sums| sums.bound),
            milliseconds: started.elapsed().as_secs_f64() * 1e3,
            passed: verdict.passed(),
            detail: verdict.first,
            adapter: "none: a file was judged".to_owned(),
        };
        if !outputs.take_stdout() {
            print(&format!(
                "{} as {} of {}\n",
                result.display(),
                expect.name,
                case.case
            ))?;
        }
        let (rows, printed) = show(outputs, |report| {
            report(&row);
            Ok(vec![row.clone()])
        })?;
        finish(outputs, &rows, printed)
    }
}

/// The longest shader that is read: exported ones have some tens of KiB.
const MOST_TEXT: u64 = 512 << 10;
/// What the deepest expression of such a text may take.
const STACK: usize = 1 << 30;

fn shader_text(path: &Path) -> Result<String, Failure> {
    let refuse = |reason: String| {
        let asked = format!("--wgsl {}", path.display());
        usage(asked, reason, "name a file of WGSL text")
    };
    let failed = |error: std::io::Error| refuse(format!("it cannot be read: {error}"));
    let found = std::fs::metadata(path).map_err(failed)?;
    if !found.is_file() {
        return Err(refuse("it is no regular file".to_owned()));
    }
    if found.len() > MOST_TEXT {
        return Err(refuse(format!(
            "it has {} bytes; at most {MOST_TEXT} are read",
            found.len()
        )));
    }
    std::fs::read_to_string(path).map_err(failed)
}

/// Prints rows as `work` reports them; a bar stands in for them where standard output belongs to the JSON.
fn show(
    outputs: &Outputs,
    work: impl FnOnce(&mut dyn FnMut(&ValidateRow)) -> kvpack::Result<Vec<ValidateRow>>,
) -> Result<(Vec<ValidateRow>, Result<(), Failure>), Failure> {
    let lines = !outputs.take_stdout();
    let mut printed = Ok(());
    let progress = Progress::new();
    let mut done = 0;
    let rows = work(&mut |row| {
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
    if lines && printed.is_ok() && !rows.is_empty() {
        printed = print(&table::validate_summary(&rows));
    }
    Ok((rows, printed))
}

/// Writes what was asked for and judges. Rows that did not pass are written like all others: they are what one looks for.
fn finish(outputs: &Outputs, rows: &[ValidateRow], printed: Result<(), Failure>) -> Result<(), Failure> {
    let written = outputs.write("--json", || json::to_bytes(&rows));
    judge(rows)?;
    printed.and(written)
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
