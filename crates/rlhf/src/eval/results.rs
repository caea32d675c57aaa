//! The folder of an evaluation: settings, responses, one line for each judged pair or response. An evaluation that was cut
//! continues from the lines that are complete.

use super::Side;
use crate::data::Episode;
use crate::run::checkpoint::is_compared_by_content;
use crate::run::inputs::{Inputs, date_in};
use crate::run::output_dir::{FolderLock, TOOLS_LOG};
use crate::settings::{EvaluateConfig, write_resolved};
use rlhf_base::schema::{ResumeClass, Settings as _};
use rlhf_base::weights::{brief, pretty, write_text};
use rlhf_base::{Error, Result, files};
use rlhf_lm::generate::FinishReason;
use rlhf_lm::tokenizer::date_now;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The file with the settings and the digests of the inputs, from which an evaluation that was cut is recognized.
const STATE: &str = "evaluation.json";
/// The settings, for `--config`.
const CONFIG: &str = "config.yaml";
const RESPONSES: &str = "responses.jsonl";
const RESULTS: &str = "results.jsonl";
const SUMMARY: &str = "summary.json";

/// The winner of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The model that is evaluated.
    A,
    /// The model, or the column, that it is compared with.
    B,
    /// Neither.
    Tie,
}

impl Verdict {
    /// Returns the outcome for the model that is evaluated: 1 for a win, 0.5 for a tie, 0 for a loss.
    pub fn outcome(self) -> f64 {
        match self {
            Verdict::A => 1.0,
            Verdict::B => 0.0,
            Verdict::Tie => 0.5,
        }
    }
}

/// A judged pair of responses, or a scored response: one line of `results.jsonl`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResultRow {
    /// Index of the prompt in the dataset, from 0.
    pub index: usize,
    /// Index of the response among those to its prompt, from 0.
    pub sample: usize,
    /// The prompt.
    pub prompt: String,
    /// The response of the model that is evaluated.
    pub response_a: String,
    /// The response that it is compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_b: Option<String>,
    /// Length of `response_a` in characters.
    pub length_a: usize,
    /// Length of `response_b` in characters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length_b: Option<usize>,
    /// Score of `response_a`, if rewards are the judge.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub score_a: Option<f64>,
    /// Score of `response_b`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub score_b: Option<f64>,
    /// Verdicts of a judge of pairs, with `response_a` first and with `response_b` first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdicts: Option<[Option<Verdict>; 2]>,
    /// The winner; none without a verdict, or without a comparison.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub winner: Option<Verdict>,
    /// Whether the verdicts of the two orders differ, which is a tie.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub inconsistent: bool,
    /// Number of times that the judge was called for it, earlier runs of the evaluation included.
    pub attempts: usize,
    /// The reason that there is no verdict.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_verdict: Option<String>,
    /// Whether the judge failed, in place of a reply that is no verdict.
    #[serde(skip)]
    pub(super) failed: bool,
}

impl ResultRow {
    /// Whether the judge was called: not for equal responses, which are a tie.
    pub(super) fn was_judged(&self) -> bool {
        self.verdicts.is_some() || self.score_a.is_some() || self.no_verdict.is_some()
    }

    /// Whether there is a verdict or, without a comparison, a score.
    pub(super) fn is_decided(&self) -> bool {
        if self.response_b.is_some() { self.winner.is_some() } else { self.score_a.is_some() }
    }
}

/// A response to be judged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct ResponseRecord {
    /// Without special tokens.
    pub(super) text: String,
    /// Token ids of the model's own tokenizer, the stop token included.
    pub(super) ids: Vec<i64>,
    pub(super) finish: FinishReason,
    /// Its turns, with an environment; `text` is then that of the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) episode: Option<Episode>,
}

/// The responses of a model to a prompt: one line of `responses.jsonl`.
#[derive(Serialize, Deserialize)]
struct Responses {
    index: usize,
    model: Side,
    /// Digest of the row of the dataset.
    row: String,
    responses: Vec<ResponseRecord>,
}

/// The folder of an evaluation, and what is in it.
pub(super) struct Store {
    dir: PathBuf,
    responses: File,
    results: File,
    /// Responses of each model to each prompt.
    stored: BTreeMap<(Side, usize), Vec<ResponseRecord>>,
    /// Rows of the prompts that have been judged, with or without a verdict.
    rows: BTreeMap<usize, Vec<ResultRow>>,
    /// Differences between the judge and that of earlier verdicts.
    judge_changes: Vec<String>,
    _lock: FolderLock,
}

