//! From a file to its rows: JSONL, JSON, CSV, Parquet, the texts also compressed by gzip. Whatever the format, a row is a JSON
//! object.

use super::{Place, Row};
use crate::files;
use crate::safe_text::beginning;
use crate::{Error, Result};
use flate2::bufread::MultiGzDecoder;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use serde_json::{Map, Value, json};
use std::io::{BufRead, BufReader, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

/// Columns that hold lists in every format; a cell of CSV is text, so there they are JSON.
const LISTS: [&str; 4] = ["prompt_ids", "input_ids", "completion_ids", "messages"];

/// Columns that hold numbers in every format.
const NUMBERS: [&str; 1] = ["margin"];

/// The longest line of rows in bytes: what a stream without line ends may take.
const LONGEST_LINE: u64 = 256 << 20;

/// A packed text may be so many times as long as its file; texts that people write are 2 to 10 times as long, and what is made
/// to fill the memory up to 1000 times.
const LARGEST_RATIO: u64 = 100;

/// A packed text of so many bytes is read in any case.
const SMALL_TEXT: u64 = 64 << 20;

const NOT_UTF8: &str = "expected UTF-8, found bytes of another encoding";

/// All rows of a file, whose kind the end of its name tells; JSONL where it tells nothing.
///
/// # Errors
/// If it cannot be read, or is not what it should be: with the place.
pub(super) fn read_rows(path: &Path) -> Result<Vec<Row>> {
    let file: Arc<Path> = path.into();
    match format(path) {
        Some("parquet") => read_parquet(&file),
        Some("csv") => read_csv(&file, &read_text(path)?),
        extension => {
            let text = read_text(path)?;
            if extension == Some("json") && text.trim_start().starts_with('[') {
                let rows: Vec<Value> =
                    serde_json::from_str(&text).map_err(|e| Error::invalid(path, format!("not a JSON array: {e}")))?;
                return (1..).zip(rows).map(|(row, value)| Row::new(&file, Place::Row(row), value)).collect();
            }
            let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
            lines.map(|(line, text)| parse_line(&file, line, text)).collect()
        }
    }
}

/// The next line that is not blank, as a row: a JSON object, or with `json: false` a prompt. `read` counts the lines.
///
/// # Errors
/// If the source cannot be read, or the line is not what it should be.
pub(super) fn next_line(
    file: &Arc<Path>,
    reader: &mut impl BufRead,
    json: bool,
    read: &mut usize,
) -> Result<Option<Row>> {
    loop {
        let mut bytes = Vec::new();
        let mut part = (&mut *reader).take(LONGEST_LINE + 1);
        if part.read_until(b'\n', &mut bytes).map_err(Error::io("read", file.to_path_buf()))? == 0 {
            return Ok(None);
        }
        *read += 1;
        let place = Place::Line(*read);
        if bytes.len() as u64 > LONGEST_LINE {
            return Err(place.error(file, format!("expected at most {LONGEST_LINE} bytes, found a longer line")));
        }
        let text = String::from_utf8(bytes).map_err(|_| place.error(file, NOT_UTF8))?;
        let text = if *read == 1 { text.strip_prefix('\u{feff}').unwrap_or(&text) } else { &text };
        if text.trim().is_empty() {
            continue;
        }
        if json {
            return parse_line(file, *read, text).map(Some);
        }
        let text = text.strip_suffix('\n').unwrap_or(text);
        return Row::new(file, place, json!({"prompt": text.strip_suffix('\r').unwrap_or(text)})).map(Some);
    }
}

/// One line of a JSONL file.
fn parse_line(file: &Arc<Path>, line: usize, text: &str) -> Result<Row> {
    let place = Place::Line(line);
    match serde_json::from_str(text) {
        Ok(row) => Row::new(file, place, row),
        Err(e) => {
            // The parser saw one line and says so; ours is the line that counts.
            let message = e.to_string().replace(" at line 1 column", " at column");
            Err(place.error(file, format!("not valid JSON: {message}")))
        }
    }
}

/// What the end of a file's name says of its rows, `.gz` behind it left out.
pub(super) fn format(path: &Path) -> Option<&str> {
    let name = path.file_name()?.to_str()?;
    Some(name.strip_suffix(".gz").unwrap_or(name).rsplit_once('.')?.1)
}

/// Opens a text, and unpacks it where its name ends in `.gz`; a file may be several packed ones in a row, as `cat` joins them.
///
/// # Errors
/// If it cannot be opened. What is not sound gzip, or unpacks to far more than a text does, fails when it is read.
pub(super) fn open_text(path: &Path) -> Result<Box<dyn BufRead>> {
    let file = files::open(path)?;
    if path.extension().is_none_or(|extension| extension != "gz") {
        return Ok(Box::new(BufReader::new(file)));
    }
    let packed = file.metadata().map_err(Error::io("read", path))?.len();
    let most = SMALL_TEXT.max(packed.saturating_mul(LARGEST_RATIO));
    let unpacked = MultiGzDecoder::new(BufReader::new(file));
    Ok(Box::new(BufReader::new(Bounded { from: unpacked, left: most, most })))
}

/// A source that fails, and does not end, behind its `most` bytes.
struct Bounded<R> {
    from: R,
    left: u64,
    most: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.from.read(buffer)?;
        self.left = self.left.checked_sub(read as u64).ok_or_else(|| {
            std::io::Error::other(format!(
                "it unpacks to more than {} bytes, {LARGEST_RATIO} times its size: if that is right, unpack it first",
                self.most
            ))
        })?;
        Ok(read)
    }
}

