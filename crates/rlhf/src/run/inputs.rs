//! Digests of a run's inputs, by which a resumed run detects that its data or models have changed.
//!
//! Only the digests are compared: a folder or a file that was moved is the same input.
//!
//! Rows are hashed completely. In a model folder, every file that is loaded is hashed: small files completely; for larger ones
//! the size, the header, and the first, middle and last bytes of every tensor, so that large weights are not read twice.

use crate::data::Dataset;
use ring::digest::{Context, SHA256};
use rlhf_base::weights::{INDEX, is_weights, read_header};
use rlhf_base::{Error, Result};
use rlhf_lm::model::AdapterFolder;
use rlhf_lm::tokenizer::{FURTHER_TEMPLATES as TEMPLATES, fixed_date};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Size in bytes up to which a file is hashed completely.
const SMALL: u64 = 16 << 20;
/// Size in bytes of a hashed block of a larger file.
const BLOCK: u64 = 4096;
/// Number of hashed blocks of a larger file that is not a safetensors file.
const BLOCKS: u64 = 256;
/// Hexadecimal digits of a digest.
const DIGITS: usize = 32;

/// Name of the files of tools and environments among the inputs.
pub(crate) const ENVIRONMENTS: &str = "tools and environments";

/// Name of the date of chat templates among the inputs.
const DATE: &str = "date of chat templates";

/// The inputs of a run by the name of their setting, each with its path and digests; and the date of chat templates, which is stored but
/// not compared.
#[derive(Debug, Clone, Default)]
pub(crate) struct Inputs(Map<String, Value>);

impl Inputs {
    /// Adds the rows of `datasets`, if there are any.
    pub(crate) fn rows<'a>(&mut self, name: &str, path: &str, datasets: impl IntoIterator<Item = &'a Dataset>) {
        let values: Vec<&Value> = datasets.into_iter().flat_map(Dataset::rows).collect();
        if !values.is_empty() {
            self.values(name, path, &values);
        }
    }

    /// Adds values, hashed in their JSON form.
    pub(crate) fn values<T: Serialize>(&mut self, name: &str, path: &str, values: &[T]) {
        let input = json!({"path": path, "rows": values.len(), "digest": digest_values(values)});
        self.0.insert(name.into(), input);
    }

    /// Adds the date of the tokenizers that are loaded now, if they have one.
    pub(crate) fn date(&mut self) {
        self.0.extend(fixed_date().map(|date| (DATE.into(), json!({"date": date}))));
    }

    /// Adds the token ids of the rows of the input `rows_name`, and the date in them. They also depend on how the tokenizer and the chat
    /// template are read, which no file tells.
    pub(crate) fn tokens<T: Serialize>(&mut self, rows_name: &str, path: &str, rows: &[T]) {
        self.date();
        let input = json!({"path": path, "rows": rows.len(), "digest": digest_values(rows), "of": rows_name});
        self.0.insert(format!("{rows_name} as token ids"), input);
    }

    /// Adds the contents of the files that decide the scores of the reward `name`, by the files' names.
    pub(crate) fn reward(&mut self, name: &str, contents: &[(String, Vec<u8>)]) {
        self.programs(&reward_input(name), contents);
    }

    /// Adds the files of the user's programs, by their names.
    pub(crate) fn programs(&mut self, name: &str, contents: &[(String, Vec<u8>)]) {
        if contents.is_empty() {
            return;
        }
        let digest = |bytes: &[u8]| {
            let mut sum = Sum(Context::new(&SHA256));
            sum.0.update(bytes);
            sum.finish()
        };
        let files: Map<String, Value> =
            contents.iter().map(|(file, bytes)| (file.clone(), digest(bytes).into())).collect();
        let path = contents.iter().map(|(file, _)| file.as_str()).collect::<Vec<_>>().join(", ");
        self.0.insert(name.into(), json!({"path": path, "files": files}));
    }

    /// Adds the files of the model folder `dir` that are loaded, and those of the base model of an adapter.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(crate) fn model(&mut self, name: &str, dir: &Path) -> Result<()> {
        let mut files = Map::new();
        add_files(dir, "", &mut files)?;
        add_templates(dir, "", &mut files)?;
        if let Some(adapter) = AdapterFolder::find(dir)? {
            let base = adapter.base_dir()?;
            add_files(&base, "base/", &mut files)?;
            add_templates(&base, "base/", &mut files)?;
        }
        self.0.insert(name.into(), json!({"path": dir.to_string_lossy(), "files": files}));
        Ok(())
    }

    /// Adds one file. A pipe is ignored, as it can be read only once.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(crate) fn file(&mut self, name: &str, path: &Path) -> Result<()> {
        if !path.is_file() {
            return Ok(());
        }
        let file_name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let files = Map::from_iter([(file_name, digest(path)?.into())]);
        self.0.insert(name.into(), json!({"path": path.to_string_lossy(), "files": files}));
        Ok(())
    }

    /// Returns the inputs whose name is not `left_out`.
    pub(crate) fn without(&self, left_out: impl Fn(&str) -> bool) -> Self {
        let mut kept = self.clone();
        kept.0.retain(|name, _| !left_out(name));
        kept
    }

    /// Adds all of `others`.
    pub(crate) fn extend(&mut self, others: Self) {
        self.0.extend(others.0);
    }

    /// Replaces the input `name` by all of `others`.
    pub(crate) fn replace(&mut self, name: &str, others: Self) {
        self.0.shift_remove(name);
        self.extend(others);
    }

    /// Returns the state for a checkpoint.
    pub(crate) fn state(&self) -> Value {
        self.0.clone().into()
    }

    /// The inputs without their paths: what is left is the same on all ranks of a run.
    pub(crate) fn without_paths(&self) -> Map<String, Value> {
        let mut inputs = self.0.clone();
        inputs.values_mut().filter_map(Value::as_object_mut).for_each(|input| drop(input.shift_remove("path")));
        inputs
    }

    /// Whether the input `name` differs from the one in the [`Inputs::state`] at the start of the run; `None` if either lacks it.
    pub(crate) fn has_changed(&self, start: &Value, name: &str) -> Option<bool> {
        Some(difference(start.get(name)?, self.0.get(name)?).is_some())
    }

    /// Compares with the [`Inputs::state`] at the start of the run; returns one message per input that has changed. Inputs
    /// that only one of the two has are ignored.
    pub(crate) fn changed(&self, start: &Value) -> Vec<String> {
        let both = self.0.iter().filter_map(|(name, now)| Some((name, now, start.get(name)?)));
        both.filter_map(|(name, now, then)| {
            let change = difference(then, now)?;
            let hint = match now["of"].as_str() {
                // Changed rows have changed tokens anyway, and are reported themselves.
                Some(rows_name) if self.has_changed(start, rows_name) == Some(true) => return None,
                Some(_) if date_in(start).is_none() => {
                    ": the tokenizer or the chat template gives others now, as one does that has a date"
                }
                Some(_) => ": the tokenizer or the chat template gives others now",
                None => "",
            };
            Some(format!("{name} = {}: {change}{hint}", now["path"].as_str().unwrap_or_default()))
        })
        .collect()
    }
}

