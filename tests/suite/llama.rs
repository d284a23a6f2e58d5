//! Models of the Llama architecture, small ones that the tests make: the GPU against the CPU reference, and the faults of
//! other projects' model code.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvpack::Error;
use kvpack::Result;
use kvpack::cache::{CacheSpec, K};
use kvpack::checkpoint::{LlamaConfig, RopePairing, RopeScaling, Tensors};
use kvpack::drift::{Device, KeyRope, Mode, TrainedDriftOptions, run_trained};
use kvpack::generate::{GenerateOptions, generate};
use kvpack::gpu::Gpu;
use kvpack::kernels::FloatType;
use kvpack::model::{self, GpuModel, GpuWeights, Model, Placed, ReferenceModel};
use kvpack::rope::Rope;
use kvpack::spec::Pair;

use crate::common::{gpu, say};

/// Random weights of a shape.
struct Small {
    tensors: BTreeMap<String, (Vec<u64>, Vec<f32>)>,
}

impl Small {
    fn new(config: &LlamaConfig, seed: u64) -> Small {
        let mut state = seed;
        let mut uniform = || {
            // Knuth's generator; the high bits are good.
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1_u64 << 24) as f32
        };
        let tensors = config.tensors().map(|(name, shape)| {
            let count: u64 = shape.iter().product();
            let values = (0..count).map(|_| match shape[..] {
                // Gains around 1.
                [_] => 0.5 + uniform(),
                _ => (uniform() - 0.5) * 4.0 / (shape[1] as f32).sqrt(),
            });
            (name, (shape.clone(), values.collect()))
        });
        Small {
            tensors: tensors.collect(),
        }
    }
}

impl Tensors for Small {
    fn shape(&self, name: &str) -> Option<Vec<u64>> {
        self.tensors.get(name).map(|(shape, _)| shape.clone())
    }

    fn read(&mut self, name: &str) -> Result<Vec<f32>> {
        Ok(self.tensors[name].1.clone())
    }
}

/// 2 layers, 6 query heads over 2 KV heads of 16 channels (not hidden / heads), a head of its own, pairs in halves.
fn config() -> LlamaConfig {
    LlamaConfig {
        vocabulary: 61,
        context: 64,
        hidden: 40,
        q_heads: 6,
        kv_heads: 2,
        head_dim: 16,
        layers: 2,
        feed_forward: 52,
        norm_epsilon: 1e-5,
        rope_theta: 10_000.0,
        rope_pairing: RopePairing::Halves,
        rope_scaling: RopeScaling::None,
        tied: false,
        end_of_text: vec![7],
    }
}

fn on_cpu(config: &LlamaConfig) -> Model {
    model::model(config, &mut Small::new(config, 11), &mut |_, _, _| {}).unwrap()
}

fn on_gpu(gpu: &Gpu, config: &LlamaConfig, float: FloatType) -> Arc<GpuWeights> {
    let mut small = Small::new(config, 11);
    Arc::new(model::upload(gpu, config, &mut small, float, &mut |_, _, _| {}).unwrap())
}

fn spec(config: &LlamaConfig, pair: &str, k_rope: KeyRope) -> CacheSpec {
    let pair: Pair = pair.parse().unwrap();
    let rope = Rope {
        theta: config.rope_theta,
        pairing: config.rope_pairing,
        scaling: config.rope_scaling.clone(),
    };
    CacheSpec {
        sequences: 1,
        key_rotation: (k_rope == KeyRope::Pre).then(|| rope.table(config.head_dim, config.context)),
        ..CacheSpec::new(
            config.layers,
            config.q_heads,
            config.kv_heads,
            config.head_dim,
            pair,
            0,
        )
    }
    .with_pages(1)
    .unwrap()
}

/// Scales of tokens, of channels, of blocks, and none; several words a quad, and one word for several.
const PAIRS: [&str; 4] = ["f16", "int8", "int4c(8)/int4", "fp4"];

/// Token ids of no pattern.
fn ids(config: &LlamaConfig, count: u32) -> Vec<u32> {
    (0..count)
        .map(|i| (i * i * 7 + 3 * i + 5) % config.vocabulary)
        .collect()
}

