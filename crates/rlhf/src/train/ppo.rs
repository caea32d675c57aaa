//! PPO: prompts to responses, to experience, to a better policy; and around again.

use super::{
    Card, LOSS_SCALE, begin_report, check_held_out, command_to_try, deepspeed_chat_pad, describe_machine,
    describe_micro_batch, fixed_state, gather, kept_micro_batch_tokens, leave_checkpoint, load_cursor,
    micro_batch_tokens, micro_batches, model_options, roundings, small_dataset, trained_options, trained_share,
};
use crate::data::{Cursor, Dataset, Prompt, PromptLimit, Sources};
use crate::generate::{FinishReason, GenerationConfig, Response, Sampling, StopStrings, generate};
use crate::hub::{self, AskedHub, Commits};
use crate::metrics::Metrics;
use crate::model::{
    BASE_MODEL, CausalLm, CausalLmWithValueHead, ClassifierFormat, LoraConfig, ModelConfig, Sampled,
    SequenceClassifier, TokenLogprobs, ValueModel,
};
use crate::optim::loss_scale::LossScaler;
use crate::optim::{AdamW, LearningRates};
use crate::reward::{ComponentScores, RewardModel, Rewards, ScoreScaling, Scored, Spec, resolve, specs};
use crate::rl::alarms::Alarms;
use crate::rl::checks::{self, Checks, Skips};
use crate::rl::ema::{EMA, Ema};
use crate::rl::kl::KlController;
use crate::rl::math;
use crate::rl::rollout::{
    Experience, Judges, Scores, Targets, counted_tokens, experience, experience_leaving_out, penalise_missing_stop,
    replace_missing_stop, targets,
};
use crate::rl::unsupervised::{Unsupervised, learn_texts};
use crate::rng::{Purpose, Stream};
use crate::run::checkpoint::{Best, Checkpoints, OPTIMIZER, Saved, Start, is_due, leave_model};
use crate::run::inputs::Inputs;
use crate::run::report::{
    Console, Conversation, Evaluation, Event, Hold, Reached, Reporter, Sample, Warning, WarningKind, check_output_dir,
    claim_output_dir, conclude,
};
use crate::settings::{
    EVAL_SCORES, EosInLoss, LogprobsOf, LongPrompts, NUM_EVAL_PROMPTS, OptimizerConfig, PpoConfig, PpoPlan, Step,
    StopToken, WhitenAdvantages,
};
use crate::tokenizer::Tokenizer;
use crate::weights::replace_files;
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::fmt;
use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::time::Instant;
use tch::{Kind, Tensor};

/// Rows of a sample table.
const SAMPLE_ROWS: usize = 5;

/// The metrics that the model card tells, with their decimals.
const CARD_METRICS: [(&str, usize); 3] = [("episode", 0), ("objective/scores", 4), ("objective/kl", 4)];

/// The metrics whose change people are told at the end, with their names for it.
const OUTCOME: [(&str, &str); 6] = [
    ("score", "objective/scores"),
    ("KL", "objective/kl"),
    ("length", "val/response_length"),
    ("held-out score", "eval/score"),
    ("held-out KL", "eval/kl"),
    ("held-out length", "eval/response_length"),
];

/// The folder of the value model, below the policy's.
pub(crate) const VALUE_MODEL: &str = "value_model";

/// An update's epochs end early beyond this many times `target_kl`; as TRL 0.11.
const EARLY_STOP: f64 = 1.5;

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

/// Where a run begins, and what to warn of; nothing is changed yet.
///
/// # Errors
/// If it may not write where it should, or cannot go on from where it should.
fn begin(config: &PpoConfig) -> Result<(Start, Vec<String>)> {
    let optional = [config.value_model_path.as_deref(), config.model_name_or_path.as_deref()];
    let rewards = specs(config)?;
    let mut inputs: Vec<&Path> = vec![&config.sft_model_path];
    inputs.extend(config.data.dataset_name.iter().map(|name| name.as_path()));
    inputs.extend(optional.into_iter().flatten().chain(rewards.iter().filter_map(Spec::model_path)));
    let start = Start::find(&config.run)?;
    check_output_dir(&config.run, &start, &inputs)?;
    let warnings = start.check(COMMAND, config)?;
    Ok((start, warnings))
}

/// Refuses a run that has no reward.
pub(crate) fn require_reward(none: bool) -> Result<()> {
    if none {
        let message = "no reward: set at least one of reward_model_path, reward, reward_command and reward_url";
        return Err(Error::Usage(message.into()));
    }
    Ok(())
}

/// The most tokens of a prompt that leave room for a response.
///
/// # Errors
/// If there is no room for any.
pub(crate) fn room_in(context: usize, response_length: usize) -> Result<usize> {
    context.checked_sub(response_length).filter(|&room| room > 0).ok_or_else(|| {
        Error::Usage(format!(
            "response_length = {response_length} leaves no room for a prompt in the models' context of {context} tokens"
        ))
    })
}

