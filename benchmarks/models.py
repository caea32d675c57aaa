"""Models of random weights and prompts for the benchmark; their sizes and FLOPs.

    models.py FOLDER SIZE [--mean_length N] [--device DEVICE]      makes FOLDER/policy and FOLDER/reward

Torch is imported only where models are made: the parent of a measured process must be small (see runs.py).
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

EOS, PAD = 0, 1
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Size:
    """A GPT-NeoX: feed-forward layers of 4 times `hidden`."""

    hidden: int
    layers: int
    heads: int
    vocab: int
    positions: int = 512

    def products(self, tokens, head_rows=0):
        """The matrix products of a forward pass over `tokens`: (rows, in, out, how many)."""
        h, n = self.hidden, self.layers
        body = [(tokens, h, 3 * h, n), (tokens, h, h, n), (tokens, h, 4 * h, n), (tokens, 4 * h, h, n)]
        return body + [(head_rows, h, self.vocab, 1)] * (head_rows > 0)

    def optimise_flops(self, prompts, response, epochs):
        """FLOPs of `epochs` passes over responses of `response` tokens to prompts of these lengths, without padding.

        A sequence is T = prompt + response - 1 tokens: the last one is not computed. Forward, for policy and value
        model each: 2 FLOPs per weight and token, and in each layer 2 T (T + 1) hidden for the scores and the sums of
        causal attention; behind the last layer's attention only the response's rows count. So for the policy's head;
        the value model's, of one row, is not counted. The backward pass is twice the forward one. A forward pass done
        again in it counts nothing.
        """
        lengths = [prompt + response - 1 for prompt in prompts]
        body = sum(2 * rows * a * b * n for rows, a, b, n in self.products(sum(lengths)))
        # Attention's output (h x h) and both products of the MLP (h x 4 h).
        body -= 2 * sum(t - response for t in lengths) * 9 * self.hidden**2
        attention = sum(2 * t * (t + 1) * self.hidden * self.layers for t in lengths)
        head = 2 * len(prompts) * response * self.hidden * self.vocab
        return 3 * epochs * (2 * (body + attention) + head)


SIZES = {
    "tiny": Size(64, 2, 2, 512),
    "s": Size(256, 4, 4, 8192),
    "m": Size(512, 6, 8, 50304),
    "1b": Size(2048, 16, 8, 50304, positions=2048),
}


def prompt_lengths(count, shortest=42, longest=128):
    """Evenly spread, so that the mean does not depend on `count`."""
    return [shortest + round(i * (longest - shortest) / max(count - 1, 1)) for i in range(count)]


def write_prompts(path, lengths, vocab):
    """Rows of random token ids, in random order; always the same ones."""
    draw = random.Random(0)
    lengths = draw.sample(lengths, len(lengths))
    with open(path, "w") as f:
        for length in lengths:
            print(json.dumps({"input_ids": [draw.randrange(2, vocab) for _ in range(length)]}), file=f)


def make(folder, size, mean_length=None, device="cpu"):
    """Saves a policy, a reward model and their tokenizer.

    Answers of the policy never stop, or after `mean_length` tokens in the mean, were there no limit.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        GPTNeoXConfig,
        GPTNeoXForCausalLM,
        GPTNeoXForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    words = {"<|endoftext|>": EOS, "<pad>": PAD, **{f"w{i}": i for i in range(2, size.vocab)}}
    words = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|endoftext|>", pad_token="<pad>", padding_side="left"
    )
    config = GPTNeoXConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.hidden,
        vocab_size=size.vocab,
        max_position_embeddings=size.positions,
        rotary_pct=0.25,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    torch.manual_seed(0)
    with torch.device(device):
        policy = GPTNeoXForCausalLM(config)
        set_stop(policy, mean_length)
        policy.save_pretrained(folder / "policy")
        del policy
        config.num_labels = 1
        GPTNeoXForSequenceClassification(config).save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "reward")


def set_stop(policy, mean_length):
    """Gives the end of text the probability 1 / `mean_length` at the benchmark's temperature, and the pad none.

    The first coordinate of the final norm is made the constant 1. The head's rows of both tokens read nothing else, and
    all other rows leave it alone: so their logits are constants.
    """
    import torch

    never = -100.0
    with torch.no_grad():
        norm, head = policy.gpt_neox.final_layer_norm, policy.get_output_embeddings().weight
        norm.weight[0], norm.bias[0] = 0, 1
        head[:, 0] = 0
        for token in (EOS, PAD):
            head[token] = 0
            head[token, 0] = never
        if mean_length:
            ids = torch.randint(2, policy.config.vocab_size, (4, 64))
            others = (policy(ids).logits / TEMPERATURE).logsumexp(-1).mean()
            head[EOS, 0] = TEMPERATURE * (others - torch.tensor(mean_length - 1.0).log())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--mean_length", type=int)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    make(args.folder, SIZES[args.size], args.mean_length, args.device)


if __name__ == "__main__":
    main()
