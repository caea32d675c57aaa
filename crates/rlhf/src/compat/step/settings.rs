//! Settings of TRL's `step()`.

use crate::rl::advantage::{AdvantageEstimator, ScaleRewards};
use crate::rl::learner::EpochPlan;
use crate::rl::math::{ImportanceLevel, KlEstimator};
use crate::rl::settings::LossType;
use crate::settings::{self, LEGACY_BATCH, OptimizerConfig, PpoConfig, PpoRun, Preset, ReportTo, TARGET_KL};
use rlhf_base::schema::Choices;
use rlhf_base::{Error, Result, files};
use rlhf_hub::push::Destination;
use rlhf_lm::optim::settings::SCHEDULE;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// The setting that makes best models be pushed, in errors.
const IF_BEST: &str = "push_to_hub_if_best_kwargs";

/// Settings of a [`StepTrainer`](super::StepTrainer), with TRL's names and defaults.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StepConfig {
    /// Name of the experiment, for the model card.
    pub exp_name: Option<String>,
    /// Name of the task, for the model card.
    pub task_name: Option<String>,
    /// Folder of the logs in `output_dir`, and the project in `log_with`.
    pub tracker_project_name: String,
    /// Further arguments of the client of `log_with`, as an object for each tracker.
    pub tracker_kwargs: Map<String, Value>,
    /// Seed of all random draws.
    pub seed: u64,
    /// Where [`StepTrainer::log_stats`](super::StepTrainer::log_stats) writes besides `metrics.jsonl`.
    pub log_with: ReportTo,
    /// Folder for logs and the best model; without one, only the caller's saves write files.
    pub output_dir: Option<PathBuf>,
    /// The policy, a folder or a name on the hub; [`StepTrainer::from_pretrained`](super::StepTrainer::from_pretrained) reads it.
    pub model_name: PathBuf,
    /// Dataset of rows with a `query`; the caller reads it.
    pub query_dataset: PathBuf,
    /// The caller's reward model; the caller reads it.
    pub reward_model: String,
    /// Responses of the whole run; used for logged progress only.
    pub steps: usize,
    /// Learning rate; [`StepTrainer::with_schedule`](super::StepTrainer::with_schedule) overrides it.
    pub learning_rate: f64,
    /// Adapt the weight of the KL after each step, so that the KL of a response approaches `target`.
    pub adap_kl_ctrl: bool,
    /// Weight of the KL in the first step.
    pub init_kl_coef: f64,
    /// Estimator of the KL: `kl` (k1), `abs`, `mse` or `full`.
    #[serde(deserialize_with = "choice")]
    pub kl_penalty: KlEstimator,
    /// Target KL of a response, in nats, for `adap_kl_ctrl`.
    pub target: f64,
    /// Horizon of `adap_kl_ctrl`, in responses; smaller adapts faster.
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
    /// Rows per batch of the data loader; [`StepTrainer::step`](super::StepTrainer::step) takes any number.
    pub batch_size: usize,
    /// Rows whose losses are averaged together.
    pub mini_batch_size: usize,
    /// Number of such averages per optimizer step.
    pub gradient_accumulation_steps: usize,
    /// Passes over the rows of a step.
    pub ppo_epochs: usize,
    /// Clip gradients to this norm, in every optimizer step.
    pub max_grad_norm: Option<f64>,
    /// End a step's epochs after one whose last mini-batch is 1.5 times `target_kl` away from the policy that sampled.
    pub early_stopping: bool,
    /// KL limit of `early_stopping`, in nats per token.
    pub target_kl: f64,
    /// With `keep_best`, calls of `step` between two comparisons of the mean score.
    pub compare_steps: usize,
    /// Keep the model with the best mean score in `output_dir/best`.
    pub keep_best: bool,
    /// Push each new best model to the hub, with the access token in HF_TOKEN: `repo_id`, and if need be `private` and `revision`. Keeps
    /// the best model in `output_dir/best` as `keep_best` does. Empty: no push.
    pub push_to_hub_if_best_kwargs: Map<String, Value>,
    /// Skip an optimizer step whose mean probability ratio is above this.
    pub ratio_threshold: f64,
    /// Divide scores by the running standard deviation.
    pub use_score_scaling: bool,
    /// Subtract the running mean before `use_score_scaling` divides.
    pub use_score_norm: bool,
    /// Clip scores to plus or minus this, after scaling.
    pub score_clip: Option<f64>,
    /// Scale the rewards of a step to variance 1.
    pub whiten_rewards: bool,
    /// Store only the input of each layer, and recompute the layer in the backward pass.
    pub gradient_checkpointing: bool,
    /// Estimator of the advantages: `gae`, or one without a critic, which compares the responses of a group. `remax` is not there.
    #[serde(deserialize_with = "choice")]
    pub advantage_estimator: AdvantageEstimator,
    /// Responses to each query, one after another in a step's rows: a group.
    pub num_generations: usize,
    /// Standard deviation that divides the advantages of `grpo`.
    #[serde(deserialize_with = "choice")]
    pub scale_rewards: ScaleRewards,
    /// Normalize the advantages of `rloo` over the rows of a step.
    pub normalize_advantages: bool,
    /// The policy's objective, and how the losses of tokens become that of a mini-batch.
    #[serde(deserialize_with = "choice")]
    pub loss_type: LossType,
    /// Unit of the probability ratio.
    #[serde(deserialize_with = "choice")]
    pub importance_sampling_level: ImportanceLevel,
    /// Number of lower layers that are frozen and shared with the reference model; only where the caller gives no reference.
    pub num_shared_layers: Option<usize>,
    /// Other settings of the optimizer: torch's Adam, no weight decay. Its schedule and its `max_grad_norm` have no effect, and are refused
    /// unless they have their defaults: see [`StepTrainer::with_schedule`](super::StepTrainer::with_schedule) and `max_grad_norm` above.
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
            tracker_kwargs: Map::new(),
            log_with: ReportTo::None,
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
            push_to_hub_if_best_kwargs: Map::new(),
            ratio_threshold: ppo.loss.ratio_threshold.unwrap_or(f64::INFINITY),
            use_score_scaling: ppo.score_scaling.use_score_scaling,
            use_score_norm: ppo.score_scaling.use_score_norm,
            score_clip: ppo.score_scaling.score_clip,
            whiten_rewards: ppo.whiten_rewards,
            gradient_checkpointing: ppo.run.gradient_checkpointing,
            advantage_estimator: ppo.advantage.advantage_estimator,
            num_generations: ppo.advantage.num_generations,
            scale_rewards: ppo.advantage.scale_rewards,
            normalize_advantages: ppo.advantage.normalize_advantages,
            loss_type: ppo.loss.loss_type,
            importance_sampling_level: ppo.loss.importance_sampling_level,
            num_shared_layers: ppo.legacy.num_shared_layers,
            optimizer: ppo.optimizer,
        }
    }
}

