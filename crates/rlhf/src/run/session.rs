//! The course of a training run, the same for SFT, the reward model and PPO.
//!
//! A training command loads models and data, and then computes updates: prompts or rows to a batch, a batch to a loss, a loss
//! to optimizer steps. Everything else of a run is here. The command implements [`Trainee`]: its resumable state, and how its
//! models and optimizers are written and read. [`Progress`] is part of the trainee, so that a caller of the library can run
//! updates without files.
//!
//! 1. [`Opening::new`], before anything slow: locks the output folder, finds the checkpoint to resume from, checks that the
//!    folder may be written and that the settings are those of the checkpoint. Nothing is changed yet.
//! 2. [`Session::begin`], after loading: restores the trainee from the checkpoint, claims the output folder, opens the sinks,
//!    and reports from where the run starts.
//! 3. The loop, while [`Session::is_running`]. For each update the trainee
//!    - asks what is [due](Session::due) after it: an evaluation, a line of metrics, a checkpoint, a comparison with the best
//!      model;
//!    - hands events to [`Session::emit`];
//!    - calls [`Session::complete_update`], which counts the update, compares its metrics with the best model's, and takes a
//!      snapshot of the resumable state;
//!    - calls [`Session::save_due`], which writes the best model and the checkpoint.
//! 4. [`Session::end`], also after an error: leaves a checkpoint if the last update is complete, leaves the model in the output
//!    folder, and returns the error that names the way to resume, or the number of updates. [`Session::report_end`] then shows the
//!    outcome, and [`Session::push`] waits for the push to the hub.
//!
//! An error can come in the middle of an update, when the cursor and the sums have moved on and the weights perhaps too. So a
//! checkpoint holds the snapshot that was taken after the last complete update, and none is written if an optimizer step was
//! taken since ([`Trainee::steps`]).

use crate::run::best::Best;
use crate::run::checkpoint::{self, Checkpoints, Epochs, FixedState, RunSettings, Saved, is_due, parts_of};
use crate::run::event::Event;
use crate::run::inputs::Inputs;
use crate::run::output_dir::{CONFIG, FolderLock, check_output_dir, claim_output_dir, write_length};
use crate::run::push::Pusher;
use crate::run::push::settings::HubStrategy;
use crate::run::report::Reporter;
use crate::run::resolved::resolved_settings;
use crate::run::runtime::Runtime;
use crate::run::settings::{EvalConfig, Interval, RunConfig};
use crate::run::sinks::Reached;
use crate::run::sinks::console::ConsoleOutput;
use crate::run::sinks::driver::Driver;
use crate::run::sinks::trackers::Outcome;
use crate::run::start::{Found, Start};
use crate::terminal::{self, without_programs};
use rlhf_base::device::slow_bf16;
use rlhf_base::dist::World;
use rlhf_base::dist::launch::LAUNCHED_BY;
use rlhf_base::metrics::{Metrics, is_clock};
use rlhf_base::signals::{exit_code, request_stop, set_complete, stop_requested};
use rlhf_base::{Error, Result};
use rlhf_hub::push::Repository;
use rlhf_lm::model::Dtype;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time between two looks at a push that the run waits for; the ranks meet at each.
const TICK: Duration = Duration::from_secs(1);

/// A training command, as its session sees it.
pub(crate) trait Trainee {
    /// The resumable state beside weights, optimizers and the best model.
    type State: Serialize;

    fn progress(&self) -> &Progress;

    fn progress_mut(&mut self) -> &mut Progress;

    /// Digests of what the run reads.
    fn inputs(&self) -> &Inputs;

    /// Returns the part of the resumable state that no update changes.
    fn fixed_state(&self) -> FixedState;

    /// Returns the part of the state that updates change.
    fn state(&self) -> Self::State;

    /// Restores weights, optimizers, and the states that [`Trainee::fixed_state`] and [`Trainee::state`] returned.
    ///
    /// # Errors
    /// If the checkpoint is not of a run like this one.
    fn load(&mut self, saved: &Saved) -> Result<()>;

    /// Optimizer steps since the start of the run, taken or skipped. If the number has changed since the last snapshot, an update is
    /// incomplete.
    fn steps(&self) -> i64;

    /// Writes models and tokenizer to an empty folder in `dtype`; a run resumes from `Auto` alone.
    ///
    /// # Errors
    /// If a file cannot be written, or `dtype` does not hold a number of the model.
    fn write_models(&self, dir: &Path, dtype: Dtype) -> Result<()>;

    /// Writes to `dir` the other models that a run resumes from, on rank 0 alone.
    ///
    /// # Errors
    /// If a file cannot be written.
    fn write_beside(&self, _dir: &Path) -> Result<()> {
        Ok(())
    }

    /// Writes the optimizers' states next to the models in `dir`.
    ///
    /// # Errors
    /// If a file cannot be written.
    fn write_optimizers(&self, dir: &Path) -> Result<()>;

    /// Writes the bases of adapters to the output folder, unless they are there: once for all checkpoints, as they never
    /// change.
    ///
    /// # Errors
    /// If a file cannot be written.
    fn write_bases(&mut self) -> Result<()>;

    /// Returns the folders that [`Trainee::write_bases`] writes, below the output folder. Each has the names of the inputs that may decide
    /// its contents: the first one that the run has does.
    fn bases(&self) -> Vec<(PathBuf, &'static [&'static str])>;

    /// Replaces the model in the output folder `dir` by the current one in `dtype`, with its model card.
    ///
    /// # Errors
    /// If a file cannot be written, or `dtype` does not hold a number of the model.
    fn save_final(&self, dir: &Path, dtype: Dtype) -> Result<()>;

    /// The dtype of the final and the best model.
    fn save_dtype(&self) -> Dtype {
        Dtype::Auto
    }

    /// Returns the metrics of the last update that the model card shows.
    fn card_metrics(&self) -> Map<String, Value> {
        Map::new()
    }

    /// Takes part in the collectives of [`Trainee::write_models`], on a rank that writes no files.
    ///
    /// # Errors
    /// If a rank has ended or does not respond.
    fn share_models(&self) -> Result<()> {
        Ok(())
    }

    /// Ends [`Trainee::share_models`] of the other ranks, if rank 0 wrote something else than the models.
    ///
    /// # Errors
    /// If a rank has ended or does not respond.
    fn end_sharing(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the sum of the bits of each trained parameter, which are the same on all ranks, by name.
    fn bit_sums(&self) -> Vec<(String, i64)> {
        Vec::new()
    }

    /// Takes part in the collectives of [`Trainee::write_optimizers`], on a rank that writes no files.
    ///
    /// # Errors
    /// If a rank has ended or does not respond.
    fn share_optimizers(&self) -> Result<()> {
        Ok(())
    }

    /// Returns whether this rank lacks parts of models or optimizers, so that it cannot save them by itself.
    fn is_sharded(&self) -> bool {
        false
    }

    /// Returns the settings that decide the numbers of evaluations, and that a resumed run may change.
    fn best_depends_on(&self) -> &'static [&'static str] {
        &[]
    }

    /// Returns whether the metric of the best model may be missing so far.
    fn may_lack_best_metric(&self) -> bool {
        false
    }
}

