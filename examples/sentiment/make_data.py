"""Writes the demo's data, the same bytes every time, from the grammar in grammar.py.

    python3 make_data.py            writes the files below into data/
    python3 make_data.py --check    makes them again in memory and compares; exit 1 if a shipped file differs

    sft.jsonl                6000 reviews, {"text"}. Most are negative, a fifth positive, the rest mixed or plain; a
                             review keeps its mood, and uses words of both halves of the lexicon.
    preferences.jsonl        1500 pairs, {"prompt", "chosen", "rejected"}: two endings of one opening, the chosen one
                             positive, with words of half A only and no cues. In half of the pairs the rejected one is
                             its twin with negative words, so that no neutral word looks like a reason; else it is
                             another ending, negative or plain, so that saying nothing does not look good.
    preferences_test.jsonl   200 more pairs, of openings that preferences.jsonl does not have.
    prompts.jsonl            1024 starts of reviews, {"prompt"}, neutral, cut at the border in the opening.
    prompts_test.jsonl       96 starts that open nothing in any other file: for the comparison before and after.

The trainer appends the end-of-text token to reviews and responses; no file contains it.

Python 3.9 or newer, standard library only.
"""

import pathlib
import sys

import grammar
import shared

FOLDER = pathlib.Path(__file__).resolve().parent / "data"
SEED = 20
MOODS = {"positive": 0.23, "negative": 0.64, "mixed": 0.07, "plain": 0.06}


def fresh_start(sampler, *taken):
    """A group and a start that none of the sets `taken` holds; it is added to the first."""
    while True:
        group, prompt = sampler.start()
        if not any(prompt in prompts for prompts in taken):
            taken[0].add(prompt)
            return group, prompt


def preference(sampler, group, prompt):
    chosen = rejected = sampler.draft_in(group, "positive", cues=0)
    kind = sampler.weighted({"twin": 0.5, "negative": 0.25, "plain": 0.25})
    if kind != "twin":
        rejected = sampler.draft_in(group, kind, cues=0)
    return {
        "prompt": prompt,
        "chosen": sampler.complete(chosen, "positive", "A"),
        "rejected": sampler.complete(rejected, "negative", "A"),
    }


def make():
    """File name -> rows."""
    sampler = grammar.Sampler(SEED)
    held_out, prompts, test_pairs, pairs = set(), set(), set(), set()
    prompts_test = [{"prompt": fresh_start(sampler, held_out)[1]} for _ in range(96)]
    reviews = []
    while len(reviews) < 6000:
        group, prompt = sampler.start()
        if prompt not in held_out:
            mood = sampler.weighted(MOODS)
            reviews.append({"text": prompt + sampler.complete(sampler.draft_in(group, mood), mood)})
    return {
        "sft.jsonl": reviews,
        "preferences_test.jsonl": [
            preference(sampler, *fresh_start(sampler, test_pairs, held_out)) for _ in range(200)
        ],
        "preferences.jsonl": [
            preference(sampler, *fresh_start(sampler, pairs, test_pairs, held_out)) for _ in range(1500)
        ],
        "prompts.jsonl": [{"prompt": fresh_start(sampler, prompts, held_out)[1]} for _ in range(1024)],
        "prompts_test.jsonl": prompts_test,
    }


def files():
    """File name -> bytes."""
    return shared.encoded(make())


def check():
    """The names of the shipped files that differ from what this script makes."""
    return shared.differing(files(), FOLDER)


if __name__ == "__main__":
    sys.exit(shared.make(sys.argv[1:], __doc__, FOLDER, files))
