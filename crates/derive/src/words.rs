//! Doc comments and names, as text.

use syn::{Attribute, Expr, Lit, Meta};

/// Returns the first paragraph of the doc comment among `attributes` on one line, without a full stop at its end.
pub(crate) fn doc(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter_map(|attribute| match &attribute.meta {
        Meta::NameValue(meta) if meta.path.is_ident("doc") => match &meta.value {
            Expr::Lit(literal) => match &literal.lit {
                Lit::Str(text) => Some(text.value()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    });
    let lines: Vec<String> = lines.map(|line| line.trim().to_string()).collect();
    let first = lines.iter().skip_while(|line| line.is_empty()).take_while(|line| !line.is_empty());
    let text = first.cloned().collect::<Vec<_>>().join(" ");
    text.strip_suffix('.').unwrap_or(&text).to_string()
}

/// The spelling of the names that are made from Rust's: `snake_case`, `kebab-case` or `lowercase`.
#[derive(Clone, Copy)]
pub(crate) enum Case {
    Snake,
    Kebab,
    Lower,
}

impl Case {
    pub(crate) fn named(name: &str) -> Option<Self> {
        match name {
            "snake_case" => Some(Self::Snake),
            "kebab-case" => Some(Self::Kebab),
            "lowercase" => Some(Self::Lower),
            _ => None,
        }
    }

    /// Returns the name of the variant `ident`, which is in `PascalCase`.
    pub(crate) fn of(self, ident: &str) -> String {
        let mut name = String::new();
        for (at, letter) in ident.char_indices() {
            if letter.is_uppercase() && at > 0 {
                match self {
                    Self::Snake => name.push('_'),
                    Self::Kebab => name.push('-'),
                    Self::Lower => {}
                }
            }
            name.extend(letter.to_lowercase());
        }
        name
    }
}
