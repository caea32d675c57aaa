//! A model's parameters: named as in its checkpoint, read strictly or newly initialized.

use super::mxfp4;
use super::quantized::{Quantization, Quantized};
use super::shape::{ExpertNames, HeadNames, Names};
use rlhf_base::rng::{Purpose, Stream};
use rlhf_base::weights::{Checkpoint, brief, is_beside_codes, not_finite};
use rlhf_base::{Error, Result};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use tch::{Device, Kind, Tensor};

/// One trainable tensor of a model.
#[derive(Debug)]
pub struct Param {
    /// Its name in the checkpoint, which is the Hugging Face name.
    pub name: String,
    /// The tensor, in the dtype that it is held in; shares memory with the model. For a quantized weight these are the codes; the tensors
    /// stored with them are further parameters.
    pub tensor: Tensor,
    /// Whether weight decay applies. As in transformers, it does not apply to norms and biases, including biases of attention by distance.
    pub decay: bool,
    /// Whether it is an embedding, whose rows are looked up: of tokens, positions or distances.
    pub embedding: bool,
    /// Whether it is never trained: a number that transformers stores beside the parameters (a buffer).
    pub fixed: bool,
}

impl Param {
    /// Number of values; for a quantized weight, the number of values that its codes stand for.
    pub fn numel(&self) -> usize {
        let numel = self.tensor.numel();
        match self.tensor.kind() {
            _ if is_beside_codes(&self.name) => 0,
            // Two values per byte. For an odd number of values, the padding of the last byte is counted too.
            Kind::Uint8 => 2 * numel,
            _ => numel,
        }
    }

    /// Whether it is a quantized weight or belongs to one, so that it cannot be trained.
    pub fn is_quantized(&self) -> bool {
        matches!(self.tensor.kind(), Kind::Uint8 | Kind::Int8) || is_beside_codes(&self.name)
    }
}

/// Initialization of a tensor that comes from no checkpoint.
#[derive(Debug, Clone, Copy)]
pub enum Init {
    Zeros,
    Ones,
    Normal(f64),
    /// Logarithms of uniform random numbers between two bounds.
    LogUniform([f64; 2]),
}

/// Source of a model's tensors.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    Checkpoint(&'a Checkpoint),
    /// Initialized from the seed.
    Fresh(u64),
    /// The memory of another model of the same shape.
    Shared(&'a [Param]),
    /// No values: the tensors have only shapes and this dtype, and take no memory.
    Shapes(Kind),
}

/// Prefix of the base model's tensor names in DeepSpeed-Chat's reward models.
pub(crate) const DEEPSPEED_CHAT: &str = "rwtransformer.";

/// Prefixes of the language model's tensor names in models for text and images, in transformers 5's order of modules and in the older one,
/// and prefixes of the tensor names of the other parts.
const TEXT_PARTS: [&str; 2] = ["model.language_model.", "language_model.model."];
const OTHER_PARTS: [&str; 7] = [
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.embed_audio.",
];

/// Prefix of the names of the language model's head in the older order.
const TEXT_HEAD: &str = "language_model.";

/// Names of the tensors with the weights of all experts of a layer: gates and up projections, and down projections.
const FUSED: [&str; 2] = ["gate_up_proj", "down_proj"];

/// Number of random numbers drawn before they are copied into their tensor.
const DRAWN_AT_ONCE: usize = 1 << 20;

/// Provides a model's tensors by name while the model is built, and records which tensors were requested.
pub struct Builder<'a> {
    source: Source<'a>,
    names: &'static Names,
    device: Device,
    /// The dtype of the tensors; `None`: that of the checkpoint, or f32.
    hold: Option<Kind>,
    /// The format that weights of linear layers are quantized to.
    quantization: Option<Quantization>,
    /// Whether quantized weights of the checkpoint become plain.
    unpacks: bool,
    /// Whether a tensor of the checkpoint was rounded to the dtype in `hold`.
    rounded: bool,
    /// The checkpoint's prefix of names that start with `names.prefix` here.
    stored_prefix: &'static str,
    /// Whether the LM head is the embedding, so that a checkpoint may hold it under either name.
    tied: bool,
    /// The seed of tensors that the checkpoint lacks; `None`: they are missing.
    absent: Option<u64>,
    /// Weights of experts that the checkpoint holds in one tensor for all of a layer, by the names of the model.
    fused: HashMap<String, Tensor>,
    params: Vec<Param>,
    asked: HashSet<String>,
    missing: Vec<String>,
    mismatched: Vec<String>,
}

