//! The golden bits of `tests/golden`, which `tools/golden.py` computes from the written rules alone, against the CPU
//! library and the GPU.

use std::collections::BTreeMap;

use kvpack::formats::Element;
use kvpack::gpu::Gpu;
use kvpack::kernels::RowStrides;
use kvpack::kernels::dequantize::Dequantize;
use kvpack::kernels::quantize::{Buffers, Quantize, Source};
use kvpack::pages::PageLayout;
use kvpack::scales::{ScaleLayout, ScaleType};
use kvpack::spec::Side;
use kvpack::work::{SlotRun, Status, slot_runs};
use serde_json::Value;

use crate::bits::{Job, Outcome, Packed, Rows, given, poison, tensor_scales, unpack_on_gpu};
use crate::common::{gpu, json, path, python};

// ---- reading the files -------------------------------------------------------------------------------------------

/// Items of `digits` hexadecimal digits.
fn items(text: &Value, digits: usize) -> Vec<u32> {
    let text = text.as_str().unwrap();
    assert!(text.is_ascii() && text.len().is_multiple_of(digits));
    (0..text.len() / digits)
        .map(|i| u32::from_str_radix(&text[i * digits..][..digits], 16).unwrap())
        .collect()
}

fn number(value: &Value) -> u32 {
    u32::try_from(value.as_u64().unwrap()).unwrap()
}

fn element(name: &str) -> Element {
    match name {
        "e4m3" => Element::E4m3,
        "e2m1" => Element::E2m1,
        "int8" => Element::Int8,
        "int4" => Element::Int4,
        "int2" => Element::Int2,
        "f16" => Element::F16,
        _ => panic!("element {name}"),
    }
}

fn scale_type(name: &str) -> ScaleType {
    match name {
        "f16" => ScaleType::F16,
        "e4m3" => ScaleType::E4m3,
        "f32" | "none" => ScaleType::F32,
        _ => panic!("scale type {name}"),
    }
}

/// Hexadecimal digits of a code.
fn code_digits(element: Element) -> usize {
    (element.bits() as usize / 4).max(2)
}

/// The side whose codes need no scale of their own.
fn unscaled(element: Element) -> Side {
    if element == Element::F16 {
        Side::F16
    } else {
        given(element)
    }
}

/// What packing a list of numbers gave.
struct Coded {
    codes: Vec<u32>,
    /// 1 not finite, 2 saturated; the GPU counts them only.
    flags: Option<Vec<u32>>,
    status: Status,
}

fn total(flags: &[u32]) -> Status {
    let count = |flag| flags.iter().filter(|&&f| f == flag).count() as u32;
    Status {
        non_finite: count(1),
        saturated: count(2),
    }
}

fn coded_on_cpu(element: Element, numbers: &[u32], scale: impl Fn(usize) -> f32) -> Coded {
    let encoded: Vec<_> = (0..)
        .zip(numbers)
        .map(|(i, &x)| element.encode(f32::from_bits(x), scale(i)))
        .collect();
    let flags: Vec<u32> = encoded
        .iter()
        .map(|e| u32::from(e.non_finite) + 2 * u32::from(e.saturated))
        .collect();
    let codes = encoded.iter().map(|e| e.code).collect();
    Coded {
        codes,
        status: total(&flags),
        flags: Some(flags),
    }
}

fn compare_codes(outcome: &mut Outcome, what: &str, x: &[u32], codes: &[u32], flags: &[u32], got: &Coded) {
    outcome.words(codes, &got.codes, |i, bit| {
        format!("{what}: code of {:08x}, bit {bit}", x[i])
    });
    if let Some(got) = &got.flags {
        outcome.words(flags, got, |i, _| format!("{what}: flags of {:08x}", x[i]));
    }
    outcome.status(what, total(flags), got.status);
}

