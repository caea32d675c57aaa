//! `rlhf replay`: one update of a run again, from its rollout file and the checkpoint before it.
//!
//! The update itself is the trainer's: the responses and their scores come from the file instead of from sampling and rewards, and an
//! observer of the learner collects every number.

mod changes;
mod compare;

use super::{Batch, COMMAND, PpoTrainer, Timed};
use crate::data::{Episode, Prompt};
use crate::reward::{ComponentScores, FnReward, Rewards, ScoreTransform, Scored};
use crate::rl::kl::KlController;
use crate::rl::trace::{NamedTensors, collect_tensors};
use crate::run::Runtime;
use crate::run::checkpoint::{Change, Saved, UpdateRecord, name_of, numbered};
use crate::run::event::{Rollout, RolloutRow, RolloutTurns};
use crate::run::output_dir::{CONFIG, METRICS, ROLLOUTS, holds_run};
use crate::run::resolved::write_resolved;
use crate::run::rollout_file::{file_name, is_of_ppo, metrics_line, read_rollout, recorded_updates};
use crate::run::session::{Trainee, resumable_parts};
use crate::run::start::Found;
use crate::settings::{AdvantageEstimator, PpoConfig, PpoRun};
pub use compare::Differing;
use compare::{Bound, ComparedMetrics, ComparedState};
use rlhf_base::dist::{World, as_ranks};
use rlhf_base::metrics::Metrics;
use rlhf_base::weights::{pretty, save_file, write_text};
use rlhf_base::{Error, Result};
use rlhf_lm::generate::Response;
use rlhf_lm::model::{Dtype, TokenSet};
use rlhf_lm::optim::micro_batch::MicroBatchSettings;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use tch::{Device, Tensor};

/// The file with every number of a replayed update.
const TENSORS: &str = "update.safetensors";

/// The file with the metrics of the run and of the replay.
const COMPARISON: &str = "comparison.json";

/// The folder with models and optimizers after a replayed update.
const AFTER: &str = "after";

/// Scores of an update, as a run has recorded them.
#[derive(Debug)]
pub(super) struct RecordedScores {
    pub(super) scored: Scored,
    /// Scores of greedy responses, `[B]` f32; NaN where no reward gave one.
    pub(super) baselines: Option<Tensor>,
}

/// A reward of the record.
#[derive(Debug, Deserialize)]
struct RecordedReward {
    name: String,
    /// The weight; `None` where it was not finite.
    weight: Option<f64>,
    extra: Vec<(String, Option<f64>)>,
}

/// An update of a run that can be computed again: its rollout file, and the checkpoint before it.
///
/// ```no_run
/// use rlhf::run::Console;
/// use rlhf::train::ppo::RecordedUpdate;
/// # fn main() -> rlhf::Result<()> {
/// # let config: rlhf::settings::PpoConfig = todo!();
/// // `config` has the settings of the run, some of them changed.
/// let replayed = RecordedUpdate::open("runs/ppo", 3)?.replay(&config, "runs/ppo-replay-3", Console::Silent)?;
/// println!("{:?}", replayed.verdict());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RecordedUpdate {
    run: PathBuf,
    /// The update, counted from 1.
    update: usize,
    rows: Vec<RolloutRow>,
    record: UpdateRecord,
    /// The checkpoint before the update; `None` before the first update.
    from: Option<Saved>,
}

