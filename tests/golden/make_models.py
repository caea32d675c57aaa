"""Makes the tiny models of `models/` and their reference values with transformers.

    python make_models.py            # make every model of SPECS again
    python make_models.py NAME...    # make these again
    python make_models.py --check    # recompute the values of every model in `models/` from its stored inputs

Made with torch 2.11.0, transformers 5.23.0, trl 1.11.0 and safetensors 0.8.0 on a CPU, one thread, float32. README.md
says what each tensor is.
"""

import copy
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DebertaV2Config,
    DebertaV2Tokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GptOssConfig,
    GPTNeoXConfig,
    GraniteConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    ModernBertConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RobertaConfig,
    RobertaTokenizer,
    SmolLM3Config,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from trl.experimental.ppo.ppo_trainer import forward
from trl.experimental.utils import get_reward

import thin

MODELS = Path(__file__).resolve().parent / "models"
CONTEXT, GREEDY_TOKENS = 7, 16
ENCODERS = ("bert", "distilbert", "roberta", "deberta-v2", "modernbert")
PAIRED = ("deberta-v2", "modernbert")
TEXTS = ["This movie was really great and I loved it.", "The movie was terrible", "x"]
PAIRS = [("Was it great?", " I loved it."), ("The movie", "was terrible"), ("x", "")]

bytelevel = dict(bos_token_id=0, eos_token_id=0, pad_token_id=1)
llama = dict(
    vocab_size=400,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=3,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)

# Without a tokenizer the vocabulary can be small, and so the files. Heads of 16 leave room for each band of `llama3`.
small = dict(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=64,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=3,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
opt = dict(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    ffn_dim=64,
    max_position_embeddings=64,
    dropout=0.0,
    bos_token_id=2,
    eos_token_id=2,
    pad_token_id=1,
)
opt_proj_postln = dict(opt, word_embed_proj_dim=16, do_layer_norm_before=False)
qwen3 = dict(small, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
qwen3_yarn = dict(
    qwen3,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=8.0,
        beta_fast=8.0,
        beta_slow=0.5,
        mscale=0.7,
        mscale_all_dim=0.4,
        truncate=False,
        original_max_position_embeddings=64,
    ),
)
phi3_long = dict(
    small,
    original_max_position_embeddings=8,
    rope_parameters=dict(
        rope_type="longrope",
        rope_theta=10000.0,
        partial_rotary_factor=0.75,
        short_factor=[1.0, 1.1, 1.3, 1.4, 1.6, 2.0],
        long_factor=[1.2, 2.0, 3.5, 6.0, 9.0, 14.0],
    ),
)
gemma2 = dict(
    qwen3,
    query_pre_attn_scalar=24,  # neither the width of a head nor hidden_size / heads
    attn_logit_softcapping=5.0,
    final_logit_softcapping=3.0,
    sliding_window=5,
)
# A layer with a window, and one without, each with its own rotary positions.
gemma3 = dict(
    qwen3,
    query_pre_attn_scalar=24,
    final_logit_softcapping=3.0,
    sliding_window=5,
    sliding_window_pattern=2,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0},
    },
)
smollm3 = dict(small, no_rope_layer_interval=2, tie_word_embeddings=True)
olmo2 = dict(small, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
olmo3 = dict(
    olmo2,
    sliding_window=5,
    layer_types=["sliding_attention", "full_attention"],
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 500000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.25,
        },
    },
)

# A layer with attention between two with convolutions; the width of the MLP is adjusted to 56.
lfm2 = dict(
    small,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=66,
    block_multiple_of=8,
    block_ffn_dim_multiplier=1.2,
    layer_types=["conv", "full_attention", "conv"],
    num_hidden_layers=3,
)
# The widths of keys and values of the delta rule differ, and two value heads share each key head. The norm of small outputs would enlarge
# the rounding of float32: its epsilon is larger than that of any real model.
qwen3_5 = dict(
    small,
    rms_norm_eps=1e-2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=["linear_attention", "full_attention"],
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
    },
)

# One layer with an MLP, and one with experts and an MLP that all tokens share.
qwen3_next = dict(
    {key: value for key, value in qwen3_5.items() if key != "rope_parameters"},
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    moe_intermediate_size=12,
    shared_expert_intermediate_size=20,
    num_experts=4,
    num_experts_per_tok=2,
    decoder_sparse_step=2,
)

# Experts in both layers; transformers has no width of one MLP.
qwen3_5_moe = dict(
    qwen3_5,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=20,
    num_experts=4,
    num_experts_per_tok=2,
)
del qwen3_5_moe["intermediate_size"]

# A layer with an MLP, then two with experts, one of them with attention. The numbers that are added for the choice change it.
lfm2_moe = dict(
    small,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=40,
    moe_intermediate_size=12,
    num_experts=4,
    num_experts_per_tok=2,
    num_dense_layers=1,
    routed_scaling_factor=1.5,
    layer_types=["conv", "full_attention", "conv"],
    num_hidden_layers=3,
)

