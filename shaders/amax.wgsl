// The largest finite magnitude of f32 rows, joined with what a slot already holds: how a per-tensor scale is
// calibrated. One workgroup reduces WG_SIZE * PER_INVOCATION numbers; positive floats order like their bits.
const WG_SIZE: u32 = 64u;
const PER_INVOCATION: u32 = 16u;

struct Params {
    numbers: u32,
    offset: u32, // of the first number in `source`
    slot: u32, // place in amax
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> source: array<u32>; // [number], bits of f32
@group(0) @binding(2) var<storage, read_write> largest: array<atomic<u32>>; // [layer, side], bits of f32

@compute @workgroup_size(WG_SIZE)
fn amax(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let first = ((group.y * grid.x + group.x) * WG_SIZE + local) * PER_INVOCATION;
    var found = 0u;
    for (var i = first; i < min(first + PER_INVOCATION, params.numbers); i++) {
        let x = source[params.offset + i];
        let magnitude = x & 0x7fffffffu;
        // Subnormals count as 0; NaN and infinities do not count.
        let counts = magnitude >= 0x00800000u && magnitude < 0x7f800000u;
        found = max(found, select(0u, magnitude, counts));
    }
    if (found > 0u) {
        atomicMax(&largest[params.slot], found);
    }
}
