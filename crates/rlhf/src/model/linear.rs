//! The layers that hold weights: linear maps and norms, in whatever dtype the weights are held.

use super::config::{NormKind, Shape};
use super::params::{Builder, Init};
use crate::Result;
use tch::{Kind, Tensor};

/// A linear layer: takes and gives f32; its product is done in `compute`, whatever dtype the weight is held in.
#[derive(Debug)]
pub(crate) struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    /// Stored as [in, out] (GPT-2) and not as [out, in].
    transposed: bool,
    compute: Kind,
}

/// What a linear layer looks like.
#[derive(Clone, Copy)]
pub(crate) struct LinearShape {
    pub(crate) width_in: i64,
    pub(crate) width_out: i64,
    pub(crate) bias: bool,
    pub(crate) transposed: bool,
    /// Standard deviation of a fresh weight.
    pub(crate) std: f64,
}

impl Linear {
    pub(crate) fn new(weight: Tensor, bias: Option<Tensor>, compute: Kind) -> Self {
        Self { weight, bias, transposed: false, compute }
    }

    /// The layer whose tensors are `{base}.weight` and `{base}.bias`.
    pub(crate) fn build(b: &mut Builder<'_>, base: &str, shape: LinearShape, compute: Kind) -> Result<Self> {
        let LinearShape { width_in, width_out, transposed, .. } = shape;
        let stored = if transposed { [width_in, width_out] } else { [width_out, width_in] };
        let weight = b.tensor(format!("{base}.weight"), &stored, Init::Normal(shape.std), true)?;
        let bias = match shape.bias {
            true => Some(b.tensor(format!("{base}.bias"), &[width_out], Init::Zeros, false)?),
            false => None,
        };
        Ok(Self { weight, bias, transposed, compute })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Tensor {
        let weight = self.weight.to_kind(self.compute);
        let weight = if self.transposed { weight.tr() } else { weight };
        let bias = self.bias.as_ref().map(|bias| bias.to_kind(self.compute));
        x.to_kind(self.compute).linear(&weight, bias.as_ref()).to_kind(Kind::Float)
    }
}

/// A norm over the last dimension; always in f32.
#[derive(Debug)]
pub(crate) struct Norm {
    kind: NormKind,
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f64,
}

impl Norm {
    /// The norm whose tensors are `{base}.weight` and, for a layer norm, `{base}.bias`.
    pub(crate) fn build(b: &mut Builder<'_>, base: &str, width: i64, shape: &Shape) -> Result<Self> {
        let kind = shape.norm;
        let init = if kind == NormKind::RmsPlusOne { Init::Zeros } else { Init::Ones };
        let weight = b.tensor(format!("{base}.weight"), &[width], init, false)?;
        let bias = match kind {
            NormKind::Layer => Some(b.tensor(format!("{base}.bias"), &[width], Init::Zeros, false)?),
            NormKind::Rms | NormKind::RmsPlusOne => None,
        };
        Ok(Self { kind, weight, bias, eps: shape.norm_eps })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Tensor {
        let shape = self.weight.size();
        let weight = self.weight.to_kind(Kind::Float);
        match self.kind {
            NormKind::Layer => {
                let bias = self.bias.as_ref().map(|bias| bias.to_kind(Kind::Float));
                x.layer_norm(shape, Some(&weight), bias.as_ref(), self.eps, false)
            }
            NormKind::Rms => x.rms_norm(shape, Some(&weight), self.eps),
            NormKind::RmsPlusOne => x.rms_norm(shape, Some(&(weight + 1.0)), self.eps),
        }
    }
}