# One layer with an MLP, and one with experts, whose weights do not add up to 1.
qwen3_moe = dict(
    small,
    head_dim=16,
    moe_intermediate_size=12,
    num_experts=4,
    num_experts_per_tok=2,
    decoder_sparse_step=2,
    norm_topk_prob=False,
)
mixtral = dict(small, intermediate_size=24, num_local_experts=3, num_experts_per_tok=2)

granite = dict(
    small,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    embedding_multiplier=3.0,
    attention_multiplier=0.2,
    residual_multiplier=0.6,
    logits_scaling=2.0,
)
# Queries grow at positions 8, 16 and 24.
ministral3 = dict(
    small,
    head_dim=16,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=8.0,
        original_max_position_embeddings=8,
        beta_fast=8.0,
        beta_slow=0.5,
        mscale=1.0,
        mscale_all_dim=1.0,
        llama_4_scaling_beta=0.3,
    ),
)

# The clamp is reached by many gates. A layer with a window, and one without.
gpt_oss = dict(
    small,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=24,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=5,
    swiglu_limit=1.5,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=4.0,
        beta_fast=8.0,
        beta_slow=0.5,
        truncate=False,
        original_max_position_embeddings=16,
    ),
)

# As the small models: inputs of each layer, and the last two layers have the keys and values of layers 2 and 1.
gemma4 = dict(
    small,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    global_head_dim=32,
    intermediate_size=40,
    sliding_window=5,
    layer_types=[
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
    vocab_size_per_layer_input=96,
    hidden_size_per_layer_input=8,
    final_logit_softcapping=3.0,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
)
# As the larger ones: in layers without a window keys are values too, in heads of another number.
gemma4_full = dict(
    gemma4,
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    num_kv_shared_layers=0,
    use_double_wide_mlp=False,
    hidden_size_per_layer_input=0,
    attention_k_eq_v=True,
    num_global_key_value_heads=1,
    final_logit_softcapping=None,
)

# As the 26B-A4B: experts beside the MLP of each layer.
gemma4_moe = dict(
    gemma4_full,
    intermediate_size=24,
    enable_moe_block=True,
    num_experts=4,
    top_k_experts=2,
    moe_intermediate_size=12,
)

encoder = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


# As DeBERTa-v3, but for the sizes: four buckets for the near distances in each direction.
deberta = dict(
    encoder,
    vocab_size=125,
    max_position_embeddings=64,
    pad_token_id=0,
    relative_attention=True,
    share_att_key=True,
    pooler_hidden_size=32,
    pooler_hidden_act="gelu",
    layer_norm_eps=1e-7,
)
modernbert = dict(
    vocab_size=328,
    hidden_size=32,
    num_attention_heads=4,
    intermediate_size=20,
    max_position_embeddings=64,
    local_attention=6,
    cls_token_id=321,
    bos_token_id=321,
    sep_token_id=322,
    eos_token_id=322,
    pad_token_id=323,
)


def labels(*names):
    return dict(id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)})


def rope(**parameters):
    return dict(small, rope_parameters={"rope_theta": 10000.0, **parameters})


class Spec(NamedTuple):
    """A model to make: its tokenizer is copied from another model of this folder, if it has one."""

    config: PreTrainedConfig
    seed: int  # the first to try
    tokenizer: str | None = None
    tokenizer_source: str | None = None
    tokens: int = 96  # as many ids as the tokenizer knows
    weights: str | None = None  # the model of this folder whose weights it has, of the same names
    rounding: float = 8e-6  # how far float32 may be from float64: well below the 2e-5 that tests allow


