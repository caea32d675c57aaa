//! The best model of a run, by one of its metrics.

use crate::run::checkpoint::{BEST, BEST_FILE, commit};
use crate::run::settings::{EvalConfig, is_eval_metric};
use rlhf_base::metrics::Metrics;
use rlhf_base::weights::{pretty, read_json, write_text};
use rlhf_base::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Metrics for which lower is better.
const LOWER_IS_BETTER: [&str; 10] = [
    "loss",
    "eval_loss",
    "loss/policy_avg",
    "loss/value_avg",
    "loss/kl_avg",
    "loss/unsup_avg",
    "objective/kl",
    "eval/kl",
    "policy/approxkl_avg",
    "policy/policykl_avg",
];

/// Returns the description of the best model in `dir`, if `dir` is the folder of one: its metric, value and update.
pub(crate) fn read(dir: &Path) -> Option<Value> {
    let is_best = dir.file_name().is_some_and(|name| name == BEST);
    is_best.then(|| read_json(&dir.join(BEST_FILE)).ok()).flatten()
}

/// The best model of a run so far, by one of its metrics.
#[derive(Debug)]
pub(crate) struct Best {
    metric: String,
    greater: bool,
    /// The metric's best value, and the update after which it was found; that model is written.
    best: Option<(f64, usize)>,
    /// A better value, whose model is not written yet.
    pending: Option<(f64, usize)>,
    /// Whether an update has had the metric.
    seen: bool,
}

impl Best {
    /// Returns the best model that `config` sets, if it sets one.
    pub(crate) fn new(config: &EvalConfig) -> Option<Self> {
        let metric = config.metric_for_best_model.clone()?;
        let greater = config.greater_is_better.unwrap_or(!LOWER_IS_BETTER.contains(&metric.as_str()));
        Some(Self { greater, metric, best: None, pending: None, seen: false })
    }

    /// Compares the metric after update `done` with the best value, if the update `compares`, and marks the model to be written if
    /// it is better. Returns a warning if the metric is missing, unless it `may_lack` because it cannot be there yet.
    ///
    /// The mark is part of [`Best::state`], so an error before [`Best::write`] does not lose the best model.
    ///
    /// # Errors
    /// If no update has had the metric so far; a metric of evaluations may be missing where nothing is compared.
    pub(crate) fn compare(
        &mut self,
        metrics: &Metrics,
        done: usize,
        compares: bool,
        may_lack: bool,
    ) -> Result<Option<String>> {
        let Some(value) = metrics.get(&self.metric) else {
            let named = format!("metric_for_best_model = {}", self.metric);
            let missed = !may_lack && (compares || !is_eval_metric(&self.metric));
            if missed && !self.seen && self.best.is_none() {
                let known: Vec<&str> = metrics.iter().map(|(name, _)| name).collect();
                let known = known.join(", ");
                return Err(Error::Usage(format!("{named}: expected a metric of the run, one of {known}")));
            }
            let warning = || format!("{named}: update {done} has no such metric, so its model is not looked at");
            return Ok((missed && compares).then(warning));
        };
        self.seen = true;
        if compares && self.is_beaten_by(value) {
            self.pending = Some((value, done));
        }
        Ok(None)
    }

