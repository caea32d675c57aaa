//! Decoder language models and sequence classifiers: Hugging Face folders in and out, ragged sequences in, no padding seen.
//!
//! Nothing here knows of reinforcement learning. Dropout is never applied: PPO compares the same tokens' probabilities
//! before and after an update, and noise between the two passes would pass for a change of the policy.

mod config;
mod decoder;
mod layout;
mod params;

pub(crate) use config::no_such_file;
pub use config::{Activation, Family, ModelConfig, Rope, Shape};
pub(crate) use layout::KvCache;
pub use params::Param;

use crate::weights::{self, Checkpoint};
use crate::{Error, Result};
use decoder::{Decoder, Linear};
use layout::Layout;
use params::{Builder, Init, Source};
use std::ops::Range;
use std::path::Path;
use tch::{Device, Kind, Tensor};

/// Shards of a saved checkpoint hold at most this many bytes, as transformers' do by default.
const MAX_SHARD_BYTES: usize = 50_000_000_000;

/// The most logits that are held at once where no gradient is needed, in elements (64 MiB of f32).
const LOGITS_CHUNK: i64 = 1 << 24;

/// In what arithmetic a model computes; its weights, their gradients and its results are f32 in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// f32 throughout.
    #[default]
    F32,
    /// bf16 matrix products and attention, f32 residual stream, norms, log-probabilities and weights.
    Bf16,
}

impl Precision {
    fn kind(self) -> Kind {
        match self {
            Precision::F32 => Kind::Float,
            Precision::Bf16 => Kind::BFloat16,
        }
    }
}

/// How a model is put into memory.
#[derive(Debug, Clone, Copy)]
pub struct ModelOptions {
    /// Where it lives.
    pub device: Device,
    /// How it computes.
    pub precision: Precision,
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self { device: Device::Cpu, precision: Precision::F32 }
    }
}

/// What both kinds of model share: the decoder, its parameters, its configuration.
#[derive(Debug)]
struct Body {
    decoder: Decoder,
    params: Vec<Param>,
    config: ModelConfig,
    device: Device,
}

impl Body {
    fn set_trainable(&mut self, trainable: bool) {
        for param in &mut self.params {
            let _ = param.tensor.requires_grad_(trainable);
        }
    }

    fn save(&self, dir: &Path, config: &ModelConfig) -> Result<()> {
        std::fs::create_dir_all(dir).map_err(Error::io("create the folder", dir))?;
        let tensors: Vec<_> = self.params.iter().map(|p| (p.name.clone(), p.tensor.shallow_clone())).collect();
        weights::save(dir, &tensors, MAX_SHARD_BYTES)?;
        config.save(dir)?;
        Ok(())
    }

    /// Checks what a user can get wrong, so that libtorch need not fail on it.
    fn check<S: AsRef<[i64]>>(&self, sequences: &[S]) -> Result<()> {
        let (vocab, most) = (self.config.vocab_size, self.config.max_position_embeddings);
        for (row, sequence) in sequences.iter().enumerate() {
            let sequence = sequence.as_ref();
            if sequence.is_empty() || sequence.len() > most {
                let found = sequence.len();
                return Err(Error::Run(format!("sequence {row}: expected 1 to {most} tokens, found {found}")));
            }
            if let Some(id) = sequence.iter().find(|id| !(0..vocab).contains(*id)) {
                let message = format!("sequence {row}: token id {id} is outside the model's vocabulary of {vocab}");
                return Err(Error::Run(message));
            }
        }
        Ok(())
    }

    /// Checks that each sequence has one span, within it and not before `first`.
    fn check_spans<S: AsRef<[i64]>>(&self, sequences: &[S], spans: &[Range<usize>], first: usize) -> Result<()> {
        if spans.len() != sequences.len() {
            return Err(Error::Run(format!(
                "expected {} spans, one per sequence, found {}",
                sequences.len(),
                spans.len()
            )));
        }
        for (row, (sequence, span)) in sequences.iter().zip(spans).enumerate() {
            let len = sequence.as_ref().len();
            if span.start < first || span.start > span.end || span.end > len {
                return Err(Error::Run(format!(
                    "sequence {row}: expected a span within {first}..{len}, found {span:?}"
                )));
            }
        }
        Ok(())
    }

