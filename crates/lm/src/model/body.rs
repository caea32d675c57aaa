//! The part that language models and sequence classifiers share: the decoder, its parameters and its configuration.

use super::adapter_folder::{AdapterFolder, AdapterTarget};
use super::batch::{Batch, StopCheck};
use super::config::ModelConfig;
use super::decoder::{BackwardOptions, Decoder};
use super::layer_inputs::{stored_in_branch, stored_inputs};
use super::layout::{Layout, rounded};
use super::linear::Linear;
use super::lora::{self, Adapter, Dropout};
use super::lora_config::LoraConfig;
use super::mixing::MixedPass;
use super::params::{Files, Param};
use super::plain_attention::PlainAttention;
use super::quantized::Quantization;
use super::shape::{MlpIn, Order, Shape};
use super::shard::{AllGuard, PassKind, RootGuard, Shards};
use super::stacked::parallel_expert_bytes;
use super::{plain, uses_kernels};
use rlhf_base::dist::{World, ZeroStage};
use rlhf_base::offload::{InUse, Offload, Offloaded};
use rlhf_base::weights::Checkpoint;
use rlhf_base::{Error, Result};
use serde_json::{Map, Value};
use std::cell::OnceCell;
use std::collections::HashSet;
use std::ffi::c_void;
use std::ops::Range;
use std::path::PathBuf;
use tch::{Device, Kind, Tensor};
use tch_ext::on_device;

/// A decoder with its parameters and its configuration: a model without its head.
#[derive(Debug)]
pub(super) struct Body {
    pub(super) decoder: Decoder,
    pub(super) params: Vec<Param>,
    pub(super) config: ModelConfig,
    pub(super) device: Device,
    /// The dtype that most of the weights are held in; a saved model has this dtype.
    pub(super) kind: Kind,
    /// The parts of the model's folder that were not read.
    pub(super) left_out: Option<String>,
    /// Whether tensors were rounded when they were read.
    pub(super) rounded: bool,
    /// Whether [`Body::hold_as_computed`] has rounded tensors.
    pub(super) narrowed: bool,
    /// Whether [`Body::hold_in_bf16`] has changed numbers.
    pub(super) rounded_to_train: bool,
    /// Whether an adapter was merged into weights whose files are quantized.
    pub(super) merged_into_codes: bool,
    /// Number of leading parameters that share the memory of another model.
    pub(super) shared: usize,
    /// The folder that the weights were read from, as long as the weights equal those of the folder.
    pub(super) origin: Option<PathBuf>,
    /// The content of `adapter_config.json`, if there is an adapter; without the base if the base is `origin`.
    pub(super) adapter: Option<Map<String, Value>>,
    /// The base's values of the parameters that are trained in full beside an adapter: heads, and modules saved with the adapter.
    pub(super) originals: Vec<(String, Tensor)>,
    /// Whether training stores only the input of each layer and recomputes the layer in the backward pass.
    pub(super) gradient_checkpointing: bool,
    /// Number of leading parameters that are never trained.
    pub(super) num_frozen: usize,
    /// Whether trained matrices are held in bf16.
    pub(super) trains_in_bf16: bool,
    /// The parameters, if they are in memory only during passes.
    pub(super) offloaded: OnceCell<Offloaded>,
}

/// Which weights of a model are trained, and in which dtype they are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trains {
    /// A new adapter; the other weights are held in the dtype of products if that takes no more memory.
    Adapter,
    /// All weights, in f32.
    All,
    /// All weights, the larger matrices in bf16: see `holds_in_bf16`.
    AllInBf16,
}

/// The least number of elements of a matrix that is trained in bf16.
pub(crate) const LEAST_IN_BF16: usize = 4096;

/// Whether a parameter is held in bf16 if weights are trained in bf16: a matrix or embedding of at least [`LEAST_IN_BF16`] elements.
/// Vectors and heads are computed in f32.
pub(crate) fn holds_in_bf16(name: &str, shape: &[i64]) -> bool {
    shape.len() >= 2 && shape.iter().product::<i64>() >= LEAST_IN_BF16 as i64 && !lora::is_head(name)
}

/// Hidden states of a forward pass, which holds the parameters of the head.
pub(super) struct Hidden<'a> {
    pub(super) states: Tensor,
    _pass: Pass<'a>,
}

/// A pass through the model, which holds the parameters outside the layers.
pub(super) struct Pass<'a> {
    guard: Option<RootGuard>,
    _loaded: Option<InUse>,
    body: &'a Body,
    head: Option<&'a Linear>,
}

impl Pass<'_> {
    /// Ends a backward pass.
    fn finish_backward(mut self) -> Result<()> {
        self.guard.take().map_or(Ok(()), RootGuard::finish_backward)
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if self.body.shards().releases() {
            self.body.decoder.root_linears().chain(self.head).for_each(Linear::drop_copies);
        }
    }
}

/// All parameters of a model that are divided over ranks, gathered until this guard is dropped.
#[derive(Debug)]
#[must_use = "the parameters are released when the guard is dropped"]
pub struct Gathered<'a> {
    guard: Option<AllGuard>,
    body: &'a Body,
    head: Option<&'a Linear>,
}

