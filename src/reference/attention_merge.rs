use super::Partials;
use crate::work::Merge;

/// Combines partials into outputs `[token][query head][channel]` and LSE `[token][query head]` (-Inf for an empty row, whose
/// output is zeros). A sink, one for each query head where there are any, adds exp(sink) to a row's denominator.
pub fn attention_merge(
    merges: &[Merge],
    q_heads: u32,
    v_head_dim: u32,
    sinks: Option<&[f32]>,
    partials: &Partials,
    output: &mut [f64],
    lse: &mut [f64],
) {
    let v_dim = v_head_dim as usize;
    for merge in merges {
        for head in 0..q_heads {
            let members: Vec<usize> = (0..merge.count)
                .map(|i| (merge.first + i * merge.stride + head) as usize)
                .filter(|&p| partials.l[p] != 0.0)
                .collect();
            let sink = sinks.map(|sinks| f64::from(sinks[head as usize]));
            let least = sink.unwrap_or(-f64::MAX);
            let m = members.iter().fold(least, |m, &p| m.max(partials.m[p]));
            let l: f64 = members
                .iter()
                .map(|&p| partials.l[p] * (partials.m[p] - m).exp())
                .sum::<f64>()
                + sink.map_or(0.0, |sink| (sink - m).exp());
            let row = (merge.row * q_heads + head) as usize;
            lse[row] = if l == 0.0 { f64::NEG_INFINITY } else { m + l.ln() };
            for c in 0..v_dim {
                let o: f64 = members
                    .iter()
                    .map(|&p| partials.o[p * v_dim + c] * (partials.m[p] - m).exp())
                    .sum();
                output[row * v_dim + c] = if l == 0.0 { 0.0 } else { o / l };
            }
        }
    }
}
