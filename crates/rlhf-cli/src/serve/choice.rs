//! One response while it is generated: its text without stop strings, and its tokens with their log-probabilities.

use rlhf::Result;
use rlhf::generate::{Alternatives, FinishReason, Token};
use rlhf::tokenizer::{TextStream, Tokenizer, Turn, TurnStream};
use serde_json::{Value, json};
use std::hash::{BuildHasher, RandomState};

/// A token as clients see it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TokenInfo {
    /// The text that it adds; the token's name, or U+FFFD, if it adds none.
    pub(super) text: String,
    /// Log-probability and alternatives; `None` for the first token of a prompt.
    pub(super) logprob: Option<(f32, Vec<(String, f32)>)>,
    /// Place of its text in the text of the choice, in characters.
    pub(super) offset: usize,
}

/// New parts of a choice.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Delta {
    pub(super) text: String,
    /// Empty if no log-probabilities are requested.
    pub(super) tokens: Vec<TokenInfo>,
    /// Calls of tools, as clients see them, with the last part.
    pub(super) calls: Vec<Value>,
    /// Set with the last part.
    pub(super) finish: Option<FinishReason>,
    /// Whether it is the last part of a choice with neither text nor calls.
    pub(super) is_empty: bool,
}

/// The state of reading calls in a response.
pub(super) struct Calling<'t> {
    pub(super) stream: TextStream<'t>,
    pub(super) turn: TurnStream<'t>,
    /// Whether there may be several.
    pub(super) parallel: bool,
}

/// A response while it is generated.
pub(super) struct Choice<'t> {
    tokenizer: &'t Tokenizer,
    stream: TextStream<'t>,
    cutter: Cutter,
    /// The turn, if it may call tools, and whether it may have several calls.
    turn: Option<(TurnStream<'t>, bool)>,
    /// The last token of the prompt or the response.
    last: Option<i64>,
    /// Tokens whose text may be cut.
    pending: Vec<TokenInfo>,
    /// Characters of all text, held text included.
    chars: usize,
    /// Characters of the text before a stop string.
    uncut: usize,
    /// Number of generated tokens.
    pub(super) tokens: usize,
    /// Whether a part had text.
    has_text: bool,
    finished: bool,
}

impl<'t> Choice<'t> {
    /// Starts a response to `prompt`, whose text ends before one of `stops`; `offset` is the number of characters before it.
    pub(super) fn new(tokenizer: &'t Tokenizer, prompt: &[i64], stops: &[String], offset: usize) -> Self {
        Self {
            tokenizer,
            stream: tokenizer.stream(prompt),
            cutter: Cutter::new(stops),
            turn: None,
            last: prompt.last().copied(),
            pending: Vec::new(),
            chars: offset,
            uncut: offset,
            tokens: 0,
            has_text: false,
            finished: false,
        }
    }

    /// Lets the model call tools in the response.
    pub(super) fn calling(self, calling: Calling<'t>) -> Self {
        let Calling { stream, turn, parallel } = calling;
        Self { stream, turn: Some((turn, parallel)), ..self }
    }

    /// Whether its last part was returned.
    pub(super) fn is_finished(&self) -> bool {
        self.finished
    }

    /// Appends a token. Returns the parts that can be shown.
    ///
    /// # Errors
    /// If the tokenizer cannot decode it.
    pub(super) fn push(&mut self, token: &Token) -> Result<Delta> {
        if self.finished {
            return Ok(Delta::default());
        }
        self.tokens += 1;
        let mut text = self.stream.push(token.id)?;
        if token.finish.is_some() {
            text += &self.stream.finish()?;
        }
        if let Some(alternatives) = &token.alternatives {
            let info = token_info(self.tokenizer, self.last, (token.id, &text), Some(alternatives), self.chars)?;
            self.pending.push(info);
        }
        self.last = Some(token.id);
        self.chars += text.chars().count();
        let (mut text, cut) = self.cutter.push(&text);
        let finish = if cut { Some(FinishReason::Stop) } else { token.finish };
        if finish.is_some() {
            text += &self.cutter.finish();
        }
        self.uncut += text.chars().count();
        self.finished = finish.is_some();
        let mut calls = Vec::new();
        if let Some((turn, _)) = &mut self.turn {
            text = turn.push(&text);
        }
        if let Some((turn, parallel)) = self.turn.take_if(|_| self.finished) {
            let (rest, turn) = turn.finish((!cut).then_some(token.id))?;
            text += &rest;
            calls = openai_calls(&turn);
            calls.truncate(if parallel { usize::MAX } else { 1 });
        }
        let holds = !self.cutter.is_empty() || self.turn.as_ref().is_some_and(|(turn, _)| turn.holds_text());
        let tokens = if holds { Vec::new() } else { std::mem::take(&mut self.pending) };
        let uncut = self.uncut;
        let tokens = tokens.into_iter().filter(|token| !cut || token.offset < uncut).collect();
        self.has_text |= !text.is_empty();
        let is_empty = self.finished && !self.has_text && calls.is_empty();
        Ok(Delta { text, tokens, calls, finish, is_empty })
    }

