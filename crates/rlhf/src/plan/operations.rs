//! Operations of passes: a multiplication or an addition counts as one.

use super::members::Member;
use super::memory::Job;
use super::rows::{Row, tokens_of};
use crate::model::ModelSizes;

/// Operations of a pass.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Operations {
    pub(super) layers: f64,
    pub(super) head: f64,
}

impl Operations {
    pub(super) fn total(self) -> f64 {
        self.layers + self.head
    }

    /// Adds `times` the operations of `pass`.
    pub(super) fn add(&mut self, pass: Self, times: f64) {
        self.layers += times * pass.layers;
        self.head += times * pass.head;
    }
}

/// Tokens of a forward pass, as its operations are counted.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Read {
    /// Tokens that go through the layers.
    pub(super) computed: usize,
    /// Tokens that go through the head.
    pub(super) heads: usize,
    /// Sum of the squared lengths of the sequences: twice the pairs of tokens that attend to each other in a causal model.
    pub(super) squares: f64,
}

impl Read {
    /// A pass over `update`, whose rows have `sequences` sequences of about equal lengths each.
    pub(super) fn of(job: &Job<'_>, update: &[Row], sequences: f64) -> Self {
        let tokens = tokens_of(&update.iter().collect::<Vec<_>>(), job.shares());
        let squares = update.iter().map(|row| square(row.len)).sum::<f64>() / sequences;
        Self { computed: tokens.computed, heads: tokens.outputs, squares }
    }
}

pub(super) fn square(len: usize) -> f64 {
    (len as f64).powi(2)
}

/// Operations of a forward pass of a model.
pub(super) fn forward(sizes: &ModelSizes, read: Read) -> Operations {
    let [layers, head] = sizes.products();
    let c = sizes.config();
    // Queries times keys, and weights times values.
    let width = c.num_hidden_layers as f64 * c.num_attention_heads as f64 * c.head_dim as f64;
    let pairs = if c.causal { read.squares / 2.0 } else { read.squares };
    Operations {
        layers: 2.0 * read.computed as f64 * layers as f64 + 4.0 * width * pairs,
        head: 2.0 * read.heads as f64 * head as f64,
    }
}

/// Operations of a forward and backward pass, in those of the forward pass. The backward pass has a product for the gradient of the input, and
/// one for that of a weight that is trained.
pub(super) fn factor(job: &Job<'_>, member: &Member<'_>) -> f64 {
    let trained = if member.adapter.is_some() { 2.0 } else { 3.0 };
    trained + if job.run.run().gradient_checkpointing { 1.0 } else { 0.0 }
}
