"""Renders the templates of `chat/` with transformers, for `chat/golden.json`.

    python make_chat.py            # make golden.json again
    python make_chat.py --check    # compare it with what transformers renders now

Made with transformers 5.23.0 and jinja2 3.1.6. The templates are ours, in the styles that are common.
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "chat" / "golden.json"
TOKENIZER = "gpt2"  # of models/


def user(text, **extra):
    return {"role": "user", "content": text, **extra}


def assistant(text, **extra):
    return {"role": "assistant", "content": text, **extra}


SYSTEM = {"role": "system", "content": " Answer in one word.\n"}
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"city": "Zürich", "days": 2, "near": 0.5}}}
CONVERSATIONS = {
    "question": [user("What is the capital of France?")],
    "answered": [user("  Hi there \n"), assistant(" Hello. ")],
    "system": [SYSTEM, user("Two and two?")],
    "long": [SYSTEM, user("One?"), assistant("1"), user("Two?\n\nAnd <|endoftext|>three?"), assistant("2 & <3>")],
    "out_of_turn": [user("One?"), user("Two?")],
    "unknown_role": [user("One?"), {"role": "narrator", "content": "silence"}],
    "post": [user("my dog\nsleeps", subreddit="dogs", title="Sleep", extra={"ups": 3, "tags": ["a", None], "x": 1.0})],
    "nulls": [user("Hi", title=None), {"role": "assistant", "content": "naïve 東京 🙂", "tool_calls": None}],
    "thought": [user("Why?"), assistant("<think>\nhmm\n</think>\n\nBecause."), user("So?"), assistant("<think>\nah\n</think>\nYes.")],
    "reasoning": [user("Why?"), assistant("Because.", reasoning="as it is")],
    "call": [user("Weather?"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": '{"rain": true}'}],
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"city": {"type": "string"}}, "strict": True}}
# Conversations for some templates only.
OF_TEMPLATES = {
    "override": (["modes.jinja"], [{"role": "system", "content": "Be brief. /override /no_think"}, user("Hi")]),
    "mode": (["modes.jinja"], [{"role": "system", "content": "Be brief. /no_think\n"}, user("Hi"), assistant("\n\nHo")]),
    "parts": (
        ["parts.jinja"],
        [
            {"role": "system", "content": [{"type": "text", "text": " Be brief. "}]},
            user([{"type": "text", "text": " One \n"}, {"type": "text", "text": " two? "}]),
            assistant([{"type": "text", "text": "Three."}]),
            user("Four?"),
        ],
    ),
}
KWARGS = {"question": [{}, {"enable_thinking": False}, {"eos_token": "<|other|>"}]}
KWARGS_OF_TEMPLATES = {("modes.jinja", "system"): [{}, {"tools": [TOOL]}, {"xml_tools": [TOOL], "python_tools": ["f(x)"]}]}


def cases():
    tokenizer = AutoTokenizer.from_pretrained(HERE / "models" / TOKENIZER)
    for template in sorted((HERE / "chat").glob("*.jinja")):
        # As transformers reads a chat_template.jinja: in text mode.
        tokenizer.chat_template = template.read_text(encoding="utf-8")
        own = {name: messages for name, (templates, messages) in OF_TEMPLATES.items() if template.name in templates}
        for name, messages in (CONVERSATIONS | own).items():
            for prompt in (False, True):
                for kwargs in KWARGS_OF_TEMPLATES.get((template.name, name), KWARGS.get(name, [{}])):
                    case = {"template": template.name, "messages": name, "add_generation_prompt": prompt, "kwargs": kwargs}
                    try:
                        case["text"] = tokenizer.apply_chat_template(
                            messages, tokenize=False, add_generation_prompt=prompt, **kwargs
                        )
                        case["ids"] = tokenizer(case["text"], add_special_tokens=False)["input_ids"]
                    except TemplateError as error:
                        case["error"] = str(error)
                    yield case


conversations = CONVERSATIONS | {name: messages for name, (_, messages) in OF_TEMPLATES.items()}
golden = {"tokenizer": TOKENIZER, "conversations": conversations, "cases": list(cases())}
lines = [json.dumps(case, ensure_ascii=False) for case in golden["cases"]]
head = json.dumps({key: golden[key] for key in ("tokenizer", "conversations")}, ensure_ascii=False)
text = head[:-1] + ', "cases": [\n' + ",\n".join(lines) + "\n]}\n"
if "--check" in sys.argv:
    assert GOLDEN.read_text(encoding="utf-8") == text, "golden.json differs from what transformers renders"
else:
    GOLDEN.write_text(text, encoding="utf-8")
print(len(lines), "cases")
