// Rows that wait in pages of f16 (or f32) at the slots they will have when packed; run.w is the page they wait in.
fn source_bits(run: vec4<u32>, i: u32, head: u32, channel: u32) -> u32 {
    let per_word = 32u / SRC_BITS;
    let word = head * SRC_HEAD_WORDS + channel / per_word;
    let bits = source[run.w * SRC_PAGE_WORDS + word * SRC_PAGE_TOKENS + run.y + i];
    if (SRC_BITS == 32u) {
        return bits;
    }
    return f16_widen(vec4<u32>((bits >> (16u * (channel & 1u))) & 0xffffu)).x;
}
