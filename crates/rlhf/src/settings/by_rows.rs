//! The sizes of runs over the rows of a dataset: SFT, the reward model, DPO, distillation.

use super::distill::DistillConfig;
use super::dpo::DpoConfig;
use super::plan::{BatchSettings, TrainPlan, train_plan};
use super::reward::RewardConfig;
use super::sft::SftConfig;
use rlhf_base::Result;
use rlhf_base::dist::num_ranks;

/// Implements the sizes of runs with these settings, which have the same names.
macro_rules! sized_by_rows {
    ($($config:ty),*) => { $(
        impl $config {
            /// Checks the settings and returns the sizes of the run over `num_rows` rows, or pairs.
            ///
            /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the setting, its value and what was expected.
            pub fn plan(&self, num_rows: usize) -> Result<TrainPlan> {
                self.check()?;
                self.plan_for(num_rows)
            }

            /// Returns the settings that size an optimizer step.
            pub(crate) fn batches(&self) -> BatchSettings {
                BatchSettings {
                    all: self.train_batch_size,
                    per_device: self.per_device_train_batch_size,
                    accumulated: self.gradient_accumulation_steps,
                    ranks: num_ranks(),
                }
            }

            /// Returns the sizes of the run, of settings that are checked already.
            pub(crate) fn plan_for(&self, num_rows: usize) -> Result<TrainPlan> {
                train_plan(self.batches().rows()?, self.num_train_epochs, self.max_steps, num_rows)
            }
        }
    )* };
}

sized_by_rows!(SftConfig, RewardConfig, DpoConfig, DistillConfig);
