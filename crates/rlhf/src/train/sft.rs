//! Supervised fine-tuning: a language model is trained on demonstrations.

use super::supervised::{Data, Loaded, Sums, Supervised, UpdateRows, Words, spec, start_training, train, with_opened};
use super::{Gathered, check_held_out, gather, model_options, notes_on_weights, small_dataset, trained_options};
use crate::data::{Dataset, Demonstration, DemonstrationOptions, Sources, TEMPLATE_FLAG};
use crate::run::Runtime;
use crate::run::card::command_to_try;
use crate::run::inputs::Inputs;
use crate::run::session::Opening;
use crate::settings::{SftConfig, Stage};
use rlhf_base::dist::World;
use rlhf_base::metrics::Metrics;
use rlhf_base::name_of;
use rlhf_base::{Error, Result};
use rlhf_hub as hub;
use rlhf_hub::AskedHub;
use rlhf_lm::model::{Batch, CausalLm, DropoutRows, LmHead, ModelConfig};
use rlhf_lm::optim::micro_batch::micro_batches;
use rlhf_lm::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};
use tch_ext::{on_device, to_host};

/// The command, as checkpoints name it.
const COMMAND: &str = "sft";

/// Fine-tunes a model as `config` sets and saves it in `output_dir`.
///
/// # Errors
/// If a setting, a model folder or a row of the data is missing or malformed, which the message names; if a gradient is not finite, after
/// saving the last complete update.
pub fn sft(config: &SftConfig, runtime: impl Into<Runtime>) -> Result<()> {
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

/// Loads model and rows.
///
/// # Errors
/// If a setting, a model folder or a row of the data is missing or malformed, which the message names.
fn load_run<'a>(
    config: &'a SftConfig,
    opening: Opening,
    hub: &AskedHub,
    world: &World,
) -> Result<(FineTuning<'a>, Loaded<'a, SftConfig, LmHead>)> {
    // Cheap checks first: weights may be gigabytes.
    let sources = Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
    check_held_out(&config.eval, &sources, &config.data)?;
    let Parts { mut model, tokenizer, model_dir, files, warning } = load(config)?;
    let eos = tokenizer.eos().filter(|_| config.eos_token.is_some());
    eos.into_iter().for_each(|eos| model.set_eos(eos));

    let max_length = max_row_length(config, model.config())?;
    let Data { train, eval, first_row, mut inputs } = Data::read(&sources, &config.data, config.run.seed, Stage::Sft)?;
    inputs.extend(files);
    let (train_rows, eval_rows) = read_rows(config, [&train, eval.as_slice()], &tokenizer, model.config())?;
    let tokens: Vec<&[i64]> = train_rows.rows.iter().flatten().map(|row| row.tokens.as_slice()).collect();
    inputs.tokens("dataset_name", &config.data.describe(), &tokens);
    let num_rows = train_rows.rows.iter().map(Vec::len).sum::<usize>();
    let num_blocks = train_rows.rows.len();
    let plan = config.plan_for(num_blocks)?;
    let mut warnings = [&train_rows.warnings[..], &eval_rows.warnings].concat();
    warnings.extend(warning);
    warnings.extend(small_dataset(&config.data, num_blocks, plan.batch_size));
    // The random weights of a configuration are in no file, so there is nothing to note about them.
    warnings.extend(model_dir.iter().flat_map(|dir| notes_on_weights(dir, config.run.dtype, &model)));

    let optimizer = start_training(&mut model, &config.run, &config.optimizer, world)?;
    let packing = format!("{num_rows} rows in {num_blocks} blocks of at most {max_length} tokens");
    let words = Words {
        model: model_dir,
        base_model: config.model_name_or_path.as_deref(),
        is_adapter: config.peft.use_peft,
        unit: if config.packing { "blocks" } else { "rows" },
        data: format!("`{}`, {num_rows} rows", config.data.describe()),
        facts: config.packing.then_some((name_of!(config.packing), packing)).into_iter().collect(),
        tokenizer: tokenizer.describe(),
        notes: Vec::new(),
        numbers: &[("loss", "loss"), ("held-out loss", "eval_loss")],
        commands: vec![command_to_try(&config.run.output_dir, first_row.as_ref(), None)],
    };
    let loaded = Loaded {
        model,
        tokenizer,
        opening,
        spec: spec(COMMAND, config, (&config.run, &config.eval, config.logging_steps), &plan, num_blocks),
        optimizer,
        schedule: (config.learning_rate, &config.optimizer),
        cursor: train_rows.cursor(config.run.seed, &config.data),
        num_rows: num_blocks,
        commits: hub.commits(),
        inputs,
        warnings,
        words,
    };
    Ok((FineTuning { config, train_rows, eval_rows: eval_rows.rows }, loaded))
}

