// Token embeddings plus the embeddings of their positions. One invocation: one number of one token.
const WG_SIZE: u32 = 64u;

struct Params {
    tokens: u32,
    columns: u32, // d_model
    first_position: u32, // of token 0
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<u32>; // [token]
@group(0) @binding(2) var<storage, read> table: array<f32>; // [id, column]
@group(0) @binding(3) var<storage, read> positions: array<f32>; // [position, column]
@group(0) @binding(4) var<storage, read_write> output: array<f32>; // [token, column]

@compute @workgroup_size(WG_SIZE)
fn embed(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = (group.y * grid.x + group.x) * WG_SIZE + local;
    if (index >= params.tokens * params.columns) {
        return;
    }
    let token = index / params.columns;
    let column = index % params.columns;
    output[index] = table[ids[token] * params.columns + column]
        + positions[(params.first_position + token) * params.columns + column];
}
