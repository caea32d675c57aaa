//! Loads and checks the parts of a PPO run.

use super::super::reference::Reference;
use super::super::{Gathered, check_held_out, gather, model_options, notes_on_weights, trained_options};
use super::{COMMAND, Course, Monitor, PerUpdate, PpoParts, PpoTrainer, PromptData, RunRecord, SAMPLE_ROWS, Sampler};
use crate::data::{Cursor, Dataset, Prompt, PromptLimit, Sources, prompt_field};
use crate::environment::{Environment, Log};
use crate::reward::{RewardModel, Rewards, Spec, check_columns, resolve};
use crate::rl::alarms::Alarms;
use crate::rl::checks::Skips;
use crate::rl::kept::KeptResponses;
use crate::rl::kl::KlController;
use crate::rl::learner::Learner;
use crate::rl::scores::ScoreMaker;
use crate::rl::unsupervised::Unsupervised;
use crate::run::inputs::{ENVIRONMENTS, Inputs};
use crate::run::output_dir::TOOLS_LOG;
use crate::run::session::{Opening, Progress, take_snapshot};
use crate::run::sinks::console::Console;
use crate::run::start::{Found, Start};
use crate::settings::{EVAL_SCORES, LongPrompts, PpoConfig, PpoRun, Stage, max_prompt_len};
use crate::tool_loop::ToolLoop;
use rlhf_base::dist::World;
use rlhf_base::metrics::Metrics;
use rlhf_base::name_of;
use rlhf_base::{Error, Result};
use rlhf_hub as hub;
use rlhf_hub::{AskedHub, Commits};
use rlhf_lm::generate::StopStrings;
use rlhf_lm::model::{
    CausalLm, CausalLmWithValueHead, ClassifierFormat, LoraConfig, ModelConfig, ModelOptions, SequenceClassifier,
    ValueModel,
};
use rlhf_lm::optim::LearningRates;
use rlhf_lm::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

impl PpoTrainer {
    /// Loads everything that `config` names: policy and reference model, rewards and value model, prompts; on the ranks of this process.
    ///
    /// # Errors
    /// If an input is missing or invalid, or there is no reward; nothing is written.
    pub fn from_config(config: &PpoConfig) -> Result<Self> {
        Self::from_config_with(config, Rewards::new())
    }

    /// [`PpoTrainer::from_config`] with the rewards `more` in addition to those that `config` names, which may then name none.
    ///
    /// # Errors
    /// The errors of [`PpoTrainer::from_config`].
    pub fn from_config_with(config: &PpoConfig, more: Rewards) -> Result<Self> {
        let run = PpoRun::new(config)?;
        // A resumed run reads the hub's commits that it started with.
        let found = Start::find(&config.run)?.found()?;
        Self::load(run, more, found, &World::of_process())
    }

    /// [`PpoTrainer::from_config_with`] for checked settings, with the external facts that the run `found` at its start, on the ranks
    /// `world`.
    pub(super) fn load(run: PpoRun, more: Rewards, found: Found, world: &World) -> Result<Self> {
        let Loaded { parts, environment, cursor, notes, commits, inputs } = Loaded::of_run(&run, more, found, world)?;
        let mut trainer = Self::from_parts(run, parts)?;
        trainer.sampler.environment = environment;
        (trainer.data.cursor, trainer.record.prompt_notes, trainer.record.commits) = (cursor, notes, commits);
        trainer.record.inputs.replace("PpoParts::prompts", inputs);
        Ok(trainer)
    }

    /// Creates a run from loaded parts. The names of models, rewards and data in `config` are used only in the model card and
    /// for the comparison when the run resumes.
    ///
    /// A checkpoint stores the learner, but neither reference model nor prompts: a resumed run must be given the same parts.
    ///
    /// # Errors
    /// If a setting is out of its range, there is no reward or no prompt, or the parts do not match: a model is on another
    /// device than the policy, has a smaller vocabulary, or a context that a response fills.
    pub fn new(config: &PpoConfig, parts: PpoParts) -> Result<Self> {
        Self::from_parts(PpoRun::new(config)?, parts)
    }

