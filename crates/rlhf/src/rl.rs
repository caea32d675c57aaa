//! Every line that is PPO: the equations, the rollout, the losses, the update.

pub mod advantage;
pub(crate) mod alarms;
pub mod checks;
pub mod ema;
pub mod entropy;
pub(crate) mod eos;
pub mod experience;
pub mod groups;
pub(crate) mod kept;
pub mod kl;
pub mod learner;
pub mod loss;
pub mod math;
mod metrics;
pub mod reference;
pub mod rollout;
pub mod sampling;
pub mod schedule;
pub mod scores;
pub(crate) mod settings;
pub mod shaping;
pub mod stats;
pub(crate) mod trace;
pub mod unsupervised;
