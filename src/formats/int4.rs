//! INT4: two's complement, codes -7..=7. The pattern of -8 is decoded as two's complement but never written.

use super::{ElementInfo, integer_code, sign_extend};

pub(super) const INFO: ElementInfo = ElementInfo {
    name: "int4",
    bits: 4,
    max: 7.0,
    float: false,
    plain: false,
    decode: |code| sign_extend(code, 4),
    encode: |q| integer_code(q, 7.0, 4),
    saturates: |q| q.abs() >= 7.5,
    grid: None,
    wgsl: include_str!("../../shaders/formats/int4.wgsl"),
};

#[cfg(test)]
mod tests {
    use crate::formats::Element;

    #[test]
    fn num_03_every_written_code_survives_decode_and_encode() {
        for value in -7..=7_i32 {
            let code = value as u32 & (u32::MAX >> (32 - 4));
            assert_eq!(Element::Int4.decode(code), value as f32);
            assert_eq!(Element::Int4.encode(value as f32, 1.0).code, code);
        }
    }
}
