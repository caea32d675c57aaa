//! Sinks: each writes the [`Event`](crate::run::event::Event)s that concern it, one destination per file.

pub(crate) mod alarms;
pub(crate) mod console;
pub(crate) mod driver;
pub(crate) mod jsonl;
pub(crate) mod phase_bar;
pub(crate) mod rollouts;
pub(crate) mod samples;
pub(crate) mod tensorboard;
pub(crate) mod trackers;

/// Progress of a run when its sinks are opened: 0 for a new run.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reached {
    /// Updates done.
    pub(crate) updates: usize,
    /// The last of them after which a line of metrics was due.
    pub(crate) recorded: usize,
    /// Rollbacks so far.
    pub(crate) rollbacks: usize,
}
