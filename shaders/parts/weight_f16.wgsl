// Weights as f16, none of them infinite or NaN.
@group(0) @binding(2) var<storage, read> weight: array<vec2<u32>>; // [column quad, row]

// Four neighbouring columns of a row. The exponent is moved by a product with 2^112, exact but for weights below 2^-14 in
// magnitude, which a driver may take as 0: nothing to a sum of products.
fn weight_quad(at: u32) -> vec4<f32> {
    let words = weight[at];
    let codes = vec4<u32>(words.x & 0xffffu, words.x >> 16u, words.y & 0xffffu, words.y >> 16u);
    let bits = ((codes & vec4<u32>(0x8000u)) << vec4<u32>(16u)) | ((codes & vec4<u32>(0x7fffu)) << vec4<u32>(13u));
    return bitcast<vec4<f32>>(bits) * 5.192296858534828e33;
}
