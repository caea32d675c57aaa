//! Equality of mathematical answers: finds the answer in a text, parses it, and compares it with a solution. Source of the rules:
//! [math-verify 0.9.0](https://github.com/huggingface/Math-Verify/tree/0.9.0), with the settings of TRL's `accuracy_reward`.
//!
//! No text is executed, and the work for a text is bounded: lengths, nesting, sizes of numbers and polynomials.

mod algebra;
mod compare;
mod extract;
mod lex;
mod normalize;
mod numeric;
mod order;
mod parse;
mod ratio;
mod sets;
mod value;

use extract::Found;
use lex::Fault;
use order::Same;

/// The result of a comparison of an answer with a solution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The answer is equal to the solution.
    Equal,
    /// The answer is not equal to the solution, or the text has no answer.
    Different,
    /// It could not be shown that they are equal, nor that they are not. It counts as not equal.
    Undecided,
}

/// A solution, parsed once to be compared with several answers.
///
/// ```
/// use math_verify::{Solution, Verdict};
///
/// let solution = Solution::parse("$\\frac{1}{2}$").unwrap();
/// assert_eq!(solution.verify("The result is \\boxed{0.5}."), Verdict::Equal);
/// assert_eq!(solution.verify("The result is \\boxed{0.6}."), Verdict::Different);
/// assert!(Solution::parse("no number").is_none());
/// ```
#[derive(Debug)]
pub struct Solution(Found);

impl Solution {
    /// Finds the solution in a text: a box, a formula in dollars or brackets, or the last calculation or number. Returns `None` if
    /// there is none.
    pub fn parse(text: &str) -> Option<Self> {
        extract::solution(text).map(Self)
    }

    /// Compares the answer of a response with the solution. An answer must be in a box, or in a formula after the word "answer".
    pub fn verify(&self, response: &str) -> Verdict {
        let Some(answer) = extract::answer(response) else { return Verdict::Different };
        let same = match (&self.0.value, &answer.value) {
            (Ok(solution), Ok(answer)) => compare::values(solution, answer),
            (Err(Fault::Unsupported), _) | (_, Err(Fault::Unsupported)) => Same::Unknown,
            _ => Same::No,
        };
        let (solution, text) = (self.0.text.trim(), answer.text.trim());
        match same.or(|| if solution == text && !text.is_empty() { Same::Yes } else { Same::No }) {
            Same::Yes => Verdict::Equal,
            Same::No => Verdict::Different,
            Same::Unknown => Verdict::Undecided,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::time::{Duration, Instant};

    /// Contents of boxes that math-verify counts as equal to the solution and this module does not, with the reason.
    const KNOWN_DIFFERENCES: [(&str, &str); 5] = [
        ("4^{500}", "the numbers have more than 128 bits"),
        ("\\boxed{1}.", "the solution is an integral"),
        ("\\sum_{i=1}^{3} i", "sums are not computed"),
        ("\\gcd(4,6)", "functions of several numbers are not computed"),
        ("\\max(1,2)", "functions of several numbers are not computed"),
    ];

    #[test]
    fn verdicts_are_those_of_math_verify() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/math_verify.jsonl");
        let table = std::fs::read_to_string(path).unwrap();
        let (mut cases, mut differences) = (0, Vec::new());
        for line in table.lines() {
            let row: Value = serde_json::from_str(line).unwrap();
            let (solution, response) = (row["solution"].as_str().unwrap(), row["response"].as_str().unwrap());
            let found = Solution::parse(solution).map(|solution| solution.verify(response));
            let verdict = found.map(|verdict| i64::from(verdict == Verdict::Equal));
            cases += 1;
            if verdict != row["verdict"].as_i64() {
                let known = KNOWN_DIFFERENCES.iter().any(|(part, _)| response.contains(part));
                // Never equal where math-verify says that they are not.
                assert!(found == Some(Verdict::Undecided) && row["verdict"] == 1 && known, "{line}: {found:?}");
                differences.push(response.to_string());
            }
        }
        assert!(cases >= 500, "{cases} cases");
        assert_eq!(differences.len(), KNOWN_DIFFERENCES.len(), "{differences:?}");
    }

    #[test]
    fn hostile_texts_are_bounded() {
        let repeated = |text: &str, count: usize| text.repeat(count);
        let nested = |open: &str, close: &str, count: usize| format!("{}1{}", open.repeat(count), close.repeat(count));
        let texts = [
            nested("(", ")", 5000),
            nested("(", ")", 39),
            nested("\\{", "\\}", 39),
            nested("\\frac{1}{1+", "}", 38),
            nested("f(", ",1)", 39),
            nested("f(x+", ")", 39),
            nested("|", "|", 39),
            nested("\\sqrt{", "}", 300),
            nested("x^{", "}", 39),
            repeated("9^", 300) + "9",
            repeated("9!", 3) + &repeated("!", 500),
            "9^{9^{9^{9^{9}}}}".into(),
            "(a+b+c+d+e+f+g+h)^{40}".into(),
            "((((x+y)^{40})^{40})^{40})^{40}".into(),
            "(1+x)^{99999999999}".into(),
            "2^{-170141183460469231731687303715884105728}".into(),
            repeated("9", 4000),
            format!("0.{}", repeated("1", 60)),
            repeated("1,", 250) + "1",
            repeated("a_1+", 250) + "1",
            repeated("-", 1000) + "1",
            "\\sqrt[99999]{2}".into(),
            "170141183460469231731687303715884105727!".into(),
            "\\binom{200}{100}".into(),
            "170141183460469231731687303715884105727 \\cdot 170141183460469231731687303715884105727".into(),
            "1/(x-x)".into(),
            "\\text{".into(),
            "é\u{1F600}\u{2212}1".into(),
        ];
        let mut responses: Vec<String> = texts.iter().map(|text| format!("\\boxed{{{text}}}")).collect();
        responses.extend(
            ["$", "\\[", "\\(", "$$", "answer", "final answer ", "\\boxed{", " [", "\\\\]\\["]
                .map(|text| repeated(text, 4000)),
        );
        responses.push(repeated("\\[", 4000) + "\\boxed{1}");
        let start = Instant::now();
        for solution in &texts {
            let Some(solution) = Solution::parse(&format!("${solution}$")) else { continue };
            for response in &responses {
                let _ = solution.verify(response);
            }
        }
        responses.iter().for_each(|response| drop(Solution::parse(response)));
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    }
}
