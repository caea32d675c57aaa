//! Distillation: a language model, the student, learns the distributions of another one, the teacher, on responses of a dataset, of the
//! student or of the teacher.

mod learn;
mod rows;
#[cfg(test)]
mod tests;
mod totals;

use super::supervised::{Data, Loaded, Words, build_optimizer, divide, spec, train, with_opened};
use super::{
    Gathered, check_held_out, check_one_stack, gather, model_options, notes_on_weights, set_up_tokenizer,
    small_dataset, trained_options,
};
use crate::data::{Dataset, PromptLimit, Sources};
use crate::run::Runtime;
use crate::run::card::command_to_try;
use crate::run::event::Sample;
use crate::run::session::Opening;
use crate::settings::{DistillConfig, DistillLoss, Stage, max_prompt_len};
pub(crate) use learn::Source;
use rlhf_base::dist::World;
use rlhf_base::{Error, Refusal, Result, name_of};
use rlhf_hub as hub;
use rlhf_hub::AskedHub;
use rlhf_lm::generate::StopStrings;
use rlhf_lm::model::{CausalLm, LmHead, ModelConfig, ModelOptions};
use rlhf_lm::tokenizer::Tokenizer;
pub(crate) use rows::DistillRow;
use rows::{Limits, read_rows};
use std::path::{Path, PathBuf};

/// The command, as checkpoints name it.
const COMMAND: &str = "distill";

/// Metrics of the end of a run, by their labels.
const OUTCOME: [(&str, &str); 3] = [("loss", "loss"), ("entropy", "entropy"), ("held-out loss", "eval_loss")];

/// The rows of a run, and the teacher.
///
/// The loss of an update is the mean over all tokens of its responses, for any size of the micro-batches and any number of ranks.
struct Distillation<'a> {
    config: &'a DistillConfig,
    teacher: CausalLm,
    tokenizer: Tokenizer,
    stop_strings: Option<StopStrings>,
    train: Gathered<DistillRow>,
    eval: Vec<DistillRow>,
    /// Tokens of all prompts and responses so far.
    num_tokens: usize,
    /// Responses of the last update that are shown.
    shown: Vec<Sample>,
}

/// Trains a model by distillation as `config` sets and saves it in `output_dir`.
///
/// # Errors
/// If a setting, a model folder or a row of the data is missing or malformed, which the message names; if a gradient is not finite, after
/// saving the last complete update.
pub fn distill(config: &DistillConfig, runtime: impl Into<Runtime>) -> Result<()> {
    let runtime: &Runtime = &runtime.into();
    let world = &runtime.world;
    config.check()?;
    let find = || {
        Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
        Folders::find(config).map(drop)
    };
    with_opened(COMMAND, (config, &config.run), (&paths_read(config), find), world, |opening, hub| {
        let (task, loaded) = world.agree(load_run(config, opening, hub, world))?;
        train(task, loaded, runtime)
    })
}

/// Returns the paths that a run reads, as its settings name them.
fn paths_read(config: &DistillConfig) -> Vec<&Path> {
    let datasets = config.data.dataset_name.iter().map(|name| name.as_path());
    let models = [config.model_name_or_path.as_path(), config.teacher_model_name_or_path.as_path()];
    models.into_iter().chain(datasets).chain(config.eval_dataset_name.as_deref()).collect()
}

/// The folders of the models, in the hub's cache where they are names on the hub.
struct Folders {
    student: PathBuf,
    teacher: PathBuf,
}

impl Folders {
    fn find(config: &DistillConfig) -> Result<Self> {
        let revision = Some(config.teacher_model_revision.as_str());
        // The hub's error names the student's setting.
        let named = |refusal: Refusal| match refusal.setting() {
            Some("model_revision") => Refusal::new(name_of!(config.teacher_model_revision), refusal.reason()),
            _ => refusal,
        };
        let teacher = hub::model_dir(&config.teacher_model_name_or_path, revision).map_err(|error| match error {
            Error::Refused(refusals) => Error::Refused(refusals.into_iter().map(named).collect()),
            other => other,
        })?;
        Ok(Self { student: hub::model_dir(&config.model_name_or_path, Some(&config.model_revision))?, teacher })
    }
}