SPECS = {
    "gpt2_cls": Spec(
        GPT2Config(
            vocab_size=320,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            num_labels=1,
            **bytelevel,
        ),
        201,
        "bytelevel",
        "gpt2",
        320,
    ),
    "llama_untied_cls": Spec(
        LlamaConfig(tie_word_embeddings=False, num_labels=1, **llama), 202, "llama2", "llama_untied", 400
    ),
    "llama_tied": Spec(LlamaConfig(tie_word_embeddings=True, **llama), 203, "llama2", "llama_untied", 400),
    "gpt_neox_seqres": Spec(
        GPTNeoXConfig(
            vocab_size=352,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tie_word_embeddings=False,
            use_parallel_residual=False,
            **bytelevel,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        ),
        204,
        "bytelevel",
        "gpt_neox",
        320,
        rounding=1e-5,
    ),
    "opt": Spec(OPTConfig(**opt), 205),
    "opt_proj_postln": Spec(OPTConfig(**opt_proj_postln), 206),
    "llama_rope3": Spec(
        LlamaConfig(
            **rope(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            )
            | {"max_position_embeddings": 512}
        ),
        207,
    ),
    "llama_linear": Spec(LlamaConfig(**rope(rope_type="linear", factor=2.0)), 208, weights="llama_rope3"),
    # Eight positions, so that rows of 12 are past what the model was made for.
    "llama_dynamic": Spec(
        LlamaConfig(**rope(rope_type="dynamic", factor=2.0) | {"max_position_embeddings": 8}), 209, weights="llama_rope3"
    ),
    "llama_yarn": Spec(
        LlamaConfig(
            **rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64) | {"max_position_embeddings": 256}
        ),
        225,
        weights="llama_rope3",
    ),
    "qwen3_yarn": Spec(
        Qwen3Config(tie_word_embeddings=False, **qwen3_yarn), 226, weights="qwen3"
    ),
    # Rows of 9 tokens and more are past the short texts.
    "phi3_long": Spec(Phi3Config(**phi3_long), 227, weights="phi3"),
    "gemma3": Spec(Gemma3TextConfig(**gemma3), 228),
    "gemma3_cls": Spec(Gemma3TextConfig(num_labels=1, **gemma3), 229, weights="gemma3"),
    "smollm3": Spec(SmolLM3Config(**smollm3), 230),
    "smollm3_cls": Spec(SmolLM3Config(num_labels=1, **smollm3), 231, weights="smollm3"),
    "olmo2": Spec(Olmo2Config(**olmo2), 232),
    "olmo2_cls": Spec(Olmo2Config(num_labels=1, **olmo2), 233, weights="olmo2"),
    "olmo3": Spec(Olmo3Config(**olmo3), 234, weights="olmo2"),
    "qwen3_moe": Spec(Qwen3MoeConfig(**qwen3_moe), 235),
    "mixtral": Spec(MixtralConfig(**mixtral), 236),
    "lfm2": Spec(Lfm2Config(**lfm2), 237),
    "qwen3_5": Spec(Qwen3_5TextConfig(tie_word_embeddings=True, **qwen3_5), 238, rounding=1e-5),
    "qwen3_5_cls": Spec(Qwen3_5TextConfig(num_labels=1, tie_word_embeddings=True, **qwen3_5), 239, weights="qwen3_5"),
    "qwen3_next": Spec(Qwen3NextConfig(**qwen3_next), 240, rounding=1e-5),
    "qwen3_5_moe": Spec(Qwen3_5MoeTextConfig(**qwen3_5_moe), 246, rounding=1e-5),
    "lfm2_moe": Spec(Lfm2MoeConfig(**lfm2_moe), 247),
    "granite": Spec(GraniteConfig(**granite), 237),
    "ministral3": Spec(Ministral3Config(**ministral3), 238),
    "ministral3_cls": Spec(Ministral3Config(num_labels=1, **ministral3), 239),
    "gpt_oss": Spec(GptOssConfig(**gpt_oss), 240),
    "gpt_oss_cls": Spec(GptOssConfig(num_labels=1, **gpt_oss), 241),
    # In the published form: weights of experts in blocks of 32.
    "gpt_oss_mxfp4": Spec(GptOssConfig(**(gpt_oss | dict(intermediate_size=32, num_local_experts=3))), 242),
    "gemma4": Spec(Gemma4TextConfig(**gemma4), 243),
    "gemma4_full": Spec(Gemma4TextConfig(**gemma4_full), 244),
    "gemma4_moe": Spec(Gemma4TextConfig(**gemma4_moe), 245),
    "mistral": Spec(MistralConfig(sliding_window=5, **small), 210),
    "qwen2": Spec(Qwen2Config(tie_word_embeddings=True, **small), 211),
    "qwen3": Spec(Qwen3Config(tie_word_embeddings=False, **qwen3), 212),
    "gemma2": Spec(Gemma2Config(**gemma2), 213),
    "phi3": Spec(Phi3Config(sliding_window=6, **small), 214),
    "opt_cls": Spec(OPTConfig(num_labels=1, **opt), 215, weights="opt"),
    "opt_proj_postln_cls": Spec(OPTConfig(num_labels=1, **opt_proj_postln), 216, weights="opt_proj_postln"),
    "mistral_cls": Spec(MistralConfig(num_labels=1, sliding_window=5, **small), 217),
    "qwen2_cls": Spec(Qwen2Config(num_labels=1, tie_word_embeddings=True, **small), 218, weights="qwen2"),
    "qwen3_cls": Spec(Qwen3Config(num_labels=1, tie_word_embeddings=False, **qwen3), 219),
    "gemma2_cls": Spec(Gemma2Config(num_labels=1, **gemma2), 220, weights="gemma2"),
    "phi3_cls": Spec(Phi3Config(num_labels=1, sliding_window=6, **small), 221),
    "bert_cls1": Spec(
        BertConfig(vocab_size=256, max_position_embeddings=64, num_labels=1, **encoder), 222, "bert", "distilbert_cls2"
    ),
    "bert_cls2": Spec(
        BertConfig(vocab_size=256, max_position_embeddings=64, **labels("NEGATIVE", "POSITIVE"), **encoder),
        223,
        "bert",
        "distilbert_cls2",
    ),
    "roberta_cls3": Spec(
        RobertaConfig(
            vocab_size=323,
            max_position_embeddings=66,
            type_vocab_size=1,
            layer_norm_eps=1e-5,
            **labels("negative", "neutral", "positive"),
            **encoder,
        ),
        224,
        "roberta",
        "gpt2",
    ),
    "deberta_cls1": Spec(
        DebertaV2Config(
            num_labels=1,
            position_biased_input=False,
            position_buckets=8,
            norm_rel_ebd="layer_norm",
            pos_att_type=["p2c", "c2p"],
            type_vocab_size=0,
            **deberta,
        ),
        225,
        "deberta",
        "t5",
    ),
    # Settings that no DeBERTa-v3 has: learned positions, a row for each distance up to 12, no norm over them, c2p alone.
    "deberta_cls2": Spec(
        DebertaV2Config(
            position_biased_input=True,
            position_buckets=-1,
            max_relative_positions=12,
            pos_att_type="c2p",
            type_vocab_size=2,
            **labels("NEGATIVE", "POSITIVE"),
            **deberta,
        ),
        226,
        "deberta",
        "t5",
    ),
    "modernbert_cls1": Spec(
        ModernBertConfig(num_labels=1, num_hidden_layers=4, classifier_pooling="mean", **modernbert),
        227,
        "modernbert",
        "gpt2",
    ),
    "modernbert_cls2": Spec(
        ModernBertConfig(
            num_hidden_layers=3,
            global_attn_every_n_layers=2,
            classifier_pooling="cls",
            attention_bias=True,
            mlp_bias=True,
            norm_bias=True,
            classifier_bias=True,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
            **labels("NEGATIVE", "POSITIVE"),
            **modernbert,
        ),
        228,
        "modernbert",
        "gpt2",
    ),
}


