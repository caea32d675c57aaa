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
    for planned in plan.iter().filter(|planned| order::is_rate(&planned.spec.name)) {
        // They are refused before anything is written.
        drop(planned.read(&file, &described, &model)?);
    }
    let vocabulary = Vocabulary::read(&file, model.vocab_size)?;
    let specs: Vec<TensorSpec> = plan.iter().map(|planned| planned.spec.clone()).collect();
    let mut tensor = |i: usize| plan[i].read(&file, &described, &model);
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

/// A tensor to write.
#[derive(Debug)]
struct Planned {
    spec: TensorSpec,
    /// Its names in the GGUF file: one, or those of its parts.
    stored: Vec<String>,
    /// The entry of that tensor, if it stacks matrices.
    entry: Option<i64>,
}

/// A file's tensor for a name in a model folder.
struct Stored<'a> {
    name: &'a str,
    shape: &'a [i64],
    /// The entry of a stack.
    entry: Option<i64>,
}

/// The tensors of the file by their names in a model folder, and by their number among the parts of one there.
fn stored_tensors<'a>(file: &'a Gguf, described: &Description) -> Result<BTreeMap<(String, usize), Stored<'a>>> {
    let mut by_name: BTreeMap<(String, usize), Stored<'a>> = BTreeMap::new();
    for (name, entry) in file.tensors() {
        if described.is_unused(name) {
            continue;
        }
        let shown = beginning(name, 120);
        let count = if entry.shape.len() == 3 { entry.shape[0] } else { 0 };
        // No model has more experts than this.
        let stack = described.form.stacked_names(name, count.min(1 << 16)).filter(|_| count > 0);
        let one = || {
            let part = described.form.whole_of(name);
            part.or_else(|| Some((described.form.folder_name(name)?, 0)))
        };
        let folder_names: Vec<((String, usize), Option<i64>)> = match (stack, one()) {
            (Some(names), _) => names.into_iter().map(|name| (name, 0)).zip((0..).map(Some)).collect(),
            (None, Some(only)) => vec![(only, None)],
            (None, None) => {
                let family = described.form.model_type;
                return Err(file.error(format!("tensor `{shown}`: a `{family}` model has no such tensor")));
            }
        };
        for (folder_name, entry_at) in folder_names {
            let shape = if entry_at.is_some() { &entry.shape[1..] } else { &entry.shape[..] };
            if let Some(other) = by_name.insert(folder_name, Stored { name, shape, entry: entry_at }) {
                let other = beginning(other.name, 120);
                return Err(file.error(format!("tensors `{other}` and `{shown}`: expected one of them, found both")));
            }
        }
    }
    Ok(by_name)
}

/// The tensors to write, in the order of the model.
fn plan(file: &Gguf, described: &Description, model: &ModelConfig, kind: Kind) -> Result<Vec<Planned>> {
    let mut by_name = stored_tensors(file, described)?;
    let expected = ModelSizes::shapes_of_causal_lm(model, file.path())?;
    let mut plan = Vec::new();
    for (name, shape) in expected {
        // Old files have some tensors whole that others have in parts.
        let is_whole = described.form.gguf_name(&name).is_some_and(|whole| file.tensors().contains_key(&whole));
        let has_parts = described.form.parts_of(&name).is_some() && !is_whole;
        let expected_shapes = if has_parts {
            order::part_shapes(&shape, model).into()
        } else {
            vec![order::file_shape(&name, &shape, model)]
        };
        let (mut stored, mut entry) = (Vec::new(), None);
        for (part, expected) in expected_shapes.iter().enumerate() {
            let found = by_name.remove(&(name.clone(), part));
            let found = found.ok_or_else(|| file.error(format!("expected a tensor for `{name}`, found none")))?;
            // Rows of one number, and a single row, may lack a dimension.
            if numbers_of(found.shape) != numbers_of(expected) {
                let (stored, found) = (beginning(found.name, 120), found.shape);
                let message = format!("tensor `{stored}`: expected {expected:?} for `{name}`, found {found:?}");
                return Err(file.error(message));
            }
            stored.push(found.name.to_string());
            entry = found.entry;
        }
        plan.push(Planned { spec: TensorSpec { name, kind, shape }, stored, entry });
    }
    match by_name.values().next() {
        None => Ok(plan),
        Some(stored) => {
            let stored = beginning(stored.name, 120);
            Err(file.error(format!("tensor `{stored}`: a model of the file's settings has no such tensor")))
        }
    }
}

/// A shape without dimensions of one entry.
fn numbers_of(shape: &[i64]) -> Vec<i64> {
    shape.iter().copied().filter(|size| *size != 1).collect()
}

impl Planned {
    /// Reads the tensor, in a model folder's order.
    fn read(&self, file: &Gguf, described: &Description, model: &ModelConfig) -> Result<Tensor> {
        let TensorSpec { name, kind, shape } = &self.spec;
        // Numbers that change are rounded to `kind` after that.
        let read_kind = if order::changes_numbers(name, model) { Kind::Float } else { *kind };
        if let [first, second] = self.stored.as_slice() {
            let [one, other] = order::part_shapes(shape, model);
            let part = |name: &str, shape: &[i64]| -> Result<Tensor> { Ok(file.read(name, *kind)?.f_reshape(shape)?) };
            return order::joined([&part(first, &one)?, &part(second, &other)?], model);
        }
        let stored = &self.stored[0];
        let tensor = match self.entry {
            None => file.read(stored, read_kind)?,
            Some(entry) => file.read_entry(stored, entry, read_kind)?,
        };
        let tensor = tensor.f_reshape(order::file_shape(name, shape, model).as_slice())?;
        let tensor = order::reordered(name, tensor, model, described.form.is_interleaved, To::Folder)
            .map_err(|error| file.error(format!("tensor `{}`: {error}", beginning(stored, 120))))?;
        Ok(tensor.to_kind(*kind))
    }
}
