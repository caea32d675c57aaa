//! Layers with weights: linear layers and norms, with weights held in any float dtype.

use super::lora::{Adapter, Dropout, Magnitude};
use super::params::{Builder, Init};
use super::quantized::{Quantization, Quantized};
use super::shape::{NormKind, Shape};
use super::{plain, uses_kernels};
use rlhf_base::Result;
use std::cell::RefCell;
use std::collections::HashSet;
use std::ffi::c_void;
use tch::{Kind, Tensor};

/// A linear layer. Takes input of any float dtype; computes and returns its product in the dtype `compute`, whatever the dtype of
/// its weight.
#[derive(Debug)]
pub struct Linear {
    /// The name of its weight without `.weight`.
    name: String,
    weight: Matrix,
    bias: Option<Weight>,
    /// Whether the weight is stored as `[in, out]` (GPT-2) instead of `[out, in]`.
    transposed: bool,
    compute: Kind,
    adapter: Option<Box<Adapter>>,
}

/// The weight of a linear layer.
#[derive(Debug)]
enum Matrix {
    Plain(Weight),
    /// Frozen, always `[out, in]`.
    Quantized(Quantized),
}

impl Matrix {
    /// The weight of a layer that is never quantized: a head.
    fn plain(&self) -> &Weight {
        match self {
            Self::Plain(weight) => weight,
            Self::Quantized(_) => unreachable!("heads are not quantized"),
        }
    }

    /// The values in `kind`, the dtype of products.
    fn used(&self, kind: Kind) -> Tensor {
        match self {
            Self::Plain(weight) => weight.used(kind),
            Self::Quantized(weight) => weight.values(kind),
        }
    }

    /// A number that changes with the values.
    fn version(&self) -> i64 {
        match self {
            Self::Plain(weight) => weight.tensor.internal_version(),
            Self::Quantized(weight) => weight.version(),
        }
    }

    /// The stored values, in f32.
    fn stored_values(&self) -> Tensor {
        match self {
            Self::Plain(weight) => weight.tensor.to_kind(Kind::Float),
            Self::Quantized(weight) => weight.merged_values(),
        }
    }

    /// Replaces the values by `values`, f32, and stores them in f32, or quantized again. Returns whether they had lower precision.
    fn replace(&mut self, values: &Tensor) -> bool {
        match self {
            Self::Quantized(weight) => {
                let again = weight.like(values);
                weight.replace(again);
                false
            }
            Self::Plain(weight) if weight.tensor.kind() != Kind::Float => {
                weight.replace(values);
                true
            }
            Self::Plain(weight) => {
                tch::no_grad(|| weight.tensor.copy_(values));
                false
            }
        }
    }
}

/// A weight and, if products are computed in a narrower dtype, a copy in that dtype.
#[derive(Debug)]
pub(super) struct Weight {
    pub(super) tensor: Tensor,
    /// The copy, with the version of the tensor that it was made from.
    copy: RefCell<Option<(i64, Tensor)>>,
}

impl Weight {
    pub(super) fn new(tensor: Tensor) -> Self {
        Self { tensor, copy: RefCell::new(None) }
    }

    /// Converts the tensor to `kind`, in all its handles, if that takes no more memory; returns whether it changed.
    ///
    /// A trainable tensor stays as it is: small optimizer steps would be lost.
    pub(super) fn hold(&mut self, kind: Kind) -> bool {
        let current = self.tensor.kind();
        if current == kind || current.elt_size_in_bytes() < kind.elt_size_in_bytes() || self.tensor.requires_grad() {
            return false;
        }
        let narrow = tch::no_grad(|| self.tensor.to_kind(kind));
        self.replace(&narrow);
        true
    }

    /// Whether products in `kind` use a copy that stays: a low-precision model gets no permanent copy of higher precision.
    pub(super) fn is_copied(&self, kind: Kind) -> bool {
        self.tensor.kind().elt_size_in_bytes() > kind.elt_size_in_bytes()
    }

