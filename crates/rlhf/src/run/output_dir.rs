//! The output folder of a run: its lock, its contents, and the files that a run may overwrite.

use crate::run::checkpoint::{self, RunSettings};
pub use crate::run::resolved::CONFIG;
pub(crate) use crate::run::resolved::{METRICS, resolved_settings};
use crate::run::resolved::{RESOLVED, is_of_run, resolved_without_programs, write_resolved};
use crate::run::settings::{Resume, RunConfig};
use crate::run::start::Start;
use crate::run::tensorboard;
use rlhf_base::files;
use rlhf_base::weights::{STAGING, read_json, write_text};
use rlhf_base::{Error, Result};
use rlhf_lm::model::{AdapterFolder, BASE_MODEL};
use rlhf_lm::tokenizer::{FURTHER_TEMPLATES, further_templates};
use serde::Serialize;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The file with the length and the start of a run. The length is `num_updates`, the updates of the whole run, which the settings may not
/// tell.
pub(crate) const RUN_LENGTH: &str = "run.json";

/// The file of a run's alarms: one JSON object per line.
pub(crate) const ALARMS: &str = "alarms.jsonl";

/// The folder of a run's responses, with a file for each evaluation and each table of samples.
pub const SAMPLES: &str = "samples";

/// The file with the ids of a run in trackers.
pub(crate) const TRACKERS: &str = "trackers.json";

/// The report of a run, a page of HTML.
pub(crate) const REPORT: &str = "report.html";

/// The file with the output that tools and environments print.
pub(crate) const TOOLS_LOG: &str = "tools.log";

/// The folder of a run's rollouts, with a Parquet file for each update.
pub(crate) const ROLLOUTS: &str = "rollouts";

/// Names of the files in a run's folder, except the files of the tokenizer, of shards and of TensorBoard, and those only in checkpoints.
const RUN_FILES: [&str; 14] = [
    TOOLS_LOG,
    METRICS,
    TRACKERS,
    RUN_LENGTH,
    REPORT,
    ALARMS,
    CONFIG,
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "README.md",
    "adapter_config.json",
    "adapter_model.safetensors",
];

/// Returns whether the folder `dir` holds a run: a `config.yaml` that a run, and not a user, wrote or started to write.
pub(crate) fn holds_run(dir: &Path) -> bool {
    files::read(&dir.join(CONFIG)).is_ok_and(|text| is_resolved(&text))
}

/// Returns whether a run wrote this `config.yaml`, or started to.
fn is_resolved(text: &[u8]) -> bool {
    let header = RESOLVED.as_bytes();
    text.starts_with(header) || header.starts_with(text)
}

/// Folder of the reference model in a checkpoint, if it is updated from the policy.
pub(crate) const REFERENCE: &str = "reference";

/// Folders of models in a run's folder, inner ones first.
const INNER: [&str; 5] = [BASE_MODEL, "ema/base_model", "ema", "value_model/base_model", "value_model"];

/// Returns whether `path` has nothing but leftovers of a run that was killed before its `config.yaml` was in place.
fn is_leftover(path: &Path) -> bool {
    let Some(name) = path.file_name().map(|name| name.to_string_lossy()) else { return false };
    let holds_leftovers = || {
        std::fs::read_dir(path)
            .is_ok_and(|mut entries| entries.all(|entry| entry.is_ok_and(|entry| is_leftover(&entry.path()))))
    };
    if path.is_dir() {
        let may_hold = name == SAMPLES || name == ROLLOUTS || INNER.iter().any(|inner| path.ends_with(inner));
        return name == STAGING || may_hold && holds_leftovers();
    }
    if name == format!("{CONFIG}.tmp") {
        return std::fs::read(path).is_ok_and(|text| is_resolved(&text));
    }
    let is_samples_file = name.ends_with(".tmp") && samples_update(&name).or(rollout_update(&name)).is_some();
    let is_jsonl_file = [METRICS, ALARMS].iter().any(|file| name == format!("{file}.tmp"));
    is_samples_file || is_jsonl_file || name == tensorboard::TEMPORARY
}

