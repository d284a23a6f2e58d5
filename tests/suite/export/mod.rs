//! `kvpack shaders`: files in every language through the checkers that these machines have, manifests against naga and
//! the host's structs, the folder in the repository, wrong manifests.

mod command;
mod languages;
mod manifests;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kvpack::Error;
use kvpack::export::manifest::{BindingKind, FieldType, Manifest, ModuleEntry};
use kvpack::export::writers::ExportTarget;
use kvpack::export::{Choice, Export, Module, Phase, Shape, Tweaks, kernel_names};
use kvpack::kernels::attention_merge::AttentionMerge;
use kvpack::kernels::attention_split::AttentionSplit;
use kvpack::kernels::dequantize::Dequantize;
use kvpack::kernels::quantize::{Quantize, Source};
use kvpack::kernels::quantize_group::QuantizeGroup;
use kvpack::kernels::{FloatType, WG_SIZE};
use kvpack::pages::PageLayout;
use kvpack::spec::{Pair, Side, TABLE};
use kvpack::variant::{Arithmetic, Reduction};
use kvpack::work::{SlotRun, Status};
use serde_json::{Value, json};

use crate::common;
use crate::shaders::{each, params_of, tint};

/// What the standalone folder is made of.
const STANDALONE: [&str; 7] = [
    "quantize",
    "quantize_group",
    "dequantize",
    "attention_split",
    "attention_merge",
    "amax",
    "tensor_scale",
];

fn choice(pairs: Vec<Pair>, [kv_heads, q_heads, k_head_dim, v_head_dim, page_tokens]: [u32; 5]) -> Choice {
    let shape = Shape {
        kv_heads,
        q_heads,
        k_head_dim,
        v_head_dim,
        page_tokens,
    };
    Choice::new(shape, pairs)
}

fn table() -> Vec<Pair> {
    TABLE.iter().map(|name| name.parse().unwrap()).collect()
}

/// The defaults of the command, every side at an odd shape, and the variants and types that need more.
fn choices() -> Vec<Choice> {
    let few: Vec<Pair> = ["int4", "fp4", "fp8", "int4c/int4"]
        .map(|name| name.parse().unwrap())
        .into();
    let attention = |tweaks: Tweaks, queries| Choice {
        kernels: vec!["attention_split".to_owned()],
        queries,
        tweaks,
        ..choice(few.clone(), [1, 4, 64, 64, 64])
    };
    let every = Side::all().into_iter().map(Pair::same).collect();
    vec![
        choice(table(), [2, 8, 64, 64, 64]),
        Choice {
            rows: FloatType::F16,
            outputs: FloatType::F16,
            phases: vec![Phase::Prefill],
            ..choice(every, [2, 6, 48, 16, 128])
        },
        attention(
            Tweaks {
                reduction: Some(Reduction::Subgroup),
                arithmetic: Some(Arithmetic::F16),
                ..Tweaks::default()
            },
            FloatType::F16,
        ),
        attention(
            Tweaks {
                arithmetic: Some(Arithmetic::Packed),
                ..Tweaks::default()
            },
            FloatType::F32,
        ),
    ]
}

fn export(choice: &Choice, target: ExportTarget) -> kvpack::Result<Export> {
    Export::compose(choice, target, None, &mut |_, _, _| ())
}

/// The files of all choices in one language, each with its entry, in a folder that lives as long as the first part.
fn written(target: ExportTarget) -> (tempfile::TempDir, Vec<(PathBuf, ModuleEntry)>) {
    let folder = tempfile::tempdir().unwrap();
    let mut all = Vec::new();
    for (number, choice) in choices().iter().enumerate() {
        let choice = match target {
            // GLSL has no 16-bit arithmetic.
            ExportTarget::Glsl if choice.tweaks.arithmetic == Some(Arithmetic::F16) => &Choice {
                tweaks: Tweaks {
                    arithmetic: None,
                    ..choice.tweaks
                },
                ..choice.clone()
            },
            _ => choice,
        };
        let export = export(choice, target).unwrap();
        for ((name, bytes), entry) in export.files.iter().zip(export.manifest.modules) {
            let path = folder.path().join(format!("{number}-{name}"));
            fs::write(&path, bytes).unwrap();
            all.push((path, entry));
        }
    }
    (folder, all)
}

/// Runs one of Debian's shader tools; a missing one is a failure with the command that mends it.
fn tool(name: &str, package: &str, arguments: &[&str], file: &Path) -> Result<(), String> {
    let run = Command::new(name).args(arguments).arg(file).output().unwrap_or_else(|e| {
        panic!("{name} cannot be started ({e}); it checks exported shaders. Run: apt-get install -y {package}")
    });
    match run.status.success() {
        true => Ok(()),
        false => Err(said(&run).chars().take(600).collect()),
    }
}

fn said(run: &Output) -> String {
    String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr)
}

fn named(item: &(PathBuf, ModuleEntry)) -> &str {
    item.0
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
}
