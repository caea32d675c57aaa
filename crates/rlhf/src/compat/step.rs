//! PPO from a loop of the caller's own: `generate`, any scores at all, `step`; as TRL's trainer worked until 0.11.
//!
//! One policy with a value head on its trunk, one optimizer. The maths, the rollout and the learning are those of
//! [`crate::train::ppo`] with the preset `trl-legacy`; `docs/algorithm.md` lists where TRL's own trainer differs.

use crate::data::{Dataset, Prompt};
use crate::generate::{FinishReason, GenerationConfig, Response, Sampling, generate};
use crate::metrics::Metrics;
use crate::model::{CausalLm, CausalLmWithValueHead, ModelOptions};
use crate::optim::LearningRates;
use crate::reward::ScoreScaling;
use crate::rl::experience::Experience;
use crate::rl::kl::KlController;
use crate::rl::learner::{EpochPlan, Learner};
use crate::rl::math::{self, KlEstimator, PolicyClip};
use crate::rl::rollout::{RolloutModels, RolloutSettings, experience};
use crate::rl::shaping::{Shaping, Targets, advantages, shape_rewards};
use crate::rl::stats::{StepStats, optimizer_steps};
use crate::rng::{Purpose, Stream};
use crate::run::checkpoint::Best;
use crate::run::report::{Console, Hold, Reached, Reporter, Sample, claim_folder};
use crate::settings::{EvalConfig, LEGACY_BATCH, OptimizerConfig, PpoConfig, Preset, ReportTo, TARGET_KL};
use crate::tokenizer::Tokenizer;
use crate::train::Card;
use crate::weights::replace_files;
use crate::{Error, Result, files, hub, settings};
use clap::ValueEnum;
use serde::{Deserialize, Deserializer};
use std::borrow::Cow;
use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tch::{Kind, Tensor};

/// The settings of a [`StepTrainer`], under TRL's names and with TRL's defaults.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StepConfig {
    /// What the model card and the logs call the experiment.
    pub exp_name: Option<String>,
    /// What they call the task.
    pub task_name: Option<String>,
    /// Folder of the logs within `output_dir`.
    pub tracker_project_name: String,
    /// Seed of everything random.
    pub seed: u64,
    /// Where [`StepTrainer::log_stats`] writes besides `metrics.jsonl`.
    #[serde(deserialize_with = "choice")]
    pub log_with: ReportTo,
    /// Folder for the logs and the best model; without one nothing is written but what the caller saves.
    pub output_dir: Option<PathBuf>,
    /// The policy, a folder or a name of the hub; [`StepTrainer::from_pretrained`] reads it.
    pub model_name: PathBuf,
    /// Dataset of rows with a `query`; the caller reads it.
    pub query_dataset: PathBuf,
    /// The caller's reward model; the caller reads it.
    pub reward_model: String,
    /// Answers that the whole run trains on, for the progress that is logged.
    pub steps: usize,
    /// Learning rate, unless there is a schedule.
    pub learning_rate: f64,
    /// Adapt the KL's weight after each step, so that the KL of an answer comes near `target`.
    pub adap_kl_ctrl: bool,
    /// Weight of the KL in the first step.
    pub init_kl_coef: f64,
    /// How the KL is estimated: `kl` (k1), `abs`, `mse` or `full`.
    #[serde(deserialize_with = "choice")]
    pub kl_penalty: KlEstimator,
    /// KL of an answer, in nats, that the adaption aims at.
    pub target: f64,
    /// Answers over which the adaption takes up an error.
    pub horizon: f64,
    /// Discount of later rewards.
    pub gamma: f64,
    /// Lambda of generalized advantage estimation.
    pub lam: f64,
    /// Clip the probability ratio to 1 plus or minus this.
    pub cliprange: f64,
    /// Clip the new value to the old one plus or minus this.
    pub cliprange_value: f64,
    /// Weight of the value loss.
    pub vf_coef: f64,
    /// Rows that the data loader gives at a time; [`StepTrainer::step`] takes any number.
    pub batch_size: usize,
    /// Rows whose losses are averaged together.
    pub mini_batch_size: usize,
    /// Such averages in an optimizer step.
    pub gradient_accumulation_steps: usize,
    /// Passes over the rows of a step.
    pub ppo_epochs: usize,
    /// Clip gradients to this norm, at every optimizer step.
    pub max_grad_norm: Option<f64>,
    /// End the passes after one whose last mini-batch is 1.5 times `target_kl` away from the policy that sampled.
    pub early_stopping: bool,
    /// What `early_stopping` compares with, per token.
    pub target_kl: f64,
    /// With `keep_best`, calls of `step` between two looks at the mean score.
    pub compare_steps: usize,
    /// Keep the model with the best mean score in `output_dir/best`.
    pub keep_best: bool,
    /// Take no optimizer step whose mean probability ratio is above this.
    pub ratio_threshold: f64,
    /// Divide scores by the running standard deviation.
    pub use_score_scaling: bool,
    /// Subtract the running mean before that.
    pub use_score_norm: bool,
    /// Clip scores to plus or minus this, after that.
    pub score_clip: Option<f64>,
    /// Scale the rewards of a step to variance 1.
    pub whiten_rewards: bool,
    /// Keep only what goes into each layer, and compute the layer again on the way back.
    pub gradient_checkpointing: bool,
    /// Lower layers that stay as they are and are the reference's too, where the caller brings no reference.
    pub num_shared_layers: Option<usize>,
    /// The rest of the optimizer's settings: Adam as torch has it, no weight decay.
    #[serde(skip)]
    pub optimizer: OptimizerConfig,
}

