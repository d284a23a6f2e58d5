//! Scales: which numbers share one, how it is stored, and how it is made from the group's largest magnitude.

use crate::formats::{Element, round_to_float};

/// Which numbers share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ScaleLayout {
    /// No scale: f32 and f16 elements.
    None,
    /// The head_dim numbers of one token and head.
    PerToken,
    /// One channel of one head over `group` neighbouring tokens; group j covers tokens [j group, (j + 1) group).
    PerChannel {
        /// Tokens that share a scale: 8, 16, 32, 64 or 128.
        group: u32,
    },
    /// [`BLOCK_CHANNELS`] neighbouring channels of one token's row; blocks may span heads.
    PerBlock,
    /// All numbers of one layer and side; the scale is one f32, fixed from outside.
    PerTensor,
}

/// Channels of one block of [`ScaleLayout::PerBlock`].
pub const BLOCK_CHANNELS: u32 = 16;

/// The token groups that a per-channel side can have.
pub const GROUPS: [u32; 5] = [8, 16, 32, 64, 128];

/// The group of a per-channel side whose name gives none.
pub const DEFAULT_GROUP: u32 = 32;

impl ScaleLayout {
    /// The layout's file name under `shaders/scales/`, without `.wgsl`.
    pub fn name(self) -> &'static str {
        match self {
            ScaleLayout::None => "none",
            ScaleLayout::PerToken => "per_token",
            ScaleLayout::PerChannel { .. } => "per_channel",
            ScaleLayout::PerBlock => "per_block",
            ScaleLayout::PerTensor => "per_tensor",
        }
    }

    /// Tokens that share a scale and therefore become packed together; 1 where each token stands alone.
    pub fn token_group(self) -> u32 {
        match self {
            ScaleLayout::PerChannel { group } => group,
            _ => 1,
        }
    }

    /// Whether each page carries a plane of scales.
    pub fn has_plane(self) -> bool {
        !matches!(self, ScaleLayout::None | ScaleLayout::PerTensor)
    }

    /// The WGSL text of the layout.
    pub fn wgsl(self) -> &'static str {
        match self {
            ScaleLayout::None => include_str!("../shaders/scales/none.wgsl"),
            ScaleLayout::PerToken => include_str!("../shaders/scales/per_token.wgsl"),
            ScaleLayout::PerChannel { .. } => include_str!("../shaders/scales/per_channel.wgsl"),
            ScaleLayout::PerBlock => include_str!("../shaders/scales/per_block.wgsl"),
            ScaleLayout::PerTensor => include_str!("../shaders/scales/per_tensor.wgsl"),
        }
    }
}

/// How a scale is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ScaleType {
    /// binary16; above 65504 it is clamped, and counted.
    F16,
    /// binary32; a computed scale below 2^-90 is stored as 0.
    F32,
    /// FP8 E4M3; above 448 it is clamped, and counted; 0 becomes the least positive value, 2^-9.
    E4m3,
}

/// Every scale type.
pub const SCALE_TYPES: [ScaleType; 3] = [ScaleType::F16, ScaleType::F32, ScaleType::E4m3];

/// Bounds of a per-tensor scale that is given from outside: [2^-90, 2^118].
pub const GIVEN_SCALE: std::ops::RangeInclusive<f64> =
    8.077_935_669_463_161e-28..=332_306_998_946_228_968_225_951_765_070_086_144.0;

/// A scale as it is stored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale {
    /// The stored bits, in the low bits.
    pub bits: u32,
    /// The value of those bits.
    pub value: f32,
    /// The exact scale was above the type's largest value.
    pub clamped: bool,
}

impl ScaleType {
    /// The element format with the same bits.
    pub fn element(self) -> Element {
        match self {
            ScaleType::F16 => Element::F16,
            ScaleType::F32 => Element::F32,
            ScaleType::E4m3 => Element::E4m3,
        }
    }

    /// Bits of one stored scale.
    pub fn bits(self) -> u32 {
        self.element().bits()
    }

    /// The type's prefix in WGSL, and its file name under `shaders/scales/` after `stored_`.
    pub fn name(self) -> &'static str {
        match self {
            ScaleType::F16 => "f16",
            ScaleType::F32 => "f32",
            ScaleType::E4m3 => "e4m3",
        }
    }

    /// The WGSL text of the type.
    pub fn wgsl(self) -> &'static str {
        match self {
            ScaleType::F16 => include_str!("../shaders/scales/stored_f16.wgsl"),
            ScaleType::F32 => include_str!("../shaders/scales/stored_f32.wgsl"),
            ScaleType::E4m3 => include_str!("../shaders/scales/stored_e4m3.wgsl"),
        }
    }

    /// The value of stored bits.
    pub fn decode(self, bits: u32) -> f32 {
        self.element().decode(bits)
    }

    /// The stored scale of a group whose largest finite magnitude is `amax`, for codes up to `largest`: the exact
    /// quotient `amax / largest`, rounded once, ties to even. `amax` is finite and not subnormal.
    pub fn from_amax(self, amax: f32, largest: f32) -> Scale {
        // f64 division decides every rounding here: a quotient of a 24-bit number by 127, 7, 6 or 448 that is no
        // midpoint of a 24-bit grid is at least 2^-34 (relative) away from any.
        let exact = f64::from(amax) / f64::from(largest);
        let (bits, clamped) = match self.element().info().grid {
            None => {
                let value = exact as f32;
                (
                    if f64::from(value) < *GIVEN_SCALE.start() {
                        0
                    } else {
                        value.to_bits()
                    },
                    false,
                )
            }
            Some((grid, largest)) => {
                let least = u64::from(self == ScaleType::E4m3);
                let bits = round_to_float(exact, grid);
                (bits.clamp(least, largest) as u32, bits > largest)
            }
        };
        Scale {
            bits,
            value: self.decode(bits),
            clamped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn given_scale_bounds_are_the_powers_of_two_they_claim() {
        assert_eq!(*GIVEN_SCALE.start(), 2.0_f64.powi(-90));
        assert_eq!(*GIVEN_SCALE.end(), 2.0_f64.powi(118));
    }

    #[test]
    fn scl_03_e4m3_scales_clamp_and_never_become_nan() {
        let clipped = ScaleType::E4m3.from_amax(3000.0, 6.0);
        assert_eq!(
            (clipped.bits, clipped.value, clipped.clamped),
            (0x7e, 448.0, true)
        );
        let exact = ScaleType::E4m3.from_amax(2688.0, 6.0);
        assert_eq!((exact.bits, exact.clamped), (0x7e, false));
    }

    #[test]
    fn scl_01_scale_of_a_zero_group() {
        assert_eq!(ScaleType::E4m3.from_amax(0.0, 6.0).bits, 1);
        assert_eq!(ScaleType::F16.from_amax(0.0, 127.0).bits, 0);
    }

    #[test]
    fn scl_04_f16_scale_underflows_to_zero() {
        for amax in [1e-6, 3e-6] {
            assert_eq!(ScaleType::F16.from_amax(amax, 127.0).bits, 0);
        }
    }

    #[test]
    fn scl_10_f16_scale_overflow_is_clamped_and_counted() {
        for (amax, largest) in [(500_000.0, 7.0), (70_000.0, 1.0)] {
            let scale = ScaleType::F16.from_amax(amax, largest);
            assert_eq!((scale.value, scale.clamped), (65504.0, true));
        }
    }
}