/// Returns the date of chat templates in the [`Inputs::state`] of a run, if it has one.
pub(crate) fn date_in(state: &Value) -> Option<String> {
    state.get(DATE)?["date"].as_str().map(String::from)
}

/// Returns the name of the input with the files that decide the scores of a reward.
pub(in crate::run) fn reward_input(name: &str) -> String {
    format!("reward {name}")
}

/// Returns the digest of values in their JSON form.
fn digest_values<T: Serialize>(values: &[T]) -> String {
    let mut sum = Sum(Context::new(&SHA256));
    for value in values {
        serde_json::to_writer(&mut sum, value).expect("rows serialize to JSON, and writing to a digest cannot fail");
        sum.0.update(b"\n");
    }
    sum.finish()
}

/// Describes the difference between two states of an input, if there is one.
fn difference(then: &Value, now: &Value) -> Option<String> {
    if then["rows"] != now["rows"] {
        return Some(format!("expected {} rows, found {}", then["rows"], now["rows"]));
    }
    if then["digest"] != now["digest"] {
        return Some(format!("{} rows as before, with different content", now["rows"]));
    }
    let (then, now) = (then["files"].as_object()?, now["files"].as_object()?);
    // A single file may have another name.
    if then.len() == 1 && now.len() == 1 && then.values().eq(now.values()) {
        return None;
    }
    let changed = now.iter().filter(|(name, sum)| then.get(*name).is_some_and(|then| then != *sum));
    let gone = then.keys().filter(|name| !now.contains_key(*name));
    let new = now.keys().filter(|name| !then.contains_key(*name));
    let all: Vec<String> = changed
        .map(|(name, _)| format!("{name} has changed"))
        .chain(gone.map(|name| format!("{name} is missing")))
        .chain(new.map(|name| format!("{name} is new")))
        .collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// Adds the digests of the files of the model folder `dir` that are loaded; their names get `prefix`.
fn add_files(dir: &Path, prefix: &str, files: &mut Map<String, Value>) -> Result<()> {
    let entries = std::fs::read_dir(dir).map_err(Error::io("read the folder", dir))?;
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry.map_err(Error::io("read the folder", dir))?.file_name().to_string_lossy().into_owned());
    }
    names.sort_unstable();
    let known = ["config.json", "generation_config.json", "adapter_config.json", INDEX];
    let is_read = |name: &str| known.contains(&name) || rlhf_lm::tokenizer::FILES.contains(&name) || is_weights(name);
    for name in names.iter().filter(|name| is_read(name) && dir.join(name).is_file()) {
        files.insert(format!("{prefix}{name}"), digest(&dir.join(name))?.into());
    }
    for path in rlhf_lm::tokenizer::further_templates(dir) {
        files.insert(format!("{prefix}{path}"), digest(&dir.join(&path))?.into());
    }
    Ok(())
}

