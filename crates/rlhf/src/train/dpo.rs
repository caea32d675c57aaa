//! Direct preference optimization: a language model is trained on pairs of completions against a reference model.

mod learn;
mod loss;
mod pairs;
#[cfg(test)]
mod tests;
mod totals;

use super::reference::Reference;
use super::supervised::{Data, Loaded, Words, build_optimizer, divide, spec, train, with_opened};
use super::{
    Gathered, check_held_out, check_one_stack, gather, model_options, notes_on_weights, set_up_tokenizer,
    small_dataset, trained_options,
};
use crate::data::{Dataset, Sources};
use crate::rl::unsupervised::Unsupervised;
use crate::run::Runtime;
use crate::run::card::command_to_try;
use crate::run::session::Opening;
use crate::run::sinks::phase_bar::PhaseBar;
use crate::settings::{DpoConfig, Stage};
pub(crate) use pairs::PairRow;
use pairs::read_pairs;
use rlhf_base::dist::World;
use rlhf_base::{Error, Result};
use rlhf_hub as hub;
use rlhf_hub::AskedHub;
use rlhf_lm::model::{CausalLm, LmHead, ModelConfig};
use rlhf_lm::tokenizer::Tokenizer;
use std::path::{Path, PathBuf};

/// The command, as checkpoints name it.
const COMMAND: &str = "dpo";

/// Metrics of the end of a run, by their labels.
const OUTCOME: [(&str, &str); 5] = [
    ("loss", "loss"),
    ("accuracy", "rewards/accuracies"),
    ("margin", "rewards/margins"),
    ("held-out loss", "eval_loss"),
    ("held-out accuracy", "eval_rewards/accuracies"),
];

/// The pairs of a run, and the reference model.
///
/// The loss of an update is the mean over its micro-batches of the mean over their pairs, for any number of pairs in a pass.
struct PreferenceTask<'a> {
    config: &'a DpoConfig,
    /// The reference model; `None` where its log-probabilities are computed before training.
    reference: Option<CausalLm>,
    train: Gathered<PairRow>,
    eval: Vec<PairRow>,
    /// Texts that are mixed in.
    texts: Option<Unsupervised>,
}

/// Trains a model by DPO as `config` sets and saves it in `output_dir`.
///
/// # Errors
/// If a setting, a model folder or a row of the data is missing or malformed, which the message names; if a gradient is not finite, after
/// saving the last complete update.
pub fn dpo(config: &DpoConfig, runtime: impl Into<Runtime>) -> Result<()> {
    let runtime: &Runtime = &runtime.into();
    let world = &runtime.world;
    config.check()?;
    let find = || {
        Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
        Folders::find(config).map(drop)
    };
    with_opened(COMMAND, (config, &config.run), (&paths_read(config), find), world, |opening, hub| {
        let (mut task, loaded) = world.agree(load_run(config, opening, hub, world))?;
        if config.precompute_ref_log_probs {
            task.precompute(&loaded.model, world, &PhaseBar::new(runtime.console))?;
        }
        train(task, loaded, runtime)
    })
}

/// Returns the paths that a run reads, as its settings name them.
fn paths_read(config: &DpoConfig) -> Vec<&Path> {
    let others = [config.ref_model_name_or_path.as_deref(), config.eval_dataset_name.as_deref()];
    let texts = config.unsupervised.unsupervised_dataset_name.as_deref();
    let datasets = config.data.dataset_name.iter().map(|name| name.as_path());
    let model = config.model_name_or_path.as_path();
    std::iter::once(model).chain(datasets).chain(others.into_iter().flatten()).chain(texts).collect()
}

/// The folders of the models, in the hub's cache where they are names on the hub.
struct Folders {
    model: PathBuf,
    reference: Option<PathBuf>,
}

impl Folders {
    fn find(config: &DpoConfig) -> Result<Self> {
        let model = hub::model_dir(&config.model_name_or_path, Some(&config.model_revision))?;
        let reference = config.ref_model_name_or_path.as_deref().map(|dir| hub::model_dir(dir, None)).transpose()?;
        Ok(Self { model, reference })
    }
}

