//! Events of a run: what a training loop hands to the sinks.

use crate::data::{Episode, prompt_field};
use crate::run::turns;
use rlhf_base::metrics::{Metrics, Warning};
use rlhf_lm::generate::{FinishReason, Response};
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// An event of a run, as [`crate::train::ppo::PpoTrainer::train_with`] passes it to its caller.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// An update is complete, and its metrics are written.
    ///
    /// The evaluation before the first update is recorded as step 0; a caller gets [`Event::Evaluation`] alone for it.
    Update {
        /// Updates done so far.
        step: usize,
        /// Metrics of this update, or since the last event; those of an evaluation after it too.
        metrics: &'a Metrics,
    },
    /// The held-out prompts were evaluated.
    Evaluation {
        /// Updates done so far.
        step: usize,
        /// Responses trained on so far.
        episode: usize,
        /// Metrics and responses.
        evaluation: &'a Evaluation,
    },
    /// Responses to show: to the sample prompts, or of a rollout.
    Samples {
        /// Updates done so far.
        step: usize,
        /// Responses trained on so far.
        episode: usize,
        /// Source of the responses.
        source: SampleSource,
        /// The responses.
        samples: &'a [Sample],
    },
    /// All responses that an update trains on, with `log_rollouts`; on other ranks than the first without rows.
    Rollout {
        /// Updates done so far, this one included.
        step: usize,
        /// Number of newest updates whose files are kept; `None` for all.
        limit: Option<usize>,
        /// The responses.
        rollout: &'a Rollout,
    },
    /// Something in an update should be looked at; nothing stops unless `on_alarm` sets that. Also on standard error, unless the console is
    /// silent.
    Warning {
        /// Updates done so far, this one included.
        step: usize,
        /// Kind and text.
        warning: &'a Warning,
    },
    /// An alarm has rolled the run back to a checkpoint: the updates after it are done again.
    RolledBack {
        /// Updates done before the rollback.
        step: usize,
        /// Updates done after it.
        to: usize,
        /// One line of text.
        message: &'a str,
    },
    /// A folder holds the current model: a checkpoint, the best model so far, or the final model.
    Saved {
        /// The folder.
        dir: &'a Path,
    },
}

/// Source of the responses of [`Event::Samples`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SampleSource {
    /// Greedy responses to the sample prompts.
    SamplePrompts,
    /// Sampled responses that the update trained on.
    Rollout,
}

/// The responses of an update, with the numbers that it trains on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rollout {
    /// A row per response.
    pub rows: Vec<RolloutRow>,
    /// Settings and state of the run that the rows do not have, for `rlhf replay`.
    pub(crate) record: Value,
}

/// A response with the numbers that an update trains on. Those per token are 0 where a token does not count.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutRow {
    /// Group of the response: responses to one prompt, sampled together, have the same one.
    pub group: usize,
    /// Row of the prompt among the training prompts, from 0.
    pub prompt_row: usize,
    /// The prompt's text.
    pub prompt: String,
    /// The response's text.
    pub response: String,
    /// The response's tokens, a stop token included.
    pub token_ids: Vec<i64>,
    /// Why the response ended.
    pub finish_reason: FinishReason,
    /// The whole score, scaled and with penalties; `None` where no reward gave one.
    pub score: Option<f64>,
    /// Score of each reward, before weights and penalties; `None` where it gave none.
    pub components: Vec<(String, Option<f64>)>,
    /// Log-probability of each token under the policy that the ratios are relative to; of a token that does not count, that of sampling.
    pub logprobs: Vec<f32>,
    /// Log-probability of each token under the reference model, if there is one.
    pub ref_logprobs: Option<Vec<f32>>,
    /// Values of the states before each token and, where the context allows, after the last, if there is a critic.
    pub values: Option<Vec<f32>>,
    /// Advantage of each token.
    pub advantages: Vec<f32>,
    /// Weighted sum of the rewards for the whole response, before `use_score_scaling`, `score_clip` and penalties; without the scores of
    /// its tokens.
    pub reward: f64,
    /// Whole score without running moments, before penalties.
    pub raw_score: f64,
    /// Weighted sum of the rewards for each token, if a reward scores tokens.
    pub token_scores: Option<Vec<f64>>,
    /// Score of the greedy response to the prompt, with the estimator `remax`; `None` also where no reward gave one.
    pub baseline: Option<f64>,
    /// Ids of the tokens that each token was sampled from, with `logprobs_of` `filtered`.
    pub kept_ids: Option<Vec<Vec<i64>>>,
    /// The turns of the response, with an environment.
    pub turns: Option<RolloutTurns>,
}

