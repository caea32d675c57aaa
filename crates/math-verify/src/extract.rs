//! Finds the answer in a text, in the order of `math-verify`: a box, a formula after "final answer is" or "answer", and, in a
//! solution, any formula, calculation or number.

use super::lex::Fault;
use super::normalize::{Boxes, normalize};
use super::parse;
use super::ratio::Ratio;
use super::value::{Expr, Value};
use regex::Regex;
use std::sync::LazyLock;

/// Maximum length of a text in bytes; of a longer one, only the end is read.
const MAX_TEXT: usize = 1 << 17;

/// A part of a text that may be the answer.
#[derive(Debug)]
pub(super) struct Found {
    /// Its value.
    pub(super) value: Result<Value, Fault>,
    /// Its normalized text.
    pub(super) text: String,
}

/// Formulas: a range of the text and, after "and" or a comma, the next ones. `in_box` is true if the text belongs to a box command.
#[derive(Debug, Clone, Default)]
struct Formulas {
    contents: Vec<(usize, usize, bool)>,
    start: usize,
    end: usize,
    in_box: bool,
}

/// The ways to write an answer without LaTeX.
struct Plain {
    calculation: Regex,
    number: Regex,
    /// Expressions after "final answer is" and "answer", with their priority.
    anchored: Vec<Regex>,
}

static PLAIN: LazyLock<Plain> = LazyLock::new(|| {
    let regex = |pattern: &str| Regex::new(pattern).expect("a valid regular expression");
    let sign = r"+\-*×/^()÷";
    let before = r"(?:^|\s|=)(?:\*\*)?";
    let inside = format!(r"[\d.\s{sign}]");
    let calculation =
        format!(r"{before}(?P<calculation>-?\(?-?\d{inside}*[{sign}]{inside}+\)?)(?:\*\*)?(?:[.,:\s)$]|$)");
    let percent = r"(?P<percent>\s*(?:%|[Pp](?:ercentage|ercent|ct)))?";
    let groups = r"(?P<groups>-?[1-9]\d{0,2}(?:[ ,]\d{3})+)(?P<groups_fraction>\.\d+)?";
    let digits = r"(?P<whole>-?\d+)(?P<fraction>[.,]\d+)|(?P<point>\.\d+)|(?P<digits>-?\d+)";
    let number = format!(r"{before}[$€£¥₹₽₪₩₫฿₿]?(?:{groups}|{digits}){percent}");
    let any = format!("(?:{calculation}|{number})");
    let anchored = vec![
        regex(&format!(r"(?i:final answer is):?\s*{any}\.?\s?I hope")),
        regex(&format!(r"(?i:final answer.{{0,100}}?)\s+is:?{any}")),
        regex(&format!(r"(?i:answer):(?:.{{0,100}}=\s*|.{{0,50}}?){any}")),
        regex(&format!(r"(?i:answer)(?:.{{0,100}}=\s*|.{{0,50}}?){any}")),
    ];
    Plain { calculation: regex(&calculation), number: regex(&number), anchored }
});

/// Returns the answer of a response: of a box, or of a formula after "answer".
pub(super) fn answer(text: &str) -> Option<Found> {
    let text = ending(text);
    let anchors = anchors(text);
    let levels =
        [[anchors[0].clone(), boxes(text)].concat(), anchors[1].clone(), anchors[2].clone(), anchors[3].clone()];
    let first = levels.into_iter().find(|level| !level.is_empty())?;
    first
        .into_iter()
        .max_by_key(|formulas| (formulas.end, usize::MAX - formulas.start))
        .map(|formulas| read(text, &formulas, false))
}

