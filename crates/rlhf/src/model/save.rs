//! Writes and reads the folders of a model: weights, configuration, and an adapter with its base.

use super::body::Body;
use super::config::ModelConfig;
use super::params::Param;
use super::{BASE_MODEL, adapter_folder, is_model, lora};
use crate::hub;
use crate::weights::{self, Checkpoint, replace_files};
use crate::{Error, Result};
use serde_json::{Map, Value};
use std::path::Path;

/// The key of the base model in `adapter_config.json`.
const BASE_NAME: &str = "base_model_name_or_path";

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
                    self.save_model(&dir.join(BASE_MODEL), config, max_shard_bytes, |_| None)?;
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
        adapter_folder::save(dir, &described, &self.params)
    }

    /// Writes the configuration and the weights, or the adapter, into a folder that the caller puts in place. `stored`
    /// returns a tensor's name in the file where it differs.
    pub(super) fn save(
        &self,
        dir: &Path,
        config: &ModelConfig,
        max_shard_bytes: usize,
        stored: impl Fn(&str) -> Option<String>,
    ) -> Result<()> {
        match &self.adapter {
            Some(adapter) => self.save_adapter(dir, config, max_shard_bytes, adapter),
            None => self.save_model(dir, config, max_shard_bytes, stored),
        }
    }

    fn save_model(
        &self,
        dir: &Path,
        config: &ModelConfig,
        max_shard_bytes: usize,
        stored: impl Fn(&str) -> Option<String>,
    ) -> Result<()> {
        std::fs::create_dir_all(dir).map_err(Error::io("create the folder", dir))?;
        let name = |param: &Param| stored(&param.name).unwrap_or_else(|| param.name.clone());
        // The base of an adapter is saved as it was before training, without a value head.
        let of_base = |name: &str| self.adapter.is_none() || !lora::is_below(name, lora::VALUE_HEAD);
        let params = self.params.iter().filter(|param| !lora::is_lora(&param.name) && of_base(&param.name));
        let tensor = |param: &Param| {
            let before = self.base_head.iter().find(|(name, _)| *name == param.name);
            let tensor = before.map_or(&param.tensor, |(_, tensor)| tensor).detach();
            // A head is always held in f32.
            if lora::is_head(&param.name) { tensor.to_kind(self.kind) } else { tensor }
        };
        let tensors: Vec<_> = params.map(|param| (name(param), tensor(param))).collect();
        weights::check_finite(&tensors)?;
        weights::save(dir, &tensors, max_shard_bytes)?;
        config.save(dir, self.kind)
    }

    /// Writes the base of an adapter to `dir` if no folder holds it, so that every adapter saved later refers to `dir`. A base
    /// that an earlier run with the same start wrote there is left as it is.
    pub(super) fn keep_base(&mut self, dir: &Path, config: &ModelConfig, max_shard_bytes: usize) -> Result<()> {
        if self.adapter.is_none() || self.origin.is_some() {
            return Ok(());
        }
        if !is_model(dir) {
            replace_files(dir, |dir| self.save_model(dir, config, max_shard_bytes, |_| None))?;
            weights::sync(dir)?;
        }
        self.origin = Some(dir.to_path_buf());
        Ok(())
    }

    /// Reads the trained weights that [`Body::save`] wrote to `dir`.
    pub(super) fn load_trained(&mut self, dir: &Path, stored: impl Fn(&str) -> Option<String>) -> Result<()> {
        let adapter = self.adapter.is_some();
        let file = if adapter { adapter_folder::open_weights(dir)? } else { Checkpoint::open(dir)? };
        for param in self.params.iter_mut().filter(|param| !adapter || lora::is_trained(&param.name)) {
            let name = match adapter {
                true => adapter_folder::stored_name(&param.name),
                false => stored(&param.name).unwrap_or_else(|| param.name.clone()),
            };
            let (expected, found) = (param.tensor.size(), file.shape(&name));
            if found.as_ref() != Some(&expected) {
                let found = found.map_or("none".into(), |found| format!("{found:?}"));
                return Err(Error::invalid(dir, format!("tensor `{name}`: expected {expected:?}, found {found}")));
            }
            let saved = file.read(&name, self.device, param.tensor.kind())?;
            tch::no_grad(|| param.tensor.copy_(&saved));
        }
        Ok(())
    }
}
