//! Supervised fine-tuning: a language model learns to continue as the demonstrations do.

use super::{model_options, write_model_card};
use crate::config::SftConfig;
use crate::data::{Cursor, Dataset, Demonstration};
use crate::metrics::Metrics;
use crate::model::{CausalLm, ModelConfig};
use crate::optim::{AdamW, lr_factor};
use crate::report::{Console, Reporter, check_output_dir, prepare_output_dir, stop_requested, stopped};
use crate::tokenizer::Tokenizer;
use crate::{Result, config};
use std::path::Path;
use std::time::Instant;
use tch::{Kind, Tensor};

/// Fine-tunes a model as `config` says and saves it in `output_dir`.
///
/// The loss of an update is the mean negative log-likelihood over all of its counted tokens, whatever the micro-batches.
///
/// # Errors
/// If an input is not what it should be, or a gradient is not finite.
pub fn sft(config: &SftConfig, console: Console) -> Result<()> {
    config.check()?;
    let options = model_options(&config.run)?;
    let model_dir = config.model_name_or_path.as_deref();
    check_output_dir(&config.run, &model_dir.into_iter().collect::<Vec<_>>())?;
    let tokenizer_dir = config.tokenizer_name.as_deref().or(model_dir).expect("`check` asks for one of them");
    let tokenizer = Tokenizer::from_pretrained(tokenizer_dir)?;
    let mut model = match (model_dir, &config.config_name) {
        (Some(dir), _) => CausalLm::from_pretrained(dir, options)?,
        (None, shape) => {
            let shape = ModelConfig::from_file(shape.as_deref().expect("`check` asks for one of them"))?;
            CausalLm::from_config(shape, config.run.seed, options)?
        }
    };
    tokenizer.check_fits(model.config(), model_dir.or(config.config_name.as_deref()).unwrap_or(Path::new("")))?;

    let max_length = config.max_length.min(model.config().max_position_embeddings);
    let read = |path: &Path, split: &str| -> Result<(Vec<Demonstration>, Shortened)> {
        let rows = Dataset::read(path, split)?.demonstrations(&tokenizer, config.completion_only_loss)?;
        Ok(shorten(rows, max_length))
    };
    let (rows, shortened) = read(&config.dataset_name, &config.dataset_train_split)?;
    if rows.is_empty() {
        let message = format!("no row keeps a token to learn within max_length = {max_length}");
        return Err(crate::Error::invalid(&config.dataset_name, message));
    }
    let eval = match eval_path(config.eval_dataset_name.as_deref(), &config.dataset_name, &config.dataset_test_split) {
        Some(path) => read(&path, &config.dataset_test_split)?.0,
        None => Vec::new(),
    };
    let plan = config.plan(rows.len())?;

    prepare_output_dir(&config.run)?;
    config::write_resolved(config, config.run.output_dir.join("run.yaml"))?;
    let mut report = Reporter::create(&config.run, plan.num_updates, console)?;
    shortened.tell(&report, max_length);
    model.set_trainable(true);
    let mut optimizer = AdamW::new(model.params(), &config.optimizer);
    let mut cursor = Cursor::new(config.run.seed, rows.len());
    let mut since = Totals::default();
    let mut tokens_seen = 0.0;
    let mut began = Instant::now();
    let mut done = 0;
    for update in 0..plan.num_updates {
        let mut batch: Vec<&Demonstration> = cursor.take(plan.batch_size).into_iter().map(|row| &rows[row]).collect();
        // Rows of like length share a micro-batch: less padding in attention, the same sum.
        batch.sort_by_key(|row| row.tokens.len());
        let counted: usize = batch.iter().map(|row| row.tokens.len() - row.learn_from).sum();
        for micro_batch in batch.chunks(config.per_device_train_batch_size) {
            let nll = negative_log_likelihood(&model, micro_batch)?;
            since.loss += nll.double_value(&[]);
            (nll / counted as f64).backward();
        }
        let lr = config.learning_rate * lr_factor(&config.optimizer, update, plan.num_updates);
        since.tokens += counted as f64;
        since.grad_norm += optimizer.step(lr)?;
        since.updates += 1.0;
        tokens_seen += batch.iter().map(|row| row.tokens.len()).sum::<usize>() as f64;
        report.advance(format!("loss {:.3}", since.loss / since.tokens));
        let last = update + 1 == plan.num_updates || stop_requested();
        if (update + 1) % config.logging_steps == 0 || last {
            let mut metrics = since.metrics();
            metrics.push("time/update", began.elapsed().as_secs_f64() / since.updates);
            metrics.push("learning_rate", lr);
            metrics.push("num_tokens", tokens_seen);
            metrics.push("epoch", ((update + 1) * plan.batch_size) as f64 / rows.len() as f64);
            metrics.push("step", (update + 1) as f64);
            if last && !eval.is_empty() {
                metrics.push("eval_loss", evaluate(&model, &eval, config.per_device_eval_batch_size)?);
            }
            report.record((update + 1) as i64, &metrics)?;
            since = Totals::default();
            began = Instant::now();
        }
        done = update + 1;
        if last {
            break;
        }
    }
    report.finish();
    let dir = &config.run.output_dir;
    model.save_pretrained(dir, tokenizer.eos(), tokenizer.pad())?;
    tokenizer.save_pretrained(dir)?;
    let from = model_dir.map_or("random weights".into(), |dir| format!("`{}`", dir.display()));
    let data = format!("`{}`, {} rows", config.dataset_name.display(), rows.len());
    write_model_card(dir, "sft", &[("started from", from), ("data", data), ("updates", done.to_string())])?;
    if done < plan.num_updates {
        return Err(stopped(done, plan.num_updates, dir));
    }
    report.note(&format!("saved {}", dir.display()));
    Ok(())
}

