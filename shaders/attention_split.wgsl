// Attention over one range of pages, straight from the packed words. One workgroup: one work item (pages of one
// sequence and a tile of its query tokens) x one KV head x a tile of that head's query heads. Every K and V word is
// read once for the whole tile. The result is a partial: the largest score m, the sum l of exp(score - m), and the
// weighted sum o of values; attention_merge combines partials.
const WG_SIZE: u32 = 64u;
const RATIO: u32 = 4u; // query heads of a KV head
const HEAD_TILE: u32 = 4u; // query heads of one workgroup
const TOKEN_TILE: u32 = 1u; // query tokens of one workgroup
const ROWS: u32 = HEAD_TILE * TOKEN_TILE; // row r: query token r / HEAD_TILE, query head r % HEAD_TILE of the tile
const HEAD_TILES: u32 = (RATIO + HEAD_TILE - 1u) / HEAD_TILE;
const K_QUADS: u32 = K_HEAD_DIM / 4u;
const V_QUADS: u32 = V_HEAD_DIM / 4u;
const K_CHUNKS: u32 = (K_QUADS + K_CHUNK_QUADS - 1u) / K_CHUNK_QUADS;
const SLOT_QUADS: u32 = 2u; // 1 or 2: slot quads of an invocation; each query quad that it loads serves them all
const TILE: u32 = SLOT_QUADS * WG_SIZE; // slot quads of a tile
const OUT: u32 = 2u; // channel quads of an invocation's output (a and b): each probability that it loads serves both
const OUT_UNITS: u32 = V_QUADS / OUT;
const LANES: u32 = WG_SIZE / OUT_UNITS; // invocations that share a unit of the output
const PAGE_QUADS: u32 = K_PAGE_TOKENS / 4u;
const REDUCERS: u32 = 8u; // invocations that find one row's maximum
const LOWEST: f32 = -3.4028234663852886e38;
const_assert HEAD_TILE > 0u;
const_assert TOKEN_TILE > 0u;
const_assert K_PAGE_TOKENS == V_PAGE_TOKENS;
const_assert K_HEADS == V_HEADS;
const_assert OUT_UNITS <= WG_SIZE;
const_assert V_QUADS % OUT == 0u;
const_assert SLOT_QUADS == 1u || SLOT_QUADS == 2u;
const_assert WG_SIZE % REDUCERS == 0u;
const_assert ROWS <= WG_SIZE;

struct Params {
    items: u32,
    q_heads: u32,
    scale: f32, // of the scores, before the softmax
    k_tensor: u32, // places of the per-tensor scales
    v_tensor: u32,
    back: u32, // positions before its own that a query sees
    ahead: u32, // positions after its own that a query sees
    softcap: f32, // 0 for none
    q_offset: u32, // first channel quad of the queries
    q_row: u32, // channel quads from a query token to the next
    q_head: u32, // from a query head to the next
    k_turns: u32, // where the turns of keys begin among the per-tensor scales, if keys are turned here
}

