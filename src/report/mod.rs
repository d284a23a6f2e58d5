//! What the measurements say, for people and for programs: tables, JSON, CSV and a picture, as text or bytes, and the
//! files that they go to. Nothing here prints.

pub mod csv;
pub mod json;
mod labels;
pub mod output;
pub mod plot;
pub mod table;

#[cfg(test)]
pub(crate) mod examples {
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
            non_finite_logits: 0,
            saturated: 0,
            cache_bytes: (bits_per_number * 512.0) as u64,
            convention: "packed".to_owned(),
            mode: "prefill".to_owned(),
            window: 0,
            outlier: 1.0,
            device: "gpu".to_owned(),
            adapter: "an adapter with a name (driver 1.2.3)".to_owned(),
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
