//! The verdict on a run in words, from its first and its last updates.

use super::html::number;
use super::read::{Alarm, Outcome, Run};
use crate::rl::alarms::{LEAST_CALLS, LEFT_CALLS, MOST_DEAD, MOST_FAILED};
use crate::run::ends::{self, short, window, with_error};

/// Nats per token of KL to the reference below which a policy is near it; healthy runs stay below.
const NEAR: f64 = 0.2;

/// Nats per token of KL to the reference above which a policy has left it: each of its tokens is then e times as probable as
/// the reference's, in the geometric mean.
const FAR: f64 = 1.0;

/// Share of `response_length` from which on the mean length counts as cut.
const CUT: f64 = 0.95;

/// Standard errors of the difference of two evaluations from which on it is clear.
const CLEAR: f64 = 2.0;

/// Share of responses cut at the limit from which on the verdict says so.
const CUT_SHARE: f64 = 0.2;

/// Share of responses cut at the limit from which on the verdict proposes a longer limit.
const MOST_CUT: f64 = 0.5;

/// Alarms that are named in the verdict, at most.
const MOST_NAMED: usize = 5;

/// A sentence of the verdict.
#[derive(Debug, PartialEq)]
pub struct Finding {
    pub mark: Mark,
    pub text: String,
}

/// Kind of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    Good,
    Neutral,
    Bad,
}

/// Standard errors of the difference of two means up to which a change is noise.
const STANDARD_ERRORS: f64 = 3.0;

/// Standard deviation of normal noise over the median of its magnitudes, 1 / 0.6745: half of the values lie within 0.6745 standard
/// deviations, the third quartile of the normal distribution.
const STD_PER_MEDIAN: f64 = 1.4826;

/// Ratio of the final to the first loss from which on training made the model worse.
const RISEN: f64 = 2.0;

/// Number of values from which on a change can be told from noise.
const FEW_VALUES: usize = 5;

/// Share of the entropy at the start below which responses have become alike.
const LEAST_ENTROPY: f64 = 0.1;

/// Share of groups with equal scores from which on the verdict mentions it.
const EQUAL_GROUPS: f64 = 0.1;

/// Means of a metric over the first and the last updates of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Ends {
    first: f64,
    last: f64,
    /// Standard error of their difference, estimated by [`spread_of_differences`]; NaN for fewer than two values.
    error: f64,
    /// Number of values of the whole run.
    values: usize,
}

/// Reason that a change is not evident.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Doubt {
    /// The run has fewer than [`FEW_VALUES`] values.
    Few,
    /// The change is within [`STANDARD_ERRORS`].
    Noise,
}

impl Ends {
    /// Returns the numbers at the ends of a run, the same as in all views, if the run has finite values of the metric.
    fn of(run: &Run, name: &str) -> Option<Self> {
        Self::over(name, &finite(run, name)?)
    }

    /// Returns the numbers at the ends of the values of the metric `name`, if there are any.
    fn over(name: &str, values: &[f64]) -> Option<Self> {
        let ends::Ends { first, last } = ends::Ends::of(name, values.iter().copied())?;
        let error = spread_of_differences(values) / (window(name, values.len()) as f64).sqrt();
        Some(Self { first, last, error, values: values.len() })
    }

    /// Returns the reason why the change may be only noise.
    fn doubt(self) -> Option<Doubt> {
        if self.values < FEW_VALUES {
            return Some(Doubt::Few);
        }
        (self.change().abs() < STANDARD_ERRORS * self.error).then_some(Doubt::Noise)
    }

    fn change(self) -> f64 {
        self.last - self.first
    }
}

impl Doubt {
    /// Returns the end of a sentence about a change.
    fn words(self) -> &'static str {
        match self {
            Self::Few => "there are too few updates to tell a change from noise",
            Self::Noise => "the change is within the noise of single updates",
        }
    }
}

/// Returns the standard deviation of the differences of consecutive values; NaN for fewer than two values. Unlike the standard deviation of
/// the values, it is hardly affected by a trend.
fn spread_of_differences(values: &[f64]) -> f64 {
    let mut sizes: Vec<f64> = values.windows(2).map(|pair| (pair[1] - pair[0]).abs()).collect();
    sizes.sort_by(f64::total_cmp);
    let count = sizes.len() as f64;
    let root_mean_square = (sizes.iter().map(|size| size.powi(2)).sum::<f64>() / count).sqrt();
    let median = match sizes.as_slice() {
        [] => return f64::NAN,
        sizes => (sizes[(sizes.len() - 1) / 2] + sizes[sizes.len() / 2]) / 2.0,
    };
    // One jump of the loss makes the root mean square many times larger, and leaves the median as it is. The median of few differences is
    // often too small by chance. The second factor, found by simulation, corrects this: normal noise is then called a change no more often
    // than with the root mean square.
    let robust = STD_PER_MEDIAN * (1.0 + 2.0 / count) * median;
    // Values that are mostly equal have a median of 0, which says nothing about the others.
    if robust > 0.0 { robust.min(root_mean_square) } else { root_mean_square }
}

