//! Values of expressions in floating point.

use super::value::Expr;
use std::f64::consts::{E, PI};

/// Euler's constant.
const EULER_GAMMA: f64 = 0.577_215_664_901_532_9;

/// Returns the value of an expression where the variable `name` has the value `variable(name)`; NaN where it has no real value.
pub(super) fn value(e: &Expr, variable: &impl Fn(&str) -> f64) -> f64 {
    let eval = |e: &Expr| value(e, variable);
    match e {
        Expr::Number { value, .. } => value.to_f64(),
        Expr::Percent(inner) => eval(inner) / 100.0,
        Expr::Symbol { name, complex: false } => variable(name),
        Expr::Symbol { .. } | Expr::ImaginaryUnit | Expr::Undefined => f64::NAN,
        Expr::Pi => PI,
        Expr::Euler => E,
        Expr::EulerGamma => EULER_GAMMA,
        Expr::Infinity => f64::INFINITY,
        Expr::Sum(terms) => terms.iter().map(eval).sum(),
        Expr::Product(factors) => factors.iter().map(eval).product(),
        Expr::Power(base, exponent) => {
            let (base, exponent) = (eval(base), eval(exponent));
            if base == 0.0 && exponent <= 0.0 { f64::NAN } else { base.powf(exponent) }
        }
        Expr::Function(name, arguments) => match arguments.as_slice() {
            [argument] => function(name, eval(argument)),
            [argument, base] if name == "log" => eval(argument).ln() / eval(base).ln(),
            _ => f64::NAN,
        },
    }
}

fn function(name: &str, x: f64) -> f64 {
    match name {
        "abs" => x.abs(),
        "floor" => x.floor(),
        "ceil" => x.ceil(),
        "!" if (0.0..=170.0).contains(&x) && x.fract() == 0.0 => (1..=x as u32).map(f64::from).product(),
        "sin" => x.sin(),
        "cos" => x.cos(),
        "tan" => x.tan(),
        "csc" => 1.0 / x.sin(),
        "sec" => 1.0 / x.cos(),
        "cot" => 1.0 / x.tan(),
        "asin" => x.asin(),
        "acos" => x.acos(),
        "atan" => x.atan(),
        "sinh" => x.sinh(),
        "cosh" => x.cosh(),
        "tanh" => x.tanh(),
        "asinh" => x.asinh(),
        "acosh" => x.acosh(),
        "atanh" => x.atanh(),
        _ => f64::NAN,
    }
}

/// Returns the value of an expression without variables; NaN if it has none.
pub(super) fn constant(e: &Expr) -> f64 {
    value(e, &|_| f64::NAN)
}
