//! Batches of ragged sequences: the tokens of one pass and the positions whose results are computed.

use super::lora::DropoutRows;
use rlhf_base::{Error, Result};
use std::fmt;
use std::ops::Range;
use tch::{Device, Tensor};
use tch_ext::on_device;

/// A question that is asked between the layers of a forward pass: whether the pass ends, since no one waits for its results any more.
#[derive(Clone, Copy)]
pub struct StopCheck<'a>(Option<&'a dyn Fn() -> bool>);

impl<'a> StopCheck<'a> {
    /// A pass that is always completed.
    pub const NEVER: Self = Self(None);

    /// A pass that ends between two layers once `is_over` returns true.
    pub fn when(is_over: &'a dyn Fn() -> bool) -> Self {
        Self(Some(is_over))
    }

    /// Fails if the pass ends. A model that is divided over ranks needs the same answer on all of them.
    pub fn check(self) -> Result<()> {
        match self.0 {
            Some(is_over) if is_over() => {
                Err(Error::Run("the forward pass was ended before its result was complete".into()))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for StopCheck<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "StopCheck::when" } else { "StopCheck::NEVER" })
    }
}

/// Sequences of one pass and, for each, the span of positions whose results are computed.
#[derive(Debug)]
pub struct Batch<'a, S> {
    pub(super) sequences: &'a [S],
    pub(super) spans: &'a [Range<usize>],
    /// Number of tokens of each sequence before its padding; `None`: there is no padding.
    pub(super) unpadded_lens: Option<&'a [usize]>,
    /// Number of first tokens of each sequence that are those of the sequence before it, and are computed once; `None`: each
    /// sequence is computed by itself.
    pub(super) shared_lens: Option<&'a [usize]>,
    /// Number of tokens of each sequence's prompt, which an encoder reads, for an encoder-decoder.
    pub(super) prompt_lens: Option<&'a [usize]>,
    /// Dropout before the adapters; backward passes only.
    pub(super) dropout: Option<&'a DropoutRows>,
    /// Whether a forward pass ends before its last layer.
    pub(super) ends: StopCheck<'a>,
}

/// Tokens are computed once for several sequences if that saves at least this share of all tokens: below it, copying keys and values costs as
/// much as it saves.
const LEAST_SHARED: f64 = 1.0 / 8.0;

/// Number of first tokens that each of `prefixes` has in common with the one before it, for [`Batch::sharing`]; `None` if these are few among
/// the `tokens` tokens of all sequences. Chat templates begin every prompt with the same tokens.
pub fn shared_lens<'s>(prefixes: impl IntoIterator<Item = &'s [i64]>, tokens: usize) -> Option<Vec<usize>> {
    let mut before: &[i64] = &[];
    let shared_len = |prefix: &'s [i64]| {
        let len = before.iter().zip(prefix).take_while(|(a, b)| a == b).count();
        before = prefix;
        len
    };
    let lens: Vec<usize> = prefixes.into_iter().map(shared_len).collect();
    let saved: usize = lens.iter().sum();
    (saved as f64 >= LEAST_SHARED * tokens as f64 && saved > 0).then_some(lens)
}

impl<S> Clone for Batch<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S> Copy for Batch<'_, S> {}

impl<'a, S> Batch<'a, S> {
    /// A batch of whole sequences without padding or dropout; one span per sequence, in positions of that sequence.
    pub fn new(sequences: &'a [S], spans: &'a [Range<usize>]) -> Self {
        let (unpadded_lens, shared_lens, prompt_lens, dropout) = (None, None, None, None);
        Self { sequences, spans, unpadded_lens, shared_lens, prompt_lens, dropout, ends: StopCheck::NEVER }
    }

    /// Sets the number of tokens of each sequence's prompt: the encoder of an encoder-decoder reads the prompt, and its decoder the start
    /// token and the response, which is the rest. Positions are those of the whole sequence: the hidden state that predicts
    /// the first token of the response is at the last position of the prompt. A model of one stack ignores these lengths.
    #[must_use]
    pub fn with_prompts(self, prompt_lens: Option<&'a [usize]>) -> Self {
        Self { prompt_lens, ..self }
    }

    /// Treats the tokens of each sequence after the first `unpadded_lens` as padding: padding attends to the text, and
    /// the text does not attend to padding.
    pub fn with_padding(self, unpadded_lens: Option<&'a [usize]>) -> Self {
        Self { unpadded_lens, ..self }
    }

