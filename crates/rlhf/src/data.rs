//! Rows of text in, token ids out: prompts, demonstrations, preference pairs; and the order in which they are taken.

use crate::rng::{Purpose, Stream};
use crate::tokenizer::{Tokenizer, shared_prefix, user_message};
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

/// A file of JSON objects, each with its place: "line 7", or "row 7" of a JSON array.
#[derive(Debug)]
pub struct Dataset {
    path: PathBuf,
    rows: Vec<(String, Value)>,
}

impl Dataset {
    /// Reads a JSONL file (an object per line), a JSON file (an array of objects), or `split`.jsonl or `split`.json in a
    /// folder. Blank lines of JSONL are passed over.
    ///
    /// # Errors
    /// If there is no such file, a line is not a JSON object, or there is no row at all.
    pub fn read(path: &Path, split: &str) -> Result<Self> {
        let path = locate(path, split)?;
        let text = read_text(&path)?;
        let rows: Vec<(String, Value)> =
            if path.extension().is_some_and(|extension| extension == "json") && text.trim_start().starts_with('[') {
                let rows: Vec<Value> =
                    serde_json::from_str(&text).map_err(|e| Error::invalid(&path, format!("not a JSON array: {e}")))?;
                (1..).zip(rows).map(|(row, value)| (format!("row {row}"), value)).collect()
            } else {
                let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
                lines.map(|(line, text)| parse_line(&path, line, text)).collect::<Result<_>>()?
            };
        if let Some((place, _)) = rows.iter().find(|(_, row)| !row.is_object()) {
            return Err(row_error(&path, place, "expected a JSON object"));
        }
        if rows.is_empty() {
            return Err(Error::invalid(&path, "expected at least one row, found an empty dataset"));
        }
        Ok(Self { path, rows })
    }

    /// Puts every prompt that is a string into a conversation: it becomes what the user says.
    pub fn with_chat_prompts(mut self) -> Self {
        for (_, row) in &mut self.rows {
            if let Some(prompt) = row.get_mut("prompt")
                && let Some(text) = prompt.as_str()
            {
                *prompt = Value::from(vec![user_message(text)]);
            }
        }
        self
    }

    /// The rows' prompts: token ids `prompt_ids`, else a string or a list of messages `prompt`, else token ids `input_ids`.
    ///
    /// # Errors
    /// If a row has neither, its prompt is empty or has more than `most` tokens, or an id is not below `vocab`.
    pub fn prompts(&self, tokenizer: &Tokenizer, vocab: i64, most: usize) -> Result<Vec<Prompt>> {
        self.map(|row| {
            let ids = match (token_ids(row, "prompt_ids", vocab)?, row.get("prompt")) {
                (None, None) => token_ids(row, "input_ids", vocab)?,
                (ids, _) => ids,
            };
            let prompt = match (ids, row.get("prompt")) {
                (Some(tokens), Some(Value::String(text))) => Prompt { tokens, text: text.clone(), row: row.clone() },
                (Some(tokens), _) => Prompt { text: tokenizer.decode(&tokens)?, tokens, row: row.clone() },
                (None, Some(Value::Array(_))) => {
                    let (text, tokens) = encode_chat(row, tokenizer, &["prompt"], true)?;
                    Prompt { tokens, text, row: row.clone() }
                }
                (None, Some(Value::String(text))) => {
                    Prompt { tokens: tokenizer.encode(text)?, text: text.clone(), row: row.clone() }
                }
                (None, _) => return Err(Error::Run(expected("prompt", "a string or a list of messages", row))),
            };
            match prompt.tokens.len() {
                0 => Err(Error::Run("the prompt is empty: expected at least one token".into())),
                found if found > most => Err(Error::Run(format!(
                    "the prompt is too long: expected at most {most} tokens (the models' context less the response), \
                     found {found}"
                ))),
                _ => Ok(prompt),
            }
        })
    }

