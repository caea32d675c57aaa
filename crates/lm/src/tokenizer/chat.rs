//! Chat templates: render a list of messages as a text, as transformers' `apply_chat_template` does.

use super::bounds::{self, Program, SYNTAX, pay};
use super::date;
use super::messages::{MessageFault, check_message, normalized};
use super::python::python_float;
use jiff::civil::DateTime;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, ErrorKind, Value as Item};
use rlhf_base::{Error, Result};
use serde_json::{Map, Value, json};
use std::cell::Cell;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

/// Maximum steps of a template for one text, far more than any real template needs; a hostile template ends within a second.
const FUEL: u64 = 10_000_000;

/// Maximum characters of the message of an error.
const MAX_MESSAGE: usize = 2000;

/// A compiled template, or the error of compiling it, which is reported only when messages are rendered.
#[derive(Debug, Clone)]
pub(super) struct ChatTemplate {
    file: PathBuf,
    source: String,
    compiled: Result<Arc<Program>, String>,
    /// The date that it reads; none for the system's.
    date: Option<DateTime>,
}

impl ChatTemplate {
    /// Compiles `source`, which comes from `file`.
    pub(super) fn new(file: PathBuf, source: &str) -> Self {
        let compiled = Program::compile(marked_blocks(&unix_lines(source)), &SYNTAX);
        let compiled = compiled.map(Arc::new).map_err(|e| explain(&e));
        Self { file, source: source.to_string(), compiled, date: date::load_date() }
    }

    /// Whether the two templates have the same source.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.source == other.source
    }

    /// Whether it marks the assistant's text with `{% generation %}`.
    pub(super) fn has_marks(&self) -> bool {
        marked_blocks(&self.source) != self.source
    }

    /// Its source.
    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// The file that contains it.
    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    /// Renders `messages`; `variables` are further variables of the template.
    pub(super) fn render(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
        variables: impl IntoIterator<Item = (String, Value)>,
    ) -> Result<String> {
        self.render_with(messages, add_generation_prompt, variables, "")
    }

    /// As [`ChatTemplate::render`], with the byte ranges of the text in `{% generation %}` blocks.
    pub(super) fn render_marked(
        &self,
        messages: &[Value],
        variables: impl IntoIterator<Item = (String, Value)>,
    ) -> Result<(String, Vec<Range<usize>>)> {
        let mark = unused_mark(messages);
        let marked = self.render_with(messages, false, variables, &mark)?;
        let (mut text, mut spans) = (String::new(), Vec::new());
        for (at, part) in marked.split(mark.as_str()).enumerate() {
            let start = text.len();
            text += part;
            if at % 2 == 1 && !part.is_empty() {
                spans.push(start..text.len());
            }
        }
        Ok((text, spans))
    }

    /// Renders `messages` up to the end of the last one's content, which the response continues, as transformers'
    /// `continue_final_message` does.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`]; if the last message has no text, or the template does not write it.
    pub(super) fn render_continued(
        &self,
        messages: &[Value],
        variables: impl IntoIterator<Item = (String, Value)>,
    ) -> Result<String> {
        let mark = unused_mark(messages);
        let mut messages = messages.to_vec();
        let fault = |what: &str| Error::Run(format!("the last message, which the response continues: {what}"));
        let last = messages.last_mut().and_then(Value::as_object_mut);
        let content = last.and_then(|last| last.get_mut("content"));
        let no_text = || fault("expected a text as its `content`, found none");
        let end: &mut Value = match content.ok_or_else(no_text)? {
            Value::Array(parts) => {
                let part = parts.iter_mut().rev().find(|part| part["text"].is_string());
                &mut part.ok_or_else(no_text)?["text"]
            }
            content => content,
        };
        let content_text = end.as_str().ok_or_else(no_text)?.to_string();
        // The space shows whether the template trims contents.
        *end = format!("{content_text}{mark} ").into();
        let text = self.render_with(&messages, false, variables, "")?;
        let at = text.rfind(&mark).filter(|_| text.contains(content_text.trim()));
        let at = at.ok_or_else(|| fault("the chat template does not write its `content` as it is"))?;
        let is_kept = text[at + mark.len()..].starts_with(' ');
        Ok(if is_kept { text[..at].to_string() } else { text[..at].trim_end().to_string() })
    }

    fn render_with(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
        variables: impl IntoIterator<Item = (String, Value)>,
        mark: &str,
    ) -> Result<String> {
        let program = self.compiled.as_ref().map_err(|e| Error::invalid(&self.file, e.as_str()))?;
        messages.iter().try_for_each(checked)?;
        let messages: Vec<Value> = messages.iter().map(|message| normalized(message, &self.source)).collect();
        let mut context = Map::new();
        context.insert("messages".into(), messages.into());
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        // Defined and none, as transformers passes them.
        context.insert("tools".into(), Value::Null);
        context.insert("documents".into(), Value::Null);
        context.extend(variables);
        let input = context.values().map(text_bytes).sum();
        let context = Item::from(Serde(&context));
        let begin = || {
            MARK.set(Some(mark.to_string()));
            date::set_render_date(self.date);
        };
        // The row may be at fault as well as the template, so the caller adds the row's place.
        program
            .render(&ENVIRONMENT, context, input, begin)
            .map_err(|e| Error::Run(format!("{}: {}", self.file.display(), explain(&e))))
    }
}

