//! Folders of low-rank adapters, in PEFT's file format.

mod embeddings;
mod remainder;

use super::BASE_MODEL;
use super::config::ModelConfig;
use super::families::FAMILIES;
use super::linear::Linear;
use super::lora::{
    Adapter, ENDS, HEADS, LayerSize, MAGNITUDE, Magnitude, VALUE_HEAD, is_below, is_head, is_in_head,
    is_in_saved_module, peft_heads,
};
use super::lora_config::{ALL_LINEAR, LayerSizes, LoraConfig, layer_lists, peft_index};
use super::params::Param;
use super::shape::{Family, Names};
use embeddings::{By, Changed, EMBEDDING_ENDS, TOKENS_END};
use remainder::{Remainder, doubled};
use rlhf_base::weights::{self, Checkpoint, TensorSpec, pretty, read_json, write_text};
use rlhf_base::{Error, Refusal, Result};
use rlhf_hub as hub;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};

/// PEFT's file names.
const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// Prefix of PEFT's tensor names.
const PREFIX: &str = "base_model.model.";

/// A folder that contains an adapter and no model.
pub struct AdapterFolder {
    dir: PathBuf,
    /// The content of `adapter_config.json` as it will be saved: for an adapter of the unchanged base, with the modules that this adapter
    /// changes listed as trained in full.
    described: Map<String, Value>,
    remainder: Option<Remainder>,
    changed: Vec<Changed>,
}

/// Settings of `adapter_config.json` that do not affect the numbers or are checked one by one. Every other setting
/// must be off, as it means an adapter of another kind.
const SETTINGS: [&str; 26] = [
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "target_modules",
    "task_type",
    "trainable_token_indices",
    "use_dora",
    "use_rslora",
];

impl AdapterFolder {
    /// The adapter in `dir`; `None` if there is none, or if there is a full model beside it.
    ///
    /// # Errors
    /// If the kind of adapter is not supported.
    pub fn find(dir: &Path) -> Result<Option<Self>> {
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
        let mut folder = Self { dir: dir.to_path_buf(), described, remainder: None, changed: Vec::new() };
        folder.expect("peft_type", |v| v == "LORA", "LORA")?;
        folder.expect("bias", |v| v.is_null() || v == "none", "none: trained biases are not supported")?;
        let drawn = |v: &Value| {
            let named = ["gaussian", "orthogonal", "eva", "pissa", "olora"].iter().any(|name| v == name);
            v.is_null() || v.is_boolean() || named
        };
        folder.expect(
            "init_lora_weights",
            drawn,
            "true, false, gaussian, orthogonal, eva, pissa or olora: others change the base's weights, which this folder does \
             not hold; PEFT converts such an adapter, save_pretrained with path_initial_model_for_weight_conversion",
        )?;
        let off = |v: &Value| match v {
            Value::Null | Value::Bool(false) => true,
            Value::Object(map) => map.is_empty(),
            Value::Array(list) => list.is_empty(),
            _ => false,
        };
        for name in folder.described.keys().filter(|name| !SETTINGS.contains(&name.as_str())) {
            folder.expect(name, off, "none: this kind of adapter is not supported")?;
        }
        folder.rewrite()?;
        Ok(folder)
    }

    /// Rewrites the settings to the ones that the adapter will be saved with.
    fn rewrite(&mut self) -> Result<()> {
        // A file that cannot be read becomes an error when its tensors are read.
        let weights = self.weights().ok();
        let names = weights.iter().flat_map(Checkpoint::names).filter_map(|name| name.strip_prefix(PREFIX));
        self.changed = embeddings::find(names, &self.described);
        self.remainder = Remainder::of(&self.described);
        let matrix_change = self.changed.iter().find(|changed| matches!(changed.by, By::Embedding | By::Head));
        if let Some(Changed { module, .. }) = matrix_change {
            let expected = format!("false beside an adapter of `{module}`");
            self.expect("use_dora", |v| v.is_null() || v == false, &expected)?;
            self.expect("init_lora_weights", |_| self.remainder.is_none(), &expected)?;
        }
        if !self.changed.is_empty() {
            embeddings::describe(&mut self.described, &self.changed);
        }
        if self.remainder.is_some() {
            self.described = doubled(std::mem::take(&mut self.described));
        }
        let off = |v: &Value| v.is_null() || v.as_array().is_some_and(Vec::is_empty);
        self.expect("trainable_token_indices", off, "ids of tokens with a tensor for each embedding")
    }

