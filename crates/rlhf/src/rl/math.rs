//! The equations of PPO on tensors: masks, rewards, advantages, losses. No models, no files, no imports from this crate.
//!
//! B rows, R response slots. Masks are bool `[B, R]`, true = counts. Every result is exactly 0 outside its mask, by
//! `masked_fill`: multiplying by a mask would turn a NaN outside it into a NaN inside. The pages of `docs/concepts` derive each
//! equation and list where the systems that this crate replaces differ.

use tch::{Device, Kind, Tensor};
use tch_ext::on_device;

/// Estimator of the KL of the policy from the reference at a sampled token; with r = ref_logprob - logprob.
///
/// Sources: Schulman 2020, "Approximating KL Divergence"; TRL 0.11 for `Abs` and `Full`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// -r: unbiased, may be negative.
    K1,
    /// exp(r) - 1 - r: unbiased, never negative.
    K3,
    /// |r|: never negative, larger than the divergence.
    Abs,
    /// r^2 / 2 (k2): biased a little, never negative; its gradient is an unbiased one of the divergence.
    Mse,
    /// The divergence itself, over the whole vocabulary.
    Full,
}

/// Where a response's score is added to its rewards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScorePosition {
    /// One slot after the last token, where the value is that of the finished response; on the last token where the
    /// response fills all slots. This is TRL's choice and that of the "N+ implementation details" of PPO.
    AfterStop,
    /// On the last token.
    LastToken,
}

/// Slots that hold a response token, `[B, R]` bool: slot t of row b counts if t < `lengths[b]`.
pub fn response_mask(lengths: &[i64], width: i64, device: Device) -> Tensor {
    let lengths = on_device(lengths, device).unsqueeze(1);
    Tensor::arange(width, (Kind::Int64, device)).unsqueeze(0).lt_tensor(&lengths)
}

/// Slots that hold a value, `[B, R]` bool: the state before each token and, if a slot is left, that after the last one.
pub fn value_mask(lengths: &[i64], width: i64, position: ScorePosition, device: Device) -> Tensor {
    let extra = i64::from(position == ScorePosition::AfterStop);
    let lengths: Vec<i64> = lengths.iter().map(|len| len + extra).collect();
    response_mask(&lengths, width, device)
}

/// Keeps `x` where `mask` is true and makes it exactly 0 elsewhere.
pub fn keep(x: &Tensor, mask: &Tensor) -> Tensor {
    x.masked_fill(&mask.logical_not(), 0.0)
}

/// Sum of `x` over `mask`, a scalar tensor.
pub fn masked_sum(x: &Tensor, mask: &Tensor) -> Tensor {
    keep(x, mask).sum(Kind::Float)
}

/// Mean of `x` over `mask`, a scalar tensor; 0 for an empty mask.
pub fn masked_mean(x: &Tensor, mask: &Tensor) -> Tensor {
    masked_sum(x, mask) / mask.sum(Kind::Float).clamp_min(1.0)
}

/// (x - mean) / sqrt(var + 1e-8) over `mask`, with the unbiased variance; 0 outside the mask.
///
/// `shift_mean: false` puts the mean back. With fewer than two counted numbers the variance counts as 0.
/// Source: TRL f2cd577 `masked_whiten`.
pub fn whiten(x: &Tensor, mask: &Tensor, shift_mean: bool) -> Tensor {
    // In f64: equal numbers less their mean in f32 are no zeros but rounding, which the division would make as large as any advantage.
    let count = mask.sum(Kind::Double);
    let mean = keep(&x.to_kind(Kind::Double), mask).sum(Kind::Double) / count.clamp_min(1.0);
    let centered = keep(&(x.to_kind(Kind::Double) - &mean), mask);
    let variance = centered.square().sum(Kind::Double) / (count - 1.0).clamp_min(1.0);
    let whitened = centered * (variance + 1e-8).rsqrt();
    let whitened = if shift_mean { whitened } else { keep(&(whitened + mean), mask) };
    whitened.to_kind(x.kind())
}

/// Estimate of KL(policy || reference) per token, `[B, R]` f32, 0 outside `mask`; differentiable in `logprobs`.
///
/// Panics for [`KlEstimator::Full`], which needs whole distributions and not one log-probability of each model: `CausalLm::kl_to` measures
/// it.
pub fn kl(logprobs: &Tensor, ref_logprobs: &Tensor, mask: &Tensor, estimator: KlEstimator) -> Tensor {
    let log_ratio = keep(&(ref_logprobs - logprobs), mask);
    match estimator {
        KlEstimator::K1 => -log_ratio,
        KlEstimator::K3 => log_ratio.expm1() - log_ratio,
        KlEstimator::Abs => log_ratio.abs(),
        KlEstimator::Mse => log_ratio.square() / 2.0,
        KlEstimator::Full => unreachable!("the whole divergence is no function of one token's log-probabilities"),
    }
}