/// Checks that the tokenizer has what a response is to end with, and the policy's vocabulary of `vocab` ids the token that is given.
///
/// # Errors
/// If one has it not.
pub(crate) fn check_ends(config: &PpoConfig, tokenizer: &Tokenizer, vocab: i64, stop: &[i64]) -> Result<()> {
    let by_text = !config.sampling.stop_strings.is_empty();
    if (config.missing_eos_penalty.is_some() || config.non_eos_penalty) && stop.is_empty() && !by_text {
        tokenizer.require_eos()?;
    }
    if let Some(id) = config.stop_token_id.filter(|id| !(0..vocab).contains(id)) {
        let message = format!("stop_token_id = {id}: expected an id below the policy's vocabulary of {vocab}");
        return Err(Error::Usage(message));
    }
    Ok(())
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
    /// Loads what `config` names: the policy and its frozen copy, the rewards and the value model, the prompts.
    ///
    /// # Errors
    /// If an input is not what it should be, or there is no reward; nothing is written.
    pub fn from_config(config: &PpoConfig) -> Result<Self> {
        Self::from_config_with(config, Rewards::new())
    }

    /// As [`PpoTrainer::from_config`], with rewards of the caller's beside those that `config` names, which may be none.
    ///
    /// # Errors
    /// As [`PpoTrainer::from_config`].
    pub fn from_config_with(config: &PpoConfig, more: Rewards) -> Result<Self> {
        config.check()?;
        // Each tensor as its file has it, and computed as the policy is: to widen a weight loses nothing, so the reference gives
        // the very numbers of the policy that it is a copy of, from half the memory where the files are in bf16.
        let frozen = model_options(&config.run)?;
        // A run that goes on reads what it began with.
        let asked = AskedHub::with(Start::find(&config.run)?.commits()?);
        // Before gigabytes are fetched in vain.
        let sources = Sources::find(&config.data, None)?;
        check_held_out(&config.eval, &sources, &config.data)?;
        let policy_dir = &hub::model_dir(&config.sft_model_path, Some(&config.model_revision))?;
        let specs = resolve(config)?;
        let mut inputs = Inputs::default();
        inputs.model("sft_model_path", policy_dir)?;
        for (name, dir) in specs.iter().filter_map(Spec::named_model) {
            inputs.model(&format!("reward {name}"), dir)?;
        }
        require_reward(specs.is_empty() && more.is_empty())?;
        if let Some(same) = specs.iter().filter_map(Spec::model_path).find(|path| is_same_folder(path, policy_dir)) {
            return Err(Error::Usage(format!(
                "sft_model_path = {}: the reward model is this same folder ({}): expected a model that was trained to judge \
                 answers, as `rlhf reward` does, not the one that gives them",
                config.sft_model_path.display(),
                same.display()
            )));
        }
        let own_value_dir = config.value_model_path.as_ref().map(|dir| hub::model_dir(dir, None)).transpose()?;
        let new_head = config.new_reward_head.then_some(config.run.seed);
        let tokenizer_of = config.model_name_or_path.as_ref();
        let tokenizer_dir = tokenizer_of.map_or(Ok(policy_dir.clone()), |dir| hub::tokenizer_dir(dir, None))?;
        let tokenizer = Tokenizer::from_pretrained(&tokenizer_dir)?;
        own_value_dir.as_deref().map_or(Ok(()), |dir| inputs.model("value_model_path", dir))?;
        if tokenizer_of.is_some() {
            inputs.model("model_name_or_path", &tokenizer_dir)?;
        }
        // Dropout would make the ratios differ from 1 before anything is learnt.
        let undropped = |lora| LoraConfig { dropout: 0.0, ..lora };
        let (lora, value_lora) = (config.peft.lora().map(undropped), config.value_lora().map(undropped));
        // An adapter that is there already (SFT's) becomes part of the policy, and of the reference.
        let mut policy = CausalLm::from_pretrained(policy_dir, trained_options(frozen, lora.is_some()))?;
        policy.prepare(lora.is_some());
        let reference = match (&lora, config.legacy.num_shared_layers) {
            (Some(lora), _) => {
                policy.add_adapter(lora, config.run.seed)?;
                policy.base()?
            }
            (None, Some(layers)) => policy.share_lower_layers(layers)?,
            (None, None) => {
                let mut reference = CausalLm::from_pretrained(policy_dir, frozen)?;
                reference.merge_adapter();
                reference
            }
        };
        let mut roundings_found = roundings(policy_dir, config.run.dtype, policy.was_rounded(), policy.rounded_base());
        tokenizer.check_fits(policy.config(), policy_dir)?;
        let mut rewards = Rewards::load(specs, config, &tokenizer, frozen)?;
        rewards.extend(more);
        if let Some(metric) = &config.eval.metric_for_best_model
            && let Some(name) = metric.strip_prefix(EVAL_SCORES)
            && !rewards.names().any(|known| known == name)
        {
            let known = rewards.names().collect::<Vec<_>>().join(", ");
            let message = format!("metric_for_best_model = {metric}: expected the name of a reward, one of {known}");
            return Err(Error::Usage(message));
        }
        let read_ids = rewards.models().filter(|model| !model.reads_text());
        let mut checked: Vec<_> = read_ids.map(|model| model.dir().to_path_buf()).collect();
        let (policy, value): (CausalLm, ValueModel) = if config.legacy.value_head {
            let (policy, head) = CausalLmWithValueHead::found_in(policy_dir, policy, config.run.seed)?.into_parts();
            (policy, head.into())
        } else {
            let beginning = rewards.models().find(|model| model.can_be_value_model()).map(RewardModel::dir);
            let (value_dir, value_head) = match (own_value_dir.as_deref(), beginning) {
                (Some(dir), _) | (None, Some(dir)) => (dir, new_head),
                // What reads other ids than the policy, or says more than one number, cannot be a value model's beginning.
                (None, None) => (policy_dir.as_path(), Some(config.run.seed)),
            };
            let trained = trained_options(frozen, value_lora.is_some());
            let mut value = SequenceClassifier::from_pretrained(value_dir, value_head, trained)?;
            value.check_values(value_dir)?;
            value.prepare(value_lora.is_some());
            if let Some(lora) = &value_lora {
                // PEFT knows no other names.
                value.set_format(ClassifierFormat::Transformers)?;
                value.add_adapter(lora, config.run.seed)?;
            }
            let found = roundings(value_dir, config.run.dtype, value.was_rounded(), value.rounded_base());
            roundings_found.extend(found);
            checked.push(value_dir.to_path_buf());
            (policy, value.into())
        };
        for dir in &checked {
            tokenizer.check_same(dir)?;
        }
        let learner = Learner::new(policy, value, config);
        let room = room_for_prompts(&learner, &reference, &rewards, config.response_length)?;
        let vocab = learner.policy.config().vocab_size;
        let limit = PromptLimit::new(&config.prompt_length, room)?;
        let read = |dataset: &Dataset| {
            dataset.check(|row| rewards.check_row(row))?;
            dataset.prompts_within(&tokenizer, vocab, limit)
        };
        let (mut train, mut eval) = sources.read(config.run.seed, Step::Ppo)?;
        inputs.rows("dataset_name", &config.data.describe(), &train);
        inputs.rows("rows held out", &config.data.describe(), &eval);
        if config.apply_chat_template {
            train = train.into_iter().map(Dataset::with_chat_prompts).collect();
            eval = eval.map(Dataset::with_chat_prompts);
        }
        // Where long ones are dropped, others take their places.
        if config.prompt_length.long_prompts != LongPrompts::Drop {
            eval = eval.map(|eval| eval.first(SAMPLE_ROWS.max(config.num_eval_prompts)));
        }
        let (train, eval) = (gather(&train, read)?, gather(eval.as_slice(), read)?);
        let cursor = train.cursor(config.run.seed, &config.data);
        let (prompts, eval_prompts) = (train.rows, eval.rows);
        let prompt_notes = [roundings_found, train.warnings, eval.warnings].concat();
        let cuts = match config.prompt_length.long_prompts {
            LongPrompts::TruncateLeft => Some("truncate_left"),
            LongPrompts::TruncateRight => Some("truncate_right"),
            LongPrompts::Error | LongPrompts::Drop => None,
        };
        let all = || prompts.iter().chain(&eval_prompts);
        let renders = |model: &&RewardModel| all().any(|prompt| model.conversation(&prompt.row).is_some());
        if let Some(cuts) = cuts.filter(|_| !prompt_notes.is_empty())
            && let Some(model) = rewards.models().find(renders)
        {
            return Err(Error::Usage(format!(
                "long_prompts = {cuts}: {} reads a whole conversation by its own chat template, and would score answers to \
                 what was cut as if they were answers to that: expected drop or error",
                model.dir().display()
            )));
        }
        let parts = PpoParts { learner, reference, rewards, tokenizer, prompts, eval_prompts };
        let mut trainer = Self::new(config, parts)?;
        (trainer.cursor, trainer.prompt_notes, trainer.commits) = (cursor, prompt_notes, asked.commits());
        trainer.inputs.replace("PpoParts::prompts", inputs);
        trainer.note_whole();
        Ok(trainer)
    }

    /// A run of `parts` that the caller has in hand. Nothing is loaded: what `config` says of models, rewards and data are names
    /// for the model card, and a resumed run must have the same.
    ///
    /// A checkpoint holds the learner, and neither reference nor prompts: who resumes brings the same parts once more.
    ///
    /// # Errors
    /// If a setting is out of its range, there is no reward or no prompt, or the parts do not go together: a model is on another
    /// device than the policy, knows fewer tokens, or has no room for a prompt and its response.
    pub fn new(config: &PpoConfig, parts: PpoParts) -> Result<Self> {
        config.check()?;
        let PpoParts { mut learner, mut reference, rewards, tokenizer, prompts, eval_prompts } = parts;
        reference.hold_as_computed();
        let vocab = learner.policy.config().vocab_size;
        let room = room_for_prompts(&learner, &reference, &rewards, config.response_length)?;
        check_prompts("prompts", &prompts, room, vocab)?;
        check_prompts("eval_prompts", &eval_prompts, room, vocab)?;
        for (name, is_empty) in [("rewards", rewards.is_empty()), ("prompts", prompts.is_empty())] {
            if is_empty {
                return Err(Error::Usage(format!("PpoParts::{name}: expected at least one, found none")));
            }
        }
        let first = |prompts: &[Prompt], rows| prompts.iter().take(rows).cloned().collect::<Vec<_>>();
        let sample_prompts = first(if eval_prompts.is_empty() { &prompts } else { &eval_prompts }, SAMPLE_ROWS);
        let eval_prompts = first(&eval_prompts, config.num_eval_prompts);
        let mut all = prompts.iter().chain(&sample_prompts).chain(&eval_prompts);
        all.try_for_each(|prompt| rewards.check_row(&prompt.row))?;
        let (stop, stop_strings) = (stop_tokens(config, &tokenizer)?, stop_strings(config, &tokenizer)?);
        learner.policy.set_generation(generation_settings(config));
        check_ends(config, &tokenizer, vocab, &stop)?;
        let plan = config.plan(prompts.len())?;
        let left_out = left_out_of_losses(config.counts.eos_in_loss, &tokenizer, learner.policy.config());
        if learner.unsupervised.is_none() {
            let block = config.prompt_length.max_prompt_length.unwrap_or(room).min(room) + config.response_length;
            learner.unsupervised = Unsupervised::find(&config.unsupervised, &tokenizer, vocab, block, config.run.seed)?;
        }
        let mut inputs = Inputs::default();
        let ids: Vec<&[i64]> = prompts.iter().map(|prompt| prompt.tokens.as_slice()).collect();
        inputs.values("PpoParts::prompts", "the caller's", &ids);
        if let (Some(texts), Some(name)) = (&learner.unsupervised, &config.unsupervised.unsupervised_dataset_name) {
            inputs.values("unsupervised_dataset_name", &name.display().to_string(), texts.blocks());
        }
        let mut trainer = Self {
            kl_controller: KlController::new(config, plan.num_total_batches),
            scaling: ScoreScaling::new(&config.legacy),
            plan,
            learner,
            cursor: Cursor::new(config.run.seed, prompts.len()),
            order: None,
            schedule: None,
            sample_prompts,
            eval_prompts,
            prompt_notes: Vec::new(),
            commits: Commits::new(),
            inputs,
            config: config.clone(),
            reference,
            rewards,
            tokenizer,
            prompts,
            stop,
            stop_strings,
            left_out,
            kept: KeptAnswers::new(config.counts.min_response_length),
            answers: Vec::new(),
            last_metrics: Metrics::default(),
            checks: None,
            skips: Skips::default(),
            alarms: Alarms::default(),
            warnings: Vec::new(),
            best: Best::new(&config.eval),
            done: 0,
            whole: (Map::new(), 0),
            console: Console::Silent,
            hold: None,
            begun: false,
        };
        trainer.note_whole();
        Ok(trainer)
    }

    /// Has `order` say which rows of the prompts an update answers, `plan.batch_size` of them, in place of shuffled passes.
    ///
    /// Updates count from 0. A resumed run asks for those alone that are left: what `order` says should follow from the number.
    #[must_use]
    pub fn with_order(mut self, order: impl FnMut(usize) -> Vec<usize> + Send + 'static) -> Self {
        self.order = Some(PerUpdate(Box::new(order)));
        self.note_whole();
        self
    }

    /// Has `schedule` say the learning rates of an update, in place of the settings; asked as [`PpoTrainer::with_order`] is.
    #[must_use]
    pub fn with_schedule(mut self, schedule: impl FnMut(usize) -> LearningRates + Send + 'static) -> Self {
        self.schedule = Some(PerUpdate(Box::new(schedule)));
        self.note_whole();
        self
    }

    /// Runs all updates that are left, as the settings say: goes on from the checkpoint that they name, writes metrics,
    /// samples and checkpoints to `output_dir`, and policy and value model at the end. Gives how many updates are done.
    ///
    /// # Errors
    /// If `output_dir` holds something, the checkpoint is not of a run like this one, a number stops being finite, or a file
    /// cannot be written; [`Error::Stopped`] after [`crate::run::report::request_stop`]. What can be saved is saved all the same.
    pub fn train(&mut self) -> Result<usize> {
        self.train_with(|_| ControlFlow::Continue(()))
    }

    /// [`PpoTrainer::train`], and tells `watcher` what happens.
    ///
    /// A break ends the run after the update that it is in, with a checkpoint and the models in `output_dir`; before the first
    /// update there is nothing to keep. It goes on from there if this is called again, on this trainer, or on another with
    /// `resume_from_checkpoint`.
    ///
    /// # Errors
    /// As [`PpoTrainer::train`]; that `watcher` ended the run is none.
    pub fn train_with(&mut self, watcher: impl FnMut(&Event<'_>) -> ControlFlow<()>) -> Result<usize> {
        let (mut start, mut warnings) = (Start { in_place: true, ..Start::default() }, Vec::new());
        if !self.begun {
            let hold = self.hold.take().map_or_else(|| Hold::take(&self.config.run.output_dir), Ok)?;
            (start, warnings) = begin(&self.config)?;
            if let Some(saved) = &start.from {
                warnings.extend(self.load_checkpoint(saved, start.in_place)?);
                warnings.extend(saved.threads_warning());
            }
            self.hold = Some(claim_output_dir(&self.config.run, &start, hold, &self.config)?);
            self.begun = true;
        }
        let (run, total) = (&self.config.run, self.plan.num_total_batches);
        let reached = Reached { updates: self.done, recorded: self.done };
        let mut report = begin_report(run, &start, total, reached, &warnings, self.console)?;
        report.settings(&self.config)?;
        report.watch(watcher);
        let done = self.run(&mut report);
        report.finish();
        // A base that an earlier run left here stays as it is.
        let kept = if self.done > 0 { self.keep_bases() } else { Ok(()) };
        let out = &self.config.run.output_dir;
        // Also after an error: a step that is not finite is never taken, so the weights are those of the step before. But what
        // has not learnt is where it began, and a model in `out` would keep the run from beginning again there.
        let saved = (self.done > 0).then(|| {
            kept.and_then(|()| {
                leave_model(out, COMMAND, &self.config, (self.done, total), &done, || self.save_model(out))
            })
        });
        if let Some(Ok(())) = saved {
            report.left(out);
        }
        let done = conclude(done, saved, total, out)?;
        if done > reached.updates {
            let row = self.sample_prompts.first().map(|prompt| &prompt.row);
            report.ends(done, &OUTCOME, &[command_to_try(out, row, Some(self.config.response_length))]);
        }
        Ok(done)
    }

    /// Runs all updates that are left, or those until the report is stopped, and saves checkpoints and the best model as the
    /// settings say. A run that ends early leaves a checkpoint in any case, unless it ends in the midst of an update that has
    /// changed weights.
    fn run(&mut self, report: &mut Reporter<'_>) -> Result<usize> {
        let total = self.plan.num_total_batches;
        let mut checkpoints = Checkpoints::new(COMMAND, &self.config.run, &self.config, total, self.done)?;
        let ended = self.run_updates(report, &mut checkpoints);
        let is_whole = self.learner.steps() == self.whole.1;
        let wanted = is_whole && checkpoints.is_wanted_at_end(self.done);
        leave_checkpoint(ended, wanted, report, |report| self.save_checkpoint(&mut checkpoints, report))
    }

    fn run_updates(&mut self, report: &mut Reporter<'_>, checkpoints: &mut Checkpoints) -> Result<usize> {
        let small = small_dataset(&self.config.data, self.prompts.len(), self.plan.batch_size);
        let small = small.filter(|_| self.order.is_none());
        self.prompt_notes.iter().chain(&small).for_each(|warning| report.warn(warning));
        for model in self.rewards.models().filter(|model| model.classifier().has_new_head()) {
            report.warn(&format!(
                "{}: the reward model has a fresh random head, so its scores mean nothing yet; train it by `rlhf reward`",
                model.dir().display()
            ));
        }
        self.tell_beginning(report);
        for model in self.rewards.models().filter(|model| model.reads_text()) {
            report.note(&format!("{}: reads the decoded text, by its own tokenizer", model.dir().display()));
        }
        self.learner.unsupervised.iter().for_each(|texts| report.note(&texts.describe()));
        if self.learner.value.has_new_head() {
            let name = if self.learner.value.model().is_some() { "model" } else { "head on the policy's trunk" };
            report.note(&format!("value {name}: begins with a fresh head"));
        }
        if !self.config.watch.no_checks {
            report.phase("checking");
            self.check_aloud(report)?;
        }
        let total = self.plan.num_total_batches;
        self.write_best(report)?;
        if self.done == 0 && self.config.eval.eval_steps.is_some() {
            report.phase("evaluating");
            let evaluation = self.evaluate()?;
            let mut metrics = Metrics::default();
            metrics.push("step", 0.0);
            metrics.push("episode", 0.0);
            metrics.extend(&evaluation.metrics);
            report.record_alone(0, &metrics)?;
            report.evaluation(0, 0, &evaluation)?;
        }
        if self.done == 0 && self.plan.sample_every.is_some() {
            report.phase("samples");
            let samples = self.samples(0)?;
            report.samples(0, 0, &samples)?;
        }
        report.updates_begin();
        while self.done < self.last_update() && !report.stopped() {
            let mut metrics = self.one_update(&|phase| report.phase(phase))?;
            let done = self.done + 1;
            let episode = done * self.plan.batch_size;
            let evaluates = is_due(self.config.eval.eval_steps, done, total);
            if evaluates {
                report.phase("evaluating");
            }
            let evaluated = if evaluates { self.evaluate().map(Some) } else { Ok(None) };
            if let Ok(Some(evaluation)) = &evaluated {
                metrics.extend(&evaluation.metrics);
            }
            report.record(done as i64, &metrics)?;
            let answers = std::mem::take(&mut self.answers);
            if !answers.is_empty() {
                report.answers(done, episode, &answers)?;
            }
            report.advance(watched(&metrics));
            // What fails from here on takes no update with it.
            self.done = done;
            let looks = if self.config.eval.eval_steps.is_some() { evaluates } else { checkpoints.is_due(done) };
            let looked = if evaluated.is_ok() { self.look_at_best(&metrics, looks) } else { Ok(None) };
            self.note_whole();
            let missing = |e| Error::Run(format!("the evaluation after update {done}, which is missing now: {e}"));
            if let Some(evaluation) = evaluated.map_err(missing)? {
                report.evaluation(done, episode, &evaluation)?;
            }
            let too_many = self.note_skips().err();
            for warning in &self.warnings {
                report.warning(done, warning);
            }
            too_many.map_or(Ok(()), Err)?;
            if is_due(self.plan.sample_every, done, total) {
                report.phase("samples");
                let samples = self.samples(done)?;
                report.samples(done, episode, &samples)?;
            }
            looked?.iter().for_each(|warning| report.warn(warning));
            report.phase("saving");
            self.write_best(report)?;
            if checkpoints.is_due(done) {
                self.save_checkpoint(checkpoints, report)?;
            }
        }
        Ok(self.done)
    }

    /// Tells how the run begins: by what it is computed, how much there is to do, from what.
    fn tell_beginning(&self, report: &Reporter<'_>) {
        let (config, plan) = (&self.config, &self.plan);
        let mut facts = Vec::from(describe_machine(&config.run, self.learner.policy.device()));
        let left = match self.done {
            0 => String::new(),
            done => format!(", {done} of them done"),
        };
        facts.push(("updates", format!("{}{left}", plan.num_total_batches)));
        let (rows, most) = (plan.batch_size, config.response_length);
        facts.push(("an update", format!("{rows} responses of at most {most} tokens")));
        facts.push(("rewards", self.rewards.describe()));
        facts.push(("prompts", format!("{}, {} rows", config.data.describe(), self.prompts.len())));
        facts.push(("tokenizer", self.tokenizer.describe()));
        let trained = |(name, trained): (&'static str, String)| {
            (name.trim_start_matches("trained parameters, "), format!("{trained} of its parameters are trained"))
        };
        facts.extend(self.trained().into_iter().map(trained));
        let tokens = self.learner.micro_batch_tokens;
        facts.push((
            "micro-batches",
            describe_micro_batch(&config.run, tokens, |on| self.learner.policy.activation_bytes(on)),
        ));
        report.begins(
            &format!("rlhf ppo: {} into {}", config.sft_model_path.display(), config.run.output_dir.display()),
            &facts,
        );
    }

    /// What each part remembers beside weights and optimizers, by its name; each has a line here and one in
    /// [`PpoTrainer::load_state`].
    fn state(&self) -> Map<String, Value> {
        let (run, device) = (&self.config.run, self.learner.policy.device());
        let mut state = fixed_state(run, device, self.learner.micro_batch_tokens, &self.commits, &self.inputs);
        state.insert("cursor".into(), self.cursor.state());
        state.insert("rewards".into(), self.rewards.state());
        state.insert("kl_controller".into(), self.kl_controller.state());
        state.extend(self.learner.unsupervised.as_ref().map(|texts| ("unsupervised".into(), texts.state())));
        state.extend(self.kept.state().map(|kept| ("kept_answers".into(), kept)));
        state.insert("scores".into(), self.scaling.state());
        state.extend(self.best.as_ref().map(|best| ("best".into(), best.state())));
        state.insert("skips".into(), self.skips.state());
        state.insert("alarms".into(), self.alarms.state());
        state.extend(self.learner.scaling.as_ref().map(|scaling| (LOSS_SCALE.into(), scaling.state())));
        state.extend(self.checks.as_ref().map(|checks| ("checks".into(), checks.as_str().into())));
        state.extend(self.own().map(|own| ("own".into(), own.into())));
        state
    }

    /// What the caller says of each update.
    fn own(&self) -> Option<&'static str> {
        match (&self.order, &self.schedule) {
            (None, None) => None,
            (Some(_), None) => Some("an order"),
            (None, Some(_)) => Some("a schedule"),
            (Some(_), Some(_)) => Some("an order and a schedule"),
        }
    }

    fn load_state(&mut self, saved: &Saved) -> Result<()> {
        let began = saved.part("own").ok().and_then(Value::as_str);
        if began != self.own() {
            let [began, found] = [began, self.own()].map(|own| own.unwrap_or("nothing"));
            return Err(Error::Run(format!("of the caller's own: expected {began}, as the run began, found {found}")));
        }
        load_cursor(&mut self.cursor, saved, &self.config.run)?;
        self.rewards.load_state(saved.part("rewards")?)?;
        self.kl_controller.load_state(saved.part("kl_controller")?)?;
        if let Some(texts) = &mut self.learner.unsupervised {
            texts.load_state(saved.part("unsupervised")?)?;
        }
        self.kept.load_state(saved.part("kept_answers").ok(), self.prompts.len())?;
        if self.config.legacy.use_score_scaling {
            self.scaling.load_state(saved.part("scores")?)?;
        }
        if let (Some(best), Ok(state)) = (&mut self.best, saved.part("best")) {
            best.load_state(state);
        }
        if let (Some(scaling), Ok(state)) = (&mut self.learner.scaling, saved.part(LOSS_SCALE)) {
            scaling.load_state(state)?;
        }
        if let Ok(state) = saved.part("skips") {
            self.skips.load_state(state);
        }
        if let Ok(state) = saved.part("alarms") {
            self.alarms.load_state(state);
        }
        self.checks = saved.part("checks").ok().and_then(Value::as_str).map(String::from);
        Ok(())
    }

    /// Takes note of the state of all parts: an update is whole.
    fn note_whole(&mut self) {
        self.whole = (self.state(), self.learner.steps());
    }

    /// Writes a checkpoint of the last whole update, after which no weight has changed.
    fn save_checkpoint(&mut self, checkpoints: &mut Checkpoints, report: &mut Reporter<'_>) -> Result<()> {
        report.sync()?;
        self.keep_bases()?;
        let told = |&(name, _): &(&str, usize)| Some((name.to_string(), self.last_metrics.get(name)?.into()));
        let metrics = CARD_METRICS.iter().filter_map(told).collect();
        checkpoints.save(self.done, metrics, self.whole.0.clone(), |dir| {
            self.write_models(dir)?;
            self.learner.policy_optimizer.save(&dir.join(OPTIMIZER))?;
            let of_value = self.learner.value_optimizer.as_ref();
            of_value.map_or(Ok(()), |optimizer| optimizer.save(&dir.join(VALUE_MODEL).join(OPTIMIZER)))
        })?;
        report.saved(&checkpoints.place(self.done));
        Ok(())
    }

    /// Writes the bases of adapters, if no folder holds them, once for all checkpoints: they never change.
    fn keep_bases(&mut self) -> Result<()> {
        let out = &self.config.run.output_dir;
        let (eos, pad, most) = (self.tokenizer.eos_ids(), self.tokenizer.pad(), self.config.run.max_shard_size.0);
        self.learner.policy.keep_base(&out.join(BASE_MODEL), eos, pad, most)?;
        let value = self.learner.value.model_mut();
        value.map_or(Ok(()), |value| value.keep_base(&out.join(VALUE_MODEL).join(BASE_MODEL), eos, pad, most))
    }

    /// Goes to where `saved` was written; gives what a person should know.
    ///
    /// # Errors
    /// If it is not of a run like this one.
    fn load_checkpoint(&mut self, saved: &Saved, in_place: bool) -> Result<Vec<String>> {
        let (updates, rows) = (self.plan.num_total_batches, self.plan.batch_size);
        let warnings = saved.check_inputs(&self.config.run.checkpoints, &self.inputs, updates, rows)?;
        self.load_state(saved).map_err(|e| Error::invalid(&saved.dir, e.to_string()))?;
        let value_dir = saved.dir.join(VALUE_MODEL);
        self.learner.policy.load_trained(&saved.dir)?;
        if let Some(ema) = &mut self.learner.ema {
            ema.load(&mut self.learner.policy, |policy| policy.load_trained(&saved.dir.join(EMA)))?;
        }
        self.learner.policy_optimizer.load(&saved.dir.join(OPTIMIZER))?;
        if let (Some(value), Some(optimizer)) = (self.learner.value.model_mut(), &mut self.learner.value_optimizer) {
            value.load_trained(&value_dir)?;
            optimizer.load(&value_dir.join(OPTIMIZER))?;
        }
        for (name, _) in CARD_METRICS {
            if let Some(value) = saved.state.metrics.get(name).and_then(Value::as_f64) {
                self.last_metrics.push(name, value);
            }
        }
        let (run, device) = (&self.config.run, self.learner.policy.device());
        self.learner.micro_batch_tokens = kept_micro_batch_tokens(run, device, self.learner.micro_batch_tokens, saved);
        let other_prompts = *saved.setting("num_eval_prompts") != self.config.num_eval_prompts;
        let by_prompts = self.best.as_ref().is_some_and(Best::is_of_evaluations);
        if !in_place || (by_prompts && other_prompts) {
            // The best model lies in the other folder, or was the best at something else.
            self.best = Best::new(&self.config.eval);
        }
        self.done = saved.state.update;
        self.note_whole();
        Ok(warnings)
    }

    /// Notes that the models are the best ones where the chosen metric says so, if this update `looks` at it; gives what to warn
    /// of.
    ///
    /// # Errors
    /// If there was no such metric from the first update on that the policy learnt in.
    fn look_at_best(&mut self, metrics: &Metrics, looks: bool) -> Result<Option<String>> {
        let frozen = self.done <= self.config.value.value_warmup_updates;
        self.best.as_mut().map_or(Ok(None), |best| best.look(metrics, self.done, looks, frozen))
    }

    /// Writes the best models, if they are those of now and not written yet: after a write that failed, also when the run goes on
    /// from there.
    ///
    /// # Errors
    /// If a file cannot be written.
    fn write_best(&mut self, report: &mut Reporter<'_>) -> Result<()> {
        if self.best.is_none() {
            return Ok(());
        }
        self.keep_bases()?;
        let Some(mut best) = self.best.take() else { return Ok(()) };
        let written = best.write(&self.config.run.output_dir, self.done, |dir| self.write_models(dir));
        self.best = Some(best);
        self.note_whole();
        written?.iter().for_each(|dir| report.saved(dir));
        Ok(())
    }

    /// Answers the prompts that are held out as training does; changes nothing.
    ///
    /// # Errors
    /// If there are none; if a reward fails.
    pub fn evaluate(&mut self) -> Result<Evaluation> {
        if self.eval_prompts.is_empty() {
            let message = "evaluate: expected prompts that are held out, found none; a dataset's split, eval_split_size or \
                           PpoParts::eval_prompts gives some";
            return Err(Error::Usage(message.into()));
        }
        let began = Instant::now();
        let asked = self.eval_prompts.clone();
        let asked: Vec<&Prompt> = asked.iter().collect();
        let prompts: Vec<Vec<i64>> = asked.iter().map(|prompt| prompt.tokens.clone()).collect();
        let sampling = self.config.sampling();
        // The same draws each time: where two evaluations differ, the policy does.
        let responses = self.generate(&prompts, sampling, Purpose::Evaluation, 0)?;
        let (scores, components) = self.whole_scores(&asked, &responses)?;
        let samples = self.sample_rows(&asked, &responses, &scores, &components)?;
        let judges = Judges { policy: &self.learner.policy, reference: &self.reference, value: &self.learner.value };
        let recompute = self.recomputes_logprobs();
        let e = experience(judges, &prompts, &responses, scores, recompute, &self.config)?;
        let rows = prompts.len() as f64;
        let per_row = |x: &Tensor| x.sum(Kind::Double).double_value(&[]) / rows;
        let mut m = Metrics::default();
        m.push("eval/score", per_row(&e.scores));
        for ComponentScores { name, scores, .. } in &components {
            m.push(format!("{EVAL_SCORES}{name}"), scores.iter().sum::<f64>() / rows);
        }
        m.push("eval/kl", per_row(&(&e.logprobs - &e.ref_logprobs)));
        m.push("eval/response_length", e.lengths.iter().sum::<i64>() as f64 / rows);
        m.push("time/eval", began.elapsed().as_secs_f64());
        Ok(Evaluation { metrics: m, samples })
    }

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

    /// Adds what is to be said of the skipped steps of the last update to its warnings.
    ///
    /// # Errors
    /// If as many updates in a row as `max_skipped_updates` took no step.
    fn note_skips(&mut self) -> Result<()> {
        let message = self.skips.tell(self.done, self.config.watch.max_skipped_updates)?;
        self.warnings.extend(message.map(|message| Warning { kind: WarningKind::SkippedSteps, message }));
        Ok(())
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

    /// Updates after which the run ends: all, or those of a test.
    fn last_update(&self) -> usize {
        let (trial, total) = (&self.config.trial, self.plan.num_total_batches);
        if trial.enable_test_mode { (trial.test_stop_step + 1).max(self.done).min(total) } else { total }
    }

    /// Whether the answers of update `update` are shown.
    fn shows_answers(&self, update: usize) -> bool {
        let trial = &self.config.trial;
        trial.print_answers && update.is_multiple_of(trial.print_answers_interval)
    }

    /// Writes the policy with tokenizer and model card to `dir`, and the value model, where it is one of its own, to
    /// `dir/value_model`: folders that transformers opens.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save_model(&self, dir: &Path) -> Result<()> {
        replace_files(dir, |dir| self.write_policy(dir))?;
        if self.learner.value.model().is_some() {
            replace_files(&dir.join(VALUE_MODEL), |dir| self.write_value_model(dir))?;
        }
        if self.learner.ema.is_some() {
            replace_files(&dir.join(EMA), |dir| self.write_ema(dir))?;
        }
        let mut facts = vec![
            ("policy started from", format!("`{}`", self.config.sft_model_path.display())),
            ("rewards", self.rewards.describe()),
            ("prompts", format!("`{}`, {} rows", self.config.data.describe(), self.prompts.len())),
            ("tokenizer", self.tokenizer.describe()),
        ];
        facts.extend(self.trained());
        facts.extend(self.checks.clone().map(|checks| ("checks", checks)));
        for (name, decimals) in CARD_METRICS {
            facts.extend(self.last_metrics.get(name).map(|value| (name, format!("{value:.decimals$}"))));
        }
        let (base_model, is_adapter) = (Some(self.config.sft_model_path.as_path()), self.learner.policy.has_adapter());
        Card { command: COMMAND, base_model, is_adapter, facts: &facts }.write(dir)
    }

    /// Writes both models with tokenizers to a folder that nothing is in.
    fn write_models(&self, dir: &Path) -> Result<()> {
        self.write_policy(dir)?;
        self.write_ema(&dir.join(EMA))?;
        self.write_value_model(&dir.join(VALUE_MODEL))
    }

    /// Writes the moving average of the policy as the policy is written, if there is one.
    fn write_ema(&self, dir: &Path) -> Result<()> {
        let Some(ema) = &self.learner.ema else { return Ok(()) };
        ema.with(&self.learner.policy, |_| self.write_policy(dir))
    }

    fn write_policy(&self, dir: &Path) -> Result<()> {
        let (pad, most) = (self.tokenizer.pad(), self.config.run.max_shard_size.0);
        // What ended its responses in training ends them elsewhere.
        let mut eos = self.tokenizer.eos_ids().to_vec();
        eos.extend(self.stop.iter().filter(|id| !self.tokenizer.eos_ids().contains(id)));
        self.learner.policy.save_pretrained(dir, &eos, pad, most)?;
        self.tokenizer.save_pretrained(dir)
    }

    fn write_value_model(&self, dir: &Path) -> Result<()> {
        let Some(value) = self.learner.value.model() else { return Ok(()) };
        let (eos, pad, most) = (self.tokenizer.eos_ids(), self.tokenizer.pad(), self.config.run.max_shard_size.0);
        value.save_pretrained(dir, eos, pad, most)?;
        self.tokenizer.save_pretrained(dir)
    }

    /// How many numbers of the models are trained.
    fn trained(&self) -> Vec<(&'static str, String)> {
        let mut trained = vec![("trained parameters, policy", trained_share(self.learner.policy.params()))];
        let value = self.learner.value.model().map(|value| trained_share(value.params()));
        trained.extend(value.map(|value| ("trained parameters, value model", value)));
        trained
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

    /// Answers a few prompts and compares what the passes of a run say of the answers; changes nothing.
    ///
    /// # Errors
    /// As [`PpoTrainer::train`].
    pub fn check(&mut self) -> Result<Checks> {
        let sampling = Sampling::at_temperature(self.config.logprob_temperature());
        let response_length = self.config.response_length.min(checks::TOKENS);
        let generation = GenerationConfig {
            max_new_tokens: response_length,
            min_new_tokens: 0,
            repetition_penalty: 1.0,
            keep_sets: false,
            ..self.generation(sampling, Purpose::Samples, 0)
        };
        let rows = self.prompts.len().min(self.plan.micro_batch_size).min(checks::ROWS);
        let prompts: Vec<Vec<i64>> = self.prompts[..rows].iter().map(|prompt| prompt.tokens.clone()).collect();
        let responses = generate(&self.learner.policy, &prompts, &generation)?;
        let config = PpoConfig { response_length, ..self.config.clone() };
        Checks::of(&mut self.learner, &self.reference, &prompts, &responses, &config)
    }

    /// [`PpoTrainer::check`], and says how it went.
    ///
    /// # Errors
    /// If something is not as it should be; in bf16 and f16, whose rounding has no sharp bound, that is a warning.
    fn check_aloud(&mut self, report: &Reporter<'_>) -> Result<()> {
        let (few_bits, checks) = (self.config.run.computes_in_few_bits(), self.check()?);
        match checks.failure(Checks::tolerance(few_bits)) {
            None => report.checked(&checks.to_string()),
            Some(failure) if few_bits => report.warn(&failure),
            Some(failure) => return Err(Error::Run(failure)),
        }
        // A run that goes on tells what it found when it began.
        self.checks.get_or_insert_with(|| checks.to_string());
        self.note_whole();
        Ok(())
    }

    /// Scores less the penalty of responses that did not stop, and how often each response holds a token that should end
    /// it: a stop token, or eos where none is set. One that ends with a stop string has stopped too.
    fn penalised(&self, scored: &Scored, responses: &[Response]) -> (Scores, Vec<usize>) {
        let end = if self.stop.is_empty() { self.tokenizer.eos_ids() } else { &self.stop };
        let ends: Vec<usize> =
            responses.iter().map(|r| r.tokens.iter().filter(|id| end.contains(id)).count()).collect();
        let stopped = ends.iter().zip(responses).map(|(&count, r)| count > 0 || r.finish == FinishReason::Stop);
        let stopped: Vec<bool> = stopped.collect();
        let mut scores = scored.to_scores(self.learner.policy.device());
        match self.config.missing_eos_penalty {
            Some(penalty) => scores.responses = penalise_missing_stop(&scores.responses, &stopped, penalty),
            None if self.config.non_eos_penalty => {
                let value = self.config.penalty_reward_value;
                scores.responses = replace_missing_stop(&scores.responses, &stopped, value);
                // What is replaced is all that a response got.
                let of_tokens = scores.tokens.iter_mut().flatten().zip(&stopped);
                of_tokens.filter(|(_, stopped)| !**stopped).for_each(|(row, _)| row.fill(0.0));
            }
            None => {}
        }
        (scores, ends)
    }

    /// Greedy answers to the sample prompts, with their scores.
    fn samples(&mut self, update: usize) -> Result<Vec<Sample>> {
        let prompts: Vec<Vec<i64>> = self.sample_prompts.iter().map(|prompt| prompt.tokens.clone()).collect();
        let responses = self.generate(&prompts, Sampling::Greedy, Purpose::Samples, update)?;
        let asked = self.sample_prompts.clone();
        let asked: Vec<&Prompt> = asked.iter().collect();
        let (scores, components) = self.whole_scores(&asked, &responses)?;
        self.sample_rows(&asked, &responses, &scores, &components)
    }

    /// The whole score of each response without running moments, less the penalty, `[B]`: comparable over a run.
    fn raw_scores(&self, scored: &Scored, responses: &[Response]) -> Tensor {
        let raw = scored.raw.clone();
        let whole = Scored { responses: raw.clone(), tokens: None, raw, components: Vec::new() };
        self.penalised(&whole, responses).0.responses
    }

    /// [`PpoTrainer::raw_scores`] of responses, and what each reward said; nothing learns from them.
    fn whole_scores(&mut self, prompts: &[&Prompt], responses: &[Response]) -> Result<(Tensor, Vec<ComponentScores>)> {
        let scored = self.rewards.score_responses(&self.tokenizer, prompts, responses, false)?;
        Ok((self.raw_scores(&scored, responses), scored.components))
    }

    fn sample_rows(
        &self,
        prompts: &[&Prompt],
        responses: &[Response],
        scores: &Tensor,
        components: &[ComponentScores],
    ) -> Result<Vec<Sample>> {
        let scores = Vec::<f64>::try_from(scores.to_kind(Kind::Double))?;
        prompts
            .iter()
            .zip(responses)
            .zip(scores)
            .enumerate()
            .map(|(row, ((prompt, response), score))| {
                let components = components.iter().map(|c| (c.name.clone(), c.scores[row])).collect();
                Ok(Sample {
                    prompt: prompt.text.clone(),
                    response: self.tokenizer.decode(&response.tokens)?,
                    score,
                    components,
                    finish_reason: Some(response.finish),
                    num_tokens: Some(response.tokens.len()),
                    conversation: Conversation::of(&prompt.row, &prompt.text),
                })
            })
            .collect()
    }
}

/// How many tokens a prompt may have, such that all models that read ids have room for it and its response.
///
/// # Errors
/// If there is no room at all, or a model cannot read what the policy writes: it is on another device, or knows fewer tokens.
fn room_for_prompts(
    learner: &Learner,
    reference: &CausalLm,
    rewards: &Rewards,
    response_length: usize,
) -> Result<usize> {
    let policy = &learner.policy;
    let value = learner.value.model();
    let of_value = value.map(|value| ("value model", value.device()));
    for (name, device) in of_value.into_iter().chain([("reference", reference.device())]) {
        if device != policy.device() {
            let message = format!("{name}: expected the policy's device {:?}, found {device:?}", policy.device());
            return Err(Error::Usage(message));
        }
    }
    let read_ids = rewards.models().filter(|model| !model.reads_text());
    let of_rewards = read_ids.map(|model| (model.dir().display().to_string(), model.classifier().config()));
    let others = value.map(|value| ("value model".into(), value.config())).into_iter();
    let others = others.chain([("reference".into(), reference.config())]);
    let mut context = policy.config().max_position_embeddings;
    for (name, model) in of_rewards.chain(others) {
        // The policy may sample any of its ids, also those behind the tokenizer's last.
        let (expected, found) = (policy.config().vocab_size, model.vocab_size);
        if found < expected {
            let message = format!("{name}: vocab_size: expected at least the policy's {expected}, found {found}");
            return Err(Error::Run(message));
        }
        context = context.min(model.max_position_embeddings);
    }
    room_in(context, response_length)
}

fn is_same_folder(a: &Path, b: &Path) -> bool {
    a == b || a.canonicalize().is_ok_and(|a| b.canonicalize().is_ok_and(|b| a == b))
}

/// Checks the prompts of [`PpoParts`] that have this name there.
fn check_prompts(name: &str, prompts: &[Prompt], room: usize, vocab: i64) -> Result<()> {
    for (row, Prompt { tokens, .. }) in prompts.iter().enumerate() {
        let (found, strange) = (tokens.len(), tokens.iter().find(|id| !(0..vocab).contains(*id)));
        let problem = match strange {
            Some(id) => format!("ids below the policy's vocabulary of {vocab}, found {id}"),
            None if (1..=room).contains(&found) => continue,
            None => format!("1 to {room} tokens, the models' context less the response, found {found}"),
        };
        return Err(Error::Usage(format!("PpoParts::{name}: row {row}: expected {problem}")));
    }
    Ok(())
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

/// Whether the log-probabilities of sampling are not those that training takes.
pub(crate) fn recomputes_logprobs(policy: &CausalLm, config: &PpoConfig) -> bool {
    // Decoding notes those of the whole vocabulary.
    let filtered = config.sampling.logprobs_of == LogprobsOf::Filtered;
    filtered || !policy.is_exact() || config.logprob_temperature() != config.temperature
}

/// The tokens that end a response by the settings; none where nothing does.
///
/// # Errors
/// If it is eos, and the tokenizer has none.
pub fn stop_tokens(config: &PpoConfig, tokenizer: &Tokenizer) -> Result<Vec<i64>> {
    match (config.stop_token, config.stop_token_id) {
        (Some(StopToken::Eos), _) => {
            tokenizer.require_eos()?;
            Ok(tokenizer.eos_ids().to_vec())
        }
        (None, id) => Ok(Vec::from_iter(id)),
    }
}

/// The texts that end a response by the settings, as `tokenizer` makes them of tokens.
///
/// # Errors
/// If one of them is empty.
pub fn stop_strings(config: &PpoConfig, tokenizer: &Tokenizer) -> Result<Option<StopStrings>> {
    let strings = &config.sampling.stop_strings;
    (!strings.is_empty()).then(|| StopStrings::new(tokenizer, strings.clone())).transpose()
}

/// How the policy's responses are sampled in training, by the names of transformers' generation configuration; but for the
/// stop strings, without whose tokenizer transformers would refuse to generate.
fn generation_settings(config: &PpoConfig) -> Map<String, Value> {
    let how = &config.sampling;
    let settings = json!({
        "do_sample": true,
        "temperature": config.temperature,
        "top_k": how.top_k,
        "top_p": how.top_p,
        "min_p": how.min_p,
        "max_new_tokens": config.response_length,
    });
    let mut settings = settings.as_object().cloned().unwrap_or_default();
    if how.repetition_penalty != 1.0 {
        settings.insert("repetition_penalty".into(), how.repetition_penalty.into());
    }
    if how.min_new_tokens > 0 {
        settings.insert("min_new_tokens".into(), how.min_new_tokens.into());
    }
    settings
}

/// How update `update`, counted from 0, samples its responses, which end with one of the tokens `stop`; [`stop_strings`] come
/// from a tokenizer.
pub fn generation(config: &PpoConfig, stop: &[i64], update: usize) -> GenerationConfig {
    GenerationConfig {
        stop_token_ids: stop.to_vec(),
        seed: config.run.seed,
        purpose: Purpose::Sampling,
        step: update as u64,
        batch_size: config.local_rollout_forward_batch_size,
        repetition_penalty: config.sampling.repetition_penalty,
        min_new_tokens: config.sampling.min_new_tokens,
        keep_sets: config.sampling.logprobs_of == LogprobsOf::Filtered,
        ..GenerationConfig::new(config.sampling(), config.response_length)
    }
}

/// The order of an update's `rows` rows in each of its epochs, as [`Learner::optimise`] takes them.
pub fn mini_batch_orders(config: &PpoConfig, update: usize, rows: usize) -> Vec<Vec<usize>> {
    let epochs = 0..config.num_ppo_epochs as u64;
    let stream = |epoch| Stream::new(config.run.seed, Purpose::MiniBatches, update as u64, epoch);
    epochs.map(|epoch| stream(epoch).permutation(rows)).collect()
}

/// The end tokens of responses of `model` that are in no loss.
pub(crate) fn left_out_of_losses(eos_in_loss: EosInLoss, tokenizer: &Tokenizer, model: &ModelConfig) -> Vec<i64> {
    let eos = tokenizer.eos_ids().iter().copied();
    match eos_in_loss {
        EosInLoss::Always => Vec::new(),
        EosInLoss::Never => eos.collect(),
        EosInLoss::UnlessPad => eos.filter(|&id| Some(id) == deepspeed_chat_pad(tokenizer, model)).collect(),
    }
}

/// Which of the answers are trained on: those that are long enough, and in place of none of them the last that were.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct KeptAnswers {
    least: usize,
    /// Rows of the data with their answers.
    last: Option<(Vec<usize>, Vec<Response>)>,
}

/// What [`KeptAnswers::keep`] keeps.
#[derive(Debug, PartialEq)]
pub(crate) struct Kept {
    pub(crate) rows: Vec<usize>,
    pub(crate) responses: Vec<Response>,
    /// How many of the new ones are not among them.
    pub(crate) dropped: usize,
    /// Whether these are answers from before.
    pub(crate) again: bool,
}

impl KeptAnswers {
    /// Keeps answers of `least` tokens that count, and longer ones.
    pub(crate) fn new(least: usize) -> Self {
        Self { least, last: None }
    }

    /// Of these answers those to train on; tokens of `left_out` do not count.
    ///
    /// # Errors
    /// If none is long enough and none was before.
    pub(crate) fn keep(&mut self, rows: Vec<usize>, responses: Vec<Response>, left_out: &[i64]) -> Result<Kept> {
        if self.least == 0 {
            return Ok(Kept { rows, responses, dropped: 0, again: false });
        }
        let (all, counted) = (rows.len(), counted_tokens(&responses, left_out));
        let long = |&(_, &count): &(_, &i64)| count >= self.least as i64;
        let (rows, responses): (Vec<_>, Vec<_>) =
            rows.into_iter().zip(responses).zip(&counted).filter(long).map(|(answer, _)| answer).unzip();
        if !rows.is_empty() {
            self.last = Some((rows.clone(), responses.clone()));
            return Ok(Kept { dropped: all - rows.len(), rows, responses, again: false });
        }
        let (rows, responses) = self.last.clone().ok_or_else(|| {
            Error::Run(format!(
                "each of the first {all} answers has fewer than min_response_length = {} tokens before its end: there is \
                 nothing to learn from; look at what the policy answers, by `rlhf generate`",
                self.least
            ))
        })?;
        Ok(Kept { rows, responses, dropped: all, again: true })
    }

    /// What a checkpoint keeps of it, if anything: log-probabilities are taken anew.
    fn state(&self) -> Option<Value> {
        let (rows, responses) = self.last.as_ref()?;
        let tokens: Vec<&Vec<i64>> = responses.iter().map(|response| &response.tokens).collect();
        let stopped: Vec<bool> = responses.iter().map(|response| response.finish == FinishReason::Stop).collect();
        Some(json!({"rows": rows, "tokens": tokens, "stopped": stopped}))
    }

    /// Goes on from what [`KeptAnswers::state`] gave, over `prompts` prompts.
    fn load_state(&mut self, state: Option<&Value>, prompts: usize) -> Result<()> {
        let Some(state) = state.filter(|_| self.least > 0) else { return Ok(()) };
        let wrong =
            || Error::Run(format!("state of the last answers: expected rows, tokens and stopped, found {state}"));
        let part = |name: &str| state.get(name).cloned().unwrap_or_default();
        let rows: Vec<usize> = serde_json::from_value(part("rows")).map_err(|_| wrong())?;
        let tokens: Vec<Vec<i64>> = serde_json::from_value(part("tokens")).map_err(|_| wrong())?;
        let stopped: Vec<bool> = serde_json::from_value(part("stopped")).map_err(|_| wrong())?;
        if tokens.len() != rows.len() || stopped.len() != rows.len() || rows.iter().any(|&row| row >= prompts) {
            return Err(wrong());
        }
        let finish = |stopped| if stopped { FinishReason::Stop } else { FinishReason::Length };
        let responses = tokens.into_iter().zip(stopped);
        let responses = responses.map(|(tokens, stopped)| {
            let logprobs = vec![0.0; tokens.len()];
            Response { tokens, logprobs, finish: finish(stopped), sets: None }
        });
        self.last = Some((rows, responses.collect()));
        Ok(())
    }
}

/// The few numbers that people watch.
fn watched(m: &Metrics) -> Vec<String> {
    let number = |name| m.get(name).unwrap_or(f64::NAN);
    vec![
        format!("score {:.3}", number("objective/scores")),
        format!("kl {:.3}", number("objective/kl")),
        format!("length {:.1}", number("val/response_length")),
        format!("{:.0} tokens/s", number("tokens_per_second/update")),
    ]
}

/// What learns: the policy, and what says the values, which is a model of its own with an optimizer of its own, or a head on
/// the policy's trunk, whose optimizer is the policy's.
#[derive(Debug)]
pub struct Learner {
    /// The policy.
    pub policy: CausalLm,
    /// The value model.
    pub value: ValueModel,
    /// A moving average of the policy, where the settings ask for one.
    pub ema: Option<Ema>,
    /// Texts that are mixed into the policy's steps.
    pub unsupervised: Option<Unsupervised>,
    policy_optimizer: AdamW,
    /// Of a value model of its own.
    value_optimizer: Option<AdamW>,
    /// What the losses are scaled by, where the models compute in f16.
    scaling: Option<Scaling>,
    /// Most tokens that go through a model at once.
    micro_batch_tokens: usize,
}

/// What one optimizer step did. Sums are over the tokens (or value slots) of its mini-batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepStats {
    /// Response tokens of the mini-batch that the policy learnt from; 0 while it is frozen.
    pub tokens: f64,
    /// Value slots of the mini-batch.
    pub value_slots: f64,
    /// Sum of the clipped policy objective, negated; without the KL and the entropy that may be added.
    pub policy_loss: f64,
    /// Sum of the clipped value loss, without `vf_coef`.
    pub value_loss: f64,
    /// Tokens at which the policy's clip was active.
    pub policy_clipped: f64,
    /// Tokens at which the dual clip was active.
    pub dual_clipped: f64,
    /// Slots at which the value's clip was active.
    pub value_clipped: f64,
    /// Sum of (new - old log-probability)^2 / 2.
    pub approx_kl: f64,
    /// Sum of old - new log-probability.
    pub policy_kl: f64,
    /// Sum of the estimates of KL(policy || reference), where they are in the loss.
    pub ref_kl: f64,
    /// Sum of the entropies of the distributions over the vocabulary, in nats.
    pub entropy: f64,
    /// Sum of the probability ratios.
    pub ratio: f64,
    /// Sum of their squares.
    pub ratio_squared: f64,
    /// The ratios themselves, row after row.
    pub ratios: Vec<f32>,
    /// Sum of the new values.
    pub value: f64,
    /// Sum of the squares of their distances from the returns.
    pub value_error: f64,
    /// Norm of the policy's gradient before clipping.
    pub policy_grad_norm: f64,
    /// Norm of the value model's gradient before clipping.
    pub value_grad_norm: f64,
    /// Mean negative log-likelihood of the tokens of the texts that were mixed in, without `unsup_coef`.
    pub unsup_loss: f64,
    /// Whether the mean ratio was above `ratio_threshold`: then nothing was learnt, and the norms are 0.
    pub skipped: bool,
    /// Whether the next entry is of the same optimizer step.
    pub goes_on: bool,
    /// Whether the policy's gradient overflowed f16: then it took no step, the norm is 0, and its loss scale may have fallen.
    pub policy_overflowed: bool,
    /// The same of the value model.
    pub value_overflowed: bool,
}

