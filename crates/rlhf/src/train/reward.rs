//! The reward model: a sequence classifier learns to score the preferred text of each pair above the other.

use super::sft::eval_path;
use super::{model_options, write_model_card};
use crate::config::{RewardConfig, write_resolved};
use crate::data::{Cursor, Dataset, Pair};
use crate::metrics::Metrics;
use crate::model::SequenceClassifier;
use crate::optim::{AdamW, lr_factor};
use crate::report::{Console, Reporter, check_output_dir, prepare_output_dir, stop_requested, stopped};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use std::path::Path;
use std::time::Instant;
use tch::{Kind, Tensor};

/// Trains a reward model as `config` says and saves it in `output_dir`.
///
/// The loss of a pair is -log sigmoid(chosen - rejected) (Bradley and Terry; Ouyang et al. 2022, eq. 1), scores being
/// read at the last token; an update's loss is the mean over its pairs, whatever the micro-batches.
///
/// # Errors
/// If an input is not what it should be, or a gradient is not finite.
pub fn reward(config: &RewardConfig, console: Console) -> Result<()> {
    config.check()?;
    let options = model_options(&config.run)?;
    let model_dir = config.model_name_or_path.as_path();
    check_output_dir(&config.run, &[model_dir])?;
    let tokenizer = Tokenizer::from_pretrained(model_dir)?;
    let new_head = config.new_reward_head.then_some(config.run.seed);
    let mut model = SequenceClassifier::from_pretrained(model_dir, new_head, options)?;
    tokenizer.check_fits(model.config(), model_dir)?;

    let max_length = config.max_length.min(model.config().max_position_embeddings);
    let read = |path: &Path, split: &str| -> Result<(Vec<Pair>, usize)> {
        let mut pairs = Dataset::read(path, split)?.pairs(&tokenizer)?;
        let all = pairs.len();
        pairs.retain(|pair| pair.chosen.len().max(pair.rejected.len()) <= max_length);
        let left_out = all - pairs.len();
        Ok((pairs, left_out))
    };
    let (pairs, left_out) = read(&config.dataset_name, &config.dataset_train_split)?;
    if pairs.is_empty() {
        let message = format!("every pair has a side of more than max_length = {max_length} tokens");
        return Err(Error::invalid(&config.dataset_name, message));
    }
    let eval = match eval_path(config.eval_dataset_name.as_deref(), &config.dataset_name, &config.dataset_test_split) {
        Some(path) => read(&path, &config.dataset_test_split)?.0,
        None => Vec::new(),
    };
    let plan = config.plan(pairs.len())?;

    prepare_output_dir(&config.run)?;
    write_resolved(config, config.run.output_dir.join("run.yaml"))?;
    let mut report = Reporter::create(&config.run, plan.num_updates, console)?;
    if left_out > 0 {
        report.warn(&format!("{left_out} pairs were left out: a side has more than max_length = {max_length} tokens"));
    }
    model.set_trainable(true);
    let mut optimizer = AdamW::new(model.params(), &config.optimizer);
    let mut cursor = Cursor::new(config.run.seed, pairs.len());
    let mut since = Totals::default();
    let mut began = Instant::now();
    let mut done = 0;
    for update in 0..plan.num_updates {
        let mut batch: Vec<&Pair> = cursor.take(plan.batch_size).into_iter().map(|row| &pairs[row]).collect();
        batch.sort_by_key(|pair| pair.chosen.len().max(pair.rejected.len()));
        for micro_batch in batch.chunks(config.per_device_train_batch_size) {
            let loss = since.add(&model, micro_batch, config)?;
            (loss / batch.len() as f64).backward();
        }
        let lr = config.learning_rate * lr_factor(&config.optimizer, update, plan.num_updates);
        since.grad_norm += optimizer.step(lr)?;
        report.advance(format!("loss {:.3} accuracy {:.2}", since.loss / since.pairs, since.correct / since.pairs));
        let last = update + 1 == plan.num_updates || stop_requested();
        if (update + 1) % config.logging_steps == 0 || last {
            let mut metrics = Metrics::default();
            since.push(&mut metrics, ["loss", "accuracy", "margin", "mean_reward"]);
            metrics.push("grad_norm", since.grad_norm / since.updates(plan.batch_size));
            metrics.push("learning_rate", lr);
            metrics.push("epoch", ((update + 1) * plan.batch_size) as f64 / pairs.len() as f64);
            metrics.push("step", (update + 1) as f64);
            metrics.push("time/update", began.elapsed().as_secs_f64() / since.updates(plan.batch_size));
            if last && !eval.is_empty() {
                let mut totals = Totals::default();
                for batch in eval.chunks(config.per_device_eval_batch_size) {
                    let _ = tch::no_grad(|| totals.add(&model, &batch.iter().collect::<Vec<_>>(), config))?;
                }
                totals.push(&mut metrics, ["eval_loss", "eval_accuracy", "eval_margin", "eval_mean_reward"]);
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
    let facts = [
        ("started from", format!("`{}`", model_dir.display())),
        ("data", format!("`{}`, {} pairs", config.dataset_name.display(), pairs.len())),
        ("updates", done.to_string()),
    ];
    write_model_card(dir, "reward", &facts)?;
    if done < plan.num_updates {
        return Err(stopped(done, plan.num_updates, dir));
    }
    report.note(&format!("saved {}", dir.display()));
    Ok(())
}

/// Sums over pairs.
#[derive(Default)]
struct Totals {
    pairs: f64,
    loss: f64,
    correct: f64,
    margin: f64,
    reward: f64,
    grad_norm: f64,
}

impl Totals {
    /// Scores both sides of the pairs; gives the sum of their losses, a scalar with a gradient.
    fn add(&mut self, model: &SequenceClassifier, pairs: &[&Pair], config: &RewardConfig) -> Result<Tensor> {
        let texts: Vec<&Vec<i64>> =
            pairs.iter().map(|pair| &pair.chosen).chain(pairs.iter().map(|pair| &pair.rejected)).collect();
        let scores = model.scores(&texts)?.view([2, -1]);
        let (chosen, rejected) = (scores.get(0), scores.get(1));
        let margin = &chosen - &rejected;
        let mut loss = -margin.log_sigmoid().sum(Kind::Float);
        if let Some(weight) = config.center_rewards_coefficient {
            loss += (&chosen + &rejected).square().sum(Kind::Float) * weight;
        }
        let number = |x: Tensor| x.double_value(&[]);
        self.pairs += pairs.len() as f64;
        self.loss += number(loss.detach());
        self.correct += number(margin.detach().gt(0.0).sum(Kind::Float));
        self.margin += number(margin.detach().sum(Kind::Float));
        self.reward += number(scores.detach().sum(Kind::Float)) / 2.0;
        Ok(loss)
    }

    fn push(&self, metrics: &mut Metrics, names: [&'static str; 4]) {
        for (name, sum) in names.into_iter().zip([self.loss, self.correct, self.margin, self.reward]) {
            metrics.push(name, sum / self.pairs);
        }
    }

    fn updates(&self, batch_size: usize) -> f64 {
        self.pairs / batch_size as f64
    }
}
