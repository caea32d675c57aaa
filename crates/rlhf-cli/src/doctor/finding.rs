//! The result of a check, and helpers of all checks.

use rlhf::safe_text::one_line;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Version and source commit of the program.
#[derive(Debug, Clone, Copy)]
pub struct Build {
    /// Version of the program.
    pub version: &'static str,
    /// Commit of the sources, if the build recorded it.
    pub commit: Option<&'static str>,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Nothing is wrong.
    Ok,
    /// Something is slower than it could be, or cannot be used.
    Warning,
    /// Something is broken, or is configured so that it cannot work.
    Failure,
}

impl Status {
    /// Returns its name, as JSON has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failure => "failure",
        }
    }
}

/// One check and its result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// Name of the check.
    pub name: String,
    /// Its result.
    pub status: Status,
    /// One line about the state of the thing; without control characters and secrets.
    pub text: String,
    /// A remedy; only for warnings and failures.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub hint: Option<String>,
    /// Measured values by name.
    #[serde(skip_serializing_if = "Map::is_empty", default)]
    pub facts: Map<String, Value>,
}

impl Finding {
    /// Creates the finding that nothing is wrong.
    pub(super) fn ok(name: &str, text: impl AsRef<str>) -> Self {
        let text = one_line(text.as_ref()).into_owned();
        Self { name: name.into(), status: Status::Ok, text, hint: None, facts: Map::new() }
    }

    /// Creates a warning with a remedy.
    pub(super) fn warning(name: &str, text: impl AsRef<str>, hint: impl AsRef<str>) -> Self {
        let hint = Some(one_line(hint.as_ref()).into_owned());
        Self { status: Status::Warning, hint, ..Self::ok(name, text) }
    }

    /// Creates a failure with a remedy.
    pub(super) fn failure(name: &str, text: impl AsRef<str>, hint: impl AsRef<str>) -> Self {
        Self { status: Status::Failure, ..Self::warning(name, text, hint) }
    }

    /// Adds a measured value.
    #[must_use]
    pub(super) fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        let value = match value.into() {
            Value::String(text) => one_line(&text).into_owned().into(),
            other => other,
        };
        self.facts.insert(name.into(), value);
        self
    }
}

/// Progress of [`examine`](super::examine).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Step {
    /// The check of this name starts.
    Checking(String),
    /// A check has ended.
    Found(Finding),
}

/// Formats a number of bytes in GiB or MiB.
pub(super) fn bytes(count: u64) -> String {
    let mib = count as f64 / f64::from(1 << 20);
    match mib {
        mib if mib >= 10_240.0 => format!("{:.0} GiB", mib / 1024.0),
        mib if mib >= 1024.0 => format!("{:.1} GiB", mib / 1024.0),
        mib => format!("{mib:.0} MiB"),
    }
}

/// Returns the text of an environment variable, without blanks at its ends; `None` if it is empty.
pub(super) fn variable(name: &str) -> Option<String> {
    let text = std::env::var_os(name)?.to_string_lossy().trim().to_string();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_one_line_without_secrets_and_survives_json() {
        let finding = Finding::failure("hub", "http://me:pw@host/x\nand \u{1b}[2Jmore", "mend it").with("port", 7);
        let finding = finding.with("endpoint", "http://me:pw@host/x");
        assert!(!format!("{finding:?}").contains("pw"), "{finding:?}");
        assert!(finding.text.lines().count() == 1 && !finding.text.contains("pw"), "{}", finding.text);
        assert!(!finding.text.contains('\u{1b}'), "{}", finding.text);
        let step = Step::Found(finding);
        assert_eq!(serde_json::from_str::<Step>(&serde_json::to_string(&step).unwrap()).unwrap(), step);
        assert!(Status::Failure > Status::Warning && Status::Warning > Status::Ok);
    }

    #[test]
    fn sizes_have_two_digits_or_more() {
        let sizes = [5 << 20, 1536 << 20, 20 << 30].map(bytes);
        assert_eq!(sizes, ["5 MiB", "1.5 GiB", "20 GiB"]);
    }
}
