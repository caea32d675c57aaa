//! Parses the LaTeX of an answer. The grammar is that of `latex2sympy2_extended` 1.11, as far as it is supported: what it refuses,
//! such as `\frac12` or a period at the end, is refused here too.

mod formula;

use super::lex::{Fault, Token, tokens};
use super::ratio::Ratio;
use super::value::{Expr, Interval, Op, Relation, Value};

/// Maximum nesting of groups.
const MAX_DEPTH: usize = 40;
/// Maximum number of powers, factorials and signs in a row.
const MAX_CHAIN: usize = 12;
/// Maximum length of a text, in bytes.
const MAX_LEN: usize = 2000;

type Parsed<T> = Result<T, Fault>;

/// Parses normalized LaTeX: the whole text, or else the part after the last equals sign of a chain of equations.
pub(super) fn parse(text: &str) -> Parsed<Value> {
    let whole = parse_whole(text);
    if whole.is_ok() || text.contains([',', ';']) {
        return whole;
    }
    let bytes = text.as_bytes();
    let splits = |&(at, _): &(usize, &str)| at == 0 || !b"\\<>!".contains(&bytes[at - 1]);
    let equals: Vec<usize> = text.match_indices('=').filter(splits).map(|(at, _)| at).collect();
    match equals.last() {
        Some(last) if equals.len() > 1 => parse_whole(&text[last + 1..])
            .map_err(|fault| if whole == Err(Fault::Unsupported) { Fault::Unsupported } else { fault }),
        _ => whole,
    }
}

fn parse_whole(text: &str) -> Parsed<Value> {
    if text.len() > MAX_LEN {
        return Err(Fault::Unsupported);
    }
    if let Some(number) = number_with_separators(text) {
        return Ok(Value::Expr(number));
    }
    let complex = is_complex(text);
    let mut parser = Parser { tokens: tokens(text)?, at: 0, depth: 0, bars: 0, complex };
    for rule in [Parser::set_relation, Parser::elements_relation, Parser::elements] {
        (parser.at, parser.depth, parser.bars) = (0, 0, 0);
        match rule(&mut parser) {
            Ok(value) if parser.at == parser.tokens.len() => return Ok(value),
            Err(Fault::Unsupported) => return Err(Fault::Unsupported),
            _ => {}
        }
    }
    Err(Fault::Syntax)
}

/// Returns the number if the text is one with commas between groups of three digits.
fn number_with_separators(text: &str) -> Option<Expr> {
    let text = text.trim();
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |digits| (true, digits));
    let (whole, fraction) = digits.split_once('.').map_or((digits, None), |(whole, fraction)| (whole, Some(fraction)));
    let mut groups = whole.split(',');
    let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let first = groups.next().filter(|first| is_digits(first) && first.len() <= 3)?;
    let rest: Vec<&str> = groups.collect();
    let valid = rest.iter().all(|group| is_digits(group) && group.len() == 3) && fraction.is_none_or(is_digits);
    if rest.is_empty() || !valid {
        return None;
    }
    let fraction = fraction.map_or(String::new(), |fraction| format!(".{fraction}"));
    let number = number(&format!("{first}{}{fraction}", rest.concat())).ok()?;
    Some(if negative { number.negated() } else { number })
}

/// Returns true if the letter i or an operation on complex numbers or matrices is in the text; its variables are complex.
fn is_complex(text: &str) -> bool {
    static COMPLEX: std::sync::LazyLock<regex::Regex> = std::sync::LazyLock::new(|| {
        let operations = r"\\(?:mathbb\{C\}|det|text\{(?:i|rank|Re|Im)\}|mathrm\{i\}|operatorname\{(?:tr|rank|Re|Im)\}|arg\{|Re\{|Im\{)";
        regex::Regex::new(&format!(r"\bi\b|\\imath\b|{operations}")).expect("a valid regular expression")
    });
    COMPLEX.is_match(text)
}

fn number(text: &str) -> Parsed<Expr> {
    let value = Ratio::parse(text).ok_or(Fault::Unsupported)?;
    Ok(Expr::Number { value, decimal: text.contains('.') })
}

pub(super) struct Parser {
    tokens: Vec<Token>,
    at: usize,
    depth: usize,
    /// Number of open bars of absolute values.
    bars: usize,
    complex: bool,
}