/// Codes of a list of numbers, each under a given scale, and their values: a dispatch for each scale.
fn coded_on_gpu(gpu: &Gpu, side: Side, numbers: &[u32], scales: &[u32]) -> (Coded, Vec<u32>) {
    const D: u32 = 8;
    let layout = PageLayout::new(side, 1, D, 8).unwrap();
    let mut places: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (i, &scale) in scales.iter().enumerate() {
        places.entry(scale).or_default().push(i);
    }
    // Rows of one scale each; where each number went.
    let mut rows: Vec<u32> = Vec::new();
    let mut at = vec![0; numbers.len()];
    let mut lists = Vec::new();
    for members in places.values() {
        let first = rows.len() as u32 / D;
        for &i in members {
            at[i] = rows.len();
            rows.push(numbers[i]);
        }
        rows.resize(rows.len().next_multiple_of(D as usize), 0);
        let (mut row, last, mut runs) = (first, rows.len() as u32 / D, Vec::new());
        while row < last {
            let end = (row / layout.tokens + 1) * layout.tokens;
            let (page, slot) = (row / layout.tokens, row % layout.tokens);
            let count = end.min(last) - row;
            slot_runs(page, slot, slot + count, |s| row + s - slot, &mut runs);
            row += count;
        }
        lists.push(runs);
    }
    let distinct: Vec<f32> = places.keys().map(|&bits| f32::from_bits(bits)).collect();
    let pool = (rows.len() as u32 / D).div_ceil(layout.tokens) * layout.words;
    let source = gpu.upload("source", &rows).unwrap();
    let tensor_scales = gpu.upload("tensor scales", &distinct).unwrap();
    let pages = gpu.upload("pages", &poison(pool as usize)).unwrap();
    let status = gpu.upload("status", &[0_u32; 2]).unwrap();
    let values = gpu.upload("values", &poison(rows.len())).unwrap();
    let pack = Quantize::plan(gpu, &layout, &Source::F32).unwrap();
    let unpack = Dequantize::plan(gpu, &layout).unwrap();
    gpu.submit("golden codes", |encoder| {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        for (tensor, list) in (0..).zip(&lists) {
            let runs = &gpu.upload("runs", list)?;
            let buffers = Buffers {
                source: &source,
                runs,
                tensor_scales: &tensor_scales,
                pages: &pages,
                status: &status,
            };
            let count = list.len() as u32;
            pack.encode(
                gpu,
                &mut pass,
                &buffers,
                count,
                RowStrides::dense(&layout),
                tensor,
            )?;
            unpack.encode(
                gpu,
                &mut pass,
                [&pages, runs, &tensor_scales, &values],
                count,
                tensor,
            )?;
        }
        Ok(())
    })
    .unwrap();
    let words: Vec<u32> = gpu.read("pages", &pages, pool as usize).unwrap();
    let values: Vec<u32> = gpu.read("values", &values, rows.len()).unwrap();
    let status: Vec<Status> = gpu.read("status", &status, 1).unwrap();
    let codes = at.iter().map(|&i| code(&layout, &words, i as u32)).collect();
    (
        Coded {
            codes,
            flags: None,
            status: status[0],
        },
        at.iter().map(|&i| values[i]).collect(),
    )
}

/// The code of number `i` of pages of one head that are filled row by row.
fn code(layout: &PageLayout, pool: &[u32], i: u32) -> u32 {
    let (row, channel) = (i / layout.head_dim, i % layout.head_dim);
    let (word, bit) = layout.code_at(row % layout.tokens, 0, channel);
    let word = row / layout.tokens * layout.words + word;
    pool[word as usize] >> bit & u32::MAX >> (32 - layout.side.element.bits())
}

// ---- elements.json -----------------------------------------------------------------------------------------------

/// Every NaN as one.
fn canonical(bits: u32) -> u32 {
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        0x7fc0_0000
    } else {
        bits
    }
}