/// Loads models and pairs.
///
/// # Errors
/// If a setting, a model folder or a row of the data is missing or malformed, which the message names.
fn load_run<'a>(
    config: &'a DpoConfig,
    opening: Opening,
    hub: &AskedHub,
    world: &World,
) -> Result<(PreferenceTask<'a>, Loaded<'a, DpoConfig, LmHead>)> {
    // Cheap checks first: weights may be gigabytes.
    let sources = Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
    check_held_out(&config.eval, &sources, &config.data)?;
    let Folders { model: model_dir, reference: reference_dir } = Folders::find(config)?;
    let mut tokenizer = Tokenizer::from_pretrained(&model_dir)?;
    set_up_tokenizer(&mut tokenizer, &config.data, config.eos_token.as_deref())?;
    let (mut model, reference) = load_models(config, &model_dir, reference_dir.as_deref(), world)?;
    tokenizer.check_fits(model.config(), &model_dir)?;
    let eos = tokenizer.eos().filter(|_| config.eos_token.is_some());
    eos.into_iter().for_each(|eos| model.set_eos(eos));

    let max_length = max_length(config, [Some(model.config()), reference.as_ref().map(|model| model.config())]);
    let Data { train, eval, first_row, mut inputs } = Data::read(&sources, &config.data, config.run.seed, Stage::Dpo)?;
    inputs.model("model_name_or_path", &model_dir)?;
    reference_dir.as_deref().map_or(Ok(()), |dir| inputs.model("ref_model_name_or_path", dir))?;
    let read = |dataset: &Dataset| read_pairs(dataset, config, &tokenizer, max_length);
    let (train, eval) = (gather(&train, read)?, gather(eval.as_slice(), read)?);
    let num_pairs = train.rows.len();
    let tokens: Vec<&[Vec<i64>; 2]> = train.rows.iter().map(|row| &row.sides).collect();
    inputs.tokens("dataset_name", &config.data.describe(), &tokens);
    let vocab = model.config().vocab_size;
    let texts = Unsupervised::find(&config.unsupervised, &tokenizer, vocab, max_length, config.run.seed)?;
    if let (Some(texts), Some(name)) = (&texts, &config.unsupervised.unsupervised_dataset_name) {
        inputs.values("unsupervised_dataset_name", &name.display().to_string(), texts.blocks());
    }
    let plan = config.plan_for(num_pairs)?;
    let mut warnings = [&train.warnings[..], &eval.warnings, &config.loss.warnings()].concat();
    warnings.extend(small_dataset(&config.data, num_pairs, plan.batch_size));
    warnings.extend(notes_on_weights(&model_dir, config.run.dtype, &model));

    let optimizer = build_optimizer(&model, &config.run, &config.optimizer)?;
    let words = words(config, &tokenizer, model_dir, (num_pairs, first_row.as_ref()), texts.as_ref());
    let loaded = Loaded {
        model,
        tokenizer,
        opening,
        spec: spec(COMMAND, config, (&config.run, &config.eval, config.logging_steps), &plan, num_pairs),
        optimizer,
        schedule: (config.learning_rate, &config.optimizer),
        cursor: train.cursor(config.run.seed, &config.data),
        num_rows: num_pairs,
        commits: hub.commits(),
        inputs,
        warnings,
        words,
    };
    Ok((PreferenceTask { config, reference, train, eval: eval.rows, texts }, loaded))
}

/// Checks the rows of a run with models of these shapes, before the models are loaded.
///
/// # Errors
/// If a row is malformed, a setting does not fit, or a model has two stacks.
pub(super) fn check_rows(
    config: &DpoConfig,
    tokenizer: &mut Tokenizer,
    models: [Option<&ModelConfig>; 2],
    sources: &Sources<'_>,
) -> Result<()> {
    models.iter().flatten().try_for_each(|shape| check_one_stack(COMMAND, shape, &config.model_name_or_path))?;
    set_up_tokenizer(tokenizer, &config.data, config.eos_token.as_deref())?;
    let max_length = max_length(config, models);
    let (train, eval) = sources.read(config.run.seed, Stage::Dpo)?;
    let read = |dataset: &Dataset| read_pairs(dataset, config, tokenizer, max_length);
    let pairs = gather(&train, read)?;
    gather(eval.as_slice(), read)?;
    config.plan_for(pairs.rows.len()).map(drop)
}

/// Returns the pairs of a run for a plan, and their number in each dataset.
///
/// # Errors
/// The errors of [`check_rows`].
pub(crate) fn planned_pairs(
    config: &DpoConfig,
    tokenizer: &mut Tokenizer,
    sources: &Sources<'_>,
    max_length: usize,
    models: [Option<&ModelConfig>; 2],
) -> Result<(Vec<PairRow>, Vec<usize>)> {
    models.iter().flatten().try_for_each(|shape| check_one_stack(COMMAND, shape, &config.model_name_or_path))?;
    if let ([Some(policy), Some(reference)], Some(dir)) = (models, &config.ref_model_name_or_path) {
        check_vocabulary([policy, reference], [&config.model_name_or_path, dir])?;
    }
    set_up_tokenizer(tokenizer, &config.data, config.eos_token.as_deref())?;
    let (train, _) = sources.read(config.run.seed, Stage::Dpo)?;
    let mut lens = Vec::new();
    let mut pairs = Vec::new();
    for dataset in &train {
        let (read, _) = read_pairs(dataset, config, tokenizer, max_length)?;
        lens.push(read.len());
        pairs.extend(read);
    }
    Ok((pairs, lens))
}

