//! Text to HTML: markup is part of the program, all other text is escaped.

pub use crate::run::ends::number;
use rlhf_base::safe_text::lines;
use std::fmt::{self, Display, Write};

/// A page in the making.
///
/// Markup is a `&'static str`, so that no text of a run can be taken for it; [`Html::text`] escapes everything else.
#[derive(Debug, Default, PartialEq)]
pub struct Html(String);

impl Html {
    /// Appends markup.
    pub fn raw(&mut self, markup: &'static str) -> &mut Self {
        self.0.push_str(markup);
        self
    }

    /// Appends text, between tags or in a quoted attribute.
    ///
    /// Control characters and those that change the direction of other text are shown by their codes.
    pub fn text(&mut self, text: impl Display) -> &mut Self {
        write!(Escaped(&mut self.0), "{text}").expect("a string takes all text");
        self
    }

    /// Returns the number of bytes so far.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Appends another part of the page.
    pub fn append(&mut self, part: &Html) -> &mut Self {
        self.0.push_str(&part.0);
        self
    }

    /// Returns the text so far.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the whole page.
    pub fn finish(self) -> String {
        self.0
    }
}

/// Escapes all text that is written to it.
struct Escaped<'a>(&'a mut String);

impl Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in lines(text).chars() {
            match c {
                '&' => self.0.push_str("&amp;"),
                '<' => self.0.push_str("&lt;"),
                '>' => self.0.push_str("&gt;"),
                '"' => self.0.push_str("&quot;"),
                '\'' => self.0.push_str("&#39;"),
                c => self.0.push(c),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_become_markup_and_control_characters_are_shown() {
        for (text, escaped) in [
            ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
            ("\" onload='x' & &amp;", "&quot; onload=&#39;x&#39; &amp; &amp;amp;"),
            ("]]><!-- -->", "]]&gt;&lt;!-- --&gt;"),
            ("\u{0}\u{1b}[2J\u{202e}abc", "\\u{0}\\u{1b}[2J\\u{202e}abc"),
            ("שלום 👩\u{200d}🚀\n\tlines", "שלום 👩\u{200d}🚀\n\tlines"),
        ] {
            let mut page = Html::default();
            page.raw("<p>").text(text).raw("</p>");
            assert_eq!(page.finish(), format!("<p>{escaped}</p>"));
        }
    }
}