/// Relative L2 of two rows of numbers; NaN where either has one.
fn apart(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let error: f64 = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum();
    (error / a.iter().map(|a| a * a).sum::<f64>()).sqrt()
}

/// Logits of the ids in chunks, one sequence.
macro_rules! logits {
    ($model:expr, $ids:expr, $chunks:expr) => {{
        let mut model = $model;
        let sequence = model.open();
        let mut rest = &$ids[..];
        let mut logits = Vec::new();
        for &chunk in $chunks {
            let (now, later) = rest.split_at(chunk);
            logits.extend(model.logits(sequence, now).unwrap());
            rest = later;
        }
        assert!(rest.is_empty());
        logits
    }};
}

/// Shapes that differ in one thing each.
fn shapes() -> Vec<(&'static str, LlamaConfig)> {
    let base = config();
    let scaled = |scaling| LlamaConfig {
        rope_scaling: scaling,
        ..config()
    };
    vec![
        ("pairs in halves", base.clone()),
        (
            "pairs of neighbours",
            LlamaConfig {
                rope_pairing: RopePairing::Neighbours,
                ..config()
            },
        ),
        (
            "tied head",
            LlamaConfig {
                tied: true,
                ..config()
            },
        ),
        (
            "one KV head for each query head",
            LlamaConfig {
                kv_heads: 6,
                ..config()
            },
        ),
        (
            "one KV head for 16 query heads of 8 channels",
            LlamaConfig {
                q_heads: 16,
                kv_heads: 1,
                head_dim: 8,
                ..config()
            },
        ),
        (
            "heads of 24 channels, wider than hidden / heads",
            LlamaConfig {
                q_heads: 4,
                head_dim: 24,
                ..config()
            },
        ),
        ("linear scaling", scaled(RopeScaling::Linear { factor: 3.0 })),
        (
            "llama3 scaling",
            scaled(RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_context: 32,
            }),
        ),
        (
            "divided frequencies",
            scaled(RopeScaling::Divisors((1..=8_u8).map(f32::from).collect())),
        ),
    ]
}

#[test]
fn the_gpu_agrees_with_the_reference_on_every_shape() {
    let Some(gpu) = gpu("the_gpu_agrees_with_the_reference_on_every_shape") else {
        return;
    };
    let mut seen: Vec<Vec<f64>> = Vec::new();
    for (what, config) in shapes() {
        let (cpu, device) = (on_cpu(&config), on_gpu(gpu, &config, FloatType::F32));
        let ids = ids(&config, 37);
        // A product of many rows, one of few, one of one.
        let chunks = [33, 3, 1];
        let expected = logits!(
            ReferenceModel::new(&cpu, spec(&config, "f32", KeyRope::Post)).unwrap(),
            ids,
            &chunks
        );
        // Keys before RoPE take kernels of their own, which software drivers are slow to compile: for both pairings.
        let ways = [KeyRope::Post, KeyRope::Pre];
        for k_rope in ways
            .into_iter()
            .take(if what.starts_with("pairs") { 2 } else { 1 })
        {
            let found = logits!(
                GpuModel::on(&device, spec(&config, "f32", k_rope), false).unwrap(),
                ids,
                &chunks
            );
            // f32 against f64 through two blocks; a wrong angle or head is off by a tenth and more.
            let error = apart(&expected, &found);
            assert!(error <= 2e-5, "{what}, keys {k_rope}-RoPE: {error:e}");
        }
        // A shape that changed nothing would not have been tested.
        for other in seen.iter().filter(|other| other.len() == expected.len()) {
            assert!(apart(other, &expected) > 1e-3, "{what} is as one before");
        }
        seen.push(expected);
    }
}

