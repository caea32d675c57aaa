//! Settings of the trackers of a run: wandb, MLflow, trackio, TensorBoard, and programs of the user.

use std::fmt::Display;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{Choices, JsonObject, LOGGING, NONE, Setting, Settings, no_effect, refuse};

/// Reports of a run beside the files of its output folder.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct TrackingConfig {
    /// Where to report the run besides the files of `output_dir`: tensorboard, wandb, mlflow, trackio, or command:PROGRAM for a program
    /// that reads JSON lines; several are separated by spaces. `all` is TensorBoard and each tracker whose Python package is installed
    /// [default: none].
    #[setting(alias = "log_with", heading = LOGGING, several, resume = Free, short = "trackers: wandb, tensorboard, ...")]
    pub report_to: Vec<ReportTo>,
    /// Names of the metrics in TensorBoard and in the trackers: `plain` as in `metrics.jsonl`, `trl` as in TRL's trainers, such as
    /// `train/objective/kl` and `eval/loss`.
    #[setting(heading = LOGGING, default = "plain", resume = Free)]
    pub tensorboard_tags: TensorboardTags,
    /// Name of the run in trackers [default: the name of `output_dir`].
    #[setting(heading = LOGGING, resume = Free)]
    pub run_name: Option<String>,
    /// Project of the run in wandb and trackio, and experiment in MLflow [default: as WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME, else
    /// rlhf].
    #[setting(alias = "tracker_project_name", heading = LOGGING, resume = Free)]
    pub project: Option<String>,
    /// Further arguments of the trackers' clients, as a JSON object for each tracker, such as '{"wandb": {"entity": "team"}}'.
    #[setting(heading = LOGGING, resume = Free)]
    pub tracker_kwargs: Option<JsonObject>,
    /// Upload the model in `output_dir` to the trackers at the end of the run.
    #[setting(heading = LOGGING, resume = Free)]
    pub log_model: bool,
}

/// Destination of the events of a run besides the files of its output folder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ReportTo {
    /// Nowhere.
    #[default]
    None,
    /// TensorBoard, and each tracker whose Python package is installed.
    All,
    /// TensorBoard event files in the output folder.
    Tensorboard,
    /// Weights & Biases.
    Wandb,
    /// MLflow.
    Mlflow,
    /// Trackio.
    Trackio,
    /// A program, started by `sh -c`, that reads the events as JSON lines.
    Command(String),
}

/// Prefix of a program's command line.
const COMMAND: &str = "command:";

impl ReportTo {
    /// Trackers whose own Python client gets the events.
    pub(crate) const CLIENTS: [Self; 3] = [Self::Wandb, Self::Mlflow, Self::Trackio];
}

impl Display for ReportTo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::All => f.write_str("all"),
            Self::Tensorboard => f.write_str("tensorboard"),
            Self::Wandb => f.write_str("wandb"),
            Self::Mlflow => f.write_str("mlflow"),
            Self::Trackio => f.write_str("trackio"),
            Self::Command(line) => write!(f, "{COMMAND}{line}"),
        }
    }
}

impl Serialize for ReportTo {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ReportTo {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Option::<String>::deserialize(deserializer)?.unwrap_or_else(|| NONE.into());
        let error = || serde::de::Error::custom(format!("expected {}, found `{text}`", Self::EXPECTED));
        Self::read(&text).ok_or_else(error)
    }
}

impl Setting for ReportTo {
    const NAME: &'static str = "NAME";
    const EXPECTED: &'static str =
        "none, all, tensorboard, wandb, mlflow, trackio or command:PROGRAM; several are separated by spaces";

    fn read(text: &str) -> Option<Self> {
        if let Some(line) = text.strip_prefix(COMMAND) {
            return (!line.trim().is_empty()).then(|| Self::Command(line.into()));
        }
        let name = text.to_ascii_lowercase();
        let none = ["none", "null"].contains(&name.as_str()).then_some(Self::None);
        let all = [Self::All, Self::Tensorboard, Self::Wandb, Self::Mlflow, Self::Trackio];
        none.or_else(|| all.into_iter().find(|one| one.to_string() == name))
    }
}

/// Names of metrics in TensorBoard and in trackers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
pub enum TensorboardTags {
    /// As in `metrics.jsonl`.
    Plain,
    /// As transformers' callback names what TRL's trainers log: `eval_loss` is `eval/loss`, all others start with `train/`.
    Trl,
}

