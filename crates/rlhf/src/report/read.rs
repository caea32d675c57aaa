//! A run's folder as plain data: metrics, settings, the model card's facts, alarms, samples.
//!
//! A run may be in progress, interrupted or damaged: what cannot be read is noted, and the rest is shown.

use super::samples::{self, Frame, Prompt};
use crate::run::checkpoint::UNFINISHED;
use crate::run::group_names::{written, written_name};
use crate::run::output_dir::{ALARMS, CONFIG, METRICS, holds_run, is_at_work, read_length, read_start};
use crate::terminal::without_programs;
use rlhf_base::files;
use rlhf_base::metrics::{name_of_groups, name_of_ppo};
use rlhf_base::safe_text::beginning;
use rlhf_base::weights::read_json;
use rlhf_base::{Error, Result};
use rlhf_lm::model::is_model;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::HashMap;
use std::io::BufReader;
use std::path::{Path, PathBuf};

/// Maximum length in bytes of a line of metrics or of alarms.
const MOST_LINE: u64 = 1 << 20;
/// Maximum number of metrics.
const MOST_SERIES: usize = 2000;
/// Maximum length of a metric's name, in bytes.
const MOST_NAME: usize = 300;
/// Maximum number of settings.
const MOST_SETTINGS: usize = 1000;
/// Maximum number of alarms that are kept.
const MOST_ALARMS: usize = 1000;
/// Maximum length of a shown text, such as the value of a setting, in characters.
const MOST_TEXT: usize = 20_000;

/// Name of a rollback among the alarms of a run.
const ROLLBACK: &str = "rollback";

/// A run, as its folder shows it.
#[derive(Debug, Default)]
pub struct Run {
    /// Name of the folder, made unique among the runs of a report.
    pub label: String,
    /// Its metrics, in the order of the first line that has each.
    pub metrics: Vec<Series>,
    /// Updates at its last line of metrics.
    pub updates: f64,
    pub outcome: Outcome,
    /// Updates of the whole run, if it has written their number.
    pub length: Option<u64>,
    /// Seconds from 1970 in UTC to its start, if it has written them.
    pub began: Option<u64>,
    /// Settings in the order of `config.yaml`.
    pub settings: Vec<Setting>,
    /// Facts of the model card by name: base model, rewards, checks at the start.
    pub facts: Vec<(String, String)>,
    /// Command line that trained the model.
    pub command_line: Option<String>,
    pub alarms: Vec<Alarm>,
    /// Prompts with their responses.
    pub prompts: Vec<Prompt>,
    /// Text around each prompt, such as that of the chat template.
    pub frame: Frame,
    /// Metrics that could not be read.
    pub damage: Vec<String>,
    /// Other parts of the folder that could not be read, or were left out.
    pub notes: Vec<String>,
}

/// A metric over a run: updates and values, NaN where the value is not finite.
#[derive(Debug, PartialEq)]
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// End of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Outcome {
    Finished,
    /// It ended early: by a signal, by an error, or because its caller ended it.
    Stopped {
        /// Updates done.
        done: u64,
        /// Updates of the whole run.
        total: u64,
    },
    /// A process is at work in its folder.
    Running,
    /// Neither end is recorded, and no process of this machine is at work in its folder: it was killed, or runs elsewhere.
    Interrupted,
    /// Neither end is recorded, and the file system cannot show whether a process is at work in its folder.
    #[default]
    Open,
}

/// An alarm of a run, or the rollback that one caused.
#[derive(Debug, PartialEq)]
pub struct Alarm {
    /// Updates done when it was raised.
    pub step: f64,
    pub name: String,
    pub message: String,
}

impl Alarm {
    pub fn is_rollback(&self) -> bool {
        self.name == ROLLBACK
    }

    /// Returns the cause, and what to try, if the message has both. The update, with which messages start, is left out.
    pub fn cause_and_advice(&self) -> (&str, Option<&str>) {
        let message = self.message.strip_prefix(&format!("update {}: ", self.step)).unwrap_or(&self.message);
        message.split_once("; ").map_or((message, None), |(cause, advice)| (cause, Some(advice)))
    }
}

