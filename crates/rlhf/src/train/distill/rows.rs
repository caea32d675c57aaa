//! The rows of a distillation run: prompts, with responses where a dataset has them.

use crate::data::{Dataset, Demonstration, DemonstrationOptions, LongPrompts, PromptLimit};
use crate::settings::DistillConfig;
use rlhf_base::{Error, Result};
use rlhf_lm::generate::{FinishReason, Response};
use rlhf_lm::model::Batch;
use rlhf_lm::tokenizer::Tokenizer;
use std::ops::Range;
use std::path::Path;
use tch::{Device, Tensor};
use tch_ext::on_device;

/// A prompt with a response; the prompt alone where the responses of the dataset are not read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DistillRow {
    /// Token ids of prompt and response.
    pub(crate) tokens: Vec<i64>,
    /// Number of tokens of the prompt.
    pub(super) prompt_len: usize,
    /// Tokens of the response that are not in the loss.
    pub(super) masked: Vec<Range<usize>>,
}

impl DistillRow {
    /// The row of a sampled response.
    pub(super) fn sampled(prompt: &[i64], response: &Response) -> Self {
        Self { tokens: [prompt, &response.tokens].concat(), prompt_len: prompt.len(), masked: Vec::new() }
    }

    /// The prompt's token ids.
    pub(crate) fn prompt(&self) -> &[i64] {
        &self.tokens[..self.prompt_len]
    }

    /// The tokens of the response; without the first token of a text, which nothing predicts.
    fn span(&self) -> Range<usize> {
        self.prompt_len.max(1).min(self.tokens.len())..self.tokens.len()
    }

    /// Number of tokens with an output.
    pub(crate) fn outputs(&self) -> usize {
        self.span().len()
    }

    /// Number of tokens in the loss.
    pub(super) fn loss_tokens(&self) -> usize {
        self.span().len() - self.masked.iter().map(Range::len).sum::<usize>()
    }

    /// Removes tokens at the start of a row that is longer than `most`.
    fn cut(&mut self, most: usize) -> bool {
        let above = self.tokens.len().saturating_sub(most);
        self.tokens.drain(..above);
        self.prompt_len = self.prompt_len.saturating_sub(above);
        let first = self.prompt_len.max(1);
        let moved = |at: usize| at.saturating_sub(above).max(first);
        self.masked.iter_mut().for_each(|range| *range = moved(range.start)..moved(range.end));
        self.masked.retain(|range| !range.is_empty());
        above > 0
    }
}

/// Ends a sampled response before the first id that is not below `vocab`: the other model does not have it.
pub(super) fn end_before_unknown(response: &mut Response, vocab: i64) {
    if let Some(first) = response.tokens.iter().position(|id| *id >= vocab) {
        response.tokens.truncate(first);
        response.logprobs.truncate(first);
        response.finish = FinishReason::Stop;
    }
}

/// Limits of the rows.
pub(super) struct Limits {
    /// Ids of rows are below this: both models have them.
    pub(super) vocab: i64,
    /// The limit of prompts to which responses are sampled; `None` where no responses are sampled.
    pub(super) prompt: Option<PromptLimit>,
    /// Most tokens of a prompt with the response of its row.
    pub(super) max_length: usize,
}

/// Reads the rows of a dataset. Returns them with warnings.
///
/// # Errors
/// If a row is malformed, or has no prompt where responses are sampled; if none is left.
pub(super) fn read_rows(
    dataset: Dataset,
    config: &DistillConfig,
    tokenizer: &Tokenizer,
    limits: &Limits,
) -> Result<(Vec<DistillRow>, Vec<String>)> {
    let dataset = dataset.with_divided_conversations(config.reads_responses())?;
    match limits.prompt.filter(|_| !config.reads_responses()) {
        Some(limit) => {
            let dataset = dataset.with_labelled_prompts(limits.vocab)?;
            let (prompts, note) = dataset.prompts_within(tokenizer, limits.vocab, limit)?;
            let row = |tokens: Vec<i64>| DistillRow { prompt_len: tokens.len(), tokens, masked: Vec::new() };
            Ok((prompts.into_iter().map(|prompt| row(prompt.tokens)).collect(), note.into_iter().collect()))
        }
        None => read_demonstrations(&dataset, config, tokenizer, limits),
    }
}

