//! Chat templates: a list of messages becomes a text, as transformers' `apply_chat_template` renders it.

use crate::{Error, Result};
use jiff::Zoned;
use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{AutoEscape, Environment, ErrorKind, Value as Item, syntax::SyntaxConfig};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// The most steps of a template for one text, far above any real one: a hostile template ends in a second.
const FUEL: u64 = 10_000_000;

/// A template that was compiled, or why it could not be: only who has messages needs to know.
#[derive(Debug, Clone)]
pub(super) struct ChatTemplate {
    file: PathBuf,
    source: String,
    compiled: Result<Environment<'static>, String>,
}

impl ChatTemplate {
    /// Compiles `source`, which stands in `file`.
    pub(super) fn new(file: PathBuf, source: &str) -> Self {
        let mut environment = environment();
        let compiled = environment.add_template_owned("chat", plain_blocks(&unix_lines(source)));
        let compiled = compiled.map(|()| environment).map_err(|e| explain(&e));
        Self { file, source: source.to_string(), compiled }
    }

    /// Whether it has the same text as another.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.source == other.source
    }

    /// Where it stands.
    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    /// The text of `messages`; `variables` are those of the template beside them.
    pub(super) fn render(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
        variables: impl IntoIterator<Item = (String, Value)>,
    ) -> Result<String> {
        let environment = self.compiled.as_ref().map_err(|e| Error::invalid(&self.file, e.as_str()))?;
        let messages: Vec<Value> = messages.iter().map(tidy).collect::<Result<_>>()?;
        let mut context = Map::new();
        context.insert("messages".into(), messages.into());
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        // Defined and none, as transformers passes them.
        context.insert("tools".into(), Value::Null);
        context.insert("documents".into(), Value::Null);
        context.extend(variables);
        let template = environment.get_template("chat").expect("it was added");
        // The row may be at fault as well as the template, so who knows the row adds its place.
        template
            .render(Item::from(Serde(&context)))
            .map_err(|e| Error::Run(format!("{}: {}", self.file.display(), explain(&e))))
    }
}

/// What transformers gives to its templates, with Python's methods on strings and dictionaries.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().expect("the usual delimiters");
    environment.set_syntax(syntax);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", |value: &Item, options: Kwargs| to_json(value, &options));
    // In Python whatever has a length and an index is a sequence.
    environment.add_test("sequence", |value: &Item| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined)
    });
    environment.add_function("raise_exception", |message: String| {
        Err::<Item, _>(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: &str| {
        let now = jiff::fmt::strtime::format(format, &Zoned::now());
        now.map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}")))
    });
    environment
}

/// One line of what is wrong, with the template's line.
fn explain(error: &minijinja::Error) -> String {
    let message = match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => format!("does not end within {FUEL} steps"),
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_string(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
    match error.line() {
        Some(line) => format!("chat template, line {line}: {message}"),
        None => format!("chat template: {message}"),
    }
}

/// `text` with line ends as Jinja has them, whatever wrote the file.
fn unix_lines(text: &str) -> String {
    text.replace("\r\n", "\n").replace('\r', "\n")
}

/// `{% generation %}` marks what a model says, for masks that are not made here: to the text it is a block with
/// variables of its own.
fn plain_blocks(source: &str) -> String {
    let mut parts = source.split("{%");
    let mut plain = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let name = part.trim_start_matches(['-', '+']).trim_start();
        let tag = &part[..part.len() - name.len()];
        let ends = |rest: &str| rest.trim_start().trim_start_matches(['-', '+']).starts_with("%}");
        plain += "{%";
        plain += tag;
        plain += &match (name.strip_prefix("generation"), name.strip_prefix("endgeneration")) {
            (Some(rest), _) if ends(rest) => format!("with{rest}"),
            (_, Some(rest)) if ends(rest) => format!("endwith{rest}"),
            _ => name.to_string(),
        };
    }
    plain
}

/// A message as templates expect it: without what is null, its parts joined to one text, its reasoning under each of
/// the names that templates look for.
fn tidy(message: &Value) -> Result<Value> {
    let wrong = |what: &str| Error::Run(format!("{what}, found {message}"));
    let fields = message.as_object().ok_or_else(|| wrong("expected a message with `role` and `content`"))?;
    if !fields.get("role").is_some_and(Value::is_string) {
        return Err(wrong("expected a message with a string `role`"));
    }
    let mut tidy: Map<String, Value> = fields.clone();
    tidy.retain(|_, value| !value.is_null());
    if let Some(content) = tidy.get_mut("content")
        && !content.is_string()
    {
        let text = |part: &Value| part["text"].as_str().filter(|_| part["type"] == "text").map(String::from);
        let parts: Option<String> = content.as_array().and_then(|parts| parts.iter().map(text).collect());
        *content = parts.ok_or_else(|| wrong("`content`: expected a string or a list of text parts"))?.into();
    }
    let reasoning = ["reasoning_content", "thinking", "reasoning"].iter().find_map(|name| tidy.get(*name)).cloned();
    if let Some(reasoning) = reasoning {
        let mut all = Map::from_iter([("thinking".to_string(), reasoning.clone())]);
        all.extend(tidy);
        all.insert("reasoning_content".into(), reasoning);
        tidy = all;
    }
    Ok(tidy.into())
}

