//! Groups of responses to one prompt: the data that their estimators need, and the reference model that follows the policy.

use super::super::model_options;
use super::load::load_synced_reference;
use super::{Batch, PpoTrainer};
use crate::reward::{ScoreUse, Scored};
use crate::rl::advantage::{AdvantageEstimator, Aggregation};
use crate::rl::experience::Experience;
use crate::rl::groups::{push_completion_metrics, truncated};
use crate::rl::shaping::Targets;
use crate::rl::stats::StepStats;
use crate::run::output_dir::REFERENCE;
use rlhf_base::Result;
use rlhf_base::metrics::{Metrics, Warning};
use rlhf_base::rng::Purpose;
use rlhf_lm::generate::Sampling;
use std::path::Path;
use tch::Tensor;

impl PpoTrainer {
    /// Adds the groups of a batch to its experience, the baselines of ReMax, and the mask of responses that did not stop.
    pub(super) fn add_groups(&mut self, e: &mut Experience, batch: &mut Batch, scored: &Scored) -> Result<()> {
        let unscored = scored.unscored().into_iter().enumerate().filter(|(_, unscored)| *unscored);
        e.unscored = unscored.map(|(row, _)| row).collect();
        if self.run.config.advantage.multi_objective_aggregation == Aggregation::NormalizeThenSum {
            let scores = scored.components.iter().map(|component| component.scores.clone());
            e.rewards = Some(self.rewards.weights().zip(scores).collect());
        }
        if self.run.config.advantage.advantage_estimator == AdvantageEstimator::Remax {
            e.baselines = Some(match batch.recorded.as_ref().and_then(|recorded| recorded.baselines.as_ref()) {
                Some(baselines) => baselines.to_device(e.scores.device()),
                None => self.greedy_scores(batch)?,
            });
        }
        if self.run.config.mask.mask_truncated_completions {
            e.mask_rows(&truncated(&batch.responses));
        }
        Ok(())
    }

    /// Replaces the groups of `batch` that teach nothing, by their `scored` scores, by groups of the next prompts. Returns the scores of
    /// the new batch. If too few groups teach something, replaced groups take the remaining places.
    pub(super) fn replace_groups(&mut self, batch: &mut Batch, mut scored: Scored) -> Result<Scored> {
        let size = self.run.rollout.settings.group_size;
        let wanted = self.plan.prompts;
        let mut kept: Vec<usize> = Vec::new();
        let mut group_count = 0;
        for attempt in 1.. {
            let numbers = scored.raw_or_nan();
            let groups = numbers.chunks(size).enumerate().skip(group_count);
            kept.extend(groups.filter(|(_, scores)| self.run.config.groups.keeps(scores)).map(|(group, _)| group));
            group_count = numbers.len() / size;
            if kept.len() >= wanted || attempt >= self.run.config.groups.max_num_gen_batches {
                break;
            }
            let rows = self.data.cursor.take(wanted);
            // The number of the batch is part of the key of its random draws.
            let (rows, answers) = self.respond(&rows, (attempt as u64) << 32 | batch.update as u64)?;
            batch.sampling += answers.sampling;
            let more = self.score_rows(&rows, &answers.responses, &answers.episodes)?;
            batch.rows.extend(rows);
            batch.responses.extend(answers.responses);
            batch.episodes.extend(answers.episodes);
            let lengths: Vec<usize> = batch.responses.iter().map(|response| response.tokens.len()).collect();
            scored.extend(more, &lengths);
        }
        batch.sampled_groups = group_count;
        batch.replaced_groups = group_count - kept.len();
        let left_out: Vec<usize> = (0..group_count).rev().filter(|group| !kept.contains(group)).collect();
        let chosen = kept.into_iter().chain(left_out).take(wanted);
        let rows: Vec<usize> = chosen.flat_map(|group| group * size..(group + 1) * size).collect();
        batch.rows = rows.iter().map(|&row| batch.rows[row]).collect();
        batch.responses = selected(std::mem::take(&mut batch.responses), &rows);
        batch.episodes = selected(std::mem::take(&mut batch.episodes), &rows);
        Ok(scored.select(&rows))
    }

