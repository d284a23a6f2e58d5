// Rows times a weight matrix. One invocation: one number of the output.
const WG_SIZE: u32 = 64u;
const TRANSPOSED: bool = false; // the weight is [out, in], as in a tied head, instead of [in, out]

struct Params {
    rows: u32,
    inner: u32, // columns of x, a multiple of 4
    columns: u32, // of the output
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // [row, inner]
@group(0) @binding(2) var<storage, read> weight: array<f32>; // [inner, column] or [column, inner]
@group(0) @binding(3) var<storage, read_write> output: array<f32>; // [row, column]

fn weight_at(i: u32, column: u32) -> f32 {
    return weight[select(i * params.columns + column, column * params.inner + i, TRANSPOSED)];
}

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
    // Four partial sums err less than one long one.
    var sums = vec4<f32>();
    for (var i = 0u; i < params.inner; i += 4u) {
        let at = row * params.inner + i;
        let w = vec4<f32>(weight_at(i, column), weight_at(i + 1u, column), weight_at(i + 2u, column), weight_at(i + 3u, column));
        sums += vec4<f32>(x[at], x[at + 1u], x[at + 2u], x[at + 3u]) * w;
    }
    output[index] = (sums.x + sums.y) + (sums.z + sums.w);
}
