//! TRL's `PPOTrainer` until 0.11: the caller's loop calls `generate`, computes any scores, and calls `step`.
//!
//! One policy with a value head on it, one optimizer. Rollout, targets and losses are those of [`crate::rl`], as
//! [`crate::train::ppo`] uses them with the preset `trl-legacy`; `docs/migrate/trl-step.md` lists where TRL's own trainer differs.

mod settings;
mod state;
mod stats;
mod tensors;

pub use settings::StepConfig;
pub use stats::{LossInputs, Stat, Stats};
pub use tensors::TokenRewards;

use crate::data::{Dataset, Prompt};
use crate::reward::ScoreScaling;
use crate::rl::experience::Experience;
use crate::rl::groups::check_whole;
use crate::rl::kl::KlController;
use crate::rl::learner::{EpochPlan, Learner};
use crate::rl::rollout::{RolloutSettings, experience};
use crate::rl::shaping::{Shaping, Targets, advantages, shape_rewards};
use crate::rl::stats::{StepStats, optimizer_steps};
use crate::run::best::Best;
use crate::run::card::Card;
use crate::run::checkpoint::BEST;
use crate::run::event::{Event, Sample, SampleSource};
use crate::run::output_dir::{FolderLock, claim_folder};
use crate::run::push::open_model;
use crate::run::report::Reporter;
use crate::run::sinks::Reached;
use crate::run::sinks::console::Console;
use crate::run::sinks::trackers::Outcome;
use crate::settings::{EvalConfig, PpoConfig};
use crate::train::ppo::check_same_kind;
use rlhf_base::dist::World;
use rlhf_base::metrics::Metrics;
use rlhf_base::rng::{Purpose, Stream};
use rlhf_base::weights::replace_files;
use rlhf_base::{Error, Result};
use rlhf_hub as hub;
use rlhf_hub::Hub;
use rlhf_hub::push::Repository;
use rlhf_lm::generate::{FinishReason, GenerationConfig, Response, Sampling, generate_on};
use rlhf_lm::model::{CausalLm, CausalLmWithValueHead, ModelOptions, ValueModel};
use rlhf_lm::optim::LearningRates;
use rlhf_lm::tokenizer::Tokenizer;
use stats::{MEAN_SCORE, mean, variance};
use std::fmt;
use std::io::Write;
use std::path::Path;
use std::time::Instant;
use tch::Tensor;

/// Draws lengths uniformly from `min` to below `max`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LengthSampler {
    min: usize,
    max: usize,
}

impl LengthSampler {
    /// Creates a sampler of lengths from `min` to below `max`.
    ///
    /// # Errors
    /// If the range is empty, or has a length of 0.
    pub fn new(min: usize, max: usize) -> Result<Self> {
        if min == 0 || min >= max {
            let message = format!("lengths from {min} to below {max}: expected some, of at least one token");
            return Err(Error::Usage(message));
        }
        Ok(Self { min, max })
    }

    /// Draws the next length.
    pub fn sample(&self, stream: &mut Stream) -> usize {
        self.min + (stream.uniform() * (self.max - self.min) as f64) as usize
    }
}

/// Options of [`StepTrainer::generate`].
#[derive(Debug, Clone, PartialEq)]
pub struct Generate {
    /// Settings for sampling the next token. The losses use the policy's distribution at temperature 1: sampling from
    /// another one can make the estimated KL negative.
    pub sampling: Sampling,
    /// Most tokens of a response, without a `length_sampler`.
    pub max_new_tokens: usize,
    /// Fewest tokens of a response.
    pub min_new_tokens: usize,
    /// Tokens that end a response; `None`: the tokenizer's eos.
    pub stop_token_ids: Option<Vec<i64>>,
    /// Penalty on tokens that are in the query or the response already; 1 for none.
    pub repetition_penalty: f64,
    /// Draws the maximum number of tokens of a response, once per `batch_size` queries.
    pub length_sampler: Option<LengthSampler>,
    /// Queries per batch; 0 is 1.
    pub batch_size: usize,
    /// Return query and response joined; no effect on an encoder-decoder, as in TRL.
    pub return_prompt: bool,
    /// Sample responses from the reference model too.
    pub generate_ref_response: bool,
}

