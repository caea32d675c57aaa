//! Experts whose weights are one tensor for all of a layer, with a clamped gate (gpt-oss).

use super::linear::{Linear, LinearShape, Weight};
use super::params::{Builder, Init};
use super::routing::{Routes, mixed};
use super::shape::{ClampedGate, ExpertNames, Experts};
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

/// One projection of all experts: weights `[experts, in, out]` and biases `[experts, out]`.
#[derive(Debug)]
pub(crate) struct Stack {
    weight: Weight,
    bias: Weight,
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
        let of_router = LinearShape { width_in: hidden, width_out: count, bias: true, transposed: false, std };
        let router = Linear::build(b, &at(names.router), of_router, compute)?;
        let mut stack = |name: &str, width_in: i64, width_out: i64| -> Result<Stack> {
            let name = at(&format!("{}.{name}", names.experts));
            let weight = b.tensor(name.clone(), &[count, width_in, width_out], Init::Normal(std), true)?;
            let bias = b.tensor(format!("{name}_bias"), &[count, width_out], Init::Zeros, false)?;
            Ok(Stack { weight: Weight::new(weight), bias: Weight::new(bias), compute })
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

    /// The weighted sum of the chosen experts' results, `[N, hidden size]` f32, with gradients as those of other experts.
    pub(super) fn forward(&self, x: &Tensor) -> Tensor {
        let logits = self.router.forward(x).to_kind(Kind::Float);
        let (chosen, experts) = logits.topk(self.chosen, -1, true, true);
        let weights = chosen.softmax(-1, Kind::Float);
        // Of all experts at once: the gradient of one alone would be as large as that of all.
        let [inputs, outs] = self.stacks.each_ref().map(Stack::by_expert);
        let run = |expert: usize, tokens: &Tensor| {
            let product = |(weights, biases): &(Vec<Tensor>, Vec<Tensor>), x: &Tensor| {
                x.matmul(&weights[expert]) + &biases[expert]
            };
            product(&outs, &self.gated(&product(&inputs, tokens)))
        };
        let count = outs.0.len();
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

impl Stack {
    /// Weight and bias of each expert in the dtype of products.
    fn by_expert(&self) -> (Vec<Tensor>, Vec<Tensor>) {
        let of = |weight: &Weight| {
            // A part needs a gradient only where gradients are computed.
            let learns = weight.held.get(0).requires_grad();
            if learns { weight.held.to_kind(self.compute) } else { weight.used(self.compute) }.unbind(0)
        };
        (of(&self.weight), of(&self.bias))
    }

    fn weights(&self) -> [&Weight; 2] {
        [&self.weight, &self.bias]
    }

    /// Converts weights and biases to the dtype of products, as [`Linear::hold_as_computed`].
    pub(crate) fn hold_as_computed(&mut self, kept: &HashSet<*mut c_void>) -> bool {
        let own =
            [&mut self.weight, &mut self.bias].into_iter().filter(|weight| !kept.contains(&weight.held.data_ptr()));
        own.filter_map(|weight| weight.hold(self.compute).then_some(())).count() > 0
    }

    pub(super) fn uses_copies(&self) -> bool {
        self.weights().into_iter().any(|weight| weight.held.kind() != self.compute)
    }

    pub(super) fn drop_copies(&self) {
        self.weights().into_iter().for_each(Weight::drop_copy);
    }
}