/// The prefixes that checkpoints may have in place of the model's own. The model's own is tried last, since another one begins with it.
fn prefixes(names: &Names) -> [&'static str; 4] {
    [TEXT_PARTS[0], TEXT_PARTS[1], DEEPSPEED_CHAT, names.prefix]
}

/// The model's name of a tensor or layer that a checkpoint calls `stored`, with any of the known prefixes.
pub(crate) fn model_name(names: &Names, stored: &str) -> String {
    let rest = prefixes(names).into_iter().find_map(|prefix| stored.strip_prefix(prefix));
    format!("{}{}", names.prefix, rest.unwrap_or(stored))
}

/// The weights of a checkpoint by their names in the model, as they are in its files.
pub(super) struct Files<'a>(Builder<'a>, &'a Checkpoint);

impl<'a> Files<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint, names: &'static Names) -> Self {
        Self(Builder::new(Source::Checkpoint(checkpoint), names, Device::Cpu, Some(Kind::Float)), checkpoint)
    }

    /// The weight of the linear layer `base`, in f32; `None` if it is quantized in the file.
    ///
    /// # Errors
    /// If the file cannot be read, or lacks it.
    pub(super) fn plain(&self, base: &str, device: Device) -> Result<Option<Tensor>> {
        let Self(builder, checkpoint) = self;
        let stored = builder.stored_name(checkpoint, &format!("{base}.weight"));
        if checkpoint.holds_codes(&stored) {
            return Ok(None);
        }
        checkpoint.read(&stored, device, Kind::Float).map(Some)
    }
}

impl<'a> Builder<'a> {
    pub fn new(source: Source<'a>, names: &'static Names, device: Device, hold: Option<Kind>) -> Self {
        let stored_prefix = match source {
            Source::Fresh(_) | Source::Shared(_) | Source::Shapes(_) => names.prefix,
            Source::Checkpoint(checkpoint) => {
                let used = |prefix: &&str| checkpoint.names().any(|name| name.starts_with(prefix));
                // Some checkpoints (OpenAI's GPT-2) omit the prefix.
                prefixes(names).into_iter().find(used).unwrap_or("")
            }
        };
        let (fused, params, asked) = (HashMap::new(), Vec::new(), HashSet::new());
        let (missing, mismatched) = (Vec::new(), Vec::new());
        let (rounded, tied, absent) = (false, false, None);
        let (quantization, unpacks) = (None, false);
        Self {
            source,
            names,
            device,
            hold,
            quantization,
            unpacks,
            rounded,
            stored_prefix,
            tied,
            absent,
            fused,
            params,
            asked,
            missing,
            mismatched,
        }
    }

    /// Sets the format that the weights of the next linear layers are quantized to; `None`: they stay as they are. The weights of a model
    /// that is quantized already also stay as they are: its plain layers were left plain on purpose.
    pub fn quantize_to(&mut self, quantization: Option<Quantization>) {
        let is_quantized = || match self.source {
            // The dtype alone does not tell: masks of older checkpoints are bytes too.
            Source::Checkpoint(checkpoint) => !checkpoint.coded_layers().is_empty(),
            Source::Shared(params) => params.iter().any(Param::is_quantized),
            Source::Fresh(_) | Source::Shapes(_) => false,
        };
        self.quantization = quantization.filter(|_| !is_quantized());
    }

