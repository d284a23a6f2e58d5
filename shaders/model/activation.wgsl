// GELU, the tanh form: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))). One invocation: one number.
const WG_SIZE: u32 = 64u; // invocations of a workgroup

struct Params {
    numbers: u32, // numbers of each tensor
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // [number]
@group(0) @binding(2) var<storage, read_write> output: array<f32>; // [number]

@compute @workgroup_size(WG_SIZE)
fn activation(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = (group.y * grid.x + group.x) * WG_SIZE + local;
    if (index >= params.numbers) {
        return;
    }
    let v = x[index];
    // tanh is 1 to the last bit from 10 on; some drivers overflow far beyond.
    let inner = clamp(0.7978845608028654 * (v + 0.044715 * v * v * v), -10.0, 10.0);
    output[index] = 0.5 * v * (1.0 + tanh(inner));
}