impl Generate {
    /// Responses of at most `max_new_tokens` tokens from the policy's own distribution, without the queries, four per batch.
    pub fn new(max_new_tokens: usize) -> Self {
        Self {
            sampling: Sampling::at_temperature(1.0),
            max_new_tokens,
            min_new_tokens: 0,
            stop_token_ids: None,
            repetition_penalty: 1.0,
            length_sampler: None,
            batch_size: 4,
            return_prompt: false,
            generate_ref_response: false,
        }
    }
}

/// Responses of [`StepTrainer::generate`], a row per query.
#[derive(Debug, Clone, PartialEq)]
pub struct Generated {
    /// Responses of the policy, with their eos.
    pub responses: Vec<Vec<i64>>,
    /// Responses of the reference model, if requested.
    pub ref_responses: Option<Vec<Vec<i64>>>,
}

/// Texts of a batch, for the table of [`StepTrainer::log_stats`].
#[derive(Debug, Clone, Copy)]
pub struct Texts<'a> {
    /// A query per row.
    pub query: &'a [String],
    /// A response per row.
    pub response: &'a [String],
}

/// Iterates over the rows of a dataset in batches, in a new order in each pass.
pub struct DataLoader {
    prompts: Vec<Prompt>,
    batch_size: usize,
    order: Box<Order>,
    pass: u64,
}

/// Returns the order of the rows: pass number, number of rows.
type Order = dyn FnMut(u64, usize) -> Vec<usize>;

impl fmt::Debug for DataLoader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataLoader").field("rows", &self.prompts.len()).field("batch_size", &self.batch_size).finish()
    }
}

impl DataLoader {
    /// Sets the order of each pass: `order(pass, rows)`, passes counted from 0.
    #[must_use]
    pub fn with_order(mut self, order: impl FnMut(u64, usize) -> Vec<usize> + 'static) -> Self {
        self.order = Box::new(order);
        self
    }

    /// Batches of the next pass over all rows; the last may be smaller. Each prompt has its text, its tokens and the whole row, for a
    /// collator of the caller.
    ///
    /// # Errors
    /// If the caller's order has a row that is out of range.
    pub fn epoch(&mut self) -> Result<impl Iterator<Item = Vec<Prompt>> + use<>> {
        let pass = self.pass;
        let count = self.prompts.len();
        let order = (self.order)(pass, count);
        if let Some(row) = order.iter().find(|&&row| row >= count) {
            return Err(Error::Run(format!("order: pass {pass}: expected rows below {count}, found row {row}")));
        }
        self.pass += 1;
        let rows = |batch: &[usize]| batch.iter().map(|&row| self.prompts[row].clone()).collect();
        Ok(order.chunks(self.batch_size).map(rows).collect::<Vec<Vec<Prompt>>>().into_iter())
    }
}

/// Trains a policy on the caller's scores, one call of [`StepTrainer::step`] at a time.
///
/// ```no_run
/// use rlhf::model::ModelOptions;
/// use rlhf::compat::step::{Generate, StepConfig, StepTrainer};
/// # fn main() -> rlhf::Result<()> {
/// let config = StepConfig { model_name: "runs/sft".into(), batch_size: 2, mini_batch_size: 2, ..StepConfig::default() };
/// let mut trainer = StepTrainer::from_pretrained(config, ModelOptions::default())?;
/// let queries = [vec![5, 6, 7], vec![8, 9]];
/// let responses = trainer.generate(&queries, &Generate::new(32))?.responses;
/// let scores: Vec<f64> = responses.iter().map(|response| -(response.len() as f64)).collect();
/// trainer.step(&queries, &responses, &scores, None)?;
/// # Ok(())
/// # }
/// ```
pub struct StepTrainer {
    /// Policy, value head and their optimizer.
    pub learner: Learner,
    /// The reference model.
    pub reference: CausalLm,
    /// Tokenizer of both models.
    pub tokenizer: Tokenizer,
    config: StepConfig,
    /// Settings of the passes that evaluate responses.
    rollout: RolloutSettings,
    /// Settings for rewards and targets.
    shaping: Shaping,
    kl: KlController,
    scaling: ScoreScaling,
    schedule: Box<dyn FnMut(usize) -> f64>,
    /// Orders the rows of a step for one epoch.
    order: Box<Order>,
    output: Output,
    counts: Counts,
}

