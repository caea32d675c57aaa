//! Scores of single responses by rewards, and the winners that follow from them.

use super::judge::NoVerdict;
use super::responses::encode;
use super::results::{ResponseRecord, ResultRow, Store, Verdict};
use super::{MOST_FAILURES, Side, Task};
use crate::data::{Episode, Prompt};
use crate::reward::{RewardInput, Rewards, ScoreUse};
use rlhf_base::{Error, Result};
use rlhf_lm::generate::FinishReason;
use serde_json::Value;
use std::cmp::Ordering;

/// Rewards that score responses, as in PPO. They read token ids of the tokenizer of the model that is evaluated.
pub(super) struct Scorer {
    pub(super) rewards: Rewards,
    /// Whether the token ids of the other model are of another tokenizer.
    pub(super) other_ids: bool,
    /// Number of prompts to score at once.
    pub(super) at_once: usize,
}

/// A response to score.
struct Scored<'a> {
    prompt: &'a Prompt,
    row: &'a Value,
    text: &'a str,
    ids: Vec<i64>,
    finish: FinishReason,
    episode: Option<&'a Episode>,
}

impl<'a> Scored<'a> {
    /// A response of a model that has the token ids that the rewards read.
    fn of(response: &'a ResponseRecord, prompt: &'a Prompt) -> Self {
        let episode = response.episode.as_ref();
        let prompt = episode.map_or(prompt, |episode| &episode.prompt);
        Self {
            prompt,
            row: &prompt.row,
            text: &response.text,
            ids: response.ids.clone(),
            finish: response.finish,
            episode,
        }
    }

    fn input(&self) -> RewardInput<'_> {
        RewardInput {
            prompt: &self.prompt.text,
            response: self.text,
            prompt_ids: &self.prompt.tokens,
            response_ids: &self.ids,
            finish: self.finish,
            row: self.row,
            episode: self.episode,
        }
    }
}

impl Scorer {
    /// Scores the responses to the prompts `indices`, and sets scores and winners of their `rows`: the greater score wins, equal scores
    /// are a tie.
    pub(super) fn score(
        &mut self,
        task: &Task,
        store: &Store,
        indices: &[usize],
        rows: &mut [ResultRow],
    ) -> Result<()> {
        let mut responses = Vec::new();
        // Number of responses of both sides to each prompt.
        let mut counts = Vec::new();
        for &index in indices {
            let evaluated = self.evaluated(task, store, index);
            let compared = self.compared(task, store, index)?;
            counts.push([evaluated.len(), compared.len()]);
            responses.extend(evaluated.into_iter().chain(compared));
        }
        let scores = self.scores(&responses)?;
        let mut scores = scores.as_slice();
        let mut rows = rows.iter_mut();
        for [evaluated, compared] in counts {
            let (prompt_scores, rest) = scores.split_at(evaluated + compared);
            let (evaluated, compared) = prompt_scores.split_at(evaluated);
            for (sample, (score, row)) in evaluated.iter().zip(rows.by_ref()).enumerate() {
                set_scores(row, score, compared.get(sample).or(compared.first()));
            }
            scores = rest;
        }
        Ok(())
    }

    /// Returns the responses of the model that is evaluated.
    fn evaluated<'a>(&self, task: &'a Task, store: &'a Store, index: usize) -> Vec<Scored<'a>> {
        store.responses(Side::A, index).iter().map(|response| Scored::of(response, &task.prompts[index])).collect()
    }

    /// Returns the responses to compare them with.
    fn compared<'a>(&self, task: &'a Task, store: &'a Store, index: usize) -> Result<Vec<Scored<'a>>> {
        let prompt = &task.prompts[index];
        let row = &prompt.row;
        let encoded = |text: &'a str, episode: Option<&'a Episode>, finish: FinishReason| -> Result<Scored<'a>> {
            let turns = episode.map(|episode| episode.messages.as_slice());
            let ids = encode(&task.tokenizer, prompt, (text, turns), finish)?;
            Ok(Scored { prompt, row, text, ids, finish, episode })
        };
        if let Some(texts) = &task.references {
            return Ok(vec![encoded(&texts[index], None, FinishReason::Stop)?]);
        }
        let scored = |response: &'a ResponseRecord| {
            if self.other_ids {
                encoded(&response.text, response.episode.as_ref(), response.finish)
            } else {
                Ok(Scored::of(response, prompt))
            }
        };
        store.responses(Side::B, index).iter().map(scored).collect()
    }

    /// Returns the score of each response. If the rewards fail for all of them together, the responses are scored one by one, so that one
    /// bad response costs only its own score.
    fn scores(&mut self, responses: &[Scored<'_>]) -> Result<Vec<Result<f64, NoVerdict>>> {
        let inputs: Vec<RewardInput<'_>> = responses.iter().map(Scored::input).collect();
        let mut score = |inputs: &[RewardInput<'_>]| -> Result<Vec<Result<f64, NoVerdict>>> {
            let scored = self.rewards.score(inputs, ScoreUse::Report)?;
            let scores = scored.totals().into_iter().zip(scored.unscored());
            let absent = || NoVerdict { reason: "no reward gave a score".into(), failed: false };
            Ok(scores.map(|(score, unscored)| if unscored { Err(absent()) } else { Ok(score) }).collect())
        };
        let failed = |error: Error| NoVerdict { reason: error.to_string(), failed: true };
        match score(&inputs) {
            Err(Error::Run(_) | Error::Reward { .. }) if inputs.len() > 1 => {}
            Err(error @ (Error::Run(_) | Error::Reward { .. })) => return Ok(vec![Err(failed(error))]),
            scored => return scored,
        }
        let mut outcomes = Vec::with_capacity(inputs.len());
        let mut in_a_row = 0;
        for input in inputs.chunks(1) {
            let scored = match outcomes.last() {
                // The evaluation will end.
                Some(Err(NoVerdict { reason, .. })) if in_a_row >= MOST_FAILURES => {
                    Err(Error::Run(String::clone(reason)))
                }
                _ => score(input),
            };
            match scored {
                Ok(scores) => {
                    in_a_row = 0;
                    outcomes.extend(scores);
                }
                Err(error @ (Error::Run(_) | Error::Reward { .. })) => {
                    in_a_row += 1;
                    outcomes.push(Err(failed(error)));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(outcomes)
    }
}

/// Sets the scores of a row, and the winner if there is another score.
fn set_scores(row: &mut ResultRow, evaluated: &Result<f64, NoVerdict>, compared: Option<&Result<f64, NoVerdict>>) {
    row.score_a = evaluated.as_ref().ok().copied();
    row.score_b = compared.and_then(|score| score.as_ref().ok().copied());
    let failed = evaluated.as_ref().err().or(compared.and_then(|score| score.as_ref().err()));
    failed.into_iter().for_each(|no_verdict| row.set_no_verdict(no_verdict.clone()));
    if let (Some(a), Some(b)) = (row.score_a, row.score_b) {
        row.winner = Some(match a.total_cmp(&b) {
            _ if a == b => Verdict::Tie,
            Ordering::Greater => Verdict::A,
            _ => Verdict::B,
        });
    }
}