impl RecordedUpdate {
    /// Opens the update `update`, counted from 1, of the run in the folder `run`.
    ///
    /// # Errors
    /// If the folder holds no PPO run with the rollout of the update and the checkpoint before it; the error names the updates that can
    /// be replayed.
    pub fn open(run: impl AsRef<Path>, update: usize) -> Result<Self> {
        let run = run.as_ref();
        check_run(run, update)?;
        let recorded = recorded_updates(run)?;
        if !recorded.contains(&update) {
            return Err(no_rollout(run, update, &recorded)?);
        }
        let path = run.join(ROLLOUTS).join(file_name(update));
        let Rollout { rows, record } = read_rollout(&path, update)?;
        let record = UpdateRecord::read(&path, record)?;
        // The line is compared at the end; an error in its file ends the replay already here.
        metrics_line(run, update)?;
        if record.state.update + 1 != update {
            let message = format!("expected the record of update {update}, found that of {}", record.state.update + 1);
            return Err(Error::invalid(path, message));
        }
        let callbacks = record.parts().part("own").ok().and_then(Value::as_str);
        if let Some(callbacks) = callbacks {
            return Err(Error::invalid(
                run,
                format!("the run had {callbacks} of its caller, which its files do not have"),
            ));
        }
        let from = (update > 1).then(|| before(run, update, &recorded)).transpose()?;
        Ok(Self { run: run.into(), update, rows, record, from })
    }

    /// Every setting of the run at this update, by name.
    pub fn settings(&self) -> &Map<String, Value> {
        &self.record.state.config
    }

    /// Number of ranks of the run. A replay on the same number is equal bit by bit.
    pub fn ranks(&self) -> usize {
        self.record.state.ranks
    }

    /// Checks that `size` ranks can replay the update: as many as in the run, or one.
    ///
    /// # Errors
    /// If they cannot.
    pub fn check_ranks(&self, size: usize) -> Result<()> {
        let ranks = self.ranks();
        if size == 1 || size == ranks {
            return Ok(());
        }
        let plural = if ranks == 1 { "" } else { "s" };
        Err(Error::Usage(format!(
            "update {} was computed by {ranks} rank{plural}: expected as many or one process, found {size} ranks",
            self.update
        )))
    }

    /// The working directory of the run; relative paths among its settings are relative to it.
    pub fn working_dir(&self) -> Option<&Path> {
        self.record.state.working_dir.as_deref()
    }

    /// Computes the update again with the settings `config`, and writes its numbers to the folder `output_dir`: every intermediate tensor
    /// (`update.safetensors`), models and optimizers after the update (`after`), metrics, and a comparison with the run. Nothing is
    /// sampled, no reward is computed, and nothing in the run's folder changes.
    ///
    /// An update of several ranks is computed by as many ranks, bit by bit, or by one process, whose sums are rounded in another order. All
    /// ranks call this; rank 0 writes and compares, and each of several ranks writes the numbers of its own micro-batches to
    /// `update-rank-N.safetensors`.
    ///
    /// # Errors
    /// If a setting differs from the run's that decides what was sampled or read; if models or data have changed since the run; if `output_dir`
    /// holds anything or lies in the run's folder; if there are several ranks, but not as many as in the run.
    pub fn replay(
        &self,
        config: &PpoConfig,
        output_dir: impl AsRef<Path>,
        runtime: impl Into<Runtime>,
    ) -> Result<Replayed> {
        let Runtime { world, .. } = runtime.into();
        self.check_ranks(world.size())?;
        // Batch sizes depend on the number of ranks, so they are computed as in the run.
        as_ranks(self.ranks(), || self.replay_on(&world, config, output_dir.as_ref()))
    }

