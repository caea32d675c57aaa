//! One row of a dataset: a JSON object, its file and its line, and access to its fields.

use super::dialects::{self, MESSAGES, to_roles};
use rlhf_base::weights::brief;
use rlhf_base::{Error, Result};
use rlhf_lm::tokenizer::PART_SLACK;
use serde_json::Value;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// The fields that rlhf reads, each with the fields that would take precedence over it, or be read along with it.
pub(super) const FIELDS: [(&str, &[&str]); 17] = [
    ("prompt", &["prompt_ids", "query", "input_ids", "text", "messages", "conversations"]),
    ("prompt_ids", &["text", "messages", "conversations"]),
    ("input_ids", &["prompt_ids", "prompt", "completion_ids", "completion", "messages", "conversations"]),
    ("labels", &[]),
    ("completion_mask", &[]),
    ("assistant_masks", &[]),
    ("completion", &["completion_ids", "text", "messages", "conversations", "input_ids"]),
    ("completion_ids", &["text", "messages", "conversations", "input_ids"]),
    ("messages", &["text", "input_ids", "completion_ids", "completion", "chosen"]),
    ("conversations", &["messages", "text", "input_ids", "completion_ids", "completion", "chosen"]),
    ("text", &["messages", "conversations", "input_ids", "completion_ids", "completion", "chosen"]),
    ("chosen", &["text", "messages", "conversations", "completion", "completion_ids", "input_ids"]),
    ("rejected", &[]),
    ("margin", &[]),
    ("finish_reason", &[]),
    ("chat_template_kwargs", &[]),
    ("tools", &[]),
];

/// The error for a line with an array where a row is expected.
pub(super) const ARRAY: &str =
    "expected a JSON object, found an array; an array is read from a file whose name ends in .json";

/// Applies [`to_roles`] to a value that is read as the field `name`, if that field may hold messages.
pub(super) fn as_field(name: &str, mut value: Value) -> Value {
    if MESSAGES.contains(&name) {
        to_roles(&mut value);
    }
    value
}

/// One row.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    pub(super) file: Arc<Path>,
    pub(super) place: Place,
    pub(super) value: Value,
}

impl Row {
    pub(super) fn new(file: &Arc<Path>, place: Place, mut value: Value) -> Result<Self> {
        match &mut value {
            Value::Object(fields) => {
                dialects::read(fields);
                Ok(Self { file: file.clone(), place, value })
            }
            Value::Array(_) if matches!(place, Place::Line(_)) => Err(place.error(file, ARRAY)),
            other => Err(place.error(file, format!("expected a JSON object, found {}", brief(&other.to_string())))),
        }
    }

    /// Returns an error about this row, with its file and place.
    pub(super) fn error(&self, message: impl Into<String>) -> Error {
        self.place.error(&self.file, message)
    }
}

/// The position of a row in its source, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Line of a text file.
    Line(usize),
    /// Element of a JSON array, or row of a Parquet file.
    Row(usize),
    /// Argument of the command line.
    Argument(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(at) => write!(f, "line {at}"),
            Self::Row(at) => write!(f, "row {at}"),
            Self::Argument(at) => write!(f, "argument {at}"),
        }
    }
}

impl Place {
    pub(super) fn error(self, file: &Path, message: impl Into<String>) -> Error {
        Error::Row { path: file.to_path_buf(), place: self.to_string(), message: message.into() }
    }
}

/// Returns the value of the field `name`. A null counts as missing: formats with columns have a null where JSON has no field.
pub(super) fn field<'a>(row: &'a Value, name: &str) -> Option<&'a Value> {
    row.get(name).filter(|value| !value.is_null())
}

/// Returns the field `name`, which must be a string.
pub(super) fn text_field<'a>(row: &'a Value, name: &str) -> Result<&'a str> {
    field(row, name).and_then(Value::as_str).ok_or_else(|| Error::Run(expected(name, "a string", row)))
}

/// Returns the prompt that is a string or a list of messages, with the name of its field: `prompt`, or `query` in older
/// datasets.
pub(crate) fn prompt_field(row: &Value) -> Option<(&'static str, &Value)> {
    ["prompt", "query"].into_iter().find_map(|name| Some((name, field(row, name)?)))
}

