//! One decoder for all families: what differs between them is a table of names and a handful of switches.

use super::config::{Activation, Family, ModelConfig};
use super::layout::{KvCache, Layout};
use super::params::{Builder, Init};
use crate::Result;
use tch::{Kind, Tensor};

/// What a family calls its tensors; `{base}.weight` and `{base}.bias` complete each name.
pub(crate) struct Names {
    /// What all of the base model's names begin with.
    pub(crate) prefix: &'static str,
    embed: &'static str,
    positions: Option<&'static str>,
    layers: &'static str,
    input_norm: &'static str,
    /// One fused projection, or query, key and value.
    qkv: &'static [&'static str],
    attention_out: &'static str,
    mlp_norm: &'static str,
    /// The way up, or gate and up.
    mlp_in: &'static [&'static str],
    mlp_out: &'static str,
    final_norm: &'static str,
    /// The whole name of the LM head's weight.
    pub(crate) lm_head: &'static str,
    /// Endings of tensors that old checkpoints hold and nobody needs: masks and rotary tables.
    pub(crate) harmless: &'static [&'static str],
}

impl Family {
    pub(crate) fn names(self) -> &'static Names {
        match self {
            Family::Gpt2 => &Names {
                prefix: "transformer.",
                embed: "transformer.wte",
                positions: Some("transformer.wpe"),
                layers: "transformer.h",
                input_norm: "ln_1",
                qkv: &["attn.c_attn"],
                attention_out: "attn.c_proj",
                mlp_norm: "ln_2",
                mlp_in: &["mlp.c_fc"],
                mlp_out: "mlp.c_proj",
                final_norm: "transformer.ln_f",
                lm_head: "lm_head.weight",
                harmless: &[".attn.bias", ".attn.masked_bias"],
            },
            Family::GptNeox => &Names {
                prefix: "gpt_neox.",
                embed: "gpt_neox.embed_in",
                positions: None,
                layers: "gpt_neox.layers",
                input_norm: "input_layernorm",
                qkv: &["attention.query_key_value"],
                attention_out: "attention.dense",
                mlp_norm: "post_attention_layernorm",
                mlp_in: &["mlp.dense_h_to_4h"],
                mlp_out: "mlp.dense_4h_to_h",
                final_norm: "gpt_neox.final_layer_norm",
                lm_head: "embed_out.weight",
                harmless: &[".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"],
            },
            Family::Llama => &Names {
                prefix: "model.",
                embed: "model.embed_tokens",
                positions: None,
                layers: "model.layers",
                input_norm: "input_layernorm",
                qkv: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                attention_out: "self_attn.o_proj",
                mlp_norm: "post_attention_layernorm",
                mlp_in: &["mlp.gate_proj", "mlp.up_proj"],
                mlp_out: "mlp.down_proj",
                final_norm: "model.norm",
                lm_head: "lm_head.weight",
                harmless: &[".rotary_emb.inv_freq"],
            },
        }
    }
}

/// A linear layer; `compute` is the dtype of its product, parameters and result stay f32.
#[derive(Debug)]
pub(crate) struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    /// Stored as [in, out] (GPT-2) and not as [out, in].
    transposed: bool,
    compute: Kind,
}