impl Default for StepConfig {
    fn default() -> Self {
        let ppo = PpoConfig::with_preset(Preset::TrlLegacy, "", "", "", "");
        Self {
            exp_name: None,
            task_name: None,
            tracker_project_name: "trl".into(),
            seed: ppo.run.seed,
            log_with: ppo.run.report_to,
            output_dir: None,
            model_name: "gpt2".into(),
            query_dataset: "stanfordnlp/imdb".into(),
            reward_model: "sentiment-analysis:lvwerra/distilbert-imdb".into(),
            steps: ppo.total_episodes.unwrap_or(0),
            learning_rate: ppo.learning_rate,
            adap_kl_ctrl: ppo.kl.adap_kl_ctrl,
            init_kl_coef: ppo.kl.kl_coef,
            kl_penalty: ppo.kl.kl_estimator,
            target: ppo.kl.target,
            horizon: ppo.kl.horizon,
            gamma: ppo.gamma,
            lam: ppo.lam,
            cliprange: ppo.cliprange,
            cliprange_value: ppo.cliprange_value,
            vf_coef: ppo.vf_coef,
            batch_size: LEGACY_BATCH,
            mini_batch_size: LEGACY_BATCH,
            gradient_accumulation_steps: ppo.gradient_accumulation_steps,
            ppo_epochs: ppo.num_ppo_epochs,
            max_grad_norm: ppo.optimizer.max_grad_norm,
            early_stopping: ppo.legacy.early_stopping,
            target_kl: TARGET_KL,
            compare_steps: 1,
            keep_best: false,
            ratio_threshold: ppo.loss.ratio_threshold.unwrap_or(f64::INFINITY),
            use_score_scaling: ppo.score_scaling.use_score_scaling,
            use_score_norm: ppo.score_scaling.use_score_norm,
            score_clip: ppo.score_scaling.score_clip,
            whiten_rewards: ppo.whiten_rewards,
            gradient_checkpointing: ppo.run.gradient_checkpointing,
            num_shared_layers: ppo.legacy.num_shared_layers,
            optimizer: ppo.optimizer,
        }
    }
}

/// A setting that is one of a few names, as its flag reads it.
fn choice<'de, D: Deserializer<'de>, T: ValueEnum>(deserializer: D) -> Result<T, D::Error> {
    let name = String::deserialize(deserializer)?;
    T::from_str(&name, false).map_err(|_| {
        let known = T::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let known: Vec<String> = known.map(|value| value.get_name().to_string()).collect();
        serde::de::Error::custom(format!("expected one of {}, found `{name}`", known.join(", ")))
    })
}

impl StepConfig {
    /// Reads a YAML file of these settings; what it leaves out has its default.
    ///
    /// # Errors
    /// If a key or a value is not one of these settings; of a setting of TRL's that has no place here the error tells why.
    pub fn read(path: &Path) -> Result<Self> {
        let text = files::read_settings(path)?;
        let config: Self = serde_saphyr::from_str(&text).map_err(|error| {
            let line = error.location().map_or(1, |location| location.line());
            let message = error.to_string();
            let reason = message.split('`').nth(1).and_then(|key| Some((key, settings::refused(key)?)));
            let message = match reason.filter(|_| message.contains("unknown field")) {
                Some((key, reason)) => {
                    format!("`{key}` is a setting of another system that has no place here: {reason}")
                }
                None => message.lines().next().unwrap_or_default().to_string(),
            };
            Error::Usage(format!("{}:{line}: {message}", path.display()))
        })?;
        config.check()?;
        Ok(config)
    }

    /// Checks every setting.
    ///
    /// # Errors
    /// [`Error::Usage`], naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        if self.keep_best && self.output_dir.is_none() {
            return Err(Error::Usage("keep_best = true: expected an output_dir to keep the model in".into()));
        }
        if self.compare_steps == 0 {
            return Err(Error::Usage("compare_steps = 0: expected a number of at least 1".into()));
        }
        if self.target_kl.is_nan() || self.target_kl <= 0.0 {
            return Err(Error::Usage(format!("target_kl = {}: expected a number above 0", self.target_kl)));
        }
        self.ppo().check()
    }

    /// The same settings as `rlhf ppo --preset trl-legacy` has them.
    pub fn ppo(&self) -> PpoConfig {
        let out = self.output_dir.clone().unwrap_or_default();
        let mut ppo = PpoConfig::with_preset(Preset::TrlLegacy, &self.model_name, "", &self.query_dataset, out);
        ppo.reward_model_path = None;
        (ppo.run.seed, ppo.run.report_to) = (self.seed, self.log_with);
        ppo.run.gradient_checkpointing = self.gradient_checkpointing;
        ppo.total_episodes = Some(self.steps);
        ppo.learning_rate = self.learning_rate;
        ppo.optimizer = OptimizerConfig { max_grad_norm: self.max_grad_norm, ..self.optimizer.clone() };
        // A weight of 0 stays 0 however it is adapted.
        ppo.kl.adap_kl_ctrl = self.adap_kl_ctrl && self.init_kl_coef != 0.0;
        (ppo.kl.kl_coef, ppo.kl.kl_estimator) = (self.init_kl_coef, self.kl_penalty);
        if ppo.kl.adap_kl_ctrl {
            (ppo.kl.target, ppo.kl.horizon) = (self.target, self.horizon);
        }
        (ppo.gamma, ppo.lam, ppo.vf_coef) = (self.gamma, self.lam, self.vf_coef);
        (ppo.cliprange, ppo.cliprange_value) = (self.cliprange, self.cliprange_value);
        (ppo.legacy.batch_size, ppo.legacy.mini_batch_size) = (Some(self.batch_size), Some(self.mini_batch_size));
        ppo.gradient_accumulation_steps = self.gradient_accumulation_steps;
        (ppo.local_rollout_forward_batch_size, ppo.num_ppo_epochs) = (self.mini_batch_size, self.ppo_epochs);
        ppo.loss.ratio_threshold = Some(self.ratio_threshold);
        ppo.legacy.early_stopping = self.early_stopping;
        ppo.loss.target_kl = self.early_stopping.then_some(self.target_kl);
        (ppo.score_scaling.use_score_scaling, ppo.score_scaling.use_score_norm) =
            (self.use_score_scaling, self.use_score_norm);
        ppo.score_scaling.score_clip = self.score_clip;
        ppo.legacy.num_shared_layers = self.num_shared_layers;
        ppo.whiten_rewards = self.whiten_rewards;
        ppo
    }

    /// How the rows of a step are divided.
    fn epoch(&self) -> EpochPlan {
        EpochPlan {
            mini_batch_size: self.mini_batch_size * self.gradient_accumulation_steps,
            part_size: self.mini_batch_size,
            micro_batch_size: self.mini_batch_size,
        }
    }
}

