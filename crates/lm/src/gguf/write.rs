//! Writes GGUF files of version 3.

use super::Value;
use super::blocks::TensorType;
use super::quantize::{
    LARGE, SMALL, WriteBlock, five_bits, five_bits_of_groups, five_bits_with_least, four_bits, in_blocks, six_bits,
};
use rlhf_base::{Error, Result};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use tch::{Kind, Tensor};

/// Bytes to which the start of each tensor is padded: llama.cpp's default.
const ALIGNMENT: u64 = 32;

/// Number of elements of a block of Q8_0.
const BLOCK: i64 = 32;

/// Type of the elements of a tensor that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// f32.
    F32,
    /// f16.
    F16,
    /// bf16.
    Bf16,
    /// Eight bits, with a scale in f16 for each 32 numbers.
    Q8_0,
    /// Five bits, with a scale in f16 for each 32 numbers.
    Q5_0,
    /// Five bits, with a scale and a least value in f16 for each 32 numbers.
    Q5_1,
    /// Four bits, with a scale and a least value for each 32 numbers, which have six bits and scales in f16 for 256 numbers.
    Q4K,
    /// Five bits, as `Q4K`.
    Q5K,
    /// Six bits, with a scale for each 16 numbers, which has eight bits and a scale in f16 for 256 numbers.
    Q6K,
}

impl Stored {
    /// llama.cpp's number of the type.
    fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
            Self::Bf16 => 30,
        }
    }

    /// The same type as readers have it.
    fn as_read(self) -> TensorType {
        match self {
            Self::F32 => TensorType::F32,
            Self::F16 => TensorType::F16,
            Self::Bf16 => TensorType::BF16,
            Self::Q8_0 => TensorType::Q8_0,
            Self::Q5_0 => TensorType::Q5_0,
            Self::Q5_1 => TensorType::Q5_1,
            Self::Q4K => TensorType::Q4K,
            Self::Q5K => TensorType::Q5K,
            Self::Q6K => TensorType::Q6K,
        }
    }

    /// Bytes of `numel` elements, which are whole blocks.
    fn bytes(self, numel: u64) -> u64 {
        let block = self.as_read().block();
        numel / block.elements as u64 * block.bytes as u64
    }

    /// The type for rows of this width: this one, or llama.cpp's substitute if the rows are no whole blocks of it.
    #[must_use]
    pub fn of_rows(self, width: i64) -> Self {
        let (large, small) = (width % LARGE as i64 == 0, width % BLOCK == 0);
        match self {
            Self::Q4K if !large => Self::Q5_0.of_rows(width),
            Self::Q5K if !large => Self::Q5_1.of_rows(width),
            Self::Q6K if !large => Self::Q8_0.of_rows(width),
            Self::Q8_0 | Self::Q5_0 | Self::Q5_1 if !small => Self::F16,
            fits => fits,
        }
    }

    /// The bytes of a tensor, whose last dimension is contiguous.
    fn encode(self, tensor: &Tensor) -> Result<Vec<u8>> {
        let blocks = |size: usize, block: WriteBlock| -> Result<Vec<u8>> {
            let numbers = Vec::<f32>::try_from(tensor.to_kind(Kind::Float).f_contiguous()?.f_view([-1])?)?;
            Ok(in_blocks(&numbers, size, block))
        };
        let raw_bytes = |tensor: &Tensor| -> Result<Vec<u8>> {
            let flat = tensor.f_contiguous()?.f_view_dtype(Kind::Uint8)?.f_view([-1])?;
            Ok(Vec::<u8>::try_from(flat)?)
        };
        match self {
            Self::F32 => raw_bytes(&tensor.to_kind(Kind::Float)),
            Self::F16 => raw_bytes(&tensor.to_kind(Kind::Half)),
            Self::Bf16 => raw_bytes(&tensor.to_kind(Kind::BFloat16)),
            Self::Q5_0 => blocks(SMALL, five_bits),
            Self::Q5_1 => blocks(SMALL, five_bits_with_least),
            Self::Q4K => blocks(LARGE, four_bits),
            Self::Q5K => blocks(LARGE, five_bits_of_groups),
            Self::Q6K => blocks(LARGE, six_bits),
            Self::Q8_0 => {
                let blocks = tensor.to_kind(Kind::Float).f_contiguous()?.f_view([-1, BLOCK])?;
                let scales = blocks.abs().amax([1i64].as_slice(), true) / 127.0;
                let scaled = (&blocks / &scales).masked_fill(&scales.eq(0.0), 0.0);
                // Halves are rounded away from 0, as llama.cpp does.
                let codes = scaled.sign() * (scaled.abs() + 0.5).floor();
                let codes = codes.to_kind(Kind::Int8).f_view_dtype(Kind::Uint8)?;
                let scales = scales.to_kind(Kind::Half).f_view_dtype(Kind::Uint8)?;
                raw_bytes(&Tensor::cat(&[scales, codes], 1))
            }
        }
    }
}

