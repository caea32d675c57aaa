//! Training with one optimizer step per update: the loop of SFT, of the reward model, of DPO and of distillation.

use super::{describe_machine, fixed_state, leave_report, trained_share, updates_fact};
use crate::data::{Cursor, CursorState, Dataset, Sources};
use crate::run::Runtime;
use crate::run::card::Card;
use crate::run::checkpoint::{Epochs, FixedState, OPTIMIZER, RunSettings, Saved};
use crate::run::event::{Event, Sample, SampleSource};
use crate::run::inputs::Inputs;
use crate::run::session::{Opening, Progress, RunSpec, Session, Trainee};
use crate::settings::{DataConfig, EvalConfig, OptimizerConfig, RunConfig, Stage, TrainPlan};
use rlhf_base::dist::{World, ZeroStage};
use rlhf_base::metrics::Metrics;
use rlhf_base::weights::replace_files;
use rlhf_base::{Error, Result};
use rlhf_hub::{AskedHub, Commits};
use rlhf_lm::model::{BASE_MODEL, Dtype, ModelHead, PretrainedModel, Shards};
use rlhf_lm::optim::loss_scale::{LossScaleState, LossScaler};
use rlhf_lm::optim::micro_batch::MicroBatchSettings;
use rlhf_lm::optim::{Optimizer, learning_rate};
use rlhf_lm::tokenizer::Tokenizer;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The rows that a model is trained on: batch, loss and metrics.
pub(super) trait Supervised {
    type Head: ModelHead;
    type Sums: Sums;

    /// Forward and backward passes over this rank's part of the rows of an update; accumulates gradients and adds to the sums.
    ///
    /// # Errors
    /// If the model refuses a row.
    fn backward(
        &mut self,
        model: &PretrainedModel<Self::Head>,
        batch: &UpdateRows<'_>,
        sums: &mut Self::Sums,
    ) -> Result<()>;

    /// Returns the number of tokens of the rows at these places; `None` if it is not among the metrics.
    fn num_tokens(&self, _rows: &[usize]) -> Option<usize> {
        None
    }

    /// Adds metrics of the whole run so far.
    fn push_so_far(&self, _metrics: &mut Metrics) {}

    /// Returns responses of the last update that are to be shown, if there are any.
    fn take_samples(&mut self) -> Vec<Sample> {
        Vec::new()
    }

    /// Adds the metrics of the held-out rows, which the ranks divide among them, if there are any.
    ///
    /// # Errors
    /// If the model refuses a row, on any rank.
    fn evaluate(&self, model: &PretrainedModel<Self::Head>, world: &World, metrics: &mut Metrics) -> Result<()>;

    /// Returns whether there are held-out rows.
    fn has_eval_rows(&self) -> bool;

    /// Called after each update with the number of updates so far.
    ///
    /// # Errors
    /// If a rank has ended or does not respond.
    fn after_step(&mut self, _model: &PretrainedModel<Self::Head>, _updates: usize) -> Result<()> {
        Ok(())
    }

    /// Returns the state of the task for a checkpoint.
    fn state(&self) -> TaskState {
        TaskState::default()
    }

    /// Returns another model that a checkpoint saves, with the name of its folder.
    fn saved_beside(&self) -> Option<(&'static str, &PretrainedModel<Self::Head>)> {
        None
    }

    /// Restores the task from a checkpoint, from its `state` and files in the folder `dir`, on the ranks `world`; `has_changed`: the inputs
    /// changed.
    ///
    /// # Errors
    /// If the checkpoint belongs to another run, or is damaged.
    fn load(&mut self, _dir: &Path, _state: &TaskState, _world: &World, _has_changed: bool) -> Result<()> {
        Ok(())
    }
}

/// State of a run in a checkpoint, without weights, optimizers and the best model; of SFT, of a reward model, of DPO and of distillation.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SupervisedState {
    cursor: CursorState,
    /// Sums since the last line of metrics.
    since: Value,
    /// The last update after which a line of metrics was due.
    recorded: usize,
    #[serde(flatten)]
    task: TaskState,
    #[serde(skip_serializing_if = "Option::is_none")]
    loss_scale: Option<LossScaleState>,
}

/// The part of a [`SupervisedState`] that only some of the trainers have.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct TaskState {
    /// The place in the texts that DPO mixes in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) unsupervised: Option<CursorState>,
    /// Tokens that distillation has trained on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) num_tokens: Option<usize>,
}

