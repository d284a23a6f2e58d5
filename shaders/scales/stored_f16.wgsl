// Scales stored as binary16: above 65504 clamped.

// (stored bits, clamped) of the exact amax / (odd * 2^power).
fn stored_f16_from(amax: u32, odd: u32, power: i32) -> vec2<u32> {
    let pattern = small_quotient(amax, odd, power, 10, -24);
    return vec2<u32>(min(pattern, 0x7bffu), u32(pattern > 0x7bffu));
}
