//! Alarms: warnings about a PPO run that goes wrong while all of its numbers are finite. Training continues, unless `on_alarm` sets
//! something else.

mod likeness;
mod scores;
pub(crate) mod settings;
mod tools;

use crate::rl::groups::EqualGroups;
use likeness::Likeness;
use rlhf_base::metrics::{Metrics, Warning, WarningKind};
use rlhf_lm::generate::{FinishReason, Response};
use scores::Scores;
use serde::{Deserialize, Serialize};
pub(crate) use tools::{LEAST_CALLS, LEFT_CALLS, MOST_DEAD, MOST_FAILED};
use tools::{Problem, Tools};

/// Growth of the KL to the reference model, in nats per token, above which it counts as runaway. Healthy runs stay below 0.4 (the
/// examples in this repository: at most 0.36); at 1 the policy gives each of its tokens e times the reference's probability.
const MOST_KL_PER_TOKEN: f64 = 1.0;

/// A metric has begun to move once it has gone this share of the way from its first value to the alarm's threshold.
const BEGINNING: f64 = 0.5;

/// Entropy in nats per token below which the policy has collapsed: its likeliest token then has a probability of about 99 % at
/// each position. Language models that still learn have more; one that has solved its task may have as little, see [`Scores::solved`].
const LEAST_ENTROPY: f64 = 0.05;

/// Lengths have drifted to the limit once they have grown by this share of the difference between the first length of responses and
/// the maximum. With mean lengths so near to the maximum, many responses are cut.
const MOST_GROWTH: f64 = 0.8;

/// Number of updates over which a length is averaged, and for which responses have to be alike or tokens clipped: one update may have
/// few of them.
const FEW_UPDATES: usize = 3;

/// Consecutive responses without a stop token after which there is a warning; a policy that stops one time in twenty has so many
/// in a row once in 170 times.
const UNSTOPPED_RESPONSES: usize = 100;

/// Fewest responses by which a share of stops is measured.
const STOP_WINDOW: usize = 128;

/// Two shares of stops that differ by more than this many standard errors do not differ by chance: that happens one time in 30,000.
const STANDARD_ERRORS: f64 = 4.0;

/// Share of responses that equal a response to another prompt above which responses are alike.
const MOST_SHARED: f64 = 0.5;

/// Share of the first updates' distinct bigrams below which responses are alike. A policy that learns a format keeps a fifth (a
/// template of 60 tokens with 4 of its own), one that repeats a phrase has a hundredth.
const LEAST_BIGRAMS: f64 = 0.1;

/// Consecutive updates in which the critic explains less than a constant. In healthy runs these are the first few (the examples in
/// this repository: at most 4, and with a new head for the values up to 14, over which the explained variance rises).
const UNEXPLAINED_UPDATES: usize = 10;
/// Smallest rise of a critic that learns: mean explained variance of the later half of these updates minus that of the earlier half, as a
/// share of the earlier half's distance to 0. The examples in this repository have at least 0.5.
const LEAST_RISE: f64 = 0.25;
/// Smallest share of the pairs of an update of the earlier half and one of the later half in which the later one has the greater
/// explained variance, with a critic that learns. The examples in this repository have at least 0.72.
const RISING_PAIRS: f64 = 0.68;

/// Share of clipped tokens above which a step is too large: most of the batch then has no gradient. Healthy runs stay below 0.3.
const MOST_CLIPPED: f64 = 0.5;

/// Mean difference between the log-probabilities of sampling and of training, in nats per token, above which it is more than rounding. In
/// f32 it is about 1e-6, in bf16 about 0.01.
const MOST_MISMATCH: f64 = 0.1;

/// Factor over the running median at which the norm of a gradient leaps; in the examples of this repository it is at most 3.
const NORM_LEAP: f64 = 10.0;
/// A gradient with a norm up to this does not count: all scores are equal, or the policy always gives the same response.
const LEAST_NORM: f64 = 1e-3;
/// Most and fewest norms in a running median.
const NORMS: usize = 20;
const LEAST_NORMS: usize = 8;

/// Metrics of gradient norms, each with the name of its model.
const NORM_METRICS: [(&str, &str); 2] = [("policy/grad_norm", "the policy"), ("val/grad_norm", "the value model")];

/// The responses of an update, with what ends a response.
pub(crate) struct Sampled<'a> {
    /// Number of the update, from 1.
    pub(crate) update: usize,
    /// Prompt of each response.
    pub(crate) prompts: &'a [&'a [i64]],
    /// All responses, including those that are too short to train on.
    pub(crate) responses: &'a [Response],
    /// Tokens that end a response.
    pub(crate) stop: &'a [i64],
    /// Tokens that end a text.
    pub(crate) eos: &'a [i64],
    /// Whether something other than the length limit ends a response.
    pub(crate) may_stop: bool,
    /// With an environment: responses that end in the middle of a turn, or with a call whose result did not fit.
    pub(crate) cut: Option<usize>,
}

/// Watches the updates of a run, and warns of each problem once.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Alarms {
    /// Kinds that were raised.
    #[serde(rename = "told")]
    raised: Vec<WarningKind>,
    /// Maximum tokens of a response; `None` where nothing else ends a response, so that all have this length.
    #[serde(skip)]
    length_limit: Option<usize>,
    /// KL per token in the first update; above 0 where the reference is another model than the initial policy.
    first_kl: Option<f64>,
    lengths: Lengths,
    /// Responses since the last one that ended with a stop token.
    unstopped: usize,
    stops: Stops,
    alike: Alike,
    equal_groups: EqualGroups,
    scores: Scores,
    /// Explained variances of the last consecutive updates in which the critic explains less than a constant.
    below_constant: Vec<f64>,
    /// Consecutive updates in which too many tokens are clipped.
    clipped: usize,
    /// The last norms that count, of the policy's and of the value model's gradient.
    norms: [Vec<f64>; 2],
    /// Entropy per token in the first update.
    first_entropy: Option<f64>,
    tools: Tools,
    /// Alarms whose metric has begun to move, each with the update of its beginning: the metric has moved in all updates from there to
    /// the last one.
    moving: Vec<(WarningKind, usize)>,
}

