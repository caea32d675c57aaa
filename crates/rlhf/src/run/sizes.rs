//! Batch sizes of a run over all ranks, from the settings in its checkpoint: a run may resume with another number of ranks if they
//! stay the same.

use serde_json::{Map, Value};

/// Batch sizes over all ranks, on which the result of a run depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GlobalSizes {
    /// Rows per update.
    pub(crate) update: u64,
    /// Rows per optimizer step.
    pub(crate) step: u64,
    /// Rows whose losses are averaged together.
    pub(crate) part: u64,
}

/// Returns a number of ranks in words.
pub(super) fn ranks_in_words(ranks: usize) -> String {
    if ranks == 1 { "1 rank".into() } else { format!("{ranks} ranks") }
}

/// Returns the rows of one pass on each of `ranks` ranks, with at most `per_rank` rows per rank. They are at most the `step` rows of an
/// optimizer step, and all of these without a limit.
pub(crate) fn rows_of_all_ranks(per_rank: Option<u64>, ranks: u64, step: u64) -> u64 {
    per_rank.map_or(step, |rows| rows.saturating_mul(ranks).min(step))
}

impl GlobalSizes {
    /// Returns the sizes of a run of `ranks` ranks with the settings `config`; `None` if these have no batch size.
    ///
    /// `settings::PpoConfig` and the other configurations compute the same sizes for a run that starts.
    pub(crate) fn of(config: &Map<String, Value>, ranks: usize) -> Option<Self> {
        let set = |name: &str| config.get(name).and_then(Value::as_u64);
        let number = |name: &str, default: u64| set(name).unwrap_or(default);
        let accumulated = number("gradient_accumulation_steps", 1).max(1);
        let preset = config.get("preset").and_then(Value::as_str);
        if preset == Some("trl-legacy") {
            let update = number("batch_size", 128);
            let part = number("mini_batch_size", (update / accumulated).max(1));
            return Some(Self { update, step: part.saturating_mul(accumulated), part });
        }
        config.get("per_device_train_batch_size")?;
        let ranks = ranks as u64;
        let on_all = |rows: u64| rows.saturating_mul(ranks);
        let all = set("train_batch_size");
        let rows = all.unwrap_or_else(|| on_all(number("per_device_train_batch_size", 8).saturating_mul(accumulated)));
        let parts = number("num_mini_batches", 1).max(1);
        let generated = set("per_device_generation_batch_size")
            .map(|size| on_all(size.saturating_mul(number("generation_batches", 1))));
        if matches!(preset, Some("grpo" | "rloo")) {
            let pass = rows_of_all_ranks(Self::rows_per_pass(config), ranks, rows);
            let step_rows = set("steps_per_generation").map(|steps| steps.saturating_mul(pass));
            let update = set("generation_batch_size").or(step_rows).unwrap_or(rows);
            return Some(Self { update, step: rows, part: rows });
        }
        let (update, step) = match (generated, all) {
            (Some(generated), _) => (generated, rows),
            (None, None) if preset == Some("trl-ppov2") => (rows.saturating_mul(parts), rows),
            (None, _) => (rows, rows / parts),
        };
        Some(Self { update, step, part: step })
    }

    /// Returns the maximum number of rows in one pass of a rank with the settings `config`; `None` for no limit.
    pub(super) fn rows_per_pass(config: &Map<String, Value>) -> Option<u64> {
        let set = |name: &str| config.get(name).and_then(Value::as_u64);
        set("per_device_train_batch_size").or(if set("train_batch_size").is_some() { None } else { Some(8) })
    }

    /// Returns a description for error messages.
    pub(super) fn describe(self, ranks: usize) -> String {
        let with_ranks = ranks_in_words(ranks);
        if self.update == self.step {
            format!("{} rows per optimizer step with {with_ranks}", self.step)
        } else {
            format!("{} rows per update and {} per optimizer step with {with_ranks}", self.update, self.step)
        }
    }

    /// Returns the change of settings that sets these sizes for any number of ranks.
    pub(super) fn fix(self) -> String {
        let set = format!("set train_batch_size = {}", self.update);
        match (self.update == self.step, self.update.is_multiple_of(self.step.max(1))) {
            (true, _) => format!("{set}, without gradient_accumulation_steps"),
            (false, true) => format!(
                "{set} and num_mini_batches = {}, without gradient_accumulation_steps",
                self.update / self.step.max(1)
            ),
            (false, false) => "set the sizes per device so that their products with the ranks are these".into(),
        }
    }
}