# One model for each kind of layer, with the gradient of every parameter beside its values.
GRADIENTS = (
    "gpt2",
    "gpt_neox",
    "llama_untied",
    "llama_rope3",
    "opt_proj_postln",
    "mistral",
    "qwen3",
    "gemma2",
    "phi3",
    "phi3_long",
    "gemma3",
    "smollm3",
    "olmo2",
    "qwen3_moe",
    "mixtral",
    "lfm2",
    "qwen3_5",
    "qwen3_next",
    "qwen3_5_moe",
    "lfm2_moe",
    "granite",
    "ministral3",
    "gpt_oss",
    "gemma4",
    "gemma4_full",
    "gemma4_moe",
    "bert_cls2",
    "roberta_cls3",
    "deberta_cls1",
    "deberta_cls2",
    "modernbert_cls1",
    "modernbert_cls2",
)


def is_classifier(config):
    return config.architectures[0].endswith("ForSequenceClassification")


def implementations(config):
    """Only the eager attention of transformers knows Gemma's soft-caps, gpt-oss's sinks and DeBERTa's relative positions, and only its
    eager experts compute in float64."""
    experts = {"experts_implementation": "eager"} if any("experts" in key for key in config.to_dict()) else {}
    eager = config.model_type in ("gemma2", "gpt_oss", "deberta-v2")
    return {"attn_implementation": "eager" if eager else "sdpa", **experts}


