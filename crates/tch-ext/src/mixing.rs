//! Kernels of layers with a state in the place of attention: short convolutions and the gated delta rule.

use crate::ops::new_tensor;
use std::ffi::c_char;
use std::ptr::null;
use tch::{Kind, Tensor};
use torch_sys::C_tensor;

/// Sizes of a layer with the gated delta rule.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaSizes {
    /// Number of query and key heads.
    pub key_heads: i64,
    /// Number of value heads, a multiple of `key_heads`.
    pub value_heads: i64,
    /// Width of a query or key.
    pub key_dim: i64,
    /// Width of a value.
    pub value_dim: i64,
}

/// Packed sequences, each of which may continue an earlier one: it starts with the state after the other's last token.
#[derive(Debug, Clone, Copy)]
pub struct PackedRows<'a> {
    /// Offset of each sequence, and the end of the last.
    pub starts: &'a [i64],
    /// The number of the sequence that each continues, or -1; `None`: all start from nothing. A sequence that starts from nothing comes before all
    /// that continue it, directly or not, and these before the next.
    pub parents: Option<&'a [i64]>,
}

impl<'a> PackedRows<'a> {
    /// Sequences that start from nothing.
    pub fn new(starts: &'a [i64]) -> Self {
        Self { starts, parents: None }
    }

    /// The number of sequences, and pointers to both lists.
    fn parts(&self) -> (usize, *const i64, *const i64) {
        let rows = count(self.starts);
        assert!(
            self.parents.is_none_or(|parents| parents.len() == rows),
            "expected a parent of each of {rows} sequences, found {:?}",
            self.parents
        );
        (rows, self.starts.as_ptr(), self.parents.map_or(null(), <[i64]>::as_ptr))
    }
}

unsafe extern "C" {
    fn tch_ext_gated_convolution(
        out: *mut *mut C_tensor,
        x: *const C_tensor,
        weight: *const C_tensor,
        bias: *const C_tensor,
        starts: *const i64,
        parents: *const i64,
        rows: usize,
    ) -> *mut c_char;
    fn tch_ext_silu_convolution(
        out: *mut *mut C_tensor,
        x: *const C_tensor,
        weight: *const C_tensor,
        starts: *const i64,
        parents: *const i64,
        rows: usize,
    ) -> *mut c_char;
    fn tch_ext_delta_rule(
        out: *mut *mut C_tensor,
        sizes: *const DeltaSizes,
        x: *const C_tensor,
        decays: *const C_tensor,
        strengths: *const C_tensor,
        starts: *const i64,
        parents: *const i64,
        rows: usize,
    ) -> *mut c_char;
    fn tch_ext_delta_rule_from(
        out: *mut *mut C_tensor,
        sizes: *const DeltaSizes,
        x: *const C_tensor,
        decays: *const C_tensor,
        strengths: *const C_tensor,
        starts: *const i64,
        rows: usize,
        start: *const C_tensor,
        end: *mut C_tensor,
    ) -> *mut c_char;
    fn tch_ext_delta_step(
        out: *mut *mut C_tensor,
        sizes: *const DeltaSizes,
        x: *const C_tensor,
        decays: *const C_tensor,
        strengths: *const C_tensor,
        active: *const C_tensor,
        states: *mut C_tensor,
    ) -> *mut c_char;
}

/// Checks the offsets of packed sequences, and returns their number.
fn count(starts: &[i64]) -> usize {
    let pairs = starts.windows(2).all(|pair| pair[0] < pair[1]);
    assert!(
        starts.first() == Some(&0) && pairs,
        "expected sequences of at least one token, found the offsets {starts:?}"
    );
    starts.len() - 1
}

/// A gated convolution over each of several packed sequences: of the three parts of `x` `[N, 3 * width]`, f32 or bf16, the first times the third
/// goes through a convolution of each channel over the last tokens, and its result times the second part is returned, `[N, width]`.
///
/// `weight` is `[width, 1, kernel]` and `bias` `[width]`. Tokens after the last sequence have the result 0. Differentiable in `x` and in the leaves.
///
/// # Panics
/// If shapes, dtypes or devices are incompatible.
pub fn gated_convolution(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, packed: PackedRows<'_>) -> Tensor {
    let ((rows, starts, parents), bias) = (packed.parts(), bias.map_or(null(), |bias| bias.as_ptr()));
    // SAFETY: all pointers are to tensors and slices that this call borrows; the shim checks shapes and dtypes.
    new_tensor(|out| unsafe {
        tch_ext_gated_convolution(out, x.as_ptr(), weight.as_ptr(), bias, starts, parents, rows)
    })
}

