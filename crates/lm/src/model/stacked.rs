//! Experts of a layer whose weights are stacked in one tensor: with a clamped gate (gpt-oss), and in addition to the layer's MLP (Gemma 4).

use super::gates::gated_halves;
use super::linear::{Linear, LinearShape, Norm, Weight};
use super::lora::Dropout;
use super::params::{Builder, Init};
use super::routing::{Routes, mixed};
use super::shape::{Activation, ClampedGate, ExpertNames, Experts, Shape, Stacking};
use rlhf_base::Result;
use std::collections::HashSet;
use std::ffi::c_void;
use tch::{Kind, Tensor};

/// Stacked experts with their router.
#[derive(Debug)]
pub(super) struct StackedExperts {
    pub(super) router: Linear,
    /// Gates and up projections, and the projections back.
    stacks: [Stack; 2],
    chosen: i64,
    gate: ClampedGate,
}

/// One projection of all experts.
#[derive(Debug)]
pub(crate) struct Stack {
    /// `[experts, in, out]`, or `[experts, out, in]` without biases.
    weight: Weight,
    /// `[experts, out]`.
    bias: Option<Weight>,
    compute: Kind,
}

/// Experts in addition to the MLP of a layer, with their router. Both read the residual stream.
#[derive(Debug)]
pub(super) struct ParallelExperts {
    pub(super) router: Linear,
    /// Factors of the router's input, `[hidden size]`.
    input_scales: Tensor,
    /// Factors of the experts' weights, `[experts]`.
    scales: Tensor,
    stacks: [Stack; 2],
    /// Norms of the MLP's output, of the experts' input and of their output.
    pub(super) norms: [Norm; 3],
    chosen: i64,
    activation: Activation,
    eps: f64,
    compute: Kind,
}

