//! What the transformer's kernels compute, in f64, with the bound of each number: `[expected, bound]`.

use crate::kernels::FloatType;
use crate::model::EPSILON;

fn wide(v: &f32) -> f64 {
    f64::from(*v)
}

/// A number as weights of a type hold it.
pub(crate) fn rounded(value: f32, float: FloatType) -> f64 {
    match float {
        FloatType::F32 => value.into(),
        FloatType::F16 => half::f16::from_f32(value).into(),
    }
}

/// A weight `[row][column]` in the order in which kernels read it, `[column quad][row][4]`.
pub(crate) fn by_quads(values: &[f32], columns: usize) -> Vec<f32> {
    let rows = values.len() / columns;
    let quads = (0..columns / 4).flat_map(|quad| (0..rows).map(move |row| row * columns + 4 * quad));
    quads.flat_map(|at| &values[at..at + 4]).copied().collect()
}

/// Rows `ids` of a table. Copies; a driver may flush halves below 2^-14.
pub(crate) fn embed(ids: &[u32], table: &[f32], columns: usize, float: FloatType) -> Vec<[f64; 2]> {
    let flushed = if float == FloatType::F16 { 6.2e-5 } else { 0.0 };
    let rows = ids
        .iter()
        .flat_map(|&id| &table[id as usize * columns..][..columns]);
    rows.map(|&v| rounded(v, float))
        .map(|w| [w, if w.abs() < flushed { flushed } else { 0.0 }])
        .collect()
}

/// Layer norm, or with a gain RMS norm. Two sums of a row's terms, a square root and a division that may be 2.5 ulp off.
pub(crate) fn norm(x: &[f32], columns: usize, gain: Option<&[f32]>) -> Vec<[f64; 2]> {
    let normed = |row: &[f32]| -> Vec<[f64; 2]> {
        let count = row.len() as f64;
        let mean = match gain {
            None => row.iter().map(wide).sum::<f64>() / count,
            Some(_) => 0.0,
        };
        let variance = row.iter().map(|v| (wide(v) - mean).powi(2)).sum::<f64>() / count;
        let of = |(c, v): (usize, &f32)| {
            let gain = gain.map_or(1.0, |gain| wide(&gain[c]));
            let w = (wide(v) - mean) / (variance + EPSILON).sqrt() * gain;
            [w, 2e-6 * (1.0 + w.abs())]
        };
        row.iter().enumerate().map(of).collect()
    };
    x.chunks(columns).flat_map(normed).collect()
}

/// Rows times a weight `[output][column]`: rounding of each term and of each partial sum, relative to the sum of
/// magnitudes.
pub(crate) fn product(x: &[f32], weight: &[f32], columns: usize, float: FloatType) -> Vec<[f64; 2]> {
    let ulp = (columns / 4 + 6) as f64 * 6e-8;
    let flushed = if float == FloatType::F16 {
        6.2e-5 * 1e-3
    } else {
        0.0
    };
    let one = |row: &[f32], w: &[f32]| {
        let terms = row.iter().zip(w).map(|(x, &w)| wide(x) * rounded(w, float));
        let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()));
        [sum, ulp * size + flushed]
    };
    let rows = x.chunks(columns);
    rows.flat_map(|row| weight.chunks(columns).map(move |w| one(row, w)))
        .collect()
}

/// GELU. WGSL allows tanh an absolute error of 1e-5; times |x| / 2 that is at most 3e-5 for |x| <= 6.
pub(crate) fn activation(x: &[f32]) -> Vec<[f64; 2]> {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    let gelu = |v: f64| 0.5 * v * (1.0 + (root * (v + 0.044715 * v.powi(3))).tanh());
    let bounded = |w: f64| [w, 3e-5 + 1e-6 * w.abs()];
    x.iter().map(wide).map(gelu).map(bounded).collect()
}

/// A gated activation. WGSL allows exp 3 + 2 |x| ulp, and the division 2.5.
pub(crate) fn swiglu(gate: &[f32], up: &[f32]) -> Vec<[f64; 2]> {
    let gated = |g: f64, u: f64| g / (1.0 + (-g).exp()) * u;
    let bounded = |w: f64| [w, 1e-6 + 3e-6 * w.abs()];
    let pairs = gate.iter().zip(up);
    pairs.map(|(g, u)| bounded(gated(wide(g), wide(u)))).collect()
}

/// A sum, rounded once.
pub(crate) fn residual(x: &[f32], y: &[f32]) -> Vec<[f64; 2]> {
    let pairs = x.iter().zip(y).map(|(a, b)| wide(a) + wide(b));
    pairs.map(|w| [w, 1.2e-7 * w.abs()]).collect()
}
