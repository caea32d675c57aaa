//! The sink of trackers: wandb, MLflow, trackio, and programs of the user.
//!
//! Each tracker is a process that reads the events as JSON lines from its standard input. For wandb, MLflow and trackio it is
//! `tracker.py`, which is part of this program and runs in the user's Python, as the trackers' clients do.
//! `docs/guides/trackers.md` documents the lines.
//!
//! No tracker ends a run or delays its updates: a line is appended to a queue of bounded size, threads write the queue and read the
//! replies, and the end of the run waits for a limited time.

mod ids;
mod process;

use crate::run::event::{Event, Sample, SampleSource};
use crate::run::output_dir::model_files;
use crate::run::settings::RunConfig;
use crate::run::sinks::Reached;
use crate::run::sinks::console::Console;
use crate::run::tracking::{ReportTo, TensorboardTags, TrackingConfig};
use ids::Ids;
use process::{Process, Shared, Until};
use rlhf_base::metrics::Metrics;
use rlhf_base::safe_text::one_line;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Maximum wait for the trackers at the end of a run. `RLHF_TRACKER_TIMEOUT` sets another number of seconds.
const END_WAIT: Duration = Duration::from_secs(30);
/// Maximum wait for the upload of a model.
const UPLOAD_WAIT: Duration = Duration::from_secs(20 * 60);
/// The variable with another maximum wait at the end of a run, in seconds.
const TIMEOUT: &str = "RLHF_TRACKER_TIMEOUT";
/// Version of the lines.
const PROTOCOL: u32 = 1;

/// End of a run, as trackers know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All updates are done.
    Finished,
    /// Ended before its last update, on request or by an alarm.
    Stopped,
    /// Ended by an error.
    Failed,
}

impl Outcome {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
        }
    }
}

/// Passes the events of a run to its trackers.
pub(crate) struct Trackers {
    config: TrackingConfig,
    dir: PathBuf,
    command: &'static str,
    reached: Reached,
    console: Console,
    running: Vec<Process>,
    started: bool,
    /// Whether the output folder holds the final model.
    has_model: bool,
    ended: bool,
}

impl Trackers {
    /// Returns the trackers of the run of `command` that `run` sets; they are started by [`Trackers::start`].
    pub(crate) fn new(run: &RunConfig, command: &'static str, reached: Reached, console: Console) -> Self {
        Self {
            config: run.tracking.clone(),
            dir: run.output_dir.clone(),
            command,
            reached,
            console,
            running: Vec::new(),
            started: false,
            has_model: false,
            ended: false,
        }
    }

    /// Starts the trackers with the `settings` of the run, once. A tracker that has a run of this output folder continues it.
    pub(crate) fn start(&mut self, settings: &Map<String, Value>) {
        if std::mem::replace(&mut self.started, true) {
            return;
        }
        let ids = Arc::new(Ids::read(&self.dir));
        let mut commands = 0;
        for (tracker, may_lack) in self.config.programs() {
            // A command line may hold a secret, so it is not used as a name.
            let name = match &tracker {
                ReportTo::Command(_) => {
                    commands += 1;
                    if commands == 1 { "command".into() } else { format!("command-{commands}") }
                }
                client => client.to_string(),
            };
            let start = self.first_line(&name, ids.get(&name), settings);
            let shared = Shared::new(name, self.console, ids.clone(), may_lack);
            if let Some(mut process) = Process::start(&tracker, shared) {
                process.send(&start);
                self.running.push(process);
            }
        }
    }

    /// Returns the first line for a tracker, which continues the run `id` if there is one.
    fn first_line(&self, name: &str, id: Option<String>, settings: &Map<String, Value>) -> Value {
        let dir = std::path::absolute(&self.dir).unwrap_or_else(|_| self.dir.clone());
        let folder = dir.file_name().map_or("run".into(), |name| name.to_string_lossy().into_owned());
        let resume =
            id.map(|id| json!({"id": id, "updates": self.reached.updates, "rollbacks": self.reached.rollbacks}));
        let kind = if name.starts_with("command") { "command" } else { name };
        let named = std::env::var("WANDB_NAME").ok().filter(|text| kind == "wandb" && !text.is_empty());
        json!({
            "type": "start",
            "protocol": PROTOCOL,
            "version": env!("CARGO_PKG_VERSION"),
            "tracker": name,
            "kwargs": self.config.kwargs(kind),
            "command": self.command,
            "name": self.config.run_name.clone().or(named).unwrap_or(folder),
            "project": self.config.project,
            "output_dir": dir.to_string_lossy(),
            "config": settings,
            "resume": resume,
        })
    }

