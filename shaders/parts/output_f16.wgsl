// Outputs as binary16, two to a word: rounded once, ties to even. Unlike a cache's numbers these do not saturate: what
// rounds beyond 65504 becomes an infinity, and NaN stays NaN.
@group(0) @binding(4) var<storage, read_write> output: array<vec2<u32>>; // [token, query head, channel quad]

// The binary16 pattern of f32 bits.
fn half_bits(x: u32) -> u32 {
    let magnitude = x & 0x7fffffffu;
    let pattern = min(small_quotient(min(magnitude, 0x7f800000u), 1u, 0, 10, -24), 0x7c00u);
    return ((x >> 16u) & 0x8000u) | select(pattern, 0x7e00u, magnitude > 0x7f800000u);
}

// Writes a channel quad of the outputs.
fn write_output(at: u32, value: vec4<f32>) {
    let bits = bitcast<vec4<u32>>(value);
    output[at] = vec2<u32>(half_bits(bits.x) | (half_bits(bits.y) << 16u), half_bits(bits.z) | (half_bits(bits.w) << 16u));
}
