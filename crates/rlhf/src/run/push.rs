//! Pushes of a run's models to the hub: which files are pushed, and the thread that uploads them while the run continues.
//!
//! A push opens its files when it is due, and uploads them on a thread of rank 0, so training does not wait for the network. A
//! push that fails gives a warning. The run waits for the push at its end: if that fails, the run fails, but its model is saved.

pub(crate) mod settings;

use crate::run::checkpoint::{BEST, STATE, UNFINISHED};
use crate::run::output_dir::{CONFIG, METRICS, resolved_settings};
use crate::run::push::settings::{HubConfig, HubStrategy};
use crate::run::resolved::{is_of_run, resolved_without_programs};
use crate::terminal;
use rlhf_base::weights::read_json;
use rlhf_base::{Error, Result};
use rlhf_hub::is_hub_name;
use rlhf_hub::push::{Destination, LocalFile, Pushed, Repository, find_folder, open_folder};
use rlhf_lm::model::{AdapterFolder, BASE_MODEL};
use rlhf_lm::tokenizer;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

/// Files of a model besides its weights and its tokenizer.
const MODEL_FILES: [&str; 16] = [
    CONFIG,
    METRICS,
    "README.md",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
    ".gitattributes",
    ".gitignore",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
    "sentencepiece.bpe.model",
];

/// Returns whether the file at this path of the folder is pushed: a file of a model in Hugging Face format, or a run's configuration or
/// metrics. Other files are not pushed, because a run's folder may have texts of the data, logs, and files of the user. A path that ends
/// with a slash is a folder: only the folder of further chat templates is read.
pub(crate) fn is_of_model(path: &str) -> bool {
    let is_template =
        || tokenizer::is_further_template(path) || path.strip_suffix('/') == Some(tokenizer::FURTHER_TEMPLATES);
    MODEL_FILES.contains(&path) || tokenizer::FILES.contains(&path) || is_weights(path) || is_template()
}

/// Returns whether this is the name of a file of weights or of their index.
pub(crate) fn is_weights(path: &str) -> bool {
    let starts = ["model.", "model-", "adapter_model.", "adapter_model-", "pytorch_model.", "pytorch_model-"];
    let ends = [".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf"];
    let is_named = starts.iter().any(|start| path.starts_with(start)) && ends.iter().any(|end| path.ends_with(end));
    is_named && !path.contains('/')
}

/// Opens the files of the model in `dir`, a folder of a run, which may be replaced before they are uploaded.
///
/// # Errors
/// As [`open_folder`]; if `config.yaml` cannot be read.
pub(crate) fn open_model(dir: &Path) -> Result<Vec<LocalFile>> {
    without_programs(open_folder(dir, &is_of_model)?, |_| false)
}

/// Replaces each `config.yaml` that a run wrote by one without secrets: [`terminal::without_programs`]. One that no run wrote may have any
/// secret, so it is left out unless `is_asked` accepts it.
///
/// # Errors
/// If one cannot be read.
pub(crate) fn without_programs(files: Vec<LocalFile>, is_asked: impl Fn(&str) -> bool) -> Result<Vec<LocalFile>> {
    let shown = |file: LocalFile| {
        if file.name().rsplit('/').next() != Some(CONFIG) {
            return Ok(Some(file));
        }
        let name = file.name().to_string();
        let text = file.bytes()?;
        if !is_of_run(&text) {
            return Ok(is_asked(&name).then_some(file));
        }
        let shown = resolved_without_programs(&text).map_err(|why| Error::invalid(&name, why))?;
        Ok(Some(shown.map_or(file, |text| LocalFile::of(name, text))))
    };
    files.into_iter().filter_map(|file| shown(file).transpose()).collect()
}

/// Largest file that is searched for secrets.
const MOST_SEARCHED: u64 = 64 << 20;

/// Checks that no other file than the model's, up to 64 MiB, has a value that is left out of the pushed `config.yaml`: a run's states and
/// rollouts have all settings.
///
/// # Errors
/// If one does, or cannot be read.
pub(crate) fn check_secrets(dir: &Path, files: &[LocalFile]) -> Result<()> {
    // Each value is searched as it is, and escaped as in JSON, without the quotes.
    let escaped = |text: &str| Value::from(text).to_string().trim_matches('"').to_string();
    let programs = programs_of(dir);
    let written: Vec<_> = programs.iter().map(|(name, text)| (name, [text.clone(), escaped(text)])).collect();
    let is_searched = |file: &&LocalFile| !is_of_model(file.name()) && file.size() <= MOST_SEARCHED;
    for file in files.iter().filter(is_searched).take_while(|_| !written.is_empty()) {
        let bytes = file.bytes()?;
        let text = String::from_utf8_lossy(&bytes);
        let repeated = written.iter().find(|(_, forms)| forms.iter().any(|form| text.contains(form.as_str())));
        if let Some((name, _)) = repeated {
            let file = file.name();
            let message = format!(
                "it has the value of {name}, which may be secret: leave it out with --exclude {file}, or a pattern"
            );
            return Err(Error::invalid(dir.join(file), message));
        }
    }
    Ok(())
}

