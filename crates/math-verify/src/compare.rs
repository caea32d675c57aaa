//! Equality of values, by the rules of `math-verify` 0.9.

use super::algebra::Algebra;
use super::numeric;
use super::order::{DIFFERENT, Same, exact};
use super::ratio::Ratio;
use super::value::{Expr, Interval, Op, Relation, Value};

/// Decimals to which a decimal number is rounded before it is compared.
const DECIMALS: u32 = 6;
/// Largest relative difference of equal numbers in floating point.
const SAME: f64 = 1e-13;
/// Range of numbers that are compared in floating point: beyond it, too few digits are left after the point.
const RANGE: (f64, f64) = (1e-6, 1e6);
/// Maximum number of elements of sets that are compared.
const MAX_ELEMENTS: usize = 64;

/// Compares two expressions.
pub(super) fn exprs(gold: &Expr, answer: &Expr) -> Same {
    let undefined = |e: &Expr| e.any(&|part| *part == Expr::Undefined);
    if undefined(gold) || undefined(answer) {
        return Same::No;
    }
    if gold == answer {
        return Same::Yes;
    }
    if gold.is_symbol() || answer.is_symbol() {
        return Same::of(symbols(gold, answer) || symbols(answer, gold));
    }
    if infinite(gold) || infinite(answer) {
        let (a, b) = (numeric::constant(gold), numeric::constant(answer));
        // math-verify distinguishes powers and functions of infinity from infinity itself.
        let compound = |e: &Expr| e.any(&|part| matches!(part, Expr::Power(..) | Expr::Function(..)));
        let unknown = a.is_nan() || b.is_nan() || compound(gold) || compound(answer);
        // A number that is too large to compute is not infinity.
        let both = infinite(gold) && infinite(answer);
        return if both && unknown { Same::Unknown } else { Same::of(both && a == b && a.is_infinite()) };
    }
    if percentages(gold, answer) {
        return Same::Yes;
    }
    if gold.is_constant() && answer.is_constant() && (is_decimal(gold) || is_decimal(answer)) {
        return decimals(gold, answer);
    }
    algebraic(gold, answer)
}

fn infinite(e: &Expr) -> bool {
    e.any(&|part| *part == Expr::Infinity)
}

/// Compares a symbol with an expression: with another symbol by name, with a product of symbols by the letters in their order, with
/// a number by its digits.
fn symbols(symbol: &Expr, other: &Expr) -> bool {
    let Expr::Symbol { name, .. } = symbol else { return false };
    let letters = |e: &Expr| match e {
        Expr::Symbol { name, .. } => Some(name.clone()),
        Expr::Euler => Some("e".to_string()),
        _ => None,
    };
    match other {
        Expr::Product(factors) => {
            factors.iter().map(letters).collect::<Option<String>>().is_some_and(|other| other == *name)
        }
        Expr::Number { value, decimal: false } => value.to_string() == *name,
        other => letters(other).is_some_and(|other| other == *name),
    }
}

/// Returns true if both are whole numbers or whole percentages with equal digits: 9% and 9 are the same answer.
fn percentages(gold: &Expr, answer: &Expr) -> bool {
    let digits = |e: &Expr| match e {
        Expr::Percent(inner) => inner.as_integer(),
        e => e.as_integer(),
    };
    digits(gold).is_some_and(|gold| digits(answer) == Some(gold))
}

/// Returns true for a number, or a percentage, with a decimal point.
fn is_decimal(e: &Expr) -> bool {
    match e {
        Expr::Percent(inner) => is_decimal(inner),
        e => matches!(e, Expr::Number { decimal: true, .. }),
    }
}

/// Compares two numbers after rounding.
fn decimals(gold: &Expr, answer: &Expr) -> Same {
    if let (Some(a), Some(b)) = (exact(gold), exact(answer)) {
        // An integer is not rounded, and not equal to a decimal number that is close to it.
        let is_integer = |e: &Expr, value: Ratio| value.as_integer().is_some() && !e.any(&is_decimal);
        if is_integer(gold, a) || is_integer(answer, b) {
            return Same::of(a == b);
        }
        let rounded = a.rounded(DECIMALS).zip(b.rounded(DECIMALS));
        return Same::of(rounded.map_or(a == b, |(a, b)| a == b));
    }
    let (a, b) = (numeric::constant(gold), numeric::constant(answer));
    let unit = 10f64.powi(DECIMALS as i32);
    if a.is_finite() && b.is_finite() && a.abs().max(b.abs()) < RANGE.1 {
        Same::of((a * unit).round() == (b * unit).round())
    } else {
        Same::Unknown
    }
}

