// Scales stored as binary32: a computed scale below 2^-90 is stored as 0.

// (stored bits, clamped) of the exact amax / (odd * 2^power).
fn stored_f32_from(amax: u32, odd: u32, power: i32) -> vec2<u32> {
    let pattern = small_quotient(amax, odd, power, 23, -149);
    return vec2<u32>(select(pattern, 0u, pattern < 0x12800000u), 0u);
}