    /// [`PpoTrainer::new`] for checked settings.
    fn from_parts(run: PpoRun, mut parts: PpoParts) -> Result<Self> {
        let prepared = parts.prepare(&run);
        let Ends { stop, stop_strings } = parts.learner.world.agree(prepared)?;
        let PpoParts { learner, reference, rewards, tokenizer, prompts, eval_prompts } = parts;
        let first = |prompts: &[Prompt], rows| prompts.iter().take(rows).cloned().collect::<Vec<_>>();
        let config = &run.config;
        let plan = config.plan_for(prompts.len())?;
        let left_out = config.left_out(&learner.policy, &tokenizer);
        let mut inputs = Inputs::default();
        let ids: Vec<&[i64]> = prompts.iter().map(|prompt| prompt.tokens.as_slice()).collect();
        inputs.values("PpoParts::prompts", "the caller's", &ids);
        if let (Some(texts), Some(name)) = (&learner.unsupervised, &config.unsupervised.unsupervised_dataset_name) {
            inputs.values(
                name_of!(config.unsupervised.unsupervised_dataset_name),
                &name.display().to_string(),
                texts.blocks(),
            );
        }
        let mut learner = learner;
        let mut rewards = rewards;
        learner.micro_batch_tokens = learner.world.min_count(learner.micro_batch_tokens)?;
        rewards.set_world(&learner.world);
        let may_stop = !stop.is_empty() || stop_strings.is_some();
        let alarms = Alarms::new(may_stop.then_some(config.response_length));
        let data = PromptData {
            sample_prompts: first(if eval_prompts.is_empty() { &prompts } else { &eval_prompts }, SAMPLE_ROWS),
            eval_prompts: first(&eval_prompts, config.num_eval_prompts),
            cursor: Cursor::new(config.run.seed, prompts.len()),
            order: None,
            prompts,
        };
        // Without a stop token a response ends with eos.
        let ends = if stop.is_empty() { tokenizer.eos_ids().to_vec() } else { stop.clone() };
        let kept = KeptResponses::new(config.mask.min_response_length);
        let course = Course {
            progress: Progress::new(&config.eval),
            kl_controller: KlController::new(&config.kl, plan.num_total_batches),
            scores: ScoreMaker::new(&config.score_scaling, run.penalties.clone(), ends),
            schedule: None,
        };
        Ok(Self {
            run,
            plan,
            learner,
            reference,
            rewards,
            tokenizer,
            console: Console::Silent,
            data,
            sampler: Sampler { stop, stop_strings, left_out, environment: None, kept, recorded: None },
            course,
            monitor: Monitor {
                alarms,
                skips: Skips::default(),
                warnings: Vec::new(),
                last_metrics: Metrics::default(),
                num_tokens: 0,
            },
            record: RunRecord {
                prompt_notes: Vec::new(),
                commits: Commits::new(),
                inputs,
                opening: None,
                checks: None,
            },
        })
    }

    /// Sets the order of the prompts: `order(update)` returns the rows of an update, `plan.prompts` of them, instead of shuffled
    /// passes.
    ///
    /// Updates count from 0. A resumed run calls it for the remaining updates only, so its result should depend on the number
    /// of the update alone.
    #[must_use]
    pub fn with_order(mut self, order: impl FnMut(usize) -> Vec<usize> + Send + 'static) -> Self {
        self.data.order = Some(PerUpdate(Box::new(order)));
        take_snapshot(&mut self);
        self
    }

    /// Adds tools and environments that the policy calls, with their rewards.
    ///
    /// # Errors
    /// If they cannot be started, or the tokenizer's chat template cannot be used with tools.
    pub fn with_environment(mut self, environment: Arc<dyn Environment>) -> Result<Self> {
        let tool_loop = ToolLoop::new(environment, &self.tokenizer, &self.run.config.environment)?;
        self.rewards.extend(tool_loop.rewards());
        self.sampler.environment = Some(tool_loop);
        Ok(self)
    }

    /// Sets the learning rates of each update: `schedule(update)`, instead of those of the settings; called as
    /// [`PpoTrainer::with_order`] is.
    #[must_use]
    pub fn with_schedule(mut self, schedule: impl FnMut(usize) -> LearningRates + Send + 'static) -> Self {
        self.course.schedule = Some(PerUpdate(Box::new(schedule)));
        take_snapshot(&mut self);
        self
    }
}

/// Refuses a reference model that follows the policy if it would be divided over the ranks.
pub(in crate::train) fn check_sync(config: &PpoConfig, world: &World) -> Result<()> {
    if config.sync.sync_ref_model && config.policy_stage().shards_parameters() && world.size() > 1 {
        return Err(Error::refused(
            name_of!(config.sync.sync_ref_model),
            " = true with zero_stage = 3: a reference model that is divided over the ranks is not written to checkpoints; \
             expected zero_stage = 0, 1 or 2",
        ));
    }
    Ok(())
}

/// The tokens and texts that end a response.
pub(crate) struct Ends {
    pub(crate) stop: Vec<i64>,
    pub(crate) stop_strings: Option<StopStrings>,
}

impl Ends {
    /// Finds the tokens and texts that end a response, by the settings.
    ///
    /// # Errors
    /// If they need an eos that the tokenizer lacks, a text is empty, or an id is outside the policy's vocabulary of `vocab` ids.
    pub(in crate::train) fn find(config: &PpoConfig, tokenizer: &Tokenizer, vocab: i64) -> Result<Self> {
        let stop = config.stop_tokens(tokenizer)?;
        let stop_strings = config.stop_strings(tokenizer)?;
        if (config.missing_eos_penalty.is_some() || config.non_eos_penalty) && stop.is_empty() && stop_strings.is_none()
        {
            tokenizer.require_eos()?;
        }
        if let Some(id) = config.stop_token_id.filter(|id| !(0..vocab).contains(id)) {
            let rest = format!(" = {id}: expected an id below the policy's vocabulary of {vocab}");
            return Err(Error::refused(name_of!(config.stop_token_id), rest));
        }
        Ok(Self { stop, stop_strings })
    }
}