/// The loss scales of the two models.
#[derive(Debug)]
struct Scaling {
    policy: LossScaler,
    /// That of a value model of its own.
    value: Option<LossScaler>,
    /// Whether an overflow of one leaves the step of both out.
    align: bool,
}

impl Scaling {
    fn new(value: &ValueModel, config: &PpoConfig) -> Self {
        let scaler = || LossScaler::new(&config.run.loss_scale);
        Self { policy: scaler(), value: value.model().map(|_| scaler()), align: config.half.align_overflow }
    }

    /// Notes overflows of the gradients whose norms `stats` holds; a loss that is not finite is not the scale's doing.
    fn note(&mut self, learns_policy: bool, stats: &mut StepStats) {
        if !(stats.policy_loss.is_finite() && stats.value_loss.is_finite()) {
            return;
        }
        let overflows = |norm: f64| !norm.is_finite();
        // Who only goes along with the other's overflow learns nothing of its own scale.
        let (of_policy, of_value) = (overflows(stats.policy_grad_norm), overflows(stats.value_grad_norm));
        if learns_policy && (of_policy || !(self.align && of_value)) {
            stats.policy_overflowed = self.policy.overflows_at(stats.policy_grad_norm);
        }
        if let Some(value) = self.value.as_mut().filter(|_| of_value || !(self.align && of_policy)) {
            stats.value_overflowed = value.overflows_at(stats.value_grad_norm);
        }
        if stats.policy_overflowed {
            stats.policy_grad_norm = 0.0;
        }
        if stats.value_overflowed {
            stats.value_grad_norm = 0.0;
        }
    }

