//! The settings of low-rank adapters: their flags, the layers that they select, and their form in PEFT's files.

use super::families::FAMILIES;
use super::lora::{HEADS, LayerSize, is_in_module, is_in_saved_module, peft_heads};
use super::shape::Family;
use regex::Regex;
use rlhf_base::name_of;
use rlhf_base::schema::{LORA, Settings, all, at_least_one, at_most, defaults, expect, usage};
use rlhf_base::weights::brief;
use rlhf_base::{Error, Result};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// Target that selects every linear layer except the output head.
pub(super) const ALL_LINEAR: &str = "all-linear";

/// Configuration of a low-rank adapter; the defaults are those of TRL. Names and meanings are those of PEFT's `LoraConfig`.
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
    /// Train the norm of each row of an adapted weight apart from its direction (DoRA).
    pub use_dora: bool,
    /// Modules that are trained in full and saved with the adapter, by the ends of their names: embeddings, heads, norms.
    pub modules_to_save: Vec<String>,
    /// Ranks of single layers: regular expressions of the ends of their names, the first match counts.
    pub rank_pattern: Vec<(String, usize)>,
    /// Alphas of single layers, as `rank_pattern`.
    pub alpha_pattern: Vec<(String, f64)>,
    /// Suffixes of the names of linear layers that get no adapter.
    pub exclude_modules: Vec<String>,
    /// Indices of the layers of the stack whose linear layers get adapters; empty for all. A target that is the whole name of a
    /// linear layer is selected in any case, as in PEFT.
    pub layers_to_transform: Vec<usize>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            r: 16,
            alpha: 32.0,
            dropout: 0.05,
            target_modules: None,
            use_rslora: false,
            use_dora: false,
            modules_to_save: Vec::new(),
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
            exclude_modules: Vec::new(),
            layers_to_transform: Vec::new(),
        }
    }
}

impl LoraConfig {
    /// The content of `adapter_config.json` for an adapter of `layers`, without the base.
    pub(super) fn describe(&self, family: &Family, layers: &[String], classifier: bool) -> Map<String, Value> {
        // PEFT does not know suffixes that end with a dot, so the layers are listed; so are layers that other settings select.
        let selects = |names: &[String]| is_all_linear(names) || names.iter().any(|name| is_part(name));
        let listed = self.target_modules.as_deref().is_some_and(selects)
            || !(self.exclude_modules.is_empty() && self.layers_to_transform.is_empty());
        let targets = match &self.target_modules {
            _ if listed => json!(layers),
            Some(names) => json!(names),
            None => json!(family.names.lora_targets),
        };
        let number = |x: f64| if x.fract() == 0.0 { json!(x as i64) } else { json!(x) };
        let saved = self.modules_to_save.iter().map(String::as_str).filter(|name| !HEADS.contains(name));
        let heads: &[&str] = if classifier { peft_heads(family) } else { &[] };
        let saved: Vec<&str> =
            saved.map(|name| family.names.saved_in_peft(name)).chain(heads.iter().copied()).collect();
        let ranks: Map<String, Value> = self.rank_pattern.iter().map(|(name, r)| (name.clone(), json!(r))).collect();
        let alphas: Map<String, Value> =
            self.alpha_pattern.iter().map(|(name, alpha)| (name.clone(), number(*alpha))).collect();
        let described = json!({
            "alpha_pattern": alphas,
            "bias": "none",
            "fan_in_fan_out": family.names.transposed,
            "inference_mode": true,
            "init_lora_weights": true,
            "lora_alpha": number(self.alpha),
            "lora_dropout": self.dropout,
            "modules_to_save": (!saved.is_empty()).then_some(saved),
            "peft_type": "LORA",
            "r": self.r,
            "rank_pattern": ranks,
            "target_modules": targets,
            "task_type": family.peft_task(classifier),
            "use_dora": self.use_dora,
            "use_rslora": self.use_rslora,
        });
        described.as_object().cloned().unwrap_or_default()
    }

