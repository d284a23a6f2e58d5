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
