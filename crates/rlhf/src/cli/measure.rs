//! `rlhf logprobs` and `rlhf score`: rows in, the same rows with a model's numbers out.

use std::io::{self, Write};

use rlhf::data::{Dataset, PromptResponse, RowReader};
use rlhf::hub;
use rlhf::model::{CausalLm, ModelOptions, SequenceClassifier};
use rlhf::reward::RewardInput;
use rlhf::safe_text::one_line;
use rlhf::settings::{LogprobsConfig, RewardConfig, RowsConfig, ScoreConfig};
use rlhf::tokenizer::Tokenizer;
use rlhf::{Error, Result};
use serde_json::{Map, Value, json};
use tch::Tensor;

use crate::cli::output::{Output, is_typed, model_options, open_rows};

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
        let asked: Vec<usize> = (0..texts.len()).filter(|&i| texts[i].prompt_len < texts[i].tokens.len()).collect();
        for batch in batches(asked, config.rows.batch_size, |i| texts[i].tokens.len()) {
            let sequences: Vec<&[i64]> = batch.iter().map(|&i| texts[i].tokens.as_slice()).collect();
            let spans: Vec<_> = batch.iter().map(|&i| texts[i].prompt_len..texts[i].tokens.len()).collect();
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
                ("completion_ids", json!(text.tokens[text.prompt_len..])),
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
    let (end, mut preferences) = (model.config().causal, Preferences::default());
    annotate(&config.rows, rows, |part| {
        let of_rows = part.scored_texts(&tokenizer, end, vocab, context)?;
        let rows: Vec<usize> = (0..).zip(&of_rows).flat_map(|(row, texts)| texts.iter().map(move |_| row)).collect();
        let counts: Vec<usize> = of_rows.iter().map(Vec::len).collect();
        let texts = of_rows.concat();
        let mut scores = vec![0.0; texts.len()];
        for batch in batches((0..texts.len()).collect(), config.rows.batch_size, |i| texts[i].len()) {
            let sequences: Vec<&[i64]> = batch.iter().map(|&i| texts[i].as_slice()).collect();
            let found = numbers(&tch::no_grad(|| model.scores(&sequences))?)?;
            for (&i, score) in batch.iter().zip(found) {
                check_finite(part, rows[i], &[score])?;
                scores[i] = score;
            }
        }
        let mut scores = scores.into_iter();
        let fields = counts.into_iter().map(|count| {
            let scores: Vec<f32> = scores.by_ref().take(count).collect();
            match scores.as_slice() {
                [chosen, rejected] => preferences.fields(f64::from(*chosen), f64::from(*rejected)),
                scores => vec![("score", json!(scores.first()))],
            }
        });
        Ok(fields.collect())
    })?;
    preferences.tell();
    Ok(())
}

/// The scores of preference pairs, counted.
#[derive(Default)]
struct Preferences {
    pairs: usize,
    correct: usize,
    margin: f64,
}

impl Preferences {
    /// The fields of a pair with these scores, which is counted.
    fn fields(&mut self, chosen: f64, rejected: f64) -> Fields {
        let margin = chosen - rejected;
        self.pairs += 1;
        self.correct += usize::from(margin > 0.0);
        self.margin += margin;
        vec![("score_chosen", json!(chosen)), ("score_rejected", json!(rejected)), ("score_margin", json!(margin))]
    }

    /// Says on standard error how often the chosen side of all pairs scores higher, and by how much, if there are pairs.
    fn tell(&self) {
        if self.pairs > 0 {
            let pairs = self.pairs as f64;
            let (accuracy, margin) = (self.correct as f64 / pairs, self.margin / pairs);
            let _ = writeln!(io::stderr(), "accuracy {accuracy:.4}, mean margin {margin:.4} over {} pairs", self.pairs);
        }
    }
}

/// Measures a reward model on pairs: one JSON object on standard output, warnings on standard error.
pub(crate) fn evaluate(config: &RewardConfig) -> Result<()> {
    let found = rlhf::train::reward_model::evaluate(config)?;
    for warning in &found.warnings {
        let _ = writeln!(io::stderr(), "warning: {}", one_line(warning));
    }
    let mut row = Map::from_iter([("dataset".into(), json!(found.dataset)), ("pairs".into(), json!(found.pairs))]);
    row.extend(found.metrics.iter().map(|(name, value)| (name.to_string(), json!(value))));
    writeln!(io::stdout(), "{}", Value::Object(row)).map_err(Error::io("write to", "standard output"))
}

/// Writes the rows, prompts with answers, with what the rewards say of them.
fn score_answers(config: &ScoreConfig, rows: RowReader, options: ModelOptions) -> Result<()> {
    let tokenizer = match (&config.tokenizer_name, &config.model_name_or_path) {
        (Some(name), _) => hub::tokenizer_dir(name, None)?,
        (None, Some(name)) => hub::model_dir(name, Some(&config.model_revision))?,
        (None, None) => return config.check(),
    };
    let tokenizer = Tokenizer::from_pretrained(&tokenizer)?;
    let mut rewards = config.load_rewards(&tokenizer, options)?;
    let mut preferences = Preferences::default();
    annotate(&config.rows, rows, |part| {
        let of_rows = part.scored_responses(&tokenizer)?;
        let counts: Vec<usize> = of_rows.iter().map(Vec::len).collect();
        let answers: Vec<PromptResponse> = of_rows.into_iter().flatten().collect();
        let inputs = answers.iter().map(|answer| RewardInput {
            prompt: &answer.prompt.text,
            response: &answer.response,
            prompt_ids: &answer.prompt.tokens,
            response_ids: &answer.response_ids,
            finish: answer.finish,
            row: &answer.prompt.row,
        });
        let scored = rewards.score(&inputs.collect::<Vec<_>>(), true)?;
        let totals = scored.totals();
        let components = |at: usize| {
            let components = scored.components.iter().map(|one| (one.name.clone(), json!(one.scores[at])));
            Value::Object(components.collect())
        };
        let mut at = 0;
        let fields = counts.into_iter().map(|count| {
            let first = at;
            at += count;
            if count == 1 {
                return vec![("score", json!(totals[first])), ("components", components(first))];
            }
            let mut fields = preferences.fields(totals[first], totals[first + 1]);
            let both = json!({"chosen": components(first), "rejected": components(first + 1)});
            fields.push(("components", both));
            fields
        });
        Ok(fields.collect())
    })?;
    preferences.tell();
    Ok(())
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
