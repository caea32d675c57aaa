//! The assistant's turns in a rendered conversation, for templates without `{% generation %}` blocks.

use super::chat::{ChatTemplate, unused_mark};
use rlhf_base::{Error, Result};
use serde_json::{Map, Value, json};
use std::ops::Range;

/// Most bytes of a template's own text that may depend on the content of a turn, as an empty `<think>` block does.
const MOST_DEPENDENT: usize = 64;

/// Starts and ends of the marks that close a turn.
const MARKS: [(&str, &str); 3] = [("<|", "|>"), ("<", ">"), ("[", "]")];

/// A conversation and the template that renders it.
pub(super) struct Turns<'a> {
    pub(super) template: &'a ChatTemplate,
    pub(super) messages: &'a [Value],
    /// Variables of the template.
    pub(super) variables: Map<String, Value>,
}

impl Turns<'_> {
    /// Renders the conversation. Returns its text and the byte ranges of the assistant's turns in it: each from the end of the generation
    /// prompt to the end of the turn. A turn that the template leaves out has no range.
    ///
    /// # Errors
    /// If the template fails, or the place of a turn cannot be found.
    pub(super) fn find(&self) -> Result<(String, Vec<Range<usize>>)> {
        let text = self.render(self.messages, false)?;
        let mut spans: Vec<Range<usize>> = Vec::new();
        for (at, _) in self.messages.iter().enumerate().filter(|(_, message)| message["role"] == "assistant") {
            let begin = spans.last().map_or(0, |span| span.end);
            let span = match self.by_beginnings(&text, at) {
                None => self.by_marks(&text, at, begin)?,
                span => span,
            };
            spans.extend(span.filter(|span| span.start >= begin && !span.is_empty()));
        }
        Ok((text, spans))
    }

    fn render(&self, messages: &[Value], add_generation_prompt: bool) -> Result<String> {
        self.template.render(messages, add_generation_prompt, self.variables.clone())
    }

    /// Returns the place of turn `at`, if the text before it and the text with it are the same whether or not other messages follow.
    fn by_beginnings(&self, text: &str, at: usize) -> Option<Range<usize>> {
        // A template may refuse a part of a conversation.
        let before = self.render(&self.messages[..at], true).ok()?;
        let after = self.render(&self.messages[..=at], false).ok()?;
        (after.starts_with(&before) && text.starts_with(&after)).then_some(before.len()..after.len())
    }

    /// Returns the place of turn `at` in `text`, the whole conversation, from a rendering of it with a mark as the content of that turn; `None`
    /// if the template leaves the turn out. It is after `begin`.
    fn by_marks(&self, text: &str, at: usize, begin: usize) -> Result<Option<Range<usize>>> {
        let mark = unused_mark(self.messages);
        let mut messages = self.messages.to_vec();
        messages[at]["content"] = mark.as_str().into();
        let marked = self.render(&messages, false).map_err(|e| self.not_found(at, &e.to_string()))?;
        let Some(first) = marked.find(&mark) else { return Ok(None) };
        let (head, tail) = (&marked[..first], marked.rsplit_once(&mark).map_or("", |(_, tail)| tail));
        let start = shared_start(text, head);
        let end = text.len() - shared_end(&text[start..], tail);
        let differ = (head.len() - start).max(tail.len() - (text.len() - end));
        if differ > MOST_DEPENDENT || start < begin {
            return Err(self.not_found(at, "the text around it depends on its content"));
        }
        let alone = self.render(&messages[..=at], false).map_err(|e| self.not_found(at, &e.to_string()))?;
        let closing = alone.rsplit_once(&mark).map_or("", |(_, closing)| closing);
        let shared = shared_start(&text[end..], closing);
        // If the last turn is closed differently, the two closings may share the beginning of a mark.
        let end = match &closing[..shared] {
            all if all.len() == closing.len() => end + all.len(),
            part => {
                let part = part.trim_end_matches(['<', '[', '{', '(', '|']).len();
                end + part + self.other_closing(&text[end + part..], &closing[part..], at, &messages).unwrap_or(0)
            }
        };
        Ok(Some(self.after_generation_prompt(text, at, begin..start)..end))
    }

    /// Returns the length of the mark at the start of `rest`, the text after turn `at`, that stands in place of `closing`, the mark that closes this
    /// turn if it is the last one: such as `<|end|>` for `<|return|>` in gpt-oss's template. In `messages` the turn's content is a mark.
    fn other_closing(&self, rest: &str, closing: &str, at: usize, messages: &[Value]) -> Option<usize> {
        let last = closing.trim();
        let (_, end) = MARKS.into_iter().find(|(start, end)| last.starts_with(start) && last.ends_with(end))?;
        let length = rest.find(end)? + end.len();
        // The mark belongs to the turn if it is there whoever speaks next.
        let mark = messages[at]["content"].as_str()?;
        let next = messages.get(at + 1)?["role"].as_str()?;
        let role = if next == "user" { "system" } else { "user" };
        let mut others = messages[..=at].to_vec();
        others.push(json!({"role": role, "content": "a"}));
        let other = self.render(&others, false).ok()?;
        let (_, after) = other.rsplit_once(mark)?;
        let is_one = last.find(end) == Some(last.len() - end.len());
        (is_one && shared_start(rest, after) >= length).then_some(length)
    }

    /// Returns where turn `at` starts in `text`: after the generation prompt, or as much of it as there is, in `within`, which ends with the
    /// content; at the content if there is none.
    fn after_generation_prompt(&self, text: &str, at: usize, within: Range<usize>) -> usize {
        let user = [super::user_message("a")];
        let prompt = |messages: &[Value]| -> Option<String> {
            let (open, closed) = (self.render(messages, true).ok()?, self.render(messages, false).ok()?);
            open.strip_prefix(&closed).map(String::from)
        };
        let before = &self.messages[..at];
        let prompt = prompt(before).or_else(|| prompt(&user)).unwrap_or_default();
        if prompt.is_empty() {
            let closed = self
                .render(before, false)
                .ok()
                .map_or(within.end, |closed| if text.starts_with(&closed) { closed.len() } else { within.end });
            return closed.clamp(within.start, within.end);
        }
        // A template may leave out what its generation prompt adds for the last turn, such as `<think>`.
        let mut lengths = (prompt.len().div_ceil(3)..=prompt.len()).rev().filter(|len| prompt.is_char_boundary(*len));
        let region = &text[within.clone()];
        lengths.find_map(|len| region.rfind(&prompt[..len]).map(|at| within.start + at + len)).unwrap_or(within.end)
    }

    fn not_found(&self, at: usize, why: &str) -> Error {
        Error::Run(format!(
            "assistant_only_loss: the place of message {} in the text of {} cannot be found: {why}; a copy of the template with \
             {{% generation %}} blocks around the assistant's text, given as --chat_template_path, marks it",
            at + 1,
            self.template.file().display()
        ))
    }
}