    /// The weight of the linear layer `base` if it is quantized: in the checkpoint, in the model whose memory is shared, or because
    /// weights are quantized when they are loaded. A plain weight is `[out, in]`, or `[in, out]` if `transposed`.
    pub(super) fn quantized(
        &mut self,
        base: &str,
        widths: [i64; 2],
        transposed: bool,
        init: Init,
    ) -> Result<Option<Quantized>> {
        let name = format!("{base}.weight");
        let existing = match self.source {
            Source::Shared(params) => {
                let find = |name: &str| params.iter().find(|param| param.name == name);
                let mut part =
                    |name: &str| -> Result<Option<Tensor>> { Ok(find(name).map(|param| param.tensor.shallow_clone())) };
                let is_quantized = find(&name).is_some_and(|param| param.is_quantized());
                is_quantized.then(|| Quantized::from_parts(&name, widths, Path::new(""), &mut part)).transpose()?
            }
            Source::Checkpoint(checkpoint) => {
                let stored = self.stored_name(checkpoint, &name);
                let is_read = checkpoint.holds_codes(&stored) && !self.unpacks;
                is_read.then(|| self.read_quantized(checkpoint, &stored, widths)).transpose()?
            }
            Source::Fresh(_) | Source::Shapes(_) => None,
        };
        let weight = match (existing, self.quantization.filter(|_| self.names.quantizes(base))) {
            (Some(existing), _) => existing,
            (None, None) => return Ok(None),
            (None, Some(format)) => {
                let [width_out, width_in] = widths;
                let shape = if transposed { [width_in, width_out] } else { widths };
                let weight = self.sourced(&name, &shape, init)?;
                if weight.size() != shape {
                    // A placeholder of a tensor that is missing.
                    drop(self.keep(name, weight, true));
                    return Ok(None);
                }
                let quantized = Quantized::new(&if transposed { weight.tr() } else { weight }, format);
                // The plain weight leaves a hole in the heap that the next one does not always fit into.
                tch_ext::release_memory();
                quantized
            }
        };
        for (name, tensor) in weight.parts(&name) {
            drop(self.keep(name, tensor, false));
        }
        Ok(Some(weight))
    }

    /// Reads the quantized weight `stored`, `[out, in]`, of the checkpoint.
    fn read_quantized(&mut self, checkpoint: &Checkpoint, stored: &str, widths: [i64; 2]) -> Result<Quantized> {
        let (device, asked) = (self.device, &mut self.asked);
        let mut part = |name: &str| -> Result<Option<Tensor>> {
            if checkpoint.shape(name).is_none() {
                return Ok(None);
            }
            asked.insert(name.to_string());
            // The description is read on the CPU.
            let device = if name.contains(".quant_state.") { Device::Cpu } else { device };
            let tensor = checkpoint.read_stored(name, device)?;
            // A scale that is not a number would make all of its block or row so.
            if let Some(number) = tensor.is_floating_point().then(|| not_finite(&tensor)).flatten() {
                let message = format!("tensor `{}`: expected finite numbers, found {number}", brief(name));
                return Err(Error::invalid(checkpoint.path_of(name), message));
            }
            Ok(Some(tensor))
        };
        Quantized::from_parts(stored, widths, checkpoint.path_of(stored), &mut part)
    }

    /// Whether tensors are in memory of their own, not in that of another model.
    pub fn makes_memory(&self) -> bool {
        matches!(self.source, Source::Checkpoint(_) | Source::Fresh(_))
    }

    /// Sets whether the next weights are read as plain ones even if the checkpoint holds them quantized, as for heads.
    pub fn unpack(&mut self, unpacks: bool) {
        self.unpacks = unpacks;
    }

    /// Checks that the checkpoint has at least one tensor per layer of the configuration. Otherwise a damaged number of layers would
    /// lead to a list of hundreds of thousands of missing tensors.
    pub fn check_layers(&self, layers: i64) -> Result<()> {
        let Source::Checkpoint(checkpoint) = self.source else { return Ok(()) };
        let tensors = checkpoint.names().count();
        if layers <= tensors as i64 {
            return Ok(());
        }
        let message = format!("{layers} layers in config.json: expected no more than tensors, found {tensors} tensors");
        Err(Error::invalid(checkpoint.dir(), message))
    }

