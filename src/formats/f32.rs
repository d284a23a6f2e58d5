//! binary32: the reference side. Stored without a scale; infinities become the largest finite number.

use super::ElementInfo;

pub(super) const INFO: ElementInfo = ElementInfo {
    name: "f32",
    bits: 32,
    max: f32::MAX,
    float: true,
    plain: true,
    decode: f32::from_bits,
    encode: |q| (q as f32).to_bits(),
    saturates: |_| false,
    grid: None,
    wgsl: include_str!("../../shaders/formats/f32.wgsl"),
};
