// What both packing kernels write besides code words: scales and the append status.

// Writes one stored scale; `element` is its place in the plane. The word's other scales stay: they may be of tokens or
// channels that another dispatch packed. No other invocation writes this word.
fn put_scale(base: u32, element: u32, stored: u32) {
    let bit = element * SIDE_SCALE_BITS;
    let at = base + SIDE_SCALE_OFFSET + bit / 32u;
    let mask = (0xffffffffu >> (32u - SIDE_SCALE_BITS)) << (bit & 31u);
    pages[at] = (pages[at] & ~mask) | (stored << (bit & 31u));
}

// Adds what an invocation counted: numbers that are not finite, and saturations.
fn report_counts(counted: vec2<u32>) {
    if (counted.x > 0u) {
        atomicAdd(&status[0], counted.x);
    }
    if (counted.y > 0u) {
        atomicAdd(&status[1], counted.y);
    }
}
