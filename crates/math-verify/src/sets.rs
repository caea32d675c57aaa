//! Equality of unions of intervals and points.

use super::order::{Same, order};
use super::value::{Expr, Interval, Value};
use std::cmp::Ordering;

/// Maximum number of intervals of a set.
const MAX_INTERVALS: usize = 64;

/// Compares unions and differences of intervals and points, whose ends are numbers.
pub(super) fn unions(gold: &Value, answer: &Value) -> Same {
    match (intervals(gold), intervals(answer)) {
        (Some(gold), Some(answer)) => Same::of_equal(&gold, &answer),
        _ => Same::Unknown,
    }
}

impl Same {
    fn of_equal(gold: &[Interval], answer: &[Interval]) -> Self {
        let same = |(a, b): (&Interval, &Interval)| {
            a.left_open == b.left_open
                && a.right_open == b.right_open
                && order(&a.start, &b.start) == Some(Ordering::Equal)
                && order(&a.end, &b.end) == Some(Ordering::Equal)
        };
        if gold.len() == answer.len() && gold.iter().zip(answer).all(same) { Same::Yes } else { Same::No }
    }
}

/// Returns the set as disjoint intervals in order; `None` if it is not one of intervals and numbers.
fn intervals(set: &Value) -> Option<Vec<Interval>> {
    let parts = match set {
        Value::Named("empty") => Vec::new(),
        Value::Named("reals") => {
            vec![Interval { start: Expr::Infinity.negated(), end: Expr::Infinity, left_open: true, right_open: true }]
        }
        Value::Interval(interval) => vec![(**interval).clone()],
        Value::Set(elements) => elements.iter().map(point).collect::<Option<_>>()?,
        Value::Union(parts) => parts.iter().map(intervals).collect::<Option<Vec<_>>>()?.concat(),
        Value::Difference(whole, holes) => {
            let (Value::Named("reals"), Value::Set(holes)) = (&**whole, &**holes) else { return None };
            holes.iter().try_fold(intervals(whole)?, |parts, hole| without(parts, &point(hole)?.start))?
        }
        _ => return None,
    };
    merged(parts)
}

/// Returns the interval of one number.
fn point(value: &Value) -> Option<Interval> {
    match value {
        Value::Expr(e) if e.is_constant() => {
            Some(Interval { start: e.clone(), end: e.clone(), left_open: false, right_open: false })
        }
        _ => None,
    }
}

/// Removes a point from intervals.
fn without(parts: Vec<Interval>, hole: &Expr) -> Option<Vec<Interval>> {
    let mut rest = Vec::new();
    for part in parts {
        match (order(&part.start, hole)?, order(hole, &part.end)?) {
            (Ordering::Greater, _) | (_, Ordering::Greater) => rest.push(part),
            (Ordering::Equal, Ordering::Equal) => {}
            (Ordering::Equal, _) => rest.push(Interval { left_open: true, ..part }),
            (_, Ordering::Equal) => rest.push(Interval { right_open: true, ..part }),
            _ => {
                rest.push(Interval { end: hole.clone(), right_open: true, ..part.clone() });
                rest.push(Interval { start: hole.clone(), left_open: true, ..part });
            }
        }
    }
    Some(rest)
}

/// Sorts intervals and joins those that overlap or touch.
fn merged(mut parts: Vec<Interval>) -> Option<Vec<Interval>> {
    if parts.len() > MAX_INTERVALS {
        return None;
    }
    let mut sorted: Vec<Interval> = Vec::new();
    while !parts.is_empty() {
        let mut first = 0;
        for at in 1..parts.len() {
            let order = order(&parts[at].start, &parts[first].start)?;
            if order.is_lt() || order.is_eq() && parts[first].left_open && !parts[at].left_open {
                first = at;
            }
        }
        let next = parts.swap_remove(first);
        let Some(last) = sorted.last_mut() else {
            sorted.push(next);
            continue;
        };
        let gap = order(&last.end, &next.start)?;
        if gap.is_lt() || gap.is_eq() && last.right_open && next.left_open {
            sorted.push(next);
            continue;
        }
        match order(&last.end, &next.end)? {
            Ordering::Less => (last.end, last.right_open) = (next.end, next.right_open),
            Ordering::Equal => last.right_open &= next.right_open,
            Ordering::Greater => {}
        }
    }
    Some(sorted)
}
