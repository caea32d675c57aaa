//! The progress of a run, from the files that it has written.

use super::read::{Outcome, Run};
use crate::terminal::about;
use std::fmt;
use std::time::Duration;

/// Number of last updates, at most, whose mean time is the estimate for the next ones.
const RECENT: usize = 20;

/// Seconds from which on no estimate is shown: a hundred years.
const MOST_SECONDS: f64 = 3.2e9;

/// Progress of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Updates done.
    done: f64,
    /// Updates of the whole run, if known.
    total: Option<f64>,
    /// Time until the end of a run that has not ended.
    left: Option<Duration>,
    outcome: Outcome,
}

impl Progress {
    pub fn of(run: &Run) -> Self {
        let done = run.updates;
        let total = match run.outcome {
            Outcome::Finished => Some(done),
            Outcome::Stopped { total, .. } => Some(total as f64),
            Outcome::Running | Outcome::Interrupted | Outcome::Open => {
                match run.length.map(|length| length as f64).filter(|&length| length >= done) {
                    None => total(run),
                    length => length,
                }
            }
        };
        let may_continue = matches!(run.outcome, Outcome::Running | Outcome::Open);
        let left = total.filter(|_| may_continue).and_then(|total| {
            let seconds = (total - done).max(0.0) * seconds_per_update(run)?;
            (seconds < MOST_SECONDS).then(|| Duration::from_secs_f64(seconds))
        });
        Self { done, total, left, outcome: run.outcome }
    }

    /// Returns the progress for the title of a page, `15/32`, while the run may continue.
    pub fn short(&self) -> Option<String> {
        let may_continue = matches!(self.outcome, Outcome::Running | Outcome::Open);
        self.total.filter(|_| may_continue).map(|total| format!("{}/{total}", self.done))
    }
}

/// As on the live page: `update 3 of 100, about 12 min left`.
impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "update {}", self.done)?;
        if let Some(total) = self.total {
            write!(f, " of {total}")?;
        }
        match (self.outcome, self.left) {
            (Outcome::Finished, _) => f.write_str(", finished"),
            (Outcome::Stopped { .. }, _) => f.write_str(", ended early"),
            (Outcome::Interrupted, _) => f.write_str(", interrupted, or at work on another machine"),
            (Outcome::Running | Outcome::Open, Some(left)) => write!(f, ", about {} left", about(left)),
            (Outcome::Running | Outcome::Open, None) => Ok(()),
        }
    }
}

/// Returns the updates of the whole run from its settings, for a run that has not written their number: for PPO from its episodes, for SFT
/// and reward models from their steps or epochs. The length of a PPO run that ends with its data is unknown.
fn total(run: &Run) -> Option<f64> {
    let setting = |name: &str| run.setting(name).and_then(|value| value.parse::<f64>().ok());
    let last = |name: &str| run.points(name).and_then(|points| points.last()).filter(|point| point.0 > 0.0);
    let total = match (last("episode"), last("epoch")) {
        (Some(&(step, episodes)), _) => (setting("total_episodes")? / (episodes / step)).ceil(),
        (None, Some(&(step, epochs))) => {
            setting("max_steps").or_else(|| Some((setting("num_train_epochs")? / (epochs / step)).ceil()))?
        }
        (None, None) => return None,
    };
    (total.is_finite() && total >= run.updates).then_some(total)
}

