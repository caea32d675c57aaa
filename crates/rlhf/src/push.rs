//! `rlhf push`: uploads the model in a folder to the hub.

use crate::hub::push::{Destination, Pushed, open_folder};
use crate::run::push::is_pushed;
use crate::run::push::settings::hub_with;
use crate::settings::PushConfig;
use crate::{Error, Result};
use std::path::Path;

/// Outcome of `rlhf push`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PushReport {
    /// The commit, and the files in it.
    pub pushed: Pushed,
    /// Address of the commit.
    pub url: String,
    /// Files and folders of the folder that are not part of a model, and were left out.
    pub left_out: Vec<String>,
}

/// Uploads the model in `config.folder` to the repository `config.name`, in one commit: weights, configuration, tokenizer, card, and
/// other files, but no state of a run. `shows` a progress bar for each large file.
///
/// # Errors
/// If the folder has no model or a link to a file outside of it; if the hub refuses the upload, or cannot be reached. The same call
/// continues an upload that was cut.
pub fn push(config: &PushConfig, shows: bool) -> Result<PushReport> {
    config.check()?;
    let dir = config.folder.as_path();
    if !["config.json", "adapter_config.json"].iter().any(|name| dir.join(name).is_file()) {
        let found = match (dir.is_dir(), dir.exists()) {
            (true, _) => "a folder without one",
            (false, true) => "a file",
            (false, false) => "no such folder",
        };
        let message = format!("expected the folder of a model (config.json or adapter_config.json), found {found}");
        return Err(Error::invalid(dir, message));
    }
    let files = open_folder(dir, &is_pushed)?;
    let left_out = left_out(dir)?;
    let (name, revision) = (config.name.clone(), config.revision.clone());
    let to = Destination { name, revision, private: config.private.then_some(true) };
    let repository = hub_with(config.hub_token.as_ref()).repository(&to)?;
    let pushed = repository.push(&files, config.commit_message.trim(), shows)?;
    let url = repository.commit_url(&pushed.commit);
    Ok(PushReport { pushed, url, left_out })
}

/// Lists what of the folder `dir` is not uploaded, beside hidden files.
fn left_out(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(Error::io("read the folder", dir))? {
        let name = entry.map_err(Error::io("read the folder", dir))?.file_name().to_string_lossy().into_owned();
        if !is_pushed(&name) && !name.starts_with('.') {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}
