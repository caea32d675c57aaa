//! The half of a PPO update without gradients: the models evaluate the sampled responses.

use crate::reward::Scores;
use crate::rl::experience::{Experience, Masks, RaggedRows, to_slots};
use crate::rl::math::{self, ScorePosition};
use rlhf_base::dist::World;
use rlhf_base::{Error, Result};
use rlhf_lm::generate::Response;
use rlhf_lm::model::{
    self, CausalLm, Distributions, SequenceClassifier, TokenSet, ValueModel, batches, in_batches, joined,
};
use std::cell::RefCell;
use std::ops::Range;
use tch::{Device, Tensor};
use tch_ext::on_device;

/// Settings of the passes that evaluate responses, and which slots count.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutSettings {
    /// Slots of a response R: its most tokens.
    pub response_length: usize,
    /// Rows in one forward pass.
    pub batch_size: usize,
    /// Responses to each prompt, one after another: a group, whose prompt is computed once.
    pub group_size: usize,
    /// Temperature of the distributions whose log-probabilities are taken.
    pub temperature: f64,
    /// Take log-probabilities over the tokens that sampling filters (top-k, top-p, min-p) kept, instead of the vocabulary.
    pub filtered_logprobs: bool,
    /// Take log-probabilities anew, in the pass that training uses, instead of those of sampling: for responses from
    /// elsewhere, and in low precision, where the two passes differ.
    pub recompute_logprobs: bool,
    /// The responses' log-probabilities are those of this policy's distributions: the first step compares them with its own.
    pub compares_sampling: bool,
    /// Where the score lands, which decides whether there is a value after the last token.
    pub score_position: ScorePosition,
    /// The value after the last token is in the value loss.
    pub last_value_in_loss: bool,
    /// Measure the KL to the reference model over the whole vocabulary.
    pub full_kl: bool,
    /// Store the reference model's distributions, for a loss with the KL over the whole vocabulary.
    pub store_distributions: bool,
    /// End tokens that are in no loss: such a token gets the score, and its reward counts for the tokens before it.
    pub left_out: Vec<i64>,
}

/// Settings of the passes as far as they follow from the settings of a run, before its policy is loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutPlan {
    /// The settings for a policy whose decoding is exact.
    pub settings: RolloutSettings,
    /// Take log-probabilities anew where decoding rounds otherwise than the pass of training.
    pub recomputes_rounded: bool,
}

impl RolloutPlan {
    /// Returns the settings for `policy`.
    pub fn of(&self, policy: &CausalLm) -> RolloutSettings {
        let mut settings = self.settings.clone();
        settings.recompute_logprobs |= self.recomputes_rounded && !policy.is_exact();
        settings
    }
}

/// Policy, reference and critic, evaluated without gradients.
#[derive(Debug, Clone, Copy)]
pub struct RolloutModels<'a> {
    /// The policy, as it is before this update.
    pub policy: &'a CausalLm,
    /// The reference model, if there is one.
    pub reference: Option<&'a CausalLm>,
    /// The critic, as it is before this update: a separate model, a head on the policy, or none.
    pub value: &'a ValueModel,
    /// The ranks that divide the rows among them.
    pub world: &'a World,
}

/// Evaluates `responses` to `prompts`: log-probabilities, reference log-probabilities and values, beside the final `scores`.
///
/// The rows are those of all ranks; each rank evaluates a part of about as many tokens, and the results are gathered.
///
/// Rows of a group are one after another ([`RolloutSettings::group_size`]).
///
/// # Errors
/// If prompts, responses and scores do not match row by row, or a row does not fit the models.
pub fn experience(
    models: RolloutModels<'_>,
    prompts: &[Vec<i64>],
    responses: &[Response],
    scores: impl Into<Scores>,
    settings: &RolloutSettings,
) -> Result<Experience> {
    let scores = scores.into();
    check_rows(prompts, responses, &scores, settings)?;
    let mut experience = unevaluated(prompts, responses, scores, settings, models.policy.device());
    let passes = Passes::new(models, &experience, settings);
    let evaluated = models.world.agree(passes.evaluate(responses))?;
    let gathered = |x: &Tensor| passes.gathered(x);
    let logprobs = gathered(&evaluated.logprobs)?;
    let sampling_logprobs = evaluated.sampling_logprobs.as_ref().map(gathered).transpose()?;
    let ref_logprobs = evaluated.ref_logprobs.as_ref().map(gathered).transpose()?;
    let (values, full_kl) = (gathered(&evaluated.values)?, evaluated.full_kl.as_ref().map(gathered).transpose()?);
    let reference = match evaluated.reference {
        Some(reference) => Some(reference.gathered(models.world, &passes.shares, &experience.lengths())?),
        None => None,
    };
    (experience.logprobs, experience.ref_logprobs, experience.values) = (logprobs, ref_logprobs, values);
    (experience.full_kl, experience.reference) = (full_kl, reference);
    experience.sampling_logprobs = sampling_logprobs;
    if experience.masks.inserted.is_some() {
        // The passes have numbers for all tokens.
        experience.clear_outside_masks();
    }
    Ok(experience)
}