/// Compares normal forms, and then values at several points.
fn algebraic(gold: &Expr, answer: &Expr) -> Same {
    let mut algebra = Algebra::default();
    let (a, b) = (algebra.form(gold), algebra.form(answer));
    if let (Some(a), Some(b)) = (&a, &b) {
        let decimal_power = |e: &Expr| matches!(e, Expr::Power(_, exponent) if exponent.any(&is_decimal));
        match algebra.equal(a, b) {
            // `math-verify` rounds powers such as 2^{0.5}.
            Some(true) if (gold.any(&decimal_power) || answer.any(&decimal_power)) && a.as_constant().is_none() => {
                return Same::Unknown;
            }
            Some(true) => return Same::Yes,
            Some(false) if algebra.is_rational() => return Same::No,
            _ => {}
        }
    }
    if gold.is_constant() && answer.is_constant() {
        let (a, b) = (numeric::constant(gold), numeric::constant(answer));
        return close(a, b, RANGE);
    }
    points(gold, answer)
}

/// Compares two numbers in floating point.
fn close(a: f64, b: f64, range: (f64, f64)) -> Same {
    if !a.is_finite() || !b.is_finite() {
        return Same::Unknown;
    }
    let (gap, size) = ((a - b).abs(), a.abs().max(b.abs()));
    if gap > DIFFERENT * size.max(range.0) {
        Same::No
    } else if gap <= SAME * size && size > range.0 && size < range.1 {
        Same::Yes
    } else {
        Same::Unknown
    }
}

