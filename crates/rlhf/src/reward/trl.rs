//! The reward functions of TRL 1.11, by their names.
//!
//! Source: [TRL v1.11.0, trl/rewards](https://github.com/huggingface/trl/tree/v1.11.0/trl/rewards).

use super::rules::{options, references, wrong};
use super::{Reward, RewardInput, Score};
use math_verify::{Solution, Verdict};
use rlhf_base::{Error, Result};
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::f64::consts::PI;
use std::str::FromStr;

/// Names of the functions in flags.
pub(super) const KINDS: [&str; 6] = [
    "accuracy_reward",
    "reasoning_accuracy_reward",
    "think_format_reward",
    "get_soft_overlong_punishment",
    "get_repetition_penalty_reward",
    "get_cosine_scaled_reward",
];

/// Returns the name of the reward in TRL's metrics: a function `get_...` of TRL returns a function with another name.
pub(super) fn name(kind: &str) -> &str {
    match kind {
        "get_soft_overlong_punishment" => "soft_overlong_punishment_reward",
        "get_repetition_penalty_reward" => "repetition_penalty_reward",
        "get_cosine_scaled_reward" => "cosine_scaled_reward",
        kind => kind,
    }
}

/// A reward function of TRL with its arguments. Lengths are in tokens, the stop token included.
#[derive(Debug, Clone, PartialEq)]
pub enum TrlFunction {
    /// 1 if the answer of the response is equal to the solution, else 0; see [`Solution`]. Absent if the solution has no value.
    Accuracy {
        /// Column of the solution: a text or a number, or a list of them, of which one must be equal.
        column: String,
    },
    /// [`TrlFunction::Accuracy`] of the text after the last delimiter; 0 for a response without a delimiter.
    ReasoningAccuracy {
        /// Column of the solution.
        column: String,
        /// Ends of the reasoning; the first one of the list that is in the response counts.
        reasoning_delimiters: Vec<String>,
    },
    /// 1 if the response begins with `<think>`, has no second one, and has `</think>`; else 0.
    ThinkFormat,
    /// 0 up to `max_completion_len - soft_punish_cache` tokens, then falling to -1 at `max_completion_len`, and -1 beyond it.
    ///
    /// Source: DAPO, [Yu et al. 2025](https://arxiv.org/abs/2503.14476), eq. 13.
    SoftOverlongPunishment {
        /// Maximum length.
        max_completion_len: usize,
        /// Length of the interval in which the penalty grows.
        soft_punish_cache: usize,
    },
    /// `max_penalty` times the fraction of the response's token n-grams that repeat another one.
    ///
    /// Source: [Yeo et al. 2025](https://arxiv.org/abs/2502.03373), appendix C.2.
    RepetitionPenalty {
        /// Number of tokens of an n-gram.
        ngram_size: usize,
        /// The largest penalty, 0 or less.
        max_penalty: f64,
    },
    /// A correct response scores from `max_value_correct` at length 0 to `min_value_correct` at `max_len`, a wrong one from
    /// `min_value_wrong` to `max_value_wrong`, along half a cosine.
    ///
    /// Source: [Yeo et al. 2025](https://arxiv.org/abs/2502.03373), appendix C.1.
    CosineScaled {
        /// Column of the solution.
        column: String,
        /// Length at which the schedule ends.
        max_len: usize,
        /// Score of a wrong response of length 0.
        min_value_wrong: f64,
        /// Score of a wrong response of `max_len` tokens.
        max_value_wrong: f64,
        /// Score of a correct response of `max_len` tokens.
        min_value_correct: f64,
        /// Score of a correct response of length 0.
        max_value_correct: f64,
    },
}

/// The arguments of one function.
struct Arguments<'a> {
    kind: &'a str,
    argument: &'a str,
    values: HashMap<String, String>,
}

impl Arguments<'_> {
    /// Returns the value of `key`, or `default`.
    ///
    /// # Errors
    /// If there is neither, or `valid` is false for the value.
    fn number<T: FromStr + Copy>(
        &self,
        key: &str,
        default: Option<T>,
        expected: &str,
        valid: impl Fn(T) -> bool,
    ) -> Result<T> {
        let value = self.values.get(key).map_or(default, |text| text.parse().ok());
        value
            .filter(|value| valid(*value))
            .ok_or_else(|| wrong(self.kind, self.argument, &format!("{key}, {expected}, as in {}", example(self.kind))))
    }

    fn column(&self) -> String {
        self.values.get("column").map_or_else(|| "solution".into(), String::clone)
    }
}

