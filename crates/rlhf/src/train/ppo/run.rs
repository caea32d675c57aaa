//! The course of a PPO run: updates, evaluation, checkpoints.

use super::super::{
    LOSS_SCALE, begin_report, command_to_try, describe_machine, describe_micro_batch, fixed_state,
    kept_micro_batch_tokens, leave_checkpoint, load_cursor, small_dataset,
};
use super::load::begin;
use super::{CARD_METRICS, COMMAND, PpoTrainer, VALUE_MODEL};
use crate::metrics::Metrics;
use crate::model::BASE_MODEL;
use crate::rl::checks::Checks;
use crate::rl::ema::EMA;
use crate::run::checkpoint::{Best, Checkpoints, OPTIMIZER, Saved, Start, is_due, leave_model};
use crate::run::report::{Event, Hold, Reached, Reporter, Warning, WarningKind, claim_output_dir, conclude};
use crate::{Error, Result};
use serde_json::{Map, Value};
use std::ops::ControlFlow;

/// The metrics whose change people are told at the end, with their names for it.
const OUTCOME: [(&str, &str); 6] = [
    ("score", "objective/scores"),
    ("KL", "objective/kl"),
    ("length", "val/response_length"),
    ("held-out score", "eval/score"),
    ("held-out KL", "eval/kl"),
    ("held-out length", "eval/response_length"),
];

impl PpoTrainer {
    /// Runs all updates that are left, as the settings say: goes on from the checkpoint that they name, writes metrics,
    /// samples and checkpoints to `output_dir`, and policy and value model at the end. Gives how many updates are done.
    ///
    /// # Errors
    /// If `output_dir` holds something, the checkpoint is not of a run like this one, a number stops being finite, or a file
    /// cannot be written; [`Error::Stopped`] after [`crate::run::report::request_stop`]. What can be saved is saved all the same.
    pub fn train(&mut self) -> Result<usize> {
        self.train_with(|_| ControlFlow::Continue(()))
    }

