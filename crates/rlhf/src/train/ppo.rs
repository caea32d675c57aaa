//! PPO training: one update samples responses, scores them, computes advantages, and trains policy and value model.

mod evaluate;
mod groups;
mod load;
mod on_alarm;
mod replay;
mod rollouts;
mod run;
mod save;
mod state;

use crate::data::{Cursor, Episode, Prompt};
use crate::reward::{Rewards, Warn};
use crate::rl::alarms::{Alarms, Sampled};
use crate::rl::checks::Skips;
use crate::rl::experience::Experience;
use crate::rl::kept::{Kept, KeptResponses};
use crate::rl::kl::KlController;
use crate::rl::learner::{Learner, StepRates};
use crate::rl::rollout::{RolloutModels, RolloutSettings, experience};
use crate::rl::scores::ScoreMaker;
use crate::rl::shaping::{Targets, targets};
use crate::rl::stats::StepStats;
use crate::run::Runtime;
use crate::run::event::{Rollout, Sample};
use crate::run::inputs::Inputs;
use crate::run::session::{Opening, Progress, Trainee, take_snapshot};
use crate::run::sinks::console::Console;
use crate::settings::{NUM_EVAL_PROMPTS, PpoConfig, PpoPlan, PpoRun};
use crate::tool_loop::{ToolLoop, push_tool_metrics};
use evaluate::ReportedScores;
use load::open;
pub(in crate::train) use load::{Ends, check_sync, find_texts, read_prompts};
pub(crate) use load::{Loaded, Models};
pub(crate) use load::{check_encoder_decoder, check_reward_models, check_rewards, check_same_kind, prompt_limit};
use replay::RecordedScores;
pub use replay::{Differing, RecordedUpdate, Replayed};
use rlhf_base::metrics::{Metrics, Warning, WarningKind};
use rlhf_base::rng::Purpose;
use rlhf_base::{Error, Result};
use rlhf_hub::Commits;
use rlhf_lm::generate::{GenerationConfig, Response, Sampling, StopStrings, generate_on};
use rlhf_lm::model::CausalLm;
use rlhf_lm::optim::LearningRates;
use rlhf_lm::tokenizer::Tokenizer;
use std::fmt;
use std::ops::AddAssign;
use std::sync::Arc;
use std::time::Instant;
use tch::{Device, Kind};

