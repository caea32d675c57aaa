//! Expressions: sums, products, powers, functions and symbols.

use super::super::lex::{Fault, Token};
use super::super::ratio::Ratio;
use super::super::value::Expr;
use super::{MAX_CHAIN, Parsed, Parser, number};

/// Maximum binomial coefficient's upper number that is computed.
const MAX_BINOMIAL: i128 = 200;

impl Parser {
    /// A sum of products.
    pub(super) fn expr(&mut self) -> Parsed<Expr> {
        let mut sum = self.product(false)?;
        loop {
            if self.skip("+") {
                sum = sum.plus(self.product(false)?);
            } else if self.skip("-") {
                sum = sum.plus(self.product(false)?.negated());
            } else {
                return Ok(sum);
            }
        }
    }

    /// Factors between signs of multiplication and division. An argument without parentheses (`argument`) ends before a function.
    fn product(&mut self, argument: bool) -> Parsed<Expr> {
        let mut product = self.signed(argument)?;
        loop {
            if self.skip("*") {
                product = product.times(self.signed(argument)?);
            } else if self.skip("/") {
                product = product.over(self.signed(argument)?);
            } else {
                return Ok(product);
            }
        }
    }

    fn signed(&mut self, argument: bool) -> Parsed<Expr> {
        let mut negative = false;
        let mut count = 0;
        while let Some(sign @ ("+" | "-")) = self.sign() {
            self.at += 1;
            count += 1;
            negative ^= sign == "-";
            if count > MAX_CHAIN {
                return Err(Fault::Unsupported);
            }
        }
        let mut factors = vec![self.factor()?];
        while self.factor_follows(argument) {
            factors.push(self.factor()?);
        }
        let last = factors.pop().ok_or(Fault::Syntax)?;
        let product = factors.into_iter().rev().fold(last, |right, left| juxtaposed(left, right));
        Ok(if negative { product.negated() } else { product })
    }

    /// Returns true if another factor follows without a sign.
    fn factor_follows(&self, argument: bool) -> bool {
        match self.peek() {
            Some(Token::Sign(sign)) => match *sign {
                "|" => self.bars == 0,
                sign => ["(", "[", "{", "infty", "lfloor", "lceil"].contains(&sign),
            },
            Some(Token::Command(name)) => name != "choose" && (!argument || name == "frac" || name == "binom"),
            Some(Token::Degree | Token::Set(_) | Token::Begin(_) | Token::End(_)) | None => false,
            Some(_) => true,
        }
    }

    /// An atom with its powers and factorials.
    fn factor(&mut self) -> Parsed<Expr> {
        let mut e = self.atom()?;
        for count in 0.. {
            if count > MAX_CHAIN {
                return Err(Fault::Unsupported);
            }
            if !self.skip("^") {
                break;
            }
            e = Expr::Power(Box::new(e), Box::new(self.exponent()?));
            if self.sign() == Some("_") {
                return Err(Fault::Unsupported);
            }
        }
        for count in 0.. {
            if count > MAX_CHAIN {
                return Err(Fault::Unsupported);
            }
            if self.skip("!") {
                e = Expr::function("!", vec![e]);
            } else if self.peek() == Some(&Token::Degree) {
                self.at += 1;
            } else {
                break;
            }
        }
        Ok(e)
    }

    /// An expression in braces, or a number or symbol without.
    fn exponent(&mut self) -> Parsed<Expr> {
        if self.sign() == Some("{") {
            return self.group("{", "}");
        }
        match self.peek() {
            // A subscript that follows, as in `x^2_1`, is the base's.
            Some(Token::Number(digits)) => {
                let value = number(digits);
                self.at += 1;
                value
            }
            Some(Token::Sign("infty") | Token::Percent(_) | Token::Scientific(..)) => self.literal(),
            Some(Token::Letter('e')) | None => Err(Fault::Unsupported),
            Some(Token::Letter(letter)) => {
                let name = letter.to_string();
                self.at += 1;
                Ok(self.named(&name))
            }
            Some(Token::Named(name) | Token::Text(name)) => {
                let name = name.clone();
                self.at += 1;
                Ok(self.named(&name))
            }
            Some(_) => Err(Fault::Syntax),
        }
    }

