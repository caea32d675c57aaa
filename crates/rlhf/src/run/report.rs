//! Reporting: passes the events of a run to its sinks.

use crate::run::event::Event;
use crate::run::settings::RunConfig;
use crate::run::sinks::Reached;
use crate::run::sinks::alarms::AlarmFile;
use crate::run::sinks::console::{Console, ConsoleOutput};
use crate::run::sinks::driver::{Asked, Driver};
use crate::run::sinks::jsonl::Jsonl;
use crate::run::sinks::rollouts::RolloutFiles;
use crate::run::sinks::samples::SampleFiles;
use crate::run::sinks::tensorboard::TensorBoardSink;
use crate::run::sinks::trackers::{Outcome, Trackers};
use crate::terminal::without_programs;
use rlhf_base::Result;
use rlhf_base::signals::stop_requested;
use serde::Serialize;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

type Watcher<'w> = dyn FnMut(&Event<'_>) -> ControlFlow<()> + 'w;

/// Writes a run's metrics, samples and console output.
pub(crate) struct Reporter<'w> {
    /// Console output other than that of events: the title, the progress bar, notes.
    pub(crate) console: ConsoleOutput,
    dir: PathBuf,
    files: Option<Files>,
    tensorboard: Option<TensorBoardSink>,
    trackers: Option<Trackers>,
    driver: Option<Driver>,
    watcher: Option<Box<Watcher<'w>>>,
    stopped: bool,
}

/// The files of a run.
struct Files {
    updates: UpdateFiles,
    /// A rollback removes no alarm.
    alarms: AlarmFile,
}

/// Files of updates. When they are opened, the parts of later updates than the run has reached are removed.
struct UpdateFiles {
    jsonl: Jsonl,
    samples: SampleFiles,
    rollouts: RolloutFiles,
}

impl UpdateFiles {
    fn open(dir: &Path, reached: Reached) -> Result<Self> {
        Ok(Self {
            jsonl: Jsonl::open(dir, reached)?,
            samples: SampleFiles::open(dir, reached.updates)?,
            rollouts: RolloutFiles::open(dir, reached.updates)?,
        })
    }
}

