//! The losses of DPO, from the log-probabilities of both sides of pairs under policy and reference model. Names, scales and signs are
//! TRL's.
//!
//! r is the log-ratio of a side, log policy - log reference; d is the difference of both sides' f'(exp r), which for `reverse_kl` is the
//! difference of the log-ratios; b is the strength beta.

use crate::settings::{DpoLoss, DpoLossConfig, FDivergence};
use tch::{Kind, Tensor};

/// Numbers of n pairs; column 0 is the chosen side, column 1 the rejected one.
pub(super) struct PairTerms<'a> {
    /// Log-probabilities of the completions under the policy, `[n, 2]`.
    pub(super) policy: &'a Tensor,
    /// Log-probabilities of the completions under the reference model, `[n, 2]`.
    pub(super) reference: &'a Tensor,
    /// Number of tokens of the completions, at least 1, `[n, 2]`.
    pub(super) lens: &'a Tensor,
    /// Share of each pair in the loss `sft`, `[n]`, so that the mean over the pairs is that loss; `None`: the loss is left out.
    pub(super) sft: Option<&'a Tensor>,
    /// Factor of each pair's loss, `[n]`, without a gradient.
    pub(super) weights: Option<&'a Tensor>,
}

/// Returns the loss of each pair, `[n]`. Losses that sort need all pairs of a micro-batch, and have a loss for each place in the order.
pub(super) fn losses(config: &DpoLossConfig, terms: &PairTerms<'_>) -> Tensor {
    let mut all = terms.policy.select(1, 0).zeros_like();
    for (loss, weight) in config.weighted() {
        let Some(unweighted) = unweighted_loss(loss, config, terms) else { continue };
        let by_pair = terms.weights.map_or_else(|| unweighted.shallow_clone(), |weights| &unweighted * weights);
        all += by_pair * weight;
    }
    all
}

/// Returns one of the losses, without its weight.
fn unweighted_loss(loss: DpoLoss, config: &DpoLossConfig, terms: &PairTerms<'_>) -> Option<Tensor> {
    let beta = config.beta;
    let smoothing = config.label_smoothing;
    let ratios = terms.policy - terms.reference;
    let (chosen, rejected) = (ratios.select(1, 0), ratios.select(1, 1));
    let scores = || scores(&ratios, config);
    // b d
    let scaled = || difference(&scores()) * beta;
    Some(match loss {
        DpoLoss::Sigmoid => -scaled().log_sigmoid(),
        DpoLoss::Hinge => (-scaled() + 1.0).relu(),
        DpoLoss::Ipo => (difference(&(scores() / terms.lens)) - 0.5 / beta).square(),
        DpoLoss::ExoPair => exo(&scaled(), smoothing),
        DpoLoss::NcaPair => {
            let (chosen, rejected) = (chosen * beta, rejected * beta);
            -chosen.log_sigmoid() - (-chosen).log_sigmoid() * 0.5 - (-rejected).log_sigmoid() * 0.5
        }
        DpoLoss::Robust => {
            let scaled = scaled();
            let right = scaled.log_sigmoid() * (1.0 - smoothing);
            let flipped = (-scaled).log_sigmoid() * smoothing;
            (flipped - right) / (1.0 - 2.0 * smoothing)
        }
        DpoLoss::BcoPair => -(chosen * beta).log_sigmoid() - (-rejected * beta).log_sigmoid(),
        DpoLoss::SppoHard => (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square(),
        DpoLoss::Aot => {
            let sorted = |logprobs: &Tensor| difference(logprobs).sort(0, false).0;
            smoothed(&((sorted(terms.policy) - sorted(terms.reference)) * beta), smoothing)
        }
        DpoLoss::AotUnpaired => smoothed(&((chosen.sort(0, false).0 - rejected.sort(0, false).0) * beta), smoothing),
        DpoLoss::ApoZero => -(chosen * beta).sigmoid() + (rejected * beta).sigmoid() + 1.0,
        DpoLoss::ApoDown => (&chosen * beta).sigmoid() - ((chosen - rejected) * beta).sigmoid() + 1.0,
        DpoLoss::Discopop => {
            let scaled = scaled();
            let share = (&scaled / config.discopop_tau).sigmoid();
            -scaled.log_sigmoid() * (-&share + 1.0) + (-scaled).exp() * share
        }
        DpoLoss::Sft => return terms.sft.map(Tensor::shallow_clone),
        DpoLoss::SigmoidNorm => -(difference(&(scores() / terms.lens)) * beta).log_sigmoid(),
    })
}

/// Chosen minus rejected, `[n, 2]` to `[n]`.
fn difference(sides: &Tensor) -> Tensor {
    sides.select(1, 0) - sides.select(1, 1)
}

/// f'(exp r) of log-ratios r. Source: Wang et al. 2023, f-DPO, table 1.
fn scores(ratios: &Tensor, config: &DpoLossConfig) -> Tensor {
    // With the exponent 0, f' is the logarithm up to a constant.
    let power = config.f_alpha_divergence_coef - 1.0;
    match config.f_divergence_type {
        FDivergence::ReverseKl => ratios.shallow_clone(),
        FDivergence::ForwardKl => -(-ratios).exp() + 1.0,
        FDivergence::JsDivergence => ratios.log_sigmoid() + std::f64::consts::LN_2,
        FDivergence::AlphaDivergence if power.abs() < 1e-6 => ratios.shallow_clone(),
        // Larger exponents are clamped: their exp is infinite in f32.
        FDivergence::AlphaDivergence => ((ratios * power).clamp_max(80.0).exp() - 1.0) / power,
    }
}

/// The divergence of the two sides' softmax from the smoothed preference. Source: Ji et al. 2024, EXO, eq. 16.
fn exo(scaled: &Tensor, smoothing: f64) -> Tensor {
    let side = |scaled: &Tensor, share: f64| scaled.sigmoid() * (scaled.log_sigmoid() - share.ln());
    side(scaled, 1.0 - smoothing) + side(&-scaled, smoothing)
}

/// -log sigmoid, smoothed for labels that are wrong with the probability `smoothing`.
fn smoothed(scaled: &Tensor, smoothing: f64) -> Tensor {
    -scaled.log_sigmoid() * (1.0 - smoothing) - (-scaled).log_sigmoid() * smoothing
}

/// Sums the rows of `[n]` numbers as f32.
pub(super) fn sum(x: &Tensor) -> Tensor {
    x.sum(Kind::Float)
}