/// Returns the paths that a run reads, as its settings name them.
fn paths_read(config: &SftConfig) -> Vec<&Path> {
    let model = config.model_name_or_path.as_deref();
    let tokenizer = config.tokenizer_name.as_deref().or(model);
    let others = [config.config_name.as_deref(), config.eval_dataset_name.as_deref()];
    let datasets = config.data.dataset_name.iter().map(|name| name.as_path());
    let paths = tokenizer.into_iter().chain(datasets).chain(model).chain(others.into_iter().flatten());
    paths.chain(config.chat_template_path.as_deref()).collect()
}

/// The folders and files of model and tokenizer, in the hub's cache where they are names on the hub.
pub(super) struct Folders {
    /// The model's folder; `None` for random weights.
    pub(super) model: Option<PathBuf>,
    /// The folder of another tokenizer than the model's.
    tokenizer: Option<PathBuf>,
    /// The configuration of a model with random weights.
    pub(super) shape: Option<PathBuf>,
}

impl Folders {
    pub(super) fn find(config: &SftConfig) -> Result<Self> {
        let revision = Some(config.model_revision.as_str());
        let model = config.model_name_or_path.as_deref().map(|dir| hub::model_dir(dir, revision)).transpose()?;
        let tokenizer = config.tokenizer_name.as_deref().map(|dir| hub::tokenizer_dir(dir, None)).transpose()?;
        let shape = config.config_name.as_deref().filter(|_| model.is_none());
        let shape = shape.map(|shape| hub::config_file(shape, revision)).transpose()?;
        Ok(Self { model, tokenizer, shape })
    }
}

/// A loaded model with its tokenizer.
struct Parts {
    model: CausalLm,
    tokenizer: Tokenizer,
    /// The model's folder; `None` for random weights.
    model_dir: Option<PathBuf>,
    /// Digests of the files.
    files: Inputs,
    /// A warning about another tokenizer than the model's.
    warning: Option<String>,
}

/// Loads model and tokenizer, and adds an adapter if the settings have one.
///
/// # Errors
/// If a model folder, a tokenizer or a data file is missing or malformed, which the message names.
fn load(config: &SftConfig) -> Result<Parts> {
    let options = trained_options(model_options(&config.run)?, config.peft.use_peft);
    let folders = Folders::find(config)?;
    let (mut tokenizer, warning) = load_tokenizer(config, &folders)?;
    let Folders { model: model_dir, tokenizer: tokenizer_dir, shape: shape_file } = folders;
    let mut files = Inputs::default();
    model_dir.as_deref().map_or(Ok(()), |dir| files.model("model_name_or_path", dir))?;
    tokenizer_dir.as_deref().map_or(Ok(()), |dir| files.model("tokenizer_name", dir))?;
    for (name, file) in
        [("config_name", &shape_file), (name_of!(config.chat_template_path), &config.chat_template_path)]
    {
        file.as_deref().map_or(Ok(()), |file| files.file(name, file))?;
    }
    let mut model = match (&model_dir, &shape_file) {
        (Some(dir), _) => CausalLm::from_pretrained(dir, options)?,
        (None, Some(shape)) => CausalLm::from_config(ModelConfig::from_file(shape)?, config.run.seed, options)?,
        (None, None) => unreachable!("`check` refuses settings without a model"),
    };
    // An adapter that the folder already has is merged, also before a new one is added.
    model.prepare(config.optimizer.optim.trains(config.peft.use_peft))?;
    if let Some(lora) = config.peft.lora() {
        model.add_adapter(&lora, config.run.seed)?;
    }
    fit_tokenizer(&mut tokenizer, config, model_dir.as_deref(), model.config())?;
    Ok(Parts { model, tokenizer, model_dir, files, warning })
}