    fn expect(&self, name: &str, holds: impl FnOnce(&Value) -> bool, expected: &str) -> Result<()> {
        let found = self.described.get(name).unwrap_or(&Value::Null);
        if holds(found) { Ok(()) } else { Err(self.wrong(name, expected)) }
    }

    fn wrong(&self, name: &str, expected: &str) -> Error {
        let found = self.described.get(name).unwrap_or(&Value::Null);
        Error::invalid(self.dir.join(CONFIG), format!("`{name}`: expected {expected}, found {found}"))
    }

    /// The adapter's name of its base.
    pub fn base_name(&self) -> Option<&str> {
        self.described.get("base_model_name_or_path")?.as_str().filter(|name| !name.is_empty())
    }

    /// The local folder of the base: its path from the working directory, else from the adapter's folder.
    pub fn local_base(&self) -> Option<PathBuf> {
        let name = self.base_name()?;
        // A base that was saved beside its adapter moves with it.
        let saved_base = Path::new(name).ends_with(BASE_MODEL).then(|| self.dir.join(BASE_MODEL));
        [PathBuf::from(name), self.dir.join(name)].into_iter().chain(saved_base).find(|dir| dir.is_dir())
    }

    /// The base's name on the hub and its revision, if it has one and is not in a local folder.
    pub fn hub_base(&self) -> Option<(&str, Option<&str>)> {
        let name = self.base_name().filter(|name| hub::is_hub_name(name))?;
        let revision = self.described.get("revision").and_then(Value::as_str);
        self.local_base().is_none().then_some((name, revision))
    }

