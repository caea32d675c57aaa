//! Reads the rows of a file: JSONL, JSON or CSV, optionally compressed with gzip, or Parquet. In every format a row is a JSON
//! object.

use super::row::{ARRAY, Place, Row, object_over_lines};
use flate2::bufread::MultiGzDecoder;
use parquet::record::Field;
use rlhf_base::files;
use rlhf_base::safe_text::beginning;
use rlhf_base::{Error, Result};
use serde_json::{Map, Value, json};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;

/// Columns of lists. CSV cells are text, so in CSV files these are JSON.
const LISTS: [&str; 4] = ["prompt_ids", "input_ids", "completion_ids", "messages"];

/// Columns of lists whose names other datasets use for text too: a CSV cell is read as a list if it is a list in JSON.
const TEXT_OR_LISTS: [&str; 4] = ["labels", "completion_mask", "assistant_masks", "conversations"];

/// Columns of text or of messages. A CSV cell is read as messages if it is a JSON list of objects with a `role`.
const TEXT_OR_MESSAGES: [&str; 4] = ["prompt", "completion", "chosen", "rejected"];

/// Beginnings of messages in Python's form, which `to_csv` of datasets and pandas writes.
const PYTHON_MESSAGES: [&str; 2] = ["[{'role'", "[{'content'"];

/// The remedy where messages are in Python's form.
const AS_JSONL: &str = "; write JSONL: to_json(path, orient=\"records\", lines=True) of pandas and datasets";

/// Columns of numbers.
const NUMBERS: [&str; 1] = ["margin"];

/// Maximum length of a line in bytes; bounds the memory for a stream without line ends.
const MAX_LINE: u64 = 256 << 20;

/// Maximum compression ratio of gzip. Natural text reaches 2 to 10, decompression bombs up to 1000.
const MAX_RATIO: u64 = 100;

/// Decompressed size in bytes up to which the ratio is not checked.
const SMALL_TEXT: u64 = 64 << 20;

/// Returns the error for bytes that are not UTF-8, by the first bytes of the file.
fn not_utf8(bytes: &[u8]) -> &'static str {
    match bytes {
        [0x1f, 0x8b, ..] => "expected UTF-8, found gzip data: give the file a name that ends in .gz",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "expected UTF-8, found zstd data: decompress it first",
        [b'P', b'A', b'R', b'1', ..] => {
            "expected UTF-8, found Parquet data: give the file a name that ends in .parquet"
        }
        _ => "expected UTF-8, found bytes of another encoding",
    }
}

/// Reads all rows of a file in the format of its extension; JSONL if that is unknown.
///
/// # Errors
/// If the file cannot be read or is malformed, with the line or row.
pub(super) fn read_rows(path: &Path) -> Result<Vec<Row>> {
    let file: Arc<Path> = path.into();
    match format(path) {
        Some("parquet") => read_parquet(&file),
        Some("csv") => read_csv(&file, &read_text(path)?),
        extension => {
            let text = read_text(path)?;
            if extension == Some("json") && text.trim_start().starts_with('[') {
                let rows: Vec<Value> =
                    parse(&text).map_err(|e| Error::invalid(path, format!("not a JSON array: {e}")))?;
                return (1..).zip(rows).map(|(row, value)| Row::new(&file, Place::Row(row), value)).collect();
            }
            let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
            let rows: Result<Vec<Row>> = lines.map(|(line, text)| parse_line(&file, line, text)).collect();
            // A line that is no object by itself may be a part of one that goes over several lines.
            rows.map_err(|e| object_over_lines(&text).map_or(e, |message| Error::invalid(path, message)))
        }
    }
}

