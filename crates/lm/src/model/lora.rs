//! Low-rank adapters (LoRA and DoRA): small trained tensors beside frozen weights, and the dropout before them.

use super::params::Param;
use super::shape::{Family, Names};
use rlhf_base::Result;
use rlhf_base::rng::{Purpose, Stream};
use std::cell::RefCell;
use std::rc::Rc;
use tch::{Device, Kind, Tensor};
use tch_ext::on_device;

/// Suffixes of the names of an adapter's two matrices.
pub(super) const ENDS: [&str; 2] = ["lora_A.weight", "lora_B.weight"];

/// Suffix of the name of DoRA's magnitudes, as PEFT stores them.
pub(super) const MAGNITUDE: &str = "lora_magnitude_vector";

/// Names of classifiers' heads, which are trained in full and saved with the adapter: PEFT's two, and the one in encoder-decoders.
pub(super) const HEADS: [&str; 3] = ["classifier", "score", "classification_head"];

/// The names of classifiers' heads in an adapter's file: PEFT's, and for encoder-decoders also the model's own, which PEFT does not know.
pub(super) fn peft_heads(family: &Family) -> &'static [&'static str] {
    const ALL: &[&str] = &HEADS;
    if family.names.encoder.is_some() { ALL } else { &ALL[..2] }
}

/// Name of the value head on the trunk of a language model.
pub(super) const VALUE_HEAD: &str = "v_head";

/// Whether a parameter of this name is one of an adapter's tensors.
pub(super) fn is_lora(name: &str) -> bool {
    ENDS.iter().any(|end| name.ends_with(end)) || name.ends_with(MAGNITUDE)
}

/// Whether a parameter of this name is trained beside any frozen base: an adapter's tensor, or a classifier's or value head.
pub(super) fn is_trained(name: &str) -> bool {
    is_lora(name) || is_below(name, VALUE_HEAD) || is_in_head(name)
}

/// Whether a parameter of this name is a head that is trained in full beside an adapter.
pub(super) fn is_head(name: &str) -> bool {
    is_trained(name) && !is_lora(name)
}

/// Whether `name` is a tensor or a layer of the module `module`.
pub(super) fn is_below(name: &str, module: &str) -> bool {
    name.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Whether `name` is a tensor or a layer of a module whose name ends with one of `modules`, as PEFT selects `modules_to_save`.
pub(super) fn is_in_module(name: &str, modules: &[impl AsRef<str>]) -> bool {
    let mut parents = name.match_indices('.').map(|(at, _)| &name[..at]);
    parents.any(|parent| modules.iter().any(|module| parent.ends_with(module.as_ref())))
}

/// Whether the tensor or layer `name` is part of one of the modules `modules`, by its name in a model's files or in PEFT's files.
pub(super) fn is_in_saved_module(names: &Names, name: &str, modules: &[impl AsRef<str>]) -> bool {
    is_in_module(name, modules) || is_in_module(&names.in_peft(name), modules)
}

/// Whether the tensor or layer is part of a head that is trained in full, which gets no adapter. As for all modules that PEFT saves, the end of
/// a module's name decides: DistilBERT's `pre_classifier` is part of the head too.
pub(super) fn is_in_head(name: &str) -> bool {
    is_in_module(name, &HEADS) || HEADS.iter().any(|head| name.ends_with(head))
}

/// Rank and scale of the adapter of one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LayerSize {
    pub(super) r: usize,
    pub(super) scale: f64,
}

/// The tensors beside one weight W, which becomes W + `scale * B A`. They are always f32.
#[derive(Debug)]
pub struct Adapter {
    /// `[r, in]`.
    pub(super) a: Tensor,
    /// `[out, r]`.
    pub(super) b: Tensor,
    pub(super) scale: f64,
    /// The magnitudes of DoRA; `None` for LoRA.
    pub(super) magnitude: Option<Magnitude>,
}

/// DoRA's trained norms of the rows of a weight, whose directions are those of W + `scale * B A` (Liu et al. 2024, eq. 5).
#[derive(Debug)]
pub(super) struct Magnitude {
    /// `[out]`.
    weight: Tensor,
    /// The norms of the rows of W + `scale * B A`, `[out]`, with the versions of A, B and W that they were computed from.
    norms: RefCell<Option<([i64; 3], Tensor)>>,
}

