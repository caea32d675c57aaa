//! Reads the rows of Parquet files, which may be damaged or malicious.

use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Bytes that the rows of a file may always take.
const SMALL: u64 = 1 << 30;

/// Maximum ratio of the bytes of the rows to those of the file, for larger rows. A repeated value is stored once, so a long prompt that
/// begins each row gives a far larger ratio than compression of a text.
const MAX_RATIO: u64 = 1000;

/// Bytes of a value in memory, apart from its text or its parts.
const VALUE: u64 = size_of::<Field>() as u64;

/// Calls `each` with the columns of every row of `file`, in order. Returns the entries of the file's metadata.
///
/// # Errors
/// A message of one line, if the file is not valid Parquet, or its rows take far more memory than a file of its size should.
pub fn parquet_rows(file: File, each: impl FnMut(Vec<(String, Field)>)) -> Result<Vec<KeyValue>, String> {
    let len = file.metadata().map_or(0, |metadata| metadata.len());
    rows_within(file, SMALL.max(len.saturating_mul(MAX_RATIO)), each)
}

fn rows_within(file: File, most: u64, mut each: impl FnMut(Vec<(String, Field)>)) -> Result<Vec<KeyValue>, String> {
    let too_large = || {
        ParquetError::External(
            format!(
                "its rows take more than {most} bytes of memory, far more than a file of its size should: if that is right, \
                 write it as JSONL or as several files"
            )
            .into(),
        )
    };
    let mut left = most;
    // The parquet crate panics at unknown types and at some damaged files.
    let done = catch_unwind(AssertUnwindSafe(|| -> Result<Vec<KeyValue>, ParquetError> {
        let reader = SerializedFileReader::new(file)?;
        let columns = || reader.metadata().row_groups().iter().flat_map(|group| group.columns());
        if let Some(found) = columns().find_map(|column| unsupported(column.compression())) {
            let message = format!(
                "expected columns compressed with Snappy or Zstandard, or not compressed, found {found}, which is not supported here"
            );
            return Err(ParquetError::External(message.into()));
        }
        // The whole row is read before its size is known.
        let values = columns().map(|column| column.num_values().max(0) as u64);
        if values.fold(0, u64::saturating_add).saturating_mul(VALUE) > most {
            return Err(too_large());
        }
        for row in reader.get_row_iter(None)? {
            let columns = row?.into_columns();
            let bytes = columns.iter().map(|(name, field)| name.len() as u64 + size(field)).sum();
            left = left.checked_sub(bytes).ok_or_else(too_large)?;
            each(columns);
        }
        Ok(reader.metadata().file_metadata().key_value_metadata().cloned().unwrap_or_default())
    }));
    let message = match done {
        Ok(Ok(pairs)) => return Ok(pairs),
        Ok(Err(ParquetError::External(error))) => return Err(error.to_string()),
        Ok(Err(ParquetError::General(message))) => message,
        Ok(Err(error)) => error.to_string(),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(ToString::to_string);
            text.or(panic.downcast_ref::<String>().cloned()).unwrap_or_default()
        }
    };
    Err(format!("not valid Parquet: {}", message.lines().next().unwrap_or_default()))
}

/// Returns the name of a compression that is not supported.
fn unsupported(compression: Compression) -> Option<&'static str> {
    match compression {
        Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::ZSTD(_) => None,
        Compression::GZIP(_) => Some("gzip"),
        Compression::BROTLI(_) => Some("Brotli"),
        Compression::LZ4 | Compression::LZ4_RAW => Some("LZ4"),
        Compression::LZO => Some("LZO"),
    }
}

/// Returns the approximate number of bytes of a value in memory.
fn size(field: &Field) -> u64 {
    let parts = match field {
        Field::Str(text) => text.len() as u64,
        Field::Bytes(bytes) => bytes.len() as u64,
        Field::Group(row) => row.get_column_iter().map(|(name, field)| name.len() as u64 + size(field)).sum(),
        Field::ListInternal(list) => list.elements().iter().map(size).sum(),
        Field::MapInternal(map) => map.entries().iter().map(|(key, value)| size(key) + size(value)).sum(),
        _ => 0,
    };
    VALUE + parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use parquet::data_type::{ByteArray, ByteArrayType};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;
    use std::io::{Read, Seek, Write};
    use std::sync::Arc;

    /// A file with the column `prompt`, compressed with Snappy.
    fn written(texts: &[ByteArray]) -> File {
        let schema = Arc::new(parse_message_type("message rows { required binary prompt (UTF8); }").unwrap());
        let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
        let mut file = tempfile::tempfile().unwrap();
        let mut writer = SerializedFileWriter::new(&mut file, schema, Arc::new(properties)).unwrap();
        let mut rows = writer.next_row_group().unwrap();
        let mut column = rows.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(texts, None, None).unwrap();
        column.close().unwrap();
        rows.close().unwrap();
        writer.close().unwrap();
        file
    }

    #[test]
    fn a_compression_that_is_not_supported_is_named_with_those_that_are() {
        let mut file = written(&[ByteArray::from("a")]);
        let mut bytes = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut bytes).unwrap();
        // In the footer, the codec comes after the path of the column: field 4, a number that is stored as twice its value (1, Snappy).
        let codec = b"\x06prompt\x15\x02";
        let at = bytes.windows(codec.len()).position(|part| part == codec).unwrap() + codec.len() - 1;
        for (number, name) in [(2, "gzip"), (3, "LZO"), (4, "Brotli"), (5, "LZ4"), (7, "LZ4")] {
            bytes[at] = 2 * number;
            let mut changed = tempfile::tempfile().unwrap();
            changed.write_all(&bytes).unwrap();
            let wanted = format!(
                "expected columns compressed with Snappy or Zstandard, or not compressed, found {name}, which is not supported here"
            );
            assert_eq!(parquet_rows(changed, |_| ()).unwrap_err(), wanted);
        }
    }

    #[test]
    fn a_value_that_is_repeated_without_end_is_refused_within_bounded_memory() {
        let file = written(&vec![ByteArray::from("x".repeat(1000).as_str()); 10_000]);
        let len = file.metadata().unwrap().len();
        assert!(len < 10_000, "{len} bytes");
        let read = |most| {
            let mut rows = 0;
            let done = rows_within(file.try_clone().unwrap(), most, |_| rows += 1).map(|_| ());
            (rows, done)
        };
        assert_eq!(read(20_000_000), (10_000, Ok(())));
        // Rows are refused for their sizes, and for their number alone.
        for (most, first) in [(2_000_000, 1..2000), (100_000, 0..1)] {
            let (rows, done) = read(most);
            let message =
                format!("its rows take more than {most} bytes of memory, far more than a file of its size should: if");
            assert!(
                first.contains(&rows) && done.as_ref().is_err_and(|found| found.starts_with(&message)),
                "{rows} {done:?}"
            );
        }
        // A real file of this size may take a gigabyte.
        assert!(parquet_rows(file, |_| ()).is_ok());
    }
}
