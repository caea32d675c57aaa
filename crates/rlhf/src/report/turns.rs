//! The turns of a response with an environment, cut to the size of a page.

use super::cut::{Cut, MOST_CHARS, MOST_TOKENS};
use crate::data::ends_with_calls;
use crate::run::turns::{self, Kind};
use serde_json::Value;
use std::ops::Range;

/// Characters of a result that are kept at most.
const MOST_RESULT: usize = 2000;

/// Parts of a turn that are kept at most.
const MOST_PARTS: usize = 12;

/// Approximate number of characters of a response's turns that are kept, half from its start and half from its end.
const MOST_TURN_CHARS: usize = 16_000;

/// Approximate number of characters of markup of a turn, and of each of its parts.
const MARKUP: usize = 60;

/// The turns of a response.
#[derive(Debug, Clone, PartialEq)]
pub struct Turns {
    /// The first turns and the last ones, in their order.
    pub turns: Vec<Turn>,
    /// Calls that were executed.
    pub calls: u64,
    /// Executed calls that failed.
    pub failures: u64,
    /// The environment's reward, if it gave one.
    pub reward: Option<f64>,
    /// Whether the response ends with calls that have no results.
    pub ends_with_calls: bool,
}

/// A turn of the policy, or the results of its calls that follow it.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    /// Turns before it that are left out.
    pub skipped: usize,
    pub parts: Vec<Part>,
    /// Parts after these.
    pub left_out: usize,
    /// Texts of its tokens with their probabilities, which are `None` where the policy did not sample them; empty where they are not known,
    /// or too many.
    pub tokens: Vec<(Cut, Option<f64>)>,
}

/// A text of a turn.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    pub kind: Kind,
    /// Name of the tool, for a result.
    pub name: String,
    pub text: Cut,
}

impl Turns {
    /// Reads the turns in a row of samples, whose `tokens` have these texts and probabilities; `None` without an environment.
    pub(super) fn of(row: &Value, tokens: &[(&str, f64)]) -> Option<Self> {
        let messages = row["messages"].as_array().filter(|messages| !messages.is_empty())?;
        let rounds: Vec<&[Value]> =
            messages.chunk_by(|a, b| !turns::is_of_policy(a) && !turns::is_of_policy(b)).collect();
        let costs = rounds.iter().map(|round| Turn::of(round).chars()).collect::<Vec<_>>();
        let left_out = middle(&costs, MOST_TURN_CHARS);
        let mut spans = spans(&row["inserted"], tokens.len(), &rounds).into_iter();
        let mut left = MOST_TOKENS;
        let mut shown = Vec::new();
        for (at, round) in rounds.iter().enumerate() {
            let span = spans.next().map_or(&[][..], |span| &tokens[span]);
            if left_out.contains(&at) {
                continue;
            }
            let mut turn = Turn::of(round);
            turn.skipped = if at == left_out.end { left_out.len() } else { 0 };
            turn.add_tokens(span, turns::is_of_policy(&round[0]), &mut left);
            shown.push(turn);
        }
        Some(Self {
            turns: shown,
            calls: row["tool_calls"].as_u64().unwrap_or(0),
            failures: row["tool_failures"].as_u64().unwrap_or(0),
            reward: row["env_reward"].as_f64(),
            ends_with_calls: ends_with_calls(messages),
        })
    }
}