/// The output folder of a [`StepTrainer`], and the other places that it writes to.
struct Output {
    best: Option<Best>,
    /// Repository of the best models, on rank 0.
    repository: Option<Repository>,
    reporter: Option<Reporter<'static>>,
    /// Lock on the output folder.
    _lock: Option<FolderLock>,
}

/// Numbers of calls, which key random draws and metrics.
#[derive(Clone, Copy, Default)]
struct Counts {
    /// Calls of `step`.
    steps: usize,
    /// Epochs of all steps.
    passes: u64,
    /// Calls of `generate`.
    generations: u64,
    /// Calls of `log_stats`.
    logged: usize,
}

impl fmt::Debug for StepTrainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, learner, counts: Counts { steps, .. }, .. } = self;
        f.debug_struct("StepTrainer").field("config", config).field("learner", learner).field("steps", steps).finish()
    }
}

impl Drop for StepTrainer {
    /// Ends the runs of `log_with`.
    fn drop(&mut self) {
        let outcome = if std::thread::panicking() { Outcome::Failed } else { Outcome::Finished };
        self.output.reporter.iter_mut().for_each(|reporter| reporter.end(outcome, None));
    }
}

/// Returns the reference model of `policy`: the caller's, or else a frozen copy, which shares `num_shared_layers` lower layers with the
/// policy, or the base model of an adapter.
///
/// # Errors
/// If the caller's reference does not fit the policy or cannot share layers.
fn build_reference(
    policy: &mut CausalLm,
    caller_reference: Option<CausalLm>,
    num_shared_layers: Option<usize>,
) -> Result<CausalLm> {
    let reference = match (caller_reference, num_shared_layers) {
        (Some(_), Some(layers)) => {
            return Err(Error::refused(
                "num_shared_layers",
                format!(" = {layers} has no effect with an explicit reference model, which shares no layer"),
            ));
        }
        (Some(reference), None) => reference,
        (None, Some(layers)) => policy.share_lower_layers(layers)?,
        (None, None) if policy.has_adapter() => policy.base()?,
        (None, None) => policy.frozen_copy()?,
    };
    check_same_kind("reference", policy.config(), reference.config())?;
    let expected = policy.config().vocab_size;
    let found = reference.config().vocab_size;
    if expected != found {
        let message = format!("the reference's vocabulary: expected the policy's {expected} tokens, found {found}");
        return Err(Error::Usage(message));
    }
    Ok(reference)
}

/// Opens the sinks of `log_with` in the folder `project` of `dir`; the run has the name of `dir` where none is set.
///
/// # Errors
/// If a file cannot be written.
fn open_reporter(dir: &Path, project: &str, ppo: &PpoConfig) -> Result<Reporter<'static>> {
    let mut run = ppo.run.clone();
    run.output_dir = dir.join(project);
    if run.tracking.run_name.is_none() {
        run.tracking.run_name = dir.file_name().map(|name| name.to_string_lossy().into_owned());
    }
    std::fs::create_dir_all(&run.output_dir).map_err(Error::io("create the folder", &run.output_dir))?;
    let mut reporter = Reporter::open(&run, "ppo", 0, Reached::default(), Console::Silent)?;
    reporter.settings(ppo)?;
    Ok(reporter)
}

/// Returns the record of the best model by mean score.
fn best_by_score(eval: &EvalConfig) -> Option<Best> {
    let metric_for_best_model = Some(MEAN_SCORE.to_string());
    Best::new(&EvalConfig { metric_for_best_model, greater_is_better: Some(true), ..eval.clone() })
}

