//! Which composed modules a shape and its pairs take, what each is called, and how each is dispatched.

use std::collections::BTreeMap;
use std::fmt;

use super::dispatch::{Counts, Dispatch, divided, field, number};
use crate::bench::roof;
use crate::error::{Error, Result};
use crate::gpu::Binding;
use crate::kernels::quantize::{self, Source};
use crate::kernels::{
    self, FloatType, Listed, amax, attention_merge, attention_split, dequantize, quantize_group, tensor_scale,
};
use crate::model::kernels as model;
use crate::pages::{PageLayout, heads_ratio};
use crate::shader::Composer;
use crate::spec::{Pair, Side};
use crate::variant::{Arithmetic, Reduction, Variant};

/// The shape of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// KV heads.
    pub kv_heads: u32,
    /// Query heads: 1 to 16 for each KV head.
    pub q_heads: u32,
    /// Channels of a key.
    pub k_head_dim: u32,
    /// Channels of a value.
    pub v_head_dim: u32,
    /// Tokens of a page.
    pub page_tokens: u32,
}

impl Shape {
    /// The geometry of one side's pages; `value` for V.
    ///
    /// # Errors
    /// As [`PageLayout::new`].
    pub fn page(&self, side: Side, value: bool) -> Result<PageLayout> {
        let head_dim = if value { self.v_head_dim } else { self.k_head_dim };
        PageLayout::new(side, self.kv_heads, head_dim, self.page_tokens)
    }
}

/// What queries a module of attention is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// One new token a sequence.
    Decode,
    /// Many new tokens a sequence.
    Prefill,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Decode => "decode",
            Phase::Prefill => "prefill",
        })
    }
}

/// Numbers of a variant of attention that take the place of the portable ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tweaks {
    /// Invocations of a workgroup.
    pub workgroup: Option<u32>,
    /// Query heads of a workgroup.
    pub head_tile: Option<u32>,
    /// Query tokens of a workgroup, for prefill.
    pub token_tile: Option<u32>,
    /// Slot quads of an invocation.
    pub slot_quads: Option<u32>,
    /// Channel quads of an invocation.
    pub channel_quads: Option<u32>,
    /// How one number of a row is found.
    pub reduction: Option<Reduction>,
    /// What scores are computed in, where K's side allows it.
    pub arithmetic: Option<Arithmetic>,
}

impl Tweaks {
    fn apply(self, variant: Variant, phase: Phase) -> Variant {
        Variant {
            workgroup: self.workgroup.unwrap_or(variant.workgroup),
            head_tile: self.head_tile.unwrap_or(variant.head_tile),
            token_tile: match phase {
                Phase::Decode => 1,
                Phase::Prefill => self.token_tile.unwrap_or(variant.token_tile),
            },
            slot_quads: self.slot_quads.unwrap_or(variant.slot_quads),
            channel_quads: self.channel_quads.unwrap_or(variant.channel_quads),
            reduction: self.reduction.unwrap_or(variant.reduction),
            arithmetic: self.arithmetic.unwrap_or(variant.arithmetic),
        }
    }
}

/// What is to be exported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The shape.
    pub shape: Shape,
    /// The pairs.
    pub pairs: Vec<Pair>,
    /// Names of kernels; empty for all.
    pub kernels: Vec<String>,
    /// Phases of attention.
    pub phases: Vec<Phase>,
    /// The type of new rows.
    pub rows: FloatType,
    /// The type of queries.
    pub queries: FloatType,
    /// The type of outputs.
    pub outputs: FloatType,
    /// Variants of attention.
    pub tweaks: Tweaks,
}