/// Sums since the last line of metrics.
pub(super) trait Sums: Default + Serialize + DeserializeOwned {
    /// Adds an optimizer step with this norm of the gradients, 0 if it was skipped.
    fn add_step(&mut self, grad_norm: f64);

    /// Returns the updates in the sums, and the sum of their gradient norms.
    fn steps(&self, batch_size: usize) -> (f64, f64);

    /// Adds the mean loss and the other means to the metrics.
    fn push(&self, metrics: &mut Metrics);

    /// Returns the numbers for the progress bar.
    fn watched(&self) -> Vec<String>;

    /// Returns all sums.
    fn numbers(&mut self) -> Vec<&mut f64>;

    /// Replaces each sum by its sum over all ranks.
    ///
    /// # Errors
    /// If a rank has ended or does not respond.
    fn sum_over(&mut self, world: &World) -> Result<()> {
        let mut numbers: Vec<f64> = self.numbers().iter().map(|number| **number).collect();
        world.sum_numbers(&mut numbers)?;
        self.numbers().into_iter().zip(numbers).for_each(|(number, sum)| *number = sum);
        Ok(())
    }
}

/// The rows of one update, the same on all ranks.
pub(super) struct UpdateRows<'a> {
    /// Places of the rows in the data.
    pub(super) rows: &'a [usize],
    /// The update, from 0.
    pub(super) update: u64,
    /// Factor of the loss.
    pub(super) loss_scale: f64,
    /// Most tokens of a micro-batch.
    pub(super) max_tokens: usize,
    /// The ranks over which the rows are divided: each has a part of about as many tokens. Losses are divided by the counts of
    /// all rows.
    pub(super) world: &'a World,
}

/// Opens a run of `command` on the ranks `world`, downloads its files from the hub, and calls `work`, which loads and trains. The tuple has
/// the paths that the run reads, and the function that finds them.
///
/// # Errors
/// If the output folder cannot be used, or something that the run reads is missing; the errors of `work`.
pub(super) fn with_opened<C: RunSettings>(
    command: &str,
    (config, run): (&C, &RunConfig),
    (paths, find): (&[&Path], impl Fn() -> Result<()>),
    world: &World,
    work: impl FnOnce(Opening, &AskedHub) -> Result<()>,
) -> Result<()> {
    let opening = Opening::new(world, command, (config, run), paths)?;
    let found = opening.found()?;
    let _date = found.fix_date(world)?;
    let hub = AskedHub::with(found.commits);
    hub.download(world, paths, find)?;
    world.expect_sharded(run.dist.zero_stage);
    work(opening, &hub)
}

/// Makes a loaded model trainable, divides it over the ranks `world`, and returns its optimizer.
///
/// # Errors
/// If there is not enough memory or disk space to offload the optimizer's state.
pub(super) fn start_training<H: ModelHead>(
    model: &mut PretrainedModel<H>,
    run: &RunConfig,
    optimizer: &OptimizerConfig,
    world: &World,
) -> Result<Optimizer> {
    divide(model, run, world);
    build_optimizer(model, run, optimizer)
}

/// Makes a loaded model trainable, and divides it over the ranks: before another model is loaded, so that only one is whole in memory at a
/// time.
pub(super) fn divide<H: ModelHead>(model: &mut PretrainedModel<H>, run: &RunConfig, world: &World) {
    model.set_trainable(true);
    model.set_gradient_checkpointing(run.gradient_checkpointing);
    model.shard(world, run.dist.zero_stage);
}

/// Returns the optimizer of a model that is already divided.
///
/// # Errors
/// If there is not enough memory or disk space to offload the optimizer's state.
pub(super) fn build_optimizer<H: ModelHead>(
    model: &PretrainedModel<H>,
    run: &RunConfig,
    optimizer: &OptimizerConfig,
) -> Result<Optimizer> {
    let place = run.state_place();
    let built = Optimizer::of_model(model, optimizer, place.as_ref())?;
    Ok(built.with_seed(run.seed))
}

/// The data of a run.
pub(super) struct Data {
    pub(super) train: Vec<Dataset>,
    pub(super) eval: Option<Dataset>,
    /// The first row to train on.
    pub(super) first_row: Option<Value>,
    /// Digests of the rows.
    pub(super) inputs: Inputs,
}