    /// Whether there is a copy now.
    pub(super) fn has_copy(&self) -> bool {
        self.copy.borrow().is_some()
    }

    /// Makes the copy in `memory`, a tensor of this shape in the dtype of products.
    pub(super) fn copy_to(&self, mut memory: Tensor) {
        tch::no_grad(|| memory.copy_(&self.tensor));
        *self.copy.borrow_mut() = Some((self.tensor.internal_version(), memory));
    }

    /// Frees the copy; the next use makes it again.
    pub(super) fn drop_copy(&self) {
        drop(self.copy.take());
    }

    /// Replaces the data of the tensor, in all its handles, by `new`, of any dtype.
    fn replace(&mut self, new: &Tensor) {
        self.tensor.set_data(new);
        // `set_data` does not change the version.
        *self.copy.get_mut() = None;
    }

    /// The tensor in `kind`; detached if the stored tensor has another dtype.
    pub(super) fn used(&self, kind: Kind) -> Tensor {
        if self.tensor.kind() == kind {
            return self.tensor.shallow_clone();
        }
        if !self.is_copied(kind) {
            return tch::no_grad(|| self.tensor.to_kind(kind));
        }
        let version = self.tensor.internal_version();
        let mut copy = self.copy.borrow_mut();
        match &mut *copy {
            Some((copied, _)) if *copied == version => {}
            // Reuses the memory of the last copy, as every optimizer step renews the copies of all weights.
            Some((copied, old)) => {
                tch::no_grad(|| old.copy_(&self.tensor));
                *copied = version;
            }
            None => *copy = Some((version, tch::no_grad(|| self.tensor.to_kind(kind)))),
        }
        copy.as_ref().expect("it was just made").1.shallow_clone()
    }
}

/// Shape and initialization of a linear layer.
#[derive(Clone, Copy)]
pub struct LinearShape {
    pub width_in: i64,
    pub width_out: i64,
    pub bias: bool,
    pub transposed: bool,
    /// Standard deviation of a newly initialized weight.
    pub std: f64,
}

impl Linear {
    /// Creates a head, which gets no adapter.
    pub fn new(weight: Tensor, bias: Option<Tensor>, compute: Kind) -> Self {
        let (weight, bias) = (Matrix::Plain(Weight::new(weight)), bias.map(Weight::new));
        Self { name: String::new(), weight, bias, transposed: false, compute, adapter: None }
    }

