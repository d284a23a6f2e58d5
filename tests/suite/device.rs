//! The device: limits, loss, errors that do not reach the caller's handler.

use kvpack::Error;
use kvpack::cache::{Book, CacheSpec, KvCache, LayerSpec, TensorScales};
use kvpack::drift::{Convention, Device, DriftOptions, Mode};
use kvpack::gpu::{Gpu, Selection, adapters};
use kvpack::options::{AttentionOptions, Reach};
use kvpack::spec::Side;
use kvpack::validate::Random;
use kvpack::wgpu;

use crate::common;

fn spec(pair: &str, pages: u32) -> CacheSpec {
    let spec = CacheSpec::new(1, 8, 8, 128, pair.parse().unwrap(), 0);
    CacheSpec { sequences: 4, ..spec }.with_pages(pages).unwrap()
}

#[test]
fn dev_07_the_device_has_the_adapters_own_buffer_limits() {
    let Some(gpu) = common::gpu("dev_07") else { return };
    let limits = gpu.device().limits();
    let of = |name: &str| {
        gpu.summary()
            .limits
            .iter()
            .find(|(known, _)| known == name)
            .unwrap()
            .1
    };
    assert_eq!(
        limits.max_storage_buffer_binding_size,
        of("maxStorageBufferBindingSize")
    );
    assert_eq!(limits.max_buffer_size, of("maxBufferSize"));
    // A pool of 640 MB, 5000 pages of 64 tokens of 2048 bytes: it lies in as many buffers as the limits demand.
    let bytes = 5000 * 64 * 2048_u64;
    let allowed = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
    let cache = KvCache::new(gpu, spec("f16", 5000)).unwrap();
    let pool = cache.book().pools().next().unwrap();
    assert_eq!(pool.per_buffer, 5000.min(allowed / (64 * 2048)) as u32);
    let buffers = 5000_u32.div_ceil(pool.per_buffer);
    let sizes = (0..buffers).map(|number| cache.book().buffer_bytes(pool.id, number));
    assert!(sizes.clone().all(|size| size <= allowed));
    assert_eq!(sizes.sum::<u64>(), bytes);
    assert_eq!(cache.allocated_bytes(), 0, "pages are made when they are needed");
}

#[test]
fn lng_03_the_largest_pool_fits_exactly() {
    // K alone, 8 heads x 128: 65,536 tokens of f16 fill a binding of 2^27 bytes; int8 with its scales does at 131,072
    // tokens less those scales. A page more goes into a second buffer.
    for (pair, page_bytes) in [("f16", 64 * 2048), ("int8", 64 * 1040)] {
        let fits = ((1 << 27) / page_bytes) as u32;
        for (pages, buffers) in [(fits, 1), (fits + 1, 2)] {
            let book = Book::new(spec(pair, pages), Some(1 << 27)).unwrap();
            let pool = book.pools().next().unwrap();
            assert_eq!(pool.layout.bytes(), page_bytes);
            assert_eq!(pages.div_ceil(pool.per_buffer), buffers, "{pair}");
        }
    }
    assert_eq!((1 << 27) / (64 * 2048) * 64, 65_536);
}

#[test]
fn dev_10_a_lost_device_is_an_error_and_gives_no_numbers() {
    if common::gpu("dev_10").is_none() {
        return;
    }
    // A device of its own: the shared one must live on.
    let gpu = Gpu::open(&Selection::default()).unwrap();
    let mut cache = KvCache::new(&gpu, spec("f16", 1)).unwrap();
    gpu.device().destroy();
    let status = cache.status().and_then(|status| gpu.block_on(status));
    let error = status.unwrap_err();
    assert!(matches!(error, Error::Device { .. }), "{error}");
    let sequence = cache.open();
    let failed = match cache.step(&[(sequence, 1)]) {
        Err(e) => e,
        Ok(_) => panic!("a step was planned on a lost device"),
    };
    assert!(matches!(failed, Error::Device { .. }), "{failed}");
    let options = DriftOptions {
        pairs: vec!["f16".parse().unwrap()],
        convention: Convention::Packed,
        mode: Mode::Prefill,
        outlier: 1.0,
        window: 0,
    };
    let result = kvpack::drift::run(&Device::Gpu(gpu), &options, &mut |_, _, _| ());
    assert!(result.is_err(), "a lost device gave figures: {result:?}");
}

