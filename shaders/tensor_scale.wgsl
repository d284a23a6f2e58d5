// Per-tensor scales from the largest magnitudes that amax found; the magnitudes start again from 0.
const WG_SIZE: u32 = 64u; // invocations of a workgroup
const LARGEST_ODD: u32 = 7u; // the largest code is LARGEST_ODD * 2^LARGEST_POWER
const LARGEST_POWER: i32 = 6;

struct Params {
    first: u32, // first slot
    slots: u32, // slots from it on
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> largest: array<u32>; // [layer, side], bits of f32
@group(0) @binding(2) var<storage, read_write> tensor_scales: array<u32>; // [layer, side], bits of f32

@compute @workgroup_size(WG_SIZE)
fn tensor_scale(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = (group.y * grid.x + group.x) * WG_SIZE + local;
    if (index >= params.slots) {
        return;
    }
    let slot = params.first + index;
    tensor_scales[slot] = stored_f32_from(largest[slot], LARGEST_ODD, LARGEST_POWER).x;
    largest[slot] = 0u;
}