/// Returns a valid setting of a function with arguments.
fn example(kind: &str) -> &'static str {
    match kind {
        "get_soft_overlong_punishment" => "get_soft_overlong_punishment:max_completion_len=1280,soft_punish_cache=256",
        "get_repetition_penalty_reward" => "get_repetition_penalty_reward:ngram_size=3,max_penalty=-1",
        _ => "get_cosine_scaled_reward:max_len=1024",
    }
}

/// Names of columns that hold a solution in datasets.
const SOLUTIONS: [&str; 6] = ["solution", "answer", "ground_truth", "final_answer", "target", "label"];

impl TrlFunction {
    /// Parses the function `kind` with its arguments, such as `max_len=100`. Arguments without a default in TRL's functions have the
    /// values of `trl grpo`.
    ///
    /// # Errors
    /// If there is no such function, or an argument is unknown, missing or malformed.
    pub fn parse(kind: &str, argument: &str) -> Result<Self> {
        let known: &[&str] = match kind {
            "accuracy_reward" => &["column"],
            "reasoning_accuracy_reward" => &["column", "reasoning_delimiters"],
            "think_format_reward" => &[],
            "get_soft_overlong_punishment" => &["max_completion_len", "soft_punish_cache"],
            "get_repetition_penalty_reward" => &["ngram_size", "max_penalty"],
            "get_cosine_scaled_reward" => {
                &["max_len", "min_value_wrong", "max_value_wrong", "min_value_correct", "max_value_correct", "column"]
            }
            _ => return Err(wrong(kind, argument, &format!("a function, one of {}", KINDS.join(", ")))),
        };
        if known.is_empty() && !argument.is_empty() {
            return Err(wrong(kind, argument, "no arguments"));
        }
        let arguments = Arguments { kind, argument, values: options(kind, argument, known)? };
        let finite = |x: f64| x.is_finite();
        Ok(match kind {
            "accuracy_reward" => Self::Accuracy { column: arguments.column() },
            "reasoning_accuracy_reward" => {
                let delimiters = arguments.values.get("reasoning_delimiters").map_or("</think>", String::as_str);
                let reasoning_delimiters = delimiters.split('|').map(str::to_string).collect();
                Self::ReasoningAccuracy { column: arguments.column(), reasoning_delimiters }
            }
            "think_format_reward" => Self::ThinkFormat,
            "get_soft_overlong_punishment" => Self::SoftOverlongPunishment {
                max_completion_len: arguments
                    .number("max_completion_len", Some(1280), "a number of tokens", |_| true)?,
                soft_punish_cache: arguments.number("soft_punish_cache", Some(256), "a number of tokens", |_| true)?,
            },
            "get_repetition_penalty_reward" => Self::RepetitionPenalty {
                ngram_size: arguments.number("ngram_size", Some(3), "a number of tokens above 0", |n| n > 0)?,
                max_penalty: arguments
                    .number("max_penalty", Some(-1.0), "a number of 0 or less", |x: f64| x.is_finite() && x <= 0.0)?,
            },
            _ => Self::CosineScaled {
                column: arguments.column(),
                max_len: arguments.number("max_len", None, "a number of tokens above 0", |n| n > 0)?,
                min_value_wrong: arguments.number("min_value_wrong", Some(-1.0), "a number", finite)?,
                max_value_wrong: arguments.number("max_value_wrong", Some(-0.5), "a number", finite)?,
                min_value_correct: arguments.number("min_value_correct", Some(0.5), "a number", finite)?,
                max_value_correct: arguments.number("max_value_correct", Some(1.0), "a number", finite)?,
            },
        })
    }

    /// The column of the solution.
    fn column(&self) -> Option<&str> {
        match self {
            Self::Accuracy { column } | Self::ReasoningAccuracy { column, .. } | Self::CosineScaled { column, .. } => {
                Some(column)
            }
            _ => None,
        }
    }

    /// Checks that a row has the column that the function reads.
    ///
    /// # Errors
    /// If the column is missing, or is no text, number, or list of them.
    pub fn check_row(&self, row: &Value) -> Result<()> {
        let Some(column) = self.column() else { return Ok(()) };
        references(row, column).map(drop).map_err(|error| match error {
            Error::Run(message) if row.get(column).is_none() => Error::Run(format!("{message}{}", self.hint(row))),
            other => other,
        })
    }

