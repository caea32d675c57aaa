//! Stochastic rounding to bf16: right on average, where rounding to the nearest would lose every small step.

use crate::rng::Stream;
use tch::{Kind, Tensor};

/// Bits of f32 that bf16 lacks.
const LOST: i64 = 0xffff;

/// Rounds `x`, f32 and finite, to one of its two neighbours in bf16: to each with a probability of one minus its distance in units of theirs,
/// so that the expected value is `x`. A number that bf16 has stays as it is.
pub(super) fn round(x: &Tensor, stream: &mut Stream) -> Tensor {
    let words = stream.words(x.numel());
    let noise = Tensor::from_data_size(&words, &x.size(), Kind::Int16).to_device(x.device()).to_kind(Kind::Int);
    // The bits of a float are ordered as its magnitude: a carry out of the lost bits is the neighbour that is farther from 0.
    let bits = x.contiguous().view_dtype(Kind::Int) + noise.bitwise_and(LOST);
    bits.bitwise_and(!LOST).view_dtype(Kind::Float).to_kind(Kind::BFloat16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Purpose;
    use tch::Device;

    fn stream(step: u64) -> Stream {
        Stream::new(1, Purpose::Rounding, step, 0)
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
            let rounded = round(&x, &mut stream(1)).to_kind(Kind::Double);
            let (least, most) = (rounded.min().double_value(&[]), rounded.max().double_value(&[]));
            let near = |found: f64, expected: f64| ((found - expected) / expected).abs() < 1e-3;
            assert!(near(least, low) && near(most, high) && least < most, "{value}: {least} to {most}");
            // The mean of n draws that are off by at most a unit has a standard deviation of at most half a unit / sqrt(n).
            let gap = (rounded.mean(Kind::Double).double_value(&[]) - x.double_value(&[0])).abs();
            assert!(gap < 4.0 * 0.5 * (most - least) / (n as f64).sqrt(), "{value}: the mean is off by {gap}");
        }
    }

    #[test]
    fn numbers_of_bf16_stay_as_they_are_and_a_stream_rounds_in_one_way() {
        let exact = (Tensor::arange(1000, (Kind::Float, Device::Cpu)) - 500.0).to_kind(Kind::BFloat16);
        assert_eq!(round(&exact.to_kind(Kind::Float), &mut stream(1)), exact);
        let between = (Tensor::arange(1000, (Kind::Float, Device::Cpu)) * 0.37).sin();
        assert_eq!(round(&between, &mut stream(2)), round(&between, &mut stream(2)));
        assert_ne!(round(&between, &mut stream(2)), round(&between, &mut stream(3)));
    }
}
