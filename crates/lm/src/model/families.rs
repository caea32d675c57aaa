//! Families of models, as data: the meaning of each family's `config.json` and the names of its tensors.
//!
//! A new family is an entry in [`FAMILIES`], a reader that fills a [`Shape`], a table of [`Names`], and a golden model.

mod gemma4;
mod gpt_oss;
mod granite;
mod lfm2_moe;
mod ministral3;
mod qwen3_5_moe;

use super::mixing::{GatedDelta, Mixing, MixingInputs, MixingNames};
use super::rope::{ROPE, RopeKeys};
use super::shape::{
    Activation, CrossNames, ExpertNames, Experts, Family, Fields, HeadActivation, HeadNames, MlpIn, Names, NormKind,
    Order, Pooling, QkNorm, Qkv, RelativeAttention, RelativeBias, Scoring, Shape,
};
use rlhf_base::{Error, Result};

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
        names: Names { qk_norm: Some(QkNorm::ByHead(QK_NORM)), ..LLAMA },
    },
    Family {
        name: "qwen3_moe",
        causal_lm_class: Some("Qwen3MoeForCausalLM"),
        classifier_class: "Qwen3MoeForSequenceClassification",
        shape: qwen3_moe,
        names: Names { qk_norm: Some(QkNorm::ByHead(QK_NORM)), experts: Some(EXPERTS), ..LLAMA },
    },
    Family {
        name: "mixtral",
        causal_lm_class: Some("MixtralForCausalLM"),
        classifier_class: "MixtralForSequenceClassification",
        shape: mixtral,
        names: Names {
            experts: Some(ExpertNames {
                router: "block_sparse_moe.gate",
                experts: "block_sparse_moe.experts",
                inputs: ["w1", "w3"],
                out: "w2",
                ..EXPERTS
            }),
            ..LLAMA
        },
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
        name: "gemma3_text",
        causal_lm_class: Some("Gemma3ForCausalLM"),
        classifier_class: "Gemma3TextForSequenceClassification",
        shape: gemma3,
        names: Names {
            qk_norm: Some(QkNorm::ByHead(QK_NORM)),
            mlp_norm: "pre_feedforward_layernorm",
            output_norms: Some(["post_attention_layernorm", "post_feedforward_layernorm"]),
            ..LLAMA
        },
    },
    Family {
        name: "smollm3",
        causal_lm_class: Some("SmolLM3ForCausalLM"),
        classifier_class: "SmolLM3ForSequenceClassification",
        shape: smollm3,
        names: LLAMA,
    },
    Family {
        name: "olmo2",
        causal_lm_class: Some("Olmo2ForCausalLM"),
        classifier_class: "Olmo2ForSequenceClassification",
        shape: olmo2,
        names: OLMO2,
    },
    Family {
        name: "olmo3",
        causal_lm_class: Some("Olmo3ForCausalLM"),
        classifier_class: "Olmo3ForSequenceClassification",
        shape: olmo3,
        names: OLMO2,
    },
    Family {
        name: "lfm2",
        causal_lm_class: Some("Lfm2ForCausalLM"),
        // transformers 5.23 has none.
        classifier_class: "Lfm2ForSequenceClassification",
        shape: lfm2,
        names: LFM2,
    },
    Family {
        name: "qwen3_5_text",
        causal_lm_class: Some("Qwen3_5ForCausalLM"),
        classifier_class: "Qwen3_5TextForSequenceClassification",
        shape: qwen3_5,
        names: QWEN3_5,
    },
    Family {
        name: "qwen3_next",
        causal_lm_class: Some("Qwen3NextForCausalLM"),
        classifier_class: "Qwen3NextForSequenceClassification",
        shape: qwen3_next,
        names: Names {
            mixing: Some(MixingNames {
                inputs: MixingInputs::Grouped {
                    linears: ["linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"],
                    rest: DELTA_REST,
                },
                conv: "linear_attn.conv1d",
                out: "linear_attn.out_proj",
            }),
            experts: Some(EXPERTS_WITH_SHARED),
            ..QWEN3_5
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
    gemma4::GEMMA4,
    granite::GRANITE,
    gpt_oss::GPT_OSS,
    lfm2_moe::LFM2_MOE,
    ministral3::MINISTRAL3,
    qwen3_5_moe::QWEN3_5_MOE,
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
            // Positions left from pretraining, where `position_biased_input` is false.
            harmless: &[".embeddings.position_ids", ".embeddings.position_embeddings.weight"],
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
    t5_family(T5_MLP),
    mt5_family(T5_MLP),
    Family {
        name: "bart",
        causal_lm_class: Some("BartForConditionalGeneration"),
        classifier_class: "BartForSequenceClassification",
        shape: bart,
        names: Names {
            positions: Some("model.decoder.embed_positions"),
            embed_norm: Some("model.decoder.layernorm_embedding"),
            layers: "model.decoder.layers",
            cross: Some(CrossNames {
                norm: "encoder_attn_layer_norm",
                qkv: ["encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj"],
                out: "encoder_attn.out_proj",
            }),
            encoder: Some(&BART_ENCODER),
            ..BART_ENCODER
        },
    },
];

/// The names of BART's encoder, and of its decoder's layers without their attention to the encoder.
const BART_ENCODER: Names = Names {
    embed: "model.shared",
    positions: Some("model.encoder.embed_positions"),
    embed_norm: Some("model.encoder.layernorm_embedding"),
    layers: "model.encoder.layers",
    input_norm: "self_attn_layer_norm",
    attention_out: "self_attn.out_proj",
    mlp_norm: "final_layer_norm",
    mlp_in: MlpIn::Up("fc1"),
    mlp_out: "fc2",
    head: T5_ENCODER.head,
    // Copies of the embedding, which `Decoder` checks, and numbers of versions; of the bias, `CausalLm` checks that it is 0.
    harmless: &[".embed_tokens.weight", ".encoder.version", ".decoder.version", FINAL_LOGITS_BIAS],
    ..LLAMA
};

/// The bias of BART's logits, which its training does not change from 0.
pub(super) const FINAL_LOGITS_BIAS: &str = "final_logits_bias";

/// The forms of T5: with a plain MLP, with a gated one, and both as classifiers. The classifiers' names start with `transformer.`.
static T5_FORMS: [Family; 4] = [
    t5_family(T5_MLP),
    t5_family(T5_GATED),
    t5_family(of_t5_classifier(&t5_names(&T5_CLASSIFIER_ENCODER, T5_PLAIN_MLP))),
    t5_family(of_t5_classifier(&t5_names(&T5_GATED_CLASSIFIER_ENCODER, T5_GATED_MLP))),
];

/// The forms of mT5, as [`T5_FORMS`].
static MT5_FORMS: [Family; 4] = [
    mt5_family(T5_MLP),
    mt5_family(T5_GATED),
    mt5_family(of_t5_classifier(&t5_names(&T5_CLASSIFIER_ENCODER, T5_PLAIN_MLP))),
    mt5_family(of_t5_classifier(&t5_names(&T5_GATED_CLASSIFIER_ENCODER, T5_GATED_MLP))),
];

/// The form of `family` with this MLP, and with the names of its classifiers if `classifier` is set.
fn t5_form(family: &Family, gated: bool, classifier: bool) -> &'static Family {
    let forms = if family.name == "mt5" { &MT5_FORMS } else { &T5_FORMS };
    &forms[usize::from(gated) + 2 * usize::from(classifier)]
}

