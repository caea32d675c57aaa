//! The responses and the passes of distillation.

use super::super::supervised::{Supervised, TaskState, UpdateRows};
use super::Distillation;
use super::rows::{DistillRow, PassInputs, end_before_unknown};
use super::totals::{PassSums, Totals};
use crate::run::event::Sample;
use crate::settings::DistillConfig;
use rlhf_base::dist::World;
use rlhf_base::metrics::Metrics;
use rlhf_base::rng::{Purpose, Stream};
use rlhf_base::{Error, Result};
use rlhf_lm::generate::{GenerationConfig, Response, generate_on};
use rlhf_lm::model::{CausalLm, DropoutRows, LmHead, LogprobOptions, TeacherRows, TokenDivergences, TokenLogprobs};
use rlhf_lm::optim::micro_batch::micro_batches;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;
use tch::{Kind, Tensor};
use tch_ext::to_host;

/// Number of responses that `log_completions` shows by default.
const SHOWN: usize = 5;

/// The model whose responses are learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The dataset.
    Rows,
    /// The student: an on-policy update.
    Student,
    /// The teacher.
    Teacher,
}

impl Source {
    /// Returns the source of an update; it depends on the seed and the update only.
    pub(crate) fn of_update(config: &DistillConfig, update: u64) -> Self {
        let drawn = || Stream::new(config.run.seed, Purpose::OnPolicy, update, 0).uniform();
        if config.lmbda == 1.0 || (config.lmbda > 0.0 && drawn() < config.lmbda) {
            Self::Student
        } else {
            Self::offline(config)
        }
    }

    /// Returns the sources of all updates of a run.
    pub(crate) fn of_run(config: &DistillConfig) -> Vec<Self> {
        let on_policy = (config.lmbda > 0.0).then_some(Self::Student);
        let offline = (config.lmbda < 1.0).then(|| Self::offline(config));
        on_policy.into_iter().chain(offline).collect()
    }

    fn offline(config: &DistillConfig) -> Self {
        if config.seq_kd { Self::Teacher } else { Self::Rows }
    }

    /// Returns the source of evaluations: the dataset's responses where a run learns them.
    fn of_evaluation(config: &DistillConfig) -> Self {
        if config.reads_responses() || config.lmbda == 0.0 { Self::offline(config) } else { Self::Student }
    }
}

/// Numbers of the tokens of a pass, `[M]` each.
struct TokenNumbers {
    loss: Tensor,
    entropy: Tensor,
    logprobs: Tensor,
    teacher_logprobs: Tensor,
}

impl From<TokenDivergences> for TokenNumbers {
    fn from(divergences: TokenDivergences) -> Self {
        let TokenDivergences { divergence, logprobs, teacher_logprobs, entropy } = divergences;
        Self { loss: divergence, entropy, logprobs, teacher_logprobs }
    }
}

impl TokenNumbers {
    /// Numbers of a policy gradient, whose loss is the difference of the two log-probabilities.
    fn from_logprobs(now: &TokenLogprobs, teacher_logprobs: Tensor) -> Self {
        let logprobs = now.logprobs.detach();
        let entropy = now.entropy.as_ref().map_or_else(|| logprobs.zeros_like(), Tensor::detach);
        Self { loss: &logprobs - &teacher_logprobs, entropy, logprobs, teacher_logprobs }
    }

    /// Sums over the tokens where `mask` is 1: of loss, entropy and log-ratio, `[3]`.
    fn sums(&self, mask: &Tensor) -> Tensor {
        let sum = |x: &Tensor| (x * mask).sum(Kind::Float);
        Tensor::stack(&[sum(&self.loss), sum(&self.entropy), sum(&(&self.logprobs - &self.teacher_logprobs))], 0)
    }
}

impl PassSums {
    /// Reads the sums of passes from the device at once.
    fn read(passes: &[Tensor], tokens: usize) -> Self {
        let mut sums = Self { tokens: tokens as f64, ..Self::default() };
        if passes.is_empty() {
            return sums;
        }
        for pass in to_host(&Tensor::stack(passes, 0).view([-1])).chunks(3) {
            sums.loss += pass[0];
            sums.entropy += pass[1];
            sums.log_ratio += pass[2];
        }
        sums
    }
}

