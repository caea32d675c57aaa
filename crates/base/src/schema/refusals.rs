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
        Self { about: self.about.clone(), ..Self::default() }
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
        for line in lines {
            if !self.about.iter().any(|name| names(line, name)) {
                self.refuse(line, subjects(line));
            }
        }
        Ok(())
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