impl Data {
    /// Reads the files that `sources` found for `config`.
    ///
    /// # Errors
    /// If a file is malformed, which the message names.
    pub(super) fn read(sources: &Sources<'_>, config: &DataConfig, seed: u64, stage: Stage) -> Result<Self> {
        let (train, eval) = sources.read(seed, stage)?;
        let mut inputs = Inputs::default();
        inputs.rows("dataset_name", &config.describe(), &train);
        inputs.rows("rows held out", &config.describe(), &eval);
        let first_row = train.first().and_then(|dataset| dataset.rows().next().cloned());
        Ok(Self { train, eval, first_row, inputs })
    }
}

/// A loaded run, ready to begin.
pub(super) struct Loaded<'a, C, H> {
    pub(super) model: PretrainedModel<H>,
    pub(super) tokenizer: Tokenizer,
    pub(super) opening: Opening,
    pub(super) spec: RunSpec<'a, C>,
    pub(super) optimizer: Optimizer,
    pub(super) schedule: (f64, &'a OptimizerConfig),
    /// Order of the rows, at the start of a run.
    pub(super) cursor: Cursor,
    /// Rows of the training data in an epoch.
    pub(super) num_rows: usize,
    pub(super) commits: Commits,
    pub(super) inputs: Inputs,
    /// Warnings about models and data.
    pub(super) warnings: Vec<String>,
    pub(super) words: Words<'a>,
}

/// Describes the run of `command` over `rows` rows in an epoch; the tuple has the settings of its folder and of its evaluations, and
/// `logging_steps`.
pub(super) fn spec<'a, C>(
    command: &'static str,
    config: &'a C,
    (run, eval, logging_steps): (&'a RunConfig, &'a EvalConfig, usize),
    plan: &TrainPlan,
    rows: usize,
) -> RunSpec<'a, C> {
    let TrainPlan { num_updates, batch_size } = *plan;
    let epochs = Epochs { per_update: batch_size, len: rows };
    RunSpec { command, config, run, eval, logging_steps, num_updates, batch_size, epochs }
}

/// The texts of a run: its title, its model card, its end.
pub(super) struct Words<'a> {
    /// The model's folder; `None` for random weights.
    pub(super) model: Option<PathBuf>,
    /// The name of the model in the settings.
    pub(super) base_model: Option<&'a Path>,
    pub(super) is_adapter: bool,
    /// Name of a row in messages.
    pub(super) unit: &'static str,
    pub(super) data: String,
    /// More facts for the title.
    pub(super) facts: Vec<(&'static str, String)>,
    pub(super) tokenizer: String,
    /// Notes after the title.
    pub(super) notes: Vec<String>,
    /// Metrics that are shown at the end, as pairs of a label and a metric.
    pub(super) numbers: &'static [(&'static str, &'static str)],
    /// Commands that try the model.
    pub(super) commands: Vec<Vec<String>>,
}

/// Trains the loaded model on the rows of `task` and saves it.
///
/// # Errors
/// If the output folder is refused or a file cannot be written; if a gradient is not finite, after saving the last complete update.
pub(super) fn train<T: Supervised, C: RunSettings>(
    task: T,
    loaded: Loaded<'_, C, T::Head>,
    runtime: &Runtime,
) -> Result<()> {
    let Loaded {
        model,
        tokenizer,
        opening,
        spec,
        optimizer,
        schedule,
        cursor,
        num_rows,
        commits,
        inputs,
        warnings,
        words,
    } = loaded;
    let limit = MicroBatchSettings::from(spec.run);
    let world = runtime.world.clone();
    let max_tokens = limit.max_tokens(model.device(), model.params(), |on| model.activation_bytes(on));
    let max_tokens = world.min_count(max_tokens)?;
    let mut taken = cursor.clone();
    let training = Training {
        optimizer,
        schedule,
        scaler: spec.run.fp16.then(|| LossScaler::new(&spec.run.loss_scale)),
        max_tokens,
        sums: T::Sums::default(),
    };
    let mut run = Run {
        progress: Progress::new(spec.eval),
        training,
        data: Position { cursor, num_rows, tokens_seen: task.num_tokens(&[]) },
        record: RunRecord { trained: trained_share(model.params()), commits, inputs },
        model,
        tokenizer,
        task,
        world,
        spec: &spec,
        words: &words,
    };
    let mut session = Session::begin(&mut run, Some(opening), &spec, warnings, runtime)?;
    session.write_bases(&mut run)?;
    for _ in 0..run.progress.done {
        run.count_tokens(&taken.take(spec.batch_size));
    }
    run.report_title(&session);
    let ended = run.updates(&mut session);
    let ended = session.end(&mut run, ended);
    leave_report(spec.run, &run.world, session.console());
    let done = ended?;
    session.report_end(done, words.numbers, &words.commands);
    session.push(done)
}