impl PpoParts {
    /// Checks that there are the models that the settings need; a reference model that they do not use is dropped.
    fn check_models(&mut self, run: &PpoRun) -> Result<()> {
        let config = &run.config;
        let name = config.advantage.advantage_estimator.name();
        if run.has_reference && self.reference.is_none() {
            let message = format!(
                "PpoParts::reference: expected a reference model, for advantage_estimator = {name} and kl_coef = {}, found none",
                config.kl.kl_coef
            );
            return Err(Error::Usage(message));
        }
        if !run.has_reference {
            self.reference = None;
        }
        let has_critic = !matches!(self.learner.value, ValueModel::None);
        if has_critic != run.needs_critic {
            let (expected, found) = if has_critic { ("no critic", "one") } else { ("a critic", "none") };
            let message =
                format!("PpoParts::learner: expected {expected} for advantage_estimator = {name}, found {found}");
            return Err(Error::Usage(message));
        }
        check_sync(config, &self.learner.world)?;
        let named = |e: Error| Error::Usage(format!("PpoParts::learner: {e}"));
        self.learner.check_optimizers().map_err(named)?;
        if config.run.offload.offloads_optimizer() && !self.learner.offloads_state() {
            let message = "PpoParts::learner: expected one of Learner::with_state_at for offload = optimizer, found its state in memory";
            return Err(Error::Usage(message.into()));
        }
        self.learner.collect_clips = !has_critic;
        Ok(())
    }

    /// Checks that the parts match each other and the settings, and loads the texts that are mixed in.
    pub(crate) fn prepare(&mut self, run: &PpoRun) -> Result<Ends> {
        self.check_models(run)?;
        let config = &run.config;
        if let Some(reference) = &mut self.reference {
            if !config.sync.sync_ref_model {
                reference.hold_as_computed();
            }
            reference.shard(&self.learner.world, run.learner.policy_stage);
        }
        self.rewards.shard(&self.learner.world, config.frozen_stage());
        offload_frozen(config, self.reference.as_ref(), Some(&self.rewards))?;
        let vocab = self.learner.policy.config().vocab_size;
        check_encoder_decoder(config, self.learner.policy.config())?;
        self.tokenizer.set_encoder_decoder(self.learner.policy.config().is_encoder_decoder());
        let limit = model_prompt_limit(&self.learner, self.reference.as_ref(), &self.rewards, config.response_length)?;
        check_prompts(name_of!(self.prompts), &self.prompts, limit, vocab)?;
        check_prompts("eval_prompts", &self.eval_prompts, limit, vocab)?;
        for (name, is_empty) in
            [("rewards", self.rewards.is_empty()), (name_of!(self.prompts), self.prompts.is_empty())]
        {
            if is_empty {
                return Err(Error::Usage(format!("PpoParts::{name}: expected at least one, found none")));
            }
        }
        let eval_prompts = self.eval_prompts.iter().take(SAMPLE_ROWS.max(config.num_eval_prompts));
        self.prompts.iter().chain(eval_prompts).try_for_each(|prompt| self.rewards.check_row(&prompt.row))?;
        let ends = Ends::find(config, &self.tokenizer, vocab)?;
        self.learner.policy.set_generation(generation_settings(config));
        if self.learner.unsupervised.is_none() {
            self.learner.unsupervised = find_texts(config, &self.tokenizer, vocab, limit.max_length())?;
        }
        Ok(ends)
    }
}

/// The parts that the settings name, loaded, with what a resumed run compares.
pub(crate) struct Loaded {
    pub(crate) parts: PpoParts,
    environment: Option<ToolLoop>,
    pub(crate) cursor: Cursor,
    /// Warnings about prompts and dtypes.
    notes: Vec<String>,
    commits: Commits,
    inputs: Inputs,
}

impl Loaded {
    /// Loads the parts that checked settings name; `more` are the caller's rewards.
    ///
    /// # Errors
    /// If one cannot be loaded, on any rank.
    pub(crate) fn of_run(run: &PpoRun, more: Rewards, found: Found, world: &World) -> Result<Self> {
        let config = &run.config;
        let _date = found.fix_date(world)?;
        let asked = AskedHub::with(found.commits);
        check_sync(config, world)?;
        check_rewards(config, run.rewards.iter().map(Spec::name).chain(more.names()))?;
        world.expect_sharded(config.policy_stage().max(config.value_stage()).max(config.frozen_stage()));
        asked.download(world, &paths_read(run), || {
            Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
            Folders::find(run, &mut Inputs::default()).map(drop)
        })?;
        world.agree(Self::load(run, more, &asked, world))
    }

    fn load(run: &PpoRun, more: Rewards, asked: &AskedHub, world: &World) -> Result<Self> {
        let config = &run.config;
        // Cheap checks first: weights may be gigabytes.
        let sources = Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
        check_held_out(&config.eval, &sources, &config.data)?;
        let mut inputs = Inputs::default();
        let folders = Folders::find(run, &mut inputs)?;
        let optional: Vec<_> = folders.specs.iter().filter_map(Spec::optional_column).collect();
        let Models { learner, reference, mut rewards, tokenizer, mut notes } = Models::load(run, more, folders, world)?;
        let environment = start_environment(config, &tokenizer, &mut rewards)?;
        let model_limit = model_prompt_limit(&learner, reference.as_ref(), &rewards, config.response_length)?;
        let limit = (learner.policy.config().vocab_size, PromptLimit::new(&config.prompt_length, model_limit)?);
        let environment = environment.map(|environment| environment.limited_to(limit.1));
        let prompts = load_prompts(config, &sources, &tokenizer, &rewards, limit, &mut inputs)?;
        check_columns(&optional, prompts.train.iter().map(|prompt| &prompt.row))?;
        check_cuts(config, &rewards, &prompts)?;
        notes.extend(prompts.notes);
        let cursor = prompts.cursor;
        let commits = asked.commits();
        let parts =
            PpoParts { learner, reference, rewards, tokenizer, prompts: prompts.train, eval_prompts: prompts.eval };
        Ok(Self { parts, environment, cursor, notes, commits, inputs })
    }
}

