//! The MLP of a layer: one for all tokens, or several experts; each token goes through a few of them.

use super::gates::{gated, gated_halves};
use super::joint;
use super::linear::{Linear, LinearShape};
use super::lora::Dropout;
use super::params::{Builder, Init};
use super::routing::{Routes, mixed};
use super::shape::{self, Activation, ExpertNames, MlpIn, Names, Scoring, Shape};
use super::stacked::{Stack, StackedExperts};
use rlhf_base::Result;
use std::collections::HashSet;
use std::ffi::c_void;
use tch::{Kind, Tensor};

/// The MLP of a layer.
#[derive(Debug)]
pub(super) enum Mlp {
    Dense(Dense),
    Experts(Experts),
    Stacked(StackedExperts),
}

/// One MLP.
#[derive(Debug)]
pub(super) struct Dense {
    inputs: Vec<Linear>,
    out: Linear,
    activation: Activation,
    /// Whether the one input projection is the gate, then the up projection.
    fused: bool,
}

/// Experts: each token goes through the ones with the highest router scores; their results are added by their weights.
#[derive(Debug)]
pub(super) struct Experts {
    router: Linear,
    experts: Vec<Dense>,
    /// Number of experts that each token goes through.
    chosen: i64,
    scoring: Scoring,
    /// A number of each expert that is added to its score for the choice, `[experts]` f32.
    bias: Option<Tensor>,
    /// Whether the weights of the chosen experts are divided by their sum.
    normalized: bool,
    /// An MLP that all tokens go through in addition, and the gate of its output.
    shared: Option<Box<(Dense, Linear)>>,
}

/// Width of an MLP, and the standard deviations of its newly initialized weights: of the input and of the output projections.
#[derive(Clone, Copy)]
struct Sizes {
    inner: i64,
    stds: [f64; 2],
}

impl Mlp {
    /// Builds the MLP of layer `i`; `residual_std` is the standard deviation of newly initialized projections into the residual stream.
    pub(super) fn build(
        i: usize,
        shape: &Shape,
        names: &Names,
        b: &mut Builder<'_>,
        (compute, residual_std): (Kind, f64),
    ) -> Result<Self> {
        let at = |name: &str| format!("{}.{i}.{name}", names.layers);
        let stds = [shape.initializer_range, residual_std];
        if let (Some(experts), Some(expert_names)) = (&shape.experts, &names.experts)
            && experts.layers[i]
            && !expert_names.are_parallel()
        {
            if let Some(gate) = experts.clamped {
                let with = (experts, gate);
                let stacked = StackedExperts::build(expert_names, at, shape.hidden_size, with, (b, compute), stds[0])?;
                return Ok(Self::Stacked(stacked));
            }
            return Experts::build(expert_names, &at, (shape, experts), (b, compute), stds).map(Self::Experts);
        }
        let sizes = Sizes { inner: shape.layer_shape(i).intermediate_size, stds };
        Ok(Self::Dense(Dense::build(&names.mlp_in, names.mlp_out, at, shape, (b, compute), sizes)?))
    }

    pub(super) fn has_experts(&self) -> bool {
        matches!(self, Self::Experts(_) | Self::Stacked(_))
    }

    pub(super) fn linears(&self) -> Vec<&Linear> {
        match self {
            Self::Dense(dense) => dense.linears().collect(),
            Self::Experts(all) => {
                let shared = all.shared.iter().flat_map(|shared| shared.0.linears().chain([&shared.1]));
                let experts = all.experts.iter().flat_map(Dense::linears);
                std::iter::once(&all.router).chain(experts).chain(shared).collect()
            }
            Self::Stacked(all) => vec![&all.router],
        }
    }

    pub(super) fn linears_mut(&mut self) -> Vec<&mut Linear> {
        match self {
            Self::Dense(dense) => dense.linears_mut().collect(),
            Self::Experts(all) => {
                let experts = all.experts.iter_mut().flat_map(Dense::linears_mut);
                let shared = all.shared.iter_mut().flat_map(|shared| {
                    let (dense, gate) = shared.as_mut();
                    dense.linears_mut().chain([gate])
                });
                std::iter::once(&mut all.router).chain(experts).chain(shared).collect()
            }
            Self::Stacked(all) => vec![&mut all.router],
        }
    }

