//! The integration tests: one binary, one module per subject.

mod attack;
mod checkpoint;
mod cli;
mod commands;
mod corrupt;
mod data;
mod deepspeed_chat;
mod dschat;
mod examples;
mod formats;
mod fp16;
mod hub;
mod library;
mod lora;
mod models;
mod numbers;
mod pipeline;
mod ppo_golden;
mod ppo_invariance;
mod ppo_knobs;
mod rewards;
mod sampling;
mod step;
mod step_golden;
mod support;
mod tokenizers;
