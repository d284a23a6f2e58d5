//! The read roof: the most bytes a second that simple kernels read from memory on this device, in this run.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::timer::{Clock, Samples, Timer};
use crate::error::Result;
use crate::gpu::{Access, Gpu, Kernel, binding};
use crate::kernels::Listed;
use crate::shader::Composer;
use crate::validate::Random;

macro_rules! listed {
    ($name:literal, $wgsl:expr) => {
        Listed {
            name: $name,
            wgsl: $wgsl,
            bindings: &[
                binding("params", Access::Uniform),
                binding("source", Access::Read),
                binding("sums", Access::Write),
            ],
        }
    };
}

/// One vector an invocation and iteration, all side by side.
pub const READ_STRIDE: Listed = listed!(
    "read_stride",
    include_str!("../../shaders/bench/read_stride.wgsl")
);
/// Four independent loads an iteration.
pub const READ_FOUR: Listed = listed!("read_four", include_str!("../../shaders/bench/read_four.wgsl"));
/// A contiguous block a workgroup.
pub const READ_BLOCK: Listed = listed!("read_block", include_str!("../../shaders/bench/read_block.wgsl"));

/// All of them.
pub const ALL: [Listed; 3] = [READ_STRIDE, READ_FOUR, READ_BLOCK];

/// The kernels that are tried: each with so many invocations a workgroup.
pub(crate) const TRIED: [(Listed, u32); 4] = [
    (READ_STRIDE, 64),
    (READ_STRIDE, 256),
    (READ_FOUR, 256),
    (READ_BLOCK, 256),
];

/// The uniform.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    /// Vectors of 16 bytes to read.
    pub vectors: u32,
}

/// Vectors of one invocation, about: 1 KiB, beside which the 4 bytes that it writes do not count.
pub(crate) const VECTORS: u64 = 64;
/// The most workgroups of a dispatch.
const MOST_GROUPS: u64 = 65_535;
/// The most bytes of one buffer.
const BUFFER_BYTES: u64 = 1 << 28;

/// The composed kernels with their workgroup sizes: what the shader tests compile.
pub fn catalogue() -> Vec<(String, Composer)> {
    let name = |kernel: &Listed, size| format!("{}_{size}", kernel.name);
    TRIED
        .iter()
        .map(|(kernel, size)| (name(kernel, *size), composer(kernel, *size)))
        .collect()
}

pub(crate) fn composer(kernel: &Listed, size: u32) -> Composer {
    let mut composer = Composer::new(kernel.name, kernel.wgsl);
    composer.set("WG_SIZE", size);
    composer
}

/// What one kernel read.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct RoofRow {
    /// The kernel and its invocations a workgroup.
    pub kernel: String,
    /// Bytes read in one pass over all buffers.
    pub bytes: u64,
    /// Whether they are fewer than 4 times the assumed cache, so that some may have come from it.
    pub cache_resident: bool,
    /// Seconds of a pass: lower quartile, median, upper quartile.
    pub seconds: [f64; 3],
    /// 10^9 bytes a second, by the median.
    pub gb_per_s: f64,
    /// What it was timed with.
    pub clock: Clock,
    /// Seconds of every pass.
    pub samples: Vec<f64>,
}

impl RoofRow {
    fn new(kernel: String, bytes: u64, cache_resident: bool, samples: Samples) -> RoofRow {
        let seconds = samples.quartiles();
        RoofRow {
            kernel,
            bytes,
            cache_resident,
            seconds,
            gb_per_s: bytes as f64 / seconds[1] / 1e9,
            clock: samples.clock,
            samples: samples.seconds,
        }
    }

    /// The fastest that counts as seen: by the lower quartile of its times, in 10^9 bytes a second.
    pub fn highest_gb_per_s(&self) -> f64 {
        self.bytes as f64 / self.seconds[0] / 1e9
    }
}

/// The buffers that the kernels read.
#[derive(Debug)]
pub struct Roof {
    gpu: Gpu,
    buffers: Vec<wgpu::Buffer>,
    sums: wgpu::Buffer,
}

