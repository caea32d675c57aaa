//! The layers that hold weights: linear maps and norms, in whatever dtype the weights are held.

use super::config::{NormKind, Shape};
use super::lora::{Adapter, Dropout};
use super::params::{Builder, Init};
use super::{plain, uses_kernels};
use crate::Result;
use std::cell::RefCell;
use std::collections::HashSet;
use std::ffi::c_void;
use tch::{Kind, Tensor};

/// A linear layer: takes any float dtype and gives `compute`, in which its product is done, whatever dtype the weight is held
/// in.
#[derive(Debug)]
pub(crate) struct Linear {
    /// What comes before `.weight` in the name of its weight.
    name: String,
    weight: Weight,
    bias: Option<Weight>,
    /// Stored as [in, out] (GPT-2) and not as [out, in].
    transposed: bool,
    compute: Kind,
    adapter: Option<Adapter>,
}

/// A tensor as it is held and, where products are done in a narrower dtype, a copy in that.
#[derive(Debug)]
struct Weight {
    held: Tensor,
    /// With the version of the held tensor that it was made from.
    copy: RefCell<Option<(i64, Tensor)>>,
}

impl Weight {
    fn new(held: Tensor) -> Self {
        Self { held, copy: RefCell::new(None) }
    }

    /// Holds the tensor in `kind` from now on, in all its handles, if that needs no more memory; says whether it changed.
    ///
    /// A tensor that learns stays as it is: small steps would be lost.
    fn hold(&mut self, kind: Kind) -> bool {
        let held = self.held.kind();
        if held == kind || held.elt_size_in_bytes() < kind.elt_size_in_bytes() || self.held.requires_grad() {
            return false;
        }
        let narrow = tch::no_grad(|| self.held.to_kind(kind));
        self.replace(&narrow);
        true
    }

    /// Puts `new`, of any dtype, in place of what all handles of the tensor hold.
    fn replace(&mut self, new: &Tensor) {
        self.held.set_data(new);
        // That changes no version.
        *self.copy.get_mut() = None;
    }

    /// The tensor in `kind`, detached from the held one if that is of another dtype.
    fn used(&self, kind: Kind) -> Tensor {
        if self.held.kind() == kind {
            return self.held.shallow_clone();
        }
        // Who holds a model in few bits wants no copy in more of them.
        if self.held.kind().elt_size_in_bytes() <= kind.elt_size_in_bytes() {
            return tch::no_grad(|| self.held.to_kind(kind));
        }
        let version = self.held.internal_version();
        let mut copy = self.copy.borrow_mut();
        match &mut *copy {
            Some((of, _)) if *of == version => {}
            // Into the memory of the last copy: an optimizer step makes one of every weight.
            Some((of, old)) => {
                tch::no_grad(|| old.copy_(&self.held));
                *of = version;
            }
            None => *copy = Some((version, tch::no_grad(|| self.held.to_kind(kind)))),
        }
        copy.as_ref().expect("it was just made").1.shallow_clone()
    }
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
    /// A head, which gets no adapter.
    pub(crate) fn new(weight: Tensor, bias: Option<Tensor>, compute: Kind) -> Self {
        let (weight, bias) = (Weight::new(weight), bias.map(Weight::new));
        Self { name: String::new(), weight, bias, transposed: false, compute, adapter: None }
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
        let (weight, bias) = (Weight::new(weight), bias.map(Weight::new));
        Ok(Self { name: base.to_string(), weight, bias, transposed, compute, adapter: None })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// In and out.
    pub(crate) fn widths(&self) -> [i64; 2] {
        let size = self.weight.held.size();
        if self.transposed { [size[0], size[1]] } else { [size[1], size[0]] }
    }

    pub(crate) fn set_adapter(&mut self, adapter: Adapter) {
        self.adapter = Some(adapter);
    }

    /// Folds the adapter, if there is one, into the weight; the sum is made in f32, and held so. Says whether the weight had
    /// fewer bits.
    pub(crate) fn merge(&mut self) -> bool {
        let Some(adapter) = self.adapter.take() else { return false };
        let sum = tch::no_grad(|| {
            let delta = adapter.delta();
            let delta = if self.transposed { delta.tr() } else { delta };
            self.weight.held.to_kind(Kind::Float) + delta
        });
        let narrow = self.weight.held.kind() != Kind::Float;
        match narrow {
            true => self.weight.replace(&sum),
            false => tch::no_grad(|| self.weight.held.copy_(&sum)),
        }
        narrow
    }

    /// Holds weight and bias in the dtype of products, where that needs no more memory, but for tensors that `kept` names by
    /// their memory; says whether a tensor changed.
    pub(crate) fn hold_as_computed(&mut self, kept: &HashSet<*mut c_void>) -> bool {
        let weights = std::iter::once(&mut self.weight).chain(&mut self.bias);
        let own = weights.filter(|weight| !kept.contains(&weight.held.data_ptr()));
        // Each of them, also behind one that changed.
        own.filter_map(|weight| weight.hold(self.compute).then_some(())).count() > 0
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Tensor {
        self.forward_dropping(x, None)
    }

    /// [`Linear::forward`] with dropout in front of the adapter.
    pub(crate) fn forward_dropping(&self, x: &Tensor, dropout: Option<&Dropout>) -> Tensor {
        // On any device: this one keeps its copy of the weight, and adds to its gradient in place.
        let out = if !plain() {
            let (weight, bias) = (self.weight.used(self.compute), self.bias.as_ref().map(|b| b.used(self.compute)));
            let bias = self.bias.as_ref().map(|b| &b.held).zip(bias.as_ref());
            tch_ext::linear(x, &self.weight.held, &weight, bias, self.transposed)
        } else {
            let weight = self.weight.held.to_kind(self.compute);
            let weight = if self.transposed { weight.tr() } else { weight };
            let bias = self.bias.as_ref().map(|bias| bias.held.to_kind(self.compute));
            x.to_kind(self.compute).linear(&weight, bias.as_ref())
        };
        match &self.adapter {
            Some(adapter) => (out + adapter.forward(x, dropout)).to_kind(self.compute),
            None => out,
        }
    }

    /// The layer's weight and the same in the dtype of products, detached, `[out, in]`; for a head.
    pub(crate) fn weight(&self) -> (&Tensor, Tensor) {
        (&self.weight.held, self.weight.used(self.compute))
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

    /// The norm of `x`, which is f32, as `kind`.
    pub(crate) fn forward(&self, x: &Tensor, kind: Kind) -> Tensor {
        if uses_kernels(kind, x.device()) {
            let center = self.kind == NormKind::Layer;
            let offset = f64::from(u8::from(self.kind == NormKind::RmsPlusOne));
            let norm = tch_ext::Norm { eps: self.eps, center, offset };
            return tch_ext::norm(norm, x, &self.weight, self.bias.as_ref(), kind);
        }
        let shape = self.weight.size();
        let weight = self.weight.to_kind(Kind::Float);
        let normed = match self.kind {
            NormKind::Layer => {
                let bias = self.bias.as_ref().map(|bias| bias.to_kind(Kind::Float));
                x.layer_norm(shape, Some(&weight), bias.as_ref(), self.eps, false)
            }
            NormKind::Rms => x.rms_norm(shape, Some(&weight), self.eps),
            NormKind::RmsPlusOne => x.rms_norm(shape, Some(&(weight + 1.0)), self.eps),
        };
        normed.to_kind(kind)
    }
}
