//! Normal forms of expressions: quotients of polynomials with rational coefficients over atoms. Atoms are variables, constants,
//! roots and functions. Expressions with equal forms are equal; unequal forms of expressions without roots and functions are
//! unequal.

use super::ratio::Ratio;
use super::value::Expr;
use std::collections::BTreeMap;

/// Maximum number of terms of a polynomial.
const MAX_TERMS: usize = 200;
/// Maximum absolute value of an exponent.
const MAX_EXPONENT: i128 = 40;
/// Maximum number of products of terms for one comparison.
const MAX_PRODUCTS: usize = 100_000;
/// Largest prime factor that is looked for under a root or a logarithm.
const MAX_PRIME: i128 = 10_000;

/// Powers of atoms, by the number of the atom.
type Monomial = BTreeMap<usize, u32>;

/// A polynomial: coefficients by monomial, none of them 0.
type Polynomial = BTreeMap<Monomial, Ratio>;

/// A quotient of polynomials; the divisor is not 0.
#[derive(Debug, Clone)]
pub(super) struct Form {
    numerator: Polynomial,
    divisor: Polynomial,
}

/// An indivisible part of an expression.
#[derive(Debug, Clone)]
enum Atom {
    Symbol(String, bool),
    Pi,
    Euler,
    EulerGamma,
    /// The square root of -1.
    Imaginary,
    /// The n-th root of a form.
    Root(Form, u32),
    Function(String, Vec<Form>),
}

/// Atoms of the expressions that are compared. Operations return `None` beyond the limits, and for a division by 0.
#[derive(Debug, Default)]
pub(super) struct Algebra {
    atoms: Vec<Atom>,
    products: usize,
}

fn constant(value: Ratio) -> Polynomial {
    if value.is_zero() { Polynomial::new() } else { Polynomial::from([(Monomial::new(), value)]) }
}

/// Returns the value of a polynomial without atoms.
fn as_constant(polynomial: &Polynomial) -> Option<Ratio> {
    match polynomial.len() {
        0 => Some(Ratio::ZERO),
        1 => polynomial.get(&Monomial::new()).copied(),
        _ => None,
    }
}

fn add(left: &Polynomial, right: &Polynomial) -> Option<Polynomial> {
    let mut sum = left.clone();
    for (monomial, value) in right {
        add_term(&mut sum, monomial.clone(), *value)?;
    }
    (sum.len() <= MAX_TERMS).then_some(sum)
}

fn add_term(sum: &mut Polynomial, monomial: Monomial, value: Ratio) -> Option<()> {
    let total = sum.get(&monomial).map_or(Some(value), |known| known.add(value))?;
    if total.is_zero() {
        sum.remove(&monomial)
    } else {
        sum.insert(monomial, total)
    };
    Some(())
}

impl Form {
    fn constant(value: Ratio) -> Self {
        Self { numerator: constant(value), divisor: constant(Ratio::ONE) }
    }

    /// Returns the value of a form without atoms.
    pub(super) fn as_constant(&self) -> Option<Ratio> {
        as_constant(&self.numerator)?.mul(as_constant(&self.divisor)?.inverse()?)
    }

    pub(super) fn is_zero(&self) -> bool {
        self.numerator.is_empty()
    }
}

impl Algebra {
    /// Returns true if all atoms so far are variables: then unequal forms are unequal expressions.
    pub(super) fn is_rational(&self) -> bool {
        self.atoms.iter().all(|atom| matches!(atom, Atom::Symbol(..)))
    }

    /// Returns the number of different atoms so far.
    pub(super) fn atoms(&self) -> usize {
        self.atoms.len()
    }

