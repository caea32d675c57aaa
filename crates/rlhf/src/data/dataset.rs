//! A dataset in memory.

use super::columns::Columns;
use super::dialects::before_question;
use super::files::Files;
use super::formats::read_rows;
use super::row::{Row, field, messages_field, prompt_field};
use rlhf_base::{Error, Result};
use rlhf_lm::tokenizer::user_message;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Rows, each a JSON object with its file and line.
///
/// ```no_run
/// use rlhf::data::Dataset;
/// use rlhf::tokenizer::Tokenizer;
/// # fn main() -> rlhf::Result<()> {
/// let tokenizer = Tokenizer::from_pretrained("runs/sft".as_ref())?;
/// // JSONL, JSON, CSV or Parquet: a file, a folder, or a name on the hub. Prompts of at most 64 tokens; vocabulary of 50,304.
/// let prompts = Dataset::read("prompts.jsonl".as_ref(), "train")?.prompts(&tokenizer, 50_304, 64)?;
/// println!("{} prompts; the first is {:?}", prompts.len(), prompts[0].text);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Dataset {
    pub(super) name: PathBuf,
    pub(super) rows: Vec<Row>,
}

impl Dataset {
    /// Reads `split` of the dataset `name`, as [`Files::find`] finds it: JSONL (one object per line; blank lines are skipped),
    /// JSON (an array of objects), CSV (cells are text, except JSON lists of token ids and messages in their columns) or Parquet.
    ///
    /// # Errors
    /// If there is no such file, a row is malformed, or there are no rows.
    pub fn read(name: &Path, split: &str) -> Result<Self> {
        Self::from_files(&Files::find(name, None, split)?)
    }

    /// Reads the rows of all `files`.
    ///
    /// # Errors
    /// The errors of [`Dataset::read`].
    pub fn from_files(files: &Files) -> Result<Self> {
        let mut rows = Vec::new();
        for path in &files.paths {
            rows.extend(read_rows(path)?);
        }
        let name = files.describe().to_path_buf();
        if rows.is_empty() {
            return Err(Error::invalid(&name, "expected at least one row, found an empty dataset"));
        }
        Ok(Self { name, rows })
    }

    /// Reads the fields of all rows from other columns.
    ///
    /// # Errors
    /// If a row lacks one of the columns.
    pub fn with_columns(mut self, columns: &Columns) -> Result<Self> {
        self.rows.iter_mut().try_for_each(|row| columns.apply(row))?;
        Ok(self)
    }

    /// Turns every prompt that is a string into a conversation that ends with it as the user's message, after the texts in `system` and
    /// `history`.
    pub fn with_chat_prompts(mut self) -> Self {
        for row in &mut self.rows {
            if let Some((name, Value::String(text))) = prompt_field(&row.value) {
                let message = user_message(text);
                let mut messages = before_question(&row.value);
                messages.push(message);
                row.value[name] = messages.into();
            }
        }
        self
    }

    /// Puts a system message at the start of every conversation that has none; conversations with one, and texts, stay as they are.
    pub fn with_system_prompt(mut self, system: &str) -> Self {
        for row in &mut self.rows {
            let names = [prompt_field(&row.value), messages_field(&row.value)].map(|field| field.map(|(name, _)| name));
            for name in names.into_iter().flatten() {
                let Some(messages) = row.value[name].as_array_mut() else { continue };
                let role = messages.first().map(|message| message["role"].as_str().unwrap_or_default().to_string());
                if role.is_some_and(|role| !matches!(role.as_str(), "" | "system" | "developer")) {
                    messages.insert(0, json!({"role": "system", "content": system}));
                }
            }
        }
        self
    }

    /// Divides every conversation, `messages` or `conversations`, into `prompt`, the messages before the last message of the assistant, and
    /// `completion`, that last message, unless the row has a separate response or token ids. A `prompt` or a `text` next to the conversation
    /// repeats it in other words, such as the question alone, and is replaced.
    ///
    /// # Errors
    /// With `needs_responses`, if a conversation does not end with the assistant's message.
    pub(crate) fn with_divided_conversations(mut self, needs_responses: bool) -> Result<Self> {
        let others = ["completion", "prompt_ids", "input_ids", "chosen"];
        for row in &mut self.rows {
            if others.iter().any(|name| field(&row.value, name).is_some()) {
                continue;
            }
            let messages = messages_field(&row.value).and_then(|(name, value)| Some((name, value.as_array()?.clone())));
            let Some((name, mut messages)) = messages else { continue };
            let role = messages.last().map(|last| last["role"].clone());
            let is_answered = role.as_ref().is_some_and(|role| role == "assistant");
            if needs_responses && !is_answered {
                let found = role.map_or("no message".into(), |role| format!("one of the role {role}"));
                let message = format!(
                    "field `{name}`: expected the assistant's message, which is learned, as the last one, found {found}"
                );
                return Err(row.error(message));
            }
            let Some(fields) = row.value.as_object_mut() else { continue };
            for replaced in [name, "text"] {
                fields.remove(replaced);
            }
            if is_answered {
                fields.insert("completion".into(), messages.split_off(messages.len() - 1).into());
            }
            fields.insert("prompt".into(), messages.into());
        }
        Ok(self)
    }