thread_local! {
    /// The mark that the rendering on this thread puts around the assistant's text.
    static MARK: Cell<Option<String>> = const { Cell::new(None) };
}

/// The bytes of all texts in `value`.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(text_bytes).sum(),
        Value::Object(fields) => fields.iter().map(|(name, value)| name.len() + text_bytes(value)).sum(),
        _ => 0,
    }
}

/// The environment that transformers gives to its templates, with Python's methods on strings and dictionaries.
static ENVIRONMENT: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut environment = bounds::environment(&SYNTAX, FUEL);
    let to_json = Item::from_function(|value: &Item, options: Kwargs| to_json(value, &options));
    bounds::add_filter(&mut environment, "tojson", to_json);
    environment.add_filter(MARKED, |text: &str| {
        let mark = MARK.take().unwrap_or_default();
        let marked = pay(text.len() as u64).map(|()| format!("{mark}{text}{mark}"));
        MARK.set(Some(mark));
        marked
    });
    environment.add_function("raise_exception", |message: String| {
        Err::<Item, _>(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    let now = Item::from_function(|format: &str| {
        let now = date::strftime_now(format);
        now.map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}")))
    });
    bounds::add_function(&mut environment, "strftime_now", now);
    environment
});

/// The error in one line, with the template's line number.
fn explain(error: &minijinja::Error) -> String {
    let message = match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => format!("does not end within {FUEL} steps"),
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_string(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    // A template may raise an error with a text of any length.
    let message: String = message.chars().take(MAX_MESSAGE).collect();
    let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
    match error.line() {
        Some(line) => format!("chat template, line {line}: {message}"),
        None => format!("chat template: {message}"),
    }
}

/// `text` with Jinja's line ends, independent of the system that wrote the file.
fn unix_lines(text: &str) -> String {
    text.replace("\r\n", "\n").replace('\r', "\n")
}

/// The filter that marks the assistant's text.
const MARKED: &str = "assistant_text";

/// `source` with each `{% generation %}` block, which marks the assistant's text, replaced by a filter of a block with its own
/// scope.
fn marked_blocks(source: &str) -> String {
    let mut parts = source.split("{%");
    let mut marked = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let name = part.trim_start_matches(['-', '+']).trim_start();
        let tag = &part[..part.len() - name.len()];
        let ends = |rest: &str| rest.trim_start().trim_start_matches(['-', '+']).starts_with("%}");
        marked += "{%";
        marked += tag;
        marked += &match (name.strip_prefix("generation"), name.strip_prefix("endgeneration")) {
            (Some(rest), _) if ends(rest) => format!("filter {MARKED} %}}{{% with{rest}"),
            (_, Some(rest)) if ends(rest) => format!("endwith %}}{{% endfilter{rest}"),
            _ => name.to_string(),
        };
    }
    marked
}

/// Checks a message of a conversation.
fn checked(message: &Value) -> Result<()> {
    let Err(fault) = check_message(message) else { return Ok(()) };
    let expected = match fault {
        MessageFault::NoObject => "expected a message with `role` and `content`",
        MessageFault::Role => "expected a message with a string `role`",
        MessageFault::Content => "`content`: expected a string or a list of text parts",
    };
    Err(Error::Run(format!("{expected}, found {message}")))
}

/// Returns a mark that occurs in no message.
pub(super) fn unused_mark(messages: &[Value]) -> String {
    let texts = messages.iter().map(Value::to_string).collect::<String>();
    // In JSON these two characters are escaped.
    let is_unused = |n: &usize| !texts.contains(&format!("\\u0001{n}\\u0002"));
    let n = (0..).find(is_unused).unwrap_or_default();
    format!("\u{1}{n}\u{2}")
}

/// A user's message with the content `text`.
pub fn user_message(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

/// The filter `tojson` as transformers defines it: Python's `json.dumps`, without HTML escapes.
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
    Dumps { item, key, indent, ascii, sort_keys }.write(&value, 0, &mut json)?;
    Ok(json)
}

