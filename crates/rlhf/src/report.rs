//! What a run tells: `metrics.jsonl` and TensorBoard for programs, a progress bar and tables for people.

use crate::config::{ReportTo, RunConfig};
use crate::metrics::Metrics;
use crate::model::{AdapterFolder, BASE_MODEL};
use crate::{Error, Result};
use comfy_table::{ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Where a run's words go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Console {
    /// A person watches: a progress bar and warnings on standard error, tables on standard output.
    Person,
    /// A program reads: the lines of `metrics.jsonl` on standard output too; warnings, and the progress bar where it is a
    /// terminal, on standard error.
    Program,
    /// Nobody does: files only. What a library's caller wants.
    Silent,
}

impl Console {
    /// A person if standard output is a terminal, else a program.
    pub fn detect() -> Self {
        if std::io::stdout().is_terminal() { Console::Person } else { Console::Program }
    }
}

/// Whether the user has asked the run to end. A signal concerns the whole process, so this is one flag for all of it.
static STOP: AtomicBool = AtomicBool::new(false);

/// Asks the running training loop to end after its current update and to save; gives whether that was asked before.
pub fn request_stop() -> bool {
    STOP.swap(true, Ordering::SeqCst)
}

/// Whether [`request_stop`] was called; the training loops look between updates.
pub fn stop_requested() -> bool {
    STOP.load(Ordering::SeqCst)
}

/// One row of a sample table.
#[derive(Debug, Clone, Serialize)]
pub struct Sample {
    /// The prompt's text.
    pub query: String,
    /// What the model answered.
    pub response: String,
    /// What the reward made of it.
    pub score: f64,
}

/// The voice of one training run.
pub struct Reporter {
    dir: PathBuf,
    console: Console,
    metrics: File,
    samples: Option<File>,
    tensorboard: Option<crate::TensorBoard>,
    bar: ProgressBar,
}

impl Reporter {
    /// Opens `metrics.jsonl`, and what `run.report_to` asks for, in the run's folder, which must exist.
    ///
    /// `total` updates fill the progress bar.
    ///
    /// # Errors
    /// If a file cannot be created.
    pub fn create(run: &RunConfig, total: usize, console: Console) -> Result<Self> {
        let dir = run.output_dir.clone();
        let path = dir.join("metrics.jsonl");
        let metrics = File::create(&path).map_err(Error::io("create", &path))?;
        let tensorboard = match run.report_to {
            ReportTo::None => None,
            ReportTo::Tensorboard => Some(crate::TensorBoard::create(&dir)?),
        };
        // Where standard error is no terminal the bar hides itself.
        let hidden = run.disable_tqdm || console == Console::Silent;
        let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let style = ProgressStyle::with_template("{bar:24} {pos}/{len} [{elapsed_precise}, {eta_precise} left] {msg}")
            .expect("the template is sound");
        let bar = ProgressBar::with_draw_target(Some(total as u64), target).with_style(style);
        // A long update moves the clock too.
        bar.enable_steady_tick(std::time::Duration::from_millis(500));
        Ok(Self { dir, console, metrics, samples: None, tensorboard, bar })
    }

    /// Writes one line of metrics.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn record(&mut self, step: i64, metrics: &Metrics) -> Result<()> {
        let line = serde_json::to_string(metrics).expect("numbers have a JSON form");
        let path = self.dir.join("metrics.jsonl");
        writeln!(self.metrics, "{line}").map_err(Error::io("write", path))?;
        if self.console == Console::Program {
            self.print(&line);
        }
        if let Some(tensorboard) = &mut self.tensorboard {
            tensorboard.scalars(step, metrics.iter().filter(|(name, _)| *name != "step"))?;
        }
        Ok(())
    }

    /// Moves the progress bar one update on; `watched` are the few numbers people look at.
    pub fn advance(&self, watched: String) {
        self.bar.set_message(watched);
        self.bar.inc(1);
    }

    /// Adds a sample table to `samples.jsonl`, and shows it where a person watches.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn samples(&mut self, episode: usize, samples: &[Sample]) -> Result<()> {
        let path = self.dir.join("samples.jsonl");
        if self.samples.is_none() {
            self.samples = Some(File::create(&path).map_err(Error::io("create", &path))?);
        }
        for sample in samples {
            let mut row = serde_json::json!({"episode": episode});
            let sample = serde_json::to_value(sample).expect("a sample has a JSON form");
            row.as_object_mut().expect("an object").extend(sample.as_object().expect("an object").clone());
            let file = self.samples.as_mut().expect("opened above");
            writeln!(file, "{row}").map_err(Error::io("write", &path))?;
        }
        if self.console == Console::Person {
            let mut table = Table::new();
            table.load_style(presets::UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic);
            table.set_header(["query", "model response", "score"]);
            for sample in samples {
                table.add_row([sample.query.clone(), sample.response.clone(), format!("{:.3}", sample.score)]);
            }
            self.print(&format!("Episode {episode}\n{table}"));
        }
        Ok(())
    }

    /// Tells something that a person should know and that stops nothing.
    pub fn warn(&self, message: &str) {
        if self.console != Console::Silent {
            self.bar.suspend(|| {
                let _ = writeln!(std::io::stderr(), "warning: {message}");
            });
        }
    }

    /// Tells a person how things stand.
    pub fn note(&self, message: &str) {
        if self.console == Console::Person {
            self.bar.suspend(|| {
                let _ = writeln!(std::io::stderr(), "{message}");
            });
        }
    }

    /// Ends the progress bar.
    pub fn finish(&self) {
        self.bar.finish();
    }

    /// Standard output is a copy of what the files hold: when its reader goes away (`| head`), the run goes on.
    fn print(&self, text: &str) {
        self.bar.suspend(|| {
            let _ = writeln!(std::io::stdout(), "{text}");
        });
    }
}

