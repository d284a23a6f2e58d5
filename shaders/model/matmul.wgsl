// Rows times a weight matrix. One invocation: one number of the output.
const WG_SIZE: u32 = 64u;
const TRANSPOSED: bool = false; // the weight is [out, in], as in a tied head, instead of [in, out]

struct Params {
    rows: u32,
    inner: u32, // columns of x
    columns: u32, // of the output
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // [row, inner]
@group(0) @binding(2) var<storage, read> weight: array<f32>; // [inner, column] or [column, inner]
@group(0) @binding(3) var<storage, read_write> output: array<f32>; // [row, column]

@compute @workgroup_size(WG_SIZE)
fn matmul(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = (group.y * grid.x + group.x) * WG_SIZE + local;
    if (index >= params.rows * params.columns) {
        return;
    }
    let row = index / params.columns;
    let column = index % params.columns;
    var sum = 0.0;
    for (var i = 0u; i < params.inner; i++) {
        let at = select(i * params.columns + column, column * params.inner + i, TRANSPOSED);
        sum += x[row * params.inner + i] * weight[at];
    }
    output[index] = sum;
}
