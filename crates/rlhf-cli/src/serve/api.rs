//! Requests in the form of OpenAI's HTTP interface.
//!
//! A parameter that would change the result and is not supported is an error, unless it has the value that changes nothing.

use super::error::{ApiError, QUOTED, wrong};
use super::tools::{Tools, with_parsed_calls};
use rlhf::generate::MIN_TEMPERATURE;
use rlhf::safe_text::beginning;
use rlhf::tokenizer::{MessageFault, check_message};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Most responses to the prompts of one request.
const MOST_RESPONSES: usize = 1024;
/// Most responses to one prompt.
const MOST_CHOICES: u64 = 128;
/// Most alternatives of a token.
const MOST_LOGPROBS: u64 = 20;
/// Most stop strings.
const MOST_STOPS: usize = 16;
/// Most messages of a conversation with tools: some templates write them one by one.
const MOST_MESSAGES: usize = 2048;
/// 2^53: above it, not every whole number is a double.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// Parameters that change no response.
const WITHOUT_EFFECT: [&str; 13] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    // Parameters of vLLM.
    "priority",
    "request_id",
    "cache_salt",
    "spaces_between_special_tokens",
    "include_reasoning",
];

/// The test of a value that changes nothing.
type Neutral = fn(&Value) -> bool;

/// The model that is served.
pub(super) struct Served {
    /// Its name: the last part of its folder or of its name on the hub.
    pub(super) name: String,
    /// Further names that requests may use.
    aliases: [String; 2],
    created: u64,
}

impl Served {
    /// The model at `path`, a folder or a name on the hub.
    pub(super) fn new(path: &Path) -> Self {
        let file_name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        let canonical_name = || path.canonicalize().ok()?.file_name().map(|name| name.to_string_lossy().into_owned());
        let name = file_name.or_else(canonical_name).unwrap_or_else(|| "default".into());
        Self { name, aliases: [path.display().to_string(), "default".into()], created: now() }
    }

    /// Checks the name of a request's model.
    pub(super) fn check(&self, name: &str) -> Result<(), ApiError> {
        if name == self.name || self.aliases.iter().any(|alias| alias == name) {
            return Ok(());
        }
        let message =
            format!("the model `{}` does not exist: this server has `{}`", beginning(name, QUOTED), self.name);
        Err(ApiError::no_model(message))
    }

    /// The model as an entry of the list of models.
    pub(super) fn to_json(&self) -> Value {
        json!({"id": self.name, "object": "model", "created": self.created, "owned_by": "rlhf"})
    }
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// The two ways to request responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Endpoint {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
}

/// A prompt.
#[derive(Debug, PartialEq)]
pub(super) enum Prompt {
    /// Text, as a prompt of `rlhf generate`.
    Text(String),
    /// Token ids.
    Tokens(Vec<i64>),
    /// Messages for the chat template.
    Chat(Chat),
}

/// Messages, and how the chat template writes them.
#[derive(Debug, PartialEq)]
pub(super) struct Chat {
    pub(super) messages: Vec<Value>,
    /// The messages as templates with tools read them, if there are calls or results among them.
    pub(super) with_calls: Option<Vec<Value>>,
    /// The tools that the model may call, if there are any.
    pub(super) tools: Option<Tools>,
    /// Further variables of the template.
    pub(super) variables: Map<String, Value>,
    pub(super) end: ChatEnd,
}

/// The end of the text of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChatEnd {
    /// With the generation prompt: the response is a new message.
    GenerationPrompt,
    /// Within the last message, which the response continues.
    Continued,
    /// With the last message.
    Closed,
}

