// binary32, the reference side: one number a word, four words a quad, no scale.
const F32_BITS: u32 = 32u;

// The values of four codes.
fn f32_values(codes: vec4<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(codes);
}

// Channels 4 quad .. 4 quad + 3 of one slot; `words` are the head's words from that quad on.
fn f32_decode4(words: vec4<u32>, quad: u32) -> vec4<f32> {
    return f32_values(words);
}
// ---- encode ----

// (code, saturated) of a finite number given as its bits.
fn f32_encode(x: u32, s: f32) -> vec2<u32> {
    return vec2<u32>(x, 0u);
}
