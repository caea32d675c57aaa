//! Curves as inline SVG.

use super::html::{Html, number};
use super::marks::AlarmMark;
use crate::run::ends::{Ends, short, window, with_error};

/// Size of a chart, in units of its drawing.
const WIDTH: f64 = 400.0;
const HEIGHT: f64 = 180.0;

/// Edges of the area with the curves.
const LEFT: f64 = 46.0;
const RIGHT: f64 = 392.0;
const TOP: f64 = 8.0;
const BOTTOM: f64 = 158.0;

/// Colours of curves: the style sheet has as many.
pub const COLOURS: usize = 7;

/// Marks that a description names, at most.
const MOST_DESCRIBED: usize = 5;

/// Absolute value beyond which a curve leaves the chart, so that differences of two values are finite.
const LARGEST: f64 = 1e300;

/// A point: update and value, NaN where the value is not finite.
pub type Point = (f64, f64);

/// One line of a chart.
#[derive(Debug, Clone)]
pub struct Curve<'a> {
    pub label: String,
    /// The metric that it shows.
    pub metric: &'a str,
    /// Number of its colour.
    pub colour: usize,
    pub points: &'a [Point],
    /// Standard error of the last value, where the run has that.
    pub error: Option<f64>,
}

/// A chart of one or several curves over the updates of a run.
#[derive(Debug, Clone)]
pub struct Chart<'a> {
    pub title: String,
    pub unit: &'static str,
    /// At least one.
    pub curves: Vec<Curve<'a>>,
    /// In the order of their updates.
    pub marks: Vec<AlarmMark>,
}

impl Chart<'_> {
    /// Draws the chart as a figure, with curves thinned to `columns` columns.
    pub fn draw(&self, page: &mut Html, columns: usize) {
        self.caption(page);
        let points = || self.curves.iter().flat_map(|curve| curve.points);
        let x = Axis::x(points().map(|point| point.0));
        let y = Axis::y(points().map(|point| point.1));
        page.raw("<svg class=\"chart\" role=\"img\" viewBox=\"0 0 ").text(WIDTH).raw(" ").text(HEIGHT);
        page.raw("\" data-domain=\"").text(join([x.domain, y.domain].as_flattened(), 12));
        page.raw("\" data-frame=\"").text(join(&[LEFT, RIGHT, BOTTOM, TOP], 12)).raw("\"><title>");
        page.text(&self.title).raw("</title><desc>").text(self.describe()).raw("</desc>");
        self.axes(page, &x, &y);
        for curve in &self.curves {
            curve.draw(page, &x, &y, columns);
        }
        for mark in &self.marks {
            mark.draw(page, &x);
        }
        page.raw("</svg></figure>\n");
    }

    /// Writes title, unit, and the number at the end of each curve, with all its digits as data.
    fn caption(&self, page: &mut Html) {
        page.raw("<figure><figcaption><b>").text(&self.title).raw("</b>");
        if !self.unit.is_empty() {
            page.raw(" <span class=\"unit\">").text(self.unit).raw("</span>");
        }
        for curve in &self.curves {
            let last = curve.last();
            page.raw(" <span class=\"key k").text(curve.colour % COLOURS).raw("\">");
            page.raw(if curve.label.is_empty() { "" } else { "<i></i>" }).text(&curve.label);
            page.raw(" <data data-metric=\"").text(curve.metric).raw("\" value=\"").text(number(last, 17)).raw("\">");
            page.text(with_error(last, curve.error)).raw("</data></span>");
        }
        page.raw("</figcaption>");
    }

    /// Returns the chart in words, for those who cannot see it.
    fn describe(&self) -> String {
        let describe = |curve: &Curve<'_>| {
            let Some(Ends { first, last }) = curve.ends() else { return format!("{}: no finite value.", curve.label) };
            let finite = curve.points.iter().filter(|point| point.1.is_finite());
            let least = finite.clone().map(|point| point.1).fold(f64::INFINITY, f64::min);
            let greatest = finite.map(|point| point.1).fold(f64::NEG_INFINITY, f64::max);
            let [from, to, least, greatest] = [first, last, least, greatest].map(short);
            let label = if curve.label.is_empty() { String::new() } else { format!("{}: ", curve.label) };
            format!("{label}{from} at the start, {to} at the end; single values between {least} and {greatest}.")
        };
        let curves = self.curves.iter().map(describe);
        let shown = self.marks.iter().take(MOST_DESCRIBED).map(AlarmMark::describe).collect::<Vec<_>>().join(", ");
        let more = match self.marks.len().saturating_sub(MOST_DESCRIBED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let marks = (!self.marks.is_empty()).then(|| format!("Marked: {shown}{more}."));
        curves.chain(marks).collect::<Vec<_>>().join(" ")
    }

    fn axes(&self, page: &mut Html, x: &Axis, y: &Axis) {
        page.raw("<g class=\"axes\">");
        for (value, label) in y.ticks() {
            let at = coordinate(y.at(value));
            page.raw("<path d=\"M").text(LEFT).raw(" ").text(&at).raw("H").text(RIGHT).raw("\"/><text x=\"");
            page.text(LEFT - 5.0)
                .raw("\" y=\"")
                .text(&at)
                .raw("\" dy=\".32em\" class=\"y\">")
                .text(label)
                .raw("</text>");
        }
        for (value, label) in x.ticks() {
            page.raw("<text x=\"").text(coordinate(x.at(value))).raw("\" y=\"").text(BOTTOM + 15.0);
            page.raw("\" class=\"x\">").text(label).raw("</text>");
        }
        page.raw("</g>");
    }
}