    /// Sets whether the LM head is the embedding.
    pub fn set_tied(&mut self, tied: bool) {
        self.tied = tied;
    }

    /// Initializes the next tensors that the checkpoint lacks from this seed: a new head's tensors.
    pub fn set_absent(&mut self, seed: Option<u64>) {
        // A model that will be rejected is not initialized, as its sizes may be arbitrary.
        self.absent = seed.filter(|_| self.missing.is_empty() && self.mismatched.is_empty());
    }

    /// Whether the checkpoint holds the tensor `name` with other values than `tensor`'s.
    pub fn holds_other(&self, name: &str, tensor: &Tensor) -> Result<bool> {
        let Source::Checkpoint(checkpoint) = self.source else { return Ok(false) };
        let name = self.stored_name(checkpoint, name);
        match checkpoint.shape(&name) {
            None => Ok(false),
            Some(shape) if shape != tensor.size() || checkpoint.holds_codes(&name) => Ok(true),
            // If each tensor has its own dtype, the exact numbers are compared.
            Some(_) => Ok(checkpoint.read(&name, self.device, self.kind())? != tensor.to_kind(self.kind())),
        }
    }

    /// Checks that the checkpoint's copies of the embedding `embed`, for the stacks of an encoder-decoder, have the same values.
    pub fn check_copies(&self, embed: &Tensor) -> Result<()> {
        let Source::Checkpoint(checkpoint) = self.source else { return Ok(()) };
        // A placeholder of one that is missing; `finish` reports it.
        if embed.numel() == 0 {
            return Ok(());
        }
        for name in checkpoint.names().filter(|name| name.ends_with(".embed_tokens.weight")) {
            if self.holds_other(name, embed)? {
                let message = format!(
                    "tensor `{}`: expected the values of `{}.weight`, found others: encoder and decoder with embeddings of \
                     their own are not supported",
                    brief(name),
                    self.names.embed,
                );
                return Err(Error::invalid(checkpoint.dir(), message));
            }
        }
        Ok(())
    }

    /// Checks that all numbers of the tensor `name` of the checkpoint are 0, if it has one.
    pub fn check_zeros(&self, name: &str) -> Result<()> {
        let Source::Checkpoint(checkpoint) = self.source else { return Ok(()) };
        if checkpoint.shape(name).is_none() {
            return Ok(());
        }
        let largest = checkpoint.read(name, self.device, Kind::Float)?.abs().max();
        if largest.numel() == 1 && largest.double_value(&[]) == 0.0 {
            Ok(())
        } else {
            Err(Error::invalid(checkpoint.dir(), format!("tensor `{name}`: expected zeros, found others")))
        }
    }

    /// Whether there is a checkpoint that lacks the tensor `name`.
    pub fn lacks(&self, name: &str) -> bool {
        let Source::Checkpoint(checkpoint) = self.source else { return false };
        checkpoint.shape(&self.stored_name(checkpoint, name)).is_none()
    }