/// Rewards per slot, `[B, R]` f32: -`kl_coef` * `kl` in every slot, plus each row's score in the slot of `position`.
///
/// `kl` `[B, R]` is 0 outside the response; `scores` `[B]` f32.
pub fn rewards(kl: &Tensor, scores: &Tensor, lengths: &[i64], kl_coef: f64, position: ScorePosition) -> Tensor {
    let last_slot = kl.size()[1] - 1;
    let slots: Vec<i64> = lengths
        .iter()
        .map(|&len| match position {
            ScorePosition::AfterStop => len.min(last_slot),
            ScorePosition::LastToken => (len - 1).max(0),
        })
        .collect();
    let slots = on_device(&slots, kl.device()).unsqueeze(1);
    (-kl_coef * kl).scatter_add(1, &slots, &scores.to_kind(Kind::Float).unsqueeze(1))
}

/// Generalized advantage estimates and value targets (returns); neither is whitened.
///
/// Shapes: `rewards`, `values` `[B, R]` f32, `mask` `[B, R]` bool, true = slot with a value. Both results are `[B, R]` f32 and
/// exactly 0 outside `mask`; the value after the last counted slot is 0. Source: Schulman et al. 2016, eq. 16.
pub fn gae(rewards: &Tensor, values: &Tensor, mask: &Tensor, gamma: f64, lam: f64) -> (Tensor, Tensor) {
    gae_across(rewards, values, mask, None, gamma, &Lambda::Fixed(lam))
}

/// The lambda of [`gae_across`].
#[derive(Debug)]
pub enum Lambda {
    /// The same for all rows.
    Fixed(f64),
    /// One for each row, `[B]` f32. Source: Yue et al. 2025, VAPO, section 4.2.
    PerRow(Tensor),
}

/// [`gae`] that passes over the slots of `skipped`, `[B, R]` bool, if there are any: they are no steps. The slot before them takes the
/// value and the advantage of the slot after them, with one discount. Results are 0 in skipped slots.
pub fn gae_across(
    rewards: &Tensor,
    values: &Tensor,
    mask: &Tensor,
    skipped: Option<&Tensor>,
    gamma: f64,
    lam: &Lambda,
) -> (Tensor, Tensor) {
    // The lambdas of rows are moved to the host, as everything else here.
    let discounted = |next: &Tensor| match lam {
        Lambda::Fixed(lam) => gamma * *lam * next,
        Lambda::PerRow(lams) => gamma * lams.to_device(Device::Cpu) * next,
    };
    let skipped = skipped.map(|skipped| skipped.to_device(Device::Cpu));
    // Slot after slot, with a few numbers in each: on a GPU, starting each operation would take longer than all of it on the host.
    let device = rewards.device();
    let [rewards, values, mask] = &[rewards, values, mask].map(|x| x.to_device(Device::Cpu));
    let (rewards, values) = (keep(rewards, mask), keep(values, mask));
    let width = rewards.size()[1];
    let zeros = rewards.select(1, 0).zeros_like();
    let mut advantages = Vec::with_capacity(width as usize);
    let (mut next_value, mut next_advantage) = (zeros.shallow_clone(), zeros);
    for t in (0..width).rev() {
        let value = values.select(1, t);
        let delta = rewards.select(1, t) + gamma * &next_value - &value;
        let advantage = delta + discounted(&next_advantage);
        (next_value, next_advantage) = match &skipped {
            None => (value, advantage),
            Some(skipped) => {
                let here = skipped.select(1, t);
                (next_value.where_self(&here, &value), next_advantage.where_self(&here, &advantage))
            }
        };
        advantages.push(next_advantage.shallow_clone());
    }
    advantages.reverse();
    let advantages = keep(&Tensor::stack(&advantages, 1), mask);
    let returns = &advantages + &values;
    (advantages.to_device(device), returns.to_device(device))
}

/// Discounted returns: in each slot the sum of its reward and all later rewards of its row, `[B, R]` f32. The slots of `skipped`, `[B, R]`
/// bool, are no steps: nothing is discounted there.
pub fn returns(rewards: &Tensor, skipped: Option<&Tensor>, gamma: f64) -> Tensor {
    if gamma == 1.0 {
        return rewards.flip([1i64]).cumsum(1, Kind::Float).flip([1i64]);
    }
    let device = rewards.device();
    let rewards = rewards.to_device(Device::Cpu);
    let skipped = skipped.map(|skipped| skipped.to_device(Device::Cpu));
    let mut next = rewards.select(1, 0).zeros_like();
    let mut returns = Vec::new();
    for t in (0..rewards.size()[1]).rev() {
        let here = rewards.select(1, t) + gamma * &next;
        next = skipped.as_ref().map_or(here.shallow_clone(), |skipped| next.where_self(&skipped.select(1, t), &here));
        returns.push(next.shallow_clone());
    }
    returns.reverse();
    Tensor::stack(&returns, 1).to_device(device)
}

/// The rows that a group's mean leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaveOut {
    /// None.
    Nothing,
    /// The row that the mean is for.
    Itself,
}