/// Names of the files that a run writes into its folder, beside the tokenizer's, the shards and the event files.
const RUN_FILES: [&str; 10] = [
    "metrics.jsonl",
    "samples.jsonl",
    RUN_YAML,
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "README.md",
    "adapter_config.json",
    "adapter_model.safetensors",
];

/// The resolved configuration of a run; a folder that has one holds a run.
const RUN_YAML: &str = "run.yaml";

/// Whether a run writes files of this name: what `overwrite_output_dir` may remove, and nothing else.
fn is_run_file(name: &str) -> bool {
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let shard = name
        .strip_prefix("model-")
        .and_then(|rest| rest.strip_suffix(".safetensors"))
        .and_then(|rest| rest.split_once("-of-"))
        .is_some_and(|(part, parts)| digits(part) && digits(parts));
    shard
        || RUN_FILES.contains(&name)
        || crate::tokenizer::FILES.contains(&name)
        || name.starts_with("events.out.tfevents.")
}

/// Checks that a run may write to `run.output_dir`, before anything slow begins. Nothing is changed yet.
///
/// # Errors
/// If one of the run's own `inputs` is the folder or lies in it; if the folder holds anything and `overwrite_output_dir`
/// is not set, or anything that is not a run and it is.
pub(crate) fn check_output_dir(run: &RunConfig, inputs: &[&Path]) -> Result<()> {
    check_folder(&run.output_dir, run.overwrite_output_dir, inputs)
}

/// [`check_output_dir`] for what is no training run.
pub(crate) fn check_folder(dir: &Path, overwrite: bool, inputs: &[&Path]) -> Result<()> {
    let whole = dir.canonicalize().ok();
    let inside =
        |input: &Path| input.canonicalize().is_ok_and(|input| whole.as_ref().is_some_and(|d| input.starts_with(d)));
    let base = |input: &&Path| AdapterFolder::find(input).ok().flatten()?.local_base();
    let bases: Vec<PathBuf> = inputs.iter().filter_map(base).collect();
    let mut inputs = inputs.iter().copied().chain(bases.iter().map(PathBuf::as_path));
    if let Some(input) = inputs.find(|input| inside(input)) {
        let message = format!("output_dir = {} holds what the run reads: {}", dir.display(), input.display());
        return Err(Error::Usage(message));
    }
    if dir.is_file() {
        return Err(Error::invalid(dir, "output_dir: expected a folder or nothing, found a file"));
    }
    if !dir.is_dir() {
        return Ok(());
    }
    let Some(entry) = std::fs::read_dir(dir).map_err(Error::io("read the folder", dir))?.next() else {
        return Ok(());
    };
    let name = entry.map_err(Error::io("read the folder", dir))?.file_name();
    let name = name.to_string_lossy();
    let holds_run = dir.join(RUN_YAML).is_file();
    match (overwrite, holds_run) {
        (true, true) => Ok(()),
        (true, false) => Err(Error::invalid(
            dir,
            format!("overwrite_output_dir: expected a folder with a run ({RUN_YAML}), found `{name}` and no run"),
        )),
        (false, true) => Err(Error::invalid(
            dir,
            "output_dir: expected an empty or new folder, found a run in it; choose another folder, or set \
             --overwrite_output_dir to replace the run",
        )),
        (false, false) => Err(Error::invalid(
            dir,
            format!("output_dir: expected an empty or new folder, found `{name}` in it; choose another folder"),
        )),
    }
}

/// Makes `run.output_dir` this run's own when it is ready to begin: removes an old run's files if it may, and writes the
/// resolved configuration.
///
/// # Errors
/// As [`check_output_dir`], whose question is asked again since loading took time; if another run was quicker; if a file
/// cannot be removed or written.
pub(crate) fn claim_output_dir(run: &RunConfig, resolved: &impl Serialize) -> Result<()> {
    claim_folder(&run.output_dir, run.overwrite_output_dir, resolved)
}