impl AlarmMark {
    /// Returns the alarm in words.
    fn describe(&self) -> String {
        format!("{} at update {}", self.label, self.update)
    }

    /// Draws a line below a flag at the update of the alarm, if the chart has that update. The flag of a rollback points back.
    fn draw(&self, page: &mut Html, x: &Axis) {
        if !(x.domain[0]..=x.domain[1]).contains(&self.update) {
            return;
        }
        let at = coordinate(x.at(self.update));
        page.raw("<g class=\"mark");
        if let Some(colour) = self.colour {
            page.raw(" k").text(colour % COLOURS);
        }
        page.raw("\" data-x=\"").text(self.update).raw("\" data-label=\"").text(&self.label).raw("\"><title>");
        page.text(self.describe()).raw("</title><path d=\"M").text(&at).raw(" ").text(TOP).raw("V").text(BOTTOM);
        page.raw("\"/><path class=\"flag\" d=\"M").text(&at).raw(" ").text(TOP);
        page.raw(if self.is_rollback { "v-8l-8 4z" } else { "l-4.5-8h9z" }).raw("\"/></g>");
    }
}

impl Curve<'_> {
    /// Returns the numbers at the ends of the curve, if it has finite values.
    fn ends(&self) -> Option<Ends> {
        Ends::of(self.metric, self.points.iter().map(|point| point.1))
    }

    /// Returns the number at the end, or NaN where the last value is not finite.
    fn last(&self) -> f64 {
        last(self.metric, self.points)
    }

    /// Returns whether there is a moving mean of the values.
    pub fn is_smoothed(&self) -> bool {
        window(self.metric, self.points.iter().filter(|point| point.1.is_finite()).count()) > 1
    }

    /// Returns the moving mean of the values, if there are enough of them.
    fn smoothed(&self) -> Option<Vec<Point>> {
        smoothed(self.metric, self.points)
    }

    /// Draws the values, and over them, if there are many, their moving average; a single value is a dot.
    fn draw(&self, page: &mut Html, x: &Axis, y: &Axis, columns: usize) {
        let values = thinned(self.points, x.domain, columns);
        let is_dot = values.iter().filter(|point| point.1.is_finite()).count() == 1;
        let smooth = self.smoothed();
        let class = match &smooth {
            Some(_) => "each",
            None if is_dot => "line dot",
            None => "line",
        };
        self.start_path(page, class);
        let (steps, numbers): (Vec<f64>, Vec<f64>) = values.iter().copied().unzip();
        page.raw("\" data-label=\"").text(&self.label);
        // A thinned curve has more points between these, which are not on the page.
        page.raw(if values.len() < self.points.len() { "\" data-thinned=\"" } else { "" });
        page.raw("\" data-x=\"").text(join(&steps, 12)).raw("\" data-y=\"").text(join(&numbers, 6));
        page.raw("\" d=\"").text(path(&values, x, y)).raw("\"/>");
        if let Some(smooth) = smooth {
            self.start_path(page, "line smooth");
            // A smooth curve needs fewer points.
            page.raw("\" d=\"").text(path(&thinned(&smooth, x.domain, columns / 2), x, y)).raw("\"/>");
        }
    }

    fn start_path(&self, page: &mut Html, class: &'static str) {
        page.raw("<path class=\"").raw(class).raw(" k").text(self.colour % COLOURS);
    }
}

/// A linear axis.
pub struct Axis {
    /// Least and greatest value.
    pub domain: [f64; 2],
    /// Their coordinates.
    range: [f64; 2],
    step: f64,
}

