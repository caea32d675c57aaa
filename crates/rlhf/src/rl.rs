//! Every line that is PPO: the equations, the rollout, the losses, the update.

pub(crate) mod alarms;
pub mod checks;
pub mod ema;
pub mod kl;
pub mod math;
pub mod rollout;
pub mod unsupervised;
