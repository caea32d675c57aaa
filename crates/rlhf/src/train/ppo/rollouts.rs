//! The rollout of an update, for `log_rollouts`.

use super::{Batch, PpoTrainer};
use crate::Result;
use crate::model::ValueModel;
use crate::reward::Scored;
use crate::rl::experience::Experience;
use crate::rl::shaping::Targets;
use crate::run::event::{Rollout, RolloutRow};
use tch::{Device, Kind, Tensor};

impl PpoTrainer {
    /// Returns the responses of an update with the numbers that it trains on; no rows without `log_rollouts`, and on ranks that write
    /// no files.
    pub(super) fn rollout(&self, batch: &Batch, scored: &Scored, e: &Experience, targets: &Targets) -> Result<Rollout> {
        if !self.config.trial.log_rollouts || !self.learner.world.is_main() {
            return Ok(Rollout::default());
        }
        let lengths = e.lengths();
        let mut logprobs = numbers(&e.logprobs, &lengths)?.into_iter();
        let mut advantages = numbers(&targets.advantages, &lengths)?.into_iter();
        let reference = e.ref_logprobs.as_ref().map(|reference| numbers(reference, &lengths)).transpose()?;
        let has_critic = !matches!(self.learner.value, ValueModel::None);
        let values = has_critic.then(|| numbers(&e.values, &e.value_counts)).transpose()?;
        let present = |score: f64| (!score.is_nan()).then_some(score);
        let scores = e.scored_totals();
        let row = |row: usize| {
            let (prompt_row, response) = (batch.rows[row], &batch.responses[row]);
            let components = scored.components.iter();
            Ok(RolloutRow {
                group: e.groups[row],
                prompt_row,
                prompt: self.prompts[prompt_row].text.clone(),
                response: self.tokenizer.decode(&response.tokens)?,
                token_ids: response.tokens.clone(),
                finish_reason: response.finish,
                score: present(scores[row]),
                components: components.map(|reward| (reward.name.clone(), present(reward.scores[row]))).collect(),
                logprobs: logprobs.next().unwrap_or_default(),
                ref_logprobs: reference.as_ref().map(|reference| reference[row].clone()),
                values: values.as_ref().map(|values| values[row].clone()),
                advantages: advantages.next().unwrap_or_default(),
            })
        };
        Ok(Rollout { rows: (0..e.rows()).map(row).collect::<Result<_>>()? })
    }
}

/// Returns the first `counts[b]` numbers of each row of `x`, `[B, R]`.
fn numbers(x: &Tensor, counts: &[i64]) -> Result<Vec<Vec<f32>>> {
    let width = x.size()[1] as usize;
    let all = Vec::<f32>::try_from(x.to_kind(Kind::Float).to_device(Device::Cpu).contiguous().view(-1))?;
    let rows = counts.iter().enumerate();
    Ok(rows.map(|(row, &count)| all[row * width..row * width + count as usize].to_vec()).collect())
}