    /// The rows' demonstrations: `text`, `prompt` and `completion`, or `messages`.
    ///
    /// Prompt and completion are strings or lists of messages, both alike. A string ends with eos; a conversation ends as
    /// the chat template ends it. With `completion_only` the loss spares the prompt.
    ///
    /// # Errors
    /// If a row has none of these forms, the tokenizer names no eos token, or its chat template fails.
    pub fn demonstrations(&self, tokenizer: &Tokenizer, completion_only: bool) -> Result<Vec<Demonstration>> {
        self.map(|row| {
            let (tokens, border) = match (row.get("text"), row.get("completion"), row.get("messages")) {
                (Some(Value::String(text)), ..) if text.is_empty() => {
                    return Err(Error::Run("field `text`: expected some text, found none".into()));
                }
                (Some(Value::String(text)), ..) => tokenizer.encode_pair("", text)?,
                (None, Some(Value::String(completion)), _) => {
                    tokenizer.encode_pair(text_field(row, "prompt")?, completion)?
                }
                (None, Some(Value::Array(_)), _) => completed_chat(row, tokenizer)?,
                (None, None, Some(_)) => (encode_chat(row, tokenizer, &["messages"], false)?.1, 0),
                _ => {
                    let forms = "a string (or `prompt` and `completion`, or `messages`)";
                    return Err(Error::Run(expected("text", forms, row)));
                }
            };
            // Nothing comes before the first token, so it cannot be learned.
            let learn_from = if completion_only { border.max(1) } else { 1 };
            Ok(Demonstration { tokens, learn_from })
        })
    }

    /// The rows' preference pairs: `chosen` and `rejected`, behind a `prompt` where there is one.
    ///
    /// All are strings, which end with eos, or all lists of messages, which end as the chat template ends them; but what
    /// is blank behind its last eos is cut: answers of PPO end with eos, and scores are read at the last token. Without `end`
    /// strings get no eos, for encoders, which read a score at the first token.
    ///
    /// # Errors
    /// If a row lacks one of the two, the tokenizer names no eos token, or its chat template fails.
    pub fn pairs(&self, tokenizer: &Tokenizer, end: bool) -> Result<Vec<Pair>> {
        self.map(|row| {
            let has_prompt = row.get("prompt").is_some();
            let side = |name| -> Result<Vec<i64>> {
                if let Some(Value::Array(_)) = row.get(name) {
                    let fields = if has_prompt { &["prompt", name][..] } else { &[name] };
                    up_to_eos(encode_chat(row, tokenizer, fields, false)?.1, tokenizer)
                } else {
                    let prompt = if has_prompt { text_field(row, "prompt")? } else { "" };
                    let text = text_field(row, name)?;
                    let encoded = if end {
                        tokenizer.encode_pair(prompt, text)
                    } else {
                        tokenizer.encode_open_pair(prompt, text)
                    };
                    Ok(encoded?.0)
                }
            };
            Ok(Pair { chosen: side("chosen")?, rejected: side("rejected")? })
        })
    }

    /// The rows' texts with the place where each completion begins: `prompt_ids` or `prompt`, then `completion_ids`, or
    /// `prompt` and `completion`, which are strings, encoded as one text, or lists of messages. No eos is added.
    ///
    /// # Errors
    /// If a row has neither form, has more than `most` tokens, or an id is not below `vocab`; if nothing comes before a
    /// completion.
    pub fn completions(&self, tokenizer: &Tokenizer, vocab: i64, most: usize) -> Result<Vec<Completed>> {
        self.map(|row| {
            let (tokens, border) = completed(row, tokenizer, vocab)?;
            if border == 0 && !tokens.is_empty() {
                let message =
                    "the completion begins with the first token: expected a prompt of at least one token before it";
                return Err(Error::Run(message.into()));
            }
            check_length(tokens.len(), most)?;
            Ok(Completed { tokens, border })
        })
    }