/// Loads models and rows.
///
/// # Errors
/// If a setting, a model folder or a row of the data is missing or malformed, which the message names.
fn load_run<'a>(
    config: &'a DistillConfig,
    opening: Opening,
    hub: &AskedHub,
    world: &World,
) -> Result<(Distillation<'a>, Loaded<'a, DistillConfig, LmHead>)> {
    // Cheap checks first: weights may be gigabytes.
    let sources = Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
    check_held_out(&config.eval, &sources, &config.data)?;
    let folders = Folders::find(config)?;
    let mut tokenizer = Tokenizer::from_pretrained(&folders.student)?;
    let teacher_tokenizer = Tokenizer::of_text_or_ids(&folders.teacher)?;
    let added = check_tokenizers(&tokenizer, &teacher_tokenizer, &folders.teacher)?;
    set_up_tokenizer(&mut tokenizer, &config.data, config.eos_token.as_deref())?;
    let (mut model, teacher) = load_models(config, &folders, world)?;
    tokenizer.check_fits(model.config(), &folders.student)?;
    tokenizer.check_fits(teacher.config(), &folders.teacher)?;
    let eos = tokenizer.eos().filter(|_| config.eos_token.is_some());
    eos.into_iter().for_each(|eos| model.set_eos(eos));

    let limits = limits(config, [Some(model.config()), Some(teacher.config())])?;
    let Data { train, eval, first_row, mut inputs } =
        Data::read(&sources, &config.data, config.run.seed, Stage::Distill)?;
    inputs.model("model_name_or_path", &folders.student)?;
    inputs.model("teacher_model_name_or_path", &folders.teacher)?;
    let read = |dataset: Dataset| read_rows(dataset, config, &tokenizer, &limits);
    let (train, eval) = (gather(train, read)?, gather(eval, read)?);
    let num_rows = train.rows.len();
    let tokens: Vec<&[i64]> = train.rows.iter().map(|row| row.tokens.as_slice()).collect();
    inputs.tokens("dataset_name", &config.data.describe(), &tokens);
    let plan = config.plan_for(num_rows)?;
    let mut warnings = [&train.warnings[..], &eval.warnings].concat();
    warnings.extend(small_dataset(&config.data, num_rows, plan.batch_size));
    warnings.extend(notes_on_weights(&folders.student, config.run.dtype, &model));
    let more =
        [endless(config, &tokenizer), filtered(config), untold(config, &teacher_tokenizer), unshared(config, added)];
    warnings.extend(more.into_iter().flatten());

    let optimizer = build_optimizer(&model, &config.run, &config.optimizer)?;
    let words = words(config, &tokenizer, folders.student, (num_rows, first_row.as_ref()));
    let loaded = Loaded {
        model,
        tokenizer: tokenizer.clone(),
        opening,
        spec: spec(COMMAND, config, (&config.run, &config.eval, config.logging_steps), &plan, num_rows),
        optimizer,
        schedule: (config.learning_rate, &config.optimizer),
        cursor: train.cursor(config.run.seed, &config.data),
        num_rows,
        commits: hub.commits(),
        inputs,
        warnings,
        words,
    };
    let strings = &config.sampling.stop_strings;
    let stop_strings = (!strings.is_empty()).then(|| StopStrings::new(&tokenizer, strings.clone())).transpose()?;
    let eval = eval.rows;
    Ok((
        Distillation { config, teacher, tokenizer, stop_strings, train, eval, num_tokens: 0, shown: Vec::new() },
        loaded,
    ))
}

/// Checks the rows of a run with models of these shapes, student and teacher, before the models are loaded.
///
/// # Errors
/// If a row is malformed, a setting does not fit, or a model has two stacks.
pub(super) fn check_rows(
    config: &DistillConfig,
    tokenizer: &mut Tokenizer,
    models: [Option<&ModelConfig>; 2],
    sources: &Sources<'_>,
) -> Result<()> {
    let limits = set_up(config, tokenizer, models)?;
    let (train, eval) = sources.read(config.run.seed, Stage::Distill)?;
    let read = |dataset: Dataset| read_rows(dataset, config, tokenizer, &limits);
    let rows = gather(train, read)?;
    gather(eval, read)?;
    config.plan_for(rows.rows.len()).map(drop)
}