impl StepTrainer {
    /// Creates a trainer of `model`. Without a `reference` the reference is a frozen copy of the model, which shares
    /// `num_shared_layers` lower layers with it; or, for a model with an adapter, its base.
    ///
    /// # Errors
    /// If a setting is out of its range, or `output_dir` holds a run.
    pub fn new(
        config: StepConfig,
        model: CausalLmWithValueHead,
        reference: Option<CausalLm>,
        tokenizer: Tokenizer,
    ) -> Result<Self> {
        let run = config.checked()?;
        let ppo = &run.config;
        let (mut policy, head) = model.into_parts();
        let mut tokenizer = tokenizer;
        tokenizer.set_encoder_decoder(policy.config().is_encoder_decoder());
        let reference = build_reference(&mut policy, reference, config.num_shared_layers)?;
        // One rank writes to the folder.
        let world = World::of_process();
        let rank_dir = config.output_dir.as_deref().filter(|_| world.is_main());
        let hold = world.agree(rank_dir.map(|dir| claim_folder(dir, false, ppo)).transpose())?;
        let reporter = rank_dir.map(|dir| open_reporter(dir, &config.tracker_project_name, ppo));
        let reporter = world.agree(reporter.transpose())?;
        let to = config.destination()?;
        let repository = || to.as_ref().map(|to| Hub::from_env().repository(to)).transpose();
        let repository = world.on_main(repository)?.flatten();
        let keeps_best = config.keep_best || to.is_some();
        let seed = config.seed;
        let learning_rate = config.learning_rate;
        let critic = if run.needs_critic { ValueModel::from(head) } else { ValueModel::None };
        Ok(Self {
            rollout: RolloutSettings { compares_sampling: false, ..run.rollout(&policy) },
            learner: Learner {
                collect_ratios: true,
                ..Learner::on_ranks(&world, (policy, critic), run.learner.clone(), None)?
            },
            reference,
            tokenizer,
            kl: KlController::new(&ppo.kl, 0),
            shaping: run.shaping.clone(),
            scaling: ScoreScaling::new(&ppo.score_scaling),
            schedule: Box::new(move |_| learning_rate),
            order: Box::new(move |pass, rows| Stream::new(seed, Purpose::MiniBatches, pass, 0).permutation(rows)),
            output: Output {
                best: if keeps_best { best_by_score(&ppo.eval) } else { None },
                repository,
                reporter,
                _lock: hold,
            },
            counts: Counts::default(),
            config,
        })
    }

    /// Loads the model `model_name`, a folder or a name on the hub, with its value head, or else a newly initialised one.
    ///
    /// # Errors
    /// The errors of [`StepTrainer::new`] and [`hub::model_dir`]; if there is no model with a tokenizer.
    pub fn from_pretrained(config: StepConfig, options: ModelOptions) -> Result<Self> {
        let dir = hub::model_dir(&config.model_name, None)?;
        let tokenizer = Tokenizer::from_pretrained(&dir)?;
        let lm = CausalLm::from_pretrained(&dir, options)?;
        tokenizer.check_fits(lm.config(), &dir)?;
        let model = CausalLmWithValueHead::found_in(&dir, lm, config.seed)?;
        Self::new(config, model, None, tokenizer)
    }

    /// The settings; they cannot be changed, but a new trainer of the same models can have others.
    pub fn config(&self) -> &StepConfig {
        &self.config
    }

    /// Sets the learning rate of each step: `schedule(step)`, counted from 0. A rate below 0, or one that is not finite, is an error of the
    /// step.
    #[must_use]
    pub fn with_schedule(mut self, schedule: impl FnMut(usize) -> f64 + 'static) -> Self {
        self.schedule = Box::new(schedule);
        self
    }

    /// Sets the order of the rows in each epoch: `order(epoch, rows)`, epochs counted from 0 over all steps.
    #[must_use]
    pub fn with_order(mut self, order: impl FnMut(u64, usize) -> Vec<usize> + 'static) -> Self {
        self.order = Box::new(order);
        self
    }

    /// Creates a loader of `dataset` in batches of `batch_size`; prompts are in `query` or another field that
    /// [`Dataset::prompts`] reads.
    ///
    /// # Errors
    /// The errors of [`Dataset::prompts`].
    pub fn prepare_dataloader(&self, dataset: &Dataset) -> Result<DataLoader> {
        let policy = self.learner.policy.config();
        // A decoder reads the response after the prompt, so one position is left for it.
        let most = policy.max_position_embeddings - usize::from(!policy.is_encoder_decoder());
        let prompts = dataset.prompts(&self.tokenizer, policy.vocab_size, most)?;
        let seed = self.config.seed;
        let order = move |pass, rows| Stream::new(seed, Purpose::DataOrder, pass, 0).permutation(rows);
        Ok(DataLoader { prompts, batch_size: self.config.batch_size, order: Box::new(order), pass: 0 })
    }