/// The turns of a response with an environment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RolloutTurns {
    /// Token ids of the prompt, with the tools and with what the environment said.
    #[serde(skip)]
    pub prompt_ids: Vec<i64>,
    /// First token and end of each span of the response that the policy did not sample.
    #[serde(serialize_with = "bounds")]
    pub inserted: Vec<Range<usize>>,
    /// Turns and results of tools, as messages.
    pub messages: Vec<Value>,
    /// Number of calls that were executed.
    #[serde(rename = "tool_calls")]
    pub calls: usize,
    /// Number of those that failed.
    #[serde(rename = "tool_failures")]
    pub failures: usize,
    /// Reward of the environment, if it gives one.
    #[serde(rename = "env_reward")]
    pub reward: Option<f64>,
}

impl RolloutTurns {
    /// The turns of a `response` with their `episode`.
    pub fn of(episode: &Episode, response: &Response) -> Self {
        Self {
            prompt_ids: episode.prompt.tokens.clone(),
            inserted: response.inserted.clone(),
            messages: episode.messages.clone(),
            calls: episode.calls,
            failures: episode.failures,
            reward: episode.reward,
        }
    }
}

impl Sample {
    /// Returns the response as a table shows it: its turns, where it has some.
    pub(crate) fn shown(&self) -> Cow<'_, str> {
        let turns = self.turns.as_ref().map(|turns| turns::lines(&turns.messages)).filter(|lines| !lines.is_empty());
        turns.map_or(Cow::Borrowed(&self.response), Cow::Owned)
    }
}

/// Writes spans as in the files of rollouts: first tokens and ends, one after another.
fn bounds<S: Serializer>(spans: &[Range<usize>], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(spans.iter().flat_map(|span| [span.start, span.end]))
}

/// One row of a sample table.
#[derive(Debug, Clone, Serialize)]
pub struct Sample {
    /// The prompt's text.
    pub prompt: String,
    /// The response's text.
    pub response: String,
    /// The whole score of the response.
    pub score: f64,
    /// Score of each reward by its name, before weights and penalties.
    pub components: BTreeMap<String, f64>,
    /// Further columns of rewards: of Python functions, those of `log_extra`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub extra: BTreeMap<String, Value>,
    /// Why the response ended, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finish_reason: Option<FinishReason>,
    /// Tokens of the response, a stop token included, where they are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_tokens: Option<usize>,
    /// Text of each token of the response, where it is recorded; joined they are the response, as long as its bytes are text.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tokens: Vec<String>,
    /// Log-probability of each of these tokens.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<f32>,
    /// The turns of the response, with an environment.
    #[serde(flatten)]
    pub turns: Option<RolloutTurns>,
    /// The prompt as a table shows it, where it is a conversation.
    #[serde(skip)]
    pub(crate) conversation: Option<Conversation>,
}

/// A conversation as a table shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Conversation {
    /// The system prompt, often the same in all rows.
    pub(crate) system: Option<String>,
    /// The other turns.
    pub(crate) turns: String,
}

impl Conversation {
    /// Returns the conversation of a dataset's `row`, if it is one and all of it is in `text`, the prompt as the model reads
    /// it: a prompt that was cut is shown as it is.
    pub(crate) fn of(row: &Value, text: &str) -> Option<Self> {
        let (_, prompt) = prompt_field(row)?;
        let messages: Option<Vec<(&str, &str)>> = prompt
            .as_array()?
            .iter()
            .map(|message| Some((message["role"].as_str()?, message["content"].as_str()?)))
            .collect();
        let messages = messages.filter(|messages| messages.iter().all(|(_, said)| text.contains(said.trim())))?;
        let (system, turns) = match messages.split_first()? {
            (("system" | "developer", system), turns) if !turns.is_empty() => (Some(system.to_string()), turns),
            _ => (None, &messages[..]),
        };
        let turns = match turns {
            [("user", said)] => said.to_string(),
            turns => turns.iter().map(|(role, said)| format!("{role}: {said}")).collect::<Vec<_>>().join("\n"),
        };
        Some(Self { system, turns })
    }
}

/// Result of evaluating the policy on the held-out prompts.
#[derive(Debug, Clone)]
pub struct Evaluation {
    /// `eval/score`, `eval/score_stderr`, `eval/kl`, `eval/response_length` and `time/eval`; `docs/reference/metrics.md` defines
    /// them.
    pub metrics: Metrics,
    /// The responses, in the order of the prompts.
    pub samples: Vec<Sample>,
}
