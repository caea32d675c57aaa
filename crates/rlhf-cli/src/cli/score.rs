//! `rlhf score`: rows in, the same rows with a reward model's or other rewards' scores out; and `rlhf reward --eval_only`.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use rlhf::data::{PromptResponse, RowReader};
use rlhf::dist::World;
use rlhf::hub;
use rlhf::model::{ModelOptions, SequenceClassifier};
use rlhf::reward::{RewardInput, ScoreUse, Warn};
use rlhf::run::{Runtime, announce};
use rlhf::safe_text::one_line;
use rlhf::settings::{RewardConfig, ScoreConfig};
use rlhf::terminal::{Colour, Stream};
use rlhf::tokenizer::Tokenizer;
use rlhf::{Error, Result};
use serde_json::{Map, Value, json};

use super::rows::{Fields, annotate, batches, check_finite, numbers, numbers_of_rows, open_rows};

/// Writes the rows with their scores.
pub(crate) fn score(config: &ScoreConfig, world: &World) -> Result<()> {
    config.check()?;
    let options = config.rows.compute.options()?;
    let rows = open_rows(&config.rows, true, world)?;
    match &config.model_name_or_path {
        Some(name) if !config.scores_responses() => score_by_model((config, name), rows, options, world),
        _ => score_by_rewards(config, rows, options, world),
    }
}

/// Writes the rows with the scores of the reward model `name` alone, which scores token ids or whole texts.
fn score_by_model(
    (config, name): (&ScoreConfig, &Path),
    rows: RowReader,
    options: ModelOptions,
    world: &World,
) -> Result<()> {
    let load = || {
        let dir = &hub::model_dir(name, Some(&config.model_revision))?;
        let mut tokenizer = Tokenizer::of_text_or_ids(dir)?;
        tokenizer.set_chat_variables(config.rows.split.chat_template.variables());
        let mut model = SequenceClassifier::from_pretrained(dir, None, options)?;
        model.choose_label(config.reward_label.as_deref(), dir)?;
        tokenizer.check_fits(model.config(), dir)?;
        Ok((tokenizer.limited_to(model.config().max_position_embeddings), model))
    };
    let (tokenizer, model) = world.agree(load())?;
    let context = model.config().max_position_embeddings;
    let vocab = model.config().vocab_size;
    let end = model.config().causal;
    let mut preferences = Preferences::default();
    annotate(&config.rows, rows, &tokenizer, world, |part| {
        let Some(part) = part else { return Ok(Vec::new()) };
        let row_texts = part.scored_texts(&tokenizer, end, vocab, context)?;
        let rows: Vec<usize> = (0..).zip(&row_texts).flat_map(|(row, texts)| texts.iter().map(move |_| row)).collect();
        let counts: Vec<usize> = row_texts.iter().map(Vec::len).collect();
        let texts = row_texts.concat();
        let batches = batches((0..texts.len()).collect(), config.rows.batch_size, |i| texts[i].len());
        let scores = numbers_of_rows(
            texts.len(),
            &batches,
            |_| 1,
            world,
            |batch| {
                let sequences: Vec<&[i64]> = batch.iter().map(|&i| texts[i].as_slice()).collect();
                numbers(&tch::no_grad(|| model.scores(&sequences))?)
            },
        )?;
        batches.iter().flatten().try_for_each(|&i| check_finite(part, rows[i], &scores[i]))?;
        let mut scores = scores.into_iter().flatten();
        let fields = counts.into_iter().map(|count| {
            let scores: Vec<f32> = scores.by_ref().take(count).collect();
            match scores.as_slice() {
                [chosen, rejected] => preferences.fields(Some(f64::from(*chosen)), Some(f64::from(*rejected))),
                scores => vec![("score", json!(scores.first()))],
            }
        });
        Ok(fields.collect())
    })?;
    preferences.print(world);
    Ok(())
}

/// Accuracy and margin of preference pairs.
#[derive(Default)]
struct Preferences {
    pairs: usize,
    /// Pairs whose chosen response scores higher.
    correct: usize,
    /// Sum of the margins.
    margin: f64,
    /// Pairs with a response that has no score, which are not among `pairs`.
    unscored: usize,
}

impl Preferences {
    /// Counts a pair with these scores, and returns the fields of its row; a response may have none.
    fn fields(&mut self, chosen: Option<f64>, rejected: Option<f64>) -> Fields {
        let margin = chosen.zip(rejected).map(|(chosen, rejected)| chosen - rejected);
        match margin {
            Some(margin) => {
                self.pairs += 1;
                self.correct += usize::from(margin > 0.0);
                self.margin += margin;
            }
            None => self.unscored += 1,
        }
        vec![("score_chosen", json!(chosen)), ("score_rejected", json!(rejected)), ("score_margin", json!(margin))]
    }

