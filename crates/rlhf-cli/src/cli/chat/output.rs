//! Output of a conversation.

use std::io::{self, IsTerminal, Write};

use rlhf::run::turns::{Kind, Part, line};
use rlhf::safe_text::lines;
use rlhf::terminal::{Colour, Stream};
use rlhf::{Error, Result};

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

/// Writes a line that is not part of a response.
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

/// Writes a call or a result as other views do; on a terminal only its beginning.
pub(super) fn show_part(part: &Part<'_>) -> Result<()> {
    if io::stdout().is_terminal() {
        return show_line(&lines(&line(part.kind, &part.text)));
    }
    let sign = if part.kind == Kind::Call { "->" } else { "<-" };
    show_line(&format!("{sign} {}", part.text))
}
