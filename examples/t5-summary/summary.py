"""Summarizes a run of this example: did PPO raise ROUGE-L, also of summaries of held-out documents?

    python3 summary.py FOLDER

Reads FOLDER/ppo/metrics.jsonl, before.jsonl and after.jsonl, as run.sh writes them. Exit code 1 if a score did not rise.

Python 3.9 or newer, standard library only.
"""

import json
import sys
from pathlib import Path


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def rouge_l(text, reference):
    """F1 of the longest common subsequence of words."""
    a, b = text.lower().split(), reference.lower().split()
    lengths = [0] * (len(b) + 1)
    for word in a:
        diagonal = 0
        for j, other in enumerate(b):
            above = lengths[j + 1]
            lengths[j + 1] = diagonal + 1 if word == other else max(above, lengths[j])
            diagonal = above
    return 2 * lengths[-1] / (len(a) + len(b)) if a or b else 0.0


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def summarise(folder, references):
    """Scores before and after, by what they are of."""
    scores = [row["objective/scores"] for row in read(folder / "ppo" / "metrics.jsonl")]
    tenth = max(1, round(len(scores) / 10))
    held_out = []
    for name in ["before", "after"]:
        rows = read(folder / f"{name}.jsonl")
        assert len(rows) == len(references), f"{folder / name}.jsonl: expected {len(references)} rows, found {len(rows)}"
        held_out.append(mean(rouge_l(row["completion"], reference) for row, reference in zip(rows, references)))
    return {
        "sampled summaries, first and last tenth of the updates": (mean(scores[:tenth]), mean(scores[-tenth:])),
        "summaries of 128 held-out documents": tuple(held_out),
    }


def main():
    folder = Path(sys.argv[1])
    references = [row["completion"] for row in read(Path(__file__).resolve().parent / "data" / "prompts_test.jsonl")]
    found = summarise(folder, references)
    for name, (before, after) in found.items():
        print(f"ROUGE-L of {name}: {before:.3f} -> {after:.3f}")
    sys.exit(0 if all(after > before for before, after in found.values()) else 1)


if __name__ == "__main__":
    main()
