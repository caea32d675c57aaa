//! The charts of a report: which metrics are drawn together, and in what order.

use super::marks::marks;
use super::read::Run;
use super::svg::{Chart, Curve, Point};
use rlhf_base::metrics::name_of_ppo;
use std::borrow::Cow;
use std::collections::HashSet;

/// Label of a curve, and the metric that it shows.
type Line = (&'static str, &'static str);

/// A chart of given metrics: title, unit, curves.
struct Panel(&'static str, &'static str, &'static [Line]);

/// The headings of charts, with the charts below each; [`REWARDS`], [`TOOLS`] and [`TIME`] get the metrics that a run names.
const SECTIONS: [(&str, &[Panel]); 5] = [
    (
        REWARDS,
        &[
            Panel("Score", "", &[("training prompts", "objective/scores"), ("held-out prompts", "eval/score")]),
            Panel("Score before scaling", "", &[("", "objective/raw_scores")]),
            Panel("Score less the KL penalty", "", &[("", "objective/rlhf_reward")]),
            Panel("Reward of the environment", "", &[("", "env_reward")]),
            Panel("Standard deviation of the scores", "", &[("", "objective/scores_std")]),
            Panel("Groups with equal scores", "share", &[("", "frac_reward_zero_std")]),
            Panel("Accuracy", "share of pairs", &[("training pairs", "accuracy"), ("held-out pairs", "eval_accuracy")]),
            Panel("Margin", "score", &[("training pairs", "margin"), ("held-out pairs", "eval_margin")]),
            Panel("Mean reward", "score", &[("training pairs", "mean_reward"), ("held-out pairs", "eval_mean_reward")]),
            Panel(
                "Accuracy",
                "share of pairs",
                &[("training pairs", "rewards/accuracies"), ("held-out pairs", "eval_rewards/accuracies")],
            ),
            Panel(
                "Margin",
                "beta times the log-ratio",
                &[("training pairs", "rewards/margins"), ("held-out pairs", "eval_rewards/margins")],
            ),
            Panel(
                "Rewards of both sides",
                "beta times the log-ratio",
                &[("chosen", "rewards/chosen"), ("rejected", "rewards/rejected")],
            ),
            Panel(
                "Log-probabilities",
                "nats per completion",
                &[("chosen", "logps/chosen"), ("rejected", "logps/rejected")],
            ),
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
            Panel("KL of the loss", "nats per token", &[("", "kl")]),
            Panel("Reverse KL to the teacher", "nats per sampled token", &[("", "reverse_kl")]),
            Panel(
                "Entropy of tokens",
                "nats per token",
                &[("training rows", "entropy"), ("held-out rows", "eval_entropy")],
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
            Panel(
                "Clipped ratios",
                "share",
                &[
                    ("below", "clip_ratio/low_mean"),
                    ("above", "clip_ratio/high_mean"),
                    ("either", "clip_ratio/region_mean"),
                ],
            ),
            Panel("Change of the policy in an update", "nats\u{b2} per token", &[("", "policy/approxkl_avg")]),
            Panel("Ratio of probabilities", "mean", &[("", "val/ratio")]),
            Panel("Ratio of probabilities", "variance", &[("", "val/ratio_var")]),
        ],
    ),
    (
        TOOLS,
        &[
            Panel("Calls", "per response", &[("", "tools/call_frequency")]),
            Panel(
                "Failures",
                "share",
                &[("calls", "tools/failure_frequency"), ("environments", "env_failure_frequency")],
            ),
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
const TOOLS: &str = "Tools";
const TIME: &str = "Time";

/// Beginnings of the names of a single reward's scores, on training and on held-out prompts.
const TRAINING_SCORES: &str = "objective/scores/";
const HELD_OUT_SCORES: &str = "eval/scores/";

/// Metrics that give the position of an update in the run. They have no curves.
const PLACES: [&str; 3] = ["step", "episode", "epoch"];

/// Charts under a heading.
#[derive(Debug)]
pub(crate) struct Section<'a> {
    pub title: &'static str,
    pub charts: Vec<Chart<'a>>,
}

/// The metrics of some runs, in charts.
#[derive(Debug)]
pub(crate) struct Charts<'a> {
    pub sections: Vec<Section<'a>>,
    /// Charts of all other metrics.
    pub others: Vec<Chart<'a>>,
    /// Metrics that are the same number in all updates of all runs.
    pub constant: Vec<(&'a str, f64)>,
    /// Metrics that have the same numbers as a drawn metric in all updates of all runs.
    pub equal: Vec<(&'a str, &'a str)>,
}

impl<'a> Charts<'a> {
    /// Arranges the metrics of these runs.
    pub(crate) fn of(runs: &'a [Run]) -> Self {
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
                TOOLS => charts.extend(left.environments()),
                TIME => charts.extend(left.named("Seconds in rewards", "s per update", "time/reward/")),
                _ => {}
            }
            let memory = if title == TIME { left.named("Memory", "", "memory/") } else { Vec::new() };
            let title = if memory.is_empty() { title } else { "Time and memory" };
            charts.extend(memory);
            sections.push(Section { title, charts });
        }
        sections.retain(|section| !section.charts.is_empty());
        let names = left.names.clone();
        let chart = |name: String| {
            let title = metric_name(runs, &name);
            left.charts(title, "", vec![(String::new(), &name)])
        };
        let mut others: Vec<Chart<'a>> = names.into_iter().flat_map(chart).collect();
        for chart in sections.iter_mut().flat_map(|section| &mut section.charts).chain(&mut others) {
            let names =
                chart.curves.iter().map(|curve| name_of_ppo(curve.metric).unwrap_or(curve.metric.to_string().into()));
            let names: Vec<Cow<'_, str>> = names.collect();
            chart.marks = marks(runs, &names.iter().map(AsRef::as_ref).collect::<Vec<_>>());
        }
        Self { sections, others, constant: left.constant, equal: left.equal }
    }

    /// Returns whether a curve has a moving mean.
    pub(crate) fn is_smoothed(&self) -> bool {
        let sections = self.sections.iter().flat_map(|section| &section.charts);
        sections.chain(&self.others).flat_map(|chart| &chart.curves).any(Curve::is_smoothed)
    }

    /// Returns the number of all curves.
    pub(crate) fn curves(&self) -> usize {
        let sections = self.sections.iter().flat_map(|section| &section.charts);
        sections.chain(&self.others).map(|chart| chart.curves.len()).sum()
    }
}

/// Metrics that no chart has yet.
struct Left<'a> {
    runs: &'a [Run],
    /// Their names, in the order of the first run that has each.
    names: Vec<String>,
    constant: Vec<(&'a str, f64)>,
    equal: Vec<(&'a str, &'a str)>,
}

impl<'a> Left<'a> {
    fn new(runs: &'a [Run]) -> Self {
        let mut seen = HashSet::new();
        let all = runs.iter().flat_map(Run::names).map(Cow::into_owned);
        let mut names: Vec<String> =
            all.filter(|name| !PLACES.contains(&name.as_str()) && seen.insert(name.clone())).collect();
        let mut constants = Vec::new();
        let mut same = Vec::new();
        names.retain(|name| {
            // Scores are drawn even if they never change.
            let value = constant(runs, name).filter(|_| !is_any_score(name));
            constants.extend(value.map(|value| (metric_name(runs, name), value)));
            value.is_none()
        });
        // If several metrics are equal, only the one that comes first on the page is drawn.
        let mut by_place: Vec<&String> = names.iter().collect();
        by_place.sort_by_key(|name| place(name));
        let mut drawn: Vec<&str> = Vec::new();
        let mut repeated = HashSet::new();
        for name in by_place {
            // `rewards` leaves out a reward that is the whole score, on training and on held-out prompts.
            let is_reward_score = name.starts_with(TRAINING_SCORES) || name.starts_with(HELD_OUT_SCORES);
            match drawn.iter().find(|other| !is_reward_score && is_equal(runs, other, name)) {
                Some(other) => {
                    same.push((metric_name(runs, name), metric_name(runs, other)));
                    repeated.insert(name.clone());
                }
                None => drawn.push(name),
            }
        }
        names.retain(|name| !repeated.contains(name));
        Self { runs, names, constant: constants, equal: same }
    }

    /// Takes those metrics of `lines` that are left, and returns them in one chart; for several runs each metric has its own chart.
    fn charts(&mut self, title: &str, unit: &'static str, lines: Vec<(String, &str)>) -> Vec<Chart<'a>> {
        let lines: Vec<_> = lines.into_iter().filter_map(|(label, name)| Some((label, self.take(name)?))).collect();
        if let [run] = self.runs {
            let is_alone = lines.len() == 1;
            let curves: Vec<Curve<'_>> = lines
                .into_iter()
                .enumerate()
                .filter_map(|(colour, (label, name))| {
                    let label = if is_alone && !label.starts_with("held-out") { String::new() } else { label };
                    curve(run, &name, label, colour)
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
        let chart = |(label, name): (String, String)| {
            let title = if is_alone || label.is_empty() { title.to_string() } else { format!("{title}: {label}") };
            let run_curve = |(colour, run): (usize, &'a Run)| curve(run, &name, run.label.clone(), colour);
            let curves: Vec<Curve<'_>> = self.runs.iter().enumerate().filter_map(run_curve).collect();
            (!curves.is_empty()).then_some(Chart { title, unit, curves, marks: Vec::new() })
        };
        lines.into_iter().filter_map(chart).collect()
    }

    /// Returns a chart for the score of each reward, unless it is the whole score.
    fn rewards(&mut self) -> Vec<Chart<'a>> {
        let mut charts = Vec::new();
        for name in self.after(TRAINING_SCORES) {
            let (training, held_out) = (format!("{TRAINING_SCORES}{name}"), format!("{HELD_OUT_SCORES}{name}"));
            let lines =
                vec![("training prompts".to_string(), training.as_str()), ("held-out prompts".into(), &held_out)];
            let drawn = self.charts(&format!("Reward {name}"), "", lines);
            charts.extend(drawn.into_iter().filter(|_| !self.runs.iter().all(|run| is_score(run, &training))));
        }
        charts
    }

    /// Returns a chart for each number that an environment gave.
    fn environments(&mut self) -> Vec<Chart<'a>> {
        let start = "environment/";
        let names =
            self.after(start).into_iter().map(|name| (format!("Environment: {name}"), format!("{start}{name}")));
        names.flat_map(|(title, name)| self.charts(&title, "", vec![(String::new(), &name)])).collect()
    }

    /// Returns a chart of the metrics whose names begin with `start`.
    fn named(&mut self, title: &str, unit: &'static str, start: &str) -> Vec<Chart<'a>> {
        let names: Vec<String> = self.after(start).into_iter().map(|name| format!("{start}{name}")).collect();
        let lines = names.iter().map(|name| (name[start.len()..].to_string(), name.as_str())).collect();
        self.charts(title, unit, lines)
    }

    /// Returns the rests of the names that begin with `start`.
    fn after(&self, start: &str) -> Vec<String> {
        self.names.iter().filter_map(|name| name.strip_prefix(start)).map(String::from).collect()
    }

    /// Takes a metric, if it is left.
    fn take(&mut self, name: &str) -> Option<String> {
        let place = self.names.iter().position(|left| left == name)?;
        Some(self.names.remove(place))
    }
}

/// Returns a curve of a run's metric, if the run has the metric.
fn curve<'a>(run: &'a Run, name: &str, label: String, colour: usize) -> Option<Curve<'a>> {
    let error = run.points(&format!("{name}_stderr")).and_then(|points| points.last()).map(|point| point.1);
    run.series(name).map(|series| Curve { label, metric: &series.name, colour, points: &series.points, error })
}

/// Returns the name of a metric in the first run that has it.
fn metric_name<'a>(runs: &'a [Run], name: &str) -> &'a str {
    runs.iter().find_map(|run| run.series(name)).map_or("", |series| &series.name)
}

/// Returns the place of a metric on the page.
fn place(name: &str) -> usize {
    let mut lines = SECTIONS.iter().flat_map(|(_, panels)| *panels).flat_map(|Panel(_, _, lines)| *lines);
    lines.position(|(_, metric)| *metric == name).unwrap_or(usize::MAX)
}

/// Whether a metric is a score, of all rewards or of one, on training or on held-out prompts.
fn is_any_score(name: &str) -> bool {
    ["objective/scores", "eval/score"].contains(&name)
        || name.starts_with(TRAINING_SCORES)
        || name.starts_with(HELD_OUT_SCORES)
}

/// Number of equal values from which on two metrics count as the same.
const FEW_VALUES: usize = 3;

/// Returns whether two metrics are the same numbers in all updates of all runs, up to rounding, with enough values to tell.
fn is_equal(runs: &[Run], a: &str, b: &str) -> bool {
    let mut values = 0;
    let mut is_same = |(a, b): (&Point, &Point)| {
        values += 1;
        a.0 == b.0 && (a.1 == b.1 || a.1.is_nan() && b.1.is_nan() || (a.1 - b.1).abs() <= 1e-5 * a.1.abs())
    };
    let mut is_equal = |run: &Run| match (run.points(a), run.points(b)) {
        (Some(a), Some(b)) => a.len() == b.len() && a.iter().zip(b).all(&mut is_same),
        (None, None) => true,
        _ => false,
    };
    runs.iter().all(&mut is_equal) && values >= FEW_VALUES
}

/// Returns whether a metric is the score, up to rounding.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn<'a>(charts: &'a Charts<'_>) -> Vec<&'a str> {
        let all = charts.sections.iter().flat_map(|section| &section.charts).chain(&charts.others);
        all.flat_map(|chart| &chart.curves).map(|curve| curve.metric).collect()
    }

    #[test]
    fn a_curve_is_drawn_once_under_the_name_that_comes_first_on_the_page() {
        let values = [0.5, 0.6, 0.8];
        let runs = [Run::of(&[
            ("objective/rlhf_reward", &values),
            ("objective/scores", &values),
            ("lr", &[1e-5, 5e-6, 0.0]),
            ("mine/score", &[0.5, 0.6, 0.8 + 1e-7]),
        ])];
        let charts = Charts::of(&runs);
        assert_eq!(drawn(&charts), ["objective/scores", "lr"]);
        assert_eq!(charts.equal, [("objective/rlhf_reward", "objective/scores"), ("mine/score", "objective/scores")]);
        // Two values may be equal by chance.
        let few = [Run::of(&[("objective/scores", &values[..2]), ("mine/score", &values[..2])])];
        assert_eq!(drawn(&Charts::of(&few)).len(), 2);
    }

    #[test]
    fn runs_of_groups_are_drawn_by_their_own_names_with_those_of_ppo() {
        let groups = Run::of(&[
            ("reward", &[0.1, 0.2, 0.4]),
            ("rewards/f/mean", &[0.5, 0.6, 0.9]),
            ("entropy", &[2.0, 1.5, 1.4]),
            ("completions/mean_length", &[8.0, 9.0, 12.0]),
        ]);
        let ppo = Run::of(&[("objective/scores", &[0.3, 0.2, 0.1]), ("policy/entropy_avg", &[1.0, 1.1, 1.3])]);
        let all = ["reward", "rewards/f/mean", "entropy", "completions/mean_length"];
        assert_eq!(drawn(&Charts::of(std::slice::from_ref(&groups))), all);
        let runs = [ppo, groups];
        let charts = Charts::of(&runs);
        let score = &charts.sections[0].charts[0];
        let curves: Vec<&str> = score.curves.iter().map(|curve| curve.metric).collect();
        assert_eq!((score.title.as_str(), curves), ("Score", vec!["objective/scores", "reward"]));
    }

    #[test]
    fn the_number_beside_a_held_out_score_has_its_standard_error() {
        let runs = [Run::of(&[
            ("objective/scores", &[0.1, 0.2]),
            ("eval/score", &[0.0188, 0.101]),
            ("eval/score_stderr", &[0.02, 0.05]),
        ])];
        let mut page = crate::report::html::Html::default();
        Charts::of(&runs).sections[0].charts[0].draw(&mut page, 100);
        assert!(page.finish().contains("value=\"0.101\">0.101 \u{b1} 0.05</data>"));
    }

    #[test]
    fn calls_and_failures_of_tools_have_charts_and_the_reward_of_the_environment_is_among_the_scores() {
        let names = [
            "objective/scores",
            "tools/call_frequency",
            "tools/failure_frequency",
            "env_reward",
            "env_failure_frequency",
            "environment/length of a walk",
        ];
        let values = names.map(|name| [name.len() as f64, 1.0, 2.0]);
        let metrics: Vec<(&str, &[f64])> = names.into_iter().zip(values.iter().map(|values| &values[..])).collect();
        let runs = [Run::of(&metrics)];
        let charts = Charts::of(&runs);
        let found: Vec<_> = charts
            .sections
            .iter()
            .map(|s| (s.title, s.charts.iter().map(|c| c.title.as_str()).collect::<Vec<_>>()))
            .collect();
        assert_eq!(
            found,
            [
                ("Score", vec!["Score", "Reward of the environment"]),
                ("Tools", vec!["Calls", "Failures", "Environment: length of a walk"])
            ]
        );
        assert!(charts.others.is_empty());
    }

    #[test]
    fn scores_of_0_are_drawn_as_others() {
        let runs = [Run::of(&[("objective/scores", &[0.0; 4]), ("eval/score", &[0.0; 2]), ("other", &[0.0; 4])])];
        let charts = Charts::of(&runs);
        assert_eq!(drawn(&charts), ["objective/scores", "eval/score"]);
        assert_eq!(charts.constant, [("other", 0.0)]);
    }
}