impl Run {
    /// Reads the run in the folder `dir`, which may have no updates yet.
    ///
    /// # Errors
    /// If there is no run in it, or `metrics.jsonl` cannot be read.
    pub fn read(dir: &Path) -> Result<Self> {
        Self::read_as(dir, is_at_work(dir))
    }

    /// Reads the run in the folder `dir`. `is_at_work` tells whether a process is at work in it, if that is known.
    ///
    /// # Errors
    /// As [`Run::read`].
    pub fn read_as(dir: &Path, is_at_work: Option<bool>) -> Result<Self> {
        // A run writes its settings first.
        if !dir.join(METRICS).is_file() && !holds_run(dir) {
            return Err(Error::invalid(dir, format!("expected the folder of a run, {}", describe(dir))));
        }
        let mut notes = Vec::new();
        let mut damage = Vec::new();
        let metrics = read_metrics(dir, is_at_work == Some(true), &mut damage)?;
        let updates = metrics.iter().filter_map(|series| series.points.last()).map(|point| point.0).fold(0.0, f64::max);
        let (prompts, frame) = samples::read(dir, &mut notes);
        let card = files::read_own_text(&dir.join("README.md")).unwrap_or_default();
        Ok(Self {
            label: name_of(dir),
            updates,
            outcome: outcome(dir, updates, is_at_work),
            length: read_length(dir),
            began: read_start(dir),
            settings: settings(dir, &mut notes),
            facts: facts(&card),
            command_line: command_line(&card),
            alarms: read_alarms(dir, &mut notes),
            prompts,
            frame,
            metrics,
            damage,
            notes,
        })
    }

    /// Reads the runs in these folders, with unique labels.
    ///
    /// # Errors
    /// As [`Run::read`]; if a run has no updates.
    pub fn read_all(dirs: &[PathBuf]) -> Result<Vec<Self>> {
        let mut runs = dirs.iter().map(|dir| Self::read(dir)).collect::<Result<Vec<_>>>()?;
        if let Some(at) = runs.iter().position(|run| run.metrics.is_empty()) {
            let found = match runs[at].damage.first() {
                Some(damage) => format!("none ({damage})"),
                None if dirs[at].join("evaluation.json").is_file() => {
                    "an evaluation: its summary.json has the results".into()
                }
                None => format!("no line of metrics in its {METRICS} yet"),
            };
            return Err(Error::invalid(&dirs[at], format!("expected a run with updates, found {found}")));
        }
        for (run, label) in runs.iter_mut().zip(labels(dirs)) {
            run.label = label;
        }
        Ok(runs)
    }

    /// Returns the points of a metric. PPO's name of a metric works for all runs with rewards.
    pub fn points(&self, name: &str) -> Option<&[(f64, f64)]> {
        self.series(name).map(|series| series.points.as_slice())
    }

    /// Returns a metric by its own name or, in a run of GRPO or RLOO, by PPO's name for it.
    pub fn series(&self, name: &str) -> Option<&Series> {
        let find = |name: &str| self.metrics.iter().find(|series| series.name == name);
        find(name).or_else(|| find(&name_of_groups(name).filter(|_| self.is_of_groups())?))
    }