/// The mean of `numbers` over each row's group; NaN counts as no number. The result is NaN where the group has no number, or where the row
/// is left out and has no number or is the only one that has.
pub fn group_means(numbers: &[f64], groups: &[usize], leave_out: LeaveOut) -> Vec<f64> {
    let sums = group_sums(numbers, groups, |x| x);
    let row_mean = |(&number, &group): (&f64, &usize)| {
        let (sum, count) = sums[group];
        match leave_out {
            LeaveOut::Nothing => sum / count,
            // A row without a number has no place in the mean of the others either.
            LeaveOut::Itself if number.is_nan() || count < 2.0 => f64::NAN,
            LeaveOut::Itself => (sum - number) / (count - 1.0),
        }
    };
    numbers.iter().zip(groups).map(row_mean).collect()
}

/// The unbiased standard deviation of `numbers` over each row's group; NaN counts as no number, and is the result for fewer than two
/// numbers.
pub fn group_stds(numbers: &[f64], groups: &[usize]) -> Vec<f64> {
    let means = group_means(numbers, groups, LeaveOut::Nothing);
    let gaps: Vec<f64> = numbers.iter().zip(means).map(|(x, mean)| x - mean).collect();
    let squares = group_sums(&gaps, groups, |gap| gap * gap);
    let std = |&group: &usize| {
        let (sum, count) = squares[group];
        if count > 1.0 { (sum / (count - 1.0)).sqrt() } else { f64::NAN }
    };
    groups.iter().map(std).collect()
}

/// For each group, the sum of `f` of its numbers that are not NaN, and their count.
fn group_sums(numbers: &[f64], groups: &[usize], f: impl Fn(f64) -> f64) -> Vec<(f64, f64)> {
    let mut sums = vec![(0.0, 0.0); groups.iter().max().map_or(0, |most| most + 1)];
    for (&number, &group) in numbers.iter().zip(groups).filter(|(number, _)| !number.is_nan()) {
        sums[group] = (sums[group].0 + f(number), sums[group].1 + 1.0);
    }
    sums
}

/// The mean of the numbers that are not NaN; NaN without one.
pub fn mean(numbers: &[f64]) -> f64 {
    let known = || numbers.iter().filter(|x| !x.is_nan());
    known().sum::<f64>() / known().count() as f64
}

/// The unbiased standard deviation of the numbers that are not NaN; NaN with fewer than two.
pub fn std(numbers: &[f64]) -> f64 {
    group_stds(numbers, &vec![0; numbers.len()]).first().copied().unwrap_or(f64::NAN)
}

/// The quantile `q` from 0 to 1 of the numbers, interpolated linearly; sorts them. NaN without one.
pub fn quantile(numbers: &mut [f64], q: f64) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let Some(last) = numbers.len().checked_sub(1) else { return f64::NAN };
    let at = q * last as f64;
    let below = at.floor() as usize;
    numbers[below] + (numbers[(below + 1).min(last)] - numbers[below]) * (at - below as f64)
}

/// (x - mean) / (std + epsilon) over the numbers that are not NaN, which stay NaN. Source: TRL 1.11, RLOOTrainer.
pub fn normalize_rows(numbers: &[f64], epsilon: f64) -> Vec<f64> {
    let (mean, std) = (mean(numbers), std(numbers));
    numbers.iter().map(|x| (x - mean) / (std + epsilon)).collect()
}

/// Each row's number at all of its tokens within `mask`, `[B]` to `[B, R]` f32; NaN counts as 0.
pub fn to_all_tokens(numbers: &[f64], mask: &Tensor) -> Tensor {
    let numbers: Vec<f32> = numbers.iter().map(|x| if x.is_nan() { 0.0 } else { *x as f32 }).collect();
    let numbers = on_device(&numbers, mask.device()).unsqueeze(1);
    keep(&numbers.expand(mask.size(), false), mask)
}

/// `x` within `bounds`, if there are any.
pub fn within(x: &Tensor, bounds: Option<[f64; 2]>) -> Tensor {
    bounds.map_or_else(|| x.shallow_clone(), |[low, high]| x.clamp(low, high))
}

/// Bounds on the policy's probability ratio in the clipped objective.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PolicyClip {
    /// Ratios below 1 - `low` are clipped.
    pub low: f64,
    /// Ratios above 1 + `high` are clipped; with another value than `low` this is "clip-higher". Source: Yu et al. 2025, DAPO.
    pub high: f64,
    /// Above 1: the loss of a token with a negative advantage A is at most this times -A. Source: Ye et al. 2020, dual-clip PPO.
    pub dual: Option<f64>,
}

/// The policy's objective: how its loss follows from ratio and advantage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Objective {
    /// max(-A r, -A clip(r)). Source: Schulman et al. 2017, eq. 7, negated.
    Clipped(PolicyClip),
    /// -min(r, `most`) A log-probability, where the weight has no gradient. Source: MiniMax 2025, CISPO, eq. 4.
    Cispo {
        /// Largest weight of a token.
        most: f64,
    },
    /// -A 4/t sigmoid(t (r - 1)), with a temperature t by the sign of the advantage. Source: Gao et al. 2025, SAPO.
    Sapo {
        /// The temperature where the advantage is positive.
        positive: f64,
        /// The temperature elsewhere.
        negative: f64,
    },
    /// -phi(w) A log-probability, where phi(w) = exp(lambda + k log w - lambda w) of the whole response's ratio w has no gradient.
    /// Source: VESPO 2026, as TRL 1.11.
    Vespo {
        /// k and lambda where the advantage is 0 or positive.
        positive: [f64; 2],
        /// k and lambda elsewhere.
        negative: [f64; 2],
    },
}

