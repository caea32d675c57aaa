//! Responses on the page of a report: their scores, tokens and turns.

use super::cut::Cut;
use super::html::{Html, number};
use super::samples::Response;
use super::turns::{Part, Turn, Turns};
use crate::run::turns::{Kind, counts};
use rlhf_base::safe_text::{beginning, one_line};

/// Bytes and lines up to which a result is not folded, and characters in the summary of a folded one.
const MOST_OPEN: usize = 300;
const MOST_OPEN_LINES: usize = 8;
const MOST_SUMMARY: usize = 60;

/// Returns whether shading changes how a response is shown: greedy tokens of a peaked policy have no shade, but the sampled tokens of turns
/// are also laid out differently.
pub(super) fn is_shaded(response: &Response) -> bool {
    let turns = response.turns.iter().flat_map(|turns| &turns.turns);
    response.tokens.iter().any(|(_, probability)| percent(*probability) < 100.0)
        || turns.flat_map(|turn| &turn.tokens).any(|(_, probability)| probability.is_some())
}

/// Returns the percentage by which a token is shaded.
fn percent(probability: f64) -> f64 {
    (100.0 * probability).round()
}

/// Writes a response with its scores.
pub(super) fn response(page: &mut Html, response: &Response) {
    page.raw("<div class=\"response\"><p>update ").text(response.step).raw(" \u{b7} ");
    if response.score.is_finite() {
        page.raw("score <b>").text(number(response.score, 4)).raw("</b>");
    } else {
        page.raw("no score");
    }
    let rewards: &[(String, f64)] = match &response.rewards[..] {
        // A single reward without weights and penalties is the score.
        [(_, score)] if *score == response.score => &[],
        rewards => rewards,
    };
    for (name, score) in rewards {
        page.raw(" \u{b7} ").text(name).raw(" ").text(number(*score, 4));
    }
    if let Some(tokens) = response.num_tokens {
        page.raw(" \u{b7} ").text(tokens).raw(if tokens == 1 { " token" } else { " tokens" });
    }
    if let Some(turns) = &response.turns {
        page.raw(" \u{b7} ").text(counts(turns.calls, turns.failures));
        if let Some(reward) = turns.reward {
            page.raw(" \u{b7} environment ").text(number(reward, 4));
        }
    }
    if let Some(finish) = &response.finish {
        page.raw(" \u{b7} ").text(finish);
    }
    page.raw("</p>\n");
    match &response.turns {
        Some(response_turns) => turns(page, response_turns),
        None if response.tokens.is_empty() => text(page, &response.text, "text"),
        None => {
            page.raw("<pre class=\"text\" dir=\"auto\">\n");
            response.tokens.iter().for_each(|(token, probability)| shaded(page, token, *probability));
            page.raw("</pre>\n");
        }
    }
    page.raw("</div>\n");
}

/// Writes a token with its shade.
fn shaded(page: &mut Html, token: &str, probability: f64) {
    let percent = percent(probability);
    page.raw("<span style=\"--p:").text(percent).raw("%\" title=\"").text(percent).raw(" %\">");
    page.text(token).raw("</span>");
}

/// Writes the turns of a response: texts, calls and results. Tokens that are known are written too; the style sheet shows them in place of
/// the texts when tokens are shaded.
fn turns(page: &mut Html, turns: &Turns) {
    page.raw("<div class=\"turns\">\n");
    for turn in &turns.turns {
        if turn.skipped > 0 {
            page.raw("<p class=\"note\">").text(turn.skipped).raw(" turns are left out.</p>\n");
        }
        page.raw(if turn.tokens.is_empty() { "<div>\n" } else { "<div class=\"read\">\n" });
        turn.parts.iter().for_each(|part| part_of_turn(page, part));
        if turn.left_out > 0 {
            page.raw("<p class=\"note\">")
                .text(turn.left_out)
                .raw(" more calls or results of this turn are left out.</p>\n");
        }
        if turn.parts.is_empty() {
            page.raw("<p class=\"note\">empty</p>\n");
        }
        page.raw("</div>\n");
        tokens_of_turn(page, turn);
    }
    if turns.ends_with_calls {
        page.raw("<p class=\"note\">It ends with a call that has no result: the result did not fit, no more calls were allowed, or the \
                  environment failed or ended the episode.</p>\n");
    }
    page.raw("</div>\n");
}

/// Writes the tokens of a turn, if they are known.
fn tokens_of_turn(page: &mut Html, turn: &Turn) {
    match &turn.tokens[..] {
        [] => {}
        [(inserted, None)] => folded(page, inserted, "inserted", ""),
        tokens => {
            page.raw("<pre class=\"text tokens\" dir=\"auto\">\n");
            tokens.iter().for_each(|(token, probability)| shaded(page, &token.text, probability.unwrap_or(1.0)));
            page.raw("</pre>\n");
        }
    }
}

/// Writes a part of a turn.
fn part_of_turn(page: &mut Html, part: &Part) {
    match part.kind {
        Kind::Text => text(page, &part.text, "text"),
        Kind::Reasoning => folded(page, &part.text, "reasoning", "reasoning"),
        Kind::Call => {
            let shown = Cut { text: with_line_ends(&part.text.text), left_out: part.text.left_out };
            text(page, &shown, "call");
        }
        Kind::Result => {
            let class = if is_error(&part.text.text) { "result error" } else { "result" };
            folded(page, &part.text, class, &part.name);
        }
    }
}

/// Whether a result is the error of a call, in the form of Python's tools and of calls that could not be made.
fn is_error(result: &str) -> bool {
    result.starts_with("{'error': ")
}

