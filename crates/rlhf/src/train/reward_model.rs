//! The reward model: a sequence classifier learns to score the preferred text of each pair above the other.

use super::supervised::{Data, Loaded, Sums, Supervised, UpdateRows, Words, spec, start_training, train, with_opened};
use super::{Gathered, check_held_out, gather, model_options, notes_on_weights, small_dataset, trained_options};
use crate::data::{Dataset, Pair, Sources};
use crate::run::Runtime;
use crate::run::session::Opening;
use crate::settings::{PairLoss, RewardConfig, Stage};
use crate::terminal;
use rlhf_base::dist::World;
use rlhf_base::metrics::Metrics;
use rlhf_base::name_of;
use rlhf_base::{Error, Result};
use rlhf_hub as hub;
use rlhf_hub::AskedHub;
use rlhf_lm::model::{Batch, ClassifierHead, DropoutRows, ModelConfig, ModelOptions, SequenceClassifier, Trains};
use rlhf_lm::optim::micro_batch::micro_batches;
use rlhf_lm::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::ops::Range;
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};
use tch_ext::{on_device, to_host};

/// The command, as checkpoints name it.
const COMMAND: &str = "reward";

/// Metrics of the end of a run, by their labels.
const OUTCOME: [(&str, &str); 5] = [
    ("loss", "loss"),
    ("accuracy", "accuracy"),
    ("margin", "margin"),
    ("held-out loss", "eval_loss"),
    ("held-out accuracy", "eval_accuracy"),
];

/// Trains a reward model as `config` sets and saves it in `output_dir`.
///
/// # Errors
/// If a setting, a model folder or a row of the data is missing or malformed, which the message names; if a gradient is not finite, after
/// saving the last complete update.
pub fn reward(config: &RewardConfig, runtime: impl Into<Runtime>) -> Result<()> {
    let runtime: &Runtime = &runtime.into();
    let world = &runtime.world;
    config.check()?;
    refuse_eval_only(config)?;
    let mut paths: Vec<&Path> = vec![&config.model_name_or_path];
    paths.extend(config.data.dataset_name.iter().map(|name| name.as_path()));
    paths.extend(config.eval_dataset_name.as_deref());
    let find = || {
        Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
        hub::model_dir(&config.model_name_or_path, Some(&config.model_revision)).map(drop)
    };
    with_opened(COMMAND, (config, &config.run), (&paths, find), world, |opening, hub| {
        let (task, loaded) = world.agree(load_run(config, opening, hub, world))?;
        train(task, loaded, runtime)
    })
}

/// Loads model and pairs.
///
/// # Errors
/// If a setting, a model folder or a row of the data is missing or malformed, which the message names.
fn load_run<'a>(
    config: &'a RewardConfig,
    opening: Opening,
    hub: &AskedHub,
    world: &World,
) -> Result<(Ranking<'a>, Loaded<'a, RewardConfig, ClassifierHead>)> {
    // Cheap checks first: weights may be gigabytes.
    let sources = Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
    check_held_out(&config.eval, &sources, &config.data)?;
    let model_dir = &hub::model_dir(&config.model_name_or_path, Some(&config.model_revision))?;
    let (mut model, tokenizer, pads) = load_trained(config, model_dir)?;

    let read = |dataset: &Dataset| read_pairs(dataset, config, model.config(), &tokenizer, pads.as_ref());
    let Data { train, eval, first_row, mut inputs } =
        Data::read(&sources, &config.data, config.run.seed, Stage::Reward)?;
    inputs.model(name_of!(config.model_name_or_path), model_dir)?;
    let train_pairs = gather(&train, read)?;
    let eval_pairs = gather(eval.as_slice(), read)?;
    let num_pairs = train_pairs.rows.len();
    let tokens: Vec<[&[i64]; 2]> = train_pairs.rows.iter().map(|pair| [&pair.chosen[..], &pair.rejected[..]]).collect();
    inputs.tokens("dataset_name", &config.data.describe(), &tokens);
    let plan = config.plan_for(num_pairs)?;
    let mut warnings = [&train_pairs.warnings[..], &eval_pairs.warnings].concat();
    warnings.extend(small_dataset(&config.data, num_pairs, plan.batch_size));
    warnings.extend(notes_on_weights(model_dir, config.run.dtype, &model));
    let adds_head = model.has_new_head() && !config.new_reward_head;
    let drawn =
        format!("{}: a model without a score head: it gets a new one, with random weights", model_dir.display());
    warnings.extend(adds_head.then_some(drawn));

    let optimizer = start_training(&mut model, &config.run, &config.optimizer, world)?;
    let words = Words {
        model: Some(model_dir.clone()),
        base_model: Some(&config.model_name_or_path),
        is_adapter: config.peft.use_peft,
        unit: "pairs",
        data: format!("`{}`, {num_pairs} pairs", config.data.describe()),
        facts: Vec::new(),
        tokenizer: tokenizer.describe(),
        notes: unused_padding(config, pads.is_some()).into_iter().collect(),
        numbers: &OUTCOME,
        commands: commands_to_score(&config.run.output_dir, first_row.as_ref()).into(),
    };
    let loaded = Loaded {
        model,
        tokenizer,
        opening,
        spec: spec(COMMAND, config, (&config.run, &config.eval, config.logging_steps), &plan, num_pairs),
        optimizer,
        schedule: (config.learning_rate, &config.optimizer),
        cursor: train_pairs.cursor(config.run.seed, &config.data),
        num_rows: num_pairs,
        commits: hub.commits(),
        inputs,
        warnings,
        words,
    };
    Ok((Ranking { config, pads, train_pairs, eval_pairs: eval_pairs.rows }, loaded))
}

