"""Summarizes a run of grpo.sh or ppo.sh: the judge's metrics of the responses before and after.

    python3 summary.py FOLDER

Reads what the scripts write to FOLDER; prints the summary and writes it to FOLDER/summary.json and FOLDER/summary.md. Exit code 1
when a verdict is no. A run of ppo.sh needs vaderSentiment.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "sentiment"))  # behind this folder, which has a judge and a make_data too

import judge  # noqa: E402
import shared  # noqa: E402

SAMPLES = 6
DRIFT = "replies to chat prompts: mean log-probability per token under the model before training falls by less than 0.2"


def read(path, name):
    return shared.read_rows(path, f"smollm2 ({name}.sh)")


def pairs(folder, name, what):
    """The responses before and after."""
    return [read(folder / f"{when}.{what}.jsonl", name) for when in ("before", "after")]


def mean_of_last(rows, key, count):
    values = [row[key] for row in rows[-count:] if key in row]
    return sum(values) / len(values) if values else None


def samples(before, after, verdicts, facts=None):
    """The same prompts before and after, those of `facts` with the right object."""
    each = len(before) // max(len(facts), 1) if facts else 1
    rows = zip(before, after, *verdicts)
    found = [
        {
            "prompt": old["prompt"].split("<|im_start|>user\n")[-1].split("<|im_end|>")[0],
            "before": old["completion"],
            "after": new["completion"],
            "verdicts": [first, last],
        }
        for old, new, first, last in rows
    ]
    return found[:: each * max(1, len(found) // each // SAMPLES)][:SAMPLES]


def summarise_grpo(folder, metrics):
    facts = [row["facts"] for row in judge.read(HERE / "data" / "extract_test.jsonl")]
    greedy, sampled = (pairs(folder, "grpo", what) for what in ("greedy", "sampled"))
    found = {
        "greedy": [judge.extract(rows, facts) for rows in greedy],
        "sampled": [judge.extract(rows, facts) for rows in sampled],
        "reward": [metrics[0].get("reward"), mean_of_last(metrics, "reward", 4)],
    }
    found["samples"] = samples(*greedy, [judged.pop("verdicts") for judged in found["greedy"]], facts)
    for judged in found["sampled"]:
        del judged["verdicts"]
    rise = {what: found[what][1]["right"] - found[what][0]["right"] for what in ("greedy", "sampled")}
    found["verdicts"] = {
        "before, between a tenth and two thirds are right": 0.1 <= found["greedy"][0]["right"] <= 2 / 3,
        "right: at least 25 points more": rise["greedy"] >= 0.25,
        "right when sampled: at least 25 points more": rise["sampled"] >= 0.25,
    }
    return found


def summarise_ppo(folder, metrics):
    reviews = pairs(folder, "ppo", "reviews")
    found = {
        "reviews": [judge.reviews(rows) for rows in reviews],
        "reward": [metrics[0].get("objective/scores"), mean_of_last(metrics, "objective/scores", 4)],
        "kl": [metrics[0].get("objective/kl"), mean_of_last(metrics, "objective/kl", 4)],
    }
    found["samples"] = samples(*reviews, [judged.pop("verdicts") for judged in found["reviews"]])
    before, after = found["reviews"]
    found["verdicts"] = {
        "VADER's compound score: at least 0.2 higher": after["compound"] - before["compound"] >= 0.2,
        "KL of the last four updates below 10 nats": found["kl"][1] < 10,
        "distinct bigrams fall by less than a tenth": after["distinct_bigrams"] > 0.9 * before["distinct_bigrams"],
    }
    return found


def summarise(folder):
    """All metrics of the run, as one dict for json; lists of two are before and after, or the first update and the last."""
    name = "grpo" if (folder / "grpo").is_dir() else "ppo"
    metrics = [row for row in read(folder / name / "metrics.jsonl", name) if "step" in row and ("step_time" in row or "time/update" in row)]
    if not metrics:
        raise shared.Missing(f"{folder / name / 'metrics.jsonl'}: no update")
    found = {"run": name, "updates": len(metrics)}
    found |= {"grpo": summarise_grpo, "ppo": summarise_ppo}[name](folder, metrics)
    found["chat"] = [judge.chat(rows) for rows in pairs(folder, name, "chat")]
    found["verdicts"][DRIFT] = found["chat"][0]["logprob"] - found["chat"][1]["logprob"] < 0.2
    found["seconds"] = shared.read_timings(folder)
    return found


ROWS = {  # of the table: label, key, field, format
    "grpo": [
        ("right, greedy decoding", "greedy", "right", "{:.1%}"),
        ("right, sampled at temperature 0.7", "sampled", "right", "{:.1%}"),
        ("tokens per response, greedy", "greedy", "tokens", "{:.1f}"),
    ],
    "ppo": [
        ("VADER's compound score, -1 to 1", "reviews", "compound", "{:+.3f}"),
        ("distinct bigrams, all responses", "reviews", "distinct_bigrams", "{:.1%}"),
        ("responses that end within 32 tokens", "reviews", "ended", "{:.1%}"),
        ("tokens per response", "reviews", "tokens", "{:.1f}"),
    ],
}


def table(found):
    name, first = found["run"].upper(), ROWS[found["run"]][0][1]
    rows = [(f"{found[first][0]['responses']} responses to held-out prompts", f"before {name}", f"after {name}")]
    for label, key, field, form in ROWS[found["run"]] + [("chat: log-probability per token", "chat", "logprob", "{:.3f}")]:
        rows.append((label, *(form.format(judged[field]) for judged in found[key])))
    return rows


def last_lines(found):
    """Training's own metrics, verdicts and times."""
    lines = ["{} updates: mean reward {:.3f} in the first, {:.3f} in the last four.".format(found["updates"], *found["reward"])]
    if "kl" in found:
        lines[0] += " KL per response {:.2f} nats in the last four.".format(found["kl"][1])
    lines += [f"- {'yes' if good else 'NO'}: {claim}" for claim, good in found["verdicts"].items()]
    total = sum(found["seconds"].values())
    parts = ", ".join(f"{name} {value} s" for name, value in found["seconds"].items())
    return lines + [f"Time: {total // 60} min {total % 60} s ({parts})."]


def as_markdown(found):
    def cell(text):
        return " ".join(str(text).replace("|", "\\|").split())

    def verdict(value):
        return ("right" if value else "wrong") if isinstance(value, bool) else f"{value:+.2f}"

    rows = table(found)
    lines = [f"| {' | '.join(line)} |" for line in [rows[0], ("---", "---:", "---:"), *rows[1:]]]
    lines += ["", "| prompt | before | | after | |", "|---|---|---|---|---|"]
    for sample in found["samples"]:
        sides = [f"{cell(sample[key])} | {verdict(value)}" for key, value in zip(("before", "after"), sample["verdicts"])]
        lines.append(f"| {cell(sample['prompt'])} | {' | '.join(sides)} |")
    first, *verdicts, last = last_lines(found)
    return "\n".join([*lines, "", first, "", *verdicts, "", last]) + "\n"


def as_text(found):
    rows = table(found)
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    lines = [f"{name:{widths[0]}}  {old:>{widths[1]}}  {new:>{widths[2]}}" for name, old, new in rows]
    lines.append("")
    for sample in found["samples"]:
        lines += [f"{key + ':':8}{' '.join(sample[key].split())}" for key in ("prompt", "before", "after")] + [""]
    return "\n".join(lines + last_lines(found)) + "\n"


def is_good(found):
    return all(found["verdicts"].values())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(shared.summary(sys.argv[1:], __doc__, None, summarise, as_markdown, as_text, is_good))