def random_model(config, seed, classifier, weights=None):
    """A model with random weights, but for those that the model `weights` has too."""
    auto = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    torch.manual_seed(seed)
    model = auto.from_config(config, **implementations(config))
    # Gemma and Qwen3.5 multiply by 1 + weight.
    centred = ("gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = weight.dim() == 1 and name.endswith("weight")
            weight.normal_(0.0, 0.15 if is_norm else 0.3 if weight.dim() > 1 else 0.1)
            of_delta = name.endswith("linear_attn.norm.weight")  # which multiplies by the weight
            is_factor = name.endswith("scale") or (is_norm and (of_delta or config.model_type not in centred))
            weight.add_(1.0 if is_factor else 0.0)
        for name, number in model.named_buffers():
            if name.endswith("layer_scalar"):
                number.uniform_(0.5, 1.5)
            elif name.endswith("expert_bias"):
                number.uniform_(-0.3, 0.3)
    if weights:
        model.load_state_dict(load_file(MODELS / weights / "model.safetensors"), strict=False)
    return model.eval()


def random_mxfp4(model, seed):
    """Random codes and exponents of the experts of gpt-oss, whose values the model gets."""
    generator, packed = torch.Generator().manual_seed(seed), {}

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                experts, width_in, width_out = weight.shape
                blocks = integers(0, 256, experts, width_out, width_in // 32, 16)
                scales = integers(122, 126, experts, width_out, width_in // 32)
                weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
                packed |= {name: {f"{name}_blocks": blocks, f"{name}_scales": scales}}
    return packed


def store_mxfp4(folder, packed):
    """Puts the codes in the place of the weights, as OpenAI publishes them."""
    tensors = load_file(folder / "model.safetensors")
    for name, parts in packed.items():
        del tensors[name]
        tensors |= parts
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    spared = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"modules_to_not_convert": spared, "quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def share_weights(folder, weights):
    """Puts links to the file of the model `weights` in the place of equal tensors; what is left is a second shard."""
    single, link = folder / "model.safetensors", f"../{weights}/model.safetensors"
    all_of_it, shared = load_file(single), load_file(MODELS / weights / "model.safetensors")
    own = {name: weight for name, weight in all_of_it.items() if name not in shared}
    assert all(torch.equal(weight, shared[name]) for name, weight in all_of_it.items() if name in shared), folder
    single.unlink()
    if not own:
        single.symlink_to(link)
        return
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    (folder / shards[0]).symlink_to(link)
    save_file(own, folder / shards[1], metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(weight.nbytes for weight in all_of_it.values())},
        "weight_map": {name: shards[name in own] for name in sorted(all_of_it)},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def forget_lengths(model):
    """Dynamic rope keeps the base of the longest batch so far: begin again as a model just loaded does."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.inv_freq = module.original_inv_freq.clone()
            module.max_seq_len_cached = module.original_max_seq_len


def random_inputs(seed, tokens, config):
    """Left-padded queries of 7 with responses of 6, padded after their end; rows of 12; rows of 12 to cut."""
    generator = torch.Generator().manual_seed(seed)

    def ids(*shape):
        return torch.randint(4, tokens, shape, generator=generator)  # 4: past the special tokens

    pad, eos = config.pad_token_id, config.eos_token_id
    padded = ids(4, CONTEXT + 6)
    for row, (left, end) in enumerate([(0, None), (3, 10), (5, 12), (1, 7)]):
        padded[row, :left] = pad
        if end is not None:
            padded[row, end] = eos
            padded[row, end + 1 :] = pad
    return padded, ids(3, 12), ids(4, 12)


@torch.no_grad()
def lm_values(model, padded, unpadded, greedy_eos_id=None):
    config, values = model.config, {}
    pad = config.pad_token_id
    for name, ids in (("padded", padded), ("unpadded", unpadded)):
        mask = (ids != pad).long()
        forget_lengths(model)
        output = forward(model, ids, pad)
        values |= {
            f"{name}.input_ids": ids,
            f"{name}.attention_mask": mask,
            f"{name}.logits": output.logits,
            f"{name}.next_logprobs": output.logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0],
        }
        values[f"{name}.hidden_states.{config.num_hidden_layers}"] = output.hidden_states[-1]
    prompts = padded[:, :CONTEXT]
    mask = (prompts != pad).long()

    def greedy(eos):
        forget_lengths(model)
        return model.generate(
            prompts.masked_fill(mask == 0, 0),
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=GREEDY_TOKENS,
            eos_token_id=eos,
            pad_token_id=pad,
            return_dict_in_generate=True,
            output_scores=True,
        )

    free = greedy(config.eos_token_id)
    tokens, scores = free.sequences[:, CONTEXT:], torch.stack(free.scores, 1)
    top = scores.topk(2, -1).values
    if greedy_eos_id is None:
        greedy_eos_id = tokens[0, min(5, tokens.shape[1] - 1)].item()  # the first row stops early, others later or never
    values |= {
        "greedy.prompt_ids": prompts,
        "greedy.prompt_mask": mask,
        "greedy.tokens": tokens,
        "greedy.gap": top[..., 0] - top[..., 1],
        "greedy_eos.tokens": greedy(greedy_eos_id).sequences[:, CONTEXT:],
    }
    if getattr(config, "rope_parameters", None) and config.rope_parameters.get("rope_type") in ("dynamic", "longrope"):
        values |= values_alone(model, padded)
    logits = [name for name in values if name.endswith(".logits")]
    return thin.columns(values, *logits), greedy_eos_id


@torch.no_grad()
def values_alone(model, padded):
    """The rows of `padded` one at a time, without padding or cache: the angles of dynamic rope are those of each length."""
    pad = model.config.pad_token_id
    logits = torch.zeros(*padded.shape, model.config.vocab_size)
    tokens, gaps = [], []
    for row, ids in enumerate(padded):
        forget_lengths(model)
        logits[row, ids != pad] = model(ids[ids != pad][None]).logits[0]
        prompt = ids[:CONTEXT]
        sequence = prompt[prompt != pad][None]
        for _ in range(GREEDY_TOKENS):
            forget_lengths(model)
            top = model(sequence).logits[0, -1].topk(2)
            sequence = torch.cat([sequence, top.indices[None, :1]], 1)
            gaps.append(top.values[0] - top.values[1])
        tokens.append(sequence[0, -GREEDY_TOKENS:])
    return {
        "alone.logits": logits,
        "alone.greedy_tokens": torch.stack(tokens),
        "alone.greedy_gap": torch.stack(gaps).view(-1, GREEDY_TOKENS),
    }


@torch.no_grad()
def classifier_values(model, padded, unpadded):
    values, pad = {}, model.config.pad_token_id
    for name, ids in (("padded", padded), ("unpadded", unpadded)):
        mask = (ids != pad).long()
        reward_logits, score, index = get_reward(model, ids, pad, CONTEXT)
        values |= {
            f"{name}.input_ids": ids,
            f"{name}.attention_mask": mask,
            f"{name}.reward_logits": reward_logits,
            f"{name}.score": score,
            f"{name}.score_index": index,
        }
    return values


@torch.no_grad()
def encoder_values(model, tokenizer):
    inputs = dict(tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False))
    values = {f"text.{name}": tensor for name, tensor in inputs.items()} | {"text.logits": model(**inputs).logits}
    if model.config.model_type in PAIRED:
        inputs = dict(tokenizer(*zip(*PAIRS), padding=True, return_tensors="pt", return_token_type_ids=False))
        values |= {f"pair.{name}": tensor for name, tensor in inputs.items()} | {"pair.logits": model(**inputs).logits}
    return values


@torch.no_grad()
def rounding(model, rows):
    """How far the logits of each row alone are from those in float64."""
    rows = [ids[ids != model.config.pad_token_id][None] for ids in rows]
    logits = []
    for at in (model, copy.deepcopy(model).double()):
        forget_lengths(at)
        logits.append([at(row).logits for row in rows])
    return max((found - exact).abs().max().item() for found, exact in zip(*logits, strict=True))


def config_of_transformers_4(config):
    """The same model in the keys that transformers wrote before 5."""
    config = dict(config, transformers_version="4.45.2", torch_dtype=config["dtype"])
    kind, rope_layers = config["model_type"], config.get("layer_types")
    if kind == "gemma4_text":  # newer than transformers 5: only the form of its heads changed
        del config["dtype"], config["per_layer_config"]
        own = gemma4_full if config["attention_k_eq_v"] else gemma4  # as that with experts
        heads = {key: own[key] for key in ("global_head_dim", "num_global_key_value_heads") if key in own}
        return dict(sorted((config | heads).items()))
    newer = ["dtype", "add_cross_attention", "is_decoder", "use_bidirectional_attention", "_sliding_window_pattern"]
    for key in newer if kind in ("smollm3", "olmo3", "gpt_oss", "lfm2_moe") else [*newer, "layer_types"]:
        config.pop(key, None)
    if kind in ("gpt2", "opt", "gemma2", "gemma3_text", "smollm3", *ENCODERS):
        config.pop("tie_word_embeddings", None)  # only what is not the default was written
    if kind in ("bert", "roberta"):
        config["position_embedding_type"] = "absolute"
    if kind == "bert":
        del config["bos_token_id"], config["eos_token_id"]
    rope = config.pop("rope_parameters", None)
    for key in ("mrope_interleaved", "mrope_section"):
        (rope or {}).pop(key, None)
    if kind == "modernbert":
        kinds = {"global_rope_theta": "full_attention", "local_rope_theta": "sliding_attention"}
        config |= {key: rope[layers]["rope_theta"] for key, layers in kinds.items()}
        config.setdefault("global_attn_every_n_layers", 3)
        rope = None
    elif rope and "full_attention" in rope:
        if kind == "gemma3_text":
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if rope:
        config.update(rope_scaling=None, rope_theta=rope.pop("rope_theta"))
        share = rope.pop("partial_rotary_factor", None)
        # First there was only `type`; 4.43 to 4.57 wrote both for the older kinds.
        if rope["rope_type"] == "linear" and kind != "gemma3_text":
            config["rope_scaling"] = {"type": "linear", "factor": rope["factor"]}
        elif rope["rope_type"] == "dynamic":
            config["rope_scaling"] = {"type": "dynamic", **rope}
        elif rope["rope_type"] == "longrope":
            # The length is beside the object.
            del rope["original_max_position_embeddings"], rope["rope_type"]
            config.update(rope_scaling={"type": "longrope", **rope}, partial_rotary_factor=share)
        elif rope["rope_type"] != "default":
            config["rope_scaling"] = rope
    if kind == "gpt_neox":
        config.update(rotary_emb_base=int(config["rope_theta"]), rotary_pct=share, partial_rotary_factor=share)
    if kind == "gemma2":
        config.update(hidden_act=config["hidden_activation"], cache_implementation="hybrid")
    if kind == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    if kind == "lfm2":
        # The names of the first files, and of the layers with attention.
        attends = [i for i, layer in enumerate(rope_layers) if layer == "full_attention"]
        config |= {
            "full_attn_idxs": attends,
            "block_ff_dim": config.pop("intermediate_size"),
            "tie_embedding": config.pop("tie_word_embeddings"),
            "theta": config["rope_theta"],
            "block_use_swiglu": True,
            "conv_dim": config["hidden_size"],
        }
    if kind in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"):
        config |= {"layer_types": rope_layers, "partial_rotary_factor": share}
    if kind == "qwen2":
        config["sliding_window"] = 5  # written, and without use_sliding_window of no effect
    return dict(sorted(config.items()))


def roberta_tokenizer(folder):
    """GPT-2's byte-level merges with RoBERTa's special tokens, four before and the mask behind the vocabulary."""
    model = json.loads((MODELS / "gpt2" / "tokenizer.json").read_text())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)[2:]  # not GPT-2's own special tokens
    vocab = {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces, "<mask>"])}
    RobertaTokenizer(vocab=vocab, merges=[tuple(pair) for pair in model["merges"]]).save_pretrained(folder)


def deberta_tokenizer(folder):
    """The pieces of the T5 tokenizer with DeBERTa's special tokens, four before and the mask behind them."""
    model = json.loads((MODELS.parent / "tokenizers" / "t5" / "tokenizer.json").read_text())["model"]
    special = [(token, 0.0) for token in ("[PAD]", "[CLS]", "[SEP]", "[UNK]")]
    pieces = [tuple(piece) for piece in model["vocab"][3:]]  # not T5's own special tokens
    DebertaV2Tokenizer(vocab=[*special, *pieces, ("[MASK]", 0.0)], unk_id=3).save_pretrained(folder)


def modernbert_tokenizer(folder):
    """GPT-2's byte-level merges with ModernBERT's special tokens behind them."""
    tokenizer = Tokenizer.from_file(str(MODELS / "gpt2" / "tokenizer.json"))
    names = dict(unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", mask_token="[MASK]")
    tokenizer.add_special_tokens(list(names.values()))
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    assert [i for _, i in ids] == [modernbert["cls_token_id"], modernbert["sep_token_id"]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ids
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def make(name):
    config, seed, tokenizer, tokenizer_source, tokens, weights, limit = SPECS[name]
    classifier, is_encoder = "_cls" in name, config.model_type in ENCODERS
    folder = MODELS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    own = {"roberta": roberta_tokenizer, "deberta": deberta_tokenizer, "modernbert": modernbert_tokenizer}
    if tokenizer in own:
        own[tokenizer](folder)
    elif tokenizer:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).symlink_to(f"../{tokenizer_source}/{file}")
    entry = {"dir": f"models/{name}"}
    while True:
        model = random_model(config, seed, classifier, weights)
        packed = random_mxfp4(model, seed) if name.endswith("_mxfp4") else {}
        entry |= {"cls": type(model).__name__, "weight_seed": seed, "tokenizer": tokenizer}
        entry |= {"pad_token_id": config.pad_token_id, "eos_token_id": config.eos_token_id}
        if is_encoder:
            values = encoder_values(model, AutoTokenizer.from_pretrained(folder))
            entry |= {"texts": TEXTS, "base_model_prefix": model.base_model_prefix}
            if config.model_type in PAIRED:
                entry["pairs"] = PAIRS
            if rounding(model, values["text.input_ids"]) < limit:
                break
            seed += 100
            continue
        padded, unpadded, plain = random_inputs(seed, tokens, config)
        entry["context_length"] = CONTEXT
        if classifier:
            values = classifier_values(model, padded, unpadded)
            entry["base_model_prefix"] = model.base_model_prefix
            if rounding(model, plain) < limit:
                break
            seed += 100
            continue
        values, greedy_eos_id = lm_values(model, padded, unpadded)
        gap = min(values[key].min().item() for key in values if key.endswith("gap"))
        ends = (values["greedy.tokens"] == config.eos_token_id).any()
        # No rounding can change a greedy token, and every row is full.
        if gap > 0.01 and not ends and rounding(model, [*padded, *unpadded]) < limit:
            entry |= {"greedy_eos_id": greedy_eos_id, "min_greedy_gap": gap}
            break
        seed += 100
    model.save_pretrained(folder)
    if weights:
        share_weights(folder, weights)
    if packed:
        store_mxfp4(folder, packed)
    old = config_of_transformers_4(json.loads((folder / "config.json").read_text()))
    (folder / "config_v4.json").write_text(json.dumps(old, indent=1) + "\n")
    save_file({k: v.clone().contiguous() for k, v in sorted(values.items())}, folder / "golden.safetensors")
    index = read_index()
    index["models"][name] = entry
    write_index(index)
    print(f"{name}: seed {seed}, {sum(f.stat().st_size for f in folder.iterdir())} bytes")


def read_index():
    return json.loads((MODELS / "index.json").read_text())


def write_index(index):
    """One line per model."""
    models = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in index["models"].items())
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in index.items() if key != "models")
    (MODELS / "index.json").write_text("{\n" + head + ' "models": {\n' + models + "\n }\n}\n")


def load(name, config_file="config.json"):
    config = transformers.AutoConfig.from_pretrained(MODELS / name / config_file)
    auto = AutoModelForSequenceClassification if is_classifier(config) else AutoModelForCausalLM
    return auto.from_pretrained(MODELS / name, config=config, dtype=torch.float32, **implementations(config)).eval()


def loss(model, values):
    """Minus the summed log-probs of the tokens of `unpadded`; of a classifier, its logits times 1, -2 and 3, summed."""
    if is_classifier(model.config):
        logits = model(values["text.input_ids"], attention_mask=values["text.attention_mask"]).logits
        return (logits * torch.tensor([1.0, -2.0, 3.0])[: logits.shape[1]]).sum()
    ids = values["unpadded.input_ids"]
    return -model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).sum()


def without_buffers(tensors):
    """The parameters: Gemma 4 and LFM2 with experts store numbers beside them that are not trained."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(("layer_scalar", "expert_bias"))}


def gradients(model, values):
    """By the names of the checkpoint, which `save_pretrained` knows."""
    value = loss(model, values)
    value.backward()
    for weight in model.parameters():
        weight.data = weight.grad
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return value.item(), without_buffers(load_file(Path(folder) / "model.safetensors"))


def make_gradients(name):
    folder = MODELS / name
    values = load_file(folder / "golden.safetensors")
    value, found = gradients(load(name), values)
    _, exact = gradients(load(name).double(), values)
    thinned = {key: grad.contiguous() for key, grad in thin.rows(found).items()}
    save_file(thinned, folder / "grads.safetensors")
    index = read_index()
    entry = index["models"][name]
    entry["grads"] = {
        "loss": value,
        "max_abs": max(grad.abs().max().item() for grad in found.values()),
        "rounding": max((found[key] - exact[key]).abs().max().item() for key in found),
    }
    write_index(index)
    print(f"{name}: gradients {entry['grads']}")


def check(name, entry):
    """Recomputes golden.safetensors, under both configs, and gives back the largest difference on real positions."""
    stored = load_file(MODELS / name / "golden.safetensors")
    worst = 0.0
    for config_file in ("config.json", "config_v4.json"):
        model = load(name, config_file)
        padded, unpadded = stored.get("padded.input_ids"), stored.get("unpadded.input_ids")
        if model.config.model_type in ENCODERS:
            values = encoder_values(model, AutoTokenizer.from_pretrained(MODELS / name))
        elif is_classifier(model.config):
            values = classifier_values(model, padded, unpadded)
        else:
            values, _ = lm_values(model, padded, unpadded, entry["greedy_eos_id"])
        assert values.keys() == stored.keys(), f"{name}: tensors {sorted(values.keys() ^ stored.keys())}"
        for key, expected in stored.items():
            got = values[key]
            assert got.shape == expected.shape and got.dtype == expected.dtype, f"{name}: {key}"
            if not got.is_floating_point():
                assert torch.equal(got, expected), f"{name}: {key}"
                continue
            if key.startswith("padded.") and got.dim() == 3:  # what a padding query on the left sees is not defined
                real = stored["padded.attention_mask"].cumsum(1)[..., None] > 0
                got, expected = got * real, expected * real
            elif key == "padded.next_logprobs":
                real = stored["padded.attention_mask"].cumsum(1)[:, :-1] > 0
                got, expected = got * real, expected * real
            worst = max(worst, (got - expected).abs().max().item())
    if "grads" in entry:
        stored = load_file(MODELS / name / "grads.safetensors")
        _, values = gradients(load(name), load_file(MODELS / name / "golden.safetensors"))
        weights = without_buffers(load_file(MODELS / name / "model.safetensors"))
        assert values.keys() == weights.keys(), f"{name}: gradients"
        values = thin.stored(values, stored)
        assert values.keys() == stored.keys(), f"{name}: gradients {sorted(values.keys() ^ stored.keys())}"
        gap = max((values[key] - stored[key]).abs().max().item() for key in stored)
        print(f"{name}: gradients differ by {gap:.1e}")
        worst = max(worst, gap / max(1.0, entry["grads"]["max_abs"]))
    print(f"{name}: largest difference {worst:.1e}")
    return worst


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if sys.argv[1:] == ["--check"]:
        index = read_index()["models"]
        worst = [check(n, e) for n, e in index.items() if (MODELS / n / "golden.safetensors").exists()]
        sys.exit(max(worst) > 2e-5)
    for name in sys.argv[1:] or dict.fromkeys([*SPECS, *GRADIENTS]):
        if name in SPECS:
            make(name)
        if name in GRADIENTS:
            make_gradients(name)


if __name__ == "__main__":
    main()
