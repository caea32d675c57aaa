"""Judges responses before and after training. No run calls this program: the rewards of training are others.

    python3 judge.py extract RESPONSES.jsonl DATASET.jsonl    which responses are the right JSON object: parsed, with the row's facts, nothing else
    python3 judge.py reviews RESPONSES.jsonl    VADER's compound score, distinct bigrams; needs vaderSentiment
    python3 judge.py chat LOGPROBS.jsonl        mean token log-probability of replies, as `rlhf logprobs` wrote them

RESPONSES.jsonl has the lines of `rlhf generate`. Prints one JSON object.
"""

import json
import re
import statistics
import sys


def same(found, expected):
    """Equality of two values of the same type: 21 is not "21", and not 21.5 or true."""
    return type(found) is type(expected) and found == expected


def is_right(response, facts):
    """A response is one JSON object with the keys of `facts` and its values, and nothing but white space around it."""

    def once(pairs):
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    try:
        found = json.loads(response, object_pairs_hook=once)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() == facts.keys() and all(same(found[key], facts[key]) for key in facts)


def extract(rows, facts):
    """`facts`: the objects of the dataset's rows, in their order; each has as many responses as the others."""
    each = len(rows) // len(facts)
    right = [row["finish_reason"] == "stop" and is_right(row["completion"], facts[at // each]) for at, row in enumerate(rows)]
    return {"responses": len(rows), "right": sum(right) / len(rows), "tokens": tokens(rows), "verdicts": right}


def tokens(rows):
    return statistics.fmean(len(row["completion_ids"]) for row in rows)


def bigrams(text):
    words = re.findall(r"[\w']+", text.lower())
    return list(zip(words, words[1:]))


def distinct_bigrams(rows):
    pairs = [pair for row in rows for pair in bigrams(row["completion"])]
    return len(set(pairs)) / max(len(pairs), 1)


def reviews(rows):
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()
    scores = [analyzer.polarity_scores(row["completion"])["compound"] for row in rows]
    return {
        "responses": len(rows),
        "compound": statistics.fmean(scores),
        "distinct_bigrams": distinct_bigrams(rows),
        "ended": sum(row["finish_reason"] == "stop" for row in rows) / len(rows),
        "tokens": tokens(rows),
        "verdicts": scores,
    }


def chat(rows):
    """Log-probability per token under the model that `rlhf logprobs` evaluated, over all tokens of all replies."""
    count = sum(len(row["logprobs"]) for row in rows)
    return {"responses": len(rows), "tokens": count / len(rows), "logprob": sum(sum(row["logprobs"]) for row in rows) / count}


def read(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def main(kind, path, *dataset):
    rows = read(path)
    if kind == "extract":
        return extract(rows, [row["facts"] for row in read(dataset[0])])
    return {"reviews": reviews, "chat": chat}[kind](rows)


if __name__ == "__main__":
    if len(sys.argv) != (4 if sys.argv[1:2] == ["extract"] else 3):
        sys.exit(__doc__)
    print(json.dumps(main(*sys.argv[1:])))