/// Adds the digests of the chat templates in their folder of the model folder `dir`.
fn add_templates(dir: &Path, prefix: &str, files: &mut Map<String, Value>) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(dir.join(TEMPLATES)) else { return Ok(()) };
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    for name in names.iter().filter(|name| name.ends_with(".jinja")) {
        let path = dir.join(TEMPLATES).join(name);
        if path.is_file() {
            files.insert(format!("{prefix}{TEMPLATES}/{name}"), digest(&path)?.into());
        }
    }
    Ok(())
}

/// Returns the digest of a file.
fn digest(path: &Path) -> Result<String> {
    let file = File::open(path).map_err(Error::io("read", path))?;
    let len = file.metadata().map_err(Error::io("read", path))?.len();
    let mut sum = Sum(Context::new(&SHA256));
    sum.0.update(&len.to_le_bytes());
    let ranges = if len <= SMALL { vec![(0, len)] } else { hashed_ranges(&file, path, len) };
    let mut buffer = vec![0; 1 << 16];
    for (mut at, end) in ranges {
        while at < end {
            let part = &mut buffer[..(end - at).min(1 << 16) as usize];
            file.read_exact_at(part, at).map_err(Error::io("read", path))?;
            sum.0.update(part);
            at += part.len() as u64;
        }
    }
    Ok(sum.finish())
}

/// Returns the byte ranges of a large file to hash: for a safetensors file the header and the start, middle and end of each
/// tensor; for any other file, equidistant blocks.
fn hashed_ranges(file: &File, path: &Path, len: u64) -> Vec<(u64, u64)> {
    let block = |at: u64, end: u64| (at, (at + BLOCK).min(end));
    let Ok((metadata, data)) = read_header(file, path) else {
        return (0..BLOCKS).map(|i| block((len - BLOCK) / (BLOCKS - 1) * i, len)).chain([(len - BLOCK, len)]).collect();
    };
    let mut ranges = vec![(0, data)];
    for info in metadata.tensors().values() {
        let (begin, end) = (data + info.data_offsets.0 as u64, data + info.data_offsets.1 as u64);
        let last = end.saturating_sub(BLOCK).max(begin);
        ranges.extend([begin, begin + (last - begin) / 2, last].map(|at| block(at, end)));
    }
    ranges[1..].sort_unstable();
    ranges
}

/// A SHA-256 digest that implements `Write`.
struct Sum(Context);

impl Sum {
    fn finish(self) -> String {
        let hex = self.0.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        hex[..DIGITS].to_string()
    }
}

