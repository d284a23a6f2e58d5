//! A host on plain Vulkan: descriptor set 0, one pipeline a module, SPIR-V as the export has it. Vulkan has no safe
//! interface, so every call here is unsafe; each is made with handles of this host that live until it is dropped.
#![allow(unsafe_code, reason = "Vulkan's own interface, as another engine calls it")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString};

use ash::vk;
use serde_json::Value;

use super::folder::{Buffers, Case, Folder, Step};

/// A device, and what it has made.
pub struct Host {
    // Before the device that it loaded.
    device: ash::Device,
    instance: ash::Instance,
    _entry: ash::Entry,
    queue: vk::Queue,
    commands: vk::CommandPool,
    memory: vk::PhysicalDeviceMemoryProperties,
    name: String,
    pipelines: RefCell<BTreeMap<String, Pipeline>>,
}

#[derive(Clone, Copy)]
struct Pipeline {
    shader: vk::ShaderModule,
    set: vk::DescriptorSetLayout,
    layout: vk::PipelineLayout,
    pipeline: vk::Pipeline,
}

/// Memory that the host sees, as a buffer.
struct Buffer {
    buffer: vk::Buffer,
    memory: vk::DeviceMemory,
    bytes: u64,
}

impl Host {
    /// The first device with a compute queue, without any feature.
    pub fn new() -> Host {
        unsafe {
            let entry = ash::Entry::load().unwrap();
            let about = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_1);
            let create = vk::InstanceCreateInfo::default().application_info(&about);
            let instance = entry.create_instance(&create, None).unwrap();
            let (physical, family) = instance
                .enumerate_physical_devices()
                .unwrap()
                .into_iter()
                .find_map(|physical| {
                    let families = instance.get_physical_device_queue_family_properties(physical);
                    let family = families
                        .iter()
                        .position(|family| family.queue_flags.contains(vk::QueueFlags::COMPUTE))?;
                    Some((physical, family as u32))
                })
                .unwrap();
            let queues = [vk::DeviceQueueCreateInfo::default()
                .queue_family_index(family)
                .queue_priorities(&[1.0])];
            let create = vk::DeviceCreateInfo::default().queue_create_infos(&queues);
            let device = instance.create_device(physical, &create, None).unwrap();
            let pool = vk::CommandPoolCreateInfo::default().queue_family_index(family);
            let properties = instance.get_physical_device_properties(physical);
            Host {
                queue: device.get_device_queue(family, 0),
                commands: device.create_command_pool(&pool, None).unwrap(),
                memory: instance.get_physical_device_memory_properties(physical),
                name: CStr::from_ptr(properties.device_name.as_ptr())
                    .to_string_lossy()
                    .into_owned(),
                pipelines: RefCell::default(),
                device,
                instance,
                _entry: entry,
            }
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs the steps; all buffers afterwards.
    pub fn run(&self, folder: &Folder, case: &Case) -> Buffers {
        let buffers: BTreeMap<String, Buffer> = case
            .buffers()
            .into_iter()
            .map(|(name, words)| {
                let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                (name, self.buffer(&bytes, vk::BufferUsageFlags::STORAGE_BUFFER))
            })
            .collect();
        for step in folder.steps(case) {
            self.dispatch(folder, &step, &buffers);
        }
        buffers
            .into_iter()
            .map(|(name, buffer)| {
                let words = self.read(&buffer);
                self.free(buffer);
                (name, words)
            })
            .collect()
    }

    fn buffer(&self, bytes: &[u8], usage: vk::BufferUsageFlags) -> Buffer {
        unsafe {
            let create = vk::BufferCreateInfo::default()
                .size(bytes.len() as u64)
                .usage(usage);
            let buffer = self.device.create_buffer(&create, None).unwrap();
            let needs = self.device.get_buffer_memory_requirements(buffer);
            let wanted = vk::MemoryPropertyFlags::HOST_VISIBLE | vk::MemoryPropertyFlags::HOST_COHERENT;
            let kind = (0..self.memory.memory_type_count)
                .find(|&kind| {
                    let flags = self.memory.memory_types[kind as usize].property_flags;
                    needs.memory_type_bits & 1 << kind != 0 && flags.contains(wanted)
                })
                .unwrap();
            let allocate = vk::MemoryAllocateInfo::default()
                .allocation_size(needs.size)
                .memory_type_index(kind);
            let memory = self.device.allocate_memory(&allocate, None).unwrap();
            self.device.bind_buffer_memory(buffer, memory, 0).unwrap();
            let made = Buffer {
                buffer,
                memory,
                bytes: bytes.len() as u64,
            };
            self.mapped(&made, |mapped| mapped.copy_from_slice(bytes));
            made
        }
    }

    /// Lends a buffer's bytes; no dispatch is running, since each is waited for.
    fn mapped<T>(&self, buffer: &Buffer, with: impl FnOnce(&mut [u8]) -> T) -> T {
        unsafe {
            let flags = vk::MemoryMapFlags::empty();
            let mapped = self
                .device
                .map_memory(buffer.memory, 0, buffer.bytes, flags)
                .unwrap();
            let done = with(std::slice::from_raw_parts_mut(
                mapped.cast(),
                buffer.bytes as usize,
            ));
            self.device.unmap_memory(buffer.memory);
            done
        }
    }

    fn read(&self, buffer: &Buffer) -> Vec<u32> {
        self.mapped(buffer, |bytes| {
            let words = bytes
                .chunks_exact(4)
                .map(|four| u32::from_le_bytes(four.try_into().unwrap()));
            words.collect()
        })
    }

    fn free(&self, buffer: Buffer) {
        unsafe {
            self.device.destroy_buffer(buffer.buffer, None);
            self.device.free_memory(buffer.memory, None);
        }
    }

    fn dispatch(&self, folder: &Folder, step: &Step<'_>, buffers: &BTreeMap<String, Buffer>) {
        let name = step.module["name"].as_str().unwrap();
        let pipeline = *self
            .pipelines
            .borrow_mut()
            .entry(name.to_owned())
            .or_insert_with(|| self.pipeline(folder, step.module, &step.bindings));
        let params = self.buffer(&step.params, vk::BufferUsageFlags::UNIFORM_BUFFER);
        unsafe {
            let sizes = [
                vk::DescriptorPoolSize::default()
                    .ty(vk::DescriptorType::UNIFORM_BUFFER)
                    .descriptor_count(1),
                vk::DescriptorPoolSize::default()
                    .ty(vk::DescriptorType::STORAGE_BUFFER)
                    .descriptor_count(step.bindings.len() as u32),
            ];
            let create = vk::DescriptorPoolCreateInfo::default()
                .max_sets(1)
                .pool_sizes(&sizes);
            let pool = self.device.create_descriptor_pool(&create, None).unwrap();
            let layouts = [pipeline.set];
            let allocate = vk::DescriptorSetAllocateInfo::default()
                .descriptor_pool(pool)
                .set_layouts(&layouts);
            let set = self.device.allocate_descriptor_sets(&allocate).unwrap()[0];
            for &(binding, kind, buffer) in &step.bindings {
                let buffer = buffer.map_or(&params, |name| &buffers[name]);
                let whole = [vk::DescriptorBufferInfo::default()
                    .buffer(buffer.buffer)
                    .range(vk::WHOLE_SIZE)];
                let write = vk::WriteDescriptorSet::default()
                    .dst_set(set)
                    .dst_binding(binding)
                    .descriptor_type(descriptor(kind))
                    .buffer_info(&whole);
                self.device.update_descriptor_sets(&[write], &[]);
            }
            let allocate = vk::CommandBufferAllocateInfo::default()
                .command_pool(self.commands)
                .command_buffer_count(1);
            let commands = self.device.allocate_command_buffers(&allocate).unwrap();
            let begin = vk::CommandBufferBeginInfo::default();
            self.device.begin_command_buffer(commands[0], &begin).unwrap();
            let point = vk::PipelineBindPoint::COMPUTE;
            self.device
                .cmd_bind_pipeline(commands[0], point, pipeline.pipeline);
            self.device
                .cmd_bind_descriptor_sets(commands[0], point, pipeline.layout, 0, &[set], &[]);
            let [x, y, z] = step.workgroups;
            self.device.cmd_dispatch(commands[0], x, y, z);
            // The host reads next, or another dispatch does.
            let seen = [vk::MemoryBarrier::default()
                .src_access_mask(vk::AccessFlags::SHADER_WRITE)
                .dst_access_mask(vk::AccessFlags::HOST_READ | vk::AccessFlags::SHADER_READ)];
            self.device.cmd_pipeline_barrier(
                commands[0],
                vk::PipelineStageFlags::COMPUTE_SHADER,
                vk::PipelineStageFlags::HOST | vk::PipelineStageFlags::COMPUTE_SHADER,
                vk::DependencyFlags::empty(),
                &seen,
                &[],
                &[],
            );
            self.device.end_command_buffer(commands[0]).unwrap();
            let submit = vk::SubmitInfo::default().command_buffers(&commands);
            self.device
                .queue_submit(self.queue, &[submit], vk::Fence::null())
                .unwrap();
            self.device.queue_wait_idle(self.queue).unwrap();
            self.device.free_command_buffers(self.commands, &commands);
            self.device.destroy_descriptor_pool(pool, None);
        }
        self.free(params);
    }

    fn pipeline(&self, folder: &Folder, module: &Value, bindings: &[(u32, &str, Option<&str>)]) -> Pipeline {
        let bytes = folder.shader(module);
        let words: Vec<u32> = bytes
            .chunks_exact(4)
            .map(|four| u32::from_le_bytes(four.try_into().unwrap()))
            .collect();
        let entry = CString::new(module["entry_point"].as_str().unwrap()).unwrap();
        let slots: Vec<_> = bindings
            .iter()
            .map(|&(binding, kind, _)| {
                vk::DescriptorSetLayoutBinding::default()
                    .binding(binding)
                    .descriptor_type(descriptor(kind))
                    .descriptor_count(1)
                    .stage_flags(vk::ShaderStageFlags::COMPUTE)
            })
            .collect();
        unsafe {
            let create = vk::ShaderModuleCreateInfo::default().code(&words);
            let shader = self.device.create_shader_module(&create, None).unwrap();
            let create = vk::DescriptorSetLayoutCreateInfo::default().bindings(&slots);
            let set = self.device.create_descriptor_set_layout(&create, None).unwrap();
            let sets = [set];
            let create = vk::PipelineLayoutCreateInfo::default().set_layouts(&sets);
            let layout = self.device.create_pipeline_layout(&create, None).unwrap();
            let stage = vk::PipelineShaderStageCreateInfo::default()
                .stage(vk::ShaderStageFlags::COMPUTE)
                .module(shader)
                .name(&entry);
            let create = [vk::ComputePipelineCreateInfo::default()
                .stage(stage)
                .layout(layout)];
            let cache = vk::PipelineCache::null();
            let pipeline = self
                .device
                .create_compute_pipelines(cache, &create, None)
                .unwrap()[0];
            Pipeline {
                shader,
                set,
                layout,
                pipeline,
            }
        }
    }
}

fn descriptor(kind: &str) -> vk::DescriptorType {
    match kind {
        "uniform" => vk::DescriptorType::UNIFORM_BUFFER,
        _ => vk::DescriptorType::STORAGE_BUFFER,
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        unsafe {
            for made in self.pipelines.borrow().values() {
                self.device.destroy_pipeline(made.pipeline, None);
                self.device.destroy_pipeline_layout(made.layout, None);
                self.device.destroy_descriptor_set_layout(made.set, None);
                self.device.destroy_shader_module(made.shader, None);
            }
            self.device.destroy_command_pool(self.commands, None);
            self.device.destroy_device(None);
            self.instance.destroy_instance(None);
        }
    }
}
