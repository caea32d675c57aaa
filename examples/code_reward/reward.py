"""A reward program: runs the unit tests of each row on the Python code of the response, in a child process with limits.

    rlhf ppo ... --reward_command "python3 examples/code_reward/reward.py"

The score is the fraction of `row["tests"]` that pass; a test is a text of Python that raises nothing, such as `assert f(2) == 4`. A
response without tests in its row has no score (null). README.md says what the limits cannot prevent.
"""

import argparse
import json
import os
import re
import resource
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time

MIB = 1 << 20
# How much a run may print; the rest ends it.
MAX_OUTPUT = 64 << 10

# Runs in the child. Each test that passes prints a line with the token, so that no output of the tested code counts by accident. Code that
# looks for the token or for the tests in this process finds them: see README.md.
RUNNER = """
import json, os, sys
given = json.load(sys.stdin)
say, token = os.fdopen(os.dup(1), "w"), given["token"]
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
def report(number, write=say.write, flush=say.flush, token=token):
    write(f"{token} {number}\\n"); flush()
space = {"__name__": "answer"}
exec(compile(given["code"], "answer.py", "exec"), space)
for number, test in enumerate(given["tests"]):
    try:
        exec(compile(test, f"test {number}", "exec"), space)
    except Exception:
        continue
    report(number)
"""


def code_of(text):
    """Returns the last fenced block of a text, or the text without one."""
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", text, re.DOTALL)
    return blocks[-1] if blocks else text


def limit(settings, user):
    """Sets the limits of the child, and its user, before it loads any code of the response."""
    os.umask(0o077)
    seconds = max(1, int(settings.timeout + 0.999))
    for kind, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, settings.memory * MIB),
        (resource.RLIMIT_FSIZE, settings.file_size * MIB),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, settings.processes),
    ):
        resource.setrlimit(kind, (value, value))
    if user is not None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)


def new_user():
    """Returns a user number for one child. The kernel counts the processes of a user together, and does not limit those of root."""
    return 200_000 + secrets.randbelow(100_000)


def interpreters():
    """Returns the ways to start Python, the best first: an interpreter, and whether the child gets a user of its own."""
    own = [(sys.executable, True), ("/usr/bin/python3", True)] if os.getuid() == 0 else []
    return [*own, (sys.executable, False)]


def isolation():
    """Returns the command that starts the child without a network and, if possible, with processes of its own.

    An empty list means that the kernel allows no user and network namespaces.
    """
    if shutil.which("unshare") is None:
        return []
    own_processes = ["--pid", "--fork", "--kill-child"]
    for flags in (["--ipc", *own_processes], own_processes, []):
        command = ["unshare", "--user", "--net", *flags]
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return command
    return []


def run(code, tests, settings, prefix, interpreter):
    """Returns the numbers of the tests that pass."""
    python, own_user = interpreter
    token, user = secrets.token_hex(16), new_user() if own_user else None
    given = json.dumps({"code": code, "tests": tests, "token": token}).encode()
    with tempfile.TemporaryDirectory(prefix="answer-") as folder:
        if user is not None:
            os.chown(folder, user, user)
        child = subprocess.Popen(
            [*prefix, python, "-I", "-S", "-c", RUNNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LC_ALL": "C.UTF-8"},
            start_new_session=True,
            preexec_fn=lambda: limit(settings, user),
        )
        try:
            output = talk(child, given, settings.timeout)
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.stdout.close()
            child.wait()
    found = re.findall(rf"^{token} (\d+)$", output.decode(errors="replace"), re.MULTILINE)
    return {int(number) for number in found if int(number) < len(tests)}


def talk(child, given, timeout):
    """Sends the input and returns what the child prints, at most MAX_OUTPUT bytes and until the time is over."""
    end = time.monotonic() + timeout
    output = b""
    os.set_blocking(child.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        selector.register(child.stdin, selectors.EVENT_WRITE)
        while len(output) < MAX_OUTPUT and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is child.stdin:
                    try:
                        given = given[os.write(key.fd, given[: 1 << 16]) :]
                    except BrokenPipeError:
                        given = b""
                    if not given:
                        selector.unregister(child.stdin)
                        child.stdin.close()
                    continue
                read = os.read(key.fd, 1 << 16)
                if not read:
                    return output
                output += read
    if not child.stdin.closed:
        child.stdin.close()
    return output


def score(line, settings, prefix, interpreter):
    """Returns the fraction of tests that pass, or None without tests."""
    tests = line["row"].get(settings.column)
    tests = [tests] if isinstance(tests, str) else tests
    if not tests:
        return None
    return len(run(code_of(line["response"]), tests, settings, prefix, interpreter)) / len(tests)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--column", default="tests", help="column of the tests: a text, or a list of them")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds for all tests of a response")
    parser.add_argument("--memory", type=int, default=512, help="address space of a process in MiB")
    parser.add_argument("--file_size", type=int, default=1, help="size of a file in MiB")
    parser.add_argument("--processes", type=int, default=16, help="processes of a child; without root, of this user")
    parser.add_argument("--require_isolation", action="store_true", help="end with an error if the network cannot be cut off")
    settings = parser.parse_args()
    prefix = isolation()
    if not prefix:
        message = "the kernel allows no user and network namespaces: generated code can use the network of this machine"
        if settings.require_isolation:
            sys.exit(f"error: {message}")
        print(f"warning: {message}", file=sys.stderr, flush=True)
    works = (interpreter for interpreter in interpreters() if run("", ["pass"], settings, prefix, interpreter))
    if (interpreter := next(works, None)) is None:
        sys.exit("error: Python does not run within the limits")
    if os.getuid() == 0 and not interpreter[1]:
        message = "no Python that other users can read: generated code runs as root, and its processes are not limited"
        print(f"warning: {message}", file=sys.stderr, flush=True)
    for line in sys.stdin:
        print(json.dumps({"score": score(json.loads(line), settings, prefix, interpreter)}), flush=True)


if __name__ == "__main__":
    main()
