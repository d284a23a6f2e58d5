//! Rows in a caller's buffers: offsets, strides and types of keys, values and queries, where outputs and the LSE go, and
//! buffers that are refused. `portable` is the part that is repeated on other drivers.

use half::f16;
use kvpack::cache::{CacheSpec, K, KvCache, LayerSpec, Step, TensorScales, V};
use kvpack::gpu::Gpu;
use kvpack::kernels::{FloatType, Outputs, Rows, attention_merge};
use kvpack::options::AttentionOptions;
use kvpack::reference::ReferenceCache;
use kvpack::validate::Random;
use kvpack::work::Merge;
use kvpack::{Error, Result, wgpu};

use crate::common::gpu;

const HEADS: u32 = 2;
const HEAD_DIMS: [u32; 2] = [24, 16];
/// New tokens of each step.
const STEPS: [u32; 3] = [37, 1, 9];

fn spec(pair: &str, window: [u32; 2], tensor_scales: TensorScales) -> CacheSpec {
    let layer = LayerSpec {
        window,
        ..LayerSpec::new(pair.parse().unwrap())
    };
    let spec = CacheSpec {
        v_head_dim: HEAD_DIMS[V],
        layers: vec![layer],
        page_tokens: 32,
        sequences: 2,
        tensor_scales,
        ..CacheSpec::new(1, 2 * HEADS, HEADS, HEAD_DIMS[K], layer.pair, 0)
    };
    spec.with_pages(8).unwrap()
}

/// How rows of some heads of `head_dim` channels lie in their buffer.
#[derive(Debug, Clone, Copy)]
struct Layout {
    offset: u32,
    strides: Option<[u32; 2]>,
}

impl Layout {
    const DENSE: Layout = Layout {
        offset: 0,
        strides: None,
    };

    fn new(offset: u32, token: u32, head: u32) -> Layout {
        Layout {
            offset,
            strides: Some([token, head]),
        }
    }

    fn of<'a>(self, buffer: &'a wgpu::Buffer, float: FloatType) -> Rows<'a> {
        let rows = match float {
            FloatType::F32 => Rows::from(buffer),
            FloatType::F16 => Rows::f16(buffer),
        };
        let rows = rows.at(self.offset);
        self.strides
            .map_or(rows, |[token, head]| rows.strides(token, head))
    }

    /// The place of a row's first number in its buffer.
    fn place(self, token: u32, head: u32, heads: u32, head_dim: u32) -> usize {
        let [row, next] = self.strides.unwrap_or([heads * head_dim, head_dim]);
        (self.offset + token * row + head * next) as usize
    }
}

/// Layouts in which attention can read `tokens` rows: behind others, in rows of q, k and v together, head by head, with
/// gaps, and one token over and over.
fn layouts_of_quads(tokens: u32, heads: u32, head_dim: u32) -> Vec<Layout> {
    let row = heads * head_dim;
    vec![
        Layout::DENSE,
        Layout {
            offset: 20,
            strides: None,
        },
        Layout::new(row, 3 * row, head_dim),
        Layout::new(2 * head_dim, 6 * row, 3 * head_dim),
        Layout::new(0, head_dim, tokens * head_dim),
        Layout::new(4, row + 12, head_dim + 4),
        Layout::new(8, 0, head_dim),
        Layout::new(0, 4, 0),
    ]
}

/// The same and some at odd elements.
fn layouts(tokens: u32, heads: u32, head_dim: u32) -> Vec<Layout> {
    let mut all = layouts_of_quads(tokens, heads, head_dim);
    all.push(Layout {
        offset: 3,
        strides: None,
    });
    all.push(Layout::new(5, heads * head_dim + 1, head_dim));
    all.push(Layout::new(1, 2 * heads * head_dim + 3, head_dim + 7));
    all
}

/// A buffer of random numbers that ends with the last row, and those of the rows, `[token][head][channel]`. All are
/// numbers of f16, so that both types hold the same; some are subnormal there, some are not finite.
struct Made {
    buffer: wgpu::Buffer,
    dense: Vec<f32>,
}

