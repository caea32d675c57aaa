//! The pipeline of three stages: SFT, the reward model, PPO. Each starts from the models of the stages before it.
//!
//! Each stage has its own folder, and is the same run as its command with these settings. A finished stage leaves a
//! `trainer_state.json` in the folder of its model, with its settings and the sizes of the model's files: a resumed pipeline skips it.

use super::distill::{self, distill};
use super::dpo::{self, dpo};
use super::ppo::{self, ppo};
use super::reward_model::{self, reward};
use super::sft::{self, sft};
use super::{check_held_out, gather};
use crate::data::{Dataset, PromptLimit, Sources};
use crate::reward::{Spec, check_columns};
use crate::run::Runtime;
use crate::run::checkpoint::{FinishedRun, RunSettings, UNFINISHED};
use crate::run::ends::{ends_of, words};
use crate::run::inputs::{ENVIRONMENTS, Inputs};
use crate::run::output_dir::{CONFIG, FolderLock, METRICS, check_output_dir, holds_run, resolved_settings};
use crate::run::session::stop_requested_on_any;
use crate::run::sinks::console::{Console, announce};
use crate::run::start::Start;
use crate::settings::{
    DistillConfig, DpoConfig, PpoConfig, Resume, RewardConfig, RunConfig, SftConfig, Stage, write_resolved,
};
use crate::terminal::Stream;
use comfy_table::{ContentArrangement, Table, presets};
use rlhf_base::dist::World;
use rlhf_base::safe_text::{lines, one_line};
use rlhf_base::schema::Field;
use rlhf_base::signals::stopped;
use rlhf_base::weights::Checkpoint;
use rlhf_base::{Error, Result};
use rlhf_hub as hub;
use rlhf_hub::push::Destination;
use rlhf_lm::model::{AdapterFolder, ModelConfig, is_model};
use rlhf_lm::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Settings of `rlhf pipeline`: those of each stage, `None` for a stage that is skipped.
#[derive(Debug, Clone, PartialEq)]
pub struct PipelineConfig {
    /// Folder for the settings of the pipeline; the stages write to their own `output_dir`s.
    pub output_dir: PathBuf,
    /// Supervised fine-tuning.
    pub sft: Option<SftConfig>,
    /// The reward model.
    pub reward: Option<RewardConfig>,
    /// PPO.
    pub ppo: Option<PpoConfig>,
    /// DPO, after SFT.
    pub dpo: Option<DpoConfig>,
    /// Distillation, after SFT.
    pub distill: Option<DistillConfig>,
}

/// The settings of a stage; null if it is left out.
#[derive(Debug, Serialize)]
#[serde(transparent)]
struct StageSettings {
    values: Value,
    #[serde(skip)]
    described: Vec<Field>,
    #[serde(skip)]
    loss_of_micro_batches: Option<&'static str>,
}

impl StageSettings {
    fn new<C: RunSettings>(config: Option<&C>) -> Self {
        Self {
            values: json!(config),
            described: config.map_or_else(Vec::new, RunSettings::described),
            loss_of_micro_batches: config.and_then(RunSettings::loss_of_micro_batches),
        }
    }
}

impl RunSettings for StageSettings {
    fn described(&self) -> Vec<Field> {
        self.described.clone()
    }

    fn loss_of_micro_batches(&self) -> Option<&'static str> {
        self.loss_of_micro_batches
    }
}

impl PipelineConfig {
    /// Returns the defaults, for rows with `prompt`, `chosen` and `rejected`, which are split 2,4,4: SFT starts from the model in
    /// the folder `model_name_or_path`, the reward model from the model of SFT, PPO from both.
    pub fn new(
        model_name_or_path: impl Into<PathBuf>,
        dataset_name: impl Into<PathBuf>,
        output_dir: impl Into<PathBuf>,
    ) -> Self {
        let data = dataset_name.into();
        let out = output_dir.into();
        let [sft_dir, reward_dir, ppo_dir] = Stage::ALL.map(|stage| Self::dir(&out, stage));
        let mut sft = SftConfig::new(model_name_or_path, &data, &sft_dir);
        let mut reward = RewardConfig::new(&sft_dir, &data, &reward_dir);
        reward.new_reward_head = true;
        let mut ppo = PpoConfig::new(&sft_dir, &reward_dir, &data, ppo_dir);
        for data in [&mut sft.data, &mut reward.data, &mut ppo.data] {
            data.data_split = Some(DEFAULT_SPLIT.parse().expect("it is one"));
        }
        Self { output_dir: out, sft: Some(sft), reward: Some(reward), ppo: Some(ppo), dpo: None, distill: None }
    }

    /// Returns the folder of a stage in the pipeline's folder.
    pub fn dir(output_dir: &Path, stage: Stage) -> PathBuf {
        output_dir.join(match stage {
            Stage::Sft => "1-sft",
            Stage::Reward => "2-reward",
            Stage::Ppo => "3-ppo",
            Stage::Dpo => "4-dpo",
            Stage::Distill => "5-distill",
        })
    }

