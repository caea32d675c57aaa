//! The charts of a report: which metrics are drawn, together with which, and in what order.

use super::marks::marks;
use super::read::Run;
use super::svg::{Chart, Curve, Point};
use std::collections::HashSet;

/// Label of a curve, and the metric that it shows.
type Line = (&'static str, &'static str);

/// A chart of given metrics: title, unit, curves.
struct Panel(&'static str, &'static str, &'static [Line]);

/// The headings of charts, with the charts below each; [`REWARDS`], [`TIME`] and [`MEMORY`] get the metrics that a run names.
const SECTIONS: [(&str, &[Panel]); 4] = [
    (
        REWARDS,
        &[
            Panel("Score", "", &[("training prompts", "objective/scores"), ("held-out prompts", "eval/score")]),
            Panel("Score before scaling", "", &[("", "objective/raw_scores")]),
            Panel("Score less the KL penalty", "", &[("", "objective/rlhf_reward")]),
            Panel("Standard deviation of the scores", "", &[("", "objective/scores_std")]),
            Panel("Groups with equal scores", "share", &[("", "frac_reward_zero_std")]),
            Panel("Accuracy", "share of pairs", &[("training pairs", "accuracy"), ("held-out pairs", "eval_accuracy")]),
            Panel("Margin", "score", &[("training pairs", "margin"), ("held-out pairs", "eval_margin")]),
            Panel("Mean reward", "score", &[("training pairs", "mean_reward"), ("held-out pairs", "eval_mean_reward")]),
        ],
    ),
    (
        "Policy",
        &[
            Panel(
                "KL to the reference",
                "nats per response",
                &[("training prompts", "objective/kl"), ("held-out prompts", "eval/kl")],
            ),
            Panel("Weight of the KL", "", &[("", "objective/kl_coef")]),
            Panel("Entropy", "nats per token", &[("", "policy/entropy_avg")]),
            Panel("Entropy of a response", "nats", &[("", "objective/entropy")]),
            Panel(
                "Length of responses",
                "tokens",
                &[("training prompts", "val/response_length"), ("held-out prompts", "eval/response_length")],
            ),
            Panel("Stop tokens", "per update", &[("", "val/num_eos_tokens")]),
            Panel("Responses that did not stop", "share", &[("", "completions/clipped_ratio")]),
            Panel("Clipped tokens", "share", &[("policy", "policy/clipfrac_avg"), ("value model", "val/clipfrac_avg")]),
            Panel("Clipped ratios", "share", &[("below", "clip_ratio/low_mean"), ("above", "clip_ratio/high_mean")]),
            Panel("Change of the policy in an update", "nats\u{b2} per token", &[("", "policy/approxkl_avg")]),
            Panel("Ratio of probabilities", "mean", &[("", "val/ratio")]),
            Panel("Ratio of probabilities", "variance", &[("", "val/ratio_var")]),
        ],
    ),
    (
        "Optimization",
        &[
            Panel("Loss", "", &[("training rows", "loss"), ("held-out rows", "eval_loss")]),
            Panel("Loss of the policy", "", &[("policy", "loss/policy_avg"), ("KL", "loss/kl_avg")]),
            Panel("Loss of the value model", "score\u{b2}", &[("", "loss/value_avg")]),
            Panel("Loss of pretraining texts", "nats per token", &[("", "loss/unsup_avg")]),
            Panel("Explained variance", "up to 1", &[("", "val/explained_variance")]),
            Panel("Gradient norm", "", &[("policy", "policy/grad_norm"), ("value model", "val/grad_norm")]),
            Panel("Gradient norm", "", &[("", "grad_norm")]),
            Panel("Learning rate", "", &[("policy", "lr"), ("value model", "val/lr"), ("", "learning_rate")]),
            Panel(
                "Skipped optimizer steps",
                "",
                &[("not finite", "val/skipped_steps"), ("ratio", "policy/skipped_steps")],
            ),
        ],
    ),
    (
        TIME,
        &[
            Panel(
                "Seconds by phase",
                "s per update",
                &[
                    ("update", "time/update"),
                    ("generate", "time/generate"),
                    ("rollout", "time/rollout"),
                    ("optimise", "time/optimise"),
                    ("evaluation", "time/eval"),
                    ("waiting", "time/waiting"),
                    ("collectives", "time/collectives"),
                ],
            ),
            Panel(
                "Speed",
                "tokens/s",
                &[("generate", "tokens_per_second/generate"), ("update", "tokens_per_second/update")],
            ),
        ],
    ),
];

const REWARDS: &str = "Score";
const TIME: &str = "Time";

/// Second names that a run has for the same numbers, as TRL's trainers of groups have them, with the first names. One that ends with
/// a slash stands for all that begin with it.
const SECOND_NAMES: [(&str, &str); 8] = [
    ("reward", "objective/scores"),
    ("reward_std", "objective/scores_std"),
    ("rewards/", "objective/scores"),
    ("entropy", "policy/entropy_avg"),
    ("grad_norm", "policy/grad_norm"),
    ("kl", "loss/kl_avg"),
    ("completions/mean_length", "val/response_length"),
    ("step_time", "time/update"),
];

/// Metrics that place the others, and are no curves.
const PLACES: [&str; 3] = ["step", "episode", "epoch"];

/// Charts under a heading.
#[derive(Debug)]
pub(super) struct Section<'a> {
    pub(super) title: &'static str,
    pub(super) charts: Vec<Chart<'a>>,
}

