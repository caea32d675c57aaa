//! Python's texts of numbers and methods of texts, for chat templates.

use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// A float as Python writes it: an exponent from 1e16 on and below 1e-4.
pub(super) fn python_float(x: f64) -> String {
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        exponent @ -4..16 => format!("{x}{}", if exponent >= 0 && x.fract() == 0.0 { ".0" } else { "" }),
        exponent => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
    }
}

/// `value`, or the text of a float, which the engine would write differently.
pub(super) fn shown(value: &Value) -> Value {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    let float = is_float.then(|| f64::try_from(value.clone()).ok()).flatten();
    float.map_or_else(|| value.clone(), |x| python_float(x).into())
}

/// The items of a list as [`shown`]; any other value as it is.
pub(super) fn shown_items(list: &Value) -> Result<Value, Error> {
    if list.kind() != ValueKind::Seq {
        return Ok(list.clone());
    }
    Ok(list.try_iter()?.map(|item| shown(&item)).collect::<Vec<Value>>().into())
}

/// Calls the method `name` of `value`.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let result = match value.as_str() {
        Some(text) => text_method(text, name, arguments)?,
        None if name == "index" && value.kind() == ValueKind::Seq => {
            let (item,): (&Value,) = from_args(arguments)?;
            let at = value.try_iter()?.position(|element| element == *item);
            Some(Value::from(at.ok_or_else(|| wrong("index: the item is not in the list"))?))
        }
        None => None,
    };
    match result {
        Some(result) => Ok(result),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments),
    }
}

/// Calls a method of a text that the engine lacks; `None` for any other.
fn text_method(text: &str, name: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    let count = |end: usize| text[..end].chars().count();
    let one = || from_args::<(&str,)>(arguments).map(|(part,)| part);
    let filled = |before: bool| -> Result<Value, Error> {
        let (width, fill): (i64, Option<&str>) = from_args(arguments)?;
        let fill = fill.unwrap_or(" ");
        if fill.chars().count() != 1 {
            return Err(wrong("expected one character to fill with"));
        }
        let padding = fill.repeat(usize::try_from(width).unwrap_or(0).saturating_sub(text.chars().count()));
        Ok(Value::from(if before { format!("{padding}{text}") } else { format!("{text}{padding}") }))
    };
    Ok(Some(match name {
        "rsplit" => {
            let (separator, most, named): (Option<&str>, Option<i64>, Kwargs) = from_args(arguments)?;
            let most = if most.is_some() { most } else { named.get("maxsplit")? };
            named.assert_all_used()?;
            rsplit(text, separator, most.and_then(|most| usize::try_from(most).ok()))?
        }
        "partition" | "rpartition" => {
            let separator = one()?;
            let from_right = name == "rpartition";
            let separator = nonempty(separator)?;
            let parts = if from_right { text.rsplit_once(separator) } else { text.split_once(separator) };
            let parts = match parts {
                Some((before, after)) => [before, separator, after],
                None if from_right => ["", "", text],
                None => [text, "", ""],
            };
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "removeprefix" => text.strip_prefix(one()?).unwrap_or(text).into(),
        "removesuffix" => text.strip_suffix(one()?).unwrap_or(text).into(),
        "index" | "rindex" => {
            let at = if name == "index" { text.find(one()?) } else { text.rfind(one()?) };
            at.map(count).ok_or_else(|| wrong("substring not found"))?.into()
        }
        "ljust" => filled(false)?,
        "rjust" => filled(true)?,
        "zfill" => {
            let (width,): (i64,) = from_args(arguments)?;
            let missing = usize::try_from(width).unwrap_or(0).saturating_sub(text.chars().count());
            // Zeros come after a sign.
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            format!("{sign}{}{digits}", "0".repeat(missing)).into()
        }
        _ => return Ok(None),
    }))
}

/// Parts of `text` from the right, at most `most` times split, by `separator` or else by spaces.
fn rsplit(text: &str, separator: Option<&str>, most: Option<usize>) -> Result<Value, Error> {
    let mut parts: Vec<&str> = match (separator, most) {
        (Some(separator), Some(most)) => text.rsplitn(most.saturating_add(1), nonempty(separator)?).collect(),
        (Some(separator), None) => text.rsplit(nonempty(separator)?).collect(),
        (None, most) => {
            let (mut parts, mut rest) = (Vec::new(), text.trim_end_matches(is_space));
            while !rest.is_empty() {
                let is_last = most == Some(parts.len());
                let start = rest.rfind(is_space).filter(|_| !is_last);
                let (before, part) = match start {
                    Some(space) => rest.split_at(space + rest[space..].chars().next().map_or(0, char::len_utf8)),
                    None => ("", rest),
                };
                parts.push(part);
                rest = before.trim_end_matches(is_space);
            }
            parts
        }
    };
    parts.reverse();
    Ok(parts.into_iter().map(Value::from).collect::<Vec<Value>>().into())
}

/// Whether Python takes the character for a space.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn nonempty(separator: &str) -> Result<&str, Error> {
    if separator.is_empty() { Err(wrong("empty separator")) } else { Ok(separator) }
}