/// The form of `family` with the names of its classifiers.
pub(super) fn classifier_family(family: &'static Family) -> &'static Family {
    match family.name {
        "t5" | "mt5" => t5_form(family, matches!(family.names.mlp_in, MlpIn::Gated(_)), true),
        _ => family,
    }
}

/// Whether `tie_word_embeddings` says if the head is the embedding: of T5 and mT5 stored values do, and the field is about scaling.
pub(super) fn states_ties(family: &Family) -> bool {
    !["t5", "mt5"].contains(&family.name)
}

/// Names of the tables that transformers reads for the two stacks instead of the embedding, where nothing is tied to it.
pub(super) fn embedding_copies(shape: &Shape) -> &'static [&'static str] {
    match shape.family.name {
        "bart" if !shape.tie_word_embeddings => {
            &["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"]
        }
        _ => &[],
    }
}

/// The pad id that positions are counted from; a saved file with another one would shift them.
pub(super) fn position_pad(shape: &Shape) -> Option<i64> {
    (shape.family.name == "roberta").then(|| shape.position_offset - 1)
}

const T5_PLAIN_MLP: MlpIn = MlpIn::Up("layer.2.DenseReluDense.wi");
const T5_GATED_MLP: MlpIn = MlpIn::Gated(["layer.2.DenseReluDense.wi_0", "layer.2.DenseReluDense.wi_1"]);
const T5_MLP: Names = t5_names(&T5_ENCODER, T5_PLAIN_MLP);
const T5_GATED: Names = t5_names(&T5_GATED_ENCODER, T5_GATED_MLP);

const fn t5_family(names: Names) -> Family {
    Family {
        name: "t5",
        causal_lm_class: Some("T5ForConditionalGeneration"),
        classifier_class: "T5ForSequenceClassification",
        shape: t5,
        names,
    }
}

const fn mt5_family(names: Names) -> Family {
    Family {
        name: "mt5",
        causal_lm_class: Some("MT5ForConditionalGeneration"),
        classifier_class: "MT5ForSequenceClassification",
        shape: mt5,
        names,
    }
}