    /// Selects the linear layers that get an adapter: its rank and scale for each of `layers`, `None` for a layer without one.
    ///
    /// # Errors
    /// If a target or a pattern matches none of them; if a rank is 0; if a layer would be adapted and trained in full.
    pub(super) fn choose(&self, family: &Family, layers: &[String]) -> Result<Vec<Option<LayerSize>>> {
        let family_targets = || family.names.lora_targets.iter().map(ToString::to_string).collect();
        let targets: Vec<String> = self.target_modules.clone().unwrap_or_else(family_targets);
        let unknown = |target: &&String| !layers.iter().any(|layer| is_named(layer, target));
        if let Some(target) = targets.iter().find(|target| !is_all_linear(&targets) && unknown(target)) {
            return Err(Error::refused(
                "lora_target_modules",
                format!(
                    ": expected linear layers of {}, found `{target}`; there are {}, and {ALL_LINEAR}",
                    family.name,
                    last_parts(layers.iter().map(String::as_str))
                ),
            ));
        }
        for layer in layers.iter().filter(|layer| self.is_saved(layer)) {
            self.check_saved(layer)?;
        }
        let sizes = self.sizes()?;
        let layer_index = |layer: &str| stack_list(layer).map(|(_, index)| index);
        let chosen: Vec<bool> = layers.iter().map(|layer| self.targets(layer, &targets, layer_index)).collect();
        let adapted = || layers.iter().zip(&chosen).filter_map(|(layer, chosen)| chosen.then_some(layer.as_str()));
        if adapted().next().is_none() {
            let message = "the settings of LoRA select no layer: lora_target_modules matches only layers that \
                           lora_modules_to_save or other settings exclude";
            return Err(Error::Usage(message.into()));
        }
        sizes.check(adapted)?;
        Ok(layers.iter().zip(&chosen).map(|(layer, chosen)| chosen.then(|| sizes.size(layer))).collect())
    }

    /// Whether the linear layer gets an adapter, if `targets` are its targets and `layer_index` returns the index that `layers_to_transform`
    /// counts.
    pub(super) fn targets(&self, layer: &str, targets: &[String], layer_index: impl Fn(&str) -> Option<usize>) -> bool {
        let is_excluded = || self.exclude_modules.iter().any(|name| is_named(layer, name));
        let is_target = || is_all_linear(targets) || targets.iter().any(|target| is_named(layer, target));
        let is_whole = || targets.iter().any(|target| target == layer);
        let at = || layer_index(layer).is_some_and(|index| self.layers_to_transform.contains(&index));
        let in_layers = || self.layers_to_transform.is_empty() || is_whole() || at();
        !self.is_saved(layer) && !is_excluded() && is_target() && in_layers()
    }

    /// Whether the linear layer is trained in full.
    fn is_saved(&self, layer: &str) -> bool {
        is_in_module(&format!("{layer}.weight"), &self.modules_to_save)
    }

    /// Checks that PEFT gives no adapter to a layer that is trained in full: PEFT matches such modules by whole parts of a name.
    fn check_saved(&self, layer: &str) -> Result<()> {
        let dotted = format!(".{layer}.");
        if self.modules_to_save.iter().any(|module| dotted.contains(&format!(".{module}."))) {
            return Ok(());
        }
        let holds_layer = |module: &&String| is_in_module(&format!("{layer}.weight"), std::slice::from_ref(*module));
        let module = self.modules_to_save.iter().find(holds_layer).map_or("", String::as_str);
        Err(Error::refused(
            "lora_modules_to_save",
            format!(
                ": expected whole parts of the names of linear layers, found `{module}`, which ends a part of \
             {layer}"
            ),
        ))
    }

    /// Rank and scale of each layer.
    ///
    /// # Errors
    /// If a pattern is no regular expression; if a rank is 0.
    pub(super) fn sizes(&self) -> Result<LayerSizes> {
        if let Some((name, _)) = self.rank_pattern.iter().find(|(_, r)| *r == 0) {
            return Err(Error::Usage(format!("rank_pattern of `{name}` = 0: expected at least 1")));
        }
        if self.r == 0 {
            return Err(Error::refused("lora_r", " = 0: expected at least 1"));
        }
        Ok(LayerSizes {
            r: self.r,
            alpha: self.alpha,
            use_rslora: self.use_rslora,
            ranks: Patterns::new("rank_pattern", &self.rank_pattern)?,
            alphas: Patterns::new("alpha_pattern", &self.alpha_pattern)?,
        })
    }

