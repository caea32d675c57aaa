//! A PPO run in its output folder: updates, evaluations, samples.

use super::super::{describe_machine, leave_report, small_dataset, updates_fact};
use super::load::open;
use super::state::PpoState;
use super::{CARD_METRICS, COMMAND, PpoTrainer, UpdateOutcome, VALUE_MODEL};
use crate::rl::checks::Checks;
use crate::rl::ema::EMA;
use crate::run::Runtime;
use crate::run::card::command_to_try;
use crate::run::checkpoint::{Epochs, FixedState, OPTIMIZER, Saved, is_due};
use crate::run::event::{Evaluation, Event, SampleSource};
use crate::run::inputs::Inputs;
use crate::run::session::{Progress, RunSpec, Session, Trainee, take_snapshot};
use crate::run::sinks::console::ConsoleOutput;
use rlhf_base::metrics::{Metrics, Warning, WarningKind};
use rlhf_base::{Error, Result};
use rlhf_lm::model::{BASE_MODEL, Dtype};
use rlhf_lm::optim::Optimizer;
use rlhf_lm::optim::micro_batch::MicroBatchSettings;
use serde_json::{Map, Value};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Metrics of the end of a run, by their labels.
const OUTCOME: [(&str, &str); 8] = [
    ("score", "objective/scores"),
    ("KL", "objective/kl"),
    ("length", "val/response_length"),
    ("calls", "tools/call_frequency"),
    ("failed calls", "tools/failure_frequency"),
    ("held-out score", "eval/score"),
    ("held-out KL", "eval/kl"),
    ("held-out length", "eval/response_length"),
];

impl PpoTrainer {
    /// Runs the remaining updates: resumes from the checkpoint that the settings name, writes metrics, samples and
    /// checkpoints to `output_dir`, and policy and value model at the end. Returns the number of updates done.
    ///
    /// # Errors
    /// If `output_dir` holds something, the checkpoint is not of a run like this one, a number stops being finite, or a file
    /// cannot be written; [`Error::Stopped`] after [`rlhf_base::signals::request_stop`]. Everything that can be saved is saved all the same.
    /// [`Error::NotPushed`] if all is done and saved, but the model could not be pushed to the hub.
    pub fn train(&mut self) -> Result<usize> {
        self.train_with(|_| ControlFlow::Continue(()))
    }

