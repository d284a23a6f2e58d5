// INT2: two's complement, codes -1..=1; sixteen numbers a word (ternary).
//   bits   31..30 29..28  ...  1..0
//   channel  15     14    ...   0
const INT2_BITS: u32 = 2u;

// Channels 4 quad .. 4 quad + 3 of one slot; `words.x` is the head's word that holds them.
fn int2_decode4(words: vec4<u32>, quad: u32) -> vec4<f32> {
    let word = words.x >> ((quad & 3u) * 8u);
    return vec4<f32>(bitcast<vec4<i32>>(vec4<u32>(word << 30u, word << 28u, word << 26u, word << 24u)) >> vec4<u32>(30u));
}

// Four codes of a word, channels `part`, `part` + 4, ..., as packed bytes, each 2 more than the code.
fn int2_packed(word: u32, part: u32) -> u32 {
    return ((word >> (2u * part)) & 0x03030303u) ^ 0x02020202u;
}
// ---- encode ----

// (code, saturated) of a finite number given as its bits, under scale s: ties to even, 1 at most.
fn int2_encode(x: u32, s: f32) -> vec2<u32> {
    let rounded = integer_quotient(bitcast<f32>(x & 0x7fffffffu), s, 1.0);
    let code = select(rounded.x, 0u - rounded.x, (x >> 31u) == 1u);
    return vec2<u32>(code & 3u, rounded.y);
}
