//! The reward model: a sequence classifier learns to score the preferred text of each pair above the other.

use super::{
    Gathered, Progress, Saver, begin_report, check_held_out, describe_micro_batch, fixed_state, gather,
    kept_micro_batch_tokens, micro_batch_tokens, micro_batches, model_options, small_dataset, trained_options,
    trained_share, write_model_card,
};
use crate::checkpoint::{Checkpoints, Start};
use crate::config::{PairLoss, RewardConfig, Step, TrainPlan};
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
use std::ops::Range;
use std::path::Path;
use std::time::Instant;
use tch::{Device, Kind, Tensor};

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
    if config.pair_loss == PairLoss::Tokens {
        model.check_values(model_dir)?;
    }
    // An adapter that is there already becomes part of what is trained, or of what a fresh one is put on.
    model.merge_adapter();
    config.reward_format.map_or(Ok(()), |format| model.set_format(format))?;
    if let Some(lora) = config.peft.lora() {
        model.add_adapter(&lora, config.run.seed)?;
    }
    tokenizer.check_fits(model.config(), model_dir)?;

    let max_length = config.max_length.min(model.config().max_position_embeddings);
    let read = |dataset: &Dataset| {
        leave_out_long(dataset.pairs(&tokenizer, model.config().causal)?, max_length, dataset.path())
    };
    let (train, eval) = sources.read(config.run.seed, Step::Reward)?;
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
    let mut progress = Progress::new(optimizer, cursor, &config.eval, &config.run, fixed);
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
    if let Some(pads) = config.num_padding_at_beginning {
        report.note(&format!(
            "num_padding_at_beginning = {pads} has no effect: each text has its own length, and no pad is counted"
        ));
    }
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
/// read at the last token, or its mean over the tokens of [`Compared`]; an update's loss is the mean over its pairs, whatever
/// the micro-batches.
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
            let per_pair = batch.len() as f64 / progress.loss_scale();
            let (sides, since) = (sides(micro_batch), &mut progress.since);
            match config.pair_loss {
                PairLoss::Sequence => model.learn_scores(&sides, Some(&dropout), |scores| {
                    since.add(scores, &margin_loss(scores), config) / per_pair
                }),
                PairLoss::Tokens => {
                    let compared = Compared::of(micro_batch, model.device());
                    model.learn_values_dropping(&sides, &compared.spans, Some(&dropout), |values| {
                        since.add(&compared.ends(values), &compared.loss(values), config) / per_pair
                    })
                }
            }?;
        }
        let lr = learning_rate(config.learning_rate, &config.optimizer, progress.done, plan.num_updates);
        let done = progress.done + 1;
        let due = saver.due(progress, &config.eval, config.logging_steps, done, plan.num_updates);
        let grad_norm = progress.step(lr)?;
        let since = &mut progress.since;
        since.grad_norm += grad_norm;
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
            progress.push_loss_scale(&mut metrics);
            if (due.evaluation || finished || stopping) && !eval.is_empty() {
                let mut totals = Totals::default();
                for batch in eval.chunks(config.per_device_eval_batch_size) {
                    tch::no_grad(|| totals.measure(model, &batch.iter().collect::<Vec<_>>(), config))?;
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
pub(super) fn leave_out_long(mut pairs: Vec<Pair>, max_length: usize, path: &Path) -> Result<(Vec<Pair>, Vec<String>)> {
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

/// -log sigmoid(chosen - rejected) of scores, all chosen sides and then all rejected ones; `[pairs]`.
fn margin_loss(scores: &Tensor) -> Tensor {
    let scores = scores.view([2, -1]);
    -(scores.get(0) - scores.get(1)).log_sigmoid()
}

/// What the loss of DeepSpeed-Chat compares: the two texts of a pair at every token from the first that differs to the last
/// of the longer one.
///
/// Where the shorter text has ended its last score stands: nothing is said of what is not there. Of two equal texts the last
/// token is compared, which teaches nothing.
#[derive(Debug)]
struct Compared {
    /// The positions that are read of each side, all chosen ones and then all rejected ones: at least the last.
    spans: Vec<Range<usize>>,
    /// Places among what is read: of the two sides' ends, and of what is compared.
    ends: Tensor,
    chosen: Tensor,
    rejected: Tensor,
    /// The share in its pair's mean of each that is compared.
    shares: Tensor,
    /// Its pair.
    pairs: Tensor,
}

impl Compared {
    fn of(pairs: &[&Pair], device: Device) -> Self {
        let apart = |pair: &&Pair| pair.chosen.iter().zip(&pair.rejected).take_while(|(a, b)| a == b).count();
        let spans: Vec<Range<usize>> = [|pair: &Pair| pair.chosen.len(), |pair: &Pair| pair.rejected.len()]
            .into_iter()
            .flat_map(|len| pairs.iter().map(move |pair| apart(pair).min(len(pair) - 1)..len(pair)))
            .collect();
        let mut places = Vec::new();
        let mut read = 0;
        for span in &spans {
            places.push(read as i64);
            read += span.len();
        }
        let ends = spans.iter().zip(&places).map(|(span, at)| at + span.len() as i64 - 1).collect::<Vec<_>>();
        let (mut compared, mut shares, mut of) = ([Vec::new(), Vec::new()], Vec::new(), Vec::new());
        for (i, pair) in pairs.iter().enumerate() {
            let longest = pair.chosen.len().max(pair.rejected.len());
            let from = apart(pair).min(longest - 1);
            for (to, side) in compared.iter_mut().zip([i, pairs.len() + i]) {
                let place = |t: usize| places[side] + (t.min(spans[side].end - 1) - spans[side].start) as i64;
                to.extend((from..longest).map(place));
            }
            shares.extend((from..longest).map(|_| 1.0 / (longest - from) as f32));
            of.extend((from..longest).map(|_| i as i64));
        }
        let [chosen, rejected] = compared;
        let there = |places: &[i64]| Tensor::from_slice(places).to_device(device);
        let shares = Tensor::from_slice(&shares).to_device(device);
        Self {
            ends: there(&ends),
            chosen: there(&chosen),
            rejected: there(&rejected),
            pairs: there(&of),
            spans,
            shares,
        }
    }

    /// The scores at the ends, all chosen sides and then all rejected ones, among the `values` at the spans.
    fn ends(&self, values: &Tensor) -> Tensor {
        values.index_select(0, &self.ends)
    }

    /// The loss of each pair.
    fn loss(&self, values: &Tensor) -> Tensor {
        let at = |places| values.index_select(0, places);
        let losses = -(at(&self.chosen) - at(&self.rejected)).log_sigmoid() * &self.shares;
        let pairs = Tensor::zeros([self.spans.len() as i64 / 2], (Kind::Float, values.device()));
        pairs.index_add(0, &self.pairs, &losses)
    }
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
    /// Adds what the model says of pairs.
    fn measure(&mut self, model: &SequenceClassifier, pairs: &[&Pair], config: &RewardConfig) -> Result<()> {
        let sides = sides(pairs);
        let (scores, losses) = match config.pair_loss {
            PairLoss::Sequence => {
                let scores = model.scores(&sides)?;
                let losses = margin_loss(&scores);
                (scores, losses)
            }
            PairLoss::Tokens => {
                let compared = Compared::of(pairs, model.device());
                let values = model.values_at(&sides, &compared.spans)?;
                (compared.ends(&values), compared.loss(&values))
            }
        };
        let _ = self.add(&scores, &losses, config);
        Ok(())
    }

    /// Adds the pairs with these scores, all chosen sides and then all rejected ones, and these losses; gives the sum of the
    /// losses, with what centres the scores.
    fn add(&mut self, scores: &Tensor, losses: &Tensor, config: &RewardConfig) -> Tensor {
        let scores = scores.view([2, -1]);
        let (chosen, rejected) = (scores.get(0), scores.get(1));
        let margin = &chosen - &rejected;
        let mut loss = losses.sum(Kind::Float);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelOptions;
    use std::collections::HashMap;

    fn close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
        assert_eq!(found.size(), expected.size(), "{what}");
        let gap = (found - expected).abs().max().double_value(&[]);
        assert!(gap <= tolerance, "{what}: {found} is not {expected}: {gap:e}");
    }

    fn pair(chosen: &[i64], rejected: &[i64]) -> Pair {
        Pair { chosen: chosen.to_vec(), rejected: rejected.to_vec() }
    }

    /// The numbers of DeepSpeed-Chat's reward models on pairs that part anywhere, are of any lengths, or are equal
    /// (tests/golden/make_reward_pairs.py).
    #[test]
    fn a_loss_of_tokens_has_the_values_and_gradients_of_torch() {
        tch::set_num_threads(1);
        let heads = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/value_heads");
        for name in ["opt_dschat", "opt_proj_postln_dschat", "gpt2_dschat", "llama_untied_dschat"] {
            let bytes = std::fs::read(heads.join(name).join("pairs.safetensors")).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let golden: HashMap<&str, Tensor> = file
                .iter()
                .map(|(name, view)| {
                    let shape: Vec<i64> = view.shape().iter().map(|&n| n as i64).collect();
                    let kind = if view.dtype() == safetensors::Dtype::I64 { Kind::Int64 } else { Kind::Float };
                    (name, Tensor::from_data_size(view.data(), &shape, kind))
                })
                .collect();
            let rows = |name: &str| Vec::<Vec<i64>>::try_from(&golden[name]).unwrap();
            let texts = rows("input_ids").into_iter().zip(rows("attention_mask"));
            let texts: Vec<Vec<i64>> =
                texts.map(|(ids, mask)| ids[..mask.iter().sum::<i64>() as usize].to_vec()).collect();
            let (chosen, rejected) = texts.split_at(texts.len() / 2);
            let pairs: Vec<Pair> = chosen.iter().zip(rejected).map(|(a, b)| pair(a, b)).collect();
            let pairs: Vec<&Pair> = pairs.iter().collect();

            let options = ModelOptions::default();
            let mut model = SequenceClassifier::from_pretrained(&heads.join(name), None, options).unwrap();
            model.set_trainable(true);
            let (sides, compared) = (sides(&pairs), Compared::of(&pairs, Device::Cpu));
            let mut seen = None;
            let learn = |values: &Tensor| {
                let losses = compared.loss(values);
                seen = Some((compared.ends(values).detach(), losses.detach()));
                losses.mean(Kind::Float)
            };
            model.learn_values_dropping(&sides, &compared.spans, None, learn).unwrap();
            let (ends, losses) = seen.unwrap();
            close(name, &ends, &golden["ends"], 2e-5);
            close(name, &losses, &golden["losses"], 2e-5);
            close(name, &losses.mean(Kind::Float), &golden["loss"], 2e-5);
            close(name, &ends, &tch::no_grad(|| model.scores(&sides)).unwrap(), 2e-5);
            let gradients: Vec<_> = model.params().iter().map(|param| (&param.name, param.tensor.grad())).collect();
            let of_head = &gradients.iter().find(|(name, _)| *name == "v_head.weight").unwrap().1;
            close(name, of_head, &golden["v_head.grad"], 2e-5);
            let trunk = gradients.iter().filter(|(name, grad)| *name != "v_head.weight" && grad.defined());
            let norms: Vec<Tensor> = trunk.map(|(_, grad)| grad.norm()).collect();
            let norm = Tensor::stack(&norms, 0).norm();
            let expected = &golden["trunk.grad_norm"];
            close(name, &(norm / expected), &expected.ones_like(), 1e-4);
            // DeepSpeed-Chat compares with what is said at pads; where there are none the two are the same.
            let padded = &golden["padded_losses"];
            for (i, pair) in pairs.iter().enumerate() {
                let gap = (losses.double_value(&[i as i64]) - padded.double_value(&[i as i64])).abs();
                assert_eq!(gap <= 2e-5, pair.chosen.len() == pair.rejected.len(), "{name}, pair {i}: {gap:e}");
            }
        }
    }

    #[test]
    fn tokens_are_compared_from_where_two_texts_part_and_a_text_that_has_ended_keeps_its_score() {
        let (longer, equal, prefix) = (pair(&[1, 2, 3, 4], &[1, 2, 5]), pair(&[7, 8], &[7, 8]), pair(&[1], &[1, 2]));
        let pairs = [&longer, &equal, &prefix];
        let compared = Compared::of(&pairs, Device::Cpu);
        assert_eq!(compared.spans, [2..4, 1..2, 0..1, 2..3, 1..2, 1..2]);
        // Chosen: 3 and 4; 8; 1. Rejected: 5; 8; 2.
        let values = Tensor::from_slice(&[0.5f32, 2.0, 1.0, 3.0, -1.0, 1.0, 4.0]);
        let cost = |margin: f64| (1.0 + (-margin).exp()).ln();
        let expected = [(cost(1.5) + cost(3.0)) / 2.0, cost(0.0), cost(-1.0)].map(|x| x as f32);
        close("losses", &compared.loss(&values), &Tensor::from_slice(&expected), 1e-6);
        let ends = Tensor::from_slice(&[2.0f32, 1.0, 3.0, -1.0, 1.0, 4.0]);
        close("ends", &compared.ends(&values), &ends, 0.0);
        let mut totals = Totals::default();
        let config = RewardConfig::new("m", "d", "o");
        let _ = totals.add(&compared.ends(&values), &compared.loss(&values), &config);
        assert_eq!((totals.pairs, totals.correct, totals.margin), (3.0, 1.0, 3.0 + 0.0 - 1.0));
    }
}
