// Reading one side's pages, bound as vec4<u32>: one load brings four neighbouring slots of a word.

const SIDE_CHUNK_QUADS: u32 = max(1u, 8u / SIDE_BITS); // channel quads of a word; one where a quad takes several words
const SIDE_CHUNK_WORDS: u32 = max(1u, SIDE_BITS / 8u);

// The words of slots 4 slots .. 4 slots + 3 that hold the chunk beginning with channel quad `chunk` * SIDE_CHUNK_QUADS of
// a head: a vec4 a word.
fn side_words(page: u32, head: u32, slots: u32, chunk: u32) -> array<vec4<u32>, 4> {
    let word = head * SIDE_HEAD_WORDS + chunk * SIDE_CHUNK_WORDS;
    let at = page * (SIDE_PAGE_WORDS / 4u) + word * (SIDE_PAGE_TOKENS / 4u) + slots;
    var words = array<vec4<u32>, 4>(side_pages[at], vec4<u32>(), vec4<u32>(), vec4<u32>());
    if (SIDE_BITS >= 16u) {
        words[1] = side_pages[at + SIDE_PAGE_TOKENS / 4u];
    }
    if (SIDE_BITS >= 32u) {
        words[2] = side_pages[at + 2u * (SIDE_PAGE_TOKENS / 4u)];
        words[3] = side_pages[at + 3u * (SIDE_PAGE_TOKENS / 4u)];
    }
    return words;
}

// Codes of channels 4 quad .. 4 quad + 3 in those words, unscaled: a column a slot.
fn side_codes(words: array<vec4<u32>, 4>, quad: u32) -> mat4x4<f32> {
    return mat4x4<f32>(
        side_decode4(vec4<u32>(words[0].x, words[1].x, words[2].x, words[3].x), quad),
        side_decode4(vec4<u32>(words[0].y, words[1].y, words[2].y, words[3].y), quad),
        side_decode4(vec4<u32>(words[0].z, words[1].z, words[2].z, words[3].z), quad),
        side_decode4(vec4<u32>(words[0].w, words[1].w, words[2].w, words[3].w), quad),
    );
}

// Eight neighbouring scales of a page; `element` is the first one's place in the plane, a multiple of 8.
fn side_eight_scales(page: u32, element: u32) -> array<vec4<f32>, 2> {
    let word = SIDE_SCALE_OFFSET + element * SIDE_SCALE_BITS / 32u;
    let at = page * (SIDE_PAGE_WORDS / 4u) + word / 4u;
    let v = side_pages[at];
    if (SIDE_SCALE_BITS == 32u) {
        return array<vec4<f32>, 2>(side_scale_values(v), side_scale_values(side_pages[at + 1u]));
    }
    if (SIDE_SCALE_BITS == 16u) {
        return array<vec4<f32>, 2>(side_scale_values(side_halves(v.xy)), side_scale_values(side_halves(v.zw)));
    }
    let pair = select(v.xy, v.zw, (word & 2u) != 0u);
    return array<vec4<f32>, 2>(side_scale_values(side_bytes(pair.x)), side_scale_values(side_bytes(pair.y)));
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
        return side_scale_values(side_halves(pair));
    }
    return side_scale_values(side_bytes(select(pair.x, pair.y, (word & 1u) != 0u)));
}

fn side_halves(pair: vec2<u32>) -> vec4<u32> {
    return vec4<u32>(pair.x & 0xffffu, pair.x >> 16u, pair.y & 0xffffu, pair.y >> 16u);
}

fn side_bytes(word: u32) -> vec4<u32> {
    return (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(0xffu);
}
