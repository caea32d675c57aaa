//! Flags: parsing the values of one, checking them, refusing them, and the headings of `--help`.
//!
//! Each group of settings derives `clap::Args` in the module that it sets, with what is here. A field's name is the flag's
//! name, the configuration file's key and, where TRL has the setting, TRL's name. Its doc comment is its `--help` text.
//! Every default is written once, in the field's `arg` attribute; constructors read it from there (`defaults`).
//!
//! The type of an optional field is spelled `std::option::Option`: clap reads a bare `Option` as "the flag may be absent",
//! and then `none` could not unset on the command line what a file has set.

use std::any::TypeId;
use std::fmt::Display;
use std::path::PathBuf;

use clap::builder::ValueParser;
use clap::{Arg, ArgAction, Args, Command};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::{Error, Result, files};

// Headings of `--help`.
pub(crate) const MODELS: &str = "Models";
pub(crate) const REWARDS: &str = "Rewards";
pub(crate) const DATA: &str = "Data";
pub(crate) const BATCHES: &str = "Batch sizes and length of the run";
pub(crate) const PPO: &str = "PPO";
pub(crate) const LOSS: &str = "Loss";
pub(crate) const SAMPLING: &str = "Sampling";
pub(crate) const LORA: &str = "LoRA";
pub(crate) const OPTIMIZER: &str = "Optimizer";
pub(crate) const CHECKPOINTS: &str = "Checkpoints";
pub(crate) const EVALUATION: &str = "Evaluation";
pub(crate) const DIST: &str = "Several ranks";
pub(crate) const HUB: &str = "Hugging Face hub";
pub(crate) const RUN: &str = "Run";

/// All headings, in the order of `--help`.
pub const HEADINGS: [&str; 14] =
    [MODELS, DATA, REWARDS, BATCHES, SAMPLING, PPO, LOSS, OPTIMIZER, LORA, EVALUATION, CHECKPOINTS, HUB, DIST, RUN];

/// Default value of an optional flag that is unset.
pub const NONE: &str = "none";

/// Builds the clap command `name` whose flags are the fields of `C`, in the forms that `rlhf` accepts.
///
/// Flags have the fields' names; a boolean flag stands alone or takes `=true` or `=false`; `none` or `null` unsets an
/// optional value; of a flag given twice the last one counts, and a list has the values of both.
pub fn command<C: Args>(name: &'static str) -> Command {
    C::augment_args(Command::new(name)).args_override_self(true).mut_args(|arg| {
        let arg = arg.allow_negative_numbers(true);
        if let ArgAction::SetTrue = arg.get_action() {
            let off = arg.get_default_values().is_empty();
            let arg = if off { arg.default_value("false") } else { arg };
            return arg
                .action(ArgAction::Set)
                .value_parser(required::<bool>)
                .value_name(bool::NAME)
                .num_args(0..=1)
                // Otherwise a prompt after `--ignore_eos` would be its value.
                .require_equals(true)
                .default_missing_value("true");
        }
        if arg.is_positional() {
            return arg;
        }
        match standard(&arg) {
            Some((name, Some(parser))) => arg.value_name(name).value_parser(parser),
            Some((name, None)) => arg.value_name(name),
            None if !arg.get_possible_values().is_empty() => arg.value_name("NAME"),
            // A type of this crate: its `arg` attribute has the value name and the parser.
            None => arg,
        }
    })
}

/// Returns `C` with the defaults of its flags, and "." wherever a value is required.
pub(crate) fn defaults<C: Args>() -> C {
    defaults_with(&[])
}

/// Returns [`defaults`], with other defaults for these settings.
pub(crate) fn defaults_with<C: Args>(settings: &[(&'static str, &'static str)]) -> C {
    let own = |command: Command, &(name, value): &(&'static str, &'static str)| {
        command.mut_arg(name, |arg| arg.default_value(value))
    };
    let matches = settings
        .iter()
        .fold(command::<C>("defaults"), own)
        .no_binary_name(true)
        .mut_args(|arg| if arg.is_required_set() { arg.required(false).default_value(".") } else { arg })
        .get_matches_from(std::iter::empty::<&str>());
    C::from_arg_matches(&matches).expect("every flag has a default that it accepts")
}

/// A type of flag values, parsed from text.
pub(crate) trait Setting: Clone + Send + Sync + Sized + 'static {
    /// Placeholder for a value in `--help`.
    const NAME: &'static str;
    /// Description of a valid value, for error messages.
    const EXPECTED: &'static str;

    /// Parses a value; `None` if `text` is not one.
    fn read(text: &str) -> Option<Self>;
}

impl Setting for usize {
    const NAME: &'static str = "N";
    const EXPECTED: &'static str = "a whole number, 0 or more";

    fn read(text: &str) -> Option<Self> {
        // Python writes a whole number that may be a share as `8.0`.
        text.strip_suffix(".0").unwrap_or(text).parse().ok()
    }
}

impl Setting for u64 {
    const NAME: &'static str = "N";
    const EXPECTED: &'static str = "a whole number, 0 or more";