impl Drop for Gathered<'_> {
    fn drop(&mut self) {
        self.guard = None;
        if self.body.shards().releases() {
            self.body.decoder.drop_copies();
            self.head.iter().for_each(|head| head.drop_copies());
        }
    }
}

/// The parameters of a model that is offloaded between its uses, in memory until this guard is dropped.
#[derive(Debug)]
#[must_use = "the parameters are offloaded when the guard is dropped"]
pub struct Loaded<'a> {
    in_use: Option<InUse>,
    body: &'a Body,
    head: Option<&'a Linear>,
}

impl Drop for Loaded<'_> {
    fn drop(&mut self) {
        if self.in_use.take().is_some() {
            self.body.decoder.drop_copies();
            self.head.iter().for_each(|head| head.drop_copies());
        }
    }
}

/// The error of a training of all weights of a quantized model.
pub(super) const TRAINS_QUANTIZED: &str =
    "the weights are quantized, and all of them would be trained: set use_peft, which trains an adapter beside them";

impl Body {
    pub(super) fn new(decoder: Decoder, params: Vec<Param>, config: ModelConfig, device: Device, kind: Kind) -> Self {
        Self {
            decoder,
            params,
            config,
            device,
            kind,
            left_out: None,
            rounded: false,
            narrowed: false,
            rounded_to_train: false,
            merged_into_codes: false,
            shared: 0,
            origin: None,
            adapter: None,
            originals: Vec::new(),
            gradient_checkpointing: false,
            num_frozen: 0,
            trains_in_bf16: false,
            offloaded: OnceCell::new(),
        }
    }

    /// Checks that the weights can be trained this way.
    ///
    /// # Errors
    /// If quantized weights would be trained.
    pub(super) fn check_trains(&self, trains: Trains) -> Result<()> {
        if self.quantization().is_some() && !matches!(trains, Trains::Adapter) {
            let model = self.origin.as_ref().map_or("the model".into(), |dir| dir.display().to_string());
            return Err(Error::Usage(format!("{model}: {TRAINS_QUANTIZED}")));
        }
        Ok(())
    }

    /// The format of quantized weights of linear layers, if there are any.
    pub(super) fn quantization(&self) -> Option<Quantization> {
        self.decoder.linears().find_map(Linear::quantization)
    }

    /// Converts each matrix to the dtype of its product, if that takes no more memory; results stay the same. Does nothing once the
    /// model is divided over ranks or offloaded, as its memory is then fixed.
    pub(super) fn hold_as_computed(&mut self, head: Option<&mut Linear>) {
        if self.shards().stage().is_some() || self.offloaded.get().is_some() {
            return;
        }
        let kept = self.shared_addresses();
        let linears = self.decoder.linears_mut().chain(head);
        let mut changed = linears.filter_map(|linear| linear.hold_as_computed(&kept).then_some(())).count();
        let stacks = self.decoder.stacks_mut();
        changed += stacks.filter_map(|stack| stack.hold_as_computed(&kept).then_some(())).count();
        if changed > 0 {
            self.kind = self.decoder.compute;
            self.narrowed = true;
        }
        self.decoder.lay_out(&kept);
    }

    /// The addresses of the parameters whose memory this model shares with another.
    fn shared_addresses(&self) -> HashSet<*mut c_void> {
        self.params.iter().take(self.shared).map(|param| param.tensor.data_ptr()).collect()
    }

    /// Converts every tensor to f32.
    pub(super) fn hold_as_f32(&mut self) {
        self.hold_as(|_| Kind::Float);
        (self.kind, self.trains_in_bf16) = (Kind::Float, false);
    }

    /// Converts the larger matrices to bf16, in which they are also trained, and other tensors to f32.
    pub(super) fn hold_in_bf16(&mut self) {
        self.hold_as(
            |param| if holds_in_bf16(&param.name, &param.tensor.size()) { Kind::BFloat16 } else { Kind::Float },
        );
        (self.kind, self.trains_in_bf16) = (Kind::BFloat16, true);
    }

    /// Converts each tensor, except quantized weights, to the dtype that `kind` returns.
    fn hold_as(&mut self, kind: impl Fn(&Param) -> Kind) {
        for param in self.params.iter_mut().filter(|param| !param.is_quantized()) {
            let kind = kind(param);
            if param.tensor.kind() != kind {
                let converted = tch::no_grad(|| param.tensor.to_kind(kind));
                // Weights that were read from bf16 into f32 lose nothing here.
                self.rounded_to_train |=
                    kind == Kind::BFloat16 && converted.to_kind(param.tensor.kind()) != param.tensor;
                param.tensor.set_data(&converted);
            }
        }
        // `set_data` does not change the version by which copies are renewed.
        self.decoder.drop_copies();
        self.decoder.lay_out(&self.shared_addresses());
    }

    /// The dtype in which a head is saved.
    pub(super) fn head_kind(&self) -> Kind {
        // In f32, so that a resumed run continues with the same numbers.
        if self.trains_in_bf16 { Kind::Float } else { self.kind }
    }

