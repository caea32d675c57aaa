//! The data of one PPO update: responses and everything that the models computed for them.

use crate::rl::math;
use rlhf_base::{Error, Result};
use rlhf_lm::model::{Batch, Distributions, JointBatch, Sampled, TokenSet, shared_lens};
use std::ops::Range;
use tch::{Kind, Tensor};
use tch_ext::{on_device, to_host};

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
    /// Slots before the last token that counts whose tokens the policy did not sample: results of tools, and the text of the template
    /// between turns. They are in no other mask; advantages and returns pass over them. `None` where all tokens were sampled.
    pub inserted: Option<Tensor>,
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
    /// Number of tokens of each row that the policy sampled.
    pub sampled: Vec<i64>,
    /// The slots that count.
    pub masks: Masks,
    /// Log-probabilities under the policy that sampled, within `masks.response`.
    pub logprobs: Tensor,
    /// Log-probabilities that sampling recorded, within `masks.response`; `None` where they are of other distributions, or of a policy of
    /// before.
    pub sampling_logprobs: Option<Tensor>,
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
    /// Weight and scores of each reward, a score per row, NaN where the reward gave none; only where an estimator compares single rewards.
    pub rewards: Option<Vec<(f64, Vec<f64>)>>,
    /// Score of a greedy response to each row's prompt, `[B]`, after the same penalties as `scores`; NaN where no reward gave one. Only for
    /// ReMax.
    pub baselines: Option<Tensor>,
    /// Scores of single tokens, within `masks.response`, if a reward returns any.
    pub token_scores: Option<Tensor>,
    /// The tokens that each response token was sampled from, a list per row; only where log-probabilities are those of the filtered
    /// vocabulary.
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

    /// Number of tokens of each row that count and that the policy sampled.
    pub(crate) fn counted_and_sampled(&self) -> Vec<i64> {
        let Some(inserted) = &self.masks.inserted else { return self.counted.clone() };
        let inserted = inserted.sum_dim_intlist(1i64, false, Kind::Int64);
        let inserted = Vec::<i64>::try_from(inserted).expect("a vector of i64");
        self.counted.iter().zip(inserted).map(|(counted, inserted)| counted - inserted).collect()
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

    /// For each of `rows`, the number of first tokens that its prompt shares with the prompt of the row before it: models compute them
    /// once.
    /// `None` if few are shared.
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

    /// Collects `rows` as the models take them.
    pub(crate) fn ragged(&self, rows: &[usize]) -> RaggedRows {
        RaggedRows {
            sequences: rows.iter().map(|&row| self.sequence(row)).collect(),
            token_spans: rows.iter().map(|&row| self.token_span(row)).collect(),
            value_spans: rows.iter().map(|&row| self.value_span(row)).collect(),
            prompt_lens: rows.iter().map(|&row| self.prompts[row].len()).collect(),
            shared_lens: self.shared_lens(rows),
            sets: self.sets_of(rows.iter().copied()),
        }
    }

    /// The slots of the tokens and of the values in `rows`.
    pub(crate) fn slots(&self, rows: &[usize]) -> Slots {
        let lengths: Vec<i64> = rows.iter().map(|&row| self.responses[row].len() as i64).collect();
        let value_counts: Vec<i64> = rows.iter().map(|&row| self.value_counts[row]).collect();
        let row_slots = |counts: &[i64]| slots(rows.iter().copied(), counts, self.width());
        let tokens = row_slots(&lengths);
        let values = row_slots(&value_counts);
        let token_rows =
            lengths.iter().zip(0i64..).flat_map(|(&length, row)| std::iter::repeat_n(row, length as usize));
        let all = [&tokens[..], &token_rows.collect::<Vec<_>>(), &values].concat();
        let all = on_device(&all, self.masks.response.device());
        let (num_tokens, num_values) = (tokens.len() as i64, values.len() as i64);
        Slots {
            tokens: all.narrow(0, 0, num_tokens),
            token_rows: all.narrow(0, num_tokens, num_tokens),
            values: all.narrow(0, 2 * num_tokens, num_values),
        }
    }

    /// Number of tokens and of values of each row in the losses, as the masks are now; waits for the device once.
    pub(crate) fn loss_counts(&self) -> LossCounts {
        let count = |mask: &Tensor| mask.sum_dim_intlist(1i64, false, Kind::Int64);
        let both = Tensor::cat(&[count(&self.masks.loss), count(&self.masks.value_loss)], 0);
        let mut tokens = Vec::<i64>::try_from(both).expect("a vector of i64");
        let values = tokens.split_off(self.rows());
        LossCounts { tokens, values }
    }

    /// Total score of each row, `[B]`: the score of the row plus those of its tokens.
    pub fn total_scores(&self) -> Tensor {
        match &self.token_scores {
            Some(tokens) => &self.scores + tokens.sum_dim_intlist(1i64, false, Kind::Float),
            None => self.scores.shallow_clone(),
        }
    }

    /// Number of responses that are not masked.
    pub(crate) fn unmasked_rows(&self) -> f64 {
        self.masks.response.any_dim(1, false).sum(Kind::Double).double_value(&[])
    }

    /// Mean number of tokens of the responses that are not masked; NaN if all are.
    pub(crate) fn mean_unmasked_length(&self) -> f64 {
        self.masks.response.sum(Kind::Double).double_value(&[]) / self.unmasked_rows()
    }

    /// Total score of each row as a number, NaN where `unscored`.
    pub(crate) fn scored_totals(&self) -> Vec<f64> {
        self.clipped_totals(None)
    }

    /// [`Experience::scored_totals`] within the bounds `clip`, if there are any.
    pub(crate) fn clipped_totals(&self, clip: Option<[f64; 2]>) -> Vec<f64> {
        self.without_unscored(to_host(&math::within(&self.total_scores(), clip)))
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
        self.without_unscored(to_host(&rewards.sum_dim_intlist(1i64, false, Kind::Float)))
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
        let Masks { response, loss, value, value_loss, .. } = &mut self.masks;
        for mask in [response, loss, value, value_loss] {
            *mask = mask.index_fill(0, &index, 0);
        }
        self.clear_outside_masks();
    }

    /// Sets log-probabilities, values and KLs to 0 outside their masks.
    pub(crate) fn clear_outside_masks(&mut self) {
        for (x, mask) in [(&mut self.logprobs, &self.masks.response), (&mut self.values, &self.masks.value)] {
            *x = math::keep(x, mask);
        }
        for x in self.ref_logprobs.iter_mut().chain(&mut self.full_kl).chain(&mut self.sampling_logprobs) {
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
        let flat = on_device(&flat, self.masks.response.device());
        let left = to_slots(&flat, &lengths, self.width()).gt(0.5);
        let lost = self.masks.response.logical_and(&left.logical_not());
        let Masks { response, loss, value, value_loss, .. } = &mut self.masks;
        for mask in [response, loss, value, value_loss] {
            *mask = mask.logical_and(&lost.logical_not());
        }
        let last = |row: &Vec<bool>| row.iter().rposition(|&kept| kept).map_or(0, |at| at as i64 + 1);
        self.counted = kept.iter().zip(&self.counted).map(|(row, &counted)| last(row).min(counted)).collect();
        self.clear_outside_masks();
        if let Some(scores) = &mut self.token_scores {
            *scores = math::keep(scores, &self.masks.response);
        }
        Ok(())
    }
}

/// Some rows as the models take them: ragged, one number per token or value, row after row.
#[derive(Debug)]
pub(crate) struct RaggedRows {
    /// Prompt and response of each row, joined.
    pub(crate) sequences: Vec<Vec<i64>>,
    /// See [`Experience::token_span`].
    pub(crate) token_spans: Vec<Range<usize>>,
    /// See [`Experience::value_span`].
    pub(crate) value_spans: Vec<Range<usize>>,
    /// Number of tokens of each row's prompt.
    pub(crate) prompt_lens: Vec<usize>,
    /// See [`Experience::shared_lens`].
    shared_lens: Option<Vec<usize>>,
    /// See [`Experience::sets_of`].
    sets: Option<Vec<TokenSet>>,
}

impl RaggedRows {
    /// The positions `spans` of the sequences, for a model; first tokens that rows have in common are computed once.
    pub(crate) fn at<'b>(&'b self, spans: &'b [Range<usize>]) -> Batch<'b, Vec<i64>> {
        self.at_unshared(spans).sharing(self.shared_lens.as_deref())
    }

    /// [`RaggedRows::at`], with each sequence computed by itself.
    pub(crate) fn at_unshared<'b>(&'b self, spans: &'b [Range<usize>]) -> Batch<'b, Vec<i64>> {
        Batch::new(&self.sequences, spans).with_prompts(Some(&self.prompt_lens))
    }

    /// The tokens and the values, for a model with two heads.
    pub(crate) fn joint(&self) -> JointBatch<'_, Vec<i64>> {
        JointBatch {
            sequences: &self.sequences,
            token_spans: &self.token_spans,
            value_spans: &self.value_spans,
            prompt_lens: Some(&self.prompt_lens),
        }
    }

    /// The distributions that the tokens were sampled from.
    pub(crate) fn sampled(&self, temperature: f64) -> Sampled<'_> {
        Sampled { temperature, sets: self.sets.as_deref() }
    }
}

