//! Rows in, token ids out: prompts, demonstrations, preference pairs; where rows come from, and the order in which they are
//! taken.

mod columns;
mod cursor;
mod files;
mod formats;

pub use columns::Columns;
pub use cursor::Cursor;
pub use files::Files;

use crate::generate::FinishReason;
use crate::rng::{Purpose, Stream};
use crate::settings::{DataConfig, DataSplit, LongPrompts, PromptLengthConfig, Step, TEST};
use crate::tokenizer::{Tokenizer, shared_prefix, user_message};
use crate::weights::brief;
use crate::{Error, Result};
use formats::{format, next_line, open_text, read_rows};
use serde_json::{Map, Value, json};
use std::fmt;
use std::io::BufRead;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Rows, each a JSON object that knows its file and its place there.
///
/// ```no_run
/// use rlhf::data::Dataset;
/// use rlhf::tokenizer::Tokenizer;
/// # fn main() -> rlhf::Result<()> {
/// let tokenizer = Tokenizer::from_pretrained("runs/sft".as_ref())?;
/// // JSONL, JSON, CSV or Parquet: a file, a folder, or a name on the hub. Prompts of at most 64 tokens, of a vocabulary of 50,304.
/// let prompts = Dataset::read("prompts.jsonl".as_ref(), "train")?.prompts(&tokenizer, 50_304, 64)?;
/// println!("{} prompts; the first is {:?}", prompts.len(), prompts[0].text);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Dataset {
    name: PathBuf,
    rows: Vec<Row>,
}

/// One row.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    file: Arc<Path>,
    place: Place,
    value: Value,
}

/// Where a row stands in its file; counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Of a text.
    Line(usize),
    /// Of a JSON array or of Parquet.
    Row(usize),
    /// Of the command line.
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
    fn error(self, file: &Path, message: impl Into<String>) -> Error {
        Error::Row { path: file.to_path_buf(), place: self.to_string(), message: message.into() }
    }
}

impl Row {
    fn new(file: &Arc<Path>, place: Place, value: Value) -> Result<Self> {
        if value.is_object() {
            Ok(Self { file: file.clone(), place, value })
        } else {
            Err(place.error(file, "expected a JSON object"))
        }
    }
}

/// Where the rows of a training run are: looked up before anything slow begins.
#[derive(Debug)]
pub struct Sources<'c> {
    config: &'c DataConfig,
    train: Vec<Files>,
    eval: Vec<Files>,
}

impl<'c> Sources<'c> {
    /// Finds the files to train on, and those to evaluate on: of the dataset `own_eval`, else of the test split of those datasets
    /// that have it, unless it is what is trained on.
    ///
    /// # Errors
    /// As [`Files::find`]; if a test split is named that no dataset has, or rows are to be held out beside a test split.
    pub fn find(config: &'c DataConfig, own_eval: Option<&Path>) -> Result<Self> {
        let folder = config.dataset_config.as_deref();
        let (train_split, test_split) = (&config.dataset_train_split, &config.dataset_test_split);
        let names = &config.dataset_name;
        let train = names.iter().map(|name| Files::find(name, folder, train_split)).collect::<Result<_>>()?;
        if let Some(own) = own_eval {
            return Ok(Self { config, train, eval: vec![Files::find(own, None, test_split)?] });
        }
        let mut eval = Vec::new();
        // What is learnt from says nothing when it is evaluated on.
        let splits_differ = train_split != test_split;
        for name in names.iter().filter(|_| splits_differ) {
            eval.extend(Files::find_if_there(name, folder, test_split)?);
        }
        match (config.eval_split_size, names.iter().find(|name| !name.is_file())) {
            (Some(size), _) if !eval.is_empty() => {
                return Err(Error::Usage(format!(
                    "eval_split_size = {size} takes rows to evaluate on from the training rows, and {} has a split \
                     `{test_split}` for that: leave eval_split_size out",
                    eval[0].name.display()
                )));
            }
            // Who names a split wants it; a file has none, and `test` is only the default.
            (None, Some(name)) if eval.is_empty() && splits_differ && test_split != TEST => {
                Files::find(name, folder, test_split)?;
            }
            _ => {}
        }
        Ok(Self { config, train, eval })
    }

    /// Whether there will be rows to evaluate on.
    pub fn hold_rows_out(&self) -> bool {
        !self.eval.is_empty() || self.config.eval_split_size.is_some()
    }

    /// Reads all of them: the rows to train on, a dataset per source, and those to evaluate on, which may be held out from
    /// them as the seed decides. Of datasets that are split the rows to train on are those of `step`.
    ///
    /// # Errors
    /// If a file is not what it should be, or nothing would be left to train on.
    pub fn read(&self, seed: u64, step: Step) -> Result<(Vec<Dataset>, Option<Dataset>)> {
        let columns = Columns::parse(&self.config.dataset_columns)?;
        let read = |files: &Vec<Files>| -> Result<Vec<_>> {
            files.iter().map(|files| Dataset::of(files)?.with_columns(&columns)).collect()
        };
        let (mut train, eval) = (read(&self.train)?, read(&self.eval)?);
        if let Some(split) = self.config.data_split {
            train.iter_mut().try_for_each(|dataset| dataset.keep_share(split, self.config.data_split_seed, step))?;
        }
        let eval = match self.config.eval_split_size {
            Some(size) if eval.is_empty() => Some(hold_out(&mut train, size, seed)?),
            _ => eval.into_iter().reduce(Dataset::and),
        };
        Ok((train, eval))
    }
}

/// Takes rows out of `train`, so many or this share of all of them: which ones, the seed decides, and no row is on both sides.
fn hold_out(train: &mut [Dataset], size: f64, seed: u64) -> Result<Dataset> {
    let all: usize = train.iter().map(|dataset| dataset.rows.len()).sum();
    let count = if size < 1.0 { (size * all as f64).ceil() as usize } else { size as usize };
    let mut held = vec![false; all];
    Stream::new(seed, Purpose::HeldOut, 0, 0).permutation(all).into_iter().take(count).for_each(|row| held[row] = true);
    let mut held = held.into_iter();
    let mut taken: Vec<Row> = Vec::new();
    for dataset in &mut *train {
        let rows = std::mem::take(&mut dataset.rows);
        let (out, left): (Vec<Row>, Vec<Row>) = rows.into_iter().partition(|_| held.next() == Some(true));
        dataset.rows = left;
        taken.extend(out);
        if dataset.rows.is_empty() {
            let name = dataset.name.display();
            return Err(Error::Usage(format!("eval_split_size = {size} leaves no row of {name} to train on")));
        }
    }
    Ok(Dataset { name: format!("rows held out from {}", names(train)).into(), rows: taken })
}