/// The command lines and addresses that may be secret in the settings of a run. `dir` is the folder of the run, or a folder in it.
fn programs_of(dir: &Path) -> Vec<(&'static str, String)> {
    let parent = dir.parent().and_then(resolved_settings);
    let states = [STATE, UNFINISHED].map(|name| read_json(&dir.join(name)).ok().map(|state| state["config"].clone()));
    let settings = [resolved_settings(dir), parent].into_iter().chain(states).flatten();
    settings.flat_map(|settings| settings.as_object().map(terminal::programs).unwrap_or_default()).collect()
}

/// Returns a warning if the model in `dir` is an adapter whose base is in a folder of this machine, which is not among the `files`
/// pushed.
pub(crate) fn local_base_warning(dir: &Path, files: &[LocalFile]) -> Option<String> {
    let adapter = AdapterFolder::find(dir).ok().flatten()?;
    let base = adapter.base_name().filter(|name| !is_hub_name(name))?;
    let base_folder = format!("{BASE_MODEL}/");
    if files.iter().any(|file| file.name().starts_with(&base_folder)) {
        return None;
    }
    Some(format!(
        "the adapter names its base by a folder of this machine, {base}, which is not pushed: nobody else can load it. Make a whole \
         model by `rlhf merge`, or set base_model_name_or_path in adapter_config.json to the base's name on the hub"
    ))
}

/// Returns the command that pushes `dir` to the place later.
pub(crate) fn command_to_push(dir: &Path, to: &Destination) -> String {
    let mut words = vec![terminal::program(), "push".into(), dir.display().to_string(), to.name.clone()];
    words.extend(to.revision.iter().flat_map(|revision| ["--revision".into(), revision.clone()]));
    words.extend((to.private == Some(true)).then(|| "--private".into()));
    terminal::shell_command(&[words], None).trim().to_string()
}

/// Files to push, and the title of their commit.
struct Job {
    files: Vec<LocalFile>,
    message: String,
    /// Whether waits and a progress bar are shown.
    shows: bool,
}

/// Pushes the models of a run.
pub(crate) struct Pusher {
    strategy: HubStrategy,
    always: bool,
    to: Destination,
    url: String,
    output_dir: PathBuf,
    jobs: Sender<Job>,
    ended: Receiver<Result<Pushed>>,
    /// Pushes that have not ended.
    pending: usize,
    /// Outcome of the last push.
    last: Option<Result<Pushed>>,
    /// The reason that the push at the end could not start.
    refused: Option<Error>,
}

