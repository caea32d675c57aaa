//! Reads GGUF, llama.cpp's format: metadata by key, and tensors, which are dequantized one at a time. Every size is checked before it
//! is used.

mod blocks;
mod header;

pub(crate) use blocks::TensorType;

use crate::{Error, Result, files};
use header::{Header, Reader};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};

/// Number of bytes of a tensor that are read at once.
const READ_AT_ONCE: usize = 1 << 19;

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    /// An integer of any width.
    Integer(i64),
    /// A number, f32 or f64.
    Number(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    Text(String),
    /// A list of integers or truth values.
    Integers(Vec<i64>),
    /// A list of numbers.
    Numbers(Vec<f32>),
    /// A list of texts.
    Texts(Vec<String>),
}

impl Value {
    /// Names the value for an error message.
    pub(crate) fn brief(&self) -> String {
        match self {
            Value::Integer(n) => n.to_string(),
            Value::Number(x) => x.to_string(),
            Value::Bool(value) => value.to_string(),
            Value::Text(text) => format!("{:?}", crate::safe_text::beginning(text, 120)),
            Value::Integers(list) => format!("a list of {} integers", list.len()),
            Value::Numbers(list) => format!("a list of {} numbers", list.len()),
            Value::Texts(list) => format!("a list of {} texts", list.len()),
        }
    }
}

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorEntry {
    /// Type of its elements.
    pub(crate) kind: TensorType,
    /// Its shape in PyTorch's order: the last dimension is contiguous.
    pub(crate) shape: Vec<i64>,
    /// Position of its first byte in the file.
    start: u64,
}

/// An open GGUF file.
#[derive(Debug)]
pub(crate) struct Gguf {
    path: PathBuf,
    file: File,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, TensorEntry>,
}

impl Gguf {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// If it is no GGUF file of version 2 or 3, is truncated or damaged, or holds a tensor of a type that is not supported; the
    /// message names what is wrong.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = files::open(path)?;
        let Header { metadata, tensors } = Reader::new(&file, path)?.read()?;
        Ok(Self { path: path.to_path_buf(), file, metadata, tensors })
    }

    /// The path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The metadata, in the order of its keys.
    pub(crate) fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// The tensors, in the order of their names.
    pub(crate) fn tensors(&self) -> &BTreeMap<String, TensorEntry> {
        &self.tensors
    }

    /// Returns an error about this file.
    pub(crate) fn error(&self, message: impl Into<String>) -> Error {
        Error::invalid(&self.path, message)
    }

    fn wrong(&self, key: &str, expected: &str, found: &Value) -> Error {
        self.error(format!("`{key}`: expected {expected}, found {}", found.brief()))
    }

    /// The text of `key`, if it is set.
    pub(crate) fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, "a text", other)),
        }
    }

    /// The integer of `key`, if it is set.
    pub(crate) fn integer(&self, key: &str) -> Result<Option<i64>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Integer(n)) => Ok(Some(*n)),
            Some(other) => Err(self.wrong(key, "an integer", other)),
        }
    }

    /// The number of `key`, if it is set.
    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Number(x)) if x.is_finite() => Ok(Some(*x)),
            Some(Value::Integer(n)) => Ok(Some(*n as f64)),
            Some(other) => Err(self.wrong(key, "a finite number", other)),
        }
    }

    /// The truth value of `key`, if it is set.
    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(self.wrong(key, "true or false", other)),
        }
    }

    /// The texts of `key`, if it is set.
    pub(crate) fn texts(&self, key: &str) -> Result<Option<&[String]>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Texts(list)) => Ok(Some(list)),
            Some(other) => Err(self.wrong(key, "a list of texts", other)),
        }
    }

    /// The numbers of `key`, if it is set.
    pub(crate) fn numbers(&self, key: &str) -> Result<Option<&[f32]>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Numbers(list)) => Ok(Some(list)),
            Some(other) => Err(self.wrong(key, "a list of numbers", other)),
        }
    }

    /// The integers of `key`, if it is set.
    pub(crate) fn integers(&self, key: &str) -> Result<Option<&[i64]>> {
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
    pub(crate) fn read(&self, name: &str, kind: Kind) -> Result<Tensor> {
        let entry =
            self.tensors.get(name).ok_or_else(|| self.error(format!("expected the tensor `{name}`, found none")))?;
        let tensor = Tensor::f_empty(entry.shape.as_slice(), (kind, Device::Cpu))?;
        let flat = tensor.f_view([-1])?;
        let block = entry.kind.block();
        let at_once = READ_AT_ONCE / block.bytes * block.bytes;
        let mut left = flat.size()[0] as usize / block.elements * block.bytes;
        let (mut bytes, mut place, mut filled) = (vec![0; at_once.min(left)], entry.start, 0);
        while left > 0 {
            let part = &mut bytes[..at_once.min(left)];
            self.file.read_exact_at(part, place).map_err(Error::io("read", &self.path))?;
            let numbers = entry.kind.dequantize(part)?;
            let count = numbers.size()[0];
            flat.f_narrow(0, filled, count)?.f_copy_(&numbers)?;
            (left, place, filled) = (left - part.len(), place + part.len() as u64, filled + count);
        }
        Ok(tensor)
    }
}
