//! Checks of values, and what they refuse.

use std::fmt::Display;

use crate::{Error, Result};

/// Collects what is wrong with settings, so that all of it is reported at once and not one fault per run.
///
/// A refusal is one line. It starts with the setting to change or to remove (`NAME = VALUE`), or states that two settings
/// exclude each other: [`subjects`] parses that.
#[derive(Debug, Default)]
pub struct Refusals {
    lines: Vec<String>,
    /// Names of the refused settings.
    about: Vec<String>,
    /// Settings, and the names by which the user has set them.
    called: Vec<(String, String)>,
    /// Settings that the command calls otherwise than the checks.
    renames: &'static [(&'static str, &'static str)],
}

impl Refusals {
    /// Returns whether nothing is refused.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Returns whether a line refuses the setting `name`.
    pub fn has(&self, name: &str) -> bool {
        self.about.iter().any(|about| about == name)
    }

    /// Returns an empty collection for a part of the same settings: consequences of what is refused here are not refused there
    /// either.
    pub fn about(&self) -> Self {
        Self { about: self.about.clone(), renames: self.renames, ..Self::default() }
    }

    /// Adds one line, which refuses the settings `about`.
    pub fn refuse(&mut self, line: impl Into<String>, about: impl IntoIterator<Item = impl Into<String>>) {
        self.lines.push(line.into());
        self.about.extend(about.into_iter().map(Into::into));
    }

    /// Adds the refusals of `checked`, except for lines that name a setting refused already: these follow from it.
    ///
    /// # Errors
    /// If it is an error of another kind than [`Error::Usage`] and [`Error::Refused`].
    pub fn add(&mut self, checked: Result<()>) -> Result<()> {
        let Err(error) = checked else { return Ok(()) };
        let lines = error.refusals();
        if lines.is_empty() {
            return Err(error);
        }
        // Several lines of one error may be about one setting.
        let about = self.about.clone();
        for line in lines.iter().filter(|line| !about.iter().any(|name| names(line, name))) {
            self.refuse(renamed(line, self.renames), subjects(line));
        }
        Ok(())
    }

    /// Makes the setting `name` one that is refused already, as a consequence of another refusal.
    pub fn about_too(&mut self, name: &str) {
        self.about.push(name.into());
    }

    /// Has the refusals of checks, as [`Refusals::add`] adds them, name settings as the command does: pairs of a name and the command's.
    pub fn rename(&mut self, renames: &'static [(&'static str, &'static str)]) {
        self.renames = renames;
    }

    /// Returns `text` with the command's names of settings.
    pub fn renamed(&self, text: &str) -> String {
        renamed(text, self.renames)
    }

    /// Makes errors about the setting `name` start with `written`, the name by which the user has set it.
    pub fn call(&mut self, name: &str, written: &str) {
        self.called.retain(|(called, _)| called != name);
        self.called.push((name.into(), written.into()));
    }

    /// Returns `line` with the name at its start as the user has written it.
    fn as_called(&self, line: String) -> String {
        let Some(name) = subjects(&line).next().filter(|name| line.starts_with(name)) else { return line };
        match self.called.iter().find(|(called, _)| called == name) {
            Some((_, written)) => format!("{written}{}", &line[name.len()..]),
            None => line,
        }
    }

    /// Returns everything refused as one error, a line each.
    ///
    /// # Errors
    /// [`Error::Usage`] for one refusal, [`Error::Refused`] for several.
    pub fn end(mut self) -> Result<()> {
        self.lines = std::mem::take(&mut self.lines).into_iter().map(|line| self.as_called(line)).collect();
        match self.lines.len() {
            0 => Ok(()),
            1 => Err(Error::Usage(self.lines.remove(0))),
            _ => Err(Error::Refused(self.lines)),
        }
    }
}

/// Returns the refusals of all `checks` as one error.
pub fn all<const N: usize>(checks: [Result<()>; N]) -> Result<()> {
    let mut refusals = Refusals::default();
    for checked in checks {
        refusals.add(checked)?;
    }
    refusals.end()
}

/// Returns the settings that a refusal is about: the one that it starts with, and the second of two that exclude each other.
pub fn subjects(refusal: &str) -> impl Iterator<Item = &str> {
    let subject = |text: &'_ str| -> Option<usize> {
        let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_')?;
        (end > 0 && (text[end..].starts_with(" = ") || text[end..].starts_with(':'))).then_some(end)
    };
    let first = subject(refusal).map(|end| &refusal[..end]);
    let both = refusal.split_once(" exclude each other").map_or("", |(both, _)| both);
    let second = both.rsplit_once(" and ").and_then(|(_, text)| subject(text).map(|end| &text[..end]));
    first.into_iter().chain(second)
}

/// The setting whose name is a word of English.
const ENGLISH: &str = "reward";