/// Returns the first loss and the mean of the last ones if training made the model worse: if the mean is at least [`RISEN`] times the first
/// loss, and the rise is more than noise.
fn risen_loss(losses: &[f64]) -> Option<(f64, f64)> {
    let first = *losses.first()?;
    let last = Ends::over("loss", losses)?.last;
    // The first values of a loss that blows up are far smaller than the noise at the end, so ratios are compared.
    let logs: Vec<f64> = losses.iter().filter(|loss| **loss > 0.0).map(|loss| loss.ln()).collect();
    let is_evident = logs.len() >= FEW_VALUES && (last / first).ln() >= STANDARD_ERRORS * spread_of_differences(&logs);
    (first > 0.0 && last >= RISEN * first && is_evident).then_some((first, last))
}

/// Returns the finite values of a metric.
fn finite(run: &Run, name: &str) -> Option<Vec<f64>> {
    Some(run.points(name)?.iter().map(|point| point.1).filter(|value| value.is_finite()).collect())
}

/// Returns the verdict on a run, the most important finding first.
pub fn verdict(run: &Run) -> Vec<Finding> {
    let mut findings = vec![course(run)];
    if run.points("objective/scores").is_some() {
        let reward_findings = [score(run), held_out_score(run), kl(run), entropy(run), length(run), tools(run)];
        findings.extend(reward_findings.into_iter().flatten());
    } else {
        findings.extend([accuracy(run), loss(run)].into_iter().flatten());
    }
    findings.extend(run.damage.iter().map(|damage| finding(Mark::Bad, format!("{damage}."))));
    findings.extend([skipped(run), not_finite(run), alarms(run)].into_iter().flatten());
    findings
}

fn finding(mark: Mark, text: String) -> Finding {
    Finding { mark, text }
}

fn course(run: &Run) -> Finding {
    let updates = run.updates;
    let s = if updates == 1.0 { "" } else { "s" };
    finding(
        Mark::Neutral,
        match run.outcome {
            Outcome::Finished => format!("The run is finished: {updates} update{s}."),
            Outcome::Stopped { done, total } => format!("The run ended early, after {done} of {total} updates."),
            Outcome::Running => format!("The run is in progress: {updates} update{s} so far."),
            Outcome::Interrupted => format!(
                "The run was interrupted, or another machine is at work on it: {updates} update{s} so far, and no end is recorded."
            ),
            Outcome::Open => format!("The run is in progress, or was interrupted: {updates} update{s} so far."),
        },
    )
}

fn score(run: &Run) -> Option<Finding> {
    // Scores that are scaled by running moments are not comparable over a run, so the raw scores are preferred.
    let raw = Ends::of(run, "objective/raw_scores");
    let ends = raw.or_else(|| Ends::of(run, "objective/scores"))?;
    let Ends { first, last, .. } = ends;
    let (from, to) = (short(first), short(last));
    if run.points("objective/scores").is_some_and(|points| points.len() < 2) {
        return Some(finding(
            Mark::Neutral,
            format!("The score is {to} in the only update: there is nothing to compare."),
        ));
    }
    if let Some(doubt) = ends.doubt() {
        let words = doubt.words();
        return Some(finding(Mark::Neutral, format!("The score went from {from} to {to}: {words}.")));
    }
    let spread = if raw.is_some() { None } else { Ends::of(run, "objective/scores_std").map(|std| std.first) };
    let Some(spread) = spread.filter(|&spread| spread > 0.0) else {
        let (mark, verb) = match (last - first).partial_cmp(&0.0) {
            Some(std::cmp::Ordering::Greater) => (Mark::Good, "rose"),
            Some(std::cmp::Ordering::Less) => (Mark::Bad, "fell"),
            _ => (Mark::Neutral, "stayed"),
        };
        let words = if mark == Mark::Neutral { format!("at {to}") } else { format!("from {from} to {to}") };
        return Some(finding(mark, format!("The score {verb} {words}.")));
    };
    let by = (last - first) / spread;
    let (mark, verb) = match by {
        by if by >= 0.5 => (Mark::Good, "rose"),
        by if by >= 0.1 => (Mark::Good, "rose a little,"),
        by if by > -0.1 => (Mark::Neutral, "hardly changed,"),
        by if by > -0.5 => (Mark::Bad, "fell a little,"),
        _ => (Mark::Bad, "fell"),
    };
    let by = number(by.abs(), 2);
    let unit = if by == "1" { "standard deviation" } else { "standard deviations" };
    Some(finding(mark, format!("The score {verb} from {from} to {to}, by {by} {unit} of the scores at the start.")))
}