    fn state(&self) -> Value {
        json!({"policy": self.policy.state(), "value": self.value.as_ref().map(LossScaler::state)})
    }

    fn load_state(&mut self, state: &Value) -> Result<()> {
        self.policy.load_state(&state["policy"])?;
        self.value.as_mut().map_or(Ok(()), |value| value.load_state(&state["value"]))
    }
}

impl StepStats {
    /// What kept the step from being taken: a loss, or a gradient's norm, that is not finite.
    pub fn not_finite(&self) -> Option<String> {
        let numbers = [
            ("the policy's loss", self.policy_loss),
            ("the norm of the policy's gradient", self.policy_grad_norm),
            ("the value model's loss", self.value_loss),
            ("the norm of the value model's gradient", self.value_grad_norm),
        ];
        let found = numbers.into_iter().find(|(_, number)| !number.is_finite());
        found.map(|(name, number)| format!("{name} is {number}"))
    }
}

/// The entries of each optimizer step.
pub(crate) fn optimizer_steps(parts: &[StepStats]) -> impl Iterator<Item = &[StepStats]> + Clone {
    parts.split_inclusive(|part| !part.goes_on)
}

impl Learner {
    /// Makes `policy` and `value` trainable, with fresh optimizers; a value head is one on this policy's trunk.
    pub fn new(mut policy: CausalLm, value: impl Into<ValueModel>, config: &PpoConfig) -> Self {
        let mut value = value.into();
        policy.set_trainable(true);
        policy.set_gradient_checkpointing(config.run.gradient_checkpointing);
        if let Some(value) = value.model_mut() {
            value.set_trainable(true);
            value.set_gradient_checkpointing(config.run.gradient_checkpointing);
        }
        let of_value = |on| value.model().map_or(0, |value| value.activation_bytes(on));
        let activation_bytes = |on| policy.activation_bytes(on).max(of_value(on));
        let micro_batch_tokens = micro_batch_tokens(&config.run, policy.device(), policy.params(), activation_bytes);
        let policy_optimizer = AdamW::new(policy.trainable_params(), &config.optimizer);
        let value_optimizer =
            value.model().map(|value| AdamW::new(value.trainable_params(), &config.value_optimizer().1));
        let ema = config.ema.enable_ema.then(|| Ema::new(&policy, config.ema.ema_beta));
        let scaling = config.run.fp16.then(|| Scaling::new(&value, config));
        let unsupervised = None;
        Self { policy, value, ema, unsupervised, policy_optimizer, value_optimizer, scaling, micro_batch_tokens }
    }