    /// [`PpoTrainer::train`], and tells `watcher` what happens.
    ///
    /// A break ends the run after the update that it is in, with a checkpoint and the models in `output_dir`; before the first
    /// update there is nothing to keep. It goes on from there if this is called again, on this trainer, or on another with
    /// `resume_from_checkpoint`.
    ///
    /// # Errors
    /// As [`PpoTrainer::train`]; that `watcher` ended the run is none.
    pub fn train_with(&mut self, watcher: impl FnMut(&Event<'_>) -> ControlFlow<()>) -> Result<usize> {
        let (mut start, mut warnings) = (Start { in_place: true, ..Start::default() }, Vec::new());
        if !self.begun {
            let hold = self.hold.take().map_or_else(|| Hold::take(&self.config.run.output_dir), Ok)?;
            (start, warnings) = begin(&self.config)?;
            if let Some(saved) = &start.from {
                warnings.extend(self.load_checkpoint(saved, start.in_place)?);
                warnings.extend(saved.threads_warning());
            }
            self.hold = Some(claim_output_dir(&self.config.run, &start, hold, &self.config)?);
            self.begun = true;
        }
        let (run, total) = (&self.config.run, self.plan.num_total_batches);
        let reached = Reached { updates: self.done, recorded: self.done };
        let mut report = begin_report(run, &start, total, reached, &warnings, self.console)?;
        report.settings(&self.config)?;
        report.watch(watcher);
        let done = self.run(&mut report);
        report.finish();
        // A base that an earlier run left here stays as it is.
        let kept = if self.done > 0 { self.keep_bases() } else { Ok(()) };
        let out = &self.config.run.output_dir;
        // Also after an error: a step that is not finite is never taken, so the weights are those of the step before. But what
        // has not learnt is where it began, and a model in `out` would keep the run from beginning again there.
        let saved = (self.done > 0).then(|| {
            kept.and_then(|()| {
                leave_model(out, COMMAND, &self.config, (self.done, total), &done, || self.save_model(out))
            })
        });
        if let Some(Ok(())) = saved {
            report.left(out);
        }
        let done = conclude(done, saved, total, out)?;
        if done > reached.updates {
            let row = self.sample_prompts.first().map(|prompt| &prompt.row);
            report.ends(done, &OUTCOME, &[command_to_try(out, row, Some(self.config.response_length))]);
        }
        Ok(done)
    }

    /// Runs all updates that are left, or those until the report is stopped, and saves checkpoints and the best model as the
    /// settings say. A run that ends early leaves a checkpoint in any case, unless it ends in the midst of an update that has
    /// changed weights.
    pub(super) fn run(&mut self, report: &mut Reporter<'_>) -> Result<usize> {
        let total = self.plan.num_total_batches;
        let mut checkpoints = Checkpoints::new(COMMAND, &self.config.run, &self.config, total, self.done)?;
        let ended = self.run_updates(report, &mut checkpoints);
        let is_whole = self.learner.steps() == self.whole.1;
        let wanted = is_whole && checkpoints.is_wanted_at_end(self.done);
        leave_checkpoint(ended, wanted, report, |report| self.save_checkpoint(&mut checkpoints, report))
    }

    pub(super) fn run_updates(&mut self, report: &mut Reporter<'_>, checkpoints: &mut Checkpoints) -> Result<usize> {
        let small = small_dataset(&self.config.data, self.prompts.len(), self.plan.batch_size);
        let small = small.filter(|_| self.order.is_none());
        self.prompt_notes.iter().chain(&small).for_each(|warning| report.warn(warning));
        for model in self.rewards.models().filter(|model| model.classifier().has_new_head()) {
            report.warn(&format!(
                "{}: the reward model has a fresh random head, so its scores mean nothing yet; train it by `rlhf reward`",
                model.dir().display()
            ));
        }
        self.tell_beginning(report);
        for model in self.rewards.models().filter(|model| model.reads_text()) {
            report.note(&format!("{}: reads the decoded text, by its own tokenizer", model.dir().display()));
        }
        self.learner.unsupervised.iter().for_each(|texts| report.note(&texts.describe()));
        if self.learner.value.has_new_head() {
            let name = if self.learner.value.model().is_some() { "model" } else { "head on the policy's trunk" };
            report.note(&format!("value {name}: begins with a fresh head"));
        }
        if !self.config.watch.no_checks {
            report.phase("checking");
            self.check_aloud(report)?;
        }
        let total = self.plan.num_total_batches;
        self.write_best(report)?;
        if self.done == 0 && self.config.eval.eval_steps.is_some() {
            report.phase("evaluating");
            let evaluation = self.evaluate()?;
            let mut metrics = Metrics::default();
            metrics.push("step", 0.0);
            metrics.push("episode", 0.0);
            metrics.extend(&evaluation.metrics);
            report.record_alone(0, &metrics)?;
            report.evaluation(0, 0, &evaluation)?;
        }
        if self.done == 0 && self.plan.sample_every.is_some() {
            report.phase("samples");
            let samples = self.samples(0)?;
            report.samples(0, 0, &samples)?;
        }
        report.updates_begin();
        while self.done < self.last_update() && !report.stopped() {
            let mut metrics = self.one_update(&|phase| report.phase(phase))?;
            let done = self.done + 1;
            let episode = done * self.plan.batch_size;
            let evaluates = is_due(self.config.eval.eval_steps, done, total);
            if evaluates {
                report.phase("evaluating");
            }
            let evaluated = if evaluates { self.evaluate().map(Some) } else { Ok(None) };
            if let Ok(Some(evaluation)) = &evaluated {
                metrics.extend(&evaluation.metrics);
            }
            report.record(done as i64, &metrics)?;
            let answers = std::mem::take(&mut self.answers);
            if !answers.is_empty() {
                report.answers(done, episode, &answers)?;
            }
            report.advance(watched(&metrics));
            // What fails from here on takes no update with it.
            self.done = done;
            let looks = if self.config.eval.eval_steps.is_some() { evaluates } else { checkpoints.is_due(done) };
            let looked = if evaluated.is_ok() { self.look_at_best(&metrics, looks) } else { Ok(None) };
            self.note_whole();
            let missing = |e| Error::Run(format!("the evaluation after update {done}, which is missing now: {e}"));
            if let Some(evaluation) = evaluated.map_err(missing)? {
                report.evaluation(done, episode, &evaluation)?;
            }
            let too_many = self.note_skips().err();
            for warning in &self.warnings {
                report.warning(done, warning);
            }
            too_many.map_or(Ok(()), Err)?;
            if is_due(self.plan.sample_every, done, total) {
                report.phase("samples");
                let samples = self.samples(done)?;
                report.samples(done, episode, &samples)?;
            }
            looked?.iter().for_each(|warning| report.warn(warning));
            report.phase("saving");
            self.write_best(report)?;
            if checkpoints.is_due(done) {
                self.save_checkpoint(checkpoints, report)?;
            }
        }
        Ok(self.done)
    }

    /// Tells how the run begins: by what it is computed, how much there is to do, from what.
    pub(super) fn tell_beginning(&self, report: &Reporter<'_>) {
        let (config, plan) = (&self.config, &self.plan);
        let mut facts = Vec::from(describe_machine(&config.run, self.learner.policy.device()));
        let left = match self.done {
            0 => String::new(),
            done => format!(", {done} of them done"),
        };
        facts.push(("updates", format!("{}{left}", plan.num_total_batches)));
        let (rows, most) = (plan.batch_size, config.response_length);
        facts.push(("an update", format!("{rows} responses of at most {most} tokens")));
        facts.push(("rewards", self.rewards.describe()));
        facts.push(("prompts", format!("{}, {} rows", config.data.describe(), self.prompts.len())));
        facts.push(("tokenizer", self.tokenizer.describe()));
        let trained = |(name, trained): (&'static str, String)| {
            (name.trim_start_matches("trained parameters, "), format!("{trained} of its parameters are trained"))
        };
        facts.extend(self.trained().into_iter().map(trained));
        let tokens = self.learner.micro_batch_tokens;
        facts.push((
            "micro-batches",
            describe_micro_batch(&config.run, tokens, |on| self.learner.policy.activation_bytes(on)),
        ));
        report.begins(
            &format!("rlhf ppo: {} into {}", config.sft_model_path.display(), config.run.output_dir.display()),
            &facts,
        );
    }

    /// What each part remembers beside weights and optimizers, by its name; each has a line here and one in
    /// [`PpoTrainer::load_state`].
    pub(super) fn state(&self) -> Map<String, Value> {
        let (run, device) = (&self.config.run, self.learner.policy.device());
        let mut state = fixed_state(run, device, self.learner.micro_batch_tokens, &self.commits, &self.inputs);
        state.insert("cursor".into(), self.cursor.state());
        state.insert("rewards".into(), self.rewards.state());
        state.insert("kl_controller".into(), self.kl_controller.state());
        state.extend(self.learner.unsupervised.as_ref().map(|texts| ("unsupervised".into(), texts.state())));
        state.extend(self.kept.state().map(|kept| ("kept_answers".into(), kept)));
        state.insert("scores".into(), self.scaling.state());
        state.extend(self.best.as_ref().map(|best| ("best".into(), best.state())));
        state.insert("skips".into(), self.skips.state());
        state.insert("alarms".into(), self.alarms.state());
        state.extend(self.learner.scaling.as_ref().map(|scaling| (LOSS_SCALE.into(), scaling.state())));
        state.extend(self.checks.as_ref().map(|checks| ("checks".into(), checks.as_str().into())));
        state.extend(self.own().map(|own| ("own".into(), own.into())));
        state
    }

    /// What the caller says of each update.
    pub(super) fn own(&self) -> Option<&'static str> {
        match (&self.order, &self.schedule) {
            (None, None) => None,
            (Some(_), None) => Some("an order"),
            (None, Some(_)) => Some("a schedule"),
            (Some(_), Some(_)) => Some("an order and a schedule"),
        }
    }