fn held_out_score(run: &Run) -> Option<Finding> {
    let held_out = Ends::of(run, "eval/score")?;
    let errors = Ends::of(run, "eval/score_stderr");
    let from = with_error(held_out.first, errors.map(|errors| errors.first));
    let to = with_error(held_out.last, errors.map(|errors| errors.last));
    let unsure = errors
        .filter(|errors| held_out.change().abs() < CLEAR * errors.first.hypot(errors.last))
        .map_or("", |_| "; with these standard errors they may be equal");
    let trained = Ends::of(run, "objective/scores")?;
    let is_evident = |ends: Ends| ends.doubt().is_none();
    let overfits = trained.change() > 0.0 && held_out.change() < 0.0 && is_evident(trained) && is_evident(held_out);
    let mark = if overfits { Mark::Bad } else { Mark::Neutral };
    let why = if overfits { ", while that of the training prompts rose: the policy overfits to them" } else { "" };
    Some(finding(mark, format!("On held-out prompts the score went from {from} to {to}{why}{unsure}.")))
}

fn kl(run: &Run) -> Option<Finding> {
    let kl = Ends::of(run, "objective/kl")?.last;
    let length = Ends::of(run, "val/response_length")?.last;
    let per_token = Some(kl / length).filter(|per_token| per_token.is_finite())?;
    let (mark, words) = match per_token {
        per_token if per_token < NEAR => (Mark::Good, "the policy is near the reference"),
        per_token if per_token <= FAR => (Mark::Neutral, "the policy has moved away from the reference"),
        _ => (Mark::Bad, "the policy has left the reference"),
    };
    let (kl, per_token) = (short(kl), number(per_token, 2));
    Some(finding(mark, format!("KL to the reference: {kl} nats per response, {per_token} per token: {words}.")))
}

/// Compares the entropy with that of the start.
fn entropy(run: &Run) -> Option<Finding> {
    let Ends { first, last, .. } = Ends::of(run, "policy/entropy_avg")?;
    let equal = Ends::of(run, "frac_reward_zero_std").map(|share| share.last).filter(|share| *share >= EQUAL_GROUPS);
    let equal = equal.map_or(String::new(), |share| {
        format!("; {} % of the groups have equal scores, from which nothing is learned", number(100.0 * share, 2))
    });
    let words = format!("Entropy: {} nats per token at the end, {} at the start", short(last), short(first));
    Some(if last < LEAST_ENTROPY * first {
        finding(Mark::Bad, format!("{words}: responses have become alike{equal}."))
    } else {
        finding(Mark::Neutral, format!("{words}{equal}."))
    })
}

fn length(run: &Run) -> Option<Finding> {
    let Ends { first, last, .. } = Ends::of(run, "val/response_length")?;
    let name = run.name_of("response_length");
    let limit = run.setting(name).and_then(|limit| limit.parse::<f64>().ok());
    let words = format!("Responses have {} tokens at the end, {} at the start", short(last), short(first));
    let long = limit.filter(|limit| last >= CUT * limit);
    let at = limit.map(|limit| format!(" at {name} = {limit}")).unwrap_or_default();
    Some(match cut_share(run) {
        Some(share) if share >= CUT_SHARE => {
            let remedy = if share >= MOST_CUT { format!("; a longer {name} lets them end") } else { String::new() };
            let percent = format!("{:.0}", 100.0 * share);
            finding(Mark::Bad, format!("{words}: {percent} % are cut{at} at the end{remedy}."))
        }
        None if long.is_some() => finding(Mark::Bad, format!("{words}: most are cut{at}.")),
        _ => finding(Mark::Neutral, format!("{words}.")),
    })
}

