//! Responses that are long enough to train on.

use crate::rl::rollout::counted_tokens;
use rlhf_base::{Error, Result};
use rlhf_lm::generate::{FinishReason, Response};
use serde::{Deserialize, Serialize};

/// Selects the responses that are long enough to train on; if there are none, the last ones that were long enough are trained on again.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct KeptResponses {
    least: usize,
    /// The last responses that were long enough, and their rows in the data.
    last: Option<(Vec<usize>, Vec<Response>)>,
}

/// The state of [`KeptResponses`] in a checkpoint: the last responses that were long enough.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct KeptState {
    rows: Vec<usize>,
    tokens: Vec<Vec<i64>>,
    stopped: Vec<bool>,
}

/// The selection of [`KeptResponses::keep`].
#[derive(Debug, PartialEq)]
pub(crate) struct Kept {
    pub(crate) rows: Vec<usize>,
    pub(crate) responses: Vec<Response>,
    /// Number of new responses that were not selected.
    pub(crate) dropped: usize,
    /// Whether these are responses of an earlier update.
    pub(crate) reused: bool,
}

impl KeptResponses {
    /// Selects responses of at least `least` tokens that count.
    pub(crate) fn new(least: usize) -> Self {
        Self { least, last: None }
    }

    /// Selects the responses to train on; tokens of `left_out` do not count.
    ///
    /// # Errors
    /// If none is long enough, and none ever was.
    pub(crate) fn keep(&mut self, rows: Vec<usize>, responses: Vec<Response>, left_out: &[i64]) -> Result<Kept> {
        if self.least == 0 {
            return Ok(Kept { rows, responses, dropped: 0, reused: false });
        }
        let all = rows.len();
        let counted = counted_tokens(&responses, left_out);
        let long = |&(_, &count): &(_, &i64)| count >= self.least as i64;
        let (rows, responses): (Vec<_>, Vec<_>) =
            rows.into_iter().zip(responses).zip(&counted).filter(long).map(|(row, _)| row).unzip();
        if !rows.is_empty() {
            self.last = Some((rows.clone(), responses.clone()));
            return Ok(Kept { dropped: all - rows.len(), rows, responses, reused: false });
        }
        let (rows, responses) = self.last.clone().ok_or_else(|| {
            Error::Run(format!(
                "each of the first {all} responses has fewer than min_response_length = {} tokens before its end: there is \
                 nothing to learn from; look at responses of the policy with `rlhf generate`",
                self.least
            ))
        })?;
        Ok(Kept { rows, responses, dropped: all, reused: true })
    }

    /// State for a checkpoint, if there is any; log-probabilities are recomputed after resuming.
    pub(crate) fn state(&self) -> Option<KeptState> {
        let (rows, responses) = self.last.as_ref()?;
        Some(KeptState {
            rows: rows.clone(),
            tokens: responses.iter().map(|response| response.tokens.clone()).collect(),
            stopped: responses.iter().map(|response| response.finish == FinishReason::Stop).collect(),
        })
    }

    /// Restores the state that [`KeptResponses::state`] returned, over `prompts` prompts.
    ///
    /// # Errors
    /// If its parts have different lengths, or a row is not one of the prompts.
    pub(crate) fn load_state(&mut self, state: Option<KeptState>, prompts: usize) -> Result<()> {
        self.last = None;
        let Some(KeptState { rows, tokens, stopped }) = state.filter(|_| self.least > 0) else { return Ok(()) };
        if tokens.len() != rows.len() || stopped.len() != rows.len() || rows.iter().any(|&row| row >= prompts) {
            return Err(Error::Run(format!(
                "state of the last responses: expected as many tokens and stopped as rows, each row one of the prompts, found {} rows, \
                 {} tokens and {} stopped",
                rows.len(),
                tokens.len(),
                stopped.len()
            )));
        }
        let finish = |stopped| if stopped { FinishReason::Stop } else { FinishReason::Length };
        let responses = tokens.into_iter().zip(stopped);
        let responses = responses.map(|(tokens, stopped)| {
            let logprobs = vec![0.0; tokens.len()];
            Response { tokens, logprobs, finish: finish(stopped), sets: None, inserted: Vec::new() }
        });
        self.last = Some((rows, responses.collect()));
        Ok(())
    }
}
