//! Supervised fine-tuning: a language model learns to continue as the demonstrations do.

use super::{
    Card, Gathered, Progress, Saver, begin_report, check_held_out, command_to_try, describe_machine,
    describe_micro_batch, fixed_state, gather, kept_micro_batch_tokens, model_options, record_start, roundings,
    small_dataset, trained_options, trained_share,
};
use crate::data::{Dataset, Demonstration, DemonstrationOptions, Sources};
use crate::hub::{self, AskedHub};
use crate::metrics::Metrics;
use crate::model::{BASE_MODEL, Batch, CausalLm, DropoutRows, ModelConfig};
use crate::optim::micro_batch::{micro_batch_tokens, micro_batches};
use crate::optim::{AdamW, learning_rate};
use crate::run::checkpoint::{Checkpoints, Start, leave_model};
use crate::run::inputs::Inputs;
use crate::run::report::{Console, Hold, Reporter, check_output_dir, claim_output_dir, conclude, stop_requested};
use crate::settings::{SftConfig, Stage, TrainPlan};
use crate::tokenizer::Tokenizer;
use crate::weights::replace_files;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::time::Instant;
use tch::{Device, Kind, Tensor};

/// Fine-tunes a model as `config` says and saves it in `output_dir`.
///
/// # Errors
/// If an input is not what it should be, or a gradient is not finite; what was trained until then is saved.
pub fn sft(config: &SftConfig, console: Console) -> Result<()> {
    config.check()?;
    let options = trained_options(model_options(&config.run)?, config.peft.use_peft);
    let model_dir = config.model_name_or_path.as_deref();
    let tokenizer_dir = config.tokenizer_name.as_deref().or(model_dir).expect("`check` asks for one of them");
    let optional = [model_dir, config.config_name.as_deref(), config.eval_dataset_name.as_deref()];
    let mut inputs: Vec<&Path> = vec![tokenizer_dir];
    inputs.extend(config.data.dataset_name.iter().map(|name| name.as_path()));
    inputs.extend(optional.into_iter().flatten());
    inputs.extend(config.chat_template_path.as_deref());
    let hold = Hold::take(&config.run.output_dir)?;
    let start = Start::find(&config.run)?;
    check_output_dir(&config.run, &start, &inputs)?;
    let differences = start.check(COMMAND, config)?;
    let asked = AskedHub::with(start.commits()?);
    // Before gigabytes are fetched in vain.
    let sources = Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
    check_held_out(&config.eval, &sources, &config.data)?;
    let revision = Some(config.model_revision.as_str());
    let found_dir = model_dir.map(|dir| hub::model_dir(dir, revision)).transpose()?;
    let model_dir = found_dir.as_deref();
    let own_tokenizer = config.tokenizer_name.is_some() || model_dir.is_none();
    let tokenizer_from = own_tokenizer.then(|| hub::tokenizer_dir(tokenizer_dir, None)).transpose()?;
    let mut tokenizer = match (tokenizer_from.as_deref(), model_dir) {
        (Some(dir), _) | (None, Some(dir)) => Tokenizer::from_pretrained(dir)?,
        (None, None) => unreachable!("without a model the tokenizer is named"),
    };
    if let Some(file) = &config.chat_template_path {
        tokenizer.use_chat_template(file)?;
    }
    let shape_file = match (model_dir, &config.config_name) {
        (None, Some(shape)) => Some(hub::config_file(shape, revision)?),
        _ => None,
    };
    let mut model = match (model_dir, &shape_file) {
        (Some(dir), _) => CausalLm::from_pretrained(dir, options)?,
        (None, shape) => {
            let shape = ModelConfig::from_file(shape.as_deref().expect("`check` asks for one of them"))?;
            CausalLm::from_config(shape, config.run.seed, options)?
        }
    };
    // An adapter that is there already becomes part of what is trained, or of what a fresh one is put on.
    model.prepare(config.peft.use_peft);
    if let Some(lora) = config.peft.lora() {
        model.add_adapter(&lora, config.run.seed)?;
    }
    tokenizer.check_fits(model.config(), model_dir.or(config.config_name.as_deref()).unwrap_or(Path::new("")))?;

    let max_length = config.max_length.min(model.config().max_position_embeddings);
    let read = |dataset: &Dataset| {
        let rows = dataset.demonstrations_with(&tokenizer, &learned(config))?;
        let ends =
            |row: &Demonstration| row.tokens.iter().skip(row.loss_start).any(|id| tokenizer.eos_ids().contains(id));
        let endless = (!rows.iter().any(ends)).then(|| {
            let path = dataset.path().display();
            format!("{path}: no row teaches the model to stop: the chat template closes no answer with an eos token")
        });
        let (rows, mut warnings) = shorten(rows, max_length, dataset.path())?;
        warnings.extend(endless);
        Ok::<_, Error>((rows, warnings))
    };
    let (train, eval) = sources.read(config.run.seed, Stage::Sft)?;
    let mut inputs = Inputs::default();
    inputs.rows("dataset_name", &config.data.describe(), &train);
    inputs.rows("rows held out", &config.data.describe(), &eval);
    found_dir.as_deref().map_or(Ok(()), |dir| inputs.model("model_name_or_path", dir))?;
    tokenizer_from.as_deref().map_or(Ok(()), |dir| inputs.model("tokenizer_name", dir))?;
    for (name, file) in [("config_name", &shape_file), ("chat_template_path", &config.chat_template_path)] {
        file.as_deref().map_or(Ok(()), |file| inputs.file(name, file))?;
    }
    let tried = train.first().and_then(|dataset| dataset.rows().next().cloned());
    let blocks = |dataset: &Dataset| {
        let (rows, warnings) = read(dataset)?;
        Ok((into_blocks(rows, config.packing.then_some(max_length)), warnings))
    };
    let (train, eval) = (gather(&train, blocks)?, gather(eval.as_slice(), read)?);
    let num_rows: usize = train.rows.iter().map(Vec::len).sum();
    let plan = config.plan_for(train.rows.len())?;
    let mut warnings = [&train.warnings[..], &eval.warnings].concat();
    warnings.extend(small_dataset(&config.data, train.rows.len(), plan.batch_size));
    let started_from = model_dir.or(config.config_name.as_deref()).unwrap_or(Path::new(""));
    warnings.extend(roundings(started_from, config.run.dtype, model.was_rounded(), model.rounded_base()));

    model.set_trainable(true);
    model.set_gradient_checkpointing(config.run.gradient_checkpointing);
    let optimizer = AdamW::new(model.trainable_params(), &config.optimizer);
    let (device, activation_bytes) = (model.device(), |on| model.activation_bytes(on));
    let mut most_tokens = micro_batch_tokens(
        config.run.max_tokens_per_micro_batch,
        device,
        model.params(),
        activation_bytes(config.run.gradient_checkpointing),
    );
    if let Some(saved) = &start.from {
        most_tokens = kept_micro_batch_tokens(&config.run, device, most_tokens, saved);
    }
    let fixed = fixed_state(&config.run, device, most_tokens, &asked.commits(), &inputs);
    let cursor = train.cursor(config.run.seed, &config.data);
    let mut progress = Progress::new(optimizer, cursor, &config.eval, &config.run, fixed);
    if let Some(saved) = &start.from {
        warnings.extend(progress.load(saved, &config.run, start.in_place, &inputs, &plan)?);
        model.load_trained(&saved.dir)?;
        warnings.extend(saved.threads_warning());
    }
    let _hold = claim_output_dir(&config.run, &start, hold, config)?;
    let dir = &config.run.output_dir;
    let (eos, pad, most) = (tokenizer.eos_ids(), tokenizer.pad(), config.run.max_shard_size.0);
    model.keep_base(&dir.join(BASE_MODEL), eos, pad, most)?;
    warnings.extend(differences);
    let mut report = begin_report(&config.run, &start, plan.num_updates, progress.reached(), &warnings, console)?;
    report.settings(config)?;
    let trained = trained_share(model.params());
    let mut facts = Vec::from(describe_machine(&config.run, device));
    let left = match progress.done {
        0 => String::new(),
        done => format!(", {done} of them done"),
    };
    let unit = if config.packing { "blocks" } else { "rows" };
    facts.push(("updates", format!("{}{left}", plan.num_updates)));
    facts.push(("an update", format!("{} of {} {unit}", plan.batch_size, train.rows.len())));
    if config.packing {
        let blocks = train.rows.len();
        facts.push(("packing", format!("{num_rows} rows in {blocks} blocks of at most {max_length} tokens")));
    }
    facts.push(("tokenizer", tokenizer.describe()));
    facts.push(("trained parameters", trained.clone()));
    facts.push(("micro-batches", describe_micro_batch(&config.run, most_tokens, |on| model.activation_bytes(on))));
    let from = model_dir.map_or("random weights".into(), |dir| dir.display().to_string());
    report.begins(&format!("rlhf sft: {from} into {}", dir.display()), &facts);
    let write = |dir: &Path| {
        model.save_pretrained(dir, eos, pad, most)?;
        tokenizer.save_pretrained(dir)
    };
    let checkpoints = Checkpoints::new(COMMAND, &config.run, config, plan.num_updates, progress.done)?;
    let mut saver = Saver { checkpoints, write: &write };
    let ended =
        run_updates(config, &plan, &model, most_tokens, &train, &eval.rows, &mut report, &mut progress, &mut saver);
    let ended = saver.at_end(ended, &progress, &mut report);
    report.finish();

    // Also after an error: the optimizer refuses a step that is not finite, so the weights are those of the step before.
    let from = model_dir.map_or("random weights".into(), |dir| format!("`{}`", dir.display()));
    let data = format!("`{}`, {num_rows} rows", config.data.describe());
    let facts = [
        ("started from", from),
        ("data", data),
        ("tokenizer", tokenizer.describe()),
        ("trained parameters", trained),
        ("updates", progress.done.to_string()),
    ];
    let base_model = config.model_name_or_path.as_deref();
    let card = Card { command: COMMAND, base_model, is_adapter: config.peft.use_peft, facts: &facts };
    // But what has not learnt is where it began, and a model in `dir` would keep the run from beginning again there.
    let learnt = progress.done > 0;
    let saved = learnt.then(|| {
        leave_model(dir, COMMAND, config, (progress.done, plan.num_updates), &ended, || {
            replace_files(dir, write).and_then(|()| card.write(dir))
        })
    });
    let done = conclude(ended, saved, plan.num_updates, dir)?;
    if done > start.done() {
        let numbers = [("loss", "loss"), ("held-out loss", "eval_loss")];
        report.ends(done, &numbers, &[command_to_try(dir, tried.as_ref(), None)]);
    }
    Ok(())
}