    /// Builds the layer whose tensors are `{base}.weight` and `{base}.bias`.
    pub fn build(b: &mut Builder<'_>, base: &str, shape: LinearShape, compute: Kind) -> Result<Self> {
        let LinearShape { width_in, width_out, mut transposed, .. } = shape;
        let weight = match b.quantized(base, [width_out, width_in], transposed, Init::Normal(shape.std))? {
            Some(weight) => {
                transposed = false;
                Matrix::Quantized(weight)
            }
            None => {
                let stored = if transposed { [width_in, width_out] } else { [width_out, width_in] };
                Matrix::Plain(Weight::new(b.tensor(
                    format!("{base}.weight"),
                    &stored,
                    Init::Normal(shape.std),
                    true,
                )?))
            }
        };
        let bias =
            if shape.bias { Some(b.tensor(format!("{base}.bias"), &[width_out], Init::Zeros, false)?) } else { None };
        Ok(Self { name: base.to_string(), weight, bias: bias.map(Weight::new), transposed, compute, adapter: None })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The weight of a head in the dtype that it is stored in.
    pub fn stored_weight(&self) -> &Tensor {
        &self.weight.plain().tensor
    }

    /// The dtype of products.
    pub(super) fn compute(&self) -> Kind {
        self.compute
    }

    /// Weight and bias of a layer whose result is the product with a weight `[out, in]` alone: neither codes nor an adapter.
    pub(super) fn plain_product(&self) -> Option<(&Weight, Option<&Weight>)> {
        match &self.weight {
            Matrix::Plain(weight) if self.adapter.is_none() && !self.transposed => Some((weight, self.bias.as_ref())),
            Matrix::Plain(_) | Matrix::Quantized(_) => None,
        }
    }

    /// The format of a quantized weight.
    pub fn quantization(&self) -> Option<Quantization> {
        match &self.weight {
            Matrix::Plain(_) => None,
            Matrix::Quantized(weight) => Some(weight.format()),
        }
    }

    /// Whether a recorded decoding step of `rows` rows can have the layer.
    pub(super) fn is_recordable(&self, rows: i64) -> bool {
        match &self.weight {
            Matrix::Plain(_) => true,
            Matrix::Quantized(weight) => weight.is_recordable(rows, self.compute),
        }
    }

    /// The weight in f32 as `[out, in]`, detached.
    pub(super) fn rows(&self) -> Tensor {
        let weight = tch::no_grad(|| self.weight.stored_values()).detach();
        if self.transposed { weight.tr() } else { weight }
    }

    /// Input and output width.
    pub fn widths(&self) -> [i64; 2] {
        match &self.weight {
            Matrix::Quantized(weight) => {
                let [width_out, width_in] = weight.widths();
                [width_in, width_out]
            }
            Matrix::Plain(weight) => {
                let size = weight.tensor.size();
                if self.transposed { [size[0], size[1]] } else { [size[1], size[0]] }
            }
        }
    }

    pub fn set_adapter(&mut self, adapter: Adapter) {
        self.adapter = Some(Box::new(adapter));
    }

    /// The magnitudes with which `adapter` changes nothing: the norms of the rows of the adapted weight.
    pub(super) fn magnitude(&self, adapter: &Adapter) -> Magnitude {
        Magnitude::new(tch::no_grad(|| self.norms(&self.adapted(&self.used(), adapter)).view([-1])))
    }

    /// The weight that products use, in f32.
    fn used(&self) -> Tensor {
        self.weight.used(self.compute).to_kind(Kind::Float)
    }

    /// W + `scale * B A` in the layout of the weight, for W in f32.
    fn adapted(&self, weight: &Tensor, adapter: &Adapter) -> Tensor {
        let delta = adapter.delta();
        weight + if self.transposed { delta.tr() } else { delta }
    }

    /// The norms of the rows of `[out, in]`, as a column; for a weight in GPT-2's layout the norms of its columns, as a row.
    fn norms(&self, weight: &Tensor) -> Tensor {
        weight.norm_scalaropt_dim(2, [if self.transposed { 0i64 } else { 1 }], true)
    }

    /// Merges the adapter, if there is one, into the weight; the sum is computed and stored in f32, or quantized again, as PEFT does.
    /// Returns whether the weight had lower precision and is stored in f32 now.
    pub fn merge(&mut self) -> bool {
        if self.adapter.is_none() {
            return false;
        }
        let weight = tch::no_grad(|| self.weight.stored_values());
        self.merge_into(&weight)
    }

    /// [`Linear::merge`] with `weight`, f32 in the layout of the layer's weight, in place of the stored weight.
    pub(super) fn merge_into(&mut self, weight: &Tensor) -> bool {
        let Some(adapter) = self.adapter.take() else { return false };
        let sum = tch::no_grad(|| {
            let sum = self.adapted(weight, &adapter);
            let Some(magnitude) = &adapter.magnitude else { return sum };
            let norms = self.norms(&sum);
            sum * (magnitude.weight().view_as(&norms) / norms)
        });
        self.weight.replace(&sum)
    }

    /// Whether the layer has an adapter beside a quantized weight.
    pub(super) fn is_quantized_with_adapter(&self) -> bool {
        self.adapter.is_some() && self.quantization().is_some()
    }

    /// Converts weight and bias to the dtype of products, where that takes no more memory, except the tensors at the addresses
    /// `kept`; returns whether a tensor changed.
    pub fn hold_as_computed(&mut self, kept: &HashSet<*mut c_void>) -> bool {
        let weight = match &mut self.weight {
            Matrix::Plain(weight) => Some(weight),
            Matrix::Quantized(_) => None,
        };
        let weights = weight.into_iter().chain(&mut self.bias);
        let convertible = weights.filter(|weight| !kept.contains(&weight.tensor.data_ptr()));
        // `any` would stop after the first that changed.
        convertible.filter_map(|weight| weight.hold(self.compute).then_some(())).count() > 0
    }

    pub fn forward(&self, x: &Tensor) -> Tensor {
        self.forward_dropping(x, None)
    }

    /// [`Linear::forward`] with dropout before the adapter.
    pub fn forward_dropping(&self, x: &Tensor, dropout: Option<&Dropout>) -> Tensor {
        let Some(adapter) = &self.adapter else { return self.product(x, true) };
        if dropout.is_none() && adapter.magnitude.is_none() && !plain() {
            let bias = self.bias.as_ref().map(|b| b.used(self.compute));
            return match &self.weight {
                Matrix::Plain(weight) => {
                    let weight = weight.used(self.compute);
                    tch_ext::adapted_linear(x, &weight, bias.as_ref(), self.transposed, adapter.low_rank())
                }
                Matrix::Quantized(weight) => {
                    let adapter = Some(adapter.low_rank());
                    tch_ext::quantized_linear(x, &weight.view(), bias.as_ref(), adapter, self.compute)
                }
            };
        }
        let out = self.product(x, true);
        let x = x.to_kind(Kind::Float);
        let x = dropout.map_or_else(|| x.shallow_clone(), |dropout| dropout.apply(&x));
        let out = match &adapter.magnitude {
            None => out + adapter.product(&x),
            Some(magnitude) => {
                let [a, b] = [&adapter.a, &adapter.b].map(Tensor::internal_version);
                let versions = [a, b, self.weight.version()];
                let norms = || self.norms(&self.adapted(&self.used(), adapter)).view([-1]);
                let factor = magnitude.factor(versions, norms);
                // As in PEFT: the bias is not scaled, and with dropout the scaled product is that of the remaining inputs.
                let product = match (dropout, &self.bias) {
                    (Some(_), _) => self.product(&x, false).to_kind(Kind::Float),
                    (None, Some(bias)) => out.to_kind(Kind::Float) - bias.used(self.compute),
                    (None, None) => out.to_kind(Kind::Float),
                };
                out + (&factor - 1.0) * product + factor * adapter.product(&x)
            }
        };
        out.to_kind(self.compute)
    }

    /// The layer's product without its adapter, in the dtype of products.
    fn product(&self, x: &Tensor, with_bias: bool) -> Tensor {
        let bias = self.bias.as_ref().filter(|_| with_bias);
        // On every device: this kernel reuses the copy of the weight and accumulates its gradient in place.
        if !plain() {
            let used = bias.map(|b| b.used(self.compute));
            return match &self.weight {
                Matrix::Plain(weight) => {
                    let bias = bias.map(|b| &b.tensor).zip(used.as_ref());
                    tch_ext::linear(x, &weight.tensor, &weight.used(self.compute), bias, self.transposed)
                }
                Matrix::Quantized(weight) => {
                    tch_ext::quantized_linear(x, &weight.view(), used.as_ref(), None, self.compute)
                }
            };
        }
        let weight = match &self.weight {
            Matrix::Plain(weight) => weight.tensor.to_kind(self.compute),
            Matrix::Quantized(weight) => weight.values(self.compute),
        };
        let weight = if self.transposed { weight.tr() } else { weight };
        let bias = bias.map(|bias| bias.tensor.to_kind(self.compute));
        x.to_kind(self.compute).linear(&weight, bias.as_ref())
    }

    /// Whether products use a copy of a tensor in another dtype.
    pub fn uses_copies(&self) -> bool {
        self.plain_weights().any(|weight| weight.tensor.kind() != self.compute)
    }

    /// Frees the copies in the dtype of products; the next product makes them again.
    pub fn drop_copies(&self) {
        self.plain_weights().for_each(Weight::drop_copy);
    }

    /// Weight and bias, without a quantized weight.
    fn plain_weights(&self) -> impl Iterator<Item = &Weight> {
        let weight = match &self.weight {
            Matrix::Plain(weight) => Some(weight),
            Matrix::Quantized(_) => None,
        };
        weight.into_iter().chain(&self.bias)
    }

    /// The stored weight of a head, and the same weight in the dtype of products, detached; both `[out, in]`.
    pub fn weight(&self) -> (&Tensor, Tensor) {
        let weight = self.weight.plain();
        (&weight.tensor, weight.used(self.compute))
    }
}

/// A norm over the last dimension, computed in f32.
#[derive(Debug)]
pub(crate) struct Norm {
    kind: NormKind,
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f64,
    /// The factors in f32 with the content of the weight that they were made from, if the weight is frozen and stored in another form.
    factors: RefCell<Option<(Content, Tensor)>>,
}

/// Identifies the values of a tensor: its version, its memory and its address. `set_data` changes the memory and not the version.
type Content = (i64, usize, usize);

impl Norm {
    /// Builds the norm whose tensors are `{base}.weight` and, for a layer norm, `{base}.bias`.
    pub(crate) fn build(b: &mut Builder<'_>, base: &str, width: i64, shape: &Shape) -> Result<Self> {
        let kind = shape.norm;
        let init = if kind == NormKind::RmsPlusOne { Init::Zeros } else { Init::Ones };
        let weight = b.tensor(format!("{base}.weight"), &[width], init, false)?;
        let bias = match kind {
            NormKind::Layer if shape.norm_bias => {
                Some(b.tensor(format!("{base}.bias"), &[width], Init::Zeros, false)?)
            }
            NormKind::Layer | NormKind::Rms | NormKind::RmsPlusOne => None,
        };
        Ok(Self { kind, weight, bias, eps: shape.norm_eps, factors: RefCell::new(None) })
    }

