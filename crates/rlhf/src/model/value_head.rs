//! A language model with a value head on its trunk, as TRL's legacy trainer has it.

use super::config::{ModelConfig, Shape};
use super::linear::Linear;
use super::params::{Builder, Init, Source};
use super::{CausalLm, ModelOptions, TokenLogprobs};
use crate::weights::Checkpoint;
use crate::{Error, Result};
use std::ops::Range;
use std::path::Path;
use tch::{Kind, Tensor};

/// Names of the value heads that are known: those of TRL's `AutoModelForCausalLMWithValueHead`, and DeepSpeed-Chat's, which
/// has no bias.
const HEADS: [&str; 2] = ["v_head.summary", "v_head"];

/// Where a value head comes from.
#[derive(Debug, Clone, Copy)]
pub enum ValueHeadInit<'a> {
    /// The folder of the language model, which must hold one.
    Checkpoint,
    /// Drawn from the seed, as torch draws a linear layer; a head in the folder is left out.
    Fresh(u64),
    /// The score head of the reward model in this folder, which must be as wide as the language model.
    Reward(&'a Path),
}

/// A language model whose hidden states a value head reads too: one trunk, two heads.
#[derive(Debug)]
pub struct CausalLmWithValueHead {
    lm: CausalLm,
    head: Linear,
}

impl CausalLmWithValueHead {
    /// Reads a model folder, and the value head from where `init` says; frozen until
    /// [`CausalLmWithValueHead::set_trainable`].
    ///
    /// # Errors
    /// As [`CausalLm::from_pretrained`]; if `init` names a head that is not there, or is of another width.
    pub fn from_pretrained(dir: &Path, init: ValueHeadInit<'_>, options: ModelOptions) -> Result<Self> {
        let config = ModelConfig::from_dir(dir)?;
        config.check_causal_lm(dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        let ignored: &[&str] = if let ValueHeadInit::Checkpoint = init { &[] } else { &["v_head."] };
        let build = |b: &mut Builder<'_>, shape: &Shape| build_head(b, shape, init);
        let (lm, head) = CausalLm::build(config, Source::Checkpoint(&checkpoint), options, ignored, build)?;
        Ok(Self { lm, head })
    }

    /// The language model, whose parameters include the head's.
    pub fn lm(&self) -> &CausalLm {
        &self.lm
    }

    /// Whether gradients reach the weights.
    pub fn set_trainable(&mut self, trainable: bool) {
        self.lm.set_trainable(trainable);
    }

    /// The values at the positions `spans` of each sequence, M in all, row after row: `[M]` f32.
    ///
    /// # Errors
    /// As [`CausalLm::logits`]; if a span is not within its sequence.
    pub fn values_at<S: AsRef<[i64]>>(&self, sequences: &[S], spans: &[Range<usize>]) -> Result<Tensor> {
        let body = &self.lm.body;
        body.check_spans(sequences, spans, 0)?;
        Ok(self.head.forward(&body.hidden_at(sequences, spans, 0)?).squeeze_dim(1))
    }

    /// [`CausalLm::token_logprobs`] of the tokens at `token_spans` and [`CausalLmWithValueHead::values_at`] of
    /// `value_spans`, from one pass through the trunk; errors as these two.
    pub fn logprobs_and_values<S: AsRef<[i64]>>(
        &self,
        sequences: &[S],
        token_spans: &[Range<usize>],
        value_spans: &[Range<usize>],
        temperature: f64,
        with_entropy: bool,
    ) -> Result<(TokenLogprobs, Tensor)> {
        let body = &self.lm.body;
        body.check_spans(sequences, token_spans, 1)?;
        body.check_spans(sequences, value_spans, 0)?;
        let (layout, hidden) = body.hidden(sequences)?;
        let at = |spans, shift| hidden.index_select(0, &body.rows_at(&layout, spans, shift));
        let values = self.head.forward(&at(value_spans, 0)).squeeze_dim(1);
        let targets = self.lm.targets(sequences, token_spans);
        Ok((self.lm.logprobs_of(&at(token_spans, -1), &targets, temperature, with_entropy), values))
    }

    /// Writes the language model with its value head in the same files, as TRL does; [`CausalLm::from_pretrained`] and
    /// transformers read the language model from there.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save_pretrained(&self, dir: &Path, eos: &[i64], pad: Option<i64>, max_shard_bytes: usize) -> Result<()> {
        self.lm.save_pretrained(dir, eos, pad, max_shard_bytes)
    }
}

fn build_head(b: &mut Builder<'_>, shape: &Shape, init: ValueHeadInit<'_>) -> Result<Linear> {
    let width = shape.embedding_size;
    let bound = (width as f64).sqrt().recip();
    let names = HEADS.map(|base| format!("{base}.weight"));
    let name = b.first_stored(&[&names[0], &names[1]]);
    let (weight, bias) = match init {
        ValueHeadInit::Checkpoint => {
            let weight = b.tensor(name.to_string(), &[1, width], Init::Zeros, true)?;
            let bias = format!("{}.bias", HEADS[0]);
            (weight, (name == names[0]).then(|| b.tensor(bias, &[1], Init::Zeros, false)).transpose()?)
        }
        // A head that begins where torch's would: uniform within the bound has the deviation of bound / sqrt(3).
        ValueHeadInit::Fresh(seed) => {
            let weight = b.new_head(names[0].clone(), &[1, width], seed, bound / 3f64.sqrt())?;
            (weight, Some(b.zeros(format!("{}.bias", HEADS[0]), &[1])?))
        }
        ValueHeadInit::Reward(dir) => {
            let reward = Checkpoint::open(dir)?;
            let stored = ["score.weight", "v_head.weight"].into_iter().find(|name| reward.shape(name).is_some());
            let Some(stored) = stored else {
                return Err(Error::invalid(dir, "expected a reward model with `score.weight`, found none"));
            };
            let found = reward.shape(stored).unwrap_or_default();
            if found != [1, width] {
                let message = format!("tensor `{stored}`: expected {:?}, found {found:?}", [1, width]);
                return Err(Error::invalid(dir, message));
            }
            let weight = b.given(names[0].clone(), |device, kind| reward.read(stored, device, kind))?;
            (weight, Some(b.zeros(format!("{}.bias", HEADS[0]), &[1])?))
        }
    };
    Ok(Linear::new(weight, bias, Kind::Float))
}
