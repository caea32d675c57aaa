//! The decoder: one stack of layers for all families. Their differences are data, in [`Shape`] and [`Names`].

mod layer_heads;

use super::batch::StopCheck;
use super::gates::opened;
use super::joint;
use super::kv_cache::{CachedHeads, KvCache};
use super::layer_inputs::{AllInputs, InputBranch, embedding_rows};
use super::layout::{BiasBlock, Layout, Scores};
use super::linear::{Linear, LinearShape, Norm};
use super::lora::Dropout;
use super::mixer::Mixer;
use super::mlp::Mlp;
use super::params::{Builder, Init};
use super::relative::RelativePositions;
use super::shape::{CrossNames, Names, Order, QkNorm, Qkv, Shape};
use super::shard::{Direction, LayerGuard, Shards};
use super::stacked::{ParallelExperts, Stack};
use super::state::StateShape;
use super::{on_gpu, plain, uses_kernels};
use rlhf_base::rng::Stream;
use rlhf_base::{Error, Result};
use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use tch::{Device, Kind, Tensor};
use tch_ext::PrefixTree;

#[derive(Debug)]
struct Layer {
    /// `None` in a first layer that reads the embeddings as they are.
    input_norm: Option<Norm>,
    /// Takes the place of attention, which then has no projections.
    mixer: Option<Mixer>,
    qkv: Vec<Linear>,
    /// Norms of queries and keys; of queries alone if the keys are another layer's.
    qk_norm: Vec<Norm>,
    attention_out: Linear,
    mlp_norm: Norm,
    output_norms: Option<[Norm; 2]>,
    mlp: Mlp,
    /// Experts in addition to the MLP.
    parallel_experts: Option<ParallelExperts>,
    scores: Scores,
    cross: Option<CrossAttention>,
    /// The branch that reads the layer's own input.
    input_branch: Option<InputBranch>,
    /// Factor of the result.
    scalar: Option<Tensor>,
}

/// Attention of a decoder's layer to the encoder's hidden states.
#[derive(Debug)]
struct CrossAttention {
    norm: Norm,
    qkv: [Linear; 3],
    out: Linear,
    scores: Scores,
}

/// A model without its head: maps tokens to hidden states.
#[derive(Debug)]
pub(crate) struct Decoder {
    /// The encoder of an encoder-decoder, with the same embedding.
    encoder: Option<Box<Decoder>>,
    embed: Tensor,
    positions: Option<Tensor>,
    token_types: Option<Tensor>,
    embed_norm: Option<Norm>,
    relative: Option<RelativePositions>,
    /// Inputs of each layer.
    layer_inputs: Option<AllInputs>,
    /// Projections from the width of the embeddings to that of the layers, and back.
    project: Option<[Linear; 2]>,
    /// Table of the bias of scores by distance, `[buckets, heads]`.
    bias_table: Option<Tensor>,
    layers: Vec<Layer>,
    /// Index of the stack's first layer among all layers of the model: an encoder's layers come before its decoder's.
    first_layer: usize,
    final_norm: Option<Norm>,
    shape: Shape,
    /// Dtype of products and attention; the residual stream is f32 in any case.
    pub compute: Kind,
    /// The division of the model's parameters over ranks.
    shards: Shards,
}

/// The keys and values that the tokens of one forward pass attend to.
enum Attention<'a> {
    /// Whole sequences; their keys and values are also stored, if there is a cache.
    Sequences(&'a Layout, Option<&'a mut KvCache>),
    /// One token per row, after the cached tokens.
    Step(&'a mut KvCache),
    /// Several tokens of some rows, after the cached tokens.
    Appended(&'a mut KvCache),
}

/// Options of [`Decoder::backward`].
#[derive(Clone, Copy)]
pub(crate) struct BackwardOptions<'a> {
    /// Dropout before the adapters.
    pub dropout: Option<&'a Dropout>,
    /// Whether to store only the input of each layer and to recompute the layer in the backward pass.
    pub gradient_checkpointing: bool,
}

/// State shared by all layers of one forward pass.
struct Pass<'a> {
    attention: Attention<'a>,
    /// The tree of prompts and responses, if attention runs over it in all layers. Positions, queries, keys and values then have the tokens of a
    /// shared prompt once, not once for each of its responses.
    tree: Option<&'a PrefixTree>,
    /// Cosines and sines of each of the model's rotary positions.
    rotations: Vec<(Tensor, Tensor)>,
    /// Factors of the queries by position, `[N, 1]` f32, if one is not 1.
    query_factors: Option<Tensor>,
    /// The bias of scores by distance, `[rows or 1, heads, queries, keys]` f32.
    bias: Option<Tensor>,
    /// Inputs of each layer in addition to its hidden states, `[N, layers, width]` f32.
    inputs: Option<Tensor>,
    /// Keys and values of whole sequences that later layers use too, by the layer that computed them.
    keys: HashMap<usize, (Tensor, Tensor)>,
    memory: Option<Memory>,
    dropout: Option<&'a Dropout>,
    /// Whether all layers have one graph and their parameters are on this rank: the end of a layer may then compute the beginning of the next.
    joins_layers: bool,
    /// The input of the next layer's attention, or the result of the final norm, if the layer before it has computed it.
    normed: Option<Tensor>,
}

/// The encoder's hidden states `[N, hidden size]` f32, which a decoder attends to.
struct Memory {
    states: Tensor,
    /// Dropout before the adapters of the projections of these states.
    dropout: Option<Dropout>,
}

/// The forward pass of a stack in which each layer has its own backward pass.
struct StoredLayers {
    /// The input of each layer, its output if that has a graph, and the state of dropout before it.
    layers: Vec<(Tensor, Option<LayerOutput>, Option<Vec<Stream>>)>,
    /// The state of dropout before the embedding.
    first_state: Option<Vec<Stream>>,
    /// The output of the last layer, a leaf.
    top: Tensor,
    /// The bias by distance with its graph, and the leaf that the layers read.
    bias: Option<(Tensor, Tensor)>,
    /// The inputs of all layers with their graph, and the leaf that the layers read.
    inputs: Option<(Tensor, Tensor)>,
    /// Leaves of the keys and values that later layers use too.
    keys: HashMap<usize, (Tensor, Tensor)>,
    memory: Option<Memory>,
}

/// The hidden states after a layer, with their graph, and the keys and values that later layers use too.
struct LayerOutput {
    states: Tensor,
    keys: Option<(Tensor, Tensor)>,
}

impl LayerOutput {
    /// The backward pass from the gradient of the hidden states and from the gradients of `leaves`, the leaves of keys and values.
    fn backward(&self, gradient: &Tensor, leaves: Option<(Tensor, Tensor)>) {
        let (Some(keys), Some(leaves)) = (&self.keys, leaves) else {
            return tch_ext::backward(&self.states, gradient);
        };
        let product = |x: &Tensor, gradient: &Tensor| (x * gradient).sum(Kind::Float);
        let mut total = product(&self.states, gradient);
        for (x, leaf) in [(&keys.0, leaves.0), (&keys.1, leaves.1)] {
            let gradient = leaf.grad();
            if gradient.defined() {
                total += product(x, &gradient);
            }
        }
        tch_ext::backward(&total, &total.ones_like());
    }
}

/// A leaf with the values of `x`, which collects its gradient.
fn as_leaf(x: &Tensor) -> Tensor {
    x.detach().set_requires_grad(true)
}

impl Decoder {
    pub(crate) fn new(shape: &Shape, b: &mut Builder<'_>, compute: Kind) -> Result<Self> {
        b.check_layers(shape.num_hidden_layers + shape.encoder_layers.unwrap_or(0))?;
        let names = &shape.family.names;
        let embed = [shape.vocab_size, shape.embedding_size];
        let embed = b.embedding(format!("{}.weight", names.embed), &embed, Init::Normal(shape.initializer_range))?;
        if names.encoder.is_some() {
            b.check_copies(&embed)?;
        }
        let encoder = match (shape.encoder_shape(), names.encoder) {
            (Some(shape), Some(names)) => Some(Self::stack(&shape, names, &embed, b, compute)?),
            _ => None,
        };
        let mut decoder = Self::stack(shape, names, &embed, b, compute)?;
        decoder.first_layer = encoder.as_ref().map_or(0, |encoder| encoder.layers.len());
        decoder.encoder = encoder.map(Box::new);
        let shards = decoder.shards.clone();
        decoder.set_shards(shards);
        if b.makes_memory() {
            decoder.lay_out(&HashSet::new());
        }
        Ok(decoder)
    }