    /// The rows' whole texts: a prompt with its completion as [`Dataset::completions`] takes them, or token ids
    /// `input_ids`, or a string `text`, or a conversation `messages`. No eos is added; of a conversation, what is blank
    /// behind its last eos is cut, as in [`Dataset::pairs`].
    ///
    /// # Errors
    /// If a row has no such form, is empty or has more than `most` tokens, or an id is not below `vocab`.
    pub fn texts(&self, tokenizer: &Tokenizer, vocab: i64, most: usize) -> Result<Vec<Vec<i64>>> {
        self.map(|row| {
            let paired = row.get("completion").is_some() || row.get("completion_ids").is_some();
            let tokens = if paired {
                let (tokens, _) = completed(row, tokenizer, vocab)?;
                let chat = row.get("completion_ids").is_none() && row["completion"].is_array();
                if chat { up_to_eos(tokens, tokenizer)? } else { tokens }
            } else if row.get("messages").is_some() {
                up_to_eos(encode_chat(row, tokenizer, &["messages"], false)?.1, tokenizer)?
            } else if let Some(ids) = token_ids(row, "input_ids", vocab)? {
                ids
            } else {
                let text = row.get("text").and_then(Value::as_str);
                let forms = "a string (or `messages`, or `prompt` and `completion`, or token ids: `input_ids`, or \
                             `prompt_ids` and `completion_ids`)";
                tokenizer.encode(text.ok_or_else(|| Error::Run(expected("text", forms, row)))?)?
            };
            if tokens.is_empty() {
                return Err(Error::Run("the text is empty: expected at least one token".into()));
            }
            check_length(tokens.len(), most)?;
            Ok(tokens)
        })
    }

    /// The rows themselves, each a JSON object.
    pub fn rows(&self) -> impl Iterator<Item = &Value> {
        self.rows.iter().map(|(_, row)| row)
    }

    /// An error about the row at `index`, with the file and the place.
    pub fn error(&self, index: usize, message: impl Into<String>) -> Error {
        row_error(&self.path, &self.rows[index].0, message)
    }

    /// The first `count` rows.
    pub fn first(mut self, count: usize) -> Self {
        self.rows.truncate(count);
        self
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Applies `f` to every row; its errors get the file and the place.
    fn map<T>(&self, f: impl Fn(&Value) -> Result<T>) -> Result<Vec<T>> {
        self.rows
            .iter()
            .map(|(place, row)| {
                f(row).map_err(|e| match e {
                    Error::Run(message) => row_error(&self.path, place, message),
                    other => other,
                })
            })
            .collect()
    }
}

/// The text and the token ids of one conversation, whose parts are the messages in these fields of a row.
pub(crate) fn encode_chat(
    row: &Value,
    tokenizer: &Tokenizer,
    fields: &[&str],
    prompt: bool,
) -> Result<(String, Vec<i64>)> {
    let mut conversation = Vec::new();
    for name in fields {
        let messages = row.get(*name).and_then(Value::as_array).filter(|messages| !messages.is_empty());
        let wrong = || Error::Run(expected(name, "a list of at least one message", row));
        conversation.extend_from_slice(messages.ok_or_else(wrong)?);
    }
    if prompt && conversation.last().is_some_and(|message| message["role"] == "assistant") {
        return Err(Error::Run(
            "field `prompt`: expected a message to answer at the end, found the assistant's".into(),
        ));
    }
    let none = Map::new();
    let variables = match row.get("chat_template_kwargs") {
        None | Some(Value::Null) => &none,
        Some(Value::Object(variables)) => variables,
        Some(_) => return Err(Error::Run(expected("chat_template_kwargs", "an object", row))),
    };
    tokenizer.encode_chat(&conversation, prompt, variables)
}

/// `ids` without the blank that a template may put behind its last eos, a new line for instance.
pub(crate) fn up_to_eos(mut ids: Vec<i64>, tokenizer: &Tokenizer) -> Result<Vec<i64>> {
    if let Some(last) = ids.iter().rposition(|id| tokenizer.eos_ids().contains(id))
        && tokenizer.decode_verbatim(&ids[last + 1..])?.trim().is_empty()
    {
        ids.truncate(last + 1);
    }
    Ok(ids)
}

/// What a response is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// Token ids, at least one.
    pub tokens: Vec<i64>,
    /// The text.
    pub text: String,
    /// The whole row of the dataset.
    pub row: Value,
}