fn make(gpu: &Gpu, layout: Layout, float: FloatType, shape: [u32; 3], special: bool, seed: u64) -> Made {
    let [tokens, heads, head_dim] = shape;
    let place = |token, head| layout.place(token, head, heads, head_dim);
    let end = place(tokens - 1, heads - 1) + head_dim as usize;
    let mut random = Random::new(seed);
    let numbers: Vec<f16> = (0..end)
        .map(|_| match random.below(64) {
            0 if special => [f16::NAN, f16::INFINITY, f16::NEG_INFINITY, f16::MAX][random.below(4) as usize],
            1 if special => f16::from_bits(random.below(0x400) as u16),
            _ => f16::from_f32(random.normal()),
        })
        .collect();
    let mut dense = Vec::new();
    for token in 0..tokens {
        for head in 0..heads {
            let row = &numbers[place(token, head)..][..head_dim as usize];
            dense.extend(row.iter().map(|x| x.to_f32()));
        }
    }
    let buffer = match float {
        FloatType::F32 => gpu.upload("rows", &numbers.iter().map(|x| x.to_f32()).collect::<Vec<_>>()),
        FloatType::F16 => gpu.upload("rows", &numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>()),
    };
    Made {
        buffer: buffer.unwrap(),
        dense,
    }
}

/// Appends steps whose rows lie as layout `choice` of each side says, and compares with the reference, which gets them
/// dense: all live words, the status, and what calibration saw.
fn append_in_layout(gpu: &Gpu, spec: &CacheSpec, choice: usize, float: FloatType) {
    let mut cache = KvCache::new(gpu, spec.clone()).unwrap();
    let mut reference = ReferenceCache::new(spec.clone()).unwrap();
    let (our, id) = (cache.open(), reference.book_mut().open());
    // Scales that come from rows come from those of one step.
    let steps = match spec.tensor_scales {
        TensorScales::FromRows => &STEPS[..1],
        _ => &STEPS,
    };
    for (seed, &tokens) in (0..).zip(steps) {
        let rows = [K, V].map(|s| {
            let all = layouts(tokens, HEADS, HEAD_DIMS[s]);
            // Other ones on both sides.
            let layout = all[(choice + s) % all.len()];
            let shape = [tokens, HEADS, HEAD_DIMS[s]];
            (layout, make(gpu, layout, float, shape, true, 2 * seed + s as u64))
        });
        let [k, v] = [0, 1].map(|s| rows[s].0.of(&rows[s].1.buffer, float));
        let step = cache.step(&[(our, tokens)]).unwrap();
        gpu.submit("append", |encoder| {
            step.calibrate(encoder, 0, k, v)?;
            step.append(encoder, 0, k, v)
        })
        .unwrap();
        step.commit().unwrap();
        let plan = reference.book_mut().plan(&[(id, tokens)], 1).unwrap();
        reference
            .append(&plan, 0, &rows[K].1.dense, &rows[V].1.dense)
            .unwrap();
        reference.book_mut().commit(plan).unwrap();
    }
    let what = format!("{}, layout {choice}, {float:?}", spec.layers[0].pair);
    for s in [K, V] {
        let ours = gpu.block_on(cache.live_words(our, 0, s).unwrap()).unwrap();
        let theirs = reference.live_words(id, 0, s).unwrap();
        assert!(
            ours.iter().any(|&word| word != 0) && ours == theirs,
            "{what}: side {s}"
        );
    }
    assert_eq!(
        gpu.block_on(cache.status().unwrap()).unwrap(),
        reference.status(),
        "{what}"
    );
    // The reference forgets what it has seen where scales come from each step's rows.
    if spec.tensor_scales != TensorScales::FromRows {
        assert_eq!(
            gpu.block_on(cache.calibrated().unwrap()).unwrap(),
            reference.calibrated(),
            "{what}"
        );
    }
}

fn append_in_every_layout(gpu: &Gpu, spec: &CacheSpec) {
    for float in [FloatType::F32, FloatType::F16] {
        for choice in 0..layouts(1, 1, 8).len() {
            append_in_layout(gpu, spec, choice, float);
        }
    }
}

fn given() -> TensorScales {
    TensorScales::Given(vec![[0.01, 0.02]])
}

#[test]
fn rows_in_any_layout_give_the_pages_of_dense_f32_rows() {
    let Some(gpu) = gpu("rows_in_any_layout_give_the_pages_of_dense_f32_rows") else {
        return;
    };
    for (pair, window, scales) in [
        ("int4/fp4", [0; 2], given()),
        ("f16/f32", [0; 2], given()),
        // Through pages in which rows wait.
        ("int4c(16)/int8", [0, 8], given()),
        ("int2c/int2", [5, 0], given()),
        ("fp8", [0; 2], given()),
        ("fp8", [0, 8], TensorScales::FromRows),
    ] {
        append_in_every_layout(gpu, &spec(pair, window, scales));
    }
}

// ---- queries -----------------------------------------------------------------------------------------------------