/// Returns the rows of a run for a plan, and their number in each dataset.
///
/// # Errors
/// The errors of [`check_rows`].
pub(crate) fn planned_rows(
    config: &DistillConfig,
    tokenizer: &mut Tokenizer,
    sources: &Sources<'_>,
    models: [Option<&ModelConfig>; 2],
) -> Result<(Vec<DistillRow>, Vec<usize>)> {
    let limits = set_up(config, tokenizer, models)?;
    let (train, _) = sources.read(config.run.seed, Stage::Distill)?;
    let read = |dataset: Dataset| read_rows(dataset, config, tokenizer, &limits);
    let Gathered { rows, lens, .. } = gather(train, read)?;
    Ok((rows, lens))
}

/// Sets up the student's tokenizer, and returns the limits of the rows of a run with models of these shapes.
fn set_up(config: &DistillConfig, tokenizer: &mut Tokenizer, models: [Option<&ModelConfig>; 2]) -> Result<Limits> {
    let names = [&config.model_name_or_path, &config.teacher_model_name_or_path];
    for (shape, name) in models.iter().zip(names) {
        shape.map_or(Ok(()), |shape| check_one_stack(COMMAND, shape, name))?;
    }
    set_up_tokenizer(tokenizer, &config.data, config.eos_token.as_deref())?;
    limits(config, models)
}

/// Returns the words of a run over `num_rows` rows, with the `first_row` of its data.
fn words<'a>(
    config: &'a DistillConfig,
    tokenizer: &Tokenizer,
    model_dir: PathBuf,
    (num_rows, first_row): (usize, Option<&serde_json::Value>),
) -> Words<'a> {
    let others = if config.seq_kd { "the teacher's" } else { "the dataset's" };
    let responses = match config.lmbda {
        1.0 => "the student's".into(),
        0.0 => others.into(),
        share => format!("the student's in {share} of the updates, else {others}"),
    };
    Words {
        model: Some(model_dir),
        base_model: Some(&config.model_name_or_path),
        is_adapter: config.peft.use_peft,
        unit: "rows",
        data: format!("`{}`, {num_rows} rows", config.data.describe()),
        facts: vec![("teacher", config.teacher_model_name_or_path.display().to_string()), ("responses", responses)],
        tokenizer: tokenizer.describe(),
        notes: Vec::new(),
        numbers: &OUTCOME,
        commands: vec![command_to_try(&config.run.output_dir, first_row, None)],
    }
}

/// Returns a warning if nothing ends a sampled response before its maximum length.
fn endless(config: &DistillConfig, tokenizer: &Tokenizer) -> Option<String> {
    let has_end = !tokenizer.eos_ids().is_empty() || !config.sampling.stop_strings.is_empty();
    (config.samples() && !has_end).then(|| {
        format!(
            "the tokenizer has no eos token and there are no stop_strings: each sampled response has max_completion_length = {} tokens",
            config.max_completion_length
        )
    })
}

/// Returns a warning if there is no `teacher_tokenizer` to compare with the student's.
fn untold(config: &DistillConfig, teacher_tokenizer: &Tokenizer) -> Option<String> {
    let teacher = config.teacher_model_name_or_path.display();
    (!teacher_tokenizer.knows_text()).then(|| {
        format!(
            "teacher_model_name_or_path: {teacher} has no tokenizer.json: its ids are taken to be those of the student"
        )
    })
}

/// Returns a warning if responses are not sampled by the distribution whose gradient a policy gradient estimates.
fn filtered(config: &DistillConfig) -> Option<String> {
    let names: Vec<&str> = config.changed_sampling().into_iter().map(|(name, _)| name).collect();
    (config.loss.loss_type == DistillLoss::ReverseKlAdvantage && !names.is_empty()).then(|| {
        format!(
            "loss_type = reverse_kl_advantage with {}: responses are not sampled by the student's whole distribution, whose reverse KL divergence \
             the gradient is to lower: it is biased",
            names.join(", ")
        )
    })
}

