// Scores of keys that are stored before RoPE: they are turned by their positions as they are read. The turns, [position,
// pair] (cos, sin), lie behind the per-tensor scales. Scales of channels and blocks differ within a pair, so they come
// before the turn; a slot's own scale can wait.

const K_HALVES: bool = false; // pairs of channels i and i + K_HEAD_DIM / 2 instead of 2 i and 2 i + 1

// A channel quad of four slots times its scales of channels and blocks: a column a slot.
fn k_scaled(page: u32, head: u32, slots: u32, quad: u32) -> mat4x4<f32> {
    let codes = k_codes(k_words(page, head, slots, quad / K_CHUNK_QUADS), quad);
    let pair = k_channel_scales(page, head, slots, quad / 2u * 2u);
    let channels = select(pair[0], pair[1], quad % 2u == 1u);
    let blocks = k_block_scales(page, head, slots, quad);
    return mat4x4<f32>(
        (codes[0] * channels) * blocks.x,
        (codes[1] * channels) * blocks.y,
        (codes[2] * channels) * blocks.z,
        (codes[3] * channels) * blocks.w,
    );
}

// One slot's quad, turned; `other` is the quad that holds the other channels of its pairs.
fn k_turn(own: vec4<f32>, other: vec4<f32>, quad: u32, position: u32) -> vec4<f32> {
    // Dead slots may lie beyond the last position; their scores are dropped.
    let row = min(params.k_turns + position * K_HEAD_DIM, arrayLength(&tensor_scales) - K_HEAD_DIM);
    if (K_HALVES) {
        let at = row + 8u * (quad % (K_QUADS / 2u));
        let cosines = vec4<f32>(tensor_scales[at], tensor_scales[at + 2u], tensor_scales[at + 4u], tensor_scales[at + 6u]);
        let sines = vec4<f32>(tensor_scales[at + 1u], tensor_scales[at + 3u], tensor_scales[at + 5u], tensor_scales[at + 7u]);
        return own * cosines + other * select(sines, -sines, quad < K_QUADS / 2u);
    }
    let at = row + 4u * quad;
    let cosines = vec2<f32>(tensor_scales[at], tensor_scales[at + 2u]).xxyy;
    let sines = vec2<f32>(tensor_scales[at + 1u], tensor_scales[at + 3u]).xxyy;
    return own * cosines + vec4<f32>(-own.y, own.x, -own.w, own.z) * sines;
}

fn k_turned(page: u32, head: u32, slots: u32, quad: u32, position: u32) -> mat4x4<f32> {
    let own = k_scaled(page, head, slots, quad);
    var other = own;
    if (K_HALVES) {
        other = k_scaled(page, head, slots, (quad + K_QUADS / 2u) % K_QUADS);
    }
    return mat4x4<f32>(
        k_turn(own[0], other[0], quad, position),
        k_turn(own[1], other[1], quad, position + 1u),
        k_turn(own[2], other[2], quad, position + 2u),
        k_turn(own[3], other[3], quad, position + 3u),
    );
}

// q . k of every row with the slots from slot quad `slots` of a page on, the first of them at `position`, without slot
// scales, into sh_tile from slot quad `own` on.
fn score(page: u32, head: u32, slots: u32, own: u32, position: u32) {
    for (var s = 0u; s < SLOT_QUADS; s++) {
        var scores: array<vec4<f32>, ROWS>;
        for (var r = 0u; r < ROWS; r++) {
            scores[r] = vec4<f32>();
        }
        for (var quad = 0u; quad < K_QUADS; quad++) {
            let k = k_turned(page, head, slots + s, quad, position + 4u * s);
            for (var r = 0u; r < ROWS; r++) {
                scores[r] += sh_q[r * K_QUADS + quad] * k;
            }
        }
        for (var r = 0u; r < ROWS; r++) {
            sh_tile[r * TILE + own + s] = scores[r] * query_unit(r);
        }
    }
}