    pub(super) fn load_state(&mut self, saved: &Saved) -> Result<()> {
        let began = saved.part("own").ok().and_then(Value::as_str);
        if began != self.own() {
            let [began, found] = [began, self.own()].map(|own| own.unwrap_or("nothing"));
            return Err(Error::Run(format!("of the caller's own: expected {began}, as the run began, found {found}")));
        }
        load_cursor(&mut self.cursor, saved, &self.config.run)?;
        self.rewards.load_state(saved.part("rewards")?)?;
        self.kl_controller.load_state(saved.part("kl_controller")?)?;
        if let Some(texts) = &mut self.learner.unsupervised {
            texts.load_state(saved.part("unsupervised")?)?;
        }
        self.kept.load_state(saved.part("kept_answers").ok(), self.prompts.len())?;
        if self.config.score_scaling.use_score_scaling {
            self.scaling.load_state(saved.part("scores")?)?;
        }
        if let (Some(best), Ok(state)) = (&mut self.best, saved.part("best")) {
            best.load_state(state);
        }
        if let (Some(scaling), Ok(state)) = (&mut self.learner.scaling, saved.part(LOSS_SCALE)) {
            scaling.load_state(state)?;
        }
        if let Ok(state) = saved.part("skips") {
            self.skips.load_state(state);
        }
        if let Ok(state) = saved.part("alarms") {
            self.alarms.load_state(state);
        }
        self.checks = saved.part("checks").ok().and_then(Value::as_str).map(String::from);
        Ok(())
    }

