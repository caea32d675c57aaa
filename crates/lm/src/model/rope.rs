//! Rotary positions: their settings in `config.json`, and their angles.

use super::shape::{Fields, Rope, RopeScaling};
use rlhf_base::{Error, Result};
use serde_json::{Map, Value};
use std::f64::consts::TAU;
use tch::{Kind, Tensor};
use tch_ext::on_device;

/// Names and defaults of a family's rotary settings.
#[derive(Clone, Copy)]
pub(super) struct RopeKeys {
    /// Name of the base in files of transformers before version 5.
    pub(super) theta: &'static str,
    pub(super) default_theta: f64,
    /// Name of the fraction of a head's dimensions that is rotated, in files of transformers before version 5.
    pub(super) fraction: &'static str,
    pub(super) default_fraction: f64,
    /// Old name and default of the base in layers with a window, if these have their own rotary positions.
    pub(super) local: Option<(&'static str, f64)>,
    /// The length that the model was pretrained on, if the file does not state it; `None`: its maximum length.
    pub(super) default_original: Option<f64>,
}

/// The keys of Llama and its successors.
pub(super) const ROPE: RopeKeys = RopeKeys {
    theta: "rope_theta",
    default_theta: 10000.0,
    fraction: "partial_rotary_factor",
    default_fraction: 1.0,
    local: None,
    default_original: None,
};

/// Names in `rope_parameters` of the settings of layers without and with a window, if they differ.
const BY_LAYER: [&str; 2] = ["full_attention", "sliding_attention"];

/// Chooses between the settings in the formats of transformers 5 and 4; returns them with their name.
fn chosen<'a>(new: &'a Map<String, Value>, old: &'a Map<String, Value>) -> (&'static str, &'a Map<String, Value>) {
    if old.is_empty() { ("rope_parameters", new) } else { ("rope_scaling", old) }
}

