"""Summarizes a run of the example: the classifier's scores and word counts of the responses before and after PPO.

    python3 summary.py [FOLDER]         default: runs/gpt2-sentiment
    python3 summary.py --text IN OUT    the rows of IN, as `rlhf generate` wrote them, without their token ids

Reads FOLDER/ppo/metrics.jsonl, before.jsonl, after.jsonl and timings.tsv, as run.sh writes them; prints the summary and
writes it to FOLDER/summary.json and FOLDER/summary.md. Exit code 1 when the mean score of the responses has not risen.

Python 3.9 or newer, standard library only.
"""

import json
import pathlib
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "sentiment"))  # behind this folder, which has a make_data too

import judge  # noqa: E402
import make_data  # noqa: E402
import shared  # noqa: E402

SAMPLES = 6


def read(path):
    return shared.read_rows(path, "gpt2-sentiment")


def strip_ids(source, target):
    """Keeps the fields of each row that a model with another tokenizer can read."""
    rows = [{key: row[key] for key in ("prompt", "completion", "finish_reason")} for row in read(source)]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def judged(rows):
    """The metrics of one set of scored responses; sentiment words are those of the lexicon, and the cues."""
    texts = [row["completion"] for row in rows]
    felt = {label: [len(pattern.findall(text)) for text in texts] for label, pattern in make_data.FELT.items()}
    negative, positive = (sum(felt[label]) for label in make_data.LABELS)
    pairs = [pair for text in texts for pair in judge.bigrams(text)]
    scores = [row["score"] for row in rows]
    return {
        "answers": len(rows),
        "score": statistics.fmean(scores),
        "score_std": statistics.pstdev(scores),
        "positive_scores": sum(score > 0 for score in scores) / len(scores),
        "plain_answers": sum(not any(counts) for counts in zip(*felt.values())) / len(rows),
        "positive_words": positive,
        "negative_words": negative,
        "mood": judge.balance(positive, negative),
        "distinct_bigrams": len(set(pairs)) / max(len(pairs), 1),
        "words": sum(len(judge.tokens(text)) for text in texts) / len(rows),
    }


def summarise(folder):
    """All metrics of the run, as one dict for json."""
    updates = [row for row in read(folder / "ppo" / "metrics.jsonl") if "objective/scores" in row]
    before, after = shared.read_answers(folder, "gpt2-sentiment")
    if not updates:
        raise shared.Missing(f"{folder / 'ppo' / 'metrics.jsonl'}: no line has objective/scores")
    return {
        "updates": len(updates),
        "first_update": {key: updates[0].get(f"objective/{key}") for key in ("scores", "kl")},
        "last_update": {key: updates[-1].get(f"objective/{key}") for key in ("scores", "kl")},
        "before": judged(before),
        "after": judged(after),
        "samples": [
            {"prompt": old["prompt"]}
            | {
                name: {"text": row["completion"], "score": row["score"]}
                for name, row in (("before", old), ("after", new))
            }
            for old, new in list(zip(before, after))[:SAMPLES]
        ],
        "seconds": shared.read_timings(folder),
    }


ROWS = [  # of the table: label, key, format
    ("mean score: logit of POSITIVE", "score", "{:+.2f}"),
    ("spread of the scores", "score_std", "{:.2f}"),
    ("responses that score above 0", "positive_scores", "{:.1%}"),
    ("responses without a sentiment word", "plain_answers", "{:.1%}"),
    ("positive words", "positive_words", "{}"),
    ("negative words", "negative_words", "{}"),
    ("mood by these words, -1 to 1", "mood", "{:+.2f}"),
    ("distinct bigrams, all responses", "distinct_bigrams", "{:.1%}"),
    ("words per response", "words", "{:.1f}"),
]


def as_markdown(found):
    def cell(text):
        return " ".join(str(text).replace("|", "\\|").split())

    lines = [f"| {found['before']['answers']} held-out prompts | before PPO | after PPO |", "|---|---:|---:|"]
    for name, key, form in ROWS:
        lines.append(f"| {name} | {form.format(found['before'][key])} | {form.format(found['after'][key])} |")
    lines += ["", "| prompt | before PPO | score | after PPO | score |", "|---|---|---:|---|---:|"]
    for sample in found["samples"]:
        sides = [f"{cell(sample[name]['text'])} | {sample[name]['score']:+.2f}" for name in ("before", "after")]
        lines.append(f"| {cell(sample['prompt'])} | {' | '.join(sides)} |")
    first, last = found["first_update"], found["last_update"]
    line = "{} updates: mean score {:+.2f} in the first, {:+.2f} in the last; KL {:.2f} and {:.2f}."
    lines += ["", line.format(found["updates"], first["scores"], last["scores"], first["kl"], last["kl"])]
    if found["seconds"]:
        lines.append("Time: " + ", ".join(f"{name} {value} s" for name, value in found["seconds"].items()) + ".")
    return "\n".join(lines) + "\n"


def is_good(found):
    return found["after"]["score"] > found["before"]["score"]


def main(arguments):
    if arguments[:1] == ["--text"] and len(arguments) == 3:
        strip_ids(*map(pathlib.Path, arguments[1:]))
        return 0
    return shared.summary(arguments, __doc__, "runs/gpt2-sentiment", summarise, as_markdown, as_markdown, is_good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
