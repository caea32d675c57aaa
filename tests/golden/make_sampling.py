"""Makes `sampling.json`: what transformers' logits processors, and its greedy search with them, give.

    python make_sampling.py            # make it again
    python make_sampling.py --check    # compare with what is there

Made with torch 2.11.0 and transformers 5.23.0 on a CPU, one thread, float32. `filtered` has logits before and after each
chain of processors, in the order in which `generate` puts them (null stands for -inf); `greedy` the tokens of a model of
`models/` under a repetition penalty, a minimum length and stop strings.
"""

import json
import math
import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

HERE = Path(__file__).resolve().parent
FILE = HERE / "sampling.json"
VOCAB, NEW_TOKENS = 12, 12

# Prompt, and a text that begins within one token of the answer and ends within another.
STOP_STRINGS = {"gpt_neox": ([20], "e8i"), "llama_tied": ([10], "itut(")}

# One row each: settings of the processors; absent ones are off.
CHAINS = [
    dict(temperature=0.7),
    dict(top_k=3),
    dict(top_p=0.8),
    dict(min_p=0.2),
    dict(repetition_penalty=1.5),
    dict(repetition_penalty=0.8),
    dict(min_new_tokens=4, eos=[0, 7]),
    dict(temperature=1.6, top_k=6, top_p=0.9, min_p=0.25),
    dict(repetition_penalty=1.3, min_new_tokens=4, eos=[3], temperature=0.5, top_k=8, top_p=0.95, min_p=0.05),
]


def processors(chain, prompt_length):
    """The chain in transformers' order."""
    made = LogitsProcessorList()
    if "repetition_penalty" in chain:
        made.append(RepetitionPenaltyLogitsProcessor(chain["repetition_penalty"]))
    if "min_new_tokens" in chain:
        made.append(MinNewTokensLengthLogitsProcessor(prompt_length, chain["min_new_tokens"], chain["eos"]))
    for name, kind in [
        ("temperature", TemperatureLogitsWarper),
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ]:
        if name in chain:
            made.append(kind(chain[name]))
    return made


def filtered():
    torch.manual_seed(5)
    rows = []
    for chain in CHAINS:
        # The last three tokens are new, so a minimum of four is not reached.
        tokens = torch.randint(0, VOCAB, (1, 5))
        logits = torch.randn(1, VOCAB) * 2.5
        after = processors(chain, 2)(tokens, logits.clone())[0].tolist()
        rows.append(
            {
                "settings": chain,
                "tokens": tokens[0].tolist(),
                "logits": logits[0].tolist(),
                "filtered": [None if math.isinf(x) else x for x in after],
            }
        )
    return rows


def greedy():
    """Settings chosen so that each changes what plain greedy search gives."""
    found = []
    for name in ("gpt_neox", "llama_tied"):
        folder = HERE / "models" / name
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompt = tokenizer("The movie was a film", return_tensors="pt").input_ids

        def run(eos, **settings):
            whole = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                eos_token_id=eos,
                pad_token_id=tokenizer.pad_token_id,
                **settings,
            )
            return whole[0, prompt.shape[1] :].tolist()

        none = model.config.vocab_size - 1
        ids, plain = prompt[0].tolist(), run(none)
        # A token of the plain answer ends it early, and must wait where a minimum is set.
        eos = plain[2]
        settings = [
            dict(repetition_penalty=1.3),
            dict(repetition_penalty=0.9),
            dict(eos=eos),
            dict(eos=eos, min_new_tokens=6),
            dict(eos=eos, min_new_tokens=5, repetition_penalty=1.2),
        ]
        runs = []
        for row in settings:
            given = {key: value for key, value in row.items() if key != "eos"}
            runs.append({"settings": row, "tokens": run(row.get("eos", none), **given)})
        prompt, text = STOP_STRINGS[name]
        prompt = torch.tensor([prompt])
        stop = run(none, stop_strings=[text], tokenizer=tokenizer)
        stop = {"prompt_ids": prompt[0].tolist(), "stop_string": text, "plain": run(none), "tokens": stop}
        found.append({"model": name, "prompt_ids": ids, "plain": plain, "runs": runs, "stop": stop})
    return found


def main():
    torch.set_num_threads(1)
    made = {"filtered": filtered(), "greedy": greedy()}
    if "--check" in sys.argv[1:]:
        stored = json.loads(FILE.read_text())
        if stored != made:
            sys.exit(f"{FILE}: what is stored is not what is computed")
        print("sampling.json: equal")
        return
    lines = [f'  "{key}": [\n' + ",\n".join("    " + json.dumps(row) for row in rows) + "\n  ]" for key, rows in made.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
