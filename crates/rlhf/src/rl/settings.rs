//! Settings of PPO's losses, advantages and masks.

use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::math::ScorePosition;
use crate::Result;
use crate::flag::{NONE, PPO, above_zero, all, expect, no_effect, optional, usage, zero_or_more};

/// Further terms and limits of the policy's loss.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct LossConfig {
    /// Upper clip range: the probability ratio is clipped to at most 1 plus this [default: `cliprange`].
    #[arg(long, help_heading = PPO, default_value = NONE, value_parser = optional::<f64>)]
    pub cliprange_high: std::option::Option<f64>,
    /// Dual-clip constant above 1: bounds the probability ratio where the advantage is negative; typically 3.
    #[arg(long, help_heading = PPO, default_value = NONE, value_parser = optional::<f64>)]
    pub dual_clip: std::option::Option<f64>,
    /// Entropy bonus coefficient: this times the entropy is subtracted from the policy's loss.
    #[arg(long, help_heading = PPO, default_value_t = 0.0)]
    pub entropy_coef: f64,
    /// Stop an update's epochs after one whose last mini-batch has a KL per token to the sampling policy above 1.5 times this.
    #[arg(long, help_heading = PPO, default_value = NONE, value_parser = optional::<f64>)]
    pub target_kl: std::option::Option<f64>,
    /// Skip the optimizer step of a mini-batch whose mean probability ratio is above this.
    #[arg(long, help_heading = PPO, default_value = NONE, value_parser = optional::<f64>)]
    pub ratio_threshold: std::option::Option<f64>,
}

impl LossConfig {
    /// Checks what no other group of settings has a part in.
    pub(crate) fn check(&self) -> Result<()> {
        let above_one = |name, found: Option<f64>| {
            found.map_or(Ok(()), |x| expect(x.is_finite() && x > 1.0, name, x, "a number above 1"))
        };
        all([
            self.cliprange_high.map_or(Ok(()), |range| above_zero("cliprange_high", range)),
            zero_or_more("entropy_coef", self.entropy_coef),
            self.target_kl.map_or(Ok(()), |kl| above_zero("target_kl", kl)),
            above_one("dual_clip", self.dual_clip),
            above_one("ratio_threshold", self.ratio_threshold),
        ])
    }
}

/// The responses, and their tokens, that are trained on.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct MaskConfig {
    /// Exclude responses with fewer counted tokens from training. If none is left, the last ones that were trained on are used
    /// again.
    #[arg(long, help_heading = PPO, default_value_t = 0)]
    pub min_response_length: usize,
    /// Whether a response's end-of-sequence token is in the losses. Excluded, it still gets the score. `unless_pad` excludes it
    /// where DeepSpeed-Chat pads with it: for all models but Llama, and for a Llama whose padding token it is.
    #[arg(long, help_heading = PPO, value_enum, default_value = "always")]
    pub eos_in_loss: EosInLoss,
    /// Train the value after a response's last token too. Only with a `score_position` after that token.
    #[arg(long, help_heading = PPO, default_value_t = true)]
    pub last_value_in_loss: bool,
}

impl MaskConfig {
    pub(crate) fn check(&self, response_length: usize, score_position: ScorePosition) -> Result<()> {
        let most = format!("at most response_length = {response_length}");
        let least = self.min_response_length;
        let ends = score_position == ScorePosition::LastToken;
        let eos = self.eos_in_loss.to_possible_value().map_or_else(String::new, |value| value.get_name().to_string());
        all([
            expect(least <= response_length, "min_response_length", least, &most),
            if !self.last_value_in_loss && ends {
                let why = "with score_position = last_token: there is no value behind it";
                no_effect("last_value_in_loss", false, why)
            } else {
                Ok(())
            },
            if self.eos_in_loss != EosInLoss::Always && ends {
                usage(format!(
                    "score_position = last_token and eos_in_loss = {eos} exclude each other: the score would be on a token \
                     that may be masked; after_stop puts it after the last unmasked token"
                ))
            } else {
                Ok(())
            },
        ])
    }
}

/// Whether the losses include the end-of-sequence token of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum EosInLoss {
    /// It is included, as every token is.
    Always,
    /// It is included unless DeepSpeed-Chat pads with it, which attends to no padding: it does with all models but Llama, whose tokenizer
    /// has its own padding token or gets one.
    UnlessPad,
    /// It is masked.
    Never,
}

/// The tokens over which advantages are whitened to mean 0 and variance 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum WhitenAdvantages {
    /// All tokens of an update.
    Batch,
    /// The tokens of each mini-batch.
    MiniBatch,
    /// Advantages are not whitened.
    None,
}

impl ValueEnum for ScorePosition {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::AfterStop, Self::LastToken]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(match self {
            Self::AfterStop => "after_stop",
            Self::LastToken => "last_token",
        }))
    }
}
