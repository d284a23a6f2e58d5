// Weights as f32.
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>; // [column quad, row]

// Four neighbouring columns of a row.
fn weight_quad(at: u32) -> vec4<f32> {
    return weight[at];
}
