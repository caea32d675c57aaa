//! Likeness of responses to different prompts: equal responses, and distinct pairs of tokens.

use rlhf_lm::generate::Response;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Fewest tokens of a response that is compared: labels and numbers may be the same for many prompts.
const LEAST_TOKENS: usize = 8;
/// Fewest different prompts for a comparison.
const LEAST_PROMPTS: usize = 4;
/// Most prompts, and most tokens of a response, whose bigrams are counted: a longer text repeats more of its bigrams.
const MOST_PROMPTS: usize = 64;
const MOST_TOKENS: usize = 64;

/// Likeness of the responses of an update. Responses to the same prompt are not compared.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Likeness {
    /// Share of the responses that equal a response to another prompt.
    pub(super) shared: f64,
    /// Share of distinct ones among the bigrams of one response to each prompt.
    pub(super) distinct_bigrams: f64,
}

impl Likeness {
    /// Compares responses to `prompts`, one for each response; `None` where too few are long enough.
    pub(super) fn of(prompts: &[&[i64]], responses: &[Response]) -> Option<Self> {
        let long = |(_, response): &(&&[i64], &Response)| response.tokens.len() >= LEAST_TOKENS;
        let rows: Vec<(&[i64], &[i64])> = prompts
            .iter()
            .zip(responses)
            .filter(long)
            .map(|(prompt, response)| (*prompt, &response.tokens[..]))
            .collect();
        let firsts: BTreeMap<&[i64], &[i64]> = rows.iter().rev().copied().collect();
        if firsts.len() < LEAST_PROMPTS {
            return None;
        }
        let mut prompts_by_response: HashMap<&[i64], HashSet<&[i64]>> = HashMap::new();
        for &(prompt, response) in &rows {
            prompts_by_response.entry(response).or_default().insert(prompt);
        }
        let shared = rows.iter().filter(|(_, response)| prompts_by_response[response].len() > 1).count();
        let bigrams: Vec<&[i64]> = firsts
            .values()
            .take(MOST_PROMPTS)
            .flat_map(|response| response[..response.len().min(MOST_TOKENS)].windows(2))
            .collect();
        let distinct: HashSet<&[i64]> = bigrams.iter().copied().collect();
        Some(Self {
            shared: shared as f64 / rows.len() as f64,
            distinct_bigrams: distinct.len() as f64 / bigrams.len() as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlhf_lm::generate::FinishReason;

    fn likeness(rows: &[(i64, &[i64])]) -> Option<Likeness> {
        let prompts: Vec<[i64; 1]> = rows.iter().map(|(prompt, _)| [*prompt]).collect();
        let prompts: Vec<&[i64]> = prompts.iter().map(|prompt| &prompt[..]).collect();
        let response = |tokens: &[i64]| Response {
            tokens: tokens.to_vec(),
            logprobs: vec![0.0; tokens.len()],
            finish: FinishReason::Length,
            sets: None,
            inserted: Vec::new(),
        };
        let responses: Vec<Response> = rows.iter().map(|(_, tokens)| response(tokens)).collect();
        Likeness::of(&prompts, &responses)
    }

    #[test]
    fn responses_are_alike_over_different_prompts_and_not_within_a_group() {
        let (a, b): (Vec<i64>, Vec<i64>) = ((0..8).collect(), (10..18).collect());
        let (c, d): (Vec<i64>, Vec<i64>) = ((20..28).collect(), vec![7; 8]);
        // Both responses to prompt 1 are equal, and to no other.
        let found = likeness(&[(1, &a), (1, &a), (2, &b), (3, &c), (4, &d)]).unwrap();
        // Of four responses, three have 7 bigrams each, and one repeats a single one.
        assert_eq!(found, Likeness { shared: 0.0, distinct_bigrams: 22.0 / 28.0 });
        let found = likeness(&[(1, &a), (1, &b), (2, &a), (3, &a), (4, &c)]).unwrap();
        assert_eq!(found, Likeness { shared: 0.6, distinct_bigrams: 14.0 / 28.0 });
    }

    #[test]
    fn few_prompts_and_short_responses_are_not_compared() {
        let (long, short): (Vec<i64>, [i64; 7]) = ((0..8).collect(), [1; 7]);
        assert_eq!(likeness(&[(1, &long), (2, &long), (3, &long), (3, &long)]), None);
        assert_eq!(likeness(&[(1, &long), (2, &long), (3, &long), (4, &short)]), None);
        assert!(likeness(&[(1, &long), (2, &long), (3, &long), (4, &long)]).is_some());
    }
}
