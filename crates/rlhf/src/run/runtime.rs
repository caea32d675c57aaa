//! The ranks and the console that the program hands to a run.

use crate::run::sinks::console::Console;
use rlhf_base::dist::World;

/// The surroundings of a run, which the program hands to it: the ranks that it is one of, and its console output.
///
/// A [`Console`] alone stands for the ranks that this process has joined: `sft(&config, Console::Silent)`.
#[derive(Debug, Clone)]
pub struct Runtime {
    /// The ranks that compute the run together.
    pub world: World,
    /// Console output of this rank.
    pub console: Console,
}

impl Runtime {
    /// The ranks that this process has joined, otherwise itself alone.
    pub fn of_process(console: Console) -> Self {
        Self { world: World::of_process(), console }
    }
}

impl From<Console> for Runtime {
    fn from(console: Console) -> Self {
        Self::of_process(console)
    }
}

impl From<&Runtime> for Runtime {
    fn from(runtime: &Runtime) -> Self {
        runtime.clone()
    }
}
