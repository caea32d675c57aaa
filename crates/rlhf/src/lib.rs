//! RLHF with PPO for language models, on libtorch.
#![forbid(unsafe_code)]

pub mod config;
mod error;
pub mod generate;
pub mod metrics;
pub mod model;
pub mod optim;
pub mod ppo;
pub mod rng;
pub mod rollout;
pub mod train;
pub mod weights;

pub use error::{Error, Result};