/// Loads the model in `dir` for training; adds an adapter and sets the format if the settings have them.
fn load_trained(config: &RewardConfig, dir: &Path) -> Result<(SequenceClassifier, Tokenizer, Option<Pads>)> {
    let options = trained_options(model_options(&config.run)?, config.peft.use_peft);
    // As in TRL, a language model gets a head; an existing head is kept.
    let (mut model, tokenizer, pads) = load(config, dir, Some(config.run.seed), options)?;
    let eos = tokenizer.eos().filter(|_| config.eos_token.is_some());
    eos.into_iter().for_each(|eos| model.set_eos(eos));
    // An adapter that the folder already has is merged, also before a new one is added.
    model.prepare(config.optimizer.optim.trains(config.peft.use_peft))?;
    config.reward_format.map_or(Ok(()), |format| model.set_format(format))?;
    if let Some(lora) = config.peft.lora() {
        model.add_adapter(&lora, config.run.seed)?;
    }
    tokenizer.check_fits(model.config(), dir)?;
    Ok((model, tokenizer, pads))
}

/// Returns a note about a number of pads that the loss does not use.
fn unused_padding(config: &RewardConfig, has_pads: bool) -> Option<String> {
    let count = config.num_padding_at_beginning.filter(|_| !has_pads)?;
    Some(format!(
        "num_padding_at_beginning = {count} has no effect without pair_loss = tokens: each text has its own length"
    ))
}

/// Returns the commands that score a text with the reward model in `dir`: the text of `row`, a row of its data, if it
/// is short.
fn commands_to_score(dir: &Path, row: Option<&Value>) -> [Vec<String>; 2] {
    let text = |name: &str| row.and_then(|row| row.get(name)?.as_str());
    let scored = match (text("prompt"), text("chosen")) {
        (Some(prompt), Some(chosen)) => json!({"prompt": prompt, "completion": chosen}),
        (None, Some(chosen)) => json!({"text": chosen}),
        _ => json!({"text": "It was good."}),
    };
    let line = scored.to_string();
    let line = if line.len() > 200 { json!({"text": "It was good."}).to_string() } else { line };
    // `echo` of some shells reads backslashes.
    let printed = ["printf", "%s", &line].map(String::from);
    let scores = [terminal::program(), "score".into(), "--model_name_or_path".into(), dir.display().to_string()];
    [printed.into(), scores.into()]
}

/// Loads the model in `dir` with its tokenizer, and finds the padding if the loss needs pads.
fn load(
    config: &RewardConfig,
    dir: &Path,
    new_head: Option<u64>,
    options: ModelOptions,
) -> Result<(SequenceClassifier, Tokenizer, Option<Pads>)> {
    let mut tokenizer = Tokenizer::from_pretrained(dir)?;
    set_up_tokenizer(&mut tokenizer, config)?;
    let model = SequenceClassifier::from_pretrained(dir, new_head, options)?;
    if model.labels().len() > 1 {
        let message = format!("expected a classifier with one label, found {}", model.labels().join(", "));
        return Err(Error::invalid(dir, message));
    }
    let pads = find_pads(config, model.config(), &tokenizer, dir)?;
    if config.pair_loss != PairLoss::Sequence {
        model.check_values(dir)?;
    }
    Ok((model, tokenizer, pads))
}

/// Sets up the tokenizer by the settings.
///
/// # Errors
/// If it has no `eos_token` of the settings.
pub(crate) fn set_up_tokenizer(tokenizer: &mut Tokenizer, config: &RewardConfig) -> Result<()> {
    // Prompt and response are one text to a reward model.
    tokenizer.set_encoder_decoder(false);
    super::set_up_tokenizer(tokenizer, &config.data, config.eos_token.as_deref())
}

/// Returns the padding if the loss needs pads, for a model of this shape in the folder `dir`.
///
/// # Errors
/// If the loss compares tokens, and the model has no score per token or the tokenizer no token to pad with.
pub(super) fn find_pads(
    config: &RewardConfig,
    shape: &ModelConfig,
    tokenizer: &Tokenizer,
    dir: &Path,
) -> Result<Option<Pads>> {
    if config.pair_loss != PairLoss::Sequence {
        shape.check_decoder(dir)?;
        if shape.is_encoder_decoder() {
            let rest = ": expected sequence for an encoder-decoder, whose score is that of a whole text, found a loss of tokens";
            return Err(Error::refused(name_of!(config.pair_loss), rest));
        }
    }
    (config.pair_loss == PairLoss::Tokens).then(|| Pads::find(tokenizer, shape, config)).transpose()
}

/// Reads the pairs of a dataset that are not too long, for a model of this shape. Returns them with warnings.
///
/// # Errors
/// If a row is no pair, none is left, or the loss cannot compare one.
pub(super) fn read_pairs(
    dataset: &Dataset,
    config: &RewardConfig,
    shape: &ModelConfig,
    tokenizer: &Tokenizer,
    pads: Option<&Pads>,
) -> Result<(Vec<Pair>, Vec<String>)> {
    let max_length = config.max_length.unwrap_or(usize::MAX).min(shape.max_position_embeddings);
    let pairs = dataset.pairs(&tokenizer.limited_to(max_length), shape.causal)?;
    let mut read = leave_out_long(pairs, max_length, dataset.path())?;
    read.1.extend(dataset.note_on_media());
    check_margins(&read.0, config.pair_loss, dataset.path())?;
    pads.map_or(Ok(()), |pads| pads.check(&read.0, dataset.path()))?;
    Ok(read)
}

/// Refuses `eval_only` in a training run.
pub(super) fn refuse_eval_only(config: &RewardConfig) -> Result<()> {
    if config.eval_only {
        let rest = " = true: expected false, as this trains a model; `rlhf reward --eval_only` measures one";
        return Err(Error::refused(name_of!(config.eval_only), rest));
    }
    Ok(())
}

/// Result of [`evaluate`].
#[derive(Debug, Clone)]
pub struct RewardEvaluation {
    /// Files or names of the datasets.
    pub dataset: String,
    /// Number of pairs.
    pub pairs: usize,
    /// `eval_loss`, `eval_accuracy`, `eval_margin` and `eval_mean_reward`, as training writes them.
    pub metrics: Metrics,
    /// Warnings about the data.
    pub warnings: Vec<String>,
}

