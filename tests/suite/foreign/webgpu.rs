//! A host on raw wgpu.

use std::cell::RefCell;
use std::collections::BTreeMap;

use pollster::block_on;
use serde_json::Value;
use wgpu::util::DeviceExt;

use super::folder::{Buffers, Case, Folder, Step};

/// A device, and the pipelines that it has built.
pub struct Host {
    device: wgpu::Device,
    queue: wgpu::Queue,
    name: String,
    pipelines: RefCell<BTreeMap<String, wgpu::ComputePipeline>>,
}

impl Host {
    /// A device with exactly these features and limits; None where the adapter lacks a feature.
    pub fn new(features: wgpu::Features, limits: wgpu::Limits) -> Option<Host> {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
        let adapter = block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default())).unwrap();
        if !adapter.features().contains(features) {
            return None;
        }
        let name = adapter.get_info().name;
        let (device, queue) = block_on(adapter.request_device(&wgpu::DeviceDescriptor {
            required_features: features,
            required_limits: limits,
            ..Default::default()
        }))
        .unwrap();
        Some(Host {
            device,
            queue,
            name,
            pipelines: RefCell::default(),
        })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs the steps; all buffers afterwards.
    pub fn run(&self, folder: &Folder, case: &Case) -> Buffers {
        let buffers: BTreeMap<String, wgpu::Buffer> = case
            .buffers()
            .into_iter()
            .map(|(name, words)| {
                let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                (name, self.buffer(&bytes, wgpu::BufferUsages::STORAGE))
            })
            .collect();
        let mut encoder = self.device.create_command_encoder(&Default::default());
        for step in folder.steps(case) {
            self.encode(&mut encoder, folder, &step, &buffers);
        }
        self.queue.submit([encoder.finish()]);
        let read = buffers
            .iter()
            .map(|(name, buffer)| (name.clone(), self.read(buffer)));
        read.collect()
    }

    fn buffer(&self, bytes: &[u8], usage: wgpu::BufferUsages) -> wgpu::Buffer {
        self.device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
            label: None,
            contents: bytes,
            usage: usage | wgpu::BufferUsages::COPY_SRC,
        })
    }

    fn encode(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        folder: &Folder,
        step: &Step<'_>,
        buffers: &BTreeMap<String, wgpu::Buffer>,
    ) {
        let name = step.module["name"].as_str().unwrap();
        let mut pipelines = self.pipelines.borrow_mut();
        let pipeline = pipelines
            .entry(name.to_owned())
            .or_insert_with(|| self.pipeline(folder, step.module, &step.bindings));
        let params = self.buffer(&step.params, wgpu::BufferUsages::UNIFORM);
        let entries: Vec<_> = step
            .bindings
            .iter()
            .map(|&(binding, _, buffer)| wgpu::BindGroupEntry {
                binding,
                resource: buffer.map_or(&params, |name| &buffers[name]).as_entire_binding(),
            })
            .collect();
        let group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.get_bind_group_layout(0),
            entries: &entries,
        });
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(pipeline);
        pass.set_bind_group(0, &group, &[]);
        let [x, y, z] = step.workgroups;
        pass.dispatch_workgroups(x, y, z);
    }

    fn pipeline(
        &self,
        folder: &Folder,
        module: &Value,
        bindings: &[(u32, &str, Option<&str>)],
    ) -> wgpu::ComputePipeline {
        let entries: Vec<_> = bindings
            .iter()
            .map(|&(binding, kind, _)| wgpu::BindGroupLayoutEntry {
                binding,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: match kind {
                        "uniform" => wgpu::BufferBindingType::Uniform,
                        kind => wgpu::BufferBindingType::Storage {
                            read_only: kind == "read",
                        },
                    },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            })
            .collect();
        let layout = self
            .device
            .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
                label: None,
                entries: &entries,
            });
        let layout = self
            .device
            .create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: None,
                bind_group_layouts: &[Some(&layout)],
                immediate_size: 0,
            });
        let text = String::from_utf8(folder.shader(module)).unwrap();
        let shader = self.device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: module["name"].as_str(),
            source: wgpu::ShaderSource::Wgsl(text.into()),
        });
        self.device
            .create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: module["name"].as_str(),
                layout: Some(&layout),
                module: &shader,
                entry_point: module["entry_point"].as_str(),
                // Kernels store before they load: the manifest says that zeroing may be off.
                compilation_options: wgpu::PipelineCompilationOptions {
                    zero_initialize_workgroup_memory: false,
                    ..Default::default()
                },
                cache: None,
            })
    }

    fn read(&self, buffer: &wgpu::Buffer) -> Vec<u32> {
        let copy = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: buffer.size(),
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut encoder = self.device.create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(buffer, 0, &copy, 0, buffer.size());
        self.queue.submit([encoder.finish()]);
        copy.map_async(wgpu::MapMode::Read, .., |result| result.unwrap());
        self.device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
        let bytes = copy.get_mapped_range(..).unwrap();
        let words = bytes
            .chunks_exact(4)
            .map(|four| u32::from_le_bytes(four.try_into().unwrap()));
        words.collect()
    }
}