/// Progress of a run.
#[derive(Debug)]
pub(crate) struct Progress {
    /// Updates done.
    pub(crate) done: usize,
    /// The last update after which a line of metrics was due. A line that was written only because the run was stopped does not count.
    pub(crate) recorded: usize,
    /// Rollbacks so far.
    pub(crate) rollbacks: usize,
    /// Updates done after the last rollback of this process.
    rolled_to: Option<usize>,
    best: Option<Best>,
    snapshot: Option<Snapshot>,
    /// Whether a rollback failed while it read a checkpoint, so that models and optimizers are from different updates.
    is_mixed: bool,
    /// Whether a session has begun in the output folder.
    begun: bool,
    /// The lock on the output folder, on the rank that owns it.
    lock: Option<FolderLock>,
}

/// The resumable state after a completed update.
#[derive(Debug)]
struct Snapshot {
    state: Map<String, Value>,
    /// [`Trainee::steps`] then.
    steps: i64,
}

impl Progress {
    /// Returns the progress of a new run.
    pub(crate) fn new(eval: &EvalConfig) -> Self {
        Self {
            done: 0,
            recorded: 0,
            rollbacks: 0,
            rolled_to: None,
            best: Best::new(eval),
            snapshot: None,
            is_mixed: false,
            begun: false,
            lock: None,
        }
    }

    /// Returns the progress up to which sinks have written.
    fn reached(&self) -> Reached {
        Reached { updates: self.done, recorded: self.recorded, rollbacks: self.rollbacks }
    }

    /// Returns whether a session has begun in the output folder.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun
    }
}

/// The part of a checkpoint's state with the rollbacks so far.
const ROLLBACKS: &str = "rollbacks";

/// Returns the trainee's resumable state by part, as a checkpoint has it.
pub(crate) fn resumable_parts(trainee: &impl Trainee) -> Map<String, Value> {
    let mut parts = parts_of(&trainee.fixed_state());
    parts.extend(parts_of(&trainee.state()));
    parts
}

/// Records the trainee's resumable state after a completed update.
pub(crate) fn take_snapshot(trainee: &mut impl Trainee) {
    let mut state = resumable_parts(trainee);
    let steps = trainee.steps();
    let progress = trainee.progress_mut();
    state.extend(progress.best.as_ref().map(|best| ("best".into(), best.state())));
    state.extend((progress.rollbacks > 0).then(|| (ROLLBACKS.into(), progress.rollbacks.into())));
    progress.snapshot = Some(Snapshot { state, steps });
}

/// Description of a run for its session; `config` is the whole configuration, for `config.yaml` and for checkpoints.
#[derive(Debug)]
pub(crate) struct RunSpec<'a, C> {
    /// The command, as checkpoints name it.
    pub(crate) command: &'static str,
    pub(crate) config: &'a C,
    pub(crate) run: &'a RunConfig,
    pub(crate) eval: &'a EvalConfig,
    /// A line of metrics is due after every this many updates.
    pub(crate) logging_steps: usize,
    /// Updates of the whole run.
    pub(crate) num_updates: usize,
    /// Most rows of data per update.
    pub(crate) batch_size: usize,
    pub(crate) epochs: Epochs,
}

/// A locked output folder, and the start of the run in it.
#[derive(Debug, Default)]
pub(crate) struct Opening {
    /// The lock, on the rank that owns the folder.
    lock: Option<FolderLock>,
    pub(crate) start: Start,
    /// Warnings about settings that differ from the checkpoint's.
    differences: Vec<String>,
    /// The repository that the run pushes to, on the rank that owns the folder.
    repository: Option<Repository>,
}

impl Opening {
    /// Locks the output folder and finds what the run starts from; `inputs` are the paths that it reads. Changes nothing. Rank 0
    /// does so for all ranks.
    ///
    /// # Errors
    /// If ranks have different settings; if another run is in the folder, or the run may not write there or cannot resume; if it may not
    /// push to the hub.
    pub(crate) fn new(
        world: &World,
        command: &str,
        (config, run): (&impl RunSettings, &RunConfig),
        inputs: &[&Path],
    ) -> Result<Self> {
        world.check_settings(&common_settings(command, config)?)?;
        let opening = world.on_main(|| Self::on_main(run, command, config, inputs))?.unwrap_or_default();
        Ok(Self { start: world.broadcast(opening.start)?, ..opening })
    }

    fn on_main(run: &RunConfig, command: &str, config: &impl RunSettings, inputs: &[&Path]) -> Result<Self> {
        let lock = FolderLock::acquire(&run.output_dir)?;
        let start = Start::find(run)?;
        check_output_dir(run, &start, inputs)?;
        let differences = start.check(command, config)?;
        Ok(Self { lock: Some(lock), start, differences, repository: run.hub.repository()? })
    }

    /// Returns the external facts that the run looked up at its start.
    ///
    /// # Errors
    /// If the checkpoint has them in another form.
    pub(crate) fn found(&self) -> Result<Found> {
        self.start.found()
    }
}

/// The settings that all ranks of a run must share, with the command and the version. Paths and arguments of programs may differ between
/// machines, so they are not among them.
fn common_settings(command: &str, config: &impl Serialize) -> Result<Map<String, Value>> {
    let is_place = |name: &str| ["_path", "_dir", "_name", "num_threads"].iter().any(|end| name.ends_with(end));
    let config = serde_json::to_value(config).map_err(|e| Error::Run(format!("settings: {e}")))?;
    let Value::Object(config) = config else { return Ok(Map::new()) };
    let config = without_programs(&config);
    let identity = [("command", command), ("version", env!("CARGO_PKG_VERSION"))];
    let identity = identity.map(|(name, value)| (name.to_string(), Value::from(value)));
    Ok(identity.into_iter().chain(config.into_iter().filter(|(name, _)| !is_place(name))).collect())
}

/// Actions that are due after an update.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Due {
    /// An evaluation on the held-out rows.
    pub(crate) evaluation: bool,
    /// A comparison of the metric with the best model's.
    pub(crate) comparison: bool,
    /// A line of metrics.
    pub(crate) line: bool,
    /// A checkpoint.
    pub(crate) checkpoint: bool,
}

