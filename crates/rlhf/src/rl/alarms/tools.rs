//! Alarms of runs with tools: calls that are no longer made or fail, environments that fail, responses that are cut.

use super::{FEW_UPDATES, mean};
use rlhf_base::metrics::WarningKind;
use serde::{Deserialize, Serialize};

/// Calls per response from which on a policy counts as calling its tools: one call in four responses.
pub(crate) const LEAST_CALLS: f64 = 0.25;
/// Share of the most calls per response so far below which a policy has stopped calling.
pub(crate) const LEFT_CALLS: f64 = 0.05;
/// Fewest responses over which calls are counted; a policy that makes a call in one of ten then has neither so many nor so few by chance.
const CALL_WINDOW: f64 = 128.0;

/// Most calls fail above this share of failed calls; the alarm needs this in so many updates in a row, with at least so many calls.
pub(crate) const MOST_FAILED: f64 = 0.5;
const FAILING_UPDATES: usize = 5;
const FAILING_CALLS: f64 = 32.0;
/// A policy still learns to call while the failed share in the later half of these updates is below this part of that in the earlier half.
const LEAST_FALL: f64 = 0.9;

/// Share of the responses whose environments fail, over three updates, above which too many do.
pub(crate) const MOST_DEAD: f64 = 0.1;

/// Share of the responses that are cut above which most are.
const MOST_CUT: f64 = 0.5;

/// A problem in an update: its alarm, the number of the last updates that have it, and the message.
pub(super) type Problem = (WarningKind, usize, String);

/// Calls, failures and ends of responses so far.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Tools {
    /// Calls and responses of each of the last updates.
    calls: Vec<[f64; 2]>,
    /// The most calls per response over as many updates.
    most_calls: f64,
    /// Number of calls, and number of failed calls, of the last updates in a row that have calls most of which failed.
    failing: Vec<[f64; 2]>,
    /// Number of these updates.
    failing_updates: usize,
    /// Shares of failed environments in the first updates and in the last ones.
    first_dead: Vec<f64>,
    last_dead: Vec<f64>,
    /// Consecutive updates most of whose responses are cut.
    cut: usize,
}

impl Tools {
    /// Records the metrics of an update of `responses` responses; `number` returns a metric that is finite, and `solved` says whether the
    /// score is at its best.
    pub(super) fn observe(
        &mut self,
        update: usize,
        number: &dyn Fn(&str) -> Option<f64>,
        responses: f64,
        solved: bool,
    ) -> Vec<Problem> {
        let Some(calls) = number("tools/call_frequency") else { return Vec::new() };
        let failed = number("tools/failure_frequency").unwrap_or(0.0);
        let problems = [
            self.no_calls(update, [calls * responses, responses]).filter(|_| !solved),
            self.failing_calls(update, [calls * responses, failed * calls * responses]),
            // Runs that end with the first failure have no such metric.
            self.failing_environments(update, number("env_failure_frequency").unwrap_or(0.0)),
        ];
        problems.into_iter().flatten().collect()
    }

    fn no_calls(&mut self, update: usize, counts: [f64; 2]) -> Option<Problem> {
        let window = &mut self.calls;
        window.push(counts);
        while window.len() > FEW_UPDATES && sum(&window[1..])[1] >= CALL_WINDOW {
            window.remove(0);
        }
        let [calls, responses] = sum(window);
        if window.len() < FEW_UPDATES || responses < CALL_WINDOW {
            return None;
        }
        let last = calls / responses;
        self.most_calls = self.most_calls.max(last);
        let most = self.most_calls;
        if most < LEAST_CALLS || last >= LEFT_CALLS * most {
            return None;
        }
        let message = format!(
            "update {update}: the last {responses:.0} responses have {last:.2} calls of tools each, at most they had {most:.2}: the policy has \
             stopped calling its tools, as where the reward is as high without them; a reward that needs their results, a lower \
             learning_rate or a higher kl_coef keep them, and fewer calls that fail"
        );
        Some((WarningKind::NoCalls, window.len(), message))
    }