impl TensorboardTags {
    /// Returns the tag of the metric `name`.
    pub(crate) fn tag(self, name: &str) -> String {
        match (self, name.strip_prefix("eval_")) {
            (Self::Plain, _) => name.into(),
            (Self::Trl, Some(name)) => format!("eval/{name}"),
            (Self::Trl, None) if name.starts_with("eval/") => name.into(),
            (Self::Trl, None) => format!("train/{name}"),
        }
    }
}

impl TrackingConfig {
    /// Returns whether the run writes TensorBoard's event files.
    pub(crate) fn has_tensorboard(&self) -> bool {
        self.report_to.iter().any(|to| matches!(to, ReportTo::Tensorboard | ReportTo::All))
    }

    /// Returns whether the run reports to a tracker other than TensorBoard.
    pub fn has_programs(&self) -> bool {
        !self.programs().is_empty()
    }

    /// Returns the trackers that are programs, each once, with whether it may be missing.
    pub(crate) fn programs(&self) -> Vec<(ReportTo, bool)> {
        let mut programs: Vec<(ReportTo, bool)> = Vec::new();
        let named = self.report_to.iter().filter_map(|to| match to {
            ReportTo::None | ReportTo::Tensorboard | ReportTo::All => None,
            to => Some((to.clone(), false)),
        });
        let all = self.report_to.contains(&ReportTo::All).then(|| ReportTo::CLIENTS.map(|to| (to, true)));
        for (to, may_lack) in named.chain(all.into_iter().flatten()) {
            if !programs.iter().any(|(other, _)| *other == to) {
                programs.push((to, may_lack));
            }
        }
        programs
    }

    /// Returns the arguments in `tracker_kwargs` for this tracker.
    pub(crate) fn kwargs(&self, name: &str) -> Map<String, Value> {
        let kwargs = self.tracker_kwargs.as_ref().and_then(|kwargs| kwargs.get(name));
        kwargs.and_then(Value::as_object).cloned().unwrap_or_default()
    }

    /// Checks every setting.
    pub(crate) fn check(&self) -> Result<()> {
        rlhf_base::schema::all([
            if self.report_to.contains(&ReportTo::None) && self.report_to.iter().any(|to| *to != ReportTo::None) {
                let others = self.report_to.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
                refuse(
                    name_of!(self.report_to),
                    format!(" = {others}: expected none alone, or destinations without it"),
                )
            } else {
                Ok(())
            },
            match self.tensorboard_tags {
                TensorboardTags::Trl if !self.has_tensorboard() && !self.has_programs() => {
                    no_effect(name_of!(self.tensorboard_tags), "trl", "without report_to = tensorboard or a tracker")
                }
                _ => Ok(()),
            },
            if self.log_model && !self.has_programs() {
                no_effect(
                    name_of!(self.log_model),
                    true,
                    "without a tracker in report_to: wandb, mlflow, trackio or command:PROGRAM",
                )
            } else {
                Ok(())
            },
            self.tracker_kwargs.as_ref().map_or(Ok(()), check_kwargs),
        ])
    }
}

/// Checks that `tracker_kwargs` has an object for each tracker, and no secret: it is written to `config.yaml`. Values are not shown.
fn check_kwargs(kwargs: &JsonObject) -> Result<()> {
    let form = r#"expected JSON of the form {"wandb": {"entity": "team"}}"#;
    let entries = match kwargs.entries() {
        Ok(entries) => entries,
        Err(found) => return refuse("tracker_kwargs", format!(": {form}, found {found}")),
    };
    for (name, arguments) in entries {
        let names = ReportTo::CLIENTS.map(|to| to.to_string());
        if !names.contains(name) && name != "tensorboard" && name != "command" {
            return refuse(
                "tracker_kwargs",
                format!(": expected entries of wandb, mlflow, trackio, tensorboard or command, found `{name}`"),
            );
        }
        if !arguments.is_object() {
            return refuse("tracker_kwargs", format!(": {name}: {form}, found no object"));
        }
        if let Some(place) = secret_in(arguments) {
            return refuse(
                "tracker_kwargs",
                format!(
                    ": {name}{place}: expected no secret, as settings are written to config.yaml; set the tracker's own \
                 environment variable, such as WANDB_API_KEY, MLFLOW_TRACKING_USERNAME with MLFLOW_TRACKING_PASSWORD, HF_TOKEN or \
                 TRACKIO_WEBHOOK_URL"
                ),
            );
        }
    }
    Ok(())
}

