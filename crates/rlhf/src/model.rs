//! Language models and sequence classifiers: Hugging Face folders in and out, ragged sequences in, no padding seen.
//!
//! Nothing here knows of reinforcement learning. Dropout is never applied: PPO compares the same tokens' probabilities
//! before and after an update, and noise between the two passes would pass for a change of the policy.

mod classifier;
mod config;
mod decoder;
mod families;
mod layout;
mod linear;
mod params;
mod value_head;

pub use classifier::SequenceClassifier;
pub(crate) use config::no_such_file;
pub use config::{Activation, ModelConfig, NormKind, Order, Rope, RopeScaling, Shape};
pub use families::Family;
pub(crate) use layout::KvCache;
pub use params::Param;
pub use value_head::{CausalLmWithValueHead, ValueHeadInit};

use crate::weights::{self, Checkpoint, replace_files};
use crate::{Error, Result};
use decoder::Decoder;
use layout::Layout;
use linear::Linear;
use params::{Builder, Init, Source};
use std::ops::Range;
use std::path::Path;
use tch::{Device, Kind, Tensor};

/// The most logits that are held at once where no gradient is needed, in elements (64 MiB of f32).
const LOGITS_CHUNK: i64 = 1 << 24;

/// In what arithmetic a model computes; its results are f32 in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// That of the dtype its weights are held in.
    #[default]
    Held,
    /// f32 throughout.
    F32,
    /// bf16 matrix products and attention, f32 residual stream, norms, log-probabilities and weights.
    Bf16,
}

/// In what dtype a model's weights are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
#[value(rename_all = "lowercase")]
pub enum Dtype {
    /// As most of the checkpoint's bytes are.
    Auto,
    /// f32: what is trained is held so.
    #[default]
    Float32,
    /// bf16.
    BFloat16,
    /// f16.
    Float16,
}

impl Dtype {
    fn kind(self, source: Source<'_>) -> Kind {
        match (self, source) {
            (Dtype::Float32, _) | (Dtype::Auto, Source::Fresh(_)) => Kind::Float,
            (Dtype::BFloat16, _) => Kind::BFloat16,
            (Dtype::Float16, _) => Kind::Half,
            (Dtype::Auto, Source::Checkpoint(checkpoint)) => checkpoint.kind(),
        }
    }
}

/// How a model is put into memory.
#[derive(Debug, Clone, Copy)]
pub struct ModelOptions {
    /// Where it lives.
    pub device: Device,
    /// How its weights are held.
    pub dtype: Dtype,
    /// How it computes.
    pub precision: Precision,
}

impl ModelOptions {
    /// The dtype in which `source`'s weights are held, and that in which products are done.
    fn kinds(self, source: Source<'_>) -> (Kind, Kind) {
        let held = self.dtype.kind(source);
        let compute = match self.precision {
            Precision::Held => held,
            Precision::F32 => Kind::Float,
            Precision::Bf16 => Kind::BFloat16,
        };
        (held, compute)
    }
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self { device: Device::Cpu, dtype: Dtype::Float32, precision: Precision::Held }
    }
}

/// What all kinds of model share: the decoder, its parameters, its configuration.
#[derive(Debug)]
struct Body {
    decoder: Decoder,
    params: Vec<Param>,
    config: ModelConfig,
    device: Device,
    /// The dtype that the weights are held in.
    kind: Kind,
}

impl Body {
    fn set_trainable(&mut self, trainable: bool) {
        for param in &mut self.params {
            let _ = param.tensor.requires_grad_(trainable);
        }
    }

    fn save(&self, dir: &Path, config: &ModelConfig, max_shard_bytes: usize) -> Result<()> {
        self.save_renamed(dir, config, max_shard_bytes, |_| None)
    }

