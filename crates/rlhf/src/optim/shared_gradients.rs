//! One memory for the gradients of two models that are trained one after the other.

use crate::optim::Optimizer;
use crate::{Error, Result};
use tch::{Device, Kind, Tensor};

/// Bytes to which the gradients of parameters are aligned: those of a cache line, and of the widest vector instructions.
const ALIGNMENT: usize = 64;

/// Memory for the gradients of one of two models at a time, as large as the larger one's: 4 bytes per parameter in f32.
///
/// It is zero whenever it is handed over, as an optimizer's step clears the gradients.
#[derive(Debug)]
pub(crate) struct SharedGradients {
    /// `[bytes]` u8.
    memory: Tensor,
}

impl SharedGradients {
    /// Allocates memory that is large enough for the gradients of either optimizer's parameters.
    pub(crate) fn of(optimizers: [&Optimizer; 2]) -> Self {
        let bytes = |optimizer: &Optimizer| optimizer.params.iter().map(|param| aligned_bytes(&param.tensor)).sum();
        let most: usize = optimizers.map(bytes).into_iter().max().unwrap_or(0);
        let device =
            optimizers.iter().flat_map(|optimizer| &optimizer.params).map(|param| param.tensor.device()).next();
        Self { memory: Tensor::zeros([most as i64], (Kind::Uint8, device.unwrap_or(Device::Cpu))) }
    }

    /// Makes this the memory of the gradients of `to`, which are then zero. Those of `from` exist no more; they are cleared already.
    ///
    /// # Errors
    /// If libtorch refuses.
    pub(crate) fn hand_over(&self, from: &mut Optimizer, to: &mut Optimizer) -> Result<()> {
        from.release_gradients()?;
        let mut start = 0;
        for param in &to.params {
            let tensor = &param.tensor;
            let bytes = self.memory.narrow(0, start, (tensor.numel() * tensor.kind().elt_size_in_bytes()) as i64);
            let grad = bytes.view_dtype(tensor.kind()).view_as(tensor);
            tch_ext::set_grad(tensor, &grad).map_err(Error::Run)?;
            start += aligned_bytes(tensor) as i64;
        }
        Ok(())
    }
}

/// Bytes of the gradient of a parameter, rounded up.
fn aligned_bytes(param: &Tensor) -> usize {
    (param.numel() * param.kind().elt_size_in_bytes()).next_multiple_of(ALIGNMENT)
}
