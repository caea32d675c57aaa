"""`rlhf demo`: movie reviews learn to be positive, by SFT, a reward model and PPO, in three minutes on two cores.

The data, the tokenizer, the settings and the judge are those of examples/sentiment, with half of PPO's updates.
"""

import contextlib
import importlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rlhf import _launch, _libtorch, _setup, _start
from rlhf._places import PACKAGE, Failure, Usage, short

FILES = Path(PACKAGE) / "_sentiment"
# In place of settings of the long demo (examples/sentiment): half of its updates of PPO. With fewer epochs of SFT, PPO costs the
# grammar more than the verdict allows.
SHORTER: dict[str, dict[str, str]] = {"ppo": {"total_episodes": "1024"}}


def main(arguments: list[str]) -> int:
    parser = _setup.Parser(
        prog="rlhf demo",
        description="Movie reviews learn to be positive: a model of 4 million parameters is trained from random weights by SFT, a reward "
        "model learns what is preferred, and PPO trains the one against the other. Takes three minutes on two cores.",
        allow_abbrev=False,
    )
    parser.add_argument("--keep", metavar="FOLDER", help="keep the models and the report in this folder, which must be new or empty")
    parser.add_argument("--seed", type=int, default=1, help="seed of the run (default: 1)")
    options = parser.parse_args(arguments)
    _launch.note_other_distribution()
    libtorch = _libtorch.find() or _setup.at_first_use()
    program = _start.prepared(libtorch)
    with folder_of(options.keep) as folder:
        demo = Demo(program, _start.environment(libtorch), folder, options.seed)
        demo.train()
        good = demo.conclude()
        end(folder if options.keep else None)
    return 0 if good else 1


@contextlib.contextmanager
def folder_of(keep: str | None) -> Iterator[Path]:
    """The folder of the run: the one that is kept, or one that is removed in the end."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="rlhf-demo-") as temporary:
            yield Path(temporary)
        return
    folder = Path(keep)
    if folder.exists() and not folder.is_dir():
        raise Usage(f"--keep {keep}: expected a folder, found a file")
    if folder.exists() and any(folder.iterdir()):
        raise Usage(f"--keep {keep}: expected a new or an empty folder, found other files in it")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder.resolve()


class Demo:
    """One run of the demo."""

    def __init__(self, program: str, environment: dict[str, str], folder: Path, seed: int) -> None:
        self.program = program
        self.environment = environment
        self.folder = folder
        self.seed = str(seed)
        self.seconds: dict[str, int] = {}

    def train(self) -> None:
        data = FILES / "data"
        self.stage(
            "sft",
            "1/3 SFT: a small GPT-NeoX learns to write reviews, from random weights",
            config_name=FILES / "model.json",
            tokenizer_name=FILES / "tokenizer",
            dataset_name=data / "sft.jsonl",
        )
        self.stage(
            "reward",
            "2/3 Reward model: it learns from 1500 pairs that positive reviews are preferred",
            model_name_or_path=self.folder / "sft",
            dataset_name=data / "preferences.jsonl",
            eval_dataset_name=data / "preferences_test.jsonl",
        )
        self.responses("sft", "before")
        self.stage(
            "ppo",
            "3/3 PPO: the model of stage 1 responds to prompts and learns from the scores of the reward model",
            sft_model_path=self.folder / "sft",
            reward_model_path=self.folder / "reward",
            dataset_name=data / "prompts.jsonl",
        )
        self.responses("ppo", "after")

    def stage(self, name: str, about: str, **paths: Path) -> None:
        """Runs a command with the settings of the example; paths in them are those of a checkout, and are given anew."""
        flags = {
            **{key: str(path) for key, path in paths.items()},
            **SHORTER.get(name, {}),
            "output_dir": str(self.folder / name),
            "seed": self.seed,
        }
        print(f"\n== {about}", flush=True)
        begin = time.monotonic()
        self.run(name, "--config", str(FILES / f"{name}.yaml"), *(word for key, value in flags.items() for word in (f"--{key}", value)))
        self.seconds[name] = round(time.monotonic() - begin)

    def responses(self, model: str, name: str) -> None:
        """Has a model respond to the held-out prompts."""
        self.run(
            "generate",
            "--model_name_or_path",
            str(self.folder / model),
            "--dataset_name",
            str(FILES / "data/prompts_test.jsonl"),
            "--output_file",
            str(self.folder / f"{name}.jsonl"),
            "--max_new_tokens",
            "48",
            "--temperature",
            "0.7",
            "--seed",
            self.seed,
            "--batch_size",
            "32",
            quiet=True,
        )

    def run(self, *arguments: str, quiet: bool = False) -> None:
        # What a silent command writes is shown where it fails.
        done = subprocess.run(["rlhf", *arguments], executable=self.program, env=self.environment, check=False, capture_output=quiet)
        if done.returncode:
            if quiet:
                sys.stderr.buffer.write(done.stderr)
            raise Failure(f"demo: rlhf {arguments[0]} failed with exit code {done.returncode}, for the reason above")

    def conclude(self) -> bool:
        """Prints the verdict; returns whether it is good."""
        (self.folder / "timings.tsv").write_text("".join(f"{name}\t{value}\n" for name, value in self.seconds.items()))
        sys.path.insert(0, str(FILES))
        summary = importlib.import_module("summary")
        found = summary.summarise(self.folder)
        print()
        print(summary.on_terminal(found), end="")
        return bool(summary.is_good(found))


def end(kept: Path | None) -> None:
    """Says where the report is, and what to try next."""
    if kept is None:
        print("The models and the reports were in a temporary folder, which is removed now.")
        commands = [
            ("rlhf demo --keep demo", "the same, and keeps the models and the report"),
            ("rlhf doctor", "examines this installation"),
            ("rlhf sft --help", "a model and data of yours"),
        ]
    else:
        shown = os.path.relpath(kept) if kept.is_relative_to(Path.cwd()) else short(str(kept))
        print(f"Report: {shown}/ppo/report.html")
        quoted = shlex.quote(shown) if not shown.startswith("~") else shown
        commands = [
            (f'rlhf generate --model_name_or_path {quoted}/ppo "This thriller"', "a review of the trained model"),
            (f"rlhf watch {quoted}/ppo", "the report in a browser"),
            ("rlhf sft --help", "a model and data of yours"),
        ]
    print("\nTry next:")
    width = max(len(command) for command, _ in commands)
    narrow = width + 4 > shutil.get_terminal_size((100, 24)).columns // 2
    for command, about in commands:
        print(f"  {command}  # {about}" if narrow else f"  {command:{width}}  # {about}")
