//! Settings of `rlhf schema`.

use serde::Serialize;

use rlhf_base::schema::{Settings, any_text};

/// Settings of `rlhf schema`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct SchemaConfig {
    /// Commands to describe [default: all].
    #[setting(positional, value_name = "COMMAND", parse = any_text)]
    pub commands: Vec<String>,
}
