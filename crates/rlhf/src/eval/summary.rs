//! The summary of an evaluation: win rates, scores, pass@k.

use super::results::{ResultRow, Verdict};
use super::statistics::{
    bootstrap_interval, length_controlled_interval, length_controlled_win_rate, mean, pass_at_k, share_interval,
};
use serde::Serialize;
use std::collections::BTreeMap;

/// The summary of an evaluation, as `summary.json` has it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Description of the judge.
    pub judge: String,
    /// Number of prompts.
    pub prompts: usize,
    /// Number of prompts of the dataset that are left out, as `max_judgements` does not suffice for them.
    pub left_out: usize,
    /// Number of responses of a model to each prompt.
    pub responses_per_prompt: usize,
    /// Number of pairs, or responses without a comparison, for which the judge gave no verdict; all but the count leaves them out.
    pub no_verdict: usize,
    /// The comparison, if there is one.
    #[serde(flatten)]
    pub comparison: Option<Comparison>,
    /// The model that is evaluated.
    pub a: SideSummary,
    /// The model, or the column, that it is compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub b: Option<SideSummary>,
}

/// The comparison of two models.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Number of pairs that the model wins.
    pub wins: usize,
    /// Number of ties, the inconsistent pairs among them.
    pub ties: usize,
    /// Number of pairs that the model loses.
    pub losses: usize,
    /// Number of pairs whose verdict depends on the order of the responses.
    pub inconsistent: usize,
    /// Share of the prompts that the model wins, where a tie counts half.
    pub win_rate: f64,
    /// Its 95 % bootstrap interval over the prompts; Wilson's score interval where all prompts have the same outcome.
    pub win_rate_interval: [f64; 2],
    /// The win rate at equal length; see [`length_controlled_win_rate`]. `None` if the fit has no finite maximum.
    pub length_controlled_win_rate: Option<f64>,
    /// Its 95 % bootstrap interval over the prompts; `None` if more than one resample in twenty has no finite fit.
    pub length_controlled_interval: Option<[f64; 2]>,
}

/// The responses of one model, or of a column.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SideSummary {
    /// The model or the column.
    pub name: String,
    /// Mean length of its responses in characters.
    pub mean_length: f64,
    /// Its scores, if rewards are the judge.
    #[serde(flatten)]
    pub scores: Option<ScoreSummary>,
}

/// The scores of one model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScoreSummary {
    /// Mean over the prompts of the mean score of their responses.
    pub mean_score: f64,
    /// Its 95 % bootstrap interval over the prompts. Where all prompts have the same score, Wilson's score interval if scores are 0 or
    /// 1, else `None`.
    pub mean_score_interval: Option<[f64; 2]>,
    /// Share of right responses, if scores tell which are right.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_right: Option<f64>,
    /// pass@k by k, averaged over the prompts with at least k scored responses: k = 1, 2, 4, ... and the number of responses.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub pass_at_k: BTreeMap<usize, f64>,
}

/// The parts of a summary that the rows do not have.
pub(super) struct About {
    pub(super) judge: String,
    pub(super) names: [Option<String>; 2],
    /// Whether the second is a column, with one response to each prompt.
    pub(super) is_column: bool,
    pub(super) prompts: usize,
    pub(super) left_out: usize,
    pub(super) samples: usize,
    pub(super) pass_score: Option<f64>,
    pub(super) seed: u64,
}

