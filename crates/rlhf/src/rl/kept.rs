//! Responses that are long enough to train on.

use crate::generate::{FinishReason, Response};
use crate::rl::rollout::counted_tokens;
use crate::{Error, Result};
use serde_json::{Value, json};

/// Which of the answers are trained on: those that are long enough, and in place of none of them the last that were.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct KeptAnswers {
    least: usize,
    /// Rows of the data with their answers.
    last: Option<(Vec<usize>, Vec<Response>)>,
}

/// What [`KeptAnswers::keep`] keeps.
#[derive(Debug, PartialEq)]
pub(crate) struct Kept {
    pub(crate) rows: Vec<usize>,
    pub(crate) responses: Vec<Response>,
    /// How many of the new ones are not among them.
    pub(crate) dropped: usize,
    /// Whether these are answers from before.
    pub(crate) again: bool,
}

impl KeptAnswers {
    /// Keeps answers of `least` tokens that count, and longer ones.
    pub(crate) fn new(least: usize) -> Self {
        Self { least, last: None }
    }

    /// Of these answers those to train on; tokens of `left_out` do not count.
    ///
    /// # Errors
    /// If none is long enough and none was before.
    pub(crate) fn keep(&mut self, rows: Vec<usize>, responses: Vec<Response>, left_out: &[i64]) -> Result<Kept> {
        if self.least == 0 {
            return Ok(Kept { rows, responses, dropped: 0, again: false });
        }
        let (all, counted) = (rows.len(), counted_tokens(&responses, left_out));
        let long = |&(_, &count): &(_, &i64)| count >= self.least as i64;
        let (rows, responses): (Vec<_>, Vec<_>) =
            rows.into_iter().zip(responses).zip(&counted).filter(long).map(|(answer, _)| answer).unzip();
        if !rows.is_empty() {
            self.last = Some((rows.clone(), responses.clone()));
            return Ok(Kept { dropped: all - rows.len(), rows, responses, again: false });
        }
        let (rows, responses) = self.last.clone().ok_or_else(|| {
            Error::Run(format!(
                "each of the first {all} answers has fewer than min_response_length = {} tokens before its end: there is \
                 nothing to learn from; look at what the policy answers, by `rlhf generate`",
                self.least
            ))
        })?;
        Ok(Kept { rows, responses, dropped: all, again: true })
    }

    /// What a checkpoint keeps of it, if anything: log-probabilities are taken anew.
    pub(crate) fn state(&self) -> Option<Value> {
        let (rows, responses) = self.last.as_ref()?;
        let tokens: Vec<&Vec<i64>> = responses.iter().map(|response| &response.tokens).collect();
        let stopped: Vec<bool> = responses.iter().map(|response| response.finish == FinishReason::Stop).collect();
        Some(json!({"rows": rows, "tokens": tokens, "stopped": stopped}))
    }

    /// Goes on from what [`KeptAnswers::state`] gave, over `prompts` prompts.
    pub(crate) fn load_state(&mut self, state: Option<&Value>, prompts: usize) -> Result<()> {
        let Some(state) = state.filter(|_| self.least > 0) else { return Ok(()) };
        let wrong =
            || Error::Run(format!("state of the last answers: expected rows, tokens and stopped, found {state}"));
        let part = |name: &str| state.get(name).cloned().unwrap_or_default();
        let rows: Vec<usize> = serde_json::from_value(part("rows")).map_err(|_| wrong())?;
        let tokens: Vec<Vec<i64>> = serde_json::from_value(part("tokens")).map_err(|_| wrong())?;
        let stopped: Vec<bool> = serde_json::from_value(part("stopped")).map_err(|_| wrong())?;
        if tokens.len() != rows.len() || stopped.len() != rows.len() || rows.iter().any(|&row| row >= prompts) {
            return Err(wrong());
        }
        let finish = |stopped| if stopped { FinishReason::Stop } else { FinishReason::Length };
        let responses = tokens.into_iter().zip(stopped);
        let responses = responses.map(|(tokens, stopped)| {
            let logprobs = vec![0.0; tokens.len()];
            Response { tokens, logprobs, finish: finish(stopped), sets: None }
        });
        self.last = Some((rows, responses.collect()));
        Ok(())
    }
}
