//! One memory for the gradients of two models that are trained one after the other.

use tch::{Device, Kind, Tensor};

/// Bytes to which gradients are aligned: those of a cache line, and of the widest vector instructions.
const ALIGNMENT: usize = 64;

/// Number of elements and dtype of a gradient, or of the gradients of parameters that are in one vector.
pub type GradientSize = (usize, Kind);

/// Memory for the gradients of one of several models at a time, as large as the largest one's: 4 bytes per parameter in f32.
///
/// It is zero whenever it is lent, as an optimizer's step clears the gradients.
#[derive(Debug)]
pub struct SharedGradients {
    /// `[bytes]` u8.
    memory: Tensor,
}

impl SharedGradients {
    /// Allocates memory on `device` that is large enough for the gradients of each model.
    pub fn new(device: Device, models: &[Vec<GradientSize>]) -> Self {
        let bytes = models.iter().map(|sizes| sizes.iter().copied().map(aligned_bytes).sum::<usize>()).max();
        Self { memory: Tensor::zeros([bytes.unwrap_or(0) as i64], (Kind::Uint8, device)) }
    }

    /// Returns the memory of each gradient of one model, a vector, which is zero. No other model may use it at the same time.
    pub fn lend(&self, sizes: &[GradientSize]) -> Vec<Tensor> {
        let mut start = 0;
        let vector = |&(len, kind): &GradientSize| {
            let bytes = self.memory.narrow(0, start, (len * kind.elt_size_in_bytes()) as i64);
            start += aligned_bytes((len, kind)) as i64;
            bytes.view_dtype(kind)
        };
        sizes.iter().map(vector).collect()
    }
}

/// Bytes of a gradient, rounded up.
fn aligned_bytes((len, kind): GradientSize) -> usize {
    (len * kind.elt_size_in_bytes()).next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_of_either_model_are_parts_of_one_memory_in_their_own_dtypes() {
        let models = [
            vec![(15, Kind::Float), (7, Kind::BFloat16)],
            vec![(2, Kind::BFloat16), (0, Kind::Float), (16, Kind::Float)],
        ];
        let shared = SharedGradients::new(Device::Cpu, &models);
        assert_eq!(shared.memory.size(), [128], "60 and 14 bytes, or 4 and 64, each at a multiple of 64");
        for sizes in [&models[0], &models[1], &models[0]] {
            let mut grads = shared.lend(sizes);
            for (grad, &(len, kind)) in grads.iter_mut().zip(sizes) {
                assert_eq!((grad.size(), grad.kind()), (vec![len as i64], kind));
                assert!(len == 0 || tch_ext::storage_id(grad) == tch_ext::storage_id(&shared.memory));
                assert_eq!(grad.abs().sum(Kind::Float).double_value(&[]), 0.0);
                let _ = grad.fill_(1.0);
            }
            // Each has its own part.
            for grad in &mut grads {
                assert_eq!(grad.sum(Kind::Float).double_value(&[]), grad.numel() as f64);
                let _ = grad.zero_();
            }
        }
    }
}
