//! Rewrites the LaTeX of an answer before it is parsed: boxes, texts, units, signs of dollars and percent. The rules are those of
//! `latex2sympy2_extended` 1.11 with the settings of `math-verify` and TRL.

use regex::{Captures, Regex};
use std::sync::LazyLock;

/// Which boxes of a text are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Boxes {
    /// All, as a list.
    All,
    /// The last box, and boxes shortly before it.
    Last,
}

/// Maximum length in bytes of a text that is rewritten.
pub(super) const MAX_LEN: usize = 4096;

fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a valid regular expression")
}

/// Units of measurement and counted things that may follow a number, without their plural s.
const UNITS: &str = "feet ft mile mph kmph kmh km m cm mm dm mtr mt metre meter inch inches yard acre hectare degree deg prime \
    pound lb kg gm g gal gallon litre liter lt l cc hour hr h minute min second sec s day month year yr cent rupee rs t th st rd \
    o c d am pm noon unit digit number edge student men man women woman soldier coin toy apple meal pie tile monkey mark sq square \
    cubic cube are ohm ratio gain loss profit increase decrease rise more less pure per by way east west multiple excess rounds \
    ab bc mp minw sue Surface";

/// Units of several words. A single letter may be followed by a space and any character.
const LONG_UNITS: &str = r"m\x20square|\x20m\x20east|sq\x20m|cu\x20cm|sq\x20inch|cm\x202|pi\x20sq\x20m|no\x20change|children\x20ticket|[a-hqs]\x20.|rs\x20.|[ap]\x20.\x20m|(?:sq|cu)\x20.\x20m";

static TRAILING_UNIT: LazyLock<Regex> = LazyLock::new(|| {
    let units: Vec<&str> = UNITS.split_whitespace().collect();
    regex(&format!(r"(\d|\}}|\s)\s*(?:{}|{LONG_UNITS})(?:s|es)?\s*$", units.join("|")))
});
static TRAILING_TEXT: LazyLock<Regex> = LazyLock::new(|| regex(r"\\(?:text|mbox)\{.*?\}(?:\^\d|\{\^\d\})?$"));
static LEFT: LazyLock<Regex> =
    LazyLock::new(|| regex(r"\\m?left(\\[{|]|[{|\[(]|\\(?:lgroup|lbrace|lbrack|lvert|vert|lceil|lfloor|langle))"));
static RIGHT: LazyLock<Regex> =
    LazyLock::new(|| regex(r"\\m?right(\\[}|]|[}|\])]|\\(?:rgroup|rbrace|rbrack|rvert|vert|rceil|rfloor|rangle))"));
static REMOVED: LazyLock<Regex> =
    LazyLock::new(|| regex(r"\\mathrm\{th\}|\\!\s*|\\text\s*\{\s*\}|\\?\$|(\\)?[\x22']|\\displaystyle"));

/// Returns the normalized text of an answer. `repairs` also reads `\frac12` and the like, which is done for the solution only.
pub(super) fn normalize(text: &str, boxes: Boxes, repairs: bool) -> Option<String> {
    let text = boxed(text, boxes);
    if text.len() > MAX_LEN {
        return None;
    }
    let text = text.replace("\\mathrm{T}", "T").replace("\\mathrm{d}", "d").replace("{\\rm d}", "d");
    let text = RIGHT.replace_all(&LEFT.replace_all(&text, "$1"), "$1").into_owned();
    // A quote after a backslash stays.
    let text = REMOVED.replace_all(&text, |captures: &Captures<'_>| match captures.get(1) {
        Some(_) => captures[0].to_string(),
        None => String::new(),
    });
    let mut text = replaced(&text).replace(['\n', '\t'], " ");
    if !text.contains("matrix") {
        text = single_backslashes(&text);
    }
    let mut text = without_units(text);
    if repairs {
        text = repaired(text);
    }
    Some(text.trim().to_string())
}

fn without_units(mut text: String) -> String {
    let shorter = TRAILING_TEXT.replace(&text, "").trim().to_string();
    if !shorter.is_empty() && shorter != text {
        text = shorter;
    }
    for _ in 0..2 {
        let shorter = TRAILING_UNIT.replace(&text, "$1").into_owned();
        if !shorter.is_empty() {
            text = shorter;
        }
    }
    text
}

/// Halves double backslashes before letters.
fn single_backslashes(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("\\\\") {
        let (before, after) = (&rest[..at], &rest[at + 2..]);
        result += before;
        result += if after.starts_with(|c: char| c.is_ascii_alphabetic()) { "\\" } else { "\\\\" };
        rest = after;
    }
    result + rest
}