    /// Whether a parameter is trained beside the frozen base.
    pub(super) fn is_trained(&self, name: &str) -> bool {
        lora::is_trained(name) || self.original(name).is_some()
    }

    /// The base's value of a parameter that is trained in full beside an adapter.
    pub(super) fn original(&self, name: &str) -> Option<&Tensor> {
        self.originals.iter().find(|(key, _)| key == name).map(|(_, tensor)| tensor)
    }

    /// Moves the parameters `names`, and the heads, to new memory in f32, with the base's values or the values in `values`. The
    /// base keeps the old memory.
    ///
    /// # Errors
    /// If one of them is quantized.
    fn train_in_full(&mut self, names: &[String], values: &[(String, Tensor)]) -> Result<()> {
        if let Some(param) = self.params.iter().find(|param| names.contains(&param.name) && param.is_quantized()) {
            return Err(Error::refused(
                "lora_modules_to_save",
                format!(": expected modules whose weights are not quantized, found that of `{}`", param.name),
            ));
        }
        for param in &mut self.params {
            let is_head = lora::is_head(&param.name);
            if !is_head && !names.contains(&param.name) {
                continue;
            }
            let original = param.tensor.detach();
            let value = values.iter().find(|(name, _)| *name == param.name).map(|(_, value)| value.shallow_clone());
            let value = value.unwrap_or_else(|| original.to_kind(Kind::Float).copy());
            // In all handles of the tensor; the layers have one.
            param.tensor.set_data(&value);
            self.originals.push((param.name.clone(), original));
        }
        // `set_data` does not change the version by which copies are renewed.
        self.decoder.drop_copies();
        Ok(())
    }

    /// The dtype that the base of an adapter was rounded to, if the run has to save that base.
    pub(super) fn rounded_base(&self) -> Option<Kind> {
        (self.narrowed && self.adapter.is_some() && self.origin.is_none()).then_some(self.kind)
    }

    /// Sets which parameters require gradients. With an adapter, only the adapter, the modules saved with it and a classifier's or value
    /// head do.
    pub(super) fn set_trainable(&mut self, trainable: bool) {
        let all = self.adapter.is_none();
        for (at, param) in self.params.iter().enumerate() {
            if param.is_quantized() {
                continue;
            }
            let learns = trainable && !param.fixed && at >= self.num_frozen && (all || self.is_trained(&param.name));
            let _ = param.tensor.shallow_clone().requires_grad_(learns);
        }
    }

    pub(super) fn trainable_params(&self) -> impl Iterator<Item = &Param> {
        self.params.iter().filter(|param| param.tensor.requires_grad())
    }

    /// Returns the layers that can have an adapter, `head` among them. Fails if the model already has an adapter.
    fn linears<'a>(&'a mut self, head: Option<&'a mut Linear>) -> Result<Vec<&'a mut Linear>> {
        if self.adapter.is_some() {
            return Err(Error::Run("the model has an adapter; merge it before adding another".into()));
        }
        let experts = self.config.family.names.experts;
        // With experts, PEFT's names of adapters in MLPs differ between versions of transformers.
        let adapts = |layer: &str| !lora::is_in_head(layer) && !experts.is_some_and(|experts| experts.has(layer));
        Ok(self.decoder.linears_mut().chain(head).filter(|linear| adapts(linear.name())).collect())
    }

    /// Adds a new adapter, drawn from `seed`, to the layers that `config` selects.
    pub(super) fn add_adapter(
        &mut self,
        head: Option<&mut Linear>,
        config: &LoraConfig,
        seed: u64,
        classifier: bool,
    ) -> Result<()> {
        let (family, device) = (self.config.family, self.device);
        let saved = config.saved_params(family, self.params.iter().map(|param| param.name.as_str()), classifier)?;
        let mut params = Vec::new();
        let mut linears = self.linears(head)?;
        let names: Vec<String> = linears.iter().map(|linear| linear.name().to_string()).collect();
        let sizes = config.choose(family, &names)?;
        let linears = linears.drain(..).zip(sizes).filter_map(|(linear, size)| Some((linear, size?)));
        let mut layers = Vec::new();
        for (index, (linear, size)) in linears.enumerate() {
            let mut adapter = Adapter::fresh(size, linear.widths(), device, seed, index as u64)?;
            adapter.magnitude = config.use_dora.then(|| linear.magnitude(&adapter));
            params.extend(adapter.params(linear.name()));
            linear.set_adapter(adapter);
            layers.push(linear.name().to_string());
        }
        self.train_in_full(&saved, &[])?;
        self.params.extend(params);
        self.adapter = Some(config.describe(family, &layers, classifier));
        self.set_trainable(false);
        Ok(())
    }

