//! Attention of layers that differ in their heads, some of which use the keys and values of an earlier layer (Gemma 4).

use super::{Attention, Decoder, Layer, Pass, rotate};
use tch::{Kind, Tensor};

impl Decoder {
    /// The heads' outputs `[N, heads * head_dim]` of layer `i`, by libtorch's own operations.
    pub(super) fn attend_by_layer(
        &self,
        i: usize,
        layer: &Layer,
        projections: &[Tensor],
        pass: &mut Pass<'_>,
    ) -> Tensor {
        let heads = self.shape.layer_shape(i);
        let angles = self.shape.layer_ropes[i].map(|rope| &pass.rotations[rope]);
        let by_head = |x: &Tensor| x.view([-1, x.size()[1] / heads.head_dim, heads.head_dim]);
        let rotated = |x: &Tensor, norm: usize| {
            let normed = layer.qk_norm[norm].forward_heads(&by_head(x), self.compute);
            angles
                .map_or_else(|| normed.shallow_clone(), |angles| rotate(&normed, angles, self.compute))
                .to_kind(self.compute)
        };
        let q = rotated(&projections[0], 0);
        let keys_values = projections.get(1).map(|keys| {
            let values = by_head(projections.get(2).unwrap_or(keys)).to_kind(Kind::Float);
            // A norm without a weight.
            let values = values.rms_norm([heads.head_dim], None::<&Tensor>, self.shape.norm_eps);
            (rotated(keys, 1), values.to_kind(self.compute))
        });
        let scores = &layer.scores;
        match &mut pass.attention {
            Attention::Step(cache) => cache.attend_step(i, scores, &q, keys_values.as_ref(), None),
            Attention::Appended(cache) => cache.attend_appended(i, scores, &q, keys_values.as_ref()),
            Attention::Sequences(layout, cache) => {
                if let (Some(cache), Some((keys, values))) = (cache, &keys_values) {
                    cache.store_sequences(i, keys, values);
                }
                let (keys, values) = keys_values.unwrap_or_else(|| {
                    let earlier = heads.keys_from.and_then(|source| pass.keys.get(&source));
                    let (keys, values) = earlier.expect("the layer that is the source came before");
                    (keys.shallow_clone(), values.shallow_clone())
                });
                let attended = layout.attend(scores, [&q, &keys, &values], None, None);
                if self.shape.is_source_of_keys(i) {
                    pass.keys.insert(i, (keys, values));
                }
                attended
            }
        }
    }
}
