//! A language model with a value head on its trunk, as TRL's legacy trainer has it.

use super::config::{ModelConfig, Shape};
use super::linear::Linear;
use super::params::{Builder, Init, Param, Source};
use super::{CausalLm, ModelOptions, Sampled, SequenceClassifier, Slices, TokenLogprobs};
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
    head: ValueHead,
}

/// A head that gives a value at every position of the language model that it was built on, whose parameters include its own.
#[derive(Debug)]
pub struct ValueHead {
    linear: Linear,
    fresh: bool,
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
        let (lm, linear) = CausalLm::build(config, Source::Checkpoint(&checkpoint), options, ignored, build)?;
        let fresh = matches!(init, ValueHeadInit::Fresh(_));
        Ok(Self { lm, head: ValueHead { linear, fresh } })
    }

    /// Puts a head on the trunk of `lm`, whose adapter, if it has one, is trained beside it.
    ///
    /// # Errors
    /// If `init` names a head that is not there, or is of another width: [`ValueHeadInit::Checkpoint`] is for folders.
    pub fn from_lm(mut lm: CausalLm, init: ValueHeadInit<'_>) -> Result<Self> {
        let fresh = match init {
            ValueHeadInit::Fresh(seed) => Some(seed),
            ValueHeadInit::Reward(_) => None,
            ValueHeadInit::Checkpoint => {
                return Err(Error::Run("a value head for a model in memory: expected a seed or a reward model".into()));
            }
        };
        let (names, shape) = (&lm.body.config.family.names, lm.body.config.clone());
        // A head is small, and trained whole beside an adapter: held in f32 whatever the rest is held in.
        let mut builder = Builder::new(Source::Fresh(fresh.unwrap_or(0)), names, lm.body.device, Some(Kind::Float));
        let linear = build_head(&mut builder, &shape, init)?;
        lm.body.params.extend(builder.finish(&[])?);
        Ok(Self { lm, head: ValueHead { linear, fresh: fresh.is_some() } })
    }

    /// `lm`, which was read from `dir`, with the head that the folder holds, or else one drawn from `seed`.
    ///
    /// # Errors
    /// If the head that is there is of another width.
    pub fn found_in(dir: &Path, lm: CausalLm, seed: u64) -> Result<Self> {
        let name = format!("{}.weight", HEADS[0]);
        // A folder with an adapter alone holds no model.
        let checkpoint = if dir.join("config.json").is_file() { Some(Checkpoint::open(dir)?) } else { None };
        let Some(checkpoint) = checkpoint.filter(|checkpoint| checkpoint.shape(&name).is_some()) else {
            return Self::from_lm(lm, ValueHeadInit::Fresh(seed));
        };
        let model = Self::from_lm(lm, ValueHeadInit::Fresh(seed))?;
        for param in model.lm.params().iter().filter(|param| param.name.starts_with(HEADS[1])) {
            let (expected, found) = (param.tensor.size(), checkpoint.shape(&param.name));
            if found.as_ref() != Some(&expected) {
                let message = format!("tensor `{}`: expected {expected:?}, found {found:?}", param.name);
                return Err(Error::invalid(dir, message));
            }
            let stored = checkpoint.read(&param.name, param.tensor.device(), param.tensor.kind())?;
            tch::no_grad(|| param.tensor.shallow_clone().copy_(&stored));
        }
        Ok(Self { head: ValueHead { fresh: false, ..model.head }, lm: model.lm })
    }

    /// The language model, whose parameters include the head's.
    pub fn lm(&self) -> &CausalLm {
        &self.lm
    }

    /// The value head.
    pub fn head(&self) -> &ValueHead {
        &self.head
    }

    /// The two apart.
    pub fn into_parts(self) -> (CausalLm, ValueHead) {
        (self.lm, self.head)
    }

    /// Whether gradients reach the weights.
    pub fn set_trainable(&mut self, trainable: bool) {
        self.lm.set_trainable(trainable);
    }

    /// [`ValueHead::values_at`].
    ///
    /// # Errors
    /// As that.
    pub fn values_at<S: AsRef<[i64]>>(&self, sequences: &[S], spans: &[Range<usize>]) -> Result<Tensor> {
        self.head.values_at(&self.lm, sequences, spans)
    }

    /// [`ValueHead::logprobs_and_values`].
    ///
    /// # Errors
    /// As that.
    pub fn logprobs_and_values<'a, S: AsRef<[i64]>>(
        &self,
        sequences: &[S],
        token_spans: &[Range<usize>],
        value_spans: &[Range<usize>],
        sampled: impl Into<Sampled<'a>>,
        with_entropy: bool,
    ) -> Result<(TokenLogprobs, Tensor)> {
        self.head.logprobs_and_values(&self.lm, sequences, token_spans, value_spans, sampled, with_entropy)
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

impl ValueHead {
    /// Whether the head was drawn when the model was read: its numbers mean nothing before training.
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// The values at the positions `spans` of each sequence, M in all, row after row: `[M]` f32. `lm` is the model that the
    /// head was built on.
    ///
    /// # Errors
    /// As [`CausalLm::logits`]; if a span is not within its sequence.
    pub fn values_at<S: AsRef<[i64]>>(&self, lm: &CausalLm, sequences: &[S], spans: &[Range<usize>]) -> Result<Tensor> {
        lm.body.check_spans(sequences, spans, 0)?;
        Ok(self.values_of(&lm.body.hidden_at(sequences, spans, 0)?))
    }

    /// [`CausalLm::token_logprobs`] of the tokens at `token_spans` and [`ValueHead::values_at`] of `value_spans`, from one
    /// pass through the trunk; errors as these two.
    pub fn logprobs_and_values<'a, S: AsRef<[i64]>>(
        &self,
        lm: &CausalLm,
        sequences: &[S],
        token_spans: &[Range<usize>],
        value_spans: &[Range<usize>],
        sampled: impl Into<Sampled<'a>>,
        with_entropy: bool,
    ) -> Result<(TokenLogprobs, Tensor)> {
        let body = &lm.body;
        body.check_spans(sequences, token_spans, 1)?;
        body.check_spans(sequences, value_spans, 0)?;
        let both = Both::new(token_spans, value_spans);
        let hidden = body.hidden_at(sequences, &both.spans, 0)?;
        let values = self.values_of(&both.at_values(&hidden));
        let (sampled, targets) = (sampled.into(), lm.targets(sequences, token_spans));
        sampled.check(targets.size()[0])?;
        Ok((lm.logprobs_of(&both.at_tokens(&hidden), &targets, sampled, with_entropy), values))
    }

    /// [`CausalLm::learn_logprobs`] and a loss of the values at `value_spans` in one pass through the trunk, forward and back:
    /// adds the gradients of the sum of both losses to those of the parameters. `value_loss` is a scalar made of the values.
    ///
    /// # Errors
    /// As [`CausalLm::learn_logprobs`] and [`ValueHead::values_at`].
    #[expect(clippy::too_many_arguments, reason = "the arguments of two functions of which this does both")]
    pub fn learn<'a, S: AsRef<[i64]>>(
        &self,
        lm: &CausalLm,
        sequences: &[S],
        token_spans: &[Range<usize>],
        value_spans: &[Range<usize>],
        sampled: impl Into<Sampled<'a>>,
        with_entropy: bool,
        policy_loss: impl FnMut(Range<i64>, &TokenLogprobs) -> Tensor,
        value_loss: impl FnOnce(&Tensor) -> Tensor,
    ) -> Result<TokenLogprobs> {
        lm.body.check_spans(sequences, token_spans, 1)?;
        lm.body.check_spans(sequences, value_spans, 0)?;
        let both = Both::new(token_spans, value_spans);
        let (sampled, targets) = (sampled.into(), lm.targets(sequences, token_spans));
        sampled.check(targets.size()[0])?;
        let mut found = None;
        lm.body.learn(sequences, &both.spans, 0, None, |hidden| {
            let read = both.at_values(hidden).detach().set_requires_grad(true);
            value_loss(&self.values_of(&read)).backward();
            let (logprobs, of_tokens) =
                lm.logprobs_gradient(&both.at_tokens(hidden), &targets, sampled, with_entropy, None, policy_loss);
            found = Some(logprobs);
            let at = |positions: &Tensor| positions.to_device(hidden.device());
            let gradient = hidden.zeros_like().index_add(0, &at(&both.values), &read.grad());
            Ok(Some(gradient.index_add(0, &at(&both.tokens), &of_tokens)))
        })?;
        Ok(found.unwrap_or_else(|| Slices::new(with_entropy, false).join(lm.device())))
    }

    fn values_of(&self, hidden: &Tensor) -> Tensor {
        self.linear.forward(hidden).squeeze_dim(1)
    }
}

