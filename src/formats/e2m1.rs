//! FP4 E2M1: 1 sign, 2 exponent (bias 1), 1 mantissa bit: 0 0.5 1 1.5 2 3 4 6. No NaN, no infinity. Saturates at 6.

use super::{ElementInfo, Float, round_to_float};

const GRID: Float = Float {
    mantissa_bits: 1,
    least: -1,
};
const LARGEST: u64 = 7;

pub(super) const INFO: ElementInfo = ElementInfo {
    name: "fp4_e2m1",
    bits: 4,
    max: 6.0,
    float: true,
    plain: false,
    decode: |code| {
        let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code as usize & 7];
        if code & 8 != 0 { -magnitude } else { magnitude }
    },
    encode: |q| (u32::from(q.is_sign_negative()) << 3) | round_to_float(q, GRID).min(LARGEST) as u32,
    saturates: |q| round_to_float(q, GRID) > LARGEST,
    grid: Some((GRID, LARGEST)),
    wgsl: include_str!("../../shaders/formats/fp4_e2m1.wgsl"),
};

#[cfg(test)]
mod tests {
    use crate::formats::Element;

    fn codes(values: &[f32]) -> Vec<u32> {
        values
            .iter()
            .map(|&x| Element::E2m1.encode(x, 1.0).code)
            .collect()
    }

    #[test]
    fn num_01_midpoints_go_to_the_even_code() {
        let midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
        assert_eq!(codes(&midpoints), [0, 2, 2, 4, 4, 6, 6]);
        assert_eq!(codes(&midpoints.map(|x| -x)), [8, 10, 10, 12, 12, 14, 14]);
    }

    #[test]
    fn num_02_just_above_a_midpoint_goes_up() {
        assert_eq!(codes(&[0.25000006, 5.0000005, 6.5, 7.0]), [1, 7, 7, 7]);
    }

    #[test]
    fn num_03_every_code_survives_decode_and_encode() {
        for code in 0..16 {
            assert_eq!(Element::E2m1.encode(Element::E2m1.decode(code), 1.0).code, code);
        }
    }
}
