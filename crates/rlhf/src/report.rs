//! Views of what runs have written: `rlhf report` makes one page of HTML that needs no network, and `rlhf watch` shows a run live, as that
//! page or in the terminal.
//!
//! | subject | file |
//! |---|---|
//! | a run's folder as plain data; its responses, their turns, texts that are cut | `read`, `samples`, `turns`, `cut` |
//! | the verdict in words | `verdict` |
//! | which metrics are drawn together; where alarms are marked; curves as inline SVG | `charts`, `marks`, `svg` |
//! | the page, its style sheet and its script; the responses on it | `page`, `responses` |
//! | a run that changes; its progress | `live`, `progress` |
//! | the live page over HTTP; the view in the terminal | `server`, `terminal` |
//! | escaping: all text of a run goes through it | `html` |

mod charts;
#[doc(hidden)] // For `rlhf watch`.
pub mod cut;
#[doc(hidden)] // For `rlhf watch`.
pub mod html;
mod marks;
#[doc(hidden)] // For `rlhf watch`.
pub mod page;
#[doc(hidden)] // For `rlhf watch`.
pub mod progress;
#[doc(hidden)] // For `rlhf watch`.
pub mod read;
mod responses;
#[doc(hidden)] // For `rlhf watch`.
pub mod samples;
#[doc(hidden)] // For `rlhf watch`.
pub mod svg;
#[doc(hidden)] // For `rlhf watch`.
pub mod turns;
#[doc(hidden)] // For `rlhf watch`.
pub mod verdict;

use crate::run::output_dir::REPORT;
use crate::settings::ReportConfig;
use rlhf_base::files;
use rlhf_base::weights::write_text;
use rlhf_base::{Error, Result};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The first line of a report, by which a file is known as one.
const MARK: &str = "<!doctype html><!-- a report of rlhf -->";

/// A report that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Path of the page.
    pub path: PathBuf,
    /// Metrics of the runs that could not be read, in words; they are in the verdict as well.
    pub warnings: Vec<String>,
}

/// Writes the report of one or several runs, which may be in progress, to `output`, or else to `report.html` in the folder of the
/// only run, or in the working directory.
///
/// # Errors
/// If a folder holds no run, or a run without updates; if the file exists, is no report, and may not be replaced; if it cannot
/// be written.
pub fn report(config: &ReportConfig) -> Result<Report> {
    config.check()?;
    let output = match (&config.output, &config.runs[..]) {
        (Some(output), _) => output.clone(),
        (None, [run]) => run.join(REPORT),
        (None, _) => REPORT.into(),
    };
    let runs = read::Run::read_all(&config.runs)?;
    check_place(&output)?;
    if !config.overwrite_output_file {
        check_output(&output)?;
    }
    write_text(&output, &page::page(&runs))?;
    let named = config.runs.iter().zip(&runs);
    let warnings = named.flat_map(|(dir, run)| run.damage.iter().map(move |damage| (dir, damage)));
    let warnings = warnings.map(|(dir, damage)| format!("{}: {damage}", dir.display())).collect();
    Ok(Report { path: output, warnings })
}

/// Writes the report of the run in `dir` into it, if it has updates and the report `is_wanted`. Returns its path, and the sentences of its
/// verdict about what is bad.
///
/// # Errors
/// As [`report`].
pub(crate) fn leave(dir: &Path, is_wanted: bool) -> Result<(Option<PathBuf>, Vec<String>)> {
    // This process may hold the folder of the run, which has ended.
    let run = read::Run::read_as(dir, None)?;
    if run.metrics.is_empty() {
        return Ok((None, Vec::new()));
    }
    let bad = verdict::verdict(&run).into_iter().filter(|finding| finding.mark == verdict::Mark::Bad);
    let bad = bad.map(|finding| finding.text).collect();
    if !is_wanted {
        return Ok((None, bad));
    }
    let output = dir.join(REPORT);
    check_output(&output)?;
    write_text(&output, &page::page(&[run]))?;
    Ok((Some(output), bad))
}

/// Checks that `path` can be a file: it is no folder, and is in one.
fn check_place(path: &Path) -> Result<()> {
    let refuse = |what: &str| Err(Error::refused("output", format!(" = {}: {what}", path.display())));
    if path.is_dir() {
        return refuse("expected a file, found a folder; name a file in it, such as report.html");
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match folder {
        Some(folder) if !folder.is_dir() => refuse("expected a file in a folder that exists; create the folder first"),
        _ if path.file_name().is_none() => refuse("expected the name of a file"),
        _ => Ok(()),
    }
}

/// Checks that `path` is new, or a report.
fn check_output(path: &Path) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let mut start = Vec::new();
    files::open(path)?.take(MARK.len() as u64).read_to_end(&mut start).map_err(Error::io("read", path))?;
    if start == MARK.as_bytes() {
        return Ok(());
    }
    let message = "expected a report or a new file, found another; choose another file, or set --overwrite_output_file";
    Err(Error::invalid(path, message))
}
