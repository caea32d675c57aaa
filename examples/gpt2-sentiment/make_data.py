"""Writes data/, the same bytes every time, from the reviews of the demo (examples/sentiment/data/sft.jsonl).

    python3 make_data.py            writes the files below into data/
    python3 make_data.py --check    makes them again in memory and compares; exit 1 if a shipped file differs

    prompts.jsonl           1024 starts of reviews, {"prompt"}: the first 2 to 8 tokens, by the demo's tokenizer, with
                            no word of feeling.
    prompts_test.jsonl      128 more, from reviews that give no prompt to prompts.jsonl, and no text that is in it.
    sentences_test.jsonl    labelled text held out from the classifier, {"text", "label", "kind"}; see `sentences`.

The sentences that the classifier learns are not shipped: train_classifier.py takes them from here.

Python 3.9 or newer, standard library only.
"""

import json
import pathlib
import random
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
DEMO = HERE.parent / "sentiment"
sys.path.append(str(DEMO))

import grammar  # noqa: E402
import shared  # noqa: E402

FOLDER = HERE / "data"
SEED = 31
LABELS = ("NEGATIVE", "POSITIVE")
HELD_OUT = 600  # reviews that the classifier learns nothing of
PROMPTS, PROMPTS_TEST = 1024, 128
SHORTEST, LONGEST = 2, 8  # tokens of a prompt

# GPT-2's pieces, as far as these reviews have them; a tokenizer of its kind makes tokens inside a piece only.
PIECE = re.compile(r"'s| ?[A-Za-z]+| ?[^\sA-Za-z]+")


def phrases(sign):
    """The words of feeling `sign` ("+" or "-"), and the cues, as a pattern."""
    known = grammar.words_of_feeling(sign) | {phrase for signs in grammar.CUES.values() for phrase in signs[sign]}
    return re.compile(r"\b(?:%s)\b" % "|".join(sorted(known, key=lambda phrase: (-len(phrase), phrase))))


FELT = {"NEGATIVE": phrases("-"), "POSITIVE": phrases("+")}


def label_of(text):
    """POSITIVE or NEGATIVE if `text` has words of that feeling and none of the other, else None."""
    found = [label for label in LABELS if FELT[label].search(text)]
    return found[0] if len(found) == 1 else None


def reviews():
    with open(DEMO / "data" / "sft.jsonl", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def pick(draw, items):
    """One of `items`; `draw` is a `random.Random.random`, whose stream every Python version keeps."""
    return items[int(draw() * len(items))]


def shuffled(draw, items):
    return [items[at] for _, at in sorted((draw(), at) for at in range(len(items)))]


def texts_of(review, draw):
    """The labelled texts of a review of one mood, which is the label of each: its sentences, and its beginning.

    The beginning ends at any word after the third, because the policy's responses end in mid-sentence too. A text without
    a sentiment word is of the kind "plain". Both labels have the same number of plain texts, which teaches a classifier
    that they are neutral. A classifier that never saw them may score them as praise, and a policy would exploit that.
    """
    label = label_of(review)
    if not label:
        return
    ends = [match.start() for match in re.finditer(r"[ .]|$", review)][3:]
    texts = [(sentence, "sentence") for sentence in grammar.SENTENCE_END.split(review)]
    texts.append((review[: pick(draw, ends)], "beginning"))
    for text, kind in texts:
        yield {"text": text, "label": label, "kind": kind if label_of(text) else "plain"}


def balanced(rows, draw, taken):
    """As many rows of each label in each kind, each text once, none that is in `taken`; `draw` decides their order."""
    sides = {}
    seen = set(taken)
    for row in shuffled(draw, rows):
        if row["text"] not in seen:
            seen.add(row["text"])
            sides.setdefault(row["kind"], {label: [] for label in LABELS})[row["label"]].append(row)
    even = []
    for kind in sorted(sides):
        size = min(map(len, sides[kind].values()))
        even += [row for label in LABELS for row in sides[kind][label][:size]]
    return shuffled(draw, even)


def sentences(texts):
    """(training rows, held-out rows) for the classifier, from the reviews `texts`.

    Each is {"text", "label", "kind"}; of each kind half are POSITIVE, half NEGATIVE. The reviews are divided first, so
    that a held-out row is of a review that gave no training row; then a held-out text that some other review has in
    training, to the letter, is left out.
    """
    draw = random.Random(SEED).random
    texts = shuffled(draw, texts)
    held_out, rest = texts[:HELD_OUT], texts[HELD_OUT:]
    train = balanced([row for review in rest for row in texts_of(review, draw)], draw, set())
    known = {row["text"] for row in train}
    return train, balanced([row for review in held_out for row in texts_of(review, draw)], draw, known)


def prompts(texts):
    """(prompts, held-out prompts): starts of 2 to 8 tokens of the reviews `texts`."""
    vocabulary = json.loads((DEMO / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    draw = random.Random(SEED + 1).random
    found = []
    for review in shuffled(draw, texts):
        length = SHORTEST + int(draw() * (LONGEST - SHORTEST + 1))
        pieces = PIECE.findall(review)[:length]
        start = "".join(pieces)
        # A piece that is in the vocabulary is one token; with these reviews nearly all are.
        if all(piece.replace(" ", "\u0120") in vocabulary for piece in pieces) and not any(
            pattern.search(start) for pattern in FELT.values()
        ):
            found.append({"prompt": start})
    training = found[:PROMPTS]
    known = {row["prompt"] for row in training}
    others = {row["prompt"]: row for row in found[PROMPTS:] if row["prompt"] not in known}
    return training, list(others.values())[:PROMPTS_TEST]


def files():
    """File name -> bytes."""
    texts = reviews()
    training, held_out = prompts(texts)
    made = {"prompts.jsonl": training, "prompts_test.jsonl": held_out, "sentences_test.jsonl": sentences(texts)[1]}
    return shared.encoded(made)


def check():
    """The names of the shipped files that differ from what this script makes."""
    return shared.differing(files(), FOLDER)


if __name__ == "__main__":
    sys.exit(shared.make(sys.argv[1:], __doc__, FOLDER, files))