/// Scores of sequences (prompt and response joined) by a reward model, read at the last token: `[B]` f32.
///
/// # Errors
/// If a sequence does not fit the model, or a score is not finite.
pub fn score(reward: &SequenceClassifier, sequences: &[Vec<i64>], batch_size: usize) -> Result<Tensor> {
    let scores = tch::no_grad(|| {
        in_batches(sequences.len(), batch_size, reward.device(), |rows| reward.scores(&sequences[rows]))
    })?;
    let numbers = Vec::<f32>::try_from(&scores)?;
    match numbers.iter().position(|score| !score.is_finite()) {
        Some(row) => Err(Error::Run(format!("reward model: the score of row {row} is {}", numbers[row]))),
        None => Ok(scores),
    }
}

/// Number of first tokens of each response that count: all up to the last that was sampled, except an end token listed in `left_out`.
pub fn counted_tokens(responses: &[Response], left_out: &[i64]) -> Vec<i64> {
    let counted = |r: &Response| {
        // Neighbouring spans may have been inserted one after the other.
        let sampled =
            |end: usize| r.inserted.iter().rev().fold(end, |end, span| if span.end == end { span.start } else { end });
        let end = sampled(r.tokens.len());
        let ends = end > 0 && left_out.contains(&r.tokens[end - 1]);
        // A last turn that is an end token alone leaves the turn before it as the last that counts.
        if ends { sampled(end - 1) as i64 } else { end as i64 }
    };
    responses.iter().map(counted).collect()
}

/// The slots of tokens that were inserted, `[B, width]` bool; `None` if all were sampled.
fn inserted_slots(responses: &[Response], width: i64, device: Device) -> Option<Tensor> {
    if responses.iter().all(|response| response.inserted.is_empty()) {
        return None;
    }
    let mut slots = vec![false; responses.len() * width as usize];
    for (row, response) in slots.chunks_mut(width as usize).zip(responses) {
        row.iter_mut().zip(response.sampled()).for_each(|(slot, sampled)| *slot = !sampled);
    }
    Some(on_device(&slots, device).view([responses.len() as i64, width]))
}

/// The forward passes over the rows of one experience, of which each rank has a part.
struct Passes<'a> {
    models: RolloutModels<'a>,
    experience: &'a Experience,
    settings: &'a RolloutSettings,
    /// The rows of each rank.
    shares: Vec<Range<usize>>,
}

/// Results of the passes over this rank's rows.
struct Evaluated {
    logprobs: Tensor,
    sampling_logprobs: Option<Tensor>,
    ref_logprobs: Option<Tensor>,
    values: Tensor,
    full_kl: Option<Tensor>,
    reference: Option<Distributions>,
}

impl<'a> Passes<'a> {
    fn new(models: RolloutModels<'a>, experience: &'a Experience, settings: &'a RolloutSettings) -> Self {
        let lengths: Vec<usize> = (0..experience.rows()).map(|row| experience.sequence_len(row)).collect();
        Self { models, experience, settings, shares: models.world.shares_by(&lengths) }
    }

    /// This rank's rows.
    fn rows(&self) -> Range<usize> {
        self.shares[self.models.world.rank()].clone()
    }

    /// The rows of all ranks, of this rank's `x`.
    fn gathered(&self, x: &Tensor) -> Result<Tensor> {
        let counts: Vec<usize> = self.shares.iter().map(Range::len).collect();
        self.models.world.gather_rows(x, &counts)
    }

