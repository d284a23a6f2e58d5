//! Capacity: what the cache of a model takes in memory by format, and what fits a budget. Computed from the page
//! geometries that a real cache has; no model is read and no GPU asked.

#[cfg(any(feature = "cli", feature = "models"))]
pub mod config;

use crate::cache::{CacheSpec, Geometry, LayerSpec, MAX_LAYERS, MAX_SEQUENCES, MAX_TOKENS, TensorScales};
use crate::error::{Error, Result};
use crate::spec::{Pair, Side};

/// What a model asks of its cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelShape {
    /// Layers, all of which keep all tokens.
    pub layers: u32,
    /// Query heads: they take no memory, but not every number of them can be served.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Channels of a key head.
    pub k_head_dim: u32,
    /// Channels of a value head.
    pub v_head_dim: u32,
}

/// What to compute.
#[derive(Debug, Clone)]
pub struct CapacityOptions {
    /// The model.
    pub shape: ModelShape,
    /// The pairs, in the order of the report.
    pub pairs: Vec<Pair>,
    /// Tokens of each sequence.
    pub context: u32,
    /// Sequences.
    pub batch: u32,
    /// Recent tokens R of K and of V that stay in f16.
    pub window: u32,
    /// First tokens S of a sequence whose K and V stay in f16.
    pub sink_tokens: u32,
    /// Tokens of a page; none for the default of each pair.
    pub page_tokens: Option<u32>,
    /// Bytes that all pages together may take, to say what fits them.
    pub budget: Option<u64>,
}

/// One pair's memory. Bytes are of all layers, K and V.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct CapacityRow {
    /// The pair's name.
    pub pair: String,
    /// True cost of one number in bits, scales included.
    pub bits_per_number: f64,
    /// Bytes of one packed token: a packed page over its tokens.
    pub bytes_per_token: f64,
    /// Bytes of one packed page of each: the sum of the three parts that follow.
    pub page_bytes: u64,
    /// Of these, codes.
    pub page_code_bytes: u64,
    /// Of these, scales.
    pub page_scale_bytes: u64,
    /// Of these, ends of head words and of planes.
    pub page_padding_bytes: u64,
    /// Pages in full precision for one sequence's waiting and sink tokens, at most.
    pub sequence_bytes: u64,
    /// Pages in full precision through which long steps go, once for all sequences, at most.
    pub staging_bytes: u64,
    /// Packed pages of each for the whole batch.
    pub pages: u64,
    /// The budget that serves the batch at this context.
    pub total_bytes: u64,
    /// The same as a share of what f16 takes.
    pub percent_of_f16: f64,
    /// The budget that was given.
    pub budget_bytes: Option<u64>,
    /// The longest context of each sequence of the batch that fits it, in whole pages.
    pub longest_context: Option<u64>,
    /// The most sequences of this context that fit it, up to 65536.
    pub largest_batch: Option<u64>,
    /// Layers.
    pub layers: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Channels of a key head.
    pub k_head_dim: u32,
    /// Channels of a value head.
    pub v_head_dim: u32,
    /// Tokens of each sequence.
    pub context: u32,
    /// Sequences.
    pub batch: u32,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Recent window R.
    pub window: u32,
    /// Sink tokens S.
    pub sink_tokens: u32,
}

/// The rows, and the pairs that no cache of this shape and size can have, each with the reason.
#[derive(Debug)]
pub struct Capacity {
    /// A row for each pair that fits.
    pub rows: Vec<CapacityRow>,
    /// The others.
    pub left_out: Vec<(Pair, Error)>,
}