/// Evaluates the model that `config` names, and writes nothing: on the evaluation dataset if there is one, else on the test
/// split or the rows held out by `eval_split_size`, else on all training rows. The ranks of `runtime` divide the pairs among them.
///
/// # Errors
/// If a setting, a model folder or a row of the data is missing or malformed, which the message names; if a score is not finite.
pub fn evaluate(config: &RewardConfig, runtime: impl Into<Runtime>) -> Result<RewardEvaluation> {
    config.check()?;
    let Runtime { world, .. } = runtime.into();
    let Measured { model, pads, datasets, gathered, dir } = world.agree(Measured::load(config))?;
    let sums = measure(&model, &gathered.rows, pads.as_ref(), config, &world)?;
    let mut metrics = Metrics::default();
    sums.push_as(&mut metrics, EVAL_METRICS);
    if let Some((name, value)) = metrics.iter().find(|(_, value)| !value.is_finite()) {
        let message = format!("{name} is {value}: the model's scores are not finite: its weights are damaged");
        return Err(Error::invalid(dir, message));
    }
    let names: Vec<String> = datasets.iter().map(|dataset| dataset.path().display().to_string()).collect();
    Ok(RewardEvaluation { dataset: names.join(", "), pairs: gathered.rows.len(), metrics, warnings: gathered.warnings })
}

/// A loaded model and the pairs that [`evaluate`] measures it on.
struct Measured {
    model: SequenceClassifier,
    pads: Option<Pads>,
    datasets: Vec<Dataset>,
    gathered: Gathered<Pair>,
    /// The model's folder.
    dir: PathBuf,
}

impl Measured {
    fn load(config: &RewardConfig) -> Result<Self> {
        let options = model_options(&config.run)?;
        let sources = Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
        let dir = hub::model_dir(&config.model_name_or_path, Some(&config.model_revision))?;
        // The scores of a new random head mean nothing.
        let (mut model, tokenizer, pads) = load(config, &dir, None, options)?;
        let trains = if model.quantization().is_some() { Trains::Adapter } else { Trains::All };
        model.prepare(trains)?;
        tokenizer.check_fits(model.config(), &dir)?;
        let (train, eval) = sources.read(config.run.seed, Stage::Reward)?;
        let datasets = eval.map_or(train, |eval| vec![eval]);
        let read = |dataset: &Dataset| read_pairs(dataset, config, model.config(), &tokenizer, pads.as_ref());
        let gathered = gather(&datasets, read)?;
        Ok(Self { model, pads, datasets, gathered, dir })
    }
}

/// The metrics of an evaluation.
const EVAL_METRICS: [&str; 4] = ["eval_loss", "eval_accuracy", "eval_margin", "eval_mean_reward"];

/// The pairs of a run.
///
/// The loss of a pair is -log sigmoid(chosen - rejected - margin), where the margin is 0 unless the pair has one (Bradley
/// and Terry; Ouyang et al. 2022, eq. 1), with the scores at the last token, or its mean over the tokens of [`Compared`].
/// The loss of an update is the mean over its pairs, for any size of the micro-batches.
struct Ranking<'a> {
    config: &'a RewardConfig,
    pads: Option<Pads>,
    train_pairs: Gathered<Pair>,
    eval_pairs: Vec<Pair>,
}

impl Supervised for Ranking<'_> {
    type Head = ClassifierHead;
    type Sums = Totals;

    fn backward(&mut self, model: &SequenceClassifier, batch: &UpdateRows<'_>, sums: &mut Totals) -> Result<()> {
        let config = self.config;
        let pads = self.pads.as_ref();
        let mut pairs: Vec<&Pair> = batch.rows.iter().map(|&row| &self.train_pairs.rows[row]).collect();
        pairs.sort_by_key(|pair| pair.chosen.len().max(pair.rejected.len()));
        let per_pair = pairs.len() as f64 / batch.loss_scale;
        let tokens = |pair: &&Pair| match pads {
            None => pair.chosen.len() + pair.rejected.len(),
            Some(_) => 2 * pair.chosen.len().max(pair.rejected.len()),
        };
        let local = batch.world.own_part(&pairs, tokens);
        let mut first = local.start as u64;
        for micro_batch in
            micro_batches(&pairs[local], config.batches().rows_per_pass(), batch.max_tokens, |pair| (tokens(pair), 0))
        {
            let places = first..first + micro_batch.len() as u64;
            first = places.end;
            // The two sides of a pair are separate rows.
            let rows = places.clone().map(|pair| 2 * pair).chain(places.map(|pair| 2 * pair + 1)).collect();
            let dropout =
                DropoutRows { share: config.peft.lora_dropout, seed: config.run.seed, update: batch.update, rows };
            match config.pair_loss {
                PairLoss::Sequence => model.scores_backward(&sides(micro_batch), Some(&dropout), |scores| {
                    sums.add(scores, &sequence_loss(scores, micro_batch), config) / per_pair
                }),
                PairLoss::Tokens | PairLoss::TokensUnpadded => {
                    let compared = Compared::of(micro_batch, pads, model.device());
                    compared.learn(model, Some(&dropout), |values| {
                        sums.add(&compared.ends(values), &compared.loss(values), config) / per_pair
                    })
                }
            }?;
        }
        Ok(())
    }

    fn evaluate(&self, model: &SequenceClassifier, world: &World, metrics: &mut Metrics) -> Result<()> {
        let sums = measure(model, &self.eval_pairs, self.pads.as_ref(), self.config, world)?;
        sums.push_as(metrics, EVAL_METRICS);
        Ok(())
    }

    fn has_eval_rows(&self) -> bool {
        !self.eval_pairs.is_empty()
    }
}

