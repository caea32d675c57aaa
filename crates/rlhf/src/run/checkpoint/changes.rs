//! The settings of an earlier run that a later run may change when it resumes from it, starts again in its place, or replays one of its
//! updates.

use crate::run::inputs::reward_input;
use crate::run::sizes::{GlobalSizes, ranks_in_words};
use rlhf_base::dist::num_ranks;
use rlhf_base::schema::{Field, ResumeClass};
use rlhf_base::{Error, Result};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// Settings of a run, which its checkpoints keep.
pub(crate) trait RunSettings: Serialize {
    /// The descriptions of the settings, with what a resumed run may change.
    fn described(&self) -> Vec<Field>;

    /// The name of a loss whose value for a row depends on the other rows of its micro-batch, if the run has such a loss.
    fn loss_of_micro_batches(&self) -> Option<&'static str> {
        None
    }
}

/// The settings of a run, as they are compared with those of an earlier one.
#[derive(Debug)]
pub(in crate::run) struct Compared {
    pub(in crate::run) values: Map<String, Value>,
    pub(in crate::run) resume: HashMap<&'static str, ResumeClass>,
    pub(in crate::run) loss_of_micro_batches: Option<&'static str>,
}

impl Compared {
    /// # Errors
    /// If the settings cannot be written.
    pub(in crate::run) fn new(config: &impl RunSettings) -> Result<Self> {
        let resume = config.described().into_iter().map(|field| (field.name, field.resume)).collect();
        Ok(Self { values: settings(config)?, resume, loss_of_micro_batches: config.loss_of_micro_batches() })
    }

    /// Whether a resumed run may change the setting `name`.
    pub(in crate::run) fn resume(&self, name: &str) -> ResumeClass {
        self.resume.get(name).copied().unwrap_or_default()
    }
}

/// A setting that differs between two runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Change {
    pub(crate) name: String,
    pub(crate) then: Value,
    pub(crate) now: Value,
}

impl Change {
    /// Returns the value of either run as error messages show it.
    pub(crate) fn shown(&self) -> [String; 2] {
        [shown(&self.then), shown(&self.now)]
    }
}

/// Whether a run may be longer or shorter than the earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Length {
    /// It may: the earlier run is finished, and is extended.
    MayChange,
    /// Not before the earlier run is finished.
    KeptUntilFinished,
    /// It may not.
    Kept,
}

/// The settings of an earlier run, which those of a later one are compared with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EarlierSettings<'a> {
    /// The folder or the file that has them, as messages name it.
    pub(super) place: &'a Path,
    /// The version of rlhf that wrote them.
    pub(super) version: &'a str,
    /// The command of the run.
    pub(super) command: &'a str,
    /// Number of ranks.
    pub(super) ranks: usize,
    /// Every setting.
    pub(super) config: &'a Map<String, Value>,
    /// The working directory of relative paths among them.
    pub(super) working_dir: Option<&'a Path>,
    /// The digests of the run's inputs, if they are compared with those of the later run, whose paths may then differ.
    pub(super) inputs: Option<&'a Value>,
}

impl<'a> EarlierSettings<'a> {
    /// Returns the settings `config` in the folder `place`. Nothing else is known of the run: it is taken to be a run of `command`, by this
    /// version and with this number of ranks.
    pub(crate) fn of_config(place: &'a Path, command: &'a str, config: &'a Map<String, Value>) -> Self {
        let version = env!("CARGO_PKG_VERSION");
        Self { place, version, command, ranks: num_ranks(), config, working_dir: None, inputs: None }
    }

    /// Returns the settings of `config` that differ from those of the run. A setting that only one version has cannot be compared.
    ///
    /// # Errors
    /// If the settings cannot be written.
    pub(crate) fn changes(&self, config: &impl Serialize) -> Result<Vec<Change>> {
        let from = self.working_dir;
        let change = |(name, now): (String, Value)| {
            let then = self.config.get(&name).filter(|then| !is_same(then, &now, from))?.clone();
            Some(Change { name, then, now })
        };
        Ok(settings(config)?.into_iter().filter_map(change).collect())
    }

    /// Checks that a run of `command` with the settings `config` keeps those that decide the result; returns warnings about harmless
    /// differences.
    ///
    /// # Errors
    /// If it is another command's, or a setting that changes the result differs: the error names it with both values.
    pub(crate) fn check(&self, command: &str, config: &impl RunSettings, length: Length) -> Result<Vec<String>> {
        self.check_with_ranks(command, &Compared::new(config)?, num_ranks(), length)
    }

