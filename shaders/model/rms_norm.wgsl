// RMS norm with a gain: x / sqrt(mean of x^2 + epsilon) x gain. One workgroup: one row.
const WG_SIZE: u32 = 64u; // invocations of a workgroup

struct Params {
    rows: u32, // rows of x
    columns: u32, // numbers of a row
    epsilon: f32, // added to the mean square
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // [row, column]
@group(0) @binding(2) var<storage, read> gain: array<f32>; // [column]
@group(0) @binding(3) var<storage, read_write> output: array<f32>; // [row, column]

var<workgroup> sh_sum: array<f32, WG_SIZE>;

@compute @workgroup_size(WG_SIZE)
fn rms_norm(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let row = group.y * grid.x + group.x;
    // Uniform: the whole workgroup has a row or none.
    if (row < params.rows) {
        let first = row * params.columns;
        var squares = 0.0;
        for (var c = local; c < params.columns; c += WG_SIZE) {
            squares += x[first + c] * x[first + c];
        }
        // The sum of one value an invocation, in a fixed order.
        sh_sum[local] = squares;
        workgroupBarrier();
        for (var half = WG_SIZE / 2u; half > 0u; half /= 2u) {
            if (local < half) {
                sh_sum[local] += sh_sum[local + half];
            }
            workgroupBarrier();
        }
        let deviation = sqrt(sh_sum[0] / f32(params.columns) + params.epsilon);
        for (var c = local; c < params.columns; c += WG_SIZE) {
            output[first + c] = x[first + c] / deviation * gain[c];
        }
    }
}