/// Starts the tools and environments that the settings name, and adds their rewards; a replay starts none.
fn start_environment(config: &PpoConfig, tokenizer: &Tokenizer, rewards: &mut Rewards) -> Result<Option<ToolLoop>> {
    if rewards.is_recorded() {
        return Ok(None);
    }
    let log = Log::at(&config.run.output_dir.join(TOOLS_LOG));
    let tool_loop = ToolLoop::start(&config.environment, tokenizer, &log)?;
    tool_loop.iter().for_each(|tool_loop| rewards.extend(tool_loop.rewards()));
    Ok(tool_loop)
}

/// The models that the settings name, loaded.
pub(crate) struct Models {
    pub(crate) learner: Learner,
    pub(crate) reference: Option<CausalLm>,
    pub(crate) rewards: Rewards,
    pub(crate) tokenizer: Tokenizer,
    /// Warnings about dtypes.
    notes: Vec<String>,
}

impl Models {
    /// Loads the models that checked settings name, without any prompts; `more` are the caller's rewards.
    ///
    /// # Errors
    /// If one cannot be loaded, on any rank.
    pub(crate) fn of_run(run: &PpoRun, more: Rewards, world: &World) -> Result<Self> {
        let config = &run.config;
        let asked = AskedHub::with(Commits::new());
        check_rewards(config, run.rewards.iter().map(Spec::name).chain(more.names()))?;
        world.expect_sharded(config.policy_stage().max(config.value_stage()).max(config.frozen_stage()));
        asked.download(world, &paths_read(run), || Folders::find(run, &mut Inputs::default()).map(drop))?;
        let load = || {
            let models = Self::load(run, more, Folders::find(run, &mut Inputs::default())?, world)?;
            let reference = models.reference.as_ref();
            let rewards = &models.rewards;
            model_prompt_limit(&models.learner, reference, rewards, config.response_length)?;
            Ok(models)
        };
        let mut models = world.agree(load())?;
        if let Some(reference) = &mut models.reference {
            reference.shard(world, run.learner.policy_stage);
        }
        models.learner.policy.set_generation(generation_settings(config));
        Ok(models)
    }

    fn load(run: &PpoRun, more: Rewards, folders: Folders, world: &World) -> Result<Self> {
        let config = &run.config;
        // Each tensor stays as its file has it and is computed in the policy's precision: widening a weight loses nothing, so the reference
        // gives exactly the same numbers as the policy that it is a copy of, with half the memory where the files are in bf16.
        let frozen = model_options(&config.run)?;
        let Folders { policy: dir, value: value_dir, tokenizer, specs } = folders;
        let specs = if more.is_recorded() { specs.into_iter().map(Spec::recorded).collect() } else { specs };
        let mut tokenizer = Tokenizer::from_pretrained(&tokenizer)?;
        tokenizer.set_chat_variables(config.data.chat_template.variables());
        let (policy, reference) = load_policy(run, &dir, frozen, world)?;
        check_encoder_decoder(config, policy.config())?;
        tokenizer.set_encoder_decoder(policy.config().is_encoder_decoder());
        let mut notes = notes_on_weights(&dir, config.run.dtype, &policy);
        tokenizer.check_fits(policy.config(), &dir)?;
        let mut rewards = config.load_rewards(specs, &tokenizer, frozen)?;
        rewards.extend(more);
        rewards.shard(world, config.frozen_stage());
        offload_frozen(config, reference.as_ref(), Some(&rewards))?;
        for model in rewards.models().filter(|model| !model.reads_text()) {
            tokenizer.check_same(model.dir())?;
        }
        let place = config.run.state_place();
        let learner = |policy, value| Learner::on_ranks(world, (policy, value), run.learner.clone(), place.as_ref());
        let learner = if !run.needs_critic {
            learner(policy, ValueModel::None)?
        } else if config.legacy.value_head {
            let (policy, head) = CausalLmWithValueHead::found_in(&dir, policy, config.run.seed)?.into_parts();
            learner(policy, head.into())?
        } else {
            let (value, value_notes) = load_value(config, value_dir.as_deref(), &dir, &rewards, frozen)?;
            notes.extend(value_notes);
            tokenizer.check_same(&value.dir)?;
            learner(policy, value.model.into())?
        };
        Ok(Self { learner, reference, rewards, tokenizer, notes })
    }
}

/// The folders and rewards that the settings name.
struct Folders {
    policy: PathBuf,
    value: Option<PathBuf>,
    tokenizer: PathBuf,
    specs: Vec<Spec>,
}

