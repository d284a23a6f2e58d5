//! Adapters, the device, kernels as pipelines, buffers and read-back.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use bytemuck::Pod;

use crate::error::{Error, Result};
use crate::shader::{Composer, Target};
use crate::tuning::Tuning;

/// A graphics interface that the crate is built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// Vulkan.
    Vulkan,
    /// Metal, on Apple systems.
    Metal,
    /// Direct3D 12, on Windows.
    Dx12,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backend::Vulkan => "vulkan",
            Backend::Metal => "metal",
            Backend::Dx12 => "dx12",
        })
    }
}

impl FromStr for Backend {
    type Err = Error;

    fn from_str(text: &str) -> Result<Backend> {
        [Backend::Vulkan, Backend::Metal, Backend::Dx12]
            .into_iter()
            .find(|b| b.to_string() == text)
            .ok_or_else(|| Error::Usage {
                asked: format!("backend `{text}`"),
                reason: "there is no such backend".to_owned(),
                advice: "choose one of vulkan, metal, dx12".to_owned(),
            })
    }
}

/// What is known of an adapter before a device is opened on it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct AdapterSummary {
    /// Place in the list of adapters.
    pub index: usize,
    /// The name that the driver gives.
    pub name: String,
    /// The name by which it can be chosen: with ` #2` and so on where names repeat.
    pub label: String,
    /// `DiscreteGpu`, `IntegratedGpu`, `VirtualGpu`, `Cpu` or `Other`.
    pub device_type: String,
    /// Runs on the CPU: not a GPU.
    pub software: bool,
    /// The graphics interface.
    pub backend: String,
    /// The driver's name.
    pub driver: String,
    /// The driver's version.
    pub driver_info: String,
    /// Limits that matter to kernels, by their WebGPU names.
    pub limits: Vec<(String, u64)>,
    /// Features that matter to kernels.
    pub features: Vec<String>,
}

impl AdapterSummary {
    /// What measurements are kept by.
    #[cfg(feature = "tuning")]
    pub fn on(&self) -> crate::tuning::On {
        crate::tuning::On {
            adapter: self.name.clone(),
            backend: self.backend.clone(),
            driver: format!("{} {}", self.driver, self.driver_info).trim().to_owned(),
        }
    }

    /// Name and driver, for report headers.
    pub fn title(&self) -> String {
        let kind = if self.software { ", software" } else { "" };
        let driver = format!("{} {}", self.driver, self.driver_info);
        format!("{} ({}{kind}, {})", self.label, self.backend, driver.trim())
    }
}

/// Which adapter to open.
#[derive(Debug, Clone, Default)]
pub struct Selection {
    /// A label, or a part of exactly one label (letter case does not matter). None: the best, a GPU before software.
    pub adapter: Option<String>,
    /// Only adapters of this interface.
    pub backend: Option<Backend>,
}

/// What helps where no adapter is found.
const NO_ADAPTER: &str = "install a driver: on Debian or Ubuntu `apt-get install -y --no-install-recommends \
                          mesa-vulkan-drivers` brings a software one; or use the CPU reference (--device cpu)";

/// The features that timing by the device takes. [`Gpu::open`] asks for them where the adapter has both; nothing but
/// timing needs them.
pub const TIMESTAMPS: wgpu::Features =
    wgpu::Features::TIMESTAMP_QUERY.union(wgpu::Features::TIMESTAMP_QUERY_INSIDE_ENCODERS);

/// Features that only some variants of the attention kernel take ([`crate::variant`]). [`Gpu::open`] asks for those that
/// the adapter has.
pub const VARIANTS: wgpu::Features = wgpu::Features::SHADER_F16.union(wgpu::Features::SUBGROUP);

/// The largest number of workgroups of one dispatch dimension in WebGPU.
const MAX_GROUPS: u32 = 65_535;