    /// Returns the number of an atom, which is added if it is new.
    fn intern(&mut self, atom: Atom) -> Option<usize> {
        for at in 0..self.atoms.len() {
            let known = self.atoms[at].clone();
            let same = match (&known, &atom) {
                (Atom::Symbol(a, x), Atom::Symbol(b, y)) => a == b && x == y,
                (Atom::Pi, Atom::Pi)
                | (Atom::Euler, Atom::Euler)
                | (Atom::EulerGamma, Atom::EulerGamma)
                | (Atom::Imaginary, Atom::Imaginary) => true,
                (Atom::Root(a, n), Atom::Root(b, m)) => n == m && self.equal(a, b)?,
                (Atom::Function(f, a), Atom::Function(g, b)) if f == g && a.len() == b.len() => {
                    a.iter().zip(b).try_fold(true, |same, (a, b)| Some(same && self.equal(a, b)?))?
                }
                _ => false,
            };
            if same {
                return Some(at);
            }
        }
        self.atoms.push(atom);
        (self.atoms.len() <= 64).then_some(self.atoms.len() - 1)
    }

    fn atom(&mut self, atom: Atom) -> Option<Form> {
        let at = self.intern(atom)?;
        let numerator = Polynomial::from([(Monomial::from([(at, 1)]), Ratio::ONE)]);
        Some(Form { numerator, divisor: constant(Ratio::ONE) })
    }

    /// Returns true if the forms are equal.
    pub(super) fn equal(&mut self, left: &Form, right: &Form) -> Option<bool> {
        Some(self.minus(left, right)?.is_zero())
    }

    fn multiply(&mut self, left: &Polynomial, right: &Polynomial) -> Option<Polynomial> {
        self.products += left.len() * right.len();
        if self.products > MAX_PRODUCTS {
            return None;
        }
        let mut product = Polynomial::new();
        for (a, x) in left {
            for (b, y) in right {
                let mut monomial = a.clone();
                b.iter().for_each(|(atom, power)| *monomial.entry(*atom).or_insert(0) += power);
                let value = self.reduce(&mut monomial, x.mul(*y)?)?;
                add_term(&mut product, monomial, value)?;
            }
        }
        (product.len() <= MAX_TERMS).then_some(product)
    }

    /// Replaces powers of roots of numbers by numbers; returns the new coefficient.
    fn reduce(&self, monomial: &mut Monomial, mut value: Ratio) -> Option<Ratio> {
        for (&at, power) in monomial.iter_mut() {
            let (base, root) = match &self.atoms[at] {
                Atom::Imaginary => (Ratio::integer(-1), 2),
                Atom::Root(base, root) => match base.as_constant() {
                    Some(base) => (base, *root),
                    None => continue,
                },
                _ => continue,
            };
            value = value.mul(base.pow((*power / root).into())?)?;
            *power %= root;
        }
        monomial.retain(|_, power| *power > 0);
        Some(value)
    }

    fn plus(&mut self, left: &Form, right: &Form) -> Option<Form> {
        if left.divisor == right.divisor {
            return Some(Form { numerator: add(&left.numerator, &right.numerator)?, divisor: left.divisor.clone() });
        }
        let one = self.multiply(&left.numerator, &right.divisor)?;
        let other = self.multiply(&right.numerator, &left.divisor)?;
        let form = Form { numerator: add(&one, &other)?, divisor: self.multiply(&left.divisor, &right.divisor)? };
        self.checked(form)
    }

    fn minus(&mut self, left: &Form, right: &Form) -> Option<Form> {
        let minus = self.times(&Form::constant(Ratio::integer(-1)), right)?;
        self.plus(left, &minus)
    }

    fn times(&mut self, left: &Form, right: &Form) -> Option<Form> {
        let numerator = self.multiply(&left.numerator, &right.numerator)?;
        let divisor = self.multiply(&left.divisor, &right.divisor)?;
        self.checked(Form { numerator, divisor })
    }

    /// Divides both polynomials by a constant divisor, so that equal numbers have one form; `None` for a divisor of 0.
    fn checked(&self, form: Form) -> Option<Form> {
        if form.divisor.is_empty() {
            return None;
        }
        let Some(divisor) = as_constant(&form.divisor) else { return Some(form) };
        let factor = divisor.inverse()?;
        let scaled = form.numerator.into_iter().map(|(monomial, value)| Some((monomial, value.mul(factor)?)));
        Some(Form { numerator: scaled.collect::<Option<_>>()?, divisor: constant(Ratio::ONE) })
    }