    /// Prints accuracy and mean margin on standard error, if there are pairs.
    fn print(&self, world: &World) {
        if self.pairs > 0 && world.is_main() {
            let pairs = self.pairs as f64;
            let (accuracy, margin) = (self.correct as f64 / pairs, self.margin / pairs);
            let _ = writeln!(io::stderr(), "accuracy {accuracy:.4}, mean margin {margin:.4} over {} pairs", self.pairs);
        }
        if self.unscored > 0 && world.is_main() {
            let _ =
                writeln!(io::stderr(), "{} pairs with a response that no reward scored are left out", self.unscored);
        }
    }
}

/// Evaluates a reward model on pairs: one JSON object on standard output, warnings on standard error.
pub(crate) fn evaluate(config: &RewardConfig, runtime: &Runtime) -> Result<()> {
    let evaluation = rlhf::train::reward_model::evaluate(config, runtime)?;
    if !runtime.world.is_main() {
        return Ok(());
    }
    for warning in &evaluation.warnings {
        let _ = writeln!(io::stderr(), "warning: {}", one_line(warning));
    }
    let mut row =
        Map::from_iter([("dataset".into(), json!(evaluation.dataset)), ("pairs".into(), json!(evaluation.pairs))]);
    row.extend(evaluation.metrics.iter().map(|(name, value)| (name.to_string(), json!(value))));
    writeln!(io::stdout(), "{}", Value::Object(row)).map_err(Error::io("write to", "standard output"))
}

/// Writes the rows, which have prompts and responses, with the sum of all rewards and each reward's score.
fn score_by_rewards(config: &ScoreConfig, rows: RowReader, options: ModelOptions, world: &World) -> Result<()> {
    let load = || {
        let tokenizer = match (&config.tokenizer_name, &config.model_name_or_path) {
            (Some(name), _) => hub::tokenizer_dir(name, None)?,
            (None, Some(name)) => hub::model_dir(name, Some(&config.model_revision))?,
            (None, None) => return config.check().map(|()| unreachable!("`check` requires one of them")),
        };
        let mut tokenizer = Tokenizer::from_pretrained(&tokenizer)?;
        tokenizer.set_chat_variables(config.rows.split.chat_template.variables());
        let rewards = config.load_rewards(&tokenizer, options)?;
        Ok((tokenizer, rewards))
    };
    let (tokenizer, mut rewards) = world.agree(load())?;
    rewards.set_world(world);
    if world.is_main() {
        let warn: Warn = Arc::new(|message: &str| {
            announce(&Stream::Err.labelled("warning", Colour::Yellow, &one_line(message)));
        });
        rewards.warn_by(&warn);
    }
    let print: Warn = Arc::new(|line: &str| announce(&one_line(line)));
    rewards.print_by(&print);
    let mut preferences = Preferences::default();
    annotate(&config.rows, rows, &tokenizer, world, |part| {
        // A score too many in the output of a program is found at its end, before a file gets its name.
        let Some(part) = part else { return rewards.finish().map(|()| Vec::new()) };
        let row_responses = part.scored_responses(&tokenizer)?;
        let counts: Vec<usize> = row_responses.iter().map(Vec::len).collect();
        let responses: Vec<PromptResponse> = row_responses.into_iter().flatten().collect();
        let inputs = responses.iter().map(|response| RewardInput {
            prompt: &response.prompt.text,
            response: &response.response,
            prompt_ids: &response.prompt.tokens,
            response_ids: &response.response_ids,
            finish: response.finish,
            row: &response.prompt.row,
            episode: None,
        });
        let scored = rewards.score(&inputs.collect::<Vec<_>>(), ScoreUse::Training)?;
        let (totals, unscored) = (scored.totals(), scored.unscored());
        let components = |at: usize| {
            let components = scored.components.iter().map(|reward| (reward.name.clone(), json!(reward.scores[at])));
            Value::Object(components.collect())
        };
        let mut at = 0;
        let fields = counts.into_iter().map(|count| {
            let first = at;
            at += count;
            let score = |at: usize| (!unscored[at]).then_some(totals[at]);
            if count == 1 {
                return vec![("score", json!(score(first))), ("components", components(first))];
            }
            let mut fields = preferences.fields(score(first), score(first + 1));
            let both = json!({"chosen": components(first), "rejected": components(first + 1)});
            fields.push(("components", both));
            fields
        });
        Ok(fields.collect())
    })?;
    preferences.print(world);
    Ok(())
}
