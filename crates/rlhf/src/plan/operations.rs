//! Operations of passes: a multiplication or an addition counts as one.

use super::members::Member;
use super::memory::Job;
use super::rows::{Row, pass_tokens, reads};
use rlhf_lm::model::ModelSizes;

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
    /// Tokens of the prompts that an encoder reads; none with one stack.
    pub(super) source: usize,
    /// Sum of the squared lengths of these prompts.
    pub(super) source_squares: f64,
    /// Number of pairs of a decoder token and an encoder token that it attends to.
    pub(super) crossed: f64,
}

impl Read {
    /// A pass over `update`, whose rows have `sequences` sequences of about equal lengths each.
    pub(super) fn of(job: &Job<'_>, update: &[Row], sequences: f64) -> Self {
        Self::of_rows(update, job.shares(), sequences)
    }

    /// [`Read::of`]; with `shares`, first tokens that rows have in common are computed once.
    pub(super) fn of_rows(update: &[Row], shares: bool, sequences: f64) -> Self {
        let rows: Vec<&Row> = update.iter().collect();
        let tokens = pass_tokens(&rows, shares);
        let sum = |value: &dyn Fn(&Row) -> f64| update.iter().map(value).sum::<f64>() / sequences;
        let read: Vec<&&Row> =
            rows.iter().enumerate().filter(|(at, _)| reads(&rows, *at)).map(|(_, row)| row).collect();
        Self {
            computed: tokens.computed,
            heads: tokens.outputs,
            squares: sum(&|row| square(row.read()[1])),
            source: tokens.source.computed,
            source_squares: read.iter().map(|row| square(row.read()[0])).sum::<f64>() / sequences,
            crossed: sum(&|row| row.read()[0] as f64 * row.read()[1] as f64),
        }
    }

    /// Reading prompts of these lengths before their responses.
    pub(super) fn of_prompts(sizes: &ModelSizes, lens: &[usize]) -> Self {
        let tokens: usize = lens.iter().sum();
        let squares: f64 = lens.iter().copied().map(square).sum();
        if sizes.config().is_encoder_decoder() {
            Self {
                computed: lens.len(),
                heads: lens.len(),
                squares: lens.len() as f64,
                source: tokens,
                source_squares: squares,
                crossed: tokens as f64,
            }
        } else {
            Self { computed: tokens, heads: lens.len(), squares, ..Self::default() }
        }
    }

    /// Decoding `count` responses of `new_tokens` tokens to each prompt of these lengths.
    pub(super) fn of_responses(sizes: &ModelSizes, lens: &[usize], count: usize, new_tokens: usize) -> Self {
        let tokens = lens.len() * count * new_tokens;
        let pairs = sizes.config().is_encoder_decoder();
        // A token attends to all tokens before it.
        let row_squares = |len: &usize| {
            let before = if pairs { 1 } else { *len };
            square(before + new_tokens) - square(before)
        };
        let crossed = if pairs { (lens.iter().sum::<usize>() * count * new_tokens) as f64 } else { 0.0 };
        let squares = count as f64 * lens.iter().map(row_squares).sum::<f64>();
        Self { computed: tokens, heads: tokens, squares, crossed, ..Self::default() }
    }
}

fn square(len: usize) -> f64 {
    (len as f64).powi(2)
}

/// Operations of a forward pass of a model.
pub(super) fn forward(sizes: &ModelSizes, read: Read) -> Operations {
    let [layers, head] = sizes.products();
    let c = sizes.config();
    // Queries times keys, and weights times values.
    let layer_width = c.num_attention_heads as f64 * c.head_dim as f64;
    let width = c.num_hidden_layers as f64 * layer_width;
    let encoder_width = c.encoder_layers.unwrap_or(0) as f64 * layer_width;
    let pairs = if c.causal { read.squares / 2.0 } else { read.squares };
    let source = 2.0 * read.source as f64 * sizes.source_products() as f64 + 4.0 * encoder_width * read.source_squares;
    Operations {
        layers: 2.0 * read.computed as f64 * layers as f64 + 4.0 * width * (pairs + read.crossed) + source,
        head: 2.0 * read.heads as f64 * head as f64,
    }
}

/// Operations of a forward and backward pass, as a multiple of those of the forward pass. The backward pass has one product for the
/// gradient of the input, and one for the gradient of a trained weight.
pub(super) fn factor(job: &Job<'_>, member: &Member<'_>) -> f64 {
    let trained = if member.adapter.is_some() { 2.0 } else { 3.0 };
    trained + if job.run.run().gradient_checkpointing { 1.0 } else { 0.0 }
}