impl Magnitude {
    pub(super) fn new(weight: Tensor) -> Self {
        Self { weight, norms: RefCell::new(None) }
    }

    pub(super) fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The trained norms divided by the norms of W + `scale * B A` for A, B and W in these `versions`, `[out]`. The latter norms are constants
    /// in the backward pass (section 4.3 of the paper); `norms` computes them again only after an optimizer step.
    pub(super) fn factor(&self, versions: [i64; 3], norms: impl FnOnce() -> Tensor) -> Tensor {
        let mut known = self.norms.borrow_mut();
        if known.as_ref().is_none_or(|(computed_from, _)| *computed_from != versions) {
            *known = Some((versions, tch::no_grad(norms)));
        }
        let (_, norms) = known.as_ref().expect("it was just computed");
        &self.weight / norms
    }
}

impl Adapter {
    /// Initializes an adapter without effect: A as PEFT draws it, uniform within 1 / sqrt(in), B zeros; no magnitudes.
    pub(super) fn fresh(size: LayerSize, widths: [i64; 2], device: Device, seed: u64, index: u64) -> Result<Self> {
        let ([width_in, width_out], r) = (widths, size.r as i64);
        let mut stream = Stream::new(seed, Purpose::Adapter, index, 0);
        let bound = (width_in as f64).sqrt().recip();
        let drawn: Vec<f32> = (0..r * width_in).map(|_| ((2.0 * stream.uniform() - 1.0) * bound) as f32).collect();
        let a = Tensor::f_from_slice(&drawn)?.view([r, width_in]).to_device(device);
        let b = Tensor::f_zeros([width_out, r], (Kind::Float, device))?;
        Ok(Self { a, b, scale: size.scale, magnitude: None })
    }

    pub(super) fn params(&self, layer: &str) -> Vec<Param> {
        let magnitude = self.magnitude.as_ref().map(|magnitude| (MAGNITUDE, &magnitude.weight));
        let tensors = [(ENDS[0], &self.a), (ENDS[1], &self.b)].into_iter().chain(magnitude);
        let param = |(end, tensor): (&str, &Tensor)| Param {
            name: format!("{layer}.{end}"),
            tensor: tensor.shallow_clone(),
            decay: true,
            embedding: false,
            fixed: false,
        };
        tensors.map(param).collect()
    }

    /// The matrices, for the kernel.
    pub(super) fn low_rank(&self) -> tch_ext::LowRank<'_> {
        tch_ext::LowRank { a: &self.a, b: &self.b, scale: self.scale }
    }

    /// `scale * (x A^T) B^T`, f32, for `x` in f32.
    pub(super) fn product(&self, x: &Tensor) -> Tensor {
        x.linear::<&Tensor>(&self.a, None).linear::<&Tensor>(&self.b, None) * self.scale
    }

    /// The term added to the weight when the adapter is merged, `[out, in]` f32.
    pub(super) fn delta(&self) -> Tensor {
        self.b.matmul(&self.a) * self.scale
    }
}

/// Dropout before the adapters in one pass, with the key of its random numbers.
#[derive(Debug, Clone)]
pub struct DropoutRows {
    /// Dropout probability.
    pub share: f64,
    /// The run's seed.
    pub seed: u64,
    /// The index of the update.
    pub update: u64,
    /// The index of each sequence within the update.
    pub rows: Vec<u64>,
}

/// Dropout in one forward pass. Each row has its own random stream, read layer after layer, so the dropped elements do not
/// depend on the batching.
pub struct Dropout {
    share: f64,
    streams: Rc<RefCell<Vec<Stream>>>,
    /// The lengths of the sequences.
    lens: Vec<i64>,
}

impl Dropout {
    /// `lens` are the lengths of the sequences.
    pub(super) fn new(rows: &DropoutRows, lens: &[i64]) -> Self {
        let stream = |&row| Stream::new(rows.seed, Purpose::Dropout, rows.update, row);
        let streams = Rc::new(RefCell::new(rows.rows.iter().map(stream).collect()));
        Self { share: rows.share, streams, lens: lens.to_vec() }
    }

