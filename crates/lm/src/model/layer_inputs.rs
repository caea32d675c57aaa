//! Inputs of each layer in addition to its hidden states (Gemma 4).

use super::linear::{Linear, LinearShape, Norm};
use super::lora::Dropout;
use super::params::{Builder, Init};
use super::shape::{Activation, Names, Shape};
use super::uses_kernels;
use rlhf_base::Result;
use std::f64::consts::FRAC_1_SQRT_2;
use tch::{Kind, Tensor};

/// The rows `ids` `[N]` of an embedding, f32.
pub(super) fn embedding_rows(table: &Tensor, ids: &Tensor) -> Tensor {
    let rows = if uses_kernels(Kind::Float, table.device()) {
        tch_ext::embedding(table, ids)
    } else {
        Tensor::embedding(table, ids, -1, false, false)
    };
    rows.to_kind(Kind::Float)
}

/// The table and the projection that the inputs of all layers are computed from.
#[derive(Debug)]
pub(super) struct AllInputs {
    table: Tensor,
    pub(super) projection: Linear,
    pub(super) norm: Norm,
    layers: i64,
    width: i64,
    hidden_size: i64,
}

/// The part of a layer that reads its input.
#[derive(Debug)]
pub(super) struct InputBranch {
    gate: Linear,
    out: Linear,
    pub(super) norm: Norm,
    activation: Activation,
}

/// Bytes per token that the branch of a layer stores: the residual stream as the gate's input, the gate before and after its non-linearity, the
/// layer's own input, their product, and the input of the norm.
pub(super) fn stored_in_branch(shape: &Shape, kind: f64) -> f64 {
    shape.layer_inputs.map_or(0.0, |inputs| 4.0 * inputs.width as f64 * kind + shape.hidden_size as f64 * (kind + 4.0))
}

/// Bytes per token of the inputs of all layers, and of the projections that their norm reads. Their gradients in the backward pass take as many.
pub(super) fn stored_inputs(shape: &Shape) -> f64 {
    shape.layer_inputs.map_or(0.0, |inputs| (inputs.width * shape.num_hidden_layers) as f64 * 2.0 * 4.0)
}

impl AllInputs {
    pub(super) fn build(shape: &Shape, names: &Names, b: &mut Builder<'_>, compute: Kind) -> Result<Option<Self>> {
        let (Some(inputs), Some(names)) = (shape.layer_inputs, names.layer_inputs) else { return Ok(None) };
        let (layers, width, std) = (shape.num_hidden_layers, inputs.width, shape.initializer_range);
        let table = [inputs.vocab_size, layers * width];
        let table = b.embedding(format!("{}.weight", names.table), &table, Init::Normal(std))?;
        let projection_shape =
            LinearShape { width_in: shape.hidden_size, width_out: layers * width, bias: false, transposed: false, std };
        let projection = Linear::build(b, names.projection, projection_shape, compute)?;
        let norm = Norm::build(b, names.norm, width, shape)?;
        Ok(Some(Self { table, projection, norm, layers, width, hidden_size: shape.hidden_size }))
    }

    /// The inputs of all layers, `[N, layers, width]` f32, of `tokens` `[N]` whose scaled embeddings are `x` `[N, hidden size]`.
    pub(super) fn forward(&self, tokens: &Tensor, x: &Tensor, dropout: Option<&Dropout>) -> Tensor {
        let size = [-1, self.layers, self.width];
        let projected = self.projection.forward_dropping(x, dropout).to_kind(Kind::Float);
        let projected = projected * (self.hidden_size as f64).powf(-0.5);
        let projected = self.norm.forward(&projected.view([-1, self.width]), Kind::Float).view(size);
        let embedded = embedding_rows(&self.table, tokens).view(size) * (self.width as f64).sqrt();
        (projected + embedded) * FRAC_1_SQRT_2
    }
}

impl InputBranch {
    /// Builds the branch whose names `at` completes.
    pub(super) fn build(
        shape: &Shape,
        names: &Names,
        at: impl Fn(&str) -> String,
        b: &mut Builder<'_>,
        compute: Kind,
    ) -> Result<Option<Self>> {
        let (Some(inputs), Some(names)) = (shape.layer_inputs, names.layer_inputs) else { return Ok(None) };
        let (hidden, std) = (shape.hidden_size, shape.initializer_range);
        let mut linear = |name: &str, width_in: i64, width_out: i64| {
            let shape = LinearShape { width_in, width_out, bias: false, transposed: false, std };
            Linear::build(b, &at(name), shape, compute)
        };
        let (gate, out) = (linear(names.gate, hidden, inputs.width)?, linear(names.out, inputs.width, hidden)?);
        let norm = Norm::build(b, &at(names.out_norm), hidden, shape)?;
        Ok(Some(Self { gate, out, norm, activation: shape.activation }))
    }

    pub(super) fn linears(&self) -> [&Linear; 2] {
        [&self.gate, &self.out]
    }

    pub(super) fn linears_mut(&mut self) -> [&mut Linear; 2] {
        [&mut self.gate, &mut self.out]
    }

    /// The residual stream `x` `[N, hidden size]` after the branch with `input` `[N, width]` f32.
    pub(super) fn add_to(&self, x: &Tensor, input: &Tensor, dropout: Option<&Dropout>) -> Tensor {
        let gate = self.activation.apply(&self.gate.forward_dropping(x, dropout));
        let gated = &gate * input.to_kind(gate.kind());
        let out = self.out.forward_dropping(&gated, dropout).to_kind(Kind::Float);
        x + self.norm.forward(&out, Kind::Float)
    }
}