fn names(datasets: &[Dataset]) -> String {
    datasets.iter().map(|dataset| dataset.name.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// How many tokens a prompt may have, and what becomes of one that has more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptLimit {
    most: usize,
    long: LongPrompts,
    /// Where `most` comes from, for messages.
    reason: &'static str,
    /// What may be done about a longer one.
    hint: &'static str,
}

impl PromptLimit {
    /// Prompts that leave room for a response in the models' context; a longer one is an error.
    pub fn of_context(most: usize) -> Self {
        Self { most, long: LongPrompts::Error, reason: "the models' context less the response", hint: "" }
    }

    /// As the settings say, where the models' context has room for `room` tokens of a prompt.
    ///
    /// # Errors
    /// If more are allowed than there is room for.
    pub fn new(config: &PromptLengthConfig, room: usize) -> Result<Self> {
        let (long, hint) = (config.long_prompts, "; --long_prompts says what else may become of it");
        match config.max_prompt_length {
            Some(most) if most > room => Err(Error::Usage(format!(
                "max_prompt_length = {most}: expected at most {room}, the models' context less response_length"
            ))),
            Some(most) => Ok(Self { most, long, reason: "max_prompt_length", hint }),
            None => Ok(Self { long, hint, ..Self::of_context(room) }),
        }
    }
}

impl Dataset {
    /// Reads `split` of the dataset `name`, as [`Files::find`] finds it: JSONL (an object per line; blank lines are passed
    /// over), JSON (an array of objects), CSV (a cell is text, but a JSON list in columns of token ids and messages) or Parquet.
    ///
    /// # Errors
    /// If there is no such file, a row is not what it should be, or there is no row at all.
    pub fn read(name: &Path, split: &str) -> Result<Self> {
        Self::of(&Files::find(name, None, split)?)
    }

    /// The rows of all these files.
    ///
    /// # Errors
    /// As [`Dataset::read`].
    pub fn of(files: &Files) -> Result<Self> {
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

    /// Has the rows give their fields by other columns.
    ///
    /// # Errors
    /// If a row lacks one of the columns.
    pub fn with_columns(mut self, columns: &Columns) -> Result<Self> {
        self.rows.iter_mut().try_for_each(|row| columns.apply(row))?;
        Ok(self)
    }

    /// Keeps the rows of `step`'s share, in their order. Equal datasets have equal shares, whatever else is read.
    fn keep_share(&mut self, split: DataSplit, seed: u64, step: Step) -> Result<()> {
        let all = self.rows.len();
        let mut kept = vec![false; all];
        let order = Stream::new(seed, Purpose::DataSplit, 0, 0).permutation(all);
        order[split.share(step, all)].iter().for_each(|&row| kept[row] = true);
        let mut kept = kept.into_iter();
        self.rows.retain(|_| kept.next() == Some(true));
        if self.rows.is_empty() {
            let name = self.name.display();
            return Err(Error::Usage(format!("data_split = {split} leaves none of {all} rows of {name} for {step}")));
        }
        Ok(())
    }

    /// The rows of both.
    fn and(mut self, other: Self) -> Self {
        self.name = format!("{}, {}", self.name.display(), other.name.display()).into();
        self.rows.extend(other.rows);
        self
    }

    /// Puts every prompt that is a string into a conversation: it becomes what the user says.
    pub fn with_chat_prompts(mut self) -> Self {
        for row in &mut self.rows {
            if let Some((name, Value::String(text))) = prompt_field(&row.value) {
                let message = user_message(text);
                row.value[name] = Value::from(vec![message]);
            }
        }
        self
    }

    /// The rows' prompts: token ids `prompt_ids`, else a string or a list of messages `prompt`, else token ids `input_ids`,
    /// else `query`, which is as `prompt`.
    ///
    /// # Errors
    /// If a row has none of them, its prompt is empty or has more than `most` tokens, or an id is not below `vocab`.
    pub fn prompts(&self, tokenizer: &Tokenizer, vocab: i64, most: usize) -> Result<Vec<Prompt>> {
        Ok(self.prompts_within(tokenizer, vocab, PromptLimit::of_context(most))?.0)
    }

    /// As [`Dataset::prompts`], with a choice of what becomes of long ones; and what to tell of them, if there are any.
    ///
    /// # Errors
    /// As [`Dataset::prompts`]; if none is left.
    pub fn prompts_within(
        &self,
        tokenizer: &Tokenizer,
        vocab: i64,
        limit: PromptLimit,
    ) -> Result<(Vec<Prompt>, Option<String>)> {
        let PromptLimit { most, long, reason, hint } = limit;
        // What the tokenizer puts in front of every text stays there.
        let front = if long == LongPrompts::TruncateLeft && tokenizer.knows_text() {
            tokenizer.encode_prompt("")?
        } else {
            Vec::new()
        };
        let prompts = self.map(|row| {
            let mut prompt = prompt_of(row, tokenizer, vocab)?;
            let found = prompt.tokens.len();
            if found == 0 {
                return Err(Error::Run("the prompt is empty: expected at least one token".into()));
            }
            if found <= most {
                return Ok((Some(prompt), false));
            }
            match long {
                LongPrompts::Error => {
                    return Err(Error::Run(format!(
                        "the prompt is too long: expected at most {most} tokens ({reason}), found {found}{hint}"
                    )));
                }
                LongPrompts::Drop => return Ok((None, true)),
                LongPrompts::TruncateLeft => {
                    let kept = if prompt.tokens.starts_with(&front) && front.len() < most { front.len() } else { 0 };
                    prompt.tokens.drain(kept..kept + found - most);
                }
                LongPrompts::TruncateRight => prompt.tokens.truncate(most),
            }
            let chat = prompt_field(row).is_some_and(|(_, prompt)| prompt.is_array());
            prompt.text =
                if chat { tokenizer.decode_verbatim(&prompt.tokens)? } else { tokenizer.decode(&prompt.tokens)? };
            Ok((Some(prompt), true))
        })?;
        let (all, too_long) = (prompts.len(), prompts.iter().filter(|(_, long)| *long).count());
        let prompts: Vec<Prompt> = prompts.into_iter().filter_map(|(prompt, _)| prompt).collect();
        if prompts.is_empty() {
            let message = format!("each of {all} prompts has more than {most} tokens ({reason})");
            return Err(Error::invalid(&self.name, message));
        }
        let done = if long == LongPrompts::Drop { "dropped" } else { "cut" };
        let note = (too_long > 0).then(|| {
            let name = self.name.display();
            format!("{name}: {too_long} of {all} prompts were {done}: more than {most} tokens ({reason})")
        });
        Ok((prompts, note))
    }

    /// The rows' demonstrations: `text`, `prompt` and `completion`, `messages`, or `chosen`, behind a `prompt` where there is
    /// one.
    ///
    /// Prompt and completion or `chosen` are strings or lists of messages, both alike. A string ends with eos; a conversation ends as
    /// the chat template ends it. With `completion_only` the loss spares the prompt.
    ///
    /// # Errors
    /// If a row has none of these forms, the tokenizer names no eos token, or its chat template fails.
    pub fn demonstrations(&self, tokenizer: &Tokenizer, completion_only: bool) -> Result<Vec<Demonstration>> {
        self.demonstrations_with(tokenizer, &Learned { completion_only, ..Learned::default() })
    }

    /// As [`Dataset::demonstrations`], with a choice of the field of texts and of what of a conversation is learned.
    ///
    /// # Errors
    /// As [`Dataset::demonstrations`]; with `assistant_only`, if a row is no conversation, or its chat template neither marks
    /// what the assistant says nor keeps the turns apart.
    pub fn demonstrations_with(&self, tokenizer: &Tokenizer, learned: &Learned) -> Result<Vec<Demonstration>> {
        let text_name = learned.text_field.as_str();
        self.map(|row| {
            let fields: &[&str] = match (field(row, text_name), answer_field(row), field(row, "messages")) {
                (None, Some(("chosen", Value::Array(_))), _) if field(row, "prompt").is_none() => &["chosen"],
                (None, Some((name, Value::Array(_))), _) => &["prompt", name],
                (None, None, Some(_)) => &["messages"],
                _ => &[],
            };
            let (tokens, border) = match (field(row, text_name), answer_field(row), field(row, "messages")) {
                (Some(Value::String(text)), ..) if text.is_empty() => {
                    return Err(Error::Run(format!("field `{text_name}`: expected some text, found none")));
                }
                (Some(Value::String(text)), ..) => tokenizer.encode_pair("", text)?,
                (None, Some(("chosen", Value::String(text))), _) if field(row, "prompt").is_none() => {
                    tokenizer.encode_pair("", text)?
                }
                (None, Some(("chosen", Value::Array(_))), _) if field(row, "prompt").is_none() => {
                    (encode_chat(row, tokenizer, &["chosen"], false)?.1, 0)
                }
                (None, Some((_, Value::String(answer))), _) => {
                    tokenizer.encode_pair(text_field(row, "prompt")?, answer)?
                }
                (None, Some((name, Value::Array(_))), _) => completed_chat(row, tokenizer, name)?,
                (None, Some((name, _)), _) => {
                    return Err(Error::Run(expected(name, "a string or a list of messages", row)));
                }
                (None, None, Some(_)) => (encode_chat(row, tokenizer, &["messages"], false)?.1, 0),
                _ => {
                    let forms = "a string (or `prompt` and `completion` or `chosen`, or `messages`)";
                    return Err(Error::Run(expected(text_name, forms, row)));
                }
            };
            // Nothing comes before the first token, so it cannot be learned.
            let learn_from = if learned.completion_only { border.max(1) } else { 1 };
            let mut row_learned = Demonstration { tokens, learn_from, spared: Vec::new() };
            if learned.assistant_only {
                if fields.is_empty() {
                    let message = "assistant_only_loss: expected a row with a list of messages, found one without";
                    return Err(Error::Run(message.into()));
                }
                let (messages, variables) = conversation(row, fields)?;
                row_learned.spare_others(tokenizer.assistant_tokens(&messages, &variables)?);
            }
            Ok(row_learned)
        })
    }

    /// The rows' preference pairs: `chosen` and `rejected`, behind a `prompt` where there is one.
    ///
    /// All are strings, which end with eos, or all lists of messages, which end as the chat template ends them; but what
    /// is blank behind its last eos is cut: answers of PPO end with eos, and scores are read at the last token. Without `end`
    /// strings get no eos, for encoders, which read a score at the first token.
    ///
    /// A number `margin` is by how much the scores should differ; without one they should differ at all.
    ///
    /// # Errors
    /// If a row lacks one of the two, its margin is no number, the tokenizer names no eos token, or its chat template fails.
    pub fn pairs(&self, tokenizer: &Tokenizer, end: bool) -> Result<Vec<Pair>> {
        self.map(|row| pair_of(row, tokenizer, end))
    }

    /// The rows' texts with the place where each completion begins: `prompt_ids` or `prompt`, then `completion_ids`, or
    /// `prompt` and `completion`, which are strings, encoded as one text, or lists of messages. No eos is added.
    ///
    /// # Errors
    /// If a row has neither form, has more than `most` tokens, or an id is not below `vocab`; if nothing comes before a
    /// completion.
    pub fn completions(&self, tokenizer: &Tokenizer, vocab: i64, most: usize) -> Result<Vec<Completed>> {
        self.map(|row| {
            let (tokens, border) = completed(row, tokenizer, vocab, false)?;
            if border == 0 && !tokens.is_empty() {
                let message =
                    "the completion begins with the first token: expected a prompt of at least one token before it";
                return Err(Error::Run(message.into()));
            }
            check_length(tokens.len(), most)?;
            Ok(Completed { tokens, border })
        })
    }

    /// The rows' prompts with the answers to them, as rewards see them: tokens as [`Dataset::completions`] takes them, of
    /// messages without what is blank behind the last eos.
    ///
    /// An answer has ended by itself unless its `finish_reason` is `length` or, where that is not told, its token ids are given
    /// and the last of them is no eos.
    ///
    /// # Errors
    /// If a row has no prompt with a completion.
    pub fn answers(&self, tokenizer: &Tokenizer) -> Result<Vec<Answer>> {
        self.map(|row| answer_of(row, tokenizer))
    }

    /// What is scored of each row: its answer, as [`Dataset::answers`] takes it, or of a preference pair the answers `chosen` and
    /// `rejected` to its `prompt`, which end with eos if they are strings, as in [`Dataset::pairs`].
    ///
    /// # Errors
    /// As [`Dataset::answers`].
    pub fn scored_answers(&self, tokenizer: &Tokenizer) -> Result<Vec<Vec<Answer>>> {
        self.map(|row| {
            if !is_pair(row) {
                return Ok(vec![answer_of(row, tokenizer)?]);
            }
            let side = |name: &str| -> Result<Answer> {
                let mut side = row.clone();
                side["completion"] = row[name].clone();
                let mut answer = answer_of(&side, tokenizer)?;
                if row[name].is_string() {
                    end_with_eos(&mut answer.response_ids, tokenizer);
                }
                Ok(answer)
            };
            Ok(vec![side("chosen")?, side("rejected")?])
        })
    }

    /// The rows' whole texts: a prompt with its completion as [`Dataset::completions`] takes them, or token ids
    /// `input_ids`, or a string `text`, or a conversation `messages`. No eos is added; of a conversation, what is blank
    /// behind its last eos is cut, as in [`Dataset::pairs`].
    ///
    /// # Errors
    /// If a row has no such form, is empty or has more than `most` tokens, or an id is not below `vocab`.
    pub fn texts(&self, tokenizer: &Tokenizer, vocab: i64, most: usize) -> Result<Vec<Vec<i64>>> {
        self.map(|row| check_text(text_of(row, tokenizer, vocab)?, most))
    }

    /// What a model scores of each row: its text, as [`Dataset::texts`] takes it, or of a preference pair the two texts, as
    /// [`Dataset::pairs`] takes them with this `end`: the better one first.
    ///
    /// # Errors
    /// As [`Dataset::texts`] and [`Dataset::pairs`].
    pub fn scored_texts(
        &self,
        tokenizer: &Tokenizer,
        end: bool,
        vocab: i64,
        most: usize,
    ) -> Result<Vec<Vec<Vec<i64>>>> {
        self.map(|row| {
            let texts = if is_pair(row) {
                let Pair { chosen, rejected, .. } = pair_of(row, tokenizer, end)?;
                vec![chosen, rejected]
            } else {
                vec![text_of(row, tokenizer, vocab)?]
            };
            texts.into_iter().map(|text| check_text(text, most)).collect()
        })
    }

    /// The rows themselves, each a JSON object.
    pub fn rows(&self) -> impl Iterator<Item = &Value> {
        self.rows.iter().map(|row| &row.value)
    }

    /// An error about the row at `index`, with the file and the place.
    pub fn error(&self, index: usize, message: impl Into<String>) -> Error {
        self.rows[index].place.error(&self.rows[index].file, message)
    }

    /// The first `count` rows.
    pub fn first(mut self, count: usize) -> Self {
        self.rows.truncate(count);
        self
    }

    /// The file, or what stands for several.
    pub fn path(&self) -> &Path {
        &self.name
    }

    /// The rows, as they were read.
    pub(crate) fn values(&self) -> impl Iterator<Item = &Value> {
        self.rows.iter().map(|row| &row.value)
    }

    /// Asks `check` of every row.
    ///
    /// # Errors
    /// Its first error, with the file and the place of the row.
    pub fn check(&self, check: impl Fn(&Value) -> Result<()>) -> Result<()> {
        self.map(check).map(drop)
    }

    /// Applies `f` to every row; its errors get the file and the place.
    fn map<T>(&self, f: impl Fn(&Value) -> Result<T>) -> Result<Vec<T>> {
        self.rows
            .iter()
            .map(|row| {
                f(&row.value).map_err(|e| match e {
                    Error::Run(message) => row.place.error(&row.file, message),
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
    let (conversation, variables) = conversation(row, fields)?;
    if prompt && conversation.last().is_some_and(|message| message["role"] == "assistant") {
        let message = format!("field `{}`: expected a message to answer at the end, found the assistant's", fields[0]);
        return Err(Error::Run(message));
    }
    tokenizer.encode_chat(&conversation, prompt, &variables)
}

/// The messages in these fields of a row, one behind another, and the row's variables for the chat template.
fn conversation(row: &Value, fields: &[&str]) -> Result<(Vec<Value>, Map<String, Value>)> {
    let mut conversation = Vec::new();
    for name in fields {
        let messages = field(row, name).and_then(Value::as_array).filter(|messages| !messages.is_empty());
        let wrong = || Error::Run(expected(name, "a list of at least one message", row));
        conversation.extend_from_slice(messages.ok_or_else(wrong)?);
    }
    let variables = match field(row, "chat_template_kwargs") {
        None => Map::new(),
        Some(Value::Object(variables)) => variables.clone(),
        Some(_) => return Err(Error::Run(expected("chat_template_kwargs", "an object", row))),
    };
    Ok((conversation, variables))
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

/// A prompt with an answer to it.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The prompt.
    pub prompt: Prompt,
    /// The text of the answer, without special tokens.
    pub response: String,
    /// Its token ids.
    pub response_ids: Vec<i64>,
    /// Why it ended.
    pub finish: FinishReason,
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
    /// Tokens behind it that the loss does not count: ranges in order, apart from each other.
    pub spared: Vec<Range<usize>>,
}

impl Demonstration {
    /// How many tokens the loss counts.
    pub fn counted(&self) -> usize {
        let spared: usize = self.spared.iter().map(Range::len).sum();
        self.tokens.len().saturating_sub(self.learn_from + spared)
    }

    /// Cuts it after `most` tokens.
    pub(crate) fn truncate(&mut self, most: usize) {
        self.tokens.truncate(most);
        let len = self.tokens.len();
        self.spared.iter_mut().for_each(|range| *range = range.start.min(len)..range.end.min(len));
        self.spared.retain(|range| !range.is_empty());
    }

    /// From now on the loss counts only those of its tokens that lie in `ranges`.
    fn spare_others(&mut self, ranges: Vec<Range<usize>>) {
        let mut at = self.learn_from;
        let end = self.tokens.len();
        for range in ranges {
            if range.end <= at {
                continue;
            }
            if range.start > at {
                self.spared.push(at..range.start);
            }
            at = range.end;
        }
        if at < end {
            self.spared.push(at..end);
        }
        // What is spared at the beginning need not be computed.
        if self.spared.first().is_some_and(|first| first.start == self.learn_from && first.end < end) {
            self.learn_from = self.spared.remove(0).end;
        }
    }
}

/// What of a row is learned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Learned {
    /// Of a prompt and a completion, the completion only.
    pub completion_only: bool,
    /// Of a conversation, what the assistant says only.
    pub assistant_only: bool,
    /// The field of a text that is learned whole.
    pub text_field: String,
}

impl Default for Learned {
    fn default() -> Self {
        Self { completion_only: true, assistant_only: false, text_field: "text".into() }
    }
}

/// Two texts, one preferred.
#[derive(Debug, Clone, PartialEq)]
pub struct Pair {
    /// Token ids of the better text.
    pub chosen: Vec<i64>,
    /// Token ids of the worse text.
    pub rejected: Vec<i64>,
    /// By how much the score of the better text should be above that of the worse one, where the data say so.
    pub margin: Option<f64>,
}

/// Rows that come one after another, from a file or a pipe: only those asked for are in memory.
pub struct RowReader {
    name: PathBuf,
    source: RowSource,
    columns: Columns,
}

enum RowSource {
    /// JSON objects or prompts, a line each; with the number of lines read.
    Lines { file: Arc<Path>, reader: Box<dyn BufRead>, json: bool, read: usize },
    /// What was in memory from the start.
    Rows(std::vec::IntoIter<Row>),
}

impl RowReader {
    /// Reads what [`Dataset::read`] reads; all at once, unless it is one file of JSONL.
    ///
    /// # Errors
    /// If there is no such file, or what cannot be read in parts is not what it should be.
    pub fn open(name: &Path, split: &str) -> Result<Self> {
        let files = Files::find(name, None, split)?;
        let columns = Columns::default();
        let whole = |path: &Path| matches!(format(path), Some("json" | "csv" | "parquet"));
        match files.paths.as_slice() {
            [path] if !whole(path) => Ok(Self::lines(path, open_text(path)?, true)),
            _ => {
                let Dataset { name, rows } = Dataset::of(&files)?;
                Ok(Self { name, source: RowSource::Rows(rows.into_iter()), columns })
            }
        }
    }

    /// Reads JSON objects, or with `json: false` prompts, a line each; `name` stands for them in errors.
    pub fn lines(name: impl Into<PathBuf>, reader: impl BufRead + 'static, json: bool) -> Self {
        let name = name.into();
        let file = name.as_path().into();
        let source = RowSource::Lines { file, reader: Box::new(reader), json, read: 0 };
        Self { name, source, columns: Columns::default() }
    }

    /// Prompts that are given as words of the command line.
    pub fn arguments(prompts: &[String]) -> Self {
        let file: Arc<Path> = Path::new("prompt").into();
        let row =
            |(at, prompt)| Row { file: file.clone(), place: Place::Argument(at), value: json!({"prompt": prompt}) };
        let rows: Vec<Row> = (1..).zip(prompts).map(row).collect();
        Self { name: "prompt".into(), source: RowSource::Rows(rows.into_iter()), columns: Columns::default() }
    }

    /// Has the rows give their fields by other columns.
    #[must_use]
    pub fn with_columns(mut self, columns: Columns) -> Self {
        self.columns = columns;
        self
    }

    /// The next rows, at most `count` of them; `None` when there are no more. Blank lines are passed over.
    ///
    /// # Errors
    /// If the source cannot be read, a line is not what it should be, or a row lacks a column that is asked for.
    pub fn next(&mut self, count: usize) -> Result<Option<Dataset>> {
        let mut rows = Vec::new();
        while rows.len() < count {
            let row = match &mut self.source {
                RowSource::Rows(rows) => rows.next(),
                RowSource::Lines { file, reader, json, read } => next_line(file, reader, *json, read)?,
            };
            let Some(mut row) = row else { break };
            self.columns.apply(&mut row)?;
            rows.push(row);
        }
        Ok((!rows.is_empty()).then(|| Dataset { name: self.name.clone(), rows }))
    }

    /// The file, or what stands for it in errors.
    pub fn path(&self) -> &Path {
        &self.name
    }
}

/// What a row has in the field `name`. Formats with columns have a null where JSON has no field.
fn field<'a>(row: &'a Value, name: &str) -> Option<&'a Value> {
    row.get(name).filter(|value| !value.is_null())
}

/// The prompt that is no list of ids, and the field that holds it: `prompt`, or `query` as older data has it.
pub(crate) fn prompt_field(row: &Value) -> Option<(&'static str, &Value)> {
    ["prompt", "query"].into_iter().find_map(|name| Some((name, field(row, name)?)))
}

/// Whether a row is a preference pair, and holds no text of another form.
fn is_pair(row: &Value) -> bool {
    let there = |name: &&str| field(row, name).is_some();
    let others = ["completion", "completion_ids", "response", "text", "messages", "input_ids"];
    ["chosen", "rejected"].iter().all(there) && !others.iter().any(there)
}

/// The field of an answer that is no list of ids: `completion`, or `response` as the sample files of a run have it.
fn completion_name(row: &Value) -> &'static str {
    let there = |name: &&str| field(row, name).is_some();
    let others = ["completion", "text", "messages", "input_ids"];
    if there(&"response") && !others.iter().any(there) { "response" } else { "completion" }
}

/// Puts eos at the end of `ids`, if the tokenizer has one, and it is not there.
fn end_with_eos(ids: &mut Vec<i64>, tokenizer: &Tokenizer) {
    if let Some(eos) = tokenizer.eos().filter(|_| !ids.last().is_some_and(|id| tokenizer.eos_ids().contains(id))) {
        ids.push(eos);
    }
}

/// Whether the row is one of a run's sample files, which have responses without the eos that ended them.
fn lost_its_eos(row: &Value) -> bool {
    completion_name(row) == "response"
        && field(row, "completion_ids").is_none()
        && row["response"].is_string()
        && row["finish_reason"] == "stop"
}

/// The prompt of a row with its answer, as [`Dataset::answers`] takes them.
fn answer_of(row: &Value, tokenizer: &Tokenizer) -> Result<Answer> {
    let (mut tokens, border) = completed(row, tokenizer, i64::MAX, false)?;
    let ids = field(row, "completion_ids").is_some();
    if !ids && row[completion_name(row)].is_array() {
        tokens = up_to_eos(tokens, tokenizer)?;
    }
    let mut prompt = prompt_of(row, tokenizer, i64::MAX)?;
    let mut response_ids = tokens.split_off(border.min(tokens.len()));
    if lost_its_eos(row) {
        end_with_eos(&mut response_ids, tokenizer);
    }
    prompt.tokens = tokens;
    let response = tokenizer.decode_after(&prompt.tokens, &response_ids)?;
    let ended = response_ids.last().is_some_and(|id| tokenizer.eos_ids().contains(id));
    let finish = match field(row, "finish_reason").and_then(Value::as_str) {
        Some("length") => FinishReason::Length,
        None if ids && !ended => FinishReason::Length,
        _ => FinishReason::Stop,
    };
    Ok(Answer { prompt, response, response_ids, finish })
}

/// The whole text of a row, as [`Dataset::texts`] takes it.
fn text_of(row: &Value, tokenizer: &Tokenizer, vocab: i64) -> Result<Vec<i64>> {
    let name = completion_name(row);
    if field(row, name).is_some() || field(row, "completion_ids").is_some() {
        let (mut tokens, _) = completed(row, tokenizer, vocab, true)?;
        if lost_its_eos(row) {
            end_with_eos(&mut tokens, tokenizer);
        }
        let chat = field(row, "completion_ids").is_none() && row[name].is_array();
        return if chat { up_to_eos(tokens, tokenizer) } else { Ok(tokens) };
    }
    if field(row, "messages").is_some() {
        return up_to_eos(encode_chat(row, tokenizer, &["messages"], false)?.1, tokenizer);
    }
    if let Some(ids) = token_ids(row, "input_ids", vocab)? {
        return Ok(ids);
    }
    let text = field(row, "text").and_then(Value::as_str);
    let forms = "a string (or `messages`, or `prompt` and `completion`, or `chosen` and `rejected`, or token ids: `input_ids`, or \
                 `prompt_ids` and `completion_ids`)";
    tokenizer.encode(text.ok_or_else(|| Error::Run(expected("text", forms, row)))?)
}

fn check_text(tokens: Vec<i64>, most: usize) -> Result<Vec<i64>> {
    if tokens.is_empty() {
        return Err(Error::Run("the text is empty: expected at least one token".into()));
    }
    check_length(tokens.len(), most)?;
    Ok(tokens)
}

/// The answer that a demonstration shows, and the field that holds it: of a preference pair the better one.
fn answer_field(row: &Value) -> Option<(&'static str, &Value)> {
    let other = field(row, "messages").is_some();
    let completion = field(row, "completion").map(|answer| ("completion", answer));
    completion.or_else(|| Some(("chosen", field(row, "chosen").filter(|_| !other)?)))
}

/// The preference pair of a row, as [`Dataset::pairs`] takes it.
fn pair_of(row: &Value, tokenizer: &Tokenizer, end: bool) -> Result<Pair> {
    let has_prompt = field(row, "prompt").is_some();
    let side = |name| -> Result<Vec<i64>> {
        if let Some(Value::Array(_)) = field(row, name) {
            let fields = if has_prompt { &["prompt", name][..] } else { &[name] };
            up_to_eos(encode_chat(row, tokenizer, fields, false)?.1, tokenizer)
        } else {
            let prompt = if has_prompt { text_field(row, "prompt")? } else { "" };
            let text = text_field(row, name)?;
            let encoded =
                if end { tokenizer.encode_pair(prompt, text) } else { tokenizer.encode_open_pair(prompt, text) };
            Ok(encoded?.0)
        }
    };
    let number = |margin: &Value| margin.as_f64().ok_or_else(|| Error::Run(expected("margin", "a number", row)));
    let margin = field(row, "margin").map(number).transpose()?;
    Ok(Pair { chosen: side("chosen")?, rejected: side("rejected")?, margin })
}

fn prompt_of(row: &Value, tokenizer: &Tokenizer, vocab: i64) -> Result<Prompt> {
    let ids = match (token_ids(row, "prompt_ids", vocab)?, field(row, "prompt")) {
        // Beside a `prompt` they may be anything's; a `query` is the text of them.
        (None, None) => token_ids(row, "input_ids", vocab)?,
        (ids, _) => ids,
    };
    let (tokens, text) = match (ids, prompt_field(row)) {
        (Some(tokens), Some((_, Value::String(text)))) => (tokens, text.clone()),
        (Some(tokens), _) => {
            let text = tokenizer.decode(&tokens)?;
            (tokens, text)
        }
        (None, Some((name, Value::Array(_)))) => {
            let (text, tokens) = encode_chat(row, tokenizer, &[name], true)?;
            (tokens, text)
        }
        (None, Some((_, Value::String(text)))) => (tokenizer.encode_prompt(text)?, text.clone()),
        (None, Some((name, _))) => return Err(Error::Run(expected(name, "a string or a list of messages", row))),
        (None, None) => {
            let forms = "a string or a list of messages (or token ids: `prompt_ids` or `input_ids`)";
            return Err(Error::Run(expected("prompt", forms, row)));
        }
    };
    Ok(Prompt { tokens, text, row: row.clone() })
}

/// The token ids in the field `name`, if the row has it.
fn token_ids(row: &Value, name: &str, vocab: i64) -> Result<Option<Vec<i64>>> {
    let Some(ids) = field(row, name) else { return Ok(None) };
    let ids: Option<Vec<i64>> = ids.as_array().and_then(|ids| ids.iter().map(Value::as_i64).collect());
    let ids = ids.ok_or_else(|| Error::Run(expected(name, "a list of token ids", row)))?;
    // No tokenizer has ids beyond u32, so these are none whatever the vocabulary.
    let vocab = vocab.min(1 << 32);
    match ids.iter().find(|id| !(0..vocab).contains(*id)) {
        Some(id) => {
            Err(Error::Run(format!("field `{name}`: expected ids below the vocabulary of {vocab}, found {id}")))
        }
        None => Ok(Some(ids)),
    }
}

/// Tokens of a prompt with its completion, and how many are the prompt's. Token ids go before text: they are exact. An eos
/// that the tokenizer puts behind every text stays if `closed`.
fn completed(row: &Value, tokenizer: &Tokenizer, vocab: i64, closed: bool) -> Result<(Vec<i64>, usize)> {
    let prompt = token_ids(row, "prompt_ids", vocab)?;
    let Some(completion) = token_ids(row, "completion_ids", vocab)? else {
        // A list of ids and a text would have to be joined in the middle of what may be one token.
        if prompt.is_some() {
            return Err(Error::Run(expected("completion_ids", "a list of token ids, as `prompt_ids` is", row)));
        }
        let name = completion_name(row);
        if let Some(Value::Array(_)) = field(row, name) {
            return completed_chat(row, tokenizer, name);
        }
        let (prompt, completion) = (text_field(row, "prompt")?, text_field(row, name)?);
        let encode = if closed { Tokenizer::encode_open_pair } else { Tokenizer::encode_unclosed_pair };
        return encode(tokenizer, prompt, completion);
    };
    let mut tokens = match (prompt, field(row, "prompt")) {
        (Some(prompt), _) => prompt,
        (None, Some(Value::Array(_))) => encode_chat(row, tokenizer, &["prompt"], true)?.1,
        (None, _) => tokenizer.encode_prompt(text_field(row, "prompt")?)?,
    };
    let border = tokens.len();
    tokens.extend(completion);
    Ok((tokens, border))
}

/// Tokens of the messages `prompt` and those in the field `answer`, and how many of them those of the prompt are.
fn completed_chat(row: &Value, tokenizer: &Tokenizer, answer: &str) -> Result<(Vec<i64>, usize)> {
    let alone = encode_chat(row, tokenizer, &["prompt"], true)?.1;
    let whole = encode_chat(row, tokenizer, &["prompt", answer], false)?.1;
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
    field(row, name).and_then(Value::as_str).ok_or_else(|| Error::Run(expected(name, "a string", row)))
}

/// "expected X in the field, found ..." for a row that lacks it.
fn expected(name: &str, what: &str, row: &Value) -> String {
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
            let hint = meant(name, row).map(|other| {
                let by_flag = if columns::is_field(name) {
                    format!("--dataset_columns {name}={other}")
                } else {
                    format!("rename it to `{name}`")
                };
                format!("; if `{other}` is it, {by_flag}")
            });
            format!("expected a field `{name}` with {what}, found {found}{}", hint.unwrap_or_default())
        }
    }
}

/// What others call the fields that are looked for.
const SYNONYMS: [(&str, &[&str]); 5] = [
    ("prompt", &["question", "instruction", "problem", "input", "text", "context"]),
    ("completion", &["response", "answer", "output", "solution", "target"]),
    ("text", &["content", "document", "review", "sentence", "body"]),
    ("chosen", &["preferred", "accepted", "positive", "response_chosen"]),
    ("rejected", &["dispreferred", "negative", "response_rejected"]),
];

/// The field of `row` that is likely meant by `name`: one of a like name, else one that others use for it.
fn meant<'r>(name: &str, row: &'r Value) -> Option<&'r str> {
    let fields = || row.as_object().into_iter().flat_map(|row| row.keys()).map(String::as_str);
    let like = fields().find(|field| strsim::jaro_winkler(&field.to_lowercase(), name) > 0.9);
    let used = SYNONYMS.iter().find(|(of, _)| *of == name).map_or(&[][..], |(_, used)| *used);
    like.or_else(|| used.iter().find_map(|used| fields().find(|field| field.eq_ignore_ascii_case(used))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, text: &str) -> Result<Dataset> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        Dataset::read(&path, "train")
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
    fn drain(mut reader: RowReader, count: usize) -> Result<Vec<Row>> {
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
        let prompt =
            |line, text: &str| Row::new(&Path::new("pipe").into(), Place::Line(line), json!({"prompt": text})).unwrap();
        assert_eq!(rows, [prompt(1, " {\"x\"  "), prompt(3, "\ty")]);
        let error = drain(RowReader::lines("pipe", &b"x\n\xff\n"[..], false), 9).unwrap_err().to_string();
        assert_eq!(error, "pipe: line 2: expected UTF-8, found bytes of another encoding");
    }

    #[test]
    fn a_missing_field_is_named_with_what_is_there_and_what_it_may_be_called() {
        let row = json!({"question": "x", "answer": 1});
        assert_eq!(
            expected("prompt", "a string", &row),
            "expected a field `prompt` with a string, found `question`, `answer`; if `question` is it, --dataset_columns prompt=question"
        );
        assert_eq!(expected("answer", "a string", &row), "field `answer`: expected a string, found 1");
        assert_eq!(
            expected("text", "a string", &row),
            "expected a field `text` with a string, found `question`, `answer`"
        );
        assert_eq!(meant("prompt", &json!({"text": 1, "Prompts": 1})), Some("Prompts"));
    }

    /// The data settings of a run on these files.
    fn config(names: &[&Path]) -> DataConfig {
        let mut data = crate::settings::PpoConfig::new("", "", "", "").data;
        data.dataset_name = names.iter().map(|name| name.to_path_buf()).collect();
        data
    }

    /// A file of rows with the numbers of `range`.
    fn numbered(dir: &Path, name: &str, range: std::ops::Range<i64>) -> PathBuf {
        let path = dir.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, range.map(|n| format!("{{\"n\": {n}}}\n")).collect::<String>()).unwrap();
        path
    }

    fn numbers(datasets: &[Dataset]) -> Vec<i64> {
        datasets.iter().flat_map(Dataset::rows).map(|row| row["n"].as_i64().unwrap()).collect()
    }

    #[test]
    fn rows_that_are_held_out_are_never_trained_on_and_the_seed_says_which() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (numbered(dir.path(), "a.jsonl", 0..70), numbered(dir.path(), "b.jsonl", 70..100));
        let mut data = config(&[&a, &b]);
        let held = |data: &DataConfig, seed| {
            let (train, eval) = Sources::find(data, None).unwrap().read(seed, Step::Sft).unwrap();
            let (train, eval) = (numbers(&train), numbers(&[eval.unwrap()]));
            let mut all = [&train[..], &eval[..]].concat();
            all.sort_unstable();
            assert_eq!(all, Vec::from_iter(0..100), "every row once, on one side");
            assert!(train.is_sorted(), "what is left stays in order");
            eval
        };
        for (size, count) in [(0.1, 10), (0.001, 1), (1.0, 1), (25.0, 25)] {
            data.eval_split_size = Some(size);
            let eval = held(&data, 1);
            assert_eq!(eval.len(), count, "{size}");
            assert_eq!(eval, held(&data, 1));
        }
        assert_ne!(held(&data, 1), held(&data, 2));
        data.eval_split_size = Some(100.0);
        let error = Sources::find(&data, None).unwrap().read(1, Step::Sft).unwrap_err().to_string();
        assert!(error.contains("eval_split_size = 100 leaves no row of") && error.contains("a.jsonl"), "{error}");
        data.eval_split_size = None;
        assert!(Sources::find(&data, None).unwrap().read(1, Step::Sft).unwrap().1.is_none());
    }

    #[test]
    fn the_shares_of_the_three_trainings_have_no_row_in_common_and_are_the_same_whatever_else_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (numbered(dir.path(), "a.jsonl", 0..50), numbered(dir.path(), "b.jsonl", 50..60));
        let shares = |names: &[&Path], seed: u64, split_seed: u64| {
            let mut data = config(names);
            data.data_split = Some("2,4,4".parse().unwrap());
            data.data_split_seed = split_seed;
            Step::ALL.map(|step| numbers(&Sources::find(&data, None).unwrap().read(seed, step).unwrap().0))
        };
        let both = shares(&[&a, &b], 1, 42);
        assert_eq!(both.each_ref().map(Vec::len), [10 + 2, 20 + 4, 20 + 4]);
        assert!(both.iter().all(|share| share.is_sorted()), "rows stay in order");
        let mut all = both.concat();
        all.sort_unstable();
        assert_eq!(all, Vec::from_iter(0..60), "every row in one share");
        // The run's own seed, and what is read beside it, change no share; the split's seed does.
        assert_eq!(both, shares(&[&a, &b], 2, 42));
        let alone = shares(&[&a], 1, 42).map(|share| share.into_iter().collect::<std::collections::BTreeSet<_>>());
        for (alone, both) in alone.iter().zip(&both) {
            assert!(both.iter().filter(|&&n| n < 50).eq(alone), "{alone:?} {both:?}");
        }
        assert_ne!(both, shares(&[&a, &b], 1, 43));
        // Rows for evaluation come out of the share.
        let mut data = config(&[&a]);
        (data.data_split, data.eval_split_size) = (Some("2,4,4".parse().unwrap()), Some(3.0));
        let (train, eval) = Sources::find(&data, None).unwrap().read(1, Step::Sft).unwrap();
        let mut found = [numbers(&train), numbers(&[eval.unwrap()])].concat();
        found.sort_unstable();
        assert_eq!((numbers(&train).len(), found), (7, Vec::from_iter(alone[0].clone())));
        data.data_split = Some("0,1,1".parse().unwrap());
        let error = Sources::find(&data, None).unwrap().read(1, Step::Sft).unwrap_err().to_string();
        assert!(
            error.starts_with("data_split = 0,1,1 leaves none of 50 rows of ") && error.ends_with("for sft"),
            "{error}"
        );
    }

    #[test]
    fn the_test_split_is_evaluated_on_where_there_is_one() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("folder");
        numbered(&folder, "train-00001-of-00002.jsonl", 3..5);
        numbered(&folder, "train-00000-of-00002.jsonl", 0..3);
        numbered(&folder, "test.jsonl", 5..7);
        let file = numbered(dir.path(), "file.jsonl", 10..12);
        let mut data = config(&[&folder, &file]);
        let (train, eval) = Sources::find(&data, None).unwrap().read(1, Step::Sft).unwrap();
        assert_eq!(train.iter().map(|d| d.rows.len()).collect::<Vec<_>>(), [5, 2]);
        assert_eq!((numbers(&train), numbers(&[eval.unwrap()])), (vec![0, 1, 2, 3, 4, 10, 11], vec![5, 6]));
        let (_, eval) = Sources::find(&data, Some(&file)).unwrap().read(1, Step::Sft).unwrap();
        assert_eq!(numbers(&[eval.unwrap()]), [10, 11]);
        data.eval_split_size = Some(0.5);
        let error = Sources::find(&data, None).unwrap_err().to_string();
        assert!(error.contains("eval_split_size = 0.5") && error.contains("has a split `test`"), "{error}");
        data.eval_split_size = None;
        // What is learnt from is not evaluated on.
        data.dataset_name.truncate(1);
        data.dataset_train_split = "test".into();
        let sources = Sources::find(&data, None).unwrap();
        assert!(!sources.hold_rows_out() && sources.read(1, Step::Sft).unwrap().1.is_none());
        data = config(&[&folder, &file]);
        data.dataset_test_split = "validation".into();
        let error = Sources::find(&data, None).unwrap_err().to_string();
        assert!(error.ends_with("folder: expected a split `validation`, found `test`, `train`"), "{error}");
    }

    #[test]
    fn columns_are_renamed_in_rows_to_train_on_rows_to_evaluate_on_and_rows_that_come_in_parts() {
        let dir = tempfile::tempdir().unwrap();
        let file = numbered(dir.path(), "file.jsonl", 0..4);
        let mut data = config(&[&file]);
        (data.dataset_columns, data.eval_split_size) = (vec!["prompt=n".into()], Some(1.0));
        let prompts = |dataset: &Dataset| dataset.rows().all(|row| row["prompt"] == row["n"]);
        for own in [None, Some(file.as_path())] {
            data.eval_split_size = own.is_none().then_some(1.0);
            let (train, eval) = Sources::find(&data, own).unwrap().read(1, Step::Ppo).unwrap();
            assert!(train.iter().chain(&eval).all(prompts));
            assert_eq!(eval.map(|eval| eval.rows.len()), Some(if own.is_none() { 1 } else { 4 }));
        }
        let columns = Columns::parse(&data.dataset_columns).unwrap();
        let rows = drain(RowReader::open(&file, "test").unwrap().with_columns(columns), 3).unwrap();
        assert_eq!(rows[3].value, json!({"n": 3, "prompt": 3}));
        data.dataset_columns = vec!["prompt=question".into()];
        let error = Sources::find(&data, None).unwrap().read(1, Step::Ppo).unwrap_err().to_string();
        assert!(error.contains("file.jsonl: line 1: expected a field `question` with what dataset_columns"), "{error}");
    }

    #[test]
    fn a_row_of_several_files_is_named_by_its_own() {
        let dir = tempfile::tempdir().unwrap();
        numbered(dir.path(), "train-00000-of-00002.jsonl", 0..3);
        let second = numbered(dir.path(), "train-00001-of-00002.jsonl", 3..4);
        let dataset = Dataset::read(dir.path(), "train").unwrap();
        let error = dataset.error(3, "no").to_string();
        assert_eq!(error, format!("{}: line 1: no", second.display()));
        assert_eq!(dataset.path(), dir.path());
    }
}