impl StackedExperts {
    /// Builds the experts whose names `at` completes.
    pub(super) fn build(
        names: &ExpertNames,
        at: impl Fn(&str) -> String,
        hidden: i64,
        (experts, gate): (&Experts, ClampedGate),
        (b, compute): (&mut Builder<'_>, Kind),
        std: f64,
    ) -> Result<Self> {
        let (count, inner) = (experts.count, experts.intermediate_size);
        let router_shape = LinearShape { width_in: hidden, width_out: count, bias: true, transposed: false, std };
        let router = Linear::build(b, &at(names.router), router_shape, compute)?;
        let mut stack = |name: &str, width_in: i64, width_out: i64| -> Result<Stack> {
            let name = at(&format!("{}.{name}", names.experts));
            let weight = b.tensor(name.clone(), &[count, width_in, width_out], Init::Normal(std), true)?;
            let bias = b.tensor(format!("{name}_bias"), &[count, width_out], Init::Zeros, false)?;
            Ok(Stack { weight: Weight::new(weight), bias: Some(Weight::new(bias)), compute })
        };
        let stacks = [stack(names.inputs[0], hidden, 2 * inner)?, stack(names.out, inner, hidden)?];
        Ok(Self { router, stacks, chosen: experts.chosen, gate })
    }

    pub(super) fn stacks_mut(&mut self) -> impl Iterator<Item = &mut Stack> {
        self.stacks.iter_mut()
    }

    pub(super) fn stacks(&self) -> impl Iterator<Item = &Stack> {
        self.stacks.iter()
    }

    /// The weighted sum of the chosen experts' results, `[N, hidden size]` f32, differentiable as that of other experts.
    pub(super) fn forward(&self, x: &Tensor) -> Tensor {
        let logits = self.router.forward(x).to_kind(Kind::Float);
        let (chosen, experts) = logits.topk(self.chosen, -1, true, true);
        let weights = chosen.softmax(-1, Kind::Float);
        // The weights of all experts are split at once: the gradient of one part alone would be as large as the gradient of the whole.
        let [inputs, outs] = self.stacks.each_ref().map(Stack::by_expert);
        let run = |expert: usize, tokens: &Tensor| outs.product(expert, &self.gated(&inputs.product(expert, tokens)));
        let count = outs.weights.len();
        mixed(x, Routes { weights, experts, count }, &run)
    }

    /// The clamped gate of `[N, 2 * inner]`, where gate and up projection take turns.
    fn gated(&self, both: &Tensor) -> Tensor {
        let parts = both.unflatten(-1, [-1, 2]).unbind(-1);
        let ClampedGate { alpha, limit } = self.gate;
        let (gate, up) = (parts[0].clamp_max(limit), parts[1].clamp(-limit, limit));
        (up + 1.0) * (&gate * (&gate * alpha).sigmoid())
    }
}

/// Bytes per token that a layer with experts beside its MLP stores for them: the inputs of two norms in f32, and the router's inputs before and
/// after their factors. The tokens of each expert and what the experts compute of them are not included.
pub(super) fn parallel_expert_bytes(shape: &Shape, kind: f64) -> f64 {
    let are_parallel = shape.experts.is_some() && shape.family.names.experts.is_some_and(|names| names.are_parallel());
    if are_parallel { shape.hidden_size as f64 * (12.0 + kind) } else { 0.0 }
}

/// Bytes of the gradients of a layer's stacked experts before they are added: of each expert, all of which wait for the last one, and of one whole
/// stack, in the dtype of products and in f32.
pub(super) fn gradient_bytes(shape: &Shape, kind: f64) -> f64 {
    let is_stacked = shape.family.names.experts.is_some_and(|names| names.stacking.is_some());
    let Some(experts) = shape.experts.as_ref().filter(|_| is_stacked) else { return 0.0 };
    // A third of the weights: the gates, the up projections, or the down projections.
    let third = experts.count as f64 * experts.intermediate_size as f64 * shape.hidden_size as f64;
    third * (4.0 * kind).max(2.0 * kind + 8.0)
}

/// The projections of the experts of a layer, in the dtype of products.
struct ByExpert {
    /// `[in, out]` each.
    weights: Vec<Tensor>,
    biases: Option<Vec<Tensor>>,
}

impl ByExpert {
    /// The projection of `x` `[tokens, in]` by an expert.
    fn product(&self, expert: usize, x: &Tensor) -> Tensor {
        let product = x.matmul(&self.weights[expert]);
        self.biases.as_ref().map_or_else(|| product.shallow_clone(), |biases| &product + &biases[expert])
    }
}

impl ParallelExperts {
    /// Builds the experts of layer `i` whose names `at` completes, if the layers have such experts.
    pub(super) fn build(
        i: usize,
        shape: &Shape,
        at: impl Fn(&str) -> String,
        b: &mut Builder<'_>,
        compute: Kind,
    ) -> Result<Option<Self>> {
        let (Some(experts), Some(names)) = (&shape.experts, &shape.family.names.experts) else { return Ok(None) };
        let Some(Stacking::Parallel { scales, norms }) = names.stacking.filter(|_| experts.layers[i]) else {
            return Ok(None);
        };
        let (count, inner, hidden) = (experts.count, experts.intermediate_size, shape.hidden_size);
        let std = shape.initializer_range;
        let router_shape = LinearShape { width_in: hidden, width_out: count, bias: false, transposed: false, std };
        let router = Linear::build(b, &at(names.router), router_shape, compute)?;
        let [input_scales, scales] = scales;
        let input_scales = b.tensor(at(input_scales), &[hidden], Init::Ones, true)?;
        let scales = b.tensor(at(scales), &[count], Init::Ones, true)?;
        let mut stack = |name: &str, width_in: i64, width_out: i64| -> Result<Stack> {
            let name = at(&format!("{}.{name}", names.experts));
            let weight = b.tensor(name, &[count, width_out, width_in], Init::Normal(std), true)?;
            Ok(Stack { weight: Weight::new(weight), bias: None, compute })
        };
        let stacks = [stack(names.inputs[0], hidden, 2 * inner)?, stack(names.out, inner, hidden)?];
        let mut norm = |name: &str| Norm::build(b, &at(name), hidden, shape);
        let norms = [norm(norms[0])?, norm(norms[1])?, norm(norms[2])?];
        let (chosen, activation, eps) = (experts.chosen, shape.activation, shape.norm_eps);
        Ok(Some(Self { router, input_scales, scales, stacks, norms, chosen, activation, eps, compute }))
    }

