//! Reads and writes GGUF, llama.cpp's format: metadata by key, and tensors, which are dequantized one at a time. Every size is checked before
//! it is used.

mod blocks;
mod header;
mod quantize;
mod write;

pub use blocks::TensorType;
pub use write::{GgufTensor, Stored, write};

use header::{Header, Reader};
use rlhf_base::safe_text::{beginning, entries};
use rlhf_base::{Error, Result, files};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};

/// Number of bytes of a tensor that are read at once.
const READ_AT_ONCE: usize = 1 << 19;

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// An integer of any width.
    Integer(i64),
    /// A number, f32 or f64.
    Number(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    Text(String),
    /// A list of integers.
    Integers(Vec<i64>),
    /// A list of truth values.
    Bools(Vec<bool>),
    /// A list of numbers.
    Numbers(Vec<f32>),
    /// A list of texts.
    Texts(Vec<String>),
}

impl Value {
    /// Names the value for an error message. Of numbers and texts in lists it has only the count, since they may be long.
    pub fn brief(&self) -> String {
        match self {
            Value::Integer(n) => n.to_string(),
            Value::Number(x) => x.to_string(),
            Value::Bool(value) => value.to_string(),
            Value::Text(text) => format!("{:?}", beginning(text, 120)),
            Value::Integers(list) => entries(list),
            Value::Bools(list) => entries(list),
            Value::Numbers(list) => format!("a list of {} numbers", list.len()),
            Value::Texts(list) => format!("a list of {} texts", list.len()),
        }
    }
}

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Type of its elements.
    pub kind: TensorType,
    /// Its shape in PyTorch's order: the last dimension is contiguous.
    pub shape: Vec<i64>,
    /// Index of its part of a split model.
    part: usize,
    /// Position of its first byte in the file.
    start: u64,
}

/// An open GGUF file, or all parts of a model that llama-gguf-split has divided.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    parts: Vec<Part>,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, TensorEntry>,
}

/// One file.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    file: File,
}

impl Part {
    fn open(path: &Path) -> Result<(Self, Header)> {
        let file = files::open(path)?;
        let header = Reader::new(&file, path)?.read()?;
        Ok((Self { path: path.to_path_buf(), file }, header))
    }
}

/// Maximum number of parts of a split model, by the digits in llama.cpp's names.
const MOST_PARTS: i64 = 99_999;

/// Keys of the parts of a split model.
const SPLIT_COUNT: &str = "split.count";
const SPLIT_NO: &str = "split.no";
const SPLIT_TENSORS: &str = "split.tensors.count";

impl Gguf {
    /// Opens a file and reads its header. If `path` is the first part of a split model, also opens the other parts in the same folder.
    ///
    /// # Errors
    /// If it is no GGUF file of version 2 or 3, is truncated or damaged, or holds a tensor of a type that is not supported; if a part of
    /// a split model is missing, or is not the one that its name says. The message names what is wrong.
    pub fn open(path: &Path) -> Result<Self> {
        let (part, Header { metadata, tensors }) = Part::open(path)?;
        let mut all = Self { path: path.to_path_buf(), parts: vec![part], metadata, tensors };
        let count = all.integer(SPLIT_COUNT)?.unwrap_or(1);
        if count > 1 {
            for (at, path) in all.other_parts(count)?.into_iter().enumerate() {
                all.add(&path, at as i64 + 1, count)?;
            }
            let expected = all.integer(SPLIT_TENSORS)?.unwrap_or(all.tensors.len() as i64);
            if all.tensors.len() as i64 != expected {
                let found = all.tensors.len();
                return Err(
                    all.error(format!("`{SPLIT_TENSORS}`: expected {expected} tensors in all parts, found {found}"))
                );
            }
        }
        Ok(all)
    }

    /// The paths of the parts after the first, by llama.cpp's names: `NAME-00002-of-00003.gguf`.
    fn other_parts(&self, count: i64) -> Result<Vec<PathBuf>> {
        let end = |number: i64| format!("-{number:05}-of-{count:05}.gguf");
        let number = self.integer(SPLIT_NO)?.unwrap_or(0);
        if count > MOST_PARTS {
            return Err(self.error(format!("`{SPLIT_COUNT}`: expected at most {MOST_PARTS} parts, found {count}")));
        }
        let name = self.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        match name.strip_suffix(&end(1)).filter(|_| number == 0) {
            Some(start) => {
                Ok((2..=count).map(|number| self.path.with_file_name(format!("{start}{}", end(number)))).collect())
            }
            None => {
                let expected = format!("expected the first of {count} parts, whose name ends with {}", end(1));
                Err(self.error(format!("{expected}, found part {}", number.saturating_add(1))))
            }
        }
    }

