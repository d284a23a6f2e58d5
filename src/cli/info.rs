//! `kvpack info`: the adapters.

use kvpack::report::{json, table};

use super::Failure;
use super::device::adapters;
use super::output::{Outputs, print, tell};

/// What was asked.
#[derive(clap::Args)]
pub struct Args {
    /// Write the adapters as JSON; - is standard output, in place of the table
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
}

impl Args {
    /// Lists them.
    pub fn run(self) -> Result<(), Failure> {
        let outputs = Outputs::check(&[("--json", self.json.as_deref())])?;
        let adapters = adapters();
        if adapters.is_empty() {
            tell("no GPU adapter was found: install a Vulkan driver, for example a software one");
        } else if !outputs.take_stdout() {
            print(&table::adapters(&adapters))?;
        }
        outputs.write("--json", || json::adapters(&adapters))
    }
}
