//! Another's shader in the place of a module: run through the cases that the module has, and judged by them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::cases::{self, Case};
use super::manifest::{Manifest, ModuleEntry};
use super::modules::{Choice, Module, Phase, others};
use super::run::{Ran, Runnable, Runner};
use super::{harden, reflect, writers::ExportTarget};
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::spec::{Pair, Side};
use crate::validate::{Comparison, ValidateRow};

/// A shader, parsed, and the module whose place it takes.
#[derive(Debug)]
pub struct Candidate<'m> {
    /// The module.
    pub entry: &'m ModuleEntry,
    /// The text in naga's dialect.
    text: String,
    /// What errors call it.
    file: String,
    /// Its workgroup memory.
    workgroup_bytes: u32,
}

/// Parses a shader and finds whose place it takes: the module of `name`, or of the file's name, or the only one whose entry
/// point the shader has.
///
/// # Errors
/// [`Error::Shader`] with the compiler's words, the file and the line; [`Error::Usage`] where no module or several fit;
/// [`Error::Shader`] too where the shader lacks the module's entry point or has another workgroup.
pub fn candidate<'m>(
    manifest: &'m Manifest,
    file: &str,
    text: &str,
    name: Option<&str>,
) -> Result<Candidate<'m>> {
    if !manifest.target.is_wgsl() {
        return Err(Error::Usage {
            asked: format!("a WGSL shader with a manifest of {} modules", manifest.target),
            reason: "the manifest describes another language".to_owned(),
            advice: "export with --to wgsl or --to wgsl-browser".to_owned(),
        });
    }
    // What browsers demand naga refuses. The line stays, so that those below keep their numbers.
    let lines = text.lines().map(|line| match line.trim() {
        "enable subgroups;" => "",
        _ => line,
    });
    let text = lines.collect::<Vec<_>>().join("\n") + "\n";
    let (parsed, _) = reflect::parse(file, &text)?;
    let entry_points: Vec<&str> = parsed
        .entry_points
        .iter()
        .map(|entry| entry.name.as_str())
        .collect();
    let stem = file.rsplit(['/', '\\']).next().unwrap_or(file);
    let stem = stem.rsplit_once('.').map_or(stem, |(stem, _)| stem);
    let fitting: Vec<&ModuleEntry> = manifest
        .modules
        .iter()
        .filter(|module| entry_points.contains(&module.entry_point.as_str()))
        .collect();
    let names = |modules: &mut dyn Iterator<Item = &ModuleEntry>| {
        modules
            .map(|module| module.name.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    };
    let entry = match (name, fitting.as_slice()) {
        (Some(name), _) => manifest.module(name).ok_or_else(|| Error::Usage {
            asked: format!("module `{name}`"),
            reason: "the manifest has no such module".to_owned(),
            advice: format!("choose from {}", names(&mut manifest.modules.iter())),
        })?,
        (None, &[only]) => only,
        (None, several) => match several.iter().find(|module| module.name == stem) {
            Some(module) => module,
            None if several.is_empty() => {
                return Err(missing(
                    file,
                    &entry_points,
                    &manifest.modules.iter().collect::<Vec<_>>(),
                ));
            }
            None => {
                return Err(Error::Usage {
                    asked: format!("`{file}` in the place of a module"),
                    reason: format!("several have the entry point `{}`", several[0].entry_point),
                    advice: format!("name one with --module: {}", names(&mut several.iter().copied())),
                });
            }
        },
    };
    if !entry_points.contains(&entry.entry_point.as_str()) {
        return Err(missing(file, &entry_points, &[entry]));
    }
    let wrong = |reason: String| Error::Shader {
        kernel: file.to_owned(),
        message: reason,
    };
    let size = parsed
        .entry_points
        .iter()
        .find(|point| point.name == entry.entry_point);
    let size = size.map(|point| point.workgroup_size).unwrap_or_default();
    if size != entry.workgroup_size {
        return Err(wrong(format!(
            "its workgroup is {size:?}, and the manifest dispatches for {:?}: change `workgroup_size` in a manifest of yours",
            entry.workgroup_size
        )));
    }
    if let Some(binding) = entry.bindings.iter().find(|binding| binding.group != 0) {
        return Err(Error::Manifest {
            file: entry.name.clone(),
            reason: format!(
                "`{}` is in group {}; kernels use group 0",
                binding.name, binding.group
            ),
        });
    }
    Ok(Candidate {
        entry,
        text,
        file: file.to_owned(),
        workgroup_bytes: reflect::workgroup_bytes(file, &parsed)?,
    })
}

