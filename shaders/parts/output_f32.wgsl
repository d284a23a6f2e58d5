// Outputs as f32.
@group(0) @binding(4) var<storage, read_write> output: array<vec4<f32>>; // [token, query head, channel quad]

// Writes a channel quad of the outputs.
fn write_output(at: u32, value: vec4<f32>) {
    output[at] = value;
}
