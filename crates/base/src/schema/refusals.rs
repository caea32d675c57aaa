//! Checks of values, and the refusals that they return.

use std::fmt::Display;

use crate::{Error, Origin, Refusal, Result};

/// Collects the errors in the settings, so that all of them are reported at once.
#[derive(Debug, Default)]
pub struct Refusals {
    refused: Vec<Refused>,
    /// Names of the refused settings.
    about: Vec<String>,
    /// Settings that the user has written.
    written: Vec<Written>,
    /// Settings that have another name in the command than in the checks.
    renames: &'static [(&'static str, &'static str)],
}

#[derive(Debug)]
struct Refused {
    refusal: Refusal,
    /// Whether the message already says where the setting is written.
    is_placed: bool,
}

/// A setting, the name by which the user has written it, and where.
#[derive(Debug)]
struct Written {
    setting: String,
    name: String,
    origin: Origin,
}

impl Refusals {
    /// Returns whether nothing is refused.
    pub fn is_empty(&self) -> bool {
        self.refused.is_empty()
    }

    /// Returns whether the setting `name` is refused.
    pub fn has(&self, name: &str) -> bool {
        self.about.iter().any(|about| about == name)
    }

    /// Returns an empty collection for the settings of the section `section` of a file, which are written as `section.name`, and for the
    /// settings above the sections. Consequences of settings that are refused here are not refused there again.
    pub fn of_section(&self, section: &str) -> Self {
        let mut section_refusals = Self { about: self.about.clone(), renames: self.renames, ..Self::default() };
        let name = |written: &str| written.rsplit('.').next().unwrap_or_default().to_string();
        let in_section =
            |written: &&Written| written.setting.split_once('.').is_some_and(|(prefix, _)| prefix == section);
        let above = self.written.iter().filter(|written| !written.setting.contains('.'));
        for written in above.chain(self.written.iter().filter(in_section)) {
            section_refusals.call(&name(&written.setting), &name(&written.name), written.origin.clone());
        }
        section_refusals
    }

    /// Adds one line that refuses the settings `about`; the first is the one to change. The line already says where they are written.
    pub fn refuse(&mut self, line: impl Into<String>, about: impl IntoIterator<Item = impl Into<String>>) {
        self.refuse_at(Origin::Unset, line, about);
    }

    /// Adds one line about the text at `origin` that refuses the settings `about`; the first is the one to change.
    pub fn refuse_at(
        &mut self,
        origin: Origin,
        line: impl Into<String>,
        about: impl IntoIterator<Item = impl Into<String>>,
    ) {
        let about: Vec<String> = about.into_iter().map(Into::into).collect();
        let setting = about.first().filter(|name| !name.is_empty()).map(String::as_str);
        let refusal = Refusal::of_setting(setting, line).at(origin);
        self.refused.push(Refused { refusal, is_placed: true });
        self.about.extend(about);
    }

    /// Adds one line that refuses `setting`. The place where the setting is written is added to it.
    pub fn say(&mut self, setting: &str, line: impl Into<String>) {
        self.push(Refusal::of_setting(Some(setting), line));
    }

    /// Adds a refusal, even if its setting is refused already.
    pub fn push(&mut self, refusal: Refusal) {
        self.about.extend(refusal.settings().map(String::from));
        self.refused.push(Refused { refusal, is_placed: false });
    }

    /// Adds the refusals of `checked`, except lines that name a setting that is refused already, as they are consequences of that.
    ///
    /// # Errors
    /// If it is an error of another kind than [`Error::Usage`] and [`Error::Refused`].
    pub fn add(&mut self, checked: Result<()>) -> Result<()> {
        let Err(error) = checked else { return Ok(()) };
        if !error.is_usage() {
            return Err(error);
        }
        // Several lines of one error may be about one setting.
        let about = self.about.clone();
        for refusal in error.refusals() {
            if about.iter().any(|name| names(refusal.message(), name)) {
                continue;
            }
            let refusal = refusal.map_message(|message| renamed(&message, self.renames));
            self.push(refusal);
        }
        Ok(())
    }

    /// Marks the setting `name` as refused already, as a consequence of another refusal.
    pub fn about_too(&mut self, name: &str) {
        self.about.push(name.into());
    }

    /// Makes the refusals that [`Refusals::add`] adds use the command's names of settings: pairs of a name and the command's name.
    pub fn rename(&mut self, renames: &'static [(&'static str, &'static str)]) {
        self.renames = renames;
    }

    /// Returns `text` with the command's names of settings.
    pub fn renamed(&self, text: &str) -> String {
        renamed(text, self.renames)
    }

    /// Makes refusals of `setting` begin with `name`, as the user has written it, and say where it is written.
    pub fn call(&mut self, setting: &str, name: &str, origin: Origin) {
        self.written.retain(|written| written.setting != setting);
        self.written.push(Written { setting: setting.into(), name: name.into(), origin });
    }