impl Store {
    /// Opens the folder of an evaluation, or creates it. `sampled` is the sampling of each model, which is recorded; `dataset` has the
    /// digests of the dataset's rows.
    ///
    /// # Errors
    /// If the folder holds anything else, or an evaluation with other settings, models or rows and `overwrite_output_dir` is not set;
    /// if another process uses it; if it cannot be read or written.
    pub(super) fn open(
        config: &EvaluateConfig,
        inputs: &Inputs,
        sampled: &impl Serialize,
        dataset: &[String],
    ) -> Result<Self> {
        let dir = config.output_dir.as_path();
        let lock = FolderLock::acquire(dir)?;
        let state = read_state(dir)?;
        let samples = config.sampling.num_return_sequences;
        let mut earlier = Earlier::default();
        match &state {
            Some(_) if config.overwrite_output_dir => {
                for name in [RESPONSES, RESULTS, SUMMARY, TOOLS_LOG] {
                    remove(&dir.join(name))?;
                }
            }
            Some(state) => {
                // Before the files are read: lines with another number of samples would be removed.
                check_state(config, &inputs.without(decides_verdicts), state)?;
                earlier = Earlier::read(dir, samples)?;
                check_rows(dir, &earlier.responses, dataset)?;
            }
            None => check_empty(dir)?,
        }
        let Earlier { responses, rows } = earlier;
        // The judge may change, for example after it was repaired. Its earlier verdicts are then those of another judge.
        let judge_changes = match &state {
            Some(state) if has_verdicts(&rows) => {
                inputs.without(|name| !decides_verdicts(name)).changed(&state["inputs"])
            }
            _ => Vec::new(),
        };
        let (lock, _) = lock.create(dir, true)?;
        if state.is_none() || !has_verdicts(&rows) {
            let state = json!({
                "rlhf": env!("CARGO_PKG_VERSION"),
                "settings": config,
                "sampling": sampled,
                "inputs": inputs.state(),
            });
            write_text(&dir.join(STATE), &pretty(&state))?;
        }
        let stored = responses.into_iter().map(|line| ((line.model, line.index), line.responses)).collect();
        let open = |name: &str| {
            let path = dir.join(name);
            OpenOptions::new().create(true).append(true).open(&path).map_err(Error::io("create", &path))
        };
        Ok(Self {
            dir: dir.into(),
            responses: open(RESPONSES)?,
            results: open(RESULTS)?,
            stored,
            rows,
            judge_changes,
            _lock: lock,
        })
    }

    /// Removes the rows of these prompts, which are judged again when the evaluation continues.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn forget(&mut self, indices: &[usize]) -> Result<()> {
        self.rows.retain(|index, _| !indices.contains(index));
        let path = self.dir.join(RESULTS);
        let lines: Vec<String> = self.rows.values().flatten().map(json_line).collect();
        write_text(&path, &lines.concat())?;
        self.results = OpenOptions::new().append(true).open(&path).map_err(Error::io("open", &path))?;
        Ok(())
    }

    /// Returns the indices below `count` of the prompts without responses of this model.
    pub(super) fn without_response(&self, side: Side, count: usize) -> Vec<usize> {
        (0..count).filter(|&index| !self.stored.contains_key(&(side, index))).collect()
    }

    /// Returns the indices below `count` of the prompts to judge: first those that were never judged, then those with a row without a
    /// verdict. With `most`, the result is limited so that it and all earlier attempts together are at most `most`.
    pub(super) fn to_judge(&self, count: usize, most: Option<usize>) -> Vec<usize> {
        let missing = (0..count).filter(|index| !self.rows.contains_key(index));
        let is_undecided = |(index, rows): (&usize, &Vec<ResultRow>)| {
            (*index < count && !rows.iter().all(ResultRow::is_decided)).then_some(*index)
        };
        let made: usize = self.rows.values().map(|rows| attempts(rows)).sum();
        let left = most.map_or(usize::MAX, |most| most.saturating_sub(made));
        missing.chain(self.rows.iter().filter_map(is_undecided)).take(left).collect()
    }

    /// Returns the differences between the judge and that of earlier verdicts, one message for each of its inputs.
    pub(super) fn judge_changes(&self) -> &[String] {
        &self.judge_changes
    }

    /// Returns the responses of a model to a prompt; none before [`Store::add_responses`].
    pub(super) fn responses(&self, side: Side, index: usize) -> &[ResponseRecord] {
        self.stored.get(&(side, index)).map_or(&[], Vec::as_slice)
    }

    /// Stores the responses of a model to a prompt, whose row has the digest `row`.
    ///
    /// # Errors
    /// If they cannot be written.
    pub(super) fn add_responses(
        &mut self,
        side: Side,
        index: usize,
        row: &str,
        responses: Vec<ResponseRecord>,
    ) -> Result<()> {
        let line = Responses { index, model: side, row: row.to_string(), responses };
        append(&mut self.responses, &self.dir.join(RESPONSES), &[&line])?;
        self.stored.insert((side, index), line.responses);
        Ok(())
    }

    /// Stores the rows of a prompt.
    ///
    /// # Errors
    /// If they cannot be written.
    pub(super) fn add_rows(&mut self, index: usize, mut rows: Vec<ResultRow>) -> Result<()> {
        let made = self.rows.get(&index).map_or(0, |rows| attempts(rows));
        rows.iter_mut().for_each(|row| row.attempts = made + 1);
        append(&mut self.results, &self.dir.join(RESULTS), &rows)?;
        self.rows.insert(index, rows);
        Ok(())
    }

    /// Writes the settings as a configuration file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn write_settings(&self, config: &EvaluateConfig) -> Result<()> {
        write_resolved(config, self.dir.join(CONFIG))
    }

    /// Returns whether a row of the folder has a verdict of the judge.
    pub(super) fn has_verdicts(&self) -> bool {
        has_verdicts(&self.rows)
    }

    /// Returns the rows of the first `count` prompts, in the order of the dataset.
    pub(super) fn rows(&self, count: usize) -> Vec<&ResultRow> {
        self.rows.range(..count).flat_map(|(_, rows)| rows).collect()
    }

    /// Writes the rows in the order of the dataset, and the summary.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(super) fn finish(&self, summary: &impl Serialize) -> Result<()> {
        let lines: Vec<String> = self.rows.values().flatten().map(json_line).collect();
        write_text(&self.dir.join(RESULTS), &lines.concat())?;
        let summary = serde_json::to_value(summary).map_err(|e| Error::Run(format!("{SUMMARY}: {e}")))?;
        write_text(&self.dir.join(SUMMARY), &pretty(&summary))
    }
}

