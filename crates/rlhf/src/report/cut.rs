//! Texts that are cut to the size of a page.

/// Characters of a text that are kept at most.
pub(crate) const MOST_CHARS: usize = 1200;

/// Tokens of a response that are kept at most.
pub(crate) const MOST_TOKENS: usize = 300;

/// The beginning of a text, and the number of characters after it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Cut {
    pub text: String,
    pub left_out: usize,
}

impl Cut {
    pub fn new(text: &str) -> Self {
        Self::at(text, MOST_CHARS)
    }

    /// Returns at most `most` characters of a text.
    pub fn at(text: &str, most: usize) -> Self {
        let text = text.replace("\r\n", "\n");
        match text.char_indices().nth(most) {
            None => Self { text, left_out: 0 },
            Some((end, _)) => Self { left_out: text[end..].chars().count(), text: text[..end].into() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut() {
        let cut = Cut::new(&"é".repeat(100_000));
        assert_eq!((cut.text.chars().count(), cut.left_out), (MOST_CHARS, 100_000 - MOST_CHARS));
        assert_eq!(Cut::at("a\r\nb", 2), Cut { text: "a\n".into(), left_out: 1 });
    }
}
