//! The text of tool use: prompts with tools, calls in what a model sampled, and the tokens between two turns.
//!
//! Sampled ids are never decoded and encoded again: a conversation continues with [`ToolTemplate::suffix`], which is the difference of two
//! renderings, as in TRL's `GRPOTrainer`.

mod cast;
mod form;
mod parameters;
mod read;
mod render;
mod stream;

use super::turns::shared_start;
use super::{TextStream, Tokenizer};
use form::{Form, REASONING_TAGS};
use render::{End, Renderer};
use rlhf_base::{Error, Result};
use serde_json::{Map, Value, json};
use std::sync::Arc;
pub use stream::TurnStream;

/// A text for the places of a conversation that do not matter, as in TRL.
const DUMMY: &str = "dummy";

/// Texts that no template contains: where they appear in a rendering shows what the template writes.
const SENTINELS: [&str; 4] = ["tool_name_5d1c", "tool_key_82fe", "tool_value_b07a", "tool_result_39c4"];

/// A call of a tool that a model has written.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// Name of the tool, which may be none of those that there are.
    pub name: String,
    /// Arguments by name, cast by the tool's JSON schema; empty where `fault` is set.
    pub arguments: Map<String, Value>,
    /// The reason why this call fails without being run: its arguments are no object.
    pub fault: Option<String>,
}

/// A turn of the model, read from its sampled ids.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    /// The assistant's message, as chat templates and reward functions get it: `role`, `content`, and where there are any, `reasoning_content`
    /// and `tool_calls`.
    pub message: Value,
    /// The calls of the turn in their order.
    pub calls: Vec<ToolCall>,
    /// The fault of a turn whose calls cannot be read; its message is then all of its text, without calls.
    pub malformed: Option<String>,
}

/// The chat template of a tokenizer for conversations with tools. Copies share it.
///
/// ```no_run
/// use rlhf_lm::tokenizer::{Tokenizer, ToolTemplate};
/// use serde_json::json;
/// # fn main() -> rlhf_base::Result<()> {
/// let tokenizer = Tokenizer::from_pretrained("Qwen3-0.6B".as_ref())?;
/// let template = ToolTemplate::new(&tokenizer)?;
/// let tools = [json!({"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}})];
/// let mut ids = template.prompt(&[json!({"role": "user", "content": "What time is it?"})], &tools)?;
/// # let sampled: Vec<i64> = Vec::new();
/// let turn = template.read_turn(&sampled, &tools)?;
/// if let Some(call) = turn.calls.first() {
///     ids.extend(sampled);
///     ids.extend(template.suffix(&[json!({"role": "tool", "name": call.name, "content": "12:30"})])?);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct ToolTemplate {
    renderer: Renderer,
    form: Arc<Form>,
}

