//! Language models and sequence classifiers: Hugging Face folders in and out, ragged sequences in, no padding seen.
//!
//! Nothing here knows of reinforcement learning. A model's own dropout is never applied: PPO compares the same tokens'
//! probabilities before and after an update, and noise between the two passes would pass for a change of the policy. That of
//! an adapter is applied where a pass asks for it by `DropoutRows`.

mod batches;
mod classifier;
mod config;
mod decoder;
mod families;
mod layout;
mod linear;
mod lora;
mod params;
mod sampled;
mod value_head;

pub(crate) use batches::{batches, in_batches};
pub use classifier::{ClassifierFormat, SequenceClassifier};
pub(crate) use config::no_such_file;
pub use config::{Activation, ModelConfig, NormKind, Order, Rope, RopeScaling, Shape};
pub use families::Family;
pub(crate) use layout::KvCache;
pub(crate) use lora::AdapterFolder;
pub(crate) use lora::DropoutRows;
pub use lora::LoraConfig;
pub use params::Param;
pub use sampled::{Sampled, TokenSet};
pub use value_head::{CausalLmWithValueHead, ValueHead, ValueHeadInit, ValueModel};

use crate::hub;
use crate::weights::{self, Checkpoint, replace_files};
use crate::{Error, Result};
use decoder::Decoder;
use families::MlpIn;
use layout::{Layout, rounded};
use linear::Linear;
use lora::{Adapter, Dropout};
use params::{Builder, Init, Source};
use sampled::restricted;
use serde_json::{Map, Value};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tch::{Device, Kind, Tensor};

/// The most logits that are held at once, in elements (32 MiB of f32).
const LOGITS_CHUNK: i64 = 1 << 23;

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
    /// The same in f16: more digits and a smaller range, so that training needs a [`crate::optim::loss_scale::LossScaler`].
    F16,
}

/// In what dtype a model's weights are read and held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
#[value(rename_all = "lowercase")]
pub enum Dtype {
    /// Each tensor as its file has it.
    Auto,
    /// f32: what is trained is held so.
    #[default]
    Float32,
    /// bf16.
    #[value(alias = "bf16")]
    BFloat16,
    /// f16.
    #[value(alias = "fp16")]
    Float16,
}

impl Dtype {
    /// The dtype by its name.
    pub(crate) fn of(kind: Kind) -> Self {
        match kind {
            Kind::BFloat16 => Dtype::BFloat16,
            Kind::Half => Dtype::Float16,
            _ => Dtype::Float32,
        }
    }

    /// Its name as a setting.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Dtype::Auto => "auto",
            Dtype::Float32 => "float32",
            Dtype::BFloat16 => "bfloat16",
            Dtype::Float16 => "float16",
        }
    }

    /// The dtype of all tensors; `None`: each has its own.
    fn kind(self) -> Option<Kind> {
        match self {
            Dtype::Auto => None,
            Dtype::Float32 => Some(Kind::Float),
            Dtype::BFloat16 => Some(Kind::BFloat16),
            Dtype::Float16 => Some(Kind::Half),
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
    /// How it computes; `Held` is as most of its bytes are.
    pub precision: Precision,
}

impl ModelOptions {
    /// The dtype in which most of `source`'s bytes are held, and that in which products are done.
    fn kinds(self, source: Source<'_>) -> (Kind, Kind) {
        let of_most = || match source {
            Source::Fresh(_) => Kind::Float,
            Source::Checkpoint(checkpoint) => checkpoint.kind(),
            Source::Shared(params) => params.first().map_or(Kind::Float, |param| param.tensor.kind()),
        };
        let held = self.dtype.kind().unwrap_or_else(of_most);
        let compute = match self.precision {
            Precision::Held => held,
            Precision::F32 => Kind::Float,
            Precision::Bf16 => Kind::BFloat16,
            Precision::F16 => Kind::Half,
        };
        (held, compute)
    }
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self { device: Device::Cpu, dtype: Dtype::Float32, precision: Precision::Held }
    }
}

/// Whether `RLHF_KERNELS=plain` in the environment has libtorch's own operations compute everything.
fn plain() -> bool {
    static PLAIN: OnceLock<bool> = OnceLock::new();
    *PLAIN.get_or_init(|| std::env::var_os("RLHF_KERNELS").is_some_and(|value| value == "plain"))
}

/// Whether the kernels of tch-ext compute what is of this dtype on this device.
pub(crate) fn uses_kernels(kind: Kind, device: Device) -> bool {
    !plain() && tch_ext::has_kernels(kind, device)
}

/// What all kinds of model share: the decoder, its parameters, its configuration.
#[derive(Debug)]
struct Body {
    decoder: Decoder,
    params: Vec<Param>,
    config: ModelConfig,
    device: Device,
    /// The dtype that most of the weights are held in: that of a model that is saved.
    kind: Kind,
    /// Whether tensors were rounded when they were read.
    rounded: bool,
    /// Whether [`Body::hold_as_computed`] has rounded tensors.
    narrowed: bool,
    /// So many of the first parameters lie in the memory of another model.
    shared: usize,
    /// The folder that the weights were read from, as long as they are those of the folder.
    origin: Option<PathBuf>,
    /// What `adapter_config.json` says, where there is an adapter; without the base if that is `origin`.
    adapter: Option<Map<String, Value>>,
    /// The heads of the base, which are trained whole beside an adapter: as they were before.
    base_head: Vec<(String, Tensor)>,
    /// Whether training keeps only what goes into each layer, and computes the layer again on the way back.
    gradient_checkpointing: bool,
    /// So many of the first parameters never learn.
    num_frozen: usize,
}

/// The folder beside an adapter that holds its base, where no other folder does.
pub(crate) const BASE_MODEL: &str = "base_model";

/// Whether `dir` holds a model or an adapter.
pub(crate) fn is_model(dir: &Path) -> bool {
    ["config.json", "adapter_config.json"].iter().any(|name| dir.join(name).is_file())
}

/// The name of the base in `adapter_config.json`.
const BASE_NAME: &str = "base_model_name_or_path";

impl Body {
    fn new(decoder: Decoder, params: Vec<Param>, config: ModelConfig, device: Device, kind: Kind) -> Self {
        Self {
            decoder,
            params,
            config,
            device,
            kind,
            rounded: false,
            narrowed: false,
            shared: 0,
            origin: None,
            adapter: None,
            base_head: Vec::new(),
            gradient_checkpointing: false,
            num_frozen: 0,
        }
    }

    /// Holds each matrix in the dtype that it is multiplied in, where that needs no more memory: the same numbers come out.
    fn hold_as_computed(&mut self, head: Option<&mut Linear>) {
        let kept = self.params.iter().take(self.shared).map(|param| param.tensor.data_ptr()).collect();
        let linears = self.decoder.linears_mut().chain(head);
        let changed = linears.filter_map(|linear| linear.hold_as_computed(&kept).then_some(())).count();
        if changed > 0 {
            self.kind = self.decoder.compute;
            self.narrowed = true;
        }
    }

    /// Holds every tensor in f32.
    fn hold_as_f32(&mut self) {
        for param in &mut self.params {
            if param.tensor.kind() != Kind::Float {
                let wide = tch::no_grad(|| param.tensor.to_kind(Kind::Float));
                param.tensor.set_data(&wide);
            }
        }
        self.kind = Kind::Float;
    }

