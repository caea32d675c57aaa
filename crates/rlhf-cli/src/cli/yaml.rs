//! Reads YAML as settings, each with its line.
//!
//! The document is parsed twice, because a value whose shape does not fit its flag (a list for a number) would end the deserializer, and
//! with it the list of errors. The first pass only records the shape of each value, and the second reads each value by its shape. One
//! pass for any shape would make typed values of the texts that the user wrote: `1e-5` and `007` would be numbers.

use std::collections::VecDeque;

use clap::{Arg, ArgAction};
use rlhf::Result;
use rlhf::schema::{JsonObject, Setting as _};
use serde::de::{Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::foreign;
use super::keys::Keys;
use super::setting::Setting;

/// One setting of a document, and the error if its value has the wrong shape.
pub(super) struct Entry {
    pub(super) setting: Setting,
    pub(super) error: Option<&'static str>,
}

/// Returns the settings of a YAML document in order, a section before its settings. Keys may have dashes.
///
/// # Errors
/// The line and the message, if the document is not a map of settings.
pub(super) fn read_yaml(text: &str, keys: &Keys<'_>) -> Result<Vec<Entry>, (u64, String)> {
    let mut shapes = VecDeque::new();
    let mut entries = Vec::new();
    run(text, keys, &mut Pass::Shapes(&mut shapes))?;
    run(text, keys, &mut Pass::Values(&mut shapes, &mut entries))?;
    Ok(entries)
}

/// Runs one pass over the document.
fn run(text: &str, keys: &Keys<'_>, pass: &mut Pass<'_>) -> Result<(), (u64, String)> {
    // Flags refuse infinite numbers and NaN themselves.
    let any_float = serde_saphyr::NonFiniteFloatPolicy::PassThrough;
    let options = serde_saphyr::options! { with_snippet: false, non_finite_float_policy: any_float };
    let mut reading = None;
    serde_saphyr::with_deserializer_from_str_with_options(text, options, |yaml| {
        yaml.deserialize_map(Settings { keys, section: None, pass, reading: &mut reading })
    })
    .map_err(|error| {
        let line = error.location().map_or(1, |location| location.line());
        // A section that is not a map.
        let is_shape = |error: &serde_saphyr::Error| {
            let message = error.to_string();
            matches!(error, serde_saphyr::Error::Unexpected { .. })
                || [NO_MAP, "invalid type"].iter().any(|part| message.contains(part))
        };
        match (error, reading) {
            (serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. }, _) => {
                (line, format!("`{key}` is set twice"))
            }
            (error, Some((key, line))) if is_shape(&error) => (line, format!("`{key}`: {NO_MAP}")),
            (serde_saphyr::Error::Unexpected { .. }, None) => (line, "expected lines of the form `key: value`".into()),
            (serde_saphyr::Error::MultipleDocuments { .. }, _) => {
                (line, "expected one YAML document, found two".into())
            }
            (error, _) => {
                let message = error.to_string();
                let message = message.split(" at line ").next().unwrap_or_default();
                (line, format!("not valid YAML: {message}"))
            }
        }
    })
}

const NO_MAP: &str = "expected settings of the form `key: value` below it";

const NO_VALUE: &str = "expected one value, found a list or a map";

const NO_LIST: &str = "expected a text or a list of texts, found something else";

/// Returns whether the values of a flag are JSON objects, which a file may have as maps.
fn takes_json(arg: &Arg) -> bool {
    arg.get_value_names().is_some_and(|names| names.iter().any(|name| name == JsonObject::NAME))
}

/// Returns whether a flag takes several values.
fn is_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append) || arg.get_num_args().is_some_and(|count| count.max_values() > 1)
}