/// Returns the answer of a solution; `None` if there is nothing that could be one.
pub(super) fn solution(text: &str) -> Option<Found> {
    let text = ending(text);
    let mut anchors = anchors(text);
    anchors[1].extend(boxes(text));
    let mut first: Option<String> = None;
    for level in 0..5 {
        let mut candidates: Vec<(usize, usize, Candidate<'_>)> = Vec::new();
        let formulas = anchors.get(level).cloned().unwrap_or_else(|| formulas(text, false));
        candidates.extend(formulas.into_iter().map(|one| (one.end, one.start, Candidate::Formulas(one))));
        let plain = PLAIN.anchored.get(level).map_or(vec![&PLAIN.calculation, &PLAIN.number], |regex| vec![regex]);
        for captures in plain.into_iter().flat_map(|regex| regex.captures_iter(text)) {
            if let Some(whole) = captures.get(0) {
                candidates.push((whole.end(), whole.start(), Candidate::Plain(captures)));
            }
        }
        candidates.sort_by_key(|(end, start, _)| (usize::MAX - end, *start));
        for (end, _, candidate) in candidates {
            let answer = match candidate {
                // The number before an equals sign is another one.
                Candidate::Plain(_) if (2..4).contains(&level) && text[end..].trim_start().starts_with('=') => {
                    Found { value: Err(Fault::Unsupported), text: String::new() }
                }
                Candidate::Plain(captures) => plain_value(&captures),
                Candidate::Formulas(formulas) => read(text, &formulas, true),
            };
            if first.is_none() && !answer.text.is_empty() {
                first = Some(answer.text.clone());
            }
            // A formula with commands may be one that only this parser refuses: what follows is not read in its place.
            if answer.value != Err(Fault::Syntax) || answer.text.contains('\\') {
                return Some(Found { text: first.unwrap_or_default(), ..answer });
            }
        }
    }
    first.map(|text| Found { value: Err(Fault::Syntax), text })
}

enum Candidate<'a> {
    Formulas(Formulas),
    Plain(regex::Captures<'a>),
}

/// Returns the end of a text, at most [`MAX_TEXT`] bytes.
fn ending(text: &str) -> &str {
    let mut start = text.len().saturating_sub(MAX_TEXT);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

/// Returns the value of a calculation or a number.
fn plain_value(captures: &regex::Captures<'_>) -> Found {
    let group = |name| captures.name(name).map(|group| group.as_str());
    if let Some(calculation) = group("calculation") {
        return Found { value: calculation_value(calculation), text: calculation.to_string() };
    }
    let whole = group("groups").or(group("whole")).or(group("digits")).unwrap_or("0");
    let fraction =
        group("groups_fraction").or(group("fraction")).or(group("point")).unwrap_or_default().replace(',', ".");
    let whole = whole.replace([',', ' '], "");
    let trimmed = whole.trim_start_matches('0');
    let text = format!("{}{fraction}", if trimmed.is_empty() { "0" } else { trimmed });
    let digits = text.strip_prefix('-').unwrap_or(&text);
    let value = Ratio::parse(digits).ok_or(Fault::Unsupported).map(|value| {
        let number = Expr::Number { value, decimal: !fraction.is_empty() };
        let number = if text.starts_with('-') { number.negated() } else { number };
        Value::Expr(if group("percent").is_some() { Expr::Percent(Box::new(number)) } else { number })
    });
    Found { value, text }
}

/// Returns the value of a calculation in the syntax of Python, with `^` for powers.
fn calculation_value(text: &str) -> Result<Value, Fault> {
    static JUXTAPOSED: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"[\d.)]\s*\(|[\d.)]\s+[\d.]|\)\s*[\d.]|\.\d*\.|×|÷|(?:^|[^\d.])0\d")
            .expect("a valid regular expression")
    });
    static OTHER: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\*\s*\*|/\s*/|\^\s*[-+(]|\^[^^]*\^|\d\.(?:\D|$)").expect("a valid regular expression")
    });
    if JUXTAPOSED.is_match(text) || text.trim_end().ends_with(['+', '-', '*', '/', '^', '(']) {
        return Err(Fault::Syntax);
    }
    if OTHER.is_match(text) {
        return Err(Fault::Unsupported);
    }
    parse::parse(text.trim())
}

/// Returns the value of formulas: one value, or the set of several.
fn read(text: &str, formulas: &Formulas, repairs: bool) -> Found {
    let boxes = if formulas.in_box { Boxes::Last } else { Boxes::All };
    let mut parts: Vec<(Result<Value, Fault>, String)> = Vec::new();
    for &(start, end, percent) in &formulas.contents {
        let Some(text) = normalize(&text[start..end], boxes, repairs) else {
            parts.push((Err(Fault::Unsupported), String::new()));
            continue;
        };
        let value = parse::parse(&text).and_then(|value| match value {
            Value::Expr(e) if percent => Ok(Value::Expr(Expr::Percent(Box::new(e)))),
            _ if percent => Err(Fault::Unsupported),
            value => Ok(value),
        });
        parts.push((value, text));
    }
    if parts.len() < 2 || parts.iter().any(|(value, _)| value.is_err()) {
        let unsupported = parts.iter().any(|(value, _)| *value == Err(Fault::Unsupported));
        let (value, text) = parts.into_iter().next().unwrap_or((Err(Fault::Syntax), String::new()));
        // The first one counts if another is malformed.
        return Found { value: if unsupported { Err(Fault::Unsupported) } else { value }, text };
    }
    let text = parts.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join(" and ");
    let elements = parts.into_iter().filter_map(|(value, _)| value.ok()).flat_map(|value| match value {
        Value::Set(elements) => elements,
        value => vec![value],
    });
    Found { value: Ok(Value::Set(elements.collect())), text }
}

