//! Responses in the form of OpenAI's HTTP interface.

use super::api::{Endpoint, now};
use super::choice::{Delta, TokenInfo};
use rlhf::generate::FinishReason;
use serde_json::{Map, Value, json};
use std::hash::{BuildHasher, RandomState};

/// Written for a log-probability of minus infinity, which JSON does not have.
const LEAST: f32 = -9999.0;

/// Numbers of tokens of a request.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Usage {
    pub(super) prompt: usize,
    pub(super) completion: usize,
}

impl Usage {
    fn to_json(self) -> Value {
        let Self { prompt, completion } = self;
        json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion})
    }
}

/// A random number: a name of one request, or its seed.
pub(super) fn random() -> u64 {
    RandomState::new().hash_one(now())
}

/// The fields that all parts of the response to one request have.
pub(super) struct Form {
    endpoint: Endpoint,
    id: String,
    created: u64,
    model: String,
    /// Whether log-probabilities are requested.
    logprobs: bool,
    /// Whether the model may call tools.
    tools: bool,
}

impl Form {
    pub(super) fn new(endpoint: Endpoint, model: &str, logprobs: bool, tools: bool) -> Self {
        let prefix = if endpoint == Endpoint::Chat { "chatcmpl" } else { "cmpl" };
        Self {
            endpoint,
            id: format!("{prefix}-{:016x}{:016x}", random(), random()),
            created: now(),
            model: model.into(),
            logprobs,
            tools,
        }
    }

    fn object(&self, chunk: bool, choices: Vec<Value>) -> Map<String, Value> {
        let kind = match (self.endpoint, chunk) {
            (Endpoint::Completions, _) => "text_completion",
            (Endpoint::Chat, false) => "chat.completion",
            (Endpoint::Chat, true) => "chat.completion.chunk",
        };
        let fields = [
            ("id", self.id.as_str().into()),
            ("object", kind.into()),
            ("created", self.created.into()),
            ("model", self.model.as_str().into()),
            ("choices", Value::Array(choices)),
        ];
        fields.into_iter().map(|(name, value): (&str, Value)| (name.to_string(), value)).collect()
    }

