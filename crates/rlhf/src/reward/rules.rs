//! Rewards that are rules: they count something in a response, or compare it with a column of its row.

use super::{Reward, RewardInput, Score};
use regex::Regex;
use rlhf_base::{Error, Result, files};
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::path::Path;

/// A rule that scores a response. `docs/guides/rewards.md` has a table of the rules and their flags.
#[derive(Debug, Clone)]
pub enum Rule {
    /// `-|length - target| / target`: 0 at the target, -1 at length 0 and at twice the target.
    Length {
        /// Target length, above 0.
        target: f64,
        /// Unit of the length.
        unit: Unit,
    },
    /// 1 if the regular expression matches anywhere in the response, else 0.
    Regex(Regex),
    /// Mean weight of the response's lower-cased words. Unlisted words have weight 0; a response without words scores 0.
    Words(HashMap<String, f64>),
    /// 1 if the response is one JSON value and, if `keys` is not empty, an object with all of them; else 0.
    Json {
        /// Required keys.
        keys: Vec<String>,
    },
    /// 1 if the response equals the column, or an element of its list, ignoring whitespace at both ends; else 0.
    Exact {
        /// Name of the column.
        column: String,
    },
    /// 1 if the last number of the response equals the last number of the column, or of an element of its list; else 0.
    Numeric {
        /// Name of the column.
        column: String,
        /// Tolerance: relative to the column's number if its absolute value is above 1, else absolute.
        tolerance: f64,
    },
    /// BLEU against the column, from 0 to 1.
    Bleu {
        /// Name of the column: a reference, or a list of references.
        column: String,
    },
    /// ROUGE-L (F1) against the column, from 0 to 1; the maximum over several references.
    RougeL {
        /// Name of the column: a reference, or a list of references.
        column: String,
    },
    /// Minus the fraction of the response's token n-grams that repeat an earlier one: from 0 to almost -1.
    Repetition {
        /// Number of tokens of an n-gram.
        n: usize,
    },
}

/// Unit of a length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Tokens, the stop token included.
    Tokens,
    /// Words, separated by whitespace.
    Words,
    /// Characters.
    Chars,
}

/// Names of the rules in flags.
pub(super) const KINDS: [&str; 9] =
    ["length", "regex", "words", "json", "exact", "numeric", "bleu", "rouge_l", "repetition"];

impl Rule {
    /// Parses the rule `kind` with its argument; a word list is read from its file.
    ///
    /// # Errors
    /// If there is no such rule, or its argument is malformed.
    pub fn parse(kind: &str, argument: &str) -> Result<Self> {
        let wrong = |expected: &str| wrong(kind, argument, expected);
        let column = || match argument {
            "" => Err(wrong(&format!("the name of a column, as in {kind}:answer"))),
            column => Ok(column.to_string()),
        };
        Ok(match kind {
            "length" => Self::parse_length(argument)?,
            "regex" if argument.is_empty() => return Err(wrong("a regular expression, as in regex:^Answer")),
            "regex" => {
                let last = |e: &regex::Error| e.to_string().lines().last().unwrap_or_default().trim().to_string();
                Rule::Regex(Regex::new(argument).map_err(|e| wrong(&format!("a regular expression ({})", last(&e))))?)
            }
            "words" if argument.is_empty() => return Err(wrong("a file of words, as in words:good.txt")),
            "words" => Rule::Words(read_words(Path::new(argument))?),
            "json" => {
                let keys = argument.split(',').map(str::trim).filter(|key| !key.is_empty());
                Rule::Json { keys: keys.map(str::to_string).collect() }
            }
            "exact" => Rule::Exact { column: column()? },
            "numeric" => Self::parse_numeric(argument)?,
            "bleu" => Rule::Bleu { column: column()? },
            "rouge_l" => Rule::RougeL { column: column()? },
            "repetition" => {
                let options = options(kind, argument, &["n"])?;
                let n = options.get("n").map_or(Some(3), |text| text.parse().ok()).filter(|&n: &usize| n > 0);
                Rule::Repetition { n: n.ok_or_else(|| wrong("a number of tokens, as in repetition:n=3"))? }
            }
            _ => return Err(wrong(&format!("a rule, one of {}", KINDS.join(", ")))),
        })
    }

