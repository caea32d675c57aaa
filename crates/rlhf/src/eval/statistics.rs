//! Statistics of an evaluation: bootstrap intervals, the length-controlled win rate, pass@k.

use rlhf_base::rng::{Purpose, Stream};

/// Number of resamples of a bootstrap interval.
const RESAMPLES: u64 = 2000;

/// Confidence level of an interval.
const LEVEL: f64 = 0.95;

/// Quantile of the normal distribution of a two-sided interval of [`LEVEL`].
const NORMAL_QUANTILE: f64 = 1.959_963_984_540_054;

/// Maximum number of Newton steps. From zero coefficients, fits with a finite maximum converge in about ten.
const MOST_STEPS: usize = 50;

/// A Newton step below this ends the fit.
const TOLERANCE: f64 = 1e-10;

/// Returns the mean; NaN for no values.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Returns the 95 % percentile bootstrap interval of the mean of `values`: 2000 resamples with replacement, percentiles with linear
/// interpolation. `None` for no values.
///
/// The draws depend on `seed` and on the number of values only.
pub fn bootstrap_interval(values: &[f64], seed: u64) -> Option<[f64; 2]> {
    let resample_mean = |draws: &[usize]| Some(draws.iter().map(|&at| values[at]).sum::<f64>() / values.len() as f64);
    interval(values.len(), seed, resample_mean)
}

/// Returns a 95 % interval of the mean of `values` between 0 and 1: the bootstrap interval, or Wilson's score interval if all values are
/// equal, as resamples of equal values show no uncertainty. `None` for no values.
pub fn share_interval(values: &[f64], seed: u64) -> Option<[f64; 2]> {
    let result = bootstrap_interval(values, seed)?;
    if values.iter().any(|value| *value != values[0]) {
        return Some(result);
    }
    let count = values.len() as f64;
    let share = values[0];
    let z2 = NORMAL_QUANTILE.powi(2);
    let center = share + z2 / (2.0 * count);
    let half = NORMAL_QUANTILE * (share * (1.0 - share) / count + z2 / (4.0 * count * count)).sqrt();
    let [low, high] = [center - half, center + half].map(|x| (x / (1.0 + z2 / count)).clamp(0.0, 1.0));
    // The limits of the shares 0 and 1 are exact, whatever the rounding.
    Some([if share == 0.0 { 0.0 } else { low }, if share == 1.0 { 1.0 } else { high }])
}

/// Returns the 95 % percentile bootstrap interval of [`length_controlled_win_rate`] over prompts, each with the outcomes and
/// differences in length of its pairs, from the same draws as [`bootstrap_interval`].
///
/// A resample of wins alone counts as 1 and one of losses alone as 0, the limits of the win rate. `None` for no prompts, if more than 5 %
/// of the resamples have no finite fit, and if all resamples have the same win rate.
pub fn length_controlled_interval(prompts: &[Vec<(f64, f64)>], seed: u64) -> Option<[f64; 2]> {
    let result = interval(prompts.len(), seed, |draws| {
        let pairs = || draws.iter().flat_map(|&at| &prompts[at]).copied();
        let (first, _) = pairs().next()?;
        let is_one_sided = (first == 0.0 || first == 1.0) && pairs().all(|(outcome, _)| outcome == first);
        if is_one_sided { Some(first) } else { length_controlled_win_rate(pairs()) }
    });
    result.filter(|[low, high]| low < high)
}

/// Returns the 95 % percentile bootstrap interval of a `statistic` of `count` draws with replacement from as many values. `None` for no
/// values, and if more than 5 % of the resamples have no statistic.
fn interval(count: usize, seed: u64, statistic: impl Fn(&[usize]) -> Option<f64>) -> Option<[f64; 2]> {
    if count == 0 {
        return None;
    }
    let resample = |at: u64| {
        let mut stream = Stream::new(seed, Purpose::Bootstrap, at, 0);
        let draw = |_| ((stream.uniform() * count as f64) as usize).min(count - 1);
        statistic(&(0..count).map(draw).collect::<Vec<_>>())
    };
    let mut result: Vec<f64> = (0..RESAMPLES).filter_map(resample).collect();
    if (result.len() as f64) < LEVEL * RESAMPLES as f64 {
        return None;
    }
    result.sort_by(f64::total_cmp);
    let tail = (1.0 - LEVEL) / 2.0;
    Some([percentile(&result, tail), percentile(&result, 1.0 - tail)])
}

