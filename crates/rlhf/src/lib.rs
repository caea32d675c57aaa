//! RLHF with PPO for language models, on libtorch.
#![forbid(unsafe_code)]

mod error;
mod tensorboard;

pub use error::{Error, Result};
pub use tensorboard::TensorBoard;
