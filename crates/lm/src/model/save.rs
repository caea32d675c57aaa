//! Writes and reads the folders of a model: weights, configuration, and an adapter with its base.

use super::body::Body;
use super::config::ModelConfig;
use super::linear::Linear;
use super::params::Param;
use super::shape::HeadNames;
use super::{BASE_MODEL, adapter_folder, is_model, lora};
use rlhf_base::weights::{self, Checkpoint, TensorSpec, replace_files};
use rlhf_base::{Error, Result};
use rlhf_hub as hub;
use serde_json::{Map, Value};
use std::path::Path;
use tch::{Kind, Tensor};

/// The key of the base model in `adapter_config.json`.
const BASE_NAME: &str = "base_model_name_or_path";

/// Ends of the names of tensors that public files have in f32 beside others in bf16: those of the gated delta rule, which
/// transformers widens itself, and the biases of LFM2's experts.
const OWN_DTYPES: [&str; 3] = ["linear_attn.A_log", "linear_attn.norm.weight", EXPERT_BIAS];

/// The bias by which LFM2 chooses experts, which a rounding could change: it is f32 whatever the dtype of the rest.
const EXPERT_BIAS: &str = "feed_forward.expert_bias";

/// The dtype of 16 bits that all of `kinds` are, or else f32, which holds the numbers of each; none if there are no dtypes.
fn widest(mut kinds: impl Iterator<Item = Kind>) -> Option<Kind> {
    let first = kinds.next()?;
    Some(if kinds.all(|kind| kind == first) { first } else { Kind::Float })
}

/// Returns `tensor` in the dtype in which it will be written.
///
/// # Errors
/// If a number is not finite, or too large for that dtype.
fn rounded(spec: &TensorSpec, tensor: &Tensor) -> Result<Tensor> {
    let written = tensor.to_kind(spec.kind);
    match weights::check_finite(&spec.name, &written) {
        Err(_) if spec.kind == Kind::Half && weights::not_finite(tensor).is_none() => Err(Error::Run(format!(
            "tensor `{}`: expected numbers up to 65504, the largest of float16, found larger ones: bfloat16 holds them",
            spec.name
        ))),
        checked => checked.map(|()| written),
    }
}

impl Body {
    /// Writes the adapter, and its base into a subfolder if no other folder holds it; `config` is the base's.
    fn save_adapter(
        &self,
        dir: &Path,
        config: &ModelConfig,
        max_shard_bytes: usize,
        adapter: &Map<String, Value>,
    ) -> Result<()> {
        let mut described = adapter.clone();
        if !described.contains_key(BASE_NAME) {
            let base = match &self.origin {
                Some(origin) => origin.clone(),
                None => {
                    self.save_model(&dir.join(BASE_MODEL), config, max_shard_bytes, None, |_| None)?;
                    weights::destination(dir).join(BASE_MODEL)
                }
            };
            let base = std::path::absolute(&base).map_err(Error::io("find", base))?;
            match hub::name_of(&base) {
                Some((name, commit)) => {
                    described.insert(BASE_NAME.into(), name.into());
                    described.insert("revision".into(), commit.into());
                }
                None => {
                    let name = base.to_str().ok_or_else(|| Error::invalid(&base, "expected a path in UTF-8"))?;
                    described.insert(BASE_NAME.into(), name.into());
                }
            }
            described.sort_keys();
        }
        let trained = self.params.iter().filter(|param| self.is_trained(&param.name));
        let names = &self.config.family.names;
        let mut stored: Vec<_> = trained.map(|param| (names.in_peft(&param.name), param)).collect();
        // PEFT stores an embedding that stays tied under the head's name too.
        if self.config.tie_word_embeddings && adapter_folder::ties(&described) {
            let embedding = stored.iter().find(|(name, _)| name.strip_suffix(".weight") == Some(names.embed));
            let head = embedding.map(|(_, param)| (names.in_peft(names.lm_head), *param));
            stored.extend(head);
        }
        let mut gathered = self.shards().by_name(true);
        adapter_folder::save(dir, &described, &stored, |param| {
            gathered.gather(&param.name)?;
            Ok(param.tensor.detach())
        })
    }

    /// Writes the configuration and the weights, or the adapter, into a folder that the caller puts in place. `stored`
    /// returns a tensor's name in the file where it differs.
    /// Weights are written in `dtype`, where it is given and they are not quantized; an adapter is always in f32.
    pub(super) fn save(
        &self,
        dir: &Path,
        config: &ModelConfig,
        max_shard_bytes: usize,
        dtype: Option<Kind>,
        stored: impl Fn(&str) -> Option<String>,
    ) -> Result<()> {
        match &self.adapter {
            Some(adapter) => self.save_adapter(dir, config, max_shard_bytes, adapter),
            None => self.save_model(dir, config, max_shard_bytes, dtype, stored),
        }
    }