    /// Checks the settings `config` of a run of `ranks` ranks.
    pub(in crate::run) fn check_with_ranks(
        &self,
        command: &str,
        compared: &Compared,
        ranks: usize,
        length: Length,
    ) -> Result<Vec<String>> {
        let dir = self.place.display();
        if self.command != command {
            let message = format!("expected a checkpoint of `rlhf {command}`, found one of `rlhf {}`", self.command);
            return Err(Error::invalid(self.place, message));
        }
        let config = &compared.values;
        let same_sizes = self.check_sizes(config, ranks)?;
        let mut warnings = Vec::new();
        let mut refused = Vec::new();
        for (name, now) in config {
            // A setting that only one version has cannot be compared.
            let from = self.working_dir;
            let Some(then) = self.config.get(name).filter(|then| !is_same(then, now, from)) else { continue };
            if self.inputs.is_some_and(|inputs| is_compared_by_content(name, then, now, inputs)) {
                continue;
            }
            let (then, now) = (shown(then), shown(now));
            match compared.resume(name) {
                ResumeClass::Free | ResumeClass::Best => {}
                ResumeClass::Sizes if same_sizes => {}
                ResumeClass::Length if length == Length::MayChange => {}
                ResumeClass::Rounding => warnings.push(format!(
                    "{name} = {now}: it was {then} before {dir}, so that results may differ by rounding"
                )),
                ResumeClass::Kept | ResumeClass::Sizes | ResumeClass::Length => {
                    refused.push((name.clone(), then, now));
                }
            }
        }
        if let [(name, then, now), more @ ..] = refused.as_slice() {
            let more: Vec<&str> = more.iter().map(|(name, ..)| name.as_str()).collect();
            let mut more = if more.is_empty() { String::new() } else { format!("; so does {}", more.join(", ")) };
            if compared.resume(name) == ResumeClass::Length && length == Length::KeptUntilFinished {
                more.push_str("; only a finished run can be extended");
            }
            return Err(Error::refused(
                name,
                format!(" = {now}: expected {then}, as in {dir}: a resumed run keeps what decides its result{more}"),
            ));
        }
        let passes = self.passes_warning(config, ranks);
        if let (Some(passes), Some(loss)) = (&passes, compared.loss_of_micro_batches) {
            let (change, _) = passes.split_once(", so that").unwrap_or((passes, ""));
            return Err(Error::Usage(format!(
                "{change}: expected the same, as loss_type = {loss} compares the pairs of a micro-batch with each other"
            )));
        }
        warnings.extend(passes);
        let version = env!("CARGO_PKG_VERSION");
        if self.version != version {
            warnings.push(format!("{dir} was written by rlhf {}, and this is {version}", self.version));
        }
        Ok(warnings)
    }

    /// Returns whether the batch sizes over all ranks are those of the checkpoint.
    ///
    /// # Errors
    /// If they differ, and cannot be compared by name because other settings size the batch or the number of ranks differs.
    fn check_sizes(&self, config: &Map<String, Value>, ranks: usize) -> Result<bool> {
        let sizes = (GlobalSizes::of(self.config, self.ranks), GlobalSizes::of(config, ranks));
        let (Some(then), Some(now)) = sizes else { return Ok(false) };
        let has_train_batch_size =
            |config: &Map<String, Value>| config.get("train_batch_size").is_some_and(Value::is_u64);
        // Settings of the same kind are compared by name.
        if then == now || (self.ranks == ranks && has_train_batch_size(self.config) == has_train_batch_size(config)) {
            return Ok(then == now);
        }
        let dir = self.place.display();
        let (expected, found) = (then.describe(self.ranks), now.describe(ranks));
        let fix = then.fix();
        Err(Error::Usage(format!("{found}: expected {expected}, as in {dir}: {fix}")))
    }

    /// Returns a warning if the number of rows per pass, or of ranks, has changed.
    fn passes_warning(&self, config: &Map<String, Value>, ranks: usize) -> Option<String> {
        let dir = self.place.display();
        if self.ranks != ranks {
            let (then, now) = (ranks_in_words(self.ranks), ranks_in_words(ranks));
            return Some(format!("{now}: it was {then} before {dir}, so that results may differ by rounding"));
        }
        let rows = |config| GlobalSizes::rows_per_pass(config).map_or("any number of".into(), |rows| rows.to_string());
        let (then, now) = (rows(self.config), rows(config));
        GlobalSizes::of(self.config, 1)
            .filter(|_| then != now)
            .map(|_| format!("{now} rows per pass: it was {then} before {dir}, so that results may differ by rounding"))
    }
}

