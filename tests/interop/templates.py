"""Checks chat templates, how messages become text and which part is learned, against transformers and TRL.

    python tests/interop/templates.py target/debug/rlhf

Reads the chat templates that the installed trl ships, renders conversations of many forms with each by transformers, and has `rlhf generate`
encode the same rows: the token ids of both must be equal. Then the same for conversations that the response continues and for named
templates; and the loss of `rlhf sft` on the assistant's turns must be that of the tokens that trl trains on. A conversation that transformers
refuses may be refused. Prints one line per check and a total. Exit code 1 if any failed.

Needs transformers, torch, trl (whose templates are read as files) and jinja2; no network.
"""

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from runner import binary, copy_model, expect, run_checks
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

LEAST_CASES = 200
COMPARES_WITH_NONE = re.compile(r"content\b['\"\]]* is (not )?none")
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern", "days": 2}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def conversations():
    """Name -> row: every form that rows have."""
    system = {"role": "system", "content": "Be brief."}
    seen = {"role": "tool", "name": "weather", "content": '{"celsius": 21}'}
    asked = [user("Weather in Bern?")]
    return {
        "one question": {"prompt": [user("Hi")]},
        "spaces": {"prompt": [user("  Hi\n\n")]},
        "a system message": {"prompt": [system, user("Hi")]},
        "several turns": {"prompt": [user("a"), said("b"), user("c"), said("d"), user("e")]},
        "reasoning in the text": {"prompt": [user("a"), said("<think>\nwhy\n</think>\n\nb"), user("c")]},
        "reasoning in a field": {"prompt": [user("a"), said("b", reasoning_content="why"), user("c")]},
        "reasoning under another name": {"prompt": [user("a"), said("b", thinking="why"), user("c")]},
        "tools": {"prompt": asked, "tools": TOOLS},
        "tools and a system message": {"prompt": [system, *asked], "tools": TOOLS},
        "a call without content": {"prompt": [*asked, said(None, tool_calls=[CALL]), seen], "tools": TOOLS},
        "a call with content": {"prompt": [*asked, said("I look.", tool_calls=[CALL]), seen], "tools": TOOLS},
        "an answer after a call": {
            "prompt": [*asked, said("", tool_calls=[CALL]), seen, said("21"), user("And now?")],
            "tools": TOOLS,
        },
        "a result that is an object": {
            "prompt": [*asked, said("", tool_calls=[CALL]), {**seen, "content": {"celsius": 21}}],
            "tools": TOOLS,
            "objects": True,
        },
        "unicode": {"prompt": [user("Grüezi 你好 🎬"), said("naïve \"quotes\""), user("<b>&amp;</b>")]},
    }


def nulls(row):
    """The row as formats with columns have it: null where another row has a field."""
    filled = json.loads(json.dumps(row))
    for message in filled["prompt"]:
        for name in ("name", "tool_calls", "reasoning_content"):
            message.setdefault(name, None)
        for call in message["tool_calls"] or []:
            call["function"]["arguments"]["unit"] = None
    return filled


