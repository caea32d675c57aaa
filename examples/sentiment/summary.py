"""Summarizes a run of the demo: did PPO raise the score, and does the rise mean what it should?

    python3 summary.py [FOLDER]     default: runs/sentiment

Reads FOLDER/{sft,reward,ppo}/metrics.jsonl, before.jsonl, after.jsonl and timings.tsv, as run.sh writes them; prints
the summary and writes it to FOLDER/summary.json and FOLDER/summary.md. Exit code 1 when a verdict is no.

Python 3.9 or newer, standard library only.
"""

import os
import shutil
import sys
import textwrap

import judge
import shared

SAMPLES = 5
MAY_FALL = 0.1  # relative: grammar and variety may fall by this share, no more


def read_metrics(path, *needed):
    """The rows of a metrics.jsonl that have all `needed` keys; at least one."""
    rows = shared.read_rows(path, "sentiment")
    rows = [row for row in rows if all(key in row for key in needed)]
    if not rows:
        raise shared.Missing(f"{path}: no line has {' and '.join(needed)}")
    return rows


def tenths(rows, key):
    """Mean of `key` over the first and over the last tenth of `rows`, at least one row each."""
    size = max(1, round(len(rows) / 10))
    return tuple(sum(row[key] for row in part) / size for part in (rows[:size], rows[-size:]))


def summarise(folder):
    """All metrics of the run, as one dict for json."""
    sft = read_metrics(folder / "sft" / "metrics.jsonl", "loss")
    reward = read_metrics(folder / "reward" / "metrics.jsonl", "loss", "accuracy")
    ppo = read_metrics(folder / "ppo" / "metrics.jsonl", "objective/scores", "objective/kl")
    if "objective/scores_std" not in ppo[0]:
        raise shared.Missing(f"{folder / 'ppo' / 'metrics.jsonl'}: the first line has no objective/scores_std")
    before, after = shared.read_answers(folder, "sentiment")
    score, deviation = tenths(ppo, "objective/scores"), ppo[0]["objective/scores_std"]
    judged = judge.judge(before), judge.judge(after)

    def kept(key):
        return judged[1][key] >= (1 - MAY_FALL) * judged[0][key]

    return {
        "sft_loss": tenths(sft, "loss"),
        "reward_loss": tenths(reward, "loss"),
        "reward_accuracy": tenths(reward, "accuracy"),
        "ppo_updates": len(ppo),
        "score": score,
        "score_std_at_start": deviation,
        "kl": tenths(ppo, "objective/kl"),
        "before": judged[0],
        "after": judged[1],
        "verdicts": {
            "score rose by at least one standard deviation of the start": score[1] - score[0] >= deviation,
            "the held-out judge agrees (mood rose, and is above zero)": judged[1]["mood"] > max(0, judged[0]["mood"]),
            "grammar fell by no more than a tenth": kept("grammar"),
            "distinct bigrams fell by no more than a tenth": kept("distinct_bigrams"),
        },
        "samples": [
            {"prompt": old["prompt"], "before": old["completion"], "after": new["completion"]}
            for old, new in list(zip(before, after))[:SAMPLES]
        ],
        "seconds": shared.read_timings(folder),
    }


def training_rows(found):
    def row(name, key, form):
        return (name, *(form.format(value) for value in found[key]))

    return [
        ("while training", "first tenth", "last tenth"),
        row("SFT loss", "sft_loss", "{:.3f}"),
        row("reward model loss", "reward_loss", "{:.3f}"),
        row("reward model accuracy", "reward_accuracy", "{:.1%}"),
        row("PPO mean score", "score", "{:+.3f}"),
        row("PPO mean KL to the SFT model", "kl", "{:.3f}"),
    ]


def answer_rows(found):
    def row(name, key, form):
        return (name, form.format(found["before"][key]), form.format(found["after"][key]))

    return [
        (f"{found['before']['answers']} held-out prompts", "before PPO", "after PPO"),
        row("judge: mood, -1 to 1", "mood", "{:+.3f}"),
        row("judge: positive words", "positive_words", "{}"),
        row("judge: negative words", "negative_words", "{}"),
        row("judge: positive responses", "positive_answers", "{:.1%}"),
        row("responses that the grammar parses", "grammar", "{:.1%}"),
        row("distinct bigrams, all responses", "distinct_bigrams", "{:.1%}"),
        row("distinct bigrams, per response", "distinct_bigrams_per_answer", "{:.1%}"),
        row("words per response", "words", "{:.1f}"),
    ]