/// Returns the conversation of a row, with the name of its field: `messages`, or `conversations` as in ShareGPT's datasets.
pub(crate) fn messages_field(row: &Value) -> Option<(&'static str, &Value)> {
    let named = |name| Some((name, field(row, name)?));
    named("messages").or_else(|| named("conversations").filter(|(_, value)| value.is_array()))
}

/// Returns the token ids in the field `name`, or `None` if the row has no such field.
///
/// # Errors
/// If the field is not a list of ids below `vocab`.
pub(super) fn token_ids(row: &Value, name: &str, vocab: i64) -> Result<Option<Vec<i64>>> {
    let Some(ids) = field(row, name) else { return Ok(None) };
    let ids: Option<Vec<i64>> = ids.as_array().and_then(|ids| ids.iter().map(Value::as_i64).collect());
    let ids = ids.ok_or_else(|| Error::Run(expected(name, "a list of token ids", row)))?;
    // Token ids fit in u32 for every tokenizer, so larger numbers are wrong whatever the vocabulary.
    let vocab = vocab.min(1 << 32);
    match ids.iter().find(|id| !(0..vocab).contains(*id)) {
        Some(id) => {
            Err(Error::Run(format!("field `{name}`: expected ids below the vocabulary of {vocab}, found {id}")))
        }
        None => Ok(Some(ids)),
    }
}

/// Checks that a row of `length` tokens fits the model's context.
pub(super) fn check_length(length: usize, max_length: usize) -> Result<()> {
    if length <= max_length {
        return Ok(());
    }
    // A tokenizer with a limit encodes only a part of a row that is far longer.
    let more = if length > max_length.saturating_add(PART_SLACK) { "at least " } else { "" };
    Err(Error::Run(format!(
        "the row is too long: expected at most {max_length} tokens, the model's context, found {more}{length}"
    )))
}

/// Checks that an encoder can read `prompt` tokens, and its decoder a start token and `response` tokens, each within `max_length`.
pub(super) fn check_lengths(prompt: usize, response: usize, max_length: usize) -> Result<()> {
    if prompt <= max_length && response < max_length {
        return Ok(());
    }
    Err(Error::Run(format!(
        "the row is too long: expected at most {max_length} tokens of prompt for the encoder and {} of response for the decoder, found \
         {prompt} and {response}",
        max_length.saturating_sub(1)
    )))
}

/// Checks a pair without a `prompt` whose `chosen` is a text: the text includes the prompt, unless another column has it.
///
/// # Errors
/// If a column that is probably the prompt has a text that is not in `chosen`.
pub(super) fn check_whole(row: &Value, chosen: &str) -> Result<()> {
    // Columns with another name may be ids, or notes on the pair.
    let asks = ["instruction", "question", "problem", "input"];
    let is_elsewhere = |name: &&str| {
        asks.iter().any(|other| name.eq_ignore_ascii_case(other))
            && row[*name].as_str().is_some_and(|text| !chosen.contains(text.trim()))
    };
    if likely_fields("prompt", row).iter().any(is_elsewhere) {
        Err(Error::Run(expected("prompt", "the text before `chosen`", row)))
    } else {
        Ok(())
    }
}

/// Returns the message "expected ... in the field `name`, found ..." for a row whose field is missing or has the wrong type.
pub(super) fn expected(name: &str, what: &str, row: &Value) -> String {
    match row.get(name) {
        Some(value) => format!("field `{name}`: expected {what}, found {}", brief(&value.to_string())),
        None => {
            let names: Vec<String> = row
                .as_object()
                .into_iter()
                .flat_map(|row| row.keys())
                .map(|name| format!("`{}`", brief(name)))
                .collect();
            let found = if names.is_empty() { "no field at all".to_string() } else { names.join(", ") };
            format!("expected a field `{name}` with {what}, found {found}{}", hint(name, row))
        }
    }
}

