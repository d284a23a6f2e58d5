//! INT8: two's complement, codes -127..=127. The pattern of -128 is decoded as two's complement but never written.

use super::{ElementInfo, integer_code, sign_extend};

pub(super) const INFO: ElementInfo = ElementInfo {
    name: "int8",
    bits: 8,
    max: 127.0,
    float: false,
    plain: false,
    decode: |code| sign_extend(code, 8),
    encode: |q| integer_code(q, 127.0, 8),
    saturates: |q| q.abs() >= 127.5,
    grid: None,
    wgsl: include_str!("../../shaders/formats/int8.wgsl"),
};

#[cfg(test)]
mod tests {
    use crate::formats::Element;

    #[test]
    fn num_03_every_written_code_survives_decode_and_encode() {
        for value in -127..=127_i32 {
            let code = value as u32 & (u32::MAX >> (32 - 8));
            assert_eq!(Element::Int8.decode(code), value as f32);
            assert_eq!(Element::Int8.encode(value as f32, 1.0).code, code);
        }
    }
}
