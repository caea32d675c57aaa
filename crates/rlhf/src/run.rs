//! The state of a run: output folder, checkpoints, resuming, the best model, metrics, console output.
//!
//! | subject | module |
//! |---|---|
//! | the course of a run | `session` |
//! | what a run starts from | `start` |
//! | the output folder and its lock | `output_dir` |
//! | checkpoints, the best model | `checkpoint`, `best` |
//! | batch sizes over all ranks, of a checkpoint and of the run that resumes from it | `sizes` |
//! | whether a resumed run has the same inputs and environment variables | `inputs`, `environment` |
//! | the ranks and the console that the program hands to a run | `runtime` |
//! | events, and where they go | `event`, `report`, `sinks`, `tensorboard` |
//! | the turns of a response with tools, as all views show them | `turns` |
//! | an update as the run recorded it, for a replay | `rollout_file` |
//! | the numbers at the start and at the end, as all views show them | `ends` |
//! | the model card | `card` |
//! | uploads to the hub | `push` |
//! | settings of trackers | `tracking` |

pub(crate) mod best;
pub(crate) mod card;
pub(crate) mod checkpoint;
#[doc(hidden)] // For `rlhf watch`.
pub mod ends;
mod environment;
pub(crate) mod event;
#[doc(hidden)] // For the program, which has the same names.
pub mod group_names;
pub(crate) mod inputs;
pub(crate) mod output_dir;
pub(crate) mod push;
pub(crate) mod report;
pub(crate) mod resolved;
pub(crate) mod rollout_file;
mod runtime;
pub(crate) mod session;
pub(crate) mod settings;
pub(crate) mod sinks;
pub(crate) mod sizes;
pub(crate) mod start;
pub(crate) mod tensorboard;
pub(crate) mod tracking;
#[doc(hidden)] // For `rlhf watch`.
pub mod turns;

use rlhf_lm::optim::micro_batch::MicroBatchSettings;

pub use checkpoint::has_checkpoint;
pub use event::{Evaluation, Event, Rollout, RolloutRow, RolloutTurns, Sample, SampleSource};
pub use output_dir::CONFIG;
#[doc(hidden)] // For `rlhf watch`.
pub use output_dir::{FolderLock, SAMPLES, is_at_work};
pub use push::settings::{HubConfig, HubStrategy, HubToken};
pub use rlhf_base::metrics::{Warning, WarningKind};
pub use rlhf_base::signals::{clear_stop, request_stop, stop_on_signals, stop_requested};
pub use rlhf_lm::optim::micro_batch::MicroBatchLimit;
pub use runtime::Runtime;
pub use settings::{CheckpointConfig, EvalConfig, Interval, Resume, RunConfig};
pub use sinks::console::{Console, announce, clear_bar};
pub use sinks::driver::{has_driver, report_error};
pub use tracking::{ReportTo, TensorboardTags, TrackingConfig};

impl From<&RunConfig> for MicroBatchSettings {
    fn from(run: &RunConfig) -> Self {
        Self { limit: run.max_tokens_per_micro_batch, gradient_checkpointing: run.gradient_checkpointing }
    }
}