    /// Samples responses to `queries`; a response ends after its first eos.
    ///
    /// # Errors
    /// The errors of [`generate_on`].
    pub fn generate(&mut self, queries: &[Vec<i64>], how: &Generate) -> Result<Generated> {
        let call = self.counts.generations;
        self.counts.generations += 1;
        let batch_size = how.batch_size.max(1);
        // As in TRL, whose encoder-decoders return what the decoder wrote in any case.
        let return_prompt = how.return_prompt && !self.learner.policy.config().is_encoder_decoder();
        let respond = |model: &CausalLm| {
            let mut lengths = Stream::new(self.config.seed, Purpose::Lengths, call, 0);
            let mut responses = Vec::with_capacity(queries.len());
            for (part, queries) in queries.chunks(batch_size).enumerate() {
                let sampled = how.length_sampler.map(|sampler| sampler.sample(&mut lengths));
                let generation = GenerationConfig {
                    min_new_tokens: how.min_new_tokens,
                    stop_token_ids: how.stop_token_ids.clone().unwrap_or_else(|| self.tokenizer.eos_ids().to_vec()),
                    repetition_penalty: how.repetition_penalty,
                    seed: self.config.seed,
                    step: call,
                    first_row: (part * batch_size) as u64,
                    batch_size,
                    ..GenerationConfig::new(how.sampling, sampled.unwrap_or(how.max_new_tokens))
                };
                for (query, response) in
                    queries.iter().zip(generate_on(&self.learner.world, model, queries, &generation)?)
                {
                    responses.push(if return_prompt {
                        [query.as_slice(), &response.tokens].concat()
                    } else {
                        response.tokens
                    });
                }
            }
            Ok::<_, Error>(responses)
        };
        let responses = respond(&self.learner.policy)?;
        let ref_responses = how.generate_ref_response.then(|| respond(&self.reference)).transpose()?;
        Ok(Generated { responses, ref_responses })
    }

    /// Runs one PPO step on `queries`, `responses` and `scores`, any number of rows; returns its statistics. With several ranks every
    /// rank passes all rows of the batch, and the passes over them are divided.
    ///
    /// A response of an encoder-decoder has no start token before it.
    ///
    /// `response_masks`, an entry per token of each response, masks out tokens that the policy did not sample. A KL
    /// below -1 causes a warning on standard error.
    ///
    /// # Errors
    /// If the rows do not match or do not fit the model, a score is not finite in f32, or the learning rate of the schedule is below 0 or
    /// not finite: nothing has changed. If a loss or a gradient is not finite: that optimizer step was skipped, the others were taken.
    pub fn step(
        &mut self,
        queries: &[Vec<i64>],
        responses: &[Vec<i64>],
        scores: &[f64],
        response_masks: Option<&[Vec<bool>]>,
    ) -> Result<Stats> {
        let began = Instant::now();
        let bits: Vec<u64> = scores.iter().map(|score| score.to_bits()).collect();
        self.learner.world.check_same("step: queries, responses and scores", &(queries, responses, bits))?;
        // The models' numbers are f32.
        if let Some(row) = scores.iter().position(|&score| !(score as f32).is_finite()) {
            let found = scores[row];
            return Err(Error::Run(format!("row {row}: expected a finite score that fits in f32, found {found:?}")));
        }
        // A call that fails, and is perhaps repeated, must not count its scores.
        let mut scaling = self.scaling.clone();
        let raw = scores;
        let scores = scaling.scale(raw, true);

        let experience = self.batched_forward_pass(queries, responses, &scores, response_masks)?;
        let forward = began.elapsed().as_secs_f64();
        let (kl, rewards) = self.compute_rewards(&experience);
        let rewarded = began.elapsed().as_secs_f64();
        let (advantages, returns) = self.compute_advantages(&experience, &rewards);
        let targets = Targets { kl, kl_coef: self.kl.coef(0), rewards, advantages, returns };
        let shaped = began.elapsed().as_secs_f64();
        let rows = queries.len();
        let orders: Vec<Vec<usize>> =
            (0..self.config.ppo_epochs as u64).map(|epoch| (self.order)(self.counts.passes + epoch, rows)).collect();
        if let Some(order) = orders.iter().find(|order| order.len() != rows || order.iter().any(|&row| row >= rows)) {
            let message = format!("order: expected {rows} rows, each below {rows}, found {order:?}");
            return Err(Error::Run(message));
        }
        let rates = self.rates()?;
        self.keep_best(raw)?;
        self.scaling = scaling;
        self.counts.passes += orders.len() as u64;
        let plan = self.config.epoch();
        let parts = self.learner.optimize(&experience, &targets, &orders, rates, &plan)?;
        let learned = began.elapsed().as_secs_f64();

        let mut stats = self.record_step_stats(&experience, &targets, &orders, &parts, &plan);
        stats.push("ppo/learning_rate", rates.value);
        for (name, from, to) in [
            ("forward_pass", 0.0, forward),
            ("compute_rewards", forward, rewarded),
            ("compute_advantages", rewarded, shaped),
            ("optimize_step", shaped, learned),
            ("calc_stats", learned, began.elapsed().as_secs_f64()),
            ("total", 0.0, began.elapsed().as_secs_f64()),
        ] {
            stats.push(format!("time/ppo/{name}"), to - from);
        }
        self.kl.observe(stats.get("objective/kl").unwrap_or(f64::NAN), rows);
        self.counts.steps += 1;
        if let Some(warning) = stats.warning() {
            let _ = writeln!(std::io::stderr(), "warning: {warning}");
        }
        let steps = optimizer_steps(&parts);
        let all = steps.clone().count();
        let problems: Vec<String> = steps.filter_map(|parts| parts.iter().find_map(StepStats::not_finite)).collect();
        match problems.first() {
            Some(problem) => {
                let step = self.counts.steps;
                let bad = problems.len();
                Err(Error::Run(format!("step {step}: {bad} of {all} optimizer steps not taken: {problem}")))
            }
            None => Ok(self.gather_stats(stats)),
        }
    }