#[test]
fn errors_do_not_reach_the_callers_handler() {
    let Some(shared) = common::gpu("errors_do_not_reach_the_callers_handler") else {
        return;
    };
    let gpu = Gpu::open(&Selection {
        adapter: Some(shared.summary().label.clone()),
        backend: None,
    })
    .unwrap();
    let heard = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let ear = heard.clone();
    gpu.device().on_uncaptured_error(std::sync::Arc::new(move |_| {
        ear.store(true, std::sync::atomic::Ordering::SeqCst)
    }));
    let caught = gpu.checked("a bad buffer", || {
        gpu.device().create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: u64::MAX / 4,
            usage: wgpu::BufferUsages::STORAGE,
            mapped_at_creation: false,
        })
    });
    assert!(matches!(caught, Err(Error::Device { .. })));
    // Nor do those of a step: a buffer that its owner has destroyed.
    let mut cache = KvCache::new(&gpu, spec("f16", 1)).unwrap();
    let id = cache.open();
    let [good, output, dead] =
        ["rows", "output", "dead"].map(|what| gpu.zeros(what, 2 * 8 * 128 * 4).unwrap());
    dead.destroy();
    let step = cache.step(&[(id, 2)]).unwrap();
    let refused =
        |result: kvpack::Result<()>| assert!(matches!(result, Err(Error::Device { .. })), "{result:?}");
    let encoder = || gpu.device().create_command_encoder(&Default::default());
    refused(step.append(&mut encoder(), 0, &good, &dead));
    refused(step.calibrate(&mut encoder(), 0, &dead, &good));
    let mut kept = encoder();
    step.append(&mut kept, 0, &good, &good).unwrap();
    refused(step.attend(&mut encoder(), 0, &dead, &output, &AttentionOptions::default()));
    step.commit().unwrap();
    gpu.queue().submit([kept.finish()]);
    assert!(!heard.load(std::sync::atomic::Ordering::SeqCst));
}

#[test]
fn adapters_are_named_uniquely_and_gpus_come_first() {
    if common::gpu("adapters_are_named_uniquely_and_gpus_come_first").is_none() {
        return;
    }
    let all = adapters(None);
    for (i, adapter) in all.iter().enumerate() {
        assert_eq!(adapter.index, i);
        assert_eq!(all.iter().filter(|other| other.label == adapter.label).count(), 1);
        assert!(
            all[..i]
                .iter()
                .all(|earlier| !earlier.software || adapter.software),
            "software before a GPU"
        );
    }
    let error = Gpu::open(&Selection {
        adapter: Some("no such adapter".into()),
        backend: None,
    })
    .unwrap_err();
    assert!(error.to_string().contains(&all[0].label), "{error}");
}