/// The command, as checkpoints name it.
const COMMAND: &str = "sft";

/// The loop.
///
/// The loss of an update is the mean negative log-likelihood over all of its counted tokens, whatever the micro-batches.
#[expect(clippy::too_many_arguments, reason = "it is the second half of one function")]
fn run_updates(
    config: &SftConfig,
    plan: &TrainPlan,
    model: &CausalLm,
    most_tokens: usize,
    train: &Gathered<Vec<Demonstration>>,
    eval: &[Demonstration],
    report: &mut Reporter<'_>,
    progress: &mut Progress<Totals>,
    saver: &mut Saver<'_>,
) -> Result<()> {
    let rows = &train.rows;
    let length = |block: usize| rows[block].iter().map(|row| row.tokens.len()).sum::<usize>();
    // A block is a row of `max_length` tokens.
    let (most_rows, most_tokens) = match config.packing {
        true => (usize::MAX, most_tokens.min(config.per_device_train_batch_size.saturating_mul(config.max_length))),
        false => (config.per_device_train_batch_size, most_tokens),
    };
    let mut before = train.cursor(config.run.seed, &config.data);
    let updates = (0..progress.done).map(|_| before.take(plan.batch_size).into_iter().map(length).sum::<usize>());
    let mut tokens_seen = updates.sum::<usize>() as f64;
    saver.write_best(progress, report)?;
    if progress.done == 0 && config.eval.eval_steps.is_some() {
        record_start(report, |metrics| {
            metrics.push("eval_loss", evaluate(model, eval, config.per_device_eval_batch_size)?);
            Ok(())
        })?;
    }
    let mut began = Instant::now();
    report.updates_begin();
    while progress.done < plan.num_updates && !stop_requested() {
        report.phase("training");
        let taken = progress.cursor.take(plan.batch_size);
        let mut batch: Vec<&Demonstration> = taken.into_iter().flat_map(|block| &rows[block]).collect();
        // Rows of like length share a micro-batch: less padding in attention, the same sum.
        batch.sort_by_key(|row| row.tokens.len());
        let scale = progress.loss_scale();
        let counted: usize = batch.iter().map(|row| row.loss_tokens()).sum();
        let mut row = 0;
        let tokens = |row: &&Demonstration| row.tokens.len();
        for micro_batch in micro_batches(&batch, most_rows, most_tokens, tokens) {
            let rows = (row..row + micro_batch.len() as u64).collect();
            row += micro_batch.len() as u64;
            let (share, seed) = (config.peft.lora_dropout, config.run.seed);
            let dropout = DropoutRows { share, seed, update: progress.done as u64, rows };
            let (sequences, spans) = counted_tokens(micro_batch);
            let weights = weights(micro_batch, model.device());
            let found = model.logprobs_backward(
                Batch::new(&sequences, &spans).with_dropout(Some(&dropout)),
                1.0,
                |part, now| {
                    let weights = weights.as_ref().map(|all| all.narrow(0, part.start, part.end - part.start));
                    -total(&now.logprobs, weights.as_ref()) / (counted as f64 / scale)
                },
            )?;
            progress.since.loss -= total(&found.logprobs, weights.as_ref()).double_value(&[]);
        }
        let lr = learning_rate(config.learning_rate, &config.optimizer, progress.done, plan.num_updates);
        let done = progress.done + 1;
        let due = saver.due(progress, &config.eval, config.logging_steps, done, plan.num_updates);
        let grad_norm = progress.step(lr)?;
        let since = &mut progress.since;
        since.tokens += counted as f64;
        since.grad_norm += grad_norm;
        since.updates += 1.0;
        tokens_seen += batch.iter().map(|row| row.tokens.len()).sum::<usize>() as f64;
        report.advance(vec![format!("loss {:.3}", since.loss / since.tokens)]);
        let (finished, stopping) = (done == plan.num_updates, stop_requested());
        let mut told = None;
        if due.line || stopping {
            let mut metrics = Metrics::default();
            metrics.push("step", done as f64);
            metrics.push("epoch", (done * plan.batch_size) as f64 / rows.len() as f64);
            metrics.push("loss", since.loss / since.tokens);
            metrics.push("grad_norm", since.grad_norm / since.updates);
            metrics.push("learning_rate", lr);
            metrics.push("num_tokens", tokens_seen);
            metrics.push("time/update", began.elapsed().as_secs_f64() / since.updates);
            progress.push_loss_scale(&mut metrics);
            if (due.evaluation || finished || stopping) && !eval.is_empty() {
                report.phase("evaluating");
                metrics.push("eval_loss", evaluate(model, eval, config.per_device_eval_batch_size)?);
            }
            report.record(done as i64, &metrics)?;
            told = Some(metrics);
            began = Instant::now();
        }
        progress.advance(due.line);
        told.map_or(Ok(()), |metrics| saver.keep_best(progress, &metrics, due.look, report))?;
        saver.after_update(progress, report)?;
    }
    Ok(())
}