/// [`claim_output_dir`] for what is no training run.
pub(crate) fn claim_folder(dir: &Path, overwrite: bool, resolved: &impl Serialize) -> Result<()> {
    check_folder(dir, overwrite, &[])?;
    std::fs::create_dir_all(dir).map_err(Error::io("create the folder", dir))?;
    remove_run_files(dir)?;
    for inner in [BASE_MODEL, "value_model/base_model", "value_model"].map(|inner| dir.join(inner)) {
        if inner.is_dir() {
            remove_run_files(&inner)?;
            // It stays if it holds files of someone else's.
            let _ = std::fs::remove_dir(&inner);
        }
    }
    let path = dir.join(RUN_YAML);
    // Of two runs that begin at once on one folder, one fails here.
    File::create_new(&path).map_err(Error::io("create", &path))?;
    crate::config::write_resolved(resolved, &path)
}

fn remove_run_files(dir: &Path) -> Result<()> {
    for entry in std::fs::read_dir(dir).map_err(Error::io("read the folder", dir))? {
        let entry = entry.map_err(Error::io("read the folder", dir))?;
        if is_run_file(&entry.file_name().to_string_lossy()) && entry.path().is_file() {
            std::fs::remove_file(entry.path()).map_err(Error::io("remove", entry.path()))?;
        }
    }
    Ok(())
}

/// How a training command ends, once it has saved: `done` updates of `total`, or what stopped it.
///
/// # Errors
/// If the run was stopped, by the user or by an error: whatever comes next should not go on as if it were whole.
pub(crate) fn conclude(done: Result<usize>, total: usize, dir: &Path) -> Result<()> {
    let saved = format!("the model as far as it came is in {}", dir.display());
    match done {
        Ok(done) if done == total => Ok(()),
        Ok(done) => Err(Error::Run(format!("stopped as asked after update {done} of {total}; {saved}"))),
        Err(error) => Err(Error::Run(format!("{error}; {saved}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SftConfig;

    fn run(dir: &Path, overwrite: bool) -> RunConfig {
        let mut run = SftConfig::new("model", "data", dir).run;
        run.overwrite_output_dir = overwrite;
        run
    }

    #[test]
    fn a_folder_that_holds_something_is_refused_unless_it_is_a_run_and_overwriting_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let check = |overwrite| check_output_dir(&run(dir.path(), overwrite), &[]).map_err(|e| e.to_string());
        check(false).unwrap();
        std::fs::write(dir.path().join("thesis.tex"), "old").unwrap();
        assert!(check(false).unwrap_err().contains("thesis.tex"));
        assert!(check(true).unwrap_err().contains("no run"));
        std::fs::write(dir.path().join(RUN_YAML), "old").unwrap();
        assert!(check(false).unwrap_err().contains("--overwrite_output_dir"));
        check(true).unwrap();
        assert_eq!(std::fs::read_to_string(dir.path().join(RUN_YAML)).unwrap(), "old", "checking changes nothing");
    }

    #[test]
    fn overwriting_removes_the_old_run_and_no_other_file() {
        let dir = tempfile::tempdir().unwrap();
        for folder in ["value_model/base_model", "model-backup"] {
            std::fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        let ours = [
            "value_model/base_model/model.safetensors",
            "metrics.jsonl",
            "run.yaml",
            "model-00001-of-00002.safetensors",
            "value_model/config.json",
        ];
        let others = ["thesis.tex", "model-notes.txt", "model-backup/config.json", "value_model/mine"];
        for name in ours.iter().chain(&others) {
            std::fs::write(dir.path().join(name), "x").unwrap();
        }
        let run = run(dir.path(), true);
        claim_output_dir(&run, &serde_json::json!({"seed": 1})).unwrap();
        for name in others {
            assert!(dir.path().join(name).is_file(), "{name}");
        }
        for name in ours.iter().filter(|name| **name != RUN_YAML) {
            assert!(!dir.path().join(name).exists(), "{name}");
        }
    }

    #[test]
    fn of_two_runs_on_one_new_folder_the_second_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let run = run(&dir.path().join("new"), false);
        claim_output_dir(&run, &serde_json::json!({})).unwrap();
        let error = claim_output_dir(&run, &serde_json::json!({})).unwrap_err().to_string();
        assert!(error.contains("found a run in it"), "{error}");
    }

    #[test]
    fn a_run_may_not_write_over_what_it_reads() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("prompts.jsonl"), "{}").unwrap();
        for input in [dir.path().to_path_buf(), dir.path().join("prompts.jsonl")] {
            let error = check_output_dir(&run(dir.path(), true), &[&input]).unwrap_err().to_string();
            assert!(error.contains("holds what the run reads"), "{error}");
        }
    }
}
