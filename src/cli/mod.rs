//! The command: arguments in, the library's answers out. One file per subcommand.

mod analyze;
mod bench;
mod device;
mod drift;
mod generate;
mod info;
mod input;
mod model;
mod output;
mod plan;
mod report;
mod shaders;
mod tune;
mod validate;

use std::fmt;
use std::io;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use kvpack::Error;

#[derive(Parser)]
#[command(name = "kvpack", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure what each cache format costs in the logits of a live transformer, and what it saves
    Drift(drift::Args),
    /// Write text with a trained model whose KV cache has the format that you name
    Generate(generate::Args),
    /// Measure what each cache format costs in the numbers of K and V tensors from a file; no model and no GPU is needed
    Analyze(analyze::Args),
    /// Time decode, append and prefill with each cache format, beside f16 and what plain reads reach
    Bench(bench::Args),
    /// List the GPU adapters with their drivers, limits and features
    Info(info::Args),
    /// Compute what the KV cache of a model takes in memory by format, and what fits a budget; no GPU is asked
    Plan(plan::Args),
    /// Record a run of a live transformer, every number of its cache, as a page to watch and to share
    Report(report::Args),
    /// List the kernels, or write them for another engine: WGSL, SPIR-V, MSL, HLSL or GLSL with a manifest
    Shaders(shaders::Args),
    /// Find the fastest variant of the attention kernel for a shape on an adapter, and keep it for later runs
    Tune(tune::Args),
    /// Run every kernel on an adapter against the CPU reference
    Validate(validate::Args),
}

/// Why the command ends without success.
#[derive(Debug)]
enum Failure {
    /// The arguments cannot be followed: exit code 2.
    Usage(Error),
    /// The work failed: exit code 1.
    Work(Error),
    /// A finished report could not be written: exit code 1.
    Write { to: String, error: io::Error },
    /// Checks ran and did not pass: exit code 1.
    Checks(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        match error {
            Error::Usage { .. } | Error::UnknownFormat { .. } | Error::Shape { .. } => Failure::Usage(error),
            _ => Failure::Work(error),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Usage(error) | Failure::Work(error) => error.fmt(f),
            Failure::Write { to, error } => write!(f, "{to} could not be written: {error}"),
            Failure::Checks(message) => f.write_str(message),
        }
    }
}

/// Runs the command that the arguments name.
pub fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Drift(args) => args.run(),
        Command::Generate(args) => args.run(),
        Command::Analyze(args) => args.run(),
        Command::Bench(args) => args.run(),
        Command::Info(args) => args.run(),
        Command::Plan(args) => args.run(),
        Command::Report(args) => args.run(),
        Command::Shaders(args) => args.run(),
        Command::Tune(args) => args.run(),
        Command::Validate(args) => args.run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            output::tell(&format!("error: {failure}"));
            ExitCode::from(if matches!(failure, Failure::Usage(_)) {
                2
            } else {
                1
            })
        }
    }
}

fn usage(asked: impl Into<String>, reason: impl Into<String>, advice: impl Into<String>) -> Failure {
    Failure::Usage(Error::Usage {
        asked: asked.into(),
        reason: reason.into(),
        advice: advice.into(),
    })
}
