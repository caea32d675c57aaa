//! A turn while it is sampled: its text as far as no call can begin in it, and at its end the calls.

use super::form::{PYTHON_TAG, REASONING_TAGS};
use super::read::{self, Region, bare_start, literal, stripped, without_end};
use super::{ToolTemplate, Turn};
use crate::tokenizer::python::is_space;
use rlhf_base::Result;
use serde_json::{Value, json};

/// A turn while it is sampled. Made by [`ToolTemplate::turn`].
///
/// Text is returned as it comes, reasoning with its tags included, up to the first text that may be the start of a call. All that follows is
/// held back until the turn ends: a call that cannot be read makes it plain text.
#[derive(Debug, Clone)]
pub struct TurnStream<'t> {
    template: &'t ToolTemplate,
    tools: &'t [Value],
    /// The text of the turn, with its beginning in the prompt.
    text: String,
    /// Start of the text that is returned.
    begun: usize,
    /// End of the text that has been returned.
    shown: usize,
    /// End of the text in which no call begins.
    plain: usize,
    /// Whether a block of reasoning is open at `plain`.
    reasons: bool,
    /// Whether a call begins at `plain`.
    calls: bool,
}

/// The place of a mark in a text, from its start.
enum Place {
    /// All of it: where it starts and ends.
    Whole(usize, usize),
    /// The text ends within it.
    Part(usize),
}

impl Place {
    fn start(&self) -> usize {
        match self {
            Self::Whole(start, _) | Self::Part(start) => *start,
        }
    }
}

impl<'t> TurnStream<'t> {
    /// A turn with a `beginning`, of which the last `shown` bytes are returned too.
    pub(super) fn new(template: &'t ToolTemplate, tools: &'t [Value], beginning: String, shown: usize) -> Self {
        let mut begun = beginning.len().saturating_sub(shown);
        while !beginning.is_char_boundary(begun) {
            begun -= 1;
        }
        let mut turn =
            Self { template, tools, text: beginning, begun, shown: begun, plain: 0, reasons: false, calls: false };
        turn.advance();
        turn
    }

    /// Whether text is held back.
    pub fn holds_text(&self) -> bool {
        self.shown < self.text.len()
    }

    /// Appends text that was sampled. Returns the text that is no part of a call.
    pub fn push(&mut self, text: &str) -> String {
        self.text.push_str(text);
        self.advance();
        // Spaces before a call are no part of the content.
        let end = self.text[..self.plain].trim_end_matches(is_space).len().max(self.shown);
        let start = std::mem::replace(&mut self.shown, end);
        self.text[start..end].to_string()
    }

    /// Ends the turn as plain text; returns the rest of the text.
    pub fn into_text(mut self) -> String {
        self.text.split_off(self.shown)
    }

    /// Ends the turn after the token `last`. Returns the rest of its text without calls, and the turn, as [`ToolTemplate::read_turn`] reads it. A
    /// turn whose last token is none that ends a text was cut: its last call is text, unless it is whole.
    ///
    /// # Errors
    /// If the token cannot be decoded.
    pub fn finish(mut self, last: Option<i64>) -> Result<(String, Turn)> {
        let tokenizer = &self.template.renderer.tokenizer;
        // It shows whether the turn was ended, and is not in the text.
        let ended = last.filter(|id| tokenizer.eos_ids().contains(id));
        let end = ended.filter(|&id| tokenizer.is_special(id));
        let end = end.map_or(Ok(String::new()), |id| tokenizer.decode_verbatim(&[id]))?;
        let len = self.text.len();
        self.text.push_str(&end);
        let form = &self.template.form;
        let cut = if ended.is_some() { None } else { read::cut_call(form, &self.text) };
        let (whole, cut) = self.text.split_at(cut.unwrap_or(self.text.len()));
        Ok(match read::turn(form, whole, self.tools) {
            Ok((mut message, calls)) => {
                if !cut.is_empty() {
                    let content = message["content"].as_str().unwrap_or_default();
                    message["content"] = format!("{content}{}{cut}", if content.is_empty() { "" } else { "\n" }).into();
                }
                let is_text = calls.is_empty();
                let rest = if is_text { self.text[self.shown..len].into() } else { self.beside_calls(whole, cut) };
                (rest, Turn { message, calls, malformed: None })
            }
            Err(fault) => {
                let message = json!({"role": "assistant", "content": self.text[self.begun..len]});
                let rest = self.text[self.shown..len].to_string();
                (rest, Turn { message, calls: Vec::new(), malformed: Some(fault) })
            }
        })
    }

    /// The text between and after the calls of the `whole` part of the turn, and the call that was `cut`.
    fn beside_calls(&self, whole: &str, cut: &str) -> String {
        let form = &self.template.form;
        let mut parts = Vec::new();
        for region in read::regions(form, &whole[self.plain..]) {
            match region {
                Region::Call(..) => {}
                Region::Content(text) => parts.push(without_end(form, stripped(text)).to_string()),
                Region::Reasoning(text) => parts.push(format!("{}{text}{}", REASONING_TAGS[0], REASONING_TAGS[1])),
            }
        }
        parts.push(cut.into());
        parts.retain(|part| !part.is_empty());
        let rest = parts.join("\n");
        if self.shown > self.begun && !rest.is_empty() { format!("\n{rest}") } else { rest }
    }

    /// Moves `plain` as far as the text allows.
    fn advance(&mut self) {
        while !self.calls {
            let rest = &self.text[self.plain..];
            let [open, close] = REASONING_TAGS;
            let (reasoning, call) = match (self.template.form.calls.tags(), self.reasons) {
                (Some(_), true) => (find(rest, close), None),
                (Some([tag, _]), false) => (find(rest, open), find(rest, tag)),
                (None, _) => (None, find_bare(rest, self.template.form.arguments)),
            };
            let is_call = call
                .as_ref()
                .is_some_and(|call| reasoning.as_ref().is_none_or(|reasoning| call.start() < reasoning.start()));
            match if is_call { call } else { reasoning } {
                Some(Place::Whole(start, _)) if is_call => {
                    self.plain += start;
                    self.calls = true;
                }
                Some(Place::Whole(_, end)) => {
                    self.plain += end;
                    self.reasons = !self.reasons;
                }
                Some(Place::Part(start)) => return self.plain += start,
                None => return self.plain = self.text.len(),
            }
        }
    }
}

/// Finds the first `tag` in a text, or the start of one at its end.
fn find(text: &str, tag: &str) -> Option<Place> {
    if let Some(start) = text.find(tag) {
        return Some(Place::Whole(start, start + tag.len()));
    }
    let begins = |len: &usize| tag.is_char_boundary(*len) && text.ends_with(&tag[..*len]);
    (1..tag.len()).rev().find(begins).map(|len| Place::Part(text.len() - len))
}

/// Finds the first call without tags in a text, or what may be the start of one at its end.
fn find_bare(text: &str, arguments: &str) -> Option<Place> {
    text.match_indices(['{', '<']).find_map(|(start, _)| {
        let rest = &text[start..];
        let call = literal(rest, PYTHON_TAG).or_else(|is_part| if is_part { Err(true) } else { Ok(rest) });
        match call.and_then(|call| bare_start(call, arguments)) {
            Ok(_) => Some(Place::Whole(start, text.len())),
            Err(is_part) => is_part.then_some(Place::Part(start)),
        }
    })
}
