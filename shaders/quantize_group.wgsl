// Closes token groups of a per-channel side: rows that wait in f16 pages become packed words and scales. One invocation
// packs one word column (32 / bits channels of a head) of all tokens of a group, and owns every word it writes. A group
// may begin with sink tokens, kept elsewhere: their codes are 0 and nothing of theirs is read or counted.
const WG_SIZE: u32 = 64u; // invocations of a workgroup
const LARGEST_ODD: u32 = 7u; // the largest code is LARGEST_ODD * 2^LARGEST_POWER
const LARGEST_POWER: i32 = 0;

struct Params {
    runs: u32, // groups in the list
    row_offset: u32, // not used: rows wait in pages
    row_stride: u32, // not used
    head_stride: u32, // not used
    side_tensor: u32, // not used
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> source: array<u32>; // [page, word] where the rows wait
@group(0) @binding(2) var<storage, read> runs: array<vec4<u32>>; // [run] (page, first slot of the group, slots to pack, source page)
@group(0) @binding(3) var<storage, read_write> pages: array<u32>; // [page, word]
@group(0) @binding(4) var<storage, read_write> status: array<atomic<u32>>; // [2] (not finite, saturated)

@compute @workgroup_size(WG_SIZE)
fn quantize_group(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = (group.y * grid.x + group.x) * WG_SIZE + local;
    let columns = SIDE_HEADS * SIDE_HEAD_WORDS;
    if (index >= params.runs * columns) {
        return;
    }
    let run = runs[index / columns];
    let column = index % columns;
    let head = column / SIDE_HEAD_WORDS;
    let first = column % SIDE_HEAD_WORDS * (32u / SIDE_BITS);
    let channels = min(32u / SIDE_BITS, SIDE_HEAD_DIM - first);
    let base = run.x * SIDE_PAGE_WORDS;
    let sinks = SIDE_GROUP - run.z;
    var counted = vec2<u32>();
    var scales: array<f32, 32u / SIDE_BITS>;
    for (var c = 0u; c < channels; c++) {
        var amax = 0u;
        for (var i = sinks; i < SIDE_GROUP; i++) {
            amax = max(amax, finite_magnitude(source_bits(run, i, head, first + c)));
        }
        let stored = side_scale_from(amax, LARGEST_ODD, LARGEST_POWER);
        counted.y += stored.y;
        scales[c] = side_scale_values(vec4<u32>(stored.x)).x;
        put_scale(base, (run.y / SIDE_GROUP * SIDE_HEADS + head) * SIDE_HEAD_DIM + first + c, stored.x);
    }
    for (var i = 0u; i < SIDE_GROUP; i++) {
        var word = 0u;
        for (var c = 0u; c < channels && i >= sinks; c++) {
            let coded = encode_any(source_bits(run, i, head, first + c), scales[c]);
            word |= coded.x << (c * SIDE_BITS);
            counted += coded.yz;
        }
        pages[base + column * SIDE_PAGE_TOKENS + run.y + i] = word;
    }
    report_counts(counted);
}
