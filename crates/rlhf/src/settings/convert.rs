//! Settings of `rlhf convert`.

use std::path::PathBuf;

use serde::Serialize;

use rlhf_base::Result;
use rlhf_base::schema::{ByteSize, Choice, Choices, RUN, Settings, defaults, expect};
use rlhf_lm::model::Dtype;

/// Settings of `rlhf convert`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct ConvertConfig {
    /// GGUF file of a Llama, Qwen2, Qwen3, SmolLM3 or OLMo 2 model, or the first part of a split one; unquantized, or in Q4_0 to Q8_0, Q2_K to Q6_K,
    /// IQ4_NL or IQ4_XS.
    #[setting(positional, value_name = "FILE")]
    pub file: PathBuf,
    /// Folder for the model, new or empty.
    #[setting(positional, value_name = "OUTPUT")]
    pub output_dir: PathBuf,
    /// Dtype of the weights: float32 loses nothing.
    #[setting(heading = RUN, choices = stated(), default = "float32")]
    pub dtype: Dtype,
    /// Maximum size of each file of saved weights, such as 5GB or 500MB.
    #[setting(heading = RUN, default = "50GB")]
    pub max_shard_size: ByteSize,
}

/// Returns the dtypes but `auto`: a quantized file has none to keep.
fn stated() -> Vec<Choice> {
    let stated = Dtype::ALL.iter().filter(|(dtype, _)| *dtype != Dtype::Auto);
    stated.map(|(_, choice)| *choice).collect()
}

impl ConvertConfig {
    /// Creates a configuration with every default, for this file and this output folder.
    pub fn new(file: impl Into<PathBuf>, output_dir: impl Into<PathBuf>) -> Self {
        Self { file: file.into(), output_dir: output_dir.into(), ..defaults() }
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        expect(self.dtype != Dtype::Auto, "dtype", self.dtype.name(), "float32, bfloat16 or float16")
    }
}
