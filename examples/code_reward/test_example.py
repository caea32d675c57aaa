"""Tests of reward.py: python3 examples/code_reward/test_example.py"""

import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import reward

TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
GOOD = "def add(a, b):\n    return a + b\n"
SLOW = ["--timeout", "1.5"]


def ask(responses, arguments=(), tests=TESTS):
    """Returns the scores of the program, and its standard error."""
    lines = [{"response": text, "row": {"tests": tests}, "left": 0} for text in responses]
    program = [sys.executable, str(HERE / "reward.py"), *arguments]
    given = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run(program, input=given, capture_output=True, text=True, timeout=60, check=True)
    return [json.loads(line)["score"] for line in done.stdout.splitlines()], done.stderr


class CodeReward(unittest.TestCase):
    def test_the_score_is_the_fraction_of_tests_that_pass(self):
        text = f"Here it is:\n```python\n{GOOD}```\nDone."
        wrong = "def add(a, b):\n    return 3\n"
        scores, _ = ask([GOOD, text, wrong, "def add(a, b)", "raise SystemExit", "print('noise')\n" + GOOD, ""])
        self.assertEqual(scores, [1.0, 1.0, 0.5, 0.0, 0.0, 1.0, 0.0])

    def test_a_row_without_tests_has_no_score(self):
        self.assertEqual(ask([GOOD], tests=[])[0], [None])

    def test_endless_work_ends_with_the_time(self):
        began = time.monotonic()
        scores, _ = ask(["while True: pass", "import time\ntime.sleep(100)", GOOD], SLOW)
        self.assertEqual(scores, [0.0, 0.0, 1.0])
        self.assertLess(time.monotonic() - began, 15)

    def test_memory_is_limited(self):
        self.assertEqual(ask(["x = bytearray(2 << 30)\n" + GOOD, GOOD], SLOW)[0], [0.0, 1.0])

    def test_processes_are_limited_and_none_is_left(self):
        # Counts the processes that it can start, which sleep, so that the machine is not loaded if the limit does not hold.
        bomb = (
            "import os, time\ncount = 0\nwhile count < 200:\n    try:\n        if os.fork() == 0: time.sleep(30)\n"
            "        count += 1\n    except OSError: break\n" + GOOD.replace("a + b", "a + b if count < 100 else None")
        )
        mark = f"mark{os.getpid()}"
        left = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)', '{mark}'])\n" + GOOD
        scores, errors = ask([bomb, left, GOOD], [*SLOW, *([] if os.getuid() == 0 else ["--processes", "4000"])])
        limited = os.getuid() == 0 and "not limited" not in errors
        self.assertEqual((scores[0], scores[2]), (1.0 if limited else scores[0], 1.0))
        time.sleep(0.2)
        names = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        self.assertFalse([name for name in names if mark.encode() in name and b"-c\0import time" in name])

    def test_the_network_is_cut_off(self):
        if not reward.isolation():
            self.skipTest("the kernel allows no user and network namespaces")
        import socket

        with socket.create_server(("127.0.0.1", 0)) as server:
            code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)\n" + GOOD
            self.assertEqual(ask([code, GOOD], SLOW)[0], [0.0, 1.0])

    def test_files_are_small_and_do_not_stay(self):
        large = "open('large', 'wb').write(bytes(8 << 20))\n" + GOOD
        many = "files = [open(f'{i}', 'w') for i in range(100)]\n" + GOOD
        small = "open('small', 'w').write('x')\n" + GOOD
        before = set(Path(tempfile.gettempdir()).glob("answer-*"))
        self.assertEqual(ask([large, many, small], SLOW)[0], [0.0, 0.0, 1.0])
        self.assertEqual(set(Path(tempfile.gettempdir()).glob("answer-*")) - before, set())

    def test_output_is_not_read_without_end(self):
        flood = "import os\nwhile True: os.write(1, b'x' * 65536)\n"
        raw = "import os\nfor fd in range(3, 32):\n    try:\n        while True: os.write(fd, b'x' * 65536)\n    except OSError: pass\n"
        self.assertEqual(ask([flood, raw, GOOD], SLOW)[0], [0.0, 0.0, 1.0])

    def test_the_environment_is_empty(self):
        code = "import os\nassert not [name for name in os.environ if 'SECRET' in name]\n" + GOOD
        os.environ["MY_SECRET"] = "x"
        try:
            self.assertEqual(ask([code])[0], [1.0])
        finally:
            del os.environ["MY_SECRET"]

    def test_printing_a_result_is_not_passing(self):
        fake = "print('0\\n1')\nimport sys\nfor i in range(2): print(i, file=sys.stderr)\n"
        self.assertEqual(ask([fake])[0], [0.0])


if __name__ == "__main__":
    unittest.main()