    /// Returns the end of the error about a row without the column: the column that is probably meant, and how to name it.
    fn hint(&self, row: &Value) -> String {
        let Some(column) = SOLUTIONS.iter().find(|column| row.get(**column).is_some()) else { return String::new() };
        match self {
            Self::Accuracy { .. } => format!("; if `{column}` is it, --reward accuracy_reward:{column}"),
            _ => format!("; if `{column}` is it, column={column} in the arguments of the reward"),
        }
    }

    /// Returns the score of a response, and true if equality with its solution was undecided.
    fn score(&self, input: &RewardInput<'_>) -> Result<(Score, bool)> {
        let text = input.response;
        let len = input.response_ids.len();
        let decided = |score: f64| Ok((Score::Response(score), false));
        match self {
            Self::Accuracy { column } => {
                let (correct, undecided) = accuracy(text, input.row, column)?;
                Ok((correct.map(|correct| f64::from(u8::from(correct))).into(), undecided))
            }
            Self::ReasoningAccuracy { column, reasoning_delimiters } => {
                let mut ends = reasoning_delimiters.iter().filter_map(|delimiter| text.rsplit_once(delimiter.as_str()));
                let Some((_, answer)) = ends.next() else { return decided(0.0) };
                let (correct, undecided) = accuracy(answer, input.row, column)?;
                Ok((correct.map(|correct| f64::from(u8::from(correct))).into(), undecided))
            }
            Self::ThinkFormat => {
                let rest = text.strip_prefix("<think>");
                let valid = rest.is_some_and(|rest| !rest.contains("<think>") && rest.contains("</think>"));
                decided(f64::from(u8::from(valid)))
            }
            Self::SoftOverlongPunishment { max_completion_len, soft_punish_cache } => {
                let most = *max_completion_len as f64;
                let cache = *soft_punish_cache as f64;
                let len = len as f64;
                decided(if len <= most - cache {
                    0.0
                } else if len <= most {
                    (most - cache - len) / cache
                } else {
                    -1.0
                })
            }
            Self::RepetitionPenalty { ngram_size, max_penalty } => {
                let grams: Vec<&[i64]> = input.response_ids.windows(*ngram_size).collect();
                let distinct = grams.iter().collect::<HashSet<_>>().len();
                let repeated = if grams.is_empty() { 0.0 } else { 1.0 - distinct as f64 / grams.len() as f64 };
                decided(if repeated > 0.0 { repeated * max_penalty } else { 0.0 })
            }
            Self::CosineScaled { column, .. } => {
                let (correct, undecided) = accuracy(text, input.row, column)?;
                Ok((correct.map(|correct| self.scaled(correct, len)).into(), undecided))
            }
        }
    }

    /// Returns the score of a response of `len` tokens by the cosine schedule.
    fn scaled(&self, correct: bool, len: usize) -> f64 {
        let Self::CosineScaled {
            max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct, ..
        } = self
        else {
            return 0.0;
        };
        // Beyond `max_len` the cosine would rise again.
        let progress = (len as f64 / *max_len as f64).min(1.0);
        let (end, start) =
            if correct { (min_value_correct, max_value_correct) } else { (max_value_wrong, min_value_wrong) };
        end + 0.5 * (start - end) * (1.0 + (progress * PI).cos())
    }
}

/// Returns true if the answer in a text is equal to a solution in the column, or `None` if no solution has a value; and true if the answer
/// counts as wrong because equality was undecided.
fn accuracy(text: &str, row: &Value, column: &str) -> Result<(Option<bool>, bool)> {
    let solutions: Vec<Solution> =
        references(row, column)?.iter().filter_map(|solution| Solution::parse(solution)).collect();
    if solutions.is_empty() {
        return Ok((None, false));
    }
    let verdicts: Vec<Verdict> = solutions.iter().map(|solution| solution.verify(text)).collect();
    let correct = verdicts.contains(&Verdict::Equal);
    Ok((Some(correct), !correct && verdicts.contains(&Verdict::Undecided)))
}

/// A reward that is a function of TRL. Functions that compare with a solution have the metric `undecided`: the fraction of the
/// responses of a batch that count as wrong because equality could not be decided.
#[derive(Debug, Clone)]
pub struct TrlReward {
    function: TrlFunction,
    undecided: f64,
}

impl TrlReward {
    /// Creates the reward.
    pub fn new(function: TrlFunction) -> Self {
        Self { function, undecided: 0.0 }
    }

    /// The column of the solution.
    pub(super) fn column(&self) -> Option<&str> {
        self.function.column()
    }
}