/// Mean lengths of the first updates and of the last ones.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Lengths {
    first: Vec<f64>,
    last: Vec<f64>,
}

/// Number of responses that ended by a stop token, and number of all responses, per update: of the first updates and of the last ones.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Stops {
    first: Vec<[usize; 2]>,
    last: Vec<[usize; 2]>,
}

/// Likeness of responses to different prompts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Alike {
    /// Shares of distinct bigrams in the first updates.
    first: Vec<f64>,
    /// Consecutive updates with responses that are alike.
    updates: usize,
}

impl Alarms {
    /// Creates the alarms of a run whose responses have at most `length_limit` tokens; `None` where nothing else ends them.
    pub(crate) fn new(length_limit: Option<usize>) -> Self {
        Self { length_limit, ..Self::default() }
    }

    /// Records the responses that an update sampled; returns new warnings.
    pub(crate) fn observe_responses(&mut self, sampled: &Sampled<'_>) -> Vec<Warning> {
        let warnings = [
            self.ignored_eos(sampled),
            self.missing_stops(sampled),
            self.fewer_stops(sampled),
            self.alike_responses(sampled),
        ];
        let response_count = sampled.responses.len();
        let problem = sampled.cut.and_then(|cut| self.tools.observe_cuts(sampled.update, cut, response_count));
        let cut_warning = problem.and_then(|problem| self.tool_warning(sampled.update, problem));
        warnings.into_iter().flatten().chain(cut_warning).collect()
    }

    /// Records the scores of the groups of an update, of `size` rows each; returns a warning when too many groups in a row had equal
    /// scores.
    pub(crate) fn observe_groups(&mut self, update: usize, scores: &[f64], size: usize) -> Option<Warning> {
        let message = self.equal_groups.observe(update, scores, size)?;
        self.once(WarningKind::EqualScores, || message)
    }

    /// Records the metrics of an update whose unmasked responses have `length` tokens on average; returns new warnings.
    pub(crate) fn observe_metrics(&mut self, update: usize, metrics: &Metrics, length: f64) -> Vec<Warning> {
        // Another check reports numbers that are not finite.
        let finite = |name: &str| metrics.get(name).filter(|number| number.is_finite());
        let score = finite("objective/raw_scores").or(finite("objective/scores"));
        if let (Some(mean), Some(std)) = (score, finite("objective/scores_std")) {
            self.scores.observe(mean, std, rows(metrics));
        }
        // KL and entropy are those of unmasked responses.
        let per_token = |name: &str| finite(name).map(|number| number / length).filter(|number| number.is_finite());
        let warnings = [
            self.runaway_kl(update, per_token("objective/kl")),
            self.low_entropy(update, per_token("objective/entropy"), score),
            self.length_limit(update, &finite),
            score.and_then(|score| self.equal_scores(update, score)),
            self.constant_reward(update, metrics),
            self.explained_variance(update, &finite),
            self.clip_share(update, &finite),
            self.gradient_leap(update, &finite),
            self.sampling_mismatch(update, &finite),
        ];
        let solved = score.is_some_and(|score| self.scores.solved(score));
        let tool_problems = self.tools.observe(update, &finite, rows(metrics), solved);
        let tool_warnings = tool_problems.into_iter().filter_map(|problem| self.tool_warning(update, problem));
        warnings.into_iter().flatten().chain(tool_warnings).collect()
    }

    /// Returns the warning of a problem with tools.
    fn tool_warning(&mut self, update: usize, (kind, updates, message): Problem) -> Option<Warning> {
        self.moves_since(kind, update, updates);
        self.once(kind, || message)
    }

    fn ignored_eos(&mut self, sampled: &Sampled<'_>) -> Option<Warning> {
        let Sampled { update, responses, stop, eos, .. } = *sampled;
        // An eos at the very end of a response that is cut there does no harm.
        let continues_after_eos = |response: &&Response| {
            let before_last = response.tokens.split_last().map_or(&[][..], |(_, before)| before);
            before_last.iter().any(|id| eos.contains(id) && !stop.contains(id))
        };
        let all = responses.len();
        let ignored = responses.iter().filter(continues_after_eos).count();
        self.observe_move(WarningKind::IgnoredEos, update, ignored as f64 > BEGINNING * all as f64 / 2.0);
        if 2 * ignored <= all {
            return None;
        }
        let hint = if stop.is_empty() { "; --stop_token eos ends responses there" } else { "" };
        self.once(WarningKind::IgnoredEos, || {
            format!(
                "update {update}: {ignored} of {all} responses continue after an eos token, which is no stop token of this \
                 run: what follows is scored and trained on{hint}"
            )
        })
    }

    fn missing_stops(&mut self, sampled: &Sampled<'_>) -> Option<Warning> {
        let Sampled { update, responses, may_stop, .. } = *sampled;
        let all = responses.len();
        let last_stopped = responses.iter().rposition(|response| response.finish == FinishReason::Stop);
        self.unstopped = last_stopped.map_or(self.unstopped + all, |last| all - 1 - last);
        self.observe_move(WarningKind::NoStop, update, last_stopped.is_none());
        if !may_stop || self.unstopped < UNSTOPPED_RESPONSES {
            return None;
        }
        let unstopped = self.unstopped;
        self.once(WarningKind::NoStop, || {
            format!(
                "update {update}: none of the last {unstopped} responses ended by a stop token or string: all were cut at \
                 response_length; missing_eos_penalty rewards stopping, a larger response_length leaves room for it"
            )
        })
    }

    fn fewer_stops(&mut self, sampled: &Sampled<'_>) -> Option<Warning> {
        let Sampled { update, responses, may_stop, .. } = *sampled;
        let stopped = responses.iter().filter(|response| response.finish == FinishReason::Stop).count();
        let (share, last) = self.stops.observe([stopped, responses.len()])?;
        if !may_stop || last > share / 2.0 {
            return None;
        }
        self.moves_since(WarningKind::FewerStops, update, self.stops.last.len());
        let (share, last) = (100.0 * share, 100.0 * last);
        self.once(WarningKind::FewerStops, || {
            format!(
                "update {update}: {last:.0} % of the last responses ended by a stop token or string, {share:.0} % of the first: the \
                 policy unlearns to stop, as where longer responses score higher; missing_eos_penalty, overlong_buffer_len or a \
                 higher kl_coef prevent it"
            )
        })
    }

