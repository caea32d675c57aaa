"""Models of real shapes with random weights in bf16, prompts and rows for SFT.

    gpu_models.py FOLDER qwen05|llama1b|tiny DEVICE     makes FOLDER/policy, FOLDER/prompts.jsonl and FOLDER/sft.jsonl
"""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

EOS, PAD = 0, 1
COMMON = {"tie_word_embeddings": True, "max_position_embeddings": 4096, "bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": PAD}
KINDS = {
    # Qwen2-0.5B, Llama-3.2-1B.
    "qwen05": (Qwen2ForCausalLM, Qwen2Config, dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                                                   num_attention_heads=14, num_key_value_heads=2)),
    "llama1b": (LlamaForCausalLM, LlamaConfig, dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                                                    num_attention_heads=32, num_key_value_heads=8, head_dim=64)),
    "tiny": (Qwen2ForCausalLM, Qwen2Config, dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                                 num_attention_heads=2, num_key_value_heads=1)),
}


def main():
    folder, kind, device = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    model, config, sizes = KINDS[kind]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model(config(**sizes, **COMMON)).save_pretrained(folder / "policy")
    vocab = sizes["vocab_size"]
    words = {"<|endoftext|>": EOS, "<pad>": PAD} | {f"w{i}": i for i in range(2, vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<pad>", padding_side="left")
    named.save_pretrained(folder / "policy")
    draw = random.Random(0)
    prompts, prompt_len, rows, row_len = (64, 24, 16, 64) if kind == "tiny" else (256, 256, 64, 2048)
    with open(folder / "prompts.jsonl", "w") as file:
        for _ in range(prompts):
            print(json.dumps({"prompt": " ".join(f"w{draw.randrange(2, vocab)}" for _ in range(prompt_len))}), file=file)
    with open(folder / "sft.jsonl", "w") as file:
        for _ in range(rows):
            print(json.dumps({"input_ids": [draw.randrange(2, vocab) for _ in range(row_len)]}), file=file)


if __name__ == "__main__":
    main()
