"""Checks the worker for tools and environments of Python against transformers and TRL.

    python tests/interop/environments.py

The schemas that the worker makes without transformers are compared with those of `get_json_schema`, on functions of many forms; the results of
calls with those of the loop of TRL's GRPOTrainer, which calls the same functions and classes. Prints one line per check and a total. Exit code 1
if any failed.

Needs transformers and trl; no network.
"""

import asyncio
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from runner import ROOT, expect, run_checks
from transformers.utils import get_json_schema

WORKER = ROOT / "crates/rlhf/src/environment/worker.py"
LEAST_SCHEMAS = 150

HINTS = (
    "int", "float", "str", "bool", "list", "dict", "tuple", "None", "Any", "list[int]", "List[str]", "list[list[float]]", "dict[str, int]",
    "Dict[str, list[str]]", "tuple[int, str]", "Tuple[float, bool]", "Optional[int]", "int | None", "Union[int, str]", "Union[str, int, None]",
    "list[int] | str", "Union[list, tuple]", 'Literal["a", "b"]', 'Literal[1, "b", None]', "Colour", "Level", "Optional[Colour]",
    "Annotated[int, 'more']", "list[Colour]", "dict[str, Any]", "Optional[Literal[1, 2]]", "Union[list[int], list[str]]", "dict[str, int | None]",
    "Sequence[int]", "object", "tuple[int]", "tuple[int, ...]", "set[int]", "Callable", "'int'",
)
TEXTS = (
    "The value.", "The value,\n            over two lines.", "The value\n\n            after a blank line.", "A choice (choices: [\"a\", \"b\"])",
    "A choice (Choices: [1, 2]) ", "A choice (choices: [\" a \"]) of few", "", "With a colon: here", "With a list:\n                x: deeper\n                y: too",
    "Ends with Raises: something", "naïve 你好",
)
DOCS = (
    "Does it.\n\n        Args:\n            {args}",
    "Does it.\n\n        Args:\n            {args}\n\n        Returns:\n            The result,\n            in two lines.",
    "Does it.\n\n        Args:\n            {args}\n\n        Returns: the result.\n\n        Raises:\n            ValueError: never.",
    "Does it.\n        On two lines.\n\n        Example:\n            f(1)\n\n        Args:\n            {args}\n        Returns:\n            int: x\n        Raises:\n            E",
    "Args:\n            {args}",
    "Does it. Args: none.\n\n        Args:\n            {args}",
    "Does it.\n\n        Args:\n\n            {args}\n",
    "Does it.\n\n        Arguments:\n            {args}",
    "Returns: nothing.\n\n        Args:\n            {args}",
    "Does it.\n\n        Args:\n            of no use\n            {args}\n        more",
)
HEADER = '''
import enum
from typing import *

class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"

class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2
'''


def functions():
    """The source of a module with functions of many forms, and their names."""
    source, names = [HEADER], []

    def add(arguments, doc, result=""):
        names.append(f"f{len(names)}")
        text = f'\n    r"""{doc}\n    """' if doc is not None else ""
        source.append(f"def {names[-1]}({arguments}){result}:{text}\n    return 1\n")

    for hint in HINTS:
        add(f"x: {hint}", DOCS[0].format(args="x: The value."))
        add("x: int = 1", DOCS[1].format(args="x: The value."), f" -> {hint}")
    for doc, text in itertools.product(DOCS, TEXTS):
        add("x: str, yy: float = 0.5", doc.format(args=f"x: {text}\n            yy: Another."))
    for doc in DOCS:
        add("x: str, y: int", doc.format(args="y: Last first.\n              x: Deeper.\n            x: First."))
        add("x: str, y: int", doc.format(args="x:\n            y: Taken.\n            y: Another."))
        add("x: str", doc.format(args="x (str): With a type."))
        add("x: str, *more: int, **named: str", doc.format(args="x: One.\n            more: Two.\n            named: Three."))
    for doc in (None, "", "  ", "Does it.", "Does it.\n\n    Returns:\n        A number."):
        add("", doc)
        add("x", doc)
    return "\n".join(source), names


def load_worker():
    """The worker as a module, without its main loop."""
    found = {"__name__": "worker"}
    exec(compile(WORKER.read_text(), str(WORKER), "exec"), found)
    return found


def schema_or_none(make, function, failures):
    try:
        return make(function)
    except failures:
        return None


