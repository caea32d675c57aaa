//! Settings of `rlhf replay`.

use std::path::PathBuf;

use serde::Serialize;

use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{RUN, Settings, at_least_one};

/// Settings of `rlhf replay`, beside those of `rlhf ppo` that it changes.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct ReplayConfig {
    /// Folder of a run of ppo, grpo or rloo with `log_rollouts`.
    #[setting(positional, value_name = "RUN")]
    pub run: PathBuf,
    /// Update to compute again, counted from 1: its rollout and the checkpoint before it are needed.
    #[setting(heading = RUN, short = "number of the update, from 1")]
    pub update: usize,
    /// New folder for the numbers of the update [default: `RUN-replay-UPDATE`, beside the run].
    #[setting(alias = "output", heading = RUN, short = "folder to write to")]
    pub output_dir: Option<PathBuf>,
}

impl ReplayConfig {
    /// Creates a configuration with every default, for an update of this run.
    pub fn new(run: impl Into<PathBuf>, update: usize) -> Self {
        Self { run: run.into(), update, output_dir: None }
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        at_least_one(name_of!(self.update), self.update)
    }

    /// Returns the folder to write to.
    pub fn output_dir(&self) -> PathBuf {
        let default_dir = || {
            // `.` has no name.
            let run = match self.run.file_name() {
                Some(_) => self.run.clone(),
                None => self.run.canonicalize().unwrap_or_default(),
            };
            let name = run.file_name().unwrap_or_default().to_string_lossy();
            run.with_file_name(format!("{name}-replay-{}", self.update))
        };
        self.output_dir.clone().unwrap_or_else(default_dir)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_folder_is_beside_the_run() {
        for (run, expected) in [("runs/ppo", "runs/ppo-replay-3"), ("ppo/", "ppo-replay-3"), ("/a/b/", "/a/b-replay-3")]
        {
            assert_eq!(ReplayConfig::new(run, 3).output_dir(), PathBuf::from(expected));
        }
        let here = std::env::current_dir().unwrap();
        let name = format!("{}-replay-3", here.file_name().unwrap().to_string_lossy());
        assert_eq!(ReplayConfig::new(".", 3).output_dir(), here.with_file_name(name));
    }
}