#[test]
fn keys_before_rope_are_scaled_then_turned_as_the_reference_does() {
    let Some(gpu) = gpu("keys_before_rope_are_scaled_then_turned_as_the_reference_does") else {
        return;
    };
    for rope_pairing in [RopePairing::Halves, RopePairing::Neighbours] {
        let config = LlamaConfig {
            rope_pairing,
            ..config()
        };
        let (cpu, device) = (on_cpu(&config), on_gpu(gpu, &config, FloatType::F32));
        let ids = ids(&config, 45);
        let full = logits!(
            ReferenceModel::new(&cpu, spec(&config, "f32", KeyRope::Post)).unwrap(),
            ids,
            &[45]
        );
        for pair in PAIRS {
            let spec = || spec(&config, pair, KeyRope::Pre);
            let expected = logits!(ReferenceModel::new(&cpu, spec()).unwrap(), ids, &[40, 5]);
            let found = logits!(GpuModel::on(&device, spec(), false).unwrap(), ids, &[40, 5]);
            let (error, cost) = (apart(&expected, &found), apart(&full, &expected));
            // A code that flips, as the rows differ in their last bits, would move the logits by a small part of what all
            // codes together do.
            assert!(
                error <= 2e-5 + cost / 10.0,
                "{rope_pairing:?} {pair}: {error:e} of {cost:e}"
            );
        }
    }
}

#[test]
fn weights_in_f16_and_in_several_buffers_give_the_same_model() {
    let Some(gpu) = gpu("weights_in_f16_and_in_several_buffers_give_the_same_model") else {
        return;
    };
    let config = LlamaConfig {
        vocabulary: 3001,
        ..config()
    };
    let ids = ids(&config, 21);
    let run = |weights: &Arc<GpuWeights>| {
        let spec = spec(&config, "f32", KeyRope::Post);
        logits!(GpuModel::on(weights, spec, false).unwrap(), ids, &[20, 1])
    };
    let whole = on_gpu(gpu, &config, FloatType::F32);
    let expected = run(&whole);
    // Rounding of every weight by 2^-12 of itself at most, and of the sums of thousands.
    let halves = on_gpu(gpu, &config, FloatType::F16);
    let error = apart(&expected, &run(&halves));
    assert!(error > 0.0 && error <= 3e-3, "f16: {error:e}");
    assert!(halves.bytes() < whole.bytes() * 6 / 10);
    // Embedding and head of 480,160 bytes in bindings of at most 250,000: two or three parts each.
    let small = small_bindings(250_000);
    let error = apart(&expected, &run(&on_gpu(&small, &config, FloatType::F32)));
    assert!(error <= 1e-6, "several buffers: {error:e}");
}

/// A device whose bindings hold no more than so many bytes.
fn small_bindings(bytes: u64) -> Gpu {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::PRIMARY;
    let instance = wgpu::Instance::new(descriptor);
    let options = wgpu::RequestAdapterOptions::default();
    let adapter = pollster::block_on(instance.request_adapter(&options)).unwrap();
    let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        required_limits: wgpu::Limits {
            max_storage_buffer_binding_size: bytes,
            ..wgpu::Limits::default()
        },
        ..Default::default()
    }))
    .unwrap();
    Gpu::from_device(device, queue)
}

#[test]
fn mod_05_keys_of_a_prefill_are_those_of_decoding() {
    let config = config();
    let ids = ids(&config, 32);
    let each = vec![1; 32];
    let cpu = on_cpu(&config);
    let words = |chunks: &[usize]| -> Vec<Vec<u32>> {
        let mut model = ReferenceModel::new(&cpu, spec(&config, "int8", KeyRope::Post)).unwrap();
        let sequence = model.open();
        let mut rest = &ids[..];
        for &chunk in chunks {
            let (now, later) = rest.split_at(chunk);
            model.logits(sequence, now).unwrap();
            rest = later;
        }
        let of = |layer| model.cache().live_words(sequence, layer, K).unwrap();
        (0..config.layers).map(of).collect()
    };
    assert_eq!(words(&[32]), words(&each), "the reference");
    let Some(gpu) = gpu("mod_05_keys_of_a_prefill_are_those_of_decoding") else {
        return;
    };
    let device = on_gpu(gpu, &config, FloatType::F32);
    let words = |chunks: &[usize]| -> Vec<u32> {
        let mut model = GpuModel::on(&device, spec(&config, "int8", KeyRope::Post), false).unwrap();
        let sequence = model.open();
        let mut rest = &ids[..];
        for &chunk in chunks {
            let (now, later) = rest.split_at(chunk);
            model.logits(sequence, now).unwrap();
            rest = later;
        }
        let of = |layer| {
            gpu.block_on(model.cache().live_words(sequence, layer, K).unwrap())
                .unwrap()
        };
        (0..config.layers).flat_map(of).collect()
    };
    let (prefilled, decoded) = (words(&[32]), words(&each));
    let live = prefilled.iter().filter(|&&word| word != 0).count();
    let differ = prefilled.iter().zip(&decoded).filter(|(a, b)| a != b).count();
    // Products of many rows and of one sum in different orders: a code or a scale at a tie may differ. Another table of
    // angles changes nearly every word.
    assert!(
        live > 400 && differ * 50 <= live,
        "{differ} of {live} words differ"
    );
}

