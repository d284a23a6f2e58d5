// What every encoder does before its own format: input classes by bit pattern, since compilers may assume no NaN or
// infinity.

// The bits of a number as the formats see it: subnormals count as zero, the sign stays.
fn flushed(x: u32) -> u32 {
    return select(x, x & 0x80000000u, (x & 0x7f800000u) == 0u);
}

// The bits of |x| if x is finite, else of 0: what enters a group's amax.
fn finite_magnitude(x: u32) -> u32 {
    let magnitude = flushed(x) & 0x7fffffffu;
    return select(magnitude, 0u, magnitude >= 0x7f800000u);
}

// (code, not finite, saturated) of any f32 bits under a stored scale. NaN gives the code of +0, an infinity the largest
// finite code of its sign.
fn encode_any(x: u32, s: f32) -> vec3<u32> {
    let magnitude = x & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return vec3<u32>(0u, 1u, 0u);
    }
    if (magnitude == 0x7f800000u) {
        return vec3<u32>(side_encode((x & 0x80000000u) | 0x7f7fffffu, s).x, 1u, 0u);
    }
    let coded = side_encode(flushed(x), s);
    return vec3<u32>(coded.x, 0u, coded.y);
}