    /// The names among `params` of the parameters that are trained in full: the parameters of `modules_to_save`.
    ///
    /// # Errors
    /// If a module matches no parameter, except a head: a classifier's adapter lists all heads, of which a model has one.
    pub(super) fn saved_params<'p>(
        &self,
        family: &Family,
        params: impl Iterator<Item = &'p str>,
        classifier: bool,
    ) -> Result<Vec<String>> {
        let params: Vec<&str> = params.collect();
        let names = &family.names;
        let matches_param =
            |module: &String| params.iter().any(|name| is_in_saved_module(names, name, std::slice::from_ref(module)));
        let is_head = |module: &str| classifier && HEADS.contains(&module);
        let mut modules = self.modules_to_save.iter();
        if let Some(module) = modules.find(|module| module.is_empty() || !(is_head(module) || matches_param(module))) {
            let modules = params.iter().filter_map(|name| Some(name.rsplit_once('.')?.0));
            return Err(Error::refused(
                "lora_modules_to_save",
                format!(": expected modules of {}, found `{module}`; there are {}", family.name, last_parts(modules)),
            ));
        }
        let saved = params.into_iter().filter(|name| is_in_saved_module(names, name, &self.modules_to_save));
        let saved: Vec<String> = saved.map(str::to_string).collect();
        let experts = names.experts;
        if let Some(name) = saved.iter().find(|name| experts.is_some_and(|experts| experts.has(name))) {
            return Err(Error::refused(
                "lora_modules_to_save",
                format!(
                    ": expected modules of {} outside its MLPs, found one with `{name}`: PEFT's names of experts \
                 differ between versions of transformers",
                    family.name
                ),
            ));
        }
        Ok(saved)
    }
}

/// The last parts of names, each once, in alphabetical order.
fn last_parts<'n>(names: impl Iterator<Item = &'n str>) -> String {
    let mut known: Vec<&str> = names.filter_map(|name| name.rsplit('.').next()).collect();
    known.sort_unstable();
    known.dedup();
    known.join(", ")
}

/// Ranks and scales of layers by their names.
#[derive(Debug)]
pub(super) struct LayerSizes {
    r: usize,
    alpha: f64,
    use_rslora: bool,
    ranks: Patterns<usize>,
    alphas: Patterns<f64>,
}

impl LayerSizes {
    pub(super) fn size(&self, layer: &str) -> LayerSize {
        let r = self.ranks.get(layer).unwrap_or(self.r);
        let alpha = self.alphas.get(layer).unwrap_or(self.alpha);
        LayerSize { r, scale: alpha / if self.use_rslora { (r as f64).sqrt() } else { r as f64 } }
    }

    /// Checks that each pattern matches one of `layers`.
    fn check<'n, I: Iterator<Item = &'n str>>(&self, layers: impl Fn() -> I) -> Result<()> {
        let [rank, alpha] = [self.ranks.without_match(&layers), self.alphas.without_match(&layers)];
        let unmatched = rank.map(|pattern| ("rank_pattern", pattern)).or(alpha.map(|p| ("alpha_pattern", p)));
        unmatched.map_or(Ok(()), |(name, pattern)| {
            let known = last_parts(layers());
            Err(Error::refused(
                name,
                format!(": expected layers with an adapter, found `{pattern}`; there are {known}"),
            ))
        })
    }
}

/// Values of layers by regular expressions for the ends of their names, with the text of each expression; the first match counts.
#[derive(Debug)]
struct Patterns<T>(Vec<(String, Regex, T)>);