    /// One stack of layers with the embedding `embed`.
    fn stack(shape: &Shape, names: &Names, embed: &Tensor, b: &mut Builder<'_>, compute: Kind) -> Result<Self> {
        let (width, std) = (shape.embedding_size, shape.initializer_range);
        let table = |b: &mut Builder<'_>, base: &str, rows: i64, width: i64| {
            b.embedding(format!("{base}.weight"), &[rows, width], Init::Normal(std))
        };
        let rows = (shape.max_position_embeddings as i64).saturating_add(shape.position_offset);
        let positions = names.positions.filter(|_| shape.learned_positions);
        let positions = positions.map(|base| table(b, base, rows, shape.hidden_size)).transpose()?;
        let token_types = names.token_types.filter(|_| shape.token_types > 0);
        let token_types = token_types.map(|base| table(b, base, shape.token_types, shape.hidden_size)).transpose()?;
        let embed_norm = names.embed_norm.map(|base| Norm::build(b, base, width, shape)).transpose()?;
        let relative = RelativePositions::build(b, shape)?;
        let layer_inputs = AllInputs::build(shape, names, b, compute)?;
        let project = match names.project.filter(|_| width != shape.hidden_size) {
            None => None,
            Some([inward, outward]) => {
                let between = |b: &mut Builder<'_>, base: &str, width_in: i64, width_out: i64| {
                    let shape = LinearShape { width_in, width_out, bias: false, transposed: names.transposed, std };
                    Linear::build(b, base, shape, compute)
                };
                Some([between(b, inward, width, shape.hidden_size)?, between(b, outward, shape.hidden_size, width)?])
            }
        };
        let bias_table = match (shape.relative_bias, names.relative_bias) {
            (Some(bias), Some(base)) => {
                let init = Init::Normal(std * (shape.hidden_size as f64).powf(-0.5));
                let sizes = [bias.buckets, shape.num_attention_heads];
                Some(b.bias_table(format!("{}.0.{base}.weight", names.layers), &sizes, init)?)
            }
            _ => None,
        };
        let layers = (0..shape.num_hidden_layers).map(|i| Layer::new(i as usize, shape, names, b, compute));
        let layers = layers.collect::<Result<_>>()?;
        let final_norm = match shape.order {
            Order::Post => None,
            _ => Some(Norm::build(b, names.final_norm, shape.hidden_size, shape)?),
        };
        Ok(Self {
            encoder: None,
            embed: embed.shallow_clone(),
            positions,
            token_types,
            embed_norm,
            relative,
            layer_inputs,
            project,
            bias_table,
            layers,
            first_layer: 0,
            final_norm,
            shape: shape.clone(),
            compute,
            shards: Shards::default(),
        })
    }

    /// The division of the model's parameters over ranks.
    pub(crate) fn shards(&self) -> &Shards {
        &self.shards
    }

    /// Sets the division of the model's parameters to that of a model whose memory this one shares.
    pub(crate) fn set_shards(&mut self, shards: Shards) {
        self.encoder.iter_mut().for_each(|encoder| encoder.shards = shards.clone());
        self.shards = shards;
    }

    /// Index of the layer that the parameter `name` is part of, an encoder's layers before its decoder's; `None` outside the layers.
    pub(crate) fn layer_of(&self, name: &str) -> Option<usize> {
        let names = &self.shape.family.names;
        // All layers of a stack share the bias by distance.
        if names.relative_bias.is_some_and(|bias| name.ends_with(&format!(".{bias}.weight"))) {
            return None;
        }
        let layer_index =
            |names: &Names| name.strip_prefix(names.layers)?.strip_prefix('.')?.split('.').next()?.parse().ok();
        let decoder_layer = layer_index(names).map(|layer: usize| layer + self.first_layer);
        decoder_layer.or_else(|| names.encoder.and_then(layer_index))
    }

    /// Numbers of the encoder's layers, 0 without one, and of all layers.
    pub(crate) fn num_layers(&self) -> [usize; 2] {
        [self.first_layer, self.first_layer + self.layers.len()]
    }

    /// The embedding `[vocab, embedding size]`, which is also the LM head if the two are tied.
    pub(crate) fn embedding(&self) -> Tensor {
        self.embed.shallow_clone()
    }

    /// The linear layers, which can have adapters.
    pub(crate) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        let Self { encoder, project, layers, layer_inputs, .. } = self;
        let encoder = encoder.as_deref_mut().map(|encoder| (&mut encoder.project, &mut encoder.layers));
        let stacks = encoder.into_iter().chain([(project, layers)]);
        let linears = stacks.flat_map(|(project, layers)| {
            project.iter_mut().flatten().chain(layers.iter_mut().flat_map(Layer::linears_mut))
        });
        linears.chain(layer_inputs.iter_mut().map(|inputs| &mut inputs.projection))
    }

    /// The encoder, if there is one, and the decoder.
    fn stacks(&self) -> impl Iterator<Item = &Self> {
        self.encoder.as_deref().into_iter().chain([self])
    }

    /// The linear layers outside the layers of the stacks.
    pub(crate) fn root_linears(&self) -> impl Iterator<Item = &Linear> {
        let projections = self.layer_inputs.iter().map(|inputs| &inputs.projection);
        self.stacks().flat_map(|stack| stack.project.iter().flatten()).chain(projections)
    }

    /// All linear layers of the stacks.
    pub(crate) fn linears(&self) -> impl Iterator<Item = &Linear> {
        let layers = self.stacks().flat_map(|stack| &stack.layers);
        self.root_linears().chain(layers.flat_map(Layer::linears))
    }

    /// The weights of stacked experts.
    pub(crate) fn stacks_mut(&mut self) -> impl Iterator<Item = &mut Stack> {
        self.layers.iter_mut().flat_map(Layer::stacks_mut)
    }

    /// Lays the weights of layers that read the same input out one after another, where one product computes them; but for the tensors at
    /// the addresses `kept`. Not once anything but handles of these tensors refers to their memory.
    pub(crate) fn lay_out(&self, kept: &HashSet<*mut c_void>) {
        for layer in self.stacks().flat_map(|stack| &stack.layers) {
            joint::lay_out(&layer.qkv, kept);
            layer.mlp.lay_out(kept);
        }
    }

    /// Frees the copies of weights in the dtype of products, and of norms in f32.
    pub(crate) fn drop_copies(&self) {
        self.linears().for_each(Linear::drop_copies);
        self.layers.iter().flat_map(Layer::stacks).for_each(Stack::drop_copies);
        self.norms().for_each(Norm::drop_factors);
    }

    /// All norms of the stacks.
    fn norms(&self) -> impl Iterator<Item = &Norm> {
        let layers = self.stacks().flat_map(|stack| &stack.layers);
        self.stacks().flat_map(Self::root_norms).chain(layers.flat_map(Layer::norms))
    }

    /// The norms of this stack outside of its layers.
    fn root_norms(&self) -> impl Iterator<Item = &Norm> {
        let relative = self.relative.iter().filter_map(|relative| relative.norm.as_ref());
        let inputs = self.layer_inputs.iter().map(|inputs| &inputs.norm);
        self.embed_norm.iter().chain(&self.final_norm).chain(relative).chain(inputs)
    }

    /// Gathers layer `i`, if its parameters are divided over ranks; the next in this direction is gathered meanwhile.
    fn whole_layer(&self, i: usize, direction: Direction) -> Result<WholeLayer<'_>> {
        Ok(WholeLayer { _guard: self.shards.layer(self.first_layer + i, direction)?, decoder: self, i })
    }

    /// Hidden states after the final norm, `[M, embedding size]` f32, of whole sequences: at the indices `rows` `[M]` i64 of the
    /// packed order, or at all tokens. Fills `cache` if there is one.
    ///
    /// # Errors
    /// If `ends` ends the pass; if the parameters are divided over ranks, and a rank has ended or does not respond (so in all functions that
    /// run a pass); if memory does not suffice.
    pub(crate) fn forward(
        &self,
        layout: &Layout,
        cache: Option<&mut KvCache>,
        rows: Option<&Tensor>,
        dropout: Option<&Dropout>,
        ends: StopCheck<'_>,
    ) -> Result<Tensor> {
        within_memory(layout, || self.forward_all(layout, cache, rows, dropout, ends))
    }

    fn forward_all(
        &self,
        layout: &Layout,
        mut cache: Option<&mut KvCache>,
        rows: Option<&Tensor>,
        dropout: Option<&Dropout>,
        ends: StopCheck<'_>,
    ) -> Result<Tensor> {
        if let Some(cache) = &mut cache {
            cache.begin_sequences(layout);
        }
        let memory = match (&self.encoder, &layout.source) {
            (Some(encoder), Some(source)) => {
                let dropout = dropout.map(|dropout| dropout.over(&source.layout.lens));
                Some(Memory { states: encoder.forward(&source.layout, None, None, dropout.as_ref(), ends)?, dropout })
            }
            _ => None,
        };
        let mut x = self.embed(&layout.tokens, &layout.positions, dropout);
        let inputs = self.inputs(&layout.tokens, &x, dropout);
        let mut pass = self.pass_over(layout, cache, dropout);
        pass.inputs = inputs;
        // The bias of long rows is computed in blocks if no gradient needs it.
        let in_blocks = |table: &Tensor| layout.is_long() && !table.get(0).requires_grad();
        let bias = (!self.bias_table.as_ref().is_some_and(in_blocks)).then(|| self.bias(layout, 0, layout.width));
        (pass.bias, pass.memory) = (bias.flatten(), memory);
        pass.joins_layers = !self.shards.are_params_divided();
        for i in 0..self.layers.len() {
            ends.check()?;
            let _whole = self.whole_layer(i, Direction::Forward)?;
            x = self.layer(i, &x, &mut pass, rows);
        }
        Ok(self.finish(x, pass.normed, rows, dropout))
    }

    /// Hidden states `[rows, embedding size]` f32 of one more token per row; `tokens` is `[rows]` i64.
    pub(crate) fn forward_step(&self, tokens: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        let positions = cache.begin_step(tokens);
        let mut x = self.embed(tokens, &positions, None);
        let distances = self.bias_table.is_some().then(|| cache.distances());
        let mut pass = self.pass(&positions, Attention::Step(cache), None);
        pass.inputs = self.inputs(tokens, &x, None);
        pass.bias = distances.and_then(|distances| self.bias_at(&distances));
        pass.joins_layers = !self.shards.are_params_divided();
        for i in 0..self.layers.len() {
            let _whole = self.whole_layer(i, Direction::Forward)?;
            x = self.layer(i, &x, &mut pass, None);
        }
        Ok(self.finish(x, pass.normed, None, None))
    }

    /// Appends several tokens to some rows of the cache: to row `rows[i]` the next `counts[i]` of `tokens`, `[N]` i64. Only if
    /// [`Decoder::can_append`].
    pub(crate) fn forward_appended(
        &self,
        tokens: &Tensor,
        (rows, counts): (&[usize], &[usize]),
        cache: &mut KvCache,
    ) -> Result<()> {
        let positions = cache.begin_appended(rows, counts);
        let mut x = self.embed(tokens, &positions, None);
        let mut pass = self.pass(&positions, Attention::Appended(cache), None);
        pass.inputs = self.inputs(tokens, &x, None);
        for i in 0..self.layers.len() {
            let _whole = self.whole_layer(i, Direction::Forward)?;
            x = self.layer(i, &x, &mut pass, None);
        }
        Ok(())
    }

    /// Whether [`Decoder::forward_appended`] supports this model: it computes no biases by distance and no attention to an encoder.
    pub(crate) fn can_append(&self) -> bool {
        self.encoder.is_none() && self.has_plain_scores()
    }

    /// Whether [`Decoder::forward_step`] does the same work with the same tensors in every step of `rows` rows, so that a CUDA graph can
    /// replay it. It does not with an encoder or a bias by distance, which depend on lengths on the host; with `longrope`, whose factors are
    /// copied to the device; with experts, whose rows are chosen on the host; and with parameters that are gathered. The values of large
    /// quantized weights take too much memory, unless a kernel multiplies their codes.
    pub(crate) fn has_recordable_steps(&self, rows: i64) -> bool {
        let constant = |layer: &Layer| !layer.has_experts() && layer.linears().all(|linear| linear.is_recordable(rows));
        self.encoder.is_none()
            && self.has_plain_scores()
            && self.shape.rope_switch().is_none()
            && !self.shards.are_params_divided()
            && self.layers.iter().all(constant)
    }

    /// Forward and backward pass; accumulates gradients. `loss_gradient` receives the first `count` hidden states at `rows`,
    /// detached, and returns the gradient of the loss with respect to them.
    pub(crate) fn backward(
        &self,
        layout: &Layout,
        (rows, count): (&Tensor, i64),
        options: BackwardOptions<'_>,
        loss_gradient: impl FnOnce(&Tensor) -> Tensor,
    ) -> Result<()> {
        let loss_gradient = |hidden: &Tensor| {
            let gradient = loss_gradient(&hidden.narrow(0, 0, count).detach().set_requires_grad(true));
            gradient.constant_pad_nd([0, 0, 0, hidden.size()[0] - count])
        };
        within_memory(layout, || {
            if options.gradient_checkpointing || self.shards.are_gradients_divided() {
                return self.backward_by_layer(layout, rows, options, loss_gradient);
            }
            let hidden = self.forward_all(layout, None, Some(rows), options.dropout, StopCheck::NEVER)?;
            tch_ext::backward(&hidden, &loss_gradient(&hidden));
            Ok(())
        })
    }

    /// [`Decoder::backward`] with a backward pass per layer, so that the layer's gradients can be reduced over ranks
    /// at once. With gradient checkpointing only the input of each layer is stored, and the layer is recomputed in its backward
    /// pass, with the same dropout.
    ///
    /// Layers are also recomputed if products use copies of weights that are released after each layer: the stored
    /// activations of a layer would keep its copies alive.
    fn backward_by_layer(
        &self,
        layout: &Layout,
        rows: &Tensor,
        options: BackwardOptions<'_>,
        loss_gradient: impl FnOnce(&Tensor) -> Tensor,
    ) -> Result<()> {
        let encoded = match (&self.encoder, &layout.source) {
            (Some(encoder), Some(source)) => {
                let dropout = options.dropout.map(|dropout| dropout.over(&source.layout.lens));
                let options = BackwardOptions { dropout: dropout.as_ref(), ..options };
                let stored = encoder.store_layers((&source.layout, None), options, None)?;
                let hidden = encoder.finish(stored.top.shallow_clone(), None, None, options.dropout);
                let memory = Memory { states: hidden.detach().set_requires_grad(true), dropout };
                Some(((encoder, &source.layout, stored, hidden), memory))
            }
            _ => None,
        };
        let (encoded, memory) = encoded.unzip();
        let stored = self.store_layers((layout, Some(rows)), options, memory)?;
        let hidden = self.finish(stored.top.shallow_clone(), None, Some(rows), options.dropout);
        let gradient = loss_gradient(&hidden);
        tch_ext::backward(&hidden, &gradient);
        let memory = self.backward_layers((layout, Some(rows)), options, stored)?;
        let (Some((encoder, layout, stored, hidden)), Some(memory)) = (encoded, memory) else { return Ok(()) };
        tch_ext::backward(&hidden, &memory.states.grad());
        let options = BackwardOptions { dropout: memory.dropout.as_ref(), ..options };
        encoder.backward_layers((layout, None), options, stored).map(drop)
    }

    /// Whether layers are computed again in their backward pass.
    fn recomputes(&self, options: BackwardOptions<'_>) -> bool {
        let uses_copies =
            |layer: &Layer| layer.linears().any(Linear::uses_copies) || layer.stacks().any(Stack::uses_copies);
        let has_copies = || self.layers.iter().any(uses_copies);
        options.gradient_checkpointing || (self.shards.releases() && has_copies())
    }

    /// The forward pass of [`Decoder::backward_by_layer`] through the layers of this stack.
    fn store_layers(
        &self,
        (layout, rows): (&Layout, Option<&Tensor>),
        options: BackwardOptions<'_>,
        memory: Option<Memory>,
    ) -> Result<StoredLayers> {
        let (recomputes, dropout) = (self.recomputes(options), options.dropout);
        let state = || dropout.map(Dropout::state);
        let bias = self.bias(layout, 0, layout.width);
        let mut pass = self.pass_over(layout, None, dropout);
        pass.bias = bias.as_ref().map(|bias| bias.detach().set_requires_grad(bias.requires_grad()));
        pass.memory = memory;
        let mut layers = Vec::with_capacity(self.layers.len());
        let first_state = state();
        let mut x = tch::no_grad(|| self.embed(&layout.tokens, &layout.positions, dropout));
        let inputs = self.inputs_with_graph(layout, dropout).map(|inputs| (inputs.shallow_clone(), as_leaf(&inputs)));
        pass.inputs = inputs.as_ref().map(|(_, leaf)| leaf.shallow_clone());
        for i in 0..self.layers.len() {
            let _whole = self.whole_layer(i, Direction::ForwardAndBack)?;
            let (input, state) = (x.detach().set_requires_grad(true), state());
            let out = if recomputes {
                tch::no_grad(|| self.layer(i, &input, &mut pass, rows))
            } else {
                self.layer(i, &input, &mut pass, rows)
            };
            x = out.detach();
            let keys = pass.keys.remove(&i);
            if let Some((keys, values)) = &keys {
                pass.keys.insert(i, (as_leaf(keys), as_leaf(values)));
            }
            layers.push((input, (!recomputes).then_some(LayerOutput { states: out, keys }), state));
        }
        let Pass { bias: leaf, memory, keys, .. } = pass;
        let bias = bias.zip(leaf);
        Ok(StoredLayers { layers, first_state, top: x.set_requires_grad(true), bias, inputs, keys, memory })
    }

    /// The backward passes of stored layers, after the backward pass down to their `top`. Returns the encoder's hidden states, with their gradient.
    fn backward_layers(
        &self,
        (layout, rows): (&Layout, Option<&Tensor>),
        options: BackwardOptions<'_>,
        stored: StoredLayers,
    ) -> Result<Option<Memory>> {
        let dropout = options.dropout;
        let restore = |state| dropout.into_iter().zip(state).for_each(|(dropout, state)| dropout.set_state(state));
        let StoredLayers { mut layers, first_state, top, bias, inputs, keys, memory } = stored;
        let (bias, leaf) = bias.unzip();
        let mut pass = self.pass_over(layout, None, dropout);
        (pass.bias, pass.memory, pass.keys) = (leaf, memory, keys);
        pass.inputs = inputs.as_ref().map(|(_, leaf)| leaf.shallow_clone());
        let mut gradient = top.grad();
        while let Some((x, out, state)) = layers.pop() {
            let i = layers.len();
            let _whole = self.whole_layer(i, Direction::Backward)?;
            self.shards.lend_gradients(Some(self.first_layer + i))?;
            // The layers after this one have added to the gradients of its keys and values.
            let leaves = pass.keys.remove(&i);
            let out = out.unwrap_or_else(|| {
                restore(state);
                let states = self.layer(i, &x, &mut pass, rows);
                LayerOutput { states, keys: pass.keys.remove(&i) }
            });
            out.backward(&gradient, leaves);
            drop(out);
            gradient = x.grad();
            self.shards.reduce_layer(self.first_layer + i)?;
        }
        if let (Some(bias), Some(leaf)) = (bias.filter(Tensor::requires_grad), &pass.bias) {
            tch_ext::backward(&bias, &leaf.grad());
        }
        if let Some((inputs, leaf)) = inputs.filter(|(inputs, _)| inputs.requires_grad()) {
            tch_ext::backward(&inputs, &leaf.grad());
        }
        restore(first_state);
        let x = self.embed(&layout.tokens, &layout.positions, dropout);
        if x.requires_grad() {
            tch_ext::backward(&x, &gradient);
        }
        Ok(pass.memory)
    }

    /// Allocates a cache for `rows` sequences of at most `capacity` tokens.
    pub(crate) fn new_cache(&self, rows: usize, capacity: usize) -> Result<KvCache> {
        let heads = (0..self.layers.len()).map(|i| {
            let layer = self.shape.layer_shape(i);
            CachedHeads { kv_heads: layer.kv_heads, head_dim: layer.head_dim, keys_from: layer.keys_from }
        });
        let heads: Vec<CachedHeads> = heads.collect();
        let c = &self.shape;
        let state = |i| {
            c.mixing_of(i).map(|mixing| StateShape {
                conv: [mixing.kernel(), mixing.convolved(c.hidden_size)],
                memory: mixing.memory(),
            })
        };
        let states: Vec<Option<StateShape>> = (0..self.layers.len()).map(state).collect();
        let options = (self.compute, self.embed.device());
        let mut cache = KvCache::new(&heads, &states, rows as i64, capacity as i64, options)?;
        if let Some(switch) = self.shape.rope_switch() {
            cache.keep_tokens(switch)?;
        }
        Ok(cache)
    }

    /// The state of a pass over whole sequences.
    fn pass_over<'a>(
        &self,
        layout: &'a Layout,
        cache: Option<&'a mut KvCache>,
        dropout: Option<&'a Dropout>,
    ) -> Pass<'a> {
        // A cache stores the keys and values of all tokens.
        let tree = if cache.is_none() { self.tree(layout) } else { None };
        let positions = if tree.is_some() { &layout.positions } else { layout.attention_positions() };
        Pass { tree, ..self.pass(positions, Attention::Sequences(layout, cache), dropout) }
    }

    /// The tree of a layout's computed tokens, if all attention of a pass is computed over it.
    fn tree<'a>(&self, layout: &'a Layout) -> Option<&'a PrefixTree> {
        let c = &self.shape;
        let has_equal_heads = c.layer_shapes.is_empty() && self.encoder.is_none();
        if !has_equal_heads || !self.has_plain_scores() || c.has_length_dependent_rope() {
            return None;
        }
        let attending = self.layers.iter().filter(|layer| layer.mixer.is_none());
        layout.tree(attending.map(|layer| &layer.scores), self.compute, c.head_dim)
    }

    fn pass<'a>(&self, positions: &Tensor, attention: Attention<'a>, dropout: Option<&'a Dropout>) -> Pass<'a> {
        let rotations = self.rotations(positions, &attention);
        let query_factors = self.query_factors(positions, &attention);
        let (bias, inputs, keys, memory) = (None, None, HashMap::new(), None);
        let (tree, joins_layers, normed) = (None, false, None);
        Pass { attention, tree, rotations, query_factors, bias, inputs, keys, memory, dropout, joins_layers, normed }
    }

    /// The inputs of each layer in addition to its hidden states, for `tokens` with the embeddings `x`.
    fn inputs(&self, tokens: &Tensor, x: &Tensor, dropout: Option<&Dropout>) -> Option<Tensor> {
        self.layer_inputs.as_ref().map(|inputs| inputs.forward(tokens, x, dropout))
    }

    /// [`Decoder::inputs`] with the graph of the embeddings.
    fn inputs_with_graph(&self, layout: &Layout, dropout: Option<&Dropout>) -> Option<Tensor> {
        self.layer_inputs.as_ref()?;
        self.inputs(&layout.tokens, &self.embed(&layout.tokens, &layout.positions, dropout), dropout)
    }

    /// The factors by which queries grow with their position, if a position may be far enough for growth.
    fn query_factors(&self, positions: &Tensor, attention: &Attention<'_>) -> Option<Tensor> {
        let most = match attention {
            Attention::Sequences(layout, _) => layout.width,
            Attention::Step(cache) | Attention::Appended(cache) => cache.capacity() as i64,
        };
        let growth = self.shape.query_growth.filter(|growth| most as f64 > growth.original)?;
        Some(growth.factors(positions))
    }

    /// The bias by distance of `count` queries from `first` on of whole sequences, `[rows or 1, heads, count, width]` f32, with -inf where no key
    /// is visible; differentiable.
    fn bias(&self, layout: &Layout, first: i64, count: i64) -> Option<Tensor> {
        // Without a bias, the distances are not computed either: there are as many as the square of the width.
        self.bias_table.as_ref()?;
        let bias = self.bias_at(&layout.distances(first, count))?;
        // In a causal stack no token attends to slots after a row's end.
        match layout.slots_with_tokens().filter(|_| !self.shape.causal) {
            Some(tokens) => Some(bias.masked_fill(&tokens.logical_not(), f64::NEG_INFINITY)),
            None => Some(bias),
        }
    }

    /// The bias `[rows, heads, queries, keys]` f32 at `distances` `[rows, queries, keys]`.
    fn bias_at(&self, distances: &Tensor) -> Option<Tensor> {
        let (relative, table) = (self.shape.relative_bias?, self.bias_table.as_ref()?);
        Some(relative.scores(table, distances, self.shape.causal))
    }

    /// The residual stream after layer `i`.
    fn layer(&self, i: usize, x: &Tensor, pass: &mut Pass<'_>, rows: Option<&Tensor>) -> Tensor {
        let layer = &self.layers[i];
        let x = self.after_mlp(i, x, pass, rows);
        let x = match (&layer.input_branch, &pass.inputs) {
            (Some(branch), Some(inputs)) => {
                let input = inputs.select(1, i as i64);
                let rows = rows.filter(|_| i + 1 == self.layers.len() && pass.dropout.is_none());
                let input = rows.map_or_else(|| input.shallow_clone(), |rows| tch_ext::select_rows(&input, rows));
                branch.add_to(&x, &input, pass.dropout)
            }
            _ => x,
        };
        layer.scalar.as_ref().map_or_else(|| x.shallow_clone(), |scalar| &x * scalar.to_kind(Kind::Float))
    }

    /// The residual stream after attention and MLP of layer `i`.
    fn after_mlp(&self, i: usize, x: &Tensor, pass: &mut Pass<'_>, rows: Option<&Tensor>) -> Tensor {
        let layer = &self.layers[i];
        let (compute, dropout, input) = (self.compute, pass.dropout, pass.normed.take());
        // After the last layer's attention only the selected rows are computed. With dropout all rows are, so that its draws do
        // not depend on the selection.
        let rows = rows.filter(|_| i + 1 == self.layers.len() && dropout.is_none());
        // Attention to the encoder is over whole sequences, and after it the rows are selected.
        let (rows, late) = if layer.cross.is_some() { (None, rows) } else { (rows, None) };
        let select = |x: &Tensor| rows.map_or_else(|| x.shallow_clone(), |rows| tch_ext::select_rows(x, rows));
        let mut attend =
            |x: &Tensor| layer.attention_out.forward_dropping(&select(&self.attention(i, layer, x, pass)), dropout);
        let normed = |norm: &Norm, x: &Tensor| norm.forward(&x.to_kind(Kind::Float), Kind::Float);
        match (self.shape.order, &layer.output_norms) {
            (Order::Parallel, _) => {
                let attended = attend(&layer.input(x, compute));
                let x = select(x);
                let fed = layer.mlp.forward(&layer.mlp_norm.forward(&x, compute), dropout);
                add(&x, &attended, Some(&fed))
            }
            (Order::Post, _) => {
                let attended = attend(x);
                let x = layer.input(&add(&select(x), &attended, None), Kind::Float);
                let x = self.attend_to_encoder(i, x, pass, late);
                layer.mlp_norm.forward(&add(&x, &layer.mlp.forward(&x, dropout), None), Kind::Float)
            }
            (Order::Output, _) => {
                let attended = attend(x).to_kind(Kind::Float);
                let x = add(&select(x), &layer.input(&attended, Kind::Float), None);
                add(&x, &normed(&layer.mlp_norm, &layer.mlp.forward(&x, dropout)), None)
            }
            (Order::Sandwich, Some([after_attention, after_mlp])) => {
                let attended = attend(&layer.input(x, compute));
                let x = add(&select(x), &normed(after_attention, &attended), None);
                let fed = layer.mlp.forward(&layer.mlp_norm.forward(&x, compute), dropout);
                let fed = match &layer.parallel_experts {
                    Some(experts) => experts.add_to(&fed, &x, dropout),
                    None => fed,
                };
                add(&x, &normed(after_mlp, &fed), None)
            }
            (Order::Pre | Order::Sandwich, _) => {
                let input = input.unwrap_or_else(|| layer.input(x, compute));
                let attended = self.branch(attend(&input));
                let (x, normed) = if layer.cross.is_some() {
                    let x = self.attend_to_encoder(i, add(&select(x), &attended, None), pass, late);
                    let normed = layer.mlp_norm.forward(&x, compute);
                    (x, normed)
                } else {
                    add_and_normalize(&select(x), &attended, &layer.mlp_norm, compute)
                };
                let fed = self.branch(layer.mlp.forward(&normed, dropout));
                self.add_mlp(i, &x, &fed, pass)
            }
        }
    }

    /// The residual stream `x` with the result of layer `i`'s MLP added. If one kernel computes both, also the norm that the next layer begins
    /// with, or the final norm.
    fn add_mlp(&self, i: usize, x: &Tensor, fed: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        let layer = &self.layers[i];
        // Nothing else may change the stream before the norm reads it.
        let is_whole = layer.input_branch.is_none() && layer.scalar.is_none();
        let (norm, kind) = match self.layers.get(i + 1) {
            Some(next) => (&next.input_norm, self.compute),
            None => (&self.final_norm, Kind::Float),
        };
        let norm = norm.as_ref().filter(|_| pass.joins_layers && is_whole);
        let joined = norm.and_then(|norm| norm.sum_by_kernel(x, fed, kind));
        let Some((sum, normed)) = joined else { return add(x, fed, None) };
        pass.normed = Some(normed);
        sum
    }

    /// Scales the result of attention or MLP, which is then added to the residual stream.
    fn branch(&self, x: Tensor) -> Tensor {
        if self.shape.branch_scale == 1.0 { x } else { x * self.shape.branch_scale }
    }

    /// The residual stream after layer `i`'s attention to the encoder's hidden states, at `rows`; `x` in a stack without an encoder.
    fn attend_to_encoder(&self, i: usize, x: Tensor, pass: &mut Pass<'_>, rows: Option<&Tensor>) -> Tensor {
        let Some(cross) = &self.layers[i].cross else { return x };
        let sum = match self.shape.order {
            Order::Post => {
                let sum = add(&x, &self.cross_attention(i, cross, &x, pass), None);
                cross.norm.forward(&sum, Kind::Float)
            }
            _ => add(&x, &self.cross_attention(i, cross, &cross.norm.forward(&x, self.compute), pass), None),
        };
        rows.map_or_else(|| sum.shallow_clone(), |rows| tch_ext::select_rows(&sum, rows))
    }

    fn cross_attention(&self, i: usize, cross: &CrossAttention, x: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        let [to_queries, to_keys, to_values] = &cross.qkv;
        let by_head =
            |x: Tensor| x.view([-1, self.shape.num_attention_heads, self.shape.head_dim]).to_kind(self.compute);
        let queries = by_head(to_queries.forward_dropping(x, pass.dropout));
        let attended = match &mut pass.attention {
            Attention::Step(cache) | Attention::Appended(cache) => cache.attend_to_source(i, &cross.scores, &queries),
            Attention::Sequences(layout, cache) => {
                let (memory, source) = (pass.memory.as_ref(), layout.source.as_ref());
                let (memory, source) = memory.zip(source).expect("a decoder's batch has prompts");
                let [keys, values] = [to_keys, to_values].map(|linear| {
                    source.by_row(&by_head(linear.forward_dropping(&memory.states, memory.dropout.as_ref())))
                });
                if let Some(cache) = cache {
                    cache.store_source(&keys, &values, source.mask(self.compute));
                }
                layout.attend_to_source(&cross.scores, &queries, &keys, &values)
            }
        };
        cross.out.forward_dropping(&attended, pass.dropout)
    }

    /// The final norm, unless the last layer has computed it as `normed`, and projection; selects `rows` if the last layer did not.
    fn finish(&self, x: Tensor, normed: Option<Tensor>, rows: Option<&Tensor>, dropout: Option<&Dropout>) -> Tensor {
        let norm = self.final_norm.as_ref().filter(|_| normed.is_none());
        let mut x = normed.unwrap_or(x);
        if let Some(norm) = norm {
            x = norm.forward(&x, Kind::Float);
        }
        if let Some([_, outward]) = &self.project {
            x = outward.forward_dropping(&x, dropout).to_kind(Kind::Float);
        }
        match (rows, dropout) {
            (Some(rows), Some(_)) => tch_ext::select_rows(&x, rows),
            _ => x,
        }
    }

    fn embed(&self, tokens: &Tensor, positions: &Tensor, dropout: Option<&Dropout>) -> Tensor {
        let mut x = embedding_rows(&self.embed, tokens);
        if self.shape.embedding_scale != 1.0 {
            x *= self.shape.embedding_scale;
        }
        if let Some([inward, _]) = &self.project {
            x = inward.forward_dropping(&x, dropout).to_kind(Kind::Float);
        }
        if let Some(table) = &self.positions {
            x += embedding_rows(table, &(positions + self.shape.position_offset));
        }
        if let Some(table) = &self.token_types {
            x += table.get(0).to_kind(Kind::Float);
        }
        match &self.embed_norm {
            Some(norm) => norm.forward(&x, Kind::Float),
            None => x,
        }
    }

    /// Cosines and sines of the rotary angles, `[N, dim / 2]` each, of each of the model's rotary positions.
    fn rotations(&self, positions: &Tensor, attention: &Attention<'_>) -> Vec<(Tensor, Tensor)> {
        // The length of each token's sequence, or of the part decoded so far.
        let lens = || match attention {
            Attention::Sequences(layout, _) => layout.len_of_each_token(),
            Attention::Step(_) | Attention::Appended(_) => positions + 1,
        };
        self.shape.ropes.iter().map(|rope| rope.rotation(positions, lens)).collect()
    }

    /// The heads' outputs, `[N, heads * head_dim]`.
    fn attention(&self, index: usize, layer: &Layer, x: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        if let Some(mixer) = &layer.mixer {
            return mix(index, mixer, x, pass);
        }
        let (has_padding, shared) = match &pass.attention {
            Attention::Sequences(layout, _) => {
                (layout.has_padding(), layout.shared.as_ref().filter(|_| pass.tree.is_none()))
            }
            Attention::Step(_) | Attention::Appended(_) => (false, None),
        };
        let in_all = |x: Tensor| shared.map_or_else(|| x.shallow_clone(), |shared| shared.expand(&x));
        let mut projections = joint::results(&layer.qkv, x, pass.dropout);
        let gate = self.shape.attention_gate.then(|| {
            // The query of each head, then its gate.
            let parts = projections[0].unflatten(-1, [-1, 2, self.shape.head_dim]).unbind(-2);
            projections[0] = parts[0].flatten(1, 2);
            parts[1].flatten(1, 2)
        });
        let mut projections: Vec<Tensor> = projections.into_iter().map(in_all).collect();
        if let Some(factors) = &pass.query_factors {
            // The rotation that follows keeps the factor.
            projections[0] = (&projections[0] * factors).to_kind(self.compute);
        }
        let scores = &layer.scores;
        let has_kernel =
            self.has_plain_scores() && scores.sinks.is_none() && (scores.causal || scores.window.is_none());
        let is_appended = matches!(pass.attention, Attention::Appended(_));
        let attended = if !self.shape.layer_shapes.is_empty() {
            self.attend_by_layer(index, layer, &projections, pass)
        } else if uses_kernels(self.compute, x.device())
            && !has_padding
            && has_kernel
            && !is_appended
            && pass.tree.is_none()
        {
            self.attend_by_kernels(index, layer, projections, pass)
        } else {
            self.attend_plainly(index, layer, &projections, pass)
        };
        let attended = match &pass.attention {
            Attention::Sequences(Layout { shared: Some(shared), .. }, _) if pass.tree.is_none() => {
                shared.collapse(&attended)
            }
            Attention::Sequences(..) | Attention::Step(_) | Attention::Appended(_) => attended,
        };
        gate.map_or_else(|| attended.shallow_clone(), |gate| opened(&attended, &gate))
    }

    /// Whether nothing is added to the scores of self-attention.
    fn has_plain_scores(&self) -> bool {
        self.relative.is_none() && self.bias_table.is_none()
    }

    fn attend_by_kernels(
        &self,
        index: usize,
        layer: &Layer,
        mut projections: Vec<Tensor>,
        pass: &mut Pass<'_>,
    ) -> Tensor {
        let rotation = self.shape.layer_ropes[index].map(|rope| &pass.rotations[rope]);
        let c = &self.shape;
        assert!(
            layer.qk_norm.is_empty() || projections.len() == 3,
            "a norm of queries and keys needs separate projections"
        );
        for (norm, x) in layer.qk_norm.iter().zip(&mut projections) {
            *x = norm.forward_heads(x, self.compute);
        }
        let by_head = matches!(c.family.names.qkv, Qkv::FusedByHead(_));
        let kernel = layer.scores.kernel(c.num_attention_heads, c.num_key_value_heads, c.head_dim, by_head);
        match &mut pass.attention {
            Attention::Step(cache) => cache.attend_step_by_kernel(index, &kernel, &projections, rotation),
            Attention::Appended(_) => unreachable!("no kernel appends several tokens"),
            Attention::Sequences(layout, cache) => {
                let cache = cache.as_mut().map(|cache| cache.layer(index));
                tch_ext::attention(&kernel, &projections, rotation, &layout.starts, cache)
            }
        }
    }

    /// Attention by libtorch's own operations: the kernels' reference, and the fallback where there are none.
    fn attend_plainly(&self, index: usize, layer: &Layer, projections: &[Tensor], pass: &mut Pass<'_>) -> Tensor {
        let c = &self.shape;
        let (heads, kv_heads, head_dim) = (c.num_attention_heads, c.num_key_value_heads, c.head_dim);
        let angles = self.shape.layer_ropes[index].map(|rope| &pass.rotations[rope]);
        // A kernel rotates the heads of a decoding step, and stores its keys and values.
        let is_stored = pass.bias.is_none()
            && match &pass.attention {
                Attention::Step(cache) => cache.attends_by_kernel(index, &layer.scores, heads, self.compute),
                Attention::Sequences(..) | Attention::Appended(_) => false,
            };
        // Queries and keys of each head lie side by side.
        let together =
            matches!(c.family.names.qkv, Qkv::FusedByHead(_)) && rotates_at_once(projections[0].device()) && !is_stored;
        let [q, k, v] = match (projections, c.family.names.qkv) {
            ([fused], Qkv::FusedByHead(_)) => {
                let all = fused.view([-1, heads, 3, head_dim]);
                three(match angles.filter(|_| together) {
                    Some((cos, sin)) => tch_ext::rotate(&all, (cos, sin), 2, self.compute).unbind(2),
                    None => all.unbind(2),
                })
            }
            ([fused], _) => {
                let widths = [heads, kv_heads, kv_heads].map(|n| n * head_dim);
                three(fused.split_with_sizes(widths, -1)).map(|x| x.unflatten(-1, [-1, head_dim]))
            }
            (separate, _) => three(separate.iter().map(|x| x.view([-1, x.size()[1] / head_dim, head_dim])).collect()),
        };
        let (q, k) = match layer.qk_norm.as_slice() {
            [q_norm, k_norm] => (q_norm.forward_heads(&q, self.compute), k_norm.forward_heads(&k, self.compute)),
            _ => (q, k),
        };
        if let (Attention::Step(cache), true) = (&mut pass.attention, is_stored) {
            let qkv = [&q, &k, &v].map(|x| x.to_kind(self.compute));
            return cache.attend_step_rotating(index, &layer.scores, qkv.each_ref(), angles);
        }
        let (q, k) = match angles.filter(|_| !together) {
            None => (q, k),
            Some(angles) => (rotate(&q, angles, self.compute), rotate(&k, angles, self.compute)),
        };
        let (q, k, v) = (q.to_kind(self.compute), k.to_kind(self.compute), v.to_kind(self.compute));
        match &mut pass.attention {
            Attention::Step(cache) => cache.attend_step(index, &layer.scores, &q, Some(&(k, v)), pass.bias.as_ref()),
            Attention::Appended(cache) => cache.attend_appended(index, &layer.scores, &q, Some(&(k, v))),
            Attention::Sequences(layout, cache) => {
                if let Some(cache) = cache {
                    cache.store_sequences(index, &k, &v);
                }
                if let Some(tree) = pass.tree {
                    return tch_ext::shared_attention([&q, &k, &v], layer.scores.scale, tree).flatten(1, 2);
                }
                let layer_scores =
                    |all: &RelativePositions| all.for_layer(layout.width, [&layer.qkv[0], &layer.qkv[1]]);
                let relative = self.relative.as_ref().map(layer_scores);
                let bias_block = |first: i64, count: i64| match &pass.bias {
                    Some(bias) if count == layout.width => bias.shallow_clone(),
                    Some(bias) => bias.narrow(2, first, count),
                    None => self.bias(layout, first, count).expect("the stack has a bias by distance"),
                };
                let bias: Option<BiasBlock<'_>> = if self.bias_table.is_some() { Some(&bias_block) } else { None };
                layout.attend(&layer.scores, [&q, &k, &v], relative.as_ref(), bias)
            }
        }
    }
}