/// One module to export.
#[derive(Debug, Clone)]
pub struct Module {
    /// Its name, which is a file name too: letters, digits, `_` and `-`.
    pub name: String,
    /// The kernel.
    pub kernel: &'static str,
    /// What it does, in one sentence.
    pub what: String,
    /// The text.
    pub composer: Composer,
    /// The kernel's bindings.
    pub bindings: &'static [Binding],
    /// How many workgroups.
    pub dispatch: Dispatch,
    /// Geometry of the pages that it reads or writes, by the prefix of their names: `side`, `src`, `k`, `v`.
    pub pages: Vec<(&'static str, PageLayout)>,
    /// The variant, of attention.
    pub variant: Option<Variant>,
}

/// A side's name as file names have it: `int4c(16)` is `int4c16`.
pub(super) fn plain(side: Side) -> String {
    let keep = |c: &char| c.is_ascii_alphanumeric();
    side.to_string().chars().filter(keep).collect()
}

impl Choice {
    /// All kernels, both phases, f32 rows, queries and outputs, portable variants.
    pub fn new(shape: Shape, pairs: Vec<Pair>) -> Choice {
        Choice {
            shape,
            pairs,
            kernels: Vec::new(),
            phases: vec![Phase::Decode, Phase::Prefill],
            rows: FloatType::F32,
            queries: FloatType::F32,
            outputs: FloatType::F32,
            tweaks: Tweaks::default(),
        }
    }

    /// What a module's name says of a side: its name, and its head_dim where keys and values differ.
    pub(super) fn side_name(&self, page: &PageLayout) -> String {
        let shape = &self.shape;
        let name = plain(page.side);
        if shape.k_head_dim == shape.v_head_dim {
            name
        } else {
            format!("{name}-d{}", page.head_dim)
        }
    }

    /// Packs new rows into pages of a side that is not per channel.
    pub fn quantize(&self, page: &PageLayout) -> Module {
        let units = match page.side.layout {
            crate::scales::ScaleLayout::PerBlock => {
                page.heads * page.head_dim / crate::scales::BLOCK_CHANNELS
            }
            _ => page.heads,
        };
        let rows = match self.rows {
            FloatType::F32 => "",
            FloatType::F16 => "-f16rows",
        };
        Module {
            name: format!("quantize-{}{rows}", self.side_name(page)),
            kernel: quantize::LISTED.name,
            what: format!("packs new rows into pages of {}", page.side),
            composer: quantize::composer(page, &Source::from(self.rows)),
            bindings: quantize::BINDINGS,
            dispatch: Dispatch::new(Counts::Invocations, [field("runs"), number(units)]),
            pages: vec![("side", *page)],
            variant: None,
        }
    }

    /// Packs whole token groups of a per-channel side from f16 pages.
    pub fn quantize_group(&self, page: &PageLayout, waiting: &PageLayout) -> Module {
        Module {
            name: format!("quantize_group-{}", self.side_name(page)),
            kernel: quantize_group::LISTED.name,
            what: format!(
                "packs whole groups of tokens, which wait in {} pages, into pages of {}",
                waiting.side, page.side
            ),
            composer: quantize_group::composer(page, waiting),
            bindings: quantize_group::BINDINGS,
            dispatch: Dispatch::new(
                Counts::Invocations,
                [field("runs"), number(page.heads), number(page.head_words)],
            ),
            pages: vec![("side", *page), ("src", *waiting)],
            variant: None,
        }
    }

    /// Reads pages back into f32 rows.
    pub fn dequantize(&self, page: &PageLayout) -> Module {
        Module {
            name: format!("dequantize-{}", self.side_name(page)),
            kernel: dequantize::LISTED.name,
            what: format!("reads pages of {} back into f32 rows", page.side),
            composer: dequantize::composer(page),
            bindings: dequantize::BINDINGS,
            dispatch: Dispatch::new(
                Counts::Invocations,
                [field("runs"), number(page.heads * page.head_dim / 4)],
            ),
            pages: vec![("side", *page)],
            variant: None,
        }
    }

