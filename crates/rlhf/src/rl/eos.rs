//! Which end tokens are in the losses.

use super::settings::EosInLoss;
use crate::model::ModelConfig;
use crate::tokenizer::Tokenizer;

/// The end tokens of responses of `model` that are in no loss.
pub(crate) fn left_out_of_losses(eos_in_loss: EosInLoss, tokenizer: &Tokenizer, model: &ModelConfig) -> Vec<i64> {
    let eos = tokenizer.eos_ids().iter().copied();
    match eos_in_loss {
        EosInLoss::Always => Vec::new(),
        EosInLoss::Never => eos.collect(),
        EosInLoss::UnlessPad => eos.filter(|&id| Some(id) == deepspeed_chat_pad(tokenizer, model)).collect(),
    }
}

/// The token that DeepSpeed-Chat pads texts of `model` with: eos, except for Llama, whose tokenizer keeps its own padding
/// token; `None` where DeepSpeed-Chat would add one that no text has.
pub(crate) fn deepspeed_chat_pad(tokenizer: &Tokenizer, model: &ModelConfig) -> Option<i64> {
    let is_llama = model.family.name == "llama";
    if is_llama { tokenizer.pad() } else { tokenizer.eos().or(tokenizer.pad()) }
}
