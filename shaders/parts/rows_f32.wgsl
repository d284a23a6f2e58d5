// New rows as f32, [token][head][channel] with the strides of `params`; run.w is the first slot's row.
fn source_bits(run: vec4<u32>, i: u32, head: u32, channel: u32) -> u32 {
    return source[params.row_offset + (run.w + i) * params.row_stride + head * params.head_stride + channel];
}