impl Roof {
    /// Buffers of `bytes` in all, filled with random words.
    ///
    /// # Errors
    /// [`crate::Error::Device`] where memory runs out.
    pub fn new(gpu: &Gpu, bytes: u64) -> Result<Roof> {
        let limits = gpu.device().limits();
        let most = limits
            .max_storage_buffer_binding_size
            .min(limits.max_buffer_size)
            .min(BUFFER_BYTES)
            / 256
            * 256;
        let mut random = Random::new(bytes);
        let chunk: Vec<u64> = (0..1 << 17).map(|_| random.bits()).collect();
        let chunk = gpu.upload("random words", &chunk)?;
        let mut buffers = Vec::new();
        let mut left = bytes.next_multiple_of(256).max(256);
        while left > 0 {
            let size = left.min(most);
            let buffer = gpu.zeros("words to read", size)?;
            gpu.submit("filling a buffer", |encoder| {
                for at in (0..size).step_by(chunk.size() as usize) {
                    encoder.copy_buffer_to_buffer(&chunk, 0, &buffer, at, chunk.size().min(size - at));
                }
                Ok(())
            })?;
            buffers.push(buffer);
            left -= size;
        }
        let invocations = TRIED.iter().map(|&(_, size)| {
            let groups = buffers.iter().map(|buffer| groups(buffer, size)).max();
            u64::from(groups.unwrap_or(0)) * u64::from(size)
        });
        let sums = gpu.zeros("sums", invocations.max().unwrap_or(0) * 4)?;
        Ok(Roof {
            gpu: gpu.clone(),
            buffers,
            sums,
        })
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> u64 {
        self.buffers.iter().map(wgpu::Buffer::size).sum()
    }

    /// The sum of all words by each kernel, wrapping: what a test compares.
    ///
    /// # Errors
    /// [`crate::Error::Shader`], [`crate::Error::Device`].
    pub fn sums(&self) -> Result<Vec<u32>> {
        let mut all = Vec::new();
        for (listed, size) in &TRIED {
            let kernel = self.kernel(listed, *size)?;
            let mut sum = 0_u32;
            for buffer in &self.buffers {
                self.gpu.submit("a read kernel", |encoder| {
                    encoder.clear_buffer(&self.sums, 0, None);
                    self.record(encoder, &kernel, buffer, *size);
                    Ok(())
                })?;
                let words = self
                    .gpu
                    .read::<u32>("sums", &self.sums, (self.sums.size() / 4) as usize)?;
                sum = words.into_iter().fold(sum, u32::wrapping_add);
            }
            all.push(sum);
        }
        Ok(all)
    }

    /// The words of all buffers.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    pub fn words(&self) -> Result<Vec<u32>> {
        let ranges: Vec<_> = self.buffers.iter().map(|b| (b, 0..b.size())).collect();
        self.gpu.block_on(self.gpu.read_back("words", &ranges)?)
    }

    fn kernel(&self, listed: &Listed, size: u32) -> Result<Arc<Kernel>> {
        self.gpu
            .kernel(listed.name, listed.bindings, &composer(listed, size))
    }

    fn record(&self, encoder: &mut wgpu::CommandEncoder, kernel: &Kernel, buffer: &wgpu::Buffer, size: u32) {
        let params = self.gpu.uniform(&Params {
            vectors: (buffer.size() / 16) as u32,
        });
        let mut pass = encoder.begin_compute_pass(&Default::default());
        let buffers = [&params, buffer, &self.sums];
        kernel.encode(&self.gpu, &mut pass, &buffers, [groups(buffer, size), 1, 1]);
    }

    /// Times every kernel, each for about `seconds`. `cache_bytes` is the assumed size of the last cache.
    ///
    /// # Errors
    /// [`crate::Error::Shader`], [`crate::Error::Device`].
    pub fn measure(
        &self,
        timer: &Timer,
        cache_bytes: u64,
        seconds: f64,
        tick: &mut dyn FnMut(&str),
    ) -> Result<Vec<RoofRow>> {
        let mut rows = Vec::new();
        for (listed, size) in &TRIED {
            let kernel = self.kernel(listed, *size)?;
            let samples = timer.sample(seconds, &mut |encoder| {
                for buffer in &self.buffers {
                    self.record(encoder, &kernel, buffer, *size);
                }
                Ok(())
            })?;
            let name = format!("{}, {size} invocations", listed.name);
            tick(&name);
            let resident = self.bytes() < super::out_of_cache(cache_bytes);
            rows.push(RoofRow::new(name, self.bytes(), resident, samples));
        }
        Ok(rows)
    }
}

/// Workgroups that read a buffer.
fn groups(buffer: &wgpu::Buffer, size: u32) -> u32 {
    let vectors = buffer.size() / 16;
    vectors.div_ceil(VECTORS * u64::from(size)).clamp(1, MOST_GROUPS) as u32
}
