//! The parts of a step on the caller's own tensors.

use super::StepTrainer;
use crate::rl::advantage::AdvantageEstimator;
use crate::rl::experience::Experience;
use crate::rl::learner::EpochPlan;
use crate::rl::math::{self, KlEstimator};
use crate::rl::rollout::{RolloutSettings, unevaluated};
use crate::rl::shaping::Targets;
use crate::rl::stats::StepStats;
use rlhf_base::{Error, Result};
use rlhf_lm::generate::{FinishReason, Response};
use tch::{Kind, Tensor};

/// Rewards of given log-probabilities; all `[rows, slots]` f32.
#[derive(Debug)]
pub struct TokenRewards {
    /// `non_score_rewards`, with the score of each row on the last slot that counts.
    pub rewards: Tensor,
    /// Minus the weight of the KL times the KL.
    pub non_score_rewards: Tensor,
    /// The KL of each slot; 0 outside the mask.
    pub kl: Tensor,
}

impl StepTrainer {
    /// Rewards of log-probabilities `[rows, slots]`, with `scores` `[rows]`; the slots where `mask` (bool) is true count.
    ///
    /// # Errors
    /// If the shapes differ, a row has no slot that counts, or `kl_penalty` is `full`, which needs the whole vocabulary.
    pub fn rewards_of(
        &self,
        scores: &Tensor,
        logprobs: &Tensor,
        ref_logprobs: &Tensor,
        mask: &Tensor,
    ) -> Result<TokenRewards> {
        let rows = check_shapes("compute_rewards", &[("ref_logprobs", ref_logprobs), ("masks", mask)], logprobs)?;
        if scores.size() != [rows] {
            let found = scores.size();
            return Err(Error::Run(format!("compute_rewards: scores: expected shape [{rows}], found {found:?}")));
        }
        if self.config.kl_penalty == KlEstimator::Full {
            return Err(Error::Usage(
                "kl_penalty = full: compute_rewards has the log-probabilities of the tokens alone; step() computes it"
                    .into(),
            ));
        }
        let counts = Vec::<i64>::try_from(mask.sum_dim_intlist(1i64, false, Kind::Int64))?;
        if let Some(row) = counts.iter().position(|&count| count == 0) {
            return Err(Error::Run(format!(
                "compute_rewards: masks: row {row}: expected a token that counts, found none"
            )));
        }
        let kl = math::kl(logprobs, ref_logprobs, mask, self.config.kl_penalty);
        let non_score_rewards = -self.kl.coef(0) * &kl;
        let slots = Tensor::arange(mask.size()[1], (Kind::Int64, mask.device()));
        let last = (slots * mask.to_kind(Kind::Int64)).argmax(1, true);
        let rewards = non_score_rewards.scatter_add(1, &last, &scores.to_kind(Kind::Float).unsqueeze(1));
        Ok(TokenRewards { rewards, non_score_rewards, kl })
    }

    /// Values within `mask`, whitened advantages, and returns, from values and rewards; all `[rows, slots]` f32, `mask` bool.
    ///
    /// # Errors
    /// If the shapes differ.
    pub fn advantages_of(&self, values: &Tensor, rewards: &Tensor, mask: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        check_shapes("compute_advantages", &[("rewards", rewards), ("mask", mask)], values)?;
        if self.config.advantage_estimator != AdvantageEstimator::Gae {
            return Err(Error::Usage(format!(
                "advantage_estimator = {}: compute_advantages has that of gae alone; step() computes the others",
                self.config.advantage_estimator.name()
            )));
        }
        let values = math::keep(values, mask);
        let mut rewards = math::keep(rewards, mask);
        if self.config.whiten_rewards {
            rewards = math::whiten(&rewards, mask, false);
        }
        let (advantages, returns) = math::gae(&rewards, &values, mask, self.config.gamma, self.config.lam);
        let device = values.device();
        Ok((values, math::whiten(&advantages.to_device(device), mask, true), returns.to_device(device)))
    }