/// Compares the values of two expressions at several points, negative ones included. They are the same if all agree and at least
/// four of them, of both signs, are values; different if one differs clearly.
fn points(gold: &Expr, answer: &Expr) -> Same {
    const POINTS: [f64; 8] = [0.731, -0.462, 1.937, -1.213, 0.273, -2.618, 2.874, -0.119];
    let mut agreed = [0; 2];
    let mut same = true;
    for (at, point) in POINTS.iter().enumerate() {
        // Each variable has its own value.
        let variable = |name: &str| {
            let hash = name.bytes().fold(7u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
            point + point.signum() * f64::from(hash % 1009) / 1511.0
        };
        let (a, b) = (numeric::value(gold, &variable), numeric::value(answer, &variable));
        if a.is_nan() && b.is_nan() {
            continue;
        }
        match close(a, b, (1e-4, 1e9)) {
            Same::Yes => agreed[at % 2] += 1,
            // A value against none is a different domain.
            Same::No => return Same::No,
            Same::Unknown => same = false,
        }
    }
    if same && agreed.iter().all(|&count| count >= 2) { Same::Yes } else { Same::Unknown }
}

/// Compares two values.
pub(super) fn values(gold: &Value, answer: &Value) -> Same {
    let (mut gold, mut answer) = (shortened(gold), shortened(answer));
    // A value is compared with the right side of an equation.
    if answer.is_equation() && !gold.is_equation() {
        answer = right_side(answer);
    } else if gold.is_assignment() && !answer.is_equation() {
        gold = right_side(gold);
    }
    if let (Value::Relations(chain), true) = (&gold, answer.is_set())
        && let Some(interval) = solution(chain)
    {
        gold = interval;
    }
    if gold == answer {
        // Division by 0 is not even equal to itself.
        return if let Value::Expr(e) = &gold { exprs(e, e) } else { Same::Yes };
    }
    match (&gold, &answer) {
        (Value::Relations(a), Value::Relations(b)) => chains(a, b),
        (a, b) if a.is_collection() || b.is_collection() => collections(a, b),
        (Value::Expr(a), Value::Expr(b)) => exprs(a, b),
        (Value::Matrix(a), Value::Matrix(b)) => matrices(a, b),
        _ => Same::No,
    }
}

/// Shortens a chain of equations that starts with symbols to its first and last sides.
fn shortened(value: &Value) -> Value {
    match value {
        Value::Relations(chain) if chain.len() > 1 && value.is_assignment() => {
            let (left, right) = (chain[0].left.clone(), chain[chain.len() - 1].right.clone());
            Value::Relations(vec![Relation { left, op: Op::Equal, right }])
        }
        value => value.clone(),
    }
}

fn right_side(value: Value) -> Value {
    match value {
        Value::Relations(mut chain) => chain.pop().map_or(Value::Named("empty"), |relation| relation.right),
        value => value,
    }
}

/// Returns the interval of a variable between numbers: of `1 < x < 2` or `x > 3`.
fn solution(chain: &[Relation]) -> Option<Value> {
    let number = |value: &Value| match value {
        Value::Expr(e) if e.is_constant() => Some(e.clone()),
        _ => None,
    };
    let is_variable = |value: &Value| matches!(value, Value::Expr(e) if e.is_symbol());
    let infinity = Expr::Infinity;
    let interval = |start: Expr, end: Expr, left_open, right_open| {
        Some(Value::Interval(Box::new(Interval { start, end, left_open, right_open })))
    };
    let is_less = |op| matches!(op, Op::Less | Op::LessEqual);
    match chain {
        [one] => {
            let (variable, op, bound) = if is_variable(&one.left) {
                (&one.left, one.op, number(&one.right)?)
            } else {
                (&one.right, one.op.flipped(), number(&one.left)?)
            };
            match op {
                _ if !is_variable(variable) => None,
                Op::Less | Op::LessEqual => interval(infinity.negated(), bound, true, op == Op::Less),
                Op::Greater | Op::GreaterEqual => interval(bound, infinity, op == Op::Greater, true),
                _ => None,
            }
        }
        [low, high] if is_variable(&low.right) && is_less(low.op) && is_less(high.op) => {
            interval(number(&low.left)?, number(&high.right)?, low.op == Op::Less, high.op == Op::Less)
        }
        _ => None,
    }
}

/// Compares chains of relations.
fn chains(gold: &[Relation], answer: &[Relation]) -> Same {
    if gold.len() != answer.len() {
        return Same::No;
    }
    gold.iter().zip(answer).fold(Same::Yes, |same, (gold, answer)| same.and(|| relations(gold, answer)))
}

/// Compares two relations: equal differences of their sides, or differences in a constant ratio.
fn relations(gold: &Relation, answer: &Relation) -> Same {
    let (Value::Expr(a), Value::Expr(b), Value::Expr(c), Value::Expr(d)) =
        (&gold.left, &gold.right, &answer.left, &answer.right)
    else {
        let same = gold.op == answer.op && alike(&gold.left, &answer.left) && alike(&gold.right, &answer.right);
        return if same { Same::Yes } else { Same::Unknown };
    };
    if gold == answer {
        return Same::Yes;
    }
    let difference = |left: &Expr, right: &Expr| left.clone().plus(right.clone().negated());
    let (gold_difference, answer_difference) = (difference(a, b), difference(c, d));
    let straight = || if gold.op == answer.op { exprs(&gold_difference, &answer_difference) } else { Same::No };
    let flipped = || {
        if gold.op.flipped() == answer.op && gold.op != Op::NotEqual {
            exprs(&gold_difference, &difference(d, c))
        } else {
            Same::No
        }
    };
    straight().or(flipped).or(|| match (gold.op, answer.op) {
        (Op::Equal, Op::Equal) => scaled(&gold_difference, &answer_difference),
        _ => Same::No,
    })
}

/// Returns true if two values are written alike; the elements of sets may be in any order.
fn alike(gold: &Value, answer: &Value) -> bool {
    match (gold, answer) {
        (Value::Set(a), Value::Set(b)) => {
            let (a, b) = (distinct(a), distinct(b));
            a.len() == b.len() && a.iter().all(|element| b.contains(element))
        }
        (gold, answer) => gold == answer,
    }
}

/// Compares the equations `gold = 0` and `answer = 0` in several variables, which may differ by a constant factor. Equations in one
/// variable and inequalities do not count as equal if they do, as in `math-verify`.
fn scaled(gold: &Expr, answer: &Expr) -> Same {
    let mut algebra = Algebra::default();
    let (Some(a), Some(b)) = (algebra.form(gold), algebra.form(answer)) else { return Same::Unknown };
    if algebra.atoms() < 2 {
        return Same::No;
    }
    match algebra.ratio(&a, &b) {
        Some(ratio) if algebra.is_rational() => Same::of(!ratio.is_zero()),
        _ => Same::Unknown,
    }
}

fn matrices(gold: &[Vec<Expr>], answer: &[Vec<Expr>]) -> Same {
    if gold.len() != answer.len() || gold[0].len() != answer[0].len() {
        return Same::No;
    }
    gold.iter().flatten().zip(answer.iter().flatten()).fold(Same::Yes, |same, (a, b)| same.and(|| exprs(a, b)))
}

/// Compares sets, tuples and intervals; a single value counts as a set of one element.
fn collections(gold: &Value, answer: &Value) -> Same {
    let pair = |interval: &Interval| {
        if interval.left_open && interval.right_open {
            Some(vec![Value::Expr(interval.start.clone()), Value::Expr(interval.end.clone())])
        } else {
            None
        }
    };
    match (gold, answer) {
        (Value::Interval(a), Value::Interval(b)) => {
            Same::of(a.left_open == b.left_open && a.right_open == b.right_open)
                .and(|| exprs(&a.start, &b.start))
                .and(|| exprs(&a.end, &b.end))
        }
        (Value::Named(a), Value::Named(b)) => Same::of(a == b),
        (Value::Set(a), Value::Set(b)) => unordered(&distinct(a), &distinct(b)),
        (Value::Set(a), Value::Tuple(b)) => unordered(&distinct(a), &all(b)),
        (Value::Tuple(a), Value::Set(b) | Value::Tuple(b)) => in_order(a, b),
        // `(1, 2)` is an interval, and a pair where the other side is one.
        (Value::Interval(a), Value::Set(b) | Value::Tuple(b)) => pair(a).map_or(Same::No, |a| in_order(&a, b)),
        (Value::Tuple(a), Value::Interval(b)) => pair(b).map_or(Same::No, |b| in_order(a, &b)),
        (Value::Set(a), Value::Interval(b)) => pair(b).map_or(Same::No, |b| unordered(&distinct(a), &all(&b))),
        (Value::Expr(_) | Value::Relations(_), Value::Set(b)) => unordered(&[gold], &distinct(b)),
        (Value::Set(a), Value::Expr(_) | Value::Relations(_)) => unordered(&distinct(a), &[answer]),
        (Value::Expr(_) | Value::Relations(_) | Value::Tuple(_) | Value::Matrix(_), _)
        | (_, Value::Expr(_) | Value::Relations(_) | Value::Tuple(_) | Value::Matrix(_)) => Same::No,
        (a, b) => super::sets::unions(a, b),
    }
}

fn in_order(gold: &[Value], answer: &[Value]) -> Same {
    if gold.len() != answer.len() {
        return Same::No;
    }
    gold.iter().zip(answer).fold(Same::Yes, |same, (a, b)| same.and(|| values(a, b)))
}

/// Compares elements in any order.
fn unordered(gold: &[&Value], answer: &[&Value]) -> Same {
    if gold.len() != answer.len() || gold.len() > MAX_ELEMENTS {
        return if gold.len() > MAX_ELEMENTS { Same::Unknown } else { Same::No };
    }
    let mut free: Vec<&Value> = answer.to_vec();
    let mut unknown = false;
    for element in gold {
        let same: Vec<Same> = free.iter().map(|other| elements(element, other)).collect();
        match same.iter().position(|same| *same == Same::Yes) {
            Some(at) => drop(free.swap_remove(at)),
            None if same.contains(&Same::Unknown) => unknown = true,
            None => return Same::No,
        }
    }
    if unknown { Same::Unknown } else { Same::Yes }
}

/// Compares two elements of sets. Elements with variables must be written alike: `math-verify` compares them in an order that
/// depends on how they are written.
fn elements(gold: &Value, answer: &Value) -> Same {
    let is_open = |value: &Value| matches!(value, Value::Expr(e) if !e.is_constant() && !e.is_symbol());
    match values(gold, answer) {
        Same::Yes if gold.is_collection() != answer.is_collection() => Same::Unknown,
        Same::Yes if gold != answer && (is_open(gold) || is_open(answer)) => Same::Unknown,
        same => same,
    }
}

fn all(elements: &[Value]) -> Vec<&Value> {
    elements.iter().collect()
}

fn distinct(elements: &[Value]) -> Vec<&Value> {
    let mut distinct: Vec<&Value> = Vec::new();
    for element in elements.iter().take(MAX_ELEMENTS * 4) {
        if !distinct.contains(&element) {
            distinct.push(element);
        }
    }
    distinct
}
