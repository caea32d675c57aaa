//! Euclidean norms, exact to the rounding of f32 whatever the number of elements.

use tch::{Device, Kind, Tensor};

/// Elements whose squares are summed in f32.
///
/// On a CPU, libtorch's norm in f32 keeps one running sum for each lane of a vector over its whole argument. A sum that has grown large
/// rounds away more and more of what is added: the norm of 28 million elements comes out 0.16 % too small, that of 263 million 3.7 %.
const ROW: i64 = 4096;

/// Elements of a tensor in bf16 or f16 that are converted to f32 at once on a CPU: a multiple of a row.
const PIECE: i64 = 256 * ROW;

/// Returns the Euclidean norm of all elements of all `tensors`, which are on one device; not finite if one of the elements is not.
pub fn norm<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> f64 {
    let squares: Vec<Tensor> = tensors.into_iter().map(square).collect();
    if squares.is_empty() { 0.0 } else { Tensor::stack(&squares, 0).sum(Kind::Double).double_value(&[]).sqrt() }
}

/// Returns the square of the norm of all elements of `x`, a scalar in f64 on its device.
///
/// Rows are summed in f32, or in the dtype of an `x` in f64, and their sums in f64, so that the number of threads
/// changes no more than the rounding of f64.
pub(crate) fn square(x: &Tensor) -> Tensor {
    tch::no_grad(|| {
        let flat = x.detach().reshape([-1]);
        let converts = x.device() == Device::Cpu && matches!(x.kind(), Kind::BFloat16 | Kind::Half);
        let (len, most) = (flat.numel() as i64, if converts { PIECE } else { i64::MAX });
        let mut sum = Tensor::from(0.0f64).to_device(x.device());
        let mut start = 0;
        while start < len {
            let part = most.min(len - start);
            sum += square_along(&flat.narrow(0, start, part), 0);
            start += part;
        }
        sum
    })
}

/// Returns the sums of the squares of `x` along dimension `dim`, which may be negative, without this dimension, f64.
pub(crate) fn square_along(x: &Tensor, dim: i64) -> Tensor {
    let dim = if dim < 0 { dim + x.dim() as i64 } else { dim };
    let kind = if x.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let row_squares =
        |x: &Tensor, dim: i64| x.norm_scalaropt_dim_dtype(2, [dim], false, kind).to_kind(Kind::Double).square();
    let size = x.size()[dim as usize];
    let whole = size - size % ROW;
    if whole == 0 {
        return row_squares(x, dim);
    }
    let rows = x.narrow(dim, 0, whole).unflatten(dim, [whole / ROW, ROW]);
    let sum = row_squares(&rows, dim + 1).sum_dim_intlist([dim].as_slice(), false, Kind::Double);
    if whole == size { sum } else { sum + row_squares(&x.narrow(dim, whole, size - whole), dim) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A number whose square, 1 + 2^-5 + 2^-12, is added without rounding in the sum of a row, whose norm is 65, but not in the sum of a
    /// large tensor.
    const NUMBER: f64 = 65.0 / 64.0;

    fn numbers(len: i64, kind: Kind) -> Tensor {
        Tensor::full([len], NUMBER, (kind, Device::Cpu))
    }

    fn relative_error(found: f64, expected: f64) -> f64 {
        (found / expected - 1.0).abs()
    }

    #[test]
    fn the_norm_of_a_large_tensor_is_exact_to_rounding_in_any_dtype() {
        // No multiple of a row or a piece.
        let len = 16 * PIECE + 2 * ROW + 12;
        let expected = (len as f64).sqrt() * NUMBER;
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            let x = numbers(len, kind);
            let found = norm([&x]);
            assert!(relative_error(found, expected) < 1e-7, "{kind:?}: {found} is not {expected}");
        }
        let plain = numbers(len, Kind::Float).norm().double_value(&[]);
        assert!(relative_error(plain, expected) > 1e-5, "libtorch's norm has become exact: this module can go");
    }

    #[test]
    fn a_division_into_parts_changes_the_norm_by_rounding_alone() {
        let x = (Tensor::arange(3 * PIECE + 77, (Kind::Float, Device::Cpu)) * 0.37).sin();
        let whole = norm([&x]);
        for parts in [2, 3, 7] {
            let found = norm(&x.chunk(parts, 0));
            assert!(relative_error(found, whole) < 1e-7, "{parts} parts: {found} is not {whole}");
        }
    }

    #[test]
    fn norms_of_small_empty_and_strided_tensors_are_those_of_their_elements() {
        let x = Tensor::from_slice(&[3.0f32, 0.0, 4.0, 12.0]);
        assert_eq!(norm([&x]), 13.0);
        assert_eq!(norm([&x.narrow(0, 0, 3), &x.narrow(0, 3, 1)]), 13.0);
        assert_eq!(norm([&x.view([2, 2]).tr()]), 13.0);
        assert_eq!((norm([&x.narrow(0, 0, 0)]), norm([])), (0.0, 0.0));
        assert_eq!(norm([&Tensor::from_slice(&[1e300f64, 0.0]).square()]), f64::INFINITY);
        assert!(norm([&x, &Tensor::from_slice(&[f32::NAN])]).is_nan());
        assert_eq!(norm([&Tensor::from(2.0f32)]), 2.0);
    }

    #[test]
    fn squares_along_a_long_dimension_are_exact_to_rounding() {
        // Column 1 is twice column 0.
        let len = 4 * PIECE + 4;
        let column = numbers(len, Kind::Float);
        let x = Tensor::stack(&[&column, &(&column * 2.0)], 1);
        let expected = [1.0, 4.0].map(|factor| factor * len as f64 * NUMBER * NUMBER);
        for (dim, x) in [(-2, x.shallow_clone()), (-1, x.tr()), (0, x)] {
            let found = Vec::<f64>::try_from(square_along(&x, dim)).unwrap();
            for (found, expected) in found.iter().zip(expected) {
                assert!(relative_error(*found, expected) < 1e-5, "dimension {dim}: {found} is not {expected}");
            }
        }
    }
}