    /// Ends a response of no tokens.
    pub(super) fn end(&mut self) -> Delta {
        self.finished = true;
        Delta { finish: Some(FinishReason::Length), is_empty: !self.has_text, ..Delta::default() }
    }
}

/// Returns the calls of a turn in the form of OpenAI's interface.
fn openai_calls(turn: &Turn) -> Vec<Value> {
    let call = |call: &Value| {
        let function = &call["function"];
        let id = format!("call_{:016x}", RandomState::new().hash_one(function.to_string()));
        let arguments = function["arguments"].to_string();
        json!({"id": id, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    };
    turn.message["tool_calls"].as_array().into_iter().flatten().map(call).collect()
}

/// Returns a token that adds `text` after the token `before`, at `offset`.
///
/// # Errors
/// If the tokenizer cannot decode it.
fn token_info(
    tokenizer: &Tokenizer,
    before: Option<i64>,
    (id, text): (i64, &str),
    alternatives: Option<&Alternatives>,
    offset: usize,
) -> Result<TokenInfo> {
    let name = |id, text: &str| match text {
        "" => tokenizer.token_text(before, id),
        text => Ok(text.to_string()),
    };
    let logprob = match alternatives {
        None => None,
        Some(Alternatives { logprob, top }) => {
            let alternative =
                |&(other, logprob): &(i64, f32)| Ok((name(other, if other == id { text } else { "" })?, logprob));
            Some((*logprob, top.iter().map(alternative).collect::<Result<_>>()?))
        }
    };
    Ok(TokenInfo { text: name(id, text)?, logprob, offset })
}

/// Returns the tokens of a prompt; `alternatives` has the alternatives of all tokens but the first.
///
/// # Errors
/// If the tokenizer cannot decode them.
pub(super) fn prompt_tokens(
    tokenizer: &Tokenizer,
    prompt: &[i64],
    alternatives: &[Alternatives],
) -> Result<Vec<TokenInfo>> {
    let texts = tokenizer.decode_each(prompt)?;
    let mut offset = 0;
    let mut tokens = Vec::with_capacity(prompt.len());
    for (at, (&id, text)) in prompt.iter().zip(&texts).enumerate() {
        let before = at.checked_sub(1);
        let token_alternatives = before.and_then(|before| alternatives.get(before));
        tokens.push(token_info(
            tokenizer,
            before.map(|before| prompt[before]),
            (id, text),
            token_alternatives,
            offset,
        )?);
        offset += text.chars().count();
    }
    Ok(tokens)
}

/// Cuts a text before the first of some strings. Holds back text that may be the beginning of one.
struct Cutter {
    stops: Vec<String>,
    pending: String,
}

impl Cutter {
    fn new(stops: &[String]) -> Self {
        Self { stops: stops.to_vec(), pending: String::new() }
    }

    /// Whether no text is held back.
    fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Appends text. Returns the text that can be shown, and whether it ends there.
    fn push(&mut self, text: &str) -> (String, bool) {
        self.pending += text;
        if let Some(at) = self.stops.iter().filter_map(|stop| self.pending.find(stop)).min() {
            let mut shown = std::mem::take(&mut self.pending);
            shown.truncate(at);
            return (shown, true);
        }
        let longest = |stop: &String| {
            let begins = |&len: &usize| stop.is_char_boundary(len) && self.pending.ends_with(&stop[..len]);
            (1..stop.len()).rev().find(begins).unwrap_or(0)
        };
        let kept = self.stops.iter().map(longest).max().unwrap_or(0);
        let rest = self.pending.split_off(self.pending.len() - kept);
        (std::mem::replace(&mut self.pending, rest), false)
    }

    /// Returns the text that is held back.
    fn finish(&mut self) -> String {
        std::mem::take(&mut self.pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_before_the_first_stop_string_wherever_its_parts_end() {
        let stops = ["END".to_string(), "\n\n".into(), "ENDING".into(), "é!".into()];
        for (text, expected) in [
            ("one END two", ("one ", true)),
            ("one EN", ("one EN", false)),
            ("one ENEND", ("one EN", true)),
            ("a\nb\n\nc", ("a\nb", true)),
            ("caf\u{e9}", ("caf\u{e9}", false)),
            ("caf\u{e9}!", ("caf", true)),
            ("END", ("", true)),
            ("", ("", false)),
        ] {
            let chars: Vec<char> = text.chars().collect();
            for size in 1..=chars.len().max(1) {
                let mut cutter = Cutter::new(&stops);
                let (mut shown, mut ended) = (String::new(), false);
                for part in chars.chunks(size) {
                    let (text, cut) = cutter.push(&part.iter().collect::<String>());
                    shown += &text;
                    assert!(expected.0.starts_with(&shown), "{text:?}: {shown:?} is shown too early");
                    ended = cut;
                    if cut {
                        break;
                    }
                }
                if !ended {
                    shown += &cutter.finish();
                }
                assert_eq!((shown.as_str(), ended), expected, "{text:?} in parts of {size}");
            }
        }
    }
}
