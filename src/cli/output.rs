//! Printing that outlives a closed pipe, progress, and the files of a report.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};
use kvpack::report::output::Destination;

use super::{Failure, usage};

/// A line on standard error. Nobody reading it is no reason to stop.
pub fn tell(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Text on standard output. A reader that has gone (`| head`) has what it wanted.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    written(
        "standard output",
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()),
    )
}

fn written(to: &str, outcome: io::Result<()>) -> Result<(), Failure> {
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|error| Failure::Write {
            to: to.to_owned(),
            error,
        }),
    }
}

/// The files that one run is to write, checked before its work.
pub struct Outputs(Vec<(&'static str, Destination)>);

impl Outputs {
    /// From the options that were given. No two may go to one place, and none to the file that standard output goes to.
    pub fn check(options: &[(&'static str, Option<&str>)]) -> Result<Outputs, Failure> {
        let advice = "give each its own file; at most one may be - for standard output";
        let mut chosen: Vec<(&'static str, &str, Destination)> = Vec::new();
        for &(option, text) in options {
            let Some(text) = text else { continue };
            let destination = Destination::parse(text);
            if let Some((other, its_text, _)) = chosen.iter().find(|(.., taken)| taken.is_same(&destination))
            {
                return Err(usage(
                    format!("{other} {its_text} and {option} {text}"),
                    "two reports cannot go to one place",
                    advice,
                ));
            }
            if destination != Destination::Stdout && destination.is_same(&Destination::Stdout) {
                let reason = "standard output goes to the same file";
                return Err(usage(format!("{option} {text}"), reason, advice));
            }
            destination.check()?;
            chosen.push((option, text, destination));
        }
        let chosen = chosen
            .into_iter()
            .map(|(option, _, destination)| (option, destination));
        Ok(Outputs(chosen.collect()))
    }

    /// Refuses a report in the place of a file that the run reads, or in a folder whose content is its own affair.
    pub fn keep(
        &self,
        inputs: &[(&'static str, Option<&Path>)],
        folders: &[(&'static str, Option<&Path>)],
    ) -> Result<(), Failure> {
        for (option, destination) in &self.0 {
            let Destination::File(path) = destination else {
                continue;
            };
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            let parent = fs::canonicalize(parent.unwrap_or(Path::new("."))).unwrap_or_default();
            let is = |given: &Path| destination.is_same(&Destination::File(given.to_path_buf()));
            let within = |given: &Path| {
                fs::canonicalize(given).is_ok_and(|given| given.is_dir() && parent.starts_with(&given))
            };
            let same = inputs
                .iter()
                .map(|(input, given)| (input, given.filter(|given| is(given))));
            let inside = folders
                .iter()
                .map(|(input, given)| (input, given.filter(|given| is(given) || within(given))));
            for (input, given) in same.chain(inside) {
                let Some(given) = given else { continue };
                return Err(usage(
                    format!("{option} {} beside {input} {}", path.display(), given.display()),
                    "the report would take the place of what is read, or lie among it",
                    "name another file",
                ));
            }
        }
        Ok(())
    }

    /// Whether standard output belongs to one of them, so that nothing else may be printed there.
    pub fn take_stdout(&self) -> bool {
        self.0
            .iter()
            .any(|(_, destination)| *destination == Destination::Stdout)
    }

    /// Writes the report of an option, if it was asked for.
    pub fn write(&self, option: &str, report: impl FnOnce() -> io::Result<Vec<u8>>) -> Result<(), Failure> {
        let Some((_, destination)) = self.0.iter().find(|(name, _)| *name == option) else {
            return Ok(());
        };
        let to = match destination {
            Destination::Stdout => "standard output".to_owned(),
            Destination::File(path) => format!("`{}`", path.display()),
        };
        written(
            &to,
            report().and_then(|bytes| destination.write(&bytes, &mut io::stdout().lock())),
        )
    }
}

/// A bar on standard error; nothing where that is not a terminal.
pub struct Progress(ProgressBar);

impl Progress {
    /// An empty bar.
    pub fn new() -> Progress {
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {elapsed}") {
            bar.set_style(style);
        }
        Progress(bar)
    }

    /// How far the work is.
    pub fn show(&self, done: u64, of: u64, what: &str) {
        self.0.set_length(of);
        self.0.set_position(done);
        self.0.set_message(what.to_owned());
    }

    /// Takes the bar away.
    pub fn finish(self) {
        self.0.finish_and_clear();
    }
}
