//! Requests and replies as bytes: a line of JSON each, followed by the frames that it announces.
//!
//! A frame is its number of bytes, 8 bytes little-endian, and then these bytes. What a client announces is not allocated before it arrives.

use super::arrays::{Array, Dtype};
use super::failure::Failure;
use serde_json::{Map, Value, json};
use std::io::{self, BufRead, Read, Write};

/// Most bytes of a line.
pub(super) const MOST_LINE: usize = 8 << 20;
/// Most bytes of all frames of a request.
pub(super) const MOST_BYTES: u64 = 256 << 20;
/// Most frames of a request.
pub(super) const MOST_FRAMES: usize = 64;

/// A request.
#[derive(Debug, PartialEq)]
pub(super) struct Request {
    pub(super) id: Value,
    pub(super) method: String,
    pub(super) params: Map<String, Value>,
    pub(super) frames: Vec<Array>,
}

/// One thing that arrived.
#[derive(Debug, PartialEq)]
pub(super) enum Incoming {
    /// A request that can be read.
    Request(Request),
    /// A request that cannot be read; the place where the next one begins is known.
    Refused(Value, Failure),
    /// A request that cannot be read; the place where the next one begins is unknown.
    Lost(Value, Failure),
    /// The client sends nothing more.
    End,
}

/// A frame as its line announces it.
struct Announced {
    dtype: Dtype,
    shape: Vec<usize>,
    /// Number of its bytes; `None` if dtype or shape are wrong.
    bytes: Option<u64>,
}

/// Reads the next request, and hands each thing that arrives to `take`, which returns false to end.
pub(super) fn read(input: &mut impl BufRead, mut take: impl FnMut(Incoming) -> bool) {
    loop {
        let incoming = match read_line(input) {
            Ok(Some(Ok(line))) if line.trim_ascii().is_empty() => continue,
            Ok(Some(Ok(line))) => match head(&line) {
                Ok((request, announced)) => with_frames(input, request, &announced),
                Err(wrong) => {
                    let Wrong { id, failure, announced } = *wrong;
                    // The client gets its reply before the frames that it announced are skipped.
                    if !take(Incoming::Refused(id.clone(), failure)) {
                        return;
                    }
                    match skip(input, &announced) {
                        Ok(()) => continue,
                        Err(failure) => Incoming::Lost(id, failure),
                    }
                }
            },
            Ok(Some(Err(failure))) => Incoming::Refused(Value::Null, failure),
            Ok(None) => Incoming::End,
            Err(error) => Incoming::Lost(Value::Null, Failure::protocol(format!("the connection failed: {error}"))),
        };
        let is_last = matches!(incoming, Incoming::End | Incoming::Lost(..));
        if !take(incoming) || is_last {
            return;
        }
    }
}

/// The bytes of the next line; a failure where it is too long, or the input ends within it; `None` at the end of the input.
fn read_line(input: &mut impl BufRead) -> io::Result<Option<Result<Vec<u8>, Failure>>> {
    let mut line = Vec::new();
    if input.by_ref().take(MOST_LINE as u64 + 1).read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    if line.last() == Some(&b'\n') {
        return Ok(Some(Ok(line)));
    }
    if line.len() <= MOST_LINE {
        return Ok(Some(Err(Failure::protocol(
            "the input ended within a line: expected one that ends with a line feed",
        ))));
    }
    // The line is too long: its rest is read and dropped.
    loop {
        let part = input.fill_buf()?;
        let end = part.iter().position(|&byte| byte == b'\n');
        let used = end.map_or(part.len(), |end| end + 1);
        let is_over = end.is_some() || part.is_empty();
        input.consume(used);
        if is_over {
            let message = format!("a line of more than {MOST_LINE} bytes: expected large arrays as frames");
            return Ok(Some(Err(Failure::protocol(message))));
        }
    }
}

/// A request without its frames, and the frames that it announces.
type Head = (Request, Vec<Announced>);