impl PpoTrainer {
    /// One update, from prompts to metrics. The caller counts it; `phase` is called with the name of each phase.
    ///
    /// 1. Samples responses to the next prompts.
    /// 2. Scores them, and evaluates policy, reference and critic: the experience.
    /// 3. Computes rewards, advantages and returns.
    /// 4. Trains policy and critic in epochs of mini-batches.
    /// 5. Collects the metrics, and updates the KL's weight and the alarms by these metrics.
    fn one_update(&mut self, phase: &dyn Fn(&'static str)) -> Result<UpdateOutcome> {
        let update = self.course.progress.done;
        let mut clock = Clock::start();
        let device = self.learner.policy.device();

        // 1. Responses.
        phase("sampling");
        let mut batch = self.sample(update)?;

        // 2. Experience: scores, log-probabilities, values.
        phase("scoring");
        // The KV cache of sampling has other sizes than the tensors of a pass: its memory would stay allocated next to theirs.
        tch_ext::release_memory();
        let scores = self.score_batch(&mut batch)?;
        self.warn_unscored(&mut batch, scores.reported.scored.warning.clone());
        let prompts: Vec<Vec<i64>> =
            batch.asked(&self.data.prompts).into_iter().map(|prompt| prompt.tokens.clone()).collect();
        // Responses of an earlier update were sampled by an earlier policy.
        let models = self.rollout_models();
        let settings = self.rollout_settings(batch.reused);
        let mut experience = experience(models, &prompts, &batch.responses, scores.trained, &settings)?;
        self.add_groups(&mut experience, &mut batch, &scores.reported.scored)?;
        if let Some(reference) = experience.reference.as_mut().filter(|_| self.run.config.sync.sync_ref_model) {
            // The reference may move towards the policy in the middle of this update.
            reference.own_head();
        }

        // 3. Rewards, advantages, returns.
        let kl_coef = self.course.kl_controller.coef(update);
        let targets = targets(&experience, kl_coef, &self.run.shaping);
        let rollout = self.rollout(&batch, &scores.reported, &experience, &targets)?;
        clock.lap("rollout", device);

        // 4. Epochs of mini-batches.
        phase("optimising");
        let rates = self.step_rates(update)?;
        let orders = self.run.schedule.orders(update, experience.rows());
        // The rollout's allocations have other sizes than training's, and would fragment the memory.
        tch_ext::release_memory();
        self.learner.set_update(self.run.learner.update.clone());
        let sync = &self.run.config.sync;
        let reference = self.reference.as_ref();
        let after_step = |policy: &CausalLm, steps: usize| match reference.filter(|_| sync.is_due(steps)) {
            Some(reference) => sync.mix(policy, reference),
            None => Ok(()),
        };
        let epoch = &self.plan.epoch;
        let steps = self.learner.optimize_with(&experience, &targets, &orders, rates.clone(), epoch, after_step)?;
        clock.lap("optimise", device);

        // 5. Metrics.
        let data = (&experience, &targets);
        let metrics = self.update_metrics(batch, &scores.reported, data, &steps, &rates, &clock)?;
        Ok(UpdateOutcome { metrics, shown: scores.shown, rollout })
    }

    /// Warns once in a run about responses without a score.
    fn warn_unscored(&mut self, batch: &mut Batch, warning: Option<String>) {
        let Some(message) = warning else { return };
        let reported_once = || format!("{message} (reported once)");
        batch.warnings.extend(self.monitor.alarms.once(WarningKind::Unscored, reported_once));
    }

    /// Collects the metrics of an update, and updates the KL's weight and the alarms by these metrics.
    fn update_metrics(
        &mut self,
        mut batch: Batch,
        scores: &ReportedScores,
        (experience, targets): (&Experience, &Targets),
        steps: &[StepStats],
        rates: &StepRates,
        clock: &Clock,
    ) -> Result<Metrics> {
        let update = self.course.progress.done;
        let mut m = Metrics::default();
        m.push("step", (update + 1) as f64);
        m.push("episode", ((update + 1) * self.plan.batch_size) as f64);
        m.push("eps", self.plan.batch_size as f64 / clock.total());
        self.learner.metrics(&mut m, experience, targets, steps, &self.plan.epoch);
        self.push_batch_metrics(&mut m, &batch, scores);
        let constant = self.push_group_metrics(&mut m, &batch, (experience, targets), steps, clock.total());
        self.push_rates(&mut m, rates);
        clock.push_metrics(&mut m, experience.sampled.iter().sum(), batch.sampling);
        self.push_collectives(&mut m)?;
        self.monitor.skips.record(steps);
        self.course.kl_controller.observe(m.get("objective/kl").unwrap_or(f64::NAN), experience.rows());
        batch.warnings.extend(constant);
        self.monitor.warnings =
            [batch.warnings, self.monitor.alarms.observe_metrics(update + 1, &m, experience.mean_unmasked_length())]
                .concat();
        self.monitor.last_metrics.clone_from(&m);
        Ok(if self.run.needs_critic { m } else { m.without(self.learner.repeated_metrics()) })
    }

    /// Samples responses to the next prompts, and selects those that are long enough to train on.
    fn sample(&mut self, update: usize) -> Result<Batch> {
        if let Some(recorded) = self.sampler.recorded.take() {
            return Ok(recorded);
        }
        let size = self.plan.prompts;
        if self.data.order.is_some() && self.run.config.groups.filters() {
            return Err(Error::Usage(
                "order: expected neither dynamic_sampling nor dynamic_filtering_reward_range, whose further groups are of prompts that the \
                 order did not name"
                    .into(),
            ));
        }
        let rows = match &mut self.data.order {
            Some(order) => check_order(update, (order.0)(update), size, self.data.prompts.len())?,
            None => self.data.cursor.take(size),
        };
        let (rows, Answers { responses, episodes, sampling }) = self.respond(&rows, update as u64)?;
        let prompts: Vec<&[i64]> = rows.iter().map(|&row| self.data.prompts[row].tokens.as_slice()).collect();
        let mut warnings = self.monitor.alarms.observe_responses(&Sampled {
            update: update + 1,
            prompts: &prompts,
            responses: &responses,
            stop: &self.sampler.stop,
            eos: self.tokenizer.eos_ids(),
            may_stop: !self.sampler.stop.is_empty() || self.sampler.stop_strings.is_some(),
            cut: (!episodes.is_empty()).then(|| episodes.iter().zip(&responses).filter(|(e, r)| e.is_cut(r)).count()),
        });
        let Kept { rows, responses, dropped, reused } =
            self.sampler.kept.keep(rows, responses, &self.sampler.left_out)?;
        warnings.extend(reused.then(|| Warning {
            kind: WarningKind::ReusedResponses,
            message: format!(
                "update {}: each of {dropped} responses has fewer than min_response_length = {} tokens before its end: {} \
                 responses of an earlier update are trained on again",
                update + 1,
                self.run.config.mask.min_response_length,
                responses.len()
            ),
        }));
        let sampled_groups = rows.len() / self.run.rollout.settings.group_size;
        Ok(Batch {
            update,
            rows,
            responses,
            episodes,
            dropped,
            reused,
            warnings,
            sampling,
            sampled_groups,
            replaced_groups: 0,
            recorded: None,
        })
    }

    /// Samples `num_generations` responses to the prompt of each of `rows`. Returns the row of each response, and the responses with their
    /// sampling. `step` keys the random draws.
    fn respond(&self, rows: &[usize], step: u64) -> Result<(Vec<usize>, Answers)> {
        let size = self.run.rollout.settings.group_size;
        let asked: Vec<&Prompt> = rows.iter().map(|&row| &self.data.prompts[row]).collect();
        let generation = self.generation(self.run.generation.sampling, Purpose::Sampling, step);
        let answers = self.answers(&asked, &GenerationConfig { num_return_sequences: size, ..generation })?;
        Ok((rows.iter().flat_map(|&row| std::iter::repeat_n(row, size)).collect(), answers))
    }

    /// Policy, critic and reference model for the evaluation of responses.
    fn rollout_models(&self) -> RolloutModels<'_> {
        self.learner.rollout_models(self.reference.as_ref())
    }