impl Axis {
    /// Returns an axis from the least to the greatest of these values, with about `count` ticks at round numbers.
    fn new(values: impl Iterator<Item = f64>, range: [f64; 2], count: usize) -> Self {
        let finite = values.filter(|value| value.is_finite()).map(|value| value.clamp(-LARGEST, LARGEST));
        let [least, greatest] = finite.fold([f64::INFINITY, f64::NEG_INFINITY], |[a, b], v| [a.min(v), b.max(v)]);
        let [least, greatest] = match (least, greatest) {
            (least, greatest) if least > greatest => [0.0, 1.0],
            (least, greatest) if greatest - least > 1e-9 * greatest.abs().max(least.abs()) => [least, greatest],
            // All are equal, or differ by rounding.
            (0.0, _) => [-1.0, 1.0],
            (value, _) => [value - 0.1 * value.abs(), value + 0.1 * value.abs()],
        };
        let step = round_step((greatest - least) / count as f64);
        Self { domain: [least, greatest], range, step }
    }

    /// Returns the axis of updates.
    pub fn x(points: impl Iterator<Item = f64>) -> Self {
        let axis = Self::new(points, [LEFT, RIGHT], 5);
        Self { step: axis.step.max(1.0), ..axis }
    }

    /// Returns the axis of values, with round numbers at its ends.
    pub fn y(points: impl Iterator<Item = f64>) -> Self {
        let axis = Self::new(points, [BOTTOM, TOP], 4);
        let [least, greatest] = axis.domain.map(|value| value / axis.step);
        // Values just beyond a tick, as a KL of -1e-9, do not touch the frame.
        let domain = [(least + 0.02).floor(), (greatest - 0.02).ceil()].map(|tick| tick * axis.step);
        Self { domain, ..axis }
    }

    /// Returns the coordinate of a value.
    fn at(&self, value: f64) -> f64 {
        let [least, greatest] = self.domain;
        let [start, end] = self.range;
        start + (value.clamp(-LARGEST, LARGEST) - least) / (greatest - least) * (end - start)
    }

    /// Returns the values of the ticks with their labels.
    fn ticks(&self) -> Vec<(f64, String)> {
        let [least, greatest] = self.domain.map(|value| value / self.step);
        // Rounding must not lose the tick at an end.
        let (first, last) = ((least - 1e-6).ceil() as i64, (greatest + 1e-6).floor() as i64);
        (first..=last).map(|tick| tick as f64 * self.step).map(|value| (value, number(value, 6))).collect()
    }
}

/// Returns 1, 2 or 5 times a power of ten that is at least `step`.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power).into_iter().find(|round| *round >= step).unwrap_or(step)
}

/// Thins points to the least and the greatest value of each of `columns` columns of the chart, and keeps the first and the last
/// point. A column that has a gap ends with a gap.
fn thinned(points: &[Point], [start, end]: [f64; 2], columns: usize) -> Vec<Point> {
    if points.len() <= 2 * columns {
        return points.to_vec();
    }
    let column = |point: &Point| (((point.0 - start) / (end - start) * columns as f64) as usize).min(columns - 1);
    let mut thin = vec![points[0]];
    for column in points[1..points.len() - 1].chunk_by(|a, b| column(a) == column(b)) {
        let finite = || column.iter().filter(|point| point.1.is_finite());
        let least = finite().min_by(|a, b| a.1.total_cmp(&b.1));
        let greatest = finite().max_by(|a, b| a.1.total_cmp(&b.1));
        let gap = column.iter().find(|point| !point.1.is_finite());
        let mut ends = Vec::from_iter(least.into_iter().chain(greatest));
        let len = thin.len();
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        ends.dedup();
        thin.extend(ends);
        thin.extend(gap.map(|gap| (gap.0.max(thin[len..].last().map_or(gap.0, |last| last.0)), f64::NAN)));
    }
    thin.push(points[points.len() - 1]);
    thin
}

/// Returns the number at the end of a metric, or NaN where its last value is not finite: the mean of older values would hide that.
pub fn last(metric: &str, points: &[Point]) -> f64 {
    let is_finite = points.last().is_some_and(|point| point.1.is_finite());
    let ends = Ends::of(metric, points.iter().map(|point| point.1)).filter(|_| is_finite);
    ends.map_or(f64::NAN, |ends| ends.last)
}