fn elements(golden: &Value, decode: impl Fn(Element) -> Vec<u32>) -> Outcome {
    let mut outcome = Outcome::default();
    for (name, values) in golden.as_object().unwrap() {
        let element = element(name);
        let expected: Vec<u32> = items(values, 8).into_iter().map(canonical).collect();
        let got: Vec<u32> = decode(element).into_iter().map(canonical).collect();
        outcome.words(&expected, &got, |code, bit| {
            format!("{name}: value of code {code:02x}, bit {bit}")
        });
    }
    outcome
}

fn decoded_on_cpu(element: Element) -> Vec<u32> {
    (0..1 << element.bits())
        .map(|code| element.decode(code).to_bits())
        .collect()
}

fn decoded_on_gpu(gpu: &Gpu, element: Element) -> Vec<u32> {
    let layout = PageLayout::new(unscaled(element), 1, 8, 8).unwrap();
    let codes = 1_u32 << element.bits();
    let pages = codes.div_ceil(64);
    let mut pool = vec![0; (pages * layout.words) as usize];
    let mut runs = Vec::new();
    for page in 0..pages {
        slot_runs(page, 0, 8, |slot| page * 8 + slot, &mut runs);
    }
    for code in 0..codes {
        let (row, channel) = (code / 8, code % 8);
        let (word, bit) = layout.code_at(row % 8, 0, channel);
        pool[(row / 8 * layout.words + word) as usize] |= code << bit;
    }
    let mut rows = unpack_on_gpu(gpu, &layout, &pool, &runs, 1.0);
    rows.truncate(codes as usize);
    rows
}

// ---- rounding.json -----------------------------------------------------------------------------------------------

fn rounding(golden: &Value, encode: impl Fn(Element, &[u32]) -> Coded) -> Outcome {
    let mut outcome = Outcome::default();
    for (name, case) in golden.as_object().unwrap() {
        let element = element(name);
        let (x, codes) = (items(&case["x"], 8), items(&case["code"], code_digits(element)));
        compare_codes(
            &mut outcome,
            name,
            &x,
            &codes,
            &items(&case["flags"], 1),
            &encode(element, &x),
        );
    }
    // Every midpoint of f16 with its neighbours, both signs.
    let ties = items(&golden["f16"]["tie"], 4);
    for sign in [0, 1] {
        let mut x = Vec::new();
        let mut codes = Vec::new();
        for (c, &tie) in (0..).zip(&ties) {
            let value = |code| f64::from(Element::F16.decode(code));
            let middle = ((value(c) + value(c + 1)) / 2.0) as f32;
            x.extend([middle.next_down(), middle, middle.next_up()].map(|x| x.to_bits() | sign << 31));
            codes.extend([c, tie, c + 1].map(|code| code | sign << 15));
        }
        let none = vec![0; x.len()];
        compare_codes(
            &mut outcome,
            "f16 midpoints",
            &x,
            &codes,
            &none,
            &encode(Element::F16, &x),
        );
    }
    outcome
}

fn rounded_on_gpu(gpu: &Gpu, element: Element, x: &[u32]) -> Coded {
    coded_on_gpu(gpu, unscaled(element), x, &vec![1.0_f32.to_bits(); x.len()]).0
}

// ---- scales.json -------------------------------------------------------------------------------------------------

/// What making scales gave: the bits, and which were clamped (the GPU counts them only).
struct Scales {
    bits: Vec<u32>,
    clamped: Option<Vec<u32>>,
}

fn scales(golden: &Value, make: impl Fn(u32, ScaleType, &[u32]) -> Scales) -> Outcome {
    let mut outcome = Outcome::default();
    for case in golden.as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let scale = scale_type(case["scale"].as_str().unwrap());
        let amax = items(&case["amax"], 8);
        let got = make(number(&case["divisor"]), scale, &amax);
        let expected = items(&case["bits"], scale.bits() as usize / 4);
        outcome.words(&expected, &got.bits, |i, bit| {
            format!("{name}: scale for {:08x}, bit {bit}", amax[i])
        });
        if let Some(clamped) = got.clamped {
            outcome.words(&items(&case["clamped"], 1), &clamped, |i, _| {
                format!("{name}: clamp of {:08x}", amax[i])
            });
        }
    }
    outcome
}

