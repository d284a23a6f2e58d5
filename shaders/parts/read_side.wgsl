// Reading one side's pages, bound as vec4<u32>: one load brings four neighbouring slots of a word.

// Codes of slots 4 slots .. 4 slots + 3 and channels 4 quad .. 4 quad + 3 of a head, unscaled: a column a slot.
fn side_quad(page: u32, head: u32, slots: u32, quad: u32) -> mat4x4<f32> {
    let word = head * SIDE_HEAD_WORDS + quad * SIDE_BITS / 8u;
    let at = page * (SIDE_PAGE_WORDS / 4u) + word * (SIDE_PAGE_TOKENS / 4u) + slots;
    let a = side_pages[at];
    var b = vec4<u32>();
    var c = vec4<u32>();
    var d = vec4<u32>();
    if (SIDE_BITS >= 16u) {
        b = side_pages[at + SIDE_PAGE_TOKENS / 4u];
    }
    if (SIDE_BITS >= 32u) {
        c = side_pages[at + 2u * (SIDE_PAGE_TOKENS / 4u)];
        d = side_pages[at + 3u * (SIDE_PAGE_TOKENS / 4u)];
    }
    return mat4x4<f32>(
        side_decode4(vec4<u32>(a.x, b.x, c.x, d.x), quad),
        side_decode4(vec4<u32>(a.y, b.y, c.y, d.y), quad),
        side_decode4(vec4<u32>(a.z, b.z, c.z, d.z), quad),
        side_decode4(vec4<u32>(a.w, b.w, c.w, d.w), quad),
    );
}

// Four neighbouring scales of a page; `element` is the first one's place in the plane, a multiple of 4.
fn side_scales(page: u32, element: u32) -> vec4<f32> {
    let word = SIDE_SCALE_OFFSET + element * SIDE_SCALE_BITS / 32u;
    let v = side_pages[page * (SIDE_PAGE_WORDS / 4u) + word / 4u];
    if (SIDE_SCALE_BITS == 32u) {
        return side_scale_values(v);
    }
    let pair = select(v.xy, v.zw, (word & 2u) != 0u);
    if (SIDE_SCALE_BITS == 16u) {
        return side_scale_values(vec4<u32>(pair.x & 0xffffu, pair.x >> 16u, pair.y & 0xffffu, pair.y >> 16u));
    }
    let one = select(pair.x, pair.y, (word & 1u) != 0u);
    return side_scale_values((vec4<u32>(one) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(0xffu));
}
