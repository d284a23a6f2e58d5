// Queries as f32.
@group(0) @binding(3) var<storage, read> q: array<vec4<f32>>; // [token, query head, channel quad]

// A channel quad of the queries.
fn q_quad(at: u32) -> vec4<f32> {
    return q[at];
}
