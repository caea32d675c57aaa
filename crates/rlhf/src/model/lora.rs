//! Low-rank adapters (LoRA): small trained matrices beside frozen weights, in PEFT's file format.

use super::BASE_MODEL;
use super::families::Family;
use super::linear::Linear;
use super::params::Param;
use crate::flag::{LORA, all, at_least_one, defaults, expect, usage};
use crate::hub;
use crate::rng::{Purpose, Stream};
use crate::weights::{self, Checkpoint, pretty, read_json, write_text};
use crate::{Error, Result};
use clap::Args;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};

/// PEFT's file names.
const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// Prefix of PEFT's tensor names.
const PREFIX: &str = "base_model.model.";

/// Suffixes of the names of an adapter's two tensors.
const ENDS: [&str; 2] = ["lora_A.weight", "lora_B.weight"];

/// PEFT's names of classifiers' heads, which are trained in full and saved with the adapter.
const HEADS: [&str; 2] = ["classifier", "score"];

/// Name of the value head on the trunk of a language model.
pub(super) const VALUE_HEAD: &str = "v_head";

/// Target that selects every linear layer except the output head.
const ALL_LINEAR: &str = "all-linear";

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
            "task_type": if classifier { "SEQ_CLS" } else { "CAUSAL_LM" },
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

fn is_all_linear(targets: &[String]) -> bool {
    matches!(targets, [only] if only.eq_ignore_ascii_case(ALL_LINEAR))
}

/// Whether a target matches any part of a layer's name, as DeepSpeed-Chat's `decoder.layers.` does.
fn is_part(target: &str) -> bool {
    target.ends_with('.')
}

/// Whether `target` is the layer's whole name or its last parts; if it ends with a dot, any part.
fn is_named(layer: &str, target: &str) -> bool {
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
    a: Tensor,
    /// `[out, r]`.
    b: Tensor,
    scale: f64,
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
    rows: RefCell<Vec<(Stream, i64)>>,
}

impl Dropout {
    /// `lens` are the lengths of the sequences.
    pub(super) fn new(rows: &DropoutRows, lens: &[i64]) -> Self {
        let stream = |&row| Stream::new(rows.seed, Purpose::Dropout, rows.update, row);
        let streams = rows.rows.iter().map(stream).zip(lens.iter().copied());
        Self { share: rows.share, rows: RefCell::new(streams.collect()) }
    }

    /// The state of the random streams.
    pub(super) fn state(&self) -> Vec<(Stream, i64)> {
        self.rows.borrow().clone()
    }

    /// Restores a [`Dropout::state`], so that a recomputed layer drops the same elements.
    pub(super) fn set_state(&self, state: Vec<(Stream, i64)>) {
        *self.rows.borrow_mut() = state;
    }

    /// `x` `[N, width]` with some elements set to 0 and the others scaled, so that the expectation is unchanged.
    fn apply(&self, x: &Tensor) -> Tensor {
        let width = x.size()[1];
        let mut dropped = Vec::with_capacity(x.numel());
        for (stream, len) in self.rows.borrow_mut().iter_mut() {
            dropped.extend(stream.chances((*len * width) as usize, self.share));
        }
        let dropped = Tensor::from_slice(&dropped).view([-1, width]).to_device(x.device());
        x.masked_fill(&dropped, 0.0) / (1.0 - self.share)
    }
}

/// A folder that contains an adapter and no model.
pub(crate) struct AdapterFolder {
    dir: PathBuf,
    described: Map<String, Value>,
}

/// Settings of `adapter_config.json` that do not affect the numbers or are checked one by one. Every other setting
/// must be off, as it means an adapter of another kind.
const SETTINGS: [&str; 19] = [
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "target_modules",
    "task_type",
    "use_rslora",
];

impl AdapterFolder {
    /// The adapter in `dir`; `None` if there is none, or if there is a full model beside it.
    ///
    /// # Errors
    /// If the kind of adapter is not supported.
    pub(crate) fn find(dir: &Path) -> Result<Option<Self>> {
        if !dir.join(CONFIG).is_file() || Checkpoint::is_in(dir) {
            return Ok(None);
        }
        Self::open(dir).map(Some)
    }