/// The SiLU of a convolution of each channel of `x` `[N, width]`, f32 or bf16, over packed sequences, as [`gated_convolution`]; returns f32.
///
/// # Panics
/// If shapes, dtypes or devices are incompatible.
pub fn silu_convolution(x: &Tensor, weight: &Tensor, packed: PackedRows<'_>) -> Tensor {
    let (rows, starts, parents) = packed.parts();
    // SAFETY: as in `gated_convolution`.
    new_tensor(|out| unsafe { tch_ext_silu_convolution(out, x.as_ptr(), weight.as_ptr(), starts, parents, rows) })
}

/// The gated delta rule over each of several packed sequences, from states of zeros; returns `[N, value heads * value width]`
/// f32.
///
/// `x` `[N, ...]` f32 has the queries of all key heads, then their keys, then the values of all value heads. Queries and keys are divided by their
/// lengths, queries also by the root of their width. `decays` are logarithms, at most 0, and `strengths` are factors of the corrections, `[N, value
/// heads]` f32 each. Tokens after the last sequence have the result 0. Differentiable in all three.
///
/// # Panics
/// If shapes, dtypes or devices are incompatible.
pub fn delta_rule(
    sizes: DeltaSizes,
    x: &Tensor,
    decays: &Tensor,
    strengths: &Tensor,
    packed: PackedRows<'_>,
) -> Tensor {
    let (rows, starts, parents) = packed.parts();
    let (decays, strengths) = (decays.as_ptr(), strengths.as_ptr());
    // SAFETY: as in `gated_convolution`.
    new_tensor(|out| unsafe { tch_ext_delta_rule(out, &sizes, x.as_ptr(), decays, strengths, starts, parents, rows) })
}

/// [`delta_rule`] of sequences from the states `start`, or zeros, with the states after each, `[rows, value heads, key width, value width]` f32;
/// `starts` has their offsets and the end of the last. Not differentiable.
///
/// # Panics
/// If shapes, dtypes or devices are incompatible.
pub fn delta_rule_from(
    sizes: DeltaSizes,
    x: &Tensor,
    [decays, strengths]: [&Tensor; 2],
    starts: &[i64],
    start: Option<&Tensor>,
) -> (Tensor, Tensor) {
    let rows = count(starts);
    let shape = [rows as i64, sizes.value_heads, sizes.key_dim, sizes.value_dim];
    let mut end = Tensor::empty(shape, (Kind::Float, x.device()));
    let start = start.map_or(null(), |start| start.as_ptr());
    let (decays, strengths) = (decays.as_ptr(), strengths.as_ptr());
    // SAFETY: as in `gated_convolution`; `end` is borrowed mutably.
    let outputs = new_tensor(|out| unsafe {
        tch_ext_delta_rule_from(
            out,
            &sizes,
            x.as_ptr(),
            decays,
            strengths,
            starts.as_ptr(),
            rows,
            start,
            end.as_mut_ptr(),
        )
    });
    (outputs, end)
}

/// One more token in each row of the gated delta rule, whose `states` are changed in place; returns `[rows, value heads * value width]` f32.
///
/// `active` `[rows, 1]` f32 is 1 for the rows whose state changes; the others have the output of their query with their state as it is.
///
/// # Panics
/// If shapes, dtypes or devices are incompatible.
pub fn delta_step(
    sizes: DeltaSizes,
    x: &Tensor,
    [decays, strengths]: [&Tensor; 2],
    active: Option<&Tensor>,
    states: &mut Tensor,
) -> Tensor {
    let active = active.map_or(null(), |active| active.as_ptr());
    let states = states.as_mut_ptr();
    // SAFETY: as in `gated_convolution`; `states` is borrowed mutably.
    new_tensor(|out| unsafe {
        tch_ext_delta_step(out, &sizes, x.as_ptr(), decays.as_ptr(), strengths.as_ptr(), active, states)
    })
}
