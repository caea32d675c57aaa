//! The half of a PPO step that needs no gradient: what the models say of the responses.

use crate::generate::Response;
use crate::model::{CausalLm, Distributions, Sampled, SequenceClassifier, TokenSet, ValueModel};
use crate::rl::math;
use crate::rl::math::KlEstimator;
use crate::settings::{LogprobsOf, PpoConfig, WhitenAdvantages};
use crate::{Error, Result};
use std::cell::RefCell;
use std::ops::Range;
use tch::{Device, Kind, Tensor};

/// The responses of one update and what the models say of them; B rows, R = `response_length` slots.
///
/// Tensors are `[B, R]` f32 and exactly 0 outside their mask, unless said otherwise.
#[derive(Debug)]
pub struct Experience {
    /// Prompt and response of each row, joined.
    pub sequences: Vec<Vec<i64>>,
    /// Number of response tokens of each row.
    pub lengths: Vec<i64>,
    /// How many of them count, the first ones: an eos at the end may not. The score lands behind the last that counts.
    pub counted: Vec<i64>,
    /// Number of values of each row: one per token, and one after the last where there is room.
    pub value_counts: Vec<i64>,
    /// Slots that hold a response token which counts, bool.
    pub response_mask: Tensor,
    /// Slots that hold a value, bool: the response's and, where there is room, the one after it.
    pub value_mask: Tensor,
    /// Slots whose tokens are in the policy's loss, bool; within `response_mask`.
    pub loss_mask: Tensor,
    /// Slots whose values are in the value model's loss, bool; within `value_mask`.
    pub value_loss_mask: Tensor,
    /// Log-probabilities under the policy that sampled, within `response_mask`.
    pub logprobs: Tensor,
    /// Log-probabilities under the reference, within `response_mask`.
    pub ref_logprobs: Tensor,
    /// KL(policy || reference) over the whole vocabulary, within `response_mask`, where that is the estimator.
    pub full_kl: Option<Tensor>,
    /// What the reference draws each response token from, where the loss has the KL over the whole vocabulary.
    pub reference: Option<Distributions>,
    /// Values of the states before each token, and after the last, within `value_mask`.
    pub values: Tensor,
    /// Score of each row, `[B]`; the penalty for a missing stop token is already in it.
    pub scores: Tensor,
    /// Scores of single tokens, within `response_mask`, where a reward gives any.
    pub token_scores: Option<Tensor>,
    /// The tokens that each response token was sampled from, a list per row, where log-probabilities are those among them.
    pub sets: Option<Vec<Vec<TokenSet>>>,
}

/// Scores of responses.
#[derive(Debug)]
pub struct Scores {
    /// One number per response, `[B]` f32.
    pub responses: Tensor,
    /// One number per token, a row per response, if there are such.
    pub tokens: Option<Vec<Vec<f32>>>,
}

impl From<Tensor> for Scores {
    fn from(responses: Tensor) -> Self {
        Self { responses, tokens: None }
    }
}

/// Rewards and what follows from them, `[B, R]` f32.
#[derive(Debug)]
pub struct Targets {
    /// Estimate of KL(policy || reference) per token.
    pub kl: Tensor,
    /// What the KL is weighed with in this update, in the rewards or in the policy's loss.
    pub kl_coef: f64,
    /// -kl_coef * kl, unless the loss has that, and the scores at their places; whitened if the configuration says so.
    pub rewards: Tensor,
    /// Advantages, whitened over the whole batch unless the configuration says otherwise.
    pub advantages: Tensor,
    /// What the value model should say; not whitened.
    pub returns: Tensor,
}

impl Experience {
    /// The whole score of each row, `[B]`: those of its tokens too.
    pub fn total_scores(&self) -> Tensor {
        match &self.token_scores {
            Some(tokens) => &self.scores + tokens.sum_dim_intlist(1i64, false, Kind::Float),
            None => self.scores.shallow_clone(),
        }
    }