/// The message of a user who says `text`.
pub(crate) fn user_message(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

/// The filter `tojson` as transformers defines it: Python's `json.dumps`, nothing escaped for HTML.
fn to_json(value: &Item, options: &Kwargs) -> Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let bad = |what: String| minijinja::Error::new(ErrorKind::InvalidOperation, format!("tojson: {what}"));
    let (item, key) = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }, ": "),
        Some([item, key]) => (item.as_str(), key.as_str()),
        Some(_) => return Err(bad("expected two separators".into())),
    };
    if value.is_undefined() {
        return Err(bad("the value is undefined".into()));
    }
    let value = serde_json::to_value(value).map_err(|e| bad(e.to_string()))?;
    let mut json = String::new();
    Dumps { item, key, indent, ascii, sort_keys }.write(&value, 0, &mut json);
    Ok(json)
}

/// Python's `json.dumps`.
struct Dumps<'a> {
    /// What stands between two items, and between key and value.
    item: &'a str,
    key: &'a str,
    indent: Option<usize>,
    ascii: bool,
    sort_keys: bool,
}

impl Dumps<'_> {
    fn write(&self, value: &Value, depth: usize, out: &mut String) {
        match value {
            Value::Array(items) => {
                let items = items.iter().map(|item| (None, item));
                self.write_items(['[', ']'], items.collect(), depth, out);
            }
            Value::Object(fields) => {
                let mut fields: Vec<_> = fields.iter().map(|(key, value)| (Some(key), value)).collect();
                if self.sort_keys {
                    fields.sort_by_key(|(key, _)| *key);
                }
                self.write_items(['{', '}'], fields, depth, out);
            }
            Value::String(text) => self.write_text(text, out),
            Value::Number(number) if number.is_f64() => *out += &python_float(number.as_f64().unwrap_or_default()),
            other => *out += &other.to_string(),
        }
    }

    fn write_items(
        &self,
        [open, close]: [char; 2],
        items: Vec<(Option<&String>, &Value)>,
        depth: usize,
        out: &mut String,
    ) {
        let new_line = |depth: usize, out: &mut String| {
            if let Some(indent) = self.indent {
                out.push('\n');
                *out += &" ".repeat(indent * depth);
            }
        };
        out.push(open);
        let empty = items.is_empty();
        for (at, (key, value)) in items.into_iter().enumerate() {
            if at > 0 {
                *out += self.item;
            }
            new_line(depth + 1, out);
            if let Some(key) = key {
                self.write_text(key, out);
                *out += self.key;
            }
            self.write(value, depth + 1, out);
        }
        if !empty {
            new_line(depth, out);
        }
        out.push(close);
    }

    fn write_text(&self, text: &str, out: &mut String) {
        let json = Value::from(text).to_string();
        for c in json.chars() {
            if self.ascii && !c.is_ascii() {
                *out += &c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect::<String>();
            } else {
                out.push(c);
            }
        }
    }
}

/// A float as Python writes it: an exponent from 1e16 on and below 1e-4.
fn python_float(x: f64) -> String {
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        exponent @ -4..16 => format!("{x}{}", if exponent >= 0 && x.fract() == 0.0 { ".0" } else { "" }),
        exponent => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, messages: &Value) -> Result<String> {
        ChatTemplate::new("chat_template.jinja".into(), source).render(messages.as_array().unwrap(), true, [])
    }

    #[track_caller]
    fn fails(source: &str, messages: &Value, wanted: &str) {
        assert_eq!(render(source, messages).unwrap_err().to_string(), wanted, "{source}");
    }

    #[test]
    fn floats_read_as_pythons_repr() {
        for (x, text) in [
            (0.1, "0.1"),
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (1e-4, "0.0001"),
            (1.5e-5, "1.5e-05"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.25e300, "1.25e+300"),
        ] {
            assert_eq!(python_float(x), text);
        }
    }

    #[test]
    fn errors_name_the_file_the_line_and_what_is_wrong() {
        let hi = json!([user_message("hi")]);
        fails("a\n{% if %}", &hi, "chat_template.jinja: chat template, line 2: syntax error: unexpected end of block");
        fails(
            "\n\n{{ raise_exception('roles must\nalternate') }}",
            &hi,
            "chat_template.jinja: chat template, line 3: roles must alternate",
        );
        fails(
            "{{ messages | shuffle }}",
            &hi,
            "chat_template.jinja: chat template, line 1: unknown filter: filter shuffle is unknown",
        );
        fails(
            "{% include '/etc/passwd' %}",
            &hi,
            "chat_template.jinja: chat template, line 1: template not found: tried to include non-existing template '/etc/passwd'",
        );
    }

    #[test]
    fn a_template_that_would_never_end_is_stopped() {
        let hi = json!([user_message("hi")]);
        let around = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
        fails(around, &hi, "chat_template.jinja: chat template, line 1: does not end within 10000000 steps");
        let down = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
        assert!(render(down, &hi).unwrap_err().to_string().contains("recursion limit"));
    }

    #[test]
    fn messages_that_are_none_are_refused() {
        for (messages, wanted) in [
            (json!(["hi"]), "expected a message with `role` and `content`, found \"hi\""),
            (json!([{"content": "hi"}]), "expected a message with a string `role`, found {\"content\":\"hi\"}"),
            (
                json!([{"role": "user", "content": [{"type": "image", "url": "x"}]}]),
                "`content`: expected a string or a list of text parts, found {\"role\":\"user\",\"content\":\
                 [{\"type\":\"image\",\"url\":\"x\"}]}",
            ),
        ] {
            fails("", &messages, wanted);
        }
    }
}
