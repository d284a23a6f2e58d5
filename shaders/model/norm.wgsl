// Layer norm without gain or bias: (x - mean) / sqrt(variance + epsilon). One workgroup: one row.
const WG_SIZE: u32 = 64u; // invocations of a workgroup

struct Params {
    rows: u32, // rows of x
    columns: u32, // numbers of a row
    epsilon: f32, // added to the variance
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // [row, column]
@group(0) @binding(2) var<storage, read_write> output: array<f32>; // [row, column]

var<workgroup> sh_sum: array<f32, WG_SIZE>;

// The sum of one value an invocation, in a fixed order.
fn workgroup_sum(value: f32, local: u32) -> f32 {
    sh_sum[local] = value;
    workgroupBarrier();
    for (var half = WG_SIZE / 2u; half > 0u; half /= 2u) {
        if (local < half) {
            sh_sum[local] += sh_sum[local + half];
        }
        workgroupBarrier();
    }
    let total = sh_sum[0];
    workgroupBarrier();
    return total;
}

@compute @workgroup_size(WG_SIZE)
fn norm(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let row = group.y * grid.x + group.x;
    // Uniform: the whole workgroup has a row or none.
    if (row < params.rows) {
        let first = row * params.columns;
        let count = f32(params.columns);
        var sum = 0.0;
        for (var c = local; c < params.columns; c += WG_SIZE) {
            sum += x[first + c];
        }
        let mean = workgroup_sum(sum, local) / count;
        var squares = 0.0;
        for (var c = local; c < params.columns; c += WG_SIZE) {
            let d = x[first + c] - mean;
            squares += d * d;
        }
        let deviation = sqrt(workgroup_sum(squares, local) / count + params.epsilon);
        for (var c = local; c < params.columns; c += WG_SIZE) {
            output[first + c] = (x[first + c] - mean) / deviation;
        }
    }
}