    /// Makes refusals of `setting` begin with the name of `other`, which the user has written in its place, and say where that is written.
    /// With
    /// `keeps_name` they begin with the setting's own name, because its value differs from that of `other`.
    pub fn call_as(&mut self, setting: &str, other: &str, keeps_name: bool) {
        if let Some(written) = self.written.iter().find(|written| written.setting == other) {
            let name = if keeps_name { setting.to_string() } else { written.name.clone() };
            self.call(setting, &name, written.origin.clone());
        }
    }

    /// Returns the refusal with the names that the user has written, and the place of the first of its settings that is written; in a file,
    /// if one of them is.
    fn as_written(&self, refusal: Refusal, is_placed: bool) -> Refusal {
        let find_written =
            |setting: Option<&str>| self.written.iter().find(|written| Some(written.setting.as_str()) == setting);
        let (first, second) = (find_written(refusal.setting()), find_written(refusal.other()));
        let refusal = match first {
            Some(first) => refusal.named(&first.name),
            None => refusal,
        };
        let refusal = match second {
            Some(Written { setting, name, .. }) if name != setting => {
                refusal.map_message(|message| renamed(&message, &[(setting.as_str(), name.as_str())]))
            }
            _ => refusal,
        };
        let in_file = |written: &&Written| matches!(written.origin, Origin::Line { .. });
        let placed = first.filter(in_file).or(second.filter(in_file)).or(first).or(second);
        match placed.filter(|_| !is_placed) {
            Some(written) => refusal.at(written.origin.clone()),
            None => refusal,
        }
    }

    /// Returns everything refused as one error, a line each.
    ///
    /// # Errors
    /// [`Error::Refused`], if anything is.
    pub fn end(mut self) -> Result<()> {
        let refused = std::mem::take(&mut self.refused);
        let refused = refused.into_iter().map(|Refused { refusal, is_placed }| self.as_written(refusal, is_placed));
        let refused: Vec<Refusal> = refused.collect();
        if refused.is_empty() { Ok(()) } else { Err(Error::Refused(refused)) }
    }

    /// Returns the collection for later use: [`Refusals::told`] adds names and places of settings to the errors of the run.
    ///
    /// # Errors
    /// As [`Refusals::end`].
    pub fn checked(self) -> Result<Self> {
        if self.is_empty() { Ok(self) } else { self.end().map(|()| Self::default()) }
    }