    /// Runs [`PpoTrainer::train`], and passes its events to `watcher`.
    ///
    /// A break ends the run after its current update, with a checkpoint and the models in `output_dir`; before the first
    /// update nothing is saved. The run continues from there if this is called again, on this trainer, or on another one with
    /// `resume_from_checkpoint`.
    ///
    /// # Errors
    /// The errors of [`PpoTrainer::train`]; it is no error if `watcher` ends the run.
    pub fn train_with(&mut self, watcher: impl FnMut(&Event<'_>) -> ControlFlow<()>) -> Result<usize> {
        let config = self.run.config.clone();
        let opening = match self.record.opening.take() {
            None if !self.course.progress.has_begun() => Some(open(&self.run, &self.learner.world)?),
            opening => opening,
        };
        let spec = RunSpec {
            command: COMMAND,
            config: &config,
            run: &config.run,
            eval: &config.eval,
            logging_steps: 1,
            num_updates: self.plan.num_total_batches,
            batch_size: self.plan.batch_size
                * if config.groups.filters() { config.groups.max_num_gen_batches } else { 1 },
            epochs: Epochs { per_update: self.plan.prompts, len: self.data.prompts.len() },
        };
        self.warn_of_retries();
        let runtime = Runtime { world: self.learner.world.clone(), console: self.console };
        let mut session = Session::begin(self, opening, &spec, Vec::new(), &runtime)?;
        session.watch(watcher);
        let ended = self.run_updates(&mut session);
        let ended = session.end(self, ended);
        leave_report(&config.run, &self.learner.world, session.console());
        let done = ended?;
        let row = self.data.sample_prompts.first().map(|prompt| &prompt.row);
        let command = command_to_try(&config.run.output_dir, row, Some(config.response_length));
        session.report_end(done, &OUTCOME, &[command]);
        session.push(done)?;
        Ok(done)
    }

    /// Runs the remaining updates, with the checks, evaluations and samples that are due.
    fn run_updates(&mut self, session: &mut Session<'_>) -> Result<()> {
        self.report_title(session.console());
        if !self.run.config.alarms.no_checks {
            session.console().phase("checking");
            self.run_checks(session.console())?;
        }
        session.write_best(self)?;
        if session.starts_with_evaluation(self) {
            session.console().phase("evaluating");
            let evaluation = self.evaluate()?;
            let mut metrics = Metrics::default();
            metrics.push("step", 0.0);
            metrics.push("episode", 0.0);
            metrics.extend(&evaluation.metrics);
            session.emit(&Event::Update { step: 0, metrics: &metrics })?;
            session.emit(&Event::Evaluation { step: 0, episode: 0, evaluation: &evaluation })?;
        }
        if self.course.progress.done == 0 && self.plan.sample_every.is_some() {
            self.emit_samples(session)?;
        }
        session.console().start_updates();
        while self.course.progress.done < self.last_update() && !session.is_stopped()? {
            self.run_update(session)?;
        }
        self.rewards.finish()
    }

    /// Runs one update, and what is due after it.
    fn run_update(&mut self, session: &mut Session<'_>) -> Result<()> {
        let due = session.due(self);
        let outcome = self.one_update(&|phase| session.console().phase(phase))?;
        let UpdateOutcome { mut metrics, shown, rollout } = outcome;
        let due = session.ask(self, due, !self.data.eval_prompts.is_empty())?;
        let step = self.course.progress.done + 1;
        let episode = step * self.plan.batch_size;
        let evaluated: Result<Option<Evaluation>> = if due.evaluation {
            session.console().phase("evaluating");
            self.evaluate().map(Some)
        } else {
            Ok(None)
        };
        if let Ok(Some(evaluation)) = &evaluated {
            metrics.extend(&evaluation.metrics);
        }
        // Even if an event cannot be written, the update counts, and everything that is due after it is done.
        let mut emitted = session.emit(&Event::Update { step, metrics: &metrics });
        if !shown.is_empty() {
            let source = SampleSource::Rollout;
            emitted = session.emit(&Event::Samples { step, episode, source, samples: &shown }).and(emitted);
        }
        if self.run.config.rollout_log.log_rollouts {
            let limit = self.run.config.rollout_log.rollouts_limit;
            emitted = session.emit(&Event::Rollout { step, limit, rollout: &rollout }).and(emitted);
        }
        session.console().advance(watched(&metrics));
        let missing_metric = session.complete_update(self, due, evaluated.is_ok().then_some(&metrics));
        let failed = |e| Error::Run(format!("the evaluation after update {step}, which is missing now: {e}"));
        match evaluated {
            Ok(None) => {}
            Ok(Some(evaluation)) => {
                emitted = session.emit(&Event::Evaluation { step, episode, evaluation: &evaluation }).and(emitted);
            }
            Err(error) => return emitted.and(Err(failed(error))),
        }
        let too_many = self.note_skips().err();
        for warning in &self.monitor.warnings {
            session.emit(&Event::Warning { step, warning })?;
        }
        self.learner.world.agree(too_many.map_or(Ok(()), Err))?;
        if is_due(self.plan.sample_every, step, self.plan.num_total_batches) {
            emitted = self.emit_samples(session).and(emitted);
        }
        missing_metric?.iter().for_each(|warning| session.console().warn(warning));
        let acted = self.act_on_alarms(session, due);
        emitted.and(acted)
    }

    /// Emits greedy responses to the sample prompts.
    fn emit_samples(&mut self, session: &mut Session<'_>) -> Result<()> {
        session.console().phase("samples");
        let step = self.course.progress.done;
        let samples = self.samples(step)?;
        let episode = step * self.plan.batch_size;
        let source = SampleSource::SamplePrompts;
        session.emit(&Event::Samples { step, episode, source, samples: &samples })
    }

    /// Reports the models, the data and the settings of the run, with warnings and notes about its parts.
    fn report_title(&self, console: &ConsoleOutput) {
        let config = &self.run.config;
        let plan = &self.plan;
        let small =
            small_dataset(&config.data, self.data.prompts.len(), plan.prompts).filter(|_| self.data.order.is_none());
        self.record.prompt_notes.iter().chain(&small).for_each(|warning| console.warn(warning));
        for model in self.rewards.models().filter(|model| model.classifier().has_new_head()) {
            console.warn(&format!(
                "{}: the reward model has a fresh random head, so its scores mean nothing yet; train it by `rlhf reward`",
                model.dir().display()
            ));
        }
        console.title(
            &format!(
                "rlhf {}: {} into {}",
                config.preset.command(),
                config.sft_model_path.display(),
                config.run.output_dir.display()
            ),
            &self.facts(),
        );
        for model in self.rewards.models().filter(|model| model.reads_text()) {
            console.note(&format!("{}: reads the decoded text, by its own tokenizer", model.dir().display()));
        }
        self.learner.unsupervised.iter().for_each(|texts| console.note(&texts.describe()));
        if self.learner.value.has_new_head() {
            let name = if self.learner.value.model().is_some() { "model" } else { "head on the policy's trunk" };
            console.note(&format!("value {name}: starts with a fresh head"));
        }
    }

    /// Returns the facts of the title.
    fn facts(&self) -> Vec<(&'static str, String)> {
        let config = &self.run.config;
        let plan = &self.plan;
        let mut facts = Vec::from(describe_machine(&config.run, config.optimizer.optim, self.learner.policy.device()));
        facts.push(("updates", updates_fact(plan.num_total_batches, self.course.progress.done)));
        let rows = plan.batch_size;
        let most = config.response_length;
        facts.push(("an update", format!("{rows} responses of at most {most} tokens")));
        facts.push(("rewards", self.rewards.describe()));
        facts.push(("prompts", format!("{}, {} rows", config.data.describe(), self.data.prompts.len())));
        facts.push(("tokenizer", self.tokenizer.describe()));
        let trained = |(name, trained): (&'static str, String)| {
            (name.trim_start_matches("trained parameters, "), format!("{trained} of its parameters are trained"))
        };
        facts.extend(self.trained().into_iter().map(trained));
        let tokens = self.learner.micro_batch_tokens;
        let limit = MicroBatchSettings::from(&config.run);
        facts.push(("micro-batches", limit.describe(tokens, |on| self.learner.policy.activation_bytes(on))));
        facts
    }

    /// Adds a message about the skipped steps of the last update to its warnings.
    ///
    /// # Errors
    /// If as many updates in a row as `max_skipped_updates` took no step.
    pub(super) fn note_skips(&mut self) -> Result<()> {
        let message =
            self.monitor.skips.warning(self.course.progress.done, self.run.config.alarms.max_skipped_updates)?;
        self.monitor.warnings.extend(message.map(|message| Warning { kind: WarningKind::SkippedSteps, message }));
        Ok(())
    }

    /// Returns the number of updates after which the run ends: all of them, or those of a test.
    pub(super) fn last_update(&self) -> usize {
        let test = &self.run.config.test_mode;
        let total = self.plan.num_total_batches;
        if test.enable_test_mode { (test.test_stop_step + 1).max(self.course.progress.done).min(total) } else { total }
    }

    /// Runs [`PpoTrainer::check`], and reports the result.
    ///
    /// # Errors
    /// If a check fails; in bf16 and f16, whose rounding has no sharp bound, that is a warning.
    fn run_checks(&mut self, console: &ConsoleOutput) -> Result<()> {
        let low_precision = self.run.config.run.is_low_precision();
        let checks = self.check()?;
        match checks.failure(Checks::tolerance(low_precision)) {
            None => console.checked(&checks.to_string()),
            Some(failure) if low_precision => console.warn(&failure),
            Some(failure) => return Err(Error::Run(failure)),
        }
        // The model card of a resumed run has the result from its start.
        self.record.checks.get_or_insert_with(|| checks.to_string());
        take_snapshot(self);
        Ok(())
    }
}

impl Trainee for PpoTrainer {
    type State = PpoState;