    /// Writes the weights and the configuration; `stored` gives the names that are others in the file.
    fn save_renamed(
        &self,
        dir: &Path,
        config: &ModelConfig,
        max_shard_bytes: usize,
        stored: impl Fn(&str) -> Option<String>,
    ) -> Result<()> {
        let name = |param: &Param| stored(&param.name).unwrap_or_else(|| param.name.clone());
        let tensors: Vec<_> = self.params.iter().map(|p| (name(p), p.tensor.shallow_clone())).collect();
        replace_files(dir, |dir| {
            weights::save(dir, &tensors, max_shard_bytes)?;
            config.save(dir, self.kind)
        })
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

    /// The rows of packed `hidden` at the positions `spans` of each sequence, each moved by `shift`.
    fn rows_at(&self, layout: &Layout, hidden: &Tensor, spans: &[Range<usize>], shift: i64) -> Tensor {
        let spans = layout.starts.iter().zip(spans);
        let rows: Vec<i64> =
            spans.flat_map(|(start, span)| span.clone().map(move |t| start + t as i64 + shift)).collect();
        hidden.index_select(0, &Tensor::from_slice(&rows).to_device(self.device))
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
    /// A value head that stands beside the model is left out: [`CausalLmWithValueHead`] reads it.
    ///
    /// # Errors
    /// If the folder, the configuration or a tensor is not what it should be; all tensors at fault come in one error.
    pub fn from_pretrained(dir: &Path, options: ModelOptions) -> Result<Self> {
        let config = ModelConfig::from_dir(dir)?;
        config.check_causal_lm(dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        Ok(Self::build(config, Source::Checkpoint(&checkpoint), options, &["v_head."], |_, _| Ok(()))?.0)
    }

    /// A model of `config`'s shape with weights drawn from `seed` as transformers would draw them.
    ///
    /// # Errors
    /// If the family has no language models; if libtorch cannot allocate the weights.
    pub fn from_config(config: ModelConfig, seed: u64, options: ModelOptions) -> Result<Self> {
        config.check_causal_lm(Path::new("config"))?;
        Ok(Self::build(config, Source::Fresh(seed), options, &[], |_, _| Ok(()))?.0)
    }

    /// The model, and what `extra` builds beside it; tensors of the checkpoint that begin with `ignored` may be there.
    fn build<T>(
        config: ModelConfig,
        source: Source<'_>,
        options: ModelOptions,
        ignored: &[&str],
        extra: impl FnOnce(&mut Builder<'_>, &Shape) -> Result<T>,
    ) -> Result<(Self, T)> {
        let names = &config.family.names;
        let (held, compute) = options.kinds(source);
        let mut builder = Builder::new(source, names, options.device, held);
        let decoder = Decoder::new(&config, &mut builder, compute)?;
        let head = if config.tie_word_embeddings {
            decoder.embedding()
        } else {
            let shape = [config.vocab_size, config.embedding_size];
            builder.tensor(names.lm_head.into(), &shape, Init::Normal(config.initializer_range), true)?
        };
        let extra = extra(&mut builder, &config)?;
        // Some tied checkpoints hold the head too; it is the embedding again.
        let tied = config.tie_word_embeddings.then_some(names.lm_head);
        let params = builder.finish(&[ignored, tied.as_slice()].concat())?;
        let lm_head = Linear::new(head, None, compute);
        let body = Body { decoder, params, config, device: options.device, kind: held };
        Ok((Self { body, lm_head }, extra))
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.body.config
    }

    /// Whether the model computes in f32 throughout and on the processor, so that the same tokens give the same numbers in
    /// any company; a GPU chooses its sums by the shape of the batch.
    pub fn is_exact(&self) -> bool {
        self.body.decoder.compute == Kind::Float && self.body.device == Device::Cpu
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
        Ok(self.head(&hidden).split_with_sizes(&layout.lens, 0))
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
        self.logprobs_of(sequences, spans, &layout, &hidden, temperature, with_entropy)
    }

    /// [`CausalLm::token_logprobs`] where the hidden states are there.
    fn logprobs_of<S: AsRef<[i64]>>(
        &self,
        sequences: &[S],
        spans: &[Range<usize>],
        layout: &Layout,
        hidden: &Tensor,
        temperature: f64,
        with_entropy: bool,
    ) -> Result<TokenLogprobs> {
        let targets: Vec<i64> =
            sequences.iter().zip(spans).flat_map(|(s, span)| &s.as_ref()[span.clone()]).copied().collect();
        let targets = Tensor::from_slice(&targets).to_device(self.body.device).unsqueeze(1);
        // Each token is predicted at the position before it.
        let hidden = self.body.rows_at(layout, hidden, spans, -1);
        let num_rows = hidden.size()[0];
        let (mut logprobs, mut entropy) = (Vec::new(), Vec::new());
        // In slices, so that without gradients only one slice's logits exist at a time.
        let slice = (LOGITS_CHUNK / self.body.config.vocab_size).max(1);
        for from in (0..num_rows).step_by(slice as usize) {
            let len = slice.min(num_rows - from);
            let logits = self.head(&hidden.narrow(0, from, len)) / temperature;
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
        Ok((cache, self.head(&hidden.index_select(0, &last))))
    }

    /// Appends one token to every row of the cache; gives the logits of the next, `[rows, vocab]` f32.
    pub(crate) fn decode(&self, tokens: &[i64], cache: &mut KvCache) -> Tensor {
        let tokens = Tensor::from_slice(tokens).to_device(self.body.device);
        self.head(&self.body.decoder.forward_step(&tokens, cache))
    }

    /// Logits of hidden states, `[M, vocab]` f32.
    fn head(&self, hidden: &Tensor) -> Tensor {
        let logits = self.lm_head.forward(hidden);
        match self.body.config.final_softcap {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        }
    }

    /// Writes `config.json`, `generation_config.json` and the weights below `dir`; transformers reads them.
    ///
    /// `eos`, the one to append first, and `pad` are noted where they are given; all of `eos` end what is generated. Weights
    /// of more than `max_shard_bytes` go to several files.
    ///
    /// # Errors
    /// If a file cannot be written; the folder then holds what it held.
    pub fn save_pretrained(&self, dir: &Path, eos: &[i64], pad: Option<i64>, max_shard_bytes: usize) -> Result<()> {
        let config = self.body.config.for_causal_lm(eos.first().copied(), pad);
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
        replace_files(dir, |dir| {
            self.body.save(dir, &config, max_shard_bytes)?;
            weights::write_text(&dir.join("generation_config.json"), &weights::pretty(&generation.into()))
        })
    }
}

/// Entropy in nats of each row of log-probabilities, [M, vocab] to `[M]`.
fn entropy_of(logprobs: &Tensor) -> Tensor {
    // As a product of a row and a column: no third tensor of this size comes to be.
    -logprobs.exp().unsqueeze(1).bmm(&logprobs.unsqueeze(2)).view([-1])
}
