"""Runs Python tools and environments for rlhf, as TRL's GRPOTrainer does.

rlhf starts this program once, with the user's Python, and writes JSON lines to its standard input. The first has the paths of the tools
(`module.function`) and of the environments (`module.Class`, with a name if there are several); the reply has their schemas. Then come the
requests of docs/guides/environments.md: open, call and close a session. Replies go to what was the standard output of this program, each with
the `id` of its request; what the user's code prints goes to standard error.

If there are tools, everything runs on the main thread, in the order of the requests. Otherwise each instance of an environment has its own
thread, so that an instance that waits does not delay the others. All coroutines run on one event loop.

If the first line has `driver`, the tools and environments are objects of another process, a Python trainer, whose package has this file as a
module. This program then passes the lines on to that process, and its replies back.
"""

import sys

if __name__ == "__main__":
    # The working directory may hold a file with the name of a module that this program imports.
    sys.path = [path for path in sys.path if path]

import asyncio  # noqa: E402
import enum  # noqa: E402
import heapq  # noqa: E402
import importlib  # noqa: E402
import inspect  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import queue  # noqa: E402
import re  # noqa: E402
import socket  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
import types  # noqa: E402
import typing  # noqa: E402

# Seconds that a call has to end in after the input has ended.
LEFT_AFTER_INPUT = 5

# The process that replies. If a tool forks and its child returns from the tool too, the child must not reply.
PROCESS = os.getpid()

# Methods of an environment that are not tools.
NOT_TOOLS = ("reset", "get_reward")

# JSON types by the Python types that JSON writes directly.
SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}

# Headings of a docstring that end the description above them.
AFTER_DESCRIPTION = ("Args:", "Returns:", "Raises:")


class Failure(Exception):
    """A session or a start that failed; its text is one line."""


# ---- Schemas -------------------------------------------------------------------------------------------------------------------------------


def schema_of(function):
    """Returns the JSON schema of a function, from its type hints and its docstring in Google's style.

    The result is that of `get_json_schema` of transformers, which need not be installed.
    """
    name = getattr(function, "__name__", "operation")
    doc = inspect.getdoc(function)
    if not doc:
        raise Failure(f"`{name}` has no docstring, which tells the model what it does")
    doc = doc.strip()
    parameters, returned = parameters_of(function, name)
    described = argument_texts(doc)
    for argument, schema in parameters["properties"].items():
        if argument not in described:
            raise Failure(f"`{name}`: its docstring has no description of the argument `{argument}` below `Args:`")
        text, choices = without_choices(described[argument], name, argument)
        if choices is not None:
            schema["enum"] = choices
        schema["description"] = text
    function_schema = {"name": name, "description": before_first(doc, AFTER_DESCRIPTION).strip(), "parameters": parameters}
    if returned is not None:
        text = returned_text(doc)
        function_schema["return"] = returned if text is None else {**returned, "description": text}
    return {"type": "function", "function": function_schema}


def parameters_of(function, name):
    """Returns the schema of the arguments, and that of the result if its type hint has one."""
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise Failure(f"`{name}`: a type hint cannot be read: {one_line(error)}")
    parameters = dict(inspect.signature(function).parameters)
    first = next(iter(parameters), None)
    receiver = first if first in ("self", "cls") and parameters[first].annotation is inspect.Parameter.empty else None
    required = []
    for argument, parameter in parameters.items():
        if argument == receiver:
            continue
        if parameter.annotation is inspect.Parameter.empty:
            raise Failure(f"`{name}`: the argument `{argument}` has no type hint")
        if parameter.default is inspect.Parameter.empty:
            required.append(argument)
    properties, returned = {}, None
    for argument, hint in hints.items():
        try:
            schema = schema_of_hint(hint)
        except Failure as failure:
            # The model does not write the result, so the type of the result needs no schema.
            if argument != "return":
                raise Failure(f"`{name}`: the argument `{argument}`: {failure}")
            continue
        if argument == "return":
            returned = schema
        elif argument != receiver:
            properties[argument] = schema
    arguments = {"type": "object", "properties": properties}
    if required:
        arguments["required"] = required
    return arguments, returned


