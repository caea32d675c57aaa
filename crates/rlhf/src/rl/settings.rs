//! Settings of PPO's losses, advantages and masks.

use serde::Serialize;

use super::entropy::EntropyControl;
use super::math::{ImportanceLevel, LossAggregation, Objective, PolicyClip, ScorePosition};
use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{
    CRITIC, Choice, Choices, LOSS, Settings, above_zero, all, defaults, exclude, expect, no_effect, zero_or_more,
};

/// Further terms and limits of the policy's loss.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct LossConfig {
    /// The policy's objective, and how the losses of tokens become that of a mini-batch: `bnpo` is the mean over its tokens; `grpo`
    /// the mean over responses of the means over their tokens; `luspo` of the sums; `dr_grpo` the sum over all tokens, divided by the
    /// responses times `response_length`; `dapo` by the tokens of the whole update. `cispo`, `sapo` and `vespo` have objectives of
    /// their own.
    #[setting(heading = LOSS, default = "bnpo", replay = Changes, short = "how losses of tokens are combined")]
    pub loss_type: LossType,
    /// Unit of the probability ratio: each token; the `sequence`, as the geometric mean of its tokens' ratios (GSPO); or their product,
    /// the ratio of the whole response.
    #[setting(heading = LOSS, default = "token", replay = Changes)]
    pub importance_sampling_level: ImportanceLevel,
    /// Upper clip range: the probability ratio is clipped to at most 1 plus this; for `cispo` to at most this [default: `cliprange`].
    #[setting(alias = "epsilon_high", heading = LOSS, replay = Changes)]
    pub cliprange_high: Option<f64>,
    /// Dual-clip constant above 1: bounds the probability ratio where the advantage is negative; typically 3.
    #[setting(alias = "delta", heading = LOSS, replay = Changes)]
    pub dual_clip: Option<f64>,
    /// Entropy bonus coefficient: this times the entropy is subtracted from the policy's loss.
    #[setting(heading = LOSS, default = 0.0, replay = Changes)]
    pub entropy_coef: f64,
    /// Change the entropy bonus coefficient after each optimizer step: it rises by `entropy_coef_delta` while the entropy is at most
    /// `entropy_target`, and falls above it, where there is no bonus. `entropy_coef` is its initial value.
    #[setting(heading = LOSS, replay = Changes)]
    pub use_adaptive_entropy: bool,
    /// Minimum coefficient of `use_adaptive_entropy`.
    #[setting(heading = LOSS, default = 0.0, replay = Changes)]
    pub entropy_coef_min: f64,
    /// Maximum coefficient of `use_adaptive_entropy`.
    #[setting(heading = LOSS, default = 1.0, replay = Changes)]
    pub entropy_coef_max: f64,
    /// Change of the coefficient of `use_adaptive_entropy` in an optimizer step.
    #[setting(heading = LOSS, default = 0.005, replay = Changes)]
    pub entropy_coef_delta: f64,
    /// Target of `use_adaptive_entropy`: mean entropy per token, in nats; near that of the first updates.
    #[setting(heading = LOSS, default = 0.2, replay = Changes)]
    pub entropy_target: f64,
    /// Stop an update's epochs after one whose last mini-batch has a KL per token to the sampling policy above 1.5 times this.
    #[setting(heading = LOSS, replay = Changes)]
    pub target_kl: Option<f64>,
    /// Skip the optimizer step of a mini-batch whose mean probability ratio is above this.
    #[setting(heading = LOSS, replay = Changes)]
    pub ratio_threshold: Option<f64>,
    /// Share of the tokens, those of the highest entropy, that the policy's objective trains; takes one further forward pass if below 1.
    #[setting(heading = LOSS, default = 1.0, replay = Changes)]
    pub top_entropy_quantile: f64,
    /// Leave out responses with a negative advantage whose mean KL per token from the sampling policy is above this; takes one further
    /// forward pass.
    #[setting(heading = LOSS, replay = Changes)]
    pub off_policy_mask_threshold: Option<f64>,
    /// Temperature of the loss `sapo` where the advantage is positive.
    #[setting(heading = LOSS, default = 1.0, replay = Changes)]
    pub sapo_temperature_pos: f64,
    /// Temperature of the loss `sapo` where the advantage is negative.
    #[setting(heading = LOSS, default = 1.05, replay = Changes)]
    pub sapo_temperature_neg: f64,
    /// Power of the ratio in the loss `vespo` where the advantage is positive.
    #[setting(heading = LOSS, default = 2.0, replay = Changes)]
    pub vespo_k_pos: f64,
    /// Decay of the ratio in the loss `vespo` where the advantage is positive.
    #[setting(heading = LOSS, default = 3.0, replay = Changes)]
    pub vespo_lambda_pos: f64,
    /// Power of the ratio in the loss `vespo` where the advantage is negative.
    #[setting(heading = LOSS, default = 3.0, replay = Changes)]
    pub vespo_k_neg: f64,
    /// Decay of the ratio in the loss `vespo` where the advantage is negative.
    #[setting(heading = LOSS, default = 2.0, replay = Changes)]
    pub vespo_lambda_neg: f64,
}

