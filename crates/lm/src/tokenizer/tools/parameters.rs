//! Calls whose parameters are in tags of their own, as Qwen3-Coder, Qwen3.5 and Nemotron 3 write them:
//! `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, with line breaks between.

use super::render::TAGS;
use crate::tokenizer::python::is_space;
use serde_json::{Map, Value};

/// The text before the name of a function.
pub(super) const FUNCTION: &str = "<function=";
/// The text before the name of a parameter, and that after its value.
pub(super) const PARAMETER: [&str; 2] = ["<parameter=", "</parameter>"];
/// The text after the parameters of a function.
const END: &str = "</function>";

/// A call in a text: its start, the name, and the text from its parameters on.
pub(super) struct Start<'t> {
    pub(super) at: usize,
    pub(super) name: &'t str,
    pub(super) rest: &'t str,
}

/// Finds the first call in `text`.
pub(super) fn find(text: &str) -> Option<Start<'_>> {
    text.match_indices(TAGS[0]).find_map(|(at, tag)| {
        let rest = text[at + tag.len()..].trim_start_matches(is_space).strip_prefix(FUNCTION)?;
        let (name, rest) = until(rest, '>')?;
        Some(Start { at, name, rest })
    })
}

/// Returns the parameters in the body of a call, as texts.
pub(super) fn arguments(body: &str) -> Map<String, Value> {
    let [open, close] = PARAMETER;
    let (mut parameters, mut rest) = (Map::new(), body);
    while let Some((_, after)) = rest.split_once(open) {
        rest = after;
        if let Some((key, value)) = until(after, '>')
            && let Some((value, after)) = value.split_once(close)
        {
            parameters.insert(key.into(), value.trim_matches(is_space).into());
            rest = after;
        }
    }
    parameters
}

/// Returns whether the end of the function follows the last parameter in the body of a call.
pub(super) fn is_whole(body: &str) -> bool {
    body.rsplit_once(PARAMETER[1]).map_or(body, |(_, after)| after).trim_matches(is_space) == END
}

/// Splits `text` at `mark`; `None` where nothing or a line break is before it.
fn until(text: &str, mark: char) -> Option<(&str, &str)> {
    text.split_once(mark).filter(|(before, _)| !before.is_empty() && !before.contains('\n'))
}