    /// Gives the models fresh optimizers of these settings in place of the configuration's: betas, epsilon, weight decay and
    /// `max_grad_norm`; learning rates come with every step. A head on the policy's trunk has the policy's optimizer.
    #[must_use]
    pub fn with_optimizers(mut self, policy: &OptimizerConfig, value: &OptimizerConfig) -> Self {
        self.policy_optimizer = AdamW::new(self.policy.trainable_params(), policy);
        self.value_optimizer = self.value.model().map(|model| AdamW::new(model.trainable_params(), value));
        self
    }

    /// Optimizer steps taken, of all models.
    fn steps(&self) -> i64 {
        self.policy_optimizer.steps() + self.value_optimizer.as_ref().map_or(0, AdamW::steps)
    }

    /// Learns from one batch of experience: one pass per entry of `orders`, a permutation of the rows each.
    ///
    /// A pass is `num_mini_batches` optimizer steps of `mini_batch_size` rows. A mini-batch goes through the models in
    /// micro-batches; its losses are sums over them, divided by the token count of the whole mini-batch, so the size of
    /// a micro-batch changes memory and speed and nothing else. Gives one entry per mini-batch.
    ///
    /// Where the plan's `part_size` is less than that, a step goes by the mean of the losses of its parts, each divided by its own
    /// token count, and there is an entry per part.
    ///
    /// Where there are texts to mix in, each mini-batch takes as many of their blocks as it has rows. Where there is a moving
    /// average, it moves with each step of the policy.
    ///
    /// A mini-batch above `ratio_threshold` is skipped. A pass that ends too far from the policy that sampled, by
    /// `target_kl`, is the last. Where `rates` has none for the policy, only the value model learns.
    ///
    /// # Errors
    /// If libtorch refuses a step.
    pub fn optimise(
        &mut self,
        experience: &Experience,
        targets: &Targets,
        orders: &[Vec<usize>],
        rates: LearningRates,
        plan: &PpoPlan,
        config: &PpoConfig,
    ) -> Result<Vec<StepStats>> {
        let mut steps = Vec::new();
        for order in orders {
            for mini_batch in order.chunks(plan.mini_batch_size) {
                let learns = rates.policy.is_some();
                let parts = mini_batch.chunks(plan.part_size);
                let share = (parts.len() as f64).recip();
                let parts =
                    parts.map(|part| self.gradients(experience, targets, part, plan.micro_batch_size, learns, config));
                let mut parts: Vec<StepStats> = parts.collect::<Result<_>>()?;
                parts.iter_mut().rev().skip(1).for_each(|part| part.goes_on = true);
                if self.takes_step(&mut parts, share, config) {
                    let last = parts.last_mut().expect("a mini-batch has rows");
                    if learns {
                        self.mix_texts(mini_batch.len(), plan.micro_batch_size, last)?;
                    }
                    self.step_of_parts(&mut parts, rates)?;
                }
                steps.extend(parts);
            }
            let moved = steps.last().map_or(0.0, |last: &StepStats| last.policy_kl / last.tokens.max(1.0));
            if config.target_kl().is_some_and(|target| moved > EARLY_STOP * target) {
                break;
            }
        }
        Ok(steps)
    }

