//! Rows as CSV: a header with the same field names as the JSON, then a line a row.

use std::io;

use serde::Serialize;

/// The header and the rows. What may be absent is an empty field.
pub fn to_bytes<T: Serialize>(rows: &[T]) -> io::Result<Vec<u8>> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    for row in rows {
        writer.serialize(row)?;
    }
    writer.into_inner().map_err(|error| error.into_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::examples;

    #[test]
    fn header_and_rows_agree_and_names_with_commas_survive() {
        let mut rows = examples::published();
        rows[0].adapter = "llvmpipe (LLVM 15.0.6, 256 bits), \"Mesa\"".to_owned();
        let bytes = to_bytes(&rows).unwrap();
        let mut reader = csv::Reader::from_reader(bytes.as_slice());
        let header = reader.headers().unwrap().clone();
        let position = |field: &str| header.iter().position(|name| name == field).expect(field);
        let records: Vec<_> = reader.records().collect::<Result<_, _>>().unwrap();
        assert_eq!(records.len(), 8);
        assert_eq!(&records[0][position("adapter")], rows[0].adapter);
        for (record, row) in records.iter().zip(&rows) {
            assert_eq!(&record[position("pair")], row.pair);
            assert_eq!(record[position("logit_drift")].parse(), Ok(row.logit_drift));
            assert_eq!(record[position("predictions")].parse(), Ok(row.predictions));
        }
    }
}