    /// Returns the names of the metrics. Metrics of GRPO and RLOO get PPO's name for the same number, so that all runs of a page have one
    /// name for it.
    pub fn names(&self) -> impl Iterator<Item = Cow<'_, str>> {
        let is_of_groups = self.is_of_groups();
        self.metrics.iter().map(move |series| {
            let ppo_name = name_of_ppo(&series.name).filter(|_| is_of_groups);
            ppo_name.unwrap_or(Cow::Borrowed(&series.name))
        })
    }

    /// Whether the metrics have the names of TRL's GRPO and RLOO trainers.
    fn is_of_groups(&self) -> bool {
        self.metrics.iter().any(|series| series.name == "reward")
    }

    /// Returns the value of a setting.
    pub fn setting(&self, name: &str) -> Option<&str> {
        self.find(name).map(|setting| setting.value.as_str())
    }

    /// Returns the setting `name`, which may have another name in the files of a GRPO or RLOO run.
    fn find(&self, name: &str) -> Option<&Setting> {
        let named = |name: &str| self.settings.iter().find(|setting| setting.name == name);
        named(name).or_else(|| named(written_name(name)))
    }

    /// Returns the name that the run's files have for the setting `name`.
    pub(crate) fn name_of<'n>(&self, name: &'n str) -> &'n str {
        let name_in_files = written_name(name);
        if self.settings.iter().any(|setting| setting.name == name_in_files) { name_in_files } else { name }
    }

    /// Returns the value of a setting as others may see it: without the arguments of programs, and without the passwords and queries of
    /// addresses.
    pub fn public_setting(&self, name: &str) -> Option<&str> {
        self.find(name).map(|setting| setting.public.as_str())
    }
}

/// Describes the contents of a folder that is expected to be a run's.
fn describe(dir: &Path) -> String {
    if !dir.is_dir() {
        return if dir.exists() { "found a file".into() } else { "found no such folder".into() };
    }
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut inner: Vec<String> = entries
        .map(|entry| entry.path())
        .filter(|path| path.join(METRICS).is_file())
        .map(|path| name_of(&path))
        .collect();
    inner.sort_unstable();
    match inner.as_slice() {
        [] => format!("found no {METRICS} in it"),
        inner => format!("found no {METRICS} in it; there are runs in its folders {}", inner.join(", ")),
    }
}

/// Reads the metrics line by line. Lines that are incomplete or are no metrics are counted and left out. The last line of a run that is at
/// work may be incomplete, and is then not counted.
fn read_metrics(dir: &Path, is_at_work: bool, damage: &mut Vec<String>) -> Result<Vec<Series>> {
    let path = dir.join(METRICS);
    if !has_own(&path) {
        return Ok(Vec::new());
    }
    let mut all: Vec<Series> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    let (mut unread, mut more) = (0_usize, 0_usize);
    let mut reader = BufReader::new(files::open_own(&path)?);
    let mut line = Vec::new();
    while files::read_line(&mut reader, &mut line, MOST_LINE).map_err(Error::io("read", &path))?.is_some() {
        let Ok(Value::Object(metrics)) = serde_json::from_slice(&line) else {
            let is_being_written = is_at_work && !line.ends_with(b"\n");
            unread += usize::from(!line.trim_ascii().is_empty() && !is_being_written);
            continue;
        };
        let Some(step) = metrics.get("step").and_then(Value::as_f64) else {
            unread += 1;
            continue;
        };
        for (name, value) in metrics {
            let value = match value {
                Value::Number(number) => number.as_f64().unwrap_or(f64::NAN),
                Value::Null => f64::NAN,
                _ => continue,
            };
            if name.len() > MOST_NAME || (all.len() == MOST_SERIES && !places.contains_key(&name)) {
                more += 1;
                continue;
            }
            let place = *places.entry(name).or_insert_with_key(|name| {
                all.push(Series { name: name.clone(), points: Vec::new() });
                all.len() - 1
            });
            all[place].points.push((step, value));
        }
    }
    damage.extend(unread_lines(METRICS, unread));
    damage.extend((more > 0).then(|| {
        format!("{METRICS}: {more} values of metrics beyond {MOST_SERIES}, or with names of more than {MOST_NAME} bytes, are left out")
    }));
    Ok(all)
}