    /// Concatenates two datasets.
    pub(super) fn and(mut self, other: Self) -> Self {
        self.name = format!("{}, {}", self.name.display(), other.name.display()).into();
        self.rows.extend(other.rows);
        self
    }

    /// Keeps the first `count` rows.
    pub fn first(mut self, count: usize) -> Self {
        self.rows.truncate(count);
        self
    }

    /// The rows, each a JSON object.
    pub fn rows(&self) -> impl Iterator<Item = &Value> {
        self.rows.iter().map(|row| &row.value)
    }

    /// The file, or the dataset if it has several files.
    pub fn path(&self) -> &Path {
        &self.name
    }

    /// Returns an error about the row at `index`, with its file and line.
    pub fn error(&self, index: usize, message: impl Into<String>) -> Error {
        self.rows[index].error(message)
    }

    /// Calls `check` on every row.
    ///
    /// # Errors
    /// The first error of `check`, with the file and line of its row.
    pub fn check(&self, check: impl Fn(&Value) -> Result<()>) -> Result<()> {
        self.map(check).map(drop)
    }

    /// Applies `f` to every row; adds the file and line to its errors.
    pub(super) fn map<T>(&self, f: impl Fn(&Value) -> Result<T>) -> Result<Vec<T>> {
        self.rows
            .iter()
            .map(|row| {
                f(&row.value).map_err(|e| match e {
                    Error::Run(message) => row.error(message),
                    other => other,
                })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::row::Place;

    fn read(name: &str, text: &str) -> Result<Dataset> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        Dataset::read(&path, "train")
    }

    #[test]
    fn a_system_prompt_begins_every_conversation_that_has_none() {
        let lines = [
            json!({"prompt": [{"role": "user", "content": "Hi"}], "answer": 1}),
            json!({"prompt": [{"role": "system", "content": "Be rude."}, {"role": "user", "content": "Hi"}]}),
            json!({"prompt": "text"}),
            json!({"messages": [{"role": "user", "content": "Hi"}]}),
        ];
        let dataset = read("a.jsonl", &lines.map(|line| format!("{line}\n")).concat()).unwrap();
        let rows: Vec<Value> = dataset.with_chat_prompts().with_system_prompt("Be brief.").rows().cloned().collect();
        let whole = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
        assert_eq!((&rows[0]["prompt"], &rows[0]["answer"], &rows[3]["messages"]), (&whole, &json!(1), &whole));
        assert_eq!(rows[1]["prompt"][0]["content"], "Be rude.");
        assert_eq!(
            (&rows[2]["prompt"][0]["role"], &rows[2]["prompt"][1]["content"]),
            (&json!("system"), &json!("text"))
        );
    }

    #[test]
    fn a_prompt_that_is_a_text_becomes_the_last_message_after_the_system_text_and_the_history_of_its_row() {
        let row = json!({"query": "c", "system": "s", "history": [["a", "b"]]});
        let dataset = read("a.jsonl", &format!("{row}\n")).unwrap().with_chat_prompts();
        let messages = dataset.rows().next().unwrap()["query"].as_array().unwrap().clone();
        let contents: Vec<&str> = messages.iter().filter_map(|message| message["content"].as_str()).collect();
        assert_eq!(contents, ["s", "a", "b", "c"]);
    }

    #[test]
    fn jsonl_json_and_csv_hold_the_same_rows() {
        let lines = read("a.jsonl", "{\"prompt\": \"x\"}\n\n{\"prompt\": \"y\"}\n").unwrap();
        let array = read("a.json", "[{\"prompt\": \"x\"}, {\"prompt\": \"y\"}]").unwrap();
        let table = read("a.csv", "prompt\nx\ny\n").unwrap();
        let rows = |d: &Dataset| d.rows().cloned().collect::<Vec<_>>();
        assert_eq!(rows(&lines), rows(&array));
        assert_eq!(rows(&lines), rows(&table));
        assert_eq!(lines.rows[1].place, Place::Line(3), "blank lines count");
    }

    #[test]
    fn the_error_for_a_malformed_line_has_its_number() {
        for (text, wanted) in [
            ("{\"prompt\": \"x\"}\n{\"prompt\": ", "a.jsonl: line 2: not valid JSON"),
            ("{\"prompt\": \"x\"}\n7", "a.jsonl: line 2: expected a JSON object"),
            ("\n", "expected at least one row"),
        ] {
            let error = read("a.jsonl", text).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn an_error_about_a_row_names_the_file_of_that_row() {
        let dir = tempfile::tempdir().unwrap();
        let second = dir.path().join("train-00001-of-00002.jsonl");
        std::fs::write(dir.path().join("train-00000-of-00002.jsonl"), "{}\n{}\n{}\n").unwrap();
        std::fs::write(&second, "{}\n").unwrap();
        let dataset = Dataset::read(dir.path(), "train").unwrap();
        let error = dataset.error(3, "no").to_string();
        assert_eq!(error, format!("{}: line 1: no", second.display()));
        assert_eq!(dataset.path(), dir.path());
    }
}
