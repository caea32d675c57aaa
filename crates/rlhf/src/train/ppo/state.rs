//! The state of a run in its checkpoints, without weights, optimizers and the best model.

use super::super::fixed_state;
use super::PpoTrainer;
use crate::data::CursorState;
use crate::reward::Moments;
use crate::rl::alarms::Alarms;
use crate::rl::entropy::EntropyState;
use crate::rl::kept::KeptState;
use crate::rl::kl::KlState;
use crate::rl::learner::ScalingState;
use crate::run::checkpoint::{FixedState, or_default};
use rlhf_base::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The part of a run's state that updates change, in `trainer_state.json`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PpoState {
    cursor: CursorState,
    /// Running moments by reward.
    rewards: BTreeMap<String, Moments>,
    kl_controller: KlState,
    #[serde(skip_serializing_if = "Option::is_none")]
    unsupervised: Option<CursorState>,
    /// The last responses that were long enough to train on.
    #[serde(rename = "kept_answers", skip_serializing_if = "Option::is_none")]
    kept: Option<KeptState>,
    /// Running moments of the sums.
    scores: Moments,
    /// Consecutive updates without an optimizer step.
    skips: usize,
    #[serde(deserialize_with = "or_default")]
    alarms: Alarms,
    /// Tokens of prompts and responses so far.
    num_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    loss_scale: Option<ScalingState>,
    #[serde(skip_serializing_if = "Option::is_none")]
    entropy_controller: Option<EntropyState>,
}

impl PpoTrainer {
    /// Returns the part of the state that no update changes.
    pub(super) fn fixed(&self) -> FixedState {
        let run = &self.run.config.run;
        let device = self.learner.policy.device();
        let commits = &self.record.commits;
        let inputs = &self.record.inputs;
        FixedState {
            checks: self.record.checks.clone(),
            own: self.callbacks().map(String::from),
            ..fixed_state(run, device, self.learner.micro_batch_tokens, commits, inputs)
        }
    }

    /// Returns the part of the state that updates change.
    pub(super) fn resumable(&self) -> PpoState {
        PpoState {
            cursor: self.data.cursor.state(),
            rewards: self.rewards.state(),
            kl_controller: self.course.kl_controller.state(),
            unsupervised: self.learner.unsupervised.as_ref().map(|texts| texts.state()),
            kept: self.sampler.kept.state(),
            scores: self.course.scores.scaling.state(),
            skips: self.monitor.skips.state(),
            alarms: self.monitor.alarms.state(),
            num_tokens: self.monitor.num_tokens,
            loss_scale: self.learner.optimizers.scaling.as_ref().map(|scaling| scaling.state()),
            entropy_controller: self.learner.entropy_controller.as_ref().map(|controller| controller.state()),
        }
    }

    /// Restores the states that [`PpoTrainer::fixed`] and [`PpoTrainer::resumable`] returned.
    ///
    /// # Errors
    /// If it is the state of another run.
    pub(super) fn restore(&mut self, fixed: FixedState, state: PpoState) -> Result<()> {
        if fixed.own.as_deref() != self.callbacks() {
            return Err(other_callbacks(fixed.own.as_deref(), self.callbacks()));
        }
        // Every part is named, so that code with a new part does not compile until the part is restored.
        let PpoState {
            cursor,
            rewards,
            kl_controller,
            unsupervised,
            kept,
            scores,
            skips,
            alarms,
            num_tokens,
            loss_scale,
            entropy_controller,
        } = state;
        self.data.cursor.load_state(&cursor, self.run.config.run.checkpoints.resume_with_changed_inputs)?;
        self.rewards.load_state(&rewards)?;
        self.course.kl_controller.load_state(kl_controller)?;
        // With --resume_with_changed_inputs rows and texts may be others, and their number another.
        let has_changed = !self.record.inputs.changed(&fixed.inputs).is_empty();
        if let Some(texts) = &mut self.learner.unsupervised {
            let missing = || Error::Run("expected the state of `unsupervised`, found none".into());
            texts.load_state(&unsupervised.ok_or_else(missing)?, has_changed)?;
        }
        self.sampler.kept.load_state(kept.filter(|_| !has_changed), self.data.prompts.len())?;
        self.course.scores.scaling.load_state(scores);
        if let (Some(scaling), Some(state)) = (&mut self.learner.optimizers.scaling, &loss_scale) {
            scaling.load_state(state)?;
        }
        if let (Some(controller), Some(state)) = (&mut self.learner.entropy_controller, entropy_controller) {
            controller.load_state(state)?;
        }
        self.monitor.skips.load_state(skips);
        self.monitor.alarms.load_state(alarms);
        self.monitor.num_tokens = num_tokens;
        self.record.checks = fixed.checks;
        Ok(())
    }

    /// Returns which callbacks set the updates, in the words of checkpoints.
    fn callbacks(&self) -> Option<&'static str> {
        match (&self.data.order, &self.course.schedule) {
            (None, None) => None,
            (Some(_), None) => Some("an order"),
            (None, Some(_)) => Some("a schedule"),
            (Some(_), Some(_)) => Some("an order and a schedule"),
        }
    }
}

/// The error of a resumed run with other callbacks than those of its start, `began`; both are in the words of [`PpoTrainer::callbacks`].
fn other_callbacks(began: Option<&str>, found: Option<&str>) -> Error {
    let calls = match began {
        None => "call neither `with_order` nor `with_schedule`",
        Some("an order") => "call `with_order`",
        Some("a schedule") => "call `with_schedule`",
        Some(_) => "call `with_order` and `with_schedule`",
    };
    let began = began.unwrap_or("no order or schedule");
    let found = found.unwrap_or("none");
    Error::Run(format!(
        "callbacks: the run was started with {began} of the caller's, and this trainer has {found}; {calls} before resuming"
    ))
}
