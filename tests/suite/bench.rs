//! The benchmark: what it times, what it counts, and what it refuses to believe. No test judges a speed.

use kvpack::Error;
use kvpack::bench::check::{Place, compare};
use kvpack::bench::roof::Roof;
use kvpack::bench::timer::{Clock, LEAST_SAMPLES, Timer, quartiles};
use kvpack::bench::tune::{TuneOptions, tune};
use kvpack::bench::workload::Workload;
use kvpack::bench::{BenchOptions, BenchReport, Case, Shape, Sizes, Work, assumed_cache};
use kvpack::cache::plan::SegmentKind;
use kvpack::cache::{CacheSpec, KvCache};
use kvpack::gpu::{Gpu, Selection};
use kvpack::options::AttentionOptions;
use kvpack::tuning::{self, Tuning};
use kvpack::validate::Random;
use kvpack::variant::{Arithmetic, Reduction, Variant};
use kvpack::wgpu;

use crate::common;

const LLAMA: Shape = Shape {
    q_heads: 32,
    kv_heads: 8,
    head_dim: 128,
};
const SMALL: Shape = Shape {
    q_heads: 4,
    kv_heads: 2,
    head_dim: 32,
};

fn options(work: Work, pairs: &str, contexts: &[u32]) -> BenchOptions {
    BenchOptions {
        work,
        pairs: pairs.split(',').map(|name| name.parse().unwrap()).collect(),
        contexts: contexts.to_vec(),
        batch: 2,
        new_tokens: 48,
        shape: SMALL,
        sizes: Sizes {
            cache_bytes: 32 << 10,
            memory: 16 << 20,
        },
        cache_source: "given".to_owned(),
        seconds: 0.02,
    }
}

fn run(gpu: &Gpu, options: &BenchOptions) -> BenchReport {
    kvpack::bench::run(gpu, options, &mut |_, _, _| ()).unwrap()
}

#[test]
fn ben_01_eight_mib_read_again_and_again_are_marked_as_cache_resident() {
    let Some(gpu) = common::gpu("ben_01") else { return };
    // 2048 tokens of f16 are 8 MiB, and the memory holds no second layer. 200 samples of it.
    let options = BenchOptions {
        batch: 1,
        shape: LLAMA,
        sizes: Sizes {
            cache_bytes: 64 << 20,
            memory: 8 << 20,
        },
        ..options(Work::Decode, "f16", &[2048])
    };
    let report = run(gpu, &options);
    let row = &report.rows[0];
    assert_eq!((row.layers, row.code_bytes), (1, 8 << 20));
    assert!(row.cache_resident && row.percent_of_roof.is_none());
    assert!(report.roofs.iter().all(|roof| roof.cache_resident));
    let case = Case {
        work: Work::Decode,
        pair: "f16".parse().unwrap(),
        shape: LLAMA,
        batch: 1,
        context: 2048,
        new_tokens: 1,
    };
    let mut workload = Workload::new(gpu, &case, &options.sizes).unwrap();
    let timer = Timer::new(gpu).unwrap();
    let record = |record: &mut dyn FnMut(&mut wgpu::CommandEncoder) -> kvpack::Result<()>| {
        timer.read(|encoder| (0..200).try_for_each(|_| record(encoder)))
    };
    let reading = workload.timed(record).unwrap().unwrap();
    assert!(reading.wall > 0.0);
    // With memory for 4 times the cache it is not marked.
    let enough = BenchOptions {
        sizes: Sizes {
            cache_bytes: 4 << 20,
            memory: 64 << 20,
        },
        ..options
    };
    let report = run(gpu, &enough);
    assert!(report.rows[0].layers == 2 && !report.rows[0].cache_resident);
}