    /// Builds an RMS norm of this kind with the tensor `{base}.weight`, whatever the kind of the model's other norms.
    pub(crate) fn of_kind(b: &mut Builder<'_>, base: &str, width: i64, (kind, eps): (NormKind, f64)) -> Result<Self> {
        let init = if kind == NormKind::RmsPlusOne { Init::Zeros } else { Init::Ones };
        let weight = b.tensor(format!("{base}.weight"), &[width], init, false)?;
        Ok(Self { kind, weight, bias: None, eps, factors: RefCell::new(None) })
    }

    /// [`Norm::forward`] of `x` `[N, heads * head_dim]` or `[N, heads, head_dim]`, of any dtype: over each head, or over all heads
    /// together, by the width of the norm.
    pub(crate) fn forward_heads(&self, x: &Tensor, kind: Kind) -> Tensor {
        let rows = x.to_kind(Kind::Float).reshape([-1, self.weight.size()[0]]);
        self.forward(&rows, kind).view_as(x)
    }

    /// Normalizes `x`, which is f32; returns `kind`.
    pub(crate) fn forward(&self, x: &Tensor, kind: Kind) -> Tensor {
        let norm = self.options();
        if uses_kernels(kind, x.device()) {
            return tch_ext::norm(norm, x, &self.weight, self.bias.as_ref(), kind);
        }
        if tch_ext::has_gpu_kernels(kind, x.device()) {
            let (norm, weight) = self.used(norm);
            return tch_ext::norm(norm, x, &weight, self.bias.as_ref(), kind);
        }
        let shape = self.weight.size();
        let factors = self.factors();
        let normed = match self.kind {
            NormKind::Layer => {
                let bias = self.bias.as_ref().map(|bias| bias.to_kind(Kind::Float));
                x.layer_norm(shape, Some(&factors), bias.as_ref(), self.eps, false)
            }
            NormKind::Rms | NormKind::RmsPlusOne => x.rms_norm(shape, Some(&factors), self.eps),
        };
        normed.to_kind(kind)
    }