    /// Returns an error of a run with these settings. Settings that it refuses are named as the user has written them, with their places.
    pub fn told(&self, error: Error) -> Error {
        let told =
            |refusal: Refusal| self.as_written(refusal.map_message(|message| renamed(&message, self.renames)), false);
        match error {
            Error::Refused(refusals) => Error::Refused(refusals.into_iter().map(told).collect()),
            other => other,
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

/// The setting whose name is also an English word.
const ENGLISH: &str = "reward";

/// Returns `text` with other names of settings: pairs of a name and its replacement. A name is replaced if it is a word by itself and not
/// part of a path. `reward`, which is also an English word, is replaced only in backticks and before a value.
pub fn renamed(text: &str, names: &[(&str, &str)]) -> String {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let mut renamed = String::new();
    let mut rest = text;
    while let Some(start) = rest.find(|c: char| c.is_ascii_alphabetic()) {
        // The word starts after the last character that cannot be part of a path.
        let start = rest[..start]
            .rfind(|c: char| !is_part(c))
            .map_or(0, |at| at + rest[at..].chars().next().map_or(1, char::len_utf8));
        let end = rest[start..].find(|c: char| !is_part(c)).map_or(rest.len(), |end| start + end);
        let word = rest[start..end].trim_end_matches('.');
        let (before, after) = (&rest[..start], &rest[start + word.len()..]);
        let is_quoted = before.ends_with('`') && after.starts_with('`');
        let is_subject =
            after.starts_with(" = ") || (renamed.is_empty() && before.is_empty() && after.starts_with(": "));
        let value = names.iter().find(|(name, _)| *name == word && (*name != ENGLISH || is_quoted || is_subject));
        renamed += before;
        renamed += value.map_or(word, |(_, other)| other);
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

/// Refuses the settings as a whole, or something that has no name.
pub fn usage<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::Usage(message.into()))
}

/// Refuses the setting `name`; `rest` follows the name in the message, as in [`Refusal::new`].
pub fn refuse<T>(name: &str, rest: impl Display) -> Result<T> {
    Err(Error::refused(name, rest))
}

/// Refuses the setting `name` together with `other`: either may be changed. `rest` follows the name in the message.
pub fn exclude<T>(name: &str, other: &str, rest: impl Display) -> Result<T> {
    Err(Error::Refused(vec![Refusal::new(name, rest).or_of(other)]))
}

/// Refuses `name = value` unless `holds`.
pub fn expect(holds: bool, name: &str, value: impl Display, expected: &str) -> Result<()> {
    if holds { Ok(()) } else { refuse(name, format!(" = {value}: expected {expected}")) }
}

/// Refuses a setting without an effect.
pub fn no_effect(name: &str, value: impl Display, why: &str) -> Result<()> {
    refuse(name, format!(" = {value} has no effect {why}"))
}

/// Refuses a number below 1.
pub fn at_least_one(name: &str, value: usize) -> Result<()> {
    expect(value >= 1, name, value, "at least 1")
}

/// Refuses a number that is not above 0.
pub fn above_zero(name: &str, value: f64) -> Result<()> {
    expect(value.is_finite() && value > 0.0, name, value, "a number above 0")
}

/// Refuses a number below 0.
pub fn zero_or_more(name: &str, value: f64) -> Result<()> {
    expect(value.is_finite() && value >= 0.0, name, value, "a number of 0 or more")
}

/// Refuses a number that is not from 0 to 1.
pub fn zero_to_one(name: &str, value: f64) -> Result<()> {
    expect((0.0..=1.0).contains(&value), name, value, "a number from 0 to 1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_starts_with_the_name_that_the_user_wrote_and_has_its_place() {
        let mut refusals = Refusals::default();
        let origin = Origin::Line { path: "run.yaml".into(), line: 7 };
        refusals.call("kl_coef", "init_kl_coef", Origin::Flag);
        refusals.call("kl_coef", "beta", origin.clone());
        refusals.add(refuse("kl_coef", " = -1: expected more")).unwrap();
        refusals.refuse("kl_coef = -1: expected more", ["kl_coef"]);
        // The line names a setting that is refused already.
        refusals.add(refuse("adap_kl_ctrl", " = true with kl_coef = 0")).unwrap();
        refusals.add(refuse("kl_coef_end", " = 1: expected less")).unwrap();
        let refused = refusals.end().unwrap_err().refusals();
        let lines: Vec<String> = refused.iter().map(ToString::to_string).collect();
        let expected =
            ["run.yaml:7: beta = -1: expected more", "beta = -1: expected more", "kl_coef_end = 1: expected less"];
        assert_eq!(lines, expected);
        assert_eq!((refused[0].setting(), refused[0].origin()), (Some("kl_coef"), &origin));
    }

    #[test]
    fn the_second_of_two_settings_is_named_and_placed_as_it_is_written_too() {
        let line = |line| Origin::Line { path: "run.yaml".into(), line };
        let mut refusals = Refusals::default();
        refusals.call("kl_coef_end", "beta_end", line(3));
        let rest = " = true and kl_coef_end = 0 exclude each other";
        refusals.add(exclude("adap_kl_ctrl", "kl_coef_end", rest)).unwrap();
        refusals.call("actor_lora_dim", "actor_lora_dim", line(5));
        refusals.call_as("lora_r", "actor_lora_dim", false);
        refusals.call_as("lora_alpha", "actor_lora_dim", true);
        refusals.add(all([refuse("lora_r", " = 0: no"), refuse("lora_alpha", " = 0: no")])).unwrap();
        let lines = refusals.end().unwrap_err().to_string();
        let expected = [
            "run.yaml:3: adap_kl_ctrl = true and beta_end = 0 exclude each other",
            "run.yaml:5: actor_lora_dim = 0: no",
            "run.yaml:5: lora_alpha = 0: no",
        ];
        assert_eq!(lines.lines().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn of_a_flag_and_a_line_of_a_file_the_line_is_the_place() {
        let mut refusals = Refusals::default();
        refusals.call("optim", "optim", Origin::Flag);
        refusals.call("zero_stage", "zero_optimization.stage", Origin::Line { path: "ds.json".into(), line: 3 });
        refusals.add(exclude("optim", "zero_stage", " = x and zero_stage = 2 exclude each other")).unwrap();
        let expected = "ds.json:3: optim = x and zero_optimization.stage = 2 exclude each other";
        assert_eq!(refusals.end().unwrap_err().to_string(), expected);
    }

    #[test]
    fn an_error_of_a_run_and_one_of_a_section_have_the_place_of_the_setting() {
        let line = |line| Origin::Line { path: "run.yaml".into(), line };
        let mut written = Refusals::default();
        written.call("output_dir", "output_dir", line(1));
        written.call("ppo.kl_coef", "ppo.init_kl_coef", line(4));
        let error = Error::refused("output_dir", " = o: expected a new folder");
        assert_eq!(written.told(error).to_string(), "run.yaml:1: output_dir = o: expected a new folder");
        assert_eq!(written.told(Error::Run("x".into())).to_string(), "x");
        let mut section = written.of_section("ppo");
        section.add(all([refuse("kl_coef", " = -1: no"), refuse("output_dir", " = o: no")])).unwrap();
        let expected = "run.yaml:4: init_kl_coef = -1: no\nrun.yaml:1: output_dir = o: no";
        assert_eq!(section.end().unwrap_err().to_string(), expected);
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
}