const fn t5_names(encoder: &'static Names, mlp_in: MlpIn) -> Names {
    Names {
        layers: "decoder.block",
        cross: Some(CrossNames {
            norm: "layer.1.layer_norm",
            qkv: ["layer.1.EncDecAttention.q", "layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"],
            out: "layer.1.EncDecAttention.o",
        }),
        mlp_norm: "layer.2.layer_norm",
        mlp_in,
        mlp_out: "layer.2.DenseReluDense.wo",
        final_norm: "decoder.final_layer_norm",
        encoder: Some(encoder),
        ..T5_ENCODER
    }
}

/// The same names with the classifiers' prefix.
const fn of_t5_classifier(names: &Names) -> Names {
    Names {
        prefix: "transformer.",
        embed: "transformer.shared",
        layers: "transformer.decoder.block",
        final_norm: "transformer.decoder.final_layer_norm",
        ..*names
    }
}

/// The names of T5's encoder, and of the self-attention of its decoder.
const T5_ENCODER: Names = Names {
    prefix: "",
    embed: "shared",
    layers: "encoder.block",
    input_norm: "layer.0.layer_norm",
    qkv: Qkv::Separate(["layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v"]),
    attention_out: "layer.0.SelfAttention.o",
    mlp_norm: "layer.1.layer_norm",
    mlp_in: MlpIn::Up("layer.1.DenseReluDense.wi"),
    mlp_out: "layer.1.DenseReluDense.wo",
    final_norm: "encoder.final_layer_norm",
    relative_bias: Some("layer.0.SelfAttention.relative_attention_bias"),
    lora_targets: &["q", "v"],
    head: HeadNames::Dense {
        inner: "classification_head.dense",
        activation: HeadActivation::Tanh,
        norm: None,
        out: "classification_head.out_proj",
    },
    // Copies of the embedding, which `Decoder` checks, and a table that no version uses.
    harmless: &[".embed_tokens.weight", ".EncDecAttention.relative_attention_bias.weight"],
    ..LLAMA
};

const T5_GATED_ENCODER: Names =
    Names { mlp_in: MlpIn::Gated(["layer.1.DenseReluDense.wi_0", "layer.1.DenseReluDense.wi_1"]), ..T5_ENCODER };

const T5_CLASSIFIER_ENCODER: Names =
    Names { layers: "transformer.encoder.block", final_norm: "transformer.encoder.final_layer_norm", ..T5_ENCODER };

const T5_GATED_CLASSIFIER_ENCODER: Names = Names { mlp_in: T5_GATED_ENCODER.mlp_in, ..T5_CLASSIFIER_ENCODER };

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
    mixing: None,
    sinks: None,
    mlp_norm: "post_attention_layernorm",
    output_norms: None,
    layer_inputs: None,
    layer_scalar: None,
    mlp_in: MlpIn::Gated(["mlp.gate_proj", "mlp.up_proj"]),
    mlp_out: "mlp.down_proj",
    experts: None,
    final_norm: "model.norm",
    relative_bias: None,
    cross: None,
    encoder: None,
    lm_head: "lm_head.weight",
    transposed: false,
    lora_targets: &["q_proj", "v_proj"],
    head: HeadNames::Score,
    harmless: &[".rotary_emb.inv_freq"],
    others: &[],
};

/// Names of experts, which Qwen3's have.
const EXPERTS: ExpertNames = ExpertNames {
    router: "mlp.gate",
    experts: "mlp.experts",
    inputs: ["gate_proj", "up_proj"],
    out: "down_proj",
    shared: None,
    bias: None,
    stacking: None,
};

const EXPERTS_WITH_SHARED: ExpertNames =
    ExpertNames { shared: Some(["mlp.shared_expert", "mlp.shared_expert_gate"]), ..EXPERTS };

const QK_NORM: [&str; 2] = ["self_attn.q_norm", "self_attn.k_norm"];

/// OLMo 2's names: its two norms are norms of the outputs.
const OLMO2: Names = Names {
    input_norm: "post_attention_layernorm",
    qk_norm: Some(QkNorm::Whole(QK_NORM)),
    mlp_norm: "post_feedforward_layernorm",
    ..LLAMA
};

/// LFM2's names.
const LFM2: Names = Names {
    input_norm: "operator_norm",
    qk_norm: Some(QkNorm::ByHead(["self_attn.q_layernorm", "self_attn.k_layernorm"])),
    attention_out: "self_attn.out_proj",
    mixing: Some(MixingNames { inputs: MixingInputs::Parts("conv.in_proj"), conv: "conv.conv", out: "conv.out_proj" }),
    mlp_norm: "ffn_norm",
    mlp_in: MlpIn::Gated(["feed_forward.w1", "feed_forward.w3"]),
    mlp_out: "feed_forward.w2",
    final_norm: "model.embedding_norm",
    others: &["model.vision_tower.", "model.multi_modal_projector."],
    ..LLAMA
};

