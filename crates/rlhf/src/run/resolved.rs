//! The resolved configuration that a run writes to its output folder.

use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::run::group_names::{read_back, written};
use crate::terminal::without_programs;
use rlhf_base::{Error, Result, files};

/// The resolved configuration of a run; a folder that has one holds a run.
pub const CONFIG: &str = "config.yaml";

/// The file of a run's metrics: one JSON object per line.
pub(crate) const METRICS: &str = "metrics.jsonl";

/// First words of a file that [`write_resolved`] wrote; a user's configuration may have the same name.
pub(crate) const RESOLVED: &str = "# Every setting of this run, as resolved by rlhf ";

/// Writes every setting of a run to the file `path`, as YAML that `--config` reads back, except consent to overwrite.
///
/// Errors: [`Error::Io`]; [`Error::Invalid`] if a path among the settings is not UTF-8.
pub fn write_resolved(config: &impl Serialize, path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let unwritten =
        |error: String| Error::invalid(path, format!("the configuration cannot be written as YAML: {error}"));
    let settings = match serde_json::to_value(config).map_err(|error| unwritten(error.to_string()))? {
        Value::Object(settings) => Value::Object(written(settings)),
        other => other,
    };
    let settings = serde_saphyr::to_string(&settings).map_err(|error| unwritten(error.to_string()))?;
    let text = format!("{RESOLVED}{}; null: none, or left to the run.\n{settings}", env!("CARGO_PKG_VERSION"));
    rlhf_base::weights::write_text(path, &text)
}

/// Returns the settings in the `config.yaml` that a run wrote to the folder `dir`, if the file is complete.
pub(crate) fn resolved_settings(dir: &Path) -> Option<Value> {
    let text = files::read_text(&dir.join(CONFIG)).ok().filter(|text| text.starts_with(RESOLVED))?;
    match serde_saphyr::from_str(&text).ok()? {
        Value::Object(settings) => Some(Value::Object(read_back(settings))),
        other => Some(other),
    }
}

/// Returns whether the run in the folder `dir` has a line of metrics of an update. A line of step 0 is an evaluation before the first
/// update.
pub(crate) fn has_updates(dir: &Path) -> bool {
    let lines = std::fs::read(dir.join(METRICS)).unwrap_or_default();
    let is_initial_evaluation = |line: &Value| line["step"].as_f64() == Some(0.0);
    let mut lines = lines.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    lines.any(|line| !serde_json::from_slice(line).is_ok_and(|line| is_initial_evaluation(&line)))
}

/// Returns whether a run wrote this `config.yaml`. A user's file of this name may hold anything.
pub(crate) fn is_of_run(text: &[u8]) -> bool {
    text.starts_with(RESOLVED.as_bytes())
}

/// Returns the text of a configuration that [`write_resolved`] wrote, without the secrets of its command lines and addresses; `None` if
/// it has none, or was written by a user.
///
/// # Errors
/// If it is not YAML: the reason.
pub(crate) fn resolved_without_programs(text: &[u8]) -> std::result::Result<Option<String>, String> {
    if !text.starts_with(RESOLVED.as_bytes()) {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(text);
    let header = text.lines().next().unwrap_or_default();
    let wrong =
        |error: String| format!("expected settings of a run in YAML: {}", error.lines().next().unwrap_or_default());
    let settings: Map<String, Value> = serde_saphyr::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let shown = without_programs(&settings);
    if shown == settings {
        return Ok(None);
    }
    let shown = serde_saphyr::to_string(&shown).map_err(|error| wrong(error.to_string()))?;
    Ok(Some(format!(
        "{header}\n# Arguments of programs, and passwords and queries of addresses, are left out: `...`.\n{shown}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_to_publish_has_all_settings_but_no_arguments_of_programs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.yaml");
        let text = |settings: Value| {
            write_resolved(&settings, &path).unwrap();
            resolved_without_programs(&std::fs::read(&path).unwrap()).unwrap()
        };
        let plain = serde_json::json!({"lr": 3e-6, "reward_command": "judge", "report_to": ["wandb"], "reward": []});
        assert_eq!(text(plain), None);
        // The file of a GRPO run has another name for the rewards.
        let group_settings =
            text(serde_json::json!({"preset": "grpo", "reward": ["command:judge --api_key pw123"]})).unwrap();
        assert!(group_settings.contains("reward_funcs") && !group_settings.contains("pw123"), "{group_settings}");
        let shown = text(serde_json::json!({
            "learning_rate": 3e-6,
            "reward_command": "python3 judge.py --api_key pw123",
            "reward": ["a=command:judge pw123", "b=length"],
            "reward_url": "https://me:pw123@host/x?key=pw123",
            "report_to": ["wandb", "command:env KEY=pw123 send"],
            "run_name": "1",
        }));
        let shown = shown.unwrap();
        assert!(shown.starts_with(RESOLVED) && !shown.contains("pw123"), "{shown}");
        let read: Value = serde_saphyr::from_str(&shown).unwrap();
        let expected = serde_json::json!({
            "learning_rate": 3e-6,
            "reward_command": "python3 ...",
            "reward": ["a=command:judge ...", "b=length"],
            "reward_url": "https://...@host/x?...",
            "report_to": ["wandb", "command:env ..."],
            "run_name": "1",
        });
        assert_eq!(read, expected);
        assert_eq!(resolved_without_programs(b"reward_command: judge pw123\n"), Ok(None), "a user's file");
    }
}
