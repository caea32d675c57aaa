//! The distribution that tokens were sampled from: with a temperature, and over a subset of the vocabulary if filters removed tokens.

use rlhf_base::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::sync::Arc;
use tch::{Device, Kind, Tensor};
use tch_ext::on_device;

/// The logit of an excluded token. Its softmax is exactly 0, as for -inf; but -inf times a probability of 0 would be NaN.
const IMPOSSIBLE: f64 = -1e30;

/// The set of tokens that one token was sampled from, after filters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenSet(Arc<Ids>);

impl Serialize for TokenSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for TokenSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ids::deserialize(deserializer).map(|ids| Self(Arc::new(ids)))
    }
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Ids {
    /// The ids of the tokens.
    Listed(Box<[i32]>),
    /// One bit per token of the vocabulary.
    Bits(Box<[u8]>),
}

impl TokenSet {
    /// Creates the set of tokens at which `kept`, with one entry per token of the vocabulary, is true.
    pub fn new(kept: &[bool]) -> Self {
        let ids: Vec<i32> = (0..).zip(kept).filter_map(|(id, kept)| kept.then_some(id)).collect();
        // A listed token takes 32 bits.
        Self(Arc::new(if ids.len() * 32 <= kept.len() {
            Ids::Listed(ids.into())
        } else {
            let byte = |bits: &[bool]| bits.iter().rev().fold(0, |byte, &bit| byte << 1 | u8::from(bit));
            Ids::Bits(kept.chunks(8).map(byte).collect())
        }))
    }

    /// Creates the set of one token.
    pub fn only(id: i64) -> Self {
        Self(Arc::new(Ids::Listed(Box::new([id as i32]))))
    }

    /// The ids of the tokens, in ascending order.
    pub fn ids(&self) -> Vec<i64> {
        match &*self.0 {
            Ids::Listed(ids) => ids.iter().map(|&id| id.into()).collect(),
            Ids::Bits(bytes) => {
                let bits = bytes.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1));
                (0..).zip(bits).filter_map(|(id, kept)| kept.then_some(id)).collect()
            }
        }
    }
}

/// The distribution that tokens were sampled from: softmax(logits / temperature) over the whole vocabulary, or over a set of
/// tokens for each.
#[derive(Debug, Clone, Copy)]
pub struct Sampled<'a> {
    /// Divides the logits.
    pub temperature: f64,
    /// The set that each of the M tokens was sampled from, row after row; `None`: the whole vocabulary.
    pub sets: Option<&'a [TokenSet]>,
}

impl From<f64> for Sampled<'_> {
    /// The distribution at this temperature over the whole vocabulary.
    fn from(temperature: f64) -> Self {
        Self { temperature, sets: None }
    }
}

impl Sampled<'_> {
    /// Checks that there are no sets, or one for each of `tokens` tokens.
    pub(super) fn check(&self, tokens: i64) -> Result<()> {
        match self.sets {
            Some(sets) if sets.len() as i64 != tokens => Err(Error::Run(format!(
                "log-probabilities: expected the set that each of {tokens} tokens was sampled from, found {} sets",
                sets.len()
            ))),
            _ => Ok(()),
        }
    }

    /// The tokens that could not be sampled at the tokens `from..from + count`, `[count, vocab]` bool; `None` without sets.
    pub(super) fn excluded(&self, from: i64, count: i64, vocab: i64, device: Device) -> Option<Tensor> {
        let sets = &self.sets?[from as usize..(from + count) as usize];
        let places = (0i64..)
            .zip(sets)
            .flat_map(|(row, set)| set.ids().into_iter().filter(move |&id| id < vocab).map(move |id| row * vocab + id));
        let places = on_device(&places.collect::<Vec<i64>>(), device);
        let excluded = Tensor::ones([count * vocab], (Kind::Bool, device));
        Some(excluded.index_fill(0, &places, 0).view([count, vocab]))
    }
}

/// `logits` `[count, vocab]` f32 with the `excluded` tokens at a probability of 0.
pub(super) fn restricted(logits: &Tensor, excluded: Option<&Tensor>) -> Tensor {
    excluded.map_or_else(|| logits.shallow_clone(), |excluded| logits.masked_fill(excluded, IMPOSSIBLE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_gives_back_its_tokens_however_many_they_are() {
        for step in [1, 2, 7, 64, 1000] {
            let kept: Vec<bool> = (0..1001).map(|id| id % step == 0).collect();
            let ids: Vec<i64> = (0..1001).filter(|id| id % step == 0).map(i64::from).collect();
            assert_eq!(TokenSet::new(&kept).ids(), ids);
        }
    }

    #[test]
    fn an_excluded_token_has_no_probability_no_entropy_and_no_gradient() {
        let sets = [TokenSet::new(&[true, false, true]), TokenSet::new(&[false, true, false])];
        let sampled = Sampled { temperature: 1.0, sets: Some(&sets) };
        let excluded = sampled.excluded(0, 2, 3, Device::Cpu);
        let logits = Tensor::from_slice(&[1.0f32, 5.0, 2.0, 0.0, 1.0, 2.0]).view([2, 3]).set_requires_grad(true);
        let logprobs = restricted(&logits, excluded.as_ref()).log_softmax(-1, Kind::Float);
        let entropy = -(logprobs.exp() * &logprobs).sum_dim_intlist(-1, false, Kind::Float);
        let p = 1.0 / (1.0 + 1f64.exp()); // e / (e + e^2)
        assert!((logprobs.double_value(&[0, 0]) - p.ln()).abs() < 1e-6);
        assert!((entropy.double_value(&[0]) + p * p.ln() + (1.0 - p) * (1.0 - p).ln()).abs() < 1e-6);
        assert_eq!((logprobs.double_value(&[1, 1]), entropy.double_value(&[1])), (0.0, 0.0));
        logprobs.get(0).get(0).backward();
        let gradient = Vec::<f32>::try_from(logits.grad().get(0)).unwrap();
        let expected = [1.0 - p, 0.0, p - 1.0];
        assert!(gradient.iter().zip(expected).all(|(x, y)| (f64::from(*x) - y).abs() < 1e-6), "{gradient:?}");
        assert!(sampled.check(2).is_ok() && sampled.check(3).is_err());
    }
}
