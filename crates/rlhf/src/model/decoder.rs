//! The decoder: one stack of layers for all families. Their differences are data, in [`Shape`] and [`Names`].

use super::layout::{KvCache, Layout, Scores};
use super::linear::{Linear, LinearShape, Norm};
use super::lora::Dropout;
use super::mlp::Mlp;
use super::params::{Builder, Init};
use super::relative::RelativePositions;
use super::shape::{Names, Order, QkNorm, Qkv, Shape};
use super::shard::{LayerGuard, Shards};
use super::uses_kernels;
use crate::Result;
use tch::{Kind, Tensor};

#[derive(Debug)]
struct Layer {
    /// `None` in a first layer that reads the embeddings as they are.
    input_norm: Option<Norm>,
    qkv: Vec<Linear>,
    qk_norm: Option<[Norm; 2]>,
    attention_out: Linear,
    mlp_norm: Norm,
    output_norms: Option<[Norm; 2]>,
    mlp: Mlp,
    scores: Scores,
}

/// A model without its head: maps tokens to hidden states.
#[derive(Debug)]
pub(crate) struct Decoder {
    embed: Tensor,
    positions: Option<Tensor>,
    token_types: Option<Tensor>,
    embed_norm: Option<Norm>,
    relative: Option<RelativePositions>,
    /// Projections from the width of the embeddings to that of the layers, and back.
    project: Option<[Linear; 2]>,
    layers: Vec<Layer>,
    final_norm: Option<Norm>,
    shape: Shape,
    /// Dtype of products and attention; the residual stream is f32 in any case.
    pub(crate) compute: Kind,
    /// The division of the model's parameters over ranks.
    pub(crate) shards: Shards,
}

/// The keys and values that the tokens of one forward pass attend to.
enum Attention<'a> {
    /// Whole sequences; their keys and values are also stored, if there is a cache.
    Sequences(&'a Layout, Option<&'a mut KvCache>),
    /// One token per row, after the cached tokens.
    Step(&'a mut KvCache),
}

/// Options of [`Decoder::backward`].
#[derive(Clone, Copy)]
pub(crate) struct BackwardOptions<'a> {
    /// Dropout before the adapters.
    pub(crate) dropout: Option<&'a Dropout>,
    /// Whether to store only the input of each layer and to recompute the layer in the backward pass.
    pub(crate) gradient_checkpointing: bool,
}

/// State shared by all layers of one forward pass.
struct Pass<'a> {
    attention: Attention<'a>,
    /// Cosines and sines of each of the model's rotary positions.
    rotations: Vec<(Tensor, Tensor)>,
    dropout: Option<&'a Dropout>,
}