#[test]
fn ben_04_twice_the_tokens_take_twice_the_time() {
    let Some(gpu) = common::gpu("ben_04") else { return };
    let timer = Timer::new(gpu).unwrap();
    let sizes = Sizes {
        cache_bytes: 1 << 20,
        memory: 256 << 20,
    };
    let [mut short, mut long] = [8192, 16_384].map(|context| {
        let case = Case {
            work: Work::Decode,
            pair: "f16".parse().unwrap(),
            shape: LLAMA,
            batch: 1,
            context,
            new_tokens: 1,
        };
        Workload::new(gpu, &case, &sizes).unwrap()
    });
    assert_eq!((short.layers(), long.layers()), (1, 1));
    let times = |workload: &mut Workload| {
        let readings = workload
            .timed(|record| {
                (0..7)
                    .map(|_| timer.read(&mut *record).unwrap())
                    .collect::<Vec<_>>()
            })
            .unwrap();
        let median = |of: &dyn Fn(&kvpack::bench::timer::Reading) -> f64| {
            quartiles(&readings.iter().map(of).collect::<Vec<_>>())[1]
        };
        let ticks = readings.iter().all(|reading| reading.ticks.is_some());
        let stamps = ticks.then(|| {
            median(&|reading| {
                let [before, after] = reading.ticks.unwrap();
                (after - before) as f64
            })
        });
        (median(&|reading| reading.wall), stamps)
    };
    // Others use this machine too: the best of some tries.
    let mut seen = Vec::new();
    for _ in 0..8 {
        let (a, b) = (times(&mut short), times(&mut long));
        let wall = b.0 / a.0;
        let stamps = a.1.zip(b.1).map_or(wall, |(a, b)| b / a);
        seen.push([wall, stamps]);
        if seen
            .last()
            .unwrap()
            .iter()
            .all(|ratio| (1.6..2.4).contains(ratio))
        {
            return;
        }
    }
    panic!("ratios of wall clocks and of timestamps: {seen:?}");
}

#[test]
fn ben_05_the_warm_up_is_in_no_sample() {
    let Some(gpu) = common::gpu("ben_05") else { return };
    let timer = Timer::new(gpu).unwrap();
    let buffers = [1, 2].map(|_| gpu.zeros("copied", 8 << 20).unwrap());
    let mut calls = 0;
    let samples = timer
        .sample(0.05, &mut |encoder| {
            calls += 1;
            // What comes first is slow: here the work itself, elsewhere compilation.
            let copies = if calls <= 2 { 200 } else { 1 };
            for _ in 0..copies {
                encoder.copy_buffer_to_buffer(&buffers[0], 0, &buffers[1], 0, 8 << 20);
            }
            Ok(())
        })
        .unwrap();
    assert!(samples.seconds.len() >= LEAST_SAMPLES, "{samples:?}");
    let slowest = samples.seconds.iter().fold(0.0_f64, |m, s| m.max(*s));
    assert!(slowest < samples.warm_up / 10.0, "{samples:?}");
    let report = run(gpu, &options(Work::Decode, "int8", &[256]));
    assert!(report.header.warm_up.contains("in no sample"));
    let row = &report.rows[0];
    assert!(row.samples.len() >= LEAST_SAMPLES && row.warm_up_seconds > 0.0);
    assert_eq!(quartiles(&row.samples)[1], row.seconds);
    assert!(row.seconds_low <= row.seconds && row.seconds <= row.seconds_high);
}

