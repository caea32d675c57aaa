//! Settings of Gemma 4: sizes that differ between layers with a window and without, and its rotary angles.

use super::super::forms::{
    LAYER_INPUT, LOCAL_BASE, LOCAL_KEY, LOCAL_ROTATED, LOCAL_VALUE, LOGIT_CAP, PATTERN, SHARED_KEYS, WINDOW,
};
use super::extras::Sizes;
use super::{ROPE_FACTORS, Settings};
use rlhf_base::Result;
use rlhf_base::safe_text::beginning;
use rlhf_lm::gguf::Value as Meta;
use serde_json::{Map, Value, json};
use tch::Kind;

/// Number of key heads, one for all layers or one for each.
const KEY_HEADS: &str = "attention.head_count_kv";
const WIDTHS: &str = "feed_forward_length";

/// The factor of an angle that is 0, from which on llama.cpp's divisors count as infinite.
const HUGE: f32 = 1e20;

impl Settings<'_> {
    /// The width of a head in layers with windows.
    pub(super) fn local_width(&self) -> Result<i64> {
        let width = self.size(LOCAL_KEY)?;
        for name in [LOCAL_VALUE, LOCAL_ROTATED] {
            self.expect(name, width, "the width of a head in layers with windows")?;
        }
        Ok(width)
    }

    fn expect(&self, name: &str, expected: i64, reason: &str) -> Result<()> {
        match self.optional(name)?.filter(|found| *found != expected) {
            None => Ok(()),
            Some(found) => {
                Err(self.file.error(format!("`{}`: expected {expected}, {reason}, found {found}", self.key(name))))
            }
        }
    }

    /// Whether each layer has a window.
    fn local_layers(&self) -> Result<Vec<bool>> {
        let ([layers, _], key) = (self.layers()?, self.key(PATTERN));
        let all = match self.file.metadata().get(&key) {
            Some(Meta::Integer(period @ 1..)) => (1..=layers).map(|number| number % period != 0).collect(),
            _ => self
                .by_layer(PATTERN, layers)?
                .ok_or_else(|| self.file.error(format!("expected the key `{key}`, found none")))?,
        };
        if all.last() == Some(&true) {
            let message = format!("`{key}`: expected no window in the last layer, as the model has none, found one");
            return Err(self.file.error(message));
        }
        Ok(all)
    }

    /// Refuses a scaling of the angles, which are those of the factors in the file.
    fn check_unscaled(&self) -> Result<()> {
        let key = self.key("rope.scaling.type");
        if let Some(found) = self.file.text(&key)?.filter(|found| *found != "none") {
            let found = beginning(found, 120);
            return Err(self.file.error(format!("`{key}`: expected none beside `{ROPE_FACTORS}`, found {found:?}")));
        }
        for key in ["rope.scaling.factor", "rope.scale_linear"].map(|name| self.key(name)) {
            if let Some(found) = self.file.number(&key)?.filter(|found| *found != 1.0) {
                return Err(self.file.error(format!("`{key}`: expected 1 beside `{ROPE_FACTORS}`, found {found}")));
            }
        }
        Ok(())
    }

    /// One number for each layer of the key `name`, which may have one for all.
    fn numbers_by_layer(&self, name: &str, layers: usize, default: i64) -> Result<Vec<i64>> {
        let key = self.key(name);
        let Some(Meta::Integers(all)) = self.file.metadata().get(&key) else {
            return Ok(vec![self.optional(name)?.unwrap_or(default); layers]);
        };
        let wrong = all.iter().position(|n| !(1..=1 << 28).contains(n));
        if all.len() != layers || wrong.is_some() {
            let found = wrong
                .map_or_else(|| format!("{} of them", all.len()), |layer| format!("{} in layer {layer}", all[layer]));
            let message = format!("`{key}`: expected an integer from 1 for each of {layers} layers, found {found}");
            return Err(self.file.error(message));
        }
        Ok(all.clone())
    }

    /// The one number of `all` among the layers with a window, or without.
    fn of_kind(&self, all: &[i64], local: &[bool], kind: bool, name: &str) -> Result<Option<i64>> {
        let mut found = all.iter().zip(local).filter(|(_, local)| **local == kind).map(|(n, _)| *n);
        let Some(first) = found.next() else { return Ok(None) };
        match found.find(|n| *n != first) {
            None => Ok(Some(first)),
            Some(other) => {
                let key = self.key(name);
                let message =
                    format!("`{key}`: expected one number for all layers of a kind, found {first} and {other}");
                Err(self.file.error(message))
            }
        }
    }

    /// The number of key heads in layers with windows; without such layers, in the others.
    pub(super) fn local_heads(&self, heads: i64) -> Result<i64> {
        let local = self.local_layers()?;
        let all = self.numbers_by_layer(KEY_HEADS, local.len(), heads)?;
        let of_kind = |kind: bool| self.of_kind(&all, &local, kind, KEY_HEADS);
        Ok(of_kind(true)?.or(of_kind(false)?).unwrap_or(heads))
    }

    /// Everything that other families lack, but experts and angles.
    pub(super) fn gemma4(&self, sizes: Sizes) -> Result<Map<String, Value>> {
        let local = self.local_layers()?;
        let layers = local.len();
        let full_width = self.size("attention.key_length")?;
        for name in ["attention.value_length", "rope.dimension_count"] {
            self.expect(name, full_width, "the width of a head in layers without a window")?;
        }
        let key_heads = self.numbers_by_layer(KEY_HEADS, layers, sizes.heads)?;
        let full_heads = self.of_kind(&key_heads, &local, false, KEY_HEADS)?;
        let shared = self.optional(SHARED_KEYS)?.unwrap_or(0).min(layers as i64);
        let own = layers - shared as usize;
        let has_values =
            |(layer, _): &(usize, &bool)| self.file.tensors().contains_key(&format!("blk.{layer}.attn_v.weight"));
        let full_layers = || local.iter().enumerate().take(own).filter(|(_, local)| !**local);
        let values_are_keys = full_layers().next().is_some() && !full_layers().any(|layer| has_values(&layer));
        let widths = self.numbers_by_layer(WIDTHS, layers, 0)?;
        let is_wide = shared > 0 && widths[own..].iter().all(|width| *width == 2 * widths[0]);
        let expected = |layer: usize| if is_wide && layer >= own { 2 * widths[0] } else { widths[0] };
        if let Some(layer) = (0..layers).find(|layer| widths[*layer] != expected(*layer)) {
            let (key, found) = (self.key(WIDTHS), widths[layer]);
            let expected = "expected one width, or twice in layers that share keys";
            return Err(self.file.error(format!("`{key}`: {expected}, found {found} in layer {layer}")));
        }
        let kind = |local: &bool| if *local { "sliding_attention" } else { "full_attention" };
        let vocab = self.file.tensors().get("per_layer_token_embd.weight").map(|entry| entry.shape[0]);
        let mut all = Map::from_iter([
            ("hidden_activation".into(), json!("gelu_pytorch_tanh")),
            ("layer_types".into(), json!(local.iter().map(kind).collect::<Vec<_>>())),
            ("sliding_window".into(), json!(self.size(WINDOW)?)),
            ("global_head_dim".into(), json!(full_width)),
            ("attention_k_eq_v".into(), json!(values_are_keys)),
            ("num_kv_shared_layers".into(), json!(shared)),
            ("use_double_wide_mlp".into(), json!(is_wide)),
            ("hidden_size_per_layer_input".into(), json!(self.optional(LAYER_INPUT)?.unwrap_or(0))),
            ("enable_moe_block".into(), json!(false)),
            ("final_logit_softcapping".into(), json!(self.file.number(&self.key(LOGIT_CAP))?)),
        ]);
        all.extend(vocab.map(|rows| ("vocab_size_per_layer_input".to_string(), json!(rows))));
        let differ = full_heads.filter(|_| values_are_keys);
        all.extend(differ.map(|heads| ("num_global_key_value_heads".to_string(), json!(heads))));
        if let Some(full) = full_heads.filter(|_| !values_are_keys) {
            let local = self.local_heads(sizes.heads)?;
            if full != local {
                let key = self.key(KEY_HEADS);
                let expected = "expected one number for all layers, whose values are not the keys";
                return Err(self.file.error(format!("`{key}`: {expected}, found {local} and {full}")));
            }
        }
        Ok(all)
    }

    /// The angles: of layers without a window as for whole heads, those that the divisors make 0 left out.
    pub(super) fn proportional(&self, theta: f64) -> Result<Map<String, Value>> {
        self.check_unscaled()?;
        let width = self.size("attention.key_length")?;
        let divisors = Vec::<f32>::try_from(self.file.read(ROPE_FACTORS, Kind::Float)?.f_view([-1])?)?;
        let angles = divisors.iter().take_while(|divisor| **divisor == 1.0).count();
        let wrong = divisors.iter().skip(angles).position(|divisor| *divisor < HUGE).map(|after| angles + after);
        if 2 * divisors.len() as i64 != width || wrong.is_some() {
            let found = wrong.map_or_else(
                || format!("{} of them", divisors.len()),
                |at| format!("{:?} at index {at}", divisors[at]),
            );
            let expected = format!("expected {} divisors, 1 and then 1e30", width / 2);
            return Err(self.file.error(format!("tensor `{ROPE_FACTORS}`: {expected}, found {found}")));
        }
        let local = self.file.number(&self.key(LOCAL_BASE))?.unwrap_or(10_000.0);
        let mut share = 2.0 * angles as f64 / width as f64;
        if ((width as f64 * share / 2.0) as usize) < angles {
            // transformers truncates the product.
            share *= 1.0 + f64::EPSILON;
        }
        Ok(Map::from_iter([(
            "rope_parameters".into(),
            json!({
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": theta},
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            }),
        )]))
    }
}