/// What says what a state is worth.
#[derive(Debug)]
pub enum ValueModel {
    /// A model of its own.
    Model(Box<SequenceClassifier>),
    /// A head on the policy's trunk; its parameters are among the policy's.
    Head(ValueHead),
}

impl From<SequenceClassifier> for ValueModel {
    fn from(model: SequenceClassifier) -> Self {
        Self::Model(Box::new(model))
    }
}

impl From<ValueHead> for ValueModel {
    fn from(head: ValueHead) -> Self {
        Self::Head(head)
    }
}

impl ValueModel {
    /// The model, where it is one of its own.
    pub fn model(&self) -> Option<&SequenceClassifier> {
        match self {
            Self::Model(model) => Some(model),
            Self::Head(_) => None,
        }
    }

    /// [`ValueModel::model`], to change it.
    pub fn model_mut(&mut self) -> Option<&mut SequenceClassifier> {
        match self {
            Self::Model(model) => Some(model),
            Self::Head(_) => None,
        }
    }

    /// The parameters that are not the policy's.
    pub fn params(&self) -> &[Param] {
        self.model().map_or(&[], SequenceClassifier::params)
    }

    /// Whether its head was drawn when it was read: its numbers mean nothing before training.
    pub fn has_new_head(&self) -> bool {
        match self {
            Self::Model(model) => model.has_new_head(),
            Self::Head(head) => head.is_fresh(),
        }
    }