    fn inverse(&self, form: Form) -> Option<Form> {
        self.checked(Form { numerator: form.divisor, divisor: form.numerator })
    }

    fn power(&mut self, base: &Form, exponent: i128) -> Option<Form> {
        if exponent.abs() > MAX_EXPONENT {
            let value = base.as_constant()?.pow(exponent)?;
            return Some(Form::constant(value));
        }
        let base = if exponent < 0 { self.inverse(base.clone())? } else { base.clone() };
        let mut power = Form::constant(Ratio::ONE);
        for _ in 0..exponent.abs() {
            power = self.times(&power, &base)?;
        }
        Some(power)
    }

    /// Returns the form of an expression; `None` if it has none within the limits.
    pub(super) fn form(&mut self, e: &Expr) -> Option<Form> {
        match e {
            Expr::Number { value, .. } => Some(Form::constant(*value)),
            Expr::Percent(inner) => {
                let inner = self.form(inner)?;
                self.times(&inner, &Form::constant(Ratio::new(1, 100)?))
            }
            Expr::Symbol { name, complex } => self.atom(Atom::Symbol(name.clone(), *complex)),
            Expr::Pi => self.atom(Atom::Pi),
            Expr::Euler => self.atom(Atom::Euler),
            Expr::EulerGamma => self.atom(Atom::EulerGamma),
            Expr::ImaginaryUnit => self.atom(Atom::Imaginary),
            Expr::Sum(terms) => terms.iter().try_fold(Form::constant(Ratio::ZERO), |sum, term| {
                let term = self.form(term)?;
                self.plus(&sum, &term)
            }),
            Expr::Product(factors) => factors.iter().try_fold(Form::constant(Ratio::ONE), |product, factor| {
                let factor = self.form(factor)?;
                self.times(&product, &factor)
            }),
            Expr::Power(base, exponent) => self.power_form(base, exponent),
            Expr::Function(name, arguments) => self.function_form(name, arguments),
            Expr::Infinity | Expr::Undefined => None,
        }
    }

    fn power_form(&mut self, base: &Expr, exponent: &Expr) -> Option<Form> {
        let power = self.form(exponent)?;
        let Some(value) = power.as_constant() else {
            let base = self.form(base)?;
            return self.atom(Atom::Function("power".into(), vec![base, power]));
        };
        let base = self.form(base)?;
        if base.is_zero() && (value.is_zero() || value.is_negative()) {
            return None;
        }
        if let Some(exponent) = value.as_integer() {
            return self.power(&base, exponent);
        }
        let degree = u32::try_from(value.denominator()).ok().filter(|&degree| i128::from(degree) <= MAX_EXPONENT)?;
        let root = self.root(&base, degree)?;
        self.power(&root, value.numerator())
    }

    /// Returns the `degree`-th root. Of a number, square factors and the like are taken out of the root: the root of 12 is 2 times
    /// the root of 3.
    fn root(&mut self, base: &Form, degree: u32) -> Option<Form> {
        let Some(value) = base.as_constant() else { return self.atom(Atom::Root(base.clone(), degree)) };
        let mut root = Form::constant(Ratio::ONE);
        if value.is_zero() {
            return Some(base.clone());
        }
        if value.is_negative() {
            if degree != 2 {
                return None;
            }
            root = self.atom(Atom::Imaginary)?;
        }
        // The root of a / b is the root of a * b^(degree - 1), over b.
        let divisor = value.denominator();
        let scaled = value.numerator().checked_abs()?.checked_mul(divisor.checked_pow(degree - 1)?)?;
        for (prime, count) in factors(scaled) {
            let whole = Ratio::new(prime, 1)?.pow(i128::from(count / degree))?;
            root = self.times(&root, &Form::constant(whole))?;
            // Reduced, so that the fourth root of 4 is the square root of 2.
            let rest = Ratio::new(i128::from(count % degree), i128::from(degree))?;
            if !rest.is_zero() {
                let degree = u32::try_from(rest.denominator()).ok()?;
                let atom = self.atom(Atom::Root(Form::constant(Ratio::new(prime, 1)?), degree))?;
                let power = self.power(&atom, rest.numerator())?;
                root = self.times(&root, &power)?;
            }
        }
        self.times(&root, &Form::constant(Ratio::new(1, divisor)?))
    }