/// A line that is not a valid request, with the frames that follow it.
struct Wrong {
    id: Value,
    failure: Failure,
    announced: Vec<Announced>,
}

/// The request of a line, without its frames.
fn head(line: &[u8]) -> Result<Head, Box<Wrong>> {
    let no_object = |message: String| {
        Err(Box::new(Wrong { id: Value::Null, failure: Failure::protocol(message), announced: Vec::new() }))
    };
    let mut line = match serde_json::from_slice(line) {
        Ok(Value::Object(line)) => line,
        Ok(_) => {
            return no_object("expected a request as a JSON object with `id` and `method`, found another value".into());
        }
        Err(error) => return no_object(format!("expected a request as one line of JSON: {error}")),
    };
    let frames = line.remove("frames");
    let list = frames.as_ref().and_then(Value::as_array);
    let announced: Vec<Announced> = list.into_iter().flatten().map(announced).collect();
    let id = match line.get("id") {
        Some(id @ (Value::String(_) | Value::Number(_))) => id.clone(),
        _ => Value::Null,
    };
    let request = if matches!(frames, None | Some(Value::Null | Value::Array(_))) {
        check(&announced).and_then(|()| without_frames(line))
    } else {
        Err(Failure::protocol("`frames`: expected a list of objects with `dtype` and `shape`"))
    };
    match request {
        Ok(request) => Ok((request, announced)),
        Err(failure) => Err(Box::new(Wrong { id, failure, announced })),
    }
}

/// The request with these fields.
fn without_frames(mut line: Map<String, Value>) -> Result<Request, Failure> {
    let id = match line.remove("id") {
        Some(id @ (Value::String(_) | Value::Number(_))) => id,
        Some(_) => return Err(Failure::protocol("`id`: expected a number or a text")),
        None => Value::Null,
    };
    let Some(Value::String(method)) = line.remove("method") else {
        return Err(Failure::protocol("`method`: expected a text, the name of what to do"));
    };
    let params = match line.remove("params") {
        Some(Value::Object(params)) => params,
        None | Some(Value::Null) => Map::new(),
        Some(_) => return Err(Failure::protocol("`params`: expected an object")),
    };
    match line.keys().next() {
        Some(name) => Err(Failure::protocol(format!("`{name}`: expected id, method, params and frames alone"))),
        None => Ok(Request { id, method, params, frames: Vec::new() }),
    }
}

fn announced(frame: &Value) -> Announced {
    let dtype = frame.get("dtype").and_then(Value::as_str).and_then(Dtype::named);
    let shape = frame.get("shape").and_then(Value::as_array);
    let shape: Option<Vec<usize>> = shape.and_then(|shape| shape.iter().map(|n| Some(n.as_u64()? as usize)).collect());
    let (Some(dtype), Some(shape)) = (dtype, shape) else {
        return Announced { dtype: Dtype::Bool, shape: Vec::new(), bytes: None };
    };
    let size = |bytes: u64, &n: &usize| bytes.checked_mul(n as u64);
    let bytes = shape.iter().try_fold(dtype.size() as u64, size).unwrap_or(u64::MAX);
    Announced { dtype, shape, bytes: Some(bytes) }
}

fn check(announced: &[Announced]) -> Result<(), Failure> {
    if let Some(at) = announced.iter().position(|frame| frame.bytes.is_none()) {
        let names = Dtype::names().join(", ");
        return Err(Failure::protocol(format!(
            "`frames`: number {at}: expected a dtype of {names}, and a shape of whole numbers"
        )));
    }
    // A frame with a dimension of 0 has no bytes, but its other dimensions could still ask for any number of rows: 0 counts as 1.
    let frame_bytes = |frame: &Announced| {
        let size = |bytes: u64, &n: &usize| bytes.saturating_mul((n as u64).max(1));
        frame.shape.iter().fold(frame.dtype.size() as u64, size)
    };
    let bytes = announced.iter().fold(0u64, |sum, frame| sum.saturating_add(frame_bytes(frame)));
    if announced.len() > MOST_FRAMES {
        let found = announced.len();
        return Err(Failure::protocol(format!("`frames`: expected at most {MOST_FRAMES}, found {found}")));
    }
    if bytes > MOST_BYTES {
        return Err(Failure::protocol(format!(
            "`frames`: expected at most {MOST_BYTES} bytes in one request, found {bytes}: send the rows in several requests"
        )));
    }
    Ok(())
}