#[test]
fn every_kind_of_work_gives_rows_beside_f16() {
    let Some(gpu) = common::gpu("every_kind_of_work_gives_rows_beside_f16") else {
        return;
    };
    for work in [Work::Decode, Work::Append, Work::Prefill] {
        // 100 is no multiple of a page or of a group: tokens wait.
        let report = run(gpu, &options(work, "f16,int4,int4c/int4,fp8,fp4", &[100, 256]));
        assert_eq!(report.rows.len(), 10, "{work}: {:?}", report.left_out);
        assert_eq!(report.roofs.is_empty(), work != Work::Decode);
        for row in &report.rows {
            assert_eq!(row.new_tokens, if work == Work::Decode { 1 } else { 48 });
            assert!(
                row.speed_up
                    .is_some_and(|factor| factor.is_finite() && factor > 0.0)
            );
            let figures = [row.seconds, row.gb_per_s, row.tokens_per_s, row.warm_up_seconds];
            assert!(
                figures.iter().all(|value| value.is_finite() && *value > 0.0),
                "{row:?}"
            );
            assert!(row.code_bytes > 0 && row.table_bytes > 0 && row.other_bytes > 0);
        }
        let bytes = |pair: &str, context| {
            let row = report
                .rows
                .iter()
                .find(|row| row.pair == pair && row.context == context);
            row.unwrap().code_bytes
        };
        assert_eq!(bytes("f16", 256), 4 * bytes("int4", 256), "{work}");
        if work == Work::Decode {
            // Batch 2, K and V, 2 heads of 32 channels, 2 bytes.
            assert_eq!(bytes("f16", 100), 2 * 100 * 2 * 64 * 2);
            // K: 96 tokens packed, 4 in f16.
            assert_eq!(
                bytes("int4c/int4", 100),
                2 * (96 * 32 + 4 * 128 + 100 * 32),
                "{work}"
            );
        }
    }
}

#[test]
fn what_does_not_fit_is_left_out_with_its_reason_and_nothing_left_is_an_error() {
    let Some(gpu) = common::gpu("what_does_not_fit_is_left_out") else {
        return;
    };
    let odd = BenchOptions {
        shape: Shape {
            q_heads: 1,
            kv_heads: 1,
            head_dim: 8,
        },
        ..options(Work::Decode, "fp4,int8", &[256])
    };
    let report = run(gpu, &odd);
    assert_eq!((report.rows.len(), report.left_out.len()), (1, 1));
    assert!(report.left_out[0].pair == "fp4" && report.left_out[0].reason.contains("multiple of 16"));
    assert!(report.rows[0].speed_up.is_none());
    let mut small = options(Work::Decode, "f16", &[4096]);
    small.sizes.memory = 1 << 20;
    let error = kvpack::bench::run(gpu, &small, &mut |_, _, _| ()).unwrap_err();
    assert!(matches!(error, Error::Usage { .. }), "{error}");
    let error = error.to_string();
    assert!(
        error.contains("more than the 1 MiB of memory allowed") && error.contains("f16"),
        "{error}"
    );
    for broken in [
        BenchOptions {
            contexts: vec![0],
            ..odd.clone()
        },
        BenchOptions {
            batch: 0,
            ..odd.clone()
        },
        BenchOptions {
            seconds: f64::NAN,
            ..odd.clone()
        },
        BenchOptions {
            pairs: Vec::new(),
            ..odd.clone()
        },
        BenchOptions { new_tokens: 0, ..odd },
    ] {
        let refused = kvpack::bench::run(gpu, &broken, &mut |_, _, _| ());
        assert!(matches!(refused, Err(Error::Usage { .. })), "{refused:?}");
    }
}

#[test]
fn each_read_kernel_reads_every_word_once_portable() {
    let Some(gpu) = common::gpu("each_read_kernel_reads_every_word_once") else {
        return;
    };
    // Odd numbers of vectors, of blocks and of loads of four.
    for bytes in [256, 1 << 12, (3 << 20) + 256 * 7] {
        let roof = Roof::new(gpu, bytes).unwrap();
        assert_eq!(roof.bytes(), bytes);
        let wanted = roof.words().unwrap().into_iter().fold(0, u32::wrapping_add);
        assert!(
            roof.sums().unwrap().into_iter().all(|sum| sum == wanted),
            "{bytes}"
        );
    }
}

