// Scores in f16, four products at a time. Each row of queries is brought to +-1/4, so that no code overflows: the largest of
// four products is 4 x 65504 / 4.
enable f16;
alias Number = f16;

var<workgroup> sh_q: array<vec4<f16>, ROWS * K_QUADS>; // [row, channel quad], in units of sh_unit
var<workgroup> sh_unit: array<f32, ROWS>; // [row]

// The queries of a tile into workgroup memory; a barrier must follow.
fn load_queries(local: u32, item: Item, kv_head: u32, head_tile: u32) {
    if (local < ROWS) {
        let largest = largest_query(item, kv_head, head_tile, local);
        sh_unit[local] = select(4.0 * largest, 1.0, largest == 0.0);
    }
    workgroupBarrier();
    for (var i = local; i < ROWS * K_QUADS; i += WG_SIZE) {
        let row = i / K_QUADS;
        sh_q[i] = vec4<f16>(row_quad(item, kv_head, head_tile, row, i % K_QUADS) / sh_unit[row]);
    }
}

// What the scores of a row are multiplied by.
fn query_unit(row: u32) -> f32 {
    return sh_unit[row];
}

fn k_numbers(words: array<vec4<u32>, 4>, quad: u32) -> mat4x4<f16> {
    return mat4x4<f16>(
        k_half4(vec4<u32>(words[0].x, words[1].x, words[2].x, words[3].x), quad),
        k_half4(vec4<u32>(words[0].y, words[1].y, words[2].y, words[3].y), quad),
        k_half4(vec4<u32>(words[0].z, words[1].z, words[2].z, words[3].z), quad),
        k_half4(vec4<u32>(words[0].w, words[1].w, words[2].w, words[3].w), quad),
    );
}
