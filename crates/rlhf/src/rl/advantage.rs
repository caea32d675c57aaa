//! Advantage estimators and whitening.

use super::settings::WhitenAdvantages;
use crate::rl::experience::{Experience, row_index};
use crate::rl::math::{self, Lambda, LeaveOut, ScorePosition};
use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{
    ADVANTAGES, Choices, MOST_ROWS, Refusals, Settings, above_zero, exclude, no_effect, refuse, zero_to_one,
};
use serde::Serialize;
use tch::Tensor;
use tch_ext::{on_device, to_host};

/// Added to a standard deviation before a division by it; as in TRL's GRPOTrainer and RLOOTrainer.
const STD_EPSILON: f64 = 1e-4;

/// The estimator of the advantages, and groups of responses to one prompt.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct AdvantageConfig {
    /// Estimator of the advantages. `gae` needs a value model; the others compare responses or use returns, and no value model is
    /// loaded. `rloo`, `grpo`, `dr_grpo` and `reinforce_baseline` compare the `num_generations` responses to a prompt, `remax` compares
    /// with a greedy response, `reinforce` is REINFORCE++.
    #[setting(heading = ADVANTAGES, default = "gae", replay = Changes)]
    pub advantage_estimator: AdvantageEstimator,
    /// Responses to each prompt, which make a group. Batch sizes count responses.
    #[setting(alias = "n_samples_per_prompt", heading = ADVANTAGES, default = 1, replay = Sampling, most = MOST_ROWS, short = "responses to each prompt, a group")]
    pub num_generations: usize,
    /// Standard deviation by which the advantages of `grpo` are divided: that of each group, that of the whole update, or none.
    #[setting(heading = ADVANTAGES, default = "group", replay = Changes)]
    pub scale_rewards: ScaleRewards,
    /// Normalize the advantages of `rloo` to mean 0 and standard deviation 1 over the responses of an update.
    #[setting(heading = ADVANTAGES, replay = Changes)]
    pub normalize_advantages: bool,
    /// Combination of several rewards: `sum_then_normalize` compares their weighted sums; `normalize_then_sum` compares each reward by
    /// itself within its group first, and normalizes the weighted sums over the update (GDPO).
    #[setting(heading = ADVANTAGES, default = "sum_then_normalize", replay = Changes)]
    pub multi_objective_aggregation: Aggregation,
    /// Lambda of the policy's advantages, where the returns of the value model keep `lam` (decoupled GAE) [default: `lam`].
    #[setting(heading = ADVANTAGES, replay = Changes)]
    pub lam_policy: Option<f64>,
    /// Lambda of the policy's advantages that follows the length of a response: 1 - 1 / (this * length) (VAPO uses 0.05).
    #[setting(heading = ADVANTAGES, replay = Changes)]
    pub lam_policy_alpha: Option<f64>,
}

/// An advantage estimator, by its name as a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(rename_all = "snake_case")]
pub enum AdvantageEstimator {
    /// Generalized advantage estimation, with a value model.
    Gae,
    /// REINFORCE leave-one-out: the reward less the mean of the other rewards of the group.
    Rloo,
    /// The reward less the mean of its group, divided by a standard deviation.
    // OpenRLHF's name.
    #[choice(alias = "group_norm")]
    Grpo,
    /// The reward less the mean of its group.
    DrGrpo,
    /// Returns, whitened over the update (REINFORCE++).
    Reinforce,
    /// Returns less the mean score of the group, whitened over the update (REINFORCE++ with a baseline).
    ReinforceBaseline,
    /// Returns less the score of a greedy response to the prompt.
    Remax,
}

impl AdvantageEstimator {
    /// Returns true if the estimator needs a value model.
    pub fn needs_critic(self) -> bool {
        self == Self::Gae
    }

    /// Returns true if the estimator compares responses to the same prompt.
    pub fn compares_groups(self) -> bool {
        matches!(self, Self::Rloo | Self::Grpo | Self::DrGrpo | Self::ReinforceBaseline)
    }

