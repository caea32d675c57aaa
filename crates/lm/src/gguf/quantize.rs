//! Numbers as blocks of 4 to 6 bits: what `blocks.rs` reads. Scales have the least squared error among some candidates.

use super::blocks::f16;

/// Number of elements of a block of Q5_0 and of Q5_1.
pub(super) const SMALL: usize = 32;
/// Number of elements of a block of Q4_K, Q5_K and Q6_K.
pub(super) const LARGE: usize = 256;

/// Candidates for the codes of a group: scales that are up to this many twentieths of a code wider or narrower than its numbers.
const CANDIDATES: i32 = 20;

/// Appends a block of numbers.
pub(super) type WriteBlock = fn(&mut Vec<u8>, &[f32]);

/// Appends the blocks of `numbers`, of `size` each, that `block` writes, on all threads.
pub(super) fn in_blocks(numbers: &[f32], size: usize, block: WriteBlock) -> Vec<u8> {
    let threads = tch::get_num_threads().max(1) as usize;
    let part = (numbers.len() / size).div_ceil(threads).max(1) * size;
    let encoded = |part: &[f32]| {
        let mut bytes = Vec::new();
        part.chunks_exact(size).for_each(|numbers| block(&mut bytes, numbers));
        bytes
    };
    std::thread::scope(|scope| {
        let parts: Vec<_> = numbers.chunks(part).map(|part| scope.spawn(move || encoded(part))).collect();
        parts.into_iter().flat_map(|part| part.join().expect("a block is written without a panic")).collect()
    })
}

/// Appends a block of Q5_0: a scale, the fifth bits, four bits of 32 numbers.
pub(super) fn five_bits(bytes: &mut Vec<u8>, numbers: &[f32]) {
    let (bits, scale) = rounded(symmetric(numbers, 16));
    let codes: Vec<u8> = numbers.iter().map(|x| code(x / scale + 16.0, 31)).collect();
    bytes.extend(bits);
    five_bit_codes(bytes, &codes);
}

/// Appends a block of Q5_1: a scale, the least value, the fifth bits, four bits of 32 numbers.
pub(super) fn five_bits_with_least(bytes: &mut Vec<u8>, numbers: &[f32]) {
    let [scale, least] = with_least(numbers, 31);
    let ((scale_bits, scale), (least_bits, least)) = (rounded(scale), rounded(-least));
    let codes: Vec<u8> = numbers.iter().map(|x| code((x - least) / scale, 31)).collect();
    bytes.extend(scale_bits);
    bytes.extend(least_bits);
    five_bit_codes(bytes, &codes);
}

/// Appends the fifth bits of 32 codes, then their low four bits.
fn five_bit_codes(bytes: &mut Vec<u8>, codes: &[u8]) {
    let high = codes.iter().enumerate().fold(0u32, |high, (at, code)| high | (u32::from(code >> 4) << at));
    bytes.extend(high.to_le_bytes());
    let (first, second) = codes.split_at(SMALL / 2);
    bytes.extend(first.iter().zip(second).map(|(low, high)| (low & 15) | ((high & 15) << 4)));
}

/// Appends a block of Q4_K: the scales of the scales and of the least values, six bits of each for each 32 numbers, four bits of all.
pub(super) fn four_bits(bytes: &mut Vec<u8>, numbers: &[f32]) {
    let codes = grouped(bytes, numbers, 15);
    low_bits(bytes, &codes);
}

/// Appends a block of Q5_K: as Q4_K, with the fifth bits of all before the four.
pub(super) fn five_bits_of_groups(bytes: &mut Vec<u8>, numbers: &[f32]) {
    let codes = grouped(bytes, numbers, 31);
    // The numbers at one place of all groups share a byte.
    bytes.extend((0..32).map(|at| (0..8).fold(0, |byte, group| byte | ((codes[32 * group + at] >> 4) << group))));
    low_bits(bytes, &codes);
}

/// Appends the low four bits of 256 codes: a byte has those of two numbers that are 32 apart.
fn low_bits(bytes: &mut Vec<u8>, codes: &[u8]) {
    for two in codes.chunks_exact(64) {
        bytes.extend((0..32).map(|at| (two[at] & 15) | ((two[at + 32] & 15) << 4)));
    }
}

/// Appends the scales and least values of groups of 32 numbers: those of 256 numbers with one scale for the scales and one for the least values.
/// Returns the codes of the numbers, from 0 to `most`.
fn grouped(bytes: &mut Vec<u8>, numbers: &[f32], most: u8) -> Vec<u8> {
    let groups: Vec<[f32; 2]> = numbers.chunks_exact(32).map(|group| with_least(group, most)).collect();
    let largest = |at: usize| groups.iter().map(|group| group[at]).fold(0.0, f32::max);
    let ((scale_bits, scale), (least_bits, least)) = (six_bit_unit(largest(0)), six_bit_unit(largest(1)));
    bytes.extend(scale_bits);
    bytes.extend(least_bits);
    let parts: Vec<[u8; 2]> = groups
        .iter()
        .map(|[group_scale, group_least]| [code(group_scale / scale, 63), code(group_least / least, 63)])
        .collect();
    bytes.extend(packed(&parts));
    let in_codes = |(group, [scale_code, least_code]): (&[f32], &[u8; 2])| {
        let (group_scale, group_least) = (scale * f32::from(*scale_code), least * f32::from(*least_code));
        group.iter().map(|x| code((x + group_least) / group_scale, most)).collect::<Vec<_>>()
    };
    numbers.chunks_exact(32).zip(&parts).flat_map(in_codes).collect()
}