struct Item {
    table: u32, // first entry in the page table
    pages: u32,
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

var<workgroup> sh_q: array<vec4<f32>, ROWS * K_QUADS>; // [row, channel quad]
var<workgroup> sh_tile: array<vec4<f32>, ROWS * TILE>; // [row, slot quad]: scores, then probabilities; outputs at the end
var<workgroup> sh_sum: array<f32, ROWS * WG_SIZE>; // [row, invocation]: sum of its own probabilities
var<workgroup> sh_reduced: array<f32, ROWS * REDUCERS>;
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

@compute @workgroup_size(WG_SIZE)
fn attention_split(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = group.y * grid.x + group.x;
    // Uniform: the whole workgroup has an item or none.
    if (index < params.items) {
        let item = items[index];
        let kv_head = group.z / HEAD_TILES;
        let head_tile = group.z % HEAD_TILES * HEAD_TILE;

        for (var i = local; i < ROWS * K_QUADS; i += WG_SIZE) {
            let row = i / K_QUADS;
            let token = row / HEAD_TILE;
            let head = head_tile + row % HEAD_TILE;
            var value = vec4<f32>();
            if (token < item.queries && head < RATIO) {
                let q_row = params.q_offset + (item.query + token) * params.q_row;
                value = q_quad(q_row + (kv_head * RATIO + head) * params.q_head + i % K_QUADS);
            }
            sh_q[i] = value;
        }
        for (var i = local; i < ROWS * WG_SIZE; i += WG_SIZE) {
            sh_sum[i] = 0.0;
        }
        if (local < ROWS) {
            sh_largest[local] = LOWEST;
        }
        workgroupBarrier();

        var output_a: array<vec4<f32>, ROWS>; // of this invocation's lane, first channel quad of its unit
        var output_b: array<vec4<f32>, ROWS>; // second one
        for (var r = 0u; r < ROWS; r++) {
            output_a[r] = vec4<f32>();
            output_b[r] = vec4<f32>();
        }
        let unit = local % OUT_UNITS;
        let lane = local / OUT_UNITS;
        let slot_quads = item.pages * PAGE_QUADS;

        for (var first = 0u; first < slot_quads; first += TILE) {
            // Scores: an invocation takes one or two runs of four neighbouring slots (a and b) and keeps whole dot products
            // in registers. Beyond the end it reads the last slots again, and they count as dead.
            let at_a = first + local;
            let at_b = at_a + WG_SIZE;
            let inside_a = min(at_a, slot_quads - 1u);
            let inside_b = min(at_b, slot_quads - 1u);
            let entry_a = page_table[item.table + inside_a / PAGE_QUADS];
            let entry_b = page_table[item.table + inside_b / PAGE_QUADS];
            let slots_a = inside_a % PAGE_QUADS;
            let slots_b = inside_b % PAGE_QUADS;
            let live_a = live_slots(entry_a, 4u * slots_a) & vec4<bool>(at_a < slot_quads);
            let live_b = live_slots(entry_b, 4u * slots_b) & vec4<bool>(at_b < slot_quads);
            var scores_a: array<vec4<f32>, ROWS>;
            var scores_b: array<vec4<f32>, ROWS>;
            for (var r = 0u; r < ROWS; r++) {
                scores_a[r] = vec4<f32>();
                scores_b[r] = vec4<f32>();
            }
            if (any(live_a | live_b)) {
                for (var chunk = 0u; chunk < K_CHUNKS; chunk++) {
                    let words_a = k_words(entry_a.x, kv_head, slots_a, chunk);
                    var words_b = words_a;
                    // Blocks of 16 channels hold whole chunks.
                    let block_a = k_quad_blocks(entry_a.x, kv_head, slots_a, chunk * K_CHUNK_QUADS);
                    var block_b = block_a;
                    if (SLOT_QUADS == 2u) {
                        words_b = k_words(entry_b.x, kv_head, slots_b, chunk);
                        block_b = k_quad_blocks(entry_b.x, kv_head, slots_b, chunk * K_CHUNK_QUADS);
                    }
                    for (var quad = chunk * K_CHUNK_QUADS; quad < min((chunk + 1u) * K_CHUNK_QUADS, K_QUADS); quad++) {
                        let k_a = k_quad(words_a, entry_a.x, kv_head, slots_a, quad, item.position + 4u * inside_a);
                        let channels_a = k_quad_channels(entry_a.x, kv_head, slots_a, quad);
                        if (SLOT_QUADS == 2u) {
                            let k_b = k_quad(words_b, entry_b.x, kv_head, slots_b, quad, item.position + 4u * inside_b);
                            let channels_b = k_quad_channels(entry_b.x, kv_head, slots_b, quad);
                            for (var r = 0u; r < ROWS; r++) {
                                let q = sh_q[r * K_QUADS + quad];
                                scores_a[r] += ((q * channels_a) * k_a) * block_a;
                                scores_b[r] += ((q * channels_b) * k_b) * block_b;
                            }
                        } else {
                            for (var r = 0u; r < ROWS; r++) {
                                scores_a[r] += ((sh_q[r * K_QUADS + quad] * channels_a) * k_a) * block_a;
                            }
                        }
                    }
                }
            }
            let k_scales_a = k_slot_scales(entry_a.x, kv_head, slots_a) * params.scale;
            let k_scales_b = k_slot_scales(entry_b.x, kv_head, slots_b) * params.scale;
            let v_scales_a = v_slot_scales(entry_a.y, kv_head, slots_a);
            let v_scales_b = v_slot_scales(entry_b.y, kv_head, slots_b);
            for (var r = 0u; r < ROWS; r++) {
                sh_tile[r * TILE + local] = scores_a[r] * k_scales_a;
                if (SLOT_QUADS == 2u) {
                    sh_tile[r * TILE + WG_SIZE + local] = scores_b[r] * k_scales_b;
                }
            }
            let position_a = item.position + 4u * at_a;
            let position_b = item.position + 4u * at_b;
            for (var i = local; i < ROWS * TILE; i += WG_SIZE) {
                let second = i % TILE >= WG_SIZE;
                let seen = select(live_a, live_b, second)
                    & in_reach(select(position_a, position_b, second), item.query_position + i / (TILE * HEAD_TILE));
                var score = sh_tile[i];
                if (params.softcap > 0.0) {
                    score = capped(score, params.softcap);
                }
                sh_tile[i] = select(vec4<f32>(LOWEST), score, seen);
            }
            workgroupBarrier();

            // The largest score of each row.
            for (var i = local; i < ROWS * REDUCERS; i += WG_SIZE) {
                var m = LOWEST;
                for (var j = i / REDUCERS * TILE + i % REDUCERS; j < (i / REDUCERS + 1u) * TILE; j += REDUCERS) {
                    let s = sh_tile[j];
                    m = max(m, max(max(s.x, s.y), max(s.z, s.w)));
                }
                sh_reduced[i] = m;
            }
            workgroupBarrier();
            if (local < ROWS) {
                var m = sh_largest[local];
                for (var j = local * REDUCERS; j < (local + 1u) * REDUCERS; j++) {
                    m = max(m, sh_reduced[j]);
                }
                sh_shrink[local] = exp(sh_largest[local] - m);
                sh_largest[local] = m;
            }
            workgroupBarrier();

            // Probabilities relative to the largest score so far, times the values' slot scales.
            for (var i = local; i < ROWS * TILE; i += WG_SIZE) {
                let r = i / TILE;
                let second = i % TILE >= WG_SIZE;
                let seen = select(live_a, live_b, second)
                    & in_reach(select(position_a, position_b, second), item.query_position + r / HEAD_TILE);
                let p = select(vec4<f32>(), exp(sh_tile[i] - vec4<f32>(sh_largest[r])), seen);
                // What earlier tiles added shrinks once.
                let before = sh_sum[r * WG_SIZE + local] * select(sh_shrink[r], 1.0, second);
                sh_sum[r * WG_SIZE + local] = before + ((p.x + p.y) + (p.z + p.w));
                // Selected again: the value scale of a dead slot may be NaN, and 0 x NaN is NaN.
                sh_tile[i] = select(vec4<f32>(), p * select(v_scales_a, v_scales_b, second), seen);
            }
            workgroupBarrier();

            // Values: an invocation takes one unit of channels and every LANES-th slot quad of a page, page by page, so that
            // page table entries are loaded once.
            for (var r = 0u; r < ROWS; r++) {
                output_a[r] *= sh_shrink[r];
                output_b[r] *= sh_shrink[r];
            }
            if (lane < LANES) {
                let end = min(first + TILE, slot_quads);
                for (var page = first / PAGE_QUADS; page * PAGE_QUADS < end; page++) {
                    let entry = page_table[item.table + page];
                    let begin = page * PAGE_QUADS;
                    for (var at = max(first, begin) + lane; at < min(end, begin + PAGE_QUADS); at += LANES) {
                        let slots = at - begin;
                        let used = live_slots(entry, 4u * slots);
                        if (any(used)) {
                            let quad = unit * OUT;
                            let words_a = v_words(entry.y, kv_head, slots, quad / V_CHUNK_QUADS);
                            var words_b = words_a;
                            if (V_CHUNK_QUADS == 1u) {
                                words_b = v_words(entry.y, kv_head, slots, quad + 1u);
                            }
                            var v_a = v_codes(words_a, quad);
                            var v_b = v_codes(words_b, quad + 1u);
                            var block = v_block_scales(entry.y, kv_head, slots, quad);
                            if (!all(used)) {
                                // Dead slots never enter the arithmetic.
                                block = select(vec4<f32>(), block, used);
                                for (var i = 0u; i < 4u; i++) {
                                    v_a[i] = select(vec4<f32>(), v_a[i], used[i]);
                                    v_b[i] = select(vec4<f32>(), v_b[i], used[i]);
                                }
                            }
                            let channels_a = v_channel_scales(entry.y, kv_head, slots, quad);
                            let channels_b = v_channel_scales(entry.y, kv_head, slots, quad + 1u);
                            for (var r = 0u; r < ROWS; r++) {
                                let p = sh_tile[r * TILE + at - first] * block;
                                output_a[r] += (v_a * p) * channels_a;
                                output_b[r] += (v_b * p) * channels_b;
                            }
                        }
                    }
                }
            }
            workgroupBarrier();
        }

        // The invocations' sums and the lanes' outputs, in a fixed order.
        for (var i = local; i < ROWS * REDUCERS; i += WG_SIZE) {
            var l = 0.0;
            for (var j = i / REDUCERS * WG_SIZE + i % REDUCERS; j < (i / REDUCERS + 1u) * WG_SIZE; j += REDUCERS) {
                l += sh_sum[j];
            }
            sh_reduced[i] = l;
        }
        for (var o = 0u; o < OUT; o++) {
            for (var r = 0u; r < ROWS; r++) {
                sh_tile[r * WG_SIZE + local] = select(output_a[r], output_b[r], o == 1u);
            }
            workgroupBarrier();
            for (var i = local; i < ROWS * OUT_UNITS; i += WG_SIZE) {
                let r = i / OUT_UNITS;
                let quad = i % OUT_UNITS * OUT + o;
                let token = r / HEAD_TILE;
                let head = head_tile + r % HEAD_TILE;
                if (token < item.queries && head < RATIO) {
                    let partial = item.partial + token * params.q_heads + kv_head * RATIO + head;
                    let begin = r * WG_SIZE + i % OUT_UNITS;
                    var sum = vec4<f32>();
                    for (var j = begin; j < r * WG_SIZE + LANES * OUT_UNITS; j += OUT_UNITS) {
                        sum += sh_tile[j];
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
                var l = 0.0;
                for (var j = local * REDUCERS; j < (local + 1u) * REDUCERS; j++) {
                    l += sh_reduced[j];
                }
                let partial = item.partial + token * params.q_heads + kv_head * RATIO + head;
                partial_ml[partial] = vec2<f32>(sh_largest[local], l);
            }
        }
    }
}