    /// Whether a mini-batch whose `parts` have added their gradients is learnt from: not if one is above `ratio_threshold`. Makes
    /// their sum what each having its `share` of the loss gives.
    fn takes_step(&mut self, parts: &mut [StepStats], share: f64, config: &PpoConfig) -> bool {
        let far = |part: &StepStats| config.step.ratio_threshold.is_some_and(|most| part.ratio > most * part.tokens);
        // An infinite ratio is far, whatever the loss is by it.
        let sound = |part: &StepStats| {
            part.not_finite().is_none() || (part.ratio == f64::INFINITY && part.value_loss.is_finite())
        };
        if parts.iter().any(far) && parts.iter().all(sound) {
            for part in parts.iter_mut() {
                part.skipped = true;
                part.policy_loss = if part.policy_loss.is_finite() { part.policy_loss } else { 0.0 };
            }
            self.zero_grad();
            return false;
        }
        if parts.len() > 1 {
            self.policy_optimizer.scale_grad(share);
            self.value_optimizer.iter_mut().for_each(|optimizer| optimizer.scale_grad(share));
        }
        true
    }

    /// [`Learner::step`] by the gradients of all `parts`; one that is not finite keeps the others from being learnt.
    fn step_of_parts(&mut self, parts: &mut [StepStats], rates: LearningRates) -> Result<()> {
        let at = parts.iter().position(|part| part.not_finite().is_some()).unwrap_or(parts.len() - 1);
        self.step(rates, &mut parts[at])?;
        let norms = (parts[at].policy_grad_norm, parts[at].value_grad_norm);
        parts.iter_mut().for_each(|part| (part.policy_grad_norm, part.value_grad_norm) = norms);
        Ok(())
    }