/// A text with the place where the part begins that is looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completed {
    /// Token ids of prompt and completion.
    pub tokens: Vec<i64>,
    /// How many of them are the prompt's.
    pub border: usize,
}

/// A text to imitate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demonstration {
    /// Token ids.
    pub tokens: Vec<i64>,
    /// The first token that the loss counts; at least 1.
    pub learn_from: usize,
}

/// Two texts, one preferred.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    /// Token ids of the better text.
    pub chosen: Vec<i64>,
    /// Token ids of the worse text.
    pub rejected: Vec<i64>,
}

/// Hands out row indices in shuffled passes: each row once per pass, in an order that the seed and the pass fix.
///
/// A batch that a pass cannot fill goes on into the next: no row is dropped.
#[derive(Debug, Clone)]
pub struct Cursor {
    seed: u64,
    len: usize,
    taken: usize,
    order: Vec<usize>,
}

impl Cursor {
    /// A cursor at the beginning of the first pass over `len` rows.
    ///
    /// # Panics
    /// If there are no rows.
    pub fn new(seed: u64, len: usize) -> Self {
        assert!(len > 0, "a cursor needs rows");
        Self { seed, len, taken: 0, order: Vec::new() }
    }

    /// The next `count` rows.
    pub fn take(&mut self, count: usize) -> Vec<usize> {
        (0..count)
            .map(|_| {
                let place = self.taken % self.len;
                if place == 0 || self.order.is_empty() {
                    let pass = (self.taken / self.len) as u64;
                    self.order = Stream::new(self.seed, Purpose::DataOrder, pass, 0).permutation(self.len);
                }
                self.taken += 1;
                self.order[place]
            })
            .collect()
    }

    /// Where it stands, for a checkpoint.
    pub fn state(&self) -> Value {
        json!({"taken": self.taken, "rows": self.len})
    }

    /// Goes to where [`Cursor::state`] was taken.
    ///
    /// # Errors
    /// If that was over another number of rows: the data has changed.
    pub fn load_state(&mut self, state: &Value) -> Result<()> {
        let number = |name: &str| state[name].as_u64().map(|number| number as usize);
        match (number("taken"), number("rows")) {
            (Some(taken), Some(rows)) if rows == self.len => {
                (self.taken, self.order) = (taken, Vec::new());
                Ok(())
            }
            (Some(_), Some(rows)) => {
                let found = self.len;
                Err(Error::Run(format!("expected the {rows} rows of data that the run began with, found {found}")))
            }
            _ => Err(Error::Run(format!("expected a place in the data, found {state}"))),
        }
    }
}

/// Rows that come one after another, from a file or a pipe: only those asked for are in memory.
pub struct RowReader {
    path: PathBuf,
    source: RowSource,
}

enum RowSource {
    /// JSON objects or prompts, a line each; with the number of lines read.
    Lines { reader: Box<dyn BufRead>, json: bool, read: usize },
    /// What was in memory from the start.
    Rows(std::vec::IntoIter<(String, Value)>),
}

impl RowReader {
    /// Reads what [`Dataset::read`] reads; a JSON array, which cannot be read in parts, at once.
    ///
    /// # Errors
    /// If there is no such file, or it is not a sound array.
    pub fn open(path: &Path, split: &str) -> Result<Self> {
        let path = locate(path, split)?;
        if path.extension().is_some_and(|extension| extension == "json") {
            let Dataset { path, rows } = Dataset::read(&path, split)?;
            return Ok(Self { path, source: RowSource::Rows(rows.into_iter()) });
        }
        let file = File::open(&path).map_err(Error::io("read", &path))?;
        Ok(Self::lines(path, BufReader::new(file), true))
    }