    /// Settings of the rollout; log-probabilities of `reused` responses are recomputed.
    fn rollout_settings(&self, reused: bool) -> RolloutSettings {
        let settings = self.run.rollout(&self.learner.policy);
        let recompute_logprobs = settings.recompute_logprobs || reused;
        let compares_sampling = settings.compares_sampling && !reused;
        RolloutSettings { recompute_logprobs, compares_sampling, left_out: self.sampler.left_out.clone(), ..settings }
    }

    /// The learning rates of the optimizer steps of an update: the caller's, or those of the settings; lower after a rollback.
    fn step_rates(&mut self, update: usize) -> Result<StepRates> {
        let rates = match &mut self.course.schedule {
            Some(schedule) => StepRates::from((schedule.0)(update).checked(&format!("schedule: update {update}"))?),
            None => {
                let updates = self.plan.num_total_batches;
                self.run.schedule.step_rates(update, updates, self.plan.steps_per_epoch())
            }
        };
        Ok(rates.scaled(self.rate_factor()))
    }

    /// Adds the metrics of sampling and scoring.
    fn push_batch_metrics(&self, m: &mut Metrics, batch: &Batch, scores: &ReportedScores) {
        if self.run.config.mask.min_response_length > 0 {
            m.push("val/dropped_responses", batch.dropped as f64);
            m.push("val/reused_responses", if batch.reused { batch.rows.len() as f64 } else { 0.0 });
        }
        if self.run.config.score_scaling.use_score_scaling {
            m.push("objective/raw_scores", scores.raw.mean(Kind::Double).double_value(&[]));
        }
        scores.scored.push_metrics(m);
        if !self.run.needs_critic {
            scores.scored.push_trl_metrics(m);
        }
        push_tool_metrics(m, &batch.episodes, self.run.config.environment.environment_failure_reward.is_some());
        m.push("val/num_eos_tokens", scores.ends.iter().sum::<usize>() as f64);
    }