/// Returns whether a run writes files of this name: `overwrite_output_dir` removes no others.
pub(crate) fn is_run_file(name: &str) -> bool {
    if name == tensorboard::TEMPORARY {
        return true;
    }
    let name = name.strip_suffix(".tmp").unwrap_or(name);
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let shard = name
        .strip_prefix("model-")
        .and_then(|rest| rest.strip_suffix(".safetensors"))
        .and_then(|rest| rest.split_once("-of-"))
        .is_some_and(|(part, parts)| digits(part) && digits(parts));
    shard
        || RUN_FILES.contains(&name)
        || checkpoint::FILES.contains(&name)
        || rlhf_lm::tokenizer::FILES.contains(&name)
        || name.starts_with(tensorboard::PREFIX)
}

/// Returns the paths of the files in a run's folder that belong to its models: weights, tokenizer, model card, settings; also those of
/// the value model, the moving average and the bases of adapters. Settings with secrets are left out.
pub(crate) fn model_files(dir: &Path) -> Vec<String> {
    let others = [METRICS, TRACKERS, RUN_LENGTH, REPORT, ALARMS, TOOLS_LOG];
    let is_of_model = |name: &str| {
        is_run_file(name)
            && !others.contains(&name)
            && !checkpoint::FILES.contains(&name)
            && !name.starts_with(tensorboard::PREFIX)
            && name != tensorboard::TEMPORARY
            && !name.ends_with(".tmp")
    };
    let is_public = |path: &str| {
        path != CONFIG
            || files::read(&dir.join(path))
                .is_ok_and(|text| is_of_run(&text) && resolved_without_programs(&text) == Ok(None))
    };
    let mut paths = Vec::new();
    for folder in INNER.iter().copied().chain([""]) {
        let entries = std::fs::read_dir(dir.join(folder)).into_iter().flatten().flatten();
        let names = entries
            .filter(|entry| entry.path().is_file())
            .map(|entry| entry.file_name().to_string_lossy().into_owned());
        let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let templates = further_templates(&dir.join(folder));
        paths.extend(names.filter(|name| is_of_model(name)).chain(templates).map(|name| format!("{prefix}{name}")));
    }
    paths.retain(|path| is_public(path));
    paths.sort_unstable();
    paths
}

/// Checks that a run may write to `run.output_dir`, before anything slow. Changes nothing.
///
/// # Errors
/// If one of the run's `inputs` is the folder or lies in it; if the folder is not empty without `overwrite_output_dir`, or holds
/// anything but a run with it. A run that is resumed in place may find its own files.
pub(crate) fn check_output_dir(run: &RunConfig, start: &Start, inputs: &[&Path]) -> Result<()> {
    if start.in_place {
        return check_inputs(&run.output_dir, inputs);
    }
    let dir = run.output_dir.as_path();
    let overwrite = may_overwrite(run, start);
    if !overwrite && run.checkpoints.resume_from_checkpoint == Some(Resume::Latest) && holds_run(dir) {
        return Err(Error::invalid(
            dir,
            "output_dir: found a run in it that is finished, and no checkpoint to resume from; choose another folder, or \
             set --overwrite_output_dir to replace it",
        ));
    }
    let inputs: Vec<&Path> = inputs.iter().copied().chain(start.input()).collect();
    check_inputs(dir, &inputs)?;
    check_contents(dir, overwrite, RESUME)
}

/// Returns whether the files of a run in `run.output_dir` may be removed.
fn may_overwrite(run: &RunConfig, start: &Start) -> bool {
    run.overwrite_output_dir || (start.replaces && holds_run(&run.output_dir))
}

/// Checks the output folder of a command that is no training run, as [`check_output_dir`] does.
pub(crate) fn check_folder(dir: &Path, overwrite: bool, inputs: &[&Path]) -> Result<()> {
    check_inputs(dir, inputs)?;
    check_contents(dir, overwrite, "")
}