    /// Reads JSON objects, or with `json: false` prompts, a line each; `name` stands for them in errors.
    pub fn lines(name: impl Into<PathBuf>, reader: impl BufRead + 'static, json: bool) -> Self {
        Self { path: name.into(), source: RowSource::Lines { reader: Box::new(reader), json, read: 0 } }
    }

    /// Prompts that are given as words of the command line.
    pub fn arguments(prompts: &[String]) -> Self {
        let rows = (1..).zip(prompts).map(|(at, prompt)| (format!("argument {at}"), json!({"prompt": prompt})));
        Self { path: "prompt".into(), source: RowSource::Rows(rows.collect::<Vec<_>>().into_iter()) }
    }

    /// The next rows, at most `count` of them; `None` when there are no more. Blank lines are passed over.
    ///
    /// # Errors
    /// If the source cannot be read, or a line is not what it should be.
    pub fn next(&mut self, count: usize) -> Result<Option<Dataset>> {
        let mut rows = Vec::new();
        while rows.len() < count {
            let row = match &mut self.source {
                RowSource::Rows(rows) => rows.next(),
                RowSource::Lines { reader, json, read } => next_line(&self.path, reader, *json, read)?,
            };
            let Some((place, row)) = row else { break };
            if !row.is_object() {
                return Err(row_error(&self.path, &place, "expected a JSON object"));
            }
            rows.push((place, row));
        }
        Ok((!rows.is_empty()).then(|| Dataset { path: self.path.clone(), rows }))
    }

    /// The file, or what stands for it in errors.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The next line that is not blank, as a row with its place.
fn next_line(path: &Path, reader: &mut impl BufRead, json: bool, read: &mut usize) -> Result<Option<(String, Value)>> {
    loop {
        let mut bytes = Vec::new();
        if reader.read_until(b'\n', &mut bytes).map_err(Error::io("read", path))? == 0 {
            return Ok(None);
        }
        *read += 1;
        let place = format!("line {read}");
        let text = String::from_utf8(bytes).map_err(|_| row_error(path, &place, NOT_UTF8))?;
        let text = if *read == 1 { text.strip_prefix('\u{feff}').unwrap_or(&text) } else { &text };
        if text.trim().is_empty() {
            continue;
        }
        if json {
            return parse_line(path, *read, text).map(Some);
        }
        let text = text.strip_suffix('\n').unwrap_or(text);
        return Ok(Some((place, json!({"prompt": text.strip_suffix('\r').unwrap_or(text)}))));
    }
}

const NOT_UTF8: &str = "expected UTF-8, found bytes of another encoding";

/// The file that is `path`, or that holds the rows of `split` in the folder `path`.
///
/// # Errors
/// If there is none.
pub(crate) fn locate(path: &Path, split: &str) -> Result<PathBuf> {
    if path.is_file() {
        return Ok(path.to_path_buf());
    }
    if !path.is_dir() {
        return Err(Error::invalid(path, "expected a JSONL or JSON file, or a folder of them, found no such path"));
    }
    let candidates = [format!("{split}.jsonl"), format!("{split}.json")];
    candidates.iter().map(|name| path.join(name)).find(|file| file.is_file()).ok_or_else(|| {
        Error::invalid(path, format!("expected {} or {} in the folder, found neither", candidates[0], candidates[1]))
    })
}

fn row_error(path: &Path, place: &str, message: impl Into<String>) -> Error {
    Error::Row { path: path.to_path_buf(), place: place.to_string(), message: message.into() }
}

/// One line of a JSONL file, with its place.
fn parse_line(path: &Path, line: usize, text: &str) -> Result<(String, Value)> {
    let place = format!("line {line}");
    match serde_json::from_str(text) {
        Ok(row) => Ok((place, row)),
        Err(e) => {
            // The parser saw one line and says so; ours is the line that counts.
            let message = e.to_string().replace(" at line 1 column", " at column");
            Err(row_error(path, &place, format!("not valid JSON: {message}")))
        }
    }
}

/// The text of a file, without the byte order mark that some editors write.
fn read_text(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        let before = &e.as_bytes()[..e.utf8_error().valid_up_to()];
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        row_error(path, &format!("line {line}"), NOT_UTF8)
    })?;
    Ok(text.strip_prefix('\u{feff}').map(String::from).unwrap_or(text))
}