    fn failing_calls(&mut self, update: usize, counts: [f64; 2]) -> Option<Problem> {
        let [calls, failed] = counts;
        if calls <= 0.0 {
            return None;
        }
        if failed <= MOST_FAILED * calls {
            (self.failing, self.failing_updates) = (Vec::new(), 0);
            return None;
        }
        self.failing_updates += 1;
        let window = &mut self.failing;
        window.push(counts);
        if window.len() > FAILING_UPDATES {
            window.remove(0);
        }
        let (earlier, later) = window.split_at(window.len() / 2);
        let share = |updates: &[[f64; 2]]| sum(updates)[1] / sum(updates)[0];
        let falls = share(later) < LEAST_FALL * share(earlier);
        if window.len() < FAILING_UPDATES || sum(window)[0] < FAILING_CALLS || falls {
            return None;
        }
        let message = format!(
            "update {update}: {:.0} % of the calls of the last {FAILING_UPDATES} updates failed, and the share does not fall: the policy calls tools \
             that are not there or gives them wrong arguments, or the tools themselves fail; look at the results in the samples and at \
             tools.log, describe each argument of the tools, or start from a policy that knows them",
            100.0 * share(window)
        );
        Some((WarningKind::FailingCalls, self.failing_updates, message))
    }

    fn failing_environments(&mut self, update: usize, share: f64) -> Option<Problem> {
        if self.first_dead.len() < FEW_UPDATES {
            self.first_dead.push(share);
        }
        self.last_dead.push(share);
        if self.last_dead.len() > FEW_UPDATES {
            self.last_dead.remove(0);
        }
        let (first, last) = (100.0 * mean(&self.first_dead), 100.0 * mean(&self.last_dead));
        if self.last_dead.len() < FEW_UPDATES || last <= 100.0 * MOST_DEAD {
            return None;
        }
        let message = format!(
            "update {update}: the environments of {last:.0} % of the responses failed in the last {FEW_UPDATES} updates, of {first:.0} % in the \
             first {FEW_UPDATES}: these responses have environment_failure_reward, whatever they say; tools.log has the causes, and a larger \
             tool_timeout or a smaller max_environments helps environments that are slow"
        );
        Some((WarningKind::FailingEnvironments, FEW_UPDATES, message))
    }

    /// Records how many of the `all` responses of an update are cut: in the middle of a turn, or after a call whose result did not fit.
    pub(super) fn observe_cuts(&mut self, update: usize, cut: usize, all: usize) -> Option<Problem> {
        let share = cut as f64 / all as f64;
        self.cut = if share > MOST_CUT { self.cut + 1 } else { 0 };
        if self.cut < FEW_UPDATES {
            return None;
        }
        let message = format!(
            "update {update}: {:.0} % of the responses end in the middle of a turn or with a call that has no result, and more than half in the \
             last {} updates: the results of tools count in response_length, and too few tokens are left for an answer; raise response_length or \
             max_tool_calling_iterations, or lower tool_output_limit",
            100.0 * share,
            self.cut
        );
        Some((WarningKind::CutEpisodes, self.cut, message))
    }
}

