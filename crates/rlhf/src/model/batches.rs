//! Rows in batches of bounded size.

use crate::Result;
use std::ops::Range;
use tch::{Device, Kind, Tensor};

/// Consecutive ranges of at most `batch_size` of `rows` rows.
pub(crate) fn batches(rows: usize, batch_size: usize) -> impl Iterator<Item = Range<usize>> {
    let size = batch_size.max(1);
    (0..rows).step_by(size).map(move |from| from..(from + size).min(rows))
}

/// Calls `f` on consecutive ranges of at most `batch_size` of `rows` rows and concatenates the results, `[M]` f32.
pub(crate) fn in_batches(rows: usize, batch_size: usize, f: impl Fn(Range<usize>) -> Result<Tensor>) -> Result<Tensor> {
    let parts = batches(rows, batch_size).map(f).collect::<Result<Vec<_>>>()?;
    match parts.len() {
        0 => Ok(Tensor::zeros([0], (Kind::Float, Device::Cpu))),
        _ => Ok(Tensor::cat(&parts, 0)),
    }
}
