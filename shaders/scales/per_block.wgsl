// One scale for each 16 neighbouring channels of a token's row; blocks may span heads.
fn side_slot_scales(page: u32, head: u32, slots: u32) -> vec4<f32> {
    return vec4<f32>(1.0);
}
// The scales of four neighbouring slots for the block that holds channels 4 quad .. 4 quad + 3 of the head.
fn side_block_scales(page: u32, head: u32, slots: u32, quad: u32) -> vec4<f32> {
    let block = (head * SIDE_HEAD_DIM + 4u * quad) / 16u;
    return side_scales(page, block * SIDE_PAGE_TOKENS + 4u * slots);
}
fn side_channel_scales(page: u32, head: u32, slots: u32, quad: u32) -> array<vec4<f32>, 2> {
    return array<vec4<f32>, 2>(vec4<f32>(1.0), vec4<f32>(1.0));
}