    fn function_form(&mut self, name: &str, arguments: &[Expr]) -> Option<Form> {
        let forms: Vec<Form> = arguments.iter().map(|argument| self.form(argument)).collect::<Option<_>>()?;
        let value = match forms.as_slice() {
            [form] => form.as_constant(),
            _ => None,
        };
        let number = value.and_then(|value| match name {
            "abs" => Ratio::new(value.numerator().checked_abs()?, value.denominator()),
            "floor" => Ratio::new(value.floor(), 1),
            "ceil" => Ratio::new(value.neg()?.floor().checked_neg()?, 1),
            "!" => (1..=value.as_integer().filter(|n| (0..=33).contains(n))?)
                .try_fold(1i128, i128::checked_mul)
                .and_then(|product| Ratio::new(product, 1)),
            _ => None,
        });
        if let Some(number) = number {
            return Some(Form::constant(number));
        }
        if let ("log", [argument, base]) = (name, forms.as_slice()) {
            let numerator = self.logarithm(argument)?;
            let divisor = self.logarithm(base)?;
            let inverse = self.inverse(divisor)?;
            return self.times(&numerator, &inverse);
        }
        self.atom(Atom::Function(name.to_string(), forms))
    }

    /// Returns the natural logarithm; of a number, the sum of its prime factors' logarithms.
    fn logarithm(&mut self, form: &Form) -> Option<Form> {
        let euler = self.atoms.iter().position(|atom| matches!(atom, Atom::Euler));
        if let (Some(euler), Some(_)) = (euler, as_constant(&form.divisor))
            && let Some((monomial, value)) = form.numerator.first_key_value()
            && form.numerator.len() == 1
            && *value == Ratio::ONE
            && monomial.keys().eq([&euler])
        {
            return Some(Form::constant(Ratio::integer(monomial[&euler].into())));
        }
        let Some(value) = form.as_constant() else {
            return self.atom(Atom::Function("ln".into(), vec![form.clone()]));
        };
        if value.numerator() <= 0 {
            return None;
        }
        let mut sum = Form::constant(Ratio::ZERO);
        for (number, sign) in [(value.numerator(), 1), (value.denominator(), -1)] {
            for (prime, count) in factors(number) {
                let prime = Form::constant(Ratio::new(prime, 1)?);
                let atom = self.atom(Atom::Function("ln".into(), vec![prime]))?;
                let term = self.times(&atom, &Form::constant(Ratio::integer(i64::from(count) * sign)))?;
                sum = self.plus(&sum, &term)?;
            }
        }
        Some(sum)
    }

    /// Returns the constant `c` of `left = c * right`, if there is one.
    pub(super) fn ratio(&mut self, left: &Form, right: &Form) -> Option<Ratio> {
        let (one, other) =
            (self.multiply(&left.numerator, &right.divisor)?, self.multiply(&right.numerator, &left.divisor)?);
        let ((first, x), (second, y)) = (one.first_key_value()?, other.first_key_value()?);
        let ratio = (first == second).then(|| x.mul(y.inverse()?)).flatten()?;
        let scaled = self.multiply(&other, &constant(ratio))?;
        (scaled == one).then_some(ratio)
    }
}

/// Returns the factors of a positive number with their counts: primes, and a rest without small factors.
fn factors(mut number: i128) -> Vec<(i128, u32)> {
    let mut factors = Vec::new();
    for prime in 2..=MAX_PRIME {
        if prime * prime > number {
            break;
        }
        let mut count = 0;
        while number % prime == 0 {
            number /= prime;
            count += 1;
        }
        if count > 0 {
            factors.push((prime, count));
        }
    }
    if number > 1 {
        factors.push((number, 1));
    }
    factors
}