    /// Returns the stages that the pipeline has, or skips.
    pub fn stages(&self) -> Vec<Stage> {
        Stage::EVERY.into_iter().filter(|stage| Stage::ALL.contains(stage) || self.run(*stage).is_some()).collect()
    }

    /// Returns the longest `dist_timeout` of the stages, in seconds; none if all are skipped.
    pub fn dist_timeout(&self) -> Option<u64> {
        self.stages().into_iter().filter_map(|stage| self.run(stage)).map(|run| run.dist.dist_timeout).max()
    }

    fn run(&self, stage: Stage) -> Option<&RunConfig> {
        match stage {
            Stage::Sft => self.sft.as_ref().map(|config| &config.run),
            Stage::Reward => self.reward.as_ref().map(|config| &config.run),
            Stage::Ppo => self.ppo.as_ref().map(|config| &config.run),
            Stage::Dpo => self.dpo.as_ref().map(|config| &config.run),
            Stage::Distill => self.distill.as_ref().map(|config| &config.run),
        }
    }

    /// Returns the settings, with `overwrite_output_dir` set for the stages that start again.
    fn replacing(&self, states: [StageState; Stage::EVERY.len()]) -> Self {
        let mut config = self.clone();
        let runs = [
            config.sft.as_mut().map(|config| &mut config.run),
            config.reward.as_mut().map(|config| &mut config.run),
            config.ppo.as_mut().map(|config| &mut config.run),
            config.dpo.as_mut().map(|config| &mut config.run),
            config.distill.as_mut().map(|config| &mut config.run),
        ];
        for (run, _) in runs.into_iter().zip(states).filter(|(_, state)| *state == StageState::Again) {
            run.into_iter().for_each(|run| run.overwrite_output_dir = true);
        }
        config
    }

    /// Returns the settings of a stage by name.
    fn settings(&self, stage: Stage) -> StageSettings {
        match stage {
            Stage::Sft => StageSettings::new(self.sft.as_ref()),
            Stage::Reward => StageSettings::new(self.reward.as_ref()),
            Stage::Ppo => StageSettings::new(self.ppo.as_ref()),
            Stage::Dpo => StageSettings::new(self.dpo.as_ref()),
            Stage::Distill => StageSettings::new(self.distill.as_ref()),
        }
    }

