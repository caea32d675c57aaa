"""Evaluates responses: how positive they are, whether the grammar parses them, how varied they are.

    python3 judge.py ANSWERS.jsonl ...      one line per file; rows as `rlhf generate` writes them

The mood counts only words of half B of the lexicon. None of them is in the preference pairs of the reward model, so a
policy that has only learned to use words of half A gains nothing here. The other two numbers fall when a policy gains mood
at the price of broken or repeated text.

Python 3.9 or newer, standard library only.
"""

import json
import re
import sys

import grammar

POSITIVE = grammar.words_of_feeling("+", "B")
NEGATIVE = grammar.words_of_feeling("-", "B")
TOKEN = re.compile(r"[a-z']+|[^\sa-z']")


def read_answers(path):
    """The rows of a JSON Lines file that `rlhf generate` wrote: "prompt", "completion", "finish_reason"."""
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def tokens(text):
    """Lower-case words and single punctuation marks."""
    return TOKEN.findall(text.lower())


def balance(positive, negative):
    """(positive - negative) / (positive + negative): 1 all positive, -1 all negative, 0 even or nothing to count."""
    return (positive - negative) / max(positive + negative, 1)


def bigrams(text):
    found = tokens(text)
    return list(zip(found, found[1:]))


def judge(rows):
    """The metrics of one set of responses, as a dict.

    - `mood`: balance of all positive and negative B words in the responses, from -1 to 1
    - `positive_words`, `negative_words`: the counts behind it
    - `positive_answers`: share of responses with more positive than negative B words, of those where they differ
    - `grammar`: share of responses that stopped by themselves and form, with their prompt, a complete review
    - `distinct_bigrams`: different word pairs of all responses / all their word pairs
    - `distinct_bigrams_per_answer`: the same share within each response, averaged
    - `words`: mean number of words and punctuation marks in a response
    """
    counts = []
    for row in rows:
        words = tokens(row["completion"])
        counts.append((sum(word in POSITIVE for word in words), sum(word in NEGATIVE for word in words)))
    decided = [positive > negative for positive, negative in counts if positive != negative]
    pairs = [bigrams(row["completion"]) for row in rows]
    everything = [pair for found in pairs for pair in found]
    whole = [row["finish_reason"] == "stop" and grammar.parses(row["prompt"] + row["completion"]) for row in rows]
    return {
        "answers": len(rows),
        "mood": balance(sum(positive for positive, _ in counts), sum(negative for _, negative in counts)),
        "positive_words": sum(positive for positive, _ in counts),
        "negative_words": sum(negative for _, negative in counts),
        "positive_answers": sum(decided) / max(len(decided), 1),
        "grammar": sum(whole) / max(len(rows), 1),
        "distinct_bigrams": len(set(everything)) / max(len(everything), 1),
        "distinct_bigrams_per_answer": sum(len(set(found)) / max(len(found), 1) for found in pairs) / max(len(rows), 1),
        "words": sum(len(tokens(row["completion"])) for row in rows) / max(len(rows), 1),
    }


def main(paths):
    if not paths or paths[0].startswith("-"):
        print(__doc__)
        return 2 if not paths else 0
    for path in paths:
        found = judge(read_answers(path))
        print(
            "{path}: mood {mood:+.3f} (+{positive_words} -{negative_words}), positive responses {positive_answers:.1%}, "
            "grammar {grammar:.1%}, distinct bigrams {distinct_bigrams:.1%} "
            "(per response {distinct_bigrams_per_answer:.1%}), words {words:.1f}".format(path=path, **found)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