/// Returns whether something of this name exists, including a broken link.
fn has_own(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Returns the beginning of a text that is shown.
fn cut(text: &str, most: usize) -> String {
    let start = beginning(text, most);
    if start.len() < text.len() { format!("{start} ({} bytes)", text.len()) } else { text.to_string() }
}

/// Returns a note on the lines of a file that are left out, if there are any.
fn unread_lines(file: &str, unread: usize) -> Option<String> {
    match unread {
        0 => None,
        1 => Some(format!("{file}: 1 line could not be read and is left out")),
        _ => Some(format!("{file}: {unread} lines could not be read and are left out")),
    }
}

/// Returns how the run ended. `updates` is the update of its last line of metrics.
fn outcome(dir: &Path, updates: f64, is_at_work: Option<bool>) -> Outcome {
    let open = match is_at_work {
        Some(true) => Outcome::Running,
        Some(false) => Outcome::Interrupted,
        None => Outcome::Open,
    };
    let unfinished = dir.join(UNFINISHED);
    if !unfinished.is_file() {
        // A run that was finished and is being extended still has the model of its first part.
        let is_extended = read_length(dir).is_some_and(|length| length as f64 > updates);
        return if is_model(dir) && !is_extended { Outcome::Finished } else { open };
    }
    let state = read_json(&unfinished).unwrap_or_default();
    match (state["update"].as_u64(), state["num_updates"].as_u64()) {
        // A run that was resumed since then is at work, or has more updates.
        (Some(done), Some(total)) if updates <= done as f64 && open != Outcome::Running => {
            Outcome::Stopped { done, total }
        }
        _ => open,
    }
}

/// A setting of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    pub name: String,
    pub value: String,
    /// The value without secrets.
    public: String,
}

#[cfg(test)]
impl Run {
    /// A run with these metrics, of updates from 1.
    pub fn of(metrics: &[(&str, &[f64])]) -> Self {
        let series = |&(name, values): &(&str, &[f64])| Series {
            name: name.into(),
            points: values.iter().enumerate().map(|(at, &value)| (at as f64 + 1.0, value)).collect(),
        };
        Self { metrics: metrics.iter().map(series).collect(), ..Self::default() }
    }
}

#[cfg(test)]
impl Setting {
    /// A setting without secrets.
    pub fn of(name: &str, value: &str) -> Self {
        Self { name: name.into(), value: value.into(), public: value.into() }
    }
}

