// One number of each row over a workgroup: within subgroups first, then through workgroup memory.
enable subgroups;

struct Invocation {
    @builtin(local_invocation_index) local: u32,
    @builtin(subgroup_invocation_id) lane: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
}

const SUBGROUPS: u32 = WG_SIZE / 4u; // at most: no subgroup is smaller than 4

var<workgroup> sh_reduced: array<f32, ROWS>; // [row]: the result
var<workgroup> sh_given: array<f32, ROWS * SUBGROUPS>; // [row, subgroup]

// The largest value that any invocation gives for each row, for invocation `row`.
fn reduce_largest(in: Invocation, values: array<f32, ROWS>) {
    for (var r = 0u; r < ROWS; r++) {
        let m = subgroupMax(values[r]);
        if (in.lane == 0u) {
            sh_given[r * SUBGROUPS + in.subgroup] = m;
        }
    }
    workgroupBarrier();
    if (in.local < ROWS) {
        var m = sh_given[in.local * SUBGROUPS];
        for (var j = 1u; j < in.subgroups; j++) {
            m = max(m, sh_given[in.local * SUBGROUPS + j]);
        }
        sh_reduced[in.local] = m;
    }
}

// The sum of what the invocations give for each row, for invocation `row`.
fn reduce_sum(in: Invocation, values: array<f32, ROWS>) {
    for (var r = 0u; r < ROWS; r++) {
        let sum = subgroupAdd(values[r]);
        if (in.lane == 0u) {
            sh_given[r * SUBGROUPS + in.subgroup] = sum;
        }
    }
    workgroupBarrier();
    if (in.local < ROWS) {
        var sum = 0.0;
        for (var j = 0u; j < in.subgroups; j++) {
            sum += sh_given[in.local * SUBGROUPS + j];
        }
        sh_reduced[in.local] = sum;
    }
}
