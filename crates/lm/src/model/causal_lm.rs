//! Causal language models.

use super::adapter_folder::AdapterFolder;
use super::batch::{Batch, StopCheck};
use super::body::{Body, Hidden};
use super::config::ModelConfig;
use super::decoder::Decoder;
use super::families::FINAL_LOGITS_BIAS;
use super::kv_cache::KvCache;
use super::linear::Linear;
use super::logprobs::{Distributions, LmHead, LogprobOptions, Targets, TokenLogprobs, TopLogprobs, check_vocabulary};
use super::logprobs::{Divergence, TeacherRows, TokenDivergences};
use super::lora;
use super::lora_config::LoraConfig;
use super::params::{Builder, Init, Param, Source};
use super::pretrained::sealed::Sealed;
use super::pretrained::{ModelHead, PretrainedModel};
use super::sampled::Sampled;
use super::shape::Shape;
use super::shard::PassKind;
use super::{Dtype, ModelOptions, Precision};
use rlhf_base::weights::Checkpoint;
use rlhf_base::{Error, Result};
use serde_json::{Map, Value};
use std::ops::Range;
use std::path::Path;
use tch::{Device, Kind, Tensor};
use tch_ext::on_device;

/// A causal language model: a decoder and a head over its vocabulary.
///
/// ```no_run
/// use rlhf_lm::model::{CausalLm, ModelOptions};
/// # fn main() -> rlhf_base::Result<()> {
/// let model = CausalLm::from_pretrained("runs/sft".as_ref(), ModelOptions::default())?;
/// // Sequences are ragged: no padding, no mask.
/// let logits = model.logits(&[vec![5, 6, 7], vec![8, 9]])?;
/// assert_eq!(logits[1].size(), [2, model.config().vocab_size]);
/// # Ok(())
/// # }
/// ```
pub type CausalLm = PretrainedModel<LmHead>;

impl Sealed for LmHead {}

impl ModelHead for LmHead {
    fn linear(&self) -> Option<&Linear> {
        Some(&self.linear)
    }

    fn linear_mut(&mut self) -> Option<&mut Linear> {
        Some(&mut self.linear)
    }

    fn saved_config(&self, config: &ModelConfig, eos: Option<i64>, pad: Option<i64>) -> ModelConfig {
        config.for_causal_lm(eos, pad)
    }

    fn saved_generation(&self, config: &ModelConfig, eos: &[i64], pad: Option<i64>) -> Option<Value> {
        let mut generation = config.generation();
        let eos = if eos.is_empty() { config.eos_token_ids.as_slice() } else { eos };
        if !eos.is_empty() {
            let ids = match eos {
                [only] => serde_json::json!(only),
                several => serde_json::json!(several),
            };
            generation.insert("eos_token_id".into(), ids);
        }
        generation.extend(pad.map(|pad| ("pad_token_id".into(), pad.into())));
        Some(generation.into())
    }
}