/// What of its rows a run learns.
pub(crate) fn learned(config: &SftConfig) -> DemonstrationOptions {
    DemonstrationOptions {
        completion_only: config.completion_only_loss,
        assistant_only: config.assistant_only_loss,
        text_field: config.dataset_text_field.clone(),
    }
}

/// The blocks that rows are taken in: each alone, or with `packing` together as long as they have no more tokens than that.
///
/// As TRL's "bfd" does, the longest rows come first, and each goes where it leaves the least room. No row is cut for it.
pub(crate) fn into_blocks(rows: Vec<Demonstration>, packing: Option<usize>) -> Vec<Vec<Demonstration>> {
    let Some(most) = packing else { return rows.into_iter().map(|row| vec![row]).collect() };
    let mut rows = rows;
    rows.sort_by_key(|row| std::cmp::Reverse(row.tokens.len()));
    let mut blocks: Vec<Vec<Demonstration>> = Vec::new();
    // The blocks by the room that they have left.
    let mut by_room: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for row in rows {
        let len = row.tokens.len();
        let found = by_room.range_mut(len..).find_map(|(room, blocks)| Some((*room, blocks.pop()?)));
        let (room, block) = found.unwrap_or_else(|| {
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

/// 1 for each token of the rows' spans that counts, 0 for the others; `None` where all count.
fn weights(rows: &[&Demonstration], device: Device) -> Option<Tensor> {
    if rows.iter().all(|row| row.masked.is_empty()) {
        return None;
    }
    let of = |row: &&Demonstration| {
        let counts = |at: usize| f32::from(u8::from(!row.masked.iter().any(|range| range.contains(&at))));
        (row.loss_start..row.tokens.len()).map(counts).collect::<Vec<_>>()
    };
    Some(Tensor::from_slice(&rows.iter().flat_map(of).collect::<Vec<f32>>()).to_device(device))
}

/// The sum of the log-probabilities that count.
fn total(logprobs: &Tensor, weights: Option<&Tensor>) -> Tensor {
    match weights {
        Some(weights) => (logprobs * weights).sum(Kind::Float),
        None => logprobs.sum(Kind::Float),
    }
}

/// The rows' tokens, and which of them count.
fn counted_tokens<'r>(rows: &[&'r Demonstration]) -> (Vec<&'r Vec<i64>>, Vec<Range<usize>>) {
    rows.iter().map(|row| (&row.tokens, row.loss_start..row.tokens.len())).unzip()
}

/// Mean negative log-likelihood per counted token.
fn evaluate(model: &CausalLm, rows: &[Demonstration], batch_size: usize) -> Result<f64> {
    let counted: usize = rows.iter().map(Demonstration::loss_tokens).sum();
    let mut loss = 0.0;
    for batch in rows.chunks(batch_size) {
        let batch = batch.iter().collect::<Vec<_>>();
        let (sequences, spans) = counted_tokens(&batch);
        let found = tch::no_grad(|| model.token_logprobs(&sequences, &spans, 1.0, false))?;
        loss -= total(&found.logprobs, weights(&batch, model.device()).as_ref()).double_value(&[]);
    }
    Ok(loss / counted as f64)
}

/// Cuts rows at their end and leaves out those with nothing left to learn; gives what is left, and what to tell of it.
///
/// # Errors
/// If nothing is left.
pub(crate) fn shorten(
    mut rows: Vec<Demonstration>,
    max_length: usize,
    path: &Path,
) -> Result<(Vec<Demonstration>, Vec<String>)> {
    let all = rows.len();
    let cut = rows.iter().filter(|row| row.tokens.len() > max_length).count();
    for row in &mut rows {
        row.truncate(max_length);
    }
    rows.retain(|row| row.loss_tokens() > 0);
    let left_out = all - rows.len();
    if rows.is_empty() {
        let message = format!("none of {all} rows has a token to learn within max_length = {max_length} tokens");
        return Err(Error::invalid(path, message));
    }
    let path = path.display();
    let mut warnings = Vec::new();
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
    tokens: f64,
    grad_norm: f64,
    updates: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(len: usize) -> Demonstration {
        Demonstration { tokens: vec![1; len], loss_start: 1, masked: Vec::new() }
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
    #[allow(clippy::single_range_in_vec_init)] // ranges of tokens are meant
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