/// A loss of the policy, by its name in TRL's `GRPOConfig`; see [`LossConfig::loss_type`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(rename_all = "snake_case")]
pub enum LossType {
    /// Mean over the tokens of a mini-batch.
    Bnpo,
    /// Mean over responses of the means over their tokens.
    Grpo,
    /// Sum over tokens, divided by the responses times their largest length.
    DrGrpo,
    /// Sum over tokens, divided by the tokens of the update.
    Dapo,
    /// Weights without a gradient, clipped above.
    Cispo,
    /// A soft clip.
    Sapo,
    /// Mean over responses of the sums over their tokens.
    Luspo,
    /// Weights of whole responses without a gradient.
    Vespo,
}

// Not derived: `rl::math` depends on tensors only.
impl Choices for ImportanceLevel {
    const ALL: &'static [(Self, Choice)] = &[
        (Self::Token, Choice::new("token")),
        (Self::Sequence, Choice::new("sequence")),
        (Self::SequenceProduct, Choice::new("sequence_product")),
    ];
    const EXPECTED: &'static str = "token, sequence or sequence_product";
}

impl LossConfig {
    /// Checks this group of settings alone.
    pub(crate) fn check(&self) -> Result<()> {
        let above_one = |name, value: Option<f64>| {
            value.map_or(Ok(()), |x| expect(x.is_finite() && x > 1.0, name, x, "a number above 1"))
        };
        all([
            self.cliprange_high.map_or(Ok(()), |range| above_zero(name_of!(self.cliprange_high), range)),
            zero_or_more(name_of!(self.entropy_coef), self.entropy_coef),
            self.target_kl.map_or(Ok(()), |kl| above_zero(name_of!(self.target_kl), kl)),
            above_one(name_of!(self.dual_clip), self.dual_clip),
            above_one(name_of!(self.ratio_threshold), self.ratio_threshold),
            self.check_objective(),
            self.check_entropy_control(),
        ])
    }

    /// Checks the settings of an entropy bonus that follows a target.
    fn check_entropy_control(&self) -> Result<()> {
        let usual: Self = defaults();
        let min = self.entropy_coef_min;
        let max = self.entropy_coef_max;
        let only_adaptive = |name, value: f64, usual: f64| {
            if self.use_adaptive_entropy || value == usual {
                zero_or_more(name, value)
            } else {
                no_effect(name, value, "without use_adaptive_entropy = true")
            }
        };
        all([
            only_adaptive(name_of!(self.entropy_coef_min), min, usual.entropy_coef_min),
            only_adaptive(name_of!(self.entropy_coef_max), max, usual.entropy_coef_max),
            only_adaptive(name_of!(self.entropy_coef_delta), self.entropy_coef_delta, usual.entropy_coef_delta),
            only_adaptive(name_of!(self.entropy_target), self.entropy_target, usual.entropy_target),
            if self.use_adaptive_entropy {
                expect(min <= max, name_of!(self.entropy_coef_min), min, &format!("at most entropy_coef_max = {max}"))
            } else {
                Ok(())
            },
        ])
    }