impl CausalLm {
    /// Loads a model folder: `config.json` and safetensors. The model is frozen until [`CausalLm::set_trainable`].
    ///
    /// If the folder holds a PEFT adapter and no model, loads the adapter's base and adds the adapter to it. A value head
    /// beside the model is ignored; [`CausalLmWithValueHead`](super::CausalLmWithValueHead) loads it.
    ///
    /// # Errors
    /// If the folder, the configuration or a tensor is not as expected; one error lists all such tensors.
    pub fn from_pretrained(dir: &Path, options: ModelOptions) -> Result<Self> {
        if let Some(folder) = AdapterFolder::find(dir)? {
            folder.check_task(false)?;
            let mut model = Self::from_pretrained(&folder.base_dir()?, options)?;
            model.put_adapter(&folder)?;
            model.body.config.read_generation(dir)?;
            return Ok(model);
        }
        let config = ModelConfig::from_dir(dir)?;
        config.check_causal_lm(dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        let (mut model, ()) =
            Self::build(config, Source::Checkpoint(&checkpoint), options, &["v_head."], |_, _| Ok(()))?;
        // A folder of a larger model is not the base that an adapter fits.
        model.body.origin = (!model.config().is_part()).then(|| dir.to_path_buf());
        Ok(model)
    }

    /// Initializes a model with the shape of `config`, its weights drawn from `seed` as transformers draws them.
    ///
    /// # Errors
    /// If the family has no language models; if libtorch cannot allocate the weights.
    pub fn from_config(config: ModelConfig, seed: u64, options: ModelOptions) -> Result<Self> {
        config.check_causal_lm(Path::new("config"))?;
        Ok(Self::build(config, Source::Fresh(seed), options, &[], |_, _| Ok(()))?.0)
    }

    /// Builds the model, and what `extra` builds from the same source. Tensors of the checkpoint whose names start with one of `ignored`
    /// are skipped.
    pub(super) fn build<T>(
        mut config: ModelConfig,
        source: Source<'_>,
        options: ModelOptions,
        ignored: &[&str],
        extra: impl FnOnce(&mut Builder<'_>, &Shape) -> Result<T>,
    ) -> Result<(Self, T)> {
        let names = &config.family.names;
        let (kind, compute) = options.kinds(source);
        let mut builder = Builder::new(source, names, options.device, options.dtype.kind());
        builder.quantize_to(options.quantization);
        // As in transformers 5: an encoder-decoder without a stored head has the embedding as head.
        if config.is_encoder_decoder() && builder.lacks(names.lm_head) {
            config.tie();
        }
        if names.harmless.contains(&FINAL_LOGITS_BIAS) {
            builder.check_zeros(FINAL_LOGITS_BIAS)?;
        }
        builder.set_tied(config.tie_word_embeddings);
        let decoder = Decoder::new(&config, &mut builder, compute)?;
        // As in transformers 5: a stored head whose values differ from the embedding's is a separate head.
        if config.tie_word_embeddings && builder.holds_other(names.lm_head, &decoder.embedding())? {
            config.untie();
        }
        let head = if config.tie_word_embeddings {
            decoder.embedding()
        } else {
            let shape = [config.vocab_size, config.embedding_size];
            // The head may be quantized in the files, if the list of layers to skip lacks it.
            builder.unpack(true);
            let head = builder.tensor(names.lm_head.into(), &shape, Init::Normal(config.initializer_range), true)?;
            builder.unpack(false);
            head
        };
        let extra = extra(&mut builder, &config)?;
        // Some tied checkpoints hold the head too; it equals the embedding.
        let tied = config.tie_word_embeddings.then_some(names.lm_head);
        let (rounded, left_out) = (builder.has_rounded(), builder.left_out());
        let params = builder.finish(&[ignored, tied.as_slice()].concat())?;
        let head = LmHead::new(head, &config, compute);
        let body = Body { left_out, rounded, ..Body::new(decoder, params, config, options.device, kind) };
        Ok((Self { body, head }, extra))
    }

    /// Adds a new adapter, drawn from `seed`, and freezes the other weights. The adapter has no effect until it is trained.
    ///
    /// An LM head that is tied to the embedding becomes a separate tensor if the adapter saves one of the two, as in PEFT.
    ///
    /// # Errors
    /// If a target, a pattern or a module to save matches nothing; if the model has an adapter.
    pub fn add_adapter(&mut self, config: &LoraConfig, seed: u64) -> Result<()> {
        self.untied_for(&config.modules_to_save, |model| model.body.add_adapter(None, config, seed, false))
    }

    /// Loads the adapter in the folder `dir` into this model, whatever base the folder names.
    ///
    /// # Errors
    /// If the adapter does not fit this model; if the model has an adapter.
    pub fn load_adapter(&mut self, dir: &Path) -> Result<()> {
        let folder = AdapterFolder::open(dir)?;
        folder.check_task(false)?;
        self.put_adapter(&folder)
    }

    fn put_adapter(&mut self, folder: &AdapterFolder) -> Result<()> {
        let modules = if folder.keeps_tie() { Vec::new() } else { folder.config()?.modules_to_save };
        self.untied_for(&modules, |model| model.body.load_adapter(None, folder, false))
    }

    /// Calls `add`, after separating a tied head from the embedding if `modules` select one of the two. Changes nothing on an
    /// error.
    fn untied_for(&mut self, modules: &[String], add: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let names = &self.body.config.family.names;
        let embedding = format!("{}.weight", names.embed);
        let unties = [names.lm_head, &embedding].iter().any(|name| lora::is_in_saved_module(names, name, modules));
        let tied = self.body.config.tie_word_embeddings;
        // Encoder and decoder have separate modules for the one embedding, which PEFT would save separately.
        if self.body.config.is_encoder_decoder() && unties && (tied || lora::is_in_module(&embedding, modules)) {
            return Err(Error::refused(
                "lora_modules_to_save",
                format!(
                    ": expected modules of {} without its embedding or a head that is tied to it, found {}",
                    self.body.config.family.name,
                    modules.join(", ")
                ),
            ));
        }
        if !tied || !unties || self.body.adapter.is_some() {
            let added = add(self);
            self.head.linear.drop_copies();
            return added;
        }
        let (config, compute) = (self.body.config.clone(), self.body.decoder.compute);
        let embedding = self.body.decoder.embedding();
        // The head shares the memory of the embedding until one of the two gets new memory.
        let weight = embedding.detach();
        let [tied, separate] =
            [&embedding, &weight].map(|weight| LmHead::new(weight.shallow_clone(), &config, compute));
        self.head = separate;
        self.body.config.untie();
        let name = names.lm_head.into();
        self.body.params.push(Param { name, tensor: weight, decay: true, embedding: false, fixed: false });
        let added = add(self);
        if added.is_err() {
            (self.body.config, self.head) = (config, tied);
            self.body.params.pop();
        }
        added
    }

    /// Swaps the memory of the trained parameters with that of `weights`, which are in the same order and may have another float dtype. The
    /// parameters of the model must not be divided over ranks.
    pub fn swap_trained(&self, weights: &[Tensor]) {
        for (param, weight) in self.trainable_params().zip(weights) {
            let trained = param.tensor.detach();
            // In all handles of the tensors. A new version renews copies in the dtype of products; `set_data` does not change the version.
            param.tensor.shallow_clone().set_data(&weight.detach());
            weight.shallow_clone().set_data(&trained);
            tch_ext::bump_version(&param.tensor);
        }
    }

    /// The model without its adapter: a view of the same weights, with the base's values of modules that are saved with the
    /// adapter. It takes no memory except for copies of weights in the dtype of products, if that dtype is narrower.
    ///
    /// # Errors
    /// Never for a model that was loaded or built successfully.
    pub fn base(&self) -> Result<Self> {
        let params = self.body.params.iter().map(|param| {
            let tensor = self.body.original(&param.name).unwrap_or(&param.tensor).shallow_clone();
            Param { name: param.name.clone(), tensor, ..*param }
        });
        let params: Vec<Param> = params.collect();
        self.viewing(&params, params.len())
    }

    /// Freezes the embeddings and the first `layers` layers permanently and returns a frozen copy of the model that shares
    /// their memory.
    ///
    /// # Errors
    /// If no trainable layer would be left; for an encoder-decoder.
    pub fn share_lower_layers(&mut self, layers: usize) -> Result<Self> {
        if self.config().is_encoder_decoder() {
            return Err(Error::refused(
                "num_shared_layers",
                format!(
                    " = {layers}: expected a model of one stack, found `{}`, an encoder-decoder",
                    self.config().family.name
                ),
            ));
        }
        let first = format!("{}.{layers}.", self.body.config.family.names.layers);
        let Some(shared) = self.body.params.iter().position(|param| param.name.starts_with(&first)) else {
            let most = self.body.config.num_hidden_layers - 1;
            return Err(Error::refused(
                "num_shared_layers",
                format!(" = {layers}: expected at most {most}, so that at least one layer is trained"),
            ));
        };
        self.body.num_frozen = shared;
        self.body.set_trainable(false);
        self.copy_sharing(shared)
    }

    /// Returns a frozen copy of the model in its current state, whole on every rank.
    ///
    /// # Errors
    /// If the model is divided over ranks, and a rank has ended or does not respond.
    pub fn frozen_copy(&self) -> Result<Self> {
        self.copy_sharing(0)
    }

    /// A copy that shares the memory of the first `shared` parameters.
    fn copy_sharing(&self, shared: usize) -> Result<Self> {
        let _all = self.gathered()?;
        let copies = self.body.params.iter().enumerate().map(|(at, param)| {
            let tensor = if at < shared { param.tensor.shallow_clone() } else { param.tensor.detach().copy() };
            Param { name: param.name.clone(), tensor, ..*param }
        });
        self.viewing(&copies.collect::<Vec<_>>(), shared)
    }

    /// A model of this shape and precision on the memory of `params`, the first `shared` of which belong to another model.
    fn viewing(&self, params: &[Param], shared: usize) -> Result<Self> {
        let precision = match self.body.decoder.compute {
            Kind::Float => Precision::F32,
            Kind::Half => Precision::F16,
            _ => Precision::Bf16,
        };
        let options = ModelOptions { device: self.body.device, dtype: Dtype::Auto, precision, quantization: None };
        let source = Source::Shared(params);
        let (mut model, ()) = Self::build(self.body.config.clone(), source, options, &[], |_, _| Ok(()))?;
        (model.body.kind, model.body.shared) = (self.body.kind, shared);
        if shared == self.body.params.len() {
            model.body.decoder.set_shards(self.body.shards().clone());
        }
        Ok(model)
    }

    /// Whether the same tokens give the same numbers, up to f32 rounding, in any batch and while decoding. True if the model computes in
    /// f32 throughout, on the CPU (a GPU chooses its kernels by the shape of the batch), and its rotary angles do not depend on
    /// the length of the text.
    pub fn is_exact(&self) -> bool {
        self.body.decoder.compute == Kind::Float
            && self.body.device == Device::Cpu
            && !self.config().has_length_dependent_rope()
    }

    /// Logits at every position, one `[length, vocab]` f32 tensor per sequence. Holds all of them in memory, so this is for
    /// small inputs.
    ///
    /// # Errors
    /// If a sequence is empty, too long, or contains an id outside the vocabulary.
    pub fn logits<S: AsRef<[i64]>>(&self, sequences: &[S]) -> Result<Vec<Tensor>> {
        let (layout, hidden) = self.body.hidden(sequences, Some(&self.head.linear))?;
        Ok(self.head.forward(&hidden.states).to_kind(Kind::Float).split_with_sizes(&layout.lens, 0))
    }

    /// Logits at the positions of the batch's spans, M in all, row after row: `[M, vocab]` f32, all of them in memory.
    ///
    /// # Errors
    /// As [`CausalLm::logits`]; if a span is not within its sequence.
    pub fn logits_at<S: AsRef<[i64]>>(&self, batch: Batch<'_, S>) -> Result<Tensor> {
        self.body.check_spans(batch, 0)?;
        Ok(self.head.forward(&self.hidden_at(batch, 0)?.states).to_kind(Kind::Float))
    }

    /// Hidden states after the final norm, one `[length, hidden]` f32 tensor per sequence; errors as [`CausalLm::logits`].
    pub fn hidden_states<S: AsRef<[i64]>>(&self, sequences: &[S]) -> Result<Vec<Tensor>> {
        let (layout, hidden) = self.body.hidden(sequences, None)?;
        Ok(hidden.states.split_with_sizes(&layout.lens, 0))
    }

    /// Log-probabilities of the tokens at `spans` of each sequence under softmax(logits / temperature), or under the restricted
    /// distribution that [`Sampled`] describes; differentiable.
    ///
    /// A span may be empty and may not start at 0, as the first token is not predicted. With M tokens in all spans, the
    /// results are `[M]`. The LM head is applied to these tokens only.
    ///
    /// # Errors
    /// As [`CausalLm::logits`]; if a span is not within its sequence.
    pub fn token_logprobs<'a, S: AsRef<[i64]>>(
        &self,
        sequences: &[S],
        spans: &[Range<usize>],
        sampled: impl Into<Sampled<'a>>,
        with_entropy: bool,
    ) -> Result<TokenLogprobs> {
        self.logprobs_of(Batch::new(sequences, spans), sampled, with_entropy)
    }

    /// [`CausalLm::token_logprobs`] of a batch.
    ///
    /// # Errors
    /// As [`CausalLm::token_logprobs`].
    pub fn logprobs_of<'a, S: AsRef<[i64]>>(
        &self,
        batch: Batch<'_, S>,
        sampled: impl Into<Sampled<'a>>,
        with_entropy: bool,
    ) -> Result<TokenLogprobs> {
        self.logprobs_with(batch, LogprobOptions { entropy: with_entropy, ..sampled.into().into() })
    }

