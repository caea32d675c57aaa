//! PPO: prompts to responses, to experience, to a better policy; and around again.

mod evaluate;
mod load;
mod run;
mod save;

use crate::data::{Cursor, Prompt};
use crate::generate::{GenerationConfig, Response, Sampling, StopStrings, generate};
use crate::hub::Commits;
use crate::metrics::Metrics;
use crate::model::CausalLm;
use crate::optim::LearningRates;
use crate::reward::{Rewards, ScoreScaling};
use crate::rl::alarms::Alarms;
use crate::rl::checks::Skips;
use crate::rl::kept::{Kept, KeptAnswers};
use crate::rl::kl::KlController;
use crate::rl::learner::{Learner, mini_batch_orders};
use crate::rl::rollout::{Judges, experience_leaving_out, targets};
use crate::rl::sampling::{generation, recomputes_logprobs};
use crate::rl::stats::metrics;
use crate::rng::Purpose;
use crate::run::checkpoint::Best;
use crate::run::inputs::Inputs;
use crate::run::report::{Console, Hold, Sample, Warning, WarningKind};
use crate::settings::{NUM_EVAL_PROMPTS, PpoConfig, PpoPlan};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use load::begin;
pub(in crate::train) use load::{check_ends, require_reward, room_in};
use serde_json::{Map, Value};
use std::fmt;
use std::time::Instant;
use tch::Kind;

/// Rows of a sample table.
const SAMPLE_ROWS: usize = 5;

/// The metrics that the model card tells, with their decimals.
const CARD_METRICS: [(&str, usize); 3] = [("episode", 0), ("objective/scores", 4), ("objective/kl", 4)];

/// The folder of the value model, below the policy's.
pub(crate) const VALUE_MODEL: &str = "value_model";

/// Trains a policy as `config` says and saves it, with its value model, in `output_dir`.
///
/// # Errors
/// If an input is not what it should be, or a number stops being finite.
pub fn ppo(config: &PpoConfig, console: Console) -> Result<()> {
    config.check()?;
    // A library's caller evaluates without it.
    if config.eval.eval_steps.is_none() && config.num_eval_prompts != NUM_EVAL_PROMPTS {
        let found = config.num_eval_prompts;
        return Err(Error::Usage(format!("num_eval_prompts = {found} has no effect without eval_steps")));
    }
    // Before anything slow begins.
    let hold = Hold::take(&config.run.output_dir)?;
    begin(config)?;
    let mut trainer = PpoTrainer::from_config(config)?;
    (trainer.console, trainer.hold) = (console, Some(hold));
    trainer.train().map(drop)
}

/// The command, as checkpoints name it.
const COMMAND: &str = "ppo";

/// What a run is made of, where the caller has it in hand; all models are on one device.
#[derive(Debug)]
pub struct PpoParts {
    /// The policy and the value model, with their optimizers.
    pub learner: Learner,
    /// What the policy should not drift away from.
    pub reference: CausalLm,
    /// What scores the responses.
    pub rewards: Rewards,
    /// The tokenizer of all of them.
    pub tokenizer: Tokenizer,
    /// The prompts to train on.
    pub prompts: Vec<Prompt>,
    /// Prompts that are held out: evaluations answer the first `num_eval_prompts`, samples the first few. There may be none;
    /// then samples answer prompts of the training.
    pub eval_prompts: Vec<Prompt>,
}

/// What the caller says of each update, by its number from 0.
struct PerUpdate<T>(Box<dyn FnMut(usize) -> T + Send>);

impl<T> fmt::Debug for PerUpdate<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a function")
    }
}

/// A whole PPO run: models, rewards, a tokenizer, prompts.
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
    /// The settings.
    pub config: PpoConfig,
    /// The sizes that follow from them.
    pub plan: PpoPlan,
    /// The policy and the value model.
    pub learner: Learner,
    /// What the policy should not drift away from.
    pub reference: CausalLm,
    /// What scores the responses.
    pub rewards: Rewards,
    /// The tokenizer of all of them.
    pub tokenizer: Tokenizer,
    /// Where the words of [`PpoTrainer::train`] and the warnings of [`PpoTrainer::update`] go, beside the files: nowhere, unless
    /// it is set.
    pub console: Console,
    pub(crate) prompts: Vec<Prompt>,
    sample_prompts: Vec<Prompt>,
    eval_prompts: Vec<Prompt>,
    /// What to tell of the prompts.
    prompt_notes: Vec<String>,
    /// What the names of the hub stand for.
    commits: Commits,
    /// Digests of what the run reads.
    inputs: Inputs,
    pub(crate) cursor: Cursor,
    /// In place of the cursor.
    order: Option<PerUpdate<Vec<usize>>>,
    /// In place of the learning rates that the settings say.
    schedule: Option<PerUpdate<LearningRates>>,
    /// What the KL weighs.
    kl_controller: KlController,
    scaling: ScoreScaling,
    /// The tokens that end a response; none where none does.
    stop: Vec<i64>,
    /// The texts that end a response.
    stop_strings: Option<StopStrings>,
    /// Those that end a response and are in no loss.
    pub(crate) left_out: Vec<i64>,
    /// Which answers are trained on.
    kept: KeptAnswers,
    /// Those of the last update that are to be shown.
    answers: Vec<Sample>,
    last_metrics: Metrics,
    best: Option<Best>,
    /// Updates done.
    done: usize,
    /// The state of all parts after the last whole update, as [`PpoTrainer::state`] gives it, and the optimizers' steps until
    /// then: an error may come in the midst of an update.
    whole: (Map<String, Value>, i64),
    /// What the checks found when the run began, for the model card.
    checks: Option<String>,
    skips: Skips,
    alarms: Alarms,
    /// Those of the last update.
    warnings: Vec<Warning>,
    /// The hold on the run's folder.
    hold: Option<Hold>,
    /// Whether training has begun in it.
    begun: bool,
}