/// Computes the row of every pair.
///
/// # Errors
/// [`Error::Usage`] without pairs; [`Error::Shape`] for a number of layers or a context that no cache has, and the first
/// pair's reason where no pair fits.
pub fn run(options: &CapacityOptions) -> Result<Capacity> {
    let ModelShape { layers, .. } = options.shape;
    // Before a list of so many layers is made.
    if layers == 0 || layers > MAX_LAYERS {
        let limit = format!("1 to {MAX_LAYERS} layers");
        return refuse(
            "layers",
            u64::from(layers),
            limit,
            "check the model's configuration",
        );
    }
    if options.context == 0 || options.context > MAX_TOKENS {
        let limit = format!("a sequence holds 1 to {MAX_TOKENS} tokens");
        return refuse(
            "context",
            u64::from(options.context),
            limit,
            "choose another context",
        );
    }
    let mut capacity = Capacity {
        rows: Vec::new(),
        left_out: Vec::new(),
    };
    for &pair in &options.pairs {
        let geometry = spec(options, pair).geometry();
        match geometry.and_then(|geometry| row(options, pair, &geometry)) {
            Ok(row) => capacity.rows.push(row),
            Err(error) => capacity.left_out.push((pair, error)),
        }
    }
    if !capacity.rows.is_empty() {
        return Ok(capacity);
    }
    Err(match capacity.left_out.into_iter().next() {
        Some((_, error)) => error,
        None => Error::Usage {
            asked: "no pairs".to_owned(),
            reason: "there is nothing to compute".to_owned(),
            advice: "name at least one pair".to_owned(),
        },
    })
}

fn refuse<T>(what: &'static str, value: u64, limit: String, advice: &str) -> Result<T> {
    Err(Error::Shape {
        what,
        value,
        limit,
        advice: advice.to_owned(),
    })
}

/// The cache, but for its budget.
fn spec(options: &CapacityOptions, pair: Pair) -> CacheSpec {
    let shape = options.shape;
    let layer = LayerSpec {
        window: [options.window; 2],
        sink_tokens: [options.sink_tokens; 2],
        ..LayerSpec::new(pair)
    };
    CacheSpec {
        k_head_dim: shape.k_head_dim,
        v_head_dim: shape.v_head_dim,
        layers: vec![layer; shape.layers as usize],
        page_tokens: options.page_tokens.unwrap_or(pair.default_page_tokens()),
        sequences: options.batch,
        // They are no part of the pages, wherever they come from.
        tensor_scales: TensorScales::FromRows,
        ..CacheSpec::new(0, shape.q_heads, shape.kv_heads, shape.k_head_dim, pair, 0)
    }
}

fn row(options: &CapacityOptions, pair: Pair, geometry: &Geometry) -> Result<CapacityRow> {
    let shape = options.shape;
    let page_tokens = u64::from(geometry.page_tokens);
    let (context, batch) = (u64::from(options.context), u64::from(options.batch));
    let pages = context.div_ceil(page_tokens) * batch;
    let Some(total_bytes) = total(geometry, options.context, options.batch) else {
        let limit =
            format!("{batch} sequences of {context} tokens are more than one cache of `{pair}` can hold");
        return refuse("pages", pages, limit, "choose a smaller batch or context");
    };
    let costs = geometry.costs();
    let longest = |budget: u64| {
        let tokens = geometry.pages_within(budget) / batch * page_tokens;
        tokens.min(u64::from(MAX_TOKENS) / page_tokens * page_tokens)
    };
    Ok(CapacityRow {
        pair: pair.to_string(),
        bits_per_number: pair.bits_per_number(shape.k_head_dim, shape.v_head_dim),
        bytes_per_token: costs.page as f64 / page_tokens as f64,
        page_bytes: costs.page,
        page_code_bytes: costs.page - costs.page_scales - costs.page_padding,
        page_scale_bytes: costs.page_scales,
        page_padding_bytes: costs.page_padding,
        sequence_bytes: costs.sequence,
        staging_bytes: costs.staging,
        pages,
        total_bytes,
        percent_of_f16: total_bytes as f64 / f16_bytes(options) * 100.0,
        budget_bytes: options.budget,
        longest_context: options.budget.map(longest),
        largest_batch: options
            .budget
            .map(|budget| u64::from(largest_batch(geometry, options.context, budget))),
        layers: shape.layers,
        kv_heads: shape.kv_heads,
        k_head_dim: shape.k_head_dim,
        v_head_dim: shape.v_head_dim,
        context: options.context,
        batch: options.batch,
        page_tokens: geometry.page_tokens,
        window: options.window,
        sink_tokens: options.sink_tokens,
    })
}

