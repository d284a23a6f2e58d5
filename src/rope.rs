//! Rotary positions (RoPE): which channels turn together, by which frequencies, and the table that kernels and reference
//! read alike. Frequencies and angles are computed in f64 (Su et al., arXiv 2104.09864).

use std::f64::consts::TAU;

/// Which channels of a head RoPE turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairing {
    /// Channel i with i + d / 2 (Hugging Face files).
    Halves,
    /// Channel 2 i with 2 i + 1 (GGUF files of the Llama architecture, whose q and k rows are permuted for it).
    Neighbours,
}

impl RopePairing {
    /// The two channels that frequency `i` of a head of `head_dim` channels turns.
    pub fn channels(self, i: u32, head_dim: u32) -> [u32; 2] {
        match self {
            RopePairing::Halves => [i, i + head_dim / 2],
            RopePairing::Neighbours => [2 * i, 2 * i + 1],
        }
    }
}

/// How RoPE's frequencies are changed for contexts beyond those of the first training.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency divided by the factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// `rope_type` llama3: low frequencies divided by the factor, high ones kept, those between interpolated.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths above context / this are low.
        low_freq_factor: f64,
        /// Wavelengths below context / this are high.
        high_freq_factor: f64,
        /// Positions of the first training.
        original_context: u32,
    },
    /// Each frequency divided by a number of its own: how GGUF files store `rope_type` llama3.
    Divisors(
        /// One for each of the head_dim / 2 frequencies.
        Vec<f32>,
    ),
}

impl RopeScaling {
    /// Frequency `i` of a head, scaled, in radians per position.
    fn apply(&self, i: usize, frequency: f64) -> f64 {
        match *self {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Divisors(ref divisors) => {
                frequency / divisors.get(i).copied().map_or(1.0, f64::from)
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                // How many waves the first training's context held.
                let waves = f64::from(original_context) * frequency / TAU;
                // 0 for low frequencies, 1 for high ones.
                let kept = ((waves - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                (1.0 - kept) * frequency / factor + kept * frequency
            }
        }
    }
}

/// How a model encodes positions by rotation.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the frequencies: frequency i of a head is theta^(-2 i / head_dim).
    pub theta: f64,
    /// Channels turned together.
    pub pairing: RopePairing,
    /// Scaling of the frequencies.
    pub scaling: RopeScaling,
}

impl Rope {
    /// The scaled frequencies of a head, head_dim / 2 of them, in radians per position.
    pub fn frequencies(&self, head_dim: u32) -> Vec<f64> {
        let plain = (0..head_dim / 2).map(|i| self.theta.powf(-f64::from(2 * i) / f64::from(head_dim)));
        plain.enumerate().map(|(i, f)| self.scaling.apply(i, f)).collect()
    }

    /// The table of the first `positions` positions.
    pub fn table(&self, head_dim: u32, positions: u32) -> RopeTable {
        let frequencies = self.frequencies(head_dim);
        let turn = |angle: f64| [angle.cos() as f32, angle.sin() as f32];
        let turns = (0..positions)
            .flat_map(|p| frequencies.iter().map(move |f| turn(f64::from(p) * f)))
            .collect();
        RopeTable {
            pairing: self.pairing,
            head_dim,
            turns,
        }
    }
}

/// Cosines and sines of every position and frequency, rounded once to f32.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeTable {
    /// Channels turned together.
    pub pairing: RopePairing,
    /// Channels of a head.
    pub head_dim: u32,
    /// `[position][frequency]` (cos, sin).
    pub turns: Vec<[f32; 2]>,
}

impl RopeTable {
    /// Positions that it has.
    pub fn positions(&self) -> u32 {
        (self.turns.len() / (self.head_dim / 2).max(1) as usize) as u32
    }

    /// A head's channel after rotation: `channels` gives its channels before.
    pub fn turned(&self, position: u32, channel: u32, channels: impl Fn(u32) -> f64) -> f64 {
        let pairs = self.head_dim / 2;
        let i = match self.pairing {
            RopePairing::Halves => channel % pairs,
            RopePairing::Neighbours => channel / 2,
        };
        let [cos, sin] = self.turns[(position * pairs + i) as usize].map(f64::from);
        let [a, b] = self.pairing.channels(i, self.head_dim);
        if channel == a {
            channels(a) * cos - channels(b) * sin
        } else {
            channels(a) * sin + channels(b) * cos
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(pairing: RopePairing, scaling: RopeScaling) -> Rope {
        Rope {
            theta: 10_000.0,
            pairing,
            scaling,
        }
    }

    #[test]
    fn mod_07_each_pairing_turns_its_own_channels() {
        // d = 4, position 1, theta 10000, x = [1, 0, 0, 0]: cos 1 = 0.5403, sin 1 = 0.8415.
        for (pairing, expected) in [
            (RopePairing::Halves, [0.5403, 0.0, 0.8415, 0.0]),
            (RopePairing::Neighbours, [0.5403, 0.8415, 0.0, 0.0]),
        ] {
            let table = rope(pairing, RopeScaling::None).table(4, 2);
            assert_eq!(table.positions(), 2);
            for (channel, expected) in (0..).zip(expected) {
                let x = |c: u32| if c == 0 { 1.0 } else { 0.0 };
                let turned = table.turned(1, channel, x);
                assert!(
                    (turned - expected).abs() < 5e-5,
                    "{pairing:?} channel {channel}: {turned}"
                );
            }
        }
    }

    #[test]
    fn scalings_change_the_frequencies_that_they_name() {
        let frequencies = |scaling| rope(RopePairing::Halves, scaling).frequencies(64);
        let plain = frequencies(RopeScaling::None);
        assert_eq!((plain.len(), plain[0]), (32, 1.0));
        assert!((plain[16] - 0.01).abs() < 1e-15);
        let linear = frequencies(RopeScaling::Linear { factor: 4.0 });
        assert!(plain.iter().zip(&linear).all(|(p, l)| *l == p / 4.0));
        let divisors: Vec<f32> = (1..=32_u8).map(f32::from).collect();
        let divided = frequencies(RopeScaling::Divisors(divisors));
        assert!(
            plain
                .iter()
                .zip(&divided)
                .zip(1..)
                .all(|((p, d), n)| *d == p / f64::from(n))
        );
        // Llama 3.1: 8192 positions, factors 1 and 4. A wave of more than 8192 positions is low, of fewer than 2048 high.
        let llama3 = frequencies(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        });
        let mut kinds = [0; 3];
        for (p, l) in plain.iter().zip(&llama3) {
            let wave = TAU / p;
            if wave > 8192.0 {
                assert!((l - p / 8.0).abs() < 1e-18);
                kinds[0] += 1;
            } else if wave < 2048.0 {
                assert_eq!(l, p);
                kinds[1] += 1;
            } else {
                let smooth = (8192.0 / wave - 1.0) / 3.0;
                assert!((l - ((1.0 - smooth) * p / 8.0 + smooth * p)).abs() < 1e-15);
                kinds[2] += 1;
            }
        }
        assert!(kinds.iter().all(|&n| n > 0), "{kinds:?}");
    }
}
