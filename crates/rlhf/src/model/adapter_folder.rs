//! Folders of low-rank adapters, in PEFT's file format.

use super::BASE_MODEL;
use super::linear::Linear;
use super::lora::{
    ALL_LINEAR, Adapter, ENDS, HEADS, LoraConfig, VALUE_HEAD, is_all_linear, is_below, is_in_head, is_named, is_trained,
};
use super::params::Param;
use crate::hub;
use crate::weights::{self, Checkpoint, TensorSpec, pretty, read_json, write_text};
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};

/// PEFT's file names.
const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// Prefix of PEFT's tensor names.
const PREFIX: &str = "base_model.model.";

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

    /// The base's name on the hub and its revision, if it has one and is not in a local folder.
    pub(crate) fn hub_base(&self) -> Option<(&str, Option<&str>)> {
        let text = |key: &str| self.described.get(key).and_then(Value::as_str);
        let name = text("base_model_name_or_path").filter(|name| hub::is_hub_name(name))?;
        self.local_base().is_none().then_some((name, text("revision")))
    }

    /// The folder of the base model, downloaded if it is a name on the hub.
    ///
    /// # Errors
    /// If there is none, or it is an adapter itself.
    pub(crate) fn base_dir(&self) -> Result<PathBuf> {
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
        let (tasks, expected): (&[&str], _) = match classifier {
            true => (&["SEQ_CLS"], "SEQ_CLS"),
            false => (&["CAUSAL_LM", "SEQ_2_SEQ_LM"], "CAUSAL_LM"),
        };
        self.expect("task_type", |v| v.is_null() || tasks.iter().any(|task| v == task), expected)
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

/// Writes an adapter as PEFT does; `described` is the content of `adapter_config.json`, `tensor` returns a parameter's values.
pub(super) fn save(
    dir: &Path,
    described: &Map<String, Value>,
    params: &[Param],
    mut tensor: impl FnMut(&Param) -> Result<Tensor>,
) -> Result<()> {
    let trained: Vec<&Param> = params.iter().filter(|param| is_trained(&param.name)).collect();
    let spec = |p: &&Param| TensorSpec { name: stored_name(&p.name), kind: Kind::Float, shape: p.tensor.size() };
    let specs: Vec<TensorSpec> = trained.iter().map(spec).collect();
    weights::save_file_of(&dir.join(WEIGHTS), &specs, &mut |i| {
        let tensor = tensor(trained[i])?.to_kind(Kind::Float);
        weights::check_finite(&specs[i].name, &tensor)?;
        Ok(tensor)
    })?;
    write_text(&dir.join(CONFIG), &pretty(&Value::Object(described.clone())))
}
