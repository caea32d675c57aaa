//! Settings of `rlhf completions`.

use serde::Serialize;

use rlhf_base::schema::{Choices, RUN, Settings};

/// Settings of `rlhf completions`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Settings)]
pub struct CompletionsConfig {
    /// Shell that completes the words.
    #[setting(positional, heading = RUN, value_name = "SHELL")]
    pub shell: Shell,
}

/// A shell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(rename_all = "snake_case")]
pub enum Shell {
    /// GNU Bash.
    Bash,
    /// Z shell.
    Zsh,
    /// fish.
    Fish,
}
