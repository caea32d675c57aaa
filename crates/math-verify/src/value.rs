//! Values of mathematical texts: expressions, relations, sets, tuples, intervals and matrices.

use super::ratio::Ratio;

/// An expression. Nothing is evaluated when it is parsed, except fractions of integers and mixed numbers.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Expr {
    /// A rational number; `decimal` if it was written with a decimal point.
    Number {
        value: Ratio,
        decimal: bool,
    },
    /// A percentage: the expression times 1/100.
    Percent(Box<Expr>),
    /// A variable or a text. Variables in texts with complex numbers differ from real ones.
    Symbol {
        name: String,
        complex: bool,
    },
    Pi,
    Euler,
    EulerGamma,
    ImaginaryUnit,
    Infinity,
    Sum(Vec<Expr>),
    Product(Vec<Expr>),
    Power(Box<Expr>, Box<Expr>),
    /// A function of one or two arguments: `sin`, `log` with its base, `abs`, `!`, `floor`, or an unknown one.
    Function(String, Vec<Expr>),
    /// The result of a division by 0.
    Undefined,
}

/// Relation symbols.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
}

impl Op {
    /// The relation with its sides exchanged.
    pub(super) fn flipped(self) -> Self {
        match self {
            Op::Less => Op::Greater,
            Op::LessEqual => Op::GreaterEqual,
            Op::Greater => Op::Less,
            Op::GreaterEqual => Op::LessEqual,
            same => same,
        }
    }
}

/// One relation, such as `x < 2`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Relation {
    pub(super) left: Value,
    pub(super) op: Op,
    pub(super) right: Value,
}

/// An interval; infinite ends are open.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Interval {
    pub(super) start: Expr,
    pub(super) end: Expr,
    pub(super) left_open: bool,
    pub(super) right_open: bool,
}

/// The meaning of a text.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Expr(Expr),
    /// A chain of relations, all of which hold; never empty.
    Relations(Vec<Relation>),
    /// A finite set, in the order of the text.
    Set(Vec<Value>),
    Tuple(Vec<Value>),
    Interval(Box<Interval>),
    Union(Vec<Value>),
    /// The first set without the elements of the second.
    Difference(Box<Value>, Box<Value>),
    /// Names of sets: `reals`, `integers`, ...
    Named(&'static str),
    Matrix(Vec<Vec<Expr>>),
}

impl Expr {
    pub(super) fn integer(number: i64) -> Self {
        Self::rational(Ratio::integer(number))
    }

    pub(super) fn rational(value: Ratio) -> Self {
        Expr::Number { value, decimal: false }
    }

    /// Returns the value of a number without a decimal point.
    pub(super) fn as_rational(&self) -> Option<Ratio> {
        match self {
            Expr::Number { value, decimal: false } => Some(*value),
            _ => None,
        }
    }

    /// Returns the value of an integer without a decimal point.
    pub(super) fn as_integer(&self) -> Option<i128> {
        self.as_rational()?.as_integer()
    }

    /// Returns the product of `self` and `other`, flat.
    pub(super) fn times(self, other: Self) -> Self {
        let factors = |e| match e {
            Expr::Product(factors) => factors,
            e => vec![e],
        };
        Expr::Product([factors(self), factors(other)].concat())
    }

    /// Returns the sum of `self` and `other`, flat.
    pub(super) fn plus(self, other: Self) -> Self {
        let terms = |e| match e {
            Expr::Sum(terms) => terms,
            e => vec![e],
        };
        Expr::Sum([terms(self), terms(other)].concat())
    }

    /// Returns `-self`; evaluated for numbers.
    pub(super) fn negated(self) -> Self {
        match self {
            Expr::Number { value, decimal } => match value.neg() {
                Some(value) => Expr::Number { value, decimal },
                None => Expr::Undefined,
            },
            e => Expr::integer(-1).times(e),
        }
    }

    /// Returns `self / divisor`; a rational number for two integers.
    pub(super) fn over(self, divisor: Self) -> Self {
        match (self.as_integer(), divisor.as_integer()) {
            (Some(numerator), Some(denominator)) => {
                Ratio::new(numerator, denominator).map_or(Expr::Undefined, Expr::rational)
            }
            _ => self.times(Expr::Power(Box::new(divisor), Box::new(Expr::integer(-1)))),
        }
    }

    pub(super) fn function(name: &str, arguments: Vec<Expr>) -> Self {
        Expr::Function(name.to_string(), arguments)
    }

    /// The arguments of the expression.
    pub(super) fn arguments(&self) -> Vec<&Expr> {
        match self {
            Expr::Percent(inner) => vec![inner],
            Expr::Sum(parts) | Expr::Product(parts) | Expr::Function(_, parts) => parts.iter().collect(),
            Expr::Power(base, exponent) => vec![base, exponent],
            _ => Vec::new(),
        }
    }

    /// Returns true if `holds` is true for the expression or a part of it.
    pub(super) fn any(&self, holds: &impl Fn(&Expr) -> bool) -> bool {
        holds(self) || self.arguments().into_iter().any(|part| part.any(holds))
    }

    pub(super) fn is_symbol(&self) -> bool {
        matches!(self, Expr::Symbol { .. })
    }

    /// Returns true if the expression has no variables.
    pub(super) fn is_constant(&self) -> bool {
        !self.any(&Expr::is_symbol)
    }

    /// Returns true if the expression is made of symbols: `x`, `xy`, `a/b`. Left of an equals sign it is a name for the right.
    pub(super) fn is_of_symbols(&self) -> bool {
        match self {
            Expr::Symbol { .. } => true,
            Expr::Power(base, exponent) if exponent.as_integer() == Some(-1) => {
                base.is_symbol() || base.arguments().into_iter().all(Expr::is_of_symbols)
            }
            other => {
                let arguments = other.arguments();
                !arguments.is_empty() && arguments.into_iter().all(Expr::is_of_symbols)
            }
        }
    }
}

impl Value {
    /// Returns true if it is an expression of symbols, or a tuple of them.
    pub(super) fn is_of_symbols(&self) -> bool {
        match self {
            Value::Expr(e) => e.is_of_symbols(),
            Value::Tuple(parts) | Value::Set(parts) => !parts.is_empty() && parts.iter().all(Value::is_of_symbols),
            _ => false,
        }
    }

    /// Returns true for a chain of equations.
    pub(super) fn is_equation(&self) -> bool {
        matches!(self, Value::Relations(chain) if chain.iter().all(|relation| relation.op == Op::Equal))
    }

    /// Returns true for a chain of equations that starts with symbols, such as `x = 2`.
    pub(super) fn is_assignment(&self) -> bool {
        matches!(self, Value::Relations(chain) if self.is_equation() && chain[0].left.is_of_symbols())
    }

    /// Returns true if it is a set, an interval or a tuple.
    pub(super) fn is_collection(&self) -> bool {
        matches!(self, Value::Tuple(_)) || self.is_set()
    }

    pub(super) fn is_set(&self) -> bool {
        matches!(self, Value::Set(_) | Value::Interval(_) | Value::Union(_) | Value::Difference(..) | Value::Named(_))
    }
}