/// Loads the tokenizer that the settings name, with their chat template. Returns it with a warning if the model has another tokenizer.
///
/// # Errors
/// If a tokenizer or the template is missing or malformed, or the tokenizer has no `eos_token` of the settings.
pub(super) fn load_tokenizer(config: &SftConfig, folders: &Folders) -> Result<(Tokenizer, Option<String>)> {
    let tokenizer_dir = folders.tokenizer.as_deref();
    let model_dir = folders.model.as_deref();
    let mut tokenizer = match (tokenizer_dir, model_dir) {
        (Some(dir), _) | (None, Some(dir)) => Tokenizer::from_pretrained(dir)?,
        (None, None) => unreachable!("`check` refuses settings without a tokenizer"),
    };
    set_up_tokenizer(&mut tokenizer, config)?;
    let warning = model_dir.zip(tokenizer_dir).map(|(model, dir)| tokenizer_warning(&tokenizer, dir, model));
    let warning = warning.transpose()?.flatten();
    Ok((tokenizer, warning))
}

/// Sets up the tokenizer by the settings, for any model: the chat template with its variables.
///
/// # Errors
/// If the template is missing or malformed, or the tokenizer has no `eos_token` of the settings.
pub(crate) fn set_up_tokenizer(tokenizer: &mut Tokenizer, config: &SftConfig) -> Result<()> {
    if let Some(file) = &config.chat_template_path {
        tokenizer.use_chat_template(file)?;
    }
    super::set_up_tokenizer(tokenizer, &config.data, config.eos_token.as_deref())
}

/// Sets up the tokenizer for a model of this shape; `dir` is the model's folder, if it has one.
///
/// # Errors
/// If the model lacks one of its ids.
pub(super) fn fit_tokenizer(
    tokenizer: &mut Tokenizer,
    config: &SftConfig,
    dir: Option<&Path>,
    shape: &ModelConfig,
) -> Result<()> {
    tokenizer.set_encoder_decoder(shape.is_encoder_decoder());
    let place = dir.or(config.config_name.as_deref());
    tokenizer.check_fits(shape, place.unwrap_or(Path::new("")))
}

/// Returns a warning if `tokenizer`, from the folder `tokenizer_dir`, has other ids than the tokenizer in the model's folder `model_dir`.
///
/// # Errors
/// If the model's tokenizer cannot be read.
fn tokenizer_warning(tokenizer: &Tokenizer, tokenizer_dir: &Path, model_dir: &Path) -> Result<Option<String>> {
    if !Tokenizer::is_in(model_dir)? {
        return Ok(None);
    }
    let differing = tokenizer.difference(&tokenizer.beside(model_dir)?);
    Ok((differing > 0).then(|| {
        format!(
            "tokenizer_name = {}: expected the tokenizer of {}, found one that differs in {differing} tokens: the model reads their \
             ids as other texts until it has learned them anew",
            tokenizer_dir.display(),
            model_dir.display()
        )
    }))
}

/// Returns the maximum number of tokens of a row, or of each prompt and each response of an encoder-decoder.
///
/// # Errors
/// If a setting does not apply to an encoder-decoder.
pub(crate) fn max_row_length(config: &SftConfig, model: &ModelConfig) -> Result<usize> {
    let most = model.max_position_embeddings;
    if !model.is_encoder_decoder() {
        return Ok(config.max_length.unwrap_or(most).min(most));
    }
    let refused = [
        ("packing = true: expected false", config.packing),
        ("completion_only_loss = false: expected true", !config.completion_only_loss),
        ("assistant_only_loss = true: expected false", config.assistant_only_loss),
    ];
    match refused.iter().find(|(_, on)| *on) {
        Some((setting, _)) => Err(Error::Usage(format!(
            "{setting} for an encoder-decoder: each row is a prompt for the encoder and a response, which is learned, for the decoder"
        ))),
        // The decoder reads a start token before the response.
        None => Ok(config.max_length.unwrap_or(most).min(most.saturating_sub(1))),
    }
}