/// Returns the settings of a run by name.
pub(in crate::run) fn settings(config: &impl Serialize) -> Result<Map<String, Value>> {
    match serde_json::to_value(config) {
        Ok(Value::Object(settings)) => Ok(settings),
        Ok(_) => Ok(Map::new()),
        Err(e) => Err(Error::Usage(format!("the settings cannot be written to a checkpoint: {e}"))),
    }
}

/// Returns whether two values of a setting are the same. Paths may be written differently: the one of `then` is relative to `from`, the one
/// of
/// `now` to the working directory.
fn is_same(then: &Value, now: &Value, from: Option<&Path>) -> bool {
    if let (Value::Array(then), Value::Array(now)) = (then, now) {
        return then.len() == now.len() && then.iter().zip(now).all(|(then, now)| is_same(then, now, from));
    }
    let place = |value: &Value, from: &Path| fs::canonicalize(from.join(value.as_str()?)).ok();
    then == now
        || place(then, from.unwrap_or(Path::new(""))).is_some_and(|then| place(now, Path::new("")) == Some(then))
}

/// Returns whether the setting `name` is a path whose contents are among the `inputs` of the run. Another path that exists is then
/// accepted, as the contents are compared.
pub(crate) fn is_compared_by_content(name: &str, then: &Value, now: &Value, inputs: &Value) -> bool {
    let has_digest =
        |name: &str| inputs.get(name).is_some_and(|input| !input["digest"].is_null() || input["files"].is_object());
    let are_paths =
        |then: &Value, now: &Value| then.is_string() && now.as_str().is_some_and(|now| Path::new(now).exists());
    match (name, then, now) {
        // The rewards, with the model or the word list that each reads.
        ("reward", Value::Array(then), Value::Array(now)) => {
            let is_same = |(then, now): (&Value, &Value)| {
                then == now
                    || reads_the_same_kind(then, now).is_some_and(|name| has_digest(&reward_input(&name)))
                    || is_moved_reward(then, now, inputs)
            };
            then.len() == now.len() && then.iter().zip(now).all(is_same)
        }
        ("reward_command", Value::String(then), Value::String(now)) => is_moved_command(then, now, "command", inputs),
        ("judge_command", Value::String(then), Value::String(now)) => is_moved_command(then, now, name, inputs),
        ("reward_model_path", then, now) => are_paths(then, now) && has_digest(&reward_input("model")),
        ("eval_dataset_name", then, now) => are_paths(then, now) && has_digest("rows held out"),
        (name, Value::Array(then), Value::Array(now)) => {
            then.len() == now.len() && then.iter().zip(now).all(|(then, now)| are_paths(then, now)) && has_digest(name)
        }
        (name, then, now) => are_paths(then, now) && has_digest(name),
    }
}

/// Returns the name of the reward if `then` and `now` differ only by a path, and the path of `now` exists.
fn reads_the_same_kind(then: &Value, now: &Value) -> Option<String> {
    let parts = |value: &Value| {
        let (kind, path) = value.as_str()?.split_once(':')?;
        // The label of a model is not part of its path.
        let (path, label) = path.split_once('#').map_or((path, None), |(path, label)| (path, Some(label.to_string())));
        let is_read = ["model", "words"].contains(&kind.rsplit('=').next()?);
        is_read.then(|| (kind.to_string(), label, path.to_string()))
    };
    let (then, now) = (parts(then)?, parts(now)?);
    let is_same = then.0 == now.0 && then.1 == now.1 && Path::new(&now.2).exists();
    is_same.then(|| now.0.split('=').next().unwrap_or_default().to_string())
}

/// Returns whether two rewards are command lines of the same program at different places.
fn is_moved_reward(then: &Value, now: &Value, inputs: &Value) -> bool {
    let parts = |value: &Value| {
        let (kind, line) = value.as_str()?.split_once(':')?;
        (kind.rsplit('=').next() == Some("command")).then(|| (kind.to_string(), line.to_string()))
    };
    let (Some((then_kind, then)), Some((now_kind, now))) = (parts(then), parts(now)) else { return false };
    let name = now_kind.split('=').next().unwrap_or_default();
    then_kind == now_kind && is_moved_command(&then, &now, name, inputs)
}