/// The text of a file, without the byte order mark that some editors write.
fn read_text(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    open_text(path)?.read_to_end(&mut bytes).map_err(Error::io("read", path))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        let before = &e.as_bytes()[..e.utf8_error().valid_up_to()];
        Place::Line(before.iter().filter(|byte| **byte == b'\n').count() + 1).error(path, NOT_UTF8)
    })?;
    Ok(text.strip_prefix('\u{feff}').map(String::from).unwrap_or(text))
}

fn read_csv(file: &Arc<Path>, text: &str) -> Result<Vec<Row>> {
    // A record begins behind the line ends that the parser finds before it, and counts to it.
    let begin = |position: Option<&csv::Position>| {
        let byte = position.map_or(0, |position| position.byte() as usize).min(text.len());
        text.len() - text[byte..].trim_start_matches(['\r', '\n']).len()
    };
    let fault = |error: csv::Error| {
        let line = Place::Line(1 + text[..begin(error.position())].matches('\n').count());
        match error.kind() {
            csv::ErrorKind::UnequalLengths { expected_len, len, .. } => line.error(
                file,
                format!(
                    "expected {expected_len} fields, as in the header, found {len}; a field with a comma or a line end \
                     needs quotes around it"
                ),
            ),
            _ => line.error(file, format!("not valid CSV: {error}")),
        }
    };
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let header = reader.headers().map_err(fault)?.clone();
    if let Some((at, name)) = header.iter().enumerate().find(|(at, name)| header.iter().take(*at).any(|n| n == *name)) {
        return Err(
            Place::Line(1).error(file, format!("expected names that differ, found `{name}` again as name {}", at + 1))
        );
    }
    let mut rows = Vec::new();
    let (mut last, mut line) = (0, 1);
    for record in reader.records() {
        let record = record.map_err(fault)?;
        let start = begin(record.position());
        line += text[last..start].matches('\n').count();
        last = start;
        let mut row = Map::new();
        for (name, cell) in header.iter().zip(&record) {
            let value = self::cell(name, cell).map_err(|message| Place::Line(line).error(file, message))?;
            row.insert(name.to_string(), value);
        }
        rows.push(Row::new(file, Place::Line(line), Value::Object(row))?);
    }
    // The parser takes the end of the file for the end of the quote, and all lines on the way for one field.
    if ends_in_quotes(&text[last..]) {
        return Err(Place::Line(line).error(file, "the row has a quote that is never closed"));
    }
    Ok(rows)
}