    /// Leaves out of the masks, and so of rewards, advantages, losses and sums, the tokens whose `kept` is false: one entry
    /// per token of each response. A value there counts as 0, and the score lands on the last token that is left.
    ///
    /// # Errors
    /// If `kept` has not an entry for each token, or leaves nothing of a response that has tokens.
    pub fn leave_out(&mut self, kept: &[Vec<bool>]) -> Result<()> {
        if !kept.iter().map(|row| row.len() as i64).eq(self.lengths.iter().copied()) {
            return Err(Error::Run("response_masks: expected an entry for each token of each response".into()));
        }
        if let Some(row) = kept.iter().position(|row| !row.is_empty() && !row.contains(&true)) {
            return Err(Error::Run(format!(
                "response_masks: row {row}: expected at least one token that counts, found none"
            )));
        }
        let flat: Vec<f32> = kept.iter().flatten().map(|&kept| f32::from(u8::from(kept))).collect();
        let flat = Tensor::from_slice(&flat).to_device(self.response_mask.device());
        let left = to_slots(&flat, &self.lengths, self.width()).gt(0.5);
        let lost = self.response_mask.logical_and(&left.logical_not());
        for mask in [&mut self.response_mask, &mut self.value_mask, &mut self.loss_mask, &mut self.value_loss_mask] {
            *mask = mask.logical_and(&lost.logical_not());
        }
        let last = |row: &Vec<bool>| row.iter().rposition(|&kept| kept).map_or(0, |at| at as i64 + 1);
        self.counted = kept.iter().zip(&self.counted).map(|(row, &counted)| last(row).min(counted)).collect();
        for (x, mask) in [
            (&mut self.logprobs, &self.response_mask),
            (&mut self.ref_logprobs, &self.response_mask),
            (&mut self.values, &self.value_mask),
        ] {
            *x = math::keep(x, mask);
        }
        for x in self.full_kl.iter_mut().chain(&mut self.token_scores) {
            *x = math::keep(x, &self.response_mask);
        }
        Ok(())
    }

    /// Slots in a row.
    pub fn width(&self) -> i64 {
        self.response_mask.size()[1]
    }

    /// The tokens that those of these rows were sampled from, row after row, where log-probabilities are those among them.
    pub(crate) fn sets_of(&self, rows: impl IntoIterator<Item = usize>) -> Option<Vec<TokenSet>> {
        let sets = self.sets.as_ref()?;
        Some(rows.into_iter().flat_map(|row| sets[row].iter().cloned()).collect())
    }

    /// Where the response tokens of row `row` lie in its sequence.
    pub(crate) fn token_span(&self, row: usize) -> Range<usize> {
        let end = self.sequences[row].len();
        end - self.lengths[row] as usize..end
    }

    /// Where the values of row `row` are read: at the token before each response token, and at the last one.
    pub(crate) fn value_span(&self, row: usize) -> Range<usize> {
        let start = self.token_span(row).start - 1;
        start..start + self.value_counts[row] as usize
    }
}

/// Puts numbers, row after row, into the first `counts[b]` slots of each row: `[M]` to `[B, width]`; differentiable.
pub(crate) fn to_slots(numbers: &Tensor, counts: &[i64], width: i64) -> Tensor {
    let slots: Vec<i64> =
        counts.iter().zip(0i64..).flat_map(|(&count, row)| (0..count).map(move |t| row * width + t)).collect();
    let slots = Tensor::from_slice(&slots).to_device(numbers.device());
    let rows = counts.len() as i64;
    Tensor::zeros([rows * width], (Kind::Float, numbers.device())).index_copy(0, &slots, numbers).view([rows, width])
}

/// How many values each row has: one per token that counts, and one after the last if a slot is left for it and for the score.
fn value_counts(config: &PpoConfig, counted: &[i64], width: i64) -> Vec<i64> {
    let extra = i64::from(config.score_position == math::ScorePosition::AfterStop);
    counted.iter().map(|&len| (len + extra).min(width)).collect()
}

/// How many tokens of each response count: all, or all but an end token that `left_out` names.
pub fn counted_tokens(responses: &[Response], left_out: &[i64]) -> Vec<i64> {
    let ends = |r: &Response| r.tokens.last().is_some_and(|last| left_out.contains(last));
    responses.iter().map(|r| r.tokens.len() as i64 - i64::from(ends(r))).collect()
}

/// The frozen view of the models that one update's responses are judged with.
#[derive(Debug, Clone, Copy)]
pub struct Judges<'a> {
    /// The policy, before this update changes it.
    pub policy: &'a CausalLm,
    /// What the policy should not drift away from.
    pub reference: &'a CausalLm,
    /// What says the values, before this update changes it.
    pub value: &'a ValueModel,
}

