//! `rlhf merge`: merges an adapter into its base and saves a full model.

use crate::run::announce;
use crate::run::output_dir::{check_folder, claim_folder};
use crate::settings::MergeConfig;
use rlhf_base::weights::{adapters_below, replace_files};
use rlhf_base::{Error, Result};
use rlhf_hub as hub;
use rlhf_lm::model::{AdapterFolder, CausalLm, Dtype, ModelOptions, SequenceClassifier};
use rlhf_lm::tokenizer::Tokenizer;
use std::path::Path;
use tch::Kind;

/// The note if the merged weights are rounded.
const ROUNDED: &str = "note: the merged weights are rounded to the 16 bits of the base, which loses a part of what the adapter learned (up to \
                       0.49 in a logit where it was measured); --save_dtype float32 keeps all of it";

/// Writes a model to a folder.
type Save<'a> = Box<dyn Fn(&Path) -> Result<()> + 'a>;

/// Merges an adapter into its base and writes the model, in the base's dtype or in `save_dtype`, and its tokenizer to `output_dir`.
///
/// # Errors
/// If there is no valid adapter, or the folder must not be overwritten.
pub fn merge(config: &MergeConfig) -> Result<()> {
    let dir = &hub::model_dir(&config.model_name_or_path, Some(&config.model_revision))?;
    let out = config.output_dir.as_path();
    let folder = AdapterFolder::find(dir)?.ok_or_else(|| {
        let found = adapters_below(dir).unwrap_or_else(|| "none".into());
        Error::invalid(
            dir,
            format!("expected an adapter (an adapter_config.json and no model beside it), found {found}"),
        )
    })?;
    check_folder(out, config.overwrite_output_dir, &[dir])?;
    // If the weights were merged in the dtype of the base, they would be rounded to it before they are rounded to `save_dtype`.
    let dtype = if config.save_dtype == Dtype::Auto { Dtype::Auto } else { Dtype::Float32 };
    let options = ModelOptions { dtype, ..ModelOptions::default() };
    let tokenizer = Tokenizer::from_pretrained(dir)?;
    let (eos, pad) = (tokenizer.eos_ids(), tokenizer.pad());
    let most = config.max_shard_size.0;
    // The model is in memory before anything is written.
    let (is_rounded, left_out);
    let save: Save<'_> = if folder.is_classifier()? {
        let mut model = SequenceClassifier::from_pretrained(dir, None, options)?;
        is_rounded = model.config().stored_kind() != Kind::Float;
        left_out = model.parts_left_out().map(str::to_string);
        model.merge_rounded();
        Box::new(move |dir| model.save_pretrained_as(dir, eos, pad, most, config.save_dtype))
    } else {
        let mut model = CausalLm::from_pretrained(dir, options)?;
        is_rounded = model.config().stored_kind() != Kind::Float;
        left_out = model.parts_left_out().map(str::to_string);
        model.merge_rounded();
        Box::new(move |dir| model.save_pretrained_as(dir, eos, pad, most, config.save_dtype))
    };
    let _hold = claim_folder(out, config.overwrite_output_dir, config)?;
    replace_files(out, |dir| {
        save(dir)?;
        tokenizer.save_pretrained(dir)
    })?;
    announce(&format!("the merged model is in {}", out.display()));
    if let Some(parts) = left_out {
        announce(&format!(
            "note: it is the language model alone: {parts} stay in the folder of the base, and are not merged or written"
        ));
    }
    if is_rounded && config.save_dtype == Dtype::Auto {
        announce(ROUNDED);
    }
    Ok(())
}