def schema_of_hint(hint):
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return schema_of_class(hint)
    if origin is typing.Union or origin is getattr(types, "UnionType", None):
        return schema_of_union(inner)
    if origin is typing.Literal:
        return schema_of_values(list(inner), "typing.Literal")
    if origin is list:
        return {"type": "array", "items": schema_of_hint(inner[0])} if inner else {"type": "array"}
    if origin is tuple:
        if not inner:
            return {"type": "array"}
        if len(inner) == 1 or ... in inner:
            raise Failure(f"expected a list in place of the type {shown_type(hint)}")
        return {"type": "array", "prefixItems": [schema_of_hint(part) for part in inner]}
    if origin is dict:
        values = {"additionalProperties": schema_of_hint(inner[1])} if len(inner) == 2 else {}
        return {"type": "object", **values}
    raise Failure(f"no JSON schema for the type {shown_type(hint)}")


def schema_of_class(hint):
    if hint in SCALARS:
        return {"type": SCALARS[hint]}
    if hint in (list, tuple):
        return {"type": "array"}
    if hint is dict:
        return {"type": "object"}
    if hint is typing.Any:
        return {}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return schema_of_values([member.value for member in hint], hint.__name__)
    # Classes of packages that the user has imported.
    for package, name, kind in (("PIL.Image", "Image", "image"), ("torch", "Tensor", "audio")):
        if package in sys.modules and hint is getattr(sys.modules[package], name, None):
            return {"type": kind}
    raise Failure(f"no JSON schema for the type {shown_type(hint)}")