/// Returns the mean seconds of the last updates.
fn seconds_per_update(run: &Run) -> Option<f64> {
    let points = run.points("time/update")?;
    let recent = &points[points.len().saturating_sub(RECENT)..];
    let seconds: Vec<f64> = recent.iter().map(|point| point.1).filter(|seconds| seconds.is_finite()).collect();
    (!seconds.is_empty()).then(|| (seconds.iter().sum::<f64>() / seconds.len() as f64).max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::read::{Series, Setting};

    fn run(outcome: Outcome, metrics: &[(&str, &[(f64, f64)])], settings: &[(&str, &str)]) -> Run {
        let series = |&(name, points): &(&str, &[(f64, f64)])| Series { name: name.into(), points: points.to_vec() };
        let metrics: Vec<Series> = metrics.iter().map(series).collect();
        Run {
            updates: metrics.iter().filter_map(|series| series.points.last()).map(|point| point.0).fold(0.0, f64::max),
            metrics,
            outcome,
            settings: settings.iter().map(|(name, value)| Setting::of(name, value)).collect(),
            ..Run::default()
        }
    }

    #[test]
    fn the_length_and_the_time_left_are_those_of_the_settings() {
        let said = |metrics: &[(&str, &[(f64, f64)])], settings: &[(&str, &str)]| {
            Progress::of(&run(Outcome::Open, metrics, settings)).to_string()
        };
        let ppo: [(&str, &[(f64, f64)]); 2] =
            [("episode", &[(1.0, 8.0), (3.0, 24.0)]), ("time/update", &[(1.0, f64::NAN), (2.0, 50.0), (3.0, 70.0)])];
        assert_eq!(said(&ppo, &[("total_episodes", "100")]), "update 3 of 13, about 10 min left");
        assert_eq!(said(&ppo[..1], &[("total_episodes", "100")]), "update 3 of 13");
        assert_eq!(said(&ppo, &[("total_episodes", "none"), ("max_steps", "7")]), "update 3");
        assert_eq!(said(&ppo, &[("total_episodes", "8")]), "update 3", "the setting cannot be right");
        let sft: [(&str, &[(f64, f64)]); 2] = [("epoch", &[(10.0, 0.5)]), ("time/update", &[(10.0, 1.0)])];
        assert_eq!(
            said(&sft, &[("max_steps", "none"), ("num_train_epochs", "1.51")]),
            "update 10 of 31, about 21 s left"
        );
        assert_eq!(said(&sft, &[("max_steps", "12")]), "update 10 of 12, about 2.0 s left");
        assert_eq!(said(&[("epoch", &[(0.0, 0.0)])], &[("num_train_epochs", "3")]), "update 0");
        assert_eq!(
            said(&[("time/update", &[(1.0, 1e300)]), ("epoch", &[(1.0, 1e-9)])], &[("max_steps", "9")]),
            "update 1 of 9"
        );
    }

    #[test]
    fn the_length_that_a_run_has_written_wins_over_its_settings() {
        let metrics: [(&str, &[(f64, f64)]); 2] = [("episode", &[(3.0, 24.0)]), ("time/update", &[(3.0, 60.0)])];
        let text = |length: u64, settings: &[(&str, &str)]| {
            let run = Run { length: Some(length), ..run(Outcome::Open, &metrics, settings) };
            Progress::of(&run).to_string()
        };
        assert_eq!(text(13, &[("total_episodes", "none")]), "update 3 of 13, about 10 min left");
        assert_eq!(text(13, &[("total_episodes", "800")]), "update 3 of 13, about 10 min left");
        assert_eq!(
            text(2, &[("total_episodes", "100")]),
            "update 3 of 13, about 10 min left",
            "that of an earlier run"
        );
    }

    #[test]
    fn a_run_that_has_ended_has_no_time_left() {
        let metrics: [(&str, &[(f64, f64)]); 2] = [("episode", &[(3.0, 24.0)]), ("time/update", &[(3.0, 70.0)])];
        let said = |outcome: Outcome| Progress::of(&run(outcome, &metrics, &[("total_episodes", "100")])).to_string();
        assert_eq!(said(Outcome::Finished), "update 3 of 3, finished");
        assert_eq!(said(Outcome::Stopped { done: 3, total: 13 }), "update 3 of 13, ended early");
        assert_eq!(said(Outcome::Interrupted), "update 3 of 13, interrupted, or at work on another machine");
        assert_eq!(said(Outcome::Running), "update 3 of 13, about 12 min left");
        let short = |outcome| Progress::of(&run(outcome, &metrics, &[("total_episodes", "100")])).short();
        assert_eq!((short(Outcome::Running).as_deref(), short(Outcome::Interrupted)), (Some("3/13"), None));
    }
}
