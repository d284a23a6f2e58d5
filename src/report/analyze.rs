//! The tables and the picture of formats on given tensors.

use super::heat_map::{HeatMap, Panel};
use super::table::{digits, plain, right_aligned};
use crate::analyze::{AnalyzeRow, Which};

/// One tensor, or one layer of it: rows that differ in their format alone.
fn blocks(rows: &[AnalyzeRow]) -> Vec<&[AnalyzeRow]> {
    rows.chunk_by(|a, b| (&a.tensor, a.layer) == (&b.tensor, b.layer))
        .collect()
}

/// Formats in the order of the rows, each once.
fn sides(rows: &[AnalyzeRow]) -> Vec<&str> {
    let mut sides: Vec<&str> = Vec::new();
    for row in rows {
        if !sides.contains(&row.side.as_str()) {
            sides.push(&row.side);
        }
    }
    sides
}

fn letter(which: Option<Which>) -> &'static str {
    match which {
        Some(Which::K) => "K",
        Some(Which::V) => "V",
        None => "-",
    }
}

/// The file in two tables: each tensor with its outliers and the relative L2 error of every format; each format over all
/// tensors of a side. Notes below.
pub fn table(rows: &[AnalyzeRow]) -> String {
    let sides = sides(rows);
    let mut header = vec!["tensor", "layer", "side", "tokens x heads x d", "outlier"];
    header.extend(&sides);
    let mut tensors = plain(&header);
    for block in blocks(rows) {
        let first = &block[0];
        let mut cells = vec![
            first.tensor.clone(),
            first.layer.map_or("-".to_owned(), |layer| layer.to_string()),
            letter(first.which).to_owned(),
            format!("{} x {} x {}", first.tokens, first.heads, first.head_dim),
            first.outlier_ratio.map_or("-".to_owned(), digits),
        ];
        for side in &sides {
            let row = block.iter().find(|row| row.side == *side);
            cells.push(row.map_or("-".to_owned(), |row| digits(row.relative_l2)));
        }
        tensors.add_row(cells);
    }
    right_aligned(&mut tensors, 1..header.len());

    let mut formats = plain(&[
        "side",
        "format",
        "bits",
        "relative L2",
        "largest error",
        "cache bytes",
        "tensors",
    ]);
    for (which, side) in kinds(rows)
        .iter()
        .flat_map(|&which| sides.iter().map(move |side| (which, *side)))
    {
        let of: Vec<_> = rows
            .iter()
            .filter(|row| row.which == which && row.side == side)
            .collect();
        let Some(first) = of.first() else { continue };
        let largest = of.iter().map(|row| row.largest_error).fold(0.0, f64::max);
        formats.add_row([
            letter(which).to_owned(),
            side.to_owned(),
            digits(first.bits_per_number),
            digits(pooled(&of)),
            digits(largest),
            of.iter().map(|row| row.cache_bytes).sum::<u64>().to_string(),
            of.len().to_string(),
        ]);
    }
    right_aligned(&mut formats, 2..7);
    let mut text = format!(
        "Relative L2 error of each format:\n\n{}\n\nOver all tensors of a side:\n\n{}\n\n",
        tensors.trim_fmt(),
        formats.trim_fmt()
    );
    for note in notes(rows) {
        text += &format!("- {note}\n");
    }
    text
}

fn kinds(rows: &[AnalyzeRow]) -> Vec<Option<Which>> {
    [Some(Which::K), Some(Which::V), None]
        .into_iter()
        .filter(|which| rows.iter().any(|row| row.which == *which))
        .collect()
}

/// The relative L2 of all numbers together.
fn pooled(rows: &[&AnalyzeRow]) -> f64 {
    let square = |value: f64| value * value;
    let error: f64 = rows.iter().map(|row| square(row.relative_l2 * row.l2_norm)).sum();
    let norm: f64 = rows.iter().map(|row| square(row.l2_norm)).sum();
    if norm > 0.0 { (error / norm).sqrt() } else { 0.0 }
}

fn notes(rows: &[AnalyzeRow]) -> Vec<String> {
    let mut notes = vec![
        "outlier: largest magnitude of the worst channel over the median of all channels' largest magnitudes.".to_owned(),
        "cache bytes: whole pages in use, unused slots, padding and the f16 page of an open group too.".to_owned(),
    ];
    let starts = |name: &str| rows.iter().any(|row| row.side.starts_with(name));
    if starts("fp8") {
        notes.push("fp8 scales are calibrated on each tensor itself (amax / 448).".to_owned());
    }
    if starts("int2") {
        notes.push("int2 is ternary: its codes are -1, 0 and 1.".to_owned());
    }
    let open = |row: &&AnalyzeRow| row.packed_tokens < row.tokens && row.packed_tokens > 0;
    if let Some(row) = rows.iter().find(open) {
        notes.push(format!(
            "The last group of a per-channel format stays in f16 until it is full, as in the cache: of {}, {} has {} of \
             {} tokens packed.",
            row.tensor, row.side, row.packed_tokens, row.tokens
        ));
    }
    let mut never: Vec<&str> = Vec::new();
    for row in rows.iter().filter(|row| row.packed_tokens == 0) {
        if !never.contains(&row.side.as_str()) {
            never.push(&row.side);
            notes.push(format!(
                "{}: {} of {} tokens has no full group, so its figures are those of f16.",
                row.side, row.tensor, row.tokens
            ));
        }
    }
    let saturated: u64 = rows.iter().map(|row| u64::from(row.saturated)).sum();
    if saturated > 0 {
        notes.push(format!(
            "{saturated} numbers saturated or had their scale clamped; --json says of which tensor and format."
        ));
    }
    notes
}

