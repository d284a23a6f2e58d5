// New rows as binary16, two to a word, [token][head][channel] with the strides of `params`; run.w is the first slot's row.
fn source_bits(run: vec4<u32>, i: u32, head: u32, channel: u32) -> u32 {
    let at = params.row_offset + (run.w + i) * params.row_stride + head * params.head_stride + channel;
    return f16_widen(vec4<u32>((source[at / 2u] >> (16u * (at & 1u))) & 0xffffu)).x;
}