impl Summary {
    /// Summarizes rows; `None` if the judge gave no verdict and no score for those that it was called for.
    pub(super) fn new(about: About, rows: &[&ResultRow]) -> Option<Self> {
        let compares = about.names[1].is_some();
        let decided: Vec<&ResultRow> = rows.iter().copied().filter(|row| row.is_decided()).collect();
        // Equal responses are ties without a call.
        let no_verdict = |row: &&ResultRow| row.winner == Some(Verdict::Tie) && !row.was_judged();
        if decided.len() < rows.len() && decided.iter().all(no_verdict) {
            return None;
        }
        let threshold = about.threshold(rows);
        let length = |length: &dyn Fn(&ResultRow) -> Option<usize>| {
            mean(&decided.iter().filter_map(|row| length(row)).map(|length| length as f64).collect::<Vec<_>>())
        };
        let a = SideSummary {
            name: about.names[0].clone().unwrap_or_default(),
            mean_length: length(&|row| Some(row.length_a)),
            scores: scores(&decided, |row| row.score_a, threshold, about.seed),
        };
        let score_b = |row: &ResultRow| row.score_b.filter(|_| !about.is_column || row.sample == 0);
        let b = about.names[1].clone().map(|name| SideSummary {
            name,
            mean_length: length(&|row| row.length_b),
            scores: scores(&decided, score_b, threshold, about.seed),
        });
        Some(Self {
            judge: about.judge,
            prompts: about.prompts,
            left_out: about.left_out,
            responses_per_prompt: about.samples,
            no_verdict: rows.len() - decided.len(),
            comparison: if compares { comparison(rows, about.seed) } else { None },
            a,
            b,
        })
    }
}

impl About {
    /// Returns the score from which on a response is right, if the scores tell that.
    fn threshold(&self, rows: &[&ResultRow]) -> Option<f64> {
        let mut scores = rows.iter().flat_map(|row| [row.score_a, row.score_b]).flatten();
        self.pass_score.or_else(|| scores.all(|score| score == 0.0 || score == 1.0).then_some(1.0))
    }
}

/// Returns the values of each prompt, without prompts that have none.
fn by_prompt<T>(rows: &[&ResultRow], value: impl Fn(&ResultRow) -> Option<T>) -> Vec<Vec<T>> {
    let mut prompts: BTreeMap<usize, Vec<T>> = BTreeMap::new();
    for row in rows {
        if let Some(value) = value(row) {
            prompts.entry(row.index).or_default().push(value);
        }
    }
    prompts.into_values().collect()
}

fn comparison(rows: &[&ResultRow], seed: u64) -> Option<Comparison> {
    let count = |verdict: Verdict| rows.iter().filter(|row| row.winner == Some(verdict)).count();
    let outcome = |row: &ResultRow| row.winner.map(Verdict::outcome);
    let prompts: Vec<f64> = by_prompt(rows, outcome).iter().map(|outcomes| mean(outcomes)).collect();
    let pair = |row: &ResultRow| Some((outcome(row)?, row.length_a as f64 - row.length_b? as f64));
    let pairs = by_prompt(rows, pair);
    let controlled = length_controlled_win_rate(pairs.iter().flatten().copied());
    Some(Comparison {
        wins: count(Verdict::A),
        ties: count(Verdict::Tie),
        losses: count(Verdict::B),
        inconsistent: rows.iter().filter(|row| row.inconsistent).count(),
        win_rate: mean(&prompts),
        win_rate_interval: share_interval(&prompts, seed)?,
        length_controlled_win_rate: controlled,
        length_controlled_interval: controlled.and_then(|_| length_controlled_interval(&pairs, seed)),
    })
}

