//! The data of one PPO update: responses and everything that the models computed for them.

use crate::model::{Distributions, TokenSet, shared_lens};
use crate::rl::math;
use crate::{Error, Result};
use std::ops::Range;
use tch::{Kind, Tensor};

/// The slots of `[B, R]` tensors that count; every mask is bool, true = counts.
#[derive(Debug)]
pub struct Masks {
    /// Slots with a response token.
    pub response: Tensor,
    /// Slots whose tokens are in the policy loss; within `response`.
    pub loss: Tensor,
    /// Slots with a value: the state before each token that counts and, where a slot is left, the state after the last one.
    pub value: Tensor,
    /// Slots whose values are in the value loss; within `value`.
    pub value_loss: Tensor,
}

/// The responses of one update with their log-probabilities, values and scores; B rows, R = `response_length` slots.
///
/// Tensors are `[B, R]` f32 and exactly 0 outside their mask, unless said otherwise.
#[derive(Debug)]
pub struct Experience {
    /// Prompt tokens of each row.
    pub prompts: Vec<Vec<i64>>,
    /// Response tokens of each row.
    pub responses: Vec<Vec<i64>>,
    /// Group of each row: rows of one group are responses to one prompt, sampled together.
    pub groups: Vec<usize>,
    /// Number of response tokens of each row that count, from the first: an eos at the end may not. The score lands behind
    /// the last of them.
    pub counted: Vec<i64>,
    /// Number of values of each row: one per token that counts, and one after the last where the context allows.
    pub value_counts: Vec<i64>,
    /// The slots that count.
    pub masks: Masks,
    /// Log-probabilities under the policy that sampled, within `masks.response`.
    pub logprobs: Tensor,
    /// Log-probabilities under the reference model, within `masks.response`; `None` without a reference model.
    pub ref_logprobs: Option<Tensor>,
    /// KL(policy || reference) over the whole vocabulary, within `masks.response`; only with [`KlEstimator::Full`].
    ///
    /// [`KlEstimator::Full`]: super::math::KlEstimator::Full
    pub full_kl: Option<Tensor>,
    /// The reference model's distribution at each response token; only where the loss has the KL over the vocabulary.
    pub reference: Option<Distributions>,
    /// Values of the states before each token and after the last, within `masks.value`; all 0 without a critic.
    pub values: Tensor,
    /// Score of each row, `[B]`, after any penalty for a missing stop token; 0 where `unscored`.
    pub scores: Tensor,
    /// Rows for which no reward gave a score, which are compared with no other and learn nothing from their group; empty if there are
    /// none.
    pub unscored: Vec<usize>,
    /// Weight and scores of each reward, a score per row, NaN where it gave none; only where an estimator compares them one by one.
    pub rewards: Option<Vec<(f64, Vec<f64>)>>,
    /// Score of a greedy response to each row's prompt, `[B]`, after penalties as `scores` are; NaN where no reward gave one. Only for
    /// ReMax.
    pub baselines: Option<Tensor>,
    /// Scores of single tokens, within `masks.response`, if a reward returns any.
    pub token_scores: Option<Tensor>,
    /// The tokens that each response token was sampled from, a list per row; only where log-probabilities are taken over the
    /// filtered vocabulary.
    pub sets: Option<Vec<Vec<TokenSet>>>,
}

impl Experience {
    /// Number of rows B.
    pub fn rows(&self) -> usize {
        self.responses.len()
    }

    /// Number of slots R.
    pub fn width(&self) -> i64 {
        self.masks.response.size()[1]
    }

    /// Number of response tokens of each row.
    pub fn lengths(&self) -> Vec<i64> {
        self.responses.iter().map(|response| response.len() as i64).collect()
    }

    /// Prompt and response of a row, joined: the sequence that the models read.
    pub fn sequence(&self, row: usize) -> Vec<i64> {
        [self.prompts[row].as_slice(), &self.responses[row]].concat()
    }

    /// Number of tokens of [`Experience::sequence`].
    pub(crate) fn sequence_len(&self, row: usize) -> usize {
        self.prompts[row].len() + self.responses[row].len()
    }

    /// Returns true if a group has several rows.
    pub(crate) fn has_groups(&self) -> bool {
        self.groups.windows(2).any(|pair| pair[0] == pair[1])
    }