    fn parse_length(argument: &str) -> Result<Self> {
        let options = options("length", argument, &["target", "unit"])?;
        let target =
            options.get("target").and_then(|text| text.parse().ok()).filter(|&x: &f64| x.is_finite() && x > 0.0);
        let unit = match options.get("unit").map_or("tokens", String::as_str) {
            "tokens" => Some(Unit::Tokens),
            "words" => Some(Unit::Words),
            "chars" => Some(Unit::Chars),
            _ => None,
        };
        let expected = "a length above 0, in tokens, words or chars, as in length:target=40,unit=words";
        let (target, unit) = target.zip(unit).ok_or_else(|| wrong("length", argument, expected))?;
        Ok(Rule::Length { target, unit })
    }

    fn parse_numeric(argument: &str) -> Result<Self> {
        let options = options("numeric", argument, &["column", "tolerance"])?;
        let tolerance = options.get("tolerance").map_or(Some(1e-6), |text| text.parse().ok());
        let tolerance = tolerance.filter(|x: &f64| x.is_finite() && *x >= 0.0);
        let expected = "a column and optionally a tolerance of 0 or more, as in numeric:answer,tolerance=0.01";
        let column = options.get("column").cloned();
        let (column, tolerance) = column.zip(tolerance).ok_or_else(|| wrong("numeric", argument, expected))?;
        Ok(Rule::Numeric { column, tolerance })
    }

    /// The column that the rule reads.
    pub(super) fn column(&self) -> Option<&str> {
        match self {
            Rule::Exact { column } | Rule::Numeric { column, .. } | Rule::Bleu { column } | Rule::RougeL { column } => {
                Some(column)
            }
            _ => None,
        }
    }

    fn score_one(&self, input: &RewardInput<'_>) -> Result<f64> {
        let text = input.response;
        let truth = |holds: bool| if holds { 1.0 } else { 0.0 };
        Ok(match self {
            Rule::Length { target, unit } => {
                let len = match unit {
                    Unit::Tokens => input.response_ids.len(),
                    Unit::Words => text.split_whitespace().count(),
                    Unit::Chars => text.chars().count(),
                };
                -(len as f64 - target).abs() / target
            }
            Rule::Regex(regex) => truth(regex.is_match(text)),
            Rule::Words(weights) => {
                let found_weights: Vec<f64> =
                    words(text).map(|word| weights.get(&word).copied().unwrap_or(0.0)).collect();
                found_weights.iter().sum::<f64>() / found_weights.len().max(1) as f64
            }
            Rule::Json { keys } => {
                let value: Option<Value> = serde_json::from_str(text.trim()).ok();
                truth(value.is_some_and(|value| keys.iter().all(|key| value.get(key).is_some())))
            }
            Rule::Exact { column } => truth(references(input.row, column)?.iter().any(|r| r.trim() == text.trim())),
            Rule::Numeric { column, tolerance } => {
                let number = last_number(text);
                let equals = |expected: f64| {
                    number.is_some_and(|number| (number - expected).abs() <= tolerance * expected.abs().max(1.0))
                };
                truth(numbers(input.row, column)?.into_iter().any(equals))
            }
            Rule::Bleu { column } => bleu(text, &references(input.row, column)?),
            Rule::RougeL { column } => {
                references(input.row, column)?.iter().map(|reference| rouge_l(text, reference)).fold(0.0, f64::max)
            }
            Rule::Repetition { n } => {
                let grams: Vec<&[i64]> = input.response_ids.windows(*n).collect();
                let distinct = grams.iter().collect::<HashSet<_>>().len();
                if grams.is_empty() { 0.0 } else { distinct as f64 / grams.len() as f64 - 1.0 }
            }
        })
    }
}