/// Appends a block of Q6_K: the low four bits of all numbers, the high two, the scale of each 16, the scale of the scales.
pub(super) fn six_bits(bytes: &mut Vec<u8>, numbers: &[f32]) {
    let scales: Vec<f32> = numbers.chunks_exact(16).map(|group| symmetric(group, 32)).collect();
    let (bits, scale) = rounded(widest(&scales) / -128.0);
    let parts: Vec<i8> =
        scales.iter().map(|group_scale| if scale == 0.0 { 0 } else { (group_scale / scale).round() as i8 }).collect();
    let codes: Vec<u8> = numbers
        .chunks_exact(16)
        .zip(&parts)
        .flat_map(|(group, scale_code)| {
            let group_scale = scale * f32::from(*scale_code);
            group.iter().map(move |x| code(x / group_scale + 32.0, 63))
        })
        .collect();
    // Two halves of four rows of 32 numbers: in a byte the low bits of two rows, and the high ones of all four.
    let halves = || codes.chunks_exact(128);
    for half in halves() {
        bytes.extend((0..64).map(|at| (half[at] & 15) | ((half[at + 64] & 15) << 4)));
    }
    for half in halves() {
        bytes.extend((0..32).map(|at| (0..4).fold(0, |byte, row| byte | ((half[32 * row + at] >> 4) << (2 * row)))));
    }
    bytes.extend(parts.iter().map(|scale_code| *scale_code as u8));
    bytes.extend(bits);
}

/// The whole number from 0 to `most` that is nearest to `x`; 0 for NaN, such as a quotient by a scale of 0.
fn code(x: f32, most: u8) -> u8 {
    // Halves are rounded away from 0; the conversion ends at 0 and 255.
    (x.round() as u8).min(most)
}

/// The bytes of the f16 nearest to `x`, and its value.
fn rounded(x: f32) -> ([u8; 2], f32) {
    let size = x.abs().min(65504.0);
    // Below the smallest normal number the steps stay as they are.
    let exponent = ((size.to_bits() >> 23) as i32 - 127).max(-14);
    let steps = (size / 2f32.powi(exponent - 10)).round_ties_even() as u16;
    let bits = (u16::from(x.is_sign_negative()) << 15) | ((exponent + 14) as u16 * 1024 + steps);
    let bytes = bits.to_le_bytes();
    (bytes, f16(&bytes, 0))
}

/// [`rounded`] of the unit in which `most` is the largest number of six bits.
fn six_bit_unit(most: f32) -> ([u8; 2], f32) {
    rounded(most / 63.0)
}

/// The number of largest magnitude.
fn widest(numbers: &[f32]) -> f32 {
    numbers.iter().copied().fold(0.0, |most: f32, x| if x.abs() > most.abs() { x } else { most })
}

/// The scale with which codes from `-half` to `half - 1` have the least squared error. The number of largest magnitude gets the code `-half` or one
/// near it.
fn symmetric(numbers: &[f32], half: i32) -> f32 {
    let widest = widest(numbers);
    if widest == 0.0 {
        return 0.0;
    }
    let (least, most) = (-half as f32, (half - 1) as f32);
    let mut best = (0.0, widest / least);
    for step in -CANDIDATES..=CANDIDATES {
        let inverse = (least + step as f32 / 20.0) / widest;
        let (mut product_sum, mut code_sum) = (0.0, 0.0);
        for x in numbers {
            let code = (x * inverse).round().clamp(least, most);
            product_sum += x * code;
            code_sum += code * code;
        }
        // With the best scale for these codes, the squared error is the sum of the squares of all numbers less this value.
        if code_sum > 0.0 && product_sum * product_sum / code_sum > best.0 {
            best = (product_sum * product_sum / code_sum, product_sum / code_sum);
        }
    }
    best.1
}