/// A training run in its output folder.
pub(crate) struct Session<'w> {
    command: &'static str,
    report: Reporter<'w>,
    checkpoints: Checkpoints,
    /// Updates done at the start of the session.
    began_at: usize,
    num_updates: usize,
    eval_steps: Option<Interval>,
    epochs: Epochs,
    logging_steps: usize,
    /// The ranks of the run, which stop together.
    world: World,
    /// Whether another program drives the run.
    is_driven: bool,
    /// Whether the driver has asked for a checkpoint after the current update.
    save_asked: bool,
    /// Compare the ranks after each update, for tests: `RLHF_CHECK_RANKS=1`.
    compares_ranks: bool,
    /// Whether the run pushes its model to the hub, on any rank.
    pushes: bool,
    /// The pushes, on rank 0.
    pusher: Option<Pusher>,
}

impl<'w> Session<'w> {
    /// Starts or resumes the run of `trainee` in its output folder: restores the checkpoint of the `opening`, claims the
    /// folder, opens the sinks, and reports `warnings` and the start of the run. Without an opening the run continues from the state of
    /// the trainee.
    ///
    /// # Errors
    /// If the checkpoint is not of a run like this one, or a file cannot be written.
    pub(crate) fn begin<T: Trainee, C: RunSettings>(
        trainee: &mut T,
        opening: Option<Opening>,
        spec: &RunSpec<'_, C>,
        mut warnings: Vec<String>,
        runtime: &Runtime,
    ) -> Result<Self> {
        let Runtime { world, console } = runtime.clone();
        set_complete(false);
        let mut start = Start { in_place: true, ..Start::default() };
        let mut opening = opening;
        let repository = opening.as_mut().and_then(|opening| opening.repository.take());
        if let Some(opening) = opening {
            // The models are on their device by now, so it is known whether kernels are loaded. If only some ranks computed by kernels,
            // they would round differently from the others.
            let mut common = trainee.inputs().without_paths();
            let kernels = if tch_ext::gpu_kernels_are_loaded() { "kernels" } else { "no kernels" };
            common.insert("RLHF_KERNELS".into(), kernels.into());
            world.check_settings(&common)?;
            if let Some(saved) = &opening.start.from {
                warnings.extend(world.agree(resume(trainee, saved, opening.start.in_place, spec))?);
            }
            warnings.extend(opening.differences);
            let claim = |lock| claim_output_dir(spec.run, &opening.start, lock, spec.config);
            let (lock, notes) = world.agree(opening.lock.map(claim).transpose())?.unzip();
            trainee.progress_mut().lock = lock;
            warnings.extend(notes.into_iter().flatten());
            trainee.progress_mut().begun = true;
            start = opening.start;
        }
        if trainee.progress().snapshot.is_none() {
            take_snapshot(trainee);
        }
        let run = spec.run;
        let num_updates = spec.num_updates;
        let reached = trainee.progress().reached();
        let done = reached.updates;
        let opened = if world.is_main() {
            write_length(&run.output_dir, num_updates)
                .and_then(|()| Reporter::open(run, spec.command, num_updates, reached, console))
        } else {
            Ok(Reporter::silent(run, num_updates, reached))
        };
        let mut report = world.agree(opened)?;
        start.warnings.iter().chain(&warnings).for_each(|warning| report.console.warn(warning));
        slow_bf16(run.device).filter(|_| run.bf16).iter().for_each(|warning| report.console.warn(warning));
        start.finished(num_updates).iter().for_each(|warning| report.console.warn(warning));
        start.describe(run, num_updates).iter().for_each(|note| report.console.note(note));
        report.settings(spec.config)?;
        let begin = json!({
            "command": spec.command, "output_dir": run.output_dir, "done": done, "total": num_updates,
            "rows_per_update": spec.epochs.per_update, "rows": spec.epochs.len,
        });
        let driver = world.on_main(|| Driver::connect(&begin))?.flatten();
        let is_driven = world.any(driver.is_some())?;
        driver.into_iter().for_each(|driver| report.drive(driver));
        let pusher = world.on_main(|| pusher(run, repository))?.flatten();
        let mut checkpoints = Checkpoints::new(spec.command, run, spec.config, num_updates)?;
        world.on_main(|| checkpoints.tidy(done))?;
        let compares_ranks = world.size() > 1 && std::env::var_os("RLHF_CHECK_RANKS").is_some_and(|value| value == "1");
        let pushes = run.hub.push_to_hub;
        Ok(Self {
            command: spec.command,
            report,
            checkpoints,
            began_at: done,
            num_updates,
            eval_steps: spec.eval.eval_steps,
            epochs: spec.epochs,
            logging_steps: spec.logging_steps,
            world,
            is_driven,
            save_asked: false,
            compares_ranks,
            pushes,
            pusher,
        })
    }

