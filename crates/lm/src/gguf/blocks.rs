//! The element types of GGUF, and their blocks of quantized numbers as numbers.

use rlhf_base::Result;
use tch::{Kind, Tensor};

/// Type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorType {
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
    /// 5 bits: a scale for 32 numbers.
    Q5_0,
    /// 5 bits: a scale and a least value for 32 numbers.
    Q5_1,
    /// 8 bits: a scale for 32 numbers.
    Q8_0,
    /// 2 bits: a scale and a least value for 256 numbers, and 4 bits of each for each 16 of them.
    Q2K,
    /// 3 bits: a scale for 256 numbers, and 6 bits of scale for each 16 of them.
    Q3K,
    /// 4 bits: a scale and a least value for 256 numbers, and 6 bits of each for each 32 of them.
    Q4K,
    /// 5 bits: as `Q4K`.
    Q5K,
    /// 6 bits: a scale for 256 numbers, and 8 bits of scale for each 16 of them.
    Q6K,
    /// 4 bits, indices into `LEVELS`: a scale for 32 numbers.
    Iq4Nl,
    /// 4 bits, indices into `LEVELS`: a scale for 256 numbers, and 6 bits of scale for each 32 of them.
    Iq4Xs,
    /// 4 bits, indices into `SMALL_FLOATS`: a power of two for 32 numbers.
    Mxfp4,
}

/// The unit in which elements are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    pub elements: usize,
    pub bytes: usize,
}

/// ggml's numbers and names of types that are not supported.
const OTHERS: [(u32, &str); 21] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
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
    (40, "NVFP4"),
    (41, "Q1_0"),
];

impl TensorType {
    /// The supported types, for messages.
    pub(super) const EXPECTED: &'static str =
        "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS or MXFP4";

    /// The type of ggml's number; else the name of the number.
    pub(super) fn of(number: u32) -> Result<Self, String> {
        Ok(match number {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            10 => Self::Q2K,
            11 => Self::Q3K,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            20 => Self::Iq4Nl,
            23 => Self::Iq4Xs,
            30 => Self::BF16,
            39 => Self::Mxfp4,
            other => {
                let name = OTHERS.iter().find(|(known, _)| *known == other).map(|(_, name)| name.to_string());
                return Err(name.unwrap_or_else(|| format!("type {other}")));
            }
        })
    }

    /// Returns the size of a block of this type.
    pub fn block(self) -> Block {
        let (elements, bytes) = match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::BF16 => (1, 2),
            Self::Q4_0 | Self::Iq4Nl => (32, 2 + 16),
            Self::Q4_1 => (32, 2 + 2 + 16),
            Self::Q5_0 => (32, 2 + 4 + 16),
            Self::Q5_1 => (32, 2 + 2 + 4 + 16),
            Self::Q8_0 => (32, 2 + 32),
            Self::Q2K => (256, 16 + 64 + 2 + 2),
            Self::Q3K => (256, 32 + 64 + 12 + 2),
            Self::Q4K => (256, 2 + 2 + 12 + 128),
            Self::Q5K => (256, 2 + 2 + 12 + 32 + 128),
            Self::Q6K => (256, 128 + 64 + 16 + 2),
            Self::Iq4Xs => (256, 2 + 2 + 4 + 128),
            Self::Mxfp4 => (32, 1 + 16),
        };
        Block { elements, bytes }
    }

    /// The numbers in `bytes`, which are whole blocks: f32, or the type's own dtype.
    pub(super) fn dequantize(self, bytes: &[u8]) -> Result<Tensor> {
        let as_stored = |kind: Kind| -> Result<Tensor> {
            let count = (bytes.len() / kind.elt_size_in_bytes()) as i64;
            Ok(Tensor::f_from_data_size(bytes, &[count], kind)?)
        };
        let append: fn(&mut Vec<f32>, &[u8]) = match self {
            Self::F32 => return as_stored(Kind::Float),
            Self::F16 => return as_stored(Kind::Half),
            Self::BF16 => return as_stored(Kind::BFloat16),
            Self::Q4_0 => |numbers, block| {
                nibbles(numbers, &block[2..], 0, f16(block, 0), -8.0 * f16(block, 0));
            },
            Self::Q4_1 => |numbers, block| {
                nibbles(numbers, &block[4..], 0, f16(block, 0), f16(block, 2));
            },
            Self::Q5_0 => |numbers, block| {
                nibbles(numbers, &block[6..], u32_at(block, 2), f16(block, 0), -16.0 * f16(block, 0));
            },
            Self::Q5_1 => |numbers, block| {
                nibbles(numbers, &block[8..], u32_at(block, 4), f16(block, 0), f16(block, 2));
            },
            Self::Q8_0 => |numbers, block| {
                let scale = f16(block, 0);
                numbers.extend(block[2..].iter().map(|&byte| scale * f32::from(byte as i8)));
            },
            Self::Q2K => two_bits,
            Self::Q3K => three_bits,
            Self::Q4K => |numbers, block| four_or_five_bits(numbers, block, None),
            Self::Q5K => |numbers, block| four_or_five_bits(numbers, block, Some(&block[16..48])),
            Self::Q6K => six_bits,
            Self::Iq4Nl => |numbers, block| levels(numbers, &block[2..], f16(block, 0)),
            Self::Iq4Xs => scaled_levels,
            Self::Mxfp4 => small_floats,
        };
        let Block { elements, bytes: size } = self.block();
        let mut numbers = Vec::with_capacity(bytes.len() / size * elements);
        bytes.chunks_exact(size).for_each(|block| append(&mut numbers, block));
        Ok(Tensor::f_from_slice(&numbers)?)
    }
}

