//! The rollout of an update, for `log_rollouts`.

use super::evaluate::ReportedScores;
use super::{Batch, COMMAND, PpoTrainer};
use crate::reward::Scored;
use crate::rl::experience::Experience;
use crate::rl::shaping::Targets;
use crate::run::checkpoint::{FixedState, State, parts_of};
use crate::run::event::{Rollout, RolloutRow, RolloutTurns};
use rlhf_base::Result;
use rlhf_lm::model::{TokenSet, ValueModel};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tch_ext::to_host;

impl PpoTrainer {
    /// Returns the responses of an update with the numbers that it trains on; without `log_rollouts`, and on ranks that write no files,
    /// there are no rows.
    pub(super) fn rollout(
        &self,
        batch: &Batch,
        reported: &ReportedScores,
        e: &Experience,
        targets: &Targets,
    ) -> Result<Rollout> {
        let scored = &reported.scored;
        if !self.run.config.rollout_log.log_rollouts || !self.learner.world.is_main() {
            return Ok(Rollout::default());
        }
        let lengths = e.lengths();
        let logprobs = numbers(&e.logprobs, &lengths)?;
        let counts = numbers(&e.masks.response.to_kind(Kind::Float), &lengths)?;
        let mut advantages = numbers(&targets.advantages, &lengths)?.into_iter();
        let reference = e.ref_logprobs.as_ref().map(|reference| numbers(reference, &lengths)).transpose()?;
        let has_critic = !matches!(self.learner.value, ValueModel::None);
        let values = has_critic.then(|| numbers(&e.values, &e.value_counts)).transpose()?;
        let present = |score: f64| (!score.is_nan()).then_some(score);
        let scores = e.scored_totals();
        let asked = batch.asked(&self.data.prompts);
        let baselines = e.baselines.as_ref().map(to_host);
        let row = |row: usize| {
            let prompt_row = batch.rows[row];
            let response = &batch.responses[row];
            let turns = batch.episodes.get(row).map(|episode| RolloutTurns::of(episode, response));
            let components = scored.components.iter();
            // Tokens that the run does not count keep the log-probabilities of sampling: a replay with other settings may count them.
            let sampled = response.logprobs.iter().zip(logprobs[row].iter().zip(&counts[row]));
            let logprobs = sampled.map(|(sampled, (logprob, counts))| if *counts > 0.0 { *logprob } else { *sampled });
            Ok(RolloutRow {
                group: e.groups[row],
                prompt_row,
                prompt: asked[row].text.clone(),
                response: self.tokenizer.decode(&response.tokens)?,
                token_ids: response.tokens.clone(),
                finish_reason: response.finish,
                score: present(scores[row]),
                components: components.map(|reward| (reward.name.clone(), present(reward.scores[row]))).collect(),
                logprobs: logprobs.collect(),
                ref_logprobs: reference.as_ref().map(|reference| reference[row].clone()),
                values: values.as_ref().map(|values| values[row].clone()),
                advantages: advantages.next().unwrap_or_default(),
                reward: reported.summed[row],
                raw_score: scored.raw[row],
                token_scores: scored.tokens.as_ref().map(|tokens| tokens[row].clone()),
                baseline: baselines.as_ref().and_then(|baselines| present(baselines[row])),
                kept_ids: response.sets.as_ref().map(|sets| sets.iter().map(TokenSet::ids).collect()),
                turns,
            })
        };
        let rows = (0..e.rows()).map(row).collect::<Result<_>>()?;
        Ok(Rollout { rows, record: self.record(batch, scored)? })
    }

    /// Returns the settings and the state that an update needs in addition to its responses and the checkpoint before it.
    fn record(&self, batch: &Batch, scored: &Scored) -> Result<Value> {
        let fixed = self.fixed();
        let callbacks = json!(fixed.own);
        let mut parts = parts_of(&FixedState { checks: None, own: None, ..fixed });
        parts.insert("own".into(), callbacks);
        parts.insert("rollbacks".into(), self.course.progress.rollbacks.into());
        let counts = [
            ("batch_size", self.plan.batch_size),
            ("dropped", batch.dropped),
            ("reused", usize::from(batch.reused)),
            ("sampled_groups", batch.sampled_groups),
            ("replaced_groups", batch.replaced_groups),
        ];
        parts.extend(counts.map(|(name, count)| (name.into(), count.into())));
        let rewards = scored.components.iter().zip(self.rewards.weights());
        let rewards =
            rewards.map(|(reward, weight)| json!({"name": reward.name, "weight": weight, "extra": reward.extra}));
        parts.insert("rewards".into(), rewards.collect());
        State::record(COMMAND, batch.update, self.plan.num_total_batches, &self.run.config, parts)
    }
}

/// Returns the first `counts[b]` numbers of each row of `x`, `[B, R]`.
fn numbers(x: &Tensor, counts: &[i64]) -> Result<Vec<Vec<f32>>> {
    let width = x.size()[1] as usize;
    let all = Vec::<f32>::try_from(x.to_kind(Kind::Float).to_device(Device::Cpu).contiguous().view(-1))?;
    let rows = counts.iter().enumerate();
    Ok(rows.map(|(row, &count)| all[row * width..row * width + count as usize].to_vec()).collect())
}
