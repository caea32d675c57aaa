//! The sink of a driver: a program that has started the run, receives its events, and may stop it. `docs/internals/driver.md` has the
//! protocol.

use crate::run::event::{Event, SampleSource};
use rlhf_base::signals::stop_requested;
use rlhf_base::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// The environment variable with the path of the driver's socket.
const VARIABLE: &str = "RLHF_DRIVER";
/// Version of the protocol. It changes if a driver for an older version would be wrong, not if something is added.
const PROTOCOL: u32 = 1;

/// Wishes of a driver after an update.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    /// End the run after this update.
    pub(crate) stop: bool,
    /// Write a checkpoint.
    pub(crate) save: bool,
    /// Evaluate on the held-out rows, if there are any.
    pub(crate) evaluate: bool,
}

/// The first line of a driver.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Hello {
    /// Whether the driver replies after each update.
    replies: bool,
}

/// A connection to the driver of this process.
pub(crate) struct Driver {
    lines: Arc<Outgoing>,
    replies: BufReader<UnixStream>,
    /// Whether the driver replies after each update.
    replies_to_steps: bool,
}

/// The lines to a driver. A line that cannot be written is dropped: [`Driver::ask`] notices that the driver is gone.
pub(crate) struct Outgoing(Mutex<UnixStream>);

impl Outgoing {
    /// Writes a line; returns whether the driver is still connected.
    fn write(&self, line: &Value) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write_all(format!("{line}\n").as_bytes()).is_ok()
    }

    /// Tells the current phase of the run.
    pub(crate) fn phase(&self, phase: &str) {
        self.write(&json!({"event": "phase", "phase": phase}));
    }
}

impl Driver {
    /// Connects to the driver that `RLHF_DRIVER` names, if there is one, and tells it what begins.
    ///
    /// # Errors
    /// If nothing listens at its socket, or it does not reply.
    pub(crate) fn connect(begin: &Value) -> Result<Option<Self>> {
        std::env::var_os(VARIABLE).map(|path| Self::connect_to(Path::new(&path), begin)).transpose()
    }

    fn connect_to(path: &Path, begin: &Value) -> Result<Self> {
        let failed = |e: std::io::Error| {
            Error::Run(format!("{VARIABLE}={}: expected the socket of a driver: {e}", path.display()))
        };
        let stream = UnixStream::connect(path).map_err(failed)?;
        let replies = BufReader::new(stream.try_clone().map_err(failed)?);
        let lines = Arc::new(Outgoing(Mutex::new(stream)));
        let mut driver = Self { lines, replies, replies_to_steps: false };
        let mut first = json!({"event": "begin", "protocol": PROTOCOL});
        if let (Some(first), Some(more)) = (first.as_object_mut(), begin.as_object()) {
            first.extend(more.clone());
        }
        driver.lines.write(&first);
        let hello: Hello = driver.reply().map_err(failed)?;
        driver.replies_to_steps = hello.replies;
        Ok(driver)
    }

    /// The lines to the driver, for messages that are no events.
    pub(crate) fn lines(&self) -> Arc<Outgoing> {
        self.lines.clone()
    }

    /// Reads a line.
    fn reply<T: for<'de> Deserialize<'de>>(&mut self) -> std::io::Result<T> {
        let mut line = String::new();
        if self.replies.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_str(&line)?)
    }

    /// Tells the driver that update `step` is complete, and returns what it asks for; [`None`] if the driver is gone.
    pub(crate) fn ask(&mut self, step: usize) -> Option<Asked> {
        let is_there = self.lines.write(&json!({"event": "step", "step": step}));
        if self.replies_to_steps { self.reply().ok() } else { is_there.then(Asked::default) }
    }

    /// Passes an event on.
    pub(crate) fn receive(&self, event: &Event<'_>) {
        let line = match event {
            Event::Update { step, metrics } => json!({"event": "log", "step": step, "metrics": metrics}),
            Event::Evaluation { step, evaluation, .. } => {
                json!({"event": "evaluation", "step": step, "metrics": evaluation.metrics})
            }
            Event::Samples { step, source, samples, .. } => {
                let source = match source {
                    SampleSource::SamplePrompts => "sample_prompts",
                    SampleSource::Rollout => "rollout",
                };
                json!({"event": "samples", "step": step, "source": source, "samples": samples})
            }
            Event::Warning { step, warning } => {
                json!({"event": "warning", "step": step, "kind": warning.kind.name(), "message": warning.message})
            }
            Event::RolledBack { step, to, message } => {
                json!({"event": "rolled_back", "step": step, "to": to, "message": message})
            }
            Event::Saved { dir } => json!({"event": "saved", "dir": dir}),
            // Rollouts are in files of the run.
            Event::Rollout { .. } => return,
        };
        self.lines.write(&line);
    }

    /// Tells how the run has ended, by the name of its outcome.
    pub(crate) fn end(&self, outcome: &str, message: Option<&str>) {
        let by_signal = stop_requested();
        self.lines.write(&json!({"event": "end", "outcome": outcome, "by_signal": by_signal, "message": message}));
    }
}

/// Returns whether a Python program drives this process. It has then written the configuration file.
pub fn has_driver() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// Tells the driver of this process, if it has one, the error that ends the program, also before a run begins.
pub fn report_error(message: &str) {
    let Some(path) = std::env::var_os(VARIABLE) else { return };
    if let Ok(mut stream) = UnixStream::connect(path) {
        let _ = stream.write_all(format!("{}\n", json!({"event": "error", "message": message})).as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlhf_base::metrics::Metrics;
    use std::os::unix::net::UnixListener;
    use std::thread;

    #[test]
    fn a_driver_hears_of_each_event_and_is_asked_after_each_update_until_it_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("driver");
        let listener = UnixListener::bind(&path).unwrap();
        let driver_thread = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(|line| line.unwrap());
            let mut heard = vec![lines.next().unwrap()];
            stream.write_all(b"{\"replies\": true}\n").unwrap();
            heard.extend(lines.by_ref().take(3));
            stream.write_all(b"{\"save\": true}\n").unwrap();
            heard
        });
        let mut driver = Driver::connect_to(&path, &json!({"total": 9})).unwrap();
        driver.lines().phase("training");
        let mut metrics = Metrics::default();
        metrics.push("loss", 0.5);
        driver.receive(&Event::Update { step: 3, metrics: &metrics });
        assert_eq!(driver.ask(4), Some(Asked { save: true, ..Asked::default() }));
        let heard: Vec<Value> =
            driver_thread.join().unwrap().iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(heard[0], json!({"event": "begin", "protocol": PROTOCOL, "total": 9}));
        assert_eq!(heard[1], json!({"event": "phase", "phase": "training"}));
        assert_eq!(heard[2], json!({"event": "log", "step": 3, "metrics": {"loss": 0.5}}));
        assert_eq!(heard[3], json!({"event": "step", "step": 4}));
        assert_eq!(driver.ask(5), None, "it is gone");
        let missing = Driver::connect_to(&dir.path().join("none"), &json!({})).err().unwrap().to_string();
        assert!(missing.contains("none: expected the socket of a driver: "), "{missing}");
    }
}