impl<'w> Reporter<'w> {
    /// Opens the sinks that the `run` of `command` sets in its output folder, which must exist; `total` updates fill the progress
    /// bar. Trackers start with the settings: [`Reporter::settings`].
    ///
    /// In the files of a resumed run, the parts of later updates than it has `reached` are removed; new lines are appended.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub(crate) fn open(
        run: &RunConfig,
        command: &'static str,
        total: usize,
        reached: Reached,
        console: Console,
    ) -> Result<Self> {
        let dir = run.output_dir.as_path();
        let files = Files { updates: UpdateFiles::open(dir, reached)?, alarms: AlarmFile::open(dir, reached)? };
        TensorBoardSink::cut(dir, reached)?;
        let tensorboard = if !run.tracking.has_tensorboard() {
            None
        } else {
            Some(TensorBoardSink::create(dir, run.tracking.tensorboard_tags)?)
        };
        let trackers = Some(Trackers::new(run, command, reached, console));
        let console = ConsoleOutput::open(dir, console, run.disable_tqdm, total, reached.updates);
        let files = Some(files);
        Ok(Self { console, dir: dir.into(), files, tensorboard, trackers, driver: None, watcher: None, stopped: false })
    }

    /// A reporter that writes and prints nothing, for all ranks but the first.
    pub(crate) fn silent(run: &RunConfig, total: usize, reached: Reached) -> Self {
        let console = ConsoleOutput::open(&run.output_dir, Console::Silent, true, total, reached.updates);
        Self {
            console,
            dir: run.output_dir.clone(),
            files: None,
            tensorboard: None,
            trackers: None,
            driver: None,
            watcher: None,
            stopped: false,
        }
    }

    /// Removes the parts of later updates than the run has `reached` from the sinks, as [`Reporter::open`] does, except alarms. `settings`
    /// are the settings of the run.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub(crate) fn roll_back(&mut self, reached: Reached, settings: &impl Serialize) -> Result<()> {
        self.console.roll_back(reached.updates);
        let Some(files) = &mut self.files else { return Ok(()) };
        files.updates = UpdateFiles::open(&self.dir, reached)?;
        let tags = self.tensorboard.take().map(|tensorboard| tensorboard.tags());
        TensorBoardSink::cut(&self.dir, reached)?;
        self.tensorboard = tags.map(|tags| TensorBoardSink::create(&self.dir, tags)).transpose()?;
        self.settings(settings)
    }

    /// Writes the settings of the run, without secrets, to the sinks that have hyperparameters. The first call starts the trackers.
    ///
    /// # Errors
    /// If they cannot be written.
    pub(crate) fn settings(&mut self, settings: &impl Serialize) -> Result<()> {
        let settings = serde_json::to_value(settings).ok().and_then(|settings| settings.as_object().cloned());
        let settings = without_programs(&settings.unwrap_or_default());
        self.trackers.iter_mut().for_each(|trackers| trackers.start(&settings));
        self.tensorboard.as_mut().map_or(Ok(()), |tensorboard| tensorboard.settings(&settings))
    }

    /// Adds the driver of the run.
    pub(crate) fn drive(&mut self, driver: Driver) {
        self.console.tell_phases(driver.lines());
        self.driver = Some(driver);
    }

    /// Tells the driver, if there is one, that update `step` is complete, and returns what it asks for. A driver that is gone asks for
    /// the end of the run: nobody would read its results.
    pub(crate) fn ask(&mut self, step: usize) -> Asked {
        let Some(driver) = &mut self.driver else { return Asked::default() };
        driver.ask(step).unwrap_or_else(|| {
            self.driver = None;
            self.console.warn("the program that drives this run is gone: the run stops after this update");
            Asked { stop: true, ..Asked::default() }
        })
    }

    /// Ends the run after its current update.
    pub(crate) fn stop(&mut self) {
        self.stopped = true;
    }

    /// Ends the trackers' runs with the run's outcome, and waits for them for a limited time.
    pub(crate) fn end(&mut self, outcome: Outcome, message: Option<&str>) {
        self.trackers.iter_mut().for_each(|trackers| trackers.end(outcome, message));
        self.driver.iter().for_each(|driver| driver.end(outcome.name(), message));
    }

    /// Adds a sink of the caller's. A break ends this run after its current update, as
    /// [`request_stop`](rlhf_base::signals::request_stop) ends all runs of the process.
    pub(crate) fn watch(&mut self, watcher: impl FnMut(&Event<'_>) -> ControlFlow<()> + 'w) {
        self.watcher = Some(Box::new(watcher));
    }

    /// Returns whether the run should end: its watcher or the user stopped it. The training loops check it between updates.
    pub(crate) fn stopped(&self) -> bool {
        self.stopped || stop_requested()
    }

    /// Passes an event to all sinks.
    ///
    /// # Errors
    /// If a file cannot be written; the other sinks still get the event.
    pub(crate) fn emit(&mut self, event: &Event<'_>) -> Result<()> {
        let mut written = Ok(());
        if let Some(Files { updates, alarms }) = &mut self.files {
            written = updates.jsonl.receive(event);
            written = written.and(updates.samples.receive(event));
            written = written.and(updates.rollouts.receive(event));
            written = written.and(alarms.receive(event));
        }
        written = written.and(self.tensorboard.as_mut().map_or(Ok(()), |tensorboard| tensorboard.receive(event)));
        self.trackers.iter_mut().for_each(|trackers| trackers.receive(event));
        self.console.receive(event);
        self.notify_watcher(event);
        self.driver.iter().for_each(|driver| driver.receive(event));
        written
    }

    /// Reports that `dir` holds the current model.
    pub(crate) fn saved(&mut self, dir: &Path) {
        let event = Event::Saved { dir };
        self.trackers.iter_mut().for_each(|trackers| trackers.receive(&event));
        self.console.receive(&event);
        self.notify_watcher(&event);
        self.driver.iter().for_each(|driver| driver.receive(&event));
    }

    /// Reports that `dir` holds the final model; the console has its own words for the end of a run.
    pub(crate) fn saved_final(&mut self, dir: &Path) {
        let event = Event::Saved { dir };
        self.trackers.iter_mut().for_each(|trackers| trackers.receive(&event));
        self.notify_watcher(&event);
        self.driver.iter().for_each(|driver| driver.receive(&event));
    }

    /// Flushes the metrics to the disk, before a checkpoint counts on them.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn sync(&mut self) -> Result<()> {
        self.files.as_mut().map_or(Ok(()), |files| files.updates.jsonl.sync())
    }

    fn notify_watcher(&mut self, event: &Event<'_>) {
        // The evaluation before the first update is not an update.
        if matches!(event, Event::Update { step: 0, .. }) {
            return;
        }
        if let Some(watcher) = &mut self.watcher {
            self.stopped |= watcher(event).is_break();
        }
    }
}
