//! Cases of the modules that take no pages: the transformer's, and the plain reads.

use super::super::modules::Module;
use super::side_rows::float_words;
use super::{Case, NumberType, POISON, Param};
use crate::error::{Error, Result};
use crate::kernels::FloatType;
use crate::model::EPSILON;
use crate::rope::{Rope, RopePairing, RopeScaling};
use crate::validate::Random;
use crate::validate::formulas;

/// Rows and columns: more than a tile of `matmul`, and no multiple of one.
const ROWS: u32 = 37;
const COLUMNS: u32 = 48;
/// Outputs of products.
const OUTPUTS: u32 = 45;
/// Vectors of plain reads: several workgroups, the last not full.
const VECTORS: u32 = 50_000;

pub(super) fn case(module: &Module) -> Result<Case> {
    let mut case = Case::new(module.name.clone(), module.what.clone());
    let mut random = Random::new(17);
    let mut numbers = |count: u32| -> Vec<f32> { (0..count).map(|_| random.normal()).collect() };
    let float = if module.name.ends_with("-f16") {
        FloatType::F16
    } else {
        FloatType::F32
    };
    // A row is a token in the middle of a text; matvec is for few of them.
    let rows = if module.kernel == "matvec" { 3 } else { ROWS };
    let count = rows * COLUMNS;
    let axes = "[row, column]";
    let x = numbers(count);
    let f32s = |case: &mut Case, name: &str, shape: &[u32], axes: &str, what: &str, values: &[f32]| {
        case.data(
            name,
            NumberType::F32,
            shape,
            axes,
            what,
            float_words(values, FloatType::F32).1,
        );
    };
    let output = |case: &mut Case, shape: &[u32], axes: &str| {
        case.filled("output", NumberType::F32, shape, axes, "output", POISON);
    };
    let u32s = |pairs: &[(&'static str, u32)]| -> Vec<(&'static str, Param)> {
        pairs
            .iter()
            .map(|&(name, value)| (name, Param::U32(value)))
            .collect()
    };
    let norm = vec![
        ("rows", Param::U32(rows)),
        ("columns", Param::U32(COLUMNS)),
        ("epsilon", Param::F32(EPSILON as f32)),
    ];
    let wanted = match module.kernel {
        "embed" => {
            // Ids below the first row and above the last of this part of the table are left alone.
            let table_rows = 11;
            let ids: Vec<u32> = (0..rows).map(|i| 5 + i * 7 % table_rows).collect();
            let table = numbers(table_rows * COLUMNS);
            let (kind, words) = float_words(&formulas::by_quads(&table, COLUMNS as usize), float);
            case.data(
                "ids",
                NumberType::U32,
                &[rows],
                "[token]",
                "rows of the table to take",
                ids.clone(),
            );
            let what = "rows 5 to 15 of a table, four columns of all rows after another";
            case.data(
                "weight",
                kind,
                &[COLUMNS / 4, table_rows, 4],
                "[column quad, row, 4]",
                what,
                words,
            );
            output(&mut case, &[rows, COLUMNS], "[token, column]");
            let params = u32s(&[
                ("tokens", rows),
                ("columns", COLUMNS),
                ("first_row", 5),
                ("rows", table_rows),
            ]);
            case.step(
                module,
                &params,
                &[("ids", "ids"), ("weight", "weight"), ("output", "output")],
            )?;
            let ids: Vec<u32> = ids.iter().map(|id| id - 5).collect();
            formulas::embed(&ids, &table, COLUMNS as usize, float)
        }
        "norm" => {
            f32s(&mut case, "x", &[rows, COLUMNS], axes, "rows", &x);
            output(&mut case, &[rows, COLUMNS], axes);
            case.step(module, &norm, &[("x", "x"), ("output", "output")])?;
            formulas::norm(&x, COLUMNS as usize, None)
        }
        "rms_norm" => {
            let gain = numbers(COLUMNS);
            f32s(&mut case, "x", &[rows, COLUMNS], axes, "rows", &x);
            f32s(&mut case, "gain", &[COLUMNS], "[column]", "gain", &gain);
            output(&mut case, &[rows, COLUMNS], axes);
            case.step(
                module,
                &norm,
                &[("x", "x"), ("gain", "gain"), ("output", "output")],
            )?;
            formulas::norm(&x, COLUMNS as usize, Some(&gain))
        }
        "matmul" | "matvec" => {
            // The outputs in two parts; the second begins off a tile.
            let weight = numbers(OUTPUTS * COLUMNS);
            f32s(&mut case, "x", &[rows, COLUMNS], axes, "rows", &x);
            output(&mut case, &[rows, OUTPUTS], "[row, output]");
            for (name, first, end) in [("weight", 0, 9), ("weight_rest", 9, OUTPUTS)] {
                let part = &weight[(first * COLUMNS) as usize..(end * COLUMNS) as usize];
                let (kind, words) = float_words(&formulas::by_quads(part, COLUMNS as usize), float);
                let what = "a part of a weight, four columns of all its outputs after another";
                let shape = [COLUMNS / 4, end - first, 4];
                case.data(name, kind, &shape, "[column quad, output, 4]", what, words);
                let params = u32s(&[
                    ("rows", rows),
                    ("inner", COLUMNS),
                    ("columns", end - first),
                    ("first_column", first),
                    ("output_columns", OUTPUTS),
                ]);
                case.step(
                    module,
                    &params,
                    &[("x", "x"), ("weight", name), ("output", "output")],
                )?;
            }
            formulas::product(&x, &weight, COLUMNS as usize, float)
        }
        "rope" => {
            let (heads, head_dim, first_position) = (3, COLUMNS / 3, 5);
            let axes = "[token, head, channel]";
            let shape = [rows, heads, head_dim];
            f32s(&mut case, "x", &shape, axes, "heads", &x);
            for pairing in [RopePairing::Halves, RopePairing::Neighbours] {
                let rope = Rope {
                    theta: 10_000.0,
                    pairing,
                    scaling: RopeScaling::None,
                };
                let halves = pairing == RopePairing::Halves;
                let table = rope.table(head_dim, first_position + rows);
                let name = if halves { "output" } else { "output_neighbours" };
                if halves {
                    let turns: Vec<f32> = bytemuck::cast_slice(&table.turns).to_vec();
                    let shape = [first_position + rows, head_dim / 2, 2];
                    let what = "turns of each position";
                    f32s(
                        &mut case,
                        "turns",
                        &shape,
                        "[position, pair, (cos, sin)]",
                        what,
                        &turns,
                    );
                }
                case.filled(name, NumberType::F32, &shape, axes, "heads turned", POISON);
                let params = u32s(&[
                    ("tokens", rows),
                    ("heads", heads),
                    ("head_dim", head_dim),
                    ("first_position", first_position),
                    ("halves", u32::from(halves)),
                ]);
                case.step(
                    module,
                    &params,
                    &[("x", "x"), ("turns", "turns"), ("output", name)],
                )?;
                let turned = |i: u32| {
                    let (row, channel) = (i / head_dim, i % head_dim);
                    let stored = |c: u32| f64::from(x[(row * head_dim + c) as usize]);
                    table.turned(first_position + row / heads, channel, stored)
                };
                // Two products and their sum.
                let wanted: Vec<[f64; 2]> = (0..count).map(|i| [turned(i), 1e-6]).collect();
                case.bound(name, &[module.kernel], "in f64", &wanted);
            }
            return Ok(case);
        }
        "activation" => {
            f32s(&mut case, "x", &[count], "[number]", "numbers", &x);
            output(&mut case, &[count], "[number]");
            case.step(
                module,
                &u32s(&[("numbers", count)]),
                &[("x", "x"), ("output", "output")],
            )?;
            formulas::activation(&x)
        }
        "swiglu" | "residual" => {
            let y = numbers(count);
            let names = if module.kernel == "swiglu" {
                ["gate", "up"]
            } else {
                ["x", "y"]
            };
            f32s(&mut case, names[0], &[count], "[number]", "numbers", &x);
            f32s(&mut case, names[1], &[count], "[number]", "numbers", &y);
            output(&mut case, &[count], "[number]");
            let bindings = [(names[0], names[0]), (names[1], names[1]), ("output", "output")];
            case.step(module, &u32s(&[("numbers", count)]), &bindings)?;
            match module.kernel {
                "swiglu" => formulas::swiglu(&x, &y),
                _ => formulas::residual(&x, &y),
            }
        }
        "read_stride" | "read_four" | "read_block" => return read(module),
        other => {
            return Err(Error::Usage {
                asked: format!("golden vectors of `{other}`"),
                reason: "it has none".to_owned(),
                advice: "add them to export::cases::other".to_owned(),
            });
        }
    };
    case.bound("output", &[module.kernel], "in f64", &wanted);
    Ok(case)
}

/// The plain reads: a sum an invocation.
fn read(module: &Module) -> Result<Case> {
    let mut case = Case::new(module.name.clone(), module.what.clone());
    let mut random = Random::new(u64::from(VECTORS));
    let source: Vec<u32> = (0..VECTORS * 4).map(|_| random.bits() as u32).collect();
    let size: u32 = module
        .name
        .rsplit('-')
        .next()
        .and_then(|size| size.parse().ok())
        .unwrap_or(0);
    let groups = module
        .dispatch
        .workgroups(module.kernel, size, |_| Some(VECTORS))?[0];
    let mut sums = vec![0_u32; (groups * size) as usize];
    let block = VECTORS.div_ceil(groups);
    for vector in 0..VECTORS {
        let invocation = match module.kernel {
            "read_block" => vector / block * size + vector % block % size,
            _ => vector % (groups * size),
        };
        let sum = source[(vector * 4) as usize..][..4]
            .iter()
            .fold(0, |a: u32, &b| a.wrapping_add(b));
        let total = &mut sums[invocation as usize];
        *total = total.wrapping_add(sum);
    }
    case.data(
        "source",
        NumberType::U32,
        &[VECTORS, 4],
        "[vector, 4]",
        "random words",
        source,
    );
    case.filled(
        "sums",
        NumberType::U32,
        &[groups * size],
        "[invocation]",
        "a sum an invocation",
        POISON,
    );
    case.step(
        module,
        &[("vectors", Param::U32(VECTORS))],
        &[("source", "source"), ("sums", "sums")],
    )?;
    case.bits(
        "sums",
        &[module.kernel],
        "wrapping sums of the words that each invocation reads",
        sums,
        Vec::new(),
    );
    Ok(case)
}
