//! Casts of arguments that a model wrote as texts, by the JSON schemas of the tools.

use crate::tokenizer::python::is_space;
use serde_json::{Map, Number, Value};
use std::collections::HashMap;

/// Numbers from here on are no longer all exact integers in 64 bits.
const MOST: f64 = 9_223_372_036_854_775_808.0;

/// The schemas of the tools' parameters, by the names of the tools.
pub(super) struct Schemas<'a>(HashMap<&'a str, &'a Map<String, Value>>);

impl<'a> Schemas<'a> {
    pub(super) fn new(tools: &'a [Value]) -> Self {
        let parameters = |tool: &'a Value| {
            let function = tool.get("function").unwrap_or(tool);
            Some((function["name"].as_str()?, function["parameters"]["properties"].as_object()?))
        };
        Self(tools.iter().filter_map(parameters).collect())
    }

    /// Casts the arguments of a call of the tool `name` that are texts, as transformers does; a text that is none of the types stays as it is.
    pub(super) fn cast(&self, name: &str, arguments: &mut Map<String, Value>) {
        let Some(properties) = self.0.get(name) else { return };
        for (key, argument) in arguments.iter_mut() {
            let types = properties.get(key).map(schema_types).unwrap_or_default();
            match argument {
                Value::String(text) => {
                    if let Some(value) = cast(text, &types) {
                        *argument = value;
                    }
                }
                // A list where none is expected: each of its items.
                Value::Array(items) if !types.is_empty() && !types.contains(&"array") => {
                    for item in items {
                        if let Some(value) = item.as_str().and_then(|text| cast(text, &types)) {
                            *item = value;
                        }
                    }
                }
                _ => {}
            }
        }
    }
}

/// The names of the types that a schema allows, in its order.
fn schema_types(schema: &Value) -> Vec<&str> {
    let mut types: Vec<&str> = match &schema["type"] {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    for union in ["anyOf", "oneOf"] {
        types.extend(schema[union].as_array().into_iter().flatten().flat_map(schema_types));
    }
    if schema["nullable"] == true && !types.contains(&"null") {
        types.push("null");
    }
    types
}

/// Returns the value of `text` as the first of the types that it is.
fn cast(text: &str, types: &[&str]) -> Option<Value> {
    let word = text.trim_matches(is_space);
    types.iter().find_map(|name| match *name {
        "integer" => integer(word),
        "number" => number(word),
        "boolean" => match word.to_lowercase().as_str() {
            "true" | "1" => Some(true.into()),
            "false" | "0" => Some(false.into()),
            _ => None,
        },
        "null" => ["null", "None"].contains(&word).then_some(Value::Null),
        "object" => serde_json::from_str(text).ok().filter(Value::is_object),
        "array" => serde_json::from_str(text).ok().filter(Value::is_array),
        _ => None,
    })
}

/// Python's `int(text)`, also for a float without a fraction.
fn integer(text: &str) -> Option<Value> {
    let text = without_underscores(text)?;
    if let Ok(whole) = text.parse::<i64>() {
        return Some(whole.into());
    }
    if let Ok(whole) = text.parse::<u64>() {
        return Some(whole.into());
    }
    whole(text.parse().ok()?)
}

/// Python's `float(text)`, as an integer where it is one without a point.
fn number(text: &str) -> Option<Value> {
    let text = without_underscores(text)?;
    let number: f64 = text.parse().ok()?;
    let is_whole = number.fract() == 0.0 && !text.contains('.');
    is_whole.then(|| whole(number)).flatten().or_else(|| Number::from_f64(number).map(Value::from))
}

/// The integer that `number` is.
fn whole(number: f64) -> Option<Value> {
    let is_whole = number.fract() == 0.0 && number.abs() < MOST;
    // Exact: it is an integer within the range.
    is_whole.then(|| Value::from(number as i64))
}

/// `text` without the underscores that Python allows between two digits; `None` where it allows none.
fn without_underscores(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let is_digit = |at: Option<usize>| at.and_then(|at| bytes.get(at)).is_some_and(u8::is_ascii_digit);
    let is_allowed = |at: usize| is_digit(at.checked_sub(1)) && is_digit(Some(at + 1));
    text.match_indices('_').all(|(at, _)| is_allowed(at)).then(|| text.replace('_', ""))
}