/// Draws lengths from `min` to below `max`, each equally likely.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LengthSampler {
    min: usize,
    max: usize,
}

impl LengthSampler {
    /// A sampler of lengths from `min` to below `max`.
    ///
    /// # Errors
    /// If there is none, or a length could be 0.
    pub fn new(min: usize, max: usize) -> Result<Self> {
        if min == 0 || min >= max {
            let message = format!("lengths from {min} to below {max}: expected some, of at least one token");
            return Err(Error::Usage(message));
        }
        Ok(Self { min, max })
    }

    /// The next length.
    pub fn sample(&self, stream: &mut Stream) -> usize {
        self.min + (stream.uniform() * (self.max - self.min) as f64) as usize
    }
}

/// What [`StepTrainer::generate`] does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Generate {
    /// How the next token is chosen. The losses know nothing of it: what is not the plain distribution at temperature 1 makes
    /// a KL that may be negative.
    pub sampling: Sampling,
    /// Tokens of a response, at most, where there is no `length_sampler`.
    pub max_new_tokens: usize,
    /// Tokens of a response, at least.
    pub min_new_tokens: usize,
    /// Draws the most tokens of a response, anew for each `batch_size` queries.
    pub length_sampler: Option<LengthSampler>,
    /// Queries answered at a time.
    pub batch_size: usize,
    /// Whether what is returned begins with the query.
    pub return_prompt: bool,
    /// Whether the reference answers too.
    pub generate_ref_response: bool,
}

impl Generate {
    /// Answers of at most `max_new_tokens` without their queries, drawn from the policy's own distribution, four at a time.
    pub fn new(max_new_tokens: usize) -> Self {
        Self {
            sampling: Sampling::at_temperature(1.0),
            max_new_tokens,
            min_new_tokens: 0,
            length_sampler: None,
            batch_size: 4,
            return_prompt: false,
            generate_ref_response: false,
        }
    }
}

/// What [`StepTrainer::generate`] gives, a row per query.
#[derive(Debug, Clone, PartialEq)]
pub struct Generated {
    /// The policy's responses, with eos where they ended by it.
    pub responses: Vec<Vec<i64>>,
    /// The reference's, where they are asked for.
    pub ref_responses: Option<Vec<Vec<i64>>>,
}

/// One statistic.
#[derive(Debug, Clone, PartialEq)]
pub enum Stat {
    /// A number.
    Number(f64),
    /// A number per row, or per token of all mini-batches.
    List(Vec<f32>),
    /// A list per row, as long as the row's response.
    Rows(Vec<Vec<f32>>),
}

/// The statistics of one call of [`StepTrainer::step`], by TRL's names; `docs/algorithm.md` defines them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stats(Vec<(Cow<'static, str>, Stat)>);

impl Stats {
    fn push(&mut self, name: impl Into<Cow<'static, str>>, number: f64) {
        self.0.push((name.into(), Stat::Number(number)));
    }

    /// The statistic `name`, if there is one.
    pub fn stat(&self, name: &str) -> Option<&Stat> {
        self.0.iter().find(|(found, _)| found == name).map(|(_, stat)| stat)
    }

    /// The number `name`, if there is one.
    pub fn get(&self, name: &str) -> Option<f64> {
        match self.stat(name) {
            Some(Stat::Number(number)) => Some(*number),
            _ => None,
        }
    }

    /// All statistics, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Stat)> {
        self.0.iter().map(|(name, stat)| (name.as_ref(), stat))
    }

    /// What should be looked at before going on: a KL far below 0.
    pub fn warning(&self) -> Option<String> {
        let kl = self.get("objective/kl").filter(|kl| *kl < LEAST_KL)?;
        Some(format!(
            "objective/kl = {kl}: expected a number above {LEAST_KL}; responses that are drawn otherwise than from the policy's own \
             distribution (temperature, top_k, top_p, min_new_tokens) are a usual reason, and training may fail by it"
        ))
    }

    /// Those that are numbers.
    pub fn numbers(&self) -> Metrics {
        let mut metrics = Metrics::default();
        for (name, stat) in &self.0 {
            if let Stat::Number(number) = stat {
                metrics.push(name.clone(), *number);
            }
        }
        metrics
    }
}

/// The mean KL of an answer, in nats, below which there is a warning.
const LEAST_KL: f64 = -1.0;

/// The texts of a batch, for the table of [`StepTrainer::log_stats`].
#[derive(Debug, Clone, Copy)]
pub struct Texts<'a> {
    /// A query per row.
    pub query: &'a [String],
    /// A response per row.
    pub response: &'a [String],
}