    /// Attention over ranges of pages.
    ///
    /// # Errors
    /// Those of [`Variant::check`] and [`heads_ratio`].
    pub fn attention_split(&self, k: &PageLayout, v: &PageLayout, phase: Phase) -> Result<Module> {
        let ratio = heads_ratio(self.shape.q_heads, self.shape.kv_heads)?;
        let portable = Variant::new([k, v], ratio, phase == Phase::Prefill, false);
        let mut variant = self.tweaks.apply(portable, phase);
        variant.arithmetic = variant.arithmetic.for_side(k.side);
        variant.check([k, v])?;
        let mut name = format!(
            "attention_split-{}-{}-{phase}",
            self.side_name(k),
            self.side_name(v)
        );
        if variant.reduction == Reduction::Subgroup {
            name += "-subgroup";
        }
        match variant.arithmetic {
            Arithmetic::F32 => {}
            Arithmetic::F16 => name += "-f16",
            Arithmetic::Packed => name += "-packed",
        }
        if self.queries == FloatType::F16 {
            name += "-f16q";
        }
        let mut dispatch = Dispatch::new(Counts::Workgroups, [field("items")]);
        dispatch.z = self.shape.kv_heads * ratio.div_ceil(variant.head_tile);
        Ok(Module {
            name,
            kernel: attention_split::LISTED.name,
            what: format!(
                "attention over ranges of pages, K in {} and V in {}, into partials",
                k.side, v.side
            ),
            composer: attention_split::composer(k, v, ratio, variant, self.queries),
            bindings: attention_split::BINDINGS,
            dispatch,
            pages: vec![("k", *k), ("v", *v)],
            variant: Some(variant),
        })
    }

    /// Combines partials.
    pub fn attention_merge(&self) -> Module {
        let float = match self.outputs {
            FloatType::F32 => "f32",
            FloatType::F16 => "f16",
        };
        Module {
            name: format!("attention_merge-{float}"),
            kernel: attention_merge::LISTED.name,
            what: format!("combines partials into {float} outputs and the LSE"),
            composer: attention_merge::composer(self.shape.v_head_dim, self.outputs),
            bindings: attention_merge::BINDINGS,
            dispatch: Dispatch::new(Counts::Workgroups, [field("rows")]),
            pages: Vec::new(),
            variant: None,
        }
    }

    /// Finds the largest magnitude of rows.
    pub fn amax(&self) -> Module {
        let rows = match self.rows {
            FloatType::F32 => "f32",
            FloatType::F16 => "f16",
        };
        Module {
            name: format!("amax-{rows}"),
            kernel: amax::LISTED.name,
            what: format!("finds the largest finite magnitude of {rows} rows"),
            composer: amax::composer(self.rows),
            bindings: amax::BINDINGS,
            dispatch: Dispatch::new(
                Counts::Invocations,
                [
                    field("tokens"),
                    field("heads"),
                    divided("head_dim", amax::PER_INVOCATION),
                ],
            ),
            pages: Vec::new(),
            variant: None,
        }
    }

    /// Makes per-tensor scales of a side from largest magnitudes.
    pub fn tensor_scale(&self, side: Side) -> Module {
        Module {
            name: format!("tensor_scale-{}", plain(side)),
            kernel: tensor_scale::LISTED.name,
            what: format!("makes the per-tensor scales of {side} from largest magnitudes"),
            composer: tensor_scale::composer(side.element),
            bindings: tensor_scale::BINDINGS,
            dispatch: Dispatch::new(Counts::Invocations, [field("slots")]),
            pages: Vec::new(),
            variant: None,
        }
    }

    /// The modules that one pair takes in one phase, in the order in which a step runs them: those of tokens that wait
    /// for their group too.
    ///
    /// # Errors
    /// What does not fit the shape.
    pub fn of_pair(&self, pair: Pair, phase: Phase) -> Result<Vec<Module>> {
        let mut modules = Vec::new();
        for (side, value) in [(pair.k, false), (pair.v, true)] {
            let page = self.shape.page(side, value)?;
            if side.layout == crate::scales::ScaleLayout::PerTensor {
                modules.push(self.amax());
                modules.push(self.tensor_scale(side));
            }
            if side.waits(0) {
                let waiting = self.shape.page(Side::F16, value)?;
                modules.push(self.quantize(&waiting));
                modules.push(self.quantize_group(&page, &waiting));
                modules.push(self.dequantize(&waiting));
            } else {
                modules.push(self.quantize(&page));
            }
            modules.push(self.dequantize(&page));
        }
        for (k, v) in self.kinds(pair) {
            modules.push(self.attention_split(
                &self.shape.page(k, false)?,
                &self.shape.page(v, true)?,
                phase,
            )?);
        }
        modules.push(self.attention_merge());
        Ok(modules)
    }

