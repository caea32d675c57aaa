//! The record of an update: the file of its rollout, and its line of metrics.

use crate::run::event::{Rollout, RolloutRow, RolloutTurns};
use crate::run::output_dir::{CONFIG, METRICS, ROLLOUTS, rollout_update};
use parquet::record::Field;
use ring::digest::{Context, SHA256};
use rlhf_base::files;
use rlhf_base::{Error, Result};
use rlhf_lm::generate::FinishReason;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _, Seek};
use std::path::Path;

/// Key of the record in the metadata of a file.
pub(crate) const RECORD: &str = "rlhf";

/// Key of the digest of the columns and of the record: `LENGTH SHA256`, of the first `LENGTH` bytes of the file.
const DIGEST: &str = "rlhf.sha256";

/// Returns the digest of a file that starts with `columns`, as an entry of its metadata.
pub(crate) fn digest_entry(columns: &[u8], record: &str) -> (String, String) {
    let mut sum = Context::new(&SHA256);
    sum.update(record.as_bytes());
    sum.update(columns);
    (DIGEST.into(), format!("{} {}", columns.len(), hex(sum)))
}

/// Returns whether the digest `expected` is that of `file` and its `record`.
fn has_digest(mut file: &File, record: &str, expected: &str) -> io::Result<bool> {
    let Some((len, expected)) = expected.split_once(' ') else { return Ok(false) };
    let Ok(len) = len.parse::<u64>() else { return Ok(false) };
    let mut sum = Context::new(&SHA256);
    sum.update(record.as_bytes());
    file.rewind()?;
    let mut columns = file.take(len);
    let mut buffer = vec![0; 1 << 18];
    loop {
        match columns.read(&mut buffer)? {
            0 => return Ok(columns.limit() == 0 && hex(sum) == expected),
            count => sum.update(&buffer[..count]),
        }
    }
}

fn hex(sum: Context) -> String {
    sum.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the name of the file of update `step`, counted from 1.
pub(crate) fn file_name(step: usize) -> String {
    format!("update-{step:06}.parquet")
}

/// Returns true if the run in `dir` is a PPO run, which has settings of rollouts.
///
/// # Errors
/// If they cannot be read.
pub(crate) fn is_of_ppo(dir: &Path) -> Result<bool> {
    let settings = files::read_settings(&dir.join(CONFIG))?;
    Ok(settings.lines().any(|line| line.starts_with("log_rollouts:")))
}

/// Returns the updates of the run in `dir` that have a rollout file, in ascending order.
///
/// # Errors
/// If the folder cannot be read.
pub(crate) fn recorded_updates(dir: &Path) -> Result<Vec<usize>> {
    let dir = dir.join(ROLLOUTS);
    if !dir.is_dir() {
        return Ok(Vec::new());
    }
    let mut updates = Vec::new();
    for entry in std::fs::read_dir(&dir).map_err(Error::io("read the folder", &dir))? {
        let name = entry.map_err(Error::io("read the folder", &dir))?.file_name();
        // A kill may leave a file with another suffix.
        let update = rollout_update(&name.to_string_lossy()).filter(|update| *name == *file_name(*update));
        updates.extend(update);
    }
    updates.sort_unstable();
    Ok(updates)
}

/// Returns the last line of metrics of update `step` of the run in `dir`; `None` if there is none, or no `metrics.jsonl`.
///
/// # Errors
/// If `metrics.jsonl` cannot be read.
pub(crate) fn metrics_line(dir: &Path, step: usize) -> Result<Option<Map<String, Value>>> {
    let path = dir.join(METRICS);
    if !path.exists() {
        return Ok(None);
    }
    let mut last = None;
    for line in BufReader::new(files::open(&path)?).lines() {
        let line = line.map_err(Error::io("read", &path))?;
        // A run in progress may have written half of its last line.
        let Ok(line) = serde_json::from_str::<Map<String, Value>>(&line) else { continue };
        if line.get("step").and_then(Value::as_u64) == Some(step as u64) {
            last = Some(line);
        }
    }
    Ok(last)
}

/// Reads the rollout of update `step` from the file `path`.
///
/// # Errors
/// If the file cannot be read, is damaged, was changed since the run wrote it, or has no record.
pub(crate) fn read_rollout(path: &Path, step: usize) -> Result<Rollout> {
    let file = files::open(path)?;
    let contents = file.try_clone().map_err(Error::io("read", path))?;
    let invalid = |message: String| Error::invalid(path, message);
    let mut rows = Vec::new();
    let pairs = files::parquet_rows(file, |columns| rows.push(columns.into_iter().collect::<HashMap<String, Field>>()))
        .map_err(invalid)?;
    let value = |key: &str| pairs.iter().filter(|pair| pair.key == key).find_map(|pair| pair.value.clone());
    let (Some(record), Some(digest)) = (value(RECORD), value(DIGEST)) else {
        return Err(invalid("expected the settings of its update and a SHA-256 in the metadata, found none".into()));
    };
    if !has_digest(&contents, &record, &digest).map_err(Error::io("read", path))? {
        return Err(invalid("not what the run has written: its SHA-256 differs from that in its metadata".into()));
    }
    let record = serde_json::from_str(&record)
        .map_err(|e| invalid(format!("expected the settings of its update in the metadata: {e}")))?;
    let row = |(place, fields): (usize, &HashMap<String, Field>)| {
        let rollout_row = Row { fields }.read(step);
        rollout_row.map_err(|name| {
            invalid(format!("row {}: column `{name}`: expected that of a rollout of update {step}", place + 1))
        })
    };
    let rows: Vec<RolloutRow> = rows.iter().enumerate().map(row).collect::<Result<_>>()?;
    if rows.is_empty() {
        return Err(invalid("expected the responses of an update, found no row".into()));
    }
    Ok(Rollout { rows, record })
}

/// A row of the file, by the names of its columns.
struct Row<'a> {
    fields: &'a HashMap<String, Field>,
}

