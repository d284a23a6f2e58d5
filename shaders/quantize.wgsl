// New rows into packed pages, for sides whose scale belongs to one token (or to none): one invocation packs one unit
// (a head, or a block of 16 channels) of up to four slots that share their scale words, and owns every word it writes.
const WG_SIZE: u32 = 64u; // invocations of a workgroup
const UNITS: u32 = 8u; // units of a row
const UNIT_CHANNELS: u32 = 64u; // channels of a unit
const UNIT_WORDS: u32 = 8u; // words of a unit's codes
const OWN_SCALE: bool = true; // each unit of each token has a scale in the page; else the scale is given, or 1
const LARGEST_ODD: u32 = 7u; // the largest code is LARGEST_ODD * 2^LARGEST_POWER
const LARGEST_POWER: i32 = 0;

struct Params {
    runs: u32, // runs in the list
    row_offset: u32, // first element of row 0
    row_stride: u32, // elements from a token to the next
    head_stride: u32, // elements from a head to the next
    side_tensor: u32, // place of this side's per-tensor scale
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> source: array<u32>; // [token, head, channel] new rows, or [page, word] where rows wait
@group(0) @binding(2) var<storage, read> runs: array<vec4<u32>>; // [run] (page, first slot, slots, first row or source page)
@group(0) @binding(3) var<storage, read> tensor_scales: array<f32>; // [layer, side]
@group(0) @binding(4) var<storage, read_write> pages: array<u32>; // [page, word]
@group(0) @binding(5) var<storage, read_write> status: array<atomic<u32>>; // [2] (not finite, saturated)

@compute @workgroup_size(WG_SIZE)
fn quantize(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = (group.y * grid.x + group.x) * WG_SIZE + local;
    if (index >= params.runs * UNITS) {
        return;
    }
    let run = runs[index / UNITS];
    let unit = index % UNITS;
    let base = run.x * SIDE_PAGE_WORDS;
    var counted = vec2<u32>();
    var scale_bits = vec4<u32>();
    for (var i = 0u; i < run.z; i++) {
        var s = 1.0;
        if (OWN_SCALE) {
            var amax = 0u;
            for (var c = 0u; c < UNIT_CHANNELS; c++) {
                let channel = unit * UNIT_CHANNELS + c;
                let x = source_bits(run, i, channel / SIDE_HEAD_DIM, channel % SIDE_HEAD_DIM);
                amax = max(amax, finite_magnitude(x));
            }
            let stored = side_scale_from(amax, LARGEST_ODD, LARGEST_POWER);
            counted.y += stored.y;
            scale_bits[i] = stored.x;
            s = side_scale_values(vec4<u32>(stored.x)).x;
        } else {
            s = given_scale();
        }
        for (var w = 0u; w < UNIT_WORDS; w++) {
            var word = 0u;
            for (var e = 0u; e < 32u / SIDE_BITS; e++) {
                let c = w * (32u / SIDE_BITS) + e;
                if (c < UNIT_CHANNELS) {
                    let channel = unit * UNIT_CHANNELS + c;
                    let x = source_bits(run, i, channel / SIDE_HEAD_DIM, channel % SIDE_HEAD_DIM);
                    let coded = encode_any(x, s);
                    word |= coded.x << (e * SIDE_BITS);
                    counted += coded.yz;
                }
            }
            pages[base + (unit * UNIT_WORDS + w) * SIDE_PAGE_TOKENS + run.y + i] = word;
        }
    }
    if (OWN_SCALE) {
        // Slots beside the run keep what they have: their scales share these words.
        for (var i = 0u; i < run.z; i++) {
            put_scale(base, unit * SIDE_PAGE_TOKENS + run.y + i, scale_bits[i]);
        }
    }
    report_counts(counted);
}