/// Checks that none of the `inputs` is the folder `dir` or lies in it.
fn check_inputs(dir: &Path, inputs: &[&Path]) -> Result<()> {
    let whole = dir.canonicalize().ok();
    let inside =
        |input: &Path| input.canonicalize().is_ok_and(|input| whole.as_ref().is_some_and(|d| input.starts_with(d)));
    let base = |input: &&Path| AdapterFolder::find(input).ok().flatten()?.local_base();
    let bases: Vec<PathBuf> = inputs.iter().filter_map(base).collect();
    let mut inputs = inputs.iter().copied().chain(bases.iter().map(PathBuf::as_path));
    if let Some(input) = inputs.find(|input| inside(input)) {
        let rest = format!(" = {} holds what the run reads: {}", dir.display(), input.display());
        return Err(Error::refused("output_dir", rest));
    }
    Ok(())
}

/// The text in errors that tells how a training run can continue the run in its folder instead of replacing it.
const RESUME: &str = " --resume_from_checkpoint to resume the run, or";

/// Checks that the folder `dir` is empty or new, or holds a run that may be overwritten. `instead` is [`RESUME`], or empty for a command
/// that resumes none.
fn check_contents(dir: &Path, overwrite: bool, instead: &str) -> Result<()> {
    if dir.is_file() {
        return Err(Error::invalid(dir, "output_dir: expected a folder or nothing, found a file"));
    }
    if !dir.is_dir() {
        return Ok(());
    }
    let mut entries = std::fs::read_dir(dir).map_err(Error::io("read the folder", dir))?;
    let entry = entries.find(|entry| entry.as_ref().map_or(true, |entry| !is_leftover(&entry.path())));
    let Some(entry) = entry else { return Ok(()) };
    let name = entry.map_err(Error::io("read the folder", dir))?.file_name();
    let name = name.to_string_lossy();
    match (overwrite, holds_run(dir)) {
        (true, true) => Ok(()),
        (true, false) => Err(Error::invalid(
            dir,
            format!("overwrite_output_dir: expected a folder with a run (its {CONFIG}), found `{name}` and no run"),
        )),
        (false, true) => Err(Error::invalid(
            dir,
            format!(
                "output_dir: expected an empty or new folder, found a run in it; choose another folder, or \
                 set{instead} --overwrite_output_dir to replace it"
            ),
        )),
        (false, false) => Err(Error::invalid(
            dir,
            format!("output_dir: expected an empty or new folder, found `{name}` in it; choose another folder"),
        )),
    }
}

/// Number of attempts to lock a folder, and the pause after each.
const LOCK_TRIES: usize = 5;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// The lock on a run's folder, which keeps other runs out of it while it lives. The system releases it when the process ends,
/// however it ends.
///
/// It is acquired before the contents of the folder are read, so that no other run changes them afterwards.
#[derive(Debug)]
pub struct FolderLock {
    /// The locked folder; `None` if there was no folder yet.
    folder: Option<File>,
}

/// Returns whether a process of this machine is at work in the folder `dir` and has its [`FolderLock`]; `None` if there is no such
/// folder, or its file system has no locks.
pub fn is_at_work(dir: &Path) -> Option<bool> {
    let folder = File::open(dir).ok()?;
    // Shared, so that others can look at the same time, and released at once; [`FolderLock::acquire`] waits for it.
    match folder.try_lock_shared() {
        Ok(()) => Some(false),
        Err(TryLockError::WouldBlock) => Some(true),
        Err(TryLockError::Error(_)) => None,
    }
}

impl FolderLock {
    /// Locks the folder `dir`, if there is one.
    ///
    /// # Errors
    /// If another run has the lock, or the folder cannot be opened.
    pub fn acquire(dir: &Path) -> Result<Self> {
        if !dir.is_dir() {
            return Ok(Self { folder: None });
        }
        let folder = File::open(dir).map_err(Error::io("read the folder", dir))?;
        for _ in 0..LOCK_TRIES {
            match folder.try_lock() {
                // The lock of `is_at_work` takes microseconds. The lock of a run lasts longer than all attempts.
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
                // Some file systems have no locks. There other runs are not kept out.
                Ok(()) | Err(TryLockError::Error(_)) => return Ok(Self { folder: Some(folder) }),
            }
        }
        Err(Error::invalid(dir, "output_dir: another run is at work in this folder"))
    }