impl Folders {
    /// Finds the folders, in the hub's cache where they are names on the hub, and records them in `inputs`.
    fn find(run: &PpoRun, inputs: &mut Inputs) -> Result<Self> {
        let config = &run.config;
        let policy = hub::model_dir(&config.sft_model_path, Some(&config.model_revision))?;
        let specs = resolve(&run.rewards)?;
        inputs.model(name_of!(config.sft_model_path), &policy)?;
        for (name, dir) in specs.iter().filter_map(Spec::named_model) {
            inputs.model(&format!("reward {name}"), dir)?;
        }
        check_reward_models(config, &specs, &policy)?;
        let value = config.value_model_path.as_ref().map(|dir| hub::model_dir(dir, None)).transpose()?;
        value.as_deref().map_or(Ok(()), |dir| inputs.model(name_of!(config.value_model_path), dir))?;
        let tokenizer = match &config.model_name_or_path {
            Some(name) => {
                let dir = hub::tokenizer_dir(name, None)?;
                inputs.model(name_of!(config.model_name_or_path), &dir)?;
                dir
            }
            None => policy.clone(),
        };
        Ok(Self { policy, value, tokenizer, specs })
    }
}

/// Removes the dropout of an adapter, which would make the first ratios differ from 1.
fn without_dropout(lora: LoraConfig) -> LoraConfig {
    LoraConfig { dropout: 0.0, ..lora }
}

/// Loads the policy, and the reference model if the settings use one: the policy without its adapter, with shared lower layers, or a
/// frozen copy.
fn load_policy(run: &PpoRun, dir: &Path, frozen: ModelOptions, world: &World) -> Result<(CausalLm, Option<CausalLm>)> {
    let config = &run.config;
    let lora = config.peft.lora().map(without_dropout);
    let mut policy = CausalLm::from_pretrained(dir, trained_options(frozen, lora.is_some()))?;
    // An adapter in the folder (of SFT) is merged, into the reference too.
    policy.prepare(config.optimizer.optim.trains(lora.is_some()))?;
    // Each model is divided over the ranks right after it is loaded, so that only one is whole in memory at a time.
    let divide = |policy: &mut CausalLm| {
        // A value head on the policy is added later, so such a policy is divided later.
        if !config.legacy.value_head {
            policy.set_trainable(true);
            policy.shard(world, run.learner.policy_stage);
        }
    };
    let reference = match (&lora, config.legacy.num_shared_layers) {
        (Some(lora), _) => {
            policy.add_adapter(lora, config.run.seed)?;
            let base = run.has_reference.then(|| policy.base()).transpose()?;
            divide(&mut policy);
            base
        }
        (None, Some(layers)) => {
            let mut reference = policy.share_lower_layers(layers)?;
            // Before the offloading, as an offloaded model cannot change its dtype.
            reference.hold_as_computed();
            Some(reference)
        }
        (None, None) => {
            divide(&mut policy);
            run.has_reference.then(|| load_reference(config, dir, frozen, world)).transpose()?
        }
    };
    Ok((policy, reference))
}

/// The reference model of the run, by its settings.
fn reference_settings(config: &PpoConfig) -> Reference<'_> {
    Reference {
        run: &config.run,
        is_synced: config.sync.sync_ref_model,
        optim: config.optimizer.optim,
        stage: config.policy_stage(),
    }
}

/// Loads a reference model that shares nothing with the policy, and divides it over the ranks.
fn load_reference(config: &PpoConfig, dir: &Path, frozen: ModelOptions, world: &World) -> Result<CausalLm> {
    let mut reference = reference_settings(config).load(dir, frozen)?;
    reference_settings(config).place(&mut reference, world, false)?;
    Ok(reference)
}

/// Loads a reference model that follows the policy from a checkpoint.
pub(super) fn load_synced_reference(
    config: &PpoConfig,
    dir: &Path,
    frozen: ModelOptions,
    world: &World,
) -> Result<CausalLm> {
    let mut reference = reference_settings(config).load_saved(dir, frozen)?;
    reference_settings(config).place(&mut reference, world, false)?;
    Ok(reference)
}

/// Offloads frozen models, if the settings say so and they are not offloaded already.
fn offload_frozen(config: &PpoConfig, reference: Option<&CausalLm>, rewards: Option<&Rewards>) -> Result<()> {
    let Some(place) = config.run.models_place() else { return Ok(()) };
    reference.map_or(Ok(()), |reference| reference.offload(&place, "reference model"))?;
    rewards.map_or(Ok(()), |rewards| rewards.offload(&place))
}

/// A separate value model, and the folder it was loaded from.
struct LoadedValue {
    model: SequenceClassifier,
    dir: PathBuf,
}

/// Loads a separate value model: from its own folder, else from the first reward model that can be one, else from the policy
/// with a new head. Returns it with warnings about its dtype.
fn load_value(
    config: &PpoConfig,
    value_dir: Option<&Path>,
    policy: &Path,
    rewards: &Rewards,
    frozen: ModelOptions,
) -> Result<(LoadedValue, Vec<String>)> {
    let lora = config.value_lora().map(without_dropout);
    let new_head = config.new_reward_head.then_some(config.run.seed);
    let reward_dir = rewards.models().find(|model| model.can_be_value_model()).map(RewardModel::dir);
    let (dir, head) = match (value_dir, reward_dir) {
        (Some(dir), _) | (None, Some(dir)) => (dir, new_head),
        // A reward model with another tokenizer or several labels cannot be the start of a value model.
        (None, None) => (policy, Some(config.run.seed)),
    };
    let mut model = SequenceClassifier::from_pretrained(dir, head, trained_options(frozen, lora.is_some()))?;
    model.check_values(dir)?;
    model.prepare(config.optimizer.optim.trains(lora.is_some()))?;
    if let Some(lora) = &lora {
        // PEFT knows only these names of parameters.
        model.set_format(ClassifierFormat::Transformers)?;
        model.add_adapter(lora, config.run.seed)?;
    }
    let notes = notes_on_weights(dir, config.run.dtype, &model);
    Ok((LoadedValue { model, dir: dir.to_path_buf() }, notes))
}