    /// The rule for the coefficient of the entropy bonus; `None` where it is constant.
    pub(crate) fn entropy_control(&self) -> Option<EntropyControl> {
        self.use_adaptive_entropy.then_some(EntropyControl {
            coef: self.entropy_coef,
            min: self.entropy_coef_min,
            max: self.entropy_coef_max,
            delta: self.entropy_coef_delta,
            target: self.entropy_target,
        })
    }

    /// Checks the settings of single objectives.
    fn check_objective(&self) -> Result<()> {
        let usual: Self = defaults();
        let quantile = self.top_entropy_quantile;
        let only_with = |loss_type: LossType, name, value: f64, usual: f64| {
            if self.loss_type == loss_type || value == usual {
                zero_or_more(name, value)
            } else {
                no_effect(name, value, &format!("without loss_type = {loss_type:?}").to_lowercase())
            }
        };
        let whole = self.importance_sampling_level != ImportanceLevel::Token;
        all([
            expect(
                quantile > 0.0 && quantile <= 1.0,
                name_of!(self.top_entropy_quantile),
                quantile,
                "a number above 0, at most 1",
            ),
            self.off_policy_mask_threshold
                .map_or(Ok(()), |kl| above_zero(name_of!(self.off_policy_mask_threshold), kl)),
            only_with(
                LossType::Sapo,
                name_of!(self.sapo_temperature_pos),
                self.sapo_temperature_pos,
                usual.sapo_temperature_pos,
            ),
            only_with(
                LossType::Sapo,
                name_of!(self.sapo_temperature_neg),
                self.sapo_temperature_neg,
                usual.sapo_temperature_neg,
            ),
            above_zero(name_of!(self.sapo_temperature_pos), self.sapo_temperature_pos),
            above_zero(name_of!(self.sapo_temperature_neg), self.sapo_temperature_neg),
            only_with(LossType::Vespo, name_of!(self.vespo_k_pos), self.vespo_k_pos, usual.vespo_k_pos),
            only_with(LossType::Vespo, name_of!(self.vespo_lambda_pos), self.vespo_lambda_pos, usual.vespo_lambda_pos),
            only_with(LossType::Vespo, name_of!(self.vespo_k_neg), self.vespo_k_neg, usual.vespo_k_neg),
            only_with(LossType::Vespo, name_of!(self.vespo_lambda_neg), self.vespo_lambda_neg, usual.vespo_lambda_neg),
            if whole && self.loss_type == LossType::Vespo {
                no_effect(
                    name_of!(self.importance_sampling_level),
                    "sequence",
                    "with loss_type = vespo, whose weights are those of whole responses",
                )
            } else {
                Ok(())
            },
            match self.dual_clip {
                Some(delta) if matches!(self.loss_type, LossType::Cispo | LossType::Sapo | LossType::Vespo) => {
                    no_effect(
                        name_of!(self.dual_clip),
                        delta,
                        "with a loss_type that does not clip the ratio: cispo, sapo and vespo",
                    )
                }
                _ => Ok(()),
            },
        ])
    }

    /// The bounds of the probability ratio in the clipped objective.
    pub(crate) fn clip(&self, cliprange: f64) -> PolicyClip {
        PolicyClip { low: cliprange, high: self.cliprange_high.unwrap_or(cliprange), dual: self.dual_clip }
    }