    /// Takes note of the state of all parts: an update is whole.
    pub(super) fn note_whole(&mut self) {
        self.whole = (self.state(), self.learner.steps());
    }

    /// Writes a checkpoint of the last whole update, after which no weight has changed.
    pub(super) fn save_checkpoint(&mut self, checkpoints: &mut Checkpoints, report: &mut Reporter<'_>) -> Result<()> {
        report.sync()?;
        self.keep_bases()?;
        let told = |&(name, _): &(&str, usize)| Some((name.to_string(), self.last_metrics.get(name)?.into()));
        let metrics = CARD_METRICS.iter().filter_map(told).collect();
        checkpoints.save(self.done, metrics, self.whole.0.clone(), |dir| {
            self.write_models(dir)?;
            self.learner.policy_optimizer.save(&dir.join(OPTIMIZER))?;
            let of_value = self.learner.value_optimizer.as_ref();
            of_value.map_or(Ok(()), |optimizer| optimizer.save(&dir.join(VALUE_MODEL).join(OPTIMIZER)))
        })?;
        report.saved(&checkpoints.place(self.done));
        Ok(())
    }

    /// Writes the bases of adapters, if no folder holds them, once for all checkpoints: they never change.
    pub(super) fn keep_bases(&mut self) -> Result<()> {
        let out = &self.config.run.output_dir;
        let (eos, pad, most) = (self.tokenizer.eos_ids(), self.tokenizer.pad(), self.config.run.max_shard_size.0);
        self.learner.policy.keep_base(&out.join(BASE_MODEL), eos, pad, most)?;
        let value = self.learner.value.model_mut();
        value.map_or(Ok(()), |value| value.keep_base(&out.join(VALUE_MODEL).join(BASE_MODEL), eos, pad, most))
    }

