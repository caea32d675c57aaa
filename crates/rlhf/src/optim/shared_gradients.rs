//! One memory for the gradients of two models that are trained one after the other.

use crate::{Error, Result};
use tch::{Device, Kind, Tensor};

/// Bytes to which the gradients of parameters are aligned: those of a cache line, and of the widest vector instructions.
const ALIGNMENT: usize = 64;

/// Memory for the gradients of one of several models at a time, as large as the largest one's: 4 bytes per parameter in f32.
///
/// It is zero whenever it is lent, as an optimizer's step clears the gradients.
#[derive(Debug)]
pub(crate) struct SharedGradients {
    /// `[bytes]` u8.
    memory: Tensor,
}

impl SharedGradients {
    /// Allocates memory that is large enough for the gradients of each model's `parameters`.
    pub(crate) fn of<'a, P: Iterator<Item = &'a Tensor>>(parameters: impl IntoIterator<Item = P>) -> Self {
        let (mut most, mut device) = (0, Device::Cpu);
        for parameters in parameters {
            let mut bytes = 0;
            for param in parameters {
                bytes += aligned_bytes(param);
                device = param.device();
            }
            most = most.max(bytes);
        }
        Self { memory: Tensor::zeros([most as i64], (Kind::Uint8, device)) }
    }

    /// Makes this the memory of the gradients of `parameters`, which are then zero. No other model may have it.
    ///
    /// # Errors
    /// If libtorch refuses.
    pub(crate) fn lend<'a>(&self, parameters: impl Iterator<Item = &'a Tensor>) -> Result<()> {
        let mut start = 0;
        for param in parameters {
            let bytes = self.memory.narrow(0, start, (param.numel() * param.kind().elt_size_in_bytes()) as i64);
            let grad = bytes.view_dtype(param.kind()).view_as(param);
            tch_ext::set_grad(param, &grad).map_err(Error::Run)?;
            start += aligned_bytes(param) as i64;
        }
        Ok(())
    }
}

/// Bytes of the gradient of a parameter, rounded up.
fn aligned_bytes(param: &Tensor) -> usize {
    (param.numel() * param.kind().elt_size_in_bytes()).next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_of_either_model_are_parts_of_one_memory_in_their_own_dtypes() {
        let zeros = |shape: &[i64], kind| Tensor::zeros(shape, (kind, Device::Cpu)).set_requires_grad(true);
        let a = [zeros(&[3, 5], Kind::Float), zeros(&[7], Kind::BFloat16)];
        let b = [zeros(&[2], Kind::BFloat16), zeros(&[0, 4], Kind::Float), zeros(&[4, 4], Kind::Float)];
        let shared = SharedGradients::of([a.iter(), b.iter()]);
        assert_eq!(shared.memory.size(), [128], "60 and 14 bytes, or 4 and 64, each at a multiple of 64");
        for model in [&a[..], &b[..], &a[..]] {
            shared.lend(model.iter()).unwrap();
            for param in model {
                let mut grad = param.grad();
                assert_eq!((grad.size(), grad.kind()), (param.size(), param.kind()));
                assert!(param.numel() == 0 || tch_ext::storage_id(&grad) == tch_ext::storage_id(&shared.memory));
                assert_eq!(grad.abs().sum(Kind::Float).double_value(&[]), 0.0);
                let _ = grad.fill_(1.0);
            }
            // Each has its own part.
            for param in model {
                assert_eq!(param.grad().sum(Kind::Float).double_value(&[]), param.numel() as f64);
                let _ = param.grad().zero_();
            }
        }
    }
}