/// Summarizes the scores of one model; `None` if there are none. A score of at least `threshold` is right.
fn scores(
    rows: &[&ResultRow],
    score: impl Fn(&ResultRow) -> Option<f64>,
    threshold: Option<f64>,
    seed: u64,
) -> Option<ScoreSummary> {
    let prompts = by_prompt(rows, score);
    let means: Vec<f64> = prompts.iter().map(|scores| mean(scores)).collect();
    let first = *means.first()?;
    let mean_score_interval = if means.iter().any(|mean| *mean != first) {
        bootstrap_interval(&means, seed)
    } else if first == 0.0 || first == 1.0 {
        share_interval(&means, seed).filter(|_| threshold == Some(1.0))
    } else {
        None
    };
    let right = |threshold: f64| {
        let right = |scores: &Vec<f64>| scores.iter().filter(|score| **score >= threshold).count();
        prompts.iter().map(|scores| (scores.len(), right(scores))).collect::<Vec<_>>()
    };
    let counts = threshold.map_or(Vec::new(), right);
    let share = |&(samples, right): &(usize, usize)| right as f64 / samples as f64;
    let most = counts.iter().map(|(samples, _)| *samples).max().unwrap_or(0);
    let powers = std::iter::successors(Some(1), |k| Some(k * 2)).take_while(|k| *k < most);
    let pass = |k: usize| {
        let values: Vec<f64> = counts.iter().filter_map(|&(samples, right)| pass_at_k(samples, right, k)).collect();
        (k, mean(&values))
    };
    Some(ScoreSummary {
        mean_score: mean(&means),
        mean_score_interval,
        share_right: threshold.map(|_| mean(&counts.iter().map(share).collect::<Vec<_>>())),
        // With one response, pass@1 is the share of right responses.
        pass_at_k: if most > 1 { powers.chain([most]).map(pass).collect() } else { BTreeMap::new() },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(compares: bool, samples: usize) -> About {
        let names = [Some("a".into()), compares.then(|| "b".into())];
        About {
            judge: "rules".into(),
            names,
            is_column: false,
            prompts: 2,
            left_out: 0,
            samples,
            pass_score: None,
            seed: 1,
        }
    }

    fn scored(index: usize, sample: usize, score: f64) -> ResultRow {
        ResultRow { index, sample, score_a: Some(score), length_a: 10, ..ResultRow::default() }
    }

    #[test]
    fn scores_of_0_and_1_give_the_share_right_and_pass_at_k() {
        let rows = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]];
        let rows = rows.iter().enumerate().flat_map(|(index, scores)| {
            scores.iter().enumerate().map(move |(sample, score)| scored(index, sample, *score))
        });
        let rows: Vec<ResultRow> = rows.collect();
        let rows: Vec<&ResultRow> = rows.iter().collect();
        let scores = Summary::new(about(false, 4), &rows).unwrap().a.scores.unwrap();
        assert_eq!((scores.mean_score, scores.share_right), (0.375, Some(0.375)));
        // 1 - C(3, 2) / C(4, 2) = 1/2, 1 - C(2, 2) / C(4, 2) = 5/6.
        let expected = BTreeMap::from([(1, 0.375), (2, (0.5 + 5.0 / 6.0) / 2.0), (4, 1.0)]);
        assert!(scores.pass_at_k.iter().zip(&expected).all(|(a, b)| a.0 == b.0 && (a.1 - b.1).abs() < 1e-12));
        assert_eq!(scores.pass_at_k.len(), 3);
        // Other scores do not tell what is right, unless a threshold does.
        let half = scored(0, 0, 0.5);
        let scores = |pass_score| {
            let about = About { pass_score, ..about(false, 1) };
            Summary::new(about, &[&half]).unwrap().a.scores.unwrap()
        };
        assert_eq!((scores(None).share_right, scores(Some(0.5)).share_right), (None, Some(1.0)));
    }

    #[test]
    fn ties_count_half_and_pairs_without_a_verdict_do_not_count() {
        let pair = |index, winner, inconsistent| ResultRow {
            index,
            winner,
            inconsistent,
            length_a: 10 + 3 * index,
            response_b: Some("b".into()),
            length_b: Some(12),
            ..ResultRow::default()
        };
        let rows = [
            pair(0, Some(Verdict::A), false),
            pair(1, Some(Verdict::Tie), true),
            pair(2, Some(Verdict::B), false),
            pair(3, Some(Verdict::A), false),
            pair(4, None, false),
        ];
        let rows: Vec<&ResultRow> = rows.iter().collect();
        let summary = Summary::new(about(true, 1), &rows).unwrap();
        let comparison = summary.comparison.unwrap();
        assert_eq!((comparison.wins, comparison.ties, comparison.losses, comparison.inconsistent), (2, 1, 1, 1));
        assert_eq!((comparison.win_rate, summary.no_verdict), (0.625, 1));
        let [low, high] = comparison.win_rate_interval;
        assert!((0.0..0.625).contains(&low) && high > 0.625 && high <= 1.0, "{low} {high}");
        assert!(comparison.length_controlled_win_rate.is_some());
        assert!(summary.a.scores.is_none());
        assert_eq!(Summary::new(about(true, 1), &rows[4..]), None);
    }
}