    fn group(&mut self, open: &str, close: &str) -> Parsed<Expr> {
        self.expect(open)?;
        let bars = std::mem::take(&mut self.bars);
        let e = self.nested(Self::expr)?;
        self.bars = bars;
        self.expect(close)?;
        Ok(e)
    }

    fn atom(&mut self) -> Parsed<Expr> {
        match self.peek() {
            Some(Token::Sign(sign)) => match *sign {
                "(" => self.group("(", ")"),
                "[" => self.group("[", "]"),
                "{" => self.braces(),
                "|" => self.absolute(),
                "lfloor" => Ok(Expr::function("floor", vec![self.group("lfloor", "rfloor")?])),
                "lceil" => Ok(Expr::function("ceil", vec![self.group("lceil", "rceil")?])),
                "infty" => self.literal(),
                _ => Err(Fault::Syntax),
            },
            Some(Token::Number(_) | Token::Percent(_) | Token::Scientific(..) | Token::Differential(_)) => {
                self.literal()
            }
            Some(Token::Letter('e')) => {
                self.at += 1;
                if !self.skip("^") {
                    return Ok(Expr::Euler);
                }
                Ok(Expr::Power(Box::new(Expr::Euler), Box::new(self.exponent()?)))
            }
            Some(Token::Letter(_) | Token::Named(_) | Token::Text(_)) => self.symbol_or_call(),
            Some(Token::Command(_)) => self.command(),
            _ => Err(Fault::Syntax),
        }
    }

    /// A group in braces, or `{n \choose k}`.
    fn braces(&mut self) -> Parsed<Expr> {
        self.expect("{")?;
        let bars = std::mem::take(&mut self.bars);
        let upper = self.nested(Self::expr)?;
        self.bars = bars;
        if self.peek() == Some(&Token::Command("choose".into())) {
            self.at += 1;
            let lower = self.nested(Self::expr)?;
            self.expect("}")?;
            return Ok(binomial(upper, lower));
        }
        self.expect("}")?;
        Ok(upper)
    }

    fn absolute(&mut self) -> Parsed<Expr> {
        self.expect("|")?;
        self.bars += 1;
        let inner = self.nested(Self::expr)?;
        self.bars -= 1;
        self.expect("|")?;
        Ok(Expr::function("abs", vec![inner]))
    }

    /// A number, infinity or a differential.
    fn literal(&mut self) -> Parsed<Expr> {
        let token = self.peek().cloned();
        self.at += 1;
        match token {
            Some(Token::Sign("infty")) => Ok(Expr::Infinity),
            Some(Token::Number(digits)) => {
                let value = number(&digits)?;
                // The base of a number, as in `101_2`, is not read.
                if self.skip("_") {
                    self.subscript()?;
                }
                Ok(value)
            }
            Some(Token::Percent(digits)) => Ok(Expr::Percent(Box::new(number(&digits)?))),
            Some(Token::Scientific(digits, exponent)) => {
                let mantissa = Ratio::parse(&digits).ok_or(Fault::Unsupported)?;
                let power = Ratio::integer(10).pow(exponent.into()).ok_or(Fault::Unsupported)?;
                let value = mantissa.mul(power).ok_or(Fault::Unsupported)?;
                Ok(Expr::Number { value, decimal: true })
            }
            Some(Token::Differential(name)) => Ok(Expr::Symbol { name, complex: self.complex }),
            _ => Err(Fault::Syntax),
        }
    }