/// The smallest budget with which a cache has the pages of `batch` sequences of `context` tokens. None where no budget
/// buys so many.
fn total(geometry: &Geometry, context: u32, batch: u32) -> Option<u64> {
    let geometry = Geometry {
        sequences: batch,
        ..geometry.clone()
    };
    let pages = u64::from(context.div_ceil(geometry.page_tokens)) * u64::from(batch);
    let bytes = geometry.bytes(pages);
    // Sums beyond 64 bits stay at the largest number.
    (bytes < u64::MAX && geometry.pages_within(bytes) == pages).then_some(bytes)
}

/// The most sequences of `context` tokens within a budget.
fn largest_batch(geometry: &Geometry, context: u32, budget: u64) -> u32 {
    let (mut fits, mut beyond) = (0, MAX_SEQUENCES + 1);
    while beyond - fits > 1 {
        let middle = (fits + beyond) / 2;
        match total(geometry, context, middle).is_some_and(|bytes| bytes <= budget) {
            true => fits = middle,
            false => beyond = middle,
        }
    }
    fits
}

/// What f16 takes: 2 bytes a number in whole pages, without scales, padding and waiting tokens. Also where its page would
/// be too long for a cache.
fn f16_bytes(options: &CapacityOptions) -> f64 {
    let shape = options.shape;
    let default = Pair::same(Side::F16).default_page_tokens();
    let page_tokens = options.page_tokens.unwrap_or(default);
    let tokens = f64::from(options.context.div_ceil(page_tokens)) * f64::from(page_tokens);
    let row = f64::from(shape.kv_heads) * (f64::from(shape.k_head_dim) + f64::from(shape.v_head_dim));
    2.0 * f64::from(shape.layers) * row * tokens * f64::from(options.batch)
}