def schema_of_union(parts):
    schemas = [schema_of_hint(part) for part in parts if part is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(list(part) == ["type"] and isinstance(part["type"], str) for part in schemas):
        names = sorted({part["type"] for part in schemas})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": schemas}
    return {**schema, "nullable": True} if type(None) in parts else schema


def schema_of_values(values, where):
    if not values or any(type(value) not in SCALARS for value in values):
        raise Failure(f"{where}: expected values that are numbers, texts, booleans or None")
    names = list(dict.fromkeys(SCALARS[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def shown_type(hint):
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def before_first(text, marks):
    """Returns the text before the first occurrence of any of the marks."""
    ends = [text.find(mark) for mark in marks if mark in text]
    return text[: min(ends)] if ends else text


def argument_texts(doc):
    """Returns the descriptions below `Args:` by argument name. Lines that are indented more belong to the argument above."""
    heading = re.search(r"\n\s*Args:\n", doc)
    if not heading:
        return {}
    descriptions, name, indent, parts = {}, None, "", []
    for line in before_first(doc[heading.end() :], AFTER_DESCRIPTION[1:]).split("\n"):
        if not line.strip():
            continue
        begins = re.match(r"([ \t]*)(\w+):", line)
        is_deeper = name is not None and line.startswith((indent + " ", indent + "\t"))
        # After a name without text on its line, the next line is its description, whatever it looks like.
        if begins and not is_deeper and (name is None or any(parts)):
            if name is not None:
                descriptions[name] = " ".join(part for part in parts if part)
            indent, name = begins.groups()
            parts = [line[begins.end() :].strip()]
        elif name is not None:
            parts.append(line.strip())
    if name is not None:
        descriptions[name] = " ".join(part for part in parts if part)
    return descriptions


def returned_text(doc):
    heading = re.search(r"\n\s*Returns:\n", doc)
    return before_first(doc[heading.end() :], AFTER_DESCRIPTION[2:]).strip() if heading else None


def without_choices(text, name, argument):
    """Splits a description that ends with `(choices: [...])`. Returns the text before the choices, and the choices or None."""
    begins = re.search(r"\(choices:", text, re.IGNORECASE)
    if not begins or not text.rstrip().endswith(")"):
        return text, None
    try:
        choices = json.loads(text[begins.end() :].rstrip()[:-1].strip())
        choices = [choice.strip() if isinstance(choice, str) else choice for choice in choices]
    except (ValueError, TypeError):
        raise Failure(f"`{name}`: the argument `{argument}`: expected a list in JSON after `choices:`")
    return text[: begins.start()].strip(), choices


# ---- What the user has written ---------------------------------------------------------------------------------------------------------------


def load(path, kind):
    """Imports a function or a class, with the working directory on the path."""
    module, _, name = path.rpartition(".")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise Failure(f"no module `{error.name}` in {os.getcwd()}, nor among the packages of {sys.executable}")
        raise Failure(f"cannot import `{module}`: {described(error)}")
    except BaseException as error:
        raise Failure(f"cannot import `{module}`: {described(error)}")
    place = shown(getattr(imported, "__file__", None))
    if not hasattr(imported, name):
        raise Failure(f"the module `{module}` ({place}) has no {kind} `{name}`")
    value = getattr(imported, name)
    if not callable(value) or (kind == "function" and inspect.isclass(value)):
        raise Failure(f"`{name}` of the module `{module}` ({place}): expected a {kind}, found {type(value).__name__}")
    return value


def modules():
    """Returns the files of the imported modules that are in the working directory."""
    here = os.path.join(os.getcwd(), "")
    places = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return sorted({shown(place) for place in places if isinstance(place, str) and place.startswith(here) and "site-packages" not in place})


def shown(place):
    if not place:
        return "without a file"
    below = os.path.join(os.getcwd(), "")
    return place[len(below) :] if place.startswith(below) else place


def one_line(value):
    return " ".join(str(value).split())[:400]


def described(error):
    """Describes an exception in one line, with its last place in the user's code."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({shown(error.filename)}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    frames = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    place = f" ({shown(frames[-1].filename)}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    text = one_line(error)
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def is_user_code(file):
    return file != load.__code__.co_filename and not file.startswith("<frozen importlib") and file != importlib.__file__


def print_traceback(error):
    """Prints the traceback of an exception to the log, without the frames of this program."""
    whole = traceback.TracebackException(type(error), error, error.__traceback__)
    whole.stack = traceback.StackSummary.from_list([frame for frame in whole.stack if is_user_code(frame.filename)])
    print("".join(whole.format()), file=sys.stderr, end="", flush=True)


def methods_of(instance):
    """Returns the public methods of an instance in the order of their names, including inherited ones. They are read from the class, because
    reading them from the instance would compute its properties."""
    names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
    return [getattr(instance, name) for name in names if name not in NOT_TOOLS and not name.startswith("_")]


def text_of(result):
    """Returns a result as the model sees it: its `str`, or the texts of content blocks."""
    is_blocks = isinstance(result, list) and result and all(isinstance(part, dict) and part.get("type") == "text" for part in result)
    return "".join(str(part.get("text", "")) for part in result) if is_blocks else str(result)


# ---- Sessions --------------------------------------------------------------------------------------------------------------------------------


class Place:
    """An instance of an environment, and the thread that it runs on, or the main thread. A job may return a second function, its reply, which
    runs when the place no longer counts as running."""

    def __init__(self, has_thread, index=0):
        self.instance, self.index, self.running = None, index, 0
        self.jobs = queue.SimpleQueue() if has_thread else None
        if has_thread:
            threading.Thread(target=self.work, daemon=True).start()

    def run(self, job):
        if self.jobs is None:
            reply = job()
            return reply() if reply else None
        with LOCK:
            self.running += 1
        self.jobs.put(job)

    def work(self):
        for job in iter(self.jobs.get, None):
            reply = job()
            with LOCK:
                self.running -= 1
            if reply:
                reply()


class Kind:
    """An environment class, with its instances, which are reused."""

    def __init__(self, name, path, make, has_thread, report):
        self.name, self.path, self.make, self.has_thread, self.report = name, path, make, has_thread, report
        self.places, self.free = [], []
        place = self.take()
        self.construct(place)
        heapq.heappush(self.free, place.index)
        self.tools = [schema_of(method) for method in methods_of(place.instance)]
        members = dict(inspect.getmembers(type(place.instance), predicate=inspect.isfunction))
        if "reset" not in members:
            raise Failure(f"`{path}` has no method `reset`")
        self.reward = type(place.instance).__name__ if "get_reward" in members else None

    def take(self):
        """Returns the free place with the lowest index, or a new one. A row thus gets the same instance in each batch."""
        with LOCK:
            if self.free:
                return self.places[heapq.heappop(self.free)]
            place = Place(self.has_thread, len(self.places))
            self.places.append(place)
            return place

    def construct(self, place):
        """Creates the instance of a new place, on the place's thread."""
        done = queue.SimpleQueue()

        def make():
            try:
                place.instance = self.make()
                done.put(None)
            except BaseException as error:
                self.report(error)
                failure = Failure(f"`{self.path}()` raised {described(error)}")
                failure.__cause__ = error
                done.put(failure)

        place.run(make)
        failure = done.get()
        if failure:
            raise failure

    def give_back(self, place):
        """Frees a place. A place that is still running is replaced: its session was abandoned, and its job may never end."""
        with LOCK:
            if place.running > 0:
                place.jobs.put(None)
                self.places[place.index] = Place(self.has_thread, place.index)
            heapq.heappush(self.free, place.index)


class Worker:
    """The tools and the environments, with their sessions. `tools` are functions. An environment is a tuple of its name or None, what messages
    call it, and its class. `reply` takes each reply, on any thread."""

    def __init__(self, tools, environments, limit, reply):
        self.tools, self.limit, self.reply, self.sessions, self.loop = tools, limit, reply, {}, None
        self.main = Place(False)
        kinds = [Kind(name, path, make, not tools, self.report) for name, path, make in environments]
        self.kinds, self.is_named = {kind.name: kind for kind in kinds}, any(kind.name is not None for kind in kinds)
        self.schemas = [schema_of(tool) for tool in self.tools]

    def report(self, error):
        """Is called with each exception in the user's code."""
        print_traceback(error)

    def failed(self, error):
        """Is called with each exception that fails a request."""

    def known(self, files):
        """Returns the first reply."""
        kinds = [{"name": kind.name, "tools": kind.tools, "reward_name": kind.reward} for kind in self.kinds.values()]
        return {"id": 0, "files": files, "tools": self.schemas, "environments": kinds}

    def stop(self):
        """Ends the threads once they have finished their jobs."""
        for place in (place for kind in self.kinds.values() for place in kind.places if place.jobs is not None):
            place.jobs.put(None)
        with LOCK:
            if self.loop is not None:
                self.loop.call_soon_threadsafe(self.loop.stop)

    def take(self, request):
        """Takes a request; its reply may come later."""
        if "open" in request:
            self.open(request)
        elif "close" in request:
            self.close(request)
        else:
            place, _, tools = self.sessions[request["session"]]
            place.run(lambda: self.guarded(request, lambda: {"results": self.call(tools, request["calls"])}))

    def guarded(self, request, action):
        """Runs a request, and returns a function that replies with its result or its failure."""
        try:
            values = action()
        except Failure as failure:
            self.failed(failure.__cause__ or failure)
            values = {"error": str(failure)}
        except BaseException as error:
            self.report(error)
            self.failed(error)
            values = {"error": described(error)}
        return lambda: self.reply({"id": request["id"], **values})

    def open(self, request):
        row, kind, place = request["row"], None, self.main
        if self.kinds:
            name = row.get("environment") if self.is_named else None
            if name not in self.kinds:
                known = ", ".join(f"`{known}`" for known in self.kinds)
                message = f"expected one of the environments {known} in the column `environment`, found {one_line(repr(name))}"
                self.failed(Failure(message))
                return self.reply({"id": request["id"], "error": message})
            kind = self.kinds[name]
            place = kind.take()
        self.sessions[request["open"]] = (place, kind, {})
        place.run(lambda: self.guarded(request, lambda: self.reset(request, place, kind)))

    def reset(self, request, place, kind):
        """Resets the instance of a session. Returns its prompt and tools."""
        prompt, methods, schemas = None, [], list(self.schemas)
        if kind is not None:
            if place.instance is None:
                try:
                    place.instance = kind.make()
                except Exception as error:
                    self.report(error)
                    raise Failure(f"`{kind.path}()` raised {described(error)}") from error
            row = {name: value for name, value in request["row"].items() if not (self.is_named and name == "environment")}
            named = inspect.signature(place.instance.reset).parameters
            if "seed" in named and "seed" not in row:
                row["seed"] = request["seed"]
            prompt = self.prompt(kind, place.instance, row)
            methods, schemas = methods_of(place.instance), schemas + kind.tools
        self.sessions[request["open"]][2].update(divided(self.tools + methods))
        return {"prompt": prompt, "tools": schemas, "reward_name": kind.reward if kind else None}

    def prompt(self, kind, instance, row):
        try:
            prompt = instance.reset(**row)
            prompt = self.awaited(prompt) if inspect.isawaitable(prompt) else prompt
        except Exception as error:
            self.report(error)
            hint = ""
            if isinstance(error, TypeError) and "unexpected keyword" in str(error):
                hint = "; reset gets every column of the row: add **kwargs to its arguments"
            raise Failure(f"`{kind.path}.reset` raised {described(error)}{hint}") from error
        if prompt is None or isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list):
            return text_of(prompt)
        raise Failure(f"`{kind.path}.reset`: expected a text or None, found {type(prompt).__name__}")

    def call(self, tools, calls):
        """Calls tools, and returns the results; those of coroutines come after the others."""
        results, waiting = [], []
        for call in calls:
            name = call["name"]
            try:
                if name in tools["plain"]:
                    results.append(self.result(name, tools["plain"][name](**call["arguments"])))
                elif name in tools["coroutines"]:
                    waiting.append((name, tools["coroutines"][name](**call["arguments"])))
                else:
                    raise ValueError(f"Tool {name} not found.")
            except Exception as error:
                results.append(self.error(name, error))
        if waiting:
            names, started = zip(*waiting)
            for name, value in zip(names, self.awaited(gathered(started))):
                is_failed = isinstance(value, Exception)
                results.append(self.error(name, value) if is_failed else self.result(name, value))
        return results

    def result(self, name, value):
        return {"name": name, **self.cut(text_of(value))}

    def error(self, name, error):
        self.report(error)
        return {"name": name, "failed": True, **self.cut(str({"error": str(error)}))}

    def cut(self, text):
        """Returns the beginning of a text, and its size in bytes. Lone surrogates are replaced, since JSON in UTF-8 cannot have them."""
        whole = text.encode("utf-8", "replace")
        beginning = whole[: self.limit + 1] if len(whole) > self.limit else whole
        return {"content": beginning.decode("utf-8", "ignore"), "bytes": len(whole)}

    def awaited(self, coroutine):
        with LOCK:
            # The thread has ended if a coroutine exited the interpreter.
            if self.loop is None or not self.loop.is_running():
                self.loop, started = asyncio.new_event_loop(), threading.Event()
                self.loop.call_soon(started.set)
                threading.Thread(target=self.loop.run_forever, daemon=True).start()
                started.wait()
        return asyncio.run_coroutine_threadsafe(waited(coroutine), self.loop).result()

    def close(self, request):
        place, kind, _ = self.sessions.pop(request["close"], (self.main, None, None))
        if request.get("abandoned", False):
            if kind is not None:
                kind.give_back(place)
            return self.reply({"id": request["id"]})

        def finish():
            reply = self.guarded(request, lambda: {"reward": self.reward(kind, place.instance) if kind and kind.reward else None})

            def end():
                if kind is not None:
                    kind.give_back(place)
                reply()

            return end

        place.run(finish)

    def reward(self, kind, instance):
        try:
            reward = instance.get_reward()
            reward = self.awaited(reward) if inspect.isawaitable(reward) else reward
        except Exception as error:
            self.report(error)
            raise Failure(f"`{kind.path}.get_reward` raised {described(error)}") from error
        if reward is None:
            return None
        try:
            number = float(reward) if not isinstance(reward, (str, bytes)) else math.nan
        except Exception:
            number = math.nan
        if not math.isfinite(number):
            raise Failure(f"`{kind.path}.get_reward`: expected a finite number or None, found {one_line(repr(reward))[:80]}")
        return number


# Guards the replies, and the lists of free instances, to which threads return theirs.
LOCK = threading.RLock()


async def waited(coroutine):
    return await coroutine


async def gathered(coroutines):
    return await asyncio.gather(*coroutines, return_exceptions=True)


def divided(tools):
    """Divides tools into plain functions and coroutine functions, each by name; of two tools with one name the last counts."""
    by_kind = {"plain": {}, "coroutines": {}}
    for tool in tools:
        by_kind["coroutines" if inspect.iscoroutinefunction(tool) else "plain"][tool.__name__] = tool
    return by_kind


def take_pipes():
    """Returns standard input and output of this process as files, and gives the tools an empty input and standard error."""
    lines = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)
    return lines, replies


def read_ahead(lines):
    """Returns a queue of the lines, with None after the last. Some seconds after the last line the program ends, even if a call still runs."""
    read = queue.SimpleQueue()

    def run():
        for line in lines:
            read.put(line)
        read.put(None)
        time.sleep(LEFT_AFTER_INPUT)
        os._exit(1)

    threading.Thread(target=run, daemon=True).start()
    return read


def relay(lines, replies, asked):
    """Passes requests on to the trainer's process, and its replies back, until the input ends."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(os.environ["RLHF_DRIVER"])
    except (KeyError, OSError):
        raise Failure("expected the process of the trainer, whose functions and classes these are; train(resume_from_checkpoint=True) resumes there")
    has_ended = threading.Event()

    def pass_on():
        for line in lines:
            connection.sendall(line)
        has_ended.set()
        connection.shutdown(socket.SHUT_WR)

    connection.sendall(json.dumps({"environments": asked}).encode() + b"\n")
    threading.Thread(target=pass_on, daemon=True).start()
    for line in connection.makefile("rb"):
        replies.buffer.write(line)
        replies.buffer.flush()
    if not has_ended.is_set():
        sys.exit("the process of the trainer is gone")


def main():
    lines, replies = take_pipes()

    def reply(value):
        if os.getpid() != PROCESS:
            os._exit(0)
        with LOCK:
            replies.write(f"{json.dumps(value)}\n")
            replies.flush()

    try:
        asked = json.loads(lines.readline())
        if "driver" in asked:
            return relay(lines, replies, asked)
        sys.path.insert(0, os.getcwd())
        tools = [load(path, "function") for path in asked["tools"]]
        environments = [(name, path, load(path, "class")) for name, path in asked["environments"]]
        worker = Worker(tools, environments, asked["limit"], reply)
    except Failure as failure:
        return reply({"id": 0, "error": str(failure)})
    reply(worker.known(modules()))
    for line in iter(read_ahead(lines).get, None):
        with LOCK:
            request = json.loads(line)
        worker.take(request)


if __name__ == "__main__":
    main()
