//! Sizes of a model, from its configuration alone: no weight is read, and none is allocated.

use super::body::TRAINS_QUANTIZED;
use super::body::{activation_bytes, holds_in_bf16};
use super::classifier::{Head, SCORE_HEADS};
use super::config::ModelConfig;
use super::decoder::Decoder;
use super::layer_inputs::{stored_in_branch, stored_inputs};
use super::lora::{self, LayerSize};
use super::lora_config::LoraConfig;
use super::mixing::{MixedPass, Mixing};
use super::params::{Builder, Init, Source, model_name};
use super::plain_attention::PlainAttention;
use super::quantized::{QuantType, Quantization};
use super::shape::{Activation, CrossNames, ExpertNames, MlpIn, Names, Order};
use super::stacked::{gradient_bytes, parallel_expert_bytes};
use super::uses_kernels;
use rlhf_base::{Error, Result};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use tch::{Device, Kind};

/// The shapes and dtypes of a model's tensors, in the order of the model.
#[derive(Debug, Clone)]
pub struct ModelSizes {
    config: ModelConfig,
    tensors: Vec<TensorSize>,
    linears: Vec<LinearSize>,
    is_classifier: bool,
    /// The linear layers whose weights are quantized in the model's files; `None` if no files were read: `config.json` decides then.
    coded: Option<HashSet<String>>,
    /// The folder or the name of the model.
    place: PathBuf,
}

#[derive(Debug, Clone)]
struct TensorSize {
    name: String,
    numel: usize,
    shape: Vec<i64>,
    is_embedding: bool,
    /// The dtype in the model's files.
    kind: Kind,
    /// The layer of the stack.
    layer: Option<usize>,
    role: TensorRole,
}

/// The use of a tensor, which decides the dtype that it is held in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TensorRole {
    /// Weight or bias of a linear layer of the decoder, or a language model's own head.
    Product,
    /// The embedding of a language model that is its head too.
    TiedEmbedding,
    /// A classifier's head, always f32.
    Score,
    /// Embeddings and norms.
    Other,
    /// Never trained.
    Fixed,
    /// Never trained, always f32.
    WideFixed,
}

#[derive(Debug, Clone)]
struct LinearSize {
    name: String,
    widths: [usize; 2],
}

/// The dtypes that a model's weights are held in.
#[derive(Debug, Clone, Copy)]
pub enum Holding<'a> {
    /// Weights are trained, all in f32: those from layer `.0` on, and the embeddings too if it is 0.
    Trained(usize),
    /// The same with the larger matrices in bf16.
    TrainedInBf16(usize),
    /// An adapter is trained. The base's weights are held in the dtype of products if that takes no more memory.
    Adapted(&'a LoraConfig),
    /// Nothing is trained, and weights are held in the dtype of products if that takes no more memory. If `.0` is above 0, the model is a copy
    /// of one that is trained from that layer on, and shares the memory of its weights before that layer.
    Frozen(usize),
    /// The same beside a model that is trained with its larger matrices in bf16.
    FrozenInBf16(usize),
}

/// Bytes and numbers of parameters of a model as it is held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Held {
    /// Number of all parameters, those of an adapter included.
    pub parameters: usize,
    /// Number of trained parameters.
    pub trained: usize,
    /// Bytes of their gradients, which have their dtypes.
    pub gradients: usize,
    /// Bytes of the weights that are not quantized.
    pub weights: usize,
    /// Bytes of the quantized weights, which are whole on each rank.
    pub quantized: usize,
    /// Bytes of the base's values of modules that are trained in full beside an adapter; they are whole on each rank.
    pub originals: usize,
    /// Bytes of the permanent copies of weights in a narrower dtype, for products.
    pub copies: usize,
    /// Bytes of the largest temporary copy of a weight in a wider dtype, for products.
    pub widened: usize,
    /// Number of values of the largest quantized weight.
    pub unpacked: usize,
    /// Bytes of all such temporary copies in the layers: the graph of a backward pass stores them.
    pub widened_layers: usize,
    /// Bytes of the weights of the largest layer of the stack, without quantized ones.
    pub layer: usize,
    /// Bytes of the weights outside the layers, none of which is quantized.
    pub root: usize,
    /// Number of trained parameters of the largest layer.
    pub trained_layer: usize,
    /// Number of trained parameters outside the layers.
    pub trained_root: usize,
}

/// [`Held`] of the tensors so far.
#[derive(Debug, Default)]
struct HeldSums {
    held: Held,
    /// Bytes of the weights of each layer, and number of its trained parameters.
    layers: HashMap<usize, [usize; 2]>,
}

impl HeldSums {
    /// Adds a weight of `numel` parameters in `bytes` bytes, of a layer or outside the layers.
    fn add(&mut self, layer: Option<usize>, numel: usize, bytes: usize, trained: bool) {
        let trained = if trained { numel } else { 0 };
        self.held.parameters += numel;
        self.held.weights += bytes;
        self.held.trained += trained;
        self.held.gradients += if trained > 0 { bytes } else { 0 };
        let [layer_bytes, layer_trained] = match layer {
            None => [&mut self.held.root, &mut self.held.trained_root],
            Some(layer) => self.layers.entry(layer).or_default().each_mut(),
        };
        *layer_bytes += bytes;
        *layer_trained += trained;
    }

    fn into_held(self) -> Held {
        let largest = |at: usize| self.layers.values().map(|sums| sums[at]).max().unwrap_or(0);
        Held { layer: largest(0), trained_layer: largest(1), ..self.held }
    }
}

/// A trained tensor, as its optimizer has to know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainedTensor {
    /// Shape.
    pub shape: Vec<i64>,
    /// Dtype.
    pub kind: Kind,
    /// Whether it is an embedding.
    pub is_embedding: bool,
}

/// The tokens of one pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PassTokens {
    /// Tokens that go through the linear layers: those that sequences have in common at their start count once.
    pub computed: usize,
    /// Tokens of all sequences.
    pub attended: usize,
    /// Tokens with an output.
    pub outputs: usize,
    /// Number of sequences, and length of the longest.
    pub rows: [usize; 2],
    /// The prompts of an encoder-decoder, whose other tokens are those of its decoder.
    pub source: SourceTokens,
}

/// The tokens that an encoder reads in one pass; none with one stack.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SourceTokens {
    /// Tokens of the different prompts.
    pub computed: usize,
    /// Tokens of the prompts of all sequences, which their decoders attend to.
    pub attended: usize,
    /// Scores of a head with a bias by distance, in rows as long as the longest: of the encoder and of the decoder.
    pub scores: [usize; 2],
}

/// Bytes of the activations of one pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Activations {
    /// Stored from the forward to the backward pass.
    pub stored: usize,
    /// In use while one layer is computed.
    pub working: usize,
}

/// The most parameters a model may have: more than any model has, and few enough that sums of bytes do not overflow.
const MOST_PARAMETERS: f64 = 1e14;

