//! What a run tells: `metrics.jsonl` and TensorBoard for programs, a progress bar and tables for people.

use crate::config::{ReportTo, RunConfig};
use crate::metrics::Metrics;
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

/// The error that ends a run which was asked to stop, after it has saved: whatever comes next should not go on as if it
/// were whole.
pub(crate) fn stopped(done: usize, total: usize, dir: &Path) -> Error {
    Error::Run(format!("stopped as asked after update {done} of {total}; the model so far is in {}", dir.display()))
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

/// The files of a run, by name or by the name's beginning; what `overwrite_output_dir` may remove, and nothing else.
const RUN_FILES: [&str; 11] = [
    "metrics.jsonl",
    "samples.jsonl",
    "run.yaml",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "README.md",
    "value_model",
    "model-",
    "events.out.tfevents.",
];

/// Checks that a run may write to `run.output_dir`, before anything slow begins. Nothing is changed yet.
///
/// # Errors
/// If the folder holds anything and `overwrite_output_dir` is not set, or is one of the run's own `inputs`.
pub fn check_output_dir(run: &RunConfig, inputs: &[&Path]) -> Result<()> {
    let dir = &run.output_dir;
    let same = |a: &Path, b: &Path| a.canonicalize().ok().is_some_and(|a| b.canonicalize().ok() == Some(a));
    if let Some(input) = inputs.iter().find(|input| same(input, dir)) {
        let message = format!("output_dir = {} is also what the run reads ({})", dir.display(), input.display());
        return Err(Error::Usage(message));
    }
    if dir.is_file() {
        return Err(Error::invalid(dir, "output_dir: expected a folder or nothing, found a file"));
    }
    if run.overwrite_output_dir || !dir.is_dir() {
        return Ok(());
    }
    let first = std::fs::read_dir(dir).map_err(Error::io("read the folder", dir))?.next();
    match first {
        None => Ok(()),
        Some(entry) => {
            let entry = entry.map_err(Error::io("read the folder", dir))?;
            let name = entry.file_name();
            let message = format!(
                "output_dir: expected an empty or new folder, found `{}` in it; choose another folder, \
                 or set --overwrite_output_dir to replace the run it holds",
                name.to_string_lossy()
            );
            Err(Error::invalid(dir, message))
        }
    }
}

/// Creates `run.output_dir` and removes the old run's files from it; called when the new run is ready to begin.
///
/// # Errors
/// If a file cannot be removed or the folder not created.
pub fn prepare_output_dir(run: &RunConfig) -> Result<()> {
    let dir = &run.output_dir;
    std::fs::create_dir_all(dir).map_err(Error::io("create the folder", dir))?;
    for entry in std::fs::read_dir(dir).map_err(Error::io("read the folder", dir))? {
        let entry = entry.map_err(Error::io("read the folder", dir))?;
        let (name, path) = (entry.file_name(), entry.path());
        let name = name.to_string_lossy();
        let ours = RUN_FILES.iter().any(|ours| {
            let prefix = ours.ends_with(['-', '.']);
            if prefix { name.starts_with(ours) } else { name == *ours }
        });
        if ours && path.is_dir() {
            std::fs::remove_dir_all(&path).map_err(Error::io("remove", &path))?;
        } else if ours {
            std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
        }
    }
    Ok(())
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
    fn a_folder_that_holds_something_is_refused_unless_overwriting_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        check_output_dir(&run(dir.path(), false), &[]).unwrap();
        std::fs::write(dir.path().join("metrics.jsonl"), "old").unwrap();
        let error = check_output_dir(&run(dir.path(), false), &[]).unwrap_err().to_string();
        assert!(error.contains("metrics.jsonl") && error.contains("--overwrite_output_dir"), "{error}");
        check_output_dir(&run(dir.path(), true), &[]).unwrap();
        assert_eq!(
            std::fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap(),
            "old",
            "checking changes nothing"
        );
    }

    #[test]
    fn overwriting_removes_the_old_run_and_no_other_file() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("value_model")).unwrap();
        for name in ["metrics.jsonl", "model-00001-of-00002.safetensors", "thesis.tex", "value_model/config.json"] {
            std::fs::write(dir.path().join(name), "x").unwrap();
        }
        prepare_output_dir(&run(dir.path(), true)).unwrap();
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["thesis.tex"]);
    }

    #[test]
    fn a_run_may_not_write_over_what_it_reads() {
        let dir = tempfile::tempdir().unwrap();
        let error = check_output_dir(&run(dir.path(), true), &[dir.path()]).unwrap_err().to_string();
        assert!(error.contains("is also what the run reads"), "{error}");
    }
}
