//! PPO by [`rlhf::train::ppo`]: against TRL's numbers, under every cut of its rows, and under each of its settings.

mod golden;
mod groups_golden;
mod invariance;
mod settings;
mod tools_golden;
