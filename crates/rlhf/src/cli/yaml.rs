//! YAML read as settings, each with its line.

use std::collections::VecDeque;

use clap::{Arg, ArgAction};
use rlhf::Result;
use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::config_file::Keys;
use super::layers::Setting;
use super::trl;

/// One setting of a document as it stands there, and what is wrong with the form of its value.
pub(super) struct Found {
    pub(super) setting: Setting,
    pub(super) fault: Option<&'static str>,
}

/// The settings of a YAML document in its order, a section before what is in it, or the line and the message of what keeps it
/// from being read. Keys may have dashes.
pub(super) fn read_yaml(text: &str, keys: &Keys<'_>) -> Result<Vec<Found>, (u64, String)> {
    let (mut forms, mut found) = (VecDeque::new(), Vec::new());
    pass(text, keys, &mut Pass::Forms(&mut forms))?;
    pass(text, keys, &mut Pass::Values(&mut forms, &mut found))?;
    Ok(found)
}

fn pass(text: &str, keys: &Keys<'_>, pass: &mut Pass<'_>) -> Result<(), (u64, String)> {
    // A number's own form is its flag's to judge.
    let any_float = serde_saphyr::NonFiniteFloatPolicy::PassThrough;
    let options = serde_saphyr::options! { with_snippet: false, non_finite_float_policy: any_float };
    let mut reading = None;
    serde_saphyr::with_deserializer_from_str_with_options(text, options, |yaml| {
        yaml.deserialize_map(Settings { keys, section: None, pass, reading: &mut reading })
    })
    .map_err(|error| {
        let line = error.location().map_or(1, |location| location.line());
        // A section that is no map.
        let is_form = |error: &serde_saphyr::Error| {
            let message = error.to_string();
            matches!(error, serde_saphyr::Error::Unexpected { .. })
                || [NO_MAP, "invalid type"].iter().any(|part| message.contains(part))
        };
        match (error, reading) {
            (serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. }, _) => {
                (line, format!("`{key}` is set twice"))
            }
            (error, Some((key, line))) if is_form(&error) => (line, format!("`{key}`: {NO_MAP}")),
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

/// Whether a flag takes several values.
fn is_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append) || arg.get_num_args().is_some_and(|count| count.max_values() > 1)
}

/// The form of a value: it is looked at before it is read, as what is of another form than its reader's ends the reading.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    One,
    Many,
    /// A list or a map with nothing in it.
    Empty,
    Nested,
}

impl<'de> Deserialize<'de> for Form {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Form;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a value")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Form, A::Error> {
                let mut form = Form::Empty;
                while let Some(element) = list.next_element::<Form>()? {
                    form = if element == Form::One && form != Form::Nested { Form::Many } else { Form::Nested };
                }
                Ok(form)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Form, A::Error> {
                let mut form = Form::Empty;
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    form = Form::Nested;
                }
                Ok(form)
            }

            fn visit_unit<E>(self) -> Result<Form, E> {
                Ok(Form::One)
            }

            fn visit_none<E>(self) -> Result<Form, E> {
                Ok(Form::One)
            }

            fn visit_str<E>(self, _: &str) -> Result<Form, E> {
                Ok(Form::One)
            }

            fn visit_bool<E>(self, _: bool) -> Result<Form, E> {
                Ok(Form::One)
            }

            fn visit_i64<E>(self, _: i64) -> Result<Form, E> {
                Ok(Form::One)
            }

            fn visit_u64<E>(self, _: u64) -> Result<Form, E> {
                Ok(Form::One)
            }

            fn visit_i128<E>(self, _: i128) -> Result<Form, E> {
                Ok(Form::One)
            }

            fn visit_u128<E>(self, _: u128) -> Result<Form, E> {
                Ok(Form::One)
            }

            fn visit_f64<E>(self, _: f64) -> Result<Form, E> {
                Ok(Form::One)
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

/// What is done with the values of a document.
enum Pass<'a> {
    /// Their forms are noted.
    Forms(&'a mut VecDeque<Form>),
    /// They are read, by their forms.
    Values(&'a mut VecDeque<Form>, &'a mut Vec<Found>),
}

/// Reads the settings of a document or, by its name, of a section in it.
struct Settings<'a, 'p> {
    keys: &'a Keys<'a>,
    section: Option<&'a str>,
    pass: &'a mut Pass<'p>,
    /// The section that is read, and its line.
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
                if let Pass::Values(_, found) = self.pass {
                    found.push(Found { setting: setting(name.clone(), Vec::new()), fault: None });
                }
                let Self { keys, .. } = self;
                map.next_value_seed(Settings { keys, section: Some(&name), pass: self.pass, reading: self.reading })?;
                *self.reading = None;
                continue;
            }
            let (forms, found) = match self.pass {
                Pass::Forms(forms) => {
                    forms.push_back(map.next_value()?);
                    continue;
                }
                Pass::Values(forms, found) => (forms, found),
            };
            let key = self.section.map_or(name.clone(), |section| format!("{section}.{name}"));
            let arg = self.keys.flag(&key);
            let mut fault = None;
            let values = match (forms.pop_front(), arg) {
                (_, None) => map.next_value::<IgnoredAny>().map(|_| Vec::new())?,
                (Some(Form::Empty), Some(arg)) if is_list(arg) => map.next_value::<IgnoredAny>().map(|_| Vec::new())?,
                (Some(Form::One), Some(arg)) if !is_list(arg) => {
                    map.next_value::<Option<String>>()?.into_iter().collect()
                }
                (Some(Form::One | Form::Many), Some(arg)) if is_list(arg) => map.next_value::<Texts>()?.0,
                (_, Some(arg)) => {
                    map.next_value::<IgnoredAny>()?;
                    match trl::is_added(arg) {
                        true => vec!["{...}".to_string()],
                        false => {
                            fault = Some(if is_list(arg) { NO_LIST } else { NO_VALUE });
                            Vec::new()
                        }
                    }
                }
            };
            found.push(Found { setting: setting(key, values), fault });
        }
        Ok(())
    }

    // A section with nothing in it.
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

/// A list of texts; a text alone is a list of one, and null of none.
struct Texts(Vec<String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Texts;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a text or a list of texts")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Texts, A::Error> {
                let mut texts = Vec::new();
                while let Some(text) = list.next_element()? {
                    texts.push(text);
                }
                Ok(Texts(texts))
            }

            fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<Texts, A::Error> {
                Err(A::Error::custom(NO_LIST))
            }

            fn visit_unit<E>(self) -> Result<Texts, E> {
                Ok(Texts(Vec::new()))
            }

            fn visit_none<E>(self) -> Result<Texts, E> {
                Ok(Texts(Vec::new()))
            }

            fn visit_str<E>(self, text: &str) -> Result<Texts, E> {
                Ok(Texts(vec![text.to_string()]))
            }

            fn visit_bool<E>(self, value: bool) -> Result<Texts, E> {
                Ok(Texts(vec![value.to_string()]))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Texts, E> {
                Ok(Texts(vec![value.to_string()]))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Texts, E> {
                Ok(Texts(vec![value.to_string()]))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Texts, E> {
                Ok(Texts(vec![value.to_string()]))
            }
        }
        deserializer.deserialize_any(Reader)
    }
}