    /// The values at the positions `spans` of each sequence, M in all, row after row: `[M]` f32.
    ///
    /// # Errors
    /// As [`SequenceClassifier::values_at`] and [`ValueHead::values_at`].
    pub fn values_at<S: AsRef<[i64]>>(
        &self,
        policy: &CausalLm,
        sequences: &[S],
        spans: &[Range<usize>],
    ) -> Result<Tensor> {
        match self {
            Self::Model(model) => model.values_at(sequences, spans),
            Self::Head(head) => head.values_at(policy, sequences, spans),
        }
    }
}

/// Positions that two heads read, one of them where each token is predicted.
struct Both {
    /// What covers the positions of both in each sequence.
    spans: Vec<Range<usize>>,
    /// Where the positions before the tokens lie among all that are covered, `[M]` i64, on the processor.
    tokens: Tensor,
    /// Where those of the values lie.
    values: Tensor,
}

impl Both {
    fn new(token_spans: &[Range<usize>], value_spans: &[Range<usize>]) -> Self {
        let (mut spans, mut tokens, mut values) = (Vec::new(), Vec::new(), Vec::new());
        let mut before = 0;
        for (token, value) in token_spans.iter().zip(value_spans) {
            // Each token is predicted at the position before it.
            let parts = [token.start - 1..token.end - 1, value.clone()];
            let read = || parts.iter().filter(|part| !part.is_empty());
            let start = read().map(|part| part.start).min().unwrap_or(0);
            let end = read().map(|part| part.end).max().unwrap_or(start);
            for (part, at) in parts.iter().zip([&mut tokens, &mut values]) {
                at.extend(part.clone().map(|t| (before + t - start) as i64));
            }
            spans.push(start..end);
            before += end - start;
        }
        Self { spans, tokens: Tensor::from_slice(&tokens), values: Tensor::from_slice(&values) }
    }

    fn at_tokens(&self, hidden: &Tensor) -> Tensor {
        hidden.index_select(0, &self.tokens.to_device(hidden.device()))
    }

    fn at_values(&self, hidden: &Tensor) -> Tensor {
        hidden.index_select(0, &self.values.to_device(hidden.device()))
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