    /// Adds the time of the collectives, and replaces all metrics by those of rank 0: decisions that depend on them are then the same on
    /// ranks whose processors round differently.
    fn push_collectives(&self, m: &mut Metrics) -> Result<()> {
        let world = &self.learner.world;
        if world.size() == 1 {
            return Ok(());
        }
        let times = world.take_times();
        m.push("time/waiting", times.waiting);
        m.push("time/collectives", times.collectives);
        let mut values: Vec<f64> = m.iter().map(|(_, value)| value).collect();
        world.broadcast_numbers(&mut values)?;
        m.set_values(&values);
        Ok(())
    }

    /// Adds learning rates and loss scales.
    fn push_rates(&self, m: &mut Metrics, rates: &StepRates) {
        let rates = rates.first();
        m.push("lr", rates.policy.unwrap_or(0.0));
        if self.run.has_own_value_rate || self.course.schedule.is_some() {
            m.push("val/lr", rates.value);
        }
        if let Some(scaling) = &self.learner.optimizers.scaling {
            m.push("policy/loss_scale", scaling.policy.scale());
            if let Some(value) = &scaling.value {
                m.push("val/loss_scale", value.scale());
            }
        }
    }

    /// Samples one response to each prompt; `step` and `purpose` key the random draws.
    fn generate(&self, asked: &[&Prompt], sampling: Sampling, purpose: Purpose, step: usize) -> Result<Answers> {
        self.answers(asked, &self.generation(sampling, purpose, step as u64))
    }

    /// Samples responses to prompts, in turns with the environment if there is one, and counts their tokens and the time.
    fn answers(&self, asked: &[&Prompt], generation: &GenerationConfig) -> Result<Answers> {
        let began = Instant::now();
        let policy = &self.learner.policy;
        let world = &self.learner.world;
        let _gathered = self.learner.gathered_policy(self.run.config.dist.ds3_gather_for_generation)?;
        let (responses, episodes) = match &self.sampler.environment {
            Some(environment) => environment.generate_on(world, policy, asked, generation)?,
            None => {
                let prompts: Vec<&[i64]> = asked.iter().map(|prompt| prompt.tokens.as_slice()).collect();
                (generate_on(world, policy, &prompts, generation)?, Vec::new())
            }
        };
        let tokens = responses.iter().map(Response::num_sampled).sum();
        let sampling = Timed { seconds: began.elapsed().as_secs_f64(), tokens };
        Ok(Answers { responses, episodes, sampling })
    }

    fn generation(&self, sampling: Sampling, purpose: Purpose, step: u64) -> GenerationConfig {
        let stop_strings = self.sampler.stop_strings.clone();
        let seed = if purpose == Purpose::Sampling { self.sampling_seed() } else { self.run.config.run.seed };
        let stop_token_ids = self.sampler.stop.clone();
        GenerationConfig { sampling, stop_token_ids, stop_strings, seed, purpose, step, ..self.run.generation.clone() }
    }
}

/// Rows of a sample table.
const SAMPLE_ROWS: usize = 5;

/// Metrics in the model card, with their names there and their decimals.
const CARD_METRICS: [(&str, &str, usize); 3] = [
    ("episode", "episode", 0),
    ("objective/scores", "objective/scores of the last update", 4),
    ("objective/kl", "objective/kl of the last update", 4),
];

/// Folder of the value model, below the policy's.
pub(crate) const VALUE_MODEL: &str = "value_model";

/// Trains a policy with the settings `config`, and saves it and its value model in `output_dir`.
///
/// # Errors
/// If an input is missing or invalid, or training diverges.
pub fn ppo(config: &PpoConfig, runtime: impl Into<Runtime>) -> Result<()> {
    let Runtime { world, console } = runtime.into();
    let run = PpoRun::new(config)?;
    check_eval_prompts(config)?;
    // The output folder is checked before anything slow begins.
    let opening = open(&run, &world)?;
    let mut trainer = PpoTrainer::load(run, Rewards::new(), opening.found()?, &world)?;
    trainer.console = console;
    trainer.record.opening = Some(opening);
    trainer.train().map(drop)
}