/// Reads the length of the next frame, which must be the one that was announced.
fn read_length(input: &mut impl BufRead, announced: &Announced) -> Result<u64, Failure> {
    let mut length = [0; 8];
    input
        .read_exact(&mut length)
        .map_err(|_| Failure::protocol("the input ended before a frame that was announced"))?;
    let found = u64::from_le_bytes(length);
    let expected = match announced.bytes {
        Some(bytes) if bytes != found => format!("the length {bytes} of its dtype and shape"),
        None if found > MOST_BYTES => format!("a length of at most {MOST_BYTES}"),
        _ => return Ok(found),
    };
    Err(Failure::protocol(format!(
        "a frame: expected {expected}, found {found}: the session ends, as its next request cannot be found"
    )))
}

/// The request with its frames.
fn with_frames(input: &mut impl BufRead, mut request: Request, announced: &[Announced]) -> Incoming {
    for frame in announced {
        let length = match read_length(input, frame) {
            Ok(length) => length,
            Err(failure) => return Incoming::Lost(request.id, failure),
        };
        let mut bytes = Vec::new();
        match input.by_ref().take(length).read_to_end(&mut bytes) {
            Ok(read) if read as u64 == length => {}
            _ => return Incoming::Lost(request.id, Failure::protocol("the input ended within a frame")),
        }
        request.frames.push(Array { dtype: frame.dtype, shape: frame.shape.clone(), bytes });
    }
    Incoming::Request(request)
}

/// Reads and drops the frames of a request that is refused.
fn skip(input: &mut impl BufRead, announced: &[Announced]) -> Result<(), Failure> {
    for frame in announced {
        let length = read_length(input, frame)?;
        let copied = io::copy(&mut input.by_ref().take(length), &mut io::sink());
        if copied.ok() != Some(length) {
            return Err(Failure::protocol("the input ended within a frame"));
        }
    }
    Ok(())
}

/// The result of a request, with its arrays.
#[derive(Debug, Default)]
pub(super) struct Reply {
    result: Map<String, Value>,
    frames: Vec<Array>,
    /// Arrays are lists in the line, for clients that read no frames.
    inline: bool,
}

impl Reply {
    /// A reply whose arrays are lists in the line if `inline`, else frames.
    pub(super) fn new(inline: bool) -> Self {
        Self { inline, ..Self::default() }
    }

    pub(super) fn set(&mut self, name: &str, value: impl Into<Value>) {
        self.result.insert(name.into(), value.into());
    }

    /// Adds an array to the result.
    pub(super) fn array(&mut self, name: &str, array: Array) {
        let value = self.array_value(array);
        self.set(name, value);
    }

    /// The value that stands for an array in the result.
    pub(super) fn array_value(&mut self, array: Array) -> Value {
        if self.inline {
            return array.to_json();
        }
        self.frames.push(array);
        json!({"frame": self.frames.len() - 1})
    }

    /// The value that stands for rows of different lengths, whose numbers are `flat`, one row after another.
    pub(super) fn rows_value(&mut self, lengths: &[usize], flat: Array) -> Value {
        let mut value = self.array_value(flat);
        if !self.inline {
            value["lengths"] = json!(lengths);
            return value;
        }
        let mut rest = value.as_array().map_or(&[][..], Vec::as_slice);
        let rows = lengths.iter().map(|&length| {
            let (row, after) = rest.split_at(length.min(rest.len()));
            rest = after;
            Value::from(row)
        });
        rows.collect()
    }