/// Prompts to train on and prompts that are held out.
struct LoadedPrompts {
    train: Vec<Prompt>,
    eval: Vec<Prompt>,
    cursor: Cursor,
    /// Warnings about prompts that were truncated or dropped.
    notes: Vec<String>,
}

/// Reads and encodes the prompts of `sources`, within the vocabulary and the length of `limit`.
fn load_prompts(
    config: &PpoConfig,
    sources: &Sources<'_>,
    tokenizer: &Tokenizer,
    rewards: &Rewards,
    limit: (i64, PromptLimit),
    inputs: &mut Inputs,
) -> Result<LoadedPrompts> {
    let (train, eval) = sources.read(config.run.seed, Stage::Ppo)?;
    inputs.rows("dataset_name", &config.data.describe(), &train);
    inputs.rows("rows held out", &config.data.describe(), &eval);
    let (train, eval) = read_prompts(config, (train, eval), tokenizer, limit, |row| rewards.check_row(row))?;
    let tokens: Vec<&[i64]> = train.rows.iter().map(|prompt| prompt.tokens.as_slice()).collect();
    inputs.tokens("dataset_name", &config.data.describe(), &tokens);
    rewards.contents().for_each(|(name, contents)| inputs.reward(name, &contents));
    inputs.programs(ENVIRONMENTS, &config.environment.contents());
    let cursor = train.cursor(config.run.seed, &config.data);
    let bare = bare_prompts(config, tokenizer, &train.rows);
    let notes = [train.warnings, eval.warnings].into_iter().flatten().chain(bare).collect();
    Ok(LoadedPrompts { train: train.rows, eval: eval.rows, cursor, notes })
}

/// Returns the warning about prompts that are texts, where the model has a chat template: it then reads them without it.
fn bare_prompts(config: &PpoConfig, tokenizer: &Tokenizer, prompts: &[Prompt]) -> Option<String> {
    if config.apply_chat_template || !tokenizer.has_chat_template() {
        return None;
    }
    let is_text = |prompt: &&Prompt| prompt_field(&prompt.row).is_some_and(|(_, value)| value.is_string());
    let texts = prompts.iter().filter(is_text).count();
    let all = prompts.len();
    (texts > 0).then(|| {
        let which = if texts == all { "the prompts are".into() } else { format!("{texts} of {all} prompts are") };
        format!(
            "{which} plain text, and the model has a chat template: it reads them without it; --apply_chat_template makes each a \
             message of the user"
        )
    })
}

/// Encodes the prompts to train on and those that are held out, within the vocabulary and the length of `limit`.
///
/// # Errors
/// If a row has no prompt, `check_row` refuses it, or its prompt is too long.
pub(in crate::train) fn read_prompts(
    config: &PpoConfig,
    (mut train, mut eval): (Vec<Dataset>, Option<Dataset>),
    tokenizer: &Tokenizer,
    (vocab, limit): (i64, PromptLimit),
    check_row: impl Fn(&Value) -> Result<()>,
) -> Result<(Gathered<Prompt>, Gathered<Prompt>)> {
    let read = |dataset: &Dataset| {
        dataset.check(&check_row)?;
        dataset.prompts_within(tokenizer, vocab, limit)
    };
    if config.apply_chat_template || config.environment.is_used() {
        train = train.into_iter().map(Dataset::with_chat_prompts).collect();
        eval = eval.map(Dataset::with_chat_prompts);
    }
    if let Some(system) = &config.system_prompt {
        train = train.into_iter().map(|train| train.with_system_prompt(system)).collect();
        eval = eval.map(|eval| eval.with_system_prompt(system));
    }
    // Where long prompts are dropped, later prompts take their places, so all rows are needed.
    if config.prompt_length.long_prompts != LongPrompts::Drop {
        eval = eval.map(|eval| eval.first(SAMPLE_ROWS.max(config.num_eval_prompts)));
    }
    Ok((gather(&train, read)?, gather(eval.as_slice(), read)?))
}

/// Refuses a run without rewards, or one that chooses the best model by a reward that it does not have; `names` are the names of its
/// rewards.
pub(crate) fn check_rewards<'a>(config: &PpoConfig, names: impl Iterator<Item = &'a str>) -> Result<()> {
    let names: Vec<&str> = names.collect();
    // An environment names its reward once it has started.
    if names.is_empty() && config.environment.environment_factory.is_empty() {
        let message = "no reward: set at least one of `reward_model_path`, `reward`, `reward_command` and `reward_url`";
        return Err(Error::Usage(message.into()));
    }
    if let Some(metric) = &config.eval.metric_for_best_model
        && let Some(name) = metric.strip_prefix(EVAL_SCORES)
        && !names.contains(&name)
        && config.environment.environment_factory.is_empty()
    {
        let known = names.join(", ");
        let rest = format!(" = {metric}: expected the name of a reward, one of {known}");
        return Err(Error::refused(name_of!(config.eval.metric_for_best_model), rest));
    }
    Ok(())
}