fn sum(pairs: &[[f64; 2]]) -> [f64; 2] {
    pairs.iter().fold([0.0, 0.0], |[a, b], [c, d]| [a + c, b + d])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Metrics of an update.
    type Line = Vec<(&'static str, f64)>;

    /// The problems in updates of 64 responses with these metrics: update, from 1, alarm, and number of updates that have it.
    fn problems(updates: impl IntoIterator<Item = Line>, solved: bool) -> Vec<(usize, WarningKind, usize)> {
        let mut tools = Tools::default();
        let mut all = Vec::new();
        for (update, metrics) in (1..).zip(updates) {
            let number = |name: &str| metrics.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
            for (kind, since, message) in tools.observe(update, &number, 64.0, solved) {
                // The cause ends at the first "; " of the message.
                assert_eq!(message.matches("; ").count(), 1, "{message}");
                all.push((update, kind, since));
            }
            tools = serde_json::from_str(&serde_json::to_string(&tools).unwrap()).unwrap();
        }
        all
    }

    #[test]
    fn a_policy_that_stops_calling_is_reported_and_one_that_never_called_or_calls_less_is_not() {
        let lines =
            |calls: &[f64]| calls.iter().map(|&calls| vec![("tools/call_frequency", calls)]).collect::<Vec<Line>>();
        let calls = |frequencies: &[f64]| problems(lines(frequencies), false);
        // The mean over three updates is below 0.05 of the most, 1.2, from the seventh on.
        assert_eq!(calls(&[1.0, 1.2, 1.2, 1.2, 0.1, 0.0, 0.0]), [(7, WarningKind::NoCalls, 3)]);
        assert_eq!(calls(&[1.0, 1.2, 1.2, 1.2, 0.1, 0.1, 0.1, 0.1]), [], "less");
        assert_eq!(calls(&[0.0, 0.1, 0.2, 0.1, 0.0, 0.0, 0.0, 0.0]), [], "hardly ever");
        assert_eq!(calls(&[1.0, 1.0, 0.0, 0.0]), [], "two updates are few");
        assert_eq!(problems(lines(&[1.0, 1.0, 1.0, 0.0, 0.0, 0.0]), true), [], "it solves its task without them");
        assert_eq!(problems(vec![vec![("env_failure_frequency", 1.0)]; 9], false), [], "no tools");
    }

    #[test]
    fn calls_that_mostly_fail_are_reported_after_five_updates_unless_fewer_and_fewer_do() {
        // A share below 0 is that of an update without calls.
        let failing = |calls: f64, shares: &[f64]| {
            let line = |&share: &f64| {
                let calls = if share < 0.0 { 0.0 } else { calls };
                vec![("tools/call_frequency", calls), ("tools/failure_frequency", share.max(0.0))]
            };
            problems(shares.iter().map(line), false)
        };
        let at = |update, since| (update, WarningKind::FailingCalls, since);
        assert_eq!(failing(1.0, &[0.4, 0.9, 0.8, 0.9, 0.9, 0.8]), [at(6, 5)]);
        assert_eq!(failing(1.0, &[0.9, 0.9, 0.5, 0.9, 0.9, 0.9, 0.9]), [], "not in a row");
        assert_eq!(failing(1.0, &[0.98, 0.9, 0.8, 0.7, 0.6, 0.55, 0.5]), [], "it learns");
        // 7 calls in each update are 35 in five.
        assert_eq!(failing(0.11, &[1.0; 5]), [at(5, 5)]);
        assert_eq!(failing(0.05, &[1.0; 9]), [], "few calls");
        assert_eq!(failing(1.0, &[0.9, 0.9, -1.0, 0.9, 0.9, -1.0, 0.9]), [at(7, 5)]);
    }

    #[test]
    fn environments_that_fail_for_a_tenth_of_the_responses_are_reported() {
        let failing = |shares: &[f64]| {
            let line = |&share: &f64| {
                let dead = (share > 0.0).then_some(("env_failure_frequency", share));
                std::iter::once(("tools/call_frequency", 1.0)).chain(dead).collect()
            };
            problems(shares.iter().map(line), false)
        };
        assert_eq!(failing(&[0.0, 0.0, 0.0, 0.1, 0.1, 0.2]), [(6, WarningKind::FailingEnvironments, 3)]);
        assert_eq!(failing(&[0.2, 0.0, 0.0, 0.2, 0.05, 0.0]), [], "once in a while");
    }

    #[test]
    fn responses_that_are_cut_are_reported_after_three_updates() {
        let mut tools = Tools::default();
        let cuts = [40, 40, 32, 33, 40, 64];
        let found: Vec<_> = (1..).zip(cuts).filter_map(|(update, cut)| tools.observe_cuts(update, cut, 64)).collect();
        assert!(matches!(found[..], [(WarningKind::CutEpisodes, 3, _)]), "{found:?}");
        let words = "update 6: 100 % of the responses end in the middle of a turn or with a call that has no result, and more than half in \
                     the last 3 updates: ";
        assert!(found[0].2.starts_with(words) && found[0].2.matches("; ").count() == 1, "{}", found[0].2);
    }
}