/// Gives the rows of a dataset in batches, in another order each time.
pub struct DataLoader {
    prompts: Vec<Prompt>,
    batch_size: usize,
    order: Box<Order>,
    pass: u64,
}

/// Orders the second argument's many rows, in a pass whose number is the first.
type Order = dyn FnMut(u64, usize) -> Vec<usize>;

impl fmt::Debug for DataLoader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataLoader").field("rows", &self.prompts.len()).field("batch_size", &self.batch_size).finish()
    }
}

impl DataLoader {
    /// Has `order` say in which order a pass, counted from 0, takes so many rows.
    #[must_use]
    pub fn with_order(mut self, order: impl FnMut(u64, usize) -> Vec<usize> + 'static) -> Self {
        self.order = Box::new(order);
        self
    }

    /// The batches of the next pass over all rows; the last may be smaller. A collator is what they are mapped by: each prompt has
    /// its text, its tokens and the whole row.
    pub fn epoch(&mut self) -> impl Iterator<Item = Vec<Prompt>> + use<> {
        let order = (self.order)(self.pass, self.prompts.len());
        self.pass += 1;
        let rows = |batch: &[usize]| batch.iter().map(|&row| self.prompts[row].clone()).collect();
        order.chunks(self.batch_size).map(rows).collect::<Vec<Vec<Prompt>>>().into_iter()
    }
}

/// Trains a policy, a call of [`StepTrainer::step`] at a time, on whatever scores the caller gives.
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
    /// The policy with its value head, and their optimizer.
    pub learner: Learner,
    /// What the policy should not drift away from.
    pub reference: CausalLm,
    /// The tokenizer of both.
    pub tokenizer: Tokenizer,
    config: StepConfig,
    /// How the models evaluate responses.
    rollout: RolloutSettings,
    /// How rewards and targets are made of them.
    shaping: Shaping,
    kl: KlController,
    scaling: ScoreScaling,
    schedule: Box<dyn FnMut(usize) -> f64>,
    /// Orders the rows of a step, for one pass.
    order: Box<Order>,
    best: Option<Best>,
    /// What keeps others out of its folder.
    _hold: Option<Hold>,
    reporter: Option<Reporter<'static>>,
    /// Calls of `step` so far.
    steps: usize,
    /// Passes over the rows of steps so far.
    passes: u64,
    /// Calls of `generate` so far.
    generations: u64,
    /// Stats logged so far.
    logged: usize,
}

impl fmt::Debug for StepTrainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, learner, steps, .. } = self;
        f.debug_struct("StepTrainer").field("config", config).field("learner", learner).field("steps", steps).finish()
    }
}

impl StepTrainer {
    /// A trainer of `model`. Without a `reference` the KL is to the model as it is now, of which `num_shared_layers` lower
    /// layers are held once, or, where the model has an adapter, to its base.
    ///
    /// # Errors
    /// If a setting is out of its range, or `output_dir` holds a run.
    pub fn new(
        config: StepConfig,
        model: CausalLmWithValueHead,
        reference: Option<CausalLm>,
        tokenizer: Tokenizer,
    ) -> Result<Self> {
        config.check()?;
        let ppo = config.ppo();
        let (mut policy, head) = model.into_parts();
        let reference = match (reference, config.num_shared_layers) {
            (Some(_), Some(layers)) => {
                return Err(Error::Usage(format!(
                    "num_shared_layers = {layers} has no effect with a reference of one's own, which shares no layer"
                )));
            }
            (Some(reference), None) => reference,
            (None, Some(layers)) => policy.share_lower_layers(layers)?,
            (None, None) if policy.has_adapter() => policy.base()?,
            (None, None) => policy.frozen_copy()?,
        };
        let (own, others) = (policy.config().vocab_size, reference.config().vocab_size);
        if own != others {
            let message = format!("the reference's vocabulary: expected the policy's {own} tokens, found {others}");
            return Err(Error::Usage(message));
        }
        let hold = config.output_dir.as_ref().map(|dir| claim_folder(dir, false, &ppo)).transpose()?;
        let reporter = config.output_dir.as_ref().map(|dir| {
            let mut run = ppo.run.clone();
            run.output_dir = dir.join(&config.tracker_project_name);
            std::fs::create_dir_all(&run.output_dir).map_err(Error::io("create the folder", &run.output_dir))?;
            let mut reporter = Reporter::resume(&run, 0, Reached::default(), Console::Silent)?;
            reporter.settings(&ppo)?;
            Ok::<_, Error>(reporter)
        });
        let best = config.keep_best.then(|| {
            let metric_for_best_model = Some(MEAN_SCORE.to_string());
            Best::new(&EvalConfig { metric_for_best_model, greater_is_better: Some(true), ..ppo.eval.clone() })
        });
        let (seed, learning_rate) = (config.seed, config.learning_rate);
        Ok(Self {
            rollout: ppo.rollout(&policy),
            shaping: ppo.shaping(),
            learner: Learner { collect_ratios: true, ..Learner::new(policy, head, ppo.learner()) },
            reference,
            tokenizer,
            kl: KlController::new(&ppo.kl, 0),
            scaling: ScoreScaling::new(&ppo.score_scaling),
            schedule: Box::new(move |_| learning_rate),
            order: Box::new(move |pass, rows| Stream::new(seed, Purpose::MiniBatches, pass, 0).permutation(rows)),
            best: best.flatten(),
            reporter: reporter.transpose()?,
            _hold: hold,
            config,
            steps: 0,
            passes: 0,
            generations: 0,
            logged: 0,
        })
    }