    /// Dropout with the same streams for other tokens of the same rows: an encoder's tokens.
    pub(super) fn over(&self, lens: &[i64]) -> Self {
        Self { share: self.share, streams: self.streams.clone(), lens: lens.to_vec() }
    }

    /// The state of the random streams.
    pub(super) fn state(&self) -> Vec<Stream> {
        self.streams.borrow().clone()
    }

    /// Restores a [`Dropout::state`], so that a recomputed layer drops the same elements.
    pub(super) fn set_state(&self, state: Vec<Stream>) {
        *self.streams.borrow_mut() = state;
    }

    /// `x` `[N, width]` with some elements set to 0 and the others scaled, so that the expectation is unchanged.
    pub(super) fn apply(&self, x: &Tensor) -> Tensor {
        let width = x.size()[1];
        let mut dropped = Vec::with_capacity(x.numel());
        for (stream, len) in self.streams.borrow_mut().iter_mut().zip(&self.lens) {
            dropped.extend(stream.chances((len * width) as usize, self.share));
        }
        let dropped = on_device(&dropped, x.device()).view([-1, width]);
        x.masked_fill(&dropped, 0.0) / (1.0 - self.share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_elements_depend_on_the_row_and_not_on_its_batch() {
        let rows = |rows: &[u64]| DropoutRows { share: 0.25, seed: 1, update: 2, rows: rows.to_vec() };
        let ones = Tensor::ones([5, 64], (Kind::Float, Device::Cpu));
        let both = Dropout::new(&rows(&[7, 8]), &[2, 3]);
        let (first, second) = (both.apply(&ones), both.apply(&ones));
        assert_ne!(first, second, "each layer has its own draws");
        let alone = Dropout::new(&rows(&[8]), &[3]);
        let ones = Tensor::ones([3, 64], (Kind::Float, Device::Cpu));
        assert_eq!(alone.apply(&ones), first.narrow(0, 2, 3));
        assert_eq!(alone.apply(&ones), second.narrow(0, 2, 3));
    }

    #[test]
    fn dropout_drops_its_share_and_keeps_the_mean() {
        let rows = DropoutRows { share: 0.25, seed: 1, update: 0, rows: vec![0] };
        let x = Tensor::ones([100, 100], (Kind::Float, Device::Cpu));
        let dropped = Dropout::new(&rows, &[100]).apply(&x);
        let zeros = dropped.eq(0.0).sum(Kind::Float).double_value(&[]) / 1e4;
        assert!((zeros - 0.25).abs() < 0.02, "{zeros}"); // 4.6 standard deviations of 10000 draws
        assert!((dropped.max().double_value(&[]) - 4.0 / 3.0).abs() < 1e-6);
    }

    #[test]
    fn heads_are_selected_by_the_ends_of_their_names_as_in_peft() {
        for name in ["score.weight", "classifier.out_proj", "pre_classifier", "pre_classifier.bias", "v_head.weight"] {
            assert!(is_head(name), "{name}");
        }
        assert!(is_in_head("pre_classifier") && is_in_head("classification_head.dense") && !is_in_head("v_head"));
        for name in ["bert.pooler.dense.weight", "head.dense.weight", "pre_classifier.lora_A.weight", "scores.weight"] {
            assert!(!is_head(name), "{name}");
        }
    }

    #[test]
    fn a_module_is_selected_by_the_end_of_its_name_with_all_its_tensors_as_in_peft() {
        let is = |name: &str, module: &str| is_in_module(name, &[module.to_string()]);
        assert!(is("model.embed_tokens.weight", "embed_tokens") && is("model.norm.weight", "norm"));
        assert!(is("model.layers.0.input_layernorm.weight", "norm") && is("model.layers.0.mlp.up_proj.weight", "mlp"));
        assert!(is("model.layers.0.mlp.up_proj.weight", "layers.0") && !is("model.layers.10.norm.weight", "layers.0"));
        assert!(!is("lm_head.weight", "weight") && !is("lm_head.weight", "embed_tokens"));
    }
}
