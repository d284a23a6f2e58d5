// SwiGLU: up x gate / (1 + exp(-gate)). One invocation: one number.
const WG_SIZE: u32 = 64u; // invocations of a workgroup

struct Params {
    numbers: u32, // numbers of each tensor
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> gate: array<f32>; // [number]
@group(0) @binding(2) var<storage, read> up: array<f32>; // [number]
@group(0) @binding(3) var<storage, read_write> output: array<f32>; // [number]

@compute @workgroup_size(WG_SIZE)
fn swiglu(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = (group.y * grid.x + group.x) * WG_SIZE + local;
    if (index >= params.numbers) {
        return;
    }
    let g = gate[index];
    // Beyond 80 the exponential would leave f32; the quotient is below 1e-32 there.
    output[index] = up[index] * (g / (1.0 + exp(min(-g, 80.0))));
}