/// `bytes` as a whole number, limited so that a sum of a few of them does not overflow.
fn bounded(bytes: f64) -> usize {
    bytes.min((1u64 << 58) as f64) as usize
}

/// Bytes per value of a quantized weight while libtorch's own operations unpack it: an i32 per two codes, and the value in f32.
const UNPACKED: usize = 6;

impl Held {
    /// Bytes of the weights on each of `ranks` ranks that share them.
    pub fn share_of(&self, ranks: usize) -> usize {
        self.weights / ranks + self.quantized
    }

    /// Bytes of the largest temporary copy of a weight. Kernels unpack a quantized weight tile by tile, libtorch's operations all at once.
    pub fn temporary(&self, has_kernels: bool) -> usize {
        self.widened.max(if has_kernels { 0 } else { self.unpacked * UNPACKED })
    }

    /// Adds a trained head of `parameters` parameters.
    pub fn add_head(&mut self, parameters: usize) {
        let bytes = parameters * Kind::Float.elt_size_in_bytes();
        self.parameters += parameters;
        self.trained += parameters;
        self.gradients += bytes;
        self.trained_root += parameters;
        self.weights += bytes;
        self.root += bytes;
    }
}

impl ModelSizes {
    /// Sizes of the language model that `config` describes; its files hold it in `kind`.
    ///
    /// # Errors
    /// If the family has no language models.
    pub fn of_causal_lm(config: ModelConfig, kind: Kind, place: &Path) -> Result<Self> {
        config.check_causal_lm(place)?;
        let names = &config.family.names;
        let mut builder = Builder::new(Source::Shapes(kind), names, Device::Cpu, Some(kind));
        let mut decoder = Decoder::new(&config, &mut builder, kind)?;
        if !config.tie_word_embeddings {
            let shape = [config.vocab_size, config.embedding_size];
            drop(builder.tensor(names.lm_head.into(), &shape, Init::Zeros, true)?);
        }
        Self::of(builder, &mut decoder, config, false)
    }

    /// Names and shapes of the parameters of the language model that `config` describes, in the order of the model.
    ///
    /// # Errors
    /// If the family has no language models.
    pub fn shapes_of_causal_lm(config: &ModelConfig, place: &Path) -> Result<Vec<(String, Vec<i64>)>> {
        config.check_causal_lm(place)?;
        let names = &config.family.names;
        let mut builder = Builder::new(Source::Shapes(Kind::Float), names, Device::Cpu, Some(Kind::Float));
        let _decoder = Decoder::new(config, &mut builder, Kind::Float)?;
        if !config.tie_word_embeddings {
            let shape = [config.vocab_size, config.embedding_size];
            drop(builder.tensor(names.lm_head.into(), &shape, Init::Zeros, true)?);
        }
        Ok(builder.finish(&[])?.into_iter().map(|param| (param.name, param.tensor.size())).collect())
    }

    /// Sizes of the sequence classifier that `config` describes, with a head for one label if `new_head` is set.
    ///
    /// # Errors
    /// None for a configuration that was read.
    pub fn of_classifier(config: ModelConfig, kind: Kind, new_head: bool) -> Result<Self> {
        let config = config.into_classifier();
        let mut builder = Builder::new(Source::Shapes(kind), &config.family.names, Device::Cpu, Some(kind));
        let mut decoder = Decoder::new(&config, &mut builder, kind)?;
        let labels = if new_head || config.labels.is_empty() { 1 } else { config.labels.len() };
        builder.hold_as(Some(Kind::Float));
        Head::build(&mut builder, &config, SCORE_HEADS[0], labels as i64, None)?;
        Self::of(builder, &mut decoder, config, true)
    }

    fn of(builder: Builder<'_>, decoder: &mut Decoder, config: ModelConfig, is_classifier: bool) -> Result<Self> {
        let names = &config.family.names;
        let linears: Vec<LinearSize> = decoder
            .linears_mut()
            .map(|linear| LinearSize {
                name: linear.name().to_string(),
                widths: linear.widths().map(|width| width as usize),
            })
            .collect();
        let products: HashMap<&str, ()> = linears.iter().map(|linear| (linear.name.as_str(), ())).collect();
        let role = |name: &str| {
            let base = name.strip_suffix(".weight").or(name.strip_suffix(".bias")).unwrap_or(name);
            let tied = !is_classifier && config.tie_word_embeddings;
            match base {
                _ if lora::is_head(name) => TensorRole::Score,
                base if products.contains_key(base) || name == names.lm_head => TensorRole::Product,
                _ if names.experts.is_some_and(|experts| experts.is_stack(name.trim_end_matches("_bias"))) => {
                    TensorRole::Product
                }
                base if base == names.embed && tied => TensorRole::TiedEmbedding,
                _ => TensorRole::Other,
            }
        };
        let tensors = builder.finish(&[])?.into_iter().map(|param| TensorSize {
            numel: param.tensor.numel(),
            shape: param.tensor.size(),
            is_embedding: param.embedding,
            kind: param.tensor.kind(),
            layer: decoder.layer_of(&param.name),
            role: if !param.fixed {
                role(&param.name)
            } else if param.tensor.numel() == 1 {
                TensorRole::Fixed
            } else {
                TensorRole::WideFixed
            },
            name: param.name,
        });
        let tensors: Vec<TensorSize> = tensors.collect();
        let parameters = tensors.iter().map(|tensor| tensor.numel as f64).sum::<f64>();
        if parameters > MOST_PARAMETERS {
            let message = format!(
                "config.json: expected a model of at most {MOST_PARAMETERS:e} parameters, found {parameters:.1e}"
            );
            return Err(Error::Run(message));
        }
        Ok(Self { config, tensors, linears, is_classifier, coded: None, place: PathBuf::new() })
    }

    /// Sets the layers whose weights the files of the model `place` hold quantized, as the files name them.
    #[must_use]
    pub fn with_coded(mut self, layers: Option<Vec<String>>, place: &Path) -> Self {
        self.place = place.to_path_buf();
        let names = &self.config.family.names;
        self.coded = layers.map(|layers| layers.iter().map(|layer| model_name(names, layer)).collect());
        self
    }

    /// Sets the layers that are quantized in the files to those of `other`, of the same body.
    #[must_use]
    pub fn coded_as(self, other: &Self) -> Self {
        Self { coded: other.coded.clone(), place: other.place.clone(), ..self }
    }

    /// Whether weights are quantized in the model's files. The other weights then stay plain whatever the settings, as when the model is loaded.
    fn is_coded(&self) -> bool {
        self.coded.as_ref().map_or(self.config.quantization().is_some(), |coded| !coded.is_empty())
    }

    /// Returns the model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The dtype of the model's files.
    pub fn stored_kind(&self) -> Kind {
        self.tensors.first().map_or(Kind::Float, |tensor| tensor.kind)
    }