/// Returns the sums of an evaluation on `pairs`, which the ranks divide among them.
fn measure(
    model: &SequenceClassifier,
    pairs: &[Pair],
    pads: Option<&Pads>,
    config: &RewardConfig,
    world: &World,
) -> Result<Totals> {
    let mut sums = Totals::default();
    let local_pairs = world.share_by(pairs, |pair| pair.chosen.len() + pair.rejected.len());
    let passes = local_pairs
        .chunks(config.per_device_eval_batch_size)
        .try_for_each(|batch| tch::no_grad(|| sums.measure(model, &batch.iter().collect::<Vec<_>>(), pads, config)));
    world.agree(passes)?;
    sums.sum_over(world)?;
    Ok(sums)
}

/// Drops pairs with a side that is too long: cut at its end it would lose the part that it is scored for. Returns the others, with
/// warnings.
///
/// # Errors
/// If nothing is left.
pub(crate) fn leave_out_long(mut pairs: Vec<Pair>, max_length: usize, path: &Path) -> Result<(Vec<Pair>, Vec<String>)> {
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

/// Returns all chosen sides, then all rejected ones.
fn sides<'p>(pairs: &[&'p Pair]) -> Vec<&'p Vec<i64>> {
    pairs.iter().map(|pair| &pair.chosen).chain(pairs.iter().map(|pair| &pair.rejected)).collect()
}

/// Returns -log sigmoid(chosen - rejected - margin) of scores, all chosen sides and then all rejected ones; `[pairs]`.
/// As TRL's `RewardTrainer` with a `margin` column (Touvron et al. 2023, eq. 2).
fn sequence_loss(scores: &Tensor, pairs: &[&Pair]) -> Tensor {
    let scores = scores.view([2, -1]);
    let difference = scores.get(0) - scores.get(1);
    if pairs.iter().all(|pair| pair.margin.is_none()) {
        return -difference.log_sigmoid();
    }
    let margins: Vec<f32> = pairs.iter().map(|pair| pair.margin.unwrap_or(0.0) as f32).collect();
    -(difference - on_device(&margins, scores.device())).log_sigmoid()
}

/// Refuses margins if the loss does not use them.
///
/// # Errors
/// If a pair has one, and the loss compares tokens.
fn check_margins(pairs: &[Pair], pair_loss: PairLoss, path: &Path) -> Result<()> {
    let Some(margin) = pairs.iter().find_map(|pair| pair.margin).filter(|_| pair_loss != PairLoss::Sequence) else {
        return Ok(());
    };
    let name = if pair_loss == PairLoss::Tokens { "tokens" } else { "tokens_unpadded" };
    Err(Error::invalid(
        path,
        format!(
            "a pair has margin = {margin}, and pair_loss = {name} compares single tokens, which have no margin: expected \
             pair_loss = sequence, or --dataset_columns margin=none to leave it out"
        ),
    ))
}

/// The padding of DeepSpeed-Chat's loss.
#[derive(Debug)]
pub(super) struct Pads {
    id: i64,
    /// Number of pads in a text before the pad that ends it; `None`: the number of pads at its start.
    skipped: Option<usize>,
    /// Tokens of a padded text.
    width: usize,
}

impl Pads {
    /// Returns DeepSpeed-Chat's padding; for a Llama tokenizer without a padding token it is the eos.
    ///
    /// # Errors
    /// If the tokenizer has no token to pad with.
    fn find(tokenizer: &Tokenizer, shape: &ModelConfig, config: &RewardConfig) -> Result<Self> {
        let id = tokenizer.deepspeed_chat_pad(shape).or(tokenizer.eos()).ok_or_else(|| {
            let rest =
                " = tokens: expected a tokenizer with an eos or a pad token, found none; tokens_unpadded needs none";
            Error::refused("pair_loss", rest)
        })?;
        let width = config.max_length.unwrap_or(usize::MAX).min(shape.max_position_embeddings);
        Ok(Self { id, skipped: config.num_padding_at_beginning, width })
    }

    /// Returns where a text ends: at its first pad after the skipped ones, which may be a pad of the padding after the text.
    fn end(&self, text: &[i64]) -> usize {
        let begins = || text.iter().take_while(|id| **id == self.id).count();
        let skipped = self.skipped.unwrap_or_else(begins);
        let mut pads = (0..text.len()).filter(|&t| text[t] == self.id);
        let count = pads.clone().count();
        pads.nth(skipped).unwrap_or_else(|| (text.len() + skipped - count).min(self.width))
    }

    /// Returns the first token that differs; `None` if both texts are the same once they are padded.
    fn apart(&self, pair: &Pair) -> Option<usize> {
        let at = |text: &[i64], t: usize| text.get(t).copied().unwrap_or(self.id);
        (0..pair.chosen.len().max(pair.rejected.len())).find(|&t| at(&pair.chosen, t) != at(&pair.rejected, t))
    }