    /// The name of the setting's value.
    pub fn name(self) -> &'static str {
        Choices::name(self)
    }
}

/// The standard deviation that divides the advantages of GRPO.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(rename_all = "snake_case")]
pub enum ScaleRewards {
    /// The deviation of the rewards of each group.
    #[choice(aliases = ["true", "True"])] // As TRL takes it.
    Group,
    /// The deviation of all rewards of the update.
    Batch,
    /// None.
    #[choice(aliases = ["false", "False"])]
    None,
}

/// The combination of several rewards into one advantage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(rename_all = "snake_case")]
pub enum Aggregation {
    /// The weighted sum of the rewards is compared.
    SumThenNormalize,
    /// Each reward is normalized within its group, and their weighted sum over the update. Source: Liu et al. 2026, GDPO.
    NormalizeThenSum,
}

impl AdvantageConfig {
    /// Checks this group of settings alone.
    pub(crate) fn check(&self) -> Result<()> {
        let estimator = self.advantage_estimator;
        let rows = self.num_generations;
        let name = estimator.name();
        let mut refusals = Refusals::default();
        let least = if estimator.compares_groups() { 2 } else { 1 };
        if rows < least {
            refusals.add(refuse(
                name_of!(self.num_generations),
                format!(
                    " = {rows}: expected at least {least}{}",
                    if least > 1 { format!(": {name} compares the responses to a prompt") } else { String::new() }
                ),
            ))?;
        }
        let only = |allowed: bool, setting: &str, value: String, owner: &str| {
            if allowed {
                Ok(())
            } else {
                no_effect(setting, value, &format!("with advantage_estimator = {name}: it is a setting of {owner}"))
            }
        };
        let is_gae = estimator == AdvantageEstimator::Gae;
        let is_grpo = estimator == AdvantageEstimator::Grpo;
        let scale = self.scale_rewards.name();
        let implied = estimator == AdvantageEstimator::DrGrpo && self.scale_rewards == ScaleRewards::None;
        if self.scale_rewards != ScaleRewards::Group && !implied {
            refusals.add(only(is_grpo, name_of!(self.scale_rewards), scale.into(), "grpo"))?;
        }
        if self.normalize_advantages {
            let is_rloo = estimator == AdvantageEstimator::Rloo;
            refusals.add(only(is_rloo, name_of!(self.normalize_advantages), "true".into(), "rloo"))?;
        }
        if self.multi_objective_aggregation == Aggregation::NormalizeThenSum {
            let setting = "multi_objective_aggregation";
            refusals.add(only(is_grpo, setting, "normalize_then_sum".into(), "grpo"))?;
            if self.scale_rewards != ScaleRewards::Group {
                refusals.add(no_effect(
                    name_of!(self.scale_rewards),
                    scale,
                    "with multi_objective_aggregation = normalize_then_sum",
                ))?;
            }
        }
        for (setting, value) in
            [(name_of!(self.lam_policy), self.lam_policy), (name_of!(self.lam_policy_alpha), self.lam_policy_alpha)]
        {
            let Some(value) = value else { continue };
            refusals.add(only(is_gae, setting, value.to_string(), "gae"))?;
            refusals.add(if setting == "lam_policy" {
                zero_to_one(setting, value)
            } else {
                above_zero(setting, value)
            })?;
        }
        if let (Some(lam), Some(alpha)) = (self.lam_policy, self.lam_policy_alpha) {
            refusals.add(exclude(name_of!(self.lam_policy), name_of!(self.lam_policy_alpha), format!(
                " = {lam} and lam_policy_alpha = {alpha} exclude each other: a fixed lambda, or one that follows the \
                 length of a response"
            )))?;
        }
        refusals.end()
    }
}