fn scales_on_cpu(divisor: u32, scale: ScaleType, amax: &[u32]) -> Scales {
    let made: Vec<_> = amax
        .iter()
        .map(|&a| scale.from_amax(f32::from_bits(a), divisor as f32))
        .collect();
    Scales {
        bits: made.iter().map(|s| s.bits).collect(),
        clamped: Some(made.iter().map(|s| u32::from(s.clamped)).collect()),
    }
}

/// The named side with that divisor.
fn side_of(divisor: u32, scale: ScaleType) -> Side {
    let name = match divisor {
        127 => "int8",
        7 => "int4",
        1 => "int2",
        6 => "fp4",
        448 => "fp8",
        _ => panic!("divisor {divisor}"),
    };
    name.parse::<Side>().unwrap().with_scale_type(scale)
}

/// Rows of one group each, whose first numbers are given: a job that packs them, page after page.
fn grouped(side: Side, rows: &[Vec<u32>]) -> Job {
    let layout = PageLayout::new(side, 1, 16, 8).unwrap();
    let numbers = rows
        .iter()
        .flat_map(|row| (0..16).map(|c| row.get(c).copied().unwrap_or(0)))
        .collect();
    let mut runs = Vec::new();
    let pages = (rows.len() as u32).div_ceil(8);
    for page in 0..pages {
        slot_runs(
            page,
            0,
            8.min(rows.len() as u32 - 8 * page),
            |slot| page * 8 + slot,
            &mut runs,
        );
    }
    Job {
        layout,
        rows: Rows::F32(numbers, RowStrides::dense(&layout)),
        runs,
        tensor_scale: 1.0,
        pages,
    }
}

/// The scale bits of each row of [`grouped`].
fn group_scales(layout: &PageLayout, pool: &[u32], rows: usize) -> Vec<u32> {
    let mask = u32::MAX >> (32 - layout.side.scale.bits());
    (0..rows as u32)
        .map(|row| {
            let (word, bit) = layout.scale_at(row % 8, 0, 0).unwrap();
            pool[(row / 8 * layout.words + word) as usize] >> bit & mask
        })
        .collect()
}

fn scales_on_gpu(gpu: &Gpu, divisor: u32, scale: ScaleType, amax: &[u32]) -> Scales {
    let side = side_of(divisor, scale);
    if side.layout == ScaleLayout::PerTensor {
        return Scales {
            bits: tensor_scales(gpu, side.element, amax),
            clamped: None,
        };
    }
    let rows: Vec<Vec<u32>> = amax.iter().map(|&a| vec![0, a | 0x8000_0000, a]).collect();
    let job = grouped(side, &rows);
    let (packed, _) = job.on_gpu(gpu).unwrap();
    // The counters: clamps and what saturated under a clamped scale.
    assert_eq!(packed.status, job.on_cpu().status, "{side}");
    Scales {
        bits: group_scales(&job.layout, &packed.words, amax.len()),
        clamped: None,
    }
}

// ---- codes.json --------------------------------------------------------------------------------------------------

/// Codes and the bits of their values.
type CodesAndValues = (Coded, Vec<u32>);

/// `pack` gets the element, the numbers and the values of the scales.
fn codes(golden: &Value, pack: impl Fn(Element, &[u32], &[u32]) -> CodesAndValues) -> Outcome {
    let mut outcome = Outcome::default();
    for case in golden.as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let (element, s) = (element(case["element"].as_str().unwrap()), case_scales(case));
        let x = items(&case["x"], 8);
        let values: Vec<u32> = s.iter().map(|s| s.1.to_bits()).collect();
        let (got, got_values) = pack(element, &x, &values);
        let (codes, flags) = (
            items(&case["code"], code_digits(element)),
            items(&case["flags"], 1),
        );
        compare_codes(&mut outcome, name, &x, &codes, &flags, &got);
        outcome.words(&items(&case["value"], 8), &got_values, |i, bit| {
            format!(
                "{name}: value of {:08x} under scale {:x}, bit {bit}",
                x[i], s[i].0
            )
        });
    }
    outcome
}