    pub(super) fn stacks_mut(&mut self) -> impl Iterator<Item = &mut Stack> {
        self.stacks.iter_mut()
    }

    pub(super) fn stacks(&self) -> impl Iterator<Item = &Stack> {
        self.stacks.iter()
    }

    /// The sum, f32, of the MLP's result `fed` and the experts' result for the residual stream `x` `[N, hidden size]` f32, each normalized.
    pub(super) fn add_to(&self, fed: &Tensor, x: &Tensor, dropout: Option<&Dropout>) -> Tensor {
        let [mlp_norm, before, after] = &self.norms;
        let hidden = x.size()[1];
        // A norm without a weight.
        let routed = x.rms_norm([hidden], None::<&Tensor>, self.eps) * self.input_scales.to_kind(Kind::Float);
        let routed = routed * (hidden as f64).powf(-0.5);
        let results = self.router.forward_dropping(&routed.to_kind(self.compute), dropout);
        let (weights, experts) = results.softmax(-1, Kind::Float).topk(self.chosen, -1, true, true);
        let weights = &weights / weights.sum_dim_intlist([-1i64].as_slice(), true, Kind::Float);
        let scales = self.scales.to_kind(Kind::Float).index_select(0, &experts.view([-1])).view_as(&weights);
        let [inputs, outs] = self.stacks.each_ref().map(Stack::by_expert);
        let run = |expert: usize, tokens: &Tensor| {
            outs.product(expert, &gated_halves(self.activation, &inputs.product(expert, tokens)))
        };
        let count = outs.weights.len();
        let routes = Routes { weights: weights * scales, experts, count };
        let mixed = mixed(&before.forward(x, self.compute), routes, &run);
        mlp_norm.forward(&fed.to_kind(Kind::Float), Kind::Float) + after.forward(&mixed, Kind::Float)
    }
}

impl Stack {
    /// Weight and bias of each expert in the dtype of products.
    fn by_expert(&self) -> ByExpert {
        let split = |weight: &Weight| {
            // A part of a trainable weight requires a gradient only while gradients are computed.
            let learns = weight.tensor.get(0).requires_grad();
            if learns { weight.tensor.to_kind(self.compute) } else { weight.used(self.compute) }.unbind(0)
        };
        let mut weights = split(&self.weight);
        if self.bias.is_none() {
            weights = weights.iter().map(Tensor::tr).collect();
        }
        ByExpert { weights, biases: self.bias.as_ref().map(split) }
    }

    fn weights(&self) -> impl Iterator<Item = &Weight> {
        std::iter::once(&self.weight).chain(&self.bias)
    }

    /// Converts weights and biases to the dtype of products, as [`Linear::hold_as_computed`].
    pub(crate) fn hold_as_computed(&mut self, kept: &HashSet<*mut c_void>) -> bool {
        let all = std::iter::once(&mut self.weight).chain(&mut self.bias);
        let convertible = all.filter(|weight| !kept.contains(&weight.tensor.data_ptr()));
        convertible.filter_map(|weight| weight.hold(self.compute).then_some(())).count() > 0
    }

    pub(super) fn uses_copies(&self) -> bool {
        self.weights().any(|weight| weight.tensor.kind() != self.compute)
    }

    pub(super) fn drop_copies(&self) {
        self.weights().for_each(Weight::drop_copy);
    }
}