    /// The residual stream `x`, f32, with a branch added, and the norm of the sum in `kind`, by one GPU kernel; `None` without such a kernel.
    pub(crate) fn sum_by_kernel(&self, x: &Tensor, branch: &Tensor, kind: Kind) -> Option<(Tensor, Tensor)> {
        let fits = x.kind() == Kind::Float && [branch.kind(), Kind::Float].contains(&kind);
        if !fits || !tch_ext::has_gpu_kernels(branch.kind(), x.device()) {
            return None;
        }
        let (norm, weight) = self.used(self.options());
        Some(tch_ext::sum_norm(norm, x, (branch, None), &weight, self.bias.as_ref(), kind))
    }

    fn options(&self) -> tch_ext::Norm {
        let offset = f64::from(u8::from(self.kind == NormKind::RmsPlusOne));
        tch_ext::Norm { eps: self.eps, center: self.kind == NormKind::Layer, offset }
    }

    /// The norm and its weight as a GPU kernel takes them: the weight itself if it is trained, else the cached factors.
    fn used(&self, norm: tch_ext::Norm) -> (tch_ext::Norm, Tensor) {
        if self.weight.requires_grad() {
            (norm, self.weight.shallow_clone())
        } else {
            (tch_ext::Norm { offset: 0.0, ..norm }, self.factors())
        }
    }