/// The relative L2 errors as a picture: a panel for K, for V and for tensors of neither.
pub fn picture(rows: &[AnalyzeRow], file: &str) -> HeatMap {
    let sides = sides(rows);
    let panels = kinds(rows).into_iter().map(|which| {
        let blocks: Vec<_> = blocks(rows)
            .into_iter()
            .filter(|block| block[0].which == which)
            .collect();
        Panel {
            title: match which {
                Some(which) => format!("{}, a row a layer", letter(Some(which))),
                None => "K or V, a row a tensor".to_owned(),
            },
            rows: (0_usize..)
                .zip(&blocks)
                .map(|(i, block)| block[0].layer.map_or(i.to_string(), |layer| layer.to_string()))
                .collect(),
            columns: sides.iter().map(|side| (*side).to_owned()).collect(),
            cells: blocks
                .iter()
                .map(|block| {
                    let figure = |side: &&str| Some(block.iter().find(|row| row.side == *side)?.relative_l2);
                    sides.iter().map(figure).collect()
                })
                .collect(),
        }
    });
    let shapes = rows.first().map_or(String::new(), |row| {
        format!(
            "{} tokens, {} KV heads of {} in the first tensor; largest outlier ratio {}",
            row.tokens,
            row.heads,
            row.head_dim,
            digits(
                rows.iter()
                    .filter_map(|row| row.outlier_ratio)
                    .fold(0.0, f64::max)
            )
        )
    });
    HeatMap {
        title: "Error of each format".to_owned(),
        notes: [file.to_owned(), shapes],
        figure: "relative L2 error".to_owned(),
        panels: panels.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analyze::{KvRows, Label, measure};

    fn rows() -> Vec<AnalyzeRow> {
        let mut rows = Vec::new();
        for layer in 0..2 {
            for which in [Which::K, Which::V] {
                let numbers: Vec<f32> = (0..20 * 16)
                    .map(|i| ((i * 37 + layer) % 101) as f32 - 50.0)
                    .collect();
                let label = Label {
                    tensor: format!("layers.{layer}.{}", letter(Some(which))),
                    layer: Some(layer),
                    which: Some(which),
                };
                for side in ["f16", "fp8", "int2", "int4c(8)", "int4c"] {
                    let rows_of = KvRows {
                        heads: 2,
                        head_dim: 8,
                        numbers: &numbers,
                    };
                    rows.push(measure(&label, rows_of, side.parse().unwrap()).unwrap());
                }
            }
        }
        rows
    }

    #[test]
    fn the_tables_have_a_line_a_tensor_and_a_line_a_format() {
        let rows = rows();
        let text = table(&rows);
        assert_eq!(
            text.lines().filter(|line| line.starts_with("| layers.")).count(),
            4,
            "{text}"
        );
        for which in ["K", "V"] {
            let lines = text
                .lines()
                .filter(|line| line.starts_with(&format!("| {which} ")));
            assert_eq!(lines.count(), 5, "{text}");
        }
        assert!(text.contains("int4c(8) has 16 of 20 tokens packed"), "{text}");
        assert!(
            text.contains("int4c: layers.0.K of 20 tokens has no full group"),
            "{text}"
        );
        assert!(text.contains("ternary") && text.contains("amax / 448"), "{text}");
        let first = digits(rows[2].relative_l2);
        let line = text.lines().find(|line| line.contains("layers.0.K")).unwrap();
        assert!(line.contains(&first), "{line}");
    }

    #[test]
    fn pooled_errors_weigh_by_the_numbers_own_size() {
        let rows = rows();
        let mut small = rows[2].clone();
        small.l2_norm = 0.0;
        small.relative_l2 = 0.9;
        // Squares and roots round; nothing else may change.
        assert!((pooled(&[&rows[2], &small]) - rows[2].relative_l2).abs() <= 1e-12);
        let both = pooled(&[&rows[2], &rows[0]]);
        assert!(rows[0].relative_l2 < both && both < rows[2].relative_l2);
    }

    #[test]
    fn the_picture_has_a_panel_a_side_and_a_row_a_layer() {
        let rows = rows();
        let map = picture(&rows, "x.safetensors");
        assert_eq!(map.panels.len(), 2);
        assert_eq!(map.panels[1].rows, ["0", "1"]);
        assert_eq!(map.panels[1].columns, ["f16", "fp8", "int2", "int4c(8)", "int4c"]);
        assert_eq!(map.panels[1].cells[1][2], Some(rows[17].relative_l2));
        // A format that a tensor has no room for is an empty cell.
        let map = picture(&rows[1..], "x.safetensors");
        assert_eq!(map.panels[0].cells[0][4], None);
    }
}