/// Returns the share of the last updates' responses that did not stop by themselves, if the metrics have it: as a metric of its own, or as
/// the number of stop tokens per response, if no stop string may end a response.
fn cut_share(run: &Run) -> Option<f64> {
    if let Some(ends) = Ends::of(run, "completions/clipped_ratio") {
        return Some(ends.last);
    }
    let is_set = |name| run.setting(name).is_some_and(|value| !matches!(value, "" | "null" | "none" | "[]"));
    if is_set("stop_strings") {
        return None;
    }
    let per_update = finite(run, "episode")?.last()? / finite(run, "step")?.last()?;
    let share = 1.0 - Ends::of(run, "val/num_eos_tokens")?.last / per_update;
    share.is_finite().then_some(share.clamp(0.0, 1.0))
}

fn tools(run: &Run) -> Option<Finding> {
    let Ends { first, last, .. } = Ends::of(run, "tools/call_frequency")?;
    let failed = Ends::of(run, "tools/failure_frequency").map_or(0.0, |failed| failed.last);
    let mut words = format!("Tools: {} calls per response at the end, {} at the start", short(last), short(first));
    let stopped = first >= LEAST_CALLS && last < LEFT_CALLS * first;
    let fails = failed > MOST_FAILED;
    words += &if stopped {
        ": the policy has stopped calling them".into()
    } else if last > 0.0 {
        format!("; {} % of them failed at the end", number(100.0 * failed, 2))
    } else {
        String::new()
    };
    // Runs that end with the first failure have no such metric.
    let updates = finite(run, "tools/call_frequency")?.len();
    let dead = finite(run, "env_failure_frequency").map_or(0.0, |shares| shares.iter().sum::<f64>() / updates as f64);
    if dead > 0.0 {
        words += &format!("; environments failed for {} % of all responses", number(100.0 * dead, 2));
    }
    let mark = if stopped || fails || dead > MOST_DEAD { Mark::Bad } else { Mark::Neutral };
    Some(finding(mark, format!("{words}.")))
}

fn accuracy(run: &Run) -> Option<Finding> {
    let ends = Ends::of(run, "accuracy")?;
    let Ends { first, last, .. } = ends;
    let held_out = Ends::of(run, "eval_accuracy")
        .map_or(String::new(), |held_out| format!("; on held-out pairs it is {}", short(held_out.last)));
    let doubt = ends.doubt();
    let mark = if last > first.max(0.5) && doubt.is_none() { Mark::Good } else { Mark::Neutral };
    let doubt = doubt.map_or(String::new(), |doubt| format!(": {}", doubt.words()));
    let (from, to) = (short(first), short(last));
    Some(finding(mark, format!("The accuracy on training pairs went from {from} to {to}{doubt}{held_out}.")))
}

fn loss(run: &Run) -> Option<Finding> {
    let ends = Ends::of(run, "loss")?;
    if let Some((first, last)) = risen_loss(&finite(run, "loss")?) {
        let (from, to) = (short(first), short(last));
        let text = format!(
            "The loss rose from {from} in the first update to {to} at the end: the model is worse than at the start. Try a lower \
             learning_rate, such as a tenth."
        );
        return Some(finding(Mark::Bad, text));
    }
    let Ends { first, last, .. } = ends;
    let doubt = ends.doubt();
    let (mark, verb) = match doubt {
        Some(_) => (Mark::Neutral, "went"),
        None if last < first => (Mark::Good, "fell"),
        None => (Mark::Bad, "did not fall: it went"),
    };
    let doubt = doubt.map_or(String::new(), |doubt| format!(": {}", doubt.words()));
    let words = format!("The loss {verb} from {} to {}{doubt}", short(first), short(last));
    let mut held_out = run.points("eval_loss").unwrap_or_default().iter().filter(|(_, loss)| loss.is_finite());
    let least = held_out.clone().min_by(|a, b| a.1.total_cmp(&b.1));
    Some(match least.zip(held_out.next_back()) {
        // A few per cent are noise.
        Some(((step, least), (_, last))) if *last > 1.05 * least => finding(
            Mark::Bad,
            format!(
                "{words}; on held-out rows it was lowest, {}, after update {step}, and is {} at the end: the model overfits.",
                short(*least),
                short(*last)
            ),
        ),
        Some((_, (_, last))) => finding(mark, format!("{words}; on held-out rows it is {}.", short(*last))),
        None => finding(mark, format!("{words}.")),
    })
}