    fn alike_responses(&mut self, sampled: &Sampled<'_>) -> Option<Warning> {
        let Likeness { shared, distinct_bigrams } = Likeness::of(sampled.prompts, sampled.responses)?;
        let alike = &mut self.alike;
        if alike.first.len() < FEW_UPDATES {
            alike.first.push(distinct_bigrams);
        }
        let first = mean(&alike.first);
        let is_alike = shared > MOST_SHARED || distinct_bigrams < LEAST_BIGRAMS * first;
        alike.updates = if is_alike { alike.updates + 1 } else { 0 };
        let updates = alike.updates;
        let update = sampled.update;
        if updates < FEW_UPDATES {
            return None;
        }
        self.moves_since(WarningKind::AlikeResponses, update, updates);
        self.once(WarningKind::AlikeResponses, || {
            format!(
                "update {update}: {:.0} % of the responses equal a response to another prompt, and {:.1} % of their pairs of tokens are \
                 distinct, {:.1} % at first: the policy gives one response to all prompts, which the reward may prefer; look at \
                 samples, raise kl_coef or entropy_coef, lower learning_rate, or improve the reward",
                100.0 * shared,
                100.0 * distinct_bigrams,
                100.0 * first
            )
        })
    }

    fn runaway_kl(&mut self, update: usize, kl_per_token: Option<f64>) -> Option<Warning> {
        let kl = kl_per_token?;
        let first = *self.first_kl.get_or_insert(kl);
        self.observe_move(WarningKind::RunawayKl, update, kl - first > BEGINNING * MOST_KL_PER_TOKEN);
        if kl - first <= MOST_KL_PER_TOKEN {
            return None;
        }
        // Rounding below 0 is 0.
        let first = first.max(0.0);
        self.once(WarningKind::RunawayKl, || {
            format!(
                "update {update}: the KL to the reference is {kl:.2} nats per token, {first:.2} in the first update: the policy has \
                 left its start; a lower learning_rate, a higher kl_coef or max_grad_norm = 1 keep it near"
            )
        })
    }

    fn low_entropy(&mut self, update: usize, per_token: Option<f64>, score: Option<f64>) -> Option<Warning> {
        let entropy = per_token?;
        let first = *self.first_entropy.get_or_insert(entropy);
        // Entropy also falls in a run that learns: it counts as moving only once it is low.
        let begins = (LEAST_ENTROPY / BEGINNING).min(LEAST_ENTROPY + BEGINNING * (first - LEAST_ENTROPY));
        self.observe_move(WarningKind::LowEntropy, update, entropy < begins);
        if entropy >= LEAST_ENTROPY || score.is_some_and(|score| self.scores.solved(score)) {
            return None;
        }
        // Avoids printing -0.000.
        let entropy = entropy.max(0.0) + 0.0;
        self.once(WarningKind::LowEntropy, || {
            format!(
                "update {update}: the policy's entropy is {entropy:.3} nats per token, and the score is not at its best: it gives each \
                 prompt one response and has nothing left to learn from; a lower learning_rate, a higher kl_coef or entropy_coef \
                 prevent it"
            )
        })
    }

    fn length_limit(&mut self, update: usize, number: &dyn Fn(&str) -> Option<f64>) -> Option<Warning> {
        let most = self.length_limit?;
        let length = number("val/response_length")?;
        let Lengths { first, last } = &mut self.lengths;
        if first.len() < FEW_UPDATES {
            first.push(length);
        }
        last.push(length);
        if last.len() > FEW_UPDATES {
            last.remove(0);
        }
        let (first, last) = (mean(first), mean(last));
        let limit = most as f64;
        let begins = first + BEGINNING * MOST_GROWTH * (limit - first);
        self.observe_move(WarningKind::LengthLimit, update, length >= begins);
        if first > MOST_GROWTH * limit || last < first + MOST_GROWTH * (limit - first) {
            return None;
        }
        self.once(WarningKind::LengthLimit, || {
            format!(
                "update {update}: responses have {last:.1} tokens, {first:.1} at first, of at most response_length = {most}: length is \
                 rewarded, and the limit cuts responses; penalize it by overlong_buffer_len or missing_eos_penalty, raise kl_coef, or \
                 raise response_length if responses should be long"
            )
        })
    }

    fn equal_scores(&mut self, update: usize, score: f64) -> Option<Warning> {
        self.observe_move(WarningKind::EqualScores, update, self.scores.narrow());
        let cause = self.scores.no_spread(score)?;
        self.once(WarningKind::EqualScores, || {
            format!(
                "update {update}: {cause}: the reward is constant or saturated, and nothing is learned from it; look at samples, and try \
                 a reward that tells responses apart, easier or harder prompts, or a higher temperature"
            )
        })
    }

    /// Looks for one of several rewards that has given every response of the run the same score.
    fn constant_reward(&mut self, update: usize, metrics: &Metrics) -> Option<Warning> {
        let cause = self.scores.observe_rewards(metrics, rows(metrics))?;
        // The score has been constant since the start of the run.
        self.moves_since(WarningKind::EqualScores, update, update);
        self.once(WarningKind::EqualScores, || {
            format!("update {update}: {cause}: it has no effect; look at its input with `rlhf score`, or leave it out")
        })
    }