    /// A trainer of the model `model_name`, a folder or a name of the hub, with the value head that is there or else a fresh one.
    ///
    /// # Errors
    /// As [`StepTrainer::new`] and [`hub::model_dir`]; if what is found is no model with a tokenizer.
    pub fn from_pretrained(config: StepConfig, options: ModelOptions) -> Result<Self> {
        let dir = hub::model_dir(&config.model_name, None)?;
        let tokenizer = Tokenizer::from_pretrained(&dir)?;
        let lm = CausalLm::from_pretrained(&dir, options)?;
        tokenizer.check_fits(lm.config(), &dir)?;
        let model = CausalLmWithValueHead::found_in(&dir, lm, config.seed)?;
        Self::new(config, model, None, tokenizer)
    }

    /// The settings; to train by others, make another trainer of its models.
    pub fn config(&self) -> &StepConfig {
        &self.config
    }

    /// Has `schedule` give the learning rate of each step, counted from 0.
    #[must_use]
    pub fn with_schedule(mut self, schedule: impl FnMut(usize) -> f64 + 'static) -> Self {
        self.schedule = Box::new(schedule);
        self
    }

    /// Has `order` say in which order a pass, counted from 0 over all steps, takes the so many rows of its step.
    #[must_use]
    pub fn with_order(mut self, order: impl FnMut(u64, usize) -> Vec<usize> + 'static) -> Self {
        self.order = Box::new(order);
        self
    }

    /// The rows of `dataset`, whose prompts are in `query` or in another of the fields that [`Dataset::prompts`] knows, in
    /// batches of `batch_size`.
    ///
    /// # Errors
    /// As [`Dataset::prompts`].
    pub fn prepare_dataloader(&self, dataset: &Dataset) -> Result<DataLoader> {
        let policy = self.learner.policy.config();
        let prompts = dataset.prompts(&self.tokenizer, policy.vocab_size, policy.max_position_embeddings - 1)?;
        let seed = self.config.seed;
        let order = move |pass, rows| Stream::new(seed, Purpose::DataOrder, pass, 0).permutation(rows);
        Ok(DataLoader { prompts, batch_size: self.config.batch_size, order: Box::new(order), pass: 0 })
    }

    /// Answers `queries`; a response ends after its first eos.
    ///
    /// # Errors
    /// As [`generate`].
    pub fn generate(&mut self, queries: &[Vec<i64>], how: &Generate) -> Result<Generated> {
        let call = self.generations;
        self.generations += 1;
        let answer = |model: &CausalLm| {
            let mut lengths = Stream::new(self.config.seed, Purpose::Lengths, call, 0);
            let mut answers = Vec::with_capacity(queries.len());
            for (part, queries) in queries.chunks(how.batch_size.max(1)).enumerate() {
                let sampled = how.length_sampler.map(|sampler| sampler.sample(&mut lengths));
                let generation = GenerationConfig {
                    min_new_tokens: how.min_new_tokens,
                    stop_token_ids: self.tokenizer.eos_ids().to_vec(),
                    seed: self.config.seed,
                    step: call,
                    first_row: (part * how.batch_size) as u64,
                    batch_size: how.batch_size,
                    ..GenerationConfig::new(how.sampling, sampled.unwrap_or(how.max_new_tokens))
                };
                for (query, response) in queries.iter().zip(generate(model, queries, &generation)?) {
                    answers.push(match how.return_prompt {
                        true => [query.as_slice(), &response.tokens].concat(),
                        false => response.tokens,
                    });
                }
            }
            Ok::<_, Error>(answers)
        };
        let responses = answer(&self.learner.policy)?;
        let ref_responses = how.generate_ref_response.then(|| answer(&self.reference)).transpose()?;
        Ok(Generated { responses, ref_responses })
    }

    /// One PPO step on `queries`, `responses` and `scores`, a row each, of any number; gives its statistics.
    ///
    /// `response_masks`, an entry per token of each response, leaves out tokens that are not the policy's. A KL below -1 is told
    /// on standard error.
    ///
    /// # Errors
    /// If the rows do not go together or do not fit the model, or a score is not finite: then nothing has changed. If a loss or
    /// a gradient is not finite: then that optimizer step was not taken, and the call counts with those that were.
    pub fn step(
        &mut self,
        queries: &[Vec<i64>],
        responses: &[Vec<i64>],
        scores: &[f64],
        response_masks: Option<&[Vec<bool>]>,
    ) -> Result<Stats> {
        let began = Instant::now();
        if let Some(row) = scores.iter().position(|score| !score.is_finite()) {
            return Err(Error::Run(format!("row {row}: expected a finite score, found {}", scores[row])));
        }
        // A call that is refused, and perhaps made again, must not count its scores.
        let mut scaling = self.scaling.clone();
        let raw = scores;
        let scores = scaling.scale(raw, true);

        let experience = self.batched_forward_pass(queries, responses, &scores, response_masks)?;
        self.scaling = scaling;
        let forward = began.elapsed().as_secs_f64();
        let (kl, rewards) = self.compute_rewards(&experience);
        let rewarded = began.elapsed().as_secs_f64();
        let (advantages, returns) = self.compute_advantages(&experience, &rewards);
        let targets = Targets { kl, kl_coef: self.kl.coef(0), rewards, advantages, returns };
        let shaped = began.elapsed().as_secs_f64();
        self.keep_best(raw)?;

        let rows = queries.len();
        let orders: Vec<Vec<usize>> =
            (0..self.config.ppo_epochs as u64).map(|epoch| (self.order)(self.passes + epoch, rows)).collect();
        self.passes += orders.len() as u64;
        let rates = self.rates();
        let plan = self.config.epoch();
        let parts = self.learner.optimise(&experience, &targets, &orders, rates, &plan)?;
        let learnt = began.elapsed().as_secs_f64();

        let mut stats = self.record_step_stats(&experience, &targets, &orders, &parts, &plan);
        stats.push("ppo/learning_rate", rates.value);
        for (name, from, to) in [
            ("forward_pass", 0.0, forward),
            ("compute_rewards", forward, rewarded),
            ("compute_advantages", rewarded, shaped),
            ("optimize_step", shaped, learnt),
            ("calc_stats", learnt, began.elapsed().as_secs_f64()),
            ("total", 0.0, began.elapsed().as_secs_f64()),
        ] {
            stats.push(format!("time/ppo/{name}"), to - from);
        }
        self.kl.observe(stats.get("objective/kl").unwrap_or(f64::NAN), rows);
        self.steps += 1;
        if let Some(warning) = stats.warning() {
            let _ = writeln!(std::io::stderr(), "warning: {warning}");
        }
        let steps = optimizer_steps(&parts);
        let all = steps.clone().count();
        let problems: Vec<String> = steps.filter_map(|parts| parts.iter().find_map(StepStats::not_finite)).collect();
        match problems.first() {
            Some(problem) => {
                let (step, bad) = (self.steps, problems.len());
                Err(Error::Run(format!("step {step}: {bad} of {all} optimizer steps not taken: {problem}")))
            }
            None => Ok(self.gather_stats(stats)),
        }
    }