impl Distillation<'_> {
    /// Number of ids that both models have.
    fn common_vocab(&self, student: &CausalLm) -> i64 {
        student.config().vocab_size.min(self.teacher.config().vocab_size)
    }

    /// Whether logits of both models are compared, slice by slice.
    fn compares_slices(&self, student: &CausalLm) -> bool {
        self.config.compares_slices([student, &self.teacher].map(|model| model.config().vocab_size))
    }

    /// Samples responses to the prompts of `rows`, on all ranks; `None` if `source` is the dataset. `purpose` and `step` key the draws. A
    /// response ends before an id that one of the models does not have.
    fn responses(
        &self,
        source: Source,
        student: &CausalLm,
        rows: &[&DistillRow],
        (purpose, step): (Purpose, u64),
        world: &World,
    ) -> Result<Option<Vec<Response>>> {
        let config = self.config;
        let sampler = match source {
            Source::Rows => return Ok(None),
            Source::Student => student,
            Source::Teacher => &self.teacher,
        };
        let prompts: Vec<&[i64]> = rows.iter().map(|row| row.prompt()).collect();
        let _loaded = sampler.loaded()?;
        let _gathered = config.ds3_gather_for_generation.then(|| sampler.gathered()).transpose()?;
        let generation = GenerationConfig {
            stop_token_ids: self.tokenizer.eos_ids().to_vec(),
            stop_strings: self.stop_strings.clone(),
            seed: config.run.seed,
            purpose,
            step,
            batch_size: config.local_rollout_forward_batch_size,
            repetition_penalty: config.sampling.repetition_penalty,
            min_new_tokens: config.sampling.min_new_tokens,
            ..GenerationConfig::new(config.sampled_by(), config.max_completion_length)
        };
        let mut responses = generate_on(world, sampler, &prompts, &generation)?;
        let vocab = self.common_vocab(student);
        responses.iter_mut().for_each(|response| end_before_unknown(response, vocab));
        Ok(Some(responses))
    }

    /// Forward and backward passes over this rank's part of `rows`. Returns the sums over their tokens and, if `shown`, the teacher's
    /// mean log-probability of each row of the part.
    pub(super) fn learn(
        &self,
        model: &CausalLm,
        batch: &UpdateRows<'_>,
        rows: &[&DistillRow],
        shown: bool,
    ) -> Result<(PassSums, Vec<f64>)> {
        let config = self.config;
        let device = model.device();
        let counted = rows.iter().map(|row| row.loss_tokens()).sum::<usize>().max(1);
        let factor = batch.loss_scale / counted as f64;
        let local = batch.world.own_part(rows, |row| row.tokens.len());
        let mut first = local.start as u64;
        let local = &rows[local];
        let share = if config.disable_dropout { 0.0 } else { config.peft.lora_dropout };
        let mut passes = Vec::new();
        let mut likelihoods = Vec::new();
        let _loaded = self.teacher.loaded()?;
        let most_rows = config.batches().rows_per_pass();
        for part in micro_batches(local, most_rows, batch.max_tokens, |row| (row.tokens.len(), 0)) {
            let inputs = PassInputs::new(part);
            let mask = PassInputs::mask(part, device);
            let places = (first..first + part.len() as u64).collect();
            first += part.len() as u64;
            let dropout = DropoutRows { share, seed: config.run.seed, update: batch.update, rows: places };
            let numbers = self.pass(model, &inputs, &dropout, &(&mask * factor))?;
            passes.push(numbers.sums(&mask));
            if shown {
                let lens = inputs.lens();
                // The mean over no tokens is NaN; such a response is not shown.
                let row_logprobs = numbers.teacher_logprobs.split_with_sizes(&lens, 0);
                let means: Vec<Tensor> = row_logprobs.iter().map(|x| x.mean(Kind::Double)).collect();
                likelihoods.extend(to_host(&Tensor::stack(&means, 0)));
            }
        }
        let tokens = local.iter().map(|row| row.loss_tokens()).sum();
        Ok((PassSums::read(&passes, tokens), likelihoods))
    }

    /// Forward and backward pass of the sum of the losses of the tokens, each times its weight in `weights` `[M]`.
    fn pass(
        &self,
        model: &CausalLm,
        inputs: &PassInputs<'_>,
        dropout: &DropoutRows,
        weights: &Tensor,
    ) -> Result<TokenNumbers> {
        let passed = inputs.batch().with_dropout((dropout.share > 0.0).then_some(dropout));
        if self.compares_slices(model) {
            let distributions = self.teacher.distributions(inputs.batch())?;
            let all: Vec<usize> = (0..dropout.rows.len()).collect();
            let teacher = TeacherRows { of: &distributions, rows: &all };
            return Ok(model.divergence_backward(passed, teacher, &self.config.divergence(), weights)?.into());
        }
        let temperature = self.config.temperature_of_loss();
        let teacher = tch::no_grad(|| self.teacher.logprobs_of(inputs.batch(), temperature, false))?.logprobs;
        let options = LogprobOptions { entropy: true, ..temperature.into() };
        let now = model.logprobs_backward(passed, options, |part, now| {
            let slice = |x: &Tensor| x.narrow(0, part.start, part.end - part.start);
            let sampled = now.logprobs.detach();
            let advantages = slice(&teacher) - &sampled;
            // The weights that sampled the tokens are these: the ratio is 1, and has the gradient of the log-probability.
            let ratio = (&now.logprobs - sampled).exp();
            -(ratio * advantages * slice(weights)).sum(Kind::Float)
        })?;
        Ok(TokenNumbers::from_logprobs(&now, teacher))
    }

    /// Sums over the tokens of this rank's part of `rows`, without a gradient.
    pub(super) fn measured(&self, model: &CausalLm, rows: &[&DistillRow], world: &World) -> Result<PassSums> {
        let local = world.share_by(rows, |row| row.tokens.len());
        let mut passes = Vec::new();
        let _loaded = self.teacher.loaded()?;
        for part in local.chunks(self.config.per_device_eval_batch_size) {
            let inputs = PassInputs::new(part);
            let mask = PassInputs::mask(part, model.device());
            let numbers: TokenNumbers = if self.compares_slices(model) {
                let distributions = self.teacher.distributions(inputs.batch())?;
                let all: Vec<usize> = (0..part.len()).collect();
                let teacher = TeacherRows { of: &distributions, rows: &all };
                model.divergences(inputs.batch(), teacher, &self.config.divergence())?.into()
            } else {
                let temperature = self.config.temperature_of_loss();
                let logprobs = |model: &CausalLm| tch::no_grad(|| model.logprobs_of(inputs.batch(), temperature, true));
                TokenNumbers::from_logprobs(&logprobs(model)?, logprobs(&self.teacher)?.logprobs)
            };
            passes.push(numbers.sums(&mask));
        }
        Ok(PassSums::read(&passes, local.iter().map(|row| row.loss_tokens()).sum()))
    }

    /// Rows of a table that shows the first `responses`.
    fn samples(&self, rows: &[&DistillRow], responses: &[Response], scores: &[f64]) -> Result<Vec<Sample>> {
        let sample = |((row, response), score): ((&&DistillRow, &Response), &f64)| {
            Ok(Sample {
                prompt: self.tokenizer.decode_verbatim(row.prompt())?,
                response: self.tokenizer.decode(&response.tokens)?,
                score: *score,
                components: BTreeMap::new(),
                extra: BTreeMap::new(),
                finish_reason: Some(response.finish),
                num_tokens: Some(response.tokens.len()),
                tokens: Vec::new(),
                logprobs: Vec::new(),
                turns: None,
                conversation: None,
            })
        };
        let most = self.config.num_completions_to_print.unwrap_or(SHOWN);
        rows.iter().zip(responses).zip(scores).filter(|(_, score)| score.is_finite()).take(most).map(sample).collect()
    }
}

