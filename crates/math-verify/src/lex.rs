//! Splits LaTeX into tokens.

/// Maximum number of tokens; a longer text is not parsed.
const MAX_TOKENS: usize = 600;

/// The reason why a text has no value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The text is malformed.
    Syntax,
    /// The text has a construct that is not supported, or is too large.
    Unsupported,
}

/// A token of LaTeX.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    /// Digits with an optional decimal point.
    Number(String),
    /// A number with a percent sign.
    Percent(String),
    /// Mantissa and exponent of a number such as `1.5E-3`.
    Scientific(String, i32),
    Letter(char),
    /// A name: of a Greek letter, or of a symbol such as `angle`.
    Named(String),
    /// A text or an accented symbol: the name of the symbol.
    Text(String),
    /// `d` and the letter that follows.
    Differential(String),
    /// A command that is a function or has arguments: `frac`, `sqrt`, `sin`, ...
    Command(String),
    /// An operator, a bracket or a separator; relations have the names of their commands.
    Sign(&'static str),
    /// A sign of degrees in an exponent.
    Degree,
    /// A number set.
    Set(&'static str),
    Begin(String),
    End(String),
}

/// Commands that become signs.
const SIGNS: [(&str, &str); 34] = [
    ("times", "*"),
    ("cdot", "*"),
    ("div", "/"),
    ("pm", "+-"),
    ("mp", "+-"),
    ("le", "<="),
    ("leq", "<="),
    ("leqslant", "<="),
    ("ge", ">="),
    ("geq", ">="),
    ("geqslant", ">="),
    ("lt", "<"),
    ("gt", ">"),
    ("ne", "!="),
    ("neq", "!="),
    ("approx", "~"),
    ("in", "in"),
    ("cup", "cup"),
    ("setminus", "minus"),
    ("infty", "infty"),
    ("emptyset", "empty"),
    ("lvert", "|"),
    ("rvert", "|"),
    ("vert", "|"),
    ("lfloor", "lfloor"),
    ("rfloor", "rfloor"),
    ("lceil", "lceil"),
    ("rceil", "rceil"),
    ("quad", " "),
    ("qquad", " "),
    ("dfrac", "frac"),
    ("tfrac", "frac"),
    ("dbinom", "binom"),
    ("tbinom", "binom"),
];

/// Commands that are functions, or have arguments.
const COMMANDS: [&str; 32] = [
    "frac", "binom", "choose", "sqrt", "log", "ln", "exp", "sin", "cos", "tan", "csc", "sec", "cot", "arcsin",
    "arccos", "arctan", "arccsc", "arcsec", "arccot", "sinh", "cosh", "tanh", "arsinh", "arcosh", "artanh", "arcsinh",
    "arccosh", "arctanh", "cfrac", "lg", "max", "min",
];

/// Names of symbols that are not Greek letters.
const SYMBOLS: [&str; 5] = ["angle", "triangle", "varnothing", "ell", "hbar"];

/// Names of Greek letters.
const GREEK: [&str; 30] = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "varepsilon",
    "zeta",
    "eta",
    "theta",
    "vartheta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "omicron",
    "pi",
    "varpi",
    "rho",
    "varrho",
    "sigma",
    "varsigma",
    "tau",
    "upsilon",
    "phi",
    "varphi",
    "chi",
    "psi",
    "omega",
];

/// Accents and the names that their symbols begin with; texts have none.
const ACCENTS: [(&str, &str); 9] = [
    ("text", ""),
    ("mbox", ""),
    ("bar", "bar"),
    ("overline", "bar"),
    ("vec", "vec"),
    ("overrightarrow", "vec"),
    ("hat", "hat"),
    ("tilde", "tilde"),
    ("mathcal", "math"),
];

/// Splits `text` into tokens.
///
/// # Errors
/// `Unsupported` for an unknown command and for a text of too many tokens, `Syntax` for a character that no formula has.
pub(super) fn tokens(text: &str) -> Result<Vec<Token>, Fault> {
    let mut lexer = Lexer { rest: text, tokens: Vec::new() };
    while lexer.step()? {
        if lexer.tokens.len() > MAX_TOKENS {
            return Err(Fault::Unsupported);
        }
    }
    Ok(lexer.tokens)
}