/// A run of SFT, of a reward model, of DPO or of distillation.
struct Run<'a, T: Supervised, C> {
    model: PretrainedModel<T::Head>,
    tokenizer: Tokenizer,
    task: T,
    spec: &'a RunSpec<'a, C>,
    words: &'a Words<'a>,
    progress: Progress,
    /// The ranks that train together.
    world: World,
    training: Training<'a, T::Sums>,
    data: Position,
    record: RunRecord,
}

/// The optimizer of a run, and the settings and state that its steps need.
struct Training<'a, S> {
    optimizer: Optimizer,
    /// Peak of the learning rate, and its schedule.
    schedule: (f64, &'a OptimizerConfig),
    /// The loss scale, where the model computes in f16.
    scaler: Option<LossScaler>,
    /// Most tokens of a micro-batch.
    max_tokens: usize,
    /// Sums since the last line of metrics.
    sums: S,
}

/// The position of a run in its data.
struct Position {
    cursor: Cursor,
    /// Rows of an epoch.
    num_rows: usize,
    /// Tokens of all updates so far, where they are counted.
    tokens_seen: Option<usize>,
}

/// Facts of a run for its folder: checkpoints, model card, first lines.
struct RunRecord {
    /// Trained parameters and their share.
    trained: String,
    commits: Commits,
    inputs: Inputs,
}