    /// Returns the models that a stage starts from.
    fn models(&self, stage: Stage) -> Vec<&Path> {
        match (stage, &self.reward, &self.ppo) {
            (Stage::Dpo, ..) => self.dpo.iter().map(|dpo| dpo.model_name_or_path.as_path()).collect(),
            (Stage::Distill, ..) => {
                let distill = self.distill.iter();
                distill
                    .flat_map(|config| [&config.model_name_or_path, &config.teacher_model_name_or_path])
                    .map(PathBuf::as_path)
                    .collect()
            }
            (Stage::Reward, Some(reward), _) => vec![&reward.model_name_or_path],
            (Stage::Ppo, _, Some(ppo)) => {
                let others = [ppo.reward_model_path.as_deref(), ppo.value_model_path.as_deref()];
                others.into_iter().flatten().chain([ppo.sft_model_path.as_path()]).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Checks the settings of a stage, and returns its rewards.
    fn check(&self, stage: Stage) -> Result<Vec<Spec>> {
        let checked = match stage {
            Stage::Sft => self.sft.as_ref().map_or(Ok(()), SftConfig::check),
            Stage::Reward => self.reward.as_ref().map_or(Ok(()), RewardConfig::check),
            Stage::Ppo => return self.ppo.as_ref().map_or(Ok(Vec::new()), PpoConfig::checked),
            Stage::Dpo => self.dpo.as_ref().map_or(Ok(()), DpoConfig::check),
            Stage::Distill => self.distill.as_ref().map_or(Ok(()), DistillConfig::check),
        };
        checked.map(|()| Vec::new())
    }
}

/// DeepSpeed-Chat's split of one dataset among the three stages.
pub const DEFAULT_SPLIT: &str = "2,4,4";

/// Runs SFT, the reward model and PPO. All settings, folders and rows are checked before the first stage starts.
///
/// # Errors
/// If a setting, a model folder or a row of the data is missing or malformed, which the message names. If a stage fails or is stopped: the
/// error names the stage. Its files stay, and the same call with `resume_from_checkpoint` in each stage's settings resumes.
pub fn pipeline(config: &PipelineConfig, runtime: impl Into<Runtime>) -> Result<()> {
    let runtime: &Runtime = &runtime.into();
    let Runtime { world, console } = runtime;
    let console = *console;
    let threads = tch::get_num_threads();
    let mut rewards = Vec::new();
    for stage in config.stages() {
        rewards.extend(config.check(stage).map_err(|error| named(stage, error))?);
    }
    check_pushes(config)?;
    let begun = world.on_main(|| begin(config, &rewards, runtime))?;
    let states = world.broadcast(begun.as_ref().map_or([StageState::Due; Stage::EVERY.len()], |begun| begun.states))?;
    let config = &config.replacing(states);
    let mut not_pushed = Vec::new();
    let all = config.stages().len();
    for (at, stage) in (1..).zip(config.stages()) {
        let Some(run) = config.run(stage) else {
            say(console, &format!("stage {at} of {all}, {stage}: skipped"));
            continue;
        };
        let dir = run.output_dir.as_path();
        if states[stage as usize] == StageState::Finished {
            say(console, &format!("stage {at} of {all}, {stage}: finished before, in {}", dir.display()));
            continue;
        }
        stop_requested_on_any(world)?;
        if let Some(stopped) = stopped(format!("stopped as requested before stage {at} of {all}, {stage}; {RESUMES}")) {
            return Err(stopped);
        }
        say(console, &format!("stage {at} of {all}, {stage}: into {}", dir.display()));
        // The stage before may have set another number.
        tch::set_num_threads(threads);
        let ended = match stage {
            Stage::Sft => config.sft.as_ref().map_or(Ok(()), |config| sft(config, runtime)),
            Stage::Reward => config.reward.as_ref().map_or(Ok(()), |config| reward(config, runtime)),
            Stage::Ppo => config.ppo.as_ref().map_or(Ok(()), |config| ppo(config, runtime)),
            Stage::Dpo => config.dpo.as_ref().map_or(Ok(()), |config| dpo(config, runtime)),
            Stage::Distill => config.distill.as_ref().map_or(Ok(()), |config| distill(config, runtime)),
        };
        match ended.map_err(|error| named(stage, error)) {
            // The model exists on this machine, which is all that later stages need.
            Err(Error::NotPushed(message)) => not_pushed.push(message),
            ended => ended?,
        }
        world.on_main(|| record_finished(config, &rewards, stage, dir))?;
    }
    report_results(config, console)?;
    if not_pushed.is_empty() { Ok(()) } else { Err(Error::NotPushed(not_pushed.join("; "))) }
}

/// Checks that no two stages push to the same branch: the later model would replace the earlier one.
fn check_pushes(config: &PipelineConfig) -> Result<()> {
    let mut seen: Vec<(Stage, Destination)> = Vec::new();
    for stage in config.stages() {
        let Some(to) = config.run(stage).and_then(|run| run.hub.destination()) else { continue };
        let same = |(_, other): &&(Stage, Destination)| (&other.name, &other.revision) == (&to.name, &to.revision);
        if let Some((earlier, _)) = seen.iter().find(same) {
            return Err(Error::refused(
                "hub_model_id",
                format!(
                    " = {} for {earlier} and {stage}: expected a repository for each stage; set push_to_hub and hub_model_id in \
                 the sections",
                    to.name
                ),
            ));
        }
        seen.push((stage, to));
    }
    Ok(())
}

/// A pipeline whose inputs are checked, in its locked folder. The first rank begins it for all.
struct Begun {
    states: [StageState; Stage::EVERY.len()],
    _lock: FolderLock,
}

/// State of a stage when the pipeline begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum StageState {
    /// It is new, or resumes.
    Due,
    /// It is finished.
    Finished,
    /// It starts again: it was killed after its model was written and before that was recorded.
    Again,
}

/// Locks the pipeline's folder, checks folders and inputs, and writes the settings; `rewards` are the rewards of PPO.
fn begin(config: &PipelineConfig, rewards: &[Spec], runtime: &Runtime) -> Result<Begun> {
    let lock = FolderLock::acquire(&config.output_dir)?;
    let states = check_folders(config, rewards, runtime.console)?;
    check_inputs(config, rewards, states, &runtime.world)?;
    for stage in config.stages().into_iter().filter(|stage| states[*stage as usize] != StageState::Finished) {
        let repository = config.run(stage).map_or(Ok(None), |run| run.hub.repository());
        repository.map_err(|error| named(stage, error))?;
    }
    let overwrite =
        config.stages().into_iter().filter_map(|stage| config.run(stage)).any(|run| run.overwrite_output_dir);
    let (lock, _) = lock.create(&config.output_dir, overwrite)?;
    write_settings(&config.replacing(states))?;
    Ok(Begun { states, _lock: lock })
}

/// Records in the folder `dir` that a stage is finished, so that a resumed pipeline skips it. A stage that `enable_test_mode` ended is not
/// recorded.
fn record_finished(config: &PipelineConfig, rewards: &[Spec], stage: Stage, dir: &Path) -> Result<()> {
    if dir.join(UNFINISHED).is_file() {
        return Ok(());
    }
    let updates = last_line(dir)?.get("step").and_then(Value::as_f64).unwrap_or(0.0);
    let inputs = stage_inputs(config, rewards, stage)?;
    FinishedRun::new(dir, stage.name(), updates as usize, &config.settings(stage), &inputs)?.record()
}

/// The hint of a run that ended early.
const RESUMES: &str = "the same command with --resume_from_checkpoint resumes";

/// Returns the error of a stage with the stage's name.
fn named(stage: Stage, error: Error) -> Error {
    // The hint of a stage names the option of the stage's own command, so it is replaced.
    let hints = ["; --resume_from_checkpoint ", "; to resume: ", "; to begin again: "];
    let with_hint = |message: String| match hints.iter().find_map(|hint| message.split_once(hint)) {
        Some((what, _)) => format!("{stage}: {what}; {RESUMES}"),
        None => format!("{stage}: {message}"),
    };
    match error {
        error if error.is_usage() => {
            error.map_usage(|message| format!("{stage}: {message}")).unwrap_or_else(|other| other)
        }
        Error::NotPushed(message) => Error::NotPushed(format!("{stage}: {message}")),
        Error::Stopped { message, code } => Error::Stopped { message: with_hint(message), code },
        error => Error::Run(with_hint(error.to_string())),
    }
}

fn say(console: Console, text: &str) {
    if console != Console::Silent {
        announce(&crate::terminal::wrap(&lines(text), Stream::Err.width(), 2));
    }
}

/// Checks that each stage may write to its folder, and keeps its settings. Returns the state of each stage.
fn check_folders(
    config: &PipelineConfig,
    rewards: &[Spec],
    console: Console,
) -> Result<[StageState; Stage::EVERY.len()]> {
    let out = config.output_dir.as_path();
    let runs = || config.stages().into_iter().filter_map(|stage| Some((stage, config.run(stage)?)));
    if is_model(out) {
        return Err(Error::invalid(out, "output_dir: expected the folder of a pipeline, found a model in it"));
    }
    if out.join(CONFIG).exists() && !holds_run(out) {
        return Err(Error::invalid(
            out,
            format!("output_dir: expected no {CONFIG} of your own in it; choose another folder"),
        ));
    }
    if holds_run(out) && !runs().any(|(_, run)| resumes(run) || run.overwrite_output_dir) {
        return Err(Error::invalid(
            out,
            "output_dir: expected an empty or new folder, found a run in it; choose another folder, or set \
             --resume_from_checkpoint to resume the run, or --overwrite_output_dir to replace it",
        ));
    }
    let mut states = [StageState::Due; Stage::EVERY.len()];
    let mut unfinished: Vec<(Stage, &Path)> = Vec::new();
    for (stage, run) in runs() {
        let checked = check_stage(config, rewards, (stage, run), console);
        let (state, resumes) = checked.map_err(|error| named(stage, error))?;
        states[stage as usize] = state;
        if resumes && let Some((earlier, dir)) = unfinished.iter().find(|(_, dir)| config.models(stage).contains(dir)) {
            return Err(Error::Usage(format!(
                "{stage}: {} began with {}, and {earlier} is not finished: remove {}, or leave {stage} out",
                run.output_dir.display(),
                dir.display(),
                run.output_dir.display()
            )));
        }
        if state != StageState::Finished {
            unfinished.push((stage, &run.output_dir));
        }
    }
    Ok(states)
}

/// Checks that a stage may write to its folder, and keeps its settings. Returns its state, and whether it has trained before and does not
/// start again.
fn check_stage(
    config: &PipelineConfig,
    rewards: &[Spec],
    (stage, run): (Stage, &RunConfig),
    console: Console,
) -> Result<(StageState, bool)> {
    // The lock is released at once: the stage acquires it itself.
    FolderLock::acquire(&run.output_dir)?;
    if let Some(finished) = resumes(run).then(|| FinishedRun::read(&run.output_dir)).transpose()?.flatten() {
        let mut warnings = finished.check(stage.name(), &config.settings(stage))?;
        warnings.extend(finished.check_inputs(&run.checkpoints, &stage_inputs(config, rewards, stage)?)?);
        for warning in warnings {
            say(console, &format!("warning: {stage}: {warning}"));
        }
        return Ok((StageState::Finished, true));
    }
    let mut start = Start::find(run)?;
    let ended = resumes(run) && start.from.is_none() && is_model(&run.output_dir);
    let mut state = StageState::Due;
    if ended && is_run_with(&run.output_dir, &config.settings(stage)) {
        start.replaces = true;
        state = StageState::Again;
        say(console, &format!("{stage}: {} is not recorded as finished: it starts again", run.output_dir.display()));
    }
    check_output_dir(run, &start, &[])?;
    start.check(stage.name(), &config.settings(stage))?;
    Ok((state, start.from.is_some()))
}

/// Returns true if a run resumes from its latest checkpoint.
fn resumes(run: &RunConfig) -> bool {
    run.checkpoints.resume_from_checkpoint == Some(Resume::Latest)
}

/// Returns digests of the files that a stage reads, as far as they are on this machine: the inputs of a finished stage may be gone. The
/// models of earlier stages have their own digests.
fn stage_inputs(config: &PipelineConfig, rewards: &[Spec], stage: Stage) -> Result<Inputs> {
    let mut inputs = Inputs::default();
    let model_setting = "model_name_or_path";
    let (data, eval_name, models) = match (stage, &config.sft, &config.reward, &config.ppo) {
        (Stage::Sft, Some(sft), ..) => {
            let models = vec![
                (model_setting, sft.model_name_or_path.as_deref()),
                ("tokenizer_name", sft.tokenizer_name.as_deref()),
            ];
            (&sft.data, sft.eval_dataset_name.as_deref(), models)
        }
        (Stage::Reward, _, Some(reward), _) => {
            let models = vec![(model_setting, Some(reward.model_name_or_path.as_path()))];
            (&reward.data, reward.eval_dataset_name.as_deref(), models)
        }
        (Stage::Ppo, .., Some(ppo)) => {
            let others = [(model_setting, &ppo.model_name_or_path), ("value_model_path", &ppo.value_model_path)];
            let others = others.into_iter().map(|(name, path)| (name, path.as_deref()));
            let models = std::iter::once(("sft_model_path", Some(ppo.sft_model_path.as_path()))).chain(others);
            (&ppo.data, ppo.eval_dataset_name.as_deref(), models.collect())
        }
        _ => match (stage, &config.dpo, &config.distill) {
            (Stage::Dpo, Some(dpo), _) => {
                let reference = ("ref_model_name_or_path", dpo.ref_model_name_or_path.as_deref());
                let models = vec![(model_setting, Some(dpo.model_name_or_path.as_path())), reference];
                (&dpo.data, dpo.eval_dataset_name.as_deref(), models)
            }
            (Stage::Distill, _, Some(distill)) => {
                let teacher = ("teacher_model_name_or_path", Some(distill.teacher_model_name_or_path.as_path()));
                let models = vec![(model_setting, Some(distill.model_name_or_path.as_path())), teacher];
                (&distill.data, distill.eval_dataset_name.as_deref(), models)
            }
            _ => return Ok(inputs),
        },
    };
    let seed = config.run(stage).map_or(0, |run| run.seed);
    if data.dataset_name.iter().map(PathBuf::as_path).chain(eval_name).all(Path::exists) {
        let (train, eval) = Sources::find(data, eval_name)?.read(seed, stage)?;
        inputs.rows("dataset_name", &data.describe(), &train);
        inputs.rows("rows held out", &data.describe(), &eval);
    }
    let stage_dirs = Stage::EVERY.map(|stage| PipelineConfig::dir(&config.output_dir, stage));
    let models = models.into_iter().filter_map(|(name, dir)| Some((name, dir?)));
    let is_read = |dir: &Path| dir.is_dir() && !stage_dirs.iter().any(|stage_dir| stage_dir == dir);
    for (name, dir) in models.filter(|(_, dir)| is_read(dir)) {
        inputs.model(name, dir)?;
    }
    add_files((config, rewards), stage, &is_read, &mut inputs)?;
    Ok(inputs)
}

/// Adds digests of the files that a stage reads, and of its rewards; of the reward models only those for which `is_read` is true.
fn add_files(
    (config, rewards): (&PipelineConfig, &[Spec]),
    stage: Stage,
    is_read: &impl Fn(&Path) -> bool,
    inputs: &mut Inputs,
) -> Result<()> {
    match (stage, &config.sft, &config.ppo) {
        (Stage::Sft, Some(sft), _) => {
            let template = sft.chat_template_path.as_deref();
            let shape = sft
                .config_name
                .as_deref()
                .map(|name| if name.is_dir() { name.join("config.json") } else { name.into() });
            shape.map_or(Ok(()), |shape| inputs.file("config_name", &shape))?;
            template.map_or(Ok(()), |template| inputs.file("chat_template_path", template))
        }
        (Stage::Ppo, _, Some(ppo)) => {
            let texts = ppo.unsupervised.unsupervised_dataset_name.as_deref();
            texts.map_or(Ok(()), |texts| inputs.file("unsupervised_dataset_name", texts))?;
            for spec in rewards {
                if let Some((name, dir)) = spec.named_model().filter(|(_, dir)| is_read(dir)) {
                    inputs.model(&format!("reward {name}"), dir)?;
                }
                inputs.reward(spec.name(), &spec.contents());
            }
            inputs.programs(ENVIRONMENTS, &ppo.environment.contents());
            Ok(())
        }
        (Stage::Dpo, ..) => {
            let dpo = config.dpo.as_ref();
            let texts = dpo.and_then(|dpo| dpo.unsupervised.unsupervised_dataset_name.as_deref());
            texts.map_or(Ok(()), |texts| inputs.file("unsupervised_dataset_name", texts))
        }
        _ => Ok(()),
    }
}

/// Returns whether the run in `dir` has the same settings, and so the same result.
fn is_run_with(dir: &Path, settings: &StageSettings) -> bool {
    resolved_settings(dir).is_some_and(|resolved| resolved == settings.values)
}

type ReadTokenizer = fn(&Path) -> Result<Tokenizer>;

/// Tokenizer and configuration of a model: the parts that are known before it is trained.
struct Reading {
    tokenizer: Tokenizer,
    shape: ModelConfig,
}

impl Reading {
    /// Reads tokenizer and configuration of the model `name`, which is downloaded if need be; `tokenizer` reads the tokenizer. Only the
    /// names of the weights are read.
    fn of(name: &Path, revision: Option<&str>, tokenizer: ReadTokenizer) -> Result<Self> {
        let dir = hub::model_dir(name, revision)?;
        Ok(Self { shape: read_shape(&dir)?, tokenizer: tokenizer(&dir)? })
    }
}

/// Reads the configuration of the model in `dir`, and the names of its weights.
fn read_shape(dir: &Path) -> Result<ModelConfig> {
    let base = AdapterFolder::find(dir)?.map_or(Ok(dir.to_path_buf()), |adapter| adapter.base_dir())?;
    let shape = ModelConfig::from_dir(&base)?;
    Checkpoint::open(&base)?;
    Ok(shape)
}

/// Tokenizers and configurations of the models that the stages write to these folders.
type Readings<'c> = Vec<(&'c Path, Rc<Reading>)>;

fn find_reading(
    known: &Readings<'_>,
    name: &Path,
    revision: Option<&str>,
    tokenizer: ReadTokenizer,
) -> Result<Rc<Reading>> {
    match known.iter().find(|(dir, _)| *dir == name) {
        Some((_, reading)) => Ok(reading.clone()),
        None => Reading::of(name, revision, tokenizer).map(Rc::new),
    }
}

/// Checks the inputs of the stages: that the models exist, except those that earlier stages make; that every row has the fields
/// that its stage needs; that the sizes fit together. Checks that need weights are left to the stages.
fn check_inputs(
    config: &PipelineConfig,
    rewards: &[Spec],
    states: [StageState; Stage::EVERY.len()],
    world: &World,
) -> Result<()> {
    let mut known: Readings<'_> = Vec::new();
    for stage in config.stages() {
        let Some(run) = config.run(stage) else { continue };
        let dir = run.output_dir.as_path();
        let reading = match stage {
            _ if states[stage as usize] == StageState::Finished => {
                Reading::of(dir, None, Tokenizer::from_pretrained).map(|reading| Some(Rc::new(reading)))
            }
            Stage::Sft => config.sft.as_ref().map(check_sft).transpose().map(|reading| reading.map(Rc::new)),
            Stage::Reward => config.reward.as_ref().map(|config| check_reward(config, &known)).transpose(),
            Stage::Ppo => {
                let check = |config| check_ppo(config, rewards, &known, world);
                config.ppo.as_ref().map_or(Ok(()), check).map(|()| None)
            }
            Stage::Dpo => config.dpo.as_ref().map_or(Ok(()), |config| check_dpo(config, &known)).map(|()| None),
            Stage::Distill => {
                config.distill.as_ref().map_or(Ok(()), |config| check_distill(config, &known)).map(|()| None)
            }
        };
        known.extend(reading.map_err(|error| named(stage, error))?.map(|reading| (dir, reading)));
    }
    Ok(())
}

fn check_sft(config: &SftConfig) -> Result<Reading> {
    let sources = Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
    check_held_out(&config.eval, &sources, &config.data)?;
    let folders = sft::Folders::find(config)?;
    let shape = match (&folders.model, &folders.shape) {
        (Some(dir), _) => read_shape(dir)?,
        (None, Some(file)) => ModelConfig::from_file(file)?,
        (None, None) => unreachable!("`check` refuses settings without a model"),
    };
    let (mut tokenizer, _) = sft::load_tokenizer(config, &folders)?;
    sft::fit_tokenizer(&mut tokenizer, config, folders.model.as_deref(), &shape)?;
    let (train, eval) = sources.read(config.run.seed, Stage::Sft)?;
    let (blocks, _) = sft::read_rows(config, [&train, eval.as_slice()], &tokenizer, &shape)?;
    config.plan_for(blocks.rows.len())?;
    Ok(Reading { tokenizer, shape })
}

fn check_reward(config: &RewardConfig, known: &Readings<'_>) -> Result<Rc<Reading>> {
    reward_model::refuse_eval_only(config)?;
    let sources = Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
    check_held_out(&config.eval, &sources, &config.data)?;
    let revision = Some(config.model_revision.as_str());
    let reading = find_reading(known, &config.model_name_or_path, revision, Tokenizer::from_pretrained)?;
    reading.tokenizer.check_fits(&reading.shape, &config.model_name_or_path)?;
    let mut tokenizer = reading.tokenizer.clone();
    reward_model::set_up_tokenizer(&mut tokenizer, config)?;
    let pads = reward_model::find_pads(config, &reading.shape, &tokenizer, &config.model_name_or_path)?;
    let read = |dataset: &Dataset| reward_model::read_pairs(dataset, config, &reading.shape, &tokenizer, pads.as_ref());
    let (train, eval) = sources.read(config.run.seed, Stage::Reward)?;
    let pairs = gather(&train, read)?;
    gather(eval.as_slice(), read)?;
    config.plan_for(pairs.rows.len())?;
    Ok(reading)
}

fn check_dpo(config: &DpoConfig, known: &Readings<'_>) -> Result<()> {
    let sources = Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
    check_held_out(&config.eval, &sources, &config.data)?;
    let revision = Some(config.model_revision.as_str());
    let policy = find_reading(known, &config.model_name_or_path, revision, Tokenizer::from_pretrained)?;
    policy.tokenizer.check_fits(&policy.shape, &config.model_name_or_path)?;
    let other = config.ref_model_name_or_path.as_deref();
    let other = other.map(|dir| find_reading(known, dir, None, Tokenizer::from_pretrained)).transpose()?;
    let mut tokenizer = policy.tokenizer.clone();
    let shapes = [Some(&policy.shape), other.as_deref().map(|reading| &reading.shape)];
    dpo::check_rows(config, &mut tokenizer, shapes, &sources)
}

fn check_distill(config: &DistillConfig, known: &Readings<'_>) -> Result<()> {
    let sources = Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
    check_held_out(&config.eval, &sources, &config.data)?;
    let revision = Some(config.model_revision.as_str());
    let student = find_reading(known, &config.model_name_or_path, revision, Tokenizer::from_pretrained)?;
    // A teacher without a tokenizer is taken to have the student's; the stage warns about it when it starts.
    let teacher = &config.teacher_model_name_or_path;
    let revision = Some(config.teacher_model_revision.as_str());
    let teacher = find_reading(known, teacher, revision, Tokenizer::of_text_or_ids)?;
    distill::check_tokenizers(&student.tokenizer, &teacher.tokenizer, &config.teacher_model_name_or_path)?;
    let mut tokenizer = student.tokenizer.clone();
    distill::check_rows(config, &mut tokenizer, [Some(&student.shape), Some(&teacher.shape)], &sources)
}

fn check_ppo(config: &PpoConfig, specs: &[Spec], known: &Readings<'_>, world: &World) -> Result<()> {
    ppo::check_eval_prompts(config)?;
    ppo::check_sync(config, world)?;
    let sources = Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
    check_held_out(&config.eval, &sources, &config.data)?;
    ppo::check_rewards(config, specs.iter().map(Spec::name))?;
    ppo::check_reward_models(config, specs, &config.sft_model_path)?;
    let revision = Some(config.model_revision.as_str());
    let policy = find_reading(known, &config.sft_model_path, revision, Tokenizer::from_pretrained)?;
    let tokenizer_dir = config.model_name_or_path.as_ref().map(|dir| hub::tokenizer_dir(dir, None)).transpose()?;
    let explicit_tokenizer = tokenizer_dir.map(|dir| Tokenizer::from_pretrained(&dir)).transpose()?;
    ppo::check_encoder_decoder(config, &policy.shape)?;
    let mut tokenizer = explicit_tokenizer.unwrap_or_else(|| policy.tokenizer.clone());
    tokenizer.set_encoder_decoder(policy.shape.is_encoder_decoder());
    tokenizer.set_chat_variables(config.data.chat_template.variables());
    let tokenizer = &tokenizer;
    tokenizer.check_fits(&policy.shape, &config.sft_model_path)?;
    let mut context = policy.shape.max_position_embeddings;
    let vocab = policy.shape.vocab_size;
    let value = config.value_model_path.as_deref();
    for dir in specs.iter().filter_map(Spec::model_path).chain(value) {
        let model = find_reading(known, dir, None, Tokenizer::of_text_or_ids)?;
        if value == Some(dir) {
            model.shape.check_decoder(dir)?;
        }
        // A model without a tokenizer reads the policy's ids.
        let differing = if model.tokenizer.knows_text() { tokenizer.difference(&model.tokenizer) } else { 0 };
        if value == Some(dir) && differing > 0 {
            let message = format!(
                "value_model_path: expected the policy's tokenizer, found one that differs in {differing} tokens"
            );
            return Err(Error::invalid(dir, message));
        }
        // Any other reward model reads text, of any length.
        let reads_ids = model.shape.causal && differing == 0 && !tokenizer.is_of_encoder_decoder();
        if value == Some(dir) {
            ppo::check_same_kind("value_model_path", &policy.shape, &model.shape)?;
        }
        if value == Some(dir) || (reads_ids && !model.shape.is_encoder_decoder()) {
            if model.shape.vocab_size < vocab {
                let found = model.shape.vocab_size;
                let message = format!("vocab_size: expected at least the policy's {vocab}, found {found}");
                return Err(Error::invalid(dir, message));
            }
            context = context.min(model.shape.max_position_embeddings);
        }
    }
    let model_limit = ppo::prompt_limit(&policy.shape, context, config.response_length)?;
    let limit = PromptLimit::new(&config.prompt_length, model_limit)?;
    ppo::Ends::find(config, tokenizer, vocab)?;
    let read = sources.read(config.run.seed, Stage::Ppo)?;
    let check_row = |row: &Value| specs.iter().try_for_each(|spec| spec.check_row(row));
    let (prompts, _) = ppo::read_prompts(config, read, tokenizer, (vocab, limit), check_row)?;
    specs.iter().try_for_each(|spec| spec.check_import(&config.rewards))?;
    let columns: Vec<_> = specs.iter().filter_map(Spec::optional_column).collect();
    check_columns(&columns, prompts.rows.iter().map(|prompt| &prompt.row))?;
    config.plan_for(prompts.rows.len())?;
    ppo::find_texts(config, tokenizer, vocab, model_limit.max_length()).map(drop)
}

/// Writes the settings of all stages to a file that `rlhf pipeline --config` can read.
fn write_settings(config: &PipelineConfig) -> Result<()> {
    let out = config.output_dir.as_path();
    let mut all = Map::from_iter([("output_dir".to_string(), json!(out))]);
    let skipped: Vec<_> = config.stages().into_iter().filter(|&stage| config.run(stage).is_none()).collect();
    all.insert("skip".into(), json!(skipped));
    for stage in config.stages().into_iter().filter(|stage| !skipped.contains(stage)) {
        let mut settings = config.settings(stage).values;
        if let Some(settings) = settings.as_object_mut() {
            settings.remove("output_dir");
            // The default is the model of an earlier stage; written out, it would name this folder's model in other folders too.
            let stage_models = [Stage::Sft, Stage::Reward].map(|stage| json!(PipelineConfig::dir(out, stage)));
            for key in ["model_name_or_path", "sft_model_path", "reward_model_path"] {
                match settings.get(key) {
                    Some(Value::Null) if key == "reward_model_path" => drop(settings.insert(key.into(), "none".into())),
                    Some(value) if stage_models.contains(value) => drop(settings.remove(key)),
                    _ => {}
                }
            }
        }
        all.insert(stage.name().into(), settings);
    }
    write_resolved(&Value::from(all), out.join(CONFIG))
}

/// Returns the lines of the `metrics.jsonl` in `dir`; none if there is no such file.
fn metrics(dir: &Path) -> Result<Vec<Map<String, Value>>> {
    let path = dir.join(METRICS);
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

fn last_line(dir: &Path) -> Result<Map<String, Value>> {
    Ok(metrics(dir)?.pop().unwrap_or_default())
}

/// The main metrics of each stage.
const KEY_METRICS: [&[&str]; Stage::EVERY.len()] = [
    &["loss", "eval_loss"],
    &["loss", "accuracy", "eval_accuracy"],
    &["objective/scores", "objective/kl", "eval/score"],
    &["loss", "rewards/accuracies", "eval_rewards/accuracies"],
    &["loss", "entropy", "eval_loss"],
];

/// Writes a table of the results of the stages.
fn report_results(config: &PipelineConfig, console: Console) -> Result<()> {
    if console == Console::Silent {
        return Ok(());
    }
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic);
    let stream = if console == Console::Program { Stream::Err } else { Stream::Out };
    stream.width().map(|width| table.set_width(width.min(usize::from(u16::MAX)) as u16));
    table.set_header(["stage", "updates", "numbers, start to end", "folder"]);
    let mut notes = String::new();
    for stage in config.stages() {
        let Some(run) = config.run(stage) else {
            table.add_row([stage.name(), "", "left out", ""]);
            continue;
        };
        let lines = metrics(&run.output_dir)?;
        let numbers = KEY_METRICS[stage as usize].iter().filter_map(|name| {
            let [first, last] = ends_of(&lines, name)?;
            Some(if first.is_empty() { format!("{name} {last}") } else { format!("{name} {first} to {last}") })
        });
        let numbers: Vec<String> = numbers.collect();
        let updates = lines.last().and_then(|line| line.get("step")?.as_f64());
        let updates = updates.map_or(String::new(), |updates| updates.to_string());
        notes.push_str(&format!("{}: {}\n", stage.name(), words(lines.len())));
        table.add_row([stage.name(), &updates, &numbers.join("\n"), &one_line(&run.output_dir.display().to_string())]);
    }
    match console {
        // Standard output has the metrics.
        Console::Program => say(console, &format!("{table}\n{}", notes.trim_end())),
        _ => drop(write!(std::io::stdout(), "{table}\n{notes}")),
    }
    Ok(())
}
