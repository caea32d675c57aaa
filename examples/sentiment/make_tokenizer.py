"""Trains the byte-level BPE tokenizer on data/sft.jsonl; writes tokenizer/ and model.json, whose sizes depend on it.

Not needed to run the demo: the files are shipped. To make them again: pip install tokenizers, then run this.
"""

import json
import pathlib

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

FOLDER = pathlib.Path(__file__).resolve().parent
EOS, PAD = "<|endoftext|>", "<|padding|>"
VOCABULARY = 1536  # as many as it takes for nearly every word to be one token

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
with open(FOLDER / "data" / "sft.jsonl", encoding="utf-8") as lines:
    texts = [json.loads(line)["text"] for line in lines]
tokenizer.train_from_iterator(
    texts,
    trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ),
)


def write(name, content):
    (FOLDER / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


(FOLDER / "tokenizer").mkdir(exist_ok=True)
tokenizer.save(str(FOLDER / "tokenizer" / "tokenizer.json"))
special = {"bos_token": EOS, "eos_token": EOS, "pad_token": PAD}
write("tokenizer/special_tokens_map.json", special)
write(
    "tokenizer/tokenizer_config.json",
    {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
        **special,
    },
)

size = tokenizer.get_vocab_size()
write(
    "model.json",
    {
        "architectures": ["GPTNeoXForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.token_to_id(EOS),
        "classifier_dropout": 0.0,
        "eos_token_id": tokenizer.token_to_id(EOS),
        "hidden_act": "gelu",
        "hidden_dropout": 0.0,
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 1024,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 256,
        "model_type": "gpt_neox",
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "pad_token_id": tokenizer.token_to_id(PAD),
        "rope_scaling": None,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_parallel_residual": True,
        "vocab_size": (size + 63) // 64 * 64,
    },
)

lengths = [len(ids.ids) for ids in tokenizer.encode_batch(texts)]
print(
    f"vocabulary {size}; tokens: mean of a review {sum(lengths) / len(lengths):.1f}, most {max(lengths)}, "
    f"of all {sum(lengths)}"
)
