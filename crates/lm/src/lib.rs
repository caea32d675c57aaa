//! Language models on libtorch: what [rlhf](https://docs.rs/rlhf) trains and samples from. It knows neither rewards nor runs.
//!
//! ```no_run
//! use rlhf_lm::model::{CausalLm, ModelOptions};
//! use rlhf_lm::tokenizer::Tokenizer;
//!
//! fn main() -> rlhf_base::Result<()> {
//!     let folder = "HuggingFaceTB/SmolLM2-135M-Instruct".as_ref();
//!     let tokenizer = Tokenizer::from_pretrained(folder, None)?;
//!     let model = CausalLm::from_pretrained(folder, None, ModelOptions::default())?;
//!     let ids = tokenizer.encode("The capital of France is")?;
//!     let logprobs = model.logprobs(&[ids], 1.0)?;
//!     println!("{logprobs:?}");
//!     Ok(())
//! }
//! ```
//!
//! | for | see |
//! |---|---|
//! | models of Hugging Face's format, adapters, quantized bases, sharding | [`model`] |
//! | text to ids and back, chat templates | [`tokenizer`] |
//! | sampling and its filters | [`generate`] |
//! | optimizers, schedules, loss scaling | [`optim`] |
//! | llama.cpp's files | [`gguf`] |
#![forbid(unsafe_code)]

pub mod generate;
pub mod gguf;
pub mod model;
pub mod optim;
pub mod tokenizer;
