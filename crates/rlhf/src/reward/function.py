"""Calls a Python reward function for rlhf, with the arguments that TRL's GRPOTrainer passes.

rlhf starts this program once per function, with the user's Python, and writes JSON lines to its standard input: first the path of
the function, `module.function`, then one object per response, and between batches the state of the run. The function is called with whole
batches, on the main thread. The replies go to what was the standard output of this program: lines with what the function logs, then one line
per response, with the `id` of its request. The function's own output goes to standard error, where rlhf shows it.
"""

import sys

# The working directory may hold a file with the name of a module that this program imports.
sys.path = [path for path in sys.path if path]

import asyncio  # noqa: E402
import importlib  # noqa: E402
import inspect  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import queue  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402

# Seconds that a call may still run after the input has ended.
LEFT_AFTER_INPUT = 5

# The process that replies. If the function forks and its child returns from it too, the child must not reply.
PROCESS = os.getpid()

# Columns of a row that the function gets under another name.
RENAMED = ("prompt", "completion", "completion_ids")

# Maximum length of a logged column in characters of JSON.
LONGEST_COLUMN = 1 << 20

# Exceptions that another call would raise again, wherever their classes are defined; connection errors are not among them.
LASTING = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    SyntaxError,
    TypeError,
    ValueError,
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


class Failure(Exception):
    """A batch without scores: the reason, the row that it concerns, and whether another call may succeed."""

    def __init__(self, message, row=None, retry=False):
        super().__init__(message)
        self.row = row
        self.retry = retry


class TrainerState:
    """The state of the run in the fields of transformers' TrainerState, as far as it is known outside of a trainer."""

    def __init__(self, known=()):
        self.global_step = self.max_steps = self.num_train_epochs = self.num_input_tokens_seen = 0
        self.epoch = 0.0
        self.logging_steps = self.eval_steps = self.save_steps = self.train_batch_size = None
        self.total_flos = 0
        self.log_history = []
        self.best_metric = self.best_global_step = self.best_model_checkpoint = None
        self.is_local_process_zero = self.is_world_process_zero = True
        self.is_hyper_param_search = False
        self.trial_name = self.trial_params = None
        self.stateful_callbacks = {}
        self.__dict__.update(known)


def take_pipes():
    """Returns standard input and output of this process as files, and gives the function an empty input and standard error."""
    lines = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)
    return lines, replies


def load(path):
    """Imports the function, with the working directory on the path, as TRL's script does."""
    module, _, name = path.rpartition(".")
    sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise Failure(f"no module `{error.name}` in {os.getcwd()}, nor among the packages of {sys.executable}")
        raise Failure(f"cannot import `{module}`: {described(error, None)}")
    except BaseException as error:
        raise Failure(f"cannot import `{module}`: {described(error, None)}")
    place = getattr(imported, "__file__", None)
    if not hasattr(imported, name):
        raise Failure(f"the module `{module}` ({shown(place)}) has no function `{name}`")
    function = getattr(imported, name)
    if inspect.isclass(function) or not callable(function):
        kind = "a class" if inspect.isclass(function) else f"of the type {type(function).__name__}"
        raise Failure(f"`{name}` of the module `{module}` ({shown(place)}) is {kind}: expected a function")
    return function


def modules(path):
    """Returns the files of the imported modules that are in the working directory, and the file of the function's module."""
    here = os.path.join(os.getcwd(), "")
    function_module = path.rpartition(".")[0]
    files = set()
    for name, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None)
        # A virtual environment may be in the working directory.
        is_mine = isinstance(place, str) and place.startswith(here) and "site-packages" not in place
        if isinstance(place, str) and (name == function_module or is_mine):
            files.add(shown(place))
    return sorted(files)


def shown(place):
    """Returns the path of a file, relative to the working directory if it is below."""
    if not place:
        return "without a file"
    below = os.path.join(os.getcwd(), "")
    return place[len(below) :] if place.startswith(below) else place


def described(error, home):
    """Describes an exception in one line, with its last place in the file `home`, or else in any file."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({shown(error.filename)}:{error.lineno})"
    kind, text = type(error).__name__, " ".join(str(error).split())[:400]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    frames = [frame for frame in frames if frame.filename == home] or frames
    place = f" ({shown(frames[-1].filename)}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return f"{kind}: {text}{place}" if text else f"{kind}{place}"


def is_user_code(file):
    """Returns whether a file of a traceback belongs neither to this program nor to the import machinery."""
    return file != load.__code__.co_filename and not file.startswith("<frozen importlib") and file != importlib.__file__


def row_prompt(line):
    """Returns the row's prompt if it is a list of messages, or else the prompt's text."""
    row = line["row"]
    prompt = row.get("prompt")
    prompt = row.get("query") if prompt is None else prompt
    is_messages = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    return prompt if is_messages else line["prompt"]


def arguments(batch):
    """Returns the arguments of a call. If a row lacks a column that another row has, its value there is None."""
    columns = list(dict.fromkeys(name for line in batch for name in line["row"] if name not in RENAMED))
    named = {name: [line["row"].get(name) for line in batch] for name in columns}
    prompts, completions = [row_prompt(line) for line in batch], []
    for prompt, line in zip(prompts, batch):
        text = line["response"]
        if "messages" in line:
            # Turns with tool calls and their results.
            text = line["messages"]
        elif isinstance(prompt, list):
            # A response that continues the assistant's message forms one message with it, as in TRL.
            begun = prompt[-1].get("content") if prompt and prompt[-1].get("role") == "assistant" else None
            text = [{"role": "assistant", "content": (begun if isinstance(begun, str) else "") + text}]
        completions.append(text)
    ids = [line["response_ids"] for line in batch]
    return {**named, "prompts": prompts, "completions": completions, "completion_ids": ids}


def is_reported(error):
    """Returns whether the function runs in another process that reports the exception itself, through the bridge of rlhf's Python package."""
    return getattr(error, "__rlhf_quiet__", False)