impl ToolTemplate {
    /// Finds out how the chat template of `tokenizer` writes calls and results: the template named `tool_use`, or else `default`.
    ///
    /// Some templates, such as Qwen3's, leave out the reasoning of earlier turns. With these, each turn is rendered as if it were the last one, so
    /// that later turns do not change the text before them; TRL's training templates have the same effect.
    ///
    /// # Errors
    /// If there is no template; if it does not write calls or results, writes calls in a form that is not known, or writes earlier turns otherwise
    /// when a result follows.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self> {
        tokenizer.require_inner()?;
        let mut renderer = Renderer::new(tokenizer)?;
        let form = Arc::new(Form::find(&mut renderer)?);
        let mut template = Self { renderer, form };
        template.check_results()?;
        if !template.preserves_prefixes()? {
            template.renderer.by_turns = true;
            if !template.leaves_out_only()? || !template.preserves_prefixes()? {
                return Err(template.renderer.invalid(
                    "expected a chat template that writes a call the same when its result follows, found one that writes it otherwise",
                ));
            }
        }
        template.suffix(&[tool_result(DUMMY, DUMMY)])?;
        Ok(template)
    }

    /// Token ids of the conversation `messages` with the assistant's header at the end. `tools` are their JSON schemas, as transformers'
    /// `get_json_schema` returns them; without any, the template has none.
    ///
    /// # Errors
    /// If the template rejects the messages.
    pub fn prompt(&self, messages: &[Value], tools: &[Value]) -> Result<Vec<i64>> {
        self.encode(messages, tools, End::Prompt)
    }

    /// As [`ToolTemplate::prompt`], up to the end of the last message's content, which the model continues: transformers'
    /// `continue_final_message`.
    ///
    /// # Errors
    /// As [`ToolTemplate::prompt`]; if the last message has no text, or the template does not write it as it is.
    pub fn continued_prompt(&self, messages: &[Value], tools: &[Value]) -> Result<Vec<i64>> {
        self.encode(messages, tools, End::Continued)
    }

    /// The text of [`ToolTemplate::prompt`].
    ///
    /// # Errors
    /// As [`ToolTemplate::prompt`].
    pub fn prompt_text(&self, messages: &[Value], tools: &[Value]) -> Result<String> {
        self.renderer.text(messages, tools, End::Prompt)
    }

    /// As [`ToolTemplate::prompt`], up to the arguments of a call of the tool `name`, or without a name up to a call's name: the model must call.
    /// Also returns the number of bytes of the call that the text ends with.
    ///
    /// # Errors
    /// As [`ToolTemplate::prompt`]; if the template writes the arguments of a call before its name.
    pub fn calling_prompt(&self, messages: &[Value], tools: &[Value], name: Option<&str>) -> Result<(Vec<i64>, usize)> {
        let Some([before, after]) = &self.form.start else {
            return Err(self
                .renderer
                .invalid("expected a chat template that writes the name of a call before its arguments"));
        };
        let mut text = self.prompt_text(messages, tools)?;
        let [open, close] = REASONING_TAGS;
        if self.beginning_in(&text).rsplit_once(open).is_some_and(|(_, reasoning)| !reasoning.contains(close)) {
            text += &format!("\n{close}\n\n");
        }
        let name = name.map(|name| Value::from(name).to_string());
        // Without its quotes, of which the first is in `before`.
        let rest = name.map_or(String::new(), |name| format!("{}{after}", &name[1..name.len() - 1]));
        let call = format!("{before}{rest}");
        Ok((self.renderer.tokenizer.encode_rendered(&format!("{text}{call}"))?, call.len()))
    }

    /// Text of a turn after `prompt` as its tokens are sampled, for [`ToolTemplate::turn`]: special tokens are not in it, except for tags of
    /// calls and of reasoning.
    ///
    /// # Errors
    /// If the tags cannot be encoded.
    pub fn text_stream(&self, prompt: &[i64]) -> Result<TextStream<'_>> {
        let tokenizer = &self.renderer.tokenizer;
        let calls = self.form.calls.tags().unwrap_or_default();
        let tags = [calls, REASONING_TAGS].as_flattened().concat();
        let mut kept = tokenizer.encode_verbatim(&tags)?;
        // Drops an unknown token, which is no tag.
        kept.retain(|&id| tokenizer.decode_verbatim(&[id]).is_ok_and(|text| tags.contains(text.trim())));
        Ok(tokenizer.stream_with(prompt, kept))
    }

    /// The beginning of the turn that a `prompt` ends with: a block of reasoning, or the text of [`ToolTemplate::continued_prompt`].
    ///
    /// # Errors
    /// If the ids cannot be decoded.
    pub fn beginning(&self, prompt: &[i64]) -> Result<String> {
        Ok(self.beginning_in(&self.renderer.tokenizer.decode_verbatim(prompt)?).to_string())
    }

    fn beginning_in<'p>(&self, prompt: &'p str) -> &'p str {
        let header = &self.form.header;
        let start = prompt.rfind(header.as_str()).map_or(0, |at| at + header.len());
        &prompt[start..]
    }

    /// Starts to read a turn while it is sampled, with this beginning. The last `shown` bytes of the beginning are returned with the text of the
    /// turn: for example a call that [`ToolTemplate::calling_prompt`] has begun.
    pub fn turn<'t>(&'t self, beginning: String, shown: usize, tools: &'t [Value]) -> TurnStream<'t> {
        TurnStream::new(self, tools, beginning, shown)
    }

    /// The template with further variables, such as `enable_thinking`.
    #[must_use]
    pub fn with_variables(&self, variables: &Map<String, Value>) -> Self {
        let mut template = self.clone();
        template.renderer.variables.extend(variables.clone());
        template
    }

    /// Reads a turn that the model has sampled after [`ToolTemplate::prompt`] or [`ToolTemplate::suffix`], as TRL's `parse_response` does.
    ///
    /// Several calls may be in a turn. A call whose closing tag is missing at the end of the turn counts if its JSON is whole; one call that
    /// cannot be read makes the whole turn plain text. Arguments that are texts are cast by the schemas of `tools`.
    ///
    /// # Errors
    /// If the ids cannot be decoded.
    pub fn read_turn(&self, tokens: &[i64], tools: &[Value]) -> Result<Turn> {
        self.read(&self.form.opening, tokens, tools)
    }

    /// As [`ToolTemplate::read_turn`], after a `prompt` that ends with a beginning of the turn, such as that of
    /// [`ToolTemplate::continued_prompt`]; the beginning is a part of the message.
    ///
    /// # Errors
    /// If the ids cannot be decoded.
    pub fn read_continued(&self, prompt: &[i64], tokens: &[i64], tools: &[Value]) -> Result<Turn> {
        self.read(&self.beginning(prompt)?, tokens, tools)
    }

    fn read(&self, opening: &str, tokens: &[i64], tools: &[Value]) -> Result<Turn> {
        let tokenizer = &self.renderer.tokenizer;
        let text = format!("{opening}{}", tokenizer.decode_verbatim(tokens)?);
        Ok(match read::turn(&self.form, &text, tools) {
            Ok((message, calls)) => Turn { message, calls, malformed: None },
            Err(fault) => Turn {
                message: json!({"role": "assistant", "content": tokenizer.decode(tokens)?}),
                calls: Vec::new(),
                malformed: Some(fault),
            },
        })
    }

    /// Token ids between a turn that has been sampled, with its end-of-turn token, and the model's next turn: `messages`, which are the results of
    /// its calls (role `tool`, with `name` and `content`) or a user's next message, and the assistant's header.
    ///
    /// They are what the ids of a short conversation with `messages` have beyond the ids of the same conversation without them. The latter are cut
    /// after their last end-of-turn token, so the result begins with the text after that token, a line break in most templates.
    ///
    /// # Errors
    /// If the template rejects the messages; if the one's ids are not a beginning of the other's.
    pub fn suffix(&self, messages: &[Value]) -> Result<Vec<i64>> {
        let Some(first) = messages.first() else {
            return Err(Error::Run("a suffix between two turns: expected at least one message, found none".into()));
        };
        let user = super::user_message(DUMMY);
        let said = match first["role"].as_str() {
            Some("tool") => calling(first["name"].as_str().unwrap_or(DUMMY), &json!({})),
            _ => json!({"role": "assistant", "content": DUMMY}),
        };
        let mut before = self.encode(&[user.clone(), said.clone()], &[], End::Closed)?;
        let all = self.encode(&[&[user, said], messages].concat(), &[], End::Prompt)?;
        let ends = self.renderer.tokenizer.eos_ids();
        if let Some(last) = before.iter().rposition(|id| ends.contains(id)) {
            before.truncate(last + 1);
        }
        match all.strip_prefix(before.as_slice()) {
            Some(suffix) => Ok(suffix.to_vec()),
            None => Err(self.renderer.invalid(
                "expected a chat template that writes a turn the same when a message follows it, found one that writes it otherwise",
            )),
        }
    }

    /// Whether each turn is rendered as if it were the last one, because the chat template writes a turn differently when another one follows.
    pub fn writes_turns_apart(&self) -> bool {
        self.renderer.by_turns
    }

    fn encode(&self, messages: &[Value], tools: &[Value], end: End) -> Result<Vec<i64>> {
        self.renderer.tokenizer.encode_rendered(&self.renderer.text(messages, tools, end)?)
    }

    /// Checks that the template writes a call and its result.
    fn check_results(&self) -> Result<()> {
        let [name, key, value, result] = SENTINELS;
        let messages = [super::user_message(DUMMY), calling(name, &json!({key: value})), tool_result(name, result)];
        let text = self.renderer.text(&messages, &[], End::Closed)?;
        match SENTINELS.iter().find(|sentinel| !text.contains(**sentinel)) {
            None => Ok(()),
            Some(missing) => {
                let part = if *missing == result { "the results of tools" } else { "the assistant's tool calls" };
                Err(self
                    .renderer
                    .invalid(&format!("expected a chat template that writes {part}, found one that leaves them out")))
            }
        }
    }

    /// Whether the ids of a conversation that ends with a call are the beginning of its ids with the call's result: TRL's
    /// `is_chat_template_prefix_preserving`.
    fn preserves_prefixes(&self) -> Result<bool> {
        let messages = [super::user_message(DUMMY), calling(DUMMY, &json!({})), tool_result(DUMMY, DUMMY)];
        let before = self.encode(&messages[..2], &[], End::Closed)?;
        Ok(self.encode(&messages, &[], End::Prompt)?.starts_with(&before))
    }

    /// Whether turns that are rendered as if each were the last one differ from the template's usual text only in one part that the latter leaves
    /// out, and in nothing if the turn has reasoning.
    fn leaves_out_only(&self) -> Result<bool> {
        let [name, key, value, result] = SENTINELS;
        let mut at_once = self.renderer.clone();
        at_once.by_turns = false;
        let mut call = calling(name, &json!({key: value}));
        let mut texts = |reasoning: Option<&str>| -> Result<(String, String)> {
            if let Some(reasoning) = reasoning {
                call["reasoning_content"] = reasoning.into();
            }
            let messages = [super::user_message(DUMMY), call.clone(), tool_result(name, result)];
            Ok((self.renderer.text(&messages, &[], End::Prompt)?, at_once.text(&messages, &[], End::Prompt)?))
        };
        let (whole, shorter) = texts(None)?;
        let start = shared_start(&whole, &shorter);
        let is_part = whole.len() > shorter.len() && whole.ends_with(&shorter[start..]);
        let (reasoned, original) = texts(Some("why"))?;
        Ok(is_part && reasoned == original)
    }
}

/// The assistant's message that calls the tool `name`.
fn calling(name: &str, arguments: &Value) -> Value {
    let call = json!({"type": "function", "function": {"name": name, "arguments": arguments}});
    json!({"role": "assistant", "content": "", "tool_calls": [call]})
}

/// The message with a tool's result.
fn tool_result(name: &str, content: &str) -> Value {
    json!({"role": "tool", "name": name, "content": content})
}

/// A text for an error: in one line and short.
fn shown(text: &str) -> String {
    let mut short: String = text.chars().take(80).collect();
    if short.len() < text.len() {
        short.push('\u{2026}');
    }
    format!("{short:?}")
}

#[cfg(test)]
mod tests;
