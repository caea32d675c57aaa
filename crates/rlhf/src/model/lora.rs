//! Low-rank adapters (LoRA): small trained matrices beside frozen weights, and their settings.

use super::params::Param;
use super::shape::Family;
use crate::flag::{LORA, all, at_least_one, defaults, expect, usage};
use crate::rng::{Purpose, Stream};
use crate::{Error, Result};
use clap::Args;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::rc::Rc;
use tch::{Device, Kind, Tensor};

/// Suffixes of the names of an adapter's two tensors.
pub(super) const ENDS: [&str; 2] = ["lora_A.weight", "lora_B.weight"];

/// PEFT's names of classifiers' heads, which are trained in full and saved with the adapter.
pub(super) const HEADS: [&str; 2] = ["classifier", "score"];

/// Name of the value head on the trunk of a language model.
pub(super) const VALUE_HEAD: &str = "v_head";

/// Target that selects every linear layer except the output head.
pub(super) const ALL_LINEAR: &str = "all-linear";

/// Configuration of a new low-rank adapter; the defaults are those of TRL.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraConfig {
    /// The rank.
    pub r: usize,
    /// The adapter's product is scaled by `alpha / r`.
    pub alpha: f64,
    /// Dropout probability of the adapter's inputs in SFT and reward training; PPO applies no dropout.
    pub dropout: f64,
    /// The linear layers with adapters: suffixes of their names, or `all-linear`; `None` selects the family's default.
    pub target_modules: Option<Vec<String>>,
    /// Scale by `alpha / sqrt(r)` (rank-stabilized LoRA), so that a higher rank does not mean smaller steps.
    pub use_rslora: bool,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self { r: 16, alpha: 32.0, dropout: 0.05, target_modules: None, use_rslora: false }
    }
}

impl LoraConfig {
    pub(super) fn scale(&self) -> f64 {
        let r = self.r as f64;
        self.alpha / if self.use_rslora { r.sqrt() } else { r }
    }

    /// The content of `adapter_config.json` for an adapter of `layers`, without the base.
    pub(super) fn describe(&self, family: &Family, layers: &[String], classifier: bool) -> Map<String, Value> {
        // PEFT does not know suffixes that end with a dot, so the layers are listed.
        let all = self
            .target_modules
            .as_deref()
            .is_some_and(|names| is_all_linear(names) || names.iter().any(|n| is_part(n)));
        let targets = match &self.target_modules {
            Some(names) if !all => json!(names),
            Some(_) => json!(layers),
            None => json!(family.names.lora_targets),
        };
        let alpha = if self.alpha.fract() == 0.0 { json!(self.alpha as i64) } else { json!(self.alpha) };
        let described = json!({
            "bias": "none",
            "fan_in_fan_out": family.names.transposed,
            "inference_mode": true,
            "init_lora_weights": true,
            "lora_alpha": alpha,
            "lora_dropout": self.dropout,
            "modules_to_save": classifier.then_some(HEADS),
            "peft_type": "LORA",
            "r": self.r,
            "target_modules": targets,
            "task_type": family.peft_task(classifier),
            "use_dora": false,
            "use_rslora": self.use_rslora,
        });
        described.as_object().cloned().unwrap_or_default()
    }

    /// Selects the linear layers that get an adapter: one entry per layer.
    ///
    /// # Errors
    /// If a target matches none of them; if the rank is 0.
    pub(super) fn choose(&self, family: &Family, layers: &[String]) -> Result<Vec<bool>> {
        if self.r == 0 {
            return Err(Error::Usage("lora_r = 0: expected at least 1".into()));
        }
        let own = || family.names.lora_targets.iter().map(ToString::to_string).collect();
        let targets: Vec<String> = self.target_modules.clone().unwrap_or_else(own);
        if is_all_linear(&targets) {
            return Ok(vec![true; layers.len()]);
        }
        if let Some(target) = targets.iter().find(|target| !layers.iter().any(|layer| is_named(layer, target))) {
            let mut known: Vec<&str> = layers.iter().filter_map(|layer| layer.rsplit('.').next()).collect();
            known.sort_unstable();
            known.dedup();
            return Err(Error::Usage(format!(
                "lora_target_modules: expected linear layers of {}, found `{target}`; there are {}, and {ALL_LINEAR}",
                family.name,
                known.join(", ")
            )));
        }
        Ok(layers.iter().map(|layer| targets.iter().any(|target| is_named(layer, target))).collect())
    }
}

/// Maximum rank of an adapter: above any model's width.
pub(crate) const MOST_RANK: usize = 1 << 16;