#[test]
fn mod_08_a_decoded_query_turns_by_its_own_position() {
    let config = config();
    let ids = ids(&config, 8);
    let cpu = on_cpu(&config);
    let spec = || spec(&config, "f16", KeyRope::Post);
    let reference = |chunks: &[usize]| logits!(ReferenceModel::new(&cpu, spec()).unwrap(), ids, chunks);
    let error = apart(&reference(&[8]), &reference(&[5, 1, 1, 1]));
    assert!(error <= 1e-12, "the reference: {error:e}");
    let Some(gpu) = gpu("mod_08_a_decoded_query_turns_by_its_own_position") else {
        return;
    };
    let device = on_gpu(gpu, &config, FloatType::F32);
    let found = |chunks: &[usize]| logits!(GpuModel::on(&device, spec(), false).unwrap(), ids, chunks);
    // Sums in another order, and a row that rounds to the other f16 neighbour now and then.
    let error = apart(&found(&[8]), &found(&[5, 1, 1, 1]));
    assert!(error <= 1e-3, "the GPU: {error:e}");
}

#[test]
fn a_tensor_that_is_missing_or_of_another_shape_is_named() {
    let config = config();
    let load = |small: &mut Small| {
        model::model(&config, small, &mut |_, _, _| {})
            .unwrap_err()
            .to_string()
    };
    let name = "model.layers.1.mlp.up_proj.weight";
    let mut small = Small::new(&config, 1);
    small.tensors.remove(name);
    let said = load(&mut small);
    assert!(said.contains(name) && said.contains("lacks"), "{said}");
    let mut small = Small::new(&config, 1);
    small.tensors.get_mut(name).unwrap().0 = vec![40, 52];
    let said = load(&mut small);
    assert!(said.contains(name) && said.contains("[52, 40]"), "{said}");
    // A reader that gives fewer numbers than the shape.
    let mut small = Small::new(&config, 1);
    small.tensors.get_mut(name).unwrap().1.pop();
    assert!(load(&mut small).contains(name));
    let odd = LlamaConfig {
        hidden: 42,
        ..config.clone()
    };
    let said = model::model(&odd, &mut Small::new(&odd, 1), &mut |_, _, _| {}).unwrap_err();
    assert!(said.to_string().contains("hidden size = 42"), "{said}");
}

/// Shapes without numbers.
struct Promised(LlamaConfig);

impl Tensors for Promised {
    fn shape(&self, name: &str) -> Option<Vec<u64>> {
        self.0
            .tensors()
            .find(|(known, _)| known == name)
            .map(|(_, shape)| shape)
    }

    fn read(&mut self, name: &str) -> Result<Vec<f32>> {
        panic!("{name} is read although the model does not fit");
    }
}

#[test]
fn a_model_beyond_the_memory_is_refused_with_the_numbers_before_it_is_read() {
    let test = "a_model_beyond_the_memory_is_refused_with_the_numbers_before_it_is_read";
    let Some(gpu) = gpu(test) else { return };
    if gpu.free_memory().is_none() {
        // A GPU says how much it has only by giving all of it.
        say(&format!(
            "kvpack: skipped {test}: this adapter does not tell its memory"
        ));
        return;
    }
    let config = LlamaConfig {
        vocabulary: 1 << 24,
        hidden: 1 << 18,
        ..config()
    };
    let mut promised = Promised(config.clone());
    let refused = model::upload(gpu, &config, &mut promised, FloatType::F32, &mut |_, _, _| {});
    let Err(Error::Limit { needed, allowed, .. }) = refused else {
        panic!("{refused:?}");
    };
    assert!(needed > 1 << 45 && allowed < 1 << 42, "{needed} of {allowed}");
}

