// ======== dequantize
// Pages back into f32 rows, for checks and for export: one invocation reads four channels of up to four slots.
const WG_SIZE: u32 = 64u; // invocations of a workgroup

struct Params {
    runs: u32, // runs in the list
    side_tensor: u32, // place of this side's per-tensor scale
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> side_pages: array<vec4<u32>>; // [page, word, slot quad]
@group(0) @binding(2) var<storage, read> runs: array<vec4<u32>>; // [run] (page, first slot, slots, first row)
@group(0) @binding(3) var<storage, read> tensor_scales: array<f32>; // [layer, side]
@group(0) @binding(4) var<storage, read_write> rows: array<vec4<f32>>; // [token, head, channel quad]

@compute @workgroup_size(WG_SIZE)
fn dequantize(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = (group.y * grid.x + group.x) * WG_SIZE + local;
    let quads = SIDE_HEAD_DIM / 4u;
    let units = SIDE_HEADS * quads;
    if (index >= params.runs * units) {
        return;
    }
    let run = runs[index / units];
    let head = index % units / quads;
    let quad = index % quads;
    let slots = run.y / 4u;
    let codes = side_codes(side_words(run.x, head, slots, quad / SIDE_CHUNK_QUADS), quad);
    let slot_scales = side_slot_scales(run.x, head, slots) * side_block_scales(run.x, head, slots, quad);
    let of_eight = side_channel_scales(run.x, head, slots, quad & ~1u);
    let channel_scales = select(of_eight[0], of_eight[1], (quad & 1u) == 1u);
    let first = run.y % 4u;
    for (var i = first; i < first + run.z; i++) {
        rows[(run.w + i - first) * units + head * quads + quad] = codes[i] * slot_scales[i] * channel_scales;
    }
}

// ======== parts/side for side
// The geometry of one side's pages. Written once with names that begin with side_; the composer makes the copies for
// K (k_) and V (v_). A page is a code plane, word w of slot t at w * SIDE_PAGE_TOKENS + t, then a plane of scales.
const SIDE_BITS: u32 = 8u; // of a code
const SIDE_HEADS: u32 = 2u; // KV heads
const SIDE_HEAD_DIM: u32 = 64u; // channels of a head
const SIDE_HEAD_WORDS: u32 = 16u; // words of a head of one token
const SIDE_PAGE_TOKENS: u32 = 64u; // slots
const SIDE_PAGE_WORDS: u32 = 2112u; // words of a whole page
const SIDE_SCALE_OFFSET: u32 = 2048u; // word at which the scales begin
const SIDE_SCALE_BITS: u32 = 16u; // of a stored scale
const SIDE_GROUP: u32 = 1u; // tokens that share a per-channel scale
const_assert SIDE_HEAD_DIM % 8u == 0u;
const_assert SIDE_PAGE_TOKENS % 8u == 0u;
const_assert SIDE_PAGE_TOKENS % SIDE_GROUP == 0u;
const_assert SIDE_PAGE_WORDS % 4u == 0u;

// ======== parts/read_side for side
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

// ======== scales/per_token for side
// One scale for each token and head. A number is code x slot scale x block scale x channel scale; two of them are 1.

// The scales of four neighbouring slots: slots 4 slots .. 4 slots + 3 of the page.
fn side_slot_scales(page: u32, head: u32, slots: u32) -> vec4<f32> {
    return side_scales(page, head * SIDE_PAGE_TOKENS + 4u * slots);
}
fn side_block_scales(page: u32, head: u32, slots: u32, quad: u32) -> vec4<f32> {
    return vec4<f32>(1.0);
}
fn side_channel_scales(page: u32, head: u32, slots: u32, quad: u32) -> array<vec4<f32>, 2> {
    return array<vec4<f32>, 2>(vec4<f32>(1.0), vec4<f32>(1.0));
}

// ======== formats/int8
// INT8: two's complement, codes -127..=127; four numbers a word.
//   bits   31..24 23..16 15..8 7..0
//   channel   3      2     1    0
const INT8_BITS: u32 = 8u;

// Channels 4 quad .. 4 quad + 3 of one slot; `words.x` is the head's word that holds them.
fn int8_decode4(words: vec4<u32>, quad: u32) -> vec4<f32> {
    let word = words.x;
    return vec4<f32>(bitcast<vec4<i32>>(vec4<u32>(word << 24u, word << 16u, word << 8u, word)) >> vec4<u32>(24u));
}

// Four codes of a word as packed bytes.
fn int8_packed(word: u32, part: u32) -> u32 {
    return word;
}

// ======== formats/f16
// binary16: 1 sign, 5 exponent (bias 15), 10 mantissa bits; two numbers a word, two words a quad, no scale.
//   bits   31..16     15..0
//   channel  1          0
// Integer arithmetic throughout: WGSL leaves rounding and subnormals of its own conversions open.
const F16_BITS: u32 = 16u;

// The f32 bits of four binary16 patterns; infinities and NaN stay what they are.
fn f16_widen(codes: vec4<u32>) -> vec4<u32> {
    let shifted = (codes & vec4<u32>(0x7fffu)) << vec4<u32>(13u);
    let normal = select(shifted + vec4<u32>(0x38000000u), shifted | vec4<u32>(0x7f800000u), shifted >= vec4<u32>(0x0f800000u));
    let subnormal = bitcast<vec4<u32>>(vec4<f32>(codes & vec4<u32>(0x3ffu)) * 5.9604644775390625e-8);
    let magnitude = select(normal, subnormal, shifted < vec4<u32>(0x00800000u));
    return magnitude | ((codes & vec4<u32>(0x8000u)) << vec4<u32>(16u));
}

// The values of four codes.
fn f16_values(codes: vec4<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(f16_widen(codes));
}

// Channels 4 quad .. 4 quad + 3 of one slot; `words` are the head's words from that quad on.
fn f16_decode4(words: vec4<u32>, quad: u32) -> vec4<f32> {
    return f16_values(vec4<u32>(words.x & 0xffffu, words.x >> 16u, words.y & 0xffffu, words.y >> 16u));
}

// ======== the names that the kernel calls
fn side_decode4(words: vec4<u32>, quad: u32) -> vec4<f32> { return int8_decode4(words, quad); }
fn side_scale_values(bits: vec4<u32>) -> vec4<f32> { return f16_values(bits); }