    fn read(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

impl Setting for i64 {
    const NAME: &'static str = "N";
    const EXPECTED: &'static str = "a whole number";

    fn read(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

impl Setting for f64 {
    const NAME: &'static str = "X";
    const EXPECTED: &'static str = "a number";

    fn read(text: &str) -> Option<Self> {
        text.parse().ok().filter(|x: &f64| x.is_finite())
    }
}

impl Setting for bool {
    const NAME: &'static str = "BOOL";
    const EXPECTED: &'static str = "true or false";

    fn read(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "true" | "yes" | "1" => Some(true),
            "false" | "no" | "0" => Some(false),
            _ => None,
        }
    }
}

impl Setting for PathBuf {
    const NAME: &'static str = "PATH";
    const EXPECTED: &'static str = "a path";

    fn read(text: &str) -> Option<Self> {
        (!text.is_empty()).then(|| files::with_home(text.into(), std::env::home_dir))
    }
}

impl Setting for String {
    const NAME: &'static str = "TEXT";
    const EXPECTED: &'static str = "some text";

    fn read(text: &str) -> Option<Self> {
        (!text.is_empty()).then(|| text.into())
    }
}

/// Returns whether `text` is a value of a boolean flag.
pub fn is_bool(text: &str) -> bool {
    bool::read(text).is_some()
}

/// Parses a value.
pub(crate) fn required<T: Setting>(text: &str) -> Result<T, String> {
    T::read(text).ok_or_else(|| format!("expected {}", T::EXPECTED))
}

/// Parses a value, or `none` or `null`.
pub(crate) fn optional<T: Setting>(text: &str) -> Result<Option<T>, String> {
    match text.to_ascii_lowercase().as_str() {
        "none" | "null" => Ok(None),
        _ => required(text).map(Some),
    }
}

/// Parses a number of steps; TRL writes "not set" as -1.
pub(crate) fn steps_or_minus_one(text: &str) -> Result<Option<usize>, String> {
    if text == "-1" { Ok(None) } else { optional(text) }
}

/// Parses a number of most likely tokens, 0 for all; vLLM and TRL write "all" as -1 too.
pub(crate) fn top_k_or_minus_one(text: &str) -> Result<usize, String> {
    if text == "-1" { Ok(0) } else { required(text) }
}

/// As [`top_k_or_minus_one`], or `none` or `null`.
pub(crate) fn optional_top_k(text: &str) -> Result<Option<usize>, String> {
    if text == "-1" { Ok(Some(0)) } else { optional(text) }
}

/// Returns the value name of an `arg` of one of the standard types, and the parser if derive chose it.
fn standard(arg: &Arg) -> Option<(&'static str, Option<ValueParser>)> {
    typed::<usize>(arg)
        .or_else(|| typed::<u64>(arg))
        .or_else(|| typed::<i64>(arg))
        .or_else(|| typed::<f64>(arg))
        .or_else(|| typed::<bool>(arg))
        .or_else(|| typed::<PathBuf>(arg))
        .or_else(|| typed::<String>(arg))
}

/// Returns the value name of `arg` if it holds a `T` or an `Option<T>`, and the parser if derive chose it. An `arg` attribute with a parser of
/// a `T` has the value name too.
fn typed<T: Setting>(arg: &Arg) -> Option<(&'static str, Option<ValueParser>)> {
    let held = arg.get_value_parser().type_id();
    if held == TypeId::of::<T>() {
        let is_named = arg.get_value_names().is_some_and(|names| names.iter().any(|name| name.as_str() == T::NAME));
        Some((T::NAME, (!is_named).then(|| ValueParser::new(required::<T>))))
    } else {
        (held == TypeId::of::<Option<T>>()).then_some((T::NAME, None))
    }
}

/// A number of bytes, in Hugging Face's notation: `5GB`, `500MB`, `1GiB`, or a number alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub usize);

const UNITS: [(&str, u64); 8] = [
    ("TIB", 1 << 40),
    ("GIB", 1 << 30),
    ("MIB", 1 << 20),
    ("KIB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
];

impl Display for ByteSize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bytes = self.0 as u64;
        let whole = |(_, size): &&(&str, u64)| bytes >= *size && bytes.is_multiple_of(*size);
        match UNITS[4..].iter().find(whole) {
            Some((unit, size)) => write!(f, "{}{unit}", bytes / size),
            None => write!(f, "{bytes}"),
        }
    }
}

impl Serialize for ByteSize {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Setting for ByteSize {
    const NAME: &'static str = "SIZE";
    const EXPECTED: &'static str = "a size above 0, such as 5GB or 500MB";

    fn read(text: &str) -> Option<Self> {
        let text = text.trim().to_ascii_uppercase();
        let unit = UNITS.iter().find_map(|(unit, size)| Some((text.strip_suffix(unit)?, *size)));
        let (number, size) = unit.unwrap_or((&text, 1));
        let bytes = number.trim_end().parse::<f64>().ok()? * size as f64;
        (bytes >= 1.0 && bytes < usize::MAX as f64).then_some(Self(bytes as usize))
    }
}

/// A JSON object, such as `{"wandb": {"entity": "team"}}`.
///
/// Text that is no JSON object is accepted, and its error left to the check of the setting: an error of the parser would show
/// the text, which may hold a secret.
#[derive(Debug, Clone, PartialEq)]
pub struct JsonObject(Result<Map<String, Value>, String>);

impl JsonObject {
    /// Returns the entries.
    ///
    /// # Errors
    /// If the text was no JSON object: what was found instead, without the text.
    pub fn entries(&self) -> Result<&Map<String, Value>, &str> {
        self.0.as_ref().map_err(String::as_str)
    }

    /// Returns a copy of the entries of `object`; none if there is no object.
    pub fn to_map(object: Option<&Self>) -> Map<String, Value> {
        object.and_then(|object| object.entries().ok()).cloned().unwrap_or_default()
    }

    /// Returns the value of the entry `name`, if there is one.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.as_ref().ok().and_then(|entries| entries.get(name))
    }
}

impl From<Map<String, Value>> for JsonObject {
    fn from(entries: Map<String, Value>) -> Self {
        Self(Ok(entries))
    }
}

impl Serialize for JsonObject {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.as_ref().ok().serialize(serializer)
    }
}

impl Setting for JsonObject {
    const NAME: &'static str = "JSON";
    const EXPECTED: &'static str = "a JSON object";

