// INT8: two's complement, codes -127..=127; four numbers a word.
//   bits   31..24 23..16 15..8 7..0
//   channel   3      2     1    0
const INT8_BITS: u32 = 8u;

// Channels 4 quad .. 4 quad + 3 of one slot; `words.x` is the head's word that holds them.
fn int8_decode4(words: vec4<u32>, quad: u32) -> vec4<f32> {
    let word = words.x;
    return vec4<f32>(bitcast<vec4<i32>>(vec4<u32>(word << 24u, word << 16u, word << 8u, word)) >> vec4<u32>(24u));
}

// Four codes of a word as packed bytes.
fn int8_packed(word: u32, part: u32) -> u32 {
    return word;
}
// ---- encode ----

// (code, saturated) of a finite number given as its bits, under scale s: ties to even, 127 at most.
fn int8_encode(x: u32, s: f32) -> vec2<u32> {
    let rounded = integer_quotient(bitcast<f32>(x & 0x7fffffffu), s, 127.0);
    let code = select(rounded.x, 0u - rounded.x, (x >> 31u) == 1u);
    return vec2<u32>(code & 0xffu, rounded.y);
}
