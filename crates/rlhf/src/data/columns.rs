//! `--dataset_columns`: reads the fields of rows from columns with other names.

use super::formats::{cell, format};
use super::row::{FIELDS, Row, as_field, expected};
use rlhf_base::{Error, Result};
use serde_json::Value;

/// Column name that removes the field.
const REMOVED: &str = "none";

/// A map from fields to the columns of a dataset that they are read from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Columns {
    /// Fields and their columns; `None` removes the field.
    fields: Vec<(&'static str, Option<String>)>,
}

impl Columns {
    /// Parses entries of the form `FIELD=COLUMN`. `response` is another name for the field `completion`; the column `none`
    /// removes the field.
    ///
    /// # Errors
    /// If an entry has another form, a field is unknown, or one is given twice.
    pub fn parse(entries: &[String]) -> Result<Self> {
        let mut fields: Vec<(&'static str, Option<String>)> = Vec::new();
        for entry in entries {
            let wrong = |message: String| Error::refused("dataset_columns", format!(" = {entry}: {message}"));
            let (name, column) = entry
                .split_once('=')
                .map(|(name, column)| (name.trim(), column.trim()))
                .filter(|(name, column)| !name.is_empty() && !column.is_empty())
                .ok_or_else(|| wrong("expected FIELD=COLUMN, such as prompt=question".into()))?;
            let name = if name == "response" { "completion" } else { name };
            let Some((field, _)) = FIELDS.iter().find(|(field, _)| *field == name) else {
                let known: Vec<&str> = FIELDS.iter().map(|(field, _)| *field).collect();
                return Err(wrong(format!("expected one of the fields {}, found {name}", known.join(", "))));
            };
            if fields.iter().any(|(known, _)| known == field) {
                return Err(wrong(format!("the field {field} is given twice")));
            }
            fields.push((field, (column != REMOVED).then(|| column.to_string())));
        }
        Ok(Self { fields })
    }

    /// Adds the fields to `row`; the columns stay as they are. Removes other fields that would take precedence over an added
    /// field.
    ///
    /// # Errors
    /// If the row lacks a column.
    pub(super) fn apply(&self, row: &mut Row) -> Result<()> {
        if self.fields.is_empty() {
            return Ok(());
        }
        let error = |message: String| row.error(message);
        let mut read = Vec::new();
        for (field, column) in &self.fields {
            let Some(column) = column else { continue };
            let value = match row.value.get(column) {
                // CSV cells are text; the type depends on the field.
                Some(Value::String(text)) if format(&row.file) == Some("csv") => {
                    cell(field, text).map_err(|message| error(format!("column `{column}`, {message}")))?
                }
                Some(value) => value.clone(),
                None => {
                    let missing = expected(column, &format!("what dataset_columns reads as `{field}`"), &row.value);
                    return Err(error(missing));
                }
            };
            read.push((*field, value));
        }
        let is_read = |name: &str| self.fields.iter().any(|(field, column)| column.is_some() && *field == name);
        let Some(fields) = row.value.as_object_mut() else { return Ok(()) };
        for (field, column) in &self.fields {
            if column.is_none() {
                fields.remove(*field);
                continue;
            }
            let others = FIELDS.iter().find(|(name, _)| name == field).map_or(&[][..], |(_, others)| *others);
            others.iter().filter(|other| !is_read(other)).for_each(|other| drop(fields.remove(*other)));
        }
        for (field, value) in read {
            fields.insert(field.to_string(), as_field(field, value));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::row::Place;
    use serde_json::json;
    use std::path::Path;

    fn columns(entries: &[&str]) -> Result<Columns> {
        Columns::parse(&entries.iter().map(ToString::to_string).collect::<Vec<_>>())
    }

    fn applied(file: &str, entries: &[&str], value: Value) -> Result<Value> {
        let mut row = Row::new(&Path::new(file).into(), Place::Line(7), value)?;
        columns(entries)?.apply(&mut row)?;
        Ok(row.value)
    }

    #[test]
    fn a_column_is_read_as_its_field_and_is_kept_for_rewards() {
        let row = json!({"question": "q", "answer": "a", "n": 1});
        assert_eq!(
            applied("a.jsonl", &["prompt=question", "response=answer"], row).unwrap(),
            json!({"question": "q", "answer": "a", "n": 1, "prompt": "q", "completion": "a"})
        );
        // Two columns can be swapped.
        assert_eq!(
            applied("a.jsonl", &["chosen=rejected", "rejected=chosen"], json!({"chosen": 1, "rejected": 2})).unwrap(),
            json!({"chosen": 2, "rejected": 1})
        );
    }

    #[test]
    fn a_given_field_takes_precedence_over_other_fields_of_the_row() {
        let row = json!({"text": "t", "prompt_ids": [1], "question": "q", "completion": "c"});
        assert_eq!(
            applied("a.jsonl", &["prompt=question"], row.clone()).unwrap(),
            json!({"question": "q", "prompt": "q", "completion": "c"})
        );
        assert_eq!(
            applied("a.jsonl", &["prompt=text"], row.clone()).unwrap(),
            json!({"question": "q", "prompt": "t", "completion": "c"})
        );
        assert_eq!(
            applied("a.jsonl", &["text=none"], row).unwrap(),
            json!({"prompt_ids": [1], "question": "q", "completion": "c"})
        );
    }

    #[test]
    fn messages_of_sharegpt_have_roles_and_contents_also_where_a_column_is_read_as_a_field() {
        let (sharegpt, messages) =
            (json!([{"from": "human", "value": "x"}]), json!([{"role": "user", "content": "x"}]));
        let found =
            applied("a.jsonl", &["prompt=talk"], json!({"talk": sharegpt, "chosen": sharegpt, "n": sharegpt})).unwrap();
        assert_eq!(found, json!({"talk": sharegpt, "prompt": messages, "chosen": messages, "n": sharegpt}));
    }

    #[test]
    fn csv_cells_are_parsed_by_the_type_of_the_field() {
        let row = json!({"strength": "0.5", "talk": "[{\"role\": \"user\", \"content\": \"x\"}]"});
        let found = applied("a.csv", &["margin=strength", "messages=talk"], row.clone()).unwrap();
        assert_eq!((&found["margin"], &found["messages"][0]["content"]), (&json!(0.5), &json!("x")));
        assert_eq!(applied("a.jsonl", &["margin=strength"], row).unwrap()["margin"], "0.5");
        let error = applied("a.csv", &["margin=talk"], json!({"talk": "much"})).unwrap_err().to_string();
        assert_eq!(error, "a.csv: line 7: column `talk`, field `margin`: expected a number, found \"much\"");
    }

    #[test]
    fn a_malformed_entry_and_a_missing_column_are_errors() {
        for (entries, message) in [
            (&["prompt"][..], "dataset_columns = prompt: expected FIELD=COLUMN, such as prompt=question"),
            (&["=x"], "dataset_columns = =x: expected FIELD=COLUMN"),
            (&["promt=x"], "dataset_columns = promt=x: expected one of the fields prompt, prompt_ids, "),
            (&["completion=x", "response=y"], "dataset_columns = response=y: the field completion is given twice"),
        ] {
            let error = columns(entries).unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
        let error = applied("a.jsonl", &["prompt=question"], json!({"Question": "q"})).unwrap_err().to_string();
        assert!(
            error.starts_with(
                "a.jsonl: line 7: expected a field `question` with what dataset_columns reads as `prompt`, found `Question`"
            ),
            "{error}"
        );
    }
}
