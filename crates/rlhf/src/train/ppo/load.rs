//! Loads and checks the parts of a PPO run.

use super::super::{check_held_out, gather, model_options, roundings, trained_options};
use super::{COMMAND, PerUpdate, PpoParts, PpoTrainer, SAMPLE_ROWS};
use crate::data::{Cursor, Dataset, Prompt, PromptLimit, Sources};
use crate::hub::{self, AskedHub, Commits};
use crate::metrics::Metrics;
use crate::model::{CausalLm, CausalLmWithValueHead, ClassifierFormat, LoraConfig, SequenceClassifier, ValueModel};
use crate::optim::LearningRates;
use crate::reward::{RewardModel, Rewards, ScoreScaling, Spec, resolve, specs};
use crate::rl::alarms::Alarms;
use crate::rl::checks::Skips;
use crate::rl::kept::KeptResponses;
use crate::rl::kl::KlController;
use crate::rl::learner::Learner;
use crate::rl::rollout::RolloutSettings;
use crate::rl::unsupervised::Unsupervised;
use crate::run::inputs::Inputs;
use crate::run::session::{Opening, Progress, take_snapshot};
use crate::run::sinks::console::Console;
use crate::run::start::Start;
use crate::settings::{EVAL_SCORES, LongPrompts, PpoConfig, Stage};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::Path;

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
        // A resumed run reads what it began with.
        Self::load(config, more, Start::find(&config.run)?.commits()?)
    }

    /// Loads a trainer as [`PpoTrainer::from_config_with`] does, with checked settings and the `commits` that names of the hub
    /// stand for.
    pub(super) fn load(config: &PpoConfig, more: Rewards, commits: Commits) -> Result<Self> {
        // Each tensor as its file has it, and computed as the policy is: to widen a weight loses nothing, so the reference gives
        // the very numbers of the policy that it is a copy of, from half the memory where the files are in bf16.
        let frozen = model_options(&config.run)?;
        let asked = AskedHub::with(commits);
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
        let mut rewards = config.load_rewards(specs, &tokenizer, frozen)?;
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
        let learner = Learner::new(policy, value, config.learner());
        let room = room_for_prompts(&learner, &reference, &rewards, config.response_length)?;
        let vocab = learner.policy.config().vocab_size;
        let limit = PromptLimit::new(&config.prompt_length, room)?;
        let read = |dataset: &Dataset| {
            dataset.check(|row| rewards.check_row(row))?;
            dataset.prompts_within(&tokenizer, vocab, limit)
        };
        let (mut train, mut eval) = sources.read(config.run.seed, Stage::Ppo)?;
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
        let mut trainer = Self::of_parts(config, parts)?;
        (trainer.cursor, trainer.prompt_notes, trainer.commits) = (cursor, prompt_notes, asked.commits());
        trainer.inputs.replace("PpoParts::prompts", inputs);
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
        Self::of_parts(config, parts)
    }

    /// Makes a trainer as [`PpoTrainer::new`] does, with settings that are checked already.
    fn of_parts(config: &PpoConfig, parts: PpoParts) -> Result<Self> {
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
        let (stop, stop_strings) = (config.stop_tokens(&tokenizer)?, config.stop_strings(&tokenizer)?);
        learner.policy.set_generation(generation_settings(config));
        check_ends(config, &tokenizer, vocab, &stop)?;
        let plan = config.plan_for(prompts.len())?;
        let left_out = config.left_out(&learner.policy, &tokenizer);
        let rollout = RolloutSettings { left_out, ..config.rollout(&learner.policy) };
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
        Ok(Self {
            kl_controller: KlController::new(&config.kl, plan.num_total_batches),
            scaling: ScoreScaling::new(&config.score_scaling),
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
            rollout,
            shaping: config.shaping(),
            kept: KeptResponses::new(config.mask.min_response_length),
            answers: Vec::new(),
            last_metrics: Metrics::default(),
            checks: None,
            skips: Skips::default(),
            alarms: Alarms::default(),
            warnings: Vec::new(),
            progress: Progress::new(&config.eval),
            opening: None,
            console: Console::Silent,
        })
    }

    /// Has `order` say which rows of the prompts an update answers, `plan.batch_size` of them, in place of shuffled passes.
    ///
    /// Updates count from 0. A resumed run asks for those alone that are left: what `order` says should follow from the number.
    #[must_use]
    pub fn with_order(mut self, order: impl FnMut(usize) -> Vec<usize> + Send + 'static) -> Self {
        self.order = Some(PerUpdate(Box::new(order)));
        take_snapshot(&mut self);
        self
    }

    /// Has `schedule` say the learning rates of an update, in place of the settings; asked as [`PpoTrainer::with_order`] is.
    #[must_use]
    pub fn with_schedule(mut self, schedule: impl FnMut(usize) -> LearningRates + Send + 'static) -> Self {
        self.schedule = Some(PerUpdate(Box::new(schedule)));
        take_snapshot(&mut self);
        self
    }
}

/// Opens the output folder of a run.
///
/// # Errors
/// If the run may not write there, or cannot resume.
pub(super) fn open(config: &PpoConfig) -> Result<Opening> {
    let optional = [config.value_model_path.as_deref(), config.model_name_or_path.as_deref()];
    let rewards = specs(config)?;
    let mut inputs: Vec<&Path> = vec![&config.sft_model_path];
    inputs.extend(config.data.dataset_name.iter().map(|name| name.as_path()));
    inputs.extend(optional.into_iter().flatten().chain(rewards.iter().filter_map(Spec::model_path)));
    Opening::new(&config.run, COMMAND, config, &inputs)
}

/// Refuses a run that has no reward.
pub(in crate::train) fn require_reward(none: bool) -> Result<()> {
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
pub(in crate::train) fn room_in(context: usize, response_length: usize) -> Result<usize> {
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
pub(in crate::train) fn check_ends(config: &PpoConfig, tokenizer: &Tokenizer, vocab: i64, stop: &[i64]) -> Result<()> {
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
