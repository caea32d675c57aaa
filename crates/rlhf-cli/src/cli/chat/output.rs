//! Output of a conversation.

use std::io::{self, IsTerminal, Write};

use rlhf::safe_text::lines;
use rlhf::terminal::{Colour, Stream, cut};
use rlhf::{Error, Result};

/// Most lines of a text that a terminal shows of a tool's result.
const MOST_LINES: usize = 8;

/// Writes a part of a response: as it is, or with its control characters escaped on a terminal.
pub(super) fn show(text: &str) -> Result<()> {
    if io::stdout().is_terminal() { write(&lines(text)) } else { write(text) }
}

/// Whether a person reads and types.
pub(super) fn is_interactive() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal()
}

/// Writes a line about the conversation, for a person.
pub(super) fn hint(text: &str) {
    if is_interactive() {
        let _ = show_line(text);
    }
}

/// Says that a response has the maximum number of tokens.
pub(super) fn hint_at_cut(most: usize) {
    hint(&format!("(cut at {most} tokens; --max_new_tokens sets the maximum)"));
}

/// Writes a line beside the responses.
pub(super) fn show_line(text: &str) -> Result<()> {
    write(&format!("{}\n", Stream::Out.paint(Colour::Dim, text)))
}

/// Writes the name of a model before its response.
pub(super) fn show_label(label: &str) -> Result<()> {
    write(&format!("{} ", Stream::Out.paint(Colour::Bold, &format!("[{label}]"))))
}

fn write(text: &str) -> Result<()> {
    let mut out = io::stdout();
    write!(out, "{text}").and_then(|()| out.flush()).map_err(Error::io("write to", "standard output"))
}

/// Writes a call or a result; on a terminal only its first lines, as far as they fit.
pub(super) fn show_shortened(text: &str) -> Result<()> {
    let Some(width) = Stream::Out.width() else { return show_line(text) };
    let all: Vec<&str> = text.lines().collect();
    all.iter().take(MOST_LINES).try_for_each(|line| show_line(&cut(&lines(line), width)))?;
    match all.len().saturating_sub(MOST_LINES) {
        0 => Ok(()),
        more => show_line(&format!("({more} more lines)")),
    }
}
