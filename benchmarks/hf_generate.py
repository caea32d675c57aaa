"""Responses of transformers' `generate`: a JSON line per batch size, with the tokens and seconds of each batch."""

import argparse
import json
import time

import torch
from transformers import AutoModelForCausalLM


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--max_new_tokens", type=int, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batches", type=json.loads, required=True, help="batch size: batches, the first not counted")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    pad = model.config.pad_token_id
    with open(args.prompts) as lines:
        prompts = [json.loads(line)["input_ids"] for line in lines]

    def respond(rows):
        width = max(map(len, rows))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
        output = model.generate(
            input_ids=ids,
            attention_mask=(ids != pad).long(),
            max_new_tokens=args.max_new_tokens,
            do_sample=True,
            temperature=args.temperature,
            top_k=0,
            top_p=1.0,
        )
        return output[:, width:].numel()

    for size, count in args.batches.items():
        size, batches = int(size), []
        for i in range(count):
            began = time.perf_counter()
            tokens = respond(prompts[i * size : (i + 1) * size])
            batches.append((tokens, time.perf_counter() - began))
        print(json.dumps({"batch": size, "batches": batches[1:]}), flush=True)


if __name__ == "__main__":
    main()