    /// The folder of the base model, downloaded if it is a name on the hub.
    ///
    /// # Errors
    /// If there is none, or it is an adapter itself.
    pub fn base_dir(&self) -> Result<PathBuf> {
        let base = match (self.local_base(), self.hub_base()) {
            (Some(base), _) => base,
            (None, Some((name, revision))) => hub::model_dir(Path::new(name), revision)?,
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

    /// Whether the adapter belongs to a sequence classifier: by its task type, or else by a head that was saved with it or that its base has.
    ///
    /// # Errors
    /// If its weights or its base's configuration cannot be read.
    pub fn is_classifier(&self) -> Result<bool> {
        if let Some(task) = self.described.get("task_type").and_then(Value::as_str) {
            return Ok(task == "SEQ_CLS");
        }
        let is_head_tensor = |name: &str| name.strip_prefix(PREFIX).is_some_and(is_in_head);
        Ok(self.weights()?.names().any(is_head_tensor)
            || ModelConfig::from_dir(&self.base_dir()?)?.is_sequence_classifier())
    }

    /// Checks that the adapter is for this kind of model.
    pub(super) fn check_task(&self, classifier: bool) -> Result<()> {
        let (tasks, expected): (&[&str], _) =
            if classifier { (&["SEQ_CLS"], "SEQ_CLS") } else { (&["CAUSAL_LM", "SEQ_2_SEQ_LM"], "CAUSAL_LM") };
        self.expect("task_type", |v| v.is_null() || tasks.iter().any(|task| v == task), expected)
    }

    /// The content of `adapter_config.json`, with the path where the base was found and PEFT's names of modules. For a language model's
    /// adapter on a classifier of `family`, the content that it will be saved with; `modules` are the modules of the base that it saves.
    pub(super) fn described(&self, family: &Family, classifier: bool, modules: &[String]) -> Map<String, Value> {
        let mut described = self.described.clone();
        if classifier && self.check_task(true).is_err() {
            let heads: &[&str] = peft_heads(family);
            let saved = modules.iter().map(String::as_str).chain(heads.iter().copied());
            described.insert("task_type".into(), "SEQ_CLS".into());
            described.insert("modules_to_save".into(), saved.collect());
        }
        if let Some(Value::Array(saved)) = described.get_mut("modules_to_save") {
            for module in saved {
                *module = module.as_str().map_or(Value::Null, |name| family.names.saved_in_peft(name).into());
            }
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

    /// Whether an embedding that is trained in full stays the LM head.
    pub(super) fn keeps_tie(&self) -> bool {
        ties(&self.described)
    }

    /// The settings that affect the numbers.
    pub(super) fn config(&self) -> Result<LoraConfig> {
        let get = |name: &str| self.described.get(name).unwrap_or(&Value::Null);
        let r = whole(get("r")).ok_or_else(|| self.wrong("r", "a whole number of at least 1"))?;
        let alpha = get("lora_alpha").as_f64().ok_or_else(|| self.wrong("lora_alpha", "a number"))?;
        let dropout = get("lora_dropout").as_f64().unwrap_or(0.0);
        let target_modules = match get("target_modules") {
            // A regular expression of excluded layers: the stored tensors determine the layers.
            _ if get("exclude_modules").as_str().is_some_and(|text| !text.is_empty()) => None,
            Value::Array(names) => Some(names.iter().filter_map(|n| Some(n.as_str()?.to_string())).collect()),
            Value::String(name) if name.eq_ignore_ascii_case(ALL_LINEAR) => Some(vec![name.clone()]),
            // An expression, or PEFT's default: the stored tensors determine the layers.
            _ => None,
        };
        let layers = match get("layers_to_transform") {
            Value::Null => Some(Vec::new()),
            Value::Array(layers) => layers.iter().map(|layer| Some(layer.as_u64()? as usize)).collect(),
            layer => layer.as_u64().map(|layer| vec![layer as usize]),
        };
        Ok(LoraConfig {
            r,
            alpha,
            dropout,
            target_modules,
            use_rslora: self.flag("use_rslora")?,
            use_dora: self.flag("use_dora")?,
            modules_to_save: self.names("modules_to_save")?,
            rank_pattern: self.pattern("rank_pattern", "whole numbers of at least 1", whole)?,
            alpha_pattern: self.pattern("alpha_pattern", "numbers", Value::as_f64)?,
            exclude_modules: self.names("exclude_modules").or_else(|error| match get("exclude_modules") {
                Value::String(_) => Ok(Vec::new()),
                _ => Err(error),
            })?,
            layers_to_transform: layers
                .ok_or_else(|| self.wrong("layers_to_transform", "the number of a layer, or a list of these"))?,
        })
    }

    /// A setting that is true or false; false if it is missing.
    fn flag(&self, name: &str) -> Result<bool> {
        match self.described.get(name).unwrap_or(&Value::Null) {
            Value::Null => Ok(false),
            Value::Bool(on) => Ok(*on),
            _ => Err(self.wrong(name, "true or false")),
        }
    }

    /// A setting that is a list of names; empty if it is missing.
    fn names(&self, name: &str) -> Result<Vec<String>> {
        let names = match self.described.get(name).unwrap_or(&Value::Null) {
            Value::Null => Some(Vec::new()),
            Value::Array(names) => names.iter().map(|name| Some(name.as_str()?.to_string())).collect(),
            _ => None,
        };
        names.ok_or_else(|| self.wrong(name, "a list of names"))
    }

    /// A setting that has values by the names of layers; empty if it is missing.
    fn pattern<T>(&self, name: &str, expected: &str, value: impl Fn(&Value) -> Option<T>) -> Result<Vec<(String, T)>> {
        let values = match self.described.get(name).unwrap_or(&Value::Null) {
            Value::Null => Some(Vec::new()),
            Value::Object(layers) => layers.iter().map(|(layer, v)| Some((layer.clone(), value(v)?))).collect(),
            _ => None,
        };
        values.ok_or_else(|| self.wrong(name, &format!("{expected} by the names of layers")))
    }

    /// The names of the lists of layers that `layers_to_transform` counts; the model must have one of them. Empty for any list.
    fn lists(&self, linears: &[&mut Linear]) -> Result<Vec<String>> {
        let lists = match self.described.get("layers_pattern").unwrap_or(&Value::Null) {
            Value::String(list) if list.is_empty() => Vec::new(),
            Value::String(list) => vec![list.clone()],
            _ => self.names("layers_pattern")?,
        };
        let known: Vec<&str> =
            linears.iter().flat_map(|linear| layer_lists(linear.name())).map(|(list, _)| list).collect();
        match known.first().filter(|_| !lists.is_empty() && !lists.iter().any(|list| known.contains(&list.as_str()))) {
            Some(list) => Err(self.wrong("layers_pattern", &format!("{list}, the name of the model's list of layers"))),
            None => Ok(lists),
        }
    }

    /// Whether the weights hold a head, which replaces a new one in the base.
    pub(super) fn holds_head(&self) -> Result<bool> {
        let weights = self.weights()?;
        Ok(FAMILIES.iter().any(|family| weights.shape(&stored_name(&family.names.head.scores())).is_some()))
    }

    /// Checks that the weights hold these layers of a head, which the base lacks.
    pub(super) fn check_holds(&self, layers: &[String]) -> Result<()> {
        let weights = self.weights()?;
        let names = layers.iter().map(|layer| stored_name(&format!("{layer}.weight")));
        match names.into_iter().find(|name| weights.shape(name).is_none()) {
            Some(name) => Err(Error::invalid(
                &self.dir,
                format!(
                    "missing `{name}`: its base has no such layer of a head either; give it the base, with a head, that the \
                     adapter was trained on"
                ),
            )),
            None => Ok(()),
        }
    }

    fn weights(&self) -> Result<Checkpoint> {
        let path = self.dir.join(WEIGHTS);
        if path.is_file() {
            return Checkpoint::open_file(&path);
        }
        let pickle = self.dir.join("adapter_model.bin").is_file();
        let found =
            if pickle { "only adapter_model.bin, a pickle, which can run code and is never opened" } else { "none" };
        Err(Error::invalid(&self.dir, format!("expected {WEIGHTS}, found {found}")))
    }

    /// Adds the adapter to `linears`; returns its tensors and the tensors of the modules saved with it. Changes nothing on an
    /// error.
    ///
    /// # Errors
    /// One error that lists all tensors that are missing, of another shape or unexpected; if a setting does not fit the model.
    pub(super) fn apply(&self, linears: Vec<&mut Linear>, target: AdapterTarget<'_>) -> Result<LoadedAdapter> {
        let config = self.config()?;
        let lists = self.lists(&linears)?;
        let AdapterTarget { family, classifier, .. } = target;
        // Error messages use PEFT's names of settings, without the prefix of the flags.
        let here = |error: Error| {
            let line = |refusal: Refusal| match refusal.setting().and_then(|name| name.strip_prefix("lora_")) {
                Some(name) => format!("{name}{}", refusal.reason()),
                None => refusal.to_string(),
            };
            let lines: Vec<String> = error.refusals().into_iter().map(line).collect();
            Error::invalid(self.dir.join(CONFIG), lines.join("; "))
        };
        let sizes = config.sizes().map_err(here)?;
        let weights = self.weights()?;
        let (read, problems) = (Vec::new(), Vec::new());
        let prefix = family.names.prefix;
        let mut stored_names = weights.names().filter_map(|name| name.strip_prefix(PREFIX));
        // Names in an encoder-decoder's language model lack the prefix that its classifier has.
        let lacks_prefix = family.names.encoder.is_some() && !stored_names.any(|name| name.starts_with(prefix));
        let dropped = if lacks_prefix { prefix } else { "" };
        let (device, remainder) = (target.device, self.remainder);
        let names = &family.names;
        let mut tensors =
            AdapterTensors { weights: &weights, names, device, remainder, dropped, lists, read, problems };
        let mut adapters = Vec::new();
        for linear in linears {
            if let Some(adapter) = tensors.adapter(linear, &config, &sizes)? {
                adapters.push((linear, adapter));
            }
        }
        // Classifiers have no LM head, and one of PEFT's names of heads.
        let (heads, modules): (Vec<String>, Vec<String>) = config.modules_to_save.iter().cloned().partition(|module| {
            classifier
                && (HEADS.contains(&module.as_str())
                    || is_in_saved_module(names, names.lm_head, std::slice::from_ref(module)))
        });
        let base_config = LoraConfig { modules_to_save: modules, ..config };
        let params = || target.params.iter().map(|param| param.name.as_str());
        let saved = base_config.saved_params(family, params(), classifier).map_err(here)?;
        let saves = |name: &str| heads.iter().any(|module| is_below(name, module));
        let mut values = Vec::new();
        for param in target.params {
            let name = tensors.stored_name(&param.name);
            let is_saved_head = is_head(&param.name) && (saves(&param.name) || weights.shape(&name).is_some());
            let module = param.name.strip_suffix(".weight");
            let is_changed = |change: &&Changed| {
                module.is_some_and(|name| change.module == name || change.module == names.in_peft(name))
            };
            if let Some(changed) = self.changed.iter().find(is_changed) {
                let value = tensors.changed(changed, param, sizes.size(&changed.module))?;
                values.extend(value.map(|value| (param.name.clone(), value)));
            } else if (is_saved_head || saved.contains(&param.name))
                && let Some(value) = tensors.get(name, &param.tensor.size())?
            {
                values.push((param.name.clone(), value));
            }
        }
        if classifier || (target.tied && ties(&self.described)) {
            tensors.read.push(tensors.stored_name(names.lm_head));
        }
        tensors.finish(&self.dir)?;
        let mut params = Vec::new();
        for (linear, adapter) in adapters {
            params.extend(adapter.params(linear.name()));
            linear.set_adapter(adapter);
        }
        Ok(LoadedAdapter { params, values, saved, modules: base_config.modules_to_save })
    }
}

/// A model that gets the adapter of a folder.
#[derive(Clone, Copy)]
pub(super) struct AdapterTarget<'a> {
    pub(super) params: &'a [Param],
    pub(super) device: Device,
    pub(super) family: &'static Family,
    pub(super) classifier: bool,
    /// Whether the LM head is the embedding.
    pub(super) tied: bool,
}

/// The tensors of an adapter's folder.
pub(super) struct LoadedAdapter {
    /// The tensors of the adapter.
    pub(super) params: Vec<Param>,
    /// The values of parameters of the base that were trained in full, f32.
    pub(super) values: Vec<(String, Tensor)>,
    /// The names of the parameters that `modules_to_save` selects.
    pub(super) saved: Vec<String>,
    /// The modules of the base that were saved with the adapter, without heads that the base lacks.
    pub(super) modules: Vec<String>,
}

/// Whether an embedding that is trained in full stays the LM head, by the content of `adapter_config.json`.
pub(super) fn ties(described: &Map<String, Value>) -> bool {
    described.get("ensure_weight_tying") == Some(&Value::Bool(true))
}

/// A whole number of at least 1 that fits a size.
fn whole(value: &Value) -> Option<usize> {
    value.as_u64().filter(|&number| number > 0 && number <= u32::MAX.into()).map(|number| number as usize)
}

/// Reads the tensors of an adapter's file and collects the problems.
struct AdapterTensors<'a> {
    weights: &'a Checkpoint,
    names: &'static Names,
    device: Device,
    remainder: Option<Remainder>,
    /// Prefix of the model's names that the names in the file lack.
    dropped: &'static str,
    /// The names of the lists of layers that `layers_to_transform` counts; empty for any.
    lists: Vec<String>,
    /// Names of the tensors that were read or looked for.
    read: Vec<String>,
    problems: Vec<String>,
}

impl AdapterTensors<'_> {
    /// The name of a parameter in the file.
    fn stored_name(&self, name: &str) -> String {
        name_in(self.weights, self.names, name.strip_prefix(self.dropped).unwrap_or(name))
    }

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
    fn adapter(&mut self, linear: &Linear, config: &LoraConfig, sizes: &LayerSizes) -> Result<Option<Adapter>> {
        let base = self.stored_name(linear.name());
        let targeted = match config.target_modules.as_deref() {
            Some(targets) => config.targets(linear.name(), targets, |layer| peft_index(layer, &self.lists)),
            None => ENDS.iter().any(|end| self.weights.shape(&format!("{base}.{end}")).is_some()),
        };
        if !targeted {
            return Ok(None);
        }
        let ([width_in, width_out], LayerSize { r, scale }) = (linear.widths(), sizes.size(linear.name()));
        let r = r as i64 / if self.remainder.is_some() { 2 } else { 1 };
        let a = self.get(format!("{base}.{}", ENDS[0]), &[r, width_in])?;
        let b = self.get(format!("{base}.{}", ENDS[1]), &[width_out, r])?;
        let magnitude = if config.use_dora {
            self.get(format!("{base}.{MAGNITUDE}"), &[width_out])?.map(Magnitude::new)
        } else {
            None
        };
        let Some((a, b)) = a.zip(b) else { return Ok(None) };
        let Some(remainder) = self.remainder else { return Ok(Some(Adapter { a, b, scale, magnitude })) };
        let most = width_in.min(width_out);
        if r > most {
            self.problems.push(format!("`{base}`: expected a rank of at most {most}, found {r}"));
            return Ok(None);
        }
        let [b0, a0] = remainder.first(&linear.rows(), r, scale)?;
        let (a, b) = (Tensor::f_cat(&[a, a0], 0)?, Tensor::f_cat(&[b, -b0], 1)?);
        Ok(Some(Adapter { a, b, scale, magnitude }))
    }

    /// The weight of a module that the adapter changes, in f32.
    fn changed(&mut self, changed: &Changed, param: &Param, size: LayerSize) -> Result<Option<Tensor>> {
        let (at, shape, r) = (stored_name(&changed.module), param.tensor.size(), size.r as i64);
        let &[rows, width] = shape.as_slice() else { return Ok(None) };
        let stored = format!("{at}.base_layer.weight");
        let base = match self.weights.shape(&stored) {
            Some(_) => self.get(stored, &shape)?,
            None => Some(param.tensor.detach().to_kind(Kind::Float)),
        };
        let Some(base) = base else { return Ok(None) };
        let mut product = |[a, b]: [(&str, [i64; 2]); 2]| -> Result<Option<[Tensor; 2]>> {
            let a = self.get(format!("{at}.{}", a.0), &a.1)?;
            let b = self.get(format!("{at}.{}", b.0), &b.1)?;
            Ok(a.zip(b).map(|(a, b)| [a, b]))
        };
        Ok(match &changed.by {
            By::Whole => self.get(format!("{at}.weight"), &shape)?,
            By::Embedding => {
                let ends = [(EMBEDDING_ENDS[0], [r, rows]), (EMBEDDING_ENDS[1], [width, r])];
                product(ends)?.map(|[a, b]| base + b.matmul(&a).tr() * size.scale)
            }
            By::Head => {
                let ends = [(ENDS[0], [r, width]), (ENDS[1], [rows, r])];
                product(ends)?.map(|[a, b]| base + b.matmul(&a) * size.scale)
            }
            By::Tokens(ids) => {
                if let Some(id) = ids.iter().find(|&&id| id >= rows) {
                    self.problems.push(format!("`trainable_token_indices`: expected ids below {rows}, found {id}"));
                    return Ok(None);
                }
                let new = self.get(format!("{at}.{TOKENS_END}"), &[ids.len() as i64, width])?;
                new.map(|new| base.f_index_copy(0, &Tensor::from_slice(ids).to_device(self.device), &new))
                    .transpose()?
            }
        })
    }

    /// Fails if there were problems, or if the file in `dir` has unexpected tensors.
    fn finish(self, dir: &Path) -> Result<()> {
        let Self { weights, read, mut problems, .. } = self;
        // A value head that is stored beside the adapter belongs to another model.
        let is_value_head = |name: &str| name.strip_prefix(PREFIX).is_some_and(|name| is_below(name, VALUE_HEAD));
        let unexpected = weights.names().filter(|name| !read.iter().any(|read| read == name) && !is_value_head(name));
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

/// The name of a parameter in an adapter's file, for a family with these `names`: PEFT's name, or the model's own if the file has only that.
pub(super) fn name_in(file: &Checkpoint, names: &Names, name: &str) -> String {
    let [pefts, plain] = [names.in_peft(name).as_ref(), name].map(stored_name);
    if file.shape(&pefts).is_none() && file.shape(&plain).is_some() { plain } else { pefts }
}

/// The name in an adapter's file of a parameter that PEFT has under `name`.
pub(super) fn stored_name(name: &str) -> String {
    format!("{PREFIX}{name}")
}

/// Writes an adapter as PEFT does; `described` is the content of `adapter_config.json`, `params` are the stored parameters with
/// PEFT's names, `tensor` returns a parameter's values.
pub(super) fn save(
    dir: &Path,
    described: &Map<String, Value>,
    params: &[(Cow<'_, str>, &Param)],
    mut tensor: impl FnMut(&Param) -> Result<Tensor>,
) -> Result<()> {
    let spec = |(name, param): &(Cow<'_, str>, &Param)| TensorSpec {
        name: stored_name(name),
        kind: Kind::Float,
        shape: param.tensor.size(),
    };
    let specs: Vec<TensorSpec> = params.iter().map(spec).collect();
    weights::save_file_of(&dir.join(WEIGHTS), &specs, &mut |i| {
        let tensor = tensor(params[i].1)?.to_kind(Kind::Float);
        weights::check_finite(&specs[i].name, &tensor)?;
        Ok(tensor)
    })?;
    write_text(&dir.join(CONFIG), &pretty(&Value::Object(described.clone())))
}
