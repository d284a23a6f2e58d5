//! What an engine does with the cache, on a device that it owns: three sequences, prefill and decode in one submission, a
//! fork, a truncation, a look at the status and the memory, and a sequence saved and restored.
//!
//! ```text
//! cargo run --release --example serve
//! ```

use std::error::Error;

use kvpack::cache::{CacheSpec, KvCache, LayerSpec, SequenceId};
use kvpack::gpu::Gpu;
use kvpack::kernels::{Outputs, Rows};
use kvpack::options::AttentionOptions;
use kvpack::wgpu;

const LAYERS: u32 = 4;
const Q_HEADS: u32 = 8;
const KV_HEADS: u32 = 2;
const HEAD_DIM: u32 = 64;
/// A token's numbers in the fused projection: queries, keys, values.
const FUSED: u32 = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM;

/// Public so that the tests run it.
pub fn main() -> Result<(), Box<dyn Error>> {
    // Keys per channel, values per token. The first layer, which suffers most, stays f16; the others keep the last 32
    // tokens and the first 4 in full precision.
    let quantised = LayerSpec {
        window: [32; 2],
        sink_tokens: [4; 2],
        ..LayerSpec::new("int4c/int4".parse()?)
    };
    let mut spec = CacheSpec::new(LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, quantised.pair, 64 << 20);
    spec.layers = vec![quantised; LAYERS as usize];
    spec.layers[0] = LayerSpec::new("f16".parse()?);

    // The engine's own device, with what the cache needs.
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let adapter = pollster::block_on(instance.request_adapter(&Default::default()))?;
    let needed = spec.requirements(&adapter)?;
    let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        required_features: needed.features,
        required_limits: needed.limits,
        ..Default::default()
    }))?;
    println!("device: {}", adapter.get_info().name);

    let gpu = Gpu::from_device(device, queue);
    let mut cache = KvCache::new(&gpu, spec)?;
    let (a, b) = (cache.open(), cache.open());

    // Two prompts in one step, then both decode, and a third sequence is prefilled meanwhile.
    run(&gpu, &mut cache, &[(a, 150), (b, 20)])?;
    run(&gpu, &mut cache, &[(a, 1), (b, 1)])?;
    let c = cache.open();
    run(&gpu, &mut cache, &[(a, 1), (b, 1), (c, 70)])?;

    // Two continuations of one conversation share its pages.
    let before = cache.book().bytes_in_use().total();
    let fork = cache.fork(a, cache.book().len(a)?)?;
    assert_eq!(
        cache.book().bytes_in_use().total(),
        before,
        "a fork copies nothing"
    );
    run(&gpu, &mut cache, &[(a, 1), (fork, 1)])?;

    // Five guesses, of which two are right: the window keeps the rest removable.
    run(&gpu, &mut cache, &[(a, 5)])?;
    cache.truncate(a, cache.book().len(a)? - 3)?;

    // Not all lengths can be cut to: what is packed is never packed again.
    if let Err(e) = cache.truncate(a, 70) {
        println!("refused: {e}");
    }

    // A sequence as bytes, and back.
    let saved = pollster::block_on(cache.save(b)?)?;
    cache.free(b)?;
    let restored = cache.restore(&saved)?;
    run(&gpu, &mut cache, &[(restored, 1)])?;

    let status = pollster::block_on(cache.status()?)?;
    println!(
        "appended: {} not finite, {} saturated",
        status.non_finite, status.saturated
    );
    for id in [a, fork, c, restored] {
        println!(
            "sequence of {} tokens, {:?} packed in layer 1",
            cache.book().len(id)?,
            cache.book().boundaries(id, 1)?
        );
    }
    let bytes = cache.book().bytes_in_use();
    println!(
        "in use: {} bytes of codes, {} of scales, {} of padding; made so far: {}; room for {} tokens more",
        bytes.codes,
        bytes.scales,
        bytes.padding,
        cache.allocated_bytes(),
        cache.book().room()
    );
    Ok(())
}

/// One forward pass in which the projections and all else but attention are left out: appends and attends in every layer.
fn run(gpu: &Gpu, cache: &mut KvCache, requests: &[(SequenceId, u32)]) -> Result<(), Box<dyn Error>> {
    let tokens: u32 = requests.iter().map(|request| request.1).sum();
    // What a fused projection would leave: for each token its queries, keys and values.
    let numbers: Vec<f32> = (0..tokens * FUSED)
        .map(|i| ((i * 37 % 101) as f32 - 50.0) / 25.0)
        .collect();
    let fused = gpu.upload("fused q, k and v", &numbers)?;
    let part = |first_head: u32| {
        Rows::from(&fused)
            .at(first_head * HEAD_DIM)
            .strides(FUSED, HEAD_DIM)
    };
    let output = gpu.zeros("attention output", u64::from(tokens * Q_HEADS * HEAD_DIM) * 4)?;
    let lse = gpu.zeros("LSE", u64::from(tokens * Q_HEADS) * 4)?;

    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let step = cache.step(requests)?;
    for layer in 0..LAYERS {
        step.append(&mut encoder, layer, part(Q_HEADS), part(Q_HEADS + KV_HEADS))?;
        // Sliding windows in every other layer, as some models have them.
        let options = AttentionOptions {
            window: (layer % 2 == 1).then_some(128),
            ..AttentionOptions::default()
        };
        step.attend(
            &mut encoder,
            layer,
            part(0),
            Outputs::from(&output).with_lse(&lse),
            &options,
        )?;
    }
    step.commit()?;
    gpu.queue().submit([encoder.finish()]);
    Ok(())
}
