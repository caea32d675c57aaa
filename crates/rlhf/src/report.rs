//! Views of what runs have written: `rlhf report` makes one page of HTML that needs no network, and `rlhf watch` shows a run live, as that
//! page or in the terminal.
//!
//! | subject | file |
//! |---|---|
//! | a run's folder as plain data; its responses | `read`, `samples` |
//! | the verdict in words | `verdict` |
//! | which metrics are drawn together; where alarms are marked; curves as inline SVG | `charts`, `marks`, `svg` |
//! | the page, its style sheet and its script | `page` |
//! | a run that changes; its progress | `live`, `progress` |
//! | the live page over HTTP; the view in the terminal | `server`, `terminal` |
//! | escaping: all text of a run goes through it | `html` |

mod charts;
mod html;
mod live;
mod marks;
mod page;
mod progress;
mod read;
mod samples;
mod server;
mod svg;
mod terminal;
mod verdict;

pub use server::watch;
pub use terminal::watch_in_terminal;

use crate::files;
use crate::run::output_dir::REPORT;
use crate::settings::ReportConfig;
use crate::weights::write_text;
use crate::{Error, Result};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The first line of a report, by which a file is known as one.
const MARK: &str = "<!doctype html><!-- a report of rlhf -->";

/// Writes the report of one or several runs, which may be in progress. Returns its path: `output`, or else `report.html` in the
/// folder of the only run, or in the working directory.
///
/// # Errors
/// If a folder holds no run, or a run without updates; if the file exists, is no report, and may not be replaced; if it cannot
/// be written.
pub fn report(config: &ReportConfig) -> Result<PathBuf> {
    config.check()?;
    let output = match (&config.output, &config.runs[..]) {
        (Some(output), _) => output.clone(),
        (None, [run]) => run.join(REPORT),
        (None, _) => REPORT.into(),
    };
    let runs = read::Run::read_all(&config.runs)?;
    if !config.overwrite_output_file {
        check_output(&output)?;
    }
    write_text(&output, &page::page(&runs))?;
    Ok(output)
}

/// Writes the report of the run in `dir` into it, if it has updates. Returns its path.
///
/// # Errors
/// As [`report`].
pub(crate) fn leave(dir: &Path) -> Result<Option<PathBuf>> {
    let run = read::Run::read(dir)?;
    if run.metrics.is_empty() {
        return Ok(None);
    }
    let output = dir.join(REPORT);
    check_output(&output)?;
    write_text(&output, &page::page(&[run]))?;
    Ok(Some(output))
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
