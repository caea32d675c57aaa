//! The bias of attention scores by the distance of two tokens (T5).

use super::shape::RelativeBias;
use tch::{Kind, Tensor};

impl RelativeBias {
    /// The bucket of each distance, of any shape, i64. Distances are the key's position minus the query's.
    ///
    /// In a causal stack no key lies behind its query, so all buckets are for earlier tokens.
    ///
    /// Computed as in transformers, in f32: the bucket of a distance at a boundary depends on the rounding.
    pub(super) fn bucket_indices(self, distances: &Tensor, causal: bool) -> Tensor {
        let Self { buckets, max_distance } = self;
        let (buckets, first, distances) = if causal {
            (buckets, None, distances.clamp_max(0).neg())
        } else {
            let later = distances.gt(0).to_kind(Kind::Int64) * (buckets / 2);
            (buckets / 2, Some(later), distances.abs())
        };
        let exact = buckets / 2;
        // At least 1, as the logarithm of 0 has no bucket; the small ones are replaced.
        let ratio = distances.clamp_min(1).to_kind(Kind::Float) / exact as f64;
        let steps = ratio.log() / (max_distance as f64 / exact as f64).ln() * (buckets - exact) as f64;
        let wide = (steps.to_kind(Kind::Int64) + exact).clamp_max(buckets - 1);
        let bucket = distances.where_self(&distances.lt(exact), &wide);
        match first {
            Some(first) => bucket + first,
            None => bucket,
        }
    }

    /// The bias `[rows, heads, queries, keys]` f32 at `distances` `[rows, queries, keys]` i64, from the `table` `[buckets, heads]`;
    /// differentiable. In a causal stack, keys behind their query have -inf.
    pub(super) fn scores(self, table: &Tensor, distances: &Tensor, causal: bool) -> Tensor {
        let buckets = self.bucket_indices(distances, causal);
        let flat = table.to_kind(Kind::Float).index_select(0, &buckets.view([-1]));
        let shape = [distances.size(), vec![table.size()[1]]].concat();
        let scores = flat.view(shape.as_slice()).permute([0, 3, 1, 2]);
        if causal { scores.masked_fill(&distances.gt(0).unsqueeze(1), f64::NEG_INFINITY) } else { scores.contiguous() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    #[test]
    fn small_distances_have_a_bucket_each_and_large_ones_share_the_last() {
        // T5Attention._relative_position_bucket(arange(-20, 21), bidirectional, 8, 16) of transformers 5.23.0.
        let distances = Tensor::arange_start(-20, 21, (Kind::Int64, Device::Cpu));
        let found = |causal| {
            let bias = RelativeBias { buckets: 8, max_distance: 16 };
            Vec::<i64>::try_from(bias.bucket_indices(&distances, causal)).unwrap()
        };
        let both: Vec<i64> = [[3; 15].to_vec(), vec![2, 2, 2, 2, 1, 0, 5, 6, 6, 6, 6], [7; 15].to_vec()].concat();
        assert_eq!(found(false), both);
        let causal = [[7; 9].to_vec(), vec![6, 6, 6, 6, 5, 5, 4, 4, 3, 2, 1], [0; 21].to_vec()].concat();
        assert_eq!(found(true), causal);
    }
}
