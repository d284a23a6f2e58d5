//! Runs cases on an adapter, as another engine would: text, bindings by name, uniforms packed by offsets.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::cases::Case;
use super::manifest::{BindingKind, FieldType, ModuleEntry};
use crate::error::{Error, Result};
use crate::gpu::Gpu;

/// A module that can run.
#[derive(Debug, Clone, PartialEq)]
pub struct Runnable {
    /// WGSL as naga takes it.
    pub text: String,
    /// What errors call the text: a file. No two that differ share a name.
    pub file: String,
    /// The entry point.
    pub entry_point: String,
    /// Number, name and whether it is read, written or the uniform, of each binding of group 0.
    pub bindings: Vec<(u32, String, wgpu::BufferBindingType)>,
    /// Bytes of the uniform.
    pub params_size: u32,
    /// Name, whether it is a float, and offset of each of its fields.
    pub params: Vec<(String, bool, u32)>,
}

impl Runnable {
    /// A module of a manifest with its text, or another text in its place, and what errors call that.
    pub fn new(entry: &ModuleEntry, text: String, file: String) -> Runnable {
        let ty = |kind| match kind {
            BindingKind::Uniform => wgpu::BufferBindingType::Uniform,
            BindingKind::Read => wgpu::BufferBindingType::Storage { read_only: true },
            BindingKind::ReadWrite => wgpu::BufferBindingType::Storage { read_only: false },
        };
        let bindings = entry
            .bindings
            .iter()
            .map(|b| (b.binding, b.name.clone(), ty(b.kind)));
        let fields = entry.params.fields.iter();
        Runnable {
            text,
            file,
            entry_point: entry.entry_point.clone(),
            bindings: bindings.collect(),
            params_size: entry.params.size,
            params: fields
                .map(|f| (f.name.clone(), f.of == FieldType::F32, f.offset))
                .collect(),
        }
    }

    fn pipeline(&self, gpu: &Gpu) -> Result<wgpu::ComputePipeline> {
        let device = gpu.device();
        let failed = |error: Error| match error {
            Error::Device { message, .. } => Error::Shader {
                kernel: self.file.clone(),
                message,
            },
            other => other,
        };
        let module = gpu.checked(&self.file, || {
            device.create_shader_module(wgpu::ShaderModuleDescriptor {
                label: Some(&self.file),
                source: wgpu::ShaderSource::Wgsl(Cow::Borrowed(&self.text)),
            })
        });
        let module = module.map_err(failed)?;
        let entries = self
            .bindings
            .iter()
            .map(|(binding, _, ty)| wgpu::BindGroupLayoutEntry {
                binding: *binding,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: *ty,
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            });
        let entries = entries.collect::<Vec<_>>();
        let pipeline = gpu.checked(&self.file, || {
            let layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
                label: Some(&self.file),
                entries: &entries,
            });
            let layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: Some(&self.file),
                bind_group_layouts: &[Some(&layout)],
                immediate_size: 0,
            });
            device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(&self.file),
                layout: Some(&layout),
                module: &module,
                entry_point: Some(&self.entry_point),
                compilation_options: Default::default(),
                cache: None,
            })
        });
        pipeline.map_err(failed)
    }
}

/// What stands behind the end of every buffer.
const GUARD: u32 = 0xdead_beef;
/// How many words of it.
const GUARDS: usize = 64;

/// What a run left behind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ran {
    /// What each buffer that is judged holds.
    pub buffers: BTreeMap<String, Vec<u32>>,
    /// Buffers behind whose end something was written.
    pub overrun: Vec<String>,
}

/// Runs cases; each module is compiled once.
#[derive(Debug)]
pub struct Runner<'g> {
    gpu: &'g Gpu,
    pipelines: BTreeMap<String, wgpu::ComputePipeline>,
}

