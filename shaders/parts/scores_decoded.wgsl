// Scores of decoded codes: products and the sums of four of them in Number, the rest in f32.

const K_STEP: u32 = max(2u, K_CHUNK_QUADS); // channel quads of whole words and of whole pairs of quads

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
    for (var step = 0u; step < K_QUADS; step += K_STEP) {
        // Blocks of 16 channels hold whole steps.
        var words_a = k_words(page, head, slots, step / K_CHUNK_QUADS);
        let block_a = k_block_scales(page, head, slots, step);
        var words_b = words_a;
        var words_c = words_a;
        var words_d = words_a;
        var block_b = block_a;
        var block_c = block_a;
        var block_d = block_a;
        if (SLOT_QUADS >= 2u) {
            words_b = k_words(page, head, slots + 1u, step / K_CHUNK_QUADS);
            block_b = k_block_scales(page, head, slots + 1u, step);
        }
        if (SLOT_QUADS == 4u) {
            words_c = k_words(page, head, slots + 2u, step / K_CHUNK_QUADS);
            words_d = k_words(page, head, slots + 3u, step / K_CHUNK_QUADS);
            block_c = k_block_scales(page, head, slots + 2u, step);
            block_d = k_block_scales(page, head, slots + 3u, step);
        }
        for (var pair = step; pair < min(step + K_STEP, K_QUADS); pair += 2u) {
            let channels = k_channel_scales(page, head, slots, pair);
            for (var quad = pair; quad < pair + 2u; quad++) {
                let second = quad > pair;
                if (second && K_CHUNK_QUADS == 1u) {
                    words_a = k_words(page, head, slots, quad);
                    if (SLOT_QUADS >= 2u) {
                        words_b = k_words(page, head, slots + 1u, quad);
                    }
                    if (SLOT_QUADS == 4u) {
                        words_c = k_words(page, head, slots + 2u, quad);
                        words_d = k_words(page, head, slots + 3u, quad);
                    }
                }
                let scales = vec4<Number>(select(channels[0], channels[1], second));
                let k_a = k_numbers(words_a, quad);
                if (SLOT_QUADS == 1u) {
                    for (var r = 0u; r < ROWS; r++) {
                        scores_a[r] += vec4<f32>((sh_q[r * K_QUADS + quad] * scales) * k_a) * block_a;
                    }
                } else {
                    let k_b = k_numbers(words_b, quad);
                    if (SLOT_QUADS == 2u) {
                        for (var r = 0u; r < ROWS; r++) {
                            let q = sh_q[r * K_QUADS + quad] * scales;
                            scores_a[r] += vec4<f32>(q * k_a) * block_a;
                            scores_b[r] += vec4<f32>(q * k_b) * block_b;
                        }
                    } else {
                        let k_c = k_numbers(words_c, quad);
                        let k_d = k_numbers(words_d, quad);
                        for (var r = 0u; r < ROWS; r++) {
                            let q = sh_q[r * K_QUADS + quad] * scales;
                            scores_a[r] += vec4<f32>(q * k_a) * block_a;
                            scores_b[r] += vec4<f32>(q * k_b) * block_b;
                            scores_c[r] += vec4<f32>(q * k_c) * block_c;
                            scores_d[r] += vec4<f32>(q * k_d) * block_d;
                        }
                    }
                }
            }
        }
    }
    for (var r = 0u; r < ROWS; r++) {
        let begin = r * TILE + own;
        let unit = query_unit(r);
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
