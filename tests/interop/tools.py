"""Checks the text of tool use against TRL: prompts with tools, the tokens between turns, and calls that are read from sampled ids.

    cargo build --workspace --example tool_turns
    python tests/interop/tools.py target/debug/examples/tool_turns

Every chat template that the installed trl ships is given to both. They must agree on whether it writes tool calls and whether it preserves
prefixes; then on the ids of prompts, on those of `GRPOTrainer._get_tool_suffix_ids`, and on what trl's `parse_response` reads in turns that are
made of whole, broken and cut pieces from a fixed seed. Prints one line per check and a total. Exit code 1 if any failed.

Needs transformers and trl; no network.
"""

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from runner import ROOT, binary, expect, run_checks
from transformers import AutoTokenizer
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)
from trl.trainer.grpo_trainer import GRPOTrainer

TURNS = 400
# Templates that write calls in a form that rlhf does not read: it knows JSON, alone or between two tags, and parameters in tags.
FORMS = {
    "deepseekv3": "JSON in a block of Markdown",
    "diffusion_gemma": "Gemma 4's own notation",
    "gemma4": "Gemma 4's own notation",
    "glm4moe": "keys and values in tags",
    "gptoss": "channels",
    "lfm2": "calls of Python",
    "muse_glimmer": "XML",
}
# Templates with calls of parameters in tags.
PARAMETERS = ("qwen3_5", "qwen3_6", "qwen3_8", "nemotron_3")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name."},
                    "days": {"type": "integer"},
                    "share": {"type": "number"},
                    "exact": {"type": "boolean"},
                    "unit": {"type": "string", "nullable": True},
                    "near": {"type": "array", "items": {"type": "string"}},
                    "more": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}},
]


def user(text):
    return {"role": "user", "content": text}


def said(text, calls=(), **more):
    message = {"role": "assistant", "content": text, **more}
    if calls:
        message["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return message


def seen(text, name="weather"):
    return {"role": "tool", "name": name, "content": text}


BERN = ("weather", {"city": "Bern", "days": 2})
CONVERSATIONS = {
    "one question": [user("Weather in Bern?")],
    "a system message": [{"role": "system", "content": "Be brief."}, user("Hi")],
    "several turns": [user("a"), said("b"), user("c"), said("d"), user("e")],
    "a call": [user("a"), said("", [BERN]), seen("21")],
    "a call with content": [user("a"), said("I look.", [BERN]), seen("21")],
    "a call with reasoning": [user("a"), said("", [BERN], reasoning_content="why"), seen("21")],
    "two results": [user("a"), said("", [BERN]), seen("21"), seen("{'error': 'no'}")],
    "two calls": [user("a"), said("", [BERN, ("now", {})]), seen("21"), seen("12:30", "now")],
    "an answer after a call": [user("a"), said("", [BERN]), seen("21"), said("21", reasoning_content="so"), user("And now?")],
    "two rounds": [user("a"), said("", [BERN]), seen("21"), said("Again.", [BERN]), seen("22")],
    "unicode": [user("Grüezi 你好"), said("", [("weather", {"city": "Zürich \"x\""})]), seen("naïve 🎬\n")],
}
RESULTS = [
    [seen("21")],
    [seen("")],
    [seen("21"), seen("12:30", "now")],
    [seen("{'error': 'Tool f not found.'}", "f")],
    [seen("<|im_end|>\n\n你好 ")],
]


class Asked:
    """The program that answers for rlhf."""

    def __init__(self, program):
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **question):
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


class Template:
    """A template of trl with a tokenizer of its end-of-turn token, as both read it."""

    def __init__(self, asked, scratch, name, source):
        self.asked, self.name = asked, name
        folder = Path(scratch) / name
        folder.mkdir()
        shutil.copy(ROOT / "tests/golden/models/gpt_neox/tokenizer.json", folder)
        end = "<|eot_id|>" if "llama3" in name else "<|im_end|>"
        special = ["<|im_start|>", "<|start_header_id|>", "<|end_header_id|>"]
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end, "bos_token": "<|endoftext|>", "additional_special_tokens": special}))
        (folder / "chat_template.jinja").write_text(source)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.supports = supports_tool_calling(self.tokenizer)
        self.preserves = self.supports and is_chat_template_prefix_preserving(self.tokenizer)
        self.ours = asked.ask(model=str(folder))
        self.reason = next((form for start, form in FORMS.items() if name.startswith(start)), None)
        self.training = None if self.preserves or not self.is_read else get_training_chat_template(self.tokenizer)

    @property
    def is_read(self):
        return "error" not in self.ours

    def with_schema(self):
        """The tokenizer with trl's response template, which it knows by the text of the template."""
        try:
            return add_response_schema(self.tokenizer)
        except ValueError:
            own = self.tokenizer.chat_template
            self.tokenizer.chat_template = sources()[self.name.removesuffix("_training")]
            add_response_schema(self.tokenizer)
            self.tokenizer.chat_template = own
            return self.tokenizer

    def ids(self, messages, **more):
        """trl's ids of a conversation; None if the template refuses it."""
        try:
            return self.tokenizer.apply_chat_template(messages, chat_template=self.training, return_dict=False, **more)
        except Exception:
            return None