/// Units of bytes, the powers of 1000 and of 1024.
const UNITS: [(&str, u64); 11] = [
    ("", 1),
    ("B", 1),
    ("kB", 1000),
    ("KB", 1000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

/// Reads a number of bytes: `8GiB`, `512MiB`, `8GB` (10^9 each), or without a unit.
///
/// # Errors
/// [`Error::Usage`] for anything but a whole number and a unit, and beyond 64 bits.
pub fn parse_bytes(text: &str) -> Result<u64> {
    let refuse = |reason: &str| Error::Usage {
        asked: format!("size `{text}`"),
        reason: reason.to_owned(),
        advice:
            "give a whole number of bytes, or one with kB, MB, GB, TB, KiB, MiB, GiB or TiB, for example 8GiB"
                .to_owned(),
    };
    let trimmed = text.trim();
    let digits = trimmed.trim_start_matches(|c: char| c.is_ascii_digit());
    let (number, unit) = trimmed.split_at(trimmed.len() - digits.len());
    if number.is_empty() {
        return Err(refuse("it does not begin with a digit"));
    }
    let unit = unit.trim_start();
    let (_, unit) = UNITS
        .iter()
        .find(|(name, _)| *name == unit)
        .ok_or_else(|| refuse(&format!("`{unit}` is no unit")))?;
    let bytes = number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(*unit));
    bytes.ok_or_else(|| refuse("it is more than 2^64 - 1 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Book;
    use crate::spec::TABLE;

    const LLAMA: ModelShape = ModelShape {
        layers: 32,
        q_heads: 32,
        kv_heads: 8,
        k_head_dim: 128,
        v_head_dim: 128,
    };

    fn options(pairs: &[&str]) -> CapacityOptions {
        CapacityOptions {
            shape: LLAMA,
            pairs: pairs.iter().map(|pair| pair.parse().unwrap()).collect(),
            context: 32768,
            batch: 1,
            window: 0,
            sink_tokens: 0,
            page_tokens: None,
            budget: None,
        }
    }

    #[test]
    fn a_model_of_32_layers_and_8_heads_of_128_takes_the_known_bytes_a_token() {
        let rows = run(&options(&TABLE)).unwrap().rows;
        let row = |pair: &str| rows.iter().find(|row| row.pair == pair).unwrap();
        for (pair, bytes, scales) in [
            ("f16", 131_072, 0),
            ("fp8", 65536, 0),
            ("int8", 66560, 1024),
            ("fp4", 36864, 4096),
            ("int4", 33792, 1024),
            // K: 16 bits for 32 tokens of each of 32 x 8 x 128 channels.
            ("int4c/int4", 32768 + 2048 + 512, 2048 + 512),
            ("int2", 17408, 1024),
        ] {
            let row = row(pair);
            assert_eq!(row.page_bytes, 64 * bytes, "{pair}");
            assert_eq!(row.bytes_per_token, bytes as f64, "{pair}");
            assert_eq!(row.page_scale_bytes, 64 * scales, "{pair}");
            assert_eq!(row.page_padding_bytes, 0, "{pair}");
            assert_eq!(
                row.page_code_bytes + row.page_scale_bytes,
                row.page_bytes,
                "{pair}"
            );
            let waits = row.sequence_bytes + row.staging_bytes;
            assert_eq!(row.total_bytes, 32768 * bytes + waits, "{pair}");
        }
        assert_eq!(row("f16").percent_of_f16, 100.0);
        assert_eq!(row("fp8").percent_of_f16, 50.0);
        // K of a page before a step and of one after it; 512 tokens of a round and an open page on either side.
        let page = 32 * 8 * 128 * 64 * 2;
        assert_eq!(row("int4c/int4").sequence_bytes, 2 * page);
        assert_eq!(row("int4c/int4").staging_bytes, 10 * page);
    }

    /// The cache of the first pair with a budget. Scales are given, so that it can grow step by step.
    fn within(options: &CapacityOptions, budget: u64) -> CacheSpec {
        CacheSpec {
            budget,
            tensor_scales: TensorScales::Given(vec![[1.0; 2]; options.shape.layers as usize]),
            ..spec(options, options.pairs[0])
        }
    }

    /// Sequences of `context` tokens for a batch, grown by steps of `chunk` tokens of all.
    fn grows(spec: &CacheSpec, context: u32, chunk: u32) -> Result<()> {
        let mut book = Book::new(spec.clone(), None)?;
        let ids: Vec<_> = (0..spec.sequences).map(|_| book.open()).collect();
        let mut len = 0;
        while len < context {
            let new = chunk.min(context - len);
            let requests: Vec<_> = ids.iter().map(|&id| (id, new)).collect();
            let plan = book.plan(&requests, 8)?;
            book.commit(plan)?;
            len += new;
        }
        Ok(())
    }

    /// Every mix of what waits: nothing, a group, a window, sinks.
    fn mixes() -> impl Iterator<Item = CapacityOptions> {
        let pairs = [
            "f16",
            "int8",
            "fp8",
            "int4c/int4",
            "int4c(8)/int2c(16)",
            "f16/int4",
        ];
        let waits = [(0, 0), (5, 0), (100, 0), (0, 3), (0, 130), (40, 70)];
        let sizes = [(1, 1), (8, 1), (200, 1), (256, 3), (700, 2), (1500, 3)];
        pairs.into_iter().flat_map(move |pair| {
            waits.into_iter().flat_map(move |(window, sink_tokens)| {
                sizes.into_iter().map(move |(context, batch)| CapacityOptions {
                    shape: ModelShape {
                        layers: 2,
                        q_heads: 2,
                        kv_heads: 1,
                        k_head_dim: 16,
                        v_head_dim: 24,
                    },
                    context,
                    batch,
                    window,
                    sink_tokens,
                    page_tokens: Some(32),
                    ..options(&[pair])
                })
            })
        })
    }

    #[test]
    fn the_total_is_the_budget_that_serves_the_batch_and_no_more() {
        for options in mixes() {
            let row = run(&options).unwrap().rows.remove(0);
            let with = |budget| within(&options, budget);
            let enough = with(row.total_bytes);
            for chunk in [options.context, 1, 7, 64, 600] {
                let grown = grows(&enough, options.context, chunk);
                assert!(
                    grown.is_ok(),
                    "{row:?} in steps of {chunk}: {}",
                    grown.unwrap_err()
                );
            }
            assert_eq!(u64::from(Book::new(enough, None).unwrap().pages()), row.pages);
            let less = with(row.total_bytes - 1);
            let pages = less.pages(&less.geometry().unwrap());
            assert_eq!(pages.map_or(0, u64::from), row.pages - 1, "{row:?}");
            // The last tokens of a sequence may all wait: then a page less holds the rest.
            if options.window == 0 && options.context.is_multiple_of(32) {
                assert!(grows(&less, options.context, options.context).is_err(), "{row:?}");
            }
        }
    }

    #[test]
    fn what_fits_a_budget_fits_and_one_more_does_not() {
        for mut options in mixes() {
            for budget in [1, 50_000, 1 << 20, 123_456_789] {
                options.budget = Some(budget);
                let row = run(&options).unwrap().rows.remove(0);
                let geometry = spec(&options, options.pairs[0]).geometry().unwrap();
                let fits = |context: u64, batch: u64| {
                    context * batch == 0
                        || total(&geometry, context as u32, batch as u32).is_some_and(|bytes| bytes <= budget)
                };
                let (context, batch) = (row.longest_context.unwrap(), row.largest_batch.unwrap());
                let (asked_context, asked_batch) = (u64::from(options.context), u64::from(options.batch));
                assert!(
                    fits(context, asked_batch) && !fits(context + 1, asked_batch),
                    "{row:?}"
                );
                assert!(context.is_multiple_of(32));
                assert!(
                    fits(asked_context, batch) && !fits(asked_context, batch + 1),
                    "{row:?}"
                );
                let served = row.total_bytes <= budget;
                assert_eq!(served, context >= asked_context, "{row:?}");
                assert_eq!(served, batch >= asked_batch, "{row:?}");
            }
        }
    }

    #[test]
    fn the_longest_context_is_one_that_a_cache_of_the_budget_grows_to() {
        for mut options in mixes() {
            let budget = 600_000;
            options.budget = Some(budget);
            let row = run(&options).unwrap().rows.remove(0);
            let spec = within(&options, budget);
            for chunk in [u32::MAX, 50] {
                let grown = grows(&spec, row.longest_context.unwrap() as u32, chunk);
                assert!(grown.is_ok(), "{row:?}: {}", grown.unwrap_err());
            }
            if options.window == 0 {
                let more = row.longest_context.unwrap() as u32 + 32;
                assert!(grows(&spec, more, 50).is_err(), "{row:?}");
            }
        }
    }

    #[test]
    fn f16_is_what_a_cache_of_f16_takes() {
        let default = options(&["f16"]);
        let odd = CapacityOptions {
            context: 1001,
            batch: 7,
            page_tokens: Some(24),
            ..default.clone()
        };
        for options in [default, odd] {
            assert_eq!(
                run(&options).unwrap().rows[0].total_bytes as f64,
                f16_bytes(&options)
            );
        }
    }

    #[test]
    fn pairs_that_do_not_fit_are_left_out_and_the_reason_is_kept() {
        let mut options = options(&["int4", "fp4", "int4c(128)"]);
        options.shape = ModelShape {
            kv_heads: 1,
            q_heads: 1,
            k_head_dim: 8,
            v_head_dim: 8,
            ..LLAMA
        };
        options.page_tokens = Some(64);
        let capacity = run(&options).unwrap();
        assert_eq!(capacity.rows.len(), 1);
        let reasons: Vec<_> = capacity
            .left_out
            .iter()
            .map(|(_, error)| error.to_string())
            .collect();
        assert!(
            reasons[0].contains("multiple of 16") && reasons[1].contains("G = 128"),
            "{reasons:?}"
        );
        options.shape.k_head_dim = 100;
        let said = run(&options).unwrap_err().to_string();
        assert!(said.contains("head_dim = 100"), "{said}");
    }

    #[test]
    fn sizes_that_no_cache_has_are_refused_by_name() {
        let refused = |change: &dyn Fn(&mut CapacityOptions), words: &str| {
            let mut options = CapacityOptions {
                budget: Some(u64::MAX),
                ..options(&["f32", "int4"])
            };
            change(&mut options);
            let said = run(&options).unwrap_err().to_string();
            assert!(said.contains(words), "{said}");
        };
        refused(&|o| o.context = 0, "context = 0");
        refused(&|o| o.context = u32::MAX, "context = 4294967295");
        refused(&|o| o.batch = 0, "sequences = 0");
        refused(&|o| o.batch = 100_000, "sequences = 100000");
        refused(&|o| o.shape.layers = u32::MAX, "layers = 4294967295");
        refused(&|o| o.shape.layers = 0, "layers = 0");
        refused(
            &|o| o.shape.kv_heads = u32::MAX,
            "query heads are a whole multiple",
        );
        refused(
            &|o| (o.shape.kv_heads, o.shape.q_heads) = (2000, 2000),
            "kv_heads = 2000",
        );
        refused(&|o| o.window = u32::MAX, "window = 4294967295");
        refused(&|o| o.page_tokens = Some(0), "page_tokens = 0");
        refused(&|o| o.page_tokens = Some(65), "page_tokens = 65");
        refused(
            &|o| (o.context, o.batch) = (1_000_000_000, 65536),
            "65536 sequences of 1000000000 tokens",
        );
        refused(&|o| o.pairs.clear(), "no pairs");
    }

    #[test]
    fn the_largest_shapes_have_right_figures_or_an_error() {
        let largest = CapacityOptions {
            shape: ModelShape {
                layers: 1024,
                q_heads: 1024,
                kv_heads: 1024,
                k_head_dim: 256,
                v_head_dim: 256,
            },
            context: MAX_TOKENS,
            window: 1 << 16,
            sink_tokens: 1 << 16,
            budget: Some(u64::MAX),
            ..options(&["f16"])
        };
        let row = run(&largest).unwrap().rows.remove(0);
        assert_eq!(row.total_bytes, (1 << 31) * 1024 * 1024 * 512 * 2);
        // 2^61: the seven-fold is the last in 64 bits.
        assert_eq!(row.largest_batch, Some(7));
        let many = CapacityOptions { batch: 8, ..largest };
        let said = run(&many).unwrap_err().to_string();
        assert!(said.contains("8 sequences of 2147483648 tokens"), "{said}");
    }

    #[test]
    fn sizes_are_read_with_units_and_nonsense_is_refused() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("8GiB", 8 << 30),
            (" 8 GiB ", 8 << 30),
            ("8GB", 8_000_000_000),
            ("512MiB", 512 << 20),
            ("3kB", 3000),
            ("16777215TiB", 16_777_215 << 40),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_bytes(text).unwrap(), bytes, "{text}");
        }
        for text in [
            "",
            "GiB",
            "-1",
            "+1",
            "1.5GiB",
            "1e9",
            "8G",
            "8gib",
            "8Gb",
            "8 G iB",
            "NaN",
            "inf",
            "0x10",
            "1_000",
            "16777216TiB",
            "18446744073709551616",
            "８GiB",
            "8GiBé",
        ] {
            let said = parse_bytes(text).unwrap_err().to_string();
            assert!(
                said.contains(&format!("size `{text}`")) && said.contains("8GiB"),
                "{said}"
            );
        }
    }
}