    /// The heads that are trained whole beside an adapter, as they are now.
    fn heads(&self) -> Vec<(String, Tensor)> {
        let heads = self.params.iter().filter(|param| lora::is_head(&param.name));
        heads.map(|param| (param.name.clone(), param.tensor.detach().copy())).collect()
    }

    /// The dtype that the base of an adapter was rounded to, where the run has to save that base.
    fn rounded_base(&self) -> Option<Kind> {
        (self.narrowed && self.adapter.is_some() && self.origin.is_none()).then_some(self.kind)
    }

    /// Beside a frozen base only the adapter is trained, and a classifier's head.
    fn set_trainable(&mut self, trainable: bool) {
        let all = self.adapter.is_none();
        for (at, param) in self.params.iter_mut().enumerate() {
            let learns = trainable && at >= self.num_frozen && (all || lora::is_trained(&param.name));
            let _ = param.tensor.requires_grad_(learns);
        }
    }

    fn trainable_params(&self) -> impl Iterator<Item = &Param> {
        self.params.iter().filter(|param| param.tensor.requires_grad())
    }

    /// Checks that the model can get an adapter, and gives the layers that could have one; `extra` is that of the head.
    fn linears<'a>(&'a mut self, extra: Option<&'a mut Linear>) -> Result<Vec<&'a mut Linear>> {
        if self.adapter.is_some() {
            return Err(Error::Run("the model has an adapter; fold it in before it gets another".into()));
        }
        Ok(self.decoder.linears_mut().chain(extra).filter(|linear| !lora::is_in_head(linear.name())).collect())
    }

    fn add_adapter(
        &mut self,
        extra: Option<&mut Linear>,
        config: &LoraConfig,
        seed: u64,
        classifier: bool,
    ) -> Result<()> {
        let (family, device) = (self.config.family, self.device);
        let mut params = Vec::new();
        let mut linears = self.linears(extra)?;
        let names: Vec<String> = linears.iter().map(|linear| linear.name().to_string()).collect();
        let chosen = config.choose(family, &names)?;
        let mut linears: Vec<_> = linears.drain(..).zip(chosen).filter_map(|(l, chosen)| chosen.then_some(l)).collect();
        for (index, linear) in linears.iter_mut().enumerate() {
            let adapter = Adapter::fresh(config, linear.widths(), device, seed, index as u64)?;
            params.extend(adapter.params(linear.name()));
            linear.set_adapter(adapter);
        }
        let layers: Vec<String> = linears.iter().map(|linear| linear.name().to_string()).collect();
        self.base_head = self.heads();
        self.params.extend(params);
        self.adapter = Some(config.describe(family, &layers, classifier));
        self.set_trainable(false);
        Ok(())
    }

    fn load_adapter(&mut self, extra: Option<&mut Linear>, folder: &AdapterFolder, classifier: bool) -> Result<()> {
        let heads = self.heads();
        let mut params = std::mem::take(&mut self.params);
        let device = self.device;
        let applied = self.linears(extra).and_then(|linears| folder.apply(linears, &mut params, device));
        self.params = params;
        applied?;
        self.base_head = heads;
        self.adapter = Some(folder.described(classifier));
        self.set_trainable(false);
        Ok(())
    }

    fn merge_adapter(&mut self, extra: Option<&mut Linear>) {
        if self.adapter.take().is_some() {
            let linears = self.decoder.linears_mut().chain(extra);
            let widened = linears.filter_map(|linear| linear.merge().then_some(())).count();
            if widened > 0 {
                // So that whoever reads what is saved keeps the sum.
                self.kind = Kind::Float;
            }
            self.base_head.clear();
            self.params.retain(|param| !lora::is_lora(&param.name));
            self.origin = None;
            self.set_trainable(false);
        }
    }

    /// Writes the adapter, and the base beside it where no folder holds it; `config` is the base's.
    fn save_adapter(
        &self,
        dir: &Path,
        config: &ModelConfig,
        max_shard_bytes: usize,
        adapter: &Map<String, Value>,
    ) -> Result<()> {
        let mut described = adapter.clone();
        if !described.contains_key(BASE_NAME) {
            let base = match &self.origin {
                Some(origin) => origin.clone(),
                None => {
                    self.save_model(&dir.join(BASE_MODEL), config, max_shard_bytes, |_| None)?;
                    weights::destination(dir).join(BASE_MODEL)
                }
            };
            let base = std::path::absolute(&base).map_err(Error::io("find", base))?;
            match hub::name_of(&base) {
                Some((name, commit)) => {
                    described.insert(BASE_NAME.into(), name.into());
                    described.insert("revision".into(), commit.into());
                }
                None => {
                    let name = base.to_str().ok_or_else(|| Error::invalid(&base, "expected a path in UTF-8"))?;
                    described.insert(BASE_NAME.into(), name.into());
                }
            }
            described.sort_keys();
        }
        lora::save(dir, &described, &self.params)
    }

    fn save(&self, dir: &Path, config: &ModelConfig, max_shard_bytes: usize) -> Result<()> {
        self.save_renamed(dir, config, max_shard_bytes, |_| None)
    }

    /// Writes the weights and the configuration, or the adapter, into a folder that the caller puts in place; `stored` gives the names that are others in the file.
    fn save_renamed(
        &self,
        dir: &Path,
        config: &ModelConfig,
        max_shard_bytes: usize,
        stored: impl Fn(&str) -> Option<String>,
    ) -> Result<()> {
        match &self.adapter {
            Some(adapter) => self.save_adapter(dir, config, max_shard_bytes, adapter),
            None => self.save_model(dir, config, max_shard_bytes, stored),
        }
    }

    fn save_model(
        &self,
        dir: &Path,
        config: &ModelConfig,
        max_shard_bytes: usize,
        stored: impl Fn(&str) -> Option<String>,
    ) -> Result<()> {
        std::fs::create_dir_all(dir).map_err(Error::io("create the folder", dir))?;
        let name = |param: &Param| stored(&param.name).unwrap_or_else(|| param.name.clone());
        // A base is as it was before anything was trained beside it.
        let of_base = |name: &str| self.adapter.is_none() || !lora::is_below(name, lora::VALUE_HEAD);
        let params = self.params.iter().filter(|param| !lora::is_lora(&param.name) && of_base(&param.name));
        let tensor = |param: &Param| {
            let before = self.base_head.iter().find(|(name, _)| *name == param.name);
            let tensor = before.map_or(&param.tensor, |(_, tensor)| tensor).detach();
            // A head is held in f32 in any case.
            if lora::is_head(&param.name) { tensor.to_kind(self.kind) } else { tensor }
        };
        let tensors: Vec<_> = params.map(|param| (name(param), tensor(param))).collect();
        weights::check_finite(&tensors)?;
        weights::save(dir, &tensors, max_shard_bytes)?;
        config.save(dir, self.kind)
    }