    fn progress(&self) -> &Progress {
        &self.course.progress
    }

    fn progress_mut(&mut self) -> &mut Progress {
        &mut self.course.progress
    }

    fn inputs(&self) -> &Inputs {
        &self.record.inputs
    }

    fn fixed_state(&self) -> FixedState {
        self.fixed()
    }

    fn state(&self) -> PpoState {
        self.resumable()
    }

    fn bit_sums(&self) -> Vec<(String, i64)> {
        let value = self.learner.optimizers.value.iter().flat_map(Optimizer::bit_sums);
        self.learner.optimizers.policy.bit_sums().into_iter().chain(value).collect()
    }

    fn load(&mut self, saved: &Saved) -> Result<()> {
        let (fixed, state): (FixedState, PpoState) = (saved.parts().read()?, saved.parts().read()?);
        let micro_batch = fixed.micro_batch.clone();
        self.restore(fixed, state).map_err(|e| Error::invalid(&saved.dir, e.to_string()))?;
        let value_dir = saved.dir.join(VALUE_MODEL);
        self.learner.policy.load_trained(&saved.dir)?;
        if let Some(ema) = &mut self.learner.ema {
            ema.load(&mut self.learner.policy, |policy| policy.load_trained(&saved.dir.join(EMA)))?;
        }
        self.load_reference(&saved.dir)?;
        self.learner.optimizers.policy.load(&saved.dir.join(OPTIMIZER))?;
        if let (Some(value), Some(optimizer)) = (self.learner.value.model_mut(), &mut self.learner.optimizers.value) {
            value.load_trained(&value_dir)?;
            optimizer.load(&value_dir.join(OPTIMIZER))?;
        }
        self.monitor.last_metrics = Metrics::default();
        for (name, ..) in CARD_METRICS {
            if let Some(value) = saved.state.metrics.get(name).and_then(Value::as_f64) {
                self.monitor.last_metrics.push(name, value);
            }
        }
        let limit = MicroBatchSettings::from(&self.run.config.run);
        let device = self.learner.policy.device();
        let tokens = &mut self.learner.micro_batch_tokens;
        *tokens = limit.resumed_tokens(device, *tokens, &micro_batch);
        Ok(())
    }