/// Returns `text` with other names of settings: pairs of a name and its replacement. A name is replaced where it is a word by itself, and
/// not a part of a path; `reward`, which is a word of English too, only in backticks and before a value.
pub fn renamed(text: &str, names: &[(&str, &str)]) -> String {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let mut renamed = String::new();
    let mut rest = text;
    while let Some(start) = rest.find(|c: char| c.is_ascii_alphabetic()) {
        // A word starts at its first character that is none of a path.
        let start = rest[..start]
            .rfind(|c: char| !is_part(c))
            .map_or(0, |at| at + rest[at..].chars().next().map_or(1, char::len_utf8));
        let end = rest[start..].find(|c: char| !is_part(c)).map_or(rest.len(), |end| start + end);
        let word = rest[start..end].trim_end_matches('.');
        let (before, after) = (&rest[..start], &rest[start + word.len()..]);
        let is_quoted = before.ends_with('`') && after.starts_with('`');
        let is_subject =
            after.starts_with(" = ") || (renamed.is_empty() && before.is_empty() && after.starts_with(": "));
        let found = names.iter().find(|(name, _)| *name == word && (*name != ENGLISH || is_quoted || is_subject));
        renamed += before;
        renamed += found.map_or(word, |(_, other)| other);
        rest = after;
        if word.is_empty() {
            let next = rest.chars().next().map_or(0, char::len_utf8);
            renamed += &rest[..next];
            rest = &rest[next..];
        }
    }
    renamed + rest
}

/// Returns whether `line` contains `name` as a word.
fn names(line: &str, name: &str) -> bool {
    line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(|word| word == name)
}

/// Refuses settings with a [`Error::Usage`].
pub fn usage<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::Usage(message.into()))
}

/// Refuses `name = found` unless `holds`.
pub fn expect(holds: bool, name: &str, found: impl Display, expected: &str) -> Result<()> {
    if holds { Ok(()) } else { usage(format!("{name} = {found}: expected {expected}")) }
}

/// Refuses a setting without an effect.
pub fn no_effect(name: &str, found: impl Display, why: &str) -> Result<()> {
    usage(format!("{name} = {found} has no effect {why}"))
}

/// Refuses a number below 1.
pub fn at_least_one(name: &str, found: usize) -> Result<()> {
    expect(found >= 1, name, found, "at least 1")
}

/// Refuses a number that is not above 0.
pub fn above_zero(name: &str, found: f64) -> Result<()> {
    expect(found.is_finite() && found > 0.0, name, found, "a number above 0")
}

/// Refuses a number below 0.
pub fn zero_or_more(name: &str, found: f64) -> Result<()> {
    expect(found.is_finite() && found >= 0.0, name, found, "a number of 0 or more")
}

/// Refuses a number that is not from 0 to 1.
pub fn zero_to_one(name: &str, found: f64) -> Result<()> {
    expect((0.0..=1.0).contains(&found), name, found, "a number from 0 to 1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_starts_with_the_name_that_the_user_wrote() {
        let mut refusals = Refusals::default();
        for alias in ["init_kl_coef", "beta"] {
            refusals.call("kl_coef", alias);
        }
        for line in
            ["kl_coef = -1: expected more", "kl_coef_end = 1: expected less", "adap_kl_ctrl = true with kl_coef = 0"]
        {
            refusals.refuse(line, [""; 0]);
        }
        let expected =
            ["beta = -1: expected more", "kl_coef_end = 1: expected less", "adap_kl_ctrl = true with kl_coef = 0"];
        assert_eq!(refusals.end().unwrap_err().refusals(), expected);
    }

    #[test]
    fn a_name_is_replaced_where_it_is_a_word_and_no_part_of_a_path() {
        let names = [("kl_coef", "beta"), ("reward", "reward_funcs"), ("sft_model_path", "model_name_or_path")];
        for (text, expected) in [
            ("kl_coef = 1: expected kl_coef.", "beta = 1: expected beta."),
            ("reward = x: expected a reward, `reward`", "reward_funcs = x: expected a reward, `reward_funcs`"),
            ("runs/kl_coef/x: kl_coef_end ../kl_coef (kl_coef=0)", "runs/kl_coef/x: kl_coef_end ../kl_coef (beta=0)"),
            ("sft_model_path = \u{e9}... sft_model_path", "model_name_or_path = \u{e9}... model_name_or_path"),
            ("...", "..."),
            ("", ""),
        ] {
            assert_eq!(renamed(text, &names), expected);
        }
    }

    #[test]
    fn a_refusal_is_about_the_settings_that_it_starts_with() {
        let of = |line: &'static str| subjects(line).collect::<Vec<_>>();
        assert_eq!(of("warmup_steps = 100 has no effect with lr_scheduler_type = constant"), ["warmup_steps"]);
        assert_eq!(
            of("stop_token = eos and stop_token_id = 3 exclude each other: set one"),
            ["stop_token", "stop_token_id"]
        );
        assert_eq!(of("batch size = a * b = 4 is not a multiple of num_mini_batches = 3"), Vec::<&str>::new());
    }
}