    /// Number of elements of the largest tensor.
    pub fn largest_tensor(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.numel).max().unwrap_or(0)
    }

    /// [`ModelSizes::held_as`] without quantization.
    #[cfg(test)]
    pub fn held(&self, holding: Holding<'_>, dtype: Option<Kind>, compute: Kind) -> Result<Held> {
        self.held_as(holding, dtype, compute, None)
    }

    /// The model in memory, with products in `compute`. Frozen weights are loaded in `dtype`, or in that of the files if it is `None`.
    /// Weights of linear layers are in the format `quantization` if nothing but an adapter is trained. A model that is quantized in its
    /// files keeps the format of the files.
    ///
    /// # Errors
    /// If a target of the adapter matches no layer; if quantized weights would be trained.
    pub fn held_as(
        &self,
        holding: Holding<'_>,
        dtype: Option<Kind>,
        compute: Kind,
        quantization: Option<Quantization>,
    ) -> Result<Held> {
        let trains_all = matches!(holding, Holding::Trained(_) | Holding::TrainedInBf16(_));
        if trains_all && self.is_coded() {
            return Err(Error::Usage(format!("{}: {TRAINS_QUANTIZED}", self.place.display())));
        }
        let quantization = if self.is_coded() { self.stored_format() } else { quantization.filter(|_| !trains_all) };
        let mut sums = HeldSums::default();
        let first = self.first_owned(holding);
        let (tensors, saved) = self.with_saved(holding)?;
        for (at, tensor) in tensors.iter().enumerate() {
            if saved.contains(&tensor.name) {
                // Trained in f32; the base's own values stay beside it.
                sums.add(tensor.layer, tensor.numel, 4 * tensor.numel, true);
                sums.held.originals += tensor.numel * holding.kind(tensor, dtype, compute).elt_size_in_bytes();
                if compute != Kind::Float && matches!(tensor.role, TensorRole::Product | TensorRole::TiedEmbedding) {
                    sums.held.copies += tensor.numel * compute.elt_size_in_bytes();
                }
                continue;
            }
            let used = tensor.numel * compute.elt_size_in_bytes();
            if let Some((format, widths)) =
                quantization.and_then(|format| Some((format, self.quantized_widths(tensor)?)))
                && at >= first
            {
                sums.held.parameters += tensor.numel;
                sums.held.quantized += format.bytes(widths);
                sums.held.unpacked = sums.held.unpacked.max(tensor.numel);
                continue;
            }
            let owns_memory = at >= first || matches!(holding, Holding::Trained(_) | Holding::TrainedInBf16(_));
            let kind = if owns_memory { holding.kind(tensor, dtype, compute) } else { holding.trained_kind(tensor) };
            if owns_memory {
                let bytes = tensor.numel * kind.elt_size_in_bytes();
                sums.add(tensor.layer, tensor.numel, bytes, at >= first && holding.trains(tensor.role));
            }
            let in_product = matches!(tensor.role, TensorRole::Product | TensorRole::TiedEmbedding);
            match kind.elt_size_in_bytes().cmp(&compute.elt_size_in_bytes()) {
                std::cmp::Ordering::Greater if in_product => sums.held.copies += used,
                std::cmp::Ordering::Less if in_product => {
                    sums.held.widened = sums.held.widened.max(used);
                    sums.held.widened_layers += if tensor.layer.is_some() { used } else { 0 };
                }
                _ => {}
            }
        }
        if let Holding::Adapted(lora) = holding {
            for (linear, size) in self.adapted(lora)? {
                let magnitudes = if lora.use_dora { linear.widths[1] } else { 0 };
                let numel = size.r * (linear.widths[0] + linear.widths[1]) + magnitudes;
                sums.add(self.layer_of(&linear.name), numel, 4 * numel, true);
            }
        }
        // A head that was tied shares the memory of the embedding until both are trained.
        if tensors.len() > self.tensors.len() && sums.held.originals > 0 {
            sums.held.originals -= self.tied_bytes(holding, dtype, compute);
        }
        Ok(sums.into_held())
    }

    /// The tensors that are trained.
    ///
    /// # Errors
    /// If a target of the adapter matches no layer.
    pub fn trained(&self, holding: Holding<'_>) -> Result<Vec<TrainedTensor>> {
        let first = self.first_owned(holding);
        let (tensors, saved) = self.with_saved(holding)?;
        let f32 = |shape: Vec<i64>, is_embedding| TrainedTensor { shape, kind: Kind::Float, is_embedding };
        let mut trained = Vec::new();
        for (at, tensor) in tensors.iter().enumerate() {
            let (shape, is_embedding) = (tensor.shape.clone(), tensor.is_embedding);
            if saved.contains(&tensor.name) {
                trained.push(f32(shape, is_embedding));
            } else if at >= first && holding.trains(tensor.role) {
                let kind = holding.kind(tensor, None, Kind::Float);
                trained.push(TrainedTensor { kind, ..f32(shape, is_embedding) });
            }
        }
        if let Holding::Adapted(lora) = holding {
            for (linear, size) in self.adapted(lora)? {
                let ([width_in, width_out], r) = (linear.widths.map(|width| width as i64), size.r as i64);
                trained.extend([f32(vec![r, width_in], false), f32(vec![width_out, r], false)]);
                trained.extend(lora.use_dora.then(|| f32(vec![width_out], false)));
            }
        }
        Ok(trained)
    }

    /// Index of the first tensor that is trained or has memory of its own: the first tensor of the layer that `holding` names.
    fn first_owned(&self, holding: Holding<'_>) -> usize {
        let first = match holding {
            Holding::Trained(first)
            | Holding::TrainedInBf16(first)
            | Holding::Frozen(first)
            | Holding::FrozenInBf16(first) => first,
            Holding::Adapted(_) => 0,
        };
        if first == 0 {
            return 0;
        }
        self.tensors
            .iter()
            .position(|tensor| tensor.layer.is_some_and(|layer| layer >= first))
            .unwrap_or(self.tensors.len())
    }

    /// The tensors, and the names of those that are trained in full beside an adapter, without heads. A tied LM head is one of the
    /// tensors if it is trained apart from the embedding.
    fn with_saved(&self, holding: Holding<'_>) -> Result<(Vec<TensorSize>, Vec<String>)> {
        let mut tensors = self.tensors.clone();
        let Holding::Adapted(lora) = holding else { return Ok((tensors, Vec::new())) };
        let names = &self.config.family.names;
        let tied = self.tied().map(|at| (at, names.lm_head));
        let is_saved = |name: &str| lora::is_in_saved_module(names, name, &lora.modules_to_save);
        if let Some((at, lm_head)) = tied.filter(|(at, lm_head)| is_saved(lm_head) || is_saved(&tensors[*at].name)) {
            tensors.push(TensorSize { name: lm_head.into(), ..tensors[at].clone() });
            tensors[at].role = TensorRole::Other;
        }
        let names = tensors.iter().map(|tensor| tensor.name.as_str());
        let mut saved = lora.saved_params(self.config.family, names, self.is_classifier)?;
        saved.retain(|name| !lora::is_head(name));
        Ok((tensors, saved))
    }

    /// Index of the embedding that is the LM head too.
    fn tied(&self) -> Option<usize> {
        self.tensors.iter().position(|tensor| tensor.role == TensorRole::TiedEmbedding)
    }

    /// Bytes of the embedding that is the LM head too.
    fn tied_bytes(&self, holding: Holding<'_>, dtype: Option<Kind>, compute: Kind) -> usize {
        let tied = self.tied().map(|at| &self.tensors[at]);
        tied.map_or(0, |tensor| tensor.numel * holding.kind(tensor, dtype, compute).elt_size_in_bytes())
    }

    fn layer_of(&self, linear: &str) -> Option<usize> {
        self.tensors.iter().find(|tensor| tensor.name.strip_suffix(".weight") == Some(linear))?.layer
    }

    /// The format of the weights that are quantized in the files.
    fn stored_format(&self) -> Option<Quantization> {
        let nf4 = || Quantization::FourBit { quant_type: QuantType::Nf4, nested: false };
        self.is_coded().then(|| self.config.quantization().unwrap_or_else(nf4))
    }

    /// Output and input width of a weight that is quantized, in the files or by the settings.
    fn quantized_widths(&self, tensor: &TensorSize) -> Option<[usize; 2]> {
        let quantizes = |layer: &&str| match &self.coded {
            Some(coded) if !coded.is_empty() => coded.contains(*layer),
            Some(_) => self.config.family.names.quantizes(layer),
            None => self.config.family.names.quantizes(layer) && !self.config.spares(layer),
        };
        let layer = tensor.name.strip_suffix(".weight").filter(quantizes)?;
        let [width_in, width_out] = self.linears.iter().find(|linear| linear.name == layer)?.widths;
        Some([width_out, width_in])
    }

    /// The linear layers that get an adapter, with its size.
    fn adapted(&self, lora: &LoraConfig) -> Result<Vec<(&LinearSize, LayerSize)>> {
        let experts = self.config.family.names.experts;
        let linears: Vec<&LinearSize> =
            self.linears.iter().filter(|linear| !experts.is_some_and(|experts| experts.has(&linear.name))).collect();
        let names: Vec<String> = linears.iter().map(|linear| linear.name.clone()).collect();
        let chosen = lora.choose(self.config.family, &names)?;
        Ok(linears.into_iter().zip(chosen).filter_map(|(linear, size)| Some((linear, size?))).collect())
    }

    /// Activation bytes per token with products in this dtype on this device. The size of micro-batches follows from it.
    pub fn activation_bytes(&self, place: (Kind, Device), gradient_checkpointing: bool) -> usize {
        activation_bytes(&self.config, place, gradient_checkpointing)
    }

    /// Whether a linear layer reads tokens of prompts: it is in the encoder of an encoder-decoder, or is a projection of the encoder's states
    /// in its decoder.
    fn reads_source(&self, linear: &LinearSize) -> bool {
        let names = &self.config.family.names;
        let in_encoder = |encoder: &Names| linear.name.starts_with(&format!("{}.", encoder.layers));
        let projects_states = |cross: CrossNames| cross.qkv[1..].iter().any(|name| linear.name.ends_with(name));
        names.encoder.is_some_and(in_encoder) || names.cross.is_some_and(projects_states)
    }

    /// Number of multiplications per prompt token in the layers' products of an encoder-decoder; 0 with one stack.
    pub fn source_products(&self) -> usize {
        let reads = self.linears.iter().filter(|linear| self.reads_source(linear));
        reads.map(|linear| linear.widths[0] * linear.widths[1]).sum()
    }

    /// Number of multiplications per token in the layers' products, and in the head's; in an encoder-decoder, per token of the decoder.
    pub fn products(&self) -> [usize; 2] {
        let count = |linear: &LinearSize| {
            let all = linear.widths[0] * linear.widths[1];
            let is_expert = |experts: &ExpertNames| linear.name.contains(&format!(".{}.", experts.experts));
            match &self.config.experts {
                Some(shape) if self.config.family.names.experts.as_ref().is_some_and(is_expert) => {
                    all * shape.chosen as usize / shape.count.max(1) as usize
                }
                _ => all,
            }
        };
        let layers: usize = self.linears.iter().filter(|linear| !self.reads_source(linear)).map(count).sum();
        let layers = layers + self.stacked_products();
        let head = if self.is_classifier { 1 } else { self.config.vocab_size };
        [layers, (head * self.config.embedding_size) as usize]
    }

    /// Number of multiplications per token in the products of stacked experts.
    fn stacked_products(&self) -> usize {
        let stacks = self.config.family.names.experts.is_some_and(|experts| experts.stacking.is_some());
        let Some(shape) = self.config.experts.as_ref().filter(|_| stacks) else { return 0 };
        let layers = shape.layers.iter().filter(|has_experts| **has_experts).count();
        layers * (3 * shape.chosen * shape.intermediate_size * self.config.hidden_size) as usize
    }

    /// Activations of a forward and backward pass over `tokens`, with an adapter of these settings and dropout before it if `drops`.
    ///
    /// The sums follow `Decoder::layer` line by line: what each function stores for its backward pass, with and without kernels on `device`.
    pub fn activations(
        &self,
        tokens: PassTokens,
        (compute, device): (Kind, Device),
        adapter: Option<(&LoraConfig, bool)>,
        gradient_checkpointing: bool,
    ) -> Result<Activations> {
        let place = Place { compute, device, trains: adapter.is_none() };
        let c = &self.config;
        let layers = c.num_hidden_layers as f64;
        let kind = compute.elt_size_in_bytes();
        let (n, hidden, inner) = (tokens.computed as f64, c.hidden_size as f64, c.active_width() as f64);
        let encoder_layers = c.encoder_layers.unwrap_or(0) as f64;
        let [adapter_bytes, source_adapter_bytes] = match adapter {
            None => [0, 0],
            Some((lora, drops)) => {
                // With dropout the layer's input is stored in f32, with the mask. Its temporary copies leave holes in the heap between
                // the tensors that stay: these shares are measured.
                let input_bytes = match (drops, kind < 4) {
                    (true, _) => 11,
                    (false, true) => 1,
                    (false, false) => 0,
                };
                // DoRA stores both products in f32, and its input.
                let dora = |linear: &LinearSize| {
                    if lora.use_dora { 8 * linear.widths[1] + if drops { 0 } else { 4 * linear.widths[0] } } else { 0 }
                };
                let linear_bytes = |(linear, size): &(&LinearSize, LayerSize)| {
                    size.r * 4 + linear.widths[0] * input_bytes + dora(linear)
                };
                let (source, decoder): (Vec<_>, Vec<_>) =
                    self.adapted(lora)?.into_iter().partition(|(linear, _)| self.reads_source(linear));
                let [decoder, source] =
                    [decoder, source].map(|linears| linears.iter().map(linear_bytes).sum::<usize>());
                [decoder / c.num_hidden_layers.max(1) as usize, source / c.encoder_layers.unwrap_or(1).max(1) as usize]
            }
        };
        let source = self.source_bytes(tokens, place);
        let [layer, largest] =
            self.layer_bytes(tokens, place).map(|bytes| bytes + n * adapter_bytes as f64 + source.decoder_layer);
        let read = tokens.source.computed as f64;
        let encoder_layer = source.encoder_layer + read * source_adapter_bytes as f64;
        let embedded = n * (hidden * 4.0 + stored_inputs(c));
        let head = tokens.outputs as f64 * (3.0 * hidden + c.embedding_size as f64) * 4.0;
        // Gradients of the MLP's tensors and of the residual stream, while the layer's tensors are still there.
        let mixing_bytes = |mixing: &Mixing| mixing.working_bytes(c.hidden_size, place.mixed(tokens));
        let backward = n.max(read) * (3.0 * inner * kind as f64 + 3.0 * hidden * 4.0) + source.backward;
        let backward = backward.max(c.mixing.as_ref().map_or(0.0, mixing_bytes));
        let stack_gradients = if place.trains { gradient_bytes(c, kind as f64) } else { 0.0 };
        let backward =
            backward.max(place.attention(c).map_or(0.0, |attention| attention.working_bytes(c, tokens.rows)));
        let backward = backward.max(stack_gradients) + n * stored_inputs(c);
        // The inputs of the encoder's layers, and its result.
        let read_bytes = read * hidden * 4.0;
        let (stored, working) = if gradient_checkpointing {
            (
                layers * n * hidden * 4.0
                    + n * stored_inputs(c)
                    + head
                    + (encoder_layers + 2.0) * read_bytes
                    + source.biases,
                largest.max(encoder_layer) + backward,
            )
        } else {
            let [last, _] = self.layer_bytes(PassTokens { computed: tokens.outputs, ..tokens }, place);
            let last = last.min(layer);
            let decoder_bytes = (layers - 1.0) * layer + last + embedded + head;
            (decoder_bytes + encoder_layers * encoder_layer + 2.0 * read_bytes + source.biases, backward)
        };
        Ok(Activations { stored: bounded(stored), working: bounded(working) })
    }

    /// Bytes that the encoder of an encoder-decoder adds to a forward and backward pass, and the attention to it; none with one stack. If the
    /// biases by distance are trained, each layer stores its scores.
    fn source_bytes(&self, tokens: PassTokens, place: Place) -> SourceBytes {
        let (c, source) = (&self.config, tokens.source);
        let (kind, trains) = (place.compute.elt_size_in_bytes(), place.trains);
        if !c.is_encoder_decoder() {
            return SourceBytes::default();
        }
        let (hidden, heads) = (c.hidden_size as f64, c.num_attention_heads as f64);
        let (n, width) = (tokens.computed as f64, heads * c.head_dim as f64);
        let [read, decoded] = self.score_bytes(source);
        let encoder_tokens =
            PassTokens { computed: source.computed, attended: source.computed, ..PassTokens::default() };
        // A norm, the residual stream, queries and their result, keys and values of each sequence.
        let cross = n * (hidden * (4.0 + kind as f64) + 8.0 + heads * 4.0)
            + 2.0 * (n + source.attended as f64) * width * kind as f64;
        let [encoder_scores, decoder_scores] = [read, decoded].map(|scores| if trains { scores } else { 0.0 });
        SourceBytes {
            encoder_layer: self.layer_bytes(encoder_tokens, place)[0] + encoder_scores,
            decoder_layer: cross + decoder_scores,
            biases: 2.0 * (read + decoded),
            // Gradients of the scores before and after their softmax.
            backward: 2.0 * encoder_scores.max(decoder_scores),
        }
    }

    /// Bytes of the attention scores of a layer of the encoder and of the decoder; 0 without a bias by distance: scores are not stored then.
    fn score_bytes(&self, source: SourceTokens) -> [f64; 2] {
        let heads = if self.config.relative_bias.is_some() { self.config.num_attention_heads as f64 } else { 0.0 };
        source.scores.map(|scores| heads * scores as f64 * 4.0)
    }

    /// Bytes that a layer stores for its backward pass: the mean over the layers, and the most.
    fn layer_bytes(&self, tokens: PassTokens, place: Place) -> [f64; 2] {
        let (c, kind) = (&self.config, place.compute.elt_size_in_bytes());
        let narrow = kind < 4;
        let (n, m, kind) = (tokens.computed as f64, tokens.attended as f64, kind as f64);
        let (hidden, inner) = (c.hidden_size as f64, c.active_width() as f64);
        let heads = c.num_attention_heads as f64;
        let [queries, keys] = c.mean_widths();
        // Mean and scale of each row are stored beside its result; without kernels, the normalized numbers too.
        let normalized = if place.has_kernels() { 0.0 } else { 4.0 };
        let norms = 2.0 * n * (hidden * (kind + normalized) + 8.0);
        let streams = match c.order {
            Order::Parallel => 1.0,
            Order::Pre | Order::Post => 2.0,
            // Norms of the branches have inputs of their own.
            Order::Sandwich | Order::Output => 4.0,
        };
        let mut attention = match place.attention(c) {
            Some(plain) => plain.stored_bytes(c, tokens.rows, kind) + m * queries * kind,
            None => m * ((2.0 * queries + 2.0 * keys) * kind + heads * 4.0),
        };
        // Attention over a tree of tokens (`Layout::tree`), which is not the default, stores less: queries, keys and values of computed
        // tokens.
        if tokens.attended > tokens.computed {
            attention += n * queries * kind;
        }
        if c.family.names.qk_norm.is_some() {
            // Gemma 4 normalizes values too.
            let values = if c.layer_shapes.is_empty() { 0.0 } else { keys };
            attention += n * (queries + keys + values) * (normalized + if narrow { 4.0 + kind } else { 4.0 });
        }
        if c.attention_gate {
            // Queries apart from the gate, the gate, the outputs before it, and without kernels its activation.
            attention += if place.has_kernels() { 3.0 } else { 4.0 } * n * queries * kind;
        }
        let mlp = match (c.family.names.mlp_in, c.activation) {
            (MlpIn::Up(_), Activation::Relu) => 1.0,
            (MlpIn::Up(_), _) => 2.0,
            // Both parts before they are clamped and after, and the gate's sigmoid.
            _ if c.experts.as_ref().is_some_and(|experts| experts.clamped.is_some()) => 7.0,
            // Both projections and their product, and without kernels the activation.
            (MlpIn::Gated(_) | MlpIn::GatedFused(_), _) if place.has_kernels() => 3.0,
            (MlpIn::Gated(_) | MlpIn::GatedFused(_), _) => 4.0,
        };
        // A copy of a token for each of its experts, and their results.
        let extra = c.routed_width() * (kind + 4.0) + parallel_expert_bytes(c, kind) + stored_in_branch(c, kind);
        let rest = streams * n * hidden * 4.0 + norms + n * (mlp * inner * kind + extra);
        let Some(mixing) = &c.mixing else { return [rest + attention; 2] };
        let mixed = mixing.stored_bytes(c.hidden_size, place.mixed(tokens));
        let share = c.attention_layers() as f64 / c.num_hidden_layers.max(1) as f64;
        [rest + share * attention + (1.0 - share) * mixed, rest + attention.max(mixed)]
    }

    /// Bytes in use at once in a forward pass without gradients.
    pub fn forward_bytes(&self, tokens: PassTokens, (compute, device): (Kind, Device)) -> usize {
        let c = &self.config;
        let place = Place { compute, device, trains: false };
        let kind = compute.elt_size_in_bytes() as f64;
        let (n, m) = (tokens.computed as f64, tokens.attended as f64);
        let width = 2.0 * c.mean_widths().iter().sum::<f64>();
        let gated = !matches!(c.family.names.mlp_in, MlpIn::Up(_));
        let mlp = if gated { 3.0 } else { 2.0 } * c.active_width() as f64;
        let mixing_bytes = |n: f64, m: f64| {
            let pass = MixedPass { computed: n, attended: m, ..place.mixed(tokens) };
            c.mixing.map_or(0.0, |mixing| mixing.stored_bytes(c.hidden_size, pass))
        };
        let scores = place.attention(c).map_or(0.0, |attention| attention.forward_bytes(c, tokens.rows, kind));
        // Each token once for each of its experts, their results twice and their weighted results.
        let routed = c.routed_width() * (2.0 * kind + 8.0);
        let stack_bytes = |n: f64, m: f64| {
            let stream = n * (c.hidden_size as f64 * (2.0 * 4.0 + kind) + stored_inputs(c) / 2.0);
            let attention = (n + if m > n { m } else { 0.0 }) * width;
            stream + (attention * kind + scores).max(n * (mlp * kind + routed)).max(mixing_bytes(n, m))
        };
        let heads = c.num_attention_heads as f64;
        let [encoder_scores, decoder_scores] = self.score_bytes(tokens.source).map(|bytes| 2.0 * bytes);
        let (read, attended) = (tokens.source.computed as f64, tokens.source.attended as f64);
        let encoder = stack_bytes(read, read) + encoder_scores;
        // The encoder's states, and keys and values of each sequence.
        let cross = read * c.hidden_size as f64 * 4.0 + 2.0 * attended * heads * c.head_dim as f64 * kind;
        let decoder =
            stack_bytes(n, m) + decoder_scores + cross + tokens.outputs as f64 * c.embedding_size as f64 * 4.0;
        bounded(encoder.max(decoder))
    }

    /// Bytes of the keys and values of `rows` rows of `capacity` tokens, and of the states of layers without them.
    pub fn cache_bytes(&self, rows: usize, capacity: usize, compute: Kind) -> usize {
        let c = &self.config;
        let width = compute.elt_size_in_bytes();
        let layers = if c.layer_shapes.is_empty() { 0..1 } else { 0..c.layer_shapes.len() };
        let layers_with_keys = layers.map(|i| c.layer_shape(i)).filter(|layer| layer.keys_from.is_none());
        let widths = layers_with_keys.map(|layer| layer.kv_heads as f64 * layer.head_dim as f64).sum::<f64>();
        let widths = if c.layer_shapes.is_empty() { widths * c.attention_layers() as f64 } else { widths };
        let attention_bytes = 2.0 * capacity as f64 * widths * width as f64;
        let state_bytes = c.mixing.map_or(0, |mixing| mixing.state_bytes(c.hidden_size, width));
        let states = (c.num_hidden_layers - c.attention_layers()) as f64 * state_bytes as f64;
        bounded(rows as f64 * (attention_bytes + states))
    }
}