    /// [`joint::lay_out`] of the input projections.
    pub(super) fn lay_out(&self, kept: &HashSet<*mut c_void>) {
        match self {
            Self::Dense(dense) => joint::lay_out(&dense.inputs, kept),
            Self::Experts(all) => {
                let shared = all.shared.iter().map(|shared| &shared.0);
                all.experts.iter().chain(shared).for_each(|dense| joint::lay_out(&dense.inputs, kept));
            }
            Self::Stacked(_) => {}
        }
    }

    /// The weights of stacked experts.
    pub(super) fn stacks_mut(&mut self) -> impl Iterator<Item = &mut Stack> {
        let stacked = match self {
            Self::Stacked(all) => Some(all),
            Self::Dense(_) | Self::Experts(_) => None,
        };
        stacked.into_iter().flat_map(StackedExperts::stacks_mut)
    }

    pub(super) fn stacks(&self) -> impl Iterator<Item = &Stack> {
        let stacked = match self {
            Self::Stacked(all) => Some(all),
            Self::Dense(_) | Self::Experts(_) => None,
        };
        stacked.into_iter().flat_map(StackedExperts::stacks)
    }

    /// The MLP of `x` `[N, hidden size]`, in the dtype of products, or of experts in f32.
    pub(super) fn forward(&self, x: &Tensor, dropout: Option<&Dropout>) -> Tensor {
        match self {
            Self::Dense(dense) => dense.forward(x, dropout),
            Self::Experts(experts) => experts.forward(x),
            Self::Stacked(experts) => experts.forward(x),
        }
    }
}

impl Dense {
    fn build(
        names_in: &MlpIn,
        name_out: &str,
        at: impl Fn(&str) -> String,
        shape: &Shape,
        (b, compute): (&mut Builder<'_>, Kind),
        sizes: Sizes,
    ) -> Result<Self> {
        let (hidden, inner) = (shape.hidden_size, sizes.inner);
        let transposed = shape.family.names.transposed;
        let mut linear = |name: &str, width_in: i64, width_out: i64, std: f64, compute: Kind| {
            let std = if shape.scale_init_by_width { std / (width_in as f64).sqrt() } else { std };
            let shape = LinearShape { width_in, width_out, bias: shape.mlp_bias, transposed, std };
            Linear::build(b, &at(name), shape, compute)
        };
        let parts = match names_in {
            MlpIn::Up(up) => vec![(*up, inner)],
            MlpIn::Gated([gate, up]) => vec![(*gate, inner), (*up, inner)],
            MlpIn::GatedFused(name) => vec![(*name, 2 * inner)],
        };
        let inputs = parts.into_iter().map(|(name, width)| linear(name, hidden, width, sizes.stds[0], compute));
        let inputs = inputs.collect::<Result<_>>()?;
        // As in transformers, which keeps T5's `wo` in f32.
        let out_compute = if shape.wide_mlp_out && compute == Kind::Half { Kind::Float } else { compute };
        let out = linear(name_out, inner, hidden, sizes.stds[1], out_compute)?;
        Ok(Self { inputs, out, activation: shape.activation, fused: matches!(names_in, MlpIn::GatedFused(_)) })
    }

    fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.inputs.iter().chain([&self.out])
    }

    fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.inputs.iter_mut().chain([&mut self.out])
    }

    fn forward(&self, x: &Tensor, dropout: Option<&Dropout>) -> Tensor {
        let first = || self.inputs[0].forward_dropping(x, dropout);
        let inner = match (joint::product(&self.inputs, x), self.inputs.get(1)) {
            (Some(both), _) => gated_halves(self.activation, &both),
            (None, Some(up)) => gated(self.activation, &first(), &up.forward_dropping(x, dropout)),
            (None, None) if self.fused => gated_halves(self.activation, &first()),
            (None, None) => self.activation.apply(&first()),
        };
        self.out.forward_dropping(&inner, dropout)
    }
}