impl Reward for Rule {
    fn contents(&self) -> Vec<(String, Vec<u8>)> {
        let Self::Words(weights) = self else { return Vec::new() };
        let mut lines: Vec<String> = weights.iter().map(|(word, weight)| format!("{word} {weight}\n")).collect();
        lines.sort_unstable();
        vec![("its words".into(), lines.concat().into_bytes())]
    }

    fn score(&mut self, batch: &[RewardInput<'_>]) -> Result<Vec<Score>> {
        batch.iter().map(|input| self.score_one(input).map(Score::Response)).collect()
    }

    fn check_row(&self, row: &Value) -> Result<()> {
        match (self, self.column()) {
            (Rule::Numeric { column, .. }, _) => numbers(row, column).map(drop),
            (_, Some(column)) => references(row, column).map(drop),
            _ => Ok(()),
        }
    }
}

/// Returns the error for a malformed rule.
pub(super) fn wrong(kind: &str, argument: &str, expected: &str) -> Error {
    let colon = if argument.is_empty() { "" } else { ":" };
    Error::refused("reward", format!(" = {kind}{colon}{argument}: expected {expected}"))
}

/// Parses an argument such as `a=1,b=2`; the first value may omit its key, which is then the first of `known`.
pub(super) fn options(kind: &str, argument: &str, known: &[&str]) -> Result<HashMap<String, String>> {
    let wrong = || wrong(kind, argument, &format!("KEY=VALUE with the keys {}", known.join(", ")));
    let mut values = HashMap::new();
    for (at, part) in argument.split(',').filter(|part| !part.trim().is_empty()).enumerate() {
        let (key, value) = match part.split_once('=') {
            Some(pair) => pair,
            None if at == 0 => (known[0], part),
            None => return Err(wrong()),
        };
        if !known.contains(&key.trim()) || values.insert(key.trim().to_string(), value.trim().to_string()).is_some() {
            return Err(wrong());
        }
    }
    Ok(values)
}

/// Returns true if the row has a value in the column.
pub(super) fn has(row: &Value, column: &str) -> bool {
    row.get(column).is_some_and(|value| !value.is_null())
}

/// Returns the texts in a column: one text or number, or a list of them.
pub(super) fn references(row: &Value, column: &str) -> Result<Vec<String>> {
    let text = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        _ => None,
    };
    let texts = match row.get(column) {
        Some(Value::Array(list)) => list.iter().map(text).collect::<Option<Vec<_>>>().filter(|list| !list.is_empty()),
        Some(value) => text(value).map(|text| vec![text]),
        None => None,
    };
    texts.ok_or_else(|| {
        let expected = format!("expected a column `{column}` with a text, a number, or a list of them");
        let hint = if has(row, column) { "" } else { "; with optional=true such a row gets no score" };
        Error::Run(match row.get(column) {
            Some(value) => format!("{expected}, found {value}{hint}"),
            None => {
                let names: Vec<_> = row.as_object().into_iter().flat_map(|row| row.keys()).cloned().collect();
                format!("{expected}, found {}{hint}", if names.is_empty() { "none".into() } else { names.join(", ") })
            }
        })
    })
}

/// Returns the last number of each text in a column.
fn numbers(row: &Value, column: &str) -> Result<Vec<f64>> {
    let number = |text: &String| {
        let wrong = || Error::Run(format!("column `{column}`: expected a number, found {text:?}"));
        last_number(text).ok_or_else(wrong)
    };
    references(row, column)?.iter().map(number).collect()
}