impl Linear {
    pub(crate) fn new(weight: Tensor, bias: Option<Tensor>, compute: Kind) -> Self {
        Self { weight, bias, transposed: false, compute }
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Tensor {
        let weight = if self.transposed { self.weight.tr() } else { self.weight.shallow_clone() };
        if self.compute == Kind::Float {
            return x.linear(&weight, self.bias.as_ref());
        }
        let bias = self.bias.as_ref().map(|bias| bias.to_kind(self.compute));
        x.to_kind(self.compute).linear(&weight.to_kind(self.compute), bias.as_ref()).to_kind(Kind::Float)
    }
}

/// Layer norm, or RMS norm where there is no bias.
#[derive(Debug)]
struct Norm {
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f64,
}

impl Norm {
    fn forward(&self, x: &Tensor) -> Tensor {
        let shape = self.weight.size();
        match &self.bias {
            Some(bias) => x.layer_norm(shape, Some(&self.weight), Some(bias), self.eps, false),
            None => x.rms_norm(shape, Some(&self.weight), self.eps),
        }
    }
}

#[derive(Debug)]
struct Layer {
    input_norm: Norm,
    qkv: Vec<Linear>,
    attention_out: Linear,
    mlp_norm: Norm,
    mlp_in: Vec<Linear>,
    mlp_out: Linear,
}

/// A decoder without its head: tokens to hidden states.
#[derive(Debug)]
pub(crate) struct Decoder {
    embed: Tensor,
    positions: Option<Tensor>,
    layers: Vec<Layer>,
    final_norm: Norm,
    config: ModelConfig,
    /// Dtype of products and attention; the residual stream is f32 in any case.
    pub(crate) compute: Kind,
}

/// What the tokens of one forward pass may attend to.
enum Attention<'a> {
    /// Whole sequences; their keys and values are also stored, if there is a cache.
    Sequences(&'a Layout, Option<&'a mut KvCache>),
    /// One token per row, behind those in the cache.
    Step(&'a mut KvCache),
}

impl Decoder {
    pub(crate) fn new(config: &ModelConfig, b: &mut Builder<'_>, compute: Kind) -> Result<Self> {
        let names = config.family.names();
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let heads_width = config.num_attention_heads * config.head_dim;
        let kv_width = config.num_key_value_heads * config.head_dim;
        let std = config.initializer_range;
        // GPT-2 shrinks what enters the residual stream by its depth.
        let residual_std =
            if config.family == Family::Gpt2 { std / (2.0 * config.num_hidden_layers as f64).sqrt() } else { std };

        let linear = |b: &mut Builder<'_>, base: String, shape: [i64; 2], bias: bool, std: f64| -> Result<Linear> {
            let transposed = config.family == Family::Gpt2;
            let [width_in, width_out] = shape;
            let stored = if transposed { [width_in, width_out] } else { [width_out, width_in] };
            let weight = b.tensor(format!("{base}.weight"), &stored, Init::Normal(std), true)?;
            let bias =
                if bias { Some(b.tensor(format!("{base}.bias"), &[width_out], Init::Zeros, false)?) } else { None };
            Ok(Linear { weight, bias, transposed, compute })
        };
        let norm = |b: &mut Builder<'_>, base: String| -> Result<Norm> {
            let weight = b.tensor(format!("{base}.weight"), &[hidden], Init::Ones, false)?;
            let bias = match config.family {
                Family::Llama => None,
                _ => Some(b.tensor(format!("{base}.bias"), &[hidden], Init::Zeros, false)?),
            };
            Ok(Norm { weight, bias, eps: config.norm_eps })
        };

