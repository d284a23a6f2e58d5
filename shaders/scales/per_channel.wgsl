// One scale for each channel of a head over SIDE_GROUP neighbouring tokens.
fn side_slot_scales(page: u32, head: u32, slots: u32) -> vec4<f32> {
    return vec4<f32>(1.0);
}
fn side_block_scales(page: u32, head: u32, slots: u32, quad: u32) -> vec4<f32> {
    return vec4<f32>(1.0);
}
// The scales of channels 4 quad .. 4 quad + 7 of the head, `quad` even, for the token group that holds the four slots.
fn side_channel_scales(page: u32, head: u32, slots: u32, quad: u32) -> array<vec4<f32>, 2> {
    let group = 4u * slots / SIDE_GROUP;
    return side_eight_scales(page, (group * SIDE_HEADS + head) * SIDE_HEAD_DIM + 4u * quad);
}
