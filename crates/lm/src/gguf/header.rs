//! The header of a GGUF file: its metadata and the list of its tensors.

use super::{TensorEntry, TensorType, Value};
use rlhf_base::safe_text::beginning;
use rlhf_base::{Error, Result};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::Path;

/// Maximum size of a key or a tensor's name, in bytes.
const MOST_NAME: u64 = 1 << 16;
/// Maximum number of tensors and of keys: far above any model's.
const MOST_ENTRIES: u64 = 1 << 20;
/// Maximum number of elements of a list: far above any vocabulary.
const MOST_ELEMENTS: u64 = 1 << 24;
/// Maximum number of dimensions of a tensor.
const MOST_DIMENSIONS: u32 = 4;
/// Maximum number of elements of a tensor, so that products do not overflow.
const MOST_NUMBERS: u64 = 1 << 48;
const ALIGNMENT: &str = "general.alignment";

pub(super) struct Header {
    pub(super) metadata: BTreeMap<String, Value>,
    pub(super) tensors: BTreeMap<String, TensorEntry>,
}

/// Reads the header from the start of a file.
pub(super) struct Reader<'a> {
    from: BufReader<&'a File>,
    path: &'a Path,
    /// Number of bytes read.
    at: u64,
    /// Size of the file.
    len: u64,
}

impl<'a> Reader<'a> {
    pub(super) fn new(file: &'a File, path: &'a Path) -> Result<Self> {
        let len = file.metadata().map_err(Error::io("read", path))?.len();
        let mut from = BufReader::new(file);
        from.rewind().map_err(Error::io("read", path))?;
        Ok(Self { from, path, at: 0, len })
    }

