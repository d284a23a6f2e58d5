//! The device: limits, loss, errors that do not reach the caller's handler.

use kvpack::Error;
use kvpack::cache::{Book, CacheSpec, KvCache, TensorScales};
use kvpack::drift::{Convention, Device, DriftOptions, Mode};
use kvpack::gpu::{Gpu, Selection, adapters};
use kvpack::options::AttentionOptions;
use kvpack::spec::Side;
use kvpack::validate::Random;
use kvpack::wgpu;

use crate::common;

fn spec(pages: u32) -> CacheSpec {
    CacheSpec {
        layers: 1,
        q_heads: 8,
        kv_heads: 8,
        k_head_dim: 128,
        v_head_dim: 128,
        pair: "f16".parse().unwrap(),
        page_tokens: 64,
        window: [0; 2],
        waiting: Side::F16,
        pages,
        tensor_scales: TensorScales::FromRows,
    }
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
    // A pool of 640 MB: 5000 pages of 64 tokens of 2048 bytes. It works or says how much is allowed.
    let bytes = 5000 * 64 * 2048_u64;
    match KvCache::new(gpu, spec(5000)) {
        Ok(cache) => assert_eq!(cache.allocated_bytes(), 2 * bytes),
        Err(Error::Limit { needed, allowed, .. }) => {
            assert_eq!(needed, bytes);
            assert!(
                allowed < bytes
                    && allowed == limits.max_storage_buffer_binding_size.min(limits.max_buffer_size)
            );
        }
        // An adapter that allows the binding may still be short of memory.
        Err(Error::Device { during, .. }) => assert!(during.contains("pages"), "{during}"),
        Err(e) => panic!("{e}"),
    }
}

#[test]
fn lng_03_the_largest_pool_fits_exactly() {
    let Some(gpu) = common::gpu("lng_03") else { return };
    let limits = gpu.device().limits();
    let allowed = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
    let pages = u32::try_from(allowed / (64 * 2048)).unwrap();
    let error = KvCache::new(gpu, spec(pages + 1)).unwrap_err();
    assert!(
        matches!(error, Error::Limit { needed, .. } if needed > allowed),
        "{error}"
    );
    if allowed <= 1 << 28 {
        KvCache::new(gpu, spec(pages)).unwrap();
    }
}

#[test]
fn dev_10_a_lost_device_is_an_error_and_gives_no_numbers() {
    if common::gpu("dev_10").is_none() {
        return;
    }
    // A device of its own: the shared one must live on.
    let gpu = Gpu::open(&Selection::default()).unwrap();
    let mut cache = KvCache::new(&gpu, spec(1)).unwrap();
    gpu.device().destroy();
    let error = cache.status().unwrap_err();
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
    let spec = CacheSpec {
        pair: "int4c/int4".parse().unwrap(),
        pages: 7,
        window: [8, 0],
        ..spec(7)
    };
    let mut book = Book::new(spec).unwrap();
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
                let runs = plan
                    .sides
                    .iter()
                    .flat_map(|s| s.direct.iter().chain(&s.wait).chain(&s.pack));
                assert!(runs.clone().all(|run| run.page < 7 && run.slot + run.count <= 64));
                assert!(
                    plan.table
                        .iter()
                        .all(|e| e.k_page < 7 && e.v_page < 7 && e.first < e.last && e.last <= 64)
                );
                let items = plan.attention.segments.values().flatten();
                assert!(
                    items
                        .clone()
                        .all(|item| (item.table + item.pages) as usize <= plan.table.len())
                );
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
    let small = || {
        Book::new(CacheSpec {
            pair: "int4".parse().unwrap(),
            ..spec(4)
        })
        .unwrap()
    };
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
    assert_eq!(book.pages_in_use().packed, [4, 4]);
}

#[test]
fn steps_far_beyond_the_cache_are_refused_at_once() {
    let started = std::time::Instant::now();
    for pair in ["int4", "int4c"] {
        let mut book = Book::new(CacheSpec {
            pair: pair.parse().unwrap(),
            ..spec(1)
        })
        .unwrap();
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
    // Partials: 1024 x 16 query heads, 12,000 tokens in splits of 512.
    let heads = CacheSpec {
        q_heads: 16_384,
        kv_heads: 1024,
        k_head_dim: 8,
        v_head_dim: 8,
        ..spec(400)
    };
    let mut book = Book::new(CacheSpec {
        pair: "int2".parse().unwrap(),
        ..heads.clone()
    })
    .unwrap();
    let id = book.open();
    let error = book.plan(&[(id, 20_000)], 1).unwrap_err();
    assert!(
        matches!(error, Error::Limit { needed, allowed, .. } if needed > allowed),
        "{error}"
    );
    // A pool of more than 2^32 words.
    let error = Book::new(CacheSpec {
        pages: 1 << 24,
        ..heads
    })
    .unwrap_err();
    assert!(error.to_string().contains("pool"), "{error}");
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
    let mut cache = KvCache::new(gpu, spec(1)).unwrap();
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
    let mut pass = encoder.begin_compute_pass(&Default::default());
    assert!(matches!(
        step.append(&mut pass, 0, &bad, &good),
        Err(Error::Usage { .. })
    ));
    assert!(matches!(
        step.append(&mut pass, 0, &good, &small),
        Err(Error::Shape { what: "v bytes", .. })
    ));
    assert!(matches!(
        step.append(&mut pass, 1, &good, &good),
        Err(Error::Shape { what: "layer", .. })
    ));
    assert!(matches!(
        step.attend(&mut pass, 0, &small, &good, &AttentionOptions::default()),
        Err(Error::Shape { what: "q bytes", .. })
    ));
    step.append(&mut pass, 0, &good, &good).unwrap();
    drop(pass);
    drop(step);
    assert!(cache.live_words(id, 1, 0).is_err() && cache.live_words(id, 0, 2).is_err());
    let given = TensorScales::Given(vec![[1.0; 2]; 2]);
    assert!(
        KvCache::new(
            gpu,
            CacheSpec {
                tensor_scales: given,
                ..spec(1)
            }
        )
        .is_err(),
        "scales of two layers"
    );
}
