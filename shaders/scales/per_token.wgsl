// One scale for each token and head. A number is code x slot scale x block scale x channel scale; two of them are 1.

// The scales of four neighbouring slots: slots 4 slots .. 4 slots + 3 of the page.
fn side_slot_scales(page: u32, head: u32, slots: u32) -> vec4<f32> {
    return side_scales(page, head * SIDE_PAGE_TOKENS + 4u * slots);
}
fn side_block_scales(page: u32, head: u32, slots: u32, quad: u32) -> vec4<f32> {
    return vec4<f32>(1.0);
}
fn side_channel_scales(page: u32, head: u32, slots: u32, quad: u32) -> array<vec4<f32>, 2> {
    return array<vec4<f32>, 2>(vec4<f32>(1.0), vec4<f32>(1.0));
}