struct Lexer<'a> {
    rest: &'a str,
    tokens: Vec<Token>,
}

impl<'a> Lexer<'a> {
    /// Reads one token; returns false at the end.
    fn step(&mut self) -> Result<bool, Fault> {
        self.rest = self.rest.trim_start();
        let Some(first) = self.rest.chars().next() else { return Ok(false) };
        match first {
            '0'..='9' | '.' => self.number()?,
            '\\' => self.command()?,
            '{' if self.rest.starts_with("{}") => self.take(Token::Sign("empty"), 2),
            '^' if self.degree() => self.tokens.push(Token::Degree),
            'd' => self.differential(),
            'a'..='z' | 'A'..='Z' => self.take(Token::Letter(first), 1),
            _ => {
                let sign = match first {
                    '+' => "+",
                    '-' | '\u{2212}' => "-",
                    '*' | '×' => "*",
                    '/' | '÷' | ':' => "/",
                    '(' => "(",
                    ')' => ")",
                    '[' => "[",
                    ']' => "]",
                    '{' => "{",
                    '}' => "}",
                    '|' => "|",
                    ',' => ",",
                    ';' => ";",
                    '=' => "=",
                    '<' => "<",
                    '>' => ">",
                    '!' => "!",
                    '_' => "_",
                    '^' => "^",
                    '&' => "&",
                    'π' => return Ok(self.name("pi", first)),
                    'θ' => return Ok(self.name("theta", first)),
                    'α' => return Ok(self.name("alpha", first)),
                    'β' => return Ok(self.name("beta", first)),
                    _ => return Err(Fault::Syntax),
                };
                let len = first.len_utf8() + usize::from(self.rest.starts_with("=="));
                self.take(Token::Sign(sign), len);
            }
        }
        Ok(true)
    }

    /// Adds a token of `len` bytes.
    fn take(&mut self, token: Token, len: usize) {
        self.tokens.push(token);
        self.rest = &self.rest[len..];
    }

    fn name(&mut self, name: &str, letter: char) -> bool {
        self.take(Token::Named(name.into()), letter.len_utf8());
        true
    }

    /// Skips a sign of degrees, if one follows.
    fn degree(&mut self) -> bool {
        let signs = ["^\\circ", "^{\\circ}", "^\\degree", "^{\\degree}", "^°", "^{°}"];
        let after_sign = signs.iter().find_map(|sign| self.rest.strip_prefix(sign));
        // `\circle` and the like are other commands.
        let Some(rest) = after_sign.filter(|rest| !rest.starts_with(|c: char| c.is_ascii_alphabetic())) else {
            return false;
        };
        self.rest = rest;
        true
    }

    fn number(&mut self) -> Result<(), Fault> {
        let digits = |text: &str| text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let whole = digits(self.rest);
        let fraction = self.rest[whole..].strip_prefix('.').map_or(0, digits);
        let len = if fraction > 0 { whole + 1 + fraction } else { whole };
        if len == 0 {
            return Err(Fault::Syntax);
        }
        let (number, rest) = self.rest.split_at(len);
        let spaceless = rest.strip_prefix(|c: char| c.is_ascii_whitespace()).unwrap_or(rest);
        if let Some(rest) = spaceless.strip_prefix("\\%").or_else(|| spaceless.strip_prefix('%')) {
            self.tokens.push(Token::Percent(number.into()));
            self.rest = rest;
            return Ok(());
        }
        if let Some(power) = rest.strip_prefix('E') {
            let signed = power.strip_prefix(['+', '-']).unwrap_or(power);
            let len = power.len() - signed.len() + digits(signed);
            if digits(signed) > 0 {
                let exponent = power[..len].parse().map_err(|_| Fault::Unsupported)?;
                self.tokens.push(Token::Scientific(number.into(), exponent));
                self.rest = &power[len..];
                return Ok(());
            }
        }
        self.take(Token::Number(number.into()), len);
        Ok(())
    }