/// How a kernel uses a binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// A uniform buffer.
    Uniform,
    /// A storage buffer that is only read.
    Read,
    /// A storage buffer that is written.
    Write,
}

/// One binding of group 0; its number is its place in the kernel's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binding {
    /// The variable's name in WGSL.
    pub name: &'static str,
    /// How it is used.
    pub access: Access,
}

/// Shorthand for lists of bindings.
pub(crate) const fn binding(name: &'static str, access: Access) -> Binding {
    Binding { name, access }
}

/// A compiled kernel.
#[derive(Debug)]
pub struct Kernel {
    name: &'static str,
    pipeline: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
}

/// A device with its kernels. Clones share both.
#[derive(Debug, Clone)]
pub struct Gpu {
    shared: Arc<Shared>,
    tuning: Arc<Tuning>,
}

#[derive(Debug)]
struct Shared {
    device: wgpu::Device,
    queue: wgpu::Queue,
    summary: AdapterSummary,
    kernels: Mutex<HashMap<String, Arc<Kernel>>>,
}

/// The adapters of this machine, GPUs first.
pub fn adapters(backend: Option<Backend>) -> Vec<AdapterSummary> {
    list(backend).into_iter().map(|(_, summary)| summary).collect()
}

fn list(backend: Option<Backend>) -> Vec<(wgpu::Adapter, AdapterSummary)> {
    let backends = match backend {
        None => wgpu::Backends::PRIMARY,
        Some(Backend::Vulkan) => wgpu::Backends::VULKAN,
        Some(Backend::Metal) => wgpu::Backends::METAL,
        Some(Backend::Dx12) => wgpu::Backends::DX12,
    };
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = backends;
    let instance = wgpu::Instance::new(descriptor);
    let mut adapters = now(instance.enumerate_adapters(backends)).unwrap_or_default();
    let rank = |adapter: &wgpu::Adapter| match adapter.get_info().device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    };
    adapters.sort_by_key(rank);
    let mut seen: HashMap<String, usize> = HashMap::new();
    adapters
        .into_iter()
        .enumerate()
        .map(|(index, adapter)| {
            let times = seen.entry(adapter.get_info().name).or_default();
            *times += 1;
            let summary = summarise(
                index,
                *times,
                &adapter.get_info(),
                &adapter.limits(),
                adapter.features(),
            );
            (adapter, summary)
        })
        .collect()
}

