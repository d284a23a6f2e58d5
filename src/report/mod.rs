//! What the measurements say, for people and for programs: tables, JSON, CSV and a picture, as text or bytes, and the
//! files that they go to. Nothing here prints.

pub mod analyze;
pub mod bench;
pub mod bench_plot;
pub mod csv;
pub mod heat_map;
pub mod json;
mod labels;
pub mod output;
#[cfg(feature = "models")]
pub mod page;
pub mod plot;
pub mod table;
#[cfg(feature = "models")]
pub mod trained;
pub mod tune;

use crate::drift::DriftRow;
use crate::model::PROMPTS;
use crate::spec::Pair;

/// A side of a drift row that was never packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unpacked {
    /// `K` or `V`.
    pub side: &'static str,
    /// Tokens of one group of the side.
    pub group: u32,
    /// Tokens of a prompt.
    pub prompt: u32,
}

/// The sides that stayed in full precision from the first token to the last, because no group of theirs was ever full
/// and out of the recent window. The figures of such a row say nothing of its format.
pub fn never_packed(row: &DriftRow) -> Vec<Unpacked> {
    let Ok(pair) = row.pair.parse::<Pair>() else {
        return Vec::new();
    };
    let prompt = PROMPTS
        .iter()
        .map(|prompt| prompt.chars().count())
        .max()
        .unwrap_or(0) as u32;
    [("K", pair.k), ("V", pair.v)]
        .into_iter()
        .filter(|(_, side)| side.waits(row.window))
        .map(|(name, side)| Unpacked {
            side: name,
            group: side.layout.token_group().max(1),
            prompt,
        })
        .filter(|unpacked| prompt.saturating_sub(row.window) / unpacked.group == 0)
        .collect()
}

/// A factor in as few letters as it needs: 1e-320 and not three hundred digits.
fn factor(value: f64) -> String {
    if (1e-5..1e7).contains(&value) {
        value.to_string()
    } else {
        format!("{value:e}")
    }
}

#[cfg(test)]
pub(crate) mod examples {
    use crate::bench::roof::RoofRow;
    use crate::bench::timer::Clock;
    use crate::bench::{BenchHeader, BenchReport, BenchRow, LeftOut, Work};
    use crate::capacity::CapacityRow;
    use crate::drift::DriftRow;
    use crate::gpu::AdapterSummary;

    /// The second of two adapters of one name.
    pub fn adapter() -> AdapterSummary {
        AdapterSummary {
            index: 1,
            name: "A GPU".to_owned(),
            label: "A GPU #2".to_owned(),
            device_type: "IntegratedGpu".to_owned(),
            software: false,
            backend: "vulkan".to_owned(),
            driver: "a driver".to_owned(),
            driver_info: "1.2.3".to_owned(),
            limits: vec![
                ("maxBufferSize".to_owned(), 1 << 40),
                ("maxStorageBuffersPerShaderStage".to_owned(), 8),
            ],
            features: vec!["shader-f16".to_owned(), "subgroups".to_owned()],
        }
    }

    /// A plan of int4 within 1024 bytes, if anything is asked of them.
    pub fn capacity(longest_context: Option<u64>) -> CapacityRow {
        CapacityRow {
            pair: "int4".to_owned(),
            bits_per_number: 4.125,
            bytes_per_token: 4096.5,
            page_bytes: 64 * 4096 + 32,
            page_code_bytes: 64 * 4096,
            page_scale_bytes: 32,
            page_padding_bytes: 0,
            sequence_bytes: 0,
            staging_bytes: 0,
            pages: 4,
            total_bytes: 5 << 18,
            percent_of_f16: 25.8,
            budget_bytes: longest_context.map(|_| 1024),
            longest_context,
            largest_batch: longest_context.map(|_| 1),
            layers: 1,
            kv_heads: 8,
            k_head_dim: 192,
            v_head_dim: 128,
            context: 100,
            batch: 2,
            page_tokens: 64,
            window: 0,
            sink_tokens: 0,
        }
    }

    /// A row with the given pair, bits per number and drift.
    pub fn row(pair: &str, bits_per_number: f64, logit_drift: f64) -> DriftRow {
        DriftRow {
            pair: pair.to_owned(),
            bits_per_number,
            percent_of_f16: bits_per_number / 16.0 * 100.0,
            logit_drift,
            logit_drift_centred: logit_drift * 1.01,
            top1: 127,
            predictions: 128,
            mean_kl: logit_drift * logit_drift,
            max_abs_diff: logit_drift * 10.0,
            saturated: 0,
            cache_bytes: (bits_per_number * 512.0) as u64,
            code_bytes: (bits_per_number * 480.0) as u64,
            scale_bytes: (bits_per_number * 32.0) as u64,
            padding_bytes: 0,
            allocated_bytes: 8192,
            convention: "packed".to_owned(),
            mode: "prefill".to_owned(),
            window: 0,
            outlier: 1.0,
            device: "gpu".to_owned(),
            adapter: "an adapter with a name (driver 1.2.3)".to_owned(),
        }
    }