    /// Creates and locks the folder `dir` if there was none before. Returns whether it was created now.
    ///
    /// # Errors
    /// If it cannot be created; if another run has created it meanwhile and has the lock, or has ended in it and may not be
    /// replaced.
    pub(crate) fn create(self, dir: &Path, overwrite: bool) -> Result<(Self, bool)> {
        if self.folder.is_some() {
            return Ok((self, false));
        }
        std::fs::create_dir_all(dir).map_err(Error::io("create the folder", dir))?;
        let lock = Self::acquire(dir)?;
        if !overwrite && holds_run(dir) {
            let message = "output_dir: another run has begun in this folder since this one was started; choose another \
                           folder, or start this one again";
            return Err(Error::invalid(dir, message));
        }
        Ok((lock, true))
    }
}

/// Claims `run.output_dir` for this run when it is ready to start: removes an old run's files if it may, and writes the resolved
/// configuration, which a run that is resumed in place has already. The `lock` was acquired before `start` was found. Returns notes
/// on folders of the user that were renamed.
///
/// # Errors
/// As [`check_output_dir`]; if another run created the folder first; if a file cannot be removed or written.
pub(crate) fn claim_output_dir(
    run: &RunConfig,
    start: &Start,
    lock: FolderLock,
    resolved: &impl RunSettings,
) -> Result<(FolderLock, Vec<String>)> {
    let dir = run.output_dir.as_path();
    if start.in_place {
        if start.extends(resolved)? && dir.join(CONFIG).is_file() {
            write_resolved(resolved, dir.join(CONFIG))?;
        }
        return Ok((lock, Vec::new()));
    }
    check_contents(dir, may_overwrite(run, start), RESUME)?;
    let (lock, created) = lock.create(dir, run.overwrite_output_dir)?;
    // If the folder was created just now, `start` was found before it existed.
    let overwrite = if created { run.overwrite_output_dir } else { may_overwrite(run, start) };
    check_contents(dir, overwrite, RESUME)?;
    remove_run(dir)?;
    let notes = set_aside(dir)?;
    write_settings(dir, resolved)?;
    Ok((lock, notes))
}

/// Writes the number of updates of the whole run to its folder `dir`, for readers of a run in progress.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn write_length(dir: &Path, num_updates: usize) -> Result<()> {
    // A resumed run keeps the start of its first part.
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let began = read_start(dir).unwrap_or_else(now);
    write_text(&dir.join(RUN_LENGTH), &format!("{{\"num_updates\": {num_updates}, \"began\": {began}}}\n"))
}

/// Returns the seconds from 1970 in UTC to the start of the run in `dir`, as [`write_length`] wrote them.
pub(crate) fn read_start(dir: &Path) -> Option<u64> {
    read_json(&dir.join(RUN_LENGTH)).ok()?["began"].as_u64()
}

/// Returns the number that [`write_length`] wrote; `None` for a damaged file.
pub(crate) fn read_length(dir: &Path) -> Option<u64> {
    read_json(&dir.join(RUN_LENGTH)).ok()?["num_updates"].as_u64()
}

/// Claims the output folder of a command that is no training run, as [`claim_output_dir`] does.
pub(crate) fn claim_folder(dir: &Path, overwrite: bool, resolved: &impl Serialize) -> Result<FolderLock> {
    check_contents(dir, overwrite, "")?;
    claim_locked(dir, FolderLock::acquire(dir)?, overwrite, resolved)
}

/// As [`claim_folder`], with the `lock` that was acquired before the folder was looked into.
pub(crate) fn claim_locked(
    dir: &Path,
    lock: FolderLock,
    overwrite: bool,
    resolved: &impl Serialize,
) -> Result<FolderLock> {
    let (lock, _) = lock.create(dir, overwrite)?;
    check_contents(dir, overwrite, "")?;
    remove_run(dir)?;
    write_settings(dir, resolved)?;
    Ok(lock)
}