    /// Adds the adapter stored in `folder`.
    pub(super) fn load_adapter(
        &mut self,
        head: Option<&mut Linear>,
        folder: &AdapterFolder,
        classifier: bool,
    ) -> Result<()> {
        let params = std::mem::take(&mut self.params);
        let (device, family) = (self.device, self.config.family);
        let target =
            AdapterTarget { params: &params, device, family, classifier, tied: self.config.tie_word_embeddings };
        let applied = self.linears(head).and_then(|linears| folder.apply(linears, target));
        self.params = params;
        let loaded = applied?;
        self.train_in_full(&loaded.saved, &loaded.values)?;
        self.params.extend(loaded.params);
        self.adapter = Some(folder.described(family, classifier, &loaded.modules));
        self.set_trainable(false);
        Ok(())
    }

    /// Adds the adapter's product to the weights and removes the adapter, if there is one.
    pub(super) fn merge_adapter(&mut self, head: Option<&mut Linear>) {
        if self.adapter.take().is_some() {
            let linears = self.decoder.linears_mut().chain(head);
            let widened = linears.filter_map(|linear| linear.merge().then_some(())).count();
            if widened > 0 {
                // f32, so that saving does not round the sum.
                self.kind = Kind::Float;
            }
            self.originals.clear();
            self.params.retain(|param| !lora::is_lora(&param.name));
            self.origin = None;
            self.set_trainable(false);
        }
    }