    /// A benchmark with a row of each kind: fine, cache-resident, above the roof, left out.
    pub fn bench() -> BenchReport {
        let row = |pair: &str, seconds: f64, percent_of_roof: Option<f64>| BenchRow {
            work: Work::Decode,
            pair: pair.to_owned(),
            context: 4096,
            batch: 8,
            new_tokens: 1,
            q_heads: 32,
            kv_heads: 8,
            head_dim: 128,
            layers: 4,
            seconds,
            seconds_low: seconds * 0.9,
            seconds_high: seconds * 1.1,
            code_bytes: 1_000_000,
            scale_bytes: 32_000,
            table_bytes: 1024,
            other_bytes: 4096,
            times_read: 1,
            variant: String::new(),
            approximate: false,
            tuned: false,
            gb_per_s: 1.032e-3 / seconds,
            tokens_per_s: 8.0 / seconds,
            percent_of_roof,
            speed_up: Some(1e-3 / seconds),
            cache_resident: false,
            above_roof: false,
            clock: Clock::Timestamps,
            note: String::new(),
            warm_up_seconds: 0.5,
            adapter: "A GPU #2 (vulkan)".to_owned(),
            samples: vec![seconds; 5],
        };
        let adapter = adapter();
        BenchReport {
            header: BenchHeader {
                adapter: adapter.label,
                device_type: adapter.device_type,
                software: false,
                driver: adapter.driver,
                backend: adapter.backend,
                features: adapter.features,
                shape: "32 query heads, 8 KV heads of 128".to_owned(),
                batch: 8,
                timing: "timestamps of the device around each pass".to_owned(),
                cache_bytes: 64 << 20,
                cache_source: "assumed for GPUs".to_owned(),
                memory_bytes: 4 << 30,
                warm_up: "2 passes and all compilation, in no sample".to_owned(),
                samples: "at least 5 a row".to_owned(),
            },
            roofs: vec![RoofRow {
                kernel: "read_four, 256 invocations".to_owned(),
                bytes: 256 << 20,
                cache_resident: false,
                seconds: [0.09, 0.1, 0.11],
                gb_per_s: 2.684,
                clock: Clock::Timestamps,
                samples: vec![0.1; 5],
            }],
            rows: vec![
                row("f16", 1e-3, Some(60.0)),
                row("fp4", 8e-4, Some(30.0)),
                row("int4", 4e-4, Some(40.0)),
                BenchRow {
                    cache_resident: true,
                    ..row("int8", 6e-4, None)
                },
                BenchRow {
                    above_roof: true,
                    ..row("int2", 1e-5, None)
                },
            ],
            left_out: vec![LeftOut {
                pair: "fp8".to_owned(),
                context: 4096,
                reason: "why".to_owned(),
            }],
        }
    }

    /// The eight rows of the published table, with their digits recomputed.
    pub fn published() -> Vec<DriftRow> {
        [
            ("f16", 16.0, 0.000106),
            ("fp8", 8.0, 0.0125899),
            ("int8", 10.0, 0.00202619),
            ("fp4", 4.5, 0.0450404),
            ("int4", 6.0, 0.0438311),
            ("int4c/int4", 5.25, 0.0417008),
            ("int2", 4.0, 0.266672),
            ("int2c/int2", 3.25, 0.274407),
        ]
        .into_iter()
        .map(|(pair, bits, drift)| DriftRow {
            convention: "published".to_owned(),
            ..row(pair, bits, drift)
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_whose_groups_do_not_close_are_found() {
        let sides = |pair: &str, window| {
            let row = DriftRow {
                window,
                ..examples::row(pair, 4.0, 0.1)
            };
            never_packed(&row)
                .iter()
                .map(|unpacked| unpacked.side)
                .collect::<String>()
        };
        for (pair, window, expected) in [
            ("int4c", 0, ""),
            ("int4c(64)/int4", 0, "K"),
            ("int4c(64)", 0, "KV"),
            ("int4c/int4", 1, "K"),
            ("int4c(16)/int4c(8)", 20, "K"),
            ("int4", 31, ""),
            ("int4", 32, "KV"),
            ("int4/f16", 4096, "K"),
            ("f16", 4096, ""),
            ("f32", 4096, ""),
        ] {
            assert_eq!(sides(pair, window), expected, "{pair} with window {window}");
        }
    }
}