    /// Adds the tensors of the part in `path`, whose index is `number`.
    fn add(&mut self, path: &Path, number: i64, count: i64) -> Result<()> {
        let (part, Header { metadata, tensors }) = Part::open(path)?;
        for (key, expected) in [(SPLIT_NO, number), (SPLIT_COUNT, count)] {
            let expected = Value::Integer(expected);
            let found = metadata.get(key);
            if found != Some(&expected) {
                let found = found.map_or_else(|| "none".into(), Value::brief);
                return Err(Error::invalid(path, format!("`{key}`: expected {}, found {found}", expected.brief())));
            }
        }
        for (name, mut entry) in tensors {
            entry.part = self.parts.len();
            let shown = beginning(&name, 120).into_owned();
            if self.tensors.insert(name, entry).is_some() {
                return Err(Error::invalid(path, format!("the tensor `{shown}` is in another part too")));
            }
        }
        self.parts.push(part);
        Ok(())
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The metadata, in the order of its keys.
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// The tensors, in the order of their names.
    pub fn tensors(&self) -> &BTreeMap<String, TensorEntry> {
        &self.tensors
    }

    /// Returns an error about this file.
    pub fn error(&self, message: impl Into<String>) -> Error {
        Error::invalid(&self.path, message)
    }

    fn wrong(&self, key: &str, expected: &str, found: &Value) -> Error {
        self.error(format!("`{key}`: expected {expected}, found {}", found.brief()))
    }

    /// The text of `key`, if it is set.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, "a text", other)),
        }
    }

    /// The integer of `key`, if it is set.
    pub fn integer(&self, key: &str) -> Result<Option<i64>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Integer(n)) => Ok(Some(*n)),
            Some(other) => Err(self.wrong(key, "an integer", other)),
        }
    }

    /// The number of `key`, if it is set.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Number(x)) if x.is_finite() => Ok(Some(*x)),
            Some(Value::Integer(n)) => Ok(Some(*n as f64)),
            Some(other) => Err(self.wrong(key, "a finite number", other)),
        }
    }

    /// The truth value of `key`, if it is set.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(self.wrong(key, "true or false", other)),
        }
    }

    /// The truth values of `key`, if it is set; they may be the integers 0 and 1.
    pub fn flags(&self, key: &str) -> Result<Option<Vec<bool>>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Bools(list)) => Ok(Some(list.clone())),
            Some(Value::Integers(list)) => match list.iter().find(|n| ![0, 1].contains(*n)) {
                Some(n) => Err(self.error(format!("`{key}`: expected truth values, found {n}"))),
                None => Ok(Some(list.iter().map(|n| *n == 1).collect())),
            },
            Some(other) => Err(self.wrong(key, "a list of truth values", other)),
        }
    }

    /// The texts of `key`, if it is set.
    pub fn texts(&self, key: &str) -> Result<Option<&[String]>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Texts(list)) => Ok(Some(list)),
            Some(other) => Err(self.wrong(key, "a list of texts", other)),
        }
    }

    /// The numbers of `key`, if it is set.
    pub fn numbers(&self, key: &str) -> Result<Option<&[f32]>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Numbers(list)) => Ok(Some(list)),
            Some(other) => Err(self.wrong(key, "a list of numbers", other)),
        }
    }

    /// The integers of `key`, if it is set.
    pub fn integers(&self, key: &str) -> Result<Option<&[i64]>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Integers(list)) => Ok(Some(list)),
            Some(other) => Err(self.wrong(key, "a list of integers", other)),
        }
    }

    /// Reads the tensor `name` in `kind`, dequantized in f32.
    ///
    /// # Errors
    /// If there is no such tensor, the file cannot be read, or there is not enough memory.
    pub fn read(&self, name: &str, kind: Kind) -> Result<Tensor> {
        let entry = self.entry(name)?;
        self.read_from(entry, &entry.shape, 0, kind)
    }

    /// Reads the entry `index` of the first dimension of the tensor `name`, which has three dimensions, as [`Gguf::read`].
    ///
    /// # Errors
    /// As [`Gguf::read`]; if there is no such entry.
    pub fn read_entry(&self, name: &str, index: i64, kind: Kind) -> Result<Tensor> {
        let entry = self.entry(name)?;
        match entry.shape.as_slice() {
            // Rows are whole blocks.
            [count, rows, width] if (0..*count).contains(&index) => {
                self.read_from(entry, &[*rows, *width], index as u64, kind)
            }
            shape => {
                Err(self.error(format!("tensor `{name}`: expected an entry {index} of matrices, found {shape:?}")))
            }
        }
    }

    fn entry(&self, name: &str) -> Result<&TensorEntry> {
        self.tensors.get(name).ok_or_else(|| self.error(format!("expected the tensor `{name}`, found none")))
    }

    /// Reads a tensor of this shape after `before` others in the numbers of `entry`.
    fn read_from(&self, entry: &TensorEntry, shape: &[i64], before: u64, kind: Kind) -> Result<Tensor> {
        let tensor = Tensor::f_empty(shape, (kind, Device::Cpu))?;
        let (from, flat) = (&self.parts[entry.part], tensor.f_view([-1])?);
        let block = entry.kind.block();
        let at_once = READ_AT_ONCE / block.bytes * block.bytes;
        let mut left = flat.size()[0] as usize / block.elements * block.bytes;
        let start = entry.start + before * left as u64;
        let (mut bytes, mut place, mut filled) = (vec![0; at_once.min(left)], start, 0);
        while left > 0 {
            let part = &mut bytes[..at_once.min(left)];
            from.file.read_exact_at(part, place).map_err(Error::io("read", &from.path))?;
            let numbers = entry.kind.dequantize(part)?;
            let count = numbers.size()[0];
            flat.f_narrow(0, filled, count)?.f_copy_(&numbers)?;
            (left, place, filled) = (left - part.len(), place + part.len() as u64, filled + count);
        }
        Ok(tensor)
    }
}

#[cfg(test)]
mod tests {
    use super::Value;

    #[test]
    fn a_value_is_named_in_a_few_words() {
        for (value, shown) in [
            (Value::Integer(3), "3"),
            (Value::Number(0.5), "0.5"),
            (Value::Bool(true), "true"),
            (Value::Text("a\nb".into()), "\"a\\nb\""),
            (Value::Integers(vec![2, 2, 4, 4]), "[2, 2, 4, 4]"),
            (Value::Integers((1..=9).collect()), "[1, 2, 3, 4, 5, 6, 7, 8, ...]"),
            (Value::Bools(vec![true, false]), "[true, false]"),
            (Value::Numbers(vec![0.5; 3]), "a list of 3 numbers"),
            (Value::Texts(vec!["a".into(); 2]), "a list of 2 texts"),
        ] {
            assert_eq!(value.brief(), shown);
        }
    }
}