    /// Reads `d`, as one symbol with a letter that follows.
    fn differential(&mut self) {
        let after = self.rest[1..].trim_start();
        match after.chars().next().filter(char::is_ascii_alphabetic) {
            Some(letter) => {
                self.tokens.push(Token::Differential(format!("d{letter}")));
                self.rest = &after[1..];
            }
            None => self.take(Token::Letter('d'), 1),
        }
    }

    fn command(&mut self) -> Result<(), Fault> {
        let after = &self.rest[1..];
        let len = after.len() - after.trim_start_matches(|c: char| c.is_ascii_alphabetic()).len();
        let (name, rest) = after.split_at(len);
        if name.is_empty() {
            return self.escape(after);
        }
        self.rest = rest;
        if name == "begin" || name == "end" {
            return self.environment(name == "begin");
        }
        if name == "mathbb" {
            return self.number_set();
        }
        if let Some((_, accent)) = ACCENTS.iter().find(|(known, _)| *known == name) {
            return self.accent(accent);
        }
        let token = if let Some((_, sign)) = SIGNS.iter().find(|(known, _)| *known == name) {
            match *sign {
                " " => return Ok(()),
                "frac" | "binom" => Token::Command((*sign).into()),
                sign => Token::Sign(sign),
            }
        } else if COMMANDS.contains(&name) && !["cfrac", "lg", "max", "min"].contains(&name) {
            Token::Command(name.into())
        } else if SYMBOLS.contains(&name) || GREEK.contains(&name.to_lowercase().as_str()) {
            Token::Named(name.into())
        } else {
            return Err(Fault::Unsupported);
        };
        self.tokens.push(token);
        Ok(())
    }

    /// Reads a backslash and the character that follows.
    fn escape(&mut self, after: &'a str) -> Result<(), Fault> {
        let Some(next) = after.chars().next() else { return Err(Fault::Syntax) };
        self.rest = &after[next.len_utf8()..];
        let sign = match next {
            ',' | ':' | ';' | ' ' => return Ok(()),
            '{' if self.rest.starts_with("\\}") => {
                self.rest = &self.rest[2..];
                "empty"
            }
            '{' => "\\{",
            '}' => "\\}",
            '\\' => "\\\\",
            '|' => return Err(Fault::Unsupported),
            _ => return Err(Fault::Syntax),
        };
        self.tokens.push(Token::Sign(sign));
        Ok(())
    }

    /// Returns the text in braces that follows, which has no braces itself.
    fn braces(&mut self) -> Result<&'a str, Fault> {
        let inner = self.rest.trim_start().strip_prefix('{').ok_or(Fault::Syntax)?;
        let (content, rest) = inner.split_once('}').ok_or(Fault::Syntax)?;
        if content.contains('{') {
            return Err(Fault::Unsupported);
        }
        self.rest = rest;
        Ok(content)
    }

    fn environment(&mut self, begins: bool) -> Result<(), Fault> {
        let name = self.braces()?.to_string();
        if begins && name == "array" {
            self.braces()?;
        }
        self.tokens.push(if begins { Token::Begin(name) } else { Token::End(name) });
        Ok(())
    }

    fn number_set(&mut self) -> Result<(), Fault> {
        let set = match self.braces()? {
            "N" => "naturals",
            "Z" => "integers",
            "Q" => "rationals",
            "R" => "reals",
            "C" => "complexes",
            _ => return Err(Fault::Unsupported),
        };
        self.tokens.push(Token::Set(set));
        Ok(())
    }

    /// Reads the text of an accent. Texts are compared without spaces, parentheses and case.
    fn accent(&mut self, accent: &str) -> Result<(), Fault> {
        let content: String = self.braces()?.chars().filter(|c| *c != ' ').collect::<String>().to_lowercase();
        self.tokens.push(Token::Text(match accent {
            "" => content.chars().filter(|c| !"()".contains(*c)).collect(),
            accent => format!("{accent}{{{content}}}"),
        }));
        Ok(())
    }
}