/// Returns the end of the error about the missing field `name`: the fields of `row` that are probably meant by `name`, and by the fields
/// that are read along with it, and the flag or the command that reads them. The flag or command leaves out no text of the row.
fn hint(name: &str, row: &Value) -> String {
    let likely = likely_fields(name, row);
    if !is_field(name) {
        return likely.first().map_or(String::new(), |other| format!("; if `{other}` is it, rename it to `{name}`"));
    }
    if let Some(dialect_hint) = dialects::hint(row) {
        return dialect_hint;
    }
    let only_this = [name];
    // If nothing fits the field that is needed, the other fields do not help.
    let (needed, fields): (&str, &[&str]) = match name {
        "text"
            if likely.is_empty()
                && ["completion", "chosen"].map(|name| likely_fields(name, row).is_empty()) == [true, false] =>
        {
            ("chosen", &["prompt", "chosen", "rejected"])
        }
        "text" if likely.is_empty() => ("completion", &["prompt", "completion"]),
        "chosen" | "rejected" => (name, &["prompt", "chosen", "rejected"]),
        _ => (name, &only_this),
    };
    if likely_fields(needed, row).is_empty() {
        return list_hint(row).unwrap_or_default();
    }
    let missing = fields.iter().filter(|name| field(row, name).is_none());
    let likely_by_field: Vec<(&str, Vec<&str>)> =
        missing.map(|name| (*name, likely_fields(name, row))).filter(|(_, others)| !others.is_empty()).collect();
    if likely_by_field.iter().any(|(_, others)| others.len() > 1) {
        return join_hint(&likely_by_field);
    }
    let columns: Vec<String> = likely_by_field.iter().map(|(name, others)| format!("{name}={}", others[0])).collect();
    let columns = columns.join(",");
    match likely_by_field.as_slice() {
        [] => String::new(),
        [(_, others)] => format!("; if `{}` is it, --dataset_columns {columns}", others[0]),
        [others @ .., (_, last)] => {
            let others: Vec<String> = others.iter().map(|(_, others)| format!("`{}`", others[0])).collect();
            format!("; if {} and `{}` are they, --dataset_columns {columns}", others.join(", "), last[0])
        }
    }
}

/// Returns the hint where a field may be made of several columns, such as Alpaca's `instruction` and `input`: a command that joins the
/// columns of a prompt.
fn join_hint(likely_by_field: &[(&str, Vec<&str>)]) -> String {
    let value = |(name, others): &(&str, Vec<&str>)| {
        let column = |other: &&str| format!(".[{}]", Value::from(*other));
        let value = match others.as_slice() {
            [one] => column(one),
            others if *name == "prompt" => {
                let all: Vec<String> = others.iter().map(column).collect();
                format!("([{}] | map(select(. != null and . != \"\")) | join(\"\\n\"))", all.join(", "))
            }
            others => column(&others[0]),
        };
        format!("{name}: {value}")
    };
    let several = likely_by_field.iter().filter(|(_, others)| others.len() > 1);
    let names: Vec<String> = several.clone().flat_map(|(_, others)| others).map(|name| format!("`{name}`")).collect();
    let fields: Vec<String> = likely_by_field.iter().map(value).collect();
    let choice = if several.clone().any(|(name, _)| *name != "prompt") { ", or another of them," } else { "" };
    format!(
        "; it may be in {}{choice} in the rows of: jq -c 'if type == \"array\" then .[] else . end | . + {{{}}}' FILE > rows.jsonl",
        names.join(", "),
        fields.join(", ")
    )
}

/// Returns the hint where the row is an object around the rows: the keys that hold lists of objects, and the command that takes one out.
fn list_hint(row: &Value) -> Option<String> {
    let fields = row.as_object()?;
    // Messages and tools are parts of a row.
    let is_row = |(name, _): &(&String, &Value)| is_field(name) || MESSAGES.contains(&name.as_str());
    let lists: Vec<(&String, usize)> = fields
        .iter()
        .filter(|field| !is_row(field))
        .filter_map(|(name, value)| Some((name, value.as_array()?)))
        .filter(|(_, list)| {
            list.len() > 1 && list.iter().all(|item| item.as_object().is_some_and(|item| !item.contains_key("role")))
        })
        .map(|(name, list)| (name, list.len()))
        .collect();
    let (first, _) = lists.first()?;
    let all: Vec<String> = lists.iter().map(|(name, len)| format!("`{}` with {len} objects", brief(name))).collect();
    Some(format!(
        "; the object holds a list: {}; if these are the rows: jq -c '.[{}][]' FILE > rows.jsonl",
        all.join(", "),
        Value::from(first.as_str())
    ))
}