    /// Score of a greedy response to the prompt of each row, `[B]`, scaled and penalized like the scores that are trained on; NaN where
    /// no reward gave one. Adds the sampling of these responses to the batch's.
    fn greedy_scores(&mut self, batch: &mut Batch) -> Result<Tensor> {
        let size = self.run.rollout.settings.group_size;
        let rows: Vec<usize> = batch.rows.iter().copied().step_by(size).collect();
        let prompts: Vec<_> = rows.iter().map(|&row| self.data.prompts[row].clone()).collect();
        let prompts: Vec<_> = prompts.iter().collect();
        let answers = self.generate(&prompts, Sampling::Greedy, Purpose::Sampling, batch.update)?;
        batch.sampling += answers.sampling;
        let asked = answers.asked(&prompts);
        let responses = &answers.responses;
        let mut scored =
            self.rewards.score_episodes(&self.tokenizer, &asked, responses, &answers.episodes, ScoreUse::Baseline)?;
        let device = self.learner.policy.device();
        let total = self.course.scores.trained(&mut scored, responses, false, device).totals();
        let unscored = Tensor::from_slice(&scored.unscored()).to(total.device());
        Ok(total.masked_fill(&unscored, f64::NAN).repeat_interleave_self_int(size as i64, 0, None))
    }

    /// Writes a reference model that follows the policy to a checkpoint.
    pub(super) fn write_reference(&self, dir: &Path) -> Result<()> {
        match self.reference.as_ref().filter(|_| self.run.config.sync.sync_ref_model) {
            Some(reference) => {
                let most = self.run.config.run.max_shard_size.0;
                reference.save_pretrained(&dir.join(REFERENCE), self.tokenizer.eos_ids(), self.tokenizer.pad(), most)
            }
            None => Ok(()),
        }
    }

    /// Loads the reference model that [`PpoTrainer::write_reference`] wrote.
    pub(super) fn load_reference(&mut self, dir: &Path) -> Result<()> {
        if self.run.config.sync.sync_ref_model && self.reference.is_some() {
            let frozen = model_options(&self.run.config.run)?;
            let world = self.learner.world.clone();
            // The old model is dropped first: memory, or `offload_dir`, has room for one.
            self.reference = None;
            self.reference = Some(load_synced_reference(&self.run.config, &dir.join(REFERENCE), frozen, &world)?);
        }
        Ok(())
    }

    /// Adds the number of replaced groups and, in a run without a critic, the metrics of TRL's GRPOTrainer and RLOOTrainer; `seconds` is
    /// the time of the update. Returns a warning if all scores of many groups were equal.
    pub(super) fn push_group_metrics(
        &mut self,
        m: &mut Metrics,
        batch: &Batch,
        (e, targets): (&Experience, &Targets),
        steps: &[StepStats],
        seconds: f64,
    ) -> Option<Warning> {
        if self.run.config.groups.filters() {
            m.push("sampling/groups", batch.sampled_groups as f64);
            m.push("sampling/replaced_groups", batch.replaced_groups as f64);
        }
        if self.run.needs_critic {
            return None;
        }
        let size = self.run.rollout.settings.group_size;
        let prompts: usize = e.prompts.iter().map(Vec::len).sum();
        self.monitor.num_tokens += (prompts + e.sampled.iter().sum::<i64>() as usize) as u64;
        m.push("num_tokens", self.monitor.num_tokens as f64);
        push_completion_metrics(m, &batch.responses);
        self.learner.group_metrics(m, e, targets, steps);
        m.push("step_time", seconds);
        (size > 1).then(|| self.monitor.alarms.observe_groups(batch.update + 1, &e.scored_totals(), size)).flatten()
    }
}

/// The items at `rows`; no row may occur twice.
fn selected<T>(items: Vec<T>, rows: &[usize]) -> Vec<T> {
    let mut items: Vec<Option<T>> = items.into_iter().map(Some).collect();
    rows.iter().filter_map(|&row| items.get_mut(row)?.take()).collect()
}