    fn steps(&self) -> i64 {
        self.learner.steps()
    }

    fn write_models(&self, dir: &Path, dtype: Dtype) -> Result<()> {
        self.write_folder(dir, dtype)
    }

    fn write_beside(&self, dir: &Path) -> Result<()> {
        self.write_reference(dir)
    }

    fn write_optimizers(&self, dir: &Path) -> Result<()> {
        self.learner.optimizers.policy.save(&dir.join(OPTIMIZER))?;
        let value_optimizer = self.learner.optimizers.value.as_ref();
        value_optimizer.map_or(Ok(()), |optimizer| optimizer.save(&dir.join(VALUE_MODEL).join(OPTIMIZER)))?;
        self.learner.end_serving()
    }

    fn share_models(&self) -> Result<()> {
        self.learner.serve()
    }

    fn share_optimizers(&self) -> Result<()> {
        self.learner.serve()
    }

    fn is_sharded(&self) -> bool {
        self.learner.is_sharded()
    }

    fn write_bases(&mut self) -> Result<()> {
        let out = &self.run.config.run.output_dir;
        let eos = self.tokenizer.eos_ids();
        let pad = self.tokenizer.pad();
        let most = self.run.config.run.max_shard_size.0;
        self.learner.policy.keep_base(&out.join(BASE_MODEL), eos, pad, most)?;
        let value = self.learner.value.model_mut();
        value.map_or(Ok(()), |value| value.keep_base(&out.join(VALUE_MODEL).join(BASE_MODEL), eos, pad, most))
    }

    fn bases(&self) -> Vec<(PathBuf, &'static [&'static str])> {
        vec![
            (BASE_MODEL.into(), &["sft_model_path"]),
            // The value model starts from its own folder, else from the reward model, else from the policy.
            (Path::new(VALUE_MODEL).join(BASE_MODEL), &["value_model_path", "reward model", "sft_model_path"]),
        ]
    }

    fn save_dtype(&self) -> Dtype {
        self.run.config.run.save_dtype
    }

    fn save_final(&self, dir: &Path, dtype: Dtype) -> Result<()> {
        self.write_all(dir, dtype)?;
        self.learner.end_serving()
    }

    fn card_metrics(&self) -> Map<String, Value> {
        let metric =
            |&(name, ..): &(&str, &str, usize)| Some((name.to_string(), self.monitor.last_metrics.get(name)?.into()));
        CARD_METRICS.iter().filter_map(metric).collect()
    }

    fn best_depends_on(&self) -> &'static [&'static str] {
        &["num_eval_prompts"]
    }

    /// The policy is not trained during the warmup of the value model, nor in an update whose responses are all masked.
    fn may_lack_best_metric(&self) -> bool {
        let trains_nothing = self.monitor.last_metrics.get("objective/entropy").is_none();
        trains_nothing || self.course.progress.done <= self.run.config.value.value_warmup_updates
    }
}

/// Returns the numbers that are shown next to the progress bar.
fn watched(m: &Metrics) -> Vec<String> {
    let number = |name| m.get(name).unwrap_or(f64::NAN);
    let kl = m.get("objective/kl").map(|kl| format!("kl {kl:.3}"));
    let calls = m.get("tools/call_frequency").map(|calls| format!("calls {calls:.2}"));
    let score = format!("score {:.3}", number("objective/scores"));
    let length = format!("length {:.1}", number("val/response_length"));
    let speed = format!("{:.0} tokens/s", number("tokens_per_second/update"));
    std::iter::once(score).chain(kl).chain(calls).chain([length, speed]).collect()
}