    /// What policy, value head and reference say of the responses, in slots `[rows, longest response]`.
    ///
    /// # Errors
    /// If the rows do not go together or do not fit the models.
    pub fn batched_forward_pass(
        &self,
        queries: &[Vec<i64>],
        responses: &[Vec<i64>],
        scores: &[f64],
        response_masks: Option<&[Vec<bool>]>,
    ) -> Result<Experience> {
        if let Some(row) = responses.iter().position(Vec::is_empty) {
            return Err(Error::Run(format!("row {row}: expected a response of at least one token, found none")));
        }
        if queries.is_empty() {
            return Err(Error::Run("expected at least one row, found none".into()));
        }
        let longest = responses.iter().map(Vec::len).max().unwrap_or(0);
        let response = |tokens: &Vec<i64>| Response {
            tokens: tokens.clone(),
            logprobs: Vec::new(),
            finish: FinishReason::Length,
            sets: None,
        };
        let responses: Vec<Response> = responses.iter().map(response).collect();
        let scores: Vec<f32> = scores.iter().map(|&score| score as f32).collect();
        let scores = Tensor::from_slice(&scores).to_device(self.learner.policy.device());
        let models =
            RolloutModels { policy: &self.learner.policy, reference: &self.reference, value: &self.learner.value };
        let settings = RolloutSettings { response_length: longest, recompute_logprobs: true, ..self.rollout.clone() };
        let mut experience = experience(models, queries, &responses, scores, &settings)?;
        if let Some(kept) = response_masks {
            experience.leave_out(kept)?;
        }
        Ok(experience)
    }

    /// The KL of each token and its reward: minus the KL's weight times that, and the score on the last one; `[rows, longest
    /// response]` each.
    pub fn compute_rewards(&self, experience: &Experience) -> (Tensor, Tensor) {
        shape_rewards(&self.learner.world, experience, self.kl.coef(0), &self.shaping)
    }

    /// Advantages, whitened over all tokens, and returns; `[rows, longest response]` each.
    pub fn compute_advantages(&self, experience: &Experience, rewards: &Tensor) -> (Tensor, Tensor) {
        advantages(&self.learner.world, experience, rewards, &self.shaping)
    }

    /// The losses of given log-probabilities and values, as means over `mask`, the value loss times `vf_coef`: scalars with
    /// gradients, and statistics by TRL's names. All tensors are `[rows, slots]`, as is `entropy`.
    #[expect(clippy::too_many_arguments, reason = "those of the function that it takes the place of")]
    pub fn loss(
        &self,
        old_logprobs: &Tensor,
        values: &Tensor,
        entropy: &Tensor,
        vpreds: &Tensor,
        logprobs: &Tensor,
        mask: &Tensor,
        advantages: &Tensor,
        returns: &Tensor,
    ) -> (Tensor, Tensor, Stats) {
        let number = |x: &Tensor| x.double_value(&[]);
        let policy = math::policy_loss(logprobs, old_logprobs, advantages, mask, self.clip());
        let value = math::value_loss(vpreds, values, returns, mask, self.config.cliprange_value);
        let count = number(&mask.sum(Kind::Double));
        let predicted = vpreds.detach();
        let part = StepStats {
            tokens: count,
            value_slots: count,
            policy_loss: number(&policy.sum),
            value_loss: number(&value.sum),
            policy_clipped: number(&policy.clipped),
            value_clipped: number(&value.clipped),
            approx_kl: number(&policy.approx_kl),
            policy_kl: number(&policy.policy_kl),
            entropy: number(&math::masked_sum(entropy, mask)),
            ratios: Vec::try_from(policy.ratio.masked_select(mask)).expect("a vector of f32"),
            value: number(&math::masked_sum(&predicted, mask)),
            value_error: number(&math::masked_sum(&(&predicted - returns).square(), mask)),
            ..StepStats::default()
        };
        let counted = |x: &Tensor| Vec::<f32>::try_from(x.masked_select(mask)).expect("a vector of f32");
        let loss = PartLoss::new(&part, &counted(advantages), &counted(returns), &counted(values), self.config.vf_coef);
        let mut stats = Stats::default();
        PartLoss::NAMES.iter().zip(loss.0).for_each(|(name, number)| stats.push(*name, number));
        stats.0.push(("policy/advantages".into(), Stat::List(counted(advantages))));
        stats.0.push(("policy/ratio".into(), Stat::List(part.ratios)));
        (policy.sum / count, value.sum * (self.config.vf_coef / count), stats)
    }