/// Returns the moving mean of the finite values of a metric, if its window has several values. The window is that of the numbers at the
/// ends of a run, so the mean begins and ends with these numbers. Elsewhere each point is in the middle of its window.
pub fn smoothed(metric: &str, points: &[Point]) -> Option<Vec<Point>> {
    let mut sums = vec![0.0];
    for value in points.iter().map(|point| point.1).filter(|value| value.is_finite()) {
        sums.push(sums[sums.len() - 1] + value);
    }
    let len = sums.len() - 1;
    let window = window(metric, len);
    let mean = |place: usize| {
        let start = place.saturating_sub(window / 2).min(len - window);
        (sums[start + window] - sums[start]) / window as f64
    };
    let mut place = 0;
    let smooth = |&(x, y): &Point| {
        let is_value = y.is_finite();
        let value = if is_value { mean(place) } else { f64::NAN };
        place += usize::from(is_value);
        (x, value)
    };
    (window > 1).then(|| points.iter().map(smooth).collect())
}

/// Returns the path through points, which starts anew after a gap.
fn path(points: &[Point], x: &Axis, y: &Axis) -> String {
    let mut path = String::new();
    let mut draws = false;
    for point in points {
        if point.1.is_finite() {
            path.push(if draws { 'L' } else { 'M' });
            path += &coordinate(x.at(point.0));
            path.push(' ');
            path += &coordinate(y.at(point.1));
            // A point without a neighbour is a dot.
            path += if draws { "" } else { "h0" };
        }
        draws = point.1.is_finite();
    }
    path
}

/// Returns a coordinate with a tenth of a unit.
fn coordinate(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or(text.clone(), String::from)
}