/// The metrics of some runs, in charts.
#[derive(Debug)]
pub(super) struct Charts<'a> {
    pub(super) sections: Vec<Section<'a>>,
    /// Charts of all other metrics.
    pub(super) others: Vec<Chart<'a>>,
    /// Metrics that are the same number in all updates of all runs.
    pub(super) constant: Vec<(&'a str, f64)>,
}

impl<'a> Charts<'a> {
    /// Arranges the metrics of these runs.
    pub(super) fn of(runs: &'a [Run]) -> Self {
        let mut left = Left::new(runs);
        let mut sections = Vec::new();
        for (title, panels) in SECTIONS {
            let mut charts = Vec::new();
            for Panel(title, unit, lines) in panels {
                let lines = lines.iter().map(|(label, name)| (label.to_string(), *name)).collect();
                charts.extend(left.charts(title, unit, lines));
            }
            match title {
                REWARDS => charts.extend(left.rewards()),
                TIME => charts.extend(left.named("Seconds in rewards", "s per update", "time/reward/")),
                _ => {}
            }
            let memory = if title == TIME { left.named("Memory", "", "memory/") } else { Vec::new() };
            let title = if memory.is_empty() { title } else { "Time and memory" };
            charts.extend(memory);
            sections.push(Section { title, charts });
        }
        sections.retain(|section| !section.charts.is_empty());
        let others = left.names.clone().into_iter().flat_map(|name| left.charts(name, "", vec![(String::new(), name)]));
        let mut others: Vec<Chart<'a>> = others.collect();
        for chart in sections.iter_mut().flat_map(|section| &mut section.charts).chain(&mut others) {
            chart.marks = marks(runs, &chart.curves.iter().map(|curve| curve.metric).collect::<Vec<_>>());
        }
        Self { sections, others, constant: left.constant }
    }

    /// Returns the number of all curves.
    pub(super) fn curves(&self) -> usize {
        let sections = self.sections.iter().flat_map(|section| &section.charts);
        sections.chain(&self.others).map(|chart| chart.curves.len()).sum()
    }
}

/// Metrics that no chart has yet.
struct Left<'a> {
    runs: &'a [Run],
    /// Their names, in the order of the first run that has each.
    names: Vec<&'a str>,
    constant: Vec<(&'a str, f64)>,
}

impl<'a> Left<'a> {
    fn new(runs: &'a [Run]) -> Self {
        let all = runs.iter().flat_map(|run| &run.metrics).map(|series| series.name.as_str());
        let known: HashSet<&str> = all.clone().collect();
        let is_second = |name: &str| {
            let is = |second: &str| name == second || second.ends_with('/') && name.starts_with(second);
            SECOND_NAMES.iter().any(|(second, first)| is(second) && known.contains(first))
        };
        let mut seen = HashSet::new();
        let names: Vec<&str> =
            all.filter(|name| !PLACES.contains(name) && !is_second(name) && seen.insert(*name)).collect();
        // The score is drawn also where it never changes.
        let constant: Vec<(&str, f64)> = names
            .iter()
            .filter(|name| **name != "objective/scores")
            .filter_map(|name| Some((*name, constant(runs, name)?)))
            .collect();
        let varies = |name: &&str| !constant.iter().any(|(other, _)| other == name);
        Self { runs, names: names.into_iter().filter(varies).collect(), constant }
    }