    fn replay_on(&self, world: &World, config: &PpoConfig, out: &Path) -> Result<Replayed> {
        let run = PpoRun::new(config)?;
        let changes = self.changes(config)?;
        changes::check(&changes, self.update)?;
        let is_remax = config.advantage.advantage_estimator == AdvantageEstimator::Remax;
        if is_remax && self.rows.iter().all(|row| row.baseline.is_none()) {
            return Err(Error::refused(
                "advantage_estimator",
                format!(
                    " = remax: expected another one: update {} of the run has no greedy responses, and a replay samples none",
                    self.update
                ),
            ));
        }
        world.agree(self.check_output(out))?;
        let mut trainer = self.trainer(run, &changes, world)?;
        let (metrics, mut tensors) = observed_update(&mut trainer)?;
        let prompt_rows: Vec<i64> = self.rows.iter().map(|row| row.prompt_row as i64).collect();
        tensors.push(("rollout.prompt_rows".into(), Tensor::from_slice(&prompt_rows)));
        let after = out.join(AFTER);
        world.agree(std::fs::create_dir_all(&after).map_err(Error::io("create the folder", &after)))?;
        let name = match world.size() {
            1 => TENSORS.to_string(),
            _ => format!("update-rank-{}.safetensors", world.rank()),
        };
        let written = save_file(&out.join(name), &tensors).and_then(|()| {
            if world.is_main() {
                write_resolved(config, out.join(CONFIG))?;
                write_text(&out.join(METRICS), &format!("{}\n", json!(metrics)))?;
                trainer.write_models(&after, Dtype::Auto)?;
                trainer.write_beside(&after)?;
                trainer.write_optimizers(&after)
            } else {
                trainer.share_models().and_then(|()| trainer.share_optimizers())
            }
        });
        if trainer.is_sharded() {
            // The other ranks may be in the middle of sharing their parts.
            written.inspect_err(|error| world.leave(&error.to_string()))?;
        } else {
            world.agree(written)?;
        }
        if !world.is_main() {
            return Ok(Replayed::without_comparison(self.update, out, world.size()));
        }
        let replayed = self.compared(&trainer, &metrics, changes, out)?;
        write_text(&out.join(COMPARISON), &pretty(&replayed.to_json()))?;
        Ok(replayed)
    }

    /// The settings of `config` that differ from the run's, except the output folder.
    fn changes(&self, config: &PpoConfig) -> Result<Vec<Change>> {
        let changes = self.record.changes(config)?;
        Ok(changes.into_iter().filter(|change| change.name != "output_dir").collect())
    }