    /// Writes the base of an adapter to `dir` where no folder holds it, so that every adapter that is saved from now on names
    /// that one; what is there from an earlier run that began alike is left.
    fn keep_base(&mut self, dir: &Path, config: &ModelConfig, max_shard_bytes: usize) -> Result<()> {
        if self.adapter.is_none() || self.origin.is_some() {
            return Ok(());
        }
        if !is_model(dir) {
            replace_files(dir, |dir| self.save_model(dir, config, max_shard_bytes, |_| None))?;
            weights::sync(dir)?;
        }
        self.origin = Some(dir.to_path_buf());
        Ok(())
    }

    /// Reads back what [`Body::save_renamed`] wrote to `dir`, into the weights that are trained.
    fn load_trained(&mut self, dir: &Path, stored: impl Fn(&str) -> Option<String>) -> Result<()> {
        let adapter = self.adapter.is_some();
        let file = if adapter { lora::open_weights(dir)? } else { Checkpoint::open(dir)? };
        for param in self.params.iter_mut().filter(|param| !adapter || lora::is_trained(&param.name)) {
            let name = match adapter {
                true => lora::stored_name(&param.name),
                false => stored(&param.name).unwrap_or_else(|| param.name.clone()),
            };
            let (expected, found) = (param.tensor.size(), file.shape(&name));
            if found.as_ref() != Some(&expected) {
                let found = found.map_or("none".into(), |found| format!("{found:?}"));
                return Err(Error::invalid(dir, format!("tensor `{name}`: expected {expected:?}, found {found}")));
            }
            let saved = file.read(&name, self.device, param.tensor.kind())?;
            tch::no_grad(|| param.tensor.copy_(&saved));
        }
        Ok(())
    }

    /// Checks what a user can get wrong, so that libtorch need not fail on it.
    fn check<S: AsRef<[i64]>>(&self, sequences: &[S]) -> Result<()> {
        let (vocab, most) = (self.config.vocab_size, self.config.max_position_embeddings);
        if let Some(param) = self.trainable_params().find(|param| param.tensor.kind() != Kind::Float) {
            return Err(Error::Run(format!(
                "`{}` is held in {:?} and trainable: expected f32 (Dtype::Float32), or an adapter on frozen weights",
                param.name,
                param.tensor.kind()
            )));
        }
        if sequences.is_empty() {
            return Err(Error::Run("expected at least one sequence, found none".into()));
        }
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

    /// Bytes that a token leaves in memory on its way forward, for the way back.
    fn activation_bytes(&self, gradient_checkpointing: bool) -> usize {
        let (c, kind) = (&self.config, self.decoder.compute.elt_size_in_bytes() as i64);
        let stream = c.hidden_size * 4;
        let heads = (2 * c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim;
        let inner = match c.family.names.mlp_in {
            MlpIn::Up(_) => 2 * c.intermediate_size,
            MlpIn::Gated(_) | MlpIn::GatedFused(_) => 4 * c.intermediate_size,
        };
        // The stream behind attention and behind the MLP, both norms, projections and heads' results, the MLP.
        let layer = 2 * stream + (2 * c.hidden_size + heads + inner) * kind;
        let layers = c.num_hidden_layers;
        (if gradient_checkpointing { layers * stream + layer } else { layers * layer }) as usize
    }

    /// Hidden states of all tokens, packed.
    fn hidden<S: AsRef<[i64]>>(&self, sequences: &[S]) -> Result<(Layout, Tensor)> {
        self.check(sequences)?;
        let layout = Layout::new(sequences, self.device);
        let hidden = self.decoder.forward(&layout, None, None, None);
        Ok((layout, hidden))
    }

    /// Hidden states, `[M, embedding size]`, of the tokens at `spans` of each sequence, each moved by `shift`.
    fn hidden_at<S: AsRef<[i64]>>(&self, sequences: &[S], spans: &[Range<usize>], shift: i64) -> Result<Tensor> {
        self.hidden_showing(sequences, None, spans, shift)
    }

    /// [`Body::hidden_at`]; with `shown` what is behind so many tokens of each sequence is padding ([`Layout::with_padding`]).
    fn hidden_showing<S: AsRef<[i64]>>(
        &self,
        sequences: &[S],
        shown: Option<&[usize]>,
        spans: &[Range<usize>],
        shift: i64,
    ) -> Result<Tensor> {
        self.check(sequences)?;
        let layout = match shown {
            None => self.padded_layout(&self.needed(sequences, spans, shift)),
            Some(shown) => self.layout_with_padding(sequences, shown),
        };
        let (rows, count) = self.rounded_rows_at(&layout, spans, shift);
        Ok(self.decoder.forward(&layout, None, Some(&rows), None).narrow(0, 0, count))
    }

    /// Has `f` make a gradient of [`Body::hidden_at`], and adds what follows from it to the gradients of the parameters. Where
    /// `spans` are all empty nothing is asked or added.
    fn learn<S: AsRef<[i64]>>(
        &self,
        sequences: &[S],
        spans: &[Range<usize>],
        shift: i64,
        dropout: Option<&DropoutRows>,
        f: impl FnOnce(&Tensor) -> Result<Option<Tensor>>,
    ) -> Result<()> {
        self.learn_showing(sequences, None, spans, shift, dropout, f)
    }

    /// [`Body::learn`] of what [`Body::hidden_showing`] gives.
    fn learn_showing<S: AsRef<[i64]>>(
        &self,
        sequences: &[S],
        shown: Option<&[usize]>,
        spans: &[Range<usize>],
        shift: i64,
        dropout: Option<&DropoutRows>,
        f: impl FnOnce(&Tensor) -> Result<Option<Tensor>>,
    ) -> Result<()> {
        self.check(sequences)?;
        if self.trainable_params().next().is_none() {
            return Err(Error::Run("the model is frozen: nothing of it can learn; set_trainable first".into()));
        }
        if spans.iter().all(Range::is_empty) {
            return Ok(());
        }
        let dropout = dropout.filter(|rows| rows.share > 0.0 && self.adapter.is_some());
        let layout = match (shown, dropout) {
            (Some(shown), _) => self.layout_with_padding(sequences, shown),
            (None, None) => self.padded_layout(&self.needed(sequences, spans, shift)),
            (None, Some(_)) => Layout::new(sequences, self.device),
        };
        let dropout = dropout.map(|rows| Dropout::new(rows, &layout.lens));
        let (rows, count) = self.rounded_rows_at(&layout, spans, shift);
        self.decoder.learn(&layout, &rows, count, dropout.as_ref(), self.gradient_checkpointing, f)
    }

    /// The layout for a pass of which only some rows are asked for.
    fn padded_layout<S: AsRef<[i64]>>(&self, sequences: &[S]) -> Layout {
        let layout = Layout::new(sequences, self.device);
        if uses_kernels(self.decoder.compute, self.device) { layout.padded() } else { layout }
    }

    /// Padding stands where transformers puts it: OPT's at the place before the first, as its places count what is shown.
    fn layout_with_padding<S: AsRef<[i64]>>(&self, sequences: &[S], shown: &[usize]) -> Layout {
        let place = (self.config.position_offset > 0).then_some(-1);
        Layout::with_padding(sequences, shown, place, self.device)
    }

    /// The sequences as far as what is asked of them depends on them: not what comes behind, where tokens see only back.
    fn needed<'s, S: AsRef<[i64]>>(&self, sequences: &'s [S], spans: &[Range<usize>], shift: i64) -> Vec<&'s [i64]> {
        let whole = !self.config.causal || self.config.turns_by_length();
        let pairs = sequences.iter().map(AsRef::as_ref).zip(spans);
        pairs
            .map(|(sequence, span)| match (whole, span.is_empty()) {
                (true, _) => sequence,
                (false, true) => &sequence[..1],
                (false, false) => &sequence[..(span.end as i64 + shift) as usize],
            })
            .collect()
    }

