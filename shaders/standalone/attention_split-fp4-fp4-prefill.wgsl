// ======== attention_split
// Attention over one range of pages, straight from the packed words. One workgroup: one work item (pages of one
// sequence and a tile of its query tokens) x one KV head x a tile of that head's query heads. Every K and V word is
// read once for the whole tile. The result is a partial: the largest score m, the sum l of exp(score - m), and the
// weighted sum o of values; attention_merge combines partials.
const WG_SIZE: u32 = 64u; // invocations of a workgroup
const RATIO: u32 = 4u; // query heads of a KV head
const HEAD_TILE: u32 = 4u; // query heads of one workgroup
const TOKEN_TILE: u32 = 1u; // query tokens of one workgroup
const SLOT_QUADS: u32 = 2u; // 1, 2 or 4: neighbouring slot quads of an invocation; each query quad it loads serves them all
const OUT: u32 = 2u; // 2 or 4: channel quads of an invocation's output; each probability it loads serves them all
const ROWS: u32 = HEAD_TILE * TOKEN_TILE; // row r: query token r / HEAD_TILE, query head r % HEAD_TILE of the tile
const HEAD_TILES: u32 = (RATIO + HEAD_TILE - 1u) / HEAD_TILE; // workgroups of a KV head
const K_QUADS: u32 = K_HEAD_DIM / 4u; // channel quads of a key
const V_QUADS: u32 = V_HEAD_DIM / 4u; // channel quads of a value
const TILE: u32 = SLOT_QUADS * WG_SIZE; // slot quads of a tile
const OUT_UNITS: u32 = V_QUADS / OUT; // units of a value, OUT channel quads each
const LANES: u32 = WG_SIZE / OUT_UNITS; // invocations that share a unit of the output
const PAGE_QUADS: u32 = K_PAGE_TOKENS / 4u; // slot quads of a page
const LOWEST: f32 = -3.4028234663852886e38; // in place of -Infinity
const_assert HEAD_TILE > 0u;
const_assert TOKEN_TILE > 0u;
const_assert K_PAGE_TOKENS == V_PAGE_TOKENS;
const_assert K_HEADS == V_HEADS;
const_assert OUT == 2u || OUT == 4u;
const_assert V_QUADS % OUT == 0u;
const_assert OUT_UNITS <= WG_SIZE;
const_assert SLOT_QUADS == 1u || SLOT_QUADS == 2u || SLOT_QUADS == 4u;
const_assert PAGE_QUADS % SLOT_QUADS == 0u;
const_assert K_GROUP == 1u || K_GROUP % (4u * SLOT_QUADS) == 0u; // an invocation's slots share the scales of channels
const_assert ROWS <= WG_SIZE;

struct Params {
    items: u32, // work items in the list
    q_heads: u32, // query heads
    scale: f32, // of the scores, before the softmax
    k_tensor: u32, // place of K's per-tensor scale
    v_tensor: u32, // place of V's per-tensor scale
    back: u32, // positions before its own that a query sees
    ahead: u32, // positions after its own that a query sees
    softcap: f32, // of the scores, 0 for none
    q_offset: u32, // first channel quad of the queries
    q_row: u32, // channel quads from a query token to the next
    q_head: u32, // channel quads from a query head to the next
    k_turns: u32, // where the turns of keys begin among the per-tensor scales, if keys are turned here
}