/// Sum of the negative log-likelihoods of the rows' counted tokens, a scalar with a gradient.
fn negative_log_likelihood(model: &CausalLm, rows: &[&Demonstration]) -> Result<Tensor> {
    let sequences: Vec<&Vec<i64>> = rows.iter().map(|row| &row.tokens).collect();
    let spans: Vec<_> = rows.iter().map(|row| row.learn_from..row.tokens.len()).collect();
    Ok(-model.token_logprobs(&sequences, &spans, 1.0, false)?.logprobs.sum(Kind::Float))
}

/// Mean negative log-likelihood per counted token.
fn evaluate(model: &CausalLm, rows: &[Demonstration], batch_size: usize) -> Result<f64> {
    let counted: usize = rows.iter().map(|row| row.tokens.len() - row.learn_from).sum();
    let mut loss = 0.0;
    for batch in rows.chunks(batch_size) {
        let batch: Vec<&Demonstration> = batch.iter().collect();
        loss += tch::no_grad(|| negative_log_likelihood(model, &batch))?.double_value(&[]);
    }
    Ok(loss / counted as f64)
}

/// Where evaluation rows come from: a dataset of their own, else the test split of a folder that has one.
pub(super) fn eval_path(own: Option<&Path>, dataset: &Path, split: &str) -> Option<std::path::PathBuf> {
    let has_split = ["jsonl", "json"].iter().any(|kind| dataset.join(format!("{split}.{kind}")).is_file());
    own.or(has_split.then_some(dataset)).map(Path::to_path_buf)
}

/// What `max_length` did to the rows.
struct Shortened {
    cut: usize,
    left_out: usize,
}

impl Shortened {
    fn tell(&self, report: &Reporter, max_length: usize) {
        if self.cut > 0 {
            report.warn(&format!("{} rows were cut at max_length = {max_length} tokens", self.cut));
        }
        if self.left_out > 0 {
            report.warn(&format!(
                "{} rows were left out: no token to learn within max_length = {max_length} tokens",
                self.left_out
            ));
        }
    }
}

/// Cuts rows at their end and leaves out those with nothing left to learn; both are counted.
fn shorten(mut rows: Vec<Demonstration>, max_length: usize) -> (Vec<Demonstration>, Shortened) {
    let all = rows.len();
    let cut = rows.iter().filter(|row| row.tokens.len() > max_length).count();
    for row in &mut rows {
        row.tokens.truncate(max_length);
    }
    rows.retain(|row| row.tokens.len() > row.learn_from);
    let left_out = all - rows.len();
    (rows, Shortened { cut, left_out })
}

/// Sums since the last line of metrics.
#[derive(Default)]
struct Totals {
    loss: f64,
    tokens: f64,
    grad_norm: f64,
    updates: f64,
}

impl Totals {
    fn metrics(&self) -> Metrics {
        let mut metrics = Metrics::default();
        metrics.push("loss", self.loss / self.tokens);
        metrics.push("grad_norm", self.grad_norm / self.updates);
        metrics
    }
}
