//! Responses of several turns.

use super::prompts::Prompt;
use rlhf_lm::generate::{FinishReason, Response};
use rlhf_lm::tokenizer::message_text;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A response of several turns with an environment: its conversation, and the environment's numbers about it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Episode {
    /// The prompt, with the tools and the first messages of the environment.
    pub prompt: Prompt,
    /// Messages of the response, in the order of the conversation: turns of the policy, and results of its calls.
    pub messages: Vec<Value>,
    /// Number of calls that were executed.
    pub calls: usize,
    /// Number of those calls that failed.
    pub failures: usize,
    /// The environment's reward; `None` where it gives none.
    pub reward: Option<f64>,
    /// Name of the reward.
    pub reward_name: Option<String>,
    /// Metrics that the environment gave.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub logs: Vec<(String, f64)>,
    /// Whether the environment has ended the episode.
    #[serde(default)]
    pub is_over: bool,
    /// Whether the environment died, so that the reward is the one that the settings have for this case.
    pub has_failed: bool,
}

impl Episode {
    /// The text of the policy's last turn: its answer, where it has called tools before.
    pub fn answer(&self) -> String {
        let last = self.messages.iter().rfind(|message| message["role"] == "assistant");
        last.and_then(|message| message_text(&message["content"])).unwrap_or_default()
    }

    /// Whether its `response` ends in the middle of a turn, or with a call whose result did not fit or that exceeded the limit of calls.
    pub(crate) fn is_cut(&self, response: &Response) -> bool {
        let is_answered = self.has_failed || self.is_over;
        response.finish == FinishReason::Length || ends_with_calls(&self.messages) && !is_answered
    }
}

/// Returns whether the last of the `messages` of a response has calls without results: these did not fit, or no more calls were made.
pub(crate) fn ends_with_calls(messages: &[Value]) -> bool {
    messages.last().and_then(|last| last["tool_calls"].as_array()).is_some_and(|calls| !calls.is_empty())
}