    /// Merges the adapter into weights that were quantized when they were read: the adapter is added to the weights of the files, and the
    /// sum is quantized again. Does nothing for other weights.
    ///
    /// Quantized values are on a grid, and most of what an adapter adds is smaller than half a step of it: added to these values it would
    /// be lost.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(super) fn merge_before_quantizing(&mut self) -> Result<()> {
        if self.adapter.is_none() || self.quantization().is_none() {
            return Ok(());
        }
        // The text part of a larger model, which is read under other names.
        let Some(dir) = &self.origin else {
            self.merged_into_codes = true;
            return Ok(());
        };
        let checkpoint = Checkpoint::open(dir)?;
        let names = &self.config.family.names;
        let files = Files::new(&checkpoint, names);
        for linear in self.decoder.linears_mut().filter(|linear| linear.is_quantized_with_adapter()) {
            match files.plain(linear.name(), self.device)? {
                Some(weight) => {
                    linear.merge_into(&if names.transposed { weight.tr() } else { weight });
                    // As after quantizing a weight that was read.
                    tch_ext::release_memory();
                }
                None => self.merged_into_codes = true,
            }
        }
        Ok(())
    }

    /// Rounds the parameters that were trained in full, except heads, to the dtypes of their base values `originals`.
    pub(super) fn round_as(&mut self, originals: &[(String, Tensor)]) {
        for param in self.params.iter_mut().filter(|param| !lora::is_head(&param.name)) {
            if let Some((_, original)) = originals.iter().find(|(name, _)| *name == param.name) {
                param.tensor.set_data(&param.tensor.detach().to_kind(original.kind()));
            }
        }
        self.decoder.drop_copies();
    }

    /// Whether a tensor of this dtype can be trained.
    fn is_trainable(&self, kind: Kind) -> bool {
        kind == Kind::Float || kind == Kind::BFloat16 && self.trains_in_bf16
    }

    /// Checks the input for mistakes that would make libtorch fail.
    pub(super) fn check<S: AsRef<[i64]>>(&self, batch: Batch<'_, S>) -> Result<()> {
        let (sequences, vocab) = (batch.sequences, self.config.vocab_size);
        if let Some(param) = self.trainable_params().find(|param| !self.is_trainable(param.tensor.kind())) {
            return Err(Error::Run(format!(
                "`{}` is held in {:?} and trainable: expected f32 (Dtype::Float32), or an adapter on frozen weights",
                param.name,
                param.tensor.kind()
            )));
        }
        if sequences.is_empty() {
            return Err(Error::Run("expected at least one sequence, found none".into()));
        }
        let most = self.config.max_position_embeddings;
        let longest = if self.config.is_encoder_decoder() { usize::MAX } else { most };
        for (row, sequence) in sequences.iter().enumerate() {
            let sequence = sequence.as_ref();
            if sequence.is_empty() || sequence.len() > longest {
                let found = sequence.len();
                return Err(Error::Run(format!("sequence {row}: expected 1 to {most} tokens, found {found}")));
            }
            if let Some(id) = sequence.iter().find(|id| !(0..vocab).contains(*id)) {
                let message = format!("sequence {row}: token id {id} is outside the model's vocabulary of {vocab}");
                return Err(Error::Run(message));
            }
        }
        if self.config.is_encoder_decoder() { self.check_prompts(batch) } else { Ok(()) }
    }

    /// Checks the prompts and responses of an encoder-decoder.
    fn check_prompts<S: AsRef<[i64]>>(&self, batch: Batch<'_, S>) -> Result<()> {
        let (family, most) = (self.config.family.name, self.config.max_position_embeddings);
        let wrong = |message: String| Err(Error::Run(message));
        let Some(prompts) = batch.prompt_lens else {
            return wrong(format!("`{family}` is an encoder-decoder: expected the length of each prompt, found none"));
        };
        if batch.unpadded_lens.is_some() {
            return wrong(format!("`{family}` is an encoder-decoder: expected sequences without padding"));
        }
        if prompts.len() != batch.sequences.len() {
            let (expected, found) = (batch.sequences.len(), prompts.len());
            return wrong(format!("expected {expected} prompt lengths, one per sequence, found {found}"));
        }
        for (row, (sequence, &prompt)) in batch.sequences.iter().zip(prompts).enumerate() {
            let len = sequence.as_ref().len();
            if prompt == 0 || prompt > len {
                return wrong(format!("sequence {row}: expected a prompt of 1 to {len} tokens, found {prompt}"));
            }
            let response = len - prompt;
            if prompt > most || response >= most {
                return wrong(format!(
                    "sequence {row}: expected a prompt of at most {most} tokens and a response of at most {}, found {prompt} and {response}",
                    most - 1
                ));
            }
        }
        Ok(())
    }

    /// Checks that each sequence has one span, within the sequence and not before `first`; in an encoder-decoder `first` counts from the
    /// last token of the prompt.
    pub(super) fn check_spans<S: AsRef<[i64]>>(&self, batch: Batch<'_, S>, first: usize) -> Result<()> {
        let Batch { sequences, spans, .. } = batch;
        let prompts = batch.prompt_lens.filter(|_| self.config.is_encoder_decoder());
        if self.config.is_encoder_decoder() {
            self.check_prompts(batch)?;
        }
        if spans.len() != sequences.len() {
            return Err(Error::Run(format!(
                "expected {} spans, one per sequence, found {}",
                sequences.len(),
                spans.len()
            )));
        }
        for (row, (sequence, span)) in sequences.iter().zip(spans).enumerate() {
            let len = sequence.as_ref().len();
            let before = prompts.and_then(|prompts| prompts.get(row)).map_or(0, |prompt| prompt.saturating_sub(1));
            let first = before + first;
            if span.start < first || span.start > span.end || span.end > len {
                return Err(Error::Run(format!(
                    "sequence {row}: expected a span within {first}..{len}, found {span:?}"
                )));
            }
        }
        Ok(())
    }

    /// Activation bytes per token of a forward pass with gradients.
    pub(super) fn activation_bytes(&self, gradient_checkpointing: bool) -> usize {
        activation_bytes(&self.config, (self.decoder.compute, self.device), gradient_checkpointing)
    }

    /// The division of the parameters over ranks.
    pub(super) fn shards(&self) -> &Shards {
        self.decoder.shards()
    }

    /// Divides the model over the ranks of `world`; see [`Shards::divide`]. Leading parameters whose memory this model shares
    /// with another stay whole; a view of another model is divided with that model.
    pub(super) fn shard(&self, world: &World, stage: ZeroStage) {
        if self.shared > 0 && self.shared >= self.params.len() {
            return;
        }
        let shared = self.shared.max(self.num_frozen);
        self.decoder.drop_copies();
        let layer_of = |name: &str| self.decoder.layer_of(name);
        self.shards().divide((world, stage), &self.params[shared..], self.decoder.num_layers(), layer_of);
    }

    /// Gathers all parameters; `head` is the linear head.
    pub(super) fn gathered<'a>(&'a self, head: Option<&'a Linear>) -> Result<Gathered<'a>> {
        Ok(Gathered { guard: Some(self.shards().gather_all()?), body: self, head })
    }

    /// Starts a pass; `head` is the linear head, which computes from the hidden states. Errors that one rank can find alone must be
    /// reported before: once a pass has started, the other ranks take part in it.
    pub(super) fn start_pass<'a>(&'a self, kind: PassKind, head: Option<&'a Linear>) -> Result<Pass<'a>> {
        let loaded = self.offloaded.get().map(Offloaded::in_use).transpose()?;
        Ok(Pass { guard: Some(self.shards().start_pass(kind)?), _loaded: loaded, body: self, head })
    }

    /// Whether the model is on a GPU that can record its decoding steps of `rows` rows as a CUDA graph: each step does the same work with the
    /// same tensors. Computing the values of quantized weights has been recorded on no GPU yet: only those who ask for kernels get it.
    pub(super) fn has_recordable_steps(&self, rows: i64) -> bool {
        let is_quantized = || self.decoder.linears().any(|linear| linear.quantization().is_some());
        self.device.is_cuda()
            && !plain()
            && tch_ext::has_graphs()
            && self.offloaded.get().is_none()
            && self.decoder.has_recordable_steps(rows)
            && (!is_quantized() || tch_ext::has_gpu_kernels(self.decoder.compute, self.device))
    }

    /// Offloads the parameters of a frozen model between their uses, except those that it shares with another model. Does nothing if they
    /// are offloaded already or divided over ranks. `name` names the model in errors.
    ///
    /// # Errors
    /// If there is not enough memory or disk space for them.
    pub(super) fn offload(&self, place: &Offload, name: &str) -> Result<()> {
        let tensors = self.params.iter().skip(self.shared).map(|param| &param.tensor);
        if self.offloaded.get().is_some() || self.shards().are_params_divided() {
            return Ok(());
        }
        self.decoder.drop_copies();
        if let Some(offloaded) = place.hold(name, tensors)? {
            drop(self.offloaded.set(offloaded));
        }
        Ok(())
    }

    /// Brings the parameters of a model that is offloaded into memory; `head` is the linear head.
    pub(super) fn loaded<'a>(&'a self, head: Option<&'a Linear>) -> Result<Loaded<'a>> {
        let in_use = self.offloaded.get().map(Offloaded::in_use).transpose()?;
        Ok(Loaded { in_use, body: self, head })
    }

    /// Hidden states of all tokens, packed.
    pub(super) fn hidden<'a, S: AsRef<[i64]>>(
        &'a self,
        sequences: &[S],
        head: Option<&'a Linear>,
    ) -> Result<(Layout, Hidden<'a>)> {
        self.check(Batch::new(sequences, &[]))?;
        let pass = self.start_pass(PassKind::Forward, head)?;
        let layout = Layout::new(sequences, self.device);
        let states = self.without_graph(|| self.decoder.forward(&layout, None, None, None, StopCheck::NEVER))?;
        Ok((layout, Hidden { states, _pass: pass }))
    }

    /// Hidden states `[M, embedding size]` at the positions of the batch's spans, each moved by `shift`; no dropout is applied.
    pub(super) fn hidden_at<'a, S: AsRef<[i64]>>(
        &'a self,
        batch: Batch<'_, S>,
        shift: i64,
        head: Option<&'a Linear>,
    ) -> Result<Hidden<'a>> {
        self.check(batch)?;
        let pass = self.start_pass(PassKind::Forward, head)?;
        let layout = self.batch_layout(&batch.with_dropout(None), shift);
        let (rows, count) = self.rounded_rows_at(&layout, batch.spans, shift);
        let states = self.without_graph(|| self.decoder.forward(&layout, None, Some(&rows), None, batch.ends))?;
        Ok(Hidden { states: states.narrow(0, 0, count), _pass: pass })
    }

    /// Calls `f`, without gradients if this model's gradients are divided over ranks: only [`Body::backward`] reduces them.
    fn without_graph<T>(&self, f: impl FnOnce() -> T) -> T {
        if self.shards().are_gradients_divided() { tch::no_grad(f) } else { f() }
    }

    /// Forward and backward pass; accumulates gradients. `loss_gradient` receives the hidden states of [`Body::hidden_at`],
    /// detached, and returns the gradient of the loss with respect to them. It is not called if all spans are empty.
    ///
    /// # Errors
    /// If the model is frozen; as [`Body::hidden_at`].
    pub(super) fn backward<S: AsRef<[i64]>>(
        &self,
        batch: Batch<'_, S>,
        shift: i64,
        head: Option<&Linear>,
        loss_gradient: impl FnOnce(&Tensor) -> Tensor,
    ) -> Result<()> {
        self.check(batch)?;
        if self.trainable_params().next().is_none() {
            return Err(Error::Run("the model is frozen, so it has no gradients; call set_trainable first".into()));
        }
        if batch.spans.iter().all(Range::is_empty) {
            return Ok(());
        }
        let pass = self.start_pass(PassKind::Backward, head)?;
        let dropout = batch.dropout.filter(|rows| rows.share > 0.0 && self.adapter.is_some());
        let layout = self.batch_layout(&batch.with_dropout(dropout), shift);
        let dropout = dropout.map(|rows| Dropout::new(rows, &layout.lens));
        let (rows, count) = self.rounded_rows_at(&layout, batch.spans, shift);
        let options =
            BackwardOptions { dropout: dropout.as_ref(), gradient_checkpointing: self.gradient_checkpointing };
        self.decoder.backward(&layout, (&rows, count), options, loss_gradient)?;
        pass.finish_backward()
    }

    /// The layout of a batch for a pass with outputs at its spans only.
    fn batch_layout<S: AsRef<[i64]>>(&self, batch: &Batch<'_, S>, shift: i64) -> Layout {
        if let (Some(start), Some(prompts)) = (self.start_token(), batch.prompt_lens) {
            return self.paired_layout(batch, (start, prompts), shift);
        }
        match (batch.unpadded_lens, batch.dropout) {
            (Some(unpadded_lens), _) => {
                // As in transformers. OPT's padding has position -1, as its positions count unpadded tokens.
                let position = (self.config.position_offset > 0).then_some(-1);
                Layout::with_padding(batch.sequences, unpadded_lens, position, self.device)
            }
            (None, None) => {
                let needed = self.needed(batch, shift);
                match batch.shared_lens {
                    Some(shared) if self.config.causal && !self.config.has_length_dependent_rope() => {
                        self.padded(Layout::sharing(&needed, shared, self.device))
                    }
                    _ => self.padded_layout(&needed),
                }
            }
            // Dropout draws for whole sequences, so that the draws do not depend on the spans.
            (None, Some(_)) => Layout::new(batch.sequences, self.device),
        }
    }

    /// The layout of an encoder-decoder. The encoder reads each different prompt once; the decoder reads the token `start` and the
    /// response, up to the last token that the outputs depend on.
    fn paired_layout<S: AsRef<[i64]>>(
        &self,
        batch: &Batch<'_, S>,
        (start, prompts): (i64, &[usize]),
        shift: i64,
    ) -> Layout {
        let rows = batch.sequences.iter().map(AsRef::as_ref).zip(prompts);
        let decoded = rows.clone().zip(batch.spans).map(|((sequence, &prompt), span)| {
            let end = match (batch.dropout, span.is_empty()) {
                // Dropout draws for whole sequences, so that the draws do not depend on the spans.
                (Some(_), _) => sequence.len(),
                (None, true) => prompt,
                (None, false) => (span.end as i64 + shift) as usize,
            };
            [&[start], &sequence[prompt..end]].concat()
        });
        let decoded: Vec<Vec<i64>> = decoded.collect();
        let firsts = prompts.iter().map(|&prompt| prompt as i64 - 1).collect();
        let prompts: Vec<&[i64]> = rows.map(|(sequence, &prompt)| &sequence[..prompt]).collect();
        Layout::pairs(&decoded, firsts, &prompts, batch.dropout.is_none(), self.device)
    }

    /// The token that the decoder of an encoder-decoder starts with.
    pub(super) fn start_token(&self) -> Option<i64> {
        self.config.decoder_start_token_id.filter(|_| self.config.is_encoder_decoder())
    }

    /// The layout of prompts before their responses, with outputs at some rows only. Checks the prompts.
    pub(super) fn prompt_layout<S: AsRef<[i64]>>(&self, prompts: &[S]) -> Result<Layout> {
        let lens: Vec<usize> = prompts.iter().map(|prompt| prompt.as_ref().len()).collect();
        let spans = vec![0..0; prompts.len()];
        let batch = Batch::new(prompts, &spans).with_prompts(Some(&lens));
        self.check(batch)?;
        Ok(match self.start_token() {
            Some(start) => self.paired_layout(&batch, (start, &lens), 0),
            None => self.padded_layout(prompts),
        })
    }

    /// The layout for a pass with outputs at some rows only.
    fn padded_layout<S: AsRef<[i64]>>(&self, sequences: &[S]) -> Layout {
        self.padded(Layout::new(sequences, self.device))
    }

    fn padded(&self, layout: Layout) -> Layout {
        let compute = self.decoder.compute;
        if uses_kernels(compute, self.device) { layout.padded(tch_ext::token_multiple(compute)) } else { layout }
    }

    /// The sequences up to the last token that the outputs depend on; in a causal model nothing after a span matters.
    fn needed<'s, S: AsRef<[i64]>>(&self, batch: &Batch<'s, S>, shift: i64) -> Vec<&'s [i64]> {
        let whole = !self.config.causal || self.config.has_length_dependent_rope();
        let pairs = batch.sequences.iter().map(AsRef::as_ref).zip(batch.spans);
        pairs
            .map(|(sequence, span)| match (whole, span.is_empty()) {
                (true, _) => sequence,
                (false, true) => &sequence[..1],
                (false, false) => &sequence[..(span.end as i64 + shift) as usize],
            })
            .collect()
    }

    /// Indices in the packed order of the positions `spans` of each sequence, each moved by `shift`.
    pub(super) fn rows_at(&self, layout: &Layout, spans: &[Range<usize>], shift: i64) -> Tensor {
        let row_indices =
            |(row, span): (usize, &Range<usize>)| span.clone().map(move |t| layout.token_index(row, t as i64 + shift));
        let rows: Vec<i64> = spans.iter().enumerate().flat_map(row_indices).collect();
        on_device(&rows, self.device)
    }

    /// [`Body::rows_at`] followed by unused indices up to a round number, and the number of used ones.
    fn rounded_rows_at(&self, layout: &Layout, spans: &[Range<usize>], shift: i64) -> (Tensor, i64) {
        let rows = self.rows_at(layout, spans, shift);
        let count = rows.size()[0];
        if uses_kernels(self.decoder.compute, self.device) {
            (rows.constant_pad_nd([0, rounded(count) - count]), count)
        } else {
            (rows, count)
        }
    }
}

