//! Rows in batches of bounded size.

use rlhf_base::Result;
use std::ops::Range;
use tch::{Device, Kind, Tensor};

/// Consecutive ranges of at most `batch_size` of `rows` rows.
pub fn batches(rows: usize, batch_size: usize) -> impl Iterator<Item = Range<usize>> {
    let size = batch_size.max(1);
    (0..rows).step_by(size).map(move |from| from..(from + size).min(rows))
}

/// `parts` `[n]` one after another; `[0]` f32 on `device` if there are none.
pub fn joined(parts: &[Tensor], device: Device) -> Tensor {
    match parts {
        [] => Tensor::zeros([0], (Kind::Float, device)),
        parts => Tensor::cat(parts, 0),
    }
}

/// Calls `f` on consecutive ranges of at most `batch_size` of `rows` rows and concatenates the results, `[M]` f32 on `device`.
pub fn in_batches(
    rows: usize,
    batch_size: usize,
    device: Device,
    f: impl Fn(Range<usize>) -> Result<Tensor>,
) -> Result<Tensor> {
    Ok(joined(&batches(rows, batch_size).map(f).collect::<Result<Vec<_>>>()?, device))
}