    /// Checks that a replay may write to `out`.
    fn check_output(&self, out: &Path) -> Result<()> {
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.into());
        let run = self.run.canonicalize().unwrap_or_else(|_| absolute(&self.run));
        let place = absolute(out);
        let is_inside = place.ancestors().any(|folder| folder.canonicalize().is_ok_and(|folder| folder == run));
        if is_inside {
            let rest = format!(" = {}: expected a folder outside of the run, found one in it", out.display());
            return Err(Error::refused("output_dir", rest));
        }
        if out.exists() && !out.is_dir() {
            return Err(Error::invalid(out, "output_dir: expected a new folder, found a file"));
        }
        let mut entries = if out.is_dir() {
            std::fs::read_dir(out).map_err(Error::io("read the folder", out))?
        } else {
            return Ok(());
        };
        let Some(entry) = entries.next() else { return Ok(()) };
        let name = entry.map_err(Error::io("read the folder", out))?.file_name();
        let message = format!(
            "output_dir: expected an empty or new folder, found `{}` in it; choose another one by --output_dir",
            name.to_string_lossy()
        );
        Err(Error::invalid(out, message))
    }

    /// Loads the run as it was before the update, with its recorded responses as the next ones.
    fn trainer(&self, mut run: PpoRun, changes: &[Change], world: &World) -> Result<PpoTrainer> {
        // These settings change no number of the update.
        let config = &mut run.config;
        config.run.output_dir.clone_from(&self.run);
        config.rollout_log.log_rollouts = false;
        config.rollout_log.rollouts_limit = None;
        if config.run.device.resolve()? == Device::Cpu {
            // The folder of the run need not be writable. From a GPU nothing is offloaded to a file, and the steps of a sharded, offloaded
            // state are computed by the processor.
            config.run.keep_in_memory();
        }
        if !changes.iter().any(|change| change.name == "num_threads") {
            // Sums depend on the number of threads.
            config.run.num_threads = usize::try_from(self.record.state.threads).ok();
        }
        let found = Found::read(&self.record.parts())?;
        let stand_ins = self.stand_ins(run.rewards.len())?;
        let mut trainer = PpoTrainer::load(run, stand_ins, found, world)?;
        let changed = trainer.record.inputs.changed(self.record.parts().part("inputs")?);
        if !changed.is_empty() {
            let message = format!("inputs have changed since update {}: {}", self.update, changed.join("; "));
            return Err(Error::invalid(&self.run, message));
        }
        trainer.plan.num_total_batches = self.record.state.num_updates;
        let expected = self.count("batch_size")?;
        let found = trainer.plan.batch_size;
        if found != expected {
            return Err(Error::Usage(format!(
                "batch sizes: expected settings that make an update of {expected} responses, as in the run, found {found}"
            )));
        }
        self.restore(&mut trainer, changes)?;
        trainer.sampler.recorded = Some(self.batch(&trainer)?);
        Ok(trainer)
    }

    /// Stand-ins for the caller's rewards, which come after the `named` rewards of the settings. They have only the recorded scores.
    fn stand_ins(&self, named: usize) -> Result<Rewards> {
        let mut rewards = Rewards::recorded();
        for RecordedReward { name, weight, .. } in self.rewards()?.into_iter().skip(named) {
            let transform = ScoreTransform { weight: weight.unwrap_or(f64::NAN), ..ScoreTransform::default() };
            rewards = rewards.with_transform(&name, FnReward::recorded(), transform);
        }
        Ok(rewards)
    }

    fn rewards(&self) -> Result<Vec<RecordedReward>> {
        self.record.parts().parsed("rewards")
    }

    /// A count in the record.
    fn count(&self, name: &str) -> Result<usize> {
        self.record.parts().parsed(name)
    }

    /// Restores weights, optimizers and state before the update.
    fn restore(&self, trainer: &mut PpoTrainer, changes: &[Change]) -> Result<()> {
        if let Some(checkpoint) = &self.from {
            let has_critic = self.record.state.setting("advantage_estimator").as_str() == Some("gae");
            if trainer.run.needs_critic && !has_critic {
                return Err(Error::refused(
                    "advantage_estimator",
                    format!(" = gae: expected one without a value model: {} has none", checkpoint.dir.display()),
                ));
            }
            trainer.load(checkpoint)?;
        }
        let limit = MicroBatchSettings::from(&trainer.run.config.run);
        let device = trainer.learner.policy.device();
        let tokens = &mut trainer.learner.micro_batch_tokens;
        *tokens = limit.resumed_tokens(device, *tokens, &self.record.parts().parsed("micro_batch")?);
        let changes_kl = |change: &Change| ["kl_coef", "kl_coef_end", "adap_kl_ctrl"].contains(&change.name.as_str());
        if changes.iter().any(changes_kl) {
            trainer.course.kl_controller = KlController::new(&trainer.run.config.kl, trainer.plan.num_total_batches);
        }
        let coef = trainer.run.config.loss.entropy_coef;
        if changes.iter().any(|change| change.name == "entropy_coef") {
            trainer.learner.entropy_controller.iter_mut().for_each(|controller| controller.set_coef(coef));
        }
        trainer.course.progress.done = self.update - 1;
        trainer.course.progress.rollbacks = self.count("rollbacks")?;
        Ok(())
    }

    /// The responses of the update with their scores.
    fn batch(&self, trainer: &PpoTrainer) -> Result<Batch> {
        let rows = &self.rows;
        let vocab = trainer.learner.policy.config().vocab_size;
        for (place, row) in (1..).zip(rows) {
            let invalid = |message: String| Err(Error::invalid(&self.record.path, format!("row {place}: {message}")));
            let prompt: Option<&Prompt> = trainer.data.prompts.get(row.prompt_row);
            if prompt.is_none_or(|prompt| row.turns.is_none() && prompt.text != row.prompt) {
                return invalid(format!(
                    "expected the prompt of row {} of the data, found another text",
                    row.prompt_row
                ));
            }
            let prompt_ids = row.turns.iter().flat_map(|turns| &turns.prompt_ids);
            if let Some(id) = row.token_ids.iter().chain(prompt_ids).find(|id| !(0..vocab).contains(*id)) {
                return invalid(format!("expected token ids below the vocabulary of {vocab}, found {id}"));
            }
        }
        let sets = |row: &RolloutRow| {
            let kept = |ids: &Vec<i64>| {
                let mut kept = vec![false; vocab as usize];
                for place in ids.iter().filter_map(|&id| usize::try_from(id).ok()) {
                    kept.iter_mut().skip(place).take(1).for_each(|kept| *kept = true);
                }
                TokenSet::new(&kept)
            };
            row.kept_ids.as_ref().map(|sets| sets.iter().map(kept).collect())
        };
        let response = |row: &RolloutRow| Response {
            tokens: row.token_ids.clone(),
            logprobs: row.logprobs.clone(),
            finish: row.finish_reason,
            sets: sets(row),
            inserted: row.turns.as_ref().map(|turns| turns.inserted.clone()).unwrap_or_default(),
        };
        let episode = |row: &RolloutRow| {
            let turns = row.turns.clone()?;
            let data_row = trainer.data.prompts[row.prompt_row].row.clone();
            let prompt = Prompt { tokens: turns.prompt_ids, text: row.prompt.clone(), row: data_row };
            let RolloutTurns { messages, calls, failures, reward, .. } = turns;
            Some(Episode {
                prompt,
                messages,
                calls,
                failures,
                reward,
                reward_name: None,
                logs: Vec::new(),
                is_over: false,
                has_failed: false,
            })
        };
        Ok(Batch {
            update: self.update - 1,
            rows: rows.iter().map(|row| row.prompt_row).collect(),
            responses: rows.iter().map(response).collect(),
            episodes: rows.iter().filter_map(episode).collect(),
            dropped: self.count("dropped")?,
            reused: self.count("reused")? > 0,
            warnings: Vec::new(),
            // A replay samples no responses.
            sampling: Timed::default(),
            sampled_groups: self.count("sampled_groups")?,
            replaced_groups: self.count("replaced_groups")?,
            recorded: Some(self.scores()?),
        })
    }

    fn scores(&self) -> Result<RecordedScores> {
        let rows = &self.rows;
        let component = |(at, reward): (usize, RecordedReward)| {
            let score = |row: &RolloutRow| row.components.get(at).and_then(|(_, score)| *score).unwrap_or(f64::NAN);
            ComponentScores {
                name: reward.name,
                scores: rows.iter().map(score).collect(),
                seconds: 0.0,
                extra: reward.extra.into_iter().map(|(name, value)| (name, value.unwrap_or(f64::NAN))).collect(),
                columns: Vec::new(),
            }
        };
        let scored = Scored {
            responses: rows.iter().map(|row| row.reward).collect(),
            tokens: rows.iter().map(|row| row.token_scores.clone()).collect(),
            raw: rows.iter().map(|row| row.raw_score).collect(),
            components: self.rewards()?.into_iter().enumerate().map(component).collect(),
            warning: None,
        };
        let baselines: Vec<f32> = rows.iter().map(|row| row.baseline.map_or(f32::NAN, |score| score as f32)).collect();
        let has_baselines = rows.iter().any(|row| row.baseline.is_some());
        Ok(RecordedScores { scored, baselines: has_baselines.then(|| Tensor::from_slice(&baselines)) })
    }

    /// Compares the replayed update with the run.
    fn compared(&self, trainer: &PpoTrainer, metrics: &Metrics, changes: Vec<Change>, out: &Path) -> Result<Replayed> {
        let size = trainer.learner.world.size();
        let bound =
            if self.ranks() == size { Bound::Bits } else { Bound::rounding(trainer.run.config.run.is_low_precision()) };
        let line = metrics_line(&self.run, self.update)?;
        let compared = line.map(|line| compare::metrics(&line, metrics, bound));
        let place = self.run.join(name_of(self.update));
        let saved = if place.is_dir() { Some(Saved::read(&place)?) } else { None };
        let state = saved
            .as_ref()
            .map(|saved| compare::checkpoint(saved, &resumable_parts(trainer), &out.join(AFTER), bound))
            .transpose()?;
        Ok(Replayed {
            update: self.update,
            output_dir: out.into(),
            ranks: [self.ranks(), size],
            bound,
            changed: changes.into_iter().map(|change| (change.name.clone(), change.shown())).collect(),
            metrics: compared,
            state,
        })
    }
}