def schemas_are_those_of_transformers():
    worker = load_worker()
    source, names = functions()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "many_functions.py").write_text(source)
        sys.path.insert(0, folder)
        module = importlib.import_module("many_functions")
        refused = 0
        for name in names:
            function = getattr(module, name)
            theirs = schema_or_none(get_json_schema, function, Exception)
            ours = schema_or_none(worker["schema_of"], function, worker["Failure"])
            refused += theirs is None
            shown = f"{name}: {function.__doc__!r}"
            expect(ours == theirs, f"{shown}: expected {theirs}, found {ours}")
            expect(json.dumps(ours) == json.dumps(theirs), f"{shown}: expected the order of {theirs}, found {ours}")
    expect(len(names) - refused >= LEAST_SCHEMAS, f"expected at least {LEAST_SCHEMAS} schemas, found {len(names) - refused}")


GAMES = '''
import asyncio

log = []

def plain(x: int) -> list:
    """Plain.

    Args:
        x: A number.
    """
    log.append(x)
    if x == 3:
        raise ValueError("three")
    return {"log": tuple(log)}

async def later(x: int) -> int:
    """Later.

    Args:
        x: A number.
    """
    await asyncio.sleep(0)
    log.append(-x)
    if x == 4:
        raise KeyError(x)
    return len(log)

class Game:
    def reset(self, **row):
        self.seen = sorted(row)
        return None

    async def wait(self, x: int) -> str:
        """Waits.

        Args:
            x: A number.
        """
        return f"{x} {self.seen}"

    def plain(self, x: int) -> str:
        """Has the name of a tool.

        Args:
            x: A number.
        """
        return "mine"

    def _hidden(self):
        pass

    def get_reward(self):
        return 1
'''


def asked(process, request):
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def batch_of_calls():
    names = ("plain", "later", "wait", "lost", "plain", "later", "_hidden", "reset")
    return [[{"name": name, "arguments": {"x" if turn + row != 5 else "z": turn + row}} for turn, name in enumerate(names)] for row in range(3)]


def trl_messages(module, batch):
    """The tool messages of TRL's loop for one turn of a batch: GRPOTrainer's own code, on a trainer that generates nothing."""
    from trl import GRPOTrainer

    class Stop(Exception):
        pass

    class Trainer:
        max_tool_calling_iterations = 1
        use_vllm = False

        def _get_tool_suffix_ids(self, messages):
            self.messages.append([(message["name"], message["content"]) for message in messages])
            if len(self.messages) == len(batch):
                raise Stop
            return []

    trainer, games = Trainer(), [module.Game() for _ in batch]
    trainer.messages, trainer._sync_tool_dicts, trainer._async_tool_dicts = [], [], []
    for game in games:
        game.reset(prompt="p", target=1)
        tools = [module.plain, module.later, game.plain, game.wait]
        is_async = asyncio.iscoroutinefunction
        trainer._sync_tool_dicts.append({tool.__name__: tool for tool in tools if not is_async(tool)})
        trainer._async_tool_dicts.append({tool.__name__: tool for tool in tools if is_async(tool)})
    trainer.async_loop = asyncio.new_event_loop()
    threading.Thread(target=trainer.async_loop.run_forever, daemon=True).start()
    calls = [[{"type": "function", "function": call} for call in row] for row in batch]
    completions = [[{"role": "assistant", "content": "", "tool_calls": row}] for row in calls]
    size = len(batch)
    try:
        GRPOTrainer._tool_call_loop(trainer, [[] for _ in batch], [[1]] * size, [[1]] * size, completions, None, None, {})
    except Stop:
        return trainer.messages
    raise AssertionError("TRL's loop made no messages")


def results_are_those_of_trl():
    batch = batch_of_calls()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "games.py").write_text(GAMES)
        sys.path.insert(0, folder)
        theirs = trl_messages(importlib.import_module("games"), batch)
        process = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=folder
        )
        first = {"tools": ["games.plain", "games.later"], "environments": [[None, "games.Game"]], "limit": 64000}
        ready = asked(process, first)
        expect("error" not in ready, f"the worker: {ready}")
        for row in range(len(batch)):
            reply = asked(process, {"id": row + 1, "open": f"s{row}", "row": {"prompt": "p", "target": 1}, "seed": 0})
            names = [tool["function"]["name"] for tool in reply["tools"]]
            expect(names == ["plain", "later", "plain", "wait"], f"expected tools before methods by name, found {names}")
        ours = []
        for row, calls in enumerate(batch):
            reply = asked(process, {"id": 10 + row, "session": f"s{row}", "calls": calls})
            ours.append([(result["name"], result["content"]) for result in reply["results"]])
        process.stdin.close()
        process.wait()
    expect(ours == theirs, f"expected {theirs}, found {ours}")


def main():
    checks = [
        ("schemas of functions are those of transformers", schemas_are_those_of_transformers),
        ("results of calls, their order and their errors are those of TRL's loop", results_are_those_of_trl),
    ]
    return run_checks(checks)


if __name__ == "__main__":
    sys.exit(main())
