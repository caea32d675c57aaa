//! The reward model: a sequence classifier learns to score the preferred text of each pair above the other.

use super::{
    Gathered, Progress, Saver, begin_report, check_held_out, describe_micro_batch, fixed_state, gather,
    kept_micro_batch_tokens, micro_batch_tokens, micro_batches, model_options, small_dataset, trained_options,
    trained_share, write_model_card,
};
use crate::checkpoint::{Checkpoints, Start};
use crate::config::{RewardConfig, TrainPlan};
use crate::data::{Dataset, Pair, Sources};
use crate::hub::{self, AskedHub};
use crate::metrics::Metrics;
use crate::model::{BASE_MODEL, DropoutRows, SequenceClassifier};
use crate::optim::{AdamW, learning_rate};
use crate::report::{Console, Reporter, check_output_dir, claim_output_dir, conclude, stop_requested};
use crate::tokenizer::Tokenizer;
use crate::weights::replace_files;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::Instant;
use tch::{Kind, Tensor};

/// Trains a reward model as `config` says and saves it in `output_dir`.
///
/// # Errors
/// If an input is not what it should be, or a gradient is not finite; what was trained until then is saved.
pub fn reward(config: &RewardConfig, console: Console) -> Result<()> {
    config.check()?;
    let options = trained_options(model_options(&config.run)?, config.peft.use_peft, &config.run);
    let model_dir = config.model_name_or_path.as_path();
    let mut inputs: Vec<&Path> = vec![model_dir];
    inputs.extend(config.data.dataset_name.iter().map(|name| name.as_path()));
    inputs.extend(config.eval_dataset_name.as_deref());
    let start = Start::find(&config.run)?;
    check_output_dir(&config.run, &start, &inputs)?;
    let differences = start.from.as_ref().map_or(Ok(Vec::new()), |saved| saved.check(COMMAND, config))?;
    let asked = AskedHub::with(start.commits()?);
    // Before gigabytes are fetched in vain.
    let sources = Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
    check_held_out(&config.eval, &sources, &config.data)?;
    let model_dir = &hub::model_dir(model_dir, Some(&config.model_revision))?;
    let tokenizer = Tokenizer::from_pretrained(model_dir)?;
    let new_head = config.new_reward_head.then_some(config.run.seed);
    let mut model = SequenceClassifier::from_pretrained(model_dir, new_head, options)?;
    if model.labels().len() > 1 {
        let message = format!("expected a classifier with one label, found {}", model.labels().join(", "));
        return Err(Error::invalid(model_dir, message));
    }
    // An adapter that is there already becomes part of what is trained, or of what a fresh one is put on.
    model.merge_adapter();
    if let Some(lora) = config.peft.lora() {
        model.add_adapter(&lora, config.run.seed)?;
    }
    tokenizer.check_fits(model.config(), model_dir)?;

    let max_length = config.max_length.min(model.config().max_position_embeddings);
    let read = |dataset: &Dataset| {
        leave_out_long(dataset.pairs(&tokenizer, model.config().causal)?, max_length, dataset.path())
    };
    let (train, eval) = sources.read(config.run.seed)?;
    let (train, eval) = (gather(&train, read)?, gather(eval.as_slice(), read)?);
    let plan = config.plan(train.rows.len())?;
    let mut warnings = [&train.warnings[..], &eval.warnings].concat();
    warnings.extend(small_dataset(&config.data, train.rows.len(), plan.batch_size));

    model.set_trainable(true);
    model.set_gradient_checkpointing(config.run.gradient_checkpointing);
    let optimizer = AdamW::new(model.trainable_params(), &config.optimizer);
    let (device, activation_bytes) = (model.device(), |on| model.activation_bytes(on));
    let mut most_tokens = micro_batch_tokens(&config.run, device, model.params(), activation_bytes);
    if let Some(saved) = &start.from {
        most_tokens = kept_micro_batch_tokens(&config.run, device, most_tokens, saved);
    }
    let fixed = fixed_state(&config.run, device, most_tokens, &asked.commits());
    let cursor = train.cursor(config.run.seed, &config.data);
    let mut progress = Progress::new(optimizer, cursor, &config.eval, fixed);
    if let Some(saved) = &start.from {
        progress.load(saved, start.in_place, plan.num_updates)?;
        model.load_trained(&saved.dir)?;
        warnings.extend(saved.threads_warning());
    }
    let _claim = claim_output_dir(&config.run, &start, config)?;
    let dir = &config.run.output_dir;
    let (eos, pad, most) = (tokenizer.eos_ids(), tokenizer.pad(), config.run.max_shard_size.0);
    model.keep_base(&dir.join(BASE_MODEL), eos, pad, most)?;
    warnings.extend(differences);
    let mut report =
        begin_report(&config.run, &start, plan.num_updates, progress.reached(), &warnings, &tokenizer, console)?;
    let trained = trained_share(model.params());
    report.note(&format!("trained parameters: {trained}"));
    let write = |dir: &Path| {
        model.save_pretrained(dir, eos, pad, most)?;
        tokenizer.save_pretrained(dir)
    };
    let checkpoints = Checkpoints::new(COMMAND, &config.run, config, plan.num_updates)?;
    let mut saver = Saver { checkpoints, write: &write };
    let ended =
        run_updates(config, &plan, &model, most_tokens, &train, &eval.rows, &mut report, &mut progress, &mut saver);
    let ended = saver.at_end(ended, &progress, &mut report);
    report.finish();

    // Also after an error: the optimizer refuses a step that is not finite, so the weights are those of the step before.
    let facts = [
        ("started from", format!("`{}`", model_dir.display())),
        ("data", format!("`{}`, {} pairs", config.data.describe(), train.rows.len())),
        ("tokenizer", tokenizer.describe()),
        ("trained parameters", trained),
        ("updates", progress.done.to_string()),
    ];
    // But what has not learnt is where it began, and a model in `dir` would keep the run from beginning again there.
    let learnt = progress.done > 0;
    let saved = learnt.then(|| replace_files(dir, write).and_then(|()| write_model_card(dir, "reward", &facts)));
    conclude(ended, saved, plan.num_updates, dir)?;
    report.note(&format!("saved {}", dir.display()));
    Ok(())
}

