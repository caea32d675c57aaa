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
mod parse;
mod ratio;
mod sets;
mod value;

use compare::Same;
use extract::Found;
use lex::Fault;

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
/// use rlhf::reward::{Solution, Verdict};
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