/// Reads the rows of `[train, eval]`, cut to the length that `model` and settings allow: the training rows in blocks, and the held-out
/// rows.
///
/// # Errors
/// If a row is no demonstration, or none of a dataset is left.
pub(super) fn read_rows(
    config: &SftConfig,
    [train, eval]: [&[Dataset]; 2],
    tokenizer: &Tokenizer,
    model: &ModelConfig,
) -> Result<(Gathered<Vec<Demonstration>>, Gathered<Demonstration>)> {
    let max_length = max_row_length(config, model)?;
    let options = learned(config, model.vocab_size);
    let read = |dataset: &Dataset| read_dataset(dataset, tokenizer, &options, max_length);
    let blocks = |dataset: &Dataset| {
        let (rows, warnings) = read(dataset)?;
        Ok((into_blocks(rows, config.packing.then_some(max_length)), warnings))
    };
    Ok((gather(train, blocks)?, gather(eval, read)?))
}

/// Reads the demonstrations of a dataset. Returns them, cut to `max_length`, with warnings.
///
/// # Errors
/// If a row is no demonstration, or none is left.
fn read_dataset(
    dataset: &Dataset,
    tokenizer: &Tokenizer,
    options: &DemonstrationOptions,
    max_length: usize,
) -> Result<(Vec<Demonstration>, Vec<String>)> {
    let (rows, left_out) = dataset.demonstrations_noted(&tokenizer.limited_to(max_length), options, TEMPLATE_FLAG)?;
    let ends = |row: &Demonstration| row.tokens.iter().skip(row.loss_start).any(|id| tokenizer.eos_ids().contains(id));
    let endless = (!rows.iter().any(ends)).then(|| {
        let path = dataset.path().display();
        format!(
            "{path}: no row has an eos token in the loss, so the model does not learn to stop: the chat template ends no \
             response with one, or the rows' `input_ids` have none in the loss"
        )
    });
    let (rows, mut warnings) = shorten(rows, max_length, tokenizer, dataset.path())?;
    warnings.extend(endless);
    warnings.extend(left_out);
    warnings.extend(dataset.note_on_media());
    warnings.extend(dataset.notes_on_marks());
    Ok((rows, warnings))
}

/// The rows of a run.
///
/// The loss of an update is the mean negative log-likelihood over all of its tokens in the loss, for any size of the
/// micro-batches.
struct FineTuning<'a> {
    config: &'a SftConfig,
    /// Blocks of rows.
    train_rows: Gathered<Vec<Demonstration>>,
    eval_rows: Vec<Demonstration>,
}

