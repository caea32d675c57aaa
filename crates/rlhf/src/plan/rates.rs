//! Rates of this machine: a calibration of about a second, with the shapes and the precision of the run.

use super::memory::Job;
use crate::{Error, Result};
use std::time::{Duration, Instant};
use tch::{Kind, Tensor};

/// Seconds of one measurement, at least.
const SECONDS: f64 = 0.3;

/// Bytes of the weights of the measurement of decoding: more than the processor's caches hold.
const COLD: i64 = 96 << 20;

/// Largest width that is measured: rates of wider products are the same.
const MOST_WIDTH: i64 = 4096;

/// Multiplications of one measured product, at most.
const MOST_PRODUCT: i64 = 2_000_000_000;

/// Operations and bytes per second.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rates {
    /// Operations per second of the products of a forward and backward pass.
    pub(super) flops: f64,
    /// Bytes per second at which decoding reads weights.
    pub(super) bytes: f64,
}

impl Rates {
    /// Measures the products of the run's first model.
    ///
    /// # Errors
    /// If libtorch cannot allocate the matrices.
    pub(super) fn measure(job: &Job<'_>) -> Result<Self> {
        let config = job.members.first().map(|member| member.sizes.config());
        let Some(config) = config else { return Err(Error::Run("plan: no model".into())) };
        let (hidden, inner) = (config.hidden_size.min(MOST_WIDTH), config.intermediate_size.min(2 * MOST_WIDTH));
        let most = (MOST_PRODUCT / (hidden * inner).max(1)).max(64);
        let tokens = (job.largest_pass(job.limit).computed as i64).clamp(16, most);
        let x = random([tokens, hidden], job.compute)?;
        let weight = random([inner, hidden], job.compute)?;
        let flops =
            2.0 * (tokens * hidden * inner) as f64 / seconds(|| tch_ext::linear(&x, &weight, &weight, None, false));
        // As many different weights as are read once for each token.
        let size = hidden * inner * job.compute.elt_size_in_bytes() as i64;
        let count = (COLD / size.max(1)).clamp(1, 64);
        let weights = (0..count).map(|_| random([inner, hidden], job.compute)).collect::<Result<Vec<_>>>()?;
        let most = job.ppo().map_or(1, |ppo| ppo.local_rollout_forward_batch_size);
        let rows = job.rows.updates.first().map_or(1, Vec::len).min(most).clamp(1, 64) as i64;
        let x = random([rows, hidden], job.compute)?;
        let once = seconds(|| {
            for weight in &weights {
                drop(tch_ext::linear(&x, weight, weight, None, false));
            }
        });
        let rates = Self { flops, bytes: (count * size) as f64 / once };
        drop((x, weight, weights));
        tch_ext::release_memory();
        Ok(rates)
    }
}

/// Normal numbers of this shape and dtype.
fn random(shape: [i64; 2], kind: Kind) -> Result<Tensor> {
    Ok(Tensor::f_randn(shape, (Kind::Float, tch::Device::Cpu))?.f_to_kind(kind)?)
}

/// Seconds of one call of `f`: the mean of as many as take [`SECONDS`], after one that is not counted.
fn seconds<T>(mut f: impl FnMut() -> T) -> f64 {
    tch::no_grad(|| {
        drop(f());
        let (began, mut calls) = (Instant::now(), 0);
        while began.elapsed() < Duration::from_secs_f64(SECONDS) {
            drop(f());
            calls += 1;
        }
        began.elapsed().as_secs_f64() / f64::from(calls.max(1))
    })
}
