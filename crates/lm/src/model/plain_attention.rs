//! Memory of attention that no kernel computes: sequences padded to one length, and the scores of all pairs of tokens if libtorch has no
//! attention function for them (soft caps, sinks).

use super::shape::Shape;
use super::uses_kernels;
use tch::{Device, Kind};

/// Attention by libtorch's operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PlainAttention {
    /// Whether the scores are computed and stored.
    has_scores: bool,
}

/// The longest row whose scores without a gradient are computed at once, and the number of scores in a block of longer ones.
const LONG: f64 = 4096.0;
const BLOCK: f64 = (1 << 23) as f64;

impl PlainAttention {
    /// The attention of a model; `None` if kernels compute it, or libtorch's attention over packed sequences.
    pub(super) fn of(shape: &Shape, compute: Kind, device: Device) -> Option<Self> {
        let has_scores = shape.has_sinks || shape.attention_softcap.is_some();
        let in_kernels = !shape.has_sinks && shape.layer_shapes.is_empty() && uses_kernels(compute, device);
        let over_packed = device.is_cuda() && compute != Kind::Float && !has_scores && shape.head_dim <= 256;
        let biased = shape.relative_bias.is_some() || shape.relative.is_some();
        (!in_kernels && !over_packed && !biased).then_some(Self { has_scores })
    }

    /// Number of scores of a layer.
    fn scores(self, shape: &Shape, [rows, width]: [usize; 2]) -> f64 {
        if self.has_scores { shape.num_attention_heads as f64 * rows as f64 * (width as f64).powi(2) } else { 0.0 }
    }

    /// Bytes that a layer stores: queries, keys and values of each query head, and their result; scores before and after their softmax; masks.
    pub(super) fn stored_bytes(self, shape: &Shape, rows: [usize; 2], kind: f64) -> f64 {
        let [queries, _] = shape.mean_widths();
        let (padded, width) = ((rows[0] * rows[1]) as f64, rows[1] as f64);
        // Kept for the backward pass: the softmax in f32. With sinks, a copy without their columns, in the dtype of the products. Without sinks,
        // the capped scores in f32 and, where products have 16 bits, a copy of the softmax in that dtype.
        let score_bytes = match (kind < 4.0, shape.has_sinks) {
            (false, _) => 8.0,
            (true, true) => 6.0,
            (true, false) => 10.0,
        };
        let has_mask = |window: &Option<i64>| window.is_some_and(|window| (window as f64) < width);
        let masks = shape.windows.iter().filter(|window| has_mask(window)).count() as f64;
        let mask_bytes = masks / shape.num_hidden_layers.max(1) as f64 * width.powi(2) * kind;
        padded * (4.0 * queries * kind + 4.0 * shape.num_attention_heads as f64)
            + self.scores(shape, rows) * score_bytes
            + mask_bytes
    }

    /// Bytes in use at once in the backward pass of a layer: gradients of the scores, in the steps from their softmax to their product.
    pub(super) fn working_bytes(self, shape: &Shape, rows: [usize; 2]) -> f64 {
        16.0 * self.scores(shape, rows)
    }

    /// Bytes in use at once in a layer without gradients, in addition to the projections.
    pub(super) fn forward_bytes(self, shape: &Shape, rows: [usize; 2], kind: f64) -> f64 {
        let [queries, _] = shape.mean_widths();
        let scores = self.scores(shape, rows);
        let scores = if rows[1] as f64 > LONG { scores.min(BLOCK) } else { scores };
        (rows[0] * rows[1]) as f64 * 4.0 * queries * kind + 12.0 * scores
    }
}
