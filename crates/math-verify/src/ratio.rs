//! Exact rational numbers of bounded size.

use std::cmp::Ordering;
use std::fmt;

/// A rational number in lowest terms with a positive denominator. Operations return `None` if the result does not fit in 128 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Ratio {
    numerator: i128,
    denominator: i128,
}

/// Returns the greatest common divisor of two numbers that are not both 0.
fn gcd(a: u128, b: u128) -> u128 {
    let (mut a, mut b) = (a, b);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

impl Ratio {
    pub(super) const ZERO: Self = Self { numerator: 0, denominator: 1 };
    pub(super) const ONE: Self = Self { numerator: 1, denominator: 1 };

    pub(super) fn integer(number: i64) -> Self {
        Self { numerator: number.into(), denominator: 1 }
    }

    /// Returns `numerator / denominator`; `None` for a denominator of 0.
    pub(super) fn new(numerator: i128, denominator: i128) -> Option<Self> {
        if denominator == 0 {
            return None;
        }
        let divisor = i128::try_from(gcd(numerator.unsigned_abs(), denominator.unsigned_abs())).ok()?;
        let (numerator, denominator) = (numerator / divisor, denominator / divisor);
        let sign = denominator.signum();
        Some(Self { numerator: numerator.checked_mul(sign)?, denominator: denominator.checked_mul(sign)? })
    }

    /// Parses digits with an optional decimal point.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
        let digits = format!("{whole}{fraction}");
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        let scale = 10i128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
        Self::new(digits.parse().ok()?, scale)
    }

    pub(super) fn numerator(self) -> i128 {
        self.numerator
    }

    pub(super) fn denominator(self) -> i128 {
        self.denominator
    }

    /// Returns the number if it is an integer.
    pub(super) fn as_integer(self) -> Option<i128> {
        (self.denominator == 1).then_some(self.numerator)
    }

    pub(super) fn is_zero(self) -> bool {
        self.numerator == 0
    }

    pub(super) fn is_negative(self) -> bool {
        self.numerator < 0
    }

    pub(super) fn add(self, other: Self) -> Option<Self> {
        let left = self.numerator.checked_mul(other.denominator)?;
        let right = other.numerator.checked_mul(self.denominator)?;
        Self::new(left.checked_add(right)?, self.denominator.checked_mul(other.denominator)?)
    }

    pub(super) fn mul(self, other: Self) -> Option<Self> {
        // Reducing first keeps products of large numbers in range.
        let left = Self::new(self.numerator, other.denominator)?;
        let right = Self::new(other.numerator, self.denominator)?;
        Self::new(left.numerator.checked_mul(right.numerator)?, left.denominator.checked_mul(right.denominator)?)
    }

    pub(super) fn neg(self) -> Option<Self> {
        Some(Self { numerator: self.numerator.checked_neg()?, ..self })
    }

    /// Returns the reciprocal; `None` for 0.
    pub(super) fn inverse(self) -> Option<Self> {
        Self::new(self.denominator, self.numerator)
    }

    pub(super) fn pow(self, exponent: i128) -> Option<Self> {
        let base = if exponent < 0 { self.inverse()? } else { self };
        if base == Self::ONE || base == Self::ZERO {
            return Some(if exponent == 0 { Self::ONE } else { base });
        }
        let exponent = u32::try_from(exponent.unsigned_abs()).ok()?;
        let (numerator, denominator) = (base.numerator.checked_pow(exponent)?, base.denominator.checked_pow(exponent)?);
        Some(Self { numerator, denominator })
    }

    /// Returns the largest integer that is not larger.
    pub(super) fn floor(self) -> i128 {
        self.numerator.div_euclid(self.denominator)
    }

    /// Compares the numbers; `None` if the products do not fit.
    pub(super) fn compare(self, other: Self) -> Option<Ordering> {
        let left = self.numerator.checked_mul(other.denominator)?;
        Some(left.cmp(&other.numerator.checked_mul(self.denominator)?))
    }

    /// Rounds half up to `digits` decimals, as an integer number of units of the last decimal.
    pub(super) fn rounded(self, digits: u32) -> Option<i128> {
        let scaled = self.numerator.checked_mul(10i128.checked_pow(digits)?)?;
        let doubled = scaled.checked_mul(2)?.checked_add(self.denominator)?;
        Some(doubled.div_euclid(self.denominator.checked_mul(2)?))
    }

    pub(super) fn to_f64(self) -> f64 {
        self.numerator as f64 / self.denominator as f64
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.denominator {
            1 => write!(f, "{}", self.numerator),
            denominator => write!(f, "{}/{denominator}", self.numerator),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_that_do_not_fit_are_none() {
        let large = Ratio::new(i128::MAX, 1).unwrap();
        assert_eq!(large.add(Ratio::ONE), None);
        assert_eq!(large.mul(large), None);
        assert_eq!(Ratio::integer(10).pow(39), None);
        assert_eq!(Ratio::new(1, 0), None);
        assert_eq!(Ratio::new(i128::MIN, -1), None);
        assert_eq!(Ratio::new(i128::MIN, i128::MIN), None);
        assert_eq!(Ratio::integer(2).pow(i128::MAX), None);
        assert_eq!(Ratio::ZERO.inverse(), None);
    }

    #[test]
    fn decimals_are_exact_and_rounded_half_up() {
        let parse = |text| Ratio::parse(text).unwrap();
        assert_eq!(parse("0.5"), Ratio::new(1, 2).unwrap());
        assert_eq!(parse(".25"), Ratio::new(1, 4).unwrap());
        assert_eq!(parse("1.2345675").rounded(6), Some(1_234_568));
        assert_eq!(Ratio::new(-1, 3).unwrap().rounded(6), Some(-333_333));
        assert_eq!(Ratio::new(-7, 2).unwrap().floor(), -4);
        assert_eq!(Ratio::parse("1.2.3"), None);
    }
}