#[test]
fn outputs_that_are_wrong_are_found_before_anything_is_timed() {
    let Some(gpu) = common::gpu("outputs_that_are_wrong_are_found") else {
        return;
    };
    let spec = CacheSpec::new(1, 4, 2, 32, "int4c/int8".parse().unwrap(), 4 << 20);
    let mut cache = KvCache::new(gpu, spec).unwrap();
    let id = cache.open();
    let mut random = Random::new(7);
    let mut rows = |count: usize| (0..count).map(|_| random.normal()).collect::<Vec<f32>>();
    let (k, v, q) = (rows(100 * 64), rows(100 * 64), rows(100 * 128));
    let [k, v, q_buffer] = [&k, &v, &q].map(|rows| gpu.upload("rows", rows).unwrap());
    let output = gpu.zeros("output", 100 * 128 * 4).unwrap();
    let step = cache.step(&[(id, 100)]).unwrap();
    gpu.submit("attention", |encoder| {
        step.append(encoder, 0, &k, &v)?;
        step.attend(encoder, 0, &q_buffer, &output, &AttentionOptions::default())
    })
    .unwrap();
    let output: Vec<f32> = gpu.read("output", &output, 100 * 128).unwrap();
    for (row, head) in [(0, 0), (63, 1), (99, 3)] {
        let place = Place { layer: 0, row, head };
        let at = (row * 128 + head * 32) as usize;
        let (q, mut got) = (&q[at..at + 32], output[at..at + 32].to_vec());
        let good = compare(gpu, &step, place, (q, &got), [0.0; 2], Arithmetic::F32).unwrap();
        assert_eq!((good.cases, good.failures), (32, 0), "{good:?}");
        got[17] += 1e-3;
        assert_eq!(
            compare(gpu, &step, place, (q, &got), [0.0; 2], Arithmetic::F32)
                .unwrap()
                .failures,
            1
        );
        got[3] = f32::NAN;
        assert_eq!(
            compare(gpu, &step, place, (q, &got), [0.0; 2], Arithmetic::F32)
                .unwrap()
                .failures,
            2
        );
    }
}

/// A small case of every pair; tests turn a measured variant into what a cache runs.
fn tune_options(pairs: &[&str], approximate: bool) -> TuneOptions {
    TuneOptions {
        work: Work::Decode,
        pairs: pairs.iter().map(|pair| pair.parse().unwrap()).collect(),
        shape: Shape {
            q_heads: 4,
            kv_heads: 2,
            head_dim: 32,
        },
        batch: 1,
        context: 200,
        new_tokens: 1,
        sizes: Sizes {
            cache_bytes: 1 << 10,
            memory: 16 << 20,
        },
        seconds: 0.001,
        approximate,
    }
}

#[test]
fn the_tuner_tries_each_number_and_keeps_what_is_checked() {
    let Some(gpu) = common::gpu("the_tuner_tries_each_number") else {
        return;
    };
    let mut heard = Vec::new();
    let report = tune(
        gpu,
        &tune_options(&["int8", "int4c/int4"], true),
        &mut |done, of, what| {
            heard.push((done, of, what.to_owned()));
        },
    )
    .unwrap();
    assert_eq!(report.rows.len(), 2);
    assert!(heard.iter().all(|&(done, of, _)| done <= of && of == 2));
    for row in &report.rows {
        let tried = |fits: &dyn Fn(&Variant) -> bool| row.trials.iter().any(|trial| fits(&trial.variant));
        assert_eq!(row.trials[0].variant, row.default);
        for (what, found) in [
            ("invocations", tried(&|v| v.workgroup != row.default.workgroup)),
            ("slots", tried(&|v| v.slot_quads != row.default.slot_quads)),
            (
                "channels",
                tried(&|v| v.channel_quads != row.default.channel_quads),
            ),
            ("heads", tried(&|v| v.head_tile == 1)),
            (
                "packed",
                tried(&|v| v.arithmetic == Arithmetic::Packed) == (row.pair == "int8"),
            ),
        ] {
            assert!(found, "{}: {what} in {:?}", row.pair, row.trials);
        }
        assert!(
            row.trials
                .iter()
                .all(|trial| trial.seconds.is_some() == trial.refused.is_empty())
        );
        assert!(row.best_seconds[1] <= row.default_seconds[1]);
    }
    // Exact ones alone, unless others are asked for; work without variants is refused.
    let exact = tune(gpu, &tune_options(&["int8"], false), &mut |_, _, _| ()).unwrap();
    let trials = &exact.rows[0].trials;
    assert!(
        trials
            .iter()
            .all(|trial| trial.variant.arithmetic == Arithmetic::F32)
    );
    let appends = TuneOptions {
        work: Work::Append,
        ..tune_options(&["int8"], false)
    };
    assert!(matches!(
        tune(gpu, &appends, &mut |_, _, _| ()),
        Err(Error::Usage { .. })
    ));
}