/// A request for responses. Settings that it does not have are the model's.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) endpoint: Endpoint,
    /// At least one; one for the chat.
    pub(super) prompts: Vec<Prompt>,
    pub(super) max_tokens: Option<usize>,
    pub(super) temperature: Option<f64>,
    pub(super) top_p: Option<f64>,
    pub(super) top_k: Option<usize>,
    pub(super) min_p: Option<f64>,
    pub(super) repetition_penalty: Option<f64>,
    /// Responses to each prompt.
    pub(super) n: usize,
    pub(super) stop: Vec<String>,
    /// Further tokens that end a response.
    pub(super) stop_token_ids: Vec<i64>,
    /// Whether the model's own end of a text does not end a response.
    pub(super) ignore_eos: bool,
    /// Tokens before which nothing ends a response.
    pub(super) min_tokens: usize,
    pub(super) seed: Option<u64>,
    /// Number of alternatives of each token; `None` for no log-probabilities.
    pub(super) logprobs: Option<usize>,
    /// Whether a choice starts with its prompt.
    pub(super) echo: bool,
    pub(super) stream: bool,
    /// Whether a stream ends with the numbers of tokens.
    pub(super) include_usage: bool,
}

impl Request {
    /// Parses the body of a request to `endpoint` for the model `served`.
    ///
    /// # Errors
    /// If it is no JSON object; if a parameter is unknown, invalid or not supported.
    pub(super) fn parse(endpoint: Endpoint, body: &[u8], served: &Served) -> Result<Self, ApiError> {
        let body = serde_json::from_slice::<Value>(body);
        let body = body.map_err(|e| ApiError::invalid("", format!("the body is not JSON: {e}")))?;
        let Value::Object(fields) = body else {
            return Err(ApiError::invalid("", "expected a JSON object as the body"));
        };
        let mut fields = Fields(fields);
        match fields.text("model")? {
            Some(name) => served.check(&name)?,
            None => return Err(ApiError::invalid("model", "you must provide a model parameter")),
        }
        let request = Self::read(endpoint, &mut fields)?;
        fields.end()?;
        let responses = request.prompts.len().saturating_mul(request.n);
        if responses > MOST_RESPONSES {
            let message = format!("expected at most {MOST_RESPONSES} responses in all, found {responses}");
            return Err(ApiError::invalid("n", message));
        }
        Ok(request)
    }

    fn read(endpoint: Endpoint, fields: &mut Fields) -> Result<Self, ApiError> {
        let chat = endpoint == Endpoint::Chat;
        let n = fields.whole("n", 1..=MOST_CHOICES)?.unwrap_or(1);
        let stream = fields.flag("stream")?;
        let max_tokens = fields.whole("max_tokens", 0..=u64::from(u32::MAX))?;
        let max_tokens = if chat {
            fields.whole("max_completion_tokens", 1..=u64::from(u32::MAX))?.or(max_tokens)
        } else {
            max_tokens
        };
        if chat && max_tokens == Some(0) {
            return Err(ApiError::invalid("max_tokens", "`max_tokens`: expected a whole number from 1, found 0"));
        }
        let request = Self {
            endpoint,
            prompts: if chat { vec![fields.messages()?] } else { fields.prompts()? },
            max_tokens,
            temperature: fields.temperature()?,
            top_p: fields.number("top_p")?,
            top_k: fields.top_k()?,
            min_p: fields.number("min_p")?,
            repetition_penalty: fields.number("repetition_penalty")?,
            n,
            stop: fields.stop()?,
            stop_token_ids: fields.tokens("stop_token_ids")?,
            ignore_eos: fields.flag("ignore_eos")?,
            min_tokens: fields.min_tokens(max_tokens)?,
            seed: fields.seed()?,
            logprobs: if chat { fields.chat_logprobs()? } else { fields.whole("logprobs", 0..=MOST_LOGPROBS)? },
            echo: !chat && fields.flag("echo")?,
            stream,
            include_usage: fields.include_usage(stream)?,
        };
        fields.refuse_unsupported(chat, n)?;
        Ok(request)
    }
}

/// The parameters of a request that are not read yet. A parameter that is null is absent.
struct Fields(Map<String, Value>);