    /// Where the positions `spans` of each sequence, each moved by `shift`, lie in the packed order.
    fn rows_at(&self, layout: &Layout, spans: &[Range<usize>], shift: i64) -> Tensor {
        let spans = layout.starts.iter().zip(spans);
        let rows: Vec<i64> =
            spans.flat_map(|(start, span)| span.clone().map(move |t| start + t as i64 + shift)).collect();
        Tensor::from_slice(&rows).to_device(self.device)
    }

    /// [`Body::rows_at`] with more behind it that nothing reads, and how many count.
    fn rounded_rows_at(&self, layout: &Layout, spans: &[Range<usize>], shift: i64) -> (Tensor, i64) {
        let rows = self.rows_at(layout, spans, shift);
        let count = rows.size()[0];
        match uses_kernels(self.decoder.compute, self.device) {
            true => (rows.constant_pad_nd([0, rounded(count) - count]), count),
            false => (rows, count),
        }
    }
}

/// A language model: a decoder and a head over its vocabulary.
///
/// ```no_run
/// use rlhf::model::{CausalLm, ModelOptions};
/// # fn main() -> rlhf::Result<()> {
/// let model = CausalLm::from_pretrained("runs/sft".as_ref(), ModelOptions::default())?;
/// // Sequences are ragged: no padding, no mask.
/// let logits = model.logits(&[vec![5, 6, 7], vec![8, 9]])?;
/// assert_eq!(logits[1].size(), [2, model.config().vocab_size]);
/// # Ok(())
/// # }
/// ```
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
    /// Entropy in nats of the distribution each token was drawn from, `[M]` f32; differentiable.
    pub entropy: Option<Tensor>,
    /// KL divergence in nats from that distribution to another model's, `[M]` f32, where one was given; differentiable.
    pub kl: Option<Tensor>,
}

impl TokenLogprobs {
    fn detached(&self) -> Self {
        let detach = |x: &Option<Tensor>| x.as_ref().map(Tensor::detach);
        Self { logprobs: self.logprobs.detach(), entropy: detach(&self.entropy), kl: detach(&self.kl) }
    }
}

