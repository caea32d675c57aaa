//! Families of models, as data: the meaning of each family's `config.json` and the names of its tensors.
//!
//! A new family is an entry in [`FAMILIES`], a reader that fills a [`Shape`], a table of [`Names`], and a golden model.

use super::shape::{
    Family, Fields, HeadActivation, HeadNames, MlpIn, Names, NormKind, Order, Pooling, Qkv, RelativeAttention,
    RopeKeys, Shape,
};
use crate::Result;

/// The supported families.
pub(crate) static FAMILIES: &[Family] = &[
    Family {
        name: "gpt2",
        causal_lm_class: Some("GPT2LMHeadModel"),
        classifier_class: "GPT2ForSequenceClassification",
        shape: gpt2,
        names: Names {
            prefix: "transformer.",
            embed: "transformer.wte",
            positions: Some("transformer.wpe"),
            layers: "transformer.h",
            input_norm: "ln_1",
            qkv: Qkv::Fused("attn.c_attn"),
            attention_out: "attn.c_proj",
            mlp_norm: "ln_2",
            mlp_in: MlpIn::Up("mlp.c_fc"),
            mlp_out: "mlp.c_proj",
            final_norm: "transformer.ln_f",
            transposed: true,
            lora_targets: &["c_attn"],
            harmless: &[".attn.bias", ".attn.masked_bias"],
            ..LLAMA
        },
    },
    Family {
        name: "gpt_neox",
        causal_lm_class: Some("GPTNeoXForCausalLM"),
        classifier_class: "GPTNeoXForSequenceClassification",
        shape: gpt_neox,
        names: Names {
            prefix: "gpt_neox.",
            embed: "gpt_neox.embed_in",
            layers: "gpt_neox.layers",
            qkv: Qkv::FusedByHead("attention.query_key_value"),
            attention_out: "attention.dense",
            mlp_in: MlpIn::Up("mlp.dense_h_to_4h"),
            mlp_out: "mlp.dense_4h_to_h",
            final_norm: "gpt_neox.final_layer_norm",
            lm_head: "embed_out.weight",
            lora_targets: &["query_key_value"],
            harmless: &[".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"],
            ..LLAMA
        },
    },
    Family {
        name: "opt",
        causal_lm_class: Some("OPTForCausalLM"),
        classifier_class: "OPTForSequenceClassification",
        shape: opt,
        names: Names {
            embed: "model.decoder.embed_tokens",
            positions: Some("model.decoder.embed_positions"),
            project: Some(["model.decoder.project_in", "model.decoder.project_out"]),
            layers: "model.decoder.layers",
            input_norm: "self_attn_layer_norm",
            attention_out: "self_attn.out_proj",
            mlp_norm: "final_layer_norm",
            mlp_in: MlpIn::Up("fc1"),
            mlp_out: "fc2",
            final_norm: "model.decoder.final_layer_norm",
            harmless: &[],
            ..LLAMA
        },
    },
    Family {
        name: "llama",
        causal_lm_class: Some("LlamaForCausalLM"),
        classifier_class: "LlamaForSequenceClassification",
        shape: llama,
        names: LLAMA,
    },
    Family {
        name: "mistral",
        causal_lm_class: Some("MistralForCausalLM"),
        classifier_class: "MistralForSequenceClassification",
        shape: mistral,
        names: LLAMA,
    },
    Family {
        name: "qwen2",
        causal_lm_class: Some("Qwen2ForCausalLM"),
        classifier_class: "Qwen2ForSequenceClassification",
        shape: qwen2,
        names: LLAMA,
    },
    Family {
        name: "qwen3",
        causal_lm_class: Some("Qwen3ForCausalLM"),
        classifier_class: "Qwen3ForSequenceClassification",
        shape: qwen3,
        names: Names { qk_norm: Some(["self_attn.q_norm", "self_attn.k_norm"]), ..LLAMA },
    },
    Family {
        name: "gemma2",
        causal_lm_class: Some("Gemma2ForCausalLM"),
        classifier_class: "Gemma2ForSequenceClassification",
        shape: gemma2,
        names: Names {
            mlp_norm: "pre_feedforward_layernorm",
            output_norms: Some(["post_attention_layernorm", "post_feedforward_layernorm"]),
            ..LLAMA
        },
    },
    Family {
        name: "phi3",
        causal_lm_class: Some("Phi3ForCausalLM"),
        classifier_class: "Phi3ForSequenceClassification",
        shape: phi3,
        names: Names {
            qkv: Qkv::Fused("self_attn.qkv_proj"),
            mlp_in: MlpIn::GatedFused("mlp.gate_up_proj"),
            // PEFT has no default for it.
            lora_targets: &["qkv_proj"],
            ..LLAMA
        },
    },
    Family {
        name: "bert",
        causal_lm_class: None,
        classifier_class: "BertForSequenceClassification",
        shape: bert,
        names: Names {
            head: HeadNames::Dense {
                inner: "bert.pooler.dense",
                activation: HeadActivation::Tanh,
                norm: None,
                out: "classifier",
            },
            ..BERT
        },
    },
    Family {
        name: "roberta",
        causal_lm_class: None,
        classifier_class: "RobertaForSequenceClassification",
        shape: roberta,
        names: Names {
            prefix: "roberta.",
            embed: "roberta.embeddings.word_embeddings",
            positions: Some("roberta.embeddings.position_embeddings"),
            token_types: Some("roberta.embeddings.token_type_embeddings"),
            embed_norm: Some("roberta.embeddings.LayerNorm"),
            layers: "roberta.encoder.layer",
            // Left from pretraining; its classifiers do not use them.
            harmless: &[".embeddings.position_ids", "roberta.pooler.dense.weight", "roberta.pooler.dense.bias"],
            ..BERT
        },
    },
    Family {
        name: "distilbert",
        causal_lm_class: None,
        classifier_class: "DistilBertForSequenceClassification",
        shape: distilbert,
        names: Names {
            prefix: "distilbert.",
            embed: "distilbert.embeddings.word_embeddings",
            positions: Some("distilbert.embeddings.position_embeddings"),
            token_types: None,
            embed_norm: Some("distilbert.embeddings.LayerNorm"),
            layers: "distilbert.transformer.layer",
            input_norm: "sa_layer_norm",
            qkv: Qkv::Separate(["attention.q_lin", "attention.k_lin", "attention.v_lin"]),
            attention_out: "attention.out_lin",
            mlp_norm: "output_layer_norm",
            mlp_in: MlpIn::Up("ffn.lin1"),
            mlp_out: "ffn.lin2",
            lora_targets: &["q_lin", "v_lin"],
            head: HeadNames::Dense {
                inner: "pre_classifier",
                activation: HeadActivation::Relu,
                norm: None,
                out: "classifier",
            },
            ..BERT
        },
    },
    Family {
        name: "deberta-v2",
        causal_lm_class: None,
        classifier_class: "DebertaV2ForSequenceClassification",
        shape: deberta,
        names: Names {
            prefix: "deberta.",
            embed: "deberta.embeddings.word_embeddings",
            positions: Some("deberta.embeddings.position_embeddings"),
            token_types: Some("deberta.embeddings.token_type_embeddings"),
            embed_norm: Some("deberta.embeddings.LayerNorm"),
            relative: Some(["deberta.encoder.rel_embeddings", "deberta.encoder.LayerNorm"]),
            layers: "deberta.encoder.layer",
            qkv: Qkv::Separate(["attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"]),
            lora_targets: &["query_proj", "value_proj"],
            head: HeadNames::Dense {
                inner: "pooler.dense",
                activation: HeadActivation::Gelu,
                norm: None,
                out: "classifier",
            },
            ..BERT
        },
    },
    Family {
        name: "modernbert",
        causal_lm_class: None,
        classifier_class: "ModernBertForSequenceClassification",
        shape: modernbert,
        names: Names {
            embed: "model.embeddings.tok_embeddings",
            embed_norm: Some("model.embeddings.norm"),
            input_norm: "attn_norm",
            qkv: Qkv::Fused("attn.Wqkv"),
            attention_out: "attn.Wo",
            mlp_norm: "mlp_norm",
            mlp_in: MlpIn::GatedFused("mlp.Wi"),
            mlp_out: "mlp.Wo",
            final_norm: "model.final_norm",
            lm_head: "",
            // PEFT has no default for it.
            lora_targets: &["Wqkv"],
            head: HeadNames::Dense {
                inner: "head.dense",
                activation: HeadActivation::Gelu,
                norm: Some("head.norm"),
                out: "classifier",
            },
            harmless: &[],
            ..LLAMA
        },
    },
];

