//! The numbers at the start and at the end of a run. The console, `rlhf pipeline`, `rlhf report` and `rlhf watch` all show these.

use crate::run::settings::is_eval_metric;
use rlhf_base::metrics::name_of_groups;
use serde_json::{Map, Value};

/// Most values in a mean of a metric at the start or at the end of a run.
pub const MOST_VALUES: usize = 50;

/// A metric at the start and at the end of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ends {
    /// Mean of the first [`window`] values.
    pub first: f64,
    /// Mean of as many last values.
    pub last: f64,
}

impl Ends {
    /// Returns the means of the first and of the last values of the metric `name` that are finite, if there is one.
    pub fn of(name: &str, values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        let window = window(name, values.len());
        let mean = |values: &[f64]| values.iter().sum::<f64>() / window as f64;
        (window > 0).then(|| Self { first: mean(&values[..window]), last: mean(&values[values.len() - window..]) })
    }
}

/// Returns the number of values in the mean at an end of a run with `len` values of the metric `name`: a tenth of them, and one for a
/// metric of evaluations, whose values are means over all held-out rows.
pub fn window(name: &str, len: usize) -> usize {
    if is_eval_metric(name) { len.min(1) } else { len.div_ceil(10).min(MOST_VALUES) }
}

/// Returns an explanation of the numbers of a run with `len` updates that have metrics.
pub fn words(len: usize) -> String {
    match window("", len) {
        0 | 1 => "start and end are the first and the last update, those of held-out rows single evaluations".into(),
        window => format!(
            "start and end are means of the first and of the last {window} updates, those of held-out rows single evaluations"
        ),
    }
}

/// Returns a number at the start or the end of a run as text.
pub fn short(value: f64) -> String {
    number(value, 3)
}

/// Returns a number with its standard error, if that is known: `0.101 ± 0.05`.
pub fn with_error(value: f64, error: Option<f64>) -> String {
    match error.filter(|error| error.is_finite()) {
        Some(error) => format!("{} \u{b1} {}", short(value), number(error, 2)),
        None => short(value),
    }
}

/// Returns the value of a metric in a line of metrics. PPO's name works for a GRPO or RLOO run too.
pub fn metric_of(line: &Map<String, Value>, name: &str) -> Option<f64> {
    let group_value = || line.get(name_of_groups(name)?.as_ref());
    line.get(name).or_else(group_value)?.as_f64()
}

/// Returns the numbers of a metric at the start and at the end of a run, as texts, from its `lines` of metrics. Numbers of held-out prompts
/// have their standard errors. The first text is empty if there is only one value.
pub fn ends_of(lines: &[Map<String, Value>], name: &str) -> Option<[String; 2]> {
    let values = |name: &str| lines.iter().filter_map(|line| metric_of(line, name)).collect::<Vec<_>>();
    let (all, errors) = (values(name), values(&format!("{name}_stderr")));
    let ends = Ends::of(name, all.iter().copied())?;
    let errors = Ends::of(&format!("{name}_stderr"), errors);
    let [first, last] = [(ends.first, errors.map(|e| e.first)), (ends.last, errors.map(|e| e.last))]
        .map(|(value, error)| if is_eval_metric(name) { with_error(value, error) } else { short(value) });
    Some(if all.len() == 1 { [String::new(), last] } else { [first, last] })
}

/// Returns a number with at most `digits` significant digits, in the shortest form.
pub fn number(value: f64, digits: usize) -> String {
    if !value.is_finite() {
        return "not finite".into();
    }
    let rounded: f64 = format!("{value:.*e}", digits - 1).parse().expect("it is a number");
    // Turns -0 into 0.
    let rounded = rounded + 0.0;
    let exponent = if rounded == 0.0 { 0.0 } else { rounded.abs().log10() };
    if (-4.0..9.0).contains(&exponent) { rounded.to_string() } else { format!("{rounded:e}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_are_means_of_a_tenth_and_those_of_evaluations_single_values() {
        let means = |name, len: u32| Ends::of(name, (1..=len).map(f64::from)).map(|ends| [ends.first, ends.last]);
        assert_eq!(means("loss", 10), Some([1.0, 10.0]));
        assert_eq!(means("loss", 20), Some([1.5, 19.5]));
        assert_eq!(means("loss", 1000), Some([25.5, 975.5]));
        assert_eq!([means("eval/score", 20), means("eval_loss", 20)], [Some([1.0, 20.0]); 2]);
        assert_eq!([means("loss", 0), means("eval/score", 0), means("x", 1)], [None, None, Some([1.0, 1.0])]);
        let gaps = [f64::NAN, 1.0, 3.0, f64::INFINITY];
        assert_eq!(Ends::of("loss", gaps), Some(Ends { first: 1.0, last: 3.0 }));
        assert!(
            words(20).contains("the first and of the last 2 updates")
                && words(3).contains("the first and the last update")
        );
        assert_eq!([with_error(0.0188, Some(0.0212)), with_error(1.0, None)], ["0.0188 \u{b1} 0.021", "1"]);
    }

    #[test]
    fn numbers_are_short_and_lose_no_digit_that_is_shown() {
        for (value, shown) in [
            (0.0, "0"),
            (-0.0, "0"),
            (1.46875, "1.469"),
            (139_639.0, "139600"),
            (4.690_242_091e-7, "4.69e-7"),
            (0.000_123_456, "0.0001235"),
            (-2.5, "-2.5"),
            (1e300, "1e300"),
            (f64::NAN, "not finite"),
        ] {
            assert_eq!(number(value, 4), shown);
        }
        assert_eq!(number(0.453_983_694_314_956_67, 17).parse(), Ok(0.453_983_694_314_956_67));
    }
}