impl Reward for TrlReward {
    fn score(&mut self, batch: &[RewardInput<'_>]) -> Result<Vec<Score>> {
        let mut undecided = 0usize;
        let scores = batch.iter().map(|input| {
            let (score, unknown) = self.function.score(input)?;
            undecided += usize::from(unknown);
            Ok(score)
        });
        let scores = scores.collect::<Result<_, Error>>()?;
        self.undecided = undecided as f64 / batch.len().max(1) as f64;
        Ok(scores)
    }

    fn check_row(&self, row: &Value) -> Result<()> {
        self.function.check_row(row)
    }

    fn extra(&self) -> Vec<(String, f64)> {
        self.function.column().map(|_| ("undecided".to_string(), self.undecided)).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlhf_lm::generate::FinishReason;
    use serde_json::json;

    /// Scores a response of these token ids to a prompt of the row.
    #[track_caller]
    fn score(written: &str, response: &str, response_ids: &[i64], row: &Value) -> Score {
        let (kind, argument) = written.split_once(':').unwrap_or((written, ""));
        let mut reward = TrlReward::new(TrlFunction::parse(kind, argument).unwrap());
        reward.check_row(row).unwrap();
        let finish = FinishReason::Stop;
        let input = RewardInput { prompt: "", response, prompt_ids: &[1], response_ids, finish, row, episode: None };
        reward.score(&[input]).unwrap().remove(0)
    }

    #[track_caller]
    fn is(written: &str, response: &str, response_ids: &[i64], expected: f64) {
        let row = json!({"solution": "\\frac{1}{3}", "answer": "7"});
        match score(written, response, response_ids, &row) {
            Score::Response(found) if (found - expected).abs() < 1e-12 => {}
            found => panic!("{written} of {response:?}: {found:?} is not {expected}"),
        }
    }

    // The numbers of these tests are those of the functions in trl 1.11.0 with math-verify 0.9.0.

    #[test]
    fn accuracy_reward_compares_with_the_solution() {
        is("accuracy_reward", "My answer is \\boxed{\\frac{1}{3}}", &[1], 1.0);
        is("accuracy_reward", "My answer is \\boxed{\\frac{1}{2}}", &[1], 0.0);
        is("accuracy_reward", "My answer is 1/3", &[1], 0.0);
        is("accuracy_reward:answer", "\\boxed{7}", &[1], 1.0);
        is("accuracy_reward:column=answer", "\\boxed{8}", &[1], 0.0);
        let any = json!({"solution": ["none", "2", "3"]});
        assert_eq!(score("accuracy_reward", "\\boxed{3}", &[1], &any), Score::Response(1.0));
        let unknown = json!({"solution": "no number"});
        assert_eq!(score("accuracy_reward", "\\boxed{3}", &[1], &unknown), Score::Absent);
        assert_eq!(score("get_cosine_scaled_reward:100", "\\boxed{3}", &[1], &unknown), Score::Absent);
    }

    #[test]
    fn reasoning_accuracy_reward_reads_what_follows_the_reasoning() {
        for (response, expected) in [
            ("<think> \\boxed{1} </think> The final answer is \\boxed{\\frac{1}{3}}", 1.0),
            ("<think> Reasoning </think> The final answer is \\boxed{\\frac{1}{2}}", 0.0),
            ("<think> Partial answers \\boxed{\\frac{1}{3}} but no end", 0.0),
            ("\\boxed{\\frac{1}{3}}</think>a</think>\\boxed{2}", 0.0),
        ] {
            is("reasoning_accuracy_reward", response, &[1], expected);
        }
        let other = "reasoning_accuracy_reward:reasoning_delimiters=</r>|</s>";
        is(other, "a</s>b</r>\\boxed{\\frac{1}{3}}", &[1], 1.0);
        is(other, "\\boxed{\\frac{1}{3}}</s>b", &[1], 0.0);
        // Without an end of the reasoning, the response is wrong whatever the solution is.
        let unknown = json!({"solution": "no number"});
        assert_eq!(score("reasoning_accuracy_reward", "\\boxed{3}", &[1], &unknown), Score::Response(0.0));
    }

    #[test]
    fn think_format_reward_requires_one_closed_block_at_the_start() {
        for (response, expected) in [
            ("<think>\nThis is my reasoning.\n</think>\nThis is my answer.", 1.0),
            ("<think>\nThis is my reasoning.\nThis is my answer.", 0.0),
            ("<think></think>", 1.0),
            ("<think>a</think>b</think>", 1.0),
            ("<think>a<think>b</think>", 0.0),
            ("<think>a</think><think>", 0.0),
            (" <think>a</think>", 0.0),
            ("a\n<think>a</think>", 0.0),
        ] {
            is("think_format_reward", response, &[1], expected);
        }
    }

    #[test]
    fn penalties_depend_on_token_ids() {
        let soft = "get_soft_overlong_punishment:max_completion_len=100,soft_punish_cache=20";
        for (len, expected) in [(80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0)] {
            is(soft, "", &vec![1; len], expected);
        }
        is("get_soft_overlong_punishment:100,soft_punish_cache=0", "", &[1; 100], 0.0);
        is("get_soft_overlong_punishment", "", &[1; 1152], -0.5); // (1280 - 256 - 1152) / 256
        is("get_repetition_penalty_reward:ngram_size=2,max_penalty=-1.0", "", &[1, 2, 3, 4], 0.0);
        is("get_repetition_penalty_reward:ngram_size=2", "", &[5; 5], -0.75);
        is("get_repetition_penalty_reward", "", &[5, 5], 0.0);
        is("get_repetition_penalty_reward:max_penalty=-2", "", &[5; 5], -4.0 / 3.0);
    }

    #[test]
    fn cosine_scaled_reward_depends_on_correctness_and_length() {
        let (right, wrong) = ("\\boxed{\\frac{1}{3}}", "\\boxed{\\frac{1}{2}}");
        for (response, len, expected) in [
            (right, 50, 0.75),
            (wrong, 50, -0.75),
            (right, 0, 1.0),
            (wrong, 0, -1.0),
            (right, 100, 0.5),
            (wrong, 150, -0.5),
        ] {
            is("get_cosine_scaled_reward:max_len=100", response, &vec![1; len], expected);
        }
        is("get_cosine_scaled_reward:max_len=100,max_value_correct=2", right, &[], 2.0);
    }

    #[test]
    fn undecided_answers_are_counted() {
        let mut reward = TrlReward::new(TrlFunction::parse("accuracy_reward", "").unwrap());
        let row = json!({"solution": "$6$"});
        let input = |response| RewardInput {
            prompt: "",
            response,
            prompt_ids: &[1],
            response_ids: &[1],
            finish: FinishReason::Stop,
            row: &row,
            episode: None,
        };
        let scores = reward.score(&[input("\\boxed{\\sum_{i=1}^{3} i}"), input("\\boxed{6}")]).unwrap();
        assert_eq!(scores, [Score::Response(0.0), Score::Response(1.0)]);
        assert_eq!(reward.extra(), [("undecided".to_string(), 0.5)]);
    }

    #[test]
    fn malformed_arguments_are_refused() {
        for (kind, argument, message) in [
            ("accuracy_reward", "a=b", "expected KEY=VALUE with the keys column"),
            ("think_format_reward", "x", "expected no arguments"),
            ("get_cosine_scaled_reward", "", "expected max_len, a number of tokens above 0, as in get_cosine"),
            ("get_cosine_scaled_reward", "max_len=0", "expected max_len"),
            ("get_repetition_penalty_reward", "max_penalty=1", "expected max_penalty, a number of 0 or less"),
            ("get_repetition_penalty_reward", "0", "expected ngram_size"),
            ("get_soft_overlong_punishment", "max_completion_len=-1", "expected max_completion_len"),
        ] {
            let error = TrlFunction::parse(kind, argument).unwrap_err().to_string();
            assert!(error.starts_with(&format!("reward = {kind}")) && error.contains(message), "{error}");
        }
        let missing = TrlFunction::parse("accuracy_reward", "").unwrap().check_row(&json!({"a": 1})).unwrap_err();
        assert!(missing.to_string().contains("expected a column `solution`"), "{missing}");
        let named = |kind: &str, argument: &str| {
            let function = TrlFunction::parse(kind, argument).unwrap();
            function.check_row(&json!({"prompt": "p", "answer": "7"})).unwrap_err().to_string()
        };
        let found = named("accuracy_reward", "");
        let hints = "with optional=true such a row gets no score; if `answer` is it, --reward accuracy_reward:answer";
        assert!(found.ends_with(&format!("found prompt, answer; {hints}")), "{found}");
        let found = named("get_cosine_scaled_reward", "max_len=9");
        assert!(found.ends_with("; if `answer` is it, column=answer in the arguments of the reward"), "{found}");
    }
}
