//! The tiny model of the published table, generated from its recipe: no weight file.

use super::{Block, Config, EPSILON, Matrix, Model, Norm, Weights};
use crate::error::{Error, Result};

/// Its 64 characters; '-' occurs twice and encodes to its first place.
pub const ALPHABET: &str = "abcdefghijklmnopqrstuvwxyz0123456789 .,!?;:'\"()-\n+-*/=<>[]{}@#$%";

/// The four prompts of the table, 32 characters each.
pub const PROMPTS: [&str; 4] = [
    "the quick brown fox jumps over t",
    "to be, or not to be: that is the",
    "numbers: 3.14159, 2.71828 and 1.",
    "quantise the weights, then the k",
];

/// Its shape.
const CONFIG: Config = Config {
    vocabulary: 64,
    positions: 32,
    d_model: 16,
    q_heads: 2,
    kv_heads: 2,
    head_dim: 8,
    blocks: 2,
    d_ff: 32,
    norm: Norm::Layer,
    epsilon: EPSILON,
    rope: None,
};

/// Text to token ids.
///
/// # Errors
/// [`Error::Usage`] for a character outside [`ALPHABET`].
pub fn encode(text: &str) -> Result<Vec<u32>> {
    text.chars()
        .map(|c| {
            ALPHABET
                .chars()
                .position(|a| a == c)
                .map(|i| i as u32)
                .ok_or_else(|| Error::Usage {
                    asked: format!("the character {c:?}"),
                    reason: "it is not in the tiny model's alphabet of 64".to_owned(),
                    advice: "use lower-case letters, digits and common signs".to_owned(),
                })
        })
        .collect()
}

/// The mulberry32 generator.
struct Mulberry32(u32);

impl Mulberry32 {
    /// A number in [0, 1).
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x6d2b_79f5);
        let mut t = self.0;
        t = (t ^ (t >> 15)).wrapping_mul(t | 1);
        t ^= t.wrapping_add((t ^ (t >> 7)).wrapping_mul(t | 61));
        f64::from(t ^ (t >> 14)) / 4_294_967_296.0
    }

    /// A standard normal number: Box-Muller, the cosine branch only.
    fn normal(&mut self) -> f64 {
        let (u1, u2) = (self.uniform(), self.uniform());
        (-2.0 * u1.max(1e-12).ln()).sqrt() * (2.0 * std::f64::consts::PI * u2).cos()
    }

    fn matrix(&mut self, rows: u32, columns: u32, deviation: f64) -> Matrix {
        let values = (0..rows * columns).map(|_| self.normal() * deviation).collect();
        Matrix {
            rows,
            columns,
            values,
        }
    }

    /// A projection `[out][in]`. The recipe draws it `[in][out]`.
    fn linear(&mut self, inputs: u32, outputs: u32) -> Matrix {
        let drawn = self.matrix(inputs, outputs, 1.0 / f64::from(inputs).sqrt());
        let at = |output: u32, input: u32| drawn.values[(input * outputs + output) as usize];
        let values = (0..outputs).flat_map(|o| (0..inputs).map(move |i| at(o, i)));
        Matrix {
            rows: outputs,
            columns: inputs,
            values: values.collect(),
        }
    }
}

/// The tiny model, seed 42. Channel 3 of each head of K is multiplied by `outlier` and that of q divided by it, in
/// every block: attention is unchanged without quantisation.
pub fn tiny(outlier: f64) -> Model {
    let c = &CONFIG;
    let mut random = Mulberry32(42);
    let embedding = random.matrix(c.vocabulary, c.d_model, 1.0);
    let blocks = (0..c.blocks)
        .map(|_| {
            let mut block = Block {
                attention_gain: None,
                q: random.linear(c.d_model, c.d_model),
                k: random.linear(c.d_model, c.d_model),
                v: random.linear(c.d_model, c.d_model),
                o: random.linear(c.d_model, c.d_model),
                feed_forward_gain: None,
                gate: None,
                up: random.linear(c.d_model, c.d_ff),
                down: random.linear(c.d_ff, c.d_model),
            };
            for i in 0..block.q.values.len() {
                if i as u32 / c.d_model % c.head_dim == 3 {
                    block.q.values[i] /= outlier;
                    block.k.values[i] *= outlier;
                }
            }
            block
        })
        .collect();
    let positions = (0..c.positions)
        .flat_map(|p| (0..c.d_model).map(move |i| (p, i)))
        .map(|(p, i)| {
            let angle = f64::from(p) * 10_000_f64.powf(-f64::from(i / 2 * 2) / f64::from(c.d_model));
            if i % 2 == 0 { angle.sin() } else { angle.cos() }
        })
        .collect();
    let positions = Matrix {
        rows: c.positions,
        columns: c.d_model,
        values: positions,
    };
    Model {
        config: CONFIG,
        weights: Weights {
            embedding,
            positions: Some(positions),
            blocks,
            gain: None,
            head: None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_encode_and_the_second_minus_is_never_used() {
        for prompt in PROMPTS {
            assert_eq!(encode(prompt).unwrap().len(), 32);
        }
        assert_eq!(ALPHABET.chars().count(), 64);
        assert_eq!(encode("-").unwrap(), [47]);
        assert!(encode("É").is_err());
    }

    #[test]
    fn mulberry32_gives_its_known_first_numbers() {
        let mut random = Mulberry32(42);
        // First outputs for seed 42, as u32.
        let first: Vec<u32> = (0..3)
            .map(|_| (random.uniform() * 4_294_967_296.0) as u32)
            .collect();
        assert_eq!(first, [2_581_720_956, 1_925_393_290, 3_661_312_704]);
    }
}