    fn evaluate(&self, responses: &[Response]) -> Result<Evaluated> {
        let (models, settings) = (self.models, self.settings);
        let full_kl = settings.full_kl.then(|| self.full_kl()).transpose()?;
        let reference = settings.store_distributions.then(|| self.distributions()).transpose()?;
        tch::no_grad(|| {
            let (logprobs, values) = match models.value {
                // The head shares the policy's pass.
                ValueModel::Head(_) if settings.recompute_logprobs => self.logprobs_and_values()?,
                _ if settings.recompute_logprobs => (self.logprobs(models.policy)?, self.values()?),
                _ => (self.sampled_logprobs(&responses[self.rows()]), self.values()?),
            };
            let ref_logprobs = models.reference.map(|reference| self.logprobs(reference)).transpose()?;
            let sampling_logprobs =
                self.compares_sampling(responses).then(|| self.sampled_logprobs(&responses[self.rows()]));
            Ok(Evaluated { logprobs, sampling_logprobs, ref_logprobs, values, full_kl, reference })
        })
    }

    /// Runs `f` over batches of this rank's rows, and joins the results.
    fn in_batches(&self, f: impl Fn(&RaggedRows) -> Result<Tensor>) -> Result<Tensor> {
        let rows = self.rows();
        in_batches(rows.len(), self.settings.batch_size, self.models.policy.device(), |part| {
            f(&self.batch(rows.start + part.start..rows.start + part.end))
        })
    }

    /// Number of response tokens of each of this rank's rows.
    fn lengths(&self) -> Vec<i64> {
        self.experience.lengths()[self.rows()].to_vec()
    }

    /// `values`, one after another, in the slots of this rank's rows.
    fn values_to_slots(&self, values: &Tensor) -> Tensor {
        to_slots(values, &self.experience.value_counts[self.rows()], self.experience.width())
    }

    fn batch(&self, rows: Range<usize>) -> RaggedRows {
        self.experience.ragged(&rows.collect::<Vec<_>>())
    }

    /// One number per response token, in its slot.
    fn per_token(&self, f: impl Fn(&RaggedRows) -> Result<Tensor>) -> Result<Tensor> {
        Ok(to_slots(&self.in_batches(f)?, &self.lengths(), self.experience.width()))
    }

    /// Log-probabilities of the response tokens under `model`.
    fn logprobs(&self, model: &CausalLm) -> Result<Tensor> {
        let _loaded = model.loaded()?;
        self.per_token(|batch| {
            let sampled = batch.sampled(self.settings.temperature);
            Ok(model.logprobs_of(batch.at(&batch.token_spans), sampled, false)?.logprobs)
        })
    }

    /// Whether all `responses` have log-probabilities of sampling that are comparable with those of training.
    fn compares_sampling(&self, responses: &[Response]) -> bool {
        self.settings.compares_sampling && responses.iter().all(|r| r.logprobs.len() == r.tokens.len())
    }

    /// The log-probabilities that sampling recorded.
    fn sampled_logprobs(&self, responses: &[Response]) -> Tensor {
        let sampled: Vec<f32> = responses.iter().flat_map(|r| r.logprobs.iter().copied()).collect();
        let sampled = on_device(&sampled, self.models.policy.device());
        to_slots(&sampled, &self.lengths(), self.experience.width())
    }

    /// The reference model, which a KL over the vocabulary needs.
    fn reference(&self) -> Result<&CausalLm> {
        self.models.reference.ok_or_else(|| Error::Run("the KL over the vocabulary needs a reference model".into()))
    }

    /// KL(policy || reference) over the whole vocabulary at each response token.
    fn full_kl(&self) -> Result<Tensor> {
        let (policy, reference) = (self.models.policy, self.reference()?);
        let _loaded = reference.loaded()?;
        self.per_token(|batch| {
            let sampled = batch.sampled(self.settings.temperature);
            policy.kl_to(reference, batch.at_unshared(&batch.token_spans), sampled)
        })
    }

    /// The reference model's distributions at the response tokens of this rank's rows.
    fn distributions(&self) -> Result<Distributions> {
        let rows = self.rows();
        let reference = self.reference()?;
        let _loaded = reference.loaded()?;
        let mut all = reference.distributions::<Vec<i64>>(model::Batch::new(&[], &[]))?;
        for part in batches(rows.len(), self.settings.batch_size) {
            let batch = self.batch(rows.start + part.start..rows.start + part.end);
            all.extend(reference.distributions(batch.at_unshared(&batch.token_spans))?);
        }
        Ok(all)
    }

