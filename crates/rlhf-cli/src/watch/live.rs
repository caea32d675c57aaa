//! A run that may change: read again when its files have changed, or when the process at work on it has started or ended.

use rlhf::Result;
use rlhf::report::read::Run;
use rlhf::run::{SAMPLES, is_at_work};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Polling interval of the files of a run, at least.
const PAUSE: Duration = Duration::from_millis(500);

/// Pause after a read, in multiples of the time that it took.
const SHARE: u32 = 5;

/// A run with its files as they were when it was read.
pub(super) struct LiveRun {
    dir: PathBuf,
    /// The last state that could be read.
    pub(super) run: Run,
    files: Vec<FileState>,
    /// A process is at work in the folder; `None` where that cannot be known.
    at_work: Option<bool>,
    /// Time of the next look at the files.
    due: Instant,
}

/// Path, size and time of the last change of a file.
type FileState = (PathBuf, u64, Option<SystemTime>);

impl LiveRun {
    /// Reads the run in the folder `dir`, which may have no updates yet.
    ///
    /// # Errors
    /// If there is no run in it, or `metrics.jsonl` cannot be read.
    pub(super) fn open(dir: &Path) -> Result<Self> {
        // Taken before the files are read, so that the next look sees a change that is made meanwhile.
        let at_work = is_at_work(dir);
        let files = file_states(dir);
        let run = Run::read_as(dir, at_work)?;
        Ok(Self { dir: dir.into(), run, files, at_work, due: Instant::now() + PAUSE })
    }

    /// Reads the run again if its files have changed and the last look was not just now. Returns whether it was read.
    ///
    /// # Errors
    /// As [`LiveRun::open`]; the run is then that of the last state that could be read.
    pub(super) fn refresh(&mut self) -> Result<bool> {
        let began = Instant::now();
        if began < self.due {
            return Ok(false);
        }
        self.due = began + PAUSE;
        let at_work = is_at_work(&self.dir);
        let files = file_states(&self.dir);
        if files == self.files && at_work == self.at_work {
            return Ok(false);
        }
        // After an error the run is read again whatever its files are.
        self.files.clear();
        self.run = Run::read_as(&self.dir, at_work)?;
        self.files = files;
        self.at_work = at_work;
        self.due = (began + PAUSE).max(Instant::now() + SHARE * began.elapsed());
        Ok(true)
    }
}

/// Returns the files in the folder of a run and in the folder of its samples, sorted by path.
fn file_states(dir: &Path) -> Vec<FileState> {
    let entries = [dir.to_path_buf(), dir.join(SAMPLES)].into_iter().flat_map(std::fs::read_dir).flatten().flatten();
    let state = |entry: std::fs::DirEntry| {
        let meta = entry.metadata().ok()?;
        Some((entry.path(), meta.len(), meta.modified().ok()))
    };
    let mut files: Vec<FileState> = entries.filter_map(state).collect();
    files.sort_unstable();
    files
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlhf::report::read::Outcome;
    use rlhf::run::FolderLock;
    use std::fs;

    #[test]
    fn a_run_is_read_again_when_a_file_has_changed_and_its_last_state_stays_when_it_cannot_be() {
        let dir = tempfile::tempdir().unwrap();
        let metrics = dir.path().join("metrics.jsonl");
        fs::write(&metrics, "{\"step\":1,\"loss\":2}\n").unwrap();
        let mut live = LiveRun::open(dir.path()).unwrap();
        let refresh = |live: &mut LiveRun| {
            live.due = Instant::now();
            live.refresh().map_err(|error| error.to_string())
        };
        assert_eq!(refresh(&mut live), Ok(false));
        fs::write(&metrics, "{\"step\":1,\"loss\":2}\n{\"step\":2,\"loss\":1}\n").unwrap();
        assert_eq!(live.refresh().ok(), Some(false), "the last look was just now");
        assert_eq!((refresh(&mut live), live.run.updates), (Ok(true), 2.0));
        fs::create_dir(dir.path().join(SAMPLES)).unwrap();
        fs::write(dir.path().join(SAMPLES).join("update-000002.jsonl"), "").unwrap();
        assert_eq!((refresh(&mut live), refresh(&mut live)), (Ok(true), Ok(false)));
        let lock = FolderLock::acquire(dir.path()).unwrap();
        assert_eq!((refresh(&mut live), live.run.outcome), (Ok(true), Outcome::Running));
        drop(lock);
        assert_eq!((refresh(&mut live), live.run.outcome), (Ok(true), Outcome::Interrupted), "its process has ended");
        fs::remove_file(&metrics).unwrap();
        let error = refresh(&mut live).unwrap_err();
        assert!(error.contains("found no metrics.jsonl in it") && live.run.updates == 2.0, "{error}");
        fs::write(&metrics, "").unwrap();
        assert_eq!((refresh(&mut live), live.run.updates), (Ok(true), 0.0), "another run has replaced it");
    }
}
