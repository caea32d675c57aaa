//! Marks of alarms and rollbacks on charts.

use super::read::{Alarm, Run};
use super::samples::spread;

/// The metric whose chart has the marks of all alarms.
const ALL: &str = "objective/scores";

/// Marks of a run on one chart, at most: more would be a solid block.
const MOST_MARKS: usize = 40;

/// Each alarm with the metrics that it is about, whose charts have its marks.
const METRICS: [(&str, &[&str]); 19] = [
    ("runaway_kl", &["objective/kl"]),
    ("low_entropy", &["policy/entropy_avg", "objective/entropy"]),
    ("length_limit", &["val/response_length"]),
    ("no_stop", &["val/num_eos_tokens", "completions/clipped_ratio"]),
    ("fewer_stops", &["val/num_eos_tokens", "completions/clipped_ratio"]),
    ("alike_responses", &["policy/entropy_avg", "objective/entropy"]),
    ("ignored_eos", &["val/num_eos_tokens"]),
    ("reused_responses", &["val/response_length"]),
    ("equal_scores", &["objective/scores_std", "frac_reward_zero_std"]),
    ("unscored", &[]),
    ("negative_explained_variance", &["val/explained_variance"]),
    ("high_clip_share", &["policy/clipfrac_avg", "clip_ratio/region_mean"]),
    ("gradient_leap", &["policy/grad_norm", "val/grad_norm"]),
    ("sampling_mismatch", &["sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"]),
    ("no_calls", &["tools/call_frequency"]),
    ("failing_calls", &["tools/failure_frequency"]),
    ("failing_environments", &["env_failure_frequency"]),
    ("cut_episodes", &["val/response_length", "completions/clipped_ratio"]),
    ("skipped_steps", &["val/skipped_steps", "policy/grad_norm", "val/grad_norm"]),
];

/// The mark of an alarm or a rollback on a chart.
#[derive(Debug, Clone, PartialEq)]
pub struct AlarmMark {
    pub update: f64,
    /// Name of the alarm; of several runs also the run's.
    pub label: String,
    /// Number of the run's colour, of several runs.
    pub colour: Option<usize>,
    pub is_rollback: bool,
}

/// Returns the marks on a chart of these metrics: of the alarms that are about one of them, and of all rollbacks.
pub(crate) fn marks(runs: &[Run], metrics: &[&str]) -> Vec<AlarmMark> {
    let mut marks = Vec::new();
    for (at, run) in runs.iter().enumerate() {
        let alarms: Vec<&Alarm> = run.alarms.iter().filter(|alarm| is_about(alarm, metrics)).collect();
        let is_alone = runs.len() == 1;
        marks.extend(spread(alarms.len(), MOST_MARKS).into_iter().map(|place| alarms[place]).map(|alarm| AlarmMark {
            update: alarm.step,
            label: if is_alone { alarm.name.clone() } else { format!("{}: {}", run.label, alarm.name) },
            colour: (!is_alone).then_some(at),
            is_rollback: alarm.is_rollback(),
        }));
    }
    marks
}

/// Returns whether the alarm is about one of these metrics. A rollback changes all.
fn is_about(alarm: &Alarm, metrics: &[&str]) -> bool {
    let alarm_metrics =
        METRICS.iter().find(|(name, _)| *name == alarm.name).map_or(&[][..], |(_, alarm_metrics)| alarm_metrics);
    alarm.is_rollback() || metrics.contains(&ALL) || alarm_metrics.iter().any(|metric| metrics.contains(metric))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlhf_base::metrics::WarningKind;

    #[test]
    fn every_alarm_has_the_metrics_that_it_is_about() {
        let names: Vec<&str> = METRICS.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, WarningKind::ALL.map(WarningKind::name));
    }

    #[test]
    fn alarms_are_about_their_metrics_and_all_are_on_the_score() {
        let alarm = |name: &str| Alarm { step: 1.0, name: name.into(), message: String::new() };
        for (name, metrics, about) in [
            ("runaway_kl", &["objective/kl", "eval/kl"][..], true),
            ("runaway_kl", &["val/response_length"], false),
            ("runaway_kl", &["objective/scores"], true),
            ("of another version", &["objective/kl"], false),
            ("of another version", &["objective/scores"], true),
            ("rollback", &["lr"], true),
        ] {
            assert_eq!(is_about(&alarm(name), metrics), about, "{name} {metrics:?}");
        }
    }
}
