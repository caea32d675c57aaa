//! Language models on libtorch: what [rlhf](https://docs.rs/rlhf) trains and samples from. It knows neither rewards nor runs.
//!
//! ```no_run
//! use rlhf_lm::generate::{GenerationConfig, Sampling, generate};
//! use rlhf_lm::model::{CausalLm, ModelOptions};
//! use rlhf_lm::tokenizer::Tokenizer;
//!
//! fn main() -> rlhf_base::Result<()> {
//!     let folder = "runs/sft".as_ref();
//!     let tokenizer = Tokenizer::from_pretrained(folder)?;
//!     let model = CausalLm::from_pretrained(folder, ModelOptions::default())?;
//!     let prompt = tokenizer.encode("The capital of France is")?;
//!     for response in generate(&model, &[prompt], &GenerationConfig::new(Sampling::Greedy, 32))? {
//!         println!("{}", tokenizer.decode(&response.tokens)?);
//!     }
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
