//! INT2: two's complement, codes -1..=1. The pattern of -2 is decoded as two's complement but never written.

use super::{ElementInfo, integer_code, sign_extend};

pub(super) const INFO: ElementInfo = ElementInfo {
    name: "int2",
    bits: 2,
    max: 1.0,
    float: false,
    plain: false,
    decode: |code| sign_extend(code, 2),
    encode: |q| integer_code(q, 1.0, 2),
    saturates: |q| q.abs() >= 1.5,
    grid: None,
    wgsl: include_str!("../../shaders/formats/int2.wgsl"),
};

#[cfg(test)]
mod tests {
    use crate::formats::Element;

    #[test]
    fn num_03_every_written_code_survives_decode_and_encode() {
        for value in -1..=1_i32 {
            let code = value as u32 & (u32::MAX >> (32 - 2));
            assert_eq!(Element::Int2.decode(code), value as f32);
            assert_eq!(Element::Int2.encode(value as f32, 1.0).code, code);
        }
    }
}