    /// One optimizer step on these rows of an experience; gives what it did.
    ///
    /// # Errors
    /// If there are no rows, or one that is not there; as [`Learner::optimise`].
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
        let rates = self.rates();
        self.learner.optimise(experience, targets, &[rows.to_vec()], rates, &plan)
    }

    /// All statistics of a step but times and the learning rate. `orders` are the passes' orders, `parts` what
    /// [`Learner::optimise`] gave.
    pub fn record_step_stats(
        &self,
        experience: &Experience,
        targets: &Targets,
        orders: &[Vec<usize>],
        parts: &[StepStats],
        plan: &EpochPlan,
    ) -> Stats {
        let e = experience;
        let lengths = e.lengths();
        let of_rows = |x: &Tensor| {
            let numbers: Vec<Vec<f32>> = Vec::try_from(x).expect("rows of f32");
            let cut = |(row, &length): (Vec<f32>, &i64)| row[..length as usize].to_vec();
            numbers.into_iter().zip(&lengths).map(cut).collect::<Vec<_>>()
        };
        let mask = of_rows(&e.masks.response.to_kind(Kind::Float));
        let counted = |x: &Tensor| -> Vec<Vec<f32>> {
            let kept = |(row, mask): (Vec<f32>, &Vec<f32>)| {
                row.into_iter().zip(mask).filter_map(|(x, &kept)| (kept > 0.0).then_some(x)).collect()
            };
            of_rows(x).into_iter().zip(&mask).map(kept).collect()
        };
        let kl_dist: Vec<f32> = counted(&targets.kl).iter().map(|row| row.iter().sum()).collect();
        let non_score =
            counted(&targets.kl).concat().iter().map(|kl| -targets.kl_coef * f64::from(*kl)).collect::<Vec<_>>();
        let entropies: Vec<f32> = counted(&e.logprobs).iter().map(|row| -row.iter().sum::<f32>()).collect();
        let scores: Vec<f32> = Vec::try_from(&e.scores).expect("a vector of f32");
        let [queries, responses] =
            [&e.prompts, &e.responses].map(|rows| rows.iter().map(|row| row.len() as f32).collect::<Vec<_>>());

        let mut stats = Stats::default();
        stats.push("objective/kl", mean(&kl_dist));
        stats.0.push(("objective/kl_dist".into(), Stat::List(kl_dist)));
        stats.0.push(("objective/logprobs".into(), Stat::Rows(of_rows(&e.logprobs))));
        stats.0.push(("objective/ref_logprobs".into(), Stat::Rows(of_rows(&e.ref_logprobs))));
        stats.push("objective/kl_coef", targets.kl_coef);
        stats.push("objective/entropy", mean(&entropies));
        stats.push("ppo/mean_non_score_reward", non_score.iter().sum::<f64>() / non_score.len() as f64);
        stats.push(MEAN_SCORE, mean(&scores));
        stats.push("ppo/std_scores", variance(&scores).sqrt());
        for (name, lens) in [("queries", queries), ("responses", responses)] {
            stats.push(format!("tokens/{name}_len_mean"), mean(&lens));
            stats.push(format!("tokens/{name}_len_std"), variance(&lens).sqrt());
            stats.0.push((format!("tokens/{name}_dist").into(), Stat::List(lens)));
        }

        // Of each average of losses, and then the mean of these.
        let [advantages, returns, values] =
            [&targets.advantages, &targets.returns, &math::keep(&e.values, &e.masks.value)].map(counted);
        let rows = orders
            .iter()
            .flat_map(|order| order.chunks(plan.mini_batch_size))
            .flat_map(|mini| mini.chunks(plan.part_size));
        let (mut losses, mut all_advantages, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for (part, rows) in parts.iter().zip(rows) {
            let of =
                |numbers: &[Vec<f32>]| rows.iter().flat_map(|&row| numbers[row].iter().copied()).collect::<Vec<f32>>();
            losses.push(PartLoss::new(part, &of(&advantages), &of(&returns), &of(&values), self.config.vf_coef));
            all_advantages.extend(of(&advantages));
            ratios.extend_from_slice(&part.ratios);
        }
        for (at, name) in PartLoss::NAMES.iter().enumerate() {
            let sum: f64 = losses.iter().map(|loss| loss.0[at]).sum();
            stats.push(format!("ppo/{name}"), sum / losses.len() as f64);
        }
        stats.0.push(("ppo/policy/advantages".into(), Stat::List(all_advantages)));
        stats.0.push(("ppo/policy/ratio".into(), Stat::List(ratios)));
        let number = |name: &str| stats.get(name).unwrap_or(f64::NAN);
        let explained = 1.0 - number("ppo/val/error") / number("ppo/returns/var");
        stats.push("ppo/val/var_explained", explained);
        let skipped = optimizer_steps(parts).filter(|parts| parts.iter().any(|part| part.skipped)).count();
        stats.push("ppo/skipped_steps", skipped as f64);
        stats
    }

    /// The means of the statistics over all processes; of one process they are what they are.
    pub fn gather_stats(&self, stats: Stats) -> Stats {
        stats
    }

    /// Writes the numbers of `stats`, and what the caller's rewards were, to `metrics.jsonl` and where `log_with` says, and the
    /// rows of `texts` with their rewards to `samples/`. Without an `output_dir` nothing is written. Gives all of it, lists too, for a
    /// log of the caller's own.
    ///
    /// # Errors
    /// If a file cannot be written, or the rows do not go together.
    pub fn log_stats(&mut self, stats: &Stats, texts: Texts<'_>, rewards: &[f64]) -> Result<Stats> {
        let rows = [texts.query.len(), texts.response.len(), rewards.len()];
        if rows.iter().any(|&count| count != rows[0]) || rows[0] == 0 {
            let [query, response, rewards] = rows;
            return Err(Error::Run(format!(
                "log_stats: expected as many queries, responses and rewards, found {query}, {response} and {rewards}"
            )));
        }
        self.logged += 1;
        let of_f32: Vec<f32> = rewards.iter().map(|&reward| reward as f32).collect();
        let mut all = stats.clone();
        all.push("env/reward_mean", mean(&of_f32));
        all.push("env/reward_std", variance(&of_f32).sqrt());
        all.0.push(("env/reward_dist".into(), Stat::List(of_f32)));
        let Some(reporter) = &mut self.reporter else { return Ok(all) };
        let mut metrics = Metrics::default();
        metrics.push("step", self.logged as f64);
        metrics.extend(&all.numbers());
        reporter.record(self.logged as i64, &metrics)?;
        let sample = |((query, response), &score): ((&String, &String), &f64)| Sample {
            prompt: query.clone(),
            response: response.clone(),
            score,
            components: std::collections::BTreeMap::new(),
            finish_reason: None,
            num_tokens: None,
            conversation: None,
        };
        let samples: Vec<Sample> = texts.query.iter().zip(texts.response).zip(rewards).map(sample).collect();
        reporter.samples(self.logged, self.logged * rows[0], &samples)?;
        Ok(all)
    }

    /// Writes the policy with its value head, the tokenizer and a model card to `dir`: transformers and TRL 0.11 open it.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save_pretrained(&self, dir: &Path) -> Result<()> {
        replace_files(dir, |dir| self.write_model(dir))?;
        self.create_model_card(dir)
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
            ("steps", self.steps.to_string()),
            ("weight of the KL", format!("{:.6}", self.kl.coef(0))),
        ];
        facts.extend(c.exp_name.clone().map(|name| ("experiment", name)));
        facts.extend(c.task_name.clone().map(|name| ("task", name)));
        let (base_model, is_adapter) = (Some(c.model_name.as_path()), self.learner.policy.has_adapter());
        Card { command: "ppo", base_model, is_adapter, facts: &facts }.write(dir)
    }

    /// What the KL weighs in the next step.
    pub fn kl_coef(&self) -> f64 {
        self.kl.coef(0)
    }

    /// Running mean and deviation of the scores, where they are scaled.
    pub fn score_moments(&self) -> (f64, f64) {
        self.scaling.moments()
    }

    fn rates(&mut self) -> LearningRates {
        let rate = (self.schedule)(self.steps);
        LearningRates { policy: Some(rate), value: rate }
    }

    fn clip(&self) -> PolicyClip {
        self.learner.settings().loss.clip
    }

    /// Keeps the model that made these answers, if it is due and their mean raw score is the best so far: scaled ones would be
    /// compared by a running deviation that moves.
    fn keep_best(&mut self, scores: &[f64]) -> Result<()> {
        let Some((mut best, dir)) = self.best.take().zip(self.config.output_dir.as_ref()) else { return Ok(()) };
        let mut metrics = Metrics::default();
        metrics.push(MEAN_SCORE, scores.iter().sum::<f64>() / scores.len() as f64);
        let due = self.steps.is_multiple_of(self.config.compare_steps);
        let looked = best.look(&metrics, self.steps, due, false);
        let kept = looked.and_then(|_| best.write(dir, self.steps, |dir| self.write_model(dir)));
        self.best = Some(best);
        kept.map(drop)
    }
}