/// A step of a cache of two sequences, with tokens in pages of every kind.
fn with_step<T>(gpu: &Gpu, new: u32, run: impl FnOnce(&Step<'_>) -> T) -> T {
    let mut cache = KvCache::new(gpu, spec("int4c(16)/int8", [0; 2], given())).unwrap();
    let [a, b] = [(); 2].map(|()| cache.open());
    let append = |step: &Step<'_>, seed| {
        let [k, v] = [K, V].map(|s| {
            let shape = [step.tokens(), HEADS, HEAD_DIMS[s]];
            make(gpu, Layout::DENSE, FloatType::F32, shape, false, seed + s as u64).buffer
        });
        gpu.submit("append", |encoder| step.append(encoder, 0, &k, &v))
            .unwrap();
    };
    let step = cache.step(&[(a, 50), (b, 3)]).unwrap();
    append(&step, 1);
    step.commit().unwrap();
    let step = cache.step(&[(a, new), (b, 1)]).unwrap();
    append(&step, 3);
    run(&step)
}

/// The bits of the outputs and of the LSE.
fn attended(gpu: &Gpu, step: &Step<'_>, q: Rows<'_>) -> Result<(Vec<u32>, Vec<u32>)> {
    let rows = (step.tokens() * 2 * HEADS) as usize;
    let numbers = rows * HEAD_DIMS[V] as usize;
    let [output, lse] = [numbers, rows].map(|count| gpu.upload("output", &vec![u32::MAX; count]).unwrap());
    gpu.submit("attend", |encoder| {
        let outputs = Outputs::from(&output).with_lse(&lse);
        step.attend(encoder, 0, q, outputs, &AttentionOptions::default())
    })?;
    Ok((
        gpu.read("output", &output, numbers)?,
        gpu.read("lse", &lse, rows)?,
    ))
}

fn queries_in_every_layout(gpu: &Gpu, new: u32) {
    with_step(gpu, new, |step| {
        let shape = [step.tokens(), 2 * HEADS, HEAD_DIMS[K]];
        let mut seen = Vec::new();
        for float in [FloatType::F32, FloatType::F16] {
            for (i, layout) in layouts_of_quads(shape[0], shape[1], shape[2])
                .into_iter()
                .enumerate()
            {
                let q = make(gpu, layout, float, shape, false, i as u64);
                let dense = gpu.upload("dense q", &q.dense).unwrap();
                let wanted = attended(gpu, step, Rows::from(&dense)).unwrap();
                let got = attended(gpu, step, layout.of(&q.buffer, float)).unwrap();
                assert!(got == wanted, "{float:?}, {layout:?}");
                assert!(!got.0.contains(&u32::MAX) && !got.1.contains(&u32::MAX));
                seen.push(got);
            }
        }
        seen.dedup();
        assert!(seen.len() > 8, "the layouts read different numbers");
    });
}

#[test]
fn queries_in_any_layout_give_the_bits_of_dense_ones() {
    let Some(gpu) = gpu("queries_in_any_layout_give_the_bits_of_dense_ones") else {
        return;
    };
    for new in [1, 19] {
        queries_in_every_layout(gpu, new);
    }
}

#[test]
fn queries_that_begin_within_a_quad_are_refused() {
    let Some(gpu) = gpu("queries_that_begin_within_a_quad_are_refused") else {
        return;
    };
    with_step(gpu, 2, |step| {
        let q = gpu.zeros("q", 4096).unwrap();
        for (layout, part) in [
            (Layout::new(2, 96, 24), "an offset of 2 elements"),
            (Layout::new(0, 97, 24), "a token stride of 97 elements"),
            (Layout::new(0, 96, 25), "a head stride of 25 elements"),
        ] {
            for float in [FloatType::F32, FloatType::F16] {
                let refused = attended(gpu, step, layout.of(&q, float)).unwrap_err();
                assert!(matches!(refused, Error::Usage { .. }), "{refused}");
                let said = refused.to_string();
                assert!(said.contains(part) && said.contains("multiples of 4"), "{said}");
            }
        }
    });
}

// ---- what is refused ---------------------------------------------------------------------------------------------

fn buffer(gpu: &Gpu, size: u64, usage: wgpu::BufferUsages) -> wgpu::Buffer {
    gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size,
        usage,
        mapped_at_creation: false,
    })
}

