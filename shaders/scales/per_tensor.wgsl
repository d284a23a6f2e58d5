// One f32 scale for the whole layer and side, read from a buffer beside the pages.
fn side_slot_scales(page: u32, head: u32, slots: u32) -> vec4<f32> {
    return vec4<f32>(tensor_scales[params.side_tensor]);
}
fn side_block_scales(page: u32, head: u32, slots: u32, quad: u32) -> vec4<f32> {
    return vec4<f32>(1.0);
}
fn side_channel_scales(page: u32, head: u32, slots: u32, quad: u32) -> array<vec4<f32>, 2> {
    return array<vec4<f32>, 2>(vec4<f32>(1.0), vec4<f32>(1.0));
}