    /// Adds the gradients of the losses of one mini-batch to those that the parameters hold; gives its sums.
    ///
    /// `mini_batch` are rows of `experience`, of which at most `micro_batch_size` go through the models at a time;
    /// without `learns_policy` only through the value model.
    ///
    /// # Errors
    /// If a row does not fit the models.
    pub fn gradients(
        &self,
        experience: &Experience,
        targets: &Targets,
        mini_batch: &[usize],
        micro_batch_size: usize,
        learns_policy: bool,
        config: &PpoConfig,
    ) -> Result<StepStats> {
        let mut stats = StepStats::default();
        let count = |mask: &Tensor| number(&mask.index_select(0, &row_index(mini_batch, mask)).sum(Kind::Double));
        if learns_policy {
            stats.tokens = count(&experience.loss_mask);
        }
        stats.value_slots = count(&experience.value_loss_mask);
        let advantages = match config.whiten_advantages {
            WhitenAdvantages::MiniBatch => whiten_rows(&targets.advantages, mini_batch, &experience.loss_mask),
            WhitenAdvantages::Batch | WhitenAdvantages::None => targets.advantages.shallow_clone(),
        };
        let tokens = |&row: &usize| experience.sequences[row].len();
        for micro_batch in micro_batches(mini_batch, micro_batch_size, self.micro_batch_tokens, tokens) {
            self.accumulate(experience, targets, &advantages, micro_batch, learns_policy, &mut stats, config)?;
        }
        Ok(stats)
    }

    /// What the losses of policy and value model are multiplied by on the way back.
    fn loss_scales(&self) -> [f64; 2] {
        let Some(scaling) = &self.scaling else { return [1.0; 2] };
        // What a trunk's two heads send back is one gradient.
        [&scaling.policy, scaling.value.as_ref().unwrap_or(&scaling.policy)].map(LossScaler::scale)
    }

    /// Takes one optimizer step by the gradients that the parameters hold, clears these, and notes their norms in `stats`.
    ///
    /// Where a loss or a norm is not finite neither model moves, and no optimizer state changes:
    /// [`StepStats::not_finite`] tells. In f16 a model whose gradients overflow stays where it is, and with `align_overflow`
    /// the other too.
    ///
    /// # Errors
    /// If libtorch refuses the step.
    pub fn step(&mut self, rates: LearningRates, stats: &mut StepStats) -> Result<()> {
        let [of_policy, of_value] = self.loss_scales();
        if rates.policy.is_some() {
            stats.policy_grad_norm = self.policy_optimizer.grad_norm() / of_policy;
        }
        stats.value_grad_norm = self.value_optimizer.as_ref().map_or(0.0, AdamW::grad_norm) / of_value;
        let align = self.scaling.as_ref().is_some_and(|scaling| scaling.align);
        self.scaling.iter_mut().for_each(|scaling| scaling.note(rates.policy.is_some(), stats));
        if stats.not_finite().is_some() {
            self.zero_grad();
            return Ok(());
        }
        let named = |model| move |e: Error| Error::Run(format!("{model}: {e}"));
        let both = align && (stats.policy_overflowed || stats.value_overflowed);
        if let Some(lr) = rates.policy.filter(|_| !stats.policy_overflowed && !both) {
            self.policy_optimizer.unscale(of_policy);
            self.policy_optimizer.step_of_norm(lr, stats.policy_grad_norm).map_err(named("policy"))?;
            if let Some(ema) = &mut self.ema {
                ema.update(&self.policy);
            }
        }
        if let Some(optimizer) = self.value_optimizer.as_mut().filter(|_| !stats.value_overflowed && !both) {
            optimizer.unscale(of_value);
            optimizer.step_of_norm(rates.value, stats.value_grad_norm).map_err(named("value model"))?;
        }
        self.zero_grad();
        Ok(())
    }

    /// Adds the gradient of the next `rows` blocks of text, if there are any, to that of the policy.
    fn mix_texts(&mut self, rows: usize, most_rows: usize, stats: &mut StepStats) -> Result<()> {
        let [scale, _] = self.loss_scales();
        let Some(texts) = &mut self.unsupervised else { return Ok(()) };
        let coef = texts.coef() * scale;
        stats.unsup_loss = learn_texts(&self.policy, &texts.take(rows), coef, most_rows, self.micro_batch_tokens)?;
        Ok(())
    }

    /// Adds the gradient of `coef` times the mean negative log-likelihood of the tokens of `texts`, each one's first aside, to
    /// that of the policy; gives that mean.
    ///
    /// # Errors
    /// If a text does not fit the policy, or none has two tokens.
    pub fn learn_texts<S: AsRef<[i64]>>(&self, texts: &[S], coef: f64) -> Result<f64> {
        let [scale, _] = self.loss_scales();
        learn_texts(&self.policy, texts, coef * scale, texts.len().max(1), self.micro_batch_tokens)
    }

    /// Clears the gradients of all models.
    pub fn zero_grad(&mut self) {
        self.policy_optimizer.zero_grad();
        self.value_optimizer.iter_mut().for_each(AdamW::zero_grad);
    }

