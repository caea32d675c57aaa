#!/usr/bin/env python3
"""A reward in Python: responses that end a sentence, are neither short nor long, and do not repeat themselves.

    rlhf ppo --reward_command "python3 examples/rewards/reward.py" ...

`rlhf` starts this program once, writes one line of JSON per response to its standard input, and reads one line per response
from its standard output: {"score": x, "id": n}, or {"scores": [x, ...], "id": n} with a number per token, with the `id` of the response. All
other output belongs on standard error, which is shown if the program fails. To try it without a run:

    echo '{"id": 1, "prompt": "Say hi.", "response": " Hi there!", "left": 0}' | python3 examples/rewards/reward.py
"""

import json
import sys


def score(row):
    words = row["response"].split()
    if not words:
        return -1.0
    ends = 1.0 if row["response"].rstrip().endswith((".", "!", "?")) else 0.0
    length = -abs(len(words) - 20) / 20
    fresh = len(set(words)) / len(words)
    return ends + length + fresh


def main():
    batch = []
    for line in sys.stdin:
        batch.append(json.loads(line))
        # `left` is the number of lines of this batch that follow: a model would score the whole batch at once here.
        if batch[-1].get("left", 0) == 0:
            for row in batch:
                print(json.dumps({"score": score(row), "id": row.get("id")}))
            sys.stdout.flush()  # otherwise the run waits for buffered output
            batch = []


if __name__ == "__main__":
    main()