/// The device and the dtype of a pass, which its memory depends on.
#[derive(Debug, Clone, Copy)]
struct Place {
    /// Dtype of products.
    compute: Kind,
    device: Device,
    /// Whether all weights learn.
    trains: bool,
}

impl Place {
    fn has_kernels(self) -> bool {
        uses_kernels(self.compute, self.device)
    }

    fn mixed(self, tokens: PassTokens) -> MixedPass {
        MixedPass {
            computed: tokens.computed as f64,
            attended: tokens.attended as f64,
            rows: tokens.rows.map(|count| count as f64),
            kind: self.compute.elt_size_in_bytes() as f64,
            has_kernels: self.has_kernels(),
            trains: self.trains,
        }
    }

    fn attention(self, config: &ModelConfig) -> Option<PlainAttention> {
        PlainAttention::of(config, self.compute, self.device)
    }
}

/// Bytes that an encoder adds to a forward and backward pass.
#[derive(Debug, Clone, Copy, Default)]
struct SourceBytes {
    /// Stored by each layer of the encoder.
    encoder_layer: f64,
    /// Stored by each layer of the decoder, for its attention to the encoder.
    decoder_layer: f64,
    /// The biases of both stacks.
    biases: f64,
    /// In use while a layer's backward pass is computed.
    backward: f64,
}

