// Scores in f32.
alias Number = f32;

var<workgroup> sh_q: array<vec4<f32>, ROWS * K_QUADS>; // [row, channel quad]

// The queries of a tile into workgroup memory; a barrier must follow.
fn load_queries(local: u32, item: Item, kv_head: u32, head_tile: u32) {
    for (var i = local; i < ROWS * K_QUADS; i += WG_SIZE) {
        sh_q[i] = row_quad(item, kv_head, head_tile, i / K_QUADS, i % K_QUADS);
    }
}

// What the scores of a row are multiplied by.
fn query_unit(row: u32) -> f32 {
    return 1.0;
}

fn k_numbers(words: array<vec4<u32>, 4>, quad: u32) -> mat4x4<f32> {
    return k_codes(words, quad);
}