impl Fields {
    fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(found) => Err(wrong(name, "a string", &found)),
        }
    }

    fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        match self.take(name) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(found) => Err(wrong(name, "true or false", &found)),
        }
    }

    fn number(&mut self, name: &str) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| wrong(name, "a number", &value))
    }

    /// Logits divided by a tiny temperature would overflow: it is read as 0, greedy decoding, which is its limit.
    fn temperature(&mut self) -> Result<Option<f64>, ApiError> {
        let temperature = self.number("temperature")?;
        Ok(temperature.map(|temperature| if (0.0..MIN_TEMPERATURE).contains(&temperature) { 0.0 } else { temperature }))
    }

    /// -1 is another word for 0: all tokens.
    fn top_k(&mut self) -> Result<Option<usize>, ApiError> {
        if self.0.get("top_k").and_then(Value::as_f64) == Some(-1.0) {
            self.0.remove("top_k");
            return Ok(Some(0));
        }
        self.whole("top_k", 0..=u64::from(u32::MAX))
    }

    fn tokens(&mut self, name: &str) -> Result<Vec<i64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(Vec::new()) };
        let ids = value.as_array().and_then(|ids| ids.iter().map(Value::as_i64).collect());
        ids.ok_or_else(|| wrong(name, "a list of token ids", &value))
    }

    fn min_tokens(&mut self, most: Option<usize>) -> Result<usize, ApiError> {
        let least = self.whole("min_tokens", 0..=u64::from(u32::MAX))?.unwrap_or(0);
        match most.filter(|most| least > *most) {
            Some(most) => {
                let message = format!("`min_tokens`: expected at most the {most} of `max_tokens`, found {least}");
                Err(ApiError::invalid("min_tokens", message))
            }
            None => Ok(least),
        }
    }

    fn whole(&mut self, name: &str, within: std::ops::RangeInclusive<u64>) -> Result<Option<usize>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        // A client may write 1 as 1.0.
        let rounded = value.as_f64().filter(|number| number.fract() == 0.0 && (0.0..EXACT).contains(number));
        let number = value.as_u64().or(rounded.map(|number| number as u64)).filter(|number| within.contains(number));
        let number = number.and_then(|number| usize::try_from(number).ok());
        let expected = format!("a whole number from {} to {}", within.start(), within.end());
        number.map(Some).ok_or_else(|| wrong(name, &expected, &value))
    }

    fn seed(&mut self) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.take("seed") else { return Ok(None) };
        let seed = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
        seed.map(Some).ok_or_else(|| wrong("seed", "a whole number", &value))
    }

    fn stop(&mut self) -> Result<Vec<String>, ApiError> {
        let Some(value) = self.take("stop") else { return Ok(Vec::new()) };
        let strings = match &value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(texts) => texts.iter().map(|text| text.as_str().map(String::from)).collect(),
            _ => None,
        };
        let strings = strings.filter(|strings| strings.len() <= MOST_STOPS && !strings.iter().any(String::is_empty));
        let expected = format!("a string that is not empty, or a list of at most {MOST_STOPS} of them");
        strings.ok_or_else(|| wrong("stop", &expected, &value))
    }

    fn chat_logprobs(&mut self) -> Result<Option<usize>, ApiError> {
        let on = self.flag("logprobs")?;
        match self.whole("top_logprobs", 0..=MOST_LOGPROBS)? {
            Some(0) if !on => Ok(None),
            Some(_) if !on => Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs`: true")),
            count => Ok(on.then_some(count.unwrap_or(0))),
        }
    }

    fn include_usage(&mut self, stream: bool) -> Result<bool, ApiError> {
        let Some(value) = self.take("stream_options") else { return Ok(false) };
        if !stream {
            return Err(ApiError::invalid("stream_options", "`stream_options` needs `stream`: true"));
        }
        let are_known = |options: &Map<String, Value>| {
            options
                .keys()
                .all(|name| ["include_usage", "include_obfuscation", "continuous_usage_stats"].contains(&&**name))
                && options.get("continuous_usage_stats").is_none_or(|value| *value != true)
        };
        match value.as_object().filter(|options| are_known(options)) {
            Some(options) => Ok(options.get("include_usage").and_then(Value::as_bool).unwrap_or(false)),
            None => Err(wrong("stream_options", "an object with `include_usage`", &value)),
        }
    }

    /// The prompts of `/v1/completions`: a string, token ids, or a list of either.
    fn prompts(&mut self) -> Result<Vec<Prompt>, ApiError> {
        let expected = "a string, a list of strings, a list of token ids, or a list of such lists";
        let Some(value) = self.take("prompt") else {
            return Err(ApiError::invalid("prompt", format!("`prompt`: expected {expected}, found nothing")));
        };
        let tokens = |value: &Value| value.as_array()?.iter().map(Value::as_i64).collect::<Option<Vec<i64>>>();
        let one = |value: &Value| match value {
            Value::String(text) => Some(Prompt::Text(text.clone())),
            value => tokens(value).map(Prompt::Tokens),
        };
        let list = value.as_array().filter(|list| !list.is_empty());
        let prompts = match list {
            Some(list) if !list[0].is_number() => list.iter().map(one).collect(),
            _ => one(&value).map(|prompt| vec![prompt]),
        };
        prompts.ok_or_else(|| wrong("prompt", expected, &value))
    }

    /// The messages of `/v1/chat/completions`.
    fn messages(&mut self) -> Result<Prompt, ApiError> {
        let variables = match self.take("chat_template_kwargs") {
            None => Map::new(),
            Some(Value::Object(variables)) => variables,
            Some(found) => return Err(wrong("chat_template_kwargs", "an object", &found)),
        };
        let tools = Tools::read(self.take("tools"), self.take("tool_choice"), self.take("parallel_tool_calls"))?;
        let messages = match self.take("messages") {
            Some(Value::Array(messages)) if !messages.is_empty() => messages,
            found => return Err(wrong("messages", "a list of at least one message", &found.unwrap_or_default())),
        };
        messages.iter().enumerate().try_for_each(|(at, message)| check(at, message))?;
        let with_calls = with_parsed_calls(&messages)?;
        let last = messages.last().unwrap_or(&Value::Null);
        let end = self.chat_end(last["role"] == "assistant")?;
        if end == ChatEnd::Continued && last["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty()) {
            let message = "`messages`: expected the results of the calls in the last message after it, found none";
            return Err(ApiError::invalid("messages", message));
        }
        let is_long = messages.len() > MOST_MESSAGES && (tools.is_some() || with_calls.is_some());
        if is_long {
            let message = format!("`messages`: expected at most {MOST_MESSAGES} with tools, found {}", messages.len());
            return Err(ApiError::invalid("messages", message));
        }
        if let Some(tools) = &tools {
            tools.check_end(end == ChatEnd::GenerationPrompt, end == ChatEnd::Continued)?;
        }
        Ok(Prompt::Chat(Chat { messages, with_calls, tools, variables, end }))
    }

    /// Returns how the text of the messages ends. If the last message is the assistant's, the response continues it by default.
    fn chat_end(&mut self, is_assistants: bool) -> Result<ChatEnd, ApiError> {
        let mut flag = |name: &str| match self.0.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(_) => self.flag(name).map(Some),
        };
        let continued = flag("continue_final_message")?;
        let prompted = flag("add_generation_prompt")?;
        match (continued, prompted) {
            (Some(true), Some(true)) => {
                let message =
                    "`continue_final_message`: expected false, as `add_generation_prompt` is true, found true";
                Err(ApiError::invalid("continue_final_message", message))
            }
            (Some(true), _) => Ok(ChatEnd::Continued),
            (None, None) if is_assistants => Ok(ChatEnd::Continued),
            (_, Some(false)) => Ok(ChatEnd::Closed),
            _ => Ok(ChatEnd::GenerationPrompt),
        }
    }

    /// Removes parameters that change nothing, and refuses unsupported parameters that would change the result.
    fn refuse_unsupported(&mut self, chat: bool, n: usize) -> Result<(), ApiError> {
        WITHOUT_EFFECT.iter().for_each(|name| drop(self.take(name)));
        let zero: Neutral = |value| value.as_f64() == Some(0.0);
        let empty: Neutral = |value| {
            value.as_object().is_some_and(Map::is_empty) || value.as_array().is_some_and(Vec::is_empty) || value == ""
        };
        let no_calls: Neutral = |value| value == "none" || value == "auto";
        let off: Neutral = |value| *value == false;
        let on: Neutral = |value| *value == true;
        let common: [(&str, Neutral); 15] = [
            ("presence_penalty", zero),
            ("frequency_penalty", zero),
            ("logit_bias", empty),
            ("skip_special_tokens", on),
            ("detokenize", on),
            ("include_stop_str_in_output", off),
            ("return_tokens_as_token_ids", off),
            ("return_token_ids", off),
            ("use_beam_search", off),
            ("early_stopping", off),
            ("length_penalty", |value| value.as_f64() == Some(1.0)),
            ("allowed_token_ids", empty),
            ("bad_words", empty),
            ("logits_processors", empty),
            ("mm_processor_kwargs", empty),
        ];
        let chat_only: [(&str, Neutral); 6] = [
            ("echo", off),
            // The template writes the special tokens.
            ("add_special_tokens", off),
            ("functions", empty),
            ("function_call", no_calls),
            ("response_format", |value| value["type"] == "text"),
            ("modalities", |value| *value == json!(["text"])),
        ];
        let completions_only: [(&str, Neutral); 2] = [("suffix", empty), ("add_special_tokens", on)];
        let specific = if chat { &chat_only[..] } else { &completions_only[..] };
        for (name, is_neutral) in common.iter().chain(specific) {
            if self.take(name).is_some_and(|value| !is_neutral(&value)) {
                let hint = match *name {
                    "functions" => ": use `tools`",
                    "function_call" => ": use `tool_choice`",
                    _ => "",
                };
                return Err(ApiError::invalid(name, format!("`{name}` is not supported by this server{hint}")));
            }
        }
        match self.take("best_of") {
            Some(value) if value.as_f64() != Some(n as f64) => {
                Err(ApiError::invalid("best_of", format!("`best_of` is not supported by this server, but as n = {n}")))
            }
            _ => Ok(()),
        }
    }

    /// Checks that no parameter is left.
    fn end(self) -> Result<(), ApiError> {
        match self.0.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => {
                let name = beginning(name, QUOTED).into_owned();
                Err(ApiError::invalid(&name, format!("`{name}` is not a parameter that this server supports")))
            }
        }
    }
}

/// Checks the message at place `at`, as messages in rows of a dataset are checked.
fn check(at: usize, message: &Value) -> Result<(), ApiError> {
    let name = format!("messages[{at}]");
    let Err(fault) = check_message(message) else { return Ok(()) };
    Err(match fault {
        MessageFault::NoObject => wrong(&name, "an object with `role` and `content`", message),
        MessageFault::Role => wrong(&format!("{name}.role"), "a string", &message["role"]),
        MessageFault::Content => {
            let expected = "a string or a list of parts of type `text`";
            wrong(&format!("{name}.content"), expected, &message["content"])
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_without_role_or_text_are_named() {
        let error = |messages: Value| parse(Endpoint::Chat, json!({"messages": messages})).map(|_| ()).unwrap_err();
        let user = json!({"role": "user", "content": "a"});
        let image = json!([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]);
        for (message, param, found) in [
            (json!("a"), "messages[1]", "found \"a\""),
            (json!({"content": "a"}), "messages[1].role", "found null"),
            (
                json!({"role": "user"}),
                "messages[1].content",
                "expected a string or a list of parts of type `text`, found null",
            ),
            (json!({"role": "user", "content": 5}), "messages[1].content", "found 5"),
            (json!({"role": "user", "content": image}), "messages[1].content", "found [{"),
        ] {
            let error = error(json!([user, message]));
            assert_eq!(error["param"], param);
            let message = error["message"].as_str().unwrap();
            assert!(message.starts_with(&format!("`{param}`: ")) && message.contains(found), "{message}");
        }
        let parts = json!([{"role": "user", "content": [{"type": "text", "text": "a"}]}]);
        assert!(parse(Endpoint::Chat, json!({"messages": parts})).is_ok());
    }

    #[test]
    fn messages_of_calls_need_no_content_and_an_assistants_last_message_is_continued_unless_it_is_said_otherwise() {
        let call = json!({"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]});
        let user = json!({"role": "user", "content": "a"});
        let end = |last: &Value, more: Value| {
            let mut body = json!({"messages": [user, call, {"role": "tool", "content": {"a": 1}}, last]});
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            match parse(Endpoint::Chat, body)?.prompts.remove(0) {
                Prompt::Chat(chat) => Ok::<_, Value>(chat.end),
                _ => panic!(),
            }
        };
        let said = json!({"role": "assistant", "content": "b"});
        let (add, go_on) = ("add_generation_prompt", "continue_final_message");
        for (last, more, wanted) in [
            (&user, json!({}), ChatEnd::GenerationPrompt),
            (&said, json!({}), ChatEnd::Continued),
            (&said, json!({add: false, go_on: true}), ChatEnd::Continued),
            (&said, json!({add: true}), ChatEnd::GenerationPrompt),
            (&said, json!({go_on: false}), ChatEnd::GenerationPrompt),
            (&said, json!({add: false}), ChatEnd::Closed),
            (&user, json!({go_on: true}), ChatEnd::Continued),
        ] {
            assert_eq!(end(last, more.clone()).unwrap(), wanted, "{more}");
        }
        assert_eq!(end(&said, json!({add: true, go_on: true})).unwrap_err()["param"], go_on);
    }

    #[test]
    fn messages_and_tools_of_any_form_are_read_or_refused_in_one_line() {
        let odd =
            [json!(null), json!(5), json!("a"), json!("{"), json!([]), json!([[]]), json!({}), json!({"function": []})];
        let call = json!({"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}});
        let tool = json!({"type": "function", "function": {"name": "f", "description": "a", "parameters": {"a": 1}}});
        let said = json!({"role": "assistant", "content": "a", "tool_calls": [call]});
        let whole = json!({
            "messages": [said, {"role": "tool", "tool_call_id": "x", "name": "f", "content": "a"}],
            "tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": true,
        });
        parse(Endpoint::Chat, whole.clone()).unwrap();
        /// All places of values in `value`.
        fn places(value: &Value, place: &str, all: &mut Vec<String>) {
            all.push(place.to_string());
            match value {
                Value::Array(items) => {
                    items.iter().enumerate().for_each(|(at, item)| places(item, &format!("{place}/{at}"), all));
                }
                Value::Object(fields) => {
                    fields.iter().for_each(|(name, item)| places(item, &format!("{place}/{name}"), all));
                }
                _ => {}
            }
        }
        let mut all = Vec::new();
        places(&whole, "", &mut all);
        assert!(all.len() > 25, "{all:?}");
        for place in all.iter().filter(|place| !place.is_empty()) {
            for value in &odd {
                let mut body = whole.clone();
                *body.pointer_mut(place).unwrap() = value.clone();
                if let Err(error) = parse(Endpoint::Chat, body) {
                    assert_eq!(error["message"].as_str().unwrap().lines().count(), 1, "{place}: {error}");
                }
            }
        }
    }

    fn served() -> Served {
        Served::new(Path::new("runs/ppo"))
    }

    fn parse(endpoint: Endpoint, mut body: Value) -> Result<Request, Value> {
        body["model"] = "ppo".into();
        Request::parse(endpoint, body.to_string().as_bytes(), &served())
            .map_err(|error| error.to_json()["error"].clone())
    }

    #[test]
    fn prompts_are_texts_or_tokens_one_or_several() {
        for (prompt, expected) in [
            (json!("a"), vec![Prompt::Text("a".into())]),
            (json!(["a", "b"]), vec![Prompt::Text("a".into()), Prompt::Text("b".into())]),
            (json!([5, 6]), vec![Prompt::Tokens(vec![5, 6])]),
            (json!([[5, 6], [7]]), vec![Prompt::Tokens(vec![5, 6]), Prompt::Tokens(vec![7])]),
        ] {
            assert_eq!(parse(Endpoint::Completions, json!({"prompt": prompt})).unwrap().prompts, expected);
        }
        for prompt in [json!(null), json!(5), json!({}), json!([5, "a"]), json!([[5], ["a"]]), json!([1.5])] {
            let error = parse(Endpoint::Completions, json!({"prompt": prompt})).unwrap_err();
            assert_eq!(error["param"], "prompt", "{error}");
        }
    }

    #[test]
    fn an_unsupported_parameter_is_refused_unless_its_value_changes_no_result() {
        let messages = json!([{"role": "user", "content": "a"}]);
        for (name, neutral, other) in [
            ("presence_penalty", json!(0), json!(0.5)),
            ("frequency_penalty", json!(0.0), json!(1)),
            ("logit_bias", json!({}), json!({"5": 1})),
            ("functions", json!([]), json!([{"name": "f"}])),
            ("function_call", json!("none"), json!({"name": "f"})),
            ("parallel_tool_calls", json!(true), json!(1)),
            ("tool_choice", json!("none"), json!("required")),
            ("response_format", json!({"type": "text"}), json!({"type": "json_object"})),
            ("modalities", json!(["text"]), json!(["text", "audio"])),
            ("n", json!(2), json!(0)),
            ("stop", json!(["a", "b"]), json!("")),
            ("seed", json!(-1), json!("a")),
            ("top_logprobs", json!(0), json!(1)),
            ("max_completion_tokens", json!(1), json!(0)),
            ("max_tokens", json!(1), json!(0)),
            ("stream", json!(false), json!(1)),
            ("stream_options", json!(null), json!({"include_usage": true})),
            ("reasoning_effort", json!(null), json!("low")),
            ("echo", json!(null), json!(true)),
            ("echo", json!(false), json!(true)),
            ("skip_special_tokens", json!(true), json!(false)),
            ("ignore_eos", json!(false), json!(1)),
            ("min_tokens", json!(0), json!(-1)),
            ("min_tokens", json!(3.0), json!(0.5)),
            ("stop_token_ids", json!([]), json!("a")),
            ("stop_token_ids", json!([5]), json!([0.5])),
            ("n", json!(1.0), json!(1.5)),
            ("top_k", json!(-1.0), json!(-2)),
            ("include_stop_str_in_output", json!(false), json!(true)),
            ("use_beam_search", json!(false), json!(true)),
            ("length_penalty", json!(1), json!(2)),
            ("bad_words", json!([]), json!(["a"])),
            ("add_special_tokens", json!(false), json!(true)),
            ("typo", json!(null), json!(1)),
        ] {
            let accepted = parse(Endpoint::Chat, json!({"messages": messages, name: neutral, "user": "me"}));
            assert!(accepted.is_ok(), "{name}: {accepted:?}");
            let error = parse(Endpoint::Chat, json!({"messages": messages, name: other})).unwrap_err();
            assert_eq!((&error["param"], &error["type"]), (&json!(name), &json!("invalid_request_error")), "{error}");
        }
        for (name, neutral, other) in [
            ("suffix", json!(""), json!("b")),
            ("best_of", json!(1), json!(2)),
            ("logprobs", json!(0), json!(true)),
            ("max_tokens", json!(0), json!(-1)),
            ("messages", json!(null), json!([])),
        ] {
            assert!(parse(Endpoint::Completions, json!({"prompt": "a", name: neutral})).is_ok(), "{name}");
            let error = parse(Endpoint::Completions, json!({"prompt": "a", name: other})).unwrap_err();
            assert_eq!(error["param"], name, "{error}");
        }
    }

    #[test]
    fn a_model_has_the_name_of_its_folder() {
        let served = served();
        for name in ["ppo", "runs/ppo", "default"] {
            served.check(name).unwrap();
        }
        let error = served.check("gpt-4").unwrap_err();
        assert_eq!((error.status(), &error.to_json()["error"]["code"]), (404, &json!("model_not_found")));
        assert_eq!(Served::new(Path::new("org/model")).name, "model");
        assert_ne!(Served::new(Path::new(".")).name, ".");
    }
}
