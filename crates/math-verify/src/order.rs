//! Results of comparisons, and the order of numbers.

use super::algebra::Algebra;
use super::numeric;
use super::ratio::Ratio;
use super::value::Expr;
use std::cmp::Ordering;

/// Smallest relative difference in floating point of numbers that are surely different.
pub(super) const DIFFERENT: f64 = 1e-9;

/// The result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Same {
    Yes,
    No,
    /// Neither could be shown.
    Unknown,
}

impl Same {
    pub(super) fn of(holds: bool) -> Self {
        if holds { Same::Yes } else { Same::No }
    }

    /// Yes if both are, no if one of them is no.
    pub(super) fn and(self, other: impl FnOnce() -> Self) -> Self {
        match self {
            Same::No => Same::No,
            Same::Yes => other(),
            Same::Unknown => {
                if other() == Same::No {
                    Same::No
                } else {
                    Same::Unknown
                }
            }
        }
    }

    /// Yes if one of them is, no if both are no.
    pub(super) fn or(self, other: impl FnOnce() -> Self) -> Self {
        match self {
            Same::Yes => Same::Yes,
            Same::No => other(),
            Same::Unknown => {
                if other() == Same::Yes {
                    Same::Yes
                } else {
                    Same::Unknown
                }
            }
        }
    }
}

/// Returns the order of two numbers; `None` if they have variables or are too close to tell.
pub(super) fn order(left: &Expr, right: &Expr) -> Option<Ordering> {
    if left == right && left.is_constant() {
        return Some(Ordering::Equal);
    }
    if let (Some(a), Some(b)) = (exact(left), exact(right)) {
        return a.compare(b);
    }
    let (a, b) = (numeric::constant(left), numeric::constant(right));
    if a.is_infinite() || b.is_infinite() || (a - b).abs() > DIFFERENT * a.abs().max(b.abs()) {
        return a.partial_cmp(&b);
    }
    None
}

/// Returns the value of an expression that is a rational number.
pub(super) fn exact(e: &Expr) -> Option<Ratio> {
    Algebra::default().form(e)?.as_constant()
}