impl Write for Sum {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind, Tensor};

    /// Writes two tensors of 12 MiB each, together above `SMALL`, with a 1 at the index `at` of the second.
    fn write_model(dir: &Path, at: Option<i64>) {
        let rows = (12 << 20) / 4;
        let tensor = || Tensor::zeros([rows], (Kind::Float, Device::Cpu));
        let (a, b) = (tensor(), tensor());
        if let Some(at) = at {
            let _ = b.get(if at < 0 { rows + at } else { at }).fill_(1.0);
        }
        rlhf_base::weights::save(dir, &[("a".into(), a), ("b".into(), b)], usize::MAX).unwrap();
    }

    #[test]
    fn changed_weights_of_the_same_size_are_detected_in_every_tensor() {
        let dir = tempfile::tempdir().unwrap();
        write_model(dir.path(), None);
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        std::fs::write(dir.path().join("notes.json"), "{}").unwrap();
        let read = || {
            let mut inputs = Inputs::default();
            inputs.model("sft_model_path", dir.path()).unwrap();
            inputs
        };
        let start = read().state();
        write_model(dir.path(), None);
        std::fs::write(dir.path().join("notes.json"), "{\"mine\": 1}").unwrap();
        assert!(read().changed(&start).is_empty(), "files that are not loaded may change");
        let template = dir.path().join("additional_chat_templates/tool_use.jinja");
        std::fs::create_dir(template.parent().unwrap()).unwrap();
        std::fs::write(&template, "{{ messages }}").unwrap();
        let changed = read().changed(&start).concat();
        assert!(changed.ends_with(": additional_chat_templates/tool_use.jinja is new"), "{changed}");
        std::fs::remove_file(template).unwrap();
        for at in [0, -1] {
            write_model(dir.path(), Some(at));
            let changed = read().changed(&start);
            let words = format!("sft_model_path = {}: model.safetensors has changed", dir.path().display());
            assert_eq!(changed, [words]);
        }
        write_model(dir.path(), None);
        std::fs::rename(dir.path().join("config.json"), dir.path().join("merges.txt")).unwrap();
        let changed = read().changed(&start).concat();
        assert!(changed.ends_with(": config.json is missing, merges.txt is new"), "{changed}");
    }

    #[test]
    fn tokens_of_the_same_rows_that_are_others_now_are_a_change() {
        let inputs = |rows: &[&str], tokens: &[[i64; 2]]| {
            let mut inputs = Inputs::default();
            inputs.values("dataset_name", "rows.jsonl", rows);
            inputs.tokens("dataset_name", "rows.jsonl", tokens);
            inputs
        };
        let start = inputs(&["a"], &[[1, 2]]).state();
        assert!(inputs(&["a"], &[[1, 2]]).changed(&start).is_empty());
        let changed = inputs(&["a"], &[[1, 3]]).changed(&start);
        assert_eq!(changed.len(), 1);
        assert!(changed[0].starts_with("dataset_name as token ids = rows.jsonl: 1 rows as before"), "{changed:?}");
        assert!(changed[0].contains("a date"), "{changed:?}");
        assert_eq!(inputs(&["b"], &[[1, 3]]).changed(&start).len(), 1, "other rows are one change");
    }

    #[test]
    fn a_file_with_the_same_bytes_is_the_same_under_another_name() {
        let dir = tempfile::tempdir().unwrap();
        let inputs = |name: &str, text: &str| {
            let mut inputs = Inputs::default();
            std::fs::write(dir.path().join(name), text).unwrap();
            inputs.file("chat_template_path", &dir.path().join(name)).unwrap();
            inputs
        };
        let start = inputs("a.jinja", "x").state();
        assert!(inputs("b.jinja", "x").changed(&start).is_empty());
        assert_eq!(inputs("b.jinja", "y").changed(&start).len(), 1);
    }

    #[test]
    fn changed_contents_of_a_reward_are_named() {
        let inputs = |text: &str| {
            let mut inputs = Inputs::default();
            inputs.reward("words", &[("good.txt".into(), text.into())]);
            inputs
        };
        let start = inputs("good 1").state();
        assert!(inputs("good 1").changed(&start).is_empty());
        assert_eq!(inputs("good 2").changed(&start), ["reward words = good.txt: good.txt has changed"]);
    }

    #[test]
    fn changed_rows_are_detected_by_number_and_content() {
        let inputs = |rows: &[&str]| {
            let mut inputs = Inputs::default();
            inputs.values("dataset_name", "rows.jsonl", rows);
            inputs
        };
        let start = inputs(&["a", "b"]).state();
        assert!(inputs(&["a", "b"]).changed(&start).is_empty());
        for (rows, words) in [
            (&["a", "c"][..], "dataset_name = rows.jsonl: 2 rows as before, with different content"),
            (&["b", "a"], "dataset_name = rows.jsonl: 2 rows as before, with different content"),
            (&["a"], "dataset_name = rows.jsonl: expected 2 rows, found 1"),
        ] {
            assert_eq!(inputs(rows).changed(&start), [words]);
        }
        assert!(inputs(&["x"]).changed(&json!({})).is_empty(), "an unknown input is ignored");
    }
}