    fn save_model(
        &self,
        dir: &Path,
        config: &ModelConfig,
        max_shard_bytes: usize,
        dtype: Option<Kind>,
        stored: impl Fn(&str) -> Option<String>,
    ) -> Result<()> {
        std::fs::create_dir_all(dir).map_err(Error::io("create the folder", dir))?;
        let name = |param: &Param| stored(&param.name).unwrap_or_else(|| param.name.clone());
        // The base of an adapter is saved as it was before training, without a value head.
        let is_saved = |name: &str| self.adapter.is_none() || !lora::is_below(name, lora::VALUE_HEAD);
        let params = self.params.iter().filter(|param| !lora::is_lora(&param.name) && is_saved(&param.name));
        let embedding = format!("{}.weight", config.family.names.embed);
        let mut written: Vec<(String, &Param)> = Vec::new();
        for param in params {
            written.push((name(param), param));
            let copies = if param.name == embedding { config.embedding_copies() } else { &[] };
            written.extend(copies.iter().map(|copy| (copy.to_string(), param)));
        }
        // A head is always held in f32.
        let kind = |param: &Param| match self.original(&param.name) {
            _ if lora::is_head(&param.name) => self.head_kind(),
            Some(original) => original.kind(),
            None => param.tensor.kind(),
        };
        // transformers leaves the tensors of a quantized model in the dtypes of the file, and its passes need one for all that are plain.
        let format = self.quantization();
        let is_plain = |param: &Param| !param.is_quantized();
        let is_joint = |param: &Param| is_plain(param) && !OWN_DTYPES.iter().any(|name| param.name.ends_with(name));
        let plain =
            format.and_then(|_| widest(written.iter().map(|(_, param)| *param).filter(|p| is_joint(p)).map(kind)));
        let spec = |(name, param): &(String, &Param)| TensorSpec {
            name: name.clone(),
            kind: dtype
                .filter(|_| !param.name.ends_with(EXPERT_BIAS))
                .or(plain.filter(|_| is_joint(param)))
                .filter(|_| is_plain(param))
                .unwrap_or_else(|| kind(param)),
            shape: param.tensor.size(),
        };
        let specs: Vec<TensorSpec> = written.iter().map(spec).collect();
        let mut gathered = self.shards().by_name(true);
        weights::save_of(dir, &specs, max_shard_bytes, &mut |i| {
            let param = written[i].1;
            let tensor = match self.original(&param.name) {
                Some(original) => original.shallow_clone(),
                None => {
                    gathered.gather(&param.name)?;
                    param.tensor.detach()
                }
            };
            rounded(&specs[i], &tensor)
        })?;
        let mut config = config.clone();
        match format {
            Some(format) => {
                let (kept, head) = self.plain_linears(&config);
                let quantized = self.decoder.linears().filter(|linear| linear.quantization().is_some());
                config.describe_quantization(format, &kept, head, &quantized.map(Linear::name).collect::<Vec<_>>());
            }
            None => config.forget_quantization(),
        }
        config.save(dir, dtype.or(plain).unwrap_or(self.kind))
    }

    /// The linear layers of a quantized model that are not quantized, but would be without their names in `config`, its saved configuration;
    /// and the head, which transformers spares by itself unless there are such layers.
    fn plain_linears(&self, config: &ModelConfig) -> (Vec<String>, Option<&'static str>) {
        let names = &config.family.names;
        let is_plain = |linear: &&Linear| linear.quantization().is_none() && names.quantizes(linear.name());
        let mut kept: Vec<String> =
            self.decoder.linears().filter(is_plain).map(|linear| linear.name().into()).collect();
        let head = match names.head {
            HeadNames::Dense { inner, out, .. } if config.is_sequence_classifier() => {
                kept.extend([inner, out].map(Into::into));
                None
            }
            HeadNames::Score if config.is_sequence_classifier() => Some("score"),
            _ => Some(names.saved_in_peft(names.lm_head.trim_end_matches(".weight"))),
        };
        (kept, head)
    }

    /// Writes the base of an adapter to `dir` if no folder holds it, so that every adapter saved later refers to `dir`. A base
    /// that an earlier run with the same start wrote there is left as it is.
    pub(super) fn keep_base(&mut self, dir: &Path, config: &ModelConfig, max_shard_bytes: usize) -> Result<()> {
        if self.adapter.is_none() || self.origin.is_some() {
            return Ok(());
        }
        if !is_model(dir) {
            replace_files(dir, |dir| self.save_model(dir, config, max_shard_bytes, None, |_| None))?;
            weights::sync(dir)?;
        }
        self.origin = Some(dir.to_path_buf());
        Ok(())
    }

    /// Reads the trained weights that [`Body::save`] wrote to `dir`.
    pub(super) fn load_trained(&mut self, dir: &Path, stored: impl Fn(&str) -> Option<String>) -> Result<()> {
        let adapter = self.adapter.is_some();
        let file = if adapter { adapter_folder::open_weights(dir)? } else { Checkpoint::open(dir)? };
        let is_read = |name: &str| !adapter || self.is_trained(name);
        let read = |name: &str, tensor: &Tensor| {
            let name = if adapter {
                adapter_folder::name_in(&file, &self.config.family.names, name)
            } else {
                stored(name).unwrap_or_else(|| name.to_string())
            };
            let (expected, found) = (tensor.size(), file.shape(&name));
            if found.as_ref() != Some(&expected) {
                let found = found.map_or("none".into(), |found| format!("{found:?}"));
                return Err(Error::invalid(dir, format!("tensor `{name}`: expected {expected:?}, found {found}")));
            }
            let saved = file.read(&name, self.device, tensor.kind())?;
            tch::no_grad(|| tensor.shallow_clone().copy_(&saved));
            Ok(())
        };
        self.shards().read_params(is_read, read)?;
        let whole = self.params.iter().filter(|param| is_read(&param.name) && !self.shards().divides(&param.name));
        whole.into_iter().try_for_each(|param| read(&param.name, &param.tensor))
    }
}