def score_line(found):
    first, last = found["score"]
    gain = (last - first) / found["score_std_at_start"] if found["score_std_at_start"] else float("inf")
    return (
        f"Score {first:+.3f} -> {last:+.3f} over {found['ppo_updates']} updates: {gain:+.2f} standard deviations of "
        f"the start ({found['score_std_at_start']:.3f})."
    )


def time_line(found):
    seconds = found["seconds"]
    total = sum(seconds.values())
    parts = ", ".join(f"{name} {value} s" for name, value in seconds.items())
    return f"Time: {total // 60} min {total % 60} s ({parts})."


def aligned(rows):
    """The rows as lines, the first column to the left, numbers to the right, a rule under the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])])
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0])] + lines[1:]


def side_by_side(samples, width):
    """Prompt, before and after as columns of wrapped text, for a terminal of `width` columns."""
    sizes = [max(16, (width - 4) // 4)]
    sizes += [(width - 4 - sizes[0]) // 2] * 2
    rule = "  ".join("-" * size for size in sizes)
    lines = [
        "  ".join(head.ljust(size) for head, size in zip(("prompt", "before PPO", "after PPO"), sizes)).rstrip(),
        rule,
    ]
    for sample in samples:
        cells = [
            textwrap.wrap(sample[key].strip(), size) or [""] for key, size in zip(("prompt", "before", "after"), sizes)
        ]
        for at in range(max(map(len, cells))):
            parts = [(cell[at] if at < len(cell) else "").ljust(size) for cell, size in zip(cells, sizes)]
            lines.append("  ".join(parts).rstrip())
        lines.append(rule)
    return lines


def listed(samples):
    """The same for a pipe: one line each, unwrapped."""
    lines = []
    for sample in samples:
        lines += [
            "prompt: " + sample["prompt"],
            "before: " + sample["before"].strip(),
            "after:  " + sample["after"].strip(),
            "",
        ]
    return lines[:-1]


def as_text(found, width=None, colour=False):
    """The summary as printed; `width` is the terminal's, None for a pipe."""

    def mark(good):
        word = "yes" if good else "NO"
        return f"\033[1;{32 if good else 31}m{word:3}\033[0m" if colour else f"{word:3}"

    lines = aligned(training_rows(found)) + [""] + aligned(answer_rows(found)) + [""]
    lines += ["Responses to the same prompts before and after:"]
    lines += side_by_side(found["samples"], width) if width else listed(found["samples"])
    lines += ["", score_line(found)]
    lines += [f"  {mark(good)}  {claim}" for claim, good in found["verdicts"].items()]
    return "\n".join(lines + [time_line(found)]) + "\n"


def as_markdown(found):
    def table(rows, right=True):
        rule = ["---"] + ["---:" if right else "---"] * (len(rows[0]) - 1)
        return [
            "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
            for row in [rows[0], rule] + rows[1:]
        ]

    samples = [("prompt", "before PPO", "after PPO")]
    samples += [(row["prompt"], row["before"].strip(), row["after"].strip()) for row in found["samples"]]
    lines = table(training_rows(found)) + [""] + table(answer_rows(found)) + [""]
    lines += table(samples, right=False) + ["", score_line(found), ""]
    lines += [f"- {'yes' if good else '**no**'}: {claim}" for claim, good in found["verdicts"].items()]
    return "\n".join(lines + ["", time_line(found)]) + "\n"


def on_terminal(found):
    terminal = sys.stdout.isatty()
    width = min(shutil.get_terminal_size((100, 24)).columns, 140) if terminal else None
    return as_text(found, width, colour=terminal and "NO_COLOR" not in os.environ)


def is_good(found):
    return all(found["verdicts"].values())


if __name__ == "__main__":
    sys.exit(shared.summary(sys.argv[1:], __doc__, "runs/sentiment", summarise, as_markdown, on_terminal, is_good))