#[test]
fn a_cache_runs_the_variant_that_was_measured_for_its_shape_alone() {
    let Some(gpu) = common::gpu("a_cache_runs_the_variant_that_was_measured") else {
        return;
    };
    let spec = || CacheSpec::new(1, 4, 2, 32, "int8".parse().unwrap(), 4 << 20);
    let kind = SegmentKind {
        k_waits: false,
        v_waits: false,
        prefill: false,
    };
    let plain = KvCache::new(gpu, spec()).unwrap();
    let default = plain.variant(0, kind).unwrap();
    let variant = Variant {
        workgroup: 128,
        slot_quads: 1,
        arithmetic: Arithmetic::Packed,
        ..default
    };
    let [k, v] = &plain.book().geometry().classes[0].packed;
    let mut tuning = Tuning::default();
    tuning
        .insert(tuning::Shape::new([k, v], 2, false), variant)
        .unwrap();
    let tuned = gpu.clone().with_tuning(tuning.clone());
    assert_eq!(
        KvCache::new(&tuned, spec()).unwrap().variant(0, kind).unwrap(),
        variant
    );
    assert!(plain.variant(1, kind).is_err());
    // Not in prefill, nor with other heads.
    let prefill = SegmentKind {
        prefill: true,
        ..kind
    };
    let cache = KvCache::new(&tuned, spec()).unwrap();
    assert_eq!(
        cache.variant(0, prefill).unwrap(),
        plain.variant(0, prefill).unwrap()
    );
    let other = CacheSpec::new(1, 6, 2, 32, "int8".parse().unwrap(), 4 << 20);
    assert_eq!(
        KvCache::new(&tuned, other)
            .unwrap()
            .variant(0, kind)
            .unwrap()
            .arithmetic,
        Arithmetic::F32
    );

    // A row of the benchmark says so, and its outputs were checked for what they are.
    let rows = run(&tuned, &options(Work::Decode, "int4,int8", &[200])).rows;
    assert!(!rows[0].tuned && !rows[0].approximate, "{:?}", rows[0]);
    assert!(rows[1].tuned && rows[1].approximate, "{:?}", rows[1]);
    assert!(rows[1].variant.contains("128 invocations"), "{:?}", rows[1]);

    // What the device was made without is not run.
    let subgroups = Variant {
        reduction: Reduction::Subgroup,
        ..default
    };
    tuning
        .insert(tuning::Shape::new([k, v], 2, false), subgroups)
        .unwrap();
    let expected = match gpu.device().features().contains(subgroups.features()) {
        true => subgroups,
        false => default,
    };
    let tuned = gpu.clone().with_tuning(tuning.clone());
    assert_eq!(
        KvCache::new(&tuned, spec()).unwrap().variant(0, kind).unwrap(),
        expected
    );
    // What cannot be is refused when it is taken in.
    let never = Variant {
        workgroup: 12,
        ..default
    };
    assert!(
        tuning
            .insert(tuning::Shape::new([k, v], 2, false), never)
            .is_err()
    );
}

