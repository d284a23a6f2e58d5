// FP8 E4M3FN: 1 sign, 4 exponent (bias 7), 3 mantissa bits; largest 448, S.1111.111 is NaN; four numbers a word.
//   bits   31..24 23..16 15..8 7..0
//   channel   3      2     1    0
const FP8_E4M3_BITS: u32 = 8u;

// The values of four codes.
fn fp8_e4m3_values(codes: vec4<u32>) -> vec4<f32> {
    let shifted = (codes & vec4<u32>(0x7fu)) << vec4<u32>(20u);
    let normal = select(shifted + vec4<u32>(0x3c000000u), vec4<u32>(0x7fc00000u), shifted == vec4<u32>(0x07f00000u));
    let subnormal = bitcast<vec4<u32>>(vec4<f32>(codes & vec4<u32>(7u)) * 0.001953125);
    let magnitude = select(normal, subnormal, shifted < vec4<u32>(0x00800000u));
    return bitcast<vec4<f32>>(magnitude | ((codes & vec4<u32>(0x80u)) << vec4<u32>(24u)));
}

// Channels 4 quad .. 4 quad + 3 of one slot; `words.x` is the head's word that holds them.
fn fp8_e4m3_decode4(words: vec4<u32>, quad: u32) -> vec4<f32> {
    return fp8_e4m3_values(vec4<u32>(words.x, words.x >> 8u, words.x >> 16u, words.x >> 24u));
}
// ---- encode ----

fn fp8_e4m3_value(code: u32) -> f32 {
    let normal = bitcast<f32>((code << 20u) + 0x3c000000u);
    return select(normal, f32(code) * 0.001953125, code < 8u);
}

// (code, saturated) of a finite number given as its bits, under scale s: ties to even, 448 at most.
fn fp8_e4m3_encode(x: u32, s: f32) -> vec2<u32> {
    let sign = (x >> 24u) & 0x80u;
    let magnitude = bitcast<f32>(x & 0x7fffffffu);
    if (s == 0.0 || magnitude == 0.0) {
        return vec2<u32>(sign, 0u);
    }
    // 464 lies midway between 448 and the 480 that does not exist; the tie goes to 448 and is no saturation.
    if (compare_product(magnitude, 464.0, s) > 0) {
        return vec2<u32>(sign | 0x7eu, 1u);
    }
    // A first guess from a division that may be a few ulp off, then the exact decision on either side of it.
    let quotient = magnitude / s;
    let guess = select((bitcast<u32>(quotient) >> 20u) - 960u, u32(quotient * 512.0), quotient < 0.015625);
    var code = min(guess, 126u);
    let value = fp8_e4m3_value(code);
    if (rounds_up(magnitude, 0.5 * (value + fp8_e4m3_value(code + 1u)), s, code)) {
        code += 1u;
    } else if (code > 0u) {
        if (!rounds_up(magnitude, 0.5 * (fp8_e4m3_value(code - 1u) + value), s, code - 1u)) {
            code -= 1u;
        }
    }
    return vec2<u32>(sign | min(code, 126u), 0u);
}