    /// Evaluates the responses with policy, value head and reference; tensors are `[rows, longest response]`.
    ///
    /// # Errors
    /// If the rows do not match or do not fit the models.
    pub fn batched_forward_pass(
        &self,
        queries: &[Vec<i64>],
        responses: &[Vec<i64>],
        scores: &[f64],
        response_masks: Option<&[Vec<bool>]>,
    ) -> Result<Experience> {
        self.check_rows(queries, responses)?;
        let longest = responses.iter().map(Vec::len).max().unwrap_or(0);
        let response = |tokens: &Vec<i64>| Response {
            tokens: tokens.clone(),
            logprobs: Vec::new(),
            finish: FinishReason::Length,
            sets: None,
            inserted: Vec::new(),
        };
        let responses: Vec<Response> = responses.iter().map(response).collect();
        let scores: Vec<f32> = scores.iter().map(|&score| score as f32).collect();
        let scores = Tensor::from_slice(&scores).to_device(self.learner.policy.device());
        let models = self.learner.rollout_models(&self.reference);
        let settings = RolloutSettings { response_length: longest, recompute_logprobs: true, ..self.rollout.clone() };
        let mut experience = experience(models, queries, &responses, scores, &settings)?;
        experience.groups = self.groups(queries)?;
        if let Some(kept) = response_masks {
            experience.leave_out(kept)?;
        }
        Ok(experience)
    }

    /// Refuses empty batches, rows that do not match, and empty responses.
    fn check_rows(&self, queries: &[Vec<i64>], responses: &[Vec<i64>]) -> Result<()> {
        if queries.len() != responses.len() {
            let queries = queries.len();
            let responses = responses.len();
            return Err(Error::Run(format!(
                "expected a response for each of {queries} queries, found {responses} responses"
            )));
        }
        if let Some(row) = responses.iter().position(Vec::is_empty) {
            return Err(Error::Run(format!("row {row}: expected a response of at least one token, found none")));
        }
        if queries.is_empty() {
            return Err(Error::Run("expected at least one row, found none".into()));
        }
        self.check_starts(responses)
    }

