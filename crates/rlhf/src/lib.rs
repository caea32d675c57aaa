//! RLHF with PPO for language models, on libtorch.
#![forbid(unsafe_code)]

pub mod config;
mod error;

pub use error::{Error, Result};

pub mod generate;
pub mod model;
pub mod ppo;
pub mod rng;
pub mod weights;
