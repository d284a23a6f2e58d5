// binary16: 1 sign, 5 exponent (bias 15), 10 mantissa bits; two numbers a word, two words a quad, no scale.
//   bits   31..16     15..0
//   channel  1          0
// Integer arithmetic throughout: WGSL leaves rounding and subnormals of its own conversions open.
const F16_BITS: u32 = 16u;

// The f32 bits of four binary16 patterns; infinities and NaN stay what they are.
fn f16_widen(codes: vec4<u32>) -> vec4<u32> {
    let shifted = (codes & vec4<u32>(0x7fffu)) << vec4<u32>(13u);
    let normal = select(shifted + vec4<u32>(0x38000000u), shifted | vec4<u32>(0x7f800000u), shifted >= vec4<u32>(0x0f800000u));
    let subnormal = bitcast<vec4<u32>>(vec4<f32>(codes & vec4<u32>(0x3ffu)) * 5.9604644775390625e-8);
    let magnitude = select(normal, subnormal, shifted < vec4<u32>(0x00800000u));
    return magnitude | ((codes & vec4<u32>(0x8000u)) << vec4<u32>(16u));
}

// The values of four codes.
fn f16_values(codes: vec4<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(f16_widen(codes));
}

// Channels 4 quad .. 4 quad + 3 of one slot; `words` are the head's words from that quad on.
fn f16_decode4(words: vec4<u32>, quad: u32) -> vec4<f32> {
    return f16_values(vec4<u32>(words.x & 0xffffu, words.x >> 16u, words.y & 0xffffu, words.y >> 16u));
}
// ---- encode ----

// (code, saturated) of a finite number given as its bits: ties to even, 65504 at most.
fn f16_encode(x: u32, s: f32) -> vec2<u32> {
    let pattern = small_quotient(x & 0x7fffffffu, 1u, 0, 10, -24);
    return vec2<u32>(((x >> 16u) & 0x8000u) | min(pattern, 0x7bffu), u32(pattern > 0x7bffu));
}