#[test]
fn rows_need_a_buffer_to_their_last_number_and_no_more() {
    let Some(gpu) = gpu("rows_need_a_buffer_to_their_last_number_and_no_more") else {
        return;
    };
    let storage = |size| buffer(gpu, size, wgpu::BufferUsages::STORAGE);
    // (layout, f16, bytes that 3 tokens of 2 heads of 8 take)
    for (layout, half, bytes) in [
        (Layout::DENSE, false, 192),
        (Layout::DENSE, true, 96),
        (
            Layout {
                offset: 5,
                strides: None,
            },
            false,
            212,
        ),
        // 53 halves are 26 words and a half.
        (
            Layout {
                offset: 5,
                strides: None,
            },
            true,
            108,
        ),
        (Layout::new(1, 100, 30), false, (1 + 200 + 30 + 8) * 4),
        (Layout::new(0, 8, 24), false, 192),
        (Layout::new(0, 0, 0), false, 32),
        (Layout::new(0, 0, 0), true, 16),
    ] {
        let float = if half { FloatType::F16 } else { FloatType::F32 };
        let check = |size, tokens| {
            let buffer = storage(size);
            layout.of(&buffer, float).check("k bytes", tokens, 2, 8)
        };
        check(bytes, 3).unwrap();
        let refused = check(bytes - 4, 3).unwrap_err();
        assert!(
            matches!(refused, Error::Shape { what: "k bytes", value, .. } if value == bytes - 4),
            "{refused}"
        );
        let said = refused.to_string();
        assert!(said.contains(&format!("{bytes} bytes")), "{layout:?}: {said}");
        check(4, 0).unwrap();
    }
    // Indices that do not fit 32 bits, sums that do not fit 64.
    let small = storage(16);
    let most = u32::MAX;
    for (rows, tokens) in [
        (Rows::from(&small).at(most), 1),
        (Rows::from(&small).strides(most, 0), 3),
        (Rows::from(&small).strides(most, most).at(most), most),
        (Rows::from(&small), most),
    ] {
        let refused = rows.check("v bytes", tokens, 1024, 256).unwrap_err();
        assert!(matches!(refused, Error::Limit { .. }), "{refused}");
        assert!(refused.to_string().starts_with("v (elements"), "{refused}");
        rows.check("v bytes", 0, 1024, 256).unwrap();
    }
    // The last index is 2^32 - 1: only the buffer is too small.
    let refused = Rows::from(&small)
        .at(most - 7)
        .check("v bytes", 1, 1, 8)
        .unwrap_err();
    assert!(refused.to_string().contains("17179869184 bytes"), "{refused}");
    assert!(matches!(
        Rows::from(&small).at(most - 6).check("v bytes", 1, 1, 8),
        Err(Error::Limit { .. })
    ));
    let strides = Rows::from(&small).at(3).row_strides(2, 8);
    assert_eq!((strides.offset, strides.row, strides.head), (3, 16, 8));
    let strides = Rows::from(&small).strides(7, 0).row_strides(2, 8);
    assert_eq!((strides.offset, strides.row, strides.head), (0, 7, 0));
}

#[test]
fn buffers_of_a_step_are_refused_by_name() {
    let Some(gpu) = gpu("buffers_of_a_step_are_refused_by_name") else {
        return;
    };
    let good = gpu.zeros("rows", 1 << 16).unwrap();
    let unusable = buffer(gpu, 1 << 16, wgpu::BufferUsages::COPY_DST);
    let small = gpu.zeros("rows", 16).unwrap();
    with_step(gpu, 2, |step| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let options = AttentionOptions::default();
        let outputs = Outputs::from(&good);
        for (bad, usage) in [(&unusable, true), (&small, false)] {
            for (refused, name) in [
                (step.append(&mut encoder, 0, bad, &good), "k"),
                (
                    step.append(&mut encoder, 0, Rows::f16(&good), Rows::f16(bad)),
                    "v",
                ),
                (step.calibrate(&mut encoder, 0, bad, &good), "k"),
                (step.calibrate(&mut encoder, 0, &good, bad), "v"),
                (step.attend(&mut encoder, 0, bad, outputs, &options), "q"),
                (step.attend(&mut encoder, 0, &good, bad, &options), "output"),
                (
                    step.attend(&mut encoder, 0, &good, Outputs::f16(bad), &options),
                    "output",
                ),
                (
                    step.attend(&mut encoder, 0, &good, outputs.with_lse(bad), &options),
                    "lse",
                ),
            ] {
                let refused = refused.unwrap_err();
                let said = refused.to_string();
                assert_eq!(matches!(refused, Error::Usage { .. }), usage, "{said}");
                let wanted = match usage {
                    true => format!("a buffer for {name}: "),
                    false => format!("{name} bytes = 16 "),
                };
                assert!(said.starts_with(&wanted), "{said}");
            }
        }
        let twice = Rows::from(&small).strides(0, 0).at(3);
        let refused = step.append(&mut encoder, 0, twice, &good).unwrap_err();
        assert!(refused.to_string().contains("108 bytes"), "{refused}");
        let refused = step.attend(
            &mut encoder,
            0,
            &good,
            Outputs::from(&small).with_lse(&small),
            &options,
        );
        assert!(matches!(
            refused,
            Err(Error::Shape {
                what: "output bytes",
                ..
            })
        ));
        let both = outputs.with_lse(&good);
        let refused = step.attend(&mut encoder, 0, &good, both, &options).unwrap_err();
        assert!(refused.to_string().contains("LSE in one buffer"), "{refused}");
    });
}

