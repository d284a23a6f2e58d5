// Rows times a weight, for few rows, as in decoding. One workgroup: one row x 32 columns of the output; one invocation:
// four of these columns, 8 apart, over every 8th quad of the sums.
const WG_SIZE: u32 = 64u; // invocations of a workgroup
const TILE: u32 = 32u; // columns of a workgroup

struct Params {
    rows: u32, // rows of x
    inner: u32, // columns of x, a multiple of 4
    columns: u32, // outputs of this part of the weight
    first_column: u32, // output at which the part begins
    output_columns: u32, // outputs of all parts
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [row, inner quad]
@group(0) @binding(3) var<storage, read_write> output: array<f32>; // [row, column]

var<workgroup> sh_sums: array<vec4<f32>, WG_SIZE>; // [slice, column]

@compute @workgroup_size(WG_SIZE)
fn matvec(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let tiles = (params.columns + TILE - 1u) / TILE;
    let tile = group.y * grid.x + group.x;
    let row = tile / tiles;
    let first = tile % tiles * TILE;
    let quads = params.inner / 4u;
    let columns = min(vec4<u32>(first + local % 8u) + vec4<u32>(0u, 8u, 16u, 24u), vec4<u32>(params.columns - 1u));
    let inside = min(row, params.rows - 1u) * quads;
    var sums = vec4<f32>();
    for (var quad = local / 8u; quad < quads; quad += 8u) {
        let four = x[inside + quad];
        let at = columns + vec4<u32>(quad * params.columns);
        sums += four * mat4x4<f32>(weight_quad(at.x), weight_quad(at.y), weight_quad(at.z), weight_quad(at.w));
    }
    sh_sums[local] = sums;
    workgroupBarrier();
    let column = first + local;
    if (local < TILE && column < params.columns && row < params.rows) {
        var sum = 0.0;
        for (var slice = 0u; slice < 8u; slice++) {
            sum += sh_sums[slice * 8u + local % 8u][local / 8u];
        }
        output[row * params.output_columns + params.first_column + column] = sum;
    }
}