/// A value, or the name of the column that lacks it.
type Read<T> = Result<T, &'static str>;

impl Row<'_> {
    fn read(&self, step: usize) -> Read<RolloutRow> {
        if self.number("step")? != step {
            return Err("step");
        }
        let token_ids = self.numbers("token_ids")?.ok_or("token_ids")?;
        let floats = |name| self.floats(name, token_ids.len());
        Ok(RolloutRow {
            group: self.number("group")?,
            prompt_row: self.number("prompt_row")?,
            prompt: self.text("prompt")?,
            response: self.text("response")?,
            finish_reason: match self.text("finish_reason")?.as_str() {
                "stop" => FinishReason::Stop,
                "length" => FinishReason::Length,
                _ => return Err("finish_reason"),
            },
            score: self.score("score")?,
            components: self.components()?,
            logprobs: floats("logprobs")?.ok_or("logprobs")?,
            ref_logprobs: floats("ref_logprobs")?,
            values: None,
            advantages: floats("advantages")?.ok_or("advantages")?,
            reward: self.score("reward")?.ok_or("reward")?,
            raw_score: self.score("raw_score")?.ok_or("raw_score")?,
            token_scores: self.doubles("token_scores", token_ids.len())?,
            baseline: self.score("baseline")?,
            kept_ids: self.kept_ids(token_ids.len())?,
            turns: self.turns(token_ids.len())?,
            token_ids,
        })
    }

    /// The turns of a response of `len` tokens; `None` without their columns.
    fn turns(&self, len: usize) -> Read<Option<RolloutTurns>> {
        let Some(prompt_ids) = self.numbers("prompt_ids")? else { return Ok(None) };
        let bounds = self.numbers("inserted")?.ok_or("inserted")?;
        let is_ordered = bounds.len().is_multiple_of(2)
            && bounds.is_sorted()
            && bounds.iter().all(|&at| at >= 0 && at <= len as i64);
        if !is_ordered {
            return Err("inserted");
        }
        let messages = serde_json::from_str(&self.text("messages")?).map_err(|_| "messages")?;
        let inserted = bounds.chunks(2).map(|span| span[0] as usize..span[1] as usize).collect();
        let (calls, failures) = (self.number("tool_calls")?, self.number("tool_failures")?);
        let reward = self.score("env_reward")?;
        Ok(Some(RolloutTurns { prompt_ids, inserted, messages, calls, failures, reward }))
    }

    fn number(&self, name: &'static str) -> Read<usize> {
        match self.fields.get(name) {
            Some(Field::Long(number)) => usize::try_from(*number).map_err(|_| name),
            _ => Err(name),
        }
    }

    fn text(&self, name: &'static str) -> Read<String> {
        match self.fields.get(name) {
            Some(Field::Str(text)) => Ok(text.clone()),
            _ => Err(name),
        }
    }

    /// A number, which may be missing, or its whole column.
    fn score(&self, name: &'static str) -> Read<Option<f64>> {
        match self.fields.get(name) {
            None | Some(Field::Null) => Ok(None),
            Some(Field::Double(score)) => Ok(Some(*score)),
            Some(_) => Err(name),
        }
    }

    fn components(&self) -> Read<Vec<(String, Option<f64>)>> {
        let name = "components";
        let Some(field) = self.fields.get(name) else { return Ok(Vec::new()) };
        let Field::Group(group) = field else { return Err(name) };
        let score = |(reward, score): (&String, &Field)| match score {
            Field::Null => Ok((reward.clone(), None)),
            Field::Double(score) => Ok((reward.clone(), Some(*score))),
            _ => Err(name),
        };
        group.get_column_iter().map(score).collect()
    }

    /// The elements of a list, each converted by `convert`; `None` without the column.
    fn list<T>(&self, name: &'static str, convert: impl Fn(&Field) -> Option<T>) -> Read<Option<Vec<T>>> {
        match self.fields.get(name) {
            None => Ok(None),
            Some(Field::ListInternal(list)) => {
                list.elements().iter().map(convert).collect::<Option<_>>().map(Some).ok_or(name)
            }
            Some(_) => Err(name),
        }
    }

    fn numbers(&self, name: &'static str) -> Read<Option<Vec<i64>>> {
        self.list(name, |field| if let Field::Long(number) = field { Some(*number) } else { None })
    }

    fn floats(&self, name: &'static str, len: usize) -> Read<Option<Vec<f32>>> {
        let numbers = self.list(name, |field| if let Field::Float(number) = field { Some(*number) } else { None })?;
        if numbers.as_ref().is_some_and(|numbers| numbers.len() != len) { Err(name) } else { Ok(numbers) }
    }

    fn doubles(&self, name: &'static str, len: usize) -> Read<Option<Vec<f64>>> {
        let numbers = self.list(name, |field| if let Field::Double(number) = field { Some(*number) } else { None })?;
        if numbers.as_ref().is_some_and(|numbers| numbers.len() != len) { Err(name) } else { Ok(numbers) }
    }

    /// The sets of tokens that `len` tokens were sampled from.
    fn kept_ids(&self, len: usize) -> Read<Option<Vec<Vec<i64>>>> {
        let (Some(counts), Some(ids)) = (self.numbers("kept_counts")?, self.numbers("kept_ids")?) else {
            return Ok(None);
        };
        let mut rest = ids.as_slice();
        let mut sets = Vec::with_capacity(counts.len());
        for count in counts {
            let count = usize::try_from(count).ok().filter(|&count| count <= rest.len()).ok_or("kept_counts")?;
            let (set, others) = rest.split_at(count);
            sets.push(set.to_vec());
            rest = others;
        }
        if sets.len() == len && rest.is_empty() { Ok(Some(sets)) } else { Err("kept_ids") }
    }
}