/// Returns the value below which the share `share` of the `sorted` values lies, interpolated linearly.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let place = share * (sorted.len() - 1) as f64;
    let (below, rest) = (place.floor() as usize, place.fract());
    let above = (below + 1).min(sorted.len() - 1);
    sorted[below] + (sorted[above] - sorted[below]) * rest
}

/// Returns the length-controlled win rate: the probability of a win between responses of equal length, by a logistic regression of
/// the outcomes on the difference in length.
///
/// With `(y, d)` of each comparison, the outcome `y` (1 for a win, 0.5 for a tie, 0 for a loss) and the difference in length `d`, it
/// maximizes the likelihood of
///
/// ```text
/// logit P(win) = a + b tanh(d / s)
/// ```
///
/// where `s` is the unbiased standard deviation of `d`, and returns `sigmoid(a)`. This is the length-controlled win rate of
/// AlpacaEval 2 ([Dubois et al. 2024](https://arxiv.org/abs/2404.04475)) with the terms of the model and of the length alone: without
/// the difficulty of the instruction, which needs the outcomes of other models, and without its penalty.
///
/// Where no pair differs in length, it is the win rate. `None` without outcomes, where all pairs differ by the same number, and where
/// the likelihood has no finite maximum: all outcomes are wins or all are losses, or the length alone separates wins from losses.
pub fn length_controlled_win_rate(pairs: impl IntoIterator<Item = (f64, f64)>) -> Option<f64> {
    let (outcomes, differences): (Vec<f64>, Vec<f64>) = pairs.into_iter().unzip();
    let count = outcomes.len() as f64;
    if outcomes.is_empty() {
        return None;
    }
    let center = mean(&differences);
    let squares: f64 = differences.iter().map(|d| (d - center).powi(2)).sum();
    let spread = (squares / (count - 1.0)).sqrt();
    if spread.is_nan() || spread == 0.0 {
        return differences.iter().all(|d| *d == 0.0).then(|| mean(&outcomes));
    }
    let features: Vec<f64> = differences.iter().map(|d| (d / spread).tanh()).collect();
    fit(&outcomes, &features).map(|[a, _]| sigmoid(a))
}

