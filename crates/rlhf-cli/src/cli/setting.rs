//! One setting of a configuration file, of a preset, or of another system's flag.

use clap::Command;

/// A setting, by the name of its flag; no values stand for `null`.
#[derive(Debug, Clone)]
pub(super) struct Setting {
    pub(super) key: String,
    /// Line of the configuration file; 0 if the setting is not from a file.
    pub(super) line: u64,
    pub(super) values: Vec<String>,
}

impl Setting {
    /// Returns a setting that is not from a file.
    pub(super) fn new(key: &str, values: Vec<String>) -> Self {
        Self { key: key.into(), line: 0, values }
    }
}

/// Makes the settings of all `layers` the defaults of their flags; later layers win.
pub(super) fn with_defaults(command: Command, layers: &[&[Setting]]) -> Command {
    layers.iter().copied().flatten().cloned().fold(command, set_default)
}

/// Makes the values of a setting the default of its flag, which is then not required.
pub(super) fn set_default(command: Command, setting: Setting) -> Command {
    command.mut_arg(setting.key, |arg| arg.required(false).default_values(setting.values))
}
