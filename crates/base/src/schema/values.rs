//! Types of values, and their parsers.

use std::fmt::Display;
use std::path::PathBuf;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::{Result, files};

/// A type of values, parsed from text.
pub trait Setting: Clone + Send + Sync + Sized + 'static {
    /// Placeholder for a value in `--help`.
    const NAME: &'static str;
    /// Description of a valid value, for error messages.
    const EXPECTED: &'static str;
    /// Type of a value, for other programs.
    const KIND: Kind = Kind::Text;
    /// Whether flags list the choices in their help and errors, in place of [`Self::EXPECTED`].
    const LISTED: bool = false;

    /// Parses a value; `None` if `text` is not one.
    fn read(text: &str) -> Option<Self>;

    /// Returns all values, if each has a name.
    fn choices() -> Vec<Choice> {
        Vec::new()
    }
}

/// The type of a value, as other programs know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Text; of the choices, if there are any.
    Text,
    /// A file or a folder.
    Path,
    /// A whole number.
    Integer,
    /// A number.
    Number,
    /// True or false.
    Boolean,
    /// A JSON object.
    Json,
}

/// The name of one of several values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// The name, as it is written.
    pub name: &'static str,
    /// Further names that are read.
    pub aliases: &'static [&'static str],
    /// Description, without a full stop; empty if the name says it all.
    pub help: &'static str,
}

impl Choice {
    /// Creates a choice without further names and without a description.
    pub const fn new(name: &'static str) -> Self {
        Self { name, aliases: &[], help: "" }
    }

    /// Adds further names.
    #[must_use]
    pub const fn aliases(self, aliases: &'static [&'static str]) -> Self {
        Self { aliases, ..self }
    }
}

/// A type with a fixed set of values, each with a name. `#[derive(Choices)]` implements it.
pub trait Choices: Copy + PartialEq + Send + Sync + 'static {
    /// All values.
    const ALL: &'static [(Self, Choice)];
    /// Placeholder for a value in `--help`.
    const VALUE_NAME: &'static str = "NAME";
    /// Description of a valid value, for error messages: the names, unless there is more to say.
    const EXPECTED: &'static str;

    /// Returns the value of this name, in upper or lower case; `None` if there is none.
    fn named(text: &str) -> Option<Self> {
        let is_named = |choice: &Choice| {
            std::iter::once(&choice.name).chain(choice.aliases).any(|name| name.eq_ignore_ascii_case(text))
        };
        Self::ALL.iter().find(|(_, choice)| is_named(choice)).map(|(value, _)| *value)
    }

    /// Returns the name, as it is written.
    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(value, _)| *value == self).map_or("", |(_, choice)| choice.name)
    }
}

impl<T: Choices> Setting for T {
    const NAME: &'static str = T::VALUE_NAME;
    const EXPECTED: &'static str = <T as Choices>::EXPECTED;
    const LISTED: bool = true;

    fn read(text: &str) -> Option<Self> {
        T::named(text)
    }

    fn choices() -> Vec<Choice> {
        T::ALL.iter().map(|(_, choice)| *choice).collect()
    }
}

impl Setting for usize {
    const NAME: &'static str = "N";
    const EXPECTED: &'static str = "a whole number, 0 or more";
    const KIND: Kind = Kind::Integer;

    fn read(text: &str) -> Option<Self> {
        // Python writes a whole number that may be a share as `8.0`.
        text.strip_suffix(".0").unwrap_or(text).parse().ok()
    }
}

impl Setting for u64 {
    const NAME: &'static str = "N";
    const EXPECTED: &'static str = "a whole number, 0 or more";
    const KIND: Kind = Kind::Integer;

    fn read(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

impl Setting for i64 {
    const NAME: &'static str = "N";
    const EXPECTED: &'static str = "a whole number";
    const KIND: Kind = Kind::Integer;

    fn read(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

impl Setting for f64 {
    const NAME: &'static str = "X";
    const EXPECTED: &'static str = "a number";
    const KIND: Kind = Kind::Number;

    fn read(text: &str) -> Option<Self> {
        text.parse().ok().filter(|x: &f64| x.is_finite())
    }
}

impl Setting for bool {
    const NAME: &'static str = "BOOL";
    const EXPECTED: &'static str = "true or false";
    const KIND: Kind = Kind::Boolean;

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
    const KIND: Kind = Kind::Path;

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
pub fn required<T: Setting>(text: &str) -> Result<T, String> {
    T::read(text).ok_or_else(|| format!("expected {}", T::EXPECTED))
}

/// Parses a value, or `none` or `null`.
pub fn optional<T: Setting>(text: &str) -> Result<Option<T>, String> {
    match text.to_ascii_lowercase().as_str() {
        "none" | "null" => Ok(None),
        _ => required(text).map(Some),
    }
}

/// Accepts any text, including an empty one.
///
/// # Errors
/// None.
pub fn any_text(text: &str) -> Result<String, String> {
    Ok(text.into())
}

/// Parses a number of steps; TRL writes "not set" as -1.
pub fn steps_or_minus_one(text: &str) -> Result<Option<usize>, String> {
    if text == "-1" { Ok(None) } else { optional(text) }
}

/// Parses a number of most likely tokens, 0 for all; vLLM and TRL write "all" as -1 too.
pub fn top_k_or_minus_one(text: &str) -> Result<usize, String> {
    if text == "-1" { Ok(0) } else { required(text) }
}

/// As [`top_k_or_minus_one`], or `none` or `null`.
pub fn optional_top_k(text: &str) -> Result<Option<usize>, String> {
    if text == "-1" { Ok(Some(0)) } else { optional(text) }
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
/// Text that is no JSON object is accepted here, and refused by the check of the setting: an error of the parser would show the text, which
/// may hold a secret.
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
    const KIND: Kind = Kind::Json;

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
}