impl Pusher {
    /// Returns warnings about the model of the run that has ended: [`local_base_warning`] and, with `hub_strategy = best`, that there
    /// is no best model.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let is_last = self.strategy == HubStrategy::Best && self.folder() == self.output_dir;
        let last = is_last.then(|| "hub_strategy = best: the run has no best model, so its last one is pushed".into());
        local_base_warning(&self.output_dir, &[]).into_iter().chain(last).collect()
    }

    /// Starts the thread that pushes the models of the run in `output_dir`.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub(crate) fn start(config: &HubConfig, repository: Repository, output_dir: &Path) -> Result<Self> {
        let (jobs, todo) = mpsc::channel::<Job>();
        let (done, ended) = mpsc::channel();
        let url = repository.url();
        let to = Destination { name: repository.name().into(), ..config.destination().unwrap_or_default() };
        let work = move || {
            for Job { files, message, shows } in todo {
                if done.send(repository.push(&files, &message, shows)).is_err() {
                    break;
                }
            }
        };
        let started = std::thread::Builder::new().name("push".into()).spawn(work);
        started.map_err(|error| Error::Run(format!("cannot start the thread that pushes to the hub: {error}")))?;
        Ok(Self {
            strategy: config.hub_strategy,
            always: config.hub_always_push,
            to,
            url,
            output_dir: output_dir.into(),
            jobs,
            ended,
            pending: 0,
            last: None,
            refused: None,
        })
    }

    /// Pushes the model in `dir` after `done` updates, if `strategy` is that of the run. Returns a warning.
    pub(crate) fn saved(&mut self, strategy: HubStrategy, dir: &Path, done: usize) -> Option<String> {
        let failed = self.poll(Duration::ZERO);
        if strategy != self.strategy {
            return failed;
        }
        if self.pending > 0 && !self.always && strategy == HubStrategy::EverySave {
            let left_out =
                format!("the checkpoint after update {done} is not pushed: an earlier one is still being uploaded");
            return failed.or(Some(left_out));
        }
        let what = if strategy == HubStrategy::Best { "Best model" } else { "Checkpoint" };
        let queued = open_model(dir).and_then(|mut files| {
            add(&mut files, &self.output_dir, &[CONFIG])?;
            self.queue(without_programs(files, |_| false)?, format!("{what}, after update {done}"), false)
        });
        failed.or(queued.err().map(|error| self.not_pushed(&error)))
    }

    /// Pushes the model of the run that has ended; [`Pusher::is_busy`] waits for it.
    pub(crate) fn saved_final(&mut self, shows: bool) {
        // The run has ended: its files stay as they are.
        let queued = find_folder(&self.folder(), &is_of_model).and_then(|mut files| {
            if self.folder() != self.output_dir {
                add(&mut files, &self.output_dir, &[CONFIG, METRICS, "README.md"])?;
            }
            self.queue(without_programs(files, |_| false)?, "End of training".into(), shows)
        });
        if let Err(error) = queued {
            self.refused = Some(error);
        }
    }

    /// Waits up to `time` for the end of a push. Returns whether any is left.
    pub(crate) fn is_busy(&mut self, time: Duration) -> bool {
        self.poll(time);
        self.pending > 0
    }

    /// Returns the outcome of the push at the end, as a line for the console.
    ///
    /// # Errors
    /// [`Error::NotPushed`], with the command that pushes the model later.
    pub(crate) fn outcome(&mut self) -> Result<String> {
        let interrupted = || Err(Error::Run("interrupted".into()));
        let last = match self.refused.take() {
            Some(error) => Err(error),
            None if self.pending > 0 => interrupted(),
            None => self.last.take().unwrap_or_else(interrupted),
        };
        match last {
            Ok(pushed) => {
                let ignored = match pushed.ignored.as_slice() {
                    [] => String::new(),
                    names => format!("; .gitignore excludes {}", names.join(", ")),
                };
                Ok(match pushed.files {
                    0 => format!("the model at {} is this one already{ignored}", self.url),
                    _ => format!("the model is at {}, commit {}{ignored}", self.url, pushed.commit),
                })
            }
            Err(error) => Err(Error::NotPushed(self.not_pushed(&error))),
        }
    }

    /// The folder that is pushed at the end: the best model's with `hub_strategy = best`, if it exists, else the output folder.
    fn folder(&self) -> PathBuf {
        let best = self.output_dir.join(BEST);
        if self.strategy == HubStrategy::Best && best.is_dir() { best } else { self.output_dir.clone() }
    }

    fn queue(&mut self, files: Vec<LocalFile>, message: String, shows: bool) -> Result<()> {
        let sent = self.jobs.send(Job { files, message, shows });
        sent.map_err(|_| Error::Run("the thread that pushes to the hub has ended".into()))?;
        self.pending += 1;
        Ok(())
    }

    /// Takes the outcomes of pushes that have ended; waits up to `time` for the first. Returns a warning if one failed.
    fn poll(&mut self, time: Duration) -> Option<String> {
        let mut time = time;
        let mut failed = None;
        while self.pending > 0 {
            let ended = match self.ended.recv_timeout(time) {
                Ok(ended) => ended,
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => {
                    self.pending = 1;
                    Err(Error::Run("the thread that pushes to the hub has ended".into()))
                }
            };
            self.pending -= 1;
            failed = ended.as_ref().err().map(|error| self.not_pushed(error)).or(failed);
            self.last = Some(ended);
            time = Duration::ZERO;
        }
        failed
    }

    /// The message for a failed push.
    fn not_pushed(&self, error: &Error) -> String {
        let folder = self.folder();
        let command = command_to_push(&folder, &self.to);
        format!("the model in {} is not on the hub: {error}; this pushes it: {command}", folder.display())
    }
}