/// Refuses the `policy`, a folder or a name, as its own reward model.
pub(crate) fn check_reward_models(config: &PpoConfig, rewards: &[Spec], policy: &Path) -> Result<()> {
    // As in TRL: with `new_reward_head` the user may want one model with a random score head.
    match rewards.iter().filter_map(Spec::model_path).find(|path| is_same_folder(path, policy)) {
        _ if config.new_reward_head => Ok(()),
        Some(same) => Err(Error::refused(
            name_of!(config.sft_model_path),
            format!(
                " = {}: the reward model is this same folder ({}): expected a model that was trained to score \
             responses, as `rlhf reward` does, not the one that writes them; as TRL does, --new_reward_head gives it a score head with random \
             weights",
                config.sft_model_path.display(),
                same.display()
            ),
        )),
        None => Ok(()),
    }
}

/// Returns the texts that are mixed in, if there are any, in blocks as long as the `longest` prompt plus a response.
///
/// # Errors
/// The errors of [`Unsupervised::find`].
pub(in crate::train) fn find_texts(
    config: &PpoConfig,
    tokenizer: &Tokenizer,
    vocab: i64,
    longest: usize,
) -> Result<Option<Unsupervised>> {
    let block = config.prompt_length.max_prompt_length.unwrap_or(longest).min(longest) + config.response_length;
    Unsupervised::find(&config.unsupervised, tokenizer, vocab, block, config.run.seed)
}

/// Refuses truncated prompts where a reward model would read the whole conversation.
fn check_cuts(config: &PpoConfig, rewards: &Rewards, prompts: &LoadedPrompts) -> Result<()> {
    let cuts = match config.prompt_length.long_prompts {
        LongPrompts::TruncateLeft => "truncate_left",
        LongPrompts::TruncateRight => "truncate_right",
        LongPrompts::Error | LongPrompts::Drop => return Ok(()),
    };
    if prompts.notes.is_empty() {
        return Ok(());
    }
    let renders = |model: &&RewardModel| {
        prompts.train.iter().chain(&prompts.eval).any(|prompt| model.conversation(&prompt.row).is_some())
    };
    match rewards.models().find(renders) {
        Some(model) => Err(Error::refused(
            name_of!(config.prompt_length.long_prompts),
            format!(
                " = {cuts}: {} reads a whole conversation by its own chat template, and would score responses to the \
             truncated prompt as if they were responses to that: expected drop or error",
                model.dir().display()
            ),
        )),
        None => Ok(()),
    }
}

/// Opens the output folder of a run.
///
/// # Errors
/// If the run may not write there, or cannot resume.
pub(super) fn open(run: &PpoRun, world: &World) -> Result<Opening> {
    Opening::new(world, COMMAND, (&run.config, &run.config.run), &paths_read(run))
}

/// Returns the paths that a run reads, as its settings and its rewards name them.
fn paths_read(run: &PpoRun) -> Vec<&Path> {
    let config = &run.config;
    let rewards = run.rewards.iter().filter_map(Spec::model_path);
    let optional = [config.value_model_path.as_deref(), config.model_name_or_path.as_deref()];
    let mut paths: Vec<&Path> = vec![&config.sft_model_path];
    paths.extend(config.data.dataset_name.iter().map(|name| name.as_path()));
    paths.extend(config.eval_dataset_name.as_deref());
    paths.extend(optional.into_iter().flatten().chain(rewards));
    paths
}

/// Returns the limit on the tokens of a prompt: a response has to fit into the `context` of a decoder with it. An encoder has the whole
/// `context` for the prompt, and its decoder has it for a start token and the response.
///
/// # Errors
/// If no token is left for a prompt, or for a start token.
pub(crate) fn prompt_limit(policy: &ModelConfig, context: usize, response_length: usize) -> Result<PromptLimit> {
    let longest = max_prompt_len(policy, context, ("response_length", response_length), "")?;
    Ok(if policy.is_encoder_decoder() { PromptLimit::of_encoder(longest) } else { PromptLimit::of_context(longest) })
}

/// Refuses settings that an encoder-decoder as the policy cannot have.
///
/// # Errors
/// If there is one.
pub(crate) fn check_encoder_decoder(config: &PpoConfig, policy: &ModelConfig) -> Result<()> {
    if !policy.is_encoder_decoder() {
        return Ok(());
    }
    let texts = config.unsupervised.unsupervised_dataset_name.as_ref();
    let refused = if config.apply_chat_template {
        Some(
            "apply_chat_template = true: expected false: no chat template divides the prompt from the response"
                .to_string(),
        )
    } else if let Some(layers) = config.legacy.num_shared_layers {
        Some(format!("num_shared_layers = {layers}: expected none: only the layers of a single stack can be shared"))
    } else {
        texts.map(|name| {
            format!("unsupervised_dataset_name = {}: expected none: its texts have no prompts", name.display())
        })
    };
    match refused {
        Some(refused) => Err(Error::Usage(format!("{refused}, for a policy with an encoder and a decoder"))),
        None => Ok(()),
    }
}