impl Supervised for FineTuning<'_> {
    type Head = LmHead;
    type Sums = Totals;

    fn backward(&mut self, model: &CausalLm, batch: &UpdateRows<'_>, sums: &mut Totals) -> Result<()> {
        let config = self.config;
        // A block is a row of `max_length` tokens.
        let most_rows = config.batches().rows_per_pass();
        let (most_rows, most_tokens) = if config.packing {
            let width = max_row_length(config, model.config())?;
            (usize::MAX, batch.max_tokens.min(most_rows.saturating_mul(width)))
        } else {
            (most_rows, batch.max_tokens)
        };
        let mut rows: Vec<&Demonstration> = batch.rows.iter().flat_map(|&block| &self.train_rows.rows[block]).collect();
        // Rows of similar length share a micro-batch: less padding in attention, the same sum.
        rows.sort_by_key(|row| row.tokens.len());
        let counted = rows.iter().map(|row| row.loss_tokens()).sum::<usize>();
        let local = batch.world.own_part(&rows, |row| row.tokens.len());
        let mut row = local.start as u64;
        let local = &rows[local];
        let mut losses = Vec::new();
        for micro_batch in micro_batches(local, most_rows, most_tokens, |row| (row.tokens.len(), 0)) {
            let rows = (row..row + micro_batch.len() as u64).collect();
            row += micro_batch.len() as u64;
            let dropout =
                DropoutRows { share: config.peft.lora_dropout, seed: config.run.seed, update: batch.update, rows };
            let inputs = RowBatch::new(micro_batch);
            let weights = weights(micro_batch, model.device());
            let inputs = inputs.batch().with_dropout(Some(&dropout));
            let now = model.logprobs_backward(inputs, 1.0, |part, now| {
                let weights = weights.as_ref().map(|all| all.narrow(0, part.start, part.end - part.start));
                -total(&now.logprobs, weights.as_ref()) / (counted as f64 / batch.loss_scale)
            })?;
            losses.push(total(&now.logprobs, weights.as_ref()));
        }
        sums.loss = read(&losses).fold(sums.loss, |sum, logprobs| sum - logprobs);
        sums.tokens += local.iter().map(|row| row.loss_tokens()).sum::<usize>() as f64;
        Ok(())
    }

    fn num_tokens(&self, rows: &[usize]) -> Option<usize> {
        let rows = rows.iter().flat_map(|&block| &self.train_rows.rows[block]);
        Some(rows.map(|row| row.tokens.len()).sum())
    }

    fn evaluate(&self, model: &CausalLm, world: &World, metrics: &mut Metrics) -> Result<()> {
        let batch_size = self.config.per_device_eval_batch_size;
        metrics.push("eval_loss", evaluate(model, &self.eval_rows, batch_size, world)?);
        Ok(())
    }

    fn has_eval_rows(&self) -> bool {
        !self.eval_rows.is_empty()
    }
}

/// Returns the options that decide which tokens of its rows a run has in the loss, for a model with a vocabulary of `vocab`.
pub(crate) fn learned(config: &SftConfig, vocab: i64) -> DemonstrationOptions {
    DemonstrationOptions {
        completion_only: config.completion_only_loss,
        assistant_only: config.assistant_only_loss,
        text_field: config.dataset_text_field.clone(),
        vocab,
    }
}

/// Returns the rows in blocks: one row per block, or with `packing` as many rows per block as fit into that many tokens.
///
/// As in TRL's "bfd", the longest rows come first, and each goes where it leaves the least room. No row is cut to fit.
pub(crate) fn into_blocks(rows: Vec<Demonstration>, packing: Option<usize>) -> Vec<Vec<Demonstration>> {
    let Some(most) = packing else { return rows.into_iter().map(|row| vec![row]).collect() };
    let mut rows = rows;
    rows.sort_by_key(|row| std::cmp::Reverse(row.tokens.len()));
    let mut blocks: Vec<Vec<Demonstration>> = Vec::new();
    // The blocks by their free tokens.
    let mut by_room: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for row in rows {
        let len = row.tokens.len();
        let fitting = by_room.range_mut(len..).find_map(|(room, blocks)| Some((*room, blocks.pop()?)));
        let (room, block) = fitting.unwrap_or_else(|| {
            blocks.push(Vec::new());
            (most, blocks.len() - 1)
        });
        if by_room.get(&room).is_some_and(Vec::is_empty) {
            by_room.remove(&room);
        }
        blocks[block].push(row);
        by_room.entry(room.saturating_sub(len)).or_default().push(block);
    }
    blocks
}

/// Returns 1 for each token of the rows' spans that is in the loss, 0 for the others, f32; `None` if all are.
fn weights(rows: &[&Demonstration], device: Device) -> Option<Tensor> {
    if rows.iter().all(|row| row.masked.is_empty()) {
        return None;
    }
    let row_weights = |row: &&Demonstration| {
        let counts = |at: usize| f32::from(u8::from(!row.masked.iter().any(|range| range.contains(&at))));
        (row.loss_start..row.tokens.len()).map(counts).collect::<Vec<_>>()
    };
    Some(on_device(&rows.iter().flat_map(row_weights).collect::<Vec<f32>>(), device))
}