/// Returns the boxes of a text: each box within formulas, and everything from the first box to the last closing brace.
fn boxes(text: &str) -> Vec<Formulas> {
    let mut boxes = formulas(text, true);
    if let Some(start) = text.find("\\boxed{")
        && let Some(end) = text.rfind('}').filter(|&end| end > start + "\\boxed{".len())
    {
        boxes.push(Formulas { contents: vec![(start, end + 1, false)], start, end: end + 1, in_box: true });
    }
    boxes
}

/// Returns the formulas after "final answer is ... I hope", "final answer ... is", "answer:" and "answer".
fn anchors(text: &str) -> [Vec<Formulas>; 4] {
    static FINAL: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"(?is)final answer(?P<gap>.{0,100}?)\s+is:?\s*").expect("a valid regular expression")
    });
    static HOPE: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"^\.?\s?I hope").expect("a valid regular expression"));
    let mut scan = Scan::new(text);
    let mut levels: [Vec<Formulas>; 4] = Default::default();
    for anchor in FINAL.captures_iter(text) {
        let (Some(whole), Some(gap)) = (anchor.get(0), anchor.name("gap")) else { continue };
        let place = scan.with_space(whole.end());
        let Some(formulas) = scan.formulas(place, false) else { continue };
        let formulas = Formulas { start: whole.start(), ..formulas };
        if gap.is_empty() && HOPE.is_match(&text[formulas.end..]) {
            levels[0].push(formulas.clone());
        }
        levels[1].push(formulas);
    }
    let lower = text.to_ascii_lowercase();
    for (level, word) in [(2, "answer:"), (3, "answer")] {
        let mut from = 0;
        while let Some(start) = lower[from..].find(word).map(|at| from + at) {
            let places = text[start + word.len()..].char_indices().map(|(at, _)| start + word.len() + at);
            let formulas = places.take(51).find_map(|at| scan.formulas(at, false));
            from = formulas.as_ref().map_or(start + word.len(), |formulas| formulas.end);
            levels[level].extend(formulas.map(|formulas| Formulas { start, ..formulas }));
        }
    }
    levels
}

/// Returns the formulas of a text from left to right; with `boxed`, only formulas with a box in them.
fn formulas(text: &str, boxed: bool) -> Vec<Formulas> {
    let mut scan = Scan::new(text);
    let mut all = Vec::new();
    let mut at = 0;
    while let Some(next) = text[at..].find(|c: char| "$\\-".contains(c) || c.is_whitespace()).map(|next| at + next) {
        match scan.formulas(next, boxed) {
            Some(formulas) => {
                at = formulas.end;
                all.push(formulas);
            }
            None => at = next + text[next..].chars().next().map_or(1, char::len_utf8),
        }
    }
    all
}

