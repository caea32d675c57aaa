//! Relative positions of disentangled attention (DeBERTa): position embeddings, projected by each layer.

use super::layout::RelativeScores;
use super::linear::{Linear, Norm};
use super::params::{Builder, Init};
use super::shape::{RelativeAttention, Shape};
use rlhf_base::Result;
use tch::{Device, Kind, Tensor};

/// The position embeddings that all layers share.
#[derive(Debug)]
pub(super) struct RelativePositions {
    /// `[2 * span, hidden]`.
    table: Tensor,
    pub(super) norm: Option<Norm>,
    attention: RelativeAttention,
    head_dim: i64,
}

impl RelativePositions {
    /// Builds the table and its norm, if the model has relative positions.
    pub(super) fn build(b: &mut Builder<'_>, shape: &Shape) -> Result<Option<Self>> {
        let (Some(attention), Some([table, norm])) = (shape.relative, shape.family.names.relative) else {
            return Ok(None);
        };
        let rows = 2 * attention.span();
        let init = Init::Normal(shape.initializer_range);
        let table = b.embedding(format!("{table}.weight"), &[rows, shape.hidden_size], init)?;
        let norm = attention.norm.then(|| Norm::build(b, norm, shape.hidden_size, shape)).transpose()?;
        Ok(Some(Self { table, norm, attention, head_dim: shape.head_dim }))
    }

    /// A layer's relative positions, for sequences of at most `width` tokens; `query` and `key` are its projections, whose products
    /// are not affected by dropout before their adapters.
    ///
    /// The norm is computed in each layer, so that each layer has a backward pass of its own.
    pub(super) fn for_layer(&self, width: i64, [query, key]: [&Linear; 2]) -> RelativeScores {
        let span = self.attention.span();
        let rows = (signed_buckets(width, &self.attention) + span).clamp(0, 2 * span - 1);
        // Only the rows from the farthest distance to the left to the farthest to the right are read.
        let (first, last) = (rows.int64_value(&[0]), rows.int64_value(&[-1]));
        let used = self.table.narrow(0, first, last + 1 - first).to_kind(Kind::Float);
        let used = self.norm.as_ref().map_or(used.shallow_clone(), |norm| norm.forward(&used, Kind::Float));
        let project = |linear: &Linear| linear.forward(&used).view([last + 1 - first, -1, self.head_dim]);
        RelativeScores {
            keys: self.attention.content_to_position.then(|| project(key)),
            queries: self.attention.position_to_content.then(|| project(query)),
            row_of_distance: (rows - first).to_device(self.table.device()),
        }
    }
}

/// The signed bucket of each distance from `-(width - 1)` to `width - 1`, `[2 * width - 1]` i64 on the CPU.
fn signed_buckets(width: i64, attention: &RelativeAttention) -> Tensor {
    let distances = Tensor::arange_start(1 - width, width, (Kind::Int64, Device::Cpu));
    let Some(buckets) = attention.buckets else { return distances };
    // The order of transformers' operations, in f32, so that no rounding moves a distance to another bucket.
    let near = buckets / 2;
    let scale = Tensor::from(((attention.longest - 1) as f64 / near as f64) as f32).log();
    let far = (distances.abs().to_kind(Kind::Float) / near as f64).log() / scale * (near - 1) as f64;
    let far = far.ceil() + near as f64;
    let signed = (far * distances.sign().to_kind(Kind::Float)).to_kind(Kind::Int64);
    distances.where_self(&distances.abs().le(near), &signed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_distances_have_a_bucket_each_and_far_ones_share_logarithmic_buckets() {
        // DeBERTa-v3's settings. From transformers 5.23.0, `make_log_bucket_position`.
        let attention = RelativeAttention {
            buckets: Some(256),
            longest: 512,
            content_to_position: true,
            position_to_content: true,
            norm: true,
        };
        let found = Vec::<i64>::try_from(signed_buckets(512, &attention)).unwrap();
        let bucket_at = |distance: i64| found[(distance + 511) as usize];
        let near = [(0, 0), (1, 1), (127, 127), (128, 128)];
        let far = [
            (131, 131),
            (132, 131),
            (133, 132),
            (139, 136),
            (200, 169),
            (300, 207),
            (400, 233),
            (510, 255),
            (511, 255),
        ];
        for (distance, bucket) in near.into_iter().chain(far) {
            assert_eq!((bucket_at(distance), bucket_at(-distance)), (bucket, -bucket), "{distance}");
        }
    }
}