/// The unit whose probability ratio is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceLevel {
    /// Each token has its own ratio.
    Token,
    /// The geometric mean of the ratios of a response's tokens. Source: Zheng et al. 2025, GSPO, eq. 7.
    Sequence,
    /// The product of the ratios of a response's tokens: the ratio of the whole response. Source: TRL 1.11, RLOOTrainer.
    SequenceProduct,
}

/// Reduction of per-token losses to the loss of a mini-batch. Each is a sum over the mini-batch, so the size of a micro-batch changes no
/// number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LossAggregation {
    /// Mean over the tokens of the mini-batch: `bnpo`.
    Tokens,
    /// Mean over the responses of the means over their tokens: `grpo`, `sapo`. Source: Shao et al. 2024, eq. 3.
    Responses,
    /// Mean over the responses of the sums over their tokens: `luspo`.
    ResponseSums,
    /// Sum over all tokens, divided by the responses times this length: `dr_grpo`. Source: Liu et al. 2025, section 3.
    Length(usize),
    /// Sum over all tokens, divided by the tokens of the whole update and multiplied by its optimizer steps: `dapo`, `cispo`,
    /// `vespo`. Source: Yu et al. 2025, DAPO, eq. 8.
    UpdateTokens,
}

/// The probability ratios of the new to the old policy at some tokens.
#[derive(Debug)]
pub struct Ratios {
    /// The ratio at each token, with a gradient; exp(0) = 1 outside the mask.
    pub ratio: Tensor,
    /// New minus old log-probability of each token, 0 outside the mask.
    pub log_ratio: Tensor,
}

impl Ratios {
    /// Ratios of single tokens.
    pub fn of_tokens(logprobs: &Tensor, old_logprobs: &Tensor, mask: &Tensor) -> Self {
        let log_ratio = keep(&(logprobs - old_logprobs), mask);
        Self { ratio: log_ratio.exp(), log_ratio }
    }

    /// Ratios of whole responses at their tokens: `value` is the ratio of each token's response, and `factor` is the number of tokens of
    /// the response times the weight of a token's log-probability in the logarithm of that ratio.
    ///
    /// The gradient of a response's ratio is that of all its tokens. Where each token of a response has the same weight in the loss and the
    /// same advantage, the sum over tokens has that gradient if a token's ratio is
    /// value (1 + factor (exp(log p - sg(log p)) - 1)), with sg for no gradient. Where advantages differ by token, each log-probability has
    /// the gradient of its own token's advantage: Zheng et al. 2025, GSPO, eq. 13 and 14 (GSPO-token).
    pub fn of_sequences(self, logprobs: &Tensor, value: &Tensor, factor: &Tensor) -> Self {
        let ratio = value * (unit(logprobs) - 1.0) * factor + value;
        Self { ratio, ..self }
    }
}

/// exp(log p - sg(log p)): 1, with the gradient of the log-probability.
pub fn unit(logprobs: &Tensor) -> Tensor {
    (logprobs - logprobs.detach()).exp()
}

/// The policy objective, summed over `mask`, with the sums its metrics need.
///
/// Tensors of tokens have the shape of the mask, `[B, R]` or `[M]` (tokens of a micro-batch, row after row).
#[derive(Debug)]
pub struct PolicyLoss {
    /// Sum over tokens of the loss, bounded by the dual clip where there is one: a scalar with a gradient; divide it by the
    /// mini-batch's token count.
    pub sum: Tensor,
    /// The loss of each token, f32 of the shape of the mask, with a gradient; anything outside the mask.
    pub per_token: Tensor,
    /// Ratio of new to old probability, f32 of the shape of the mask, detached, 0 outside it.
    pub ratio: Tensor,
    /// Number of tokens at which the clipped side was the larger, a scalar.
    pub clipped: Tensor,
    /// Tokens whose ratio is below the clip range with a negative advantage, bool of the shape of the mask; all false without a
    /// clip.
    pub low_clipped: Tensor,
    /// Tokens whose ratio is above the clip range with a positive advantage, bool of the shape of the mask.
    pub high_clipped: Tensor,
    /// Number of tokens at which the dual clip was the smaller, a scalar.
    pub dual_clipped: Tensor,
    /// Sum over tokens of (new - old log-probability)^2 / 2, a scalar.
    pub approx_kl: Tensor,
    /// Sum over tokens of old - new log-probability, a scalar: k1 of KL(old || new).
    pub policy_kl: Tensor,
}

/// Loss of the policy over the tokens of `mask`. Source: Schulman et al. 2017, eq. 7, negated.
///
/// All tensors have one shape, `[B, R]` or `[M]` (tokens of a micro-batch, row after row), f32; `mask` bool. `logprobs`
/// carries the gradient, `old_logprobs` are those of the policy that sampled.
pub fn policy_loss(
    logprobs: &Tensor,
    old_logprobs: &Tensor,
    advantages: &Tensor,
    mask: &Tensor,
    clip: PolicyClip,
) -> PolicyLoss {
    let ratios = Ratios::of_tokens(logprobs, old_logprobs, mask);
    policy_objective(&ratios, logprobs, advantages, mask, Objective::Clipped(clip))
}