/// Scores of prompts with their responses by a reward model, read at the last token: `[B]` f32.
///
/// # Errors
/// If a sequence does not fit the model, or a score is not finite.
pub fn score(reward: &SequenceClassifier, sequences: &[Vec<i64>], batch_size: usize) -> Result<Tensor> {
    let scores = tch::no_grad(|| in_batches(sequences, batch_size, |rows| reward.scores(&sequences[rows])))?;
    let numbers = Vec::<f32>::try_from(&scores)?;
    match numbers.iter().position(|score| !score.is_finite()) {
        Some(row) => Err(Error::Run(format!("reward model: the score of row {row} is {}", numbers[row]))),
        None => Ok(scores),
    }
}

/// `scores` less `penalty` for each row that did not stop; `[B]`.
pub fn penalise_missing_stop(scores: &Tensor, stopped: &[bool], penalty: f64) -> Tensor {
    let missing = Tensor::from_slice(stopped).to_device(scores.device()).logical_not();
    scores - missing.to_kind(Kind::Float) * penalty
}

/// `scores`, and `value` for each row that did not stop; `[B]`.
pub fn replace_missing_stop(scores: &Tensor, stopped: &[bool], value: f64) -> Tensor {
    scores.masked_fill(&Tensor::from_slice(stopped).to_device(scores.device()).logical_not(), value)
}

/// Asks the models about `responses` to `prompts`.
///
/// `scores` are final: `[B]`, or [`Scores`] with some per token. In f32 the policy's log-probabilities are those of the sampling; `recompute_logprobs` takes
/// them anew in the pass that training uses (for responses from elsewhere, and for bf16, where the two passes differ).
///
/// # Errors
/// If prompts, responses and scores do not go together row by row, or a row does not fit the models.
pub fn experience(
    judges: Judges<'_>,
    prompts: &[Vec<i64>],
    responses: &[Response],
    scores: impl Into<Scores>,
    recompute_logprobs: bool,
    config: &PpoConfig,
) -> Result<Experience> {
    experience_leaving_out(judges, prompts, responses, scores, &[], recompute_logprobs, config)
}