impl Decoder {
    pub(crate) fn new(shape: &Shape, b: &mut Builder<'_>, compute: Kind) -> Result<Self> {
        b.check_layers(shape.num_hidden_layers)?;
        let names = &shape.family.names;
        let (width, std) = (shape.embedding_size, shape.initializer_range);
        let table = |b: &mut Builder<'_>, base: &str, rows: i64, width: i64| {
            b.tensor(format!("{base}.weight"), &[rows, width], Init::Normal(std), true)
        };
        let embed = table(b, names.embed, shape.vocab_size, width)?;
        let rows = (shape.max_position_embeddings as i64).saturating_add(shape.position_offset);
        let positions = names.positions.filter(|_| shape.learned_positions);
        let positions = positions.map(|base| table(b, base, rows, shape.hidden_size)).transpose()?;
        let token_types = names.token_types.filter(|_| shape.token_types > 0);
        let token_types = token_types.map(|base| table(b, base, shape.token_types, shape.hidden_size)).transpose()?;
        let embed_norm = names.embed_norm.map(|base| Norm::build(b, base, width, shape)).transpose()?;
        let relative = RelativePositions::build(b, shape)?;
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
        let layers = (0..shape.num_hidden_layers).map(|i| Layer::new(i as usize, shape, names, b, compute));
        let layers = layers.collect::<Result<_>>()?;
        let final_norm = match shape.order {
            Order::Post => None,
            _ => Some(Norm::build(b, names.final_norm, shape.hidden_size, shape)?),
        };
        let shape = shape.clone();
        let shards = Shards::default();
        Ok(Self {
            embed,
            positions,
            token_types,
            embed_norm,
            relative,
            project,
            layers,
            final_norm,
            shape,
            compute,
            shards,
        })
    }

    /// The embedding `[vocab, embedding size]`, which is also the LM head if the two are tied.
    pub(crate) fn embedding(&self) -> Tensor {
        self.embed.shallow_clone()
    }

    /// The linear layers, which can have adapters.
    pub(crate) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.project.iter_mut().flatten().chain(self.layers.iter_mut().flat_map(Layer::linears_mut))
    }

    /// The linear layers outside the layers of the stack.
    pub(crate) fn root_linears(&self) -> impl Iterator<Item = &Linear> {
        self.project.iter().flatten()
    }

    /// Frees the copies of weights in the dtype of products.
    pub(crate) fn drop_copies(&self) {
        self.root_linears().chain(self.layers.iter().flat_map(Layer::linears)).for_each(Linear::drop_copies);
    }

    /// Gathers layer `i`, if its parameters are divided over ranks.
    fn whole_layer(&self, i: usize) -> Result<WholeLayer<'_>> {
        Ok(WholeLayer { _guard: self.shards.layer(i)?, decoder: self, i })
    }

    /// Hidden states after the final norm, `[M, embedding size]` f32, of whole sequences: at the indices `rows` `[M]` i64 of the
    /// packed order, or at all tokens. Fills `cache` if there is one.
    ///
    /// # Errors
    /// If the parameters are divided over ranks, and a rank has ended or does not respond; as all functions of passes.
    pub(crate) fn forward(
        &self,
        layout: &Layout,
        mut cache: Option<&mut KvCache>,
        rows: Option<&Tensor>,
        dropout: Option<&Dropout>,
    ) -> Result<Tensor> {
        if let Some(cache) = &mut cache {
            cache.begin_sequences(layout);
        }
        let mut x = self.embed(&layout.tokens, &layout.positions, dropout);
        let mut pass = self.pass(layout.attention_positions(), Attention::Sequences(layout, cache), dropout);
        for i in 0..self.layers.len() {
            let _whole = self.whole_layer(i)?;
            x = self.layer(i, &x, &mut pass, rows);
        }
        Ok(self.finish(x, rows, dropout))
    }

    /// Hidden states `[rows, embedding size]` f32 of one more token per row; `tokens` is `[rows]` i64.
    pub(crate) fn forward_step(&self, tokens: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        let positions = cache.begin_step(tokens);
        let mut x = self.embed(tokens, &positions, None);
        let mut pass = self.pass(&positions, Attention::Step(cache), None);
        for i in 0..self.layers.len() {
            let _whole = self.whole_layer(i)?;
            x = self.layer(i, &x, &mut pass, None);
        }
        Ok(self.finish(x, None, None))
    }

    /// Forward and backward pass; accumulates gradients. `gradient_of` receives the first `count` hidden states at `rows`,
    /// detached, and returns the gradient of the loss with respect to them.
    pub(crate) fn backward(
        &self,
        layout: &Layout,
        (rows, count): (&Tensor, i64),
        options: BackwardOptions<'_>,
        gradient_of: impl FnOnce(&Tensor) -> Tensor,
    ) -> Result<()> {
        let gradient_of = |hidden: &Tensor| {
            let gradient = gradient_of(&hidden.narrow(0, 0, count).detach().set_requires_grad(true));
            gradient.constant_pad_nd([0, 0, 0, hidden.size()[0] - count])
        };
        if options.gradient_checkpointing || self.shards.are_gradients_divided() {
            return self.backward_by_layer(layout, rows, options, gradient_of);
        }
        let hidden = self.forward(layout, None, Some(rows), options.dropout)?;
        tch_ext::backward(&hidden, &gradient_of(&hidden));
        Ok(())
    }

    /// [`Decoder::backward`], where each layer has a backward pass of its own, so that its gradients can be reduced over ranks
    /// at once. With gradient checkpointing only the input of each layer is stored, and the layer is recomputed in its backward
    /// pass, with the same dropout.
    ///
    /// Layers are also recomputed where products use copies of weights that are released after each layer: the stored
    /// activations of a layer would hold on to its copies.
    fn backward_by_layer(
        &self,
        layout: &Layout,
        rows: &Tensor,
        options: BackwardOptions<'_>,
        gradient_of: impl FnOnce(&Tensor) -> Tensor,
    ) -> Result<()> {
        let (rows, dropout) = (Some(rows), options.dropout);
        let has_copies = || self.layers.iter().flat_map(Layer::linears).any(Linear::uses_copies);
        let recomputes = options.gradient_checkpointing || (self.shards.releases() && has_copies());
        let state = || dropout.map(Dropout::state);
        let restore = |state| dropout.into_iter().zip(state).for_each(|(dropout, state)| dropout.set_state(state));
        let mut pass = self.pass(layout.attention_positions(), Attention::Sequences(layout, None), dropout);
        let mut stored = Vec::with_capacity(self.layers.len());
        let first_state = state();
        let mut x = tch::no_grad(|| self.embed(&layout.tokens, &layout.positions, dropout));
        for i in 0..self.layers.len() {
            let _whole = self.whole_layer(i)?;
            let (input, state) = (x.detach().set_requires_grad(true), state());
            let out = match recomputes {
                true => tch::no_grad(|| self.layer(i, &input, &mut pass, rows)),
                false => self.layer(i, &input, &mut pass, rows),
            };
            x = out.detach();
            stored.push((input, (!recomputes).then_some(out), state));
        }
        let top = x.set_requires_grad(true);
        let hidden = self.finish(top.shallow_clone(), rows, dropout);
        let gradient = gradient_of(&hidden);
        tch_ext::backward(&hidden, &gradient);
        let mut gradient = top.grad();
        while let Some((x, out, state)) = stored.pop() {
            let i = stored.len();
            let _whole = self.whole_layer(i)?;
            self.shards.lend_gradients(Some(i))?;
            let out = out.unwrap_or_else(|| {
                restore(state);
                self.layer(i, &x, &mut pass, rows)
            });
            tch_ext::backward(&out, &gradient);
            drop(out);
            gradient = x.grad();
            self.shards.reduce_lent(Some(i))?;
        }
        restore(first_state);
        let x = self.embed(&layout.tokens, &layout.positions, dropout);
        if x.requires_grad() {
            tch_ext::backward(&x, &gradient);
        }
        Ok(())
    }

    /// Allocates a cache for `rows` sequences of at most `capacity` tokens.
    pub(crate) fn new_cache(&self, rows: usize, capacity: usize) -> Result<KvCache> {
        let mut cache = KvCache::new(
            self.shape.num_hidden_layers,
            rows as i64,
            capacity as i64,
            self.shape.num_key_value_heads,
            self.shape.head_dim,
            (self.compute, self.embed.device()),
        )?;
        if let Some(switch) = self.shape.rope_switch() {
            cache.keep_tokens(switch)?;
        }
        Ok(cache)
    }

    fn pass<'a>(&self, positions: &Tensor, attention: Attention<'a>, dropout: Option<&'a Dropout>) -> Pass<'a> {
        Pass { rotations: self.rotations(positions, &attention), attention, dropout }
    }

    /// The residual stream after layer `i`.
    fn layer(&self, i: usize, x: &Tensor, pass: &mut Pass<'_>, rows: Option<&Tensor>) -> Tensor {
        let layer = &self.layers[i];
        let (compute, dropout) = (self.compute, pass.dropout);
        // After the last layer's attention only the selected rows are computed. With dropout all rows are, so that its draws do
        // not depend on the selection.
        let rows = rows.filter(|_| i + 1 == self.layers.len() && dropout.is_none());
        let select = |x: &Tensor| rows.map_or_else(|| x.shallow_clone(), |rows| x.index_select(0, rows));
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
                add(&x, &normed(after_mlp, &fed), None)
            }
            (Order::Pre | Order::Sandwich, _) => {
                let attended = attend(&layer.input(x, compute));
                let x = add(&select(x), &attended, None);
                let fed = layer.mlp.forward(&layer.mlp_norm.forward(&x, compute), dropout);
                add(&x, &fed, None)
            }
        }
    }

    /// The final norm and projection; selects `rows` if the last layer did not.
    fn finish(&self, mut x: Tensor, rows: Option<&Tensor>, dropout: Option<&Dropout>) -> Tensor {
        if let Some(norm) = &self.final_norm {
            x = norm.forward(&x, Kind::Float);
        }
        if let Some([_, outward]) = &self.project {
            x = outward.forward_dropping(&x, dropout).to_kind(Kind::Float);
        }
        match (rows, dropout) {
            (Some(rows), Some(_)) => x.index_select(0, rows),
            _ => x,
        }
    }

    fn embed(&self, tokens: &Tensor, positions: &Tensor, dropout: Option<&Dropout>) -> Tensor {
        let row = |table: &Tensor, ids: &Tensor| {
            let rows = match uses_kernels(Kind::Float, table.device()) {
                true => tch_ext::embedding(table, ids),
                false => Tensor::embedding(table, ids, -1, false, false),
            };
            rows.to_kind(Kind::Float)
        };
        let mut x = row(&self.embed, tokens);
        if self.shape.embedding_scale != 1.0 {
            x *= self.shape.embedding_scale;
        }
        if let Some([inward, _]) = &self.project {
            x = inward.forward_dropping(&x, dropout).to_kind(Kind::Float);
        }
        if let Some(table) = &self.positions {
            x += row(table, &(positions + self.shape.position_offset));
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
            Attention::Step(_) => positions + 1,
        };
        self.shape.ropes.iter().map(|rope| rope.rotation(positions, lens)).collect()
    }

    /// The heads' outputs, `[N, heads * head_dim]`.
    fn attention(&self, index: usize, layer: &Layer, x: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        let project = |linear: &Linear| linear.forward_dropping(x, pass.dropout);
        let (has_padding, shared) = match &pass.attention {
            Attention::Sequences(layout, _) => (layout.has_padding(), layout.shared.as_ref()),
            Attention::Step(_) => (false, None),
        };
        let in_all = |x: Tensor| shared.map_or_else(|| x.shallow_clone(), |shared| shared.expand(&x));
        let projections: Vec<Tensor> = layer.qkv.iter().map(|linear| in_all(project(linear))).collect();
        let has_kernel = self.relative.is_none() && (layer.scores.causal || layer.scores.window.is_none());
        let attended = if uses_kernels(self.compute, x.device()) && !has_padding && has_kernel {
            self.attend_by_kernels(index, layer, projections, pass)
        } else {
            self.attend_plainly(index, layer, &projections, pass)
        };
        match &pass.attention {
            Attention::Sequences(Layout { shared: Some(shared), .. }, _) => shared.collapse(&attended),
            Attention::Sequences(..) | Attention::Step(_) => attended,
        }
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
            layer.qk_norm.is_none() || projections.len() == 3,
            "a norm of queries and keys needs separate projections"
        );
        for (norm, x) in layer.qk_norm.iter().flatten().zip(&mut projections) {
            *x = norm.forward_heads(x, self.compute);
        }
        let by_head = matches!(c.family.names.qkv, Qkv::FusedByHead(_));
        let kernel = layer.scores.kernel(c.num_attention_heads, c.num_key_value_heads, c.head_dim, by_head);
        match &mut pass.attention {
            Attention::Step(cache) => cache.attend_step_by_kernel(index, &kernel, &projections, rotation),
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
        let [q, k, v] = match (projections, c.family.names.qkv) {
            ([fused], Qkv::FusedByHead(_)) => three(fused.view([-1, heads, 3, head_dim]).unbind(2)),
            ([fused], _) => {
                let widths = [heads, kv_heads, kv_heads].map(|n| n * head_dim);
                three(fused.split_with_sizes(widths, -1)).map(|x| x.unflatten(-1, [-1, head_dim]))
            }
            (separate, _) => three(separate.iter().map(|x| x.view([-1, x.size()[1] / head_dim, head_dim])).collect()),
        };
        let (q, k) = match &layer.qk_norm {
            None => (q, k),
            Some([q_norm, k_norm]) => (q_norm.forward_heads(&q, self.compute), k_norm.forward_heads(&k, self.compute)),
        };
        let (q, k) = match self.shape.layer_ropes[index].map(|rope| &pass.rotations[rope]) {
            None => (q, k),
            Some(angles) => (rotate(&q, angles), rotate(&k, angles)),
        };
        let (q, k, v) = (q.to_kind(self.compute), k.to_kind(self.compute), v.to_kind(self.compute));
        match &mut pass.attention {
            Attention::Step(cache) => cache.attend_step(index, &layer.scores, &q, &k, &v),
            Attention::Sequences(layout, cache) => {
                if let Some(cache) = cache {
                    cache.store_sequences(index, &k, &v);
                }
                let of_layer = |all: &RelativePositions| all.of_layer(layout.width, [&layer.qkv[0], &layer.qkv[1]]);
                let relative = self.relative.as_ref().map(of_layer);
                layout.attend(&layer.scores, [&q, &k, &v], relative.as_ref())
            }
        }
    }
}

