//! A language model with a value head on its trunk, as in TRL's legacy trainer.

use super::AdapterFolder;
use super::adapter_folder::{open_weights, stored_name};
use super::batch::{Batch, JointBatch, JointSpans};
use super::config::ModelConfig;
use super::linear::Linear;
use super::logprobs::{LogprobOptions, Targets, TokenLogprobs};
use super::params::{Builder, Init, Param, Source};
use super::shape::Shape;
use super::{CausalLm, ModelOptions, Sampled, SequenceClassifier};
use rlhf_base::weights::Checkpoint;
use rlhf_base::{Error, Result};
use std::ops::Range;
use std::path::Path;
use tch::{Kind, Tensor};

/// Names of known value heads: TRL's `AutoModelForCausalLMWithValueHead`, and DeepSpeed-Chat's, which has no bias.
const HEADS: [&str; 2] = ["v_head.summary", "v_head"];

/// Maps a parameter's name to the name of its tensor in a file.
type StoredName = fn(&str) -> String;

/// Source of a value head.
#[derive(Debug, Clone, Copy)]
pub enum ValueHeadInit<'a> {
    /// The folder of the language model, which must contain a value head.
    Checkpoint,
    /// Initialized from the seed as torch initializes a linear layer; a head in the folder is ignored.
    Fresh(u64),
    /// The score head of the reward model in this folder, whose hidden size must be that of the language model.
    Reward(&'a Path),
}

/// A language model with a value head on its trunk: one trunk, two heads.
#[derive(Debug)]
pub struct CausalLmWithValueHead {
    lm: CausalLm,
    head: ValueHead,
}

/// A value head on the trunk of a language model, whose parameters include the head's.
#[derive(Debug)]
pub struct ValueHead {
    linear: Linear,
    fresh: bool,
}

impl CausalLmWithValueHead {
    /// Loads a model folder, and the value head from `init`. The model is frozen until
    /// [`CausalLmWithValueHead::set_trainable`].
    ///
    /// # Errors
    /// As [`CausalLm::from_pretrained`]; if the head of `init` is missing or of another width.
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

    /// Adds a value head to the trunk of `lm`. An adapter of `lm` stays trainable beside it.
    ///
    /// # Errors
    /// If the head of `init` is missing or of another width; for [`ValueHeadInit::Checkpoint`], which needs a folder.
    pub fn from_lm(mut lm: CausalLm, init: ValueHeadInit<'_>) -> Result<Self> {
        let fresh = match init {
            ValueHeadInit::Fresh(seed) => Some(seed),
            ValueHeadInit::Reward(_) => None,
            ValueHeadInit::Checkpoint => {
                return Err(Error::Run("a value head for a model in memory: expected a seed or a reward model".into()));
            }
        };
        let (names, shape) = (&lm.body.config.family.names, lm.body.config.clone());
        // A head is small and is trained in full beside an adapter, so it is always held in f32.
        let mut builder = Builder::new(Source::Fresh(fresh.unwrap_or(0)), names, lm.body.device, Some(Kind::Float));
        let linear = build_head(&mut builder, &shape, init)?;
        lm.body.params.extend(builder.finish(&[])?);
        Ok(Self { lm, head: ValueHead { linear, fresh: fresh.is_some() } })
    }

    /// Adds a value head to `lm`, which was loaded from `dir`: the head that `dir` contains with its model or adapter, or else one drawn from
    /// `seed`.
    ///
    /// # Errors
    /// If the stored head is of another width.
    pub fn found_in(dir: &Path, lm: CausalLm, seed: u64) -> Result<Self> {
        let model = Self::from_lm(lm, ValueHeadInit::Fresh(seed))?;
        let Some((checkpoint, stored_name)) = Self::stored(dir)? else { return Ok(model) };
        for param in model.lm.params().iter().filter(|param| param.name.starts_with(HEADS[1])) {
            let name = stored_name(&param.name);
            let (expected, found) = (param.tensor.size(), checkpoint.shape(&name));
            if found.as_ref() != Some(&expected) {
                let message = format!("tensor `{name}`: expected {expected:?}, found {found:?}");
                return Err(Error::invalid(dir, message));
            }
            let stored = checkpoint.read(&name, param.tensor.device(), param.tensor.kind())?;
            tch::no_grad(|| param.tensor.shallow_clone().copy_(&stored));
        }
        Ok(Self { head: ValueHead { fresh: false, ..model.head }, lm: model.lm })
    }