/// Runs a pass over `layout`. If memory does not suffice, libtorch's operations panic; this becomes an error with the size of the pass.
fn within_memory<T>(layout: &Layout, pass: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(pass)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        let Some(error) = text.and_then(Error::out_of_memory) else { resume_unwind(panic) };
        let (rows, width) = (layout.rows(), layout.width);
        let rows = if rows == 1 { "a row".to_string() } else { format!("{rows} rows") };
        Err(Error::Run(format!("a pass over {rows} of at most {width} tokens: {error}")))
    })
}

/// The parameters of one layer while it is computed.
struct WholeLayer<'a> {
    _guard: LayerGuard,
    decoder: &'a Decoder,
    i: usize,
}

impl Drop for WholeLayer<'_> {
    fn drop(&mut self) {
        if self.decoder.shards.releases() {
            let layer = &self.decoder.layers[self.i];
            layer.linears().for_each(Linear::drop_copies);
            layer.stacks().for_each(Stack::drop_copies);
            layer.norms().for_each(Norm::drop_factors);
        }
    }
}

impl Layer {
    /// Normalizes the input of attention, f32; returns `kind`.
    fn input(&self, x: &Tensor, kind: Kind) -> Tensor {
        self.input_norm.as_ref().map_or_else(|| x.shallow_clone(), |norm| norm.forward(x, kind))
    }