impl Turn {
    /// The turn of these messages: one of the policy, or several that follow it.
    fn of(messages: &[Value]) -> Self {
        let part = |turns::Part { kind, name, text }: turns::Part<'_>| {
            let most = if kind == Kind::Result { MOST_RESULT } else { MOST_CHARS };
            Part { kind, name: Cut::at(name, MOST_CHARS / 10).text, text: Cut::at(&text, most) }
        };
        let mut parts: Vec<Part> = messages.iter().flat_map(turns::parts).take(MOST_PARTS).map(part).collect();
        let left_out = messages.iter().map(|message| turns::parts(message).len()).sum::<usize>() - parts.len();
        parts.retain(|part| !part.text.text.is_empty() || part.kind == Kind::Result);
        Self { skipped: 0, parts, left_out, tokens: Vec::new() }
    }

    /// Number of characters on the page, about.
    fn chars(&self) -> usize {
        MARKUP + self.parts.iter().map(|part| MARKUP + part.text.text.len()).sum::<usize>()
    }

    /// Adds the tokens of the turn. `left` is the number of sampled tokens that the page may still show of the response.
    fn add_tokens(&mut self, tokens: &[(&str, f64)], are_sampled: bool, left: &mut usize) {
        if !are_sampled {
            let text: String = tokens.iter().map(|(token, _)| *token).collect();
            self.tokens =
                Vec::from_iter((!text.is_empty()).then(|| (Cut::at(text.trim_matches('\n'), MOST_RESULT), None)));
        } else if tokens.len() <= *left {
            *left -= tokens.len();
            self.tokens = tokens.iter().map(|(token, p)| (Cut::at(token, MOST_CHARS), Some(*p))).collect();
        }
    }
}

/// Returns the tokens of each of the `rounds`. `bounds` has the bounds of the inserted spans; the result is empty if they do not match.
fn spans(bounds: &Value, tokens: usize, rounds: &[&[Value]]) -> Vec<Range<usize>> {
    let bounds = bounds.as_array().into_iter().flatten().filter_map(|bound| usize::try_from(bound.as_u64()?).ok());
    let bounds: Vec<usize> = std::iter::once(0).chain(bounds).chain([tokens]).collect();
    let spans: Vec<Range<usize>> = bounds.windows(2).map(|pair| pair[0]..pair[1]).collect();
    // Turns of the policy and results alternate, beginning with the policy.
    let alternates = rounds.iter().enumerate().all(|(at, round)| turns::is_of_policy(&round[0]) == (at % 2 == 0));
    // A response may end with a result after which nothing is sampled, or which the policy does not see.
    let fits = match rounds.len() {
        rounds if spans.len() == rounds + 1 => spans.last().is_some_and(Range::is_empty),
        rounds if spans.len() + 1 == rounds => rounds % 2 == 0,
        rounds => spans.len() == rounds,
    };
    if bounds.is_sorted() && alternates && fits { spans } else { Vec::new() }
}

