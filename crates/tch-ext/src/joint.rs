//! Several linear layers that read the same input, as one product.

use crate::into_result;
use crate::ops::expect;
use std::borrow::Borrow;
use std::ffi::c_char;
use std::ptr::{null, null_mut};
use tch::Tensor;
use torch_sys::C_tensor;

unsafe extern "C" {
    fn tch_ext_adjacent(out: *mut *mut C_tensor, parts: *const *mut C_tensor, count: usize) -> *mut c_char;
    fn tch_ext_joint_linear(
        out: *mut *mut C_tensor,
        x: *const C_tensor,
        weights: *const *mut C_tensor,
        biases: *const *mut C_tensor,
        count: usize,
        used: *const C_tensor,
        used_bias: *const C_tensor,
        splits: bool,
    ) -> *mut c_char;
}

/// The weights or the biases of several layers.
#[derive(Debug, Clone, Copy)]
pub struct Joined<'a> {
    /// The leaves, `[out, in]` or `[out]` each.
    pub leaves: &'a [&'a Tensor],
    /// The same values in the dtype of products, one after another: [`adjacent`].
    pub used: &'a Tensor,
}

/// The matrices or vectors `parts` as one along their first dimension, if they are contiguous and lie one after another in one memory,
/// which the result shares. It has no gradient.
pub fn adjacent<T: Borrow<Tensor>>(parts: &[T]) -> Option<Tensor> {
    let (parts, mut out) = (pointers(parts), null_mut());
    // SAFETY: pointers to borrowed tensors, of which the shim takes handles.
    expect(into_result(unsafe { tch_ext_adjacent(&raw mut out, parts.as_ptr(), parts.len()) }));
    // SAFETY: it is a new tensor that the caller owns.
    (!out.is_null()).then(|| unsafe { Tensor::from_ptr(out) })
}

/// [`crate::linear`] of several layers with weights `[out, in]` for the same `x` `[N, in]`, by one product. Returns their results side by
/// side, `[N, sum of out]`, or if it `splits` them `[N, out]` of each, which are columns of one memory. Differentiable in `x` and in the
/// leaves.
///
/// # Panics
/// If there is no layer, or shapes, dtypes or devices are incompatible.
pub fn joint_linear(x: &Tensor, weights: Joined<'_>, biases: Option<Joined<'_>>, splits: bool) -> Vec<Tensor> {
    let count = weights.leaves.len();
    assert!(count > 0, "joint product: expected at least one layer");
    assert!(biases.is_none_or(|biases| biases.leaves.len() == count), "joint product: expected a bias of each layer");
    let leaves = pointers(weights.leaves);
    let bias_leaves = biases.map(|biases| pointers(biases.leaves));
    let bias_list = bias_leaves.as_ref().map_or(null(), |leaves| leaves.as_ptr());
    let used_bias = biases.map_or(null(), |biases| biases.used.as_ptr());
    let mut out = vec![null_mut(); if splits { count } else { 1 }];
    // SAFETY: all pointers are to tensors that are borrowed until the call returns, as in `linear`. Both arrays have `count` pointers, and
    // `out` has one place for each result. The C++ function checks the shapes.
    expect(into_result(unsafe {
        tch_ext_joint_linear(
            out.as_mut_ptr(),
            x.as_ptr(),
            leaves.as_ptr(),
            bias_list,
            count,
            weights.used.as_ptr(),
            used_bias,
            splits,
        )
    }));
    // SAFETY: without a message, each pointer is to a new tensor that the caller owns.
    out.into_iter().map(|result| unsafe { Tensor::from_ptr(result) }).collect()
}

fn pointers<T: Borrow<Tensor>>(tensors: &[T]) -> Vec<*mut C_tensor> {
    tensors.iter().map(|tensor| tensor.borrow().as_ptr().cast_mut()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn tensors_are_adjacent_if_each_begins_where_the_one_before_ends() {
        let all = Tensor::arange(24, (Kind::Float, Device::Cpu)).view([6, 4]);
        let rows = |from: i64, count: i64| all.narrow(0, from, count);
        let joined = adjacent(&[rows(1, 2), rows(3, 1), rows(4, 2)]).unwrap();
        assert_eq!((&joined, joined.data_ptr()), (&rows(1, 5), rows(1, 5).data_ptr()));
        let vectors = [all.view([-1]).narrow(0, 3, 5), all.view([-1]).narrow(0, 8, 2)];
        assert_eq!(adjacent(&vectors.each_ref()).unwrap(), all.view([-1]).narrow(0, 3, 7));
        // A gap, the other order, other memory, another width, columns, nothing.
        assert!(adjacent(&[rows(0, 2), rows(3, 1)]).is_none());
        assert!(adjacent(&[rows(2, 2), rows(0, 2)]).is_none());
        assert!(adjacent(&[rows(0, 2), rows(2, 2).copy()]).is_none());
        assert!(adjacent(&[rows(0, 2), rows(2, 2).view([4, 2])]).is_none());
        assert!(adjacent(&[all.narrow(1, 0, 2), all.narrow(1, 2, 2)]).is_none());
        assert!(adjacent::<Tensor>(&[]).is_none());
        // A leaf, whose graph the result has no part in.
        let leaf = rows(0, 2).detach().set_requires_grad(true);
        assert!(!adjacent(&[&leaf, &rows(2, 1)]).unwrap().requires_grad());
    }
}