    fn explained_variance(&mut self, update: usize, number: &dyn Fn(&str) -> Option<f64>) -> Option<Warning> {
        let explained = number("val/explained_variance")?;
        let below = &mut self.below_constant;
        if explained >= 0.0 {
            below.clear();
            return None;
        }
        below.push(explained);
        if below.len() > UNEXPLAINED_UPDATES {
            below.remove(0);
        }
        let updates = below.len();
        let (earlier, later) = below.split_at(updates / 2);
        // A few large values change a mean, but not most pairs.
        let above = later.iter().map(|later| earlier.iter().filter(|earlier| later > *earlier).count()).sum::<usize>();
        let rises = mean(later) > (1.0 - LEAST_RISE) * mean(earlier)
            && above as f64 >= RISING_PAIRS * (earlier.len() * later.len()) as f64;
        if updates < UNEXPLAINED_UPDATES || rises {
            return None;
        }
        self.moves_since(WarningKind::NegativeExplainedVariance, update, updates);
        self.once(WarningKind::NegativeExplainedVariance, || {
            format!(
                "update {update}: val/explained_variance has been below 0 in the last {updates} updates without rising, {explained:.2} now: the \
                 critic predicts returns worse than a constant, and advantages are mostly noise; value_warmup_updates, a higher \
                 value_learning_rate or vf_coef, a larger cliprange_value, or an estimator without a critic (advantage_estimator) help"
            )
        })
    }

    fn clip_share(&mut self, update: usize, number: &dyn Fn(&str) -> Option<f64>) -> Option<Warning> {
        let share = number("policy/clipfrac_avg")?;
        self.clipped = if share > MOST_CLIPPED { self.clipped + 1 } else { 0 };
        if self.clipped < FEW_UPDATES {
            return None;
        }
        self.moves_since(WarningKind::HighClipShare, update, self.clipped);
        self.once(WarningKind::HighClipShare, || {
            format!(
                "update {update}: {:.0} % of the tokens are clipped, and have no gradient: the steps are too large; a lower \
                 learning_rate, fewer num_ppo_epochs or max_grad_norm = 1 make them smaller",
                100.0 * share
            )
        })
    }

    fn sampling_mismatch(&mut self, update: usize, number: &dyn Fn(&str) -> Option<f64>) -> Option<Warning> {
        let difference = number("sampling/sampling_logp_difference/mean").filter(|mean| *mean > MOST_MISMATCH)?;
        self.once(WarningKind::SamplingMismatch, || {
            format!(
                "update {update}: the log-probabilities that sampling recorded differ from those of training by {difference:.2} nats per token, \
                 before any step: the policy that is trained is not the one that sampled, and its ratios are wrong; both are passes of one model, so \
                 this is an error of rlhf or of the machine: please report it with the output of `rlhf doctor`; a larger dtype makes it smaller"
            )
        })
    }

    fn gradient_leap(&mut self, update: usize, number: &dyn Fn(&str) -> Option<f64>) -> Option<Warning> {
        let mut leap = None;
        for (norms, (name, model)) in self.norms.iter_mut().zip(NORM_METRICS) {
            // Without a step, or where all advantages are 0, there is no gradient.
            let Some(norm) = number(name).filter(|norm| *norm > LEAST_NORM) else { continue };
            let median = median(norms).filter(|_| norms.len() >= LEAST_NORMS);
            leap = leap.or(median.filter(|median| norm > NORM_LEAP * median).map(|median| (name, model, norm, median)));
            norms.push(norm);
            if norms.len() > NORMS {
                norms.remove(0);
            }
        }
        let (name, model, norm, median) = leap?;
        self.once(WarningKind::GradientLeap, || {
            format!(
                "update {update}: {name} is {norm:.3}, {:.0} times its median of late, {median:.3}: a few responses dominate the step of \
                 {model}, as those with outlying scores or ratios; max_grad_norm = 1, clip_reward_value or a lower learning_rate bound it",
                norm / median
            )
        })
    }

    /// Records whether the metric of an alarm has begun to move towards it in an update.
    fn observe_move(&mut self, kind: WarningKind, update: usize, moves: bool) {
        match self.moving.iter().position(|(known, _)| *known == kind) {
            Some(at) if !moves => drop(self.moving.remove(at)),
            None if moves => self.moving.push((kind, update)),
            _ => {}
        }
    }

    /// Records that the metric of an alarm has moved in each of the last `updates` updates, up to `update`.
    fn moves_since(&mut self, kind: WarningKind, update: usize, updates: usize) {
        self.observe_move(kind, update, false);
        self.observe_move(kind, (update + 1).saturating_sub(updates).max(1), true);
    }

    /// For an alarm that was raised in `update`: returns the update in which its metric began to move, and the largest number of updates
    /// that a checkpoint from before that can have; 0 if there is none.
    ///
    /// The metrics of an update are those of the policy after the previous update, except the metrics of its optimizer steps.
    pub(crate) fn beginning(&self, kind: WarningKind, update: usize) -> (usize, usize) {
        let began = self.moving.iter().find(|(known, _)| *known == kind).map_or(update, |(_, began)| *began);
        let is_of_optimizer_steps =
            matches!(kind, WarningKind::HighClipShare | WarningKind::GradientLeap | WarningKind::SkippedSteps);
        (began, began.saturating_sub(if is_of_optimizer_steps { 1 } else { 2 }))
    }

    /// A warning of a kind that is given once in a run, also where the run is resumed.
    pub(crate) fn once(&mut self, kind: WarningKind, message: impl FnOnce() -> String) -> Option<Warning> {
        if self.raised.contains(&kind) {
            return None;
        }
        self.raised.push(kind);
        Some(Warning { kind, message: message() })
    }

    /// State for a checkpoint.
    pub(crate) fn state(&self) -> Self {
        self.clone()
    }

    /// Restores the state that [`Alarms::state`] returned.
    pub(crate) fn load_state(&mut self, state: Self) {
        *self = Self { length_limit: self.length_limit, ..state };
    }
}