/// Writes the resolved configuration to the folder `dir`.
///
/// A folder with this file counts as a run's. It is written after everything else, so that a run that is killed before can start again.
fn write_settings(dir: &Path, resolved: &impl Serialize) -> Result<()> {
    write_resolved(resolved, dir.join(CONFIG))
}

/// Renames the folders that still have names of checkpoints or of the best model, because they have files of the user. Returns a note on
/// each.
fn set_aside(dir: &Path) -> Result<Vec<String>> {
    let renamed = |folder: PathBuf| {
        let renamed_to = |number: usize| {
            let more = if number == 1 { String::new() } else { format!("-{number}") };
            PathBuf::from(format!("{}.old{more}", folder.display()))
        };
        let free = (1..).map(renamed_to).find(|place| !place.exists()).expect("some number is free");
        std::fs::rename(&folder, &free).map_err(Error::io("rename", &folder))?;
        Ok(format!("{} has files that no run wrote: it is renamed to {}", folder.display(), free.display()))
    };
    checkpoint::places(dir)?.into_iter().map(renamed).collect()
}

/// Removes the files of a run in the folder `dir`, except its configuration.
fn remove_run(dir: &Path) -> Result<()> {
    checkpoint::clear(dir)?;
    remove_run_files(dir)?;
    for folder in [SAMPLES, ROLLOUTS].map(|name| dir.join(name)).iter().filter(|folder| folder.is_dir()) {
        remove_files(folder, |name| samples_update(name).or(rollout_update(name)).is_some())?;
        // It stays if it has other files.
        let _ = std::fs::remove_dir(folder);
    }
    let reference_base = format!("{REFERENCE}/{BASE_MODEL}");
    // Only checkpoints have a reference folder: one of this name next to them is the user's.
    let reference_folders = [&reference_base, REFERENCE];
    for folder in checkpoint::folders(dir)? {
        for inner in INNER.into_iter().chain(reference_folders) {
            remove_run_folder(&folder.join(inner))?;
        }
        remove_run_folder(&folder)?;
    }
    INNER.into_iter().try_for_each(|inner| remove_run_folder(&dir.join(inner)))
}

/// Removes a run's files from a folder in its output folder, and the folder itself unless it has other files.
fn remove_run_folder(dir: &Path) -> Result<()> {
    if dir.is_dir() {
        remove_run_files(dir)?;
        let _ = std::fs::remove_dir(dir);
    }
    Ok(())
}

/// Removes the files that a run writes to a folder, except its configuration.
fn remove_run_files(dir: &Path) -> Result<()> {
    // A killed save leaves this folder.
    let staging = dir.join(STAGING);
    if staging.is_dir() {
        std::fs::remove_dir_all(&staging).map_err(Error::io("remove", &staging))?;
    }
    for template in further_templates(dir).iter().map(|path| dir.join(path)) {
        std::fs::remove_file(&template).map_err(Error::io("remove", &template))?;
    }
    // It stays if it has other files.
    let _ = std::fs::remove_dir(dir.join(FURTHER_TEMPLATES));
    remove_files(dir, |name| is_run_file(name) && name != CONFIG)
}

/// Removes the files in `dir` whose names `removed` accepts.
pub(crate) fn remove_files(dir: &Path, removed: impl Fn(&str) -> bool) -> Result<()> {
    for entry in std::fs::read_dir(dir).map_err(Error::io("read the folder", dir))? {
        let entry = entry.map_err(Error::io("read the folder", dir))?;
        if removed(&entry.file_name().to_string_lossy()) && entry.path().is_file() {
            std::fs::remove_file(entry.path()).map_err(Error::io("remove", entry.path()))?;
        }
    }
    Ok(())
}