/// Settings of low-rank adapters (LoRA) that are trained in place of all weights.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct PeftConfig {
    /// Train LoRA adapters; the model's own weights are frozen and stay in the checkpoint's dtype.
    #[arg(long, help_heading = LORA)]
    pub use_peft: bool,
    /// Rank of the LoRA adapters.
    #[arg(long, help_heading = LORA, default_value_t = 16)]
    pub lora_r: usize,
    /// LoRA alpha: an adapter's product is scaled by `lora_alpha / lora_r`.
    #[arg(long, help_heading = LORA, default_value_t = 32)]
    pub lora_alpha: usize,
    /// Dropout of the adapters' inputs in SFT and reward training. PPO applies none: its first probability ratios must be 1.
    #[arg(long, help_heading = LORA, default_value_t = 0.05)]
    pub lora_dropout: f64,
    /// Linear layers that get an adapter, by the ends of their names, or `all-linear` [default: those usual for the model family].
    #[arg(long, help_heading = LORA, value_delimiter = ',', num_args = 1..)]
    pub lora_target_modules: Vec<String>,
    /// Rank-stabilized LoRA: scale by `lora_alpha / sqrt(lora_r)`.
    #[arg(long, help_heading = LORA)]
    pub use_rslora: bool,
}

impl PeftConfig {
    /// Returns the adapter of these settings; `None` without `use_peft`.
    pub fn lora(&self) -> Option<LoraConfig> {
        let targets = &self.lora_target_modules;
        self.use_peft.then(|| LoraConfig {
            r: self.lora_r,
            alpha: self.lora_alpha as f64,
            dropout: self.lora_dropout,
            target_modules: (!targets.is_empty()).then(|| targets.clone()),
            use_rslora: self.use_rslora,
        })
    }

    pub(crate) fn check(&self) -> Result<()> {
        if !self.use_peft && *self != defaults() {
            return usage(
                "settings of LoRA are given, and use_peft = false: set --use_peft, else all weights are trained",
            );
        }
        let below_one = (0.0..1.0).contains(&self.lora_dropout);
        all([
            at_least_one("lora_r", self.lora_r),
            expect(self.lora_r <= MOST_RANK, "lora_r", self.lora_r, &format!("at most {MOST_RANK}")),
            at_least_one("lora_alpha", self.lora_alpha),
            expect(below_one, "lora_dropout", self.lora_dropout, "a number from 0 to below 1"),
        ])
    }
}

pub(super) fn is_all_linear(targets: &[String]) -> bool {
    matches!(targets, [only] if only.eq_ignore_ascii_case(ALL_LINEAR))
}

/// Whether a target matches any part of a layer's name, as DeepSpeed-Chat's `decoder.layers.` does.
fn is_part(target: &str) -> bool {
    target.ends_with('.')
}

