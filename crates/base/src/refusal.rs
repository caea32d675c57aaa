//! A setting that is refused: its name, where the user wrote it, and why.

use std::fmt;
use std::path::PathBuf;

/// The place where a setting was written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Origin {
    /// Nowhere: a default, a value of a preset, or code that makes the settings.
    #[default]
    Unset,
    /// A flag of the command line.
    Flag,
    /// A line of a configuration file, counted from 1.
    Line {
        /// The file.
        path: PathBuf,
        /// The line.
        line: u64,
    },
    /// An argument of a class of the Python package.
    Python,
}

/// Why a setting is refused.
#[derive(Clone, PartialEq, Eq)]
pub struct Refusal {
    setting: Option<String>,
    other: Option<String>,
    origin: Origin,
    message: String,
    /// Whether the message begins with the setting's name. It may also begin with a name such as `reward` as an English word.
    is_named: bool,
}

impl Refusal {
    /// Refuses the setting `name`, which is to be changed or removed. `rest` follows the name in the message: " = 3: expected 2".
    pub fn new(name: impl Into<String>, rest: impl fmt::Display) -> Self {
        let name = name.into();
        let message = format!("{name}{rest}");
        // A product of settings is not a setting.
        let is_name = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        Self { setting: is_name.then_some(name), other: None, origin: Origin::Unset, message, is_named: is_name }
    }

    /// A refusal that is not about a single setting.
    pub fn general(message: impl Into<String>) -> Self {
        Self { setting: None, other: None, origin: Origin::Unset, message: message.into(), is_named: false }
    }

    /// A refusal of `setting`, if there is one, with a whole line as its message.
    pub(crate) fn of_setting(setting: Option<&str>, line: impl Into<String>) -> Self {
        let line: String = line.into();
        let rest = setting.and_then(|setting| line.strip_prefix(setting));
        let is_named = rest.is_some_and(|rest| rest.starts_with(" = ") || rest.starts_with(": "));
        Self { setting: setting.map(String::from), is_named, ..Self::general(line) }
    }

    /// The same refusal of one of two settings that exclude each other: either may be removed.
    #[must_use]
    pub fn or_of(self, other: impl Into<String>) -> Self {
        Self { other: Some(other.into()), ..self }
    }

    /// The same refusal in other words.
    #[must_use]
    pub fn map_message(self, words: impl FnOnce(String) -> String) -> Self {
        Self { message: words(self.message), ..self }
    }

    /// The same refusal of a setting that the user wrote as `name`, at `origin`.
    #[must_use]
    pub fn written(self, name: &str, origin: Origin) -> Self {
        self.named(name).at(origin)
    }

    /// The same refusal of a setting that the user wrote as `name`.
    #[must_use]
    pub(crate) fn named(self, name: &str) -> Self {
        let message = self.rest().map(|rest| format!("{name}{rest}"));
        let message = message.unwrap_or(self.message);
        Self { message, ..self }
    }

    /// The same refusal of a setting that was written at `origin`.
    #[must_use]
    pub(crate) fn at(self, origin: Origin) -> Self {
        Self { origin, ..self }
    }

    /// The setting to change or to remove, by its own name; `None` if the refusal is not about a single setting.
    pub fn setting(&self) -> Option<&str> {
        self.setting.as_deref()
    }

    /// The settings to change or to remove: [`Refusal::setting`], and the second of two that exclude each other.
    pub fn settings(&self) -> impl Iterator<Item = &str> {
        self.setting.iter().chain(&self.other).map(String::as_str)
    }

    /// The second of two settings that exclude each other.
    pub(crate) fn other(&self) -> Option<&str> {
        self.other.as_deref()
    }

    /// The place where the setting was written.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The reason, in one line that begins with the setting as the user wrote it.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The reason without the setting at its start.
    pub fn reason(&self) -> &str {
        self.rest().unwrap_or(&self.message)
    }

    /// The message after the setting; none if it does not begin with the setting's own name.
    fn rest(&self) -> Option<&str> {
        let rest = self.message.strip_prefix(self.setting.as_deref()?).filter(|_| self.is_named)?;
        let is_longer_name = rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
        (!is_longer_name).then_some(rest)
    }
}

/// One line: the place if the setting is from a file, and the message.
impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Origin::Line { path, line } => write!(f, "{}:{line}: {}", path.display(), self.message),
            Origin::Unset | Origin::Flag | Origin::Python => f.write_str(&self.message),
        }
    }
}

/// Prints the line, as [`crate::Error`] does.
impl fmt::Debug for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_its_setting_and_the_place_where_it_was_written() {
        let refusal = Refusal::new("kl_coef", " = -1: expected more");
        assert_eq!((refusal.setting(), refusal.reason()), (Some("kl_coef"), " = -1: expected more"));
        assert_eq!(refusal.to_string(), "kl_coef = -1: expected more");
        let flag = refusal.clone().written("beta", Origin::Flag);
        assert_eq!((flag.to_string().as_str(), flag.setting()), ("beta = -1: expected more", Some("kl_coef")));
        let line = refusal.written("beta", Origin::Line { path: "run.yaml".into(), line: 3 });
        assert_eq!(line.to_string(), "run.yaml:3: beta = -1: expected more");
        assert_eq!(line.message(), "beta = -1: expected more");
    }

    #[test]
    fn the_reason_follows_the_setting_in_any_words() {
        let refusal = Refusal::new("value_lora_r", " is given, and there is no value model");
        assert_eq!(refusal.reason(), " is given, and there is no value model");
        let named = refusal.written("critic_lora_dim", Origin::Flag);
        assert_eq!(named.message(), "critic_lora_dim is given, and there is no value model");
        // A whole line may begin with the name as an English word, and a renamed line with a longer name.
        let line = Refusal::of_setting(Some("reward"), "reward models differ");
        assert_eq!(
            (line.reason(), line.clone().named("x").message()),
            ("reward models differ", "reward models differ")
        );
        let renamed = Refusal::new("reward", " = x").map_message(|_| "reward_funcs = x".into());
        assert_eq!(renamed.named("reward_model").message(), "reward_funcs = x");
    }

    #[test]
    fn two_settings_that_exclude_each_other_are_both_of_the_refusal() {
        let refusal =
            Refusal::new("stop_token", " = eos and stop_token_id = 3 exclude each other").or_of("stop_token_id");
        assert_eq!(refusal.settings().collect::<Vec<_>>(), ["stop_token", "stop_token_id"]);
        assert_eq!(Refusal::general("no reward").settings().count(), 0);
    }
}
