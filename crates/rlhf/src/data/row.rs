//! One row of a dataset: a JSON object, its file and its line, and access to its fields.

use crate::weights::brief;
use crate::{Error, Result};
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

/// The error for an array where a line is to be a row.
pub(super) const ARRAY: &str =
    "expected a JSON object, found an array; an array is read from a file whose name ends in .json";

/// The fields that may hold messages.
const MESSAGES: [&str; 7] = ["prompt", "query", "completion", "chosen", "rejected", "messages", "conversations"];

/// Gives the messages in `value`, if it is a list of them, `role` and `content` where ShareGPT's datasets have `from` and `value`, and
/// `user` and `assistant` where these have `human` and `gpt`. Anything else stays as it is.
///
/// The fields are renamed as by TRL's `maybe_convert_to_chatml`, which leaves the roles; chat templates know `user` and `assistant`.
fn to_roles(value: &mut Value) {
    for fields in value.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
        for (name, of_chats) in [("from", "role"), ("value", "content")] {
            if !fields.contains_key(of_chats)
                && let Some(value) = fields.remove(name)
            {
                let value = match (of_chats, value.as_str()) {
                    ("role", Some("human")) => "user".into(),
                    ("role", Some("gpt")) => "assistant".into(),
                    _ => value,
                };
                fields.insert(of_chats.into(), value);
            }
        }
    }
}

/// [`to_roles`] of a value that is read as the field `name`, if that may hold messages.
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
                for name in MESSAGES {
                    fields.get_mut(name).into_iter().for_each(to_roles);
                }
                Ok(Self { file: file.clone(), place, value })
            }
            Value::Array(_) if matches!(place, Place::Line(_)) => Err(place.error(file, ARRAY)),
            found => Err(place.error(file, format!("expected a JSON object, found {}", brief(&found.to_string())))),
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

/// Returns the conversation that a row is, with the name of its field: `messages`, or `conversations`, as ShareGPT's datasets have it.
pub(crate) fn messages_field(row: &Value) -> Option<(&'static str, &Value)> {
    let of = |name| Some((name, field(row, name)?));
    of("messages").or_else(|| of("conversations").filter(|(_, found)| found.is_array()))
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
    Err(Error::Run(format!(
        "the row is too long: expected at most {max_length} tokens, the model's context, found {length}"
    )))
}

/// Checks that an encoder reads `prompt` tokens, and its decoder a start token before `response` tokens: `max_length` each.
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

/// Returns the message "expected ... in the field `name`, found ..." for a row whose field is missing or has the wrong type.
pub(super) fn expected(name: &str, what: &str, row: &Value) -> String {
    match row.get(name) {
        Some(found) => format!("field `{name}`: expected {what}, found {}", brief(&found.to_string())),
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

/// Returns the end of the error about the missing field `name`: the fields of `row` that are probably meant by it, and by the fields that are
/// read along with it, and the flag that reads them.
fn hint(name: &str, row: &Value) -> String {
    if !is_field(name) {
        return likely_field(name, row)
            .map_or(String::new(), |other| format!("; if `{other}` is it, rename it to `{name}`"));
    }
    let own = [name];
    // Without a field for the one that is needed, the others are no help.
    let (needed, fields): (&str, &[&str]) = match name {
        "text" if likely_field(name, row).is_none() => ("completion", &["prompt", "completion"]),
        "chosen" | "rejected" => (name, &["prompt", "chosen", "rejected"]),
        _ => (name, &own),
    };
    if likely_field(needed, row).is_none() {
        return String::new();
    }
    let missing = fields.iter().filter(|name| field(row, name).is_none());
    let found: Vec<(&str, &str)> = missing.filter_map(|name| Some((*name, likely_field(name, row)?))).collect();
    let columns: Vec<String> = found.iter().map(|(name, other)| format!("{name}={other}")).collect();
    let columns = columns.join(",");
    match found.as_slice() {
        [] => String::new(),
        [(_, other)] => format!("; if `{other}` is it, --dataset_columns {columns}"),
        [others @ .., (_, last)] => {
            let others: Vec<String> = others.iter().map(|(_, other)| format!("`{other}`")).collect();
            format!("; if {} and `{last}` are they, --dataset_columns {columns}", others.join(", "))
        }
    }
}

/// Returns true if a column can be read as the field `name`.
fn is_field(name: &str) -> bool {
    FIELDS.iter().any(|(field, _)| *field == name)
}

/// Other names that datasets use for each field.
const SYNONYMS: [(&str, &[&str]); 5] = [
    ("prompt", &["question", "instruction", "problem", "input", "text", "context"]),
    ("completion", &["response", "answer", "output", "solution", "target"]),
    ("text", &["content", "document", "review", "sentence", "body"]),
    ("chosen", &["preferred", "accepted", "positive", "response_chosen", "response_j"]),
    ("rejected", &["dispreferred", "negative", "response_rejected", "response_k"]),
];

/// Returns the field of `row` that is most likely meant by `name`: one with a similar name, else a synonym.
fn likely_field<'r>(name: &str, row: &'r Value) -> Option<&'r str> {
    let fields = || row.as_object().into_iter().flat_map(|row| row.keys()).map(String::as_str);
    let similar = fields().find(|field| strsim::jaro_winkler(&field.to_lowercase(), name) > 0.9);
    let synonyms = SYNONYMS.iter().find(|(of, _)| *of == name).map_or(&[][..], |(_, synonyms)| *synonyms);
    similar.or_else(|| synonyms.iter().find_map(|name| fields().find(|field| field.eq_ignore_ascii_case(name))))
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
        assert_eq!(likely_field("prompt", &json!({"text": 1, "Prompts": 1})), Some("Prompts"));
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
                json!({"question": "", "response_j": "", "response_k": ""}),
                "; if `question`, `response_j` and `response_k` are they, --dataset_columns \
                 prompt=question,chosen=response_j,rejected=response_k",
            ),
            (
                "rejected",
                json!({"chosen": "", "negative": ""}),
                "; if `negative` is it, --dataset_columns rejected=negative",
            ),
            ("answer", json!({"Answers": 1}), "; if `Answers` is it, rename it to `answer`"),
        ] {
            assert_eq!(hint(name, &row), wanted);
        }
    }
}
