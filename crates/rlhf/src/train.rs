//! The loops: supervised fine-tuning, the reward model, PPO. Each reads top to bottom.

pub mod ppo;
