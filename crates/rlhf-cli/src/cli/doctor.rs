//! `rlhf doctor`: prints the findings as lines or JSON.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::Command;

use crate::doctor::{Build, Finding, Status, Step, examine, self_test};
use rlhf::settings::DoctorConfig;
use rlhf::terminal::{Colour, Stream, wrap};
use rlhf::{Error, Result};
use serde_json::json;

/// The variable by which this program starts itself for the self-test; its value is the device.
const SELF_TEST: &str = "RLHF_DOCTOR_SELF_TEST";

/// Columns of the status and of the name in a line.
const STATUS: usize = 9;
const NAME: usize = 22;

/// Runs the checks and prints them. Returns the exit code: 1 if one failed.
pub(crate) fn doctor(config: &DoctorConfig) -> Result<u8> {
    if let Ok(device) = std::env::var(SELF_TEST) {
        return as_lines_of_json(&device);
    }
    let program = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("rlhf"));
    let start = |device: &str| {
        let mut command = Command::new(&program);
        command.arg("doctor").env(SELF_TEST, device);
        command
    };
    let build = Build {
        version: env!("CARGO_PKG_VERSION"),
        commit: option_env!("RLHF_COMMIT").filter(|commit| !commit.is_empty()),
    };
    let mut findings = Vec::new();
    let mut written = Ok(());
    examine(config, build, start, &mut |step| match step {
        Step::Checking(name) => show_progress(&name),
        Step::Found(finding) => {
            clear_progress();
            if !config.json && written.is_ok() {
                written = writeln!(io::stdout(), "{}", line(&finding));
            }
            findings.push(finding);
        }
    });
    clear_progress();
    let worst = findings.iter().map(|finding| finding.status).max().unwrap_or(Status::Ok);
    let last = if config.json {
        let whole = json!({"version": build.version, "status": worst, "checks": findings});
        serde_json::to_string_pretty(&whole).unwrap_or_default()
    } else {
        summary(&findings)
    };
    written.and_then(|()| writeln!(io::stdout(), "{last}")).map_err(Error::io("write to", "standard output"))?;
    Ok(u8::from(worst == Status::Failure))
}

/// Runs the self-test in this process, and prints its steps.
fn as_lines_of_json(device: &str) -> Result<u8> {
    let mut written = Ok(());
    self_test(device, &mut |step| {
        let line = serde_json::to_string(&step).unwrap_or_default();
        written = writeln!(io::stdout(), "{line}").and_then(|()| io::stdout().flush());
    });
    written.map_err(Error::io("write to", "standard output"))?;
    Ok(0)
}

/// Returns a finding as a line, which is broken between words where the terminal is narrower.
fn line(finding: &Finding) -> String {
    let Finding { name, status, text, hint, .. } = finding;
    let hint = hint.as_ref().map_or(String::new(), |hint| format!("; {hint}"));
    let whole = format!("{:STATUS$}{name:NAME$}{text}{hint}", status.name());
    let wrapped = wrap(&whole, Stream::Out.width(), STATUS + NAME);
    let colour = match status {
        Status::Ok => Colour::Green,
        Status::Warning => Colour::Yellow,
        Status::Failure => Colour::Red,
    };
    let label = status.name();
    format!("{}{}", Stream::Out.paint(colour, label), wrapped.strip_prefix(label).unwrap_or_default())
}

/// Returns the last line.
fn summary(findings: &[Finding]) -> String {
    let count = |status: Status| findings.iter().filter(|finding| finding.status == status).count();
    let words = |count: usize, word: &str| format!("{count} {word}{}", if count == 1 { "" } else { "s" });
    match (count(Status::Failure), count(Status::Warning)) {
        (0, 0) => "no problems found".into(),
        (0, warnings) => format!("{}: rlhf works", words(warnings, "warning")),
        (failures, 0) => words(failures, "failure"),
        (failures, warnings) => format!("{}, {}", words(failures, "failure"), words(warnings, "warning")),
    }
}

fn show_progress(name: &str) {
    if Stream::Err.moves_cursor() {
        let text = Stream::Err.paint(Colour::Dim, &format!("checking: {name} ..."));
        let _ = write!(io::stderr(), "\r\x1b[2K{text}").and_then(|()| io::stderr().flush());
    }
}

fn clear_progress() {
    if Stream::Err.moves_cursor() {
        let _ = write!(io::stderr(), "\r\x1b[2K").and_then(|()| io::stderr().flush());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(status: &str, hint: Option<&str>) -> Finding {
        let value = json!({"name": "threads", "status": status, "text": "64 threads on 2 processors", "hint": hint});
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_finding_is_a_line_and_the_last_line_counts_them() {
        let (good, bad) = (finding("ok", None), finding("failure", Some("unset OMP_NUM_THREADS")));
        assert_eq!(line(&good), "ok       threads               64 threads on 2 processors");
        assert_eq!(line(&bad), "failure  threads               64 threads on 2 processors; unset OMP_NUM_THREADS");
        let warning = finding("warning", Some("x"));
        assert_eq!(summary(std::slice::from_ref(&good)), "no problems found");
        assert_eq!(summary(&[good, warning.clone()]), "1 warning: rlhf works");
        assert_eq!(summary(&[warning, bad.clone(), bad]), "2 failures, 1 warning");
    }
}