/// The responses and rows of an evaluation that was cut.
#[derive(Default)]
struct Earlier {
    responses: Vec<Responses>,
    rows: BTreeMap<usize, Vec<ResultRow>>,
}

impl Earlier {
    fn read(dir: &Path, samples: usize) -> Result<Self> {
        Ok(Self {
            responses: read_lines(&dir.join(RESPONSES), |line: &Responses| line.responses.len() == samples)?,
            rows: read_results(&dir.join(RESULTS), samples)?,
        })
    }
}

/// Returns whether a row has a verdict of the judge.
fn has_verdicts(rows: &BTreeMap<usize, Vec<ResultRow>>) -> bool {
    rows.values().flatten().any(|row| row.was_judged() && row.is_decided())
}

/// Returns whether an input decides only verdicts, and no responses.
fn decides_verdicts(name: &str) -> bool {
    name == "judge_template" || name.starts_with("reward ")
}

/// Returns the date of chat templates of the evaluation in `output_dir`, or today's if a new evaluation starts there.
///
/// # Errors
/// If the folder has a file that is no evaluation.
pub(super) fn chat_template_date(config: &EvaluateConfig) -> Result<String> {
    let state = if config.overwrite_output_dir { None } else { read_state(&config.output_dir)? };
    Ok(state.and_then(|state| date_in(&state["inputs"])).unwrap_or_else(date_now))
}

/// Returns the digest of a row of the dataset.
pub(super) fn row_digest(row: &Value) -> String {
    let mut inputs = Inputs::default();
    inputs.values("row", "", &[row]);
    inputs.state()["row"]["digest"].as_str().unwrap_or_default().to_string()
}

/// Returns the [`STATE`] in a folder, if it has one.
fn read_state(dir: &Path) -> Result<Option<Value>> {
    let path = dir.join(STATE);
    if !path.exists() {
        return Ok(None);
    }
    let state = serde_json::from_str(&files::read_text(&path)?);
    state.map(Some).map_err(|e| Error::invalid(&path, format!("not valid JSON: {e}")))
}