fn skipped(run: &Run) -> Option<Finding> {
    let steps: f64 =
        run.points("val/skipped_steps")?.iter().map(|point| point.1).filter(|steps| steps.is_finite()).sum();
    let s = if steps == 1.0 { " was" } else { "s were" };
    let text = format!("{steps} optimizer step{s} skipped, because a loss or a gradient was not finite.");
    (steps > 0.0).then(|| finding(Mark::Bad, text))
}

fn not_finite(run: &Run) -> Option<Finding> {
    let has_gap = |points: &[(f64, f64)]| points.iter().any(|point| !point.1.is_finite());
    let names: Vec<&str> =
        run.metrics.iter().filter(|series| has_gap(&series.points)).map(|series| series.name.as_str()).collect();
    let (shown, more) = names.split_at(names.len().min(3));
    let more = if more.is_empty() { String::new() } else { format!(" and {} others", more.len()) };
    (!names.is_empty()).then(|| finding(Mark::Bad, format!("Not finite in some updates: {}{more}.", shown.join(", "))))
}

fn alarms(run: &Run) -> Option<Finding> {
    let (rollbacks, alarms): (Vec<&Alarm>, Vec<&Alarm>) = run.alarms.iter().partition(|alarm| alarm.is_rollback());
    let mut parts = Vec::new();
    if !alarms.is_empty() {
        let named = alarms.iter().map(|alarm| format!("{} at update {}", alarm.name, alarm.step));
        parts.push(format!("{}: {}", count(alarms.len(), "alarm"), some(named)));
    }
    if !rollbacks.is_empty() {
        let steps = rollbacks.iter().map(|rollback| format!("after update {}", rollback.step));
        parts.push(format!("{}: {}", count(rollbacks.len(), "rollback"), some(steps)));
    }
    (!parts.is_empty()).then(|| finding(Mark::Bad, format!("{}.", parts.join("; "))))
}

fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Joins the first of many texts, with the number of the others.
fn some(texts: impl ExactSizeIterator<Item = String>) -> String {
    let more = texts.len().saturating_sub(MOST_NAMED);
    let shown = texts.take(MOST_NAMED).collect::<Vec<_>>().join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::read::Setting;
    use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
    use rand_distr::{Distribution, StandardNormal};

    fn run(metrics: &[(&str, &[f64])]) -> Run {
        Run {
            label: "run".into(),
            updates: metrics[0].1.len() as f64,
            outcome: Outcome::Finished,
            settings: vec![Setting::of("response_length", "20")],
            ..Run::of(metrics)
        }
    }

    fn words(run: &Run) -> Vec<(Mark, String)> {
        verdict(run).into_iter().skip(1).map(|finding| (finding.mark, finding.text)).collect()
    }

    #[test]
    fn a_score_is_measured_in_standard_deviations_of_the_start() {
        let findings = |scores: &[f64], std: f64| {
            words(&run(&[("objective/scores", scores), ("objective/scores_std", &[std, 9.0])]))
        };
        for (scores, std, mark, text) in [
            (
                &[1.0, 1.5, 2.0, 2.5, 3.0][..],
                0.5,
                Mark::Good,
                "The score rose from 1 to 3, by 4 standard deviations of the scores at the start.",
            ),
            (
                &[1.0, 1.05, 1.1, 1.15, 1.2],
                0.5,
                Mark::Good,
                "The score rose a little, from 1 to 1.2, by 0.4 standard deviations",
            ),
            (
                &[1.0, 1.0025, 1.005, 1.0075, 1.01],
                0.5,
                Mark::Neutral,
                "The score hardly changed, from 1 to 1.01, by 0.02 standard deviations",
            ),
            (&[1.0, 0.9, 0.8, 0.65, 0.5], 0.5, Mark::Bad, "The score fell from 1 to 0.5, by 1 standard deviation of"),
            (&[1.0, 0.98, 0.96, f64::NAN, 0.93, 0.9], 0.5, Mark::Bad, "The score fell a little, from 1 to 0.9"),
            (&[0.0, 0.2, 0.4, 0.7, 1.0], 0.0, Mark::Good, "The score rose from 0 to 1."),
            (&[0.0; 5], 0.0, Mark::Neutral, "The score stayed at 0."),
            (&[0.5], 0.1, Mark::Neutral, "The score is 0.5 in the only update"),
            (&[0.0, 1.0, 2.0, 3.0], 1.0, Mark::Neutral, "The score went from 0 to 3: there are too few updates"),
            (&[0.0, 1.0, 0.0, 1.0, 0.0, 1.0], 1.0, Mark::Neutral, "The score went from 0 to 1: the change is within"),
        ] {
            let finding = &findings(scores, std)[0];
            assert!(finding.0 == mark && finding.1.starts_with(text), "{finding:?}");
        }
        // The ends are means over a tenth of the updates.
        let scores: Vec<f64> = (0..20).map(f64::from).collect();
        assert!(
            findings(&scores, 1.0)[0].1.contains("from 0.5 to 18.5, by 18 standard deviations"),
            "{:?}",
            findings(&scores, 1.0)
        );
    }

    /// Returns draws from a normal distribution.
    fn noise(seed: u64, len: usize) -> Vec<f64> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        (0..len).map(|_| StandardNormal.sample(&mut rng)).collect()
    }

    #[test]
    fn a_jump_of_the_loss_does_not_hide_its_fall() {
        let mut losses = vec![10.8, 5.1, 15.8, 9.4, 7.2, 6.1, 5.5, 5.2, 4.9, 4.7];
        losses.extend((0..10).map(|at| 3.7 - 0.1 * f64::from(at)));
        let findings = words(&run(&[("loss", &losses)]));
        assert_eq!(findings, [(Mark::Good, "The loss fell from 7.95 to 2.85.".into())]);
        // An outlier in a flat series neither hides a change nor counts as one.
        let mut flat = vec![1.0, 1.1, 1.0, 1.1, 1.0, 1.1, 1.0, 1.1, 1.0, 1.1];
        flat[5] = 90.0;
        assert_eq!(words(&run(&[("loss", &flat)]))[0].0, Mark::Neutral);
    }

    #[test]
    fn a_loss_of_twice_the_first_or_more_is_bad_and_names_the_remedy() {
        let first_finding = |losses: &[f64]| words(&run(&[("loss", losses)])).remove(0);
        let text = "The loss rose from 10.8 in the first update to 14100 at the end: the model is worse than at the start. Try a lower \
                    learning_rate, such as a tenth.";
        assert_eq!(
            first_finding(&[10.8, 9121.0, 21007.0, 12840.0, 18022.0, 15533.0, 14061.0]),
            (Mark::Bad, text.into())
        );
        // The jump is in the mean of the first tenth, and the end is below that mean.
        let jump =
            [7.12, 73125.0, 36149.0, 35924.0].into_iter().chain((0..36).map(|at| 40000.0 - 800.0 * f64::from(at)));
        let (mark, text) = first_finding(&jump.collect::<Vec<_>>());
        assert!(
            mark == Mark::Bad && text.starts_with("The loss rose from 7.12 in the first update to 13200 at"),
            "{text}"
        );
        // Losses that vary by such factors all the time have not risen.
        assert_eq!(first_finding(&[1.0, 3.0, 1.0, 3.0, 1.0, 3.0]).0, Mark::Neutral);
        // Three losses are too few.
        assert_eq!(first_finding(&[1.0, 100.0, 200.0]).0, Mark::Neutral);
    }

    #[test]
    fn a_constant_series_has_no_noise_and_no_change() {
        let first_finding = |values: &[f64]| words(&run(&[("objective/scores", values)])).remove(0);
        assert_eq!(first_finding(&[2.0; 12]), (Mark::Neutral, "The score stayed at 2.".into()));
        assert_eq!(spread_of_differences(&[2.0; 12]), 0.0);
        // Where most values are equal, the few others are the noise.
        assert_eq!(first_finding(&[0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]).0, Mark::Neutral);
        assert!(spread_of_differences(&[1.0]).is_nan());
    }

    #[test]
    fn the_spread_is_the_standard_deviation_of_the_differences_of_normal_noise() {
        let spread = spread_of_differences(&noise(7, 4000));
        assert!((spread / 2.0_f64.sqrt() - 1.0).abs() < 0.05, "{spread}");
    }

    #[test]
    fn noise_is_neither_a_rise_nor_a_fall_nor_overfitting() {
        let (mut findings, mut wrong) = (0, 0);
        for (seed, len) in (0..100).flat_map(|seed| [2, 3, 4, 10, 40].map(|len| (seed, len))) {
            let (scores, held_out, spread) = (noise(seed, len), noise(seed + 1000, len), vec![1.0; len]);
            let ppo = [
                ("objective/scores", &scores[..]),
                ("objective/scores_std", &spread[..]),
                ("eval/score", &held_out[..]),
            ];
            let supervised = [("loss", &scores[..]), ("accuracy", &held_out[..])];
            for (mark, text) in words(&run(&ppo)).into_iter().chain(words(&run(&supervised))) {
                assert!(mark == Mark::Neutral || len >= FEW_VALUES, "{len}: {text}");
                findings += 1;
                wrong += usize::from(mark != Mark::Neutral);
            }
        }
        assert!(findings == 2000 && wrong < findings / 100, "{wrong} of {findings}");
    }

    #[test]
    fn an_entropy_that_collapses_is_bad_and_a_kl_per_token_without_tokens_is_no_finding() {
        let scores = [0.0; 5];
        let findings = |entropy: &[f64]| {
            let equal = vec![0.5; entropy.len()];
            words(&run(&[
                ("objective/scores", &scores),
                ("policy/entropy_avg", entropy),
                ("frac_reward_zero_std", &equal),
                ("objective/kl", &[0.0; 5]),
                ("val/response_length", &[0.0; 5]),
            ]))
        };
        let entropy_findings = findings(&[1.76, 1.0, 0.5, 0.1, 0.066]);
        let text = "Entropy: 0.066 nats per token at the end, 1.76 at the start: responses have become alike; 50 % of the groups have \
                    equal scores, from which nothing is learned.";
        assert_eq!(entropy_findings[1], (Mark::Bad, text.into()));
        assert_eq!(findings(&[2.0, 1.0])[1].0, Mark::Neutral);
        assert!(!entropy_findings.iter().any(|(_, text)| text.contains("KL")), "{entropy_findings:?}");
    }

    #[test]
    fn unreadable_lines_of_the_metrics_are_in_the_verdict() {
        let mut run = run(&[("loss", &[1.0])]);
        run.damage.push("metrics.jsonl: 3 lines could not be read and are left out".into());
        let text = "metrics.jsonl: 3 lines could not be read and are left out.";
        assert!(words(&run).contains(&(Mark::Bad, text.into())), "{:?}", words(&run));
    }

    #[test]
    fn kl_length_gaps_skips_and_alarms_have_their_sentences() {
        let mut run = run(&[
            ("objective/scores", &[1.0, 1.2, 1.5, 1.7, 2.0]),
            ("objective/kl", &[0.0, 30.0]),
            ("val/response_length", &[10.0, 20.0]),
            ("val/skipped_steps", &[0.0, 3.0]),
            ("eval/score", &[1.0, 0.9, 0.8, 0.65, 0.5]),
            ("lr", &[f64::NAN, 1.0]),
        ]);
        run.alarms.push(Alarm { step: 2.0, name: "runaway_kl".into(), message: "far".into() });
        let words: Vec<String> = words(&run).into_iter().map(|(_, text)| text).collect();
        assert_eq!(
            words,
            [
                "The score rose from 1 to 2.",
                "On held-out prompts the score went from 1 to 0.5, while that of the training prompts rose: the policy \
                 overfits to them.",
                "KL to the reference: 30 nats per response, 1.5 per token: the policy has left the reference.",
                "Responses have 20 tokens at the end, 10 at the start: most are cut at response_length = 20.",
                "3 optimizer steps were skipped, because a loss or a gradient was not finite.",
                "Not finite in some updates: lr.",
                "1 alarm: runaway_kl at update 2.",
            ]
        );
        for (step, name) in [(3.0, "rollback"), (4.0, "low_entropy"), (5.0, "skipped_steps"), (6.0, "skipped_steps")] {
            run.alarms.push(Alarm { step, name: name.into(), message: String::new() });
        }
        let last = |run: &Run| verdict(run).pop().unwrap().text;
        assert_eq!(
            last(&run),
            "4 alarms: runaway_kl at update 2, low_entropy at update 4, skipped_steps at update 5, skipped_steps at update 6; \
             1 rollback: after update 3."
        );
        for step in [7.0, 8.0, 9.0] {
            run.alarms.push(Alarm { step, name: "skipped_steps".into(), message: String::new() });
        }
        assert!(last(&run).contains("skipped_steps at update 7 and 2 more; 1 rollback"), "{}", last(&run));
        run.outcome = Outcome::Stopped { done: 2, total: 9 };
        assert_eq!(verdict(&run)[0].text, "The run ended early, after 2 of 9 updates.");
    }

    #[test]
    fn a_held_out_score_has_its_standard_error() {
        let held_out_words = |to: f64| {
            let scores = [0.0188, to];
            let run = run(&[
                ("objective/scores", &[0.1, 0.2]),
                ("eval/score", &scores),
                ("eval/score_stderr", &[0.02, 0.05]),
            ]);
            held_out_score(&run).unwrap().text
        };
        // The standard error of the difference is 0.054.
        let words = "On held-out prompts the score went from 0.0188 \u{b1} 0.02 to 0.101 \u{b1} 0.05; with these standard errors they \
                     may be equal.";
        assert_eq!(held_out_words(0.101), words);
        assert!(held_out_words(0.201).ends_with("to 0.201 \u{b1} 0.05."), "{}", held_out_words(0.201));
    }

    #[test]
    fn responses_that_are_cut_at_the_limit_are_named_with_their_share() {
        let length: (&str, &[f64]) = ("val/response_length", &[50.0, 55.0]);
        // Of 8 responses per update, one had a stop token at the end.
        let steps: [(&str, &[f64]); 2] = [("step", &[1.0, 2.0]), ("episode", &[8.0, 16.0])];
        let length_finding = |metrics: &[(&str, &[f64])]| super::length(&run(metrics)).unwrap();
        let cut = length_finding(&[length, steps[0], steps[1], ("val/num_eos_tokens", &[2.0, 1.0])]);
        assert_eq!(cut.mark, Mark::Bad);
        assert!(cut.text.contains(": 88 % are cut") && cut.text.contains("a longer response_length"), "{}", cut.text);
        let cut = length_finding(&[length, ("completions/clipped_ratio", &[0.1, 0.25])]);
        assert!(cut.text.contains(": 25 % are cut") && !cut.text.contains("longer"), "{}", cut.text);
        let few = length_finding(&[length, ("completions/clipped_ratio", &[0.5, 0.05])]);
        assert!(few.mark == Mark::Neutral && !few.text.contains("cut"), "{}", few.text);
    }

    #[test]
    fn calls_of_tools_and_their_failures_have_a_sentence() {
        let tools_finding = |calls: &[f64], failed: &[f64], dead: &[f64]| {
            let metrics =
                [("tools/call_frequency", calls), ("tools/failure_frequency", failed), ("env_failure_frequency", dead)];
            let finding = tools(&run(&metrics)).unwrap();
            (finding.mark, finding.text)
        };
        let words = "Tools: 2 calls per response at the end, 1.5 at the start; 25 % of them failed at the end.";
        assert_eq!(tools_finding(&[1.5, 2.0], &[0.5, 0.25], &[]), (Mark::Neutral, words.into()));
        let (mark, text) = tools_finding(&[1.5, 2.0], &[0.5, 0.6], &[]);
        assert!(mark == Mark::Bad && text.ends_with("60 % of them failed at the end."), "{text}");
        let stopped =
            "Tools: 0.01 calls per response at the end, 1.5 at the start: the policy has stopped calling them.";
        assert_eq!(tools_finding(&[1.5, 0.01], &[0.0, 0.0], &[]), (Mark::Bad, stopped.into()));
        assert_eq!(tools_finding(&[0.1, 0.0], &[0.0, 0.0], &[]).0, Mark::Neutral, "it hardly called any");
        // One of four updates has failures.
        let (mark, text) = tools_finding(&[1.0; 4], &[0.0; 4], &[0.6]);
        assert!(mark == Mark::Bad && text.ends_with("; environments failed for 15 % of all responses."), "{text}");
        assert_eq!(tools_finding(&[1.0; 4], &[0.0; 4], &[0.04]).0, Mark::Neutral);
        assert!(tools(&run(&[("objective/scores", &[1.0])])).is_none());
    }

    #[test]
    fn supervised_runs_are_judged_by_loss_and_accuracy() {
        let sft = run(&[("loss", &[2.0, 1.8, 1.5, 1.2, 1.0]), ("eval_loss", &[1.5, 1.2, 1.4])]);
        let text = "The loss fell from 2 to 1; on held-out rows it was lowest, 1.2, after update 2, and is 1.4 at the end: the \
                    model overfits.";
        assert_eq!(words(&sft), [(Mark::Bad, text.into())]);
        let reward = run(&[
            ("loss", &[0.7, 0.6, 0.5, 0.4, 0.3]),
            ("accuracy", &[0.5, 0.6, 0.7, 0.8, 0.9]),
            ("eval_accuracy", &[0.8]),
        ]);
        let accuracy = "The accuracy on training pairs went from 0.5 to 0.9; on held-out pairs it is 0.8.";
        assert_eq!(
            words(&reward),
            [(Mark::Good, accuracy.into()), (Mark::Good, "The loss fell from 0.7 to 0.3.".into())]
        );
    }
}
