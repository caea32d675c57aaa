//! Actions on alarms: a run that is stopped, or continues from an earlier checkpoint.

use super::PpoTrainer;
use crate::rl::alarms::settings::AlarmAction;
use crate::run::event::Event;
use crate::run::session::{Due, Session};
use rlhf_base::STOPPED_BY_ALARM;
use rlhf_base::metrics::{Warning, WarningKind};
use rlhf_base::{Error, Result};

impl PpoTrainer {
    /// Takes the strongest action that `on_alarm` sets for the alarms of the last update. Unless the run is rolled back, writes what is
    /// `due` after the update.
    ///
    /// # Errors
    /// [`Error::Stopped`] if an alarm stops the run; if a file cannot be read or written.
    pub(super) fn act_on_alarms(&mut self, session: &mut Session<'_>, due: Due) -> Result<()> {
        let Some((kind, action)) = self.alarm_action()? else { return session.save_due(self, due) };
        let name = kind.name();
        let update = self.course.progress.done;
        let (action, why) = match action {
            AlarmAction::Warn => return session.save_due(self, due),
            AlarmAction::Stop => ("stop", String::new()),
            AlarmAction::Rollback => match self.roll_back(session, kind)? {
                None => return Ok(()),
                Some(why) => ("rollback", format!(", but {why}")),
            },
        };
        session.save_due(self, due)?;
        if update == self.last_update() {
            return Ok(());
        }
        let message = format!("stopped after update {update} by the alarm {name} (on_alarm = {name}={action}{why})");
        self.learner.world.agree(Err(Error::Stopped { message, code: STOPPED_BY_ALARM }))
    }

    /// Returns the alarm of the last update with the strongest action; rank 0 decides it for all ranks.
    fn alarm_action(&self) -> Result<Option<(WarningKind, AlarmAction)>> {
        let alarms = &self.run.config.alarms;
        if !alarms.acts() {
            return Ok(None);
        }
        let kinds: Vec<WarningKind> = self.monitor.warnings.iter().map(|warning: &Warning| warning.kind).collect();
        let strongest = kinds.iter().copied().rev().max_by_key(|kind| alarms.action(*kind));
        let place = |kind| WarningKind::ALL.iter().position(|known| *known == kind).map_or(-1.0, |place| place as f64);
        let mut chosen = [strongest.map_or(-1.0, place)];
        self.learner.world.broadcast_numbers(&mut chosen)?;
        let kind = WarningKind::ALL.iter().enumerate().find(|(place, _)| *place as f64 == chosen[0]);
        Ok(kind.map(|(_, kind)| (*kind, alarms.action(*kind))))
    }

    /// Continues from the last checkpoint from before the alarm's metric began to move, with half the learning rate and other samples.
    /// Returns the reason if it cannot.
    fn roll_back(&mut self, session: &mut Session<'_>, kind: WarningKind) -> Result<Option<String>> {
        let step = self.course.progress.done;
        let rollbacks = self.course.progress.rollbacks;
        let most = self.run.config.alarms.max_rollbacks;
        if rollbacks >= most {
            return Ok(Some(format!("max_rollbacks = {most} of them are done")));
        }
        let (began, most_updates) = self.monitor.alarms.beginning(kind, step);
        let Some(saved) = session.last_checkpoint(self, most_updates)? else {
            return Ok(Some(format!(
                "there is no checkpoint of the policy before it began to move, in update {began}; a smaller save_steps or a larger \
                 save_total_limit keeps one"
            )));
        };
        let to = saved.state.update;
        let share = 1u64 << (rollbacks + 1).min(63);
        let message = format!(
            "update {step}: the alarm {}, whose metric began to move in update {began}, rolls the run back to \
             checkpoint-{to}: it continues with 1/{share} of its learning rate, and \
             samples other responses; rollback {} of at most {most}",
            kind.name(),
            rollbacks + 1
        );
        session.emit(&Event::RolledBack { step, to, message: &message })?;
        session.roll_back(self, &saved)?;
        Ok(None)
    }

    /// Returns the factor of all learning rates: a half for each rollback.
    pub(super) fn rate_factor(&self) -> f64 {
        0.5f64.powi(self.course.progress.rollbacks as i32)
    }

    /// Returns the seed of the responses that are trained on: another seed after each rollback. Evaluations and sample tables keep the
    /// run's seed.
    pub(super) fn sampling_seed(&self) -> u64 {
        self.run.config.run.seed.wrapping_add((self.course.progress.rollbacks as u64) << 32)
    }
}
