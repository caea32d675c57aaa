//! The keys of a configuration file.

use clap::{Arg, Command};

use super::errors::{nearest, refusal};
use super::flags::{NOT_SETTINGS, is_named};
use super::foreign;

/// The keys that a configuration file may have: the names and aliases of flags.
pub(super) struct Keys<'c> {
    /// Commands whose flags may be keys at the top level.
    pub(super) top: Vec<&'c Command>,
    /// Commands that may have a section.
    pub(super) sections: Vec<&'c Command>,
}

impl<'c> Keys<'c> {
    /// Returns the command whose section is called `name`.
    pub(super) fn section(&self, name: &str) -> Option<&'c Command> {
        self.sections.iter().copied().find(|command| command.get_name() == name)
    }

    /// Returns the commands that may have a key, and the key's name without its section (`ppo.kl_coef`: `kl_coef`).
    fn place<'k>(&self, key: &'k str) -> (Vec<&'c Command>, &'k str) {
        match key.split_once('.') {
            Some((section, name)) => (self.section(section).into_iter().collect(), name),
            None => (self.top.clone(), key),
        }
    }

    /// Returns the flags that a key stands for: one of each command that has it.
    fn flags(&self, key: &str) -> impl Iterator<Item = &'c Arg> {
        let (commands, name) = self.place(key);
        let flags = commands.into_iter().flat_map(Command::get_arguments);
        flags.filter(move |arg| is_named(arg, name) && !NOT_SETTINGS.contains(&name))
    }

    /// Returns the flag that a key stands for.
    pub(super) fn flag(&self, key: &str) -> Option<&'c Arg> {
        self.flags(key).next()
    }

    /// Returns what a key expects instead of `value`, if no command that has the key accepts this value.
    pub(super) fn refusal(&self, key: &str, value: &str) -> Option<String> {
        let is_setting = |arg: &&Arg| !foreign::is_added(arg);
        let all: Option<Vec<String>> = self.flags(key).filter(is_setting).map(|arg| refusal(arg, value)).collect();
        all?.pop().or_else(|| refusal(self.flag(key)?, value))
    }

    /// Returns the name of a key's flag, with the section: the key may be an alias.
    pub(super) fn canonical(&self, key: &str) -> String {
        match (self.flag(key), key.split_once('.')) {
            (None, _) => key.to_string(),
            (Some(arg), None) => arg.get_id().to_string(),
            (Some(arg), Some((section, _))) => format!("{section}.{}", arg.get_id()),
        }
    }

    /// Returns the key that `key` is probably a misspelling of.
    pub(super) fn nearest(&self, key: &str) -> Option<&'c str> {
        let (commands, name) = self.place(key);
        let flags = commands.into_iter().flat_map(|command| command.get_arguments()).filter(|arg| !arg.is_hide_set());
        let flags = flags
            .map(|arg| arg.get_long().unwrap_or(arg.get_id().as_str()))
            .filter(|name| !NOT_SETTINGS.contains(name));
        let sections = self.sections.iter().map(|command| command.get_name()).filter(|_| !key.contains('.'));
        nearest(name, flags.chain(sections))
    }

    /// Returns the error for a key that is not a flag.
    pub(super) fn unknown(&self, key: &str) -> String {
        // Names of other systems have dots too.
        let is_in_section = key.split_once('.').is_none_or(|(section, _)| self.section(section).is_some());
        let (commands, name) = if is_in_section { self.place(key) } else { (self.top.clone(), key) };
        if let Some(hint) = foreign::hint(name, &commands) {
            return format!("unknown key `{key}`; {hint}");
        }
        let hint = match (self.nearest(key), &commands[..]) {
            (Some(name), _) => format!("did you mean `{name}`?"),
            (None, [command]) => {
                format!("`rlhf {} --help` lists the flags, whose names are the keys", command.get_name())
            }
            (None, _) => "`--help` of each step's command lists its flags, whose names are the keys".into(),
        };
        format!("unknown key `{key}`; {hint}")
    }
}