/// The token ids in the field `name`, if the row has it.
fn token_ids(row: &Value, name: &str, vocab: i64) -> Result<Option<Vec<i64>>> {
    let Some(ids) = row.get(name) else { return Ok(None) };
    let ids: Option<Vec<i64>> = ids.as_array().and_then(|ids| ids.iter().map(Value::as_i64).collect());
    let ids = ids.ok_or_else(|| Error::Run(expected(name, "a list of token ids", row)))?;
    match ids.iter().find(|id| !(0..vocab).contains(*id)) {
        Some(id) => {
            Err(Error::Run(format!("field `{name}`: expected ids below the vocabulary of {vocab}, found {id}")))
        }
        None => Ok(Some(ids)),
    }
}

/// Tokens of a prompt with its completion, and how many are the prompt's. Token ids go before text: they are exact.
fn completed(row: &Value, tokenizer: &Tokenizer, vocab: i64) -> Result<(Vec<i64>, usize)> {
    let prompt = token_ids(row, "prompt_ids", vocab)?;
    let Some(completion) = token_ids(row, "completion_ids", vocab)? else {
        // A list of ids and a text would have to be joined in the middle of what may be one token.
        if prompt.is_some() {
            return Err(Error::Run(expected("completion_ids", "a list of token ids, as `prompt_ids` is", row)));
        }
        if let Some(Value::Array(_)) = row.get("completion") {
            return completed_chat(row, tokenizer);
        }
        return tokenizer.encode_open_pair(text_field(row, "prompt")?, text_field(row, "completion")?);
    };
    let mut tokens = match (prompt, row.get("prompt")) {
        (Some(prompt), _) => prompt,
        (None, Some(Value::Array(_))) => encode_chat(row, tokenizer, &["prompt"], true)?.1,
        (None, _) => tokenizer.encode(text_field(row, "prompt")?)?,
    };
    let border = tokens.len();
    tokens.extend(completion);
    Ok((tokens, border))
}

/// Tokens of the messages `prompt` and `completion`, and how many of them those of the prompt are.
fn completed_chat(row: &Value, tokenizer: &Tokenizer) -> Result<(Vec<i64>, usize)> {
    let alone = encode_chat(row, tokenizer, &["prompt"], true)?.1;
    let whole = encode_chat(row, tokenizer, &["prompt", "completion"], false)?.1;
    let border = shared_prefix(&alone, &whole);
    Ok((whole, border))
}

fn check_length(found: usize, most: usize) -> Result<()> {
    if found <= most {
        return Ok(());
    }
    Err(Error::Run(format!("the row is too long: expected at most {most} tokens, the model's context, found {found}")))
}

fn text_field<'a>(row: &'a Value, name: &str) -> Result<&'a str> {
    row.get(name).and_then(Value::as_str).ok_or_else(|| Error::Run(expected(name, "a string", row)))
}