/// Returns numbers with at most `digits` significant digits as data for the script.
fn join(numbers: &[f64], digits: usize) -> String {
    let number = |&value: &f64| if value.is_finite() { number(value, digits) } else { "NaN".into() };
    numbers.iter().map(number).collect::<Vec<String>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[Point]) -> Chart<'_> {
        Chart {
            title: "<Score>".into(),
            unit: "nats",
            curves: vec![Curve { label: "a".into(), metric: "m", colour: 8, points, error: None }],
            marks: Vec::new(),
        }
    }

    #[test]
    fn thinning_keeps_extremes_ends_and_gaps() {
        let mut points: Vec<Point> = (0..10_000).map(|at| (f64::from(at), f64::from(at % 7))).collect();
        points[3333].1 = 99.0;
        points[4444].1 = -99.0;
        points[5555].1 = f64::NAN;
        let thin = thinned(&points, [0.0, 9999.0], 100);
        assert!(thin.len() <= 3 * 100 + 2 && thin.is_sorted_by(|a, b| a.0 <= b.0), "{}", thin.len());
        assert_eq!((thin[0], thin[thin.len() - 1]), (points[0], points[9999]));
        assert!(thin.contains(&points[3333]) && thin.contains(&points[4444]));
        assert_eq!(thin.iter().filter(|point| point.1.is_nan()).count(), 1);
        assert_eq!(thinned(&points[..200], [0.0, 199.0], 100), points[..200]);
    }

    #[test]
    fn axes_have_round_ticks_around_all_values() {
        let ticks = |values: &[f64]| -> Vec<String> {
            let axis = Axis::y(values.iter().copied());
            let ticks = axis.ticks();
            assert!(
                ticks.iter().all(|(value, _)| (TOP - 0.01..BOTTOM + 0.01).contains(&axis.at(*value))),
                "{values:?}"
            );
            ticks.into_iter().map(|(_, label)| label).collect()
        };
        assert_eq!(ticks(&[0.1, 0.93]), ["0", "0.5", "1"]);
        assert_eq!(ticks(&[-3.0, 11.0, f64::NAN]), ["-5", "0", "5", "10", "15"]);
        assert_eq!(ticks(&[0.0, 0.0]), ["-1", "-0.5", "0", "0.5", "1"]);
        assert_eq!(ticks(&[1e-7, 4e-7]), ["1e-7", "2e-7", "3e-7", "4e-7"]);
        assert!(!ticks(&[-f64::MAX, f64::MAX]).is_empty() && !ticks(&[f64::INFINITY]).is_empty());
        assert!(!ticks(&[5.0, 5.0 + 1e-13]).is_empty() && !ticks(&[f64::MIN_POSITIVE, 0.0]).is_empty());
    }

    #[test]
    fn a_moving_mean_begins_and_ends_with_the_numbers_of_the_verdict_and_skips_gaps() {
        let mut points: Vec<Point> = (0..30).map(|at| (f64::from(at), f64::from(at))).collect();
        assert!(smoothed("m", &points[..10]).is_none() && smoothed("eval/score", &points).is_none());
        // With 30 values each mean is over three. A straight line stays as it is, except at its ends.
        let smooth = smoothed("m", &points).unwrap();
        assert!(points[1..29].iter().zip(&smooth[1..29]).all(|(a, b)| (a.1 - b.1).abs() < 1e-9 && a.0 == b.0));
        (points[9].1, points[10].1) = (12.0, f64::NAN);
        let smooth = smoothed("m", &points).unwrap();
        assert!((smooth[9].1 - (8.0 + 12.0 + 11.0) / 3.0).abs() < 1e-9 && smooth[10].1.is_nan(), "{smooth:?}");
        let ends = Ends::of("m", points.iter().map(|point| point.1)).unwrap();
        assert!((smooth[0].1 - ends.first).abs() < 1e-9 && (smooth[29].1 - ends.last).abs() < 1e-9, "{smooth:?}");
        let mut page = Html::default();
        curve(&points).draw(&mut page, 100);
        assert!(page.finish().contains("value=\"28\">28</data>"), "the mean of 27, 28 and 29");
    }

    #[test]
    fn a_chart_has_a_title_a_description_and_its_values_as_data() {
        let points = [(1.0, 0.5), (2.0, f64::NAN), (3.0, 0.453_983_694_314_956_67)];
        let mut page = Html::default();
        curve(&points).draw(&mut page, 100);
        let page = page.finish();
        for part in [
            "<b>&lt;Score&gt;</b>",
            "<data data-metric=\"m\" value=\"0.45398369431495667\">0.454</data>",
            "role=\"img\"",
            "<desc>a: 0.5 at the start, 0.454 at the end; single values between 0.454 and 0.5.</desc>",
            "data-x=\"1 2 3\" data-y=\"0.5 NaN 0.453984\"",
            "class=\"line k1\"",
        ] {
            assert!(page.contains(part), "no {part} in {page}");
        }
        let path = page.split(" d=\"").last().unwrap().split('"').next().unwrap();
        assert_eq!(path.matches('M').count(), 2, "{path}");
    }

    #[test]
    fn a_curve_with_a_single_value_is_a_full_dot() {
        let draw = |points: &[Point]| {
            let mut page = Html::default();
            curve(points).draw(&mut page, 100);
            page.finish()
        };
        let mut points: Vec<Point> = (1..20).map(|at| (f64::from(at), f64::NAN)).collect();
        points[0].1 = 0.5;
        // The same if other updates have no value.
        for points in [&points[..1], &points[..]] {
            let page = draw(points);
            assert!(page.contains("<path class=\"line dot k1\"") && !page.contains("smooth"), "{page}");
        }
        points[9].1 = 1.0;
        assert!(!draw(&points).contains("dot"));
    }

    #[test]
    fn a_thinned_curve_is_known_as_one() {
        let points: Vec<Point> = (0..300).map(|at| (f64::from(at), f64::from(at % 7))).collect();
        for (columns, is_thinned) in [(100, true), (200, false)] {
            let mut page = Html::default();
            curve(&points).draw(&mut page, columns);
            assert_eq!(page.finish().contains(" data-label=\"a\" data-thinned=\"\" data-x=\""), is_thinned);
        }
    }

    #[test]
    fn marks_within_a_chart_are_drawn_and_all_are_described() {
        let points = [(1.0, 0.5), (3.0, 1.0)];
        let mark = |update: f64, label: &str, is_rollback: bool| AlarmMark {
            update,
            label: label.into(),
            colour: is_rollback.then_some(1),
            is_rollback,
        };
        let mut chart = curve(&points);
        chart.marks = vec![mark(2.0, "<b>", false), mark(3.0, "rollback", true), mark(9.0, "runaway_kl", false)];
        let mut page = Html::default();
        chart.draw(&mut page, 100);
        let page = page.finish();
        for part in [
            "<g class=\"mark\" data-x=\"2\" data-label=\"&lt;b&gt;\"><title>&lt;b&gt; at update 2</title><path d=\"M219 8V158\"/>\
             <path class=\"flag\" d=\"M219 8l-4.5-8h9z\"/></g>",
            "<g class=\"mark k1\" data-x=\"3\"",
            "single values between 0.5 and 1. Marked: &lt;b&gt; at update 2, rollback at update 3, runaway_kl at update 9.</desc>",
        ] {
            assert!(page.contains(part), "no {part} in {page}");
        }
        assert_eq!(page.matches("class=\"mark").count(), 2, "update 9 is not in the chart");
        chart.marks = (0..12).map(|_| mark(1.0, "a", false)).collect();
        assert!(chart.describe().ends_with("a at update 1 and 7 more."), "{}", chart.describe());
    }
}