/// An advantage estimator with its settings.
///
/// Generalized advantage estimation needs a critic. The others have none: they compare the total rewards of a group
/// ([`Experience::groups`]), or use returns. `docs/concepts/scores-and-advantages.md` has each
/// equation with its source.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Advantage {
    /// Generalized advantage estimation. Source: Schulman et al. 2016, eq. 16.
    Gae {
        /// Discount of later rewards.
        gamma: f64,
        /// Weight of later steps: 0 is one-step, 1 is Monte Carlo.
        lam: f64,
        /// Lambda of the policy's advantages, where it is not `lam`. Source: Yuan et al. 2025, VC-PPO; Yue et al. 2025, VAPO.
        lam_policy: Option<PolicyLambda>,
    },
    /// The total reward of a response compared with those of its group; one number for all tokens of a response.
    Group {
        /// The number that is subtracted.
        baseline: Baseline,
        /// The standard deviation by which the difference is divided.
        scale: ScaleRewards,
        /// Normalize the differences over the responses of the update.
        normalize: bool,
        /// Compare each reward by itself, then add them up; needs [`Experience::rewards`].
        each_reward: bool,
    },
    /// Discounted returns of the rewards less a baseline of the score.
    Returns {
        /// Discount of later rewards.
        gamma: f64,
        /// The number that is subtracted from a response's score.
        baseline: ScoreBaseline,
    },
}

/// Lambda of the policy's advantages in decoupled GAE.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PolicyLambda {
    /// The same for all responses.
    Fixed(f64),
    /// 1 - 1 / (`alpha` * length) of each response, at least 0. Source: Yue et al. 2025, VAPO, eq. 6.
    OfLength {
        /// The factor of the length.
        alpha: f64,
    },
}

/// The baseline of a response's total reward within its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Baseline {
    /// The mean of the group. Source: Shao et al. 2024, DeepSeekMath, section 4.1.
    Mean,
    /// The mean of the others of the group. Source: Kool et al. 2019; Ahmadian et al. 2024, eq. 8.
    LeaveOneOut,
}

/// The baseline of a response's score, where advantages are returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoreBaseline {
    /// None. Source: Hu 2025, REINFORCE++.
    Zero,
    /// The mean score of the group. Source: Hu 2025, REINFORCE++-baseline.
    GroupMean,
    /// The score of a greedy response to the prompt, [`Experience::baselines`]. Source: Li et al. 2024, ReMax, algorithm 1.
    Greedy,
}

impl Advantage {
    /// Returns true if the estimator needs a critic.
    pub fn needs_critic(&self) -> bool {
        matches!(self, Self::Gae { .. })
    }

    /// Advantages and returns of `rewards`, `[B, R]` f32 each; neither is whitened. Returns are targets of a critic: 0 without one.
    ///
    /// `reward_clip`: the bounds of the total scores in `rewards`; baselines are made of scores within the same bounds.
    pub fn estimate(&self, e: &Experience, rewards: &Tensor, reward_clip: Option<[f64; 2]>) -> (Tensor, Tensor) {
        match *self {
            Self::Gae { gamma, lam, lam_policy } => {
                let gae = |lam: &Lambda| {
                    math::gae_across(rewards, &e.values, &e.masks.value, e.masks.inserted.as_ref(), gamma, lam)
                };
                let (advantages, returns) = gae(&Lambda::Fixed(lam));
                let advantages = match lam_policy {
                    None => return (advantages, returns),
                    Some(PolicyLambda::Fixed(lam)) => gae(&Lambda::Fixed(lam)).0,
                    Some(PolicyLambda::OfLength { alpha }) => {
                        let lambda = |&length: &i64| (1.0 - 1.0 / (alpha * (length.max(1)) as f64)).max(0.0) as f32;
                        let lams: Vec<f32> = e.counted_and_sampled().iter().map(lambda).collect();
                        gae(&Lambda::PerRow(Tensor::from_slice(&lams))).0
                    }
                };
                (advantages, returns)
            }
            Self::Group { baseline, scale, normalize, each_reward } => {
                let row_advantages = if each_reward {
                    compared_by_reward(e)
                } else {
                    compared(&e.total_rewards(rewards), &e.groups, baseline, scale)
                };
                let row_advantages =
                    if normalize { math::normalize_rows(&row_advantages, STD_EPSILON) } else { row_advantages };
                (math::to_all_tokens(&row_advantages, &e.masks.loss), rewards.zeros_like())
            }
            Self::Returns { gamma, baseline } => {
                let baselines = match baseline {
                    ScoreBaseline::Zero => None,
                    ScoreBaseline::GroupMean => {
                        Some(math::group_means(&e.clipped_totals(reward_clip), &e.groups, LeaveOut::Nothing))
                    }
                    ScoreBaseline::Greedy => {
                        let clipped = |baselines: &Tensor| to_host(&math::within(baselines, reward_clip));
                        e.baselines.as_ref().map(clipped)
                    }
                };
                let rewards = match baselines {
                    None => rewards.shallow_clone(),
                    Some(baselines) => {
                        let less: Vec<f32> =
                            baselines.iter().map(|b| if b.is_nan() { 0.0 } else { -*b as f32 }).collect();
                        let less = on_device(&less, rewards.device());
                        rewards + math::rewards(&rewards.zeros_like(), &less, &e.counted, 0.0, ScorePosition::LastToken)
                    }
                };
                (
                    math::keep(&math::returns(&rewards, e.masks.inserted.as_ref(), gamma), &e.whitened_mask(false)),
                    rewards.zeros_like(),
                )
            }
        }
    }
}