/// Returns the last number in a text. Sign, commas between digits, fraction and exponent are optional.
fn last_number(text: &str) -> Option<f64> {
    static NUMBER: std::sync::LazyLock<Regex> = std::sync::LazyLock::new(|| {
        Regex::new(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?").expect("a valid regular expression")
    });
    let match_ = NUMBER.find_iter(text).last()?;
    let digits = match_.as_str().replace(',', "");
    // In "3-5" the hyphen is not a sign.
    let dash = text[..match_.start()].chars().next_back().is_some_and(char::is_alphanumeric);
    let digits = if dash { digits.trim_start_matches('-') } else { &digits };
    digits.parse().ok().filter(|number: &f64| number.is_finite())
}

/// Splits a text into lower-cased words: runs of letters, digits and apostrophes.
fn words(text: &str) -> impl Iterator<Item = String> {
    let parts = text.split(|c: char| !c.is_alphanumeric() && c != '\'').map(|word| word.trim_matches('\''));
    parts.filter(|word| !word.is_empty()).map(str::to_lowercase)
}

/// Reads a word list: one word per line, optionally followed by its weight, which is 1 otherwise. `#` starts a comment.
fn read_words(path: &Path) -> Result<HashMap<String, f64>> {
    let text = files::read_text(path)?;
    let mut weights = HashMap::new();
    for (line, text) in (1..).zip(text.lines()) {
        let parts: Vec<&str> = text.split('#').next().unwrap_or_default().split_whitespace().collect();
        let weight = match parts.len() {
            0 => continue,
            1 => Some(1.0),
            2 => parts[1].parse().ok().filter(|weight: &f64| weight.is_finite()),
            _ => None,
        };
        let word: Vec<String> = words(parts[0]).collect();
        match (weight, word.as_slice()) {
            (Some(weight), [word]) => weights.insert(word.clone(), weight),
            _ => {
                let message = format!("expected a word and optionally its weight, found {:?}", text.trim());
                return Err(Error::Row { path: path.into(), place: format!("line {line}"), message });
            }
        };
    }
    if weights.is_empty() { Err(Error::invalid(path, "expected at least one word, found none")) } else { Ok(weights) }
}

/// Counts the items.
fn counts<T: Eq + Hash>(items: impl Iterator<Item = T>) -> HashMap<T, usize> {
    let mut counts = HashMap::new();
    items.for_each(|item| *counts.entry(item).or_insert(0) += 1);
    counts
}

/// Splits a text into words and punctuation marks: runs of letters and digits, and every other character except whitespace.
fn words_and_marks(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let word = rest.find(|c: char| !c.is_alphanumeric()).unwrap_or(rest.len());
        let end = if first.is_alphanumeric() { word } else { first.len_utf8() };
        parts.push(&rest[..end]);
        rest = rest[end..].trim_start();
    }
    parts
}

/// Returns the sentence BLEU, case-sensitive, over n-grams of up to four words and punctuation marks, fewer for a shorter text.
/// For n of 2 and more, 1 is added to the counts of matches and of n-grams, so that one n without a match does not make the
/// score 0.
///
/// Sources: Papineni et al. 2002; smoothing: Lin and Och 2004.
fn bleu(candidate: &str, references: &[String]) -> f64 {
    let candidate = words_and_marks(candidate);
    let references: Vec<Vec<&str>> = references.iter().map(|text| words_and_marks(text)).collect();
    let len = candidate.len();
    let longest = len.min(4);
    let mut log_precision = 0.0;
    for n in 1..=longest {
        let known: Vec<_> = references.iter().map(|reference| counts(reference.windows(n))).collect();
        let most = |gram: &[&str]| known.iter().filter_map(|counts| counts.get(gram).copied()).max().unwrap_or(0);
        let matches: usize = counts(candidate.windows(n)).iter().map(|(gram, &count)| count.min(most(gram))).sum();
        let added = usize::from(n > 1);
        log_precision += ((matches + added) as f64 / (len - n + 1 + added) as f64).ln();
    }
    // The closest reference length; the shorter of two equally close ones.
    let closest = references.iter().map(Vec::len).min_by_key(|&reference| (reference.abs_diff(len), reference));
    if longest == 0 {
        return 0.0;
    }
    let log_brevity_penalty = (1.0 - closest.unwrap_or(0) as f64 / len as f64).min(0.0);
    (log_precision / longest as f64 + log_brevity_penalty).exp()
}