    /// Passes all events to `watcher` too; a break ends the run after its current update.
    pub(crate) fn watch(&mut self, watcher: impl FnMut(&Event<'_>) -> ControlFlow<()> + 'w) {
        self.report.watch(watcher);
    }

    /// Console output other than that of events.
    pub(crate) fn console(&self) -> &ConsoleOutput {
        &self.report.console
    }

    /// Passes an event to all sinks.
    ///
    /// # Errors
    /// If a file cannot be written, on all ranks.
    pub(crate) fn emit(&mut self, event: &Event<'_>) -> Result<()> {
        let emitted = self.report.emit(event);
        self.world.agree(emitted)
    }

    /// Returns whether the run was stopped, by its watcher or by the user, on any rank. A rank without a signal then stops as if it had got
    /// one.
    ///
    /// # Errors
    /// If a rank has ended or does not respond.
    pub(crate) fn is_stopped(&self) -> Result<bool> {
        let stopped_here = self.report.stopped();
        Ok(stop_requested_on_any(&self.world)? || self.world.any(stopped_here)?)
    }

    /// Returns whether an update is left, and the run was not stopped.
    ///
    /// # Errors
    /// As [`Session::is_stopped`].
    pub(crate) fn is_running(&self, trainee: &impl Trainee) -> Result<bool> {
        Ok(trainee.progress().done < self.num_updates && !self.is_stopped()?)
    }

    /// Returns whether the run starts with an evaluation, before its first update.
    pub(crate) fn starts_with_evaluation(&self, trainee: &impl Trainee) -> bool {
        trainee.progress().done == 0 && self.eval_steps.is_some()
    }

    /// Returns the actions that are due after the trainee's next update.
    pub(crate) fn due(&self, trainee: &impl Trainee) -> Due {
        let progress = trainee.progress();
        let total = self.num_updates;
        let done = progress.done + 1;
        let evaluation = self.epochs.is_due(self.eval_steps, done, total);
        let checkpoint = self.checkpoints.is_due(done, self.epochs);
        let compares = if self.eval_steps.is_some() { evaluation } else { checkpoint };
        let comparison = compares && progress.best.is_some();
        // There is always a line of metrics with the metric of a comparison and the result of an evaluation.
        let line = comparison || evaluation || is_due(Some(self.logging_steps), done, total);
        Due { evaluation, comparison, line, checkpoint }
    }

    /// Tells the driver of the run, if there is one, that the trainee's next update is complete, before the update is counted. Returns the
    /// actions that are `due` after it, with those that the driver asks for; an evaluation only if the run `can_evaluate`.
    ///
    /// # Errors
    /// If a rank has ended or does not respond.
    pub(crate) fn ask(&mut self, trainee: &impl Trainee, due: Due, can_evaluate: bool) -> Result<Due> {
        if !self.is_driven {
            return Ok(due);
        }
        let asked = self.world.broadcast(self.report.ask(trainee.progress().done + 1))?;
        if asked.stop {
            self.report.stop();
        }
        self.save_asked = asked.save;
        let evaluates = asked.evaluate && can_evaluate;
        Ok(Due { evaluation: due.evaluation || evaluates, line: due.line || evaluates, ..due })
    }

    /// Counts the trainee's update as done, compares its `metrics`, if it has a line, with the best model's, and takes a
    /// snapshot. Returns a warning about a missing metric.
    ///
    /// The update counts even if something fails after it.
    ///
    /// # Errors
    /// If the run does not have the metric of the best model.
    pub(crate) fn complete_update<T: Trainee>(
        &self,
        trainee: &mut T,
        due: Due,
        metrics: Option<&Metrics>,
    ) -> Result<Option<String>> {
        trainee.progress_mut().done += 1;
        let may_lack = trainee.may_lack_best_metric();
        let progress = trainee.progress_mut();
        if due.line {
            progress.recorded = progress.done;
        }
        let compared = match (&mut progress.best, metrics) {
            (Some(best), Some(metrics)) => best.compare(metrics, progress.done, due.comparison, may_lack),
            _ => Ok(None),
        };
        take_snapshot(trainee);
        if self.compares_ranks {
            self.compare_ranks(trainee, metrics)?;
        }
        compared
    }

    /// Checks that all ranks have the same bits after an update: of trained parameters, resumable state and metrics.
    fn compare_ranks(&self, trainee: &impl Trainee, metrics: Option<&Metrics>) -> Result<()> {
        let mut parts: Vec<String> =
            trainee.bit_sums().into_iter().map(|(name, sum)| format!("{name}: {sum}")).collect();
        let metrics = metrics.into_iter().flat_map(Metrics::iter).filter(|(name, _)| !is_clock(name));
        parts.extend(metrics.map(|(name, value)| format!("{name}: {:016x}", value.to_bits())));
        parts.extend(resumable_parts(trainee).iter().map(|(name, value)| format!("{name}: {value}")));
        let all = self.world.gather(parts.join("\n"))?;
        let Some(rank) = all.iter().position(|bits| *bits != all[0]) else { return Ok(()) };
        let differing = all[0].lines().zip(all[rank].lines()).find(|(main, other)| main != other);
        let (main, other) = differing.unwrap_or_default();
        let done = trainee.progress().done;
        self.world.agree(Err(Error::Run(format!(
            "RLHF_CHECK_RANKS: rank {rank} differs from rank 0 after update {done}: {other}, and not {main}"
        ))))
    }

    /// Writes the best model, if it is the current one, and the checkpoint, if it is due.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(crate) fn save_due(&mut self, trainee: &mut impl Trainee, due: Due) -> Result<()> {
        self.console().phase("saving");
        self.write_best(trainee)?;
        if due.checkpoint || std::mem::take(&mut self.save_asked) { self.save_checkpoint(trainee) } else { Ok(()) }
    }

    /// Returns the newest complete checkpoint of at most `most` updates, as rank 0 finds it; the one before it if the last rollback already
    /// went to the newest.
    ///
    /// # Errors
    /// If the output folder cannot be read.
    pub(crate) fn last_checkpoint(&self, trainee: &impl Trainee, most: usize) -> Result<Option<Saved>> {
        let Progress { rolled_to, .. } = *trainee.progress();
        let find = || match self.checkpoints.newest_before(most + 1)? {
            Some(last) if rolled_to == Some(last.state.update) => {
                Ok(self.checkpoints.newest_before(last.state.update)?.or(Some(last)))
            }
            last => Ok(last),
        };
        self.world.broadcast(self.world.on_main(find)?.flatten())
    }