    /// Number of first tokens of each of `rows`' prompts that are those of the prompt of the row before it: models compute them once.
    /// `None` if there are few.
    pub(crate) fn shared_lens(&self, rows: &[usize]) -> Option<Vec<usize>> {
        let tokens = rows.iter().map(|&row| self.sequence_len(row)).sum();
        shared_lens(rows.iter().map(|&row| &self.prompts[row][..]), tokens)
    }

    /// Positions of the response tokens of a row in its sequence.
    pub fn token_span(&self, row: usize) -> Range<usize> {
        let start = self.prompts[row].len();
        start..start + self.responses[row].len()
    }

    /// Positions at which the values of a row are read: the token before each response token, and the last token.
    pub fn value_span(&self, row: usize) -> Range<usize> {
        let start = self.prompts[row].len() - 1;
        start..start + self.value_counts[row] as usize
    }

    /// Total score of each row, `[B]`: its own and those of its tokens.
    pub fn total_scores(&self) -> Tensor {
        match &self.token_scores {
            Some(tokens) => &self.scores + tokens.sum_dim_intlist(1i64, false, Kind::Float),
            None => self.scores.shallow_clone(),
        }
    }

    /// Total score of each row as a number, NaN where `unscored`.
    pub(crate) fn scored_totals(&self) -> Vec<f64> {
        self.clipped_totals(None)
    }

    /// [`Experience::scored_totals`] within the bounds `clip`, if there are any.
    pub(crate) fn clipped_totals(&self, clip: Option<[f64; 2]>) -> Vec<f64> {
        self.without_unscored(math::numbers(&math::within(&self.total_scores(), clip)))
    }

    /// Slots over which advantages are whitened, `[B, R]` bool: those in the policy loss; without a critic only those of rows that have a
    /// score, since the others have the advantage 0.
    pub(crate) fn whitened_mask(&self, has_critic: bool) -> Tensor {
        let mask = &self.masks.loss;
        if has_critic || self.unscored.is_empty() {
            return mask.shallow_clone();
        }
        mask.index_fill(0, &row_index(&self.unscored, mask), 0)
    }

    /// The sum of each row of `rewards`, `[B, R]`, NaN where `unscored`.
    pub(crate) fn total_rewards(&self, rewards: &Tensor) -> Vec<f64> {
        self.without_unscored(math::numbers(&rewards.sum_dim_intlist(1i64, false, Kind::Float)))
    }

    fn without_unscored(&self, mut numbers: Vec<f64>) -> Vec<f64> {
        self.unscored.iter().for_each(|&row| numbers[row] = f64::NAN);
        numbers
    }

    /// Masks out whole rows: none of their tokens is in a loss, a KL or a sum, while their scores stay in the comparisons of their
    /// groups.
    pub fn mask_rows(&mut self, rows: &[usize]) {
        if rows.is_empty() {
            return;
        }
        let index = row_index(rows, &self.masks.response);
        let Masks { response, loss, value, value_loss } = &mut self.masks;
        for mask in [response, loss, value, value_loss] {
            *mask = mask.index_fill(0, &index, 0);
        }
        for (x, mask) in [(&mut self.logprobs, &self.masks.response), (&mut self.values, &self.masks.value)] {
            *x = math::keep(x, mask);
        }
        for x in self.ref_logprobs.iter_mut().chain(&mut self.full_kl) {
            *x = math::keep(x, &self.masks.response);
        }
    }

    /// The sampled-from tokens of `rows`, concatenated; `None` where log-probabilities are over the whole vocabulary.
    pub(crate) fn sets_of(&self, rows: impl IntoIterator<Item = usize>) -> Option<Vec<TokenSet>> {
        let sets = self.sets.as_ref()?;
        Some(rows.into_iter().flat_map(|row| sets[row].iter().cloned()).collect())
    }