    /// Returns the text of a subscript, without spaces.
    fn subscript(&mut self) -> Parsed<String> {
        let braces = self.skip("{");
        let mut text = String::new();
        loop {
            let token = self.peek().cloned().ok_or(Fault::Syntax)?;
            self.at += 1;
            text += &match token {
                Token::Sign("}") if braces => break,
                Token::Sign(sign @ ("+" | "-" | "*" | "/" | ",")) if braces => sign.to_string(),
                Token::Number(digits) => digits,
                Token::Letter(letter) => letter.to_string(),
                Token::Differential(name) if braces => name,
                Token::Named(name) => format!("\\{name}"),
                _ => return Err(Fault::Unsupported),
            };
            if !braces {
                break;
            }
        }
        let text = text.to_lowercase();
        Ok(if text.chars().count() > 1 { format!("_{{{text}}}") } else { format!("_{text}") })
    }

    /// Returns the name of a symbol with its subscript, in its own case.
    fn symbol_name(&mut self) -> Parsed<String> {
        let mut name = match self.peek() {
            Some(Token::Letter('e')) | None => return Err(Fault::Syntax),
            Some(Token::Letter(letter)) => letter.to_string(),
            Some(Token::Named(name) | Token::Text(name)) => name.clone(),
            Some(_) => return Err(Fault::Syntax),
        };
        self.at += 1;
        if self.skip("_") {
            name += &self.subscript()?;
        }
        Ok(name)
    }

    /// A letter or a name with its subscript and its exponent, in either order.
    pub(super) fn symbol(&mut self) -> Parsed<Expr> {
        let (name, exponent) = self.name_and_exponent()?;
        Ok(raised(self.named(&name), exponent))
    }

    fn name_and_exponent(&mut self) -> Parsed<(String, Option<Expr>)> {
        let mut name = self.symbol_name()?;
        let exponent = if self.skip("^") { Some(self.exponent()?) } else { None };
        if exponent.is_some() && self.skip("_") {
            name += &self.subscript()?;
        }
        Ok((name, exponent))
    }

    /// Returns the constant or the variable of a name, in lower case.
    fn named(&self, name: &str) -> Expr {
        match name.to_lowercase().as_str() {
            _ if name == "I" => Expr::ImaginaryUnit,
            "pi" => Expr::Pi,
            "gamma" => Expr::EulerGamma,
            lower => Expr::Symbol { name: lower.to_string(), complex: self.complex },
        }
    }

    /// A symbol, or a call of an unknown function: `f(x)`, `f^{-1}(x)`, `f(x + 1, y)`. With one argument that is no atom, it is a
    /// product. Name and exponent are read once: reading them again at each level would take exponential time.
    fn symbol_or_call(&mut self) -> Parsed<Expr> {
        let (name, exponent) = self.name_and_exponent()?;
        let close = match self.sign() {
            Some("(") => ")",
            Some("[") => "]",
            _ => return Ok(raised(self.named(&name), exponent)),
        };
        let arguments = self.attempt(|p| {
            p.at += 1;
            let mut arguments = Vec::new();
            if p.comma_before_close() {
                arguments.push(p.nested(Self::expr)?);
                while p.skip(",") {
                    arguments.push(p.nested(Self::expr)?);
                }
            } else {
                arguments.push(match p.peek() {
                    Some(Token::Number(_) | Token::Sign("infty") | Token::Percent(_)) => p.literal()?,
                    _ => p.symbol()?,
                });
            }
            p.expect(close)?;
            Ok(arguments)
        })?;
        Ok(match arguments {
            Some(arguments) => raised(Expr::function(&format!("call {name}"), arguments), exponent),
            None => raised(self.named(&name), exponent),
        })
    }

    /// Returns true if a comma follows before the open bracket is closed.
    fn comma_before_close(&self) -> bool {
        let mut open = 0usize;
        for token in &self.tokens[self.at..] {
            match token {
                Token::Sign("(" | "[" | "{" | "\\{") => open += 1,
                Token::Sign(")" | "]" | "}" | "\\}") if open == 0 => return false,
                Token::Sign(")" | "]" | "}" | "\\}") => open -= 1,
                Token::Sign(",") if open == 0 => return true,
                _ => {}
            }
        }
        false
    }