    fn hidden<S: AsRef<[i64]>>(&self, sequences: &[S]) -> Result<(Layout, Tensor)> {
        self.check(sequences)?;
        let layout = Layout::new(sequences, self.device);
        let hidden = self.decoder.forward(&layout, None);
        Ok((layout, hidden))
    }
}

/// A language model: a decoder and a head over its vocabulary.
#[derive(Debug)]
pub struct CausalLm {
    body: Body,
    lm_head: Linear,
}

/// What [`CausalLm::token_logprobs`] gives: one number per asked token, M in all, row after row.
#[derive(Debug)]
pub struct TokenLogprobs {
    /// Log-probability of each token given those before it, `[M]` f32; differentiable.
    pub logprobs: Tensor,
    /// Entropy in nats of the distribution each token was drawn from, `[M]` f32; detached.
    pub entropy: Option<Tensor>,
}

impl CausalLm {
    /// Reads a model folder: `config.json` and safetensors; frozen until [`CausalLm::set_trainable`].
    ///
    /// # Errors
    /// If the folder, the configuration or a tensor is not what it should be; all tensors at fault come in one error.
    pub fn from_pretrained(dir: &Path, options: ModelOptions) -> Result<Self> {
        let config = ModelConfig::from_dir(dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        // Some tied checkpoints hold the head too; it is the embedding again.
        let ignored = if config.tie_word_embeddings { vec![config.family.names().lm_head] } else { vec![] };
        Self::build(config, Source::Checkpoint(&checkpoint), &ignored, options)
    }

    /// A model of `config`'s shape with weights drawn from `seed` as transformers would draw them.
    ///
    /// # Errors
    /// If libtorch cannot allocate them.
    pub fn from_config(config: ModelConfig, seed: u64, options: ModelOptions) -> Result<Self> {
        Self::build(config, Source::Fresh(seed), &[], options)
    }

    fn build(config: ModelConfig, source: Source<'_>, ignored: &[&str], options: ModelOptions) -> Result<Self> {
        let names = config.family.names();
        let compute = options.precision.kind();
        let mut builder = Builder::new(source, names, options.device);
        let decoder = Decoder::new(&config, &mut builder, compute)?;
        let head = if config.tie_word_embeddings {
            decoder.embedding()
        } else {
            let shape = [config.vocab_size, config.hidden_size];
            builder.tensor(names.lm_head.into(), &shape, Init::Normal(config.initializer_range), true)?
        };
        let params = builder.finish(ignored)?;
        let body = Body { decoder, params, config, device: options.device };
        Ok(Self { body, lm_head: Linear::new(head, None, compute) })
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.body.config
    }

    /// How the model computes.
    pub fn precision(&self) -> Precision {
        if self.body.decoder.compute == Kind::Float { Precision::F32 } else { Precision::Bf16 }
    }

    /// Where the model lives.
    pub fn device(&self) -> Device {
        self.body.device
    }

    /// The parameters, in the order of the model.
    pub fn params(&self) -> &[Param] {
        &self.body.params
    }

    /// Whether gradients reach the weights.
    pub fn set_trainable(&mut self, trainable: bool) {
        self.body.set_trainable(trainable);
    }

    /// Logits of every position, one `[length, vocab]` f32 tensor per sequence. For small things: all are in memory.
    ///
    /// # Errors
    /// If a sequence is empty, too long, or holds an id outside the vocabulary.
    pub fn logits<S: AsRef<[i64]>>(&self, sequences: &[S]) -> Result<Vec<Tensor>> {
        let (layout, hidden) = self.body.hidden(sequences)?;
        Ok(self.lm_head.forward(&hidden).split_with_sizes(&layout.lens, 0))
    }

    /// Hidden states after the final norm, one `[length, hidden]` f32 tensor per sequence; errors as [`CausalLm::logits`].
    pub fn hidden_states<S: AsRef<[i64]>>(&self, sequences: &[S]) -> Result<Vec<Tensor>> {
        let (layout, hidden) = self.body.hidden(sequences)?;
        Ok(hidden.split_with_sizes(&layout.lens, 0))
    }

    /// Log-probabilities, under softmax(logits / `temperature`), of the tokens at `spans` of each sequence.
    ///
    /// A span may be empty and may not begin at 0: nothing comes before the first token. With M tokens in all spans, the
    /// results are `[M]`. The head is applied to these tokens only.
    ///
    /// # Errors
    /// As [`CausalLm::logits`]; if a span is not within its sequence.
    pub fn token_logprobs<S: AsRef<[i64]>>(
        &self,
        sequences: &[S],
        spans: &[Range<usize>],
        temperature: f64,
        with_entropy: bool,
    ) -> Result<TokenLogprobs> {
        self.body.check_spans(sequences, spans, 1)?;
        let (layout, hidden) = self.body.hidden(sequences)?;
        let mut rows = Vec::new();
        let mut targets = Vec::new();
        for ((sequence, span), &start) in sequences.iter().zip(spans).zip(&layout.starts) {
            rows.extend(span.clone().map(|t| start + t as i64 - 1));
            targets.extend_from_slice(&sequence.as_ref()[span.clone()]);
        }
        let on_device = |ids: &[i64]| Tensor::from_slice(ids).to_device(self.body.device);
        let hidden = hidden.index_select(0, &on_device(&rows));
        let targets = on_device(&targets).unsqueeze(1);
        let (mut logprobs, mut entropy) = (Vec::new(), Vec::new());
        // In slices, so that without gradients only one slice's logits exist at a time.
        let slice = (LOGITS_CHUNK / self.body.config.vocab_size).max(1);
        for from in (0..rows.len() as i64).step_by(slice as usize) {
            let len = slice.min(rows.len() as i64 - from);
            let logits = self.lm_head.forward(&hidden.narrow(0, from, len)) / temperature;
            let all = logits.log_softmax(-1, Kind::Float);
            drop(logits);
            logprobs.push(all.gather(1, &targets.narrow(0, from, len), false).squeeze_dim(1));
            if with_entropy {
                entropy.push(entropy_of(&all.detach()));
            }
        }
        let join = |parts: Vec<Tensor>| match parts.len() {
            0 => Tensor::zeros([0], (Kind::Float, self.body.device)),
            _ => Tensor::cat(&parts, 0),
        };
        Ok(TokenLogprobs { logprobs: join(logprobs), entropy: with_entropy.then(|| join(entropy)) })
    }

    /// Begins to decode: reads the prompts into a cache with room for `capacity` tokens per row.
    ///
    /// Gives the cache and the logits of each row's next token, `[rows, vocab]` f32.
    pub(crate) fn prefill<S: AsRef<[i64]>>(&self, prompts: &[S], capacity: usize) -> Result<(KvCache, Tensor)> {
        self.body.check(prompts)?;
        let layout = Layout::new(prompts, self.body.device);
        let mut cache = self.body.decoder.new_cache(prompts.len(), capacity)?;
        let hidden = self.body.decoder.forward(&layout, Some(&mut cache));
        let last: Vec<i64> = layout.starts.iter().zip(&layout.lens).map(|(start, len)| start + len - 1).collect();
        let last = Tensor::from_slice(&last).to_device(self.body.device);
        Ok((cache, self.lm_head.forward(&hidden.index_select(0, &last))))
    }

    /// Appends one token to every row of the cache; gives the logits of the next, `[rows, vocab]` f32.
    pub(crate) fn decode(&self, tokens: &[i64], cache: &mut KvCache) -> Tensor {
        let tokens = Tensor::from_slice(tokens).to_device(self.body.device);
        self.lm_head.forward(&self.body.decoder.forward_step(&tokens, cache))
    }

    /// Writes `config.json`, `generation_config.json` and the weights below `dir`; transformers reads them.
    ///
    /// `eos`, the one to append first, and `pad` are noted where they are given; all of `eos` end what is generated.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save_pretrained(&self, dir: &Path, eos: &[i64], pad: Option<i64>) -> Result<()> {
        let config = self.body.config.for_causal_lm(eos.first().copied(), pad);
        self.body.save(dir, &config)?;
        let mut generation = serde_json::Map::from_iter([("_from_model_config".into(), true.into())]);
        let eos = if eos.is_empty() { config.eos_token_ids.as_slice() } else { eos };
        if !eos.is_empty() {
            let ids = match eos {
                [only] => serde_json::json!(only),
                several => serde_json::json!(several),
            };
            generation.insert("eos_token_id".into(), ids);
        }
        generation.extend(pad.map(|pad| ("pad_token_id".into(), pad.into())));
        weights::write_text(&dir.join("generation_config.json"), &weights::pretty(&generation.into()))
    }
}