    fn linears(&self) -> impl Iterator<Item = &Linear> {
        let cross = self.cross.iter().flat_map(|cross| cross.qkv.iter().chain([&cross.out]));
        let mixer = self.mixer.iter().flat_map(Mixer::linears);
        let branch = self.input_branch.iter().flat_map(InputBranch::linears);
        let attention = mixer.chain(&self.qkv).chain([&self.attention_out]);
        let router = self.parallel_experts.iter().map(|experts| &experts.router);
        attention.chain(cross).chain(self.mlp.linears()).chain(router).chain(branch)
    }

    fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        let cross = self.cross.iter_mut().flat_map(|cross| cross.qkv.iter_mut().chain([&mut cross.out]));
        let mixer = self.mixer.iter_mut().flat_map(Mixer::linears_mut);
        let branch = self.input_branch.iter_mut().flat_map(InputBranch::linears_mut);
        let attention = mixer.chain(&mut self.qkv).chain([&mut self.attention_out]);
        let router = self.parallel_experts.iter_mut().map(|experts| &mut experts.router);
        attention.chain(cross).chain(self.mlp.linears_mut()).chain(router).chain(branch)
    }

    fn has_experts(&self) -> bool {
        self.mlp.has_experts() || self.parallel_experts.is_some()
    }

    fn norms(&self) -> impl Iterator<Item = &Norm> {
        let norms = self.input_norm.iter().chain(&self.qk_norm).chain([&self.mlp_norm]);
        let output = self.output_norms.iter().flatten();
        let parallel_experts = self.parallel_experts.iter().flat_map(|experts| &experts.norms);
        let cross = self.cross.iter().map(|cross| &cross.norm);
        let branch = self.input_branch.iter().map(|branch| &branch.norm);
        let mixer = self.mixer.iter().filter_map(Mixer::norm);
        norms.chain(output).chain(parallel_experts).chain(cross).chain(branch).chain(mixer)
    }

    /// The weights of stacked experts.
    fn stacks(&self) -> impl Iterator<Item = &Stack> {
        self.mlp.stacks().chain(self.parallel_experts.iter().flat_map(ParallelExperts::stacks))
    }

    fn stacks_mut(&mut self) -> impl Iterator<Item = &mut Stack> {
        self.mlp.stacks_mut().chain(self.parallel_experts.iter_mut().flat_map(ParallelExperts::stacks_mut))
    }

    fn new(i: usize, shape: &Shape, names: &Names, b: &mut Builder<'_>, compute: Kind) -> Result<Self> {
        let parts = LayerParts { i, shape, names, compute };
        let (hidden, layer_shape) = (shape.hidden_size, shape.layer_shape(i));
        let (at, heads_width) = (|name: &str| parts.at(name), parts.heads_width());
        let has_norm = i > 0 || shape.first_norm;
        let input_norm = has_norm.then(|| parts.norm(b, names.input_norm, hidden)).transpose()?;
        let mixing = shape.mixing_of(i).zip(names.mixing.as_ref());
        let mixer = mixing.map(|(mixing, names)| Mixer::build(mixing, names, &at, shape, (&mut *b, compute)));
        let mixer = mixer.transpose()?;
        let (qkv, qk_norm) =
            if mixer.is_some() { (Vec::new(), Vec::new()) } else { (parts.qkv(b)?, parts.qk_norm(b)?) };
        if layer_shape.keys_from.is_some() {
            // Published files have them; transformers ignores them too.
            for name in ["k_proj", "v_proj", "k_norm", "v_norm"] {
                b.allow(&at(&format!("self_attn.{name}.weight")));
            }
        }
        let (out, out_width, out_bias) = match mixing {
            None => (names.attention_out, heads_width, shape.attention_out_bias),
            Some((mixing, names)) => (names.out, mixing.width_out(hidden), mixing.out_bias()),
        };
        let attention_out = parts.linear(b, out, [out_width, hidden], out_bias, parts.residual_std())?;
        let sinks = names.sinks.filter(|_| shape.has_sinks);
        let (sink_shape, init) = ([shape.num_attention_heads], Init::Normal(shape.initializer_range));
        let sinks = sinks.map(|name| b.tensor(at(name), &sink_shape, init, true)).transpose()?;
        let cross = names.cross.map(|names| parts.cross(b, names)).transpose()?;
        let mlp_norm = parts.norm(b, names.mlp_norm, hidden)?;
        let output_norms = names.output_norms.map(|names| parts.two_norms(b, names, [hidden; 2])).transpose()?;
        let mlp = Mlp::build(i, shape, names, b, (compute, parts.residual_std()))?;
        let parallel_experts = ParallelExperts::build(i, shape, at, b, compute)?;
        let scores = Scores {
            scale: shape.attention_scale,
            softcap: shape.attention_softcap,
            window: shape.windows[i],
            causal: shape.causal,
            sinks,
        };
        let input_branch = InputBranch::build(shape, names, at, b, compute)?;
        let scalar = names.layer_scalar.filter(|_| shape.has_layer_scalars);
        let scalar = scalar.map(|name| b.buffer(at(name), &[1], Init::Ones)).transpose()?;
        Ok(Self {
            input_norm,
            mixer,
            qkv,
            qk_norm,
            attention_out,
            mlp_norm,
            output_norms,
            mlp,
            parallel_experts,
            scores,
            cross,
            input_branch,
            scalar,
        })
    }
}