/// Advantages of the rows of an update by their total rewards, where NaN is no total. A row without a total, or without another row to
/// compare it with, gets 0 or NaN, which [`math::to_all_tokens`] makes 0.
fn compared(totals: &[f64], groups: &[usize], baseline: Baseline, scale: ScaleRewards) -> Vec<f64> {
    let leave_out = if baseline == Baseline::LeaveOneOut { LeaveOut::Itself } else { LeaveOut::Nothing };
    let means = math::group_means(totals, groups, leave_out);
    let scales = match scale {
        ScaleRewards::None => vec![1.0; totals.len()],
        ScaleRewards::Group => math::group_stds(totals, groups).into_iter().map(|std| std + STD_EPSILON).collect(),
        ScaleRewards::Batch => vec![math::std(totals) + STD_EPSILON; totals.len()],
    };
    let rows = totals.iter().zip(means).zip(scales);
    rows.map(|((total, mean), scale)| (total - mean) / scale).collect()
}

/// Advantages of the rows of an update where each reward is compared by itself within its group; the weighted sums are normalized over the
/// update. Source: Liu et al. 2026, GDPO, as TRL's `normalize_then_sum`.
fn compared_by_reward(e: &Experience) -> Vec<f64> {
    let mut sums = vec![f64::NAN; e.rows()];
    for (weight, scores) in e.rewards.iter().flatten() {
        let compared = compared(scores, &e.groups, Baseline::Mean, ScaleRewards::Group);
        for (sum, score) in sums.iter_mut().zip(compared).filter(|(_, score)| !score.is_nan()) {
            *sum = if sum.is_nan() { weight * score } else { *sum + weight * score };
        }
    }
    // TRL scores a row that has rewards, but none that can be compared, as 0.
    for (row, sum) in sums.iter_mut().enumerate() {
        if sum.is_nan() && e.rewards.iter().flatten().any(|(_, scores)| !scores[row].is_nan()) {
            *sum = 0.0;
        }
    }
    math::normalize_rows(&sums, STD_EPSILON)
}

/// Advantages of a whole update as the losses take them: whitened over the slots of `mask`, or only masked where each mini-batch
/// whitens its own.
pub(crate) fn whiten_update(advantages: &Tensor, mask: &Tensor, how: WhitenAdvantages) -> Tensor {
    match how {
        WhitenAdvantages::Batch => math::whiten(advantages, mask, true),
        WhitenAdvantages::MiniBatch | WhitenAdvantages::None => math::keep(advantages, mask),
    }
}

