//! The element types of GGUF, and their blocks of quantized numbers as numbers.

use crate::Result;
use tch::{Kind, Tensor};

/// Type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TensorType {
    /// f32.
    F32,
    /// f16.
    F16,
    /// bf16.
    BF16,
    /// 4 bits: a scale for 32 numbers.
    Q4_0,
    /// 4 bits: a scale and a least value for 32 numbers.
    Q4_1,
    /// 6 bits: a scale for 256 numbers, and 8 bits of scale for each 16 of them.
    Q6K,
    /// 8 bits: a scale for 32 numbers.
    Q8_0,
}

/// The unit in which elements are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) elements: usize,
    pub(crate) bytes: usize,
}

/// ggml's numbers and names of types that are not supported.
const OTHERS: [(u32, &str); 30] = [
    (6, "Q5_0"),
    (7, "Q5_1"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (12, "Q4_K"),
    (13, "Q5_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
    (41, "Q1_0"),
];

impl TensorType {
    /// The supported types, for messages.
    pub(super) const EXPECTED: &'static str = "F32, F16, BF16, Q4_0, Q4_1, Q6_K or Q8_0";

    /// The type of ggml's number; else the name of the number.
    pub(super) fn of(number: u32) -> Result<Self, String> {
        Ok(match number {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            8 => Self::Q8_0,
            14 => Self::Q6K,
            30 => Self::BF16,
            other => {
                let name = OTHERS.iter().find(|(known, _)| *known == other).map(|(_, name)| name.to_string());
                return Err(name.unwrap_or_else(|| format!("type {other}")));
            }
        })
    }

    pub(crate) fn block(self) -> Block {
        let (elements, bytes) = match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::BF16 => (1, 2),
            Self::Q4_0 => (32, 2 + 16),
            Self::Q4_1 => (32, 2 + 2 + 16),
            Self::Q8_0 => (32, 2 + 32),
            Self::Q6K => (256, 128 + 64 + 16 + 2),
        };
        Block { elements, bytes }
    }

    /// The numbers in `bytes`, which are whole blocks: f32, or the type's own dtype.
    pub(super) fn dequantize(self, bytes: &[u8]) -> Result<Tensor> {
        let as_stored = |kind: Kind| -> Result<Tensor> {
            let count = (bytes.len() / kind.elt_size_in_bytes()) as i64;
            Ok(Tensor::f_from_data_size(bytes, &[count], kind)?)
        };
        let Block { elements, bytes: size } = self.block();
        let mut numbers = Vec::new();
        match self {
            Self::F32 => return as_stored(Kind::Float),
            Self::F16 => return as_stored(Kind::Half),
            Self::BF16 => return as_stored(Kind::BFloat16),
            Self::Q4_0 | Self::Q4_1 | Self::Q8_0 | Self::Q6K => numbers.reserve_exact(bytes.len() / size * elements),
        }
        for block in bytes.chunks_exact(size) {
            match self {
                Self::Q4_0 => four_bits(&mut numbers, &block[2..], f16(block, 0), -8.0 * f16(block, 0)),
                Self::Q4_1 => four_bits(&mut numbers, &block[4..], f16(block, 0), f16(block, 2)),
                Self::Q8_0 => {
                    let scale = f16(block, 0);
                    numbers.extend(block[2..].iter().map(|&byte| scale * f32::from(byte as i8)));
                }
                _ => six_bits(&mut numbers, block),
            }
        }
        Ok(Tensor::f_from_slice(&numbers)?)
    }
}

/// Appends 32 numbers of 4 bits: the low halves of 16 bytes, then the high ones.
fn four_bits(numbers: &mut Vec<f32>, bytes: &[u8], scale: f32, least: f32) {
    numbers.extend(bytes.iter().map(|byte| scale * f32::from(byte & 15) + least));
    numbers.extend(bytes.iter().map(|byte| scale * f32::from(byte >> 4) + least));
}

/// Appends the 256 numbers of a block of Q6_K: the low four bits of all, the high two of all, the scales of each 16, the scale of the
/// scales.
fn six_bits(numbers: &mut Vec<f32>, block: &[u8]) {
    let (low, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    let (scales, _) = rest.split_at(16);
    let scale = f16(block, 208);
    for at in 0..256 {
        // Two halves of 128 numbers, each of four rows of 32: the first two rows are the low halves of the bytes.
        let (half, row, column) = (at / 128, at % 128 / 32, at % 32);
        let byte = low[64 * half + 32 * (row % 2) + column];
        let four = if row < 2 { byte & 15 } else { byte >> 4 };
        let two = (high[32 * half + column] >> (2 * row)) & 3;
        let number = i16::from(four | (two << 4)) - 32;
        numbers.push(scale * f32::from(scales[at / 16] as i8) * f32::from(number));
    }
}

/// The f16 at the byte `at`.
fn f16(bytes: &[u8], at: usize) -> f32 {
    let bits = u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let (sign, exponent, fraction) = (bits >> 15, (bits >> 10) & 31, f32::from(bits & 1023));
    let size = match exponent {
        0 => fraction * 2f32.powi(-24),
        31 if fraction == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        _ => (1.0 + fraction / 1024.0) * 2f32.powi(i32::from(exponent) - 15),
    };
    if sign == 1 { -size } else { size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_is_the_number_that_torch_reads_for_every_bit_pattern() {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let expected = Tensor::from_data_size(&all, &[1 << 16], Kind::Half).to_kind(Kind::Float);
        let expected = Vec::<f32>::try_from(expected).unwrap();
        for (at, expected) in expected.into_iter().enumerate() {
            let found = f16(&all, 2 * at);
            assert!(found == expected || (found.is_nan() && expected.is_nan()), "{at:#x}: {found}, {expected}");
        }
    }
}