/// Entropy in nats of each row of log-probabilities, [M, vocab] to `[M]`.
fn entropy_of(logprobs: &Tensor) -> Tensor {
    // As a product of a row and a column: no third tensor of this size comes to be.
    -logprobs.exp().unsqueeze(1).bmm(&logprobs.unsqueeze(2)).view([-1])
}

/// A decoder with one number per position: a reward model or a value model.
#[derive(Debug)]
pub struct SequenceClassifier {
    body: Body,
    score: Linear,
    new_head: bool,
}

impl SequenceClassifier {
    /// Reads a folder that holds a sequence classifier with one label; frozen until
    /// [`SequenceClassifier::set_trainable`].
    ///
    /// With `new_head: Some(seed)` the folder may hold a language model: its body is read, the score head is drawn.
    ///
    /// # Errors
    /// As [`CausalLm::from_pretrained`]; a language model without `new_head` is an error that says so.
    pub fn from_pretrained(dir: &Path, new_head: Option<u64>, options: ModelOptions) -> Result<Self> {
        let config = ModelConfig::from_dir(dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        let names = config.family.names();
        // A folder that has a head keeps it: `new_head` is for those that have none.
        let new_head = new_head.filter(|_| checkpoint.shape("score.weight").is_none());
        let ignored = if new_head.is_some() { vec![names.lm_head] } else { vec![] };
        let compute = options.precision.kind();
        let mut builder = Builder::new(Source::Checkpoint(&checkpoint), names, options.device);
        let decoder = Decoder::new(&config, &mut builder, compute)?;
        let (name, shape) = ("score.weight".to_string(), [1, config.hidden_size]);
        let score = match new_head {
            Some(seed) => builder.new_head(name, &shape, seed, config.initializer_range)?,
            None => builder.tensor(name, &shape, Init::Zeros, true)?,
        };
        let params = builder.finish(&ignored)?;
        let body = Body { decoder, params, config, device: options.device };
        // The head's one product is done in f32: in bf16 scores would come in steps of 1/128 of their size.
        Ok(Self { body, score: Linear::new(score, None, Kind::Float), new_head: new_head.is_some() })
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.body.config
    }

    /// The parameters, in the order of the model.
    pub fn params(&self) -> &[Param] {
        &self.body.params
    }

    /// Whether gradients reach the weights.
    pub fn set_trainable(&mut self, trainable: bool) {
        self.body.set_trainable(trainable);
    }

    /// Whether the score head was drawn when the model was read: its numbers mean nothing before training.
    pub fn has_new_head(&self) -> bool {
        self.new_head
    }

    /// The numbers at the positions `spans` of each sequence, M in all, row after row: `[M]` f32.
    ///
    /// # Errors
    /// As [`CausalLm::logits`]; if a span is not within its sequence.
    pub fn values_at<S: AsRef<[i64]>>(&self, sequences: &[S], spans: &[Range<usize>]) -> Result<Tensor> {
        self.body.check_spans(sequences, spans, 0)?;
        let (layout, hidden) = self.body.hidden(sequences)?;
        let rows: Vec<i64> = layout
            .starts
            .iter()
            .zip(spans)
            .flat_map(|(start, span)| span.clone().map(move |t| start + t as i64))
            .collect();
        let hidden = hidden.index_select(0, &Tensor::from_slice(&rows).to_device(self.body.device));
        Ok(self.score.forward(&hidden).squeeze_dim(1))
    }

    /// The score of each sequence, read at its last token: `[rows]` f32.
    ///
    /// # Errors
    /// As [`CausalLm::logits`].
    pub fn scores<S: AsRef<[i64]>>(&self, sequences: &[S]) -> Result<Tensor> {
        let spans: Vec<_> = sequences.iter().map(|s| s.as_ref().len()).map(|len| len.saturating_sub(1)..len).collect();
        self.values_at(sequences, &spans)
    }

    /// Writes `config.json` and the weights below `dir`; transformers reads them as a classifier with one label.
    ///
    /// Without a `pad` the configuration names eos as such: transformers scores no batch without one.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save_pretrained(&self, dir: &Path, eos: &[i64], pad: Option<i64>) -> Result<()> {
        self.body.save(dir, &self.body.config.for_sequence_classifier(eos.first().copied(), pad))
    }
}