/// Returns the next line that is not blank as a row: a JSON object, or with `json: false` a prompt. `read` counts the lines.
///
/// # Errors
/// If the source cannot be read, or the line is malformed.
pub(super) fn next_line(
    file: &Arc<Path>,
    reader: &mut impl BufRead,
    json: bool,
    read: &mut usize,
) -> Result<Option<Row>> {
    loop {
        let mut bytes = Vec::new();
        let mut part = (&mut *reader).take(MAX_LINE + 1);
        if part.read_until(b'\n', &mut bytes).map_err(Error::io("read", file.to_path_buf()))? == 0 {
            return Ok(None);
        }
        *read += 1;
        let place = Place::Line(*read);
        if bytes.len() as u64 > MAX_LINE {
            return Err(place.error(file, format!("expected at most {MAX_LINE} bytes, found a longer line")));
        }
        let text = String::from_utf8(bytes).map_err(|e| place.error(file, not_utf8(e.as_bytes())))?;
        let text = if *read == 1 { text.strip_prefix('\u{feff}').unwrap_or(&text) } else { &text };
        if text.trim().is_empty() {
            continue;
        }
        if json {
            let row = parse_line(file, *read, text);
            if row.is_ok() || *read > 1 || serde_json::from_str::<Value>(text).is_ok() {
                return row.map(Some);
            }
            let mut rest = text.to_string();
            // If the rest has bytes of another encoding, the error of the first line stays.
            let whole =
                (&mut *reader).take(MAX_LINE).read_to_string(&mut rest).ok().and_then(|_| object_over_lines(&rest));
            return row.map(Some).map_err(|e| whole.map_or(e, |message| Error::invalid(&**file, message)));
        }
        let text = text.strip_suffix('\n').unwrap_or(text);
        return Row::new(file, place, json!({"prompt": text.strip_suffix('\r').unwrap_or(text)})).map(Some);
    }
}

/// Parses JSON in which Python wrote `NaN`, `Infinity` and `-Infinity`: these are read as null, as in the other formats.
fn parse<T: serde::de::DeserializeOwned>(text: &str) -> serde_json::Result<T> {
    serde_json::from_str(text).or_else(|error| match without_nans(text) {
        Some(text) => serde_json::from_str(&text).map_err(|_| error),
        None => Err(error),
    })
}

/// Returns JSON with null instead of `NaN`, `Infinity` and `-Infinity`, if it has any of them.
fn without_nans(text: &str) -> Option<String> {
    let names = ["NaN", "-Infinity", "Infinity"];
    if !names.iter().any(|name| text.contains(name)) {
        return None;
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut quoted = false;
    while let Some(c) = rest.chars().next() {
        let name = names.iter().find(|name| !quoted && rest.starts_with(**name));
        let taken = match (name, c) {
            (Some(name), _) => {
                out += "null";
                rest = &rest[name.len()..];
                continue;
            }
            // The backslash and the character that it escapes.
            (None, '\\') if quoted => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
            (None, c) => c.len_utf8(),
        };
        quoted ^= c == '"';
        out += &rest[..taken];
        rest = &rest[taken..];
    }
    Some(out)
}

/// Parses one line of a JSONL file.
fn parse_line(file: &Arc<Path>, line: usize, text: &str) -> Result<Row> {
    let place = Place::Line(line);
    match parse(text) {
        Ok(row) => Row::new(file, place, row),
        Err(_) if text.trim_start().starts_with('[') => Err(place.error(file, ARRAY)),
        Err(e) => {
            if let Some(extension) = extension(file).filter(|_| format(file).is_none()) {
                let message = format!(
                    "expected a JSON object on each line, as in every file whose name does not end in .json, .csv or .parquet, found \
                     one that ends in .{extension} and is not JSON"
                );
                return Err(place.error(file, message));
            }
            // The parser sees a single line; the line number of the file is in `place`.
            let message = e.to_string().replace(" at line 1 column", " at column");
            Err(place.error(file, format!("not valid JSON: {message}")))
        }
    }
}

/// Returns the format that the extension of a file names, in either case of letters.
pub(super) fn format(path: &Path) -> Option<&'static str> {
    let extension = extension(path)?;
    ["jsonl", "json", "csv", "parquet"].into_iter().find(|format| extension.eq_ignore_ascii_case(format))
}

/// Returns the extension of a file, without a final `.gz`.
fn extension(path: &Path) -> Option<&str> {
    let name = path.file_name()?.to_str()?;
    let name = if is_gzip(path) { &name[..name.len() - ".gz".len()] } else { name };
    Some(name.rsplit_once('.')?.1)
}

fn is_gzip(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gz"))
}

/// Opens a text file, decompressed if its name ends in `.gz`. It may consist of several gzip members, as `cat` joins them.
///
/// # Errors
/// If it cannot be opened. Reading fails if the gzip data are damaged or expand far more than text can.
pub(super) fn open_text(path: &Path) -> Result<Box<dyn BufRead>> {
    let file = files::open(path)?;
    if !is_gzip(path) {
        return Ok(Box::new(BufReader::new(file)));
    }
    let compressed = file.metadata().map_err(Error::io("read", path))?.len();
    let most = SMALL_TEXT.max(compressed.saturating_mul(MAX_RATIO));
    let decompressed = MultiGzDecoder::new(BufReader::new(file));
    Ok(Box::new(BufReader::new(Bounded { source: decompressed, left: most, most })))
}