/// Builds the parts of layer `i` by their names and sizes.
#[derive(Clone, Copy)]
struct LayerParts<'a> {
    i: usize,
    shape: &'a Shape,
    names: &'a Names,
    compute: Kind,
}

impl LayerParts<'_> {
    fn at(self, name: &str) -> String {
        format!("{}.{}.{name}", self.names.layers, self.i)
    }

    /// Width of all queries.
    fn heads_width(self) -> i64 {
        self.shape.num_attention_heads * self.shape.layer_shape(self.i).head_dim
    }

    /// Width of all keys.
    fn kv_width(self) -> i64 {
        let layer = self.shape.layer_shape(self.i);
        layer.kv_heads * layer.head_dim
    }

    /// GPT-2 initializes the projections into the residual stream with a smaller deviation in deeper models.
    fn residual_std(self) -> f64 {
        let depth = if self.shape.scale_residual_init { 2.0 * self.shape.num_hidden_layers as f64 } else { 1.0 };
        self.shape.initializer_range / depth.sqrt()
    }

    /// T5 initializes queries with a smaller deviation, as it does not scale scores.
    fn query_std(self) -> f64 {
        let (std, by_width) = (self.shape.initializer_range, self.shape.scale_init_by_width);
        if by_width { std / (self.shape.head_dim as f64).sqrt() } else { std }
    }

    fn norm(self, b: &mut Builder<'_>, name: &str, width: i64) -> Result<Norm> {
        Norm::build(b, &self.at(name), width, self.shape)
    }

    fn two_norms(self, b: &mut Builder<'_>, [first, second]: [&str; 2], widths: [i64; 2]) -> Result<[Norm; 2]> {
        Ok([self.norm(b, first, widths[0])?, self.norm(b, second, widths[1])?])
    }

    fn linear(self, b: &mut Builder<'_>, name: &str, widths: [i64; 2], bias: bool, std: f64) -> Result<Linear> {
        let [width_in, width_out] = widths;
        let std = if self.shape.scale_init_by_width { std / (width_in as f64).sqrt() } else { std };
        let shape = LinearShape { width_in, width_out, bias, transposed: self.names.transposed, std };
        Linear::build(b, &self.at(name), shape, self.compute)
    }

    /// The projections of queries, keys and values: without keys and values if they are another layer's, without values if keys serve as values.
    fn qkv(self, b: &mut Builder<'_>) -> Result<Vec<Linear>> {
        let (layer, std) = (self.shape.layer_shape(self.i), self.shape.initializer_range);
        let (heads_width, kv_width) = (self.heads_width(), self.kv_width());
        let queries_width = if self.shape.attention_gate { 2 * heads_width } else { heads_width };
        let parts = match &self.names.qkv {
            Qkv::Separate([q, k, v]) => {
                let mut parts = vec![(*q, queries_width, self.query_std()), (*k, kv_width, std), (*v, kv_width, std)];
                parts.truncate(if layer.keys_from.is_some() { 1 } else { 3 - usize::from(layer.values_are_keys) });
                parts
            }
            Qkv::Fused(name) | Qkv::FusedByHead(name) => vec![(*name, heads_width + 2 * kv_width, std)],
        };
        let (hidden, bias) = (self.shape.hidden_size, self.shape.qkv_bias);
        parts.into_iter().map(|(name, width, std)| self.linear(b, name, [hidden, width], bias, std)).collect()
    }

    /// The norms of queries and keys.
    fn qk_norm(self, b: &mut Builder<'_>) -> Result<Vec<Norm>> {
        let layer = self.shape.layer_shape(self.i);
        Ok(match self.names.qk_norm {
            None => Vec::new(),
            Some(QkNorm::ByHead([q, _])) if layer.keys_from.is_some() => vec![self.norm(b, q, layer.head_dim)?],
            Some(QkNorm::ByHead(names)) => self.two_norms(b, names, [layer.head_dim; 2])?.into(),
            Some(QkNorm::Whole(names)) => self.two_norms(b, names, [self.heads_width(), self.kv_width()])?.into(),
        })
    }

    /// The attention to the encoder's hidden states.
    fn cross(self, b: &mut Builder<'_>, names: CrossNames) -> Result<CrossAttention> {
        let CrossNames { norm, qkv: [q, k, v], out } = names;
        let (hidden, std) = (self.shape.hidden_size, self.shape.initializer_range);
        let (width, bias) = (self.heads_width(), self.shape.qkv_bias);
        let norm = self.norm(b, norm, hidden)?;
        let queries = self.linear(b, q, [hidden, width], bias, self.query_std())?;
        let mut other = |name: &str| self.linear(b, name, [hidden, width], bias, std);
        let qkv = [queries, other(k)?, other(v)?];
        let out = self.linear(b, out, [width, hidden], self.shape.attention_out_bias, self.residual_std())?;
        let scores =
            Scores { scale: self.shape.attention_scale, softcap: None, window: None, causal: false, sinks: None };
        Ok(CrossAttention { norm, qkv, out, scores })
    }
}