/// Returns the place of an entry that looks like a secret: by its name, or an address with a password or a query.
fn secret_in(value: &Value) -> Option<String> {
    const NAMES: [&str; 9] =
        ["key", "token", "password", "passwd", "secret", "credentials", "webhook_url", "authorization", "cookie"];
    let is_secret = |text: &str| text.contains("://") && rlhf_base::safe_text::one_line(text) != text;
    match value {
        Value::Object(entries) => entries.iter().find_map(|(name, value)| {
            let ends = |secret: &&str| name.to_ascii_lowercase().ends_with(*secret);
            if NAMES.iter().any(ends) && !value.is_null() {
                return Some(format!(".{name}"));
            }
            secret_in(value).map(|place| format!(".{name}{place}"))
        }),
        Value::Array(values) => values.iter().find_map(secret_in),
        Value::String(text) => is_secret(text).then(String::new),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracking(report_to: &[&str], kwargs: Option<&str>) -> TrackingConfig {
        TrackingConfig {
            report_to: report_to.iter().map(|text| ReportTo::read(text).unwrap()).collect(),
            tracker_kwargs: kwargs.map(|text| JsonObject::read(text).unwrap()),
            ..rlhf_base::schema::defaults()
        }
    }

    #[test]
    fn tags_of_tensorboard_are_those_of_the_metrics_or_of_trl() {
        let tags = ["objective/kl", "lr", "eval_loss", "eval/score"].map(|name| TensorboardTags::Trl.tag(name));
        assert_eq!(tags, ["train/objective/kl", "train/lr", "eval/loss", "eval/score"]);
        assert_eq!(TensorboardTags::Plain.tag("eval_loss"), "eval_loss");
    }

    #[test]
    fn each_tracker_is_started_once_and_those_of_all_may_be_missing() {
        let config = tracking(&["mlflow", "command:a b", "ALL", "mlflow"], None);
        config.check().unwrap();
        let programs: Vec<_> = config.programs().into_iter().map(|(to, may_lack)| (to.to_string(), may_lack)).collect();
        let expected = [("mlflow", false), ("command:a b", false), ("wandb", true), ("trackio", true)];
        assert_eq!(programs, expected.map(|(name, may_lack)| (name.to_string(), may_lack)));
        assert!(config.has_tensorboard() && !tracking(&["wandb"], None).has_tensorboard());
        assert!(tracking(&["none"], None).programs().is_empty() && tracking(&[], None).programs().is_empty());
        for text in ["", "comet_ml", "wandb,mlflow", "command:", "command: "] {
            assert_eq!(ReportTo::read(text), None, "{text}");
        }
    }

    #[test]
    fn secrets_and_other_forms_of_tracker_kwargs_are_refused_without_their_values() {
        let refused = |kwargs: &str| tracking(&["wandb"], Some(kwargs)).check().unwrap_err().to_string();
        for (kwargs, place) in [
            (r#"{"wandb": {"settings": {"api_key": "zzz"}}}"#, "wandb.settings.api_key: expected no secret"),
            (r#"{"trackio": {"webhook_url": "https://zzz"}}"#, "trackio.webhook_url: expected no secret"),
            (r#"{"mlflow": {"tracking_uri": "http://me:zzz@host/"}}"#, "mlflow.tracking_uri: expected no secret"),
            (r#"{"trackio": {"server_url": "http://h/?write=zzz"}}"#, "trackio.server_url: expected no secret"),
            (r#"{"wandb": "zzz"}"#, "wandb: expected JSON of the form"),
            (r#"["zzz"]"#, "expected JSON of the form {\"wandb\": {\"entity\": \"team\"}}, found a list"),
            (r#"{"wandb": {"key": "zzz""#, "found text that is not JSON (column 23)"),
            (r#"{"comet": {}}"#, "expected entries of wandb, mlflow, trackio, tensorboard or command, found `comet`"),
        ] {
            let error = refused(kwargs);
            assert!(error.starts_with("tracker_kwargs: ") && error.contains(place), "{error}");
            assert!(!error.contains("zzz"), "{error}");
        }
        let fine = r#"{"wandb": {"tags": ["a"], "settings": {"x": 1}}, "mlflow": {"tracking_uri": "http://h:5000"}}"#;
        let config = tracking(&["wandb"], Some(fine));
        config.check().unwrap();
        assert_eq!(config.kwargs("mlflow")["tracking_uri"], "http://h:5000");
        assert!(config.kwargs("trackio").is_empty());
    }

    #[test]
    fn settings_without_an_effect_are_refused() {
        let none = TrackingConfig { log_model: true, ..tracking(&["tensorboard"], None) };
        assert!(none.check().unwrap_err().to_string().starts_with("log_model = true has no effect without a tracker"));
        let both = tracking(&["none", "wandb"], None).check().unwrap_err().to_string();
        assert_eq!(both, "report_to = none wandb: expected none alone, or destinations without it");
    }
}
