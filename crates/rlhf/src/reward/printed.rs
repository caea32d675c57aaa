//! Output of a Python function other than its scores: lines that it prints, metrics and columns that it logs.

use super::Warn;
use serde_json::Value;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of lines that wait until there is a receiver that shows them.
const WAITING: usize = 100;

/// Passes printed lines on as they come. Lines that come before there is a receiver wait.
#[derive(Clone, Default)]
pub(super) struct Printed(Arc<Mutex<Lines>>);

#[derive(Default)]
struct Lines {
    show: Option<Warn>,
    waiting: Vec<String>,
}

impl Printed {
    /// Sets the receiver that shows the lines.
    pub(super) fn show_by(&self, show: Warn) {
        let mut lines = self.lock();
        lines.waiting.drain(..).for_each(|line| show(&line));
        lines.show = Some(show);
    }

    /// Passes a line on. For a line that overwrites itself, as progress bars do, its last text is shown.
    pub(super) fn receive(&self, line: &[u8]) {
        let text = String::from_utf8_lossy(line);
        let text = text.trim_end().rsplit('\r').next().unwrap_or_default().replace('\t', "    ");
        let mut lines = self.lock();
        match &lines.show {
            Some(show) => show(&text),
            None if lines.waiting.len() < WAITING => lines.waiting.push(text),
            None => {}
        }
    }

    /// Returns whether there is a receiver that shows the lines.
    pub(super) fn is_shown(&self) -> bool {
        self.lock().show.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Metrics and columns that a function has logged for a batch: by the `log_metric` and `log_extra` that TRL passes.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Logged {
    /// Values of each metric; NaN for a value that is not finite.
    metrics: Vec<(String, Vec<f64>)>,
    /// Columns with one value per response.
    pub(super) columns: Vec<(String, Vec<Value>)>,
}

impl Logged {
    /// Takes an output line that logs something: `{"log_metric": NAME, "value": x}` or `{"log_extra": COLUMN, "values": [...]}`.
    /// Returns false for any other line.
    pub(super) fn takes(&mut self, line: &[u8]) -> bool {
        if !line.starts_with(b"{\"log_") {
            return false;
        }
        let value: Value = serde_json::from_slice(line).unwrap_or_default();
        if let Some(name) = value["log_metric"].as_str() {
            let number = value["value"].as_f64().unwrap_or(f64::NAN);
            match self.metrics.iter_mut().find(|(known, _)| known == name) {
                Some((_, numbers)) => numbers.push(number),
                None => self.metrics.push((name.into(), vec![number])),
            }
        } else if let (Some(column), Some(values)) = (value["log_extra"].as_str(), value["values"].as_array()) {
            self.columns.push((column.into(), values.clone()));
        }
        true
    }

    /// Returns the mean of each metric.
    pub(super) fn means(&self) -> impl Iterator<Item = (String, f64)> {
        self.metrics.iter().map(|(name, numbers)| (name.clone(), numbers.iter().sum::<f64>() / numbers.len() as f64))
    }
}

/// Joins the columns of several batches, each with its number of rows; in a batch without a column the rows have null there.
pub(super) fn joined_columns(
    batches: impl IntoIterator<Item = (usize, Vec<(String, Vec<Value>)>)>,
) -> Vec<(String, Vec<Value>)> {
    let mut all: Vec<(String, Vec<Value>)> = Vec::new();
    let mut before = 0;
    for (rows, columns) in batches {
        for (name, values) in columns {
            match all.iter_mut().find(|(known, _)| *known == name) {
                Some((_, known)) => known.extend(values),
                None => all.push((name, [vec![Value::Null; before], values].concat())),
            }
        }
        before += rows;
        all.iter_mut().for_each(|(_, values)| values.resize(before, Value::Null));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lines_wait_until_someone_shows_them() {
        let (printed, seen): (Printed, Arc<Mutex<Vec<String>>>) = Default::default();
        printed.receive(b"early ");
        assert!(!printed.is_shown());
        let shown = seen.clone();
        printed.show_by(Arc::new(move |line: &str| shown.lock().unwrap().push(line.into())));
        printed.receive(b"  10%\r  20%\r");
        printed.receive(b"\tindented");
        assert_eq!(*seen.lock().unwrap(), ["early", "  20%", "    indented"]);
    }

    #[test]
    fn metrics_are_averaged_and_columns_joined_by_rows() {
        let mut logged = Logged::default();
        assert!(!logged.takes(b"{\"score\": 1}"));
        for line in ["{\"log_metric\": \"right\", \"value\": 1}", "{\"log_metric\": \"right\", \"value\": 0.5}"] {
            assert!(logged.takes(line.as_bytes()));
        }
        assert!(logged.takes(b"{\"log_extra\": \"found\", \"values\": [\"a\", null]}"));
        assert_eq!(logged.means().collect::<Vec<_>>(), [("right".to_string(), 0.75)]);
        let column = |name: &str, values: Value| (name.to_string(), values.as_array().unwrap().clone());
        let batches =
            [(2, logged.columns), (1, Vec::new()), (1, vec![column("more", json!([3])), column("found", json!([4]))])];
        let expected = [column("found", json!(["a", null, null, 4])), column("more", json!([null, null, null, 3]))];
        assert_eq!(joined_columns(batches), expected);
    }
}