/// A reader that fails after `most` bytes, rather than ending there.
struct Bounded<R> {
    source: R,
    left: u64,
    most: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.source.read(buffer)?;
        self.left = self.left.checked_sub(read as u64).ok_or_else(|| {
            std::io::Error::other(format!(
                "it decompresses to more than {} bytes, {MAX_RATIO} times its size: if that is right, decompress it first",
                self.most
            ))
        })?;
        Ok(read)
    }
}

/// Returns the text of a file, without a byte order mark.
fn read_text(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    open_text(path)?.read_to_end(&mut bytes).map_err(Error::io("read", path))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        let before = &e.as_bytes()[..e.utf8_error().valid_up_to()];
        Place::Line(before.iter().filter(|byte| **byte == b'\n').count() + 1).error(path, not_utf8(e.as_bytes()))
    })?;
    Ok(text.strip_prefix('\u{feff}').map(String::from).unwrap_or(text))
}

fn read_csv(file: &Arc<Path>, text: &str) -> Result<Vec<Row>> {
    // The parser's position of a record includes the line ends before it.
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
                     must be quoted"
                ),
            ),
            _ => line.error(file, format!("not valid CSV: {error}")),
        }
    };
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let header = reader.headers().map_err(fault)?.clone();
    if let Some((at, name)) = header.iter().enumerate().find(|(at, name)| header.iter().take(*at).any(|n| n == *name)) {
        return Err(Place::Line(1)
            .error(file, format!("expected distinct column names, found `{name}` again as column {}", at + 1)));
    }
    let mut rows = Vec::new();
    let mut last = 0;
    let mut line = 1;
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
    // The parser treats an unclosed quote as closed at the end of the file, with all lines up to there in one field.
    if ends_in_quotes(&text[last..]) {
        return Err(Place::Line(line).error(file, "the row has a quote that is never closed"));
    }
    Ok(rows)
}

/// Parses a CSV cell in the column `name`.
///
/// # Errors
/// If it does not have the type of that column.
pub(super) fn cell(name: &str, text: &str) -> Result<Value, String> {
    let is_list = LISTS.contains(&name);
    let is_number = NUMBERS.contains(&name);
    let wrong = |what: &str| format!("field `{name}`: expected {what}, found {:?}", beginning(text, 120));
    let is_python = PYTHON_MESSAGES.iter().any(|start| text.trim().starts_with(start));
    let no_list = || wrong("a list in JSON") + if is_python { AS_JSONL } else { "" };
    match text.trim() {
        // Other formats have null for an empty cell.
        "" if is_list || is_number => Ok(Value::Null),
        list if is_list => serde_json::from_str(list).ok().filter(Value::is_array).ok_or_else(no_list),
        number if is_number => {
            serde_json::from_str(number).ok().filter(Value::is_number).ok_or_else(|| wrong("a number"))
        }
        _ if TEXT_OR_MESSAGES.contains(&name) && is_python => Err(no_list()),
        list if TEXT_OR_MESSAGES.contains(&name) && list.starts_with("[{") => {
            Ok(serde_json::from_str(list).ok().filter(are_messages).unwrap_or_else(|| text.into()))
        }
        list if TEXT_OR_LISTS.contains(&name) && list.starts_with('[') => {
            Ok(serde_json::from_str(list).ok().filter(Value::is_array).unwrap_or_else(|| text.into()))
        }
        _ => Ok(text.into()),
    }
}

/// Returns true if `value` is a list of objects that have a `role` each.
fn are_messages(value: &Value) -> bool {
    value.as_array().is_some_and(|list| list.iter().all(|message| message.get("role").is_some()))
}

/// Returns true if CSV text that starts with a record ends within quotes.
fn ends_in_quotes(record: &str) -> bool {
    let mut quoted = false;
    let mut field_start = true;
    for c in record.chars() {
        // A quote within quotes is doubled: it closes and reopens them.
        match c {
            '"' if quoted => (quoted, field_start) = (false, true),
            '"' if field_start => quoted = true,
            _ if quoted => {}
            c => field_start = matches!(c, ',' | '\n' | '\r'),
        }
    }
    quoted
}

fn read_parquet(path: &Arc<Path>) -> Result<Vec<Row>> {
    let mut values = Vec::new();
    match files::parquet_rows(files::open(path)?, |columns| values.push(object(columns))) {
        Ok(_) => (1..).zip(values).map(|(row, value)| Row::new(path, Place::Row(row), value)).collect(),
        Err(message) => Err(match values.len() {
            0 => Error::invalid(path, message),
            read => Place::Row(read + 1).error(path, message),
        }),
    }
}