/// `advantages` whitened over the tokens of `rows` alone; 0 in other rows.
pub(crate) fn whiten_rows(advantages: &Tensor, rows: &[usize], mask: &Tensor) -> Tensor {
    let index = row_index(rows, advantages);
    let rows_mask = mask.zeros_like().index_copy(0, &index, &mask.index_select(0, &index));
    math::whiten(advantages, &rows_mask, true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rl::experience::tests::experience;
    use crate::rl::shaping::{Shaping, targets};
    use tch::Kind;

    const NONE: f64 = f64::NAN;

    /// Advantages of rows with one token each and these scores, in groups of three.
    fn estimate_groups(scores: &[f64], advantage: Advantage) -> Vec<f64> {
        let e = experience(&vec![1; scores.len()], 3, scores);
        let (advantages, returns) = advantage.estimate(&e, &e.scores.unsqueeze(1), None);
        assert_eq!(returns.abs().sum(Kind::Double).double_value(&[]), 0.0, "there is no critic");
        to_host(&advantages)
    }

    #[track_caller]
    fn assert_near(value: &[f64], expected: &[f64]) {
        let near = value.iter().zip(expected).all(|(a, b)| (a - b).abs() < 2e-6);
        assert!(value.len() == expected.len() && near, "{value:?} is not {expected:?}");
    }

    /// A whole group, one with an unscored row and equal scores, and one with a single scored row.
    const SCORES: [f64; 9] = [1.0, 2.0, 4.0, 3.0, 3.0, NONE, 5.0, NONE, NONE];

    // The expected numbers of these tests are from the formulas of docs/concepts/scores-and-advantages.md in numpy, with nanmean and
    // nanstd(ddof=1).

    #[test]
    fn rloo_compares_each_response_with_the_mean_of_the_others() {
        let rloo = |normalize| Advantage::Group {
            baseline: Baseline::LeaveOneOut,
            scale: ScaleRewards::None,
            normalize,
            each_reward: false,
        };
        // 1 - (2 + 4) / 2 = -2.
        assert_near(&estimate_groups(&SCORES, rloo(false)), &[-2.0, -0.5, 2.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        // Mean 0 and deviation 1.62019 of the five rows that can be compared; the others count in neither.
        let expected = [-1.234_350_6, -0.308_587_7, 1.542_938_3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        assert_near(&estimate_groups(&SCORES, rloo(true)), &expected);
    }

    #[test]
    fn grpo_divides_by_the_deviation_of_the_group_of_the_batch_or_by_none() {
        for (scale, expected) in [
            (ScaleRewards::Group, [-0.872_814_4, -0.218_203_6, 1.091_018]),
            (ScaleRewards::Batch, [-0.942_742_4, -0.235_685_6, 1.178_428]),
            (ScaleRewards::None, [-4.0 / 3.0, -1.0 / 3.0, 5.0 / 3.0]),
        ] {
            let grpo = Advantage::Group { baseline: Baseline::Mean, scale, normalize: false, each_reward: false };
            assert_near(&estimate_groups(&SCORES, grpo), &[&expected[..], &[0.0; 6]].concat());
        }
    }

    #[test]
    fn rewards_that_are_normalized_one_by_one_are_summed_with_their_weights() {
        let mut e = experience(&[1; 9], 3, &[1.0, 4.0, 5.0, 0.0, 1.0, NONE, 3.0, NONE, NONE]);
        let first = vec![1.0, 2.0, 4.0, 0.0, 1.0, NONE, 3.0, NONE, NONE];
        let second = vec![0.0, 4.0, 2.0, NONE, NONE, NONE, NONE, NONE, NONE];
        e.rewards = Some(vec![(1.0, first), (0.5, second)]);
        let advantage = Advantage::Group {
            baseline: Baseline::Mean,
            scale: ScaleRewards::Group,
            normalize: false,
            each_reward: true,
        };
        let (value, _) = advantage.estimate(&e, &e.scores.unsqueeze(1), None);
        // Sums -1.3727894, 0.2817714, 1.091018, -0.7070068, 0.7070068 and 0, of the row alone in its group.
        let expected = [-1.505_944_3, 0.309_102, 1.196_842_2, -0.775_583_5, 0.775_583_5, 0.0, 0.0, 0.0, 0.0];
        assert_near(&to_host(&value), &expected);
    }

    /// Advantages by returns with gamma 0.9 of two rows, of three and two tokens, whose rewards include scores of 1.5 and -0.5.
    fn by_returns(baseline: ScoreBaseline, baselines: Option<&[f32]>) -> Vec<f64> {
        let mut e = experience(&[3, 2], 2, &[1.5, -0.5]);
        e.baselines = baselines.map(Tensor::from_slice);
        let rewards = Tensor::from_slice(&[-0.1f32, 0.2, 1.0, 0.3, -1.0, 0.0]).view([2, 3]);
        to_host(&Advantage::Returns { gamma: 0.9, baseline }.estimate(&e, &rewards, None).0)
    }

    /// Settings of a run whose advantages are returns.
    fn shaping(baseline: ScoreBaseline, reward_clip: Option<[f64; 2]>, whiten_advantages: WhitenAdvantages) -> Shaping {
        Shaping {
            kl_estimator: math::KlEstimator::K1,
            kl_in_loss: false,
            score_position: ScorePosition::LastToken,
            reward_clip,
            whiten_rewards: false,
            advantage: Advantage::Returns { gamma: 1.0, baseline },
            whiten_advantages,
        }
    }

    #[test]
    fn a_range_of_rewards_without_0_gives_a_row_without_a_score_none() {
        let e = experience(&[1; 3], 3, &[1.0, 0.1, NONE]);
        let shaping = shaping(ScoreBaseline::Zero, Some([0.25, 0.6]), WhitenAdvantages::None);
        let (_, rewards) = crate::rl::shaping::shape_rewards(&e, 0.0, &shaping);
        assert_near(&to_host(&rewards), &[f64::from(0.6f32), 0.25, 0.0]);
        // With scores of tokens too, of which that row has none.
        let tokens = Some(Tensor::from_slice(&[0.5f32, 0.0, 0.0]).view([3, 1]));
        let e = Experience { token_scores: tokens, ..e };
        let (_, rewards) = crate::rl::shaping::shape_rewards(&e, 0.0, &shaping);
        assert_near(&to_host(&rewards), &[f64::from(0.6f32), 0.25, 0.0]);
    }

    #[test]
    fn a_row_without_a_score_has_the_advantage_0_and_is_in_no_whitening() {
        let scores = [1.0, 1.0, NONE, 4.0, 2.0, 3.0];
        let estimate = |scores: &[f64], size, baseline, how| {
            let mut e = experience(&vec![1; scores.len()], size, scores);
            e.baselines = Some(Tensor::full([scores.len() as i64], 0.5, (Kind::Float, tch::Device::Cpu)));
            to_host(&targets(&e, 0.0, &shaping(baseline, None, how)).advantages)
        };
        let none = WhitenAdvantages::None;
        assert_near(&estimate(&scores, 3, ScoreBaseline::GroupMean, none), &[0.0, 0.0, 0.0, 1.0, -1.0, 0.0]);
        assert_near(&estimate(&scores, 3, ScoreBaseline::Greedy, none), &[0.5, 0.5, 0.0, 3.5, 1.5, 2.5]);
        // Whitened as the update is without that row.
        for baseline in [ScoreBaseline::Zero, ScoreBaseline::GroupMean] {
            let all = estimate(&scores, 3, baseline, WhitenAdvantages::Batch);
            assert_eq!(all[2], 0.0, "{baseline:?}");
            let mut e = experience(&[1; 5], 3, &[1.0, 1.0, 4.0, 2.0, 3.0]);
            e.groups = vec![0, 0, 1, 1, 1];
            let whole = targets(&e, 0.0, &shaping(baseline, None, WhitenAdvantages::Batch)).advantages;
            assert_near(&[&all[..2], &all[3..]].concat(), &to_host(&whole));
        }
        // Over a mini-batch of all rows it is the same.
        let e = experience(&[1; 6], 3, &scores);
        let advantages = targets(&e, 0.0, &shaping(ScoreBaseline::Zero, None, WhitenAdvantages::MiniBatch)).advantages;
        let whitened = whiten_rows(&advantages, &[0, 1, 2, 3, 4, 5], &e.whitened_mask(false));
        assert_near(&to_host(&whitened), &estimate(&scores, 3, ScoreBaseline::Zero, WhitenAdvantages::Batch));
        // With a critic the score of such a row is 0, as before.
        assert_eq!(e.whitened_mask(true).sum(Kind::Int64).int64_value(&[]), 6);
    }

    #[test]
    fn baselines_are_those_of_the_scores_that_become_rewards() {
        let mut e = experience(&[1; 2], 2, &[0.0, 100.0]);
        e.baselines = Some(Tensor::from_slice(&[50.0f32, 2.0]));
        let estimate = |e: &Experience, baseline| {
            let clip = Some([-10.0, 10.0]);
            to_host(&targets(e, 0.0, &shaping(baseline, clip, WhitenAdvantages::None)).advantages)
        };
        // Scores of 0 and 10, less their mean and less greedy scores of 10 and 2.
        assert_near(&estimate(&e, ScoreBaseline::GroupMean), &[-5.0, 5.0]);
        assert_near(&estimate(&e, ScoreBaseline::Greedy), &[-10.0, 8.0]);
        // With scores of tokens the totals are clipped: 4 + 96, and 0.
        let mut e = experience(&[1; 2], 2, &[0.0, 4.0]);
        e.token_scores = Some(Tensor::from_slice(&[0.0f32, 96.0]).unsqueeze(1));
        assert_near(&estimate(&e, ScoreBaseline::GroupMean), &[-5.0, 5.0]);
    }

    #[test]
    fn returns_are_taken_less_a_baseline_of_the_score() {
        // 1, 0.2 + 0.9 * 1 = 1.1, -0.1 + 0.9 * 1.1 = 0.89.
        let reinforce = [0.89, 1.1, 1.0, -0.6, -1.0, 0.0];
        assert_near(&by_returns(ScoreBaseline::Zero, None), &reinforce);
        // The mean score of the group is 0.5, and it is subtracted where the score is.
        let less = [0.485, 0.65, 0.5, -1.05, -1.5, 0.0];
        assert_near(&by_returns(ScoreBaseline::GroupMean, None), &less);
        assert_near(&by_returns(ScoreBaseline::Greedy, Some(&[0.5, 0.5])), &less);
        assert_near(&by_returns(ScoreBaseline::Greedy, Some(&[f32::NAN; 2])), &reinforce);
    }

    #[test]
    fn the_policys_lambda_changes_its_advantages_and_not_the_returns() {
        let mut e = experience(&[3, 2], 1, &[0.0; 2]);
        e.values = Tensor::from_slice(&[0.5f32, 0.25, -0.5, 0.3, 0.1, 0.0]).view([2, 3]);
        let rewards = Tensor::from_slice(&[0.1f32, 0.0, 1.0, -0.2, 0.4, 0.0]).view([2, 3]);
        for (lam_policy, expected) in [
            (None, [0.323_037_5, 0.5825, 1.5, -0.1535, 0.3, 0.0]),
            (Some(PolicyLambda::Fixed(0.5)), [-0.186_25, -0.025, 1.5, -0.275, 0.3, 0.0]),
            // 1 - 1 / (0.8 * 3) = 0.58333, and 1 - 1 / (0.8 * 2) = 0.375.
            (Some(PolicyLambda::OfLength { alpha: 0.8 }), [-0.129_062_5, 0.0875, 1.5, -0.308_75, 0.3, 0.0]),
            // 1 - 1 / (0.4 * 3) = 0.16667, and 1 - 1 / (0.4 * 2) = -0.25, so 0.
            (Some(PolicyLambda::OfLength { alpha: 0.4 }), [-0.246_25, -0.475, 1.5, -0.41, 0.3, 0.0]),
        ] {
            let gae = Advantage::Gae { gamma: 0.9, lam: 0.95, lam_policy };
            let (advantages, returns) = gae.estimate(&e, &rewards, None);
            assert_near(&to_host(&advantages), &expected);
            assert_near(&to_host(&returns), &[0.823_037_5, 0.8325, 1.0, 0.1465, 0.4, 0.0]);
        }
    }
}