def sources():
    """Name -> source of the templates that trl ships."""
    folder = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
    found = {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
    expect(len(found) > 20, f"{folder}: expected the templates of trl, found {len(found)}")
    return found


def read_templates(asked, scratch):
    """The templates that rlhf reads, each after it was loaded."""
    for name, source in sources().items():
        template = Template(asked, tempfile.mkdtemp(dir=scratch), name, source)
        if template.is_read:
            yield template


def check_all(wrong, count, least):
    expect(not wrong, f"{len(wrong)} of {count} differ, first: {wrong[0] if wrong else ''}")
    expect(count >= least, f"expected at least {least} cases, found {count}")


def verdicts_are_those_of_trl(asked, scratch):
    wrong, read = [], 0
    for name, source in sources().items():
        template = Template(asked, tempfile.mkdtemp(dir=scratch), name, source)
        error = template.ours.get("error", "")
        if not template.supports:
            is_right = bool(error) and "not read" not in error
        elif template.reason:
            is_right = bool(error)
        else:
            read += 1
            is_right = template.ours.get("apart") == (not template.preserves)
        if not is_right or "\n" in error or (error and "chat_template.jinja" not in error):
            wrong.append(f"{name}: writes calls: {template.supports}, preserves prefixes: {template.preserves}; rlhf: {template.ours}")
    check_all(wrong, read, 8)


def prompts_are_those_of_trl(asked, scratch):
    wrong, count = [], 0
    for template in read_templates(asked, scratch):
        for label, messages in CONVERSATIONS.items():
            for tools in (TOOLS, None):
                expected = template.ids(messages, tools=tools, add_generation_prompt=True)
                found = asked.ask(prompt=messages, tools=tools or [])
                count += 1
                if found.get("ids") != expected and not (expected is None and "error" in found):
                    wrong.append(f"{template.name}, {label}: expected {shown(template, expected)}, found {shown(template, found.get('ids'))} {found.get('error', '')}")
    check_all(wrong, count, 100)


def shown(template, ids):
    return None if ids is None else repr(template.tokenizer.decode(ids))


def suffixes_are_those_of_trl(asked, scratch):
    wrong, count = [], 0
    for template in read_templates(asked, scratch):
        trainer = types.SimpleNamespace(
            processing_class=template.tokenizer, _tokenizer=template.tokenizer, chat_template=template.training, chat_template_kwargs={}, _is_vlm=False
        )
        for results in RESULTS:
            expected = GRPOTrainer._get_tool_suffix_ids(trainer, results)
            found = asked.ask(suffix=results)
            count += 1
            if found.get("ids") != expected:
                wrong.append(f"{template.name}: expected {shown(template, expected)}, found {shown(template, found.get('ids'))} {found.get('error', '')}")
    check_all(wrong, count, 30)


def call_texts(random, is_bare):
    """The JSON of a call, whole or not."""
    texts = ["7", "3.0", "x", "true", "None", "[\"a\"]", "{\"a\": 1}", "1e3", " 2 ", "", "nan"]
    values = [*texts, 7, 2.5, None, True, ["1", "b"], {"a": "1"}]
    names = ["city", "days", "share", "exact", "unit", "near", "more", "other"]
    arguments = {name: random.choice(values) for name in random.sample(names, random.randint(0, 4))}
    call = {"name": random.choice(["weather", "now", "other"]), "parameters" if is_bare else "arguments": arguments}
    text = json.dumps(call, ensure_ascii=random.random() < 0.5)
    broken = [
        text[: random.randint(0, len(text))],
        text + "}",
        text.replace(": ", ":"),
        text.replace("\"", "'"),
        json.dumps({**call, "id": 3}),
        json.dumps({"name": "now"}),
        json.dumps({"name": "now", "arguments": None}),
        json.dumps({"name": "now", "arguments": [1]}),
        json.dumps({"name": "now", "arguments": "{}"}),
        json.dumps({"name": 5, "arguments": {}}),
        json.dumps({"arguments": {}}),
        "[1]",
        "3",
        "",
    ]
    return text if random.random() < 0.7 else random.choice(broken)


def parameter_texts(random):
    """A call of parameters in tags, whole or not."""
    values = ["7", "3.0", "x", "true", "None", '["a"]', '{"a": 1}', " 2 ", "", "a\nb", "<b>", "75001"]
    names = ["city", "days", "share", "exact", "unit", "near", "more", "other"]
    parameters = [f"<parameter={name}>\n{random.choice(values)}\n</parameter>\n" for name in random.choices(names, k=random.randint(0, 4))]
    text = f"<function={random.choice(['weather', 'now', 'other'])}>\n{''.join(parameters)}</function>"
    broken = [
        text[: random.randint(0, len(text))],
        text.replace("</parameter>", ""),
        text.replace("<parameter=", "<parameter>", 1),
        text.replace("=", "=\n", 1),
        text.replace("</function>", ""),
        text.replace("<function=", "<function=>"),
        "",
    ]
    return text if random.random() < 0.7 else random.choice(broken)


def turns(random, form, end):
    """Texts of turns, with calls in this form."""
    is_bare = form == "bare"
    tagged = lambda text: random.choice(["<tool_call>\n{}\n</tool_call>", "<tool_call>{}</tool_call>\n", "<tool_call>\n{}", "{}</tool_call>", " <tool_call> {} </tool_call> "]).format(text)
    for _ in range(TURNS):
        pieces = []
        for _ in range(random.randint(1, 4)):
            call = parameter_texts(random) if form == "parameters" else call_texts(random, is_bare)
            piece = random.choice(
                [
                    call if is_bare else tagged(call),
                    call if is_bare else tagged(call),
                    "<think>\nwhy\n</think>\n\n",
                    "<think>\n\n</think>\n\n",
                    "<think> cut",
                    "</think>",
                    "I look.",
                    " \n",
                    "naïve 你好",
                    end,
                    "<|endoftext|>",
                ]
            )
            pieces.append(piece)
        text = "".join(pieces) + random.choice([end, end, "", end + "\n"])
        yield text


def is_known(text, expected, found, is_bare):
    """Whether rlhf reads a turn otherwise, with a reason: a bare call that is whole counts though its end-of-turn token is missing, which trl
    takes as a part of the JSON."""
    return is_bare and text.rstrip().endswith("}") and "tool_calls" not in expected and "tool_calls" in found


def turns_are_read_as_by_trl(asked, scratch):
    wrong, count, known, kinds = [], 0, 0, set()
    chance = random.Random(49)
    for template in read_templates(asked, scratch):
        if template.name.startswith("nemotron_3"):
            # trl takes all before the first end of reasoning for reasoning, and no beginning of it as a tag.
            continue
        tokenizer, is_bare = template.with_schema(), "llama3" in template.name
        form = "bare" if is_bare else "parameters" if template.name.startswith(PARAMETERS) else "tagged"
        prompt = template.ids([user("a")], tools=TOOLS, add_generation_prompt=True)
        for text in turns(chance, form, tokenizer.eos_token):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if not ids:
                continue
            tools = chance.choice([TOOLS, TOOLS, None])
            expected = parse_response(tokenizer, ids, prefix=prompt, tools=tools)
            found = asked.ask(turn=ids, tools=tools or [])
            count += 1
            kinds.add((len(expected.get("tool_calls", [])), bool(found.get("malformed"))))
            # Numbers beyond 64 bits, NaN and lone surrogates do not occur here: rlhf takes a call with the last two as malformed.
            if is_known(text, expected, found.get("message", {}), is_bare):
                known += 1
            elif found.get("message") != expected:
                wrong.append(f"{template.name}, {text!r}: expected {expected}, found {found}")
            elif asked.ask(turn=ids, after=prompt, tools=tools or []) != found:
                wrong.append(f"{template.name}, {text!r}: read otherwise after its prompt")
    expect(len(kinds) >= 4, f"expected turns of several kinds, found {kinds}")
    expect(known * 5 < count, f"expected few known differences, found {known} of {count}")
    check_all(wrong, count, 2000)


def calls_after_a_python_tag_are_without_it(asked, scratch):
    """The second known difference: trl leaves the tag as the content."""
    template = Template(asked, tempfile.mkdtemp(dir=scratch), "llama3_1", sources()["llama3_1"])
    tokenizer = template.with_schema()
    ids = tokenizer.encode('<|python_tag|>{"name": "now", "parameters": {}}<|eot_id|>', add_special_tokens=False)
    expected = parse_response(tokenizer, ids, prefix=template.ids([user("a")], add_generation_prompt=True), tools=TOOLS)
    found = asked.ask(turn=ids, tools=TOOLS)["message"]
    expect(found == {**expected, "content": ""} and expected["content"] == "<|python_tag|>", f"trl: {expected}, rlhf: {found}")


def main():
    program = binary(__doc__)
    asked = Asked(program)
    with tempfile.TemporaryDirectory() as scratch:
        return run_checks(
            [
                ("templates are read, refused and changed as by trl", lambda: verdicts_are_those_of_trl(asked, scratch)),
                ("prompts with tools are those of trl", lambda: prompts_are_those_of_trl(asked, scratch)),
                ("the tokens between turns are those of trl", lambda: suffixes_are_those_of_trl(asked, scratch)),
                ("turns are read as by trl", lambda: turns_are_read_as_by_trl(asked, scratch)),
                ("calls after a python tag are without it", lambda: calls_after_a_python_tag_are_without_it(asked, scratch)),
            ]
        )


if __name__ == "__main__":
    sys.exit(main())