/// Runs the next update of `trainer`; returns its metrics and all its numbers.
fn observed_update(trainer: &mut PpoTrainer) -> Result<(Metrics, NamedTensors)> {
    let (sender, events) = channel();
    trainer.learner.observer = Some(sender);
    let outcome = trainer.one_update(&|_| ());
    // Dropping the sender ends the events.
    trainer.learner.observer = None;
    let metrics = outcome?.metrics;
    trainer.course.progress.done += 1;
    Ok((metrics, collect_tensors(events)))
}

/// Checks that the folder `run` holds a run of PPO, of which `update` is to be replayed.
fn check_run(run: &Path, update: usize) -> Result<()> {
    let found = match run {
        run if !run.exists() => "no such folder",
        run if !run.is_dir() => "a file",
        run if !holds_run(run) => "none of its files",
        run if is_of_ppo(run)? => return Ok(()),
        _ => "a run of another command",
    };
    Err(Error::invalid(
        run,
        format!("update {update}: expected the folder of a run of `rlhf ppo`, `grpo` or `rloo`, found {found}"),
    ))
}

/// The error for an update without a rollout file.
fn no_rollout(run: &Path, update: usize, recorded: &[usize]) -> Result<Error> {
    let message = match recorded {
        [] => format!("update {update}: expected its rollout, found none in this run: --log_rollouts writes them"),
        _ => format!(
            "update {update}: expected its rollout, found those of {}; {}",
            listed(recorded),
            can_replay(run, recorded)?
        ),
    };
    Ok(Error::invalid(run, message))
}