/// The low halves of bytes, then the high ones.
fn halves(bytes: &[u8]) -> impl Iterator<Item = u8> {
    bytes.iter().map(|byte| byte & 15).chain(bytes.iter().map(|byte| byte >> 4))
}

/// Appends 32 numbers of 4 bits, the halves of 16 bytes, and one of the bits of `high`.
fn nibbles(numbers: &mut Vec<f32>, bytes: &[u8], high: u32, scale: f32, least: f32) {
    numbers.extend(halves(bytes).enumerate().map(|(at, four)| {
        let five = ((high >> at) & 1) as u8;
        scale * f32::from(four | (five << 4)) + least
    }));
}

/// Position of one of the 256 numbers of a block in bytes of two bits for each number: two halves of 128 numbers, each of four rows of
/// 32, which are 32 bytes. Returns the byte and the shift.
fn place_of_two_bits(at: usize) -> (usize, usize) {
    (32 * (at / 128) + at % 32, at % 128 / 32 * 2)
}

/// Appends the 256 numbers of a block of Q2_K: scale and least value of each 16, two bits of all, the scale of each of these.
fn two_bits(numbers: &mut Vec<f32>, block: &[u8]) {
    let (scale, least) = (f16(block, 80), f16(block, 82));
    numbers.extend((0..256).map(|at| {
        let (byte, shift) = place_of_two_bits(at);
        let number = (block[16 + byte] >> shift) & 3;
        let scales = block[at / 16];
        scale * f32::from(scales & 15) * f32::from(number) - least * f32::from(scales >> 4)
    }));
}

/// Appends the 256 numbers of a block of Q3_K: the high bits of all, the low two bits of all, a scale per 16 numbers, the scale of the scales.
fn three_bits(numbers: &mut Vec<f32>, block: &[u8]) {
    let scales = &block[96..108];
    let scale = f16(block, 108);
    numbers.extend((0..256).map(|at| {
        let (byte, shift) = place_of_two_bits(at);
        let two = ((block[32 + byte] >> shift) & 3) as i8;
        let high = ((block[at % 32] >> (at / 32)) & 1) as i8;
        // Six bits: four in the low or high half of a byte, two in a byte for every fourth scale.
        let group = at / 16;
        let four = (scales[group % 8] >> (group / 8 * 4)) & 15;
        let group_scale = (four | (((scales[8 + group % 4] >> (group / 4 * 2)) & 3) << 4)) as i8 - 32;
        scale * f32::from(group_scale) * f32::from(two - 4 * (1 - high))
    }));
}

