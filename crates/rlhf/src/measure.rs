//! `rlhf logprobs` and `rlhf score`: rows in, the same rows with a model's numbers out.

use rlhf::config::{LogprobsConfig, RowsConfig, ScoreConfig};
use rlhf::data::{Dataset, RowReader};
use rlhf::hub;
use rlhf::model::{CausalLm, ModelOptions, SequenceClassifier};
use rlhf::reward::{RewardInput, Rewards};
use rlhf::tokenizer::Tokenizer;
use rlhf::{Error, Result};
use serde_json::{Map, Value, json};
use tch::Tensor;

use crate::output::{Output, is_typed, model_options, open_rows};

/// So many batches are read at once and sorted by length; with a batch size of 1 there is nothing to sort.
const BATCHES_AT_ONCE: usize = 8;

/// Writes the rows with the log-probabilities of their completions.
pub(crate) fn logprobs(config: &LogprobsConfig) -> Result<()> {
    config.check()?;
    let options = model_options(&config.rows)?;
    let rows = open_rows(&config.rows, true)?;
    let dir = &hub::model_dir(&config.model_name_or_path, Some(&config.model_revision))?;
    let tokenizer = Tokenizer::of_text_or_ids(dir)?;
    let model = CausalLm::from_pretrained(dir, options)?;
    tokenizer.check_fits(model.config(), dir)?;
    let (context, vocab) = (model.config().max_position_embeddings, model.config().vocab_size);
    annotate(&config.rows, rows, |part| {
        let texts = part.completions(&tokenizer, vocab, context)?;
        let mut logprobs = vec![Vec::new(); texts.len()];
        let asked: Vec<usize> = (0..texts.len()).filter(|&i| texts[i].border < texts[i].tokens.len()).collect();
        for batch in batches(asked, config.rows.batch_size, |i| texts[i].tokens.len()) {
            let sequences: Vec<&[i64]> = batch.iter().map(|&i| texts[i].tokens.as_slice()).collect();
            let spans: Vec<_> = batch.iter().map(|&i| texts[i].border..texts[i].tokens.len()).collect();
            let found = tch::no_grad(|| model.token_logprobs(&sequences, &spans, config.temperature, false))?;
            let mut found = numbers(&found.logprobs)?.into_iter();
            for (&i, span) in batch.iter().zip(&spans) {
                logprobs[i] = found.by_ref().take(span.len()).collect();
                check_finite(part, i, &logprobs[i])?;
            }
        }
        let fields = texts.iter().zip(logprobs).map(|(text, logprobs)| {
            let sum = logprobs.iter().fold(0.0, |sum, &logprob| sum + f64::from(logprob)); // `sum` of none is -0
            vec![
                ("completion_ids", json!(text.tokens[text.border..])),
                ("logprobs", json!(logprobs)),
                ("sum_logprobs", json!(sum)),
            ]
        });
        Ok(fields.collect())
    })
}

/// Writes the rows with their scores.
pub(crate) fn score(config: &ScoreConfig) -> Result<()> {
    config.check()?;
    let options = model_options(&config.rows)?;
    let rows = open_rows(&config.rows, true)?;
    let name = match &config.model_name_or_path {
        Some(name) if !config.scores_answers() => name,
        _ => return score_answers(config, rows, options),
    };
    let dir = &hub::model_dir(name, Some(&config.model_revision))?;
    let tokenizer = Tokenizer::of_text_or_ids(dir)?;
    let mut model = SequenceClassifier::from_pretrained(dir, None, options)?;
    model.choose_label(config.reward_label.as_deref(), dir)?;
    tokenizer.check_fits(model.config(), dir)?;
    let (context, vocab) = (model.config().max_position_embeddings, model.config().vocab_size);
    annotate(&config.rows, rows, |part| {
        let texts = part.texts(&tokenizer, vocab, context)?;
        let mut scores = vec![0.0; texts.len()];
        for batch in batches((0..texts.len()).collect(), config.rows.batch_size, |i| texts[i].len()) {
            let sequences: Vec<&[i64]> = batch.iter().map(|&i| texts[i].as_slice()).collect();
            let found = numbers(&tch::no_grad(|| model.scores(&sequences))?)?;
            for (&i, score) in batch.iter().zip(found) {
                check_finite(part, i, &[score])?;
                scores[i] = score;
            }
        }
        Ok(scores.into_iter().map(|score| vec![("score", json!(score))]).collect())
    })
}

/// Writes the rows, prompts with answers, with what the rewards say of them.
fn score_answers(config: &ScoreConfig, rows: RowReader, options: ModelOptions) -> Result<()> {
    let tokenizer = match (&config.tokenizer_name, &config.model_name_or_path) {
        (Some(name), _) => hub::tokenizer_dir(name, None)?,
        (None, Some(name)) => hub::model_dir(name, Some(&config.model_revision))?,
        (None, None) => return config.check(),
    };
    let tokenizer = Tokenizer::from_pretrained(&tokenizer)?;
    let mut rewards = Rewards::of_score(config, &tokenizer, options)?;
    annotate(&config.rows, rows, |part| {
        let answers = part.answers(&tokenizer)?;
        let inputs = answers.iter().map(|answer| RewardInput {
            prompt: &answer.prompt.text,
            response: &answer.response,
            prompt_ids: &answer.prompt.tokens,
            response_ids: &answer.response_ids,
            finish: answer.finish,
            row: &answer.prompt.row,
        });
        let scored = rewards.score(&inputs.collect::<Vec<_>>(), true)?;
        let fields = scored.totals().into_iter().enumerate().map(|(row, total)| {
            let components = scored.components.iter().map(|one| (one.name.clone(), json!(one.scores[row])));
            vec![("score", json!(total)), ("components", Value::Object(components.collect()))]
        });
        Ok(fields.collect())
    })
}

/// New fields of a row.
type Fields = Vec<(&'static str, Value)>;

/// Reads rows, a part at a time, and writes each, in order, with what `measure` gives for it.
fn annotate(
    config: &RowsConfig,
    mut rows: RowReader,
    mut measure: impl FnMut(&Dataset) -> Result<Vec<Fields>>,
) -> Result<()> {
    let at_once =
        if config.batch_size == 1 || is_typed(config) { 1 } else { config.batch_size.saturating_mul(BATCHES_AT_ONCE) };
    let mut out = None;
    while let Some(part) = rows.next(at_once)? {
        let measured = measure(&part)?;
        let out = match &mut out {
            Some(out) => out,
            none => none.insert(Output::open(config)?),
        };
        for (row, fields) in part.rows().zip(measured) {
            let mut row: Map<String, Value> = row.as_object().cloned().unwrap_or_default();
            row.extend(fields.into_iter().map(|(name, value)| (name.to_string(), value)));
            out.write(Value::Object(row))?;
        }
        out.flush()?;
    }
    match out {
        Some(out) => out.finish(),
        None => Err(Error::invalid(rows.path(), "expected at least one row, found none")),
    }
}

/// The rows `indices` in batches of like length.
fn batches(mut indices: Vec<usize>, batch_size: usize, len: impl Fn(usize) -> usize) -> Vec<Vec<usize>> {
    indices.sort_by_key(|&i| len(i));
    indices.chunks(batch_size).map(<[usize]>::to_vec).collect()
}

fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(Vec::try_from(tensor)?)
}

fn check_finite(part: &Dataset, row: usize, numbers: &[f32]) -> Result<()> {
    if numbers.iter().all(|number| number.is_finite()) {
        return Ok(());
    }
    Err(part.error(row, "the model's numbers are not finite: its weights are damaged, or training diverged"))
}