// ---- the LSE -----------------------------------------------------------------------------------------------------

#[test]
fn the_lse_is_written_only_where_it_is_asked_for() {
    let Some(gpu) = gpu("the_lse_is_written_only_where_it_is_asked_for") else {
        return;
    };
    // The kernel itself, with a buffer that is bound though the LSE is not asked for.
    let merge = Merge {
        first: 0,
        stride: 1,
        count: 1,
        row: 0,
    };
    let merges = gpu.upload("merges", &[merge]).unwrap();
    let partial_o = gpu.upload("partials", &[2.0_f32; 8]).unwrap();
    let partial_ml = gpu.upload("partial sums", &[3.0_f32, 1.0]).unwrap();
    for float in [FloatType::F32, FloatType::F16] {
        let composer = attention_merge::composer(8, float);
        let kernel = gpu
            .kernel("attention_merge", attention_merge::BINDINGS, &composer)
            .unwrap();
        for asked in [0, 1] {
            let lse = gpu.upload("lse", &[f32::MAX; 4]).unwrap();
            let output = gpu.zeros("output", 32).unwrap();
            let params = gpu.uniform(&attention_merge::Params {
                rows: 1,
                q_heads: 1,
                sinks: 0,
                lse: asked,
            });
            gpu.submit("merge", |encoder| {
                let mut pass = encoder.begin_compute_pass(&Default::default());
                let buffers = [&params, &merges, &partial_o, &partial_ml, &output, &lse, &merges];
                kernel.encode(gpu, &mut pass, &buffers, [1, 1, 1]);
                Ok(())
            })
            .unwrap();
            let first = if asked == 1 { 3.0 } else { f32::MAX };
            assert_eq!(
                gpu.read::<f32>("lse", &lse, 4).unwrap(),
                [first, f32::MAX, f32::MAX, f32::MAX]
            );
            let two = if float == FloatType::F32 {
                0x4000_0000
            } else {
                0x4000_4000
            };
            assert_eq!(gpu.read::<u32>("output", &output, 4).unwrap(), [two; 4]);
        }
    }
    // And a step: the same outputs with it and without it.
    with_step(gpu, 3, |step| {
        let shape = [step.tokens(), 2 * HEADS, HEAD_DIMS[K]];
        let q = make(gpu, Layout::DENSE, FloatType::F32, shape, false, 5);
        let (wanted, lse) = attended(gpu, step, Rows::from(&q.buffer)).unwrap();
        assert!(lse.iter().all(|&bits| f32::from_bits(bits).is_finite()));
        let output = gpu.upload("output", &vec![u32::MAX; wanted.len()]).unwrap();
        gpu.submit("attend", |encoder| {
            // Twice: the buffer that stands in for the LSE is bound in both.
            for _ in 0..2 {
                step.attend(encoder, 0, &q.buffer, &output, &AttentionOptions::default())?;
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(gpu.read::<u32>("output", &output, wanted.len()).unwrap(), wanted);
    });
}

// ---- a part for other drivers ------------------------------------------------------------------------------------

mod portable {
    use super::*;

    #[test]
    fn rows_in_any_layout() {
        let Some(gpu) = gpu("portable rows") else { return };
        let spec = spec("int4c(16)/int8", [0; 2], given());
        for float in [FloatType::F32, FloatType::F16] {
            // Fused, and at odd elements.
            for choice in [2, 9] {
                append_in_layout(gpu, &spec, choice, float);
            }
        }
    }

    #[test]
    fn queries_in_any_layout() {
        let Some(gpu) = gpu("portable queries") else {
            return;
        };
        queries_in_every_layout(gpu, 1);
    }
}