/// A tensor that will be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufTensor {
    /// Name.
    pub name: String,
    /// Shape in PyTorch's order.
    pub shape: Vec<i64>,
    /// Type of its elements.
    pub stored: Stored,
}

impl GgufTensor {
    /// Number of its bytes in the file, without padding.
    pub fn bytes(&self) -> u64 {
        self.stored.bytes(self.shape.iter().product::<i64>() as u64)
    }
}

/// Writes a file with `metadata`, in this order, and `tensors`; `read` returns one tensor at a time by its index.
///
/// # Errors
/// If the file exists, or cannot be written.
pub fn write(
    path: &Path,
    metadata: &[(String, Value)],
    tensors: &[GgufTensor],
    read: &mut dyn FnMut(usize) -> Result<Tensor>,
) -> Result<()> {
    let file = File::options().write(true).create_new(true).open(path).map_err(Error::io("create", path))?;
    let failed = || Error::io("write", path);
    let mut out = BufWriter::new(file);
    let header = header(metadata, tensors);
    out.write_all(&header).map_err(failed())?;
    for (i, tensor) in tensors.iter().enumerate() {
        let bytes = tensor.stored.encode(&read(i)?)?;
        out.write_all(&bytes).map_err(failed())?;
        let padding = bytes.len().next_multiple_of(ALIGNMENT as usize) - bytes.len();
        out.write_all(&vec![0; padding]).map_err(failed())?;
    }
    let file = out.into_inner().map_err(|error| failed()(error.into_error()))?;
    file.sync_all().map_err(failed())
}

fn header(metadata: &[(String, Value)], tensors: &[GgufTensor]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        text(&mut out, key);
        encode(&mut out, value);
    }
    let mut at = 0u64;
    for tensor in tensors {
        let GgufTensor { name, shape, stored } = tensor;
        text(&mut out, name);
        out.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|size| out.extend(size.to_le_bytes()));
        out.extend(stored.number().to_le_bytes());
        out.extend(at.to_le_bytes());
        at += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT as usize), 0);
    out
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A value after its type: integers as u32, and in lists as i32, as llama.cpp's converter has them.
fn encode(out: &mut Vec<u8>, value: &Value) {
    let kind = |out: &mut Vec<u8>, number: u32| out.extend(number.to_le_bytes());
    let list = |out: &mut Vec<u8>, number: u32, len: usize| {
        kind(out, 9);
        kind(out, number);
        out.extend((len as u64).to_le_bytes());
    };
    match value {
        Value::Integer(n) => {
            kind(out, 4);
            out.extend((*n as u32).to_le_bytes());
        }
        Value::Number(x) => {
            kind(out, 6);
            out.extend((*x as f32).to_le_bytes());
        }
        Value::Bool(flag) => {
            kind(out, 7);
            out.push(u8::from(*flag));
        }
        Value::Text(value) => {
            kind(out, 8);
            text(out, value);
        }
        Value::Integers(all) => {
            list(out, 5, all.len());
            all.iter().for_each(|n| out.extend((*n as i32).to_le_bytes()));
        }
        Value::Bools(all) => {
            list(out, 7, all.len());
            out.extend(all.iter().map(|value| u8::from(*value)));
        }
        Value::Numbers(all) => {
            list(out, 6, all.len());
            all.iter().for_each(|x| out.extend(x.to_le_bytes()));
        }
        Value::Texts(all) => {
            list(out, 8, all.len());
            all.iter().for_each(|value| text(out, value));
        }
    }
}