    /// Masks out the tokens whose `kept` is false, so that they are in no reward, advantage, loss or sum: one entry per token
    /// of each response. A value at a masked token counts as 0, and the score lands on the last token that is kept.
    ///
    /// # Errors
    /// If `kept` does not have an entry for each token, or masks out a whole response.
    pub fn leave_out(&mut self, kept: &[Vec<bool>]) -> Result<()> {
        let lengths = self.lengths();
        if !kept.iter().map(|row| row.len() as i64).eq(lengths.iter().copied()) {
            return Err(Error::Run("response_masks: expected an entry for each token of each response".into()));
        }
        if let Some(row) = kept.iter().position(|row| !row.is_empty() && !row.contains(&true)) {
            return Err(Error::Run(format!(
                "response_masks: row {row}: expected at least one token that counts, found none"
            )));
        }
        let flat: Vec<f32> = kept.iter().flatten().map(|&kept| f32::from(u8::from(kept))).collect();
        let flat = Tensor::from_slice(&flat).to_device(self.masks.response.device());
        let left = to_slots(&flat, &lengths, self.width()).gt(0.5);
        let lost = self.masks.response.logical_and(&left.logical_not());
        let Masks { response, loss, value, value_loss } = &mut self.masks;
        for mask in [response, loss, value, value_loss] {
            *mask = mask.logical_and(&lost.logical_not());
        }
        let last = |row: &Vec<bool>| row.iter().rposition(|&kept| kept).map_or(0, |at| at as i64 + 1);
        self.counted = kept.iter().zip(&self.counted).map(|(row, &counted)| last(row).min(counted)).collect();
        for (x, mask) in [(&mut self.logprobs, &self.masks.response), (&mut self.values, &self.masks.value)] {
            *x = math::keep(x, mask);
        }
        for x in self.ref_logprobs.iter_mut().chain(&mut self.full_kl).chain(&mut self.token_scores) {
            *x = math::keep(x, &self.masks.response);
        }
        Ok(())
    }
}

/// Scatters `numbers`, row after row, into the first `counts[b]` slots of each row: `[M]` to `[B, width]`; differentiable.
pub(crate) fn to_slots(numbers: &Tensor, counts: &[i64], width: i64) -> Tensor {
    let slots: Vec<i64> =
        counts.iter().zip(0i64..).flat_map(|(&count, row)| (0..count).map(move |t| row * width + t)).collect();
    let slots = Tensor::from_slice(&slots).to_device(numbers.device());
    let rows = counts.len() as i64;
    Tensor::zeros([rows * width], (Kind::Float, numbers.device())).index_copy(0, &slots, numbers).view([rows, width])
}

/// The inverse of [`to_slots`] for some rows: the first `counts[b]` slots of `rows` of `x`, concatenated.
pub(crate) fn from_slots(x: &Tensor, counts: &[i64], rows: &[usize]) -> Tensor {
    let slots = math::response_mask(counts, x.size()[1], x.device());
    x.index_select(0, &row_index(rows, x)).masked_select(&slots)
}

/// Row numbers as an index tensor on the device of `like`.
pub(crate) fn row_index(rows: &[usize], like: &Tensor) -> Tensor {
    Tensor::from_slice(&rows.iter().map(|&row| row as i64).collect::<Vec<_>>()).to_device(like.device())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::rl::math::ScorePosition;
    use tch::Device;

    /// An experience of responses of these lengths, in groups of `size` rows, with these scores, of which NaN is none; log-probabilities
    /// and values are 0, and there is a value for each token.
    pub(crate) fn experience(lengths: &[i64], size: usize, scores: &[f64]) -> Experience {
        let (rows, width) = (lengths.len(), lengths.iter().copied().max().unwrap());
        let mask = || math::response_mask(lengths, width, Device::Cpu);
        let value = || math::value_mask(lengths, width, ScorePosition::LastToken, Device::Cpu);
        let zeros = || Tensor::zeros([rows as i64, width], (Kind::Float, Device::Cpu));
        let known: Vec<f32> = scores.iter().map(|x| if x.is_nan() { 0.0 } else { *x as f32 }).collect();
        Experience {
            prompts: vec![vec![1, 2]; rows],
            responses: lengths.iter().map(|&length| vec![3; length as usize]).collect(),
            groups: (0..rows).map(|row| row / size).collect(),
            counted: lengths.to_vec(),
            value_counts: lengths.to_vec(),
            masks: Masks { response: mask(), loss: mask(), value: value(), value_loss: value() },
            logprobs: zeros(),
            ref_logprobs: None,
            full_kl: None,
            reference: None,
            values: zeros(),
            scores: Tensor::from_slice(&known),
            unscored: (0..rows).filter(|&row| scores[row].is_nan()).collect(),
            rewards: None,
            baselines: None,
            token_scores: None,
            sets: None,
        }
    }
}