    fn values(&self) -> Result<Tensor> {
        let RolloutModels { policy, value, .. } = self.models;
        let values = self.in_batches(|batch| value.values_of(policy, batch.at(&batch.value_spans)))?;
        Ok(self.values_to_slots(&values))
    }

    /// Log-probabilities and values of a critic that is a head on the policy, in one pass.
    fn logprobs_and_values(&self) -> Result<(Tensor, Tensor)> {
        let RolloutModels { policy, value: ValueModel::Head(head), .. } = self.models else {
            return Ok((self.logprobs(self.models.policy)?, self.values()?));
        };
        let values = RefCell::new(Vec::new());
        let logprobs = self.per_token(|batch| {
            let sampled = batch.sampled(self.settings.temperature);
            let (evaluated, state_values) = head.logprobs_and_values(policy, batch.joint(), sampled, false)?;
            values.borrow_mut().push(state_values);
            Ok(evaluated.logprobs)
        })?;
        let values = joined(&values.into_inner(), policy.device());
        Ok((logprobs, self.values_to_slots(&values)))
    }
}

/// An experience with tokens, masks and scores; what the models compute is empty.
pub(crate) fn unevaluated(
    prompts: &[Vec<i64>],
    responses: &[Response],
    scores: Scores,
    settings: &RolloutSettings,
    device: Device,
) -> Experience {
    let width = settings.response_length as i64;
    let lengths: Vec<i64> = responses.iter().map(|r| r.tokens.len() as i64).collect();
    let counted = counted_tokens(responses, &settings.left_out);
    let extra = i64::from(settings.score_position == ScorePosition::AfterStop);
    let inserted = inserted_slots(responses, width, device);
    let sampled = |mask: Tensor, inserted: Option<&Tensor>| match inserted {
        Some(inserted) => mask.logical_and(&inserted.logical_not()),
        None => mask,
    };
    let response = sampled(math::response_mask(&lengths, width, device), inserted.as_ref());
    let counting = math::response_mask(&counted, width, device);
    // The slot after the last token that counts has a value, whatever follows.
    let inserted = inserted.map(|inserted| inserted.logical_and(&counting));
    let loss = sampled(counting, inserted.as_ref());
    let value = sampled(math::value_mask(&counted, width, settings.score_position, device), inserted.as_ref());
    let value_loss = if settings.last_value_in_loss { &value } else { &loss }.shallow_clone();
    let flat = |rows: Vec<Vec<f32>>| on_device(&rows.concat(), device);
    let token_scores = scores.tokens.map(|rows| to_slots(&flat(rows), &lengths, width));
    Experience {
        prompts: prompts.to_vec(),
        groups: (0..prompts.len()).map(|row| row / settings.group_size.max(1)).collect(),
        value_counts: counted.iter().map(|&len| (len + extra).min(width)).collect(),
        sampled: responses.iter().map(|response| response.num_sampled() as i64).collect(),
        token_scores: token_scores.map(|scores| math::keep(&scores, &response)),
        masks: Masks { response, loss, value, value_loss, inserted },
        logprobs: Tensor::new(),
        sampling_logprobs: None,
        ref_logprobs: None,
        full_kl: None,
        reference: None,
        values: Tensor::new(),
        unscored: Vec::new(),
        rewards: None,
        baselines: None,
        scores: scores.responses.to_device(device),
        sets: sets_of(responses, settings),
        responses: responses.iter().map(|response| response.tokens.clone()).collect(),
        counted,
    }
}

/// The tokens that each token was sampled from, if log-probabilities are over these and all responses recorded them.
fn sets_of(responses: &[Response], settings: &RolloutSettings) -> Option<Vec<Vec<TokenSet>>> {
    if !settings.filtered_logprobs {
        return None;
    }
    responses.iter().map(|response| response.sets.clone()).collect()
}

/// Checks that the caller's rows match, so that none is dropped or spills into the next one's slots.
fn check_rows(prompts: &[Vec<i64>], responses: &[Response], scores: &Scores, settings: &RolloutSettings) -> Result<()> {
    let (rows, shape, most) = (prompts.len(), scores.responses.size(), settings.response_length);
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
        if logprobs != tokens && !settings.recompute_logprobs {
            let message =
                format!("row {row}: expected a log-probability for each of {tokens} tokens, found {logprobs}");
            return Err(Error::Run(message));
        }
    }
    Ok(())
}