    fn read(text: &str) -> Option<Self> {
        let found = match serde_json::from_str(text) {
            Ok(Value::Object(entries)) => return Some(Self(Ok(entries))),
            Ok(Value::Array(_)) => "a list".into(),
            Ok(_) => "one value".into(),
            Err(error) => format!("text that is not JSON (column {})", error.column()),
        };
        Some(Self(Err(found)))
    }
}

/// Returns whether the values of a flag are JSON objects, which a configuration file may have as maps.
pub fn takes_json(arg: &Arg) -> bool {
    arg.get_value_parser().type_id() == TypeId::of::<Option<JsonObject>>()
}

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

    /// Has the setting `name` called `theirs` in the errors that start with it: the user has set it by that name.
    pub fn call(&mut self, name: &str, theirs: &str) {
        self.called.retain(|(called, _)| called != name);
        self.called.push((name.into(), theirs.into()));
    }

    /// Returns `line` with the name at its start as the user has written it.
    fn as_called(&self, line: String) -> String {
        let Some(name) = subjects(&line).next().filter(|name| line.starts_with(name)) else { return line };
        match self.called.iter().find(|(called, _)| called == name) {
            Some((_, theirs)) => format!("{theirs}{}", &line[name.len()..]),
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
pub(crate) fn all<const N: usize>(checks: [Result<()>; N]) -> Result<()> {
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
pub(crate) fn usage<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::Usage(message.into()))
}

/// Refuses `name = found` unless `holds`.
pub(crate) fn expect(holds: bool, name: &str, found: impl Display, expected: &str) -> Result<()> {
    if holds { Ok(()) } else { usage(format!("{name} = {found}: expected {expected}")) }
}

/// Refuses a setting without an effect.
pub(crate) fn no_effect(name: &str, found: impl Display, why: &str) -> Result<()> {
    usage(format!("{name} = {found} has no effect {why}"))
}

pub(crate) fn at_least_one(name: &str, found: usize) -> Result<()> {
    expect(found >= 1, name, found, "at least 1")
}

pub(crate) fn above_zero(name: &str, found: f64) -> Result<()> {
    expect(found.is_finite() && found > 0.0, name, found, "a number above 0")
}

pub(crate) fn zero_or_more(name: &str, found: f64) -> Result<()> {
    expect(found.is_finite() && found >= 0.0, name, found, "a number of 0 or more")
}

pub(crate) fn zero_to_one(name: &str, found: f64) -> Result<()> {
    expect((0.0..=1.0).contains(&found), name, found, "a number from 0 to 1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_as_by_hugging_face_and_what_is_written_parses_to_the_same() {
        for (text, bytes, written) in [
            ("5GB", 5_000_000_000, "5GB"),
            ("500mb", 500_000_000, "500MB"),
            ("1.5 GB", 1_500_000_000, "1500MB"),
            ("2GiB", 1 << 31, "2147483648"),
            ("300KB", 300_000, "300KB"),
            ("10000", 10_000, "10KB"),
            ("7", 7, "7"),
        ] {
            let size = ByteSize::read(text).unwrap();
            assert_eq!((size.0, size.to_string().as_str()), (bytes, written), "{text}");
            assert_eq!(ByteSize::read(&size.to_string()), Some(size));
        }
        for text in ["", "GB", "0", "-5GB", "5XB", "nan", "inf", "1e30GB", "five"] {
            assert_eq!(ByteSize::read(text), None, "{text}");
        }
    }

    #[test]
    fn a_refusal_starts_with_the_name_that_the_user_wrote() {
        let mut refusals = Refusals::default();
        for theirs in ["init_kl_coef", "beta"] {
            refusals.call("kl_coef", theirs);
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