    fn command(&mut self) -> Parsed<Expr> {
        let Some(Token::Command(name)) = self.peek().cloned() else { return Err(Fault::Syntax) };
        self.at += 1;
        match name.as_str() {
            "frac" => {
                let numerator = self.group("{", "}")?;
                Ok(numerator.over(self.group("{", "}")?))
            }
            "binom" => {
                let upper = self.group("{", "}")?;
                Ok(binomial(upper, self.group("{", "}")?))
            }
            "sqrt" => {
                let root = if self.sign() == Some("[") { Some(self.group("[", "]")?) } else { None };
                let base = self.group("{", "}")?;
                let exponent = Expr::integer(1).over(root.unwrap_or(Expr::integer(2)));
                Ok(Expr::Power(Box::new(base), Box::new(exponent)))
            }
            "choose" => Err(Fault::Syntax),
            name => self.nested(|p| p.function(name)),
        }
    }

    /// A function's base and exponent, and its argument: in parentheses, or a product.
    fn function(&mut self, name: &str) -> Parsed<Expr> {
        let (mut base, mut exponent) = (None, None);
        for _ in 0..2 {
            if exponent.is_none() && self.skip("^") {
                exponent = Some(self.exponent()?);
            } else if base.is_none() && name == "log" && self.skip("_") {
                base = Some(self.exponent()?);
            }
        }
        let argument = if self.sign() == Some("(") { self.group("(", ")")? } else { self.product(true)? };
        let inverse = exponent.as_ref().and_then(Expr::as_integer) == Some(-1);
        let trigonometric = ["sin", "cos", "tan", "csc", "sec", "cot", "sinh", "cosh", "tanh"].contains(&name);
        let e = match name {
            "exp" => Expr::Power(Box::new(Expr::Euler), Box::new(argument)),
            "ln" => Expr::function("log", vec![argument, Expr::Euler]),
            "log" => Expr::function("log", vec![argument, base.unwrap_or(Expr::integer(10))]),
            name if trigonometric && inverse => return Ok(Expr::function(&format!("a{name}"), vec![argument])),
            name => {
                let short = name.strip_prefix("arc").or_else(|| name.strip_prefix("ar"));
                let name = short.map_or(name.to_string(), |short| format!("a{short}"));
                Expr::function(&name, vec![argument])
            }
        };
        Ok(raised(e, exponent))
    }
}

fn raised(base: Expr, exponent: Option<Expr>) -> Expr {
    match exponent {
        Some(exponent) => Expr::Power(Box::new(base), Box::new(exponent)),
        None => base,
    }
}

/// Returns the product of two factors without a sign between them; an integer before a positive number is a mixed number.
fn juxtaposed(left: Expr, right: Expr) -> Expr {
    if let (Some(whole), Some(part)) = (left.as_integer(), right.as_rational())
        && !part.is_negative()
        && !part.is_zero()
    {
        let part = if whole < 0 { part.neg() } else { Some(part) };
        let sum = part.and_then(|part| Ratio::new(whole, 1)?.add(part));
        return sum.map_or(Expr::Undefined, Expr::rational);
    }
    left.times(right)
}

/// Returns a binomial coefficient; a number for two small numbers.
fn binomial(upper: Expr, lower: Expr) -> Expr {
    match (upper.as_integer(), lower.as_integer()) {
        (Some(n), Some(k)) if (0..=MAX_BINOMIAL).contains(&n) && (0..=n).contains(&k) => {
            let step = |value: i128, i: i128| value.checked_mul(n - i)?.checked_div(i + 1);
            match (0..k.min(n - k)).try_fold(1i128, step).and_then(|value| Ratio::new(value, 1)) {
                Some(value) => Expr::rational(value),
                None => Expr::function("binom", vec![upper, lower]),
            }
        }
        _ => Expr::function("binom", vec![upper, lower]),
    }
}
