//! Settings of `rlhf convert`.

use std::path::PathBuf;

use serde::Serialize;

use rlhf_base::name_of;
use rlhf_base::schema::{ByteSize, Choice, Choices, RUN, Settings, defaults, expect};
use rlhf_base::{Error, Result};
use rlhf_lm::gguf::Stored;
use rlhf_lm::model::Dtype;

/// Type of the weights of a GGUF file, by the names of llama.cpp's converter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
pub enum GgufType {
    /// f32: loses nothing.
    #[choice(name = "f32")]
    F32,
    /// f16.
    #[default]
    #[choice(name = "f16")]
    F16,
    /// bf16.
    #[choice(name = "bf16")]
    Bf16,
    /// Eight bits, with a scale for each 32 numbers of a row.
    #[serde(rename = "q8_0")]
    #[choice(name = "q8_0")]
    Q8_0,
    /// Four bits for most matrices and six for those that matter most, as llama-quantize mixes them.
    #[serde(rename = "q4_k_m")]
    #[choice(name = "q4_k_m")]
    Q4KM,
}

impl GgufType {
    /// The type of most matrices; vectors are in f32 in any file.
    pub fn stored(self) -> Stored {
        match self {
            Self::F32 => Stored::F32,
            Self::F16 => Stored::F16,
            Self::Bf16 => Stored::Bf16,
            Self::Q8_0 => Stored::Q8_0,
            Self::Q4KM => Stored::Q4K,
        }
    }

    /// llama.cpp's number of a file of mostly this type.
    pub fn file_type(self) -> i64 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 7,
            Self::Q4KM => 15,
            Self::Bf16 => 32,
        }
    }

    /// Whether matrices are stored as codes and scales.
    pub fn is_quantized(self) -> bool {
        matches!(self, Self::Q8_0 | Self::Q4KM)
    }
}

/// Settings of `rlhf convert`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct ConvertConfig {
    /// GGUF file of one of the families in the guide to GGUF, or the first part of a split one; unquantized, or in Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL,
    /// IQ4_XS or MXFP4; with output_file the folder of such a model.
    #[setting(positional, value_name = "FILE")]
    pub file: PathBuf,
    /// Folder for the model, new or empty.
    #[setting(positional, value_name = "OUTPUT", short = "folder to write to")]
    pub output_dir: Option<PathBuf>,
    /// GGUF file to make of a model's folder; it must not exist.
    #[setting(heading = RUN, short = "GGUF file to make of a model's folder")]
    pub output_file: Option<PathBuf>,
    /// Type of the matrices in the GGUF file; those whose rows are no multiple of 32 numbers are f16 in place of q8_0 and q4_k_m.
    #[setting(heading = RUN, default = "f16", short = "type of the weights of a GGUF file")]
    pub outtype: GgufType,
    /// Dtype of the weights: float32 loses nothing.
    #[setting(heading = RUN, choices = stated(), default = "float32", short = "dtype of weights and computation")]
    pub dtype: Dtype,
    /// Maximum size of each file of saved weights, such as 5GB or 500MB.
    #[setting(heading = RUN, default = "50GB", short = "maximum size of a weights file")]
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
        Self { file: file.into(), output_dir: Some(output_dir.into()), ..defaults() }
    }

    /// Creates a configuration with every default that makes the GGUF file `output_file` of the model in the folder `dir`.
    pub fn export(dir: impl Into<PathBuf>, output_file: impl Into<PathBuf>) -> Self {
        Self { file: dir.into(), output_file: Some(output_file.into()), ..defaults() }
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`], naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        match (&self.output_dir, &self.output_file) {
            (Some(_), None) | (None, Some(_)) => {}
            (None, None) => {
                let message =
                    "rlhf convert: expected the output folder for the model, or --output_file for a GGUF file";
                return Err(Error::Usage(message.into()));
            }
            (Some(dir), Some(_)) => {
                let rest = format!(": expected no output folder beside it, found {}", dir.display());
                return Err(Error::refused(name_of!(self.output_file), rest));
            }
        }
        expect(self.dtype != Dtype::Auto, name_of!(self.dtype), self.dtype.name(), "float32, bfloat16 or float16")
    }
}