/// Refuses a number of prompts that no evaluation uses; callers of the library may evaluate without `eval_steps`.
pub(crate) fn check_eval_prompts(config: &PpoConfig) -> Result<()> {
    if config.eval.eval_steps.is_none() && config.num_eval_prompts != NUM_EVAL_PROMPTS {
        let found = config.num_eval_prompts;
        return Err(Error::refused("num_eval_prompts", format!(" = {found} has no effect without eval_steps")));
    }
    Ok(())
}

/// Name of the command in checkpoints, with every preset.
const COMMAND: &str = "ppo";

/// Loaded parts of a run; all models are on one device.
#[derive(Debug)]
pub struct PpoParts {
    /// The policy and the value model, with their optimizers.
    pub learner: Learner,
    /// The reference model; `None` where the settings use none ([`PpoConfig::has_reference`]).
    pub reference: Option<CausalLm>,
    /// The rewards.
    pub rewards: Rewards,
    /// Tokenizer of the models.
    pub tokenizer: Tokenizer,
    /// Prompts to train on.
    pub prompts: Vec<Prompt>,
    /// Held-out prompts: evaluations use the first `num_eval_prompts`, sample tables the first few. May be empty; then sample
    /// tables use training prompts.
    pub eval_prompts: Vec<Prompt>,
}

/// A callback of the caller, called with the number of an update, from 0.
struct PerUpdate<T>(Box<dyn FnMut(usize) -> T + Send>);

impl<T> fmt::Debug for PerUpdate<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a function")
    }
}

/// A PPO run: models, rewards, tokenizer, prompts.
///
/// ```no_run
/// use rlhf::settings::PpoConfig;
/// use rlhf::train::ppo::PpoTrainer;
/// # fn main() -> rlhf::Result<()> {
/// let config = PpoConfig::new("runs/sft", "runs/reward", "prompts.jsonl", "runs/ppo");
/// let updates = PpoTrainer::from_config(&config)?.train()?;
/// println!("{updates} updates; the policy is in runs/ppo");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PpoTrainer {
    /// The settings of each part.
    run: PpoRun,
    /// Sizes of the run.
    pub plan: PpoPlan,
    /// The policy and the value model.
    pub learner: Learner,
    /// The reference model, if the settings use one.
    pub reference: Option<CausalLm>,
    /// The rewards.
    pub rewards: Rewards,
    /// Tokenizer of the models.
    pub tokenizer: Tokenizer,
    /// Console output of [`PpoTrainer::train`] and warnings of [`PpoTrainer::update`]; silent by default.
    pub console: Console,
    data: PromptData,
    sampler: Sampler,
    course: Course,
    monitor: Monitor,
    record: RunRecord,
}

/// The prompts of a run.
#[derive(Debug)]
struct PromptData {
    prompts: Vec<Prompt>,
    sample_prompts: Vec<Prompt>,
    eval_prompts: Vec<Prompt>,
    /// The next rows.
    cursor: Cursor,
    /// Caller-supplied order; overrides the cursor.
    order: Option<PerUpdate<Vec<usize>>>,
}

/// Settings and state of sampling: the ends of responses, their environment, and the responses that are trained on.
#[derive(Debug)]
struct Sampler {
    /// Tokens that end a response; may be empty.
    stop: Vec<i64>,
    /// Texts that end a response.
    stop_strings: Option<StopStrings>,
    /// End tokens of responses that are in no loss.
    left_out: Vec<i64>,
    /// The tools and environments of the responses, if there are any.
    environment: Option<ToolLoop>,
    /// Selects the responses to train on.
    kept: KeptResponses,
    /// The responses of the next update, in a replay.
    recorded: Option<Batch>,
}

/// The state that changes from update to update.
#[derive(Debug)]
struct Course {
    progress: Progress,
    /// Weight of the KL.
    kl_controller: KlController,
    /// The scores of responses.
    scores: ScoreMaker,
    /// Caller-supplied learning rates; override the settings.
    schedule: Option<PerUpdate<LearningRates>>,
}