/// As [`experience`], of responses whose end token counts in no loss if it is one of `left_out`: it gets the score, and its
/// KL, and what follows from them goes to the tokens before it.
///
/// # Errors
/// As [`experience`].
pub fn experience_leaving_out(
    judges: Judges<'_>,
    prompts: &[Vec<i64>],
    responses: &[Response],
    scores: impl Into<Scores>,
    left_out: &[i64],
    recompute_logprobs: bool,
    config: &PpoConfig,
) -> Result<Experience> {
    let scores = scores.into();
    check_rows(prompts, responses, &scores, recompute_logprobs, config.response_length)?;
    let width = config.response_length as i64;
    let device = judges.policy.device();
    let sequences: Vec<Vec<i64>> =
        prompts.iter().zip(responses).map(|(prompt, r)| [prompt.as_slice(), &r.tokens].concat()).collect();
    let lengths: Vec<i64> = responses.iter().map(|r| r.tokens.len() as i64).collect();
    let counted = counted_tokens(responses, left_out);
    let loss_mask = math::response_mask(&counted, width, device);
    let value_mask = math::value_mask(&counted, width, config.score_position, device);
    let last_value = config.counts.last_value_in_loss;
    let mut experience = Experience {
        response_mask: math::response_mask(&lengths, width, device),
        value_loss_mask: if last_value { &value_mask } else { &loss_mask }.shallow_clone(),
        loss_mask,
        value_mask,
        logprobs: Tensor::new(),
        ref_logprobs: Tensor::new(),
        full_kl: None,
        reference: None,
        values: Tensor::new(),
        token_scores: scores
            .tokens
            .map(|rows| to_slots(&Tensor::from_slice(&rows.concat()).to_device(device), &lengths, width)),
        scores: scores.responses,
        value_counts: value_counts(config, &counted, width),
        sets: sets_of(responses, config),
        sequences,
        lengths,
        counted,
    };
    let (sequences, batch_size) = (&experience.sequences, config.local_rollout_forward_batch_size);
    let token_spans: Vec<_> = (0..sequences.len()).map(|row| experience.token_span(row)).collect();
    let value_spans: Vec<_> = (0..sequences.len()).map(|row| experience.value_span(row)).collect();
    let temperature = config.logprob_temperature();
    let logprobs = |model: &CausalLm| {
        let parts = in_batches(sequences, batch_size, |rows| {
            let (spans, sets) = (&token_spans[rows.clone()], experience.sets_of(rows.clone()));
            let sampled = Sampled { temperature, sets: sets.as_deref() };
            Ok(model.token_logprobs(&sequences[rows], spans, sampled, false)?.logprobs)
        })?;
        Ok::<_, Error>(to_slots(&parts, &experience.lengths, width))
    };
    let full_kl = (config.kl_estimator == KlEstimator::Full).then(|| {
        let parts = in_batches(sequences, batch_size, |rows| {
            let (spans, sets) = (&token_spans[rows.clone()], experience.sets_of(rows.clone()));
            let sampled = Sampled { temperature, sets: sets.as_deref() };
            judges.policy.kl_to(judges.reference, &sequences[rows], spans, sampled)
        })?;
        Ok::<_, Error>(to_slots(&parts, &experience.lengths, width))
    });
    let full_kl = full_kl.transpose()?;
    let mut reference: Option<Distributions> = None;
    if full_kl.is_some() && config.kl.kl_in_loss {
        for rows in batches(sequences.len(), batch_size) {
            let more = judges.reference.distributions(&sequences[rows.clone()], &token_spans[rows])?;
            match &mut reference {
                Some(reference) => reference.extend(more),
                None => reference = Some(more),
            }
        }
    }
    let (policy, of_reference, values) = tch::no_grad(|| {
        if let (ValueModel::Head(head), true) = (judges.value, recompute_logprobs) {
            let values = RefCell::new(Vec::new());
            let policy = in_batches(sequences, batch_size, |rows| {
                let (tokens, at) = (&token_spans[rows.clone()], &value_spans[rows.clone()]);
                let sets = experience.sets_of(rows.clone());
                let sampled = Sampled { temperature, sets: sets.as_deref() };
                let (policy, sequences) = (judges.policy, &sequences[rows]);
                let (found, of_states) = head.logprobs_and_values(policy, sequences, tokens, at, sampled, false)?;
                values.borrow_mut().push(of_states);
                Ok(found.logprobs)
            })?;
            let values = Tensor::cat(&values.into_inner(), 0);
            let slots = |numbers: &Tensor, counts: &[i64]| to_slots(numbers, counts, width);
            let policy = slots(&policy, &experience.lengths);
            return Ok((policy, logprobs(judges.reference)?, slots(&values, &experience.value_counts)));
        }
        let policy = if recompute_logprobs {
            logprobs(judges.policy)?
        } else {
            let sampled: Vec<f32> = responses.iter().flat_map(|r| r.logprobs.iter().copied()).collect();
            to_slots(&Tensor::from_slice(&sampled).to_device(device), &experience.lengths, width)
        };
        let values = in_batches(sequences, batch_size, |rows| {
            judges.value.values_at(judges.policy, &sequences[rows.clone()], &value_spans[rows])
        })?;
        Ok::<_, Error>((policy, logprobs(judges.reference)?, to_slots(&values, &experience.value_counts, width)))
    })?;
    (experience.logprobs, experience.ref_logprobs, experience.values) = (policy, of_reference, values);
    (experience.full_kl, experience.reference) = (full_kl, reference);
    Ok(experience)
}

/// What the responses' tokens were sampled from, where log-probabilities are those among it and all responses note it.
fn sets_of(responses: &[Response], config: &PpoConfig) -> Option<Vec<Vec<TokenSet>>> {
    if config.sampling.logprobs_of == LogprobsOf::Policy {
        return None;
    }
    responses.iter().map(|response| response.sets.clone()).collect()
}

/// Checks what the caller brings together, so that no row is dropped or spills into the next one's slots.
fn check_rows(
    prompts: &[Vec<i64>],
    responses: &[Response],
    scores: &Scores,
    recompute_logprobs: bool,
    most: usize,
) -> Result<()> {
    let (rows, shape) = (prompts.len(), scores.responses.size());
    if responses.len() != rows || shape != [rows as i64] {
        let found = format!("{} responses and scores of shape {shape:?}", responses.len());
        return Err(Error::Run(format!("expected {rows} responses and scores, one per prompt, found {found}")));
    }
    if let Some(tokens) = &scores.tokens
        && !tokens.iter().map(Vec::len).eq(responses.iter().map(|response| response.tokens.len()))
    {
        return Err(Error::Run("expected a score for each token of each response, found others".into()));
    }
    for (row, (prompt, response)) in prompts.iter().zip(responses).enumerate() {
        let (tokens, logprobs) = (response.tokens.len(), response.logprobs.len());
        if prompt.is_empty() {
            return Err(Error::Run(format!("row {row}: expected a prompt of at least one token, found none")));
        }
        if tokens > most {
            let message = format!("row {row}: expected a response of at most {most} tokens, found {tokens}");
            return Err(Error::Run(message));
        }
        if logprobs != tokens && !recompute_logprobs {
            let message =
                format!("row {row}: expected a log-probability for each of {tokens} tokens, found {logprobs}");
            return Err(Error::Run(message));
        }
    }
    Ok(())
}