/// Returns [`prompt_limit`] for the smallest context of all models that read token ids.
///
/// # Errors
/// The errors of [`prompt_limit`]; if a model cannot read what the policy writes: it is on another device, knows fewer tokens, or only one of
/// the two is an encoder-decoder.
fn model_prompt_limit(
    learner: &Learner,
    reference: Option<&CausalLm>,
    rewards: &Rewards,
    response_length: usize,
) -> Result<PromptLimit> {
    let policy = &learner.policy;
    let value = learner.value.model();
    let value_device = value.map(|value| ("value model", value.device()));
    let reference_device = reference.map(|reference| ("reference", reference.device()));
    for (name, device) in value_device.into_iter().chain(reference_device) {
        if device != policy.device() {
            let message = format!("{name}: expected the policy's device {:?}, found {device:?}", policy.device());
            return Err(Error::Usage(message));
        }
    }
    let read_ids = rewards.models().filter(|model| !model.reads_text());
    let reward_models = read_ids.map(|model| (model.dir().display().to_string(), model.classifier().config()));
    let others = value.map(|value| ("value model".into(), value.config())).into_iter();
    let others = others.chain(reference.map(|reference| ("reference".into(), reference.config())));
    let mut context = policy.config().max_position_embeddings;
    for (name, model) in reward_models.chain(others) {
        // The policy may sample any of its ids, including those after the tokenizer's last id.
        let expected = policy.config().vocab_size;
        let found = model.vocab_size;
        if found < expected {
            let message = format!("{name}: vocab_size: expected at least the policy's {expected}, found {found}");
            return Err(Error::Run(message));
        }
        check_same_kind(&name, policy.config(), model)?;
        context = context.min(model.max_position_embeddings);
    }
    prompt_limit(policy.config(), context, response_length)
}

/// Refuses a model that reads the policy's tokens if it has an encoder and the policy has none, or the other way round.
pub(crate) fn check_same_kind(name: &str, policy: &ModelConfig, model: &ModelConfig) -> Result<()> {
    let kind = |model: &ModelConfig| {
        if model.is_encoder_decoder() { "an encoder-decoder" } else { "a single stack of layers" }
    };
    if policy.is_encoder_decoder() == model.is_encoder_decoder() {
        return Ok(());
    }
    Err(Error::Run(format!("{name}: expected {}, as the policy is, found {}", kind(policy), kind(model))))
}

fn is_same_folder(a: &Path, b: &Path) -> bool {
    a == b || a.canonicalize().is_ok_and(|a| b.canonicalize().is_ok_and(|b| a == b))
}

/// Checks the prompts in the field `name` of [`PpoParts`].
fn check_prompts(name: &str, prompts: &[Prompt], limit: PromptLimit, vocab: i64) -> Result<()> {
    let longest = limit.max_length();
    for (row, Prompt { tokens, .. }) in prompts.iter().enumerate() {
        let found = tokens.len();
        let strange = tokens.iter().find(|id| !(0..vocab).contains(*id));
        let problem = match strange {
            Some(id) => format!("ids below the policy's vocabulary of {vocab}, found {id}"),
            None if (1..=longest).contains(&found) => continue,
            None => format!("1 to {longest} tokens, {}, found {found}", limit.reason()),
        };
        return Err(Error::Usage(format!("PpoParts::{name}: row {row}: expected {problem}")));
    }
    Ok(())
}

/// Returns the sampling settings of the policy's responses in training, by the names of transformers' generation configuration. Stop
/// strings are left out: transformers refuses to generate with them unless it is given the tokenizer.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::OffloadPart;
    use tch::Kind;

    #[test]
    fn a_reference_that_shares_layers_is_offloaded_in_the_dtype_of_its_products_and_stays_out() {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models/gpt_neox");
        let dir = tempfile::tempdir().unwrap();
        let prompts = dir.path().join("prompts.jsonl");
        std::fs::write(&prompts, "{\"prompt\": \"The movie\"}\n").unwrap();
        let mut config = PpoConfig::new(model, "", prompts, dir.path().join("out"));
        (config.reward_model_path, config.rewards.reward) = (None, vec!["length:target=3".into()]);
        (config.legacy.num_shared_layers, config.legacy.value_head) = (Some(1), true);
        (config.run.bf16, config.run.offload.offload) = (true, vec![OffloadPart::Models]);
        let run = PpoRun::new(&config).unwrap();
        let mut parts = Loaded::of_run(&run, Rewards::new(), Found::default(), &World::single()).unwrap().parts;
        let upper_layer_params = |parts: &PpoParts| -> Vec<_> {
            let reference = parts.reference.as_ref().unwrap();
            let params = reference.params().iter().filter(|param| param.name.contains("layers.1.mlp"));
            params.map(|param| (param.tensor.kind(), param.tensor.data_ptr())).collect()
        };
        let loaded = upper_layer_params(&parts);
        assert!(!loaded.is_empty() && loaded.iter().all(|(kind, _)| *kind == Kind::BFloat16), "{loaded:?}");
        parts.prepare(&run).unwrap();
        assert_eq!(upper_layer_params(&parts), loaded);
    }
}