/// Returns the contents of the boxes of a text, or the text if it has none.
pub(super) fn boxed(text: &str, boxes: Boxes) -> String {
    let mut contents: Vec<&str> = Vec::new();
    let (mut end, mut last_start) = (text.len(), None);
    while let Some((start, command)) = last_box(&text[..end]) {
        let inner = &text[command..end];
        let open = command + inner.len() - inner.trim_start().len();
        if open >= end {
            break;
        }
        let close = if text[open..end].starts_with('{') { closing_brace(&text[open..end]) } else { None };
        let Some(close) = close.map(|close| open + close) else {
            // A box without an end goes to the end of the text.
            if contents.is_empty() {
                contents.push(&text[open..]);
            }
            break;
        };
        let content = text[open + 1..close].trim();
        if let (Boxes::Last, Some(next)) = (boxes, last_start)
            && !belongs(
                content,
                contents.last().copied().unwrap_or_default(),
                text.get(close + 1..next).unwrap_or_default(),
            )
        {
            break;
        }
        if contents.last() != Some(&content) {
            contents.push(content);
        }
        (end, last_start) = (start, Some(start));
    }
    if contents.is_empty() {
        return text.to_string();
    }
    contents.reverse();
    contents.join(",")
}

/// Returns where the last box command starts and ends.
fn last_box(text: &str) -> Option<(usize, usize)> {
    let one = text.rfind("\\boxed").map(|at| (at, at + "\\boxed".len()));
    let other = text.rfind("\\fbox").map(|at| (at, at + "\\fbox".len()));
    one.max(other)
}

/// Returns the place of the brace that closes the first one.
fn closing_brace(text: &str) -> Option<usize> {
    let mut open = 0usize;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'{' => open += 1,
            b'}' if open == 1 => return Some(at),
            b'}' => open -= 1,
            _ => {}
        }
    }
    None
}

/// Returns true if a box is part of the same answer as the next one, with `between` between them.
fn belongs(content: &str, next: &str, between: &str) -> bool {
    static SEPARATOR: LazyLock<Regex> = LazyLock::new(|| regex(r"\b(?:and|or)\b|,|;"));
    let len = between.chars().count();
    len < 10 || next != content && len < 70 && SEPARATOR.is_match(between)
}

/// Replaces words and commands by the signs that they stand for.
fn replaced(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut at = 0;
    while let Some(next) = text[at..].chars().next() {
        match replacement(text, at) {
            Some((len, sign)) => {
                result += sign;
                at += len;
            }
            None => {
                result.push(next);
                at += next.len_utf8();
            }
        }
    }
    result
}

/// Returns the length of the text at `at` that is replaced, and its replacement.
fn replacement(text: &str, at: usize) -> Option<(usize, &'static str)> {
    let rest = &text[at..];
    let before = text[..at].chars().next_back();
    let starting_with =
        |names: &[&str], sign| names.iter().find(|name| rest.starts_with(**name)).map(|name| (name.len(), sign));
    let space = rest.len() - rest.trim_start().len();
    let comma = usize::from(rest.starts_with(','));
    let after_comma = &rest[comma..];
    let gap = comma + after_comma.len() - after_comma.trim_start().len();
    let word = &rest[gap..];
    let ends = |len: usize| !word[len..].starts_with(|c: char| c.is_ascii_alphabetic());
    let whole_word = |len: usize| !word[len..].starts_with(|c: char| c.is_alphanumeric() || c == '_');
    let starts = gap > 0 || !before.is_some_and(|c| c.is_alphanumeric() || c == '_');
    if let Some(replacement) = starting_with(&["\\mathrm", "\\mathit", "\\mathbf"], "\\text")
        .or_else(|| starting_with(&["\\textnormal", "\\textbf", "\\textit", "\\textrm"], "\\text"))
        .or_else(|| starting_with(&["\\dfrac", "\\tfrac", "\\cfrac"], "\\frac"))
    {
        return Some(replacement);
    }
    let first_space = rest.chars().next().filter(|c| c.is_whitespace()).map(char::len_utf8);
    if let Some(len) = first_space.filter(|&len| rest[len..].starts_with('.')) {
        return Some((len + 1, " 0."));
    }
    if let Some(replacement) = starting_with(&["{."], "{0.").or_else(|| starting_with(&["~="], "\\approx")) {
        return Some(replacement);
    }
    if let Some(inner) = rest[space..].strip_prefix('{').map(str::trim_start)
        && let Some(close) = inner.strip_prefix(',').map(str::trim_start)
        && let Some(after) = close.strip_prefix('}')
    {
        return Some((rest.len() - after.len(), ","));
    }
    let length = |word: &str| {
        if word.starts_with("and") {
            3
        } else if word.starts_with("or") {
            2
        } else {
            0
        }
    };
    let len = length(word);
    if len > 0 && ends(len) && !before.is_some_and(|c| c.is_ascii_alphabetic()) {
        return Some((gap + len, ","));
    }
    if let Some(inner) = word.strip_prefix("\\text{").map(str::trim_start)
        && length(inner) > 0
        && let Some(after) = inner[length(inner)..].trim_start().strip_prefix('}')
    {
        return Some((rest.len() - after.len(), ","));
    }
    if let Some(next) = rest.strip_prefix('\\').and_then(|rest| rest.chars().next()).filter(|c| c.is_whitespace())
        && before != Some('\\')
    {
        return Some((1 + next.len_utf8(), " "));
    }
    signs(rest, before, comma, space, starts && comma == 0, whole_word)
}