/// The checkpoint before `update`.
fn before(run: &Path, update: usize, recorded: &[usize]) -> Result<Saved> {
    let place = run.join(name_of(update - 1));
    if place.is_dir() {
        let saved = Saved::read(&place)?;
        if saved.state.command() != COMMAND || saved.state.update != update - 1 {
            let message = format!("expected a checkpoint of `rlhf {COMMAND}` after update {}", update - 1);
            return Err(Error::invalid(place, message));
        }
        return Ok(saved);
    }
    let message = format!(
        "update {update}: expected {} before it, found none; {} (--save_steps 1 saves a checkpoint after each update)",
        name_of(update - 1),
        can_replay(run, recorded)?
    );
    Err(Error::invalid(run, message))
}

/// Describes the updates that can be replayed: they have a rollout, and a checkpoint or the start of the run before them.
fn can_replay(run: &Path, recorded: &[usize]) -> Result<String> {
    let saved = numbered(run)?;
    let has_start = |update: &usize| *update == 1 || saved.contains(&(update - 1));
    let updates: Vec<usize> = recorded.iter().copied().filter(has_start).collect();
    Ok(match updates[..] {
        [] => "no update can be replayed".into(),
        _ => format!("can be replayed: {}", listed(&updates)),
    })
}

/// Ascending numbers as text: `1-3, 7`.
fn listed(numbers: &[usize]) -> String {
    let spans = numbers.chunk_by(|a, b| a + 1 == *b).map(|span| match span {
        [first, .., last] => format!("{first}-{last}"),
        [only] => only.to_string(),
        [] => String::new(),
    });
    spans.collect::<Vec<_>>().join(", ")
}

/// Result of a replay.
#[derive(Debug)]
pub struct Replayed {
    update: usize,
    output_dir: PathBuf,
    /// Number of ranks in the run and in the replay.
    ranks: [usize; 2],
    bound: Bound,
    changed: Vec<(String, [String; 2])>,
    metrics: Option<ComparedMetrics>,
    state: Option<ComparedState>,
}

impl Replayed {
    /// The result on a rank that compares nothing.
    fn without_comparison(update: usize, output_dir: &Path, size: usize) -> Self {
        let ranks = [size; 2];
        let bound = Bound::Bits;
        Self { update, output_dir: output_dir.into(), ranks, bound, changed: Vec::new(), metrics: None, state: None }
    }

