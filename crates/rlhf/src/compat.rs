//! Training loops of other systems: TRL's `step(queries, responses, scores)` and DeepSpeed-Chat's engine.

pub mod engine;
mod state;
pub mod step;
