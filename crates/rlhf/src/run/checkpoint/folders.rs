//! The folders of checkpoints and of the best model in `output_dir`: their names, and how each is created and removed by one rename.

use super::{BEST, BEST_FILE};
use rlhf_base::weights::sync;
use rlhf_base::{Error, Result};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Prefix of a checkpoint's folder; the number of updates follows.
pub(super) const PREFIX: &str = "checkpoint-";
/// Prefix of a folder's name while it is written.
const WRITING: &str = ".saving-";
/// Prefix of a folder's name while it is removed.
const LEAVING: &str = ".removing-";

/// Creates the folder `dir/name` with the files that `write` writes to the folder that it gets: all of them, or none.
///
/// It is written under another name, flushed to the disk and renamed. An older folder of the name is renamed just before, and
/// removed after.
pub(crate) fn commit(dir: &Path, name: &str, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    clear(dir)?;
    replace(dir, name, write)
}

/// [`commit`] in a folder that may have folders of other processes. Only leftovers of this name of a killed process are removed, or get the
/// name back.
pub(crate) fn commit_among_others(dir: &Path, name: &str, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let (writing, old) = (dir.join(format!("{WRITING}{name}")), dir.join(format!("{LEAVING}{name}")));
    if writing.is_dir() {
        fs::remove_dir_all(&writing).map_err(Error::io("remove", &writing))?;
    }
    if old.is_dir() && dir.join(name).exists() {
        fs::remove_dir_all(&old).map_err(Error::io("remove", &old))?;
    } else if old.is_dir() {
        fs::rename(&old, dir.join(name)).map_err(Error::io("rename", &old))?;
    }
    replace(dir, name, write)
}

/// Writes the folder `dir/name` under another name, and renames it.
fn replace(dir: &Path, name: &str, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let (writing, place) = (dir.join(format!("{WRITING}{name}")), dir.join(name));
    fs::create_dir(&writing).map_err(Error::io("create the folder", &writing))?;
    if let Err(error) = write(&writing).and_then(|()| sync(&writing)) {
        // The disk may be full.
        let _ = fs::remove_dir_all(&writing);
        return Err(error);
    }
    let old = dir.join(format!("{LEAVING}{name}"));
    if place.exists() {
        fs::rename(&place, &old).map_err(Error::io("rename", &place))?;
    }
    fs::rename(&writing, &place).map_err(Error::io("write", &place))?;
    fs::File::open(dir).and_then(|dir| dir.sync_all()).map_err(Error::io("write to the disk", dir))?;
    // `clear` removes it if this fails.
    let _ = fs::remove_dir_all(&old);
    Ok(())
}

/// Removes the folder `dir/name`, after a rename, so that no incomplete folder has its name.
pub(super) fn remove(dir: &Path, name: &str) -> Result<()> {
    let (place, old) = (dir.join(name), dir.join(format!("{LEAVING}{name}")));
    fs::rename(&place, &old).map_err(Error::io("remove", &place))?;
    let _ = fs::remove_dir_all(&old);
    Ok(())
}

/// Removes the folders that a killed run left in `dir` while it wrote or removed them. A best model that was not replaced yet gets
/// its name back.
///
/// # Errors
/// If a folder that was being written cannot be removed.
pub(crate) fn clear(dir: &Path) -> Result<()> {
    for name in names(dir)? {
        let path = dir.join(&name);
        if name.starts_with(WRITING) {
            fs::remove_dir_all(&path).map_err(Error::io("remove", &path))?;
        } else if name.strip_prefix(LEAVING) == Some(BEST) && !dir.join(BEST).exists() {
            fs::rename(&path, dir.join(BEST)).map_err(Error::io("rename", &path))?;
        } else if name.starts_with(LEAVING) {
            // The next save tries again.
            let _ = fs::remove_dir_all(&path);
        }
    }
    Ok(())
}

/// Returns the folders in `dir` that have the name of a checkpoint or of the best model, with any contents.
pub(crate) fn places(dir: &Path) -> Result<Vec<PathBuf>> {
    let best = dir.join(BEST);
    let checkpoints = numbered(dir)?.into_iter().map(|number| dir.join(name_of(number)));
    Ok(checkpoints.chain(best.is_dir().then_some(best)).collect())
}

/// Returns the folders of checkpoints and of the best model in `dir`.
pub(crate) fn folders(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut folders = places(dir)?;
    folders.retain(|folder| !folder.ends_with(BEST) || folder.join(BEST_FILE).is_file());
    Ok(folders)
}

/// Returns the newest checkpoint in `dir`.
pub(crate) fn newest(dir: &Path) -> Option<PathBuf> {
    Some(dir.join(name_of(numbered(dir).ok()?.pop()?)))
}

/// Returns whether there is a checkpoint in `dir`, complete or not.
pub fn has_checkpoint(dir: &Path) -> bool {
    newest(dir).is_some()
}

/// Returns the name of the folder of the checkpoint after `number` updates.
pub(crate) fn name_of(number: usize) -> String {
    format!("{PREFIX}{number}")
}

/// Returns the numbers of the checkpoints in `dir`, in ascending order.
pub(crate) fn numbered(dir: &Path) -> Result<Vec<usize>> {
    let number = |name: &String| name.strip_prefix(PREFIX)?.parse().ok().filter(|number| name_of(*number) == *name);
    let mut numbers: Vec<usize> = names(dir)?.iter().filter_map(number).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// Returns the names of the folders in `dir`; none if there is no `dir`.
pub(super) fn names(dir: &Path) -> Result<Vec<String>> {
    if !dir.is_dir() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(dir).map_err(Error::io("read the folder", dir))?;
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(Error::io("read the folder", dir))?;
        if entry.path().is_dir() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Ok(names)
}

/// Adds every file below `dir` with its size to `files`. Its name there is its path with the prefix `below`.
pub(super) fn sizes(dir: &Path, below: &str, files: &mut BTreeMap<String, u64>) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(Error::io("read the folder", dir))? {
        let entry = entry.map_err(Error::io("read the folder", dir))?;
        let name = format!("{below}{}", entry.file_name().to_string_lossy());
        let meta = fs::metadata(entry.path()).map_err(Error::io("read", entry.path()))?;
        if meta.is_dir() {
            sizes(&entry.path(), &format!("{name}/"), files)?;
        } else {
            files.insert(name, meta.len());
        }
    }
    Ok(())
}
