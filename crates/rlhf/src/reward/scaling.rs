//! Running moments, and the normalization, scaling and clipping of scores.

use super::Scored;
use super::settings::ScoreScalingConfig;
use serde::{Deserialize, Serialize};

/// The transformation of one reward's scores before they are summed: normalized, scaled, clipped and weighted, in this order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoreTransform {
    /// Normalization by running moments.
    pub normalize: Normalize,
    /// Factor applied before clipping.
    pub scale: f64,
    /// Clips scores to [-clip, clip].
    pub clip: Option<f64>,
    /// Factor applied last.
    pub weight: f64,
}

impl Default for ScoreTransform {
    /// The identity.
    fn default() -> Self {
        Self { normalize: Normalize::None, scale: 1.0, clip: None, weight: 1.0 }
    }
}

impl ScoreTransform {
    /// Transforms one score. Normalizes only scores that are trained on (`training`): the moments change with every update, so
    /// normalized scores of samples and evaluations would change even where the responses do not.
    pub(super) fn apply(&self, score: f64, moments: &Moments, training: bool) -> f64 {
        let score = match self.normalize {
            Normalize::Std if training => score / moments.std(),
            Normalize::MeanStd if training => (score - moments.mean) / moments.std(),
            _ => score,
        };
        let score = score * self.scale;
        self.weight * self.clip.map_or(score, |most| score.clamp(-most, most))
    }
}

/// Normalization of scores by the moments of all scores of the run so far, the current batch included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Normalize {
    /// No normalization.
    None,
    /// Division by the standard deviation.
    Std,
    /// Subtraction of the mean, then division by the standard deviation.
    MeanStd,
}

/// Running moments: count, mean, and sum of squared deviations from the mean.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Moments {
    pub(super) count: f64,
    mean: f64,
    m2: f64,
}

impl Moments {
    /// Adds a batch of numbers. Source: the pairwise update of Chan, Golub and LeVeque 1979.
    pub(super) fn update(&mut self, numbers: &[f64]) {
        let count = numbers.len() as f64;
        if numbers.is_empty() {
            return;
        }
        let mean = numbers.iter().sum::<f64>() / count;
        let m2: f64 = numbers.iter().map(|x| (x - mean).powi(2)).sum();
        let total = self.count + count;
        let gap = mean - self.mean;
        self.m2 += m2 + gap * gap * self.count * count / total;
        self.mean += gap * count / total;
        self.count = total;
    }

    pub(super) fn mean(&self) -> f64 {
        self.mean
    }

    /// Returns the unbiased standard deviation of the numbers, 0 for fewer than two.
    pub(super) fn spread(&self) -> f64 {
        (self.m2 / (self.count - 1.0).max(1.0)).sqrt()
    }

    /// Returns the unbiased standard deviation to divide by: 1 for fewer than two numbers or equal ones.
    fn std(&self) -> f64 {
        let variance = if self.count > 1.0 { self.m2 / (self.count - 1.0) } else { 0.0 };
        if variance > 0.0 { variance.sqrt() } else { 1.0 }
    }
}

/// Score scaling of TRL 0.11, applied to the summed score of each response: centered by the running mean, divided by the running
/// standard deviation, clipped. Scores that are not trained on stay raw: the moments change with every update, so scaled scores
/// would change even where the responses do not.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoreScaling {
    scales: bool,
    centers: bool,
    clip: Option<f64>,
    moments: Moments,
}

impl ScoreScaling {
    /// Creates the scaling of `use_score_scaling`, `use_score_norm` and `score_clip`, without any scores yet.
    pub fn new(config: &ScoreScalingConfig) -> Self {
        Self {
            scales: config.use_score_scaling,
            centers: config.use_score_norm,
            clip: config.score_clip,
            moments: Moments::default(),
        }
    }

    /// Returns the scaled scores. If they are trained on (`training`), they are first added to the running moments.
    pub fn scale(&mut self, scores: &[f64], training: bool) -> Vec<f64> {
        if self.scales && training {
            self.moments.update(scores);
        }
        let mean = if self.centers { self.moments.mean } else { 0.0 };
        let std = self.moments.std() + f64::from(f32::EPSILON);
        let scaled = |score: f64| if self.scales { (score - mean) / std } else { score };
        scores.iter().map(|&score| self.clip.map_or(scaled(score), |most| scaled(score).clamp(-most, most))).collect()
    }

    /// Scales the total scores of responses by [`ScoreScaling::scale`]; with `training` they are added to the running
    /// moments first. Scores per token stay as they are; the difference is added to the score of the whole response.
    pub(crate) fn apply(&mut self, scored: &mut Scored, training: bool) {
        if !self.scales && self.clip.is_none() {
            return;
        }
        // A response that no reward scored keeps its 0, which is not a score.
        let totals = scored.totals();
        let unscored = scored.unscored();
        let rows: Vec<usize> = (0..totals.len()).filter(|&row| !unscored[row]).collect();
        let totals: Vec<f64> = rows.iter().map(|&row| totals[row]).collect();
        let scaled = self.scale(&totals, training);
        for ((row, scaled), total) in rows.into_iter().zip(scaled).zip(totals) {
            scored.responses[row] += scaled - total;
        }
    }

    /// Returns the running mean and the unbiased standard deviation.
    pub fn moments(&self) -> (f64, f64) {
        (self.moments.mean, self.moments.std())
    }

    /// Returns the state for a checkpoint: the running moments.
    pub fn state(&self) -> Moments {
        self.moments
    }

    /// Restores the state that [`ScoreScaling::state`] returned.
    pub fn load_state(&mut self, state: Moments) {
        self.moments = state;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_moments_equal_the_direct_computation() {
        let batches: [&[f64]; 4] = [&[1.0, 2.5, -3.0], &[7.0], &[0.1, 0.2, 0.3, 1e3], &[5.0, 5.0]];
        let mut moments = Moments::default();
        for upto in 1..=batches.len() {
            moments.update(batches[upto - 1]);
            let all: Vec<f64> = batches[..upto].concat();
            let mean = all.iter().sum::<f64>() / all.len() as f64;
            let variance = all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (all.len() as f64 - 1.0);
            assert!((moments.mean - mean).abs() < 1e-12 * mean.abs().max(1.0));
            assert!((moments.std() - variance.sqrt()).abs() < 1e-12 * variance.sqrt());
        }
    }
}
