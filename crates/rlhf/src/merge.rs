//! `rlhf merge`: an adapter folded into its base, saved as a whole model.

use crate::config::MergeConfig;
use crate::hub;
use crate::model::{AdapterFolder, CausalLm, Dtype, ModelOptions, SequenceClassifier};
use crate::report::{check_folder, claim_folder};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Weights go to files of at most this size, as where no other is asked for.
const MAX_SHARD_BYTES: usize = 50_000_000_000;

/// Writes the base of an adapter with the adapter folded in, in the base's dtype, with tokenizer, to `output_dir`.
///
/// # Errors
/// If there is no sound adapter, or the folder may not be written to.
pub fn merge(config: &MergeConfig) -> Result<()> {
    let (dir, out) = (&hub::model_dir(&config.model_name_or_path, None)?, config.output_dir.as_path());
    let folder = AdapterFolder::find(dir)?.ok_or_else(|| {
        Error::invalid(dir, "expected an adapter (an adapter_config.json and no model beside it), found none")
    })?;
    check_folder(out, config.overwrite_output_dir, &[dir])?;
    let options = ModelOptions { dtype: Dtype::Auto, ..ModelOptions::default() };
    let tokenizer = Tokenizer::from_pretrained(dir)?;
    let (eos, pad) = (tokenizer.eos_ids(), tokenizer.pad());
    if folder.is_classifier()? {
        let mut model = SequenceClassifier::from_pretrained(dir, None, options)?;
        model.merge_adapter();
        claim_folder(out, config.overwrite_output_dir, config)?;
        model.save_pretrained(out, eos, pad, MAX_SHARD_BYTES)?;
    } else {
        let mut model = CausalLm::from_pretrained(dir, options)?;
        model.merge_adapter();
        claim_folder(out, config.overwrite_output_dir, config)?;
        model.save_pretrained(out, eos, pad, MAX_SHARD_BYTES)?;
    }
    tokenizer.save_pretrained(out)
}