/// Returns whether two command lines differ only by the folders of scripts that are among the `inputs` of the reward `name`.
fn is_moved_command(then: &str, now: &str, name: &str, inputs: &Value) -> bool {
    let files = &inputs[reward_input(name)]["files"];
    let words = |line: &str| -> Vec<String> {
        line.split_whitespace().map(|word| word.trim_matches(['"', '\'']).to_string()).collect()
    };
    let script = |word: &str| Path::new(word).file_name().map(|name| name.to_string_lossy().into_owned());
    let is_same = |(then, now): (&String, &String)| {
        let is_moved = || {
            let name = script(now).filter(|_| Path::new(now).is_file());
            name.is_some_and(|name| script(then).as_ref() == Some(&name) && files[&name].is_string())
        };
        then == now || is_moved()
    };
    let (then, now) = (words(then), words(now));
    then.len() == now.len() && then.iter().zip(&now).all(is_same)
}

/// Returns a setting as error messages show it.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "none".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Settings of a test, of any trainer.
#[cfg(test)]
impl RunSettings for Value {
    fn described(&self) -> Vec<Field> {
        use crate::settings::{PpoConfig, SftConfig};
        use rlhf_base::schema::Settings as _;
        [SftConfig::fields(), PpoConfig::fields()].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn another_path_is_left_to_the_digests_where_there_are_some_and_refused_elsewhere() {
        let inputs = json!({
            "dataset_name": {"digest": "1"}, "sft_model_path": {"files": {}}, "reward mood": {"files": {}},
            "reward words": {"files": {}}, "reward model": {"files": {}}, "rows held out": {"digest": "2"},
        });
        let is_compared = |name: &str, then: Value, now: Value| is_compared_by_content(name, &then, &now, &inputs);
        for name in ["dataset_name", "sft_model_path", "reward_model_path", "eval_dataset_name"] {
            assert!(is_compared(name, json!("a"), json!("/")), "{name}");
            assert!(!is_compared(name, json!("a"), Value::Null), "{name}");
            assert!(!is_compared(name, json!("a"), json!("/nowhere/at/all")), "{name}");
        }
        assert!(is_compared("dataset_name", json!(["a"]), json!(["/"])));
        assert!(!is_compared("dataset_name", json!(["a"]), json!(["/", "/tmp"])));
        assert!(!is_compared("value_model_path", json!("a"), json!("/")), "no digest");
        assert!(!is_compared("seed", json!(1), json!(2)));
        let rewards = |then: &str, now: &str| is_compared("reward", json!(["json", then]), json!(["json", now]));
        assert!(rewards("mood=model:a", "mood=model:/") && rewards("words:a.txt", "words:/"));
        assert!(rewards("mood=model:a#GOOD", "mood=model:/#GOOD"));
        for (then, now) in [
            ("mood=model:a#GOOD", "mood=model:/#BAD"),
            ("mood=model:a", "other=model:/"),
            ("other=model:a", "other=model:/"),
            ("mood=model:a", "mood=model:/nowhere/at/all"),
            ("words:a", "model:/"),
            ("regex:a", "regex:/"),
        ] {
            assert!(!rewards(then, now), "{then} {now}");
        }
    }

    #[test]
    fn a_program_that_has_moved_is_left_to_the_digests_of_its_scripts_and_no_other_word_is() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("judge.py"), "").unwrap();
        let moved = format!("python3 '{}' --level 2", dir.path().join("judge.py").display());
        let files = json!({"files": {"judge.py": "1"}});
        let inputs = json!({"reward command": files, "reward mine": files});
        let is_compared = |name: &str, then: Value, now: Value| is_compared_by_content(name, &then, &now, &inputs);
        assert!(is_compared("reward_command", json!("python3 old/judge.py --level 2"), json!(moved)));
        for then in ["python3 old/judge.py --level 3", "python3 old/other.py --level 2", "python3 judge.py"] {
            assert!(!is_compared("reward_command", json!(then), json!(moved)), "{then}");
        }
        let rewards = |then: &str, kind: &str| is_compared("reward", json!([then]), json!([format!("{kind}:{moved}")]));
        assert!(rewards("mine=command:python3 judge.py --level 2", "mine=command"));
        assert!(!rewards("mine=command:python3 judge.py --level 2", "other=command"));
        assert!(!rewards("other=command:python3 judge.py --level 2", "other=command"), "no digest");
        assert!(!rewards("python:judge.f", "mine=command"));
    }

    #[test]
    fn a_path_is_the_same_from_another_working_folder() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("rows.jsonl"), "").unwrap();
        let whole = json!([dir.path().join("rows.jsonl")]);
        assert!(is_same(&json!(["rows.jsonl"]), &whole, Some(dir.path())));
        assert!(!is_same(&json!(["rows.jsonl"]), &whole, None));
        assert!(!is_same(&json!(["rows.jsonl", "x"]), &whole, Some(dir.path())));
    }
}