    /// Opens the file in `dir` that has a value head; also returns how the file names the tensors.
    fn stored(dir: &Path) -> Result<Option<(Checkpoint, StoredName)>> {
        let name = format!("{}.weight", HEADS[0]);
        let has_head = |checkpoint: &Checkpoint, stored: StoredName| checkpoint.shape(&stored(&name)).is_some();
        // A folder with only an adapter contains no model.
        if dir.join("config.json").is_file() {
            let checkpoint = Checkpoint::open(dir)?;
            if has_head(&checkpoint, str::to_string) {
                return Ok(Some((checkpoint, str::to_string)));
            }
        }
        if AdapterFolder::find(dir)?.is_none() {
            return Ok(None);
        }
        let checkpoint = open_weights(dir)?;
        Ok(has_head(&checkpoint, stored_name).then_some((checkpoint, stored_name)))
    }

    /// The language model, whose parameters include the head's.
    pub fn lm(&self) -> &CausalLm {
        &self.lm
    }

    /// The value head.
    pub fn head(&self) -> &ValueHead {
        &self.head
    }

    /// The language model and the value head.
    pub fn into_parts(self) -> (CausalLm, ValueHead) {
        (self.lm, self.head)
    }

    /// Sets whether the weights require gradients.
    pub fn set_trainable(&mut self, trainable: bool) {
        self.lm.set_trainable(trainable);
    }

    /// [`ValueHead::values_at`]; errors as that.
    pub fn values_at<S: AsRef<[i64]>>(&self, sequences: &[S], spans: &[Range<usize>]) -> Result<Tensor> {
        self.head.values_at(&self.lm, sequences, spans)
    }

    /// [`ValueHead::logprobs_and_values`]; errors as that.
    pub fn logprobs_and_values<'a, S: AsRef<[i64]>>(
        &self,
        batch: JointBatch<'_, S>,
        sampled: impl Into<Sampled<'a>>,
        with_entropy: bool,
    ) -> Result<(TokenLogprobs, Tensor)> {
        self.head.logprobs_and_values(&self.lm, batch, sampled, with_entropy)
    }

    /// Writes the language model and its value head to the same files, as TRL does. [`CausalLm::from_pretrained`] and
    /// transformers can load the language model from there.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save_pretrained(&self, dir: &Path, eos: &[i64], pad: Option<i64>, max_shard_bytes: usize) -> Result<()> {
        self.lm.save_pretrained(dir, eos, pad, max_shard_bytes)
    }
}

impl ValueHead {
    /// Whether the head was newly initialized, so that its values mean nothing before training.
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// Values at the positions `spans` of each sequence, M in all, row after row: `[M]` f32. `lm` is the model that the
    /// head was built on.
    ///
    /// # Errors
    /// As [`CausalLm::logits`]; if a span is not within its sequence.
    pub fn values_at<S: AsRef<[i64]>>(&self, lm: &CausalLm, sequences: &[S], spans: &[Range<usize>]) -> Result<Tensor> {
        self.values(lm, Batch::new(sequences, spans))
    }

    fn values<S: AsRef<[i64]>>(&self, lm: &CausalLm, batch: Batch<'_, S>) -> Result<Tensor> {
        lm.body.check_spans(batch, 0)?;
        Ok(self.forward(&lm.hidden_at(batch, 0)?.states))
    }