    /// Takes the run back to the checkpoint `saved`, and counts a rollback: restores the trainee, and removes later checkpoints, metrics
    /// and samples. The alarms are those of the checkpoint; the best model so far stays.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub(crate) fn roll_back(&mut self, trainee: &mut impl Trainee, saved: &Saved) -> Result<()> {
        trainee.progress_mut().is_mixed = true;
        self.world.agree(trainee.load(saved))?;
        let progress = trainee.progress_mut();
        progress.is_mixed = false;
        progress.done = saved.state.update;
        progress.recorded = saved.parsed("recorded").unwrap_or(progress.done);
        progress.rollbacks += 1;
        progress.rolled_to = Some(progress.done);
        progress.best.iter_mut().for_each(Best::unmark);
        let reached = progress.reached();
        take_snapshot(trainee);
        let removed = if self.world.is_main() { self.checkpoints.remove_after(reached.updates) } else { Ok(()) };
        let cut = removed.and_then(|()| self.report.roll_back(reached, self.checkpoints.config()));
        self.world.agree(cut)
    }

    /// Writes the best model, if it is the current one and not written yet, for example when a run is resumed after a write that
    /// failed.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(crate) fn write_best(&mut self, trainee: &mut impl Trainee) -> Result<()> {
        let Some(mut best) = trainee.progress_mut().best.take() else { return Ok(()) };
        let done = trainee.progress().done;
        let written = if !best.is_due(done) {
            Ok(None)
        } else if self.world.is_main() {
            trainee.write_bases().and_then(|()| {
                best.write(self.checkpoints.dir(), done, |dir| trainee.write_models(dir, trainee.save_dtype()))
            })
        } else {
            best.mark_written(done);
            trainee.share_models().map(|()| None)
        };
        trainee.progress_mut().best = Some(best);
        let written = self.together(trainee, written)?;
        record_best(trainee.progress_mut());
        if let Some(dir) = written {
            self.report.saved(&dir);
            self.push_saved(HubStrategy::Best, &dir, done);
        }
        Ok(())
    }

    /// Writes the bases of adapters to the output folder.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(crate) fn write_bases(&self, trainee: &mut impl Trainee) -> Result<()> {
        let written = if self.world.is_main() {
            trainee.write_bases().and_then(|()| trainee.end_sharing())
        } else {
            trainee.share_models()
        };
        self.together(trainee, written)
    }

    /// Writes a checkpoint of the last snapshot. No weight has changed since then.
    fn save_checkpoint(&mut self, trainee: &mut impl Trainee) -> Result<()> {
        let saved = if self.world.is_main() {
            self.write_checkpoint(trainee)
        } else {
            trainee.share_models().and_then(|()| trainee.share_optimizers())
        };
        self.together(trainee, saved)
    }

    /// Makes an error of the rank that writes files an error of all ranks. If ranks have parts of the models, they break off, because they
    /// may be in the middle of sharing them.
    fn together<T>(&self, trainee: &impl Trainee, written: Result<T>) -> Result<T> {
        if self.world.is_broken() {
            return written;
        }
        if let (Err(error), true) = (&written, trainee.is_sharded()) {
            self.world.leave(&error.to_string());
            return written;
        }
        self.world.agree(written)
    }

    fn write_checkpoint(&mut self, trainee: &mut impl Trainee) -> Result<()> {
        self.report.sync()?;
        trainee.write_bases()?;
        let progress = trainee.progress();
        let done = progress.done;
        let metrics = trainee.card_metrics();
        let state = progress.snapshot.as_ref().map(|snapshot| snapshot.state.clone()).unwrap_or_default();
        self.checkpoints.save(done, metrics, state, |dir| {
            trainee.write_models(dir, Dtype::Auto)?;
            trainee.write_beside(dir)?;
            trainee.write_optimizers(dir)
        })?;
        let dir = self.checkpoints.place(done);
        self.report.saved(&dir);
        // The model of the last checkpoint is pushed from the output folder, with its card.
        if done < self.num_updates {
            self.push_saved(HubStrategy::EverySave, &dir, done);
        }
        Ok(())
    }

    /// Pushes the model in `dir` in the background, if `strategy` is that of the run.
    fn push_saved(&mut self, strategy: HubStrategy, dir: &Path, done: usize) {
        // The process ends soon, which would end the upload.
        if stop_requested() {
            return;
        }
        let warning = self.pusher.as_mut().and_then(|pusher| pusher.saved(strategy, dir, done));
        warning.iter().for_each(|warning| self.console().warn(warning));
    }

    /// Pushes the model of the run that has ended after `done` updates, and waits for it, if the run pushes.
    ///
    /// # Errors
    /// [`Error::NotPushed`], on all ranks; nothing of the run is lost.
    pub(crate) fn push(&mut self, done: usize) -> Result<()> {
        if !self.pushes || done == 0 {
            return Ok(());
        }
        let shows = self.report.console.is_loud();
        if let Some(pusher) = &mut self.pusher {
            self.report.console.note("pushing the model to the hub");
            pusher.warnings().iter().for_each(|warning| self.report.console.warn(warning));
            pusher.saved_final(shows);
        }
        loop {
            let busy = self.pusher.as_mut().is_some_and(|pusher| pusher.is_busy(TICK)) && !stop_requested();
            // The push continues if the other ranks are gone.
            if !self.world.any(busy).unwrap_or(busy) {
                break;
            }
        }
        let pushed = self.pusher.as_mut().map_or(Ok(String::new()), Pusher::outcome);
        let failed = self.world.any(pushed.is_err()).unwrap_or(pushed.is_err());
        match pushed {
            Ok(line) if !failed => {
                self.report.console.note(&line);
                Ok(())
            }
            Ok(_) => Err(Error::NotPushed("rank 0 could not push the model".into())),
            Err(error) => Err(error),
        }
    }

    /// Ends a run whose loop `ended`: leaves a checkpoint and the model in the output folder, also after an error. Returns the
    /// updates done.
    ///
    /// # Errors
    /// The error of the loop, or that something cannot be saved; [`Error::Stopped`] if the user stopped the run.
    pub(crate) fn end(&mut self, trainee: &mut impl Trainee, ended: Result<()>) -> Result<usize> {
        let ended = self.close(trainee, ended);
        if let Err(error) = &ended
            && self.world.is_broken()
        {
            self.world.leave(&error.to_string());
        }
        set_complete(ended.as_ref().is_ok_and(|done| *done == self.num_updates));
        match &ended {
            Ok(done) if *done == self.num_updates => self.report.end(Outcome::Finished, None),
            Ok(_) => self.report.end(Outcome::Stopped, None),
            Err(error @ Error::Stopped { .. }) => self.report.end(Outcome::Stopped, Some(&error.to_string())),
            Err(error) => self.report.end(Outcome::Failed, Some(&error.to_string())),
        }
        ended
    }

    /// Ends the run as [`Session::end`] does, without the trackers.
    fn close(&mut self, trainee: &mut impl Trainee, ended: Result<()>) -> Result<usize> {
        let done = trainee.progress().done;
        let dir = self.checkpoints.dir().to_path_buf();
        let has_model = done > 0 && !trainee.progress().is_mixed;
        if let Err(error) = &ended
            && !self.world.in_step(error)
        {
            // The other ranks are at another point of the run, so no collective can succeed. They wait only for this report, and this rank
            // saves what it has before it waits for them.
            self.world.report_failure(&error.to_string());
        }
        if self.world.is_broken() && (trainee.is_sharded() || !self.world.is_main()) {
            self.console().finish();
            return ended.map(|()| done);
        }
        let ended = self.leave_checkpoint(trainee, ended).map(|()| done);
        self.console().finish();
        if !self.world.is_main() {
            self.together(trainee, if has_model { trainee.share_models() } else { Ok(()) })?;
            return match ended {
                Ok(done) if done < self.num_updates && stop_requested() => {
                    let message = format!("stopped as requested after update {done} of {}", self.num_updates);
                    Err(Error::Stopped { message, code: exit_code() })
                }
                ended => ended,
            };
        }
        // The model is saved after an error too: an optimizer step that is not finite is never taken, so the weights are those of the step
        // before. But before the first update the model is the one that training started from, and in the output folder it would keep
        // the run from starting again there.
        let saved = has_model.then(|| {
            trainee.write_bases()?;
            let dtype = trainee.save_dtype();
            let save = |dtype| self.checkpoints.leave_model(done, &ended, || trainee.save_final(&dir, dtype));
            match save(dtype) {
                // The model in the output folder may be the only copy of a finished run's weights.
                Err(error) if dtype != Dtype::Auto => {
                    let name = dtype.name();
                    self.console().warn(&format!("save_dtype = {name}: {error}; saved as with save_dtype = auto"));
                    save(Dtype::Auto)
                }
                saved => saved,
            }
        });
        let saved = match saved {
            Some(saved) => Some(self.together(trainee, saved)),
            None => self.together(trainee, Ok(())).err().map(Err),
        };
        if let Some(Ok(())) = saved {
            self.report.saved_final(&dir);
        }
        conclude(ended, saved, self.num_updates, (&dir, &ResumedBy::of(self.command, &self.world, &dir)))
    }

    /// Writes a checkpoint if the run ended early and its last update is complete. Returns how the run ended, or the error of
    /// the checkpoint.
    fn leave_checkpoint(&mut self, trainee: &mut impl Trainee, ended: Result<()>) -> Result<()> {
        let progress = trainee.progress();
        let is_complete =
            !progress.is_mixed && progress.snapshot.as_ref().is_some_and(|snapshot| snapshot.steps == trainee.steps());
        let wanted = is_complete && self.world.is_main() && self.checkpoints.is_wanted_at_end(progress.done);
        let wanted = if self.world.is_broken() { Ok(wanted) } else { self.world.any(wanted) };
        let saved = wanted.and_then(|wanted| if wanted { self.save_checkpoint(trainee) } else { Ok(()) });
        match (saved, ended) {
            (Ok(()), ended) => ended,
            (Err(unsaved), Ok(())) => Err(unsaved),
            (Err(unsaved), Err(error)) => {
                self.console().warn(&format!("no checkpoint at the end: {unsaved}"));
                Err(error)
            }
        }
    }

    /// Shows the end of a run of `done` updates, if it did one: the `numbers` as pairs of a name for people and a metric, and
    /// the commands that try the model.
    pub(crate) fn report_end(&self, done: usize, numbers: &[(&str, &str)], commands: &[Vec<String>]) {
        if done > self.began_at {
            self.console().end(done, numbers, commands);
        }
    }
}

