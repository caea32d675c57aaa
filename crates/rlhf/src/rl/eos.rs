//! Which end tokens are in the losses.

use super::settings::EosInLoss;
use rlhf_lm::model::ModelConfig;
use rlhf_lm::tokenizer::Tokenizer;

/// The end tokens that are left out of the losses of `model`.
pub(crate) fn left_out_of_losses(eos_in_loss: EosInLoss, tokenizer: &Tokenizer, model: &ModelConfig) -> Vec<i64> {
    let eos = tokenizer.eos_ids().iter().copied();
    match eos_in_loss {
        EosInLoss::Always => Vec::new(),
        EosInLoss::Never => eos.collect(),
        EosInLoss::UnlessPad => eos.filter(|&id| Some(id) == tokenizer.deepspeed_chat_pad(model)).collect(),
    }
}