/// Returns the coefficients `a` and `b` that maximize the likelihood of the outcomes under `logit p = a + b x`, by Newton steps that
/// are halved until the likelihood does not fall. `None` if they do not converge.
fn fit(outcomes: &[f64], features: &[f64]) -> Option<[f64; 2]> {
    let likelihood = |[a, b]: [f64; 2]| -> f64 {
        let log = |(y, x): (&f64, &f64)| {
            let logit = a + b * x;
            y * logit - softplus(logit)
        };
        outcomes.iter().zip(features).map(log).sum()
    };
    let mut at = [0.0, 0.0];
    for _ in 0..MOST_STEPS {
        // Gradient (ga, gb) and negative Hessian ((haa, hab), (hab, hbb)).
        let (mut ga, mut gb, mut haa, mut hab, mut hbb) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for (y, x) in outcomes.iter().zip(features) {
            let p = sigmoid(at[0] + at[1] * x);
            let error = y - p;
            let weight = p * (1.0 - p);
            ga += error;
            gb += error * x;
            haa += weight;
            hab += weight * x;
            hbb += weight * x * x;
        }
        let determinant = haa * hbb - hab * hab;
        let step = [(hbb * ga - hab * gb) / determinant, (haa * gb - hab * ga) / determinant];
        if !step.iter().all(|x| x.is_finite()) {
            return None;
        }
        if step.iter().all(|x| x.abs() < TOLERANCE) {
            return Some(at);
        }
        let before = likelihood(at);
        let mut scale = 1.0;
        let moved = |scale: f64| [at[0] + scale * step[0], at[1] + scale * step[1]];
        while scale > 1e-6 && likelihood(moved(scale)) < before - 1e-12 * before.abs() {
            scale /= 2.0;
        }
        at = moved(scale);
    }
    None
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns `ln(1 + exp(x))` without overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Returns the unbiased estimate of pass@k, the probability that at least one of `k` responses is right, from `samples` responses to
/// a prompt of which `right` are right: `1 - C(samples - right, k) / C(samples, k)`. `None` with fewer than `k` samples.
///
/// Source: [Chen et al. 2021](https://arxiv.org/abs/2107.03374), equation 1, as a product, which does not overflow.
pub fn pass_at_k(samples: usize, right: usize, k: usize) -> Option<f64> {
    if k > samples || right > samples {
        return None;
    }
    if samples - right < k {
        return Some(1.0);
    }
    let miss: f64 = (samples - right + 1..=samples).map(|i| 1.0 - k as f64 / i as f64).product();
    Some(1.0 - miss)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn near(result: f64, expected: f64, tolerance: f64) {
        assert!((result - expected).abs() <= tolerance, "{result} is not {expected} within {tolerance}");
    }

    #[test]
    fn pass_at_k_is_the_share_of_choices_with_a_right_response() {
        // Counts every choice of k among n responses, of which the first c are right.
        for n in 1..=8_usize {
            for c in 0..=n {
                for k in 1..=n {
                    let choices = (0..1_u32 << n).filter(|choice| choice.count_ones() as usize == k);
                    let right = |choice: &u32| choice & ((1 << c) - 1) != 0;
                    let (all, some) = (choices.clone().count(), choices.filter(right).count());
                    near(pass_at_k(n, c, k).unwrap(), some as f64 / all as f64, 1e-12);
                }
            }
        }
        assert_eq!(pass_at_k(3, 1, 4), None);
        near(pass_at_k(1000, 1, 500).unwrap(), 0.5, 1e-12);
    }

    #[test]
    fn a_bootstrap_interval_of_many_values_is_that_of_the_normal_distribution() {
        let values: Vec<f64> = (0..400).map(|i| f64::from(u8::from(i % 5 < 3))).collect();
        let [low, high] = bootstrap_interval(&values, 7).unwrap();
        // 1.96 sqrt(0.6 * 0.4 / 400) = 0.048
        near(low, 0.552, 0.005);
        near(high, 0.648, 0.005);
        assert_eq!(bootstrap_interval(&values, 7), Some([low, high]), "the seed decides");
        let uneven: Vec<f64> = values.iter().zip(0..).map(|(x, i)| x + (f64::from(i)).sin()).collect();
        assert_ne!(bootstrap_interval(&uneven, 7), bootstrap_interval(&uneven, 8));
        assert_eq!(bootstrap_interval(&[0.5; 9], 7), Some([0.5, 0.5]));
        assert_eq!(bootstrap_interval(&[], 7), None);
    }

    #[test]
    fn equal_outcomes_have_an_interval_too() {
        // statsmodels.stats.proportion.proportion_confint(10, 10, method="wilson"), and of 0 of 10, and of 10 of 20.
        let cases = [
            (vec![1.0; 10], [0.722_467_200_137_117_9, 1.0]),
            (vec![0.0; 10], [0.0, 0.277_532_799_862_882_1]),
            (vec![0.5; 20], [0.299_298_008_198_212_3, 0.700_701_991_801_787_7]),
        ];
        for (values, expected) in cases {
            let result = share_interval(&values, 7).unwrap();
            near(result[0], expected[0], 1e-9);
            near(result[1], expected[1], 1e-9);
        }
        assert_eq!(share_interval(&[1.0, 0.0, 1.0], 7), bootstrap_interval(&[1.0, 0.0, 1.0], 7));
        assert_eq!(share_interval(&[], 7), None);
    }

    #[test]
    fn percentiles_are_interpolated_linearly() {
        let sorted = [0.0, 1.0, 2.0, 10.0];
        // numpy.percentile([0, 1, 2, 10], [0, 2.5, 50, 90, 100])
        let result = [0.0, 0.025, 0.5, 0.9, 1.0].map(|share| percentile(&sorted, share));
        for (result, expected) in result.into_iter().zip([0.0, 0.075, 1.5, 7.6, 10.0]) {
            near(result, expected, 1e-12);
        }
    }

    #[test]
    fn length_controlled_win_rates_are_those_of_statsmodels() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/length_controlled.json");
        let cases: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let numbers = |value: &Value| value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>();
        assert!(cases.len() >= 3);
        for case in &cases {
            let (outcomes, differences) = (numbers(&case["outcomes"]), numbers(&case["differences"]));
            let pairs: Vec<(f64, f64)> = outcomes.into_iter().zip(differences).collect();
            let result = length_controlled_win_rate(pairs.iter().copied()).unwrap();
            near(result, case["win_rate"].as_f64().unwrap(), 1e-8);
        }
    }

    #[test]
    fn a_longer_response_that_wins_by_its_length_has_no_advantage_at_equal_length() {
        // Each side wins half of the equally long pairs; the longer response wins 3 of 4.
        let rows = [(1.0, 0.0), (0.0, 0.0), (1.0, 9.0), (1.0, 9.0), (1.0, 9.0), (0.0, 9.0)];
        near(mean(&rows.map(|(outcome, _)| outcome)), 2.0 / 3.0, 1e-12);
        // Two groups and two coefficients: the fit is exact, and sigmoid(a) is the share of the first group.
        near(length_controlled_win_rate(rows).unwrap(), 0.5, 1e-9);
    }

    #[test]
    fn the_interval_at_equal_length_is_that_of_the_win_rate_where_lengths_are_equal_and_lower_where_length_wins() {
        let outcome = |i: usize| f64::from(u8::from(i % 5 < 3));
        let equal: Vec<Vec<(f64, f64)>> = (0..200).map(|i| vec![(outcome(i), 0.0)]).collect();
        let plain: Vec<f64> = (0..200).map(outcome).collect();
        assert_eq!(length_controlled_interval(&equal, 3), bootstrap_interval(&plain, 3));
        // The prompts are drawn, with all their pairs: twice the same pair is no more evidence.
        let pair = |i: usize| (outcome(i), if i % 5 < 2 { 40.0 } else { (i % 7) as f64 - 3.0 });
        let once: Vec<_> = (0..200).map(|i| vec![pair(i)]).collect();
        let twice: Vec<_> = (0..200).map(|i| vec![pair(i); 2]).collect();
        let ([low, high], [low_2, high_2]) =
            (length_controlled_interval(&once, 3).unwrap(), length_controlled_interval(&twice, 3).unwrap());
        near(low_2, low, 2e-3);
        near(high_2, high, 2e-3);
        let rate = length_controlled_win_rate(once.iter().flatten().copied()).unwrap();
        assert!(low < rate && rate < high && high < 0.6 && high - low < 0.25, "{low} {rate} {high}");
        // One loss among ten: the resamples without it count as 1. Separated by length: no interval.
        let one = (0..10).map(|i| vec![(f64::from(u8::from(i > 0)), f64::from((i * 3 + 2) % 7))]).collect::<Vec<_>>();
        assert_eq!(length_controlled_interval(&one, 3).unwrap()[1], 1.0);
        let separated: Vec<_> = [-2.0, -1.0, 1.0, 2.0].map(|d| vec![(f64::from(u8::from(d > 0.0)), d)]).into();
        assert_eq!(length_controlled_interval(&separated, 3), None);
        assert_eq!(length_controlled_interval(&[], 3), None);
    }

    #[test]
    fn a_win_rate_without_a_finite_fit_is_none() {
        assert_eq!(length_controlled_win_rate([(1.0, 1.0), (1.0, 2.0), (1.0, -3.0)]), None);
        let separated = [(1.0, 5.0), (1.0, 7.0), (0.0, -3.0), (0.0, -9.0)];
        assert_eq!(length_controlled_win_rate(separated), None, "separated");
        assert_eq!(length_controlled_win_rate([]), None);
        // Without a difference in length it is the plain win rate.
        assert_eq!(length_controlled_win_rate([1.0, 0.0, 1.0, 1.0].map(|outcome| (outcome, 0.0))), Some(0.75));
        assert_eq!(length_controlled_win_rate([(1.0, 0.0)]), Some(1.0));
        // No pair is of equal length.
        assert_eq!(length_controlled_win_rate([(1.0, 3.0)]), None);
        assert_eq!(length_controlled_win_rate([(1.0, 3.0), (0.0, 3.0)]), None);
    }
}
