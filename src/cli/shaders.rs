//! `kvpack shaders`: which kernels there are, and their files for other engines.

use std::path::PathBuf;

use clap::{Subcommand, ValueEnum, value_parser};
use comfy_table::{CellAlignment, Table, presets};
use kvpack::export::cases::default_tokens;
use kvpack::export::manifest::{CountsEntry, ModuleEntry};
use kvpack::export::writers::ExportTarget;
use kvpack::export::{Choice, Destination, Export, Phase, Shape, Tweaks, kernel_names};
use kvpack::kernels::FloatType;
use kvpack::report::{csv, json};
use kvpack::spec::{Pair, Side, TABLE};
use kvpack::variant::{Arithmetic, Reduction};
use serde::Serialize;

use super::device::kernel_of;
use super::output::{Outputs, Progress, print};
use super::{Failure, usage};

/// What was asked.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// List the modules of a shape: bindings, workgroups, and what each needs of a device
    List(List),
    /// Write the modules of a shape in another engine's language, with a manifest, whole or not at all
    Export(ExportArgs),
}

impl Args {
    /// Lists or exports.
    pub fn run(self) -> Result<(), Failure> {
        match self.what {
            What::List(list) => list.run(),
            What::Export(export) => export.run(),
        }
    }
}

#[derive(clap::Args)]
struct List {
    #[command(flatten)]
    chosen: Chosen,
    /// Write the rows as JSON; - is standard output, in place of the table
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
    /// Write the rows as CSV; - is standard output, in place of the table
    #[arg(long, value_name = "FILE")]
    csv: Option<String>,
}

#[derive(clap::Args)]
struct ExportArgs {
    #[command(flatten)]
    chosen: Chosen,
    /// Language: wgsl (wgpu, naga), wgsl-browser, spirv, msl, hlsl or glsl
    #[arg(long, value_name = "TARGET")]
    to: ExportTarget,
    /// Folder to make; an earlier export there is replaced, anything else is refused
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Write golden vectors too, with every module that their cases run
    #[arg(long)]
    vectors: bool,
    /// Tokens of the longer of the two sequences of a case [default: a page and 3/4 of one, and 5]
    #[arg(long, value_name = "N", requires = "vectors", value_parser = value_parser!(u32).range(1..=65536))]
    vectors_tokens: Option<u32>,
}

/// Which modules, and for what shape.
#[derive(clap::Args)]
struct Chosen {
    /// Only this kernel; may be repeated [default: all]
    #[arg(long = "kernel", value_name = "KERNEL", value_parser = kernel)]
    kernels: Vec<String>,
    /// Cache formats, K/V or one name for both [default: the eight of the drift table]
    #[arg(long, visible_alias = "pair", value_name = "PAIR", value_delimiter = ',', default_values = TABLE, hide_default_value = true)]
    pairs: Vec<Pair>,
    /// KV heads
    #[arg(long, value_name = "N", default_value = "2", value_parser = value_parser!(u32).range(1..))]
    kv_heads: u32,
    /// Query heads of a KV head, 1 to 16 [default: 4]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=16))]
    group: Option<u32>,
    /// Query heads, in place of --group
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..), conflicts_with = "group")]
    q_heads: Option<u32>,
    /// Channels of a head
    #[arg(long, value_name = "D", default_value = "64", value_parser = value_parser!(u32).range(1..))]
    head_dim: u32,
    /// Channels of a value head [default: --head-dim]
    #[arg(long, value_name = "D", value_parser = value_parser!(u32).range(1..))]
    v_head_dim: Option<u32>,
    /// Tokens of a page [default: 64, or the longest group of the pairs]
    #[arg(long, value_name = "P", value_parser = value_parser!(u32).range(1..))]
    page_tokens: Option<u32>,
    /// Attention of one new token a sequence, of many, or a module for each
    #[arg(long, value_enum, default_value_t = PhaseArg::Both)]
    phase: PhaseArg,
    /// Type of new rows of keys and values
    #[arg(long, value_enum, default_value_t = Float::F32)]
    rows: Float,
    /// Type of queries
    #[arg(long, value_enum, default_value_t = Float::F32)]
    queries: Float,
    /// Type of attention's outputs
    #[arg(long, value_enum, default_value_t = Float::F32)]
    outputs: Float,
    #[command(
        flatten,
        next_help_heading = "Variants of attention_split [default: portable]"
    )]
    variant: VariantArgs,
}