    /// Computes the first `shared_lens[i]` tokens of sequence i, which are the same as in the sequence before it, once for both: responses to
    /// one prompt then only cost time and memory for their own tokens. Results are the same up to rounding. No effect with padding,
    /// dropout, or angles that depend on the length of the text.
    ///
    /// # Panics
    /// If there is not one length per sequence, or the first tokens of a sequence are not those of the one before it.
    #[must_use]
    pub fn sharing(self, shared_lens: Option<&'a [usize]>) -> Self
    where
        S: AsRef<[i64]>,
    {
        if let Some(lens) = shared_lens {
            assert_eq!(lens.len(), self.sequences.len(), "expected one shared length per sequence");
            let first = |row: usize, len: usize| self.sequences[row].as_ref().get(..len);
            for (row, &len) in lens.iter().enumerate().filter(|(_, len)| **len > 0) {
                let same = row > 0 && first(row, len).is_some_and(|prefix| first(row - 1, len) == Some(prefix));
                assert!(same, "sequence {row}: expected its first {len} tokens to be those of the sequence before it");
            }
        }
        Self { shared_lens, ..self }
    }

    /// Ends a forward pass between its layers once `is_over` returns true; the pass is then an error.
    pub fn ending_when(self, is_over: &'a dyn Fn() -> bool) -> Self {
        Self { ends: StopCheck::when(is_over), ..self }
    }

    /// Applies dropout before the adapters of the model.
    pub fn with_dropout(self, dropout: Option<&'a DropoutRows>) -> Self {
        Self { dropout, ..self }
    }
}

/// Sequences of one pass through a trunk with two heads: an LM head and a value head.
#[derive(Debug)]
pub struct JointBatch<'a, S> {
    /// The sequences.
    pub sequences: &'a [S],
    /// The tokens of each sequence whose log-probabilities are computed; a span may not start at 0.
    pub token_spans: &'a [Range<usize>],
    /// The positions of each sequence whose values are computed.
    pub value_spans: &'a [Range<usize>],
    /// As in [`Batch::with_prompts`].
    pub prompt_lens: Option<&'a [usize]>,
}

impl<S> Clone for JointBatch<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S> Copy for JointBatch<'_, S> {}

/// Spans that cover the positions read by two heads, and the indices of each head's positions among them.
pub(super) struct JointSpans {
    /// One span per sequence.
    pub(super) spans: Vec<Range<usize>>,
    /// Indices of the positions at which the tokens are predicted, `[M]` i64.
    pub(super) tokens: Tensor,
    /// Indices of the positions of the values, `[M]` i64.
    pub(super) values: Tensor,
}

impl JointSpans {
    pub(super) fn new<S>(batch: &JointBatch<'_, S>, device: Device) -> Self {
        let (mut spans, mut tokens, mut values) = (Vec::new(), Vec::new(), Vec::new());
        let mut before = 0;
        for (token, value) in batch.token_spans.iter().zip(batch.value_spans) {
            // Each token is predicted at the position before it.
            let parts = [token.start - 1..token.end - 1, value.clone()];
            let read = || parts.iter().filter(|part| !part.is_empty());
            let start = read().map(|part| part.start).min().unwrap_or(0);
            let end = read().map(|part| part.end).max().unwrap_or(start);
            for (part, at) in parts.iter().zip([&mut tokens, &mut values]) {
                at.extend(part.clone().map(|t| (before + t - start) as i64));
            }
            spans.push(start..end);
            before += end - start;
        }
        Self { spans, tokens: on_device(&tokens, device), values: on_device(&values, device) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_tokens_are_shared_with_the_sequence_before_where_they_are_an_eighth_of_all() {
        let prompts: [&[i64]; 5] = [&[1, 2, 3], &[1, 2, 4, 5], &[1, 2, 4, 5], &[2, 2], &[2]];
        assert_eq!(shared_lens(prompts, 50), Some(vec![0, 2, 4, 0, 1]));
        assert_eq!(shared_lens(prompts, 56), Some(vec![0, 2, 4, 0, 1]));
        assert_eq!(shared_lens(prompts, 57), None);
        assert_eq!(shared_lens([&[1i64, 2][..], &[3]], 3), None);
        assert_eq!(shared_lens([], 0), None);
    }
}