/// Returns ROUGE-L: the F1 of the longest common subsequence of lower-cased words, runs of letters and digits of any script. Source: Lin
/// 2004, with beta = 1; for ASCII the number of the package rouge_score without its stemmer.
fn rouge_l(candidate: &str, reference: &str) -> f64 {
    let parts = |text: &str| -> Vec<String> {
        let parts = text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
        parts.map(str::to_lowercase).collect()
    };
    let candidate = parts(candidate);
    let reference = parts(reference);
    // lengths[j]: length of the longest common subsequence of the candidate's words so far and the reference's first j words.
    let mut lengths = vec![0usize; reference.len() + 1];
    for word in &candidate {
        let mut diagonal = 0;
        for (j, other) in reference.iter().enumerate() {
            let above = lengths[j + 1];
            lengths[j + 1] = if word == other { diagonal + 1 } else { above.max(lengths[j]) };
            diagonal = above;
        }
    }
    let total = candidate.len() + reference.len();
    if total == 0 { 0.0 } else { 2.0 * lengths[reference.len()] as f64 / total as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlhf_lm::generate::FinishReason;
    use serde_json::json;

    /// Scores a response by the rule `written`; its words have the token ids 1, 2, ...
    #[track_caller]
    fn score(written: &str, response: &str, row: &Value) -> f64 {
        let mut ids = HashMap::new();
        let id = |word| {
            let next = ids.len() as i64 + 1;
            *ids.entry(word).or_insert(next)
        };
        let response_ids: Vec<i64> = response.split_whitespace().map(id).collect();
        let (kind, argument) = written.split_once(':').unwrap_or((written, ""));
        let rule = Rule::parse(kind, argument).unwrap();
        let finish = FinishReason::Stop;
        let input = RewardInput {
            prompt: "",
            response,
            prompt_ids: &[1],
            response_ids: &response_ids,
            finish,
            row,
            episode: None,
        };
        rule.check_row(row).unwrap();
        rule.score_one(&input).unwrap()
    }

    #[track_caller]
    fn is(written: &str, response: &str, row: &Value, expected: f64) {
        let found = score(written, response, row);
        assert!((found - expected).abs() < 1e-6, "{written} of {response:?}: {found} is not {expected}");
    }

    #[test]
    fn length_falls_with_the_distance_from_its_target() {
        for (written, expected) in [
            ("length:4", 0.0),
            ("length:target=8", -0.5),
            ("length:target=2", -1.0),
            ("length:target=5,unit=words", -0.2),
            ("length:target=9,unit=chars", -10.0 / 9.0), // 19 characters
        ] {
            is(written, "four words, no more", &json!({}), expected);
        }
        is("length:4", "", &json!({}), -1.0);
    }

    #[test]
    fn a_regular_expression_may_match_anywhere() {
        is("regex:^Answer: \\d+$", "Answer: 42", &json!({}), 1.0);
        is("regex:^Answer: \\d+$", "The Answer: 42", &json!({}), 0.0);
        is("regex:(?i)a=b:c", "see A=B:C there", &json!({}), 1.0);
    }

    #[test]
    fn a_word_list_scores_the_mean_weight_of_the_words() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "# moods\ngood\nBAD -2\n\ndon't 0.5 # a word too\n").unwrap();
        let written = format!("words:{}", file.path().display());
        is(&written, "Good, good: not bad!", &json!({}), (1.0 + 1.0 - 2.0) / 4.0);
        is(&written, "Don't 'go' good", &json!({}), 1.5 / 3.0);
        is(&written, " ... ", &json!({}), 0.0);
        for (text, words) in [
            ("good\nvery good thing\n", "line 2: expected a word and optionally its weight, found \"very good thing\""),
            ("good much\n", "line 1: expected a word"),
            ("a-b 1\n", "line 1: expected a word"),
            ("# none\n", "expected at least one word"),
        ] {
            std::fs::write(file.path(), text).unwrap();
            let error = Rule::parse("words", file.path().to_str().unwrap()).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let error = Rule::parse("words", "no/such/file").unwrap_err().to_string();
        assert!(error.starts_with("no/such/file: cannot read"), "{error}");
    }

    #[test]
    fn json_must_be_one_value_with_the_required_keys() {
        for (written, response, expected) in [
            ("json", " {\"a\": [1, 2]} \n", 1.0),
            ("json", "7", 1.0),
            ("json", "{\"a\": 1} {\"b\": 2}", 0.0),
            ("json", "{'a': 1}", 0.0),
            ("json", "", 0.0),
            ("json:a, b", "{\"b\": null, \"a\": 1}", 1.0),
            ("json:a, b", "{\"a\": 1}", 0.0),
            ("json:a", "[\"a\"]", 0.0),
        ] {
            is(written, response, &json!({}), expected);
        }
    }

    #[test]
    fn exact_compares_with_the_column_or_its_list_and_ignores_outer_whitespace() {
        is("exact:answer", " Paris\n", &json!({"answer": "Paris"}), 1.0);
        is("exact:answer", "paris", &json!({"answer": "Paris"}), 0.0);
        is("exact:answer", "42", &json!({"answer": 42}), 1.0);
        is("exact:answer", "two", &json!({"answer": ["2", "two "]}), 1.0);
        is("exact:answer", "", &json!({"answer": "Paris"}), 0.0);
    }

    #[test]
    fn numeric_compares_the_last_numbers() {
        let gsm = json!({"answer": "She has 3 + 69 of them.\n#### 72"});
        is("numeric:answer", "3 and 69 make 72.", &gsm, 1.0);
        is("numeric:answer", "72 is made of 3 and 69", &gsm, 0.0);
        is("numeric:answer", "no number", &gsm, 0.0);
        is("numeric:answer", "It is $1,234.50, I think", &json!({"answer": 1234.5}), 1.0);
        is("numeric:answer", "3-5", &json!({"answer": 5}), 1.0);
        is("numeric:answer", "x = -5e-1", &json!({"answer": -0.5}), 1.0);
        is("numeric:answer", "2.75", &json!({"answer": 2.7516}), 0.0);
        is("numeric:column=answer,tolerance=0.001", "2.75", &json!({"answer": 2.7516}), 1.0); // within 0.0027516
        is("numeric:answer,tolerance=0.001", "2.74", &json!({"answer": 2.7516}), 0.0);
        let error = Rule::parse("numeric", "answer").unwrap().check_row(&json!({"answer": "none"})).unwrap_err();
        assert_eq!(error.to_string(), "column `answer`: expected a number, found \"none\"");
    }

    #[test]
    fn bleu_matches_the_papers_with_the_smoothing_of_lin_and_och() {
        // Papineni's words. Matches of 1 to 4 words: 5 of 7, 4 of 6, 2 of 5, 1 of 4; smoothed 5/7, 5/7, 3/6, 2/5; as long as
        // the second reference: (5/7 * 5/7 * 1/2 * 2/5)^(1/4).
        let references = json!({"r": ["the cat is on the mat", "there is a cat on the mat"]});
        is("bleu:r", "the cat the cat on the mat", &references, 0.565_188_7);
        // All matches, and 2 words for 6: exp(1 - 6/2).
        is("bleu:r", "the cat", &json!({"r": "the cat is on the mat"}), (-2f64).exp());
        is("bleu:r", "The cat, on the mat.", &json!({"r": "The cat, on the mat."}), 1.0);
        is("bleu:r", "a dog", &json!({"r": "the cat"}), 0.0);
        is("bleu:r", "", &json!({"r": "the cat"}), 0.0);
        // One word of two, no pair: 1/2 and (0 + 1)/(1 + 1).
        is("bleu:r", "the dog", &json!({"r": "the cat"}), 0.5);
        assert_eq!(words_and_marks(" The cat, on \u{e9}t\u{e9}!"), ["The", "cat", ",", "on", "\u{e9}t\u{e9}", "!"]);
    }

    #[test]
    fn rouge_l_matches_the_examples_of_lin() {
        // Lin 2004, section 3.1: subsequences of 3 and of 2 words of 4.
        let row = json!({"r": "police killed the gunman"});
        is("rouge_l:r", "Police kill the gunman.", &row, 0.75);
        is("rouge_l:r", "the gunman kill police", &row, 0.5);
        is("rouge_l:r", "", &row, 0.0);
        // 2 words of 2 and of 4: precision 1, recall 1/2; and the best of two references.
        is("rouge_l:r", "the gunman", &json!({"r": ["nobody", "police killed the gunman"]}), 2.0 / 3.0);
    }

    #[test]
    fn rouge_l_equals_the_package_rouge_score_with_words_of_any_script_and_for_ascii_with_its_own() {
        let golden = include_str!("../../../../tests/golden/rouge_l.json");
        let pairs: Vec<Value> = serde_json::from_str(golden).unwrap();
        let mut with_own_words = 0;
        for pair in &pairs {
            let (candidate, row) = (pair["candidate"].as_str().unwrap(), json!({"r": pair["reference"]}));
            let found = score("rouge_l:r", candidate, &row);
            for expected in [&pair["any_script"], &pair["own"]].into_iter().filter_map(Value::as_f64) {
                assert!((found - expected).abs() < 1e-12, "{pair}: {found}");
            }
            with_own_words += usize::from(pair["own"].is_number());
        }
        assert!(with_own_words > 40 && pairs.len() > with_own_words + 8);
    }

    #[test]
    fn repetition_is_the_fraction_of_repeated_n_grams() {
        // 1 2 3 1 2 3 1: five n-grams of 3, of which 123, 231 and 312 are distinct.
        is("repetition", "a b c a b c a", &json!({}), -2.0 / 5.0);
        is("repetition:1", "a a a a", &json!({}), -0.75);
        is("repetition:n=2", "a b c d", &json!({}), 0.0);
        is("repetition:n=3", "a a", &json!({}), 0.0);
    }

    #[test]
    fn malformed_rules_are_refused_with_the_expected_form() {
        for (kind, argument, message) in [
            ("length", "", "reward = length: expected a length above 0, in tokens, words or chars"),
            ("length", "0", "reward = length:0: expected a length above 0"),
            ("length", "target=4,unit=lines", "reward = length:target=4,unit=lines: expected a length above 0"),
            ("length", "goal=4", "reward = length:goal=4: expected KEY=VALUE with the keys target, unit"),
            ("regex", "a(b", "reward = regex:a(b: expected a regular expression (error: unclosed group)"),
            ("exact", "", "reward = exact: expected the name of a column, as in exact:answer"),
            ("numeric", "answer,tolerance=-1", "reward = numeric:answer,tolerance=-1: expected a column"),
            ("repetition", "n=0", "reward = repetition:n=0: expected a number of tokens"),
            ("rhyme", "x", "reward = rhyme:x: expected a rule, one of length, regex, words"),
        ] {
            let error = Rule::parse(kind, argument).unwrap_err();
            assert!(error.to_string().starts_with(message), "{error}");
            assert_eq!(error.exit_code(), 2);
        }
        let hint = "; with optional=true such a row gets no score";
        for (row, found) in [
            (json!({"a": 1, "b": 2}), format!("found a, b{hint}")),
            (json!({"answer": null}), format!("found null{hint}")),
            (json!({"answer": {}}), "found {}".into()),
        ] {
            let error = Rule::parse("exact", "answer").unwrap().check_row(&row).unwrap_err().to_string();
            assert!(error.starts_with("expected a column `answer`") && error.ends_with(&found), "{error}");
        }
    }
}