    /// Refuses responses that all start with the decoder's start token, as those that transformers generates: the model adds it itself.
    fn check_starts(&self, responses: &[Vec<i64>]) -> Result<()> {
        let policy = self.learner.policy.config();
        let start = policy.decoder_start_token_id.filter(|_| policy.is_encoder_decoder());
        match start.filter(|start| responses.iter().all(|response| response.first() == Some(start))) {
            Some(start) => Err(Error::Run(format!(
                "responses: expected them without the decoder's start token, which the model adds, found {start} first in each"
            ))),
            None => Ok(()),
        }
    }

    /// The group of each row: `num_generations` rows of the same query, one after another.
    fn groups(&self, queries: &[Vec<i64>]) -> Result<Vec<usize>> {
        let size = self.config.num_generations;
        check_whole("rows", queries.len(), size)?;
        let differs = |group: &[Vec<i64>]| group.iter().any(|query| *query != group[0]);
        if let Some(at) = queries.chunks(size).position(differs) {
            return Err(Error::Run(format!(
                "rows {} to {}: expected {size} responses to the same query, num_generations of them, found others",
                at * size,
                at * size + size - 1
            )));
        }
        Ok((0..queries.len()).map(|row| row / size).collect())
    }

    /// KL and reward of each token: minus the weighted KL, plus the score on the last token; `[rows, longest response]`
    /// each.
    pub fn compute_rewards(&self, experience: &Experience) -> (Tensor, Tensor) {
        shape_rewards(experience, self.kl.coef(0), &self.shaping)
    }

    /// Advantages, whitened over all tokens, and returns; `[rows, longest response]` each.
    pub fn compute_advantages(&self, experience: &Experience, rewards: &Tensor) -> (Tensor, Tensor) {
        advantages(experience, rewards, &self.shaping)
    }

    /// Takes one optimizer step on some rows of an experience.
    ///
    /// # Errors
    /// If there are no rows, or one is out of range; if the learning rate of the schedule is below 0 or not finite; the errors of
    /// [`Learner::optimize`].
    pub fn train_minibatch(
        &mut self,
        experience: &Experience,
        targets: &Targets,
        rows: &[usize],
    ) -> Result<Vec<StepStats>> {
        let all = experience.rows();
        if rows.is_empty() || rows.iter().any(|&row| row >= all) {
            return Err(Error::Run(format!(
                "train_minibatch: expected rows of an experience of {all}, found {rows:?}"
            )));
        }
        let plan = EpochPlan { mini_batch_size: rows.len(), part_size: rows.len(), ..self.config.epoch() };
        let rates = self.rates()?;
        self.learner.optimize(experience, targets, &[rows.to_vec()], rates, &plan)
    }

    /// Means of the statistics over all processes; with one process the statistics themselves.
    pub fn gather_stats(&self, stats: Stats) -> Stats {
        stats
    }

    /// Logs the numbers of `stats` and the caller's rewards to `metrics.jsonl` and to `log_with`, and `texts` with their
    /// rewards to `samples/`. Without an `output_dir` nothing is written. Returns all statistics, with lists, for the caller's own log.
    ///
    /// # Errors
    /// If a file cannot be written, or the rows do not match.
    pub fn log_stats(&mut self, stats: &Stats, texts: Texts<'_>, rewards: &[f64]) -> Result<Stats> {
        let rows = [texts.query.len(), texts.response.len(), rewards.len()];
        if rows.iter().any(|&count| count != rows[0]) || rows[0] == 0 {
            let [query, response, rewards] = rows;
            return Err(Error::Run(format!(
                "log_stats: expected as many queries, responses and rewards, found {query}, {response} and {rewards}"
            )));
        }
        self.counts.logged += 1;
        let rewards_f32: Vec<f32> = rewards.iter().map(|&reward| reward as f32).collect();
        let mut all = stats.clone();
        all.push("env/reward_mean", mean(&rewards_f32));
        all.push("env/reward_std", variance(&rewards_f32).sqrt());
        all.push_list("env/reward_dist", rewards_f32);
        let Some(reporter) = &mut self.output.reporter else { return Ok(all) };
        let mut metrics = Metrics::default();
        metrics.push("step", self.counts.logged as f64);
        metrics.extend(&all.numbers());
        reporter.emit(&Event::Update { step: self.counts.logged, metrics: &metrics })?;
        let sample = |((query, response), &score): ((&String, &String), &f64)| Sample {
            prompt: query.clone(),
            response: response.clone(),
            score,
            components: std::collections::BTreeMap::new(),
            extra: std::collections::BTreeMap::new(),
            finish_reason: None,
            num_tokens: None,
            tokens: Vec::new(),
            logprobs: Vec::new(),
            turns: None,
            conversation: None,
        };
        let samples: Vec<Sample> = texts.query.iter().zip(texts.response).zip(rewards).map(sample).collect();
        let step = self.counts.logged;
        let source = SampleSource::SamplePrompts;
        reporter.emit(&Event::Samples { step, episode: step * rows[0], source, samples: &samples })?;
        Ok(all)
    }