/// Alarms, and the numbers that they and the reports read.
#[derive(Debug)]
struct Monitor {
    alarms: Alarms,
    skips: Skips,
    /// Warnings of the last update.
    warnings: Vec<Warning>,
    last_metrics: Metrics,
    /// Tokens of prompts and responses so far.
    num_tokens: u64,
}

/// Facts of a run for its folder: checkpoints, model card, first lines.
#[derive(Debug)]
struct RunRecord {
    /// Warnings about prompts and dtypes, reported when the run starts.
    prompt_notes: Vec<String>,
    /// The commits that names on the hub were resolved to.
    commits: Commits,
    /// Digests of the inputs, which are compared when the run resumes.
    inputs: Inputs,
    /// The output folder, where it was opened before the models were loaded.
    opening: Option<Opening>,
    /// Result of the sanity checks at the start, for the model card.
    checks: Option<String>,
}

impl PpoTrainer {
    /// The settings.
    pub fn config(&self) -> &PpoConfig {
        &self.run.config
    }

    /// Replaces the settings of the next updates. The settings of models, optimizers, data and sizes stay as they were when the trainer was
    /// made.
    ///
    /// # Errors
    /// If a setting is out of its range: the earlier settings stay.
    pub fn set_config(&mut self, config: &PpoConfig) -> Result<()> {
        self.run = PpoRun::new(config)?;
        self.course.scores.penalties = self.run.penalties.clone();
        Ok(())
    }

    /// Number of updates done.
    pub fn updates_done(&self) -> usize {
        self.course.progress.done
    }

    /// Warnings of the last update.
    pub fn warnings(&self) -> &[Warning] {
        &self.monitor.warnings
    }

    /// Sends warnings of rewards, and the lines that Python functions print, to the console.
    fn warn_of_retries(&mut self) {
        let console = self.console;
        let warn: Warn = Arc::new(move |message: &str| console.announce_warning(message));
        self.rewards.warn_by(&warn);
        let print: Warn = Arc::new(move |line: &str| console.announce_printed(line));
        self.rewards.print_by(&print);
    }

    /// Runs the next update, for the caller's own loop, and returns its metrics. Writes no files; [`PpoTrainer::warnings`] are
    /// printed on standard error unless the console is silent. An update that fails before its first optimizer step, for instance
    /// because a reward fails, leaves the trainer as it was: the next call repeats it.
    ///
    /// # Errors
    /// If the run is finished, a reward fails, or a row does not fit the models. After `max_skipped_updates` consecutive updates
    /// without an optimizer step: the update counts as done, and changed no weight.
    pub fn update(&mut self) -> Result<Metrics> {
        let total = self.plan.num_total_batches;
        if self.course.progress.done == total {
            return Err(Error::Usage(format!("update: the run is finished, all {total} updates are done")));
        }
        self.warn_of_retries();
        let fixed = self.fixed();
        let state = self.resumable();
        let kept = self.sampler.kept.clone();
        let steps = self.steps();
        let metrics = match self.one_update(&|_| ()) {
            Ok(outcome) => outcome.metrics,
            Err(error) => {
                if self.steps() == steps {
                    // The state was just made by this trainer, so it can be loaded; the error to show is that of the update in any case.
                    let _ = self.restore(fixed, state);
                    // The restored state would have no log-probabilities.
                    self.sampler.kept = kept;
                }
                return Err(error);
            }
        };
        self.course.progress.done += 1;
        take_snapshot(self);
        let too_many = self.note_skips().err();
        self.monitor.warnings.iter().for_each(|warning| self.console.warn(&warning.message));
        too_many.map_or(Ok(metrics), Err)
    }
}

/// The result of one update. The state that a resumed run needs is in the trainer.
struct UpdateOutcome {
    metrics: Metrics,
    /// The responses to show, if this update shows any.
    shown: Vec<Sample>,
    /// All responses, with `log_rollouts`.
    rollout: Rollout,
}