impl PpoTrainer {
    /// How many updates are done.
    pub fn updates_done(&self) -> usize {
        self.done
    }

    /// The warnings of the last update, of [`PpoTrainer::update`] or of a run.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// The next update of the run, for a loop of the caller's: answer prompts, judge the answers, learn from them. Gives the
    /// update's metrics; nothing is written but, unless the console is silent, its [`PpoTrainer::warnings`] on standard error.
    ///
    /// # Errors
    /// If the run is finished, a reward fails, or the models refuse a row. If this is the last of `max_skipped_updates` updates in
    /// a row without an optimizer step: the update counts as done, and no weight has changed in it.
    pub fn update(&mut self) -> Result<Metrics> {
        let total = self.plan.num_total_batches;
        if self.done == total {
            return Err(Error::Usage(format!("update: the run is finished, all {total} updates are done")));
        }
        let metrics = self.one_update(&|_| ())?;
        self.done += 1;
        self.note_whole();
        let too_many = self.note_skips().err();
        self.warnings.iter().for_each(|warning| self.console.warn(&warning.message));
        too_many.map_or(Ok(metrics), Err)
    }

    /// One update, from prompts to metrics; the caller counts it, and is told what it is `doing`.
    fn one_update(&mut self, doing: &dyn Fn(&'static str)) -> Result<Metrics> {
        let (config, plan, update) = (&self.config, &self.plan, self.done);
        let began = Instant::now();

        // 1. Prompts to responses.
        doing("sampling");
        let rows = match &mut self.order {
            Some(order) => own_rows(update, (order.0)(update), plan.batch_size, self.prompts.len())?,
            None => self.cursor.take(plan.batch_size),
        };
        let prompts: Vec<Vec<i64>> = rows.iter().map(|&row| self.prompts[row].tokens.clone()).collect();
        let sampling = config.sampling();
        let responses = self.generate(&prompts, sampling, Purpose::Sampling, update)?;
        let may_stop = !self.stop.is_empty() || self.stop_strings.is_some();
        let eos = self.tokenizer.eos_ids();
        let mut warnings = self.alarms.of_responses(update + 1, &responses, &self.stop, eos, may_stop);
        let Kept { rows, responses, dropped, again } = self.kept.keep(rows, responses, &self.left_out)?;
        warnings.extend(again.then(|| Warning {
            kind: WarningKind::ReusedResponses,
            message: format!(
                "update {}: each of {dropped} responses has fewer than min_response_length = {} tokens before its end: {} \
                 responses of an earlier update are trained on again",
                update + 1,
                config.counts.min_response_length,
                responses.len()
            ),
        }));
        let prompts: Vec<Vec<i64>> = rows.iter().map(|&row| self.prompts[row].tokens.clone()).collect();
        let generated = began.elapsed().as_secs_f64();

        // 2. Responses to experience: scores, log-probabilities, values.
        doing("scoring");
        let asked: Vec<&Prompt> = rows.iter().map(|&row| &self.prompts[row]).collect();
        let mut scored = self.rewards.score_responses(&self.tokenizer, &asked, &responses, true)?;
        let raw = self.raw_scores(&scored, &responses);
        self.scaling.apply(&mut scored);
        let (scores, ends) = self.penalised(&scored, &responses);
        let judges = Judges { policy: &self.learner.policy, reference: &self.reference, value: &self.learner.value };
        // What the policy of an earlier update sampled is not what this one would say of it.
        let recompute = again || self.recomputes_logprobs();
        let experience =
            experience_leaving_out(judges, &prompts, &responses, scores, &self.left_out, recompute, config)?;
        self.answers = if self.shows_answers(update) {
            self.sample_rows(&asked[..asked.len().min(SAMPLE_ROWS)], &responses, &raw, &scored.components)?
        } else {
            Vec::new()
        };

        // 3. Experience to rewards, advantages, returns.
        let targets = targets(&experience, self.kl_controller.coef(update), config);
        let rollout = began.elapsed().as_secs_f64();

        // 4. Epochs of mini-batches.
        doing("optimising");
        let rates = match &mut self.schedule {
            Some(schedule) => own_rates(update, (schedule.0)(update))?,
            None => LearningRates::at(config, update, plan.num_total_batches),
        };
        let orders = mini_batch_orders(config, update, rows.len());
        // The rollout's pieces are of other sizes than training's, and would stand between them.
        tch_ext::release_memory();
        let steps = self.learner.optimise(&experience, &targets, &orders, rates, plan, config)?;
        self.skips.note(&steps);

        // 5. What happened.
        let took = began.elapsed().as_secs_f64();
        let tokens = experience.lengths.iter().sum::<i64>() as f64;
        let mut m = Metrics::default();
        m.push("step", (update + 1) as f64);
        m.push("episode", ((update + 1) * plan.batch_size) as f64);
        m.push("eps", plan.batch_size as f64 / took);
        metrics(&mut m, &experience, &targets, &steps, config);
        if config.counts.min_response_length > 0 {
            m.push("val/dropped_responses", dropped as f64);
            m.push("val/reused_responses", if again { rows.len() as f64 } else { 0.0 });
        }
        if config.legacy.use_score_scaling {
            m.push("objective/raw_scores", raw.mean(Kind::Double).double_value(&[]));
        }
        scored.push_metrics(&mut m);
        m.push("val/num_eos_tokens", ends.iter().sum::<usize>() as f64);
        m.push("lr", rates.policy.unwrap_or(0.0));
        if config.value.differs() || self.schedule.is_some() {
            m.push("val/lr", rates.value);
        }
        if let Some(scaling) = &self.learner.scaling {
            m.push("policy/loss_scale", scaling.policy.scale());
            if let Some(value) = &scaling.value {
                m.push("val/loss_scale", value.scale());
            }
        }
        m.push("time/generate", generated);
        m.push("time/rollout", rollout);
        m.push("time/optimise", took - rollout);
        m.push("time/update", took);
        m.push("tokens_per_second/generate", tokens / generated);
        m.push("tokens_per_second/update", tokens / took);
        self.kl_controller.observe(m.get("objective/kl").unwrap_or(f64::NAN), rows.len());
        self.last_metrics.clone_from(&m);
        warnings.extend(self.alarms.of_metrics(update + 1, &m));
        self.warnings = warnings;
        Ok(m)
    }

    /// Whether the answers of update `update` are shown.
    fn shows_answers(&self, update: usize) -> bool {
        let trial = &self.config.trial;
        trial.print_answers && update.is_multiple_of(trial.print_answers_interval)
    }

    fn generate(
        &self,
        prompts: &[Vec<i64>],
        sampling: Sampling,
        purpose: Purpose,
        step: usize,
    ) -> Result<Vec<Response>> {
        generate(&self.learner.policy, prompts, &self.generation(sampling, purpose, step))
    }

    /// Whether the log-probabilities of sampling are not those that training takes.
    fn recomputes_logprobs(&self) -> bool {
        recomputes_logprobs(&self.learner.policy, &self.config)
    }

    fn generation(&self, sampling: Sampling, purpose: Purpose, step: usize) -> GenerationConfig {
        let stop_strings = self.stop_strings.clone();
        GenerationConfig { sampling, purpose, stop_strings, ..generation(&self.config, &self.stop, step) }
    }
}

/// The rows that the caller's order says, if they are `count` of the `prompts`.
fn own_rows(update: usize, rows: Vec<usize>, count: usize, prompts: usize) -> Result<Vec<usize>> {
    let found = match rows.iter().find(|&&row| row >= prompts) {
        Some(row) => format!("row {row}"),
        None if rows.len() == count => return Ok(rows),
        None => format!("{} rows", rows.len()),
    };
    Err(Error::Run(format!("order: update {update}: expected {count} rows, each below {prompts}, found {found}")))
}

/// The learning rates that the caller's schedule says, if such are possible.
fn own_rates(update: usize, rates: LearningRates) -> Result<LearningRates> {
    let mut all = rates.policy.into_iter().chain([rates.value]);
    match all.find(|rate| !(rate.is_finite() && *rate >= 0.0)) {
        Some(rate) => {
            Err(Error::Run(format!("schedule: update {update}: expected learning rates from 0, found {rate}")))
        }
        None => Ok(rates),
    }
}