    /// Writes the policy with its value head, the tokenizer and a model card to `dir`: transformers and TRL 0.11 open it.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save_pretrained(&self, dir: &Path) -> Result<()> {
        let write = || replace_files(dir, |dir| self.write_model(dir)).and_then(|()| self.create_model_card(dir));
        self.learner.save_together(write)
    }

    fn write_model(&self, dir: &Path) -> Result<()> {
        self.learner.policy.save_pretrained(dir, self.tokenizer.eos_ids(), self.tokenizer.pad(), usize::MAX)?;
        self.tokenizer.save_pretrained(dir)
    }

    /// Writes a model card to `dir`.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn create_model_card(&self, dir: &Path) -> Result<()> {
        let c = &self.config;
        let mut facts = vec![
            ("policy started from", format!("`{}`", c.model_name.display())),
            ("steps", self.counts.steps.to_string()),
            ("weight of the KL", format!("{:.6}", self.kl.coef(0))),
        ];
        facts.extend(c.exp_name.clone().map(|name| ("experiment", name)));
        facts.extend(c.task_name.clone().map(|name| ("task", name)));
        let base_model = Some(c.model_name.as_path());
        let is_adapter = self.learner.policy.has_adapter();
        Card { command: "ppo", base_model, is_adapter, facts: &facts }.write(dir)
    }

    /// Weight of the KL in the next step.
    pub fn kl_coef(&self) -> f64 {
        self.kl.coef(0)
    }

    /// Running mean and standard deviation of the scores, where they are scaled.
    pub fn score_moments(&self) -> (f64, f64) {
        self.scaling.moments()
    }

    /// The learning rates of the next step.
    fn rates(&mut self) -> Result<LearningRates> {
        let rate = (self.schedule)(self.counts.steps);
        LearningRates { policy: Some(rate), value: rate }.checked(&format!("schedule: step {}", self.counts.steps))
    }

    /// Saves the model that sampled these responses as the best one, if a comparison is due and their mean raw score is
    /// the best so far. Raw scores are compared because scaled ones depend on a running deviation, which changes.
    fn keep_best(&mut self, scores: &[f64]) -> Result<()> {
        let Some((mut best, dir)) = self.output.best.take().zip(self.config.output_dir.as_ref()) else { return Ok(()) };
        let mut metrics = Metrics::default();
        metrics.push(MEAN_SCORE, scores.iter().sum::<f64>() / scores.len() as f64);
        let due = self.counts.steps.is_multiple_of(self.config.compare_steps);
        let compared = best.compare(&metrics, self.counts.steps, due, false);
        let is_best = best.is_due(self.counts.steps);
        let written = compared.and_then(|_| {
            self.learner.save_together(|| best.write(dir, self.counts.steps, |dir| self.write_model(dir)).map(drop))
        });
        if written.is_ok() && is_best {
            self.push_best(dir);
        }
        if written.is_ok() {
            best.mark_written(self.counts.steps);
        }
        self.output.best = Some(best);
        written
    }

    /// Pushes the best model to the hub, if it is pushed. A failure is a warning.
    fn push_best(&self, output_dir: &Path) {
        let Some(repository) = &self.output.repository else { return };
        let title = format!("Best model, at step {}", self.counts.steps + 1);
        let files = open_model(&output_dir.join(BEST));
        if let Err(error) = files.and_then(|files| repository.push(&files, &title, false)) {
            let _ = writeln!(std::io::stderr(), "warning: the best model is not on the hub: {error}");
        }
    }
}
