// RoPE: channel pairs of each head turned by their token's position. One invocation: one pair.
const WG_SIZE: u32 = 64u; // invocations of a workgroup

struct Params {
    tokens: u32, // rows of x
    heads: u32, // heads of a row
    head_dim: u32, // numbers of a head
    first_position: u32, // position of token 0
    halves: u32, // 1: pairs i and i + head_dim / 2; 0: pairs 2 i and 2 i + 1
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // [token, head, channel]
@group(0) @binding(2) var<storage, read> turns: array<vec2<f32>>; // [position, pair] (cos, sin)
@group(0) @binding(3) var<storage, read_write> output: array<f32>; // [token, head, channel]

@compute @workgroup_size(WG_SIZE)
fn rope(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = (group.y * grid.x + group.x) * WG_SIZE + local;
    let pairs = params.head_dim / 2u;
    if (index >= params.tokens * params.heads * pairs) {
        return;
    }
    let pair = index % pairs;
    let head = index / pairs;
    let turn = turns[(params.first_position + head / params.heads) * pairs + pair];
    let first = head * params.head_dim + select(2u * pair, pair, params.halves == 1u);
    let second = first + select(1u, pairs, params.halves == 1u);
    let a = x[first];
    let b = x[second];
    output[first] = a * turn.x - b * turn.y;
    output[second] = a * turn.y + b * turn.x;
}