/// Returns the sum of the log-probabilities in the loss.
fn total(logprobs: &Tensor, weights: Option<&Tensor>) -> Tensor {
    match weights {
        Some(weights) => (logprobs * weights).sum(Kind::Float),
        None => logprobs.sum(Kind::Float),
    }
}

/// Rows as the model takes them.
struct RowBatch<'r> {
    sequences: Vec<&'r Vec<i64>>,
    /// The tokens in the loss.
    spans: Vec<Range<usize>>,
    prompt_lens: Vec<usize>,
}

impl<'r> RowBatch<'r> {
    fn new(rows: &[&'r Demonstration]) -> Self {
        Self {
            sequences: rows.iter().map(|row| &row.tokens).collect(),
            spans: rows.iter().map(|row| row.loss_start..row.tokens.len()).collect(),
            prompt_lens: rows.iter().map(|row| row.prompt_len).collect(),
        }
    }

    fn batch(&self) -> Batch<'_, &'r Vec<i64>> {
        Batch::new(&self.sequences, &self.spans).with_prompts(Some(&self.prompt_lens))
    }
}

/// Returns the mean negative log-likelihood per token in the loss, over the rows of all ranks.
fn evaluate(model: &CausalLm, rows: &[Demonstration], batch_size: usize, world: &World) -> Result<f64> {
    let counted: usize = rows.iter().map(Demonstration::loss_tokens).sum();
    let local_rows = world.share_by(rows, |row| row.tokens.len());
    let mut loss = [world.agree(negative_log_likelihood(model, local_rows, batch_size))?];
    world.sum_numbers(&mut loss)?;
    Ok(loss[0] / counted as f64)
}

/// Returns the sum of the negative log-likelihoods of the rows' tokens in the loss.
fn negative_log_likelihood(model: &CausalLm, rows: &[Demonstration], batch_size: usize) -> Result<f64> {
    let mut losses = Vec::new();
    for batch in rows.chunks(batch_size) {
        let batch = batch.iter().collect::<Vec<_>>();
        let now = tch::no_grad(|| model.logprobs_of(RowBatch::new(&batch).batch(), 1.0, false))?;
        losses.push(total(&now.logprobs, weights(&batch, model.device()).as_ref()));
    }
    Ok(read(&losses).fold(0.0, |sum, logprobs| sum - logprobs))
}

/// Reads the numbers of scalars at once, as each read waits for the device.
fn read(scalars: &[Tensor]) -> impl Iterator<Item = f64> {
    let all = if scalars.is_empty() { Vec::new() } else { to_host(&Tensor::stack(scalars, 0)) };
    all.into_iter()
}

/// Cuts rows at their end; with the tokenizer of an encoder-decoder, prompts and responses each at their own end. Drops empty rows and rows
/// without a token in the loss. Returns the others, with warnings.
///
/// # Errors
/// If nothing is left.
pub(crate) fn shorten(
    mut rows: Vec<Demonstration>,
    max_length: usize,
    tokenizer: &Tokenizer,
    path: &Path,
) -> Result<(Vec<Demonstration>, Vec<String>)> {
    let all = rows.len();
    rows.retain(|row| !row.tokens.is_empty());
    let filled = rows.len();
    let empty = all - rows.len();
    if rows.is_empty() {
        return Err(Error::invalid(
            path,
            format!("expected some text, found none: the texts of all {all} rows are empty"),
        ));
    }
    let untaught = rows.iter().filter(|row| row.loss_tokens() == 0).count();
    if untaught == filled {
        let message = format!(
            "none of {all} rows has a token to learn, whatever their length: they have no turn of the assistant in the loss, no completion, or \
             labels and masks that leave all tokens out"
        );
        return Err(Error::invalid(path, message));
    }
    let suffix = tokenizer.is_of_encoder_decoder().then(|| tokenizer.around_prompts()).transpose()?;
    let mut cut = 0;
    for row in &mut rows {
        let len_before = row.tokens.len();
        match &suffix {
            Some((_, suffix)) => row.truncate_each(max_length, suffix),
            None => row.truncate(max_length),
        }
        cut += usize::from(row.tokens.len() < len_before);
    }
    rows.retain(|row| row.loss_tokens() > 0);
    let left_out = filled - untaught - rows.len();
    if rows.is_empty() {
        let message = format!("none of {all} rows has a token to learn within max_length = {max_length} tokens");
        return Err(Error::invalid(path, message));
    }
    let path = path.display();
    let mut warnings = Vec::new();
    if empty > 0 {
        warnings.push(format!("{path}: {empty} of {all} rows were left out: their text is empty"));
    }
    if untaught > 0 {
        warnings
            .push(format!("{path}: {untaught} of {all} rows were left out: no token to learn, whatever their length"));
    }
    if cut > 0 {
        warnings.push(format!("{path}: {cut} of {all} rows were cut at max_length = {max_length} tokens"));
    }
    if left_out > 0 {
        warnings.push(format!(
            "{path}: {left_out} of {all} rows were left out: no token to learn within max_length = {max_length} tokens"
        ));
    }
    Ok((rows, warnings))
}

/// Sums since the last line of metrics.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Totals {
    loss: f64,
    /// Tokens in the loss.
    tokens: f64,
    grad_norm: f64,
    updates: f64,
}