/// The longest row, in tokens, for which attention scores without a kernel are counted: they grow with the square of a row's length.
const USUAL_ROW: usize = 1024;

/// Memory per token in a row of usual length, in numbers of the compute dtype: what an attention layer stores, what a layer with a
/// recurrent or convolutional state stores, and what the backward pass of one layer takes besides: the attention scores, or what a
/// recurrent or convolutional layer takes.
fn mixed_numbers(c: &Shape, (compute, device): (Kind, Device)) -> [i64; 3] {
    let row = c.max_position_embeddings.clamp(1, USUAL_ROW);
    let (kind, count) = (compute.elt_size_in_bytes() as f64, row as f64);
    let gate = if c.attention_gate { 4 * c.num_attention_heads * c.head_dim } else { 0 };
    let numbers = |bytes: f64| (bytes / count / kind) as i64;
    let (attention_numbers, score_numbers) = match PlainAttention::of(c, compute, device) {
        None => ((2 * c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim, 0),
        Some(plain) => {
            let stored = numbers(plain.stored_bytes(c, [1, row], kind)) + c.mean_widths()[0] as i64;
            (stored, numbers(plain.working_bytes(c, [1, row])))
        }
    };
    let pass = MixedPass {
        computed: count,
        attended: count,
        rows: [1.0, count],
        kind,
        has_kernels: uses_kernels(compute, device),
        trains: true,
    };
    let [mixing_numbers, mixing_working] = c.mixing.map_or([0, 0], |mixing| {
        [mixing.stored_bytes(c.hidden_size, pass), mixing.working_bytes(c.hidden_size, pass)].map(numbers)
    });
    [attention_numbers + gate, mixing_numbers, score_numbers.max(mixing_working)]
}

/// Bytes per token of norms in a layer whose attention has no kernel, in addition to the inputs of two norms: the numbers that libtorch's
/// norms store, the norms of queries, keys and values, and the inputs of norms after a branch.
fn stored_by_plain_norms(c: &Shape, (compute, device): (Kind, Device)) -> f64 {
    if PlainAttention::of(c, compute, device).is_none() {
        return 0.0;
    }
    let kind = compute.elt_size_in_bytes() as f64;
    let (hidden, normalized) = (c.hidden_size as f64, if uses_kernels(compute, device) { 0.0 } else { 4.0 });
    let after_branches = if matches!(c.order, Order::Sandwich | Order::Output) { 2.0 * hidden * 4.0 } else { 0.0 };
    let [queries, keys] = c.mean_widths();
    let values = if c.layer_shapes.is_empty() { 0.0 } else { keys };
    let head_norms = if c.family.names.qk_norm.is_some() { queries + keys + values } else { 0.0 };
    2.0 * hidden * normalized + after_branches + head_norms * (normalized + if kind < 4.0 { 4.0 + kind } else { 4.0 })
}

/// Activation bytes per token of a forward pass with gradients, of a model of the shape `c` whose products are of this dtype on this
/// device.
pub(super) fn activation_bytes(c: &Shape, place: (Kind, Device), gradient_checkpointing: bool) -> usize {
    let kind = place.0.elt_size_in_bytes() as i64;
    let stream = c.hidden_size * 4;
    // The mean over the layers.
    let [attention_numbers, mixing_numbers, working_numbers] = mixed_numbers(c, place);
    let mixing_layers = c.num_hidden_layers - c.attention_layers();
    let heads =
        (c.attention_layers() * attention_numbers + mixing_layers * mixing_numbers) / c.num_hidden_layers.max(1);
    let inner = match c.family.names.mlp_in {
        MlpIn::Up(_) => 2 * c.active_width(),
        MlpIn::Gated(_) | MlpIn::GatedFused(_) => 4 * c.active_width(),
    };
    // The residual stream after attention and after the MLP; both norms, the projections, the heads' outputs, the MLP.
    let mut layer = 2 * stream + (2 * c.hidden_size + heads + inner) * kind;
    let width = kind as f64;
    layer += (c.routed_width() * (width + 4.0) + parallel_expert_bytes(c, width) + stored_in_branch(c, width)) as i64;
    layer += stored_by_plain_norms(c, place) as i64;
    if c.relative.is_some() {
        // Scores of contents and positions, for the keys of a long text.
        layer += 5 * 4 * c.num_attention_heads * c.max_position_embeddings.min(1 << 13) as i64;
    }
    // With a trained bias by distance, each layer stores its scores. The biases, their gradients and the scores of one backward pass come
    // on top; their number is measured.
    let width = c.max_position_embeddings.min(1 << 13) as i64;
    let scores = if c.relative_bias.is_some() { 4 * c.num_attention_heads * width } else { 0 };
    // A token is in one of the two stacks of an encoder-decoder.
    let layers = c.num_hidden_layers.max(c.encoder_layers.unwrap_or(0));
    let stored = if gradient_checkpointing { layers * stream + layer } else { layers * (layer + scores) };
    let input_bytes = 2 * stored_inputs(c) as i64;
    (stored + working_numbers * kind + input_bytes + if gradient_checkpointing { 7 } else { 2 } * scores) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn scores_with_a_trained_bias_count_for_micro_batches_and_so_do_the_layers_of_the_longer_stack() {
        let bytes = |key: &str, value: i64| {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models/t5/config.json");
            let Value::Object(mut raw) = rlhf_base::weights::read_json(&path).unwrap() else { panic!("an object") };
            raw.insert(key.into(), value.into());
            let config = ModelConfig::from_json(&path, raw).unwrap();
            [false, true].map(|checkpointing| activation_bytes(&config, (Kind::Float, Device::Cpu), checkpointing))
        };
        let ([plain, stored], [longer, longer_stored]) = (bytes("n_positions", 512), bytes("n_positions", 1024));
        // 2 heads of 512 more scores in f32: in each of 2 layers and twice; 7 times with gradient checkpointing.
        assert_eq!([longer - plain, longer_stored - stored], [4 * 4096, 7 * 4096]);
        assert_eq!(bytes("num_decoder_layers", 1), [plain, stored]);
        assert!(bytes("num_decoder_layers", 4)[0] > plain);
    }
}