/// The parameters of one layer, for as long as it is computed.
struct WholeLayer<'a> {
    _guard: LayerGuard,
    decoder: &'a Decoder,
    i: usize,
}

impl Drop for WholeLayer<'_> {
    fn drop(&mut self) {
        if self.decoder.shards.releases() {
            self.decoder.layers[self.i].linears().for_each(Linear::drop_copies);
        }
    }
}

impl Layer {
    /// Normalizes the input of attention, f32; returns `kind`.
    fn input(&self, x: &Tensor, kind: Kind) -> Tensor {
        self.input_norm.as_ref().map_or_else(|| x.shallow_clone(), |norm| norm.forward(x, kind))
    }

    fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.qkv.iter().chain([&self.attention_out]).chain(self.mlp.linears())
    }

    fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.qkv.iter_mut().chain([&mut self.attention_out]).chain(self.mlp.linears_mut())
    }

    fn new(i: usize, shape: &Shape, names: &Names, b: &mut Builder<'_>, compute: Kind) -> Result<Self> {
        let (hidden, std) = (shape.hidden_size, shape.initializer_range);
        let (heads_width, kv_width) =
            (shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim);
        // GPT-2 initializes the projections into the residual stream with a smaller deviation in deeper models.
        let depth = if shape.scale_residual_init { 2.0 * shape.num_hidden_layers as f64 } else { 1.0 };
        let residual_std = std / depth.sqrt();
        let at = |name: &str| format!("{}.{i}.{name}", names.layers);
        let norm = |b: &mut Builder<'_>, name: &str, width: i64| Norm::build(b, &at(name), width, shape);
        let linear = |b: &mut Builder<'_>, name: &str, widths: [i64; 2], bias: bool, std: f64| {
            let [width_in, width_out] = widths;
            let shape = LinearShape { width_in, width_out, bias, transposed: names.transposed, std };
            Linear::build(b, &at(name), shape, compute)
        };
        let two_norms = |b: &mut Builder<'_>, [first, second]: [&str; 2], widths: [i64; 2]| -> Result<[Norm; 2]> {
            Ok([norm(b, first, widths[0])?, norm(b, second, widths[1])?])
        };

        let has_norm = i > 0 || shape.first_norm;
        let input_norm = has_norm.then(|| norm(b, names.input_norm, hidden)).transpose()?;
        let parts = match &names.qkv {
            Qkv::Separate([q, k, v]) => vec![(*q, heads_width), (*k, kv_width), (*v, kv_width)],
            Qkv::Fused(name) | Qkv::FusedByHead(name) => vec![(*name, heads_width + 2 * kv_width)],
        };
        let qkv = parts.into_iter().map(|(name, width)| linear(b, name, [hidden, width], shape.qkv_bias, std));
        let qkv = qkv.collect::<Result<_>>()?;
        let qk_norm = match names.qk_norm {
            None => None,
            Some(QkNorm::ByHead(names)) => Some(two_norms(b, names, [shape.head_dim; 2])?),
            Some(QkNorm::Whole(names)) => Some(two_norms(b, names, [heads_width, kv_width])?),
        };
        let attention_out =
            linear(b, names.attention_out, [heads_width, hidden], shape.attention_out_bias, residual_std)?;
        let mlp_norm = norm(b, names.mlp_norm, hidden)?;
        let output_norms = names.output_norms.map(|names| two_norms(b, names, [hidden; 2])).transpose()?;
        let mlp = Mlp::build(i, shape, names, b, (compute, residual_std))?;
        let scores = Scores {
            scale: shape.attention_scale,
            softcap: shape.attention_softcap,
            window: shape.windows[i],
            causal: shape.causal,
        };
        Ok(Self { input_norm, qkv, qk_norm, attention_out, mlp_norm, output_norms, mlp, scores })
    }
}

/// The residual stream `x` with one or two branches added.
fn add(x: &Tensor, a: &Tensor, b: Option<&Tensor>) -> Tensor {
    if uses_kernels(a.kind(), x.device()) {
        return tch_ext::residual(x, a, b);
    }
    match b {
        Some(b) => x + a + b,
        None => x + a,
    }
}

fn three(parts: Vec<Tensor>) -> [Tensor; 3] {
    parts.try_into().expect("three parts")
}

/// Rotates the first dimensions of each head by the rotary angles, pairing dimension i with i + dim / 2 as Hugging Face does.
fn rotate(x: &Tensor, (cos, sin): &(Tensor, Tensor)) -> Tensor {
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