impl Fields<'_> {
    /// Rotary settings of all layers, or of layers without a window and layers with one. transformers 5 stores them in
    /// `rope_parameters`, transformers 4 among the other fields and in `rope_scaling`, which takes precedence if both are there.
    pub(super) fn ropes(&self, head_dim: i64, keys: &RopeKeys) -> Result<Vec<Rope>> {
        let empty = Map::new();
        let (new, scaling) = (self.object("rope_parameters", &empty)?, self.object("rope_scaling", &empty)?);
        let within = |raw| Fields { path: self.path, raw, family: self.family };
        let theta = self.number(keys.theta, keys.default_theta)?;
        if let Some((local, default)) = keys.local {
            let [full, sliding] = BY_LAYER;
            if !new.is_empty() && !BY_LAYER.iter().any(|name| new.contains_key(*name)) {
                return Err(self.wrong("rope_parameters", &format!("an object with {full} and {sliding}")));
            }
            let new = within(new);
            let (global, local_settings) = (new.object(full, &empty)?, new.object(sliding, &empty)?);
            let (holder, global) = self.new_or_scaling((full, global), scaling)?;
            let local = self.number(local, default)?;
            let rope = |holder, object, theta| self.read_rope(head_dim, keys, holder, &within(object), theta);
            return Ok(vec![rope(holder, global, theta)?, rope(sliding, local_settings, local)?]);
        }
        let (holder, object) = chosen(new, scaling);
        if object.values().any(Value::is_object) {
            return Err(self.wrong(holder, "the same settings for all layers"));
        }
        Ok(vec![self.read_rope(head_dim, keys, holder, &within(object), theta)?])
    }

    /// The settings of all layers' rotary positions, empty if there are none.
    pub(super) fn rope_settings(&self) -> Result<Map<String, Value>> {
        let empty = Map::new();
        let (_, object) = chosen(self.object("rope_parameters", &empty)?, self.object("rope_scaling", &empty)?);
        Ok(object.clone())
    }

    /// Rotary settings of one kind of layers, with heads of `head_dim`: the object `kind` in `rope_parameters`, or in `default` if there are no
    /// settings of any kind.
    ///
    /// # Errors
    /// If a setting is not supported; if only the other kind has settings.
    pub(super) fn rope_of_kind(&self, kind: &'static str, head_dim: i64, default: &Value) -> Result<Rope> {
        let empty = Map::new();
        let all = self.object("rope_parameters", &empty)?;
        let all = if all.is_empty() { default.as_object().unwrap_or(&empty) } else { all };
        let within = |raw| Fields { path: self.path, raw, family: self.family };
        let all = within(all);
        let settings = within(all.object(kind, &empty)?);
        if settings.raw.is_empty() {
            return Err(self.wrong("rope_parameters", &format!("an object with {}", BY_LAYER.join(" and "))));
        }
        if settings.present("rope_type").is_none_or(|name| name != "proportional") {
            return self.read_rope(head_dim, &ROPE, kind, &settings, ROPE.default_theta);
        }
        let share = settings.number("partial_rotary_factor", 1.0)?;
        let theta = settings.positive("rope_theta", Some(ROPE.default_theta))?;
        let angles = (share * head_dim as f64 / 2.0).floor() as i64;
        if !(head_dim % 2 == 0 && (0..=head_dim / 2).contains(&angles)) {
            return Err(settings.wrong("partial_rotary_factor", "a number from 0 to 1, of heads of an even width"));
        }
        let factor = settings.positive("factor", Some(1.0))?;
        Ok(Rope { theta, dim: head_dim, scaling: RopeScaling::Proportional { angles, factor } })
    }

    /// The object `name`; `empty` if there is none.
    fn object<'a>(&'a self, name: &str, empty: &'a Map<String, Value>) -> Result<&'a Map<String, Value>> {
        match self.present(name) {
            None => Ok(empty),
            Some(value) => value.as_object().ok_or_else(|| self.wrong(name, "an object")),
        }
    }

    /// The new settings of a kind of layers with their name, or else the settings in `rope_scaling`.
    fn new_or_scaling<'a>(
        &self,
        (name, new): (&'static str, &'a Map<String, Value>),
        scaling: &'a Map<String, Value>,
    ) -> Result<(&'static str, &'a Map<String, Value>)> {
        if new.is_empty() {
            return Ok(("rope_scaling", scaling));
        }
        if !scaling.is_empty() && new != scaling {
            return Err(self.wrong("rope_scaling", "none beside `rope_parameters`, or the same"));
        }
        Ok((name, new))
    }

    /// The rotary positions that the object `holder`, with the fields `f`, describes; `theta` is the base if it names none.
    fn read_rope(&self, head_dim: i64, keys: &RopeKeys, holder: &str, f: &Fields<'_>, theta: f64) -> Result<Rope> {
        let theta = f.number("rope_theta", theta)?;
        let fraction = "partial_rotary_factor";
        let share = f.number(fraction, self.number(keys.fraction, keys.default_fraction)?)?;
        let dim = (head_dim as f64 * share) as i64;
        if !(dim > 0 && dim % 2 == 0 && dim <= head_dim && theta > 0.0) {
            let message = format!("rotary positions: expected an even share of {head_dim} dimensions, found {dim}");
            return Err(Error::invalid(self.path, message));
        }
        let is_whole = keys.fraction == fraction && keys.default_fraction == 1.0;
        if dim != head_dim && is_whole && self.family.name != "phi3" {
            // transformers reads the field for Phi-3 and families with another default, and ignores it for the others.
            let read = if f.present(fraction).is_some() { f } else { self };
            return Err(read.wrong(fraction, "1, or none"));
        }
        let scaling = self.rope_scaling(holder, keys, f, dim)?;
        if matches!(scaling, RopeScaling::Dynamic { .. }) && dim <= 2 {
            let message = format!("dynamic rotary positions: expected more than 2 dimensions, found {dim}");
            return Err(Error::invalid(self.path, message));
        }
        Ok(Rope { theta, dim, scaling })
    }

    fn rope_scaling(&self, holder: &str, keys: &RopeKeys, f: &Fields<'_>, dim: i64) -> Result<RopeScaling> {
        let kind = f.present("rope_type").or_else(|| f.present("type")).map_or(Some("default"), Value::as_str);
        let kind = match kind {
            // Old names in the files of Phi-3.
            Some("su" | "yarn") if self.family.name == "phi3" => Some("longrope"),
            kind => kind,
        };
        let factor = || f.positive("factor", None);
        let longest = || self.positive("max_position_embeddings", Some(2048.0));
        let original = || -> Result<f64> {
            let name = "original_max_position_embeddings";
            // As in transformers 5, the field next to the object takes precedence.
            let holder = if self.present(name).is_some() { self } else { f };
            holder.positive(name, Some(keys.default_original.map_or_else(longest, Ok)?))
        };
        Ok(match kind {
            Some("default") => RopeScaling::Default,
            Some("linear") => RopeScaling::Linear { factor: factor()? },
            Some("dynamic") => RopeScaling::Dynamic { factor: factor()?, original: longest()? },
            Some("llama3") => {
                let (low, high) = (f.positive("low_freq_factor", None)?, f.positive("high_freq_factor", None)?);
                if low >= high {
                    return Err(f.wrong("low_freq_factor", &format!("a number below high_freq_factor = {high}")));
                }
                RopeScaling::Llama3 {
                    factor: factor()?,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original: original()?,
                }
            }
            Some("yarn") => f.yarn(original()?, longest()?)?,
            Some("longrope") => f.longrope(original()?, longest()?, dim)?,
            _ => return Err(self.wrong(holder, "a rope_type of default, linear, dynamic, llama3, yarn or longrope")),
        })
    }

    fn yarn(&self, original: f64, longest: f64) -> Result<RopeScaling> {
        // `null` is the ratio of the two lengths.
        let ratio = self.raw.contains_key("factor").then_some(longest / original);
        let factor = self.positive("factor", ratio)?;
        let (beta_fast, beta_slow) = (self.positive("beta_fast", Some(32.0))?, self.positive("beta_slow", Some(1.0))?);
        if beta_slow >= beta_fast {
            return Err(self.wrong("beta_slow", &format!("a number below beta_fast = {beta_fast}")));
        }
        let grown = |weight: f64| if factor > 1.0 { 0.1 * weight * factor.ln() + 1.0 } else { 1.0 };
        let [mscale, all_dim] = [self.number("mscale", 0.0)?, self.number("mscale_all_dim", 0.0)?];
        let usual = if mscale != 0.0 && all_dim != 0.0 { grown(mscale) / grown(all_dim) } else { grown(1.0) };
        Ok(RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            truncate: self.flag("truncate", true)?,
            attention_factor: self.positive("attention_factor", Some(usual))?,
            original,
        })
    }

    fn longrope(&self, original: f64, longest: f64, dim: i64) -> Result<RopeScaling> {
        let factors = |name: &str| -> Result<Vec<f64>> {
            let numbers: Option<Vec<f64>> = self
                .present(name)
                .and_then(Value::as_array)
                .map(|list| list.iter().filter_map(Value::as_f64).filter(|x| (1e-6..=1e6).contains(x)).collect());
            let all = self.present(name).and_then(Value::as_array).map_or(0, Vec::len);
            numbers
                .filter(|numbers| numbers.len() == all && all as i64 == dim / 2)
                .ok_or_else(|| self.wrong(name, &format!("{} numbers from 1e-6 to 1e6", dim / 2)))
        };
        let factor = self.positive("factor", Some(longest / original))?;
        let usual = if factor > 1.0 && original > 1.0 { (1.0 + factor.ln() / original.ln()).sqrt() } else { 1.0 };
        Ok(RopeScaling::LongRope {
            short: factors("short_factor")?,
            long: factors("long_factor")?,
            attention_factor: self.positive("attention_factor", Some(usual))?,
            original,
        })
    }

    /// Maximum text length in tokens with rotary positions trained on `positions` tokens.
    pub(super) fn longest(positions: i64, rope: &Rope) -> usize {
        match rope.scaling {
            RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor, .. } => {
                (positions as f64 * factor) as usize
            }
            // Files state the length before or after scaling.
            RopeScaling::Yarn { factor, original, .. } => (positions as f64).max(original * factor) as usize,
            RopeScaling::Default
            | RopeScaling::Proportional { .. }
            | RopeScaling::Llama3 { .. }
            | RopeScaling::LongRope { .. } => positions as usize,
        }
    }
}

