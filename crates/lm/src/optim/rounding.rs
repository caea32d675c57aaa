//! Stochastic rounding to bf16: right on average, where rounding to the nearest would lose every small step.

use tch::{Device, Kind, Tensor};

/// Bits of f32 that bf16 lacks.
const LOST: i64 = 0xffff;

/// Random words for the numbers `from..from + len` of a tensor, `[len]` i16 on `device`, from the generator SplitMix64 with the state `key`:
/// each of its numbers is four words, the low bits first. `from` is a multiple of 4.
///
/// A word is a function of its position, so it is computed where it is used: on a GPU, and by each thread of a CPU.
///
/// Source: Steele, Lea and Flood 2014, with the constants of `java.util.SplittableRandom`'s mix64.
pub(super) fn words(key: u64, from: i64, len: i64, device: Device) -> Tensor {
    const WORDS: i64 = 4;
    debug_assert_eq!(from % WORDS, 0);
    let (first, count) = (from / WORDS, (len + WORDS - 1) / WORDS);
    // Products wrap around, like products of unsigned numbers.
    let mut x = Tensor::arange_start(first + 1, first + 1 + count, (Kind::Int64, device));
    let _ = x.g_mul_scalar_(0x9e37_79b9_7f4a_7c15_u64 as i64).g_add_scalar_(key as i64);
    for (shift, factor) in [(30, 0xbf58_476d_1ce4_e5b9_u64), (27, 0x94d0_49bb_1331_11eb)] {
        let _ = xor_shifted(&mut x, shift).g_mul_scalar_(factor as i64);
    }
    xor_shifted(&mut x, 31).view_dtype(Kind::Int16).narrow(0, 0, len)
}

/// x ^ (x >> shift), where bits of 0 are shifted in; in place.
fn xor_shifted(x: &mut Tensor, shift: i64) -> &mut Tensor {
    // libtorch shifts in the sign.
    let mut shifted = x.bitwise_right_shift_tensor_scalar(shift);
    let _ = shifted.bitwise_and_((1_i64 << (64 - shift)) - 1);
    let _ = x.bitwise_xor_tensor_(&shifted);
    x
}

/// Rounds `x`, f32 and finite, to one of its two neighbours in bf16: to each with a probability of one minus its distance in units of theirs,
/// so that the expected value is `x`. A number that bf16 has stays as it is. `words`: i16, as many as `x` has numbers.
pub(super) fn round(x: &Tensor, words: &Tensor) -> Tensor {
    // The bits of a float are ordered as its magnitude: a carry out of the lost bits is the neighbour that is farther from 0.
    let bits = x.contiguous().view_dtype(Kind::Int) + words.to_kind(Kind::Int).bitwise_and(LOST);
    bits.bitwise_and(!LOST).view_dtype(Kind::Float).to_kind(Kind::BFloat16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded(x: &Tensor, key: u64) -> Tensor {
        round(x, &words(key, 0, x.numel() as i64, Device::Cpu))
    }

    #[test]
    fn a_number_is_rounded_to_its_neighbours_with_the_probability_of_its_place_between_them() {
        // Neighbours of 1.0 in bf16 are 1 + 2^-7 above and 1 - 2^-8 below.
        let n = 100_000i64;
        for (value, low, high) in [
            (1.0 + 0.3 / 128.0, 1.0, 1.0 + 1.0 / 128.0),
            (-3.0 - 0.1 / 64.0, -3.0 - 1.0 / 64.0, -3.0),
            (1.0 - 0.75 / 256.0, 1.0 - 1.0 / 256.0, 1.0),
            (1e-30, 9.984e-31, 1.004_57e-30),
        ] {
            let x = Tensor::full([n], value, (Kind::Float, Device::Cpu));
            let rounded = rounded(&x, 1).to_kind(Kind::Double);
            let (least, most) = (rounded.min().double_value(&[]), rounded.max().double_value(&[]));
            let near = |found: f64, expected: f64| ((found - expected) / expected).abs() < 1e-3;
            assert!(near(least, low) && near(most, high) && least < most, "{value}: {least} to {most}");
            // The mean of n draws that are off by at most a unit has a standard deviation of at most half a unit / sqrt(n).
            let gap = (rounded.mean(Kind::Double).double_value(&[]) - x.double_value(&[0])).abs();
            assert!(gap < 4.0 * 0.5 * (most - least) / (n as f64).sqrt(), "{value}: the mean is off by {gap}");
        }
    }

    #[test]
    fn numbers_of_bf16_stay_as_they_are_and_a_key_rounds_in_one_way() {
        let exact = (Tensor::arange(1000, (Kind::Float, Device::Cpu)) - 500.0).to_kind(Kind::BFloat16);
        let between = (Tensor::arange(1000, (Kind::Float, Device::Cpu)) * 0.37).sin();
        assert_eq!(rounded(&exact.to_kind(Kind::Float), 1), exact);
        assert_eq!(rounded(&between, 2), rounded(&between, 2));
        assert_ne!(rounded(&between, 2), rounded(&between, 3));
    }

    #[test]
    fn words_are_those_of_splitmix64() {
        // The first numbers of the generator with the state 1234567, as published at rosettacode.org.
        let expected = [6_457_827_717_110_365_317_u64, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        let found = Vec::<i64>::try_from(words(1_234_567, 0, 12, Device::Cpu).view_dtype(Kind::Int64)).unwrap();
        assert_eq!(found, expected.map(|x| x as i64));
    }

    #[test]
    fn words_depend_on_key_and_position_only() {
        let whole = words(7, 0, 1030, Device::Cpu);
        let parts = [(0, 4), (4, 252), (256, 512), (768, 262)].map(|(from, len)| words(7, from, len, Device::Cpu));
        assert_eq!(Tensor::cat(&parts, 0), whole);
        assert_ne!(words(8, 0, 1030, Device::Cpu), whole);
    }

    #[test]
    fn each_bit_of_words_is_set_in_half_of_them_and_independent_of_others() {
        let n = 1_i64 << 20;
        let words = words(3, 0, n, Device::Cpu).to_kind(Kind::Int);
        let bits = (0..16).map(|bit| words.bitwise_right_shift_tensor_scalar(bit).bitwise_and(1).to_kind(Kind::Float));
        let signs = Tensor::stack(&bits.collect::<Vec<_>>(), 0) * 2.0 - 1.0;
        // Sums of n independent signs have a standard deviation of sqrt(n).
        let bound = 5.0 * (n as f64).sqrt();
        let next = |by: i64| signs.narrow(1, by, n - by).matmul(&signs.narrow(1, 0, n - by).tr());
        let off_diagonal = signs.matmul(&signs.tr()) - Tensor::eye(16, (Kind::Float, Device::Cpu)) * n as f64;
        for sums in [signs.sum_dim_intlist(1i64, false, Kind::Float), off_diagonal, next(1), next(4)] {
            let most = sums.abs().max().double_value(&[]);
            assert!(most < bound, "{most} is not below {bound}");
        }
    }
}