/// Returns the words of a run over `num_pairs` pairs, with the `first_row` of its data.
fn words<'a>(
    config: &'a DpoConfig,
    tokenizer: &Tokenizer,
    model_dir: PathBuf,
    (num_pairs, first_row): (usize, Option<&serde_json::Value>),
    texts: Option<&Unsupervised>,
) -> Words<'a> {
    let reference = match (&config.ref_model_name_or_path, config.peft.use_peft) {
        (Some(name), _) => name.display().to_string(),
        (None, true) => "the policy without its adapter".into(),
        (None, false) => "the policy at its start".into(),
    };
    let how = if config.precompute_ref_log_probs { ", computed before training" } else { "" };
    Words {
        model: Some(model_dir),
        base_model: Some(&config.model_name_or_path),
        is_adapter: config.peft.use_peft,
        unit: "pairs",
        data: format!("`{}`, {num_pairs} pairs", config.data.describe()),
        facts: vec![("reference", format!("{reference}{how}"))],
        tokenizer: tokenizer.describe(),
        notes: texts.map(Unsupervised::describe).into_iter().collect(),
        numbers: &OUTCOME,
        commands: vec![command_to_try(&config.run.output_dir, first_row, None)],
    }
}

/// Returns the maximum number of tokens of a prompt with a completion, for models of these shapes.
fn max_length<'m>(config: &DpoConfig, models: impl IntoIterator<Item = Option<&'m ModelConfig>>) -> usize {
    let contexts = models.into_iter().flatten().map(|model| model.max_position_embeddings);
    contexts.chain(config.max_length).min().unwrap_or(usize::MAX)
}

/// Loads the policy, with an adapter if the settings have one, and the reference model where it is not the policy at its start. Each is
/// divided over the ranks, and placed, before the next one is read.
fn load_models(
    config: &DpoConfig,
    dir: &Path,
    reference_dir: Option<&Path>,
    world: &World,
) -> Result<(CausalLm, Option<CausalLm>)> {
    let lora = config.peft.lora();
    let mut policy = CausalLm::from_pretrained(dir, trained_options(model_options(&config.run)?, lora.is_some()))?;
    check_one_stack(COMMAND, policy.config(), dir)?;
    // An adapter that the folder already has is merged, into the reference model too.
    policy.prepare(config.optimizer.optim.trains(lora.is_some()))?;
    if let Some(lora) = &lora {
        policy.add_adapter(lora, config.run.seed)?;
    }
    let base = if lora.is_some() && reference_dir.is_none() { Some(policy.base()?) } else { None };
    divide(&mut policy, &config.run, world);
    let mut reference = match (reference_dir, base) {
        (Some(other), _) => {
            let reference = load_reference(config, other)?;
            check_vocabulary([policy.config(), reference.config()], [dir, other])?;
            if config.sync.sync_ref_model {
                check_synced(&policy, &reference, other)?;
            }
            Some(reference)
        }
        (None, Some(base)) => Some(base),
        (None, None) if config.precompute_ref_log_probs => None,
        (None, None) => Some(load_reference(config, dir)?),
    };
    if let Some(reference) = &mut reference {
        place_reference(reference, config, world)?;
    }
    Ok((policy, reference))
}

/// Refuses a reference model with another vocabulary than the policy's.
fn check_vocabulary(models: [&ModelConfig; 2], dirs: [&Path; 2]) -> Result<()> {
    let [expected, found] = models.map(|model| model.vocab_size);
    if expected == found {
        return Ok(());
    }
    let message = format!("expected the vocabulary of {}, {expected} ids, found {found}", dirs[0].display());
    Err(Error::invalid(dirs[1], message))
}

/// The reference model of the run, by its settings.
fn reference_settings(config: &DpoConfig) -> Reference<'_> {
    Reference {
        run: &config.run,
        is_synced: config.sync.sync_ref_model,
        optim: config.optimizer.optim,
        stage: config.run.dist.zero_stage,
    }
}

/// Places the reference model of the run on the ranks `world`.
fn place_reference(reference: &mut CausalLm, config: &DpoConfig, world: &World) -> Result<()> {
    reference_settings(config).place(reference, world, !config.keeps_reference())
}

/// Refuses a reference model that cannot follow the policy.
fn check_synced(policy: &CausalLm, reference: &CausalLm, dir: &Path) -> Result<()> {
    for param in reference.params() {
        let other = policy.params().iter().find(|other| other.name == param.name);
        let expected = other.map(|other| other.tensor.size());
        if expected.as_ref() != Some(&param.tensor.size()) {
            let expected = expected.map_or("no such parameter".into(), |size| format!("{size:?}, as in the policy"));
            let message = format!(
                "sync_ref_model: parameter `{}`: expected {expected}, found {:?}: a reference model that follows the policy has its shape",
                param.name,
                param.tensor.size()
            );
            return Err(Error::invalid(dir, message));
        }
    }
    Ok(())
}

/// Loads a reference model that shares nothing with the policy.
fn load_reference(config: &DpoConfig, dir: &Path) -> Result<CausalLm> {
    let reference = reference_settings(config).load(dir, model_options(&config.run)?)?;
    check_one_stack(COMMAND, reference.config(), dir)?;
    Ok(reference)
}