    /// Replaces `output_dir/best` by the folder that `write` fills, if the model after `done` updates is marked. Returns its
    /// path.
    ///
    /// # Errors
    /// The error of `write`; if a file or folder cannot be written or renamed. The model stays marked then.
    pub(crate) fn write(
        &mut self,
        output_dir: &Path,
        done: usize,
        write: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Option<PathBuf>> {
        let Some(best) = self.pending.filter(|&(_, update)| update == done) else { return Ok(None) };
        let described = self.described(Some(best));
        commit(output_dir, BEST, |dir| {
            write(dir)?;
            write_text(&dir.join(BEST_FILE), &pretty(&described.into()))
        })?;
        self.best = Some(best);
        self.pending = None;
        Ok(Some(output_dir.join(BEST)))
    }

    /// Returns whether the model after `done` updates is to be written.
    pub(crate) fn is_due(&self, done: usize) -> bool {
        self.pending.is_some_and(|(_, update)| update == done)
    }

    /// Records that another rank has written the model after `done` updates.
    pub(crate) fn mark_written(&mut self, done: usize) {
        if let Some(best) = self.pending.take_if(|(_, update)| *update == done) {
            self.best = Some(best);
        }
    }

    /// Forgets a model that is marked to be written.
    pub(crate) fn unmark(&mut self) {
        self.pending = None;
    }

    /// Returns whether the metric is one of evaluations.
    pub(crate) fn is_of_evaluations(&self) -> bool {
        is_eval_metric(&self.metric)
    }

    /// Returns whether `value` is better than the best one; a value that is not finite never is.
    fn is_beaten_by(&self, value: f64) -> bool {
        let better = |best: f64| if self.greater { value > best } else { value < best };
        value.is_finite() && self.best.is_none_or(|(best, _)| better(best))
    }

    fn described(&self, best: Option<(f64, usize)>) -> Map<String, Value> {
        let (value, update) = best.unzip();
        let parts: [(&str, Value); 4] = [
            ("metric", self.metric.as_str().into()),
            ("greater_is_better", self.greater.into()),
            ("value", json!(value)),
            ("update", json!(update)),
        ];
        parts.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
    }

    /// Returns the state for a checkpoint.
    pub(crate) fn state(&self) -> Value {
        let mut state = self.described(self.best);
        state.extend(self.pending.map(|pending| ("pending".into(), json!(pending))));
        state.into()
    }

    /// Restores the state that [`Best::state`] returned, unless it is of another metric.
    pub(crate) fn load_state(&mut self, state: &Value) {
        if state["metric"] == self.metric.as_str() && state["greater_is_better"] == self.greater {
            let number = |value: &Value| value.as_u64().map(|update| update as usize);
            self.best = state["value"].as_f64().zip(number(&state["update"]));
            let pending = &state["pending"];
            self.pending = pending[0].as_f64().zip(number(&pending[1]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlhf_base::schema::defaults;

    #[test]
    fn the_best_is_by_its_metric_and_survives_a_checkpoint_unless_the_metric_changes() {
        let config = |metric: &str, greater| EvalConfig {
            metric_for_best_model: Some(metric.into()),
            greater_is_better: greater,
            ..defaults()
        };
        let dir = tempfile::tempdir().unwrap();
        let mut best = Best::new(&config("eval/score", None)).unwrap();
        for (value, better) in [(1.0, true), (1.0, false), (f64::NAN, false), (0.5, false), (2.0, true)] {
            let mut metrics = Metrics::default();
            metrics.push("eval/score", value);
            assert_eq!(best.compare(&metrics, 7, true, false).unwrap(), None);
            let written = best.write(dir.path(), 7, |_| Ok(())).unwrap();
            assert_eq!(written.is_some(), better, "{value}");
        }
        for (metric, greater) in [
            ("loss/value_avg", false),
            ("eval/kl", false),
            ("eval_loss", false),
            ("eval/scores/wrinkle", true),
            ("eval/scores/lossless", true),
            ("eval_margin", true),
        ] {
            assert_eq!(Best::new(&config(metric, None)).unwrap().greater, greater, "{metric}");
            assert!(Best::new(&config(metric, Some(true))).unwrap().greater);
        }
        let mut again = Best::new(&config("eval/score", None)).unwrap();
        again.load_state(&best.state());
        assert_eq!(again.best, Some((2.0, 7)));
        let mut other = Best::new(&config("eval/kl", None)).unwrap();
        other.load_state(&best.state());
        assert_eq!(other.best, None);
    }

    #[test]
    fn a_best_model_whose_write_fails_is_still_to_be_written_after_a_resume() {
        let dir = tempfile::tempdir().unwrap();
        let mut config: EvalConfig = defaults();
        config.metric_for_best_model = Some("eval_loss".into());
        let mut best = Best::new(&config).unwrap();
        let at = |value: f64| {
            let mut metrics = Metrics::default();
            metrics.push("eval_loss", value);
            metrics
        };
        best.compare(&at(3.0), 1, true, false).unwrap();
        best.write(dir.path(), 1, |_| Ok(())).unwrap();
        let full = |_: &Path| Err(Error::Run("full".into()));
        best.compare(&at(2.0), 2, true, false).unwrap();
        assert!(best.write(dir.path(), 2, full).is_err());
        let mut again = Best::new(&config).unwrap();
        again.load_state(&best.state());
        assert!(again.write(dir.path(), 1, |_| Ok(())).unwrap().is_none(), "that is another model");
        assert!(again.write(dir.path(), 2, full).is_err());
        assert!(again.write(dir.path(), 2, |_| Ok(())).unwrap().is_some());
        let written = read_json(&dir.path().join(BEST).join(BEST_FILE)).unwrap();
        assert_eq!(written, json!({"metric": "eval_loss", "greater_is_better": false, "value": 2.0, "update": 2}));
        assert!(again.write(dir.path(), 2, |_| Ok(())).unwrap().is_none(), "it is written once");
        assert_eq!(again.state(), written);
    }
}