    /// As [`CausalLm::logprobs_of`], with further numbers; the divergence to a reference model is computed in backward passes only.
    ///
    /// # Errors
    /// As [`CausalLm::token_logprobs`].
    pub fn logprobs_with<S: AsRef<[i64]>>(
        &self,
        batch: Batch<'_, S>,
        options: LogprobOptions<'_>,
    ) -> Result<TokenLogprobs> {
        let Batch { sequences, spans, .. } = batch;
        self.body.check_spans(batch, 1)?;
        let targets = Targets::new(&self.head, sequences, spans, options)?;
        // Each token is predicted at the position before it.
        let hidden = self.hidden_at(batch, -1)?;
        Ok(self.head.token_logprobs(&hidden.states, &targets))
    }

    /// Forward and backward pass of a loss of [`CausalLm::token_logprobs`]; accumulates gradients. Returns the
    /// log-probabilities detached.
    ///
    /// `loss` receives the results for a slice of the M tokens and their range among the M, and returns their share of the loss, a
    /// scalar; a token's loss may depend on that token's results only. Logits are computed and consumed slice by slice.
    ///
    /// # Errors
    /// As [`CausalLm::token_logprobs`]; if the model is frozen; if reference distributions are over another vocabulary or
    /// for another number of tokens.
    pub fn logprobs_backward<'a, S: AsRef<[i64]>>(
        &self,
        batch: Batch<'_, S>,
        options: impl Into<LogprobOptions<'a>>,
        loss: impl FnMut(Range<i64>, &TokenLogprobs) -> Tensor,
    ) -> Result<TokenLogprobs> {
        let Batch { sequences, spans, .. } = batch;
        self.body.check_spans(batch, 1)?;
        let targets = Targets::new(&self.head, sequences, spans, options.into())?;
        let mut results = None;
        self.body.backward(batch, -1, Some(&self.head.linear), |hidden| {
            let (logprobs, gradient) = self.head.logprobs_gradient(hidden, &targets, loss);
            results = Some(logprobs);
            gradient
        })?;
        Ok(results.unwrap_or_else(|| targets.none()))
    }

    /// As [`CausalLm::logprobs_backward`], for a loss of all tokens together: `loss` receives the log-probabilities of all M tokens, and is
    /// not called if there are none. Logits that do not fit into one slice are computed twice. The loss may use the entropies as numbers,
    /// but gets no gradient through them.
    ///
    /// # Errors
    /// As [`CausalLm::logprobs_backward`].
    pub fn joint_logprobs_backward<'a, S: AsRef<[i64]>>(
        &self,
        batch: Batch<'_, S>,
        options: impl Into<LogprobOptions<'a>>,
        loss: impl FnOnce(&TokenLogprobs) -> Tensor,
    ) -> Result<TokenLogprobs> {
        let Batch { sequences, spans, .. } = batch;
        self.body.check_spans(batch, 1)?;
        let targets = Targets::new(&self.head, sequences, spans, options.into())?;
        let mut results = None;
        self.body.backward(batch, -1, Some(&self.head.linear), |hidden| {
            let (logprobs, gradient) = self.head.joint_gradient(hidden, &targets, loss);
            results = Some(logprobs);
            gradient
        })?;
        Ok(results.unwrap_or_else(|| targets.none()))
    }

    /// Forward and backward pass of the weighted sum of the divergences from a teacher's distributions at the M tokens of the batch's spans;
    /// `weights` is `[M]`. Accumulates gradients. Logits of both models are held a slice at a time. The two may have
    /// vocabularies of different sizes: the ids that only one of them has are left out.
    ///
    /// # Errors
    /// As [`CausalLm::token_logprobs`]; if the model is frozen; if the teacher's distributions are for another number of tokens.
    pub fn divergence_backward<S: AsRef<[i64]>>(
        &self,
        batch: Batch<'_, S>,
        teacher: TeacherRows<'_>,
        divergence: &Divergence,
        weights: &Tensor,
    ) -> Result<TokenDivergences> {
        self.body.check_spans(batch, 1)?;
        let (ids, states) = self.compared(batch, teacher)?;
        let mut results = None;
        self.body.backward(batch, -1, Some(&self.head.linear), |hidden| {
            let teacher = (teacher.of, &states);
            let (numbers, gradient) = self.head.divergence_gradient(hidden, teacher, &ids, (divergence, weights));
            results = Some(numbers);
            gradient
        })?;
        Ok(results.unwrap_or_else(|| TokenDivergences::join(&[], self.device())))
    }

    /// As [`CausalLm::divergence_backward`], without a gradient.
    ///
    /// # Errors
    /// As [`CausalLm::divergence_backward`].
    pub fn divergences<S: AsRef<[i64]>>(
        &self,
        batch: Batch<'_, S>,
        teacher: TeacherRows<'_>,
        divergence: &Divergence,
    ) -> Result<TokenDivergences> {
        self.body.check_spans(batch, 1)?;
        let (ids, states) = self.compared(batch, teacher)?;
        tch::no_grad(|| {
            let hidden = self.hidden_at(batch, -1)?;
            Ok(self.head.divergences(&hidden.states, (teacher.of, &states), &ids, divergence))
        })
    }

    /// Ids of the tokens of the batch's spans, `[M]`, and the teacher's hidden states in their places.
    fn compared<S: AsRef<[i64]>>(&self, batch: Batch<'_, S>, teacher: TeacherRows<'_>) -> Result<(Tensor, Tensor)> {
        let pairs = batch.sequences.iter().zip(batch.spans);
        let ids: Vec<i64> = pairs.flat_map(|(s, span)| &s.as_ref()[span.clone()]).copied().collect();
        let states = teacher.of.hidden_states(teacher.rows, batch.spans)?;
        teacher.of.check_ids(&ids, self.config().vocab_size)?;
        Ok((on_device(&ids, self.device()), states))
    }

    /// KL divergence from this model's distribution to that of `other` at each token of `spans`: `[M]` f32, exact over the whole
    /// vocabulary. Both are under softmax(logits / temperature), or restricted as [`Sampled`] describes. Not differentiable.
    ///
    /// Logits are held a slice at a time, as in [`CausalLm::token_logprobs`].
    ///
    /// # Errors
    /// As [`CausalLm::token_logprobs`]; if the sizes of the two vocabularies differ.
    pub fn kl_to<'a, S: AsRef<[i64]>>(
        &self,
        other: &Self,
        batch: Batch<'_, S>,
        sampled: impl Into<Sampled<'a>>,
    ) -> Result<Tensor> {
        check_vocabulary(self.config().vocab_size, other.config().vocab_size)?;
        self.body.check_spans(batch, 1)?;
        let sampled = sampled.into();
        sampled.check(batch.spans.iter().map(|span| span.len() as i64).sum())?;
        tch::no_grad(|| {
            let (hidden, others) = (self.hidden_at(batch, -1)?, other.hidden_at(batch, -1)?);
            Ok(self.head.kl_at(&hidden.states, (&other.head, &others.states), sampled))
        })
    }

    /// Log-probabilities of the tokens at `spans` of each sequence, and of the `k` likeliest tokens in the place of each. Not
    /// differentiable.
    ///
    /// Logits are held a slice at a time, as in [`CausalLm::token_logprobs`].
    ///
    /// # Errors
    /// As [`CausalLm::token_logprobs`]; if all spans are empty.
    pub fn top_logprobs<S: AsRef<[i64]>>(&self, batch: Batch<'_, S>, k: usize) -> Result<TopLogprobs> {
        self.body.check_spans(batch, 1)?;
        let pairs = batch.sequences.iter().zip(batch.spans);
        let ids: Vec<i64> = pairs.flat_map(|(s, span)| &s.as_ref()[span.clone()]).copied().collect();
        if ids.is_empty() {
            return Err(Error::Run(
                "top log-probabilities: expected at least one token in the spans, found none".into(),
            ));
        }
        let ids = on_device(&ids, self.device());
        tch::no_grad(|| {
            let hidden = self.hidden_at(batch, -1)?;
            self.head.top_logprobs(&hidden.states, &ids, k, batch.ends)
        })
    }

    /// The distributions that the tokens at `spans` of each sequence are drawn from, for [`LogprobOptions::kl_to`]. They are
    /// stored as one hidden state per token, without logits.
    ///
    /// # Errors
    /// As [`CausalLm::token_logprobs`].
    pub fn distributions<S: AsRef<[i64]>>(&self, batch: Batch<'_, S>) -> Result<Distributions> {
        // If only a pass has the head in memory, the distributions get a copy of it.
        let divided = self.body.shards().are_params_divided() || self.body.offloaded.get().is_some();
        if batch.sequences.is_empty() && !divided {
            return Ok(Distributions::none(&self.head));
        }
        if batch.sequences.is_empty() {
            let span = 1..2;
            let batch = Batch::new(&[[0, 0]], std::slice::from_ref(&span)).with_prompts(Some(&[1]));
            let pass = tch::no_grad(|| self.hidden_at(batch, -1))?;
            return Ok(Distributions::new(&self.head, &pass.states, &[], true));
        }
        self.body.check_spans(batch, 1)?;
        let hidden = tch::no_grad(|| self.hidden_at(batch, -1))?;
        let lens: Vec<i64> = batch.spans.iter().map(|span| span.len() as i64).collect();
        Ok(Distributions::new(&self.head, &hidden.states, &lens, divided))
    }

    /// Starts decoding: reads the prompts into a cache that `new_tokens` tokens per row can be appended to.
    ///
    /// Returns the cache and the logits of each row's next token, `[rows, vocab]` f32 or bf16.
    ///
    /// # Errors
    /// If `ends` ends the pass.
    pub fn prefill<S: AsRef<[i64]>>(
        &self,
        prompts: &[S],
        new_tokens: usize,
        ends: StopCheck<'_>,
    ) -> Result<(KvCache, Tensor)> {
        self.read(prompts, |width| width + new_tokens, ends)
    }

    /// [`CausalLm::prefill`] with a cache whose rows have the capacity that `capacity` returns for the longest of them.
    fn read<S: AsRef<[i64]>>(
        &self,
        prompts: &[S],
        capacity: impl FnOnce(usize) -> usize,
        ends: StopCheck<'_>,
    ) -> Result<(KvCache, Tensor)> {
        let layout = self.body.prompt_layout(prompts)?;
        let mut cache = self.body.decoder.new_cache(prompts.len(), capacity(layout.width as usize))?;
        let last: Vec<_> = prompts.iter().map(|prompt| prompt.as_ref().len() - 1..prompt.as_ref().len()).collect();
        let last = self.body.rows_at(&layout, &last, 0);
        let _pass = self.body.start_pass(PassKind::Forward, Some(&self.head.linear))?;
        let hidden = self.body.decoder.forward(&layout, Some(&mut cache), Some(&last), None, ends)?;
        Ok((cache, self.head.forward(&hidden)))
    }

    /// Computes the rows of a cache again whose rotary angles change at this step, as transformers does. Replaces these rows in the step's
    /// `logits` `[rows, vocab]`.
    fn read_outgrown(&self, cache: &mut KvCache, logits: Tensor) -> Result<Tensor> {
        let (rows, sequences) = cache.outgrown();
        if rows.is_empty() {
            return Ok(logits);
        }
        let (again, new) = self.read(&sequences, |_| cache.capacity(), StopCheck::NEVER)?;
        cache.replace_rows(&rows, &again, &(0..rows.len() as i64).collect::<Vec<_>>());
        let rows = on_device(&rows, logits.device());
        Ok(logits.index_copy(0, &rows, &new))
    }

    /// Appends one token to every row of the cache, `tokens` `[rows]` i64, and returns the logits of the next, `[rows, vocab]` f32
    /// or bf16. Neither waits for the device nor copies anything to it, unless `longrope` requires a row to be computed again or a GPU records
    /// the step ([`KvCache::decode`]).
    ///
    /// # Errors
    /// If the model is divided over ranks, and a rank has ended or does not respond.
    pub fn decode(&self, tokens: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        let logits = {
            let _pass = self.body.start_pass(PassKind::Step, Some(&self.head.linear))?;
            let step = |tokens: &Tensor, cache: &mut KvCache| {
                Ok(self.head.forward(&self.body.decoder.forward_step(tokens, cache)?))
            };
            cache.decode(tokens, self.body.has_recordable_steps(tokens.size()[0]), step)?
        };
        self.read_outgrown(cache, logits)
    }

    /// Appends several tokens to some rows of the cache in one pass: `tokens[i]` to row `rows[i]`, each row once; a row without tokens stays as it
    /// is. [`CausalLm::decode`] continues after them. Only where [`CausalLm::can_append`] says so.
    ///
    /// # Errors
    /// As [`CausalLm::decode`].
    pub fn append<S: AsRef<[i64]>>(&self, rows: &[usize], tokens: &[S], cache: &mut KvCache) -> Result<()> {
        let used = rows.iter().zip(tokens).filter(|(_, tokens)| !tokens.as_ref().is_empty());
        let (rows, counts): (Vec<usize>, Vec<usize>) = used.map(|(&row, tokens)| (row, tokens.as_ref().len())).unzip();
        if rows.is_empty() {
            return Ok(());
        }
        let tokens: Vec<i64> = tokens.iter().flat_map(|tokens| tokens.as_ref().iter().copied()).collect();
        let _pass = self.body.start_pass(PassKind::Forward, Some(&self.head.linear))?;
        let tokens = on_device(&tokens, self.device());
        self.body.decoder.forward_appended(&tokens, (&rows, &counts), cache)
    }

    /// Whether [`CausalLm::append`] works with this cache. It does not with an encoder, with biases by distance, or if `longrope` may require a
    /// row to be computed again.
    pub fn can_append(&self, cache: &KvCache) -> bool {
        self.body.decoder.can_append() && cache.can_append()
    }

    #[cfg(test)]
    pub(super) fn steps_can_be_recorded(&self, rows: i64) -> bool {
        self.body.decoder.has_recordable_steps(rows)
    }

    /// [`Body::hidden_at`] for the LM head.
    pub(super) fn hidden_at<S: AsRef<[i64]>>(&self, batch: Batch<'_, S>, shift: i64) -> Result<Hidden<'_>> {
        self.body.hidden_at(batch, shift, Some(&self.head.linear))
    }

    /// Sets the generation settings that [`CausalLm::save_pretrained`] writes, by the names of transformers' generation
    /// configuration; they replace the loaded ones.
    pub fn set_generation(&mut self, settings: Map<String, Value>) {
        self.body.config.set_generation(settings);
    }
}