impl Sums for Totals {
    fn add_step(&mut self, grad_norm: f64) {
        self.grad_norm += grad_norm;
        self.updates += 1.0;
    }

    fn steps(&self, _batch_size: usize) -> (f64, f64) {
        (self.updates, self.grad_norm)
    }

    fn push(&self, metrics: &mut Metrics) {
        metrics.push("loss", self.loss / self.tokens);
    }

    fn watched(&self) -> Vec<String> {
        vec![format!("loss {:.3}", self.loss / self.tokens)]
    }

    fn numbers(&mut self) -> Vec<&mut f64> {
        vec![&mut self.loss, &mut self.tokens, &mut self.grad_norm, &mut self.updates]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(len: usize) -> Demonstration {
        Demonstration { tokens: vec![1; len], prompt_len: 1, loss_start: 1, masked: Vec::new() }
    }

    #[test]
    fn rows_are_packed_whole_where_they_leave_the_least_room() {
        let lens = |blocks: Vec<Vec<Demonstration>>| -> Vec<Vec<usize>> {
            blocks.iter().map(|block| block.iter().map(|row| row.tokens.len()).collect()).collect()
        };
        let rows = || [3, 7, 5, 2, 6, 10].map(row).to_vec();
        assert_eq!(lens(into_blocks(rows(), Some(10))), [vec![10], vec![7, 3], vec![6, 2], vec![5]]);
        assert_eq!(lens(into_blocks(rows(), None)), [[3], [7], [5], [2], [6], [10]]);
        let many = into_blocks((1..=50).cycle().take(500).map(row).collect(), Some(64));
        assert!(many.iter().all(|block| block.iter().map(|row| row.tokens.len()).sum::<usize>() <= 64));
        assert_eq!(many.iter().map(Vec::len).sum::<usize>(), 500);
    }

    #[test]
    #[allow(clippy::single_range_in_vec_init, reason = "a list of token ranges")]
    fn masked_tokens_have_weight_0_and_are_not_counted() {
        let mut masked = row(6);
        masked.masked.push(2..4);
        let plain = row(3);
        let weights = weights(&[&masked, &plain], Device::Cpu).unwrap();
        assert_eq!(Vec::<f32>::try_from(&weights).unwrap(), [1., 0., 0., 1., 1., 1., 1.]);
        assert_eq!((masked.loss_tokens(), plain.loss_tokens()), (3, 2));
        masked.truncate(3);
        assert_eq!((masked.loss_tokens(), masked.masked.first()), (1, Some(&(2..3))));
        assert!(super::weights(&[&plain], Device::Cpu).is_none());
    }
}