fn wrong(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.to_string())
}

#[cfg(test)]
mod tests {
    use super::super::chat::{ChatTemplate, user_message};
    use super::*;
    use serde_json::json;

    fn render(source: &str) -> rlhf_base::Result<String> {
        let numbers = json!({ "small": 1.5e-5, "large": 1e16, "negative": -2.5e-7 });
        ChatTemplate::new("t".into(), source).render(&[user_message("hi")], false, [("x".to_string(), numbers)])
    }

    #[test]
    fn numbers_and_methods_of_texts_read_as_in_transformers_templates() {
        // Computed by `apply_chat_template` of transformers 5.23.
        for (source, text) in [
            ("{{ x.small }} {{ x.large }} {{ x.negative }} {{ 2.0 }} {{ 1e22 }}", "1.5e-05 1e+16 -2.5e-07 2.0 1e+22"),
            ("{{ x.small ~ '|' ~ x.large }} {{ x.small | string }}", "1.5e-05|1e+16 1.5e-05"),
            ("{{ [x.small, x.large, 0.1, 'a'] | join(', ') }} {{ x.small * 2 }}", "1.5e-05, 1e+16, 0.1, a 3e-05"),
            ("{{ 'a.b.c'.rsplit('.', 1)[0] }} {{ 'a.b.c'.rsplit('.') | join('/') }}", "a.b a/b/c"),
            ("{{ ' a  b c '.rsplit(none, 1) | join('/') }}|{{ '  a b '.rsplit() | join('/') }}", " a  b/c|a/b"),
            ("{{ 'aaa'.rsplit('aa') | join('/') }} {{ 'a.b'.rsplit('.', maxsplit=1)[-1] }}", "a/ b"),
            ("|{{ ' a b '.rsplit(none, 0)[0] }}|", "| a b|"),
            ("{% set a, b, c = 'k=v=w'.partition('=') %}{{ a }}/{{ b }}/{{ c }}", "k/=/v=w"),
            ("{{ 'k'.partition('=')[0] }} {{ 'k=v=w'.rpartition('=')[2] }} {{ 'k'.rpartition('=')[2] }}", "k w k"),
            ("{{ 'user_x'.removeprefix('user_') }} {{ 'x_user'.removesuffix('_user') }}", "x x"),
            ("{{ 'x'.removeprefix('y') }}{{ 'x'.removesuffix('') }}", "xx"),
            ("{{ 'h\u{e4}b'.index('b') }} {{ 'babb'.rindex('b') }} {{ ['a', 'b'].index('b') }}", "2 3 1"),
            ("{{ '7'.zfill(3) }} {{ '-7'.zfill(4) }} {{ '+7'.zfill(1) }}", "007 -007 +7"),
            (
                "{{ '\u{e9}'.ljust(3) }}| {{ '\u{e9}'.rjust(3, '\u{b7}') }} {{ 'abc'.ljust(2) }}",
                "\u{e9}  | \u{b7}\u{b7}\u{e9} abc",
            ),
            ("{{ 'x' | int }} {{ 'x' | int(7) }} {{ '12' | int }} {{ '3.9' | int }} {{ 'x' | float }}", "0 7 12 3 0.0"),
            ("{{ [] | int }} {{ 'x' | int(default=5) }} {{ 'ff' | int(0, 16) }}", "0 5 255"),
        ] {
            assert_eq!(render(source).unwrap(), text, "{source}");
        }
        for (source, wanted) in [
            ("{{ 'a'.index('b') }}", "substring not found"),
            ("{{ ['a'].index('b') }}", "the item is not in the list"),
            ("{{ 'a'.rsplit('') }}", "empty separator"),
            ("{{ 'a'.partition('') }}", "empty separator"),
            ("{{ 'a'.ljust(3, 'ab') }}", "expected one character to fill with"),
            ("{{ 'a'.ljust(999999999) }}", "MiB of text"),
            ("{{ 'a'.zfill(999999999) }}", "MiB of text"),
            ("{% for i in range(99) %}{% set a = (messages | string * 4999).rsplit('s') %}{% endfor %}", "MiB of text"),
        ] {
            let error = render(source).unwrap_err().to_string();
            assert!(error.contains(wanted), "{source}: {error}");
        }
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
}