/// Returns the number of bytes that two texts share at their start.
pub(super) fn shared_start(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}

/// Returns the number of bytes that two texts share at their end.
fn shared_end(a: &str, b: &str) -> usize {
    a.chars().rev().zip(b.chars().rev()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(source: &str, messages: &Value) -> Result<Vec<String>> {
        let template = ChatTemplate::new("t".into(), source);
        let messages = messages.as_array().unwrap();
        let (text, spans) = Turns { template: &template, messages, variables: Map::new() }.find()?;
        Ok(spans.into_iter().map(|span| text[span].to_string()).collect())
    }

    fn turns(contents: &[&str]) -> Value {
        let role = |at: usize| if at.is_multiple_of(2) { "user" } else { "assistant" };
        contents.iter().enumerate().map(|(at, text)| json!({"role": role(at), "content": text})).collect()
    }

    /// As Qwen3's: reasoning is written in the last turn only, and there also where it is empty.
    const LAST_REASONS: &str = "{% for m in messages %}{% set parts = m.content.split('</think>') %}<{{ m.role }}>\
        {% if m.role == 'assistant' and loop.last %}<think>\n{{ parts[0].replace('<think>', '') | trim if parts | length > 1 else '' }}\n</think>\n\n{% endif %}\
        {{ parts[-1] | trim }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

    #[test]
    fn turns_are_found_in_a_template_that_writes_them_otherwise_when_others_follow() {
        assert_eq!(
            found(LAST_REASONS, &turns(&["a", "b", "c", "b", "e", "d"])).unwrap(),
            ["b<end>\n", "b<end>\n", "<think>\n\n</think>\n\nd<end>\n"]
        );
        let reasoned = turns(&["a", "<think>why</think>b", "c", "<think>so</think>d"]);
        assert_eq!(found(LAST_REASONS, &reasoned).unwrap(), ["b<end>\n", "<think>\nso\n</think>\n\nd<end>\n"]);
        // The generation prompt has a beginning of reasoning that earlier turns do not have, as DeepSeek-R1's.
        let opened = LAST_REASONS.replace("<assistant>{% endif %}", "<assistant><think>\n{% endif %}");
        assert_eq!(found(&opened, &turns(&["a", "b", "c", "d"])).unwrap(), ["b<end>\n", "\n</think>\n\nd<end>\n"]);
        // A turn without a generation prompt, and an end for the last one alone.
        let plain = "{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}";
        assert_eq!(found(plain, &turns(&["a", "b", "c", "b"])).unwrap(), ["b", "b!"]);
    }

    #[test]
    fn a_turn_that_is_closed_otherwise_when_others_follow_has_that_mark() {
        let source = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}{% if m.role == 'assistant' and loop.last %}\
            <|return|>{% else %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}";
        let messages = turns(&["a", "b", "c", "d"]);
        assert_eq!(found(source, &messages).unwrap(), ["<|message|>b<|end|>", "<|message|>d<|return|>"]);
        // The mark of who speaks next is no end.
        let open = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if loop.last %}<|return|>{% endif %}{% endfor %}\
            {% if add_generation_prompt %}<|assistant|>{% endif %}";
        assert_eq!(found(open, &messages).unwrap(), ["b", "d<|return|>"]);
    }

    #[test]
    fn turns_of_calls_and_turns_that_begin_a_conversation_are_found() {
        let source = "{% for m in messages %}<{{ m.role }}>{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls %}\
            [{{ c.name }}]{% endfor %}<end>{% if loop.last %}<last>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
        let call = json!({"role": "assistant", "content": null, "tool_calls": [{"name": "f"}]});
        let messages = json!([{"role": "user", "content": "a"}, call, {"role": "tool", "content": "1"}, {"role": "assistant", "content": "b"}]);
        assert_eq!(found(source, &messages).unwrap(), ["[f]<end>", "b<end><last>"]);
        let begun = json!([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]);
        assert_eq!(found(source, &begun).unwrap(), ["a<end>"]);
        assert_eq!(found("{{ messages[0].role + messages[0].content }}", &begun).unwrap(), ["a"]);
    }

    #[test]
    fn a_turn_whose_place_depends_on_its_content_is_an_error_with_the_remedy() {
        let source = "{% for m in messages %}{% if m.content | length > 2 %}{{ raise_exception('too long') }}{% endif %}{{ m.content }}{{ loop.last }}{% endfor %}";
        let error = found(source, &turns(&["a", "b", "c", "d"])).unwrap_err().to_string();
        assert!(
            error.contains("message 2") && error.contains("too long") && error.contains("--chat_template_path"),
            "{error}"
        );
        assert!(found("{{ messages[0].content }}", &turns(&["a", "b"])).unwrap().is_empty());
    }
}