/// Scatters `numbers`, row after row, into the first `counts[b]` slots of each row: `[M]` to `[B, width]`; differentiable.
pub(crate) fn to_slots(numbers: &Tensor, counts: &[i64], width: i64) -> Tensor {
    let slots = on_device(&slots(0..counts.len(), counts, width), numbers.device());
    let rows = counts.len() as i64;
    Tensor::zeros([rows * width], (Kind::Float, numbers.device())).index_copy(0, &slots, numbers).view([rows, width])
}

/// Index of the first `counts[i]` slots of row `rows[i]` in a flattened `[B, width]` tensor, row after row.
fn slots(rows: impl IntoIterator<Item = usize>, counts: &[i64], width: i64) -> Vec<i64> {
    let first = |row| row as i64 * width;
    rows.into_iter().zip(counts).flat_map(|(row, &count)| first(row)..first(row) + count).collect()
}

/// The slots of some rows' tokens and values, row after row: they undo [`to_slots`] for these rows.
///
/// The indices come from the lengths, which the host has: a selection by a mask would wait for the device to count it.
#[derive(Debug)]
pub(crate) struct Slots {
    /// Index of each token in a flattened `[B, R]` tensor, `[M]` i64.
    tokens: Tensor,
    /// Index of each value in a flattened `[B, R]` tensor.
    values: Tensor,
    /// For each token, the index of its row among the rows, `[M]` i64.
    pub(crate) token_rows: Tensor,
}