    /// The kinds of ranges that a sequence of a pair has: packed, and with the sides whose tokens wait in f16.
    pub fn kinds(&self, pair: Pair) -> Vec<(Side, Side)> {
        let states = |side: Side| {
            if side.waits(0) {
                vec![side, Side::F16]
            } else {
                vec![side]
            }
        };
        let group = |side: Side| side.layout.token_group();
        let mut kinds = Vec::new();
        for k in states(pair.k) {
            for v in states(pair.v) {
                // The side with the shorter group is packed at least as far: it never waits alone.
                let k_alone = k == Side::F16 && pair.k.waits(0) && v == pair.v && pair.v.waits(0);
                let v_alone = v == Side::F16 && pair.v.waits(0) && k == pair.k && pair.k.waits(0);
                if k_alone && group(pair.k) <= group(pair.v) || v_alone && group(pair.v) <= group(pair.k) {
                    continue;
                }
                kinds.push((k, v));
            }
        }
        kinds
    }

    pub(super) fn wants(&self, kernel: &str) -> bool {
        self.kernels.is_empty() || self.kernels.iter().any(|name| name == kernel)
    }

    /// Every module that was chosen, each once, by kernel and name.
    ///
    /// # Errors
    /// [`Error::Usage`] for an unknown kernel and for kernels that none of the pairs takes; what does not fit the shape.
    pub fn modules(&self) -> Result<Vec<Module>> {
        let names = kernel_names();
        if let Some(unknown) = self.kernels.iter().find(|name| !names.contains(&name.as_str())) {
            return Err(Error::Usage {
                asked: format!("kernel `{unknown}`"),
                reason: "there is no such kernel".to_owned(),
                advice: format!("choose from {}", names.join(", ")),
            });
        }
        let mut all = BTreeMap::new();
        let mut add = |module: Module| {
            let place = names.iter().position(|name| *name == module.kernel);
            all.entry((place, module.name.clone())).or_insert(module);
        };
        for &pair in &self.pairs {
            for &phase in &self.phases {
                for module in self.of_pair(pair, phase)? {
                    add(module);
                }
            }
        }
        for module in others() {
            add(module);
        }
        let chosen: Vec<Module> = all
            .into_values()
            .filter(|module| self.wants(module.kernel))
            .collect();
        let idle = |name: &&String| chosen.iter().all(|module| module.kernel != **name);
        if let Some(kernel) = self.kernels.iter().find(idle) {
            return Err(Error::Usage {
                asked: format!("kernel `{kernel}` for these pairs"),
                reason: "none of them takes it".to_owned(),
                advice: "quantize_group takes per-channel sides such as int4c, amax and tensor_scale take fp8; or leave \
                         --pairs out"
                    .to_owned(),
            });
        }
        Ok(chosen)
    }
}

/// The kernels that can be exported: those of the cache, of the transformer, and the plain reads.
pub fn kernel_names() -> Vec<&'static str> {
    let listed = kernels::ALL.iter().chain(&model::ALL).chain(&roof::ALL);
    listed.map(|kernel| kernel.name).collect()
}