/// What a cell of CSV in the column `name` holds.
///
/// # Errors
/// If it is not what columns of this name hold.
pub(super) fn cell(name: &str, text: &str) -> Result<Value, String> {
    let (is_list, is_number) = (LISTS.contains(&name), NUMBERS.contains(&name));
    let wrong = |what: &str| format!("field `{name}`: expected {what}, found {:?}", beginning(text, 120));
    match text.trim() {
        // What other formats say by null.
        "" if is_list || is_number => Ok(Value::Null),
        list if is_list => {
            serde_json::from_str(list).ok().filter(Value::is_array).ok_or_else(|| wrong("a list in JSON"))
        }
        number if is_number => {
            serde_json::from_str(number).ok().filter(Value::is_number).ok_or_else(|| wrong("a number"))
        }
        _ => Ok(text.into()),
    }
}

/// Whether a record of CSV, with what comes behind it, ends within quotes.
fn ends_in_quotes(record: &str) -> bool {
    let (mut quoted, mut field_begins) = (false, true);
    for c in record.chars() {
        // A quote in quotes is written twice: it closes and opens them.
        match c {
            '"' if quoted => (quoted, field_begins) = (false, true),
            '"' if field_begins => quoted = true,
            _ if quoted => {}
            c => field_begins = matches!(c, ',' | '\n' | '\r'),
        }
    }
    quoted
}

fn read_parquet(path: &Arc<Path>) -> Result<Vec<Row>> {
    let file = files::open(path)?;
    let mut values = Vec::new();
    // The crate panics at types that it does not know and at some damage.
    let done = catch_unwind(AssertUnwindSafe(|| -> Result<(), ParquetError> {
        let reader = SerializedFileReader::new(file)?;
        for row in reader.get_row_iter(None)? {
            values.push(object(row?.into_columns()));
        }
        Ok(())
    }));
    let message = match done {
        Ok(Ok(())) => {
            return (1..).zip(values).map(|(row, value)| Row::new(path, Place::Row(row), value)).collect();
        }
        Ok(Err(error)) => error.to_string(),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(ToString::to_string);
            text.or(panic.downcast_ref::<String>().cloned()).unwrap_or_default()
        }
    };
    let message = format!("not sound Parquet: {}", message.lines().next().unwrap_or_default());
    Err(match values.len() {
        0 => Error::invalid(path, message),
        read => Place::Row(read + 1).error(path, message),
    })
}

fn object(columns: Vec<(String, Field)>) -> Value {
    columns.into_iter().map(|(name, field)| (name, json_of(field))).collect::<Map<_, _>>().into()
}

