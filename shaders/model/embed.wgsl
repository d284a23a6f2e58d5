// Rows of a table, such as token embeddings, or the part of it whose rows are here. One invocation: one channel quad.
const WG_SIZE: u32 = 64u; // invocations of a workgroup

struct Params {
    tokens: u32, // ids
    columns: u32, // numbers of a row, a multiple of 4
    first_row: u32, // first row of the part of the table
    rows: u32, // rows of the part
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<u32>; // [token]
@group(0) @binding(3) var<storage, read_write> output: array<vec4<f32>>; // [token, column quad]

@compute @workgroup_size(WG_SIZE)
fn embed(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = (group.y * grid.x + group.x) * WG_SIZE + local;
    let quads = params.columns / 4u;
    if (index >= params.tokens * quads) {
        return;
    }
    let id = ids[index / quads];
    if (id >= params.first_row && id - params.first_row < params.rows) {
        output[index] = weight_quad(index % quads * params.rows + id - params.first_row);
    }
}
