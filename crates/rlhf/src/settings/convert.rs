//! Settings of `rlhf convert`.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::Result;
use crate::flag::{ByteSize, RUN, Setting, defaults, expect, required};
use crate::model::Dtype;

/// Settings of `rlhf convert`.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct ConvertConfig {
    /// GGUF file of a Llama, Qwen2, Qwen3, SmolLM3 or OLMo 2 model, or the first part of a split one; unquantized, or in Q4_0 to Q8_0, Q2_K to Q6_K,
    /// IQ4_NL or IQ4_XS.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Folder for the model, new or empty.
    #[arg(value_name = "OUTPUT")]
    pub output_dir: PathBuf,
    /// Dtype of the weights: float32 loses nothing.
    #[arg(long, help_heading = RUN, value_parser = stated(), default_value = "float32")]
    pub dtype: Dtype,
    /// Maximum size of each file of saved weights, such as 5GB or 500MB.
    #[arg(long, help_heading = RUN, default_value = "50GB", value_name = ByteSize::NAME, value_parser = required::<ByteSize>)]
    pub max_shard_size: ByteSize,
}

/// Reads a dtype by its name: not `auto`, as a quantized file has none to keep.
fn stated() -> impl TypedValueParser<Value = Dtype> {
    let all = Dtype::value_variants().iter().filter(|dtype| **dtype != Dtype::Auto);
    let names = PossibleValuesParser::new(all.filter_map(ValueEnum::to_possible_value));
    names.map(|name| Dtype::from_str(&name, false).expect("one of the names"))
}

impl ConvertConfig {
    /// Creates a configuration with every default, for this file and this output folder.
    pub fn new(file: impl Into<PathBuf>, output_dir: impl Into<PathBuf>) -> Self {
        Self { file: file.into(), output_dir: output_dir.into(), ..defaults() }
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`](crate::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        expect(self.dtype != Dtype::Auto, "dtype", self.dtype.name(), "float32, bfloat16 or float16")
    }
}