impl Holding<'_> {
    fn trains(self, role: TensorRole) -> bool {
        match self {
            Self::Trained(_) | Self::TrainedInBf16(_) => !matches!(role, TensorRole::Fixed | TensorRole::WideFixed),
            Self::Adapted(_) => role == TensorRole::Score,
            Self::Frozen(_) | Self::FrozenInBf16(_) => false,
        }
    }

    /// The dtype that the tensor is trained in.
    fn trained_kind(self, tensor: &TensorSize) -> Kind {
        let in_bf16 = matches!(self, Self::TrainedInBf16(_) | Self::FrozenInBf16(_));
        if in_bf16 && holds_in_bf16(&tensor.name, &tensor.shape) { Kind::BFloat16 } else { Kind::Float }
    }

    /// The dtype that the tensor is held in.
    fn kind(self, tensor: &TensorSize, dtype: Option<Kind>, compute: Kind) -> Kind {
        let loaded = match (tensor.role, self) {
            (TensorRole::Score | TensorRole::WideFixed, _) => Kind::Float,
            (_, Self::Frozen(1..) | Self::FrozenInBf16(_)) => self.trained_kind(tensor),
            _ => dtype.unwrap_or(tensor.kind),
        };
        let narrows = loaded.elt_size_in_bytes() >= compute.elt_size_in_bytes();
        match self {
            Self::Trained(_) | Self::TrainedInBf16(_) => self.trained_kind(tensor),
            // As `Linear::hold_as_computed`: only where it takes no more memory.
            _ if tensor.role == TensorRole::Product && narrows => compute,
            _ => loaded,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{CausalLm, Dtype, ModelOptions, Param, Precision, QuantType, SequenceClassifier, Trains};
    use crate::optim::{Optim, Optimizer, OptimizerConfig, state_bytes};

    fn golden(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name)
    }

    const LMS: [&str; 26] = [
        "qwen3_next",
        "lfm2",
        "qwen3_5",
        "gpt2",
        "gpt_neox",
        "llama_tied",
        "llama_untied",
        "gemma2",
        "opt",
        "phi3",
        "qwen3",
        "gemma3",
        "smollm3",
        "olmo2",
        "qwen3_moe",
        "granite",
        "ministral3",
        "gpt_oss",
        "gemma4",
        "gemma4_full",
        "gemma4_moe",
        "qwen3_5_moe",
        "lfm2_moe",
        "t5",
        "t5_v11",
        "bart",
    ];

    fn lora() -> LoraConfig {
        LoraConfig { r: 4, target_modules: Some(vec!["all-linear".into()]), ..LoraConfig::default() }
    }

    /// Bytes of weights, number of parameters, number of trained ones.
    fn real(params: &[Param]) -> [usize; 3] {
        let bytes = params.iter().map(|param| param.tensor.numel() * param.tensor.kind().elt_size_in_bytes()).sum();
        let trained =
            params.iter().filter(|param| param.tensor.requires_grad()).map(|param| param.tensor.numel()).sum();
        [bytes, params.iter().map(|param| param.tensor.numel()).sum(), trained]
    }

    fn planned(held: Held) -> [usize; 3] {
        [held.weights, held.parameters, held.trained]
    }

    #[test]
    fn sizes_are_those_of_the_real_tensors_in_every_family_and_holding() {
        let adapter = lora();
        for name in LMS {
            let dir = golden(name);
            let sizes = ModelSizes::of_causal_lm(ModelConfig::from_dir(&dir).unwrap(), Kind::Float, &dir).unwrap();
            for (precision, compute) in [(Precision::F32, Kind::Float), (Precision::Bf16, Kind::BFloat16)] {
                let load = |dtype| {
                    CausalLm::from_pretrained(&dir, ModelOptions { dtype, precision, ..Default::default() }).unwrap()
                };
                let held = |holding, dtype| planned(sizes.held(holding, dtype, compute).unwrap());
                let mut trained = load(Dtype::Float32);
                trained.prepare(Trains::All).unwrap();
                trained.set_trainable(true);
                assert_eq!(held(Holding::Trained(0), None), real(trained.params()), "{name}");
                let states = |model: &CausalLm, optim, holding| {
                    let config = OptimizerConfig { optim, ..rlhf_base::schema::defaults() };
                    let real = Optimizer::new(model.trainable_params(), &config).state_bytes();
                    let planned: usize =
                        sizes.trained(holding).unwrap().iter().map(|tensor| state_bytes(optim, tensor)).sum();
                    assert_eq!(planned, real, "{name}, {optim:?}");
                    real
                };
                assert_eq!(states(&trained, Optim::AdamwTorch, Holding::Trained(0)), 8 * real(trained.params())[2]);
                for optim in [Optim::Adamw8bit, Optim::Adafactor] {
                    states(&trained, optim, Holding::Trained(0));
                }
                let mut narrow = load(Dtype::Float32);
                narrow.prepare(Trains::AllInBf16).unwrap();
                narrow.set_trainable(true);
                assert_eq!(held(Holding::TrainedInBf16(0), None), real(narrow.params()), "{name}");
                states(&narrow, Optim::AdamwBf16, Holding::TrainedInBf16(0));
                for (dtype, kind) in [(Dtype::Auto, None), (Dtype::BFloat16, Some(Kind::BFloat16))] {
                    let mut frozen = load(dtype);
                    frozen.hold_as_computed();
                    assert_eq!(held(Holding::Frozen(0), kind), real(frozen.params()), "{name}");
                    let mut frozen_in_bf16 = load(dtype);
                    frozen_in_bf16.hold_in_bf16();
                    frozen_in_bf16.hold_as_computed();
                    assert_eq!(held(Holding::FrozenInBf16(0), kind), real(frozen_in_bf16.params()), "{name}");
                    let mut adapted = load(dtype);
                    adapted.prepare(Trains::Adapter).unwrap();
                    adapted.add_adapter(&adapter, 1).unwrap();
                    adapted.set_trainable(true);
                    assert_eq!(held(Holding::Adapted(&adapter), kind), real(adapted.params()), "{name}");
                    states(&adapted, Optim::Adafactor, Holding::Adapted(&adapter));
                }
                if trained.config().is_encoder_decoder() {
                    continue;
                }
                for (model, trains, frozen) in [
                    (&mut trained, Holding::Trained(1), Holding::Frozen(1)),
                    (&mut narrow, Holding::TrainedInBf16(1), Holding::FrozenInBf16(1)),
                ] {
                    let mut reference = model.share_lower_layers(1).unwrap();
                    reference.hold_as_computed();
                    model.set_trainable(true);
                    assert_eq!(held(trains, None)[2], real(model.params())[2], "{name}");
                    let upper = &reference.params()[reference.body.shared..];
                    // Independent of the dtype of the policy's files.
                    let found = held(frozen, Some(Kind::BFloat16));
                    assert_eq!(found[..2], real(upper)[..2], "{name}, {frozen:?}, {compute:?}");
                }
            }
        }
    }

    #[test]
    fn sizes_of_quantized_models_are_those_of_the_real_tensors() {
        let adapter = lora();
        let formats = [
            Quantization::FourBit { quant_type: QuantType::Nf4, nested: true },
            Quantization::FourBit { quant_type: QuantType::Fp4, nested: false },
            Quantization::EightBit,
        ];
        for (name, format) in ["llama_untied", "gpt2", "mixtral"].into_iter().zip(formats) {
            let dir = golden(name);
            let sizes = ModelSizes::of_causal_lm(ModelConfig::from_dir(&dir).unwrap(), Kind::Float, &dir).unwrap();
            let options = ModelOptions { quantization: Some(format), ..Default::default() };
            let mut model = CausalLm::from_pretrained(&dir, options).unwrap();
            model.prepare(Trains::Adapter).unwrap();
            model.add_adapter(&adapter, 1).unwrap();
            model.set_trainable(true);
            let held = sizes.held_as(Holding::Adapted(&adapter), None, Kind::Float, Some(format)).unwrap();
            let [bytes, _, trained] = real(model.params());
            let count = model.params().iter().map(Param::numel).sum::<usize>();
            assert_eq!((held.parameters, held.trained), (count, trained), "{name}");
            // The scales of eight bits are held twice, and descriptions of four bits differ in length.
            let most = 64 * sizes.linears.len() + bytes / 50;
            let weights = held.weights + held.quantized;
            assert!(weights.abs_diff(bytes) <= most, "{name}: {weights} bytes, {bytes} in memory");
        }
    }

    #[test]
    fn sizes_with_dora_and_modules_that_are_trained_in_full_are_those_of_the_real_tensors() {
        for (name, modules) in [
            ("llama_tied", "embed_tokens"),
            ("llama_tied", "lm_head norm"),
            ("llama_tied", "embed_tokens lm_head"),
            ("llama_untied", "embed_tokens lm_head mlp"),
        ] {
            let modules: Vec<String> = modules.split(' ').map(str::to_string).collect();
            let lora = LoraConfig { use_dora: true, modules_to_save: modules.clone(), ..lora() };
            let dir = golden(name);
            let sizes = ModelSizes::of_causal_lm(ModelConfig::from_dir(&dir).unwrap(), Kind::Float, &dir).unwrap();
            for (precision, compute) in [(Precision::F32, Kind::Float), (Precision::Bf16, Kind::BFloat16)] {
                let options = ModelOptions { dtype: Dtype::BFloat16, precision, ..Default::default() };
                let mut model = CausalLm::from_pretrained(&dir, options).unwrap();
                model.prepare(Trains::Adapter).unwrap();
                model.add_adapter(&lora, 1).unwrap();
                model.set_trainable(true);
                let held = sizes.held(Holding::Adapted(&lora), Some(Kind::BFloat16), compute).unwrap();
                assert_eq!(planned(held), real(model.params()), "{name}, {modules:?}");
                // The base's values in bf16, and a view of them in a reference model.
                let embedding = 2 * sizes.products()[1];
                let both = modules.len() > 1 && modules[1] == "lm_head";
                let expected = if name == "llama_tied" { if both { embedding } else { 0 } } else { held.originals };
                let norm = if modules.contains(&"norm".to_string()) { 2 * 32 * 5 } else { 0 };
                assert_eq!(held.originals, expected + norm, "{name}, {modules:?}");
            }
        }
    }

    #[test]
    fn sizes_of_classifiers_are_those_of_the_real_tensors() {
        for name in [
            "gpt_neox_cls",
            "llama_untied_cls",
            "bert_cls2",
            "roberta_cls3",
            "distilbert_cls2",
            "opt_cls",
            "deberta_cls1",
            "modernbert_cls1",
            "t5_v11_cls1",
        ] {
            let dir = golden(name);
            let sizes = ModelSizes::of_classifier(ModelConfig::from_dir(&dir).unwrap(), Kind::Float, false).unwrap();
            let options = ModelOptions { precision: Precision::Bf16, ..Default::default() };
            let mut model = SequenceClassifier::from_pretrained(&dir, None, options).unwrap();
            model.hold_as_computed();
            let held = sizes.held(Holding::Frozen(0), None, Kind::BFloat16).unwrap();
            assert_eq!(planned(held), real(model.params()), "{name}");
        }
    }

    #[test]
    fn a_value_model_of_an_encoder_decoder_has_the_sizes_of_a_classifier_with_a_new_head() {
        let dir = golden("t5");
        let sizes = ModelSizes::of_classifier(ModelConfig::from_dir(&dir).unwrap(), Kind::Float, true).unwrap();
        let mut model = SequenceClassifier::from_pretrained(&dir, Some(1), ModelOptions::default()).unwrap();
        model.set_trainable(true);
        let held = sizes.held(Holding::Trained(0), None, Kind::Float).unwrap();
        assert_eq!(planned(held), real(model.params()));
        // Two layers of d_model * (4 * 16 + 2 * 32) in the encoder, and d_model * 16 * 2 for its states in two of the decoder's.
        assert_eq!(sizes.source_products(), 32 * 2 * (4 * 16 + 2 * 32) + 2 * 2 * 32 * 16);
        assert_eq!(sizes.products()[0], 32 * 2 * (4 * 16 + 2 * 16 + 2 * 32));
    }

    #[test]
    fn copies_are_made_of_wider_weights_and_of_products_alone() {
        let dir = golden("llama_tied");
        let sizes = ModelSizes::of_causal_lm(ModelConfig::from_dir(&dir).unwrap(), Kind::BFloat16, &dir).unwrap();
        let held = |holding, compute| sizes.held(holding, None, compute).unwrap();
        let products: usize = sizes.linears.iter().map(|linear| linear.widths[0] * linear.widths[1]).sum();
        let embedding = sizes.products()[1];
        let trained = held(Holding::Trained(0), Kind::BFloat16);
        assert_eq!((trained.copies, trained.widened), (2 * (products + embedding), 0));
        assert_eq!(held(Holding::Trained(0), Kind::Float).copies, 0);
        let frozen = held(Holding::Frozen(0), Kind::BFloat16);
        assert_eq!((frozen.copies, frozen.widened), (0, 0));
        let wide = held(Holding::Frozen(0), Kind::Float);
        assert_eq!((wide.copies, wide.widened_layers), (0, 4 * products));
        assert_eq!(wide.weights, frozen.weights);
    }

    #[test]
    fn activations_grow_with_the_tokens_and_less_with_checkpoints() {
        let dir = golden("llama_untied");
        let sizes = ModelSizes::of_causal_lm(ModelConfig::from_dir(&dir).unwrap(), Kind::Float, &dir).unwrap();
        let activations = |tokens: usize, kind, checkpoints| {
            let tokens = PassTokens { computed: tokens, attended: tokens, outputs: tokens, ..PassTokens::default() };
            sizes.activations(tokens, (kind, Device::Cpu), None, checkpoints).unwrap()
        };
        assert_eq!(activations(20, Kind::Float, false).stored, 2 * activations(10, Kind::Float, false).stored);
        assert!(activations(20, Kind::BFloat16, false).stored < activations(20, Kind::Float, false).stored);
        assert!(activations(20, Kind::Float, true).stored < activations(20, Kind::Float, false).stored / 2);
        // The number by which micro-batches are sized leaves out statistics of norms, and inputs of the head.
        let place = (Kind::Float, Device::Cpu);
        let [about, exact] =
            [1000 * sizes.activation_bytes(place, false), activations(1000, Kind::Float, false).stored];
        assert!((0.9..1.3).contains(&(exact as f64 / about as f64)), "{about}, {exact}");
    }

    #[test]
    fn micro_batches_are_sized_by_what_attention_and_layers_with_a_state_store_without_kernels() {
        for name in ["qwen3_5", "qwen3_next", "lfm2", "gpt_oss", "gemma4", "gemma4_moe"] {
            let dir = golden(name);
            let sizes = ModelSizes::of_causal_lm(ModelConfig::from_dir(&dir).unwrap(), Kind::Float, &dir).unwrap();
            let width = sizes.config().max_position_embeddings;
            let tokens =
                PassTokens { computed: width, attended: width, outputs: width, rows: [1, width], ..Default::default() };
            // No kernel computes f16.
            for kind in [Kind::Float, Kind::Half] {
                let place = (kind, Device::Cpu);
                let about = width * sizes.activation_bytes(place, false);
                let Activations { stored, working } = sizes.activations(tokens, place, None, false).unwrap();
                let ratio = (stored + working) as f64 / about as f64;
                assert!((0.7..1.6).contains(&ratio), "{name}, {kind:?}: {about}, {stored} and {working}");
            }
        }
    }
}