/// Python's `json.dumps`.
struct Dumps<'a> {
    /// Separators between two items, and between key and value.
    item: &'a str,
    key: &'a str,
    indent: Option<usize>,
    ascii: bool,
    sort_keys: bool,
}

impl Dumps<'_> {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), minijinja::Error> {
        match value {
            Value::Array(items) => {
                let items = items.iter().map(|item| (None, item));
                self.write_items(['[', ']'], items.collect(), depth, out)?;
            }
            Value::Object(fields) => {
                let mut fields: Vec<_> = fields.iter().map(|(key, value)| (Some(key), value)).collect();
                if self.sort_keys {
                    fields.sort_by_key(|(key, _)| *key);
                }
                self.write_items(['{', '}'], fields, depth, out)?;
            }
            Value::String(text) => self.write_text(text, out),
            Value::Number(number) if number.is_f64() => *out += &python_float(number.as_f64().unwrap_or_default()),
            other => *out += &other.to_string(),
        }
        Ok(())
    }

    fn write_items(
        &self,
        [open, close]: [char; 2],
        items: Vec<(Option<&String>, &Value)>,
        depth: usize,
        out: &mut String,
    ) -> Result<(), minijinja::Error> {
        let new_line = |depth: usize, out: &mut String| {
            if let Some(indent) = self.indent {
                pay(indent.saturating_mul(depth) as u64)?;
                out.push('\n');
                *out += &" ".repeat(indent * depth);
            }
            Ok::<_, minijinja::Error>(())
        };
        out.push(open);
        let empty = items.is_empty();
        for (at, (key, value)) in items.into_iter().enumerate() {
            pay((self.item.len() + self.key.len()) as u64)?;
            if at > 0 {
                *out += self.item;
            }
            new_line(depth + 1, out)?;
            if let Some(key) = key {
                self.write_text(key, out);
                *out += self.key;
            }
            self.write(value, depth + 1, out)?;
        }
        if !empty {
            new_line(depth, out)?;
        }
        out.push(close);
        Ok(())
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
    fn the_date_is_that_of_the_system_in_pythons_formats() {
        let hi = json!([user_message("hi")]);
        for format in ["%d %B %Y", "%d %b %Y", "%Y-%m-%d", "%A", "%B %-d, %Y", "%j %y %p"] {
            let date = || {
                let date = std::process::Command::new("date").arg(format!("+{format}")).env("LC_ALL", "C").output();
                String::from_utf8(date.unwrap().stdout).unwrap().trim_end().to_string()
            };
            // Midnight may be between the two.
            let (before, found, after) =
                (date(), render(&format!("{{{{ strftime_now('{format}') }}}}"), &hi).unwrap(), date());
            assert!(found == before || found == after, "{format}: {found}, date has {before}");
        }
    }

    #[test]
    fn the_date_of_a_template_that_is_loaded_for_a_run_is_that_of_its_start_on_any_day() {
        let today = "{{ strftime_now('%d %B %Y') }}";
        let begun = date::FixedDate::new("2024-02-29T23:59:58").unwrap();
        let template = ChatTemplate::new("t".into(), today);
        drop(begun);
        let hi = [user_message("hi")];
        assert_eq!(template.render(&hi, true, []).unwrap(), "29 February 2024");
        // Another one on the same thread reads the system's.
        assert_ne!(ChatTemplate::new("t".into(), today).render(&hi, true, []).unwrap(), "29 February 2024");
    }

    #[test]
    fn parts_are_joined_for_a_template_that_reads_texts_only() {
        let parts =
            json!([{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}]);
        assert_eq!(render("{{ messages[0].content }}", &parts).unwrap(), "a b");
        let read = "{% for part in messages[0].content %}{{ part['text'] | trim }}{% endfor %}";
        assert_eq!(render(read, &parts).unwrap(), "ab");
    }

    #[test]
    fn none_is_not_iterable_and_a_template_guarded_by_that_renders_without_tools() {
        let hi = json!([user_message("hi")]);
        // The guard of Qwen3-Coder.
        let guard = "{% if tools is iterable and tools | length > 0 %}tools{% else %}none{% endif %}";
        assert_eq!(render(guard, &hi).unwrap(), "none");
        let with = |tools: Value| {
            let template = ChatTemplate::new("t".into(), guard);
            template.render(hi.as_array().unwrap(), true, [("tools".to_string(), tools)]).unwrap()
        };
        assert_eq!((with(json!([])), with(json!([{"name": "f"}]))), ("none".into(), "tools".into()));
        // Each as in Jinja2 3.1.
        for (value, wanted) in [("none", "false"), ("missing", "true"), ("1", "false"), ("'a'", "true"), ("{}", "true")]
        {
            assert_eq!(
                render(&format!("{{{{ {value} is iterable }}}}"), &hi).unwrap().to_lowercase(),
                wanted,
                "{value}"
            );
        }
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
    fn hostile_templates_end_in_one_line_that_names_the_file() {
        let hi = json!([user_message("hi")]);
        let deep = |open: &str, count: usize, close: &str| format!("{}{}", open.repeat(count), close.repeat(count));
        let double = |set: &str| {
            format!("{{% set ns = namespace(x='ab', l=[1]) %}}{{% for i in range(99) %}}{set}{{% endfor %}}")
        };
        let hostile = [
            double("{% set ns.x = ns.x ~ ns.x %}"),
            double("{% set ns.x = ns.x + ns.x %}"),
            double("{% set ns.x = ns.x * 2 %}"),
            double("{% set ns.x = ns.x.replace('a', 'aa').replace('b', 'bb') %}"),
            double("{% set ns.x = ns.x | replace('a', 'aaa') %}"),
            double("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
            double("{% set ns.x = [ns.x, ns.x] | join %}"),
            double("{% set ns.x = ns.x.join([ns.x, ns.x]) %}"),
            double("{% set ns.x = '%s%s' | format(ns.x, ns.x) %}"),
            double("{% set ns.x = '{0}{0}'.format(ns.x) %}"),
            double("{% set ns.x = [ns.x, ns.x] | string %}"),
            double("{% set ns.l = ns.l + ns.l %}"),
            double("{% set ns.l = ns.l * 10 %}"),
            double("{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l }}",
            double("{% set ns.l = {'a': ns.l, 'b': ns.l} %}") + "{{ ns.l | tojson }}",
            double("{% set ns.l = (ns.l, ns.l) %}") + "{{ ns.l == ns.l }}",
            double("{% set ns.l = ns.l | chain(ns.l) | list %}"),
            "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}".into(),
            "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = {'a': ns.l} %}{% endfor %}".into(),
            "{% set ns = namespace(l=[1]) %}{% for i in range(99999) %}{% set ns.l = ns.l | batch(1) | list %}{% endfor %}".into(),
            "{% set ns = namespace(l=[1]) %}{% for i in range(99999) %}{% set ns.l = ns.l | zip | list %}{% endfor %}".into(),
            "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}".into(),
            "{% set ns = namespace() %}{% set ns.x = [{'a': ns}] %}{{ ns | tojson }}".into(),
            "{{ 'a' | indent(100000000000) }}".into(),
            "{{ ['a\\nb'] | map('indent', 100000000000) | list }}".into(),
            "{{ 'a' | indent(width=100000000000) }}".into(),
            "{{ [[1, [2]]] | tojson(indent=100000000000) }}".into(),
            "{{ [1, 2] | tojson(separators=['a' * 1000000, 'b' * 1000000]) }}".into(),
            "{{ [1] | batch(100000000000, 0) | list }}".into(),
            "{{ [1] | slice(100000000000) | list }}".into(),
            "{{ '%100000000000d' | format(1) }}".into(),
            "{{ '%*d' | format(100000000000, 1) }}".into(),
            "{{ '{:100000000000}'.format(1) }}".into(),
            "{{ '{:{}}'.format(1, 100000000000) }}".into(),
            "{{ 'a' * 100000000000 }}".into(),
            "{{ 'a' * 10 ** 12 }}".into(),
            "{{ ('a' * 999999) * 999999 }}".into(),
            "{{ [0] * 100000000 }}".into(),
            "{% for a in range(99999) %}{{ messages | tojson * 1000 }}{% endfor %}".into(),
            "{% set x = 'a' * 900000 %}{% for a in range(99999) %}{% if x == x ~ 'b' %}{% endif %}{% endfor %}".into(),
            "{% set x = 'a' * 900000 %}{% for a in range(99999) %}{% set y = x[-1] %}{% endfor %}".into(),
            "{% set x = 'a' * 900000 %}{% for a in range(99999) %}{% set y = x.split('a') | length %}{% endfor %}".into(),
            "{% set x = 'a' * 900000 %}{% for a in range(99999) %}{% for c in x %}{% break %}{% endfor %}{% endfor %}".into(),
            format!("{{% for a in range(99999) %}}{{% for b in range(99) %}}{}{{% endfor %}}{{% endfor %}}", "x".repeat(9999)),
            format!("{{{{ {} true }}}}", "not ".repeat(100_000)),
            format!("{{{{ {} 1 }}}}", "- ".repeat(100_000)),
            format!("{{{{ 1 {} }}}}", "+ 1 ".repeat(100_000)),
            format!("{{{{ 1 {} }}}}", "| abs ".repeat(40_000)),
            format!("{{{{ a{} }}}}", ".a".repeat(100_000)),
            format!("{{{{ {} }}}}", deep("[", 100_000, "]")),
            format!("{{{{ {} }}}}", deep("(", 1000, ")")),
            deep("{% if a %}", 10_000, "{% endif %}"),
            format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(30_000)),
            "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}".into(),
            "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}".into(),
            "{% block a %}{{ self.a() }}{% endblock %}".into(),
            "{% include 'chat' %}".into(),
            "{% extends 'chat' %}".into(),
            "{{ messages | map('replace', '', 'x' * 900000) | list }}".into(),
            // Variables of calls and of macros, which are kept until the end.
            format!(
                "{{% macro f(n) %}}{}{{{{ f(n - 1) }}}}{{% endmacro %}}{{{{ f(9) }}}}",
                (0..20).map(|i| format!("{{% set v{i} = range(99999) | list %}}")).collect::<String>()
            ),
            "{% for i in range(99999) %}{% set x = range(99999) | list %}{% macro f() %}{{ x }}{% endmacro %}{% endfor %}".into(),
            format!(
                "{{% for i in range(99999) %}}{{% for j in range(99) %}}{{% macro f({}) %}}{{% endmacro %}}{{% endfor %}}{{% endfor %}}",
                (0..600).map(|i| format!("a{i}")).collect::<Vec<_>>().join(", ")
            ),
            // A list of the characters of a text takes many times the text.
            "{% set x = 'a' * 900000 %}{% set x = x * 60 %}{% set y = x | list %}".into(),
            "{{ 'a' * 999999 }}".repeat(10_000),
            "{% set x = '{0:>{1}}' %}{{ (x * 9999).format(1, 1000000) }}".into(),
            "x".repeat(1 << 20),
        ];
        for source in &hostile {
            let begun = std::time::Instant::now();
            let found = render(source, &hi);
            let shown: String = source.chars().take(120).collect();
            let error = found.map(|text| text.len()).expect_err(&shown).to_string();
            assert!(error.starts_with("chat_template.jinja: chat template") && error.lines().count() == 1, "{error}");
            assert!(error.len() < 400, "{shown}: {error}");
            let bounds = [
                "MiB of text",
                "deep in each other",
                "tokens in one block",
                "multiply to",
                "plain values",
                "recursion",
                "too large",
                "does not end",
                "template not found",
                "bytes, found",
            ];
            assert!(bounds.iter().any(|bound| error.contains(bound)), "{shown}: {error}");
            assert!(begun.elapsed().as_secs() < 30, "{shown}: {:?}", begun.elapsed());
        }
    }

    #[test]
    fn long_conversations_are_not_taken_for_hostile() {
        let template = "{% set ns = namespace(text='') %}{% for m in messages[0:] %}{% set ns.text = ns.text ~ m.role ~ m.content | trim %}\
                        {% if loop.last and messages | selectattr('role', 'equalto', 'user') | list | length > 3 %}{{ ns.text }}{% endif %}{% endfor %}";
        let text = "word ".repeat(200);
        let messages: Vec<Value> = (0..500).map(|_| user_message(&text)).collect();
        let found = render(template, &messages.into()).unwrap();
        assert_eq!(found.len(), 500 * ("user".len() + text.trim().len()));
    }

    #[test]
    fn text_in_generation_blocks_is_marked_and_the_text_is_the_same() {
        let template = "{% for m in messages %}\n  {% if m.role == 'assistant' %}\n<a>{%- generation -%}\n {{ m.content }}</a>\
                        {%- endgeneration %}\n{% else %}\n<u>{{ m.content }}\n{% endif %}\n{% endfor %}";
        let messages = json!([user_message("hi"), {"role": "assistant", "content": "ho"}, user_message("x"), {"role": "assistant", "content": "y"}]);
        let messages = messages.as_array().unwrap();
        let template = ChatTemplate::new("t".into(), template);
        let (text, spans) = template.render_marked(messages, []).unwrap();
        assert_eq!(text, template.render(messages, false, []).unwrap());
        assert_eq!(spans.iter().map(|span| &text[span.clone()]).collect::<Vec<_>>(), ["ho</a>", "y</a>"]);
        assert!(template.has_marks() && !ChatTemplate::new("t".into(), "{{ messages }}").has_marks());
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