    /// Frees the cached factors; the next use makes them again.
    pub(crate) fn drop_factors(&self) {
        drop(self.factors.take());
    }

    /// The factors of the normalized numbers, in f32. The factors of a frozen norm are cached: converting them costs a GPU one launch per norm
    /// and decoding step.
    fn factors(&self) -> Tensor {
        let weight = &self.weight;
        let make = || match (self.kind, weight.to_kind(Kind::Float)) {
            (NormKind::RmsPlusOne, weight) => weight + 1.0,
            (_, weight) => weight,
        };
        if weight.requires_grad() || (weight.kind() == Kind::Float && self.kind != NormKind::RmsPlusOne) {
            return make();
        }
        let now = (weight.internal_version(), tch_ext::storage_id(weight), weight.data_ptr().addr());
        let mut cached = self.factors.borrow_mut();
        match &*cached {
            Some((content, factors)) if *content == now => factors.shallow_clone(),
            _ => cached.insert((now, tch::no_grad(make))).1.shallow_clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::lora::{DropoutRows, LayerSize};
    use tch::Device;

    #[test]
    fn the_factors_of_a_frozen_norm_follow_its_weight_in_place_and_by_other_memory() {
        let weight = Tensor::from_slice(&[1f32, 2.0, 3.0]).to_kind(Kind::BFloat16);
        let norm =
            |kind| Norm { kind, weight: weight.shallow_clone(), bias: None, eps: 1e-6, factors: RefCell::new(None) };
        let (plain, plus_one) = (norm(NormKind::Rms), norm(NormKind::RmsPlusOne));
        let expect = |expected: [f32; 3]| {
            let expected = Tensor::from_slice(&expected);
            assert_eq!(plain.factors(), expected);
            assert_eq!(plus_one.factors(), &expected + 1.0);
            assert_eq!(plain.factors().data_ptr(), plain.factors().data_ptr());
        };
        expect([1.0, 2.0, 3.0]);
        let _ = weight.shallow_clone().fill_(4.0);
        expect([4.0, 4.0, 4.0]);
        weight.shallow_clone().set_data(&Tensor::from_slice(&[5f32, 6.0, 7.0]).to_kind(Kind::BFloat16));
        expect([5.0, 6.0, 7.0]);
        plain.drop_factors();
        assert!(plain.factors.borrow().is_none());
        expect([5.0, 6.0, 7.0]);
        // A trained weight gets its gradient.
        let weight = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
        let trained = Norm { kind: NormKind::RmsPlusOne, weight, bias: None, eps: 1e-6, factors: RefCell::new(None) };
        assert!(trained.factors().requires_grad());
    }

    #[test]
    fn a_layer_with_codes_an_adapter_or_the_other_layout_is_no_plain_product() {
        let weight = Tensor::arange(24, (Kind::Float, Device::Cpu)).view([6, 4]);
        let layer = |weight: Matrix, transposed: bool| {
            let name = String::new();
            Linear { name, weight, bias: None, transposed, compute: Kind::Float, adapter: None }
        };
        let plain = |transposed| layer(Matrix::Plain(Weight::new(weight.copy())), transposed);
        assert!(plain(false).plain_product().is_some());
        assert!(plain(true).plain_product().is_none());
        let codes = Matrix::Quantized(Quantized::new(&weight, Quantization::EightBit));
        assert!(layer(codes, false).plain_product().is_none());
        let mut adapted = plain(false);
        adapted.set_adapter(Adapter::fresh(LayerSize { r: 2, scale: 1.5 }, [4, 6], Device::Cpu, 1, 0).unwrap());
        assert!(adapted.plain_product().is_none());
    }

    #[test]
    fn with_dropout_dora_scales_the_product_of_the_remaining_inputs_as_in_peft() {
        let numbers = |shape: [i64; 2], start: f64| {
            (Tensor::arange(shape[0] * shape[1], (Kind::Float, Device::Cpu)) * 0.7 + start).sin().view(shape)
        };
        let (weight, bias, magnitude) =
            (numbers([6, 4], 0.0), numbers([1, 6], 1.0).view([-1]), numbers([1, 6], 2.0) + 2.0);
        let (x, b) = (numbers([3, 4], 3.0), numbers([6, 2], 4.0));
        let rows = DropoutRows { share: 0.5, seed: 1, update: 2, rows: vec![0] };
        let dropped = Dropout::new(&rows, &[3]).apply(&x);
        assert_ne!(dropped, x);
        for transposed in [false, true] {
            let stored = if transposed { weight.tr().contiguous() } else { weight.copy() };
            let (stored, stored_bias) = (Matrix::Plain(Weight::new(stored)), Some(Weight::new(bias.copy())));
            let name = String::new();
            let mut linear =
                Linear { name, weight: stored, bias: stored_bias, transposed, compute: Kind::Float, adapter: None };
            let mut adapter = Adapter::fresh(LayerSize { r: 2, scale: 1.5 }, [4, 6], Device::Cpu, 1, 0).unwrap();
            adapter.b = b.copy();
            adapter.magnitude = Some(Magnitude::new(magnitude.view([-1])));
            let low_rank = adapter.a.copy();
            linear.set_adapter(adapter);
            let found = linear.forward_dropping(&x, Some(&Dropout::new(&rows, &[3])));
            let sum = &weight + b.matmul(&low_rank) * 1.5;
            let factor = &magnitude / (&sum * &sum).sum_dim_intlist([1i64].as_slice(), false, Kind::Float).sqrt();
            let scaled = (&factor - 1.0) * dropped.matmul(&weight.tr());
            let adapted = factor * dropped.matmul(&low_rank.tr()).matmul(&b.tr()) * 1.5;
            let expected = x.matmul(&weight.tr()) + &bias + scaled + adapted;
            assert!((found - expected).abs().max().double_value(&[]) < 1e-5, "transposed {transposed}");
        }
    }
}
