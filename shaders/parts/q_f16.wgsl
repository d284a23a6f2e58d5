// Queries as binary16, two to a word.
@group(0) @binding(3) var<storage, read> q: array<vec2<u32>>; // [token, query head, channel quad]

// A channel quad of the queries.
fn q_quad(at: u32) -> vec4<f32> {
    let pair = q[at];
    return f16_values(vec4<u32>(pair.x & 0xffffu, pair.x >> 16u, pair.y & 0xffffu, pair.y >> 16u));
}