    /// [`CausalLm::token_logprobs`] of the batch's tokens and [`ValueHead::values_at`] of its value positions, from one
    /// forward pass through the trunk; errors as these two.
    pub fn logprobs_and_values<'a, S: AsRef<[i64]>>(
        &self,
        lm: &CausalLm,
        batch: JointBatch<'_, S>,
        sampled: impl Into<Sampled<'a>>,
        with_entropy: bool,
    ) -> Result<(TokenLogprobs, Tensor)> {
        let options = LogprobOptions { entropy: with_entropy, ..sampled.into().into() };
        let (joint, targets) = Self::joint(lm, batch, options)?;
        let hidden = lm.hidden_at(Batch::new(batch.sequences, &joint.spans).with_prompts(batch.prompt_lens), 0)?;
        let values = self.forward(&hidden.states.index_select(0, &joint.values));
        Ok((lm.head.token_logprobs(&hidden.states.index_select(0, &joint.tokens), &targets), values))
    }

    /// Forward and backward pass of the sum of two losses, in one pass through the trunk; accumulates gradients. `policy_loss` is
    /// the loss of [`CausalLm::logprobs_backward`]; `value_loss` returns a scalar computed from the values.
    ///
    /// # Errors
    /// As [`CausalLm::logprobs_backward`] and [`ValueHead::values_at`].
    pub fn backward<'a, S: AsRef<[i64]>>(
        &self,
        lm: &CausalLm,
        batch: JointBatch<'_, S>,
        options: impl Into<LogprobOptions<'a>>,
        policy_loss: impl FnMut(Range<i64>, &TokenLogprobs) -> Tensor,
        value_loss: impl FnOnce(&Tensor) -> Tensor,
    ) -> Result<TokenLogprobs> {
        let (joint, targets) = Self::joint(lm, batch, options.into())?;
        let JointSpans { spans, tokens, values } = &joint;
        let mut results = None;
        let rows = Batch::new(batch.sequences, spans).with_prompts(batch.prompt_lens);
        lm.body.backward(rows, 0, Some(&lm.head.linear), |hidden| {
            let read = hidden.index_select(0, values).detach().set_requires_grad(true);
            value_loss(&self.forward(&read)).backward();
            let (logprobs, token_gradient) =
                lm.head.logprobs_gradient(&hidden.index_select(0, tokens), &targets, policy_loss);
            results = Some(logprobs);
            hidden.zeros_like().index_add(0, values, &read.grad()).index_add(0, tokens, &token_gradient)
        })?;
        Ok(results.unwrap_or_else(|| targets.none()))
    }

    fn joint<'a, S: AsRef<[i64]>>(
        lm: &CausalLm,
        batch: JointBatch<'_, S>,
        options: LogprobOptions<'a>,
    ) -> Result<(JointSpans, Targets<'a>)> {
        let rows = |spans| Batch::new(batch.sequences, spans).with_prompts(batch.prompt_lens);
        lm.body.check_spans(rows(batch.token_spans), 1)?;
        lm.body.check_spans(rows(batch.value_spans), 0)?;
        let targets = Targets::new(&lm.head, batch.sequences, batch.token_spans, options)?;
        Ok((JointSpans::new(&batch, lm.device()), targets))
    }

    fn forward(&self, hidden: &Tensor) -> Tensor {
        self.linear.forward(hidden).squeeze_dim(1)
    }
}

/// The critic: a separate model, or a head on the policy.
#[derive(Debug)]
pub enum ValueModel {
    /// A separate model.
    Model(Box<SequenceClassifier>),
    /// A head on the policy's trunk; its parameters are among the policy's.
    Head(ValueHead),
    /// No critic: the advantages need no values.
    None,
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
    /// The critic's model, if it is a separate one.
    pub fn model(&self) -> Option<&SequenceClassifier> {
        match self {
            Self::Model(model) => Some(model),
            Self::Head(_) | Self::None => None,
        }
    }

    /// The critic's model, mutable, if it is a separate one.
    pub fn model_mut(&mut self) -> Option<&mut SequenceClassifier> {
        match self {
            Self::Model(model) => Some(model),
            Self::Head(_) | Self::None => None,
        }
    }

    /// The critic's parameters that are not the policy's.
    pub fn params(&self) -> &[Param] {
        self.model().map_or(&[], SequenceClassifier::params)
    }

    /// Whether its head was newly initialized, so that its values mean nothing before training.
    pub fn has_new_head(&self) -> bool {
        match self {
            Self::Model(model) => model.has_new_head(),
            Self::Head(head) => head.is_fresh(),
            Self::None => false,
        }
    }

    /// Values at the positions of the batch's spans, M in all, row after row: `[M]` f32; 0 without a critic.
    ///
    /// # Errors
    /// As [`SequenceClassifier::values_at`] and [`ValueHead::values_at`].
    pub fn values_of<S: AsRef<[i64]>>(&self, policy: &CausalLm, batch: Batch<'_, S>) -> Result<Tensor> {
        match self {
            Self::Model(model) => model.values(batch),
            Self::Head(head) => head.values(policy, batch),
            Self::None => {
                let values: usize = batch.spans.iter().map(Range::len).sum();
                Ok(Tensor::zeros([values as i64], (Kind::Float, policy.device())))
            }
        }
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
        // As torch initializes it: a uniform distribution within the bound has a deviation of bound / sqrt(3).
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
            let weight = b.read_with(names[0].clone(), |device, kind| reward.read(stored, device, kind))?;
            (weight, Some(b.zeros(format!("{}.bias", HEADS[0]), &[1])?))
        }
    };
    Ok(Linear::new(weight, bias, Kind::Float))
}