/// Rewards, advantages and returns of one update's experience, whose KL weighs `kl_coef`: [`shape_rewards`], then
/// [`advantages`].
pub fn targets(e: &Experience, kl_coef: f64, config: &PpoConfig) -> Targets {
    let (kl, rewards) = shape_rewards(e, kl_coef, config);
    let (advantages, returns) = advantages(e, &rewards, config);
    Targets { kl, kl_coef, rewards, advantages, returns }
}

/// Estimate of KL(policy || reference) per token, and the rewards: the scores at their places less `kl_coef` times the KL,
/// unless the loss has that; whitened if the configuration says so. Both are `[B, R]` f32.
pub fn shape_rewards(e: &Experience, kl_coef: f64, config: &PpoConfig) -> (Tensor, Tensor) {
    let kl = match &e.full_kl {
        Some(kl) => kl.shallow_clone(),
        None => math::kl(&e.logprobs, &e.ref_logprobs, &e.response_mask, config.kl_estimator),
    };
    let in_rewards = if config.kl.kl_in_loss { 0.0 } else { kl_coef };
    let scores = match (config.counts.clip_reward_value, &e.token_scores) {
        (None, _) => e.scores.shallow_clone(),
        (Some(most), None) => e.scores.clamp(-most, most),
        // Scores of tokens stay where they are; the response's own makes up for what the clip takes from the whole.
        (Some(most), Some(_)) => {
            let whole = e.total_scores();
            &e.scores + whole.clamp(-most, most) - whole
        }
    };
    let mut rewards = math::rewards(&kl, &scores, &e.counted, in_rewards, config.score_position);
    if let Some(token_scores) = &e.token_scores {
        rewards += token_scores;
    }
    if config.whiten_rewards {
        rewards = math::whiten(&rewards, &e.value_mask, false);
    }
    (kl, rewards)
}

/// Advantages by GAE of `rewards` and the values, whitened over the whole batch unless the configuration says otherwise, and
/// what the value model should say, not whitened. All are `[B, R]` f32.
pub fn advantages(e: &Experience, rewards: &Tensor, config: &PpoConfig) -> (Tensor, Tensor) {
    let (advantages, returns) = math::gae(rewards, &e.values, &e.value_mask, config.gamma, config.lam);
    let advantages = match config.whiten_advantages {
        WhitenAdvantages::Batch => math::whiten(&advantages, &e.loss_mask, true),
        // Each mini-batch by itself, when it comes.
        WhitenAdvantages::MiniBatch | WhitenAdvantages::None => math::keep(&advantages, &e.loss_mask),
    };
    (advantages, returns)
}

/// Consecutive ranges of at most `batch_size` of `rows` rows.
fn batches(rows: usize, batch_size: usize) -> impl Iterator<Item = Range<usize>> {
    let size = batch_size.max(1);
    (0..rows).step_by(size).map(move |from| from..(from + size).min(rows))
}

/// Calls `f` on consecutive ranges of at most `batch_size` rows and joins what it gives.
pub(crate) fn in_batches<T>(
    rows: &[T],
    batch_size: usize,
    f: impl Fn(Range<usize>) -> Result<Tensor>,
) -> Result<Tensor> {
    let parts = batches(rows.len(), batch_size).map(f).collect::<Result<Vec<_>>>()?;
    match parts.len() {
        0 => Ok(Tensor::zeros([0], (Kind::Float, Device::Cpu))),
        _ => Ok(Tensor::cat(&parts, 0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_stop_lowers_the_score_or_replaces_it_whatever_it_was() {
        let scores = Tensor::from_slice(&[3.0f32, 5.0, f32::NAN]);
        let replaced = replace_missing_stop(&scores, &[true, false, false], -1.0);
        assert_eq!(Vec::<f32>::try_from(replaced).unwrap(), [3.0, -1.0, -1.0]);
        let lowered = penalise_missing_stop(&scores.narrow(0, 0, 2), &[true, false], 1.5);
        assert_eq!(Vec::<f32>::try_from(lowered).unwrap(), [3.0, 3.5]);
    }
}
