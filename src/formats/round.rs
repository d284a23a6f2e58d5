//! Rounding of an exact value to a small binary float: the one routine behind f16, E4M3, E2M1 and the scales.

/// The shape of a small binary float: precision and range.
#[derive(Debug, Clone, Copy)]
pub struct Float {
    /// Stored mantissa bits.
    pub mantissa_bits: u32,
    /// Exponent of the last place of subnormals: the least positive value is 2^`least`.
    pub least: i32,
}

/// Rounds a finite value to the grid of `float`, ties to even, on a grid that continues upwards without limit.
/// Returns the magnitude as a bit pattern without sign (patterns beyond the format's largest mean overflow).
///
/// Every step is exact in f64: the grid's unit is a power of two, so only `round_ties_even` rounds.
pub fn round_to_float(value: f64, float: Float) -> u64 {
    let magnitude = value.abs();
    if magnitude == 0.0 {
        return 0;
    }
    let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(-1022);
    let unit_exponent = (exponent - float.mantissa_bits as i32).max(float.least);
    let units = (magnitude * exp2(-unit_exponent)).round_ties_even() as u64;
    // The hidden bit of a normal number carries into the exponent field by itself.
    (((unit_exponent - float.least) as u64) << float.mantissa_bits) + units
}

/// 2^e as f64, for |e| <= 1022.
fn exp2(e: i32) -> f64 {
    f64::from_bits(((e + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_f32_cast() {
        let binary32 = Float {
            mantissa_bits: 23,
            least: -149,
        };
        let mut state = 1_u64;
        for _ in 0..200_000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let x = f64::from_bits((state >> 12) | ((state % 200 + 923) << 52));
            assert_eq!(
                round_to_float(x, binary32),
                u64::from((x as f32).to_bits()),
                "{x:e}"
            );
        }
    }

    #[test]
    fn ties_go_to_the_even_pattern() {
        let e4m3 = Float {
            mantissa_bits: 3,
            least: -9,
        };
        assert_eq!(round_to_float(464.0, e4m3), 0x7e);
        assert_eq!(round_to_float(464.1, e4m3), 0x7f);
        assert_eq!(round_to_float(0.0009765625, e4m3), 0);
        assert_eq!(round_to_float(0.0009765626, e4m3), 1);
    }
}