/// The metric by which the best model is chosen.
const MEAN_SCORE: &str = "ppo/mean_scores";

/// The statistics of the losses of one mini-batch.
struct PartLoss([f64; 15]);

impl PartLoss {
    const NAMES: [&str; 15] = [
        "loss/policy",
        "loss/value",
        "loss/total",
        "policy/entropy",
        "policy/approxkl",
        "policy/policykl",
        "policy/clipfrac",
        "policy/advantages_mean",
        "returns/mean",
        "returns/var",
        "val/vpred",
        "val/error",
        "val/clipfrac",
        "val/mean",
        "val/var",
    ];

    /// Of the sums of `part`, and of the advantages, returns and old values of its tokens.
    fn new(part: &StepStats, advantages: &[f32], returns: &[f32], values: &[f32], vf_coef: f64) -> Self {
        let of_tokens = |sum: f64| sum / part.tokens;
        let of_values = |sum: f64| sum / part.value_slots;
        // What is skipped has losses of 0, as in TRL.
        let of_losses = if part.skipped { 0.0 } else { 1.0 };
        let (policy, value) = (of_losses * of_tokens(part.policy_loss), of_losses * of_values(part.value_loss));
        Self([
            policy,
            value,
            policy + vf_coef * value,
            of_tokens(part.entropy),
            of_tokens(part.approx_kl),
            of_tokens(part.policy_kl),
            of_tokens(part.policy_clipped),
            mean(advantages),
            mean(returns),
            variance(returns),
            of_values(part.value),
            of_values(part.value_error),
            of_values(part.value_clipped),
            mean(values),
            variance(values),
        ])
    }
}

fn mean(numbers: &[f32]) -> f64 {
    numbers.iter().map(|&x| f64::from(x)).sum::<f64>() / numbers.len() as f64
}

/// The unbiased variance; 0 of a single number.
fn variance(numbers: &[f32]) -> f64 {
    let mean = mean(numbers);
    let squares: f64 = numbers.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum();
    squares / (numbers.len() as f64 - 1.0).max(1.0)
}