/// Loss of the policy by any objective, over the tokens of `mask`; for VESPO the ratios are those of whole responses.
///
/// All tensors have one shape, `[B, R]` or `[M]` (tokens of a micro-batch, row after row), f32; `mask` bool.
pub fn policy_objective(
    ratios: &Ratios,
    logprobs: &Tensor,
    advantages: &Tensor,
    mask: &Tensor,
    objective: Objective,
) -> PolicyLoss {
    let Ratios { ratio, log_ratio } = ratios;
    let zero = || Tensor::zeros([], (Kind::Float, mask.device()));
    let (mut clipped, mut dual_clipped) = (zero(), zero());
    let none = || mask.zeros_like();
    let (mut low_clipped, mut high_clipped) = (none(), none());
    let within = |x: Tensor| x.logical_and(mask);
    let loss = match objective {
        Objective::Clipped(clip) => {
            let unclipped = -advantages * ratio;
            let bounded = -advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high);
            let mut loss = unclipped.max_other(&bounded);
            if let Some(most) = clip.dual {
                let bound = -advantages * most;
                let above = advantages.lt(0.0).logical_and(&loss.gt_tensor(&bound));
                dual_clipped = masked_sum(&above.to_kind(Kind::Float), mask);
                loss = bound.where_self(&above, &loss);
            }
            clipped = masked_sum(&bounded.gt_tensor(&unclipped).to_kind(Kind::Float), mask);
            low_clipped = within(ratio.lt(1.0 - clip.low).logical_and(&advantages.lt(0.0)));
            high_clipped = within(ratio.gt(1.0 + clip.high).logical_and(&advantages.gt(0.0)));
            loss
        }
        Objective::Cispo { most } => {
            high_clipped = within(ratio.gt(most).logical_and(&advantages.gt(0.0)));
            -ratio.detach().clamp_max(most) * advantages * logprobs
        }
        Objective::Sapo { positive, negative } => {
            let temperature = by_sign(&advantages.gt(0.0), positive, negative);
            -(&temperature * (ratio - 1.0)).sigmoid() * 4.0 / temperature * advantages
        }
        Objective::Vespo { positive, negative } => {
            let at_least_0 = advantages.ge(0.0);
            let k = by_sign(&at_least_0, positive[0], negative[0]);
            let lambda = by_sign(&at_least_0, positive[1], negative[1]).clamp_min(1e-4);
            let ratio = ratio.detach();
            let phi = (&lambda + k * ratio.log() - &lambda * &ratio).exp().nan_to_num(0.0, 0.0, 0.0);
            -phi * advantages * logprobs
        }
    };
    let detached = log_ratio.detach();
    PolicyLoss {
        sum: masked_sum(&loss, mask),
        clipped,
        low_clipped,
        high_clipped,
        dual_clipped,
        ratio: keep(&ratio.detach(), mask),
        approx_kl: detached.square().sum(Kind::Float) / 2.0,
        policy_kl: -detached.sum(Kind::Float),
        per_token: loss,
    }
}

/// `yes` where `condition` is true, else `no`; f32.
fn by_sign(condition: &Tensor, yes: f64, no: f64) -> Tensor {
    condition.to_kind(Kind::Float) * (yes - no) + no
}

/// The clipped value loss, summed over the slots that hold a value.
#[derive(Debug)]
pub struct ValueLoss {
    /// Sum over slots of max((v - G)^2, (clip(v) - G)^2) / 2, a scalar with a gradient.
    pub sum: Tensor,
    /// Number of slots at which the clipped side was the larger, a scalar.
    pub clipped: Tensor,
}