fn options(pairs: &[&str], k_rope: KeyRope) -> TrainedDriftOptions {
    TrainedDriftOptions {
        pairs: pairs.iter().map(|pair| pair.parse().unwrap()).collect(),
        k_rope,
        mode: Mode::Prefill,
        window: 0,
        per_layer: true,
        kv_scales: None,
    }
}

#[test]
fn drift_of_a_model_is_the_same_on_both_devices_and_layers_rank_the_formats() {
    let Some(gpu) = gpu("drift_of_a_model_is_the_same_on_both_devices_and_layers_rank_the_formats") else {
        return;
    };
    let config = config();
    let ids = ids(&config, 64);
    let placed = [
        (Device::Cpu, Placed::Cpu(Box::new(on_cpu(&config)))),
        (
            Device::Gpu(gpu.clone()),
            Placed::Gpu(on_gpu(gpu, &config, FloatType::F32)),
        ),
    ];
    for k_rope in [KeyRope::Post, KeyRope::Pre] {
        // Per-tensor scales of keys before RoPE are those of such keys.
        let options = options(&[&PAIRS[..], &["fp8"]].concat(), k_rope);
        let [cpu, found] = placed.each_ref().map(|(device, model)| {
            let mut last = (0, 0);
            let drift = run_trained(device, model, &ids, &options, &mut |done, of, _| {
                last = (done, of)
            });
            assert_eq!(last, (7 * 64, 7 * 64), "progress reaches its end");
            drift.unwrap()
        });
        assert_eq!((cpu.rows.len(), cpu.layers.len()), (6, 10));
        let f32 = &cpu.rows[0];
        assert_eq!(
            (f32.pair.as_str(), f32.logit_drift, f32.top1, f32.predictions),
            ("f32", 0.0, 64, 64)
        );
        // Some perplexity of a vocabulary of 61; weights are random.
        assert!(f32.perplexity > 1.0 && f32.perplexity < 1e4);
        for (a, b) in cpu.rows.iter().zip(&found.rows) {
            assert_eq!(a.pair, b.pair);
            assert!((a.perplexity / b.perplexity - 1.0).abs() <= 0.02, "{a:?} {b:?}");
            // Rows differ in their last bits, and codes flip at ties.
            assert!(
                (a.logit_drift_centred - b.logit_drift_centred).abs() <= 1e-5 + 0.1 * a.logit_drift_centred,
                "{a:?} {b:?}"
            );
            assert_eq!(
                (a.cache_bytes, a.tokens, a.saturated),
                (b.cache_bytes, 64, b.saturated)
            );
        }
        for (a, b) in cpu.layers.iter().zip(&found.layers) {
            assert_eq!((&a.pair, a.layer), (&b.pair, b.layer));
            let figures = |r: &kvpack::drift::LayerDriftRow| {
                let outliers = [r.k_outlier_before_rope, r.k_outlier_after_rope].map(Option::unwrap);
                [r.k_error, r.v_error, r.attention_error, outliers[0], outliers[1]]
            };
            for (a, b) in figures(a).into_iter().zip(figures(b)) {
                assert!((a - b).abs() <= 1e-5 + 0.05 * a, "{k_rope} {a} {b}");
            }
        }
        let layer = |pair: &str| {
            found
                .layers
                .iter()
                .find(|row| row.pair == pair && row.layer == 1)
                .unwrap()
        };
        let (f16, int8, int4) = (layer("f16"), layer("int8"), layer("int4c(8)/int4"));
        // Half a step of 2^-11, of 1/127 and of 1/7 of the largest of 16 channels.
        assert!(f16.k_error > 5e-5 && f16.k_error < 4e-4, "{f16:?}");
        assert!(int8.k_error > 1e-3 && int8.k_error < 8e-3, "{int8:?}");
        assert!(int4.v_error > 3e-2 && int4.v_error < 0.15, "{int4:?}");
        assert!(f16.attention_error < int8.attention_error && int8.attention_error < int4.attention_error);
        assert!(int4.k_outlier_before_rope > Some(1.0));
    }
}