impl Parser {
    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at)
    }

    fn sign(&self) -> Option<&'static str> {
        match self.peek() {
            Some(Token::Sign(sign)) => Some(sign),
            _ => None,
        }
    }

    /// Skips `sign` if it is next.
    fn skip(&mut self, sign: &str) -> bool {
        let is_next = self.sign() == Some(sign);
        self.at += usize::from(is_next);
        is_next
    }

    fn expect(&mut self, sign: &str) -> Parsed<()> {
        if self.skip(sign) { Ok(()) } else { Err(Fault::Syntax) }
    }

    /// Calls `rule` one level deeper.
    fn nested<T>(&mut self, rule: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(Fault::Unsupported);
        }
        let result = rule(self);
        self.depth -= 1;
        result
    }

    /// Calls `rule`; goes back to where it started if the text does not match.
    fn attempt<T>(&mut self, rule: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<Option<T>> {
        let (at, depth, bars) = (self.at, self.depth, self.bars);
        match rule(self) {
            Ok(value) => Ok(Some(value)),
            Err(Fault::Syntax) => {
                (self.at, self.depth, self.bars) = (at, depth, bars);
                Ok(None)
            }
            Err(fault) => Err(fault),
        }
    }

    /// A set, or `x = SET`, or `x \in SET`.
    fn set_relation(&mut self) -> Parsed<Value> {
        let names = self.attempt(|p| {
            let names = p.names()?;
            if p.skip("=") || p.skip("in") { Ok(names) } else { Err(Fault::Syntax) }
        })?;
        match names {
            Some(left) => Ok(equation(left, self.nested(Self::set_relation)?)),
            None => self.difference(),
        }
    }

    /// A symbol, or symbols in parentheses.
    fn names(&mut self) -> Parsed<Value> {
        if !self.skip("(") {
            return Ok(Value::Expr(self.symbol()?));
        }
        let mut parts = vec![Value::Expr(self.symbol()?)];
        while self.skip(",") {
            parts.push(Value::Expr(self.symbol()?));
        }
        self.expect(")")?;
        Ok(if parts.len() == 1 { parts.remove(0) } else { Value::Tuple(parts) })
    }

    fn difference(&mut self) -> Parsed<Value> {
        let mut left = self.union()?;
        while self.skip("minus") {
            left = Value::Difference(Box::new(left), Box::new(self.union()?));
        }
        Ok(left)
    }

    fn union(&mut self) -> Parsed<Value> {
        let mut parts = vec![self.set_group()?];
        while self.skip("cup") {
            parts.push(self.set_group()?);
        }
        if parts.len() == 1 {
            return Ok(parts.remove(0));
        }
        let as_set = |part| match part {
            Value::Tuple(elements) => Value::Set(elements),
            part => part,
        };
        Ok(Value::Union(parts.into_iter().map(as_set).collect()))
    }

    fn set_group(&mut self) -> Parsed<Value> {
        if let Some(set) = self.attempt(|p| p.nested(Self::set_atom))? {
            return Ok(set);
        }
        self.expect("(")?;
        let set = self.nested(Self::difference)?;
        self.expect(")")?;
        Ok(set)
    }

    /// A named set, an interval, a tuple, or elements in braces.
    fn set_atom(&mut self) -> Parsed<Value> {
        if let Some(Token::Set(name)) = self.peek() {
            let name = *name;
            self.at += 1;
            return Ok(Value::Named(name));
        }
        if self.skip("empty") {
            return Ok(Value::Named("empty"));
        }
        if let Some(interval) = self.attempt(Self::interval)? {
            return Ok(interval);
        }
        let open = self.sign().filter(|sign| ["(", "[", "{", "\\{"].contains(sign)).ok_or(Fault::Syntax)?;
        self.at += 1;
        let close: &[&str] = match open {
            "{" => &["}"],
            "\\{" => &["\\}"],
            _ => &[")", "]"],
        };
        let mut elements = self.lists(true)?.concat();
        if !close.iter().any(|close| self.skip(close)) {
            return Err(Fault::Syntax);
        }
        Ok(match elements.len() {
            _ if close[0].ends_with('}') => Value::Set(elements),
            1 => elements.remove(0),
            _ => Value::Tuple(elements),
        })
    }

    fn interval(&mut self) -> Parsed<Value> {
        let left_open = self.skip("(");
        if !left_open {
            self.expect("[")?;
        }
        let start = self.nested(Self::expr)?;
        self.expect(",")?;
        let end = self.nested(Self::expr)?;
        let right_open = self.skip(")");
        if !right_open {
            self.expect("]")?;
        }
        let tuple = |start, end| Value::Tuple(vec![Value::Expr(start), Value::Expr(end)]);
        let order = super::order::order(&start, &end);
        Ok(match (order, left_open, right_open) {
            (Some(order), true, true) if order.is_ge() => tuple(start, end),
            (Some(order), false, false) if order.is_gt() => tuple(start, end),
            (Some(order), false, false) if order.is_eq() => Value::Set(vec![Value::Expr(start)]),
            (Some(order), ..) if order.is_ge() => Value::Named("empty"),
            // Equal variables are a point, as equal numbers are.
            (None, true, true) if start == end => tuple(start, end),
            (None, ..) if start == end => return Err(Fault::Unsupported),
            _ => {
                let infinite = |e: &Expr| e.any(&|part| *part == Expr::Infinity);
                let (left_open, right_open) = (left_open || infinite(&start), right_open || infinite(&end));
                Value::Interval(Box::new(Interval { start, end, left_open, right_open }))
            }
        })
    }

    /// `x = 1, 2` and `x = \pm 2`: a name and several values.
    fn elements_relation(&mut self) -> Parsed<Value> {
        let left = self.names()?;
        if !self.skip("=") && !self.skip("in") {
            return Err(Fault::Syntax);
        }
        Ok(equation(left, collection(self.lists(false)?)))
    }

    fn elements(&mut self) -> Parsed<Value> {
        Ok(collection(self.lists(true)?))
    }

    /// Elements separated by commas, in lists separated by semicolons.
    fn lists(&mut self, relations: bool) -> Parsed<Vec<Vec<Value>>> {
        let mut lists = vec![Vec::new()];
        loop {
            let elements = self.nested(|p| p.element(relations))?;
            lists.last_mut().ok_or(Fault::Syntax)?.extend(elements);
            if self.skip(";") {
                lists.push(Vec::new());
            } else if !self.skip(",") {
                return Ok(lists);
            }
        }
    }

    /// One element, or the two of `\pm`.
    fn element(&mut self, relations: bool) -> Parsed<Vec<Value>> {
        let ends = |p: &Self| p.peek().is_none_or(|_| matches!(p.sign(), Some("," | ";" | ")" | "]" | "}" | "\\}")));
        let complete = |p: &mut Self, elements| if ends(p) { Ok(elements) } else { Err(Fault::Syntax) };
        if self.skip("+-") {
            let e = self.expr()?;
            return Ok(vec![Value::Expr(e.clone().negated()), Value::Expr(e)]);
        }
        let plain = self.attempt(|p| {
            let first = p.expr()?;
            if p.skip("+-") {
                let second = p.expr()?;
                let both = [first.clone().plus(second.clone()), first.plus(second.negated())];
                return complete(p, both.map(Value::Expr).to_vec());
            }
            let value = if relations { p.relations(first)? } else { Value::Expr(first) };
            complete(p, vec![value])
        })?;
        if let Some(elements) = plain {
            return Ok(elements);
        }
        if let Some(set) = self.attempt(|p| {
            let set = p.set_atom()?;
            complete(p, vec![set])
        })? {
            return Ok(set);
        }
        Ok(vec![self.matrix()?])
    }

    /// The relations after the expression `first`, if there are any.
    fn relations(&mut self, first: Expr) -> Parsed<Value> {
        let mut chain: Vec<Relation> = Vec::new();
        let mut last = first;
        while let Some(sign) = self.sign() {
            let op = match sign {
                "=" => Op::Equal,
                "!=" => Op::NotEqual,
                "<" => Op::Less,
                "<=" => Op::LessEqual,
                ">" => Op::Greater,
                ">=" => Op::GreaterEqual,
                "~" => {
                    self.at += 1;
                    let right = self.expr()?;
                    // In `x \approx 3.14` the number counts; of two numbers, the exact one.
                    if chain.is_empty() && last.is_of_symbols() {
                        last = right;
                    }
                    continue;
                }
                _ => break,
            };
            self.at += 1;
            let right = self.expr()?;
            chain.push(Relation { left: Value::Expr(last), op, right: Value::Expr(right.clone()) });
            last = right;
        }
        Ok(if chain.is_empty() { Value::Expr(last) } else { Value::Relations(chain) })
    }

    fn matrix(&mut self) -> Parsed<Value> {
        if self.skip("(") {
            let matrix = self.nested(Self::matrix)?;
            self.expect(")")?;
            return Ok(matrix);
        }
        let Some(Token::Begin(name)) = self.peek() else { return Err(Fault::Syntax) };
        let name = name.clone();
        if !["matrix", "pmatrix", "bmatrix", "array"].contains(&name.as_str()) {
            return Err(Fault::Unsupported);
        }
        self.at += 1;
        let mut rows: Vec<Vec<Expr>> = Vec::new();
        loop {
            let mut row = vec![self.nested(Self::expr)?];
            while self.skip("&") {
                row.push(self.nested(Self::expr)?);
            }
            rows.push(row);
            let another = self.skip("\\\\");
            if self.peek() == Some(&Token::End(name.clone())) {
                self.at += 1;
                break;
            }
            if !another {
                return Err(Fault::Syntax);
            }
        }
        let equal = rows.iter().all(|row| row.len() == rows[0].len());
        if equal { Ok(Value::Matrix(rows)) } else { Err(Fault::Syntax) }
    }
}

/// Returns the value of lists of elements: an element, a set, or a set of tuples.
fn collection(mut lists: Vec<Vec<Value>>) -> Value {
    let single = |list: &mut Vec<Value>| if list.len() == 1 { list.pop() } else { None };
    if let [list] = lists.as_mut_slice() {
        return single(list).unwrap_or_else(|| Value::Set(std::mem::take(list)));
    }
    let all_single = lists.iter().all(|list| list.len() == 1);
    Value::Set(if all_single { lists.concat() } else { lists.into_iter().map(Value::Tuple).collect() })
}

fn equation(left: Value, right: Value) -> Value {
    Value::Relations(vec![Relation { left, op: Op::Equal, right }])
}