/// Loss of the value model over the slots of `mask`: a prediction may not gain from moving more than `clip_range` away
/// from `old_values`. Source: Schulman's PPO implementation; TRL f2cd577.
pub fn value_loss(values: &Tensor, old_values: &Tensor, returns: &Tensor, mask: &Tensor, clip_range: f64) -> ValueLoss {
    // Bounds and not a clamped difference: a value within them must come out bit for bit, or rounding counts as clipping.
    let near = values.max_other(&(old_values - clip_range)).min_other(&(old_values + clip_range));
    let unclipped = (values - returns).square();
    let clipped = (near - returns).square();
    ValueLoss {
        sum: masked_sum(&unclipped.max_other(&clipped), mask) / 2.0,
        clipped: masked_sum(&clipped.gt_tensor(&unclipped).to_kind(Kind::Float), mask),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(rows: &[&[f32]]) -> Tensor {
        let width = rows[0].len() as i64;
        Tensor::from_slice(&rows.concat()).view([-1, width])
    }

    fn assert_close(found: &Tensor, expected: &Tensor, tolerance: f64) {
        assert_eq!(found.size(), expected.size());
        let gap = (found - expected).abs().max().double_value(&[]);
        assert!(gap <= tolerance, "largest difference {gap}\nfound {found}\nexpected {expected}");
    }

    const CLIP: PolicyClip = PolicyClip { low: 0.2, high: 0.2, dual: None };

    #[test]
    fn slots_that_are_skipped_change_no_advantage_and_no_return_of_the_others() {
        let nan = f32::NAN; // whatever lies there must not matter
        let kept = [true, true, false, false, true, false, true];
        let skipped = Tensor::from_slice(&kept).logical_not().unsqueeze(0);
        let (rewards, values) = ([0.1, -0.3, nan, nan, 0.2, nan, 1.0f32], [0.5, 0.4, nan, nan, -0.2, nan, 0.7f32]);
        let dense = |x: &[f32]| -> Tensor {
            let kept: Vec<f32> = x.iter().zip(kept).filter(|(_, kept)| *kept).map(|(x, _)| *x).collect();
            rows(&[&kept])
        };
        let select_kept = |x: &Tensor| x.masked_select(&skipped.logical_not()).unsqueeze(0);
        let all = Tensor::ones([1, 4], (Kind::Bool, Device::Cpu));
        for (gamma, lam) in [(1.0, 0.95), (0.9, 0.8), (0.99, 0.0)] {
            let expected = gae(&dense(&rewards), &dense(&values), &all, gamma, lam);
            for lam in [Lambda::Fixed(lam), Lambda::PerRow(Tensor::from_slice(&[lam as f32]))] {
                let (rewards, values) = (rows(&[&rewards]), rows(&[&values]));
                let (advantages, returns) =
                    gae_across(&rewards, &values, &skipped.logical_not(), Some(&skipped), gamma, &lam);
                assert_close(&select_kept(&advantages), &expected.0, 1e-6);
                assert_close(&select_kept(&returns), &expected.1, 1e-6);
                let outside = advantages.masked_select(&skipped).abs().sum(Kind::Double).double_value(&[]);
                assert_eq!(outside, 0.0);
            }
            let rewards = keep(&rows(&[&rewards]), &skipped.logical_not());
            let found = super::returns(&rewards, Some(&skipped), gamma);
            assert_close(&select_kept(&found), &super::returns(&select_kept(&rewards), None, gamma), 1e-6);
        }
    }

    /// Two rows of five slots, from TRL 1.11's own code: lengths 3 and 5, pad 0, eos 9 (reference/peers, vector B5).
    struct Vector {
        lengths: [i64; 2],
        logprobs: Tensor,
        ref_logprobs: Tensor,
        values: Tensor,
        scores: Tensor,
    }

    fn vector() -> Vector {
        let nan = f32::NAN; // whatever lies outside the mask must not matter
        Vector {
            lengths: [3, 5],
            logprobs: rows(&[&[-1.0, -2.0, -0.5, nan, nan], &[-1.0; 5]]),
            ref_logprobs: rows(&[&[-1.2, -1.5, -0.6, nan, nan], &[-1.5, -0.5, -1.0, -2.0, -0.75]]),
            values: rows(&[&[0.1, 0.2, 0.3, 0.4, nan], &[0.5, 0.4, 0.3, 0.2, 0.1]]),
            scores: Tensor::from_slice(&[1.0f32, -0.5]),
        }
    }

    fn shaped(v: &Vector) -> (Tensor, Tensor, Tensor, Tensor) {
        let mask = response_mask(&v.lengths, 5, Device::Cpu);
        let p1 = value_mask(&v.lengths, 5, ScorePosition::AfterStop, Device::Cpu);
        let kl = kl(&v.logprobs, &v.ref_logprobs, &mask, KlEstimator::K1);
        let rewards = rewards(&kl, &v.scores, &v.lengths, 0.05, ScorePosition::AfterStop);
        (mask, p1, kl, rewards)
    }

    #[test]
    fn rewards_returns_and_advantages_equal_trls() {
        let v = vector();
        let (mask, p1, kl, rewards) = shaped(&v);
        assert!((kl.sum(Kind::Float).double_value(&[]) / 2.0 - 0.275).abs() < 1e-6);
        let expected = rows(&[&[-0.01, 0.025, -0.005, 1.0, 0.0], &[-0.025, 0.025, 0.0, -0.05, -0.4875]]);
        assert_close(&rewards, &expected, 1e-6);
        let (advantages, returns) = gae(&rewards, &v.values, &p1, 1.0, 0.95);
        let expected =
            rows(&[&[0.908912, 0.956750, 0.965, 1.0, 0.0], &[-0.393629, -0.409083, -0.472719, -0.508125, -0.4875]]);
        assert_close(&returns, &expected, 2e-6);
        let expected = rows(&[
            &[1.282313, 1.215522, 1.098042, 0.0, 0.0],
            &[-0.897692, -0.789436, -0.742874, -0.660165, -0.505712],
        ]);
        assert_close(&whiten(&advantages, &mask, true), &expected, 2e-6);
    }

    #[test]
    fn whitened_rewards_keep_their_mean_and_lead_to_trls_advantages() {
        let v = vector();
        let (mask, p1, _, rewards) = shaped(&v);
        let whitened = whiten(&rewards, &p1, false);
        let gap = masked_mean(&whitened, &p1) - masked_mean(&rewards, &p1);
        assert!(gap.double_value(&[]).abs() < 1e-6);
        let (advantages, _) = gae(&whitened, &v.values, &p1, 1.0, 0.95);
        let expected =
            rows(&[&[1.163654, 1.219422, 1.22843, 0.0, 0.0], &[-0.843258, -0.761047, -0.745501, -0.693641, -0.568059]]);
        assert_close(&whiten(&advantages, &mask, true), &expected, 2e-6);
    }

    #[test]
    fn losses_and_their_metrics_equal_trls() {
        let v = vector();
        let (mask, p1, _, rewards) = shaped(&v);
        let (advantages, returns) = gae(&rewards, &v.values, &p1, 1.0, 0.95);
        let advantages = whiten(&advantages, &mask, true);
        let nan = f32::NAN;
        let new = rows(&[&[-1.3, -1.5, -0.5, nan, nan], &[-1.2, -0.7, -1.0, -0.9, -1.0]]);
        let predicted = rows(&[&[0.5, 0.1, 0.35, 0.7, nan], &[0.5, 0.9, 0.3, -0.3, 0.1]]);
        let policy = policy_loss(&new, &v.logprobs, &advantages, &mask, CLIP);
        let value = value_loss(&predicted, &v.values, &returns, &p1, 0.2);
        let number = |t: &Tensor| t.double_value(&[]);
        for (name, found, expected) in [
            ("pg", number(&policy.sum) / 8.0, 0.0340181),
            ("vf", number(&value.sum) / 9.0, 0.2975407),
            ("pg_clipfrac", number(&policy.clipped) / 8.0, 0.125),
            ("vf_clipfrac", number(&value.clipped) / 9.0, 1.0 / 3.0),
            // TRL divides by all 10 slots, the 2 pads included; their squares are 0.
            ("approxkl", number(&policy.approx_kl) / 10.0, 0.024),
            // TRL counts the 2 pads as ratio 1.
            ("ratio", (number(&policy.ratio.sum(Kind::Float)) + 2.0) / 10.0, 1.0663301),
        ] {
            assert!((found - expected).abs() < 1e-6, "{name}: {found} is not {expected}");
        }
    }

    #[test]
    fn gae_discounts_a_final_reward_back_through_time() {
        // Values 0, reward 1 at the end, gamma 0.9, lambda 0.95: A_t = (0.9 * 0.95)^(2 - t) = 0.731025, 0.855, 1.
        let mask = response_mask(&[3], 3, Device::Cpu);
        let (advantages, _) = gae(&rows(&[&[0., 0., 1.]]), &rows(&[&[0., 0., 0.]]), &mask, 0.9, 0.95);
        assert_close(&advantages, &rows(&[&[0.731025, 0.855, 1.0]]), 1e-6);
    }

    #[test]
    fn gradients_are_finite_and_zero_outside_the_mask_for_any_values_there() {
        let mask = response_mask(&[1], 3, Device::Cpu);
        let new = rows(&[&[-1.0, 1e30, -1e30]]).set_requires_grad(true);
        let old = rows(&[&[-1.1, -1e30, 1e30]]);
        policy_loss(&new, &old, &rows(&[&[1.0, 0.0, 0.0]]), &mask, CLIP).sum.backward();
        let gradient = Vec::<f32>::try_from(new.grad().view([-1])).unwrap();
        assert!(gradient[0].is_finite() && gradient[0] != 0.0);
        assert_eq!(gradient[1..], [0.0, 0.0]);
    }

    #[test]
    fn k3_is_never_negative_and_k1_may_be() {
        let mask = response_mask(&[2], 2, Device::Cpu);
        let (new, reference) = (rows(&[&[-1.0, -1.0]]), rows(&[&[-0.5, -1.5]]));
        assert_close(&kl(&new, &reference, &mask, KlEstimator::K1), &rows(&[&[-0.5, 0.5]]), 1e-7);
        // exp(.5) - 1.5 and exp(-.5) - .5
        assert_close(&kl(&new, &reference, &mask, KlEstimator::K3), &rows(&[&[0.148_721_3, 0.106_530_7]]), 1e-6);
    }

    #[test]
    fn sums_of_each_estimator_are_those_of_trl_0_11() {
        let new = rows(&[&[-0.3, -1.0, -2.0, -0.5, -4.0], &[-0.1, -0.2, -1.0, -1.0, -4.0]]);
        let reference = rows(&[&[-0.3, -1.2, -1.5, -0.6, -4.5], &[-0.1, -0.2, -1.5, -0.5, -3.0]]);
        let mask = rows(&[&[0., 1., 1., 1., 0.], &[0., 0., 1., 1., 0.]]).to_kind(Kind::Bool);
        // TRL 0.11.4's `objective/kl`, the mean over rows of their sums.
        for (estimator, expected) in [(KlEstimator::K1, -0.1), (KlEstimator::Abs, 0.9), (KlEstimator::Mse, 0.2)] {
            let found = kl(&new, &reference, &mask, estimator).sum(Kind::Float).double_value(&[]) / 2.0;
            assert!((found - expected).abs() < 1e-6, "{estimator:?}: {found}");
        }
    }

    #[test]
    fn in_a_loss_each_estimator_has_its_own_gradient() {
        let mask = response_mask(&[2], 3, Device::Cpu);
        let reference = rows(&[&[-0.5, -1.5, f32::NAN]]);
        // r = .5 and -.5: of -r, exp(r) - 1 - r, |r| and r^2 / 2 by the log-probability, which is -1 each time.
        for (estimator, expected) in [
            (KlEstimator::K1, [1.0, 1.0]),
            (KlEstimator::K3, [1.0 - 0.5f32.exp(), 1.0 - (-0.5f32).exp()]),
            (KlEstimator::Abs, [-1.0, 1.0]),
            (KlEstimator::Mse, [-0.5, 0.5]),
        ] {
            let new = rows(&[&[-1.0, -1.0, -1.0]]).set_requires_grad(true);
            kl(&new, &reference, &mask, estimator).sum(Kind::Float).backward();
            assert_close(&new.grad(), &rows(&[&[expected[0], expected[1], 0.0]]), 1e-6);
        }
    }

    /// Losses and gradients of tokens with these ratios and advantages.
    fn losses(ratios: &[f32], advantages: &[f32], clip: PolicyClip) -> (PolicyLoss, Vec<f32>) {
        let new = Tensor::from_slice(ratios).log().unsqueeze(0).set_requires_grad(true);
        let mask = response_mask(&[ratios.len() as i64], ratios.len() as i64, Device::Cpu);
        let loss = policy_loss(&new, &new.zeros_like(), &rows(&[advantages]), &mask, clip);
        loss.sum.backward();
        let gradient = new.grad().squeeze_dim(0);
        (loss, Vec::try_from(gradient).unwrap())
    }

    #[test]
    fn clip_higher_moves_the_upper_bound_alone() {
        let clip = PolicyClip { high: 0.5, ..CLIP };
        // Advantage 1: -1.4 is within 1.5, and 2 is clipped to it. Advantage -1: 0.7 is clipped to 0.8, and 2 counts whole.
        let (loss, gradient) = losses(&[1.4, 2.0, 0.7, 2.0], &[1.0, 1.0, -1.0, -1.0], clip);
        assert!((loss.sum.double_value(&[]) - (-1.4 - 1.5 + 0.8 + 2.0)).abs() < 1e-6);
        assert_eq!(loss.clipped.double_value(&[]), 2.0);
        // The derivative of -A * ratio by the log-probability is itself.
        for (found, expected) in gradient.into_iter().zip([-1.4, 0.0, 0.0, 2.0]) {
            assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
        }
    }

    #[test]
    fn the_dual_clip_bounds_what_a_token_of_negative_advantage_can_cost() {
        let clip = PolicyClip { dual: Some(3.0), ..CLIP };
        // Of advantage -2 a ratio of 5 costs 3 * 2 and no more, one of 2.5 its 5; of advantage 2 nothing is bounded.
        let (loss, gradient) = losses(&[5.0, 2.5, 5.0], &[-2.0, -2.0, 2.0], clip);
        assert!((loss.sum.double_value(&[]) - (6.0 + 5.0 - 2.4)).abs() < 1e-5);
        assert_eq!((loss.dual_clipped.double_value(&[]), loss.clipped.double_value(&[])), (1.0, 1.0));
        for (found, expected) in gradient.into_iter().zip([0.0, 5.0, 0.0]) {
            assert!((found - expected).abs() < 1e-5, "{found} is not {expected}");
        }
        // k1 of the move: log 5 + log 2.5 + log 5, negated.
        assert!((loss.policy_kl.double_value(&[]) + 62.5f64.ln()).abs() < 1e-5);
    }

    #[test]
    fn the_score_lands_after_the_stop_if_there_is_room_else_on_the_last_token() {
        let (zeros, scores) = (rows(&[&[0.0; 3], &[0.0; 3], &[0.0; 3]]), Tensor::from_slice(&[1.0f32, 2.0, 3.0]));
        let at = |position| rewards(&zeros, &scores, &[0, 2, 3], 0.1, position);
        assert_close(&at(ScorePosition::AfterStop), &rows(&[&[1., 0., 0.], &[0., 0., 2.], &[0., 0., 3.]]), 0.0);
        assert_close(&at(ScorePosition::LastToken), &rows(&[&[1., 0., 0.], &[0., 2., 0.], &[0., 0., 3.]]), 0.0);
    }

    #[test]
    fn whitening_equal_numbers_gives_zeros_however_large_they_are() {
        for number in [-181.0f32, -1811.4, 18114.3] {
            let x = Tensor::full([30, 47], f64::from(number), (Kind::Float, Device::Cpu));
            let mask = x.ones_like().to_kind(Kind::Bool);
            assert_close(&whiten(&x, &mask, true), &x.zeros_like(), 0.0);
            assert_close(&whiten(&x, &mask, false), &x, 0.0);
        }
    }

    #[test]
    fn whitening_one_number_gives_zero_and_not_nan() {
        let mask = response_mask(&[1], 2, Device::Cpu);
        assert_close(&whiten(&rows(&[&[3.0, f32::NAN]]), &mask, true), &rows(&[&[0.0, 0.0]]), 0.0);
    }
}