/// Returns the error of a file that is one JSON object over several lines, if `text` is one such object or several.
pub(super) fn object_over_lines(text: &str) -> Option<String> {
    let line = text.lines().find(|line| !line.trim().is_empty())?;
    if serde_json::from_str::<Value>(line).is_ok() {
        return None;
    }
    let mut objects = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let first = objects.next()?.ok().filter(Value::is_object)?;
    let hint = match objects.next() {
        Some(Ok(_)) => "; if each object is a row: jq -c . FILE > rows.jsonl".into(),
        Some(Err(_)) => return None,
        None => list_hint(&first).unwrap_or_else(|| "; if it is the only row: jq -c . FILE > rows.jsonl".into()),
    };
    Some(format!("expected a JSON object on each line, found an object over several lines{hint}"))
}

/// Returns true if a column can be read as the field `name`.
fn is_field(name: &str) -> bool {
    FIELDS.iter().any(|(field, _)| *field == name)
}

/// Other names that datasets use for each field.
const SYNONYMS: [(&str, &[&str]); 5] = [
    (
        "prompt",
        &[
            "system",
            "system_prompt",
            "instruction",
            "question",
            "problem",
            "context",
            "context_messages",
            "input",
            "text",
            "history",
        ],
    ),
    ("completion", &["response", "answer", "output", "solution", "target"]),
    ("text", &["content", "document", "review", "sentence", "body"]),
    ("chosen", &["preferred", "accepted", "positive", "chosen_response", "response_chosen", "response_j"]),
    ("rejected", &["dispreferred", "negative", "rejected_response", "response_rejected", "response_k"]),
];

/// Synonyms that are only a part of a field, never all of it.
const PARTS: [&str; 3] = ["system", "system_prompt", "history"];