/// The rows of the sampled `responses` to the prompts of `asked`.
fn sampled_rows(asked: &[&DistillRow], responses: &[Response]) -> Vec<DistillRow> {
    asked.iter().zip(responses).map(|(row, response)| DistillRow::sampled(row.prompt(), response)).collect()
}

impl Supervised for Distillation<'_> {
    type Head = LmHead;
    type Sums = Totals;

    fn backward(&mut self, model: &CausalLm, batch: &UpdateRows<'_>, sums: &mut Totals) -> Result<()> {
        let source = Source::of_update(self.config, batch.update);
        let asked: Vec<&DistillRow> = batch.rows.iter().map(|&row| &self.train.rows[row]).collect();
        let began = Instant::now();
        let responses = self.responses(source, model, &asked, (Purpose::Sampling, batch.update), batch.world)?;
        let seconds = began.elapsed().as_secs_f64();
        let sampled = responses.as_deref().map(|responses| sampled_rows(&asked, responses));
        let rows: Vec<&DistillRow> = sampled.as_ref().map_or(asked.clone(), |sampled| sampled.iter().collect());
        // Rows of similar length share a micro-batch: less padding in attention, the same sum.
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|&at| rows[at].tokens.len());
        let sorted: Vec<&DistillRow> = order.iter().map(|&at| rows[at]).collect();
        let shows = self.config.log_completions && responses.is_some();
        let (pass_sums, likelihoods) = batch.world.agree(self.learn(model, batch, &sorted, shows))?;
        sums.add_passes(&pass_sums, source == Source::Student);
        let num_tokens: usize = rows.iter().map(|row| row.tokens.len()).sum();
        // An update that samples nothing shows nothing, not the responses of an earlier update.
        let mut shown = Vec::new();
        if shows {
            let all = batch.world.gather_numbers(&likelihoods)?.concat();
            let mut scores = vec![f64::NAN; rows.len()];
            order.iter().zip(all).for_each(|(&at, score)| scores[at] = score);
            shown = self.samples(&asked, responses.as_deref().unwrap_or_default(), &scores)?;
        }
        if let Some(responses) = responses.as_ref().filter(|_| batch.world.is_main()) {
            sums.add_responses(responses, source == Source::Student, seconds);
        }
        self.num_tokens += num_tokens;
        self.shown = shown;
        Ok(())
    }

    fn push_so_far(&self, metrics: &mut Metrics) {
        metrics.push("num_tokens", self.num_tokens as f64);
    }

    fn take_samples(&mut self) -> Vec<Sample> {
        std::mem::take(&mut self.shown)
    }

    fn evaluate(&self, model: &CausalLm, world: &World, metrics: &mut Metrics) -> Result<()> {
        if self.eval.is_empty() {
            return Ok(());
        }
        let asked: Vec<&DistillRow> = self.eval.iter().collect();
        // The same draws each time, so that a difference between two evaluations is one of the student.
        let source = Source::of_evaluation(self.config);
        let responses = self.responses(source, model, &asked, (Purpose::Evaluation, 0), world)?;
        let sampled = responses.map(|responses| sampled_rows(&asked, &responses));
        let rows: Vec<&DistillRow> = sampled.as_ref().map_or(asked, |sampled| sampled.iter().collect());
        let local = world.agree(self.measured(model, &rows, world))?;
        let mut sums = [local.loss, local.entropy, local.tokens];
        world.sum_numbers(&mut sums)?;
        if sums[2] > 0.0 {
            metrics.push("eval_loss", sums[0] / sums[2]);
            metrics.push("eval_entropy", sums[1] / sums[2]);
        }
        Ok(())
    }

    fn has_eval_rows(&self) -> bool {
        !self.eval.is_empty()
    }

    fn state(&self) -> TaskState {
        TaskState { num_tokens: Some(self.num_tokens), ..TaskState::default() }
    }

    fn load(&mut self, dir: &Path, state: &TaskState, _world: &World, _has_changed: bool) -> Result<()> {
        let missing = || Error::invalid(dir, "expected the state of `num_tokens`, found none");
        self.num_tokens = state.num_tokens.ok_or_else(missing)?;
        Ok(())
    }
}