impl Rope {
    /// Cosines and sines of the rotary angles of tokens at `positions` `[N]` i64: `[N, dim / 2]` f32 each. `lens` returns the length of
    /// each token's sequence, `[N]` i64.
    pub(super) fn rotation(&self, positions: &Tensor, lens: impl Fn() -> Tensor) -> (Tensor, Tensor) {
        let options = (Kind::Float, positions.device());
        // In f32 whatever the compute dtype: bf16 holds 641 distinct integers in 0..2048, so positions would share angles.
        let exponents = Tensor::arange_start_step(0, self.dim, 2, options) / self.dim as f64;
        let plain = || Tensor::full([1], self.theta, options).pow(&exponents).reciprocal().unsqueeze(0);
        let (inv_freq, attention_factor) = match &self.scaling {
            RopeScaling::Default => (plain(), 1.0),
            RopeScaling::Linear { factor } => (plain() / *factor, 1.0),
            RopeScaling::Proportional { angles, factor } => {
                let is_rotated = Tensor::arange(self.dim / 2, options).lt(*angles).unsqueeze(0);
                (plain() * is_rotated / *factor, 1.0)
            }
            RopeScaling::Dynamic { factor, original } => {
                let lens = lens().to_kind(Kind::Float).clamp_min(*original).unsqueeze(1);
                let growth = (lens * (factor / original) - (factor - 1.0))
                    .pow_tensor_scalar(self.dim as f64 / (self.dim - 2) as f64);
                ((growth * self.theta).pow(&exponents.unsqueeze(0)).reciprocal(), 1.0)
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
                let inv_freq = plain();
                // Rotations over the original length, scaled to the two bounds: 0 and less is slow, 1 and more is fast.
                let turns = &inv_freq * (original / TAU);
                let fast = ((turns - *low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                (&inv_freq * &fast + &inv_freq * (1.0 - &fast) / *factor, 1.0)
            }
            RopeScaling::Yarn { factor, attention_factor, .. } => {
                let [first, last] = self.yarn_range();
                let places = Tensor::arange(self.dim / 2, options);
                let slow = ((places - first) / (last - first)).clamp(0.0, 1.0).unsqueeze(0);
                let inv_freq = plain();
                (&inv_freq * (1.0 - &slow) + &inv_freq * &slow / *factor, *attention_factor)
            }
            RopeScaling::LongRope { short, long, attention_factor, original } => {
                let divisors = |numbers: &[f64]| on_device(numbers, options.1).to_kind(Kind::Float).unsqueeze(0);
                let is_long = lens().gt(*original).unsqueeze(1);
                (plain() / divisors(long).where_self(&is_long, &divisors(short)), *attention_factor)
            }
        };
        let angles = positions.to_kind(Kind::Float).unsqueeze(1) * inv_freq;
        if attention_factor == 1.0 {
            (angles.cos(), angles.sin())
        } else {
            (angles.cos() * attention_factor, angles.sin() * attention_factor)
        }
    }

    /// The dimensions of a head between which YaRN blends: up to the first, angles are kept, from the last on, they are divided.
    fn yarn_range(&self) -> [f64; 2] {
        let RopeScaling::Yarn { beta_fast, beta_slow, truncate, original, .. } = self.scaling else {
            return [0.0, 1.0];
        };
        // The dimension that rotates so many times over the original length.
        let dimension = |turns: f64| self.dim as f64 * (original / (turns * TAU)).ln() / (2.0 * self.theta.ln());
        let (first, last) = (dimension(beta_fast), dimension(beta_slow));
        let (first, last) = if truncate { (first.floor(), last.ceil()) } else { (first, last) };
        let (first, last) = (first.max(0.0), last.min((self.dim - 1) as f64));
        [first, if first == last { last + 0.001 } else { last }]
    }
}
