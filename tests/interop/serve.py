"""Uses `rlhf serve` with OpenAI's own Python client.

    python tests/interop/serve.py target/release/rlhf

Serves a tiny model with a chat template and checks completions, chats, streams, log-probabilities, stop strings and errors against
`rlhf generate` and `rlhf logprobs`; serves one that calls a tool and answers with its result. Prints one line per check and a total. Exit code 1 if any failed. Needs openai; no network.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path

import openai
from runner import ROOT, Failure, binary, copy_model, expect, run_checks

GOLDEN = ROOT / "tests/golden"

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOLERANCE = 2e-5


def rows(work, command, rows=()):
    """The rows that a command writes, with `rows` on standard input."""
    done = subprocess.run(
        [str(BINARY), *command],
        cwd=work,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        input="".join(json.dumps(row) + "\n" for row in rows),
        capture_output=True,
        text=True,
        timeout=120,
    )
    expect(done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-800:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def readable(text):
    """Without bytes that are no characters, which a stream shows before others make a character of them."""
    return text.replace("\N{REPLACEMENT CHARACTER}", "")


def refused(call, kind, status, param):
    try:
        call()
    except kind as error:
        expect(error.status_code == status, f"status {error.status_code}, expected {status}")
        expect(error.param == param, f"param {error.param}, expected {param}")
        return error
    raise Failure(f"expected {kind.__name__}, got a response")


def checks(work, client):
    prompts = ["The movie was", "A film", "2024"]
    generate = ["generate", "--model", "policy", "--input_format", "jsonl", "--max_new_tokens", "10"]

    def completions():
        sampled = [*generate, "--seed", "5", "--num_return_sequences", "2", "--top_p", "0.9"]
        expected = rows(work, sampled, [{"prompt": prompt} for prompt in prompts])
        found = client.completions.create(model="policy", prompt=prompts, max_tokens=10, seed=5, n=2, top_p=0.9)
        expect(len(found.choices) == 6, f"{len(found.choices)} choices")
        for choice, row in zip(found.choices, expected):
            expect(readable(choice.text) == readable(row["completion"]), f"{choice.text!r}: {row['completion']!r}")
            expect(choice.finish_reason == row["finish_reason"], choice.finish_reason)
        tokens = sum(row["num_tokens"] for row in expected)
        expect(found.usage.completion_tokens == tokens, f"{found.usage}")

    def streams():
        settings = {"model": "policy", "prompt": prompts[0], "max_tokens": 10, "seed": 6}
        whole = client.completions.create(**settings)
        chunks = list(client.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        expect(text == whole.choices[0].text and len(chunks) > 3, f"{text!r} in {len(chunks)} chunks")
        expect(chunks[-1].usage == whole.usage, f"{chunks[-1].usage}")

    def chats():
        messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "A film?"}]
        row = rows(work, [*generate, "--seed", "7"], [{"prompt": messages}])[0]
        settings = {"model": "policy", "messages": messages, "max_completion_tokens": 10, "seed": 7}
        found = client.chat.completions.create(**settings)
        content = found.choices[0].message.content
        expect(readable(content) == readable(row["completion"]), f"{content!r}: {row['completion']!r}")
        expect(found.usage.prompt_tokens == len(row["prompt_ids"]), f"{found.usage}")
        chunks = client.chat.completions.create(**settings, logprobs=True, top_logprobs=3, stream=True)
        choices = [choice for chunk in chunks for choice in chunk.choices]
        parts = [choice.delta.content for choice in choices if choice.delta.content]
        expect("".join(parts) == content and choices[0].delta.role == "assistant", f"{parts}")
        expect(choices[-1].finish_reason == row["finish_reason"], f"{choices[-1]}")
        logprobs = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
        expect(len(logprobs) == row["num_tokens"], f"{len(logprobs)} tokens")
        for token, logprob in zip(logprobs, row["logprobs"]):
            expect(abs(token.logprob - logprob) < TOLERANCE and len(token.top_logprobs) == 3, f"{token}")

    def likelihoods():
        text = "The movie was a waste of time"
        found = client.completions.create(model="policy", prompt=text, max_tokens=0, logprobs=1, echo=True)
        choice = found.choices[0]
        expect(choice.text == text, choice.text)
        row = rows(work, [*generate, "--do_sample", "false"], [{"prompt": text}])[0]
        ids = row["prompt_ids"]
        measured = rows(work, ["logprobs", "--model", "policy"], [{"prompt_ids": ids[:1], "completion_ids": ids[1:]}])
        pairs = list(zip(choice.logprobs.token_logprobs[1:], measured[0]["logprobs"], strict=True))
        expect(all(abs(a - b) < TOLERANCE for a, b in pairs), f"{pairs}")
        expect(choice.logprobs.token_logprobs[0] is None and "".join(choice.logprobs.tokens) == text, "the first token")
        # As lm-evaluation-harness decides whether a text is the greedy one.
        whole = client.completions.create(
            model="policy", prompt=[ids + row["completion_ids"]], max_tokens=1, logprobs=1, echo=True, temperature=0
        )
        logprobs = whole.choices[0].logprobs
        greedy = zip(logprobs.token_logprobs[len(ids) :], logprobs.top_logprobs[len(ids) :])
        expect(all(own == max(top.values()) for own, top in greedy), "greedy tokens are the likeliest")
        expect(math.isfinite(sum(logprobs.token_logprobs[1:])), "not finite")

    def stops():
        settings = {"model": "policy", "prompt": prompts[0], "max_tokens": 24, "seed": 5}
        text = client.completions.create(**settings).choices[0].text
        pairs = (text[at : at + 2] for at in range(len(text) // 3, len(text) - 1))
        stop = next(pair for pair in pairs if readable(pair) == pair)
        for stream in (False, True):
            found = client.completions.create(**settings, stop=[stop, "not in it"], stream=stream)
            choices = [choice for part in (found if stream else [found]) for choice in part.choices]
            short = "".join(choice.text for choice in choices)
            expect(short == text.split(stop)[0] and choices[-1].finish_reason == "stop", f"{short!r} of {text!r}")

    def errors():
        create, chat = client.completions.create, client.chat.completions.create
        messages = [{"role": "user", "content": "A film?"}]
        error = refused(lambda: create(model="gpt-4", prompt="a"), openai.NotFoundError, 404, "model")
        expect(error.code == "model_not_found", f"{error.code}")
        error = refused(lambda: create(model="policy", prompt="a", max_tokens=64), openai.BadRequestError, 400, "max_tokens")
        expect(error.code == "context_length_exceeded", f"{error.code}")
        for name, value in {"best_of": 3, "presence_penalty": 1, "suffix": "b", "temperature": -1}.items():
            refused(lambda: create(model="policy", prompt="a", **{name: value}), openai.BadRequestError, 400, name)
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        for name, value in {"tools": tools, "response_format": {"type": "json_object"}, "top_logprobs": 2}.items():
            refused(lambda: chat(model="policy", messages=messages, **{name: value}), openai.BadRequestError, 400, name)
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
        refused(lambda: chat(model="policy", messages=image), openai.BadRequestError, 400, "messages[0].content")

    def models():
        names = [model.id for model in client.models.list()]
        expect(names == ["policy"] and client.models.retrieve("policy").id == "policy", f"{names}")

    yield "openai: completions are the responses of rlhf generate", completions
    yield "openai: a stream has the text of the whole, and its usage", streams
    yield "openai: chats are the responses of rlhf generate, with log-probabilities, streaming too", chats
    yield "openai: echo has the log-probabilities of rlhf logprobs, and greedy tokens are the likeliest", likelihoods
    yield "openai: stop strings end a text before them", stops
    yield "openai: errors are the client's own exceptions", errors
    yield "openai: the list of models", models


def tool_checks(client):
    add = json.loads((GOLDEN / "trl_tools/schemas.json").read_text())["add"]
    settings = {"model": "caller", "tools": [add], "temperature": 0}

    def run(call):
        expect(call.type == "function" and call.function.name == "add", f"{call}")
        return str(sum(json.loads(call.function.arguments).values()))

    def loop(ask):
        """OpenAI's loop: messages go back as they came, and each call gets the message of its result."""
        messages = [{"role": "user", "content": "3+4"}]
        for _ in range(3):
            reason, message = ask(messages)
            messages.append(message)
            if reason != "tool_calls":
                break
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": run(call)})
        expect(len(messages) == 4 and reason == "stop" and messages[-1].content == "7", f"{messages}")
        expect(messages[1].content is None, f"{messages[1]}")

    def whole():
        def ask(messages):
            choice = client.chat.completions.create(**settings, messages=messages).choices[0]
            return choice.finish_reason, choice.message

        loop(ask)

    def dumped():
        """As agents keep messages: as dictionaries, with fields that are null."""
        messages = [{"role": "user", "content": "2+6"}]
        message = client.chat.completions.create(**settings, messages=messages).choices[0].message
        messages += [message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "8"}]
        answer = client.chat.completions.create(**settings, messages=messages).choices[0].message
        expect(answer.content == "8" and answer.tool_calls is None, f"{answer}")

    def helper():
        def ask(messages):
            with client.chat.completions.stream(**settings, messages=messages) as stream:
                kinds = [event.type for event in stream]
                choice = stream.get_final_completion().choices[0]
            calls = choice.finish_reason == "tool_calls"
            expect(("tool_calls.function.arguments.done" in kinds) == calls, f"{kinds}")
            expect(("content.delta" in kinds) != calls, f"{kinds}")
            return choice.finish_reason, choice.message

        loop(ask)

    def chunks():
        """As clients put a stream together without the helper: calls by their index, arguments joined."""
        stream = client.chat.completions.create(
            **settings, messages=[{"role": "user", "content": "3+4"}], n=2, stream=True, stream_options={"include_usage": True}
        )
        calls, content, reasons, usage = {}, "", {}, None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                content += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason
                for call in choice.delta.tool_calls or []:
                    kept = calls.setdefault((choice.index, call.index), {"id": call.id, "name": call.function.name, "arguments": ""})
                    kept["arguments"] += call.function.arguments
        expect(content == "" and reasons == {0: "tool_calls", 1: "tool_calls"}, f"{content!r} {reasons}")
        expect(sorted(calls) == [(0, 0), (1, 0)] and usage.completion_tokens > 0, f"{calls} {usage}")
        expect(all(json.loads(call["arguments"]) == {"a": 3, "b": 4} for call in calls.values()), f"{calls}")
        expect(calls[0, 0]["id"] != calls[1, 0]["id"], f"{calls}")

    def strict():
        """Tools whose arguments the client parses, which it does for those that ask to be `strict`."""
        tool = {"type": "function", "function": {**add["function"], "strict": True}}
        asked = {**settings, "tools": [tool], "messages": [{"role": "user", "content": "3+4"}]}
        found = client.chat.completions.parse(**asked).choices[0].message.tool_calls
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0].message.tool_calls
        for calls in (found, streamed):
            expect([call.function.parsed_arguments for call in calls] == [{"a": 3, "b": 4}], f"{calls}")

    def choices():
        messages = [{"role": "user", "content": "3+4"}]
        for choice in ("auto", "required", {"type": "function", "function": {"name": "add"}}):
            for parallel in (True, False):
                found = client.chat.completions.create(
                    **settings, messages=messages, tool_choice=choice, parallel_tool_calls=parallel
                )
                expect(run(found.choices[0].message.tool_calls[0]) == "7", f"{choice}: {found}")
        found = client.chat.completions.create(**settings, messages=messages, tool_choice="none", max_tokens=20)
        expect(found.choices[0].message.tool_calls is None, f"{found}")

    def errors():
        chat = client.chat.completions.create
        lost = [{"role": "user", "content": "a"}, {"role": "tool", "tool_call_id": "call_0", "content": "7"}]
        error = refused(lambda: chat(**settings, messages=lost), openai.BadRequestError, 400, "messages[1].tool_call_id")
        expect("call_0" in error.message, error.message)
        user = lost[:1]
        for name, value in {"functions": [add["function"]], "function_call": {"name": "add"}, "tool_choice": "any"}.items():
            refused(lambda: chat(**settings, messages=user, **{name: value}), openai.BadRequestError, 400, name)

    yield "openai: tools: the loop from a call to its result to the answer", whole
    yield "openai: tools: messages that are kept as dictionaries", dumped
    yield "openai: tools: the same loop with the client's own streams", helper
    yield "openai: tools: deltas of calls, by index, with the usage", chunks
    yield "openai: tools: arguments that the client parses", strict
    yield "openai: tools: tool_choice and parallel_tool_calls", choices
    yield "openai: tools: errors are the client's own exceptions", errors


def exits(server):
    server.send_signal(signal.SIGINT)
    code = server.wait(timeout=30)
    expect(code == 0, f"exit code {code}")


@contextlib.contextmanager
def served(work, name):
    """A server of the model `name` in `work`, and a client."""
    server = subprocess.Popen([BINARY, "serve", name, "--port", "0"], cwd=work, stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().split()[-1]
        yield server, openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
    finally:
        server.kill()
        server.wait()


def main():
    with tempfile.TemporaryDirectory(prefix="rlhf-serve-") as folder:
        work = Path(folder)
        copy_model(work / "policy")
        (work / "policy/chat_template.jinja").write_text(TEMPLATE)
        shutil.copytree(GOLDEN / "tools_policy", work / "caller")
        with served(work, "policy") as (server, client), served(work, "caller") as (_, caller):
            ends = ("the server exits with 0 after SIGINT", lambda: exits(server))
            return run_checks(chain(checks(work, client), tool_checks(caller), [ends]))


if __name__ == "__main__":
    BINARY = binary(__doc__.split("\n")[0])
    sys.exit(main())