impl<'g> Runner<'g> {
    /// On an adapter.
    pub fn new(gpu: &'g Gpu) -> Runner<'g> {
        Runner {
            gpu,
            pipelines: BTreeMap::new(),
        }
    }

    /// Runs all steps of a case, each buffer with some guard words behind its end. `modules` has those that the steps name.
    ///
    /// # Errors
    /// [`Error::Shader`] with the compiler's words, [`Error::Usage`] where module and step do not fit, and what the device
    /// reports.
    pub fn run(&mut self, case: &Case, modules: &BTreeMap<String, Runnable>) -> Result<Ran> {
        let gpu = self.gpu;
        let mut buffers = BTreeMap::new();
        for buffer in &case.buffers {
            let guarded: Vec<u32> = [&buffer.words[..], &[GUARD; GUARDS]].concat();
            buffers.insert(buffer.name.as_str(), gpu.upload(&buffer.name, &guarded)?);
        }
        for step in &case.steps {
            let refuse = |reason: String| Error::Usage {
                asked: format!("module {} in case {}", step.module, case.case),
                reason,
                advice: "case and manifest must be of one export".to_owned(),
            };
            let runnable = modules
                .get(&step.module)
                .ok_or_else(|| refuse("the manifest has no such module".to_owned()))?;
            if !self.pipelines.contains_key(&runnable.file) {
                self.pipelines
                    .insert(runnable.file.clone(), runnable.pipeline(gpu)?);
            }
            let Some(pipeline) = self.pipelines.get(&runnable.file) else {
                continue;
            };
            let params = gpu.checked("params", || gpu.uniform_bytes(&pack(runnable, step)))?;
            let mut entries = Vec::new();
            for (binding, name, ty) in &runnable.bindings {
                let buffer = match (ty, step.bindings.get(name)) {
                    (wgpu::BufferBindingType::Uniform, _) => &params,
                    (_, Some(buffer)) => buffers
                        .get(buffer.as_str())
                        .ok_or_else(|| refuse(format!("there is no buffer `{buffer}`")))?,
                    (_, None) => {
                        return Err(refuse(format!("the step has no buffer for the binding `{name}`")));
                    }
                };
                entries.push(wgpu::BindGroupEntry {
                    binding: *binding,
                    resource: buffer.as_entire_binding(),
                });
            }
            if let Some((field, ..)) = runnable
                .params
                .iter()
                .find(|(field, ..)| !step.params.contains_key(field))
            {
                return Err(refuse(format!("the step has no value for params.{field}")));
            }
            if step.workgroups.contains(&0) {
                continue;
            }
            gpu.submit(&step.module, |encoder| {
                let bind_group = gpu.device().create_bind_group(&wgpu::BindGroupDescriptor {
                    label: Some(&step.module),
                    layout: &pipeline.get_bind_group_layout(0),
                    entries: &entries,
                });
                let mut pass = encoder.begin_compute_pass(&Default::default());
                pass.set_pipeline(pipeline);
                pass.set_bind_group(0, &bind_group, &[]);
                let [x, y, z] = step.workgroups;
                pass.dispatch_workgroups(x, y, z);
                Ok(())
            })?;
        }
        let mut found = BTreeMap::new();
        let mut overrun = Vec::new();
        for known in &case.buffers {
            let judged = case.expect.iter().any(|expect| expect.buffer == known.name);
            let Some(buffer) = buffers.get(known.name.as_str()).filter(|_| judged) else {
                continue;
            };
            let mut words: Vec<u32> = gpu.read(&known.name, buffer, known.words.len() + GUARDS)?;
            if words
                .split_off(known.words.len())
                .iter()
                .any(|&word| word != GUARD)
            {
                overrun.push(known.name.clone());
            }
            found.insert(known.name.clone(), words);
        }
        Ok(Ran {
            buffers: found,
            overrun,
        })
    }
}

/// The uniform's bytes.
fn pack(runnable: &Runnable, step: &super::cases::Step) -> Vec<u8> {
    let mut bytes = vec![0; runnable.params_size as usize];
    for (field, float, offset) in &runnable.params {
        let Some(value) = step.params.get(field) else {
            continue;
        };
        let bits = match float {
            true => value.as_f32().to_bits(),
            false => value.as_u32().unwrap_or(0),
        };
        let at = *offset as usize;
        if let Some(place) = bytes.get_mut(at..at + 4) {
            place.copy_from_slice(&bits.to_le_bytes());
        }
    }
    bytes
}