    pub(super) fn read(mut self) -> Result<Header> {
        if self.bytes::<4>()? != *b"GGUF" {
            return Err(self.error("expected a GGUF file, found another format"));
        }
        let version = self.u32()?;
        match version {
            2 | 3 => {}
            _ if version & 0xffff == 0 => {
                return Err(self.error("expected little-endian numbers, found a big-endian GGUF file"));
            }
            other => return Err(self.error(format!("expected GGUF version 2 or 3, found {other}"))),
        }
        let tensors = self.count("tensors", MOST_ENTRIES, 24)?;
        let keys = self.count("keys", MOST_ENTRIES, 13)?;
        let mut metadata = BTreeMap::new();
        for _ in 0..keys {
            let key = self.text(MOST_NAME)?;
            let value = self.value(&key)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(self.error(format!("the key `{}` is there twice", beginning(&key, 120))));
            }
        }
        let entries: Vec<_> = (0..tensors).map(|_| self.tensor()).collect::<Result<_>>()?;
        let alignment = match metadata.get(ALIGNMENT) {
            None => 32,
            Some(Value::Integer(n)) if (1..=1 << 20).contains(n) && n.count_ones() == 1 => *n as u64,
            Some(other) => {
                return Err(self.error(format!("`{ALIGNMENT}`: expected a power of two, found {}", other.brief())));
            }
        };
        let tensors = self.place(entries, alignment)?;
        Ok(Header { metadata, tensors })
    }

    /// The tensors by name, each within the file.
    fn place(&self, entries: Vec<(String, TensorEntry)>, alignment: u64) -> Result<BTreeMap<String, TensorEntry>> {
        let data = self.at.next_multiple_of(alignment);
        let mut tensors = BTreeMap::new();
        for (name, mut entry) in entries {
            let shown = beginning(&name, 120).into_owned();
            let block = entry.kind.block();
            // At most 2^48 elements of at most 4 bytes.
            let bytes = entry.shape.iter().product::<i64>() as u64 / block.elements as u64 * block.bytes as u64;
            if entry.start % alignment != 0 {
                let message =
                    format!("tensor `{shown}`: expected an offset of a multiple of {alignment}, found {}", entry.start);
                return Err(self.error(message));
            }
            let start = data.checked_add(entry.start);
            match start.and_then(|start| start.checked_add(bytes)) {
                Some(end) if end <= self.len => entry.start += data,
                _ => {
                    let message = format!(
                        "truncated or damaged: the tensor `{shown}` has {bytes} bytes from offset {} of the data, and the file \
                         has {} bytes",
                        entry.start, self.len
                    );
                    return Err(self.error(message));
                }
            }
            if tensors.insert(name, entry).is_some() {
                return Err(self.error(format!("the tensor `{shown}` is there twice")));
            }
        }
        Ok(tensors)
    }

    fn error(&self, message: impl Into<String>) -> Error {
        Error::invalid(self.path, message)
    }

    /// Checks that `bytes` more bytes are in the file.
    fn expect(&self, bytes: u64) -> Result<()> {
        if bytes <= self.len - self.at {
            Ok(())
        } else {
            let needed = self.at.saturating_add(bytes);
            Err(self.error(format!("truncated or damaged: expected {needed} bytes or more, found {}", self.len)))
        }
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.expect(N as u64)?;
        let mut bytes = [0; N];
        self.from.read_exact(&mut bytes).map_err(Error::io("read", self.path))?;
        self.at += N as u64;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.bytes().map(u64::from_le_bytes)
    }

    /// A number of things of at least `size` bytes each, at most `most`.
    fn count(&mut self, things: &str, most: u64, size: u64) -> Result<u64> {
        let count = self.u64()?;
        if count > most {
            return Err(self.error(format!("damaged: expected at most {most} {things}, found {count}")));
        }
        self.expect(count * size)?;
        Ok(count)
    }

    /// A text of at most `most` bytes; other bytes than UTF-8 become U+FFFD.
    fn text(&mut self, most: u64) -> Result<String> {
        let len = self.u64()?;
        self.expect(len)?;
        if len > most {
            return Err(self.error(format!("damaged: expected a text of at most {most} bytes, found {len}")));
        }
        let mut bytes = vec![0; len as usize];
        self.from.read_exact(&mut bytes).map_err(Error::io("read", self.path))?;
        self.at += len;
        Ok(String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
    }

    fn value(&mut self, key: &str) -> Result<Value> {
        const LIST: u32 = 9;
        match self.u32()? {
            LIST => {
                let kind = self.u32()?;
                let count = self.count("elements of a list", MOST_ELEMENTS, least_size(kind))?;
                self.list(kind, count, key)
            }
            kind => self.single(kind, key),
        }
    }

    fn single(&mut self, kind: u32, key: &str) -> Result<Value> {
        Ok(match kind {
            0 => Value::Integer(self.bytes::<1>()?[0].into()),
            1 => Value::Integer(i8::from_le_bytes(self.bytes()?).into()),
            2 => Value::Integer(u16::from_le_bytes(self.bytes()?).into()),
            3 => Value::Integer(i16::from_le_bytes(self.bytes()?).into()),
            4 => Value::Integer(self.u32()?.into()),
            5 => Value::Integer(i32::from_le_bytes(self.bytes()?).into()),
            // The shortest decimal number that is this f32: 1e-5, and not the f64 beside it.
            6 => Value::Number(widened(f32::from_le_bytes(self.bytes()?))),
            7 => Value::Bool(self.bytes::<1>()?[0] != 0),
            8 => Value::Text(self.text(MOST_ELEMENTS)?),
            10 => Value::Integer(i64::try_from(self.u64()?).unwrap_or(i64::MAX)),
            11 => Value::Integer(i64::from_le_bytes(self.bytes()?)),
            12 => Value::Number(f64::from_le_bytes(self.bytes()?)),
            other => {
                let key = beginning(key, 120);
                return Err(self.error(format!("`{key}`: expected a type of value from 0 to 12, found {other}")));
            }
        })
    }

    fn list(&mut self, kind: u32, count: u64, key: &str) -> Result<Value> {
        // Memory grows as elements are read: a false count takes no more than the file has.
        Ok(match kind {
            8 => Value::Texts((0..count).map(|_| self.text(MOST_NAME)).collect::<Result<_>>()?),
            6 | 12 => Value::Numbers(
                (0..count)
                    .map(|_| match self.single(kind, key)? {
                        Value::Number(x) => Ok(x as f32),
                        _ => Ok(f32::NAN),
                    })
                    .collect::<Result<_>>()?,
            ),
            7 => Value::Bools(
                (0..count).map(|_| Ok(self.single(kind, key)? == Value::Bool(true))).collect::<Result<_>>()?,
            ),
            9 => return Err(self.error(format!("`{}`: lists of lists are not supported", beginning(key, 120)))),
            _ => Value::Integers(
                (0..count)
                    .map(|_| match self.single(kind, key)? {
                        Value::Integer(n) => Ok(n),
                        _ => Ok(0),
                    })
                    .collect::<Result<_>>()?,
            ),
        })
    }

    fn tensor(&mut self) -> Result<(String, TensorEntry)> {
        let name = self.text(MOST_NAME)?;
        let shown = beginning(&name, 120).into_owned();
        let dimensions = self.u32()?;
        if !(1..=MOST_DIMENSIONS).contains(&dimensions) {
            let message = format!("tensor `{shown}`: expected 1 to {MOST_DIMENSIONS} dimensions, found {dimensions}");
            return Err(self.error(message));
        }
        let sizes: Vec<u64> = (0..dimensions).map(|_| self.u64()).collect::<Result<_>>()?;
        let numbers = sizes.iter().try_fold(1u64, |product, &n| product.checked_mul(n));
        if sizes.contains(&0) || numbers.is_none_or(|numbers| numbers > MOST_NUMBERS) {
            return Err(self.error(format!("tensor `{shown}`: expected sizes from 1, found {sizes:?}")));
        }
        let kind = TensorType::of(self.u32()?).map_err(|found| {
            self.error(format!(
                "tensor `{shown}`: expected {}, found {found}: this quantization is not supported",
                TensorType::EXPECTED
            ))
        })?;
        let block = kind.block().elements as u64;
        if !sizes[0].is_multiple_of(block) {
            return Err(
                self.error(format!("tensor `{shown}`: expected rows of a multiple of {block}, found {sizes:?}"))
            );
        }
        let shape = sizes.iter().rev().map(|&n| n as i64).collect();
        Ok((name, TensorEntry { kind, shape, part: 0, start: self.u64()? }))
    }
}

/// The least size of a value of this type, in bytes.
fn least_size(kind: u32) -> u64 {
    match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        _ => 8,
    }
}

fn widened(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::NAN)
}
