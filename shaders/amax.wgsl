// The largest finite magnitude of rows, joined with what a slot already holds: how a per-tensor scale is calibrated. One
// invocation takes PER_INVOCATION channels of one head of one token; positive floats order like their bits.
const WG_SIZE: u32 = 64u; // invocations of a workgroup
const PER_INVOCATION: u32 = 16u; // numbers of an invocation, of one head

struct Params {
    tokens: u32, // rows
    heads: u32, // heads of a row
    head_dim: u32, // numbers of a head
    row_offset: u32, // first element of row 0
    row_stride: u32, // elements from a token to the next
    head_stride: u32, // elements from a head to the next
    slot: u32, // place in largest
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> source: array<u32>; // [token, head, channel]
@group(0) @binding(2) var<storage, read_write> largest: array<atomic<u32>>; // [layer, side], bits of f32

@compute @workgroup_size(WG_SIZE)
fn amax(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = (group.y * grid.x + group.x) * WG_SIZE + local;
    let parts = (params.head_dim + PER_INVOCATION - 1u) / PER_INVOCATION;
    let units = params.heads * parts;
    if (index >= params.tokens * units) {
        return;
    }
    let run = vec4<u32>(0u, 0u, 1u, index / units);
    let head = index % units / parts;
    let first = index % parts * PER_INVOCATION;
    var found = 0u;
    for (var c = first; c < min(first + PER_INVOCATION, params.head_dim); c++) {
        let magnitude = source_bits(run, 0u, head, c) & 0x7fffffffu;
        // Subnormals count as 0; NaN and infinities do not count.
        let counts = magnitude >= 0x00800000u && magnitude < 0x7f800000u;
        found = max(found, select(0u, magnitude, counts));
    }
    if (found > 0u) {
        atomicMax(&largest[params.slot], found);
    }
}