/// Starts the pushes of a run, to the `repository` if it is known; `None` if the run does not push.
fn pusher(run: &RunConfig, repository: Option<Repository>) -> Result<Option<Pusher>> {
    let repository = match repository {
        Some(repository) => Some(repository),
        None => run.hub.repository()?,
    };
    repository.map(|repository| Pusher::start(&run.hub, repository, &run.output_dir)).transpose()
}

/// Returns whether the user has stopped the run on any rank. A rank without a signal then stops as if it had got one.
///
/// # Errors
/// If a rank has ended or does not respond.
pub(crate) fn stop_requested_on_any(world: &World) -> Result<bool> {
    let stopped_here = stop_requested();
    if world.size() == 1 {
        return Ok(stopped_here);
    }
    let code = world.max_number(if stopped_here { f64::from(exit_code()) } else { 0.0 })?;
    if code > 0.0 && !stop_requested() {
        request_stop(code as u8);
    }
    Ok(code > 0.0)
}

/// Restores the trainee from a checkpoint. Returns warnings.
fn resume<T: Trainee, C: RunSettings>(
    trainee: &mut T,
    saved: &Saved,
    in_place: bool,
    spec: &RunSpec<'_, C>,
) -> Result<Vec<String>> {
    let mut warnings =
        saved.check_inputs(&spec.run.checkpoints, trainee.inputs(), spec.num_updates, spec.batch_size)?;
    check_bases(saved, trainee, &spec.run.output_dir)?;
    let done = saved.state.update;
    let progress = trainee.progress_mut();
    progress.done = done;
    progress.recorded = saved.parsed("recorded").unwrap_or(done);
    progress.rollbacks = saved.parsed(ROLLBACKS).unwrap_or(0);
    trainee.load(saved)?;
    // The best model so far is forgotten if it lies in another run's folder, or if it was the best in evaluations with other settings.
    let settings = checkpoint::settings(spec.config)?;
    let is_same = |name: &&str| saved.state.setting(name) == settings.get(*name).unwrap_or(&Value::Null);
    let same_evaluations = trainee.best_depends_on().iter().all(is_same);
    if let (Some(best), Ok(state), true) = (&mut trainee.progress_mut().best, saved.part("best"), in_place)
        && (same_evaluations || !best.is_of_evaluations())
    {
        best.load_state(state);
    }
    take_snapshot(trainee);
    warnings.extend(saved.machine_warnings());
    Ok(warnings)
}

/// Checks that the bases of adapters in the output folder `out` were made from the models that the resumed run reads. Each base is written
/// once, and every saved adapter refers to it.
fn check_bases(saved: &Saved, trainee: &impl Trainee, out: &Path) -> Result<()> {
    let Ok(began) = saved.part("inputs") else { return Ok(()) };
    for (base, names) in trainee.bases() {
        let base = out.join(base);
        let inputs = trainee.inputs();
        let base_input = names.iter().find_map(|&name| Some((name, inputs.has_changed(began, name)?)));
        if let Some((name, true)) = base_input
            && base.is_dir()
        {
            let message = format!(
                "the saved base of this run's adapters was made from {name}, which has changed since; train in another output_dir"
            );
            return Err(Error::invalid(base, message));
        }
    }
    Ok(())
}

/// Records in the snapshot that the best model is written.
fn record_best(progress: &mut Progress) {
    if let (Some(best), Some(snapshot)) = (&progress.best, &mut progress.snapshot) {
        snapshot.state.insert("best".into(), best.state());
    }
}

/// The way to resume a run that ended early.
#[derive(Debug)]
enum ResumedBy {
    /// By a command line with these words before the settings.
    Line(Vec<String>),
    /// By the command line that started the run, because it is another launcher's, or has secrets that the run writes to no file.
    SameLine,
    /// By a setting, in a program that has its own command line.
    Setting,
}

impl ResumedBy {
    /// Returns the way for the run of `command` in `dir`.
    fn of(command: &str, world: &World, dir: &Path) -> Self {
        if terminal::command_line().is_none() {
            return Self::Setting;
        }
        let launched_by = std::env::var(LAUNCHED_BY).ok();
        if lacks_secrets(dir) || (world.size() > 1 && launched_by.is_none()) {
            return Self::SameLine;
        }
        let before = launched_by.iter().flat_map(|words| words.lines());
        Self::Line(before.chain([command]).map(String::from).collect())
    }

    /// Returns the end of the message of a run in `dir` that ended early: how to resume it from the checkpoint `newest`, or, without one,
    /// how to begin it again.
    fn describe(&self, dir: &Path, newest: Option<&Path>) -> String {
        let quoted = |words: &[String]| terminal::shell_command(&[words.to_vec()], None).trim().to_string();
        match (self, newest) {
            (Self::Line(command), _) => {
                let purpose = if newest.is_some() { "resume" } else { "begin again" };
                let program = terminal::program();
                let config = dir.join(CONFIG).display().to_string();
                let settings = ["--config", &config, "--resume_from_checkpoint", "true"].map(String::from);
                format!("; to {purpose}: {}", quoted(&[&[program], command.as_slice(), &settings].concat()))
            }
            (Self::SameLine, Some(newest)) => {
                let words = ["--resume_from_checkpoint".to_string(), newest.display().to_string()];
                format!("; the same command with {} resumes", quoted(&words))
            }
            (Self::SameLine, None) => "; the same command with --resume_from_checkpoint true begins again".into(),
            (Self::Setting, Some(newest)) => format!("; --resume_from_checkpoint {} resumes", newest.display()),
            (Self::Setting, None) => "; --resume_from_checkpoint true begins it again".into(),
        }
    }
}

