//! RLHF with PPO for language models, on libtorch.
#![forbid(unsafe_code)]

mod checkpoint;
pub mod config;
pub mod data;
pub mod device;
mod error;
pub mod generate;
pub mod hub;
pub mod kl;
pub mod loss_scale;
pub mod merge;
pub mod metrics;
pub mod model;
pub mod optim;
pub mod ppo;
pub mod report;
pub mod reward;
pub mod rng;
pub mod rollout;
mod tensorboard;
pub mod tokenizer;
pub mod train;
pub mod weights;

pub use error::{Error, Result};
pub use tch;
pub use tensorboard::TensorBoard;

/// The README's Rust code must compile.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// So must that of the page about the library.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/library.md")]
struct LibraryPage;