/// The tensors of the gated delta rule other than its projections: rates and biases of decays, and the norm of the output.
const DELTA_REST: [&str; 3] = ["linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm"];

/// Qwen3.5's names.
const QWEN3_5: Names = Names {
    qk_norm: Some(QkNorm::ByHead(QK_NORM)),
    mixing: Some(MixingNames {
        inputs: MixingInputs::Separate {
            linears: [
                "linear_attn.in_proj_qkv",
                "linear_attn.in_proj_z",
                "linear_attn.in_proj_b",
                "linear_attn.in_proj_a",
            ],
            rest: DELTA_REST,
        },
        conv: "linear_attn.conv1d",
        out: "linear_attn.out_proj",
    }),
    others: &["mtp.", "model.visual."],
    ..LLAMA
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
    let keys = RopeKeys { theta: "rotary_emb_base", fraction: "rotary_pct", default_fraction: 0.25, ..ROPE };
    let ropes = f.ropes(hidden_size / heads, &keys)?;
    Ok(Shape {
        max_position_embeddings: Fields::longest(f.size("max_position_embeddings", 2048)?, &ropes[0]),
        intermediate_size: f.size("intermediate_size", 24576)?,
        norm_eps: f.number("layer_norm_eps", 1e-5)?,
        activation: f.activation("hidden_act", "gelu")?,
        ropes,
        layer_ropes: vec![Some(0); layers as usize],
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
    let ropes = f.ropes(head_dim, &defaults.rope)?;
    let longest = Fields::longest(f.size("max_position_embeddings", defaults.positions)?, &ropes[0]);
    Ok(Shape {
        intermediate_size: f.size("intermediate_size", defaults.intermediate_size)?,
        num_key_value_heads: f.size("num_key_value_heads", defaults.kv_heads.unwrap_or(heads))?,
        head_dim,
        attention_scale: (head_dim as f64).powf(-0.5),
        norm: NormKind::Rms,
        norm_eps: f.number("rms_norm_eps", defaults.norm_eps)?,
        activation: f.activation("hidden_act", "silu")?,
        ropes,
        layer_ropes: vec![Some(0); layers as usize],
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
    rope: RopeKeys,
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
    rope: ROPE,
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

fn qwen3_moe(f: &Fields<'_>) -> Result<Shape> {
    let defaults = Defaults {
        vocab_size: 151_936,
        hidden_size: 2048,
        intermediate_size: 6144,
        layers: 24,
        kv_heads: Some(4),
        positions: 32768,
        ..LLAMA_DEFAULTS
    };
    let shape = llama_like(f, &defaults)?;
    let layers = shape.num_hidden_layers;
    let count_name = if f.present("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    let (count, step) = (f.count(count_name, 128)?, f.size("decoder_sparse_step", 1)?);
    let dense = f.ids("mlp_only_layers")?;
    let experts = Experts {
        count,
        chosen: f.size("num_experts_per_tok", 8)?,
        intermediate_size: f.size("moe_intermediate_size", 768)?,
        normalized: f.flag("norm_topk_prob", false)?,
        shared: None,
        layers: (0..layers).map(|layer| !dense.contains(&layer) && (layer + 1) % step == 0).collect(),
        scoring: Scoring::Softmax,
        clamped: None,
    };
    let bias = f.flag("attention_bias", false)?;
    // All layers have the window, whatever `max_window_layers`.
    let used = f.flag("use_sliding_window", false)?;
    let window = if used { f.window("sliding_window", Some(4096))? } else { None };
    Ok(Shape {
        experts: (count > 0 && experts.layers.contains(&true)).then_some(experts),
        windows: vec![window; layers as usize],
        qkv_bias: bias,
        attention_out_bias: bias,
        ..shape
    })
}

fn mixtral(f: &Fields<'_>) -> Result<Shape> {
    let defaults = Defaults {
        intermediate_size: 14336,
        kv_heads: Some(8),
        positions: 4096 * 32,
        norm_eps: 1e-5,
        rope: RopeKeys { default_theta: 1e6, ..ROPE },
        ..LLAMA_DEFAULTS
    };
    let shape = llama_like(f, &defaults)?;
    let layers = shape.num_hidden_layers as usize;
    let experts = Experts {
        count: f.size("num_local_experts", 8)?,
        chosen: f.size("num_experts_per_tok", 2)?,
        intermediate_size: shape.intermediate_size,
        normalized: true,
        shared: None,
        layers: vec![true; layers],
        scoring: Scoring::Softmax,
        clamped: None,
    };
    let window = f.window("sliding_window", None)?;
    Ok(Shape { experts: Some(experts), windows: vec![window; layers], ..shape })
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
        rope: ROPE,
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

fn gemma3(f: &Fields<'_>) -> Result<Shape> {
    f.must_be("use_bidirectional_attention", false)?;
    if f.present("attn_logit_softcapping").is_some() {
        // transformers ignores it.
        return Err(f.wrong("attn_logit_softcapping", "null"));
    }
    let bias = f.flag("attention_bias", false)?;
    let defaults = Defaults {
        vocab_size: 262_208,
        hidden_size: 2304,
        intermediate_size: 9216,
        layers: 26,
        heads: 8,
        kv_heads: Some(4),
        head_dim: Some(256),
        positions: 131_072,
        rope: RopeKeys { default_theta: 1e6, local: Some(("rope_local_base_freq", 10000.0)), ..ROPE },
        ..LLAMA_DEFAULTS
    };
    let shape = llama_like(f, &defaults)?;
    let pattern = f.size("sliding_window_pattern", 6)?;
    let (layers, local) = (shape.num_hidden_layers, |layer: i64| (layer + 1) % pattern != 0);
    Ok(Shape {
        norm: NormKind::RmsPlusOne,
        order: Order::Sandwich,
        activation: f.activation("hidden_activation", "gelu_pytorch_tanh")?,
        embedding_scale: (shape.hidden_size as f64).sqrt(),
        attention_scale: f.positive("query_pre_attn_scalar", Some(256.0))?.powf(-0.5),
        final_softcap: f
            .present("final_logit_softcapping")
            .map(|_| f.positive("final_logit_softcapping", None))
            .transpose()?,
        tie_word_embeddings: f.flag("tie_word_embeddings", true)?,
        windows: f.windows(f.window("sliding_window", Some(4096))?, layers, local)?,
        layer_ropes: by_window(f, layers, local)?,
        // The length after scaling.
        max_position_embeddings: f.size("max_position_embeddings", defaults.positions)? as usize,
        qkv_bias: bias,
        attention_out_bias: bias,
        ..shape
    })
}

/// The rotary positions of each layer if layers with a window have their own, which are the model's second ones.
fn by_window(f: &Fields<'_>, layers: i64, has_window: impl Fn(i64) -> bool) -> Result<Vec<Option<usize>>> {
    let windows = f.windows(Some(1), layers, has_window)?;
    Ok(windows.into_iter().map(|window| Some(usize::from(window.is_some()))).collect())
}

fn smollm3(f: &Fields<'_>) -> Result<Shape> {
    let defaults = Defaults {
        vocab_size: 128_256,
        hidden_size: 2048,
        intermediate_size: 11008,
        layers: 36,
        heads: 16,
        kv_heads: Some(4),
        positions: 32768,
        rope: RopeKeys { default_theta: 2e6, ..ROPE },
        ..LLAMA_DEFAULTS
    };
    let bias = f.flag("attention_bias", false)?;
    let shape = llama_like(f, &defaults)?;
    let layers = shape.num_hidden_layers as usize;
    let interval = f.size("no_rope_layer_interval", 4)? as usize;
    let wrong = || f.wrong("no_rope_layers", &format!("{layers} numbers, 1 for a layer with rotary positions, else 0"));
    let rotated: Vec<bool> = match f.present("no_rope_layers") {
        None => (1..=layers).map(|layer| layer % interval != 0).collect(),
        Some(list) => {
            let list = list.as_array().filter(|list| list.len() >= layers).ok_or_else(wrong)?;
            let flag = |entry: &serde_json::Value| entry.as_i64().filter(|n| (0..=1).contains(n)).map(|n| n == 1);
            list[..layers].iter().map(|entry| flag(entry).ok_or_else(wrong)).collect::<Result<_>>()?
        }
    };
    // As in transformers, given `layer_types` have their windows whatever the switch says.
    let used = f.flag("use_sliding_window", false)? || f.present("layer_types").is_some();
    let window = if used { f.window("sliding_window", None)? } else { None };
    Ok(Shape {
        windows: f.windows(window, layers as i64, |layer| !rotated[layer as usize])?,
        layer_ropes: rotated.iter().map(|rotated| rotated.then_some(0)).collect(),
        tie_word_embeddings: f.flag("tie_word_embeddings", true)?,
        qkv_bias: bias,
        attention_out_bias: bias,
        mlp_bias: f.flag("mlp_bias", false)?,
        ..shape
    })
}

/// The shape shared by OLMo 2 and 3.
fn olmo(f: &Fields<'_>, rope: RopeKeys) -> Result<Shape> {
    let bias = f.flag("attention_bias", false)?;
    let defaults = Defaults { vocab_size: 50304, norm_eps: 1e-5, rope, ..LLAMA_DEFAULTS };
    let shape = llama_like(f, &defaults)?;
    Ok(Shape { order: Order::Output, qkv_bias: bias, attention_out_bias: bias, ..shape })
}

fn olmo2(f: &Fields<'_>) -> Result<Shape> {
    olmo(f, ROPE)
}

fn olmo3(f: &Fields<'_>) -> Result<Shape> {
    let theta = 500_000.0;
    let shape = olmo(f, RopeKeys { default_theta: theta, local: Some(("rope_theta", theta)), ..ROPE })?;
    let (layers, local) = (shape.num_hidden_layers, |layer: i64| (layer + 1) % 4 != 0);
    let windows = f.windows(f.window("sliding_window", Some(4096))?, layers, local)?;
    Ok(Shape { windows, layer_ropes: by_window(f, layers, local)?, ..shape })
}

/// The layers that `layer_types` names `mixing`, among layers of `full_attention`; without the field, the layers that `default` selects.
fn mixing_layers(f: &Fields<'_>, layers: i64, mixing: &str, default: impl Fn(i64) -> bool) -> Result<Vec<bool>> {
    let wrong = || f.wrong("layer_types", &format!("{layers} names, each full_attention or {mixing}"));
    let Some(list) = f.present("layer_types") else { return Ok((0..layers).map(default).collect()) };
    let list = list.as_array().filter(|list| list.len() as i64 == layers).ok_or_else(wrong)?;
    let is_mixing = |kind: &serde_json::Value| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some(kind) if kind == mixing => Ok(true),
        _ => Err(wrong()),
    };
    list.iter().map(is_mixing).collect()
}

/// The shape shared by LFM2 and its models with experts.
fn lfm2_like(f: &Fields<'_>, defaults: &Defaults) -> Result<Shape> {
    let shape = llama_like(f, defaults)?;
    for name in ["block_dim", "conv_dim", "conv_dim_out"] {
        if f.size(name, shape.hidden_size)? != shape.hidden_size {
            return Err(f.wrong(name, &format!("{}, the hidden size, or none", shape.hidden_size)));
        }
    }
    f.must_be("use_pos_enc", true)?;
    let attends = f.ids("full_attn_idxs")?;
    let all = f.present("full_attn_idxs").is_none();
    let mixes = mixing_layers(f, shape.num_hidden_layers, "conv", |layer| !all && !attends.contains(&layer))?;
    let mixing = Mixing::ShortConv { kernel: f.size("conv_L_cache", 3)?, bias: f.flag("conv_bias", false)? };
    Ok(Shape {
        mixing: mixes.contains(&true).then_some(mixing),
        mixes,
        norm_eps: f.number("norm_eps", 1e-5)?,
        activation: Activation::Silu,
        tie_word_embeddings: f.flag("tie_embedding", f.flag("tie_word_embeddings", true)?)?,
        ..shape
    })
}

fn lfm2(f: &Fields<'_>) -> Result<Shape> {
    let defaults = Defaults {
        vocab_size: 65536,
        hidden_size: 2560,
        intermediate_size: 12288,
        kv_heads: Some(8),
        positions: 128_000,
        rope: RopeKeys { default_theta: 1e6, ..ROPE },
        ..LLAMA_DEFAULTS
    };
    let shape = lfm2_like(f, &defaults)?;
    f.must_be("block_use_swiglu", true)?;
    let mut width = f.size("block_ff_dim", shape.intermediate_size)?;
    if f.flag("block_auto_adjust_ff_dim", true)? {
        width = 2 * width / 3;
        if f.raw.get("block_ffn_dim_multiplier").is_none_or(|factor| !factor.is_null()) {
            let multiple = f.size("block_multiple_of", 256)?;
            width = (f.positive("block_ffn_dim_multiplier", Some(1.0))? * width as f64).min(2f64.powi(40)) as i64;
            width = width.saturating_add(multiple - 1) / multiple * multiple;
        }
        if !(1..=1 << 28).contains(&width) {
            return Err(
                f.wrong("block_ffn_dim_multiplier", "a factor with which the width of the MLP is from 1 to 2^28")
            );
        }
    }
    Ok(Shape { intermediate_size: width, ..shape })
}

/// The shape shared by Qwen3.5 and Qwen3-Next, with experts or without.
fn qwen3_5_like(f: &Fields<'_>, defaults: &Defaults) -> Result<Shape> {
    let shape = llama_like(f, defaults)?;
    let bias = f.flag("attention_bias", false)?;
    f.must_be("attn_output_gate", true)?;
    f.must_be_text("hidden_act", "silu")?;
    f.must_be_text("mamba_ssm_dtype", "float32")?;
    f.must_be_text("output_gate_type", "swish")?;
    let interval = f.size("full_attention_interval", 4)?;
    let mixes = mixing_layers(f, shape.num_hidden_layers, "linear_attention", |layer| (layer + 1) % interval != 0)?;
    let delta = GatedDelta {
        key_heads: f.size("linear_num_key_heads", 16)?,
        value_heads: f.size("linear_num_value_heads", 32)?,
        key_dim: f.size("linear_key_head_dim", 128)?,
        value_dim: f.size("linear_value_head_dim", 128)?,
        kernel: f.size("linear_conv_kernel_dim", 4)?,
    };
    for (name, width) in [("linear_key_head_dim", delta.keys()), ("linear_value_head_dim", delta.values())] {
        if width > 1 << 28 {
            return Err(f.wrong(name, "a width of which all heads have at most 2^28"));
        }
    }
    if delta.value_heads % delta.key_heads != 0 {
        let expected = format!("a multiple of linear_num_key_heads = {}", delta.key_heads);
        return Err(f.wrong("linear_num_value_heads", &expected));
    }
    Ok(Shape {
        mixing: mixes.contains(&true).then_some(Mixing::GatedDelta(delta)),
        mixes,
        norm: NormKind::RmsPlusOne,
        qkv_bias: bias,
        attention_out_bias: bias,
        attention_gate: true,
        ..shape
    })
}

fn qwen3_5(f: &Fields<'_>) -> Result<Shape> {
    let defaults = Defaults {
        vocab_size: 248_320,
        intermediate_size: 12288,
        heads: 16,
        kv_heads: Some(4),
        head_dim: Some(256),
        positions: 32768,
        rope: RopeKeys { default_fraction: 0.25, ..ROPE },
        ..LLAMA_DEFAULTS
    };
    qwen3_5_like(f, &defaults)
}

fn qwen3_next(f: &Fields<'_>) -> Result<Shape> {
    let defaults = Defaults {
        vocab_size: 151_936,
        hidden_size: 2048,
        intermediate_size: 5632,
        layers: 48,
        heads: 16,
        kv_heads: Some(2),
        head_dim: Some(256),
        positions: 32768,
        rope: RopeKeys { default_fraction: 0.25, ..ROPE },
        ..LLAMA_DEFAULTS
    };
    let shape = qwen3_5_like(f, &defaults)?;
    let count_name = if f.present("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    let (count, step) = (f.count(count_name, 512)?, f.size("decoder_sparse_step", 1)?);
    let dense = f.ids("mlp_only_layers")?;
    let experts = Experts {
        count,
        chosen: f.size("num_experts_per_tok", 10)?,
        intermediate_size: f.size("moe_intermediate_size", 512)?,
        normalized: f.flag("norm_topk_prob", true)?,
        shared: Some(f.size("shared_expert_intermediate_size", 512)?),
        scoring: Scoring::Softmax,
        clamped: None,
        layers: (0..shape.num_hidden_layers).map(|i| !dense.contains(&i) && (i + 1) % step == 0).collect(),
    };
    Ok(Shape { experts: (count > 0 && experts.layers.contains(&true)).then_some(experts), ..shape })
}

fn phi3(f: &Fields<'_>) -> Result<Shape> {
    let defaults = Defaults {
        vocab_size: 32064,
        hidden_size: 3072,
        intermediate_size: 8192,
        positions: 4096,
        norm_eps: 1e-5,
        rope: RopeKeys { default_original: Some(4096.0), ..ROPE },
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
    let offset = f.ids("pad_token_id")?.first().map_or(2, |pad| pad.saturating_add(1));
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
    let local = |layer: i64| layer % every != 0;
    let local_theta = Some(("local_rope_theta", 10_000.0));
    let keys = RopeKeys { theta: "global_rope_theta", default_theta: 160_000.0, local: local_theta, ..ROPE };
    let shape = Shape::biased(f, f.size("vocab_size", 50368)?, hidden_size, heads, layers)?;
    Ok(Shape {
        intermediate_size: f.size("intermediate_size", 1152)?,
        max_position_embeddings: f.size("max_position_embeddings", 8192)? as usize,
        norm_bias: f.flag("norm_bias", false)?,
        // The norm of the embeddings is just before it.
        first_norm: false,
        norm_eps: f.number("norm_eps", 1e-5)?,
        activation: f.activation("hidden_activation", "gelu")?,
        ropes: f.ropes(hidden_size / heads, &keys)?,
        layer_ropes: by_window(f, layers, local)?,
        causal: false,
        windows: f.windows(Some(window), layers, local)?,
        qkv_bias: bias,
        attention_out_bias: bias,
        mlp_bias: f.flag("mlp_bias", false)?,
        pooling,
        head_bias: f.flag("classifier_bias", false)?,
        ..shape
    })
}

fn bart(f: &Fields<'_>) -> Result<Shape> {
    f.must_be("is_encoder_decoder", true)?;
    f.must_be("is_decoder", false)?;
    let hidden_size = f.size("d_model", 1024)?;
    let (heads, inner) = (f.size("decoder_attention_heads", 16)?, f.size("decoder_ffn_dim", 4096)?);
    for (name, expected, default) in [("encoder_attention_heads", heads, 16), ("encoder_ffn_dim", inner, 4096)] {
        if f.size(name, default)? != expected {
            return Err(f.wrong(name, &format!("{expected}, that of the decoder")));
        }
    }
    let scale = if f.flag("scale_embedding", false)? { (hidden_size as f64).sqrt() } else { 1.0 };
    Ok(Shape {
        intermediate_size: inner,
        max_position_embeddings: f.size("max_position_embeddings", 1024)? as usize,
        // The first two rows of each of its tables are not used.
        position_offset: 2,
        embedding_scale: scale,
        order: Order::Post,
        activation: f.activation("activation_function", "gelu")?,
        encoder_layers: Some(f.size("encoder_layers", 12)?),
        decoder_start_token_id: f.ids("decoder_start_token_id")?.first().copied().or(Some(2)),
        tie_word_embeddings: f.flag("tie_word_embeddings", true)?,
        initializer_range: f.number("init_std", 0.02)?,
        ..Shape::biased(f, f.size("vocab_size", 50265)?, hidden_size, heads, f.size("decoder_layers", 12)?)?
    })
}

/// Tokens of T5's pretraining texts: the limit where a file states none. Its positions are relative, so `n_positions` can be raised.
const T5_POSITIONS: i64 = 512;

/// transformers' defaults of fields that a `config.json` of T5 or mT5 omits.
struct T5Defaults {
    vocab_size: i64,
    intermediate_size: i64,
    layers: i64,
    heads: i64,
    feed_forward: &'static str,
}

fn t5(f: &Fields<'_>) -> Result<Shape> {
    // Before transformers 5 an untied head meant that hidden states are not scaled.
    let tied = f.flag("tie_word_embeddings", true)?;
    let scaled = f.flag("scale_decoder_outputs", tied)?;
    let defaults = T5Defaults { vocab_size: 32128, intermediate_size: 2048, layers: 6, heads: 8, feed_forward: "relu" };
    let shape = t5_like(f, &defaults)?;
    let lm_head_scale = if scaled { (shape.hidden_size as f64).powf(-0.5) } else { 1.0 };
    Ok(Shape { tie_word_embeddings: tied, lm_head_scale, ..shape })
}

/// As in transformers 5, which never scales hidden states, and ties the head of every mT5 without a stored one.
fn mt5(f: &Fields<'_>) -> Result<Shape> {
    let feed_forward = "gated-gelu";
    let defaults = T5Defaults { vocab_size: 250_112, intermediate_size: 1024, layers: 8, heads: 6, feed_forward };
    Ok(Shape { tie_word_embeddings: f.flag("tie_word_embeddings", false)?, ..t5_like(f, &defaults)? })
}

/// The shape shared by T5 and mT5.
fn t5_like(f: &Fields<'_>, defaults: &T5Defaults) -> Result<Shape> {
    f.must_be("is_encoder_decoder", true)?;
    f.must_be("is_decoder", false)?;
    let (hidden_size, heads) =
        (f.size_as("d_model", "hidden_size", 512)?, f.size_as("num_heads", "num_attention_heads", defaults.heads)?);
    let encoder_layers = f.size_as("num_layers", "num_hidden_layers", defaults.layers)?;
    let layers = f.size("num_decoder_layers", encoder_layers)?;
    let (activation, gated) = f.feed_forward(defaults.feed_forward)?;
    let buckets = f.size("relative_attention_num_buckets", 32)?;
    let max_distance = f.size("relative_attention_max_distance", 128)?;
    if buckets < 4 || buckets % 2 != 0 || max_distance <= buckets / 2 {
        let message = format!(
            "`relative_attention_num_buckets`: expected an even number from 4, half of it below \
             relative_attention_max_distance = {max_distance}, found {buckets}"
        );
        return Err(Error::invalid(f.path, message));
    }
    Ok(Shape {
        family: t5_form(f.family, gated, f.names_classifier()),
        intermediate_size: f.size("d_ff", defaults.intermediate_size)?,
        head_dim: f.size_as("d_kv", "head_dim", 64)?,
        max_position_embeddings: f.size("n_positions", T5_POSITIONS)? as usize,
        norm: NormKind::Rms,
        norm_eps: f.number("layer_norm_epsilon", 1e-6)?,
        activation,
        relative_bias: Some(RelativeBias { buckets, max_distance }),
        encoder_layers: Some(encoder_layers),
        decoder_start_token_id: f.ids("decoder_start_token_id")?.first().copied(),
        attention_scale: 1.0,
        qkv_bias: false,
        attention_out_bias: false,
        mlp_bias: false,
        initializer_range: f.number("initializer_factor", 1.0)?,
        scale_init_by_width: true,
        wide_mlp_out: true,
        ..Shape::biased(f, f.size("vocab_size", defaults.vocab_size)?, hidden_size, heads, layers)?
    })
}