def shipped():
    """Name -> source of the templates that trl ships."""
    folder = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
    found = {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
    expect(len(found) > 20, f"{folder}: expected the templates of trl, found {len(found)}")
    return found


class Model:
    """A tiny model whose folder gets one chat template after another."""

    def __init__(self, program, folder):
        self.program, self.folder = program, folder
        copy_model(folder)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        model = json.loads((folder / "config.json").read_text())
        model["max_position_embeddings"] = 1 << 16
        (folder / "config.json").write_text(json.dumps(model))
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def run(self, *words, rows=None):
        """Runs rlhf. Returns the exit code, its output and its errors."""
        if rows is not None:
            path = self.folder.parent / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            words = [*words, "--dataset_name", str(path)]
        ran = subprocess.run([self.program, *words], capture_output=True, text=True, cwd=self.folder.parent)
        return ran.returncode, ran.stdout, ran.stderr

    def write(self, template):
        (self.folder / "chat_template.jinja").write_text(template)


def rendered(tokenizer, template, row, **more):
    """transformers' text of a row, or None if it refuses.

    transformers removes a content that is null; templates that compare it with none get it as it is, since they leave out calls otherwise.
    """
    try:
        if COMPARES_WITH_NONE.search(template or "") and not more.get("continue_final_message"):
            more = {**tokenizer.special_tokens_map, **more}
            return render_jinja_template([row["prompt"]], row.get("tools"), chat_template=template, **more)[0][0]
        return tokenizer.apply_chat_template(
            row["prompt"], tools=row.get("tools"), chat_template=template, tokenize=False, **more
        )
    except Exception:
        return None


def texts(model, rows):
    """rlhf's text of each row, which it encodes with the tiny model; None where it refuses one."""
    found = []
    pending = list(rows)
    while pending:
        words = ["generate", "--model", str(model.folder), "--max_new_tokens", "1", "--do_sample", "false"]
        words += ["--output_format", "jsonl", "--batch_size", "1"]
        code, out, err = model.run(*words, rows=pending)
        done = [json.loads(line)["prompt_ids"] for line in out.splitlines()]
        found += done
        pending = pending[len(done) :]
        if code == 0:
            expect(not pending, "fewer rows than prompts")
            break
        expect(pending and "line " in err, f"an error without its row: {err}")
        found.append(err.strip())
        pending = pending[1:]
    return found


class Cases:
    def __init__(self):
        self.count = 0
        self.wrong = []

    def compare(self, name, ids, expected, tokenizer):
        """Counts a case; `expected` is transformers' text."""
        self.count += 1
        if isinstance(ids, str):
            self.wrong.append(f"{name}: refused, {ids.splitlines()[-1]}")
        elif ids != tokenizer(expected, add_special_tokens=False)["input_ids"]:
            self.wrong.append(f"{name}: expected {expected!r}, found {tokenizer.decode(ids)!r}")

    def check(self, least):
        expect(not self.wrong, f"{len(self.wrong)} of {self.count} differ, first: {self.wrong[0] if self.wrong else ''}")
        expect(self.count >= least, f"expected at least {least} cases, found {self.count}")


def prompts_are_those_of_transformers(model):
    cases = Cases()
    rows = conversations()
    names = list(rows)
    # A template is a start of the program, and equal ones are one.
    for source, label in {source: label for label, source in shipped().items()}.items():
        if "generation %}" in source:
            continue
        model.write(source)
        wanted = [rendered(model.tokenizer, source, rows[row], add_generation_prompt=True) for row in names]
        kept = [at for at, text in enumerate(wanted) if text is not None and reads(source, rows[names[at]])]
        given = [rows[names[at]] for at in kept] + [nulls(rows[names[at]]) for at in kept]
        found = texts(model, given)
        for (at, ids), filled in zip(zip(kept * 2, found), [False] * len(kept) + [True] * len(kept)):
            cases.compare(f"{label}, {names[at]}{', with nulls' * filled}", ids, wanted[at], model.tokenizer)
    cases.check(LEAST_CASES)


def reads(source, row):
    """Whether the template tells an object from a text, if the row has one: others print it in Python's form, which is not compared."""
    return not row.get("objects") or "content is mapping" in source


def continued_prompts_are_those_of_transformers(model):
    cases = Cases()
    for label, source in itertools.islice(shipped().items(), 0, None, 3):
        if "generation %}" in source:
            continue
        model.write(source)
        rows, wanted = [], []
        for text in ("It is", "It is ", "One\nTwo\n"):
            row = {"prompt": [user("Well?"), said(text)]}
            expected = rendered(model.tokenizer, source, row, continue_final_message=True)
            if expected is not None:
                rows.append(row)
                wanted.append(expected)
        for ids, expected in zip(texts(model, rows), wanted):
            cases.compare(f"{label}, continued", ids, expected, model.tokenizer)
    cases.check(20)


def named_templates_are_chosen_as_in_transformers(model):
    further = model.folder / "additional_chat_templates"
    model.write("plain{{ messages[0].content }}")
    further.mkdir()
    (further / "tool_use.jinja").write_text("tools{{ messages[0].content }}")
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    cases = Cases()
    rows = [{"prompt": [user("Hi")]}, {"prompt": [user("Hi")], "tools": TOOLS}]
    for row, ids in zip(rows, texts(model, rows)):
        cases.compare("a named template", ids, rendered(tokenizer, None, row), tokenizer)
    (further / "tool_use.jinja").unlink()
    further.rmdir()
    cases.check(2)


def taught():
    """Conversations of several turns that are trained on."""
    seen = {"role": "tool", "name": "weather", "content": "21"}
    return [
        {"messages": [user("a"), said("b"), user("c"), said("d")]},
        {"messages": [user("a"), said("b c"), user("d"), said("b c"), user("e"), said("f")]},
        {"messages": [user("a"), said("<think>\nwhy\n</think>\n\nb"), user("c"), said("<think>\nso\n</think>\n\nd")]},
        {"messages": [user("a"), said("b", reasoning_content="why"), user("c"), said("d", reasoning_content="so")]},
        {"messages": [user("Weather?"), said("", tool_calls=[CALL]), seen, said("Sun.")], "tools": TOOLS},
    ]


def trained(tokenizer, template, row):
    """The text of a conversation, its token ids and the mask of those that trl trains on, by a template with marks; None if it is refused."""
    try:
        more = {"tools": row.get("tools"), "chat_template": template}
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False, **more)
        found = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True, **more)
        return text, found["input_ids"], found["assistant_masks"]
    except Exception:
        return None


def loss_of(model, rows):
    """The mean loss of the masked tokens of (ids, mask)."""
    total = count = 0
    for ids, mask in rows:
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        of_tokens = -logprobs[range(len(ids) - 1), ids[1:]]
        chosen = torch.tensor(mask[1:], dtype=torch.bool)
        total, count = total + of_tokens[chosen].double().sum().item(), count + chosen.sum().item()
    return total / count