impl Slots {
    /// The numbers of the tokens in `x` `[B, R]`: `[M]`.
    pub(crate) fn select_tokens(&self, x: &Tensor) -> Tensor {
        x.reshape([-1]).index_select(0, &self.tokens)
    }

    /// The numbers of the values in `x` `[B, R]`.
    pub(crate) fn select_values(&self, x: &Tensor) -> Tensor {
        x.reshape([-1]).index_select(0, &self.values)
    }
}

/// Number of tokens and of values of each row that are in the losses.
#[derive(Debug)]
pub(crate) struct LossCounts {
    tokens: Vec<i64>,
    values: Vec<i64>,
}

impl LossCounts {
    /// Number of tokens of `rows` in the policy loss.
    pub(crate) fn tokens(&self, rows: &[usize]) -> f64 {
        rows.iter().map(|&row| self.tokens[row]).sum::<i64>() as f64
    }

    /// Number of values of `rows` in the value loss.
    pub(crate) fn values(&self, rows: &[usize]) -> f64 {
        rows.iter().map(|&row| self.values[row]).sum::<i64>() as f64
    }

    /// Number of tokens of all rows in the policy loss.
    pub(crate) fn all_tokens(&self) -> f64 {
        self.tokens.iter().sum::<i64>() as f64
    }
}

