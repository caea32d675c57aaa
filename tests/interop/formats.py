"""Checks rows in the formats of other programs against transformers and TRL.

    python tests/interop/formats.py target/debug/rlhf

Writes the same conversations and preference pairs as TRL, LLaMA-Factory, ms-swift and axolotl have them, in JSONL, JSON and Parquet, and has
`rlhf score` give them to a reward function of Python, which records what it gets: the messages before the response, the response, and its token
ids. These must be the tokens that transformers makes of the conversation after those of its prompt, as TRL divides them. Prints one line per
check and a total. Exit code 1 if any failed.

Needs transformers, jinja2 and pyarrow (for Parquet); no network.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from runner import binary, copy_model, expect, run_checks
from transformers import AutoTokenizer

LEAST_CASES = 200
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls %}{{ call.function.name }}"
    "({{ call.function.arguments | tojson }}){% endfor %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{# 'tool' #}"
)
FUNCTION = '''
import json

def record(prompts, completions, completion_ids, id, **columns):
    with open("recorded.jsonl", "a") as file:
        for row in zip(id, prompts, completions, completion_ids):
            file.write(json.dumps(row) + "\\n")
    return [0.0] * len(prompts)
'''


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def conversations():
    """Pairs of the messages before the response and two responses."""
    texts = ["Hi", "naïve 你好", "a\nb", '{"json": [1]}', "<b>"]
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "Bern"}}}
    for system, turns, text in itertools.product([None, "Be brief."], [1, 2, 3], texts):
        before = [message("system", system)] if system else []
        for turn in range(turns - 1):
            before += [message("user", f"{text} {turn}"), message("assistant", f"answer {turn}")]
        before.append(message("user", text))
        if turns == 3:
            before += [message("assistant", "", tool_calls=[call]), message("tool", "21")]
        yield before, f"yes {text}", f"no {text}"


def sharegpt(messages):
    """ShareGPT's form of messages, and the text of the system message."""
    names = {"user": "human", "assistant": "gpt", "tool": "observation"}
    system = [m["content"] for m in messages if m["role"] == "system"]
    turns = []
    for m in messages:
        if "tool_calls" in m:
            turns.append({"from": "function_call", "value": json.dumps(m["tool_calls"][0]["function"])})
        elif m["role"] != "system":
            turns.append({"from": names[m["role"]], "value": m["content"]})
    return turns, system[0] if system else ""


def swift(messages):
    """ms-swift's form of messages."""
    found = []
    for m in messages:
        if "tool_calls" in m:
            found.append(message("tool_call", json.dumps(m["tool_calls"][0]["function"])))
        else:
            found.append(message("tool_response" if m["role"] == "tool" else m["role"], m["content"]))
    return found


def formats(before, chosen, rejected):
    """Name -> the row in that format, and whether it is a pair."""
    yes, no = message("assistant", chosen), message("assistant", rejected)
    turns, system = sharegpt(before)
    gpt = lambda text: {"from": "gpt", "value": text}
    texts = [m["content"] for m in [*before, yes] if m["role"] != "system"]
    calls = any("tool_calls" in m for m in before)
    in_turns = {} if calls else {
        "ms-swift's turns": (
            {"conversation": [{"human": a, "assistant": b} for a, b in zip(texts[::2], texts[1::2])], "system": system}, False
        )
    }
    return {
        **in_turns,
        "messages": ({"messages": [*before, yes]}, False),
        "prompt and completion": ({"prompt": before, "completion": [yes]}, False),
        "prompt, chosen, rejected": ({"prompt": before, "chosen": [yes], "rejected": [no]}, True),
        "ShareGPT": ({"conversations": [*turns, gpt(chosen)], "system": system}, False),
        "LLaMA-Factory's pair": (
            {"conversations": turns, "system": system, "chosen": gpt(chosen), "rejected": gpt(rejected)},
            True,
        ),
        "ms-swift": ({"messages": [*swift(before), yes]}, False),
        "ms-swift's pair": ({"messages": [*swift(before), yes], "rejected_response": rejected}, True),
        "axolotl's pair": ({"messages": before, "chosen": yes, "rejected": no}, True),
    }


def write(path, rows):
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def recorded(program, folder, rows, suffix):
    """What the reward function gets of each response, by the number of its row."""
    (folder / "recorded.jsonl").unlink(missing_ok=True)
    path = folder / f"rows{suffix}"
    write(path, rows)
    words = [program, "score", "--tokenizer_name", "model", "--reward", "python:record.record", "--dataset_name", path.name]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=folder)
    expect(ran.returncode == 0, f"{suffix}: {ran.stderr.strip()}")
    found = {}
    for line in (folder / "recorded.jsonl").read_text().splitlines():
        number, *rest = json.loads(line)
        found.setdefault(number, []).append(rest)
    return found


def rows_are_read_in_every_format(program, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    cases = [
        (name, before, (chosen, rejected), row, is_pair)
        for before, chosen, rejected in conversations()
        for name, (row, is_pair) in formats(before, chosen, rejected).items()
    ]
    expect(len(cases) >= LEAST_CASES, f"expected at least {LEAST_CASES} cases, found {len(cases)}")
    wrong = []
    for suffix in (".jsonl", ".json", ".parquet"):
        for name in dict.fromkeys(case[0] for case in cases):
            # Parquet has one schema: a format a file.
            own = [(number, case) for number, case in enumerate(cases) if case[0] == name]
            if suffix != ".parquet":
                own = own if name == "messages" else []
                own = list(enumerate(cases)) if own else []
            if not own:
                continue
            found = recorded(program, folder, [{**case[3], "id": number} for number, case in own], suffix)
            for number, (label, before, responses, _, is_pair) in own:
                wanted = []
                for text in responses if is_pair else responses[:1]:
                    ids = lambda messages, **more: tokenizer.apply_chat_template(
                        messages, tokenize=True, return_dict=False, **more
                    )
                    prompt = ids(before, add_generation_prompt=True)
                    whole = ids([*before, message("assistant", text)])
                    eos = len(whole) - whole[::-1].index(tokenizer.eos_token_id)
                    wanted.append(whole[len(prompt) : eos])
                got = [row[2] for row in found.get(number, [])]
                if got != wanted:
                    wrong.append(f"{label}{suffix}: expected the ids {wanted}, found {got} for {cases[number][3]}")
    expect(not wrong, f"{len(wrong)} differ, first: {wrong[0] if wrong else ''}")


def main():
    program = binary(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        copy_model(folder / "model")
        (folder / "model/chat_template.jinja").write_text(TEMPLATE)
        (folder / "record.py").write_text(FUNCTION)
        check = lambda: rows_are_read_in_every_format(program, folder)
        return run_checks([("rows of TRL, LLaMA-Factory, ms-swift and axolotl are the conversations that they mean", check)])


if __name__ == "__main__":
    sys.exit(main())
