// Reads a buffer once, for the read roof: four independent loads an iteration, a whole grid apart.
const WG_SIZE: u32 = 64u; // invocations of a workgroup

struct Params {
    vectors: u32, // of source
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> source: array<vec4<u32>>; // [vector]
@group(0) @binding(2) var<storage, read_write> sums: array<u32>; // [invocation]; kept, so that no read is left out

@compute @workgroup_size(WG_SIZE)
fn read_four(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let step = grid.x * WG_SIZE;
    var sum = vec4<u32>();
    var i = group.x * WG_SIZE + local;
    for (; i + 3u * step < params.vectors; i += 4u * step) {
        let a = source[i];
        let b = source[i + step];
        let c = source[i + 2u * step];
        let d = source[i + 3u * step];
        sum += (a + b) + (c + d);
    }
    for (; i < params.vectors; i += step) {
        sum += source[i];
    }
    sums[group.x * WG_SIZE + local] = sum.x + sum.y + sum.z + sum.w;
}