/// Appends the 256 numbers of a block of Q4_K or Q5_K: scale and least value of the scales, six bits of each for each 32 numbers, the
/// fifth bits `high`, four bits of all.
fn four_or_five_bits(numbers: &mut Vec<f32>, block: &[u8], high: Option<&[u8]>) {
    let (scale, least, scales) = (f16(block, 0), f16(block, 2), &block[4..16]);
    let low = &block[block.len() - 128..];
    for group in 0..8 {
        // The first four groups have whole bytes; the others are in halves of bytes, and in the high bits of the first four.
        let [scale_bits, least_bits] = match group {
            0..4 => [scales[group] & 63, scales[group + 4] & 63],
            _ => [
                (scales[group + 4] & 15) | (scales[group - 4] >> 6 << 4),
                (scales[group + 4] >> 4) | (scales[group] >> 6 << 4),
            ],
        };
        let (group_scale, group_least) = (scale * f32::from(scale_bits), least * f32::from(least_bits));
        numbers.extend((0..32).map(|column| {
            let four = (low[group / 2 * 32 + column] >> (group % 2 * 4)) & 15;
            let five = high.map_or(0, |high| (high[column] >> group) & 1);
            group_scale * f32::from(four | (five << 4)) - group_least
        }));
    }
}

/// Appends the 256 numbers of a block of Q6_K: the low four bits of all, the high two of all, the scales of each 16, the scale of the
/// scales.
fn six_bits(numbers: &mut Vec<f32>, block: &[u8]) {
    let (low, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    let (scales, _) = rest.split_at(16);
    let scale = f16(block, 208);
    numbers.extend((0..256).map(|at| {
        let (byte, shift) = place_of_two_bits(at);
        // The first two rows of each half are the low halves of the bytes.
        let (half, row, column) = (at / 128, at % 128 / 32, at % 32);
        let four = (low[64 * half + 32 * (row % 2) + column] >> (row / 2 * 4)) & 15;
        let number = i16::from(four | (((high[byte] >> shift) & 3) << 4)) - 32;
        scale * f32::from(scales[at / 16] as i8) * f32::from(number)
    }));
}

/// The numbers of IQ4_NL and IQ4_XS, for a scale of 1.
const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Appends 32 of `LEVELS`, whose numbers are the halves of 16 bytes.
fn levels(numbers: &mut Vec<f32>, bytes: &[u8], scale: f32) {
    numbers.extend(halves(bytes).map(|level| scale * f32::from(LEVELS[usize::from(level)])));
}

/// Appends the 256 numbers of a block of IQ4_XS: the scale of the scales, the high two bits and the low four of each 32 numbers'
/// scale, the levels of all.
fn scaled_levels(numbers: &mut Vec<f32>, block: &[u8]) {
    let (scale, high) = (f16(block, 0), u16::from_le_bytes([block[2], block[3]]));
    for (group, bytes) in block[8..].chunks_exact(16).enumerate() {
        let four = (block[4 + group / 2] >> (group % 2 * 4)) & 15;
        let two = ((high >> (2 * group)) & 3) as u8;
        levels(numbers, bytes, scale * f32::from((four | (two << 4)) as i8 - 32));
    }
}

/// The numbers of MXFP4, for an exponent of 0.
const SMALL_FLOATS: [f64; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Appends the 32 numbers of a block of MXFP4: an exponent, to which 127 was added, and four bits of all.
fn small_floats(numbers: &mut Vec<f32>, block: &[u8]) {
    // In f64, as the least power of two is below the normal numbers of f32.
    let scale = 2f64.powi(i32::from(block[0]) - 127);
    numbers.extend(halves(&block[1..]).map(|code| (scale * SMALL_FLOATS[usize::from(code)]) as f32));
}

/// The u32 at the byte `at`.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The f16 at the byte `at`.
pub(super) fn f16(bytes: &[u8], at: usize) -> f32 {
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
    fn numbers_of_mxfp4_are_products_of_two_powers_and_small_for_every_exponent() {
        for exponent in 0..=254u8 {
            // The low halves of bytes come first: 0.5 and then -6.
            let mut block = vec![exponent];
            block.extend([0xf1; 16]);
            let found = Vec::<f32>::try_from(TensorType::Mxfp4.dequantize(&block).unwrap()).unwrap();
            let scale = 2f64.powi(i32::from(exponent) - 127);
            let expected = [[(0.5 * scale) as f32; 16], [(-6.0 * scale) as f32; 16]].concat();
            assert_eq!(found, expected, "{exponent}");
            assert!(found.iter().all(|x| *x != 0.0));
        }
    }

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