/// The stored scales of a case: bits and values.
fn case_scales(case: &Value) -> Vec<(u32, f32)> {
    let scale = scale_type(case["scale"].as_str().unwrap());
    items(&case["s"], scale.bits() as usize / 4)
        .into_iter()
        .map(|bits| (bits, scale.decode(bits)))
        .collect()
}

fn coded_and_valued_on_cpu(element: Element, x: &[u32], s: &[u32]) -> CodesAndValues {
    let got = coded_on_cpu(element, x, |i| f32::from_bits(s[i]));
    let values = got
        .codes
        .iter()
        .zip(s)
        .map(|(&code, &s)| (element.decode(code) * f32::from_bits(s)).to_bits())
        .collect();
    (got, values)
}

/// The cases whose scale is the one that a group with an exact largest number gets: the number and that largest one,
/// packed by the side that stores such scales. Returns the cases that could be reached.
fn derived_codes(gpu: &Gpu, golden: &Value) -> (Outcome, usize) {
    let (mut outcome, mut reached) = (Outcome::default(), 0);
    for case in golden.as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let element = element(case["element"].as_str().unwrap());
        if element == Element::E4m3 {
            continue;
        }
        let side = side_of(
            element.info().max as u32,
            scale_type(case["scale"].as_str().unwrap()),
        );
        let (x, s) = (items(&case["x"], 8), case_scales(case));
        let codes = items(&case["code"], code_digits(element));
        let fits: Vec<(usize, u32)> = (0..x.len())
            .filter_map(|i| {
                let largest = f64::from(element.info().max) * f64::from(s[i].1);
                let exact = largest > 0.0 && f64::from(largest as f32) == largest;
                let magnitude = f32::from_bits(x[i]).abs();
                let below = !magnitude.is_finite() || f64::from(magnitude) <= largest;
                (exact && below).then_some((i, (largest as f32).to_bits()))
            })
            .collect();
        let job = grouped(
            side,
            &fits
                .iter()
                .map(|&(i, largest)| vec![x[i], largest])
                .collect::<Vec<_>>(),
        );
        let (packed, _) = job.on_gpu(gpu).unwrap();
        let scales = group_scales(&job.layout, &packed.words, fits.len());
        for (row, &(i, _)) in fits.iter().enumerate() {
            outcome.item(s[i].0, scales[row], |bit| {
                format!("{name}: scale {:x}, bit {bit}", s[i].0)
            });
            let got = code(&job.layout, &packed.words, row as u32 * 16);
            outcome.item(codes[i], got, |bit| {
                format!("{name}: code of {:08x}, bit {bit}", x[i])
            });
        }
        reached += fits.len();
    }
    (outcome, reached)
}

// ---- pages -------------------------------------------------------------------------------------------------------

/// What packing a file's rows gave: the pool of packed pages, the pool of f16 pages, the counters.
struct Cache {
    layout: PageLayout,
    waiting: PageLayout,
    packed: Vec<u32>,
    open: Vec<u32>,
    status: Status,
}