    /// Refuses pairs that end before their first different token: DeepSpeed-Chat's loss of such a pair is NaN.
    fn check(&self, pairs: &[Pair], path: &Path) -> Result<()> {
        for (i, pair) in pairs.iter().enumerate() {
            let ends = [self.end(&pair.chosen), self.end(&pair.rejected)];
            if ends[0] == 0 || ends[1] == 0 || self.apart(pair).is_some_and(|apart| apart >= ends[0].max(ends[1])) {
                let id = self.id;
                return Err(Error::invalid(
                    path,
                    format!(
                        "pair {} of those that are kept: with pair_loss = tokens the pad, token {id}, ends a text, here before the \
                         two part: num_padding_at_beginning says how many pads stand before that, and tokens_unpadded counts \
                         none",
                        i + 1
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// The tokens that the token losses compare: of the two texts of a pair, every token from the first that differs to the last
/// of the longer text.
///
/// With pads the shorter text is padded to the length of the longer one. Without pads its last score is repeated after its
/// end. For two equal texts the last token is compared, with a gradient of 0.
#[derive(Debug)]
struct Compared {
    /// Model inputs: all chosen sides and then all rejected ones, with their pads.
    texts: Vec<Vec<i64>>,
    /// Number of tokens of each text before its padding.
    shown: Vec<usize>,
    /// Positions of each text whose values are computed; the position of its score is among them.
    spans: Vec<Range<usize>>,
    /// Indices into the values: of the ends of both sides, and of the compared tokens.
    ends: Tensor,
    chosen: Tensor,
    rejected: Tensor,
    /// Weight of each compared token in its pair's mean.
    shares: Tensor,
    /// Pair of each compared token.
    pairs: Tensor,
}

impl Compared {
    fn of(pairs: &[&Pair], pads: Option<&Pads>, device: Device) -> Self {
        let mut texts = Vec::new();
        let mut spans = Vec::new();
        let mut last = Vec::new();
        let ranges: Vec<Range<usize>> = pairs.iter().map(|pair| Self::range(pair, pads)).collect();
        for (side, range) in sides(pairs).into_iter().zip(ranges.iter().cycle()) {
            let end = pads.map_or(side.len(), |pads| pads.end(side)).max(1);
            let read = if pads.is_some() { range.end } else { side.len() };
            spans.push(range.start.min(end - 1)..read);
            last.push(end - 1);
            let padding = pads.map_or(0, |_| read.saturating_sub(side.len()));
            texts.push([&side[..], &vec![pads.map_or(0, |pads| pads.id); padding]].concat());
        }
        let places: Vec<usize> = spans
            .iter()
            .scan(0, |read, span: &Range<usize>| {
                *read += span.len();
                Some(*read - span.len())
            })
            .collect();
        // The last value is repeated after the end.
        let place = |side: usize, t: usize| (places[side] + t.min(spans[side].end - 1) - spans[side].start) as i64;
        let ends: Vec<i64> = last.iter().enumerate().map(|(side, &t)| place(side, t)).collect();
        let mut compared = [Vec::new(), Vec::new()];
        let mut shares = Vec::new();
        let mut pair_numbers = Vec::new();
        for (i, range) in ranges.iter().enumerate() {
            for (indices, side) in compared.iter_mut().zip([i, pairs.len() + i]) {
                indices.extend(range.clone().map(|t| place(side, t)));
            }
            shares.extend(range.clone().map(|_| 1.0 / range.len() as f32));
            pair_numbers.extend(range.clone().map(|_| i as i64));
        }
        let [chosen, rejected] = compared;
        let to_device = |places: &[i64]| on_device(places, device);
        let shares = on_device(&shares, device);
        Self {
            shown: sides(pairs).into_iter().map(Vec::len).collect(),
            ends: to_device(&ends),
            chosen: to_device(&chosen),
            rejected: to_device(&rejected),
            pairs: to_device(&pair_numbers),
            texts,
            spans,
            shares,
        }
    }

    /// Returns the tokens of a pair that are compared: at least one.
    fn range(pair: &Pair, pads: Option<&Pads>) -> Range<usize> {
        let (apart, end) = match pads {
            Some(pads) => (pads.apart(pair), pads.end(&pair.chosen).max(pads.end(&pair.rejected)).max(1)),
            None => {
                let same = pair.chosen.iter().zip(&pair.rejected).take_while(|(a, b)| a == b).count();
                (Some(same), pair.chosen.len().max(pair.rejected.len()))
            }
        };
        apart.unwrap_or(end).min(end - 1)..end
    }

    /// Returns the number of tokens of each text that attention sees, if there is padding.
    fn shown(&self) -> Option<&[usize]> {
        let padded = self.texts.iter().zip(&self.shown).any(|(text, &shown)| text.len() > shown);
        padded.then_some(&self.shown)
    }

    /// Returns the model inputs.
    fn batch(&self) -> Batch<'_, Vec<i64>> {
        Batch::new(&self.texts, &self.spans).with_padding(self.shown())
    }

    /// Forward and backward pass of a `loss` of the values at the spans; accumulates gradients.
    fn learn(
        &self,
        model: &SequenceClassifier,
        dropout: Option<&DropoutRows>,
        loss: impl FnOnce(&Tensor) -> Tensor,
    ) -> Result<()> {
        model.values_backward(self.batch().with_dropout(dropout), loss)
    }

    /// Returns the scores at the ends, all chosen sides and then all rejected ones, from the `values` at the spans.
    fn ends(&self, values: &Tensor) -> Tensor {
        values.index_select(0, &self.ends)
    }

    /// Returns the loss of each pair; `[pairs]`.
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
    /// Loss, correct pairs, margin and score of micro-batches, `[4]` f32 each, which are not in the sums yet.
    #[serde(skip)]
    unread: Vec<Tensor>,
}

impl Totals {
    /// Adds the scores and losses of pairs.
    fn measure(
        &mut self,
        model: &SequenceClassifier,
        pairs: &[&Pair],
        pads: Option<&Pads>,
        config: &RewardConfig,
    ) -> Result<()> {
        let (scores, losses) = match config.pair_loss {
            PairLoss::Sequence => {
                let scores = model.scores(&sides(pairs))?;
                let losses = sequence_loss(&scores, pairs);
                (scores, losses)
            }
            PairLoss::Tokens | PairLoss::TokensUnpadded => {
                let compared = Compared::of(pairs, pads, model.device());
                let values = model.values(compared.batch())?;
                (compared.ends(&values), compared.loss(&values))
            }
        };
        let _ = self.add(&scores, &losses, config);
        Ok(())
    }

    /// Adds pairs with these scores, all chosen sides and then all rejected ones, and these losses. Returns the sum of the
    /// losses, with the term that centres the scores.
    fn add(&mut self, scores: &Tensor, losses: &Tensor, config: &RewardConfig) -> Tensor {
        let scores = scores.view([2, -1]);
        let chosen = scores.get(0);
        let rejected = scores.get(1);
        let margin = &chosen - &rejected;
        let mut loss = losses.sum(Kind::Float);
        if let Some(weight) = config.center_rewards_coefficient {
            loss += (&chosen + &rejected).square().sum(Kind::Float) * weight;
        }
        self.pairs += margin.numel() as f64;
        let sum = |x: &Tensor| x.detach().sum(Kind::Float);
        let sums = [loss.detach(), sum(&margin.gt(0.0)), sum(&margin), sum(&scores)];
        self.unread.push(Tensor::stack(&sums, 0));
        loss
    }

    /// Reads the sums that [`Totals::add`] has left on the device, at once: each read waits for all work before it.
    fn read(&mut self) {
        if self.unread.is_empty() {
            return;
        }
        let unread = std::mem::take(&mut self.unread);
        for sums in to_host(&Tensor::stack(&unread, 0)).chunks(4) {
            self.loss += sums[0];
            self.correct += sums[1];
            self.margin += sums[2];
            self.reward += sums[3] / 2.0;
        }
    }

    /// Adds mean loss, accuracy, margin and mean reward under these names.
    fn push_as(&self, metrics: &mut Metrics, names: [&'static str; 4]) {
        for (name, sum) in names.into_iter().zip([self.loss, self.correct, self.margin, self.reward]) {
            metrics.push(name, sum / self.pairs);
        }
    }
}

impl Sums for Totals {
    fn add_step(&mut self, grad_norm: f64) {
        self.grad_norm += grad_norm;
    }

    fn steps(&self, batch_size: usize) -> (f64, f64) {
        (self.pairs / batch_size as f64, self.grad_norm)
    }

    fn push(&self, metrics: &mut Metrics) {
        self.push_as(metrics, ["loss", "accuracy", "margin", "mean_reward"]);
    }

    fn watched(&self) -> Vec<String> {
        vec![format!("loss {:.3}", self.loss / self.pairs), format!("accuracy {:.2}", self.correct / self.pairs)]
    }

    fn numbers(&mut self) -> Vec<&mut f64> {
        self.read();
        let Self { pairs, loss, correct, margin, reward, grad_norm, unread: _ } = self;
        vec![pairs, loss, correct, margin, reward, grad_norm]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Padding token of the golden pairs.
    const PAD: i64 = 1;

    fn close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
        assert_eq!(found.size(), expected.size(), "{what}");
        let gap = (found - expected).abs().max().double_value(&[]);
        assert!(gap <= tolerance, "{what}: {found} is not {expected}: {gap:e}");
    }

    fn pair(chosen: &[i64], rejected: &[i64]) -> Pair {
        Pair { chosen: chosen.to_vec(), rejected: rejected.to_vec(), margin: None }
    }

    /// Losses and gradients of DeepSpeed-Chat's reward models on pairs of any first different token, any lengths, or
    /// equal ones (tests/golden/make_reward_pairs.py).
    #[test]
    fn a_loss_of_tokens_has_the_values_and_gradients_of_torch() {
        tch::set_num_threads(1);
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        let (models, heads) = (golden.join("models"), golden.join("value_heads"));
        for name in ["opt_dschat", "opt_proj_postln_dschat", "gpt2_dschat", "llama_untied_dschat"] {
            let golden = tensors(&heads.join(name).join("pairs.safetensors"));
            let rows = |name: &str| Vec::<Vec<i64>>::try_from(&golden[name]).unwrap();
            let texts = rows("input_ids").into_iter().zip(rows("attention_mask"));
            let texts: Vec<Vec<i64>> =
                texts.map(|(ids, mask)| ids[..mask.iter().sum::<i64>() as usize].to_vec()).collect();
            let (chosen, rejected) = texts.split_at(texts.len() / 2);
            let pairs: Vec<Pair> = chosen.iter().zip(rejected).map(|(a, b)| pair(a, b)).collect();
            let pairs: Vec<&Pair> = pairs.iter().collect();

            let options = ModelOptions::default();
            let dir = heads.join(name);
            let folder = tempfile::tempdir().unwrap();
            let dir = if dir.join("model.safetensors").is_file() {
                dir
            } else {
                // The weights of the base, and a head.
                with_head(&models.join(name.trim_end_matches("_dschat")), &dir, folder.path());
                folder.path().to_path_buf()
            };
            let mut model = SequenceClassifier::from_pretrained(&dir, None, options).unwrap();
            model.set_trainable(true);
            let (sides, compared) = (sides(&pairs), Compared::of(&pairs, None, Device::Cpu));
            let mut seen = None;
            let learn = |values: &Tensor| {
                let losses = compared.loss(values);
                seen = Some((compared.ends(values).detach(), losses.detach()));
                losses.mean(Kind::Float)
            };
            compared.learn(&model, None, learn).unwrap();
            let (ends, losses) = seen.unwrap();
            close(name, &ends, &golden["ends"], 2e-5);
            close(name, &losses, &golden["losses"], 2e-5);
            close(name, &losses.mean(Kind::Float), &golden["loss"], 2e-5);
            close(name, &ends, &tch::no_grad(|| model.scores(&sides)).unwrap(), 2e-5);
            let gradients: Vec<_> = model.params().iter().map(|param| (&param.name, param.tensor.grad())).collect();
            let head_gradient = &gradients.iter().find(|(name, _)| *name == "v_head.weight").unwrap().1;
            close(name, head_gradient, &golden["v_head.grad"], 2e-5);
            let trunk = gradients.iter().filter(|(name, grad)| *name != "v_head.weight" && grad.defined());
            let norms: Vec<Tensor> = trunk.map(|(_, grad)| grad.norm()).collect();
            let norm = Tensor::stack(&norms, 0).norm();
            let expected = &golden["trunk.grad_norm"];
            close(name, &(norm / expected), &expected.ones_like(), 1e-4);
            // DeepSpeed-Chat compares with the values at pads.
            for (i, checkpoints) in [false, true].into_iter().enumerate() {
                model.set_gradient_checkpointing(checkpoints);
                let pads = Pads { id: PAD, skipped: (i == 0).then_some(0), width: 12 };
                model.params().iter().for_each(|param| param.tensor.shallow_clone().zero_grad());
                let compared = Compared::of(&pairs, Some(&pads), Device::Cpu);
                let mut seen = None;
                let learn = |values: &Tensor| {
                    let losses = compared.loss(values);
                    seen = Some((compared.ends(values).detach(), losses.detach(), values.detach()));
                    losses.mean(Kind::Float)
                };
                compared.learn(&model, None, learn).unwrap();
                let (ends, losses, values) = seen.unwrap();
                close(name, &ends, &golden["ends"], 2e-5);
                close(name, &losses, &golden["padded_losses"], 2e-5);
                let head = model.params().iter().find(|param| param.name == "v_head.weight").unwrap();
                close(name, &head.tensor.grad(), &golden["padded_v_head.grad"], 2e-5);
                let trunk = model.params().iter().filter(|param| param.name != "v_head.weight");
                let norms: Vec<Tensor> =
                    trunk.map(|param| param.tensor.grad()).filter(Tensor::defined).map(|grad| grad.norm()).collect();
                let norm = Tensor::stack(&norms, 0).norm();
                let expected = &golden["padded_trunk.grad_norm"];
                close(name, &(norm / expected), &expected.ones_like(), 1e-4);
                let again = model.values(compared.batch());
                close(name, &tch::no_grad(|| again).unwrap(), &values, 2e-5);
            }
        }
    }

    /// The tensors of a safetensors file.
    fn tensors(path: &Path) -> HashMap<String, Tensor> {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let read = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
            let shape: Vec<i64> = view.shape().iter().map(|&n| n as i64).collect();
            let kind = if view.dtype() == safetensors::Dtype::I64 { Kind::Int64 } else { Kind::Float };
            (name, Tensor::from_data_size(view.data(), &shape, kind))
        };
        file.tensors().into_iter().map(read).collect()
    }

    /// Writes DeepSpeed-Chat's reward model to `to`: the weights of the base model in `base`, and `head/v_head.safetensors`.
    fn with_head(base: &Path, head: &Path, to: &Path) {
        std::fs::copy(base.join("config.json"), to.join("config.json")).unwrap();
        let bare =
            |name: &str| ["model.", "transformer."].iter().find_map(|front| name.strip_prefix(front)).map(String::from);
        let weights =
            tensors(&base.join("model.safetensors")).into_iter().filter(|(name, _)| !name.starts_with("lm_head"));
        let mut all: Vec<(String, Tensor)> = weights
            .map(|(name, tensor)| (format!("rwtransformer.{}", bare(&name).unwrap_or(name.clone())), tensor))
            .collect();
        let head = tensors(&head.join("v_head.safetensors")).into_values().next().unwrap();
        all.push(("v_head.weight".into(), head.view([1, -1])));
        rlhf_base::weights::save(to, &all, usize::MAX).unwrap();
    }

    #[test]
    #[ignore = "compares dschat/rm_{opt,llama,gpt2}, DeepSpeed-Chat's own reward models, of another folder of reference values; set RLHF_GOLDEN=FOLDER"]
    fn a_loss_of_tokens_has_deepspeed_chats_numbers_on_its_own_models() {
        let message = "RLHF_GOLDEN: expected a folder of reference values, found nothing set";
        let folder = std::env::var_os("RLHF_GOLDEN").expect(message);
        for (name, at_beginning) in [("rm_opt", 1), ("rm_llama", 0), ("rm_gpt2", 0)] {
            let dir = Path::new(&folder).join("dschat").join(name);
            let golden = tensors(&dir.join("golden.safetensors"));
            let folder = tempfile::tempdir().unwrap();
            with_head(&dir, &dir, folder.path());
            let mut model = SequenceClassifier::from_pretrained(folder.path(), None, ModelOptions::default()).unwrap();
            model.set_trainable(true);
            let rows = |name: &str| Vec::<Vec<i64>>::try_from(golden[name].to_kind(Kind::Int64)).unwrap();
            let (ids, masks) = (rows("pair.input_ids"), rows("pair.attention_mask"));
            let pad =
                ids.iter().flatten().zip(masks.iter().flatten()).find_map(|(&id, &mask)| (mask == 0).then_some(id));
            let text = |(ids, mask): (&Vec<i64>, &Vec<i64>)| ids[..mask.iter().sum::<i64>() as usize].to_vec();
            let texts: Vec<Vec<i64>> = ids.iter().zip(&masks).map(text).collect();
            let (chosen, rejected) = texts.split_at(texts.len() / 2);
            let pairs: Vec<Pair> = chosen.iter().zip(rejected).map(|(a, b)| pair(a, b)).collect();
            let pairs: Vec<&Pair> = pairs.iter().collect();
            let pads = Pads { id: pad.unwrap_or(-1), skipped: Some(at_beginning), width: ids[0].len() };
            let compared = Compared::of(&pairs, Some(&pads), Device::Cpu);
            let mut seen = None;
            let learn = |values: &Tensor| {
                let loss = compared.loss(values).mean(Kind::Float);
                seen = Some((compared.ends(values).detach(), loss.detach()));
                loss
            };
            compared.learn(&model, None, learn).unwrap();
            let (ends, loss) = seen.unwrap();
            close(name, &loss, &golden["pair.loss"].view_as(&loss), 2e-5);
            let ends = ends.view([2, -1]);
            close(name, &ends.get(0), &golden["pair.chosen_mean_scores"], 2e-5);
            close(name, &ends.get(1), &golden["pair.rejected_mean_scores"], 2e-5);
            let head = model.params().iter().find(|param| param.name == "v_head.weight").unwrap();
            close(name, &head.tensor.grad(), &golden["pair.v_head_grad"].view_as(&head.tensor), 2e-5);
        }
    }

    #[test]
    fn the_first_pad_that_is_not_skipped_ends_a_text_and_pads_fill_the_shorter_one() {
        let pads = |skipped| Pads { id: PAD, skipped, width: 8 };
        let opt = [PAD, 5, 6, PAD];
        assert_eq!([Some(0), Some(1), Some(2), Some(3), Some(9), None].map(|n| pads(n).end(&opt)), [0, 3, 4, 5, 8, 3]);
        assert_eq!([Some(0), Some(1), None].map(|n| pads(n).end(&[5, 6, 7])), [3, 4, 3]);
        let (longer, equal) = (pair(&[PAD, 4, 5, 6, 7, PAD], &[PAD, 4, 8]), pair(&[PAD, 7, PAD], &[PAD, 7, PAD]));
        // The eos of the one text is the padding of the other: they are the same.
        let ended = pair(&[PAD, 3, PAD], &[PAD, 3]);
        for skipped in [None, Some(1)] {
            let pads = pads(skipped);
            pads.check(&[pair(&longer.chosen, &longer.rejected)], Path::new("pairs")).unwrap();
            let compared = Compared::of(&[&longer, &equal, &ended], Some(&pads), Device::Cpu);
            assert_eq!(compared.spans, [2..5, 1..2, 1..2, 2..5, 1..2, 1..2]);
            assert_eq!(
                (&compared.texts[3], compared.shown()),
                (&vec![PAD, 4, 8, PAD, PAD], Some(&[6, 3, 3, 3, 3, 2][..]))
            );
            assert_eq!(Vec::<i64>::try_from(&compared.ends).unwrap(), [2, 3, 4, 5, 8, 9]);
            assert_eq!(Vec::<i64>::try_from(&compared.rejected).unwrap(), [5, 6, 7, 8, 9]);
        }
        // A pad in the middle ends both before their first different token.
        let early = pair(&[3, PAD, 4], &[3, PAD, 5]);
        for (skipped, refused) in [(None, true), (Some(0), true), (Some(1), false)] {
            assert_eq!(
                pads(skipped).check(&[pair(&early.chosen, &early.rejected)], Path::new("pairs")).is_err(),
                refused
            );
        }
        let error = pads(Some(0)).check(&[longer], Path::new("pairs")).unwrap_err().to_string();
        assert!(
            error.contains("pair 1 of those that are kept: with pair_loss = tokens the pad, token 1, ends"),
            "{error}"
        );
    }

    #[test]
    fn tokens_are_compared_from_the_first_that_differs_and_the_shorter_text_repeats_its_last_score() {
        let (longer, equal, prefix) = (pair(&[1, 2, 3, 4], &[1, 2, 5]), pair(&[7, 8], &[7, 8]), pair(&[1], &[1, 2]));
        let pairs = [&longer, &equal, &prefix];
        let compared = Compared::of(&pairs, None, Device::Cpu);
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
        totals.read();
        assert_eq!((totals.pairs, totals.correct, totals.margin), (3.0, 1.0, 3.0 + 0.0 - 1.0));
    }

    #[test]
    fn a_margin_is_subtracted_in_the_loss_and_its_gradient_and_nowhere_else() {
        let with = |margin| Pair { margin, ..pair(&[1, 2], &[1, 3]) };
        let pairs = [with(Some(0.5)), with(None), with(Some(-1.0))];
        let pairs: Vec<&Pair> = pairs.iter().collect();
        // Differences 1.5, 1 and 0; less the margins 1, 1 and 1.
        let scores = Tensor::from_slice(&[2.0f32, 0.0, 3.0, 0.5, -1.0, 3.0]).set_requires_grad(true);
        let losses = sequence_loss(&scores, &pairs);
        let cost = (1.0 + (-1.0f64).exp()).ln(); // -log sigmoid(1) = 0.313262
        close("losses", &losses.detach(), &Tensor::from_slice(&[cost as f32; 3]), 1e-6);
        losses.sum(Kind::Float).backward();
        let slope = (1.0 / (1.0 + 1.0f64.exp())) as f32; // sigmoid(-1) = 0.268941
        let expected = Tensor::from_slice(&[-slope, -slope, -slope, slope, slope, slope]);
        close("gradient", &scores.grad(), &expected, 1e-6);
        let mut totals = Totals::default();
        let _ = totals.add(&scores.detach(), &losses.detach(), &RewardConfig::new("m", "d", "o"));
        totals.read();
        assert_eq!((totals.correct, totals.margin), (2.0, 2.5), "of the scores as they are");
        assert!((totals.loss - 3.0 * cost).abs() < 1e-6);
        // Without margins the loss is the same bit for bit.
        let plain = [with(None), with(None), with(None)];
        let losses = sequence_loss(&scores, &plain.iter().collect::<Vec<_>>());
        assert!(losses.equal(&-(scores.narrow(0, 0, 3) - scores.narrow(0, 3, 3)).log_sigmoid()));
    }

    #[test]
    fn a_loss_of_tokens_refuses_margins() {
        let pairs = [pair(&[1], &[2]), Pair { margin: Some(2.0), ..pair(&[1], &[2]) }];
        check_margins(&pairs, PairLoss::Sequence, Path::new("pairs.jsonl")).unwrap();
        check_margins(&pairs[..1], PairLoss::Tokens, Path::new("pairs.jsonl")).unwrap();
        for (loss, name) in [(PairLoss::Tokens, "tokens"), (PairLoss::TokensUnpadded, "tokens_unpadded")] {
            let error = check_margins(&pairs, loss, Path::new("pairs.jsonl")).unwrap_err().to_string();
            let words = format!("pairs.jsonl: a pair has margin = 2, and pair_loss = {name} compares single tokens");
            assert!(error.starts_with(&words) && error.contains("margin=none"), "{error}");
        }
    }
}