/// Whether `target` is the layer's whole name or its last parts; if it ends with a dot, any part.
pub(super) fn is_named(layer: &str, target: &str) -> bool {
    if is_part(target) {
        return layer.contains(target);
    }
    layer.strip_suffix(target).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Whether a parameter of this name is one of an adapter's matrices.
pub(super) fn is_lora(name: &str) -> bool {
    ENDS.iter().any(|end| name.ends_with(end))
}

/// Whether a parameter of this name is trained beside a frozen base: an adapter's matrix, or a classifier's or value head.
pub(super) fn is_trained(name: &str) -> bool {
    is_lora(name) || is_below(name, VALUE_HEAD) || HEADS.iter().any(|head| is_below(name, head))
}

/// Whether a parameter of this name is a head that is trained in full beside an adapter.
pub(super) fn is_head(name: &str) -> bool {
    is_trained(name) && !is_lora(name)
}

/// Whether `name` is a tensor or a layer of the module `module`.
pub(super) fn is_below(name: &str, module: &str) -> bool {
    name.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Whether the layer is part of a head that is trained in full, which gets no adapter.
pub(super) fn is_in_head(layer: &str) -> bool {
    HEADS.iter().any(|head| is_below(layer, head))
}

/// The two matrices beside one weight: `scale * B A` is added to it. They are always f32.
#[derive(Debug)]
pub(crate) struct Adapter {
    /// `[r, in]`.
    pub(super) a: Tensor,
    /// `[out, r]`.
    pub(super) b: Tensor,
    pub(super) scale: f64,
}

impl Adapter {
    /// Initializes an adapter without effect: A as PEFT draws it, uniform within 1 / sqrt(in), B zeros.
    pub(super) fn fresh(config: &LoraConfig, widths: [i64; 2], device: Device, seed: u64, index: u64) -> Result<Self> {
        let ([width_in, width_out], r) = (widths, config.r as i64);
        let mut stream = Stream::new(seed, Purpose::Adapter, index, 0);
        let bound = (width_in as f64).sqrt().recip();
        let drawn: Vec<f32> = (0..r * width_in).map(|_| ((2.0 * stream.uniform() - 1.0) * bound) as f32).collect();
        let a = Tensor::f_from_slice(&drawn)?.view([r, width_in]).to_device(device);
        let b = Tensor::f_zeros([width_out, r], (Kind::Float, device))?;
        Ok(Self { a, b, scale: config.scale() })
    }

    pub(super) fn params(&self, layer: &str) -> [Param; 2] {
        let param = |end: &str, tensor: &Tensor| Param {
            name: format!("{layer}.{end}"),
            tensor: tensor.shallow_clone(),
            decay: true,
        };
        [param(ENDS[0], &self.a), param(ENDS[1], &self.b)]
    }

    /// The matrices, for the kernel.
    pub(super) fn low_rank(&self) -> tch_ext::LowRank<'_> {
        tch_ext::LowRank { a: &self.a, b: &self.b, scale: self.scale }
    }

    /// The term added to the layer's output, f32.
    pub(super) fn forward(&self, x: &Tensor, dropout: Option<&Dropout>) -> Tensor {
        let x = x.to_kind(Kind::Float);
        let x = dropout.map_or_else(|| x.shallow_clone(), |dropout| dropout.apply(&x));
        x.linear::<&Tensor>(&self.a, None).linear::<&Tensor>(&self.b, None) * self.scale
    }

    /// The term added to the weight when the adapter is merged, `[out, in]` f32.
    pub(super) fn delta(&self) -> Tensor {
        self.b.matmul(&self.a) * self.scale
    }
}

/// Dropout before the adapters in one pass, with the key of its random numbers.
#[derive(Debug, Clone)]
pub(crate) struct DropoutRows {
    /// Dropout probability.
    pub(crate) share: f64,
    /// The run's seed.
    pub(crate) seed: u64,
    /// The index of the update.
    pub(crate) update: u64,
    /// The index of each sequence within the update.
    pub(crate) rows: Vec<u64>,
}

/// Dropout in one forward pass. Each row has its own random stream, read layer after layer, so the dropped elements do not
/// depend on the batching.
pub(crate) struct Dropout {
    share: f64,
    streams: Rc<RefCell<Vec<Stream>>>,
    /// The lengths of the sequences.
    lens: Vec<i64>,
}

impl Dropout {
    /// `lens` are the lengths of the sequences.
    pub(super) fn new(rows: &DropoutRows, lens: &[i64]) -> Self {
        let stream = |&row| Stream::new(rows.seed, Purpose::Dropout, rows.update, row);
        let streams = Rc::new(RefCell::new(rows.rows.iter().map(stream).collect()));
        Self { share: rows.share, streams, lens: lens.to_vec() }
    }

    /// Dropout with the same streams for other tokens of the same rows: those of an encoder.
    pub(super) fn over(&self, lens: &[i64]) -> Self {
        Self { share: self.share, streams: self.streams.clone(), lens: lens.to_vec() }
    }

    /// The state of the random streams.
    pub(super) fn state(&self) -> Vec<Stream> {
        self.streams.borrow().clone()
    }

    /// Restores a [`Dropout::state`], so that a recomputed layer drops the same elements.
    pub(super) fn set_state(&self, state: Vec<Stream>) {
        *self.streams.borrow_mut() = state;
    }

    /// `x` `[N, width]` with some elements set to 0 and the others scaled, so that the expectation is unchanged.
    fn apply(&self, x: &Tensor) -> Tensor {
        let width = x.size()[1];
        let mut dropped = Vec::with_capacity(x.numel());
        for (stream, len) in self.streams.borrow_mut().iter_mut().zip(&self.lens) {
            dropped.extend(stream.chances((len * width) as usize, self.share));
        }
        let dropped = Tensor::from_slice(&dropped).view([-1, width]).to_device(x.device());
        x.masked_fill(&dropped, 0.0) / (1.0 - self.share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_elements_depend_on_the_row_and_not_on_its_batch() {
        let rows = |rows: &[u64]| DropoutRows { share: 0.25, seed: 1, update: 2, rows: rows.to_vec() };
        let ones = Tensor::ones([5, 64], (Kind::Float, Device::Cpu));
        let both = Dropout::new(&rows(&[7, 8]), &[2, 3]);
        let (first, second) = (both.apply(&ones), both.apply(&ones));
        assert_ne!(first, second, "each layer has its own draws");
        let alone = Dropout::new(&rows(&[8]), &[3]);
        let ones = Tensor::ones([3, 64], (Kind::Float, Device::Cpu));
        assert_eq!(alone.apply(&ones), first.narrow(0, 2, 3));
        assert_eq!(alone.apply(&ones), second.narrow(0, 2, 3));
    }

    #[test]
    fn dropout_drops_its_share_and_keeps_the_mean() {
        let rows = DropoutRows { share: 0.25, seed: 1, update: 0, rows: vec![0] };
        let x = Tensor::ones([100, 100], (Kind::Float, Device::Cpu));
        let dropped = Dropout::new(&rows, &[100]).apply(&x);
        let zeros = dropped.eq(0.0).sum(Kind::Float).double_value(&[]) / 1e4;
        assert!((zeros - 0.25).abs() < 0.02, "{zeros}"); // 4.6 standard deviations of 10000 draws
        assert!((dropped.max().double_value(&[]) - 4.0 / 3.0).abs() < 1e-6);
    }

    #[test]
    fn a_target_is_a_whole_name_or_its_last_parts() {
        assert!(is_named("h.0.attn.c_attn", "c_attn") && is_named("h.0.attn.c_attn", "attn.c_attn"));
        assert!(is_named("c_attn", "c_attn") && !is_named("h.0.attn.c_attn", "attn") && !is_named("xc_attn", "c_attn"));
    }
}
