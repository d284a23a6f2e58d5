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