    /// The whole response, in one object.
    pub(super) fn whole(&self, choices: &[Delta], usage: Usage) -> Value {
        let choice = |(index, choice): (usize, &Delta)| {
            let logprobs = self.logprobs_value(&choice.tokens);
            let finish = reason(choice);
            match self.endpoint {
                Endpoint::Completions => {
                    json!({"text": choice.text, "index": index, "logprobs": logprobs, "finish_reason": finish})
                }
                Endpoint::Chat => {
                    let mut message = json!({"role": "assistant", "content": choice.text, "refusal": null});
                    if !choice.calls.is_empty() {
                        message["tool_calls"] = choice.calls.clone().into();
                        message["content"] = Some(&choice.text).filter(|text| !text.is_empty()).cloned().into();
                    }
                    json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish})
                }
            }
        };
        let mut object = self.object(false, choices.iter().enumerate().map(choice).collect());
        object.insert("usage".into(), usage.to_json());
        object.into()
    }

    /// The first part of a choice in a stream, if there is one before its text.
    pub(super) fn first_chunk(&self, index: usize) -> Option<Value> {
        // A turn that calls tools may have no content, which is null.
        let content = (!self.tools).then_some("");
        let delta = json!({"role": "assistant", "content": content, "refusal": null});
        let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
        (self.endpoint == Endpoint::Chat).then(|| self.object(true, vec![choice]).into())
    }

    /// A part of a choice in a stream as objects; none if it has nothing new.
    pub(super) fn chunks(&self, index: usize, part: &Delta) -> Vec<Value> {
        if *part == Delta::default() {
            return Vec::new();
        }
        let logprobs = if part.tokens.is_empty() { Value::Null } else { self.logprobs_value(&part.tokens) };
        let finish = reason(part);
        let chunk = |delta: Value, logprobs: Value, finish: Option<&str>| -> Value {
            let choice = json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish});
            self.object(true, vec![choice]).into()
        };
        match self.endpoint {
            Endpoint::Completions => {
                let choice = json!({"text": part.text, "index": index, "logprobs": logprobs, "finish_reason": finish});
                vec![self.object(true, vec![choice]).into()]
            }
            Endpoint::Chat if part.calls.is_empty() => {
                // An empty message has an empty text: clients send it back, and null is refused there.
                let silent = part.text.is_empty() && part.tokens.is_empty() && !(self.tools && part.is_empty);
                let delta = if silent { json!({}) } else { json!({"content": part.text}) };
                vec![chunk(delta, logprobs, finish)]
            }
            Endpoint::Chat => {
                let mut chunks = Vec::new();
                if !part.text.is_empty() {
                    chunks.push(chunk(json!({"content": part.text}), Value::Null, None));
                }
                for (at, call) in part.calls.iter().enumerate() {
                    let mut call = call.clone();
                    call["index"] = at.into();
                    chunks.push(chunk(json!({"tool_calls": [call]}), Value::Null, None));
                }
                chunks.push(chunk(json!({}), logprobs, finish));
                chunks
            }
        }
    }

    /// The last part of a stream, with the numbers of tokens.
    pub(super) fn usage_chunk(&self, usage: Usage) -> Value {
        let mut object = self.object(true, Vec::new());
        object.insert("usage".into(), usage.to_json());
        object.into()
    }

    fn logprobs_value(&self, tokens: &[TokenInfo]) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        match self.endpoint {
            Endpoint::Completions => completion_logprobs(tokens),
            Endpoint::Chat => {
                let content: Vec<Value> = tokens.iter().map(chat_logprobs).collect();
                json!({"content": content, "refusal": null})
            }
        }
    }
}

/// Log-probabilities of `/v1/completions`. The alternatives of a token are an object by their text, the token itself among them.
fn completion_logprobs(tokens: &[TokenInfo]) -> Value {
    let top = |token: &TokenInfo| {
        let (logprob, top) = token.logprob.as_ref()?;
        let mut all = Map::new();
        // The likeliest come first: of several tokens with one text the likeliest counts.
        for (text, logprob) in top.iter().chain([&(token.text.clone(), *logprob)]) {
            all.entry(text.clone()).or_insert_with(|| finite(*logprob));
        }
        Some(Value::Object(all))
    };
    let logprob = |token: &TokenInfo| token.logprob.as_ref().map(|(logprob, _)| finite(*logprob));
    json!({
        "tokens": tokens.iter().map(|token| token.text.as_str()).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(logprob).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
        "text_offset": tokens.iter().map(|token| token.offset).collect::<Vec<_>>(),
    })
}

/// Log-probabilities of one token of `/v1/chat/completions`.
fn chat_logprobs(token: &TokenInfo) -> Value {
    let entry = |text: &str, logprob: f32| {
        // The text of a token that is a part of a character does not have its bytes.
        let bytes = (!text.contains(char::REPLACEMENT_CHARACTER)).then_some(text.as_bytes());
        json!({"token": text, "logprob": finite(logprob), "bytes": bytes})
    };
    let (logprob, top) = token.logprob.as_ref().map_or((LEAST, &[][..]), |(logprob, top)| (*logprob, top.as_slice()));
    let mut value = entry(&token.text, logprob);
    value["top_logprobs"] = top.iter().map(|(text, logprob)| entry(text, *logprob)).collect();
    value
}

fn finite(logprob: f32) -> Value {
    logprob.max(LEAST).into()
}

/// The reason that a choice ended with this part. A choice that is cut at its maximum length has the reason `length`, with calls or
/// without.
fn reason(part: &Delta) -> Option<&'static str> {
    part.finish.map(|finish| match finish {
        FinishReason::Stop if !part.calls.is_empty() => "tool_calls",
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    })
}