/// The modules that depend on no pair: the transformer's, and the plain reads.
pub fn others() -> Vec<Module> {
    let find = |list: &'static [Listed], composer: &Composer| {
        list.iter()
            .find(|listed| listed.name == composer.kernel())
            .copied()
    };
    let module = |listed: Listed, name: String, what: &str, composer, dispatch| Module {
        name,
        kernel: listed.name,
        what: what.to_owned(),
        composer,
        bindings: listed.bindings,
        dispatch,
        pages: Vec::new(),
        variant: None,
    };
    let mut all = Vec::new();
    for (name, composer) in model::catalogue() {
        let Some(listed) = find(&model::ALL, &composer) else {
            continue;
        };
        let (what, dispatch) = model_dispatch(listed.name);
        all.push(module(
            listed,
            name.replace("_f32", "-f32").replace("_f16", "-f16"),
            what,
            composer,
            dispatch,
        ));
    }
    for (listed, size) in roof::TRIED {
        let vectors = roof::VECTORS as u32 * size;
        let dispatch = Dispatch::new(Counts::Workgroups, [divided("vectors", vectors)]);
        let what = "sums all words of a buffer: what plain reads reach, against which bandwidth is measured";
        all.push(module(
            listed,
            format!("{}-{size}", listed.name),
            what,
            roof::composer(&listed, size),
            dispatch,
        ));
    }
    all
}

/// What a kernel of the transformer does, and its dispatch.
fn model_dispatch(kernel: &str) -> (&'static str, Dispatch) {
    use Counts::{Invocations, Workgroups};
    let tile = model::TILE as u32;
    match kernel {
        "embed" => (
            "takes rows of a table",
            Dispatch::new(Invocations, [field("tokens"), divided("columns", 4)]),
        ),
        "norm" => (
            "layer norm without gain or bias",
            Dispatch::new(Workgroups, [field("rows")]),
        ),
        "rms_norm" => ("RMS norm with a gain", Dispatch::new(Workgroups, [field("rows")])),
        "matmul" => (
            "many rows times a weight",
            Dispatch::new(Workgroups, [divided("rows", tile), divided("columns", tile)]),
        ),
        "matvec" => (
            "few rows times a weight",
            Dispatch::new(Workgroups, [field("rows"), divided("columns", tile)]),
        ),
        "rope" => (
            "turns heads by their positions",
            Dispatch::new(
                Invocations,
                [field("tokens"), field("heads"), divided("head_dim", 2)],
            ),
        ),
        "activation" => ("GELU, tanh form", Dispatch::new(Invocations, [field("numbers")])),
        "swiglu" => (
            "a gated activation",
            Dispatch::new(Invocations, [field("numbers")]),
        ),
        _ => (
            "the sum of two tensors",
            Dispatch::new(Invocations, [field("numbers")]),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::TABLE;

    fn choice() -> Choice {
        let shape = Shape {
            kv_heads: 2,
            q_heads: 8,
            k_head_dim: 64,
            v_head_dim: 64,
            page_tokens: 64,
        };
        Choice::new(shape, TABLE.iter().map(|name| name.parse().unwrap()).collect())
    }

    #[test]
    fn names_are_file_names_and_every_kernel_has_a_module() {
        let modules = choice().modules().unwrap();
        let name = |m: &Module| {
            m.name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "_-".contains(c))
        };
        assert!(modules.iter().all(name));
        for module in &modules {
            let d = &module.dispatch;
            assert_eq!(Dispatch::parse(d.counts, &d.formula(), d.z).as_ref(), Some(d));
        }
        for kernel in kernel_names() {
            assert!(modules.iter().any(|m| m.kernel == kernel), "{kernel}");
        }
        let mut names: Vec<_> = modules.iter().map(|m| m.name.to_lowercase()).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), modules.len());
    }

    #[test]
    fn both_sides_wait_together_where_their_groups_are_alike() {
        let kinds = |name: &str| {
            let kinds = choice().kinds(name.parse().unwrap());
            kinds.iter().map(|(k, v)| format!("{k}/{v}")).collect::<Vec<_>>()
        };
        assert_eq!(kinds("int4"), ["int4/int4"]);
        assert_eq!(kinds("int4c/int4"), ["int4c/int4", "f16/int4"]);
        assert_eq!(kinds("int2c/int2c"), ["int2c/int2c", "f16/f16"]);
        assert_eq!(
            kinds("int4c(8)/int2c"),
            ["int4c(8)/int2c", "int4c(8)/f16", "f16/f16"]
        );
    }
}