/// Row numbers as an index tensor on the device of `like`.
pub(crate) fn row_index(rows: &[usize], like: &Tensor) -> Tensor {
    on_device(&rows.iter().map(|&row| row as i64).collect::<Vec<_>>(), like.device())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::rl::math::ScorePosition;
    use rlhf_base::rng::{Purpose, Stream};
    use tch::Device;

    /// An experience of responses of these lengths, in groups of `size` rows, with these scores, where NaN is no score; log-probabilities
    /// and values are 0, and there is a value for each token.
    pub(crate) fn experience(lengths: &[i64], size: usize, scores: &[f64]) -> Experience {
        let rows = lengths.len();
        let width = lengths.iter().copied().max().unwrap();
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
            sampled: lengths.to_vec(),
            masks: Masks { response: mask(), loss: mask(), value: value(), value_loss: value(), inserted: None },
            logprobs: zeros(),
            sampling_logprobs: None,
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

    #[test]
    fn slots_of_rows_are_those_that_a_mask_of_their_lengths_selects() {
        let mut stream = Stream::new(5, Purpose::Lengths, 0, 0);
        for rows in [1, 2, 9] {
            let mut lengths: Vec<i64> = (0..rows).map(|_| (stream.uniform() * 6.0) as i64).collect();
            lengths[rows / 2] = 0;
            lengths[0] = 5;
            let mut e = experience(&lengths, 1, &vec![0.0; rows]);
            e.value_counts = lengths.iter().map(|&length| (length + 1).min(5)).collect();
            let numbers = (Tensor::arange(5 * rows as i64, (Kind::Float, Device::Cpu)) * 0.7).view([rows as i64, 5]);
            let order: Vec<usize> = stream.permutation(rows).into_iter().chain([rows / 2, 0]).collect();
            for picked in [&order[..], &order[..rows - 1], &[rows / 2], &[]] {
                let slots = e.slots(picked);
                let by_mask = |x: &Tensor, counts: &[i64]| {
                    let counts: Vec<i64> = picked.iter().map(|&row| counts[row]).collect();
                    let mask = math::response_mask(&counts, 5, Device::Cpu);
                    x.index_select(0, &row_index(picked, x)).masked_select(&mask)
                };
                // Also from a view, whose memory has another order.
                for x in [&numbers, &numbers.tr().contiguous().tr(), &numbers.gt(7.0)] {
                    assert_eq!(slots.select_tokens(x), by_mask(x, &lengths));
                    assert_eq!(slots.select_values(x), by_mask(x, &e.value_counts));
                }
                let at =
                    Tensor::arange(picked.len() as i64, (Kind::Int64, Device::Cpu)).unsqueeze(1).expand([-1, 5], true);
                let lengths: Vec<i64> = picked.iter().map(|&row| lengths[row]).collect();
                assert_eq!(slots.token_rows, at.masked_select(&math::response_mask(&lengths, 5, Device::Cpu)));
            }
        }
    }

    #[test]
    fn counts_of_the_losses_are_those_of_the_masks() {
        let mut e = experience(&[3, 0, 2, 4], 2, &[0.0; 4]);
        e.masks.value_loss = math::response_mask(&[4, 1, 3, 4], 4, Device::Cpu);
        e.leave_out(&[vec![true, false, true], vec![], vec![true, true], vec![true; 4]]).unwrap();
        e.mask_rows(&[2]);
        let counts = e.loss_counts();
        // The masked token takes its value out of the loss too.
        assert_eq!([0, 1, 2, 3].map(|row| counts.tokens(&[row])), [2.0, 0.0, 0.0, 4.0]);
        assert_eq!([0, 1, 2, 3].map(|row| counts.values(&[row])), [3.0, 1.0, 0.0, 4.0]);
        assert_eq!((counts.tokens(&[3, 0, 3]), counts.values(&[]), counts.all_tokens()), (10.0, 0.0, 6.0));
    }
}