    /// Takes the metrics of `lines` that are left, and returns them in one chart; for several runs in one chart each.
    fn charts(&mut self, title: &str, unit: &'static str, lines: Vec<(String, &str)>) -> Vec<Chart<'a>> {
        let lines: Vec<_> = lines.into_iter().filter_map(|(label, name)| Some((label, self.take(name)?))).collect();
        if let [run] = self.runs {
            let is_alone = lines.len() == 1;
            let curves: Vec<Curve<'_>> = lines
                .into_iter()
                .enumerate()
                .filter_map(|(colour, (label, name))| {
                    let label = if is_alone && !label.starts_with("held-out") { String::new() } else { label };
                    Some(Curve { label, metric: name, colour, points: run.points(name)? })
                })
                .collect();
            return Vec::from_iter((!curves.is_empty()).then(|| Chart {
                title: title.into(),
                unit,
                curves,
                marks: Vec::new(),
            }));
        }
        let is_alone = lines.len() == 1;
        let chart = |(label, name): (String, &'a str)| {
            let title = if is_alone || label.is_empty() { title.to_string() } else { format!("{title}: {label}") };
            let curve = |(colour, run): (usize, &'a Run)| {
                Some(Curve { label: run.label.clone(), metric: name, colour, points: run.points(name)? })
            };
            let curves: Vec<Curve<'_>> = self.runs.iter().enumerate().filter_map(curve).collect();
            (!curves.is_empty()).then_some(Chart { title, unit, curves, marks: Vec::new() })
        };
        lines.into_iter().filter_map(chart).collect()
    }

    /// Returns a chart for the score of each reward, unless it is the whole score.
    fn rewards(&mut self) -> Vec<Chart<'a>> {
        let mut charts = Vec::new();
        for name in self.after("objective/scores/") {
            let (training, held_out) = (format!("objective/scores/{name}"), format!("eval/scores/{name}"));
            let lines =
                vec![("training prompts".to_string(), training.as_str()), ("held-out prompts".into(), &held_out)];
            let drawn = self.charts(&format!("Reward {name}"), "", lines);
            charts.extend(drawn.into_iter().filter(|_| !self.runs.iter().all(|run| is_score(run, &training))));
        }
        charts
    }

    /// Returns a chart of the metrics whose names begin with `start`.
    fn named(&mut self, title: &str, unit: &'static str, start: &str) -> Vec<Chart<'a>> {
        let names: Vec<String> = self.after(start).into_iter().map(|name| format!("{start}{name}")).collect();
        let lines = names.iter().map(|name| (name[start.len()..].to_string(), name.as_str())).collect();
        self.charts(title, unit, lines)
    }

    /// Returns the rests of the names that begin with `start`.
    fn after(&self, start: &str) -> Vec<&'a str> {
        self.names.iter().filter_map(|name| name.strip_prefix(start)).collect()
    }

    /// Takes a metric, if it is left.
    fn take(&mut self, name: &str) -> Option<&'a str> {
        let place = self.names.iter().position(|left| *left == name)?;
        Some(self.names.remove(place))
    }
}

/// Returns whether a metric is the score, but for rounding.
fn is_score(run: &Run, name: &str) -> bool {
    let (score, points) = (run.points("objective/scores"), run.points(name));
    score.zip(points).is_some_and(|(score, points)| {
        score.len() == points.len() && score.iter().zip(points).all(|(a, b)| (a.1 - b.1).abs() <= 1e-5 * a.1.abs())
    })
}

/// Returns the only value of a metric, if it has one in all updates of all runs, and at least two updates.
fn constant(runs: &[Run], name: &str) -> Option<f64> {
    let mut points = runs.iter().filter_map(|run| run.points(name)).flatten();
    let first: &Point = points.next()?;
    let mut rest = points.peekable();
    (rest.peek().is_some() && rest.all(|point| point.1 == first.1)).then_some(first.1)
}
