//! Settings of alarms and of the checks at the start of a PPO run.

use serde::Serialize;

use rlhf_base::Result;
use rlhf_base::metrics::WarningKind;
use rlhf_base::name_of;
use rlhf_base::schema::{ALARMS, Settings, at_least_one, no_effect, refuse};

/// Checks of a PPO run: those at its start, steps that are skipped, and alarms.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct AlarmConfig {
    /// Stop after this many consecutive updates in which every optimizer step was skipped because a loss or a gradient was not
    /// finite.
    #[setting(heading = ALARMS, default = 3, resume = Free)]
    pub max_skipped_updates: usize,
    /// Skip the checks at the start of the run: first probability ratio, first KL, and decoding.
    #[setting(heading = ALARMS, resume = Free)]
    pub no_checks: bool,
    /// Action when an alarm is raised, as NAME=ACTION; repeat the flag for several. NAME is an alarm, such as runaway_kl, or all, for every
    /// alarm that is not named. ACTION: warn; stop, which saves a checkpoint and ends the run; rollback, which continues from the last
    /// checkpoint before the metric began to move, with half the learning rate and other samples [default: all=warn].
    #[setting(heading = ALARMS, delimiter = ',', resume = Free)]
    pub on_alarm: Vec<String>,
    /// Rollbacks of a run, at most; the next alarm with that action stops it.
    #[setting(heading = ALARMS, default = MAX_ROLLBACKS, resume = Free)]
    pub max_rollbacks: usize,
}

/// Default number of rollbacks.
const MAX_ROLLBACKS: usize = 3;

/// Action when an alarm is raised, the weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum AlarmAction {
    Warn,
    Rollback,
    Stop,
}

/// The name of `on_alarm` for all alarms that are not named.
const ALL_ALARMS: &str = "all";

impl AlarmConfig {
    /// Checks every setting of a run, which `saves` checkpoints or does not.
    pub(crate) fn check(&self, saves: bool) -> Result<()> {
        at_least_one(name_of!(self.max_skipped_updates), self.max_skipped_updates)?;
        let actions = self.on_alarm.iter().map(|written| alarm_action(written)).collect::<Result<Vec<_>>>()?;
        let rollback = actions.iter().position(|(_, action)| *action == AlarmAction::Rollback);
        match rollback {
            Some(at) if !saves => refuse(
                name_of!(self.on_alarm),
                format!(
                    " = {} needs save_steps: a rollback continues from the last checkpoint; save_steps = 10 saves one every 10 \
                 updates",
                    self.on_alarm[at]
                ),
            ),
            None if self.max_rollbacks != MAX_ROLLBACKS => {
                no_effect(name_of!(self.max_rollbacks), self.max_rollbacks, "without on_alarm = NAME=rollback")
            }
            _ => Ok(()),
        }
    }

    /// Returns the action for an alarm: that of its name, else that for all. Where a name is set twice, the last one counts.
    pub(crate) fn action(&self, kind: WarningKind) -> AlarmAction {
        let actions: Vec<_> = self.on_alarm.iter().rev().filter_map(|written| alarm_action(written).ok()).collect();
        let action = |name: &str| actions.iter().find(|(known, _)| *known == name).map(|(_, action)| *action);
        action(kind.name()).or_else(|| action(ALL_ALARMS)).unwrap_or(AlarmAction::Warn)
    }

    /// Returns whether an alarm may do more than warn.
    pub(crate) fn acts(&self) -> bool {
        WarningKind::ALL.iter().any(|kind| self.action(*kind) != AlarmAction::Warn)
    }
}

/// Parses an entry of `on_alarm`.
fn alarm_action(written: &str) -> Result<(&str, AlarmAction)> {
    let (name, action) = written.split_once('=').unwrap_or((written, ""));
    let known = || WarningKind::ALL.iter().map(|kind| kind.name()).chain([ALL_ALARMS]);
    if !known().any(|known| known == name) {
        let names = known().collect::<Vec<_>>().join(", ");
        return refuse(
            "on_alarm",
            format!(" = {written}: expected NAME=warn, stop or rollback, with a NAME of {names}"),
        );
    }
    match action {
        "warn" => Ok((name, AlarmAction::Warn)),
        "stop" => Ok((name, AlarmAction::Stop)),
        "rollback" => Ok((name, AlarmAction::Rollback)),
        _ => refuse("on_alarm", format!(" = {written}: expected {name}=warn, {name}=stop or {name}=rollback")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alarm_has_its_own_action_or_that_of_all() {
        let alarms = |written: &[&str]| AlarmConfig {
            on_alarm: written.iter().map(ToString::to_string).collect(),
            ..rlhf_base::schema::defaults()
        };
        let actions = |written: &[&str]| {
            let alarms = alarms(written);
            alarms.check(true).unwrap();
            [WarningKind::RunawayKl, WarningKind::LowEntropy].map(|kind| alarms.action(kind))
        };
        assert_eq!(actions(&[]), [AlarmAction::Warn; 2]);
        assert!(!alarms(&["all=warn"]).acts() && alarms(&["skipped_steps=stop"]).acts());
        let mixed = ["runaway_kl=rollback", "all=stop", "low_entropy=stop", "low_entropy=warn"];
        assert_eq!(actions(&mixed), [AlarmAction::Rollback, AlarmAction::Warn]);
        assert_eq!(actions(&["runaway_kl=warn", "all=stop"]), [AlarmAction::Warn, AlarmAction::Stop]);
        let refused = |written: &[&str], saves| alarms(written).check(saves).unwrap_err().to_string();
        assert_eq!(
            refused(&["kl=stop"], false),
            "on_alarm = kl=stop: expected NAME=warn, stop or rollback, with a NAME of runaway_kl, low_entropy, length_limit, no_stop, \
             fewer_stops, alike_responses, ignored_eos, reused_responses, equal_scores, unscored, negative_explained_variance, \
             high_clip_share, gradient_leap, sampling_mismatch, no_calls, failing_calls, failing_environments, cut_episodes, skipped_steps, all"
        );
        assert_eq!(refused(&["all=halt"], false), "on_alarm = all=halt: expected all=warn, all=stop or all=rollback");
        assert!(refused(&["all=rollback"], false).starts_with("on_alarm = all=rollback needs save_steps: "));
        let most = AlarmConfig { max_rollbacks: 1, ..alarms(&["all=stop"]) };
        assert!(most.check(true).unwrap_err().to_string().starts_with("max_rollbacks = 1 has no effect without"));
    }
}
