//! The integration tests: one binary, one module per subject.

mod models;
mod support;
