"""Rewards of the program that are called in this process: a call of the program scores the texts."""

import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

from rlhf import _program


def scored_by(written: str) -> Callable[..., list[float | None]]:
    """A function of completions and solutions that scores them with a rule of the program, which reads texts alone."""

    def function(completions: list[Any], solution: list[Any], **columns: Any) -> list[float | None]:
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        rows = [{"prompt": " ", "completion": text, "solution": right} for text, right in zip(texts, solution, strict=True)]
        if not rows:
            return []
        with tempfile.TemporaryDirectory(prefix="rlhf-") as folder:
            place = os.path.join(folder, "rows.jsonl")
            with open(place, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            write_tokenizer(folder)
            output = _program.call(["score", "--reward", written, "--tokenizer_name", folder, "--dataset_name", place], written)
        return [json.loads(line)["score"] for line in output.splitlines() if line.strip()]

    return function


def write_tokenizer(folder: str) -> None:
    """Writes a tokenizer whose tokens are bytes, which reads and writes any text: the program has rewards read tokens."""
    # The letters by which tokenizers of bytes write them: those that can be printed are their own.
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = [chr(byte) for byte in printed] + [chr(256 + at) for at in range(len(others))]
    vocabulary = {letter: at for at, letter in enumerate([*letters, "<end>"])}
    levels = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    end = {"id": 256, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    tokenizer = {"version": "1.0", "added_tokens": [end], "pre_tokenizer": levels, "decoder": levels, "model": model}
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", {"eos_token": "<end>"})):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(content, file)