/// The command, as checkpoints name it.
const COMMAND: &str = "reward";

/// The loop.
///
/// The loss of a pair is -log sigmoid(chosen - rejected) (Bradley and Terry; Ouyang et al. 2022, eq. 1), scores being
/// read at the last token; an update's loss is the mean over its pairs, whatever the micro-batches.
#[expect(clippy::too_many_arguments, reason = "it is the second half of one function")]
fn run_updates(
    config: &RewardConfig,
    plan: &TrainPlan,
    model: &SequenceClassifier,
    most_tokens: usize,
    train: &Gathered<Pair>,
    eval: &[Pair],
    report: &mut Reporter<'_>,
    progress: &mut Progress<Totals>,
    saver: &mut Saver<'_>,
) -> Result<()> {
    report.note(&describe_micro_batch(&config.run, most_tokens, |on| model.activation_bytes(on)));
    let pairs = &train.rows;
    let mut began = Instant::now();
    while progress.done < plan.num_updates && !stop_requested() {
        let taken = progress.cursor.take(plan.batch_size);
        let mut batch: Vec<&Pair> = taken.into_iter().map(|row| &pairs[row]).collect();
        batch.sort_by_key(|pair| pair.chosen.len().max(pair.rejected.len()));
        let mut pair = 0;
        let tokens = |pair: &&Pair| pair.chosen.len() + pair.rejected.len();
        for micro_batch in micro_batches(&batch, config.per_device_train_batch_size, most_tokens, tokens) {
            let pairs = pair..pair + micro_batch.len() as u64;
            pair = pairs.end;
            // The two sides of a pair are rows of their own.
            let rows = pairs.clone().map(|pair| 2 * pair).chain(pairs.map(|pair| 2 * pair + 1)).collect();
            let (share, seed) = (config.peft.lora_dropout, config.run.seed);
            let dropout = DropoutRows { share, seed, update: progress.done as u64, rows };
            model.learn_scores(&sides(micro_batch), Some(&dropout), |scores| {
                progress.since.add(scores, config) / batch.len() as f64
            })?;
        }
        let lr = learning_rate(config.learning_rate, &config.optimizer, progress.done, plan.num_updates);
        let done = progress.done + 1;
        let due = saver.due(progress, &config.eval, config.logging_steps, done, plan.num_updates);
        let since = &mut progress.since;
        since.grad_norm += progress.optimizer.step(lr)?;
        report.advance(format!("loss {:.3} accuracy {:.2}", since.loss / since.pairs, since.correct / since.pairs));
        let (finished, stopping) = (done == plan.num_updates, stop_requested());
        let mut told = None;
        if due.line || stopping {
            let updates = since.pairs / plan.batch_size as f64;
            let mut metrics = Metrics::default();
            metrics.push("step", done as f64);
            metrics.push("epoch", (done * plan.batch_size) as f64 / pairs.len() as f64);
            since.push(&mut metrics, ["loss", "accuracy", "margin", "mean_reward"]);
            metrics.push("grad_norm", since.grad_norm / updates);
            metrics.push("learning_rate", lr);
            metrics.push("time/update", began.elapsed().as_secs_f64() / updates);
            if (due.evaluation || finished || stopping) && !eval.is_empty() {
                let mut totals = Totals::default();
                for batch in eval.chunks(config.per_device_eval_batch_size) {
                    let scores = tch::no_grad(|| model.scores(&sides(&batch.iter().collect::<Vec<_>>())))?;
                    let _ = totals.add(&scores, config);
                }
                totals.push(&mut metrics, ["eval_loss", "eval_accuracy", "eval_margin", "eval_mean_reward"]);
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

/// Leaves out pairs with a side that is too long: cut at its end it would lose what it is scored for. Gives what is left,
/// and what to tell of it.
///
/// # Errors
/// If nothing is left.
fn leave_out_long(mut pairs: Vec<Pair>, max_length: usize, path: &Path) -> Result<(Vec<Pair>, Vec<String>)> {
    let all = pairs.len();
    pairs.retain(|pair| pair.chosen.len().max(pair.rejected.len()) <= max_length);
    let left_out = all - pairs.len();
    if pairs.is_empty() {
        let message = format!("each of {all} pairs has a side of more than max_length = {max_length} tokens");
        return Err(Error::invalid(path, message));
    }
    let path = path.display();
    let mut warnings = Vec::new();
    if left_out > 0 {
        warnings.push(format!(
            "{path}: {left_out} of {all} pairs were left out: a side has more than max_length = {max_length} tokens"
        ));
    }
    let equal = pairs.iter().filter(|pair| pair.chosen == pair.rejected).count();
    if equal > 0 {
        warnings.push(format!("{path}: in {equal} of {all} pairs chosen and rejected are equal: they teach nothing"));
    }
    Ok((pairs, warnings))
}

/// All chosen sides, then all rejected ones.
fn sides<'p>(pairs: &[&'p Pair]) -> Vec<&'p Vec<i64>> {
    pairs.iter().map(|pair| &pair.chosen).chain(pairs.iter().map(|pair| &pair.rejected)).collect()
}

/// Sums over pairs.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Totals {
    pairs: f64,
    loss: f64,
    correct: f64,
    margin: f64,
    reward: f64,
    grad_norm: f64,
}

impl Totals {
    /// Adds the pairs with these scores, all chosen sides and then all rejected ones; gives the sum of their losses.
    fn add(&mut self, scores: &Tensor, config: &RewardConfig) -> Tensor {
        let scores = scores.view([2, -1]);
        let (chosen, rejected) = (scores.get(0), scores.get(1));
        let margin = &chosen - &rejected;
        let mut loss = -margin.log_sigmoid().sum(Kind::Float);
        if let Some(weight) = config.center_rewards_coefficient {
            loss += (&chosen + &rejected).square().sum(Kind::Float) * weight;
        }
        let number = |x: Tensor| x.double_value(&[]);
        self.pairs += margin.numel() as f64;
        self.loss += number(loss.detach());
        self.correct += number(margin.detach().gt(0.0).sum(Kind::Float));
        self.margin += number(margin.detach().sum(Kind::Float));
        self.reward += number(scores.detach().sum(Kind::Float)) / 2.0;
        loss
    }

    fn push(&self, metrics: &mut Metrics, names: [&'static str; 4]) {
        for (name, sum) in names.into_iter().zip([self.loss, self.correct, self.margin, self.reward]) {
            metrics.push(name, sum / self.pairs);
        }
    }
}