impl<T: Supervised, C> Run<'_, T, C> {
    /// Runs the remaining updates.
    fn updates(&mut self, session: &mut Session<'_>) -> Result<()> {
        session.write_best(self)?;
        if session.starts_with_evaluation(self) {
            session.console().phase("evaluating");
            let mut metrics = Metrics::default();
            metrics.push("step", 0.0);
            metrics.push("epoch", 0.0);
            self.task.evaluate(&self.model, &self.world, &mut metrics)?;
            session.emit(&Event::Update { step: 0, metrics: &metrics })?;
        }
        // Sums are restored from a checkpoint, times are not: the first line of a resumed run has the times of its own updates.
        let mut began = Instant::now();
        let mut timed = 0;
        session.console().start_updates();
        while session.is_running(self)? {
            session.console().phase("training");
            let due = session.due(self);
            let lr = self.update()?;
            timed += 1;
            let due = session.ask(self, due, self.task.has_eval_rows())?;
            session.console().advance(self.training.sums.watched());
            let step = self.progress.done + 1;
            let stopping = session.is_stopped()?;
            let mut line = None;
            let mut emitted = Ok(());
            if due.line || stopping {
                let mut metrics = self.metrics(step, lr, began.elapsed().as_secs_f64() / f64::from(timed));
                let last = stopping || step == self.spec.num_updates;
                if (due.evaluation || last) && self.task.has_eval_rows() {
                    session.console().phase("evaluating");
                    self.task.evaluate(&self.model, &self.world, &mut metrics)?;
                }
                emitted = session.emit(&Event::Update { step, metrics: &metrics });
                let samples = self.task.take_samples();
                if emitted.is_ok() && !samples.is_empty() {
                    let episode = step * self.spec.batch_size;
                    let source = SampleSource::Rollout;
                    emitted = session.emit(&Event::Samples { step, episode, source, samples: &samples });
                }
                line = Some(metrics);
                (began, timed) = (Instant::now(), 0);
            }
            if due.line {
                self.training.sums = T::Sums::default();
            }
            let missing = session.complete_update(self, due, line.as_ref());
            emitted?;
            missing?.iter().for_each(|warning| session.console().warn(warning));
            session.save_due(self, due)?;
        }
        Ok(())
    }

    /// One update: a batch, its gradients, one optimizer step. Returns the learning rate.
    fn update(&mut self) -> Result<f64> {
        let done = self.progress.done;
        let rows = self.data.cursor.take(self.spec.batch_size);
        let loss_scale = self.training.scaler.as_ref().map_or(1.0, LossScaler::scale);
        let update = done as u64;
        let max_tokens = self.training.max_tokens;
        let batch = UpdateRows { rows: &rows, update, loss_scale, max_tokens, world: &self.world };
        // The sums so far are the same on all ranks, and must be added only once.
        if !self.world.is_main() {
            self.training.sums = T::Sums::default();
        }
        self.world.agree(self.task.backward(&self.model, &batch, &mut self.training.sums))?;
        self.training.sums.sum_over(&self.world)?;
        let (peak, schedule) = self.training.schedule;
        let lr = learning_rate(peak, schedule, done, self.spec.num_updates);
        let stepped = self.step(lr);
        let grad_norm = self.world.agree(stepped)?;
        self.training.sums.add_step(grad_norm);
        let followed = self.task.after_step(&self.model, done + 1);
        self.world.agree(followed)?;
        self.count_tokens(&rows);
        Ok(lr)
    }

    /// One optimizer step. Returns the norm of the gradients before clipping, or 0 if they overflowed f16 and the step was
    /// skipped.
    fn step(&mut self, lr: f64) -> Result<f64> {
        self.training.optimizer.reduce_gradients(&self.world)?;
        if let Some(scaler) = &mut self.training.scaler {
            let scale = scaler.scale();
            if scaler.overflows_at(self.training.optimizer.grad_norm()? / scale) {
                self.training.optimizer.zero_grad();
                return Ok(0.0);
            }
            self.training.optimizer.unscale(scale);
        }
        self.training.optimizer.step(lr)
    }

    fn count_tokens(&mut self, rows: &[usize]) {
        let more = self.task.num_tokens(rows);
        self.data.tokens_seen = self.data.tokens_seen.zip(more).map(|(seen, more)| seen + more);
    }

    /// Returns the metrics after update `step`; `seconds` is the time of one update.
    fn metrics(&self, step: usize, lr: f64, seconds: f64) -> Metrics {
        let (updates, grad_norms) = self.training.sums.steps(self.spec.batch_size);
        let mut metrics = Metrics::default();
        metrics.push("step", step as f64);
        metrics.push("epoch", (step * self.spec.batch_size) as f64 / self.data.num_rows as f64);
        self.training.sums.push(&mut metrics);
        metrics.push("grad_norm", grad_norms / updates);
        metrics.push("learning_rate", lr);
        self.data.tokens_seen.iter().for_each(|&tokens| metrics.push("num_tokens", tokens as f64));
        self.task.push_so_far(&mut metrics);
        metrics.push("time/update", seconds);
        if let Some(scaler) = &self.training.scaler {
            metrics.push("loss_scale", scaler.scale());
            metrics.push("overflows", scaler.overflows() as f64);
        }
        metrics
    }

    /// Writes the model, in `dtype`, and the tokenizer to an empty folder.
    fn write(&self, dir: &Path, dtype: Dtype) -> Result<()> {
        let eos = self.tokenizer.eos_ids();
        let pad = self.tokenizer.pad();
        self.model.save_pretrained_as(dir, eos, pad, self.spec.run.max_shard_size.0, dtype)?;
        self.tokenizer.save_pretrained(dir)
    }

    /// Reports the model, the data and the settings of the run.
    fn report_title(&self, session: &Session<'_>) {
        let spec = self.spec;
        let words = self.words;
        let console = session.console();
        let mut facts = Vec::from(describe_machine(spec.run, self.training.schedule.1.optim, self.model.device()));
        facts.push(("updates", updates_fact(spec.num_updates, self.progress.done)));
        facts.push(("an update", format!("{} of {} {}", spec.batch_size, self.data.num_rows, words.unit)));
        facts.extend(words.facts.iter().cloned());
        facts.push(("tokenizer", words.tokenizer.clone()));
        facts.push(("trained parameters", self.record.trained.clone()));
        let limit = MicroBatchSettings::from(spec.run);
        facts.push(("micro-batches", limit.describe(self.training.max_tokens, |on| self.model.activation_bytes(on))));
        let source = words.model.as_ref().map_or("random weights".into(), |dir| dir.display().to_string());
        console.title(&format!("rlhf {}: {source} into {}", spec.command, spec.run.output_dir.display()), &facts);
        words.notes.iter().for_each(|note| console.note(note));
    }
}

