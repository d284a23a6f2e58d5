// INT4: two's complement, codes -7..=7; eight numbers a word.
//   bits   31..28 27..24  ...  3..0
//   channel   7      6    ...   0
const INT4_BITS: u32 = 4u;

// Channels 4 quad .. 4 quad + 3 of one slot; `words.x` is the head's word that holds them.
fn int4_decode4(words: vec4<u32>, quad: u32) -> vec4<f32> {
    let word = words.x >> ((quad & 1u) * 16u);
    return vec4<f32>(bitcast<vec4<i32>>(vec4<u32>(word << 28u, word << 24u, word << 20u, word << 16u)) >> vec4<u32>(28u));
}

// Four codes of a word, channels `part`, `part` + 2, ..., as packed bytes, each 8 more than the code.
fn int4_packed(word: u32, part: u32) -> u32 {
    return ((word >> (4u * part)) & 0x0f0f0f0fu) ^ 0x08080808u;
}
// ---- encode ----

// (code, saturated) of a finite number given as its bits, under scale s: ties to even, 7 at most.
fn int4_encode(x: u32, s: f32) -> vec2<u32> {
    let rounded = integer_quotient(bitcast<f32>(x & 0x7fffffffu), s, 7.0);
    let code = select(rounded.x, 0u - rounded.x, (x >> 31u) == 1u);
    return vec2<u32>(code & 0xfu, rounded.y);
}