/// Finds formulas in a text. The place of the next closing sign of each kind is kept, so that a text of opening signs is not
/// searched again and again.
struct Scan<'a> {
    text: &'a str,
    /// For each sign: where the search started, and the first place from there on.
    next: [(&'static str, usize, Option<usize>); 6],
}

impl<'a> Scan<'a> {
    fn new(text: &'a str) -> Self {
        let unknown = |sign| (sign, usize::MAX, None);
        Self { text, next: ["$$", "\\]", "$", "\\)", "\n", "\\boxed{"].map(unknown) }
    }

    /// Returns the first place of `sign` from `from` on.
    fn find(&mut self, sign: &str, from: usize) -> Option<usize> {
        let text = self.text;
        let entry = self.next.iter_mut().find(|(known, ..)| *known == sign)?;
        let (_, start, place) = entry;
        if *start > from || place.is_some_and(|place| place < from) {
            (*start, *place) = (from, text.get(from..)?.find(sign).map(|at| from + at));
        }
        *place
    }

    /// Returns the formula that starts at `at`, with the formulas that follow after "and", "or" or a comma.
    fn formulas(&mut self, at: usize, boxed: bool) -> Option<Formulas> {
        let (content, mut end) = self.formula(at, boxed)?;
        let mut contents = vec![content];
        while contents.len() < 6 {
            let rest = &self.text[end..];
            let word = rest.trim_start();
            let len =
                [",and", "and", ",or", "or", ","].iter().find(|word_| word.starts_with(**word_)).map_or(0, |w| w.len());
            if len == 0 {
                break;
            }
            let spaced = word[len..].len() - word[len..].trim_start().len();
            let place = end + rest.len() - word.len() + len + spaced;
            let place = if spaced > 0 { self.with_space(place) } else { place };
            let Some((content, next)) = self.formula(place, boxed) else { break };
            contents.push(content);
            end = next;
        }
        Some(Formulas { contents, start: at, end, in_box: false })
    }

    /// Returns the place before the space at the end of `..place` if a formula in brackets follows, which starts with it.
    fn with_space(&self, place: usize) -> usize {
        let space = self.text[..place].chars().next_back().filter(|c| c.is_whitespace());
        if self.text[place..].starts_with('[') { place - space.map_or(0, char::len_utf8) } else { place }
    }

    /// Returns the content of the formula that starts at `at`, and where it ends with its percent sign.
    fn formula(&mut self, at: usize, boxed: bool) -> Option<((usize, usize, bool), usize)> {
        let (start, end, close) = self.environment(at).filter(|&(start, end, _)| !boxed || self.has_box(start, end))?;
        let after = &self.text[end + close..];
        let trimmed = after.trim_start();
        let signs = ["\\%", "%", "Percentage", "percentage", "Percent", "percent", "Pct", "pct"];
        // "Percentage" is read as "Percent" with letters left over, as the alternatives are tried in this order.
        let percent = signs.iter().filter(|sign| !sign.ends_with("age")).find(|sign| trimmed.starts_with(**sign));
        let place = end + close;
        let end_of_all = place + after.len() - trimmed.len() + percent.map_or(0, |sign| sign.len());
        Some(((start, end, percent.is_some()), end_of_all))
    }

    /// Returns true if there is a box with something in it.
    fn has_box(&mut self, start: usize, end: usize) -> bool {
        let open = self.find("\\boxed{", start).map(|at| at + "\\boxed{".len());
        open.filter(|&open| open < end).is_some_and(|open| {
            self.text[open..end].find('}').is_some_and(|_| {
                // At least one character before the last closing brace.
                self.text[open..end].rfind('}').is_some_and(|close| close > 0)
            })
        })
    }

    /// Returns start and end of the content of the environment that starts at `at`, and the length of its closing sign.
    fn environment(&mut self, at: usize) -> Option<(usize, usize, usize)> {
        let text = self.text;
        let rest = text.get(at..)?;
        let escaped = text[..at].ends_with('\\');
        let closed = |place: usize| !text[..place].ends_with('\\');
        if rest.starts_with("$$") && !escaped {
            let first = at + 2;
            let skip = text[first..].chars().next()?.len_utf8();
            if let Some(end) =
                self.find("$$", first + skip).filter(|&end| closed(end) && !text[first..].starts_with("$$"))
            {
                return Some((first, end, 2));
            }
        }
        if rest.starts_with("\\[") && !escaped {
            let end = self.find("\\]", at + 2)?;
            return (end > at + 2 && closed(end)).then_some((at + 2, end, 2));
        }
        if rest.starts_with('$') && !escaped && !text[..at].ends_with(|c: char| c.is_ascii_digit()) {
            let line = self.find("\n", at + 1).unwrap_or(text.len());
            let mut end = self.find("$", at + 1)?;
            while !closed(end) {
                end = self.find("$", end + 1)?;
            }
            return (end > at + 1 && end < line).then_some((at + 1, end, 1));
        }
        if rest.starts_with("\\(") && !escaped {
            let line = self.find("\n", at + 2).unwrap_or(text.len());
            let end = self.find("\\)", at + 2)?;
            return (end > at + 2 && end < line && closed(end)).then_some((at + 2, end, 2));
        }
        self.bracket(at).or_else(|| self.fraction(at))
    }

    /// Returns the content of `[...]` between spaces.
    fn bracket(&self, at: usize) -> Option<(usize, usize, usize)> {
        let rest = &self.text[at..];
        let space = rest.chars().next().filter(|c| c.is_whitespace())?.len_utf8();
        let inner = rest[space..].strip_prefix('[')?;
        let len = inner.find(['\n', ']', '['])?;
        let after = inner[len..].strip_prefix(']')?.chars().next().filter(|c| c.is_whitespace())?;
        let start = at + space + 1;
        (len > 0).then_some((start, start + len, 1 + after.len_utf8()))
    }

    /// Returns a fraction of two numbers.
    fn fraction(&self, at: usize) -> Option<(usize, usize, usize)> {
        static FRACTION: LazyLock<Regex> = LazyLock::new(|| {
            let number = r"-?\d+(?:[.,]\d+)?";
            Regex::new(&format!(r"^-?\\frac\{{{number}\}}\{{{number}\}}")).expect("a valid regular expression")
        });
        let end = at + FRACTION.find(&self.text[at..])?.end();
        Some((at, end, 0))
    }
}