    /// Adds the gradients of one micro-batch's share of the losses over the mini-batch, and its share of the sums.
    #[expect(clippy::too_many_arguments, reason = "all that a mini-batch knows")]
    fn accumulate(
        &self,
        experience: &Experience,
        targets: &Targets,
        advantages: &Tensor,
        rows: &[usize],
        learns_policy: bool,
        stats: &mut StepStats,
        config: &PpoConfig,
    ) -> Result<()> {
        let sequences: Vec<&Vec<i64>> = rows.iter().map(|&row| &experience.sequences[row]).collect();
        let token_spans: Vec<_> = rows.iter().map(|&row| experience.token_span(row)).collect();
        let value_spans: Vec<_> = rows.iter().map(|&row| experience.value_span(row)).collect();

        let lengths = rows.iter().map(|&row| experience.lengths[row]).collect::<Vec<_>>();
        let mine = |x: &Tensor| packed(x, &lengths, rows);
        let (old, advantages, counts) = (mine(&experience.logprobs), mine(advantages), mine(&experience.loss_mask));
        let reference = config.kl.kl_in_loss.then(|| mine(&experience.ref_logprobs));
        let (clip, [policy_scale, value_scale]) = (config.policy_clip(), self.loss_scales());
        let sets = experience.sets_of(rows.iter().copied());
        let sampled = Sampled { temperature: config.logprob_temperature(), sets: sets.as_deref() };
        let policy_loss = |tokens: Range<i64>, now: &TokenLogprobs| {
            let here = |x: &Tensor| x.narrow(0, tokens.start, tokens.end - tokens.start);
            let counts = here(&counts);
            let loss = math::policy_loss(&now.logprobs, &here(&old), &here(&advantages), &counts, clip);
            stats.policy_loss += number(&loss.sum);
            stats.policy_clipped += number(&loss.clipped);
            stats.dual_clipped += number(&loss.dual_clipped);
            stats.approx_kl += number(&loss.approx_kl);
            stats.policy_kl += number(&loss.policy_kl);
            stats.ratio += number(&loss.ratio.sum(Kind::Float));
            stats.ratio_squared += number(&loss.ratio.square().sum(Kind::Float));
            stats.ratios.extend(numbers(&loss.ratio.masked_select(&counts)));
            let sum = match &reference {
                Some(reference) => {
                    let estimate = || math::kl(&now.logprobs, &here(reference), &counts, config.kl_estimator);
                    let kl = now.kl.as_ref().map_or_else(estimate, |kl| math::keep(kl, &counts)).sum(Kind::Float);
                    stats.ref_kl += number(&kl);
                    loss.sum + kl * targets.kl_coef
                }
                None => loss.sum,
            };
            let sum = match &now.entropy {
                Some(entropy) if config.step.entropy_coef > 0.0 => {
                    sum - math::masked_sum(entropy, &counts) * config.step.entropy_coef
                }
                _ => sum,
            };
            // Where nothing counts, nothing is learnt.
            sum / (stats.tokens.max(1.0) / policy_scale)
        };

        let lengths = rows.iter().map(|&row| experience.value_counts[row]).collect::<Vec<_>>();
        let mine = |x: &Tensor| packed(x, &lengths, rows);
        let (old_values, returns, of_value) =
            (mine(&experience.values), mine(&targets.returns), mine(&experience.value_loss_mask));
        let value_loss = |values: &Tensor| {
            let loss = math::value_loss(values, &old_values, &returns, &of_value, config.cliprange_value);
            stats.value_loss += number(&loss.sum);
            stats.value_clipped += number(&loss.clipped);
            let values = values.detach();
            stats.value += number(&math::masked_sum(&values, &of_value));
            stats.value_error += number(&math::masked_sum(&(&values - &returns).square(), &of_value));
            loss.sum * (config.vf_coef / stats.value_slots.max(1.0) * value_scale)
        };

        let new = match &self.value {
            ValueModel::Head(_) if experience.reference.is_some() => {
                return Err(Error::Run("kl_in_loss with kl_estimator = full needs a value model of its own".into()));
            }
            ValueModel::Head(head) => Some(head.learn(
                &self.policy,
                &sequences,
                &token_spans,
                &value_spans,
                sampled,
                true,
                policy_loss,
                value_loss,
            )?),
            // Two models share nothing, so the policy's activations are gone before the value model's come.
            ValueModel::Model(value) => {
                let policy = &self.policy;
                let new = match (&experience.reference, learns_policy) {
                    (_, false) => None,
                    (Some(reference), true) => {
                        let theirs = (reference, rows);
                        let (spans, loss) = (&token_spans, policy_loss);
                        Some(policy.learn_logprobs_and_kl(&sequences, spans, sampled, true, theirs, loss)?)
                    }
                    (None, true) => {
                        Some(policy.learn_logprobs(&sequences, &token_spans, sampled, true, policy_loss)?)
                    }
                };
                value.learn_values(&sequences, &value_spans, value_loss)?;
                new
            }
        };
        let entropy = new.and_then(|new| new.entropy);
        stats.entropy += entropy.map_or(0.0, |entropy| number(&math::masked_sum(&entropy, &counts)));
        Ok(())
    }
}

/// The first `counts` slots of `rows` of `x`, row after row: as the models give their numbers.
fn packed(x: &Tensor, counts: &[i64], rows: &[usize]) -> Tensor {
    let slots = math::response_mask(counts, x.size()[1], x.device());
    x.index_select(0, &row_index(rows, x)).masked_select(&slots)
}

/// `x` whitened over the counted slots of `rows` alone; 0 in other rows.
fn whiten_rows(x: &Tensor, rows: &[usize], mask: &Tensor) -> Tensor {
    let index = row_index(rows, x);
    let theirs = mask.zeros_like().index_copy(0, &index, &mask.index_select(0, &index));
    math::whiten(x, &theirs, true)
}

fn row_index(rows: &[usize], like: &Tensor) -> Tensor {
    Tensor::from_slice(&rows.iter().map(|&row| row as i64).collect::<Vec<_>>()).to_device(like.device())
}

fn number(x: &Tensor) -> f64 {
    x.double_value(&[])
}

fn numbers(x: &Tensor) -> Vec<f32> {
    Vec::try_from(x).expect("a vector of f32")
}

/// Adds the metrics of one update under TRL's names: `objective/*` are sums per response, averaged over responses; the other
/// averages are over real tokens, of all mini-batches together. `docs/algorithm.md` defines each.
///
/// What belongs to a setting that is off by default is there only where it is on; of a policy that is frozen there is
/// nothing to tell.
pub fn metrics(m: &mut Metrics, experience: &Experience, targets: &Targets, steps: &[StepStats], config: &PpoConfig) {
    let rows = experience.lengths.len() as f64;
    let learns = steps.iter().any(|step| step.tokens > 0.0);
    let all = optimizer_steps(steps).count();
    let sound = |step: &&[StepStats]| step.iter().all(|part| part.not_finite().is_none());
    let (parts, kept) = (steps.len(), optimizer_steps(steps).filter(sound).collect::<Vec<_>>());
    let steps: Vec<&StepStats> = kept.iter().copied().flatten().collect();
    let per_row = |x: &Tensor| x.sum(Kind::Double).double_value(&[]) / rows;
    let sum = |f: fn(&StepStats) -> f64| steps.iter().map(|step| f(step)).sum::<f64>();
    // Without a step there is nothing to average: 0 / 0 is the NaN that says so.
    let (tokens, value_slots) = (sum(|s| s.tokens), sum(|s| s.value_slots));
    let kl = per_row(&targets.kl);
    let scores = experience.total_scores();
    let score = per_row(&scores);
    let in_rewards = if config.kl.kl_in_loss { 0.0 } else { targets.kl_coef };
    let taken = kept.iter().filter(|step| !step[0].skipped).count();
    let overflows = |f: fn(&StepStats) -> bool| steps.iter().filter(|step| f(step)).count();
    let of_policy = overflows(|s| s.policy_overflowed);
    let of_value = overflows(|s| s.value_overflowed);
    let mean_norm = |f: fn(&StepStats) -> f64, overflows: usize| {
        // All parts of a step have its norm.
        let norms: f64 = kept.iter().map(|step| f(&step[step.len() - 1])).sum();
        norms / taken.saturating_sub(overflows).max(kept.len().min(1)) as f64
    };
    let response_tokens = experience.lengths.iter().sum::<i64>() as f64;

    m.push("objective/kl", kl);
    m.push("objective/kl_coef", targets.kl_coef);
    m.push("objective/entropy", -per_row(&math::keep(&experience.logprobs, &experience.response_mask)));
    m.push("objective/non_score_reward", -in_rewards * kl);
    m.push("objective/rlhf_reward", score - in_rewards * kl);
    m.push("objective/scores", score);
    m.push("objective/scores_std", if rows > 1.0 { scores.std(true).double_value(&[]) } else { 0.0 });
    if learns {
        m.push("policy/approxkl_avg", sum(|s| s.approx_kl) / tokens);
        m.push("policy/clipfrac_avg", sum(|s| s.policy_clipped) / tokens);
        if config.step.dual_clip.is_some() {
            m.push("policy/dual_clipfrac_avg", sum(|s| s.dual_clipped) / tokens);
        }
        m.push("policy/entropy_avg", sum(|s| s.entropy) / tokens);
        m.push("policy/grad_norm", mean_norm(|s| s.policy_grad_norm, of_policy));
        if config.target_kl().is_some() {
            m.push("policy/policykl_avg", sum(|s| s.policy_kl) / tokens);
            m.push("policy/epochs", (parts / config.parts_per_epoch(experience.lengths.len())) as f64);
        }
        if config.step.ratio_threshold.is_some() {
            m.push("policy/skipped_steps", (kept.len() - taken) as f64);
        }
        m.push("loss/policy_avg", sum(|s| s.policy_loss) / tokens);
        if config.kl.kl_in_loss {
            m.push("loss/kl_avg", sum(|s| s.ref_kl) / tokens);
        }
        if config.unsupervised.unsupervised_dataset_name.is_some() {
            m.push("loss/unsup_avg", sum(|s| s.unsup_loss) / taken as f64);
        }
    }
    m.push("loss/value_avg", sum(|s| s.value_loss) / value_slots);
    m.push("val/clipfrac_avg", sum(|s| s.value_clipped) / value_slots);
    if learns {
        let ratio = sum(|s| s.ratio) / tokens;
        m.push("val/ratio", ratio);
        m.push("val/ratio_var", (sum(|s| s.ratio_squared) / tokens - ratio * ratio).clamp(0.0, f64::INFINITY));
    }
    m.push("val/explained_variance", explained_variance(experience, targets));
    if !config.legacy.value_head {
        m.push("val/grad_norm", mean_norm(|s| s.value_grad_norm, of_value));
    }
    m.push("val/response_length", response_tokens / rows);
    m.push("val/skipped_steps", (all - kept.len()) as f64);
    if config.run.fp16 {
        m.push("policy/overflows", of_policy as f64);
        m.push("val/overflows", of_value as f64);
    }
}

/// 1 - Var(returns - values) / Var(returns) over the value slots: 1 is a perfect value model, 0 no better than a constant.
fn explained_variance(experience: &Experience, targets: &Targets) -> f64 {
    let variance = |x: &Tensor| {
        let counted = x.masked_select(&experience.value_mask);
        if counted.numel() > 1 { counted.var(true).double_value(&[]) } else { 0.0 }
    };
    let total = variance(&targets.returns);
    if total > 0.0 { 1.0 - variance(&(&targets.returns - &experience.values)) / total } else { 0.0 }
}