/// The result of the mixer that layer `index` has in place of attention, `[N, width]`.
fn mix(index: usize, mixer: &Mixer, x: &Tensor, pass: &mut Pass<'_>) -> Tensor {
    match &mut pass.attention {
        Attention::Sequences(layout, cache) => {
            let state = cache.as_mut().map(|cache| cache.state(index).0);
            mixer.forward(x, layout, state, pass.dropout)
        }
        Attention::Step(cache) => {
            let (state, active) = cache.state(index);
            mixer.step(x, state, active)
        }
        Attention::Appended(cache) => {
            let appended = cache.appended_rows();
            mixer.append(x, cache.state(index).0, &appended)
        }
    }
}

/// The residual stream `x` with one or two branches added.
fn add(x: &Tensor, a: &Tensor, b: Option<&Tensor>) -> Tensor {
    let on_gpu = on_gpu(x.device()) && !plain() && b.is_none_or(|b| b.kind() == a.kind());
    if on_gpu || uses_kernels(a.kind(), x.device()) {
        return tch_ext::residual(x, a, b);
    }
    match b {
        Some(b) => x + a + b,
        None => x + a,
    }
}

/// The residual stream `x` with a branch added, and its norm in `kind`.
fn add_and_normalize(x: &Tensor, branch: &Tensor, norm: &Norm, kind: Kind) -> (Tensor, Tensor) {
    norm.sum_by_kernel(x, branch, kind).unwrap_or_else(|| {
        let sum = add(x, branch, None);
        let normed = norm.forward(&sum, kind);
        (sum, normed)
    })
}