/// Deserializes a setting with a fixed set of names, with the parser of its flag.
fn choice<'de, D: Deserializer<'de>, T: Choices>(deserializer: D) -> Result<T, D::Error> {
    let name = String::deserialize(deserializer)?;
    T::named(&name).ok_or_else(|| {
        let known: Vec<&str> = T::ALL.iter().map(|(_, choice)| choice.name).collect();
        serde::de::Error::custom(format!("expected one of {}, found `{name}`", known.join(", ")))
    })
}

impl StepConfig {
    /// Reads a YAML file of these settings; missing keys have their defaults.
    ///
    /// # Errors
    /// If a key or a value is not valid; for a setting of TRL that is not supported the error gives the reason.
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
        self.checked().map(drop)
    }

    /// Checks every setting as [`StepConfig::check`] does, and returns the settings of each part.
    pub(super) fn checked(&self) -> Result<PpoRun> {
        let pushes = self.destination()?.is_some();
        if (self.keep_best || pushes) && self.output_dir.is_none() {
            let name = if self.keep_best { "keep_best = true" } else { IF_BEST };
            return Err(Error::refused(name, ": expected an output_dir to keep the model in"));
        }
        if self.compare_steps == 0 {
            return Err(Error::Usage("compare_steps = 0: expected a number of at least 1".into()));
        }
        if self.target_kl.is_nan() || self.target_kl <= 0.0 {
            return Err(Error::refused("target_kl", format!(" = {}: expected a number above 0", self.target_kl)));
        }
        if self.advantage_estimator == AdvantageEstimator::Remax {
            return Err(Error::refused(
                "advantage_estimator",
                " = remax: expected another estimator: step() has no greedy responses; rlhf ppo has",
            ));
        }
        if self.loss_type == LossType::DrGrpo {
            return Err(Error::refused(
                "loss_type",
                " = dr_grpo: expected another loss: it divides by the longest length of a response, which step() does not know",
            ));
        }
        self.check_optimizer()?;
        PpoRun::new(&self.ppo())
    }

    /// Refuses settings of the optimizer that other settings replace.
    fn check_optimizer(&self) -> Result<()> {
        let schedule_instead = "StepTrainer::with_schedule sets the learning rate of each step";
        let norm_instead = "max_grad_norm of StepConfig is the limit";
        let [optimizer, usual] = [&self.optimizer, &Self::default().optimizer].map(|config| json!(config));
        for (name, instead) in
            SCHEDULE.map(|name| (name, schedule_instead)).into_iter().chain([("max_grad_norm", norm_instead)])
        {
            if optimizer[name] != usual[name] {
                let found = match &optimizer[name] {
                    Value::String(text) => text.clone(),
                    other => other.as_f64().map_or("none".into(), |number| number.to_string()),
                };
                return Err(Error::Usage(format!("optimizer: {name} = {found} has no effect: {instead}")));
            }
        }
        Ok(())
    }

    /// Returns the repository that best models are pushed to, if they are.
    pub(super) fn destination(&self) -> Result<Option<Destination>> {
        if self.push_to_hub_if_best_kwargs.is_empty() {
            return Ok(None);
        }
        let wrong = |what: String| Err(Error::Usage(format!("{IF_BEST}: {what}")));
        let mut to = Destination::default();
        for (name, value) in &self.push_to_hub_if_best_kwargs {
            match (name.as_str(), value) {
                (_, Value::Null) | ("commit_message", _) => {}
                ("repo_id", Value::String(id)) => to.name.clone_from(id),
                ("revision", Value::String(branch)) => to.revision = Some(branch.clone()),
                ("private", Value::Bool(private)) => to.private = Some(*private),
                // The value may be the token itself, so it is not shown.
                ("token" | "use_auth_token", _) => {
                    return wrong(format!("`{name}`: set HF_TOKEN to the token instead"));
                }
                _ => {
                    return wrong(format!(
                        "`{name}`: expected repo_id, private or revision, and values of their kinds"
                    ));
                }
            }
        }
        if to.name.is_empty() { wrong("expected a repo_id, such as me/my-model".into()) } else { Ok(Some(to)) }
    }

    /// These settings as a configuration of `rlhf ppo --preset trl-legacy`.
    pub fn ppo(&self) -> PpoConfig {
        let out = self.output_dir.clone().unwrap_or_default();
        let mut ppo = PpoConfig::with_preset(Preset::TrlLegacy, &self.model_name, "", &self.query_dataset, out);
        ppo.reward_model_path = None;
        ppo.run.seed = self.seed;
        if self.log_with != ReportTo::None {
            let tracking = &mut ppo.run.tracking;
            tracking.report_to = vec![self.log_with.clone()];
            tracking.project = Some(self.tracker_project_name.clone());
            tracking.run_name.clone_from(&self.exp_name);
            let kwargs = Some(&self.tracker_kwargs).filter(|kwargs| !kwargs.is_empty());
            tracking.tracker_kwargs = kwargs.map(|kwargs| kwargs.clone().into());
        }
        ppo.run.gradient_checkpointing = self.gradient_checkpointing;
        ppo.total_episodes = Some(self.steps);
        ppo.learning_rate = self.learning_rate;
        ppo.optimizer = OptimizerConfig { max_grad_norm: self.max_grad_norm, ..self.optimizer.clone() };
        // Adapting multiplies the weight, so 0 stays 0.
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
        ppo.advantage.advantage_estimator = self.advantage_estimator;
        ppo.advantage.num_generations = self.num_generations;
        ppo.advantage.scale_rewards = self.scale_rewards;
        ppo.advantage.normalize_advantages = self.normalize_advantages;
        (ppo.loss.loss_type, ppo.loss.importance_sampling_level) = (self.loss_type, self.importance_sampling_level);
        // The head of the caller's model stays as it is.
        ppo.legacy.value_head = ppo.needs_critic();
        ppo
    }

    /// Returns the division of a step's rows into mini-batches.
    pub(super) fn epoch(&self) -> EpochPlan {
        EpochPlan {
            mini_batch_size: self.mini_batch_size * self.gradient_accumulation_steps,
            part_size: self.mini_batch_size,
            micro_batch_size: self.mini_batch_size,
        }
    }
}