#[test]
fn dev_12_no_page_beyond_a_pool_is_ever_named() {
    // Shaders read what the host names: pages come from the books alone, and the books name no page that the pools lack.
    let layer = LayerSpec {
        window: [8, 0],
        sink_tokens: [0, 70],
        ..LayerSpec::new("int4c/int4".parse().unwrap())
    };
    let spec = CacheSpec {
        layers: vec![layer],
        ..spec("int4c/int4", 7)
    };
    // Buffers of three pages at most.
    let mut book = Book::new(spec.with_pages(7).unwrap(), Some(3 * 64 * 2048)).unwrap();
    let pages_of = |book: &Book, side, waiting, buffer: u32| {
        let pool = book
            .pools()
            .find(|pool| pool.id.side == side && pool.id.waiting == waiting);
        let pool = pool.unwrap();
        (book.buffer_bytes(pool.id, buffer) / pool.layout.bytes()) as u32
    };
    let mut random = Random::new(12);
    let mut open = Vec::new();
    let (mut planned, mut full) = (0, 0);
    for _ in 0..2000 {
        if open.is_empty() || (open.len() < 4 && random.below(4) == 0) {
            open.push(book.open());
        }
        let id = open[random.below(open.len() as u32) as usize];
        if random.below(5) == 0 {
            open.retain(|&other| other != id);
            book.free(id).unwrap();
            assert!(matches!(book.plan(&[(id, 1)], 1), Err(Error::UnknownSequence(_))));
            continue;
        }
        match book.plan(&[(id, random.below(90))], 4) {
            Ok(plan) => {
                let class = &plan.classes[0];
                for side in [0, 1] {
                    for round in &class.rounds[side] {
                        for (runs, waits) in
                            [(&round.direct, false), (&round.wait, true), (&round.pack, false)]
                        {
                            for (&[from, to], runs) in runs {
                                let pages = pages_of(&book, side, waits, to);
                                assert!(
                                    runs.iter()
                                        .all(|run| run.page < pages && run.slot + run.count <= 64)
                                );
                                let packs =
                                    std::ptr::eq(runs, round.pack.get(&[from, to]).unwrap_or(&Vec::new()));
                                let sources = if packs {
                                    pages_of(&book, side, true, from)
                                } else {
                                    u32::MAX
                                };
                                assert!(runs.iter().all(|run| run.source < sources));
                            }
                        }
                    }
                }
                for wave in plan.attention(0, Reach::default()).unwrap().waves {
                    for (segment, items) in wave.segments {
                        let kind = segment.kind;
                        let k_pages = pages_of(&book, 0, kind.k_waits, segment.buffers[0]);
                        let v_pages = pages_of(&book, 1, kind.v_waits, segment.buffers[1]);
                        for item in items {
                            let entries = item.table as usize..(item.table + item.pages) as usize;
                            assert!(class.table[entries].iter().all(|e| {
                                e.k_page < k_pages && e.v_page < v_pages && e.first < e.last && e.last <= 64
                            }));
                        }
                    }
                }
                book.commit(plan).unwrap();
                planned += 1;
            }
            Err(Error::CacheFull { missing, .. }) => {
                assert!(missing > 0);
                full += 1;
            }
            Err(e) => panic!("{e}"),
        }
    }
    assert!(planned > 500 && full > 50, "{planned} steps, {full} times full");
    // No page was lost on the way: the whole pool serves one sequence.
    open.into_iter().for_each(|id| book.free(id).unwrap());
    let id = book.open();
    book.plan(&[(id, 7 * 64)], 4).unwrap();
}

#[test]
fn plans_of_other_caches_and_plans_taken_back_are_refused() {
    let small = || Book::new(spec("int4", 4), None).unwrap();
    let (mut book, mut other) = (small(), small());
    let (a, stranger) = (book.open(), other.open());
    // A plan of another cache.
    let foreign = other.plan(&[(stranger, 5)], 1).unwrap();
    assert!(matches!(book.commit(foreign), Err(Error::Usage { .. })));
    // A plan taken back by a later one: only the last can be committed, and no page is lost.
    let first = book.plan(&[(a, 100)], 1).unwrap();
    let second = book.plan(&[(a, 200)], 1).unwrap();
    assert!(matches!(book.commit(first), Err(Error::Usage { .. })));
    book.commit(second).unwrap();
    assert_eq!(book.len(a).unwrap(), 200);
    // A plan taken back by freeing its sequence: the freed sequence stays freed.
    let late = book.plan(&[(a, 1)], 1).unwrap();
    book.free(a).unwrap();
    assert!(matches!(book.commit(late), Err(Error::Usage { .. })));
    let b = book.open();
    let whole = book.plan(&[(b, 4 * 64)], 1).unwrap();
    book.commit(whole).unwrap();
    assert!(book.pools().all(|pool| (pool.used, pool.free) == (4, 0)));
}

#[test]
fn steps_far_beyond_the_cache_are_refused_at_once() {
    let started = std::time::Instant::now();
    for pair in ["int4", "int4c"] {
        let mut book = Book::new(spec(pair, 1), None).unwrap();
        let id = book.open();
        let error = book.plan(&[(id, 1 << 31)], 0).unwrap_err();
        assert!(
            matches!(error, Error::CacheFull { missing, .. } if missing == (1 << 25) - 1),
            "{error}"
        );
    }
    assert!(
        started.elapsed().as_secs() < 2,
        "no list may grow before the pages are counted"
    );
}

