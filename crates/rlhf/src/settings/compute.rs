//! Settings of the computation of commands that use models without training.

use clap::Args;
use serde::Serialize;

use crate::Result;
use crate::device::{Device, check_threads, use_threads};
use crate::flag::{NONE, RUN, Setting, optional, required};
use crate::model::{Dtype, ModelOptions, QuantizationConfig};

/// Device and precision of commands that use models without training.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct ComputeConfig {
    /// Dtype of the model's weights and computation; `auto` is that of its files.
    #[arg(long, help_heading = RUN, value_enum, default_value = "auto")]
    pub dtype: Dtype,
    /// Quantization of the weights.
    #[command(flatten)]
    #[serde(flatten)]
    pub quantization: QuantizationConfig,
    /// Device to compute on: cpu, cuda, cuda:N, or `auto` for a GPU if there is one.
    #[arg(long, help_heading = RUN, default_value_t = Device::Auto, value_name = Device::NAME, value_parser = required::<Device>)]
    pub device: Device,
    /// Number of threads for tensor operations [default: one per core].
    #[arg(long, help_heading = RUN, default_value = NONE, value_parser = optional::<usize>)]
    pub num_threads: std::option::Option<usize>,
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
