"""ROUGE-L of pairs of texts by the package rouge_score, for `rouge_l.json`.

    python make_rouge.py            # make rouge_l.json again
    python make_rouge.py --check    # compare it with what the package computes now

Made with rouge_score 0.1.2, without its stemmer. Its own words are runs of a-z and 0-9, so every other letter ends a word; texts with
such letters are also scored with words of letters and digits of any script.
"""

import json
import random
import sys
from pathlib import Path

from rouge_score.rouge_scorer import RougeScorer

GOLDEN = Path(__file__).resolve().parent / "rouge_l.json"
PAIRS = [
    ("police kill the gunman", "police killed the gunman"),
    ("the gunman kill police", "police killed the gunman"),
    ("", "police killed the gunman"),
    ("police killed the gunman", ""),
    ("", ""),
    ("...", "!?"),
    ("the the the the", "the cat"),
    ("the cat", "the the the the"),
    ("a b a b a b", "b a b a"),
    ("The CAT sat.", "the cat SAT"),
    ("don't stop", "dont stop"),
    ("don't stop", "don t stop"),
    ("it's 3.14, or 2024-12-31", "it is 3 14 or 2024 12 31"),
    ("snake_case words", "snake case words"),
    ("a-b a_b a/b", "a b"),
    ("e-mail: x@y.z", "email x y z"),
    ("running runs", "run run"),
    ("line one\nline two\ttabbed", "line one line two tabbed"),
    ("  leading and trailing  ", "leading and trailing"),
    ("x" * 300 + " y", "y " + "x" * 300),
    ("the movie was \u201cgreat\u201d \u2014 really", 'the movie was "great" - really'),
    ("so\u00a0what", "so what"),
    ("caf\u00e9 na\u00efve", "cafe naive"),
    ("caf\u00e9 na\u00efve", "CAF\u00c9 NA\u00cfVE"),
    ("\u00fcber stra\u00dfe", "\u00dcber Stra\u00dfe"),
    ("\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440", "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!"),
    ("\u4e1c\u4eac \u5927\u962a", "\u5927\u962a \u4e1c\u4eac"),
    ("\u4e1c\u4eac is large", "tokyo is large"),
    ("good \U0001f600 film", "good film"),
    ("good\U0001f600film", "good film"),
    ("\u0661\u0662 items", "12 items"),
]


def generated():
    """Pairs of random words of a small vocabulary, so that words are repeated and orders differ."""
    dice = random.Random(7)
    words = ["the", "cat", "dog", "sat", "on", "a", "mat", "and", "ran", "off"]
    for _ in range(24):
        yield tuple(" ".join(dice.choice(words) for _ in range(dice.randint(1, 18))) for _ in range(2))


class AnyScript:
    """Words of letters and digits of any script."""

    def tokenize(self, text):
        return "".join(c if c.isalnum() else " " for c in text.lower()).split()


def score(scorer, candidate, reference):
    return scorer.score(reference, candidate)["rougeL"].fmeasure


own, any_script = RougeScorer(["rougeL"]), RougeScorer(["rougeL"], tokenizer=AnyScript())
cases = []
for candidate, reference in [*PAIRS, *generated()]:
    case = {"candidate": candidate, "reference": reference, "any_script": score(any_script, candidate, reference)}
    if (candidate + reference).isascii():
        case["own"] = score(own, candidate, reference)
    cases.append(case)
text = "[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n"
if "--check" in sys.argv:
    assert GOLDEN.read_text() == text, "rouge_l.json differs from what rouge_score computes"
else:
    GOLDEN.write_text(text)
print(len(cases), "pairs")