/// Llama's names, which most later decoders share.
const LLAMA: Names = Names {
    prefix: "model.",
    embed: "model.embed_tokens",
    positions: None,
    token_types: None,
    embed_norm: None,
    relative: None,
    project: None,
    layers: "model.layers",
    input_norm: "input_layernorm",
    qkv: Qkv::Separate(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    qk_norm: None,
    attention_out: "self_attn.o_proj",
    mlp_norm: "post_attention_layernorm",
    output_norms: None,
    mlp_in: MlpIn::Gated(["mlp.gate_proj", "mlp.up_proj"]),
    mlp_out: "mlp.down_proj",
    final_norm: "model.norm",
    lm_head: "lm_head.weight",
    transposed: false,
    lora_targets: &["q_proj", "v_proj"],
    head: HeadNames::Score,
    harmless: &[".rotary_emb.inv_freq"],
};

/// BERT's names, which later encoders share inside their layers.
const BERT: Names = Names {
    prefix: "bert.",
    embed: "bert.embeddings.word_embeddings",
    positions: Some("bert.embeddings.position_embeddings"),
    token_types: Some("bert.embeddings.token_type_embeddings"),
    embed_norm: Some("bert.embeddings.LayerNorm"),
    layers: "bert.encoder.layer",
    input_norm: "attention.output.LayerNorm",
    qkv: Qkv::Separate(["attention.self.query", "attention.self.key", "attention.self.value"]),
    attention_out: "attention.output.dense",
    mlp_norm: "output.LayerNorm",
    mlp_in: MlpIn::Up("intermediate.dense"),
    mlp_out: "output.dense",
    final_norm: "",
    lm_head: "",
    lora_targets: &["query", "value"],
    head: HeadNames::Dense {
        inner: "classifier.dense",
        activation: HeadActivation::Tanh,
        norm: None,
        out: "classifier.out_proj",
    },
    harmless: &[".embeddings.position_ids"],
    ..LLAMA
};

fn gpt2(f: &Fields<'_>) -> Result<Shape> {
    f.must_be("scale_attn_weights", true)?;
    f.must_be("scale_attn_by_inverse_layer_idx", false)?;
    f.must_be("add_cross_attention", false)?;
    let hidden_size = f.size_as("n_embd", "hidden_size", 768)?;
    let heads = f.size_as("n_head", "num_attention_heads", 12)?;
    let layers = f.size_as("n_layer", "num_hidden_layers", 12)?;
    Ok(Shape {
        intermediate_size: f.size("n_inner", 4 * hidden_size)?,
        max_position_embeddings: f.size_as("n_positions", "max_position_embeddings", 1024)? as usize,
        norm_eps: f.number("layer_norm_epsilon", 1e-5)?,
        activation: f.activation("activation_function", "gelu_new")?,
        tie_word_embeddings: f.flag("tie_word_embeddings", true)?,
        scale_residual_init: true,
        ..Shape::biased(f, f.size("vocab_size", 50257)?, hidden_size, heads, layers)?
    })
}

fn gpt_neox(f: &Fields<'_>) -> Result<Shape> {
    let (hidden_size, heads) = (f.size("hidden_size", 6144)?, f.size("num_attention_heads", 64)?);
    let layers = f.size("num_hidden_layers", 44)?;
    let bias = f.flag("attention_bias", true)?;
    let keys = RopeKeys { theta: "rotary_emb_base", fraction: "rotary_pct", default_fraction: 0.25 };
    let rope = f.rope(hidden_size / heads, &keys)?;
    Ok(Shape {
        max_position_embeddings: Fields::longest(f.size("max_position_embeddings", 2048)?, &rope),
        intermediate_size: f.size("intermediate_size", 24576)?,
        norm_eps: f.number("layer_norm_eps", 1e-5)?,
        activation: f.activation("hidden_act", "gelu")?,
        rope: Some(rope),
        order: if f.flag("use_parallel_residual", true)? { Order::Parallel } else { Order::Pre },
        tie_word_embeddings: f.flag("tie_word_embeddings", false)?,
        qkv_bias: bias,
        attention_out_bias: bias,
        ..Shape::biased(f, f.size("vocab_size", 50432)?, hidden_size, heads, layers)?
    })
}

fn opt(f: &Fields<'_>) -> Result<Shape> {
    f.must_be("enable_bias", true)?;
    f.must_be("layer_norm_elementwise_affine", true)?;
    f.must_be("_remove_final_layer_norm", false)?;
    let (hidden_size, heads) = (f.size("hidden_size", 768)?, f.size("num_attention_heads", 12)?);
    Ok(Shape {
        embedding_size: f.size("word_embed_proj_dim", hidden_size)?,
        intermediate_size: f.size("ffn_dim", 3072)?,
        // The first two rows of its table are no longer used.
        position_offset: 2,
        order: if f.flag("do_layer_norm_before", true)? { Order::Pre } else { Order::Post },
        activation: f.activation("activation_function", "relu")?,
        tie_word_embeddings: f.flag("tie_word_embeddings", true)?,
        initializer_range: f.number("init_std", 0.02)?,
        ..Shape::biased(f, f.size("vocab_size", 50272)?, hidden_size, heads, f.size("num_hidden_layers", 12)?)?
    })
}

/// The shape shared by Llama and its successors.
fn llama_like(f: &Fields<'_>, defaults: &Defaults) -> Result<Shape> {
    let hidden_size = f.size("hidden_size", defaults.hidden_size)?;
    let (heads, layers) =
        (f.size("num_attention_heads", defaults.heads)?, f.size("num_hidden_layers", defaults.layers)?);
    let head_dim = f.size("head_dim", defaults.head_dim.unwrap_or(hidden_size / heads))?;
    let keys = RopeKeys { theta: "rope_theta", fraction: "partial_rotary_factor", default_fraction: 1.0 };
    let rope = f.rope(head_dim, &keys)?;
    if rope.dim != head_dim && f.family.name != "phi3" {
        // transformers reads the field for Phi-3 and ignores it for the others.
        return Err(f.wrong("partial_rotary_factor", "1, or none"));
    }
    let longest = Fields::longest(f.size("max_position_embeddings", defaults.positions)?, &rope);
    Ok(Shape {
        intermediate_size: f.size("intermediate_size", defaults.intermediate_size)?,
        num_key_value_heads: f.size("num_key_value_heads", defaults.kv_heads.unwrap_or(heads))?,
        head_dim,
        attention_scale: (head_dim as f64).powf(-0.5),
        norm: NormKind::Rms,
        norm_eps: f.number("rms_norm_eps", defaults.norm_eps)?,
        activation: f.activation("hidden_act", "silu")?,
        rope: Some(rope),
        max_position_embeddings: longest,
        tie_word_embeddings: f.flag("tie_word_embeddings", false)?,
        qkv_bias: false,
        attention_out_bias: false,
        mlp_bias: false,
        ..Shape::biased(f, f.size("vocab_size", defaults.vocab_size)?, hidden_size, heads, layers)?
    })
}

/// transformers' defaults of fields that a `config.json` omits.
struct Defaults {
    vocab_size: i64,
    hidden_size: i64,
    intermediate_size: i64,
    layers: i64,
    heads: i64,
    /// `None`: as many as query heads.
    kv_heads: Option<i64>,
    /// `None`: the hidden size over the heads.
    head_dim: Option<i64>,
    positions: i64,
    norm_eps: f64,
}

const LLAMA_DEFAULTS: Defaults = Defaults {
    vocab_size: 32000,
    hidden_size: 4096,
    intermediate_size: 11008,
    layers: 32,
    heads: 32,
    kv_heads: None,
    head_dim: None,
    positions: 2048,
    norm_eps: 1e-6,
};

fn llama(f: &Fields<'_>) -> Result<Shape> {
    let bias = f.flag("attention_bias", false)?;
    Ok(Shape {
        qkv_bias: bias,
        attention_out_bias: bias,
        mlp_bias: f.flag("mlp_bias", false)?,
        ..llama_like(f, &LLAMA_DEFAULTS)?
    })
}

fn mistral(f: &Fields<'_>) -> Result<Shape> {
    let defaults = Defaults { intermediate_size: 14336, kv_heads: Some(8), positions: 4096 * 32, ..LLAMA_DEFAULTS };
    let shape = llama_like(f, &defaults)?;
    // An old file without the field means a window; `null` means none.
    let window = f.window("sliding_window", Some(4096))?;
    Ok(Shape { windows: f.windows(window, shape.num_hidden_layers, |_| true)?, ..shape })
}

/// The windows of Qwen2 and Qwen3: none by default; if enabled, in the upper layers.
fn qwen_windows(f: &Fields<'_>, layers: i64) -> Result<Vec<Option<i64>>> {
    let used = f.flag("use_sliding_window", false)?;
    let window = if used { f.window("sliding_window", Some(4096))? } else { None };
    let first = f.count("max_window_layers", 28)?;
    f.windows(window, layers, |layer| layer >= first)
}

fn qwen2(f: &Fields<'_>) -> Result<Shape> {
    let defaults = Defaults {
        vocab_size: 151936,
        intermediate_size: 22016,
        kv_heads: Some(32),
        positions: 32768,
        ..LLAMA_DEFAULTS
    };
    let shape = llama_like(f, &defaults)?;
    Ok(Shape { qkv_bias: true, windows: qwen_windows(f, shape.num_hidden_layers)?, ..shape })
}

fn qwen3(f: &Fields<'_>) -> Result<Shape> {
    let defaults = Defaults {
        vocab_size: 151936,
        intermediate_size: 22016,
        kv_heads: Some(32),
        head_dim: Some(128),
        positions: 32768,
        ..LLAMA_DEFAULTS
    };
    let shape = llama_like(f, &defaults)?;
    let bias = f.flag("attention_bias", false)?;
    let windows = qwen_windows(f, shape.num_hidden_layers)?;
    Ok(Shape { qkv_bias: bias, attention_out_bias: bias, windows, ..shape })
}

fn gemma2(f: &Fields<'_>) -> Result<Shape> {
    f.must_be("use_bidirectional_attention", false)?;
    let bias = f.flag("attention_bias", false)?;
    let defaults = Defaults {
        vocab_size: 256_000,
        hidden_size: 2304,
        intermediate_size: 9216,
        layers: 26,
        heads: 8,
        kv_heads: Some(4),
        head_dim: Some(256),
        positions: 8192,
        norm_eps: 1e-6,
    };
    let shape = llama_like(f, &defaults)?;
    Ok(Shape {
        norm: NormKind::RmsPlusOne,
        order: Order::Sandwich,
        activation: f.activation("hidden_activation", "gelu_pytorch_tanh")?,
        embedding_scale: (shape.hidden_size as f64).sqrt(),
        attention_scale: f.positive("query_pre_attn_scalar", Some(256.0))?.powf(-0.5),
        attention_softcap: f.cap("attn_logit_softcapping", 50.0)?,
        final_softcap: f.cap("final_logit_softcapping", 30.0)?,
        tie_word_embeddings: f.flag("tie_word_embeddings", true)?,
        windows: f.windows(f.window("sliding_window", Some(4096))?, shape.num_hidden_layers, |i| i % 2 == 0)?,
        qkv_bias: bias,
        attention_out_bias: bias,
        ..shape
    })
}

fn phi3(f: &Fields<'_>) -> Result<Shape> {
    let defaults = Defaults {
        vocab_size: 32064,
        hidden_size: 3072,
        intermediate_size: 8192,
        positions: 4096,
        norm_eps: 1e-5,
        ..LLAMA_DEFAULTS
    };
    let shape = llama_like(f, &defaults)?;
    // transformers ignores its `layer_types`.
    let windows = vec![f.window("sliding_window", None)?; shape.num_hidden_layers as usize];
    Ok(Shape { windows, ..shape })
}

/// The shape shared by BERT and RoBERTa.
fn bert(f: &Fields<'_>) -> Result<Shape> {
    f.must_be("is_decoder", false)?;
    f.must_be("add_cross_attention", false)?;
    f.must_be_text("position_embedding_type", "absolute")?;
    let (hidden_size, heads) = (f.size("hidden_size", 768)?, f.size("num_attention_heads", 12)?);
    Ok(Shape {
        intermediate_size: f.size("intermediate_size", 3072)?,
        max_position_embeddings: f.size("max_position_embeddings", 512)? as usize,
        token_types: f.size("type_vocab_size", 2)?,
        norm_eps: f.number("layer_norm_eps", 1e-12)?,
        activation: f.activation("hidden_act", "gelu")?,
        order: Order::Post,
        causal: false,
        ..Shape::biased(f, f.size("vocab_size", 30522)?, hidden_size, heads, f.size("num_hidden_layers", 12)?)?
    })
}

fn roberta(f: &Fields<'_>) -> Result<Shape> {
    let shape = bert(f)?;
    // Positions are counted from the pad token's id + 1, so the table has that many more rows than positions.
    let offset = f.ids("pad_token_id")?.first().map_or(1, |pad| pad.saturating_add(1));
    let positions = shape.max_position_embeddings as i64;
    if !(0..positions).contains(&offset) {
        return Err(f.wrong("pad_token_id", &format!("an id below max_position_embeddings = {positions}")));
    }
    Ok(Shape { position_offset: offset, max_position_embeddings: (positions - offset) as usize, ..shape })
}

fn distilbert(f: &Fields<'_>) -> Result<Shape> {
    let hidden_size = f.size_as("dim", "hidden_size", 768)?;
    let heads = f.size_as("n_heads", "num_attention_heads", 12)?;
    let layers = f.size_as("n_layers", "num_hidden_layers", 6)?;
    Ok(Shape {
        intermediate_size: f.size("hidden_dim", 3072)?,
        max_position_embeddings: f.size("max_position_embeddings", 512)? as usize,
        norm_eps: 1e-12,
        activation: f.activation("activation", "gelu")?,
        order: Order::Post,
        causal: false,
        ..Shape::biased(f, f.size("vocab_size", 30522)?, hidden_size, heads, layers)?
    })
}

fn deberta(f: &Fields<'_>) -> Result<Shape> {
    f.must_be_set("relative_attention", true)?;
    f.must_be_set("share_att_key", true)?;
    f.must_be_text("pooler_hidden_act", "gelu")?;
    if f.count("conv_kernel_size", 0)? > 0 {
        return Err(f.wrong("conv_kernel_size", "0: a convolution after the first layer is not supported"));
    }
    let (hidden_size, heads) = (f.size("hidden_size", 1536)?, f.size("num_attention_heads", 24)?);
    for (name, expected) in [
        ("embedding_size", hidden_size),
        ("pooler_hidden_size", hidden_size),
        ("attention_head_size", hidden_size / heads),
    ] {
        if f.present(name).is_some() && f.size(name, expected)? != expected {
            return Err(f.wrong(name, &format!("{expected}, or none")));
        }
    }
    let positions = f.size("max_position_embeddings", 512)?;
    let relative = relative_attention(f, positions)?;
    let parts = 1 + i64::from(relative.content_to_position) + i64::from(relative.position_to_content);
    Ok(Shape {
        intermediate_size: f.size("intermediate_size", 6144)?,
        max_position_embeddings: positions as usize,
        learned_positions: f.flag("position_biased_input", true)?,
        token_types: f.count("type_vocab_size", 0)?,
        norm_eps: f.number("layer_norm_eps", 1e-7)?,
        activation: f.activation("hidden_act", "gelu")?,
        order: Order::Post,
        causal: false,
        attention_scale: ((hidden_size / heads * parts) as f64).powf(-0.5),
        relative: Some(relative),
        ..Shape::biased(f, f.size("vocab_size", 128_100)?, hidden_size, heads, f.size("num_hidden_layers", 24)?)?
    })
}

/// The relative attention of DeBERTa-v2.
fn relative_attention(f: &Fields<'_>, positions: i64) -> Result<RelativeAttention> {
    let kinds = f.names("pos_att_type")?;
    if let Some(other) = kinds.iter().find(|kind| !["c2p", "p2c"].contains(&kind.as_str())) {
        return Err(f.wrong("pos_att_type", &format!("c2p and p2c; {other} is not supported")));
    }
    // Any number below 1 is the default.
    let above_zero = |name: &str| f.whole(name, -1).map(|n| Some(n).filter(|&n| n > 0));
    let longest = above_zero("max_relative_positions")?.unwrap_or(positions);
    let buckets = above_zero("position_buckets")?;
    if buckets.is_some_and(|buckets| buckets < 2 || longest - 1 <= buckets / 2) {
        let expected = format!("a number from 2 to {}, or -1", 2 * (longest - 2).max(1));
        return Err(f.wrong("position_buckets", &expected));
    }
    Ok(RelativeAttention {
        buckets,
        longest,
        content_to_position: kinds.iter().any(|kind| kind == "c2p"),
        position_to_content: kinds.iter().any(|kind| kind == "p2c"),
        norm: f.names("norm_rel_ebd")?.iter().any(|kind| kind == "layer_norm"),
    })
}

fn modernbert(f: &Fields<'_>) -> Result<Shape> {
    f.must_be_text("classifier_activation", "gelu")?;
    let (hidden_size, heads) = (f.size("hidden_size", 768)?, f.size("num_attention_heads", 12)?);
    let layers = f.size("num_hidden_layers", 22)?;
    let bias = f.flag("attention_bias", false)?;
    // The field has both directions; the token itself is one more.
    let window = f.size("local_attention", 128)? / 2 + 1;
    let every = f.size("global_attn_every_n_layers", 3)?;
    let pooling = match f.present("classifier_pooling").map_or(Some("cls"), |value| value.as_str()) {
        Some("cls") => Pooling::First,
        Some("mean") => Pooling::Mean,
        _ => return Err(f.wrong("classifier_pooling", "cls or mean")),
    };
    let head_dim = hidden_size / heads;
    let shape = Shape::biased(f, f.size("vocab_size", 50368)?, hidden_size, heads, layers)?;
    Ok(Shape {
        intermediate_size: f.size("intermediate_size", 1152)?,
        max_position_embeddings: f.size("max_position_embeddings", 8192)? as usize,
        norm_bias: f.flag("norm_bias", false)?,
        // The norm of the embeddings is just before it.
        first_norm: false,
        norm_eps: f.number("norm_eps", 1e-5)?,
        activation: f.activation("hidden_activation", "gelu")?,
        rope: Some(f.rope_of_layers("full_attention", "global_rope_theta", 160_000.0, head_dim)?),
        local_rope: Some(f.rope_of_layers("sliding_attention", "local_rope_theta", 10_000.0, head_dim)?),
        causal: false,
        windows: f.windows(Some(window), layers, |i| i % every != 0)?,
        qkv_bias: bias,
        attention_out_bias: bias,
        mlp_bias: f.flag("mlp_bias", false)?,
        pooling,
        head_bias: f.flag("classifier_bias", false)?,
        ..shape
    })
}