impl<T: Copy> Patterns<T> {
    fn new(name: &str, values: &[(String, T)]) -> Result<Self> {
        let compile = |(text, value): &(String, T)| {
            let regex = Regex::new(&format!(r"^(?:.*\.)?(?:{text})$")).map_err(|_| {
                let expected = "expected regular expressions of names, without look-around";
                Error::refused(name, format!(": {expected}, found `{}`", brief(text)))
            })?;
            Ok((text.clone(), regex, *value))
        };
        values.iter().map(compile).collect::<Result<_>>().map(Self)
    }

    fn get(&self, layer: &str) -> Option<T> {
        self.0.iter().find(|(_, regex, _)| regex.is_match(layer)).map(|(_, _, value)| *value)
    }

    /// The first pattern that matches none of `layers`.
    fn without_match<'n, I: Iterator<Item = &'n str>>(&self, layers: impl Fn() -> I) -> Option<&str> {
        self.0.iter().find(|(_, regex, _)| !layers().any(|layer| regex.is_match(layer))).map(|(text, ..)| text.as_str())
    }
}

/// Maximum rank of an adapter: above any model's width.
pub const MOST_RANK: u64 = 1 << 16;

/// Settings of low-rank adapters (LoRA) that are trained in place of all weights.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct PeftConfig {
    /// Train LoRA adapters; the model's own weights are frozen and stay in the checkpoint's dtype.
    #[setting(heading = LORA, short = "train LoRA adapters")]
    pub use_peft: bool,
    /// Rank of the LoRA adapters.
    #[setting(heading = LORA, default = 16, most = MOST_RANK)]
    pub lora_r: usize,
    /// LoRA alpha: an adapter's product is scaled by `lora_alpha / lora_r`.
    #[setting(heading = LORA, default = 32)]
    pub lora_alpha: usize,
    /// Dropout of the adapters' inputs in `sft` and `reward`, and in `dpo` with `disable_dropout false`. `ppo`, `grpo` and `rloo` apply none: their
    /// first probability ratios must be 1.
    #[setting(heading = LORA, default = 0.05)]
    pub lora_dropout: f64,
    /// Linear layers that get an adapter, by the ends of their names, or `all-linear` [default: those usual for the model family].
    #[setting(heading = LORA, delimiter = ',', several)]
    pub lora_target_modules: Vec<String>,
    /// Modules that are trained in full and saved with the adapter, by the ends of their names, such as `embed_tokens` or `lm_head`.
    #[setting(heading = LORA, delimiter = ',', several)]
    pub lora_modules_to_save: Vec<String>,
    /// Rank-stabilized LoRA: scale by `lora_alpha / sqrt(lora_r)`.
    #[setting(heading = LORA)]
    pub use_rslora: bool,
    /// DoRA: train the norm of each row of an adapted weight apart from its direction.
    #[setting(heading = LORA)]
    pub use_dora: bool,
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
            use_dora: self.use_dora,
            modules_to_save: self.lora_modules_to_save.clone(),
            ..LoraConfig::default()
        })
    }

    /// Checks the settings together.
    pub fn check(&self) -> Result<()> {
        if !self.use_peft && *self != defaults() {
            return usage(
                "settings of LoRA are given, and use_peft = false: set --use_peft, else all weights are trained",
            );
        }
        let below_one = (0.0..1.0).contains(&self.lora_dropout);
        let named = !self.lora_modules_to_save.iter().any(String::is_empty);
        all([
            expect(named, name_of!(self.lora_modules_to_save), "an empty name", "names of modules"),
            at_least_one(name_of!(self.lora_r), self.lora_r),
            at_most::<Self>(name_of!(self.lora_r), self.lora_r),
            at_least_one(name_of!(self.lora_alpha), self.lora_alpha),
            expect(below_one, name_of!(self.lora_dropout), self.lora_dropout, "a number from 0 to below 1"),
        ])
    }
}

pub(super) fn is_all_linear(targets: &[String]) -> bool {
    matches!(targets, [only] if only.eq_ignore_ascii_case(ALL_LINEAR))
}