/// Returns whether the settings in the folder of a run lack the query of a reward service, which may be secret.
fn lacks_secrets(dir: &Path) -> bool {
    let is_cut = |value: &Value| value.as_str().is_some_and(|text| text.ends_with("?..."));
    resolved_settings(dir).is_some_and(|settings| {
        let rewards = settings["reward"].as_array().into_iter().flatten();
        rewards.chain([&settings["reward_url"]]).any(is_cut)
    })
}

/// Returns the result of a training command: `done` updates of `total`, or the error that ended it. `saved` tells whether the model could
/// be saved in `dir`, if there is one to save. The message of an error says how the run is resumed, from `by`.
///
/// # Errors
/// If the run was stopped by [`rlhf_base::signals::request_stop`] or by an error, or the model is not saved, because the next command
/// should not use it as if it were complete. A stop by a watcher is no error: the caller knows of it.
fn conclude(
    done: Result<usize>,
    saved: Option<Result<()>>,
    total: usize,
    (dir, by): (&Path, &ResumedBy),
) -> Result<usize> {
    let left = |saved: &Option<Result<()>>| {
        let model = match saved {
            Some(Ok(())) => format!("the model as far as it came is in {}", dir.display()),
            Some(Err(error)) => format!("the model was not saved: {error}"),
            None => "no update is done, so there is no model".to_string(),
        };
        let newest = checkpoint::newest(dir).filter(|_| saved.is_some());
        format!("{model}{}", by.describe(dir, newest.as_deref()))
    };
    match done {
        Ok(done) if done == total || !stop_requested() => saved.unwrap_or(Ok(())).map(|()| done),
        Ok(done) => {
            let message = format!("stopped as requested after update {done} of {total}; {}", left(&saved));
            match saved {
                Some(Err(_)) => Err(Error::Run(message)),
                _ => Err(Error::Stopped { message, code: exit_code() }),
            }
        }
        // The run was stopped while it waited for something, not after an update.
        Err(Error::Stopped { message, code }) => {
            Err(Error::Stopped { message: format!("{message}; {}", left(&saved)), code })
        }
        // The error stays that of a reward, so that the caller can tell it apart.
        Err(Error::Reward { name, source }) => {
            Err(Error::Reward { name, source: Box::new(Error::Run(format!("{source}; {}", left(&saved)))) })
        }
        Err(error) => Err(Error::Run(format!("{error}; {}", left(&saved)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::sinks::console::Console;
    use rlhf_base::schema::{Field, Settings as _};

    #[test]
    fn a_run_that_ended_early_names_the_whole_line_that_resumes_it() {
        let line = |words: &str| ResumedBy::Line(words.split(' ').map(String::from).collect());
        let newest = Path::new("runs/a b/checkpoint-2");
        let said = line("ppo").describe(Path::new("runs/a b"), Some(newest));
        let end = " ppo --config 'runs/a b/config.yaml' --resume_from_checkpoint true";
        assert!(said.starts_with("; to resume: ") && said.ends_with(end), "{said}");
        let said = line("launch --nproc_per_node 2 sft").describe(Path::new("out"), None);
        let end = " launch --nproc_per_node 2 sft --config out/config.yaml --resume_from_checkpoint true";
        assert!(said.starts_with("; to begin again: ") && said.ends_with(end), "{said}");
        // Other programs have their own ways to resume.
        let message = |by: &ResumedBy, newest| by.describe(Path::new("out"), newest);
        assert_eq!(
            message(&ResumedBy::Setting, Some(newest)),
            "; --resume_from_checkpoint runs/a b/checkpoint-2 resumes"
        );
        let dir = tempfile::tempdir().unwrap();
        for (reward, expected) in
            [("url:http://host/x", false), ("a=url:http://host/x?...", true), ("regex:a?...b", false)]
        {
            write_resolved(&json!({"reward_url": null, "reward": ["json", reward]}), dir.path().join(CONFIG)).unwrap();
            assert_eq!(lacks_secrets(dir.path()), expected, "{reward}");
        }
        // Ranks that torchrun started are resumed by its command line.
        assert_eq!(
            message(&ResumedBy::SameLine, Some(newest)),
            "; the same command with --resume_from_checkpoint 'runs/a b/checkpoint-2' resumes"
        );
        assert_eq!(
            message(&ResumedBy::SameLine, None),
            "; the same command with --resume_from_checkpoint true begins again"
        );
    }
    use crate::run::resolved::write_resolved;
    use crate::run::settings::Resume;
    use rlhf_base::schema::defaults;

    /// A trainee whose weights are the sum of the numbers of its updates.
    struct Counter {
        progress: Progress,
        inputs: Inputs,
        weights: usize,
        /// Resumable state that moves on in the middle of an update.
        taken: usize,
        steps: i64,
        fails_to_load: bool,
        dir: std::path::PathBuf,
    }

    impl Counter {
        fn new(config: &Settings) -> Self {
            let (progress, inputs) = (Progress::new(&config.eval), Inputs::default());
            let dir = config.run.output_dir.clone();
            Self { progress, inputs, weights: 0, taken: 0, steps: 0, fails_to_load: false, dir }
        }

        fn train(&mut self, config: &Settings, stop_after: usize, fails_at: Option<usize>) -> Result<usize> {
            let alone = Runtime { world: World::single(), console: Console::Silent };
            let opening = Opening::new(&alone.world, "sft", (config, &config.run), &[])?;
            let spec = RunSpec {
                command: "sft",
                config,
                run: &config.run,
                eval: &config.eval,
                logging_steps: 2,
                num_updates: 9,
                batch_size: 1,
                epochs: Epochs { per_update: 1, len: 9 },
            };
            let mut session = Session::begin(self, Some(opening), &spec, Vec::new(), &alone)?;
            session.watch(|event| match event {
                Event::Update { step, .. } if *step >= stop_after => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            });
            let ended = self.updates(&mut session, fails_at);
            session.end(self, ended)
        }

        fn updates(&mut self, session: &mut Session<'_>, fails_at: Option<usize>) -> Result<()> {
            while session.is_running(self).unwrap() {
                let (due, step) = (session.due(self), self.progress.done + 1);
                self.taken += 10;
                if fails_at == Some(step) {
                    return Err(Error::Run("the update fails".into()));
                }
                self.weights += step;
                self.steps += 1;
                let mut metrics = Metrics::default();
                metrics.push("step", step as f64);
                metrics.push("loss", (step as f64 - 4.0).abs());
                session.emit(&Event::Update { step, metrics: &metrics })?;
                session.complete_update(self, due, Some(&metrics))?;
                session.save_due(self, due)?;
            }
            Ok(())
        }
    }

    impl Trainee for Counter {
        type State = Map<String, Value>;

        fn progress(&self) -> &Progress {
            &self.progress
        }

        fn progress_mut(&mut self) -> &mut Progress {
            &mut self.progress
        }

        fn inputs(&self) -> &Inputs {
            &self.inputs
        }

        fn fixed_state(&self) -> FixedState {
            FixedState { inputs: self.inputs.state(), ..FixedState::default() }
        }

        fn state(&self) -> Self::State {
            Map::from_iter([("taken".into(), self.taken.into()), ("recorded".into(), self.progress.recorded.into())])
        }

        fn load(&mut self, saved: &Saved) -> Result<()> {
            if self.fails_to_load {
                return Err(Error::Run("the load fails".into()));
            }
            self.taken = saved.parsed("taken")?;
            let read = |name: &str| std::fs::read_to_string(saved.dir.join(name)).unwrap().parse::<usize>().unwrap();
            (self.weights, self.steps) = (read("weights"), read("steps") as i64);
            Ok(())
        }

        fn steps(&self) -> i64 {
            self.steps
        }

        fn write_models(&self, dir: &Path, _: Dtype) -> Result<()> {
            rlhf_base::weights::write_text(&dir.join("weights"), &self.weights.to_string())
        }

        fn write_optimizers(&self, dir: &Path) -> Result<()> {
            rlhf_base::weights::write_text(&dir.join("steps"), &self.steps.to_string())
        }

        fn bases(&self) -> Vec<(PathBuf, &'static [&'static str])> {
            Vec::new()
        }

        fn write_bases(&mut self) -> Result<()> {
            rlhf_base::weights::write_text(&self.dir.join("base"), "base")
        }

        fn save_final(&self, dir: &Path, dtype: Dtype) -> Result<()> {
            self.write_models(dir, dtype)
        }
    }

    /// The settings of a run.
    #[derive(Serialize)]
    struct Settings {
        #[serde(flatten)]
        run: RunConfig,
        #[serde(flatten)]
        eval: EvalConfig,
    }

    impl RunSettings for Settings {
        fn described(&self) -> Vec<Field> {
            [RunConfig::fields(), EvalConfig::fields()].concat()
        }
    }

    fn config(dir: &Path) -> Settings {
        let run = RunConfig { output_dir: dir.into(), ..defaults() };
        let mut config = Settings { run, eval: defaults() };
        config.run.checkpoints.resume_from_checkpoint = Some(Resume::Latest);
        config.run.checkpoints.save_steps = Some(4.into());
        config.eval.metric_for_best_model = Some("loss".into());
        config
    }

    fn session(config: &Settings) -> Session<'static> {
        Session {
            command: "sft",
            report: Reporter::open(&config.run, "sft", 9, Reached::default(), Console::Silent).unwrap(),
            checkpoints: Checkpoints::new("sft", &config.run, config, 9).unwrap(),
            began_at: 0,
            num_updates: 9,
            eval_steps: None,
            epochs: Epochs { per_update: 1, len: 9 },
            world: World::single(),
            is_driven: false,
            save_asked: false,
            logging_steps: 1,
            compares_ranks: false,
            pushes: false,
            pusher: None,
        }
    }

    fn state(dir: &Path, update: usize) -> Map<String, Value> {
        Saved::read(&dir.join(format!("checkpoint-{update}"))).unwrap().state.state
    }

    #[test]
    fn a_run_that_is_stopped_or_fails_resumes_where_its_last_update_was_complete() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        assert_eq!(Counter::new(&config).train(&config, 3, None).unwrap(), 3);
        // A line of metrics is due after every second update; the line of the third was written because of the stop.
        assert_eq!(state(dir.path(), 3)["recorded"], 2);
        let mut failing = Counter::new(&config);
        let error = failing.train(&config, 99, Some(6)).unwrap_err().to_string();
        assert!(error.starts_with("the update fails; ") && error.ends_with("checkpoint-5 resumes"), "{error}");
        assert_eq!((failing.taken, &state(dir.path(), 5)["taken"]), (60, &json!(50)), "the snapshot of update 5");
        // The lock is released with the trainee.
        drop(failing);
        let mut last = Counter::new(&config);
        assert_eq!(last.train(&config, 99, None).unwrap(), 9);
        assert_eq!((last.weights, last.taken, last.steps), (45, 90, 9));
        let lines = std::fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
        assert_eq!(
            lines.lines().count(),
            9 - 2,
            "the lines of updates 3 and 5, which were not due, are not there again"
        );
        assert_eq!(std::fs::read_to_string(dir.path().join("weights")).unwrap(), "45");
        // The loss is least after update 4, whose weights are 1 + 2 + 3 + 4.
        assert_eq!(std::fs::read_to_string(dir.path().join("best/weights")).unwrap(), "10");
    }

    #[test]
    fn a_rollback_that_fails_leaves_neither_a_checkpoint_nor_a_model_of_two_updates() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        let mut counter = Counter::new(&config);
        counter.train(&config, 3, None).unwrap();
        let saved = Saved::read(&dir.path().join("checkpoint-3")).unwrap();
        let mut session = session(&config);
        counter.fails_to_load = true;
        let failed = session.roll_back(&mut counter, &saved).unwrap_err();
        std::fs::remove_dir_all(dir.path().join("checkpoint-3")).unwrap();
        std::fs::remove_file(dir.path().join("weights")).unwrap();
        let error = session.close(&mut counter, Err(failed)).unwrap_err().to_string();
        assert!(error.starts_with("the load fails"), "{error}");
        for name in ["checkpoint-3", "weights"] {
            assert!(!dir.path().join(name).exists(), "{name}");
        }
    }

    #[test]
    fn no_checkpoint_is_written_in_the_middle_of_an_update() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        let mut counter = Counter::new(&config);
        counter.train(&config, 2, None).unwrap();
        counter.steps += 1;
        let mut session = session(&config);
        std::fs::remove_dir_all(dir.path().join("checkpoint-2")).unwrap();
        session.leave_checkpoint(&mut counter, Ok(())).unwrap();
        assert!(!dir.path().join("checkpoint-2").exists());
        counter.steps -= 1;
        session.leave_checkpoint(&mut counter, Ok(())).unwrap();
        assert!(dir.path().join("checkpoint-2").exists());
    }
}