fn summarise(
    index: usize,
    times: usize,
    info: &wgpu::AdapterInfo,
    limits: &wgpu::Limits,
    features: wgpu::Features,
) -> AdapterSummary {
    let named = [
        ("shader-f16", wgpu::Features::SHADER_F16),
        ("subgroups", wgpu::Features::SUBGROUP),
        ("timestamp-query", wgpu::Features::TIMESTAMP_QUERY),
    ];
    AdapterSummary {
        index,
        label: if times == 1 {
            info.name.clone()
        } else {
            format!("{} #{times}", info.name)
        },
        name: info.name.clone(),
        device_type: format!("{:?}", info.device_type),
        software: info.device_type == wgpu::DeviceType::Cpu,
        backend: format!("{:?}", info.backend).to_lowercase(),
        driver: info.driver.clone(),
        driver_info: info.driver_info.clone(),
        limits: [
            ("maxBufferSize", limits.max_buffer_size),
            (
                "maxStorageBufferBindingSize",
                limits.max_storage_buffer_binding_size,
            ),
            (
                "maxStorageBuffersPerShaderStage",
                u64::from(limits.max_storage_buffers_per_shader_stage),
            ),
            (
                "minStorageBufferOffsetAlignment",
                u64::from(limits.min_storage_buffer_offset_alignment),
            ),
            (
                "maxComputeWorkgroupStorageSize",
                u64::from(limits.max_compute_workgroup_storage_size),
            ),
            (
                "maxComputeInvocationsPerWorkgroup",
                u64::from(limits.max_compute_invocations_per_workgroup),
            ),
            (
                "maxComputeWorkgroupsPerDimension",
                u64::from(limits.max_compute_workgroups_per_dimension),
            ),
            ("minSubgroupSize", u64::from(info.subgroup_min_size)),
            ("maxSubgroupSize", u64::from(info.subgroup_max_size)),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into(),
        features: named
            .iter()
            .filter(|(_, f)| features.contains(*f))
            .map(|(name, _)| (*name).to_owned())
            .collect(),
    }
}

/// The value of a future that native back ends have ready at once.
fn now<T>(future: impl Future<Output = T>) -> Option<T> {
    match std::pin::pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

/// Picks one of the labels: the exact one, else the only one that contains the text.
fn choose(wanted: &str, labels: &[String]) -> std::result::Result<usize, String> {
    if let Some(exact) = labels.iter().position(|label| label == wanted) {
        return Ok(exact);
    }
    let part = wanted.to_lowercase();
    let hits: Vec<_> = (0..labels.len())
        .filter(|&i| labels[i].to_lowercase().contains(&part))
        .collect();
    match hits[..] {
        [only] => Ok(only),
        [] => Err(format!(
            "none is called `{wanted}`; there are: {}",
            labels.join(", ")
        )),
        _ => Err(format!(
            "`{wanted}` fits several: {}",
            hits.iter()
                .map(|&i| labels[i].as_str())
                .collect::<Vec<_>>()
                .join(", ")
        )),
    }
}

impl Gpu {
    /// Opens a device: the chosen adapter, or the best one (a GPU before a software driver), with its own limits for
    /// buffers and WebGPU's defaults for the rest.
    ///
    /// # Errors
    /// [`Error::Usage`] where no adapter has the name, or several have it; [`Error::NoAdapter`] where there is none;
    /// [`Error::Device`] where the driver refuses.
    pub fn open(selection: &Selection) -> Result<Gpu> {
        let mut adapters = list(selection.backend);
        if adapters.is_empty() {
            let backend = selection
                .backend
                .map_or("vulkan, metal or dx12".to_owned(), |b| b.to_string());
            let other = selection.backend.is_some_and(|b| b != Backend::Vulkan);
            let advice = if other {
                "leave --backend out: this system may have another interface"
            } else {
                NO_ADAPTER
            };
            return Err(Error::NoAdapter {
                reason: format!("no {backend} driver offers one"),
                advice: advice.to_owned(),
            });
        }
        let labels: Vec<String> = adapters
            .iter()
            .map(|(_, summary)| summary.label.clone())
            .collect();
        let chosen = match &selection.adapter {
            None => 0,
            Some(name) => choose(name, &labels).map_err(|reason| Error::Usage {
                asked: format!("adapter `{name}`"),
                reason,
                advice: "`kvpack info` lists them".to_owned(),
            })?,
        };
        let (adapter, summary) = adapters.swap_remove(chosen);
        let allowed = adapter.limits();
        let required_limits = wgpu::Limits {
            max_buffer_size: allowed.max_buffer_size,
            max_storage_buffer_binding_size: allowed.max_storage_buffer_binding_size,
            ..wgpu::Limits::default()
        };
        let mut required_features = adapter.features() & VARIANTS;
        if adapter.features().contains(TIMESTAMPS) {
            required_features |= TIMESTAMPS;
        }
        let request = adapter.request_device(&wgpu::DeviceDescriptor {
            label: Some("kvpack"),
            required_features,
            required_limits,
            ..Default::default()
        });
        let during = || format!("opening {}", summary.label);
        let (device, queue) = now(request)
            .ok_or_else(|| Error::Device {
                during: during(),
                message: "the driver did not answer".to_owned(),
            })?
            .map_err(|e| Error::Device {
                during: during(),
                message: e.to_string(),
            })?;
        Ok(Gpu::new(device, queue, summary))
    }

    /// Uses a device and queue that the caller owns, made with what [`CacheSpec::requirements`] asks for where a cache is to
    /// live on it. Both are handles: clone what you go on using. Buffers of another device are errors of wgpu at submission.
    ///
    /// [`CacheSpec::requirements`]: crate::cache::CacheSpec::requirements
    pub fn from_device(device: wgpu::Device, queue: wgpu::Queue) -> Gpu {
        let summary = summarise(0, 1, &device.adapter_info(), &device.limits(), device.features());
        Gpu::new(device, queue, summary)
    }

    fn new(device: wgpu::Device, queue: wgpu::Queue, summary: AdapterSummary) -> Gpu {
        Gpu {
            shared: Arc::new(Shared {
                device,
                queue,
                summary,
                kernels: Mutex::default(),
            }),
            tuning: Arc::default(),
        }
    }

    /// The same device, whose caches run attention by these variants. Those that need a feature that the device was made
    /// without, and shapes that have none, run by [`Variant::new`](crate::variant::Variant::new).
    pub fn with_tuning(self, tuning: Tuning) -> Gpu {
        let tuning = Arc::new(tuning);
        Gpu { tuning, ..self }
    }

    /// The same device with what the user's file says of its adapter and driver ([`crate::tuning::user_file`]).
    ///
    /// # Errors
    /// Those of [`TuningFile::read`](crate::tuning::TuningFile::read).
    #[cfg(feature = "tuning")]
    pub fn tuned(self) -> Result<Gpu> {
        let Some(path) = crate::tuning::user_file() else {
            return Ok(self);
        };
        let tuning = crate::tuning::TuningFile::read(&path)?.tuning(&self.summary().on())?;
        Ok(self.with_tuning(tuning))
    }

    /// The variants that were measured.
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// The adapter.
    pub fn summary(&self) -> &AdapterSummary {
        &self.shared.summary
    }

    /// The device.
    pub fn device(&self) -> &wgpu::Device {
        &self.shared.device
    }

    /// The queue.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.shared.queue
    }

    /// Compiles a kernel, or returns it from an earlier call with the same text.
    ///
    /// # Errors
    /// [`Error::Shader`] with the compiler's words.
    pub fn kernel(
        &self,
        name: &'static str,
        bindings: &[Binding],
        composer: &Composer,
    ) -> Result<Arc<Kernel>> {
        let text = composer.compose(Target::Naga)?;
        let mut kernels = self.shared.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = kernels.get(&text) {
            return Ok(kernel.clone());
        }
        let device = self.device();
        let entries: Vec<_> = (0..)
            .zip(bindings)
            .map(|(binding, b)| wgpu::BindGroupLayoutEntry {
                binding,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: match b.access {
                        Access::Uniform => wgpu::BufferBindingType::Uniform,
                        Access::Read => wgpu::BufferBindingType::Storage { read_only: true },
                        Access::Write => wgpu::BufferBindingType::Storage { read_only: false },
                    },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            })
            .collect();
        let compiled = self.checked(name, || {
            let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
                label: Some(name),
                source: wgpu::ShaderSource::Wgsl(text.as_str().into()),
            });
            let layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
                label: Some(name),
                entries: &entries,
            });
            let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: Some(name),
                bind_group_layouts: &[Some(&layout)],
                immediate_size: 0,
            });
            let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(name),
                layout: Some(&pipeline_layout),
                module: &module,
                entry_point: Some(name),
                compilation_options: Default::default(),
                cache: None,
            });
            Kernel {
                name,
                pipeline,
                layout,
            }
        });
        let kernel = Arc::new(compiled.map_err(|e| match e {
            Error::Device { message, .. } => Error::Shader {
                kernel: name.to_owned(),
                message,
            },
            other => other,
        })?);
        kernels.insert(text, kernel.clone());
        Ok(kernel)
    }

    /// Runs `work` with every error of the device caught, so that the caller's own handler never sees ours.
    ///
    /// # Errors
    /// [`Error::Device`] with wgpu's words.
    pub fn checked<T>(&self, during: &str, work: impl FnOnce() -> T) -> Result<T> {
        let device = self.device();
        let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
        let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let value = work();
        // Innermost first; native back ends have the answers ready.
        let errors = [now(validation.pop()), now(memory.pop()), now(internal.pop())];
        match errors.into_iter().flatten().flatten().next() {
            None => Ok(value),
            Some(error) => Err(Error::Device {
                during: during.to_owned(),
                message: error.to_string(),
            }),
        }
    }

    /// A buffer that holds `data`, for uniforms.
    pub fn uniform<T: Pod>(&self, data: &T) -> wgpu::Buffer {
        self.uniform_bytes(bytemuck::bytes_of(data))
    }

    /// The same from bytes.
    pub(crate) fn uniform_bytes(&self, bytes: &[u8]) -> wgpu::Buffer {
        let mut bytes = bytes.to_vec();
        bytes.resize(bytes.len().next_multiple_of(16), 0);
        self.filled(&bytes, wgpu::BufferUsages::UNIFORM)
    }

    /// A storage buffer that holds `data`; at least 16 bytes, since empty bindings do not exist.
    ///
    /// # Errors
    /// [`Error::Limit`] where the adapter cannot bind so much.
    pub fn upload<T: Pod>(&self, what: &str, data: &[T]) -> Result<wgpu::Buffer> {
        let mut bytes = bytemuck::cast_slice(data).to_vec();
        self.check_size(what, bytes.len() as u64)?;
        bytes.resize(bytes.len().next_multiple_of(4).max(16), 0);
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        self.checked(what, || self.filled(&bytes, usage))
    }

    fn filled(&self, contents: &[u8], usage: wgpu::BufferUsages) -> wgpu::Buffer {
        let buffer = self.device().create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: contents.len() as u64,
            usage,
            mapped_at_creation: true,
        });
        // On a lost device there is no range; the error scope around has the reason. (wgpu's own helper panics.)
        if let Ok(mut range) = buffer.get_mapped_range_mut(..) {
            range.slice(..).copy_from_slice(contents);
        }
        buffer.unmap();
        buffer
    }

    /// A storage buffer of zeros; at least 16 bytes.
    ///
    /// # Errors
    /// [`Error::Limit`] where the adapter cannot bind so much, [`Error::Device`] where memory runs out.
    pub fn zeros(&self, what: &str, bytes: u64) -> Result<wgpu::Buffer> {
        self.check_size(what, bytes)?;
        self.checked(what, || {
            self.device().create_buffer(&wgpu::BufferDescriptor {
                label: Some(what),
                size: bytes.next_multiple_of(4).max(16),
                usage: wgpu::BufferUsages::STORAGE
                    | wgpu::BufferUsages::COPY_SRC
                    | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            })
        })
    }

    /// Bytes of memory that buffers can still take, where that is known: the main memory that Linux says is available, for
    /// a software adapter. wgpu does not tell that of GPUs; there an allocation that fails is the answer.
    pub fn free_memory(&self) -> Option<u64> {
        if !self.summary().software {
            return None;
        }
        let text = std::fs::read_to_string("/proc/meminfo").ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib * 1024)
    }

    fn check_size(&self, what: &str, needed: u64) -> Result<()> {
        let limits = self.device().limits();
        let allowed = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
        if needed <= allowed {
            return Ok(());
        }
        Err(Error::Limit {
            what: format!("buffer `{what}` (bytes)"),
            needed,
            allowed,
            advice: "ask for fewer tokens, or a format with fewer bits".to_owned(),
        })
    }

    /// Records with `record`, submits, and catches the device's errors.
    ///
    /// # Errors
    /// [`Error::Device`], or what `record` returns; then nothing was submitted.
    pub fn submit<T>(
        &self,
        during: &str,
        record: impl FnOnce(&mut wgpu::CommandEncoder) -> Result<T>,
    ) -> Result<T> {
        self.checked(during, || {
            let mut encoder = self.device().create_command_encoder(&Default::default());
            let value = record(&mut encoder)?;
            self.queue().submit([encoder.finish()]);
            Ok(value)
        })?
    }

    /// Waits for the queue and reads `count` values from the start of a buffer.
    ///
    /// # Errors
    /// [`Error::Device`] where the device was lost.
    pub fn read<T: Pod>(&self, what: &str, buffer: &wgpu::Buffer, count: usize) -> Result<Vec<T>> {
        let bytes = (count * size_of::<T>()) as u64;
        let read = self.read_back(what, &[(buffer, 0..bytes.next_multiple_of(4))])?;
        let words = self.block_on(read)?;
        let bytes = &bytemuck::cast_slice::<u32, u8>(&words)[..bytes as usize];
        Ok(bytemuck::pod_collect_to_vec(bytes))
    }

    /// Submits copies of some byte ranges, all multiples of 4: a future of their words, one range after the other. They
    /// are as all that was submitted before this call left them.
    ///
    /// # Errors
    /// [`Error::Device`] where the device was lost, or memory runs out; the future gives it too.
    pub fn read_back(&self, what: &str, ranges: &[(&wgpu::Buffer, Range<u64>)]) -> Result<ReadBack> {
        let during = format!("reading {what}");
        let ranges = ranges.iter().filter(|(_, range)| range.start < range.end);
        let ranges: Vec<_> = ranges.cloned().collect();
        // Several staging buffers where one would be larger than many drivers give.
        let mut parts: Vec<(u64, Vec<_>)> = Vec::new();
        for (buffer, range) in ranges {
            let bytes = range.end - range.start;
            if parts.last().is_none_or(|(size, _)| size + bytes > STAGING_BYTES) {
                parts.push((0, Vec::new()));
            }
            if let Some((size, copies)) = parts.last_mut() {
                copies.push((buffer, range, *size));
                *size += bytes;
            }
        }
        let state = Arc::new(Mutex::new(Mapping {
            left: parts.len(),
            failed: None,
            waker: None,
        }));
        let staging = self.checked(&during, || {
            let mut encoder = self.device().create_command_encoder(&Default::default());
            let mut staging = Vec::new();
            for (size, copies) in &parts {
                let part = self.device().create_buffer(&wgpu::BufferDescriptor {
                    label: Some("read-back"),
                    size: *size,
                    usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                    mapped_at_creation: false,
                });
                for (buffer, range, at) in copies {
                    encoder.copy_buffer_to_buffer(buffer, range.start, &part, *at, range.end - range.start);
                }
                staging.push(part);
            }
            if !staging.is_empty() {
                self.queue().submit([encoder.finish()]);
            }
            for part in &staging {
                let state = state.clone();
                part.map_async(wgpu::MapMode::Read, .., move |result| {
                    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
                    state.left -= 1;
                    state.failed = state.failed.take().or(result.err().map(|e| e.to_string()));
                    if let Some(waker) = state.waker.take() {
                        waker.wake();
                    }
                });
            }
            staging
        })?;
        Ok(ReadBack {
            gpu: self.clone(),
            during,
            staging,
            state,
        })
    }

    /// The value of a future of this device. Blocks: for tools and tests.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = std::pin::pin!(future);
        loop {
            if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                return value;
            }
            // An error here is the future's to report: its mapping fails.
            let _ = self.device().poll(wgpu::PollType::wait_indefinitely());
        }
    }
}

