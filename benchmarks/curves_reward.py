"""The reward of the GRPO curves, which both programs import."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples/sentiment"))
import grammar  # noqa: E402
import judge  # noqa: E402

POSITIVE, NEGATIVE = (grammar.words_of_feeling(sign) for sign in "+-")


def mood(completions, **_):
    """The balance of positive and negative words of each response, from -1 to 1."""
    words = map(judge.tokens, completions)
    return [judge.balance(sum(word in POSITIVE for word in each), sum(word in NEGATIVE for word in each)) for each in words]
