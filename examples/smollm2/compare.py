"""Compares get_model.py's folder with what transformers reads from the same GGUF file: tokens, weights and logits.

    scripts/venv.sh .venv-compare examples/smollm2/requirements-compare.txt "installing torch and transformers"
    .venv-compare/bin/python examples/smollm2/compare.py FILE.gguf

Converts the file to float32 and to bfloat16 in a temporary folder and prints one line per comparison. Exit code 1 if the weights
in float32 differ anywhere, or if a text is tokenized differently without a digit in it.
"""

import os
import pathlib
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import of transformers
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import get_model  # noqa: E402

TEXTS = [
    "The capital of France is Paris.",
    "Grüße aus München, 日本語 and  two spaces",
    "In 2024, 1,234 people paid $56.78 each.",
    "def f(x):\n    return x ** 2  # a comment\n\n\n",
    "It's what they've said: we'll see, I'd say!",
    "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n",
    "A list:  12 eggs",  # two spaces are one token if digits are split first, which the loader does not
    '{"name": "Ada", "year": 1815}\t🙂',
]


def load(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options})
    return model.eval(), AutoTokenizer.from_pretrained(folder, **{"gguf_file": options.get("gguf_file")})


def logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits.float()


def main(gguf_file):
    path = pathlib.Path(gguf_file).resolve()
    ours = {}
    with tempfile.TemporaryDirectory() as temporary:
        for dtype in ("float32", "bfloat16"):
            folder = pathlib.Path(temporary, dtype)
            folder.mkdir()
            get_model.convert(path, folder, dtype)
            ours[dtype] = load(folder)
    theirs, their_tokenizer = load(path.parent, gguf_file=path.name)
    model, tokenizer = ours["float32"]

    good = True
    for text in TEXTS:
        a, b = (t(text, add_special_tokens=False)["input_ids"] for t in (tokenizer, their_tokenizer))
        same, whole = a == b, tokenizer.decode(a, clean_up_tokenization_spaces=False) == text
        good &= whole and (same or any(c.isdigit() for c in text))
        print(f"tokens  {'same' if same else 'differ'}, {len(a):2} and {len(b):2}, decoded {'exactly' if whole else 'NOT'}: {text!r}")

    mine, other = model.state_dict(), theirs.state_dict()
    equal = sum(torch.equal(mine[name], other[name]) for name in other)
    good &= equal == len(other) == len(mine)
    print(f"weights {equal} of {len(other)} tensors are equal bit for bit in float32")
    rounded = ours["bfloat16"][0].state_dict()
    worst = max(((rounded[name] - other[name]).abs() / other[name].abs().clamp_min(1e-30)).max().item() for name in other)
    print(f"weights largest relative difference in bfloat16: {worst:.5f}")

    for dtype in ours:
        apart, kl, top = [], [], []
        for text in TEXTS:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            a, b = logits(ours[dtype][0], ids), logits(theirs, ids)
            apart.append((a - b).abs().max().item())
            p, q = a.log_softmax(-1), b.log_softmax(-1)
            kl.append((q.exp() * (q - p)).sum(-1).mean().item())
            top.append((a.argmax(-1) == b.argmax(-1)).float().mean().item())
        means = sum(kl) / len(kl), 100 * sum(top) / len(top)
        print(f"logits  {dtype} weights: largest difference {max(apart):.4f}, mean KL {means[0]:.6f}, same most likely token {means[1]:.1f} %")
    return 0 if good else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
