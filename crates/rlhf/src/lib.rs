//! RLHF with PPO for language models, on libtorch.
#![forbid(unsafe_code)]

mod error;

pub use error::{Error, Result};
