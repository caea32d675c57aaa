//! Rewards that read a column that some rows lack.

use super::rules::{has, wrong};
use super::{Reward, RewardInput, Score};
use rlhf_base::{Error, Result};
use serde_json::Value;

/// Names of the rules and functions in flags that read a column.
const KINDS: [&str; 7] =
    ["exact", "numeric", "bleu", "rouge_l", "accuracy_reward", "reasoning_accuracy_reward", "get_cosine_scaled_reward"];

/// A reward that may be optional: it then gives no score to a response whose row lacks its column, or has null there.
#[derive(Debug, Clone)]
pub(super) struct Optional<R> {
    pub(super) reward: R,
    /// The column, if the reward is optional.
    pub(super) column: Option<String>,
}

impl<R> Optional<R> {
    /// Returns the reward, which reads `column`, optional if `is_optional`.
    pub(super) fn new(reward: R, column: impl FnOnce(&R) -> Option<&str>, is_optional: bool) -> Self {
        let column = column(&reward).filter(|_| is_optional).map(str::to_string);
        Self { reward, column }
    }

    fn reads(&self, row: &Value) -> bool {
        self.column.as_ref().is_none_or(|column| has(row, column))
    }
}

impl<R: Reward> Reward for Optional<R> {
    fn score(&mut self, batch: &[RewardInput<'_>]) -> Result<Vec<Score>> {
        let readable: Vec<RewardInput<'_>> = batch.iter().filter(|input| self.reads(input.row)).copied().collect();
        let mut scores = self.reward.score(&readable)?.into_iter();
        let score = |input: &RewardInput<'_>| self.reads(input.row).then(|| scores.next()).flatten();
        Ok(batch.iter().map(score).map(|score| score.unwrap_or(Score::Absent)).collect())
    }

    fn check_row(&self, row: &Value) -> Result<()> {
        if self.reads(row) { self.reward.check_row(row) } else { Ok(()) }
    }

    fn extra(&self) -> Vec<(String, f64)> {
        self.reward.extra()
    }

    fn contents(&self) -> Vec<(String, Vec<u8>)> {
        self.reward.contents()
    }

    fn finish(&mut self) -> Result<()> {
        self.reward.finish()
    }
}

/// Takes `optional=true` or `optional=false` out of the argument of a rule that reads a column; returns the rest, and whether the rule
/// is optional.
///
/// # Errors
/// If it has another value, or is there twice.
pub(super) fn split(kind: &str, argument: &str) -> Result<(String, bool)> {
    let is_option = |part: &&str| KINDS.contains(&kind) && part.trim().starts_with("optional=");
    let (optional_parts, rest): (Vec<&str>, Vec<&str>) = argument.split(',').partition(is_option);
    let is_optional = match optional_parts[..] {
        [] => return Ok((argument.to_string(), false)),
        [one] if one.trim() == "optional=true" => true,
        [one] if one.trim() == "optional=false" => false,
        _ => return Err(wrong(kind, argument, "optional=true or optional=false")),
    };
    Ok((rest.join(","), is_optional))
}

/// Refuses an optional reward whose column no row has: its name may be misspelt. `columns` are the names and columns of the optional
/// rewards.
///
/// # Errors
/// If there is such a reward; the error names it.
pub(crate) fn check_columns<'r>(columns: &[(String, String)], mut rows: impl Iterator<Item = &'r Value>) -> Result<()> {
    let mut missing: Vec<&(String, String)> = columns.iter().collect();
    while !missing.is_empty()
        && let Some(row) = rows.next()
    {
        missing.retain(|(_, column)| !has(row, column));
    }
    match missing.first() {
        Some((name, column)) => {
            Err(Error::Run(format!("reward `{name}`: expected a row with the column `{column}`, found none")))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::rules::Rule;
    use super::*;
    use rlhf_lm::generate::FinishReason;
    use serde_json::json;

    #[test]
    fn an_optional_rule_scores_the_rows_that_have_its_column() {
        let rows = [json!({"answer": "a"}), json!({}), json!({"answer": null}), json!({"answer": "b"})];
        let input = |row| RewardInput {
            prompt: "",
            response: "a",
            prompt_ids: &[1],
            response_ids: &[2],
            finish: FinishReason::Stop,
            row,
            episode: None,
        };
        let batch: Vec<RewardInput<'_>> = rows.iter().map(input).collect();
        let rule = |is_optional| Optional::new(Rule::parse("exact", "answer").unwrap(), Rule::column, is_optional);
        let expected = [Score::Response(1.0), Score::Absent, Score::Absent, Score::Response(0.0)];
        assert_eq!(rule(true).score(&batch).unwrap(), expected);
        assert!(rows.iter().all(|row| rule(true).check_row(row).is_ok()));
        assert!(rule(true).check_row(&json!({"answer": {}})).is_err(), "what is there is checked");
        assert!(rule(false).score(&batch).is_err() && rule(false).check_row(&rows[1]).is_err());
    }

    #[test]
    fn the_option_is_taken_out_of_an_argument() {
        let split_ok = |kind: &str, argument: &str| split(kind, argument).map_err(|e| e.to_string());
        assert_eq!(split_ok("exact", "answer,optional=true"), Ok(("answer".into(), true)));
        assert_eq!(
            split_ok("numeric", "answer, optional=true ,tolerance=0.1"),
            Ok(("answer,tolerance=0.1".into(), true))
        );
        assert_eq!(split_ok("accuracy_reward", "optional=true"), Ok((String::new(), true)));
        assert_eq!(split_ok("accuracy_reward", "column=a,optional=false"), Ok(("column=a".into(), false)));
        assert_eq!(split_ok("regex", "a,optional=true"), Ok(("a,optional=true".into(), false)));
        for argument in ["a,optional=yes", "a,optional=true,optional=true"] {
            let error = split_ok("bleu", argument).unwrap_err();
            assert_eq!(error, format!("reward = bleu:{argument}: expected optional=true or optional=false"));
        }
    }

    #[test]
    fn a_column_that_no_row_has_is_refused() {
        let columns = [("exact".to_string(), "answer".to_string())];
        let rows = [json!({"answer": null}), json!({})];
        let error = check_columns(&columns, rows.iter()).unwrap_err().to_string();
        assert_eq!(error, "reward `exact`: expected a row with the column `answer`, found none");
        assert!(check_columns(&columns, [json!({}), json!({"answer": 1})].iter()).is_ok());
    }
}
