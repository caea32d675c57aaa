//! `rlhf convert`: makes a model folder of a GGUF file, or a GGUF file of a model folder.

mod description;
mod export;
mod forms;
mod order;
mod vocabulary;

use crate::run::output_dir::{CONFIG, FolderLock, check_folder, claim_locked, is_run_file, resolved_settings};
use crate::settings::ConvertConfig;
use description::{Description, describe};
use order::To;
use rlhf_base::safe_text::beginning;
use rlhf_base::weights::{STAGING, TensorSpec, pretty, replace_files, save_of, write_text};
use rlhf_base::{Error, Result};
use rlhf_lm::gguf::Gguf;
use rlhf_lm::model::{ModelConfig, ModelSizes};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;
use tch::{Kind, Tensor};
use vocabulary::Vocabulary;

/// Outcome of `rlhf convert`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvertReport {
    /// The number of tensors that were written.
    pub tensors: usize,
    /// The reason why there is no tokenizer, and the files to copy.
    pub note: Option<String>,
}

/// Writes the model in the GGUF file `config.file` to `config.output_dir`, in Hugging Face format: weights, configuration and, where
/// its rules are known, the tokenizer; or the model in the folder `config.file` to the GGUF file `config.output_file`.
///
/// # Errors
/// If the file is damaged, or holds a model or a quantization that is not supported; if the folder is not empty, except for leftovers of an
/// interrupted conversion, which are replaced; if `output_file` exists. Nothing is written then.
pub fn convert(config: &ConvertConfig) -> Result<ConvertReport> {
    config.check()?;
    match (&config.output_dir, &config.output_file) {
        (_, Some(file)) => Ok(ConvertReport { tensors: export::export(config, file)?, note: None }),
        (Some(dir), None) => import(config, dir),
        (None, None) => unreachable!("one of them is checked to be set"),
    }
}

/// Makes the model folder `out`.
fn import(config: &ConvertConfig, out: &Path) -> Result<ConvertReport> {
    let lock = FolderLock::acquire(out)?;
    let unfinished = check_new(out, config)?;
    check_folder(out, unfinished, &[config.file.as_path()])?;
    let file = Gguf::open(&config.file)?;
    let described = describe(&file)?;
    let model = ModelConfig::from_json(file.path(), described.config.clone())?;
    let kind = config.dtype.kind().unwrap_or(Kind::Float);
    let plan = plan(&file, &described, &model, kind)?;
    for (spec, stored) in plan.iter().filter(|(spec, _)| order::is_rate(&spec.name)) {
        // They are refused before anything is written.
        drop(read(&file, &described, &model, stored, &spec.name, kind)?);
    }
    let vocabulary = Vocabulary::read(&file, model.vocab_size)?;
    let specs: Vec<TensorSpec> = plan.iter().map(|(spec, _)| spec.clone()).collect();
    let mut tensor = |i: usize| read(&file, &described, &model, &plan[i].1, &plan[i].0.name, kind);
    let _hold = claim_locked(out, lock, unfinished, config)?;
    replace_files(out, |dir| {
        save_of(dir, &specs, config.max_shard_size.0, &mut tensor)?;
        model.save(dir, kind)?;
        if let Vocabulary::Known { tokenizer, settings } = &vocabulary {
            write_text(&dir.join("tokenizer.json"), &pretty(tokenizer))?;
            write_text(&dir.join("tokenizer_config.json"), &pretty(settings))?;
        }
        Ok(())
    })?;
    let note = match vocabulary {
        Vocabulary::Known { .. } => None,
        Vocabulary::Unknown(reason) => Some(format!(
            "no tokenizer was written ({reason}): copy tokenizer.json and tokenizer_config.json of the original model to {}",
            out.display()
        )),
    };
    Ok(ConvertReport { tensors: specs.len(), note })
}