impl Stops {
    /// Records an update; returns the shares that stopped of the first responses and of the last ones, if there are enough of both and the
    /// shares differ by more than chance.
    fn observe(&mut self, update: [usize; 2]) -> Option<(f64, f64)> {
        let sum =
            |updates: &[[usize; 2]]| updates.iter().fold([0, 0], |sum, next| [sum[0] + next[0], sum[1] + next[1]]);
        if sum(&self.first)[1] < STOP_WINDOW {
            self.first.push(update);
            return None;
        }
        self.last.push(update);
        while sum(&self.last[1..])[1] >= STOP_WINDOW {
            self.last.remove(0);
        }
        let ([first, first_count], [last, last_count]) = (sum(&self.first), sum(&self.last));
        let count = |count: usize| count as f64;
        let (before, now) = (count(first) / count(first_count), count(last) / count(last_count));
        let both = count(first + last) / count(first_count + last_count);
        let error = (both * (1.0 - both) * (1.0 / count(first_count) + 1.0 / count(last_count))).sqrt();
        (last_count >= STOP_WINDOW && before - now > STANDARD_ERRORS * error).then_some((before, now))
    }
}

/// Number of responses of the update with these metrics.
fn rows(metrics: &Metrics) -> f64 {
    let rows = metrics.get("episode").zip(metrics.get("step")).map(|(episode, step)| episode / step);
    rows.filter(|rows| rows.is_finite()).unwrap_or(0.0)
}

fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len() as f64
}

