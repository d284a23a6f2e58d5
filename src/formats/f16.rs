//! binary16: 1 sign, 5 exponent (bias 15), 10 mantissa bits. Saturates at 65504; never writes infinity or NaN.

use super::{ElementInfo, Float, round_to_float};

/// The grid of binary16.
const GRID: Float = Float {
    mantissa_bits: 10,
    least: -24,
};
/// The pattern of 65504.
const LARGEST: u64 = 0x7bff;

pub(super) const INFO: ElementInfo = ElementInfo {
    name: "f16",
    bits: 16,
    max: 65504.0,
    float: true,
    plain: true,
    decode: |code| half::f16::from_bits(code as u16).to_f32(),
    encode: |q| (u32::from(q.is_sign_negative()) << 15) | round_to_float(q, GRID).min(LARGEST) as u32,
    saturates: |q| round_to_float(q, GRID) > LARGEST,
    grid: Some((GRID, LARGEST)),
    wgsl: include_str!("../../shaders/formats/f16.wgsl"),
};

#[cfg(test)]
mod tests {
    use crate::formats::Element;

    #[test]
    fn every_finite_code_survives_decode_and_encode() {
        for code in (0..0x1_0000_u32).filter(|c| c & 0x7c00 != 0x7c00) {
            assert_eq!(Element::F16.encode(Element::F16.decode(code), 1.0).code, code);
        }
    }

    #[test]
    fn num_19_rounding_to_f16() {
        let cases = [
            (1.0 + 2.0_f32.powi(-11), 0x3c00, false),
            ((1.0 + 2.0_f32.powi(-11)).next_up(), 0x3c01, false),
            (65519.996, 0x7bff, false),
            (65520.0, 0x7bff, true),
            (2.0_f32.powi(-25), 0x0000, false),
            (3.0 * 2.0_f32.powi(-25), 0x0002, false),
        ];
        for (x, code, saturated) in cases {
            let got = Element::F16.encode(x, 1.0);
            assert_eq!((got.code, got.saturated), (code, saturated), "{x:e}");
        }
    }
}