    /// The policy's objective.
    pub(crate) fn objective(&self, cliprange: f64) -> Objective {
        match self.loss_type {
            LossType::Cispo => Objective::Cispo { most: self.cliprange_high.unwrap_or(cliprange) },
            LossType::Sapo => {
                Objective::Sapo { positive: self.sapo_temperature_pos, negative: self.sapo_temperature_neg }
            }
            LossType::Vespo => Objective::Vespo {
                positive: [self.vespo_k_pos, self.vespo_lambda_pos],
                negative: [self.vespo_k_neg, self.vespo_lambda_neg],
            },
            LossType::Bnpo | LossType::Grpo | LossType::DrGrpo | LossType::Dapo | LossType::Luspo => {
                Objective::Clipped(self.clip(cliprange))
            }
        }
    }

    /// The aggregation of the losses of tokens, where a response has at most `response_length` tokens.
    pub(crate) fn aggregation(&self, response_length: usize) -> LossAggregation {
        match self.loss_type {
            LossType::Bnpo => LossAggregation::Tokens,
            LossType::Grpo | LossType::Sapo => LossAggregation::Responses,
            LossType::Luspo => LossAggregation::ResponseSums,
            LossType::DrGrpo => LossAggregation::Length(response_length),
            LossType::Dapo | LossType::Cispo | LossType::Vespo => LossAggregation::UpdateTokens,
        }
    }
}

/// The responses, and their tokens, that are trained on.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct MaskConfig {
    /// Exclude responses with fewer counted tokens from training. If none is left, the last ones that were trained on are used
    /// again.
    #[setting(heading = LOSS, default = 0, replay = Sampling)]
    pub min_response_length: usize,
    /// Mask responses that did not stop within `response_length` in the losses; their rewards still count in their groups.
    #[setting(heading = LOSS, replay = Changes)]
    pub mask_truncated_completions: bool,
    /// Whether a response's end-of-sequence token is in the losses. Excluded, it still gets the score. `unless_pad` excludes it
    /// where DeepSpeed-Chat pads with it: for all models but Llama, and for a Llama whose padding token it is.
    #[setting(heading = LOSS, default = "always", replay = Changes)]
    pub eos_in_loss: EosInLoss,
    /// Train the value after a response's last token too. Only with a `score_position` after that token.
    #[setting(heading = CRITIC, default = true, replay = Changes)]
    pub last_value_in_loss: bool,
}

impl MaskConfig {
    pub(crate) fn check(&self, response_length: usize, score_position: ScorePosition) -> Result<()> {
        let most = format!("at most response_length = {response_length}");
        let least = self.min_response_length;
        let ends = score_position == ScorePosition::LastToken;
        let eos = self.eos_in_loss.name();
        all([
            expect(least <= response_length, name_of!(self.min_response_length), least, &most),
            if !self.last_value_in_loss && ends {
                let why = "with score_position = last_token: there is no value behind it";
                no_effect(name_of!(self.last_value_in_loss), false, why)
            } else {
                Ok(())
            },
            if self.eos_in_loss != EosInLoss::Always && ends {
                exclude(
                    "score_position",
                    name_of!(self.eos_in_loss),
                    format!(
                        " = last_token and eos_in_loss = {eos} exclude each other: the score would be on a token \
                     that may be masked; after_stop puts it after the last unmasked token"
                    ),
                )
            } else {
                Ok(())
            },
        ])
    }
}

/// Whether the losses include the end-of-sequence token of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(rename_all = "snake_case")]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(rename_all = "snake_case")]
pub enum WhitenAdvantages {
    /// All tokens of an update.
    Batch,
    /// The tokens of each mini-batch.
    MiniBatch,
    /// Advantages are not whitened.
    None,
}

impl Choices for ScorePosition {
    const ALL: &'static [(Self, Choice)] =
        &[(Self::AfterStop, Choice::new("after_stop")), (Self::LastToken, Choice::new("last_token"))];
    const EXPECTED: &'static str = "after_stop or last_token";
}