        let embed =
            b.tensor(format!("{}.weight", names.embed), &[config.vocab_size, hidden], Init::Normal(std), true)?;
        let positions = match names.positions {
            None => None,
            Some(base) => {
                let shape = [config.max_position_embeddings as i64, hidden];
                Some(b.tensor(format!("{base}.weight"), &shape, Init::Normal(std), true)?)
            }
        };
        let mut layers = Vec::new();
        for i in 0..config.num_hidden_layers {
            let at = |name: &str| format!("{}.{i}.{name}", names.layers);
            let input_norm = norm(b, at(names.input_norm))?;
            let qkv_widths = match names.qkv.len() {
                1 => vec![heads_width + 2 * kv_width],
                _ => vec![heads_width, kv_width, kv_width],
            };
            let mut qkv = Vec::new();
            for (name, width) in names.qkv.iter().zip(qkv_widths) {
                qkv.push(linear(b, at(name), [hidden, width], config.attention_bias, std)?);
            }
            let attention_out =
                linear(b, at(names.attention_out), [heads_width, hidden], config.attention_bias, residual_std)?;
            let mlp_norm = norm(b, at(names.mlp_norm))?;
            let mut mlp_in = Vec::new();
            for name in names.mlp_in {
                mlp_in.push(linear(b, at(name), [hidden, inner], config.mlp_bias, std)?);
            }
            let mlp_out = linear(b, at(names.mlp_out), [inner, hidden], config.mlp_bias, residual_std)?;
            layers.push(Layer { input_norm, qkv, attention_out, mlp_norm, mlp_in, mlp_out });
        }
        let final_norm = norm(b, names.final_norm.to_string())?;
        Ok(Self { embed, positions, layers, final_norm, config: config.clone(), compute })
    }

    /// The embedding, which is also the LM head where the two are tied; [vocab, hidden].
    pub(crate) fn embedding(&self) -> Tensor {
        self.embed.shallow_clone()
    }

    /// Hidden states after the final norm, `[N, hidden]` f32, of whole sequences; fills `cache` if there is one.
    pub(crate) fn forward(&self, layout: &Layout, cache: Option<&mut KvCache>) -> Tensor {
        self.run(&layout.tokens, &layout.positions, &mut Attention::Sequences(layout, cache))
    }

    /// Hidden states, [rows, hidden] f32, of one more token per row; `tokens` is `[rows]` i64.
    pub(crate) fn forward_step(&self, tokens: &Tensor, cache: &mut KvCache) -> Tensor {
        let positions = cache.next_positions();
        cache.begin_step();
        self.run(tokens, &positions, &mut Attention::Step(cache))
    }

    /// A cache for `rows` sequences of at most `capacity` tokens.
    pub(crate) fn new_cache(&self, rows: usize, capacity: usize) -> Result<KvCache> {
        KvCache::new(
            self.config.num_hidden_layers,
            rows as i64,
            capacity as i64,
            self.config.num_key_value_heads,
            self.config.head_dim,
            (self.compute, self.embed.device()),
        )
    }

    #[allow(clippy::assign_op_pattern)] // `x += ...` adds in place, into what the norm keeps for its backward pass
    fn run(&self, tokens: &Tensor, positions: &Tensor, attention: &mut Attention<'_>) -> Tensor {
        let mut x = Tensor::embedding(&self.embed, tokens, -1, false, false);
        if let Some(table) = &self.positions {
            x += Tensor::embedding(table, positions, -1, false, false);
        }
        let rotation = self.rotation(positions);
        for (i, layer) in self.layers.iter().enumerate() {
            let attended = self.attention(i, layer, &layer.input_norm.forward(&x), rotation.as_ref(), attention);
            if self.config.parallel_residual {
                let fed = self.mlp(layer, &layer.mlp_norm.forward(&x));
                x = x + attended + fed;
            } else {
                x = x + attended;
                let fed = self.mlp(layer, &layer.mlp_norm.forward(&x));
                x = x + fed;
            }
        }
        self.final_norm.forward(&x)
    }

    /// Cosines and sines of the rotary angles, [N, 1, dim / 2] each.
    fn rotation(&self, positions: &Tensor) -> Option<(Tensor, Tensor)> {
        let rope = self.config.rope?;
        let options = (Kind::Float, positions.device());
        // In f32 whatever the compute dtype: bf16 holds 641 distinct integers in 0..2048, so positions would share angles.
        let exponents = Tensor::arange_start_step(0, rope.dim, 2, options) / rope.dim as f64;
        let inv_freq = Tensor::full([1], rope.theta, options).pow(&exponents).reciprocal();
        let angles = (positions.to_kind(Kind::Float).unsqueeze(1) * inv_freq.unsqueeze(0)).unsqueeze(1);
        Some((angles.cos(), angles.sin()))
    }

    fn attention(
        &self,
        index: usize,
        layer: &Layer,
        x: &Tensor,
        rotation: Option<&(Tensor, Tensor)>,
        attention: &mut Attention<'_>,
    ) -> Tensor {
        let c = &self.config;
        let (heads, kv_heads, head_dim) = (c.num_attention_heads, c.num_key_value_heads, c.head_dim);
        let (q, k, v) = match (layer.qkv.as_slice(), c.family) {
            // Per head: query, key, value.
            ([fused], Family::GptNeox) => {
                let qkv = fused.forward(x).view([-1, heads, 3, head_dim]).unbind(2);
                (qkv[0].shallow_clone(), qkv[1].shallow_clone(), qkv[2].shallow_clone())
            }
            // All queries, all keys, all values.
            ([fused], _) => {
                let qkv = fused.forward(x).view([-1, 3, heads, head_dim]).unbind(1);
                (qkv[0].shallow_clone(), qkv[1].shallow_clone(), qkv[2].shallow_clone())
            }
            (separate, _) => {
                let head = |i: usize, n: i64| separate[i].forward(x).view([-1, n, head_dim]);
                (head(0, heads), head(1, kv_heads), head(2, kv_heads))
            }
        };
        let (q, k) = match rotation {
            None => (q, k),
            Some(angles) => (rotate(&q, angles), rotate(&k, angles)),
        };
        let (q, k, v) = (q.to_kind(self.compute), k.to_kind(self.compute), v.to_kind(self.compute));
        let out = match attention {
            Attention::Step(cache) => cache.attend_step(index, &q, &k, &v),
            Attention::Sequences(layout, cache) => {
                if let Some(cache) = cache {
                    cache.store_sequences(index, layout, &k, &v);
                }
                attend_sequences(layout, &q, &k, &v)
            }
        };
        layer.attention_out.forward(&out.to_kind(Kind::Float))
    }

    fn mlp(&self, layer: &Layer, x: &Tensor) -> Tensor {
        let first = activate(&layer.mlp_in[0].forward(x), self.config.activation);
        let inner = match layer.mlp_in.get(1) {
            None => first,
            Some(up) => first * up.forward(x),
        };
        layer.mlp_out.forward(&inner)
    }
}

