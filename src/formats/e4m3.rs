//! FP8 E4M3FN: 1 sign, 4 exponent (bias 7), 3 mantissa bits; 448 is the largest, S.1111.111 is NaN, no infinity.
//! Saturates; a NaN pattern is decoded but never written.

use super::{ElementInfo, Float, round_to_float};

/// The grid of E4M3.
const GRID: Float = Float {
    mantissa_bits: 3,
    least: -9,
};
/// The pattern of 448.
const LARGEST: u64 = 0x7e;

pub(super) const INFO: ElementInfo = ElementInfo {
    name: "fp8_e4m3",
    bits: 8,
    max: 448.0,
    float: true,
    plain: false,
    decode,
    encode: |q| (u32::from(q.is_sign_negative()) << 7) | round_to_float(q, GRID).min(LARGEST) as u32,
    saturates: |q| round_to_float(q, GRID) > LARGEST,
    grid: Some((GRID, LARGEST)),
    wgsl: include_str!("../../shaders/formats/fp8_e4m3.wgsl"),
};

fn decode(code: u32) -> f32 {
    let (exponent, mantissa) = ((code >> 3) & 15, (code & 7) as f32);
    let magnitude = match exponent {
        15 if code & 7 == 7 => f32::NAN,
        0 => mantissa * 2.0_f32.powi(-9),
        e => (1.0 + mantissa / 8.0) * 2.0_f32.powi(e as i32 - 7),
    };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use crate::formats::Element;

    #[test]
    fn num_03_every_finite_code_survives_decode_and_encode() {
        for code in (0..256_u32).filter(|c| c & 0x7f != 0x7f) {
            assert_eq!(Element::E4m3.encode(Element::E4m3.decode(code), 1.0).code, code);
        }
        assert!(Element::E4m3.decode(0x7f).is_nan() && Element::E4m3.decode(0xff).is_nan());
    }

    #[test]
    fn num_05_overflow_saturates_and_is_counted_above_464() {
        let cases: [(f32, u32, bool, bool); 6] = [
            (464.0, 0x7e, false, false),
            (465.0, 0x7e, true, false),
            (1000.0, 0x7e, true, false),
            (-1000.0, 0xfe, true, false),
            (f32::INFINITY, 0x7e, false, true),
            // The format rules: NaN is written as +0 and counted; 7F is a matter of decoding only.
            (f32::NAN, 0x00, false, true),
        ];
        for (x, code, saturated, non_finite) in cases {
            let got = Element::E4m3.encode(x, 1.0);
            assert_eq!(
                (got.code, got.saturated, got.non_finite),
                (code, saturated, non_finite),
                "{x}"
            );
        }
    }

    #[test]
    fn num_07_subnormals_decode_as_multiples_of_2_to_minus_9() {
        for code in 1..8 {
            assert_eq!(Element::E4m3.decode(code), code as f32 * 0.001953125);
        }
    }
}
