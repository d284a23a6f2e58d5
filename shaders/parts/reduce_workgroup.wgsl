// One number of each row over a workgroup, through workgroup memory, in a fixed order.

// What differs between the invocations of a workgroup: compilers take every member of a struct for as uniform as the least.
struct Invocation {
    @builtin(local_invocation_index) local: u32,
}

const REDUCERS: u32 = 8u; // invocations that share a row
const_assert WG_SIZE % REDUCERS == 0u;

var<workgroup> sh_reduced: array<f32, ROWS>; // [row]: the result
var<workgroup> sh_given: array<f32, ROWS * WG_SIZE>; // [row, invocation]
var<workgroup> sh_shared: array<f32, ROWS * REDUCERS>; // [row, reducer]

// The largest value that any invocation gives for each row, for invocation `row`.
fn reduce_largest(in: Invocation, values: array<f32, ROWS>) {
    for (var r = 0u; r < ROWS; r++) {
        sh_given[r * WG_SIZE + in.local] = values[r];
    }
    workgroupBarrier();
    for (var i = in.local; i < ROWS * REDUCERS; i += WG_SIZE) {
        let begin = i / REDUCERS * WG_SIZE;
        var m = sh_given[begin + i % REDUCERS];
        for (var j = begin + i % REDUCERS + REDUCERS; j < begin + WG_SIZE; j += REDUCERS) {
            m = max(m, sh_given[j]);
        }
        sh_shared[i] = m;
    }
    workgroupBarrier();
    if (in.local < ROWS) {
        var m = sh_shared[in.local * REDUCERS];
        for (var j = 1u; j < REDUCERS; j++) {
            m = max(m, sh_shared[in.local * REDUCERS + j]);
        }
        sh_reduced[in.local] = m;
    }
}

// The sum of what the invocations give for each row, for invocation `row`.
fn reduce_sum(in: Invocation, values: array<f32, ROWS>) {
    for (var r = 0u; r < ROWS; r++) {
        sh_given[r * WG_SIZE + in.local] = values[r];
    }
    workgroupBarrier();
    for (var i = in.local; i < ROWS * REDUCERS; i += WG_SIZE) {
        let begin = i / REDUCERS * WG_SIZE;
        var sum = 0.0;
        for (var j = begin + i % REDUCERS; j < begin + WG_SIZE; j += REDUCERS) {
            sum += sh_given[j];
        }
        sh_shared[i] = sum;
    }
    workgroupBarrier();
    if (in.local < ROWS) {
        var sum = 0.0;
        for (var j = 0u; j < REDUCERS; j++) {
            sum += sh_shared[in.local * REDUCERS + j];
        }
        sh_reduced[in.local] = sum;
    }
}