fn three(parts: Vec<Tensor>) -> [Tensor; 3] {
    parts.try_into().expect("three parts")
}

/// Whether heads on `device` are rotated by few large operations, in place of libtorch's differentiable ones: on a GPU each operation costs a
/// kernel launch.
fn rotates_at_once(device: Device) -> bool {
    on_gpu(device) && !plain()
}

/// Rotates the first dimensions of each head by the rotary angles, pairing dimension i with i + dim / 2 as Hugging Face does. Returns
/// `kind`, or f32.
fn rotate(x: &Tensor, (cos, sin): &(Tensor, Tensor), kind: Kind) -> Tensor {
    if rotates_at_once(x.device()) {
        return tch_ext::rotate(&x.unsqueeze(2), (cos, sin), 1, kind).squeeze_dim(2);
    }
    let (cos, sin) = (&cos.unsqueeze(1), &sin.unsqueeze(1));
    let half = *cos.size().last().expect("the angles have dimensions");
    let head_dim = *x.size().last().expect("a head has dimensions");
    let (a, b) = (x.narrow(-1, 0, half), x.narrow(-1, half, half));
    let mut parts = vec![&a * cos - &b * sin, &b * cos + &a * sin];
    if head_dim > 2 * half {
        parts.push(x.narrow(-1, 2 * half, head_dim - 2 * half));
    }
    Tensor::cat(&parts, -1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_memory_is_an_error_with_the_size_of_the_pass_and_another_panic_remains_one() {
        let layout = Layout::new(&[vec![1i64; 3], vec![1; 2]], Device::Cpu);
        let failing = |message: &'static str| within_memory::<()>(&layout, move || panic!("{message}"));
        let error = failing(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 3200000000 bytes. Error code 12",
        );
        let words = "a pass over 2 rows of at most 3 tokens: out of memory: cannot allocate 3.2 GB more; shorter rows";
        assert!(error.as_ref().unwrap_err().to_string().starts_with(words), "{error:?}");
        assert!(catch_unwind(AssertUnwindSafe(|| failing("size mismatch"))).is_err());
        assert_eq!(within_memory(&layout, || Ok(7)).unwrap(), 7);
    }
}