/// Every page file, by name.
fn page_files() -> Vec<(String, Value)> {
    let mut names: Vec<_> = std::fs::read_dir(path("tests/golden/pages"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(names.len() >= 40, "{}", names.len());
    names
        .into_iter()
        .map(|name| (name.clone(), json(&format!("tests/golden/pages/{name}"))))
        .collect()
}

fn side_of_pages(case: &Value) -> Side {
    let (name, group) = (case["side"].as_str().unwrap(), number(&case["group"]));
    let name = if group > 1 {
        format!("{name}({group})")
    } else {
        name.to_owned()
    };
    let side: Side = name.parse().unwrap();
    side.with_scale_type(scale_type(case["scale"].as_str().unwrap()))
}

/// Packs a file's rows the way a cache does: through f16 pages where the side waits.
fn fill_cache(case: &Value, run: impl Fn(&Job) -> Packed) -> Cache {
    let at = |key: &str| number(&case[key]);
    let (heads, head_dim, tokens, p) = (at("heads"), at("head_dim"), at("page_tokens"), at("page_tokens"));
    let layout = PageLayout::new(side_of_pages(case), heads, head_dim, tokens).unwrap();
    let waiting = PageLayout::new(Side::F16, heads, head_dim, tokens).unwrap();
    let pages = at("tokens").div_ceil(p);
    let rows = Rows::F32(items(&case["rows"], 8), RowStrides::dense(&layout));
    let runs = |end: u32, source: &dyn Fn(u32) -> u32| {
        let mut runs = Vec::new();
        for first in (0..end).step_by(p as usize) {
            slot_runs(
                first / p,
                0,
                p.min(end - first),
                |slot| source(first + slot),
                &mut runs,
            );
        }
        runs
    };
    let waits = at("f16_first") == 1;
    assert_eq!(layout.side.waits(at("window")), waits);
    let scale = case["tensor_scale"].as_str().unwrap();
    let tensor_scale = if scale.is_empty() {
        1.0
    } else {
        f32::from_bits(items(&case["tensor_scale"], 8)[0])
    };
    if !waits {
        let runs = runs(at("packed"), &|token| token);
        let got = run(&Job {
            layout,
            rows,
            runs,
            tensor_scale,
            pages,
        });
        return Cache {
            layout,
            waiting,
            packed: got.words,
            open: Vec::new(),
            status: got.status,
        };
    }
    let first = Job {
        layout: waiting,
        rows,
        runs: runs(at("tokens"), &|token| token),
        tensor_scale: 1.0,
        pages,
    };
    let entered = run(&first);
    let group = layout.side.layout.token_group();
    let second = match group {
        1 => runs(at("packed"), &|token| token / p),
        _ => (0..at("packed"))
            .step_by(group as usize)
            .map(|t| SlotRun {
                page: t / p,
                slot: t % p,
                count: group,
                source: t / p,
            })
            .collect(),
    };
    let waiting_words = entered.words[..(pages * waiting.words) as usize].to_vec();
    let got = run(&Job {
        layout,
        rows: Rows::Pages(waiting, waiting_words.clone()),
        runs: second,
        tensor_scale,
        pages,
    });
    let status = Status {
        non_finite: entered.status.non_finite + got.status.non_finite,
        saturated: entered.status.saturated + got.status.saturated,
    };
    Cache {
        layout,
        waiting,
        packed: got.words,
        open: waiting_words,
        status,
    }
}

/// A file against what was packed: geometry, every word of every page, the counters.
fn pages(name: &str, case: &Value, got: &Cache) -> Outcome {
    let mut outcome = Outcome::default();
    let at = |key: &str| number(&case[key]);
    geometry(&mut outcome, name, &got.layout, &case["planes"], at("page_bytes"));
    geometry(
        &mut outcome,
        name,
        &got.waiting,
        &case["open_planes"],
        at("open_page_bytes"),
    );
    let (p, packed, tokens) = (at("page_tokens"), at("packed"), at("tokens"));
    let mut compare = |what: &str, layout: &PageLayout, pool: &[u32], from: u32, to: u32, golden: &Value| {
        let golden = golden.as_array().unwrap();
        let wanted: Vec<u32> = (from / p..to.div_ceil(p)).filter(|_| from < to).collect();
        let listed: Vec<u32> = golden.iter().map(|page| number(&page["page"])).collect();
        outcome.words(&wanted, &listed, |i, _| {
            format!("{name}: {what} page {i} of the list")
        });
        for page in golden {
            let index = number(&page["page"]);
            let words = &pool[(index * layout.words) as usize..][..layout.words as usize];
            let first = index * p;
            let live = layout.live_words(words, from.max(first) - first, to.min(first + p) - first);
            outcome.words(&items(&page["words"], 8), &live, |word, bit| {
                format!("{name}: {what} page {index}, word {word}, bit {bit}")
            });
        }
    };
    compare("packed", &got.layout, &got.packed, 0, packed, &case["pages"]);
    compare(
        "open",
        &got.waiting,
        &got.open,
        packed,
        tokens,
        &case["open_pages"],
    );
    let status = Status {
        non_finite: at("nonfinite"),
        saturated: at("saturated"),
    };
    outcome.status(name, status, got.status);
    outcome
}

fn geometry(outcome: &mut Outcome, name: &str, layout: &PageLayout, planes: &Value, bytes: u32) {
    let at = |plane: usize, key: &str| number(&planes[plane][key]);
    let scales = (layout.words - layout.scale_offset) * 4;
    for (what, expected, ours) in [
        ("code plane's offset", at(0, "offset"), 0),
        ("code plane", at(0, "bytes"), layout.scale_offset * 4),
        (
            "code plane without padding",
            at(0, "bytes") - at(0, "padding"),
            layout.code_bytes() as u32,
        ),
        ("scale plane's offset", at(1, "offset"), layout.scale_offset * 4),
        ("scale plane", at(1, "bytes"), scales),
        (
            "scale plane without padding",
            at(1, "bytes") - at(1, "padding"),
            layout.scale_bytes() as u32,
        ),
        ("page", bytes, layout.bytes() as u32),
    ] {
        outcome.item(expected, ours, |_| format!("{name}: {what} of {}", layout.side));
    }
}

// ---- tests -------------------------------------------------------------------------------------------------------

#[test]
fn the_files_are_what_their_program_computes() {
    let (code, text) = python("tools/golden.py", "--check");
    assert!(code == 0 && text.ends_with("identical\n"), "{text}");
}

#[test]
fn cpu_elements() {
    elements(&json("tests/golden/elements.json"), decoded_on_cpu).pass();
}

#[test]
fn cpu_rounding() {
    rounding(&json("tests/golden/rounding.json"), |element, x| {
        coded_on_cpu(element, x, |_| 1.0)
    })
    .pass();
}

#[test]
fn cpu_scales() {
    scales(&json("tests/golden/scales.json"), scales_on_cpu).pass();
}

#[test]
fn cpu_codes() {
    codes(&json("tests/golden/codes.json"), coded_and_valued_on_cpu).pass();
}

#[test]
fn cpu_pages() {
    for (name, case) in page_files() {
        pages(&name, &case, &fill_cache(&case, Job::on_cpu)).pass();
    }
}

/// The GPU against the same files.
mod portable {
    use super::*;

    #[test]
    fn gpu_elements() {
        let Some(gpu) = gpu("golden elements") else { return };
        elements(&json("tests/golden/elements.json"), |element| {
            decoded_on_gpu(gpu, element)
        })
        .pass();
    }

    #[test]
    fn gpu_rounding() {
        let Some(gpu) = gpu("golden rounding") else { return };
        rounding(&json("tests/golden/rounding.json"), |element, x| {
            rounded_on_gpu(gpu, element, x)
        })
        .pass();
    }

    #[test]
    fn gpu_scales() {
        let Some(gpu) = gpu("golden scales") else { return };
        let make = |divisor, scale, amax: &[u32]| scales_on_gpu(gpu, divisor, scale, amax);
        scales(&json("tests/golden/scales.json"), make).pass();
    }

    #[test]
    fn gpu_codes_under_given_scales() {
        let Some(gpu) = gpu("golden codes") else { return };
        let pack = |element, x: &[u32], s: &[u32]| coded_on_gpu(gpu, given(element), x, s);
        codes(&json("tests/golden/codes.json"), pack).pass();
    }

    #[test]
    fn gpu_codes_under_scales_of_their_group() {
        let Some(gpu) = gpu("golden codes") else { return };
        let (outcome, reached) = derived_codes(gpu, &json("tests/golden/codes.json"));
        outcome.pass();
        assert!(reached > 5_000, "{reached}");
    }

    #[test]
    fn gpu_pages() {
        let Some(gpu) = gpu("golden pages") else { return };
        for (name, case) in page_files() {
            pages(&name, &case, &fill_cache(&case, |job| job.on_gpu(gpu).unwrap().0)).pass();
        }
    }
}

/// Flips the lowest bit of the last hexadecimal digit of a string.
fn flip(value: &mut Value) {
    let text = value.as_str().unwrap();
    let (rest, last) = text.split_at(text.len() - 1);
    let digit = u32::from_str_radix(last, 16).unwrap() ^ 1;
    *value = format!("{rest}{digit:x}").into();
}

#[track_caller]
fn reports_one(outcome: &Outcome, place: &str) {
    assert_eq!(outcome.mismatches, 1, "{outcome:?}");
    let first = outcome.first.as_deref().unwrap();
    assert!(first.contains(place), "{first}");
}

#[test]
fn every_comparison_reports_one_flipped_bit() {
    let mut golden = json("tests/golden/elements.json");
    flip(&mut golden["int4"]);
    reports_one(
        &elements(&golden, decoded_on_cpu),
        "int4: value of code 0f, bit 0",
    );

    let round = |element, x: &[u32]| coded_on_cpu(element, x, |_| 1.0);
    let mut golden = json("tests/golden/rounding.json");
    flip(&mut golden["e2m1"]["code"]);
    reports_one(&rounding(&golden, round), "e2m1: code of ffffffff");
    let mut golden = json("tests/golden/rounding.json");
    flip(&mut golden["f16"]["tie"]);
    // Once for each sign.
    assert_eq!(rounding(&golden, round).mismatches, 2);
    let mut golden = json("tests/golden/rounding.json");
    flip(&mut golden["int8"]["flags"]);
    // The flag itself and the count.
    assert_eq!(rounding(&golden, round).mismatches, 2);

    for (key, place) in [("bits", "int8_f16: scale for"), ("clamped", "int8_f16: clamp of")] {
        let mut golden = json("tests/golden/scales.json");
        flip(&mut golden[0][key]);
        reports_one(&scales(&golden, scales_on_cpu), place);
    }
    for (key, place) in [("code", "int8_f16: code of"), ("value", "int8_f16: value of")] {
        let mut golden = json("tests/golden/codes.json");
        flip(&mut golden[0][key]);
        reports_one(&codes(&golden, coded_and_valued_on_cpu), place);
    }

    let name = "int4c32_2x8_window.json";
    let case = json(&format!("tests/golden/pages/{name}"));
    let got = fill_cache(&case, Job::on_cpu);
    pages(name, &case, &got).pass();
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut case = case.clone();
        change(&mut case);
        pages(name, &case, &got)
    };
    reports_one(
        &changed(&|case| flip(&mut case["pages"][0]["words"])),
        "packed page 0, word 143, bit 0",
    );
    reports_one(
        &changed(&|case| flip(&mut case["open_pages"][0]["words"])),
        "open page 1, word 511, bit 0",
    );
    reports_one(&changed(&|case| case["page_bytes"] = 592.into()), "page of int4c");
    reports_one(
        &changed(&|case| case["planes"][1]["offset"] = 528.into()),
        "scale plane's offset",
    );
    reports_one(
        &changed(&|case| case["saturated"] = 19.into()),
        "count of saturations",
    );
    reports_one(
        &changed(&|case| case["nonfinite"] = 41.into()),
        "count of non-finite",
    );
    assert!(changed(&|case| case["pages"] = Value::Array(Vec::new())).mismatches > 0);
}