/// Shape of a value.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Shape {
    One,
    Many,
    /// An empty list or map.
    Empty,
    Nested,
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Shape;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a value")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Shape, A::Error> {
                let mut shape = Shape::Empty;
                while let Some(element) = list.next_element::<Shape>()? {
                    shape = if element == Shape::One && shape != Shape::Nested { Shape::Many } else { Shape::Nested };
                }
                Ok(shape)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Shape, A::Error> {
                let mut shape = Shape::Empty;
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    shape = Shape::Nested;
                }
                Ok(shape)
            }

            fn visit_unit<E>(self) -> Result<Shape, E> {
                Ok(Shape::One)
            }

            fn visit_none<E>(self) -> Result<Shape, E> {
                Ok(Shape::One)
            }

            fn visit_str<E>(self, _: &str) -> Result<Shape, E> {
                Ok(Shape::One)
            }

            fn visit_bool<E>(self, _: bool) -> Result<Shape, E> {
                Ok(Shape::One)
            }

            fn visit_i64<E>(self, _: i64) -> Result<Shape, E> {
                Ok(Shape::One)
            }

            fn visit_u64<E>(self, _: u64) -> Result<Shape, E> {
                Ok(Shape::One)
            }

            fn visit_i128<E>(self, _: i128) -> Result<Shape, E> {
                Ok(Shape::One)
            }

            fn visit_u128<E>(self, _: u128) -> Result<Shape, E> {
                Ok(Shape::One)
            }

            fn visit_f64<E>(self, _: f64) -> Result<Shape, E> {
                Ok(Shape::One)
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

/// One of the two passes over a document.
enum Pass<'a> {
    /// Records the shapes of the values.
    Shapes(&'a mut VecDeque<Shape>),
    /// Reads the values by their shapes.
    Values(&'a mut VecDeque<Shape>, &'a mut Vec<Entry>),
}

/// Visitor of the settings of a document, or of its section `section`.
struct Settings<'a, 'p> {
    keys: &'a Keys<'a>,
    section: Option<&'a str>,
    pass: &'a mut Pass<'p>,
    /// The section being read, and its line.
    reading: &'a mut Option<(String, u64)>,
}

impl<'de> DeserializeSeed<'de> for Settings<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Settings<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("settings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<Spanned<String>>()? {
            let (name, line) = (name.value.replace('-', "_"), name.referenced.line());
            let setting = |key: String, values| Setting { key, line, values };
            if self.section.is_none() && self.keys.section(&name).is_some() {
                *self.reading = Some((name.clone(), line));
                if let Pass::Values(_, entries) = self.pass {
                    entries.push(Entry { setting: setting(name.clone(), Vec::new()), error: None });
                }
                let Self { keys, .. } = self;
                map.next_value_seed(Settings { keys, section: Some(&name), pass: self.pass, reading: self.reading })?;
                *self.reading = None;
                continue;
            }
            let (shapes, entries) = match self.pass {
                Pass::Shapes(shapes) => {
                    shapes.push_back(map.next_value()?);
                    continue;
                }
                Pass::Values(shapes, entries) => (shapes, entries),
            };
            let key = self.section.map_or(name.clone(), |section| format!("{section}.{name}"));
            let arg = self.keys.flag(&key);
            let mut error = None;
            let values = match (shapes.pop_front(), arg) {
                (_, None) => map.next_value::<IgnoredAny>().map(|_| Vec::new())?,
                (Some(Shape::Empty), Some(arg)) if is_list(arg) => {
                    map.next_value::<IgnoredAny>().map(|_| Vec::new())?
                }
                // One text is a list of one, and null an empty list.
                (Some(Shape::One), Some(_)) => map.next_value::<Option<String>>()?.into_iter().collect(),
                (Some(Shape::Many), Some(arg)) if is_list(arg) => map.next_value()?,
                (Some(Shape::Nested), Some(arg)) if foreign::takes_map(arg) => {
                    vec![map.next_value::<serde_json::Value>()?.to_string()]
                }
                (Some(Shape::Empty), Some(arg)) if takes_json(arg) => {
                    map.next_value::<IgnoredAny>().map(|_| Vec::new())?
                }
                (_, Some(arg)) if takes_json(arg) => vec![map.next_value::<serde_json::Value>()?.to_string()],
                (_, Some(arg)) => {
                    map.next_value::<IgnoredAny>()?;
                    if foreign::is_added(arg) {
                        vec!["{...}".to_string()]
                    } else {
                        error = Some(if is_list(arg) { NO_LIST } else { NO_VALUE });
                        Vec::new()
                    }
                }
            };
            entries.push(Entry { setting: setting(key, values), error });
        }
        Ok(())
    }

    // An empty section.
    fn visit_unit<E: serde::de::Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<(), E> {
        // An empty scalar is null.
        if text.is_empty() { Ok(()) } else { Err(E::custom(NO_MAP)) }
    }
}