/// "expected X in the field, found ..." for a row that lacks it.
fn expected(name: &str, what: &str, row: &Value) -> String {
    match row.get(name) {
        Some(found) => format!("field `{name}`: expected {what}, found {found}"),
        None => {
            let names: Vec<String> =
                row.as_object().into_iter().flat_map(|row| row.keys()).map(|name| format!("`{name}`")).collect();
            let found = if names.is_empty() { "no field at all".to_string() } else { names.join(", ") };
            format!("expected a field `{name}` with {what}, found {found}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_taken_once_per_pass_and_batches_run_on_into_the_next() {
        let mut cursor = Cursor::new(3, 5);
        let taken: Vec<usize> = (0..5).flat_map(|_| cursor.take(3)).collect();
        for pass in taken.chunks(5) {
            let mut sorted = pass.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 3, 4]);
        }
        assert_ne!(taken[..5], taken[5..10], "passes are shuffled anew");
        assert_eq!(Cursor::new(3, 5).take(15), taken, "and the batch size changes no order");
        assert_ne!(Cursor::new(4, 5).take(15), taken, "which the seed does");
    }

    fn read(name: &str, text: &str) -> Result<Dataset> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        Dataset::read(&path, "train")
    }

    #[test]
    fn jsonl_and_json_hold_the_same_rows() {
        let lines = read("a.jsonl", "{\"prompt\": \"x\"}\n\n{\"prompt\": \"y\"}\n").unwrap();
        let array = read("a.json", "[{\"prompt\": \"x\"}, {\"prompt\": \"y\"}]").unwrap();
        let rows = |d: &Dataset| d.rows.iter().map(|(_, row)| row.clone()).collect::<Vec<_>>();
        assert_eq!(rows(&lines), rows(&array));
        assert_eq!(lines.rows[1].0, "line 3", "blank lines count");
    }

    #[test]
    fn a_bad_line_is_named() {
        for (text, wanted) in [
            ("{\"prompt\": \"x\"}\n{\"prompt\": ", "a.jsonl: line 2: not valid JSON"),
            ("{\"prompt\": \"x\"}\n7", "a.jsonl: line 2: expected a JSON object"),
            ("\n", "expected at least one row"),
        ] {
            let error = read("a.jsonl", text).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }

    /// All rows of a reader, taken `count` at a time.
    fn drain(mut reader: RowReader, count: usize) -> Result<Vec<(String, Value)>> {
        let mut rows = Vec::new();
        while let Some(part) = reader.next(count)? {
            assert!(part.rows.len() <= count);
            rows.extend(part.rows);
        }
        Ok(rows)
    }

    #[test]
    fn rows_read_in_parts_are_those_read_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.jsonl");
        std::fs::write(&path, "\u{feff}{\"a\": 1}\r\n\n  \n{\"a\": 2}\n{\"a\": 3}").unwrap();
        let array = dir.path().join("a.json");
        std::fs::write(&array, "[{\"a\": 1}, {\"a\": 2}]").unwrap();
        for count in 1..5 {
            let rows = drain(RowReader::open(&path, "test").unwrap(), count).unwrap();
            assert_eq!(rows, Dataset::read(&path, "test").unwrap().rows);
            let rows = drain(RowReader::open(&array, "test").unwrap(), count).unwrap();
            assert_eq!(rows, Dataset::read(&array, "test").unwrap().rows);
        }
    }

    #[test]
    fn lines_of_text_are_prompts_and_lose_their_end_only() {
        let rows = drain(RowReader::lines("pipe", &b" {\"x\"  \r\n\n\ty"[..], false), 2).unwrap();
        let prompt = |text: &str| json!({"prompt": text});
        assert_eq!(rows, [("line 1".into(), prompt(" {\"x\"  ")), ("line 3".into(), prompt("\ty"))]);
        let error = drain(RowReader::lines("pipe", &b"x\n\xff\n"[..], false), 9).unwrap_err().to_string();
        assert_eq!(error, "pipe: line 2: expected UTF-8, found bytes of another encoding");
    }

    #[test]
    fn a_missing_field_is_named_with_what_is_there() {
        let row = serde_json::json!({"question": "x", "answer": 1});
        assert_eq!(
            expected("prompt", "a string", &row),
            "expected a field `prompt` with a string, found `question`, `answer`"
        );
        assert_eq!(expected("answer", "a string", &row), "field `answer`: expected a string, found 1");
    }
}