impl CausalLm {
    /// Reads a model folder: `config.json` and safetensors; frozen until [`CausalLm::set_trainable`].
    ///
    /// The folder may hold a PEFT adapter and no model: then its base is read, and the adapter put on it.
    ///
    /// A value head that stands beside the model is left out: [`CausalLmWithValueHead`] reads it.
    ///
    /// # Errors
    /// If the folder, the configuration or a tensor is not what it should be; all tensors at fault come in one error.
    pub fn from_pretrained(dir: &Path, options: ModelOptions) -> Result<Self> {
        if let Some(folder) = AdapterFolder::find(dir)? {
            folder.check_task(false)?;
            let mut model = Self::from_pretrained(&folder.base_dir()?, options)?;
            model.body.load_adapter(None, &folder, false)?;
            model.body.config.read_generation(dir)?;
            return Ok(model);
        }
        let config = ModelConfig::from_dir(dir)?;
        config.check_causal_lm(dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        let (mut model, ()) =
            Self::build(config, Source::Checkpoint(&checkpoint), options, &["v_head."], |_, _| Ok(()))?;
        model.body.origin = Some(dir.to_path_buf());
        Ok(model)
    }

    /// Puts a fresh adapter, drawn from `seed`, beside the weights, which stay as they are from now on; it changes nothing
    /// until it is trained.
    ///
    /// # Errors
    /// If a target matches no layer; if there is an adapter already.
    pub fn add_adapter(&mut self, config: &LoraConfig, seed: u64) -> Result<()> {
        self.body.add_adapter(None, config, seed, false)
    }

    /// Puts the adapter in the folder `dir` on this model, whatever base the folder names.
    ///
    /// # Errors
    /// If it is not for a model like this one, or there is an adapter already.
    pub fn load_adapter(&mut self, dir: &Path) -> Result<()> {
        let folder = AdapterFolder::open(dir)?;
        folder.check_task(false)?;
        self.body.load_adapter(None, &folder, false)
    }

    /// Folds the adapter, if there is one, into the weights: the sum is made in f32, and held so from now on. A model that
    /// was held in fewer bits is saved as f32, unless [`CausalLm::hold_as_computed`] rounds it again.
    pub fn merge_adapter(&mut self) {
        self.body.merge_adapter(None);
    }

    /// Holds each matrix in the dtype that products are done in, where that needs no more memory: a model that stays frozen
    /// gives the same numbers, bit for bit, from less. Norms and embeddings, and what learns or lies in another model's
    /// memory, stay as they are. Saved, it is rounded so.
    pub fn hold_as_computed(&mut self) {
        let own_head = !self.body.config.tie_word_embeddings;
        self.body.hold_as_computed(own_head.then_some(&mut self.lm_head));
    }

    /// Makes what was read ready to be trained: an adapter that is there already becomes part of the weights. Beside an
    /// adapter that it gets these are held as they are computed with, else in f32.
    pub(crate) fn prepare(&mut self, gets_adapter: bool) {
        self.merge_adapter();
        if gets_adapter { self.hold_as_computed() } else { self.body.hold_as_f32() }
    }

    /// Whether tensors were rounded to the dtype that was asked for when they were read.
    pub(crate) fn was_rounded(&self) -> bool {
        self.body.rounded
    }

    /// The dtype that the base of the adapter was rounded to, where it has to be saved, as no folder holds it.
    pub(crate) fn rounded_base(&self) -> Option<Kind> {
        self.body.rounded_base()
    }

    /// The model with its adapter off: a view of the same weights, which costs no memory but for copies of them in the dtype of
    /// products, where that is narrower.
    ///
    /// # Errors
    /// None that a model which was built can have.
    pub fn base(&self) -> Result<Self> {
        self.viewing(&self.body.params, self.body.params.len())
    }

    /// A model of this one's shape and arithmetic that holds the memory of `params`, the first `shared` of them another's.
    fn viewing(&self, params: &[Param], shared: usize) -> Result<Self> {
        let precision = match self.body.decoder.compute {
            Kind::Float => Precision::F32,
            Kind::Half => Precision::F16,
            _ => Precision::Bf16,
        };
        let options = ModelOptions { device: self.body.device, dtype: Dtype::Auto, precision };
        let source = Source::Shared(params);
        let (mut model, ()) = Self::build(self.body.config.clone(), source, options, &[], |_, _| Ok(()))?;
        (model.body.kind, model.body.shared) = (self.body.kind, shared);
        Ok(model)
    }

    /// Freezes the embeddings and the first `layers` layers for good, and gives a frozen copy of the model that shares them: they
    /// are held once.
    ///
    /// # Errors
    /// If no layer would be left to learn.
    pub fn share_lower_layers(&mut self, layers: usize) -> Result<Self> {
        let first = format!("{}.{layers}.", self.body.config.family.names.layers);
        let Some(shared) = self.body.params.iter().position(|param| param.name.starts_with(&first)) else {
            let most = self.body.config.num_hidden_layers - 1;
            return Err(Error::Usage(format!(
                "num_shared_layers = {layers}: expected at most {most}, so that a layer is left to learn"
            )));
        };
        self.body.num_frozen = shared;
        self.body.set_trainable(false);
        self.copy_sharing(shared)
    }

    /// A frozen copy of the model as it is now.
    ///
    /// # Errors
    /// None that a model which was built can have.
    pub fn frozen_copy(&self) -> Result<Self> {
        self.copy_sharing(0)
    }

    /// A copy that shares the memory of the first `shared` parameters.
    fn copy_sharing(&self, shared: usize) -> Result<Self> {
        let copies = self.body.params.iter().enumerate().map(|(at, Param { name, tensor, decay })| {
            let tensor = if at < shared { tensor.shallow_clone() } else { tensor.detach().copy() };
            Param { name: name.clone(), tensor, decay: *decay }
        });
        self.viewing(&copies.collect::<Vec<_>>(), shared)
    }

    /// Whether there is an adapter beside the weights.
    pub fn has_adapter(&self) -> bool {
        self.body.adapter.is_some()
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
        mut config: ModelConfig,
        source: Source<'_>,
        options: ModelOptions,
        ignored: &[&str],
        extra: impl FnOnce(&mut Builder<'_>, &Shape) -> Result<T>,
    ) -> Result<(Self, T)> {
        let names = &config.family.names;
        let (held, compute) = options.kinds(source);
        let mut builder = Builder::new(source, names, options.device, options.dtype.kind());
        builder.set_tied(config.tie_word_embeddings);
        let decoder = Decoder::new(&config, &mut builder, compute)?;
        // As transformers 5: a head in the file with other values than the embedding's is a head of its own.
        if config.tie_word_embeddings && builder.holds_other(names.lm_head, &decoder.embedding())? {
            config.untie();
        }
        let head = if config.tie_word_embeddings {
            decoder.embedding()
        } else {
            let shape = [config.vocab_size, config.embedding_size];
            builder.tensor(names.lm_head.into(), &shape, Init::Normal(config.initializer_range), true)?
        };
        let extra = extra(&mut builder, &config)?;
        // Some tied checkpoints hold the head too; it is the embedding again.
        let tied = config.tie_word_embeddings.then_some(names.lm_head);
        let rounded = builder.has_rounded();
        let params = builder.finish(&[ignored, tied.as_slice()].concat())?;
        let lm_head = Linear::new(head, None, compute);
        let body = Body { rounded, ..Body::new(decoder, params, config, options.device, held) };
        Ok((Self { body, lm_head }, extra))
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.body.config
    }

    /// Whether the same tokens give the same numbers, up to f32 rounding, in any company, and while decoding: the model computes in f32
    /// throughout, on the processor (a GPU chooses its sums by the shape of the batch), and its rotary angles do not depend on
    /// the length of the text.
    pub fn is_exact(&self) -> bool {
        self.body.decoder.compute == Kind::Float && self.body.device == Device::Cpu && !self.config().turns_by_length()
    }

    /// Where the model lives.
    pub fn device(&self) -> Device {
        self.body.device
    }

    /// The parameters, in the order of the model; those of an adapter come last.
    pub fn params(&self) -> &[Param] {
        &self.body.params
    }

    /// The parameters that gradients reach: after [`CausalLm::set_trainable`] all, or those of the adapter.
    pub fn trainable_params(&self) -> impl Iterator<Item = &Param> {
        self.body.trainable_params()
    }

    /// Whether gradients reach the weights; where there is an adapter, its own only.
    pub fn set_trainable(&mut self, trainable: bool) {
        self.body.set_trainable(trainable);
    }

    /// Whether training keeps only what goes into each layer, and computes the layer again on the way back: less memory, about
    /// a third more work, the same gradients.
    pub fn set_gradient_checkpointing(&mut self, on: bool) {
        self.body.gradient_checkpointing = on;
    }

    /// Bytes that a token leaves in memory on its way forward through the layers, for the way back; about.
    pub fn activation_bytes(&self, gradient_checkpointing: bool) -> usize {
        self.body.activation_bytes(gradient_checkpointing)
    }

    /// Logits of every position, one `[length, vocab]` f32 tensor per sequence. For small things: all are in memory.
    ///
    /// # Errors
    /// If a sequence is empty, too long, or holds an id outside the vocabulary.
    pub fn logits<S: AsRef<[i64]>>(&self, sequences: &[S]) -> Result<Vec<Tensor>> {
        let (layout, hidden) = self.body.hidden(sequences)?;
        Ok(self.head(&hidden).to_kind(Kind::Float).split_with_sizes(&layout.lens, 0))
    }

    /// Hidden states after the final norm, one `[length, hidden]` f32 tensor per sequence; errors as [`CausalLm::logits`].
    pub fn hidden_states<S: AsRef<[i64]>>(&self, sequences: &[S]) -> Result<Vec<Tensor>> {
        let (layout, hidden) = self.body.hidden(sequences)?;
        Ok(hidden.split_with_sizes(&layout.lens, 0))
    }

    /// Log-probabilities of the tokens at `spans` of each sequence under softmax(logits / temperature), or under what
    /// [`Sampled`] makes of it.
    ///
    /// A span may be empty and may not begin at 0: nothing comes before the first token. With M tokens in all spans, the
    /// results are `[M]`. The head is applied to these tokens only.
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
        self.body.check_spans(sequences, spans, 1)?;
        let (sampled, targets) = (sampled.into(), self.targets(sequences, spans));
        sampled.check(targets.size()[0])?;
        // Each token is predicted at the position before it.
        let hidden = self.body.hidden_at(sequences, spans, -1)?;
        Ok(self.logprobs_of(&hidden, &targets, sampled, with_entropy))
    }

    /// KL divergence from this model's distribution to that of `other`, both under softmax(logits / temperature), or what
    /// [`Sampled`] makes of it, where each token at `spans` was drawn: `[M]` f32, exact over the whole vocabulary. Not differentiable.
    ///
    /// Logits are held a slice at a time, as in [`CausalLm::token_logprobs`].
    ///
    /// # Errors
    /// As [`CausalLm::token_logprobs`]; if the two vocabularies are of different sizes.
    pub fn kl_to<'a, S: AsRef<[i64]>>(
        &self,
        other: &Self,
        sequences: &[S],
        spans: &[Range<usize>],
        sampled: impl Into<Sampled<'a>>,
    ) -> Result<Tensor> {
        self.check_vocabulary(other.config().vocab_size)?;
        self.body.check_spans(sequences, spans, 1)?;
        let sampled = sampled.into();
        sampled.check(spans.iter().map(|span| span.len() as i64).sum())?;
        tch::no_grad(|| {
            let hidden = self.body.hidden_at(sequences, spans, -1)?;
            let others = other.body.hidden_at(sequences, spans, -1)?;
            let parts: Vec<Tensor> = self
                .slices(hidden.size()[0])
                .map(|range| {
                    let count = range.end - range.start;
                    let excluded = sampled.excluded(range.start, count, self.config().vocab_size, self.device());
                    let logprobs = |model: &Self, hidden: &Tensor| {
                        let hidden = hidden.narrow(0, range.start, count);
                        let logits = match uses_kernels(model.body.decoder.compute, hidden.device()) {
                            true => model.head(&with_rounded_rows(&hidden)).narrow(0, 0, count),
                            false => model.head(&hidden),
                        };
                        let logits = logits.to_kind(Kind::Float) / sampled.temperature;
                        restricted(&logits, excluded.as_ref()).log_softmax(-1, Kind::Float)
                    };
                    divergence_of(&logprobs(self, &hidden), &logprobs(other, &others))
                })
                .collect();
            Ok(if parts.is_empty() { Tensor::zeros([0], (Kind::Float, self.device())) } else { Tensor::cat(&parts, 0) })
        })
    }