#[derive(clap::Args)]
struct VariantArgs {
    /// Invocations of a workgroup
    #[arg(long, value_name = "N")]
    workgroup: Option<u32>,
    /// Query heads of a workgroup
    #[arg(long, value_name = "N")]
    head_tile: Option<u32>,
    /// Query tokens of a workgroup, in prefill
    #[arg(long, value_name = "N")]
    token_tile: Option<u32>,
    /// Runs of four slots that an invocation scores at a time: 1, 2 or 4
    #[arg(long, value_name = "N")]
    slot_quads: Option<u32>,
    /// Channel quads that an invocation sums at a time: 2 or 4
    #[arg(long, value_name = "N")]
    channel_quads: Option<u32>,
    /// How one number of a row is found; subgroup needs the feature subgroups
    #[arg(long, value_enum)]
    reduction: Option<ReductionArg>,
    /// What scores are computed in, where K's format allows it; f16 needs the feature shader-f16
    #[arg(long, value_enum)]
    arithmetic: Option<ArithmeticArg>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum PhaseArg {
    Decode,
    Prefill,
    Both,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Float {
    F32,
    F16,
}

impl From<Float> for FloatType {
    fn from(float: Float) -> FloatType {
        match float {
            Float::F32 => FloatType::F32,
            Float::F16 => FloatType::F16,
        }
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ReductionArg {
    Workgroup,
    Subgroup,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ArithmeticArg {
    F32,
    F16,
    Packed,
}

/// The name of a kernel that can be exported.
fn kernel(text: &str) -> kvpack::Result<String> {
    kernel_of(&kernel_names(), text)
}

impl Chosen {
    fn choice(self) -> Result<Choice, Failure> {
        let q_heads = match (self.q_heads, self.group) {
            (Some(heads), _) => heads,
            (None, group) => {
                let group = group.unwrap_or(4);
                self.kv_heads.checked_mul(group).ok_or_else(|| {
                    let asked = format!("--kv-heads {} --group {group}", self.kv_heads);
                    usage(asked, "there are too many heads", "use fewer KV heads")
                })?
            }
        };
        let groups = self.pairs.iter().flat_map(|pair| [pair.k, pair.v]);
        let longest = groups.map(|side: Side| side.layout.token_group()).max();
        let variant = self.variant;
        let tweaks = Tweaks {
            workgroup: variant.workgroup,
            head_tile: variant.head_tile,
            token_tile: variant.token_tile,
            slot_quads: variant.slot_quads,
            channel_quads: variant.channel_quads,
            reduction: variant.reduction.map(|reduction| match reduction {
                ReductionArg::Workgroup => Reduction::Workgroup,
                ReductionArg::Subgroup => Reduction::Subgroup,
            }),
            arithmetic: variant.arithmetic.map(|arithmetic| match arithmetic {
                ArithmeticArg::F32 => Arithmetic::F32,
                ArithmeticArg::F16 => Arithmetic::F16,
                ArithmeticArg::Packed => Arithmetic::Packed,
            }),
        };
        Ok(Choice {
            shape: Shape {
                kv_heads: self.kv_heads,
                q_heads,
                k_head_dim: self.head_dim,
                v_head_dim: self.v_head_dim.unwrap_or(self.head_dim),
                page_tokens: self.page_tokens.unwrap_or(longest.unwrap_or(1).max(64)),
            },
            pairs: self.pairs,
            kernels: self.kernels,
            phases: match self.phase {
                PhaseArg::Decode => vec![Phase::Decode],
                PhaseArg::Prefill => vec![Phase::Prefill],
                PhaseArg::Both => vec![Phase::Decode, Phase::Prefill],
            },
            rows: self.rows.into(),
            queries: self.queries.into(),
            outputs: self.outputs.into(),
            tweaks,
        })
    }
}

fn compose(choice: &Choice, target: ExportTarget, vectors: Option<u32>) -> Result<Export, Failure> {
    let progress = Progress::new();
    let export = Export::compose(choice, target, vectors, &mut |done, of, name| {
        progress.show(done, of, name)
    });
    progress.finish();
    Ok(export?)
}

/// A line of the list.
#[derive(Debug, Serialize)]
struct Row {
    module: String,
    kernel: String,
    bindings: usize,
    workgroup_size: u32,
    workgroup_bytes: u32,
    dispatch: String,
    portable: bool,
    needs: String,
}

impl Row {
    fn of(module: &ModuleEntry) -> Row {
        let mut dispatch = match module.dispatch.counts {
            CountsEntry::Workgroups => module.dispatch.formula.clone(),
            CountsEntry::Invocations => {
                format!("ceil({} / {})", module.dispatch.formula, module.workgroup_size[0])
            }
        };
        if module.dispatch.z > 1 {
            dispatch += &format!(", z = {}", module.dispatch.z);
        }
        Row {
            module: module.name.clone(),
            kernel: module.kernel.clone(),
            bindings: module.bindings.len(),
            workgroup_size: module.workgroup_size.iter().product(),
            workgroup_bytes: module.workgroup_bytes,
            dispatch,
            portable: module.portable,
            needs: module.features.join(" "),
        }
    }
}

fn table(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header([
        "module",
        "bindings",
        "invocations",
        "workgroup bytes",
        "workgroups",
        "needs",
    ]);
    for row in rows {
        let needs = if row.portable {
            "portable".to_owned()
        } else {
            row.needs.clone()
        };
        table.add_row([
            row.module.clone(),
            row.bindings.to_string(),
            row.workgroup_size.to_string(),
            row.workgroup_bytes.to_string(),
            row.dispatch.clone(),
            needs,
        ]);
    }
    for column in 1..=3 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    format!(
        "{}\n\n- portable: runs within WebGPU's default limits and without features.\n\
         - workgroups: folded into x and y, at most 65,535 each; params are fields of the module's uniform.\n",
        table.trim_fmt()
    )
}

impl List {
    fn run(self) -> Result<(), Failure> {
        let outputs = Outputs::check(&[("--json", self.json.as_deref()), ("--csv", self.csv.as_deref())])?;
        let export = compose(&self.chosen.choice()?, ExportTarget::Wgsl, None)?;
        let rows: Vec<Row> = export.manifest.modules.iter().map(Row::of).collect();
        let shown = match outputs.take_stdout() {
            true => Ok(()),
            false => print(&table(&rows)),
        };
        // One report that fails does not keep back the others.
        let written = [
            shown,
            outputs.write("--json", || json::to_bytes(&rows)),
            outputs.write("--csv", || csv::to_bytes(&rows)),
        ];
        written.into_iter().collect()
    }
}

impl ExportArgs {
    fn run(self) -> Result<(), Failure> {
        let destination = Destination::check(&self.out)?;
        let choice = self.chosen.choice()?;
        let tokens = || default_tokens(choice.shape.page_tokens);
        let vectors = self.vectors.then(|| self.vectors_tokens.unwrap_or_else(tokens));
        let export = compose(&choice, self.to, vectors)?;
        destination
            .replace(|folder| export.write(folder))
            .map_err(|error| Failure::Write {
                to: format!("`{}`", self.out.display()),
                error,
            })?;
        let modules = export.manifest.modules.len();
        let cases = match export.cases.len() {
            0 => String::new(),
            n => format!(", {n} cases of golden vectors"),
        };
        let portable = export.manifest.modules.iter().filter(|m| m.portable).count();
        print(&format!(
            "{modules} modules as {} in {}, {portable} of them portable{cases}; {} says what each binds\n",
            self.to,
            self.out.display(),
            self.out.join(kvpack::export::manifest::FILE).display()
        ))
    }
}
