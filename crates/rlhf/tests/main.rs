//! The integration tests: one binary, one module per subject.

mod models;
mod ppo_golden;
mod support;