impl Experts {
    /// Builds the experts of the layer whose tensors are at `at`.
    fn build(
        names: &ExpertNames,
        at: &dyn Fn(&str) -> String,
        (shape, experts): (&Shape, &shape::Experts),
        (b, compute): (&mut Builder<'_>, Kind),
        stds: [f64; 2],
    ) -> Result<Self> {
        let ExpertNames { router, experts: prefix, inputs, out, shared, .. } = *names;
        let (hidden, inner) = (shape.hidden_size, experts.intermediate_size);
        let gate = |width_out: i64| LinearShape {
            width_in: hidden,
            width_out,
            bias: false,
            transposed: shape.family.names.transposed,
            std: shape.initializer_range,
        };
        let router = Linear::build(b, &at(router), gate(experts.count), compute)?;
        let bias = names.bias.filter(|_| matches!(experts.scoring, Scoring::Sigmoid { is_biased: true, .. }));
        let bias = bias.map(|name| b.wide_buffer(at(name), &[experts.count], Init::Zeros)).transpose()?;
        let sizes = Sizes { inner, stds };
        b.open_fused(&at(prefix), names, [experts.count, inner, hidden])?;
        let build = |expert: i64| {
            let at = |name: &str| at(&format!("{prefix}.{expert}.{name}"));
            Dense::build(&MlpIn::Gated(inputs), out, at, shape, (&mut *b, compute), sizes)
        };
        let all = (0..experts.count).map(build).collect::<Result<_>>()?;
        let shared = match (shared, experts.shared) {
            (Some([mlp, gate_name]), Some(inner)) => {
                let shared_at = |name: &str| at(&format!("{mlp}.{name}"));
                let sizes = Sizes { inner, stds };
                let dense = Dense::build(&MlpIn::Gated(inputs), out, shared_at, shape, (&mut *b, compute), sizes)?;
                Some(Box::new((dense, Linear::build(b, &at(gate_name), gate(1), compute)?)))
            }
            _ => None,
        };
        let shape::Experts { chosen, scoring, normalized, .. } = *experts;
        Ok(Self { router, experts: all, chosen, scoring, bias, normalized, shared })
    }

    /// Weights and numbers of the experts of each token, `[N, chosen]`, from the router's results.
    fn chosen(&self, results: &Tensor) -> (Tensor, Tensor) {
        let (scores, least) = match self.scoring {
            Scoring::Softmax => (results.softmax(-1, Kind::Float), 0.0),
            // As in transformers, which divides by the sum and this.
            Scoring::Sigmoid { .. } => (results.to_kind(Kind::Float).sigmoid(), 1e-6),
        };
        let (weights, experts) = match &self.bias {
            None => scores.topk(self.chosen, -1, true, true),
            Some(bias) => {
                let (_, experts) = (scores.detach() + bias).topk(self.chosen, -1, true, true);
                (scores.gather(-1, &experts, false), experts)
            }
        };
        let weights = if self.normalized {
            &weights / (weights.sum_dim_intlist([-1i64].as_slice(), true, Kind::Float) + least)
        } else {
            weights
        };
        match self.scoring {
            Scoring::Sigmoid { scale, .. } if scale != 1.0 => (weights * scale, experts),
            Scoring::Sigmoid { .. } | Scoring::Softmax => (weights, experts),
        }
    }

    /// The weighted sum of the chosen experts' results, `[N, hidden size]` f32. Gradients flow into the chosen experts, and through the
    /// weights into the router.
    fn forward(&self, x: &Tensor) -> Tensor {
        let (weights, experts) = self.chosen(&self.router.forward(x));
        let run = |expert: usize, tokens: &Tensor| self.experts[expert].forward(tokens, None);
        let sum = mixed(x, Routes { weights, experts, count: self.experts.len() }, &run);
        match self.shared.as_deref() {
            None => sum,
            Some((dense, gate)) => sum + dense.forward(x, None) * gate.forward(x).to_kind(Kind::Float).sigmoid(),
        }
    }
}