MARKS = ("<", "[", "{", "(", "|")


def by_prompts(tokenizer, template, row, ids, mask):
    """The mask of turns that begin after the generation prompt, as responses do, and end as a conversation that ends there.

    A few of trl's templates mark the prompt too, or less than the end. Where the template writes a turn otherwise when others follow, trl's
    marks count, but for the generation prompt at their beginning.
    """
    mask, messages = list(mask), row["messages"]
    runs = [(at, at + mask[at:].index(0) if 0 in mask[at:] else len(mask)) for at in range(len(mask)) if mask[at] and not (at and mask[at - 1])]
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]

    def encoded(count, prompt):
        text = tokenizer.apply_chat_template(messages[:count], tools=row.get("tools"), chat_template=template, tokenize=False, add_generation_prompt=prompt)
        return tokenizer.encode(text, add_special_tokens=False)

    for (start, end), turn in zip(runs, turns):
        mask[start:end] = [0] * (end - start)
        opened, closed, ended = encoded(turn, True), encoded(turn, False), encoded(turn + 1, False)
        if ids[: len(opened)] == opened and ids[: len(ended)] == ended:
            start, end = len(opened), len(ended)
        else:
            # The prompt, or as much of it as the turn has.
            prompt = opened[len(closed) :]
            found = [(at, len(os.path.commonprefix([ids[at:], prompt]))) for at in range(start - len(prompt), start + 1)]
            after = max((at + shared for at, shared in found if 3 * shared >= len(prompt)), default=start)
            # The last shared token may be the beginning of another mark. Without a prompt, the space before a turn belongs to it.
            after -= start < after < len(opened) and tokenizer.decode([ids[after - 1]]) in MARKS
            while after == start and not tokenizer.decode([ids[start]]).strip():
                after, start = after + 1, start + 1
            start = after
        mask[start:end] = [1] * (end - start)
    return ids, mask


def sft_loss(model, rows):
    """The loss of the first step of `rlhf sft` on the assistant's turns of these rows, or the error."""
    out = model.folder.parent / "out"
    words = ["sft", "--model_name_or_path", str(model.folder), "--assistant_only_loss", "--max_length", "none", "--max_steps", "1"]
    words += ["--train_batch_size", str(len(rows)), "--logging_steps", "1", "--output_dir", str(out), "--overwrite_output_dir"]
    code, _, err = model.run(*words, rows=rows)
    if code:
        return err.strip().splitlines()[-1]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return next(line["loss"] for line in lines if "loss" in line)


def trained_tokens_are_those_of_trl(model):
    network = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()
    sources, wrong, count = shipped(), [], 0
    for label, marked in sources.items():
        if not label.endswith("_training"):
            continue
        of_trl = [(row, trained(model.tokenizer, marked, row)) for row in taught()]
        of_trl = [(row, found) for row, found in of_trl if found and any(found[2])]
        plain = sources.get(label.removesuffix("_training"), "")
        is_same = lambda row, text: rendered(model.tokenizer, plain, {"prompt": row["messages"], "tools": row.get("tools")}) == text
        alike = [(row, found) for row, found in of_trl if plain and "generation %}" not in plain and is_same(row, found[0])]
        # With the marks of trl's template, and with the model's own template where that writes the same text.
        for name, source, kept in ((label, marked, of_trl), (label.removesuffix("_training"), plain, alike)):
            if not kept:
                continue
            model.write(source)
            masked = [found[1:] for _, found in kept]
            expected = loss_of(network, masked)
            ours = sft_loss(model, [row for row, _ in kept])
            count += len(kept)
            if source is plain and isinstance(ours, float) and abs(ours - expected) > 1e-4:
                expected = loss_of(network, [by_prompts(model.tokenizer, plain, row, *found[1:]) for row, found in kept])
            if isinstance(ours, str) or abs(ours - expected) > 1e-4:
                wrong.append(f"{name}: expected the loss {expected}, found {ours}")
    expect(not wrong, f"{len(wrong)} differ, first: {wrong[0] if wrong else ''}")
    expect(count >= 60, f"expected at least 60 conversations, found {count}")


def main():
    program = binary(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        model = Model(program, Path(scratch) / "model")
        return run_checks(
            [
                ("prompts are those of transformers with the templates of trl", lambda: prompts_are_those_of_transformers(model)),
                ("prompts that end with a beginning are continued as in transformers", lambda: continued_prompts_are_those_of_transformers(model)),
                ("trained tokens are those of trl", lambda: trained_tokens_are_those_of_trl(model)),
                ("named templates are chosen as in transformers", lambda: named_templates_are_chosen_as_in_transformers(model)),
            ]
        )


if __name__ == "__main__":
    sys.exit(main())