fn activate(x: &Tensor, activation: Activation) -> Tensor {
    match activation {
        Activation::Gelu => x.gelu("none"),
        Activation::GeluTanh => x.gelu("tanh"),
        Activation::Silu => x.silu(),
        Activation::Relu => x.relu(),
    }
}

/// Turns the first dimensions of each head by the rotary angles, pairing dimension i with i + dim / 2 as Hugging Face does.
fn rotate(x: &Tensor, (cos, sin): &(Tensor, Tensor)) -> Tensor {
    let half = *cos.size().last().expect("the angles have dimensions");
    let head_dim = *x.size().last().expect("a head has dimensions");
    let (a, b) = (x.narrow(-1, 0, half), x.narrow(-1, half, half));
    let mut parts = vec![&a * cos - &b * sin, &b * cos + &a * sin];
    if head_dim > 2 * half {
        parts.push(x.narrow(-1, 2 * half, head_dim - 2 * half));
    }
    Tensor::cat(&parts, -1)
}

/// Causal attention within each sequence; `q` [N, heads, head_dim], result [N, heads * head_dim].
fn attend_sequences(layout: &Layout, q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
    let heads = q.size()[1];
    let by_head = |x: &Tensor| {
        let padded = layout.pad(x).transpose(1, 2);
        let (rows, kv_heads, width, head_dim) = padded.size4().expect("[rows, heads, width, head_dim]");
        if kv_heads == heads {
            return padded;
        }
        let shape = [rows, kv_heads, heads / kv_heads, width, head_dim];
        padded.unsqueeze(2).expand(shape, false).reshape([rows, heads, width, head_dim])
    };
    let out = Tensor::scaled_dot_product_attention(
        &by_head(q),
        &by_head(k),
        &by_head(v),
        None::<&Tensor>,
        0.0,
        true,
        None,
        false,
    );
    layout.unpad(&out.transpose(1, 2).flatten(2, 3))
}