/// A value of Parquet as JSON has it. Bytes that are no text (images, say) have no such form, and are null.
fn json_of(field: Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(value) => value.into(),
        Field::Byte(n) => n.into(),
        Field::Short(n) => n.into(),
        Field::Int(n) => n.into(),
        Field::Long(n) => n.into(),
        Field::UByte(n) => n.into(),
        Field::UShort(n) => n.into(),
        Field::UInt(n) => n.into(),
        Field::ULong(n) => n.into(),
        Field::Float16(x) => x.to_f64().into(),
        Field::Float(x) => f64::from(x).into(),
        Field::Double(x) => x.into(),
        Field::Str(text) => text.into(),
        Field::Bytes(bytes) => bytes.as_utf8().map_or(Value::Null, Value::from),
        Field::Group(row) => object(row.into_columns()),
        Field::ListInternal(list) => list.elements().iter().cloned().map(json_of).collect(),
        Field::MapInternal(map) => {
            let entry = |(key, value): &(Field, Field)| {
                let key = match json_of(key.clone()) {
                    Value::String(key) => key,
                    key => key.to_string(),
                };
                (key, json_of(value.clone()))
            };
            map.entries().iter().map(entry).collect::<Map<_, _>>().into()
        }
        // Dates, times and decimals, as they are printed.
        other => other.to_string().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use std::io::Write;

    #[test]
    fn gzip_is_unpacked_whatever_is_in_it_and_damage_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let pack = |text: &str| {
            let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
            packed.write_all(text.as_bytes()).unwrap();
            packed.finish().unwrap()
        };
        let read = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            read_rows(&path).map(|rows| rows.into_iter().map(|row| row.value).collect::<Vec<_>>())
        };
        let expected = vec![json!({"prompt": "a"}), json!({"prompt": "b"})];
        let two = [pack("{\"prompt\": \"a\"}\n"), pack("{\"prompt\": \"b\"}\n")].concat();
        assert_eq!(read("a.jsonl.gz", &two).unwrap(), expected);
        assert_eq!(read("a.json.gz", &pack("[{\"prompt\": \"a\"}, {\"prompt\": \"b\"}]")).unwrap(), expected);
        assert_eq!(read("a.csv.gz", &pack("prompt\na\nb\n")).unwrap(), expected);
        for (bytes, message) in [(&two[..two.len() - 9], "cannot read"), (b"{\"prompt\": \"a\"}", "cannot read")] {
            let error = read("bad.jsonl.gz", bytes).unwrap_err().to_string();
            assert!(error.contains("bad.jsonl.gz") && error.contains(message), "{error}");
        }
    }

    #[test]
    fn what_unpacks_to_far_more_than_a_text_is_refused_and_takes_no_more_memory_than_the_bound() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bomb.jsonl.gz");
        // 80 MiB in 80 KB, above what is read in any case.
        let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
        (0..80).for_each(|_| packed.write_all(&vec![b' '; 1 << 20]).unwrap());
        std::fs::write(&path, packed.finish().unwrap()).unwrap();
        let mut read = 0;
        let streamed = next_line(&path.as_path().into(), &mut open_text(&path).unwrap(), true, &mut read);
        for error in [read_rows(&path).unwrap_err(), streamed.unwrap_err()] {
            let error = error.to_string();
            assert!(error.contains("bomb.jsonl.gz: cannot read: it unpacks to more than 67108864 bytes"), "{error}");
        }
    }

    #[test]
    fn a_named_pipe_in_the_place_of_a_file_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a.jsonl", "a.csv", "a.parquet", "a.jsonl.gz"] {
            let path = dir.path().join(name);
            assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
            let error = read_rows(&path).unwrap_err().to_string();
            assert!(error.ends_with("expected a regular file, found a named pipe"), "{error}");
        }
    }

    fn csv(text: &str) -> Result<Vec<Row>> {
        read_csv(&Path::new("a.csv").into(), text)
    }

    #[test]
    fn a_blank_cell_in_a_column_of_lists_is_no_list() {
        let rows = csv("prompt,prompt_ids\nx,\ny, \nz,\"[1, 2]\"\n").unwrap();
        let ids: Vec<&Value> = rows.iter().map(|row| &row.value["prompt_ids"]).collect();
        assert_eq!(ids, [&Value::Null, &Value::Null, &serde_json::json!([1, 2])]);
        let text = csv("prompt,answer\nx,\n").unwrap();
        assert_eq!(text[0].value["answer"], "", "a column of texts has an empty one");
    }

    #[test]
    fn a_cell_is_text_and_a_list_is_json() {
        let text = "prompt,input_ids,n\r\n\"a, \"\"b\"\"\nc\",\"[1, 2]\",007\r\n\r\n[3],[],\n";
        let rows = csv(text).unwrap();
        let values: Vec<&Value> = rows.iter().map(|row| &row.value).collect();
        let first = json!({"prompt": "a, \"b\"\nc", "input_ids": [1, 2], "n": "007"});
        assert_eq!(values, [&first, &json!({"prompt": "[3]", "input_ids": [], "n": ""})]);
        assert_eq!(rows.iter().map(|row| row.place.to_string()).collect::<Vec<_>>(), ["line 2", "line 5"]);
    }

    #[test]
    fn broken_csv_is_an_error_with_its_line() {
        for (text, message) in [
            ("a,b\n1,2\n3\n", "a.csv: line 3: expected 2 fields, as in the header, found 1"),
            ("a,b\n1,2\n\"x\ny\",2,3\n", "a.csv: line 3: expected 2 fields, as in the header, found 3"),
            ("a,b\n1,2\n\n3,\"4\n5,6\n", "a.csv: line 4: the row has a quote that is never closed"),
            ("a,b,a\n1,2,3\n", "a.csv: line 1: expected names that differ, found `a` again as name 3"),
            ("prompt,input_ids\nx,1 2\n", "a.csv: line 2: field `input_ids`: expected a list in JSON, found \"1 2\""),
        ] {
            let error = csv(text).unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
        // A quote within a field opens nothing.
        assert_eq!(csv("a,b\n1,5\" tape\n").unwrap()[0].value["b"], "5\" tape");
    }
}
