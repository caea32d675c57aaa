//! A model: a body with a head, and what does not depend on which head it is.

use super::body::{Body, Gathered, Loaded, Trains};
use super::config::ModelConfig;
use super::linear::Linear;
use super::params::Param;
use super::shape::Family;
use super::shard::Shards;
use super::{Dtype, Quantization};
use rlhf_base::Result;
use rlhf_base::dist::{World, ZeroStage};
use rlhf_base::offload::Offload;
use rlhf_base::weights::{self, replace_files};
use serde_json::Value;
use std::path::Path;
use tch::{Device, Kind};

/// A transformer with a head: [`CausalLm`](super::CausalLm) or [`SequenceClassifier`](super::SequenceClassifier). Both have the methods
/// of this type.
#[derive(Debug)]
pub struct PretrainedModel<H> {
    pub(super) body: Body,
    pub(super) head: H,
}

/// The head of a [`PretrainedModel`]: [`LmHead`](super::LmHead) or [`ClassifierHead`](super::ClassifierHead), and no other type.
pub trait ModelHead: sealed::Sealed {
    /// The linear layer over the vocabulary, if it has one. Its products are computed in the dtype of the model's; those of other heads in
    /// f32.
    fn linear(&self) -> Option<&Linear> {
        None
    }

    /// [`ModelHead::linear`], mutable.
    fn linear_mut(&mut self) -> Option<&mut Linear> {
        None
    }

    /// The layer that can have an adapter, if it has one.
    fn adapted(&mut self) -> Option<&mut Linear> {
        None
    }

    /// The configuration to save, with these token ids.
    fn saved_config(&self, config: &ModelConfig, eos: Option<i64>, pad: Option<i64>) -> ModelConfig;

    /// The name in a saved file of the tensor `name`, where it differs.
    fn stored_name(&self, _family: &Family, _name: &str) -> Option<String> {
        None
    }

    /// The content of `generation_config.json` to save with the configuration `config`, if the model generates.
    fn saved_generation(&self, _config: &ModelConfig, _eos: &[i64], _pad: Option<i64>) -> Option<Value> {
        None
    }
}

pub(super) mod sealed {
    /// Keeps [`ModelHead`](super::ModelHead) to the heads of this crate.
    pub trait Sealed {}
}