/// The most bytes of one staging buffer, unless a single range has more.
const STAGING_BYTES: u64 = 1 << 26;

#[derive(Debug)]
struct Mapping {
    left: usize,
    failed: Option<String>,
    waker: Option<Waker>,
}

/// Words on their way from the GPU. Each poll asks the device once, without waiting, and is woken again at once: no
/// thread of the caller's need drive the device. [`Gpu::block_on`] waits instead.
#[derive(Debug)]
pub struct ReadBack {
    gpu: Gpu,
    during: String,
    staging: Vec<wgpu::Buffer>,
    state: Arc<Mutex<Mapping>>,
}

impl ReadBack {
    fn words(&self) -> std::result::Result<Vec<u32>, String> {
        let mut words = Vec::new();
        for part in &self.staging {
            let view = part.get_mapped_range(..).map_err(|e| e.to_string())?;
            words.extend(bytemuck::pod_collect_to_vec::<u8, u32>(&view[..]));
        }
        Ok(words)
    }
}

impl Future for ReadBack {
    type Output = Result<Vec<u32>>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let lost = self.gpu.device().poll(wgpu::PollType::Poll).err();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = state.failed.clone().or(lost.map(|e| e.to_string()));
        if failed.is_none() && state.left > 0 {
            state.waker = Some(context.waker().clone());
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        drop(state);
        let words = failed.map_or_else(|| self.words(), Err);
        Poll::Ready(words.map_err(|message| Error::Device {
            during: self.during.clone(),
            message,
        }))
    }
}