/// Adds the files `names` of the folder `dir` that exist and are not in `files` yet.
fn add(files: &mut Vec<LocalFile>, dir: &Path, names: &[&str]) -> Result<()> {
    for name in names {
        let path = dir.join(name);
        if path.is_file() && !files.iter().any(|file| file.name() == *name) {
            files.push(LocalFile::open(*name, path)?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_a_command_line_of_the_settings_is_not_pushed() {
        let dir = tempfile::tempdir().unwrap();
        let command = r#"judge --key "pw123""#;
        let settings = serde_json::json!({"reward_command": command, "reward": ["json"]});
        crate::run::resolved::write_resolved(&settings, dir.path().join("config.yaml")).unwrap();
        let state = serde_json::json!({"config": settings}).to_string();
        let file = |name: &str, text: &str| LocalFile::of(name, text);
        check_secrets(dir.path(), &[file("notes.txt", "judge"), file("README.md", command)]).unwrap();
        for (name, text) in [("checkpoint-1/trainer_state.json", state.as_str()), ("train.log", command)] {
            let error =
                check_secrets(dir.path(), &[file("eval.json", "{}"), file(name, text)]).unwrap_err().to_string();
            assert!(error.contains(&format!("{name}: it has the value of reward_command")), "{error}");
            assert!(error.ends_with(&format!("leave it out with --exclude {name}, or a pattern")), "{error}");
        }
        // A checkpoint has its settings only in its state.
        let checkpoint = dir.path().join("checkpoint-1");
        std::fs::create_dir(&checkpoint).unwrap();
        for in_parent in [true, false] {
            if !in_parent {
                std::fs::remove_file(dir.path().join("config.yaml")).unwrap();
                std::fs::write(checkpoint.join("trainer_state.json"), &state).unwrap();
            }
            let error = check_secrets(&checkpoint, &[file("trainer_state.json", &state)]).unwrap_err().to_string();
            assert!(error.contains("trainer_state.json: it has the value of reward_command"), "{error}");
        }
        // A program without arguments has no secret.
        let settings = serde_json::json!({"reward_command": "judge"});
        crate::run::resolved::write_resolved(&settings, dir.path().join("config.yaml")).unwrap();
        check_secrets(dir.path(), &[file("train.log", "judge")]).unwrap();
    }

    #[test]
    fn a_config_yaml_that_no_run_wrote_is_pushed_only_if_it_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| LocalFile::of(name, text);
        let user_config = "hub_token: hf_secret\n";
        crate::run::resolved::write_resolved(&serde_json::json!({"seed": 1}), dir.path().join("config.yaml")).unwrap();
        let written = std::fs::read_to_string(dir.path().join("config.yaml")).unwrap();
        let names = |files: Vec<LocalFile>, is_asked: bool| -> Vec<String> {
            let files = without_programs(files, |_| is_asked).unwrap();
            files.iter().map(|file| file.name().to_string()).collect()
        };
        assert_eq!(names(vec![file("config.yaml", user_config), file("README.md", "")], false), ["README.md"]);
        assert_eq!(names(vec![file("config.yaml", user_config)], true), ["config.yaml"]);
        assert_eq!(names(vec![file("config.yaml", &written)], false), ["config.yaml"]);
        // A tracker does not get it either.
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        assert!(crate::run::output_dir::model_files(dir.path()).contains(&"config.yaml".to_string()));
        std::fs::write(dir.path().join("config.yaml"), user_config).unwrap();
        assert!(!crate::run::output_dir::model_files(dir.path()).contains(&"config.yaml".to_string()));
    }

    #[test]
    fn a_model_is_pushed_with_its_card_and_configuration_and_no_other_file() {
        for path in [
            "model.safetensors",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "adapter_model.safetensors",
            "pytorch_model.bin",
            "config.json",
            "tokenizer.json",
            "additional_chat_templates/",
            "additional_chat_templates/tool_use.jinja",
            "README.md",
            "config.yaml",
            "metrics.jsonl",
            ".gitattributes",
        ] {
            assert!(is_of_model(path), "{path}");
        }
        for path in [
            "checkpoint-20/",
            "best/",
            "samples/",
            "additional_chat_templates/notes.txt",
            "a/additional_chat_templates/tool_use.jinja",
            "value_model/",
            "onnx/model.safetensors",
            "a/config.json",
            ".git/",
            ".env",
            "trackers.json",
            "optimizer.safetensors",
            "trainer_state.json",
            "unfinished.json",
            "best.json",
            "run.json",
            "alarms.jsonl",
            "report.html",
            "events.out.tfevents.1.host",
            "config.yaml.tmp",
            "model.safetensors.tmp",
            "rng_state_0.pth",
            "credentials.json",
            "train.log",
            "model-notes.txt",
        ] {
            assert!(!is_of_model(path), "{path}");
        }
    }

    #[test]
    fn the_command_to_push_later_is_one_that_a_shell_parses() {
        let to = Destination { name: "me/x".into(), revision: Some("v2".into()), private: Some(true) };
        let command = command_to_push(Path::new("my runs/ppo"), &to);
        assert!(command.ends_with(" push 'my runs/ppo' me/x --revision v2 --private"), "{command}");
    }
}