/// Checks that an evaluation with this state has the settings of `config`, and the same inputs.
fn check_state(config: &EvaluateConfig, inputs: &Inputs, state: &Value) -> Result<()> {
    let dir = config.output_dir.display();
    let another = "choose another output_dir, or set overwrite_output_dir = true to replace it";
    let now = serde_json::to_value(config).map_err(|e| Error::Run(format!("the settings: {e}")))?;
    let none = Map::new();
    let now = now.as_object().unwrap_or(&none);
    let then = state["settings"].as_object().unwrap_or(&none);
    let is_same = |name: &str, then: &Value, now: &Value| {
        // The rows of a dataset are compared one by one.
        let is_dataset = name == "dataset_name" && now.as_str().is_some_and(|now| Path::new(now).exists());
        then == now || is_dataset || is_compared_by_content(name, then, now, &state["inputs"])
    };
    let fields = EvaluateConfig::fields();
    let may_differ = |name: &str| fields.iter().any(|field| field.name == name && field.resume == ResumeClass::Free);
    let differs = now
        .iter()
        .find(|(name, now)| !may_differ(name) && then.get(*name).is_some_and(|then| !is_same(name, then, now)));
    if let Some((name, now)) = differs {
        let shown = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_string);
        let (now, then) = (shown(now), shown(&then[name]));
        return Err(Error::refused(
            name,
            format!(
                " = {}: expected {}, as in {dir}: an evaluation continues with the same settings; {another}",
                brief(&now),
                brief(&then)
            ),
        ));
    }
    match inputs.changed(&state["inputs"]).as_slice() {
        [] => Ok(()),
        changed => Err(Error::invalid(
            &config.output_dir,
            format!("inputs have changed since it was evaluated: {}; {another}", changed.join("; ")),
        )),
    }
}

/// Checks that the rows of the dataset with responses are as they were; `rows` are their digests now.
fn check_rows(dir: &Path, responses: &[Responses], rows: &[String]) -> Result<()> {
    let changed = responses.iter().filter(|line| rows.get(line.index).is_some_and(|now| *now != line.row));
    let Some(index) = changed.map(|line| line.index).min() else { return Ok(()) };
    Err(Error::invalid(
        dir,
        format!(
            "output_dir: row {} of the dataset has changed since the responses of {RESPONSES} were generated; choose another folder, or \
             set --overwrite_output_dir",
            index + 1
        ),
    ))
}

/// Checks that a folder is new or empty, except for the leftovers of an evaluation that was killed at its start.
fn check_empty(dir: &Path) -> Result<()> {
    if dir.is_file() {
        return Err(Error::invalid(dir, "output_dir: expected a folder or nothing, found a file"));
    }
    if !dir.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(dir).map_err(Error::io("read the folder", dir))? {
        let name = entry.map_err(Error::io("read the folder", dir))?.file_name();
        if name != format!("{STATE}.tmp").as_str() {
            return Err(Error::invalid(
                dir,
                format!(
                    "output_dir: expected an empty or new folder, or one with an evaluation ({STATE}), found `{}`; choose another \
                     folder",
                    name.to_string_lossy()
                ),
            ));
        }
    }
    Ok(())
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::io("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Reads the lines of a JSONL file that are complete and that `kept` accepts, and removes the others from it. A missing file has no lines.
fn read_lines<T: DeserializeOwned>(path: &Path, kept: impl Fn(&T) -> bool) -> Result<Vec<T>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let bytes = files::read(path)?;
    let text = String::from_utf8_lossy(&bytes);
    let mut rows = Vec::new();
    let mut lines = String::new();
    for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
        if let Some(row) = serde_json::from_str(line).ok().filter(&kept) {
            rows.push(row);
            lines += line;
        }
    }
    if lines.len() != bytes.len() {
        write_text(path, &lines)?;
    }
    Ok(rows)
}

/// Returns the number of times that a prompt was judged.
fn attempts(rows: &[ResultRow]) -> usize {
    rows.iter().map(|row| row.attempts).max().unwrap_or(0)
}

/// Reads the results of the prompts that have rows for all samples. The last row of a sample counts.
fn read_results(path: &Path, samples: usize) -> Result<BTreeMap<usize, Vec<ResultRow>>> {
    let mut prompts: BTreeMap<usize, BTreeMap<usize, ResultRow>> = BTreeMap::new();
    for row in read_lines(path, |row: &ResultRow| row.sample < samples)? {
        prompts.entry(row.index).or_default().insert(row.sample, row);
    }
    prompts.retain(|_, rows| rows.len() == samples);
    Ok(prompts.into_iter().map(|(index, rows)| (index, rows.into_values().collect())).collect())
}

/// Appends lines in one write, so that a kill leaves at most one incomplete line, the last.
fn append(file: &mut File, path: &Path, rows: &[impl Serialize]) -> Result<()> {
    let lines: String = rows.iter().map(json_line).collect();
    file.write_all(lines.as_bytes()).map_err(Error::io("write", path))
}

fn json_line(row: &impl Serialize) -> String {
    let mut line = serde_json::to_string(row).expect("rows serialize to JSON");
    line.push('\n');
    line
}