    /// The adapter in `dir`; errors as [`AdapterFolder::find`].
    pub(super) fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(CONFIG);
        let Value::Object(described) = read_json(&path)? else {
            return Err(Error::invalid(path, "expected a JSON object"));
        };
        let folder = Self { dir: dir.to_path_buf(), described };
        folder.expect("peft_type", |v| v == "LORA", "LORA")?;
        folder.expect("bias", |v| v.is_null() || v == "none", "none: trained biases are not supported")?;
        let drawn = |v: &Value| v.is_null() || v.is_boolean() || v == "gaussian" || v == "orthogonal" || v == "eva";
        folder.expect(
            "init_lora_weights",
            drawn,
            "true, false, gaussian, orthogonal or eva: others change the base",
        )?;
        let heads = |v: &Value| HEADS.iter().any(|head| v == head);
        let heads = |v: &Value| v.is_null() || v.as_array().is_some_and(|names| names.iter().all(heads));
        folder.expect("modules_to_save", heads, "none but the head, classifier or score")?;
        let off = |v: &Value| match v {
            Value::Null | Value::Bool(false) => true,
            Value::Object(map) => map.is_empty(),
            Value::Array(list) => list.is_empty(),
            _ => false,
        };
        for name in folder.described.keys().filter(|name| !SETTINGS.contains(&name.as_str())) {
            folder.expect(name, off, "none: this kind of adapter is not supported")?;
        }
        Ok(folder)
    }

    fn expect(&self, name: &str, holds: impl FnOnce(&Value) -> bool, expected: &str) -> Result<()> {
        let found = self.described.get(name).unwrap_or(&Value::Null);
        if holds(found) { Ok(()) } else { Err(self.wrong(name, expected)) }
    }

    fn wrong(&self, name: &str, expected: &str) -> Error {
        let found = self.described.get(name).unwrap_or(&Value::Null);
        Error::invalid(self.dir.join(CONFIG), format!("`{name}`: expected {expected}, found {found}"))
    }

    /// The local folder of the base: its path from the working directory, else from the adapter's folder.
    pub(crate) fn local_base(&self) -> Option<PathBuf> {
        let name = self.described.get("base_model_name_or_path")?.as_str().filter(|name| !name.is_empty())?;
        // A base that was saved beside its adapter moves with it.
        let beside = Path::new(name).ends_with(BASE_MODEL).then(|| self.dir.join(BASE_MODEL));
        [PathBuf::from(name), self.dir.join(name)].into_iter().chain(beside).find(|dir| dir.is_dir())
    }

    /// The folder of the base model, downloaded if it is a name on the hub.
    ///
    /// # Errors
    /// If there is none, or it is an adapter itself.
    pub(crate) fn base_dir(&self) -> Result<PathBuf> {
        let text = |key: &str| self.described.get(key).and_then(Value::as_str);
        let base = match (self.local_base(), text("base_model_name_or_path")) {
            (Some(base), _) => base,
            (None, Some(name)) if hub::is_hub_name(name) => hub::model_dir(Path::new(name), text("revision"))?,
            _ => {
                let expected =
                    "the base model's folder, from here or from the adapter's folder, or its name on the hub";
                return Err(self.wrong("base_model_name_or_path", expected));
            }
        };
        match Self::find(&base)? {
            None => Ok(base),
            Some(_) => Err(Error::invalid(
                &self.dir,
                format!("its base {} is an adapter too; merge that one into a model with `rlhf merge`", base.display()),
            )),
        }
    }

    /// Whether it belongs to a sequence classifier: by its task type, else by whether a head was saved with it.
    ///
    /// # Errors
    /// If its weights cannot be read.
    pub(crate) fn is_classifier(&self) -> Result<bool> {
        match self.described.get("task_type").and_then(Value::as_str) {
            Some(task) => Ok(task == "SEQ_CLS"),
            None => Ok(self.weights()?.names().any(|name| name.strip_prefix(PREFIX).is_some_and(is_in_head))),
        }
    }

    /// Checks that the adapter is for this kind of model.
    pub(super) fn check_task(&self, classifier: bool) -> Result<()> {
        let task = if classifier { "SEQ_CLS" } else { "CAUSAL_LM" };
        self.expect("task_type", |v| v.is_null() || v == task, task)
    }

    /// The content of `adapter_config.json`, with the path under which the base was found. For a language model's adapter on a
    /// classifier, the content with which it will be saved.
    pub(super) fn described(&self, classifier: bool) -> Map<String, Value> {
        let mut described = self.described.clone();
        if classifier && self.check_task(true).is_err() {
            described.insert("task_type".into(), "SEQ_CLS".into());
            described.insert("modules_to_save".into(), json!(HEADS));
        }
        let named = described.get("base_model_name_or_path").and_then(Value::as_str).map(PathBuf::from);
        if let Some(name) = named.filter(|name| !name.is_dir())
            && let Ok(base) = self.dir.join(name).canonicalize()
            && let Some(base) = base.to_str()
        {
            described.insert("base_model_name_or_path".into(), base.into());
        }
        described
    }

    /// The settings that affect the numbers.
    fn config(&self) -> Result<LoraConfig> {
        let get = |name: &str| self.described.get(name).unwrap_or(&Value::Null);
        let r = get("r").as_u64().filter(|&r| r > 0 && r <= u32::MAX.into());
        let r = r.ok_or_else(|| self.wrong("r", "a whole number of at least 1"))? as usize;
        let alpha = get("lora_alpha").as_f64().ok_or_else(|| self.wrong("lora_alpha", "a number"))?;
        let dropout = get("lora_dropout").as_f64().unwrap_or(0.0);
        let target_modules = match get("target_modules") {
            Value::Array(names) => Some(names.iter().filter_map(|n| Some(n.as_str()?.to_string())).collect()),
            Value::String(name) if name.eq_ignore_ascii_case(ALL_LINEAR) => Some(vec![name.clone()]),
            // An expression, or PEFT's default: the stored tensors determine the layers.
            _ => None,
        };
        let use_rslora = get("use_rslora") == &Value::Bool(true);
        Ok(LoraConfig { r, alpha, dropout, target_modules, use_rslora })
    }

    /// Whether the weights hold the head `name`.
    pub(super) fn holds(&self, name: &str) -> Result<bool> {
        Ok(self.weights()?.shape(&format!("{PREFIX}{name}")).is_some())
    }

    fn weights(&self) -> Result<Checkpoint> {
        let path = self.dir.join(WEIGHTS);
        if path.is_file() {
            return Checkpoint::open_file(&path);
        }
        let pickle = self.dir.join("adapter_model.bin").is_file();
        let found = match pickle {
            true => "only adapter_model.bin, a pickle, which can run code and is never opened",
            false => "none",
        };
        Err(Error::invalid(&self.dir, format!("expected {WEIGHTS}, found {found}")))
    }

    /// Adds the adapter to `linears` and its matrices to `params`, and loads the head that was saved with it into `params`.
    /// Changes nothing on an error.
    ///
    /// # Errors
    /// One error that lists all tensors that are missing, of another shape or unexpected.
    pub(super) fn apply(&self, linears: Vec<&mut Linear>, params: &mut Vec<Param>, device: Device) -> Result<()> {
        let config = self.config()?;
        let weights = self.weights()?;
        let mut tensors = AdapterTensors { weights: &weights, device, read: Vec::new(), problems: Vec::new() };
        let (mut adapters, mut heads) = (Vec::new(), Vec::new());
        for linear in linears {
            if let Some(adapter) = tensors.adapter(linear, &config)? {
                adapters.push((linear, adapter));
            }
        }
        let saves_head = self.described.get("modules_to_save").is_some_and(|v| !v.is_null());
        for param in params.iter().filter(|param| is_trained(&param.name)) {
            let name = stored_name(&param.name);
            if !saves_head && weights.shape(&name).is_none() {
                continue;
            }
            if let Some(head) = tensors.get(name, &param.tensor.size())? {
                heads.push((param.tensor.shallow_clone(), head));
            }
        }
        tensors.finish(&self.dir)?;
        for (linear, adapter) in adapters {
            params.extend(adapter.params(linear.name()));
            linear.set_adapter(adapter);
        }
        for (mut held, head) in heads {
            tch::no_grad(|| held.copy_(&head));
        }
        Ok(())
    }
}