fn object(columns: Vec<(String, Field)>) -> Value {
    columns.into_iter().map(|(name, field)| (name, to_json(field))).collect::<Map<_, _>>().into()
}

/// Converts a Parquet value to JSON. Bytes that are not text, such as images, become null.
fn to_json(field: Field) -> Value {
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
        Field::ListInternal(list) => list.elements().iter().cloned().map(to_json).collect(),
        Field::MapInternal(map) => {
            let entry = |(key, value): &(Field, Field)| {
                let key = match to_json(key.clone()) {
                    Value::String(key) => key,
                    key => key.to_string(),
                };
                (key, to_json(value.clone()))
            };
            map.entries().iter().map(entry).collect::<Map<_, _>>().into()
        }
        // Dates, times and decimals, in their printed form.
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
    fn numbers_that_are_none_are_null_and_a_text_that_names_them_stays() {
        for (text, wanted) in [
            (
                r#"{"a": NaN, "b": [-Infinity, Infinity], "c": "NaN \" Infinity"}"#,
                json!({"a": null, "b": [null, null], "c": "NaN \" Infinity"}),
            ),
            (r#"{"a": "é\\", "b": NaN}"#, json!({"a": "é\\", "b": null})),
        ] {
            assert_eq!(parse::<Value>(text).unwrap(), wanted);
        }
        assert!(parse::<Value>(r#"{"a": NaNs}"#).is_err() && parse::<Value>(r#"{NaN: 1}"#).is_err());
    }

    #[test]
    fn an_object_over_several_lines_is_named_in_files_that_are_streamed_and_that_are_read_whole() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a.json", "a.jsonl"] {
            let path = dir.path().join(name);
            std::fs::write(&path, "{\n  \"data\": [\n {\"a\": 1}, {\"a\": 2}]\n}\n").unwrap();
            let found = read_rows(&path).unwrap_err().to_string();
            let file: Arc<Path> = path.as_path().into();
            let streamed = next_line(&file, &mut open_text(&path).unwrap(), true, &mut 0).unwrap_err().to_string();
            assert_eq!(found, streamed);
            assert!(found.contains("`data` with 2 objects") && found.contains("jq -c '.[\"data\"][]'"), "{found}");
        }
    }

    #[test]
    fn gzip_is_decompressed_for_every_text_format_and_damage_is_an_error() {
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
    fn the_extension_names_the_format_in_letters_of_either_case() {
        let dir = tempfile::tempdir().unwrap();
        let read = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            read_rows(&path).map(|rows| rows.into_iter().map(|row| row.value).collect::<Vec<_>>())
        };
        assert_eq!(read("A.CSV", "prompt\na\n").unwrap(), [json!({"prompt": "a"})]);
        assert_eq!(read("a.Json", "[{\"prompt\": \"a\"}]").unwrap(), [json!({"prompt": "a"})]);
        assert_eq!(read("rows.ndjson", "{\"prompt\": \"a\"}\n").unwrap(), [json!({"prompt": "a"})]);
        let error = read("A.PARQUET", "PAR1").unwrap_err().to_string();
        assert!(error.contains("not valid Parquet"), "{error}");
    }

    #[test]
    fn text_of_another_format_is_an_error_that_names_the_extension_or_says_where_arrays_are_read() {
        let failure = |name: &str, text: &str| parse_line(&Path::new(name).into(), 1, text).unwrap_err().to_string();
        assert_eq!(
            failure("rows.tsv", "prompt\tanswer"),
            "rows.tsv: line 1: expected a JSON object on each line, as in every file whose name does not end in .json, .csv or \
             .parquet, found one that ends in .tsv and is not JSON"
        );
        let broken = failure("rows.jsonl", "{");
        assert!(broken.starts_with("rows.jsonl: line 1: not valid JSON: "), "{broken}");
        let array =
            "line 1: expected a JSON object, found an array; an array is read from a file whose name ends in .json";
        for text in ["[{\"prompt\": \"a\"}]", "["] {
            assert_eq!(failure("arr.jsonl", text), format!("arr.jsonl: {array}"));
        }
        assert_eq!(failure("a.jsonl", "7"), "a.jsonl: line 1: expected a JSON object, found 7");
    }

    #[test]
    fn a_decompression_bomb_is_refused_within_bounded_memory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bomb.jsonl.gz");
        // 80 MiB in 80 KB, above SMALL_TEXT.
        let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
        (0..80).for_each(|_| packed.write_all(&vec![b' '; 1 << 20]).unwrap());
        std::fs::write(&path, packed.finish().unwrap()).unwrap();
        let mut read = 0;
        let streamed = next_line(&path.as_path().into(), &mut open_text(&path).unwrap(), true, &mut read);
        for error in [read_rows(&path).unwrap_err(), streamed.unwrap_err()] {
            let error = error.to_string();
            assert!(
                error.contains("bomb.jsonl.gz: cannot read: it decompresses to more than 67108864 bytes"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_named_pipe_instead_of_a_file_is_refused_at_once() {
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
    fn a_blank_cell_in_a_column_of_lists_is_null() {
        let rows = csv("prompt,prompt_ids\nx,\ny, \nz,\"[1, 2]\"\n").unwrap();
        let ids: Vec<&Value> = rows.iter().map(|row| &row.value["prompt_ids"]).collect();
        assert_eq!(ids, [&Value::Null, &Value::Null, &serde_json::json!([1, 2])]);
        let text = csv("prompt,answer\nx,\n").unwrap();
        assert_eq!(text[0].value["answer"], "", "an empty string in a column of text");
    }

    #[test]
    fn csv_cells_are_text_and_lists_are_json() {
        let text = "prompt,input_ids,n\r\n\"a, \"\"b\"\"\nc\",\"[1, 2]\",007\r\n\r\n[3],[],\n";
        let rows = csv(text).unwrap();
        let values: Vec<&Value> = rows.iter().map(|row| &row.value).collect();
        let first = json!({"prompt": "a, \"b\"\nc", "input_ids": [1, 2], "n": "007"});
        assert_eq!(values, [&first, &json!({"prompt": "[3]", "input_ids": [], "n": ""})]);
        assert_eq!(rows.iter().map(|row| row.place.to_string()).collect::<Vec<_>>(), ["line 2", "line 5"]);
    }

    #[test]
    fn a_csv_cell_of_messages_in_json_is_read_as_messages_and_other_text_as_it_is() {
        let messages = "[{\"role\": \"user\", \"content\": \"x\"}]";
        for name in ["prompt", "completion", "chosen", "rejected"] {
            let read = |text: &str| cell(name, text);
            assert_eq!(read(messages), Ok(json!([{"role": "user", "content": "x"}])), "{name}");
            assert_eq!(read(&format!("\n{messages} ")), read(messages));
            for text in ["[{\"n\": 1}]", "[{\"role\": 1}, 2]", "[{x", "[]", "[1]", " {\"role\": 1}"] {
                assert_eq!(read(text), Ok(text.into()), "{name}");
            }
            for text in ["[{'role': 'user', 'content': 'x'}]", "[{'content': 'x', 'role': 'user'}]"] {
                let error = format!("field `{name}`: expected a list in JSON, found {text:?}");
                assert_eq!(read(text), Err(error + AS_JSONL));
            }
        }
        assert_eq!(cell("answer", messages), Ok(messages.into()), "a column of rewards is text");
        assert_eq!(cell("labels", "[-100, 7]"), Ok(json!([-100, 7])));
        for (name, text) in [("labels", "positive"), ("labels", "[3"), ("conversations", "id-7"), ("labels", "")] {
            assert_eq!(cell(name, text), Ok(text.into()), "a column of another dataset");
        }
        let rows = csv("prompt,chosen\nq,\"[{\"\"role\"\": \"\"assistant\"\"}]\"\n").unwrap();
        assert_eq!(rows[0].value, json!({"prompt": "q", "chosen": [{"role": "assistant"}]}));
    }

    #[test]
    fn malformed_csv_is_an_error_with_its_line() {
        for (text, message) in [
            ("a,b\n1,2\n3\n", "a.csv: line 3: expected 2 fields, as in the header, found 1"),
            ("a,b\n1,2\n\"x\ny\",2,3\n", "a.csv: line 3: expected 2 fields, as in the header, found 3"),
            ("a,b\n1,2\n\n3,\"4\n5,6\n", "a.csv: line 4: the row has a quote that is never closed"),
            ("a,b,a\n1,2,3\n", "a.csv: line 1: expected distinct column names, found `a` again as column 3"),
            ("prompt,input_ids\nx,1 2\n", "a.csv: line 2: field `input_ids`: expected a list in JSON, found \"1 2\""),
        ] {
            let error = csv(text).unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
        // A quote within a field does not open a quoted field.
        assert_eq!(csv("a,b\n1,5\" tape\n").unwrap()[0].value["b"], "5\" tape");
    }
}
