// Rows times a weight, for many rows. One workgroup: 32 rows x 32 columns of the output; one invocation: 4 x 4 of them, 8
// apart, in registers. Loads from storage serve four numbers each; on a software driver workgroup memory would only add
// loads, and a GPU's cache serves the eight invocations that read alike.
const WG_SIZE: u32 = 64u; // invocations of a workgroup
const TILE: u32 = 32u; // rows and columns of a workgroup

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

fn store(row: u32, column: u32, sums: vec4<f32>) {
    if (column < params.columns) {
        for (var i = 0u; i < 4u; i++) {
            if (row + 8u * i < params.rows) {
                output[(row + 8u * i) * params.output_columns + params.first_column + column] = sums[i];
            }
        }
    }
}

@compute @workgroup_size(WG_SIZE)
fn matmul(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let tiles = (params.columns + TILE - 1u) / TILE;
    let tile = group.y * grid.x + group.x;
    let row = tile / tiles * TILE + local / 8u;
    let column = tile % tiles * TILE + local % 8u;
    let quads = params.inner / 4u;
    // Beyond the end the last row and the last column are computed again, and not stored.
    let steps = vec4<u32>(0u, 8u, 16u, 24u);
    let rows = min(vec4<u32>(row) + steps, vec4<u32>(params.rows - 1u)) * quads;
    let columns = min(vec4<u32>(column) + steps, vec4<u32>(params.columns - 1u));
    // Of one column each, four rows.
    var sums_a = vec4<f32>();
    var sums_b = vec4<f32>();
    var sums_c = vec4<f32>();
    var sums_d = vec4<f32>();
    for (var quad = 0u; quad < quads; quad++) {
        let four = mat4x4<f32>(x[rows.x + quad], x[rows.y + quad], x[rows.z + quad], x[rows.w + quad]);
        let at = columns + vec4<u32>(quad * params.columns);
        sums_a += weight_quad(at.x) * four;
        sums_b += weight_quad(at.y) * four;
        sums_c += weight_quad(at.z) * four;
        sums_d += weight_quad(at.w) * four;
    }
    store(row, column, sums_a);
    store(row, column + 8u, sums_b);
    store(row, column + 16u, sums_c);
    store(row, column + 24u, sums_d);
}
