//! Every line that is PPO: the equations, the rollout, the losses, the update.

pub(crate) mod alarms;
pub mod checks;
pub mod ema;
pub(crate) mod kept;
pub mod kl;
pub mod learner;
pub mod math;
pub mod rollout;
pub mod sampling;
pub mod stats;
pub mod unsupervised;
