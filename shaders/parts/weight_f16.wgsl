// Weights as f16. A driver may take those below 2^-14 in magnitude as 0: nothing to a sum of products.
@group(0) @binding(2) var<storage, read> weight: array<vec2<u32>>; // [column quad, row]

// Four neighbouring columns of a row.
fn weight_quad(at: u32) -> vec4<f32> {
    let words = weight[at];
    return vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y));
}