    /// The folder that the replay wrote.
    pub fn output_dir(&self) -> &Path {
        &self.output_dir
    }

    /// The changed settings: name, and the values in the run and in the replay.
    pub fn changed(&self) -> &[(String, [String; 2])] {
        &self.changed
    }

    /// Describes the differences that are rounding, if the run had another number of ranks; `None` for a comparison bit by bit.
    pub fn rounding(&self) -> Option<String> {
        let Bound::Rounding(most) = self.bound else { return None };
        let [run, here] = self.ranks;
        Some(format!(
            "{run} ranks in the run, {here} here: sums in another order, which may change a number by {most} of it"
        ))
    }

    /// The metrics of the run and of the replay, without times and evaluations; empty if the run has no line of the update.
    pub fn metrics(&self) -> &[Differing] {
        self.metrics.as_ref().map_or(&[], |metrics| &metrics.all)
    }

    /// Every part that differs from the run.
    fn differing(&self) -> Vec<String> {
        let metrics = self.metrics.iter().flat_map(|compared| {
            let number = |name: &String| compared.all.iter().find(|metric| metric.name == *name);
            compared.differing.iter().filter_map(number).map(|metric| {
                let shown = |value: Option<f64>| value.map_or("none".into(), |value| value.to_string());
                format!("metric `{}`: {}, and {} in the run", metric.name, shown(metric.replayed), shown(metric.run))
            })
        });
        metrics.chain(self.state.iter().flat_map(|state| state.differing.iter().cloned())).collect()
    }

    /// Describes in one line that the replay equals the run: bit by bit, or but for [rounding](Self::rounding). `Err` has the first
    /// difference and the number of others.
    pub fn verdict(&self) -> std::result::Result<String, String> {
        let differing = self.differing();
        let checkpoint = name_of(self.update);
        if let [first, others @ ..] = differing.as_slice() {
            let others = match others.len() {
                0 => String::new(),
                count => format!("; {count} more in {COMPARISON}"),
            };
            return Err(format!("differs from the run: {first}{others}"));
        }
        let metrics = match &self.metrics {
            Some(compared) => format!("{} metrics", compared.all.len()),
            None => "no metrics, as metrics.jsonl has no line of it".into(),
        };
        let tensors = match &self.state {
            Some(state) => format!("{} tensors of {checkpoint}", state.tensors),
            None => format!("no tensors, as there is no {checkpoint}"),
        };
        Ok(match self.rounding() {
            None => format!("equal to the run: {metrics}, {tensors}"),
            Some(rounding) => {
                let largest = self.state.as_ref().map_or(0.0, |state| state.largest);
                format!(
                    "equal to the run but for rounding ({rounding}): {metrics}, {tensors}, which differ by at most {largest:.1e} of their norm"
                )
            }
        })
    }

    fn to_json(&self) -> Value {
        let metric =
            |metric: &Differing| (metric.name.clone(), json!({"run": metric.run, "replayed": metric.replayed}));
        let changed =
            |(name, [then, now]): &(String, [String; 2])| (name.clone(), json!({"run": then, "replayed": now}));
        json!({
            "update": self.update,
            "equal": self.verdict().is_ok(),
            "ranks": {"run": self.ranks[0], "replayed": self.ranks[1]},
            "rounding": match self.bound { Bound::Bits => None, Bound::Rounding(most) => Some(most) },
            "largest_tensor_difference": self.state.as_ref().map(|state| state.largest).filter(|_| self.bound != Bound::Bits),
            "changed": self.changed.iter().map(changed).collect::<Map<_, _>>(),
            "metrics": self.metrics().iter().map(metric).collect::<Map<_, _>>(),
            "tensors": self.state.as_ref().map(|state| state.tensors),
            "differing": self.differing(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_listed_as_spans() {
        assert_eq!(listed(&[1, 2, 3, 7, 9, 10]), "1-3, 7, 9-10");
        assert_eq!(listed(&[4]), "4");
    }
}