    /// Passes on an event that concerns trackers.
    pub(crate) fn receive(&mut self, event: &Event<'_>) {
        if self.running.is_empty() {
            return;
        }
        let line = match event {
            Event::Update { step, metrics } => {
                json!({"type": "metrics", "step": step, "metrics": named(metrics, self.config.tensorboard_tags)})
            }
            Event::Samples { step, episode, source: SampleSource::SamplePrompts, samples } => {
                table(*step, *episode, "sample_prompts", samples)
            }
            Event::Samples { step, episode, source: SampleSource::Rollout, samples } => {
                table(*step, *episode, "rollout", samples)
            }
            Event::Evaluation { step, episode, evaluation } => {
                table(*step, *episode, "evaluation", &evaluation.samples)
            }
            Event::Warning { step, warning } => {
                json!({"type": "alarm", "step": step, "name": warning.kind.name(), "message": warning.message})
            }
            Event::RolledBack { step, to, message } => {
                json!({"type": "rollback", "step": step, "to": to, "message": message})
            }
            Event::Saved { dir } => self.saved(dir),
            Event::Rollout { .. } => return,
        };
        self.running.iter_mut().for_each(|process| process.send(&line));
    }

    /// Returns the line about a saved folder, with the metric of the best model if the folder holds that model.
    fn saved(&mut self, dir: &Path) -> Value {
        let best = crate::run::best::read(dir);
        let kind = match (dir == self.dir, &best) {
            (true, _) => "final",
            (false, Some(_)) => "best",
            (false, None) => "checkpoint",
        };
        self.has_model |= kind == "final";
        let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.to_path_buf());
        json!({"type": "saved", "kind": kind, "dir": dir.to_string_lossy(), "best": best})
    }

    /// Ends the trackers' runs, and waits for them for a limited time. With `log_model` they get the model of a finished run first.
    pub(crate) fn end(&mut self, outcome: Outcome, message: Option<&str>) {
        if std::mem::replace(&mut self.ended, true) || self.running.is_empty() {
            return;
        }
        let uploads = self.config.log_model && outcome == Outcome::Finished && self.has_model;
        if uploads {
            let dir = std::path::absolute(&self.dir).unwrap_or_else(|_| self.dir.clone());
            let name = dir.file_name().map_or("model".into(), |name| name.to_string_lossy().into_owned());
            let name = self.config.run_name.clone().unwrap_or(name);
            let files = model_files(&dir);
            let line = json!({"type": "artifact", "name": name, "dir": dir.to_string_lossy(), "files": files});
            self.running.iter_mut().for_each(|process| process.send(&line));
            let names: Vec<&str> = self.running.iter().map(Process::name).collect();
            self.console.announce_note(&format!("uploading the model to {}", names.join(", ")));
        }
        let message = message.map(|message| one_line(message).into_owned());
        let line = json!({"type": "end", "status": outcome.name(), "message": message});
        self.running.iter_mut().for_each(|process| process.end(&line));
        let wait = end_wait().unwrap_or_else(|found| {
            let seconds = END_WAIT.as_secs();
            self.console.announce_warning(&format!(
                "{TIMEOUT}: expected a number of seconds, found `{found}`; the limit is {seconds} s"
            ));
            END_WAIT
        });
        let mut until = Until::new(if uploads { UPLOAD_WAIT.max(wait) } else { wait });
        self.running.drain(..).for_each(|process| process.wait(&mut until));
    }
}

impl Drop for Trackers {
    /// Ends the trackers' runs as failed, if nothing else has ended them.
    fn drop(&mut self) {
        self.end(Outcome::Failed, None);
    }
}

/// Returns the line with a table of responses, without the data of single tokens: text, log-probability, whether it was sampled.
fn table(step: usize, episode: usize, source: &str, samples: &[Sample]) -> Value {
    let row = |sample: &Sample| {
        let mut row = serde_json::to_value(sample).expect("a sample has a JSON form");
        if let Some(row) = row.as_object_mut() {
            row.retain(|name, _| !["tokens", "logprobs", "inserted"].contains(&name.as_str()));
        }
        row
    };
    let rows: Vec<Value> = samples.iter().map(row).collect();
    json!({"type": "samples", "step": step, "episode": episode, "source": source, "samples": rows})
}

/// Returns the maximum wait at the end of a run.
///
/// # Errors
/// The text of the variable, if it is not a number of seconds.
fn end_wait() -> Result<Duration, String> {
    let Some(text) = std::env::var(TIMEOUT).ok().filter(|text| !text.is_empty()) else { return Ok(END_WAIT) };
    let seconds = text.trim().parse::<f64>().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or(text)
}

/// Returns the metrics by the names of `tags`.
fn named(metrics: &Metrics, tags: TensorboardTags) -> Value {
    match serde_json::to_value(metrics) {
        Ok(Value::Object(metrics)) => metrics.into_iter().map(|(name, value)| (tags.tag(&name), value)).collect(),
        _ => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trackers_get_the_names_of_trl_where_they_are_set() {
        let mut metrics = Metrics::default();
        metrics.push("step", 3.0);
        metrics.push("objective/kl", 0.5);
        metrics.push("eval/score", 0.25);
        let expected = json!({"train/step": 3.0, "train/objective/kl": 0.5, "eval/score": 0.25});
        let found = named(&metrics, TensorboardTags::Trl);
        for (name, value) in expected.as_object().unwrap() {
            assert_eq!(found[name].as_f64(), value.as_f64(), "{found}");
        }
        assert_eq!(named(&metrics, TensorboardTags::Plain), serde_json::to_value(&metrics).unwrap());
    }
}
