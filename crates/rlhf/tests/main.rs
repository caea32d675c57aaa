//! The integration tests: one binary, one module per subject.

mod attack;
mod checkpoint;
mod cli;
mod commands;
mod data;
mod deepspeed_chat;
mod examples;
mod formats;
mod fp16;
mod hub;
mod launch;
mod library;
mod lora;
mod models;
mod numbers;
mod pipeline;
mod ppo;
mod preferences;
mod rank_rows;
mod rewards;
mod sampling;
mod sharding;
mod step;
mod structure;
mod support;
mod tokenizers;
