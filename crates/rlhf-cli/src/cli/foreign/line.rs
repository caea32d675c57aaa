//! The flags of other systems that a command line and its file set.

use clap::{ArgMatches, Command};
use rlhf::schema::{Refusals, Setting as _};

use super::super::args::on_line;
use super::super::errors::refusal;
use super::super::setting::Setting;
use super::table::{System, To};

/// A flag of another system that is set.
pub(super) struct ForeignFlag {
    pub(super) system: System,
    pub(super) name: &'static str,
    pub(super) to: To,
    pub(super) values: Vec<String>,
}

impl ForeignFlag {
    /// The value as the user wrote it; `none` if it is empty.
    pub(super) fn shown(&self) -> String {
        match &self.values[..] {
            [] => "none".to_string(),
            [one] if one.is_empty() || ["{}", "[]", "null"].contains(&one.as_str()) => "none".to_string(),
            several => several.join(" "),
        }
    }

    /// The beginning of the value as the user wrote it, for an error.
    pub(super) fn start(&self) -> String {
        self.shown().chars().take(60).collect()
    }

    /// The value as one word in lower case.
    pub(super) fn word(&self) -> String {
        self.shown().to_ascii_lowercase()
    }

    /// Whether the value is true; none if it is neither true nor false. `none` is false.
    pub(super) fn switch(&self) -> Option<bool> {
        let word = self.word();
        if word == "none" { Some(false) } else { bool::read(&word) }
    }

    /// The value as one text.
    pub(super) fn text(&self) -> String {
        self.values.join(" ")
    }
}

/// The command line of a command, and the flags of other systems that it or the file sets.
pub(super) struct Line<'a> {
    pub(super) command: &'a Command,
    pub(super) flags: &'a ArgMatches,
    pub(super) foreign_flags: Vec<ForeignFlag>,
}

impl Line<'_> {
    /// Returns the flag `name` of another system, if it is set.
    pub(super) fn find(&self, name: &str) -> Option<&ForeignFlag> {
        self.foreign_flags.iter().find(|flag| flag.name == name)
    }

    /// Returns whether our flag `name` is on the command line.
    pub(super) fn on_line(&self, name: &str) -> bool {
        on_line(self.flags, name)
    }

    /// Returns whether our flag `name` is set.
    pub(super) fn is_set(&self, name: &str, settings: &[Setting]) -> bool {
        self.on_line(name) || settings.iter().any(|setting| setting.key == name && !setting.values.is_empty())
    }

    /// Adds `setting`, which the flag `name` of another system sets, to `settings`. Later refusals of the setting have the place of the
    /// flag, and the name of the flag if it has the same value. A value that our flag does not accept is refused here, under the same name.
    pub(super) fn set(&self, name: &str, setting: Setting, settings: &mut Vec<Setting>, refusals: &mut Refusals) {
        let is_same = self.find(name).is_some_and(|flag| flag.values == setting.values);
        if let Some((value, expected)) = self.unaccepted(&setting.key, &setting.values) {
            let subject = if is_same { name.to_string() } else { format!("{name}: {}", setting.key) };
            refusals.say(name, format!("{subject} = {value}: {expected}"));
            // A required setting is not reported as missing too.
            refusals.about_too(&setting.key);
            return;
        }
        if !self.on_line(&setting.key) {
            // The command line wins: refusals are about its value.
            refusals.call_as(&setting.key, name, !is_same);
        }
        settings.push(setting);
    }

    /// Returns the first of `values` that our flag `key` does not accept, and what it expects.
    pub(super) fn unaccepted<'v>(&self, key: &str, values: &'v [String]) -> Option<(&'v str, String)> {
        let arg = self.command.get_arguments().find(|arg| arg.get_id() == key)?;
        let mut words = values.iter().flat_map(|value| match arg.get_value_delimiter() {
            Some(delimiter) => value.split(delimiter).collect(),
            None => vec![value.as_str()],
        });
        words.find_map(|word| Some((word, refusal(arg, word)?)))
    }
}

/// Returns the value of our setting `name`: the command line's, else the file's.
pub(super) fn value(flags: &ArgMatches, settings: &[Setting], name: &str) -> Option<String> {
    of_line(flags, name).or_else(|| of_file(settings, name))
}

/// Returns the value of our flag `name` if it is on the command line; of several values the last one.
pub(in crate::cli) fn of_line(flags: &ArgMatches, name: &str) -> Option<String> {
    if !on_line(flags, name) {
        return None;
    }
    let word = flags.get_raw(name)?.next_back()?;
    Some(word.to_string_lossy().into_owned())
}

/// Returns the value of our setting `name` in the file; of a list the first one.
pub(in crate::cli) fn of_file(settings: &[Setting], name: &str) -> Option<String> {
    let setting = settings.iter().rev().find(|setting| setting.key == name)?;
    setting.values.first().cloned()
}