#[test]
fn less_exact_scores_have_a_bound_of_their_own_that_errors_pass() {
    let Some(gpu) = common::gpu("less_exact_scores_have_a_bound") else {
        return;
    };
    let spec = CacheSpec::new(1, 4, 2, 32, "int8".parse().unwrap(), 4 << 20);
    let mut tuning = Tuning::default();
    let plain = KvCache::new(gpu, spec.clone()).unwrap();
    let [k, v] = &plain.book().geometry().classes[0].packed;
    let packed = Variant {
        arithmetic: Arithmetic::Packed,
        ..Variant::new([k, v], 2, false, true)
    };
    tuning
        .insert(tuning::Shape::new([k, v], 2, false), packed)
        .unwrap();
    let mut cache = KvCache::new(&gpu.clone().with_tuning(tuning), spec).unwrap();
    let id = cache.open();
    let mut random = Random::new(7);
    let mut rows = |count: usize| (0..count).map(|_| random.normal()).collect::<Vec<f32>>();
    let (k, v, q) = (rows(100 * 64), rows(100 * 64), rows(128));
    let [k, v, q_buffer] = [&k, &v, &q].map(|rows| gpu.upload("rows", rows).unwrap());
    let output = gpu.zeros("output", 128 * 4).unwrap();
    let step = cache.step(&[(id, 99)]).unwrap();
    gpu.submit("append", |encoder| step.append(encoder, 0, &k, &v))
        .unwrap();
    step.commit().unwrap();
    let step = cache.step(&[(id, 1)]).unwrap();
    gpu.submit("attention", |encoder| {
        step.append(encoder, 0, &k, &v)?;
        step.attend(encoder, 0, &q_buffer, &output, &AttentionOptions::default())
    })
    .unwrap();
    let output: Vec<f32> = gpu.read("output", &output, 128).unwrap();
    let place = Place {
        layer: 0,
        row: 0,
        head: 1,
    };
    let judge = |got: &[f32], arithmetic| {
        compare(gpu, &step, place, (&q[32..64], got), [0.0; 2], arithmetic).unwrap()
    };
    let got = output[32..64].to_vec();
    // Not within f32's bound, but within its own, which an output of another head does not meet.
    assert!(judge(&got, Arithmetic::F32).failures > 0);
    let own = judge(&got, Arithmetic::Packed);
    assert_eq!((own.cases, own.failures), (32, 0), "{own:?}");
    assert!(judge(&output[..32], Arithmetic::Packed).failures > 16);
    assert!(judge(&output[..32], Arithmetic::F16).failures > 16);
}

#[test]
fn a_callers_device_without_timestamps_is_timed_by_the_wall_clock() {
    let Some(shared) = common::gpu("a_callers_device_without_timestamps") else {
        return;
    };
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::PRIMARY;
    let instance = wgpu::Instance::new(descriptor);
    let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::PRIMARY));
    let adapter = adapters
        .into_iter()
        .find(|adapter| adapter.get_info().name == shared.summary().name)
        .unwrap();
    let (device, queue) = pollster::block_on(adapter.request_device(&Default::default())).unwrap();
    let gpu = Gpu::from_device(device, queue);
    let report = run(&gpu, &options(Work::Decode, "int8", &[256]));
    let row = &report.rows[0];
    assert_eq!((row.clock, row.note.as_str()), (Clock::WallClock, ""));
    assert!(report.header.timing.starts_with("wall clock"));
    // Ours asks for them where the adapter has them.
    let opened = Gpu::open(&Selection::default()).unwrap();
    let has = adapter.features().contains(kvpack::gpu::TIMESTAMPS);
    assert_eq!(opened.device().features().contains(kvpack::gpu::TIMESTAMPS), has);
}

#[test]
fn the_assumed_cache_is_the_cpus_for_software_and_64_mib_for_a_gpu() {
    let Some(gpu) = common::gpu("the_assumed_cache") else {
        return;
    };
    let mut adapter = gpu.summary().clone();
    adapter.software = false;
    assert_eq!(assumed_cache(&adapter).0, 64 << 20);
    adapter.software = true;
    let (bytes, source) = assumed_cache(&adapter);
    assert!(bytes > 0 && !source.contains("GPU"), "{source}");
}
