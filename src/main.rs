//! The `kvpack` command.
#![deny(missing_docs, unsafe_code)]

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
