// Keys read as they are stored.

// Channels 4 quad .. 4 quad + 3 of four neighbouring slots, a column a slot: times the scales of the two functions that
// follow, and the slots' own. `words` hold the quad; `position` is the first slot's.
fn k_quad(words: array<vec4<u32>, 4>, page: u32, head: u32, slots: u32, quad: u32, position: u32) -> mat4x4<f32> {
    return k_codes(words, quad);
}
fn k_quad_blocks(page: u32, head: u32, slots: u32, quad: u32) -> vec4<f32> {
    return k_block_scales(page, head, slots, quad);
}
fn k_quad_channels(page: u32, head: u32, slots: u32, quad: u32) -> vec4<f32> {
    return k_channel_scales(page, head, slots, quad);
}