fn missing(file: &str, entry_points: &[&str], wanted: &[&ModuleEntry]) -> Error {
    let has = match entry_points {
        [] => "it has no entry point".to_owned(),
        names => format!("its entry points are {}", names.join(", ")),
    };
    let mut names: Vec<&str> = wanted.iter().map(|module| module.entry_point.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    Error::Shader {
        kernel: file.to_owned(),
        message: format!("{has}; the manifest wants {}", names.join(", ")),
    }
}

/// Runs a shader through every case that its module has, at several lengths, and judges what that module makes.
///
/// # Errors
/// [`Error::Shader`] and [`Error::Device`]; [`Error::Usage`] where the manifest's module is none of this version.
pub fn check(
    gpu: &Gpu,
    manifest: &Manifest,
    candidate: &Candidate<'_>,
    report: &mut dyn FnMut(&ValidateRow),
) -> Result<Vec<ValidateRow>> {
    let entry = candidate.entry;
    // wgpu does not count it.
    let allowed = gpu.device().limits().max_compute_workgroup_storage_size;
    if candidate.workgroup_bytes > allowed {
        return Err(Error::Limit {
            what: format!("`{}` (bytes of workgroup memory)", candidate.file),
            needed: u64::from(candidate.workgroup_bytes),
            allowed: u64::from(allowed),
            advice: "use smaller arrays in workgroup memory".to_owned(),
        });
    }
    let (choice, places, cases) = plan(manifest, entry)?;
    let own = Runnable::new(entry, candidate.text.clone(), candidate.file.clone());
    let mut modules = BTreeMap::new();
    for module in choice.modules()? {
        let (described, written) = reflect::entry(&module, ExportTarget::Wgsl)?;
        let text = String::from_utf8_lossy(&written.bytes).into_owned();
        modules.insert(
            module.name.clone(),
            Runnable::new(&described, text, format!("{} (of this version)", module.name)),
        );
    }
    for place in &places {
        modules.insert(place.clone(), own.clone());
    }
    let dispatch = entry.dispatch.parse().ok_or_else(|| Error::Usage {
        asked: format!("the dispatch `{}`", entry.dispatch.formula),
        reason: "it is no formula".to_owned(),
        advice: "see the manifest of an export".to_owned(),
    })?;
    let mut runner = Runner::new(gpu);
    let mut rows = Vec::new();
    let mut prepared = Vec::new();
    for mut case in cases {
        prune(&mut case, entry, &modules);
        for step in case.steps.iter_mut().filter(|step| places.contains(&step.module)) {
            let value = |name: &str| step.params.get(name).and_then(|value| value.as_u32());
            step.workgroups = dispatch.workgroups(&entry.kernel, entry.workgroup_size[0], value)?;
        }
        if case.steps.iter().any(|step| places.contains(&step.module)) {
            harden::lists(&mut case);
            prepared.push(case);
        }
    }
    // Plain reads count workgroups in x alone.
    if !entry.kernel.starts_with("read_")
        && let Some(last) = prepared.last()
    {
        let mut folded = last.clone();
        harden::fold(&mut folded, &places);
        folded.case = "folded dispatch".to_owned();
        prepared.push(folded);
    }
    for case in prepared {
        let started = Instant::now();
        let found = runner.run(&case, &modules)?;
        let row = judged(gpu, &case, entry, &found, started)?;
        report(&row);
        rows.push(row);
    }
    Ok(rows)
}

/// Leaves out what a module's judges do not look at, and the steps that nothing of it comes from.
fn prune(case: &mut Case, entry: &ModuleEntry, modules: &BTreeMap<String, Runnable>) {
    case.expect
        .retain(|expect| expect.kernels.contains(&entry.kernel));
    let mut needed: BTreeSet<String> = case.expect.iter().map(|expect| expect.buffer.clone()).collect();
    let mut kept = Vec::new();
    for step in std::mem::take(&mut case.steps).into_iter().rev() {
        let written = |name: &str| {
            let bindings = modules.get(&step.module).map(|module| module.bindings.as_slice());
            let ty = bindings
                .unwrap_or_default()
                .iter()
                .find(|(_, binding, _)| binding == name);
            ty.is_none_or(|(.., ty)| *ty == wgpu::BufferBindingType::Storage { read_only: false })
        };
        let mut bound = step.bindings.iter();
        if bound.any(|(binding, buffer)| written(binding) && needed.contains(buffer)) {
            needed.extend(step.bindings.values().cloned());
            kept.push(step);
        }
    }
    kept.reverse();
    case.steps = kept;
}

/// What the judges of a kernel say of a case.
fn judged(gpu: &Gpu, case: &Case, entry: &ModuleEntry, found: &Ran, started: Instant) -> Result<ValidateRow> {
    let mut row = ValidateRow {
        kernel: entry.kernel.clone(),
        format: case.case.clone(),
        cases: 0,
        bit_mismatches: 0,
        worst_share_of_bound: None,
        max_error: None,
        bound: None,
        milliseconds: started.elapsed().as_secs_f64() * 1e3,
        passed: true,
        detail: String::new(),
        adapter: gpu.summary().title(),
    };
    let mut sums: Option<Comparison> = None;
    for expect in case
        .expect
        .iter()
        .filter(|expect| expect.kernels.contains(&entry.kernel))
    {
        let words = found
            .buffers
            .get(&expect.buffer)
            .map(Vec::as_slice)
            .unwrap_or_default();
        let verdict = case.judge(expect, words)?;
        row.cases += verdict.cases;
        row.bit_mismatches += verdict.bit_mismatches;
        row.passed &= verdict.passed();
        if let Some(of) = verdict.sums {
            sums.get_or_insert_default().join(of);
        }
        if row.detail.is_empty() && !verdict.first.is_empty() {
            row.detail = verdict.first;
        }
    }
    if let Some(buffer) = found.overrun.first() {
        row.passed = false;
        row.detail = format!("something is written behind the end of `{buffer}`");
    }
    // Nothing compared is no pass.
    row.passed &= row.cases > 0;
    row.worst_share_of_bound = sums.map(|s| s.share());
    row.max_error = sums.map(|s| s.max_error);
    row.bound = sums.map(|s| s.bound);
    Ok(row)
}

/// What a module's cases are made from, the names of the modules whose place is taken in them, and the cases.
fn plan(manifest: &Manifest, entry: &ModuleEntry) -> Result<(Choice, Vec<String>, Vec<Case>)> {
    let shape = manifest.shape;
    let token_tile = entry
        .constants
        .iter()
        .find(|constant| constant.name == "TOKEN_TILE");
    let token_tile = token_tile.and_then(|constant| constant.value.as_u32());
    let mut choice = Choice::new(shape, Vec::new());
    let types = manifest.types;
    (choice.rows, choice.queries, choice.outputs) = (types.rows, types.queries, types.outputs);
    choice.tweaks.token_tile = token_tile;
    choice.tweaks.arithmetic = entry.arithmetic;
    let layout = |prefix: &str| {
        let geometry = entry.pages.get(prefix).ok_or_else(|| Error::Manifest {
            file: entry.name.clone(),
            reason: format!("its pages have no `{prefix}`"),
        })?;
        geometry.layout()
    };
    let p = shape.page_tokens;
    let lengths = [1, p - 1, p, p + 1, cases::default_tokens(p), 4 * p + 44];
    let over_lengths = |choice: &Choice, pair: Pair, phase: Phase| -> Result<Vec<Case>> {
        let of = |&tokens: &u32| {
            let mut case = cases::of_pair(choice, pair, phase, tokens)?;
            case.case = format!("{phase}, {tokens} tokens");
            Ok(case)
        };
        lengths.iter().map(of).collect()
    };
    let with_options = |choice: &Choice, pair: Pair| -> Result<Vec<Case>> {
        let mut cases = cases::with_options(choice, pair, 4 * p + 44)?;
        for case in &mut cases {
            case.case = case.case.rsplit('-').next().unwrap_or_default().to_owned();
        }
        Ok(cases)
    };
    match entry.kernel.as_str() {
        "quantize" | "quantize_group" | "dequantize" => {
            let page = layout("side")?;
            let value = page.head_dim != shape.k_head_dim;
            choice.pairs = vec![Pair::same(page.side)];
            let waiting = choice.shape.page(Side::F16, value)?;
            let module = match entry.kernel.as_str() {
                "quantize" => choice.quantize(&page),
                "quantize_group" => choice.quantize_group(&page, &waiting),
                _ => choice.dequantize(&page),
            };
            // Twice: rows as bad as they come, and pages that are full to any slot.
            let mut cases = vec![cases::of_side(&choice, page.side, value)?];
            if shape.k_head_dim == shape.v_head_dim {
                let pair = Pair::same(page.side);
                cases.extend(over_lengths(&choice, pair, Phase::Decode)?);
                cases.extend(with_options(&choice, pair)?);
            }
            Ok((choice, vec![module.name], cases))
        }
        "attention_split" => {
            let (k, v) = (layout("k")?, layout("v")?);
            let pair = Pair { k: k.side, v: v.side };
            choice.pairs = vec![pair];
            let (mut places, mut cases) = (Vec::new(), Vec::new());
            for phase in [Phase::Decode, Phase::Prefill] {
                places.push(choice.attention_split(&k, &v, phase)?.name);
                cases.extend(over_lengths(&choice, pair, phase)?);
            }
            cases.extend(with_options(&choice, pair)?);
            Ok((choice, places, cases))
        }
        "attention_merge" => {
            let pair = Pair::same(Side::F16);
            choice.pairs = vec![pair];
            let mut cases = over_lengths(&choice, pair, Phase::Decode)?;
            cases.extend(over_lengths(&choice, pair, Phase::Prefill)?);
            cases.extend(with_options(&choice, pair)?);
            let module = choice.attention_merge();
            Ok((choice, vec![module.name], cases))
        }
        "amax" | "tensor_scale" => {
            let pair: Pair = "fp8".parse()?;
            choice.pairs = vec![pair];
            let module = match entry.kernel.as_str() {
                "amax" => choice.amax(),
                _ => choice.tensor_scale(pair.k),
            };
            let mut cases = over_lengths(&choice, pair, Phase::Decode)?;
            cases.extend(with_options(&choice, pair)?);
            Ok((choice, vec![module.name], cases))
        }
        kernel => {
            let fits = |module: &Module| module.kernel == kernel && (module.name == entry.name);
            let module = others().into_iter().find(fits).ok_or_else(|| Error::Usage {
                asked: format!("module `{}`", entry.name),
                reason: "this version has none of this name and kernel".to_owned(),
                advice: "export again with this version".to_owned(),
            })?;
            let case = cases::of_module(&module)?;
            Ok((choice, vec![module.name], vec![case]))
        }
    }
}
