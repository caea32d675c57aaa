//! Settings of `rlhf push`.

use std::path::PathBuf;

use serde::Serialize;

use crate::run::push::settings::{HubToken, check_branch};
use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{HUB, Settings, all, defaults, expect};
use rlhf_hub::is_hub_name;

/// Title of the commit.
const COMMIT_MESSAGE: &str = "Upload model by rlhf";

/// Settings of `rlhf push`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct PushConfig {
    /// Folder of the model: a run's output folder, its `best`, a checkpoint, or any folder in Hugging Face format.
    #[setting(positional, value_name = "FOLDER")]
    pub folder: PathBuf,
    /// Repository to push to, such as me/my-model; created if it does not exist.
    #[setting(positional, value_name = "NAME")]
    pub name: String,
    /// Make the repository private if it is new; a public one is then refused.
    #[setting(heading = HUB, short = "make a new repository private")]
    pub private: bool,
    /// Push these files too, beside those of the model: patterns of paths in FOLDER, such as "*.txt" or "onnx/*"; hidden files are never
    /// pushed.
    #[setting(heading = HUB, value_name = "GLOB", several)]
    pub include: Vec<String>,
    /// Leave these files out: patterns as in `--include`.
    #[setting(heading = HUB, value_name = "GLOB", several)]
    pub exclude: Vec<String>,
    /// Branch to push to, created if it does not exist [default: main].
    #[setting(heading = HUB, short = "branch to push to [main]")]
    pub revision: Option<String>,
    /// Title of the commit.
    #[setting(heading = HUB, default = COMMIT_MESSAGE, short = "title of the commit")]
    pub commit_message: String,
    /// Access token with write access [default: HF_TOKEN, which no list of processes shows].
    #[setting(alias = "token", heading = HUB)]
    #[serde(skip)]
    pub hub_token: Option<HubToken>,
}

impl PushConfig {
    /// Creates a configuration with every default, for this folder and this repository.
    pub fn new(folder: impl Into<PathBuf>, name: impl Into<String>) -> Self {
        Self { folder: folder.into(), name: name.into(), ..defaults() }
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        let title = self.commit_message.trim();
        all([
            expect(is_hub_name(&self.name), name_of!(self.name), &self.name, "a name on the hub, such as me/my-model"),
            check_branch(name_of!(self.revision), self.revision.as_ref()),
            expect(!title.is_empty(), name_of!(self.commit_message), &self.commit_message, "some text"),
        ])
    }
}
