//! Makes untrusted text safe to print: no control characters, no secrets in addresses, a bounded length.
//!
//! Prompts, tensor names, folder names, templates and the output of programs may contain escape sequences that move the cursor,
//! clear the screen or set the title. [`crate::Error`] and the warnings of a run go through [`one_line`]; callers that print
//! untrusted text themselves should do the same.

use std::borrow::Cow;
use std::fmt::{Display, Write};

/// Maximum length of a text that [`one_line`] does not shorten, in characters.
const LONGEST: usize = 3000;

/// Number of characters kept at the end of a longer text, where hints are.
const TAIL: usize = 600;

/// Number of entries of a list that a message shows.
const ENTRIES: usize = 8;

/// One line of at most some 3000 characters: control characters and line ends are escaped as Rust and JSON write them, the
/// middle of a longer text is omitted, and passwords and queries are removed from addresses.
pub fn one_line(text: &str) -> Cow<'_, str> {
    match without_secrets(text) {
        Cow::Borrowed(text) => shown(text),
        Cow::Owned(text) => shown(&text).into_owned().into(),
    }
}

/// Escapes control characters except line ends and tabs, for the responses of a model on a terminal.
pub fn lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c != '\n' && c != '\t' && is_unsafe(c))
}

/// The first `most` characters of a text, with `...` if there are more.
pub fn beginning(text: &str, most: usize) -> Cow<'_, str> {
    match text.char_indices().nth(most) {
        None => text.into(),
        Some((end, _)) => format!("{}...", &text[..end]).into(),
    }
}

/// The first entries of a list in brackets, with `...` if there are more. The entries themselves are not shortened.
pub fn entries(list: impl IntoIterator<Item = impl Display>) -> String {
    let mut list = list.into_iter();
    let mut shown: Vec<String> = list.by_ref().take(ENTRIES).map(|entry| entry.to_string()).collect();
    if list.next().is_some() {
        shown.push("...".into());
    }
    format!("[{}]", shown.join(", "))
}

fn shown(text: &str) -> Cow<'_, str> {
    // Shortened first: escapes make a text up to ten times as long.
    let cut = without_middle(text, LONGEST);
    let escaped = match cut {
        Cow::Borrowed(text) => escaped(text, is_unsafe),
        Cow::Owned(text) => escaped(&text, is_unsafe).into_owned().into(),
    };
    match escaped {
        Cow::Borrowed(text) => without_middle(text, LONGEST),
        Cow::Owned(text) => without_middle(&text, LONGEST).into_owned().into(),
    }
}

fn without_middle(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return text.into();
    }
    let count = text.chars().count();
    if count <= most {
        return text.into();
    }
    // The result, with the note on the omitted part, is at most as long as the maximum, so that no text is shortened twice.
    let head = most - TAIL - 60;
    let at = |chars: usize| text.char_indices().nth(chars).map_or(text.len(), |(at, _)| at);
    format!("{} ... ({} characters left out) ... {}", &text[..at(head)], count - head - TAIL, &text[at(count - TAIL)..])
        .into()
}

/// Whether a terminal may interpret a character, or show it at another position.
fn is_unsafe(c: char) -> bool {
    let turns_around =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let ends_lines = matches!(c, '\u{2028}' | '\u{2029}');
    let invisible = matches!(c, '\u{feff}' | '\u{e0000}'..='\u{e007f}');
    c.is_control() || turns_around || ends_lines || invisible
}

fn escaped(text: &str, goes: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&goes) {
        return text.into();
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            c if !goes(c) => safe.push(c),
            '\n' => safe.push_str("\\n"),
            '\r' => safe.push_str("\\r"),
            '\t' => safe.push_str("\\t"),
            c => drop(write!(safe, "\\u{{{:x}}}", u32::from(c))),
        }
    }
    safe.into()
}

