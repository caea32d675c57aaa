//! The names of settings that `rlhf grpo` and `rlhf rloo` show: TRL's.

use rlhf::run::group_names::{GROUP_NAMES, MODEL, POLICY};
use rlhf::schema::{Refusals, renamed};
use rlhf::settings::Preset;

/// The presets that are commands.
pub(super) const PRESETS: [Preset; 2] = [Preset::Grpo, Preset::Rloo];

/// The names in checks and help texts, each with the name that the commands show: [`GROUP_NAMES`], and the model to train.
pub(super) const NAMES: [(&str, &str); GROUP_NAMES.len() + 1] = {
    let mut names = [(POLICY, MODEL); GROUP_NAMES.len() + 1];
    let mut at = 0;
    while at < GROUP_NAMES.len() {
        names[at] = GROUP_NAMES[at];
        at += 1;
    }
    names
};

/// Returns `text` with settings named as by the commands of [`PRESETS`], except for the word `kept`.
pub(super) fn renamed_in(text: &str, kept: &str) -> String {
    let quoted = format!("`{kept}`");
    match text.split_once(&quoted) {
        Some((before, after)) => format!("{before}{quoted}{}", renamed(after, &NAMES)),
        None => renamed(text, &NAMES),
    }
}

/// Makes `refusals` name settings as the commands of [`PRESETS`] do.
pub(super) fn rename(refusals: &mut Refusals) {
    refusals.rename(&NAMES);
}

/// Returns true for the commands of [`PRESETS`].
pub(super) fn has(command: &str) -> bool {
    PRESETS.iter().any(|preset| preset.command() == command)
}