    /// An experience with the caller's own numbers, for [`StepTrainer::train_minibatch`]: log-probabilities and values of the policy that
    /// sampled, `[rows, longest response]` f32, where each response starts at slot 0.
    ///
    /// # Errors
    /// If the rows or the shapes do not match.
    pub fn experience_of(
        &self,
        (queries, responses): (&[Vec<i64>], &[Vec<i64>]),
        logprobs: &Tensor,
        values: &Tensor,
        response_masks: Option<&[Vec<bool>]>,
    ) -> Result<Experience> {
        self.check_rows(queries, responses)?;
        let longest = responses.iter().map(Vec::len).max().unwrap_or(0);
        let shape = [queries.len() as i64, longest as i64];
        for (name, x) in [("old_logprobs", logprobs), ("values", values)] {
            if x.size() != shape {
                return Err(Error::Run(format!("{name}: expected shape {shape:?}, found {:?}", x.size())));
            }
        }
        let response = |tokens: &Vec<i64>| Response {
            tokens: tokens.clone(),
            logprobs: Vec::new(),
            finish: FinishReason::Length,
            sets: None,
            inserted: Vec::new(),
        };
        let responses: Vec<Response> = responses.iter().map(response).collect();
        let device = self.learner.policy.device();
        let settings = RolloutSettings { response_length: longest, ..self.rollout.clone() };
        let scores = Tensor::zeros([queries.len() as i64], (Kind::Float, device));
        let mut experience = unevaluated(queries, &responses, scores.into(), &settings, device);
        experience.logprobs = math::keep(&logprobs.to_device(device), &experience.masks.response);
        experience.values = math::keep(&values.to_device(device), &experience.masks.value);
        response_masks.map_or(Ok(()), |kept| experience.leave_out(kept))?;
        Ok(experience)
    }

    /// Takes one optimizer step on all rows of `experience`, with the caller's own advantages and returns, `[rows, slots]` f32; returns
    /// the statistics of its losses by TRL's names, such as `loss/policy`.
    ///
    /// # Errors
    /// The errors of [`StepTrainer::train_minibatch`]; if a loss or a gradient is not finite, and no step was taken.
    pub fn train_on(&mut self, experience: &Experience, advantages: &Tensor, returns: &Tensor) -> Result<super::Stats> {
        let mask = &experience.masks.response;
        check_shapes("train_minibatch", &[("advantages", advantages), ("returns", returns)], mask)?;
        let device = mask.device();
        let [advantages, returns] = [advantages, returns].map(|x| math::keep(&x.to_device(device), mask));
        let zeros = || advantages.zeros_like();
        let targets = Targets { kl: zeros(), kl_coef: self.kl.coef(0), rewards: zeros(), returns, advantages };
        let rows: Vec<usize> = (0..experience.rows()).collect();
        let parts = self.train_minibatch(experience, &targets, &rows)?;
        if let Some(problem) = parts.iter().find_map(|part| part.not_finite()) {
            return Err(Error::Run(format!("train_minibatch: no step was taken: {problem}")));
        }
        let plan = EpochPlan { mini_batch_size: rows.len(), part_size: rows.len(), ..self.config.epoch() };
        Ok(self.loss_stats(experience, &targets, &[rows], &parts, &plan))
    }

    /// Takes one optimizer step of the policy on `coef` times the mean negative log-likelihood of the tokens of `texts`, except each
    /// text's first; returns that mean.
    ///
    /// # Errors
    /// If a text does not fit the policy, or none has two tokens; if the loss or the gradient is not finite, and no step was taken.
    pub fn train_on_texts(&mut self, texts: &[Vec<i64>], coef: f64) -> Result<f64> {
        let rates = self.rates()?;
        self.learner.zero_grad();
        let loss = self.learner.learn_texts(texts, coef).inspect_err(|_| self.learner.zero_grad())?;
        let mut stats = StepStats { unsup_loss: loss, policy_loss: coef * loss, ..StepStats::default() };
        self.learner.step(rates, &mut stats)?;
        match stats.not_finite() {
            Some(problem) => Err(Error::Run(format!("train_on_texts: no step was taken: {problem}"))),
            None => Ok(loss),
        }
    }
}

/// Checks that `others` have the shape `[rows, slots]` of `x`; returns the number of rows.
fn check_shapes(method: &str, others: &[(&str, &Tensor)], x: &Tensor) -> Result<i64> {
    let shape = x.size();
    let [rows, _] = shape[..] else {
        return Err(Error::Run(format!("{method}: expected tensors of shape [rows, slots], found {shape:?}")));
    };
    match others.iter().find(|(_, other)| other.size() != shape) {
        Some((name, other)) => {
            Err(Error::Run(format!("{method}: {name}: expected shape {shape:?}, found {:?}", other.size())))
        }
        None => Ok(rows),
    }
}