#[test]
fn sizes_beyond_32_bits_are_refused_before_they_wrap() {
    // More query heads and splits than partials can be numbered: 1024 x 16 heads, 2^27 tokens in splits of 512.
    let heads = CacheSpec {
        sequences: 1,
        ..CacheSpec::new(1, 16_384, 1024, 8, "int2".parse().unwrap(), 0)
    };
    let mut book = Book::new(heads.with_pages(1 << 21).unwrap(), Some(1 << 30)).unwrap();
    let id = book.open();
    let plan = book.plan(&[(id, (1 << 27) - 1)], 1).unwrap();
    book.commit(plan).unwrap();
    let plan = book.plan(&[(id, 1)], 1).unwrap();
    let error = plan.attention(0, Reach::default()).unwrap_err();
    assert!(
        matches!(error, Error::Limit { needed, allowed, .. } if needed > allowed),
        "{error}"
    );
    // A page whose planes would wrap.
    let side = "int8c(8)"
        .parse::<Side>()
        .unwrap()
        .with_scale_type(kvpack::scales::ScaleType::F32);
    let error = kvpack::pages::PageLayout::new(side, 1024, 256, 4096).unwrap_err();
    assert!(error.to_string().contains("shorter pages"), "{error}");
}

#[test]
fn kernels_refuse_pages_that_they_do_not_serve() {
    use kvpack::kernels::quantize::{Quantize, Source};
    use kvpack::kernels::quantize_group::QuantizeGroup;
    use kvpack::kernels::tensor_scale::TensorScale;
    use kvpack::pages::PageLayout;
    let Some(gpu) = common::gpu("kernels_refuse_pages_that_they_do_not_serve") else {
        return;
    };
    let page = |name: &str, tokens| PageLayout::new(name.parse().unwrap(), 2, 8, tokens).unwrap();
    let (int4, grouped, f16) = (page("int4", 64), page("int4c", 64), page("f16", 64));
    let refused = [
        Quantize::plan(gpu, &grouped, &Source::F32).err(),
        Quantize::plan(gpu, &int4, &Source::Pages(page("f16", 32))).err(),
        Quantize::plan(gpu, &int4, &Source::Pages(page("int8", 64))).err(),
        QuantizeGroup::plan(gpu, &int4, &f16).err(),
        QuantizeGroup::plan(gpu, &grouped, &int4).err(),
        TensorScale::plan(gpu, kvpack::formats::Element::F16).err(),
    ];
    for (i, error) in refused.into_iter().enumerate() {
        assert!(matches!(error, Some(Error::Usage { .. })), "{i}: {error:?}");
    }
    let odd = Side {
        layout: kvpack::scales::ScaleLayout::PerChannel { group: 2 },
        ..grouped.side
    };
    assert!(PageLayout::new(odd, 2, 8, 64).is_err(), "a group of 2 tokens");
}

#[test]
fn buffers_that_kernels_cannot_bind_are_refused_on_the_host() {
    let Some(gpu) = common::gpu("buffers_that_kernels_cannot_bind_are_refused_on_the_host") else {
        return;
    };
    let mut cache = KvCache::new(gpu, spec("f16", 1)).unwrap();
    let id = cache.open();
    let bytes = 2 * 8 * 128 * 4;
    let good = gpu.zeros("rows", bytes).unwrap();
    let bad = gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: bytes,
        usage: wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let small = gpu.zeros("rows", bytes - 4).unwrap();
    let step = cache.step(&[(id, 2)]).unwrap();
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    assert!(matches!(
        step.append(&mut encoder, 0, &bad, &good),
        Err(Error::Usage { .. })
    ));
    assert!(matches!(
        step.append(&mut encoder, 0, &good, &small),
        Err(Error::Shape { what: "v bytes", .. })
    ));
    assert!(matches!(
        step.append(&mut encoder, 1, &good, &good),
        Err(Error::Shape { what: "layer", .. })
    ));
    assert!(matches!(
        step.attend(&mut encoder, 0, &small, &good, &AttentionOptions::default()),
        Err(Error::Shape { what: "q bytes", .. })
    ));
    step.append(&mut encoder, 0, &good, &good).unwrap();
    drop(step);
    assert!(cache.live_words(id, 1, 0).is_err() && cache.live_words(id, 0, 2).is_err());
    let given = TensorScales::Given(vec![[1.0; 2]; 2]);
    assert!(
        KvCache::new(
            gpu,
            CacheSpec {
                tensor_scales: given,
                ..spec("f16", 1)
            }
        )
        .is_err(),
        "scales of two layers"
    );
}
