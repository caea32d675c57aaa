//! Saves the models of a PPO run.

use super::super::trained_share;
use super::{CARD_METRICS, PpoTrainer, VALUE_MODEL};
use crate::rl::ema::EMA;
use crate::run::card::Card;
use rlhf_base::Result;
use rlhf_base::weights::replace_files;
use rlhf_lm::model::Dtype;
use std::path::Path;

impl PpoTrainer {
    /// Writes the policy with tokenizer and model card to `dir`, and the value model, where it is a separate one, to
    /// `dir/value_model`: folders that transformers opens. Called by all ranks; rank 0 writes.
    ///
    /// # Errors
    /// If a file cannot be written; if a rank has ended or does not respond.
    pub fn save_model(&self, dir: &Path) -> Result<()> {
        self.learner.save_together(|| self.write_all(dir, self.run.config.run.save_dtype))
    }

    /// [`PpoTrainer::save_model`] on rank 0, while the other ranks hand over their parts of the models.
    pub(super) fn write_all(&self, dir: &Path, dtype: Dtype) -> Result<()> {
        replace_files(dir, |dir| self.write_policy(dir, dtype))?;
        if self.learner.value.model().is_some() {
            replace_files(&dir.join(VALUE_MODEL), |dir| self.write_value_model(dir, dtype))?;
        }
        if self.learner.ema.is_some() {
            replace_files(&dir.join(EMA), |dir| self.write_ema(dir, dtype))?;
        }
        let mut facts = vec![
            ("policy started from", format!("`{}`", self.run.config.sft_model_path.display())),
            ("rewards", self.rewards.describe()),
            ("prompts", format!("`{}`, {} rows", self.run.config.data.describe(), self.data.prompts.len())),
            ("tokenizer", self.tokenizer.describe()),
        ];
        facts.extend(self.trained());
        facts.extend(self.record.checks.clone().map(|checks| ("checks", checks)));
        for (metric, name, decimals) in CARD_METRICS {
            facts.extend(self.monitor.last_metrics.get(metric).map(|value| (name, format!("{value:.decimals$}"))));
        }
        let base_model = Some(self.run.config.sft_model_path.as_path());
        let is_adapter = self.learner.policy.has_adapter();
        let command = self.run.config.preset.command();
        Card { command, base_model, is_adapter, facts: &facts }.write(dir)
    }

    /// Writes the moving average of the policy, if there is one, in the same form as the policy.
    pub(super) fn write_ema(&self, dir: &Path, dtype: Dtype) -> Result<()> {
        let Some(ema) = &self.learner.ema else { return Ok(()) };
        ema.with(&self.learner.policy, |_| self.write_policy(dir, dtype))
    }

    /// Writes the models to the folder of a checkpoint or of the best model; with the dtype `Auto` every bit of them and of the average is
    /// kept.
    pub(super) fn write_folder(&self, dir: &Path, dtype: Dtype) -> Result<()> {
        self.write_policy(dir, dtype)?;
        if let Some(ema) = &self.learner.ema {
            ema.with_exact(&self.learner.policy, |_| self.write_policy(&dir.join(EMA), dtype))?;
        }
        self.write_value_model(&dir.join(VALUE_MODEL), dtype)?;
        self.learner.end_serving()
    }

    fn write_policy(&self, dir: &Path, dtype: Dtype) -> Result<()> {
        let pad = self.tokenizer.pad();
        let most = self.run.config.run.max_shard_size.0;
        // The stop tokens of training end a response elsewhere too.
        let mut eos = self.tokenizer.eos_ids().to_vec();
        eos.extend(self.sampler.stop.iter().filter(|id| !self.tokenizer.eos_ids().contains(id)));
        self.learner.policy.save_pretrained_as(dir, &eos, pad, most, dtype)?;
        self.tokenizer.save_pretrained(dir)
    }

    fn write_value_model(&self, dir: &Path, dtype: Dtype) -> Result<()> {
        let Some(value) = self.learner.value.model() else { return Ok(()) };
        let eos = self.tokenizer.eos_ids();
        let pad = self.tokenizer.pad();
        let most = self.run.config.run.max_shard_size.0;
        value.save_pretrained_as(dir, eos, pad, most, dtype)?;
        self.tokenizer.save_pretrained(dir)
    }

    /// Returns the trained parameters of each model.
    pub(super) fn trained(&self) -> Vec<(&'static str, String)> {
        let mut trained = vec![("trained parameters, policy", trained_share(self.learner.policy.params()))];
        let value = self.learner.value.model().map(|value| trained_share(value.params()));
        trained.extend(value.map(|value| ("trained parameters, value model", value)));
        trained
    }
}
