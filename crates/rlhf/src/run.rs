//! The state of a run: output folder, checkpoints, resuming, the best model, metrics, console output.

pub(crate) mod checkpoint;
pub(crate) mod inputs;
pub mod report;
pub(crate) mod resolved;
pub(crate) mod settings;
pub(crate) mod tensorboard;

pub use settings::{CheckpointConfig, EvalConfig, ReportTo, Resume, RunConfig, TensorboardTags, WatchConfig};
