//! Settings of the computation of commands that use models without training.

use serde::Serialize;

use rlhf_base::Result;
use rlhf_base::device::{Device, check_threads, use_threads};
use rlhf_base::schema::{SPEED, Settings};
use rlhf_lm::model::{Dtype, ModelOptions, QuantizationConfig};

/// Device and precision of commands that use models without training.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct ComputeConfig {
    /// Dtype of the model's weights and computation; `auto` is that of its files.
    #[setting(heading = SPEED, default = "auto", short = "dtype of weights and computation")]
    pub dtype: Dtype,
    /// Quantization of the weights.
    #[setting(flatten)]
    #[serde(flatten)]
    pub quantization: QuantizationConfig,
    /// Device to compute on: cpu, cuda, cuda:N, or `auto` for a GPU if there is one.
    #[setting(heading = SPEED, default = Device::Auto, resume = Free, short = "cpu, cuda, cuda:N or auto")]
    pub device: Device,
    /// Number of threads for tensor operations [default: one per core].
    #[setting(heading = SPEED, resume = Free)]
    pub num_threads: Option<usize>,
}

impl ComputeConfig {
    /// Returns the options to load a model with; also sets libtorch's number of threads, if it is configured.
    ///
    /// # Errors
    /// If there is no such device.
    pub fn options(&self) -> Result<ModelOptions> {
        use_threads(self.num_threads);
        let quantization = self.quantization.quantization();
        Ok(ModelOptions { device: self.device.resolve()?, dtype: self.dtype, quantization, ..ModelOptions::default() })
    }

    pub(super) fn check(&self) -> Result<()> {
        check_threads(self.num_threads)?;
        self.quantization.check()
    }
}