/// Returns the median; of an even number of values, the upper one of the two in the middle.
fn median(numbers: &[f64]) -> Option<f64> {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::path::Path;

    fn metrics(numbers: &[(&'static str, f64)]) -> Metrics {
        let mut metrics = Metrics::default();
        numbers.iter().for_each(|&(name, value)| metrics.push(name, value));
        metrics
    }

    fn kl_and_entropy(kl: f64, entropy: f64) -> Metrics {
        metrics(&[("objective/kl", kl), ("objective/entropy", entropy), ("val/response_length", 10.0)])
    }

    /// The mean length of the responses, none of which is masked.
    fn length(metrics: &Metrics) -> f64 {
        metrics.get("val/response_length").unwrap_or(f64::NAN)
    }

    fn kinds(warnings: &[Warning]) -> Vec<WarningKind> {
        warnings.iter().map(|warning| warning.kind).collect()
    }

    /// The updates, from 1, at which each alarm is raised over updates with these metrics, with a checkpoint after each.
    fn raised(mut alarms: Alarms, updates: impl IntoIterator<Item = Metrics>) -> Vec<(usize, WarningKind)> {
        let limit = alarms.length_limit;
        let mut warnings = Vec::new();
        for (update, metrics) in (1..).zip(updates) {
            warnings.extend(
                alarms.observe_metrics(update, &metrics, length(&metrics)).iter().map(|warning| (update, warning.kind)),
            );
            let mut resumed = Alarms::new(limit);
            resumed.load_state(serde_json::from_str(&serde_json::to_string(&alarms.state()).unwrap()).unwrap());
            assert_eq!(resumed, alarms);
            alarms = resumed;
        }
        warnings
    }

    #[test]
    fn a_runaway_kl_and_an_entropy_near_0_are_reported_once_each_also_over_a_checkpoint() {
        let mut alarms = Alarms::default();
        // 3 nats per token to another reference is the start of this run; as much again is not.
        assert_eq!(alarms.observe_metrics(1, &kl_and_entropy(30.0, 20.0), 10.0), []);
        assert_eq!(alarms.observe_metrics(2, &kl_and_entropy(39.0, 0.6), 10.0), []);
        let found = alarms.observe_metrics(3, &kl_and_entropy(41.0, 0.4), 10.0);
        assert_eq!(kinds(&found), [WarningKind::RunawayKl, WarningKind::LowEntropy]);
        let kl = "update 3: the KL to the reference is 4.10 nats per token, 3.00 in the first update: ";
        assert!(found[0].message.starts_with(kl), "{}", found[0].message);
        assert!(found[1].message.starts_with("update 3: the policy's entropy is 0.040 nats per token, "));
        let mut resumed = Alarms::default();
        resumed.load_state(alarms.state());
        assert_eq!(resumed, alarms);
        assert_eq!(resumed.observe_metrics(4, &kl_and_entropy(400.0, 0.0), 10.0), []);
        let empty = metrics(&[("objective/kl", 0.0), ("objective/entropy", 0.0), ("val/response_length", 0.0)]);
        assert_eq!(Alarms::default().observe_metrics(1, &empty, 0.0), [], "no tokens");
        // Another check reports values that are not a number.
        assert_eq!(Alarms::default().observe_metrics(1, &kl_and_entropy(f64::NAN, f64::NAN), 10.0), []);
    }

    #[test]
    fn an_alarm_knows_the_last_checkpoint_from_before_its_metric_began_to_move() {
        let mut alarms = Alarms::default();
        // Nats per 10 tokens; the third update's is chance, as the fourth's is near the start.
        let course = [0.0, 1.0, 6.0, 2.0, 5.5, 8.0, 10.5];
        let updates =
            (1..).zip(course).map(|(update, kl)| alarms.observe_metrics(update, &kl_and_entropy(kl, 9.0), 10.0));
        assert_eq!(kinds(&updates.last().unwrap()), [WarningKind::RunawayKl]);
        // The policy after three updates was the last one whose KL was below 0.5 nats per token.
        assert_eq!(alarms.beginning(WarningKind::RunawayKl, 7), (5, 3));
        let mut resumed = Alarms::default();
        resumed.load_state(alarms.state());
        assert_eq!(resumed.beginning(WarningKind::RunawayKl, 7), (5, 3));
        // From the first update on there is no policy before it.
        let mut alarms = Alarms::default();
        alarms.observe_metrics(1, &kl_and_entropy(0.0, 0.6), 10.0);
        alarms.observe_metrics(2, &kl_and_entropy(11.0, 0.4), 10.0);
        assert_eq!(alarms.beginning(WarningKind::RunawayKl, 2), (2, 0));
        assert_eq!(alarms.beginning(WarningKind::LowEntropy, 2), (2, 0));
        // The steps of an update are after the checkpoint before it.
        assert_eq!(alarms.beginning(WarningKind::GradientLeap, 9), (9, 8));
        // Three updates with too many clipped tokens.
        for update in 3..6 {
            alarms.observe_metrics(update, &metrics(&[("policy/clipfrac_avg", 0.6)]), 10.0);
        }
        assert_eq!(alarms.beginning(WarningKind::HighClipShare, 5), (3, 2));
    }

    #[test]
    fn log_probabilities_of_training_that_are_not_those_of_sampling_are_reported() {
        let difference = |mean: f64| metrics(&[("sampling/sampling_logp_difference/mean", mean)]);
        assert_eq!(raised(Alarms::default(), [difference(1e-6), difference(0.02), difference(f64::NAN)]), []);
        let mismatch = [(2, WarningKind::SamplingMismatch)];
        assert_eq!(raised(Alarms::default(), [difference(0.02), difference(0.2), difference(0.3)]), mismatch);
    }

    #[test]
    fn a_low_entropy_is_none_of_a_policy_that_has_learned_its_task() {
        let update = |score: f64, entropy: f64| {
            let mut metrics = kl_and_entropy(0.0, entropy);
            metrics.push("objective/scores", score);
            metrics.push("objective/scores_std", 0.4);
            metrics
        };
        // From 0.5 by more than a deviation of 0.4, and less than half of it below the best.
        assert_eq!(raised(Alarms::default(), [update(0.5, 9.0), update(1.5, 2.0), update(1.35, 0.3)]), []);
        let low = [(2, WarningKind::LowEntropy)];
        assert_eq!(raised(Alarms::default(), [update(0.5, 9.0), update(0.8, 0.3)]), low, "has not risen");
        let fallen = [update(0.5, 9.0), update(1.5, 2.0), update(1.2, 0.3)];
        assert_eq!(raised(Alarms::default(), fallen), [(3, WarningKind::LowEntropy)], "has fallen again");
        // Of 128 responses, 3 are right at first; half of them later, whose deviation is 0.5.
        let right = |share: f64, entropy: f64| {
            let mut metrics = kl_and_entropy(0.0, entropy);
            metrics.push("objective/scores", share);
            metrics.push("objective/scores_std", (share * (1.0 - share)).sqrt());
            metrics
        };
        let rises = [right(0.02, 9.0), right(0.6, 1.0), right(0.48, 0.3), right(0.55, 0.3)];
        assert_eq!(raised(Alarms::default(), rises), [], "within chance of the best");
        let falls = [right(0.02, 9.0), right(0.6, 1.0), right(0.3, 0.3)];
        assert_eq!(raised(Alarms::default(), falls), [(3, WarningKind::LowEntropy)]);
    }

    #[test]
    fn lengths_that_drift_to_the_limit_are_reported_and_long_ones_from_the_start_are_not() {
        let lengths = |lengths: &[f64]| -> Vec<Metrics> {
            lengths.iter().map(|&length| metrics(&[("val/response_length", length)])).collect()
        };
        // 0.8 of the way from 20 to 100 is 84, as the mean of three updates.
        let drifts = [20.0, 20.0, 20.0, 60.0, 80.0, 84.0, 87.0, 84.0, 99.0];
        let limited = || Alarms::new(Some(100));
        assert_eq!(raised(limited(), lengths(&drifts)), [(8, WarningKind::LengthLimit)]);
        assert_eq!(raised(Alarms::new(None), lengths(&drifts)), []);
        assert_eq!(raised(limited(), lengths(&[90.0, 85.0, 95.0, 99.0, 99.0, 99.0])), []);
        assert_eq!(raised(limited(), lengths(&[20.0, 20.0, 20.0, 100.0, 20.0, 20.0, 100.0])), [], "once is chance");
    }

    fn scores(step: usize, mean: f64, std: f64) -> Metrics {
        metrics(&[
            ("step", step as f64),
            ("episode", 64.0 * step as f64),
            ("objective/scores", mean),
            ("objective/scores_std", std),
        ])
    }

    #[test]
    fn a_reward_that_is_constant_or_saturated_is_reported() {
        let equal = |update| vec![(update, WarningKind::EqualScores)];
        // 64 responses per update, and 256 in a row.
        let constant = (1..=6).map(|step| scores(step, 2.0, 1e-7));
        assert_eq!(raised(Alarms::default(), constant), equal(4));
        let one_differs = (1..=6).map(|step| scores(step, 2.0, if step == 3 { 0.1 } else { 0.0 }));
        assert_eq!(raised(Alarms::default(), one_differs), []);
        let saturated = (1..=9).map(|step| scores(step, 1.0, if step < 3 { 0.4 } else { 0.003 }));
        assert_eq!(raised(Alarms::default(), saturated), equal(7));
        // Below the first deviation, but not by that much.
        let narrower = (1..=9).map(|step| scores(step, 1.0, if step < 3 { 0.4 } else { 0.005 }));
        assert_eq!(raised(Alarms::default(), narrower), []);
        let single = (1..=600).map(|step| {
            metrics(&[
                ("step", f64::from(step)),
                ("episode", f64::from(step)),
                ("objective/scores", 1.0),
                ("objective/scores_std", 0.0),
            ])
        });
        assert_eq!(raised(Alarms::default(), single), [], "one response has no deviation");
    }

    #[test]
    fn one_of_several_rewards_that_has_always_been_constant_is_reported_by_name() {
        let update = |step: usize, format: f64, judge: f64| {
            let mut metrics = scores(step, 1.0, 0.3);
            metrics.push("objective/scores/format", 0.0);
            metrics.push("objective/scores_std/format", format);
            metrics.push("objective/scores_std/judge", judge);
            metrics
        };
        let constant = (1..=5).map(|step| update(step, 0.0, 0.4));
        assert_eq!(raised(Alarms::default(), constant), [(4, WarningKind::EqualScores)]);
        let mut alarms = Alarms::default();
        let messages: Vec<Warning> = (1..=4)
            .flat_map(|step| {
                let metrics = update(step, 0.0, 0.4);
                alarms.observe_metrics(step, &metrics, length(&metrics))
            })
            .collect();
        let words = "update 4: the reward `format` has given all responses of each update the same score, 0 of late, in 256 responses";
        assert!(messages[0].message.starts_with(words), "{}", messages[0].message);
        // It is learned.
        let learned = (1..=9).map(|step| update(step, if step == 1 { 0.4 } else { 0.0 }, 0.4));
        assert_eq!(raised(Alarms::default(), learned), []);
        let missing = (1..=9).map(|step| update(step, f64::NAN, 0.4));
        assert_eq!(raised(Alarms::default(), missing), [], "no score is no constant one");
        // It has no score for most of the 64 responses of an update.
        let absent = |absent: f64| {
            (1..=9).map(move |step| {
                let mut metrics = update(step, 0.0, 0.4);
                metrics.push("reward/format/absent", absent);
                metrics
            })
        };
        assert_eq!(raised(Alarms::default(), absent(64.0)), [], "it has scored no response");
        assert_eq!(raised(Alarms::default(), absent(63.0)), [], "one score has no deviation");
        assert_eq!(
            raised(Alarms::default(), absent(32.0)),
            [(8, WarningKind::EqualScores)],
            "256 scores after eight updates"
        );
    }

    #[test]
    fn groups_of_equal_scores_are_reported_by_the_same_alarm() {
        let mut alarms = Alarms::default();
        let found: Vec<usize> =
            (1..=100).filter(|&update| alarms.observe_groups(update, &[1.0, 1.0, 2.0, 2.0], 2).is_some()).collect();
        assert_eq!((found.as_slice(), alarms.raised.as_slice()), (&[32][..], &[WarningKind::EqualScores][..]));
    }

    #[test]
    fn a_critic_that_explains_less_than_a_constant_is_reported_after_ten_updates() {
        let explained =
            |numbers: Vec<f64>| numbers.into_iter().map(|number| metrics(&[("val/explained_variance", number)]));
        let found = raised(Alarms::default(), explained(vec![-0.5; 12]));
        assert_eq!(found, [(10, WarningKind::NegativeExplainedVariance)]);
        assert_eq!(raised(Alarms::default(), explained([vec![-0.5; 9], vec![0.0; 1], vec![-0.5; 9]].concat())), []);
        assert_eq!(raised(Alarms::default(), vec![Metrics::default(); 20]), [], "no critic");
        let rising = (0..40).map(|update| -(0.8_f64.powi(update)));
        assert_eq!(raised(Alarms::default(), explained(rising.clone().collect())), [], "it learns");
        // From -0.13 on it learns no longer.
        let stalled: Vec<f64> = rising.map(|explained| explained.min(-0.13)).collect();
        let found = raised(Alarms::default(), explained(stalled));
        assert!(matches!(found[..], [(12..=20, WarningKind::NegativeExplainedVariance)]), "{found:?}");
    }

    #[test]
    fn the_metrics_of_the_examples_raise_no_alarm() {
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
        let folders = ["gpt2-sentiment/results/seed-1", "smollm2/results"].map(String::from).into_iter();
        let folders = folders.chain((1..=3).map(|seed| format!("sentiment/results/seed-{seed}")));
        let mut runs = 0;
        for entry in folders.flat_map(|folder| std::fs::read_dir(examples.join(folder)).unwrap()) {
            let path = entry.unwrap().path();
            let text = std::fs::read_to_string(&path).unwrap();
            if !path.to_string_lossy().ends_with("metrics.jsonl") || !text.contains("objective/scores") {
                continue;
            }
            let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            let updates = lines.map(|line| {
                let mut metrics = Metrics::default();
                for (name, value) in line.as_object().unwrap() {
                    metrics.push(name.clone(), value.as_f64().unwrap_or(f64::NAN));
                }
                metrics
            });
            assert_eq!(raised(Alarms::new(None), updates), [], "{}", path.display());
            runs += 1;
        }
        assert!(runs >= 10, "{runs} runs");
    }

    #[test]
    fn a_share_of_clipped_tokens_above_a_half_is_reported() {
        let clipped = [0.9, 0.6, 0.5, 0.51, 0.9, 0.6].map(|share| metrics(&[("policy/clipfrac_avg", share)]));
        assert_eq!(raised(Alarms::default(), clipped), [(6, WarningKind::HighClipShare)], "three in a row");
    }

    #[test]
    fn a_gradient_that_leaps_is_reported_by_its_model() {
        for (name, model) in NORM_METRICS {
            let norms =
                |norms: &[f64]| -> Vec<Metrics> { norms.iter().map(|&norm| metrics(&[(name, norm)])).collect() };
            let usual = [1.0, 0.5, 0.0, 2.0, 1.0, 0.0, 1.0, 3.0, 0.2, 1.0];
            assert_eq!(raised(Alarms::default(), norms(&usual)), []);
            let leaps = [&usual[..], &[10.0, 10.5]].concat();
            assert_eq!(raised(Alarms::default(), norms(&leaps)), [(12, WarningKind::GradientLeap)]);
            let mut alarms = Alarms::default();
            let found: Vec<Warning> =
                norms(&leaps).iter().flat_map(|metrics| alarms.observe_metrics(3, metrics, length(metrics))).collect();
            let words = format!(
                "update 3: {name} is 10.500, 10 times its median of late, 1.000: a few responses dominate the step of {model}"
            );
            assert!(found[0].message.starts_with(&words), "{}", found[0].message);
            assert_eq!(raised(Alarms::default(), norms(&[1.0, 1.0, 100.0])), [], "too few for a median");
        }
    }

    fn response(tokens: &[i64], stopped: bool) -> Response {
        let finish = if stopped { FinishReason::Stop } else { FinishReason::Length };
        Response {
            tokens: tokens.to_vec(),
            logprobs: vec![0.0; tokens.len()],
            sets: None,
            inserted: Vec::new(),
            finish,
        }
    }

    /// The warnings about these responses, each to a prompt of its own.
    fn warnings(
        alarms: &mut Alarms,
        responses: &[Response],
        stop: &[i64],
        eos: &[i64],
        may_stop: bool,
    ) -> Vec<Warning> {
        let prompts: Vec<[i64; 1]> = (0..).take(responses.len()).map(|prompt| [prompt]).collect();
        let prompts: Vec<&[i64]> = prompts.iter().map(|prompt| &prompt[..]).collect();
        alarms.observe_responses(&Sampled { update: 1, prompts: &prompts, responses, stop, eos, may_stop, cut: None })
    }

    #[test]
    fn missing_stops_are_reported_after_a_hundred_responses_in_a_row_and_only_where_something_stops() {
        let open = vec![response(&[5, 6], false); 60];
        let stopped = response(&[5, 9], true);
        let found = |alarms: &mut Alarms, responses: &[Response], stop: &[i64]| {
            kinds(&warnings(alarms, responses, stop, &[9], !stop.is_empty()))
        };
        let mut alarms = Alarms::default();
        assert_eq!(found(&mut alarms, &open, &[9]), []);
        // One that stops, in the middle: 40 behind it and 59 more are 99.
        let mut mixed = open.clone();
        mixed[19] = stopped;
        assert_eq!(found(&mut alarms, &mixed, &[9]), []);
        assert_eq!(found(&mut alarms, &open[..59], &[9]), []);
        assert_eq!(found(&mut alarms, &open[..1], &[9]), [WarningKind::NoStop]);
        assert_eq!(found(&mut alarms, &open, &[9]), []);
        let mut without = Alarms::default();
        for _ in 0..3 {
            assert_eq!(found(&mut without, &open, &[]), []);
        }
    }

    #[test]
    fn a_share_of_stops_that_falls_by_half_is_reported_and_chance_is_not() {
        let update =
            |stopped: usize| -> Vec<Response> { (0..64).map(|row| response(&[5, 9], row < stopped)).collect() };
        let found = |updates: &[usize]| -> Vec<(usize, WarningKind)> {
            let mut alarms = Alarms::default();
            let raised = (1..).zip(updates).flat_map(|(number, &stopped)| {
                let kinds = kinds(&warnings(&mut alarms, &update(stopped), &[9], &[9], true));
                kinds.into_iter().map(move |kind| (number, kind))
            });
            raised.collect()
        };
        // 120 of the first 128, and then 60 of the last.
        assert_eq!(found(&[60, 60, 60, 55, 30, 30, 30]), [(6, WarningKind::FewerStops)]);
        assert_eq!(found(&[60, 60, 60, 55, 31, 31, 31]), [], "not by half");
        // From 16 to 8 of 128 is within four standard errors.
        assert_eq!(found(&[8, 8, 4, 4, 4, 4]), []);
    }

    #[test]
    fn responses_that_become_alike_are_reported_after_three_updates() {
        let tokens = |from: i64| -> Vec<i64> { (from..from + 10).collect() };
        let different: Vec<Response> = (0..8).map(|row| response(&tokens(20 * row), false)).collect();
        let same: Vec<Response> = vec![response(&tokens(0), false); 8];
        // Each repeats another token.
        let repeating: Vec<Response> = (0..8).map(|row| response(&[row / 2; 64], false)).collect();
        let run = |updates: &[&Vec<Response>]| -> Vec<Vec<WarningKind>> {
            let mut alarms = Alarms::default();
            updates.iter().map(|responses| kinds(&warnings(&mut alarms, responses, &[], &[], false))).collect()
        };
        let alike = vec![WarningKind::AlikeResponses];
        assert_eq!(run(&[&different, &same, &same, &same, &same])[2..], [vec![], alike.clone(), vec![]]);
        let unshared: Vec<Response> =
            (0..8).map(|row| response(&[&[row; 63][..], &[row + 50]].concat(), false)).collect();
        let found = run(&[&different, &different, &different, &unshared, &unshared, &unshared]);
        assert_eq!(found[5], alike, "16 of 504 pairs are distinct");
        assert_eq!(run(&[&different, &same, &same, &different, &same, &repeating]), vec![Vec::new(); 6]);
    }

    #[test]
    fn an_eos_that_stops_nothing_is_reported_where_most_responses_continue_after_one() {
        let hidden =
            |stop: &[i64], responses: &[Response]| warnings(&mut Alarms::default(), responses, stop, &[9, 7], true);
        let (inside, at_end, none) =
            (response(&[5, 9, 6], false), response(&[5, 6, 9], false), response(&[5, 6, 6], false));
        let most = [inside.clone(), inside.clone(), none.clone()];
        let found = hidden(&[], &most);
        assert_eq!(kinds(&found), [WarningKind::IgnoredEos]);
        let words = "update 1: 2 of 3 responses continue after an eos token, which is no stop token of this run";
        assert!(
            found[0].message.starts_with(words) && found[0].message.ends_with("--stop_token eos ends responses there")
        );
        let found = hidden(&[6], &most);
        assert!(kinds(&found) == [WarningKind::IgnoredEos] && found[0].message.ends_with("scored and trained on"));
        assert_eq!(hidden(&[9], &most), []);
        assert_eq!(hidden(&[], &[inside, none.clone()]), [], "half are not most");
        assert_eq!(hidden(&[], &[at_end.clone(), at_end, none]), []);
    }

    #[test]
    fn the_runs_of_the_examples_raise_no_alarm() {
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
        // Each with its response_length, where something ends a response before it.
        for (name, limit) in [
            ("sentiment/results/seed-1/ppo", Some(48)),
            ("sentiment/results/seed-2/ppo", Some(48)),
            ("sentiment/results/seed-3/ppo", Some(48)),
            ("gpt2-sentiment/results/seed-1/ppo", Some(24)),
            ("smollm2/results/grpo-seed-1", Some(40)),
            ("smollm2/results/grpo-seed-2", Some(40)),
        ] {
            let path = examples.join(format!("{name}.metrics.jsonl"));
            let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            let updates = text.lines().map(|line| {
                let mut metrics = Metrics::default();
                let line: serde_json::Map<String, Value> = serde_json::from_str(line).unwrap();
                line.into_iter().for_each(|(name, value)| metrics.push(name, value.as_f64().unwrap_or(f64::NAN)));
                metrics
            });
            let updates: Vec<Metrics> = updates.collect();
            assert!(updates.len() >= 24, "{name}");
            assert_eq!(raised(Alarms::new(limit), updates), [], "{name}");
        }
    }
}