    /// Goes to where `saved` was written; gives what a person should know.
    ///
    /// # Errors
    /// If it is not of a run like this one.
    pub(super) fn load_checkpoint(&mut self, saved: &Saved, in_place: bool) -> Result<Vec<String>> {
        let (updates, rows) = (self.plan.num_total_batches, self.plan.batch_size);
        let warnings = saved.check_inputs(&self.config.run.checkpoints, &self.inputs, updates, rows)?;
        self.load_state(saved).map_err(|e| Error::invalid(&saved.dir, e.to_string()))?;
        let value_dir = saved.dir.join(VALUE_MODEL);
        self.learner.policy.load_trained(&saved.dir)?;
        if let Some(ema) = &mut self.learner.ema {
            ema.load(&mut self.learner.policy, |policy| policy.load_trained(&saved.dir.join(EMA)))?;
        }
        self.learner.policy_optimizer.load(&saved.dir.join(OPTIMIZER))?;
        if let (Some(value), Some(optimizer)) = (self.learner.value.model_mut(), &mut self.learner.value_optimizer) {
            value.load_trained(&value_dir)?;
            optimizer.load(&value_dir.join(OPTIMIZER))?;
        }
        for (name, _) in CARD_METRICS {
            if let Some(value) = saved.state.metrics.get(name).and_then(Value::as_f64) {
                self.last_metrics.push(name, value);
            }
        }
        let (run, device) = (&self.config.run, self.learner.policy.device());
        self.learner.micro_batch_tokens = kept_micro_batch_tokens(run, device, self.learner.micro_batch_tokens, saved);
        let other_prompts = *saved.setting("num_eval_prompts") != self.config.num_eval_prompts;
        let by_prompts = self.best.as_ref().is_some_and(Best::is_of_evaluations);
        if !in_place || (by_prompts && other_prompts) {
            // The best model lies in the other folder, or was the best at something else.
            self.best = Best::new(&self.config.eval);
        }
        self.done = saved.state.update;
        self.note_whole();
        Ok(warnings)
    }

    /// Notes that the models are the best ones where the chosen metric says so, if this update `looks` at it; gives what to warn
    /// of.
    ///
    /// # Errors
    /// If there was no such metric from the first update on that the policy learnt in.
    pub(super) fn look_at_best(&mut self, metrics: &Metrics, looks: bool) -> Result<Option<String>> {
        let frozen = self.done <= self.config.value.value_warmup_updates;
        self.best.as_mut().map_or(Ok(None), |best| best.look(metrics, self.done, looks, frozen))
    }

    /// Writes the best models, if they are those of now and not written yet: after a write that failed, also when the run goes on
    /// from there.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(super) fn write_best(&mut self, report: &mut Reporter<'_>) -> Result<()> {
        if self.best.is_none() {
            return Ok(());
        }
        self.keep_bases()?;
        let Some(mut best) = self.best.take() else { return Ok(()) };
        let written = best.write(&self.config.run.output_dir, self.done, |dir| self.write_models(dir));
        self.best = Some(best);
        self.note_whole();
        written?.iter().for_each(|dir| report.saved(dir));
        Ok(())
    }

    /// Adds what is to be said of the skipped steps of the last update to its warnings.
    ///
    /// # Errors
    /// If as many updates in a row as `max_skipped_updates` took no step.
    pub(super) fn note_skips(&mut self) -> Result<()> {
        let message = self.skips.warning(self.done, self.config.watch.max_skipped_updates)?;
        self.warnings.extend(message.map(|message| Warning { kind: WarningKind::SkippedSteps, message }));
        Ok(())
    }

    /// Updates after which the run ends: all, or those of a test.
    pub(super) fn last_update(&self) -> usize {
        let (trial, total) = (&self.config.trial, self.plan.num_total_batches);
        if trial.enable_test_mode { (trial.test_stop_step + 1).max(self.done).min(total) } else { total }
    }

    /// [`PpoTrainer::check`], and says how it went.
    ///
    /// # Errors
    /// If something is not as it should be; in bf16 and f16, whose rounding has no sharp bound, that is a warning.
    pub(super) fn check_aloud(&mut self, report: &Reporter<'_>) -> Result<()> {
        let (few_bits, checks) = (self.config.run.is_low_precision(), self.check()?);
        match checks.failure(Checks::tolerance(few_bits)) {
            None => report.checked(&checks.to_string()),
            Some(failure) if few_bits => report.warn(&failure),
            Some(failure) => return Err(Error::Run(failure)),
        }
        // A run that goes on tells what it found when it began.
        self.checks.get_or_insert_with(|| checks.to_string());
        self.note_whole();
        Ok(())
    }
}

/// The few numbers that people watch.
fn watched(m: &Metrics) -> Vec<String> {
    let number = |name| m.get(name).unwrap_or(f64::NAN);
    vec![
        format!("score {:.3}", number("objective/scores")),
        format!("kl {:.3}", number("objective/kl")),
        format!("length {:.1}", number("val/response_length")),
        format!("{:.0} tokens/s", number("tokens_per_second/update")),
    ]
}
