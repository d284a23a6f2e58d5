// Combines the partials of one query token and query head, in token order, into its output and its LSE (the log of the
// sum of exp(score)). A sink is a score without a value: it joins the LSE and the denominator once. One workgroup: one
// query token x one query head; an invocation owns one channel quad.
const WG_SIZE: u32 = 64u; // invocations of a workgroup
const V_QUADS: u32 = 16u; // channel quads of the output
const LOWEST: f32 = -3.4028234663852886e38; // in place of -Infinity
const_assert V_QUADS <= WG_SIZE;

struct Params {
    rows: u32, // query tokens x query heads
    q_heads: u32, // query heads
    sinks: u32, // 1 where there are sinks
    lse: u32, // 1 where the LSE is asked for
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> merges: array<vec4<u32>>; // [query token] (first partial, stride, partials, output row)
@group(0) @binding(2) var<storage, read> partial_o: array<vec4<f32>>; // [partial, channel quad]
@group(0) @binding(3) var<storage, read> partial_ml: array<vec2<f32>>; // [partial] (m, l)
@group(0) @binding(5) var<storage, read_write> lse: array<u32>; // [token, query head], bits of f32; not written unless asked for
@group(0) @binding(6) var<storage, read> sinks: array<f32>; // [query head]; not read where there are none

@compute @workgroup_size(WG_SIZE)
fn attention_merge(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) quad: u32,
) {
    let row = group.y * grid.x + group.x;
    if (row >= params.rows || quad >= V_QUADS) {
        return;
    }
    let token = row / params.q_heads;
    let head = row % params.q_heads;
    let merge = merges[token];
    let has_sink = params.sinks != 0u;
    var m = LOWEST;
    var sink = LOWEST;
    if (has_sink) {
        sink = sinks[head];
        m = max(m, sink);
    }
    for (var i = 0u; i < merge.z; i++) {
        let ml = partial_ml[merge.x + i * merge.y + head];
        // An empty partial says nothing about the maximum. Its sum is 0 to the bit: a NaN must not pass for it.
        m = select(max(m, ml.x), m, bitcast<u32>(ml.y) == 0u);
    }
    var l = 0.0;
    var o = vec4<f32>();
    for (var i = 0u; i < merge.z; i++) {
        let partial = merge.x + i * merge.y + head;
        let ml = partial_ml[partial];
        if (bitcast<u32>(ml.y) != 0u) {
            let weight = exp(ml.x - m);
            l += ml.y * weight;
            o += partial_o[partial * V_QUADS + quad] * weight;
        }
    }
    if (has_sink) {
        l += exp(sink - m);
    }
    let empty = bitcast<u32>(l) == 0u;
    let out_row = merge.w * params.q_heads + head;
    write_output(out_row * V_QUADS + quad, select(o / l, vec4<f32>(), empty));
    if (quad == 0u && params.lse != 0u) {
        // -Inf as bits: WGSL has no constant for it.
        lse[out_row] = select(bitcast<u32>(m + log(l)), 0xff800000u, empty);
    }
}