/// Removes user, password, query and fragment from the addresses in a text: all of these may be secret.
fn without_secrets(text: &str) -> Cow<'_, str> {
    let mut rest = text;
    let mut safe = String::new();
    while let Some(at) = rest.find("://") {
        let (before, address) = rest.split_at(at + 3);
        let end = address.find(|c: char| c.is_whitespace() || "\"'`<>".contains(c)).unwrap_or(address.len());
        let (address, behind) = address.split_at(end);
        let user = user_len(address);
        let public = &address[user..];
        safe += before;
        match public.find(['?', '#']).filter(|&at| at + 1 < public.len()) {
            Some(at) => safe.extend([&public[..=at], "..."]),
            None => safe += public,
        }
        rest = behind;
    }
    if safe.is_empty() { text.into() } else { (safe + rest).into() }
}

/// Length of the user and the password before a host, with the `@`.
fn user_len(address: &str) -> usize {
    let authority = address.find(['/', '?', '#']).unwrap_or(address.len());
    let (host, port) = address[..authority].split_once(':').unwrap_or((&address[..authority], ""));
    // If a password has a slash, the part before the slash looks like a host with a port that is not a number.
    let odd = !host.starts_with('[') && !port.bytes().all(|byte| byte.is_ascii_digit());
    let end = if odd { address.len() } else { authority };
    address[..end].rfind('@').map_or(0, |at| at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_letters_of_all_scripts_stay() {
        for (text, shown) in [
            ("a\nb\tc\r", "a\\nb\\tc\\r"),
            ("\u{1b}]0;title\u{7}\u{1b}[2J", "\\u{1b}]0;title\\u{7}\\u{1b}[2J"),
            ("\u{9b}31m\u{7f}", "\\u{9b}31m\\u{7f}"),
            ("abc\u{202e}dlrow", "abc\\u{202e}dlrow"),
            ("größer 東京 שלום e\u{301} 👩\u{200d}🚀 \\n", "größer 東京 שלום e\u{301} 👩\u{200d}🚀 \\n"),
        ] {
            assert_eq!(one_line(text), shown);
            assert_eq!(one_line(shown), shown, "what is safe stays");
        }
        assert_eq!(lines("a\n\tb\u{1b}[1m\r"), "a\n\tb\\u{1b}[1m\\r");
    }

    #[test]
    fn a_long_text_keeps_its_ends_and_is_cut_once() {
        let text = format!("begin {}{} hint", "x".repeat(100_000), "\u{1b}".repeat(5000));
        let shown = one_line(&text).into_owned();
        assert!(shown.chars().count() <= LONGEST, "{}", shown.len());
        assert!(shown.starts_with("begin xxx") && shown.ends_with("\\u{1b} hint"), "{shown}");
        assert!(shown.contains("characters left out"), "{shown}");
        assert_eq!(one_line(&shown), shown);
        let whole = "x".repeat(LONGEST);
        assert_eq!(one_line(&whole), whole);
    }

    #[test]
    fn a_list_shows_its_first_eight_entries() {
        assert_eq!(entries([0i64; 0]), "[]");
        assert_eq!(entries([2i64, 2, 4, 4]), "[2, 2, 4, 4]");
        assert_eq!(entries([true; 8]), "[true, true, true, true, true, true, true, true]");
        assert_eq!(entries(1..=9), "[1, 2, 3, 4, 5, 6, 7, 8, ...]");
        assert_eq!(entries(0..i64::MAX), "[0, 1, 2, 3, 4, 5, 6, 7, ...]");
    }

    #[test]
    fn addresses_have_no_password_and_no_query() {
        for (text, shown) in [
            ("http://h:80/a", "http://h:80/a"),
            ("see https://me:secret@h/a?key=secret, then", "see https://h/a?... then"),
            ("`http://secret@h/?k=secret` and http://h/#secret", "`http://h/?...` and http://h/#..."),
            ("http://me:sec/ret@h/a", "http://h/a"),
            ("http://me:sec?ret@h:80/a", "http://h:80/a"),
            ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
            ("is it at http://h/a?", "is it at http://h/a?"),
            ("http://h/a?... (tried)", "http://h/a?... (tried)"),
            ("what? a@b", "what? a@b"),
        ] {
            assert_eq!(one_line(text), shown);
        }
    }
}
