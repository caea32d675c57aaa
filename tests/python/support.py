"""What the tests of the Python package share: the program, tiny models and rows."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
import urllib.request
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ROOT / "tests" / "golden" / "models"
POLICY = str(MODELS / "gpt_neox")
REWARD = str(MODELS / "gpt_neox_cls")
PROMPTS = [{"prompt": f"w{number} it", "answer": str(number)} for number in range(8)]
TEXTS = [{"text": f"w{number} it is {number}"} for number in range(12)]
PAIRS = [{"prompt": f"w{number}", "chosen": " it is", "rejected": f" {number}"} for number in range(12)]
# Small enough for a second; `num_sample_generations` = 0 as each table calls the reward.
ROLLOUTS = {
    "per_device_train_batch_size": 4,
    "num_sample_generations": 0,
    "max_completion_length": 5,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "save_strategy": "no",
    "no_report": True,
    "num_threads": 1,
}


def use(program):
    """Makes the package start a program, and importable from the checkout."""
    os.environ["RLHF_PROGRAM"] = str(Path(program).resolve())
    os.environ["OMP_NUM_THREADS"] = "1"
    python = str(ROOT / "python")
    sys.path.insert(0, python)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [python, os.environ.get("PYTHONPATH")]))


def grpo(output, **more):
    """Settings of a short run of GRPO."""
    import rlhf

    return rlhf.GRPOConfig(str(output), **{"num_generations": 2, **ROLLOUTS, **more})


def ppo(output, **more):
    """Settings of a short run of PPO."""
    import rlhf

    rest = {name: value for name, value in ROLLOUTS.items() if name not in ("max_completion_length", "max_steps")}
    return rlhf.PPOConfig(str(output), **{"response_length": 5, "num_ppo_epochs": 1, **rest, **more})


def supervised(config, output, **more):
    """Settings of a short run of SFT or of a reward model."""
    settings = {
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "no_report": True,
        "num_threads": 1,
    }
    return config(str(output), **{**settings, **more})


def brief(completions, **kwargs):
    """A reward that prefers short responses."""
    return [-float(len(text)) for text in completions]


def lines(folder):
    """The metrics of a run, without its times."""
    text = (Path(folder) / "metrics.jsonl").read_text()
    return [untimed(json.loads(line)) for line in text.splitlines()]


def untimed(metrics):
    """Metrics without those that a clock decides, and without the names that the package adds."""
    clocks = ("time/", "tokens_per_second/", "memory/")
    added = ("learning_rate", "epoch") if "episode" in metrics else ()
    return {
        name: value for name, value in metrics.items() if not name.startswith(clocks) and name not in ("eps", "step_time", "time", *added)
    }


# In place of the settings of real runs.
SHORT = {"per_device_train_batch_size": 4, "num_threads": 1, "num_sample_generations": 0, "num_generations": 2}


def short(kind):
    """A configuration whose runs are short, whatever a page sets."""
    made = kind.__init__

    def init(self, *args, **named):
        made(self, *args, **named)
        length = {"total_episodes": 4} if kind.__name__ == "PPOConfig" else {"max_steps": 2}
        if getattr(self, "preset", None) == "deepspeed-chat":
            # Its 256 are more than the tiny models' context.
            length["max_prompt_length"] = 48
        for name, value in {**SHORT, **length, "max_completion_length": 5, "response_length": 5}.items():
            if name in kind.__dataclass_fields__:
                setattr(self, name, value)

    return mock.patch.object(kind, "__init__", init)


def short_runs():
    """Within it, all configurations are those of short runs."""
    import rlhf

    stack = contextlib.ExitStack()
    supervised = (rlhf.SFTConfig, rlhf.RewardConfig, rlhf.DPOConfig, rlhf.DistillationConfig, rlhf.GKDConfig)
    for kind in (*supervised, rlhf.PPOConfig, rlhf.GRPOConfig, rlhf.RLOOConfig):
        stack.enter_context(short(kind))
    return stack


# A token that the hub of `hub()` knows.
HUB_TOKEN = "hf_of_me"


@contextlib.contextmanager
def hub():
    """The hub of tests/hub in place of the real one; gives a function that reads its routes."""
    server = subprocess.Popen([sys.executable, ROOT / "tests/hub/server.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    url = server.stdout.readline().split()[-1]

    def call(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(url + path, data=data)) as response:
            return json.load(response)

    call("/_set", {"users": {HUB_TOKEN: {"name": "me", "orgs": []}}})
    try:
        with mock.patch.dict(os.environ, HF_ENDPOINT=url):
            for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
                os.environ.pop(name, None)
            yield call
    finally:
        server.kill()
        server.communicate()


# The version whose runs are in tests/golden, where the environment of the tests has a newer one; and what it imports beside.
TRL = "trl-1.11.0"
OF_TRL = ("trl==1.11.0", "requests", "urllib3", "certifi", "charset-normalizer")


def trl_of_the_goldens():
    """A folder with TRL 1.11 to import from, filled from a package index the first time; None where no index has it."""
    cache = Path(os.environ.get("RLHF_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf")
    folder = cache / TRL
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        part = tempfile.mkdtemp(prefix=f"{TRL}.part-", dir=cache)
        options = ["--quiet", "--no-deps", "--no-input", "--retries", "0", "--timeout", "30", "--no-compile", "--target", part]
        done = subprocess.run([sys.executable, "-m", "pip", "install", *options, *OF_TRL], capture_output=True, text=True)
        if done.returncode:
            print(f"pip: {done.stderr.strip()[-300:]}", file=sys.stderr)
            shutil.rmtree(part)
            return None
        with contextlib.suppress(OSError):
            os.rename(part, folder)
        shutil.rmtree(part, ignore_errors=True)
    return folder


class Case(unittest.TestCase):
    """A test with a folder, in which the package's output is kept from the terminal."""

    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="rlhf-test-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.out, self.err = io.StringIO(), io.StringIO()
        stack = contextlib.ExitStack()
        stack.enter_context(contextlib.redirect_stdout(self.out))
        stack.enter_context(contextlib.redirect_stderr(self.err))
        self.addCleanup(stack.close)

    def bytes_of(self, folder, name="model.safetensors"):
        return (Path(folder) / name).read_bytes()


def main(doc):
    """Runs the tests of a file: `FILE PROGRAM [unittest's arguments]`."""
    if len(sys.argv) < 2:
        sys.exit(doc)
    use(sys.argv.pop(1))
    # A shell starts jobs in the background with Ctrl-C ignored, which the programs of the tests would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    unittest.main(module="__main__", verbosity=1)