/// [`read_rows`] for rows whose responses are read too.
fn read_demonstrations(
    dataset: &Dataset,
    config: &DistillConfig,
    tokenizer: &Tokenizer,
    limits: &Limits,
) -> Result<(Vec<DistillRow>, Vec<String>)> {
    let other_template = "rlhf sft --chat_template_path saves a model with another template";
    let options = DemonstrationOptions { vocab: limits.vocab, ..DemonstrationOptions::default() };
    let (demonstrations, note) = dataset.demonstrations_noted(tokenizer, &options, other_template)?;
    let all = demonstrations.len();
    let mut rows = Vec::new();
    let (mut cut, mut left_out, mut long, mut shortened) = (0, 0, 0, 0);
    for (at, demonstration) in demonstrations.into_iter().enumerate() {
        let mut row = to_row(demonstration);
        let had_prompt = row.prompt_len > 0;
        if limits.prompt.is_some() && !had_prompt && !row.tokens.is_empty() {
            let message = "expected a prompt, to which a response is sampled, found a text without one; lmbda = 0 learns from texts";
            return Err(dataset.error(at, message));
        }
        cut += usize::from(row.cut(limits.max_length));
        if row.loss_tokens() == 0 || (limits.prompt.is_some() && row.prompt_len == 0) {
            left_out += 1;
            continue;
        }
        if let Some(limit) = limits.prompt.filter(|limit| row.prompt_len > limit.max_length()) {
            match config.prompt_length.long_prompts {
                LongPrompts::TruncateLeft => {
                    row.cut(row.tokens.len() - row.prompt_len + limit.max_length());
                    shortened += 1;
                }
                LongPrompts::Drop => {
                    long += 1;
                    continue;
                }
                LongPrompts::Error | LongPrompts::TruncateRight => {
                    let message = format!(
                        "the prompt is too long: expected at most {} tokens ({}), found {}; --long_prompts truncate_left or drop shortens or \
                         drops such prompts",
                        limit.max_length(),
                        limit.reason(),
                        row.prompt_len
                    );
                    return Err(dataset.error(at, message));
                }
            }
        }
        rows.push(row);
    }
    let name = dataset.path();
    let prompt_limit =
        limits.prompt.map_or(String::new(), |limit| format!("{} tokens ({})", limit.max_length(), limit.reason()));
    if rows.is_empty() {
        return Err(none_left(name, all, limits.max_length, (long, &prompt_limit)));
    }
    let mut warnings: Vec<String> = note.into_iter().chain(dataset.note_on_media()).collect();
    let name = name.display();
    let most = limits.max_length;
    let noted = [
        (cut, format!("were cut at their start to max_length = {most} tokens")),
        (left_out, "were left out: no prompt or no token to learn is left".into()),
        (shortened, format!("lost the start of their prompt, which had more than {prompt_limit}")),
        (long, format!("were dropped: their prompt has more than {prompt_limit}")),
    ];
    warnings
        .extend(noted.into_iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{name}: {n} of {all} rows {what}")));
    Ok((rows, warnings))
}

/// Returns the row of a demonstration; its prompt is the part before the loss.
fn to_row(demonstration: Demonstration) -> DistillRow {
    let Demonstration { tokens, prompt_len, loss_start, masked } = demonstration;
    // Rows of token ids have a mask instead of a prompt; the first token of a text is never in the loss.
    let prompt_len = if prompt_len == 0 && loss_start == 1 { 0 } else { loss_start };
    DistillRow { tokens, prompt_len, masked }
}

/// The error of a dataset that has no row left; `long` rows have a prompt with more tokens than its limit.
fn none_left(path: &Path, all: usize, max_length: usize, (long, prompt_limit): (usize, &str)) -> Error {
    let message = if long == all {
        format!("each of {all} rows was dropped: their prompts have more than {prompt_limit}")
    } else {
        let more =
            if long == 0 { String::new() } else { format!(", or {long} of them a prompt with at most {prompt_limit}") };
        format!("none of {all} rows has a prompt and a token to learn within max_length = {max_length} tokens{more}")
    };
    Error::invalid(path, message)
}

/// Rows as the models take them.
pub(super) struct PassInputs<'r> {
    sequences: Vec<&'r Vec<i64>>,
    spans: Vec<Range<usize>>,
}

impl<'r> PassInputs<'r> {
    pub(super) fn new(rows: &[&'r DistillRow]) -> Self {
        Self {
            sequences: rows.iter().map(|row| &row.tokens).collect(),
            spans: rows.iter().map(|row| row.span()).collect(),
        }
    }

    pub(super) fn batch(&self) -> Batch<'_, &'r Vec<i64>> {
        Batch::new(&self.sequences, &self.spans)
    }

    /// 1 for each of the M tokens that is in the loss, 0 for the others, f32.
    pub(super) fn mask(rows: &[&DistillRow], device: Device) -> Tensor {
        let row_mask = |row: &&DistillRow| {
            let counts = |at: usize| f32::from(u8::from(!row.masked.iter().any(|range| range.contains(&at))));
            row.span().map(counts).collect::<Vec<_>>()
        };
        on_device(&rows.iter().flat_map(row_mask).collect::<Vec<f32>>(), device)
    }

    /// Number of tokens of each sequence's span.
    pub(super) fn lens(&self) -> Vec<i64> {
        self.spans.iter().map(|span| span.len() as i64).collect()
    }
}
