//! The pairs of a DPO run: rows cut to their length, and the inputs of a pass.

use crate::data::{Dataset, Preference};
use crate::settings::{DpoConfig, TruncationMode};
use rlhf_base::{Error, Result};
use rlhf_lm::model::{Batch, shared_lens};
use rlhf_lm::tokenizer::Tokenizer;
use std::ops::Range;
use std::path::Path;
use tch::{Device, Kind, Tensor};
use tch_ext::on_device;

/// A pair as it is trained on; side 0 is the chosen one, side 1 the rejected one.
#[derive(Debug, Clone)]
pub(crate) struct PairRow {
    /// Prompt and completion of each side.
    pub(crate) sides: [Vec<i64>; 2],
    /// Number of tokens of the prompt in each side.
    prompt_lens: [usize; 2],
    /// Log-probabilities of the completions under the reference model, if they are computed before training.
    pub(super) reference: Option<[f64; 2]>,
}

impl PairRow {
    /// Cuts a preference to `max_length` tokens; `None` if nothing of the completions is left.
    pub(super) fn new(row: &Preference, max_length: usize, mode: TruncationMode) -> Option<Self> {
        let Preference { prompt, chosen, rejected } = row;
        if mode == TruncationMode::KeepStart && prompt.len() >= max_length {
            return None;
        }
        let side = |completion: &[i64]| {
            let mut whole = [&prompt[..], completion].concat();
            let above = whole.len().saturating_sub(max_length);
            match mode {
                TruncationMode::KeepStart => whole.truncate(max_length),
                TruncationMode::KeepEnd => drop(whole.drain(..above)),
            }
            let lost = if mode == TruncationMode::KeepEnd { above } else { 0 };
            (whole, prompt.len().saturating_sub(lost))
        };
        let (chosen, chosen_prompt_len) = side(chosen);
        let (rejected, rejected_prompt_len) = side(rejected);
        // There is no pass over a side without tokens.
        let is_empty = chosen.is_empty() || rejected.is_empty();
        let prompt_lens = [chosen_prompt_len, rejected_prompt_len];
        let row = Self { sides: [chosen, rejected], prompt_lens, reference: None };
        (!is_empty).then_some(row)
    }

    /// The tokens of a side whose log-probabilities count: those of the completion, except the first token of a text, which nothing
    /// predicts.
    pub(crate) fn span(&self, side: usize) -> Range<usize> {
        let len = self.sides[side].len();
        self.prompt_lens[side].max(1).min(len)..len
    }

    /// The tokens of a side's prompt.
    pub(crate) fn prompt(&self, side: usize) -> &[i64] {
        &self.sides[side][..self.prompt_lens[side]]
    }

    /// The number of tokens of a side's completion.
    pub(super) fn completion_len(&self, side: usize) -> usize {
        self.sides[side].len() - self.prompt_lens[side]
    }

    /// The number of tokens of both sides.
    pub(crate) fn tokens(&self) -> usize {
        self.sides.iter().map(Vec::len).sum()
    }

    /// The number of tokens that a pass computes; `shares`: a prompt that both sides have is computed once.
    pub(super) fn computed(&self, shares: bool) -> usize {
        let [a, b] = self.prompt_lens;
        let same = |len: usize| self.sides[0][..len] == self.sides[1][..len];
        self.tokens() - if shares && a == b && same(a) { a } else { 0 }
    }
}

/// Reads the pairs of a dataset, cut to `max_length`. Returns them with warnings.
///
/// # Errors
/// If a row is no pair, or none is left.
pub(super) fn read_pairs(
    dataset: &Dataset,
    config: &DpoConfig,
    tokenizer: &Tokenizer,
    max_length: usize,
) -> Result<(Vec<PairRow>, Vec<String>)> {
    // Texts that are cut at their start are encoded whole.
    let most = if config.truncation_mode == TruncationMode::KeepStart { max_length } else { usize::MAX };
    let (preferences, note) = dataset.preferences(&tokenizer.limited_to(most))?;
    let path = dataset.path();
    let all = preferences.len();
    let cut = |row: &&Preference| row.prompt.len() + row.chosen.len().max(row.rejected.len()) > max_length;
    let rows: Vec<(&Preference, PairRow)> = preferences
        .iter()
        .filter_map(|row| Some((row, PairRow::new(row, max_length, config.truncation_mode)?)))
        .collect();
    let left_out = all - rows.len();
    let cut = rows.iter().filter(|(row, _)| cut(row)).count();
    let equal = rows.iter().filter(|(_, row)| row.sides[0] == row.sides[1]).count();
    let rows: Vec<PairRow> = rows.into_iter().map(|(_, row)| row).collect();
    if rows.is_empty() {
        return Err(none_left(path, all, max_length));
    }
    let mut warnings: Vec<String> = note.into_iter().chain(dataset.note_on_media()).collect();
    let path = path.display();
    if left_out > 0 {
        warnings.push(format!(
            "{path}: {left_out} of {all} pairs were left out: the prompt alone has max_length = {max_length} tokens or more, or no text is left"
        ));
    }
    if cut > 0 {
        let end = if config.truncation_mode == TruncationMode::KeepStart { "end" } else { "start" };
        warnings
            .push(format!("{path}: {cut} of {all} pairs were cut at their {end} to max_length = {max_length} tokens"));
    }
    if equal > 0 {
        warnings.push(format!("{path}: in {equal} of {all} pairs chosen and rejected are equal"));
    }
    Ok((rows, warnings))
}