struct Item {
    table: u32, // first entry in the page table
    pages: u32, // neighbouring pages of one sequence
    position: u32, // of slot 0 of the first page
    query: u32, // first query token: its row in q
    queries: u32, // query tokens, at most TOKEN_TILE
    query_position: u32, // of the first query token
    partial: u32, // first partial: [query token, query head]
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> items: array<Item>; // [item]
@group(0) @binding(2) var<storage, read> page_table: array<vec4<u32>>; // [entry] (K page, V page, first live slot, end)
@group(0) @binding(4) var<storage, read> k_pages: array<vec4<u32>>; // [page, word, slot quad]
@group(0) @binding(5) var<storage, read> v_pages: array<vec4<u32>>; // [page, word, slot quad]
@group(0) @binding(6) var<storage, read> tensor_scales: array<f32>; // [layer, side]
@group(0) @binding(7) var<storage, read_write> partial_o: array<vec4<f32>>; // [partial, channel quad]
@group(0) @binding(8) var<storage, read_write> partial_ml: array<vec2<f32>>; // [partial] (m, l)

var<workgroup> sh_tile: array<vec4<f32>, ROWS * TILE>; // [row, slot quad]: scores, then probabilities; outputs at the end
var<workgroup> sh_largest: array<f32, ROWS>; // largest score of each row so far
var<workgroup> sh_shrink: array<f32, ROWS>; // what earlier sums shrink by when a larger score is met

// Which of four slots from `slot` on are live.
fn live_slots(entry: vec4<u32>, slot: u32) -> vec4<bool> {
    let slots = vec4<u32>(slot) + vec4<u32>(0u, 1u, 2u, 3u);
    return (slots >= vec4<u32>(entry.z)) & (slots < vec4<u32>(entry.w));
}

// Which of four neighbouring positions from `position` on a query at `own` sees.
fn in_reach(position: u32, own: u32) -> vec4<bool> {
    let positions = vec4<u32>(position) + vec4<u32>(0u, 1u, 2u, 3u);
    let first = own - min(params.back, own);
    let last = own + min(params.ahead, 0xffffffffu - own);
    return (positions >= vec4<u32>(first)) & (positions <= vec4<u32>(last));
}

// cap * tanh(scores / cap). The built-in tanh may come from exp, whose error a cap of 50 would magnify; this quotient of
// polynomials is within 4e-7 of tanh, relatively. From 9 on tanh is 1 in f32, so larger arguments count as 9.
fn capped(scores: vec4<f32>, cap: f32) -> vec4<f32> {
    let x = clamp(scores, vec4<f32>(-9.0 * cap), vec4<f32>(9.0 * cap)) / cap;
    let u = x * x;
    let above = (((1.3353392e-8 * u + 2.060817e-5) * u + 3.4955336e-3) * u + 0.13380980) * u + 0.99999998;
    let below = (((7.776039e-7 * u + 3.2855448e-4) * u + 2.5876777e-2) * u + 0.46714296) * u + 1.0;
    // A NaN must not end at the cap: clamp may drop it.
    let is_nan = (bitcast<vec4<u32>>(scores) & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u);
    return select(cap * (x * (above / below)), scores, is_nan);
}

// The queries of row `row` of the tile of query heads that begins with `head_tile`: their channel quad `quad`, 0 where the
// work item has no such row.
fn row_quad(item: Item, kv_head: u32, head_tile: u32, row: u32, quad: u32) -> vec4<f32> {
    let token = row / HEAD_TILE;
    let head = head_tile + row % HEAD_TILE;
    var value = vec4<f32>();
    if (token < item.queries && head < RATIO) {
        let q_row = params.q_offset + (item.query + token) * params.q_row;
        value = q_quad(q_row + (kv_head * RATIO + head) * params.q_head + quad);
    }
    return value;
}

@compute @workgroup_size(WG_SIZE)
fn attention_split(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    in: Invocation,
) {
    let local = in.local;
    let index = group.y * grid.x + group.x;
    // Uniform: the whole workgroup has an item or none.
    if (index < params.items) {
        let item = items[index];
        let kv_head = group.z / HEAD_TILES;
        let head_tile = group.z % HEAD_TILES * HEAD_TILE;

        load_queries(local, item, kv_head, head_tile);
        if (local < ROWS) {
            sh_largest[local] = LOWEST;
        }
        workgroupBarrier();

        var sums: array<f32, ROWS>; // of this invocation's own probabilities
        var output_a: array<vec4<f32>, ROWS>; // of this invocation's lane: the channel quads of its unit
        var output_b: array<vec4<f32>, ROWS>;
        var output_c: array<vec4<f32>, ROWS>;
        var output_d: array<vec4<f32>, ROWS>;
        for (var r = 0u; r < ROWS; r++) {
            sums[r] = 0.0;
            output_a[r] = vec4<f32>();
            output_b[r] = vec4<f32>();
            output_c[r] = vec4<f32>();
            output_d[r] = vec4<f32>();
        }
        let unit = local % OUT_UNITS;
        let lane = local / OUT_UNITS;
        let slot_quads = item.pages * PAGE_QUADS;

        for (var first = 0u; first < slot_quads; first += TILE) {
            // Scores: an invocation takes SLOT_QUADS neighbouring slot quads of one page and keeps whole dot products in
            // registers. Beyond the end it reads the last ones again, and they count as dead.
            let own = local * SLOT_QUADS;
            let at = first + own;
            let inside = min(at, slot_quads - SLOT_QUADS);
            let entry = page_table[item.table + inside / PAGE_QUADS];
            let slots = inside % PAGE_QUADS;
            if (at < slot_quads && 4u * (slots + SLOT_QUADS) > entry.z && 4u * slots < entry.w) {
                score(entry.x, kv_head, slots, own, item.position + 4u * inside);
            }
            var largest: array<f32, ROWS>;
            for (var r = 0u; r < ROWS; r++) {
                largest[r] = LOWEST;
            }
            for (var s = 0u; s < SLOT_QUADS; s++) {
                let live = live_slots(entry, 4u * (slots + s)) & vec4<bool>(at < slot_quads);
                let scales = k_slot_scales(entry.x, kv_head, slots + s) * params.scale;
                for (var r = 0u; r < ROWS; r++) {
                    let seen = live & in_reach(item.position + 4u * (at + s), item.query_position + r / HEAD_TILE);
                    var scores = sh_tile[r * TILE + own + s] * scales;
                    if (params.softcap > 0.0) {
                        scores = capped(scores, params.softcap);
                    }
                    scores = select(vec4<f32>(LOWEST), scores, seen);
                    sh_tile[r * TILE + own + s] = scores;
                    largest[r] = max(largest[r], max(max(scores.x, scores.y), max(scores.z, scores.w)));
                }
            }
            reduce_largest(in, largest);
            if (local < ROWS) {
                let m = max(sh_largest[local], sh_reduced[local]);
                sh_shrink[local] = exp(sh_largest[local] - m);
                sh_largest[local] = m;
            }
            workgroupBarrier();

            // Probabilities relative to the largest score so far, times the values' slot scales.
            for (var r = 0u; r < ROWS; r++) {
                sums[r] *= sh_shrink[r];
            }
            for (var s = 0u; s < SLOT_QUADS; s++) {
                let live = live_slots(entry, 4u * (slots + s)) & vec4<bool>(at < slot_quads);
                let scales = v_slot_scales(entry.y, kv_head, slots + s);
                for (var r = 0u; r < ROWS; r++) {
                    let seen = live & in_reach(item.position + 4u * (at + s), item.query_position + r / HEAD_TILE);
                    let i = r * TILE + own + s;
                    let p = select(vec4<f32>(), exp(sh_tile[i] - vec4<f32>(sh_largest[r])), seen);
                    sums[r] += (p.x + p.y) + (p.z + p.w);
                    // Selected again: the value scale of a dead slot may be NaN, and 0 x NaN is NaN.
                    sh_tile[i] = select(vec4<f32>(), p * scales, seen);
                }
            }
            workgroupBarrier();

            // Values: an invocation takes one unit of channels and every LANES-th slot quad of a page, page by page, so that
            // page table entries are loaded once.
            for (var r = 0u; r < ROWS; r++) {
                output_a[r] *= sh_shrink[r];
                output_b[r] *= sh_shrink[r];
                output_c[r] *= sh_shrink[r];
                output_d[r] *= sh_shrink[r];
            }
            if (lane < LANES) {
                let end = min(first + TILE, slot_quads);
                for (var page = first / PAGE_QUADS; page * PAGE_QUADS < end; page++) {
                    let value_entry = page_table[item.table + page];
                    let begin = page * PAGE_QUADS;
                    for (var i = max(first, begin) + lane; i < min(end, begin + PAGE_QUADS); i += LANES) {
                        let value_slots = i - begin;
                        let used = live_slots(value_entry, 4u * value_slots);
                        if (any(used)) {
                            let quad = unit * OUT;
                            let words_a = v_words(value_entry.y, kv_head, value_slots, quad / V_CHUNK_QUADS);
                            var words_b = words_a;
                            if (V_CHUNK_QUADS == 1u) {
                                words_b = v_words(value_entry.y, kv_head, value_slots, quad + 1u);
                            }
                            var v_a = v_codes(words_a, quad);
                            var v_b = v_codes(words_b, quad + 1u);
                            let channels = v_channel_scales(value_entry.y, kv_head, value_slots, quad);
                            // A unit lies within one block of 16 channels.
                            var block = v_block_scales(value_entry.y, kv_head, value_slots, quad);
                            if (!all(used)) {
                                // Dead slots never enter the arithmetic.
                                block = select(vec4<f32>(), block, used);
                                for (var j = 0u; j < 4u; j++) {
                                    v_a[j] = select(vec4<f32>(), v_a[j], used[j]);
                                    v_b[j] = select(vec4<f32>(), v_b[j], used[j]);
                                }
                            }
                            if (OUT == 2u) {
                                for (var r = 0u; r < ROWS; r++) {
                                    let p = sh_tile[r * TILE + i - first] * block;
                                    output_a[r] += (v_a * p) * channels[0];
                                    output_b[r] += (v_b * p) * channels[1];
                                }
                            } else {
                                var words_c = words_a;
                                if (V_CHUNK_QUADS < 4u) {
                                    words_c = v_words(value_entry.y, kv_head, value_slots, (quad + 2u) / V_CHUNK_QUADS);
                                }
                                var words_d = words_c;
                                if (V_CHUNK_QUADS == 1u) {
                                    words_d = v_words(value_entry.y, kv_head, value_slots, quad + 3u);
                                }
                                var v_c = v_codes(words_c, quad + 2u);
                                var v_d = v_codes(words_d, quad + 3u);
                                let others = v_channel_scales(value_entry.y, kv_head, value_slots, quad + 2u);
                                if (!all(used)) {
                                    for (var j = 0u; j < 4u; j++) {
                                        v_c[j] = select(vec4<f32>(), v_c[j], used[j]);
                                        v_d[j] = select(vec4<f32>(), v_d[j], used[j]);
                                    }
                                }
                                for (var r = 0u; r < ROWS; r++) {
                                    let p = sh_tile[r * TILE + i - first] * block;
                                    output_a[r] += (v_a * p) * channels[0];
                                    output_b[r] += (v_b * p) * channels[1];
                                    output_c[r] += (v_c * p) * others[0];
                                    output_d[r] += (v_d * p) * others[1];
                                }
                            }
                        }
                    }
                }
            }
            workgroupBarrier();
        }

        // The invocations' sums and the lanes' outputs.
        reduce_sum(in, sums);
        for (var o = 0u; o < OUT; o++) {
            for (var r = 0u; r < ROWS; r++) {
                let pair = select(output_a[r], output_b[r], o == 1u);
                sh_tile[r * TILE + local] = select(pair, select(output_c[r], output_d[r], o == 3u), o >= 2u);
            }
            workgroupBarrier();
            for (var i = local; i < ROWS * OUT_UNITS; i += WG_SIZE) {
                let r = i / OUT_UNITS;
                let quad = i % OUT_UNITS * OUT + o;
                let token = r / HEAD_TILE;
                let head = head_tile + r % HEAD_TILE;
                if (token < item.queries && head < RATIO) {
                    let partial = item.partial + token * params.q_heads + kv_head * RATIO + head;
                    var sum = vec4<f32>();
                    for (var j = i % OUT_UNITS; j < LANES * OUT_UNITS; j += OUT_UNITS) {
                        sum += sh_tile[r * TILE + j];
                    }
                    partial_o[partial * V_QUADS + quad] = sum;
                }
            }
            workgroupBarrier();
        }
        if (local < ROWS) {
            let token = local / HEAD_TILE;
            let head = head_tile + local % HEAD_TILE;
            if (token < item.queries && head < RATIO) {
                let partial = item.partial + token * params.q_heads + kv_head * RATIO + head;
                partial_ml[partial] = vec2<f32>(sh_largest[local], sh_reduced[local]);
            }
        }
    }
}

// ======== parts/side for k
// The geometry of one side's pages. Written once with names that begin with k_; the composer makes the copies for
// K (k_) and V (v_). A page is a code plane, word w of slot t at w * K_PAGE_TOKENS + t, then a plane of scales.
const K_BITS: u32 = 4u; // of a code
const K_HEADS: u32 = 2u; // KV heads
const K_HEAD_DIM: u32 = 64u; // channels of a head
const K_HEAD_WORDS: u32 = 8u; // words of a head of one token
const K_PAGE_TOKENS: u32 = 64u; // slots
const K_PAGE_WORDS: u32 = 1152u; // words of a whole page
const K_SCALE_OFFSET: u32 = 1024u; // word at which the scales begin
const K_SCALE_BITS: u32 = 8u; // of a stored scale
const K_GROUP: u32 = 1u; // tokens that share a per-channel scale
const_assert K_HEAD_DIM % 8u == 0u;
const_assert K_PAGE_TOKENS % 8u == 0u;
const_assert K_PAGE_TOKENS % K_GROUP == 0u;
const_assert K_PAGE_WORDS % 4u == 0u;

// ======== parts/read_side for k
// Reading one side's pages, bound as vec4<u32>: one load brings four neighbouring slots of a word.

const K_CHUNK_QUADS: u32 = max(1u, 8u / K_BITS); // channel quads of a word; one where a quad takes several words
const K_CHUNK_WORDS: u32 = max(1u, K_BITS / 8u);

// The words of slots 4 slots .. 4 slots + 3 that hold the chunk beginning with channel quad `chunk` * K_CHUNK_QUADS of
// a head: a vec4 a word.
fn k_words(page: u32, head: u32, slots: u32, chunk: u32) -> array<vec4<u32>, 4> {
    let word = head * K_HEAD_WORDS + chunk * K_CHUNK_WORDS;
    let at = page * (K_PAGE_WORDS / 4u) + word * (K_PAGE_TOKENS / 4u) + slots;
    var words = array<vec4<u32>, 4>(k_pages[at], vec4<u32>(), vec4<u32>(), vec4<u32>());
    if (K_BITS >= 16u) {
        words[1] = k_pages[at + K_PAGE_TOKENS / 4u];
    }
    if (K_BITS >= 32u) {
        words[2] = k_pages[at + 2u * (K_PAGE_TOKENS / 4u)];
        words[3] = k_pages[at + 3u * (K_PAGE_TOKENS / 4u)];
    }
    return words;
}

// Codes of channels 4 quad .. 4 quad + 3 in those words, unscaled: a column a slot.
fn k_codes(words: array<vec4<u32>, 4>, quad: u32) -> mat4x4<f32> {
    return mat4x4<f32>(
        k_decode4(vec4<u32>(words[0].x, words[1].x, words[2].x, words[3].x), quad),
        k_decode4(vec4<u32>(words[0].y, words[1].y, words[2].y, words[3].y), quad),
        k_decode4(vec4<u32>(words[0].z, words[1].z, words[2].z, words[3].z), quad),
        k_decode4(vec4<u32>(words[0].w, words[1].w, words[2].w, words[3].w), quad),
    );
}

// Eight neighbouring scales of a page; `element` is the first one's place in the plane, a multiple of 8.
fn k_eight_scales(page: u32, element: u32) -> array<vec4<f32>, 2> {
    let word = K_SCALE_OFFSET + element * K_SCALE_BITS / 32u;
    let at = page * (K_PAGE_WORDS / 4u) + word / 4u;
    let v = k_pages[at];
    if (K_SCALE_BITS == 32u) {
        return array<vec4<f32>, 2>(k_scale_values(v), k_scale_values(k_pages[at + 1u]));
    }
    if (K_SCALE_BITS == 16u) {
        return array<vec4<f32>, 2>(k_scale_values(k_halves(v.xy)), k_scale_values(k_halves(v.zw)));
    }
    let pair = select(v.xy, v.zw, (word & 2u) != 0u);
    return array<vec4<f32>, 2>(k_scale_values(k_bytes(pair.x)), k_scale_values(k_bytes(pair.y)));
}

// Four neighbouring scales of a page; `element` is the first one's place in the plane, a multiple of 4.
fn k_scales(page: u32, element: u32) -> vec4<f32> {
    let word = K_SCALE_OFFSET + element * K_SCALE_BITS / 32u;
    let v = k_pages[page * (K_PAGE_WORDS / 4u) + word / 4u];
    if (K_SCALE_BITS == 32u) {
        return k_scale_values(v);
    }
    let pair = select(v.xy, v.zw, (word & 2u) != 0u);
    if (K_SCALE_BITS == 16u) {
        return k_scale_values(k_halves(pair));
    }
    return k_scale_values(k_bytes(select(pair.x, pair.y, (word & 1u) != 0u)));
}

fn k_halves(pair: vec2<u32>) -> vec4<u32> {
    return vec4<u32>(pair.x & 0xffffu, pair.x >> 16u, pair.y & 0xffffu, pair.y >> 16u);
}

fn k_bytes(word: u32) -> vec4<u32> {
    return (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(0xffu);
}

// ======== scales/per_block for k
// One scale for each 16 neighbouring channels of a token's row; blocks may span heads.
fn k_slot_scales(page: u32, head: u32, slots: u32) -> vec4<f32> {
    return vec4<f32>(1.0);
}
// The scales of four neighbouring slots for the block that holds channels 4 quad .. 4 quad + 3 of the head.
fn k_block_scales(page: u32, head: u32, slots: u32, quad: u32) -> vec4<f32> {
    let block = (head * K_HEAD_DIM + 4u * quad) / 16u;
    return k_scales(page, block * K_PAGE_TOKENS + 4u * slots);
}
fn k_channel_scales(page: u32, head: u32, slots: u32, quad: u32) -> array<vec4<f32>, 2> {
    return array<vec4<f32>, 2>(vec4<f32>(1.0), vec4<f32>(1.0));
}

// ======== formats/fp4_e2m1
// FP4 E2M1: 1 sign, 2 exponent (bias 1), 1 mantissa bit: 0 0.5 1 1.5 2 3 4 6; eight numbers a word.
//   bits   31..28 27..24  ...  3..0
//   channel   7      6    ...   0
const FP4_E2M1_BITS: u32 = 4u;

// Channels 4 quad .. 4 quad + 3 of one slot; `words.x` is the head's word that holds them.
fn fp4_e2m1_decode4(words: vec4<u32>, quad: u32) -> vec4<f32> {
    let word = words.x >> ((quad & 1u) * 16u);
    let codes = vec4<u32>(word, word >> 4u, word >> 8u, word >> 12u);
    let normal = ((codes & vec4<u32>(7u)) << vec4<u32>(22u)) + vec4<u32>(0x3f000000u);
    let subnormal = (codes & vec4<u32>(1u)) * 0x3f000000u;
    let magnitude = select(normal, subnormal, (codes & vec4<u32>(6u)) == vec4<u32>(0u));
    return bitcast<vec4<f32>>(magnitude | ((codes & vec4<u32>(8u)) << vec4<u32>(28u)));
}

// Four codes of a word, channels `part`, `part` + 2, ..., as packed bytes, each 12 more than twice the code's value.
fn fp4_e2m1_packed(word: u32, part: u32) -> u32 {
    let codes = word >> (4u * part);
    let exponent_low = (codes >> 1u) & 0x01010101u;
    let exponent_high = (codes >> 2u) & 0x01010101u;
    let significand = (codes & 0x01010101u) + 2u * (exponent_low | exponent_high);
    // Twice the value: the significand shifted by exponent - 1.
    let twice = significand + (significand & (exponent_high * 0xffu))
        + ((significand << 1u) & ((exponent_low & exponent_high) * 0xffu));
    let negative = ((codes >> 3u) & 0x01010101u) * 0xffu;
    return 0x0c0c0c0cu + (twice & ~negative) - (twice & negative);
}

// ======== formats/fp8_e4m3
// FP8 E4M3FN: 1 sign, 4 exponent (bias 7), 3 mantissa bits; largest 448, S.1111.111 is NaN; four numbers a word.
//   bits   31..24 23..16 15..8 7..0
//   channel   3      2     1    0
const FP8_E4M3_BITS: u32 = 8u;

// The values of four codes.
fn fp8_e4m3_values(codes: vec4<u32>) -> vec4<f32> {
    let shifted = (codes & vec4<u32>(0x7fu)) << vec4<u32>(20u);
    let normal = select(shifted + vec4<u32>(0x3c000000u), vec4<u32>(0x7fc00000u), shifted == vec4<u32>(0x07f00000u));
    let subnormal = bitcast<vec4<u32>>(vec4<f32>(codes & vec4<u32>(7u)) * 0.001953125);
    let magnitude = select(normal, subnormal, shifted < vec4<u32>(0x00800000u));
    return bitcast<vec4<f32>>(magnitude | ((codes & vec4<u32>(0x80u)) << vec4<u32>(24u)));
}

// Channels 4 quad .. 4 quad + 3 of one slot; `words.x` is the head's word that holds them.
fn fp8_e4m3_decode4(words: vec4<u32>, quad: u32) -> vec4<f32> {
    return fp8_e4m3_values(vec4<u32>(words.x, words.x >> 8u, words.x >> 16u, words.x >> 24u));
}

// ======== parts/side for v
// The geometry of one side's pages. Written once with names that begin with v_; the composer makes the copies for
// K (k_) and V (v_). A page is a code plane, word w of slot t at w * V_PAGE_TOKENS + t, then a plane of scales.
const V_BITS: u32 = 4u; // of a code
const V_HEADS: u32 = 2u; // KV heads
const V_HEAD_DIM: u32 = 64u; // channels of a head
const V_HEAD_WORDS: u32 = 8u; // words of a head of one token
const V_PAGE_TOKENS: u32 = 64u; // slots
const V_PAGE_WORDS: u32 = 1152u; // words of a whole page
const V_SCALE_OFFSET: u32 = 1024u; // word at which the scales begin
const V_SCALE_BITS: u32 = 8u; // of a stored scale
const V_GROUP: u32 = 1u; // tokens that share a per-channel scale
const_assert V_HEAD_DIM % 8u == 0u;
const_assert V_PAGE_TOKENS % 8u == 0u;
const_assert V_PAGE_TOKENS % V_GROUP == 0u;
const_assert V_PAGE_WORDS % 4u == 0u;

// ======== parts/read_side for v
// Reading one side's pages, bound as vec4<u32>: one load brings four neighbouring slots of a word.

const V_CHUNK_QUADS: u32 = max(1u, 8u / V_BITS); // channel quads of a word; one where a quad takes several words
const V_CHUNK_WORDS: u32 = max(1u, V_BITS / 8u);

// The words of slots 4 slots .. 4 slots + 3 that hold the chunk beginning with channel quad `chunk` * V_CHUNK_QUADS of
// a head: a vec4 a word.
fn v_words(page: u32, head: u32, slots: u32, chunk: u32) -> array<vec4<u32>, 4> {
    let word = head * V_HEAD_WORDS + chunk * V_CHUNK_WORDS;
    let at = page * (V_PAGE_WORDS / 4u) + word * (V_PAGE_TOKENS / 4u) + slots;
    var words = array<vec4<u32>, 4>(v_pages[at], vec4<u32>(), vec4<u32>(), vec4<u32>());
    if (V_BITS >= 16u) {
        words[1] = v_pages[at + V_PAGE_TOKENS / 4u];
    }
    if (V_BITS >= 32u) {
        words[2] = v_pages[at + 2u * (V_PAGE_TOKENS / 4u)];
        words[3] = v_pages[at + 3u * (V_PAGE_TOKENS / 4u)];
    }
    return words;
}

// Codes of channels 4 quad .. 4 quad + 3 in those words, unscaled: a column a slot.
fn v_codes(words: array<vec4<u32>, 4>, quad: u32) -> mat4x4<f32> {
    return mat4x4<f32>(
        v_decode4(vec4<u32>(words[0].x, words[1].x, words[2].x, words[3].x), quad),
        v_decode4(vec4<u32>(words[0].y, words[1].y, words[2].y, words[3].y), quad),
        v_decode4(vec4<u32>(words[0].z, words[1].z, words[2].z, words[3].z), quad),
        v_decode4(vec4<u32>(words[0].w, words[1].w, words[2].w, words[3].w), quad),
    );
}

// Eight neighbouring scales of a page; `element` is the first one's place in the plane, a multiple of 8.
fn v_eight_scales(page: u32, element: u32) -> array<vec4<f32>, 2> {
    let word = V_SCALE_OFFSET + element * V_SCALE_BITS / 32u;
    let at = page * (V_PAGE_WORDS / 4u) + word / 4u;
    let v = v_pages[at];
    if (V_SCALE_BITS == 32u) {
        return array<vec4<f32>, 2>(v_scale_values(v), v_scale_values(v_pages[at + 1u]));
    }
    if (V_SCALE_BITS == 16u) {
        return array<vec4<f32>, 2>(v_scale_values(v_halves(v.xy)), v_scale_values(v_halves(v.zw)));
    }
    let pair = select(v.xy, v.zw, (word & 2u) != 0u);
    return array<vec4<f32>, 2>(v_scale_values(v_bytes(pair.x)), v_scale_values(v_bytes(pair.y)));
}

// Four neighbouring scales of a page; `element` is the first one's place in the plane, a multiple of 4.
fn v_scales(page: u32, element: u32) -> vec4<f32> {
    let word = V_SCALE_OFFSET + element * V_SCALE_BITS / 32u;
    let v = v_pages[page * (V_PAGE_WORDS / 4u) + word / 4u];
    if (V_SCALE_BITS == 32u) {
        return v_scale_values(v);
    }
    let pair = select(v.xy, v.zw, (word & 2u) != 0u);
    if (V_SCALE_BITS == 16u) {
        return v_scale_values(v_halves(pair));
    }
    return v_scale_values(v_bytes(select(pair.x, pair.y, (word & 1u) != 0u)));
}

fn v_halves(pair: vec2<u32>) -> vec4<u32> {
    return vec4<u32>(pair.x & 0xffffu, pair.x >> 16u, pair.y & 0xffffu, pair.y >> 16u);
}

fn v_bytes(word: u32) -> vec4<u32> {
    return (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(0xffu);
}

// ======== scales/per_block for v
// One scale for each 16 neighbouring channels of a token's row; blocks may span heads.
fn v_slot_scales(page: u32, head: u32, slots: u32) -> vec4<f32> {
    return vec4<f32>(1.0);
}
// The scales of four neighbouring slots for the block that holds channels 4 quad .. 4 quad + 3 of the head.
fn v_block_scales(page: u32, head: u32, slots: u32, quad: u32) -> vec4<f32> {
    let block = (head * V_HEAD_DIM + 4u * quad) / 16u;
    return v_scales(page, block * V_PAGE_TOKENS + 4u * slots);
}
fn v_channel_scales(page: u32, head: u32, slots: u32, quad: u32) -> array<vec4<f32>, 2> {
    return array<vec4<f32>, 2>(vec4<f32>(1.0), vec4<f32>(1.0));
}

// ======== parts/reduce_workgroup
// One number of each row over a workgroup, through workgroup memory, in a fixed order.

// What differs between the invocations of a workgroup: compilers take every member of a struct for as uniform as the least.
struct Invocation {
    @builtin(local_invocation_index) local: u32,
}

const REDUCERS: u32 = 8u; // invocations that share a row
const_assert WG_SIZE % REDUCERS == 0u;

var<workgroup> sh_reduced: array<f32, ROWS>; // [row]: the result
var<workgroup> sh_given: array<f32, ROWS * WG_SIZE>; // [row, invocation]
var<workgroup> sh_shared: array<f32, ROWS * REDUCERS>; // [row, reducer]

// The largest value that any invocation gives for each row, for invocation `row`.
fn reduce_largest(in: Invocation, values: array<f32, ROWS>) {
    for (var r = 0u; r < ROWS; r++) {
        sh_given[r * WG_SIZE + in.local] = values[r];
    }
    workgroupBarrier();
    for (var i = in.local; i < ROWS * REDUCERS; i += WG_SIZE) {
        let begin = i / REDUCERS * WG_SIZE;
        var m = sh_given[begin + i % REDUCERS];
        for (var j = begin + i % REDUCERS + REDUCERS; j < begin + WG_SIZE; j += REDUCERS) {
            m = max(m, sh_given[j]);
        }
        sh_shared[i] = m;
    }
    workgroupBarrier();
    if (in.local < ROWS) {
        var m = sh_shared[in.local * REDUCERS];
        for (var j = 1u; j < REDUCERS; j++) {
            m = max(m, sh_shared[in.local * REDUCERS + j]);
        }
        sh_reduced[in.local] = m;
    }
}

// The sum of what the invocations give for each row, for invocation `row`.
fn reduce_sum(in: Invocation, values: array<f32, ROWS>) {
    for (var r = 0u; r < ROWS; r++) {
        sh_given[r * WG_SIZE + in.local] = values[r];
    }
    workgroupBarrier();
    for (var i = in.local; i < ROWS * REDUCERS; i += WG_SIZE) {
        let begin = i / REDUCERS * WG_SIZE;
        var sum = 0.0;
        for (var j = begin + i % REDUCERS; j < begin + WG_SIZE; j += REDUCERS) {
            sum += sh_given[j];
        }
        sh_shared[i] = sum;
    }
    workgroupBarrier();
    if (in.local < ROWS) {
        var sum = 0.0;
        for (var j = 0u; j < REDUCERS; j++) {
            sum += sh_shared[in.local * REDUCERS + j];
        }
        sh_reduced[in.local] = sum;
    }
}

// ======== parts/numbers_f32
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

// ======== parts/scores_decoded
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

// ======== parts/q_f32
// Queries as f32.
@group(0) @binding(3) var<storage, read> q: array<vec4<f32>>; // [token, query head, channel quad]

// A channel quad of the queries.
fn q_quad(at: u32) -> vec4<f32> {
    return q[at];
}

// ======== the names that the kernel calls
fn k_decode4(words: vec4<u32>, quad: u32) -> vec4<f32> { return fp4_e2m1_decode4(words, quad); }
fn k_scale_values(bits: vec4<u32>) -> vec4<f32> { return fp8_e4m3_values(bits); }
fn v_decode4(words: vec4<u32>, quad: u32) -> vec4<f32> { return fp4_e2m1_decode4(words, quad); }
fn v_scale_values(bits: vec4<u32>) -> vec4<f32> { return fp8_e4m3_values(bits); }