    /// The distributions that the tokens at `spans` of each sequence are drawn from, for
    /// [`CausalLm::learn_logprobs_and_kl`]: a hidden state per token is kept, and no logits.
    ///
    /// # Errors
    /// As [`CausalLm::token_logprobs`].
    pub fn distributions<S: AsRef<[i64]>>(&self, sequences: &[S], spans: &[Range<usize>]) -> Result<Distributions> {
        self.body.check_spans(sequences, spans, 1)?;
        let compute = self.body.decoder.compute;
        let hidden = tch::no_grad(|| self.body.hidden_at(sequences, spans, -1))?.to_kind(compute);
        let lens: Vec<i64> = spans.iter().map(|span| span.len() as i64).collect();
        let head = Linear::new(self.lm_head.weight().0.detach(), None, compute);
        Ok(Distributions { hidden: hidden.split_with_sizes(&lens, 0), head, softcap: self.body.config.final_softcap })
    }

    fn check_vocabulary(&self, others: i64) -> Result<()> {
        let own = self.config().vocab_size;
        if own == others {
            return Ok(());
        }
        Err(Error::Run(format!("KL over the vocabulary: expected another of {own} tokens, found {others}")))
    }

    /// [`CausalLm::token_logprobs`], detached, with the way back: adds the gradients of a loss to those of the parameters.
    ///
    /// `loss` gets the log-probabilities (and entropies) of some of the M tokens at a time, with their range among the M, and
    /// gives its share of the loss, a scalar; what the loss says of one token may depend on that token alone. So logits are
    /// consumed where they lie, in slices: none are kept.
    ///
    /// # Errors
    /// As [`CausalLm::token_logprobs`]; if the model is frozen.
    pub fn learn_logprobs<'a, S: AsRef<[i64]>>(
        &self,
        sequences: &[S],
        spans: &[Range<usize>],
        sampled: impl Into<Sampled<'a>>,
        with_entropy: bool,
        loss: impl FnMut(Range<i64>, &TokenLogprobs) -> Tensor,
    ) -> Result<TokenLogprobs> {
        self.learn_logprobs_dropping(sequences, spans, sampled, with_entropy, None, loss)
    }

    /// [`CausalLm::learn_logprobs`] with dropout in front of the adapters.
    ///
    /// # Errors
    /// As [`CausalLm::token_logprobs`].
    pub(crate) fn learn_logprobs_dropping<'a, S: AsRef<[i64]>>(
        &self,
        sequences: &[S],
        spans: &[Range<usize>],
        sampled: impl Into<Sampled<'a>>,
        with_entropy: bool,
        dropout: Option<&DropoutRows>,
        loss: impl FnMut(Range<i64>, &TokenLogprobs) -> Tensor,
    ) -> Result<TokenLogprobs> {
        let extras = Extras { entropy: with_entropy, dropout, reference: None };
        self.learn_slices(sequences, spans, sampled.into(), extras, loss)
    }

    /// [`CausalLm::learn_logprobs`] with the KL divergence to another model's distributions at the same tokens, which are
    /// those of `reference.1` among the sequences of `reference.0`.
    ///
    /// # Errors
    /// As [`CausalLm::learn_logprobs`]; if the distributions are of another vocabulary, or of other tokens by their number.
    pub fn learn_logprobs_and_kl<'a, S: AsRef<[i64]>>(
        &self,
        sequences: &[S],
        spans: &[Range<usize>],
        sampled: impl Into<Sampled<'a>>,
        with_entropy: bool,
        reference: (&Distributions, &[usize]),
        loss: impl FnMut(Range<i64>, &TokenLogprobs) -> Tensor,
    ) -> Result<TokenLogprobs> {
        let (of, rows) = reference;
        self.check_vocabulary(of.vocab_size())?;
        let found: Vec<i64> =
            rows.iter().map(|&row| of.hidden.get(row).map_or(-1, |hidden| hidden.size()[0])).collect();
        if rows.is_empty() || !spans.iter().map(|span| span.len() as i64).eq(found) {
            return Err(Error::Run(
                "KL over the vocabulary: expected a distribution for each token, found others".into(),
            ));
        }
        let extras = Extras { entropy: with_entropy, dropout: None, reference: Some(reference) };
        self.learn_slices(sequences, spans, sampled.into(), extras, loss)
    }

    fn learn_slices<S: AsRef<[i64]>>(
        &self,
        sequences: &[S],
        spans: &[Range<usize>],
        sampled: Sampled<'_>,
        extras: Extras<'_>,
        loss: impl FnMut(Range<i64>, &TokenLogprobs) -> Tensor,
    ) -> Result<TokenLogprobs> {
        self.body.check_spans(sequences, spans, 1)?;
        let targets = self.targets(sequences, spans);
        sampled.check(targets.size()[0])?;
        let (with_entropy, reference) = (extras.entropy, extras.reference);
        let reference = reference.map(|(of, rows)| {
            let parts: Vec<&Tensor> = rows.iter().map(|&row| &of.hidden[row]).collect();
            (of, Tensor::cat(&parts, 0))
        });
        let mut found = None;
        self.body.learn(sequences, spans, -1, extras.dropout, |hidden| {
            let (logprobs, gradient) =
                self.logprobs_gradient(hidden, &targets, sampled, with_entropy, reference.as_ref(), loss);
            found = Some(logprobs);
            Ok(Some(gradient))
        })?;
        Ok(found.unwrap_or_else(|| Slices::new(with_entropy, reference.is_some()).join(self.body.device)))
    }

    /// Log-probabilities of `targets` `[M]` at the hidden states `[M, embedding size]`, detached, and the gradient of `loss` there;
    /// that of the head's weight is added to what it holds. With `reference` also the divergence to its distributions at these of
    /// its own states.
    fn logprobs_gradient(
        &self,
        hidden: &Tensor,
        targets: &Tensor,
        sampled: Sampled<'_>,
        with_entropy: bool,
        reference: Option<&(&Distributions, Tensor)>,
        mut loss: impl FnMut(Range<i64>, &TokenLogprobs) -> Tensor,
    ) -> (TokenLogprobs, Tensor) {
        let mut found = Slices::new(with_entropy, reference.is_some());
        let gradient = hidden.zeros_like();
        let (temperature, vocab) = (sampled.temperature, self.body.config.vocab_size);
        // These know nothing of a second distribution, nor of a part of the vocabulary.
        let by_kernels = self.body.config.final_softcap.is_none()
            && reference.is_none()
            && sampled.sets.is_none()
            && uses_kernels(self.body.decoder.compute, hidden.device());
        let (weight, used) = self.lm_head.weight();
        let mut buffer: Option<Tensor> = None;
        for range in self.slices(hidden.size()[0]) {
            let count = range.end - range.start;
            let slice = |x: &Tensor| x.narrow(0, range.start, count);
            let (hidden, targets, mut gradient) = (slice(hidden).detach(), slice(targets), slice(&gradient));
            if !by_kernels {
                let hidden = hidden.set_requires_grad(true);
                let excluded = sampled.excluded(range.start, count, vocab, hidden.device());
                let theirs = reference.map(|(of, states)| {
                    tch::no_grad(|| match &excluded {
                        None => of.logprobs(&slice(states), temperature),
                        some => restricted(&of.logprobs(&slice(states), temperature), some.as_ref())
                            .log_softmax(-1, Kind::Float),
                    })
                });
                let now = self.plain_logprobs(
                    &hidden,
                    &targets,
                    temperature,
                    with_entropy,
                    excluded.as_ref(),
                    theirs.as_ref(),
                );
                loss(range, &now).backward();
                gradient.copy_(&hidden.grad());
                found.push(now.detached());
                continue;
            }
            let hidden = with_rounded_rows(&hidden.to_kind(used.kind()));
            let rows = hidden.size()[0];
            let shape = [rows, vocab];
            // The first slice is the longest.
            let buffer = buffer.get_or_insert_with(|| Tensor::empty(shape, (used.kind(), used.device())));
            let mut all = buffer.narrow(0, 0, rows);
            tch_ext::product_into(&mut all, &hidden, &used.tr());
            let mut logits = all.narrow(0, 0, count);
            let stats = tch_ext::logits_stats(&logits, temperature, &targets, with_entropy);
            let now = TokenLogprobs {
                logprobs: stats.logprobs.set_requires_grad(true),
                entropy: stats.entropy.map(|entropy| entropy.set_requires_grad(true)),
                kl: None,
            };
            loss(range, &now).backward();
            let slope = now.logprobs.grad();
            let slope = if slope.defined() { slope } else { now.logprobs.detach().zeros_like() };
            let entropy = now.entropy.as_ref().map(|entropy| (entropy.detach(), entropy.grad()));
            let entropy = entropy.as_ref().filter(|(_, slope)| slope.defined()).map(|(value, slope)| (value, slope));
            tch_ext::logits_gradient(&mut logits, temperature, &targets, &stats.lse, &slope, entropy);
            let _ = all.narrow(0, count, rows - count).zero_();
            let mut back = hidden.empty_like();
            tch_ext::product_into(&mut back, &all, &used);
            gradient.copy_(&back.narrow(0, 0, count));
            if weight.requires_grad() {
                tch_ext::add_product_to_grad(weight, &all.tr(), &hidden);
            }
            found.push(now.detached());
        }
        (found.join(self.body.device), gradient)
    }

    /// The tokens at `spans`, `[M]` i64.
    fn targets<S: AsRef<[i64]>>(&self, sequences: &[S], spans: &[Range<usize>]) -> Tensor {
        let pairs = sequences.iter().zip(spans);
        let targets: Vec<i64> = pairs.flat_map(|(s, span)| &s.as_ref()[span.clone()]).copied().collect();
        Tensor::from_slice(&targets).to_device(self.body.device)
    }

    /// Ranges of rows whose logits may be held at once.
    fn slices(&self, rows: i64) -> impl Iterator<Item = Range<i64>> + use<> {
        let most = (LOGITS_CHUNK / self.body.config.vocab_size).max(1);
        // About equal, as a short one at the end would be a product of a poor shape; and of few different sizes.
        let share = rows.max(1).unsigned_abs().div_ceil(rows.unsigned_abs().div_ceil(most.unsigned_abs()).max(1));
        let len = rounded(share as i64).min(if most < 64 { most } else { most / 32 * 32 });
        (0..rows).step_by(len as usize).map(move |from| from..(from + len).min(rows))
    }

    /// Log-probabilities of `targets` `[M]` at the hidden states `[M, embedding size]`.
    fn logprobs_of(
        &self,
        hidden: &Tensor,
        targets: &Tensor,
        sampled: Sampled<'_>,
        with_entropy: bool,
    ) -> TokenLogprobs {
        let temperature = sampled.temperature;
        let by_kernels = !hidden.requires_grad()
            && sampled.sets.is_none()
            && uses_kernels(self.body.decoder.compute, hidden.device());
        let mut found = Slices::new(with_entropy, false);
        for range in self.slices(hidden.size()[0]) {
            let slice = |x: &Tensor| x.narrow(0, range.start, range.end - range.start);
            let (hidden, targets) = (slice(hidden), slice(targets));
            found.push(match by_kernels {
                true => {
                    let logits = self.head(&with_rounded_rows(&hidden)).narrow(0, 0, targets.size()[0]);
                    let stats = tch_ext::logits_stats(&logits, temperature, &targets, with_entropy);
                    TokenLogprobs { logprobs: stats.logprobs, entropy: stats.entropy, kl: None }
                }
                false => {
                    let count = range.end - range.start;
                    let excluded = sampled.excluded(range.start, count, self.config().vocab_size, hidden.device());
                    self.plain_logprobs(&hidden, &targets, temperature, with_entropy, excluded.as_ref(), None)
                }
            });
        }
        found.join(self.body.device)
    }

    /// [`CausalLm::logprobs_of`] by libtorch's own operations, differentiable, all logits at once; with the divergence to
    /// `others`, log-probabilities `[M, vocab]`, where they are given.
    fn plain_logprobs(
        &self,
        hidden: &Tensor,
        targets: &Tensor,
        temperature: f64,
        with_entropy: bool,
        excluded: Option<&Tensor>,
        others: Option<&Tensor>,
    ) -> TokenLogprobs {
        let logits = self.head(hidden).to_kind(Kind::Float) / temperature;
        let all = restricted(&logits, excluded).log_softmax(-1, Kind::Float);
        let logprobs = all.gather(1, &targets.unsqueeze(1), false).squeeze_dim(1);
        let (entropy, kl) = (with_entropy.then(|| entropy_of(&all)), others.map(|others| divergence_of(&all, others)));
        TokenLogprobs { logprobs, entropy, kl }
    }

    /// Begins to decode: reads the prompts into a cache with room for `capacity` tokens per row.
    ///
    /// Gives the cache and the logits of each row's next token, `[rows, vocab]` f32 or bf16.
    pub(crate) fn prefill<S: AsRef<[i64]>>(&self, prompts: &[S], capacity: usize) -> Result<(KvCache, Tensor)> {
        self.body.check(prompts)?;
        let layout = self.body.padded_layout(prompts);
        let mut cache = self.body.decoder.new_cache(prompts.len(), capacity)?;
        let last: Vec<_> = layout.lens.iter().map(|&len| len as usize - 1..len as usize).collect();
        let last = self.body.rows_at(&layout, &last, 0);
        let hidden = self.body.decoder.forward(&layout, Some(&mut cache), Some(&last), None);
        Ok((cache, self.head(&hidden)))
    }

    /// Appends one token to every row of the cache, `tokens` `[rows]` i64; gives the logits of the next, `[rows, vocab]` f32 or
    /// bf16. Neither waits for the device nor copies anything to it.
    pub(crate) fn decode(&self, tokens: &Tensor, cache: &mut KvCache) -> Tensor {
        self.head(&self.body.decoder.forward_step(tokens, cache))
    }

    /// Logits of hidden states, `[M, vocab]` in the dtype of products, or f32.
    fn head(&self, hidden: &Tensor) -> Tensor {
        capped(self.lm_head.forward(hidden), self.body.config.final_softcap)
    }

    /// Writes the base of an adapter to `dir` where no folder holds it, for all adapters that are saved from now on.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(crate) fn keep_base(
        &mut self,
        dir: &Path,
        eos: &[i64],
        pad: Option<i64>,
        max_shard_bytes: usize,
    ) -> Result<()> {
        let config = self.body.config.for_causal_lm(eos.first().copied(), pad);
        self.body.keep_base(dir, &config, max_shard_bytes)
    }

    /// Has [`CausalLm::save_pretrained`] note how text is to be generated, by the names of transformers' generation
    /// configuration, in place of what the model came with.
    pub fn set_generation(&mut self, settings: Map<String, Value>) {
        self.body.config.set_generation(settings);
    }

    /// Reads the trained weights that [`CausalLm::save_pretrained`] wrote to `dir` back into this model.
    ///
    /// # Errors
    /// If they are not there, or not of a model like this one.
    pub(crate) fn load_trained(&mut self, dir: &Path) -> Result<()> {
        self.body.load_trained(dir, |_| None)
    }

    /// Writes `config.json`, `generation_config.json` and the weights below `dir`; transformers reads them.
    ///
    /// Of a model with an adapter it writes the adapter, as PEFT does: the base stays where it was read from, and is written
    /// to `dir/base_model` if it was not read from a folder or has changed since.
    ///
    /// `eos`, the one to append first, and `pad` are noted where they are given; all of `eos` end what is generated. Weights
    /// of more than `max_shard_bytes` go to several files.
    ///
    /// # Errors
    /// If a file cannot be written; the folder then holds what it held.
    pub fn save_pretrained(&self, dir: &Path, eos: &[i64], pad: Option<i64>, max_shard_bytes: usize) -> Result<()> {
        let config = self.body.config.for_causal_lm(eos.first().copied(), pad);
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
        replace_files(dir, |dir| {
            self.body.save(dir, &config, max_shard_bytes)?;
            weights::write_text(&dir.join("generation_config.json"), &weights::pretty(&generation.into()))
        })
    }
}