    /// The first of `names` that the checkpoint contains; the first name if there is no checkpoint or it contains none.
    pub fn first_stored<'n>(&self, names: &[&'n str]) -> &'n str {
        let stored = |name: &&&str| match self.source {
            Source::Fresh(_) | Source::Shared(_) | Source::Shapes(_) => false,
            Source::Checkpoint(checkpoint) => checkpoint.shape(name).is_some(),
        };
        names.iter().find(stored).unwrap_or(&names[0])
    }

    /// Whether the tensor `name` of the checkpoint belongs to another part than the language model.
    fn is_other_part(&self, name: &str) -> bool {
        let is_part = TEXT_PARTS.contains(&self.stored_prefix);
        let name = if is_part { name.strip_prefix(TEXT_HEAD).unwrap_or(name) } else { name };
        let parts = self.names.others.iter().chain(OTHER_PARTS.iter().filter(|_| is_part));
        parts.into_iter().any(|part| name.starts_with(part))
    }

    /// The parts of the checkpoint other than the language model, in words: `model.visual.* (12 tensors)`.
    pub fn left_out(&self) -> Option<String> {
        let Source::Checkpoint(checkpoint) = self.source else { return None };
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for name in checkpoint.names().filter(|name| self.is_other_part(name) && !self.asked.contains(*name)) {
            // `model.visual` or `mtp`.
            let inner = if name.starts_with("model.") { 1 } else { 0 };
            let end = name.match_indices('.').nth(inner).map_or(name.len(), |(at, _)| at);
            *counts.entry(&name[..end]).or_default() += 1;
        }
        let words = |(part, count): (&str, usize)| {
            let noun = if count == 1 { "tensor" } else { "tensors" };
            format!("{}.* ({count} {noun})", brief(part))
        };
        let parts: Vec<String> = counts.into_iter().map(words).collect();
        (!parts.is_empty()).then(|| parts.join(", "))
    }

    /// Sets the dtype of the next tensors; returns the previous one.
    pub fn hold_as(&mut self, kind: Option<Kind>) -> Option<Kind> {
        std::mem::replace(&mut self.hold, kind)
    }

    /// Whether a tensor that was read was rounded to a dtype of lower precision, or to another 16-bit dtype.
    pub fn has_rounded(&self) -> bool {
        self.rounded
    }

    /// The dtype of a tensor that comes from no checkpoint.
    fn kind(&self) -> Kind {
        self.hold.unwrap_or(Kind::Float)
    }

    /// Reads the tensor `stored` of the checkpoint in its dtype for this model.
    fn read(&mut self, checkpoint: &Checkpoint, stored: &str) -> Result<Tensor> {
        let (in_file, halves) = (checkpoint.kind_of(stored), [Kind::BFloat16, Kind::Half]);
        // `Checkpoint::read` rejects dtypes that weights cannot have.
        let kind = self.hold.unwrap_or(in_file.filter(|kind| halves.contains(kind)).unwrap_or(Kind::Float));
        self.rounded |= halves.contains(&kind) && in_file != Some(kind);
        checkpoint.read(stored, self.device, kind)
    }

    /// Returns the tensor `name` of `shape`, from the checkpoint or initialized by `init`. [`Builder::finish`] reports problems.
    pub fn tensor(&mut self, name: String, shape: &[i64], init: Init, decay: bool) -> Result<Tensor> {
        let tensor = self.sourced(&name, shape, init)?;
        Ok(self.keep(name, tensor, decay))
    }

    fn sourced(&mut self, name: &str, shape: &[i64], init: Init) -> Result<Tensor> {
        Ok(match self.source {
            Source::Fresh(seed) => self.fresh(seed, shape, init)?,
            // All elements share one element in memory.
            Source::Shapes(kind) => Tensor::f_zeros([1], (kind, self.device))?.f_expand(shape, false)?,
            Source::Shared(params) => {
                let shared = params.iter().find(|param| param.name == name);
                shared.expect("both have the same shape").tensor.shallow_clone()
            }
            Source::Checkpoint(_) if self.fused.contains_key(name) => {
                self.fused.remove(name).expect("it is there").copy()
            }
            Source::Checkpoint(checkpoint) => {
                let stored = self.stored_name(checkpoint, name);
                let is_mxfp4 = checkpoint.shape(&stored).is_none() && mxfp4::is_in(checkpoint, &stored);
                let found = if is_mxfp4 { mxfp4::shape_of(checkpoint, &stored) } else { checkpoint.shape(&stored) };
                let read = match (found, self.absent) {
                    (Some(found), _) if is_mxfp4 && found == shape => {
                        self.asked.extend(mxfp4::part_names(&stored));
                        self.rounded |= self.hold == Some(Kind::Half);
                        let kind = self.hold.unwrap_or(Kind::BFloat16);
                        Some(mxfp4::read(checkpoint, &stored, shape, (self.device, kind))?)
                    }
                    (None, Some(seed)) => Some(self.fresh(seed, shape, init)?),
                    (None, None) => {
                        self.missing.push(name.to_string());
                        None
                    }
                    (Some(_), _) if self.unpacks && shape.len() == 2 && checkpoint.holds_codes(&stored) => {
                        let weight = self.read_quantized(checkpoint, &stored, [shape[0], shape[1]])?;
                        Some(weight.values(self.kind()))
                    }
                    (Some(found), _) if found != shape => {
                        self.mismatched.push(format!("tensor `{stored}`: expected {shape:?}, found {found:?}"));
                        None
                    }
                    (Some(_), _) => Some(self.read(checkpoint, &stored)?),
                };
                self.asked.insert(stored);
                // A placeholder, so that all problems are listed; `finish` then fails.
                read.unwrap_or_else(|| Tensor::zeros([0], (self.kind(), self.device)))
            }
        })
    }

    /// [`Builder::embedding`] for biases by distance. As in transformers, they get no weight decay, since their name says bias.
    pub fn bias_table(&mut self, name: String, shape: &[i64], init: Init) -> Result<Tensor> {
        let tensor = self.embedding(name, shape, init)?;
        self.params.last_mut().expect("it was just kept").decay = false;
        Ok(tensor)
    }

    /// [`Builder::tensor`] of numbers that are never trained.
    pub fn buffer(&mut self, name: String, shape: &[i64], init: Init) -> Result<Tensor> {
        let tensor = self.tensor(name, shape, init, false)?;
        self.params.last_mut().expect("it was just kept").fixed = true;
        Ok(tensor)
    }

    /// [`Builder::buffer`] that is f32 whatever the dtype of the other tensors.
    pub fn wide_buffer(&mut self, name: String, shape: &[i64], init: Init) -> Result<Tensor> {
        let previous = self.hold_as(Some(Kind::Float));
        let buffer = self.buffer(name, shape, init);
        self.hold_as(previous);
        buffer
    }

    /// Reads the weights of the `count` experts at `prefix`, of inner width `inner`, if the checkpoint has them in one tensor for all experts,
    /// as transformers holds them: gate and up projections `[count, 2 * inner, hidden]`, down projections `[count, hidden, inner]`.
    pub fn open_fused(&mut self, prefix: &str, names: &ExpertNames, [count, inner, hidden]: [i64; 3]) -> Result<()> {
        let Source::Checkpoint(checkpoint) = self.source else { return Ok(()) };
        let [gate, up] = names.inputs;
        let parts = [
            (FUSED[0], [count, 2 * inner, hidden], vec![(gate, 0), (up, inner)], inner),
            (FUSED[1], [count, hidden, inner], vec![(names.out, 0)], hidden),
        ];
        for (end, shape, columns, width) in parts {
            let stored = self.stored_name(checkpoint, &format!("{prefix}.{end}"));
            let Some(found) = checkpoint.shape(&stored) else { continue };
            self.asked.insert(stored.clone());
            if found != shape {
                self.mismatched.push(format!("tensor `{stored}`: expected {shape:?}, found {found:?}"));
                continue;
            }
            let whole = self.read(checkpoint, &stored)?;
            for (expert, weights) in whole.unbind(0).into_iter().enumerate() {
                let expert_weights = columns.iter().map(|(part, from)| (part, weights.narrow(0, *from, width)));
                self.fused
                    .extend(expert_weights.map(|(part, weight)| (format!("{prefix}.{expert}.{part}.weight"), weight)));
            }
        }
        Ok(())
    }

    /// Sets that the checkpoint may have the tensor `name`, which the model does not use.
    pub fn allow(&mut self, name: &str) {
        if let Source::Checkpoint(checkpoint) = self.source {
            self.asked.insert(self.stored_name(checkpoint, name));
        }
    }

    /// [`Builder::tensor`] of an embedding.
    pub fn embedding(&mut self, name: String, shape: &[i64], init: Init) -> Result<Tensor> {
        let tensor = self.tensor(name, shape, init, true)?;
        self.params.last_mut().expect("it was just kept").embedding = true;
        Ok(tensor)
    }

    /// Returns a newly initialized tensor, even if the rest comes from a checkpoint: a new head.
    pub fn new_head(&mut self, name: String, shape: &[i64], seed: u64, std: f64) -> Result<Tensor> {
        // A model that will be rejected is not initialized, as its sizes may be arbitrary.
        let lost = !(self.missing.is_empty() && self.mismatched.is_empty());
        let tensor = if lost {
            Tensor::zeros([0], (self.kind(), self.device))
        } else {
            self.fresh(seed, shape, Init::Normal(std))?
        };
        Ok(self.keep(name, tensor, true))
    }

    /// Returns a bias of zeros, whatever the source of the rest.
    pub fn zeros(&mut self, name: String, shape: &[i64]) -> Result<Tensor> {
        let tensor = Tensor::f_zeros(shape, (self.kind(), self.device))?;
        Ok(self.keep(name, tensor, false))
    }

    /// Returns a weight from another source, read for the builder's device and dtype.
    pub fn read_with(&mut self, name: String, read: impl FnOnce(Device, Kind) -> Result<Tensor>) -> Result<Tensor> {
        let tensor = read(self.device, self.kind())?;
        let decay = !name.ends_with(".bias");
        Ok(self.keep(name, tensor, decay))
    }

    /// The name under which the checkpoint holds `name`.
    fn stored_name(&self, checkpoint: &Checkpoint, name: &str) -> String {
        let stored = match name.strip_prefix(self.names.prefix) {
            Some(rest) => format!("{}{rest}", self.stored_prefix),
            None => name.to_string(),
        };
        // Old BERT checkpoints have TensorFlow's names of a norm's two tensors.
        let old = stored.strip_suffix("LayerNorm.weight").map(|base| format!("{base}LayerNorm.gamma"));
        let old = old.or_else(|| stored.strip_suffix("LayerNorm.bias").map(|base| format!("{base}LayerNorm.beta")));
        let old = old.or_else(|| (name == self.names.lm_head).then(|| format!("{TEXT_HEAD}{name}")));
        // Some writers store a tied tensor only under the head's name.
        let is_embedding = name.strip_suffix(".weight") == Some(self.names.embed);
        let old = old.or_else(|| (self.tied && is_embedding).then(|| self.names.lm_head.to_string()));
        old.filter(|old| checkpoint.shape(&stored).is_none() && checkpoint.shape(old).is_some()).unwrap_or(stored)
    }

    fn keep(&mut self, name: String, tensor: Tensor, decay: bool) -> Tensor {
        self.params.push(Param { name, tensor: tensor.shallow_clone(), decay, embedding: false, fixed: false });
        tensor
    }

    fn fresh(&self, seed: u64, shape: &[i64], init: Init) -> Result<Tensor> {
        let options = (self.kind(), self.device);
        Ok(match init {
            Init::Zeros => Tensor::f_zeros(shape, options)?,
            Init::Ones => Tensor::f_ones(shape, options)?,
            Init::LogUniform([least, most]) => {
                let mut stream = Stream::new(seed, Purpose::Init, self.params.len() as u64, 0);
                let count = shape.iter().product::<i64>();
                let drawn = (0..count).map(|_| (least + (most - least) * stream.uniform()).ln() as f32);
                let tensor = Tensor::f_from_slice(&drawn.collect::<Vec<_>>())?.f_view(shape)?;
                tensor.to_device(self.device).to_kind(self.kind())
            }
            Init::Normal(std) => {
                let mut stream = Stream::new(seed, Purpose::Init, self.params.len() as u64, 0);
                // Allocated by libtorch, which returns an error for a size beyond memory; a vector would end the program.
                let tensor = Tensor::f_empty(shape, (Kind::Float, Device::Cpu))?;
                let flat = tensor.f_view([-1])?;
                for from in (0..flat.size()[0]).step_by(DRAWN_AT_ONCE) {
                    let len = (DRAWN_AT_ONCE as i64).min(flat.size()[0] - from);
                    flat.narrow(0, from, len).f_copy_(&Tensor::f_from_slice(&stream.normals(len as usize, std))?)?;
                }
                tensor.to_device(self.device).to_kind(self.kind())
            }
        })
    }

    /// Returns the parameters in the order of the model.
    ///
    /// # Errors
    /// One error that lists every tensor that is missing, of another shape, or unexpected. Tensors whose names start with one
    /// of `ignored` (the head of another task) are allowed.
    pub fn finish(self, ignored: &[&str]) -> Result<Vec<Param>> {
        let Source::Checkpoint(checkpoint) = self.source else { return Ok(self.params) };
        let is_part = TEXT_PARTS.contains(&self.stored_prefix);
        let harmless = |name: &str| {
            let other_part = self.is_other_part(name);
            let name = if is_part { name.strip_prefix(TEXT_HEAD).unwrap_or(name) } else { name };
            other_part
                || self.names.harmless.iter().any(|suffix| name.ends_with(suffix))
                || ignored.iter().any(|prefix| name.starts_with(prefix))
        };
        let unexpected: Vec<&str> =
            checkpoint.names().filter(|name| !self.asked.contains(*name) && !harmless(name)).collect();
        if self.missing.is_empty() && self.mismatched.is_empty() && unexpected.is_empty() {
            return Ok(self.params);
        }
        let list = |what: &str, names: &[&str]| match names {
            [] => None,
            [first] => Some(format!("{what} `{}`", brief(first))),
            [first, second] => Some(format!("{what} `{}`, `{}`", brief(first), brief(second))),
            [first, second, rest @ ..] => {
                Some(format!("{what} `{}`, `{}` and {} more", brief(first), brief(second), rest.len()))
            }
        };
        let missing: Vec<&str> = self.missing.iter().map(String::as_str).collect();
        let mut problems: Vec<String> = self.mismatched.iter().take(3).cloned().collect();
        problems.extend((self.mismatched.len() > 3).then(|| format!("{} more shapes", self.mismatched.len() - 3)));
        problems.extend(list("missing", &missing));
        problems.extend(list("unexpected", &unexpected));
        let is_head = |name: &str| name == self.names.lm_head;
        let is_classifier_head = |name: &&str| match self.names.head {
            HeadNames::Score => *name == "score.weight",
            HeadNames::Dense { inner, out, .. } => [inner, out].iter().any(|layer| name.starts_with(layer)),
        };
        let classifies = |names: &[&str]| !names.is_empty() && names.iter().all(is_classifier_head);
        // A trained head under another name: a new one in its place would lose it.
        let other_head = unexpected.iter().find(|name| {
            let last = name.rsplit('.').nth(1).unwrap_or_default();
            ["reward", "score", "v_head", "value_head", "classif", "regression"].iter().any(|part| last.contains(part))
        });
        let encoders_head = match self.names.head {
            HeadNames::Dense { out, .. } if self.names.encoder.is_none() => Some(format!("{out}.weight")),
            HeadNames::Dense { .. } | HeadNames::Score => None,
        };
        let hint = if encoders_head.is_some_and(|head| self.missing.contains(&head)) {
            ": this is a model without a classifier's head; `rlhf reward --new_reward_head` makes one of an encoder"
        } else if other_head.is_some() && classifies(&missing) {
            ": this is a reward or value model with a head of another form, which is not supported"
        } else if classifies(&missing) {
            ": this is a language model, not a reward or value model; `rlhf reward --new_reward_head` makes one of it"
        } else if classifies(&unexpected) && missing.iter().all(|n| is_head(n)) {
            ": this is a reward or value model, not a language model"
        } else {
            ""
        };
        Err(Error::invalid(checkpoint.dir(), format!("{}{hint}", problems.join("; "))))
    }
}
