//! Which device: the options that several subcommands share, and what they mean.

use clap::{Args, ValueEnum};
use kvpack::Error;
use kvpack::drift::{Device, MAX_WINDOW};
use kvpack::gpu::{self, AdapterSummary, Backend, Gpu, Selection};

use super::{Failure, usage};

/// Where the work runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// A GPU adapter, a software driver too if there is no other
    Gpu,
    /// The reference on the CPU, in f64
    Cpu,
    /// The GPU if there is an adapter, else the CPU reference
    Auto,
}

/// Which adapter.
#[derive(Debug, Clone, Args)]
pub struct AdapterArgs {
    /// Adapter by its name or a part of it, as `kvpack info` lists them [default: a real GPU before a software driver]
    #[arg(long, value_name = "NAME", value_parser = adapter_name)]
    adapter: Option<String>,
    /// Graphics interface: vulkan, metal or dx12 [default: any]
    #[arg(long, value_name = "BACKEND")]
    backend: Option<Backend>,
    /// Run attention as it would without `kvpack tune`
    #[arg(long)]
    no_tuning: bool,
}

impl AdapterArgs {
    /// Opens the adapter that was asked for, or the best there is.
    pub fn open(&self) -> Result<Gpu, Failure> {
        let selection = Selection {
            adapter: self.adapter.clone(),
            backend: self.backend,
        };
        let gpu = Gpu::open(&selection)?;
        Ok(if self.no_tuning { gpu } else { gpu.tuned()? })
    }

    pub fn given(&self) -> Option<String> {
        let adapter = self.adapter.as_ref().map(|name| format!("--adapter {name}"));
        adapter.or_else(|| self.backend.map(|backend| format!("--backend {backend}")))
    }

    /// The device of the kind, and a remark where it is not what one would expect.
    pub fn device(&self, kind: Kind) -> Result<(Device, Option<String>), Failure> {
        match (kind, self.given()) {
            (Kind::Cpu, None) => Ok((Device::Cpu, None)),
            (Kind::Cpu, Some(given)) => {
                let reason = "the CPU reference uses no adapter";
                Err(usage(
                    format!("--device cpu with {given}"),
                    reason,
                    "leave one of the two out",
                ))
            }
            (Kind::Auto, None) if adapters().is_empty() => {
                let remark =
                    "no GPU adapter was found: running the CPU reference (--device gpu makes this an error)";
                Ok((Device::Cpu, Some(remark.to_owned())))
            }
            _ => Ok((Device::Gpu(self.open()?), None)),
        }
    }
}

/// All adapters of all backends.
pub fn adapters() -> Vec<AdapterSummary> {
    gpu::adapters(None)
}

/// Whether a device is a software driver.
pub fn is_software(device: &Device) -> bool {
    matches!(device, Device::Gpu(gpu) if gpu.summary().software)
}

/// A strictly positive finite number.
pub fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err("must be a finite number above 0".to_owned()),
    }
}

/// A recent window.
pub fn window(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(tokens) if tokens <= MAX_WINDOW => Ok(tokens),
        _ => Err(format!("must be a whole number of tokens from 0 to {MAX_WINDOW}")),
    }
}

/// A part of an adapter's name; the empty text is a part of every name and means none.
fn adapter_name(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        return Err("the name is empty; `kvpack info` lists the adapters".to_owned());
    }
    Ok(text.to_owned())
}

/// The name of a kernel that can be validated.
pub fn kernel(text: &str) -> kvpack::Result<String> {
    kernel_of(&kvpack::validate::kernel_names(), text)
}

/// One of these names of kernels.
pub fn kernel_of(known: &[&str], text: &str) -> kvpack::Result<String> {
    if known.contains(&text) {
        return Ok(text.to_owned());
    }
    Err(Error::Usage {
        asked: format!("kernel `{text}`"),
        reason: "there is no such kernel".to_owned(),
        advice: format!("choose of {}", known.join(", ")),
    })
}
