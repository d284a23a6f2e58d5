// Scores of packed integers: each row of queries is rounded to +-127, and four products take one instruction where the
// device has it. Codes are shifted by K_BIAS to be taken from their words without a sign: the dot product with the bias is
// subtracted by blocks of 16 channels.

const K_BIAS: i32 = 8;
const K_UNIT: f32 = 1.0; // of a code
const K_WORDS: u32 = (K_QUADS + K_CHUNK_QUADS - 1u) / K_CHUNK_QUADS;
const K_PACKED: u32 = K_WORDS * K_CHUNK_QUADS; // packed words of a head: part p of word w is number w K_CHUNK_QUADS + p
const K_BLOCKS: u32 = (K_PACKED + 3u) / 4u; // blocks of 16 channels

var<workgroup> sh_q: array<u32, ROWS * K_PACKED>; // [row, packed word], in units of sh_unit
var<workgroup> sh_bias: array<i32, ROWS * K_BLOCKS>; // [row, block]: the bias times the sum of its queries
var<workgroup> sh_unit: array<f32, ROWS>; // [row]

// The queries of a tile into workgroup memory; a barrier must follow.
fn load_queries(local: u32, item: Item, kv_head: u32, head_tile: u32) {
    if (local < ROWS) {
        let largest = largest_query(item, kv_head, head_tile, local);
        sh_unit[local] = select(largest / 127.0, 1.0, largest == 0.0);
    }
    workgroupBarrier();
    for (var i = local; i < ROWS * K_PACKED; i += WG_SIZE) {
        let row = i / K_PACKED;
        // Byte b of part p of a word holds channel K_CHUNK_QUADS b + p of those in the word.
        let first = i % K_PACKED / K_CHUNK_QUADS * 4u * K_CHUNK_QUADS + i % K_CHUNK_QUADS;
        var word = 0u;
        for (var b = 0u; b < 4u; b++) {
            let channel = first + b * K_CHUNK_QUADS;
            if (channel < K_HEAD_DIM) {
                let value = row_quad(item, kv_head, head_tile, row, channel / 4u)[channel % 4u];
                word |= (bitcast<u32>(i32(round(value / sh_unit[row]))) & 0xffu) << (8u * b);
            }
        }
        sh_q[i] = word;
    }
    workgroupBarrier();
    for (var i = local; i < ROWS * K_BLOCKS; i += WG_SIZE) {
        var sum = 0;
        for (var p = i % K_BLOCKS * 4u; p < min(i % K_BLOCKS * 4u + 4u, K_PACKED); p++) {
            sum += dot4I8Packed(sh_q[i / K_BLOCKS * K_PACKED + p], 0x01010101u);
        }
        sh_bias[i] = K_BIAS * sum;
    }
}

// Products of four slots' packed words with one of the queries.
fn four_dots(words: vec4<u32>, q: u32) -> vec4<i32> {
    return vec4<i32>(
        dot4I8Packed(words.x, q),
        dot4I8Packed(words.y, q),
        dot4I8Packed(words.z, q),
        dot4I8Packed(words.w, q),
    );
}

// Part `part` of four slots' words.
fn k_parts(words: vec4<u32>, part: u32) -> vec4<u32> {
    return vec4<u32>(
        k_packed(words.x, part), k_packed(words.y, part), k_packed(words.z, part), k_packed(words.w, part),
    );
}

// The packed words of block `block` of four slots.
fn k_block(page: u32, head: u32, slots: u32, block: u32) -> array<vec4<u32>, 4> {
    var packed: array<vec4<u32>, 4>;
    var words: vec4<u32>;
    for (var p = 0u; p < 4u; p++) {
        let at = min(4u * block + p, K_PACKED - 1u);
        if (p % K_CHUNK_QUADS == 0u) {
            words = k_words(page, head, slots, at / K_CHUNK_QUADS)[0];
        }
        packed[p] = k_parts(words, p % K_CHUNK_QUADS);
    }
    return packed;
}

// q . k of every row with the slots from slot quad `slots` of a page on, without slot scales, into sh_tile from slot quad
// `own` on. The slot quads of one invocation are a, b, c and d: registers must not be chosen by a number.
fn score(page: u32, head: u32, slots: u32, own: u32, position: u32) {
    var scores_a: array<vec4<f32>, ROWS>;
    var scores_b: array<vec4<f32>, ROWS>;
    var scores_c: array<vec4<f32>, ROWS>;
    var scores_d: array<vec4<f32>, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        scores_a[r] = vec4<f32>();
        scores_b[r] = vec4<f32>();
        scores_c[r] = vec4<f32>();
        scores_d[r] = vec4<f32>();
    }
    for (var block = 0u; block < K_BLOCKS; block++) {
        let k_a = k_block(page, head, slots, block);
        let block_a = k_block_scales(page, head, slots, 4u * block);
        var k_b = k_a;
        var k_c = k_a;
        var k_d = k_a;
        var block_b = block_a;
        var block_c = block_a;
        var block_d = block_a;
        if (SLOT_QUADS >= 2u) {
            k_b = k_block(page, head, slots + 1u, block);
            block_b = k_block_scales(page, head, slots + 1u, 4u * block);
        }
        if (SLOT_QUADS == 4u) {
            k_c = k_block(page, head, slots + 2u, block);
            k_d = k_block(page, head, slots + 3u, block);
            block_c = k_block_scales(page, head, slots + 2u, 4u * block);
            block_d = k_block_scales(page, head, slots + 3u, 4u * block);
        }
        for (var r = 0u; r < ROWS; r++) {
            let bias = vec4<i32>(-sh_bias[r * K_BLOCKS + block]);
            var sums_a = bias;
            var sums_b = bias;
            var sums_c = bias;
            var sums_d = bias;
            for (var p = 0u; p < min(4u, K_PACKED); p++) {
                if (K_PACKED % 4u == 0u || 4u * block + p < K_PACKED) {
                    let q = sh_q[r * K_PACKED + 4u * block + p];
                    sums_a += four_dots(k_a[p], q);
                    if (SLOT_QUADS >= 2u) {
                        sums_b += four_dots(k_b[p], q);
                    }
                    if (SLOT_QUADS == 4u) {
                        sums_c += four_dots(k_c[p], q);
                        sums_d += four_dots(k_d[p], q);
                    }
                }
            }
            scores_a[r] += vec4<f32>(sums_a) * block_a;
            scores_b[r] += vec4<f32>(sums_b) * block_b;
            scores_c[r] += vec4<f32>(sums_c) * block_c;
            scores_d[r] += vec4<f32>(sums_d) * block_d;
        }
    }
    for (var r = 0u; r < ROWS; r++) {
        let begin = r * TILE + own;
        let unit = sh_unit[r] * K_UNIT;
        sh_tile[begin] = scores_a[r] * unit;
        if (SLOT_QUADS >= 2u) {
            sh_tile[begin + 1u] = scores_b[r] * unit;
        }
        if (SLOT_QUADS == 4u) {
            sh_tile[begin + 2u] = scores_c[r] * unit;
            sh_tile[begin + 3u] = scores_d[r] * unit;
        }
    }
}
