// Scales stored as FP8 E4M3: above 448 clamped, never NaN; 0 becomes the least positive value, 2^-9.

// (stored bits, clamped) of the exact amax / (odd * 2^power).
fn stored_e4m3_from(amax: u32, odd: u32, power: i32) -> vec2<u32> {
    let pattern = small_quotient(amax, odd, power, 3, -9);
    return vec2<u32>(clamp(pattern, 1u, 0x7eu), u32(pattern > 0x7eu));
}
