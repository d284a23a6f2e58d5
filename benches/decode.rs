//! Decode with each cache format under Criterion: the cases of `kvpack bench`, timed by the same timer. On an adapter of
//! KVPACK_ADAPTER's name, else the best there is.
//!
//!   cargo bench --bench decode -- int4

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use kvpack::bench::timer::{Timer, settle};
use kvpack::bench::workload::Workload;
use kvpack::bench::{Case, Shape, Sizes, Work, assumed_cache, default_memory};
use kvpack::gpu::{Gpu, Selection};
use kvpack::spec::TABLE;

fn decode(criterion: &mut Criterion) {
    let selection = Selection {
        adapter: std::env::var("KVPACK_ADAPTER").ok(),
        backend: None,
    };
    let gpu = Gpu::open(&selection).unwrap_or_else(|e| panic!("{e}"));
    let timer = Timer::new(&gpu).unwrap();
    let sizes = Sizes {
        cache_bytes: assumed_cache(gpu.summary()).0,
        memory: default_memory(gpu.summary()),
    };
    let mut group = criterion.benchmark_group(format!("decode, {}", gpu.summary().label));
    group.sample_size(10);
    for context in [4096, 32_768] {
        for pair in TABLE {
            let case = Case {
                work: Work::Decode,
                pair: pair.parse().unwrap(),
                shape: "llama-3-8b".parse::<Shape>().unwrap(),
                batch: 1,
                context,
                new_tokens: 1,
            };
            group.bench_function(BenchmarkId::new(pair, context), |bencher| {
                // Here, so that a filter fills no cache that it leaves out.
                let mut workload = Workload::new(&gpu, &case, &sizes).unwrap();
                let layers = workload.layers();
                let pass =
                    |record: &mut dyn FnMut(&mut kvpack::wgpu::CommandEncoder) -> kvpack::Result<()>| {
                        bencher.iter_custom(|passes| {
                            let readings: Vec<_> =
                                (0..passes).map(|_| timer.read(&mut *record).unwrap()).collect();
                            let settled = settle(&readings, gpu.queue().get_timestamp_period());
                            Duration::from_secs_f64(settled.seconds.iter().sum::<f64>() / f64::from(layers))
                        });
                    };
                workload.timed(pass).unwrap();
            });
        }
    }
    group.finish();
}

criterion_group!(benches, decode);
criterion_main!(benches);