/// The scale and the subtracted least value, neither below 0, with which codes from 0 to `most` have the least squared error.
fn with_least(numbers: &[f32], most: u8) -> [f32; 2] {
    let low = numbers.iter().copied().fold(0.0, f32::min);
    let high = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max).max(low);
    if high <= low {
        return [0.0, -low];
    }
    let (most, count) = (f32::from(most), numbers.len() as f32);
    let sum: f32 = numbers.iter().sum();
    let mut best = (f32::INFINITY, [(high - low) / most, -low]);
    for step in -CANDIDATES..=CANDIDATES {
        let inverse = (most + step as f32 / 20.0) / (high - low);
        let codes = numbers.iter().map(|x| (x, ((x - low) * inverse).round().clamp(0.0, most)));
        let (mut code_sum, mut square_sum, mut product_sum) = (0.0, 0.0, 0.0);
        for (x, code) in codes.clone() {
            code_sum += code;
            square_sum += code * code;
            product_sum += x * code;
        }
        let spread = count * square_sum - code_sum * code_sum;
        if spread <= 0.0 {
            continue;
        }
        let mut least = (code_sum * product_sum - square_sum * sum) / spread;
        let mut scale = (count * product_sum - code_sum * sum) / spread;
        if least < 0.0 {
            (scale, least) = (product_sum / square_sum, 0.0);
        }
        let error: f32 = codes.map(|(x, code)| (scale * code - least - x).powi(2)).sum();
        if error < best.0 && scale > 0.0 {
            best = (error, [scale, least]);
        }
    }
    best.1
}

/// Scales and least values, of six bits each, of eight groups in twelve bytes: the first four groups have whole bytes, the others are in halves of
/// bytes, and in the high bits of the first four.
fn packed(parts: &[[u8; 2]]) -> [u8; 12] {
    let mut bytes = [0; 12];
    for (group, [scale, least]) in parts.iter().enumerate() {
        if group < 4 {
            bytes[group] |= scale;
            bytes[group + 4] |= least;
        } else {
            bytes[group + 4] = (scale & 15) | (least << 4);
            bytes[group - 4] |= scale >> 4 << 6;
            bytes[group] |= least >> 4 << 6;
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::super::TensorType;
    use super::*;
    use tch::{Device, Kind, Tensor};

    /// The largest and the mean squared error of `numbers` in blocks, each divided by that of the numbers.
    fn errors(numbers: &[f32], size: usize, block: WriteBlock, kind: TensorType) -> [f64; 2] {
        let bytes = in_blocks(numbers, size, block);
        assert_eq!(bytes.len(), numbers.len() / size * kind.block().bytes);
        let found = Vec::<f32>::try_from(kind.dequantize(&bytes).unwrap()).unwrap();
        let mut sums = [0.0; 4];
        for (x, y) in numbers.iter().zip(&found) {
            let (x, gap) = (f64::from(*x), f64::from(x - y));
            assert!(y.is_finite());
            sums = [gap.abs().max(sums[0]), x.abs().max(sums[1]), sums[2] + gap * gap, sums[3] + x * x];
        }
        [sums[0] / sums[1].max(1e-30), (sums[2] / sums[3].max(1e-30)).sqrt()]
    }

    const TYPES: [(usize, WriteBlock, TensorType, f64); 5] = [
        (SMALL, five_bits, TensorType::Q5_0, 0.045),
        (SMALL, five_bits_with_least, TensorType::Q5_1, 0.045),
        (LARGE, four_bits, TensorType::Q4K, 0.09),
        (LARGE, five_bits_of_groups, TensorType::Q5K, 0.045),
        (LARGE, six_bits, TensorType::Q6K, 0.02),
    ];

    #[test]
    fn random_numbers_are_read_back_within_the_steps_of_their_type() {
        tch::manual_seed(3);
        for scale in [1.0, 1e-3, 300.0] {
            let numbers = Tensor::randn([64 * 256], (Kind::Float, Device::Cpu)) * scale;
            let numbers = Vec::<f32>::try_from(numbers).unwrap();
            for (size, block, kind, bound) in TYPES {
                let [largest, relative] = errors(&numbers, size, block, kind);
                assert!(relative < bound && largest < 0.12, "{kind:?} at {scale}: {largest}, {relative}");
            }
        }
    }

    #[test]
    fn blocks_of_zeros_of_one_sign_and_of_one_large_number_are_read_back() {
        let ramp = |first: f32| (0..256).map(|at| first + at as f32 / 256.0).collect::<Vec<f32>>();
        let mut peak = vec![0.0; 256];
        peak[77] = -3.0;
        for numbers in [vec![0.0; 256], vec![-2.0; 256], vec![2.0; 256], ramp(0.5), ramp(-1.5), peak, vec![1e-9; 256]] {
            for (size, block, kind, bound) in TYPES {
                let [_, relative] = errors(&numbers, size, block, kind);
                assert!(relative < bound || numbers[0] == 1e-9, "{kind:?}: {relative}: {:?}", &numbers[..3]);
            }
        }
    }

    #[test]
    fn a_scale_is_rounded_to_the_nearest_f16() {
        let all: Vec<f32> = (0..40_000u32).map(|at| f32::from_bits(at.wrapping_mul(107_374)) * 0.5).collect();
        let all: Vec<f32> = all.into_iter().filter(|x| x.abs() < 65504.0).collect();
        let expected = Tensor::from_slice(&all).to_kind(Kind::Half).to_kind(Kind::Float);
        let expected = Vec::<f32>::try_from(expected).unwrap();
        for (x, expected) in all.into_iter().zip(expected) {
            assert_eq!(rounded(x).1, expected, "{x}");
        }
    }
}