impl<T: Supervised, C> Trainee for Run<'_, T, C> {
    type State = SupervisedState;

    fn progress(&self) -> &Progress {
        &self.progress
    }

    fn progress_mut(&mut self) -> &mut Progress {
        &mut self.progress
    }

    fn inputs(&self) -> &Inputs {
        &self.record.inputs
    }

    fn fixed_state(&self) -> FixedState {
        let device = self.model.device();
        let RunRecord { commits, inputs, .. } = &self.record;
        fixed_state(self.spec.run, device, self.training.max_tokens, commits, inputs)
    }

    fn state(&self) -> Self::State {
        SupervisedState {
            cursor: self.data.cursor.state(),
            since: json!(self.training.sums),
            recorded: self.progress.recorded,
            task: self.task.state(),
            loss_scale: self.training.scaler.as_ref().map(LossScaler::state),
        }
    }

    fn load(&mut self, saved: &Saved) -> Result<()> {
        let (fixed, state): (FixedState, Self::State) = (saved.parts().read()?, saved.parts().read()?);
        // The session restores the last record with the number of updates.
        let SupervisedState { cursor, since: _, recorded: _, task, loss_scale } = state;
        let invalid = |e: Error| Error::invalid(&saved.dir, e.to_string());
        let may_differ = self.spec.run.checkpoints.resume_with_changed_inputs;
        self.data.cursor.load_state(&cursor, may_differ).map_err(invalid)?;
        self.training.sums = saved.parsed("since")?;
        let has_changed = !self.record.inputs.changed(&fixed.inputs).is_empty();
        self.task.load(&saved.dir, &task, &self.world, has_changed)?;
        if let (Some(scaler), Some(state)) = (&mut self.training.scaler, &loss_scale) {
            scaler.load_state(state).map_err(invalid)?;
        }
        self.training.optimizer.load(&saved.dir.join(OPTIMIZER))?;
        self.model.load_trained(&saved.dir)?;
        let limit = MicroBatchSettings::from(self.spec.run);
        let tokens = self.training.max_tokens;
        self.training.max_tokens = limit.resumed_tokens(self.model.device(), tokens, &fixed.micro_batch);
        Ok(())
    }

    fn steps(&self) -> i64 {
        self.training.optimizer.steps() + self.training.scaler.as_ref().map_or(0, LossScaler::overflows) as i64
    }

    fn bit_sums(&self) -> Vec<(String, i64)> {
        self.training.optimizer.bit_sums()
    }

    fn write_models(&self, dir: &Path, dtype: Dtype) -> Result<()> {
        self.write(dir, dtype)?;
        Shards::end_serving(&[self.model.shards()])
    }

    fn write_beside(&self, dir: &Path) -> Result<()> {
        let Some((name, model)) = self.task.saved_beside() else { return Ok(()) };
        let eos = self.tokenizer.eos_ids();
        let pad = self.tokenizer.pad();
        model.save_pretrained(&dir.join(name), eos, pad, self.spec.run.max_shard_size.0)
    }

    fn write_optimizers(&self, dir: &Path) -> Result<()> {
        self.training.optimizer.save(&dir.join(OPTIMIZER))?;
        Shards::end_serving(&[self.model.shards()])
    }

    fn share_models(&self) -> Result<()> {
        Shards::serve(&[self.model.shards()])
    }

    fn share_optimizers(&self) -> Result<()> {
        Shards::serve(&[self.model.shards()])
    }

    fn end_sharing(&self) -> Result<()> {
        Shards::end_serving(&[self.model.shards()])
    }

    fn is_sharded(&self) -> bool {
        let divided = self.model.shards().stage().is_some_and(ZeroStage::shards_optimizer);
        self.world.size() > 1 && divided
    }

    fn write_bases(&mut self) -> Result<()> {
        let run = self.spec.run;
        let eos = self.tokenizer.eos_ids();
        let pad = self.tokenizer.pad();
        self.model.keep_base(&run.output_dir.join(BASE_MODEL), eos, pad, run.max_shard_size.0)
    }

    fn bases(&self) -> Vec<(PathBuf, &'static [&'static str])> {
        vec![(BASE_MODEL.into(), &["model_name_or_path"])]
    }

    fn save_dtype(&self) -> Dtype {
        self.spec.run.save_dtype
    }

    fn save_final(&self, dir: &Path, dtype: Dtype) -> Result<()> {
        let spec = self.spec;
        let words = self.words;
        let facts = [
            (
                "started from",
                // As the settings name it: the path of a cache folder is only valid for this user.
                match (&words.model, words.base_model) {
                    (Some(_), Some(name)) => format!("`{}`", name.display()),
                    (Some(dir), None) => format!("`{}`", dir.display()),
                    (None, _) => "random weights".into(),
                },
            ),
            ("data", words.data.clone()),
            ("tokenizer", words.tokenizer.clone()),
            ("trained parameters", self.record.trained.clone()),
            ("updates", self.progress.done.to_string()),
        ];
        let Words { base_model, is_adapter, .. } = *words;
        replace_files(dir, |dir| self.write(dir, dtype))?;
        Shards::end_serving(&[self.model.shards()])?;
        Card { command: spec.command, base_model, is_adapter, facts: &facts }.write(dir)
    }
}