/// Returns settings as texts: at most `MOST_SETTINGS`, each cut.
pub fn settings_of(settings: &Map<String, Value>) -> Vec<Setting> {
    let text = |value: &Value| match value {
        Value::Null => "none".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let public = without_programs(settings);
    let setting = |((name, value), public): ((&String, &Value), &Value)| Setting {
        name: cut(name, MOST_NAME),
        value: cut(&text(value), MOST_TEXT),
        public: cut(&text(public), MOST_TEXT),
    };
    settings.iter().zip(public.values()).take(MOST_SETTINGS).map(setting).collect()
}

/// Reads the settings in `config.yaml`.
fn settings(dir: &Path, notes: &mut Vec<String>) -> Vec<Setting> {
    let text = match files::read_own_text(&dir.join(CONFIG)) {
        Ok(text) => text,
        Err(error) => {
            notes.push(error.to_string());
            return Vec::new();
        }
    };
    match serde_saphyr::from_str::<Map<String, Value>>(&text) {
        Ok(settings) => {
            // An older run has other names in its file.
            let settings = written(settings);
            if settings.len() > MOST_SETTINGS {
                notes.push(format!("{CONFIG}: the first {MOST_SETTINGS} of {} settings are read", settings.len()));
            }
            settings_of(&settings)
        }
        Err(_) => {
            notes.push(format!("{CONFIG}: expected settings as YAML, found something else"));
            Vec::new()
        }
    }
}

/// Returns the rows of the table in a model card.
fn facts(card: &str) -> Vec<(String, String)> {
    let rows = card.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
    rows.map_while(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | "))
        .map(|(name, value)| (cut(name, MOST_NAME), cut(&value.replace("\\|", "|").replace('`', ""), MOST_TEXT)))
        .take(MOST_SETTINGS)
        .collect()
}

/// Returns the command line in a model card, which is indented.
fn command_line(card: &str) -> Option<String> {
    let lines = card.lines().skip_while(|line| !line.starts_with("Trained by "));
    let lines: Vec<&str> =
        lines.skip(1).skip_while(|line| line.is_empty()).map_while(|line| line.strip_prefix("    ")).collect();
    (!lines.is_empty()).then(|| cut(&lines.join("\n"), MOST_TEXT))
}

/// Reads the alarms of a run; without their file there are none. Lines that are incomplete or are no alarms are counted and left out.
fn read_alarms(dir: &Path, notes: &mut Vec<String>) -> Vec<Alarm> {
    let path = dir.join(ALARMS);
    if !has_own(&path) {
        return Vec::new();
    }
    let file = match files::open_own(&path) {
        Ok(file) => file,
        Err(error) => {
            notes.push(error.to_string());
            return Vec::new();
        }
    };
    let alarm = |line: &[u8]| {
        let line: Value = serde_json::from_slice(line).ok()?;
        let text = |name: &str| line[name].as_str().map(String::from);
        Some(Alarm {
            step: line["step"].as_u64()? as f64,
            name: cut(&text("alarm")?, MOST_NAME),
            message: cut(&text("message")?, 2000),
        })
    };
    let mut alarms = Vec::new();
    let (mut unread, mut more) = (0_usize, 0_usize);
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    while let Ok(Some(_)) = files::read_line(&mut reader, &mut line, MOST_LINE) {
        match alarm(&line) {
            Some(alarm) if alarms.len() < MOST_ALARMS => alarms.push(alarm),
            Some(_) => more += 1,
            None => unread += usize::from(!line.trim_ascii().is_empty()),
        }
    }
    notes.extend(unread_lines(ALARMS, unread));
    notes.extend((more > 0).then(|| format!("{ALARMS}: {more} alarms after the first {MOST_ALARMS} are left out")));
    alarms
}

/// Returns the name of a folder.
fn name_of(dir: &Path) -> String {
    let whole = dir.canonicalize().unwrap_or_else(|_| dir.to_path_buf());
    whole.file_name().map_or_else(|| whole.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// Returns a label for each folder: as many names at the end of its path as make it unique, or else a number.
fn labels(dirs: &[PathBuf]) -> Vec<String> {
    let names: Vec<Vec<String>> = dirs
        .iter()
        .map(|dir| dir.canonicalize().unwrap_or_else(|_| dir.clone()))
        .map(|dir| dir.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect())
        .collect();
    let ending = |names: &[String], len: usize| names[names.len().saturating_sub(len)..].join("/");
    let mut labels: Vec<String> = Vec::new();
    for (at, path_names) in names.iter().enumerate() {
        let is_unique = |len: &usize| {
            names
                .iter()
                .enumerate()
                .all(|(other, names)| other == at || ending(names, *len) != ending(path_names, *len))
        };
        labels.push(match (1..=path_names.len()).find(is_unique) {
            Some(len) => ending(path_names, len),
            // The same folder twice.
            None => format!(
                "{} ({})",
                ending(path_names, 1),
                names[..=at].iter().filter(|names| *names == path_names).count()
            ),
        });
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn links_pipes_and_lines_without_end_are_noted_and_nothing_of_them_is_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let long =
            format!("{{\"step\":1,\"loss\":1}}\n{{\"step\":2,\"x{}\n{{\"step\":3,\"loss\":2}}\n", "y".repeat(2 << 20));
        fs::write(path(METRICS), long).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(path(CONFIG)).status().unwrap().success());
        let secret = tempfile::NamedTempFile::new().unwrap();
        fs::write(secret.path(), "{\"step\":1,\"alarm\":\"secret\",\"message\":\"secret\"}\n").unwrap();
        std::os::unix::fs::symlink(secret.path(), path(ALARMS)).unwrap();
        let run = Run::read(dir.path()).unwrap();
        assert_eq!(run.points("loss").unwrap(), [(1.0, 1.0), (3.0, 2.0)]);
        assert_eq!(run.damage, ["metrics.jsonl: 1 line could not be read and is left out"]);
        assert!(run.alarms.is_empty() && run.settings.is_empty());
        let notes = run.notes.join("; ");
        assert!(notes.contains("found a named pipe") && notes.contains("found a link"), "{notes}");
        fs::remove_file(path(METRICS)).unwrap();
        std::os::unix::fs::symlink(secret.path(), path(METRICS)).unwrap();
        assert!(Run::read(dir.path()).is_err());
    }

    #[test]
    fn metrics_with_gaps_and_a_line_cut_in_the_middle_are_read_as_far_as_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let lines = "{\"step\":1,\"loss\":0.5,\"text\":\"x\"}\nno line\n{\"step\":2,\"loss\":null,\"lr\":1e-5}\n[1]\n{\"loss\":1}\n\n{\"step\":3,\"lo";
        fs::write(dir.path().join(METRICS), lines).unwrap();
        let run = Run::read(dir.path()).unwrap();
        let names: Vec<&str> = run.metrics.iter().map(|series| series.name.as_str()).collect();
        assert_eq!(names, ["step", "loss", "lr"]);
        let loss = run.points("loss").unwrap();
        assert!(loss[0] == (1.0, 0.5) && loss[1].0 == 2.0 && loss[1].1.is_nan() && loss.len() == 2, "{loss:?}");
        assert_eq!((run.updates, run.outcome), (2.0, Outcome::Interrupted));
        assert_eq!(run.damage, ["metrics.jsonl: 4 lines could not be read and are left out"]);
        let at_work = Run::read_as(dir.path(), Some(true)).unwrap();
        let words = "metrics.jsonl: 3 lines could not be read and are left out";
        assert_eq!(at_work.damage, [words], "the last line is being written");
        fs::write(dir.path().join(METRICS), "\u{0}\nno\n").unwrap();
        let error = Run::read_all(&[dir.path().to_path_buf()]).unwrap_err().to_string();
        assert!(error.ends_with("found none (metrics.jsonl: 2 lines could not be read and are left out)"), "{error}");
    }

    #[test]
    fn alarms_of_a_file_that_is_damaged_or_cut_are_read_as_far_as_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let mut notes = Vec::new();
        assert!(read_alarms(dir.path(), &mut notes).is_empty() && notes.is_empty(), "there is no file");
        let lines = "{\"step\":3,\"alarm\":\"runaway_kl\",\"message\":\"update 3: far: left; lower it; or not\"}\n\u{0}\n\n\
                     {\"step\":\"x\"}\n{\"step\":4,\"alarm\":\"rollback\",\"message\":\"back\",\"rollbacks\":1}\n{\"step\":9,\"ala";
        fs::write(dir.path().join(ALARMS), lines).unwrap();
        let alarms = read_alarms(dir.path(), &mut notes);
        assert_eq!(notes, ["alarms.jsonl: 3 lines could not be read and are left out"]);
        let found: Vec<_> =
            alarms.iter().map(|alarm| (alarm.step, alarm.is_rollback(), alarm.cause_and_advice())).collect();
        assert_eq!(found, [(3.0, false, ("far: left", Some("lower it; or not"))), (4.0, true, ("back", None))]);
        fs::remove_file(dir.path().join(ALARMS)).unwrap();
        fs::create_dir(dir.path().join(ALARMS)).unwrap();
        assert!(
            read_alarms(dir.path(), &mut notes).is_empty() && notes[1].contains("expected a regular file"),
            "{notes:?}"
        );
    }

    #[test]
    fn a_folder_that_is_no_run_or_has_no_updates_is_one_error() {
        let dir = tempfile::tempdir().unwrap();
        let error = |dir: &Path| Run::read_all(&[dir.to_path_buf()]).unwrap_err().to_string();
        assert!(error(&dir.path().join("none")).contains("found no such folder"));
        assert!(error(dir.path()).ends_with("expected the folder of a run, found no metrics.jsonl in it"));
        for stage in ["2-reward", "1-sft"] {
            fs::create_dir(dir.path().join(stage)).unwrap();
            fs::write(dir.path().join(stage).join(METRICS), "").unwrap();
        }
        assert!(error(dir.path()).ends_with("there are runs in its folders 1-sft, 2-reward"), "{}", error(dir.path()));
        assert!(error(&dir.path().join("1-sft")).contains("expected a run with updates"));
    }

    #[test]
    fn the_end_of_a_run_is_known_by_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        let outcomes =
            |updates: f64| [None, Some(true), Some(false)].map(|at_work| outcome(dir.path(), updates, at_work));
        assert_eq!(outcomes(4.0), [Outcome::Open, Outcome::Running, Outcome::Interrupted]);
        write("config.json", "{}");
        assert_eq!(outcomes(4.0), [Outcome::Finished; 3]);
        crate::run::output_dir::write_length(dir.path(), 9).unwrap();
        assert_eq!(outcomes(4.0), [Outcome::Open, Outcome::Running, Outcome::Interrupted], "it is extended");
        assert_eq!(outcomes(9.0), [Outcome::Finished; 3]);
        write(UNFINISHED, "{\"update\": 4, \"num_updates\": 9}");
        let stopped = Outcome::Stopped { done: 4, total: 9 };
        assert_eq!(outcomes(4.0), [stopped, Outcome::Running, stopped], "a resumed run is at work");
        assert_eq!(outcomes(5.0), [Outcome::Open, Outcome::Running, Outcome::Interrupted]);
    }

    #[test]
    fn settings_and_the_model_card_are_read_as_they_were_written() {
        let dir = tempfile::tempdir().unwrap();
        let mut notes = Vec::new();
        assert!(settings(dir.path(), &mut notes).is_empty() && notes.len() == 1);
        fs::write(dir.path().join(CONFIG), "# by rlhf\nseed: 1\nlora: [a, b]\nsave_steps: null\nname: '<b>'\n")
            .unwrap();
        let setting = |name: &str, value: &str, public: &str| {
            let [name, value, public] = [name, value, public].map(String::from);
            Setting { name, value, public }
        };
        let expected = [("seed", "1"), ("lora", "[\"a\",\"b\"]"), ("save_steps", "none"), ("name", "<b>")];
        assert_eq!(settings(dir.path(), &mut notes), expected.map(|(name, value)| setting(name, value, value)));
        let programs = "reward_command: judge --key pw123\nreward: ['a=command:judge pw123', json]\nreward_url: http://me:pw123@h/\n";
        fs::write(dir.path().join(CONFIG), programs).unwrap();
        let expected = [
            setting("reward_command", "judge --key pw123", "judge ..."),
            setting("reward", r#"["a=command:judge pw123","json"]"#, r#"["a=command:judge ...","json"]"#),
            setting("reward_url", "http://me:pw123@h/", "http://...@h/"),
        ];
        assert_eq!(settings(dir.path(), &mut notes), expected);
        let card = "---\ntags:\n- x\n---\n\n# p\n\nTrained by `rlhf ppo` 0.1.0:\n\n    rlhf ppo\n    --x\n\n| | |\n|---|---|\n\
                    | checks | all \\| good |\n| kl | 1 |\n\n| no | row |\n";
        let expected =
            [("checks", "all | good"), ("kl", "1")].map(|(name, value)| (name.to_string(), value.to_string()));
        assert_eq!(facts(card), expected);
        assert_eq!(command_line(card).as_deref(), Some("rlhf ppo\n--x"));
        assert_eq!(command_line("# mine"), None);
    }

    #[test]
    fn labels_are_the_shortest_ends_of_paths_that_differ() {
        let paths = |paths: &[&str]| labels(&paths.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(paths(&["/no/a", "/no/b"]), ["a", "b"]);
        assert_eq!(paths(&["/no/1/ppo", "/no/2/ppo", "/no/sft"]), ["1/ppo", "2/ppo", "sft"]);
        assert_eq!(paths(&["/no/a", "/no/a"]), ["a (1)", "a (2)"]);
    }
}
