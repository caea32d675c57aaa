//! The ids of the trackers' runs.

use crate::run::output_dir::TRACKERS;
use rlhf_base::weights::{pretty, read_json, write_text};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The ids of the trackers' runs, in the run's folder: a resumed run continues them.
pub(super) struct Ids {
    path: PathBuf,
    by_name: Mutex<Map<String, Value>>,
}

impl Ids {
    /// Reads the ids of the run in the folder `dir`. There are none if the file is missing or damaged.
    pub(super) fn read(dir: &Path) -> Self {
        let path = dir.join(TRACKERS);
        let saved = if path.is_file() { read_json(&path).ok() } else { None };
        let by_name = Mutex::new(saved.and_then(|ids| ids.as_object().cloned()).unwrap_or_default());
        Self { path, by_name }
    }

    pub(super) fn get(&self, name: &str) -> Option<String> {
        let ids = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        ids.get(name).and_then(Value::as_str).map(String::from)
    }

    /// Writes the id of a tracker's run. It is lost if the file cannot be written: a resumed run then starts another one.
    pub(super) fn set(&self, name: &str, id: &str) {
        let mut ids = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        ids.insert(name.into(), id.into());
        let _ = write_text(&self.path, &pretty(&Value::Object(ids.clone())));
    }
}