/// What [`CausalLm::learn_slices`] does beside taking log-probabilities.
#[derive(Clone, Copy, Default)]
struct Extras<'a> {
    /// Entropies too.
    entropy: bool,
    /// Dropout in front of the adapters.
    dropout: Option<&'a DropoutRows>,
    /// The divergence from these of its sequences too.
    reference: Option<(&'a Distributions, &'a [usize])>,
}

/// Log-probabilities that come a slice at a time.
struct Slices {
    logprobs: Vec<Tensor>,
    entropy: Option<Vec<Tensor>>,
    kl: Option<Vec<Tensor>>,
}

impl Slices {
    fn new(with_entropy: bool, with_kl: bool) -> Self {
        Self { logprobs: Vec::new(), entropy: with_entropy.then(Vec::new), kl: with_kl.then(Vec::new) }
    }

    fn push(&mut self, slice: TokenLogprobs) {
        self.logprobs.push(slice.logprobs);
        for (parts, part) in [(&mut self.entropy, slice.entropy), (&mut self.kl, slice.kl)] {
            parts.iter_mut().for_each(|parts| parts.extend(part.as_ref().map(Tensor::shallow_clone)));
        }
    }

    fn join(self, device: Device) -> TokenLogprobs {
        let join = |parts: Vec<Tensor>| match parts.len() {
            0 => Tensor::zeros([0], (Kind::Float, device)),
            _ => Tensor::cat(&parts, 0),
        };
        TokenLogprobs { logprobs: join(self.logprobs), entropy: self.entropy.map(&join), kl: self.kl.map(join) }
    }
}