    /// Adds rows of token ids to the result.
    pub(super) fn id_rows(&mut self, name: &str, rows: &[Vec<i64>]) {
        let lengths: Vec<usize> = rows.iter().map(Vec::len).collect();
        let value = self.rows_value(&lengths, Array::from_ids(&rows.concat()));
        self.set(name, value);
    }
}

/// Writes the reply to a request.
pub(super) fn write(out: &mut impl Write, id: &Value, reply: Result<Reply, Failure>) -> io::Result<()> {
    let mut line = json!({"id": id});
    let mut frames = Vec::new();
    match reply {
        Ok(reply) => {
            line["result"] = reply.result.into();
            frames = reply.frames;
        }
        Err(failure) => line["error"] = failure.to_json(),
    }
    if !frames.is_empty() {
        line["frames"] = frames.iter().map(Array::announced).collect();
    }
    serde_json::to_writer(&mut *out, &line)?;
    out.write_all(b"\n")?;
    for frame in &frames {
        out.write_all(&(frame.bytes.len() as u64).to_le_bytes())?;
        out.write_all(&frame.bytes)?;
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(bytes: &[u8]) -> Vec<Incoming> {
        let mut arrived = Vec::new();
        read(&mut io::BufReader::new(bytes), |incoming| {
            arrived.push(incoming);
            true
        });
        arrived
    }

    fn framed(line: &str, frames: &[&[u8]]) -> Vec<u8> {
        let mut bytes = format!("{line}\n").into_bytes();
        for frame in frames {
            bytes.extend((frame.len() as u64).to_le_bytes());
            bytes.extend(*frame);
        }
        bytes
    }

    #[test]
    fn a_request_has_its_frames_and_the_next_one_follows() {
        let line = r#"{"id": 1, "method": "step", "params": {"scores": {"frame": 0}}, "frames": [{"dtype": "bool", "shape": [2]}]}"#;
        let bytes = [framed(line, &[&[1, 0]]), b"\n{\"id\": \"b\", \"method\": \"stop\"}\n".to_vec()].concat();
        let arrived = all(&bytes);
        let [Incoming::Request(step), Incoming::Request(stop), Incoming::End] = &arrived[..] else {
            panic!("{arrived:?}")
        };
        assert_eq!((step.method.as_str(), step.frames[0].bytes.as_slice()), ("step", &[1, 0][..]));
        assert_eq!((&stop.id, stop.method.as_str()), (&json!("b"), "stop"));
    }

    #[test]
    fn what_is_no_request_is_refused_and_the_next_one_is_read() {
        let stop = "{\"id\": 9, \"method\": \"stop\"}\n";
        for (line, expected) in [
            ("{\"id\": 1, \"method\"\n", "expected a request as one line of JSON"),
            ("[1, NaN]\n", "expected a request as one line of JSON"),
            ("[1]\n", "as a JSON object"),
            ("{\"id\": {}, \"method\": \"stop\"}\n", "`id`"),
            ("{\"id\": 1}\n", "`method`"),
            ("{\"id\": 1, \"method\": \"stop\", \"params\": 3}\n", "`params`"),
            ("{\"id\": 1, \"method\": \"stop\", \"frames\": 3}\n", "`frames`"),
            (
                "{\"id\": 1, \"method\": \"stop\", \"frames\": [{\"dtype\": \"f16\", \"shape\": [1]}]}\n\x02\0\0\0\0\0\0\0xx",
                "number 0",
            ),
            ("{\"id\": 1, \"method\": \"stop\", \"more\": 1}\n", "`more`"),
        ] {
            let arrived = all(format!("{line}{stop}").as_bytes());
            let [Incoming::Refused(_, failure), Incoming::Request(_), Incoming::End] = &arrived[..] else {
                panic!("{line}: {arrived:?}")
            };
            assert!(failure.message().contains(expected), "{line}: {failure:?}");
        }
        let deep = "[".repeat(100_000);
        let long = format!("{{\"id\": \"{}\"}}\n", "x".repeat(MOST_LINE));
        for line in [format!("{deep}\n"), long] {
            let arrived = all(format!("{line}{stop}").as_bytes());
            assert!(
                matches!(&arrived[..], [Incoming::Refused(..), Incoming::Request(_), Incoming::End]),
                "{}",
                line.len()
            );
        }
        let half = all(b"{\"id\": 1, \"method\": \"stop\"");
        assert!(
            matches!(&half[..], [Incoming::Refused(_, failure), Incoming::End] if failure.message().contains("ended within a line"))
        );
    }

    #[test]
    fn the_frames_of_a_line_that_is_refused_are_skipped() {
        let line = r#"{"id": 1, "method": "step", "more": 1, "frames": [{"dtype": "bool", "shape": [2]}]}"#;
        let bytes = [framed(line, &[b"\n\n"]), b"{\"id\": 2, \"method\": \"stop\"}\n".to_vec()].concat();
        let arrived = all(&bytes);
        let [Incoming::Refused(id, _), Incoming::Request(stop), Incoming::End] = &arrived[..] else {
            panic!("{arrived:?}")
        };
        assert_eq!((id, &stop.id), (&json!(1), &json!(2)));
        // No bytes, but more rows than there is memory for.
        let empty = r#"{"id": 1, "method": "step", "frames": [{"dtype": "int64", "shape": [1099511627776, 0]}]}"#;
        let arrived = all(&framed(empty, &[b""]));
        let [Incoming::Refused(_, failure), Incoming::End] = &arrived[..] else { panic!("{arrived:?}") };
        assert!(failure.message().contains("expected at most 268435456 bytes"), "{failure:?}");
    }

    #[test]
    fn frames_that_are_too_large_are_refused_at_once_and_skipped() {
        let line =
            format!(r#"{{"id": 1, "method": "step", "frames": [{{"dtype": "bool", "shape": [{}]}}]}}"#, MOST_BYTES + 1);
        let mut bytes = format!("{line}\n").into_bytes();
        bytes.extend((MOST_BYTES + 1).to_le_bytes());
        let after = io::Cursor::new(b"{\"id\": 2, \"method\": \"stop\"}\n".to_vec());
        let stream = bytes.chain(io::repeat(0).take(MOST_BYTES + 1)).chain(after);
        let mut arrived = Vec::new();
        read(&mut io::BufReader::new(stream), |incoming| {
            arrived.push(incoming);
            true
        });
        let [Incoming::Refused(_, failure), Incoming::Request(_), Incoming::End] = &arrived[..] else {
            panic!("{arrived:?}")
        };
        assert!(failure.message().contains("expected at most 268435456 bytes"), "{failure:?}");
        let huge =
            r#"{"id": 1, "method": "step", "frames": [{"dtype": "int64", "shape": [4294967295, 4294967295, 9]}]}"#;
        assert!(matches!(&all(format!("{huge}\n").as_bytes())[..], [Incoming::Refused(..), Incoming::Lost(..)]));
    }

    #[test]
    fn a_frame_of_another_length_ends_the_session() {
        let line = r#"{"id": 1, "method": "step", "frames": [{"dtype": "int64", "shape": [2]}]}"#;
        for (frame, expected) in [(&[0u8; 15][..], "expected the length 16"), (&[0; 17], "expected the length 16")] {
            let arrived = all(&framed(line, &[frame]));
            let [Incoming::Lost(id, failure)] = &arrived[..] else { panic!("{arrived:?}") };
            assert!(*id == json!(1) && failure.message().contains(expected), "{failure:?}");
        }
        let mut cut = framed(line, &[&[0; 16]]);
        cut.truncate(cut.len() - 1);
        assert!(matches!(&all(&cut)[..], [Incoming::Lost(_, failure)] if failure.message().contains("within a frame")));
    }
}