/// Returns a warning if the teacher's tokenizer has `added` tokens that the student's does not have.
fn unshared(config: &DistillConfig, added: usize) -> Option<String> {
    let teacher = config.teacher_model_name_or_path.display();
    (added > 0).then(|| {
        format!(
            "teacher_model_name_or_path: the tokenizer of {teacher} has {added} added tokens that the student's has not; texts are read without them"
        )
    })
}

/// Checks that the teacher's tokenizer has the same ids as the student's; a teacher without a tokenizer is taken to have them. Returns the
/// number of tokens that were added to the teacher's vocabulary only.
///
/// # Errors
/// If it has other ids, or a vocabulary with more tokens: it would tokenize texts differently.
pub(super) fn check_tokenizers(tokenizer: &Tokenizer, teacher_tokenizer: &Tokenizer, teacher: &Path) -> Result<usize> {
    if !teacher_tokenizer.knows_text() {
        return Ok(0);
    }
    let missing = tokenizer.difference(teacher_tokenizer);
    let beyond = teacher_tokenizer.difference(tokenizer);
    let added = teacher_tokenizer.added_beyond(tokenizer);
    let differing = missing.max(beyond - added);
    if differing == 0 {
        return Ok(added);
    }
    let message = format!(
        "teacher_model_name_or_path: expected the tokenizer of {}, found one that differs in {differing} tokens: the distributions of teacher and \
         student are compared id by id",
        tokenizer.dir().display()
    );
    Err(Error::invalid(teacher, message))
}

/// Returns the limits of rows, for a student and a teacher of these shapes.
///
/// # Errors
/// If a prompt does not fit into the models' context.
fn limits(config: &DistillConfig, models: [Option<&ModelConfig>; 2]) -> Result<Limits> {
    let known = || models.into_iter().flatten();
    let context = known().map(|model| model.max_position_embeddings).min().unwrap_or(usize::MAX);
    let vocab = known().map(|model| model.vocab_size).min().unwrap_or(i64::MAX);
    let prompt = match (config.samples(), models[0]) {
        (true, Some(student)) => {
            let longest =
                max_prompt_len(student, context, ("max_completion_length", config.max_completion_length), "")?;
            Some(PromptLimit::new(&config.prompt_length, PromptLimit::of_context(longest))?)
        }
        (true, None) => Some(PromptLimit::new(&config.prompt_length, PromptLimit::of_context(usize::MAX))?),
        (false, _) => None,
    };
    Ok(Limits { vocab, prompt, max_length: config.max_length.unwrap_or(context).min(context) })
}

/// Loads the student, with an adapter if the settings have one, and the teacher. Each is divided over the ranks before the next one is
/// read.
fn load_models(config: &DistillConfig, folders: &Folders, world: &World) -> Result<(CausalLm, CausalLm)> {
    let lora = config.peft.lora();
    let frozen = model_options(&config.run)?;
    let mut student = CausalLm::from_pretrained(&folders.student, trained_options(frozen, lora.is_some()))?;
    check_one_stack(COMMAND, student.config(), &folders.student)?;
    // An adapter that the folder already has is merged.
    student.prepare(config.optimizer.optim.trains(lora.is_some()))?;
    if let Some(lora) = &lora {
        student.add_adapter(lora, config.run.seed)?;
    }
    divide(&mut student, &config.run, world);
    let options = ModelOptions { dtype: config.dtype_of_teacher(), quantization: config.teacher_format(), ..frozen };
    let mut teacher = CausalLm::from_pretrained(&folders.teacher, options)?;
    check_one_stack(COMMAND, teacher.config(), &folders.teacher)?;
    teacher.merge_adapter();
    teacher.hold_as_computed();
    teacher.shard(world, config.run.dist.zero_stage);
    config.run.models_place().map_or(Ok(()), |place| teacher.offload(&place, "teacher"))?;
    Ok((student, teacher))
}
