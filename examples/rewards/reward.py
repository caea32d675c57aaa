#!/usr/bin/env python3
"""A reward in Python: answers that end a sentence, are neither short nor long, and do not repeat themselves.

    rlhf ppo --reward_command "python3 examples/rewards/reward.py" ...

`rlhf` starts this once, writes a JSON object per answer to standard input, a line each, and reads one line per answer from
standard output: {"score": x}, {"scores": [x, ...]} with a number per token, or a number. Everything else that is printed
belongs on standard error, which is shown when this program fails. Try it without a run:

    echo '{"prompt": "Say hi.", "response": " Hi there!", "left": 0}' | python3 examples/rewards/reward.py
"""

import json
import sys


def score(answer):
    words = answer["response"].split()
    if not words:
        return -1.0
    ends = 1.0 if answer["response"].rstrip().endswith((".", "!", "?")) else 0.0
    length = -abs(len(words) - 20) / 20
    fresh = len(set(words)) / len(words)
    return ends + length + fresh


def main():
    batch = []
    for line in sys.stdin:
        batch.append(json.loads(line))
        # `left` counts the lines of this batch that follow: a model would score all of them at once here.
        if batch[-1].get("left", 0) == 0:
            for answer in batch:
                print(json.dumps({"score": score(answer)}))
            sys.stdout.flush()  # or the run waits for what stands in a buffer
            batch = []


if __name__ == "__main__":
    main()