/// The part of [`replacement`] for infinity, dots, percent and roots.
fn signs(
    rest: &str,
    before: Option<char>,
    comma: usize,
    space: usize,
    starts: bool,
    whole_word: impl Fn(usize) -> bool,
) -> Option<(usize, &'static str)> {
    let is_command = before == Some('\\');
    if rest.starts_with("infinity") {
        return Some((8, "\\infty"));
    }
    if rest[comma..].starts_with("\\ldots") {
        return Some((comma + 6, " "));
    }
    for name in ["percentage", "percent", "pct"] {
        if starts && rest[space..].starts_with(name) && whole_word(name.len()) {
            return Some((space + name.len(), "\\%"));
        }
        let in_text = rest.strip_prefix("\\text{").and_then(|rest| rest.strip_prefix(name)?.strip_prefix('}'));
        if let Some(after) = in_text {
            return Some((rest.len() - after.len(), "%"));
        }
    }
    if rest.starts_with("inf") && !is_command {
        return Some((3, "\\infty"));
    }
    rest.starts_with(" sqrt").then_some((5, "\\sqrt"))
}

/// Adds the braces that a solution lacks.
fn repaired(mut text: String) -> String {
    static REPAIRS: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
        [
            (r"\^\s?\((.*?)\)", "^{$1}"),
            (r"sqrt\s?\((.*?)\)", r"\sqrt{$1}"),
            (r"\\frac\s?(\d)\s?(\d+)", r"\frac{$1}{$2}"),
            (r"\\log_\s?(\d)\s?(\d+)", r"\log_{$1}{$2}"),
            (r"\\frac\s?\{(.*?)\}\s?(\d)", r"\frac{$1}{$2}"),
            (r"\\frac\s?(\d)\s?\{(.*?)\}", r"\frac{$1}{$2}"),
            (r"\\sqrt\s?(\d)", r"\sqrt{$1}"),
        ]
        .map(|(pattern, with)| (regex(pattern), with))
        .into()
    });
    if text.starts_with('.') {
        text.insert(0, '0');
    }
    if text == "0.5" {
        text = "\\frac{1}{2}".into();
    }
    for (pattern, with) in REPAIRS.iter() {
        text = pattern.replace_all(&text, *with).into_owned();
    }
    let text = arguments(&text.replace(" sqrt", "\\sqrt"), "\\sqrt", 1);
    let text = arguments(&text, "\\frac", 2);
    let is_integer = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    match text.split_once('/') {
        Some((a, b)) if is_integer(a) && is_integer(b) => format!("\\frac{{{a}}}{{{b}}}"),
        _ => text,
    }
}

/// Puts the first `count` characters after each `command` in braces, where none follow.
fn arguments(text: &str, command: &str, count: usize) -> String {
    let mut parts = text.split(command);
    let mut result = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let part = part.trim_start();
        result += command;
        let letters: Vec<char> = part.chars().take(count).collect();
        match letters.first() {
            None | Some('{') => result += part,
            Some('[') if command == "\\sqrt" => result += part,
            Some(_) if letters.len() < count => return text.to_string(),
            Some(_) => {
                let mut len = 0;
                for letter in letters.iter().take_while(|letter| **letter != '{') {
                    result += &format!("{{{letter}}}");
                    len += letter.len_utf8();
                }
                result += &part[len..];
            }
        }
    }
    result
}