/// Returns the number of updates in the name of a file in [`SAMPLES`], if a run writes files of such a name.
pub(crate) fn samples_update(name: &str) -> Option<usize> {
    // A kill between writing and renaming leaves a file with this suffix.
    let name = name.strip_suffix(".tmp").unwrap_or(name);
    let number =
        ["update-", "eval-", "answers-"].iter().find_map(|kind| name.strip_prefix(kind))?.strip_suffix(".jsonl")?;
    update_number(number)
}

/// Returns the number of updates in the name of a file in [`ROLLOUTS`], if a run writes files of such a name.
pub(crate) fn rollout_update(name: &str) -> Option<usize> {
    update_number(name.strip_suffix(".tmp").unwrap_or(name).strip_prefix("update-")?.strip_suffix(".parquet")?)
}

/// Parses a number of updates in the name of a file.
fn update_number(digits: &str) -> Option<usize> {
    (digits.len() >= 6 && digits.bytes().all(|byte| byte.is_ascii_digit())).then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::settings::CheckpointConfig;
    use rlhf_base::schema::defaults;

    fn run(dir: &Path, overwrite: bool) -> RunConfig {
        let mut run = RunConfig { output_dir: dir.into(), ..defaults() };
        run.overwrite_output_dir = overwrite;
        run
    }

    fn claim(run: &RunConfig) -> Result<FolderLock> {
        Ok(claim_with_notes(run)?.0)
    }

    fn claim_with_notes(run: &RunConfig) -> Result<(FolderLock, Vec<String>)> {
        let lock = FolderLock::acquire(&run.output_dir)?;
        claim_output_dir(run, &Start::find(run)?, lock, &serde_json::json!({"seed": 1}))
    }

    #[test]
    fn a_folder_with_files_is_refused_unless_it_is_a_run_and_overwriting_is_set() {
        let dir = tempfile::tempdir().unwrap();
        let check = |overwrite| {
            check_output_dir(&run(dir.path(), overwrite), &Start::default(), &[]).map_err(|e| e.to_string())
        };
        check(false).unwrap();
        std::fs::write(dir.path().join("thesis.tex"), "old").unwrap();
        assert!(check(false).unwrap_err().contains("thesis.tex"));
        assert!(check(true).unwrap_err().contains("no run"));
        let config = dir.path().join(CONFIG);
        std::fs::write(&config, "seed: 1\n").unwrap();
        assert!(check(true).unwrap_err().contains("no run"), "a user's config.yaml is no run's");
        std::fs::remove_file(&config).unwrap();
        std::fs::write(&config, RESOLVED).unwrap();
        assert!(check(false).unwrap_err().contains("--resume_from_checkpoint to resume the run, or --overwrite"));
        // A command that is no training run has no such flag.
        let error = check_folder(dir.path(), false, &[]).unwrap_err().to_string();
        assert!(error.ends_with("choose another folder, or set --overwrite_output_dir to replace it"), "{error}");
        check(true).unwrap();
        assert_eq!(std::fs::read_to_string(&config).unwrap(), RESOLVED, "checking changes nothing");
    }

    #[test]
    fn overwriting_removes_the_old_run_and_no_other_file() {
        let dir = tempfile::tempdir().unwrap();
        for folder in
            ["value_model/base_model", "model-backup", "checkpoint-4/value_model", "best", "checkpoint-old", "rollouts"]
                .into_iter()
                .chain(["additional_chat_templates", "checkpoint-4/additional_chat_templates"])
        {
            std::fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        let ours = [
            "value_model/base_model/model.safetensors",
            "metrics.jsonl",
            "run.json",
            "report.html",
            "alarms.jsonl",
            "rollouts/update-000001.parquet",
            "config.yaml",
            "model-00001-of-00002.safetensors",
            "value_model/config.json",
            "checkpoint-4/trainer_state.json",
            "checkpoint-4/value_model/optimizer.safetensors",
            "best/model.safetensors",
            "best/best.json",
            "additional_chat_templates/rag.jinja",
            "checkpoint-4/additional_chat_templates/rag.jinja",
        ];
        let others = [
            "additional_chat_templates/notes.txt",
            "thesis.tex",
            "model-notes.txt",
            "run.yaml",
            "model-backup/config.json",
            "value_model/mine",
            "checkpoint-old/config.json",
            "rollouts/mine.parquet",
        ];
        for name in ours.iter().chain(&others) {
            std::fs::write(dir.path().join(name), if *name == CONFIG { RESOLVED } else { "x" }).unwrap();
        }
        let run = run(dir.path(), true);
        claim(&run).unwrap();
        assert!(!dir.path().join("checkpoint-4").exists() && !dir.path().join("best").exists());
        for name in others {
            assert!(dir.path().join(name).is_file(), "{name}");
        }
        for name in ours.iter().filter(|name| **name != CONFIG) {
            assert!(!dir.path().join(name).exists(), "{name}");
        }
    }

    #[test]
    fn files_of_the_user_in_a_checkpoint_are_kept_from_the_new_run_under_another_name() {
        let dir = tempfile::tempdir().unwrap();
        let files = ["checkpoint-4/notes.txt", "checkpoint-4.old/notes.txt", "best/notes.txt", "config.yaml"];
        for (file, folder) in files.iter().zip(["checkpoint-4", "checkpoint-4.old", "best", ""]) {
            std::fs::create_dir_all(dir.path().join(folder)).unwrap();
            std::fs::write(dir.path().join(file), format!("{RESOLVED}{file}")).unwrap();
        }
        std::fs::write(dir.path().join("checkpoint-4/trainer_state.json"), "{}").unwrap();
        std::fs::create_dir(dir.path().join("reference")).unwrap();
        std::fs::write(dir.path().join("reference/config.json"), "of the user").unwrap();
        // The checkpoint of a run whose reference model is updated from the policy, without files of the user.
        let whole = dir.path().join("checkpoint-8");
        std::fs::create_dir_all(whole.join("reference/base_model")).unwrap();
        for file in ["trainer_state.json", "reference/adapter_config.json", "reference/base_model/model.safetensors"] {
            std::fs::write(whole.join(file), "{}").unwrap();
        }
        let (_lock, notes) = claim_with_notes(&run(dir.path(), true)).unwrap();
        let note = |from: &str, to: &str| {
            let [from, to] = [from, to].map(|name| dir.path().join(name).display().to_string());
            format!("{from} has files that no run wrote: it is renamed to {to}")
        };
        assert_eq!(notes, [note("checkpoint-4", "checkpoint-4.old-2"), note("best", "best.old")]);
        for (place, was) in [("checkpoint-4.old-2", 0), ("checkpoint-4.old", 1), ("best.old", 2)] {
            let text = std::fs::read_to_string(dir.path().join(place).join("notes.txt")).unwrap();
            assert_eq!(text, format!("{RESOLVED}{}", files[was]));
        }
        assert!(!dir.path().join("checkpoint-4.old-2/trainer_state.json").exists() && !whole.exists());
        let config = std::fs::read_to_string(dir.path().join("reference/config.json")).unwrap();
        assert_eq!(config, "of the user", "no run writes a reference model there");
        // A run that is killed before its first checkpoint starts again.
        let resume = CheckpointConfig { resume_from_checkpoint: Some(Resume::Latest), ..defaults() };
        let resumed = Start::find(&RunConfig { checkpoints: resume, ..run(dir.path(), false) }).unwrap();
        assert!(checkpoint::places(dir.path()).unwrap().is_empty() && resumed.replaces);
    }

    #[test]
    fn of_two_runs_on_one_folder_the_second_is_refused_whenever_it_was_checked() {
        let dir = tempfile::tempdir().unwrap();
        let run = run(&dir.path().join("new"), false);
        let out = run.output_dir.as_path();
        let overwriting = RunConfig { overwrite_output_dir: true, ..run.clone() };
        // All three were checked before the folder exists.
        let looked = || (FolderLock::acquire(out).unwrap(), Start::find(&run).unwrap());
        let (first, second, third) = (looked(), looked(), looked());
        let try_claim = |run: &RunConfig, (lock, start): (FolderLock, Start)| {
            claim_output_dir(run, &start, lock, &serde_json::json!({})).map_err(|error| error.to_string())
        };
        let lock = try_claim(&run, first).unwrap();
        let at_work = "another run is at work";
        assert!(try_claim(&run, second).unwrap_err().contains("found a run in it"));
        assert!(try_claim(&overwriting, third).unwrap_err().contains(at_work), "not even with overwrite_output_dir");
        assert_eq!(is_at_work(out), Some(true));
        // A new run is not even checked.
        assert!(FolderLock::acquire(out).unwrap_err().to_string().contains(at_work));
        std::fs::write(out.join("model.safetensors"), "finished").unwrap();
        drop(lock);
        assert_eq!((is_at_work(out), is_at_work(&dir.path().join("none"))), (Some(false), None));
        // A process that looks at the folder at this moment is waited for.
        let look = File::open(out).unwrap();
        look.try_lock_shared().unwrap();
        let looker = std::thread::spawn(move || {
            std::thread::sleep(LOCK_PAUSE);
            drop(look);
        });
        drop(FolderLock::acquire(out).unwrap());
        looker.join().unwrap();
        // A run that has ended meanwhile is not replaced without overwrite_output_dir, not even where a resumed run may replace
        // one without a checkpoint.
        let resuming = |mut run: RunConfig| {
            run.checkpoints.resume_from_checkpoint = Some(Resume::Latest);
            run
        };
        let early = || (FolderLock { folder: None }, Start { replaces: true, ..Start::default() });
        for run in [run.clone(), resuming(run.clone())] {
            let error = try_claim(&run, early()).unwrap_err();
            assert!(error.contains("found a run in it") || error.contains("another run has begun"), "{error}");
        }
        assert_eq!(std::fs::read_to_string(out.join("model.safetensors")).unwrap(), "finished");
        drop(claim(&overwriting).unwrap());
        assert!(!out.join("model.safetensors").exists());
    }

    #[test]
    fn leftovers_of_a_killed_run_without_a_configuration_do_not_forbid_a_folder() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        for folder in
            ["samples", "rollouts", "base_model/.saving", "value_model/base_model/.saving", ".saving/value_model"]
        {
            std::fs::create_dir_all(out.join(folder)).unwrap();
        }
        let resolved = format!("{RESOLVED}1.\nseed:");
        for (name, text) in [
            ("samples/update-000003.jsonl.tmp", "{"),
            ("rollouts/update-000003.parquet.tmp", "PAR1"),
            ("alarms.jsonl.tmp", "{"),
            ("base_model/.saving/model.safetensors", "x"),
            ("config.yaml.tmp", resolved.as_str()),
            ("metrics.jsonl.tmp", "{"),
        ] {
            std::fs::write(out.join(name), text).unwrap();
        }
        let run = run(&out, false);
        drop(claim(&run).unwrap());
        let left: Vec<_> = std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [CONFIG]);
        // Files that may be a user's still do.
        for name in ["config.yaml.tmp", "samples/mine.tmp", "value_model/notes", "README.md.tmp"] {
            let other = dir.path().join(name.replace('/', "-"));
            std::fs::create_dir_all(other.join(name).parent().unwrap()).unwrap();
            std::fs::write(other.join(name), "mine").unwrap();
            let error = check_contents(&other, false, RESUME).unwrap_err().to_string();
            assert!(error.contains("expected an empty or new folder"), "{name}: {error}");
        }
    }

    #[test]
    fn a_run_may_not_write_over_what_it_reads() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("prompts.jsonl"), "{}").unwrap();
        for input in [dir.path().to_path_buf(), dir.path().join("prompts.jsonl")] {
            let run = run(dir.path(), true);
            let error = check_output_dir(&run, &Start::default(), &[&input]).unwrap_err().to_string();
            assert!(error.contains("holds what the run reads"), "{error}");
        }
    }
}
