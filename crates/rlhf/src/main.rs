//! The `rlhf` program.
fn main() {}