/// Checks that the folder `dir` does not exist, is empty, or has only leftovers of an interrupted conversion. Returns whether it has such
/// leftovers.
fn check_new(dir: &Path, config: &ConvertConfig) -> Result<bool> {
    let entries = match std::fs::read_dir(dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
        entries => entries.map_err(Error::io("read the folder", dir))?,
    };
    // The model's own configuration is written last.
    let unfinished = !dir.join("config.json").exists() && holds_conversion(dir, config);
    for entry in entries {
        let name = entry.map_err(Error::io("read the folder", dir))?.file_name().to_string_lossy().into_owned();
        let is_leftover = name == STAGING || name.strip_suffix(".tmp") == Some(CONFIG);
        if !(is_leftover || unfinished && is_run_file(&name)) {
            let message = format!("expected a new or an empty folder, found one with `{name}`");
            return Err(Error::invalid(dir, message));
        }
    }
    Ok(unfinished)
}

/// Returns whether the folder `dir` has the `config.yaml` of a conversion, which has exactly the settings of one.
fn holds_conversion(dir: &Path, config: &ConvertConfig) -> bool {
    let names =
        |settings: Value| settings.as_object().map(|settings| settings.keys().cloned().collect::<BTreeSet<_>>());
    let written = resolved_settings(dir).and_then(names);
    written.is_some() && written == serde_json::to_value(config).ok().and_then(names)
}

/// The tensors to write, each with its name in the GGUF file, in the order of the model.
fn plan(file: &Gguf, described: &Description, model: &ModelConfig, kind: Kind) -> Result<Vec<(TensorSpec, String)>> {
    let mut by_name = BTreeMap::new();
    for (name, entry) in file.tensors() {
        // Layers after the model's predict further tokens.
        let is_later = forms::numbered("blk.", name).is_some_and(|(layer, _)| described.is_later(layer));
        if is_later || described.unused.contains(&name.as_str()) {
            continue;
        }
        let shown = beginning(name, 120);
        let folder_name = described.form.folder_name(name).ok_or_else(|| {
            file.error(format!("tensor `{shown}`: a `{}` model has no such tensor", model.family.name))
        })?;
        if let Some((other, _)) = by_name.insert(folder_name, (name, &entry.shape)) {
            let other = beginning(other, 120);
            return Err(file.error(format!("tensors `{other}` and `{shown}`: expected one of them, found both")));
        }
    }
    let expected = ModelSizes::shapes_of_causal_lm(model, file.path())?;
    let mut plan = Vec::new();
    for (name, shape) in expected {
        let (stored, found) =
            by_name.remove(&name).ok_or_else(|| file.error(format!("expected a tensor for `{name}`, found none")))?;
        // llama.cpp's convolutions have no dimension of groups.
        if *found != shape && !(order::is_convolution(&name) && *found == [shape[0], shape[2]]) {
            let stored = beginning(stored, 120);
            return Err(file.error(format!("tensor `{stored}`: expected {shape:?} for `{name}`, found {found:?}")));
        }
        plan.push((TensorSpec { name, kind, shape }, stored.clone()));
    }
    match by_name.values().next() {
        None => Ok(plan),
        Some((stored, _)) => Err(file
            .error(format!("tensor `{}`: a model of the file's settings has no such tensor", beginning(stored, 120)))),
    }
}

/// Reads the tensor `stored` for `name` of a model folder, in the folder's order.
fn read(
    file: &Gguf,
    described: &Description,
    model: &ModelConfig,
    stored: &str,
    name: &str,
    kind: Kind,
) -> Result<Tensor> {
    // Numbers that change are rounded to `kind` after that.
    let read_kind = if order::changes_numbers(name, model) { Kind::Float } else { kind };
    let tensor = file.read(stored, read_kind)?;
    let tensor = order::reordered(name, tensor, model, described.form.is_interleaved, To::Folder)
        .map_err(|error| file.error(format!("tensor `{}`: {error}", beginning(stored, 120))))?;
    Ok(tensor.to_kind(kind))
}