#[test]
fn drift_of_a_model_refuses_what_it_cannot_measure() {
    let config = config();
    let placed = Placed::Cpu(Box::new(on_cpu(&config)));
    let refused = |ids: &[u32], options: &TrainedDriftOptions| {
        run_trained(&Device::Cpu, &placed, ids, options, &mut |_, _, _| {})
            .unwrap_err()
            .to_string()
    };
    let good = options(&["int8"], KeyRope::Post);
    assert!(refused(&[5], &good).contains("a text of 1 tokens"));
    assert!(refused(&[5, 61], &good).contains("token id = 61"));
    assert!(refused(&[5; 65], &good).contains("64 positions"));
    assert!(refused(&[5, 6], &options(&[], KeyRope::Post)).contains("no pairs"));
    let wide = TrainedDriftOptions {
        window: 5000,
        ..good.clone()
    };
    assert!(refused(&[5, 6], &wide).contains("window 5000"));
    // Positions that are added are no rotation.
    let tiny = Placed::Cpu(Box::new(model::tiny(1.0)));
    let pre = options(&["int8"], KeyRope::Pre);
    let said = run_trained(&Device::Cpu, &tiny, &[1, 2], &pre, &mut |_, _, _| {}).unwrap_err();
    assert!(said.to_string().contains("does not rotate"), "{said}");
}

#[test]
fn generated_text_is_greedy_seeded_and_ends() {
    let config = config();
    let placed = Placed::Cpu(Box::new(on_cpu(&config)));
    let options = GenerateOptions {
        pair: "f32".parse().unwrap(),
        window: 0,
        max_tokens: 12,
        temperature: 0.0,
        seed: 1,
        kv_scales: None,
        end_of_text: Vec::new(),
    };
    let run = |options: &GenerateOptions| {
        let mut streamed = Vec::new();
        let generated = generate(&placed, &[3, 1, 4], options, &mut |id| {
            streamed.push(id);
            Ok(true)
        })
        .unwrap();
        assert_eq!(streamed, generated.ids);
        generated
    };
    let greedy = run(&options);
    assert_eq!(
        (greedy.ids.len(), greedy.ended, greedy.cached_tokens),
        (12, false, 3 + 11)
    );
    // Each token is the most probable one after those before it.
    let model = on_cpu(&config);
    let mut whole = vec![3, 1, 4];
    whole.extend(&greedy.ids);
    let logits = logits!(
        ReferenceModel::new(&model, spec(&config, "f32", KeyRope::Post)).unwrap(),
        whole,
        &[15]
    );
    for (i, &id) in greedy.ids.iter().enumerate() {
        let row = &logits[(i + 2) * 61..(i + 3) * 61];
        assert!(row.iter().all(|v| *v <= row[id as usize] + 1e-9), "token {i}");
    }
    // The end is no part of the text.
    let end = greedy.ids[5];
    let first = greedy.ids.iter().position(|&id| id == end).unwrap();
    let ends = GenerateOptions {
        end_of_text: vec![60, end],
        ..options.clone()
    };
    let ended = run(&ends);
    assert_eq!((ended.ids.as_slice(), ended.ended), (&greedy.ids[..first], true));
    // A seed draws the same again, another one other tokens.
    let drawn = |seed| {
        run(&GenerateOptions {
            temperature: 1.5,
            seed,
            ..options.clone()
        })
        .ids
    };
    assert_eq!(drawn(1), drawn(1));
    assert_ne!(drawn(1), drawn(2));
    // fp8 is calibrated on the prompt; the context ends the text.
    let long = run(&GenerateOptions {
        pair: "fp8".parse().unwrap(),
        max_tokens: 1000,
        ..options.clone()
    });
    assert_eq!((long.ids.len(), long.cached_tokens), (62, 64));
    let refused = |prompt: &[u32], options: &GenerateOptions| {
        generate(&placed, prompt, options, &mut |_| Ok(true))
            .unwrap_err()
            .to_string()
    };
    assert!(refused(&[], &options).contains("empty prompt"));
    for temperature in [-1.0, f64::NAN] {
        let bad = GenerateOptions {
            temperature,
            ..options.clone()
        };
        assert!(refused(&[3], &bad).contains("temperature"));
    }
}