/// Distributions of a frozen model over its vocabulary, kept as what its head makes them of: a hidden state per token.
#[derive(Debug)]
pub struct Distributions {
    /// `[tokens, embedding size]` of each sequence, in the dtype of products.
    hidden: Vec<Tensor>,
    head: Linear,
    softcap: Option<f64>,
}

impl Distributions {
    /// The same model's distributions of more sequences, behind these.
    pub fn extend(&mut self, more: Self) {
        self.hidden.extend(more.hidden);
    }

    fn vocab_size(&self) -> i64 {
        self.head.widths()[1]
    }

    /// Log-probabilities of a slice of hidden states, `[rows, vocab]` f32.
    fn logprobs(&self, hidden: &Tensor, temperature: f64) -> Tensor {
        let logits = capped(self.head.forward(hidden), self.softcap);
        (logits.to_kind(Kind::Float) / temperature).log_softmax(-1, Kind::Float)
    }
}

/// Logits under a family's soft cap, if it has one.
fn capped(logits: Tensor, cap: Option<f64>) -> Tensor {
    match cap {
        Some(cap) => (logits.to_kind(Kind::Float) / cap).tanh() * cap,
        None => logits,
    }
}

/// `hidden` with rows of 0 behind it, so that their number is a round one.
fn with_rounded_rows(hidden: &Tensor) -> Tensor {
    let count = hidden.size()[0];
    hidden.constant_pad_nd([0, 0, 0, rounded(count) - count])
}

/// Entropy in nats of each row of log-probabilities, [M, vocab] to `[M]`.
fn entropy_of(logprobs: &Tensor) -> Tensor {
    // As a product of a row and a column: no third tensor of this size comes to be.
    -logprobs.exp().unsqueeze(1).bmm(&logprobs.unsqueeze(2)).view([-1])
}

/// KL(p || q) in nats of each row of log-probabilities, [M, vocab] to `[M]`.
fn divergence_of(p: &Tensor, q: &Tensor) -> Tensor {
    p.exp().unsqueeze(1).bmm(&(p - q).unsqueeze(2)).view([-1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_divergence_is_not_symmetric_and_that_of_trl_0_11() {
        let row = |logits: &[f32]| Tensor::from_slice(logits).log_softmax(-1, Kind::Float).unsqueeze(0);
        let (p, q) = (row(&[1.0, 1.0, 0.0]), row(&[0.0, 1.0, 2.0]));
        let found = |p: &Tensor, q: &Tensor| divergence_of(p, q).double_value(&[0]);
        assert!((found(&p, &q) - 0.657205).abs() < 1e-6, "{}", found(&p, &q)); // TRL 0.11.4, kl_penalty = full
        assert!((found(&q, &p) - found(&p, &q)).abs() > 1e-2);
        assert_eq!(found(&p, &p), 0.0);
    }
}