impl Kernel {
    /// Records one dispatch. `buffers` follow the kernel's list of bindings.
    pub fn encode(
        &self,
        gpu: &Gpu,
        pass: &mut wgpu::ComputePass<'_>,
        buffers: &[&wgpu::Buffer],
        groups: [u32; 3],
    ) {
        if groups.contains(&0) {
            return;
        }
        let entries: Vec<_> = (0..)
            .zip(buffers)
            .map(|(binding, buffer)| wgpu::BindGroupEntry {
                binding,
                resource: buffer.as_entire_binding(),
            })
            .collect();
        let bind_group = gpu.device().create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(self.name),
            layout: &self.layout,
            entries: &entries,
        });
        pass.set_pipeline(&self.pipeline);
        pass.set_bind_group(0, &bind_group, &[]);
        pass.dispatch_workgroups(groups[0], groups[1], groups[2]);
    }
}

/// Folds a number of workgroups into two dimensions of at most 65,535; kernels drop what lies beyond the end.
///
/// # Errors
/// [`Error::Limit`] above 65,535 x 65,535.
pub fn fold(what: &str, groups: u64) -> Result<[u32; 2]> {
    let limit = u64::from(MAX_GROUPS);
    let rows = groups.div_ceil(limit);
    if rows > limit {
        return Err(Error::Limit {
            what: format!("`{what}` (workgroups)"),
            needed: groups,
            allowed: limit * limit,
            advice: "split the work into several calls".to_owned(),
        });
    }
    Ok([groups.div_ceil(rows.max(1)) as u32, rows as u32])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folding_covers_all_groups_with_little_excess() {
        for groups in [0, 1, 65_535, 65_536, 65_537, 1_000_000_007] {
            let [x, y] = fold("test", groups).unwrap();
            let all = u64::from(x) * u64::from(y);
            assert!(
                all >= groups && all < groups + u64::from(y.max(1)),
                "{groups}: {x} x {y}"
            );
            assert!(x <= MAX_GROUPS && y <= MAX_GROUPS);
        }
        assert!(fold("test", 1 << 33).is_err());
    }

    #[test]
    fn adapters_are_chosen_by_label_or_unique_part() {
        let labels = ["llvmpipe", "NVIDIA H", "NVIDIA H #2"].map(str::to_owned);
        assert_eq!(choose("NVIDIA H", &labels), Ok(1));
        assert_eq!(choose("LLVM", &labels), Ok(0));
        assert!(choose("nvidia", &labels).unwrap_err().contains("several"));
        assert!(choose("radeon", &labels).unwrap_err().contains("llvmpipe"));
    }
}