/// Returns the fields of `row` that are most likely meant by `name`: a field with a similar name, else all synonyms that are not empty, as
/// the field may be made of several.
fn likely_fields<'r>(name: &str, row: &'r Value) -> Vec<&'r str> {
    let fields = || row.as_object().into_iter().flat_map(|row| row.keys()).map(String::as_str);
    if let Some(similar) = fields().find(|field| strsim::jaro_winkler(&field.to_lowercase(), name) > 0.9) {
        return vec![similar];
    }
    let synonyms = SYNONYMS.iter().find(|(known, _)| *known == name).map_or(&[][..], |(_, synonyms)| *synonyms);
    let all: Vec<&str> = synonyms
        .iter()
        .filter_map(|synonym| fields().find(|field| field.eq_ignore_ascii_case(synonym)))
        .filter(|field| !row[*field].is_null())
        .collect();
    let is_empty = |field: &&str| {
        row[*field].as_str().is_some_and(|text| text.trim().is_empty())
            || row[*field].as_array().is_some_and(Vec::is_empty)
    };
    let filled: Vec<&str> = all.iter().filter(|field| !is_empty(field)).copied().collect();
    let is_part = |field: &&str| PARTS.iter().any(|part| field.eq_ignore_ascii_case(part));
    match (filled.as_slice(), all.iter().find(|field| !is_part(field))) {
        (_, None) => Vec::new(),
        // All of them are empty in this row; other rows may have them.
        ([], Some(_)) => all.into_iter().filter(|field| !is_part(field)).collect(),
        _ => filled,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_error_for_a_missing_field_lists_the_fields_of_the_row_and_suggests_a_column() {
        let row = json!({"question": "x", "answer": 1});
        assert_eq!(
            expected("prompt", "a string", &row),
            "expected a field `prompt` with a string, found `question`, `answer`; if `question` is it, --dataset_columns prompt=question"
        );
        assert_eq!(expected("answer", "a string", &row), "field `answer`: expected a string, found 1");
        assert_eq!(
            expected("text", "a string", &row),
            "expected a field `text` with a string, found `question`, `answer`; if `question` and `answer` are they, --dataset_columns \
             prompt=question,completion=answer"
        );
        assert_eq!(likely_fields("prompt", &json!({"text": 1, "Prompts": 1})), ["Prompts"]);
    }

    #[test]
    fn the_error_for_a_missing_field_suggests_the_fields_that_are_read_along_with_it() {
        for (name, row, wanted) in [
            (
                "text",
                json!({"instruction": "", "output": ""}),
                "; if `instruction` and `output` are they, --dataset_columns prompt=instruction,completion=output",
            ),
            (
                "text",
                json!({"prompt": "", "response": ""}),
                "; if `response` is it, --dataset_columns completion=response",
            ),
            ("text", json!({"content": "", "answer": ""}), "; if `content` is it, --dataset_columns text=content"),
            ("text", json!({"n": 1, "question": ""}), ""),
            ("chosen", json!({"text": "", "rejected": ""}), ""),
            (
                "chosen",
                json!({"question": "a", "response_j": "", "response_k": ""}),
                "; if `question`, `response_j` and `response_k` are they, --dataset_columns \
                 prompt=question,chosen=response_j,rejected=response_k",
            ),
            (
                "rejected",
                json!({"chosen": "", "negative": ""}),
                "; if `negative` is it, --dataset_columns rejected=negative",
            ),
            (
                "text",
                json!({"instruction": "a", "chosen_response": "", "rejected_response": ""}),
                "; if `instruction`, `chosen_response` and `rejected_response` are they, --dataset_columns \
                 prompt=instruction,chosen=chosen_response,rejected=rejected_response",
            ),
            ("answer", json!({"Answers": 1}), "; if `Answers` is it, rename it to `answer`"),
        ] {
            assert_eq!(hint(name, &row), wanted);
        }
    }

    #[test]
    fn a_chosen_text_without_its_prompt_is_refused_if_another_column_has_it() {
        let error =
            check_whole(&json!({"instruction": "i q", "chosen": "c", "rejected": "r"}), "c").unwrap_err().to_string();
        assert!(error.contains("expected a field `prompt`") && error.contains("prompt=instruction"), "{error}");
        check_whole(&json!({"question": "q ", "chosen": "q c", "rejected": "q r"}), "q c").unwrap();
        check_whole(&json!({"chosen": "q c", "rejected": "q r", "system": "s"}), "q c").unwrap();
        check_whole(&json!({"prompt_id": "8f", "chosen": "q c", "rejected": "q r"}), "q c").unwrap();
    }

    #[test]
    fn no_hint_leaves_out_a_column_of_text() {
        for (name, row, wanted) in [
            (
                "text",
                json!({"instruction": "Add.", "input": "1 2", "output": "3", "system": ""}),
                "; it may be in `instruction`, `input` in the rows of: jq -c 'if type == \"array\" then .[] else . end | . + {prompt: \
                 ([.[\"instruction\"], .[\"input\"]] | map(select(. != null and . != \"\")) | join(\"\\n\")), completion: .[\"output\"]}' FILE \
                 > rows.jsonl",
            ),
            (
                "text",
                json!({"instruction": "Add.", "input": "", "output": "3"}),
                "; if `instruction` and `output` are they, --dataset_columns prompt=instruction,completion=output",
            ),
            (
                "prompt",
                json!({"system": "s", "question": "q"}),
                "; it may be in `system`, `question` in the rows of: jq -c 'if type == \"array\" then .[] else . end | . + {prompt: \
                 ([.[\"system\"], .[\"question\"]] | map(select(. != null and . != \"\")) | join(\"\\n\"))}' FILE > rows.jsonl",
            ),
            ("prompt", json!({"system": "s", "n": 1}), ""),
            (
                "prompt",
                json!({"version": 1, "data": [{"a": 1}, {"a": 2}]}),
                "; the object holds a list: `data` with 2 objects; if these are the rows: jq -c '.[\"data\"][]' FILE > rows.jsonl",
            ),
        ] {
            assert_eq!(hint(name, &row), wanted);
        }
        let found = hint("text", &json!({"problem": "p", "solution": "s", "answer": "a"}));
        assert!(found.starts_with("; it may be in `answer`, `solution`, or another of them,"), "{found}");
    }

    #[test]
    fn an_object_over_several_lines_is_named_with_the_keys_that_hold_lists() {
        let found = object_over_lines("{\n  \"rows\": [{\"a\": 1}, {\"a\": 2}],\n  \"n\": 2\n}\n").unwrap();
        assert_eq!(
            found,
            "expected a JSON object on each line, found an object over several lines; the object holds a list: `rows` with 2 objects; if these \
             are the rows: jq -c '.[\"rows\"][]' FILE > rows.jsonl"
        );
        assert!(
            object_over_lines("{\n\"a\": 1\n}\n{\n\"a\": 2\n}")
                .unwrap()
                .ends_with("if each object is a row: jq -c . FILE > rows.jsonl")
        );
        assert!(object_over_lines("{\n\"a\": 1").is_none() && object_over_lines("{\"a\": 1}\n{\"a\": ").is_none());
    }
}