/// Returns the turns in the middle that are left out, so that the others have at most about `most` characters. The first and the last turn
/// stay.
fn middle(costs: &[usize], most: usize) -> Range<usize> {
    let within = |costs: &mut dyn Iterator<Item = &usize>| {
        let mut sum = 0;
        let fits = |cost: &&usize| {
            sum += **cost;
            sum <= most / 2
        };
        costs.take_while(fits).count().max(1)
    };
    if costs.iter().sum::<usize>() <= most {
        return costs.len()..costs.len();
    }
    let (head, tail) = (within(&mut costs.iter()), within(&mut costs.iter().rev()));
    head..(costs.len() - tail).max(head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn said(text: &str) -> Value {
        json!({"role": "assistant", "content": text})
    }

    fn called(name: &str) -> Value {
        let call = json!({"type": "function", "function": {"name": name, "arguments": {"a": 1}}});
        json!({"role": "assistant", "content": "", "tool_calls": [call]})
    }

    fn result(text: &str) -> Value {
        json!({"role": "tool", "name": "f", "content": text})
    }

    /// The turns of a response with these tokens, each of one character, and the tokens of each turn.
    fn turns(messages: &[Value], inserted: &Value, tokens: &str) -> (Turns, Vec<String>) {
        let tokens: Vec<String> = tokens.chars().map(String::from).collect();
        let tokens: Vec<(&str, f64)> = tokens.iter().map(|token| (token.as_str(), 0.5)).collect();
        let row = json!({"messages": messages, "inserted": inserted, "tool_calls": 2, "tool_failures": 1, "env_reward": 0.25});
        let turns = Turns::of(&row, &tokens).unwrap();
        let texts = turns.turns.iter().map(|turn| turn.tokens.iter().map(|(token, _)| token.text.as_str()).collect());
        let texts = texts.collect();
        (turns, texts)
    }

    #[test]
    fn the_tokens_of_a_response_are_those_of_its_turns_and_of_what_is_between_them() {
        let messages = [called("f"), result("6"), result("7"), said("ok")];
        let (shown, texts) = turns(&messages, &json!([2, 5]), "ab123cd");
        assert_eq!(texts, ["ab", "123", "cd"]);
        let parts: Vec<Vec<(Kind, &str)>> = shown
            .turns
            .iter()
            .map(|turn| turn.parts.iter().map(|part| (part.kind, part.text.text.as_str())).collect())
            .collect();
        let results = vec![(Kind::Result, "6"), (Kind::Result, "7")];
        assert_eq!(parts, [vec![(Kind::Call, "f({\"a\": 1})")], results, vec![(Kind::Text, "ok")]]);
        let shades: Vec<_> = shown.turns.iter().map(|turn| turn.tokens[0].1).collect();
        assert_eq!(shades, [Some(0.5), None, Some(0.5)]);
        assert_eq!((shown.calls, shown.failures, shown.reward, shown.ends_with_calls), (2, 1, Some(0.25), false));
        // A response may end with a result that is the last one that fits, or with one that the policy does not see because its environment
        // is done.
        assert_eq!(turns(&messages[..3], &json!([2, 5]), "ab123").1, ["ab", "123"]);
        assert_eq!(turns(&messages[..2], &json!([]), "ab").1, ["ab", ""]);
        let (shown, texts) = turns(&messages[..1], &json!([]), "ab");
        assert!(shown.ends_with_calls && texts == ["ab"]);
        assert!(Turns::of(&json!({"response": "r"}), &[]).is_none());
    }

    #[test]
    fn spans_that_are_not_those_of_the_turns_have_no_tokens() {
        let messages = [called("f"), result("6"), said("ok")];
        for inserted in [json!([5, 2]), json!([2, 99]), json!([2]), json!([-1, "x"]), json!(null), json!([1, 2, 3, 4])]
        {
            assert_eq!(turns(&messages, &inserted, "ab123cd").1, ["", "", ""], "{inserted}");
        }
        assert_eq!(turns(&[result("6"), said("ok")], &json!([2, 5]), "ab123cd").1, ["", ""], "no first turn");
        assert_eq!(turns(&messages, &json!([2, 5]), "").1, ["", "", ""], "unknown");
    }

    #[test]
    fn large_responses_are_cut_in_the_middle_and_large_turns_at_their_end() {
        let (huge, long) = ("x".repeat(10_000_000), "y".repeat(3000));
        let mut messages = vec![called(&huge), result(&huge)];
        messages.extend((0..1000).flat_map(|_| [called("f"), result("6"), result(&long)]));
        messages.push(said("the end"));
        let (shown, _) = turns(&messages, &json!([]), "");
        let chars: usize = shown.turns.iter().map(Turn::chars).sum();
        assert!(chars <= MOST_TURN_CHARS, "{chars}");
        let skipped: Vec<usize> = shown.turns.iter().map(|turn| turn.skipped).filter(|skipped| *skipped > 0).collect();
        assert_eq!((skipped.len(), skipped[0] + shown.turns.len()), (1, 2003));
        assert_eq!(shown.turns.last().unwrap().parts[0].text.text, "the end");
        assert_eq!(shown.turns[0].parts[0].text.text.len(), MOST_CHARS);
        assert_eq!(shown.turns[1].parts[0].text.left_out, huge.len() - MOST_RESULT);
        // Many calls in one turn.
        let calls = vec![called("f")["tool_calls"][0].clone(); 1000];
        let many = json!({"role": "assistant", "content": "all", "tool_calls": calls});
        let turn = &turns(&[many], &json!([]), "").0.turns[0];
        assert_eq!((turn.parts.len(), turn.left_out), (MOST_PARTS, 1001 - MOST_PARTS));
        // More tokens than are shown: those of later turns.
        let long = "y".repeat(MOST_TOKENS - 2) + "123cd" + "z" + "e";
        let at = MOST_TOKENS - 2;
        let messages = [called("f"), result("6"), said("ok"), result("7"), said("end")];
        let (_, texts) = turns(&messages, &json!([at, at + 3, at + 5, at + 6]), &long);
        assert_eq!(texts, [&long[..at], "123", "cd", "z", ""]);
    }
}