/// The responses of one update.
#[derive(Debug)]
struct Batch {
    /// Number of the update, from 0.
    update: usize,
    /// Rows of the prompts.
    rows: Vec<usize>,
    responses: Vec<Response>,
    /// The episode of each response; empty without an environment.
    episodes: Vec<Episode>,
    /// Responses that are too short to train on.
    dropped: usize,
    /// Whether these are responses of an earlier update.
    reused: bool,
    warnings: Vec<Warning>,
    /// The sampling of these responses and of others in the update: of `dynamic_sampling`, and the greedy responses of ReMax.
    sampling: Timed,
    /// Number of groups that were sampled, and number of those that were replaced.
    sampled_groups: usize,
    replaced_groups: usize,
    /// The scores that a run has recorded, in a replay.
    recorded: Option<RecordedScores>,
}

impl Batch {
    /// The prompt of each response; `prompts` are those of the run.
    fn asked<'a>(&'a self, prompts: &'a [Prompt]) -> Vec<&'a Prompt> {
        asked(self.rows.iter().map(|&row| &prompts[row]), &self.episodes)
    }
}

/// The `prompts`, or those of their `episodes` if there are episodes.
fn asked<'a>(prompts: impl Iterator<Item = &'a Prompt>, episodes: &'a [Episode]) -> Vec<&'a Prompt> {
    let asked_prompt = |(at, prompt)| episodes.get(at).map_or(prompt, |episode: &Episode| &episode.prompt);
    prompts.enumerate().map(asked_prompt).collect()
}

/// Sampled responses.
#[derive(Debug)]
struct Answers {
    responses: Vec<Response>,
    /// The episode of each response; empty without an environment.
    episodes: Vec<Episode>,
    sampling: Timed,
}

impl Answers {
    /// The prompts as they were asked; `prompts` are the prompts of the data.
    fn asked<'a>(&'a self, prompts: &[&'a Prompt]) -> Vec<&'a Prompt> {
        asked(prompts.iter().copied(), &self.episodes)
    }
}

/// Time and tokens of sampling.
#[derive(Debug, Clone, Copy, Default)]
struct Timed {
    seconds: f64,
    tokens: usize,
}

impl AddAssign for Timed {
    fn add_assign(&mut self, more: Self) {
        self.seconds += more.seconds;
        self.tokens += more.tokens;
    }
}

/// Seconds by phase of an update.
struct Clock {
    began: Instant,
    laps: Vec<(&'static str, f64)>,
}

impl Clock {
    fn start() -> Self {
        Self { began: Instant::now(), laps: Vec::new() }
    }

    /// Ends a phase on `device`, after waiting for the device to finish its work.
    fn lap(&mut self, name: &'static str, device: Device) {
        if let Device::Cuda(number) = device {
            tch::Cuda::synchronize(number as i64);
        }
        self.laps.push((name, self.began.elapsed().as_secs_f64()));
    }

    /// Seconds from the start to the end of the last phase.
    fn total(&self) -> f64 {
        self.laps.last().map_or(0.0, |(_, end)| *end)
    }

    /// Adds seconds and tokens per second of an update whose responses have `tokens` tokens; `time/rollout` includes sampling.
    fn push_metrics(&self, m: &mut Metrics, tokens: i64, sampled: Timed) {
        let end = |name| self.laps.iter().find(|(lap, _)| *lap == name).map_or(0.0, |(_, end)| *end);
        let rollout = end("rollout");
        let total = self.total();
        m.push("time/generate", sampled.seconds);
        m.push("time/rollout", rollout);
        m.push("time/optimise", total - rollout);
        m.push("time/update", total);
        // A replay samples nothing.
        m.push("tokens_per_second/generate", sampled.tokens as f64 / sampled.seconds.max(f64::MIN_POSITIVE));
        m.push("tokens_per_second/update", tokens as f64 / total);
    }
}

/// Checks the rows that the caller's order returned: `count` of them, each below `prompts`.
fn check_order(update: usize, rows: Vec<usize>, count: usize, prompts: usize) -> Result<Vec<usize>> {
    let found = match rows.iter().find(|&&row| row >= prompts) {
        Some(row) => format!("row {row}"),
        None if rows.len() == count => return Ok(rows),
        None => format!("{} rows", rows.len()),
    };
    Err(Error::Run(format!("order: update {update}: expected {count} rows, each below {prompts}, found {found}")))
}