/// Reads the tensors of an adapter's file and collects the problems.
struct AdapterTensors<'a> {
    weights: &'a Checkpoint,
    device: Device,
    /// Names of the tensors that were read or looked for.
    read: Vec<String>,
    problems: Vec<String>,
}

impl AdapterTensors<'_> {
    /// The tensor `name` in f32; `None`, with a problem, if it is missing or has another shape.
    fn get(&mut self, name: String, shape: &[i64]) -> Result<Option<Tensor>> {
        let tensor = match self.weights.shape(&name) {
            None => {
                self.problems.push(format!("missing `{name}`"));
                None
            }
            Some(found) if found != shape => {
                self.problems.push(format!("tensor `{name}`: expected {shape:?}, found {found:?}"));
                None
            }
            Some(_) => Some(self.weights.read(&name, self.device, Kind::Float)?),
        };
        self.read.push(name);
        Ok(tensor)
    }

    /// The adapter of `linear`, if `config` targets this layer.
    fn adapter(&mut self, linear: &Linear, config: &LoraConfig) -> Result<Option<Adapter>> {
        let base = stored_name(linear.name());
        let targeted = match config.target_modules.as_deref() {
            Some(targets) => is_all_linear(targets) || targets.iter().any(|target| is_named(linear.name(), target)),
            None => ENDS.iter().any(|end| self.weights.shape(&format!("{base}.{end}")).is_some()),
        };
        if !targeted {
            return Ok(None);
        }
        let ([width_in, width_out], r) = (linear.widths(), config.r as i64);
        let a = self.get(format!("{base}.{}", ENDS[0]), &[r, width_in])?;
        let b = self.get(format!("{base}.{}", ENDS[1]), &[width_out, r])?;
        Ok(a.zip(b).map(|(a, b)| Adapter { a, b, scale: config.scale() }))
    }

    /// Fails if there were problems, or if the file in `dir` has unexpected tensors.
    fn finish(self, dir: &Path) -> Result<()> {
        let Self { weights, read, mut problems, .. } = self;
        // A value head that is stored beside the adapter belongs to another model.
        let of_value_head = |name: &str| name.strip_prefix(PREFIX).is_some_and(|name| is_below(name, VALUE_HEAD));
        let unexpected = weights.names().filter(|name| !read.iter().any(|read| read == name) && !of_value_head(name));
        problems.extend(unexpected.map(|name| format!("unexpected `{name}`")));
        if read.is_empty() {
            problems.push("no adapter for any layer of the base".into());
        }
        match problems.as_slice() {
            [] => Ok(()),
            [first] => Err(Error::invalid(dir, first)),
            [first, second, rest @ ..] => {
                let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
                Err(Error::invalid(dir, format!("{first}; {second}{more}")))
            }
        }
    }
}

/// Opens the weights of the adapter in `dir`.
pub(super) fn open_weights(dir: &Path) -> Result<Checkpoint> {
    Checkpoint::open_file(&dir.join(WEIGHTS))
}

/// The name of a parameter in an adapter's file.
pub(super) fn stored_name(name: &str) -> String {
    format!("{PREFIX}{name}")
}

/// Writes an adapter as PEFT does; `described` is the content of `adapter_config.json`.
pub(super) fn save(dir: &Path, described: &Map<String, Value>, params: &[Param]) -> Result<()> {
    let trained = params.iter().filter(|param| is_trained(&param.name));
    let tensors: Vec<_> = trained.map(|p| (stored_name(&p.name), p.tensor.detach().to_kind(Kind::Float))).collect();
    weights::check_finite(&tensors)?;
    weights::save_file(&dir.join(WEIGHTS), &tensors)?;
    write_text(&dir.join(CONFIG), &pretty(&Value::Object(described.clone())))
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