/// Returns JSON with unescaped line ends and tabs, because an argument may be a program.
fn with_line_ends(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    let mut chars = json.chars();
    while let Some(c) = chars.next() {
        match (c, if c == '\\' { chars.next() } else { None }) {
            ('\\', Some('n')) => text.push('\n'),
            ('\\', Some('t')) => text.push('\t'),
            (c, next) => text.extend(std::iter::once(c).chain(next)),
        }
    }
    text
}

/// Writes a text with a label, folded where it is long.
fn folded(page: &mut Html, shown: &Cut, class: &'static str, label: &str) {
    let lines = || shown.text.lines();
    let is_long = shown.left_out > 0 || shown.text.len() > MOST_OPEN || lines().count() > MOST_OPEN_LINES;
    page.raw(if is_long { "<details class=\"" } else { "<div class=\"" }).raw(class).raw("\">");
    page.raw(if is_long { "<summary>" } else { "" });
    if !label.is_empty() {
        page.raw("<b>").text(one_line(label)).raw("</b> ");
    }
    if is_long {
        let first = lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
        page.raw("<span>").text(one_line(&beginning(first, MOST_SUMMARY))).raw("</span> <i>");
        page.text(shown.text.chars().count() + shown.left_out).raw(" characters</i></summary>\n");
    }
    text(page, shown, "whole");
    page.raw(if is_long { "</details>\n" } else { "</div>\n" });
}

/// Writes a text of a run with its line ends.
pub(super) fn text(page: &mut Html, text: &Cut, class: &'static str) {
    // The line end after the tag is not part of the text.
    page.raw("<pre class=\"").raw(class).raw("\" dir=\"auto\">\n").text(&text.text).raw("</pre>\n");
    if text.left_out > 0 {
        page.raw("<p class=\"note\">").text(text.left_out).raw(" more characters are left out.</p>\n");
    } else if text.text.is_empty() {
        page.raw("<p class=\"note\">empty</p>\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn page_of(turns: &Turns) -> String {
        let mut page = Html::default();
        super::turns(&mut page, turns);
        page.finish()
    }

    /// The turns of a call, of this result and of an answer.
    fn with_result(result: &str, code: &str) -> Turns {
        let call = json!({"type": "function", "function": {"name": "run", "arguments": {"code": code}}});
        let messages = json!([
            {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
            {"role": "tool", "name": "run", "content": result},
            {"role": "assistant", "content": "Done."},
        ]);
        let tokens = [("Let me", 0.25), (" see", 1.0), ("<res", 0.9), ("ult>", 0.9), ("Done", 0.5), (".", 1.0)];
        Turns::of(&json!({"messages": messages, "inserted": [2, 4]}), &tokens).unwrap()
    }

    #[test]
    fn turns_have_texts_calls_and_results_and_their_tokens_with_shades_for_those_that_were_sampled() {
        let page = page_of(&with_result("6", "if x:\n\tprint('\\n')"));
        let texts = [
            "<div class=\"read\">\n<pre class=\"text\" dir=\"auto\">\nLet me see.</pre>",
            "<pre class=\"call\" dir=\"auto\">\nrun({&quot;code&quot;: &quot;if x:\n\tprint(&#39;\\\\n&#39;)&quot;})</pre>",
            "<div class=\"result\"><b>run</b> <pre class=\"whole\" dir=\"auto\">\n6</pre>\n</div>",
            "<pre class=\"text tokens\" dir=\"auto\">\n<span style=\"--p:25%\" title=\"25 %\">Let me</span>",
            "<div class=\"inserted\"><pre class=\"whole\" dir=\"auto\">\n&lt;result&gt;</pre>\n</div>",
        ];
        for text in texts {
            assert!(page.contains(text), "no {text} in {page}");
        }
        assert!(!page.contains("<details") && page.matches("<span").count() == 4, "{page}");
    }

    #[test]
    fn a_long_result_is_folded_and_any_text_stays_text() {
        let page = page_of(&with_result(&"<b>\u{1b}[31m</pre></details>\u{202e}\r\n".repeat(400_000), "</script>"));
        let start = "<details class=\"result\"><summary><b>run</b> <span>&lt;b&gt;\\u{1b}[31m&lt;/pre&gt;&lt;/details&gt;\\u{202e}</span> <i>10400000 characters</i></summary>\n";
        assert!(page.contains(start), "{page}");
        assert!(page.len() < 10_000, "{}", page.len());
        for markup in ["<b>\\u", "\u{1b}", "</script>"] {
            assert!(!page.contains(markup), "{markup} in {page}");
        }
        assert_eq!([page.matches("<details").count(), page.matches("</details>").count()], [1, 1], "{page}");
        let lines = page_of(&with_result(&"a\n".repeat(MOST_OPEN_LINES + 1), ""));
        assert!(lines.contains("<details"), "many lines are long");
        let failed = page_of(&with_result("{'error': 'no such tool'}", ""));
        assert!(failed.contains("<div class=\"result error\">"), "{failed}");
    }

    #[test]
    fn a_response_that_ends_with_a_call_says_so_with_its_counts() {
        let call = json!({"type": "function", "function": {"name": "f", "arguments": {}}});
        let row = json!({"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}],
                         "tool_calls": 3, "tool_failures": 1, "env_reward": 0.5});
        let mut page = Html::default();
        let shown = Response {
            step: 1,
            text: Cut::new(""),
            score: 1.0,
            rewards: Vec::new(),
            finish: Some("stop".into()),
            num_tokens: Some(9),
            tokens: Vec::new(),
            turns: Turns::of(&row, &[]),
        };
        response(&mut page, &shown);
        let page = page.finish();
        assert!(page.contains("9 tokens \u{b7} 3 calls, 1 failed \u{b7} environment 0.5 \u{b7} stop</p>"), "{page}");
        assert!(page.contains("It ends with a call that has no result") && !page.contains("class=\"read\""), "{page}");
    }
}
