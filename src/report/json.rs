//! Rows as JSON: one array, an object a row, the fields under their names.

use std::io;

use serde::Serialize;
use serde_json::Value;

use crate::gpu::AdapterSummary;

/// A pretty array of objects, with a line feed at its end. Numbers have as many digits as are needed to read the same
/// f64 back; what is not a number is `null`.
pub fn to_bytes<T: Serialize + ?Sized>(value: &T) -> io::Result<Vec<u8>> {
    pretty(value)
}

/// Any value so, with a line feed at its end.
pub(super) fn pretty<T: Serialize + ?Sized>(value: &T) -> io::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(value)?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// The adapters as such an array; `limits` is an object of the limits by their names.
pub fn adapters(adapters: &[AdapterSummary]) -> io::Result<Vec<u8>> {
    let rows: Vec<Value> = adapters
        .iter()
        .map(|adapter| {
            let mut row = serde_json::to_value(adapter)?;
            row["limits"] = adapter
                .limits
                .iter()
                .map(|(name, value)| (name.clone(), Value::from(*value)))
                .collect();
            Ok(row)
        })
        .collect::<io::Result<_>>()?;
    to_bytes(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::examples;

    #[test]
    fn a_drift_row_carries_every_promised_field_and_reads_back_exactly() {
        let row = examples::row("int4c/int4", 5.25, 0.1 + 0.2);
        let bytes = to_bytes(std::slice::from_ref(&row)).unwrap();
        let parsed: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        let object = parsed[0].as_object().unwrap();
        let promised = "pair bits_per_number percent_of_f16 logit_drift logit_drift_centred top1 predictions mean_kl \
                        max_abs_diff cache_bytes code_bytes scale_bytes padding_bytes allocated_bytes convention mode device adapter";
        for field in promised.split_whitespace() {
            assert!(object.contains_key(field), "{field} is missing");
        }
        assert_eq!(object["pair"], "int4c/int4");
        assert_eq!(object["logit_drift"].as_f64(), Some(0.1 + 0.2));
        assert_eq!(object["cache_bytes"].as_u64(), Some(2688));
        assert_eq!(bytes.last(), Some(&b'\n'));
    }

    #[test]
    fn no_rows_are_an_empty_array() {
        assert_eq!(to_bytes::<[u8]>(&[]).unwrap(), b"[]\n");
    }

    #[test]
    fn the_limits_of_an_adapter_are_found_by_name() {
        let adapter = examples::adapter();
        let parsed: Value = serde_json::from_slice(&adapters(&[adapter]).unwrap()).unwrap();
        assert_eq!(parsed[0]["label"], "A GPU #2");
        assert_eq!(parsed[0]["limits"]["maxBufferSize"], 1_u64 << 40);
        assert_eq!(parsed[0]["features"][0], "shader-f16");
    }
}
