//! Attacks on the program: bad files, bad words, bad neighbours, kills and failing disks, drawn from fixed seeds.
//!
//! On any input, nothing panics or aborts, time and memory are bounded, an error is one short line without control
//! characters, and a run that was cut off ends in the bits of one that was not. `RLHF_ATTACK=N` makes N times as many cases.

mod faults;
mod files;
pub(crate) mod folders;
mod memory;
mod ranks;
mod rewards;

use serde_json::{Map, Value};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// How many cases of a kind there are, where the quick form has `quick`.
pub(crate) fn cases(quick: u64) -> u64 {
    let times = std::env::var("RLHF_ATTACK").ok().map(|times| times.parse::<u64>().expect("RLHF_ATTACK is a number"));
    quick * times.unwrap_or(1).max(1)
}

/// Whether this is the long form.
fn is_long() -> bool {
    cases(1) > 1
}

/// Checks that an error is one short line that a terminal only shows.
#[track_caller]
pub(crate) fn check_error(what: &str, error: &str) {
    assert!(!error.trim().is_empty() && error.len() < 4000, "{what}: {} bytes: {error:?}", error.len());
    assert!(!error.contains(char::is_control), "{what}: {error:?}");
    for alien in ["internal:", "panicked", "please report"] {
        assert!(!error.contains(alien), "{what}: {error}");
    }
}

/// What came of the cases of one kind.
#[derive(Default)]
struct Outcomes {
    went_well: u64,
    refused: u64,
    panics: Map<String, Value>,
}

impl Outcomes {
    /// Does one case, which may panic: that is noted with its name.
    fn note<T>(&mut self, name: &str, case: impl FnOnce() -> rlhf::Result<T>) {
        // Where the process dies, its last line names the case.
        let _ = writeln!(std::io::stdout(), "{name}");
        match catch_unwind(AssertUnwindSafe(case)) {
            Ok(Ok(_)) => self.went_well += 1,
            Ok(Err(error)) => {
                check_error(name, &error.to_string());
                self.refused += 1;
            }
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or(panic.downcast_ref::<&str>().map(|text| text.to_string())).unwrap_or_default();
                self.panics.insert(name.into(), text.chars().take(300).collect::<String>().into());
            }
        }
    }

    /// The counts for the parent; fails if anything panicked.
    #[track_caller]
    fn report(&self) -> Value {
        let panics = serde_json::to_string_pretty(&self.panics).unwrap();
        assert!(self.panics.is_empty(), "{} panicked: {panics}", self.panics.len());
        serde_json::json!({"went_well": self.went_well, "refused": self.refused})
    }
}