def may_succeed(error):
    """Returns whether another call may succeed: after an error of a connection or a package, but not after an error of the function itself."""
    if is_reported(error):
        return False
    if isinstance(error, json.JSONDecodeError):
        return True  # Most often the reply of a service is broken.
    if isinstance(error, LASTING):
        return isinstance(error, OSError) and not isinstance(error, LASTING[-5:])
    return isinstance(error, OSError) or type(error).__module__ != "builtins"


def print_traceback(error):
    """Prints the traceback of an exception, without the frames of this program."""
    whole = traceback.TracebackException(type(error), error, error.__traceback__)
    part = whole
    while part is not None:
        part.stack = traceback.StackSummary.from_list([frame for frame in part.stack if is_user_code(frame.filename)])
        part = part.__cause__ or part.__context__
    print("".join(whole.format()), file=sys.stderr, end="", flush=True)


class Log:
    """The metrics and columns that the function logs during a call."""

    def __init__(self):
        self.metrics, self.columns = [], {}

    def log_metric(self, name, value):
        self.metrics.append((str(name), float(value)))

    def log_extra(self, column, values):
        self.columns.setdefault(str(column), []).extend(values)

    def lines(self, rows):
        """Yields the metrics and columns as JSON objects, for a batch of `rows` responses."""
        for name, value in self.metrics:
            yield {"log_metric": name, "value": value if math.isfinite(value) else None}
        for column, values in self.columns.items():
            values = [plain(value) for value in values]
            if len(values) != rows:
                print(f"log_extra: expected {rows} values of `{column}`, one per completion, found {len(values)}: left out")
            elif len(json.dumps(values)) > LONGEST_COLUMN:
                print(f"log_extra: the values of `{column}` have more than {LONGEST_COLUMN} characters: left out")
            else:
                yield {"log_extra": column, "values": values}


def plain(value):
    """Returns a value as JSON can write it, or else its text."""
    try:
        value = value.item() if hasattr(value, "item") else value
        return json.loads(json.dumps(value, allow_nan=False))
    except Exception:
        return str(value)


def accepted(function, named):
    """Returns the part of the arguments `named` that the function accepts: all, unless it lists its arguments without `**kwargs`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return named
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return named
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in named.items() if name in names}


class Caller:
    """Calls the function. Coroutines of all calls run on one event loop, as in TRL."""

    def __init__(self, function):
        self.function = function
        self.loop = None
        self.state = TrainerState()
        self.log = Log()
        code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
        self.home = code.co_filename if code else None

    def scores(self, batch):
        """Returns a number or None for each response."""
        log = self.log = Log()
        extra = {"trainer_state": self.state, "log_extra": log.log_extra, "log_metric": log.log_metric}
        try:
            result = self.function(**{**arguments(batch), **accepted(self.function, extra)})
            if inspect.isawaitable(result):
                result = self.awaited(result)
            is_list = not isinstance(result, (str, bytes, dict))
            scores = list(result) if is_list and hasattr(result, "__iter__") else None
        except BaseException as error:
            if is_reported(error):
                raise Failure(str(error))
            print_traceback(error)
            raise Failure(described(error, self.home), retry=may_succeed(error))
        if scores is None:
            raise Failure(f"expected a list with one score per response, found {brief(result)}")
        if len(scores) != len(batch):
            raise Failure(f"expected {len(batch)} scores, one per response, found {len(scores)}")
        return [number(score, row) for row, score in enumerate(scores)]

    def awaited(self, result):
        async def wait():
            return await result

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        return self.loop.run_until_complete(wait())


def number(score, row):
    """Returns a score as a float; it may be a number of Python, NumPy or torch."""
    if score is None:
        return None
    try:
        if isinstance(score, (str, bytes)):
            raise TypeError
        value = float(score)
    except Exception:
        raise Failure(f"expected a number or None, found {brief(score)}", row)
    if not math.isfinite(value):
        raise Failure(f"expected a finite score, found {value}", row)
    return value


def brief(value):
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:80]}..."


def read_ahead(lines):
    """Returns a queue of the lines, with None after the last. Some seconds after the last line the program ends, even if a call still runs:
    rlhf, which would read its scores, may have been killed."""
    read = queue.SimpleQueue()

    def run():
        for line in lines:
            read.put(line)
        read.put(None)
        time.sleep(LEFT_AFTER_INPUT)
        os._exit(1)

    threading.Thread(target=run, daemon=True).start()
    return read


def main():
    lines, replies = take_pipes()

    def reply(*values):
        if os.getpid() != PROCESS:
            os._exit(0)
        replies.write("".join(f"{json.dumps(value)}\n" for value in values))
        replies.flush()

    try:
        path = json.loads(lines.readline())["function"]
        caller = Caller(load(path))
    except Failure as failure:
        return reply({"error": str(failure)})
    reply({"ready": modules(path)})
    batch = []
    for line in iter(read_ahead(lines).get, None):
        line = json.loads(line)
        if "trainer_state" in line:
            caller.state = TrainerState(line["trainer_state"])
            continue
        batch.append(line)
        if batch[-1]["left"] > 0:
            continue
        try:
            scores = caller.scores(batch)
            reply(*caller.log.lines(len(batch)))
            reply(*({"score": score, "id": line["id"]} for score, line in zip(scores, batch)))
        except Failure as failure:
            reply({"error": str(failure), "row": failure.row, "retry": failure.retry})
        batch = []


main()