/// Whether a module of this name is the LM head of a family.
pub fn is_lm_head(module: &str) -> bool {
    FAMILIES.iter().any(|family| is_in_module(family.names.lm_head, &[module.to_string()]))
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

/// The name of the list that a layer of the stack is in, such as `layers` or `h`, and the layer's index: the first number among the
/// parts of its name.
fn stack_list(name: &str) -> Option<(&str, usize)> {
    layer_lists(name).first().copied()
}

/// The names of the lists that a layer is in, the outermost first, with the layer's index in each: the numbers among the parts of its name.
pub(super) fn layer_lists(name: &str) -> Vec<(&str, usize)> {
    let parts: Vec<&str> = name.split('.').collect();
    let at = |at: usize| Some((parts[at - 1], parts[at].parse().ok()?));
    (2..parts.len().saturating_sub(1)).filter_map(at).collect()
}

/// The index of a layer that `layers_to_transform` counts in a PEFT file: the last number in the layer's name, or with `lists` the last number
/// after the first of these names that has one.
pub(super) fn peft_index(name: &str, lists: &[String]) -> Option<usize> {
    let containing = layer_lists(name);
    let last = |list: Option<&String>| {
        containing.iter().rev().find(|(name, _)| list.is_none_or(|list| list == name)).map(|(_, index)| *index)
    };
    if lists.is_empty() { last(None) } else { lists.iter().find_map(|list| last(Some(list))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_a_whole_name_or_its_last_parts() {
        assert!(is_named("h.0.attn.c_attn", "c_attn") && is_named("h.0.attn.c_attn", "attn.c_attn"));
        assert!(is_named("c_attn", "c_attn") && !is_named("h.0.attn.c_attn", "attn") && !is_named("xc_attn", "c_attn"));
    }

    #[test]
    fn the_index_of_a_layer_is_the_first_number_in_its_name() {
        assert_eq!(stack_list("model.layers.11.self_attn.q_proj"), Some(("layers", 11)));
        assert_eq!(stack_list("transformer.h.0.attn.c_attn"), Some(("h", 0)));
        assert_eq!(stack_list("bert.encoder.layer.3.output.dense"), Some(("layer", 3)));
        assert_eq!(stack_list("lm_head"), None);
    }

    #[test]
    fn the_index_in_a_file_of_peft_is_the_last_number_or_that_behind_a_named_list() {
        let index = |name: &str, lists: &[&str]| {
            let lists: Vec<String> = lists.iter().map(ToString::to_string).collect();
            peft_index(name, &lists)
        };
        let t5_layer = "decoder.block.3.layer.1.EncDecAttention.q";
        assert_eq!((index(t5_layer, &[]), stack_list(t5_layer)), (Some(1), Some(("block", 3))));
        assert_eq!((index(t5_layer, &["block"]), index(t5_layer, &["layers", "layer"])), (Some(3), Some(1)));
        assert_eq!((index(t5_layer, &["h"]), index("lm_head", &[])), (None, None));
        assert_eq!(index("model.layers.11.self_attn.q_proj", &[]), Some(11));
    }

    #[test]
    fn the_first_pattern_that_matches_the_end_of_a_name_gives_rank_and_alpha() {
        let config = LoraConfig {
            r: 4,
            alpha: 8.0,
            rank_pattern: vec![("layers.1.self_attn.q_proj".into(), 2), ("(q|k)_proj".into(), 16)],
            alpha_pattern: vec![("^model.layers.0.*".into(), 32.0)],
            use_rslora: true,
            ..LoraConfig::default()
        };
        let sizes = config.sizes().unwrap();
        let size = |name: &str| sizes.size(&format!("model.layers.{name}_proj"));
        assert_eq!(size("1.self_attn.q"), LayerSize { r: 2, scale: 8.0 / 2f64.sqrt() });
        assert_eq!(size("0.self_attn.q"), LayerSize { r: 16, scale: 8.0 });
        assert_eq!(size("11.self_attn.q"), LayerSize { r: 16, scale: 2.0 }); // `1.self...` must start a part
        assert_eq!(size("1.self_attn.v"), LayerSize { r: 4, scale: 4.0 });
        assert_eq!(size("0.self_attn.v"), LayerSize { r: 4, scale: 16.0 });
    }
}