impl<H: ModelHead> PretrainedModel<H> {
    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.body.config
    }

    /// Sets the token that ends a text in the model's configuration.
    pub fn set_eos(&mut self, eos: i64) {
        self.body.config.set_eos(eos);
    }

    /// The format of quantized weights of linear layers, if there are any.
    pub fn quantization(&self) -> Option<Quantization> {
        self.body.quantization()
    }

    /// The device of the weights.
    pub fn device(&self) -> Device {
        self.body.device
    }

    /// The parameters in the order of the model; an adapter's parameters come last.
    pub fn params(&self) -> &[Param] {
        &self.body.params
    }

    /// The parameters that require gradients: after [`PretrainedModel::set_trainable`] all of them, or those of the adapter and of a
    /// classifier's head.
    pub fn trainable_params(&self) -> impl Iterator<Item = &Param> {
        self.body.trainable_params()
    }

    /// Sets whether the weights require gradients; if there is an adapter, whether its weights and those of a classifier's head do.
    pub fn set_trainable(&mut self, trainable: bool) {
        self.body.set_trainable(trainable);
    }

    /// Sets whether training stores only the input of each layer and recomputes the layer in the backward pass: less memory,
    /// about a third more work, the same gradients.
    pub fn set_gradient_checkpointing(&mut self, on: bool) {
        self.body.gradient_checkpointing = on;
    }

    /// Activation bytes per token of a forward pass with gradients, about.
    pub fn activation_bytes(&self, gradient_checkpointing: bool) -> usize {
        self.body.activation_bytes(gradient_checkpointing)
    }

    /// Whether the model has an adapter.
    pub fn has_adapter(&self) -> bool {
        self.body.adapter.is_some()
    }

    /// Merges the adapter, if there is one, into the weights. The sums are computed and held in f32, so a low-precision model is
    /// saved in f32 unless [`PretrainedModel::hold_as_computed`] rounds it again.
    pub fn merge_adapter(&mut self) {
        self.body.merge_adapter(self.head.adapted());
    }

    /// Merges the adapter and rounds the model to the dtypes of its base, for saving.
    pub fn merge_rounded(&mut self) {
        let originals = std::mem::take(&mut self.body.originals);
        self.merge_adapter();
        self.hold_as_computed();
        self.body.round_as(&originals);
    }

    /// Holds each matrix in the dtype of its product, where that takes no more memory: a frozen model returns the same numbers,
    /// bit for bit. Norms, embeddings, trainable weights and weights shared with another model stay as they are, and so does the head of
    /// a classifier, whose product is always computed in f32. The model is saved with the rounded weights.
    pub fn hold_as_computed(&mut self) {
        let is_untied = !self.body.config.tie_word_embeddings;
        self.body.hold_as_computed(self.head.linear_mut().filter(|_| is_untied));
    }

    /// Holds matrices and embeddings of at least 4096 elements in bf16, also while they are trained by
    /// [`Optim::AdamwBf16`](crate::optim::Optim::AdamwBf16), and other tensors, among them a classifier's head, in f32. Called before the
    /// model is made trainable.
    pub fn hold_in_bf16(&mut self) {
        self.body.hold_in_bf16();
        self.drop_copies_of_head();
    }

    /// Prepares weights that were just read for training: merges an adapter that is already there, and holds the weights as `trains` says.
    /// Weights that were quantized when they were read are read again, and quantized with the adapter in them.
    ///
    /// # Errors
    /// If quantized weights would be trained; if a file cannot be read.
    pub fn prepare(&mut self, trains: Trains) -> Result<()> {
        self.body.check_trains(trains)?;
        self.body.merge_before_quantizing()?;
        self.merge_adapter();
        match trains {
            Trains::Adapter => self.hold_as_computed(),
            Trains::All => self.body.hold_as_f32(),
            Trains::AllInBf16 => self.hold_in_bf16(),
        }
        Ok(())
    }

    /// The parts of the folder other than the language model, which a saved model does not have, such as `model.visual.* (12 tensors)`.
    pub fn parts_left_out(&self) -> Option<&str> {
        self.body.left_out.as_deref()
    }

    /// Whether tensors were rounded to the configured dtype when they were read.
    pub fn was_rounded(&self) -> bool {
        self.body.rounded
    }

    /// Whether holding the weights in bf16, in which they are trained, has changed numbers.
    pub fn was_rounded_to_train(&self) -> bool {
        self.body.rounded_to_train
    }

    /// Whether [`PretrainedModel::prepare`] merged an adapter into weights whose files are quantized, which loses most of a small one.
    pub fn was_merged_into_codes(&self) -> bool {
        self.body.merged_into_codes
    }

    /// The dtype that the adapter's base was rounded to, if the run has to save that base because no folder holds it.
    pub fn rounded_base(&self) -> Option<Kind> {
        self.body.rounded_base()
    }

    /// Divides the model over the ranks of `world`, by a stage of ZeRO: gradients, optimizer state and parameters; a frozen model at
    /// stage 3 only. All ranks have the same weights and call this at the same point. To be called once, after
    /// [`PretrainedModel::set_trainable`] and [`PretrainedModel::hold_as_computed`], as dtypes and trained parameters are fixed then.
    ///
    /// Results, gradients and saved files stay the same, up to the rounding of sums. From stage 2 on, gradients come from
    /// functions such as [`CausalLm::logprobs_backward`](super::CausalLm::logprobs_backward) only, and at stage 3 the tensors of
    /// [`PretrainedModel::params`] have memory only while [`PretrainedModel::gathered`] holds them.
    pub fn shard(&self, world: &World, stage: ZeroStage) {
        self.drop_copies_of_head();
        self.body.shard(world, stage);
    }

    /// Gathers parameters that are divided over ranks until the guard is dropped, so that passes need not: for the generation of
    /// many tokens. Called by all ranks at the same point; does nothing below stage 3.
    ///
    /// # Errors
    /// If a rank has ended or does not respond.
    pub fn gathered(&self) -> Result<Gathered<'_>> {
        self.body.gathered(self.head.linear())
    }

    /// Offloads the weights of a frozen model between its passes, except weights that it shares with another model. Results stay
    /// the same. `name` is the model's in errors. Does nothing if they are offloaded already, or divided over ranks.
    ///
    /// # Errors
    /// If there is not enough memory or disk space for them.
    pub fn offload(&self, place: &Offload, name: &str) -> Result<()> {
        self.drop_copies_of_head();
        self.body.offload(place, name)
    }

    /// Holds the weights of a model that is offloaded in memory until the guard is dropped: for several passes, or a look at
    /// [`PretrainedModel::params`], which are only there while it holds them.
    ///
    /// # Errors
    /// If the device has no memory for them.
    pub fn loaded(&self) -> Result<Loaded<'_>> {
        self.body.loaded(self.head.linear())
    }

    /// The division of the model over ranks.
    pub fn shards(&self) -> &Shards {
        self.body.shards()
    }

    /// Frees the head's copy of its weight in the dtype of products.
    fn drop_copies_of_head(&self) {
        self.head.linear().into_iter().for_each(Linear::drop_copies);
    }

    /// Writes the base of an adapter to `dir` if no folder holds it; adapters saved later refer to `dir`.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn keep_base(&mut self, dir: &Path, eos: &[i64], pad: Option<i64>, max_shard_bytes: usize) -> Result<()> {
        let config = self.head.saved_config(&self.body.config, eos.first().copied(), pad);
        self.body.keep_base(dir, &config, max_shard_bytes)
    }

    /// Reads the trained weights that [`PretrainedModel::save_pretrained`] wrote to `dir` into this model.
    ///
    /// # Errors
    /// If they are missing or do not fit this model.
    pub fn load_trained(&mut self, dir: &Path) -> Result<()> {
        let (head, family) = (&self.head, self.body.config.family);
        self.body.load_trained(dir, |name| head.stored_name(family, name))
    }

    /// Writes `config.json` and the weights to `dir`, in the format of transformers, and `generation_config.json` for a language model. A
    /// classifier is written in its [format](super::SequenceClassifier::format).
    ///
    /// With an adapter, writes the adapter as PEFT does. The base stays in the folder it was read from; it is written to
    /// `dir/base_model` if it was not read from a folder or has changed since.
    ///
    /// `eos` and `pad` are written if they are given: all of `eos` end a generated text, and the first is appended to texts in training.
    /// Without a `pad`, a classifier's configuration names eos as pad: transformers scores no batch without one.
    /// Weights of more than `max_shard_bytes` are split into several files.
    ///
    /// # Errors
    /// If a file cannot be written; the folder then keeps its previous content.
    pub fn save_pretrained(&self, dir: &Path, eos: &[i64], pad: Option<i64>, max_shard_bytes: usize) -> Result<()> {
        self.save_pretrained_as(dir, eos, pad, max_shard_bytes, Dtype::Auto)
    }

    /// [`PretrainedModel::save_pretrained`], with weights that are rounded to `dtype`, heads and norms too, as transformers holds a model of
    /// a dtype; with `Auto` each as it is held. Quantized weights and adapters are written as always.
    ///
    /// # Errors
    /// As [`PretrainedModel::save_pretrained`]; if a number is too large for `dtype`.
    pub fn save_pretrained_as(
        &self,
        dir: &Path,
        eos: &[i64],
        pad: Option<i64>,
        max_shard_bytes: usize,
        dtype: Dtype,
    ) -> Result<()> {
        let _loaded = self.loaded()?;
        let config = self.head.saved_config(&self.body.config, eos.first().copied(), pad);
        let generation = self.head.saved_generation(&config, eos, pad);
        let stored_name = |name: &str| self.head.stored_name(config.family, name);
        replace_files(dir, |dir| {
            self.body.save(dir, &config, max_shard_bytes, dtype.kind(), stored_name)?;
            let Some(generation) = &generation else { return Ok(()) };
            weights::write_text(&dir.join("generation_config.json"), &weights::pretty(generation))
        })
    }
}
