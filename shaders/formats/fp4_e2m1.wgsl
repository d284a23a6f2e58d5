// FP4 E2M1: 1 sign, 2 exponent (bias 1), 1 mantissa bit: 0 0.5 1 1.5 2 3 4 6; eight numbers a word.
//   bits   31..28 27..24  ...  3..0
//   channel   7      6    ...   0
const FP4_E2M1_BITS: u32 = 4u;

// Channels 4 quad .. 4 quad + 3 of one slot; `words.x` is the head's word that holds them.
fn fp4_e2m1_decode4(words: vec4<u32>, quad: u32) -> vec4<f32> {
    let word = words.x >> ((quad & 1u) * 16u);
    let codes = vec4<u32>(word, word >> 4u, word >> 8u, word >> 12u);
    let normal = ((codes & vec4<u32>(7u)) << vec4<u32>(22u)) + vec4<u32>(0x3f000000u);
    let subnormal = (codes & vec4<u32>(1u)) * 0x3f000000u;
    let magnitude = select(normal, subnormal, (codes & vec4<u32>(6u)) == vec4<u32>(0u));
    return bitcast<vec4<f32>>(magnitude | ((codes & vec4<u32>(8u)) << vec4<u32>(28u)));
}

// Four codes of a word, channels `part`, `part` + 2, ..., as packed bytes, each 12 more than twice the code's value.
fn fp4_e2m1_packed(word: u32, part: u32) -> u32 {
    let codes = word >> (4u * part);
    let exponent_low = (codes >> 1u) & 0x01010101u;
    let exponent_high = (codes >> 2u) & 0x01010101u;
    let significand = (codes & 0x01010101u) + 2u * (exponent_low | exponent_high);
    // Twice the value: the significand shifted by exponent - 1.
    let twice = significand + (significand & (exponent_high * 0xffu))
        + ((significand << 1u) & ((exponent_low & exponent_high) * 0xffu));
    let negative = ((codes >> 3u) & 0x01010101u) * 0xffu;
    return 0x0c0c0c0cu + (twice & ~negative) - (twice & negative);
}
// ---- encode ----

// (code, saturated) of a finite number given as its bits, under scale s: ties to even, 6 at most.
fn fp4_e2m1_encode(x: u32, s: f32) -> vec2<u32> {
    let sign = (x >> 28u) & 8u;
    let magnitude = bitcast<f32>(x & 0x7fffffffu);
    if (s == 0.0 || magnitude == 0.0) {
        return vec2<u32>(sign, 0u);
    }
    // The midpoint above code c is passed, or met with c odd: one more.
    let code = u32(rounds_up(magnitude, 0.25, s, 0u)) + u32(rounds_up(magnitude, 0.75, s, 1u))
        + u32(rounds_up(magnitude, 1.25, s, 2u)) + u32(rounds_up(magnitude, 1.75, s, 3u))
        + u32(rounds_up(magnitude, 2.5, s, 4u)) + u32(rounds_up(magnitude, 3.5, s, 5u))
        + u32(rounds_up(magnitude, 5.0, s, 6u));
    return vec2<u32>(sign | code, u32(compare_product(magnitude, 7.0, s) >= 0));
}