fn none_left(path: &Path, all: usize, max_length: usize) -> Error {
    let message =
        format!("each of {all} pairs has a prompt of max_length = {max_length} tokens or more: no completion is left");
    Error::invalid(path, message)
}

/// The inputs of a pass over n pairs: 2 n sequences, the chosen and the rejected side of each pair one after the other.
pub(super) struct PassInputs<'r> {
    sequences: Vec<&'r Vec<i64>>,
    spans: Vec<Range<usize>>,
    shared: Option<Vec<usize>>,
    /// Number of the sequence of each of the M tokens.
    sequence_of_token: Tensor,
    /// Weight of each of the M tokens in the log-probability of its completion; `None`: 1.
    token_weights: Option<Tensor>,
}

impl<'r> PassInputs<'r> {
    pub(super) fn new(rows: &[&'r PairRow], ld_alpha: Option<f64>, device: Device) -> Self {
        let sequences: Vec<&Vec<i64>> = rows.iter().flat_map(|row| &row.sides).collect();
        let spans: Vec<Range<usize>> = rows.iter().flat_map(|row| [row.span(0), row.span(1)]).collect();
        let prompts = rows.iter().flat_map(|row| [row.prompt(0), row.prompt(1)]);
        let shared = shared_lens(prompts, rows.iter().map(|row| row.tokens()).sum());
        let sequence_of_token: Vec<i64> =
            spans.iter().enumerate().flat_map(|(at, span)| std::iter::repeat_n(at as i64, span.len())).collect();
        let token_weights = ld_alpha.map(|alpha| {
            let weights = spans.chunks(2).flat_map(|pair| {
                let common = pair[0].len().min(pair[1].len());
                pair.iter()
                    .flat_map(move |span| (0..span.len()).map(move |at| if at < common { 1.0 } else { alpha as f32 }))
            });
            on_device(&weights.collect::<Vec<f32>>(), device)
        });
        let sequence_of_token = on_device(&sequence_of_token, device);
        Self { sequences, spans, shared, sequence_of_token, token_weights }
    }

    pub(super) fn batch(&self) -> Batch<'_, &'r Vec<i64>> {
        Batch::new(&self.sequences, &self.spans).sharing(self.shared.as_deref())
    }

    /// Sums of the M tokens' `numbers` over each sequence, `[n, 2]`.
    pub(super) fn sums(&self, numbers: &Tensor) -> Tensor {
        let zeros = Tensor::zeros([self.sequences.len() as i64], (Kind::Float, numbers.device()));
        zeros.index_add(0, &self.sequence_of_token, numbers).view([-1, 2])
    }

    /// Log-probabilities of the completions, `[n, 2]`, from those of the M tokens.
    pub(super) fn logps(&self, logprobs: &Tensor) -> Tensor {
        match &self.token_weights {
            Some(weights) => self.sums(&(logprobs * weights)),
            None => self.sums(logprobs),
        }
    }

    /// The weight of each pair, `[n]`: for each completion the geometric mean of its tokens' probabilities, each divided by the sum of all
    /// squared probabilities at its position; the product of both completions. Source: Zhou et al. 2024, WPO, eq. 2.
    pub(super) fn pair_weights(&self, logprobs: &Tensor, log_sum_squares: &Tensor) -> Tensor {
        tch::no_grad(|| {
            let aligned = self.sums(&(logprobs.detach() - log_sum_squares));
            let lens: Vec<f32> = self.spans.iter().map(|span| span.len().max(1) as f32).collect();
            let lens = on_device(&lens, aligned.device()).view([-1, 2]);
            (aligned / lens).sum_dim_intlist(1i64, false, Kind::Float).exp()
        })
    }
}
